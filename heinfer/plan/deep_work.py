"""What an upload of a deep block means to both parties, counted: residues, products, relinearisations, bytes.

    block, products of its matrices --> DeepWork --(times a machine's constants, `heinfer.plan.forecast`)--> seconds

A residue is a coefficient modulo one prime. An upload takes as long for one sample as for all slots, so samples are not
counted here. How rows are grouped, and what passes through files, is the server's affair: it counts its linear maps
itself (`heinfer.server.polynomial.counting`). Polynomials are counted by evaluating them on counters.

Worked example. A square of a value with 6 primes at N = 16384, where a polynomial has 98,304 residues: two are loaded,
three made, 6 * 2 * 7 rows of keys read (1.4 million residues); two rescalings read 2 * 6 and 2 * 5 rows; 8 are saved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from heinfer.operators.polynomials import Track, polynomial_terms
from heinfer.plan.deep import DeepBlock, Layer
from heinfer.ring import packed_bytes

#: Polynomials of a ciphertext, of a product before it is relinearised.
_PAIR = 2
_TRIPLE = 3


@dataclass(frozen=True, slots=True)
class LinearWork:
    """What the server's linear maps mean, and what it holds meanwhile.

    Attributes:
        products: multiply-adds of a residue with an integer.
        moved: residues that are read, and written.
        units: pieces that processes take.
        scratch_bytes: files at their peak, exactly.
        memory_bytes: of its processes at their peak, beside the server itself.
        kept: numbers of the layers whose results are kept; what another adds up at once is not.
    """

    products: int
    moved: int
    units: int
    scratch_bytes: int
    memory_bytes: int
    kept: frozenset[int]


@dataclass(frozen=True, slots=True)
class DeepWork:
    """What one upload of a deep block means.

    Attributes:
        linear: its linear maps.
        encrypted: residues that the node encrypts, those of relinearisation keys included.
        decrypted: residues that it decrypts.
        passed: residues that pass into and out of SEAL on the server.
        combined: residues that products, sums and constants make there.
        rescaled: residues that rescalings read.
        switched: residues of keys that relinearisations read.
        bytes_up: payload.
        bytes_down: payload.
        messages: of the upload and its answer.
    """

    linear: LinearWork
    encrypted: int
    decrypted: int
    passed: int
    combined: int
    rescaled: int
    switched: int
    bytes_up: int
    bytes_down: int
    messages: int


@dataclass(slots=True)
class _Counts:
    """Residues so far, divided by N."""

    passed: int = 0
    combined: int = 0
    rescaled: int = 0
    switched: int = 0

    def add(self, other: _Counts, times: int) -> None:
        self.passed += times * other.passed
        self.combined += times * other.combined
        self.rescaled += times * other.rescaled
        self.switched += times * other.switched


@dataclass(frozen=True, slots=True)
class _Counted:
    """A ciphertext, by its polynomials, primes and scale."""

    polynomials: int
    primes: int
    scale: float


@dataclass(slots=True)
class _Counting:
    """Arithmetic that counts, for `heinfer.operators.polynomials`."""

    moduli: tuple[int, ...]
    counts: _Counts = field(default_factory=_Counts)

    def track(self, value: _Counted) -> Track:
        """Return primes and scale of a value."""
        return Track(value.primes, value.scale)

    def multiply(self, left: _Counted, right: _Counted) -> _Counted:
        """Count a product."""
        return self._made(_Counted(_TRIPLE, left.primes, left.scale * right.scale))

    def scale_by(self, value: _Counted, factor: float, scale: float) -> _Counted:
        """Count a product with a constant."""
        return self._made(_Counted(value.polynomials, value.primes, value.scale * scale))

    def add(self, left: _Counted, right: _Counted) -> _Counted:
        """Count a sum."""
        return self._made(_Counted(max(left.polynomials, right.polynomials), left.primes, left.scale))

    def shift(self, value: _Counted, constant: float) -> _Counted:
        """Count a sum with a constant."""
        return self._made(value)

    def rescale(self, value: _Counted) -> _Counted:
        """Count a rescaling, and a relinearisation where there is a product."""
        if value.polynomials > _PAIR:
            self.counts.switched += value.primes * _PAIR * (value.primes + 1)
        self.counts.rescaled += _PAIR * value.primes
        return _Counted(_PAIR, value.primes - 1, value.scale / self.moduli[value.primes - 1])

    def lower(self, value: _Counted, primes: int) -> _Counted:
        """Count a copy, where primes are dropped."""
        return value if primes == value.primes else self._made(_Counted(value.polynomials, primes, value.scale))

    def _made(self, value: _Counted) -> _Counted:
        self.counts.combined += value.polynomials * value.primes
        return value


def deep_work(block: DeepBlock, linear: LinearWork, chunk_bytes: int) -> DeepWork:
    """Count what one upload of a block takes.

    Args:
        block: the block.
        linear: what its linear maps take.
        chunk_bytes: largest payload of a message.
    """
    degree, primes = block.chain.degree, len(block.chain.primes)
    counts = _Counts()
    for number, layer in enumerate(block.layers):
        if layer.activation != "none":
            sums = block.layers[number + 1].rows if number not in linear.kept else layer.rows
            _count_activation(block, layer, sums, counts)
    row = packed_bytes(degree)
    step = max(1, chunk_bytes // row)
    return DeepWork(
        linear=linear,
        encrypted=degree * (block.key_rows + sum(prod(t.shape) for t in block.inputs) * _PAIR * primes),
        decrypted=degree * block.rows_down,
        passed=degree * counts.passed,
        combined=degree * counts.combined,
        rescaled=degree * counts.rescaled,
        switched=degree * counts.switched,
        bytes_up=row * block.rows_up,
        bytes_down=row * block.rows_down,
        messages=-(-block.rows_up // step) + -(-block.rows_down // step),
    )


def _count_activation(block: DeepBlock, layer: Layer, results: int, counts: _Counts) -> None:
    """Count the activation of a layer; where sums follow at once, `results` are these, and terms are rescaled there."""
    value = _Counted(_PAIR, layer.primes, layer.scale)
    each = _Counting(block.chain.primes)
    if layer.activation == "square":
        terms = each.multiply(value, value)
    else:
        terms = polynomial_terms(each, value, [1.0] * (layer.degree + 1), block.chain.primes, block.activation_scale)
    each.counts.passed += _PAIR * layer.primes
    counts.add(each.counts, layer.rows)
    counts.combined += (layer.rows - results) * terms.polynomials * terms.primes  # sums
    once = _Counting(block.chain.primes)
    while terms.primes > layer.primes_left:
        terms = once.rescale(terms)
    once.counts.passed += _PAIR * layer.primes_left
    counts.add(once.counts, results)
