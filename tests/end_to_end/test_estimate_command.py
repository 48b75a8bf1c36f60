"""heinfer estimate and heinfer bench; what they say beside what a query takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heinfer.client import LocalModel
from heinfer.plan.machine import SHIPPED, read_machine, write_machine
from tests.parties import command, refusal


@pytest.fixture(autouse=True)
def no_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants of whoever runs these tests do not count."""
    monkeypatch.delenv("HEINFER_MACHINE", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def estimate(bundle: Path, folder: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """What `estimate` prints, and its figures."""
    done = command("estimate", bundle, "--json", folder / "figures.json", *options)
    assert done.code == 0, done.err
    return done.out, json.loads((folder / "figures.json").read_text())


@pytest.mark.parametrize("samples", [1, 5])
def test_estimate_bytes_are_those_of_a_query(
    dense: LocalModel, dense_bundle: Path, tmp_path: Path, samples: int
) -> None:
    found = dense.query(np.zeros((samples, 3), np.float32), statistics=True).statistics
    _, figures = estimate(dense_bundle, tmp_path, "--batch", str(samples), "--mode", found["mode"])
    assert figures["mode"] == found["mode"]
    assert figures["rounds"] == found["rounds"]
    for name in ("bytes_up", "bytes_down"):
        assert [b[name] for b in figures["blocks"]] == [b[name] for b in found["blocks"]]


def test_estimate_prints_time_bytes_rounds_memory_disk_and_what_it_rests_on(dense_bundle: Path, tmp_path: Path) -> None:
    printed, figures = estimate(dense_bundle, tmp_path)
    for part in ("first (Gemm)", "prepared before in", "framing; 2 rounds", "Memory: node ", "Disk: node "):
        assert part in printed
    assert "Constants as shipped" in printed
    assert figures["machine"]["measured"] is False
    assert figures["disk_bytes"]["server"] == sum(p.stat().st_size for p in (dense_bundle / "server").iterdir())


def test_estimate_takes_the_link_into_account(dense_bundle: Path, tmp_path: Path) -> None:
    _, near = estimate(dense_bundle, tmp_path)
    _, far = estimate(dense_bundle, tmp_path, "--bandwidth", "1Mbit", "--rtt", "30ms")
    moved = 8e-6 * (near["bytes_up"] + near["bytes_down"] + near["framing_bytes"])
    assert far["online_s"] - near["online_s"] == pytest.approx(2 * 0.03 + moved)


def test_estimate_uses_the_constants_of_this_machine(
    dense_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shipped = estimate(dense_bundle, tmp_path)
    write_machine(tmp_path / "machine.json", replace(SHIPPED, name="slow", exchange_s=1.0))
    monkeypatch.setenv("HEINFER_MACHINE", str(tmp_path / "machine.json"))
    printed, figures = estimate(dense_bundle, tmp_path)
    assert "Constants measured on slow" in printed
    assert figures["machine"]["measured"] is True
    assert figures["online_s"] - shipped["online_s"] == pytest.approx(3 * (1.0 - SHIPPED.exchange_s))


def test_estimate_refuses_what_is_no_bandwidth_duration_or_machine(
    dense_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "bandwidth: expected" in refusal("estimate", dense_bundle, "--bandwidth", "fast")
    assert "duration: expected" in refusal("estimate", dense_bundle, "--rtt", "1")
    assert "plan.json is missing" in refusal("estimate", tmp_path)
    monkeypatch.setenv("HEINFER_MACHINE", str(tmp_path / "absent.json"))
    assert "absent.json" in refusal("estimate", dense_bundle)
    assert command("estimate", dense_bundle, "--batch", "0").code == 2


def test_bench_shows_the_constants_in_use(tmp_path: Path) -> None:
    done = command("bench")
    assert done.code == 0, done.err
    assert "exchange" in done.out
    assert "Constants as shipped" in done.out
    assert command("bench", "-o", tmp_path / "machine.json").code == 2


@pytest.mark.slow
def test_bench_calibrate_measures_this_machine(tmp_path: Path) -> None:
    done = command("bench", "--calibrate", "-o", tmp_path / "new" / "machine.json", timeout_s=280)
    assert done.code == 0, done.err
    machine, _ = read_machine(tmp_path / "new" / "machine.json")
    for name in ("exchange_s", "step_s", "product_s", "transform_s", "dense_s", "seal_s", "server_block_s"):
        assert 0.02 < getattr(machine, name) / getattr(SHIPPED, name) < 50, name
    assert not (tmp_path / "config").exists()
