"""A whole pretraining: texts, vocabulary, segments, the teacher's answers, training, the artefact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from fedmtl.compress.distill.intermediate import StateLosses
from fedmtl.compress.pretrain.batches import DeviceSide, Epochs
from fedmtl.compress.pretrain.card import Facts, write_card
from fedmtl.compress.pretrain.corpus import Corpus, read_corpus
from fedmtl.compress.pretrain.loop import Position, Update, distil, load_checkpoint, save_checkpoint
from fedmtl.compress.pretrain.same_tokens import TokenTargets, build_alike, fit_to_teacher, general_record
from fedmtl.compress.pretrain.segments import Segments, divider, open_segments, train_vocabulary, write_segments
from fedmtl.compress.pretrain.settings import PretrainSettings, check_settings
from fedmtl.compress.pretrain.steps import Data, GraphStep, Step
from fedmtl.compress.pretrain.student import (
    Student,
    build_optimizer,
    build_student,
    check_output_folder,
    table_from_teacher,
    write_artefact,
)
from fedmtl.compress.pretrain.targets import CachedTargets, LiveTargets, TargetSource, Wanted, fits
from fedmtl.config import ModelConfig
from fedmtl.errors import ConfigError, DataError, FedmtlError, ModelError
from fedmtl.model.device import pick_device
from fedmtl.model.encoder import Encoder, load_encoder
from fedmtl.model.wordpiece import wrap_tokenizer
from fedmtl.runs.energy import Meter, energy_words, total_energy
from fedmtl.runs.folder import locked, make_private_folder, write_atomic
from fedmtl.training.layer_maps import attention_map, hidden_map


class Listener(Protocol):
    """Whoever shows what happens."""

    def say(self, line: str) -> None: ...
    def advance(self, stage: str, done: int, total: int) -> None: ...
    def update(self, update: Update) -> None: ...


@dataclass(frozen=True)
class PretrainPaths:
    """Where the artefact, the files that a later run uses again and, if wanted, the log of losses are written."""

    out: Path
    work: Path
    report: Path | None = None

    @property
    def checkpoint(self) -> Path:
        return self.work / f"{self.out.name}.checkpoint"


@dataclass(frozen=True)
class Disclosure:
    """What only the user knows and the card should say."""

    command: str
    teacher_license: str | None = None
    notes: tuple[str, ...] = ()
    measured: Path | None = None


@dataclass(frozen=True)
class Machine:
    """How it is computed; the results do not depend on it, but for rounding."""

    device: str = "auto"
    keep_teacher: bool | None = None
    graphs: bool = True
    save_every: int = 1000

    def replays(self, device: torch.device) -> bool:
        """Whether steps are recorded and replayed."""
        return self.graphs and device.type == "cuda"


def pretrain(
    settings: PretrainSettings,
    paths: PretrainPaths,
    machine: Machine,
    disclosure: Disclosure,
    listener: Listener,
    *,
    resume: bool = False,
) -> Student:
    """Pretrain, with `resume` from the last checkpoint; return the student, whose artefact is in `paths.out`."""
    check_settings(settings)
    if settings.same_tokens and machine.keep_teacher:
        raise ConfigError(
            "--keep-teacher: with --vocab teacher the scores of all texts would be too many to keep; leave it out"
        )
    check_output_folder(paths.out)
    _check_checkpoint(paths.checkpoint, resume)
    make_private_folder(paths.work)
    meter = Meter()
    try:
        with locked(paths.work, f".{paths.out.name}.lock"):
            student = _pretrain(settings, paths, machine, disclosure, listener, resume, meter)
        spent = total_energy([meter.take()])
    finally:
        meter.close()
    assert spent is not None, "an event was given"
    listener.say(f"energy{' since --resume' if resume else ''}: {energy_words(spent)}")
    return student


def _pretrain(
    settings: PretrainSettings,
    paths: PretrainPaths,
    machine: Machine,
    disclosure: Disclosure,
    listener: Listener,
    resume: bool,
    meter: Meter,
) -> Student:
    device = pick_device(machine.device, "--device")
    meter.watch(str(device))
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    teacher = load_teacher(settings)
    if settings.same_tokens:
        settings = fit_to_teacher(settings, teacher)
        check_settings(settings)
    corpus = read_corpus(settings.corpus, settings.chunk_words, settings.seed, pairs=settings.pairs)
    for source in corpus.sources:
        columns = f" ({', '.join(source.columns)})" if source.columns != ("",) else ""
        listener.say(f"{source.file}{columns}: {source.texts:,} texts, {source.chunks:,} new chunks")
    tokenizer, segments, digest = _prepare(settings, corpus, teacher, paths.work, listener)
    if len(segments) < settings.batch:
        raise DataError(
            f"--corpus: {len(segments):,} segments are fewer than one batch of {settings.batch:,}; "
            "add texts or lower --batch"
        )
    student, losses = _student(settings, teacher, tokenizer)
    student.to(device)
    optimizer = build_optimizer(student, settings)
    fingerprint = settings.fingerprint(digest)
    position = load_checkpoint(paths.checkpoint, fingerprint, student, optimizer) if resume else Position()
    data = _on_device(settings, segments, teacher, tokenizer, losses, machine, device, listener)
    step = (
        GraphStep(student, optimizer, data, settings, listener.say)
        if machine.replays(device)
        else Step(student, optimizer, data, settings)
    )

    def save() -> None:
        save_checkpoint(paths.checkpoint, fingerprint, position, student, optimizer)
        _write_report(paths.report, settings, corpus, segments, position)

    distil(step, settings, position, save=save, save_every=machine.save_every, report=listener.update)
    _write_report(paths.report, settings, corpus, segments, position)
    hidden = hidden_map(int(teacher.module.config.num_hidden_layers), settings.layers, settings.layer_map)
    facts = _facts(settings, paths, disclosure, corpus, segments, position, student, hidden, device)
    general = None if losses is None else general_record(settings, teacher, losses)
    write_artefact(paths.out, student, tokenizer, write_card(facts, disclosure.measured), general)
    paths.checkpoint.unlink(missing_ok=True)
    return student


def _student(settings: PretrainSettings, teacher: Encoder, tokenizer: Any) -> tuple[Student, StateLosses | None]:
    """The student before its training, and with the teacher's vocabulary the losses between both."""
    if settings.same_tokens:
        return build_alike(settings, teacher)
    pieces = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: int(item[1])))
    table = table_from_teacher(pieces, teacher, settings.hidden) if settings.teacher_table else None
    return build_student(settings, len(pieces), teacher.hidden_size, table), None


def load_teacher(settings: PretrainSettings) -> Encoder:
    """The teacher, in evaluation mode and without a pooler."""
    if not (settings.teacher / "config.json").is_file():
        raise ModelError(f"--teacher: {settings.teacher} is no folder with a config.json; name a model's folder")
    # A relative name without a slash would be looked up on the hub.
    config = ModelConfig(server_model=str(settings.teacher.resolve()), max_length=settings.max_length)
    try:
        encoder = load_encoder(config, settings.seed, keep_pooler=False)
    except ModelError as error:
        named = str(error).replace("model.server_model", "--teacher").replace("model.max_length", "--max-length")
        raise ModelError(named) from error
    encoder.module.requires_grad_(False).eval()
    return encoder


def _check_checkpoint(path: Path, resume: bool) -> None:
    if resume and not path.exists():
        raise FedmtlError(f"--resume: there is no checkpoint {path}; start without --resume")
    if not resume and path.exists():
        raise FedmtlError(f"{path}: an earlier pretraining did not end; go on with --resume, or delete this file")


def _prepare(
    settings: PretrainSettings, corpus: Corpus, teacher: Encoder, work: Path, listener: Listener
) -> tuple[Any, Segments, str]:
    """The student's tokenizer and the segments, from `work` where an earlier run left the same; and their digest."""
    backend = json.loads(teacher.tokenizer.backend_tokenizer.to_str()) if teacher.tokenizer.is_fast else {}
    # Neither changes a segment, and every call of the tokenizer changes them.
    rules = {name: rule for name, rule in backend.items() if name not in ("padding", "truncation")}
    known = [corpus.digest(), settings.vocab, settings.max_length, rules]
    digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]
    if isinstance(settings.vocab, int):
        texts = [text for text in corpus.texts if isinstance(text, str)]
        pieces = _vocabulary(settings.vocab, texts, work / f"vocabulary-{digest}.json", listener)
        student = wrap_tokenizer(pieces, model_max_length=settings.max_length)
    else:
        student = teacher.tokenizer
    folder = work / f"segments-{digest}"
    segments = open_segments(folder)
    if segments is None:
        write_segments(
            folder, corpus.texts, teacher.tokenizer, student, settings.max_length, _stage(listener, "tokenizing")
        )
        segments = open_segments(folder)
        assert segments is not None, "the segments were just written"
    listener.say(
        f"{len(segments):,} segments, {int(segments.num_words.sum()):,} words, {int(segments.student.offsets[-1]):,} "
        f"pieces (teacher {int(segments.teacher.offsets[-1]):,}); {segments.num_skipped:,} texts did not align"
    )
    return student, segments, digest


def _vocabulary(num_pieces: int, texts: Sequence[str], path: Path, listener: Listener) -> dict[str, int]:
    if path.exists():
        pieces: dict[str, int] = json.loads(path.read_text(encoding="utf-8"))
    else:
        listener.say(f"training a vocabulary on {len(texts):,} texts")
        pieces = train_vocabulary(texts, num_pieces)
        write_atomic(path, json.dumps(pieces).encode())
    if len(pieces) < num_pieces:
        listener.say(f"the texts give {len(pieces):,} word pieces, fewer than the {num_pieces:,} requested")
    return pieces


def _on_device(
    settings: PretrainSettings,
    segments: Segments,
    teacher: Encoder,
    tokenizer: Any,
    losses: StateLosses | None,
    machine: Machine,
    device: torch.device,
    listener: Listener,
) -> Data:
    teacher.module.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    pad_id, mask_id = int(tokenizer.pad_token_id or 0), int(tokenizer.mask_token_id or 0)
    num_words = torch.from_numpy(segments.num_words.copy()).to(device)
    second = divider(teacher.tokenizer) if settings.pairs and "token_type_ids" in teacher.accepts else None
    tokens = DeviceSide(segments.student, pad_id, device, second)
    epochs = Epochs(
        segments, settings.num_drawn, settings.max_length, settings.seed, device, joint=machine.replays(device)
    )
    side = DeviceSide(segments.teacher, int(teacher.tokenizer.pad_token_id or 0), device, second)
    if losses is not None:
        alike = TokenTargets(teacher, side, losses)
        return Data(tokens, num_words, alike, alike, epochs, mask_id, losses)
    num_layers = int(teacher.module.config.num_hidden_layers)
    wanted = Wanted(
        hidden_map(num_layers, settings.layers, settings.layer_map) if settings.losses.hidden else (),
        _attention_layer(settings, num_layers) if settings.losses.attention else None,
    )
    live = LiveTargets(teacher, side, wanted)
    keep = machine.keep_teacher
    if keep is None:
        # Asking for every segment pays only where every segment comes up.
        sees_all = settings.steps is None or settings.steps * settings.batch >= len(segments)
        keep = sees_all and fits(segments, wanted, teacher.hidden_size, device)
    # An altered copy is new every time.
    is_cached = keep and not settings.altered
    targets: TargetSource = (
        CachedTargets(live, segments, epochs, _stage(listener, "asking the teacher")) if is_cached else live
    )
    return Data(tokens, num_words, live, targets, epochs, mask_id)


def _attention_layer(settings: PretrainSettings, num_layers: int) -> int:
    """The teacher's layer whose relations the student's last layer learns, as in MiniLM only that one."""
    layer_map = settings.layer_map
    if isinstance(layer_map, str):
        return attention_map(num_layers, settings.layers, layer_map)[-1]
    return max(0, layer_map[-1] - 1)


def _stage(listener: Listener, stage: str) -> Callable[[int, int], None]:
    return lambda done, total: listener.advance(stage, done, total)


def _write_report(
    path: Path | None, settings: PretrainSettings, corpus: Corpus, segments: Segments, position: Position
) -> None:
    if path is None:
        return
    record = {
        "settings": settings.to_json(),
        "corpus": [vars(source) for source in corpus.sources],
        "segments": len(segments),
        "words": int(segments.num_words.sum()),
        "tokens": int(segments.student.offsets[-1]),
        "skipped": segments.num_skipped,
        "steps": position.step,
        "seconds": position.seconds,
        "segments_seen": position.num_segments,
        "tokens_seen": position.num_tokens,
        "log": position.log,
    }
    write_atomic(path, json.dumps(record, indent=1).encode())


def _facts(
    settings: PretrainSettings,
    paths: PretrainPaths,
    disclosure: Disclosure,
    corpus: Corpus,
    segments: Segments,
    position: Position,
    student: Student,
    hidden: Sequence[int],
    device: torch.device,
) -> Facts:
    last: dict[str, Any] = position.log[-1] if position.log else {}
    return Facts(
        name=paths.out.name,
        teacher=settings.teacher.name,
        teacher_license=disclosure.teacher_license,
        notes=disclosure.notes,
        command=disclosure.command,
        settings=settings.to_json(),
        num_parameters=sum(p.numel() for p in student.encoder.parameters()),
        num_pieces=int(student.encoder.config.vocab_size),
        hidden_map=hidden,
        sources=corpus.sources,
        num_segments=len(segments),
        num_skipped=segments.num_skipped,
        steps=position.step,
        seconds=position.seconds,
        segments_seen=position.num_segments,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        final_losses={k: v for k, v in last.items() if k not in ("step", "learning_rate", "seconds")},
    )
