"""Figures of a run as JSON, as a table for a terminal and as a table for docs/results/robustness.md."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmtl import __version__
from fuzz.loop import Finding
from fuzz.targets import MEBIBYTE
from fuzz.watch import Figures

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
HEAD = (
    "target", "inputs", "accepted", "refused", "unexpected", "hangs", "bombs", "inputs/s/core", "slowest ms", "grew MiB"
)  # fmt: skip


def as_record(figures: Mapping[str, Figures], command: str, seconds: float) -> dict[str, Any]:
    """Everything that was measured, in JSON's types."""
    return {
        "command": command,
        "version": __version__,
        "python": platform.python_version(),
        "seconds": round(seconds, 1),
        "inputs": sum(each.inputs for each in figures.values()),
        "targets": {name: _target_record(each) for name, each in figures.items()},
    }


def _target_record(figures: Figures) -> dict[str, Any]:
    return {
        "what": figures.target.what,
        "limit_seconds": figures.target.seconds,
        "limit_mib": figures.target.memory // MEBIBYTE,
        "inputs": figures.inputs,
        "accepted": figures.accepted,
        "refused": figures.refused,
        "unexpected": figures.count("exception") + figures.count("crash"),
        "hangs": figures.count("hang"),
        "bombs": figures.count("memory"),
        "cpu_seconds": round(figures.seconds, 1),
        "per_second": round(figures.inputs / figures.seconds) if figures.seconds else 0,
        "slowest_ms": round(1000 * figures.slowest, 1),
        "grew_mib": round(figures.growth / MEBIBYTE, 1),
        "classes": [
            {"kind": finding.kind, "where": finding.where, "count": finding.count, "message": finding.message}
            for finding in figures.findings
        ],
    }


def rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for every target and one for all of them."""
    names = ("inputs", "accepted", "refused", "unexpected", "hangs", "bombs")
    lines = [
        (
            name,
            *(f"{each[column]:,}" for column in names),
            f"{each['per_second']:,}",
            f"{each['slowest_ms']:,}",
            f"{each['grew_mib']:,}",
        )
        for name, each in record["targets"].items()
    ]
    every = record["targets"].values()
    totals = (f"{sum(each[column] for each in every):,}" for column in names)
    return [*lines, ("all", *totals, "", "", "")]


def terminal_table(record: Mapping[str, Any]) -> str:
    lines = [HEAD, *rows(record)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join(
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(cells))
        for cells in (list(zip(line, widths, strict=True)) for line in lines)
    )


def page_table(record: Mapping[str, Any]) -> str:
    """The part of the page between its two marks."""
    lines = [
        f"{record['inputs']:,} inputs in {record['seconds']:,} s with `{record['command']}`, version"
        f" {record['version']}, Python {record['python']}.",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|---|{'---:|' * (len(HEAD) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows(record)),
        "",
        "| target | what it reads | most seconds an input | most MiB an input |",
        "|---|---|---:|---:|",
        *(
            f"| {name} | {each['what']} | {each['limit_seconds']:g} | {each['limit_mib']} |"
            for name, each in record["targets"].items()
        ),
    ]
    return "\n".join(lines)


def write_page(page: Path, record: Mapping[str, Any]) -> None:
    """Put the table between the page's marks, and the figures beside it as JSON."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page}: has no {BEGIN} and {END} to write the figures between")
    page.write_text(f"{before}{BEGIN}\n{page_table(record)}\n{END}{after}", encoding="utf-8")
    page.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def save_findings(folder: Path, figures: Mapping[str, Figures]) -> list[tuple[Path, Finding]]:
    """Every class's shortest input as a file that `--repro` reads, its traceback beside it."""
    saved = []
    for each in figures.values():
        for finding in each.findings:
            folder.mkdir(parents=True, exist_ok=True)
            name = hashlib.sha256(f"{finding.kind} {finding.where}".encode()).hexdigest()[:8]
            path = folder / f"{finding.target}--{finding.kind}-{name}"
            path.write_bytes(finding.data)
            path.with_name(path.name + ".txt").write_text(_about(finding), encoding="utf-8", errors="replace")
            saved.append((path, finding))
    return saved


def _about(finding: Finding) -> str:
    return f"{finding.kind}, {finding.count} inputs: {finding.message}\n{finding.where}\n\n{finding.detail}\n"


def findings_page(saved: Sequence[tuple[Path, Finding]]) -> str:
    """The classes of findings by target, each with its shortest input, for whoever mends them."""
    lines: list[str] = []
    target = ""
    for path, finding in sorted(saved, key=lambda pair: (pair[1].target, -pair[1].count)):
        if finding.target != target:
            target = finding.target
            lines += ["", f"## {target}", ""]
        shown = repr(finding.data[:160]) + ("..." if len(finding.data) > 160 else "")
        lines += [
            f"* **{finding.kind}** x{finding.count}: `{finding.where}`",
            f"  {finding.message}",
            f"  input ({len(finding.data)} bytes, `{path.name}`): `{shown}`",
        ]
    return "\n".join(lines)
