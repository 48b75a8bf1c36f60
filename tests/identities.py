"""Certificates for tests: of both kinds of connections, good ones and ones that must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, tzinfo
from pathlib import Path

import pytest

from heinfer.wire import Tls, authority, security
from heinfer.wire.authority import Use, open_authority, write_identity

HERE = ("127.0.0.1", "localhost")
#: Folder: authority, hosts, use.
IDENTITIES = {
    "server": ("node-server", HERE, Use.ACCEPT),
    "node to server": ("node-server", (), Use.CONNECT),
    "node to clients": ("client-node", HERE, Use.ACCEPT),
    "client": ("client-node", (), Use.CONNECT),
    "elsewhere": ("node-server", ("other.example.org", "127.0.0.2"), Use.ACCEPT),
    "foreign server": ("foreign", HERE, Use.ACCEPT),
    "foreign client": ("foreign", (), Use.CONNECT),
}
OLD = {"expired server": "server", "expired node": "node to server"}


class Earlier(datetime):
    """A clock that is 100 days behind."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Earlier:  # type: ignore[override]
        return cls.fromtimestamp((datetime.now(tz) - timedelta(days=100)).timestamp(), tz)


@contextmanager
def earlier() -> Iterator[None]:
    """Make and read certificates as if it was 100 days ago; OpenSSL keeps its own clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(authority, "datetime", Earlier)
        patch.setattr(security, "datetime", Earlier)
        yield


class Identities:
    """Folders with ca.pem, cert.pem and key.pem, and what they are read to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, (ca, hosts, use) in IDENTITIES.items():
            write_identity(folder / name, self._authority(ca), name, hosts, use, 90)
        with earlier():
            for name, like in OLD.items():
                ca, hosts, use = IDENTITIES[like]
                write_identity(folder / name, self._authority(ca), name, hosts, use, 90)

    def _authority(self, name: str) -> authority.Authority:
        return open_authority(self.folder / "ca" / name, name)

    def __getitem__(self, name: str) -> Path:
        return self.folder / name

    def load(self, name: str, believes: str | None = None) -> Tls:
        """Read an identity; `believes` names one whose peers it shall believe instead of its own."""
        folder = self[name]
        with earlier() if name in OLD else pytest.MonkeyPatch.context():
            return Tls.load(self[believes or name] / "ca.pem", folder / "cert.pem", folder / "key.pem")
