"""heinfer train: from a recipe and data to a released model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heinfer.cli.screen import JsonOption, err, out, progress, table, write_json
from heinfer.errors import InputError
from heinfer.processes import core_count

if TYPE_CHECKING:
    from heinfer.training.datasets.dataset import Dataset
    from heinfer.training.recipe import Recipe

RecipeArgument = Annotated[Path, typer.Argument(help="Recipe in TOML, for example models/recipes/mnist_dp.toml.")]
OutputOption = Annotated[Path, typer.Option("--output", "-o", help="Folder of the run and its release.")]
DataOption = Annotated[Path | None, typer.Option("--data", help="Private data: a file or a folder.")]
PublicDataOption = Annotated[
    Path | None, typer.Option("--public-data", help="Public data for pretraining, where the recipe asks for it.")
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Threads to train with; all cores if not given.")]
LedgerOption = Annotated[
    Path | None, typer.Option("--ledger", help="Ledger of all runs on these records; beside the output if not given.")
]


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("train")(train_command)


def train_command(
    recipe: RecipeArgument,
    output: OutputOption,
    data: DataOption = None,
    public_data: PublicDataOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was interrupted.")] = False,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Make a private run repeatable; its model is then NOT private.")
    ] = None,
    ledger: LedgerOption = None,
    budget: Annotated[
        float | None, typer.Option("--budget", help="Epsilon that all runs in the ledger together may reach.")
    ] = None,
    sweep_epsilon: Annotated[
        str | None,
        typer.Option(
            metavar="E,E,...", help="Write no model: measure the accuracy at each epsilon, by seeded runs, NOT private."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each epsilon of a sweep.")] = 3,
    threads: ThreadsOption = None,
    json: JsonOption = None,
) -> None:
    """Train a model as a recipe says: with differential privacy where it has a table "privacy"."""
    settings, examples, public = read_training(recipe, data, public_data, threads)
    if sweep_epsilon is not None:
        if resume or seed is not None or ledger is not None or budget is not None:
            raise InputError(
                "a sweep is resumed by itself, and pays nothing: leave out --resume, --seed, --ledger, --budget"
            )
        from heinfer.cli.studies import sweep

        write_json(json, sweep(settings, examples, output, sweep_epsilon, seeds, public))
        return
    if settings.privacy is None:
        if resume or seed is not None or ledger is not None or budget is not None:
            raise InputError(f"{recipe} has no table [privacy]: --resume, --seed, --ledger and --budget belong to it")
        card = _train_plainly(settings, examples, output)
    else:
        from heinfer.training.private_release import RunOptions, train_privately

        options = RunOptions(seed=seed, resume=resume, ledger=ledger, allowance=budget)
        _warn(examples, seed)
        with progress() as tell:
            card = train_privately(settings, examples, output, options, public, tell)
    write_json(json, card)
    show_card(card, output)


def read_training(
    recipe: Path, data: Path | None, public_data: Path | None, threads: int | None
) -> tuple[Recipe, Dataset, Dataset | None]:
    """Read recipe, data and public data.

    Raises:
        InputError: they are unusable.
    """
    import torch

    from heinfer.training.assembly import load_public
    from heinfer.training.datasets.loading import load_dataset
    from heinfer.training.recipe import read_recipe

    torch.set_num_threads(threads or core_count())
    settings = read_recipe(recipe)
    return settings, load_dataset(settings.data, data), load_public(settings, public_data)


def show_card(card: dict[str, Any], output: Path) -> None:
    """Print what was trained, how good it is and what it cost."""
    rows = table("", "", title=f"\n{card['name']} on {card['dataset']}", right=())
    noise = f" +- {card['test_noise']:.2%}" if card.get("test_noise") else ""
    rows.add_row("accuracy", f"{card['accuracy']:.2%}{noise} of {card.get('test_records', card.get('test_images')):,}")
    if card.get("auc") is not None:
        rows.add_row("AUC", f"{card['auc']:.4f}")
    if "steps" in card:
        private = card["epsilon"] is not None
        rows.add_row("epsilon", f"{card['epsilon']:.4f} (RDP {card['epsilon_rdp']:.4f})" if private else "none: seeded")
        rows.add_row("delta", f"{card['delta']:g}, {card['adjacency']}")
        rows.add_row("steps", f"{card['steps']:,}, Poisson, q = {card['sampling_probability']:.4g}")
    out.print(rows)
    out.print(f"Written to {output}: {', '.join(sorted(p.name for p in output.iterdir() if p.is_file()))}")


def _train_plainly(recipe: Recipe, data: Dataset, output: Path) -> dict[str, Any]:
    from heinfer.training.release import release_model
    from heinfer.training.trainer import training_progress

    with training_progress(err) as bars:
        return release_model(recipe, data, output, bars)


def _warn(data: Dataset, seed: int | None) -> None:
    """Tell the operator what the card may not say."""
    from heinfer.training.datasets.dataset import count_duplicates

    duplicates = count_duplicates(data.train)
    if duplicates:
        err.print(
            f"{duplicates:,} of {len(data.train):,} records repeat another one: whoever is there twice is protected "
            "for one of them only. (This count is a private value.)"
        )
    if seed is not None:
        err.print("A seeded run is for debugging and studies: its noise can be computed, its model is not private.")
