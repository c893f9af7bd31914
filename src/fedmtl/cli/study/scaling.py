"""fedmtl study scaling"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.study.options import Jobs, Keep, Kept, Quick, Rows, StudyName, show_study, whole_numbers


class Preset(Enum):
    """Whose settings."""

    ours = "ours"
    paper = "paper"


class Optimizer(Enum):
    """As training.optimizer."""

    adamw = "adamw"
    sgd = "sgd"


class ScoreOn(Enum):
    """Which rows score."""

    official = "official"
    train = "train"


def scaling(
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with imdb, ag_news, ..., each with train.tsv.gz and test.tsv.gz; empty is the hub."),
    ] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="Whose settings: ours, which is empty too, or the paper's (days on a GPU).")
    ] = None,
    quick: Quick = False,
    encoders: Annotated[
        str | None,
        typer.Option(
            help="As model.server_model, with commas between; random:X is X's shape with random values.", metavar="LIST"
        ),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help="Classifications, such as imdb,ag_news,yelp.", metavar="LIST")
    ] = None,
    clients: Annotated[
        str | None, typer.Option(help="Numbers of clients; 1 is the baseline. Empty is 1,2,4,8,16,32.", metavar="LIST")
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="Seeds, with commas between: scores are means over them.", metavar="LIST")
    ] = None,
    seed_rows: Annotated[
        str, typer.Option("--seed-rows", help="Which setups get all seeds, such as '*-32'; others get the first.")
    ] = "*",
    rows: Rows = "*",
    rounds: Annotated[
        int | None, typer.Option(help="Rounds after which accuracies are compared.", min=1, metavar="N")
    ] = None,
    threshold_rounds: Annotated[
        int | None,
        typer.Option(
            "--threshold-rounds",
            help="Rounds to try for 90% of one client's; empty is twice --rounds.",
            min=1,
            metavar="N",
        ),
    ] = None,
    examples: Annotated[
        int | None, typer.Option(help="Training examples that are divided; 0 is all.", min=0, metavar="N")
    ] = None,
    validation: Annotated[
        int | None, typer.Option(help="Rows that score every round, drawn by seed; 0 is all.", min=0, metavar="N")
    ] = None,
    score_on: Annotated[
        ScoreOn,
        typer.Option(
            "--score-on", help="The dev or test file of --data, or a tenth cut from train: to choose settings."
        ),
    ] = ScoreOn.official,
    partition: Annotated[
        str, typer.Option(help="How examples are divided: iid, or dirichlet:ALPHA.", metavar="KIND")
    ] = "iid",
    local_epochs: Annotated[
        int | None, typer.Option("--local-epochs", help="As training.local_epochs.", min=1, metavar="N")
    ] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="As training.optimizer.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", help="As training.learning_rate.", metavar="X")
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Learning rates by setup; the last that fits counts.", metavar="NAME=X,...")
    ] = "",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", help="As training.batch_size.", min=1, metavar="N")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option("--max-length", help="As model.max_length.", min=1, metavar="N")
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option("--set", help="Replace a setting that the cells have in common.", metavar="KEY=VALUE"),
    ] = None,
    jobs: Jobs = None,
    keep: Keep = Kept.models,
    name: StudyName = None,
) -> None:
    """Divide the same examples among 1 to 32 clients: accuracy, rounds to 90% of one client's, collapse to chance."""
    from fedmtl.study.presets import refuse_both
    from fedmtl.study.rates import parse_rates
    from fedmtl.study.scaling.asked import make_asked
    from fedmtl.study.scaling.study import study_folder_name, study_scaling

    refuse_both(None if preset is None else preset.value, quick=quick)
    given = {
        "data": None if data is None else str(data.expanduser().absolute()),
        "encoders": _listed(encoders),
        "tasks": _listed(tasks),
        "clients": None if clients is None else whole_numbers(clients, "--clients"),
        "seeds": None if seeds is None else whole_numbers(seeds, "--seeds"),
        "rounds": rounds,
        "threshold_rounds": threshold_rounds,
        "examples": examples,
        "validation": validation,
        "score_on": score_on.value,
        "partition": partition,
        "local_epochs": local_epochs,
        "optimizer": None if optimizer is None else optimizer.value,
        "learning_rate": learning_rate,
        "rates": parse_rates(rate),
        "batch_size": batch_size,
        "max_length": max_length,
        "rows": rows,
        "seed_rows": seed_rows,
        "overrides": tuple(set or ()),
    }
    asked = make_asked("quick" if quick else (preset or Preset.ours).value, given)
    show_study(
        name or study_folder_name(asked),
        jobs,
        lambda folder, at_once, shown: study_scaling(folder, asked, at_once, shown, keep.value),
    )


def _listed(text: str | None) -> tuple[str, ...] | None:
    """`a,b` as parts, each once; None stays None."""
    return None if text is None else tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
