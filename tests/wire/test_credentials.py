"""Files that systemd gives to a service alone carry an access control list, whose mask looks like a group's right."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from heinfer.wire import security
from heinfer.wire.address import TransportError
from heinfer.wire.security import check_private

ROOT, ANYBODY = 0, 1000


def found(mode: int, owner: int) -> os.stat_result:
    """What stat says of a regular file."""
    return os.stat_result((0o100000 | mode, 1, 1, 1, owner, owner, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "owner", "taken"),
    [(0o440, ROOT, True), (0o440, ANYBODY, False), (0o444, ROOT, False), (0o460, ROOT, False), (0o640, ROOT, False)],
)
def test_credential_is_root_s_with_the_mode_that_systemd_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, owner: int, taken: bool
) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert security._is_credential(tmp_path / "key.pem", found(mode, owner)) is taken


def test_files_elsewhere_are_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path / "credentials"))
    for path in (tmp_path / "key.pem", tmp_path / "credentials" / "deeper" / "key.pem", tmp_path / "credentials"):
        assert not security._is_credential(path, found(0o440, ROOT))
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert not security._is_credential(tmp_path / "credentials" / "key.pem", found(0o440, ROOT))


def test_key_of_mode_0440_is_refused_outside_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    key = tmp_path / "key.pem"
    key.touch()
    key.chmod(0o440)
    with pytest.raises(TransportError, match="may be read by others"):
        check_private(key, "a private key")
    key.chmod(0o400)
    check_private(key, "a private key")
