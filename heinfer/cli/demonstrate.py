"""heinfer demo: a released model, partitioned and run on real digits, plain beside encrypted."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from heinfer.cli.screen import JsonOption, err, out, progress, table, write_json

MODEL = "mnist_dp"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("demo")(demo_command)


def demo_command(
    samples: Annotated[int, typer.Option(min=1, max=1000, help="Digits to classify.")] = 100, json: JsonOption = None
) -> None:
    """Classify MNIST digits under encryption: an untrusted server and a trusted node on this machine."""
    import numpy as np

    from heinfer.cards import privacy_line, read_card
    from heinfer.cli.evaluating import show
    from heinfer.cli.partitioning import show_steps
    from heinfer.client import evaluate
    from partitioner import partition

    folder = released_folder(MODEL)
    card = read_card(folder) or {}
    with np.load(folder / "samples.npz", allow_pickle=False) as archive:
        x, y = archive["x"][:samples], archive["y"][:samples]
    out.print(f"Model: {card['name']}, {card['accuracy']:.2%} on the MNIST test set, {card['dataset']}")
    out.print(f"Training records: {privacy_line(card)}\n")
    with tempfile.TemporaryDirectory() as scratch:
        bundle = Path(scratch) / "bundle"
        result = partition(folder / "model.onnx", bundle)
        show_steps(result.plan)
        err.print("\nStarting an untrusted server and a trusted node, as two processes on loopback")
        with progress() as tell:
            report = evaluate(bundle, x, y, progress=tell)
    digits = table("digit", "plain", "encrypted", title="\nFirst digits", right=(0, 1, 2))
    different = {found.sample: found for found in report.disagreements}
    tops = plain_tops(folder, x[:10])
    for i, label in enumerate(y[:10]):
        digits.add_row(str(label), str(tops[i]), str(different[i].encrypted if i in different else tops[i]))
    out.print(digits)
    show(report)
    write_json(json, report.to_dict())


def plain_tops(folder: Path, x: object) -> list[int]:
    """Return the plain model's classes."""
    import numpy as np

    from heinfer.client.evaluation import run_reference

    outputs = run_reference((folder / "model.onnx").read_bytes(), np.asarray(x), lambda done: None)
    return [int(i) for i in outputs.argmax(axis=1)]


def released_folder(name: str) -> Path:
    """Return the folder of a released model: in a checkout beside the packages, from a wheel inside heinfer.

    Raises:
        InputError: there is none of that name.
    """
    import heinfer
    from heinfer.errors import InputError

    package = Path(heinfer.__file__).resolve().parent
    for folder in (package.parent / "models" / "released" / name, package / "released" / name):
        if (folder / "model.onnx").is_file():
            return folder
    raise InputError(f"no released model {name!r} beside {package}")
