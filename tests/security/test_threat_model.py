"""docs/threat-model.md: every attack has an answer, and every test that an answer names is there."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.parties import REPOSITORY

PAGE = (REPOSITORY / "docs" / "threat-model.md").read_text(encoding="utf-8")
#: "**S1. It reads uploads.** ... Tests: `...`, `...`."
ATTACKS = [part for part in PAGE.split("\n\n") if re.match(r"\*\*[A-Z]\d+\. ", part)]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
EXPECTED_ATTACKERS = {"S", "M", "N", "C", "B", "T"}


@cache
def names_in(path: str) -> frozenset[str]:
    file = REPOSITORY / path
    if not file.is_file():
        return frozenset()
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(
        node.name for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, functions)
    )


def test_page_has_attacks_of_every_kind_numbered_without_gaps() -> None:
    labels = [re.match(r"\*\*([A-Z])(\d+)\. ", attack) for attack in ATTACKS]
    numbers: dict[str, list[int]] = {}
    for label in labels:
        assert label is not None
        numbers.setdefault(label[1], []).append(int(label[2]))
    assert set(numbers) == EXPECTED_ATTACKERS
    assert all(found == list(range(1, len(found) + 1)) for found in numbers.values())


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack[2:4])
def test_attack_has_an_answer_and_tests_that_exist(attack: str) -> None:
    head, _, rest = attack[2:].partition("**")
    answer, found, tests = " ".join(rest.split()).partition(" Tests: ")
    assert len(head) > 10
    assert len(answer) > 40, "an attack without an answer"
    assert found, "an answer without tests"
    named = NAMED.findall(tests)
    assert named
    assert tests.count("`") == 2 * len(named), "something in the list is no test"
    for path, name in named:
        assert name in names_in(path), f"{path} has no {name}"


def test_search_for_tests_finds_those_that_are_missing() -> None:
    assert "test_search_for_tests_finds_those_that_are_missing" in names_in("tests/security/test_threat_model.py")
    assert "test_that_is_not_there" not in names_in("tests/security/test_threat_model.py")
    assert names_in("tests/absent.py") == frozenset()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([\w./-]+)\)", PAGE))))
def test_links_of_the_page_lead_somewhere(link: str) -> None:
    assert (REPOSITORY / "docs" / link).is_file()
