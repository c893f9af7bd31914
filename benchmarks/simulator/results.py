"""What came out, as JSON, a table in Markdown and a picture."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from xml.sax.saxutils import escape

from simulator.comparison import Contest, spread
from simulator.systems import Measured

Found = Mapping[str, Any]


def machine() -> dict[str, Any]:
    import os

    import torch
    import transformers

    model = next(
        (line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write(folder: Path, contests: Sequence[Contest], extra: Found, skipped: Mapping[str, str], host: Found) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"machine": host, "contests": [c.to_json() for c in contests], "skipped": dict(skipped), **extra}
    (folder / "simulator.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "simulator.md").write_text(markdown(contests, extra, skipped, host))
    if contests:
        (folder / "simulator.svg").write_text(picture(contests))


def markdown(contests: Sequence[Contest], extra: Found, skipped: Mapping[str, str], host: Found) -> str:
    """Medians, with the lowest and highest of the repeats in brackets."""
    parts = [f"{host['processor']}, {host['cores']} cores, Python {host['python']}, torch {host['torch']}."]
    for clients in dict.fromkeys(contest.clients for contest in contests):
        group = [contest for contest in contests if contest.clients == clients]
        parts += [_table(clients, group), _against(group)]
    parts += [f"Skipped: {name} ({reason})." for name, reason in skipped.items()]
    for name, words in (("overhead", _overhead), ("evaluation", _evaluation), ("population", _population)):
        if name in extra:
            parts.append(words(extra[name]))
    return "\n\n".join(part for part in parts if part) + "\n"


def ratio_of(contests: Sequence[Contest], name: str, of: str = "round") -> float | None:
    """How many times as much another system needs as this project: the median over repeats run side by side."""
    by_name = {contest.system: contest for contest in contests}
    if name not in by_name or "fedmtl" not in by_name:
        return None
    pairs = zip(by_name[name].runs, by_name["fedmtl"].runs, strict=False)
    return median(getattr(other, of) / getattr(ours, of) for other, ours in pairs)


def _table(clients: int, contests: Sequence[Contest]) -> str:
    head = f"{clients} clients, {len(contests[0].runs)} repeats:"
    rows = [
        "| system | seconds a round | start-up, s | peak memory, MB | MB per client and round | others, cores |",
        "|---|---|---|---|---|---|",
    ]
    for contest in contests:
        words = contest.words + (f"; {contest.variant}" if len(contest.tried) > 1 else "")
        wire = contest.runs[0].megabytes
        cells = [
            words,
            _spread(contest.runs, "round", 2),
            _spread(contest.runs, "start_up", 1),
            _spread(contest.runs, "peak_mb", 0),
            "-" if wire is None else f"{wire:.1f}",
            f"{median(run.others for run in contest.runs):.2f}",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return head + "\n\n" + "\n".join(rows)


def _spread(runs: Sequence[Measured], name: str, digits: int) -> str:
    mid, low, high = spread([getattr(run, name) for run in runs])
    return f"{mid:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def _against(contests: Sequence[Contest]) -> str:
    lines = []
    for contest in contests:
        if contest.system != "fedmtl":
            values = [ratio_of(contests, contest.system, of) for of in ("round", "start_up", "peak_mb")]
            if None not in values:
                speed, start, memory = values
                lines.append(
                    f"* {contest.system}: {speed:.1f}x the seconds of this project,"
                    f" {start:.1f}x its start-up, {memory:.1f}x its memory"
                )
    return "\n".join(lines)


def _overhead(found: Found) -> str:
    return (
        f"Overhead: a round takes {found['ratio']:.2f}x its batches alone"
        f" ({median(found['federation']):.2f} s against {median(found['bare']):.2f} s)."
    )


def _evaluation(found: Found) -> str:
    ours, naive = median(found["seconds"]["fedmtl"]), median(found["seconds"][found["naive"]])
    return (
        f"Evaluation of {found['examples']:,} examples: {ours:.2f} s against {naive:.2f} s of the padded loop"
        f" ({found['naive']}), {found['ratio']:.1f}x."
    )


def _population(found: Found) -> str:
    small, large = found["medians"]["small"], found["medians"]["large"]
    return (
        f"Population of {found['clients']['large']:,} clients, 32 a round: {large['peak_mb']:,.0f} MB against"
        f" {small['peak_mb']:,.0f} MB with {found['clients']['small']} clients ({found['memory_ratio']:.2f}x), first"
        f" round begun {found['more_start_up']:+.1f} s later. Against a small population with small files:"
        f" {found['memory_ratio_small_files']:.2f}x, {found['more_start_up_small_files']:+.1f} s."
        f" With 128 clients a round: {found['memory_ratio_many_a_round']:.2f}x the memory."
    )


def picture(contests: Sequence[Contest]) -> str:
    """Seconds per round and peak memory as bars, one panel per population; plain SVG."""
    panels = [
        (clients, name, label, [c for c in contests if c.clients == clients])
        for clients in dict.fromkeys(contest.clients for contest in contests)
        for name, label in (("round", "seconds a round"), ("peak_mb", "peak memory, MB"))
    ]
    width, height, y, parts = 720, 0, 24, []
    for clients, name, label, group in panels:
        parts.append(f'<text x="16" y="{y}" font-weight="bold">{clients} clients: {label}</text>')
        values = {contest.system: spread([getattr(run, name) for run in contest.runs]) for contest in group}
        most = max(high for _, _, high in values.values())
        for system, (mid, low, high) in values.items():
            y += 24
            scale = 480 / most
            colour = "#2a78b5" if system == "fedmtl" else "#9aa5ad"
            parts.append(f'<text x="90" y="{y}" text-anchor="end">{escape(system)}</text>')
            parts.append(f'<rect x="98" y="{y - 13}" width="{mid * scale:.1f}" height="16" fill="{colour}"/>')
            line = f'x1="{98 + low * scale:.1f}" x2="{98 + high * scale:.1f}" y1="{y - 5}" y2="{y - 5}"'
            parts.append(f'<line {line} stroke="#222" stroke-width="2"/>')
            shown = f"{mid:,.2f}" if mid < 100 else f"{mid:,.0f}"
            parts.append(f'<text x="{106 + high * scale:.1f}" y="{y}">{shown}</text>')
        y += 40
        height = y
    box = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    body = "\n".join(parts)
    return (
        f'<svg {box} font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
