"""The journal of an evaluation: what was finished is read back, what was torn is not, and nothing is mixed up."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import time
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heinfer.client import connect, evaluate
from heinfer.client.journal import FinishedChunk, Task, open_journal, read_journal, sample_hash
from heinfer.client.local import local
from heinfer.errors import InputError
from heinfer.processes import child_environment
from heinfer.ring import packed_bytes
from tests.parties import COMMAND, REPOSITORY, refusal

TASK = Task("ab" * 32, "cd" * 32, 10, "auto", 4)


def chunk(start: int) -> FinishedChunk:
    outputs = np.arange(8, dtype=np.float32).reshape(4, 2) + start
    trace = {} if start else {"trace/0/input/0": np.ones((2, 3), np.float32)}
    return FinishedChunk(start, outputs, {"mode": "prepared", "blocks": [{"bytes_up": start}]}, trace, 1.5 + start)


def equal(a: FinishedChunk, b: FinishedChunk) -> bool:
    return (
        (a.start, a.statistics, a.elapsed_s, set(a.trace)) == (b.start, b.statistics, b.elapsed_s, set(b.trace))
        and np.array_equal(a.outputs, b.outputs)
        and a.outputs.dtype == b.outputs.dtype
        and all(np.array_equal(a.trace[name], b.trace[name]) for name in a.trace)
    )


def write(path: Path, *starts: int) -> Path:
    with open_journal(path, TASK, resume=False) as journal:
        for start in starts:
            journal.append(chunk(start))
    return path


def test_finished_chunks_are_read_back(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0, 8, 4)
    with open_journal(path, TASK, resume=True) as journal:
        assert sorted(journal.chunks) == [0, 4, 8]
        assert all(equal(journal.chunks[start], chunk(start)) for start in (0, 4, 8))
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(read_journal(path)) == [0, 4, 8]


def test_journal_cut_off_anywhere_loses_the_last_chunk_alone_and_goes_on(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0)
    first = path.stat().st_size
    header = write(tmp_path / "none").stat().st_size
    with open_journal(path, TASK, resume=True) as journal:
        journal.append(chunk(4))
    whole = path.read_bytes()
    for size in range(0, len(whole), 3):
        path.write_bytes(whole[:size])
        with open_journal(path, TASK, resume=True) as journal:
            assert sorted(journal.chunks) == ([] if size < first else [0]), size
            if size % 7 == 0:
                journal.append(chunk(8))
        if size % 7 == 0:
            assert sorted(read_journal(path)) == ([8] if size < first else [0, 8]), size
    assert header < first


def test_zeros_that_a_file_system_left_behind_are_a_torn_end(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0)
    path.write_bytes(path.read_bytes() + bytes(5000))
    with open_journal(path, TASK, resume=True) as journal:
        assert sorted(journal.chunks) == [0]
        journal.append(chunk(4))
    assert sorted(read_journal(path)) == [0, 4]


def test_damage_before_the_end_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0, 4)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(InputError, match="damaged at byte"), open_journal(path, TASK, resume=True):
        pass
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("plan", "00" * 32, "another bundle"),
        ("samples", "00" * 32, "other samples"),
        ("count", 11, "another number"),
        ("mode", "standard", "another mode"),
        ("chunk", 5, "another size"),
    ],
)
def test_journal_of_another_task_is_refused(tmp_path: Path, field: str, value: Any, reason: str) -> None:
    path = write(tmp_path / "journal", 0)
    with pytest.raises(InputError, match=reason), open_journal(path, replace(TASK, **{field: value}), resume=True):
        pass


def test_finished_chunks_that_nobody_asked_for_are_not_thrown_away(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0)
    with pytest.raises(InputError, match="--resume goes on"), open_journal(path, TASK, resume=False):
        pass
    with open_journal(write(tmp_path / "empty"), TASK, resume=False) as journal:  # nothing is lost
        assert not journal.chunks


def test_other_files_are_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("{}")
    for resume in (True, False):
        with pytest.raises(InputError, match="no journal"), open_journal(path, TASK, resume):
            pass
    assert path.read_text() == "{}"


def test_two_runs_do_not_share_a_journal(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path / "journal", TASK, resume=True),
        pytest.raises(InputError, match="in use"),
        open_journal(tmp_path / "journal", TASK, resume=True),
    ):
        pass


@pytest.mark.parametrize("kind", ["|O", "<U4", "|V8"])
def test_arrays_of_anything_but_numbers_are_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "journal")
    facts = {"start": 0, "elapsed_s": 1, "statistics": {}, "arrays": [["outputs", kind, [1]]]}
    text = json.dumps(facts).encode()
    payload = struct.pack("<I", len(text)) + text + bytes(16)
    record = struct.pack("<II", len(payload), zlib.crc32(payload)) + payload
    path.write_bytes(path.read_bytes() + record)
    with pytest.raises(InputError, match="does not read"):
        read_journal(path)


def test_full_disk_is_an_error_that_names_the_journal_and_leaves_what_is_finished(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", 0)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, hard))
    try:
        with open_journal(path, TASK, resume=True) as journal, pytest.raises(OSError, match="File too large") as caught:
            journal.append(chunk(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path)
    assert path.read_bytes() == before


def test_hash_of_samples_covers_type_and_shape() -> None:
    x = np.zeros((4, 6), np.float32)
    others = [x.reshape(6, 4), x.astype(np.float64), x[:3], x + 1]
    assert len({sample_hash(a) for a in [x, *others]}) == 5
    assert sample_hash(x.T) == sample_hash(x.T.copy())


# --- with an evaluation ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(9000, 3)).astype(np.float32)  # five chunks of 2048
    path = tmp_path_factory.mktemp("data") / "data.npz"
    np.savez(path, x=x)
    return path, x


def test_evaluation_that_was_killed_goes_on_and_evaluates_nothing_twice(
    dense_bundle: Path, samples: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    data, x = samples
    path, report = tmp_path / "journal", tmp_path / "report.json"
    options = ("--data", str(data), "--mode", "standard", "--journal", str(path), "--json", str(report))
    arguments = ("evaluate", str(dense_bundle), *options)
    run = subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.DEVNULL, env=child_environment(), cwd=REPOSITORY)
    deadline = time.monotonic() + 120
    while run.poll() is None and time.monotonic() < deadline:
        if path.exists() and (path.stat().st_size > 20_000):  # a chunk has 16 KB of outputs
            os.kill(run.pid, signal.SIGKILL)
            break
        time.sleep(0.001)
    assert run.wait(20) == -signal.SIGKILL
    before = read_journal(path)
    assert 1 <= len(before) <= 5
    assert not report.exists()
    assert "--resume goes on" in refusal(*arguments)
    asked: list[int] = []
    with local(dense_bundle, allow_trace=True, mode="standard") as model:
        query = model.query

        def count(part: np.ndarray, **options: Any) -> Any:
            asked.append(len(part))
            return query(part, **options)

        model.query = count  # type: ignore[method-assign]
        found = evaluate(dense_bundle, x, mode="standard", through=model, journal=path, resume=True)
    left = len(x) - sum(len(finished.outputs) for finished in before.values())
    first_run = asked[: asked.index(1)]  # queries of one sample measure the latency
    assert sum(first_run) == left
    chunks = read_journal(path)
    assert sorted(chunks) == list(range(0, 9000, 2048))
    assert all(equal(chunks[start], before[start]) for start in before)
    assert found.samples == 9000
    assert found.max_abs_error <= 1.5 * found.error_estimate  # which is statistical
    assert found.costs is not None
    uploads = [2048, 2048, 2048, 2048, 9000 - 4 * 2048]  # in standard mode, three values in block 0 and four in block 1
    assert found.mode == "standard"
    assert found.costs.bytes_up == sum(7 * (packed_bytes(n) + packed_bytes(2048)) for n in uploads)
    assert found.costs.seconds >= max(finished.elapsed_s for finished in before.values())


def test_node_of_another_bundle_and_simulations_are_refused(dense_bundle: Path, tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)
    with pytest.raises(InputError, match="neither a node nor a journal"):
        evaluate(dense_bundle, x, simulate=True, journal=tmp_path / "journal")
    with local(dense_bundle) as model, connect(model.address) as other:
        other.description = replace(other.description, plan_hash=bytes(32))
        with pytest.raises(InputError, match="serves another bundle"):
            evaluate(dense_bundle, x, through=other)


def test_resume_without_a_journal_is_a_usage_error(dense_bundle: Path, samples: tuple[Path, np.ndarray]) -> None:
    done = subprocess.run(
        [*COMMAND, "evaluate", str(dense_bundle), "--data", str(samples[0]), "--resume"],
        capture_output=True, text=True, cwd=REPOSITORY, env=child_environment(), check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--journal" in done.stderr
