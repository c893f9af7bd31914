"""What corrects the drift of clients with skewed labels: FedAvg, FedProx and SCAFFOLD on sst2, qqp and stsb.

    python benchmarks/drift.py --data DATA --choose --out chosen.json
    python benchmarks/drift.py --data DATA --out benchmarks/results/drift.json

DATA has a folder for each task with train.tsv.gz and dev.tsv.gz. Three clients per task, labels dealt by Dirichlet 0.2,
the encoder `tiny`, one pass a round. `--choose` tries every setting of GRID with one seed, on a split cut from train
alone; CHOSEN below has what was best there, by the mean of the tasks' main metrics at the end. Without it these run
with three seeds and are scored on dev.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TASKS = {"sst2": "accuracy", "qqp": "accuracy", "stsb": "pearson"}
COMMON = {
    "defaults": "plain",
    "model": {"server_model": "tiny", "pair": "dual", "pool": "mean", "encoder_dropout": 0},
    "partition": {"kind": "dirichlet", "alpha": 0.2},
    "federation": {"clients_per_task": 3, "average": "tasks"},
    "training": {"num_rounds": 8, "batch_size": 64, "schedule": "linear", "warmup_rounds": 0.25},
    "evaluation": {"batch_size": 512},
}
OPTIMIZERS = {
    "adamw": {"learning_rate": (4e-4, 8e-4, 1.6e-3, 3.2e-3), "head_rate": (10,)},
    "sgd": {"optimizer": ("sgd",), "momentum": (0,), "learning_rate": (0.05, 0.1, 0.2, 0.4), "head_rate": (1,)},
}
MUS = (1e-3, 1e-2, 1e-1)
METHODS = ("fedavg", "fedprox", "scaffold")
# Of each optimizer and method, what was best on the cut.
CHOSEN = (
    "adamw fedavg 0.0008",
    "adamw fedprox 0.0008 mu 0.001",
    "adamw scaffold 0.0016",
    "sgd fedavg 0.1",
    "sgd fedprox 0.1 mu 0.1",
    "sgd scaffold 0.2",
)


def grid() -> dict[str, dict[str, Any]]:
    """Every setting that is tried, by name: the optimizer, the method and the values."""
    found = {}
    for optimizer, choices in OPTIMIZERS.items():
        for values in product(*choices.values()):
            training = dict(zip(choices, values, strict=True))
            for method in METHODS:
                for mu in MUS if method == "fedprox" else (0.0,):
                    given = {**training, **({"proximal": mu} if mu else {})}
                    words = [optimizer, method, f"{training['learning_rate']:g}", *([f"mu {mu:g}"] if mu else [])]
                    found[" ".join(words)] = given
    return found


def score(name: str, training: dict[str, Any], seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one federation and return its main metrics after the last round, and their mean after every one."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import fedmtl

    with tempfile.TemporaryDirectory() as folder:
        config = {
            **COMMON,
            "seed": seed,
            "data": {"root": str(options.data), "source": "files"},
            "tasks": {
                task: {"train_samples": options.samples} if task != "stsb" else {"batch_size": 8} for task in TASKS
            },
            "training": {**COMMON["training"], **training, "num_rounds": options.rounds},
            "compute": {"workers": 0, "device": options.device, "precision": "fp32", "stack": 0},
            "output": folder,
            **({"methods": {"scaffold": {}}} if name.split()[1] == "scaffold" else {}),
        }
        run = fedmtl.run(config)
        found: dict[str, list[float]] = {task: [] for task in TASKS}
        for event in run.events():
            if event.kind == "evaluation":
                found[event.task].append(event.metrics[TASKS[event.task]])
        overall = [statistics.mean(found[task][at] or 0.0 for task in TASKS) for at in range(options.rounds + 1)]
    return {"setting": name, "seed": seed, "last": {task: values[-1] for task, values in found.items()},
            "overall": overall[-1], "rounds": [round(value, 4) for value in overall]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2, qqp and stsb")
    parser.add_argument("--choose", action="store_true", help="try the grid on a split cut from train")
    parser.add_argument("--only", default="", help="settings whose names begin so, with commas")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--samples", type=int, default=16_000, help="most training examples of sst2 and of qqp")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True, help="file for the scores, as JSON")
    options = parser.parse_args()
    settings = grid() if options.choose else {name: grid()[name] for name in CHOSEN}
    first = tuple(filter(None, options.only.split(",")))
    settings = {name: given for name, given in settings.items() if not first or name.startswith(first)}
    seeds = [int(seed) for seed in options.seeds.split(",")][: 1 if options.choose else None]
    with tempfile.TemporaryDirectory() as cut:
        data = options.data.resolve()
        if options.choose:
            for task in TASKS:
                (Path(cut) / task).mkdir()
                shutil.copyfile(data / task / "train.tsv.gz", Path(cut) / task / "train.tsv.gz")
            data = Path(cut)
        options.data = data
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            futures = [
                pool.submit(score, name, given, seed, options) for name, given in settings.items() for seed in seeds
            ]
            scores = []
            for future in futures:
                scores.append(future.result())
                print(json.dumps(scores[-1]), flush=True)
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(scores, indent=1) + "\n")
    for name in settings:
        own = [one for one in scores if one["setting"] == name]
        means = [statistics.mean(one["last"][task] or 0.0 for one in own) for task in TASKS]
        print(f"{name:32}", *(f"{value:.4f}" for value in means), f"{statistics.mean(means):.4f}")


if __name__ == "__main__":
    main()
