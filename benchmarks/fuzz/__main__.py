"""Mutated inputs for every decoder and reader.

    make fuzz                                                  about two minutes over all targets
    make fuzz FUZZ="--seconds 600 --targets wire,sums"         these alone, for ten minutes
    make fuzz FUZZ="--total 2000000 --write docs/results/robustness.md"
    make fuzz REPRO=fuzz-found/sums--exception-1a2b3c4d        one input again, with its traceback

An input may be accepted or be refused with a `FedmtlError`. Anything else is a finding: another exception, more time or
more memory than the target's limit, a process that dies. Findings are saved, shortened, and end the command with 1.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fuzz import engines, results
from fuzz.loop import Piece, limit_memory, outcome, quiet
from fuzz.targets import Target, all_targets, choose, load_everything, scratch
from fuzz.watch import Figures, run_pieces

SECONDS = 120.0
# Of a given time, what Hypothesis and atheris take each.
OTHERS = 0.1
FOUND = Path("fuzz-found")
# A target's inputs in one process after another, so that no process grows old and all workers have something to do.
LONGEST_PIECE = 40_000


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.write_corpus:
        from fuzz.seeds import write_corpus

        write_corpus()
        return 0
    if options.list:
        for target in all_targets().values():
            print(f"{target.name:16} {target.seconds:4g} s {target.memory >> 20:5} MiB  {target.what}")
        return 0
    if options.repro is not None:
        return repro(options.repro, options.target)
    targets = choose([name for name in options.targets.split(",") if name])
    if options.engine in engines.ENGINES:
        return engines.ENGINES[options.engine](targets, options.seconds or SECONDS, options.seed, options.found)
    status = _run(options, targets, given)
    if options.engine is None and options.inputs is None and options.total is None:
        for name, engine in engines.ENGINES.items():
            if name != "atheris" or engines.has_atheris():
                status |= engine(targets, (options.seconds or SECONDS) * OTHERS, options.seed, options.found)
    return status


def _run(options: argparse.Namespace, targets: list[Target], given: list[str]) -> int:
    load_everything()
    started = time.monotonic()
    with scratch() as folder:
        pieces = plan(options, targets)
        figures = run_pieces(pieces, options.workers, folder, lambda line: print(line, file=sys.stderr, flush=True))
    command = f'make fuzz FUZZ="{shlex.join(given)}"' if given else "make fuzz"
    record = results.as_record(figures, command, time.monotonic() - started)
    return _tell(options, figures, record)


def _tell(options: argparse.Namespace, figures: dict[str, Figures], record: dict[str, object]) -> int:
    print(results.terminal_table(record))
    saved = results.save_findings(options.found, figures)
    for path, finding in saved:
        print(f"{path}: {finding.kind} x{finding.count}, {finding.where}: {finding.message[:150]}")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if options.findings is not None:
        options.findings.write_text(results.findings_page(saved) + "\n", encoding="utf-8", errors="replace")
    if options.write is not None:
        results.write_page(options.write, record)
    return 1 if saved else 0


def plan(options: argparse.Namespace, targets: Sequence[Target]) -> list[Piece]:
    """The pieces of work: a number of inputs for each target, or a time that all targets share."""
    pieces: list[Piece] = []
    shares = sum(target.share for target in targets)
    for target in targets:
        seconds, inputs = 1e9, 1 << 40
        if options.inputs is not None:
            inputs = options.inputs
        elif options.total is not None:
            inputs = round(options.total * target.share / shares)
        else:
            seconds = (options.seconds or SECONDS) * (1 - 2 * OTHERS) * options.workers / len(targets)
        if inputs == 1 << 40:
            pieces.append(Piece(target, 0, inputs, seconds, options.seed))
            continue
        for start in range(0, inputs, LONGEST_PIECE):
            pieces.append(Piece(target, start, min(inputs, start + LONGEST_PIECE), seconds, options.seed))
    return pieces


def repro(path: Path, name: str | None) -> int:
    """Try one input in this process, so that whatever it raises is seen whole."""
    target = all_targets()[name or path.name.partition("--")[0]]
    quiet()
    with scratch() as folder:
        run = target.open(folder)
        limit_memory()
        started = time.monotonic()
        error = outcome(run, path.read_bytes())
        taken = time.monotonic() - started
    print(f"{target.name}: {path.stat().st_size} bytes, {1000 * taken:.1f} ms", flush=True)
    if error is None:
        print("accepted")
        return 0
    if isinstance(error, target.expected):
        print(f"refused: {type(error).__name__}: {error!s:.1000}".encode("utf-8", "replace").decode())
        return 0
    raise error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", default="", help="names, or first words of names, with commas; all by default")
    parser.add_argument("--list", action="store_true", help="name the targets and their limits")
    parser.add_argument("--seconds", type=float, help=f"how long it takes over all targets; {SECONDS:g} by default")
    parser.add_argument("--inputs", type=int, help="so many inputs for each target, however long it takes")
    parser.add_argument("--total", type=int, help="so many inputs over all targets, cheap targets more of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    engine = "who makes the inputs; by default all there are, and for a number of inputs `mutate` alone"
    parser.add_argument("--engine", choices=("mutate", *engines.ENGINES), help=engine)
    parser.add_argument("--found", type=Path, default=FOUND, help="folder for inputs that failed")
    parser.add_argument("--json", type=Path, help="write the figures")
    parser.add_argument("--findings", type=Path, help="write the classes of findings as a page")
    parser.add_argument("--write", type=Path, help="put the figures into this page, and as JSON beside it")
    parser.add_argument("--repro", type=Path, help="try this file alone and show what it raises")
    parser.add_argument("--target", help="whose input the file is; by default its name says so")
    parser.add_argument("--write-corpus", action="store_true", help="make the seeds of the corpus anew")
    return parser


if __name__ == "__main__":
    sys.exit(main())
