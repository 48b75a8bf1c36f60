"""What the page asks: one sample for a model, as numbers, as an .npy file, or random.

    {"model": "mnist_dp", "data": [0.0, 0.0, 0.61, ...]}         every value of the only input, row by row
    {"model": "resnet20", "data": {"npy": "k05VTVBZAQB2AH..."}}   base64 of a file that numpy.save wrote
    {"model": "encoder", "data": "random"}                       of the right shapes and types, by this node

Nothing is taken from a file but numbers: no pickle, and its header must fit the model before any memory is set aside.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from dataclasses import dataclass
from math import prod
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.plan import Plan, TensorSpec

Arrays = dict[str, NDArray[Any]]
#: Headers of plain arrays have about 100 characters.
_MAX_HEADER: Final = 1024
_MAX_NAME: Final = 256
_READERS: Final = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
_NO_HEADER = (ValueError, TypeError, SyntaxError, TokenError, RecursionError, MemoryError, OverflowError)


@dataclass(frozen=True, slots=True)
class PageQuery:
    """A request of the page, before the model is known.

    Attributes:
        model: its name.
        data: numbers, {"npy": base64} or "random".
    """

    model: str
    data: Any

    @classmethod
    def parse(cls, body: bytes | bytearray) -> PageQuery:
        """Read a request.

        Raises:
            InputError: it is no such thing.
        """
        try:
            found = json.loads(body, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            raise InputError("expected JSON with the keys model and data") from None
        if not isinstance(found, dict) or set(found) != {"model", "data"} or not isinstance(found["model"], str):
            raise InputError("expected the keys model, a name, and data")
        if len(found["model"]) > _MAX_NAME:
            raise InputError(f"a model's name has at most {_MAX_NAME} characters")
        return cls(found["model"], found["data"])

    def inputs(self, plan: Plan) -> Arrays:
        """Return one sample, shape (1, *shape) for every input of the plan.

        Raises:
            InputError: the data don't fit the model.
        """
        if self.data == "random":
            return {spec.name: _random(spec) for spec in plan.inputs}
        if len(plan.inputs) != 1:
            raise InputError(
                f"this model has {len(plan.inputs)} inputs, and a file holds one: ask it with random values"
            )
        spec = plan.inputs[0]
        if isinstance(self.data, list):
            return {spec.name: _from_numbers(self.data, spec)}
        if isinstance(self.data, dict) and set(self.data) == {"npy"} and isinstance(self.data["npy"], str):
            try:
                content = base64.b64decode(self.data["npy"], validate=True)
            except (binascii.Error, ValueError):
                raise InputError("the file did not arrive as base64") from None
            return {spec.name: read_npy(content, spec)}
        raise InputError('data: expected a list of numbers, {"npy": base64} or "random"')


def read_npy(content: bytes, spec: TensorSpec) -> NDArray[Any]:
    """Read an .npy file that holds one sample of an input.

    Args:
        content: the file.
        spec: the input; the file's shape is its shape, with or without a leading 1.

    Returns:
        The input's type, shape (1, *shape).

    Raises:
        InputError: it is no .npy file of numbers, or does not fit.
    """
    file = io.BytesIO(content)
    try:
        version = npy.read_magic(file)
        reader = _READERS[version]
        shape, by_columns, dtype = reader(file, max_header_size=_MAX_HEADER)
    except KeyError:
        raise InputError(f"the file is of .npy version {version}, expected 1.0 or 2.0: save plain numbers") from None
    except _NO_HEADER:
        raise InputError("this is no .npy file: write one with numpy.save") from None
    if shape not in (spec.shape, (1, *spec.shape)):
        raise InputError(f"the file's shape is {shape}, expected {spec.shape} or {(1, *spec.shape)}: one sample")
    if dtype.kind not in "biuf" or not np.can_cast(dtype, spec.dtype, "same_kind"):
        raise InputError(f"the file holds {dtype.name}, expected {spec.dtype} or what converts to it")
    count, start = prod(shape), file.tell()
    if len(content) - start != count * dtype.itemsize:
        raise InputError(f"the file has {len(content) - start} bytes of values, expected {count * dtype.itemsize}")
    values = np.frombuffer(content, dtype, count, start).reshape(shape, order="F" if by_columns else "C")
    return _convert(values, spec)


def _from_numbers(numbers: list[Any], spec: TensorSpec) -> NDArray[Any]:
    count = prod(spec.shape)
    if len(numbers) != count:
        raise InputError(f"expected {count} numbers for shape {spec.shape}, found {len(numbers)}")
    if not all(type(x) in (int, float) for x in numbers):
        raise InputError("expected numbers only")
    try:
        values = np.array(numbers, np.float64)
    except OverflowError:
        raise InputError("a number is too large") from None
    if np.dtype(spec.dtype).kind != "f":
        raise InputError(f"this model takes {spec.dtype}: send an .npy file of that type")
    return _convert(values, spec)


def _convert(values: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
    """Convert to the input's type; what becomes infinite is refused with what is not finite to begin with."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.ascontiguousarray(values).astype(spec.dtype).reshape(1, *spec.shape)
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        raise InputError("a value is not finite, or too large for the model's type; nothing was sent")
    return found


def _random(spec: TensorSpec) -> NDArray[Any]:
    """Values in [0, 1), or of 0 and 1: they are there to be seen, not to be secret."""
    shape, dtype = (1, *spec.shape), np.dtype(spec.dtype)
    draw = np.random.default_rng()
    return draw.random(shape).astype(dtype) if dtype.kind == "f" else draw.integers(0, 2, shape).astype(dtype)


def _refuse_constant(_: str) -> Any:
    raise ValueError("NaN and Infinity are no JSON")
