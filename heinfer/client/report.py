"""The report of an evaluation: what was asked, how close, how fast, how many bytes, block by block.

A simulation has no costs. In JSON the costs of an evaluation stand beside its other figures, null in a simulation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from heinfer.plan.files import write_file

#: What stands in the place of the end-to-end estimate where there are deep blocks.
NO_ESTIMATE: Final = "none: polynomials"
#: What stands in the place of a bound where no sample of a deep block has one.
NO_BOUND: Final = "none: outside of the calibrated ranges"
#: What a bound is the distance from, where activations were fitted.
SAME_POLYNOMIALS: Final = "distance from the same polynomials"
#: What the bound of a deep block supposes where more than its inputs decides how far values inside it go.
INNER_VALUES: Final = "inner values stay within their calibrated ranges"


def bound_condition(bound: float | None, conditional: bool) -> str | None:
    """Return what a bound supposes; None where there is none, or it supposes nothing but what the node sees."""
    return INNER_VALUES if conditional and bound is not None else None


def describe_bound(bound: float | None, fitted: bool, condition: str | None, unbounded: int, samples: int) -> str:
    """Say what the bound of a last block is, what it is the distance from and supposes, how many samples have none."""
    if bound is None:
        return NO_BOUND
    notes = [SAME_POLYNOMIALS] if fitted else []
    if condition is not None:
        notes.append(f"if {condition}")
    if unbounded:
        notes.append(f"{unbounded:,} of {samples:,} samples have none: outside of the calibrated ranges")
    return f"{bound:.1e}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block cost, over all samples.

    Attributes:
        node_s: seconds of encryption and decryption, summed over processes.
        server_s: seconds of computation on the server.
        wire_s: seconds of transfer and queueing, neither side computing for it.
        ciphertexts_up: sent.
        ciphertexts_down: received.
        bytes_up: sent.
        bytes_down: received.
    """

    node_s: float
    server_s: float
    wire_s: float
    ciphertexts_up: int
    ciphertexts_down: int
    bytes_up: int
    bytes_down: int


@dataclass(frozen=True, slots=True)
class DeepRing:
    """The ring of a deep block.

    Attributes:
        degree: N; half as many samples share an upload.
        log2_q: bits of the chain, the special prime included.
        security_bits: at least.
        layers: linear maps in it.
        activations: polynomials between them.
        exact: whether all of them are the model's own, so that the error bound is the distance from the model, not from
            the same polynomials.
    """

    degree: int
    log2_q: int
    security_bits: int
    layers: int
    activations: int
    exact: bool


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block; errors and bounds over the traced samples.

    Attributes:
        block: index.
        operators: what it holds.
        costs: over all samples; None in a simulation.
        measured_error: largest error against a float64 evaluation on the same input.
        error_bound: what the error may be at most, under `error_bound_condition`; None where no sample has a bound.
        error_to_bound: largest quotient of the two, output by output; likewise.
        deep: the ring of a deep block, whose error is measured against the same polynomials with rounded weights; None
            for another.
        unbounded: samples without a bound: values of a deep block that lie outside of the calibrated ranges.
        error_bound_condition: what the bound supposes that nobody looks at; None: nothing.
    """

    block: int
    operators: list[str]
    costs: BlockCosts | None
    measured_error: float
    error_bound: float | None
    error_to_bound: float | None
    deep: DeepRing | None = None
    unbounded: int = 0
    error_bound_condition: str | None = None

    @property
    def bound_text(self) -> str:
        """The bound in words, whether it is conditional, and how many samples have none."""
        if self.error_bound is None:
            return NO_BOUND
        notes = [] if self.error_bound_condition is None else ["conditional"]
        if self.unbounded:
            notes.append(f"{self.unbounded} without")
        return f"{self.error_bound:.1e}" + (f" ({'; '.join(notes)})" if notes else "")


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A sample whose top-1 differs.

    Attributes:
        sample: its number.
        plain: class in the plain output.
        encrypted: class in the other.
        gap: how far apart the two classes are in the plain output.
        label: the true class; None without labels.
    """

    sample: int
    plain: int
    encrypted: int
    gap: float
    label: int | None


@dataclass(frozen=True, slots=True)
class Polynomials:
    """What deep blocks did to the outputs. Errors are largest and mean ones against the plain model.

    They are of the traced samples, with the blocks' polynomials evaluated in the clear: what the calibration gains.

    Attributes:
        calibrated: whether the run itself was.
        calibrated_error: with the calibration.
        uncalibrated_error: without.
        inputs: values that went into deep blocks.
        inputs_outside: those beyond the range that calibration data showed.
        outputs: values that came out.
        outputs_outside: likewise.
    """

    calibrated: bool
    calibrated_error: tuple[float, float]
    uncalibrated_error: tuple[float, float]
    inputs: int
    inputs_outside: int
    outputs: int
    outputs_outside: int

    def sentences(self, traced_samples: int) -> tuple[str, str]:
        """Say what the calibration gains, and what lies outside of the calibrated ranges."""
        (largest, mean), (other_largest, other_mean) = self.calibrated_error, self.uncalibrated_error
        use = "used" if self.calibrated else "switched off"
        return (
            f"Calibration ({use}): with it, the largest error of an output on {traced_samples} samples is "
            f"{largest:.2e} and the mean {mean:.2e}; without it, {other_largest:.2e} and {other_mean:.2e}.",
            f"Outside of the calibrated ranges: {self.inputs_outside:,} of {self.inputs:,} inputs and "
            f"{self.outputs_outside:,} of {self.outputs:,} outputs of deep blocks.",
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Time and bytes of an encrypted evaluation.

    Attributes:
        seconds: wall time of the encrypted evaluation.
        images_per_s: samples / seconds.
        latency_s: one query of one sample, median; online time in prepared mode, with masks that were ready. Where all
            samples fitted into one upload of deep blocks, the time of that query: one sample takes as long.
        latency_mode: the mode of these queries.
        preparation_s: preparing one sample before it comes, median; what an empty pool adds. None in standard mode.
        prepared_query_bytes: what one prepared sample takes in the node's memory; None in standard mode.
        start_s: seconds until server and node were ready.
        bytes_up: sent to the server.
        bytes_down: received from it.
        node_operators_s: seconds of the node's own operators, scaling and rounding.
        peak_memory_bytes: server, node (its workers included), client; None where the system does not tell.
    """

    seconds: float
    images_per_s: float
    latency_s: float
    latency_mode: str
    preparation_s: float | None
    prepared_query_bytes: int | None
    start_s: float
    bytes_up: int
    bytes_down: int
    node_operators_s: float
    peak_memory_bytes: dict[str, int | None]


@dataclass(frozen=True, slots=True)
class Report:
    """Plain beside encrypted, or beside simulated.

    Attributes:
        model: name.
        mode: how ciphertexts were made, or whose noise was simulated: "standard", "prepared" or "batch".
        simulated: whether nothing was encrypted: the same integers and the same noise, without keys.
        samples: evaluated.
        accuracy_plain: share of labels that the plain model's top-1 meets; None without labels.
        accuracy_encrypted: the same, encrypted or simulated.
        agreement: share of equal top-1; None where outputs are single numbers.
        disagreements: the samples that differ.
        max_abs_error: largest difference of an output.
        mean_abs_error: mean difference.
        error_bound: of the last block, rounding included, over the samples that have a bound; None where none has.
            Guaranteed, unless `error_bound_condition` says what it supposes.
        error_estimate: end to end, statistical; None where there are deep blocks.
        plain_s: wall time of the plain model on the same samples.
        costs: time and bytes; None in a simulation.
        rounds: round trips of one query.
        blocks: block by block.
        traced_samples: samples that errors and bounds of blocks were measured on.
        parameters: N, log2 q, security bits.
        versions: of heinfer, Python and the packages that matter.
        machine: processor.
        cores: available to this process.
        polynomials: what deep blocks did; None where there are none.
        fitted: whether the last block has fitted polynomials: then its bound is the distance from the same polynomials.
        unbounded: samples without a bound of the last block: values of theirs lie outside of the calibrated ranges.
        error_bound_condition: what the bound of the last block supposes that nobody looks at; None: nothing.
    """

    model: str
    mode: str
    simulated: bool
    samples: int
    accuracy_plain: float | None
    accuracy_encrypted: float | None
    agreement: float | None
    disagreements: list[Disagreement]
    max_abs_error: float
    mean_abs_error: float
    error_bound: float | None
    error_estimate: float | None
    plain_s: float
    costs: Costs | None
    rounds: int
    blocks: list[BlockReport]
    traced_samples: int
    parameters: dict[str, int]
    versions: dict[str, str]
    machine: str
    cores: int
    polynomials: Polynomials | None = None
    fitted: bool = False
    unbounded: int = 0
    error_bound_condition: str | None = None

    @property
    def estimate_text(self) -> str:
        """The estimate for the whole model in words."""
        return NO_ESTIMATE if self.error_estimate is None else f"{self.error_estimate:.1e}"

    @property
    def bound_text(self) -> str:
        """The bound of the last block in words."""
        return describe_bound(self.error_bound, self.fitted, self.error_bound_condition, self.unbounded, self.samples)

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON; costs stand beside the other figures."""
        content = asdict(self)
        content.update(content.pop("costs") or dict.fromkeys(f.name for f in fields(Costs)))
        for block in content["blocks"]:
            block.update(block.pop("costs") or dict.fromkeys(f.name for f in fields(BlockCosts)))
        return content

    def write_json(self, path: str | Path) -> None:
        """Write the report as JSON."""
        write_file(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
