"""A model's card travels into the bundle, and `inspect` shows what it promises."""

from __future__ import annotations

import json

import onnx
import pytest
from typer.testing import CliRunner

from heinfer.cards import CARD_KEY, read_card
from heinfer.cli.main import app
from heinfer.errors import InputError
from partitioner import partition
from tests.small_models import dense_model

CARD = {
    "name": "m", "dataset": "some records", "accuracy": 0.75, "epsilon": 2.93, "delta": 1e-5,
    "adjacency": "add-or-remove-one", "accountant": "dp-accounting",
}  # fmt: skip


def test_card_of_a_model_is_in_its_bundle_and_shown(tmp_path):
    model = onnx.load(dense_model(tmp_path / "plain.onnx"))
    model.metadata_props.add(key=CARD_KEY, value=json.dumps(CARD))
    onnx.save_model(model, tmp_path / "model.onnx")
    partition(tmp_path / "model.onnx", tmp_path / "bundle")
    assert read_card(tmp_path / "bundle") == CARD
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "bundle"), "--json", str(tmp_path / "f.json")])
    assert shown.exit_code == 0, shown.output
    assert "epsilon = 2.930 at delta = 1e-05" in shown.output
    assert json.loads((tmp_path / "f.json").read_text())["card"] == CARD


def test_model_without_a_card_has_none_in_its_bundle(tmp_path):
    partition(dense_model(tmp_path / "model.onnx"), tmp_path / "bundle")
    assert read_card(tmp_path / "bundle") is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"a": "\x87"}'])
def test_card_that_is_none_is_an_input_error(tmp_path, content):
    (tmp_path / "card.json").write_bytes(content)
    with pytest.raises(InputError, match="is damaged"):
        read_card(tmp_path)
