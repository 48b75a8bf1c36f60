"""What a card says of a model's input and output."""

from __future__ import annotations

from typing import Any

from heinfer.training.datasets.dataset import Dataset
from heinfer.training.export import BATCH_AXIS, OUTPUT_NAME, input_name

_TABLE = "rows of the table as they are; the model scales them itself"
_IMAGES = "pixels divided by 255, in [0, 1]; the model normalises them itself"
_LOGITS = "one logit for each class; the largest is the predicted label"


def describe_interface(data: Dataset) -> dict[str, Any]:
    """Return the card's entries `inputs` and `outputs` for a model of these data."""
    inputs = {
        "dtype": "float32",
        "shape": [BATCH_AXIS, *data.input_shape],
        "meaning": _TABLE if data.is_table else _IMAGES,
    }
    outputs = {"dtype": "float32", "shape": [BATCH_AXIS, data.classes], "meaning": _LOGITS}
    return {"inputs": {input_name(data.input_shape): inputs}, "outputs": {OUTPUT_NAME: outputs}}
