"""Figures with units, as people read them."""

from __future__ import annotations


def size(amount: float) -> str:
    """Return bytes with a decimal unit."""
    for unit in ("B", "KB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.2f} GB"


def duration(seconds: float) -> str:
    """Return a time with a unit that suits it."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def rate(per_second: float) -> str:
    """Return a rate with two digits at least."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"
