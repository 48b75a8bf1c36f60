"""What partition, inspect and the study of depths share: options of deep blocks, calibration data, what is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import numpy as np
import typer

from heinfer.cli.screen import err, out, size, table

if TYPE_CHECKING:
    from heinfer.plan import Plan, TensorSpec
    from heinfer.plan.deep import DeepBlock
    from partitioner.deep.built import FittedActivation
    from partitioner.deep.deepening import DeepOptions, Depth

DEEP: Final = "Deep blocks"
CalibrationOption = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="DATA.npz", help="Training samples that show the ranges.", rich_help_panel=DEEP
    ),
]
CalibrationKeyOption = Annotated[
    str, typer.Option("--x", metavar="KEY", help="Name of the calibration samples in the file.", rich_help_panel=DEEP)
]
DivideOption = Annotated[
    float | None,
    typer.Option("--divide", help="Divide the samples by this; 255 for images.", rich_help_panel=DEEP),
]
DegreeOption = Annotated[
    int | None,
    typer.Option(
        "--degree",
        min=2,
        max=7,
        help="Of every polynomial; the smallest of 2, 3, 5, 7 that is close enough where not given.",
        rich_help_panel=DEEP,
    ),
]
FitName = Literal["least-squares", "minimax"]
FitOption = Annotated[
    FitName,
    typer.Option("--fit", help="On the values that calibration shows, or on their whole range.", rich_help_panel=DEEP),
]


def read_depth(text: str) -> Depth:
    """Read a block depth: a positive number or all.

    Raises:
        BadParameter: it is neither.
    """
    if text == "all":
        return "all"
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise typer.BadParameter(
            f"--block-depth: expected a positive number or all, found {text!r}; without it, activations are exact"
        )
    return int(text)


def read_calibration(
    model: Path, dimensions: Mapping[str, int], path: Path, x: str, divide: float | None, scratch: Path
) -> dict[str, np.ndarray[Any, Any]]:
    """Read calibration data for a model, and say what was done to make them fit; `scratch` as in `input_specs`.

    Raises:
        InputError: they don't fit.
        UnsupportedModelError: the model can't be read.
    """
    from heinfer.client.data import load_calibration

    samples, notes = load_calibration(path, input_specs(model, dimensions, scratch), x_key=x, divide=divide)
    for note in notes:
        out.print(note)
    return samples


def input_specs(model: Path, dimensions: Mapping[str, int], scratch: Path) -> list[TensorSpec]:
    """Return the inputs of a model as a plan would have them; `scratch` is a folder for its weights meanwhile.

    Raises:
        UnsupportedModelError: the model can't be read, or an input has no fixed size.
    """
    from heinfer.plan import TensorSpec
    from partitioner.importing import import_model

    graph = import_model(model, dimensions, scratch).model.graph
    specs = []
    for value in graph.inputs:
        assert value.shape is not None  # the importer has looked
        assert value.dtype is not None
        shape = tuple(int(size) for size in list(value.shape)[1:])  # type: ignore[arg-type]
        specs.append(TensorSpec(str(value.name), shape, value.dtype.numpy().name))
    return specs


def deep_options(
    depth: Depth, calibration: Mapping[str, np.ndarray[Any, Any]], degree: int | None, fit: FitName
) -> DeepOptions:
    """Return what the partitioner is told."""
    from partitioner.deep.building import FitOptions
    from partitioner.deep.deepening import DeepOptions
    from partitioner.deep.fitting import Fit

    return DeepOptions(depth, calibration, FitOptions(degree, Fit(fit)))


def show_activations(plan: Plan, activations: Sequence[FittedActivation]) -> None:
    """Print the ring of every deep block, and what became of every activation."""
    if not plan.deep:
        out.print("\nNo blocks could be joined: something between them is no polynomial, or belongs on the node")
        return
    show_deep_blocks(plan)
    fitted = table(
        "activation", "degree", "error", title="\nActivations as polynomials (error relative to spread)", right=(1, 2)
    )
    for activation in activations:
        error = "exact" if activation.exact else f"{activation.error:.1%}"
        fitted.add_row(activation.label, str(activation.degree), error)
    out.print(fitted)


def warn_of_calibration(bundle: Path) -> None:
    """Say what calibration data tell the server, where the model's card promises something of its training records."""
    from heinfer.cards import read_card

    card = read_card(bundle)
    if card is not None and card.get("epsilon") is not None:
        err.print(
            "the model's card has an epsilon, which does not cover the calibration data: their ranges can be read off "
            "the server's part, so calibrate on public data"
        )


def show_deep_blocks(plan: Plan) -> None:
    """Print a table of deep blocks; nothing where there are none."""
    if not plan.deep:
        return
    rows = table(
        "block", "N", "log2 q", "security", "layers", "levels", "slots", "keys", "up", "down",
        title="\nDeep blocks: bytes of one upload, keys included, whatever part of its slots is filled",
        right=tuple(range(10)),
    )  # fmt: skip
    for index, block in enumerate(plan.deep):
        found = deep_block_figures(block)
        rows.add_row(
            f"deep {index}", str(found["degree"]), str(found["log2_q"]), f"{found['security_bits']} bits",
            str(found["layers"]), str(found["levels"]), str(found["slots"]), size(found["key_bytes"]),
            size(found["bytes_up"]), size(found["bytes_down"]),
        )  # fmt: skip
    out.print(rows)


def deep_block_figures(block: DeepBlock) -> dict[str, Any]:
    """Return the figures of a deep block: its ring, its layers, the bytes of one upload, which are exact."""
    from heinfer.client.comparison import deep_figures
    from heinfer.ring import packed_bytes

    row = packed_bytes(block.chain.degree)
    return {
        **deep_figures(block),
        "levels": len(block.chain.primes) - block.result_primes,
        "slots": block.chain.parameters.slots,
        "operators": list(block.operators),
        "degrees": [layer.degree for layer in block.layers if layer.activation != "none"],
        "values_up": block.input_count,
        "values_down": block.output_count,
        "key_bytes": row * block.key_rows,
        "bytes_up": row * block.rows_up,
        "bytes_down": row * block.rows_down,
    }
