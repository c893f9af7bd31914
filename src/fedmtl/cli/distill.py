"""fedmtl distill"""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fedmtl.cli.arguments import LayerMap, Run, Settings
from fedmtl.cli.distill_progress import Listener, retention_table
from fedmtl.cli.stages import make_stages
from fedmtl.cli.terminal import show, write
from fedmtl.compress.augment.settings import AugmentSettings, parse_copies
from fedmtl.compress.distill.settings import DistillSettings, parse_weights
from fedmtl.runs import find_run
from fedmtl.training.layer_maps import parse_layer_map

DEFAULTS = DistillSettings("")
ADDED = AugmentSettings()


def distill(
    run: Run,
    student: Annotated[
        str,
        typer.Option(
            "--student", help="tiny, a folder, or LxH: layers and width of the teacher's kind.", metavar="STUDENT"
        ),
    ],
    layer_map: LayerMap = "uniform",
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help="With LxH: teacher copies the mapped layers and heads, random does not; otherwise teacher where the"
            " widths are equal.",
            metavar="teacher|random",
        ),
    ] = None,
    stages: Annotated[
        str, typer.Option("--stages", help="Which to do.", metavar="both|intermediate|prediction")
    ] = DEFAULTS.stages,
    epochs_intermediate: Annotated[
        int, typer.Option("--epochs-intermediate", help="Passes over the examples.", metavar="N")
    ] = DEFAULTS.epochs_intermediate,
    epochs_prediction: Annotated[
        int, typer.Option("--epochs-prediction", help="Passes over the examples.", metavar="N")
    ] = DEFAULTS.epochs_prediction,
    rate_intermediate: Annotated[
        float, typer.Option("--rate-intermediate", help="Highest step size; it rises, then falls.", metavar="X")
    ] = DEFAULTS.rate_intermediate,
    rate_prediction: Annotated[
        float, typer.Option("--rate-prediction", help="Highest step size; it rises, then falls.", metavar="X")
    ] = DEFAULTS.rate_prediction,
    temperature: Annotated[
        float, typer.Option("--temperature", help="What outputs are divided by; larger is softer.", metavar="T")
    ] = DEFAULTS.temperature,
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="Of embedding, attention and hidden (1 each), and the labels' share gold (0) of the prediction loss.",
            metavar="NAME=X,...",
        ),
    ] = "",
    attention: Annotated[
        str,
        typer.Option(
            "--attention",
            help="Compare scores, or relations between positions; auto: scores where both have as many heads.",
            metavar="auto|scores|relations",
        ),
    ] = DEFAULTS.attention,
    projections: Annotated[
        str,
        typer.Option(
            "--projections",
            help="Where widths differ: one matrix for embeddings and layers, or two.",
            metavar="two|one",
        ),
    ] = DEFAULTS.projections,
    augment: Annotated[
        list[str] | None,
        typer.Option(
            "--augment",
            help="Where other words come from: mlm[:FOLDER], glove:FILE, wordnet:FILE; of several the first that has"
            " some for a word.",
            metavar="SOURCE",
        ),
    ] = None,
    copies: Annotated[
        str,
        typer.Option(
            "--copies", help="Copies of an example: 30, or such as cola=30,sst2=20; else the paper's.", metavar="N"
        ),
    ] = "",
    probability: Annotated[
        float, typer.Option("--probability", help="How likely a word is replaced.", metavar="P")
    ] = ADDED.probability,
    candidates: Annotated[
        int, typer.Option("--candidates", help="Words that one word may become.", metavar="M")
    ] = ADDED.candidates,
    most_copies: Annotated[
        int, typer.Option("--most-copies", help="Copies of all tasks together at most.", metavar="N")
    ] = ADDED.most,
    name: Annotated[str | None, typer.Option("--name", help="Name of the new run.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last whole pass of that name.")] = False,
    set_: Settings = None,
) -> None:
    """Make a finished run's model smaller: a student with the same tasks learns its states, then its answers."""
    found = find_run(run)
    settings = DistillSettings(
        student=student,
        layer_map=parse_layer_map(layer_map),
        start=start,
        stages=stages,
        epochs_intermediate=epochs_intermediate,
        epochs_prediction=epochs_prediction,
        rate_intermediate=rate_intermediate,
        rate_prediction=rate_prediction,
        temperature=temperature,
        attention=attention,
        projections=projections,
        weights=parse_weights(weights),
        augment=AugmentSettings(tuple(augment or ()), probability, candidates, parse_copies(copies), most_copies),
    )
    from fedmtl.compress.distill.run import distill
    from fedmtl.config.file import load_config
    from fedmtl.report.page import write_report

    config = load_config(found.config, set_ or [])
    if not any(setting.startswith("output=") for setting in set_ or []):
        config = config.model_copy(update={"output": str(found.path.parent)})
    with make_stages() as shown:
        listener = Listener(shown)
        made = distill(found, config, settings, name or _name(found.name, student), listener, resume=resume)
    write_report(made.run.path)
    show(retention_table(made.teacher, made.student))
    write(f"written: {made.run.path}")


def _name(run: str, student: str) -> str:
    return f"{run}-{re.sub(r'[^A-Za-z0-9._-]+', '-', student.rstrip('/').rpartition('/')[2])}"
