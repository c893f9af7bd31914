"""The study of scaling: its options, and its cells, each an encoder, a task and a number of clients for the same data.

It rebuilds a paper: A. Hilmkil, S. Callh, M. Barbieri, L. R. Sütfeld, E. Listo Zec, O. Mogren, "Scaling Federated
Learning for Fine-tuning of Large Language Models", NLDB 2021. Where we differ:

* Every cell with several clients runs to the second threshold; the accuracy at the first is read on the way, which is
  the same run since no rate depends on the number of rounds.
* The baseline is the one-client federation of the same seed; chance is what the most frequent label scores.
* A client begins every round with a fresh optimizer, the one client too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedmtl_studies.cells import Cell
from fedmtl_studies.folder import StudyFolder
from fedmtl_studies.library import (
    BUILTIN,
    EVERY,
    ONLY_SERVER,
    ConfigError,
    Honours,
    find_table,
    with_absolute_paths,
    with_overrides,
)
from fedmtl_studies.options import (
    Option,
    Quick,
    Rates,
    Rows,
    Settings,
    StudyOptions,
    fits,
    list_option,
    number_option,
    preset_rates,
    rate_for,
    read_names,
    read_preset,
    read_rates,
    read_whole_numbers,
    refuse_both,
    seeds_of,
)
from fedmtl_studies.results import Runs
from fedmtl_studies.scaling_page import show
from fedmtl_studies.scaling_results import DENSE, RANDOM, Known, Result, Setup, encoder_label, read_result, rounds_of
from fedmtl_studies.study import Plan, Study

# Where each of these options lies in a config.
CONFIG_OPTIONS = {
    "local_epochs": "training",
    "optimizer": "training",
    "learning_rate": "training",
    "batch_size": "training",
    "max_length": "model",
}
# How much longer than the fixed number of rounds a run may try to reach the target, as in the paper.
LONGER = 2
# The classifier of transformers' DistilBertForSequenceClassification: dense, ReLU and dropout on the first token.
DENSE_HEAD: Settings = {"pool": "cls", "dropout": 0.0, "head": {"activation": "relu", "dropout": 0.2}}
# What a task is scored on: an official split, in this order.
SCORED = ("dev", "validation", "test")


def absolute_path(path: Path, flag: str) -> str:
    """Return a path as any process can open it."""
    return str(path.expanduser().absolute())


class ScalingOptions(StudyOptions):
    """What the study is to do: a preset, and what replaces parts of it.

    Rounds are by task; `config` is what all cells have in common. `examples` and `validation` None are all there are.
    `score_on` official is a task's dev or test file, train a tenth cut from train. `rates` are learning rates by names
    of setups, over that of `config`. With `examples_per_client` more clients have more examples in all, and `examples`
    is None. `overrides` change `config`, under what a cell is about.
    """

    data: Annotated[
        str | None,
        Option(
            "--data",
            "Folder with imdb, ag_news, ..., each with train.tsv.gz and test.tsv.gz; empty is the hub.",
            kind=Path,
            read=absolute_path,
        ),
    ] = None
    preset: Annotated[
        Literal["ours", "paper", "quick"],
        Option(
            "--preset",
            "Whose settings: ours, which is empty too, or the paper's (days on a GPU).",
            has_default=False,
            choices=("ours", "paper"),
        ),
    ] = "ours"
    quick: Quick = Field(False, exclude=True)
    encoders: Annotated[
        tuple[str, ...],
        list_option(
            "--encoders",
            "As model.server_model, with commas between; random:X is X's shape with random values, dense:X is X with"
            " DistilBERT's classifier.",
            read_names,
            "LIST",
        ),
    ]
    tasks: Annotated[
        tuple[str, ...], list_option("--tasks", "Classifications, such as imdb,ag_news,yelp.", read_names, "LIST")
    ]
    clients: Annotated[
        tuple[int, ...],
        list_option(
            "--clients", "Numbers of clients; 1 is the baseline. Empty is 1,2,4,8,16,32.", read_whole_numbers, "LIST"
        ),
    ]
    seeds: Annotated[
        tuple[int, ...],
        list_option("--seeds", "Seeds, with commas between: scores are means over them.", read_whole_numbers, "LIST"),
    ]
    seed_rows: Annotated[
        str, Option("--seed-rows", "Which setups get all seeds, such as '*-32'; others get the first.")
    ] = "*"
    rows: Rows = "*"
    rounds: Annotated[
        Mapping[str, int],
        Option(
            "--rounds", "Rounds after which accuracies are compared.", metavar="N", least=1, kind=int, has_default=False
        ),
    ]
    threshold_rounds: Annotated[
        Mapping[str, int],
        Option(
            "--threshold-rounds",
            "Rounds to try for 90% of one client's; empty is twice --rounds.",
            metavar="N",
            least=1,
            kind=int,
            has_default=False,
        ),
    ]
    examples: Annotated[
        int | None, number_option("--examples", "Training examples that are divided; 0 is all.", least=0)
    ] = None
    examples_per_client: Annotated[
        int | None,
        number_option(
            "--examples-per-client", "Training examples that each client gets, in place of a total that is divided."
        ),
    ] = None
    validation: Annotated[
        int | None, number_option("--validation", "Rows that score every round, drawn by seed; 0 is all.", least=0)
    ] = None
    score_on: Annotated[
        Literal["official", "train"],
        Option(
            "--score-on", "The dev or test rows of --data or the hub, or a tenth cut from train: to choose settings."
        ),
    ] = "official"
    partition: Annotated[
        str, Option("--partition", "How examples are divided: iid, or dirichlet:ALPHA.", metavar="KIND")
    ] = "iid"
    local_epochs: Annotated[int | None, Option("--local-epochs", "As training.local_epochs.", metavar="N", least=1)] = (
        Field(None, exclude=True)
    )
    optimizer: Annotated[Literal["adamw", "sgd"] | None, Option("--optimizer", "As training.optimizer.")] = Field(
        None, exclude=True
    )
    learning_rate: Annotated[float | None, Option("--learning-rate", "As training.learning_rate.", metavar="X")] = (
        Field(None, exclude=True)
    )
    rates: Annotated[
        Rates,
        Option("--rate", "Learning rates by setup; the last that fits counts.", metavar="NAME=X,...", read=read_rates),
    ] = ()
    batch_size: Annotated[int | None, Option("--batch-size", "As training.batch_size.", metavar="N", least=1)] = Field(
        None, exclude=True
    )
    max_length: Annotated[int | None, Option("--max-length", "As model.max_length.", metavar="N", least=1)] = Field(
        None, exclude=True
    )
    overrides: Annotated[
        tuple[str, ...], Option("--set", "Replace a setting that the cells have in common.", metavar="KEY=VALUE")
    ] = ()
    config: Mapping[str, Any]

    @classmethod
    def complete(cls, given: Settings) -> Settings:
        """Return the preset with what was given put over it; 0 examples or validation rows are all."""
        refuse_both(given.get("preset"), quick=given.get("quick", False))
        preset = "quick" if given.get("quick") else given.get("preset", "ours")
        found = read_preset("scaling", preset)
        config: Settings = copy.deepcopy(found.pop("config"))
        # A preset's rates belong to its optimizer and learning rate.
        rates = () if {"learning_rate", "optimizer"} & given.keys() else preset_rates(found)
        for name, section in CONFIG_OPTIONS.items():
            if name in given:
                config.setdefault(section, {})[name] = given[name]
        # A preset's threshold belongs to its rounds.
        longest = found.pop("threshold_rounds", None)
        threshold = given.get("threshold_rounds", None if "rounds" in given else longest)
        values = {**found, **given, "preset": preset, "config": config}
        if given.get("examples_per_client"):
            if given.get("examples"):
                raise ConfigError("--examples-per-client: --examples is a total that is divided; leave one of them out")
            values["examples"] = None
        rounds = _by_task(values["rounds"], tuple(values["tasks"]))
        return values | {
            "rounds": rounds,
            "threshold_rounds": {task: threshold or LONGER * number for task, number in rounds.items()},
            "rates": (*rates, *given.get("rates", ())),
            **{name: values[name] or None for name in ("examples", "validation")},
        }

    @model_validator(mode="after")
    def _check(self) -> Self:
        for option, listed in (("--encoders", self.encoders), ("--tasks", self.tasks), ("--seeds", self.seeds)):
            if not listed:
                raise ConfigError(f"{option}: found none; write some with commas between")
        if not self.clients or min(self.clients) < 1:
            raise ConfigError("--clients: found none, or less than 1; write such as 1,2,4,8,16,32")
        for task in self.tasks:
            if task not in BUILTIN or BUILTIN[task].kind != "classification":
                raise ConfigError(f"--tasks: {task} is no built-in classification; write such as imdb,ag_news")
            if self.threshold_rounds[task] < self.rounds[task]:
                raise ConfigError(
                    f"--threshold-rounds: found {self.threshold_rounds[task]}, fewer than the {self.rounds[task]} of"
                    " --rounds; write as many or more"
                )
        if self.examples is not None and self.examples < max(self.clients):
            raise ConfigError(f"--examples: found {self.examples} for {max(self.clients)} clients; write more")
        if self.examples_per_client is not None and self.partition != "iid":
            raise ConfigError(
                f"--examples-per-client: --partition {self.partition} gives clients other numbers of them; write iid"
            )
        if self.quick and self.data is not None:
            raise ConfigError("--data: --quick is on embedded data; leave one of them out")
        labels = [encoder_label(encoder) for encoder in self.encoders]
        twice = next((label for label in labels if labels.count(label) > 1), None)
        if twice is not None:
            raise ConfigError(f"--encoders: two are called {twice}, and cells are named by it; rename a folder")
        read_partition(self.partition)
        return self

    @property
    def folder_name(self) -> str:
        return "scaling" if self.preset == "ours" else f"scaling-{self.preset}"


def _by_task(rounds: int | Mapping[str, int], tasks: tuple[str, ...]) -> dict[str, int]:
    if isinstance(rounds, int):
        return dict.fromkeys(tasks, rounds)
    lacking = [task for task in tasks if task not in rounds]
    if lacking:
        raise ConfigError(f"--rounds: the preset has none for {lacking[0]}; write --rounds N")
    return {task: rounds[task] for task in tasks}


def plan(options: ScalingOptions, folder: StudyFolder) -> Plan[Result]:
    """Return all cells and the page of them."""
    HONOURS.check(options.overrides, options.tasks)
    wanted = wanted_setups(options)
    if not wanted:
        raise ConfigError(f"--rows: no setup fits {options.rows}; setups are called such as tiny-imdb-32")
    runs: Runs = {
        setup.name: {seed: folder.cell(setup.cell(seed)) for seed in seeds_of(options, setup.name)} for setup in wanted
    }
    scored = {task: scored_rows(options, task) for task in options.tasks}
    return Plan(
        cells=make_cells(options),
        runs=runs,
        page=lambda results: show(Known(options, {setup: results[setup.name] for setup in wanted}), scored),
    )


HONOURS = Honours(
    "study scaling",
    EVERY,
    {
        **ONLY_SERVER,
        "output": "a study writes into runs/; name its folder with --name",
        "seed": "write --seeds",
        "defaults": "every setting is in the study's preset; leave it out",
        "model.server_model": "write --encoders",
        "model.client_model": "write --encoders",
        "model.initial": "write --encoders random:X",
        "clients": "write --clients",
        "federation.clients_per_task": "write --clients",
        "partition.kind": "write --partition",
        "partition.alpha": "write --partition dirichlet:ALPHA",
        "partition.column": "write --partition",
        "training.num_rounds": "write --rounds",
        "training.learning_rate": "write --learning-rate, or --rate for some setups",
        "training.schedule": "rates stay constant, so that rounds of any number are alike; leave it out",
        "evaluation.every": "every round is scored; leave it out",
        "tasks.*.source": "write --data",
        "tasks.*.train_samples": "write --examples",
        "tasks.*.val_samples": "write --validation",
    },
)
STUDY = Study(
    name="scaling",
    title="scaling",
    help="Divide the same examples among 1 to 32 clients: accuracy, rounds to 90% of one client's, collapse to chance.",
    options=ScalingOptions,
    plan=plan,
    read=read_result,
    honours=HONOURS,
)


def wanted_setups(options: ScalingOptions) -> list[Setup]:
    """Return all that are wanted, as tables show them: by task, encoder and number of clients."""
    every = (
        Setup(encoder_label(encoder), task, clients)
        for task in options.tasks
        for encoder in options.encoders
        for clients in sorted(options.clients)
    )
    return [setup for setup in every if fits(setup.name, options.rows)]


def make_cells(options: ScalingOptions) -> list[Cell]:
    """Return the cells, first those that say most if time is short: a seed's baselines, then many clients."""
    base = base_settings(options)
    encoders = {encoder_label(encoder): encoder for encoder in options.encoders}
    return [
        _cell(options, base, encoders[setup.encoder], setup, seed)
        for seed in options.seeds
        for setup in _by_weight(options)
        if seed in seeds_of(options, setup.name)
    ]


def _by_weight(options: ScalingOptions) -> Iterator[Setup]:
    yield from sorted(wanted_setups(options), key=lambda setup: (setup.clients > 1, -setup.clients))


def base_settings(options: ScalingOptions) -> Settings:
    """Return what all cells have in common, the user's data and overrides included."""
    base: Settings = dict(options.config)
    if options.data is not None:
        base["data"] = {**base.get("data", {}), "root": options.data, "source": "files"}
    return with_overrides(with_absolute_paths(base, Path.cwd()), options.overrides)


def _cell(options: ScalingOptions, base: Settings, encoder: str, setup: Setup, seed: int) -> Cell:
    rounds, rate = rounds_of(options, setup), rate_for(options.rates, setup.name)
    sections: dict[str, Settings] = {
        "model": encoder_settings(encoder),
        "training": {"num_rounds": rounds, "schedule": "constant", **({} if rate is None else {"learning_rate": rate})},
        "federation": {"clients_per_task": setup.clients},
        "partition": read_partition(options.partition) | _fewest(options),
        "evaluation": {"every": 1},
    }
    settings = {**base, **{name: {**(base.get(name) or {}), **section} for name, section in sections.items()}}
    given = (base.get("tasks") or {}).get(setup.task) or {}
    settings |= {"seed": seed, "tasks": {setup.task: {**given, **_task(options, setup), **head_settings(encoder)}}}
    # Each client is a model to send and to average, whatever it trains on.
    work = rounds * ((_examples(options, setup) or 25_000) + 100 * setup.clients)
    return Cell(setup.cell(seed), with_absolute_paths(settings, Path.cwd()), work=float(work))


def _task(options: ScalingOptions, setup: Setup) -> Settings:
    sizes = {"train_samples": _examples(options, setup), "val_samples": options.validation}
    if options.data is None:
        return {**sizes, **_hub_task(options, setup.task)}
    return {**sizes, "source": _source(options, setup.task)}


def _hub_task(options: ScalingOptions, task: str) -> Settings:
    """Return the source of a task without --data: the hub's test rows score where it has some and nothing else."""
    split = scored_split(options, task)
    if split is None:
        return {}
    hub = BUILTIN[task].hub
    assert hub is not None
    splits = {"train_split": hub.train_split, "validation_split": split, "scores_test": True}
    return {
        "source": {"hub": hub.dataset, "subset": hub.subset, **splits},
        "text": list(hub.text),
        "label": hub.label,
    }


def scored_split(options: ScalingOptions, task: str) -> str | None:
    """Return the hub's test split that scores a task; None where files, a validation split or a tenth of train do."""
    hub = BUILTIN[task].hub
    is_hub = options.data is None and not options.quick and hub is not None and hub.validation_split is None
    return hub.test_split if hub is not None and is_hub and options.score_on == "official" else None


def _examples(options: ScalingOptions, setup: Setup) -> int | None:
    """Return how many examples all clients of a setup have together; None is all there are."""
    if options.examples_per_client is None:
        return options.examples
    return options.examples_per_client * setup.clients


def _fewest(options: ScalingOptions) -> Settings:
    """Where every client is to have so many examples, fewer are an error of the run, not a smaller share."""
    return {} if options.examples_per_client is None else {"min_examples": options.examples_per_client}


def _source(options: ScalingOptions, task: str) -> dict[str, Any]:
    folder = Path(options.data or "") / task
    # A file that is not there is named by the run that wants it.
    train = find_table(folder, ["train"]) or folder / "train.tsv.gz"
    scored = scored_file(options, task)
    return {"train": str(train), **({} if scored is None else {"validation": str(scored)})}


def scored_file(options: ScalingOptions, task: str) -> Path | None:
    """Return the official rows that nobody trains on; None where a part of train is cut off instead.

    Test rows may be read here: a fixed number of rounds ends every run, and nothing is chosen by what it scores.
    """
    if options.data is None or options.score_on != "official":
        return None
    return find_table(Path(options.data) / task, SCORED)


def scored_rows(options: ScalingOptions, task: str) -> str | None:
    """Return what the page calls the official rows that score a task; None where there are none."""
    file, split = scored_file(options, task), scored_split(options, task)
    return file.name if file is not None else None if split is None else f"the hub's {split} split"


def encoder_settings(encoder: str) -> Settings:
    """Return the section `model` of an encoder: its values, or random ones of the same shape."""
    known = encoder.removeprefix(DENSE)
    name = known.removeprefix(RANDOM)
    return {"server_model": name, "initial": "pretrained" if name == known else "random"}


def head_settings(encoder: str) -> Settings:
    """Return what the task of an encoder has of its own: with `dense:`, DistilBERT's classifier."""
    return DENSE_HEAD if encoder.startswith(DENSE) else {}


def read_partition(text: str) -> Settings:
    """Return `iid`, or `dirichlet:0.5`, as the section `partition`."""
    kind, sign, alpha = text.partition(":")
    try:
        if kind == "iid" and not sign:
            return {"kind": "iid"}
        if kind == "dirichlet" and float(alpha) > 0:
            return {"kind": "dirichlet", "alpha": float(alpha)}
    except ValueError:
        pass
    raise ConfigError(f"--partition: found {text}; write iid, or such as dirichlet:0.5")
