"""Products of integer weights with residues on a device of PyTorch, exactly, by limbs of either kind.

    residues --(split)--> limbs --(one product for all limbs)--> sums of limbs --(join)--> residues

Worked example: 64 outputs, 576 inputs, 3136 columns. As float64, two limbs of 25 bits make a product of 64 x 576 x
6272. As int8, a residue is 7 digits and a weight 2, so one product of 129 x 576 x 21952 on integer units gives all
pairs of digits: 7 times the multiply-adds, which pays wherever a device is more than 7 times as fast on int8 (by their
data sheets GPUs with float64 units about 30 times, others some hundred times). `faster_limbs` measures which.

Formal guarantee. FLOAT64: inputs are cut so that a row's |weights| sum to 2**28 - 1 at most, so every partial sum is an
integer below 2**53 (`heinfer.ring.product`). INT8: every digit is within [-128, 127], so a product is at most 2**14 and
a sum over 2**16 inputs at most 2**30, within int32; `_join_digits` proves the rest.
"""

from __future__ import annotations

import enum
import time
from typing import Any, Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from heinfer.operators.torch_device import TorchDevice, join_limb_sums, multiply_mod, to_residues
from heinfer.ring.parameters import LIMB_BITS, RingParameters, checked_weights, cut_inputs

_LIMB_MASK: Final = 2**LIMB_BITS - 1
#: Digits of 8 bits, from -128 to 127: a residue below 2**50 has 7, a weight of 16 bits has 2.
_RESIDUE_DIGITS: Final = 7
_DIGIT_BITS: Final = 8
#: What is taken off weights, which go up to 32767, so that two digits do: these reach from -32896 to 32639.
_WEIGHT_SHIFT: Final = 128
#: Inputs per product of int8.
_INT8_INPUTS: Final = 1 << 16
#: `torch._int_mm` takes multiples of 8, and on a GPU more than 16 rows.
_INT8_STEP, _INT8_ROWS = 8, 24
#: Groups up to which int8 is used: `torch._int_mm` multiplies one pair of matrices, so each group is a call.
_INT8_GROUPS: Final = 4
#: Shape of the product that `faster_limbs` times, by the kind of device: outputs, inputs, columns. A GPU is only busy
#: with large ones; a CPU may have no units for int8, and takes seconds for them then.
_PROBE: Final = {"cpu": (32, 576, 49), "cuda": (512, 4608, 3136)}


class Limbs(enum.Enum):
    """How integers are cut for a device's units."""

    FLOAT64 = "float64"
    INT8 = "int8"


class LimbProducts(Protocol):
    """Integer matrices of one shape, one a group, on a device.

    Attributes:
        limbs: planes that `split` makes.
        word_bytes: bytes of an element of such a plane, and of its sums: what working memory is made of.
    """

    limbs: int
    word_bytes: tuple[int, int]

    def split(self, residues: torch.Tensor) -> torch.Tensor:
        """Cut residues, any shape, into planes of limbs, shape (limbs, ...)."""

    def multiply(self, limbs: torch.Tensor) -> torch.Tensor:
        """Multiply limbs, shape (groups, inputs, limbs, columns); int64 residues, shape (groups, outputs, columns)."""


class FloatProducts:
    """Products of two limbs of 25 bits in float64; see `LimbProducts`.

    Args:
        weights: integers, float64, shape (groups, outputs, inputs).
        parameters: ring.
        device: where to.
    """

    limbs = 2
    word_bytes = (8, 8)

    def __init__(self, weights: NDArray[np.float64], parameters: RingParameters, device: TorchDevice) -> None:
        self._modulus = parameters.modulus
        self._chunks = cut_inputs(np.abs(weights.reshape(-1, weights.shape[2])))
        self._weights = device.keep(weights)

    def split(self, residues: torch.Tensor) -> torch.Tensor:
        """Upper limbs, then lower ones."""
        return torch.stack([residues >> LIMB_BITS, residues & _LIMB_MASK]).double()

    def multiply(self, limbs: torch.Tensor) -> torch.Tensor:
        """Multiply, chunk of inputs by chunk."""
        groups, inputs, _, columns = limbs.shape
        flat = limbs.reshape(groups, inputs, 2 * columns)
        total: torch.Tensor | None = None
        for chunk in self._chunks:
            sums = torch.matmul(self._weights[:, :, chunk], flat[:, chunk])
            part = join_limb_sums(sums[..., :columns], sums[..., columns:], self._modulus)
            total = part if total is None else to_residues(total.add_(part).sub_(self._modulus), self._modulus)
        assert total is not None  # callers leave out products of no inputs
        return total


class ByteProducts:
    """Products of digits of 8 bits in int8, sums in int32; see `LimbProducts`.

    A weight w is 128 + 256 * w1 + w0 with both digits in [-128, 127]. The 128 belongs to every weight alike, so it adds
    128 times the sum of a column, which a row of ones beside the digits makes in the same product.

    Args:
        weights: integers up to 2**15 - 1 in magnitude, float64, shape (groups, outputs, inputs).
        parameters: ring.
        device: where to.
    """

    limbs = _RESIDUE_DIGITS
    word_bytes = (1, 8)

    def __init__(self, weights: NDArray[np.float64], parameters: RingParameters, device: TorchDevice) -> None:
        self._modulus = parameters.modulus
        groups, self._outputs, inputs = weights.shape
        shifted = weights.astype(np.int64) - _WEIGHT_SHIFT
        low = _low_digit(shifted)
        self._rows = max(_INT8_ROWS, _rounded_up(2 * self._outputs + 1))
        digits = np.zeros((groups, self._rows, _rounded_up(inputs)), np.int8)
        digits[:, : self._outputs, :inputs] = (shifted - low) >> _DIGIT_BITS
        digits[:, self._outputs : 2 * self._outputs, :inputs] = low
        digits[:, 2 * self._outputs, :inputs] = 1
        self._digits = device.keep(digits)

    def split(self, residues: torch.Tensor) -> torch.Tensor:
        """Digits, the lowest first; seven hold any integer from -2**55 to 2**54."""
        made, rest = [], residues
        for _ in range(_RESIDUE_DIGITS):
            digit = _low_digit(rest)
            made.append(digit.to(torch.int8))
            rest = (rest - digit) >> _DIGIT_BITS
        return torch.stack(made)

    def multiply(self, limbs: torch.Tensor) -> torch.Tensor:
        """Multiply, group by group."""
        groups, inputs, _, columns = limbs.shape
        width = self._digits.shape[2]
        flat = limbs.new_zeros((groups, width, _rounded_up(_RESIDUE_DIGITS * columns)))
        flat[:, :inputs, : _RESIDUE_DIGITS * columns] = limbs.reshape(groups, inputs, -1)
        return torch.stack([self._multiply_group(g, flat[g], columns) for g in range(groups)])

    def _multiply_group(self, group: int, flat: torch.Tensor, columns: int) -> torch.Tensor:
        total: torch.Tensor | None = None
        for first in range(0, flat.shape[0], _INT8_INPUTS):
            chunk = slice(first, first + _INT8_INPUTS)
            sums = torch._int_mm(self._digits[group][:, chunk].contiguous(), flat[chunk])
            by_digit = sums[:, : _RESIDUE_DIGITS * columns].reshape(self._rows, _RESIDUE_DIGITS, columns)
            part = self._join_digits(by_digit)
            total = part if total is None else to_residues(total.add_(part).sub_(self._modulus), self._modulus)
        assert total is not None  # there is at least one input
        return total

    def _join_digits(self, sums: torch.Tensor) -> torch.Tensor:
        """Join sums of products of digits, int32 of shape (rows, 7, columns), into residues.

        Proof. Sums are at most 2**30 in magnitude. Digit s of the result gets the sums of weight digit 0 with residue
        digit s and of weight digit 1 with residue digit s - 1, and 128 times the sum of residue digits s: at most
        2**31 + 2**7 * 2**23 < 2**31.6 in magnitude (a sum of 2**16 digits is at most 2**23). Digits 0 to 3, and 4 to 7,
        weighted by powers of 2**8, make at most 2**31.6 * 2**24.01 < 2**56 each: exact in int64. The upper half is
        reduced, multiplied by 2**32 modulo q, and the lower half added: below q + 2**56, which one remainder reduces.
        """
        outputs = self._outputs
        upper, lower, ones = sums[:outputs], sums[outputs : 2 * outputs], sums[2 * outputs]
        halves = []
        for digits in (range(4), range(4, _RESIDUE_DIGITS + 1)):
            half = torch.zeros((outputs, sums.shape[2]), dtype=torch.int64, device=sums.device)
            for power, digit in enumerate(digits):
                if digit < _RESIDUE_DIGITS:
                    half += (lower[:, digit].long() + _WEIGHT_SHIFT * ones[digit].long()) << (_DIGIT_BITS * power)
                if digit:
                    half += upper[:, digit - 1].long() << (_DIGIT_BITS * power)
            halves.append(half)
        base = torch.tensor(1 << 32, device=sums.device)
        upper_half = torch.remainder(halves[1], self._modulus)
        moved = multiply_mod(upper_half, base, base.double() / self._modulus, self._modulus)
        return torch.remainder(moved + halves[0], self._modulus)


def make_products(
    limbs: Limbs, weights: NDArray[np.float64], parameters: RingParameters, device: TorchDevice
) -> LimbProducts:
    """Move checked integer weights, shape (groups, outputs, inputs), to a device.

    Args:
        limbs: kind; convolutions of many groups are float64 whatever it says.
        weights: one matrix a group.
        parameters: ring.
        device: where to.

    Raises:
        InputError: there is no room for them.
    """
    if limbs is Limbs.FLOAT64 or len(weights) > _INT8_GROUPS:
        return FloatProducts(weights, parameters, device)
    return ByteProducts(weights, parameters, device)


def faster_limbs(device: TorchDevice, parameters: RingParameters) -> Limbs:
    """Measure which limbs a device multiplies faster; less than a second, but for a device's first use."""
    outputs, inputs, columns = _PROBE[device.device.type]
    generator = np.random.default_rng(0)
    weights = checked_weights(generator.integers(-1000, 1001, (outputs, inputs)))[None]
    trial = device.for_trials()
    residues = trial.upload(generator.integers(0, parameters.modulus, (1, inputs, columns)))
    seconds = {}
    for limbs in Limbs:
        products = make_products(limbs, weights, parameters, trial)
        times = []
        for _ in range(4):
            started = time.perf_counter()
            made = products.multiply(products.split(residues).permute(1, 2, 0, 3))
            made.sum().item()  # waits for the device
            times.append(time.perf_counter() - started)
        seconds[limbs] = min(times[1:])
    return min(seconds, key=seconds.__getitem__)


def _low_digit(x: Any) -> Any:
    """Return the lowest digit, in [-128, 127], of integers: an array or a tensor."""
    return ((x + 128) & 255) - 128


def _rounded_up(count: int) -> int:
    return -(-count // _INT8_STEP) * _INT8_STEP
