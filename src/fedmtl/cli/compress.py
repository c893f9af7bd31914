"""fedmtl distill, fedmtl prune, fedmtl quantize: a finished run's model becomes smaller."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedmtl import api
from fedmtl.cli.arguments import Client, Model, Round, Run, Settings, onnx_path
from fedmtl.cli.progress import make_display
from fedmtl.cli.tables import duration, number
from fedmtl.cli.terminal import Stages, make_stages, show, write
from fedmtl.compress.augment.settings import AugmentSettings, parse_copies
from fedmtl.compress.distill.settings import DistillSettings, parse_weights
from fedmtl.compress.measure.measured import retention
from fedmtl.runs.folder import RunFolder, find_run
from fedmtl.training.layer_maps import parse_layer_map

if TYPE_CHECKING:
    from fedmtl.compress.distill.loop import Update
    from fedmtl.compress.quantize import Quantized

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
    layer_map: Annotated[
        str | None,
        typer.Option(
            "--layer-map",
            help="The teacher's hidden states to learn from: uniform, top, bottom, or numbers such as 0,3,6; otherwise"
            " the map that the student was pretrained by, or uniform.",
            metavar="MAP",
        ),
    ] = None,
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
    round: Round = None,
    set_: Settings = None,
) -> None:
    """Make a finished run's model smaller: a student with the same tasks learns its states, then its answers."""
    found = find_run(run)
    settings = DistillSettings(
        student=student,
        layer_map=None if layer_map is None else parse_layer_map(layer_map),
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
    from fedmtl.config.honoured import DISTILL
    from fedmtl.predict.rounds import run_at
    from fedmtl.report.page import write_report
    from fedmtl.runs.energy import energy_words
    from fedmtl.runs.log import read_events
    from fedmtl.runs.summary import summarize

    DISTILL.check(set_ or [])
    config = load_config(found.config, _with_passes(found, settings, set_ or []))
    if not any(setting.startswith("training.pruning") for setting in set_ or []):
        # How the teacher was pruned is not how its student is to be.
        config = config.model_copy(update={"training": config.training.model_copy(update={"pruning": None})})
    if not any(setting.startswith("output=") for setting in set_ or []):
        config = config.model_copy(update={"output": str(found.path.parent)})
    with make_stages() as shown:
        listener = Listener(shown)
        made = distill(
            run_at(found, round), config, settings, name or _name(found.name, student), listener, resume=resume
        )
    write_report(made.run.path)
    spent = summarize(read_events(made.run)).energy
    show(retention_table(made.teacher, made.student), [f"energy: {energy_words(spent)}"] if spent else [])
    write(f"written: {made.run.path}")


def _with_passes(run: RunFolder, settings: DistillSettings, changes: list[str]) -> list[str]:
    """The changes, and where they prune, rounds for every pass: the run may have had fewer."""
    from fedmtl.config.file import load_config

    if not any(setting.startswith("training.pruning") for setting in changes):
        return changes
    rounds = load_config(run.config).training.num_rounds
    return [f"training.num_rounds={max(rounds, sum(settings.epochs.values()))}", *changes]


def _name(run: str, student: str) -> str:
    return f"{run}-{re.sub(r'[^A-Za-z0-9._-]+', '-', student.rstrip('/').rpartition('/')[2])}"


class Listener:
    """Prints the progress of a distillation."""

    def __init__(self, stages: Stages) -> None:
        self.say, self._stages = stages.say, stages

    def update(self, update: Update) -> None:
        self._stages.show(update.stage, update.share, _words(update))


def retention_table(teacher: Mapping[str, float | None], student: Mapping[str, float | None]) -> Table:
    """Every task's main metric before and after, and the share that is left."""
    table = Table("task", "teacher", "student", "retention")
    for task, before in teacher.items():
        share = retention(student[task], before)
        table.add_row(task, number(before), number(student[task]), "" if share is None else f"{share:.1%}")
    return table


def _words(update: Update) -> str:
    losses = ", ".join(f"{name} {value:.4f}" for name, value in update.losses.items())
    left = f", {duration(update.seconds_left)} left" if update.share < 1 else ""
    return f"epoch {update.epoch}, {losses}; {update.examples_per_second:,.0f} examples/s{left}"


def prune(
    run: Run,
    amount: Annotated[float, typer.Option(help="Share of the linear weights that become zero, the smallest.")] = 0.0,
    ffn: Annotated[float, typer.Option(help="Share of each layer's feed-forward neurons to remove.")] = 0.0,
    heads: Annotated[float, typer.Option(help="Share of each layer's attention heads to remove.")] = 0.0,
    layers: Annotated[int, typer.Option(help="Layers to remove from the top.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(help="Epochs to train, one a round; 0 only prunes and scores.", min=0)] = 6,
    out: Annotated[str | None, typer.Option(help="The new run's name; otherwise this one's with -pruned.")] = None,
    round: Round = None,
    set: Settings = None,
) -> None:
    """Take weights out of a finished run's model, and train what is left in a new run on the same data."""
    found = find_run(run)
    display = make_display(stderr=False)
    with display:
        from fedmtl.compress.cut import Cut
        from fedmtl.compress.prune import prune_run
        from fedmtl.config.honoured import PRUNE
        from fedmtl.experiment.run import start_run
        from fedmtl.predict.rounds import run_at

        PRUNE.check(set or [])
        pruned = prune_run(run_at(found, round), Cut(amount, ffn, layers, heads), epochs, set or [])
        before, after = pruned.parameters
        display.say(f"{found.name}: {before:,} parameters" + (f", {after:,} after the cut" if after < before else ""))
        done = start_run(pruned.config, out or f"{found.name}-pruned", display)
    display.finish(done)
    line = _sparsity(done)
    if line:
        write(line)


def _sparsity(run: RunFolder) -> str | None:
    """How many weights became zero, in words; None where nothing was pruned by magnitude."""
    from fedmtl.runs.event_lines import events_of
    from fedmtl.runs.events import PruningEvent
    from fedmtl.runs.log import read_events

    pruned = events_of(read_events(run), PruningEvent)
    if not pruned:
        return None
    linear, every = (part.zeros / part.weights for part in (pruned[-1].linear, pruned[-1].all))
    return f"zero: {linear:.1%} of the linear layers, {every:.1%} of all weights"


class SchemeName(StrEnum):
    dynamic = "dynamic"
    qdq = "qdq"
    qoperator = "qoperator"


def quantize(
    run: Model,
    scheme: Annotated[
        SchemeName,
        typer.Option(help="dynamic: ranges of each token; qdq, qoperator: ranges measured beforehand."),
    ] = SchemeName.dynamic,
    out: Annotated[
        Path | None, typer.Option(help="The file to write; otherwise `model.SCHEME.onnx` beside it.")
    ] = None,
    all_ops: Annotated[
        bool, typer.Option("--all-ops", help="Everything that can, not only linear layers and embeddings.")
    ] = False,
    samples: Annotated[int, typer.Option(min=1, help="Texts of each task to measure on.")] = 64,
    texts: Annotated[
        Path | None, typer.Option(help="Lines of one text, or two with a tab, instead of the run's training text.")
    ] = None,
    reduce_range: Annotated[
        bool | None,
        typer.Option(help="Weights of 7 bits, for CPUs without VNNI; otherwise where this CPU needs it."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads to time with; otherwise one per core.")] = None,
    client: Client = None,
    round: Round = None,
) -> None:
    """Make an INT8 ONNX file of a finished run, and say what that brings and costs."""
    from fedmtl.predict.onnx import require

    require("quantize", "onnx", "onnxscript", "onnxruntime")
    onnx = onnx_path(run, client, round)
    if onnx is None:
        onnx = api.Run.open(run).export_onnx(client=client, round=round) / "model.onnx"
    from fedmtl.compress.quantize import Quantization, calibration_rows, needs_reduced_range, quantize_measured

    reduced = needs_reduced_range() if reduce_range is None else reduce_range
    how = Quantization(scheme.value, all_ops, reduced)
    file = out or onnx.with_name(f"{onnx.stem}.{scheme.value}.onnx")
    _tell(quantize_measured(onnx, file, how, lambda model: calibration_rows(model, texts, 2 * samples), threads))


def _tell(made: Quantized) -> None:
    share = made.bytes_after / made.bytes_before
    write(f"{made.file}: {made.bytes_after / 1e6:.1f} MB, {share:.1%} of {made.bytes_before / 1e6:.1f} MB")
    gain = made.seconds_before / made.seconds_after
    write(
        f"one text of {made.length} tokens: {1e3 * made.seconds_after:.2f} ms, {gain:.2f} times as fast as"
        f" {1e3 * made.seconds_before:.2f} ms"
    )
    for task, share in made.agreement.items():
        write(f"{task}: same label for {share:.1%} of texts it was not measured on")
    if not made.agreement:
        write("no texts with labels: how often it agrees with the file in float was not measured; give --texts")
    if gain < 1:
        write(f"slower than the file in float on this machine; ship {made.source}, or try another `--scheme`")
