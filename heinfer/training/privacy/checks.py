"""Refusals before a private run: networks that mix records, and noise that protects nothing.

The clipped sum has its sensitivity only if a record's gradient depends on that record alone. A known offender is
BatchNorm; others are found by a probe: one record of a random batch is changed, and neither the other records' outputs,
nor the gradient of those outputs, may change. The probe is evidence for the layers that it runs through, on random
inputs, in training mode; it cannot prove that no input exists on which a layer mixes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from heinfer.errors import InputError, ParameterError

#: Records in a probed batch, and batches probed; another record is changed in each.
_RECORDS, _TRIALS = 5, 4

#: Relative change that counts as none: float32 rounding, should a kernel order its sums by the data.
_TOLERANCE = 1e-5


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Refuse a noise multiplier that gives no privacy.

    Raises:
        ParameterError: not a finite number above 0.
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise ParameterError(
            f"the noise multiplier must be finite and above 0, found {noise_multiplier}; without noise epsilon is "
            "infinite"
        )


def check_private_network(network: nn.Module, input_shape: Sequence[int]) -> None:
    """Refuse a network whose per-record gradients depend on other records.

    The network is copied; neither it nor torch's generators change.

    Args:
        network: the network; a first layer that is an embedding is probed with indices.
        input_shape: shape of one record.

    Raises:
        InputError: the network does not run on a batch of such records.
        ParameterError: nothing to train, or layers that mix records: every offending layer is named.
    """
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ParameterError("the network has no trainable parameters; nothing would be trained")
    offences = _known_offences(network)
    if not offences:  # a batch norm mixes whatever comes after it
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            offences = _probe(copy.deepcopy(network).train(), tuple(input_shape))
    if offences:
        lines = "\n".join(f"  - {name}: {reason}" for name, reason in offences.items())
        raise ParameterError(f"the network cannot be trained privately:\n{lines}")


def _label(name: str, layer: nn.Module) -> str:
    return f"{name or 'the network itself'} ({type(layer).__name__})"


def _known_offences(network: nn.Module) -> dict[str, str]:
    """Layers that are refused by their type, with the reason."""
    found = {}
    for name, layer in network.named_modules():
        if isinstance(layer, _BatchNorm):
            found[_label(name, layer)] = "normalises over the batch and so mixes records; use GroupNorm"
        elif isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            found[_label(name, layer)] = (
                "keeps running statistics of private records; use track_running_stats=False or GroupNorm"
            )
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
            found[_label(name, layer)] = "counts indices over the batch; use scale_grad_by_freq=False"
        elif isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            found[_label(name, layer)] = "changes weights by what the records look up, without noise; use max_norm=None"
    return found


def _probe(network: nn.Module, shape: tuple[int, ...]) -> dict[str, str]:
    """What the probe finds, by layer, buffer or parameter; the first trial that finds anything ends it."""
    draw = _find_inputs(network, shape)
    for trial in range(_TRIALS):
        generator = torch.Generator().manual_seed(trial)
        changed = trial % _RECORDS
        first = draw(generator)
        second = first.clone()
        second[changed] = draw(generator)[changed]
        others = [record for record in range(_RECORDS) if record != changed]
        reference, again, moved = (_run(network, batch, others) for batch in (first, first, second))
        if not _same(reference.output, again.output):
            return {"the network": "differs from run to run with torch's seed fixed: it draws from another generator"}
        offences = _compare(reference, moved, others)
        if offences:
            return offences
    return {}


def _find_inputs(network: nn.Module, shape: tuple[int, ...]) -> Callable[[torch.Generator], Tensor]:
    """A source of random batches that the network takes: real numbers, or indices where it begins with an embedding."""
    device = next(network.parameters()).device
    sizes = [layer.num_embeddings for layer in network.modules() if isinstance(layer, nn.Embedding)]

    def numbers(generator: torch.Generator) -> Tensor:
        return torch.randn(_RECORDS, *shape, generator=generator).to(device)

    def indices(generator: torch.Generator) -> Tensor:
        return torch.randint(min(sizes), (_RECORDS, *shape), generator=generator).to(device)

    reasons = []
    for draw in [numbers, indices] if sizes else [numbers]:
        try:
            output = copy.deepcopy(network)(draw(torch.Generator().manual_seed(0)))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reasons.append(str(error))
            continue
        if isinstance(output, Tensor) and output.dim() and len(output) == _RECORDS:
            return draw
        reasons.append("its output does not have the records in its first axis")
    raise InputError(f"the network does not run on a batch of records of shape {shape}: {'; '.join(reasons)}")


@dataclass(frozen=True, slots=True)
class _Run:
    """One forward and backward pass.

    Attributes:
        output: of the network.
        calls: first input and output of each call of a layer, by the layer's label.
        gradients: of the other records' summed outputs, by parameter.
        buffers: after the pass, by name.
    """

    output: Tensor
    calls: dict[str, list[tuple[Tensor, Tensor]]]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def _run(network: nn.Module, batch: Tensor, others: list[int]) -> _Run:
    """Run a copy of the network with torch's seed fixed, so that dropout draws the same masks each time."""
    network = copy.deepcopy(network)
    calls: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def recorder(label: str) -> Callable[..., None]:
        def record(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            tensors = [value for value in (*arguments[:1], output) if isinstance(value, Tensor)]
            if len(tensors) == 2 and all(value.dim() and len(value) == _RECORDS for value in tensors):
                calls.setdefault(label, []).append((tensors[0].detach().clone(), tensors[1].detach().clone()))

        return record

    for name, layer in network.named_modules():
        if not any(layer.children()):
            layer.register_forward_hook(recorder(_label(name, layer)))
    torch.manual_seed(0)
    output = network(batch)
    parameters = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    total = output[others].square().sum()
    found = torch.autograd.grad(total, list(parameters.values()), allow_unused=True) if total.requires_grad else ()
    return _Run(
        output.detach(),
        calls,
        {name: gradient for name, gradient in zip(parameters, found, strict=False) if gradient is not None},
        dict(network.named_buffers()),
    )


def _compare(reference: _Run, moved: _Run, others: list[int]) -> dict[str, str]:
    """What changed although only a record that is not among the others did."""
    offences = {}
    for label, calls in reference.calls.items():
        for (x, y), (x_moved, y_moved) in zip(calls, moved.calls.get(label, []), strict=False):
            if _same(x[others], x_moved[others]) and not _same(y[others], y_moved[others]):
                offences[label] = "mixes records: an output depends on other records' inputs"
    for name, buffer in reference.buffers.items():
        if not _same(buffer, moved.buffers[name]):
            offences[f"buffer {name}"] = "is computed from private records and kept without noise"
    if offences:
        return offences
    if not _same(reference.output[others], moved.output[others]):
        return {"the network": "mixes records in a step between its layers"}
    for name, gradient in reference.gradients.items():
        if not _same(gradient, moved.gradients[name]):
            offences[f"parameter {name}"] = "a record's gradient depends on the other records"
    return offences


def _same(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape:
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    scale = float(first.abs().max()) if first.numel() else 0.0
    return torch.allclose(first, second, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True)
