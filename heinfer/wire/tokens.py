"""Tokens by which a node knows its clients: a node keeps hashes, a client keeps the token.

    token = make_token()                                            # 43 characters, 256 bits from the system
    tokens.sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  radiology

The file looks like what `sha256sum` writes. It is read at every greeting: a line that is taken out ends a client's next
connection. A token has so much chance in it that its hash needs no salt and guesses need no limit.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from pathlib import Path

from heinfer.errors import InputError
from heinfer.wire.queries import MAX_TOKEN_CHARACTERS
from heinfer.wire.security import check_private

_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LINE = re.compile(rf"([0-9a-f]{{64}})  ({_NAME.pattern})")


def make_token() -> str:
    """Return a new token, of 256 random bits."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def token_line(token: str, name: str) -> str:
    """Return a line of a node's file of tokens.

    Raises:
        InputError: the name would not do in one.
    """
    check_name(name)
    return f"{_hash(token).hex()}  {name}\n"


def without_tokens(lines: str, name: str) -> tuple[str, int]:
    """Take all tokens of one name out of the lines of a node's file; return what is left, and how many they were."""
    kept, out = [], 0
    for line in lines.splitlines():
        match = _LINE.fullmatch(line.rstrip())
        if match is not None and match[2] == name:
            out += 1
        else:
            kept.append(f"{line}\n")
    return "".join(kept), out


def check_name(name: str) -> None:
    """Raise InputError unless this may be the name of a client."""
    if not _NAME.fullmatch(name):
        raise InputError(f"{name!r} is no name for a client: letters, digits, '.', '_' and '-', at most 64")


def read_token(path: Path) -> str:
    """Read a client's token from its file.

    Raises:
        TransportError: others may read it.
        InputError: it is missing, or holds no token.
    """
    check_private(path, "a token")
    token = path.read_text(errors="replace").strip()
    if not (token.isascii() and token.isprintable() and 0 < len(token) <= MAX_TOKEN_CHARACTERS) or " " in token:
        raise InputError(f"{path} holds no token: expected one line of at most {MAX_TOKEN_CHARACTERS} characters")
    return token


class TokenFile:
    """The clients of a node.

    Args:
        path: lines of hash and name; empty lines and those with # are passed over.

    Raises:
        InputError: it is missing, or a line is none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read()

    def name_of(self, token: str) -> str | None:
        """Return whose token this is, None if nobody's.

        All hashes are compared, each in a time that does not depend on its bytes.

        Raises:
            InputError: the file is gone or damaged in the meantime.
        """
        ours, found = _hash(token), None
        for known, name in self._read():
            if hmac.compare_digest(known, ours):
                found = name
        return found

    def _read(self) -> list[tuple[bytes, str]]:
        try:
            lines = self._path.read_text(errors="replace").splitlines()
        except OSError as error:
            raise InputError(f"{self._path}: {error.strerror}; `heinfer token` makes such a file") from None
        entries = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _LINE.fullmatch(line.rstrip())
            if match is None:
                raise InputError(f"{self._path}, line {number}: expected 64 hexadecimal digits, two spaces and a name")
            entries.append((bytes.fromhex(match[1]), match[2]))
        return entries


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
