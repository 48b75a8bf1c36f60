"""Which steps become one block: up to d activations a block, from the front.

    round 0, node 0, round 1, node 1 (MaxPool), round 2        d = all: refused, node 1 holds no polynomial
                                                               d = 2:   rounds 0 and 1 are one block, round 2 stays

requires  a draft of blocks with exact activations, calibration data, and the number of activations
ensures   a draft in which such blocks are joined; every other step is as it was
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError, Offence, ParameterError, UnsupportedModelError
from heinfer.plan import DeepStep, NodeStep, Plan, RoundStep
from heinfer.plan.deep_terms import DeepOutput
from heinfer.plan.execution import PlanRunner, Tensors, plain_deep, plain_rounds
from heinfer.plan.schema import PlanStep
from partitioner.deep.affine import LinearMap
from partitioner.deep.building import FitOptions, TooDeepError, build_deep
from partitioner.deep.built import BuiltDeep
from partitioner.deep.drafting import DraftBlock, draft_block, inputs_of
from partitioner.deep.functions import dissect
from partitioner.emission import Draft

Floats = NDArray[np.float64]
#: A channel that varies less, relative to the exact one, is not stretched.
_NO_SPREAD = 1e-6
#: How many activations a block may hold.
Depth = int | Literal["all"]


@dataclass(frozen=True, slots=True)
class DeepOptions:
    """How a model is deepened.

    Attributes:
        depth: activations of a block at most; "all": the whole model must be one block.
        calibration: inputs of the model by name, shape (samples, *shape): training data, never a query.
        fit: how activations become polynomials.

    Raises:
        ParameterError: the depth is not positive.
    """

    depth: Depth
    calibration: Mapping[str, NDArray[Any]]
    fit: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        """Check the depth."""
        if self.depth != "all" and self.depth < 1:
            raise ParameterError(f"block depth: expected a positive number or 'all', found {self.depth}")


def deepen(result: Draft, options: DeepOptions) -> Draft:
    """Join blocks.

    Args:
        result: the partitioned model.
        options: how far, and on which data.

    Raises:
        UnsupportedModelError: the depth is "all" and something is no polynomial, or a block fits no ring.
        InputError: calibration data don't fit the model.
    """
    known: dict[str, LinearMap] = {}
    segments = _find(result, options.depth, known)
    exact = _run_exactly(result, options, segments)
    try:
        built = _build(segments, exact, options.fit)
    except TooDeepError as error:
        smaller = range(max(s.block.depth for s in segments) - 1, 0, -1)
        fitting = next((d for d in smaller if _fits(result, options, d, known)), None)
        remedy = "use a smaller degree" if fitting is None else f"use --block-depth {fitting} or a smaller degree"
        summary = str(error).partition("\n")[0]
        raise UnsupportedModelError(summary, [*error.offences, Offence("block", "remedy", remedy)]) from error
    joined = _join(result, segments, built)
    return _calibrate(joined, options.calibration, exact)


def _run_exactly(result: Draft, options: DeepOptions, segments: Sequence[Segment]) -> dict[str, NDArray[Any]]:
    """Return what blocks read and make of calibration data in the exact model."""
    wanted = [tensor for s in segments for tensor in (*s.block.inputs, *s.block.results)]
    return _run(result, options.calibration, wanted)


def _build(segments: Sequence[Segment], exact: Mapping[str, NDArray[Any]], fit: FitOptions) -> list[BuiltDeep]:
    return [build_deep(str(number), s.block, exact, fit, list(s.block.results)) for number, s in enumerate(segments)]


def _fits(result: Draft, options: DeepOptions, depth: int, known: dict[str, LinearMap]) -> bool:
    """Whether all blocks of a depth can be built; it is tried, since they begin and end elsewhere than others do."""
    try:
        segments = _find(result, depth, known)
        _build(segments, _run_exactly(result, options, segments), options.fit)
    except UnsupportedModelError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Segment:
    """Steps that become one block.

    Attributes:
        positions: of the steps in the draft's plan.
        block: what they hold.
    """

    positions: tuple[int, ...]
    block: DraftBlock


def _join(result: Draft, segments: Sequence[Segment], built: Sequence[BuiltDeep]) -> Draft:
    """Put blocks in the place of the steps that they hold; number what is left anew."""
    starts = {s.positions[0]: number for number, s in enumerate(segments)}
    inside = {p for s in segments for p in s.positions}
    kept = [b for p, step in enumerate(result.plan.steps) if isinstance(step, RoundStep) and p not in inside
            for b in step.blocks]  # fmt: skip
    number_of = {block: number for number, block in enumerate(sorted(kept))}
    steps: list[PlanStep] = []
    for position, step in enumerate(result.plan.steps):
        if position in starts:
            steps.append(DeepStep(starts[position]))
        elif position in inside:
            continue
        elif isinstance(step, RoundStep):
            steps.append(RoundStep(tuple(number_of[b] for b in step.blocks)))
        else:
            steps.append(step)
    blocks = tuple(result.blocks[b] for b in sorted(kept))
    models = {step.model for step in steps if isinstance(step, NodeStep)}
    plan = dataclasses.replace(
        result.plan, steps=tuple(steps), blocks=tuple(b.block for b in blocks), deep=tuple(d.block for d in built)
    )
    submodels = {name: model for name, model in result.submodels.items() if name in models}
    return Draft(plan, blocks, submodels, result.card, tuple(built))


def _calibrate(result: Draft, calibration: Mapping[str, NDArray[Any]], exact: Mapping[str, NDArray[Any]]) -> Draft:
    """Fit gain and offset of every channel of every output, block after block, to what the exact model gives there.

    Where all activations so far are the model's own, nothing is wrong that a gain could mend.
    """
    built = list(result.deep)
    plan = result.plan
    exactly = plain_rounds(plan, result.reference())

    def run_round(step: RoundStep | DeepStep, tensors: Tensors) -> Tensors:
        if isinstance(step, RoundStep):
            return exactly(step, tensors)
        old = built[step.block]
        if all(b.terms.exact for b in built[: step.block + 1]):
            return plain_deep(old.block, old.arrays, old.terms, tensors)
        made = plain_deep(old.block, old.arrays, old.terms, tensors, calibrated=False)
        outputs = tuple(
            _fit_output(output, np.asarray(made[t.name], np.float64), np.asarray(exact[t.name], np.float64))
            for t, output in zip(old.block.outputs, old.terms.outputs, strict=True)
        )
        built[step.block] = dataclasses.replace(old, terms=dataclasses.replace(old.terms, outputs=outputs, exact=False))
        return {
            t.name: (made[t.name] * output.gain + output.offset).astype(np.float32)
            for t, output in zip(old.block.outputs, outputs, strict=True)
        }

    PlanRunner(plan, result.submodels).run(_typed(plan, calibration), run_round)
    return dataclasses.replace(result, deep=tuple(built))


def _fit_output(output: DeepOutput, found: Floats, exact: Floats) -> DeepOutput:
    """Fit found * gain + offset to what is exact, by channel; one that does not vary is moved alone."""
    shape = output.range.shape
    channels = shape[0] if shape else 1
    x = np.moveaxis(found.reshape(len(found), channels, -1), 1, 0).reshape(channels, -1)
    y = np.moveaxis(exact.reshape(len(exact), channels, -1), 1, 0).reshape(channels, -1)
    spread = x.var(axis=1)
    together = ((x - x.mean(axis=1, keepdims=True)) * (y - y.mean(axis=1, keepdims=True))).mean(axis=1)
    usable = spread > _NO_SPREAD * np.maximum(y.var(axis=1), 1e-30)
    gain = np.where(usable, together / np.where(usable, spread, 1.0), 1.0)
    offset = y.mean(axis=1) - gain * x.mean(axis=1)
    size = max(1, output.range.size // channels)
    return dataclasses.replace(
        output, gain=np.repeat(gain, size).reshape(shape), offset=np.repeat(offset, size).reshape(shape)
    )


def _find(result: Draft, depth: Depth, known: dict[str, LinearMap]) -> list[Segment]:
    steps = result.plan.steps
    rounds = [p for p, step in enumerate(steps) if isinstance(step, RoundStep)]
    if depth == "all":
        _check_all(result, range(rounds[0], rounds[-1] + 1))
    found: list[Segment] = []
    position = 0
    while position < len(rounds):
        positions, block, taken = _longest(result, rounds, position, depth, known)
        if block is not None:
            found.append(Segment(positions, block))
        position += taken
    return found


def _longest(
    result: Draft, rounds: Sequence[int], start: int, depth: Depth, known: dict[str, LinearMap]
) -> tuple[tuple[int, ...], DraftBlock | None, int]:
    """Return the steps of the longest block that begins with a round, and how many rounds it has."""
    best: tuple[tuple[int, ...], DraftBlock | None, int] = ((rounds[start],), None, 1)
    for stop in range(start + 1, len(rounds)):
        between = range(rounds[stop - 1] + 1, rounds[stop])
        if any(_obstacles(result, p) for p in between):
            break
        positions = tuple(range(rounds[start], rounds[stop] + 1))
        try:
            inputs_of(result, positions)
        except UnsupportedModelError:
            if depth == "all":
                raise
            break
        block = draft_block(result, positions, known)
        if depth != "all" and block.depth > depth:
            break
        best = (positions, block, stop - start + 1)
    return best


def _obstacles(result: Draft, position: int) -> list[Offence]:
    """Return what in a step of the node can't be in a block."""
    step = result.plan.steps[position]
    assert isinstance(step, NodeStep)  # only these are between rounds
    anatomy = dissect(result.submodels[step.model])
    return [Offence(part.node.name, part.node.op_type, part.reason) for part in anatomy.opaque]


def _check_all(result: Draft, positions: Sequence[int]) -> None:
    offences = [
        offence
        for position in positions
        if isinstance(result.plan.steps[position], NodeStep)
        for offence in _obstacles(result, position)
    ]
    if offences:
        raise UnsupportedModelError(
            "not everything between the first and the last weights can be under encryption; give --block-depth a "
            "number, and blocks end there:",
            offences,
        )


def _run(result: Draft, calibration: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Run the exact model on calibration data; return the wanted tensors."""
    evaluate = plain_rounds(result.plan, result.reference())
    names = set(wanted)
    found: dict[str, NDArray[Any]] = {}

    def run_round(step: RoundStep | DeepStep, tensors: Tensors) -> Tensors:
        made = evaluate(step, tensors)
        found.update({n: np.asarray(x) for n, x in (*tensors.items(), *made.items()) if n in names and n not in found})
        return made

    runner = PlanRunner(result.plan, result.submodels)
    outputs = runner.run(_typed(result.plan, calibration), run_round)
    found.update({n: x for n, x in outputs.items() if n in names and n not in found})
    return found


def _typed(plan: Plan, calibration: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Check calibration data and give them the model's types.

    Raises:
        InputError: they don't fit the model.
    """
    expected = {t.name: t for t in plan.inputs}
    if set(calibration) != set(expected):
        raise InputError(f"calibration data: expected arrays {sorted(expected)}, found {sorted(calibration)}")
    for name, x in calibration.items():
        if x.shape[1:] != expected[name].shape or not len(x):
            raise InputError(f"calibration data {name!r}: expected (samples, *{expected[name].shape}), found {x.shape}")
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise InputError(f"calibration data {name!r} hold NaN or infinity")
    return {name: x.astype(expected[name].dtype) for name, x in calibration.items()}
