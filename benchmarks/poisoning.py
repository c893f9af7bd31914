"""What one hostile client of five can do to a federation, with and without what bounds it.

    python benchmarks/poisoning.py [--seeds 3] [--rounds 6] [--jobs 2] [--out benchmarks/results/poisoning.json]

Three clients have sentiment, one of them hostile; one has paraphrase and one similarity. The encoder is `tiny`, the
data is the package's, and scores are those of the last round on 400 validation examples a task. The hostile client
either trains on flipped labels, or returns the negative of its update, ten times as long (`sign x10`) or just under
`federation.max_update_norm` (`sign max`); each also with a claim of a million examples in its updates, and one with
that claim when it joins, without and with `max_share`. In `lone x10` the hostile client is the only one of its task.
The federation averages plainly, or by each rule of `federation.aggregation`: in every scope, in the encoder alone (the
scope `all`) or in the heads alone (`task:*`). Seeds 10 to 12 chose what is recommended, seeds 0 to 2 are reported.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedmtl.config.file import load_config
from fedmtl.experiment.prepare import Prepared, open_engine
from fedmtl.experiment.run import start_run
from fedmtl.federation.messages import ClientId, ClientInfo, Engine, Failure, Job, State, Update
from fedmtl.runs.events import EvaluationEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.tasks.embedded import SENTIMENTS, embedded_columns

HOSTILE = "sentiment_1"
TASKS = {"sentiment": "accuracy", "paraphrase": "accuracy", "similarity": "pearson"}
CLIENTS = {HOSTILE: "sentiment", "sentiment_2": "sentiment", "sentiment_3": "sentiment"}
CLIENTS |= {"paraphrase_1": "paraphrase", "similarity_1": "similarity"}
LONE = "paraphrase_1"
# With three clients of a task, a trimmed mean is the median: it is measured in every scope at once.
RULES = ("clipped_mean", "centered_clipping", "coordinate_median", "multi_krum")
WHERE = ("every scope", "all", "task:*")
CLAIM = 10**6


@dataclass
class Setting:
    """One federation: how the hostile client behaves, and how updates become one."""

    attack: str = "none"
    claims: str = ""
    aggregation: str = "mean"
    where: str = "every scope"
    seed: int = 0
    max_update_norm: float | None = None
    max_share: float | None = None

    @property
    def hostile(self) -> str:
        return LONE if self.attack == "lone x10" else HOSTILE

    def section(self) -> dict[str, Any]:
        """Its `federation.aggregation`."""
        section: dict[str, Any] = {"rule": self.aggregation, "max_share": self.max_share}
        if self.where != "every scope":
            section |= {"rule": "mean", "scopes": {self.where: self.aggregation}}
        return section


@dataclass
class HostileEngine:
    """An engine whose hostile client changes its answers on the way; `norms` are those of honest updates."""

    engine: Engine
    setting: Setting
    norms: list[float] = field(default_factory=list)

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        known = self.engine.clients()
        if self.setting.claims != "joining":
            return known
        claiming = replace(known[HOSTILE], num_examples=dict.fromkeys(known[HOSTILE].num_examples, CLAIM))
        return {**known, HOSTILE: claiming}

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        for answer in self.engine.run(jobs, deadline):
            if isinstance(answer, Update) and answer.client == self.setting.hostile:
                answer = self._poisoned(answer)
            elif isinstance(answer, Update):
                self.norms.append(_norm(answer.delta))
            yield answer

    def predict(self, state: State, batch_size: int) -> Any:
        return self.engine.predict(state, batch_size)

    def close(self) -> None:
        self.engine.close()

    def _poisoned(self, update: Update) -> Update:
        if self.setting.claims:
            # Whoever claims it when joining claims it in every update.
            update = replace(update, num_examples=dict.fromkeys(update.num_examples, CLAIM))
        factor = {"sign x10": -10.0, "lone x10": -10.0, "sign max": self._up_to_the_limit(update)}.get(
            self.setting.attack
        )
        if factor is None:
            return update
        return replace(update, delta={key: factor * value for key, value in update.delta.items()})

    def _up_to_the_limit(self, update: Update) -> float:
        limit = self.setting.max_update_norm
        return 1.0 if limit is None else -0.99 * limit / _norm(update.delta)


def _norm(delta: Mapping[Any, torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(value)) ** 2 for value in delta.values()))


def write_sentiment(folder: Path, flipped: bool, count: int) -> dict[str, Path]:
    """The hostile client's third of the training examples, what is dealt to the other two, and validation."""
    train, validation = (embedded_columns("sentiment", split) for split in ("train", "validation"))
    rows = list(zip(train["sentence"], train["label"], strict=True))[:count]
    other = dict(zip(SENTIMENTS, reversed(SENTIMENTS), strict=True))
    hostile = [(text, other[label] if flipped else label) for text, label in rows[: count // 3]]
    parts = {
        "hostile": hostile,
        "others": rows[count // 3 :],
        "validation": list(zip(validation["sentence"], validation["label"], strict=True)),
    }
    paths = {}
    for name, part in parts.items():
        paths[name] = folder / f"{name}{'-flipped' if flipped and name == 'hostile' else ''}.tsv"
        paths[name].write_text("sentence\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in part))
    return paths


def run_setting(setting: Setting, folder: Path, rounds: int, examples: int) -> tuple[dict[str, float], float]:
    """The last round's scores, and the largest norm of an honest update."""
    files = write_sentiment(folder, setting.attack == "labels", examples)
    shared = {"train": str(files["others"]), "validation": str(files["validation"])}
    clients: dict[str, Any] = {name: {"tasks": [task]} for name, task in CLIENTS.items()}
    clients[HOSTILE]["source"] = {"sentiment": {"train": str(files["hostile"]), "validation": shared["validation"]}}
    tasks = {"sentiment": {"source": shared}, **{name: {"train_samples": examples} for name in list(TASKS)[1:]}}
    config = load_config(
        None,
        [
            "defaults=plain",
            "model={server_model: tiny, pair: dual, pool: mean, encoder_dropout: 0.0}",
            f"tasks={json.dumps(tasks)}",
            f"clients={json.dumps(clients)}",
            f"training={{num_rounds: {rounds}, learning_rate: 1e-3}}",
            f"evaluation={{every: {rounds}, where: server}}",
            f"federation.aggregation={json.dumps(setting.section())}",
            "compute.workers=0",
            f"seed={setting.seed}",
            f"output={folder / 'runs'}",
            f"federation.max_update_norm={json.dumps(setting.max_update_norm)}",
        ],
    )
    opened: list[HostileEngine] = []

    def open_hostile(prepared: Prepared, run: RunFolder) -> HostileEngine:
        opened.append(HostileEngine(open_engine(prepared, run), setting))
        return opened[0]

    run = start_run(config, "poisoned", make_engine=open_hostile)
    last = [event for event in read_events(run) if isinstance(event, EvaluationEvent) and event.round == rounds]
    scores = {event.task: event.metrics[TASKS[event.task]] for event in last}
    return scores, max(opened[0].norms)


def settings(seed: int) -> Iterator[Setting]:
    """Every attack under every rule; the first is a federation without any."""
    rules = [("mean", WHERE[0]), ("trimmed_mean", WHERE[0]), *((rule, where) for rule in RULES for where in WHERE)]
    for attack, claims in (("none", ""), ("sign x10", ""), ("labels", "updates")):
        for rule, where in rules:
            yield Setting(attack, claims, rule, where, seed)
    for attack in ("sign max", "lone x10"):
        for rule in ("mean", "clipped_mean", "multi_krum"):
            yield Setting(attack, "", rule, seed=seed)
    for rule, share in (("mean", None), ("mean", 0.25), ("multi_krum", None), ("multi_krum", 0.25)):
        yield Setting("labels", "joining", rule, seed=seed, max_share=share)


def measure_seed(seed: int, rounds: int, examples: int, out: Path | None) -> list[dict[str, Any]]:
    """Every setting of a seed; those that its file has already are not run again."""
    known = read_runs(out, rounds, examples)
    rows = [row for row in known if row["seed"] == seed]
    with tempfile.TemporaryDirectory() as folder:
        limit = next((1.5 * row["norm"] for row in rows if row["attack"] == "none"), None)
        for setting in settings(seed):
            if setting.attack == "sign max":
                setting.max_update_norm = limit
            if any(vars(setting).items() <= row.items() for row in rows):
                continue
            scores, norm = run_setting(setting, Path(folder), rounds, examples)
            limit = limit or 1.5 * norm
            rows.append({**vars(setting), **scores, "norm": norm})
            if out is not None:
                write_runs(out, rounds, examples, rows)
            print(_line(rows[-1:]), flush=True)
    return rows


def read_runs(out: Path | None, rounds: int, examples: int) -> list[dict[str, Any]]:
    if out is None or not out.exists():
        return []
    found = json.loads(out.read_text())
    runs: list[dict[str, Any]] = found["runs"]
    return runs if (found["rounds"], found["examples"]) == (rounds, examples) else []


def write_runs(out: Path, rounds: int, examples: int, rows: list[dict[str, Any]]) -> None:
    out.write_text(json.dumps({"rounds": rounds, "examples": examples, "runs": rows}, indent=1))


def measure(seeds: int, rounds: int, examples: int, jobs: int, out: Path | None) -> list[dict[str, Any]]:
    """All seeds, each in a process and with a file of its own until all are there."""
    parts = [out and out.with_suffix(f".{seed}.json") for seed in range(seeds)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(measure_seed, seed, rounds, examples, part) for seed, part in enumerate(parts)]
        return [row for of_seed in found for row in of_seed.result()]


def _line(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    shown = []
    for task in TASKS:
        values = [row[task] if row[task] is not None else 0.0 for row in rows]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        shown.append(f"{task} {statistics.mean(values):.3f}{spread}")
    claim = f"10^6 in {first['claims']}" if first["claims"] else ""
    share = f", share {first['max_share']}" if first["max_share"] else ""
    rule = f"{first['aggregation']}{share} in {first['where']}"
    return f"{first['attack']:<9} {claim:<16} {rule:<33} {', '.join(shown)}"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        kind = (row["attack"], row["claims"], row["aggregation"], row["where"], row["max_share"])
        groups.setdefault(kind, []).append(row)
    return [_line(group) for group in groups.values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--examples", type=int, default=900, help="training examples a task")
    parser.add_argument("--jobs", type=int, default=2, help="seeds that are measured at once, a process each")
    parser.add_argument("--out", type=Path, help="a JSON file of every run; one that is cut off goes on")
    given = parser.parse_args()
    rows = measure(given.seeds, given.rounds, given.examples, given.jobs, given.out)
    print(f"\nmean ± standard deviation of {given.seeds} seeds")
    print("\n".join(summary(rows)))
    if given.out:
        write_runs(given.out, given.rounds, given.examples, rows)
        for seed in range(given.seeds):
            given.out.with_suffix(f".{seed}.json").unlink()


if __name__ == "__main__":
    main()
