"""Network architectures, by name or as "module:function".

Each takes images with values in [0, 1], or the rows of a table, and normalises them itself, so that whoever runs the
exported model needs to know no statistics of the training data. None mixes the records of a batch, and all have static
shapes: every layer can be placed on the server or the node.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from heinfer.errors import InputError
from heinfer.training.datasets.registry import Ranges
from heinfer.training.input_scaling import DeclaredRanges
from heinfer.training.resnet import ResNet20
from heinfer.training.scattering_networks import make_scattering_cnn, make_scattering_linear
from heinfer.training.settings import suggest
from heinfer.training.small_networks import LeNet5, Mlp, TanhCnn

#: Makes an untrained network of (input_shape, classes, **options); its weights come from torch's global generator.
Builder = Callable[..., nn.Module]

ARCHITECTURES: Mapping[str, Builder] = MappingProxyType(
    {
        "lenet5": LeNet5,
        "mlp": Mlp,
        "resnet20_gn": ResNet20,
        "scattering_cnn": make_scattering_cnn,
        "scattering_linear": make_scattering_linear,
        "tanh_cnn": TanhCnn,
    }
)


def build_network(
    architecture: str,
    input_shape: tuple[int, ...],
    classes: int,
    ranges: Ranges = (),
    options: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Make an untrained network.

    Args:
        architecture: a name in `ARCHITECTURES`, or "module:function".
        input_shape: shape of one record: channels, height and width, or (features,).
        classes: number of logits.
        ranges: declared bounds of a table's features; the network then scales them itself.
        options: further arguments of the architecture, by name: a recipe's table [network].

    Raises:
        InputError: there is no such architecture or option, or the records don't fit it.
    """
    builder = find_architecture(architecture)
    _check_options(architecture, builder, options)
    try:
        network = builder(input_shape=input_shape, classes=classes, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{architecture} can't be built for records of shape {input_shape}: {error}") from error
    if not isinstance(network, nn.Module):
        raise InputError(f"{architecture} gave {type(network).__name__}; expected a torch.nn.Module")
    return nn.Sequential(DeclaredRanges(ranges), network) if ranges else network


def find_architecture(name: str) -> Builder:
    """Look an architecture up, or import it: from the current directory, or from an installed package.

    Raises:
        InputError: there is none of that name.
    """
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    module, separator, function = name.partition(":")
    if not separator:
        raise InputError(
            f"unknown architecture {name!r}{suggest(name, ARCHITECTURES)}; choose one of: "
            f"{', '.join(sorted(ARCHITECTURES))}, or name your own as module:function"
        )
    try:
        with _importing_from_here():
            found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"cannot import the architecture {name!r}: {error}") from error
    if not callable(found):
        raise InputError(f"{name!r} is {type(found).__name__}; expected a function of (input_shape, classes)")
    builder: Builder = found
    return builder


def _check_options(name: str, builder: Builder, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(builder).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    known = [key for key in parameters if key not in ("input_shape", "classes")]
    for key in options:
        if key not in known:
            raise InputError(
                f"{name} has no option {key!r}{suggest(key, known)}; [network] takes {', '.join(known) or 'nothing'}"
            )


@contextmanager
def _importing_from_here() -> Iterator[None]:
    """Let modules be found in the current directory, as they are for `python`; a console script leaves it out."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
