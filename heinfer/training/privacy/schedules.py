"""Shapes of the noise multiplier over the steps of a run, declared before it starts.

A shape is relative: planning scales all of it by one factor until the whole run costs the target epsilon. As it does
not depend on the data, composition holds as for constant noise; and as the accountant pays for each distinct value
once, ramps are rounded to 32 values.

    constant                   the same noise throughout
    steps:0.6,0.9,1.1          equal parts of the run, one value each
    linear:1.0,0.3             straight from the first value to the second
    linear:1.0,0.3,0.3,0.7     the same between 30 % and 70 % of the run, flat before and after
    exponential:1.0,0.3        by equal factors from the first value to the second
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from heinfer.errors import ParameterError

#: Distinct values of a shape: the accountant's time is proportional to them, and 32 follow a ramp within 1.6 %.
MOST_LEVELS = 32


class Curve(StrEnum):
    """How the noise multiplier moves."""

    CONSTANT = "constant"
    STEPS = "steps"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True)
class NoiseShape:
    """A relative noise multiplier for every step of a run.

    Attributes:
        curve: how it moves.
        values: relative multipliers, positive: one (constant), first and last (ramps), or one a part (steps).
        start: where a ramp begins, as a fraction of the run.
        end: where it ends.
    """

    curve: Curve
    values: tuple[float, ...] = (1.0,)
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        least, most = {Curve.CONSTANT: (1, 1), Curve.STEPS: (1, MOST_LEVELS)}.get(self.curve, (2, 2))
        if not least <= len(self.values) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise ParameterError(f"a shape '{self.curve}' takes {wanted} noise multipliers, found {len(self.values)}")
        if not all(math.isfinite(value) and value > 0 for value in self.values):
            raise ParameterError(f"expected positive noise multipliers, found {', '.join(map(str, self.values))}")
        if not 0 <= self.start < self.end <= 1:
            raise ParameterError(
                f"a ramp runs between two fractions 0 <= start < end <= 1 of the run, found {self.start} and {self.end}"
            )

    def levels(self, steps: int) -> tuple[tuple[float, int], ...]:
        """Return the noise level by level.

        Args:
            steps: length of the run, at least 1.

        Returns:
            (relative noise multiplier, number of steps) in the order of training, at most 32; the numbers add up.

        Raises:
            ParameterError: there are no steps.
        """
        if steps < 1:
            raise ParameterError(f"expected at least 1 step, found {steps}")
        runs = groupby(self._value(step, steps) for step in range(steps))
        return tuple((value, sum(1 for _ in run)) for value, run in runs)

    def _value(self, step: int, steps: int) -> float:
        if self.curve in (Curve.CONSTANT, Curve.STEPS):
            return self.values[step * len(self.values) // steps]
        first, last = self.values
        position = step / max(steps - 1, 1)
        progress = min(max((position - self.start) / (self.end - self.start), 0.0), 1.0)
        rounded = round(progress * (MOST_LEVELS - 1)) / (MOST_LEVELS - 1)
        if self.curve is Curve.LINEAR:
            return first + (last - first) * rounded
        return first * math.pow(last / first, rounded)

    def __str__(self) -> str:
        if self.curve is Curve.CONSTANT:
            return self.curve.value
        flat = (self.start, self.end) if (self.start, self.end) != (0.0, 1.0) else ()
        return f"{self.curve.value}:{','.join(repr(value) for value in (*self.values, *flat))}"


def parse_shape(text: str) -> NoiseShape:
    """Read a shape as it is written in a recipe or on the command line; `str` of the result reads the same.

    Raises:
        ParameterError: the word is unknown (the nearest one is named), or the numbers do not fit it.
    """
    word, colon, rest = text.strip().partition(":")
    try:
        curve = Curve(word.strip().lower())
    except ValueError:
        raise ParameterError(_unknown(word)) from None
    try:
        numbers = tuple(float(number) for number in rest.split(",")) if colon else ()
    except ValueError:
        raise ParameterError(f"expected numbers separated by commas after '{word}:', found {rest!r}") from None
    if curve is Curve.CONSTANT:
        if numbers:
            raise ParameterError(f"'constant' takes no numbers, found {rest!r}; the level comes from the target")
        return NoiseShape(curve)
    if curve is Curve.LINEAR and len(numbers) == 4:
        return NoiseShape(curve, numbers[:2], *numbers[2:])
    return NoiseShape(curve, numbers)


def _unknown(word: str) -> str:
    names = [curve.value for curve in Curve]
    near = difflib.get_close_matches(word.strip().lower(), names, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(names)}"
    return f"unknown noise schedule '{word}': {hint}"
