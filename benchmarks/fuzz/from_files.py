"""Targets that are files: checkpoints, tensors, saved models, events, configs, the book of keys, the token cache."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fuzz.formats import YAML_WORDS, Bundle, Json, Raw, Tensors, Text, Yaml, mend_digest, unbundle
from fuzz.targets import MEBIBYTE, Run, Target, put_files

ROUND = "round-0003"
CHECKPOINT = (f"{ROUND}.json", f"{ROUND}.safetensors")
MODEL = ("tasks.json", "config.json", "tokenizer_config.json", "tokenizer.json", "weights.safetensors")
TOKENS = ("meta.json", "0.ids.npy", "0.segments.npy", "0.offsets.npy")


def open_checkpoint(folder: Path) -> Run:
    from fedmtl.federation.checkpoint import load_checkpoint

    def run(data: bytes) -> None:
        put_files(folder, unbundle(data), CHECKPOINT)
        for number in (None, 3):
            state = load_checkpoint(folder, number)
            if state is not None:
                # What a server does with it before the next round.
                assert isinstance(state.round, int)
                state.plan.keys([key.name for key in state.weights], ("sst2",), "")
                assert all(score is None or score == score for p in state.progress.values() for _, score in p.scores)

    return run


def open_tensors(folder: Path) -> Run:
    from fedmtl.federation.client import load_state
    from fedmtl.model.tensor_files import load_tensors

    path = folder / f"{ROUND}.safetensors"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for slots in (load_tensors(path), load_state(folder, 3)):
            for values in slots.values():
                for key, value in values.items():
                    assert isinstance(key.name, str)
                    value.sum()

    return run


def open_saved_model(folder: Path) -> Run:
    from fedmtl.errors import ModelError
    from fedmtl.model.saved import load_model

    def run(data: bytes) -> None:
        put_files(folder, unbundle(data), MODEL)
        saved = load_model(folder)
        # Values may have stayed at clients: whoever binds a model looks first.
        missing = saved.missing(list(saved.tasks))
        if missing is not None:
            raise ModelError(f"{missing} is not in the folder")
        saved.bind()

    return run


def open_events(folder: Path) -> Run:
    from fedmtl.runs.folder import RunFolder
    from fedmtl.runs.log import cut_back, read_events
    from fedmtl.runs.summary import run_status, summarize

    run_folder = RunFolder(folder)

    def run(data: bytes) -> None:
        run_folder.events.write_bytes(data)
        events = read_events(run_folder)
        run_status(events, "first").to_json()
        summarize(events, "first").to_json()
        cut_back(run_folder, 2)

    return run


def open_report(folder: Path) -> Run:
    from fedmtl.report.page import write_report

    def run(data: bytes) -> None:
        put_files(folder, unbundle(data), ("events.jsonl", "config.yaml"))
        page = write_report(folder).read_text(encoding="utf-8")
        assert (page.count("<script"), page.count("</html>")) == (0, 1), "a page was broken by what is on it"

    return run


def open_dashboard(folder: Path) -> Run:
    from fedmtl.dashboard.card import Cards
    from fedmtl.dashboard.compare import comparison
    from fedmtl.dashboard.state import RunState

    run_folder = folder / "run"
    run_folder.mkdir()

    def run(data: bytes) -> None:
        (run_folder / "events.jsonl").write_bytes(data)
        cards = Cards([folder])
        found = RunState(cards.find("0/run"))
        while found.poll():
            pass
        json.dumps([cards.rows(), comparison([found, found])], allow_nan=False)
        json.dumps(found.sections({}), allow_nan=False)

    return run


def open_config(folder: Path) -> Run:
    from fedmtl.config.file import dump_config, load_config

    path = folder / "config.yaml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        dump_config(load_config(path))

    return run


def open_overrides(folder: Path) -> Run:
    from fedmtl.config.file import load_config

    def run(data: bytes) -> None:
        # A shell gives bytes that are no text as half surrogates.
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        load_config(None, [line.replace("\0", "") for line in lines if line])

    return run


def open_book(folder: Path) -> Run:
    from fedmtl.engines.flower.enrolment import BOOK, KeyBook

    def run(data: bytes) -> None:
        (folder / BOOK).write_bytes(data)
        book = KeyBook(folder)
        for tasks in book.tasks().values():
            assert all(isinstance(task, str) for task in tasks)
        book.name_of(b"a key")
        for name in ("keys", "problem"):
            getattr(book, name, str)()

    return run


def open_policy(folder: Path) -> Run:
    from fedmtl.federation.policy import policy_text, read_policy

    path = folder / "policy.yaml"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        policy_text(read_policy(path))

    return run


def open_audit(folder: Path) -> Run:
    from fedmtl.engines.flower.audit import NAME, Audit, describe_frame, entries, verify

    path = folder / NAME

    def run(data: bytes) -> None:
        path.write_bytes(data)
        verify(folder)
        for _ in entries(folder):
            pass
        describe_frame(path)
        # A site goes on with whatever chain it finds.
        Audit(folder).record("in", "welcome", b"words")
        verify(folder)

    return run


def open_token_cache(folder: Path) -> Run:
    from fedmtl.tasks.tokens import open_tokens, tokenize
    from fuzz.seeds import evaluated_tasks, small_tokenizer

    tokenizer, task = small_tokenizer(), evaluated_tasks()["sst2"]
    texts = (["a b", "c d e"],)
    cached, _ = tokenize(task, texts, tokenizer, 16, folder)

    def run(data: bytes) -> None:
        if not cached.is_dir():
            shutil.rmtree(cached, ignore_errors=True)
            cached.mkdir()
        put_files(cached, unbundle(data), TOKENS)
        again, truncated = tokenize(task, texts, tokenizer, 16, folder)
        assert isinstance(truncated, int)
        open_tokens.cache_clear()
        tokens: Any = open_tokens(again)
        # What a batch reads.
        lengths = tokens.lengths()
        assert len(lengths) == len(texts[0])
        for part in tokens.parts:
            assert len(part.ids[part.offsets[0] : part.offsets[-1]]) == lengths.sum()

    return run


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


POLICY = (Target("policy", open_policy, "a site's policy.yaml", Yaml(), share=0.3),)
AUDIT = (Target("audit", open_audit, "a site's audit.jsonl: verified, shown, gone on with", Json(lines=True), share=2),)
TARGETS = (
    *(POLICY if _is_there("fedmtl.federation.policy") else ()),
    *(AUDIT if _is_there("fedmtl.engines.flower.audit") else ()),
    Target(
        "checkpoint", open_checkpoint, "a checkpoint's JSON and tensor file, whose digest is mended",
        Bundle({CHECKPOINT[0]: Json(), CHECKPOINT[1]: Tensors()}, mend_digest), share=7,
    ),
    Target("tensors", open_tensors, "a tensor file, and a client's state", Tensors(), share=9),
    Target(
        "model", open_saved_model, "a saved model's folder",
        Bundle({name: Tensors() if name.endswith("s") else Json() for name in MODEL}),
        share=0.06, seconds=20, memory=256 * MEBIBYTE,
    ),
    Target("events", open_events, "events.jsonl: status, summary, cutting it back", Json(lines=True), share=2),
    Target(
        "report", open_report, "events.jsonl and config.yaml, the report's page of it",
        Bundle({"events.jsonl": Json(lines=True), "config.yaml": Text()}), share=0.6,
    ),
    Target("dashboard", open_dashboard, "events.jsonl, the dashboard's list and page of it", Json(lines=True), share=1),
    # PyYAML reads a config at the limit of 100,000 values in some four seconds.
    Target("config", open_config, "a config in YAML", Yaml(), share=0.2, seconds=10.0),
    Target("overrides", open_overrides, "`--set` overrides", Text(YAML_WORDS), share=1),
    Target("book", open_book, "enrolled.json, the book of keys", Json(), share=5),
    Target(
        "tokens", open_token_cache, "a folder of the token cache",
        Bundle({name: Json() if name.endswith(".json") else Raw() for name in TOKENS}), share=0.5,
    ),
)  # fmt: skip
