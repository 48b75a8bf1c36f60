"""The ledger forgets nothing: not after edits, crashes, concurrent runs or steps taken twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from heinfer.errors import InputError, IntegrityError, ParameterError
from heinfer.processes import child_environment
from heinfer.training.privacy.chain import Head
from heinfer.training.privacy.ledger import EntryKind, Ledger
from heinfer.training.privacy.mechanisms import GaussianRelease, SampledGaussian

REPOSITORY = Path(__file__).parents[3]
DATA = "f" * 64
STEP = SampledGaussian(1.1, 0.02)
LOUDER = SampledGaussian(1.2, 0.02)
OTHER = b'{"some":"thing"}'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def head_of(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def opened(path: Path, *runs: str) -> Ledger:
    ledger = Ledger(path, DATA)
    for run in runs or ("a",):
        ledger.open_run(run, delta=1e-5, settings={"batch": 20, "key": "k"})
    return ledger


def filled(path: Path, steps: int = 5) -> Ledger:
    ledger = opened(path)
    for step in range(steps):
        ledger.spend("a", step, STEP)
    return ledger


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_spend_is_on_the_disk_with_all_that_it_says(path: Path) -> None:
    ledger = opened(path)
    assert ledger.spend("a", 0, STEP) is True
    assert ledger.spend("a", 3, GaussianRelease(5.0), purpose="evaluation") is True
    ledger.record("a", "model.onnx", EntryKind.RELEASE)
    entries = [json.loads(line) for line in lines_of(path)]
    assert [entry["kind"] for entry in entries] == ["open", "step", "step", "release"]
    assert [entry["entry"] for entry in entries] == [1, 2, 3, 4]
    step = entries[1]
    assert step["run"] == "a"
    assert (step["step"], step["purpose"]) == (0, "training")
    assert step["mechanism"] == {
        "kind": "sampled_gaussian", "noise_multiplier": 1.1, "sampling_probability": 0.02, "steps": 1,
    }  # fmt: skip
    assert step["data"] == DATA
    assert step["previous"] == entries[0]["sha256"]
    assert set(step["versions"]) == {"heinfer", "dp-accounting"}
    assert step["time"].endswith("+00:00")
    assert oct(path.stat().st_mode & 0o777) == "0o600"


def test_spent_adds_up_runs_and_purposes(path: Path) -> None:
    ledger = opened(path, "a", "b")
    for step in range(3):
        ledger.spend("a", step, STEP)
    ledger.spend("b", 0, STEP)
    ledger.spend("b", 1, LOUDER)
    ledger.spend("b", 1, GaussianRelease(5.0), purpose="evaluation")
    again = Ledger(path)
    assert again.spent() == (STEP.times(4), LOUDER, GaussianRelease(5.0))
    assert again.spent("a") == (STEP.times(3),)
    assert again.spent("b", "evaluation") == (GaussianRelease(5.0),)
    assert again.purposes("b") == ("training", "evaluation")
    assert list(again.runs()) == ["a", "b"]
    assert again.runs()["a"].delta == 1e-5
    assert again.fingerprint == DATA


def test_spend_same_step_again_counts_once(path: Path) -> None:
    filled(path, 5)
    resumed = opened(path)  # from a checkpoint at step 3
    assert [resumed.spend("a", step, STEP) for step in (3, 4, 5)] == [False, False, True]
    assert resumed.spent() == (STEP.times(6),)


def test_spend_same_step_with_another_mechanism_is_refused(path: Path) -> None:
    ledger = filled(path, 5)
    with pytest.raises(IntegrityError, match="step 4 of run a"):
        ledger.spend("a", 4, LOUDER)
    assert ledger.spent() == (STEP.times(5),)


def test_spend_same_step_of_another_run_counts(path: Path) -> None:
    ledger = filled(path, 1)
    ledger.open_run("b", delta=1e-5, settings={})
    assert ledger.spend("b", 0, STEP) is True
    assert ledger.spent() == (STEP.times(2),)


def test_open_run_again_with_other_settings_is_refused(path: Path) -> None:
    ledger = filled(path)
    opened(path)
    for delta, settings in ((1e-5, {"batch": 20, "key": "other"}), (1e-6, {"batch": 20, "key": "k"})):
        with pytest.raises(ParameterError, match=r"other settings \((key|delta)\)"):
            ledger.open_run("a", delta=delta, settings=settings)


def test_ledger_of_other_data_is_refused(path: Path) -> None:
    filled(path)
    other = Ledger(path, "0" * 64)
    before = path.read_bytes()
    for use in (other.verify, other.spent, lambda: other.open_run("a", delta=1e-5, settings={})):
        with pytest.raises(InputError, match="ledger of the data"):
            use()
    assert path.read_bytes() == before


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_spend_impossible_step_is_refused(path: Path, step: Any) -> None:
    with pytest.raises(ParameterError, match="number of a step"):
        opened(path).spend("a", step, STEP)


def test_misuse_is_refused(path: Path, tmp_path: Path) -> None:
    ledger = Ledger(path, DATA)
    with pytest.raises(InputError, match="cannot read"):
        ledger.verify()
    with pytest.raises(ParameterError, match="not open"):
        ledger.spend("a", 0, STEP)
    for delta in (0.0, 1.0, float("nan")):
        with pytest.raises(ParameterError, match="delta"):
            ledger.open_run("a", delta=delta, settings={})
    with pytest.raises(ParameterError, match="JSON"):
        ledger.open_run("a", delta=1e-5, settings={"x": float("nan")})
    with pytest.raises(ParameterError, match="fingerprint"):
        Ledger(path).open_run("a", delta=1e-5, settings={})
    with pytest.raises(InputError, match="cannot write"):
        Ledger(tmp_path / "absent" / "ledger.jsonl", DATA).open_run("a", delta=1e-5, settings={})
    ledger.open_run("a", delta=1e-5, settings={})
    with pytest.raises(ParameterError, match="note or a release"):
        ledger.record("a", "text", EntryKind.STEP)


@pytest.mark.parametrize("line", range(6))
def test_verify_edit_of_any_line_is_found_and_named(path: Path, line: int) -> None:
    filled(path)
    whole = lines_of(path)
    for old, new in ((b'"run":"a"', b'"run":"b"'), (b'":', b'" :'), (b"\n", b" \n"), (b'"sha256":"', b'"sha256":"0')):
        changed = whole.copy()
        changed[line] = changed[line].replace(old, new, 1)
        assert changed != whole
        path.write_bytes(b"".join(changed))
        with pytest.raises(IntegrityError, match=f"line {line + 1} of .* changed or damaged"):
            Ledger(path).verify()
    path.write_bytes(b"".join(whole))
    Ledger(path).verify()


@pytest.mark.parametrize("line", range(6))
def test_verify_deletion_of_any_line_is_found(path: Path, line: int) -> None:
    filled(path)
    whole = lines_of(path)
    path.write_bytes(b"".join(whole[:line] + whole[line + 1 :]))
    with pytest.raises(IntegrityError, match=f"line {line + 1} "):
        Ledger(path).verify()


@pytest.mark.parametrize("line", range(5))
def test_verify_exchange_of_any_neighbours_is_found(path: Path, line: int) -> None:
    filled(path)
    whole = lines_of(path)
    whole[line], whole[line + 1] = whole[line + 1], whole[line]
    path.write_bytes(b"".join(whole))
    with pytest.raises(IntegrityError, match=f"line {line + 1} "):
        Ledger(path).verify()


def test_verify_cut_anywhere_is_found(path: Path) -> None:
    filled(path, 2)
    whole = path.read_bytes()
    ends = [position for position, byte in enumerate(whole) if byte == ord("\n")]
    cuts = {0, *ends, *(end + 1 for end in ends[:-1]), *range(1, len(whole), 97)}
    for cut in sorted(cuts):
        path.write_bytes(whole[:cut])
        with pytest.raises(IntegrityError, match=r"missing"):
            Ledger(path).verify()
        with pytest.raises(IntegrityError):  # and nobody may build on it
            Ledger(path, DATA).open_run("a", delta=1e-5, settings={"batch": 20, "key": "k"})


def test_verify_insertions_and_repetitions_are_found(path: Path) -> None:
    filled(path)
    whole = lines_of(path)
    for extra in (whole[3], b"\n", OTHER + b"\n", b"[]\n"):
        for position in (0, 2, len(whole)):
            path.write_bytes(b"".join([*whole[:position], extra, *whole[position:]]))
            with pytest.raises(IntegrityError, match="line "):
                Ledger(path).verify()


def test_verify_without_its_head_or_with_a_wrong_one_is_refused(path: Path) -> None:
    filled(path)
    good = head_of(path).read_bytes()
    for wrong in (
        b"",
        b"nonsense",
        good.replace(b"6 ", b"7 "),
        Head(6, "1" * 64).to_bytes(),
        Head(3, "1" * 64).to_bytes(),
    ):
        head_of(path).write_bytes(wrong)
        with pytest.raises(IntegrityError):
            Ledger(path).verify()
    head_of(path).unlink()
    with pytest.raises(IntegrityError, match="head is missing"):
        Ledger(path).verify()


def test_verify_ledger_exchanged_for_an_older_one_is_found_with_a_known_head(path: Path) -> None:
    ledger = filled(path, 3)
    older = path.read_bytes(), head_of(path).read_bytes()
    earlier = ledger.head
    ledger.spend("a", 3, STEP)
    known = ledger.head
    assert Ledger(path).verify(known) == known
    assert Ledger(path).verify(earlier) == known
    path.write_bytes(older[0])
    head_of(path).write_bytes(older[1])
    assert Ledger(path).verify() == earlier  # by itself it is sound
    with pytest.raises(IntegrityError, match="cut or replaced"):
        Ledger(path).verify(known)
    with pytest.raises(IntegrityError, match="shorter"):  # whoever has it open notices
        ledger.spent()


def test_spend_after_a_broken_chain_stays_refused_until_it_is_mended(path: Path) -> None:
    ledger = filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole + OTHER + b"\n")
    for _ in range(2):
        with pytest.raises(IntegrityError, match="line 7"):
            ledger.spend("a", 5, STEP)
    path.write_bytes(whole)
    assert ledger.spend("a", 5, STEP) is True
    assert ledger.spent() == (STEP.times(6),)


@pytest.mark.parametrize("part", [1, 40, 200, -2])
def test_append_after_a_torn_line_keeps_it_and_says_so(path: Path, part: int) -> None:
    ledger = filled(path, 2)
    head = head_of(path).read_bytes()
    ledger.spend("a", 2, STEP)
    *sound, last = lines_of(path)
    path.write_bytes(b"".join(sound) + last[:part])  # as a crash would: the head was not written yet either
    head_of(path).write_bytes(head)

    reader = Ledger(path)
    reader.verify()
    assert reader.torn_line == 4
    assert reader.spent() == (STEP.times(2),)

    resumed = opened(path)
    assert resumed.torn_line is None
    assert resumed.spend("a", 2, STEP) is True
    kept = lines_of(path)
    assert kept[3] == last[:part] + b"\n"
    assert len(json.loads(kept[4])["torn"]) == 1
    assert Ledger(path).verify().entries == 5
    assert Ledger(path).spent() == (STEP.times(3),)

    path.write_bytes(b"".join([*kept[:3], kept[3].replace(b"{", b"["), *kept[4:]]))
    with pytest.raises(IntegrityError, match="line 4"):
        Ledger(path).verify()


def test_append_after_a_line_that_lacks_only_its_end_counts_it(path: Path) -> None:
    ledger = filled(path, 2)
    head = head_of(path).read_bytes()
    ledger.spend("a", 2, STEP)
    path.write_bytes(path.read_bytes()[:-1])
    head_of(path).write_bytes(head)
    resumed = opened(path)
    assert resumed.spend("a", 2, STEP) is False
    assert resumed.spent() == (STEP.times(3),)
    assert resumed.verify().entries == 5


def test_append_where_the_head_is_one_behind_goes_on(path: Path) -> None:
    ledger = filled(path, 2)
    head = head_of(path).read_bytes()
    ledger.spend("a", 2, STEP)
    head_of(path).write_bytes(head)
    assert opened(path).spent() == (STEP.times(3),)
    assert Ledger(path).verify().entries == 5


SPENDER = """
import sys
from pathlib import Path
from heinfer.training.privacy.ledger import Ledger
from heinfer.training.privacy.mechanisms import SampledGaussian
path, run, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ledger = Ledger(path, "f" * 64)
print("ready", flush=True)
sys.stdin.readline()
ledger.open_run(run, delta=1e-5, settings={})
for step in range(count):
    ledger.spend(run, step, SampledGaussian(1.1, 0.02))
    print(step, flush=True)
"""


def spender(path: Path, run: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SPENDER, str(path), run, str(count)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY, env=child_environment(),
    )  # fmt: skip


def begin(*processes: subprocess.Popen[str]) -> None:
    """Let spenders begin together, once all have started: one may be done before another has loaded its libraries."""
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def test_spend_from_several_processes_loses_nothing(path: Path) -> None:
    processes = [spender(path, f"run-{number}", 40) for number in range(4)]
    begin(*processes)
    for process in processes:
        process.communicate(timeout=60)
        assert process.returncode == 0
    ledger = Ledger(path)
    assert ledger.verify().entries == 4 * 41
    assert ledger.spent() == (STEP.times(160),)
    runs = [json.loads(line)["run"] for line in lines_of(path)]
    assert len({runs[start] for start in range(40)}) > 1 or runs != sorted(runs)  # they did take turns


def test_spend_process_killed_at_any_time_leaves_a_sound_ledger(path: Path) -> None:
    draw = random.Random(0)
    told: dict[str, int] = {}
    for number in range(5):
        run = f"run-{number}"
        process = spender(path, run, 1_000_000)
        begin(process)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(process.pid, signal.SIGKILL)
        rest = process.communicate()[0].splitlines()
        assert process.returncode == -signal.SIGKILL
        told[run] = 1 + len(rest)
        Ledger(path).verify()
    ledger = Ledger(path)
    for run, steps in told.items():
        counted = sum(mechanism.count for mechanism in ledger.spent(run))
        assert steps <= counted <= steps + 1  # nothing that was allowed is missing
    assert opened(path, "after").verify().entries == ledger.head.entries + 1
