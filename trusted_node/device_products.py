"""Products with secrets on a device of PyTorch: what `masking` makes of public polynomials and hints, bit for bit.

    evaluations of s, a, hints --(times, lane by lane)--(inverse transform)--> a s, hint s --(read)--> host
    dense hints --(one float64 product of limbs with ternary secrets)--> hint s                    --> host

Worked example: a block of 30 ciphertexts at N = 4096 and one sample. 30 x 4096 products of residues, then 12 stages of
30 x 2048 butterflies, each stage some fifteen elementwise operations for all polynomials at once. What goes to the
device is the secret's 4096 evaluations, what comes back are the products at the places where values lie.

A device that makes them belongs to the trusted node: it holds secrets meanwhile. What held any is overwritten before
its memory is given back (copies in buffers of drivers and libraries are out of reach). No branch, no address and no
number of steps depends on a secret.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from heinfer.errors import ParameterError
from heinfer.operators.prepared import Hint, HintKind, PreparedForm
from heinfer.operators.torch_device import TorchDevice
from heinfer.ring import LANES, RingParameters, Transform
from heinfer.ring.parameters import LIMB_BITS
from trusted_node.masking import subtract_from_noise

Floats = NDArray[np.float64]
Residues = NDArray[np.int64]
_SIGN_BIT: Final = 63
_LIMB_MASK: Final = 2**LIMB_BITS - 1
#: Coefficients of products in memory at a time (64 MiB; twice as much beside them).
_PIECE: Final = 1 << 23


class SecretMemory:
    """Tensors that hold something secret: overwritten when they are given back.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lent: list[torch.Tensor] = []

    def lend(self, *shape: int, kind: torch.dtype = torch.int64) -> torch.Tensor:
        """Return a tensor of a shape, its contents arbitrary."""
        made = torch.empty(shape, dtype=kind, device=self._device)
        self._lent.append(made)
        return made

    def wipe(self) -> None:
        """Overwrite all of them with zeros."""
        for tensor in self._lent:
            tensor.zero_()
        self._lent.clear()


@contextmanager
def _secret_memory(device: TorchDevice) -> Iterator[SecretMemory]:
    """Take the device, and memory there that is wiped at the end, whatever comes."""
    with device.lock, torch.inference_mode():
        memory = SecretMemory(device.device)
        try:
            yield memory
        finally:
            memory.wipe()


class DeviceTransform:
    """The inverse transform of a ring on a device, and products of evaluations.

    Args:
        device: where.
        parameters: ring.

    Raises:
        ParameterError: the device's arithmetic is not exact.
        InputError: no room on the device.
    """

    def __init__(self, device: TorchDevice, parameters: RingParameters) -> None:
        self.device, self.parameters = device, parameters
        self.native = Transform.of(parameters)
        self._modulus = parameters.modulus
        self._roots = device.keep(self.native.inverse_roots, torch.int64)
        self._ratios = device.keep(self.native.inverse_roots / parameters.modulus)
        self._check()

    def keep(self, evaluations: Floats, count: int) -> torch.Tensor:
        """Keep evaluations, as `Transform.forward` returns them, on the device: int64 in [0, q), shape (count, N)."""
        return self.device.keep(rows_of(evaluations, count, self._modulus))

    def multiply(self, left: torch.Tensor, right: torch.Tensor, memory: SecretMemory) -> torch.Tensor:
        """Multiply polynomials, each of the left with each of the right.

        Args:
            left: evaluations in [0, q), shape (rows, N), public.
            right: evaluations in [0, q), shape (samples, N), secret.
            memory: for the result and what is needed meanwhile.

        Returns:
            Coefficients in [0, q), shape (rows, samples, N).
        """
        rows, samples, degree = len(left), len(right), self.parameters.degree
        x = memory.lend(rows, samples, degree)
        estimate = memory.lend(rows, samples, degree, kind=torch.float64)
        quotient = memory.lend(rows, samples, degree)
        x.copy_(right[None])
        estimate.copy_(x).mul_(left[:, None]).mul_(1.0 / self._modulus)
        self.multiply_in_place(x, left[:, None], estimate, quotient)
        half = memory.lend(rows, samples, degree // 2)
        estimate, quotient = (buffer.view(-1)[: half.numel()] for buffer in (estimate, quotient))
        size = 1
        while size < degree:
            self._inverse_stage(x.view(rows * samples, -1, 2, size), half, estimate, quotient)
            size *= 2
        scale = int(self.native.degree_inverse)
        for start in (0, degree // 2):
            part, guess, rest = x[..., start : start + degree // 2], estimate.view_as(half), quotient.view_as(half)
            guess.copy_(part).mul_(scale / self._modulus)
            self.multiply_in_place(part, scale, guess, rest)
        return x

    def _inverse_stage(
        self, x: torch.Tensor, half: torch.Tensor, estimate: torch.Tensor, quotient: torch.Tensor
    ) -> None:
        """Butterflies (u, v) -> (u + v, w (u - v)) modulo q, in place, between values `size` apart.

        Args:
            x: residues in [0, q), shape (polynomials, blocks, 2, size).
            half: scratch of half as many elements, int64.
            estimate: likewise, float64.
            quotient: likewise, int64.
        """
        polynomials, blocks, _, size = x.shape
        upper, lower = x[:, :, 0], x[:, :, 1]
        shape = (polynomials, blocks, size)
        difference, guess, rest = half.view(shape), estimate.view(shape), quotient.view(shape)
        torch.sub(upper, lower, out=difference)
        upper.add_(lower).sub_(self._modulus)
        _add_where_negative(upper, self._modulus, rest)
        roots = slice(blocks, 2 * blocks)
        guess.copy_(difference).mul_(self._ratios[roots, None])
        self.multiply_in_place(difference, self._roots[roots, None], guess, rest)
        lower.copy_(difference)

    def multiply_in_place(
        self, x: torch.Tensor, w: torch.Tensor | int, estimate: torch.Tensor, quotient: torch.Tensor
    ) -> None:
        """Replace x by x * w modulo q, in [0, q).

        Proof. The estimate of x * w / q, which is below 2**50, has three roundings at most of 2**-53 relative: it is
        off by 3/8, rounded by 7/8, so that |x * w - t * q| < q. Products wrap modulo 2**64, their difference fits.

        Args:
            x: |x| < q.
            w: in [0, q).
            estimate: x * w / q; overwritten.
            quotient: scratch.
        """
        quotient.copy_(estimate.round_()).mul_(self._modulus)
        x.mul_(w).sub_(quotient)
        _add_where_negative(x, self._modulus, quotient)

    def _check(self) -> None:
        """Compare products with the native transform's, at the extremes too."""
        degree, modulus = self.parameters.degree, self._modulus
        scattered = (np.arange(degree) + 1) * 0x9E3779B97F4A7 % modulus  # as in `transform_self_test`
        rows = np.stack([np.full(degree, modulus - 1), scattered, np.zeros(degree, np.int64)])
        with _secret_memory(self.device) as memory:
            evaluations = torch.from_numpy(rows).to(self.device.device)
            found = self.multiply(evaluations, evaluations, memory).cpu().numpy().copy()
        for left, products in zip(rows.tolist(), found, strict=True):
            for right, product in zip(rows.tolist(), products, strict=True):
                lanes = np.zeros((1, degree, LANES))
                lanes[0, :, 0] = [a * b % modulus for a, b in zip(left, right, strict=True)]
                if not np.array_equal(self.native.inverse(lanes, 1)[0], product):
                    raise ParameterError(
                        f"self-test of {self.device.name}: expected exact transforms modulo {modulus} at degree "
                        f"{degree}, found wrong ones; leave --device out"
                    )


class DeviceProducts:
    """Public polynomials and hints of a block on a device, and their products with secrets. Immutable.

    Args:
        transform: of the block's ring.
        form: how the block is cut.
        public: evaluations of the polynomials a.
        hints: one array a hint: evaluations (POLYNOMIAL), or residues (DENSE); others stay with the caller.

    Raises:
        InputError: no room on the device.
    """

    def __init__(
        self, transform: DeviceTransform, form: PreparedForm, public: Floats, hints: Sequence[NDArray[Any]]
    ) -> None:
        self._transform, self._device = transform, transform.device
        self._modulus = transform.parameters.modulus
        self._public = transform.keep(public, form.ciphertexts)
        self._positions = self._device.keep(form.positions)
        self._hints: dict[int, torch.Tensor] = {}
        self._reads: dict[int, torch.Tensor] = {}
        for number, (hint, data) in enumerate(zip(form.hints, hints, strict=True)):
            if hint.kind is HintKind.POLYNOMIAL:
                self._hints[number] = transform.keep(data, hint.rows)
                self._reads[number] = self._device.keep(hint.reads)
            elif hint.kind is HintKind.DENSE:
                limbs = np.concatenate([data >> LIMB_BITS, data & _LIMB_MASK])
                self._hints[number] = self._device.keep(limbs, torch.float64)

    def make_masks(self, secrets: Residues, noise: NDArray[np.int8], out: Residues) -> None:
        """Write e - a s mod q for every uploaded value: `masking.make_masks`.

        Args:
            secrets: evaluations in [0, q), shape (samples, N).
            noise: e, shape (samples, values).
            out: shape (samples, values).
        """
        samples, degree = secrets.shape
        with _secret_memory(self._device) as memory:
            moved = self._move(secrets, memory)
            whole = memory.lend(samples, len(self._public), degree)
            with closing(self._products(self._public, moved)) as pieces:
                for part, products in pieces:
                    whole[:, part] = products.transpose(0, 1)
            read = memory.lend(samples, len(self._positions))
            torch.index_select(whole.view(samples, -1), 1, self._positions, out=read)
            torch.from_numpy(out).copy_(read)
        subtract_from_noise(noise, self._modulus, out)

    def make_polynomial_corrections(self, number: int, hint: Hint, secrets: Residues, out: Residues) -> None:
        """Write hint times secret at the coefficients that are read: `masking.make_polynomial_corrections`.

        Args:
            number: of the hint.
            hint: the same.
            secrets: evaluations in [0, q), shape (samples, N).
            out: shape (samples, rows * reads).
        """
        reads = self._reads[number]
        with _secret_memory(self._device) as memory:
            moved = self._move(secrets, memory)
            whole = memory.lend(*out.shape)
            with closing(self._products(self._hints[number], moved)) as pieces:
                for part, products in pieces:
                    rows = torch.arange(part.start, part.stop, device=reads.device)
                    steps = torch.arange(len(reads), device=reads.device)
                    places = (rows[:, None] * hint.row_stride + steps * hint.read_stride).reshape(-1)
                    read = memory.lend(part.stop - part.start, len(out), len(reads))
                    torch.index_select(products, 2, reads, out=read)
                    by_sample = memory.lend(len(out), part.stop - part.start, len(reads))
                    by_sample.copy_(read.transpose(0, 1))
                    whole.index_copy_(1, places, by_sample.view(len(out), -1))
            torch.from_numpy(out).copy_(whole)

    def make_dense_corrections(self, number: int, secrets: NDArray[np.int8], out: Residues) -> None:
        """Write the products of rows with ternary secrets: `masking.make_dense_corrections`.

        A sum of N limbs below 2**25 is below 2**25 * N <= 2**40: exact in float64.

        Args:
            number: of the hint.
            secrets: -1, 0, 1, shape (samples, N).
            out: shape (samples, rows).
        """
        limbs, samples, rows = self._hints[number], len(out), out.shape[1]
        with _secret_memory(self._device) as memory:
            ternary = self._move(secrets, memory, torch.int8)
            factors = memory.lend(secrets.shape[1], samples, kind=torch.float64)
            factors.copy_(ternary.T)
            sums = memory.lend(2 * rows, samples, kind=torch.float64)
            torch.matmul(limbs, factors, out=sums)
            high, low, quotient = (memory.lend(rows, samples) for _ in range(3))
            high.copy_(sums[:rows])
            low.copy_(sums[rows:])
            estimate = memory.lend(rows, samples, kind=torch.float64)
            estimate.copy_(high).mul_(2**LIMB_BITS / self._modulus)
            self._transform.multiply_in_place(high, 2**LIMB_BITS, estimate, quotient)
            high.add_(low).sub_(self._modulus)  # above -q - 2**40 and below 2**40
            _add_where_negative(high, self._modulus, quotient)
            _add_where_negative(high, self._modulus, quotient)
            by_sample = memory.lend(samples, rows)  # PyTorch would copy a transpose itself, and not wipe it
            by_sample.copy_(high.T)
            torch.from_numpy(out).copy_(by_sample)

    def _products(self, left: torch.Tensor, secrets: torch.Tensor) -> Generator[tuple[slice, torch.Tensor], None, None]:
        """Yield rows and their products, shape (rows, samples, N), wiped when the next ones are asked for."""
        count = max(1, _PIECE // secrets.numel())
        for first in range(0, len(left), count):
            part = slice(first, min(first + count, len(left)))
            memory = SecretMemory(secrets.device)
            try:
                yield part, self._transform.multiply(left[part], secrets, memory)
            finally:
                memory.wipe()

    def _move(self, secrets: NDArray[Any], memory: SecretMemory, kind: torch.dtype = torch.int64) -> torch.Tensor:
        return memory.lend(*secrets.shape, kind=kind).copy_(torch.from_numpy(secrets))


def rows_of(evaluations: Floats, count: int, modulus: int) -> Residues:
    """Bring centred evaluations, shape (groups, N, LANES), into [0, q) and the shape (count, N)."""
    degree = evaluations.shape[1]
    rows = np.ascontiguousarray(evaluations.transpose(0, 2, 1)).reshape(-1, degree)[:count].astype(np.int64)
    rows += (rows >> _SIGN_BIT) & modulus
    return rows


def _add_where_negative(x: torch.Tensor, modulus: int, scratch: torch.Tensor) -> None:
    """Add q where x is negative, without a branch, in place."""
    torch.bitwise_right_shift(x, _SIGN_BIT, out=scratch)
    x.add_(scratch.bitwise_and_(modulus))
