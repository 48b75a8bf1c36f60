"""The runner of the peers gives a result whatever becomes of a peer's process.

The peers here are scripts of a few lines, in this interpreter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks/peers"
sys.path.append(str(PEERS))

from environments import REQUIREMENTS, build, names  # noqa: E402
from result import Result, Status, read_result, write_result  # noqa: E402
from running import PEERS as REGISTERED  # noqa: E402
from running import Limits, Peer, run_peer  # noqa: E402

MIB = 2**20

#: Every fake peer starts with this: `out` is where its result belongs.
HEAD = """
import json, os, pathlib, subprocess, sys, time
arguments = dict(zip(sys.argv[1::2], sys.argv[2::2]))
out = pathlib.Path(arguments["--out"])
good = {"peer": "fake", "model": pathlib.Path(arguments["--model"]).stem, "status": "ok", "latency_s": [0.5]}
"""

QUICK = Limits(budget_s=1, timeout_s=20, memory_bytes=2**33, cores=1)


def run(folder: Path, body: str, limits: Limits = QUICK) -> Result:
    """Run a fake peer; the result returned is the one written."""
    script = folder / "fake.py"
    script.write_text(HEAD + body)
    out = folder / "result.json"
    result = run_peer(Peer("fake", str(script)), folder / "model.onnx", folder / "model.npz", out, limits)
    assert read_result(out) == result
    return result


def test_run_peer_good_result_is_returned_with_memory(tmp_path: Path) -> None:
    result = run(tmp_path, "time.sleep(0.3); out.write_text(json.dumps(good))")
    assert (result.status, result.latency_s, result.model) == (Status.OK, [0.5], "model")
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes > MIB


def test_run_peer_arguments_and_threads_reach_the_script(tmp_path: Path) -> None:
    body = """
good["parameters"] = {"budget": arguments["--budget-s"], "inputs": arguments["--inputs"],
                      "threads": [os.environ[name] for name in ("OMP_NUM_THREADS", "GOMAXPROCS", "RAYON_NUM_THREADS")]}
time.sleep(0.3)
good["parameters"]["cores"] = len(os.sched_getaffinity(0))
out.write_text(json.dumps(good))
"""
    parameters = run(tmp_path, body).parameters
    assert parameters == {"budget": "1", "inputs": str(tmp_path / "model.npz"), "threads": ["1"] * 3, "cores": 1}


def test_run_peer_too_slow_is_a_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    result = run(tmp_path, "time.sleep(60)", Limits(timeout_s=0.5))
    assert result.status is Status.TIMEOUT
    assert "0.5 s" in result.reason
    assert time.monotonic() - started < 20


def test_run_peer_timeout_ends_children_too(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    body = f"""
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))
time.sleep(60)
"""
    assert run(tmp_path, body, Limits(timeout_s=3)).status is Status.TIMEOUT
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the child outlived its parent"
        time.sleep(0.05)


def test_run_peer_too_large_is_out_of_memory(tmp_path: Path) -> None:
    limits = Limits(timeout_s=30, memory_bytes=100 * MIB)
    result = run(tmp_path, f"held = bytearray(200 * {MIB}); time.sleep(60)", limits)
    assert result.status is Status.OUT_OF_MEMORY
    assert "limit" in result.reason
    assert result.peak_memory_bytes is not None
    assert result.peak_memory_bytes > 100 * MIB


def test_run_peer_memory_of_children_counts(tmp_path: Path) -> None:
    body = f"""
held = [sys.executable, "-c", "import time; held = bytearray(90 * {MIB}); time.sleep(60)"]
children = [subprocess.Popen(held) for _ in range(2)]
time.sleep(60)
"""
    result = run(tmp_path, body, Limits(timeout_s=30, memory_bytes=150 * MIB))
    assert result.status is Status.OUT_OF_MEMORY


def test_run_peer_killed_by_the_system_is_out_of_memory(tmp_path: Path) -> None:
    result = run(tmp_path, "os.kill(os.getpid(), 9)")
    assert result.status is Status.OUT_OF_MEMORY


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise RuntimeError('no such key')", "RuntimeError: no such key"),
        ("os.abort()", "exit code -6"),
        ("print('panic: no heap\\nmain.go:3 +0x10', file=sys.stderr); sys.exit(2)", "exit code 2: panic: no heap"),
        ("print('done')", "no result, exit code 0"),
        ("out.write_text('{')", "unreadable result"),
        ("out.write_text(json.dumps({**good, 'speed': 1}))", "unreadable result"),
        ("out.write_text(json.dumps({**good, 'status': 'splendid'}))", "unreadable result"),
        ("out.write_text(json.dumps(good)); sys.exit('late trouble')", "late trouble"),
    ],
    ids=[
        "exception",
        "abort",
        "panic",
        "no result",
        "half a file",
        "unknown field",
        "unknown status",
        "fails after its result",
    ],
)
def test_run_peer_bad_end_is_failed_with_its_reason(tmp_path: Path, body: str, words: str) -> None:
    result = run(tmp_path, body)
    assert result.status is Status.FAILED
    assert words in result.reason


def test_run_peer_older_result_is_not_taken_for_this_one(tmp_path: Path) -> None:
    run(tmp_path, "out.write_text(json.dumps(good))")
    assert run(tmp_path, "sys.exit(0)").status is Status.FAILED


def test_run_peer_without_environment_names_the_remedy(tmp_path: Path) -> None:
    peer = Peer("fake", "fake.py", environment="concrete")
    result = run_peer(peer, tmp_path / "m.onnx", tmp_path / "m.npz", tmp_path / "r.json", QUICK, tmp_path / "none")
    assert result.status is Status.FAILED
    assert "environments.py --only concrete" in result.reason
    (tmp_path / "half/concrete/bin").mkdir(parents=True)
    (tmp_path / "half/concrete/bin/python").symlink_to(sys.executable)
    result = run_peer(peer, tmp_path / "m.onnx", tmp_path / "m.npz", tmp_path / "r.json", QUICK, tmp_path / "half")
    assert "not built" in result.reason, "half an environment was taken for a whole one"


def test_peers_have_their_scripts_and_requirements() -> None:
    for peer in REGISTERED.values():
        assert (PEERS / peer.script).is_file()
        assert not peer.environment or peer.environment in names()


def test_requirements_pin_every_package() -> None:
    for path in REQUIREMENTS.glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert lines
        assert all(line.count("==") == 1 for line in lines), path


def fake_environments(folder: Path, monkeypatch: pytest.MonkeyPatch, pip: str) -> None:
    """Make environments whose interpreter is a shell script, with requirements of one package."""

    def create(root: Path, **_: object) -> None:
        python = root / "bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(f"#!/bin/sh\n{pip}\n")
        python.chmod(0o755)

    (folder / "some.txt").write_text("torch==1.0\nsome==1.0\n")
    monkeypatch.setattr("environments.REQUIREMENTS", folder)
    monkeypatch.setattr("environments.venv.create", create)


def test_build_failure_is_told_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_environments(tmp_path, monkeypatch, "echo 'ERROR: No matching distribution for some' >&2; exit 1")
    for _ in range(2):
        environment = build("some", tmp_path / "bench")
        assert "No matching distribution for some" in environment.error
        assert "again" in environment.error
        assert environment.built_s is None


def test_build_is_done_once_for_each_text_of_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    fake_environments(tmp_path, monkeypatch, f'echo "$@" >> {calls}')
    assert build("some", tmp_path / "bench", torch="cpu").built_s is not None
    told = calls.read_text().splitlines()
    assert len(told) == 2
    assert "torch==1.0" in told[0]
    assert "whl/cpu" in told[0]
    assert "--no-deps" in told[1]
    assert build("some", tmp_path / "bench").built_s is None
    (tmp_path / "some.txt").write_text("some==2.0\n")
    assert build("some", tmp_path / "bench").built_s is not None
    assert len(calls.read_text().splitlines()) == 3  # without torch there is one call


def test_result_round_trip_keeps_every_field(tmp_path: Path) -> None:
    result = Result("fake", "m", Status.OK, "1.0", latency_s=[1.5], bytes_up=3, parameters={"N": 8192})
    write_result(result, tmp_path / "r.json")
    assert read_result(tmp_path / "r.json") == result
    assert json.loads((tmp_path / "r.json").read_text())["status"] == "ok"
    assert os.listdir(tmp_path) == ["r.json"]
