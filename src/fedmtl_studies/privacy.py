"""The study of privacy: its options, its three groups of cells, and the files that they train on.

* `member-*`: a federation that trains for so long that it memorises; `reference-*` are the same on other examples.
* `words-*`: one step, or one epoch, of a client with few texts.
* `poison-*`: three clients of one task, one of them hostile, and a client of each further task.

The files of every client are written into the study's folder, so that who trained on what is known for certain.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from fedmtl_studies.cells import Cell, Tap
from fedmtl_studies.folder import StudyFolder, cell_name
from fedmtl_studies.library import (
    AGGREGATORS,
    BUILTIN,
    EVERY,
    ONLY_SERVER,
    ConfigError,
    DataError,
    Honours,
    embedded_columns,
    find_table,
    read_table,
    with_absolute_paths,
    with_overrides,
    write_atomic,
)
from fedmtl_studies.options import (
    Overrides,
    Quick,
    Rows,
    Settings,
    StudyOptions,
    check_seeds,
    check_tables,
    data_option,
    fits,
    list_option,
    merged,
    number_option,
    read_names,
    read_numbers,
    read_whole_numbers,
)
from fedmtl_studies.privacy_attacks import ATTACKS, Curious, Hostile
from fedmtl_studies.privacy_page import EPOCH, Result, read_result, show
from fedmtl_studies.results import Runs
from fedmtl_studies.study import Plan, Study

TARGET = "site_1"
SITES = (TARGET, "site_2", "site_3")
# Rows beside the members of a seed, as many times the examples of a client: those nobody trains on.
MOST_OTHERS = 2000
TABLES = (1, 2, 3)
# Of a client in a round of table 1: as many as it takes to memorise.
EPOCHS = 10
TABLE_FIXED: Settings = {"sharing": {"rules": [{"heads.*": "task"}, {"embeddings.*": "fixed"}, {"*": "all"}]}}
TABLE_PERSONAL: Settings = {
    "sharing": {"rules": [{"heads.*": "task"}, {"embeddings.*": "client"}, {"*": "all"}]},
    "evaluation": {"where": "clients"},
}
DENSE: Settings = {"federation": {"vocabulary_slices": False}}
SECURE: Settings = {**DENSE, "privacy": {"secure_aggregation": {}}}


class PrivacyOptions(StudyOptions):
    """What the study is to do.

    `examples` are those of one client in table 1, `poison_examples` those of the first task in table 3; rounds alike.
    `rules` None are all aggregation rules that there are.
    """

    miniature: ClassVar[Mapping[str, Any]] = {
        "tasks": ("sentiment", "paraphrase", "similarity"),
        "epsilons": (8.0, 1.0),
        "batches": (1, 8),
        "examples": 40,
        "others": 400,
        "rounds": 3,
        "references": 2,
        "poison_examples": 240,
        "poison_rounds": 3,
    }

    data: Annotated[str | None, data_option("Folder with sst2, qqp, stsb, each with train.tsv.gz and dev.tsv.gz.")] = (
        None
    )
    quick: Quick = False
    tasks: Annotated[
        tuple[str, ...],
        list_option("--tasks", "Three tasks; the first, a classification, is the attacked one.", read_names, "LIST"),
    ] = ("sst2", "qqp", "stsb")
    encoder: Annotated[str, list_option("--encoder", "As model.server_model.", lambda text, flag: text)] = "tiny"
    seeds: Annotated[
        tuple[int, ...], list_option("--seeds", "Whole numbers with commas between.", read_whole_numbers, "LIST")
    ] = (0,)
    tables: Annotated[
        tuple[int, ...],
        list_option("--tables", "1 is membership, 2 words, 3 poisoning.", read_whole_numbers, "LIST"),
    ] = TABLES
    epsilons: Annotated[
        tuple[float, ...], list_option("--epsilons", "Rows of privacy.example.", read_numbers, "LIST")
    ] = (8.0, 3.0, 1.0)
    batches: Annotated[
        tuple[int, ...], list_option("--batches", "Texts behind one step in table 2.", read_whole_numbers, "LIST")
    ] = (1, 8, 32)
    examples: Annotated[int, number_option("--examples", "Examples of each client in table 1.")] = 300
    others: Annotated[int, number_option("--others", "Examples that nobody trains on.", least=100)] = MOST_OTHERS
    rounds: Annotated[int, number_option("--rounds", "Rounds in table 1, of ten epochs each.")] = 6
    references: Annotated[int, number_option("--references", "Reference models of table 1.", least=0)] = 4
    poison_examples: Annotated[
        int, number_option("--poison-examples", "Examples of the first task in table 3.", least=6)
    ] = 900
    poison_rounds: Annotated[int, number_option("--poison-rounds", "Rounds in table 3.")] = 6
    rules: Annotated[
        tuple[str, ...] | None,
        list_option("--rules", "Aggregation rules of table 3; empty is every one there is.", read_names, "LIST"),
    ] = None
    rows: Rows = "*"
    overrides: Overrides = Field((), exclude=False)

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_seeds(self.seeds)
        check_tables(self.tables, TABLES)
        if self.quick and self.data is not None:
            raise ConfigError("--data: --quick is on embedded data; leave one of them out")
        if not self.quick and self.data is None:
            raise ConfigError(f"--data: missing; name a folder with {', '.join(self.tasks)}, or write --quick")
        unknown = next((task for task in self.tasks if task not in BUILTIN), None)
        if unknown is not None or not self.tasks or BUILTIN[self.tasks[0]].kind != "classification":
            raise ConfigError(
                f"--tasks: found {', '.join(self.tasks) or 'none'}; write built-in tasks, a classification first, such"
                " as sst2,qqp,stsb"
            )
        if not self.batches or min(self.batches) < 1:
            raise ConfigError("--batches: found none, or less than 1; write such as 1,8,32")
        return self

    @property
    def folder_name(self) -> str:
        return "privacy-quick" if self.quick else "privacy"

    @property
    def all_rules(self) -> tuple[str, ...]:
        return tuple(AGGREGATORS) if self.rules is None else self.rules


@dataclass(frozen=True)
class Setup:
    """A row of a table before it has a seed: what its config has over that of its group, and who taps it."""

    name: str
    table: int
    settings: Settings
    attack: str = ""
    texts: int = 0
    is_epoch: bool = False


def setups(options: PrivacyOptions) -> list[Setup]:
    """Return every setup that the options ask for."""
    makers = {1: _membership, 2: _words, 3: _poisoning}
    found = [setup for table in TABLES if table in options.tables for setup in makers[table](options)]
    wanted = [setup for setup in found if fits(setup.name, options.rows) or setup.name.startswith("reference-")]
    # References are for the rows that they calibrate.
    if not any(setup.name.startswith("member-") for setup in wanted):
        wanted = [setup for setup in wanted if not setup.name.startswith("reference-")]
    if not wanted:
        raise ConfigError(
            f"--rows: no setup fits {options.rows}; setups are called such as member-none or words-8-plain"
        )
    return wanted


def example_noise(epsilon: float) -> Settings:
    return {**DENSE, "privacy": {"example": {"epsilon": epsilon}}}


def client_noise(epsilon: float) -> Settings:
    # Every client counts alike, or one with many examples could not be bounded as the others are.
    federation = {**DENSE["federation"], "average": "uniform"}
    return {"federation": federation, "privacy": {"client": {"epsilon": epsilon}}}


def _membership(options: PrivacyOptions) -> Iterator[Setup]:
    yield Setup("member-none", 1, DENSE)
    for epsilon in options.epsilons:
        yield Setup(f"member-example-{epsilon:g}", 1, example_noise(epsilon))
    yield Setup(f"member-client-{max(options.epsilons):g}", 1, client_noise(max(options.epsilons)))
    for number in range(options.references):
        yield Setup(f"reference-{number}", 1, DENSE)


def protections(options: PrivacyOptions) -> dict[str, Settings]:
    """Return what table 2 compares, by name."""
    weakest = max(options.epsilons)
    return {
        "plain": {},
        "dense": DENSE,
        f"example-{weakest:g}": example_noise(weakest),
        f"client-{weakest:g}": client_noise(weakest),
        "secure": SECURE,
        "fixed": TABLE_FIXED,
        "personal": TABLE_PERSONAL,
    }


def _words(options: PrivacyOptions) -> Iterator[Setup]:
    for name, settings in protections(options).items():
        for texts in options.batches:
            yield Setup(f"words-{texts}-{name}", 2, settings, texts=texts)
        yield Setup(f"words-{EPOCH}-{name}", 2, settings, texts=options.examples, is_epoch=True)


def _poisoning(options: PrivacyOptions) -> Iterator[Setup]:
    for rule in options.all_rules:
        for attack in ATTACKS:
            yield Setup(f"poison-{attack}-{rule}", 3, {"federation": {"aggregation": rule}}, attack)


def plan(options: PrivacyOptions, folder: StudyFolder) -> Plan[Result]:
    """Return all cells and the page of them."""
    HONOURS.check(options.overrides, options.tasks)
    wanted = setups(options)
    runs: Runs = {
        setup.name: {seed: folder.cell(cell_name(setup.name, seed)) for seed in options.seeds} for setup in wanted
    }
    cells = [cell for seed in options.seeds for cell in _cells(options, wanted, seed, folder)]
    return Plan(cells=cells, runs=runs, page=lambda results: show(options, wanted, results))


def _cells(options: PrivacyOptions, wanted: Sequence[Setup], seed: int, folder: StudyFolder) -> list[Cell]:
    files = Files(options, folder.path / "data" / f"seed{seed}", seed)
    makers = {1: _member_cell, 2: _words_cell, 3: _poison_cell}
    return [makers[setup.table](options, setup, seed, files) for setup in wanted]


def _base(options: PrivacyOptions) -> Settings:
    base: Settings = {
        "defaults": "plain",
        "model": {"server_model": options.encoder, "pool": "mean", "pair": "dual", "encoder_dropout": 0.0},
        "training": {"learning_rate": 1e-3, "batch_size": 16},
        "evaluation": {"every": 1, "where": "server"},
    }
    if options.quick:
        base = merged(base, {"model": {"max_length": 32}})
    return with_overrides(with_absolute_paths(base, Path.cwd()), options.overrides)


def _cell(options: PrivacyOptions, setup: Setup, seed: int, settings: Settings, tap: Tap | None, work: float) -> Cell:
    whole = merged(merged(_base(options), settings), setup.settings)
    return Cell(cell_name(setup.name, seed), with_absolute_paths({**whole, "seed": seed}, Path.cwd()), work, tap=tap)


def _clients(task: str, trains: Sequence[Path], validation: Path) -> Settings:
    """Return clients of one task, each with a file of its own; all are scored on the same one."""
    sources = {
        client: {"tasks": [task], "source": {task: {"train": str(train), "validation": str(validation)}}}
        for client, train in zip(SITES, trains, strict=True)
    }
    return {"clients": sources, "tasks": {task: {"source": {"train": str(trains[0]), "validation": str(validation)}}}}


def _member_cell(options: PrivacyOptions, setup: Setup, seed: int, files: Files) -> Cell:
    task, others = options.tasks[0], files.others
    group = setup.name if setup.name.startswith("reference-") else "member"
    trains = files.trains(group, options.examples)
    members = files.trains("member", options.examples)[0]
    training = {"num_rounds": options.rounds, "local_epochs": EPOCHS}
    tap = Curious(TARGET, task, str(members), str(others))
    settings = {**_clients(task, trains, others), "training": training}
    return _cell(options, setup, seed, settings, tap, 3.0 * options.examples * options.rounds * EPOCHS)


def _words_cell(options: PrivacyOptions, setup: Setup, seed: int, files: Files) -> Cell:
    task = options.tasks[0]
    trains = files.trains(f"words-{setup.texts}", setup.texts)
    steps = {"local_epochs": 20} if setup.is_epoch else {"local_steps": 1, "batch_size": setup.texts}
    # A step of plain SGD is the gradient itself, which is the most that a step can tell.
    training = {"num_rounds": 1, "optimizer": "sgd", "learning_rate": 0.1, **steps}
    settings = {**_clients(task, trains, files.others), "training": training}
    return _cell(options, setup, seed, settings, Curious(TARGET, task, reads_words=True), setup.texts * 3.0)


def _poison_cell(options: PrivacyOptions, setup: Setup, seed: int, files: Files) -> Cell:
    task, *further = options.tasks
    # A third for each of three clients, so that the hostile one has no more than the others.
    trains = files.trains("poison", options.poison_examples // len(SITES))
    if ATTACKS[setup.attack].flips:
        trains = [files.flipped(trains[0]), *trains[1:]]
    settings = _clients(task, trains, files.others)
    for name in further:
        settings["tasks"][name] = files.further(name)
        settings["clients"][f"{name}_1"] = {"tasks": [name]}
    settings["training"] = {"num_rounds": options.poison_rounds}
    settings["evaluation"] = {"every": options.poison_rounds}
    work = options.poison_examples * options.poison_rounds * float(len(options.tasks))
    return _cell(options, setup, seed, settings, Hostile(TARGET, setup.attack), work)


class Files:
    """The rows of the attacked task, shuffled by seed and dealt out: to those nobody trains on, then to whoever asks.

    Each name gets rows that no other one has, and the same ones whenever the study goes on.
    """

    def __init__(self, options: PrivacyOptions, folder: Path, seed: int) -> None:
        self.options, self.folder, self.seed = options, folder, seed
        self.task = options.tasks[0]
        self._rows: list[tuple[str, ...]] | None = None
        self._columns: tuple[str, ...] = ()

    @property
    def others(self) -> Path:
        """The examples that no client trains on, of the same distribution."""
        return self._write("others", self._draw("others", self.options.others))

    def trains(self, group: str, each: int) -> list[Path]:
        """Return a file of so many examples for each of the clients."""
        return [self._write(f"{group}-{site}", self._draw(f"{group}-{site}", each)) for site in SITES]

    def flipped(self, train: Path) -> Path:
        """Return a client's file with every label turned into the one at the other end of the list."""
        columns = read_table(train).columns
        at = BUILTIN[self.task].label
        labels = sorted(set(columns[at]))
        other = dict(zip(labels, reversed(labels), strict=True))
        rows = zip(*({**columns, at: [other[label] for label in columns[at]]}).values(), strict=True)
        return self._write(f"{train.stem}-flipped", list(rows))

    def further(self, task: str) -> Settings:
        """Return the section of a task that is not attacked; its one client has as many examples as the others."""
        sizes = {"train_samples": self.options.poison_examples // len(SITES), "val_samples": self.options.others // 2}
        if self.options.data is None:
            return sizes
        folder = Path(self.options.data).expanduser().absolute() / task
        found = {"train": find_table(folder, ["train"]), "validation": find_table(folder, ["dev", "validation"])}
        source = {name: str(path) for name, path in found.items() if path is not None}
        if "train" not in source:
            raise DataError(f"{folder}: has no train file; put train.tsv.gz there")
        return {"source": source, **sizes}

    def _draw(self, name: str, count: int) -> list[tuple[str, ...]]:
        """Return the rows of one name: where each begins does not depend on which of them a study asks for."""
        sizes = self._sizes()
        start = 0
        for other, size in sizes.items():
            if other == name:
                break
            start += size
        rows = self._shuffled()
        if start + count > len(rows):
            raise DataError(
                f"{self.task}: has {len(rows)} different training rows, and {name} wants rows {start + 1} to"
                f" {start + count}; lower --examples, --others, --references or --poison-examples"
            )
        return rows[start : start + count]

    def _sizes(self) -> dict[str, int]:
        """Return how many rows each name has, in the order in which they are dealt."""
        options = self.options
        sizes = {"others": options.others}
        groups = [("member", options.examples), ("poison", options.poison_examples // len(SITES))]
        groups += [(f"words-{texts}", texts) for texts in sorted({*options.batches, options.examples})]
        groups += [(f"reference-{number}", options.examples) for number in range(options.references)]
        for group, each in groups:
            sizes |= {f"{group}-{site}": each for site in SITES}
        return sizes

    def _shuffled(self) -> list[tuple[str, ...]]:
        if self._rows is None:
            columns = self._read()
            builtin = BUILTIN[self.task]
            self._columns = (*builtin.text, builtin.label)
            lacking = next((name for name in self._columns if name not in columns), None)
            if lacking is not None:
                raise DataError(f"{self.task}: has no column {lacking!r}, it has {', '.join(columns)}; rename one")
            rows = zip(*(columns[name] for name in self._columns), strict=True)
            # The same text in two files would be a member and none.
            different = list({row[:-1]: row for row in rows}.values())
            random.Random(self.seed).shuffle(different)
            self._rows = different
        return self._rows

    def _read(self) -> Mapping[str, list[str]]:
        if self.options.data is None:
            return embedded_columns(self.task, "train")
        folder = Path(self.options.data).expanduser() / self.task
        found = find_table(folder, ["train"])
        if found is None:
            raise DataError(f"{folder}: has no train file; put train.tsv.gz there")
        return read_table(found).columns

    def _write(self, name: str, rows: Sequence[tuple[str, ...]]) -> Path:
        """Write a tsv, which has no quoting: tabs and line ends inside a text become spaces."""
        self._shuffled()
        path = (self.folder / f"{name}.tsv").absolute()
        lines = ["\t".join(self._columns), *("\t".join(" ".join(value.split()) for value in row) for row in rows)]
        text = ("\n".join(lines) + "\n").encode()
        if not path.exists() or path.read_bytes() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text)
        return path


HONOURS = Honours(
    "study privacy",
    EVERY,
    {
        **ONLY_SERVER,
        "output": "a study writes into runs/; name its folder with --name",
        "seed": "write --seeds",
        "mode": "attacks are on a federation; leave it out",
        "tasks": "write --tasks, --examples and --data",
        "clients": "every client has a file of its own; leave it out",
        "privacy": "write --epsilons, or --rows for some of the protections",
        "federation.aggregation": "write --rules",
        "federation.vocabulary_slices": "it is a row of table 2; leave it out",
        "training.num_rounds": "write --rounds or --poison-rounds",
        "training.local_epochs": "each table has its own; leave it out",
        "training.local_steps": "each table has its own; leave it out",
        "evaluation.every": "every round is looked at; leave it out",
        "evaluation.where": "each table has its own; leave it out",
        "model.server_model": "write --encoder",
    },
)
STUDY = Study(
    name="privacy",
    title="privacy",
    help="Attack a federation: who was trained on, which words a client's texts use, what a hostile client can do.",
    options=PrivacyOptions,
    plan=plan,
    read=read_result,
    honours=HONOURS,
)
