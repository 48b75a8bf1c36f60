"""The page of an evaluation: what it shows, in both kinds of runs, and that it needs nothing but itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest

from heinfer.client import Report, evaluate
from heinfer.client.page import render_page, write_page
from heinfer.client.report import BlockCosts, BlockReport, Costs, Disagreement
from heinfer.plan import Plan, read_bundle_plan
from partitioner import partition
from tests.parties import command
from tests.partitioner.examples import graph, weights
from tests.small_models import dense_model

ATTACK = "\"'><script>alert('x')</script>&"


@pytest.fixture(scope="module")
def simulated(dense_bundle: Path) -> tuple[Report, Plan]:
    x = np.random.default_rng(3).normal(size=(40, 3)).astype(np.float32)
    report = evaluate(dense_bundle, x, np.arange(40) % 2, simulate=True)
    return report, read_bundle_plan(dense_bundle)


@pytest.fixture(scope="module")
def encrypted(simulated: tuple[Report, Plan]) -> tuple[Report, Plan]:
    """The same report with costs, as an encrypted run has them, and three samples that differ."""
    report, plan = simulated
    costs = [BlockCosts(0.25, 0.5, 0.125, 3, 4, 40_000, 80_000), BlockCosts(1.25, 2.5, 0.0625, 4, 2, 120_000, 20_000)]
    blocks = [replace(block, costs=found) for block, found in zip(report.blocks, costs, strict=True)]
    total = Costs(4.5, 8.9, 0.0123, "prepared", 0.002, 104, 1.0, 160_000, 100_000, 0.5, {"server": 1000, "node": None})
    different = [Disagreement(i, 0, 1, 2e-4, 1) for i in (5, 6)] + [Disagreement(7, 1, 0, 1e-4, 1)]
    return replace(report, simulated=False, costs=total, blocks=blocks, disagreements=different, agreement=0.925), plan


class Elements(HTMLParser):
    """Gathers elements, references, titles and text; every element must be closed in turn."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []
        self.titles: list[str] = []
        self.texts: list[str] = []
        self.widths: list[float] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.references += [v or "" for name, v in attrs if name.split(":")[-1] in ("src", "href", "data", "action")]
        if tag == "rect":
            self.widths.append(float(dict(attrs)["width"] or "nan"))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "meta":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        (self.titles if self.open and self.open[-1] == "title" else self.texts).append(data)


@pytest.fixture(scope="module", params=["simulated", "encrypted"])
def page(request: pytest.FixtureRequest) -> str:
    return render_page(*request.getfixturevalue(request.param))


def test_page_needs_no_script_and_nothing_from_outside(page: str) -> None:
    found = Elements(page)
    assert not found.open
    assert not {"script", "link", "iframe", "object", "img", "image", "use", "foreignobject"} & set(found.names)
    assert found.names.count("svg") >= 3
    assert not found.references
    assert set(re.findall(r"url\(([^)]*)\)", page)) == {"#arrow"}
    assert "://" not in page
    assert "@import" not in page


def test_page_shows_accuracy_errors_and_partition_in_either_kind(page: str, simulated: tuple[Report, Plan]) -> None:
    report, plan = simulated
    text = " ".join(Elements(page).texts)
    assert f"{report.accuracy_plain:.2%}" in text
    assert f"{report.max_abs_error:.1e}" in text
    for block in report.blocks:
        assert f"{block.measured_error:.1e} of {block.error_bound:.1e}" in text
    for block in plan.blocks:
        for operator in block.operators:
            assert operator in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "3 values" in text


def test_page_of_an_encrypted_run_shows_times_and_bytes(encrypted: tuple[Report, Plan]) -> None:
    page = render_page(*encrypted)
    found = Elements(page)
    text = " ".join(found.texts)
    assert "Simulated" not in text
    assert any(
        "node: encrypts and decrypts 250.0 ms, server 500.0 ms, wire and queues 125.0 ms" in t for t in found.titles
    )
    assert any("up, to the server 120.0 KB, down, to the node 20.0 KB" in title for title in found.titles)
    assert "3 values, 1.0 KB" in text  # 40,000 bytes for 40 samples
    assert "2 values, 500 B" in text
    assert "12.3 ms" in text


def test_page_of_a_simulation_says_so_and_has_neither_times_nor_bytes(simulated: tuple[Report, Plan]) -> None:
    text = " ".join(Elements(render_page(*simulated)).texts)
    assert "Simulated: nothing was encrypted" in text
    assert "simulated run beside the plain model" in text
    for absent in ("Time per block", "Bytes per block", "one query", "peak memory", "KB"):
        assert absent not in text


def test_page_lengths_of_bars_are_in_proportion(encrypted: tuple[Report, Plan]) -> None:
    report, plan = encrypted
    first = next(block.costs for block in report.blocks if block.costs is not None)
    widths = Elements(render_page(report, plan)).widths
    doubled = [replace(block, costs=replace(first, node_s=0.75)) for block in report.blocks]
    other = Elements(render_page(replace(report, blocks=doubled), plan)).widths
    scale = 590 / (0.75 + 0.5 + 0.125)
    for seconds in (0.75, 0.5, 0.125):
        assert min(abs(width - seconds * scale) for width in other) < 0.1
    assert min(abs(width - 0.75 * scale) for width in widths) > 0.1


def test_page_counts_disagreements_by_class(encrypted: tuple[Report, Plan]) -> None:
    page = render_page(*encrypted)
    assert '<td class="some" title="plain 0, encrypted 1">2</td>' in page
    assert '<td class="some" title="plain 1, encrypted 0">1</td>' in page
    assert "<tr><td>7</td><td>1</td><td>1</td><td>0</td><td>1.0e-04</td></tr>" in page


def test_page_of_many_classes_counts_those_that_it_leaves_out(encrypted: tuple[Report, Plan]) -> None:
    report, plan = encrypted
    many = [Disagreement(i, i, i + 1, 1e-4, None) for i in range(0, 200, 2)]
    page = render_page(replace(report, disagreements=many), plan)
    shown = page.count('class="some"')
    assert 0 < shown <= 20
    assert f"{100 - shown:,} more are of rarer classes" in page
    assert "The first 20 of 100" in page


def test_page_without_labels_or_classes_says_what_there_is_not(simulated: tuple[Report, Plan]) -> None:
    report, plan = simulated
    bare = replace(report, accuracy_plain=None, accuracy_encrypted=None, agreement=None, disagreements=[])
    text = " ".join(Elements(render_page(bare, plan)).texts)
    assert "single numbers" in text
    assert "accuracy" not in text.lower()


def test_page_names_of_models_operators_and_tensors_are_escaped(
    encrypted: tuple[Report, Plan], simulated: tuple[Report, Plan]
) -> None:
    for report, plan in (encrypted, simulated):
        blocks = [replace(block, operators=[ATTACK]) for block in report.blocks]
        hostile = replace(report, model=ATTACK, mode=ATTACK, machine=ATTACK, versions={ATTACK: ATTACK}, blocks=blocks)
        page = render_page(hostile, _renamed(plan))
        found = Elements(page)
        assert not found.open
        assert "script" not in found.names
        assert "<script" not in page
        assert "alert" in " ".join(found.titles)
        assert ATTACK in " ".join(found.texts)


def _renamed(plan: Plan) -> Plan:
    """Put the attack into every name of a plan."""

    def name(tensor: str) -> str:
        return tensor + ATTACK

    def specs(tensors: tuple) -> tuple:
        return tuple(replace(t, name=name(t.name)) for t in tensors)

    blocks = tuple(
        replace(b, inputs=specs(b.inputs), outputs=specs(b.outputs), operators=tuple(map(name, b.operators)))
        for b in plan.blocks
    )
    steps = tuple(
        replace(
            step,
            inputs=tuple(map(name, step.inputs)),
            outputs=tuple(map(name, step.outputs)),
            operators=tuple(map(name, step.operators)),
        )
        if step.kind == "node"
        else step
        for step in plan.steps
    )
    return replace(plan, inputs=specs(plan.inputs), outputs=specs(plan.outputs), steps=steps, blocks=blocks)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Report, Plan]:
    """A plan of 30 rounds with a connection around every two of them, and errors made up."""
    folder = tmp_path_factory.mktemp("deep")
    lines, arrays = [], {}
    for i in range(0, 30, 2):
        arrays |= {f"w{i}": weights(4, 4), f"w{i + 1}": weights(4, 4)}
        lines.append(
            f"a{i} = MatMul(x{i}, w{i}) b{i} = Relu(a{i}) c{i} = MatMul(b{i}, w{i + 1}) "
            f"d{i} = Add(c{i}, x{i}) x{i + 2} = Relu(d{i})"
        )
    text = f"deep (float[b,4] x0) => (float x30) {{ {' '.join(lines)} }}"
    onnx.save(graph(text, arrays), folder / "deep.onnx")
    partition(folder / "deep.onnx", folder / "bundle")
    plan = read_bundle_plan(folder / "bundle")
    blocks = [BlockReport(i, list(b.operators), None, 0.0, 0.0, 0.0) for i, b in enumerate(plan.blocks)]
    report = Report(
        "deep", "prepared", True, 1, None, None, None, [], 0.0, 0.0, 0.0, 0.0, 0.1, None, plan.rounds, blocks, 1,
        {"N": 2048, "log2_q": 50, "security_bits": 128}, {}, "", 1,
    )  # fmt: skip
    return report, plan


def test_page_of_a_deep_model_has_all_lines_in_its_width_and_no_box_on_another(deep: tuple[Report, Plan]) -> None:
    report, plan = deep
    assert plan.rounds == 30
    page = render_page(report, plan)
    drawing = page[page.index("What runs on the node and what on the server") :].split("</svg>")[0]
    edges = [tuple(map(float, e)) for e in re.findall(r'd="M(\S+) (\S+)H(\S+)V(\S+)H([\d.]+)"', drawing)]
    assert len(edges) == 2 * 30 + 15 + 1  # up and down, around every two, and from the query or to the result
    for left, top, track, bottom, right in edges:
        assert min(left, track, right) > 0
        assert max(left, track, right) < 1120
        assert top < bottom
    boxes = [
        tuple(map(float, b)) for b in re.findall(r'x="(\S+)" y="(\S+)" width="\S+" height="(\S+)" rx="4"', drawing)
    ]
    assert len(boxes) == 2 + len([s for s in plan.steps if s.kind == "node"]) + 30
    for (_, top, height), (_, following, _) in pairwise(boxes):
        assert following > top + height
    tracks = sorted({track for _, _, track, _, _ in edges})
    assert len(tracks) <= 4


def test_page_is_written_as_a_whole_or_not_at_all(
    tmp_path: Path, simulated: tuple[Report, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.html"
    path.write_text("before")

    def refuse(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr("os.replace", refuse)
        with pytest.raises(OSError, match="disk full"):
            write_page(path, *simulated)
    assert path.read_text() == "before"
    write_page(path, *simulated)
    assert path.read_text(encoding="utf-8") == render_page(*simulated)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_evaluate_simulate_and_html_on_the_command_line(tmp_path: Path) -> None:
    partition(dense_model(tmp_path / "dense.onnx"), tmp_path / "bundle")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(9, 3)).astype(np.float32))
    html = tmp_path / "report.html"
    done = command("evaluate", tmp_path / "bundle", "--data", tmp_path / "data.npz", "--simulate", "--html", html)
    assert done.code == 0, done.err
    assert "simulated, nothing was encrypted: prepared mode, 2 rounds" in done.out
    for absent in ("samples/s", "one query", "peak memory", "server s"):
        assert absent not in done.out
    assert "Simulated: nothing was encrypted" in html.read_text(encoding="utf-8")
