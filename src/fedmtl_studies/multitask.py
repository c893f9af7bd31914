"""The study of multi-task methods: its options, every setup, which row of which table it is, and its cells.

It rebuilds a report: A. J. Sood, C. Heskett, S. Lee, "Strategies for Optimization of minBERT for Multi-Task Learning",
Stanford CS224N, 2024. Its tables keep their numbers here. Where we differ:

* Every multi-task row trains on the same number of examples; the report's table 4 had 3.3 times the steps of the others
  (13 times the examples with batches of 64). A single-task model gets as many as a whole multi-task one, or, in rows of
  their own, a third: then the three together cost what the multi-task model does.
* A step of `joint` has a batch of every task, so these rows take a third of the steps.
* The report's LoRA is W + a B A; PEFT divides by the rank, so its a is `alpha: a * rank` here.
* It does not say which mode its combined model has LoRA in: `full_model`, in which its PALs train as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from fedmtl_studies.cells import Cell
from fedmtl_studies.folder import StudyFolder, cell_name
from fedmtl_studies.library import (
    EVERY,
    INTENSIFIERS,
    ONLY_SERVER,
    ConfigError,
    DataError,
    DataTable,
    Honours,
    embedded_columns,
    find_table,
    read_table,
    with_absolute_paths,
    with_overrides,
    write_atomic,
)
from fedmtl_studies.multitask_page import show
from fedmtl_studies.multitask_results import SMART, TASKS, MeasuredCell, Row, read_cell
from fedmtl_studies.options import (
    Option,
    Overrides,
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
    read_whole_numbers,
    seeds_of,
)
from fedmtl_studies.results import Runs
from fedmtl_studies.study import Plan, Study

TABLES = (1, 2, 3, 4, 5, 6, 7)
# Later than any round: the task is scored and never trained.
NEVER = 1_000_000_000
THIRD = 1 / 3
# CFIMDB's two labels, by index or by name, on SST's scale from 0 to 4.
RESCALED = {"0": "0", "negative": "0", "1": "4", "positive": "4"}
NUM_CFIMDB = 300


class MultitaskOptions(StudyOptions):
    """What the study is to do; `overrides` change what all rows have in common, and leave alone what a row is about."""

    miniature: ClassVar[Mapping[str, Any]] = {"epochs": 2, "steps": 18, "batch_size": 8}

    data: Annotated[
        str | None, data_option("Folder with sst5, cfimdb, qqp and stsb, each with train.tsv.gz and dev.tsv.gz.")
    ] = None
    encoder: Annotated[str, Option("--encoder", "The encoder, as model.server_model.")] = "tiny"
    quick: Quick = False
    tables: Annotated[
        tuple[int, ...], Option("--tables", "Tables of the report, with commas between.", read=read_whole_numbers)
    ] = TABLES
    seeds: Annotated[
        tuple[int, ...],
        Option("--seeds", "Seeds, with commas between: scores are means over them.", read=read_whole_numbers),
    ] = (0,)
    seed_rows: Annotated[
        str, Option("--seed-rows", "Which setups get all seeds, such as 'lora-*,joint'; others get the first.")
    ] = "*"
    rows: Rows = "*"
    epochs: Annotated[int, number_option("--epochs", "Rounds of a run: 100, with --quick 2.")] = 100
    steps: Annotated[int, number_option("--steps", "Steps of a run: 30000, with --quick 18.")] = 30_000
    batch_size: Annotated[int, number_option("--batch-size", "Examples of a step: 16, with --quick 8.")] = 16
    cfimdb: Annotated[bool, Option("--no-cfimdb", "Train sentiment on sst5 alone.")] = True
    overrides: Overrides = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_tables(self.tables, TABLES)
        check_seeds(self.seeds)
        if self.steps < self.epochs:
            raise ConfigError(f"--steps: found {self.steps}, fewer than the {self.epochs} of --epochs; write more")
        return self

    @property
    def folder_name(self) -> str:
        return "multitask-quick" if self.quick else "multitask"


@dataclass(frozen=True)
class Setup:
    """One kind of run: what it changes in the base, its share of the base's steps, and a task it trains alone.

    `rate` multiplies the base's learning rate.
    """

    settings: Settings = field(default_factory=dict)
    share: float = 1.0
    rate: float = 1.0
    trains: str | None = None
    without_cfimdb: bool = False


LORA = [(1, 1), (4, 1), (8, 1), (16, 1), (1, 8), (4, 8), (8, 8), (16, 8), (16, 16)]
ADAPTERS = {
    "low-rank": ("Low-rank", {"kind": "low_rank"}),
    "pals": ("PALs", {"kind": "pals"}),
    "pals-shared": ("PALs Shared V", {"kind": "pals", "share": "projections"}),
    "mixed": ("Mixed Adaption", {"kind": "mixed"}),
    "pals-all": ("PALs Shared V, SA", {"kind": "pals", "share": "all"}),
}


def setups(batch_size: int) -> dict[str, Setup]:
    """Return every setup by its name, which is the name of its cells."""
    return {
        **_baselines(),
        **_schedules(),
        **_lora(),
        **_adapters(),
        **_smart(),
        **_combined(batch_size),
    }


def _baselines() -> dict[str, Setup]:
    return {
        "single-sentiment": Setup(trains=TASKS.sentiment),
        "single-paraphrase": Setup(trains=TASKS.paraphrase),
        "single-similarity": Setup(trains=TASKS.similarity),
        "third-sentiment": Setup(trains=TASKS.sentiment, share=THIRD),
        "third-paraphrase": Setup(trains=TASKS.paraphrase, share=THIRD),
        "third-similarity": Setup(trains=TASKS.similarity, share=THIRD),
        "single-sentiment-no-cfimdb": Setup(trains=TASKS.sentiment, without_cfimdb=True),
        "epoch": _scheduled("epoch"),
        "annealed-no-cfimdb": Setup(without_cfimdb=True),
    }


def _scheduled(kind: str, share: float = 1.0, **training: Any) -> Setup:
    return Setup({"training": {"task_schedule": kind, **training}}, share)


def _schedules() -> dict[str, Setup]:
    return {
        "annealed": _scheduled("annealed"),
        "annealed-eval-5": Setup({"training": {"task_schedule": "annealed"}, "evaluation": {"every": 5}}),
        **{
            kind.replace("_", "-"): _scheduled(kind)
            for kind in ("random", "round_robin", "proportional", "temperature", "even")
        },
        "joint": _scheduled("joint", THIRD),
        "joint-pcgrad": _scheduled("joint", THIRD, gradients="pcgrad"),
        "joint-uncertainty": _scheduled("joint", THIRD, loss_weighting="uncertainty"),
    }


def _lora() -> dict[str, Setup]:
    last_linear = {
        f"lora-r{rank}-a{alpha}": Setup(_lora_settings(rank, alpha * rank, "last_linear")) for rank, alpha in LORA
    }
    return {
        **last_linear,
        "lora-full-r4-a8": Setup(_lora_settings(4, 32, "full_model")),
        "lora-adapters-r4": Setup(_lora_settings(4, 32, "adapters")),
        "lora-adapters-r8": Setup(_lora_settings(8, 64, "adapters")),
        # Few values that start at zero: what suits all weights moves them little.
        "lora-adapters-r4-fast": Setup(_lora_settings(4, 32, "adapters"), rate=10.0),
    }


def _lora_settings(rank: int, alpha: float, mode: str) -> Settings:
    return {"model": {"lora": {"rank": rank, "alpha": alpha, "mode": mode}}}


def _adapter_settings(given: Mapping[str, Any], **more: Any) -> Settings:
    return {"model": {"adapters": {**given, **more}}}


def _adapters() -> dict[str, Setup]:
    wired = {
        f"{name}{suffix}": Setup(_adapter_settings(given, wiring=wiring))
        for name, (_, given) in ADAPTERS.items()
        for wiring, suffix in (("alternative", "-aa"), ("parallel", ""))
    }
    shared = ADAPTERS["pals-shared"][1]
    alone = _adapter_settings(shared, wiring="parallel", tasks=[TASKS.sentiment])
    return {**wired, "pals-shared-sentiment": Setup(alone)}


def _smart_settings(radius: str, weight: str, **more: Any) -> Settings:
    return {"training": {"smart": {"radius": float(radius), "weight": float(weight), **more}}}


def _smart() -> dict[str, Setup]:
    grid = {f"smart-radius{radius}-weight{weight}": Setup(_smart_settings(radius, weight)) for radius, weight in SMART}
    return {
        **grid,
        "smart-perturb-both": Setup(_smart_settings("1e-2", "1e-3", perturb="both")),
        "smart-bregman": Setup(_smart_settings("1e-2", "1e-3", bregman=1.0)),
    }


def _combined(batch_size: int) -> dict[str, Setup]:
    pals = _adapter_settings(ADAPTERS["pals-shared"][1], wiring="parallel")
    with_smart = merged(pals, _smart_settings("1e-2", "1e-5"))
    return {
        "combined-1": Setup(with_smart),
        "combined-2": Setup(merged(with_smart, _lora_settings(4, 32, "full_model"))),
        "combined-ours": Setup(
            merged(merged(pals, _smart_settings("1e-2", "1e-3")), {"training": {"task_schedule": "round_robin"}})
        ),
        "combined-3": Setup(merged(pals, {"training": {"batch_size": 4 * batch_size}}), share=1 / 4),
    }


def rows(tables: Sequence[int], *, has_cfimdb: bool) -> dict[int, list[Row]]:
    """Return the rows of each table that compares runs, in the report's order, ours after them."""
    every = {
        1: _lora_rows(),
        2: _adapter_rows(),
        3: _smart_rows(),
        4: [
            *(Row(f"Configuration {number}", f"combined-{number}", f"Configuration {number}") for number in (1, 2, 3)),
            Row("round robin, PALs Shared V, SMART α=1e-2, λ=1e-3", "combined-ours"),
        ],
        5: _baseline_rows(has_cfimdb),
        6: _schedule_rows(),
        7: [Row("Baseline", "epoch", "Baseline"), Row("Final", "combined-1", "Final")],
    }
    return {number: every[number] for number in tables}


def _baseline_rows(has_cfimdb: bool) -> list[Row]:
    single = [
        Row(f"Baseline Finetune {name}", f"single-{role}", f"Baseline Finetune {name}", is_single=True)
        for name, role in (("SST", "sentiment"), ("Para", "paraphrase"), ("STS", "similarity"))
    ]
    thirds = [
        Row(f"{name}, a third of the steps", f"third-{role}", is_single=True)
        for name, role in (("SST", "sentiment"), ("Para", "paraphrase"), ("STS", "similarity"))
    ]
    baseline = Row("Baseline Finetune Multitask", "epoch", "Baseline Finetune Multitask")
    without = [
        Row("SST without CFIMDB", "single-sentiment-no-cfimdb", is_single=True),
        Row("Multitask AS without CFIMDB", "annealed-no-cfimdb"),
    ]
    return [*single, *thirds, baseline, Row("Multitask AS", "annealed"), *(without if has_cfimdb else [])]


def _schedule_rows() -> list[Row]:
    theirs = {
        "Multitask Random Batch": "random",
        "Multitask Round-Robin Batch": "round-robin",
        "Multitask AS Batch": "annealed",
        "Multitask AS Batch (Eval Epochs = 5)": "annealed-eval-5",
    }
    ours = ("proportional", "temperature", "even", "joint", "joint-pcgrad", "joint-uncertainty")
    return [*(Row(words, name, words) for words, name in theirs.items()), *(Row(name, name) for name in ours)]


def _lora_rows() -> list[Row]:
    last_linear = [Row(words := f"LLL + LoRA r={r}, α={a}", f"lora-r{r}-a{a}", words) for r, a in LORA]
    return [
        Row("FM (Baseline)", "annealed", "FM (Baseline)"),
        *last_linear,
        Row("FM + LoRA r=4, α=8", "lora-full-r4-a8", "FM + LoRA r=4, α=8"),
        Row("heads and LoRA r=4, α=8", "lora-adapters-r4"),
        Row("heads and LoRA r=8, α=8", "lora-adapters-r8"),
        Row("heads and LoRA r=4, α=8, ten times the rate", "lora-adapters-r4-fast"),
    ]


def _adapter_rows() -> list[Row]:
    listed = [
        Row(f"{words}{aa}", f"{name}{suffix}", f"{words}{aa}")
        for name, (words, _) in ADAPTERS.items()
        for aa, suffix in ((" (AA)", "-aa"), ("", ""))
    ]
    alone = "PALs Shared V (SST only)"
    return [Row("no adapters", "annealed"), *listed, Row(alone, "pals-shared-sentiment", alone)]


def _smart_rows() -> list[Row]:
    grid = [Row(words := f"SMART α={r}, λ={w}", f"smart-radius{r}-weight{w}", words) for r, w in SMART]
    return [
        Row("no SMART", "annealed"),
        *grid,
        Row("α=1e-2, λ=1e-3, both perturbed", "smart-perturb-both"),
        Row("α=1e-2, λ=1e-3, Bregman 1", "smart-bregman"),
    ]


def plan(options: MultitaskOptions, folder: StudyFolder) -> Plan[MeasuredCell]:
    """Return the cells that the tables need, with the files that they train on, and the page of them."""
    if options.data is None and not options.quick:
        raise ConfigError("--data: missing; name a folder with sst5, qqp, stsb and cfimdb, or write --quick")
    wanted = wanted_rows(options)
    used = list(dict.fromkeys(row.setup for listed in wanted.values() for row in listed))
    runs = {name: {seed: folder.cell(cell_name(name, seed)) for seed in seeds_of(options, name)} for name in used}
    base = base_settings(options, folder)
    cells = make_cells(options, base, runs, sentiment_source(options, folder, base))
    data = "embedded, synthetic texts in miniature" if options.quick else options.data
    opening = f"Encoder {options.encoder} on {data}; seeds {', '.join(map(str, options.seeds))}."
    return Plan(cells, runs, lambda results: show(opening, wanted, results))


HONOURS = Honours(
    "study multitask",
    EVERY,
    {
        **ONLY_SERVER,
        "output": "a study writes into runs/; name its folder with --name",
        "seed": "write --seeds",
        "defaults": "every setting is in the study's preset; leave it out",
    },
)
STUDY = Study(
    name="multitask",
    title="multi-task methods",
    help="Compare multi-task methods: schedules, LoRA, adapters and SMART, each cell a run, with a report's numbers.",
    options=MultitaskOptions,
    plan=plan,
    read=read_cell,
    honours=HONOURS,
)


def wanted_rows(options: MultitaskOptions) -> dict[int, list[Row]]:
    """Return the rows that are wanted, by table; a table that has none of them is left out."""
    every = rows(options.tables, has_cfimdb=options.cfimdb)
    named = {number: [row for row in listed if fits(row.setup, options.rows)] for number, listed in every.items()}
    found = {number: listed for number, listed in named.items() if listed}
    if not found:
        known = ", ".join(dict.fromkeys(row.setup for listed in every.values() for row in listed))
        raise ConfigError(f"--rows: no setup fits {options.rows}; these tables have {known}")
    return found


def base_settings(options: MultitaskOptions, folder: StudyFolder) -> Settings:
    """Return what all cells have in common: the report's settings, the user's data and overrides."""
    root = str(folder.path / "data/embedded") if options.quick else options.data
    if options.quick:
        write_embedded(Path(str(root)))
    sizes = {"train_samples": 240, "val_samples": 60} if options.quick else {}
    base = {
        "mode": "centralized",
        "model": {"server_model": options.encoder, "pair": "cross", "head_dropout": 0.3},
        "data": {"root": root, "source": "files"},
        "tasks": {TASKS.sentiment: sizes, TASKS.paraphrase: {**sizes, "outputs": 1}, TASKS.similarity: sizes},
        "training": {
            "num_rounds": options.epochs,
            "local_steps": options.steps // options.epochs,
            "batch_size": options.batch_size,
            # 1e-5 is the report's, for BERT-base; a few steps of a tiny encoder would not move by it.
            "learning_rate": 1e-3 if options.quick else 1e-5,
            "weight_decay": 0.0,
            "task_schedule": "annealed",
        },
        # Some rows cannot train in a stack, which on a GPU is in bf16: a row must not differ by that.
        "compute": {"stack": 0},
    }
    return with_overrides(with_absolute_paths(base, Path.cwd()), options.overrides)


def sentiment_source(options: MultitaskOptions, folder: StudyFolder, base: Mapping[str, Any]) -> dict[str, str] | None:
    """Write the file of SST's and CFIMDB's rows into the study's folder; None where CFIMDB is left out."""
    if not options.cfimdb:
        return None
    return write_sentiment(Path(base["data"]["root"]), folder.path / "data/sst5_cfimdb.tsv")


def make_cells(options: MultitaskOptions, base: Settings, runs: Runs, source: dict[str, str] | None) -> list[Cell]:
    """Return the cells of all rows, each once; the first seed of every row comes before the second of any."""
    named = setups(base["training"]["batch_size"])
    return [
        _cell(cell_name(name, seed), named[name], base, seed, source)
        for seed in options.seeds
        for name, by_seed in runs.items()
        if seed in by_seed
    ]


def _cell(name: str, setup: Setup, base: Settings, seed: int, source: dict[str, str] | None) -> Cell:
    settings = merged(merged(base, setup.settings), {"seed": seed})
    training = settings["training"]
    steps = max(1, round(training["local_steps"] * setup.share))
    tasks: Settings = {task: {"from_round": NEVER} for task in TASKS if setup.trains not in (None, task)}
    if source is not None and not setup.without_cfimdb:
        tasks = merged(tasks, {TASKS.sentiment: {"source": source}})
    # A rate given with --set may be in words, such as 1e-4.
    rate = float(training["learning_rate"]) * setup.rate
    settings = merged(settings, {"training": {"local_steps": steps, "learning_rate": rate}, "tasks": tasks})
    return Cell(name, settings, work=float(training["num_rounds"] * steps * training["batch_size"]))


def write_sentiment(root: Path, target: Path) -> dict[str, str]:
    """Write SST's training rows and then CFIMDB's, rescaled; the task's source is that file and SST's dev.

    Both are `sst5` and `cfimdb` in the root, with the columns `sentence` and `label`.
    """
    sst, cfimdb = (_read(root / name, ["train"]) for name in ("sst5", "cfimdb"))
    validation = find_table(root / "sst5", ["dev", "validation"])
    if validation is None:
        raise DataError(f"{root / 'sst5'}: has no dev file; put dev.tsv.gz there, so that CFIMDB is in training alone")
    labels = [_rescaled(cfimdb, row) for row in range(len(cfimdb))]
    texts = [*_column(sst, "sentence"), *_column(cfimdb, "sentence")]
    _write(target, {"sentence": texts, "label": [*_column(sst, "label"), *labels]})
    return {"train": str(target), "validation": str(validation)}


def write_embedded(root: Path) -> None:
    """Write embedded texts as files named as the real tasks'; a strong word makes a sentiment an extreme one."""
    for split, name in (("train", "train"), ("validation", "dev")):
        sentiment = embedded_columns("sentiment", split)
        graded = [_grade(*row) for row in zip(sentiment["sentence"], sentiment["label"], strict=True)]
        cut = NUM_CFIMDB if split == "train" else 0
        _write(root / "sst5" / f"{name}.tsv", {"sentence": sentiment["sentence"][cut:], "label": graded[cut:]})
        if cut:
            plain = ["0" if label == "negative" else "1" for label in sentiment["label"]]
            _write(root / "cfimdb/train.tsv", {"sentence": sentiment["sentence"][:cut], "label": plain[:cut]})
        same = embedded_columns("paraphrase", split)
        verdicts = ["duplicate" if label == "same" else "not_duplicate" for label in same["label"]]
        _write(root / "qqp" / f"{name}.tsv", {**same, "label": verdicts})
        _write(root / "stsb" / f"{name}.tsv", embedded_columns("similarity", split))


def _grade(text: str, label: str) -> str:
    is_strong = any(f" {word} " in f" {text} " for word in INTENSIFIERS)
    return {"negative": "0" if is_strong else "1", "positive": "4" if is_strong else "3"}[label]


def _read(folder: Path, stems: list[str]) -> DataTable:
    found = find_table(folder, stems)
    if found is None:
        remedy = "; put train.tsv.gz there, or leave CFIMDB out with --no-cfimdb" if folder.name == "cfimdb" else ""
        raise DataError(f"{folder}: has no train file{remedy or '; put train.tsv.gz there'}")
    return read_table(found)


def _column(table: DataTable, name: str) -> list[str]:
    if name not in table.columns:
        raise DataError(f"{table.origin}: has no column {name!r}, it has {', '.join(table.columns)}; rename one")
    return table.columns[name]


def _rescaled(table: DataTable, row: int) -> str:
    label = _column(table, "label")[row]
    if label not in RESCALED:
        raise DataError(f"{table.location(row)}: label {label!r} is not one of {', '.join(RESCALED)}; mend the row")
    return RESCALED[label]


def _write(path: Path, columns: dict[str, list[str]]) -> None:
    """Write a tsv, which has no quoting: tabs and line ends inside a text become spaces."""
    rows = zip(*columns.values(), strict=True)
    lines = ["\t".join(columns), *("\t".join(" ".join(value.split()) for value in row) for row in rows)]
    text = ("\n".join(lines) + "\n").encode()
    if not path.exists() or path.read_bytes() != text:
        write_atomic(path, text)
