"""What the page is shown: models as they are now, and an answer beside what the server saw of it.

    status(models)          -> {"ready": true, "models": [{"name": "mnist_dp", "status": {"pool_ready": 16, ...}, ...}]}
    answer(plan, result...) -> {"outputs": [...], "times": {...}, "node": {...}, "server": {"picture": base64, ...}}

Of an upload the page gets the upper 8 of every residue's 50 bits, which the server sees anyway; scales, bounds, masks
and secrets are not in here. Who looks at the page is a client, in the node's domain of trust.

Worked example: LeNet-5 sends 784 residues in 5,000 bytes for block 0. In 16 columns of equal width each gets 49 of
them, give or take 7, whatever was drawn.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.cards import privacy_line
from heinfer.plan import Block, Plan
from heinfer.ring import MODULUS_BITS, packed_bytes, unpack
from heinfer.wire import row_bytes
from trusted_node.engine import QueryResult
from trusted_node.serving.interface import (
    ModelNotReadyError,
    Models,
    ModelState,
    ModelStatus,
    ServedModel,
    ServerStatus,
    UnknownModelError,
)
from trusted_node.statistics import QueryStatistics

Json = dict[str, Any]
#: Inputs that are drawn with the mouse.
DRAWN_SHAPE: Final = (1, 28, 28)
#: The block whose upload is shown.
SHOWN_BLOCK: Final = 0
#: Pixels of its picture, columns of a histogram, and values of an output, at most.
_MOST_PIXELS, _BINS, _MOST_VALUES, _MOST_CLASSES = 4096, 16, 1000, 1000
#: Bytes of an upload that are kept to be shown.
_KEPT_BYTES: Final = 2**25
#: How far from 1 the sum of probabilities may be.
_SUM_TOLERANCE: Final = 1e-3


@dataclass(slots=True)
class Watched:
    """An upload as the server gets it; told by the threads that send it (`UploadWatcher`).

    Attributes:
        block: the one that is kept.
        total: its bytes.
    """

    block: int
    total: int = 0
    _parts: list[bytes] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def __call__(self, block: int, rows: bytes) -> None:
        """Keep rows of the block."""
        if block != self.block:
            return
        with self._lock:
            if self.total < _KEPT_BYTES:
                self._parts.append(bytes(rows))
            self.total += len(rows)

    @property
    def content(self) -> bytes:
        """What was kept."""
        return b"".join(self._parts)


@dataclass(frozen=True, slots=True)
class Ran:
    """A query that has run: its result, seconds from asking to the result, and what went to the server."""

    result: QueryResult
    seconds: float
    watched: Watched


def status(models: Models, uptime_s: float) -> Json:
    """Return what the node and its models are doing."""
    found = []
    for entry in models.entries():
        line: Json = {"name": entry.name, "state": entry.state.value, "reason": entry.reason}
        if entry.state is ModelState.READY:
            try:
                model = models.get(entry.name)
            except (UnknownModelError, ModelNotReadyError) as error:  # it went since the index was made
                line.update(state=ModelState.UNAVAILABLE.value, reason=str(error))
            else:
                line.update(_describe(model))
        found.append(line)
    return {"ready": models.ready, "uptime_s": round(uptime_s, 1), "models": found}


def answer(plan: Plan, card: Mapping[str, Any] | None, inputs: Mapping[str, NDArray[Any]], ran: Ran) -> Json:
    """Return a query's result and what each party saw of it."""
    first = next(iter(inputs.values()))
    statistics = ran.result.statistics
    return {
        "mode": statistics.mode,
        "rounds": statistics.rounds,
        "bytes_up": sum(block.bytes_up for block in statistics.blocks),
        "bytes_down": sum(block.bytes_down for block in statistics.blocks),
        "outputs": [_output(name, values[0], class_names(card)) for name, values in ran.result.outputs.items()],
        "times_ms": times(statistics, ran.seconds),
        "node": {"values": first.size, "histogram": histogram(first)},
        "server": server_view(plan, statistics.mode, ran.watched),
    }


def times(statistics: QueryStatistics, seconds: float) -> Json:
    """Return milliseconds by part; what no part accounts for was waited.

    Blocks of one round travel at the same time, and in standard mode several processes encrypt: so parts together may
    be more than what passed.
    """
    blocks = statistics.blocks
    node = statistics.node_s + statistics.preparation_s + sum(b.encrypt_s + b.decrypt_s for b in blocks)
    parts = {"node": node, "server": sum(b.server_s for b in blocks), "wire": sum(b.wire_s for b in blocks)}
    parts["waiting"] = max(0.0, seconds - sum(parts.values()))
    return {**{name: round(1e3 * part, 2) for name, part in parts.items()}, "total": round(1e3 * seconds, 2)}


def server_view(plan: Plan, mode: str, watched: Watched) -> Json | None:
    """Return what the server saw of the first block, None where nothing was sent or that is a deep block.

    Raises:
        CiphertextError: what was sent are no residues of the plan's ring.
    """
    if watched.block >= len(plan.blocks) or not watched.total:
        return None
    block = plan.blocks[watched.block]
    residues = _residues(plan, block, mode, watched.content)
    shown = residues[:_MOST_PIXELS]
    levels = (shown >> (MODULUS_BITS - 8)).astype(np.uint8)
    counts = np.bincount(residues * _BINS // plan.ring.modulus, minlength=_BINS)
    return {
        "block": watched.block,
        "bytes": watched.total,
        "values": block.input_rows if mode != "prepared" or block.prepared is None else block.prepared.values_up,
        "bits": MODULUS_BITS,
        "shown": len(shown),
        "width": _width(block, len(residues)),
        "picture": base64.b64encode(levels.tobytes()).decode(),
        "histogram": [int(n) for n in counts],
    }


def histogram(values: NDArray[Any]) -> list[int]:
    """Count values in columns of equal width, from the smallest to the largest."""
    counts, _ = np.histogram(values.astype(np.float64), _BINS)
    return [int(n) for n in counts]


def class_names(card: Mapping[str, Any] | None) -> list[str]:
    """Return the names of classes that a card gives, none where it gives none."""
    names = card.get("classes") if card is not None else None
    return [str(name) for name in names] if isinstance(names, list) and len(names) <= _MOST_CLASSES else []


def _residues(plan: Plan, block: Block, mode: str, content: bytes) -> NDArray[np.int64]:
    """Unpack the one sample's values: all of its row in prepared mode, the first of every row in others.

    In standard mode a row is a ciphertext: b at the sample, then N random numbers a. In batches it is b alone.
    """
    if mode == "prepared" and block.prepared is not None:
        values = block.prepared.values_up
        packed = np.frombuffer(content[: packed_bytes(values)], np.uint8)
        sample: NDArray[np.int64] = unpack(packed.reshape(1, -1), values, plan.ring.modulus)[0]
        return sample
    row = row_bytes(1, plan.ring.degree) if mode == "standard" else packed_bytes(1)
    rows = min(block.input_rows, len(content) // row)
    packed = np.frombuffer(content[: rows * row], np.uint8).reshape(rows, row)
    return unpack(packed[:, : packed_bytes(1)], 1, plan.ring.modulus)[:, 0]


def _width(block: Block, values: int) -> int:
    """Pixels of a row of the picture: those of an image where one is sent."""
    shape = block.inputs[0].shape
    is_image = len(block.inputs) == 1 and len(shape) >= 2 and prod(shape) == values
    return shape[-1] if is_image else math.isqrt(max(0, min(values, _MOST_PIXELS) - 1)) + 1


def _output(name: str, values: NDArray[Any], classes: list[str]) -> Json:
    flat = values.reshape(-1)
    found: Json = {"name": name, "shape": list(values.shape), "values": [x.item() for x in flat[:_MOST_VALUES]]}
    if flat.dtype.kind == "f" and 2 <= flat.size <= _MOST_CLASSES:
        given = flat.astype(np.float64)
        is_distribution = bool((given >= 0).all()) and abs(float(given.sum()) - 1) <= _SUM_TOLERANCE
        shares = given if is_distribution else _softmax(given)
        found["shares"] = [round(float(share), 6) for share in shares]
        found["shares_are"] = "probabilities" if is_distribution else "softmax"
        found["labels"] = classes if len(classes) == flat.size else [str(i) for i in range(flat.size)]
    return found


def _softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    powers = np.exp(logits - logits.max())
    shares: NDArray[np.float64] = powers / powers.sum()
    return shares


def _describe(model: ServedModel) -> Json:
    inputs = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in model.plan.inputs]
    specs = model.plan.inputs
    return {
        "inputs": inputs,
        "drawn": len(specs) == 1 and specs[0].shape == DRAWN_SHAPE and specs[0].dtype == "float32",
        "card": None if model.card is None else _card(model.card),
        "status": _activity(model.status()),
    }


def _card(card: Mapping[str, Any]) -> Json:
    """What of a card is shown. It is its makers' word, of any form: what is no number is left out."""
    words = {name: str(card[name])[:300] for name in ("dataset", "architecture") if card.get(name) is not None}
    numbers = {name: _number(card.get(name)) for name in ("epsilon", "delta", "accuracy", "train_records")}
    is_private = numbers["epsilon"] is not None and numbers["delta"] is not None
    return {**words, **numbers, "line": privacy_line(card if is_private else {})}


def _number(value: object) -> float | int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def _activity(found: ModelStatus) -> Json:
    latencies = found.latencies_ms
    return {
        "queued_queries": found.queued_queries,
        "queued_samples": found.queued_samples,
        "running_queries": found.running_queries,
        "pool_ready": found.pool_ready,
        "pool_size": found.pool_size,
        "latencies_ms": [round(x, 2) for x in latencies],
        "median_ms": round(float(np.median(latencies)), 2) if latencies else None,
        "p95_ms": round(float(np.percentile(latencies, 95)), 2) if latencies else None,
        "servers": [_server(server) for server in found.servers],
        "hints_days_left": None if found.hints_days_left is None else round(found.hints_days_left, 1),
    }


def _server(server: ServerStatus) -> Json:
    conduct = "quarantined" if server.in_quarantine else "resting" if server.resting else "healthy"
    return {
        "name": server.name,
        "conduct": conduct,
        "failures": server.failures,
        "forgeries": server.forgeries,
    }
