"""A model's card: what its makers say of it, as JSON in the model's metadata and beside it.

The trainer writes it, `partition` copies it into the bundle, `inspect` shows it. Nothing in it is verified here, and
nothing depends on it: it is a statement, whose worth is that of whoever made it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from heinfer.errors import InputError

#: Key of the card in an ONNX model's metadata.
CARD_KEY = "heinfer.card"
#: The card beside a model, and in a bundle.
CARD_FILE = "card.json"
#: Longer ones are not taken along.
MAX_CARD_BYTES = 2**20


class Metadata(Protocol):
    """An entry of a model's metadata."""

    key: str
    value: str


def find_card(metadata: Iterable[Metadata]) -> dict[str, Any] | None:
    """Return the card in a model's metadata, None where there is none that can be read."""
    for entry in metadata:
        if entry.key == CARD_KEY and len(entry.value) <= MAX_CARD_BYTES:
            return _parse(entry.value)
    return None


def read_card(folder: Path) -> dict[str, Any] | None:
    """Return the card in a folder, None where there is none.

    Raises:
        InputError: it can't be read.
    """
    path = folder / CARD_FILE
    if not path.is_file():
        return None
    card = _parse(path.read_bytes()) if path.stat().st_size <= MAX_CARD_BYTES else None
    if card is None:
        raise InputError(f"{path} is damaged; copy the model or the bundle again")
    return card


def privacy_line(card: Mapping[str, Any]) -> str:
    """Say in one line what a card promises of the training records."""
    epsilon, delta = card.get("epsilon"), card.get("delta")
    if not isinstance(epsilon, int | float) or not isinstance(delta, int | float):
        return "no differential privacy: nothing bounds what the weights reveal about the training records"
    return (
        f"epsilon = {epsilon:.3f} at delta = {delta:g} ({card.get('adjacency')}, {card.get('accountant')}), as its "
        "card says"
    )


def _parse(text: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # ValueError: no JSON, or bytes that are no text
        return None
    return found if isinstance(found, dict) else None
