"""Four real tasks, six clients, nothing set but tasks and files: what the chosen settings are worth.

    python benchmarks/first_hour.py --data DATA --models MODELS --out FOLDER --grid        # candidates, on a cut
    python benchmarks/first_hour.py --data DATA --models MODELS --out FOLDER --final       # all of dev, three seeds
    python benchmarks/first_hour.py --data DATA --models MODELS --out FOLDER --baselines   # linear models, the cosine

sst2, ag_news, stsb and qqp, 4,500 to 6,000 training examples each, two clients a task, two clients with two tasks.
`--grid` scores on a part cut from train: sst2 without phrases of its sentences, stsb without shared sentences. Settings
are chosen there; `--final` reads dev (of ag_news the test file) and chooses nothing. Each run is a process; results go
to OUT/results.jsonl, a line as soon as a run ends, and a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
# Training examples of a task, and how many are cut from train to choose settings on.
SIZES = {"sst2": (5000, 1000), "ag_news": (5000, 2000), "stsb": (4500, 1000), "qqp": (6000, 4000)}
METRICS = {"sst2": "accuracy", "ag_news": "accuracy", "stsb": "pearson", "qqp": "accuracy"}
CLIENTS: Settings = {
    "first": {"tasks": ["sst2"]},
    "second": {"tasks": ["sst2", "ag_news"]},
    "third": {"tasks": ["ag_news"]},
    "fourth": {"tasks": ["stsb"]},
    "fifth": {"tasks": ["stsb", "qqp"]},
    "sixth": {"tasks": ["qqp"]},
}
LAYERS = {"tiny": 2, "minilm-l6": 6, "minilm-l3": 3, "random-2x128": 2}
ENCODERS = ("tiny", "minilm-l6", "random-2x128")


@dataclass(frozen=True)
class Trial:
    """One run: settings beyond tasks and files, an encoder, and a seed."""

    name: str
    encoder: str
    seed: int
    settings: Settings
    split: str
    train: int | None = None

    @property
    def key(self) -> str:
        return f"{self.split}/{self.encoder}/{self.title}/{self.seed}"

    @property
    def title(self) -> str:
        return self.name if self.train is None else f"{self.name} of {self.train}"


def recipe(rate: float, **changes: Any) -> Settings:
    """A candidate: everything is written, so that no rule chooses any of it."""
    known = {
        "by_task": 0, "dropout": 0.0, "head_rate": 10.0, "batch": 32, "average": "tasks", "rounds": 10,
        "head_dropout": 0.1, "pair": "dual", "pool": "mean", "mode": "federated", "tasks": {}, "layers": 2,
        "schedule": "linear", "warmup": 0.25,
    }  # fmt: skip
    assert changes.keys() <= known.keys(), changes
    at = {**known, **changes}
    by_task = [{f"encoder.layer.{layer}.*": "task"} for layer in range(at["layers"] - at["by_task"], at["layers"])]
    return {
        "mode": at["mode"],
        "model": {"pair": at["pair"], "pool": at["pool"], "encoder_dropout": at["dropout"],
                  "head_dropout": at["head_dropout"]},
        "sharing": {"rules": [{"heads.*": "task"}, *by_task, {"*": "all"}]},
        "federation": {"average": at["average"]},
        "training": {
            "num_rounds": at["rounds"], "batch_size": at["batch"], "learning_rate": rate, "head_rate": at["head_rate"],
            "schedule": at["schedule"], "warmup_rounds": at["warmup"],
        },
        "tasks": at["tasks"],
    }  # fmt: skip


def candidates(encoder: str) -> dict[str, Settings]:
    """The settings that are tried on the cut, by name; the first ones matter most."""
    layers, single = LAYERS[encoder], "federated_single_task"

    def r(rate: float, **changes: Any) -> Settings:
        return recipe(rate, **{"layers": layers, **changes})

    similar, smaller = {"stsb": {"weight": 2.0, "batch_size": 8}}, {"stsb": {"batch_size": 16}}
    if encoder == "tiny":
        return {
            "last 8e-4": r(8e-4, by_task=1),
            "last 4e-4": r(4e-4, by_task=1),
            "last 2e-4": r(2e-4, by_task=1),
            "last 1.6e-3": r(1.6e-3, by_task=1),
            "all 4e-4": r(4e-4),
            "all 8e-4": r(8e-4),
            "all 2e-4": r(2e-4),
            "single 4e-4": r(4e-4, mode=single),
            "single 2e-4": r(2e-4, mode=single),
            "single 1e-4": r(1e-4, mode=single),
            "both 4e-4": r(4e-4, by_task=2),
            "last 4e-4 dropout .1": r(4e-4, by_task=1, dropout=0.1),
            "last 8e-4 dropout .1": r(8e-4, by_task=1, dropout=0.1),
            "last 4e-4 head 3": r(4e-4, by_task=1, head_rate=3.0),
            "last 8e-4 head 3": r(8e-4, by_task=1, head_rate=3.0),
            "last 4e-4 head 30": r(4e-4, by_task=1, head_rate=30.0),
            "last 4e-4 no head dropout": r(4e-4, by_task=1, head_dropout=0.0),
            "last 4e-4 batch 16": r(4e-4, by_task=1, batch=16),
            "last 4e-4 batch 64": r(4e-4, by_task=1, batch=64),
            "last 4e-4 stsb 2 of 8": r(4e-4, by_task=1, tasks=similar),
            "last 4e-4 weighted": r(4e-4, by_task=1, average="weighted"),
            "last 4e-4 head dropout .3": r(4e-4, by_task=1, head_dropout=0.3),
            "last 4e-4 5 rounds": r(4e-4, by_task=1, rounds=5),
            "last 4e-4 constant": r(4e-4, by_task=1, schedule="constant", warmup=0.0),
            "single 8e-4": r(8e-4, mode=single),
            "last 2e-4 no head dropout": r(2e-4, by_task=1, head_dropout=0.0),
            "last 3e-4 no head dropout": r(3e-4, by_task=1, head_dropout=0.0),
            "last 3e-4 no head dropout, head 3": r(3e-4, by_task=1, head_dropout=0.0, head_rate=3.0),
            "last 3e-4 no head dropout, head 30": r(3e-4, by_task=1, head_dropout=0.0, head_rate=30.0),
            "last 3e-4 no head dropout, stsb 1 of 16": r(3e-4, by_task=1, head_dropout=0.0, tasks=smaller),
            "single 2e-4 no head dropout": r(2e-4, mode=single, head_dropout=0.0),
            "single 1e-4 no head dropout": r(1e-4, mode=single, head_dropout=0.0),
            "single 1.5e-4 no head dropout": r(1.5e-4, mode=single, head_dropout=0.0),
            "both 3e-4 no head dropout": r(3e-4, by_task=2, head_dropout=0.0),
            "both 2e-4 no head dropout": r(2e-4, by_task=2, head_dropout=0.0),
            "both 1.5e-4 no head dropout": r(1.5e-4, by_task=2, head_dropout=0.0),
            "last 1.5e-4 no head dropout": r(1.5e-4, by_task=1, head_dropout=0.0),
            "last 1e-4 no head dropout": r(1e-4, by_task=1, head_dropout=0.0),
            # What the number of examples decides: `--train 400 --only "no head dropout"`.
            "last 6e-4 no head dropout": r(6e-4, by_task=1, head_dropout=0.0),
            "both 6e-4 no head dropout": r(6e-4, by_task=2, head_dropout=0.0),
            "single 3e-4 no head dropout": r(3e-4, mode=single, head_dropout=0.0),
        }
    if encoder.startswith("minilm"):
        return {
            "three 2e-4": r(2e-4, by_task=layers // 2, dropout=0.1),
            "three 1e-4": r(1e-4, by_task=layers // 2, dropout=0.1),
            "three 5e-5": r(5e-5, by_task=layers // 2, dropout=0.1),
            "single 5e-5": r(5e-5, mode=single, dropout=0.1),
            "single 1e-4": r(1e-4, mode=single, dropout=0.1),
            "all 1e-4": r(1e-4, dropout=0.1),
            "all 2e-4": r(2e-4, dropout=0.1),
            "three 1e-4 dropout 0": r(1e-4, by_task=layers // 2),
            "three 2e-4 dropout 0": r(2e-4, by_task=layers // 2),
            "three 4e-4": r(4e-4, by_task=layers // 2, dropout=0.1),
            "five 1e-4": r(1e-4, by_task=layers - 1, dropout=0.1),
            "three 1e-4 head 30": r(1e-4, by_task=layers // 2, dropout=0.1, head_rate=30.0),
            "three 1e-4 head 3": r(1e-4, by_task=layers // 2, dropout=0.1, head_rate=3.0),
            "three 1e-4 stsb 2 of 8": r(1e-4, by_task=layers // 2, dropout=0.1, tasks=similar),
            "single 2e-4": r(2e-4, mode=single, dropout=0.1),
            "three 1e-4 no head dropout": r(1e-4, by_task=layers // 2, dropout=0.1, head_dropout=0.0),
            "three 1.5e-4 no head dropout": r(1.5e-4, by_task=layers // 2, dropout=0.1, head_dropout=0.0),
            "three 2e-4 no head dropout": r(2e-4, by_task=layers // 2, dropout=0.1, head_dropout=0.0),
            "three 1.5e-4 no head dropout, .05": r(1.5e-4, by_task=layers // 2, dropout=0.05, head_dropout=0.0),
            "five 1e-4 no head dropout": r(1e-4, by_task=layers - 1, dropout=0.1, head_dropout=0.0),
            "single 5e-5 no head dropout": r(5e-5, mode=single, dropout=0.1, head_dropout=0.0),
            "single 1e-4 no head dropout": r(1e-4, mode=single, dropout=0.1, head_dropout=0.0),
            "single 7.5e-5 no head dropout": r(7.5e-5, mode=single, dropout=0.1, head_dropout=0.0),
            "all by task 7.5e-5 no head dropout": r(7.5e-5, by_task=layers, dropout=0.1, head_dropout=0.0),
            "all by task 1.5e-4 no head dropout": r(1.5e-4, by_task=layers, dropout=0.1, head_dropout=0.0),
        }
    return {
        "plain": {"model": {"pair": "cross", "pool": "auto", "encoder_dropout": None, "head_dropout": 0.1},
                  "sharing": {"rules": [{"heads.*": "task"}, {"*": "all"}]}, "federation": {"average": "weighted"},
                  "training": {"num_rounds": 10, "batch_size": 32, "learning_rate": 5e-5, "head_rate": 1.0,
                               "schedule": "constant", "warmup_rounds": 0.0}},
        "all 1e-3": r(1e-3),
        "last 1e-3": r(1e-3, by_task=1),
        "all 2e-3": r(2e-3),
        "all 5e-4": r(5e-4),
        "single 1e-3": r(1e-3, mode=single),
        "last 1e-3 no head dropout": r(1e-3, by_task=1, head_dropout=0.0),
    }  # fmt: skip


# What `--chosen` and `--final` run with every seed: nothing set, and what that is compared with.
_BOTH: dict[str, Settings] = {"chosen": {}, "chosen single": {"mode": "federated_single_task"}}
CHOSEN = {
    "tiny": _BOTH,
    "minilm-l3": _BOTH,
    "minilm-l6": _BOTH,
    "random-2x128": {"chosen": {}, "plain defaults": {"defaults": "plain"}},
}
# Twelve configs that somebody who knows the project would try by hand.
BY_HAND = {
    "tiny": ("last 8e-4", "last 4e-4", "last 2e-4", "all 4e-4", "all 8e-4", "both 4e-4", "last 8e-4 dropout .1",
             "last 4e-4 head 3", "last 4e-4 batch 64", "last 4e-4 stsb 2 of 8", "last 4e-4 weighted",
             "both 1.5e-4 no head dropout"),
    "minilm-l6": ("three 2e-4", "three 1e-4", "three 5e-5", "all 1e-4", "all 2e-4", "three 1e-4 dropout 0",
                  "three 2e-4 dropout 0", "three 4e-4", "five 1e-4", "three 1e-4 head 30", "three 1e-4 stsb 2 of 8",
                  "three 1e-4 no head dropout"),
    "random-2x128": ("all 1e-3", "last 1e-3", "all 2e-3", "all 5e-4"),
}  # fmt: skip


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.baselines:
        for seed in options.seeds:
            baselines(options, write_data(options, "dev", seed), "dev", seed)
    if options.grid or options.final or options.chosen:
        run_all(options, planned(options))
    show(options.out / "results.jsonl")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with <task>/train.tsv.gz and dev or test")
    parser.add_argument("--models", type=Path, help="folder with minilm-l6; without it only tiny and random-2x128")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results; a second call goes on with it")
    parser.add_argument("--grid", action="store_true", help="run the candidates on the cut")
    parser.add_argument("--chosen", action="store_true", help="run the chosen settings on the cut")
    parser.add_argument("--final", action="store_true", help="run the chosen settings and those by hand on dev")
    parser.add_argument("--baselines", action="store_true", help="linear models and the untrained cosine")
    parser.add_argument("--encoders", default=",".join(ENCODERS), help="which of them (default: %(default)s)")
    parser.add_argument("--only", default="", help="only candidates whose name has one of these, or is one: =NAME")
    parser.add_argument("--seeds", default=None, help="default: 0 for the grid, 0,1,2 otherwise")
    parser.add_argument("--hand-seeds", default="0", help="of --final, for the configs by hand (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=36000.0, help="start no run after this, stop those that run")
    parser.add_argument("--device", default="auto", help="cpu, cuda, or auto: a GPU where there is one")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of a run (default: %(default)s)")
    parser.add_argument("--rounds", type=int, help="other rounds than the candidates say")
    parser.add_argument("--every", type=int, default=1, help="score after every n-th round and the last")
    parser.add_argument("--train", type=int, help="so many training examples of each task instead of all of its sample")
    parser.add_argument("--examples", type=int, help="at most so many examples of a task, to try the script")
    options = parser.parse_args()
    options.seeds = [int(seed) for seed in (options.seeds or ("0" if options.grid else "0,1,2")).split(",")]
    options.hand_seeds = [int(seed) for seed in options.hand_seeds.split(",")]
    options.encoders = [name for name in options.encoders.split(",") if options.models or "minilm" not in name]
    return options


def planned(options: argparse.Namespace) -> list[Trial]:
    """Every run that was requested, those first that say most: the chosen settings, then seed by seed the candidates.

    Of the chosen settings and of the candidates the slowest encoder's runs begin first.
    """
    names = [part for part in options.only.split(",") if part]
    found: list[tuple[bool, int, bool, Trial]] = []
    for seed, encoder in itertools.product(options.seeds, options.encoders):
        known, trials = candidates(encoder), []
        split = "dev" if options.final else "cut"
        if options.final or options.chosen:
            trials = list(CHOSEN[encoder].items())
        if options.grid:
            trials += known.items()
        elif options.final and seed in options.hand_seeds:
            trials += [(name, known[name]) for name in BY_HAND[encoder]]
        for name, settings in trials:
            if not names or any(_named(part, name) for part in names):
                trial = Trial(name, encoder, seed, settings, split, options.train)
                found.append((name not in CHOSEN[encoder], seed, "minilm" not in encoder, trial))
    return [trial for *_, trial in sorted(found, key=lambda each: each[:3])]


def _named(part: str, name: str) -> bool:
    """Whether `--only` means a candidate: a part of its name, or with `=` in front all of it."""
    return part[1:] == name if part.startswith("=") else part in name


def run_all(options: argparse.Namespace, trials: list[Trial]) -> None:
    results, ends = options.out / "results.jsonl", time.monotonic() + options.seconds
    done = {row["key"] for row in read(results) if "scores" in row}
    waiting = [trial for trial in trials if trial.key not in done]
    roots = {split: {seed: write_data(options, split, seed) for seed in options.seeds}
             for split in {trial.split for trial in waiting}}  # fmt: skip
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=None) as pool:
        arguments = [(trial, roots[trial.split][trial.seed], options) for trial in waiting]
        running = {pool.submit(run_one, *given): given[0] for given in arguments[: options.jobs]}
        following = iter(arguments[options.jobs :])
        while running and time.monotonic() < ends:
            finished, _ = wait(running, timeout=max(0.0, ends - time.monotonic()), return_when=FIRST_COMPLETED)
            for future in finished:
                trial = running.pop(future)
                error = future.exception()
                row = {"key": trial.key, "error": str(error)} if error else future.result()
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(json.dumps({k: v for k, v in row.items() if k not in ("settings", "curve")}), flush=True)
                given = next(following, None)
                if given is not None:
                    running[pool.submit(run_one, *given)] = given[0]
        for process in (pool._processes or {}).values() if running else ():
            process.terminate()


def run_one(trial: Trial, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train one config as a user does, and return its main metrics after the last round, and by round."""
    import fedmtl

    began = time.monotonic()
    settings = json.loads(json.dumps(trial.settings))
    in_models = options.models is not None and (options.models / trial.encoder).is_dir()
    encoder = str((options.models / trial.encoder).absolute()) if in_models else trial.encoder
    settings.setdefault("model", {})["server_model"] = encoder
    tasks = {name: {**settings.get("tasks", {}).get(name, {})} for name in SIZES}
    if options.train is not None:
        tasks = {name: {**task, "train_samples": options.train} for name, task in tasks.items()}
    if options.rounds is not None:
        settings.setdefault("training", {})["num_rounds"] = options.rounds
    config = {
        **settings,
        "seed": trial.seed,
        "tasks": tasks,
        "clients": CLIENTS,
        "data": {"root": str(root.absolute()), "cache": str((options.out / "cache").absolute())},
        # Linear models are not fitted again after every run: `--baselines` has them.
        "evaluation": {"every": options.every, "baselines": "none"},
        "compute": {"workers": options.workers, "device": options.device},
        "output": str((options.out / "runs").absolute()),
    }
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", trial.key)
    # What is there was cut off: a run that ended is not repeated.
    shutil.rmtree(options.out / "runs" / name, ignore_errors=True)
    run = fedmtl.run(config, name=name)
    curve: dict[str, list[float | None]] = {name: [] for name in SIZES}
    for row in run.metrics():
        if row["task"] in curve:
            curve[row["task"]].append(row["score"])
    scores = {name: values[-1] for name, values in curve.items()}
    mean = statistics.fmean(value or 0.0 for value in scores.values())
    return {
        "key": trial.key, "split": trial.split, "encoder": trial.encoder, "name": trial.title, "seed": trial.seed,
        "scores": scores, "mean": mean, "start": {name: values[0] for name, values in curve.items()},
        "seconds": round(time.monotonic() - began, 1), "curve": curve, "settings": trial.settings,
    }  # fmt: skip


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(path: Path) -> None:
    """A line for each split, encoder and setting: every task's mean over seeds, and the mean of tasks."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in read(path):
        if "scores" in row:
            found.setdefault((row["split"], row["encoder"], row["name"]), []).append(row)
    for (split, encoder, name), rows in sorted(found.items()):
        values = {task: [row["scores"][task] for row in rows if row["scores"].get(task) is not None] for task in SIZES}
        words = " ".join(f"{task} {statistics.fmean(v):.4f}" if v else f"{task} -    " for task, v in values.items())
        means = [statistics.fmean(v) for v in values.values() if v]
        print(f"{split:3} {encoder:12} {name:28} {words}  mean {statistics.fmean(means):.4f}  ({len(rows)} seeds)")


# The data ------------------------------------------------------------------------------------------------------------


def write_data(options: argparse.Namespace, split: str, seed: int) -> Path:
    """A data root with every task's training sample and what scores it: `cut` from train, or all of `dev`."""
    root: Path = options.out / f"data-{split}-{seed}"
    for task, (num_train, num_cut) in SIZES.items():
        if (root / task / "dev.tsv").exists():
            continue
        (root / task).mkdir(parents=True, exist_ok=True)
        header, rows = _table(options.data / task / "train.tsv.gz")
        random.Random(f"first hour {task} {seed}").shuffle(rows)
        if split == "dev":
            named = [options.data / task / f"{name}.tsv.gz" for name in ("dev", "test")]
            train, scored = rows[:num_train], _table(next(path for path in named if path.exists()))[1]
        else:
            train, scored = _cut(task, rows, num_train, num_cut)
        limit = options.examples
        _write(root / task / "train.tsv", header, train[:limit])
        _write(root / task / "dev.tsv", header, scored[:limit])
    return root


def _cut(task: str, rows: list[list[str]], num_train: int, num_cut: int) -> tuple[list[list[str]], list[list[str]]]:
    """Training rows and rows to choose by, as unlike each other as train and dev are."""
    if task == "sst2":
        # Train has the phrases of its sentences: one of a sentence that scores must not be trained on.
        scored = [row for row in rows if len(row[0].split()) >= 12][:num_cut]
        whole = [row[0].strip() for row in scored]
        train: list[list[str]] = []
        for row in rows:
            text = row[0].strip()
            if len(train) < num_train and not any(text in sentence or sentence in text for sentence in whole):
                train.append(row)
        return train, scored
    train, rest = rows[:num_train], rows[num_train:]
    known = {text for row in train for text in row[:-1]}
    return train, [row for row in rest if not known.intersection(row[:-1])][:num_cut]


def _table(path: Path) -> tuple[list[str], list[list[str]]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    return header, [row for row in rows if len(row) == len(header)]


def _write(path: Path, header: list[str], rows: list[list[str]]) -> None:
    path.write_text("".join("\t".join(row) + "\n" for row in (header, *rows)), encoding="utf-8")


# The baselines -------------------------------------------------------------------------------------------------------


def baselines(options: argparse.Namespace, root: Path, split: str, seed: int) -> None:
    """TF-IDF and the frozen encoder with a linear model, and the untrained cosine, all examples in one place."""
    done = {row["key"] for row in read(options.out / "results.jsonl")}
    for encoder in ("tf-idf", *options.encoders):
        if f"{split}/{encoder}/linear/{seed}" in done:
            continue
        scores, cosine = {}, {}
        for task in SIZES:
            tables = [_plain_table(root / task / f"{part}.tsv") for part in ("train", "dev")]
            if encoder == "tf-idf":
                features = tf_idf(*(texts for texts, _ in tables))
            else:
                features = [frozen(options, encoder, texts) for texts, _ in tables]
            (train_y, dev_y) = (labels for _, labels in tables)
            scores[task] = linear(task, features[0], train_y, features[1], dev_y)
            if task == "stsb" and encoder != "tf-idf":
                from scipy.stats import pearsonr

                cosine[task] = float(pearsonr(features[1][:, -1], [float(y) for y in dev_y])[0])
        for name, found in (("linear", scores), ("cosine", cosine)):
            if found:
                row = {"key": f"{split}/{encoder}/{name}/{seed}", "split": split, "encoder": encoder, "name": name,
                       "seed": seed, "scores": {task: found.get(task) for task in SIZES}}  # fmt: skip
                with (options.out / "results.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")


def _plain_table(path: Path) -> tuple[list[list[str]], list[str]]:
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [row[:-1] for row in rows], [row[-1] for row in rows]


def tf_idf(train: list[list[str]], dev: list[list[str]]) -> list[Any]:
    """One text: its words and pairs of words; two texts: what they share, what they do not, and their cosine."""
    import numpy as np
    from scipy.sparse import csr_matrix, hstack
    from sklearn.feature_extraction.text import TfidfVectorizer

    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True)
    vectorizer.fit([text for row in train for text in row])
    found = []
    for rows in (train, dev):
        parts = [vectorizer.transform(texts) for texts in zip(*rows, strict=True)]
        if len(parts) == 2:
            first, second = parts
            cosine = csr_matrix(np.asarray(first.multiply(second).sum(axis=1)).reshape(-1, 1))
            parts = [first.multiply(second), abs(first - second), cosine]
        found.append(hstack(parts).tocsr())
    return found


def frozen(options: argparse.Namespace, encoder: str, rows: list[list[str]]) -> Any:
    """The mean of the untrained encoder's last states; of a pair both, their difference, product and cosine."""
    import numpy as np
    import torch

    from fedmtl.config import ModelConfig
    from fedmtl.model.encoder import load_encoder

    in_models = options.models is not None and (options.models / encoder).is_dir()
    loaded = load_encoder(ModelConfig(server_model=str(options.models / encoder) if in_models else encoder), 0, False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded.module.eval().to(device)

    @torch.inference_mode()
    def embed(texts: tuple[str, ...]) -> Any:
        vectors = []
        for start in range(0, len(texts), 128):
            inputs = loaded.tokenizer(list(texts[start : start + 128]), padding="longest", truncation=True,
                                      max_length=128, return_tensors="pt")  # fmt: skip
            given = {name: inputs[name].to(device) for name in loaded.accepts if name in inputs}
            mask = given["attention_mask"].unsqueeze(-1)
            vectors.append((loaded.module(**given).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(vectors).cpu().numpy()

    parts = [embed(texts) for texts in zip(*rows, strict=True)]
    if len(parts) == 2:
        u, v = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in parts)
        parts = [*parts, abs(parts[0] - parts[1]), parts[0] * parts[1], (u * v).sum(axis=1, keepdims=True)]
    return np.concatenate(parts, axis=1)


def linear(task: str, train: Any, train_y: list[str], dev: Any, dev_y: list[str]) -> float:
    """Logistic or ridge regression, its strength chosen by five folds of train."""
    import numpy as np
    from scipy.sparse import issparse
    from scipy.stats import pearsonr
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.model_selection import GridSearchCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    scale = [] if issparse(train) else [StandardScaler()]
    if METRICS[task] == "pearson":
        known = GridSearchCV(make_pipeline(*scale, Ridge()), {"ridge__alpha": [0.1, 1, 10, 100, 1000]}, cv=5)
        known.fit(train, [float(y) for y in train_y])
        return float(pearsonr(known.predict(dev), [float(y) for y in dev_y])[0])
    strengths = [0.3, 1, 3, 10] if issparse(train) else [0.001, 0.01, 0.1]
    known = GridSearchCV(make_pipeline(*scale, LogisticRegression(max_iter=1000)),
                         {"logisticregression__C": strengths}, cv=3)  # fmt: skip
    known.fit(train, train_y)
    return float(np.mean(known.predict(dev) == np.array(dev_y)))


if __name__ == "__main__":
    main()
