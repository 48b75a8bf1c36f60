"""The report of an evaluation: what was asked, how close, how fast, how many bytes, block by block.

A simulation has no costs. In JSON the costs of an evaluation stand beside its other figures, null in a simulation.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from heinfer.plan.files import write_file


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
class BlockReport:
    """One block; errors and bounds over the traced samples.

    Attributes:
        block: index.
        operators: what it holds.
        costs: over all samples; None in a simulation.
        measured_error: largest error against a float64 evaluation on the same input.
        error_bound: what the error may be at most.
        error_to_bound: largest quotient of the two, output by output.
    """

    block: int
    operators: list[str]
    costs: BlockCosts | None
    measured_error: float
    error_bound: float
    error_to_bound: float


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
class Costs:
    """Time and bytes of an encrypted evaluation.

    Attributes:
        seconds: wall time of the encrypted evaluation.
        images_per_s: samples / seconds.
        latency_s: one query of one sample, median; online time in prepared mode, with masks that were ready.
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
        error_bound: guaranteed for the last block, rounding included.
        error_estimate: end to end, statistical.
        plain_s: wall time of the plain model on the same samples.
        costs: time and bytes; None in a simulation.
        rounds: round trips of one query.
        blocks: block by block.
        traced_samples: samples that errors and bounds of blocks were measured on.
        parameters: N, log2 q, security bits.
        versions: of heinfer, Python and the packages that matter.
        machine: processor.
        cores: available to this process.
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
    error_bound: float
    error_estimate: float
    plain_s: float
    costs: Costs | None
    rounds: int
    blocks: list[BlockReport]
    traced_samples: int
    parameters: dict[str, int]
    versions: dict[str, str]
    machine: str
    cores: int

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
