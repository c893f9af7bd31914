"""fedmtl study federated"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.study.options import Common, Jobs, Keep, Kept, Quick, Rows, StudyName, show_study, whole_numbers


class Preset(Enum):
    """For which encoder."""

    tiny = "tiny"
    minilm_l6 = "minilm-l6"


def federated(
    data: Annotated[
        Path | None, typer.Option(help="Folder with sst2, qqp and stsb, each with train.tsv.gz and dev.tsv.gz.")
    ] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="The settings of docs/results/federated.md for this encoder; empty is none.")
    ] = None,
    encoder: Annotated[
        str | None, typer.Option(help="The encoder, as model.server_model; empty is the preset's, or tiny.")
    ] = None,
    quick: Quick = False,
    seeds: Annotated[
        str | None,
        typer.Option(help="Seeds, with commas between: scores are means over them. Empty is the preset's, or 0."),
    ] = None,
    seed_rows: Annotated[
        str | None,
        typer.Option("--seed-rows", help="Which setups get all seeds, such as 'base-*'; others get the first."),
    ] = None,
    rows: Rows = "*",
    samples: Annotated[
        str | None,
        typer.Option(help="Samples of a client, beside all: 300,1000, with --quick 10,20.", metavar="N,..."),
    ] = None,
    alphas: Annotated[
        str | None,
        typer.Option(help="Dirichlet levels, beside iid: 5,0.5,0.2, with --quick 5,1,0.5.", metavar="X,..."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds: 8, with --quick 2.", min=1, metavar="N")] = None,
    long_rounds: Annotated[
        int | None,
        typer.Option("--long-rounds", help="Rounds of `long` and `original`: 30, with --quick 4.", min=1, metavar="N"),
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Learning rates by mode or setup; the last that fits counts.", metavar="NAME=X,...")
    ] = "",
    choose: Annotated[
        str,
        typer.Option(help="Try these learning rates in every mode, on a split cut from train.", metavar="X,..."),
    ] = "",
    set: Common = None,
    set_for: Annotated[
        list[str] | None,
        typer.Option("--set-for", help="Replace a setting of some modes or setups.", metavar="NAME:KEY=VALUE"),
    ] = None,
    jobs: Jobs = None,
    keep: Keep = Kept.models,
    name: StudyName = None,
) -> None:
    """Compare a federation with the same data in one place and at each client alone: modes, skew, samples, clients."""
    from fedmtl.study.federated.asked import make_asked, parse_own
    from fedmtl.study.federated.study import study_federated, study_folder_name
    from fedmtl.study.rates import parse_numbers, parse_rates

    given = {
        "data": None if data is None else str(data),
        "encoder": encoder,
        "quick": quick,
        "seeds": None if seeds is None else whole_numbers(seeds, "--seeds"),
        "seed_rows": seed_rows,
        "rows": rows,
        "samples": None if samples is None else whole_numbers(samples, "--samples"),
        "alphas": None if alphas is None else parse_numbers(alphas, "--alphas"),
        "rounds": rounds,
        "long_rounds": long_rounds,
        "rates": parse_rates(rate),
        "choose": parse_numbers(choose, "--choose"),
        "overrides": tuple(set or ()),
        "own_overrides": tuple(map(parse_own, set_for or ())),
    }
    asked = make_asked(None if preset is None else preset.value, given)
    show_study(
        name or study_folder_name(asked),
        jobs,
        lambda folder, at_once, shown: study_federated(folder, asked, at_once, shown, keep.value),
    )
