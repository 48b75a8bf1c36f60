"""`python -m heinfer.training RECIPE --data mnist.npz -o DIR`: train a model and release it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from heinfer.errors import HeinferError
from heinfer.processes import core_count, prepare_environment


def main(
    recipe: Annotated[Path, typer.Argument(help="Recipe in TOML, for example models/recipes/mnist_lenet5.toml.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write the release to.")],
    data: Annotated[Path | None, typer.Option("--data", help="File or folder with the data.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads to train with; by default all cores.")] = core_count(),
) -> None:
    """Train a model without differential privacy and write model.onnx, card.json and samples.npz."""
    prepare_environment()  # before the imports below bring in torch

    import torch

    from heinfer.training.datasets.loading import load_dataset
    from heinfer.training.recipe import read_recipe
    from heinfer.training.release import release_model
    from heinfer.training.trainer import training_progress

    torch.set_num_threads(threads)
    console = Console()
    try:
        with training_progress(console) as progress:
            settings = read_recipe(recipe)
            card = release_model(settings, load_dataset(settings.data, data), output, progress)
    except HeinferError as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
    console.print(f"{card['name']}: {card['accuracy']:.2%} of {card['test_images']:,} test images; written to {output}")


if __name__ == "__main__":
    typer.run(main)
