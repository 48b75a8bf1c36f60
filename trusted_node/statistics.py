"""What a query cost and how good it was, for the client alone: bounds and scales must not reach logs or metrics."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class BlockCost:
    """Totals over all groups of samples that a query was cut into.

    Attributes:
        encrypt_s: seconds of encryption, summed over processes.
        decrypt_s: seconds of decryption and of the checks before it, summed over processes.
        check_s: seconds of checking: of answers, and of uploads while the server is at work.
        server_s: seconds that the server says it computed.
        wire_s: seconds from the last row sent to the answer's announcement, the server's computation aside.
        ciphertexts_up: sent; in prepared mode those whose b was sent.
        ciphertexts_down: received; none in prepared mode, where values come back.
        bytes_up: payload sent.
        bytes_down: payload received.
    """

    encrypt_s: float = 0.0
    decrypt_s: float = 0.0
    check_s: float = 0.0
    server_s: float = 0.0
    wire_s: float = 0.0
    ciphertexts_up: int = 0
    ciphertexts_down: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass(slots=True)
class QueryStatistics:
    """Statistics of one query; safe to use from several threads through `add`.

    Attributes:
        blocks: costs by block.
        rounds: round trips, groups of samples aside.
        groups: groups of samples that the query was cut into.
        node_s: seconds of the node's own operators, scaling and rounding.
        error_bound: largest bound of an output of a last block, over the samples that have one.
        fitted: whether a last block has fitted polynomials, from which its bound is the distance, not from the model.
        conditional: whether that bound supposes that values inside a deep block stay within their calibrated ranges.
        unbounded: samples without a bound, once for each last block: values of theirs lie outside of the ranges that
            calibration data showed.
        rounding_step: largest step that results were rounded to.
        mode: "standard" or "prepared".
        pooled: samples whose masks were ready when the query came.
        preparation_s: seconds of preparing the others, before their first upload; summed over groups.
        background_s: seconds of preparing one sample in the background, as of late; None in standard mode.
        inputs_outside: inputs of deep blocks beyond the range that calibration data showed: for the client alone.
        outputs_outside: likewise, outputs.
    """

    blocks: list[BlockCost]
    rounds: int
    groups: int = 0
    node_s: float = 0.0
    error_bound: float = 0.0
    fitted: bool = False
    conditional: bool = False
    unbounded: int = 0
    rounding_step: float = 0.0
    mode: str = "standard"
    pooled: int = 0
    preparation_s: float = 0.0
    background_s: float | None = None
    inputs_outside: int = 0
    outputs_outside: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _counted: bool = field(default=False, repr=False)

    @classmethod
    def empty(cls, blocks: int, rounds: int) -> QueryStatistics:
        """Return zeros."""
        return cls([BlockCost() for _ in range(blocks)], rounds)

    def add(self, block: int, **amounts: float) -> None:
        """Add to a block's costs."""
        with self._lock:
            cost = self.blocks[block]
            for name, amount in amounts.items():
                setattr(cost, name, getattr(cost, name) + amount)

    def add_group(self, node_s: float) -> None:
        """Count a finished group of samples."""
        with self._lock:
            self.groups += 1
            self.node_s += node_s

    def add_preparation(self, pooled: int, seconds: float) -> None:
        """Count the prepared samples of a group."""
        with self._lock:
            self.pooled += pooled
            self.preparation_s += seconds

    def count_once(self) -> bool:
        """Return whether nobody has asked before: queries that ran as one share statistics, which count once."""
        with self._lock:
            first, self._counted = not self._counted, True
            return first

    def add_outside(self, inputs: int = 0, outputs: int = 0) -> None:
        """Count values of deep blocks that lie outside of what calibration data showed."""
        with self._lock:
            self.inputs_outside += inputs
            self.outputs_outside += outputs

    def raise_bounds(self, bound: float, step: float) -> None:
        """Take the bound and the rounding step of results into account."""
        with self._lock:
            self.error_bound = max(self.error_bound, bound)
            self.rounding_step = max(self.rounding_step, step)

    def add_deep_bounds(self, bound: float, unbounded: int, fitted: bool, conditional: bool) -> None:
        """Take a last block into account that is a deep one: its bound, and the samples that have none."""
        with self._lock:
            self.error_bound = max(self.error_bound, bound)
            self.unbounded += unbounded
            self.fitted |= fitted
            self.conditional |= conditional

    def to_json(self) -> bytes:
        """Return the statistics as JSON."""
        names = ("rounds", "groups", "node_s", "error_bound", "rounding_step")
        deep = ("fitted", "conditional", "unbounded", "inputs_outside", "outputs_outside")
        prepared = ("mode", "pooled", "preparation_s", "background_s")
        content = {name: getattr(self, name) for name in names + deep + prepared}
        return json.dumps({**content, "blocks": [asdict(block) for block in self.blocks]}).encode()
