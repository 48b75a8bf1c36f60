"""Prepare queries before they arrive: fresh secrets, masks and corrections, for every block of every sample.

    hints (node/) --(transform, once)--> BlockMaterial
    fresh secret --(times a)--> masks, --(times hint)--> corrections     for every sample and block; then it is wiped

A `PreparedQuery` owns what encrypts some samples, each block once. Rules (design note, "Why it is safe"): a pair (a, s)
masks one polynomial; every sample of every block has a secret of its own, which lives inside `Preparer.prepare` only;
every transmitted coefficient has noise, padding included; masks can't be copied, pickled or used in another process.

Sizes: 16 bytes a value and sample. A ResNet-20 query has 227,000 values up and 189,000 down: 3.3 MB.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import starmap
from math import prod
from typing import TYPE_CHECKING, Any, Final, Never

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import LocalProtocolError
from heinfer.operators import HintKind
from heinfer.operators.copies import Copies, Owner
from heinfer.operators.prepared import Hint, PreparedForm
from heinfer.operators.residues import compile_step
from heinfer.operators.steps import WEIGHTED, Take
from heinfer.plan import BlockHints, NodeBundle, block_ring, public_polynomials
from heinfer.ring import LANES, RingParameters, Transform, run_tiles, scratch_array, transform_self_test, unpack
from trusted_node.masking import (
    add_to_masks,
    fill_lanes,
    make_dense_corrections,
    make_elementwise_corrections,
    make_masks,
    make_polynomial_corrections,
    remove_corrections,
    tables_of,
    to_residues,
)
from trusted_node.results import row_terms
from trusted_node.sampling import draw_noise, draw_ternary, wipe

if TYPE_CHECKING:
    from heinfer.operators.torch_device import TorchDevice
    from trusted_node.device_products import DeviceProducts, DeviceTransform

Residues = NDArray[np.int64]
Floats = NDArray[np.float64]
#: Linux's advice to leave memory out of core dumps, and to give a forked child zeros instead (madvise(2)).
_DONT_DUMP, _WIPE_ON_FORK = 16, 18
_WORD: Final = 8
_SIGN_BIT: Final = 63
#: From so many samples on, a job takes LANES samples at once; below, most lanes would be empty.
_LANES_OF_SAMPLES: Final = 4
#: Memory that is kept for coming queries.
_SPARE_BYTES: Final = 200 * 2**20
#: Of one query; more than this is kept in its own length.
_ROUNDED_BYTES: Final = 32 * 2**20


class BlockMaterial:
    """What preparing a block needs: public polynomials and hints, transformed. Immutable.

    Attributes:
        form: how the block is cut.
        ring: its ring.
        tables: the same for kernels.
        scale: output scale of every value that comes back, joined over outputs.
        bias: likewise.
        is_direct: whether the corrections of one weighted step are those of the block: nothing happens after it.
        on_device: public polynomials and hints where a device multiplies them, which are not here then; else None.
    """

    def __init__(
        self,
        bundle: NodeBundle,
        block: int,
        hints: BlockHints,
        copies: Copies,
        owner: Owner,
        transform: DeviceTransform | None = None,
    ) -> None:
        assert bundle.hints is not None  # a plan with prepared mode has hints
        self.form: PreparedForm = hints.form
        self.ring: RingParameters = block_ring(bundle.plan, block)
        self.transform = Transform.of(self.ring)
        self.tables = tables_of(self.transform)
        self.public = self.transform.forward(
            public_polynomials(bundle.plan, bundle.plan_hash, bundle.hints.seed, block)
        )
        self.elements = _elements(self.form)
        self._copies, self._owner, self._block = copies, owner, block
        self.hints: tuple[NDArray[Any], ...] = hints.packed
        self.on_device = None
        if transform is None:
            for number in range(len(self.hints)):
                with self.hint(number):
                    pass  # checked once, and kept while there is room
        else:
            self.hints = tuple(starmap(self._load, zip(self.form.hints, hints.packed, strict=True)))
            self.on_device = self._move(transform)
        self.scale, self.bias = row_terms(bundle, block)
        shapes = self.form.program.shapes
        self.starts = np.cumsum([0, *(prod(shape) for shape in self.form.program.inputs)])
        self.sizes = [prod(shape) for shape in shapes]
        moves = [s for s in self.form.program.steps if not isinstance(s, WEIGHTED)]
        plain = all(isinstance(s, Take) and s.indices is None and len(s.sources) == 1 for s in moves)
        self.is_direct = len(self.form.hints) == 1 and plain and len(self.form.program.outputs) == 1
        self.after: list[tuple[int, Callable[[Sequence[Residues]], Residues]]] = []
        arrays = {**hints.maps, **self.form.arrays}
        count = len(self.form.program.inputs)
        for position, step in enumerate(self.form.program.steps):
            if not isinstance(step, WEIGHTED):
                self.after.append((count + position, compile_step(step, arrays, shapes, self.ring)))

    def value_of(self, hint: Hint) -> int:
        """Return the number of the value that a hint's step makes."""
        return len(self.form.program.inputs) + hint.step

    def hint(self, number: int) -> AbstractContextManager[NDArray[Any]]:
        """Lend a hint as kernels want it: transformed, or residues of dense rows, or weights.

        Args:
            number: which of the form's hints; one that a device multiplies is empty.
        """
        found, packed = self.form.hints[number], self.hints[number]
        if self.on_device is not None or found.kind is HintKind.ELEMENTWISE:
            return nullcontext(packed)
        groups = found.rows if found.kind is HintKind.DENSE else -(-found.rows // LANES) * LANES
        size = groups * self.ring.degree * _WORD
        make = partial(self._load, found, packed)
        return self._copies.use(self._owner, (self._block, number), size, make)

    def _move(self, transform: DeviceTransform) -> DeviceProducts:
        """Move what is multiplied with secrets to a device; weights of elementwise hints stay."""
        from trusted_node.device_products import DeviceProducts

        moved = DeviceProducts(transform, self.form, self.public, self.hints)
        self.public = self.public[:0].copy()  # a view would keep all of it
        kept = (hint.kind is HintKind.ELEMENTWISE for hint in self.form.hints)
        self.hints = tuple(data if keep else data[:0].copy() for keep, data in zip(kept, self.hints, strict=True))
        return moved

    def _load(self, hint: Hint, packed: NDArray[Any]) -> NDArray[Any]:
        if hint.kind is HintKind.ELEMENTWISE:
            return packed
        rows = unpack(packed, self.ring.degree, self.ring.modulus)
        return rows if hint.kind is HintKind.DENSE else self.transform.forward(rows)


def _elements(form: PreparedForm) -> NDArray[np.int32]:
    """Return which value lies at every coefficient, -1 for none; shape (ciphertexts, N)."""
    elements = np.full(form.ciphertexts * form.degree, -1, np.int32)
    elements[form.positions] = np.arange(len(form.positions), dtype=np.int32)
    return elements.reshape(form.ciphertexts, form.degree)


class PreparedQuery:
    """Masks and corrections of some samples, for every block once. Made by `Preparer`; for one process, for minutes.

    `encrypt` turns a block's masks into ciphertexts, once; `decrypt` uses up its corrections, once. There is no other
    way to either, no copy and no pickle.

    Attributes:
        samples: how many it is for.
        made_at: `time.monotonic()` when its first secret was drawn.
    """

    __slots__ = (
        "_corrections",
        "_masks",
        "_materials",
        "_memory",
        "_owner",
        "_pending",
        "_spare",
        "made_at",
        "samples",
    )

    def __init__(self, materials: Sequence[BlockMaterial], samples: int, spare: _SpareMemory) -> None:
        self.samples = samples
        self.made_at = time.monotonic()
        self._owner = os.getpid()
        self._materials = materials
        sizes = [(m.form.values_up, m.form.values_down) for m in materials]
        self._spare = spare
        self._memory: Residues | None = spare.take(samples * sum(up + down for up, down in sizes))
        self._masks: dict[int, Residues] = {}
        self._corrections: dict[int, Residues] = {}
        first = 0
        for block, (up, down) in enumerate(sizes):
            self._masks[block] = self._memory[first : first + samples * up].reshape(samples, up)
            first += samples * up
            self._corrections[block] = self._memory[first : first + samples * down].reshape(samples, down)
            first += samples * down
        self._pending: set[int] = set()

    def encrypt(self, block: int, x: NDArray[Any], scale: Floats) -> Residues:
        """Encrypt a block's inputs: the only use of its masks.

        Args:
            block: index.
            x: values, or integers made by the block's front steps; shape (samples, elements).
            scale: what they are multiplied with before rounding, shape (samples,).

        Returns:
            b in [0, q), shape (samples, values up). It lies where the masks were.

        Raises:
            LocalProtocolError: used before, or in another process than the one that made it.
        """
        material, masks = self._take(block, self._masks)
        if masks.shape[0] != len(x):
            wipe(masks)
            raise LocalProtocolError(f"prepared for {masks.shape[0]} samples, found {len(x)}")
        self._pending.add(block)
        add_to_masks(x, scale, material.form.gather, material.ring.modulus, masks)
        return masks

    def decrypt(self, block: int, y: Residues, scale: Floats) -> NDArray[np.float32]:
        """Decrypt and scale back a block's answer: the only use of its corrections, which are wiped.

        Args:
            block: index; `encrypt` has been called for it.
            y: the server's residues in [0, q), shape (samples, values down).
            scale: as in `encrypt`.

        Returns:
            Values, biases added, shape (samples, values down).

        Raises:
            LocalProtocolError: as `encrypt`, or nothing was encrypted.
        """
        if block not in self._pending:
            raise LocalProtocolError(f"block {block}: nothing was encrypted that could be decrypted")
        material, corrections = self._take(block, self._corrections)
        self._pending.discard(block)
        if y.shape != corrections.shape:
            wipe(corrections)
            raise LocalProtocolError(f"block {block}: expected an answer of shape {corrections.shape}, found {y.shape}")
        out = np.empty(y.shape, np.float32)
        remove_corrections(y, corrections, scale, material.scale, material.bias, material.ring.modulus, out)
        return out

    def material(self, block: int) -> tuple[Residues, Residues]:
        """Return masks and corrections to be filled; for `Preparer` alone, before anybody else has the query."""
        return self._masks[block], self._corrections[block]

    def wipe(self, reuse: bool = True) -> None:
        """Overwrite what is secret; nothing is left that could be used.

        Masks that were used are ciphertexts by now, and corrections that were used are zeros.

        Args:
            reuse: whether the memory may serve another query.
        """
        wipe(*self._masks.values(), *self._corrections.values())
        self._masks.clear()
        self._corrections.clear()
        self._pending.clear()
        memory, self._memory = self._memory, None
        if memory is not None and reuse:
            self._spare.give_back(memory)

    def _take(self, block: int, arrays: dict[int, Residues]) -> tuple[BlockMaterial, Residues]:
        if os.getpid() != self._owner:
            raise LocalProtocolError("a prepared query belongs to the process that made it")
        array = arrays.pop(block, None)  # atomic: of two threads one gets it
        if array is None:
            raise LocalProtocolError(f"block {block}: this mask has been used; a mask is used once")
        return self._materials[block], array

    def __reduce__(self) -> Never:
        """Refuse: masks are never pickled or copied."""
        raise TypeError("a prepared query can't be copied or pickled")

    __copy__ = __reduce__

    def __deepcopy__(self, memo: object) -> Never:
        """Refuse."""
        raise TypeError("a prepared query can't be copied or pickled")


class _SpareMemory:
    """Memory of queries that are over, for the next ones: what the system maps anew costs more than what goes into it.

    Safe to use from several threads. Who takes memory overwrites what it uses of it. Groups of joined queries have all
    sizes, so lengths are rounded up to 2, 3, 4, 6, 8, 12, ...: else memory would be kept for every size. What lies
    beyond is never touched and so never given to us by the system.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, list[Residues]] = {}
        self._bytes = 0

    def take(self, words: int) -> Residues:
        """Return memory of some length or more, its contents arbitrary but not secret."""
        length = _rounded_up(words) if words * _WORD <= _ROUNDED_BYTES else words
        with self._lock:
            kept = self._kept.get(length)
            if kept:
                self._bytes -= length * _WORD
                return kept.pop()
        return secret_memory(length)

    def give_back(self, memory: Residues) -> None:
        """Keep memory that holds nothing secret any more, unless there is enough."""
        with self._lock:
            if self._bytes + memory.nbytes > _SPARE_BYTES:  # lengths that will not come again are among these
                self._kept.clear()
                self._bytes = 0
            if memory.nbytes <= _SPARE_BYTES:
                self._bytes += memory.nbytes
                self._kept.setdefault(len(memory), []).append(memory)


def _rounded_up(words: int) -> int:
    """Return the next power of two, or three quarters of it: 5 -> 6, 7 -> 8."""
    power = 1 << max(0, words - 1).bit_length()
    return power // 4 * 3 if words <= power // 4 * 3 else power


def secret_memory(words: int) -> Residues:
    """Return int64 memory that is left out of core dumps and that a forked child finds zeroed."""
    memory = mmap.mmap(-1, max(1, words) * _WORD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(_DONT_DUMP)
    memory.madvise(_WIPE_ON_FORK)
    return np.frombuffer(memory, np.int64, max(1, words))[:words]


@dataclass(frozen=True, slots=True)
class _Job:
    """One block, of one sample or of up to LANES: ternary secrets (samples, N), and their evaluations (N, LANES).

    The evaluations of one sample are in lane `lane`, those of several in the lanes from 0 on.
    """

    block: int
    samples: slice
    secrets: NDArray[np.int8]
    evaluations: Floats
    lane: int


def _transforms_on(device: TorchDevice, bundle: NodeBundle) -> dict[RingParameters, DeviceTransform]:
    """Return a device's transforms of all rings of a bundle; the only way to PyTorch in a node."""
    from trusted_node.device_products import DeviceTransform

    rings = dict.fromkeys(block_ring(bundle.plan, i) for i in range(len(bundle.plan.blocks)))
    return {ring: DeviceTransform(device, ring) for ring in rings}


def _residues_of(job: _Job, modulus: int) -> Residues:
    """Return a job's evaluations in [0, q), shape (samples, N): secret, to be wiped."""
    count = job.samples.stop - job.samples.start
    rows = np.empty((count, len(job.evaluations)), np.int64)
    np.copyto(rows, job.evaluations[:, job.lane : job.lane + count].T, casting="unsafe")
    negative = rows >> _SIGN_BIT
    negative &= modulus
    rows += negative
    wipe(negative)
    return rows


class Preparer:
    """Prepares queries; safe to use from several threads.

    Args:
        bundle: the node's folder, with hints.
        device: where secrets are multiplied with public polynomials and hints; None: natively.
        copies: keeps transformed hints; None: of this preparer alone, within the default budget.

    Raises:
        ParameterError: this machine's transform is not exact, or the device's.
        InputError: hints do not fit into the device's memory.
    """

    def __init__(self, bundle: NodeBundle, device: TorchDevice | None = None, copies: Copies | None = None) -> None:
        assert bundle.hints is not None  # the caller has looked
        self._file = bundle.hints.file
        self._copies = copies or Copies()
        self._owner = self._copies.new_owner()
        for ring in {block_ring(bundle.plan, i) for i in range(len(bundle.plan.blocks))}:
            transform_self_test(ring)
        self._spare = _SpareMemory()
        transforms = {} if device is None else _transforms_on(device, bundle)
        try:
            self.materials = [
                BlockMaterial(bundle, i, hints, self._copies, self._owner, transforms.get(block_ring(bundle.plan, i)))
                for i, hints in enumerate(bundle.hints.blocks)
            ]
        except BaseException:
            self.close()
            raise

    @property
    def query_bytes(self) -> int:
        """Bytes of one prepared sample."""
        return sum((m.form.values_up + m.form.values_down) * _WORD for m in self.materials)

    def prepare(self, samples: int, threads: int | None = None) -> PreparedQuery:
        """Prepare a query.

        Args:
            samples: how many samples it is for; each has its own secrets.
            threads: most threads to use; None: the cores of this process.

        Raises:
            PlanError: somebody has written to the file of hints.
        """
        self._file.check_unchanged()
        query = PreparedQuery(self.materials, samples, self._spare)
        secrets: list[NDArray[Any]] = []
        jobs: list[_Job] = []
        try:
            for degree in dict.fromkeys(m.ring.degree for m in self.materials):
                jobs += self._draw(degree, samples, secrets, threads)
            run_tiles(lambda job: self._run(query, job), jobs, threads=threads)
        except BaseException:
            query.wipe(reuse=False)
            raise
        finally:
            wipe(*secrets)
        return query

    def close(self) -> None:
        """Let go of the transformed hints: who prepares later makes what it needs, and nothing of it stays."""
        self._copies.discard(self._owner)

    def forget(self) -> None:
        """In a forked child: the parent's lock may be held for ever."""
        self._spare = _SpareMemory()
        self._copies.forget()

    def _draw(self, degree: int, samples: int, secrets: list[NDArray[Any]], threads: int | None) -> list[_Job]:
        """Draw secrets for all blocks of a degree, a fresh one for every block and sample."""
        blocks = [i for i, m in enumerate(self.materials) if m.ring.degree == degree]
        transform = self.materials[blocks[0]].transform
        drawn = draw_ternary(samples * len(blocks), degree)
        secrets.append(drawn)
        if samples < _LANES_OF_SAMPLES:
            evaluations = transform.forward(drawn, threads=threads)
            secrets.append(evaluations)
            return [
                _Job(b, slice(s, s + 1), drawn[n : n + 1], evaluations[n // LANES], n % LANES)
                for n, (b, s) in enumerate((b, s) for b in blocks for s in range(samples))
            ]
        jobs = []
        for number, block in enumerate(blocks):
            own = drawn[number * samples : (number + 1) * samples]
            evaluations = transform.forward(own, threads=threads)
            secrets.append(evaluations)
            for group, first in enumerate(range(0, samples, LANES)):
                part = slice(first, min(first + LANES, samples))
                jobs.append(_Job(block, part, own[part], evaluations[group], 0))
        return jobs

    def _run(self, query: PreparedQuery, job: _Job) -> None:
        temporary: list[NDArray[Any]] = []
        try:
            self._make(query, job, temporary)
        finally:
            wipe(*temporary)

    def _make(self, query: PreparedQuery, job: _Job, temporary: list[NDArray[Any]]) -> None:
        """Fill masks and corrections of a job; what else holds something secret is added to `temporary`."""
        material = self.materials[job.block]
        form, ring = material.form, material.tables
        masks, corrections = (array[job.samples] for array in query.material(job.block))
        samples, degree, device = len(masks), form.degree, material.on_device
        noise = draw_noise(samples * form.values_up).reshape(samples, form.values_up)
        temporary.append(noise)
        if device is not None:
            moved = _residues_of(job, int(ring.modulus))
            temporary.append(moved)
            device.make_masks(moved, noise, masks)
        else:
            secrets, lanes, products = (scratch_array(name, degree, LANES) for name in ("secrets", "lanes", "products"))
            temporary += [secrets, products]
            if samples == 1:
                fill_lanes(job.evaluations, job.lane, secrets)
            else:
                secrets[...] = job.evaluations
            to_residues(secrets, ring.modulus)
            make_masks(material.public, secrets, ring, material.elements, noise, lanes, products, masks)
        values: dict[int, Residues] = {}
        for number, hint in enumerate(form.hints):
            value = material.value_of(hint)
            out = corrections
            if not material.is_direct:
                out = np.empty((samples, material.sizes[value]), np.int64)
                temporary.append(out)
            with material.hint(number) as data:
                match hint.kind:
                    case HintKind.POLYNOMIAL if device is not None:
                        device.make_polynomial_corrections(number, hint, moved, out)
                    case HintKind.DENSE if device is not None:
                        device.make_dense_corrections(number, job.secrets, out)
                    case HintKind.POLYNOMIAL:
                        strides = hint.row_stride, hint.read_stride
                        make_polynomial_corrections(
                            data, hint.rows, secrets, ring, hint.reads, *strides, lanes, products, out
                        )
                    case HintKind.DENSE:
                        plus, minus = (np.empty(job.secrets.shape, np.int64) for _ in range(2))
                        temporary += [plus, minus]
                        for sign, bits in ((1, plus), (-1, minus)):
                            np.equal(job.secrets, sign, out=bits, casting="unsafe")
                            np.negative(bits, out=bits)
                        make_dense_corrections(data, plus, minus, material.ring.modulus, out)
                    case HintKind.ELEMENTWISE:
                        source = form.program.steps[hint.step].source  # type: ignore[union-attr]
                        part = slice(int(material.starts[source]), int(material.starts[source + 1]))
                        make_elementwise_corrections(data, masks[:, part], noise[:, part], ring, out)
            values[value] = out
        if not material.is_direct:
            self._finish(material, values, corrections, temporary)

    @staticmethod
    def _finish(
        material: BlockMaterial, values: dict[int, Residues], corrections: Residues, temporary: list[NDArray[Any]]
    ) -> None:
        """Run what follows the weights on the corrections, and join the outputs."""
        form = material.form
        empty = np.empty((len(corrections), 0), np.int64)
        known = [values.get(number, empty) for number in range(len(material.sizes))]
        for number, run in material.after:
            known[number] = run(known)
            temporary.append(known[number])
        first = 0
        for output in form.program.outputs:
            size = material.sizes[output]
            corrections[:, first : first + size] = known[output]
            first += size
