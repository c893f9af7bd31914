"""Numbers as words. Scores and losses have three decimals everywhere."""

from __future__ import annotations

import math

MISSING = "–"


def number(value: object) -> float | None:
    """`value` when it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def known(value: object) -> str:
    """`value` as text, or a dash where it was not recorded."""
    return MISSING if value is None else str(value)


def score(value: float | None) -> str:
    """0.9123 -> .912"""
    if value is None:
        return MISSING
    digits = f"{abs(value):.3f}"
    sign = "−" if value < 0 and float(digits) else ""
    return sign + digits.removeprefix("0")


def change(value: float) -> str:
    """0.0213 -> +.021"""
    text = score(value)
    return text if text.startswith("−") or text == ".000" else f"+{text}"


def tick(value: float, step: float) -> str:
    """`value` with the decimals that `step` needs, and no zero in front."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    digits = f"{abs(value):,.{decimals}f}"
    if not digits.strip("0."):
        return "0"
    return ("−" if value < 0 else "") + (digits[1:] if digits.startswith("0.") else digits)


def count(value: object) -> str:
    """12345 -> 12,345"""
    known = number(value)
    return MISSING if known is None else f"{known:,.0f}"


def percent(share: float) -> str:
    """0.1234 -> 12.3%; what is there but rounds to nothing is <0.1%"""
    return "<0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def size(value: object) -> str:
    """Bytes with three digits: 4210000 -> 4.21 MB"""
    known = number(value)
    if known is None:
        return MISSING
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(known) < 999.5 or unit == "TB":
            break
        known /= 1000
    return f"{known:.3g} {unit}"


def duration(value: object) -> str:
    """Seconds in the unit one would say: 0.42 s, 83 s, 12 min 5 s, 3 h 12 min"""
    seconds = number(value)
    if seconds is None:
        return MISSING
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 7170:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def plural(many: int, noun: str) -> str:
    """1, client -> 1 client; 6, client -> 6 clients"""
    return f"{many:,} {noun}" if many == 1 else f"{many:,} {noun}s"
