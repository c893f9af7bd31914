"""fedmtl study multitask"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.study.options import Common, Jobs, Keep, Kept, Quick, Rows, StudyName, show_study, whole_numbers


def multitask(
    data: Annotated[
        Path | None, typer.Option(help="Folder with sst5, cfimdb, qqp and stsb, each with train.tsv.gz and dev.tsv.gz.")
    ] = None,
    encoder: Annotated[str, typer.Option(help="The encoder, as model.server_model.")] = "tiny",
    quick: Quick = False,
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
    set: Common = None,
    jobs: Jobs = None,
    keep: Keep = Kept.models,
    name: StudyName = None,
) -> None:
    """Compare multi-task methods: schedules, LoRA, adapters and SMART, each cell a run, with a report's numbers."""
    from fedmtl.study.multitask.asked import QUICK, Asked
    from fedmtl.study.multitask.study import study_multitask
    from fedmtl.study.setups import given_over

    asked = Asked(
        data=None if data is None else str(data),
        encoder=encoder,
        quick=quick,
        tables=whole_numbers(tables, "--tables"),
        seeds=whole_numbers(seeds, "--seeds"),
        seed_rows=seed_rows,
        rows=rows,
        cfimdb=not no_cfimdb,
        overrides=tuple(set or ()),
        **given_over(QUICK if quick else {}, {"epochs": epochs, "steps": steps, "batch_size": batch_size}),
    )
    show_study(
        name or ("multitask-quick" if quick else "multitask"),
        jobs,
        lambda folder, at_once, shown: study_multitask(folder, asked, at_once, shown, keep.value),
    )
