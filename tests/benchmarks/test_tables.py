"""What the comparison states follows from its cells: ratios, security, cells without figures."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from heinfer.ring import SECURITY_TABLE

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
sys.path.append(str(BENCHMARKS / "peers"))

from comparison_table import COLUMNS, OURS, insert, render  # noqa: E402
from measuring import LARGEST_LOG_MODULUS, table_security_bits  # noqa: E402
from mobilenet_v2 import SIZE, MobileNetV2, with_statistics  # noqa: E402

OUR_CELL = {"peer": OURS, "status": "ok", "latency_s": [0.002], "throughput_per_s": 1000.0, "security_bits": 128}


def cells_of(table: str, name: str) -> dict[str, str]:
    """Return the row of a name by column."""
    line = next(line for line in table.splitlines() if line.startswith(f"| {name} |"))
    return dict(zip(COLUMNS, line.strip("| ").split(" | "), strict=True))


def rendered(**peer: object) -> dict[str, str]:
    """Return the row of a peer beside ours."""
    cell = {"peer": "other", "status": "ok", **peer}
    return cells_of(render({"m": [OUR_CELL, cell]}, {"m": "a model"}), "other")


def test_security_is_by_the_table_that_heinfer_goes_by() -> None:
    assert LARGEST_LOG_MODULUS == SECURITY_TABLE
    assert table_security_bits(8192, 214) == 128
    assert table_security_bits(8192, 218) == 0, "the modulus of TenSEAL's tutorial"


@pytest.mark.parametrize(("bits", "shown"), [(128, "128"), (0, "< 128"), (None, "")])
def test_render_security_below_the_table_is_said(bits: int | None, shown: str) -> None:
    row = render({"m": [OUR_CELL, {"peer": "other", "status": "ok", "security_bits": bits}]}, {"m": "a model"})
    assert next(line for line in row.splitlines() if line.startswith("| other |")).split("|")[-2].strip() == shown


def test_render_ratios_are_above_one_where_ours_is_better() -> None:
    row = rendered(latency_s=[0.1], throughput_per_s=10.0, security_bits=128)
    assert row["latency, times ours"] == "50"
    assert row["throughput, ours over it"] == "100"


def test_render_cell_without_figures_says_why() -> None:
    table = render({"m": [OUR_CELL, {"peer": "other", "status": "out of memory"}]}, {"m": "a model"})
    assert "| other | out of memory |" in table


def test_render_short_table_has_rows_with_figures_only() -> None:
    table = render({"m": [OUR_CELL, {"peer": "other", "status": "timeout"}]}, {"m": "a model"}, short=True)
    assert OURS in table
    assert "other" not in table


def test_insert_without_marks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("no marks\n")
    with pytest.raises(ValueError, match="expected <!-- a -->"):
        insert(path, "a", "text\n")


def test_mobilenet_v2_outputs_depend_on_the_image() -> None:
    """As they don't where normalisation has the statistics of a new layer: then the last bias is all there is."""
    torch.manual_seed(0)
    images = torch.randn(2, 3, SIZE, SIZE)
    network = with_statistics(MobileNetV2(), images)
    with torch.inference_mode():
        first, second = network(images)
    assert torch.max(torch.abs(first - second)) > 0.1 * torch.max(torch.abs(first))
