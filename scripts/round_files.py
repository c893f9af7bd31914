"""Trace one training round of the local engine and print which files and functions of the package it executes.

    python scripts/round_files.py
    python scripts/round_files.py --at-most 40                  # fails when there are more files
    python scripts/round_files.py -- my.yaml --set compute.stack=3

It runs `fedmtl run` in this process (the demonstration with forty embedded examples a task, two rounds, no workers, on
the CPU); what comes after `--` goes to that command. A round is what happens between two `round` events in
events.jsonl, the last one and the one before: results and checkpoint of the one, then training, averaging and
evaluation of the other. The format of that file is documented (docs/run-folder.md), so this works whatever the modules
inside are called, and what happens once is over by then: imports, tokens, round 0. What draws the progress on the
terminal (`cli/`) is not the engine's and is counted apart.

A function is one with a name: comprehensions, which newer Pythons inline, and lambdas belong to the function around
them. Of the functions entered before the round, those that go on during it count and those that only wait do not.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import runpy
import sys
import tempfile
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PACKAGE = "fedmtl"
# Of the demonstration's tasks: a few examples take the way of many.
SMALL = [f"tasks.{task}={{train_samples: 40, val_samples: 24}}" for task in ("sentiment", "paraphrase", "similarity")]


class Function(NamedTuple):
    """A function of the package; `file` is relative to the folder of the packages."""

    file: str
    line: int
    name: str


class RoundTrace:
    """A profile function that collects what is executed while round number `number` goes on."""

    def __init__(self, source: Path, output: Path, number: int) -> None:
        self._source, self._output, self._number = f"{source}{os.sep}", output, number
        self._files: dict[str, str | None] = {}
        self._events: Path | None = None
        self._read = 0
        self._begun = self.done = False
        self.executed: set[Function] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.done or event not in ("call", "return"):
            return
        if self._begun:
            self._count(frame)
            if event == "call" and frame.f_back is not None:
                # It may have been entered before the round began: the loop itself has.
                self._count(frame.f_back)
        if event == "return" and self._file(frame) is not None:
            # A round's event is in the file when the function that wrote it returns.
            self._look()

    def _file(self, frame: FrameType) -> str | None:
        """The file of a frame's code, None outside of the packages."""
        path = frame.f_code.co_filename
        if path not in self._files:
            self._files[path] = path.removeprefix(self._source) if path.startswith(self._source) else None
        return self._files[path]

    def _count(self, frame: FrameType) -> None:
        code, file = frame.f_code, self._file(frame)
        if file is not None and not code.co_name.startswith("<"):
            self.executed.add(Function(file, code.co_firstlineno, code.co_qualname))

    def _look(self) -> None:
        for event in self._new_events():
            if event.get("event") != "round":
                continue
            if event["round"] == self._number - 1:
                self._begun = True
            elif event["round"] == self._number:
                self.done = True
                sys.setprofile(None)
                threading.setprofile(None)

    def _new_events(self) -> list[dict[str, Any]]:
        """What was added to events.jsonl since the last look, in whole lines."""
        if self._events is None:
            self._events = next(self._output.glob("*/events.jsonl"), None)
        if self._events is None or self._events.stat().st_size <= self._read:
            return []
        with self._events.open("rb") as file:
            file.seek(self._read)
            lines = file.read().rpartition(b"\n")[0]
        self._read += len(lines) + 1 if lines else 0
        return [json.loads(line) for line in lines.splitlines()]


def trace_round(source: Path, arguments: list[str], number: int) -> set[Function]:
    """What round `number` of `fedmtl run` with these arguments executes."""
    sys.path.insert(0, str(source))
    shown = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder).resolve()
        settings = [f"training.num_rounds={number}", "compute.workers=0", "compute.device=cpu", f"output={output}"]
        if not any(argument.endswith((".yaml", ".yml")) for argument in arguments):
            settings += SMALL
        sys.argv = [PACKAGE, "run", *(part for setting in settings for part in ("--set", setting)), *arguments]
        trace = RoundTrace(source, output, number)
        code: object = 0
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            threading.setprofile(trace)
            sys.setprofile(trace)
            try:
                runpy.run_module(PACKAGE, run_name="__main__", alter_sys=True)
            except SystemExit as ended:
                code = ended.code
            finally:
                sys.setprofile(None)
                threading.setprofile(None)
    if code or not trace.done:
        command = " ".join(sys.argv)
        raise RuntimeError(f"`{command}` ended with {code} before round {number} was over:\n{shown.getvalue()}")
    return trace.executed


def show(source: Path, functions: set[Function], what: str, names: bool) -> None:
    """Print a table of the files, and with `names` the functions of each."""
    by_file: dict[str, list[Function]] = defaultdict(list)
    for function in sorted(functions):
        by_file[function.file].append(function)
    lines = {file: len((source / file).read_text(encoding="utf-8").splitlines()) for file in by_file}
    print(f"{what}: {len(by_file)} files with {sum(lines.values()):,} lines, {len(functions)} functions")
    for file, found in by_file.items():
        print(f"  {file:<50} {len(found):>3} functions {lines[file]:>6} lines")
        if names:
            print(*(f"      {function.line:>4}  {function.name}" for function in found), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parents[1] / "src"
    parser.add_argument("--root", type=Path, default=here, help="the folder with the packages (src of the repository)")
    parser.add_argument("--round", type=int, default=2, help="the round to trace, the run's last (2)")
    parser.add_argument("--functions", action="store_true", help="list the functions of every file")
    parser.add_argument("--at-most", type=int, metavar="FILES", help="exit with 1 when a round executes more files")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENT", help="a config and options for `fedmtl run`")
    options = parser.parse_args()
    if options.round < 1:
        parser.error("--round: training begins with round 1")
    source = options.root.resolve()
    if not (source / PACKAGE).is_dir():
        parser.error(f"--root {source}: has no package {PACKAGE}")
    try:
        executed = trace_round(source, options.arguments, options.round)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2
    display = {function for function in executed if function.file.startswith(f"{PACKAGE}/cli/")}
    show(source, executed - display, f"round {options.round}", options.functions)
    show(source, display, "and to show it", options.functions)
    num_files = len({function.file for function in executed - display})
    if options.at_most is not None and num_files > options.at_most:
        print(f"{num_files} files are more than {options.at_most}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
