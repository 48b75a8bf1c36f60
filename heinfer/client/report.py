"""The report of an evaluation: what was asked, how close, how fast, how many bytes, block by block."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from heinfer.plan.files import write_file


@dataclass(frozen=True, slots=True)
class BlockReport:
    """One block, over all samples; errors and bounds over the traced ones.

    Attributes:
        block: index.
        operators: what it holds.
        node_s: seconds of encryption and decryption, summed over processes.
        server_s: seconds of computation on the server.
        wire_s: seconds of transfer and queueing, neither side computing for it.
        ciphertexts_up: sent.
        ciphertexts_down: received.
        bytes_up: sent.
        bytes_down: received.
        measured_error: largest error against a float64 evaluation on the same input.
        error_bound: what the error may be at most.
        error_to_bound: largest quotient of the two, output by output.
    """

    block: int
    operators: list[str]
    node_s: float
    server_s: float
    wire_s: float
    ciphertexts_up: int
    ciphertexts_down: int
    bytes_up: int
    bytes_down: int
    measured_error: float
    error_bound: float
    error_to_bound: float


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A sample whose top-1 differs; `gap` is how far apart the two classes are in the plain output."""

    sample: int
    plain: int
    encrypted: int
    gap: float


@dataclass(frozen=True, slots=True)
class Report:
    """Plain beside encrypted.

    Attributes:
        model: name.
        mode: how ciphertexts were made, "standard" or "prepared".
        samples: evaluated.
        accuracy_plain: share of labels that the plain model's top-1 meets; None without labels.
        accuracy_encrypted: the same, encrypted.
        agreement: share of equal top-1; None where outputs are single numbers.
        disagreements: the samples that differ.
        max_abs_error: largest difference of an output.
        mean_abs_error: mean difference.
        error_bound: guaranteed for the last block, rounding included.
        error_estimate: end to end, statistical.
        seconds: wall time of the encrypted evaluation.
        images_per_s: samples / seconds.
        latency_s: one query of one sample, median; online time in prepared mode, with masks that were ready.
        latency_mode: the mode of these queries.
        preparation_s: preparing one sample before it comes, median; what an empty pool adds. None in standard mode.
        prepared_query_bytes: what one prepared sample takes in the node's memory; None in standard mode.
        start_s: seconds until server and node were ready.
        plain_s: wall time of the plain model on the same samples.
        bytes_up: sent to the server.
        bytes_down: received from it.
        rounds: round trips of one query.
        node_operators_s: seconds of the node's own operators, scaling and rounding.
        blocks: block by block.
        traced_samples: samples that errors and bounds of blocks were measured on.
        parameters: N, log2 q, security bits.
        peak_memory_bytes: server, node (its workers included), client; None where the system does not tell.
        versions: of heinfer, Python and the packages that matter.
        machine: processor.
        cores: available to this process.
    """

    model: str
    mode: str
    samples: int
    accuracy_plain: float | None
    accuracy_encrypted: float | None
    agreement: float | None
    disagreements: list[Disagreement]
    max_abs_error: float
    mean_abs_error: float
    error_bound: float
    error_estimate: float
    seconds: float
    images_per_s: float
    latency_s: float
    latency_mode: str
    preparation_s: float | None
    prepared_query_bytes: int | None
    start_s: float
    plain_s: float
    bytes_up: int
    bytes_down: int
    rounds: int
    node_operators_s: float
    blocks: list[BlockReport]
    traced_samples: int
    parameters: dict[str, int]
    peak_memory_bytes: dict[str, int | None]
    versions: dict[str, str]
    machine: str
    cores: int

    def to_dict(self) -> dict[str, Any]:
        """Return plain containers, ready for JSON."""
        return asdict(self)

    def write_json(self, path: str | Path) -> None:
        """Write the report as JSON."""
        write_file(Path(path), (json.dumps(self.to_dict(), indent=1) + "\n").encode())
