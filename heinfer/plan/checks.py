"""The node's secrets for checking the server's answers: node/checks.safetensors.

    seed, plan, created, digest    as in `heinfer.plan.sealed`; r of a block is SHAKE-128 of seed, plan hash and block
    <b>       v of block b: residues packed to 50 bits, uint8; one an uploaded value of prepared mode, or of standard
              mode where the plan has no prepared mode

The server's answer is y = P(b) mod q for a public linear map P. With r uniform and secret and v = P^T r, an honest
answer has r . y = v . b mod q always, and any other answer with probability 1 / q. Made in the owner's domain from
server/ by the partitioner; whoever knows them can forge answers, so they live in node/ alone, for its owner's eyes.
Source: Freivalds, Probabilistic machines can use less running time (1977); design note "Encrypted linear algebra".
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, PlanError
from heinfer.operators import Program, apply_transpose
from heinfer.plan.files import CHECKS_FILE
from heinfer.plan.hints import derive_form
from heinfer.plan.schema import Plan
from heinfer.plan.sealed import SEED_BYTES, read_sealed, write_sealed
from heinfer.ring import RingParameters, expand_uniform, pack, packed_bytes, unpack

#: Added to the number of a block: these must not meet any polynomial of ciphertexts, whatever the seeds.
_CHECK_BLOCKS: Final = 2**33
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class NodeChecks:
    """What the node checks answers with: the seed of all r, and one packed v a block."""

    seed: bytes
    created: int
    packed: tuple[NDArray[np.uint8], ...]


def output_weights(plan: Plan, plan_hash: bytes, seed: bytes, block: int) -> NDArray[np.int64]:
    """Return r of a block: int64 in [0, q), one a value that comes back, shape (values,)."""
    ring = plan.ring.parameters
    count = plan.blocks[block].output_rows
    made = [
        expand_uniform(seed, plan_hash, _CHECK_BLOCKS + block, number, ring)
        for number in range(-(-count // ring.degree))
    ]
    return np.concatenate(made)[:count] if made else np.empty(0, np.int64)


def input_weights(
    program: Program, arrays: Arrays, outputs: NDArray[np.int64], ring: RingParameters
) -> NDArray[np.int64]:
    """Return v = P^T r: int64 in [0, q), one an element of the program's inputs, joined.

    Args:
        program: a server's program, cut for prepared mode or not.
        arrays: its integer weights and index maps.
        outputs: r, one an element of the program's outputs, joined.
        ring: ring.
    """
    sizes = [prod(shape) for shape in program.output_shapes]
    parts = np.split(outputs, np.cumsum(sizes)[:-1])
    shaped = [part.reshape(shape) for part, shape in zip(parts, program.output_shapes, strict=True)]
    return np.concatenate([part.ravel() for part in apply_transpose(program, arrays, shaped, ring)])


def write_checks(folder: Path, plan: Plan, plan_hash: bytes, arrays: Arrays) -> None:
    """Make checks from a fresh seed and write them, replacing earlier ones.

    Args:
        folder: node/ of a bundle.
        plan: the plan.
        plan_hash: its hash.
        arrays: the server's integer weights and index maps.
    """
    seed, ring = secrets.token_bytes(SEED_BYTES), plan.ring.parameters
    content: dict[str, NDArray[Any]] = {}
    for index, block in enumerate(plan.blocks):
        form = derive_form(block, arrays, plan.ring) if plan.has_prepared_mode else None
        program = block.program if form is None else form.program
        everything = arrays if form is None else {**arrays, **form.arrays}
        outputs = output_weights(plan, plan_hash, seed, index)
        content[str(index)] = pack(input_weights(program, everything, outputs, ring)[None])[0]
    write_sealed(folder / CHECKS_FILE, seed, plan_hash, content, private=True)


def read_checks(folder: Path, plan: Plan, plan_hash: bytes) -> NodeChecks:
    """Read a node's checks.

    Raises:
        PlanError: missing, damaged, of another plan, of the wrong shapes, or a file that others may read.
    """
    path = folder / CHECKS_FILE
    sealed = read_sealed(path, plan_hash, private=True)
    packed = []
    for index in range(len(plan.blocks)):
        count = checked_values(plan, index)
        found = sealed.arrays.get(str(index))
        if found is None or found.shape != (packed_bytes(count),) or found.dtype != np.uint8:
            raise PlanError(
                f"{path}: the check of block {index} is missing or not for {count} values: copy the folder again"
            )
        try:
            unpack(found[None], count, plan.ring.modulus)
        except CiphertextError as error:
            raise PlanError(f"{path} is malformed: copy the folder again") from error
        packed.append(found)
    return NodeChecks(sealed.seed, sealed.created, tuple(packed))


def checked_values(plan: Plan, block: int) -> int:
    """Return how many values v has: those of a prepared upload, or a standard one where the plan has no other."""
    prepared = plan.blocks[block].prepared
    if plan.has_prepared_mode and prepared is not None:
        return prepared.values_up
    return plan.blocks[block].input_rows
