"""Long reviews: the first 128 tokens against windows of 128 whose vectors are pooled, in one place.

    python benchmarks/windows.py --data FOLDER [--encoders tiny FOLDER] [--choose] [--seeds 0 1 2] [--setups ...]
                                 [--jobs 1] [--seconds N] [--device cpu] [--share 1.0] [--out FOLDER]

FOLDER has imdb/train.tsv.gz and imdb/test.tsv.gz, with a header and then a text and its label a line. By `--choose`
recipes are tried on a tenth of train that is cut off, with the first tokens and with the mean of windows; the best of
both, by the accuracy at the end, are what runs without `--choose` use, which train on all of train and are scored on
test at their end. Each is a `fedmtl run` in a process of its own, `--jobs` at a time. A run that has ended has a line
in results.jsonl and is not made again; after `--seconds` no run is begun, and those at work are stopped and begin anew
the next time. `--share` takes that share of all reviews: to see that all of it works. In `--out` are the table that is
printed, as table.md, and what it is made of. The columns of cost say how many times the tokens, seconds of training,
those of scoring and the CPU seconds of a whole run are what the first tokens take, over the same seeds. Seconds by the
clock are to be read only with `--jobs 1` on a machine without other work.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import DataEvent, EndEvent, EnergyEvent, EvaluationEvent, RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events

Settings = dict[str, Any]
ROOT = Path(__file__).parents[1]
CUT = 10
LENGTH = 128


def windows(pool: str, stride: int = LENGTH, most: int = 4) -> Settings:
    return {"model.max_length": LENGTH, "model.windows": {"stride": stride, "most": most, "pool": pool}}


FIRST, MEAN = "first 128", "mean of 4"
# What each setup reads of a review. The first 512 need an encoder with as many positions.
SETUPS: dict[str, Settings] = {
    FIRST: {"model.max_length": LENGTH},
    MEAN: windows("mean"),
    "max of 4": windows("max"),
    "attention over 4": windows("attention"),
    "mean of 8, overlapping": windows("mean", 64, 8),
    "mean of 8": windows("mean", most=8),
    "first 512": {"model.max_length": 512},
}
USUAL = (FIRST, MEAN, "max of 4", "attention over 4")


def recipe(rate: float, epochs: int) -> Settings:
    return {"training.learning_rate": rate, "training.local_epochs": epochs}


# What is tried by `--choose`, the likely ones first.
RECIPES: dict[str, dict[str, Settings]] = {
    "tiny": {"1e-3, 3 passes": recipe(1e-3, 3), "5e-4, 3 passes": recipe(5e-4, 3), "2e-3, 3 passes": recipe(2e-3, 3)},
    "minilm": {
        "1e-4, 2 passes": recipe(1e-4, 2),
        "2e-4, 2 passes": recipe(2e-4, 2),
        "5e-5, 2 passes": recipe(5e-5, 2),
        "1e-4, 3 passes": recipe(1e-4, 3),
    },
}
# In every run: one round, so that the schedule falls over its passes and test is looked at once.
FIXED: Settings = {
    "mode": "centralized",
    "training.num_rounds": 1,
    "training.batch_size": 32,
    "training.head_rate": 10.0,
    "training.schedule": "linear",
    "training.warmup_rounds": 0.1,
    "evaluation.baselines": "none",
    "evaluation.batch_size": 256,
    "compute.workers": 0,
}


@dataclass(frozen=True)
class Cell:
    """One run: an encoder, what it reads, a seed, a recipe, and whether it is one to choose by."""

    encoder: str
    setup: str
    seed: int
    recipe: str
    is_choice: bool

    @property
    def name(self) -> str:
        words = [Path(self.encoder).name, self.setup, f"{self.seed}", self.recipe, "choice" * self.is_choice]
        return "-".join("".join(letter if letter.isalnum() else "_" for letter in word) for word in words if word)


def family(encoder: str) -> str:
    return "minilm" if "minilm" in Path(encoder).name.lower() else "tiny"


def read(path: Path) -> list[tuple[str, str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        rows = [line.rstrip("\r\n").split("\t") for line in file]
    return [(text, label) for text, label in rows[1:]]


def place(text: str) -> float:
    """Between 0 and 1, the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") / 2**64


def write(path: Path, rows: Sequence[tuple[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text, "label": label}) + "\n" for text, label in rows)


def prepare(data: Path, out: Path, share: float) -> None:
    """Write what runs read: `final` scores on test, `choice` on a tenth of train that is cut off."""
    made = [out / f"data-{share:g}" / name / f"{part}.jsonl.gz"
            for name in ("final", "choice") for part in ("train", "dev")]  # fmt: skip
    if all(path.exists() for path in made):
        return
    train, test = (read(data / "imdb" / f"{split}.tsv.gz") for split in ("train", "test"))
    # Shares are of another hash than the cut, so that both go together.
    train, test = ([row for row in rows if place(f"share {row[0]}") < share] for rows in (train, test))
    cut = [row for row in train if place(row[0]) < 1 / CUT]
    rest = [row for row in train if place(row[0]) >= 1 / CUT]
    for path, rows in zip(made, (train, test, rest, cut), strict=True):
        write(path, rows)


def cells(given: argparse.Namespace, chosen: dict[tuple[str, str], str]) -> Iterator[Cell]:
    """What is to run, the first seed of everything first; by `--choose` the first recipe of everything first."""
    if given.choose:
        for number in range(max(map(len, RECIPES.values()))):
            for encoder in given.encoders:
                for name in list(RECIPES[family(encoder)])[number : number + 1]:
                    yield from (Cell(encoder, setup, 0, name, True) for setup in (FIRST, MEAN))
        return
    for seed in given.seeds:
        for encoder in given.encoders:
            for setup in given.setups:
                first = next(iter(RECIPES[family(encoder)]))
                yield Cell(encoder, setup, seed, chosen.get((encoder, chosen_by(setup)), first), False)


def chosen_by(setup: str) -> str:
    """The setup whose choice a setup uses."""
    return MEAN if "windows" in "".join(SETUPS[setup]) else FIRST


def config(cell: Cell, given: argparse.Namespace) -> Settings:
    folder = given.out / f"data-{given.share:g}" / ("choice" if cell.is_choice else "final")
    return {
        **FIXED,
        **SETUPS[cell.setup],
        **RECIPES[family(cell.encoder)][cell.recipe],
        "tasks.imdb": {
            "kind": "classification",
            "text": ["text"],
            "label": "label",
            "labels": ["0", "1"],
            "source": {"train": str(folder / "train.jsonl.gz"), "validation": str(folder / "dev.jsonl.gz")},
        },
        "output": str(given.out / "runs"),
        "data.cache": str(given.out / "cache"),
        "seed": cell.seed,
        "model.server_model": cell.encoder,
        "compute.device": given.device,
    }


def nested(settings: Settings) -> Settings:
    """Dotted keys as sections."""
    found: Settings = {}
    for key, value in settings.items():
        *path, leaf = key.split(".")
        at = found
        for part in path:
            at = at.setdefault(part, {})
        at[leaf] = value
    return found


def begin(cell: Cell, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = given.out / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # YAML reads JSON.
    file = folder.parent / f"{cell.name}.yaml"
    file.write_text(json.dumps(nested(config(cell, given)), indent=1))
    with (folder.parent / f"{cell.name}.log").open("wb") as log:
        command = [sys.executable, "-m", "fedmtl", "run", str(file), "--name", cell.name]
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def result(cell: Cell, given: argparse.Namespace, seconds: float) -> dict[str, Any] | None:
    """What a run scored at its end, and what it cost; `seconds` are those of its process."""
    events = read_events(RunFolder(given.out / "runs" / cell.name))
    end = first_of(events, EndEvent)
    if end is None or end.status != "done":
        return None
    scored = max(events_of(events, EvaluationEvent), key=lambda event: event.round)
    rounds = list(events_of(events, RoundEvent))
    return {
        **asdict(cell),
        "share": given.share,
        "device": given.device,
        "tokens": sum(event.tokens or 0 for event in events_of(events, DataEvent)),
        "cpu_seconds": sum(event.cpu_seconds for event in events_of(events, EnergyEvent)),
        "accuracy": scored.metrics["accuracy"],
        "train_seconds": sum(event.train_seconds or 0.0 for event in rounds),
        "evaluate_seconds": rounds[-1].evaluate_seconds,
        "seconds": seconds,
    }


def results(given: argparse.Namespace) -> list[dict[str, Any]]:
    path = given.out / "results.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if one["share"] == given.share]


def best_recipes(given: argparse.Namespace) -> dict[tuple[str, str], str]:
    """The recipe that did best on what was cut from train, by encoder and setup."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for one in results(given):
        if one["is_choice"]:
            key = one["encoder"], one["setup"]
            # Of two that are alike the likelier one, which was tried first.
            if one["accuracy"] > best.get(key, (-1.0, ""))[0]:
                best[key] = one["accuracy"], one["recipe"]
    return {key: name for key, (_, name) in best.items()}


def run(given: argparse.Namespace) -> None:
    done = {Cell(**{name: one[name] for name in Cell.__dataclass_fields__}) for one in results(given)}
    waiting = [cell for cell in cells(given, best_recipes(given)) if cell not in done]
    deadline = time.monotonic() + given.seconds if given.seconds else float("inf")
    working: dict[Cell, tuple[subprocess.Popen[bytes], float]] = {}
    while waiting or working:
        while waiting and len(working) < given.jobs and time.monotonic() < deadline:
            cell = waiting.pop(0)
            print(f"begins: {cell.name}", flush=True)
            working[cell] = begin(cell, given), time.monotonic()
        if not working:
            break
        if time.monotonic() >= deadline:
            for process, _ in working.values():
                process.terminate()
        for cell, (process, started) in list(working.items()):
            if process.poll() is not None:
                del working[cell]
                found = result(cell, given, time.monotonic() - started)
                print(f"{'ended' if found else 'not done'}: {cell.name} {found and found['accuracy']}", flush=True)
                if found:
                    with (given.out / "results.jsonl").open("a") as file:
                        file.write(json.dumps(found) + "\n")
        time.sleep(0.2)


def table(given: argparse.Namespace) -> str:
    """Accuracy and cost, the mean over seeds with their standard deviation, and the gain seed by seed."""
    lines = [
        "| scored on | encoder | reads | recipe | seeds | accuracy | gain to the first 128 | tokens of train | times |"
        " seconds of training | times | of scoring | times | CPU seconds | times |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    found: dict[tuple[str, str, str, str], dict[int, dict[str, Any]]] = {}
    for one in results(given):
        split = "cut" if one["is_choice"] else "test"
        found.setdefault((split, one["encoder"], one["setup"], one["recipe"]), {})[one["seed"]] = one
    first: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for (split, encoder, setup, _), runs in found.items():
        if setup == FIRST:
            first.setdefault((split, encoder), runs)
    order = list(SETUPS)
    for (split, encoder, setup, name), runs in sorted(found.items(), key=lambda item: order.index(item[0][2])):
        paired = first.get((split, encoder), {})
        gains = [100 * (one["accuracy"] - paired[seed]["accuracy"]) for seed, one in runs.items() if seed in paired]
        lines.append(
            f"| {split} | {Path(encoder).name} | {setup} | {name} | {len(runs)} |"
            f" {spread([100 * one['accuracy'] for one in runs.values()])} |"
            f" {'' if split == 'cut' or setup == FIRST or not gains else spread(gains)} |"
            f" {cost(runs, paired, 'tokens')} | {cost(runs, paired, 'train_seconds')} |"
            f" {cost(runs, paired, 'evaluate_seconds')} | {cost(runs, paired, 'cpu_seconds')} |"
        )
    return "\n".join(lines) + "\n"


def cost(runs: dict[int, dict[str, Any]], first: dict[int, dict[str, Any]], what: str) -> str:
    """Two cells: the mean over seeds, and how many times that of the first tokens over the seeds that both have."""
    mean = statistics.fmean(one[what] for one in runs.values())
    both = runs.keys() & first.keys()
    base = sum(first[seed][what] for seed in both)
    times = f"{sum(runs[seed][what] for seed in both) / base:.2f}" if base else ""
    return f"{mean:,.0f} | {times}" if what == "tokens" else f"{mean:.1f} | {times}"


def spread(values: Sequence[float]) -> str:
    more = f" ±{statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{more}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", default=["tiny"])
    parser.add_argument("--setups", nargs="+", default=list(USUAL), choices=list(SETUPS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "windows")
    given = parser.parse_args()
    given.data, given.out = given.data.resolve(), given.out.resolve()
    given.encoders = [str(Path(name).resolve()) if Path(name).is_dir() else name for name in given.encoders]
    prepare(given.data, given.out, given.share)
    run(given)
    shown = table(given)
    (given.out / "table.md").write_text(shown)
    print(shown, end="")


if __name__ == "__main__":
    main()
