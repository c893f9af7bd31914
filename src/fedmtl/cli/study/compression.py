"""fedmtl study compression"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.study.options import Jobs, Keep, Kept, Quick, Rows, StudyName, show_study, whole_numbers


def compression(
    data: Annotated[
        Path | None, typer.Option(help="Folder with sst2, mrpc, ..., each with train.tsv.gz and dev.tsv.gz.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="The teacher's encoder, as model.server_model.")] = "tiny",
    quick: Quick = False,
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
    from fedmtl.study.compression.asked import QUICK, Asked
    from fedmtl.study.compression.study import study_compression, study_folder_name
    from fedmtl.study.setups import given_over

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
        tables=whole_numbers(tables, "--tables"),
        seeds=whole_numbers(seeds, "--seeds"),
        seed_rows=seed_rows,
        rows=rows,
        tasks=tuple(part.strip() for part in tasks.split(",") if part.strip()),
        teacher=teacher,
        augment=tuple(map(_source, augment or ())),
        overrides=tuple(set or ()),
        runs=not no_run,
        measures=not no_measure,
        **given_over(QUICK if quick else {}, given),
    )
    show_study(
        name or study_folder_name(asked),
        jobs,
        lambda folder, at_once, shown: study_compression(folder, asked, at_once, shown, shown.say, keep.value),
    )


def _source(text: str) -> str:
    """A source of other words with its file's whole path: cells are processes of the study's, wherever that is."""
    kind, sign, file = text.partition(":")
    return f"{kind}:{Path(file).expanduser().absolute()}" if sign else kind
