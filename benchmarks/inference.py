"""How fast `fedmtl predict` is beside `fedmtl evaluate`, and what one text costs from a cold start.

    python benchmarks/inference.py RUN LABELLED.tsv --task qqp [--onnx FILE.onnx] [--repeats 3]

RUN is a finished run and LABELLED.tsv a file with the task's columns, ten thousand pairs for figures like those of
docs/predict.md. Every command is a process of its own; one of each kind after the other, so that whatever else the
machine does meets all of them. Prints the median of the seconds, and of the seconds of CPU (user and system), which say
more where others use the machine. A rate leaves out what the same command takes for one row. What one text costs stands
beside what `import torch` alone costs, which is most of it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FEDMTL = ["-m", "fedmtl"]
TORCH = "import torch, alone"


def timed(*arguments: str) -> tuple[float, float]:
    """Run Python with these arguments; its seconds, and its seconds of CPU."""
    before, start = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    return time.perf_counter() - start, spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("file", type=Path)
    parser.add_argument("--task", required=True)
    parser.add_argument("--onnx")
    parser.add_argument("--text", default=["a fine film"], nargs="+", help="One text, or two where no task takes one.")
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    lines = given.file.read_text().splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / f"one{given.file.suffix}"
        one.write_text("".join(lines[:2]))
        answers = str(Path(folder) / "answers.csv")
        task = ["--task", given.task, "--file"]
        commands = {
            "predict, all": [*FEDMTL, "predict", given.run, *task, str(given.file), "--out", answers],
            "evaluate, all": [*FEDMTL, "evaluate", given.run, *task, str(given.file)],
            "predict, one row": [*FEDMTL, "predict", given.run, *task, str(one), "--out", answers],
            "evaluate, one row": [*FEDMTL, "evaluate", given.run, *task, str(one)],
            TORCH: ["-c", "import torch"],
            "one text, torch": [*FEDMTL, "predict", given.run, *given.text],
        }
        if given.onnx:
            commands["one text, ONNX"] = [*FEDMTL, "predict", given.onnx, *given.text]
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for _ in range(given.repeats):
            for name, arguments in commands.items():
                measured[name].append(timed(*arguments))
    medians = {name: [statistics.median(part) for part in zip(*rows, strict=True)] for name, rows in measured.items()}
    print(f"{'':20}{'seconds':>10}{'CPU s':>10}")
    for name, (wall, cpu) in medians.items():
        print(f"{name:20}{wall:10.2f}{cpu:10.2f}")
    for name in [name for name in medians if name.startswith("one text")]:
        wall, cpu = (of / torch for of, torch in zip(medians[name], medians[TORCH], strict=True))
        print(f"{name}: {wall:.2f} times `import torch` by seconds, {cpu:.2f} by CPU seconds")
    count = len(lines) - 1
    for position, unit in enumerate(("seconds", "CPU seconds")):
        rates = {
            name: count / (medians[f"{name}, all"][position] - medians[f"{name}, one row"][position])
            for name in ("predict", "evaluate")
        }
        words = ", ".join(f"{name} {rate:,.0f}/s" for name, rate in rates.items())
        print(f"{count:,} rows by {unit}: {words}; predict is {rates['predict'] / rates['evaluate']:.2f} of evaluate")


if __name__ == "__main__":
    main()
