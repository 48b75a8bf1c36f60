"""What the node alone knows of a deep block: ranges, the calibration of its outputs, what calibration data showed.

    x / input range --> server --> v --(times output range)--> y --(gain, offset by channel)--> result, error bound

Ranges come from calibration data and never from a query, so the scale at which a query is encrypted says nothing of it.
The affine calibration at the end takes back what polynomials do wrong on average. `low` and `high` are the range guard:
outputs outside are counted, since a polynomial explodes outside the interval that it was fitted on.

An error bound is that of `heinfer.plan.deep_noise`, an array made when the model was partitioned; a sample of which
an input or an output lies outside has none, NaN. Unless it holds always, it supposes that values inside the block stay
within their ranges too. It is the distance from the block's polynomials in the clear, with the weights of the model,
and calibrated alike. Where the model itself has these polynomials, as in x * x, there is nothing to calibrate, and it
is the distance from the model. Worked example: a range of 40, an error of 1e-5 of it, a gain of 1.1 and a result of 30
make 40 * 1e-5 * 1.1 + 2**-24 * 30 = 4.4e-4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.plan.deep import DeepBlock
from heinfer.ring import FLOAT32_ROUNDING

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
#: Largest input, in ranges. Slots share what carries them: where one goes far astray, the others of its upload lose
#: their precision, and SEAL's encoder refuses what no prime can hold, which would show outside.
LARGEST_INPUT: Final = 2.0


@dataclass(frozen=True, slots=True)
class DeepOutput:
    """One output; arrays of its shape.

    Attributes:
        range: that the server's values are multiplied by.
        gain: then, of the calibration.
        offset: then added.
        low: smallest value of the channel in calibration.
        high: largest.
        error: bound of the error of y, for samples whose values stay within the calibrated ranges (`DeepTerms.always`).
    """

    range: Floats
    gain: Floats
    offset: Floats
    low: Floats
    high: Floats
    error: Floats

    def finish(self, values: Floats, calibrated: bool = True) -> Floats:
        """Return an output of shape (samples, *shape) from the server's values."""
        y = values * self.range
        return y * self.gain + self.offset if calibrated else y

    def outside(self, values: Floats) -> Counts:
        """Return of every sample how many values of an output, as the server has it (times `range`), lie outside."""
        return _count((values < self.low) | (values > self.high))

    def error_bound(self, results: NDArray[np.float32]) -> Floats:
        """Return the error bounds of a finished output: the polynomials', and what the cast to float32 adds."""
        return self.error * np.abs(self.gain) + FLOAT32_ROUNDING * np.abs(results.astype(np.float64))


@dataclass(frozen=True, slots=True)
class DeepTerms:
    """What the node knows of one deep block.

    Attributes:
        input_ranges: what each input is divided by.
        outputs: of each output.
        exact: whether every activation is the model's own and nothing is calibrated, so that error bounds are distances
            from the model.
        always: whether error bounds hold for all inputs within the calibrated ranges; otherwise values inside the block
            must stay within theirs, where nobody looks.
    """

    input_ranges: tuple[float, ...]
    outputs: tuple[DeepOutput, ...]
    exact: bool
    always: bool

    def scale(self, inputs: list[NDArray[Any]]) -> list[Floats]:
        """Divide inputs by their ranges, and cut what is beyond `LARGEST_INPUT`."""
        ranged = (np.asarray(x, np.float64) / r for x, r in zip(inputs, self.input_ranges, strict=True))
        return [np.clip(x, -LARGEST_INPUT, LARGEST_INPUT) for x in ranged]

    def uncalibrated(self) -> DeepTerms:
        """Return terms whose outputs are left as the polynomials make them: a gain of 1, an offset of 0."""
        outputs = (replace(o, gain=np.ones_like(o.gain), offset=np.zeros_like(o.offset)) for o in self.outputs)
        return replace(self, outputs=tuple(outputs))

    def outside(self, inputs: list[Floats]) -> Counts:
        """Return of every sample how many scaled inputs lie outside of what was calibrated."""
        return np.asarray(sum(_count(np.abs(x) > 1) for x in inputs))


def _count(marks: NDArray[np.bool_]) -> Counts:
    """Return how many are set in each sample."""
    return np.asarray(np.count_nonzero(marks.reshape(len(marks), -1), axis=1))


def pack_deep_terms(index: int, terms: DeepTerms) -> dict[str, Floats]:
    """Return the arrays of a deep block, as `read_deep_terms` finds them."""
    arrays = {
        f"deep.{index}.input_ranges": np.array(terms.input_ranges),
        f"deep.{index}.exact": np.array([terms.exact], np.float64),
        f"deep.{index}.always": np.array([terms.always], np.float64),
    }
    for position, output in enumerate(terms.outputs):
        for name in DeepOutput.__slots__:
            arrays[f"deep.{index}.{position}.{name}"] = getattr(output, name)
    return arrays


def read_deep_terms(arrays: Mapping[str, NDArray[Any]], index: int, block: DeepBlock) -> DeepTerms:
    """Read what `pack_deep_terms` wrote.

    Raises:
        PlanError: it is missing or does not fit.
    """

    def array(name: str, shape: tuple[int, ...]) -> Floats:
        found = arrays.get(f"deep.{index}.{name}")
        if found is None or found.dtype != np.float64 or found.shape != shape or not np.isfinite(found).all():
            raise PlanError(f"array 'deep.{index}.{name}' of the node is missing or does not fit; partition again")
        return found

    ranges = array("input_ranges", (len(block.inputs),))
    if not (ranges > 0).all():
        raise PlanError(f"deep block {index}: a range is not positive; partition again")
    outputs = tuple(
        DeepOutput(*(array(f"{position}.{name}", t.shape) for name in DeepOutput.__slots__))
        for position, t in enumerate(block.outputs)
    )
    if any((o.error <= 0).any() for o in outputs):
        raise PlanError(f"deep block {index}: an error bound is not positive; partition again")
    exact, always = (bool(array(name, (1,))[0]) for name in ("exact", "always"))
    return DeepTerms(tuple(float(r) for r in ranges), outputs, exact, always)
