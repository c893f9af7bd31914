"""What an encoder is worth: zero-shot similarity, and fine-tuning of single tasks from it and from random weights.

    python benchmarks/encoder.py --data ../shared/data --encoder FOLDER --out encoder.json
    python benchmarks/encoder.py --data ../shared/data --encoder FOLDER --out encoder.json --finetune --select

Nothing is chosen on dev: the recipe below is fixed and the score is that of the last epoch. `--select` takes each
learning rate from a small grid by a tenth of train that is cut off for this, and for random weights by the same rule.
`fedmtl pretrain --measured` reads the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTS = ("pretrained", "random")
TRAIN_ONLY = "train-only"


@dataclass(frozen=True)
class Recipe:
    """How a task is fine-tuned; `grid` is what `--select` chooses the learning rate from."""

    metric: str
    epochs: int
    learning_rate: float
    dropout: float = 0.0
    head_rate: float = 1.0
    batch_size: int = 64
    grid: tuple[float, ...] = (1e-4, 3e-4, 1e-3)


# Chosen on parts cut from train; docs/results/tiny.md has what was tried.
RECIPES = {
    "stsb": Recipe("pearson", 5, 1e-4),
    "mrpc": Recipe("accuracy", 3, 3e-4, head_rate=33, batch_size=32),
    "qqp": Recipe("accuracy", 3, 5e-4),
    "sst2": Recipe("accuracy", 4, 2e-4, dropout=0.1),
}


@dataclass(frozen=True)
class Job:
    """One run of `fedmtl run`."""

    task: str
    start: str
    seed: int
    learning_rate: float
    is_selection: bool

    @property
    def name(self) -> str:
        purpose = "select" if self.is_selection else "final"
        return f"{purpose}-{self.task}-{self.start}-{self.learning_rate:g}-{self.seed}"


def main() -> None:
    options = parse()
    tasks = options.tasks.split(",")
    if options.dry_run:
        for job in planned(options, tasks):
            print(shlex.join(command(job, options, Path("WORK"))))
        return
    measured: list[dict[str, Any]] = [zero_shot(options.encoder, options.data)]
    record: dict[str, Any] = {"encoder": str(options.encoder), "measured": measured, "runs": []}
    show(measured[0])
    if options.finetune:
        with tempfile.TemporaryDirectory(prefix="encoder-benchmark-") as temporary:
            work = Path(options.work or temporary)
            measured += finetune(options, tasks, work, record["runs"])
    text = json.dumps(record, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    else:
        print(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with <task>/train.tsv.gz and <task>/dev.tsv.gz"
    )
    parser.add_argument("--encoder", type=Path, required=True, help="folder of the encoder")
    parser.add_argument("--out", type=Path, help="JSON file for the results; otherwise they are printed")
    parser.add_argument("--finetune", action="store_true", help="fine-tune the tasks, not only zero-shot similarity")
    parser.add_argument("--tasks", default=",".join(RECIPES), help="which of them (default: %(default)s)")
    parser.add_argument("--starts", default=",".join(STARTS), help="weights to start from (default: %(default)s)")
    parser.add_argument("--seeds", default="0,1,2", help="one run for each (default: %(default)s)")
    parser.add_argument("--select", action="store_true", help="choose learning rates on a part of train")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default: %(default)s)")
    parser.add_argument("--work", type=Path, help="keep the run folders here")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="passed on to every run")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, one per run")
    options = parser.parse_args()
    unknown = [task for task in options.tasks.split(",") if task not in RECIPES]
    if unknown:
        parser.error(f"--tasks: no recipe for {unknown[0]}; there is one for {', '.join(RECIPES)}")
    return options


def zero_shot(encoder: Path, data: Path) -> dict[str, Any]:
    """Pearson on stsb dev of the cosine of mean-pooled sentences, nothing trained."""
    import torch
    from scipy.stats import pearsonr
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    from fedmtl.tasks.sources import read_table

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    table = read_table(data / "stsb" / "dev.tsv.gz").columns
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def embed(texts: Sequence[str]) -> torch.Tensor:
        vectors = []
        for start in range(0, len(texts), 256):
            block = list(texts[start : start + 256])
            inputs = tokenizer(block, padding="longest", truncation=True, max_length=128, return_tensors="pt")
            mask = inputs["attention_mask"].unsqueeze(-1)
            vectors.append((model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1))
        return torch.cat(vectors)

    cosines = torch.cosine_similarity(embed(table["sentence1"]), embed(table["sentence2"]))
    value = pearsonr(cosines.numpy(), [float(score) for score in table["label"]])[0]
    # A pooler plays no part in a mean.
    size = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("pooler"))
    return {
        "task": "stsb, cosine, not trained",
        "metric": "pearson",
        "start": "pretrained",
        "mean": float(value),
        "parameters": size,
    }


def planned(options: argparse.Namespace, tasks: Iterable[str]) -> list[Job]:
    """All runs; the final ones with the learning rates of the recipes."""
    return selection_jobs(options, tasks) + final_jobs(options, tasks, {})


def selection_jobs(options: argparse.Namespace, tasks: Iterable[str]) -> list[Job]:
    if not options.select:
        return []
    starts = options.starts.split(",")
    return [Job(task, start, 0, rate, True) for task in tasks for start in starts for rate in RECIPES[task].grid]


def final_jobs(options: argparse.Namespace, tasks: Iterable[str], chosen: dict[tuple[str, str], float]) -> list[Job]:
    return [
        Job(task, start, int(seed), chosen.get((task, start), RECIPES[task].learning_rate), False)
        for task in tasks
        for start in options.starts.split(",")
        for seed in options.seeds.split(",")
    ]


def finetune(
    options: argparse.Namespace, tasks: Sequence[str], work: Path, runs: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row per task and start; every run is added to `runs`."""
    work.mkdir(parents=True, exist_ok=True)
    write_configs(tasks, work)
    link_train(options.data, tasks, work / TRAIN_ONLY)
    found = run_all(selection_jobs(options, tasks), options, work, runs)
    chosen: dict[tuple[str, str], float] = {}
    # The best comes last and stays; of equals, the lower rate.
    for job in sorted(found, key=lambda job: (found[job], -job.learning_rate)):
        chosen[job.task, job.start] = job.learning_rate
    scores = run_all(final_jobs(options, tasks, chosen), options, work, runs)
    rows: list[dict[str, Any]] = []
    for task in tasks:
        for start in options.starts.split(","):
            by_job = {job: score for job, score in scores.items() if (job.task, job.start) == (task, start)}
            if by_job:
                rows.append(row(task, start, next(iter(by_job)).learning_rate, list(by_job.values())))
                show(rows[-1])
    return rows


def row(task: str, start: str, learning_rate: float, scores: list[float]) -> dict[str, Any]:
    return {
        "task": f"{task}, fine-tuned",
        "metric": RECIPES[task].metric,
        "start": start,
        "mean": statistics.mean(scores),
        "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "seeds": len(scores),
        "learning rate": f"{learning_rate:g}",
        "epochs": RECIPES[task].epochs,
    }


def write_configs(tasks: Iterable[str], work: Path) -> None:
    for task in tasks:
        recipe = RECIPES[task]
        config = {
            "mode": "centralized",
            "defaults": "plain",
            "model": {"pair": "dual", "pool": "mean", "encoder_dropout": recipe.dropout},
            "tasks": {task: {}},
            "training": {
                "num_rounds": recipe.epochs,
                "batch_size": recipe.batch_size,
                "head_rate": recipe.head_rate,
                "schedule": "linear",
                "warmup_rounds": recipe.epochs / 10,
            },
            "evaluation": {"every": recipe.epochs},
            "compute": {"workers": 0},
        }
        # JSON is YAML too.
        (work / f"{task}.yaml").write_text(json.dumps(config, indent=1))


def link_train(data: Path, tasks: Iterable[str], folder: Path) -> None:
    """A data folder without dev: validation is then cut from train."""
    for task in tasks:
        (folder / task).mkdir(parents=True, exist_ok=True)
        link = folder / task / "train.tsv.gz"
        if not link.exists():
            link.symlink_to((data / task / "train.tsv.gz").resolve())


def command(job: Job, options: argparse.Namespace, work: Path) -> list[str]:
    settings = [
        f"model.server_model={options.encoder.resolve()}",
        f"model.initial={job.start}",
        f"data.root={(work / TRAIN_ONLY if job.is_selection else options.data).resolve()}",
        f"training.learning_rate={job.learning_rate:g}",
        f"seed={job.seed}",
        f"output={work / 'runs'}",
        *options.set,
    ]
    plain = [sys.executable, "-m", "fedmtl", "run", str(work / f"{job.task}.yaml"), "--name", job.name, "--json"]
    return [*plain, *(part for setting in settings for part in ("--set", setting))]


def run_all(
    jobs: Sequence[Job], options: argparse.Namespace, work: Path, runs: list[dict[str, Any]]
) -> dict[Job, float]:
    """Each job's score on its validation data; a run that fails is shown and left out."""

    def run(job: Job) -> float | None:
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **os.environ}
        done = subprocess.run(command(job, options, work), capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{job.name}: failed: {done.stderr.strip()[-400:]}", file=sys.stderr, flush=True)
            return None
        result = json.loads(done.stdout.strip().splitlines()[-1])
        score = float(result["metrics"][job.task][RECIPES[job.task].metric])
        runs.append({**vars(job), "score": score, "seconds": result["seconds"]})
        print(f"{job.name}: {score:.4f} in {result['seconds']:.0f} s", flush=True)
        return score

    with ThreadPoolExecutor(max(1, options.parallel)) as pool:
        scores = zip(jobs, pool.map(run, jobs), strict=True)
        return {job: score for job, score in scores if score is not None}


def show(row: dict[str, Any]) -> None:
    details = ", ".join(f"{name} {value}" for name, value in row.items() if name not in ("task", "mean", "metric"))
    print(f"{row['task']}: {row['metric']} {row['mean']:.4f} ({details})", flush=True)


if __name__ == "__main__":
    main()
