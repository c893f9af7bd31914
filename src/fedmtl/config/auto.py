"""Chooses the settings that a config does not give, from what is known before any client joins.

What is known is the encoder (its card, its files, its name), the number of tasks, the settings that are given, and
where the examples are on this machine, how many there are: a server does not know that of its sites. A given value
always wins. Every choice says where it came from, the config that a run writes has all of them as given
values, and sites get that config from their server, so nothing is chosen twice. `defaults: plain` turns the rules off.
docs/settings.md has the table of what is chosen for which data and how it was measured.

A card is `fedmtl.json` in an encoder's folder. It may come from strangers: it has known keys in known ranges, or the
config is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedmtl.config.schema import Config
from fedmtl.config.yaml_text import LARGEST_TEXT, parse_yaml
from fedmtl.errors import ConfigError, FedmtlError
from fedmtl.foreign import parse_record, read_json, read_record

CARD = "fedmtl.json"
PACKAGED = ("tiny",)
_RANDOM = re.compile(r"random-(\d+)x(\d+)")
_LAYERS = {
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "electra": "encoder.layer",
    "mpnet": "encoder.layer",
    "distilbert": "transformer.layer",
    "modernbert": "layers",
}


class Card(BaseModel):
    """Recommended settings of an encoder; what is empty is left to the defaults.

    `learning_rate` is that of a federation of one task, batches of 32, and `tagging_rate` that of a task that tags
    words, whose head is fresh on every word; where several such tasks are averaged it is `federated_tagging_rate`, with
    small batches and optimizers that go on. `layers_by_task` counts the last layers that each task has for itself
    where several share the encoder, and `layers_by_large_task` those that it has where every task has many examples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    pair: Literal["cross", "dual"] | None = None
    pool: Literal["pooler", "cls", "mean"] | None = None
    encoder_dropout: Annotated[float, Field(ge=0, le=0.5)] | None = None
    head_dropout: Annotated[float, Field(ge=0, le=0.5)] | None = None
    learning_rate: Annotated[float, Field(ge=1e-6, le=1e-2)] | None = None
    head_rate: Annotated[float, Field(ge=0.1, le=100)] | None = None
    tagging_rate: Annotated[float, Field(ge=1e-6, le=1e-2)] | None = None
    federated_tagging_rate: Annotated[float, Field(ge=1e-6, le=1e-2)] | None = None
    layers_by_task: Annotated[int, Field(ge=0, le=100)] = 0
    layers_by_large_task: Annotated[int, Field(ge=0, le=100)] | None = None


# By family. MiniLM and random encoders were measured (docs/results/first-hour.md); other sentence encoders have the
# rate that their size is usually trained with.
MINILM = Card(
    pair="dual",
    pool="mean",
    head_dropout=0.0,
    learning_rate=7.5e-5,
    head_rate=10.0,
    tagging_rate=2e-4,
    layers_by_task=3,
)
SENTENCE = Card(pair="dual", pool="mean", head_dropout=0.0, learning_rate=2e-5, head_rate=10.0)
SENTENCE_CLS = SENTENCE.model_copy(update={"pool": "cls"})
RANDOM = Card(
    pair="dual",
    pool="mean",
    encoder_dropout=0.0,
    head_dropout=0.0,
    learning_rate=5e-4,
    head_rate=10.0,
    tagging_rate=2e-3,
    layers_by_task=1,
)
# Names on the hub, in lower case, whose files are not at hand.
_BY_NAME = (
    (re.compile(r"minilm-l(3|6|12)-v\d"), "MiniLM", MINILM),
    (re.compile(r"(^|/)(bge|gte|snowflake-arctic-embed|mxbai-embed)-"), "sentence encoder", SENTENCE_CLS),
    (re.compile(r"^sentence-transformers/|(^|/)(e5|all-mpnet|paraphrase-|multi-qa)-"), "sentence encoder", SENTENCE),
)
# From so many training examples on, a task gains nothing from layers that it shares with tasks unlike it
# (docs/results/first-hour.md).
LARGE_TASK = 4000
# A small task makes this many steps in a pass at a client, by smaller batches.
MIN_STEPS = 50


@dataclass(frozen=True)
class Choice:
    """A setting that was not given: its dotted key, its value, and the card or the rule that chose it."""

    key: str
    value: Any
    origin: str


@dataclass(frozen=True)
class _Encoder:
    """What is known of an encoder: its card, what the card is called, and where its layers are."""

    card: Card
    origin: str
    num_layers: int | None = None
    layers: str = "encoder.layer"


def choose(config: Config, given: Mapping[str, Any], examples: Mapping[str, int] | None = None) -> tuple[Choice, ...]:
    """Choose every setting that `given`, an unchecked config, does not have; `config` is its checked form.

    `examples` are the training examples of every task over all clients, where they are known.
    """
    if config.defaults == "plain":
        return tuple(choice for choice in _private(config) if not _is_given(given, choice.key))
    encoder = _known(config)
    depth = _depth(config, encoder, examples)
    is_depth_given = _is_given(given, "sharing.rules")
    short = tuple(_short_rounds(config, encoder, given, examples))
    taken = {"training.min_steps", *(choice.key for choice in short)} if short else set()
    rules = (
        *_private(config),
        *_as_started(config),
        *_encoder_settings(config, encoder),
        *_rate(config, encoder, shares_layers=is_depth_given or depth.shares_layers),
        *_privacy(config),
        *(choice for choice in _course(config) if choice.key not in taken),
        *short,
        *_sharing(encoder, depth),
        *_dense(config),
    )
    return tuple(choice for choice in rules if not _is_given(given, choice.key))


def with_choices(raw: Mapping[str, Any], choices: tuple[Choice, ...]) -> dict[str, Any]:
    """A copy of an unchecked config with the chosen values in it."""
    filled: dict[str, Any] = dict(raw)
    for choice in choices:
        filled = _filled(filled, choice.key.split("."), choice.value)
    return filled


def _filled(section: Mapping[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**section, key: _filled(section.get(key) or {}, rest, value) if rest else value}


def chosen_line(choices: tuple[Choice, ...]) -> str | None:
    """One line with the choices that matter most; None where nothing was chosen."""
    if not choices:
        return None
    known = {choice.key: choice.value for choice in choices}
    parts = [
        f"{key.partition('.')[2]} {known[key]:g}" if isinstance(known[key], float) else f"{words}{known[key]}"
        for key, words in _SHOWN.items()
        if key in known
    ]
    by_task = [pattern for rule in known.get("sharing.rules", ()) for pattern in rule if pattern[0] not in "h*"]
    parts += [f"{', '.join(by_task)} by task"] if by_task else []
    return f"chosen: {', '.join(parts)} (`fedmtl config` says why; a given value wins)" if parts else None


_SHOWN = {
    "model.pair": "pairs ",
    "model.pool": "pool ",
    "training.learning_rate": "",
    "training.head_rate": "",
    "model.encoder_dropout": "",
    "training.schedule": "",
    "federation.aggregation.average": "average ",
    "federation.vocabulary_slices": "vocabulary_slices ",
}


def origins(config: Config, given: Mapping[str, Any], choices: tuple[Choice, ...]) -> dict[str, str]:
    """Dotted key -> `given`, the card or rule that chose it, or `default`, for every value of a complete config."""
    chosen = {choice.key: choice.origin for choice in choices}
    found = {}
    for key in _leaves(config.model_dump()):
        decided = next((chosen[name] for name in chosen if key == name or key.startswith(f"{name}.")), None)
        found[key] = decided or ("given" if _is_given(given, key) else "default")
    return found


def commented(text: str, origins: Mapping[str, str]) -> str:
    """The YAML of a config with `# origin` behind every value that is not a default."""
    lines, path = [], []  # type: tuple[list[str], list[tuple[int, str]]]
    for line in text.splitlines():
        match = re.match(r"( *)([A-Za-z0-9_]+):( .*)?$", line)
        if match is not None:
            indent = len(match[1])
            path = [part for part in path if part[0] < indent] + [(indent, match[2])]
            origin = origins.get(".".join(name for _, name in path), "default")
            # A value that goes on in the next line has its end there, and a comment would cut it off.
            line += "" if origin == "default" else f"  # {origin}"
        lines.append(line)
    return "\n".join(lines)


def _leaves(value: Any, path: str = "") -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path


def _is_given(given: Mapping[str, Any], key: str) -> bool:
    section: Any = given
    for part in key.split("."):
        if not isinstance(section, Mapping):
            # A section without anything in it gives nothing.
            return section is not None
        found = next((name for name in section if str(name) == part), None)
        if found is None:
            return False
        section = section[found]
    return True


# The rules -----------------------------------------------------------------------------------------------------------


def _encoder_settings(config: Config, encoder: _Encoder | None) -> Iterator[Choice]:
    """How texts become vectors, as the encoder was made to be used."""
    # Pretrained heads and finished models have the shape of the settings they were made with.
    if encoder is None or config.model.start_from or any(task.head == "pretrained" for task in config.tasks.values()):
        return
    # A word's state has less to agree with than a text's vector: dropout stays as transformers have it.
    dropouts = () if _all_tag(config, encoder) else ("encoder_dropout", "head_dropout")
    for key in ("pair", "pool", *dropouts):
        value = getattr(encoder.card, key)
        if value is not None:
            yield Choice(f"model.{key}", value, encoder.origin)
    if encoder.card.head_rate is not None and not _all_tag(config, encoder):
        yield Choice("training.head_rate", encoder.card.head_rate, encoder.origin)


def _private(config: Config) -> Iterator[Choice]:
    """What a client's texts use of the vocabulary would leave beside its protected update; also with plain defaults."""
    privacy = config.privacy
    if privacy.example or privacy.client or privacy.secure_aggregation:
        yield Choice("federation.vocabulary_slices", False, "rule privacy")


def _as_started(config: Config) -> Iterator[Choice]:
    """A run that starts from a finished one uses and shares the model as that did, so that its values fit."""
    if config.model.start_from is None:
        return
    run = Path(config.model.start_from)
    path = next((path for path in (run / "config.yaml", run.parent / "config.yaml") if path.is_file()), None)
    if path is None:
        return
    try:
        with path.open(encoding="utf-8") as file:
            found = Config.model_validate(parse_yaml(file.read(LARGEST_TEXT + 1), where=str(path)))
    except (OSError, ValueError, FedmtlError):
        return
    yield Choice("model.pair", found.model.pair, "rule start-from")
    yield Choice("model.pool", found.model.pool, "rule start-from")
    if not (found.sharing.groups or found.sharing.adaptive or config.sharing.groups or config.sharing.adaptive):
        yield Choice("sharing.rules", found.sharing.rules, "rule start-from")


# What the rate of a federation of one task is multiplied by. Where tasks share an encoder, a mean over them divides a
# step: by the root of their number, as measured with one and four tasks. In one place every step counts.
_MOST_BY_TASKS = 3.0
_ONE_PLACE = 0.25


# Built-in tasks that tag words; of others the config says so.
TAGGING = ("bc5cdr_chem", "bc5cdr_disease", "ncbi_disease", "bc2gm", "wnut17", "roles", "settings")
# What the rate of a tagging head is multiplied by: it is fresh, and every word is an example of it.
_TAGGING_HEAD_RATE = 5.0
# What a federation of several tagging tasks has beside its rate (docs/results/tagging.md): a mean over sites undoes a
# part of what each has learnt, which more steps and an optimizer that goes on make up for. Rounds are shorter than a
# pass where tasks are large, so that sites part less between two means.
_TAGGING_BATCH = 16
_TAGGING_ROUNDS = {"training.num_rounds": 64, "training.local_steps": 32, "training.warmup_rounds": 2.0}


def _tagging(config: Config) -> list[str]:
    """The tasks that tag words."""
    kinds = {name: task.kind or ("tagging" if name in TAGGING else "") for name, task in config.tasks.items()}
    return [name for name, kind in kinds.items() if kind == "tagging"]


def _all_tag(config: Config, encoder: _Encoder) -> bool:
    return encoder.card.tagging_rate is not None and len(_tagging(config)) == len(config.tasks)


def _is_tagging_federation(config: Config, encoder: _Encoder | None) -> bool:
    """Whether several tasks, all of which tag words, are averaged; with a protection the rule was not measured."""
    if encoder is None or encoder.card.federated_tagging_rate is None or config.training.optimizer != "adamw":
        return False
    is_plain = all(getattr(config.privacy, key) is None for key in _PROTECTIONS)
    return config.mode == "federated" and len(config.tasks) > 1 and is_plain and _all_tag(config, encoder)


def _short_rounds(
    config: Config, encoder: _Encoder | None, given: Mapping[str, Any], examples: Mapping[str, int] | None
) -> Iterator[Choice]:
    """Many rounds of a few steps for large tagging tasks, where the config says nothing of either."""
    is_large = examples is not None and min(examples.values()) >= LARGE_TASK
    keys = (*_TAGGING_ROUNDS, "training.local_epochs", "training.min_steps")
    if is_large and _is_tagging_federation(config, encoder) and not any(_is_given(given, key) for key in keys):
        yield from (Choice(key, value, "rule tagging-federation") for key, value in _TAGGING_ROUNDS.items())


def _rate(config: Config, encoder: _Encoder | None, *, shares_layers: bool) -> Iterator[Choice]:
    if encoder is None or config.training.optimizer != "adamw":
        return
    tagging = encoder.card.tagging_rate
    if tagging is not None and _all_tag(config, encoder):
        if _is_tagging_federation(config, encoder):
            tagging = encoder.card.federated_tagging_rate or tagging
            yield Choice("training.batch_size", _TAGGING_BATCH, f"{encoder.origin}, rule tagging-federation")
            yield Choice("training.keep_optimizer", True, f"{encoder.origin}, rule tagging-federation")
        yield Choice("training.learning_rate", tagging, f"{encoder.origin}, rule tagging")
        yield Choice("training.head_rate", _TAGGING_HEAD_RATE, f"{encoder.origin}, rule tagging")
        return
    for name in _tagging(config) if tagging is not None else ():
        yield Choice(f"tasks.{name}.learning_rate", tagging, f"{encoder.origin}, rule tagging")
    if encoder.card.learning_rate is None:
        return
    rate, origin = encoder.card.learning_rate, encoder.origin
    if config.mode == "federated" and len(config.tasks) > 1 and shares_layers:
        # Two significant digits: nobody wants to read more.
        rate = float(f"{rate * min(len(config.tasks) ** 0.5, _MOST_BY_TASKS):.1e}")
        yield Choice("training.learning_rate", rate, f"{origin}, rule averaged-tasks")
    elif config.mode.startswith("centralized"):
        yield Choice("training.learning_rate", rate * _ONE_PLACE, f"{origin}, rule one-place")
    else:
        yield Choice("training.learning_rate", rate, origin)


def _privacy(config: Config) -> Iterator[Choice]:
    """What noise that hides whole clients needs: nobody counts for more than another, nor shows which words it uses."""
    if config.privacy.client is not None:
        yield Choice("federation.aggregation.average", "uniform", "rule client-privacy")
        yield Choice("federation.vocabulary_slices", False, "rule client-privacy")


def _course(config: Config) -> Iterator[Choice]:
    """How a run goes on over its rounds, and enough steps for small tasks."""
    yield Choice("training.schedule", "linear", "rule falling-rate")
    yield Choice("training.warmup_rounds", min(0.25, float(config.training.num_rounds)), "rule falling-rate")
    if config.training.local_steps is None:
        yield Choice("training.min_steps", MIN_STEPS, "rule enough-steps")
    if len(config.tasks) > 1 and config.privacy.client is None:
        yield Choice("federation.aggregation.average", "tasks", "rule tasks-alike")


@dataclass(frozen=True)
class _Depth:
    """How many of the last layers each task has for itself, by which rule, and whether others are shared by all."""

    by_task: int = 0
    rule: str = ""
    shares_layers: bool = True


_PROTECTIONS = ("example", "client", "secure_aggregation")


def _depth(config: Config, encoder: _Encoder | None, examples: Mapping[str, int] | None) -> _Depth:
    """Several tasks share the lower layers, and each has the last ones for itself; large tasks have more of them."""
    extended = config.model.lora or config.model.adapters or config.sharing.adaptive or config.sharing.groups
    if encoder is None or len(config.tasks) < 2 or extended or config.model.start_from:
        return _Depth()
    total = encoder.num_layers or 0
    few, many = min(encoder.card.layers_by_task, total // 2), encoder.card.layers_by_large_task
    # Tagging gains from layers that it shares, however large its tasks are.
    if many is None or not total or _all_tag(config, encoder):
        return _Depth(few, "rule last-layers")
    protection = next((key for key in _PROTECTIONS if getattr(config.privacy, key) is not None), None)
    if protection is not None:
        # How many examples there are is not for settings that everybody reads.
        return _Depth(few, f"rule last-layers, as privacy.{protection} leaves rule large-tasks out")
    if examples is None:
        return _Depth(few, "rule last-layers, examples are not counted")
    if min(examples.values()) < LARGE_TASK:
        return _Depth(few, "rule last-layers")
    return _Depth(min(many, total), "rule large-tasks", shares_layers=many < total)


def _sharing(encoder: _Encoder | None, depth: _Depth) -> Iterator[Choice]:
    if encoder is None or not depth.by_task:
        return
    total = encoder.num_layers or 0
    last = [{f"{encoder.layers}.{layer}.*": "task"} for layer in range(total - depth.by_task, total)]
    yield Choice("sharing.rules", [{"heads.*": "task"}, *last, {"*": "all"}], f"{encoder.origin}, {depth.rule}")


def _dense(config: Config) -> Iterator[Choice]:
    """The token rows that a client is sent tell its words, which masks would hide."""
    if config.privacy.secure_aggregation is not None:
        yield Choice("federation.vocabulary_slices", False, "rule masked-rows")


# What is known of an encoder ----------------------------------------------------------------------------------------


def _known(config: Config) -> _Encoder | None:
    """What is known of the config's encoder; None where no rule is about it."""
    name = config.model.server_model
    shape = _RANDOM.fullmatch(name)
    if shape is not None:
        return _Encoder(RANDOM, "rule random-encoder", min(int(shape[1]), 1000))
    folder = Path(str(files("fedmtl"))) / "model" / name if name in PACKAGED else Path(name)
    found = _of_folder(folder, name) if folder.is_dir() else _of_name(name)
    if found is not None and config.model.initial == "random":
        return _Encoder(RANDOM, "rule random-encoder", found.num_layers, found.layers)
    return found


def _of_folder(folder: Path, name: str) -> _Encoder | None:
    remedy = "mend it, or remove it"
    facts = _facts(folder / "config.json")
    layers, pattern = facts.get("num_hidden_layers", facts.get("n_layers")), _LAYERS.get(str(facts.get("model_type")))
    known = layers if pattern and isinstance(layers, int) and 0 < layers <= 1000 else None
    if (folder / CARD).is_file():
        where = f"model.server_model: {folder / CARD}"
        card = parse_record(Card, read_record(folder / CARD, remedy, ConfigError), where, remedy, ConfigError)
        return _Encoder(card, f"card of {Path(name).name}", known, pattern or "")
    if facts.get("model_type") == "bert" and facts.get("hidden_size") == 384 and known in (3, 6, 12):
        return _Encoder(MINILM, "rule MiniLM", known, pattern or "")
    if (folder / "modules.json").is_file():
        pooling = _facts(folder / "1_Pooling" / "config.json")
        card = SENTENCE_CLS if pooling.get("pooling_mode_cls_token") is True else SENTENCE
        return _Encoder(card, "rule sentence-encoder", known, pattern or "")
    return None


def _of_name(name: str) -> _Encoder | None:
    for pattern, words, card in _BY_NAME:
        match = pattern.search(name.lower())
        if match is not None:
            layers = int(match[1]) if card is MINILM else None
            return _Encoder(card, f"rule {words.replace(' ', '-')}", layers)
    return None


def _facts(path: Path) -> dict[str, Any]:
    """A JSON record of an encoder's folder; empty where it cannot be read, which the encoder's loading will say."""
    if not path.is_file():
        return {}
    try:
        found = read_json(path, "", ConfigError)
    except ConfigError:
        return {}
    return found if isinstance(found, dict) else {}
