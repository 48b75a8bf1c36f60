"""Where a server's program runs: the one seam between the server's evaluation and the machine's arithmetic.

    residues of a request --> Backend.load(program, ...).evaluate_joined --> residues of the answer

Two implementations give the same bits: "native", numba kernels and BLAS (`residues`), and PyTorch on a device
(`torch_program`), of which nothing is imported unless a device is named.

Worked example: `heinfer serve --device cuda:0` moves the weights there once; a request then crosses the bus as
residues, 8 bytes each, in both directions, whatever the number of steps in between.
"""

from __future__ import annotations

import itertools
import re
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from heinfer.errors import InputError
from heinfer.operators.copies import Copies, Owner
from heinfer.operators.program import Arrays, Program
from heinfer.operators.residues import ResidueProgram, copy_bytes
from heinfer.processes import core_count
from heinfer.ring import RingParameters

if TYPE_CHECKING:
    from heinfer.operators.torch_device import TorchDevice

Residues = NDArray[np.int64]
#: The default: no PyTorch.
NATIVE: Final = "native"
_DEVICE: Final = re.compile(r"cpu|cuda(:\d{1,2})?")


class LoadedProgram(Protocol):
    """A program with its weights where they are used; safe to use from several threads."""

    def evaluate_joined(self, residues: Residues) -> Residues:
        """Evaluate the program on inputs that lie one after the other: see `ResidueProgram.evaluate_joined`."""


class Backend(Protocol):
    """Something that evaluates server programs.

    Attributes:
        slots: evaluations that are worth running at a time.
    """

    @property
    def slots(self) -> int:
        """Evaluations that are worth running at a time."""

    def load(self, program: Program, arrays: Arrays, parameters: RingParameters) -> LoadedProgram:
        """Make a program ready to run: see `ResidueProgram`.

        Raises:
            PlanError: an array is missing or does not fit.
            ParameterError: weights that no server multiplies with, or arithmetic that is not exact.
            InputError: it does not fit into the memory that was allowed.
        """


class NativeBackend:
    """Numba kernels and float64 BLAS on this machine's cores.

    Args:
        copies: keeps weights as float64; None: of this backend alone, within the default budget.
    """

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies or Copies()
        self._owner = self._copies.new_owner()
        self._numbers = itertools.count()

    @property
    def slots(self) -> int:
        """The cores of this process."""
        return core_count()

    def load(self, program: Program, arrays: Arrays, parameters: RingParameters) -> LoadedProgram:
        """Check a program, and keep its weights as float64 while there is room."""
        return _StreamedProgram(program, arrays, parameters, self._copies, self._owner, next(self._numbers))


class _StreamedProgram:
    """A program whose weights are made float64 when it runs, unless they are there from before."""

    def __init__(
        self, program: Program, arrays: Arrays, parameters: RingParameters, copies: Copies, owner: Owner, number: int
    ) -> None:
        self._copies, self._owner, self._number = copies, owner, number
        self._bytes = copy_bytes(program, arrays)
        self._make = partial(ResidueProgram, program, arrays, parameters)
        with self._ready():
            pass  # checked once, so that what can't run is refused before it is needed

    def evaluate_joined(self, residues: Residues) -> Residues:
        """Evaluate the program: see `ResidueProgram.evaluate_joined`."""
        with self._ready() as program:
            return program.evaluate_joined(residues)

    def _ready(self) -> AbstractContextManager[ResidueProgram]:
        return self._copies.use(self._owner, (self._number,), self._bytes, self._make)


def open_device(name: str, memory_bytes: int | None = None) -> TorchDevice | None:
    """Open the device that `--device` names.

    Args:
        name: "native", or a device of PyTorch: "cpu", "cuda", "cuda:0".
        memory_bytes: most bytes of weights, maps and hints that may lie there; None: what is free there.

    Returns:
        The device; None for "native".

    Raises:
        InputError: no such device, no PyTorch, or a bound on memory without a device.
    """
    if name == NATIVE:
        if memory_bytes is not None:
            raise InputError(
                f"--device-memory goes with --device cpu or cuda, found --device {NATIVE}; leave one of them out"
            )
        return None
    if not _DEVICE.fullmatch(name):
        raise InputError(f"--device: expected {NATIVE}, cpu, cuda or cuda:0 and the like, found {name!r}")
    if find_spec("torch") is None:
        raise InputError(f"--device {name} needs PyTorch: pip install 'heinfer[train]', or leave --device out")
    from heinfer.operators.torch_device import TorchDevice

    return TorchDevice(name, memory_bytes)


def backend_on(device: TorchDevice | None, copies: Copies | None = None) -> Backend:
    """Return what evaluates programs on a device, or natively, with these copies, where there is none."""
    if device is None:
        return NativeBackend(copies)
    from heinfer.operators.torch_program import TorchBackend

    return TorchBackend(device)
