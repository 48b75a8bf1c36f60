"""The node's hints of prepared mode: node/hints.safetensors.

    seed, plan, created, digest    as in `heinfer.plan.sealed`; seeds are renewed every 30 days. Polynomial a of
                (block, ciphertext) is SHAKE-128 of seed, plan hash, block and ciphertext
    <b>.<i>     hint i of block b: residues packed to 50 bits, uint8 (rows, packed bytes), or weights, int16
    map.<name>  index maps that lie before or after weights
    batch.<b>   on request: W(a) of a batch, one polynomial a value that comes back, packed

Made in the owner's domain by the partitioner, and renewed from server/ by `heinfer partition --rotate`, while plan and
server stay as they are. Seed and hints are not secret keys, but a hint determines the weights it was made of.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import PlanError
from heinfer.operators import (
    HintKind,
    PreparedForm,
    ResidueProgram,
    degrees_from,
    make_hints,
    map_names,
    prepare_form,
)
from heinfer.plan.files import HINTS_FILE
from heinfer.plan.mapping import MappedFile
from heinfer.plan.schema import Block, Plan, PreparedInfo, RingInfo
from heinfer.plan.sealed import SEED_BYTES, read_sealed, write_sealed
from heinfer.ring import RingParameters, expand_uniform, pack, packed_bytes, run_tiles

#: Age at which seed and hints should be renewed (design note "Encrypted linear algebra": what a fixed a is worth).
LIFETIME_S: Final = 30 * 24 * 3600
#: Added to the number of a block whose polynomials are for batches: they must not meet those of single samples.
_BATCH_BLOCKS: Final = 2**32
#: Coefficients that are evaluated at a time.
_BATCH_COLUMNS: Final = 512
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class BlockHints:
    """How a block is cut, its index maps, and one packed array a hint."""

    form: PreparedForm
    maps: Arrays
    packed: tuple[NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class NodeHints:
    """Hints of all blocks, and the seed that they were made from; `batch` has one packed array a block, or is None.

    Packed arrays lie over the mapping of `file`.
    """

    seed: bytes
    created: int
    blocks: tuple[BlockHints, ...]
    batch: tuple[NDArray[np.uint8], ...] | None
    file: MappedFile

    @property
    def expired(self) -> bool:
        """Whether the seed is older than `LIFETIME_S`."""
        return time.time() - self.created > LIFETIME_S


def block_ring(plan: Plan, block: int) -> RingParameters:
    """Return the ring of a block's prepared ciphertexts: the plan's modulus, the block's degree.

    Raises:
        PlanError: the block has no prepared mode.
        ParameterError: the modulus does not fit the degree.
    """
    prepared = plan.blocks[block].prepared
    if prepared is None:
        raise PlanError(f"block {block} has no prepared mode")
    return RingParameters(prepared.degree, plan.ring.modulus)


def public_polynomials(plan: Plan, plan_hash: bytes, seed: bytes, block: int) -> NDArray[np.int64]:
    """Expand a block's polynomials a; int64 in [0, q), shape (ciphertexts, N)."""
    ring = block_ring(plan, block)
    prepared = plan.blocks[block].prepared
    assert prepared is not None  # block_ring has looked
    made = [expand_uniform(seed, plan_hash, block, c, ring) for c in range(prepared.ciphertexts)]
    return np.stack(made) if made else np.empty((0, ring.degree), np.int64)


def batch_polynomials(plan: Plan, plan_hash: bytes, seed: bytes, block: int) -> NDArray[np.int64]:
    """Expand the polynomials a of a batch, one a value that goes up; int64 in [0, q), shape (values, N)."""
    ring = plan.ring.parameters
    made = np.empty((plan.blocks[block].input_rows, ring.degree), np.int64)

    def run(row: int) -> None:
        made[row] = expand_uniform(seed, plan_hash, _BATCH_BLOCKS + block, row, ring)

    run_tiles(run, range(len(made)))
    return made


def derive_form(block: Block, maps: Arrays, ring: RingInfo) -> PreparedForm | None:
    """Cut a block as the partitioner did.

    Raises:
        PlanError: plan and program do not agree, or the degree is none that the plan's ring allows.
    """
    found = block.prepared
    if found is None:
        return None
    allowed = found.degree in degrees_from(ring.degree)
    form = prepare_form(block.program, maps, found.degree, found.dense) if allowed else None
    if form is None or PreparedInfo.of(form) != found:
        raise PlanError("plan.json: a block's prepared form does not follow from its program; partition again")
    return form


def write_hints(folder: Path, plan: Plan, plan_hash: bytes, arrays: Arrays, batch: bool = False) -> None:
    """Make hints from a fresh seed and write them, replacing earlier ones.

    Args:
        folder: node/ of a bundle.
        plan: the plan; nothing is written where a block has no prepared mode.
        plan_hash: its hash.
        arrays: the server's integer weights and index maps.
        batch: whether to make hints for batches too, 12.8 KB a value that comes back at N = 2048.
    """
    if not plan.has_prepared_mode:
        return
    seed = secrets.token_bytes(SEED_BYTES)
    content: dict[str, NDArray[Any]] = {}
    for index, block in enumerate(plan.blocks):
        form = derive_form(block, arrays, plan.ring)
        assert form is not None  # has_prepared_mode
        public = public_polynomials(plan, plan_hash, seed, index)
        for number, hint in enumerate(make_hints(form, arrays, public, block_ring(plan, index))):
            content[f"{index}.{number}"] = hint if form.hints[number].kind is HintKind.ELEMENTWISE else pack(hint)
        content.update({f"map.{name}": arrays[name] for name in map_names(block.program)})
        if batch:
            content[f"batch.{index}"] = pack(_batch_hint(plan, plan_hash, seed, index, arrays))
    write_sealed(folder / HINTS_FILE, seed, plan_hash, content)


def read_hints(folder: Path, plan: Plan, plan_hash: bytes) -> NodeHints:
    """Read and check a node's hints.

    Raises:
        PlanError: missing, damaged, of another plan, or of the wrong shapes.
    """
    path = folder / HINTS_FILE
    sealed = read_sealed(path, plan_hash)
    content = sealed.arrays
    maps = {name.removeprefix("map."): array for name, array in content.items() if name.startswith("map.")}
    blocks = []
    for index, block in enumerate(plan.blocks):
        block.program.check_maps(maps)
        form = derive_form(block, maps, plan.ring)
        assert form is not None  # the plan has prepared mode, or nobody reads hints
        packed = tuple(_packed(path, content, index, number, form) for number in range(len(form.hints)))
        blocks.append(BlockHints(form, maps, packed))
    return NodeHints(sealed.seed, sealed.created, tuple(blocks), _batch_hints(path, content, plan), sealed.file)


def has_batch_hints(folder: Path) -> bool:
    """Whether a node's folder has hints for batches; False where its hints can't be read."""
    try:
        return any(name.startswith("batch.") for name in MappedFile(folder / HINTS_FILE).arrays())
    except PlanError:
        return False


def _batch_hint(plan: Plan, plan_hash: bytes, seed: bytes, block: int, arrays: Arrays) -> NDArray[np.int64]:
    """Apply a block to the polynomials of a batch: coefficients are samples, as in standard mode."""
    ring, program = plan.ring.parameters, plan.blocks[block].program
    public = batch_polynomials(plan, plan_hash, seed, block)
    operator = ResidueProgram(program, arrays, ring)
    made = np.empty((plan.blocks[block].output_rows, ring.degree), np.int64)
    for first in range(0, ring.degree, _BATCH_COLUMNS):
        columns = slice(first, min(first + _BATCH_COLUMNS, ring.degree))
        made[:, columns] = operator.evaluate_joined(np.ascontiguousarray(public[:, columns].T)).T
    return made


def _batch_hints(path: Path, content: Arrays, plan: Plan) -> tuple[NDArray[np.uint8], ...] | None:
    found = [name for name in content if name.startswith("batch.")]
    if not found:
        return None
    hints = tuple(content.get(f"batch.{index}", np.empty(0)) for index in range(len(plan.blocks)))
    for index, (hint, block) in enumerate(zip(hints, plan.blocks, strict=True)):
        shape = (block.output_rows, packed_bytes(plan.ring.degree))
        if hint.shape != shape or hint.dtype != np.uint8:
            raise PlanError(f"{path}: the batch hint of block {index} is missing or not of shape {shape}")
    return hints


def _packed(path: Path, content: Arrays, block: int, number: int, form: PreparedForm) -> NDArray[Any]:
    hint = form.hints[number]
    found = content.get(f"{block}.{number}")
    shape, dtype = (hint.rows, packed_bytes(form.degree)), np.dtype(np.uint8)
    if hint.kind is HintKind.ELEMENTWISE:
        shape, dtype = (hint.rows,), np.dtype(np.int16)  # type: ignore[assignment]
    if found is None or found.shape != shape or found.dtype != dtype:
        raise PlanError(f"{path}: hint {number} of block {block} is missing or not of shape {shape}")
    return found
