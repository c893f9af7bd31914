"""fedmtl pretrain"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedmtl.cli.arguments import LayerMap
from fedmtl.cli.tables import duration
from fedmtl.cli.terminal import Stages, make_stages
from fedmtl.compress.pretrain.settings import TEACHER, Losses, PretrainSettings, parse_vocab
from fedmtl.errors import ConfigError
from fedmtl.training.layer_maps import parse_layer_map

DEFAULTS = PretrainSettings(Path(), ())
WEIGHTS = Losses()


def pretrain(
    out: Annotated[Path, typer.Option("--out", help="Folder for the encoder; it appears when it is complete.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(help="More files of texts, so that --corpus takes a pattern.", metavar="[FILES]"),
    ] = None,
    teacher: Annotated[Path | None, typer.Option("--teacher", help="Folder of the encoder to learn from.")] = None,
    corpus: Annotated[
        list[str] | None,
        typer.Option(
            "--corpus",
            help="Texts: .txt with one a line, or every text column of a tsv, csv, jsonl or parquet file, also .gz; "
            "FILE=N takes N chunks of it.",
            metavar="FILE",
        ),
    ] = None,
    layers: Annotated[int, typer.Option("--layers", help="Layers of the student.", metavar="N")] = DEFAULTS.layers,
    hidden: Annotated[int, typer.Option("--hidden", help="Width of the student.", metavar="N")] = DEFAULTS.hidden,
    heads: Annotated[
        int | None, typer.Option("--heads", help="Attention heads; otherwise one per 64 of the width.", metavar="N")
    ] = None,
    vocab: Annotated[
        str,
        typer.Option(
            "--vocab",
            help="Word pieces of a new vocabulary, or teacher: its tokenizer, so that `fedmtl distill` can go on with"
            " its intermediate stage.",
            metavar="N|teacher",
        ),
    ] = str(DEFAULTS.vocab),
    max_length: Annotated[
        int, typer.Option("--max-length", help="Tokens of a text; longer is cut.", metavar="N")
    ] = DEFAULTS.max_length,
    chunk_words: Annotated[
        int,
        typer.Option("--chunk-words", help="Longer texts are cut into chunks of at most so many words.", metavar="N"),
    ] = DEFAULTS.chunk_words,
    steps: Annotated[int | None, typer.Option("--steps", help="Batches to train on.", metavar="N")] = None,
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", help="Minutes to train, instead of --steps; preparing is not counted.", metavar="N"),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="Segments per step.", metavar="N")] = DEFAULTS.batch,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", help="Highest step size; it rises, then falls in a cosine.", metavar="X")
    ] = DEFAULTS.learning_rate,
    seed: Annotated[int, typer.Option("--seed", help="All randomness derives from it.", metavar="N")] = DEFAULTS.seed,
    layer_map: LayerMap = "uniform",
    hidden_loss: Annotated[
        bool, typer.Option("--hidden-loss/--no-hidden-loss", help="Learn the hidden states of words.")
    ] = True,
    similarity_loss: Annotated[
        bool | None,
        typer.Option(
            "--similarity-loss/--no-similarity-loss",
            help="Learn how alike sentences are; otherwise with a new vocabulary.",
        ),
    ] = None,
    attention_loss: Annotated[
        bool | None,
        typer.Option(
            "--attention-loss/--no-attention-loss",
            help="Learn which words relate to which; with --vocab teacher the attention scores, and by default.",
        ),
    ] = None,
    hidden_weight: Annotated[
        float, typer.Option("--hidden-weight", help="Weight of the hidden states.", metavar="X")
    ] = WEIGHTS.hidden,
    similarity_weight: Annotated[
        float,
        typer.Option("--similarity-weight", help="Weight of the similarity of projected sentences.", metavar="X"),
    ] = WEIGHTS.similarity,
    own_similarity_weight: Annotated[
        float,
        typer.Option("--own-similarity-weight", help="Weight of the similarity of sentences as they are.", metavar="X"),
    ] = WEIGHTS.own_similarity,
    attention_weight: Annotated[
        float, typer.Option("--attention-weight", help="Weight of the relations between words.", metavar="X")
    ] = 1.0,
    mask_words: Annotated[
        float,
        typer.Option("--mask-words", help="Share of words hidden from the student in every second batch.", metavar="X"),
    ] = DEFAULTS.mask_words,
    altered: Annotated[
        bool | None,
        typer.Option(
            "--altered/--no-altered",
            help="Make half of each batch of copies of the other half with words left out, swapped or cut off;"
            " otherwise with a new vocabulary.",
        ),
    ] = None,
    balanced: Annotated[
        bool,
        typer.Option(
            "--balanced/--no-balanced", help="Let the few pairs that are alike count as much as the many not."
        ),
    ] = DEFAULTS.balanced,
    teacher_table: Annotated[
        bool,
        typer.Option("--teacher-table/--no-teacher-table", help="Begin with the teacher's embeddings, made narrower."),
    ] = DEFAULTS.teacher_table,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="With --vocab teacher, read each row of a table with two text columns as a pair in one pass too.",
        ),
    ] = DEFAULTS.pairs,
    device: Annotated[str, typer.Option("--device", help="cpu, cuda, or auto: a GPU where there is one.")] = "auto",
    keep_teacher: Annotated[
        bool | None,
        typer.Option(
            "--keep-teacher/--no-keep-teacher",
            help="Run the teacher once and keep its answers in memory; otherwise where they fit.",
        ),
    ] = None,
    graphs: Annotated[
        bool, typer.Option("--graphs/--no-graphs", help="On a GPU, record each shape of step once and replay it.")
    ] = True,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")] = False,
    checkpoint_every: Annotated[
        int, typer.Option("--checkpoint-every", help="Steps between two checkpoints.", metavar="N")
    ] = 1000,
    work: Annotated[
        Path | None,
        typer.Option("--work", help="Folder for checkpoints and tokens, which later runs use again; else OUT.work."),
    ] = None,
    report: Annotated[Path | None, typer.Option("--report", help="JSON file for the losses of the training.")] = None,
    teacher_license: Annotated[
        str | None, typer.Option("--teacher-license", help="The teacher's licence, for the model card.")
    ] = None,
    note: Annotated[
        list[str] | None, typer.Option("--note", help="A sentence on the teacher, for the model card.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            help="JSON of benchmarks/encoder.py, for the model card; without --teacher only the card is rewritten.",
        ),
    ] = None,
) -> None:
    """Distil a small encoder from a larger one on any texts, with a new vocabulary or its teacher's."""
    if teacher is None:
        _only_card(out, measured, [*(corpus or []), *(files or [])])
        return
    pieces = parse_vocab(vocab)
    is_alike = pieces == TEACHER
    similarity = not is_alike if similarity_loss is None else similarity_loss
    settings = PretrainSettings(
        teacher=teacher,
        corpus=(*(corpus or []), *(files or [])),
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=pieces,
        max_length=max_length,
        chunk_words=chunk_words,
        steps=steps,
        minutes=minutes,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        layer_map=parse_layer_map(layer_map),
        losses=Losses(
            hidden_weight * hidden_loss,
            similarity_weight * similarity,
            own_similarity_weight * similarity,
            attention_weight * (is_alike if attention_loss is None else attention_loss),
        ),
        mask_words=mask_words,
        altered=not is_alike if altered is None else altered,
        balanced=balanced,
        teacher_table=teacher_table,
        pairs=pairs,
    )
    from fedmtl.compress.pretrain.run import Disclosure, Machine, PretrainPaths, pretrain

    command = shlex.join(["fedmtl", *sys.argv[1:]])
    with make_stages() as stages:
        listener = Listener(stages)
        pretrain(
            settings,
            PretrainPaths(out, work or out.with_name(f"{out.name}.work"), report),
            Machine(device, keep_teacher, graphs, checkpoint_every),
            Disclosure(command, teacher_license, tuple(note or []), measured),
            listener,
            resume=resume,
        )
        listener.say(f"written: {out}")


def _only_card(out: Path, measured: Path | None, corpus: list[str]) -> None:
    if measured is None or corpus:
        raise ConfigError("--teacher: not given; name the folder of the encoder to learn from")
    from fedmtl.compress.pretrain.card import update_card

    update_card(out, measured)
    print(f"card rewritten: {out}")


if TYPE_CHECKING:
    from fedmtl.compress.pretrain.loop import Update


class Listener:
    """Prints the progress of a pretraining."""

    def __init__(self, stages: Stages) -> None:
        self.say, self._stages = stages.say, stages

    def advance(self, stage: str, done: int, total: int) -> None:
        self._stages.show(stage, done / total, f"{done:,} of {total:,} segments")

    def update(self, update: Update) -> None:
        words = f"step {update.step:,}, {_losses(update)}; {_speed(update)}"
        self._stages.show("training", update.share, words)


def _losses(update: Update) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in update.losses.items())


def _speed(update: Update) -> str:
    speed = f"{update.segments_per_second:,.0f} segments/s, {update.tokens_per_second:,.0f} tokens/s"
    return (
        f"{speed}, {duration(update.seconds_left)} left" if update.share < 1 else f"{speed}, {duration(update.seconds)}"
    )
