"""fedmtl study"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedmtl.cli.arguments import ConfigFile, Settings
from fedmtl.cli.progress import make_display
from fedmtl.cli.run import load
from fedmtl.cli.study_progress import make_grid_display
from fedmtl.cli.tables import amount, number
from fedmtl.cli.terminal import show, write
from fedmtl.errors import ConfigError

if TYPE_CHECKING:
    from fedmtl.study.wire import Pair, Point

study = typer.Typer(name="study", help="Many runs, as tables and pictures.", no_args_is_help=True)


@study.command()
def wire(
    config: ConfigFile = None,
    set: Settings = None,
    codecs: Annotated[
        str, typer.Option(help="Codecs for both ways, or DOWN/UP, with commas between.")
    ] = "fp32,fp16,int8,int8/topk",
    name: Annotated[str | None, typer.Option(help="The study's name; a taken one gets -2, -3, ...")] = None,
) -> None:
    """Run a config once per codec, with the same seed: wire.csv and wire.html show score against bytes."""
    loaded = load(config, set or [])
    display = make_display()
    with display:
        from fedmtl.study.wire import last_points, parse_pairs, study_wire

        def observe(pair: Pair) -> Any:
            display.say(f"down {pair.down}, up {pair.up}")
            return display

        pairs = parse_pairs(codecs)
        folder, points = study_wire(loaded, pairs, name or f"{config.stem if config else 'demo'}-wire", observe)
    show(_table(last_points(points)), [f"{folder / 'wire.csv'} and {folder / 'wire.html'}"])


Rows = Annotated[
    str,
    typer.Option("--rows", help="Only setups whose names fit, such as 'joint*,epoch'.", metavar="PATTERNS"),
]


class Kept(Enum):
    """What of a finished cell's folder stays."""

    all = "all"
    models = "models"
    scores = "scores"


Jobs = Annotated[int | None, typer.Option(help="Cells at once; empty is what suits the machine.", min=1, metavar="N")]
Keep = Annotated[
    Kept, typer.Option(help="What stays of a finished cell: checkpoints too (all), its model, or its scores alone.")
]
StudyName = Annotated[
    str | None, typer.Option("--name", help="The study's folder in runs/; one that is there goes on.")
]


@study.command()
def multitask(
    data: Annotated[
        Path | None, typer.Option(help="Folder with sst5, cfimdb, qqp and stsb, each with train.tsv.gz and dev.tsv.gz.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="The encoder, as model.server_model.")] = "tiny",
    quick: Annotated[
        bool, typer.Option("--quick", help="The whole grid in miniature, on embedded data, in some minutes.")
    ] = False,
    tables: Annotated[str, typer.Option(help="Tables of the report, with commas between.")] = "1,2,3,4,5,6,7",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between: scores are means over them.")] = "0",
    seed_rows: Annotated[
        str,
        typer.Option("--seed-rows", help="Which setups get all seeds, such as 'lora-*,joint'; others get the first."),
    ] = "*",
    rows: Rows = "*",
    epochs: Annotated[
        int | None, typer.Option(help="Rounds of a run: 100, with --quick 2.", min=1, metavar="N")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps of a run: 30000, with --quick 18.", min=1, metavar="N")
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="Examples of a step: 16, with --quick 8.", min=1, metavar="N")
    ] = None,
    no_cfimdb: Annotated[bool, typer.Option("--no-cfimdb", help="Train sentiment on sst5 alone.")] = False,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a setting that the rows have in common.", metavar="KEY=VALUE"),
    ] = None,
    jobs: Jobs = None,
    keep: Keep = Kept.models,
    name: StudyName = None,
) -> None:
    """Compare multi-task methods: schedules, LoRA, adapters and SMART, each cell a run, with a report's numbers."""
    from fedmtl.study.folder import open_study
    from fedmtl.study.grid import suitable_at_once
    from fedmtl.study.multitask import Asked, study_multitask

    asked = Asked(
        data=None if data is None else str(data),
        encoder=encoder,
        quick=quick,
        tables=_whole_numbers(tables, "--tables"),
        seeds=_whole_numbers(seeds, "--seeds"),
        seed_rows=seed_rows,
        rows=rows,
        epochs=epochs or (2 if quick else 100),
        steps=steps or (18 if quick else 30_000),
        batch_size=batch_size or (8 if quick else 16),
        cfimdb=not no_cfimdb,
        overrides=tuple(set or ()),
    )
    folder = open_study(Path("runs"), name or ("multitask-quick" if quick else "multitask"))
    with make_grid_display() as display:
        study_multitask(folder, asked, jobs or suitable_at_once(clients=1), display, keep.value)
    write(f"{folder.page} and {folder.markdown}")


@study.command()
def compression(
    data: Annotated[
        Path | None, typer.Option(help="Folder with sst2, mrpc, ..., each with train.tsv.gz and dev.tsv.gz.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="The teacher's encoder, as model.server_model.")] = "tiny",
    quick: Annotated[
        bool, typer.Option("--quick", help="The whole grid in miniature, on embedded data, in some minutes.")
    ] = False,
    tables: Annotated[
        str, typer.Option(help="Tables, with commas between; 7 trains a teacher for each task.")
    ] = "1,2,3,4,5,6",
    seeds: Annotated[str, typer.Option(help="Seeds, with commas between: a teacher and its students for each.")] = "0",
    seed_rows: Annotated[
        str, typer.Option("--seed-rows", help="Which setups get all seeds, such as '3x*'; others get the first.")
    ] = "*",
    rows: Rows = "*",
    tasks: Annotated[
        str, typer.Option(help="Tasks, with commas between; empty is those found of sst2,mrpc,rte,cola,qqp,stsb.")
    ] = "",
    teacher: Annotated[
        str | None, typer.Option(help="A finished run as the teacher, instead of training one.", metavar="RUN")
    ] = None,
    teacher_epochs: Annotated[
        int | None, typer.Option("--teacher-epochs", help="Its passes: 3, with --quick 4.", min=1, metavar="N")
    ] = None,
    epochs_intermediate: Annotated[
        int | None,
        typer.Option("--epochs-intermediate", help="Passes of a student: 20, with --quick 1.", min=1, metavar="N"),
    ] = None,
    epochs_prediction: Annotated[
        int | None,
        typer.Option("--epochs-prediction", help="Passes of a student: 3, with --quick 2.", min=1, metavar="N"),
    ] = None,
    rate_intermediate: Annotated[
        float | None, typer.Option("--rate-intermediate", help="Highest step size, as `fedmtl distill`.", metavar="X")
    ] = None,
    rate_prediction: Annotated[
        float | None, typer.Option("--rate-prediction", help="Highest step size, as `fedmtl distill`.", metavar="X")
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", help="Examples of a student's step: 32, with --quick 8.", min=1, metavar="N"),
    ] = None,
    prune_epochs: Annotated[
        int | None,
        typer.Option("--prune-epochs", help="Passes of what is left: 6, with --quick 1.", min=1, metavar="N"),
    ] = None,
    augment: Annotated[
        list[str] | None,
        typer.Option(
            "--augment", help="mlm[:FOLDER], glove:FILE or wordnet:FILE; without, no augmented rows.", metavar="SOURCE"
        ),
    ] = None,
    copies: Annotated[
        str | None, typer.Option("--copies", help="Copies of an example, as `fedmtl distill`.", metavar="N")
    ] = None,
    most_copies: Annotated[
        int | None, typer.Option("--most-copies", help="Copies of all tasks together at most.", min=1, metavar="N")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a setting of the teacher, which all others inherit.", metavar="KEY=VALUE"),
    ] = None,
    no_measure: Annotated[bool, typer.Option("--no-measure", help="Leave table 2 empty: time nothing.")] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Train nothing: measure the cells that are finished.")
    ] = False,
    jobs: Jobs = None,
    keep: Keep = Kept.models,
    name: StudyName = None,
) -> None:
    """Make a teacher smaller: students, layer maps, augmentation, pruning; retention, size and speed in tables."""
    from fedmtl.study.compression import study_compression, study_folder_name
    from fedmtl.study.compression_asked import Asked, with_quick
    from fedmtl.study.folder import open_study
    from fedmtl.study.grid import suitable_at_once

    given = {
        "teacher_epochs": teacher_epochs,
        "epochs_intermediate": epochs_intermediate,
        "epochs_prediction": epochs_prediction,
        "rate_intermediate": rate_intermediate,
        "rate_prediction": rate_prediction,
        "batch_size": batch_size,
        "prune_epochs": prune_epochs,
        "copies": copies,
        "most_copies": most_copies,
    }
    asked = Asked(
        data=None if data is None else str(data),
        encoder=encoder,
        quick=quick,
        tables=_whole_numbers(tables, "--tables"),
        seeds=_whole_numbers(seeds, "--seeds"),
        seed_rows=seed_rows,
        rows=rows,
        tasks=tuple(part.strip() for part in tasks.split(",") if part.strip()),
        teacher=teacher,
        augment=tuple(map(_source, augment or ())),
        overrides=tuple(set or ()),
        runs=not no_run,
        measures=not no_measure,
        **with_quick(quick, given),
    )
    folder = open_study(Path("runs"), name or study_folder_name(asked))
    with make_grid_display() as display:
        study_compression(folder, asked, jobs or suitable_at_once(clients=1), display, display.say, keep.value)
    write(f"{folder.page} and {folder.markdown}")


def _source(text: str) -> str:
    """A source of other words with its file's whole path: cells are processes of the study's, wherever that is."""
    kind, sign, file = text.partition(":")
    return f"{kind}:{Path(file).expanduser().absolute()}" if sign else kind


def _whole_numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",") if part.strip()))
    except ValueError:
        raise ConfigError(f"{option}: found {text}; write whole numbers with commas between, such as 0,1,2") from None


def _table(ends: list[Point]) -> Table:
    metrics = list(dict.fromkeys(metric for end in ends for metric in end.scores))
    table = Table(title="bytes are per update; scores are the last ones", title_justify="left")
    for column in ("codec", *metrics, "down", "up", "both"):
        is_name = column == "codec"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for end in ends:
        each = max(1, end.messages)
        sizes = (end.bytes_down / each, end.bytes_up / each, end.total_bytes / each)
        table.add_row(end.codec, *(number(end.scores.get(metric)) for metric in metrics), *map(amount, map(int, sizes)))
    return table
