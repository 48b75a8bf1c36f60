"""Values that cross under the minimum cut, beside a first-come placement: a free operator stays where its inputs are.

    python benchmarks/placements.py [--only resnet50 unet ...] [--json benchmarks/results/placements.json]

Values are those of prepared mode, padding included. The models are those of tests/coverage: random weights at the sizes
of the published ones, and small architectures exported by torch.onnx.
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
from partitioner.lowering import Lowered, Placement  # noqa: E402
from partitioner.placement import Side, place  # noqa: E402
from partitioner.shapes import Shape  # noqa: E402
from tests.coverage.architectures import ARCHITECTURES  # noqa: E402
from tests.coverage.light_models import NAMES, light_model  # noqa: E402
from tests.coverage.test_architectures import Case, export  # noqa: E402

Place = Callable[..., dict[ir.Node, Side]]


def first_come(
    model: ir.Model,
    lowered: Mapping[ir.Node, Lowered],
    shapes: Mapping[str, Shape],
    on_node: Collection[ir.Node] = (),
    on_server: Collection[ir.Node] = (),
) -> dict[ir.Node, Side]:
    """Place operators in order: under encryption where all that they read is encrypted, else on the node."""
    sides: dict[ir.Node, Side] = {}
    for node in model.graph:
        placement = lowered[node].placement
        producers = [value.producer() for value in lowered[node].sources]
        encrypted = all(p is not None and sides[p] in (Side.WEIGHTED, Side.AFTER_WEIGHTS) for p in producers)
        if placement is Placement.WEIGHTED:
            sides[node] = Side.WEIGHTED
        elif placement is not Placement.NODE and node not in on_node and producers and encrypted:
            sides[node] = Side.AFTER_WEIGHTS
        else:
            sides[node] = Side.NODE
    return sides


def crossing(model: Path, placement: Place) -> dict[str, int]:
    """Place a model's operators; return values up and down for one sample, and rounds."""
    original, pipeline.place = pipeline.place, placement
    try:
        prepared = pipeline.prepare(model, RingParameters.default())
    finally:
        pipeline.place = original
    forms = [built.block.prepared for built in prepared.blocks]
    return {
        "up": sum(form.values_up for form in forms if form is not None),
        "down": sum(form.values_down for form in forms if form is not None),
        "rounds": len({group.round for group in prepared.groups if group.on_server}),
    }


def models(only: Collection[str], folder: Path) -> Mapping[str, Callable[[], onnx.ModelProto]]:
    """Return the models by name, made when they are asked for."""
    made: dict[str, Callable[[], onnx.ModelProto]] = {name: lambda name=name: light_model(name) for name in NAMES}
    made |= {name: lambda name=name: export(Case(name, "torchscript"), folder) for name in ARCHITECTURES}
    return {name: make for name, make in made.items() if not only or name in only}


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=(), metavar="MODEL")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        for name, make in models(options.only, Path(folder)).items():
            onnx.save(make(), path)
            cut, greedy = crossing(path, place), crossing(path, first_come)
            results[name] = {"minimum_cut": cut, "first_come": greedy}
            share = (cut["up"] + cut["down"]) / (greedy["up"] + greedy["down"])
            print(f"{name:28} cut {cut}  first come {greedy}  ratio {share:.3f}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
