"""The report of an evaluation as one page: what changed, how close, how long, how many bytes, and what runs where.

It is a single HTML file without scripts and without references to anything outside it: it can be mailed, printed and
archived. Its colours are those of Okabe and Ito, which the colour-blind tell apart.
Source: Okabe and Ito, Color Universal Design (2008), jfly.uni-koeln.de/color.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path

from heinfer.client.charts import Bar, Series, accuracy_chart, block_label, error_chart, legend, stacked_bars
from heinfer.client.partition_drawing import draw_partition
from heinfer.client.report import BlockReport, Costs, Disagreement, Report
from heinfer.plan import Plan
from heinfer.plan.files import write_file
from heinfer.units import duration, rate, size

#: Classes of a confusion matrix, and samples of the list below it; the rest is counted.
_MOST_CLASSES, _MOST_SAMPLES = 20, 20
_TIMES = (Series("node: encrypts and decrypts", "node"), Series("server", "server"), Series("wire and queues", "wire"))
_BYTES = (Series("up, to the server", "up"), Series("down, to the node", "down"))

#: Style of all pages of ours.
CSS = """
:root { color-scheme: light dark; --ink: #16191d; --faint: #565d66; --page: #fff; --rule: #d5d9de; --panel: #f5f7f9;
  --node: #0072b2; --server: #e69f00; --wire: #009e73; --up: #cc79a7; --down: #56b4e9; --plain: #7d858e;
  --bound: #d55e00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --faint: #a7aeb7; --page: #14171b; --rule: #3a4048;
  --panel: #1d2127; --node: #3d9be0; --plain: #99a1ab; --bound: #ff8a3d; } }
@media print { :root { --ink: #000; --faint: #333; --page: #fff; --rule: #bbb; --panel: #fff; --node: #0072b2;
  --plain: #7d858e; --bound: #d55e00; } }
* { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 72rem;
  margin: 2rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 0.4rem; border-bottom: 1px solid var(--rule); }
p { margin: 0.3rem 0; }
.sub, .note, footer { color: var(--faint); }
.note, footer { font-size: 0.9rem; }
.simulated { border: 1px solid var(--bound); border-left-width: 6px; padding: 0.5rem 1rem; margin: 1rem 0; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: 0.7rem; margin: 1.2rem 0; }
.tile { background: var(--panel); border: 1px solid var(--rule); border-radius: 6px; padding: 0.6rem 0.9rem; }
.tile b { display: block; font-size: 1.4rem; line-height: 1.3; }
.tile span { display: block; color: var(--faint); font-size: 0.85rem; }
.wide { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 46rem; height: auto; font: 12.5px system-ui, sans-serif; }
svg text { fill: var(--ink); }
svg .strong { font-weight: 600; }
svg .mark { fill: var(--faint); font-size: 11.5px; }
.grid { stroke: var(--rule); }
.span { stroke: var(--faint); stroke-width: 1.5; }
.edge { stroke: var(--faint); stroke-width: 1.4; fill: none; marker-end: url(#arrow); }
.head { fill: var(--faint); }
.error { fill: var(--node); }
.bound { fill: var(--bound); }
.plain { fill: var(--plain); } .node { fill: var(--node); } .server { fill: var(--server); }
.wire { fill: var(--wire); } .up { fill: var(--up); } .down { fill: var(--down); }
.lane { fill-opacity: 0.08; }
.box { fill: var(--page); stroke-width: 1.6; }
.box.node { stroke: var(--node); } .box.server { stroke: var(--server); }
.legend { font-size: 0.9rem; }
.key { margin-right: 1.4rem; white-space: nowrap; }
.key i { display: inline-block; width: 0.85rem; height: 0.85rem; margin-right: 0.4rem; vertical-align: -0.1rem; }
.key i.node, .key i.error { background: var(--node); } .key i.server { background: var(--server); }
.key i.wire { background: var(--wire); } .key i.up { background: var(--up); } .key i.down { background: var(--down); }
.key i.error { border-radius: 50%; } .key i.bound { background: var(--bound); width: 0.3rem; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { text-align: right; padding: 0.2rem 0.7rem; border-bottom: 1px solid var(--rule); vertical-align: top;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
th { font-weight: 600; }
td.words, th.words { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 10rem; }
table.confusion td, table.confusion th { text-align: center; border: 1px solid var(--rule); min-width: 1.6rem; }
table.confusion td.some { background: color-mix(in srgb, var(--bound) 35%, transparent); font-weight: 600; }
footer { margin-top: 2rem; border-top: 1px solid var(--rule); padding-top: 0.5rem; }
@media print { body { margin: 0; max-width: none; padding: 0; font-size: 11pt; } svg { min-width: 0; }
  h2, .legend, .note { break-after: avoid; } tr, .tile { break-inside: avoid; } table { font-size: 8pt; }
  th, td { padding: 0.1rem 0.4rem; } }
"""


def write_page(path: Path, report: Report, plan: Plan) -> None:
    """Write the page, as a whole or not at all.

    Args:
        path: the HTML file to write.
        report: of an evaluation or a simulation.
        plan: what was evaluated.

    Raises:
        OSError: the file can't be written.
    """
    write_file(path, render_page(report, plan).encode())


def render_page(report: Report, plan: Plan) -> str:
    """Return the page as text."""
    name = escape(report.model)
    kind = "simulated run" if report.simulated else "encrypted run"
    sections = [_accuracy(report), _errors(report)]
    if report.costs is not None:
        sections.append(_costs(report, report.costs))
    sections += [_partition(report, plan), _table(report)]
    body = f"""<h1>{name}</h1>
<p class="sub">{kind} beside the plain model on {report.samples:,} samples, {escape(report.mode)} mode</p>
{_SIMULATED if report.simulated else ""}
<div class="tiles">{"".join(_tiles(report))}</div>
{"".join(sections)}
<footer>{escape(_origin(report))}</footer>"""
    return document(f"{name}: {kind}", body)


def document(title: str, body: str, style: str = "") -> str:
    """Return a whole page: title and body, escaped already, and rules beside those of every page of ours."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{CSS}{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


_SIMULATED = (
    '<p class="simulated">Simulated: nothing was encrypted. The integers are those of a real run and the noise was '
    "drawn as a real run draws it; there are no times and no bytes.</p>"
)


def _tiles(report: Report) -> Iterable[str]:
    """The figures that are asked for first."""
    if report.accuracy_plain is not None and report.accuracy_encrypted is not None:
        yield tile(f"{report.accuracy_encrypted:.2%}", "accuracy", f"plain {report.accuracy_plain:.2%}")
    if report.agreement is not None:
        yield tile(f"{report.agreement:.2%}", "agreement", f"{len(report.disagreements):,} samples differ in top-1")
    yield tile(f"{report.max_abs_error:.1e}", "largest error of an output", f"estimate {report.estimate_text}")
    costs = report.costs
    if costs is not None:
        yield tile(duration(costs.latency_s), "one query, median", f"{costs.latency_mode} mode, {report.rounds} rounds")
        yield tile(f"{rate(costs.images_per_s)} / s", "samples", f"{duration(costs.seconds)} for all")
        up, down = (size(amount / report.samples) for amount in (costs.bytes_up, costs.bytes_down))
        yield tile(size((costs.bytes_up + costs.bytes_down) / report.samples), "a sample", f"{up} up, {down} down")


def tile(figure: str, name: str, detail: str) -> str:
    """Return a figure that is asked for first."""
    return f'<div class="tile"><span>{escape(name)}</span><b>{escape(figure)}</b><span>{escape(detail)}</span></div>'


def _accuracy(report: Report) -> str:
    other = "simulated" if report.simulated else "encrypted"
    parts = [f"<h2>Plain against {other}</h2>"]
    if report.accuracy_plain is not None:
        parts.append(f'<div class="wide">{accuracy_chart(report)}</div>')
    if report.agreement is None:
        parts.append("<p>Outputs are single numbers: there is no top-1 to compare.</p>")
    elif not report.disagreements:
        parts.append(f"<p>The largest output is the same one for all {report.samples:,} samples.</p>")
    else:
        parts += [_confusion(report.disagreements, other), _samples(report, other)]
    return "\n".join(parts)


def _confusion(found: list[Disagreement], other: str) -> str:
    """Return a matrix of the classes that occur in disagreements; the most frequent ones where there are many."""
    counts = Counter((d.plain, d.encrypted) for d in found)
    frequent = Counter(c for d in found for c in (d.plain, d.encrypted)).most_common(_MOST_CLASSES)
    classes = sorted(c for c, _ in frequent)
    head = "".join(f"<th>{c}</th>" for c in classes)
    rows = []
    for plain in classes:
        cells = "".join(
            f'<td class="some" title="plain {plain}, {other} {c}">{counts[plain, c]}</td>'
            if counts[plain, c]
            else "<td></td>"
            for c in classes
        )
        rows.append(f'<tr><th scope="row">{plain}</th>{cells}</tr>')
    shown = sum(counts[a, b] for a in classes for b in classes)
    rest = "" if shown == len(found) else f" {len(found) - shown:,} more are of rarer classes."
    return (
        f'<p>Samples whose class differs: plain downwards, {other} across.{rest}</p><div class="wide">'
        f'<table class="confusion"><tr><th>plain \\ {other}</th>{head}</tr>{"".join(rows)}</table></div>'
    )


def _samples(report: Report, other: str) -> str:
    found = report.disagreements
    errors = (
        f"errors come of polynomials, {report.max_abs_error:.1e} at most"
        if report.error_estimate is None
        else f"errors are estimated at {report.error_estimate:.1e}"
    )
    rows = "".join(
        f"<tr><td>{d.sample}</td><td>{'' if d.label is None else d.label}</td><td>{d.plain}</td><td>{d.encrypted}</td>"
        f"<td>{d.gap:.1e}</td></tr>"
        for d in found[:_MOST_SAMPLES]
    )
    more = "" if len(found) <= _MOST_SAMPLES else f" The first {_MOST_SAMPLES} of {len(found):,}."
    return (
        f'<p class="note">The gap is how far apart the two classes are in the plain output; '
        f"{errors}.{more}</p><table><tr><th>sample</th><th>label</th><th>plain</th><th>{other}</th>"
        f"<th>gap</th></tr>{rows}</table>"
    )


def _errors(report: Report) -> str:
    key = legend(Series("largest error measured", "error"), Series("bound; estimate for the whole model", "bound"))
    last = f" The bound of the last block, rounding of its results included: {report.bound_text}."
    if report.polynomials is not None:
        last += (
            " Deep blocks are measured against their own polynomials; their bounds cover the rounding of weights as "
            "well, and hold where inputs and outputs are within the calibrated ranges; conditional ones suppose that "
            "inner values are, too."
        )
    return (
        f"<h2>Error against bound</h2>{key}"
        f'<p class="note">Of each block against a float64 evaluation on the same input, over {report.traced_samples} '
        f"samples; logarithmic scale.{last}</p>"
        f'<div class="wide">{error_chart(report)}</div>{_polynomials(report)}'
    )


def _polynomials(report: Report) -> str:
    """Say what deep blocks did; nothing where there are none."""
    if report.polynomials is None:
        return ""
    rows = "".join(
        f"<tr><td>{block.block}</td><td>{block.deep.degree:,}</td><td>{block.deep.log2_q}</td>"
        f"<td>{block.deep.security_bits}</td><td>{block.deep.layers}</td><td>{block.deep.activations}</td>"
        f"<td>{'the model' if block.deep.exact else 'the same polynomials'}</td></tr>"
        for block in report.blocks
        if block.deep is not None
    )
    words = "".join(f"<p>{escape(sentence)}</p>" for sentence in report.polynomials.sentences(report.traced_samples))
    return (
        f"<h2>Deep blocks</h2>{words}<table><tr><th>block</th><th>N</th><th>log2 q</th><th>bits of security</th>"
        f"<th>layers</th><th>activations</th><th>bound: distance from</th></tr>{rows}</table>"
    )


def _costs(report: Report, costs: Costs) -> str:
    found = [(block, block.costs) for block in report.blocks if block.costs is not None]
    labels = [block_label(block.block, block.operators) for block, _ in found]
    times = [Bar(label, (c.node_s, c.server_s, c.wire_s)) for label, (_, c) in zip(labels, found, strict=True)]
    loads = [Bar(label, (c.bytes_up, c.bytes_down)) for label, (_, c) in zip(labels, found, strict=True)]
    node = duration(costs.node_operators_s)
    return f"""<h2>Time per block</h2>
{legend(*_TIMES)}
<p class="note">Summed over all {report.samples:,} samples and all processes, which overlap; the node's own operators,
scaling and rounding took {node} beside these, everything together {duration(costs.seconds)}.</p>
<div class="wide">{stacked_bars(times, _TIMES, duration, "Time of every block: node, server, wire")}</div>
<h2>Bytes per block</h2>
{legend(*_BYTES)}
<div class="wide">{stacked_bars(loads, _BYTES, size, "Bytes of every block, up and down")}</div>
"""


def _partition(report: Report, plan: Plan) -> str:
    amounts = "values" if report.costs is None else "values, and bytes a sample on average"
    return (
        f'<h2>Partition</h2><p class="note">In order, {report.rounds} rounds; beside the lines {amounts}.</p>'
        f'<div class="wide">{draw_partition(plan, report)}</div>'
    )


def _table(report: Report) -> str:
    costs = ("node s", "server s", "wire s", "up", "down") if report.costs is not None else ()
    head = "".join(f"<th>{name}</th>" for name in (*costs, "error", "bound", "error / bound"))
    rows = "".join(_row(block) for block in report.blocks)
    return (
        '<h2>Figures</h2><div class="wide"><table><tr><th>block</th><th class="words">operators</th>'
        f"{head}</tr>{rows}</table></div>"
    )


def _row(block: BlockReport) -> str:
    cells = []
    if block.costs is not None:
        cells += [f"{amount:.3f}" for amount in (block.costs.node_s, block.costs.server_s, block.costs.wire_s)]
        cells += [size(block.costs.bytes_up), size(block.costs.bytes_down)]
    share = "" if block.error_to_bound is None else f"{block.error_to_bound:.1%}"
    cells += [f"{block.measured_error:.1e}", block.bound_text, share]
    words = escape(", ".join(block.operators))
    return f'<tr><td>{block.block}</td><td class="words">{words}</td>{"".join(f"<td>{c}</td>" for c in cells)}</tr>'


def _origin(report: Report) -> str:
    ring = report.parameters
    parts = [f"N = {ring['N']}, log2 q = {ring['log2_q']}, at least {ring['security_bits']} bits of security"]
    if report.polynomials is not None:
        parts[0] += " (deep blocks: see there)"
    if report.costs is not None:
        peaks = report.costs.peak_memory_bytes.items()
        memory = ", ".join(f"{name} {size(peak)}" for name, peak in peaks if peak is not None)
        parts.append(f"peak memory: {memory or 'unknown'}")
    parts.append(f"{report.machine}, {report.cores} cores")
    parts.append(", ".join(f"{name} {version}" for name, version in report.versions.items()))
    return "; ".join(parts) + "."
