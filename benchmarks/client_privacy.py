"""What noise that hides whole clients costs: a thousand clients on ag_news, with privacy.client and without.

    python benchmarks/client_privacy.py --data DATA --choose --out chosen.json
    python benchmarks/client_privacy.py --data DATA --out benchmarks/results/client_privacy.json

DATA has the folder ag_news with train.tsv.gz and test.tsv.gz. The training examples are dealt evenly to 1,000 clients,
some twenty each. The encoder is `tiny`, which stays as it is; the head is trained. `--choose` tries every setting of
GRID with one seed on a tenth that is cut off train. CHOSEN below has what was best there, with noise and without.
Without `--choose` these run with three seeds and are scored on the test file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

NUM_CLIENTS, EPSILON, DELTA = 1000, 8.0, 1e-4
PARTS = {"head": [{"heads.*": "task"}, {"*": "fixed"}]}
# (part, learning rate, bound of an update or None for no noise, chance of a client, rounds)
Setting = tuple[str, float, float | None, float, int]
GRID: list[Setting] = [
    ("head", 1.0, None, 0.1, 30),
    ("head", 3.0, None, 0.1, 30),
    ("head", 1.0, 0.5, 0.1, 30),
    ("head", 1.0, 1.0, 0.1, 30),
    ("head", 3.0, 1.0, 0.1, 30),
    ("head", 3.0, 2.0, 0.1, 30),
]
CHOSEN: list[Setting] = [
    ("head", 3.0, None, 0.1, 30),
    ("head", 3.0, 2.0, 0.1, 30),
]


def config_of(setting: Setting, seed: int, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """The config of one run; without a bound it is FedAvg with as many clients in a round, without noise."""
    part, rate, bound, chance, rounds = setting
    data = options.data.resolve() / "ag_news"
    source = {"train": str(data / "train.tsv.gz")}
    if not options.choose:
        source["validation"] = str(data / "test.tsv.gz")
    privacy = {"epsilon": EPSILON, "delta": DELTA, "max_norm": bound, "sampling_rate": chance}
    return {
        "defaults": "plain",
        "seed": seed,
        "model": {"server_model": "tiny", "pool": "mean", "encoder_dropout": 0, "head_dropout": 0},
        "data": {"cache": str(options.cache)},
        "tasks": {"ag_news": {"source": source}},
        "sharing": {"rules": PARTS[part]},
        "federation": {
            "clients_per_task": NUM_CLIENTS,
            "average": "uniform",
            "vocabulary_slices": False,
            **({"clients_per_round": round(chance * NUM_CLIENTS)} if bound is None else {}),
        },
        **({} if bound is None else {"privacy": {"client": privacy}}),
        "training": {
            "num_rounds": rounds,
            "batch_size": 8,
            "optimizer": "sgd",
            "learning_rate": rate,
            "max_grad_norm": 0,
            "weight_decay": 0,
        },
        "evaluation": {"every": rounds, "baselines": "none"},
        "compute": {"workers": 0, "device": options.device},
        "output": folder,
    }


def score(setting: Setting, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train one federation and return its accuracy, and what its ledger came to."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import fedmtl

    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        events = list(fedmtl.run(config_of(setting, seed, options, folder)).events())
    last = [event for event in events if event.kind == "evaluation"][-1]
    ledger = [event for event in events if event.kind == "privacy"]
    part, rate, bound, chance, rounds = setting
    return {
        "part": part,
        "learning_rate": rate,
        "max_norm": bound,
        "sampling_rate": chance,
        "rounds": rounds,
        "seed": seed,
        "noise_multiplier": ledger[-1].details["noise_multiplier"] if ledger else None,
        "epsilon": ledger[-1].epsilon if ledger else None,
        "accuracy": last.metrics["accuracy"],
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def table(scores: list[dict[str, Any]]) -> str:
    """The mean over seeds of every setting, as Markdown."""
    names = ("part", "learning_rate", "max_norm", "sampling_rate", "rounds", "noise_multiplier", "epsilon")
    lines = [f"| {' | '.join(names)} | accuracy |", "|---" * (len(names) + 1) + "|"]
    kinds = dict.fromkeys(tuple(one[name] for name in names[:5]) for one in scores)
    for kind in kinds:
        own = [one for one in scores if tuple(one[name] for name in names[:5]) == kind]
        values = [one["accuracy"] for one in own]
        shown = f"{statistics.mean(values):.4f} ({' '.join(f'{value:.3f}' for value in values)})"
        found = ["none" if own[0][name] is None else f"{own[0][name]:.3g}" for name in names[1:]]
        lines.append(f"| {kind[0]} | {' | '.join(found)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with ag_news")
    parser.add_argument("--choose", action="store_true", help="try the grid on a cut of train, with one seed")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "fedmtl-client-privacy")
    parser.add_argument("--out", type=Path, required=True, help="file for the scores, as JSON")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")][: 1 if options.choose else None]
    settings = GRID if options.choose else CHOSEN
    scores = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(score, setting, seed, options) for setting in settings for seed in seeds]
        for future in futures:
            scores.append(future.result())
            print(json.dumps(scores[-1]), flush=True)
            options.out.write_text(json.dumps(scores, indent=1) + "\n")
    print(table(scores))


if __name__ == "__main__":
    main()
