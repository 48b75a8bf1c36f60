"""What the node alone knows of a deep block: ranges, the calibration of its outputs, what calibration data showed.

    x / input range --> server --> v --(times output range)--> y --(gain, offset by channel)--> result

Ranges come from calibration data and never from a query, so the scale at which a query is encrypted says nothing of it.
The affine calibration at the end takes back what polynomials do wrong on average. `low` and `high` are the range guard:
outputs outside are counted, since a polynomial explodes outside the interval that it was fitted on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.plan.deep import DeepBlock

Floats = NDArray[np.float64]
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
    """

    range: Floats
    gain: Floats
    offset: Floats
    low: Floats
    high: Floats

    def finish(self, values: Floats, calibrated: bool = True) -> Floats:
        """Return an output of shape (samples, *shape) from the server's values."""
        y = values * self.range
        return y * self.gain + self.offset if calibrated else y

    def outside(self, values: Floats) -> int:
        """Return how many values of an output, as the server computed it (times `range`), lie outside."""
        return int(np.count_nonzero((values < self.low) | (values > self.high)))


@dataclass(frozen=True, slots=True)
class DeepTerms:
    """What the node knows of one deep block.

    Attributes:
        input_ranges: what each input is divided by.
        outputs: of each output.
    """

    input_ranges: tuple[float, ...]
    outputs: tuple[DeepOutput, ...]

    def scale(self, inputs: list[NDArray[Any]]) -> list[Floats]:
        """Divide inputs by their ranges, and cut what is beyond `LARGEST_INPUT`."""
        ranged = (np.asarray(x, np.float64) / r for x, r in zip(inputs, self.input_ranges, strict=True))
        return [np.clip(x, -LARGEST_INPUT, LARGEST_INPUT) for x in ranged]

    def uncalibrated(self) -> DeepTerms:
        """Return terms whose outputs are left as the polynomials make them: a gain of 1, an offset of 0."""
        outputs = (replace(o, gain=np.ones_like(o.gain), offset=np.zeros_like(o.offset)) for o in self.outputs)
        return DeepTerms(self.input_ranges, tuple(outputs))

    def outside(self, inputs: list[Floats]) -> int:
        """Return how many scaled inputs lie outside of what was calibrated."""
        return sum(int(np.count_nonzero(np.abs(x) > 1)) for x in inputs)


def pack_deep_terms(index: int, terms: DeepTerms) -> dict[str, Floats]:
    """Return the arrays of a deep block, as `read_deep_terms` finds them."""
    arrays = {f"deep.{index}.input_ranges": np.array(terms.input_ranges)}
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
    return DeepTerms(tuple(float(r) for r in ranges), outputs)
