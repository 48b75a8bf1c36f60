"""Drawings as text: the few elements of SVG that the report's page needs, all names in them escaped.

Colours, fonts and line widths come from the page's style sheet, by class, so that one drawing serves light, dark and
paper. Lengths are units of the drawing's own width, which the page stretches or shrinks to its column.
"""

from __future__ import annotations

from html import escape

#: Width of a letter, in units, on average and with room to spare: fonts differ from machine to machine.
LETTER = 6.9


def drawing(width: float, height: float, description: str, *parts: str) -> str:
    """Return an <svg> element of its own coordinates; `description` is what a screen reader says of it."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(description)}">\n'
        + "\n".join(parts)
        + "\n</svg>"
    )


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; `anchor` is "start", "middle" or "end"."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(content)}</text>'


def rectangle(x: float, y: float, width: float, height: float, kind: str, radius: float = 0) -> str:
    """Return a rectangle."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius:g}" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def circle(x: float, y: float, radius: float, kind: str) -> str:
    """Return a disc."""
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" class="{kind}"/>'


def path(steps: str, kind: str) -> str:
    """Return a path; `steps` are SVG's own commands."""
    return f'<path d="{steps}" class="{kind}"/>'


def group(title: str, *parts: str) -> str:
    """Return parts that show a title where the pointer rests on them."""
    return f"<g><title>{escape(title)}</title>{''.join(parts)}</g>"


def shortened(content: str, width: float) -> str:
    """Cut text so that it fits into a width."""
    letters = max(1, int(width / LETTER))
    return content if len(content) <= letters else content[: letters - 1] + "\N{HORIZONTAL ELLIPSIS}"
