"""Several labels a text, and entities of six types, in one place: goemotions and wnut17, each with a model of its own.

    python benchmarks/labels.py --data FOLDER [--encoders tiny FOLDER] [--tasks goemotions wnut17] [--choose]
                                [--seeds 0 1 2] [--jobs 1] [--seconds N] [--device cpu] [--share 1.0] [--out FOLDER]

FOLDER has goemotions/train.tsv.gz and dev.tsv.gz, wnut17/train.conll.gz and dev.conll.gz. By `--choose` recipes are
tried on a tenth of train that is cut off; the best of each encoder and task, by the task's metric after the last round,
is what runs without `--choose` use, which train on all of train and score on dev. Each is a `fedmtl run` in a process
of its own, `--jobs` at a time. A run that has ended has a line in results.jsonl and is not made again; after
`--seconds` no run is begun, and those at work are stopped and begin anew the next time.

Scores of goemotions are at the fixed threshold of training, .3. The thresholds that a run fits at its end are fitted on
what it is scored on: for a score with them, the model of the best choice, which has seen neither the cut nor dev, is
scored on dev with the thresholds of the cut (`with thresholds`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import EndEvent, EvaluationEvent, RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.tasks.sources import file_text
from tagging import CUT, ROOT, Settings, data_folder, family, write

# The file of each task, and the metric of its mark.
FILES = {"goemotions": ("tsv.gz", "macro_f1"), "wnut17": ("conll.gz", "f1")}


def recipe(rate: float, rounds: int, batch: int = 32, **others: Any) -> Settings:
    return {
        "training.learning_rate": rate,
        "training.num_rounds": rounds,
        "training.batch_size": batch,
        **{key.replace("__", "."): value for key, value in others.items()},
    }


# What is tried by `--choose`, the likely ones first: a round is a pass over train.
RECIPES: dict[str, dict[str, dict[str, Settings]]] = {
    "tiny": {
        "goemotions": {
            "1e-3 x6": recipe(1e-3, 6),
            "5e-4 x8": recipe(5e-4, 8),
            "2e-3 x6": recipe(2e-3, 6),
        },
        "wnut17": {"1.5e-3 x12": recipe(1.5e-3, 12, 16), "3e-3 x12": recipe(3e-3, 12, 16)},
    },
    "minilm": {
        "goemotions": {
            "1e-4 x5": recipe(1e-4, 5),
            "2e-4 x5": recipe(2e-4, 5),
            "3e-4 x5": recipe(3e-4, 5),
            "2e-4 x8": recipe(2e-4, 8),
            "1e-4 x8": recipe(1e-4, 8),
            "2e-4 x5 b64": recipe(2e-4, 5, 64),
        },
        "wnut17": {
            "2e-4 x10 b16": recipe(2e-4, 10, 16),
            "3e-4 x10 b16": recipe(3e-4, 10, 16),
            "1e-4 x10 b16": recipe(1e-4, 10, 16),
            "2e-4 x20 b16": recipe(2e-4, 20, 16),
            "3e-4 x20 b32": recipe(3e-4, 20, 32),
        },
    },
}
SETTINGS: Settings = {
    "mode": "centralized",
    "federation.clients_per_task": 1,
    "training.head_rate": 5,
    "training.schedule": "linear",
    "training.warmup_rounds": 0.25,
    "training.keep": "last",
    "compute.workers": 0,
    "evaluation.baselines": "none",
}


@dataclass(frozen=True)
class Cell:
    """One run: an encoder, a task, a seed, a recipe, and whether it is one to choose by."""

    encoder: str
    task: str
    seed: int
    recipe: str
    is_choice: bool

    @property
    def name(self) -> str:
        words = [Path(self.encoder).name, self.task, f"{self.seed}", self.recipe, "choice" * self.is_choice]
        return "-".join("".join(letter if letter.isalnum() else "_" for letter in word) for word in words if word)


def read(path: Path) -> tuple[str, list[str]]:
    """A file's header, where it has one, and its examples: lines, or sentences with a blank line behind each."""
    text = file_text(path)
    if ".conll" in path.name:
        return "", [f"{sentence.strip()}\n\n" for sentence in text.split("\n\n") if sentence.strip()]
    header, *lines = [line for line in text.splitlines(keepends=True) if line.strip()]
    return header, lines


def position(example: str) -> float:
    """Between 0 and 1, the same for the same words whatever their labels."""
    words = " ".join(line.split("\t")[0] for line in example.splitlines())
    return int.from_bytes(hashlib.sha256(words.lower().encode()).digest()[:8], "little") / 2**64


def prepare(data: Path, out: Path, tasks: Sequence[str], share: float) -> None:
    """Write the folders that runs read: `final` scores on dev, `choice` on a tenth of train that is cut off."""
    for task in tasks:
        ending, _ = FILES[task]
        (header, train), (_, dev) = (read(data / task / f"{split}.{ending}") for split in ("train", "dev"))
        positions = [(position(example), example) for example in train]
        used = [example for at, example in positions if at < share]
        rest = [example for at, example in positions if 1 / CUT <= at < max(share, 2 / CUT)]
        cut = [example for at, example in positions if at < 1 / CUT]
        for folder, parts in (("final", (used, dev)), ("choice", (rest, cut))):
            for split, examples in zip(("train", "dev"), parts, strict=True):
                path = data_folder(out, folder, share) / task / f"{split}.{ending}"
                if not path.exists():
                    write(path, [header, *examples])


def cells(given: argparse.Namespace, chosen: dict[tuple[str, str], str]) -> Iterator[Cell]:
    """What is to run, the first seed of everything first; by `--choose` the first recipe of everything first."""
    pairs = [(encoder, task) for task in given.tasks for encoder in given.encoders]
    if given.choose:
        tried = {(encoder, task): list(RECIPES[family(encoder)][task]) for encoder, task in pairs}
        for number in range(max(map(len, tried.values()))):
            for (encoder, task), names in tried.items():
                yield from (Cell(encoder, task, 0, name, True) for name in names[number : number + 1])
        return
    for seed in given.seeds:
        for encoder, task in pairs:
            name = chosen.get((encoder, task), next(iter(RECIPES[family(encoder)][task])))
            yield Cell(encoder, task, seed, name, False)


def begin(cell: Cell, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = given.out / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        **SETTINGS,
        "defaults": "plain",
        "tasks": {cell.task: {}},
        "output": folder.parent,
        "data.root": data_folder(given.out, "choice" if cell.is_choice else "final", given.share),
        "data.cache": given.out / "cache",
        "seed": cell.seed,
        "model.server_model": cell.encoder,
        **RECIPES[family(cell.encoder)][cell.task][cell.recipe],
        **({"training.num_rounds": given.rounds} if given.rounds else {}),
        "compute.device": given.device,
    }
    command = [sys.executable, "-m", "fedmtl", "run", "--name", cell.name]
    for key, value in settings.items():
        command += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    with (folder.parent / f"{cell.name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def result(cell: Cell, given: argparse.Namespace) -> dict[str, Any] | None:
    """What a run scored at its end."""
    events = read_events(RunFolder(given.out / "runs" / cell.name))
    end = first_of(events, EndEvent)
    if end is None or end.status != "done":
        return None
    scored = list(events_of(events, EvaluationEvent))
    last = max(scored, key=lambda event: event.round)
    seconds = sum(event.seconds or 0.0 for event in events_of(events, RoundEvent))
    return {**asdict(cell), "share": given.share, "rounds": last.round, "metrics": last.metrics, "seconds": seconds}


def results(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What has ended: choices by any share of the examples, the rest by this one."""
    path = given.out / "results.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if one["is_choice"] or one["share"] == given.share]


def main_score(one: dict[str, Any]) -> float:
    return one["metrics"].get(FILES[one["task"]][1]) or 0.0


def best_recipes(given: argparse.Namespace) -> dict[tuple[str, str], str]:
    """The recipe with the best score on what was cut from train, by encoder and task."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for one in results(given):
        if one["is_choice"]:
            key = one["encoder"], one["task"]
            best[key] = max(best.get(key, (-1.0, "")), (main_score(one), one["recipe"]))
    return {key: name for key, (_, name) in best.items()}


def run(given: argparse.Namespace) -> None:
    done = {Cell(**{name: one[name] for name in Cell.__dataclass_fields__}) for one in results(given)}
    waiting = [cell for cell in cells(given, best_recipes(given)) if cell not in done]
    deadline = time.monotonic() + given.seconds if given.seconds else float("inf")
    working: dict[Cell, subprocess.Popen[bytes]] = {}
    while waiting or working:
        while waiting and len(working) < given.jobs and time.monotonic() < deadline:
            cell = waiting.pop(0)
            print(f"begins: {cell.name}", flush=True)
            working[cell] = begin(cell, given)
        if not working:
            break
        if time.monotonic() >= deadline:
            for process in working.values():
                process.terminate()
        for cell, process in list(working.items()):
            if process.poll() is not None:
                del working[cell]
                found = result(cell, given)
                print(f"{'ended' if found else 'not done'}: {cell.name} {found and found['metrics']}", flush=True)
                if found:
                    with (given.out / "results.jsonl").open("a") as file:
                        file.write(json.dumps(found) + "\n")
        time.sleep(0.5)


def with_thresholds(given: argparse.Namespace) -> None:
    """The best choice's model on dev, at the fixed threshold and with those of the cut."""
    from fedmtl.predict.run import evaluate_file, load_run

    for (encoder, task), name in best_recipes(given).items():
        folder = given.out / "runs" / Cell(encoder, task, 0, name, True).name
        if task != "goemotions" or task not in given.tasks or encoder not in given.encoders or not folder.is_dir():
            continue
        loaded = load_run(folder)
        dev = data_folder(given.out, "final", given.share) / task / f"dev.{FILES[task][0]}"
        fitted = evaluate_file(loaded, task, dev)[task].metrics
        loaded.saved.tasks[task] = replace(loaded.saved.tasks[task], fitted=())
        fixed = evaluate_file(loaded, task, dev)[task].metrics
        for words, metrics in (("at .3", fixed), ("with thresholds", fitted)):
            shown = ", ".join(f"{metric} {value or 0.0:.4f}" for metric, value in metrics.items())
            print(f"{Path(encoder).name}, {name}, trained without the cut, dev {words}: {shown}")


def table(given: argparse.Namespace) -> None:
    """Scores on the cut and on dev, the mean over seeds with their standard deviation, by encoder, task and recipe."""
    print("| split | encoder | task | recipe | seeds | seconds | scores |\n|---|---|---|---|---|---|---|")
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for one in results(given):
        split = f"cut, {one['share']:g} of train" if one["is_choice"] else "dev"
        found.setdefault((split, one["task"], one["encoder"], one["recipe"]), []).append(one)
    for (split, task, encoder, name), runs in sorted(found.items()):
        shown = []
        for metric in runs[0]["metrics"]:
            scores = [one["metrics"].get(metric) or 0.0 for one in runs]
            spread = f" ±{statistics.stdev(scores):.4f}" if len(scores) > 1 else ""
            shown.append(f"{metric} {statistics.fmean(scores):.4f}{spread}")
        seconds = statistics.fmean(one["seconds"] for one in runs)
        cells = [split, Path(encoder).name, task, name, f"{len(runs)}", f"{seconds:.0f}", ", ".join(shown)]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", default=["tiny"])
    parser.add_argument("--tasks", nargs="+", default=list(FILES), choices=list(FILES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "labels")
    given = parser.parse_args()
    given.data, given.out = given.data.resolve(), given.out.resolve()
    given.encoders = [str(Path(name).resolve()) if Path(name).is_dir() else name for name in given.encoders]
    prepare(given.data, given.out, given.tasks, given.share)
    run(given)
    table(given)
    with_thresholds(given)


if __name__ == "__main__":
    main()
