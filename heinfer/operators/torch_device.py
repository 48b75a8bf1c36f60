"""A device of PyTorch: what lies in its memory, and elementwise arithmetic modulo q that is exact on any of them.

Worked example: residues below 2**50 times residues. The quotient a * w / q is estimated in float64, rounded to t, and
a * w - t * q computed in int64, which wraps modulo 2**64: the true difference is within q, so the wrapped one is it.
`torch_program.check_device` tries a device against the native kernels before anything is served on it.

Nothing here depends on a fused multiply-add, on the order of a sum, or on a device.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.ring.parameters import LIMB_BITS

#: Elements of 8 bytes that one step of a device may work on beside its inputs and results (512 MiB).
WORKING_WORDS: Final = 1 << 26
_TRIAL_BYTES: Final = 1 << 30
_SIGN_BIT: Final = 63
_LIMB_BASE: Final = 2**LIMB_BITS


class TorchDevice:
    """A device, and how much of its memory is taken for good; safe to use from several threads.

    Args:
        name: as PyTorch calls it.
        memory_bytes: most bytes that may stay there; None: what is free on a GPU less working memory, and no bound on
            the CPU, whose memory is the process's own.

    Attributes:
        device: PyTorch's.
        lock: who holds it runs there alone, so that working memory is needed once.

    Raises:
        InputError: there is no such device.
    """

    def __init__(self, name: str, memory_bytes: int | None = None) -> None:
        self.device = torch.device(name)
        self.lock = threading.RLock()
        self._counting = threading.RLock()  # what is collected while it is held gives its bytes back
        self._kept = 0
        if self.device.type == "cuda":
            _require_gpu(self.device)
            if memory_bytes is None:
                free, _ = torch.cuda.mem_get_info(self.device)
                memory_bytes = max(0, free - 2 * WORKING_WORDS * 8)
        self._limit = memory_bytes

    @property
    def name(self) -> str:
        """As PyTorch calls it."""
        return str(self.device)

    @property
    def kept_bytes(self) -> int:
        """Bytes of weights, maps and hints that lie there."""
        return self._kept

    def keep(self, array: NDArray[Any], kind: torch.dtype | None = None) -> torch.Tensor:
        """Copy an array to the device; it counts for as long as the tensor is there.

        Args:
            array: any type and strides.
            kind: what it becomes; None: it stays as it is.

        Raises:
            InputError: it does not fit into the memory that was allowed, or that there is.
        """
        made = torch.from_numpy(np.array(array, order="C"))
        made = made if kind is None else made.to(kind)
        size = made.numel() * made.element_size()
        with self._counting:
            if self._limit is not None and self._kept + size > self._limit:
                raise InputError(
                    f"memory of {self.name}: expected at most {self._limit:,} bytes of weights and hints, found at "
                    f"least {self._kept + size:,}; give more with --device-memory, serve fewer models, or leave "
                    "--device out"
                )
            self._kept += size
        try:
            kept = made.to(self.device)
        except torch.OutOfMemoryError:
            self._release(size)
            raise InputError(
                f"memory of {self.name}: no room for another {size:,} bytes of weights or hints; serve fewer models, "
                "or leave --device out"
            ) from None
        weakref.finalize(kept, self._release, size).atexit = False
        return kept

    def for_trials(self) -> TorchDevice:
        """Return the same device with a count of its own: trials count against nobody's memory."""
        return TorchDevice(self.name, _TRIAL_BYTES)

    def _release(self, size: int) -> None:
        with self._counting:
            self._kept -= size

    def upload(self, array: NDArray[np.int64]) -> torch.Tensor:
        """Copy residues of a request to the device; on the CPU they share memory, and are only read."""
        return torch.from_numpy(array if array.flags.writeable else array.copy()).to(self.device)


def _require_gpu(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise InputError(
            f"--device {device}: expected a GPU that PyTorch can use, found {count} of them here; name another device, "
            "or leave --device out"
        )


def multiply_mod(a: torch.Tensor, w: torch.Tensor, w_over_q: torch.Tensor, modulus: int) -> torch.Tensor:
    """Multiply modulo q, exactly.

    Proof. |a * w / q| < 2**50, since |a| < q < 2**50 and |w| < q. The estimate has two roundings of 2**-53 relative, so
    it is off by 2**-2 at most and the rounded one, t, by 3/4: |a * w - t * q| <= 3/4 q, which fits into int64 although
    both products wrap.

    Args:
        a: int64, |a| < q.
        w: int64, |w| < q; shapes are broadcast.
        w_over_q: w / q, rounded to float64.
        modulus: q.

    Returns:
        int64 in [0, q).
    """
    quotient = (a.double() * w_over_q).round_().long()
    return to_residues(a * w - quotient * modulus, modulus)


def to_residues(x: torch.Tensor, modulus: int) -> torch.Tensor:
    """Bring int64 in (-q, q) into [0, q), in place."""
    return x.add_((x >> _SIGN_BIT).bitwise_and_(modulus))


def join_limb_sums(high: torch.Tensor, low: torch.Tensor, modulus: int) -> torch.Tensor:
    """Reduce high * 2**25 + low, float64 or int64 integers below 2**53 in magnitude, to int64 in [0, q).

    The proof is that of `heinfer.ring.join_limbs`: the quotient is off by 0.51 at most.
    """
    quotient = (high.double() * _LIMB_BASE + low.double()).mul_(1.0 / modulus).round_().long()
    return to_residues(high.long() * _LIMB_BASE + low.long() - quotient * modulus, modulus)
