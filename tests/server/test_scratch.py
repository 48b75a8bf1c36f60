"""Folders for ciphertexts: what is free on the disk, and what killed processes leave."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from heinfer.errors import InputError
from heinfer.processes import child_environment
from heinfer.server.polynomial import files
from heinfer.server.polynomial.files import ScratchSpace, Store
from heinfer.server.polynomial.resources import DeepResources
from heinfer.wire import FailureCode, RefusedError
from tests.parties import REPOSITORY

HOLDER = """
import sys, threading
from pathlib import Path
from heinfer.server.polynomial.files import ScratchSpace

with ScratchSpace(Path(sys.argv[1])).folder(1) as folder:
    (folder / "keys").write_bytes(b"rows")
    print(folder, flush=True)
    threading.Event().wait()
"""


def test_folders_of_a_killed_process_are_removed_and_those_of_one_that_runs_are_not(tmp_path: Path) -> None:
    foreign = tmp_path / "other"
    foreign.mkdir()
    link = tmp_path / "heinfer-deep-link"
    link.symlink_to(foreign)
    environment = {**child_environment(), "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().decode().strip())
        try:
            DeepResources(tmp_path, workers=0)
            assert (left / "keys").exists()
        finally:
            holder.kill()
    assert (left / "keys").exists()
    with ScratchSpace(tmp_path).folder(1) as own:
        DeepResources(tmp_path, workers=0)
        assert sorted(tmp_path.iterdir()) == sorted([own, foreign, link])


def test_folders_of_others_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "heinfer-deep-theirs"
    folder.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "geteuid", lambda: folder.stat().st_uid + 1)
        ScratchSpace(tmp_path).remove_leftovers()
    assert folder.exists()
    ScratchSpace(tmp_path).remove_leftovers()
    assert not folder.exists()


def test_a_request_needs_room_on_the_disk_beside_what_others_will_still_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    size, free = 2**20, 3 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    space = ScratchSpace(tmp_path)
    with pytest.raises(InputError, match="free in") as refused, space.folder(free + 1):
        pass
    assert str(refused.value) in caplog.text
    assert not list(tmp_path.iterdir())
    with space.folder(free):
        pass
    with space.folder(2 * size) as first:
        with space.folder(size):
            pass
        with pytest.raises(RefusedError) as busy, space.folder(size + 1):
            pass
        assert busy.value.code is FailureCode.BUSY
        Store(first / "keys", (1, 1, 1, size // 8)).create()  # a third of what is free, as the disk says from now on
        free -= size
        with space.folder(size):
            pass
        with pytest.raises(RefusedError), space.folder(size + 8192):
            pass
    assert space.used == 0
