"""Checkpoints: everything that a run needs to go on as if it had never stopped, in one safetensors file.

Tensors (weights, optimiser, average, threshold) lie in the file as such; all else is one JSON document in its header.
The file is written beside its place, synced and renamed: after a crash the earlier one is there, or the new one, whole.

A checkpoint of a private run holds the key of its noise and sampling, so that steps taken again after a crash draw the
same records and the same noise and reveal nothing new. Who reads the key can subtract the noise: the file is readable
by its owner alone, and removed when the run ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save
from torch import Tensor

from heinfer.errors import InputError
from heinfer.training.runs import sync

FORMAT = 1
_HEADER = "heinfer.checkpoint"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The state of a run between two steps.

    Attributes:
        state: a JSON document: step, plan, key, fingerprints, positions, versions.
        tensors: weights and what belongs to them, by name, on the CPU.
    """

    state: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in the place of an earlier one, all or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    header = {_HEADER: json.dumps({"format": FORMAT, **checkpoint.state})}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    content = save(tensors, metadata=header)
    staging = path.with_name(f".{path.name}.new")
    with open(os.open(staging, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    staging.replace(path)
    sync(path.parent)


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        InputError: the file is missing, is no checkpoint, or one of another format.
    """
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        state = json.loads(header) if header is not None else None
    except FileNotFoundError:
        raise InputError(f"no checkpoint at {path}") from None
    except (OSError, safetensors.SafetensorError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint: {error}") from None
    if not isinstance(state, dict) or state.pop("format", None) != FORMAT:
        raise InputError(f"{path} is not a checkpoint of format {FORMAT}; start the run anew in another folder")
    return Checkpoint(state, tensors)


def gather_tensors(network: torch.nn.Module, optimiser: torch.optim.Optimizer) -> tuple[dict[str, Tensor], list[Any]]:
    """Return weights and optimiser state as named tensors, and the optimiser's numbers as JSON.

    Returns:
        `network.<name>` and `optimiser.<parameter>.<name>`; and param_groups without the parameters, together with the
        numbers among the state.
    """
    tensors = {f"network.{name}": tensor for name, tensor in network.state_dict().items()}
    content = optimiser.state_dict()
    numbers: dict[str, Any] = {}
    for index, entries in content["state"].items():
        for name, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimiser.{index}.{name}"] = value
            else:
                numbers[f"{index}.{name}"] = value
    return tensors, [content["param_groups"], numbers]


def restore_tensors(
    network: torch.nn.Module, optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor], numbers: list[Any]
) -> None:
    """Undo `gather_tensors`.

    Raises:
        InputError: the checkpoint is that of another network or optimiser.
    """
    groups, scalars = numbers
    state: dict[int, dict[str, Any]] = {}
    entries = {name: tensor for name, tensor in tensors.items() if name.startswith("optimiser.")}
    for key, value in [*((name.removeprefix("optimiser."), t) for name, t in entries.items()), *scalars.items()]:
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    weights = {n.removeprefix("network."): t for n, t in tensors.items() if n.startswith("network.")}
    try:
        network.load_state_dict(weights)
        optimiser.load_state_dict({"state": state, "param_groups": groups})
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"the checkpoint is that of another network or optimiser: {error}") from None
