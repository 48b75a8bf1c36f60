"""The page of a finished run shows what is public, all of it, and nothing else; and it needs nothing but itself."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from heinfer.training.card import Outcome, make_private_card
from heinfer.training.curves import draw_curves, read_curves
from heinfer.training.datasets.dataset import Dataset, Examples
from heinfer.training.evaluation import Quality
from heinfer.training.observers import StepFile
from heinfer.training.page import write_page
from heinfer.training.privacy.planning import Level, PrivacyPlan
from heinfer.training.private_trainer import StepReport
from heinfer.training.recipe import parse_recipe

#: Values that the page must not show, chosen so that they are found wherever they are.
PRIVATE = {"records": 4321, "loss": 7.3519, "within": 0.61837, "norm": 53.917}
CHECKS = {"clipping": "moved by 0.99", "noise": "deviation 1.001", "accounting": "in the ledger", "sampler": "Poisson"}


def make_card(seed: int | None = None, epsilon: float = 2.5, **recipe: Any) -> dict[str, Any]:
    settings = {
        "name": "tiny",
        "architecture": "mlp",
        "epochs": 1,
        "batch_size": 10,
        "accuracy_floor": 0.75,
        "optimiser": {"learning_rate": 0.1},
        "data": {"name": "<script>alert('data')</script> & more", "license": "CC0 <b>", "credit": "nobody"},
        "privacy": {"target_epsilon": 3.0},
    }
    examples = Examples(np.zeros((40, 3), np.float32), np.arange(40) % 2)
    data = Dataset(settings["data"]["name"], examples, examples, 2)
    plan = PrivacyPlan(40, 10, 4, 1e-5, 3.0, (Level(1.9, 2), Level(1.1, 2)), (), epsilon, 2.75)
    outcome = Outcome(plan, 4, epsilon, 2.75, (1.0,), seed, Quality(0.8125, 0.9, 40, 0.0), CHECKS)
    return make_private_card(parse_recipe({**settings, **recipe}), data, outcome)


def write_steps(path: Path, private: dict[str, Any], noise: float = 1.9, accuracy: float = 0.5) -> Path:
    path.unlink(missing_ok=True)
    file = StepFile(path)
    for step in range(4):
        report = StepReport(step=step, noise_multiplier=noise, clip_norm=1.0, learning_rate=0.1, **private)
        file.on_step(report, 0.5 * (step + 1))
    file.on_accuracy(4, accuracy)
    file.close()
    return path


def make_page(folder: Path, card: dict[str, Any] | None = None, steps: Path | None = None) -> str:
    path = folder / "report.html"
    write_page(path, card or make_card(), steps or write_steps(folder / "steps.jsonl", PRIVATE))
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run that is not seeded."""
    return make_page(tmp_path_factory.mktemp("page"))


def test_page_private_columns_change_nothing(tmp_path: Path, page: str) -> None:
    other = {"records": 1, "loss": 0.0, "within": 1.0, "norm": 1e6}
    assert page == make_page(tmp_path, steps=write_steps(tmp_path / "steps.jsonl", other))
    for value in PRIVATE.values():
        assert str(value) not in page


def test_page_public_columns_are_drawn(tmp_path: Path, page: str) -> None:
    curves = [read_curves(write_steps(tmp_path / "steps.jsonl", PRIVATE, **change)) for change in ({}, {"noise": 2.7})]
    assert draw_curves(curves[0]) != draw_curves(curves[1])
    assert "test accuracy, %" in page


class Elements(HTMLParser):
    """Gathers elements, references and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.references: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        if tag not in ("meta", "br", "img"):
            self.open.append(tag)
        self.references += [
            value or "" for name, value in attrs if name.split(":")[-1] in ("src", "href", "data", "action", "srcset")
        ]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self.open and tag not in ("meta", "br", "img"):
            assert self.open.pop() == tag


def test_page_needs_no_script_and_nothing_from_outside(page: str) -> None:
    found = Elements()
    found.feed(page)
    assert not found.open  # every element is closed
    assert not {"script", "link", "iframe", "object", "img"} & set(found.names)
    assert "svg" in found.names
    assert all(reference.startswith("#") for reference in found.references)
    assert all(inside.startswith("#") for inside in re.findall(r"url\(\s*['\"]?(.)", page))
    addresses = set(re.findall(r"https?://[^\"'<> ]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names, not places


def test_page_names_are_escaped(page: str) -> None:
    assert "<script" not in page
    assert "CC0 <b>" not in page
    assert "&lt;script&gt;alert(&#x27;data&#x27;)&lt;/script&gt; &amp; more" in page


def test_page_states_guarantee_and_card(page: str) -> None:
    assert "any one of the 40 training records" in page
    assert "e^2.5000 = 12.19, up to delta = 1e-05" in page  # e^2.5 is 12.1825, rounded upwards
    shown = ("2.7500 by R", "add-or-remove-one", "dp-accounting", "q = 0.25", "1.9000 for 2 steps", "81.25%", "0.9000")
    for text in (*shown, "withheld", "operating system"):
        assert text in page


def test_page_shows_the_fingerprint_of_public_data(tmp_path: Path) -> None:
    assert "ab" * 32 in make_page(tmp_path, {**make_card(), "data_fingerprint": "ab" * 32})


def test_page_epsilon_is_never_rounded_down(tmp_path: Path) -> None:
    assert "2.5001 by privacy loss" in make_page(tmp_path, make_card(epsilon=2.50001))


def test_page_seeded_run_is_called_not_private(tmp_path: Path) -> None:
    page = make_page(tmp_path, make_card(seed=17))
    assert "Not private: trained from the fixed seed 17" in page
    assert "Adding or removing any one" not in page
    assert "none: seeded" in page


def test_page_checklist_says_what_is_not_verified(page: str) -> None:
    rows = {
        title: (mark, text)
        for mark, title, text in re.findall(
            r'<td class="mark" title="([^"]+)">.</td><th scope="row">([^<]+)</th><td>([^<]+)</td>', page
        )
    }
    assert rows["Clipping"] == ("verified", "moved by 0.99")
    assert rows["Sampler"] == ("verified", "Poisson")
    for title in ("Records kept apart", "Duplicates in the data", "Worst accuracy over seeds"):
        mark, text = rows[title]
        assert mark == "not verified"
        assert text.startswith("not verified")


def test_page_without_steps_says_not_measured(tmp_path: Path) -> None:
    assert make_page(tmp_path, steps=tmp_path / "nothing.jsonl").count("not measured") == 4


def test_read_curves_step_taken_twice_counts_once_and_torn_line_is_left_out(tmp_path: Path) -> None:
    path = write_steps(tmp_path / "steps.jsonl", PRIVATE)
    file = StepFile(path)
    again = StepReport(
        step=3, noise_multiplier=5.0, clip_norm=1.0, learning_rate=0.1, records=1, loss=0.0, within=0.0, norm=0.0
    )
    file.on_step(again, 2.0)
    file.on_step(replace(again, step=4), 2.5)
    file.close()
    with path.open("a", encoding="utf-8") as torn:
        torn.write('{"step": 5, "noise_mul')
    curves = read_curves(path)
    assert list(curves.epsilon[0]) == [1, 2, 3, 4, 5]  # steps taken
    assert list(curves.noise_multiplier[1]) == [1.9, 1.9, 1.9, 5.0, 5.0]
    assert (list(curves.accuracy[0]), list(curves.accuracy[1])) == ([4], [0.5])


def test_read_curves_long_run_keeps_first_and_last_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    line = '{{"step": {}, "epsilon": 1.0, "noise_multiplier": 1.0, "learning_rate": 0.1}}\n'
    path.write_text("".join(line.format(step) for step in range(5003)))
    steps, _ = read_curves(path).epsilon
    assert (steps[0], steps[-1]) == (1, 5003)
    assert len(steps) < 500
