"""What one peer measured on one model: written by the peer's process, read by whoever draws the table.

    peer's environment                      heinfer's environment
    measuring.py  Result -> RESULT.json     running.py  RESULT.json -> Result, whatever became of the process

A result of TenSEAL's batched tensors on a network of two layers, in part:

    {"peer": "tenseal-batched", "model": "mlp", "status": "ok", "latency_s": [9.1], "batch": 4096,
     "throughput_per_s": 450.0, "bytes_up": 308000000, "max_error": 0.0002, "security_bits": 128, ...}

Only the standard library is imported: every environment can read this file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any


class Status(StrEnum):
    """How a run ended."""

    OK = "ok"
    NOT_EXPRESSIBLE = "not expressible"
    OUT_OF_MEMORY = "out of memory"
    TIMEOUT = "timeout"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Result:
    """One peer on one model; None where a figure does not apply or was not reached.

    Attributes:
        peer: Its name in `running.PEERS`.
        version: Of the packages that did the work.
        model: The file's name without its suffix.
        status: How the run ended.
        reason: Why it did not end well; empty where it did.
        note: What a reader must know to compare the figures.
        latency_s: One entry a query, from values in the clear to values in the clear.
        preparation_s: Once per model and client: compilation, keys, encoding of weights.
        server_s: The server's part of one query, median; it starts from bytes and ends with bytes.
        throughput_per_s: Samples a second, many at once where the peer can, else one after the other.
        batch: Samples that share one evaluation at that throughput.
        bytes_up: Serialised ciphertexts from the client, of one query (of a whole batch where `batch` is above 1).
        bytes_down: The same, to the client.
        key_bytes: Serialised evaluation keys that the server needs, once per client.
        peak_memory_bytes: Client and server together; they share a process.
        max_error: Largest absolute difference to onnxruntime on the same inputs.
        output_range: Largest minus smallest value of onnxruntime's outputs.
        agreement: Share of samples whose largest output has the same place.
        security_bits: At least so many, by the table or the library named in `parameters`; 0: less than 128 by it.
        parameters: Of the scheme, and what else shapes the figures.
    """

    peer: str
    model: str
    status: Status
    version: str | None = None
    reason: str = ""
    note: str = ""
    latency_s: list[float] = field(default_factory=list)
    preparation_s: float | None = None
    server_s: float | None = None
    throughput_per_s: float | None = None
    batch: int | None = None
    bytes_up: int | None = None
    bytes_down: int | None = None
    key_bytes: int | None = None
    peak_memory_bytes: int | None = None
    max_error: float | None = None
    output_range: float | None = None
    agreement: float | None = None
    security_bits: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)


def write_result(result: Result, path: Path) -> None:
    """Write it whole or not at all: a reader never finds half a file."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(dataclasses.asdict(result), indent=1, allow_nan=False) + "\n")
    part.replace(path)


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        ValueError: It is no JSON object, or its fields or status are not those of `Result`.
    """
    entries = json.loads(path.read_text())
    known = {entry.name for entry in dataclasses.fields(Result)}
    if not isinstance(entries, dict) or not {"peer", "model", "status"} <= entries.keys() <= known:
        raise ValueError(f"{path} is no result: expected an object with fields of {sorted(known)}")
    return Result(**{**entries, "status": Status(entries["status"])})
