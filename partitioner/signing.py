"""Sign bundles, in the owner's domain. `heinfer.plan.signing` has the form of a signature, and checks it.

requires  a bundle that loads, and a private key
ensures   bundle.sig in bundle/, server/ and node/, each written as a whole or not at all
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from heinfer.errors import InputError, PlanError
from heinfer.plan import load_node, load_reference, load_server, read_bundle_plan
from heinfer.plan.files import SIGNATURE_FILE, write_file
from heinfer.plan.signing import Part, complete, statement

PRIVATE_FILE = "signing.pem"
PUBLIC_FILE = "signing.pub"
#: A private key in PEM takes 119 bytes.
_MAX_KEY_BYTES = 2**14


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Where a new pair of keys lies, and the raw public one."""

    private: Path
    public: Path
    key: bytes


def make_keys(folder: Path) -> KeyPair:
    """Make a pair of keys: signing.pem, which only its owner may read, and signing.pub for everybody.

    Args:
        folder: where to write them; made where it is missing.

    Raises:
        InputError: one of the files exists: keys are never overwritten.
        OSError: the folder can't be written.
    """
    key = Ed25519PrivateKey.generate()
    folder.mkdir(parents=True, exist_ok=True)
    made = KeyPair(folder / PRIVATE_FILE, folder / PUBLIC_FILE, key.public_key().public_bytes_raw())
    if made.public.exists() or made.public.is_symlink():
        raise InputError(f"{made.public} exists: choose another folder for --new-key")
    _write_new(made.private, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    _write_new(made.public, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo), 0o644)
    return made


def read_signing_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        InputError: missing, something else, or a file that others may read.
    """
    try:
        with path.open("rb") as file:
            others = os.fstat(file.fileno()).st_mode & 0o077
            content = file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise InputError(f"can't read {path}: {error.strerror}") from error
    if others:
        raise InputError(f"{path} can be read or changed by others, which a private key must not: chmod 600 {path}")
    try:
        key = load_pem_private_key(content, password=None)
    except TypeError as error:
        raise InputError(f"{path} is encrypted: decrypt it with `openssl pkey`, for as long as it takes") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path} holds no private key in PEM: make one with `heinfer sign --new-key`") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} holds a key of another kind: expected Ed25519, as `heinfer sign --new-key` makes")
    return key


def sign_bundle(bundle: Path, key: Ed25519PrivateKey) -> bytes:
    """Sign all folders of a bundle, replacing earlier signatures; every part is loaded first.

    Returns:
        The raw public key.

    Raises:
        PlanError: a part is missing, edited or inconsistent.
        ParameterError: parameters outside the security table.
    """
    plan = read_bundle_plan(bundle)
    load_server(Part.SERVER.folder(bundle))
    load_node(Part.NODE.folder(bundle))
    if (bundle / "reference").exists():
        load_reference(bundle, plan)
    for part in Part:
        sign_part(bundle, part, key)
    return key.public_key().public_bytes_raw()


def sign_part(bundle: Path, part: Part, key: Ed25519PrivateKey) -> None:
    """Sign one folder as it is.

    Raises:
        PlanError: it holds something that does not belong there, or can't be written.
    """
    folder = part.folder(bundle)
    content = statement(folder, part, key.public_key().public_bytes_raw())
    try:
        write_file(folder / SIGNATURE_FILE, complete(content, key.sign(content)))
    except OSError as error:
        raise PlanError(f"can't write {folder / SIGNATURE_FILE}: {error.strerror}") from error


def _write_new(path: Path, content: bytes, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError as error:
        raise InputError(f"{path} exists: choose another folder for --new-key") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
