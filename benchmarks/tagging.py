"""Four biomedical corpora of one kind of entity each: federated, in one place, at each site alone, and task by task.

    python benchmarks/tagging.py --data FOLDER [--encoders tiny FOLDER] [--choose] [--seeds 0 1 2] [--jobs 1]
                                 [--seconds N] [--device cpu] [--share 1.0] [--out FOLDER]

FOLDER has bc5cdr_chem, bc5cdr_disease, ncbi_disease and bc2gm, each with train.jsonl.gz and dev.jsonl.gz. By `--choose`
recipes are tried on a tenth of train that is cut off, the same sentences of the two bc5cdr tasks; the best of each
encoder and setup, by the mean F1 of the last round, is what runs without `--choose` use, which score on dev. Each is a
`fedmtl run` of configs/biomedical.yaml in a process of its own, `--jobs` at a time. A run that has ended has a line in
results.jsonl and is not made again; after `--seconds` no run is begun, and those at work are stopped and begin anew the
next time. `--share` takes that share of the training sentences: for choosing, or to see that all of it works.
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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedmtl.runs.event_lines import events_of, first_of
from fedmtl.runs.events import EndEvent, EvaluationEvent, RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events

Settings = dict[str, Any]
ROOT = Path(__file__).parents[1]
TASKS = ("bc5cdr_chem", "bc5cdr_disease", "ncbi_disease", "bc2gm")
# What each setup is to `fedmtl run`.
MODES = {
    "federated": "federated",
    "one place": "centralized",
    "alone": "local",
    "single task, one place": "centralized_single_task",
}


# Rounds of a pass, each scored: the config has what was chosen here.
PLAIN: Settings = {
    "training.local_steps": None,
    "training.keep_optimizer": None,
    "training.warmup_rounds": 0.25,
    "evaluation.every": 1,
    "tasks.bc2gm.batch_size": None,
}


def recipe(rate: float, rounds: int, batch: int = 32, layers: Iterable[int] = (), **others: Any) -> Settings:
    """Settings of a run: `layers` of the encoder are each task's own."""
    own = [{f"encoder.layer.{layer}.*": "task"} for layer in layers]
    return {
        **PLAIN,
        "training.learning_rate": rate,
        "training.num_rounds": rounds,
        "training.batch_size": batch,
        "sharing.rules": [{"heads.*": "task"}, *own, {"*": "all"}],
        **{key.replace("__", "."): value for key, value in others.items()},
    }


EVERY = {"evaluation__every": 8}
# Rounds of a few steps, over which a client's optimizer goes on: clients part less between two averages.
SHORT = {"training__local_steps": 32, "training__keep_optimizer": True, "training__warmup_rounds": 2, **EVERY}
# bc2gm has more than twice the sentences of the others: batches so much larger make the passes over all tasks alike.
LARGER = {"tasks__bc2gm__batch_size": 40}
MOMENTUM = {
    "federation__server_optimizer__kind": "fedavgm",
    "federation__server_optimizer__learning_rate": 0.4,
    "federation__server_optimizer__momentum": 0.8,
}
# What is tried by `--choose`, the likely ones first. A site has a third of a task's sentences, and averaging divides
# what a site has learnt: a federation gets smaller batches, more rounds or higher rates.
RECIPES: dict[str, dict[str, dict[str, Settings]]] = {
    "tiny": {
        "federated": {
            "last 3e-3 b16 short, bc2gm b40": recipe(3e-3, 64, 16, (1,), **SHORT, **LARGER),
            "last 3e-3 b16 short 96, bc2gm b40": recipe(3e-3, 96, 16, (1,), **SHORT, **LARGER),
            "all 3e-3": recipe(3e-3, 10),
            "last 3e-3 b16": recipe(3e-3, 20, 16, (1,)),
            "last 3e-3 b16 short": recipe(3e-3, 64, 16, (1,), **SHORT),
            "all 3e-3 b16 short": recipe(3e-3, 64, 16, **SHORT),
            "last 1.5e-3 b16 short": recipe(1.5e-3, 64, 16, (1,), **SHORT),
            "last 3e-3 b16 kept": recipe(3e-3, 20, 16, (1,), training__keep_optimizer=True),
            "last 3e-3 b16 short fresh": recipe(3e-3, 64, 16, (1,), training__local_steps=32, **EVERY),
            "all 2e-3 b16 short momentum": recipe(2e-3, 64, 16, **SHORT, **MOMENTUM),
        },
        "one place": {
            "1.5e-3": recipe(1.5e-3, 10),
            "3e-3": recipe(3e-3, 10),
            "7e-4": recipe(7e-4, 10),
        },
        "alone": {"1.5e-3 b16": recipe(1.5e-3, 20, 16), "7e-4 b16": recipe(7e-4, 20, 16)},
    },
    "minilm": {
        "federated": {
            "last 6e-4 b16 short, bc2gm b40": recipe(6e-4, 48, 16, (3, 4, 5), **SHORT, **LARGER),
            "last 6e-4 b16 short 64, bc2gm b40": recipe(6e-4, 64, 16, (3, 4, 5), **SHORT, **LARGER),
            "last 3e-4 b16 short": recipe(3e-4, 48, 16, (3, 4, 5), **SHORT),
            "last 6e-4 b16 short": recipe(6e-4, 48, 16, (3, 4, 5), **SHORT),
            "all 6e-4 b16 short": recipe(6e-4, 48, 16, **SHORT),
            "layers 3e-4 b16 short": recipe(3e-4, 48, 16, range(6), **SHORT),
            "last 3e-4 b16 short fresh": recipe(3e-4, 48, 16, (3, 4, 5), training__local_steps=32, **EVERY),
            "last 3e-4 b16 short momentum": recipe(3e-4, 48, 16, (3, 4, 5), **SHORT, **MOMENTUM),
            "last 3e-4 b8": recipe(3e-4, 12, 8, (3, 4, 5)),
        },
        "one place": {"2e-4": recipe(2e-4, 6), "1e-4": recipe(1e-4, 6), "3e-4": recipe(3e-4, 6)},
        "alone": {"2e-4 b16": recipe(2e-4, 12, 16), "1e-4 b16": recipe(1e-4, 12, 16)},
    },
}
CUT = 10


@dataclass(frozen=True)
class Cell:
    """One run: an encoder, a setup, a seed, a rate, and whether it is one to choose by."""

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


def read(path: Path) -> list[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line for line in file if line.strip()]


def write(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(lines)


def place(line: str) -> float:
    """Between 0 and 1, the same for the same sentence whatever its tags."""
    words = " ".join(json.loads(line)["tokens"]).lower()
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") / 2**64


def data_folder(out: Path, folder: str, share: float) -> Path:
    """Files are written once, so that each share has its own."""
    return out / "data" / (folder if share == 1 else f"{folder}-{share:g}")


def prepare(data: Path, out: Path, share: float) -> None:
    """Write the folders that runs read: `final` scores on dev, `choice` on a tenth of train that is cut off."""
    for task in TASKS:
        train, dev = (read(data / task / f"{split}.jsonl.gz") for split in ("train", "dev"))
        places = [place(line) for line in train]
        used = [line for line, at in zip(train, places, strict=True) if at < share]
        rest = [line for line, at in zip(train, places, strict=True) if 1 / CUT <= at < max(share, 2 / CUT)]
        cut = [line for line, at in zip(train, places, strict=True) if at < 1 / CUT]
        for folder, parts in (("final", (used, dev)), ("choice", (rest, cut))):
            for split, lines in zip(("train", "dev"), parts, strict=True):
                path = data_folder(out, folder, share) / task / f"{split}.jsonl.gz"
                if not path.exists():
                    write(path, lines)


def recipes(encoder: str, setup: str) -> dict[str, Settings]:
    """Those of a setup; a single task in one place has those of all tasks there."""
    by_setup = RECIPES[family(encoder)]
    return by_setup.get(setup, by_setup["one place"])


def cells(given: argparse.Namespace, chosen: dict[tuple[str, str], str]) -> Iterator[Cell]:
    """What is to run, the first seed of everything first; by `--choose` the first recipe of everything first."""
    pairs = [(encoder, setup) for setup in given.setups for encoder in given.encoders]
    if given.choose:
        tried = {(encoder, setup): list(recipes(encoder, setup)) for encoder, setup in pairs}
        for number in range(max(map(len, tried.values()))):
            for (encoder, setup), names in tried.items():
                yield from (Cell(encoder, setup, 0, name, True) for name in names[number : number + 1])
        return
    for seed in given.seeds:
        for encoder, setup in pairs:
            yield Cell(encoder, setup, seed, chosen.get((encoder, setup), next(iter(recipes(encoder, setup)))), False)


def begin(cell: Cell, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    folder = given.out / "runs" / cell.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "output": folder.parent,
        "data.root": data_folder(given.out, "choice" if cell.is_choice else "final", given.share),
        "data.cache": given.out / "cache",
        "mode": MODES[cell.setup],
        "seed": cell.seed,
        "model.server_model": cell.encoder,
        **recipes(cell.encoder, cell.setup)[cell.recipe],
        **({"training.num_rounds": given.rounds} if given.rounds else {}),
        "compute.device": given.device,
        "compute.workers": 0,
        "evaluation.baselines": "none",
    }
    command = [sys.executable, "-m", "fedmtl", "run", str(ROOT / "configs" / "biomedical.yaml"), "--name", cell.name]
    for key, value in settings.items():
        command += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    log = (folder.parent / f"{cell.name}.log").open("wb")
    with log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def result(cell: Cell, given: argparse.Namespace) -> dict[str, Any] | None:
    """What a run scored at its end, by task; at sites alone the mean over them, and each by itself."""
    events = read_events(RunFolder(given.out / "runs" / cell.name))
    end = first_of(events, EndEvent)
    if end is None or end.status != "done":
        return None
    scored = list(events_of(events, EvaluationEvent))
    last = max(event.round for event in scored)
    at_end = {event.task: event for event in scored if event.round == last}
    seconds = sum(event.seconds or 0.0 for event in events_of(events, RoundEvent))
    return {
        **asdict(cell),
        "share": given.share,
        "rounds": last,
        "f1": {task: event.metrics["f1"] for task, event in at_end.items()},
        "strict_f1": {task: event.metrics["strict_f1"] for task, event in at_end.items()},
        "sites": {task: event.clients for task, event in at_end.items() if event.clients},
        "seconds": seconds,
    }


def results(given: argparse.Namespace) -> list[dict[str, Any]]:
    """What has ended: choices by any share of the sentences, the rest by this one."""
    path = given.out / "results.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [one for one in found if one["is_choice"] or one["share"] == given.share]


def best_recipes(given: argparse.Namespace) -> dict[tuple[str, str], str]:
    """The recipe with the best mean F1 on what was cut from train, by encoder and setup."""
    best: dict[tuple[str, str], tuple[float, str]] = {}
    for one in results(given):
        if one["is_choice"]:
            key = one["encoder"], one["setup"]
            best[key] = max(best.get(key, (-1.0, "")), (mean_f1(one), one["recipe"]))
    single = {
        (encoder, "single task, one place"): one for (encoder, setup), one in best.items() if setup == "one place"
    }
    return {key: name for key, (_, name) in (single | best).items()}


def mean_f1(one: dict[str, Any]) -> float:
    return statistics.fmean(value or 0.0 for value in one["f1"].values())


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
                print(f"{'ended' if found else 'not done'}: {cell.name} {found and found['f1']}", flush=True)
                if found:
                    with (given.out / "results.jsonl").open("a") as file:
                        file.write(json.dumps(found) + "\n")
        time.sleep(0.5)


def table(given: argparse.Namespace) -> None:
    """F1 on the cut and on dev, the mean over seeds with their standard deviation, by encoder, setup and recipe."""
    print(
        f"| split | encoder | setup | recipe | seeds | {' | '.join(TASKS)} | mean |\n|---|---|---|---|---|{'---|' * 5}"
    )
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for one in results(given):
        split = f"cut, {one['share']:g} of train" if one["is_choice"] else "dev"
        found.setdefault((split, one["encoder"], one["setup"], one["recipe"]), []).append(one)
    for (split, encoder, setup, name), runs in sorted(found.items()):
        shown = []
        for task in TASKS:
            scores = [one["f1"].get(task) or 0.0 for one in runs]
            spread = f" ±{statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
            shown.append(f"{statistics.fmean(scores):.3f}{spread}")
        shown.append(f"{statistics.fmean(map(mean_f1, runs)):.4f}")
        print(f"| {split} | {Path(encoder).name} | {setup} | {name} | {len(runs)} | {' | '.join(shown)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", default=["tiny"])
    parser.add_argument("--setups", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--rounds", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "tagging")
    given = parser.parse_args()
    given.data, given.out = given.data.resolve(), given.out.resolve()
    given.encoders = [str(Path(name).resolve()) if Path(name).is_dir() else name for name in given.encoders]
    prepare(given.data, given.out, given.share)
    run(given)
    table(given)


if __name__ == "__main__":
    main()
