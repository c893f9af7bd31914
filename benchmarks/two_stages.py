"""What TinyBERT's two stages are worth: a 3x384 student of minilm-l6 from random values and from general distillation.

    python benchmarks/two_stages.py --data DATA --encoder MINILM --device cuda --choose --out chosen.json
    python benchmarks/two_stages.py --data DATA --encoder MINILM --device cuda --chosen chosen.json --out FILE

DATA has sst2, qqp and stsb, each with train.tsv.gz and dev.tsv.gz, and for the general stage's texts imdb and ag_news,
each with train.tsv.gz; a folder that is not there is left out. The teacher is one model for the three tasks, a pair in
one pass. While it trains, `pretrain --vocab teacher` distils the encoder it began with. Then students learn from the
teacher, with prediction alone and with the intermediate stage before it, as many passes in all.

`--choose` tries every setting of GRID and GENERAL_RATES with one seed on a split cut from train (sst2: whole sentences,
with every phrase of theirs taken out of train). Without it the best of them, by the mean of the tasks' main metrics and
by the loss of the general stage, run with three seeds and are scored on dev.

With `--work FOLDER` what is there is not made again: a run that was ended goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

TASKS = ("sst2", "qqp", "stsb")
TEXTS = (*TASKS, "imdb", "ag_news")
# Where a student begins, and its stages; `layers` are the teacher's, for comparison.
ARMS = (
    ("random", "both"),
    ("general", "both"),
    ("layers", "both"),
    ("random", "prediction"),
    ("general", "prediction"),
)
# Rates of the intermediate and of the prediction stage.
GRID = {"prediction": ((0.0, 1e-4), (0.0, 3e-4)), "both": ((3e-4, 1e-4), (1e-3, 3e-4), (3e-4, 3e-4))}
GENERAL_RATES = (5e-4, 1e-3, 2e-3)
# What `fedmtl distill` does unless it is given others; for arms that were not chosen for.
DEFAULT = {"prediction": (0.0, 1e-4), "both": (3e-4, 1e-4)}
GENERAL_RATE = 1e-3
SENTENCES, SHARE = 900, 0.1
Cell = tuple[str, str, tuple[float, float], int]


def teach(options: argparse.Namespace) -> dict[str, Any]:
    """Train the teacher, and let it answer every training text once, so that students find its answers on disk."""
    import torch

    import fedmtl
    from fedmtl.compress.augment.settings import AugmentSettings
    from fedmtl.compress.distill.settings import DistillSettings
    from fedmtl.compress.distill.student import build_student
    from fedmtl.compress.distill.teaching import open_teaching, prepare_lessons
    from fedmtl.tasks.load import load_tasks
    from fedmtl.tasks.tokens import token_cache

    begun = time.time()
    shutil.rmtree(options.work / "runs" / "teacher", ignore_errors=True)  # Ended before it was finished.
    config = {
        "mode": "centralized",
        "defaults": "plain",
        "seed": 0,
        "model": {"server_model": str(options.encoder), "max_length": 128},
        "data": {"root": str(options.data), "source": "files", "cache": str(options.work / "cache")},
        "tasks": {task: {} if task == "stsb" else {"train_samples": options.samples} for task in TASKS},
        "training": {
            "num_rounds": 4,
            "local_steps": options.teacher_steps // 4,
            "batch_size": 64,
            "learning_rate": 1e-4,
            "head_rate": 10.0,
            "schedule": "linear",
            "warmup_rounds": 0.25,
            "task_schedule": "temperature",
        },
        "evaluation": {"every": 4, "batch_size": 256},
        "compute": {"stack": 0, "workers": 0, "device": options.device},
        "output": str(options.work / "runs"),
    }
    run = fedmtl.run(config, "teacher")
    trained = time.time() - begun
    teaching = open_teaching(run.folder.model, torch.device(options.device))
    student = build_student(DistillSettings(options.student), teaching.saved, run.config.model, 0)
    data, cache = load_tasks(run.config), token_cache(run.config.data)
    prepare_lessons(teaching, student, data, AugmentSettings(), str(options.encoder), cache, 0, lambda line: None)
    return {"seconds": round(trained, 1), "answering": round(time.time() - begun - trained, 1)}


def generalise(rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Distil the teacher's encoder on the texts alone; what is returned has the loss at the end."""
    from fedmtl.compress.pretrain.run import Disclosure, Machine, PretrainPaths, pretrain
    from fedmtl.compress.pretrain.settings import Losses, PretrainSettings

    layers, hidden = map(int, options.student.split("x"))
    files = [options.data / task / "train.tsv.gz" for task in TEXTS]
    settings = PretrainSettings(
        options.encoder,
        tuple(str(file) for file in files if file.exists()),
        layers=layers,
        hidden=hidden,
        vocab="teacher",
        max_length=128,
        minutes=options.minutes,
        batch=options.batch,
        learning_rate=rate,
        losses=Losses(hidden=1.0, similarity=0.0, own_similarity=0.0, attention=1.0),
        altered=False,
        pairs=options.pairs,
    )
    out = options.work / f"general-{rate:g}"
    paths = PretrainPaths(out, options.work / f"work-{rate:g}", options.work / f"general-{rate:g}.json")
    begun = time.time()
    disclosure = Disclosure("benchmarks/two_stages.py")
    pretrain(settings, paths, Machine(options.device), disclosure, Quiet(), resume=paths.checkpoint.exists())
    report = json.loads((options.work / f"general-{rate:g}.json").read_text())
    tail = [row["total"] for row in report["log"][-5:]]
    return {
        "rate": rate,
        "loss": statistics.mean(tail),
        "last": report["log"][-1],
        "seconds": round(time.time() - begun, 1),
        "training_seconds": round(report["seconds"], 1),
        **{name: report[name] for name in ("steps", "segments", "segments_seen", "skipped")},
    }


def student_name(cell: Cell) -> str:
    start, stages, rates, seed = cell
    return f"{start}-{stages}-{rates[0]:g}-{rates[1]:g}-{seed}"


def distil(cell: Cell, general: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One student; its scores beside its teacher's."""
    from fedmtl.compress.distill.run import distill
    from fedmtl.compress.distill.settings import DistillSettings
    from fedmtl.config.file import load_config
    from fedmtl.runs.folder import RunFolder

    start, stages, rates, seed = cell
    begun = time.time()
    teacher = RunFolder(options.work / "runs" / "teacher")
    passes = options.passes
    settings = DistillSettings(
        student=str(general) if start == "general" else options.student,
        start={"random": "random", "general": None, "layers": "teacher"}[start],
        stages=stages,
        epochs_intermediate=passes,
        epochs_prediction=passes if stages == "both" else 2 * passes,
        rate_intermediate=rates[0] or 3e-4,
        rate_prediction=rates[1],
    )
    config = load_config(teacher.config, [f"seed={seed}", "training.batch_size=128"])
    name = student_name(cell)
    is_begun = RunFolder(options.work / "runs" / name).events.exists()
    made = distill(teacher, config, settings, name, Quiet(), resume=is_begun)
    scores = {task: made.student[task] for task in TASKS}
    return {
        "start": start,
        "stages": stages,
        "rates": rates,
        "seed": seed,
        "scores": scores,
        "mean": statistics.mean(score or 0.0 for score in scores.values()),
        "teacher": {task: made.teacher[task] for task in TASKS},
        "seconds": round(time.time() - begun, 1),
    }


def once(name: str, make: Callable[..., dict[str, Any]], *given: Any, options: argparse.Namespace) -> dict[str, Any]:
    """What was made under that name; with `--work` it may have been made before."""
    file = options.work / "made" / f"{name}.json"
    if not file.exists():
        made = make(*given, options)
        file.parent.mkdir(exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(made))
        partial.replace(file)
    found: dict[str, Any] = json.loads(file.read_text())
    return found


class Quiet:
    """Prints nothing."""

    def say(self, line: str) -> None: ...
    def advance(self, stage: str, done: int, total: int) -> None: ...
    def update(self, update: Any) -> None: ...


def cut(source: Path, target: Path) -> None:
    """Write a data folder whose dev sets are cut from train: a tenth, of sst2 whole sentences and all their phrases."""
    draw = random.Random(7)
    for task in TASKS:
        header, *rows = _read(source / task / "train.tsv.gz")
        (target / task).mkdir(parents=True)
        if task == "sst2":
            long = [number for number, row in enumerate(rows) if len(row[0].split()) >= 12]
            chosen = set(draw.sample(long, min(SENTENCES, len(long) // 4)))
            texts = [rows[number][0].strip() for number in chosen]
            joined = "\n".join(texts)
            scored = [row for number, row in enumerate(rows) if number in chosen]
            left = [
                row
                for number, row in enumerate(rows)
                if number not in chosen
                and row[0].strip() not in joined
                and not any(text in row[0] for text in texts if len(text) <= len(row[0]))
            ]
        else:
            chosen = set(draw.sample(range(len(rows)), int(SHARE * len(rows))))
            scored = [row for number, row in enumerate(rows) if number in chosen]
            left = [row for number, row in enumerate(rows) if number not in chosen]
        _write(target / task / "train.tsv.gz", [header, *left])
        _write(target / task / "dev.tsv.gz", [header, *scored])
    for name in TEXTS:
        file = source / name / "train.tsv.gz"
        if name not in TASKS and file.exists():
            (target / name).mkdir()
            (target / name / "train.tsv.gz").write_bytes(file.read_bytes())


def _read(path: Path) -> list[list[str]]:
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def _write(path: Path, rows: list[list[str]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        file.writelines("\t".join(row) + "\n" for row in rows)


def cells(options: argparse.Namespace) -> list[Cell]:
    """What is to be run, longest first; with `--choose` every setting of the grid for one seed."""
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.choose:
        arms = [arm for arm in ARMS if arm[0] != "layers"]
        return [(start, stages, rates, seeds[0]) for start, stages in arms for rates in GRID[stages]]
    best = chosen_rates(options.chosen)
    wanted = [arm for arm in ARMS if "-".join(arm) in options.arms.split(",")]
    return [(*arm, best.get(arm, DEFAULT[arm[1]]), seed) for seed in seeds for arm in wanted]


def chosen_rates(file: Path | None) -> dict[tuple[str, str], tuple[float, float]]:
    """Of every arm in a file of `--choose`, the rates of its best student."""
    students = json.loads(file.read_text())["students"] if file else []
    best = {(one["start"], one["stages"]): one for one in sorted(students, key=lambda one: float(one["mean"]))}
    return {arm: tuple(one["rates"]) for arm, one in best.items()}


def general_rates(options: argparse.Namespace) -> tuple[float, ...]:
    if options.choose:
        return GENERAL_RATES
    tried = json.loads(options.chosen.read_text())["general"] if options.chosen else []
    return (min(tried, key=lambda one: float(one["loss"]))["rate"] if tried else GENERAL_RATE,)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, teacher and general stage side by side first."""
    begun = time.time()
    found: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}

    def note(name: str, value: Any) -> None:
        found[name] = value
        found["seconds"] = round(time.time() - begun, 1)
        print(name, json.dumps(value[-1] if isinstance(value, list) else value), flush=True)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")

    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        teacher = pool.submit(once, "teacher", teach, options=options)
        rates = general_rates(options)
        stages = [pool.submit(once, f"general-{rate:g}", generalise, rate, options=options) for rate in rates]
        general = [stage.result() for stage in stages]
        note("general", general)
        note("teacher", teacher.result())
        best = min(general, key=lambda one: float(one["loss"]))["rate"]
        folder = options.work / f"general-{best:g}"
        futures: list[Future[dict[str, Any]]] = [
            pool.submit(once, student_name(cell), distil, cell, folder, options=options) for cell in cells(options)
        ]
        students: list[dict[str, Any]] = []
        for future in futures:
            students.append(future.result())
            note("students", students)
    return found


def table(found: dict[str, Any]) -> str:
    """Means over seeds, a row for every start, stages and rates."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for one in found["students"]:
        rows.setdefault((one["start"], one["stages"], *one["rates"]), []).append(one)
    lines = [f"{'teacher':38}" + " ".join(f"{found['students'][0]['teacher'][task]:.4f}" for task in TASKS)]
    for (start, stages, first, second), students in rows.items():
        scores = [statistics.mean(one["scores"][task] or 0.0 for one in students) for task in TASKS]
        words = f"{start} {stages} {first:g} {second:g}"
        lines.append(f"{words:38}" + " ".join(f"{score:.4f}" for score in [*scores, statistics.mean(scores)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with sst2, qqp, stsb, imdb and ag_news")
    parser.add_argument("--encoder", type=Path, required=True, help="folder of minilm-l6")
    parser.add_argument("--choose", action="store_true", help="try the grid on a split cut from train")
    parser.add_argument("--student", default="3x384", help="layers and width")
    parser.add_argument("--chosen", type=Path, help="a file of --choose, whose best settings are taken")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", default=",".join(map("-".join, ARMS)), help="such as random-both,general-both")
    parser.add_argument("--work", type=Path, help="folder for teacher, general stage and students, to go on with")
    parser.add_argument("--samples", type=int, default=48_000, help="most training examples of sst2 and of qqp")
    parser.add_argument("--teacher-steps", type=int, default=3_000)
    parser.add_argument("--minutes", type=float, default=1.5, help="of the general stage")
    parser.add_argument("--pairs", action="store_true", help="let the general stage read pairs in one pass too")
    parser.add_argument("--batch", type=int, default=512, help="of the general stage")
    parser.add_argument("--passes", type=int, default=2, help="of each stage")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, required=True, help="file for the scores, as JSON")
    options = parser.parse_args()
    if unknown := set(options.arms.split(",")) - set(map("-".join, ARMS)):
        parser.error(f"--arms: {', '.join(sorted(unknown))}; there are {', '.join(map('-'.join, ARMS))}")
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        options.work, options.encoder = (options.work or Path(folder) / "work").resolve(), options.encoder.resolve()
        options.work.mkdir(parents=True, exist_ok=True)
        options.data = options.data.resolve()
        if options.choose:
            cut(options.data, Path(folder) / "data")
            options.data = Path(folder) / "data"
        print(table(measure(options)))


if __name__ == "__main__":
    main()
