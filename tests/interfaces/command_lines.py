"""Command lines of `heinfer` in text, and whether the command line's own parser takes them; nothing is run.

found = command_lines("    $ heinfer serve bundle/server --listen 127.0.0.1:7700   # untrusted machine")
found == [["serve", "bundle/server", "--listen", "127.0.0.1:7700"]]
parse(found[0])
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from functools import cache
from typing import Any

import typer

from heinfer.cli.main import app

#: What the parser raises, whichever command-line library typer brings.
UsageError = typer.BadParameter.__mro__[1]
#: Where a shell ends a command, or sends it elsewhere.
_ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>", "<"}
_PROGRAM = re.compile(r"(?:\$ )?(?:sudo )?(?:\S*/)?heinfer(?= )")
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")


def command_lines(markdown: str) -> list[list[str]]:
    """Return the words of every command in code blocks, indented by four or fenced, without `heinfer` itself."""
    return [words for line in _code_lines(markdown) if (words := _words(line)) is not None]


def spans(markdown: str) -> list[list[str]]:
    """Return the words of every command between single backticks."""
    prose = "\n".join(line for line in markdown.splitlines() if not line.startswith("    "))
    found = (_words(" ".join(span[1].split())) for span in _SPAN.finditer(prose))
    return [words for words in found if words is not None]


def _code_lines(markdown: str) -> Iterator[str]:
    fenced, begun = False, ""
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            continue
        if not (fenced or begun or line.startswith("    ")):
            continue
        begun += line.strip()
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        yield begun
        begun = ""


def _words(line: str) -> list[str] | None:
    head = _PROGRAM.match(line)
    if head is None:
        return None
    try:
        words = shlex.split(line[head.end() :], comments=True)
    except ValueError:
        return None  # prose with an apostrophe
    end = next((position for position, word in enumerate(words) if word in _ENDS), len(words))
    return words[:end]


@cache
def heinfer() -> Any:
    """The command line's parser."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Parse a command line.

    Raises:
        UsageError: there is no such command or option, or something is missing or of the wrong type.
    """
    command = heinfer()
    context = command.make_context("heinfer", list(words))
    while hasattr(command, "commands"):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)


def unknown_parts(words: list[str]) -> list[str]:
    """Return commands and options of a line that do not exist; for lines with parts left out ("...")."""
    command = heinfer()
    known = _options(command)
    unknown, is_value = [], False
    for word in words:
        if is_value:
            is_value = False
        elif word.startswith("-") and len(word) > 1:
            name, _, value = word.partition("=")
            if name not in known:
                unknown.append(word)
            is_value = known.get(name, False) and not value
        elif hasattr(command, "commands") and word != "...":
            if word not in command.commands:
                return [*unknown, word]
            command = command.commands[word]
            known |= _options(command)
    return unknown


def _options(command: Any) -> dict[str, bool]:
    """Return every option's names, and whether a value follows."""
    found = {"--help": False, "-h": False}
    for parameter in command.params:
        names = (*parameter.opts, *parameter.secondary_opts)
        found |= dict.fromkeys(names, not getattr(parameter, "is_flag", False))
    return found
