"""The sum of clipped per-record gradients: one forward and one backward pass for each physical batch.

Hooks keep every layer's input and the place of its output in the graph; the backward pass then finds the gradients of
those outputs and nothing else, and `layers` turns both into norms and clipped sums. torch's own gradients of the
parameters, the dearest part of an ordinary step, are never computed. Images run with channels last, where torch's
convolution and pooling on a CPU are several times as fast.

What does not fit (a layer without a rule, a parameter with two owners, a layer called twice, records not in the first
axis) runs under `torch.func`: vmap of grad over the whole network, which is right for every network that does not mix
records, and slower. The fast way is checked against torch's autograd on a few random records before its first use, and
given up where it differs.

Formal guarantees: for a network that passes `checks.check_private_network`, adding or removing one record moves the
sum by at most `clipping.sensitivity` in L2 norm, up to the float32 rounding of the sum itself. A record whose gradient
is not finite, or whose norm float32 cannot hold, contributes zero.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call, grad_and_value, vmap

from heinfer.errors import ParameterError
from heinfer.training.privacy.clipping import Clipping
from heinfer.training.privacy.layers import Dense, Layout, RecordGradients, find_rule

_logger = logging.getLogger(__name__)

#: Bytes of activations and gradients that one physical batch may take on a CPU: about what stays in the last cache.
_CPU_BATCH_BYTES = 32 << 20

#: The same on a GPU: this part of the memory that is free.
_GPU_BATCH_FRACTION = 0.25

#: Records in the check of the fast way, and what it may differ by from autograd, relative, in L2 norm: float32 rounding
#: stays far below, a wrong formula far above.
_CHECKED_RECORDS = 3
_CHECK_TOLERANCE = 1e-3

LossFunction = Callable[[Tensor, Tensor], Tensor]


class _NotBookableError(Exception):
    """The fast way does not fit this network."""


@dataclass(frozen=True, slots=True)
class ClippedSum:
    """What one step takes from the private records. Everything but `sums` plus noise is private.

    Attributes:
        sums: sum of the clipped gradients, float32, one for each trainable parameter in the network's order.
        norms: L2 norm of every record's gradient before clipping, float32, shape (records,); inf where refused.
        below: records within the clipping threshold.
        refused: records whose gradient is not finite; they contribute zero and are not in `below`.
        loss: mean over the records.
    """

    sums: list[Tensor]
    norms: Tensor
    below: int
    refused: int
    loss: float


@dataclass(slots=True)
class _Call:
    """One call of a layer: its input, that tensor's version then, and its output's place in the graph."""

    activations: Tensor
    version: int
    edge: GradientEdge


class ClippedGradients:
    """Computes clipped sums for one network and loss.

    Attributes:
        layers: names of the modules that own trainable parameters, in the network's order; columns of
            `Clipping.factors`.
        layer_of: for each trainable parameter, the index of its layer.
    """

    def __init__(
        self,
        network: nn.Module,
        loss: LossFunction,
        physical_batch: int | None = None,
        mixed_precision: bool = False,
    ) -> None:
        """Prepare for the parameters that are trainable now.

        Args:
            network: made of layers that treat records independently; runs in the mode that it is in.
            loss: per-record losses, shape (rows,), of logits and labels.
            physical_batch: records in one pass; None chooses by cache (CPU) or memory (GPU).
            mixed_precision: on a GPU run the passes in bfloat16; norms and sums stay float32. Ignored on a CPU.

        Raises:
            ParameterError: no trainable parameters, one that is not float32, or a physical batch below 1.
        """
        named = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
        if not named:
            raise ParameterError("the network has no trainable parameters")
        strange = [name for name, parameter in named.items() if parameter.dtype != torch.float32]
        if strange:
            raise ParameterError(f"trainable parameters must be float32, found another type in {', '.join(strange)}")
        if physical_batch is not None and physical_batch < 1:
            raise ParameterError(f"a physical batch has at least 1 record, found {physical_batch}")
        self._network, self._loss = network, loss
        self._parameters = named
        self._device = next(iter(named.values())).device
        self._mixed = mixed_precision and self._device.type == "cuda"
        self._physical_batch = physical_batch
        owners = [name.rpartition(".")[0] for name in named]
        self.layers = tuple(dict.fromkeys(owners))
        self.layer_of = tuple(self.layers.index(owner) for owner in owners)
        self._fast = True
        self._record_bytes: int | None = None  # of one copy of one record; known after the check

    def sum(self, inputs: Tensor, labels: Tensor, clipping: Clipping, *, augmented: bool = False) -> ClippedSum:
        """Sum of the records' clipped gradients.

        Args:
            inputs: records, shape (n, ...); with `augmented` (n, copies, ...).
            labels: one a record, shape (n, ...).
            clipping: how records are scaled.
            augmented: the second axis holds copies of a record, whose gradients are averaged before clipping.

        Raises:
            ParameterError: inputs and labels differ in number, or the loss is not one number a row.
        """
        if len(inputs) != len(labels):
            raise ParameterError(f"one label a record is needed, found {len(inputs)} records and {len(labels)} labels")
        copies = inputs.shape[1] if augmented else 1
        rows = inputs.flatten(0, 1) if augmented else inputs
        sums = [torch.zeros_like(parameter, requires_grad=False) for parameter in self._parameters.values()]
        if not len(labels):
            return ClippedSum(sums, torch.zeros(0, device=self._device), 0, 0, 0.0)
        if self._record_bytes is None:
            self._check(rows, labels, copies)
        size = self._physical_batch or self._choose_batch(copies)
        norms, within, losses = [], [], []
        for start in range(0, len(labels), size):
            piece = slice(start, start + size)
            found, loss = self._record_gradients(rows[start * copies : (start + size) * copies], labels[piece], copies)
            norm, below = self.add_clipped(found, clipping, sums)
            norms.append(norm)
            within.append(below)
            losses.append(loss.sum())
        joined = torch.cat(norms)
        return ClippedSum(
            sums,
            joined,
            below=int(torch.cat(within).sum()),
            refused=int(joined.isinf().sum()),
            loss=float(torch.stack(losses).sum()) / len(labels),
        )

    def add_clipped(
        self, found: list[RecordGradients], clipping: Clipping, sums: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Clip per-record gradients and add them to sums.

        Args:
            found: gradients of the same records, one a trainable parameter in the network's order.
            clipping: how records are scaled.
            sums: added to in place, one a trainable parameter.

        Returns:
            As `ClippedSum.norms`, and who is within the threshold, bool; both of shape (records,).
        """
        squares = [gradients.squared_norms() for gradients in found]
        by_layer = torch.zeros(len(squares[0]), len(self.layers), dtype=torch.float64, device=self._device)
        for layer, square in zip(self.layer_of, squares, strict=True):
            by_layer[:, layer] += square
        norms = by_layer.sum(dim=1).sqrt().float()
        finite = norms.isfinite()
        if not finite.all():
            bad = (~finite).nonzero().squeeze(1)
            by_layer[bad] = 0.0
            norms = norms.where(finite, torch.inf)
            for gradients in found:
                gradients.erase(bad)
        by_layer = by_layer.sqrt()
        factors = (clipping.factors(by_layer) * finite[:, None]).float()
        with _full_precision():
            for total, layer, gradients in zip(sums, self.layer_of, found, strict=True):
                total += gradients.weighted_sum(factors[:, layer])
        return norms, clipping.within(by_layer) & finite

    def _record_gradients(self, rows: Tensor, labels: Tensor, copies: int) -> tuple[list[RecordGradients], Tensor]:
        """Every parameter's per-record gradients, and the records' losses, of one physical batch."""
        if self._fast:
            try:
                return self._book(rows, labels, copies)
            except _NotBookableError as error:
                self._give_up_fast(str(error))
        return self._differentiate(rows, labels, copies)

    def _book(self, rows: Tensor, labels: Tensor, copies: int) -> tuple[list[RecordGradients], Tensor]:
        """The fast way: one forward and one backward pass, then each layer's rule."""
        if rows.dim() == 4:
            rows = _channels_last(rows)
        with self._recorded(len(rows)) as calls, self._autocast(), torch.enable_grad():
            losses = self._losses(self._network(rows), labels, copies)
        used = {name: call for name, call in calls.items() if call is not None}
        edges = [call.edge for call in used.values()]
        backward = torch.autograd.grad(losses.sum(), edges, allow_unused=True) if edges else ()
        found: dict[str, RecordGradients] = {}
        for (name, call), gradient in zip(used.items(), backward, strict=True):
            if call.activations._version != call.version:
                raise _NotBookableError(f"the input of {name or 'the network'} is overwritten after its use")
            if gradient is None:
                continue
            layer = self._network.get_submodule(name)
            rule = find_rule(layer)
            if rule is None:
                raise _NotBookableError(f"{name or 'the network'} ({type(layer).__name__}) has no rule")
            x = call.activations.float() if call.activations.is_floating_point() else call.activations
            for parameter, gradients in rule(layer, x, gradient.float(), copies).items():
                found[f"{name}.{parameter}" if name else parameter] = gradients
        return [
            found[name] if name in found else _zeros(parameter, len(labels))
            for name, parameter in self._parameters.items()
        ], losses.detach()

    @contextmanager
    def _recorded(self, rows: int) -> Iterator[dict[str, _Call | None]]:
        """Hooks on the layers while the network runs; yields the calls that they record."""
        calls: dict[str, _Call | None] = dict.fromkeys(self.layers)

        def record(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
                if calls[name] is not None:
                    raise _NotBookableError(f"{name} is called more than once")
                if len(arguments) != 1 or not isinstance(output, Tensor):
                    raise _NotBookableError(f"{name} does not map one tensor to one tensor")
                (x,) = arguments
                batched = x.dim() > 1 or isinstance(layer, nn.Embedding)
                if not (batched and len(x) == len(output) == rows):
                    raise _NotBookableError(f"{name} does not have the records in its first axis")
                calls[name] = _Call(x.detach(), x._version, get_gradient_edge(output))

            return hook

        with ExitStack() as stack:
            for name in self.layers:
                handle = self._network.get_submodule(name).register_forward_hook(record(name))
                stack.callback(handle.remove)
            yield calls

    def _differentiate(self, rows: Tensor, labels: Tensor, copies: int) -> tuple[list[RecordGradients], Tensor]:
        """The general way: vmap of grad over the whole network."""
        frozen = {
            name: tensor.detach()
            for name, tensor in (*self._network.named_parameters(), *self._network.named_buffers())
            if name not in self._parameters
        }

        def record_loss(trainable: dict[str, Tensor], record: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(self._network, {**frozen, **trainable}, (record,))
            return self._losses(logits, label[None], copies).sum()

        trainable = {name: parameter.detach() for name, parameter in self._parameters.items()}
        with self._autocast():
            found, losses = vmap(grad_and_value(record_loss), in_dims=(None, 0, 0), randomness="different")(
                trainable, _by_record(rows, copies), labels
            )
        return [
            Dense(found[name].float(), Layout(parameter.shape)) for name, parameter in self._parameters.items()
        ], losses

    def _losses(self, logits: Tensor, labels: Tensor, copies: int) -> Tensor:
        """The loss of each record, shape (n,): the mean over its copies."""
        losses = self._loss(logits, labels.repeat_interleave(copies, dim=0) if copies > 1 else labels)
        if losses.shape != (len(labels) * copies,):
            raise ParameterError(
                f"the loss must give one number a row, shape ({len(labels) * copies},), found {tuple(losses.shape)}; "
                'use reduction="none"'
            )
        return losses.view(-1, copies).mean(dim=1) if copies > 1 else losses

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._mixed)

    def _check(self, rows: Tensor, labels: Tensor, copies: int) -> None:
        """Compare the fast way with autograd on random records, and measure the memory of a record."""
        mixed, self._mixed = self._mixed, False
        picked = torch.arange(_CHECKED_RECORDS, device=rows.device) % len(labels)
        some = _by_record(rows, copies)[picked].flatten(0, 1)
        if some.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            some = torch.rand(some.shape, generator=generator).to(some)
        labels = labels[picked]
        weights = torch.arange(1.0, _CHECKED_RECORDS + 1, device=self._device)
        try:
            with self._same_random_numbers():
                expected, saved = self._plain_sum(some, labels, copies, weights)
            with self._same_random_numbers():
                found, _ = self._record_gradients(some, labels, copies)
            if self._fast and not _agree([gradients.weighted_sum(weights) for gradients in found], expected):
                self._give_up_fast("its gradients differ from autograd's")
        finally:
            self._mixed = mixed
        sizes = zip(self._parameters.values(), found, strict=True)
        dense = sum(parameter.numel() for parameter, gradients in sizes if isinstance(gradients, Dense)) * 4
        self._record_bytes = max(1, 2 * saved // (_CHECKED_RECORDS * copies) + dense)

    def _plain_sum(self, rows: Tensor, labels: Tensor, copies: int, weights: Tensor) -> tuple[list[Tensor], int]:
        """Autograd's gradient of the weighted losses, and the bytes of records that it saved for the backward pass."""
        sizes: dict[int, int] = {}
        constant = {t.untyped_storage().data_ptr() for t in (*self._network.parameters(), *self._network.buffers())}

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in constant:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            losses = self._losses(self._network(rows), labels, copies)
        parameters = list(self._parameters.values())
        found = torch.autograd.grad((losses * weights).sum(), parameters, allow_unused=True)
        gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]
        return gradients, sum(sizes.values())

    @contextmanager
    def _same_random_numbers(self) -> Iterator[None]:
        """Dropout draws the same masks in each such block, and the run's own generator is left as it was."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(0)
            yield

    def _give_up_fast(self, reason: str) -> None:
        _logger.warning("per-record gradients by torch.func, which is slower: %s", reason)
        self._fast = False

    def _choose_batch(self, copies: int) -> int:
        if self._device.type == "cuda":
            budget = int(_GPU_BATCH_FRACTION * torch.cuda.mem_get_info(self._device)[0])
        else:
            budget = _CPU_BATCH_BYTES
        assert self._record_bytes is not None
        return max(1, budget // (self._record_bytes * copies))


def _by_record(rows: Tensor, copies: int) -> Tensor:
    """Rows (n * copies, ...) as (n, copies, ...)."""
    return rows.reshape(-1, copies, *rows.shape[1:])


def _channels_last(images: Tensor) -> Tensor:
    """The images with channels last in memory, said in the strides also where one channel leaves both ways open."""
    _, channels, height, width = images.shape
    packed = images.permute(0, 2, 3, 1).contiguous()
    return packed.as_strided(images.shape, (height * width * channels, 1, width * channels, channels))


def _zeros(parameter: Tensor, records: int) -> Dense:
    """Gradients of a parameter that the loss does not depend on."""
    return Dense(torch.zeros(1, device=parameter.device).expand(records, parameter.numel()), Layout(parameter.shape))


def _agree(found: list[Tensor], expected: list[Tensor]) -> bool:
    scale = max(float(tensor.norm()) for tensor in expected)
    return all(
        float((f - e).norm()) <= _CHECK_TOLERANCE * (float(e.norm()) + _CHECK_TOLERANCE * scale)
        for f, e in zip(found, expected, strict=True)
    )


@contextmanager
def _full_precision() -> Iterator[None]:
    """Matrix products in full float32: a norm and the sum that it bounds must agree (TensorFloat-32 has 10 bits)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
