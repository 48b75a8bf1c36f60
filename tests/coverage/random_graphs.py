"""Hypothesis strategies of small ONNX models: one that surely has an operator, and a free mix of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

import numpy as np
import onnx
import onnx.printer
from hypothesis import strategies as st

from tests.coverage.graph_sketch import Drawing, Shape, Sketch, Value
from tests.coverage.random_operators import LINEAR, NONLINEAR, QUANTISED, REWRITTEN
from tests.coverage.random_products import mix_axis

OPSETS = (13, 17, 18, 21)
#: Elements of a value that is read once more.
_LARGEST_READ = 300
_LARGEST_INPUT = 64
_HIGHEST_RANK = 4
_WEIGHTED: Mapping[str, Drawing] = {name: d for name, d in (LINEAR | REWRITTEN).items() if d.weighted}
_MIXED: Mapping[str, Drawing] = LINEAR | REWRITTEN | NONLINEAR


class Placing(Enum):
    """Which of the legal placements is taken."""

    CHEAPEST = "the product's own"
    LATE = "up and down as late as possible: free operators follow weights"
    EARLY = "up and down as early as possible: movements go in front of weights"
    RANDOM = "values have random costs"


@dataclass(frozen=True)
class RandomGraph:
    """A drawn model.

    Attributes:
        model: the model.
        placing: how its operators are to be placed.
        step: what an output changes by where a value is rounded the other way; 0 without quantised operators.
    """

    model: onnx.ModelProto
    placing: Placing
    step: float

    def __repr__(self) -> str:
        opset = self.model.opset_import[0].version
        return f"{self.placing.name}, opset {opset}\n{onnx.printer.to_text(self.model.graph)}"


@st.composite
def graphs_with(draw: st.DrawFn, drawing: Drawing) -> RandomGraph:
    """Draw a graph of one operator between others: behind weights, in front of them, or both."""
    sketch = _sketch(draw, drawing.since)
    x = sketch.add_input(_shape(sketch, drawing.least, min(drawing.most, _HIGHEST_RANK)))
    placing = draw(st.sampled_from(Placing))
    follows = placing is Placing.LATE or sketch.boolean()
    made = drawing.draw(sketch, mix_axis(sketch, x) if follows else x)
    if sketch.step:  # rounding may go either way, and nothing may magnify that
        pass
    elif placing is Placing.EARLY or not (follows or drawing.weighted) or sketch.boolean():
        made = _weigh(sketch, made)
    elif sketch.boolean():
        made = _apply(sketch, made, NONLINEAR)
    sketch.values.append(made)
    return RandomGraph(sketch.model(), placing, sketch.step)


@st.composite
def mixed_graphs(draw: st.DrawFn) -> RandomGraph:
    """Draw a graph of two to ten operators, with branches, joins, and several inputs and outputs."""
    sketch = _sketch(draw, 13)
    for _ in range(1 + sketch.rarely()):
        sketch.add_input(_shape(sketch, 1, 4))
    for _ in range(sketch.integer(2, 8)):
        small = [v for v in sketch.values if v.rank <= _HIGHEST_RANK and prod(v.shape) <= _LARGEST_READ]
        made = _apply(sketch, small[-1] if sketch.boolean() else sketch.one_of(*small), _MIXED)
        sketch.values.append(made)
        if sketch.rarely():
            sketch.results.append(made)
    sketch.values.append(_weigh(sketch, sketch.one_of(*small)))
    if sketch.rarely():
        quantisable = [v for v in sketch.values if 2 <= v.rank <= 3 and prod(v.shape) <= _LARGEST_READ]
        if quantisable:
            sketch.results.append(_apply(sketch, sketch.one_of(*quantisable), QUANTISED))
    return RandomGraph(sketch.model(), draw(st.sampled_from(Placing)), sketch.step)


def _sketch(draw: st.DrawFn, since: int) -> Sketch:
    opset = draw(st.sampled_from([opset for opset in OPSETS if opset >= since]))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    return Sketch(draw, opset, draw(st.booleans()), generator)


def _shape(sketch: Sketch, least: int, most: int) -> Shape:
    shape: list[int] = []
    for _ in range(sketch.integer(max(1, least), most)):
        shape.append(sketch.integer(1, max(1, min(6, _LARGEST_INPUT // prod(shape)))))
    return tuple(shape)


def _apply(sketch: Sketch, x: Value, drawings: Mapping[str, Drawing]) -> Value:
    """Append one of the operators that can read a value."""
    return sketch.one_of(*(d for d in drawings.values() if d.takes(sketch, x))).draw(sketch, x)


def _weigh(sketch: Sketch, x: Value) -> Value:
    """Append an operator with weights."""
    return _apply(sketch, x, _WEIGHTED)
