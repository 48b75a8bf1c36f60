"""Values that cross between node and server under four placements of the same model.

    first come    every operator as soon as what it reads is there: weights in the first round in which the node has
                  their input; free operators on the server where all that they read is made in the same round, else on
                  the node
    patient       as first come, but a free operator whose operands are all encrypted stays on the server, even where
                  one of them must wait for the other
    cut           the minimum cut of `partitioner.placement`, on the graph as exported and folded
    product       the same after `partitioner.pipeline.save_values`: what `heinfer partition` does

    python benchmarks/placements.py [--only resnet50 unet ...] [--json benchmarks/results/placements.json]

Values are those of prepared mode, padding included: 6.25 bytes each, either way. The models are those of
tests/coverage: random weights at the sizes of the published ones, and small architectures exported by torch.onnx. The
resnet50 there has the strides of three stages in 3x3 convolutions; resnet50_v1 is the same with them in the 1x1
convolutions in front, as in the models that He et al. published with "Deep residual learning for image recognition".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from heinfer.processes import prepare_environment  # noqa: E402

prepare_environment()

from heinfer.ring import RingParameters  # noqa: E402
from partitioner import pipeline  # noqa: E402
from partitioner.placement import Side, place  # noqa: E402
from tests.coverage.architectures import ARCHITECTURES  # noqa: E402
from tests.coverage.light_models import NAMES, light_model  # noqa: E402
from tests.coverage.test_architectures import Case, export  # noqa: E402
from tests.partitioner.greedy import first_come, patient  # noqa: E402

Place = Callable[..., dict[ir.Node, Side]]
#: Placement, and whether operators are moved through others before.
PLACEMENTS: Mapping[str, tuple[Place, bool]] = {
    "first come": (first_come, False),
    "patient": (patient, False),
    "cut": (place, False),
    "product": (place, True),
}


def crossing(model: Path, placement: Place, saves: bool) -> dict[str, int]:
    """Place a model's operators; return values up and down for one sample, and rounds."""
    original = pipeline.place, pipeline.save_values
    pipeline.place = placement
    if not saves:
        pipeline.save_values = lambda model, pinned: None
    try:
        prepared = pipeline.prepare(model, RingParameters.default())
    finally:
        pipeline.place, pipeline.save_values = original
    forms = [built.block.prepared for built in prepared.blocks]
    assert all(form is not None for form in forms), "prepared mode lacks a block of this model"
    return {
        "up": sum(form.values_up for form in forms if form is not None),
        "down": sum(form.values_down for form in forms if form is not None),
        "rounds": len({group.round for group in prepared.groups if group.on_server}),
    }


def models(only: Collection[str], folder: Path) -> Mapping[str, Callable[[], onnx.ModelProto]]:
    """Return the models by name, made when they are asked for."""
    made: dict[str, Callable[[], onnx.ModelProto]] = {name: lambda name=name: light_model(name) for name in NAMES}
    made["resnet50_v1"] = lambda: strides_in_front(light_model("resnet50"))
    made |= {name: lambda name=name: export(Case(name, "torchscript"), folder) for name in ARCHITECTURES}
    return {name: make for name, make in made.items() if not only or name in only}


def strides_in_front(model: onnx.ModelProto) -> onnx.ModelProto:
    """Give the strides of every 3x3 convolution of a ResNet to the 1x1 convolution in front of it, in place."""
    makers = {node.output[0]: node for node in model.graph.node}
    for node in model.graph.node:
        strides = next((a for a in node.attribute if a.name == "strides" and max(a.ints) > 1), None)
        kernel = next((list(a.ints) for a in node.attribute if a.name == "kernel_shape"), None)
        if node.op_type != "Conv" or kernel != [3, 3] or strides is None:
            continue
        before = makers[node.input[0]]
        while before.op_type != "Conv":  # a BatchNormalization and a Relu
            before = makers[before.input[0]]
        for attribute in before.attribute:
            if attribute.name == "strides":
                attribute.CopyFrom(strides)
        strides.ints[:] = [1, 1]
    return model


def row(name: str, found: Mapping[str, Mapping[str, int]]) -> str:
    """Return a line of docs/placement.md: values under each placement, rounds, what is left."""
    totals = {key: each["up"] + each["down"] for key, each in found.items()}
    cells = [f"{total:,}" for total in totals.values()]
    rounds = f"{found['first come']['rounds']}, {found['product']['rounds']}"
    share = totals["product"] / totals["first come"]
    return f"| {name} | {' | '.join(cells)} | {rounds} | {share:.1%} |"


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    print(f"| model | {' | '.join(PLACEMENTS)} | rounds | product / first come |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for name, make in models(options.only, Path(folder)).items():
            onnx.save(make(), path)
            results[name] = {key: crossing(path, *how) for key, how in PLACEMENTS.items()}
            print(row(name, results[name]), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
