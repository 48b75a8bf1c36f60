"""Check a model's constants: sizes that fit their data, element types that exist.

requires  a model that was read, external data included
ensures   every constant can be made an array; nothing is allocated for a size that is only declared
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import Message
from onnx import TensorProto, numpy_helper

from heinfer.errors import Offence


def check_tensors(proto: onnx.ModelProto) -> list[Offence]:
    """Return what stands against the constants of a model, one offence each."""
    offences = []
    for where, tensor in _tensors(proto):
        problem = _problem(tensor)
        if problem is not None:
            offences.append(Offence(tensor.name or where, "constant", problem))
    return offences


def has_text(message: Message) -> bool:
    """Return whether all strings in a message are text: protobuf hands out others as bytes, or raises when asked."""
    try:
        fields = message.ListFields()
    except UnicodeDecodeError:
        return False
    for field, value in fields:
        values: Iterable[Any] = [value] if isinstance(value, (str, bytes, Message)) else value
        if field.type == field.TYPE_STRING and not all(isinstance(text, str) for text in values):
            return False
        if field.type == field.TYPE_MESSAGE and not all(has_text(part) for part in values):
            return False
    return True


def put_inputs(graph: onnx.GraphProto, initialisers: Mapping[str, tuple[int, Sequence[int]]]) -> None:
    """Put inputs in place of initialisers, each of an element type and a shape, where there are none of their names."""
    left = [tensor for tensor in graph.initializer if tensor.name not in initialisers]
    inputs = {value.name for value in graph.input}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(name, kind, shape)
        for name, (kind, shape) in initialisers.items()
        if name not in inputs
    )
    del graph.initializer[:]
    graph.initializer.extend(left)


def uses_external_data(proto: onnx.ModelProto) -> bool:
    """Return whether data of a model lie in other files."""
    return any(tensor.data_location == TensorProto.EXTERNAL for _, tensor in _tensors(proto))


def _tensors(proto: onnx.ModelProto) -> Iterator[tuple[str, TensorProto]]:
    """Yield all dense constants, each with a name for those that have none."""
    yield from (("initializer", tensor) for tensor in proto.graph.initializer)
    for node in (*proto.graph.node, *(n for f in proto.functions for n in f.node)):
        for attribute in node.attribute:
            where = f"{node.name or node.op_type}.{attribute.name}"
            if attribute.HasField("t"):
                yield where, attribute.t
            yield from ((where, tensor) for tensor in attribute.tensors)


def _problem(tensor: TensorProto) -> str | None:
    if any(size < 0 for size in tensor.dims):
        return f"its shape {tuple(tensor.dims)} has a negative size"
    try:
        kind = ir.DataType(tensor.data_type)
    except ValueError:
        return f"element type {tensor.data_type} does not exist"
    if kind is ir.DataType.UNDEFINED:
        return "its element type is not given"
    if not tensor.HasField("raw_data"):
        return _problem_of_fields(tensor)
    if kind is ir.DataType.STRING:
        return "strings can't be raw data"
    expected = -(-prod(tensor.dims) * kind.bitwidth // 8)
    if len(tensor.raw_data) != expected:
        return f"its shape {tuple(tensor.dims)} takes {expected} bytes, found {len(tensor.raw_data)}"
    return None


def _problem_of_fields(tensor: TensorProto) -> str | None:
    try:
        numpy_helper.to_array(tensor)
    except Exception as error:  # whatever onnx and numpy find wrong with it
        return f"its values don't fit its shape {tuple(tensor.dims)} and type: {error}"
    return None
