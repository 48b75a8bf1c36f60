"""Catch a server that computes something else, before its answer is decrypted.

    b --(v . b)--> committed  ---+
                                 +--> equal, or the answer is refused
    y --(r . y)--> answered   ---+

The answer of an honest server is y = P(b) mod q for a public linear map P; with r secret and uniform and v = P^T r,
both dot products are the same residue. Any other y differs with probability 1 - 1 / q, q being 2**50. No tolerance, no
false alarm, a multiplication a value: 0.4 ms for an image of ResNet-20.

One comparison for every sample; in standard mode and in batches for every coefficient, and for b and a apart. Nothing
is summed over an axis on which r repeats: a forger's +d in one sample and -d in another would cancel.

r is used again and again. As long as no forgery has passed, all that the server learns is that honest answers are
accepted, which is so for every r, so k attempts pass with probability k / q at most, adaptive ones too; after
`ATTEMPTS` a server is not asked any more. Secrets are made by the partitioner (`heinfer.plan.checks`).
"""

from __future__ import annotations

import logging
import threading
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import IntegrityError
from heinfer.operators import PreparedForm, Program
from heinfer.operators.prepared import Maps
from heinfer.operators.steps import Take
from heinfer.operators.transposed import transpose_steps
from heinfer.plan import NodeBundle
from heinfer.plan.checks import checked_values, output_weights
from heinfer.ring import RingParameters, add_weighted_rows, dot_rows, sums_to_residues, unpack

logger = logging.getLogger(__name__)
Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Answers that fail before a server is left alone.
ATTEMPTS: Final = 16


class BlockCheck:
    """r and v of one block. Immutable; safe to share between threads.

    Attributes:
        up: v for uploads of prepared mode, for rows where the plan has no such mode.
        down: r.
    """

    def __init__(self, bundle: NodeBundle, index: int) -> None:
        plan, checks = bundle.plan, bundle.checks
        assert checks is not None  # the caller has looked
        self._ring, self._modulus = plan.ring.parameters, plan.ring.modulus
        self._program = plan.blocks[index].program
        self._hints = None if bundle.hints is None else bundle.hints.blocks[index]
        self.down = output_weights(plan, bundle.plan_hash, checks.seed, index).astype(np.float64)
        count = checked_values(plan, index)
        self.up: Floats = unpack(checks.packed[index][None], count, self._modulus)[0].astype(np.float64)

    @cached_property
    def rows_up(self) -> Floats:
        """Return v for rows: one ciphertext a value of the block's inputs. Prepared mode never asks."""
        if self._hints is None:
            return self.up
        form, maps, up = self._hints.form, self._hints.maps, self.up.astype(np.int64)
        return row_weights(self._program, form, maps, up, self._ring).astype(np.float64)

    def commit(self, uploads: list[Residues]) -> Residues:
        """Return v . b of every sample of a prepared upload, parts of shape (samples, values up) in order."""
        return np.concatenate([self._dot(part, self.up) for part in uploads])

    def holds(self, committed: Residues, answer: Residues) -> bool:
        """Whether an answer of shape (samples, values down), residues in [0, q), is the honest one."""
        return np.array_equal(self._dot(answer, self.down), committed)

    def _dot(self, x: Residues, weights: Floats) -> Residues:
        out = np.empty(len(x), np.int64)
        dot_rows(x, weights, self._modulus, out)
        return out


def row_weights(program: Program, form: PreparedForm, maps: Maps, up: Residues, ring: RingParameters) -> Residues:
    """Return v for rows, one a value of a block's inputs, from v for prepared uploads.

    A row's is what all uploaded copies of its value are multiplied with, through the steps that the node runs in front.

    Args:
        program: the block's.
        form: how it is cut.
        maps: its index maps.
        up: v for prepared uploads, int64 in [0, q), shape (values up,).
        ring: ring.
    """
    steps = (*form.front, Take(form.gathered, "gather", (form.values_up,)))
    outputs = [(len(program.inputs) + len(form.front), up)]
    rows = transpose_steps(program.inputs, steps, outputs, {**maps, "gather": form.gather}, ring)
    return np.concatenate([part.ravel() for part in rows])


class RowSums:
    """A running sum of weighted rows, coefficient by coefficient: v . B as rows go up, r . Y as they come down."""

    def __init__(self, weights: Floats, columns: int, modulus: int) -> None:
        self._weights = weights
        self._modulus = modulus
        self._sums = np.zeros(columns)
        self._lock = threading.Lock()

    def add(self, first: int, rows: Residues) -> None:
        """Add rows of shape (rows, columns), residues in [0, q), of which the first has a number."""
        with self._lock:
            add_weighted_rows(rows, self._weights[first : first + len(rows)], self._modulus, self._sums)

    def weights(self, first: int, count: int) -> Floats:
        """Return the weights of some rows, for who adds them up elsewhere."""
        return self._weights[first : first + count]

    def add_sums(self, sums: Residues) -> None:
        """Add what was added up elsewhere, shape (columns,), residues in [0, q)."""
        with self._lock:
            self._sums = ((self._sums.astype(np.int64) + sums) % self._modulus).astype(np.float64)

    def equals(self, other: RowSums | None) -> bool:
        """Whether all sums are the same residues as another's."""
        return other is not None and np.array_equal(self._residues(), other._residues())

    def _residues(self) -> Residues:
        return sums_to_residues(self._sums, self._modulus)


def forged_answer(block: int) -> IntegrityError:
    """Return the error for an answer that failed its check; nothing of the answer is in it."""
    return IntegrityError(
        f"the server's answer to block {block} is not what the model computes; the query was dropped, nothing of the "
        "answer was used"
    )


class AnswerChecks:
    """The checks of all blocks, made when a block first needs its own: 16 bytes a value that travels."""

    def __init__(self, bundle: NodeBundle) -> None:
        self._bundle = bundle
        self._made: dict[int, BlockCheck] = {}
        self._lock = threading.Lock()

    def of(self, block: int) -> BlockCheck:
        """Return a block's check."""
        with self._lock:
            if block not in self._made:
                self._made[block] = BlockCheck(self._bundle, block)
            return self._made[block]


class Conduct:
    """How a server has behaved; safe to use from several threads.

    Args:
        name: of the server, for the operator.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._failures = 0

    @property
    def failures(self) -> int:
        """Answers that were not what the model computes."""
        return self._failures

    @property
    def name(self) -> str:
        """The server's, for the operator."""
        return self._name

    @property
    def in_quarantine(self) -> bool:
        """Whether it has failed too often."""
        return self._failures >= ATTEMPTS

    def record_failure(self, block: int) -> None:
        """Count a failed check and tell the operator; nothing of the answer is told."""
        with self._lock:
            self._failures += 1
            count = self._failures
        logger.error(
            "server %s: its answer to block %d is not what the model computes (%d of %d)",
            self._name, block, count, ATTEMPTS,
        )  # fmt: skip

    def check(self) -> None:
        """Refuse to ask a server that has failed too often.

        Raises:
            IntegrityError: it has.
        """
        if self.in_quarantine:
            raise IntegrityError(
                f"server {self._name} is in quarantine: {self._failures} of its answers were not what the model "
                "computes; take it out of service, then renew the checks with `heinfer partition --rotate`"
            )
