"""The study of federated against centralized: its options, every setup, which table shows it, and its cells.

It rebuilds "Performance Comparison: Federated MTL vs Published Tiny BERT", a comparison of a federation of three
clients (sst2, qqp, stsb; 300 samples each; 30 rounds) with numbers of other models from the literature. The point
`original` has its samples, clients and rounds.
Where we differ:

* What a federation is compared with are runs of the same model on the same examples, as often.
* A base point (all samples, iid, three clients per task) and lines through it, not the whole product; every mode at
  every point.
* Official dev sets, Pearson's r for similarity; a score of another name stands under that name.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedmtl_studies.cells import Cell
from fedmtl_studies.federated_page import CHOOSING, CONFIG_GUIDE, GUIDE, show
from fedmtl_studies.federated_results import (
    BASE,
    CENTRALIZED,
    FEDERATED,
    FEW,
    FIRST,
    LONG,
    MODES,
    ORIGINAL,
    VARIANTS,
    Known,
    Point,
    Result,
    Setup,
    read_result,
)
from fedmtl_studies.folder import StudyFolder, cell_name
from fedmtl_studies.library import (
    BUILTIN,
    EVERY,
    ONLY_SERVER,
    ConfigError,
    Honours,
    find_table,
    load_config,
    read_table,
    with_absolute_paths,
    with_overrides,
)
from fedmtl_studies.options import (
    Option,
    Overrides,
    Quick,
    Rates,
    Rows,
    Settings,
    StudyOptions,
    check_seeds,
    data_option,
    fits,
    list_option,
    merged,
    number_option,
    path_text,
    preset_rates,
    rate_for,
    read_numbers,
    read_preset,
    read_rates,
    read_whole_numbers,
    refuse_both,
    seeds_of,
)
from fedmtl_studies.results import Runs
from fedmtl_studies.study import Plan, Study

TASKS = ("sst2", "qqp", "stsb")
QUICK_TASKS = ("sentiment", "paraphrase", "similarity")
# Fewer of similarity, as in the real data: weights by examples then differ from equal ones.
QUICK_SAMPLES = (96, 96, 48)


def read_override(text: str) -> tuple[str, str]:
    """Return `federated-prox:training.proximal=1` as a pattern and an override."""
    names, sign, override = text.partition(":")
    if not sign or not names.strip() or "=" not in override:
        raise ConfigError(f"--set-for {text}: write `NAME:KEY=VALUE`, such as federated-prox:training.proximal=1")
    return names.strip().replace("_", "-"), override


class FederatedOptions(StudyOptions):
    """What the study is to do; what is given goes over a preset.

    `rates` are (pattern, learning rate) of setups or of their kinds; the last that fits counts. With `choose` every
    kind runs once with each of these rates, on a split cut from train, and nothing else runs. `overrides` change what
    all cells have in common, and leave alone what a row is about; `own_overrides` are (pattern, override) of setups or
    kinds, over all else.
    """

    miniature: ClassVar[Mapping[str, Any]] = {
        "samples": (10, 20),
        "alphas": (5.0, 1.0, 0.5),
        "rounds": 2,
        "long_rounds": 4,
    }

    data: Annotated[
        str | None, data_option("Folder with sst2, qqp and stsb, each with train.tsv.gz and dev.tsv.gz.")
    ] = None
    config: Annotated[
        str | None,
        Option(
            "--config",
            "Your config: every mode is run on its tasks, sources and clients as they are.",
            metavar="FILE",
            kind=Path,
            read=path_text,
        ),
    ] = None
    preset: Annotated[
        Literal["tiny", "minilm-l6"] | None,
        Option("--preset", "The settings of docs/results/federated.md for this encoder; empty is none."),
    ] = Field(None, exclude=True)
    encoder: Annotated[
        str,
        Option("--encoder", "The encoder, as model.server_model; empty is the preset's, or tiny.", has_default=False),
    ] = "tiny"
    quick: Quick = False
    seeds: Annotated[
        tuple[int, ...],
        list_option(
            "--seeds",
            "Seeds, with commas between: scores are means over them. Empty is the preset's, or 0.",
            read_whole_numbers,
        ),
    ] = (0,)
    seed_rows: Annotated[
        str,
        Option("--seed-rows", "Which setups get all seeds, such as 'base-*'; others get the first.", has_default=False),
    ] = "*"
    rows: Rows = "*"
    samples: Annotated[
        tuple[int, ...],
        list_option(
            "--samples", "Samples of a client, beside all: 300,1000, with --quick 10,20.", read_whole_numbers, "N,..."
        ),
    ] = (300, 1000)
    # At 0.1, one of three clients may well get no example at all.
    alphas: Annotated[
        tuple[float, ...],
        list_option(
            "--alphas", "Dirichlet levels, beside iid: 5,0.5,0.2, with --quick 5,1,0.5.", read_numbers, "X,..."
        ),
    ] = (5.0, 0.5, 0.2)
    rounds: Annotated[int, number_option("--rounds", "Rounds: 8, with --quick 2.")] = 8
    long_rounds: Annotated[
        int, number_option("--long-rounds", "Rounds of `long` and `original`: 30, with --quick 4.")
    ] = 30
    rates: Annotated[
        Rates,
        Option(
            "--rate",
            "Learning rates by mode or setup; the last that fits counts.",
            metavar="NAME=X,...",
            read=read_rates,
        ),
    ] = ()
    choose: Annotated[
        tuple[float, ...],
        Option(
            "--choose",
            "Try these learning rates in every mode, on a split cut from train.",
            metavar="X,...",
            read=read_numbers,
        ),
    ] = ()
    overrides: Overrides = ()
    own_overrides: Annotated[
        tuple[tuple[str, str], ...],
        Option("--set-for", "Replace a setting of some modes or setups.", metavar="NAME:KEY=VALUE", each=read_override),
    ] = ()

    @classmethod
    def complete(cls, given: Settings) -> Settings:
        """Return the given values over a preset's; of rates and settings the last counts, so given ones come last."""
        preset, quick = given.get("preset"), given.get("quick", False)
        refuse_both(preset, quick=quick)
        if given.get("config") is not None:
            _check_alone(given)
            return {**given, **_of_config(given)}
        below = dict(cls.miniature) if quick else {} if preset is None else _read_preset(preset)
        lists = ("rates", "overrides", "own_overrides")
        return {**below, **given, **{name: (*below.get(name, ()), *given.get(name, ())) for name in lists}}

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_seeds(self.seeds)
        return self

    @property
    def folder_name(self) -> str:
        if self.config is not None:
            return f"federated-{Path(self.config).stem}"
        return f"federated{'-rates' if self.choose else ''}{'-quick' if self.quick else ''}"

    @property
    def tasks(self) -> tuple[str, ...]:
        if self.config is not None:
            return tuple(load_config(Path(self.config), self.overrides).tasks)
        return QUICK_TASKS if self.quick else TASKS

    @property
    def named_rates(self) -> Rates:
        """The rates as the names of setups are written: a config writes a mode with underscores, a setup has none."""
        return tuple((pattern.replace("_", "-"), rate) for pattern, rate in self.rates)

    def rate(self, setup: str, kind: str) -> float | None:
        """Return the rate that was given for a setup, by its name or its kind; None where none was."""
        return rate_for(self.named_rates, setup, kind)

    def overrides_of(self, setup: str, kind: str) -> list[str]:
        """Return what was given for a setup alone, by its name or its kind."""
        return [given for pattern, given in self.own_overrides if fits(setup, pattern) or fits(kind, pattern)]


def _check_alone(given: Settings) -> None:
    """Raise a ConfigError for an option that says what a config says, or that needs the study's own tasks."""
    flags = {
        "data": "--data", "quick": "--quick", "preset": "--preset", "encoder": "--encoder", "samples": "--samples",
        "alphas": "--alphas", "long_rounds": "--long-rounds", "choose": "--choose",
    }  # fmt: skip
    found = [flag for name, flag in flags.items() if given.get(name)]
    if found:
        raise ConfigError(
            f"--config: found {', '.join(found)} beside it; the config says what is trained on which data, so leave"
            " them out (settings change with --set, rounds with --rounds, learning rates with --rate)"
        )


def _of_config(given: Settings) -> Settings:
    """Return the options that a config replaces: its encoder, and its rounds where none are given."""
    loaded = load_config(Path(given["config"]), given.get("overrides", ()))
    if not loaded.tasks:
        raise ConfigError(f"{given['config']}: tasks: has none; write the tasks that are to be compared")
    rounds = given.get("rounds", loaded.training.num_rounds)
    return {"encoder": loaded.model.server_model, "rounds": rounds}


def _read_preset(name: str) -> Settings:
    found = read_preset("federated", name)
    return {
        "encoder": found["encoder"],
        "seeds": tuple(found["seeds"]),
        "seed_rows": found["seed_rows"],
        "rates": preset_rates(found),
        "overrides": tuple(found["set"]),
        "own_overrides": tuple(map(read_override, found["set_for"])),
    }


def plan(options: FederatedOptions, folder: StudyFolder) -> Plan[Result]:
    """Return the cells that the tables need, and the page of them."""
    check_names(options)
    every = setups(options)
    wanted = wanted_setups(options, every)
    base = open_base(options, folder)
    runs = make_runs(options, folder, wanted)
    data = "embedded, synthetic texts in miniature" if options.quick else options.config or options.data
    opening = f"Encoder {options.encoder} on {data}; seeds {', '.join(map(str, options.seeds))}."
    guide = CHOOSING if options.choose else GUIDE if options.config is None else CONFIG_GUIDE
    metrics = _metrics(options)
    points = {} if options.choose else lines(options)
    return Plan(
        cells=make_cells(options, base, every, wanted),
        runs=runs,
        page=lambda results: show(opening, guide, points, Known(wanted, metrics, results)),
    )


def _metrics(options: FederatedOptions) -> dict[str, str]:
    """Return every task's main metric."""
    if options.config is None:
        return {task: BUILTIN[task].metric for task in options.tasks}
    from fedmtl_studies.computing import resolve_task

    loaded = load_config(Path(options.config), options.overrides)
    return {task: resolve_task(loaded, task).metric for task in loaded.tasks}


HONOURS = Honours(
    "study federated",
    EVERY,
    {
        **ONLY_SERVER,
        "output": "a study writes into runs/; name its folder with --name",
        "seed": "write --seeds",
        "defaults": "every setting is in the study's preset; leave it out",
        "mode": "modes are what it compares; write --rows",
        "clients": "write --rows clients-1-*",
        "federation.clients_per_task": "write --rows clients-1-*",
        "training.num_rounds": "write --rounds and --long-rounds",
    },
)
STUDY = Study(
    name="federated",
    title="federated and centralized",
    help="Compare a federation with the same data in one place and at each client alone: modes, skew, samples,"
    " clients.",
    options=FederatedOptions,
    plan=plan,
    read=read_result,
    honours=HONOURS,
)


def check_names(options: FederatedOptions) -> None:
    """Raise a ConfigError for a rate or a setting that is meant for no setup there is."""
    every = setups(options.model_copy(update={"choose": ()}))
    names = sorted({*every, *(setup.kind for setup in every.values())})
    for option, given in (("--rate", options.named_rates), ("--set-for", options.own_overrides)):
        for pattern, _ in given:
            if not any(fits(name, pattern) for name in names):
                raise ConfigError(f"{option}: no setup and no kind fits {pattern}; there are {', '.join(names)}")


def wanted_setups(options: FederatedOptions, every: Mapping[str, Setup]) -> list[Setup]:
    """Return the setups that are wanted by name, in their order."""
    found = [setup for name, setup in every.items() if fits(name, options.rows)]
    if not found:
        raise ConfigError(f"--rows: no setup fits {options.rows}; there are {', '.join(every)}")
    return found


def points(options: FederatedOptions) -> list[Point]:
    """Return the base and the lines through it; with rates to choose from, the base once for each."""
    if options.config is not None:
        return [Point(BASE, f"{Path(options.config).name} as it is", options.rounds, is_given=True)]
    base = Point(BASE, "all samples, iid, 3 clients per task", options.rounds)
    if options.choose:
        return [
            replace(base, name=f"rate-{rate:g}", words=f"learning rate {rate:g}", rate=rate) for rate in options.choose
        ]
    few = min(options.samples, default=300)
    return [
        base,
        Point(LONG, f"as the base, {options.long_rounds} rounds", options.long_rounds),
        *(replace(base, name=f"dirichlet-{a:g}", words=f"Dirichlet {a:g}", alpha=a) for a in options.alphas),
        *(replace(base, name=f"samples-{n}", words=f"{n:,} samples a client", samples=n) for n in options.samples),
        replace(base, name=FEW, words="1 client per task", clients=1),
        Point(
            ORIGINAL,
            f"{few} samples, 1 client per task, {options.long_rounds} rounds",
            options.long_rounds,
            few,
            None,
            1,
        ),
    ]


def kinds_at(point: Point) -> list[str]:
    """Return all modes, and other federations where they are to help: iid, at Dirichlet 0.5, and over many rounds."""
    if point.is_given:
        return list(MODES)
    if point.name == LONG:
        return [FEDERATED, *VARIANTS]
    return [*MODES, *(VARIANTS if point.name in FIRST or point.rate is not None else ())]


def setups(options: FederatedOptions) -> dict[str, Setup]:
    """Return every setup by its name."""
    return {
        (name := f"{point.name}-{kind}"): Setup(name, point, kind, f"{_twin(point, kind)}-{kind}")
        for point in points(options)
        for kind in kinds_at(point)
    }


def _twin(point: Point, kind: str) -> str:
    """Return the point whose cell is shown: with all data in one folder it does not matter how it was dealt."""
    is_dealt_otherwise = point.alpha is not None or point.name == FEW
    return BASE if kind.startswith(CENTRALIZED) and is_dealt_otherwise else point.name


def lines(options: FederatedOptions) -> dict[int, list[str]]:
    """Return the points of each table that compares modes, in its order."""
    if options.config is not None:
        return {1: [BASE]}
    return {
        1: [BASE],
        2: [BASE, *(f"dirichlet-{a:g}" for a in options.alphas)],
        3: [*(f"samples-{n}" for n in options.samples), BASE],
        4: [FEW, BASE],
        6: list(FIRST),
    }


@dataclass(frozen=True)
class Base:
    """What all cells have in common, and how many training examples each task has."""

    settings: Settings
    sizes: Mapping[str, int]


def open_base(options: FederatedOptions, folder: StudyFolder) -> Base:
    """Return the settings of configs/glue-dual.yaml on the user's data; to choose rates, on its train files alone."""
    if options.config is not None:
        loaded = load_config(Path(options.config), options.overrides)
        return Base(loaded.model_dump(), dict.fromkeys(loaded.tasks, 1))
    if options.quick:
        sizes = dict(zip(options.tasks, QUICK_SAMPLES, strict=True))
        tasks = {task: {"train_samples": size, "val_samples": 40} for task, size in sizes.items()}
        return Base(_settings(options, {"source": "embedded"}, tasks), sizes)
    if options.data is None:
        raise ConfigError("--data: missing; name a folder with sst2, qqp and stsb, or write --quick or --config FILE")
    files = {task: _train_file(Path(options.data), task) for task in options.tasks}
    root = _copied(files, folder.path / "data/train") if options.choose else Path(options.data)
    settings = _settings(options, {"root": str(root), "source": "files"}, {task: {} for task in options.tasks})
    return Base(settings, {task: len(read_table(file)) for task, file in files.items()})


def _settings(options: FederatedOptions, data: Settings, tasks: Settings) -> Settings:
    model: Settings = {"server_model": options.encoder, "pair": "dual", "pool": "mean"}
    training = {"batch_size": 64, "learning_rate": 4e-4, "schedule": "linear", "warmup_rounds": 0.25}
    if options.quick:
        # As the demonstration: a tiny encoder learns something of pairs in a few passes.
        model["encoder_dropout"] = 0.0
        training |= {"batch_size": 8, "learning_rate": 1e-3}
    base = {
        "model": model,
        "data": data,
        "tasks": tasks,
        # By examples alone, similarity would have a twentieth of the say in the encoder.
        "federation": {"aggregation": {"average": "tasks"}},
        "training": training,
    }
    return with_overrides(with_absolute_paths(base, Path.cwd()), options.overrides)


def _train_file(root: Path, task: str) -> Path:
    found = find_table(root / task, ["train"])
    if found is None:
        raise ConfigError(f"--data: {root / task} has no train file; put train.tsv.gz there")
    return found


def _copied(files: Mapping[str, Path], root: Path) -> Path:
    """Return a folder with the train files alone, so that no run can see a dev set."""
    for task, file in files.items():
        target = root / task / file.name
        if not target.exists() or target.stat().st_size != file.stat().st_size:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return root


def sharing(wanted: Sequence[Setup], cell: str) -> list[str]:
    """Return the names of the wanted setups that show this cell."""
    return [setup.name for setup in wanted if setup.cell == cell]


def make_runs(options: FederatedOptions, folder: StudyFolder, wanted: Sequence[Setup]) -> Runs:
    """Return the runs of each setup by seed; all seeds where one of the setups that share its cell fits."""
    return {
        setup.name: {
            seed: folder.cell(cell_name(setup.cell, seed)) for seed in seeds_of(options, *sharing(wanted, setup.cell))
        }
        for setup in wanted
    }


def make_cells(
    options: FederatedOptions, base: Base, every: Mapping[str, Setup], wanted: Sequence[Setup]
) -> list[Cell]:
    """Return the cells of the wanted setups, each once; those of the first points come first with all their seeds.

    Among these the longest begin, so that none is left to run alone at the end.
    """
    used = list(dict.fromkeys(setup.cell for setup in wanted))
    order = [
        (_stage(every[name]), -every[name].point.rounds, number, at, name, seed)
        for number, seed in enumerate(options.seeds)
        for at, name in enumerate(used)
        if seed in seeds_of(options, name, *sharing(wanted, name))
    ]
    return [_cell(options, base, every[name], seed) for *_, name, seed in sorted(order)]


def _stage(setup: Setup) -> int:
    if setup.kind not in MODES:
        return 2
    return 0 if setup.point.name in FIRST else 1


def _cell(options: FederatedOptions, base: Base, setup: Setup, seed: int) -> Cell:
    point = setup.point
    settings = merged(merged(base.settings, point.settings), VARIANTS.get(setup.kind, {}))
    most = point.samples * point.clients if point.samples else max(base.sizes.values())
    sizes = {task: min(size, most) for task, size in base.sizes.items()}
    tasks: Settings = {task: {"train_samples": size} for task, size in sizes.items() if point.samples}
    rate = point.rate or options.rate(setup.name, setup.kind)
    training = {} if rate is None else {"training": {"learning_rate": rate}}
    settings = merged(merged(settings, {"mode": setup.mode, "seed": seed, "tasks": tasks}), training)
    settings = with_overrides(settings, options.overrides_of(setup.name, setup.kind))
    return Cell(cell_name(setup.name, seed), settings, work=float(point.rounds * sum(sizes.values())))
