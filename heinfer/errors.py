"""The error tree.

Every error that heinfer raises on purpose derives from `HeinferError`. A message says what was expected, what was
found, where, and what to do about it. Messages are for the operator of the process that raises them; what a peer may
see is one of the fixed codes of `heinfer.wire`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class HeinferError(Exception):
    """Root of all errors that heinfer raises on purpose."""


class ParameterError(HeinferError):
    """Ring parameters, scales or weights outside what the mathematics or the security table allows."""


class InputError(HeinferError):
    """Data given by the user do not fit the model: shape, dtype, missing array, non-finite value."""


class PlanError(HeinferError):
    """A bundle is incomplete, edited, of another version, or does not match its peer's."""


class CiphertextError(HeinferError):
    """Residues or ciphertexts that are malformed: wrong size, or a residue that is not below the modulus."""


class ProtocolError(HeinferError):
    """The message exchange broke. Use one of the two subclasses."""


class LocalProtocolError(ProtocolError):
    """Our own side tried something that the protocol does not allow: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent something that the protocol does not allow, went away, or refused."""


class IntegrityError(HeinferError):
    """An answer is not the one that an honest server gives, or a ledger is not what was written to it."""


class PrivacyBudgetError(HeinferError):
    """A step would spend more privacy budget than is left."""


@dataclass(frozen=True, slots=True)
class Offence:
    """One node of a model that cannot be placed.

    Attributes:
        node: name of the ONNX node (or of its first output where it has no name).
        operator: operator type, with its domain where that is not the standard one.
        reason: why it is refused and, where there is one, the way out.
    """

    node: str
    operator: str
    reason: str

    def __str__(self) -> str:
        return f"{self.node} ({self.operator}): {self.reason}"


class UnsupportedModelError(HeinferError):
    """A model that cannot be partitioned; lists every offending node, not just the first.

    Attributes:
        offences: all nodes that were refused; empty when the file as a whole is (for example not ONNX).
    """

    def __init__(self, summary: str, offences: Sequence[Offence] = ()) -> None:
        self.offences = tuple(offences)
        super().__init__("\n".join([summary, *(f"  - {offence}" for offence in self.offences)]))
