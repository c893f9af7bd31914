"""Compare two trees of this repository bit for bit: many small runs in both, and their weights and results.

    python scripts/same_bits.py --against COMMIT [--tree PATH] [--only PATTERN] [--allow NAME=REASON] [--json FILE]

The configs are in same_bits.yaml. Of every run the weights (`weights_sha256`), results.csv without its seconds and the
losses of all evaluations must be the same. Only what users rely on is used: the command line, the config and the run
folder; no module of the package is imported by name, so that a refactoring may move them all.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from same_bits_inputs import write_inputs
from same_bits_runs import ENVIRONMENT, PATIENCE, Case, Outcome, read_cases

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path(__file__).resolve().with_name("same_bits_runs.py")
SIDES = ("here", "there")


def chosen(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose name or group matches a pattern, with those that they need."""
    wanted = {
        case.name
        for case in cases
        if not patterns or any(fnmatch.fnmatch(word, each) for each in patterns for word in (case.name, case.group))
    }
    wanted |= {case.needs for case in cases if case.name in wanted and case.needs}
    return [case for case in cases if case.name in wanted]


# Trees: copies that nobody changes while they run, each with kernels compiled from its sources.


def copy_working_tree(tree: Path, folder: Path) -> None:
    """The sources of a checkout as they are now, committed or not."""
    listed = git(tree, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", "src")
    for name in filter(None, listed.decode().split("\0")):
        if (tree / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(tree / name, folder / name)


def copy_commit(commit: str, folder: Path) -> str:
    """The sources of a commit; returns its short name."""
    folder.mkdir(parents=True)
    archive = git(ROOT, "archive", "--format=tar", commit, "src")
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return git(ROOT, "rev-parse", "--short", commit).decode().strip()


def git(tree: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", "-C", str(tree), *arguments], capture_output=True)
    if done.returncode:
        sys.exit(f"error: git {arguments[0]}: {done.stderr.decode().strip()}")
    return done.stdout


def compile_kernels(trees: Sequence[Path]) -> str:
    """Compile every tree's kernels, since a tree without them computes in another way; says what was done."""
    made = {}
    for tree in trees:
        scripts = sorted(tree.glob("src/**/compile_kernels.py"))
        sources = sorted(tree.glob("src/**/*.c"))
        if len(scripts) != 1 and sources:
            sys.exit(
                f"error: {tree}: has {sources[0].name}, and {len(scripts)} files compile_kernels.py that compile it"
            )
        for script in scripts:
            subprocess.run([sys.executable, str(script)], check=True, capture_output=True, timeout=PATIENCE)
        made[tree] = bool(list(tree.glob("src/**/_kernels.so")))
    if len(set(made.values())) > 1:
        missing = next(tree for tree, is_made in made.items() if not is_made)
        sys.exit(f"error: {missing.name}: its kernels cannot be compiled, the other tree's can")
    return "compiled kernels in both trees" if all(made.values()) else "NO compiled kernels in either tree"


# The comparison.


@dataclass
class Side:
    """A tree's process, and what it said so far."""

    name: str
    process: subprocess.Popen[str]
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    news: threading.Condition = field(default_factory=threading.Condition)
    is_over: bool = False

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            entry = json.loads(line)
            name = entry.pop("name")
            with self.news:
                self.outcomes[name] = Outcome(**entry)
                self.news.notify_all()
        with self.news:
            self.is_over = True
            self.news.notify_all()

    def outcome(self, name: str) -> Outcome:
        """The outcome of a case, once it is there."""
        with self.news:
            self.news.wait_for(lambda: name in self.outcomes or self.is_over)
        return self.outcomes.get(name) or Outcome(error="the tree's process ended; its log is above")


def start_side(name: str, folder: Path, source: Path) -> Side:
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(source), "FEDMTL_CACHE": str(folder / "cache")}
    command = [sys.executable, str(RUNS), str(folder), str(source)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    side = Side(name, process)
    threading.Thread(target=side.listen, daemon=True).start()
    return side


def differences(here: Outcome, there: Outcome, ignored: Sequence[str] = ()) -> list[str]:
    """What is not the same, in words; columns of results.csv that are `ignored` may be anything."""
    found = ["weights"] if here.weights != there.weights else []
    ours, theirs = without_columns(here.results, ignored), without_columns(there.results, ignored)
    if ours != theirs:
        found.append(first_difference(ours, theirs))
    if here.losses != there.losses:
        found.append("evaluation losses")
    return found


def without_columns(results: list[list[str]], ignored: Sequence[str]) -> list[list[str]]:
    shown = [number for number, column in enumerate(results[0]) if column not in ignored] if results else []
    return [[row[number] for number in shown] for row in results]


def first_difference(here: list[list[str]], there: list[list[str]]) -> str:
    if here[0] != there[0]:
        return f"columns of results.csv ({', '.join(sorted(set(here[0]) ^ set(there[0]))) or 'their order'})"
    for ours, theirs in zip(here[1:], there[1:], strict=False):
        for column, value, other in zip(here[0], ours, theirs, strict=True):
            if value != other:
                return f"results.csv ({column} of round {ours[0]}: {value} and {other})"
    return f"results.csv ({len(here) - 1} and {len(there) - 1} rounds)"


def verdict(case: Case, here: Outcome, there: Outcome, ignored: Sequence[str] = ()) -> tuple[str, str]:
    """A word for what became of a case, and the rest of its line."""
    if here.error and there.error:
        words = here.error if here.error == there.error else f"{here.error} | {there.error}"
        return "failed", f"here and there: {words}"
    if here.error or there.error:
        return "failed", f"here: {here.error}" if here.error else f"there: {there.error}"
    if here.skipped or there.skipped:
        return "skipped", here.skipped or there.skipped
    found = differences(here, there, ignored)
    if found:
        return "DIFFERENT", f"{here.weights[:8]} {there.weights[:8]}  {'; '.join(found)}"
    return "same", f"{here.weights[:8]}  {max(here.seconds, there.seconds):.1f} s"


def idle(cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Configs that come to the same as another one without saying so, or say so and do not."""
    first: dict[str, str] = {}
    for case in cases:
        outcome = outcomes.get(case.name, Outcome())
        if not outcome.weights:
            continue
        if case.same_as is None:
            known = first.setdefault(json.dumps([outcome.weights, outcome.losses]), case.name)
            if known != case.name:
                yield f"{case.name} comes to the same as {known}: it does not use what it is there for"
        elif case.same_as in outcomes and outcomes[case.same_as].weights != outcome.weights:
            yield f"{case.name} should come to the weights of {case.same_as}, and does not"


def compare(
    cases: Sequence[Case], sides: Sequence[Side], allowed: Mapping[str, str], ignored: Sequence[str] = ()
) -> dict[str, Any]:
    """Print a line for every case as both sides have it; returns all of them for --json."""
    width = max(len(case.name) for case in cases)
    report: dict[str, Any] = {}
    for case in cases:
        here, there = (side.outcome(case.name) for side in sides)
        word, rest = verdict(case, here, there, ignored)
        if case.name in allowed and word in ("DIFFERENT", "failed"):
            word, rest = "allowed", f"{rest}  ({allowed[case.name]})"
        print(f"{word:9}  {case.name:{width}}  {rest}", flush=True)
        report[case.name] = {"verdict": word, "detail": rest, "here": asdict(here), "there": asdict(there)}
    return report


def summarize(cases: Sequence[Case], report: Mapping[str, Any], sides: Sequence[Side], seconds: float) -> int:
    """Print what it came to; returns the exit status."""
    for side in sides:
        for line in idle(cases, side.outcomes):
            print(f"note ({side.name}): {line}")
    words = [entry["verdict"] for entry in report.values()]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    bad = [name for name, entry in report.items() if entry["verdict"] in ("DIFFERENT", "failed")]
    print(f"{len(words)} configs in {seconds:.0f} s: {counts}{': ' + ', '.join(bad) if bad else ''}")
    return 1 if bad else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to compare, as it is now; this one")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN", help="names or groups, such as 'smart*'"
    )
    parser.add_argument("--allow", action="append", default=[], metavar="NAME=REASON", help="a config that may differ")
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="COLUMN", help="of results.csv, such as bytes_up"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes there")
    parser.add_argument("--keep", action="store_true", help="leave both trees' run folders behind, and say where")
    parser.add_argument("--list", action="store_true", help="print the configs and run nothing")
    return parser.parse_args(arguments)


def read_allowed(entries: Sequence[str], cases: Sequence[Case]) -> dict[str, str]:
    allowed = dict(entry.partition("=")[::2] for entry in entries)
    for name, reason in allowed.items():
        if name not in {case.name for case in cases}:
            sys.exit(f"error: --allow: there is no config {name}; --list prints them")
        if not reason:
            sys.exit(f"error: --allow: say why {name} may differ: --allow {name}=REASON")
    return allowed


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    base, every = read_cases()
    cases = chosen(every, given.only)
    if not cases:
        sys.exit("error: --only: no config has such a name; --list prints them")
    if given.list:
        for case in cases:
            print(f"{case.group}/{case.name}: {' '.join(case.overrides()) or 'the base config'}")
        return 0
    if given.against is None:
        sys.exit("error: --against: missing; name the commit to compare with")
    allowed = read_allowed(given.allow, every)
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="same-bits-"))
    sides: list[Side] = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        trees = [folder / "trees" / name for name in SIDES]
        copy_working_tree(given.tree.resolve(), trees[0])
        commit = copy_commit(given.against, trees[1])
        kernels = compile_kernels(trees)
        print(f"here: {given.tree.resolve()} as it is; there: {commit}; {kernels}", flush=True)
        write_inputs(folder / "inputs")
        (folder / "base.yaml").write_text(yaml.safe_dump(base, sort_keys=False), encoding="utf-8")
        for name, tree in zip(SIDES, trees, strict=True):
            (folder / name).mkdir()
            (folder / name / "jobs.json").write_text(json.dumps([asdict(case) for case in cases]))
            sides.append(start_side(name, folder / name, tree / "src"))
        report = compare(cases, sides, allowed, given.ignore)
        status = summarize(cases, report, sides, time.monotonic() - started)
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    except KeyboardInterrupt:
        status = 130
        print("interrupted", file=sys.stderr)
    finally:
        for side in sides:
            side.process.terminate()
            side.process.wait()
        if given.keep:
            print(f"left in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
