"""A deep block with all that its two parties need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from heinfer.plan.deep import DeepBlock
from heinfer.plan.deep_terms import DeepTerms


@dataclass(frozen=True, slots=True)
class FittedActivation:
    """What became of one activation.

    Attributes:
        label: its tensor and operators, for people.
        degree: of the polynomial.
        exact: whether the activation is this polynomial.
        error: root mean square error on calibration data, relative to the activation's own spread.
    """

    label: str
    degree: int
    exact: bool
    error: float


@dataclass(frozen=True, slots=True)
class BuiltDeep:
    """A deep block with all that its two parties need.

    Attributes:
        block: its part of the plan.
        arrays: of the server.
        terms: of the node.
        activations: what became of them.
    """

    block: DeepBlock
    arrays: Mapping[str, NDArray[Any]]
    terms: DeepTerms
    activations: tuple[FittedActivation, ...]
