"""One page about a finished private run, to be read by whoever has to sign for it.

It is a single HTML file without scripts and without references to anything outside it: it can be mailed, printed and
archived. Everything on it is public: the card, and the public columns of the file of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from html import escape
from pathlib import Path
from typing import Any

from heinfer.training.curves import Marks, draw_curves, read_curves

#: Factors e^epsilon beyond this say nothing.
_LARGEST_FACTOR = 1000


@dataclass(frozen=True, slots=True)
class _Item:
    """A line of the checklist.

    Attributes:
        name: as in the card's checks.
        title: on the page.
        absent: what is said where the card has no such check.
    """

    name: str
    title: str
    absent: str


_CHECKLIST = (
    _Item("clipping", "Clipping", "not verified by this run"),
    _Item("noise", "Noise", "not verified by this run"),
    _Item("accounting", "Accounting", "not verified by this run"),
    _Item("sampler", "Sampler", "not verified by this run"),
    _Item("batch statistics", "Records kept apart", "not verified by this run"),
    _Item(
        "duplicates",
        "Duplicates in the data",
        "not verified: how many there are is a private value, shown to the operator only. A record that is there k "
        "times is protected with k times this epsilon, and a larger delta",
    ),
    _Item(
        "seeds",
        "Worst accuracy over seeds",
        "not verified: this is one run; heinfer train --sweep-epsilon measures mean and worst of several",
    ),
)

_CSS = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111; background: #fff; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: 0.2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #999; }
.sub { color: #333; margin-top: 0; }
.guarantee { border: 1px solid #1f3a5f; border-left-width: 6px; padding: 0.7rem 1rem; font-size: 1.05rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.8rem 0.3rem 0; border-bottom: 1px solid #ddd; }
th { font-weight: 600; width: 15rem; }
td { overflow-wrap: anywhere; }
.mark { width: 2rem; font-size: 1.1rem; }
svg { width: 100%; height: auto; }
footer { color: #333; font-size: 0.9rem; margin-top: 2rem; }
@media print { body { margin: 0; max-width: none; } h2 { break-after: avoid; } tr, svg { break-inside: avoid; } }
"""


def write_page(path: Path, card: Mapping[str, Any], steps_file: Path) -> None:
    """Write the page.

    Args:
        path: the HTML file to write.
        card: as `heinfer.training.card.make_private_card` gives it.
        steps_file: of the run; its private columns are not read.
    """
    settings = card["recipe"].get("privacy") or {}
    marks = Marks(settings.get("target_epsilon"), card["recipe"].get("accuracy_floor"))
    curves = draw_curves(read_curves(steps_file), marks)
    path.write_text(_render(card, curves), encoding="utf-8")


def _render(card: Mapping[str, Any], curves: str) -> str:
    name = escape(str(card["name"]))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}: private training run</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{name}</h1>
<p class="sub">{escape(str(card["architecture"]))}, trained with differential privacy on {escape(str(card["dataset"]))}\
</p>
<p class="guarantee">{escape(_guarantee(card))}</p>
<h2>Card</h2>
<table>
{_table(_rows(card))}
</table>
<h2>Checklist</h2>
<table>
{_checklist(card["checks"])}
</table>
<h2>Course of the run</h2>
<p>Values that are known in advance to anybody who has the recipe, and the accuracy on public test records. Losses,
gradient norms and sample sizes are private values and are not on this page.</p>
{curves}
<footer>The model carries the same card in its metadata. Versions: {escape(_versions(card))}.</footer>
</body>
</html>
"""


def _guarantee(card: Mapping[str, Any]) -> str:
    """The guarantee in one sentence."""
    if card["epsilon"] is None:
        return (
            f"Not private: trained from the fixed seed {card['seed']}, for debugging or a study, so that anybody can "
            f"compute the noise; the same recipe without a seed costs epsilon {_above(card['epsilon_without_seed'])} "
            f"at delta {card['delta']:.3g}."
        )
    factor = math.exp(card["epsilon"]) if card["epsilon"] < math.log(_LARGEST_FACTOR) else math.inf
    number = f" = {math.ceil(100 * factor) / 100:g}" if factor < _LARGEST_FACTOR else ""
    return (
        f"Adding or removing any one of the {card['train_records']:,} training records changes the probability of any "
        f"outcome by a factor of at most e^{_above(card['epsilon'])}{number}, up to delta = {card['delta']:.3g}."
    )


def _rows(card: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    private = card["epsilon"] is not None
    if private:
        yield "epsilon", f"{_above(card['epsilon'])} by privacy loss distributions (PLD)"
        yield "epsilon, cross-check", f"{_above(card['epsilon_rdp'])} by Rényi accounting (RDP)"
    else:
        yield "epsilon", f"none: seeded; {_above(card['epsilon_without_seed'])} (PLD) without a seed"
    yield "delta", f"{card['delta']:.3g}"
    yield "adjacency", str(card["adjacency"])
    yield "accountant", str(card["accountant"])
    yield "sampler", f"{card['sampler']}, q = {card['sampling_probability']:.4g}"
    yield "noise multiplier", _noise(card["noise"])
    yield "clip norm (C)", f"{_clip_norm(card['clip_norm'])}, {card['clipping']}"
    yield "steps", f"{card['steps']:,}"
    yield "public data", ", ".join(card["public_data"]) or "none"
    yield "private data", f"{card['dataset']}, {card['train_records']:,} records; licence {card['data_license']}"
    digest = card["data_fingerprint"]
    yield "data fingerprint", f"{digest} (SHA-256)" if digest else "withheld: the hash of private records says too much"
    yield "accuracy", _accuracy(card)
    if card.get("auc") is not None:
        yield "AUC", f"{card['auc']:.4f}"
    yield "seeds", str(card["seeds"]) if private else f"fixed: {card['seed']}"


def _noise(noise: Mapping[str, Any]) -> str:
    multipliers, steps = noise["multipliers"], noise["steps"]
    if len(multipliers) == 1:
        return f"{multipliers[0]:.4f}, {noise['schedule']}"
    levels = [f"{value:.4f} for {count:,} steps" for value, count in zip(multipliers, steps, strict=True)]
    shown = levels if len(levels) <= 4 else [*levels[:2], "...", levels[-1]]
    return f"{'; '.join(shown)} ({noise['schedule']}, {len(levels)} levels)"


def _clip_norm(value: float | list[float]) -> str:
    return f"from {value[0]:.4g} to {value[-1]:.4g}" if isinstance(value, list) else f"{value:.4g}"


def _accuracy(card: Mapping[str, Any]) -> str:
    noise = f" ± {card['test_noise']:.2%} (deviation of the noise)" if card["test_noise"] else ""
    return f"{card['accuracy']:.2%}{noise} of {card['test_records']:,} test records, {card['test_data']}"


def _checklist(checks: Mapping[str, str]) -> str:
    """Every expected check, then those that the card has beside them."""
    expected = {item.name for item in _CHECKLIST}
    lines = [(item.title, checks.get(item.name), item.absent) for item in _CHECKLIST]
    lines += [(name.capitalize(), result, "") for name, result in checks.items() if name not in expected]
    rows = []
    for title, result, absent in lines:
        mark, word = ("✓", "verified") if result is not None else ("\N{EN DASH}", "not verified")
        rows.append(
            f'<tr><td class="mark" title="{word}">{mark}</td><th scope="row">{escape(title)}</th>'
            f"<td>{escape(absent if result is None else result)}</td></tr>"
        )
    return "\n".join(rows)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>' for name, value in rows)


def _versions(card: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in card["versions"].items())


def _above(epsilon: float) -> str:
    """An epsilon with four decimals, never less than it is."""
    if not math.isfinite(epsilon):
        return "infinity"
    return str(Decimal(epsilon).quantize(Decimal("0.0001"), ROUND_CEILING))
