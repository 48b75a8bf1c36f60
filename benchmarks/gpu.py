"""Server operators and preparation: native, beside PyTorch on a device; every result is compared bit for bit.

On an otherwise idle machine:

    OMP_WAIT_POLICY=PASSIVE OPENBLAS_NUM_THREADS=1 python benchmarks/gpu.py --device cuda \
        --json benchmarks/results/gpu.json --markdown gpu.md

Layers are those of ResNet-50 at 224x224, of a BERT-sized encoder (6 layers of 384, 128 tokens), and a convolution at
512x512, one query each, with weights at random; sums over a network count every layer as often as it occurs. Times
include the way to the device and back. Preparation is one query of one block, everything included: secrets, noise,
their transforms, products. Contenders take turns; figures are medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heinfer.processes import core_count, prepare_environment

prepare_environment()

import numpy as np  # noqa: E402  (BLAS reads the environment when numpy is imported)
import onnx  # noqa: E402
import torch  # noqa: E402

from heinfer.client.environment import machine_name  # noqa: E402
from heinfer.operators import Program  # noqa: E402
from heinfer.operators.backends import NativeBackend, open_device  # noqa: E402
from heinfer.operators.steps import Conv, MatMul, Step, Window  # noqa: E402
from heinfer.operators.torch_device import TorchDevice  # noqa: E402
from heinfer.operators.torch_products import Limbs, faster_limbs  # noqa: E402
from heinfer.operators.torch_program import TorchBackend  # noqa: E402
from heinfer.plan import load_node  # noqa: E402
from heinfer.ring import WEIGHT_LIMIT, RingParameters  # noqa: E402
from partitioner import partition  # noqa: E402
from trusted_node import preparation  # noqa: E402
from trusted_node.preparation import Preparer  # noqa: E402

PARAMETERS = RingParameters.default()
SAMPLES = (1, 8)


@dataclass(frozen=True)
class Layer:
    """A square convolution, padded to keep its size, or (kernel 0) a matrix applied to `size` tokens."""

    network: str
    channels: int
    outputs: int
    size: int
    kernel: int
    stride: int = 1
    times: int = 1

    @property
    def name(self) -> str:
        if not self.kernel:
            return f"matrix {self.channels}x{self.outputs}, {self.size} rows"
        stride = f" /{self.stride}" if self.stride > 1 else ""
        return f"conv {self.kernel}x{self.kernel} {self.channels}->{self.outputs} at {self.size}{stride}"


def _stage(channels: int, size: int, blocks: int, entering: int, stride: int) -> list[Layer]:
    """Layers of a stage of bottleneck blocks (He et al., CVPR 2016, table 1; strides in the 3x3 convolutions)."""
    out, before = 4 * channels, size * stride
    return [
        Layer("ResNet-50", entering, channels, before, 1),
        Layer("ResNet-50", channels, channels, before, 3, stride),
        Layer("ResNet-50", entering, out, before, 1, stride),
        Layer("ResNet-50", channels, out, size, 1, times=blocks),
        Layer("ResNet-50", out, channels, size, 1, times=blocks - 1),
        Layer("ResNet-50", channels, channels, size, 3, times=blocks - 1),
    ]


LAYERS = [
    Layer("ResNet-50", 3, 64, 224, 7, 2),
    *_stage(64, 56, 3, 64, 1),
    *_stage(128, 28, 4, 256, 2),
    *_stage(256, 14, 6, 512, 2),
    *_stage(512, 7, 3, 1024, 2),
    Layer("ResNet-50", 2048, 1000, 1, 0),
    Layer("encoder", 384, 384, 128, 0, times=24),
    Layer("encoder", 384, 1536, 128, 0, times=6),
    Layer("encoder", 1536, 384, 128, 0, times=6),
    Layer("512x512", 32, 32, 512, 3),
]
#: Blocks that are prepared: text of a graph with weights w, and their shape.
BLOCKS = {
    "polynomials: conv 3x3 64->64 at 56": (
        "g (float[b,64,56,56] x) => (float y) { y = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w) }",
        (64, 64, 3, 3),
    ),
    "polynomials: conv 3x3 16->16 at 512": (
        "g (float[b,16,512,512] x) => (float y) { y = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, w) }",
        (16, 16, 3, 3),
    ),
    "dense: matrix 2048x1000": ("g (float[b,2048] x) => (float y) { y = MatMul(x, w) }", (2048, 1000)),
}


def program_of(layer: Layer) -> tuple[Program, tuple[int, ...]]:
    """A program of one layer, and the shape of its weights."""
    if not layer.kernel:
        step: Step = MatMul(0, "w", (layer.size, layer.outputs))
        return Program(((layer.size, layer.channels),), (step,), (1,)), (layer.channels, layer.outputs)
    size, pad, points = -(-layer.size // layer.stride), layer.kernel // 2, (layer.kernel, layer.kernel)
    window = Window(points, (layer.stride,) * 2, (pad,) * 4, (1, 1), (size, size))
    step = Conv(0, "w", window, 1, (layer.outputs, size, size))
    source = (layer.channels, layer.size, layer.size)
    return Program((source,), (step,), (1,)), (layer.outputs, layer.channels, *points)


def measure_layer(layer: Layer, backends: dict[str, Any], samples: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds of a layer on every backend, once all gave the same bits."""
    generator = np.random.default_rng(0)
    program, shape = program_of(layer)
    weights = generator.integers(-WEIGHT_LIMIT, WEIGHT_LIMIT + 1, shape).astype(np.int16)
    x = generator.integers(0, PARAMETERS.modulus, (samples, int(np.prod(program.inputs[0]))))
    loaded = {name: backend.load(program, {"w": weights}, PARAMETERS) for name, backend in backends.items()}
    want = loaded["native"].evaluate_joined(x)
    for name, run in loaded.items():
        if not np.array_equal(run.evaluate_joined(x), want):
            raise SystemExit(f"{layer.name}: {name} differs from native")
    calls: dict[str, Callable[[], object]] = {
        name: (lambda run=run: run.evaluate_joined(x))  # type: ignore[misc]
        for name, run in loaded.items()
    }
    return {"network": layer.network, "layer": layer.name, "times": layer.times, "samples": samples} | _medians(
        calls, repetitions
    )


def measure_block(name: str, device: TorchDevice, samples: int, repetitions: int) -> dict[str, Any]:
    """Milliseconds of preparing a block, natively and on the device, once both gave the same bits."""
    text, shape = BLOCKS[name]
    with tempfile.TemporaryDirectory() as folder:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
        weights = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
        onnx.save(model, Path(folder) / "model.onnx")
        partition(Path(folder) / "model.onnx", Path(folder) / "bundle")
        node = load_node(Path(folder) / "bundle" / "node")
    preparers = {"native": Preparer(node), device.name: Preparer(node, device)}
    if not np.array_equal(*(_drawn_alike(preparer, samples) for preparer in preparers.values())):
        raise SystemExit(f"{name}: {device.name} differs from native")
    calls: dict[str, Callable[[], object]] = {
        where: (lambda preparer=preparer: preparer.prepare(samples).wipe())  # type: ignore[misc]
        for where, preparer in preparers.items()
    }
    return {"block": name, "samples": samples} | _medians(calls, repetitions)


def _drawn_alike(preparer: Preparer, samples: int) -> np.ndarray:
    """Masks and corrections of a query whose secrets and noise are always the same: for this comparison only."""
    drawn = preparation.draw_ternary, preparation.draw_noise
    generator = np.random.default_rng(0)
    preparation.draw_ternary = lambda count, degree: generator.integers(-1, 2, (count, degree)).astype(np.int8)
    preparation.draw_noise = lambda count: generator.integers(-21, 22, count).astype(np.int8)
    try:
        query = preparer.prepare(samples, threads=1)
    finally:
        preparation.draw_ternary, preparation.draw_noise = drawn
    return np.concatenate([array.ravel() for array in query.material(0)])


def _medians(calls: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    """Median milliseconds of calls that take turns; the first round compiles, and fills caches."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repetition in range(repetitions + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if repetition:
                seconds[name].append(time.perf_counter() - started)
    return {name: round(statistics.median(values) * 1e3, 3) for name, values in seconds.items()}


def totals(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """Sums over networks, layers as often as they occur."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        total = found.setdefault(
            (row["network"], row["samples"]), {"network": row["network"], "samples": row["samples"]}
        )
        for name in names:
            total[name] = round(total.get(name, 0.0) + row["times"] * row[name], 3)
    return list(found.values())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---"] * len(heads), *([str(row[head]) for head in heads] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:0")
    parser.add_argument("--only", choices=["ResNet-50", "encoder", "512x512", "preparation"], nargs="*")
    parser.add_argument("--samples", type=int, nargs="*", default=list(SAMPLES), help="samples a request")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    arguments = parser.parse_args()
    device = open_device(arguments.device)
    if device is None:
        parser.error("--device: native is always measured; name cpu, cuda or cuda:0")
    backends: dict[str, Any] = {"native": NativeBackend()}
    on_gpu = device.device.type == "cuda"
    kinds = list(Limbs) if on_gpu else [Limbs.FLOAT64]  # PyTorch's int8 on CPUs takes a hundred times as long
    backends |= {f"{device.name} {limbs.value}": TorchBackend(device, limbs) for limbs in kinds}
    wanted = arguments.only or ["ResNet-50", "encoder", "512x512", "preparation"]
    rows = [
        measure_layer(layer, backends, samples, arguments.repetitions)
        for samples in arguments.samples
        for layer in LAYERS
        if layer.network in wanted
    ]
    blocks = [
        measure_block(name, device, samples, arguments.repetitions)
        for samples in arguments.samples
        for name in BLOCKS
        if "preparation" in wanted
    ]
    report = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name(device.device) if on_gpu else machine_name(),
        "cpu": machine_name(),
        "cores": core_count(),
        "faster_limbs": faster_limbs(device, PARAMETERS).value,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "networks": totals(rows, list(backends)),
        "layers": rows,
        "preparation": blocks,
    }
    parts = [table(part) for part in (report["networks"], rows, blocks) if part]
    text = f"{report['device']}, {report['cores']} cores, milliseconds\n\n" + "\n".join(parts)
    print(text)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
