"""The model card of a run: a README.md that says what its model does, how well, from how much data, and how to use it.

Everything in it is read from the run's folder: its config, its events, and the card of the encoder that it began with.
Counts are sums over clients; no client is named. Of sites, a server's record has only what their policies let out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedmtl.config import Config
from fedmtl.config.file import load_config
from fedmtl.config.yaml_text import parse_yaml, write_yaml
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.foreign import excerpt, printable
from fedmtl.model.encoder_files import encoder_folder
from fedmtl.runs.event_lines import Event, events_of, first_of, last_of
from fedmtl.runs.events import (
    ClientsEvent,
    DataEvent,
    DistillEvent,
    EndEvent,
    EvaluationEvent,
    PlanEvent,
    SiteEvent,
    StartEvent,
)
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.privacy import privacy_lines
from fedmtl.runs.summary import BEST, LAST, Round, TestScore, protection, read_test_scores, task_rounds
from fedmtl.tasks.task import read_tasks, task_facts

NOT_STATED = "not stated"
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# Of a foreign README, which may be of any size.
MOST_LETTERS = 100_000
MOST_LABELS_SHOWN = 20
SCORES_HEAD = ("set", "examples of", "number", "round", "metrics")


@dataclass(frozen=True)
class Hub:
    """What the front matter says to the hub beside the run's facts."""

    library: str = "transformers"
    pipeline: str | None = None


def model_card(
    run: RunFolder, usage: str, round: Round | None = None, hub: Hub | None = None, config: Config | None = None
) -> str:
    """The card of a run's model in Markdown, with the front matter that the hub reads.

    `usage` is Markdown that shows how to use the files beside the card; `round` is the one that the model is of,
    without it the one that the run ended with. `config` is the run's, where it was read already.
    """
    config, events = config or load_config(run.config), read_events(run)
    start, plan = first_of(events, StartEvent), last_of(events, PlanEvent)
    if start is None:
        start, plan = _from_model(run)
    rounds = _rounds(events, config.training.keep if round is None else round, run.name)
    scored = {(event.round, event.task): event for event in events_of(events, EvaluationEvent)}
    sections = [
        f"# {_words(run.name)}",
        _opening(start, last_of(events, EndEvent)),
        "## Use",
        usage.strip(),
        "## Tasks",
        _tasks_table(start, rounds),
        "## Scores",
        _scores(start, rounds, scored, events, chose=config.training.keep == BEST),
        _test_scores(read_test_scores(run), rounds),
        "## Data",
        _data(start, events),
        "## What is shared",
        _sharing(plan),
        "## Privacy",
        _privacy(config, start, events),
        "## Encoder and licence",
        _encoder(config),
    ]
    front = write_yaml(_front_matter(config, start, hub or Hub()))
    return f"---\n{front}---\n\n" + "\n\n".join(sections) + "\n"


def _from_model(run: RunFolder) -> tuple[StartEvent, PlanEvent]:
    """What the model's folder says by itself, where there is no record of a run: a site has saved the model."""
    from fedmtl.model.saved import read_model_record

    record = read_model_record(run.model)
    tasks = read_tasks(record.tasks, str(run.model), ModelError)
    facts = {name: task_facts(task, task.pool) for name, task in tasks.items()}
    rules = [[pattern, level] for pattern, level in record.plan.rules]
    return StartEvent(mode="federated", tasks=facts), PlanEvent(rules=rules)


def encoder_licence(name: str) -> str:
    """The licence that an encoder's own card states, as its front matter names it, or `not stated`."""
    try:
        with (encoder_folder(name) / "README.md").open(encoding="utf-8", errors="replace") as file:
            text = file.read(MOST_LETTERS)
        _, front, _ = re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)
        found = parse_yaml(front, "the encoder's card")
    except (OSError, ValueError, FedmtlError):
        return NOT_STATED
    licence = found.get("license") if isinstance(found, dict) else None
    return licence if isinstance(licence, str) and LICENCE.fullmatch(licence) else NOT_STATED


def _rounds(events: Sequence[Event], wanted: Round, name: str) -> dict[str, int]:
    try:
        return task_rounds(events, wanted, name)
    except FedmtlError:
        # No round has an overall score, so the run ended with its last one.
        return task_rounds(events, LAST, name)


def _front_matter(config: Config, start: StartEvent, hub: Hub) -> dict[str, Any]:
    front: dict[str, Any] = {"library_name": hub.library}
    if hub.pipeline is not None:
        front["pipeline_tag"] = hub.pipeline
    if HUB_NAME.fullmatch(config.model.server_model):
        front["base_model"] = config.model.server_model
    front["tags"] = ["fedmtl", "federated-learning", "multi-task"]
    metrics = {facts.metric: None for facts in start.tasks.values() if facts.metric}
    return {**front, "metrics": list(metrics)} if metrics else front


def _opening(start: StartEvent, end: EndEvent | None) -> str:
    made = {
        "federated": "one shared encoder and a head for each task, trained by federated averaging",
        "centralized": "one encoder and a head for each task, trained with all data in one computation",
    }.get(start.mode or "", f"an encoder and a head for each task, trained with `mode: {_words(start.mode or '')}`")
    digest = "" if end is None or end.weights_sha256 is None else f" SHA-256 of its values: `{end.weights_sha256}`."
    version = f" {start.version}" if start.version else ""
    synthetic = " Its data is synthetic." if start.synthetic else ""
    return f"A text model of fedmtl{version}: {made}.{synthetic}{digest}"


def _tasks_table(start: StartEvent, rounds: Mapping[str, int]) -> str:
    rows = []
    for name, facts in start.tasks.items():
        says = label_list(facts.labels) if facts.labels else f"a score from {_span(facts.score_range)}"
        texts = "one text" if facts.pair is None else f"two texts, `pair: {facts.pair}`"
        rows.append((code(name), facts.kind, texts, says, facts.pool or "", str(rounds.get(name, ""))))
    return table(("task", "kind", "reads", "answers", "pool", "round"), rows)


def _span(scale: Sequence[float] | None) -> str:
    return "no stated range" if scale is None else f"{scale[0]:g} to {scale[1]:g}"


def _scores(
    start: StartEvent,
    rounds: Mapping[str, int],
    scored: Mapping[tuple[int, str], EvaluationEvent],
    events: Sequence[Event],
    *,
    chose: bool,
) -> str:
    cut = {event.task: event.validation_cut for event in events_of(events, DataEvent)}
    rows = []
    for name, facts in start.tasks.items():
        for each in (name, *(f"{name}:{further}" for further in facts.further or ())):
            event = scored.get((rounds.get(name, 0), each))
            if event is None:
                continue
            what = "validation, cut from the training data" if cut.get(name) and each == name else "validation"
            rows.append((code(each), what, str(event.examples or ""), str(event.round), _metrics(event.metrics)))
    if not rows:
        return "The run's record has no score of the rounds that this model is of."
    note = "\n\nThese examples also chose the round." if chose else ""
    return table(SCORES_HEAD, rows) + note


def _test_scores(scores: Sequence[TestScore], rounds: Mapping[str, int]) -> str:
    """Of the model's rounds; `fedmtl evaluate --test` writes them into the run's folder."""
    rows = [
        (code(score.set), "test", str(score.examples), str(score.round), _metrics(score.metrics))
        for score in scores
        if rounds.get(score.set) == score.round
    ]
    if not rows:
        return "The run's record has no scores on a test set (`fedmtl evaluate RUN --test` adds them)."
    return table(SCORES_HEAD, rows)


def _metrics(metrics: Mapping[str, float | None]) -> str:
    return ", ".join(f"{_words(key)} {value:.4f}" for key, value in metrics.items() if value is not None) or "undefined"


def _data(start: StartEvent, events: Sequence[Event]) -> str:
    clients = last_of(events, ClientsEvent)
    rows = []
    for event in events_of(events, DataEvent):
        num = sum(event.task in facts.tasks for facts in clients.clients.values()) if clients else 0
        counts = [f"{code(label)} {count}" for label, count in (event.labels or {}).items()][:MOST_LABELS_SHOWN]
        rows.append(
            (code(event.task), _number(event.train), str(num or "–"), _number(event.validation), ", ".join(counts))
        )
    if not rows:
        return "The run's record has no counts of examples."
    note = ""
    if first_of(events, SiteEvent):
        note = "\n\nCounts are those that the sites' policies let out; a site may round them up or leave labels out."
    return (
        table(("task", "training examples", "clients", "validation examples", "labels of the training examples"), rows)
        + note
    )


def _sharing(plan: PlanEvent | None) -> str:
    if plan is None:
        return "The run's record has no sharing plan."
    lines = [f"* `{_words(pattern)}`: {_words(level)}" for pattern, level in plan.rules]
    # A personal scope has its client's name; all of them are one line.
    scopes = [scope for scope in plan.scopes if not scope.scope.startswith("client:")]
    sizes = [(code(scope.scope), scope.level, f"{scope.parameters:,}") for scope in scopes]
    if plan.at_clients:
        sizes.append(("at the clients", "client", f"{plan.at_clients:,}"))
    return (
        "The first rule that matches a parameter's name says who shares its value:\n\n"
        + "\n".join(lines)
        + ("\n\n" + table(("scope", "level", "parameters"), sizes) if sizes else "")
    )


def _privacy(config: Config, start: StartEvent, events: Sequence[Event]) -> str:
    plan = last_of(events, PlanEvent)
    if first_of(events, DistillEvent):
        return (
            "This model was distilled in one computation from the model of another run, whose card says what left its"
            " clients. No noise was added. A trained model can reveal what it was trained on."
        )
    if start.mode == "centralized":
        first = "All examples were in one computation: nothing was federated."
    elif not events:
        first = (
            "This model was saved at a site of a federation (`fedmtl client --save-model`). Texts and labels stayed at"
            " the sites; updates, counts as the sites' policies let them out and losses left them. What the site has"
            " for itself, such as a personal head, is part of this model."
        )
    elif first_of(events, SiteEvent):
        first = (
            "Texts and labels stayed at the sites. What left a site: its updates (the differences of the values that it"
            " trained, one message a round), counts of its examples as its policy lets them out, losses"
            + (", and sums of its scores." if config.evaluation.where == "clients" else ".")
        )
    else:
        first = (
            "The clients of this run were simulated on one machine. Between sites, updates (the differences of the"
            " values that a client trained), counts and losses would have left a client, and no text."
        )
    stays = (
        f" {plan.at_clients:,} parameters stay at the clients and are in no export of the server."
        if (plan is not None and plan.at_clients)
        else ""
    )
    hidden = [*protection(events), *(f"{line}." for line in privacy_lines(events))]
    if hidden:
        lines = "\n".join(f"* {_plain(line[:1].upper() + line[1:])}" for line in hidden)
        return f"{first}{stays}\n\nWhat left the clients was protected:\n\n{lines}"
    return (
        f"{first}{stays}\n\nNo noise was added and no secure aggregation was used: the server saw every update by"
        " itself, and no guarantee of differential privacy holds. A trained model can reveal what it was trained on."
    )


def _encoder(config: Config) -> str:
    name = config.model.server_model
    if name.startswith("random-"):
        return f"It began with the random values of `{_words(name)}`; there is no encoder whose licence applies."
    # A folder's path is of the machine that trained.
    shown = name if HUB_NAME.fullmatch(name) else re.split(r"[/\\]", name)[-1]
    return (
        f"It began with the encoder `{_words(shown)}`. Licence of the encoder: {encoder_licence(name)}. The licence of"
        " this model is for those who trained it to state (`license:` at the top of this file)."
    )


def _number(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown, whose cells may have any letter."""
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    return "\n".join([*lines, *(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)])


def label_list(labels: Sequence[str]) -> str:
    """The first labels of a task in Markdown, and how many more there are."""
    more = len(labels) - MOST_LABELS_SHOWN
    return ", ".join(map(code, labels[:MOST_LABELS_SHOWN])) + (f" and {more} more" if more > 0 else "")


def code(text: str) -> str:
    """A name or label, which may be anybody's, between backticks."""
    return f"`{_words(text)}`"


def _words(text: str) -> str:
    """A name or label, which may be anybody's, as one line that is no Markdown."""
    return _plain(excerpt(text))


def _plain(text: str) -> str:
    return printable(text).replace("`", "'").replace("<", "&lt;")
