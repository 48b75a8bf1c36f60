"""heinfer study block-depth: accuracy, error, rounds, bytes and time against the number of activations in a block."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heinfer.cli.deepening import DegreeOption, FitOption, deep_options, input_specs, read_depth
from heinfer.cli.screen import JsonOption, err, out, progress, table, write_json
from heinfer.errors import InputError

if TYPE_CHECKING:
    from heinfer.client.depth_study import DepthResult, DepthStudy


def depth_study_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="ONNX model of one input.")],
    data: Annotated[Path, typer.Option("--data", metavar="TEST.npz", help="Test samples x and, if known, labels y.")],
    calibration: Annotated[
        Path, typer.Option("--calibration", metavar="TRAIN.npz", help="Training samples that show the ranges.")
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Results; gone on with where there are some.")
    ],
    depths: Annotated[
        str, typer.Option("--depths", metavar="D,...", help="Activations that a block may hold; all: fully encrypted.")
    ] = "0,1,2,3,all",
    degree: DegreeOption = None,
    fit: FitOption = "least-squares",
    encrypted: Annotated[
        bool,
        typer.Option("--encrypted/--simulate", help="Run server and node and measure, or evaluate in the clear."),
    ] = False,
    samples: Annotated[int | None, typer.Option(min=1, help="Test samples, from the front; all if not given.")] = None,
    x: Annotated[str, typer.Option("--x", metavar="KEY", help="Name of the samples in both files.")] = "x",
    y: Annotated[str | None, typer.Option("--y", metavar="KEY", help="Name of the labels in the test file.")] = None,
    divide: Annotated[float | None, typer.Option(help="Divide the samples by this; 255 for images.")] = None,
    json: JsonOption = None,
) -> None:
    """Measure what block depth costs and gains: from exact activations on the node to the fully encrypted model."""
    import numpy as np

    from heinfer.client.data import load_calibration, load_data
    from heinfer.client.depth_study import EXACT, make_task, parse_depths, study_depths
    from partitioner import partition

    wanted = parse_depths(depths)
    specs = input_specs(model, {}, output.absolute())
    if len(specs) != 1:
        raise InputError(f"the study takes models with one input, this one has {len(specs)}")
    test = load_data(data, specs[0], x_key=x, y_key=y, divide=divide, samples=samples)
    shown, notes = load_calibration(calibration, specs, x_key=x, divide=divide)
    for note in dict.fromkeys((*test.notes, *notes)):
        out.print(note)

    def partition_at(depth: str, bundle: Path) -> None:
        deep = None if depth == EXACT else deep_options(read_depth(depth), shown, degree, fit)
        partition(model, bundle, deep=deep)

    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    task = make_task(sha256, np.asarray(test.x), shown, degree, fit, encrypted)
    with progress() as tell:
        found = study_depths(output, wanted, task, partition_at, test.x, test.y, tell, _tell_finished)
    show_depths(found)
    _write(found, output)
    write_json(json, found.to_dict())


def _tell_finished(row: DepthResult) -> None:
    if row.refusal is not None:
        err.print(f"d = {row.depth}: refused")
    else:
        accuracy = "" if row.accuracy is None else f", accuracy {row.accuracy:.2%}"
        err.print(f"d = {row.depth}: {row.rounds} rounds{accuracy}")


def show_depths(study: DepthStudy) -> None:
    """Print what every depth gives and what it costs, and why others are refused."""
    from heinfer.client.depth_page import GAINS, depth_cells, depth_columns

    encrypted = study.task.encrypted
    columns = depth_columns(encrypted)
    plain = "" if study.accuracy_plain is None else f"; plain model {study.accuracy_plain:.2%}"
    kind = "encrypted" if encrypted else "simulated"
    title = f"\n{study.model}: {study.task.samples} samples, {kind}{plain}"
    gains = table(*columns[:GAINS], title=title, right=tuple(range(1, GAINS)))
    costs = table("d", *columns[GAINS:], title="\nOne full batch", right=tuple(range(1, len(columns))))
    for row in study.rows:
        if row.refusal is None:
            cells = depth_cells(row, encrypted)
            gains.add_row(*cells[:GAINS])
            costs.add_row(cells[0], *cells[GAINS:])
    out.print(gains)
    out.print(costs)
    for row in study.rows:
        if row.refusal is not None:
            out.print(f"d = {row.depth} is refused: {row.refusal}", markup=False)


def _write(study: DepthStudy, folder: Path) -> None:
    from heinfer.client.depth_page import render_curve, render_depth_page
    from heinfer.plan.files import write_file

    write_json(folder / "study.json", study.to_dict())
    write_file(folder / "study.html", render_depth_page(study).encode())
    write_file(folder / "curve.svg", render_curve(study).encode())
    out.print(f"Written to {folder}: study.json, study.html, curve.svg")
