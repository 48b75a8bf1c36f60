"""Signatures of bundles: whose model this is, known before anything of a folder is read.

    private key --(partitioner.signing)--> bundle.sig in bundle/, bundle/server and bundle/node
    bundle.sig, public keys --(check_signature)--> nothing, or PlanError

The folders travel apart, so each has a signature of its own, which is text:

    heinfer-signature-1 server
    5d41402a...  plan.json
    7d793037...  weights.safetensors
    key 3b6a27bc...
    signature 92a009a9...

A line for every file with its SHA-256, hints among them; then the signer's public key; then Ed25519's signature (RFC
8032) of all bytes before its own line. The first line says what was signed and of which folder, so that nothing signed
for another purpose, and no other folder, passes for it. Names are compared with those that are there, never opened.
"""

from __future__ import annotations

import enum
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heinfer.cards import CARD_FILE
from heinfer.errors import InputError, PlanError
from heinfer.plan.files import PLAN_FILE, SIGNATURE_FILE

#: Raw public keys of Ed25519, 32 bytes each.
TrustedKeys = frozenset[bytes]
#: A folder of 5,000 files has a signature of half of this.
_MAX_SIGNATURE_BYTES: Final = 2**20
#: A public key in PEM takes 113 bytes.
_MAX_KEY_BYTES: Final = 2**14
_FORM: Final = re.compile(
    rb"(heinfer-signature-1 (bundle|server|node)\n"
    rb"((?:[0-9a-f]{64}  [A-Za-z0-9_./-]{1,256}\n)+)"
    rb"key ([0-9a-f]{64})\n)"
    rb"signature ([0-9a-f]{128})\n"
)


class Part(enum.Enum):
    """A folder with a signature of its own: the whole without server/ and node/, or one of these."""

    BUNDLE = "bundle"
    SERVER = "server"
    NODE = "node"

    def folder(self, bundle: Path) -> Path:
        """Return where this part of a bundle lies."""
        return bundle if self is Part.BUNDLE else bundle / self.value


@dataclass(frozen=True, slots=True)
class Signature:
    """What a signature file says.

    Attributes:
        part: which folder was signed.
        digests: SHA-256 of its files, by name.
        key: public key of whoever signed, as the file names it.
        signed: the bytes that were signed.
        signature: 64 bytes.
    """

    part: Part
    digests: Mapping[str, str]
    key: bytes
    signed: bytes
    signature: bytes


def check_signature(folder: Path, part: Part, trusted: TrustedKeys | None) -> None:
    """Check that a folder is what somebody trusted signed; to be called before anything else of it is read.

    Args:
        folder: of a bundle.
        part: which of its folders this has to be.
        trusted: keys, one of which must have signed; None: no signature is asked for.

    Raises:
        PlanError: no signature, another's, or one of other files.
    """
    if trusted is None:
        return
    found = read_signature(folder)
    if found is None:
        raise PlanError(f"{folder} is not signed, and --trusted-key asks for it: sign the bundle with `heinfer sign`")
    if found.key not in trusted:
        keys = ", ".join(map(fingerprint, sorted(trusted)))
        raise PlanError(f"{folder} is signed by {fingerprint(found.key)}, which is not trusted: expected {keys}")
    check_files(folder, part, found)


def check_files(folder: Path, part: Part, found: Signature) -> None:
    """Check a signature by the key that it names, and the folder's files by the signature.

    Raises:
        PlanError: one of them does not fit.
    """
    remedy = "copy the folder again, or sign the bundle again with `heinfer sign`"
    if not _is_genuine(found):
        raise PlanError(f"{folder / SIGNATURE_FILE} was not made by the key that it names: {remedy}")
    if found.part is not part:
        raise PlanError(f"{folder} was signed as {found.part.value}: expected {part.value}; {remedy}")
    paths = dict(_signed_files(folder, part))
    for name in sorted(paths.keys() ^ found.digests.keys()):
        what = "was added after" if name in paths else "is missing since"
        raise PlanError(f"{folder / name} {what} the folder was signed: {remedy}")
    for name, path in paths.items():
        if file_digest(path) != found.digests[name]:
            raise PlanError(f"{path} is not the file that was signed: {remedy}")


def find_signer(bundle: Path) -> bytes | None:
    """Return the raw public key that signed a bundle; None where no part of it is signed.

    Raises:
        PlanError: some parts are signed and others are not, or by several keys, or a signature does not fit.
    """
    parts = [part for part in Part if part.folder(bundle).is_dir()]
    signatures = {part: read_signature(part.folder(bundle)) for part in parts}
    keys = {None if found is None else found.key for found in signatures.values()}
    if len(keys) > 1:
        raise PlanError(f"the folders of {bundle} are not signed by one key: sign the bundle again with `heinfer sign`")
    for part, found in signatures.items():
        if found is not None:
            check_files(part.folder(bundle), part, found)
    return keys.pop() if keys else None


def statement(folder: Path, part: Part, key: bytes) -> bytes:
    """Return the bytes to be signed for a folder as it is.

    Raises:
        PlanError: a file is missing, no plain file, or has a name that no bundle has.
    """
    files = dict(_signed_files(folder, part))
    if PLAN_FILE not in files:
        raise PlanError(f"{folder / PLAN_FILE} is missing: expected a folder written by `heinfer partition`")
    lines = [f"{file_digest(path)}  {name}" for name, path in sorted(files.items())]
    content = "\n".join([f"heinfer-signature-1 {part.value}", *lines, f"key {key.hex()}"]).encode() + b"\n"
    if _FORM.fullmatch(complete(content, bytes(64))) is None:
        raise PlanError(f"{folder} holds files whose names don't belong in a bundle: {', '.join(sorted(files))}")
    return content


def complete(content: bytes, signature: bytes) -> bytes:
    """Return the signature file of a statement."""
    return content + b"signature " + signature.hex().encode() + b"\n"


def read_signature(folder: Path) -> Signature | None:
    """Read a folder's signature, without checking it; None where there is none.

    Raises:
        PlanError: it can't be read, or is malformed.
    """
    path = folder / SIGNATURE_FILE
    if not path.is_symlink() and not path.exists():
        return None
    found = _FORM.fullmatch(_read_start(path, _MAX_SIGNATURE_BYTES))
    if found is None:
        raise PlanError(f"{path} is not a signature of this version: sign the bundle again with `heinfer sign`")
    signed, part, lines, key, signature = found.groups()
    pairs = [line.split("  ", 1) for line in lines.decode().splitlines()]
    digests = {name: digest for digest, name in pairs}
    return Signature(
        Part(part.decode()), digests, bytes.fromhex(key.decode()), signed, bytes.fromhex(signature.decode())
    )


def read_trusted_keys(paths: Sequence[Path]) -> TrustedKeys | None:
    """Read public keys from PEM files; None for no files, which asks for no signature.

    Raises:
        InputError: a file is missing, or holds something else.
    """
    return frozenset(map(_read_public_key, paths)) if paths else None


def fingerprint(key: bytes) -> str:
    """Return what people compare: half of the SHA-256 of a public key, in groups.

    Example: `c1a5-298f-...`, eight groups. To find a second key with a given one takes 2^128 hashes.
    """
    digest = hashlib.sha256(key).hexdigest()[:32]
    return "-".join(digest[i : i + 4] for i in range(0, 32, 4))


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a plain file.

    Raises:
        PlanError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror}") from error


def _signed_files(folder: Path, part: Part) -> Iterator[tuple[str, Path]]:
    """Yield name and path of every file that a part's signature covers: all that anybody reads of it."""
    if part is not Part.BUNDLE:
        yield from ((path.name, path) for path in _plain_files(folder))
        return
    for name in (PLAN_FILE, CARD_FILE):
        if (folder / name).is_symlink() or (folder / name).exists():
            yield name, _plain(folder / name)
    reference = folder / "reference"
    if reference.is_symlink() or reference.exists():
        yield from ((f"reference/{path.name}", path) for path in _plain_files(reference))


def _plain_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise PlanError(f"{folder} is missing: expected a folder written by `heinfer partition`")
    return [_plain(path) for path in sorted(folder.iterdir()) if path.name != SIGNATURE_FILE]


def _plain(path: Path) -> Path:
    if path.is_symlink() or not path.is_file():
        raise PlanError(f"{path} does not belong in a bundle: expected plain files only")
    return path


def _read_start(path: Path, limit: int) -> bytes:
    """Read a small file; of a larger one, more than the limit."""
    try:
        with _plain(path).open("rb") as file:
            return file.read(limit + 1)
    except OSError as error:
        raise PlanError(f"can't read {path}: {error.strerror}") from error


# cryptography is imported where it is used: that takes 40 ms, and most bundles are not signed.


def _is_genuine(found: Signature) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(found.key).verify(found.signature, found.signed)
    except (InvalidSignature, ValueError):  # ValueError: no point of the curve
        return False
    return True


def _read_public_key(path: Path) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        with path.open("rb") as file:
            key = load_pem_public_key(file.read(_MAX_KEY_BYTES))
    except OSError as error:
        raise InputError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} holds no public key in PEM: expected a .pub of `heinfer sign --new-key`") from error
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{path} holds a key of another kind: expected Ed25519, as `heinfer sign --new-key` makes")
    return key.public_bytes_raw()
