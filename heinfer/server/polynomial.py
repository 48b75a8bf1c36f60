"""Evaluate deep blocks: the one module of the server that imports SEAL. It has no key but those that relinearise.

    ciphertexts of inputs --(layer: W x mod every prime)--> --(polynomial: SEAL)--> --(sums)--> ... --> outputs

Linear maps are ours, on residues, exact (`heinfer.ring.chain`); products of ciphertexts, relinearisation and rescaling
are SEAL's. Both see the same arrays: SEAL keeps ciphertexts transformed, and a linear map of polynomials acts on their
transforms alike. A constant has the same transform everywhere, so adding a bias is adding one residue.

Memory: a ciphertext takes up to 10 MB, and the first activations of a LeNet-5 would take 47 GB. So a layer, its
activation and the sum that reads it alone (pooling) run unit by unit: as many rows as fit into `UNIT_BYTES`, down to
the sums, which are kept in a file that the system may page out. Units run in processes, since SEAL's binding holds
Python's lock. Files hold what a server may see, and are removed at the end.

Products are relinearised when they are rescaled, and rescaled when they are summed up: pooling four squares costs one
relinearisation, not four. These, and SEAL's compression of what it saves, are most of the work.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from math import prod
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final

import numpy as np
import tenseal.sealapi as sealapi
from numpy.typing import NDArray

from heinfer.errors import CiphertextError, HeinferError
from heinfer.operators.polynomials import Track, polynomial_terms
from heinfer.plan.deep import DeepBlock, Layer
from heinfer.processes import core_count
from heinfer.ring.chain import ChainMatrix
from heinfer.ring.seal_chain import SealChain

Residues = NDArray[np.int64]
#: Ciphertexts that one unit holds at a time.
UNIT_BYTES: Final = 256 * 2**20
#: What a product reads at a time.
_READ_BYTES: Final = 64 * 2**20
_LEAST_READ: Final = 2048
_READ_COST: Final = 24
#: Units of a layer for every process, so that all of them have work until the end.
_UNITS_EACH: Final = 2
_POLYNOMIALS: Final = 2
_WORD: Final = 8


@dataclass(frozen=True, slots=True)
class Cipher:
    """A ciphertext of SEAL with the scale that the plan gives it."""

    value: Any
    primes: int
    scale: float


class SealArithmetic:
    """Operations on ciphertexts for `heinfer.operators.polynomials`."""

    def __init__(self, chain: SealChain, keys: Any) -> None:
        self._chain = chain
        self._keys = keys
        self._evaluator = sealapi.Evaluator(chain.context)
        self._encoder = sealapi.CKKSEncoder(chain.context)

    def track(self, value: Cipher) -> Track:
        """Return primes and scale of a value."""
        return Track(value.primes, value.scale)

    def multiply(self, left: Cipher, right: Cipher) -> Cipher:
        """Multiply; `rescale` relinearises."""
        result = sealapi.Ciphertext()
        if left is right:
            self._evaluator.square(left.value, result)
        else:
            self._evaluator.multiply(left.value, right.value, result)
        return self._as(result, left.primes, left.scale * right.scale)

    def scale_by(self, value: Cipher, factor: float, scale: float) -> Cipher:
        """Multiply by a constant; one that is rounded to 0 is 1 unit, since SEAL makes no ciphertexts of nothing."""
        result = sealapi.Ciphertext()
        if round(factor * scale) == 0:
            factor = 1 / scale
        self._evaluator.multiply_plain(value.value, self._encode(factor, value.primes, scale), result)
        return self._as(result, value.primes, value.scale * scale)

    def add(self, left: Cipher, right: Cipher) -> Cipher:
        """Add two values of one scale, which may differ by what floats round."""
        result = sealapi.Ciphertext()
        right.value.scale = left.value.scale
        self._evaluator.add(left.value, right.value, result)
        return self._as(result, left.primes, left.scale)

    def shift(self, value: Cipher, constant: float) -> Cipher:
        """Add a constant."""
        result = sealapi.Ciphertext()
        self._evaluator.add_plain(value.value, self._encode(constant, value.primes, value.value.scale), result)
        return self._as(result, value.primes, value.scale)

    def rescale(self, value: Cipher) -> Cipher:
        """Relinearise where there is a product, drop the last prime and divide by it."""
        if value.value.size() > _POLYNOMIALS:
            self._evaluator.relinearize_inplace(value.value, self._keys)
        result = sealapi.Ciphertext()
        self._evaluator.rescale_to_next(value.value, result)
        dropped = self._chain.parameters.primes[value.primes - 1]
        return self._as(result, value.primes - 1, value.scale / dropped)

    def lower(self, value: Cipher, primes: int) -> Cipher:
        """Drop last primes."""
        if primes == value.primes:
            return value
        result = sealapi.Ciphertext()
        self._evaluator.mod_switch_to(value.value, self._chain.name(primes), result)
        return self._as(result, primes, value.scale)

    def _encode(self, constant: float, primes: int, scale: float) -> Any:
        plain = sealapi.Plaintext()
        self._encoder.encode(float(constant), self._chain.name(primes), float(scale), plain)
        return plain

    @staticmethod
    def _as(cipher: Any, primes: int, scale: float) -> Cipher:
        cipher.scale = scale
        return Cipher(cipher, primes, scale)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a matrix that are multiplied together.

    Attributes:
        positions: of the rows, among those asked for.
        columns: that any of them reads, ascending.
        weights: float64, shape (rows, columns).
    """

    positions: list[int]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]


class Matrix:
    """The sparse integer matrix of a layer."""

    def __init__(self, layer: Layer, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._pointers = arrays[f"{layer.name}.indptr"]
        self._indices = arrays[f"{layer.name}.indices"]
        self._weights = arrays[f"{layer.name}.weights"]

    def columns(self, row: int) -> NDArray[np.int32]:
        """Return the columns that a row reads."""
        return self._indices[self._pointers[row] : self._pointers[row + 1]]

    @property
    def partition(self) -> bool:
        """Whether every column is in one row at most, with weight 1."""
        return bool(np.all(self._weights == 1)) and len(np.unique(self._indices)) == len(self._indices)

    def group(self, rows: Sequence[int]) -> Iterator[RowGroup]:
        """Yield groups of rows that share most of what they read, as neighbouring windows of a convolution do."""
        alike: dict[bytes, list[int]] = {}
        for position, row in enumerate(rows):
            alike.setdefault(self.columns(row).tobytes(), []).append(position)
        positions: list[int] = []
        columns = np.empty(0, np.int64)
        for more in alike.values():
            own = np.unique(self.columns(rows[more[0]])).astype(np.int64)
            joined = np.union1d(columns, own)
            apart = _cost(len(positions), len(columns)) + _cost(len(more), len(own))
            if positions and _cost(len(positions) + len(more), len(joined)) > apart:
                yield self._dense(rows, positions, columns)
                positions, columns = list(more), own
            else:
                positions, columns = positions + more, joined
        if positions:
            yield self._dense(rows, positions, columns)

    def _dense(self, rows: Sequence[int], positions: list[int], columns: NDArray[np.int64]) -> RowGroup:
        weights = np.zeros((len(positions), len(columns)))
        for place, position in enumerate(positions):
            span = slice(self._pointers[rows[position]], self._pointers[rows[position] + 1])
            np.add.at(weights[place], np.searchsorted(columns, self._indices[span]), self._weights[span])
        return RowGroup(positions, columns, weights)


def _cost(rows: int, columns: int) -> int:
    """Work of a product: reading and splitting a residue takes as long as multiplying it by `_READ_COST` weights."""
    return columns * (rows + _READ_COST)


@dataclass(frozen=True, slots=True)
class Store:
    """Ciphertexts of one value, or keys, in a file: int64 residues, shape (elements, 2, primes, N), transformed.

    Attributes:
        path: the file.
        shape: of the array.
    """

    path: Path
    shape: tuple[int, int, int, int]

    def create(self) -> Residues:
        """Make the file, all of it: on a disk that is full, writing to a mapped file of holes would end the process.

        Raises:
            OSError: there is no room.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _WORD * prod(self.shape))
        finally:
            os.close(descriptor)
        return self.open("r+")

    def open(self, mode: str = "r") -> Residues:
        """Map the file."""
        return np.memmap(self.path, np.int64, mode, shape=self.shape)  # type: ignore[call-overload, no-any-return]


_folders: set[Path] = set()


@contextmanager
def scratch_folder(parent: Path | None) -> Iterator[Path]:
    """Make a folder for ciphertexts that is removed at the end; in the system's for temporary files where None."""
    folder = Path(tempfile.mkdtemp(prefix="heinfer-deep-", dir=parent))
    _folders.add(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _folders.discard(folder)


@atexit.register
def _remove_folders() -> None:
    """Remove what threads that the end of the process cuts off did not."""
    for folder in list(_folders):
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that run together: of a layer, and of the sum that follows it, none where none does."""

    layer: int
    rows: tuple[int, ...]
    sums: tuple[int, ...] = ()


class DeepRunner:
    """Runs units of one request. One in every process.

    Args:
        block: the block.
        arrays: its layers' arrays.
        keys: for relinearisation: residues, shape (primes, 2, primes and P, N), transformed.

    Raises:
        CiphertextError: these are no keys of the chain.
    """

    def __init__(self, block: DeepBlock, arrays: Mapping[str, NDArray[Any]], keys: Residues) -> None:
        self._block = block
        self._arrays = arrays
        self._chain = SealChain(sealapi, block.chain.parameters)
        self._primes = block.chain.primes
        self._matrices = [Matrix(layer, arrays) for layer in block.layers]
        self._arithmetic = SealArithmetic(self._chain, self._chain.load_keys(keys))

    def run(self, unit: Unit, sources: Sequence[Store], target: Store) -> None:
        """Compute the rows of a unit and write them to their store."""
        layer = self._block.layers[unit.layer]
        values = dict(zip(unit.rows, self._linear(unit.layer, unit.rows, [s.open() for s in sources]), strict=True))
        out = target.open("r+")
        if layer.activation == "none":
            for row, value in values.items():
                out[row] = value
        elif not unit.sums:
            for row, value in values.items():
                out[row] = self._finish(layer, self._terms(layer, row, value))
        else:
            for row in unit.sums:
                terms = (
                    self._terms(layer, int(c), values[int(c)]) for c in self._matrices[unit.layer + 1].columns(row)
                )
                out[row] = self._finish(layer, reduce(self._arithmetic.add, terms))

    def _linear(self, number: int, rows: Sequence[int], sources: Sequence[Residues]) -> Residues:
        layer, degree = self._block.layers[number], self._block.chain.degree
        out = np.empty((len(rows), _POLYNOMIALS, layer.primes, degree), np.int64)
        for group in self._matrices[number].group(rows):
            self._multiply(group, sources, out)
        if layer.kind == "weighted":
            constants = self._arrays[f"{layer.name}.bias"]
            if layer.activation == "square":
                constants = constants + self._arrays[f"{layer.name}.shift"]
            for position, row in enumerate(rows):
                constant = round(float(constants[row]) * layer.scale)
                for index, prime in enumerate(self._primes[: layer.primes]):
                    b = out[position, 0, index]
                    b += constant % prime
                    b[b >= prime] -= prime
        return out

    def _multiply(self, group: RowGroup, sources: Sequence[Residues], out: Residues) -> None:
        """Write the rows of a group."""
        matrix, columns, degree = ChainMatrix(group.weights), group.columns, out.shape[3]
        bounds = np.cumsum([0, *(len(source) for source in sources)])
        edges = np.searchsorted(columns, bounds)
        own = [columns[a:b] - start for a, b, start in zip(edges, edges[1:], bounds, strict=False)]
        step = min(degree, max(_LEAST_READ, _READ_BYTES // (_WORD * max(1, len(columns)))))
        result = np.empty((len(group.positions), step), np.int64)
        for index, prime in enumerate(self._primes[: out.shape[2]]):
            for polynomial in range(_POLYNOMIALS):
                for start in range(0, degree, step):
                    span = slice(start, min(start + step, degree))
                    read = [s[c, polynomial, index, span] for s, c in zip(sources, own, strict=True) if len(c)]
                    part = result[:, : span.stop - start]
                    matrix.multiply(read[0] if len(read) == 1 else np.concatenate(read), prime, part)
                    out[group.positions, polynomial, index, span] = part

    def _terms(self, layer: Layer, row: int, residues: Residues) -> Cipher:
        """Return what an activation makes of a value, not rescaled yet."""
        value = Cipher(self._chain.load(residues, layer.scale), layer.primes, layer.scale)
        if layer.activation == "square":  # its shift is in the bias
            return self._arithmetic.multiply(value, value)
        coefficients = self._arrays[f"{layer.name}.coefficients"][row].tolist()
        return polynomial_terms(self._arithmetic, value, coefficients, self._primes, self._block.activation_scale)

    def _finish(self, layer: Layer, terms: Cipher) -> Residues:
        while terms.primes > layer.primes_left:
            terms = self._arithmetic.rescale(terms)
        return self._chain.dump(terms.value)


class DeepEvaluator:
    """Evaluates one deep block; a context manager whose processes start when they are needed.

    Args:
        block: the block.
        arrays: its layers' arrays.
        scratch: folder for ciphertexts that do not fit; the system's for temporary files where None.
        workers: processes; the cores of this process where None, 0 for none.

    Raises:
        PlanError: arrays don't fit.
    """

    def __init__(
        self,
        block: DeepBlock,
        arrays: Mapping[str, NDArray[Any]],
        scratch: Path | None = None,
        workers: int | None = None,
    ) -> None:
        block.check_arrays(arrays)
        self.block = block
        self._arrays = {k: v for k, v in arrays.items() if any(k.startswith(f"{x.name}.") for x in block.layers)}
        self._matrices = [Matrix(layer, self._arrays) for layer in block.layers]
        self.scratch = scratch
        self._changing = threading.Lock()
        self._running: _Processes | None = None
        self._stopped = False
        self._workers = core_count() if workers is None else workers

    def evaluate(self, inputs: Residues, keys: Residues) -> Residues:
        """Evaluate the block.

        Args:
            inputs: int64, shape (elements of all inputs, 2, primes, N), transformed; may be mapped from a file.
            keys: for relinearisation: residues, shape (primes, 2, primes and P, N), transformed.

        Returns:
            Likewise, of all outputs, each with the primes that the fewest of them have.

        Raises:
            CiphertextError: inputs or keys are none of the chain.
        """
        block = self.block
        with scratch_folder(self.scratch) as folder:
            stores, first = [], 0
            for number, tensor in enumerate(block.inputs):
                size = prod(tensor.shape)
                store = Store(folder / f"input-{number}", (size, *inputs.shape[1:]))
                store.create()[...] = inputs[first : first + size]
                stores.append(store)
                first += size
            held = Store(folder / "keys", keys.shape)
            held.create()[...] = keys
            results = self.evaluate_stored(folder, stores, held)
            return np.concatenate([s.open()[:, :, : block.result_primes] for s in results])

    def stop(self) -> None:
        """End a running evaluation, which raises then, and refuse further ones; from any thread."""
        with self._changing:
            self._stopped = True
            if self._running is not None:
                self._running.stop()

    def evaluate_stored(self, folder: Path, inputs: Sequence[Store], keys: Store) -> list[Store]:
        """Evaluate the block on what lies in files, one evaluation at a time.

        Args:
            folder: for what is made on the way; the caller removes it.
            inputs: of every input; files that nothing reads any more are removed on the way.
            keys: for relinearisation.

        Returns:
            Of every output, with `result_primes` primes or more.

        Raises:
            CiphertextError: inputs or keys are none of the chain.
            OSError: there is no room for what is made on the way.
            HeinferError: it was stopped, or a process died.
        """
        processes = _Processes(self.block, self._arrays, keys, self._workers)
        with self._changing:
            if self._stopped:
                raise HeinferError("the evaluation of deep blocks was stopped")
            self._running = processes
        try:
            return self._run_layers(processes, folder, inputs)
        except BrokenProcessPool as error:
            raise HeinferError("a process that evaluates a deep block died, or was stopped") from error
        finally:
            with self._changing:
                self._running = None

    def _run_layers(self, processes: _Processes, folder: Path, inputs: Sequence[Store]) -> list[Store]:
        block, degree = self.block, self.block.chain.degree
        stores: list[Store | None] = list(inputs)
        with processes as run:
            for number, layer in enumerate(block.layers):
                if self._fused_with(number):
                    stores.append(None)
                    continue
                units, source = self._units(number)
                shape = (layer.rows, _POLYNOMIALS, layer.primes_left, degree)
                target = Store(folder / f"value-{len(stores)}", shape)
                target.create()
                read = block.layers[source].sources
                run(units, [s for s in (stores[r] for r in read) if s is not None], target)
                stores.append(target)
                self._remove_read(stores, number)
        return [s for s in (stores[r] for r in block.results) if s is not None]

    def _remove_read(self, stores: Sequence[Store | None], number: int) -> None:
        """Remove the files that no layer after this one reads."""
        needed = {s for layer in self.block.layers[number + 1 :] for s in layer.sources} | set(self.block.results)
        for value, store in enumerate(stores):
            if store is not None and value not in needed:
                store.path.unlink(missing_ok=True)

    def _fused_with(self, number: int) -> bool:
        """Whether the result of a layer is read by the next one alone, which adds it up: then it is not kept."""
        own = len(self.block.inputs) + number
        readers = [n for n, layer in enumerate(self.block.layers) if own in layer.sources]
        if readers != [number + 1] or own in self.block.results or not self.block.layers[number].degree:
            return False
        following = self.block.layers[number + 1]
        adds = following.kind == "sum" and following.sources == (own,)
        return (
            adds and following.primes == self.block.layers[number].primes_left and self._matrices[number + 1].partition
        )

    def _units(self, number: int) -> tuple[list[Unit], int]:
        """Cut a layer into units; returns them and the layer that is computed first."""
        layer = self.block.layers[number]
        if number and self._fused_with(number - 1):
            inner = self.block.layers[number - 1]
            most = self._most(inner)
            matrix, below = self._matrices[number], self._matrices[number - 1]
            order = sorted(range(layer.rows), key=lambda r: below.columns(int(matrix.columns(r)[0])).tolist())
            units, sums, rows = list[Unit](), list[int](), dict[int, None]()
            for row in order:
                needed = [int(c) for c in matrix.columns(row)]
                if rows and len(rows) + len(needed) > most:
                    units.append(Unit(number - 1, tuple(rows), tuple(sums)))
                    sums, rows = [], {}
                sums.append(row)
                rows.update(dict.fromkeys(needed))
            return [*units, Unit(number - 1, tuple(rows), tuple(sums))], number - 1
        most = self._most(layer)
        matrix = self._matrices[number]
        order = sorted(range(layer.rows), key=lambda r: matrix.columns(r).tolist())
        return [Unit(number, tuple(order[i : i + most])) for i in range(0, len(order), most)], number

    def _most(self, layer: Layer) -> int:
        """Return how many rows of a layer one unit holds."""
        fitting = UNIT_BYTES // (_POLYNOMIALS * layer.primes * self.block.chain.degree * _WORD)
        return max(1, min(fitting, -(-layer.rows // (_UNITS_EACH * max(1, self._workers)))))


class _Processes:
    """Runs units, in processes or in this one; a context manager, used once.

    Processes end when their parent does, and when `stop` closes the pipe that they all look at.
    """

    def __init__(self, block: DeepBlock, arrays: Mapping[str, NDArray[Any]], keys: Store, workers: int) -> None:
        self._arguments = (block, dict(arrays), keys)
        self._workers = workers
        self._executor: ProcessPoolExecutor | None = None
        self._runner: DeepRunner | None = None
        self._context = get_context("spawn")
        self._life, self._own_end = self._context.Pipe(duplex=False)

    def __enter__(self) -> _Processes:
        block, arrays, keys = self._arguments
        if self._workers:
            arguments = (*self._arguments, self._life)
            self._executor = ProcessPoolExecutor(self._workers, self._context, _start, arguments)
        else:
            self._runner = DeepRunner(block, arrays, keys.open())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.stop()
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self.stop()
        self._life.close()

    def stop(self) -> None:
        """End the processes at once."""
        self._own_end.close()

    def __call__(self, units: list[Unit], sources: list[Store], target: Store) -> None:
        if self._runner is not None:
            for unit in units:
                self._runner.run(unit, sources, target)
            return
        assert self._executor is not None  # one or the other
        futures: list[Future[None]] = [self._executor.submit(_run, unit, sources, target) for unit in units]
        for future in futures:
            future.result()


_runner: list[DeepRunner | CiphertextError] = []


def _start(block: DeepBlock, arrays: dict[str, NDArray[Any]], keys: Store, life: Connection) -> None:
    """Set a worker up; Ctrl-C is its parent's business. What is wrong with the keys, the first unit says."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(life,), daemon=True).start()
    try:
        _runner.append(DeepRunner(block, arrays, keys.open()))
    except CiphertextError as error:
        _runner.append(error)


def _end_with(life: Connection) -> None:
    """End this worker when its parent is gone, or wants it."""
    parent = parent_process()
    wait([life] if parent is None else [life, parent.sentinel])
    os._exit(1)


def _run(unit: Unit, sources: list[Store], target: Store) -> None:
    runner = _runner[0]
    if isinstance(runner, CiphertextError):
        raise runner
    runner.run(unit, sources, target)
