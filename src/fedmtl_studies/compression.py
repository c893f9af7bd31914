"""The study of compression: its options, and the cells of the setups that they name."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from fedmtl_studies.cells import Cell, Distillation, Pruning
from fedmtl_studies.compression_page import Shown, show
from fedmtl_studies.compression_results import Result, measure_sizes, read_result, read_sizes
from fedmtl_studies.compression_setups import TEACHER, Setup, Shape, Shapes, rows, setups
from fedmtl_studies.folder import StudyFolder, cell_name, is_done
from fedmtl_studies.library import (
    ADJECTIVES,
    BUILTIN,
    EVERY,
    NOUNS,
    ONLY_SERVER,
    PEOPLE,
    VERBS,
    AugmentSettings,
    Config,
    ConfigError,
    DistillSettings,
    Honours,
    RunFolder,
    RunNotFound,
    StartEvent,
    config_from,
    encoder_folder,
    find_run,
    find_table,
    first_of,
    load_config,
    parse_copies,
    read_events,
    with_absolute_paths,
    with_overrides,
    write_atomic,
)
from fedmtl_studies.options import (
    Option,
    Quick,
    Rows,
    Settings,
    StudyOptions,
    check_seeds,
    check_tables,
    data_option,
    fits,
    merged,
    number_option,
    read_names,
    read_whole_numbers,
    seeds_of,
)
from fedmtl_studies.results import Results, Runs, main_metrics, recorded
from fedmtl_studies.study import Plan, Say, Study, read_about

# GLUE's tasks of the slides, and four more that the paper has.
TASKS = ("sst2", "mrpc", "rte", "cola", "qqp", "stsb", "mnli", "qnli")
QUICK_TASKS = ("sst2", "qqp", "stsb")
TABLES = (1, 2, 3, 4, 5, 6, 7)
# Off unless it is named: it trains a teacher for every task.
SINGLE = 7
DEFAULTS = DistillSettings("")
RANDOM = re.compile(r"random-(\d+)x(\d+)")
# A backward pass is two forward passes.
TRAINING = 3.0


def absolute_source(text: str) -> str:
    """Return a source of other words with its file's whole path: cells are processes, wherever they run."""
    kind, sign, file = text.partition(":")
    return f"{kind}:{Path(file).expanduser().absolute()}" if sign else kind


class CompressionOptions(StudyOptions):
    """What the study is to do; no `tasks` are those of TASKS that are found in the data.

    `overrides` change the teacher's config, which students and pruned models inherit. `measures` False times nothing;
    `runs` False leaves cells as they are.
    """

    miniature: ClassVar[Mapping[str, Any]] = {
        "teacher_epochs": 4,
        "epochs_intermediate": 1,
        "epochs_prediction": 2,
        "rate_intermediate": 1e-3,
        "rate_prediction": 1e-3,
        "batch_size": 8,
        "prune_epochs": 1,
        "copies": "1",
    }

    data: Annotated[str | None, data_option("Folder with sst2, mrpc, ..., each with train.tsv.gz and dev.tsv.gz.")] = (
        None
    )
    encoder: Annotated[str, Option("--encoder", "The teacher's encoder, as model.server_model.")] = "tiny"
    quick: Quick = False
    tables: Annotated[
        tuple[int, ...],
        Option("--tables", "Tables, with commas between; 7 trains a teacher for each task.", read=read_whole_numbers),
    ] = (1, 2, 3, 4, 5, 6)
    seeds: Annotated[
        tuple[int, ...],
        Option("--seeds", "Seeds, with commas between: a teacher and its students for each.", read=read_whole_numbers),
    ] = (0,)
    seed_rows: Annotated[
        str, Option("--seed-rows", "Which setups get all seeds, such as '3x*'; others get the first.")
    ] = "*"
    rows: Rows = "*"
    tasks: Annotated[
        tuple[str, ...],
        Option("--tasks", f"Tasks, with commas between; empty is those found of {','.join(TASKS)}.", read=read_names),
    ] = ()
    teacher: Annotated[
        str | None, Option("--teacher", "A finished run as the teacher, instead of training one.", metavar="RUN")
    ] = None
    teacher_epochs: Annotated[int, number_option("--teacher-epochs", "Its passes: 3, with --quick 4.")] = 3
    epochs_intermediate: Annotated[
        int, number_option("--epochs-intermediate", "Passes of a student: 20, with --quick 1.")
    ] = DEFAULTS.epochs_intermediate
    epochs_prediction: Annotated[
        int, number_option("--epochs-prediction", "Passes of a student: 3, with --quick 2.")
    ] = DEFAULTS.epochs_prediction
    rate_intermediate: Annotated[
        float, number_option("--rate-intermediate", "Highest step size, as `fedmtl distill`.", "X")
    ] = DEFAULTS.rate_intermediate
    rate_prediction: Annotated[
        float, number_option("--rate-prediction", "Highest step size, as `fedmtl distill`.", "X")
    ] = DEFAULTS.rate_prediction
    batch_size: Annotated[int, number_option("--batch-size", "Examples of a student's step: 32, with --quick 8.")] = 32
    prune_epochs: Annotated[int, number_option("--prune-epochs", "Passes of what is left: 6, with --quick 1.")] = 6
    augment: Annotated[
        tuple[str, ...],
        Option(
            "--augment",
            "mlm[:FOLDER], glove:FILE or wordnet:FILE; without, no augmented rows.",
            metavar="SOURCE",
            each=absolute_source,
        ),
    ] = ()
    copies: Annotated[
        str, Option("--copies", "Copies of an example, as `fedmtl distill`.", metavar="N", has_default=False)
    ] = ""
    most_copies: Annotated[int, number_option("--most-copies", "Copies of all tasks together at most.")] = (
        AugmentSettings().most
    )
    overrides: Annotated[
        tuple[str, ...],
        Option("--set", "Replace a setting of the teacher, which all others inherit.", metavar="KEY=VALUE"),
    ] = ()
    measures: Annotated[bool, Option("--no-measure", "Leave table 2 empty: time nothing.")] = True
    runs: Annotated[bool, Option("--no-run", "Train nothing: measure the cells that are finished.")] = True

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_tables(self.tables, TABLES)
        check_seeds(self.seeds)
        return self

    @property
    def folder_name(self) -> str:
        return "compression-quick" if self.quick else "compression"

    def distilling(self, sources: tuple[str, ...]) -> DistillSettings:
        """Return what all students have in common, with augmentation where there are sources."""
        return DistillSettings(
            student="",
            epochs_intermediate=self.epochs_intermediate,
            epochs_prediction=self.epochs_prediction,
            rate_intermediate=self.rate_intermediate,
            rate_prediction=self.rate_prediction,
            augment=AugmentSettings(sources, copies=parse_copies(self.copies), most=self.most_copies),
        )


@dataclass(frozen=True)
class Wanted:
    """The setups to run, each after the one it is made of, and the rows of each table."""

    setups: dict[str, Setup]
    rows: dict[int, list[str]]


@dataclass(frozen=True)
class Base:
    """The teacher's settings, every task's main metric, and every setup there is; `teacher` is a run that was given."""

    settings: Settings
    metrics: dict[str, str]
    shapes: Shapes
    setups: dict[str, Setup]
    has_augmentation: bool
    teacher: RunFolder | None = None

    def config(self) -> Config:
        return config_from(dict(self.settings))


def open_base(options: CompressionOptions, folder: StudyFolder) -> Base:
    """Read what is given: a teacher, or an encoder and data."""
    if options.data is None and not options.quick and options.teacher is None:
        raise ConfigError("--data: missing; name a folder with sst2, mrpc, ..., or write --teacher or --quick")
    teacher = None if options.teacher is None else _given(options.teacher)
    settings = _settings(options) if teacher is None else _settings_of(teacher, options)
    metrics = _metrics(settings) if teacher is None else _metrics_of(teacher)
    encoder = teacher.model if teacher is not None else None
    shapes = Shapes(read_shape(settings["model"]["server_model"], encoder))
    sources = options.augment or ((f"wordnet:{_write_synonyms(folder)}",) if options.quick else ())
    every = setups(shapes, list(metrics), options.distilling(sources))
    return Base(settings, metrics, shapes, every, bool(sources), teacher)


def _given(name: str) -> RunFolder:
    run = find_run(name)
    if not is_done(run):
        raise RunNotFound(f"--teacher {name}: is not finished; let it end, or go on with `fedmtl run --resume`")
    return RunFolder(run.path.absolute())


def _settings(options: CompressionOptions) -> Settings:
    model: Settings = {"server_model": options.encoder}
    if options.quick:
        tasks: Settings = {task: {"train_samples": 80, "val_samples": 60} for task in options.tasks or QUICK_TASKS}
        data: Settings = {"source": "embedded"}
        # As the demonstration: a tiny encoder learns something of pairs in a few passes.
        model |= {"pair": "dual", "pool": "mean", "encoder_dropout": 0.0}
    else:
        assert options.data is not None, "checked before"
        tasks = {task: {} for task in options.tasks or _tasks_in(Path(options.data))}
        data = {"root": options.data, "source": "files"}
    settings = {
        "mode": "centralized",
        "model": model,
        "data": data,
        "tasks": tasks,
        "training": {
            "num_rounds": options.teacher_epochs,
            "local_epochs": 1,
            "batch_size": 8 if options.quick else 32,
            "learning_rate": 1e-3 if options.quick else 5e-5,
            "head_rate": 1.0 if options.quick else 10.0,
            "schedule": "linear",
            "warmup_rounds": 0.1,
        },
        # Some rows cannot train in a stack, which on a GPU is in bf16: a row must not differ by that.
        "compute": {"stack": 0},
    }
    return with_overrides(with_absolute_paths(settings, Path.cwd()), options.overrides)


def _settings_of(teacher: RunFolder, options: CompressionOptions) -> Settings:
    found: Settings = load_config(teacher.config, list(options.overrides)).model_dump()
    return found


def _tasks_in(root: Path) -> list[str]:
    found = [task for task in TASKS if find_table(root / task, ["train"]) is not None]
    if not found:
        raise ConfigError(f"--data: {root} has none of {', '.join(TASKS)}; put such as sst2/train.tsv.gz there")
    return found


def _metrics(settings: Settings) -> dict[str, str]:
    tasks = {task: about or {} for task, about in settings["tasks"].items()}
    unknown = next((task for task, about in tasks.items() if task not in BUILTIN and "metric" not in about), None)
    if unknown is not None:
        raise ConfigError(f"--tasks: {unknown} is not built in; train a run with it, and give that as --teacher")
    return {task: about.get("metric") or BUILTIN[task].metric for task, about in tasks.items()}


def _metrics_of(teacher: RunFolder) -> dict[str, str]:
    return main_metrics(teacher, recorded(teacher, "its start", first_of(read_events(teacher), StartEvent)))


def read_shape(encoder: str, folder: Path | None = None) -> Shape:
    """Read layers and width of an encoder from its config."""
    made = RANDOM.fullmatch(encoder)
    if made is not None and folder is None:
        return Shape(int(made[1]), int(made[2]))
    file = (folder or encoder_folder(encoder)) / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else _from_hub(encoder)
    layers, width = (config.get(key) for key in ("num_hidden_layers", "hidden_size"))
    if not layers or not width:
        raise ConfigError(f"--encoder {encoder}: its config has no num_hidden_layers and hidden_size; take another")
    return Shape(int(layers), int(width))


def _from_hub(encoder: str) -> dict[str, Any]:
    from transformers import AutoConfig

    try:
        found: dict[str, Any] = AutoConfig.from_pretrained(encoder, trust_remote_code=False).to_dict()
    except (OSError, ValueError) as error:
        raise ConfigError(f"--encoder {encoder}: is neither a folder nor on the hub; give a folder") from error
    return found


def _write_synonyms(folder: StudyFolder) -> Path:
    """Write synonyms of the embedded texts' words, for a miniature of augmentation."""
    tables = {"n": (*PEOPLE, *NOUNS), "v": VERBS, "a": ADJECTIVES}
    lines = [
        f"{word}\t{part}\t{'|'.join(other for other in row if other != word)}"
        for part, table in tables.items()
        for row in table
        for word in row
        if " " not in word
    ]
    path = folder.path / "data/synonyms.tsv"
    write_atomic(path, ("\n".join(lines) + "\n").encode())
    return path


def plan(options: CompressionOptions, folder: StudyFolder) -> Plan[Result]:
    """Return the cells that the tables need, the models to measure when nothing runs any more, and the page of them."""
    base = open_base(options, folder)
    wanted = wanted_setups(options, base)
    runs = make_runs(options, folder, base, wanted.setups)
    seed = options.seeds[0]
    shown = Shown(_opening(options, folder, base), base.setups, base.metrics, base.shapes, wanted.rows)

    def first_results(results: Results[Result]) -> dict[str, Result]:
        """Return what is finished, with the first seed, of the models that are measured."""
        found = {name: results.get(name, {}).get(seed) for name in wanted.rows.get(2, ())}
        return {name: result for name, result in found.items() if result is not None}

    def measure(results: Results[Result], say: Say) -> None:
        found = first_results(results)
        measure_sizes(folder, {name: runs[name][seed] for name in found}, found, base.config(), say)

    return Plan(
        cells=make_cells(options, folder, base, wanted.setups, runs),
        runs=runs,
        page=lambda results: show(shown, base.has_augmentation, results, read_sizes(folder, first_results(results))),
        measure=measure if options.measures else None,
        measured=[cell_name(name, seed) for name in wanted.rows.get(2, ()) if options.measures],
        trains=options.runs,
    )


HONOURS = Honours(
    "study compression",
    EVERY,
    {
        **ONLY_SERVER,
        "output": "a study writes into runs/; name its folder with --name",
        "seed": "write --seeds",
        "defaults": "every setting is in the study's preset; leave it out",
    },
)
STUDY = Study(
    name="compression",
    title="compression",
    help="Make a teacher smaller: students, layer maps, augmentation, pruning; retention, size and speed in tables.",
    options=CompressionOptions,
    plan=plan,
    read=read_result,
    honours=HONOURS,
)


def _opening(options: CompressionOptions, folder: StudyFolder, base: Base) -> str:
    """Return what the cells are of: now, or, where nothing is trained now, when they were."""
    about = (None if options.runs else read_about(folder)) or options.model_dump()
    data = "embedded, synthetic texts in miniature" if about["quick"] else about["data"] or "its own data"
    teacher = f"run {about['teacher']}" if about["teacher"] else f"encoder {about['encoder']}"
    return f"Teacher: {teacher} ({base.shapes.teacher}) on {data}; seeds {', '.join(map(str, about['seeds']))}."


def wanted_setups(options: CompressionOptions, base: Base) -> Wanted:
    """Return what is wanted by table and by name, with the teachers that this needs."""
    every = base.setups
    named = {SINGLE} if options.rows != "*" else set()
    listed = {
        number: names for number, names in rows(every, base.shapes).items() if number in {*options.tables, *named}
    }
    if options.quick and 2 in listed:
        # A model takes some ten seconds to write, quantize and time, however small it is.
        listed[2] = [TEACHER, f"{base.shapes.small}-uniform"]
    chosen = {number: _chosen(names, options.rows) for number, names in listed.items()}
    used = {name for names in chosen.values() for name in names}
    if not used:
        known = ", ".join(dict.fromkeys(name for names in listed.values() for name in names))
        raise ConfigError(f"--rows: no setup fits {options.rows}; these tables have {known}")
    needed = {over for name in used if (over := every[name].of) is not None}
    order = {name: setup for name, setup in every.items() if name in used | needed}
    return Wanted(order, {number: names for number, names in chosen.items() if names})


def _chosen(names: list[str], patterns: str) -> list[str]:
    """Return the rows that fit, with the teacher they are compared with where the table shows it."""
    fitting = [name for name in names if fits(name, patterns)]
    return [name for name in names if name in fitting or (fitting and name == TEACHER)]


def make_runs(options: CompressionOptions, folder: StudyFolder, base: Base, every: Mapping[str, Setup]) -> Runs:
    """Return the runs of each setup by seed; a setup has all seeds where one that is made of it has them.

    A teacher that was given is every seed's.
    """

    def of(name: str, seed: int) -> RunFolder:
        is_given = name == TEACHER and base.teacher is not None
        return base.teacher if is_given and base.teacher else folder.cell(cell_name(name, seed))

    made = {name: [child for child, setup in every.items() if setup.of == name] for name in every}
    seeds = {name: seeds_of(options, name, *children) for name, children in made.items()}
    if base.teacher is not None:
        seeds[TEACHER] = options.seeds
    return {name: {seed: of(name, seed) for seed in listed} for name, listed in seeds.items()}


def make_cells(
    options: CompressionOptions, folder: StudyFolder, base: Base, every: Mapping[str, Setup], runs: Runs
) -> list[Cell]:
    """Return the cells of these setups; the first seed of every setup comes before the second of any."""
    return [
        _cell(options, folder, base, name, setup, seed)
        for seed in options.seeds
        for name, setup in every.items()
        if seed in runs[name] and (name != TEACHER or base.teacher is None)
    ]


def _cell(options: CompressionOptions, folder: StudyFolder, base: Base, name: str, setup: Setup, seed: int) -> Cell:
    is_given = setup.of == TEACHER and base.teacher is not None
    source = str(base.teacher.path) if is_given and base.teacher else cell_name(setup.of or "", seed)
    after = () if setup.of is None or is_given else (source,)
    work = _work(options, base, setup)
    named, overrides = cell_name(name, seed), [f"seed={seed}"]
    if is_given:
        overrides = [*options.overrides, *overrides]
    if setup.student is not None:
        student = (*overrides, f"training.batch_size={options.batch_size}")
        return Cell(named, Distillation(source, setup.student, student), work, after)
    if setup.cut is not None:
        return Cell(named, Pruning(source, setup.cut, options.prune_epochs, tuple(overrides)), work, after)
    settings = merged(base.settings, {"seed": seed})
    if setup.only is not None:
        settings = {**settings, "tasks": {setup.only: base.settings["tasks"][setup.only]}}
    if setup.of is not None:
        settings = _going_on(settings, str(folder.cells / source), options.prune_epochs)
    return Cell(named, settings, work, after)


def _going_on(settings: Settings, source: str, epochs: int) -> Settings:
    """Return the settings of the teacher for so many epochs more, as `fedmtl prune` trains what is left."""
    warmup = min(float(settings["training"].get("warmup_rounds") or 0), epochs)
    training = {"num_rounds": epochs, "local_epochs": 1, "local_steps": None, "warmup_rounds": warmup}
    return merged(settings, {"model": {"start_from": source}, "training": training})


def _work(options: CompressionOptions, base: Base, setup: Setup) -> float:
    """Guess the passes of one example through one of the teacher's layers; only the time left depends on it."""
    layers = float(base.shapes.teacher.layers)
    share = 1 / len(base.metrics) if setup.only or (setup.of or "").startswith("single-") else 1.0
    if setup.student is None:
        epochs = options.teacher_epochs if setup.of is None else options.prune_epochs
        return share * epochs * layers * TRAINING
    large = base.shapes.large
    layers_of_student = float(large.layers) if setup.student.student == str(large) else 1.0
    passes = setup.student.epochs
    augment = setup.student.augment
    copies = 1 + (mean(augment.copies_of(task) for task in base.metrics) if augment.sources else 0)
    teaching = layers * (1 + passes.get("intermediate", 0))
    return share * copies * (teaching + sum(passes.values()) * layers_of_student * TRAINING)
