"""Every `heinfer` command that the README, the docs and the examples show is one that the command line takes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.interfaces.command_lines import UsageError, command_lines, parse, spans, unknown_parts
from tests.parties import REPOSITORY

PAGES = sorted(
    [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "examples").rglob("*.md"),
    ]
)
SHOWN = [
    pytest.param(words, id=f"{page.name}-{' '.join(words)[:60]}")
    for page in PAGES
    for words in command_lines(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("words", SHOWN)
def test_command_in_a_code_block_is_taken(words: list[str]) -> None:
    if any("..." in word for word in words):
        assert not unknown_parts(words)
    else:
        parse(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_text_name_what_exists(page: Path) -> None:
    for words in spans(page.read_text(encoding="utf-8")):
        assert not unknown_parts(words), " ".join(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_are_there(page: Path) -> None:
    linked = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [name for name in linked if not (page.parent / name).exists()] == []


def test_commands_are_found_at_all() -> None:
    assert len(SHOWN) > 30
    assert sum(len(spans(page.read_text(encoding="utf-8"))) for page in PAGES) > 20


def test_code_is_told_from_text() -> None:
    page = """
Text with `heinfer serve
bundle/server` and heinfer node bundle/node.

    $ heinfer node bundle/node --server gpu:7700 \\
        --listen 127.0.0.1:7800          # trusted machine
    heinfer: no node answers
    serving mnist
    .venv/bin/heinfer infer query.npy | head

```console
heinfer demo
```
"""
    assert command_lines(page) == [
        ["node", "bundle/node", "--server", "gpu:7700", "--listen", "127.0.0.1:7800"],
        ["infer", "query.npy"],
        ["demo"],
    ]
    assert spans(page) == [["serve", "bundle/server"]]


@pytest.mark.parametrize(
    "line",
    ["serv bundle/server", "serve", "serve bundle/server --lisen 127.0.0.1:1", "node n --server s:1 --workers many"],
)
def test_mistakes_are_found(line: str) -> None:
    with pytest.raises(UsageError):
        parse(line.split())


def test_mistakes_in_lines_with_parts_left_out_are_found() -> None:
    assert unknown_parts(["node", "...", "--tokens", "FILE", "--toknes", "FILE"]) == ["--toknes"]
    assert unknown_parts(["privacy", "plan", "--nothing"]) == ["--nothing"]
    assert unknown_parts(["privacy", "plam"]) == ["plam"]
    assert unknown_parts(["-v", "--log-format", "json", "node", "..."]) == []
    assert unknown_parts(["--log-format=json", "-v", "node", "..."]) == []
    assert unknown_parts(["-v", "json", "node"]) == ["json"]
