"""Write docs/privacy-matrix.md: which protections go together with which methods, by trying every pair.

    python tests/privacy_matrix.py

Every pair is a run of two rounds with an encoder of one layer and random values, three clients for each of two tasks. A
cell is `yes`, or the number of the error with which the pair is refused before anything is trained; any other error
ends the script. Some minutes on one core; tests/test_privacy_matrix.py fails when the page is stale. Rules are read
from `fedmtl.capabilities.AGGREGATORS`, so a new one is a new column; so are the capabilities of `PRIVACY` in
`fedmtl.capabilities.BUILT_IN`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines.flower.deployment import Server, Site, make_certs
from fedmtl.capabilities import AGGREGATORS, BUILT_IN
from fedmtl.config import Config
from fedmtl.config.file import load_config
from fedmtl.errors import FedmtlError
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.server import RoundFailed
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import RoundEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import summarize

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/privacy-matrix.md"
YES = "yes"
TASKS = ("sentiment", "paraphrase")
SITES = ("a", "b", "c")
CONFIG = (
    "defaults=plain",
    "model={server_model: random-1x32, max_length: 24, pool: cls, pair: dual}",
    *(f"tasks.{task}={{train_samples: 48, val_samples: 8}}" for task in TASKS),
    "federation.clients_per_task=3",
    # What noise and masking need; rows of their own put both back.
    "federation.average=uniform",
    "federation.vocabulary_slices=false",
    "training={num_rounds: 2, batch_size: 4, learning_rate: 1e-2}",
    "compute={workers: 0, device: cpu}",
    "evaluation.baselines=none",
)
BOTH_TASKS = f"clients={json.dumps({name: {'tasks': list(TASKS)} for name in SITES})}"


@dataclass(frozen=True)
class Protection:
    """A column: how a user turns it on. `changes` says that weights come out otherwise than without it."""

    words: str
    overrides: tuple[str, ...]
    changes: bool = True


PRIVACY = {
    "example_privacy": Protection("`privacy.example`", ("privacy.example={noise_multiplier: 1.0}",)),
    "client_privacy": Protection("`privacy.client`", ("privacy.client={noise_multiplier: 1.0}",)),
    "secure_aggregation": Protection("`privacy.secure_aggregation`", ("privacy.secure_aggregation={}",)),
}
# Noise under masks: a column of its own for each kind.
TOGETHER = {
    "masked_examples": Protection(
        "masks and noise on gradients",
        ("privacy={secure_aggregation: {}, example: {noise_multiplier: 1.0, max_sampling_rate: 0.5}}",),
    ),
    "masked_clients": Protection(
        "masks and noise at clients",
        ("privacy={secure_aggregation: {}, client: {noise_multiplier: 1.0, noise_at: clients}}",),
    ),
}
PROTECTIONS: dict[str, Protection] = {
    **{name: column for name, column in PRIVACY.items() if name in BUILT_IN},
    **TOGETHER,
    **{
        rule: Protection(f"`{rule}`", (f"federation.aggregation={rule}",), changes=False)
        for rule in AGGREGATORS
        if rule != "mean"
    },
}


@dataclass(frozen=True)
class Method:
    """A row: how a user turns it on. `changes` says that weights come out otherwise than without it."""

    words: str
    how: str
    overrides: tuple[str, ...] = ()
    changes: bool = True


JOINT = (BOTH_TASKS, "training.task_schedule=joint")
SERVER_TEACHER = "{teacher: TEACHER, where: server, steps: 2, tasks: [sentiment], texts: [TEXTS]}"
SPLITTING = "{split_below: 0.98, merge_above: 0.99, patience: 1, warmup_rounds: 0}"
PERSONAL = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
FIXED = 'sharing.rules=[{"heads.*": task}, {"embeddings.*": fixed}, {"*": all}]'


def _row(words: str, key: str, value: object, *more: str, changes: bool = True) -> Method:
    """A row that is turned on by one key, and by what it needs beside it."""
    shown = f"`{key}`" if isinstance(value, str) and value[:1] in "{[" else f"`{key}: {value}`"
    return Method(words, shown, (*more, f"{key}={value}"), changes)


METHODS: Mapping[str, Method] = {
    "plain": Method("nothing else", "", changes=False),
    "fedprox": _row("FedProx", "training.proximal", 1),
    "scaffold": _row("SCAFFOLD", "methods.scaffold", "{}"),
    "smart": _row("SMART", "training.smart", "{weight: 1, radius: 0.1}"),
    "several_tasks": Method("several tasks at a client", "`clients`", (BOTH_TASKS,)),
    "joint": Method("joint steps", "`training.task_schedule: joint`", JOINT),
    "pcgrad": _row("PCGrad", "training.gradients", "pcgrad", *JOINT),
    "uncertainty": _row("uncertainty weights", "training.loss_weighting", "uncertainty"),
    "distillation": _row("a teacher at the clients", "training.distillation", "{teacher: TEACHER}"),
    "server_distillation": _row("a teacher at the server", "training.distillation", SERVER_TEACHER),
    "pruning": _row("pruning", "training.pruning", "{amount: 0.5, rounds: 1}"),
    "lora": _row("LoRA", "model.lora", "{rank: 2}"),
    "adapters": _row("adapters", "model.adapters", "{size: 8, heads: 2}"),
    "windows": _row("texts in several windows", "model.windows", "{stride: 4}", "model.max_length=8"),
    "multilabel": _row("several labels a text", "tasks.sentiment.kind", "multilabel"),
    "logit_adjustment": _row("logit adjustment", "training.logit_adjustment", 1, "partition.kind=dirichlet"),
    "class_weights": _row("class weights", "tasks.sentiment.class_weights", "[1, 3]"),
    "adaptive": _row("adaptive sharing", "sharing.adaptive", SPLITTING),
    "task_weighting": _row("task weights", "federation.task_weighting.kind", "progress", changes=False),
    "early_stopping": _row("early stopping", "tasks.sentiment.patience", 1, changes=False),
    "fedavgm": _row("FedAvgM", "federation.server_optimizer.kind", "fedavgm"),
    "fedadam": _row("FedAdam", "federation.server_optimizer", "{kind: fedadam, learning_rate: 0.01}"),
    "weighted": _row("clients by their examples", "federation.average", "weighted", changes=False),
    "average_tasks": _row("tasks alike", "federation.average", "tasks", changes=False),
    "max_share": _row("a largest share", "federation.max_share", 0.4, changes=False),
    "max_update_norm": _row("a largest norm", "federation.max_update_norm", 1000, changes=False),
    "clients_per_round": _row("clients drawn for a round", "federation.clients_per_round", 5),
    "down": _row("coarse weights down", "wire.down", "int8"),
    "up": _row("coarse updates up, no error feedback", "wire.up", "int8", "wire.error_feedback=false"),
    "error_feedback": _row("coarse updates with error feedback", "wire.up", "int8"),
    "topk": _row("the largest entries up", "wire.up", "topk"),
    "keep_optimizer": _row("optimizer state kept", "training.keep_optimizer", "true"),
    "personal_heads": Method("personal heads", "`sharing.rules`", (PERSONAL,), changes=False),
    "fixed_table": Method("token table fixed", "`sharing.rules`", (FIXED,)),
    "slices": _row("vocabulary slices", "federation.vocabulary_slices", "true", changes=False),
    "at_clients": _row("scores at the clients", "evaluation.where", "clients", changes=False),
    "resume": Method("killed after round 1 and resumed: the same weights", "`fedmtl run --resume`", changes=False),
    "workers": _row("workers: the same weights", "compute.workers", 1, changes=False),
    "stacked": _row("clients at once", "compute.stack", 3, "compute.precision=fp32", changes=False),
    "sites": Method("sites over TLS", "`fedmtl server`, `fedmtl client`", (BOTH_TASKS,), changes=False),
}
# Their weights are compared with those of the same run without them.
EXACT = ("resume", "workers")


class _Stop(Exception):
    """The run is cut off here, as a process that is killed."""


class Bench:
    """Small runs in a folder; each is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._digests: dict[tuple[str, ...], str] = {}
        self._made = 0

    def config(self, *overrides: str) -> Config:
        words = {"TEACHER": lambda: str(self.teacher.path), "TEXTS": lambda: str(self.texts)}
        given = list(overrides)
        for word, value in words.items():
            given = [part.replace(word, value()) if word in part else part for part in given]
        return load_config(None, [*CONFIG, f"output={self.folder / 'runs'}", *given])

    def name(self) -> str:
        self._made += 1
        return f"run{self._made}"

    @property
    def teacher(self) -> RunFolder:
        run = RunFolder(self.folder / "runs/teacher")
        if not run.path.exists():
            start_run(self.config("training.num_rounds=1"), "teacher")
        return run

    @property
    def texts(self) -> Path:
        path = self.folder / "texts.txt"
        path.write_text("a fine film\na dull book\nthe cast was good\n")
        return path

    def digest(self, *overrides: str) -> str:
        """The weights of a finished run with these settings."""
        if overrides not in self._digests:
            self._digests[overrides] = sha256(self._finish(self.config(*overrides)))
        return self._digests[overrides]

    def _finish(self, config: Config) -> RunFolder:
        """A finished run; an error that comes when its folder is there is no refusal."""
        name = self.name()
        try:
            return start_run(config, name)
        except FedmtlError as error:
            if (self.folder / "runs" / name).exists():
                raise AssertionError(f"is refused too late: {error}") from error
            raise

    def resume(self, *overrides: str) -> str:
        """The weights of a run that was cut off after its first round and resumed."""
        name = self.name()

        def observe(event: Event) -> None:
            if isinstance(event, RoundEvent) and event.round == 1:
                raise _Stop

        with contextlib.suppress(_Stop):
            start_run(self.config(*overrides), name, observe)
        run = RunFolder(self.folder / "runs" / name)
        return sha256(resume_run(run))

    def deploy(self, *overrides: str) -> None:
        """A server and three sites over TLS, which all end well."""
        folder = self.folder / self.name()
        keys = make_certs(folder / "certs", dict.fromkeys(SITES, TASKS))
        timeouts = ("federation.round_timeout=60", "federation.join_timeout=60")
        config = self.config(*overrides, f"output={folder}", *timeouts)
        server = Server(config, folder / "certs")  # Raises where the server refuses before it listens.
        sites = [Site(server, folder / name, name, TASKS, keys[name]) for name in SITES]
        try:
            run = server.finish()
        except RoundFailed as error:
            raise AssertionError(f"is refused too late: {error}") from error
        outcomes = [site.finish() for site in sites]
        assert not [outcome for outcome in outcomes if isinstance(outcome, BaseException)], outcomes
        assert summarize(read_events(run)).status == "done"
        assert not server.failures(), server.failures()


def sha256(run: RunFolder) -> str:
    summary = summarize(read_events(run))
    assert summary.status == "done", summary
    assert summary.weights_sha256 is not None
    return summary.weights_sha256


def try_pair(bench: Bench, protection: str, method: str) -> str:
    """`yes`, or the line with which the pair is refused; an assertion where either has no effect."""
    column, row = PROTECTIONS[protection], METHODS[method]
    try:
        _try(bench, column, row, method)
    except FedmtlError as error:
        text = " ".join(str(error).split())
        return text.replace(str(bench.folder), "FOLDER")
    except AssertionError as error:
        raise AssertionError(f"{column.words} with {row.words}: {error}") from error
    return YES


def _try(bench: Bench, column: Protection, row: Method, method: str) -> None:
    if method == "sites":
        bench.deploy(*column.overrides, *row.overrides)
        return
    both = bench.digest(*column.overrides, *row.overrides)
    if method in EXACT:
        again = bench.resume(*column.overrides) if method == "resume" else both
        assert again == bench.digest(*column.overrides), "weights are others"
    if column.changes:
        assert both != bench.digest(*row.overrides), "the protection has no effect"
    if row.changes:
        assert both != bench.digest(*column.overrides), "the method has no effect"


def column_of(protection: str, folder: Path, methods: Sequence[str] = tuple(METHODS)) -> dict[str, str]:
    """What comes of one protection with these methods."""
    bench = Bench(folder)
    return {method: try_pair(bench, protection, method) for method in methods}


HEAD = """# Which protections go with which methods

<!-- Written by `python tests/privacy_matrix.py`; tests/test_privacy_matrix.py compares. -->

Every pair was tried: two rounds, an encoder of one layer with random values, three clients for each of two tasks.
`yes`: the run ended, and its weights are other ones than without the protection and without the method, where these
change any; a run that was killed has the weights of one that was not. A number is the error with which the pair is
refused before anything is trained, below the table. What each protection guarantees: [privacy.md](privacy.md). Write
this page again with `python tests/privacy_matrix.py`.
"""


def page(found: Mapping[str, Mapping[str, str]]) -> str:
    """The page: a table, and under it the refusals, each once."""
    refusals = list(
        dict.fromkeys(cell for name in METHODS for column in PROTECTIONS if (cell := found[column][name]) != YES)
    )
    lines = [
        HEAD,
        "| method | how | " + " | ".join(column.words for column in PROTECTIONS.values()) + " |",
        "|---|---|" + "---|" * len(PROTECTIONS),
    ]
    for name, method in METHODS.items():
        cells = (found[column][name] for column in PROTECTIONS)
        shown = (cell if cell == YES else f"[{refusals.index(cell) + 1}](#refusals)" for cell in cells)
        lines.append(f"| {method.words} | {method.how} | " + " | ".join(shown) + " |")
    lines += ["", "## Refusals", ""]
    lines += [f"{number}. {_plain(text)}" for number, text in enumerate(refusals, start=1)] or ["None."]
    return "\n".join(lines) + "\n"


def _plain(text: str) -> str:
    """An error as Markdown shows it letter by letter."""
    return text.replace("*", "\\*").replace("<", "&lt;")


def read_page(text: str, columns: Sequence[str] = tuple(PROTECTIONS)) -> dict[str, dict[str, str]]:
    """Protection -> method -> `yes` or the refusal, as a page says that has these columns."""
    head, _, below = text.partition("## Refusals\n\n")
    listed = [line.partition(". ")[2] for line in below.splitlines() if line.partition(". ")[0].isdigit()]
    listed = [line.replace("\\*", "*").replace("&lt;", "<") for line in listed]
    rows = [
        line.removeprefix("| ").removesuffix(" |").split(" | ") for line in head.splitlines() if line.startswith("| ")
    ]
    cells = dict(zip(METHODS, (row[2:] for row in rows[1:]), strict=True))
    return {
        column: {
            name: YES if row[at] == YES else listed[int(row[at].partition("]")[0].strip("[")) - 1]
            for name, row in cells.items()
        }
        for at, column in enumerate(columns)
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write docs/privacy-matrix.md.")
    parser.add_argument("--only", nargs="*", choices=list(PROTECTIONS), help="try these alone; other columns stay")
    parser.add_argument("--methods", nargs="*", choices=list(METHODS), help="try these alone, and write no page")
    given: Any = parser.parse_args(arguments)
    wrong = []
    found: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["FEDMTL_CACHE"] = f"{folder}/cache"
        torch.set_num_threads(1)
        for protection in given.only or PROTECTIONS:
            bench, found[protection] = Bench(Path(folder) / protection), {}
            for method in given.methods or METHODS:
                try:
                    found[protection][method] = try_pair(bench, protection, method)
                except Exception as error:
                    # All pairs are tried, so that all that is wrong can be read at once.
                    wrong.append(f"{protection} with {method}: {type(error).__name__}: {error}")
            print(protection, {name: cell for name, cell in found[protection].items() if cell != YES}, flush=True)
    if wrong:
        raise SystemExit("\n".join(["no page was written:", *wrong]))
    if not given.methods:
        if given.only:
            text = PAGE.read_text(encoding="utf-8")
            head = next(line for line in text.splitlines() if line.startswith("| method"))
            there = [name for name, column in PROTECTIONS.items() if f" {column.words} |" in head]
            found = {**read_page(text, there), **found}
        PAGE.write_text(page(found), encoding="utf-8")
        print(PAGE.relative_to(ROOT))


if __name__ == "__main__":
    main()
