"""What noise on gradients costs in accuracy: sst2, qqp and stsb, three sites a task, by the part of the model trained.

    python benchmarks/private_accuracy.py --data DATA --models MODELS --out FOLDER --grid --jobs 4 --seconds 180
    python benchmarks/private_accuracy.py --data DATA --models MODELS --out FOLDER --final --jobs 6 --seconds 350

Every task has an encoder and a head of its own, each averaged over its three sites. Delta is 1e-5;
noise is found for each epsilon of all rounds together. `--grid` scores candidates at epsilon 8 on a part cut from train
(sst2 without phrases of the sentences that score). `--final` reads dev once, after the last round, for every encoder,
part, epsilon and seed; its settings with noise are each part's best on the cut, where OUT has such runs, otherwise
`CHOSEN`. Each run is a process; its result is a line of OUT/results.jsonl as soon as it ends, and is not repeated.
What matters most runs first; after `--seconds` no run begins, and at `--stop` those that run are ended. All of sst2 and
stsb is used, and a half of qqp.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import re
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from fedmtl.methods.accounting import Releases, most_spent
from fedmtl.methods.noise import KeyedNoise
from fedmtl.runs.event_lines import last_of
from fedmtl.runs.events import ExamplePrivacyEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from first_hour import _cut, _table, _write, read

Settings = dict[str, Any]
# Most training examples of a task, and how many are cut from train to choose settings on.
SIZES = {"sst2": (67_349, 1000), "qqp": (24_000, 2000), "stsb": (5_749, 1000)}
METRICS = {"sst2": "accuracy", "qqp": "accuracy", "stsb": "pearson"}
# Examples of a lot at one site: about a tenth of what it has.
LOTS = {"sst2": 2048, "qqp": 1024, "stsb": 256}
# Which values are trained beside the heads, as rules in front of the last.
PARTS: dict[str, list[dict[str, str]]] = {
    "whole": [{"*": "task"}],
    "all but the token table": [{"embeddings.word_embeddings.*": "fixed"}, {"*": "task"}],
    "upper half": [{f"encoder.layer.{layer}.*": "task"} for layer in (3, 4, 5)] + [{"*": "fixed"}],
    "biases and norms": [{"*LayerNorm*": "task"}, {"*.bias": "task"}, {"*": "fixed"}],
    "head": [{"*": "fixed"}],
    "LoRA": [{"*": "task"}],
}
# Without noise, parts that are small travel after every pass, and their optimizer's state stays; others every third
# pass, without. With noise all do as small ones: a fresh Adam's first steps are as large as its rate.
SMALL = ("biases and norms", "head", "LoRA")
DELTA, NORM, PASSES = 1e-5, 0.1, 15
EPSILONS = (8.0, 3.0, 1.0, None)


@dataclass(frozen=True)
class Recipe:
    """What is chosen of a part: Adam's rate, how many times faster heads learn, passes, lots in multiples of LOTS."""

    rate: float
    head: float
    passes: int = PASSES
    lot: float = 1.0

    @property
    def name(self) -> str:
        return f"{self.rate:g} x{self.head:g} p{self.passes}" + (f" l{self.lot:g}" if self.lot != 1 else "")

    @classmethod
    def named(cls, name: str) -> Recipe:
        """The recipe of a row of results."""
        rate, head, passes, *lot = name.split(" ")
        return cls(float(rate), float(head[1:]), int(passes[1:]), float(lot[0][1:]) if lot else 1.0)


# Candidates of a part on the cut, for the larger encoder; the smaller one's rates are `TINY` times as large.
GRID = {
    "all but the token table": [
        Recipe(5e-4, 5, 30, 2), Recipe(3e-4, 10), Recipe(1e-3, 5, 30, 2), Recipe(2e-4, 5, 30, 2),
        Recipe(1e-3, 5, 40, 4), Recipe(5e-4, 5, 40, 4),
    ],
    "biases and norms": [
        Recipe(3e-3, 3, 30, 2), Recipe(3e-3, 3), Recipe(6e-3, 2, 30, 2), Recipe(1e-2, 2, 40, 4), Recipe(6e-3, 2, 40, 4),
        Recipe(1e-2, 2, 30, 2),
    ],
    "upper half": [Recipe(5e-4, 5, 30, 2), Recipe(1e-3, 5, 30, 2)],
    "whole": [Recipe(5e-4, 5, 30, 2)],
    "head": [Recipe(1e-2, 1), Recipe(1e-2, 1, 30, 2)],
    "LoRA": [Recipe(2e-3, 5, 30, 2), Recipe(4e-3, 5, 30, 2)],
}  # fmt: skip
CHOSEN = {
    "all but the token table": Recipe(5e-4, 5, 30, 2),
    "biases and norms": Recipe(3e-3, 3, 30, 2),
    "upper half": Recipe(5e-4, 5, 30, 2),
    "whole": Recipe(5e-4, 5, 30, 2),
    "head": Recipe(1e-2, 1),
    "LoRA": Recipe(1e-3, 5),
}
# Without noise small batches and a low rate are better, and fewer passes suffice.
PLAIN = {
    "biases and norms": Recipe(1e-3, 5, 5),
    "all but the token table": Recipe(1e-4, 10, 5),
    "whole": Recipe(1e-4, 10, 5),
    "upper half": Recipe(1e-4, 10, 5),
    "head": Recipe(3e-3, 1, 5),
    "LoRA": Recipe(1e-3, 5, 5),
}
TINY = 2.0


@dataclass(frozen=True)
class Trial:
    split: str
    encoder: str
    part: str
    epsilon: float | None
    seed: int
    recipe: Recipe
    tasks: tuple[str, ...]

    @property
    def key(self) -> str:
        epsilon = "none" if self.epsilon is None else f"{self.epsilon:g}"
        words = [self.split, self.encoder, self.part, epsilon, str(self.seed), self.recipe.name, "+".join(self.tasks)]
        return "/".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with <task>/train.tsv.gz and dev.tsv.gz")
    parser.add_argument("--models", type=Path, help="folder with minilm-l6; without it only tiny")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; a second call goes on with it")
    parser.add_argument("--grid", action="store_true", help="run the candidates on the cut")
    parser.add_argument("--final", action="store_true", help="run the chosen settings on dev")
    parser.add_argument("--encoders", default="minilm-l6,tiny")
    parser.add_argument("--parts", default="", help="only these, separated by commas")
    parser.add_argument("--tasks", default="", help="only these (default: sst2 for the grid, all three otherwise)")
    parser.add_argument("--epsilons", default="", help="only these of 8,3,1,none")
    parser.add_argument("--seeds", default="0,1,2", help="of the final runs (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=36000.0, help="begin no run after this")
    parser.add_argument("--stop", type=float, default=math.inf, help="end the runs that are there after this")
    parser.add_argument(
        "--at-once", type=int, default=512, help="examples of a client in a pass (default: %(default)s)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--passes", type=int, help="other passes than the settings say, to try the script")
    parser.add_argument("--examples", type=int, help="at most so many examples of a task, to try the script")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    # What noise needs, before hours are spent on runs without it.
    KeyedNoise(bytes(32))
    most_spent([Releases(1.0, 1.0, 1)], DELTA)
    if options.grid or options.final:
        run_all(options, list(planned(options)))
    show(options.out / "results.jsonl")


def planned(options: argparse.Namespace) -> Iterator[Trial]:
    """Every run, what matters most first: the larger encoder, epsilon 8, the first part, the first seed."""
    encoders = [name for name in options.encoders.split(",") if options.models or name == "tiny"]
    parts = options.parts.split(",") if options.parts else list(GRID if options.grid else CHOSEN)
    tasks = tuple(options.tasks.split(",")) if options.tasks else (("sst2",) if options.grid else tuple(SIZES))
    named = {"none": None, "8": 8.0, "3": 3.0, "1": 1.0}
    epsilons = [named[word] for word in options.epsilons.split(",")] if options.epsilons else list(EPSILONS)

    def of(encoder: str, recipe: Recipe) -> Recipe:
        rate = recipe.rate * (TINY if encoder == "tiny" else 1.0)
        return replace(recipe, rate=rate, passes=options.passes or recipe.passes)

    if options.grid:
        for encoder in encoders:
            for number in range(max(map(len, GRID.values()))):
                for part in parts:
                    # Tiny's half is one layer of two.
                    at_number = GRID.get(part, []) if is_tried(encoder, part) else []
                    for recipe in at_number[number : number + 1]:
                        yield Trial("cut", encoder, part, 8.0, 0, of(encoder, recipe), tasks)
        return
    seeds = [int(seed) for seed in options.seeds.split(",")]
    best = {encoder: best_on_cut(options.out / "results.jsonl", encoder) for encoder in encoders}

    def recipe_of(encoder: str, part: str, epsilon: float | None) -> Recipe:
        if epsilon is None:
            return of(encoder, PLAIN[part])
        return best[encoder].get(part) or of(encoder, CHOSEN[part])

    trials = [
        Trial("dev", encoder, part, epsilon, seed, recipe_of(encoder, part, epsilon), tasks)
        for encoder in encoders
        for part in parts
        for epsilon in epsilons
        for seed in seeds
        if is_tried(encoder, part)
    ]
    main_part = parts[0]

    def urgency(trial: Trial) -> tuple[Any, ...]:
        is_first = trial.part == main_part
        return (
            not (is_first and trial.epsilon == 8.0), trial.seed > 0 and not is_first, not is_first,
            epsilons.index(trial.epsilon), encoders.index(trial.encoder), parts.index(trial.part), trial.seed,
        )  # fmt: skip

    yield from sorted(trials, key=urgency)


def is_tried(encoder: str, part: str) -> bool:
    """LoRA does not train in stacks and would take the larger encoder the time of all others; of tiny's two layers the
    upper half is one."""
    return part != ("upper half" if encoder == "tiny" else "LoRA")


def best_on_cut(results: Path, encoder: str) -> dict[str, Recipe]:
    """Each part's best candidate of an encoder by sst2 on the cut."""
    rows = [row for row in read(results) if "scores" in row and row["split"] == "cut" and row["encoder"] == encoder]
    rows.sort(key=lambda row: float(row["scores"]["sst2"]))
    return {row["part"]: Recipe.named(row["recipe"]) for row in rows}


def run_all(options: argparse.Namespace, trials: list[Trial]) -> None:
    results = options.out / "results.jsonl"
    done = {row["key"] for row in read(results) if "scores" in row}
    waiting = [trial for trial in trials if trial.key not in done]
    for split in {trial.split for trial in waiting}:
        write_data(options, split, {task for trial in waiting for task in trial.tasks})
    ends, stops = time.monotonic() + options.seconds, time.monotonic() + min(options.stop, 1e9)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        following = iter(waiting)
        running = {pool.submit(run_one, trial, options): trial for trial in islice(following, options.jobs)}
        while running:
            finished, _ = wait(running, stops - time.monotonic(), return_when=FIRST_COMPLETED)
            if not finished:
                for process in multiprocessing.active_children():
                    process.kill()
                print("runs were ended by --stop", flush=True)
                break
            for future in finished:
                trial = running.pop(future)
                error = future.exception()
                row = {"key": trial.key, "error": str(error)} if error else future.result()
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if k != "curve"}), flush=True)
                given = next(following, None) if time.monotonic() < ends else None
                if given is not None:
                    running[pool.submit(run_one, given, options)] = given


def config_of(trial: Trial, options: argparse.Namespace) -> Settings:
    """One federation of three sites for each task, as a config."""
    is_private, part = trial.epsilon is not None, trial.part
    passes = 1 if part in SMALL or is_private else min(3, trial.recipe.passes)
    lots = {task: int(LOTS[task] * trial.recipe.lot) if is_private else min(64, LOTS[task]) for task in trial.tasks}
    tasks: Settings = {task: {"batch_size": lot} for task, lot in lots.items()}
    if options.examples:
        tasks = {task: {"batch_size": max(8, options.examples // 30)} for task in trial.tasks}
    encoder = str((options.models / trial.encoder).absolute()) if trial.encoder != "tiny" else "tiny"
    # Clients train at once where there is a GPU; on a CPU, one after the other by its kernels.
    compute: Settings = {"workers": 0 if options.device != "cpu" else 1, "device": options.device}
    config: Settings = {
        "seed": trial.seed,
        "mode": "federated",
        "model": {"server_model": encoder, "pair": "dual", "pool": "mean", "encoder_dropout": 0.0, "head_dropout": 0.0,
                  "max_length": 128},
        "tasks": tasks,
        "clients": {f"{task}{site}": {"tasks": [task]} for task in trial.tasks for site in range(3)},
        "sharing": {"rules": [{"heads.*": "task"}, *PARTS[part]]},
        "federation": {"average": "tasks", "vocabulary_slices": False},
        "training": {
            "num_rounds": -(-trial.recipe.passes // passes), "local_epochs": passes, "learning_rate": trial.recipe.rate,
            "head_rate": trial.recipe.head, "schedule": "linear", "warmup_rounds": 0.0, "weight_decay": 0.0,
            "keep_optimizer": passes == 1,
        },
        "evaluation": {"baselines": "none", "every": max(1, 5 // passes), "batch_size": 512},
        "data": {"root": str(data_root(options, trial.split).absolute()),
                 "cache": str((options.out / "cache").absolute())},
        "output": str((options.out / "runs").absolute()),
    }  # fmt: skip
    if part == "LoRA":
        config["model"]["lora"] = {"rank": 8}
    elif options.device != "cpu":
        compute["stack"] = len(config["clients"])
    if is_private:
        config["privacy"] = {
            "example": {"epsilon": trial.epsilon, "delta": DELTA, "max_grad_norm": NORM,
                        "examples_at_once": options.at_once}
        }  # fmt: skip
    config["compute"] = compute
    return config


def run_one(trial: Trial, options: argparse.Namespace) -> Settings:
    """Train one config, and return its main metrics after the last round, and by round."""
    import fedmtl

    began = time.monotonic()
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", trial.key)[:100]
    run = fedmtl.run(config_of(trial, options), name=f"{name}-{int(time.time())}")
    curve: dict[str, list[float]] = {task: [] for task in trial.tasks}
    for row in run.metrics():
        if row["task"] in curve and row["score"] is not None:
            curve[row["task"]].append(row["score"])
    spent = last_of(read_events(RunFolder(run.path)), ExamplePrivacyEvent)
    tasks = {} if spent is None else spent.tasks
    return {
        "key": trial.key, "split": trial.split, "encoder": trial.encoder, "part": trial.part, "epsilon": trial.epsilon,
        "seed": trial.seed, "recipe": trial.recipe.name, "scores": {task: curve[task][-1] for task in trial.tasks},
        "spent": {task: round(one.epsilon, 3) for task, one in tasks.items()},
        "noise": {task: one.releases[0].noise_multiplier for task, one in tasks.items()},
        "seconds": round(time.monotonic() - began, 1), "curve": curve,
    }  # fmt: skip


def data_root(options: argparse.Namespace, split: str) -> Path:
    root: Path = options.out / f"data-{split}"
    return root


def write_data(options: argparse.Namespace, split: str, tasks: set[str]) -> None:
    """A data root with the tasks' training examples and what scores them: `cut` from train, or all of `dev`."""
    for task in sorted(tasks):
        num_train, num_cut = SIZES[task]
        folder = data_root(options, split) / task
        if (folder / "dev.tsv").exists():
            continue
        folder.mkdir(parents=True, exist_ok=True)
        header, rows = _table(options.data / task / "train.tsv.gz")
        random.Random(f"private {task}").shuffle(rows)
        if split == "dev":
            train, scored = rows[:num_train], _table(options.data / task / "dev.tsv.gz")[1]
        else:
            # Stsb has no more than it trains on.
            most = min(num_train, len(rows) - num_cut) if task != "sst2" else num_train
            train, scored = _cut(task, rows, most, num_cut)
        _write(folder / "train.tsv", header, train[: options.examples])
        _write(folder / "dev.tsv", header, scored[: options.examples])


def show(path: Path) -> None:
    """A row for each split, encoder, part and recipe: every task's mean over seeds by epsilon."""
    found: dict[tuple[str, ...], dict[float, list[Settings]]] = {}
    for row in read(path):
        if "scores" in row:
            key = (row["split"], row["encoder"], row["part"], row["recipe"])
            epsilon = math.inf if row["epsilon"] is None else row["epsilon"]
            found.setdefault(key, {}).setdefault(epsilon, []).append(row)
    print("| split | encoder | trained | settings | epsilon | sst2 | qqp | stsb | seeds |\n" + "|---" * 9 + "|")
    for key, by_epsilon in sorted(found.items()):
        for epsilon, rows in sorted(by_epsilon.items()):
            cells = []
            for task in SIZES:
                values = [row["scores"][task] for row in rows if task in row["scores"]]
                spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
                cells.append(f"{statistics.fmean(values):.3f}{spread}" if values else "")
            words = "none" if math.isinf(epsilon) else f"{epsilon:g}"
            print(f"| {' | '.join([*key, words, *cells, str(len(rows))])} |")


if __name__ == "__main__":
    main()
