"""The partition as a drawing: node to the left, server to the right, rounds downwards, tensors as lines.

    query -> [node step] --+
                           +--> [block 0]      up: values, bytes a sample
             [node step] <-+-------+           down

Lines run along vertical tracks: those between the two sides in the gap between them, those from one node step to a
later one left of the node. All lines that leave a box share a track, and tracks are used again where they are free, so
that a model of hundreds of rounds takes no more width than one of three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap

from heinfer.client.charts import WIDTH
from heinfer.client.report import Report
from heinfer.client.svg import LETTER, drawing, group, path, rectangle, text
from heinfer.plan import DeepStep, NodeStep, Plan, TensorSpec
from heinfer.units import size

_TOP, _GAP, _LINE, _MARGIN = 34.0, 16.0, 16.0, 12.0
_TRACK, _PORT, _LABELS = 11.0, 13.0, 172.0
#: Lines of operators in a box; the rest is in its title.
_MOST_LINES = 3


@dataclass(frozen=True, slots=True)
class _Box:
    """What runs at one place in one go.

    Attributes:
        block: index of a block, None for what runs on the node.
        heading: bold line, may be empty.
        content: operators.
        reads: names of tensors.
        makes: names of tensors.
    """

    block: int | None
    heading: str
    content: tuple[str, ...]
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a box lies."""

    left: float
    top: float
    width: float
    height: float

    @property
    def arrival(self) -> float:
        """Height of lines that come in."""
        return self.top + _PORT

    @property
    def departure(self) -> float:
        """Height of lines that go out."""
        return self.top + self.height - _PORT + 4


@dataclass(frozen=True, slots=True)
class _Net:
    """All lines from one box along one track: numbers of boxes."""

    source: int
    targets: tuple[int, ...]


def draw_partition(plan: Plan, report: Report) -> str:
    """Draw a plan.

    Args:
        plan: the plan.
        report: an evaluation of it, which knows the bytes of every block; a simulation has none.
    """
    boxes = _boxes(plan)
    between, beside = _nets(boxes)
    rough = _places(boxes, 0.0, WIDTH, 0.0)  # tops alone count here
    inner, outer = _tracks(between, rough), _tracks(beside, rough)
    first = _MARGIN + _TRACK * (max(outer, default=-1) + 2)
    gutter = _TRACK * (max(inner, default=-1) + 2) + _LABELS
    column = (WIDTH - first - gutter - _MARGIN) / 2
    places = _places(boxes, first, column, first + column + gutter)
    height = max(place.top + place.height for place in places) + _MARGIN
    parts = [_ARROW, *_lanes(first, column, gutter, height)]
    for net, track in zip(between, inner, strict=True):
        parts.append(_lines(net, boxes, places, first + column + _TRACK * (track + 1)))
    for net, track in zip(beside, outer, strict=True):
        parts.append(_lines(net, boxes, places, first - _TRACK * (track + 1)))
    for box, place in zip(boxes, places, strict=True):
        parts.append(_draw_box(box, place))
        if box.block is not None:
            parts += _transfers(plan, report, box.block, place)
    return drawing(WIDTH, height, "What runs on the node and what on the server, in order", *parts)


_ARROW = (
    '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0L8 4L0 8Z" class="head"/></marker></defs>'
)


def _boxes(plan: Plan) -> list[_Box]:
    """Return query, steps and result, in order."""
    boxes = [_Box(None, "query", (), (), tuple(t.name for t in plan.inputs))]
    round_number = 0
    for step in plan.steps:
        if isinstance(step, NodeStep):
            boxes.append(_Box(None, "", step.operators, step.inputs, step.outputs))
            continue
        round_number += 1
        if isinstance(step, DeepStep):
            deep, index = plan.deep[step.block], len(plan.blocks) + step.block
            reads, makes = (tuple(t.name for t in tensors) for tensors in (deep.inputs, deep.outputs))
            boxes.append(_Box(index, f"deep block {step.block}, round {round_number}", deep.operators, reads, makes))
            continue
        for index in step.blocks:
            block = plan.blocks[index]
            reads, makes = (tuple(t.name for t in tensors) for tensors in (block.inputs, block.outputs))
            boxes.append(_Box(index, f"block {index}, round {round_number}", block.operators, reads, makes))
    boxes.append(_Box(None, "result", (), tuple(t.name for t in plan.outputs), ()))
    return boxes


def _nets(boxes: Sequence[_Box]) -> tuple[list[_Net], list[_Net]]:
    """Return what runs in the gap between node and server, and what runs left of the node."""
    maker = {name: number for number, box in enumerate(boxes) for name in box.makes}
    between: list[_Net] = []
    beside: list[_Net] = []
    for source, box in enumerate(boxes):
        targets = [t for t, other in enumerate(boxes) if any(maker.get(name) == source for name in other.reads)]
        on_node = [t for t in targets if box.block is None and boxes[t].block is None]
        across = [t for t in targets if t not in on_node]
        beside += [_Net(source, tuple(on_node))] if on_node else []
        between += [_Net(source, tuple(across))] if across else []
    return between, beside


def _tracks(nets: Sequence[_Net], places: Sequence[_Place]) -> list[int]:
    """Give every net a track that no other uses at the same height."""
    free_from: list[float] = []
    found = []
    for net in nets:  # in the order of their sources, so of their upper ends
        start = places[net.source].departure
        end = max(places[target].arrival for target in net.targets)
        track = next((t for t, height in enumerate(free_from) if height < start), len(free_from))
        if track == len(free_from):
            free_from.append(end)
        free_from[track] = end
        found.append(track)
    return found


def _places(boxes: Sequence[_Box], node_left: float, column: float, server_left: float) -> list[_Place]:
    top, places = _TOP + 8, []
    for box in boxes:
        lines = bool(box.heading) + len(_wrapped(box, column))
        height = 14 + _LINE * max(1, lines)
        if box.block is not None:
            height = max(height, 14 + 2 * _LINE)  # room for what goes up and what comes down
        places.append(_Place(node_left if box.block is None else server_left, top, column, height))
        top += height + _GAP
    return places


def _wrapped(box: _Box, column: float) -> list[str]:
    """Return operators in lines that fit into a column; the last one counts those that have no room."""
    letters = max(10, int((column - 20) / LETTER))
    whole = [operator.replace(" ", "\N{NO-BREAK SPACE}") for operator in box.content]
    lines: list[str] = []
    for shown in range(min(len(whole), letters), 0, -1):
        more = f" and {len(whole) - shown:,}\N{NO-BREAK SPACE}more" if shown < len(whole) else ""
        lines = wrap(", ".join(whole[:shown]) + more, letters, break_on_hyphens=False)
        if len(lines) <= _MOST_LINES:
            break
    return lines[:_MOST_LINES]


def _lanes(first: float, column: float, gutter: float, height: float) -> list[str]:
    second = first + column + gutter
    return [
        rectangle(first - 6, 0, column + 12, height, "lane node", 6),
        rectangle(second - 6, 0, column + 12, height, "lane server", 6),
        text(first + column / 2, 22, "trusted node: keys, values in the clear", "strong", "middle"),
        text(second + column / 2, 22, "untrusted server: ciphertexts, no keys", "strong", "middle"),
    ]


def _draw_box(box: _Box, place: _Place) -> str:
    kind = "node" if box.block is None else "server"
    rows = [(box.heading, "strong")] if box.heading else []
    rows += [(content, "") for content in _wrapped(box, place.width)]
    words = [
        text(place.left + 10, place.top + 20 + _LINE * row, content, style) for row, (content, style) in enumerate(rows)
    ]
    title = "\n".join((*((box.heading,) if box.heading else ()), *box.content)) or "node"
    return group(title, rectangle(place.left, place.top, place.width, place.height, f"box {kind}", 4), *words)


def _lines(net: _Net, boxes: Sequence[_Box], places: Sequence[_Place], track: float) -> str:
    """Draw a net: from its box to the track, along it, and to every target."""

    def side(number: int) -> float:
        place = places[number]
        return place.left if place.left > track else place.left + place.width

    start = places[net.source].departure
    names = set(boxes[net.source].makes)
    parts = []
    for target in net.targets:
        end = places[target].arrival
        steps = f"M{side(net.source):.1f} {start:.1f}H{track:.1f}V{end:.1f}H{side(target):.1f}"
        parts.append(path(steps, "edge"))
    carried = sorted(names & {name for target in net.targets for name in boxes[target].reads})
    return group(", ".join(carried), *parts)


def _transfers(plan: Plan, report: Report, index: int, place: _Place) -> list[str]:
    """Write what goes up and comes down beside a block."""
    costs = report.blocks[index].costs
    amounts = (None, None) if costs is None else (costs.bytes_up, costs.bytes_down)
    if index < len(plan.blocks):
        block = plan.blocks[index]
        inputs, outputs, up, down = block.inputs, block.outputs, block.input_rows, block.output_rows
    else:
        deep = plan.deep[index - len(plan.blocks)]
        inputs, outputs, up, down = deep.inputs, deep.outputs, deep.input_count, deep.output_count
    ways = (("up", inputs, place.arrival, up, amounts[0]), ("down", outputs, place.departure, down, amounts[1]))
    parts = []
    for way, tensors, height, count, amount in ways:
        values = f"{count:,} values"
        label = values if amount is None else f"{values}, {size(amount / report.samples)}"
        title = f"{way}: {'; '.join(map(_describe, tensors))}"
        parts.append(group(title, text(place.left - 12, height - 4, label, "mark", "end")))
    return parts


def _describe(tensor: TensorSpec) -> str:
    return f"{tensor.name} {' x '.join(map(str, tensor.shape)) or 'one value'}"
