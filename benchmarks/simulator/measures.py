"""What the table does not show: overhead over bare training, evaluation, and large populations."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from fedmtl.runs.events import RoundEvent
from simulator.commands import locked, run
from simulator.systems import ROOT, Case, call_fedmtl, cores, read_measured, run_fedmtl, threads
from simulator.systems import contestant as start_contestant
from simulator.workload import TASKS, VALIDATION, Texts, pieces, write_config, write_table

Note = Callable[[str], None]
PER_CLIENT = 30
MOST_WORDS = 12
MANY_A_ROUND = 128
PER_TASK = {"small": 11, "large": 3_334}


def overhead(case: Case, repeats: int, lock: Path | None, note: Note) -> dict[str, Any]:
    """A round of the federation against its batches alone; the two alternate."""
    config = case.workload / f"clients-{case.clients}" / "config.yaml"
    rounds: dict[str, list[float]] = {"federation": [], "bare": []}
    for _ in range(repeats):
        with locked(lock):
            whole = run_fedmtl(case)
        options = ["--config", str(config), "--rounds", str(case.rounds), "--processes", str(cores())]
        paths = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", **threads(1)}
        with locked(lock):
            bare = read_measured(case, run([str(case.python), "-m", "simulator.contestants.bare", *options], paths))
        assert whole.samples == bare.samples, f"{whole.samples} and {bare.samples} samples"
        rounds["federation"].append(whole.round)
        rounds["bare"].append(bare.round)
        note(f"overhead: {whole.round:.2f} s a round, {bare.round:.2f} s bare, others {whole.others:.2f} cores")
    ratios = [a / b for a, b in zip(rounds["federation"], rounds["bare"], strict=True)]
    return {**rounds, "ratio": median(ratios), "ratios": ratios}


def evaluation(case: Case, repeats: int, lock: Path | None, note: Note) -> dict[str, Any]:
    """Seconds to score the validation files, against the padded loop in its better variant."""
    config = case.workload / f"clients-{case.clients}" / "config.yaml"
    settings = ["evaluation.every=1", "training.local_steps=1"]
    settings += [f"tasks.{task}.val_samples={VALIDATION}" for task in TASKS]
    n = cores()
    variants = {
        f"1 process x {n} threads": start_contestant("naive_evaluation", ["--threads", str(n)], n),
        f"{n} processes x 1 thread": start_contestant("naive_evaluation", ["--processes", str(n), "--threads", "1"], 1),
    }
    found: dict[str, list[float]] = {"fedmtl": [], **{name: [] for name in variants}}
    for _ in range(repeats):
        with locked(lock), tempfile.TemporaryDirectory(prefix="fedmtl-bench-") as output:
            _, events = call_fedmtl(case.python, config, output, case.rounds, settings)
        found["fedmtl"].append(
            median(event.evaluate_seconds for event in events if isinstance(event, RoundEvent) and event.round > 0)
        )
        for name, start in variants.items():
            with locked(lock):
                measured = start(case)
            assert measured.samples == VALIDATION * len(TASKS), f"scored {measured.samples} examples"
            found[name].append(measured.round)
        note("evaluation: " + ", ".join(f"{name} {values[-1]:.2f} s" for name, values in found.items()))
    best = min(variants, key=lambda name: median(found[name]))
    ratios = [a / b for a, b in zip(found[best], found["fedmtl"], strict=True)]
    return {"examples": VALIDATION * len(TASKS), "seconds": found, "naive": best, "ratio": median(ratios)}


def population(case: Case, repeats: int, lock: Path | None, note: Note) -> dict[str, Any]:
    """The same 32 clients a round of 30 short examples each, out of 33 clients and out of 10,002.

    `small` draws from the large population's task files, so that only the population differs; `small files`
    has files of its size, so that the data grow with the population too.
    """
    folder = case.workload / "population"
    if not (folder / "large.yaml").exists():
        _write_population(folder, case.workload)
    names = ("small files", "small", "large", "large, many a round")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for repeat in range(repeats + 1):
        for name in names:
            with locked(lock):
                config, _, many = name.partition(", ")
                settings = [f"federation.clients_per_round={MANY_A_ROUND}"] if many else []
                measured = run_fedmtl(case, settings, folder / f"{config.replace(' ', '-')}.yaml")
            # The first run of each fills the cache of tokens and is not counted.
            if repeat:
                found[name].append({**asdict(measured), "round": measured.round})
                note(f"population, {name}: {measured.peak_mb:,.0f} MB, begun after {measured.begun:.2f} s")
    mid = {name: {k: median(run[k] for run in found[name]) for k in ("peak_mb", "begun", "round")} for name in names}
    return {
        "clients": {"small files": 33, "small": 33, "large": 3 * PER_TASK["large"]},
        "medians": mid,
        "memory_ratio": mid["large"]["peak_mb"] / mid["small"]["peak_mb"],
        "memory_ratio_many_a_round": mid["large, many a round"]["peak_mb"] / mid["large"]["peak_mb"],
        "memory_ratio_small_files": mid["large"]["peak_mb"] / mid["small files"]["peak_mb"],
        "more_start_up": mid["large"]["begun"] - mid["small"]["begun"],
        "more_start_up_small_files": mid["large"]["begun"] - mid["small files"]["begun"],
        "runs": found,
    }


def _write_population(folder: Path, workload: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    texts = Texts(pieces())
    drawn = {task: texts.draw(task, PER_TASK["large"] * PER_CLIENT, seed=3, most=MOST_WORDS) for task in TASKS}
    few = PER_TASK["small"] * PER_CLIENT
    for task, examples in drawn.items():
        write_table(folder / f"{task}.tsv", examples)
        write_table(folder / f"{task}-few.tsv", examples.part(0, few))
    whole = {task: f"{task}.tsv" for task in TASKS}
    some = {task: f"{task}-few.tsv" for task in TASKS}

    def federation(size: str) -> dict[str, int]:
        return {"clients_per_task": PER_TASK[size], "clients_per_round": 32}

    write_config(folder / "small-files.yaml", workload, some, federation=federation("small"))
    write_config(folder / "small.yaml", workload, whole, train_samples=few, federation=federation("small"))
    write_config(folder / "large.yaml", workload, whole, federation=federation("large"))
