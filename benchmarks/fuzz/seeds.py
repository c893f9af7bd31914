"""What the inputs of the corpus are made of: small, whole and valid; `python -m fuzz --write-corpus` writes them."""

from __future__ import annotations

import functools
import gzip
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedmtl.config import EvaluationConfig, FederationConfig, TrainingConfig
from fedmtl.federation import handshake
from fedmtl.federation.dispatch import ServerSettings
from fedmtl.federation.messages import Codecs, Job, Progress, State, Update
from fedmtl.federation.wire import encode_job, encode_update
from fedmtl.federation.wire.codecs import encode_tensors
from fedmtl.runs.event_lines import Event, to_line
from fedmtl.runs.events import (
    Averages,
    ClientFacts,
    ClientsEvent,
    ClientShare,
    DataEvent,
    EarlyStopEvent,
    EndEvent,
    FailureEvent,
    LayerFacts,
    PlanEvent,
    RoundEvent,
    ScopeFacts,
    SiteEvent,
    StartEvent,
    TaskFacts,
    TaskUpdate,
    TaskWeightsEvent,
    UpdateEvent,
)
from fedmtl.sharing.plan import Extra, Key, SharingPlan
from fedmtl.tasks.metrics import sum_predictions
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import local_settings
from fuzz.formats import bundle
from fuzz.targets import CORPUS, scratch

PLAN = SharingPlan((("heads.*", "task"), ("upper.*", "group"), ("*", "all")), ({"sst2": "pair", "stsb": "pair"},))
ROWS = np.array([0, 1, 2, 3, 8, 9, 200, 30_000])
TABLE, UPPER, HEAD = Key("all", "table"), Key("group:pair", "upper.w"), Key("task:sst2", "heads.sst2.bias")
FROZEN = Key("fixed", "frozen")
# Examples that a client of an evaluation has.
NUM_EXAMPLES = {"sst2": 40, "stsb": 40}
NAMES = ("table", "upper.w", "heads.sst2.bias", "heads.stsb.bias")


def wire_job() -> Job:
    """A job whose tensors are few and small, one of every kind that travels."""
    generator = torch.Generator().manual_seed(7)
    weights = {
        TABLE: torch.randn(len(ROWS), 12, generator=generator),
        UPPER: torch.randn(4, 6, generator=generator),
        HEAD: torch.randn(2, generator=generator),
        FROZEN: torch.randn(3, generator=generator),
    }
    settings = {
        "batch_size": 8,
        "learning_rate": 1e-3,
        "num_rounds": 3,
        "task_order": "random",
        "methods": {"adaptive_sharing": {"layers": ["upper"]}, "pcgrad": {}, "pruning": {}},
    }
    mask = torch.zeros(4, 6, dtype=torch.bool)
    mask[1, 2:5] = True
    extra = {
        "pruning": Extra(tensors={"mask": {UPPER: mask}}),
        "scaffold": Extra({"rate": 0.5}, {"control": {UPPER: 0.1 * weights[UPPER]}}),
    }
    codecs = Codecs("fp32", "int8", 0.2, True)
    fixed = {"frozen": "0123456789abcdef"}
    return Job("train", 2, "clinic", ("sst2",), weights, PLAN, ROWS, 5, 1, settings, fixed, codecs, extra)


def wire_update(codec: str) -> Update:
    job = wire_job()
    delta = {key: 0.01 * weight for key, weight in job.weights.items() if key.scope != "fixed"}
    coded = encode_tensors(delta, lambda key: codec, 0.2)
    extra = {
        "adaptive_sharing": Extra({"inner_products": {"upper": [[1.5]]}}),
        "pcgrad": Extra({"conflicts": 0.25}),
    }
    return Update(
        2, "clinic", ("sst2",), coded, ROWS, {"sst2": 40}, {"sst2": 0.7}, seen={"sst2": 80}, extra=extra
    )  # fmt: skip


def exchange_job(client: str, values: Any) -> Job:
    """An exchange of secure aggregation, with these values of the server's."""
    options = {
        "bits": 32,
        "max_value": 1.0,
        "threshold": 0.6,
        "min_clients": 3,
        "average": "weighted",
        "max_norm": None,
    }
    settings, extra = {"methods": {"secure_aggregation": options}}, {"secure_aggregation": Extra(values)}
    plan = SharingPlan((("*", "all"),))
    return Job("exchange", 1, client, ("sst2",), {}, plan, None, 0, 0, settings, extra=extra)


def _exchanges() -> dict[str, bytes]:
    session = "0" * 32
    said = {
        "advertise": {"step": "advertise", "session": "1" * 32, "purpose": "evaluate"},
        "share": {
            "step": "share",
            "session": session,
            "roster": {name: f"@{name}@" for name in "abc"},
            "task_weights": {"sst2": 1.0},
            "units": {"all": 16.0},
        },
        "unmask": {
            "step": "unmask",
            "session": session,
            "returned": ["a", "b", "c"],
            "sealed": {name: f"@sealed {name}@" for name in "abc"},
        },
    }
    return {name: json.dumps(values).encode() for name, values in said.items()}


@functools.cache
def evaluated_tasks() -> dict[str, Task]:
    return {
        "sst2": Task("sst2", "classification", ("sentence",), "label", "accuracy", ("negative", "positive")),
        "stsb": Task("stsb", "regression", ("a", "b"), "label", "pearson", score_range=(0.0, 5.0), outputs=1),
    }


@functools.cache
def _honest_sums(pairs: bool) -> str:
    random = np.random.default_rng(3)
    tasks = evaluated_tasks()
    logits, labels = random.normal(size=(40, 2)), random.integers(0, 2, 40)
    scaled, scores = random.random((40, 1)), random.random(40).astype(np.float32)
    return json.dumps({
        "sst2": sum_predictions(tasks["sst2"], logits, labels, 21.5).to_dict(),
        "stsb": sum_predictions(tasks["stsb"], scaled, scores, 2.5, pairs).to_dict(),
    })  # fmt: skip


def honest_sums(pairs: bool = False) -> dict[str, Any]:
    """What a client answers that scored 40 examples of each task."""
    sums: dict[str, Any] = json.loads(_honest_sums(pairs))
    return sums


def evaluating_server() -> ServerSettings:
    training = TrainingConfig(num_rounds=3, batch_size=1, optimizer="sgd")
    return ServerSettings(
        tasks=evaluated_tasks(),
        names=NAMES,
        table="table",
        active_tasks=lambda client, number: ("sst2", "stsb"),
        federation=FederationConfig.model_validate({"vocabulary_slices": False}),
        evaluation=EvaluationConfig(),
        settings=local_settings(training, {}, {}, keep_optimizer=False),
        task_weights={"sst2": 1.0, "stsb": 1.0},
        seed=0,
    )


def evaluated_state() -> State:
    weights = {
        key: torch.zeros(1)
        for key in (TABLE, UPPER, HEAD, Key("group:pair", "upper.w"), Key("task:stsb", "heads.stsb.bias"))
    }
    return State(1, weights, PLAN)


def small_tokenizer() -> Any:
    """A tokenizer of the letters and some words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c", "d", "e", "film", "good", "bad"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )


def write_corpus() -> None:
    """Write every target's seeds; inputs that failed once stay as they are."""
    for target, inputs in {**_network(), **_files(), **_policies(), **_tables()}.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in inputs.items():
            (folder / name).write_bytes(data)


def _network() -> dict[str, dict[str, bytes]]:
    from fuzz.port import recorded_requests

    evaluate = Job("evaluate", 2, "clinic", ("sst2",), {HEAD: torch.zeros(2)}, PLAN, None, 5, 1, {"batch_size": 8})
    frames = {codec: bytes(encode_update(wire_update(codec))) for codec in ("fp32", "fp16", "int8", "topk")}
    answer = Update(1, "other", ("sst2", "stsb"), {}, None, NUM_EXAMPLES, {}, honest_sums())
    pairs = replace(answer, sums=honest_sums(True))
    sums = {"plain": json.dumps(honest_sums()).encode(), "pairs": json.dumps(honest_sums(True)).encode()}
    sums["one"] = json.dumps({"sst2": honest_sums()["sst2"]}).encode()
    sums["none"] = json.dumps({"stsb": _no_scores()}).encode()
    return {
        "wire-job": {"train": bytes(encode_job(wire_job())), "evaluate": bytes(encode_job(evaluate))},
        "wire-update": {**frames, "sums": bytes(encode_update(answer))},
        "envelope": _envelopes(),
        "hello": {"two": _hello(("sst2", "stsb")), "bank": _hello(("qqp",), "bank"), "bare": _bare_hello()},
        "welcome": {"small": _welcome()},
        "exchange": _exchanges(),
        "sums": sums,
        "evaluation": {"plain": bytes(encode_update(answer)), "pairs": bytes(encode_update(pairs))},
        "http": recorded_requests(),
    }


def _no_scores() -> dict[str, Any]:
    task = evaluated_tasks()["stsb"]
    return sum_predictions(task, np.zeros((0, 1)), np.zeros(0, dtype=np.float32), 0.0).to_dict()


def _envelopes() -> dict[str, bytes]:
    from flwr.app import Error, Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.task_identity import TaskIdentity

    from fedmtl.engines.flower.envelope import fill_envelope
    from fuzz.port import known_ids

    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    with known_ids():
        request = Message(fill_envelope("job", "words", b"frame" * 10), 7, "query")
        messages = {
            "frame": request,
            "words": Message(fill_envelope("hello", '{"client": "clinic"}'), 7, "query"),
            "error": Message(Error(0, "no room"), reply_to=request),
        }
    bundles = {}
    for name, message in messages.items():
        objects = {key: each.deflate() for key, each in get_all_nested_objects(message).items()}
        files: dict[str, bytes] = {}
        for number, content in enumerate(objects.values()):
            for index, key in enumerate(objects):
                content = content.replace(key.encode(), b"<%d>" % index)
            files[str(number)] = content
        bundles[name] = bundle(files)
    return bundles


def _hello(tasks: tuple[str, ...], client: str = "clinic") -> bytes:
    labels = {"sst2": ["negative", "positive"], "stsb": [], "qqp": ["different", "duplicate"]}
    terms: dict[str, Any] = {"version": "@version@", "tokenizer": "ab" * 8, "encoder": "cd" * 8}
    counts = {"examples": 40, "validation": 10, "tokens": 400, "truncated": 0}
    labelled: dict[str, dict[str, Any]]
    if "label_list" in handshake.TaskCounts.model_fields:
        labelled = {task: {"labels": [20] * len(labels[task]), "label_list": _digest(labels[task])} for task in tasks}
    else:
        labelled = {task: {"labels": dict.fromkeys(labels[task], 20)} for task in tasks}
        terms["labels"] = {task: labels[task] for task in tasks}
    rows = {"rows": [0, 1, 2, 3, 200, 30000], "evaluation_rows": [0, 1, 2, 3]}
    holdings = {task: {**counts, **labelled[task]} for task in tasks}
    return json.dumps({"client": client, "terms": terms, "tasks": holdings, **rows}).encode()


def _digest(labels: list[str]) -> str:
    return str(handshake.labels_digest(labels))  # type: ignore[attr-defined]


def _bare_hello() -> bytes:
    return b'{"client": "clinic", "terms": {"version": "0.0.0"}}'


def _welcome() -> bytes:
    from fedmtl.config.file import load_config

    config = load_config(None, ["tasks.sst2={}", "tasks.stsb={}", "training.num_rounds=3"])
    labels = {"sst2": ["negative", "positive"], "stsb": []}
    terms = {"version": "@version@", "tokenizer": "ab" * 8, "encoder": "cd" * 8, "labels": labels}
    content = {
        "run": "0123456789abcdef",
        "config": config.model_dump(mode="json"),
        "evaluated": True,
        "max_bytes": 1 << 30,
    }
    return json.dumps({**content, "terms": terms}).encode()


def _files() -> dict[str, dict[str, bytes]]:
    book = {
        "clinic": {"key": _public_key(), "tasks": ["sst2", "stsb"]},
        "bank": {"key": _public_key(), "tasks": ["qqp"]},
    }
    events = _events()
    with scratch() as folder:
        return {
            "checkpoint": _checkpoints(folder / "checkpoints"),
            "tensors": _tensor_files(folder / "tensors"),
            "model": {"small": _model(folder / "model")},
            "events": {"run": events, "start": events[: events.find(b'{"event": "update"')]},
            "report": {"run": bundle({"events.jsonl": events, "config.yaml": _CONFIGS["small"]})},
            "dashboard": {"run": events, "start": events[: events.find(b'{"event": "update"')]},
            "config": _CONFIGS,
            "overrides": {"some": _OVERRIDES},
            "book": {"two": json.dumps(book, indent=1).encode(), "none": b"{}"},
            "tokens": {"two": _token_folder(folder / "tokens")},
        }


def _public_key() -> str:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()


def _policies() -> dict[str, dict[str, bytes]]:
    """What a site writes, where this version has it: its policy, and the chain of its audit."""
    try:
        from fedmtl.engines.flower.audit import NAME, Audit
        from fedmtl.federation.policy import policy_text
    except ImportError:
        return {}
    with scratch() as folder:
        audit = Audit(folder)
        for way, kind in (("in", "welcome"), ("out", "hello"), ("in", "job"), ("out", "update")):
            audit.record(way, kind, b"words", round=1, tasks=["sst2"])
        chain = (folder / NAME).read_bytes()
    # Without its sentences, which are most of it.
    lines = [line for line in policy_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return {"policy": {"default": "\n".join(lines).encode(), "none": b""}, "audit": {"four": chain}}


def _checkpoints(folder: Path) -> dict[str, bytes]:
    from fedmtl.federation.checkpoint import save_checkpoint

    weights = {key: value for key, value in wire_job().weights.items() if key != FROZEN}
    progress = {
        "sst2": Progress(((0, None), (1, 0.5), (2, 0.75)), 2, 0.75, None),
        "stsb": Progress(((0, 0.1),), 0, 0.1, 2),
    }
    track = {"agreement": {"sst2/stsb": 0.25}, "low": 1, "high": 0}
    extra = {
        "adaptive_sharing": Extra({"layers": {"upper": track}}),
        "server_optimizer": Extra(tensors={"momentum": {UPPER: torch.ones(4, 6)}}),
        "pruning": Extra(tensors={"mask": {UPPER: torch.zeros(4, 6, dtype=torch.bool)}}),
    }
    states = {
        "whole": State(3, weights, PLAN, progress, {"clinic": 3}, (2, 0.75), extra),
        "plain": State(3, {HEAD: torch.ones(2)}, SharingPlan((("*", "all"),))),
    }
    bundles = {}
    for name, state in states.items():
        save_checkpoint(folder / name, state)
        bundles[name] = bundle({path.name: path.read_bytes() for path in sorted((folder / name).iterdir())})
    return bundles


def _tensor_files(folder: Path) -> dict[str, bytes]:
    from fedmtl.model.tensor_files import save_tensors

    slots: Mapping[str, Any] = {
        "weights": {
            HEAD: torch.ones(2),
            UPPER: torch.ones(4, 6).half(),
            Key("client:clinic", "own"): torch.ones(1).bfloat16(),
        },
        "optimizer": {HEAD: torch.arange(3), Key("all", "mask"): torch.zeros(3, dtype=torch.bool)},
    }
    for name, given in (("slots", slots), ("one", {"fixed": {FROZEN: torch.ones(3)}}), ("none", {})):
        save_tensors(folder / name, given)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _model(folder: Path) -> bytes:
    from transformers import BertConfig, BertModel

    from fedmtl.config import ModelConfig
    from fedmtl.model.encoder import describe_encoder
    from fedmtl.model.multitask import build_model
    from fedmtl.model.saved import save_model
    from fuzz.from_files import MODEL

    tokenizer = small_tokenizer()
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 8, "max_position_embeddings": 16, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(1)
    encoder = describe_encoder(BertModel(BertConfig(**sizes)), tokenizer, "small", True)
    tasks = evaluated_tasks()
    model = build_model(encoder, tasks, 0, ModelConfig(), log_variances=False)
    plan = SharingPlan((("heads.*", "task"), ("*", "all")))
    weights = {
        key: getattr(*model.canonical()[name]).detach()
        for view in plan.keys(model.canonical(), list(tasks), "").values()
        for name, key in view.items()
    }
    save_model(folder, encoder, tasks, plan, weights, ModelConfig(max_length=16))
    return bundle({name: (folder / name).read_bytes() for name in MODEL})


def _events() -> bytes:
    """A run of two rounds with every kind of event that a page or a summary reads."""
    tasks = {
        "sst2": TaskFacts(kind="classification", labels=["negative", "positive"], metric="accuracy", pool="cls"),
        "stsb": TaskFacts(kind="regression", labels=[], metric="pearson", pool="cls", score_range=[0.0, 5.0]),
    }
    share = ClientShare(examples=40, labels={"negative": 20, "positive": 20})
    site = ClientFacts(tasks={"sst2": share}, from_round=1)
    counts = {"train": 80, "validation": 20}
    events: list[Event] = [
        StartEvent(
            version="0", mode="federated", seed=0, synthetic=True, encoder="tiny", tasks=tasks, device="cpu", workers=1,
            num_rounds=2, torch="2", transformers="5",
        ),
        DataEvent(task="sst2", source="embedded", truncated=0, labels={"negative": 40, "positive": 40}, **counts),
        DataEvent(
            task="stsb", source="a.tsv", truncated=1, validation_cut=True, quantiles=[0.0, 1.0, 2.0, 3.0, 5.0], **counts
        ),
        ClientsEvent(clients={"clinic": site, "bank": site}),
        PlanEvent(
            rules=[["heads.*", "task"], ["*", "all"]], groups={"pair": ["sst2", "stsb"]},
            scopes=[ScopeFacts(scope="all", level="all", parameters=10, tensors=2)],
            layers=[LayerFacts(layer="embeddings", level="all", parameters=10)], total=12, at_clients=2,
        ),
        SiteEvent(round=0, client="clinic", tasks={"sst2": 40}),
    ]  # fmt: skip
    for number in (0, 1, 2):
        events += _round_events(number)
    events += [
        EarlyStopEvent(round=2, task="sst2", best_round=1, score=0.6),
        TaskWeightsEvent(round=2, weights={"sst2": 0.5, "stsb": 1.5}),
        EndEvent(status="done", rounds=2, seconds=9.5, weights_sha256="ab" * 32),
    ]
    return b"".join(map(to_line, events))


def _round_events(number: int) -> list[Event]:
    from fedmtl.tasks.metrics import evaluation_event, sums_from_dict

    events: list[Event] = []
    if number:
        trained = {"sst2": TaskUpdate(examples=40, loss=0.7)}
        cost = {"seconds": 1.5, "bytes_up": 1000, "bytes_down": 2000}
        events.append(UpdateEvent(round=number, client="clinic", tasks=trained, **cost))
        events.append(FailureEvent(round=number, client="bank", reason="no answer", bytes_down=10))
    for name, task in evaluated_tasks().items():
        sums = sums_from_dict(task, honest_sums()[name])
        events.append(evaluation_event(number, task, sums, {"clinic": 0.5, "bank": None}))
    closing = RoundEvent(
        round=number, clients=1, failures=1, tasks={"sst2": 1}, losses={"sst2": 0.6}, seen={"sst2": 40},
        averages=Averages(overall=0.5, classification=0.5), seconds=4.5, train_seconds=3.0, evaluate_seconds=1.0,
        bytes_up=1000, bytes_down=2010,
    )  # fmt: skip
    return [*events, closing]


_CONFIGS = {
    "small": b"mode: federated\nseed: 7\ntasks:\n  sst2: {}\n  stsb: {}\ntraining: {learning_rate: 2e-5}\n",
    "tasks": b"""tasks:
  mine:
    kind: classification
    text: [first, second]
    label: verdict
    labels: [yes, no, "01"]
    source: {train: a.tsv, validation: b.csv.gz}
    class_weights: balanced
  score: {kind: regression, text: [a, b], label: s, score_range: [0, 5], metric: pearson, auxiliary: true}
clients:
  clinic: {tasks: [mine], source: {mine: c.tsv}}
  bank: {tasks: [score], from_round: 2}
""",
    "sharing": b"""tasks: {sst2: {}, stsb: {}, qqp: {}}
sharing:
  rules:
    - "heads.*": task
    - "encoder.layer.1.*": group
    - "*": all
  groups: {pair: {same: [qqp], near: [stsb]}, single: [sst2]}
federation: {server_optimizer: {kind: fedadam, learning_rate: 0.01}, clients_per_round: 2}
evaluation: {where: clients}
wire: {up: int8}
""",
}
_OVERRIDES = b"""training.num_rounds=3
tasks.sst2={train_samples: 40}
clients={a: {tasks: [sst2]}, 1: {tasks: [sst2]}}
sharing.rules=[{"heads.*": task}, {"*": all}]
output=runs
"""


def _token_folder(folder: Path) -> bytes:
    from fedmtl.tasks.tokens import tokenize
    from fuzz.from_files import TOKENS

    cached, _ = tokenize(evaluated_tasks()["sst2"], (["a b", "c d e"],), small_tokenizer(), 16, folder)
    return bundle({name: (cached / name).read_bytes() for name in TOKENS})


def _tables() -> dict[str, dict[str, bytes]]:
    rows = [
        ("sentence", "a", "b", "label"),
        ("good film", "x", "y", "positive"),
        ("bad, film", 'a "b"', "é😀", "negative"),
    ]
    scored = [("a", "b", "label"), ("one", "two", "4.5"), ("three", "four", "0")]
    tsv = {"classes": _joined(rows, "\t"), "scores": _joined(scored, "\t"), "texts": b"\xef\xbb\xbfa\tb\r\nx y\tz\r\n"}
    quoted = b'sentence,label\n"good, ""film""",positive\n"two\nlines",negative\n'
    lines = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    mixed = [{"a": "x", "b": "y", "label": 3.5, "sentence": True}, {"a": 1, "b": [2], "label": 0}]
    return {
        "table-tsv": tsv,
        "table-csv": {"plain": _joined(scored, ","), "quoted": quoted},
        "table-jsonl": {"classes": _json_lines(lines), "mixed": _json_lines(mixed)},
        "table-gz": {name: gzip.compress(data, mtime=0) for name, data in tsv.items()},
        "table-parquet": {"two": _parquet(lines)},
    }


def _joined(rows: list[tuple[str, ...]], divider: str) -> bytes:
    return "".join(divider.join(row) + "\n" for row in rows).encode()


def _json_lines(lines: list[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def _parquet(lines: list[dict[str, str]]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    buffer = io.BytesIO()
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    parquet.write_table(pyarrow.table({**columns, "score": [1.5, None]}), buffer)
    return buffer.getvalue()
