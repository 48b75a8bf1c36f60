"""Throughput of a private training step: ours, each mode of Opacus, and a step without privacy.

Run from the repository root, on an otherwise idle machine:

    python benchmarks/dp_step.py --json PATH

The network is the tanh CNN of Papernot et al. 2021 for MNIST (26 k weights), on random images; a step is per-record
gradients, clipping, noise and the optimiser. Contenders take turns, so that a disturbance hits all of them; times are
medians. Opacus runs each mode over the whole batch, as it does by default, and its hooks also in physical batches and
with channels last, which its users could choose. On a shared machine wall-clock times include waiting for others; the
processor time of all threads does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: OpenMP reads it then

import opacus
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn
from torch.nn import functional

from heinfer.processes import core_count
from heinfer.training.privacy.clipping import Flat
from heinfer.training.privacy.gradients import ClippedGradients
from heinfer.training.privacy.randomness import KeyedRandomness, Purpose

CLIP_NORM, NOISE_MULTIPLIER, LEARNING_RATE, MOMENTUM = 1.0, 1.0, 0.5, 0.9
#: Chosen by the activations' size against a cache of 32 MB, not by trying; Opacus leaves it to its user.
OPACUS_PHYSICAL_BATCH = 256

#: Rounds before the measured ones: they choose kernels and warm the caches.
WARM_UP = 1
#: No round begins later than this, so that a busy machine is done within three minutes too.
TIME_LIMIT_S = 120

Step = Callable[[], object]


def build_network(device: torch.device) -> nn.Sequential:
    """Papernot et al. 2021, "Tempered sigmoid activations for deep learning with differential privacy", table 1."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    ).to(device)


def optimizer_for(network: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def our_step(images: Tensor, labels: Tensor, mixed_precision: bool = False) -> Step:
    network = build_network(images.device)
    optimizer = optimizer_for(network)
    randomness = KeyedRandomness.from_seed(0)
    parameters = list(network.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    clipping = Flat(CLIP_NORM)
    gradients = ClippedGradients(
        network, lambda z, y: functional.cross_entropy(z, y, reduction="none"), mixed_precision=mixed_precision
    )
    count = 0

    def step() -> None:
        nonlocal count
        found = gradients.sum(images, labels, clipping)
        noise = torch.from_numpy(randomness.normal(Purpose.NOISE, count, sum(sizes))).to(images.device).split(sizes)
        for parameter, total, piece in zip(parameters, found.sums, noise, strict=True):
            scaled = NOISE_MULTIPLIER * clipping.sensitivity * piece.view_as(total)
            parameter.grad = ((total + scaled) / len(labels)).float()
        optimizer.step()
        count += 1

    return step


def plain_step(images: Tensor, labels: Tensor, channels_last: bool = False) -> Step:
    network = build_network(images.device)
    optimizer = optimizer_for(network)
    if channels_last:
        network, images = network.to(memory_format=torch.channels_last), with_channels_last(images)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(network(images), labels).backward()
        optimizer.step()

    return step


def with_channels_last(images: Tensor) -> Tensor:
    return images.as_strided(images.shape, (images[0].numel(), 1, images.shape[3], 1))


def opacus_step(
    images: Tensor, labels: Tensor, mode: str, physical_batch: int | None = None, channels_last: bool = False
) -> Step:
    """Opacus' hooks or functorch: per-record gradients kept, then clipped and summed by its optimiser."""
    network = build_network(images.device)
    if channels_last:
        images = with_channels_last(images)
    wrapped = GradSampleModule(network, force_functorch=mode == "functorch")
    optimizer = DPOptimizer(
        optimizer_for(network),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(labels),
    )
    size = physical_batch or len(labels)

    def step() -> None:
        optimizer.zero_grad()
        for start in range(0, len(labels), size):
            optimizer.signal_skip_step(do_skip=start + size < len(labels))
            functional.cross_entropy(wrapped(images[start : start + size]), labels[start : start + size]).backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def ghost_step(images: Tensor, labels: Tensor) -> Step:
    """Opacus' ghost clipping: norms from one backward pass, the clipped sum from a second."""
    network = build_network(images.device)
    wrapped = GradSampleModuleFastGradientClipping(network, max_grad_norm=CLIP_NORM, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        optimizer_for(network),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=CLIP_NORM,
        expected_batch_size=len(labels),
    )
    loss = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad()
        loss(wrapped(images), labels).backward()
        optimizer.step()

    return step


def contenders(images: Tensor, labels: Tensor) -> dict[str, Step]:
    found = {
        "heinfer": our_step(images, labels),
        "opacus hooks": opacus_step(images, labels, "hooks"),
        f"opacus hooks, {OPACUS_PHYSICAL_BATCH} at a time": opacus_step(images, labels, "hooks", OPACUS_PHYSICAL_BATCH),
        "opacus hooks, the same, channels last": opacus_step(images, labels, "hooks", OPACUS_PHYSICAL_BATCH, True),
        "opacus functorch": opacus_step(images, labels, "functorch"),
        "opacus ghost": ghost_step(images, labels),
        "not private": plain_step(images, labels),
        "not private, channels last": plain_step(images, labels, channels_last=True),
    }
    if images.is_cuda:
        found["heinfer, bfloat16"] = our_step(images, labels, mixed_precision=True)
    return found


def measure(steps: dict[str, Step], device: torch.device, repetitions: int) -> tuple[int, dict[str, dict[str, float]]]:
    """Rounds measured, and the median seconds of every contender, by the wall clock and of processor time."""
    wall: dict[str, list[float]] = {name: [] for name in steps}
    processor: dict[str, list[float]] = {name: [] for name in steps}
    end = time.monotonic() + TIME_LIMIT_S
    for repetition in range(WARM_UP + repetitions):
        if repetition > WARM_UP and time.monotonic() > end:
            break
        for name, step in steps.items():
            start, busy = time.perf_counter(), time.process_time()
            step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if repetition >= WARM_UP:
                wall[name].append(time.perf_counter() - start)
                processor[name].append(time.process_time() - busy)
    return len(next(iter(wall.values()))), {
        name: {"wall_s": statistics.median(wall[name]), "processor_s": statistics.median(processor[name])}
        for name in steps
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    # Opacus hooks layers whose input needs no gradient; torch warns of it at every step.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    # Opacus' own remark on its generator; the noise of this benchmark is thrown away.
    warnings.filterwarnings("ignore", message="Secure RNG turned off")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(core_count())
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(arguments.batch, 1, 28, 28, generator=generator).to(device)
    labels = torch.randint(0, 10, (arguments.batch,), generator=generator).to(device)
    load = os.getloadavg()[0]
    rounds, times = measure(contenders(images, labels), device, arguments.repetitions)
    best = min(seconds["wall_s"] for name, seconds in times.items() if name.startswith("opacus"))
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine()
    report: dict[str, Any] = {
        "device": name,
        "cores": core_count(),
        "load_before": load,
        "torch": torch.__version__,
        "opacus": opacus.__version__,
        "batch": arguments.batch,
        "repetitions": rounds,
        "records_per_second": {name: arguments.batch / seconds["wall_s"] for name, seconds in times.items()},
        "times": times,
        "ratio_to_best_opacus": best / times["heinfer"]["wall_s"],
    }
    print(f"{name}, {core_count()} cores, load {load:.2f}; batch {arguments.batch}, median of {rounds}")
    print(f"{'step':<42} {'records/s':>10} {'ms':>8} {'processor ms':>13}")
    for contender, seconds in times.items():
        rate = arguments.batch / seconds["wall_s"]
        print(f"{contender:<42} {rate:>10.0f} {seconds['wall_s'] * 1e3:>8.1f} {seconds['processor_s'] * 1e3:>13.1f}")
    print(f"heinfer against the best mode of Opacus: {report['ratio_to_best_opacus']:.2f} times as fast")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
