"""The study of privacy, shown: what each attack found under each protection, as tables, figures and two sentences."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from fedmtl_studies.figures import Figures, dots
from fedmtl_studies.library import (
    EvaluationEvent,
    Html,
    RunFolder,
    StartEvent,
    count,
    first_of,
    load_config,
    percent,
    read_events,
    score,
)
from fedmtl_studies.page import Column, Page, Table, Value, cells_csv
from fedmtl_studies.privacy_attacks import ATTACKS, FALSE_POSITIVES, Losses, View, Words, read_findings
from fedmtl_studies.results import Results, Spread, finished, main_metrics, recorded, single, spread

if TYPE_CHECKING:
    from fedmtl_studies.privacy import PrivacyOptions, Setup

GUIDE = (
    "Membership: the attacker has a model and examples, and says which of them one client trained on; an AUC of 0.5 is"
    " guessing, and true positives are counted where 1% of the others are taken for members. By loss is a threshold on"
    " the loss; calibrated compares it with models trained on other examples. The update is what a curious server has:"
    " the model that it sent, moved by what came back. Words: the share of the words of a client's texts that are among"
    " as many rows of the token table, those that moved furthest; one step of SGD on so many texts, or one epoch."
    " Poisoning: one of three clients of the first task is hostile."
)
NOT_ATTRIBUTED = "the sum of 3 clients"
EPOCH = "epoch"
Seeds = Mapping[int, "Result | None"]


@dataclass(frozen=True)
class Result:
    """A finished cell: each task's main metric after the last round, and what its tap found.

    `epsilon` is what the run states that its noise came to; `adds_noise` says whether its config asks for noise.
    """

    cell: str
    scores: Mapping[str, float | None]
    losses: Mapping[tuple[View, int], Losses]
    words: Mapping[View, Words]
    epsilon: float | None = None
    adds_noise: bool = False


def read_result(run: RunFolder) -> Result:
    """Read the result of a settled run."""
    events = read_events(run)
    main = main_metrics(run, recorded(run, "its start", first_of(events, StartEvent)))
    scored = [event for event in events if isinstance(event, EvaluationEvent) and event.task in main]
    findings, privacy = read_findings(run), load_config(run.config).privacy
    return Result(
        cell=run.name,
        scores={event.task: event.metrics.get(main[event.task]) for event in scored},
        losses={
            (found["view"], found["round"]): Losses(tuple(found["members"]), tuple(found["others"]))
            for found in findings
            if found["kind"] == "losses"
        },
        words={
            found["view"]: Words(**{name: found[name] for name in Words.__dataclass_fields__})
            for found in findings
            if found["kind"] == "words"
        },
        epsilon=_stated(run),
        adds_noise=privacy.example is not None or privacy.client is not None,
    )


def _stated(run: RunFolder) -> float | None:
    """Return the largest epsilon of the last statement of each kind in a run's events; None where there is none."""
    last: dict[str, float] = {}
    for line in run.events.read_text(encoding="utf-8").splitlines():
        kind = next((kind for kind in ("privacy", "example_privacy") if f'"event": "{kind}"' in line), None)
        if kind is not None:
            event = json.loads(line)
            # Noise on gradients is stated for each task, noise on sums once.
            last[kind] = max((one["epsilon"] for one in event.get("tasks", {}).values()), default=event.get("epsilon"))
    return max(last.values(), default=None)


def show(options: PrivacyOptions, wanted: Sequence[Setup], results: Results[Result]) -> Page:
    """Return everything that can be shown of the cells that are finished."""
    known = Known(options, tuple(wanted), results)
    makers = {1: (_membership_table,), 2: (_words_table,), 3: (_rules_table, _poisoning_table)}
    tables = [make(known) for number, made in makers.items() if number in options.tables for make in made]
    return Page(
        opening=_opening(options),
        guide=GUIDE,
        tables=tables,
        figures=_figures(known),
        sheets={"cells": _cells_sheet(known)},
        answer=answer(known),
        warnings=_warnings(known),
    )


@dataclass(frozen=True)
class Known:
    """What a study was to do and what came of it."""

    options: PrivacyOptions
    wanted: tuple[Setup, ...]
    results: Results[Result]

    @property
    def task(self) -> str:
        return self.options.tasks[0]

    def seeds(self, setup: str) -> Seeds:
        return self.results.get(setup, {})

    def over(self, setup: str, measure: Callable[[Result], float | None]) -> Spread | None:
        """Return the mean of a measure over a setup's seeds; None while a seed is missing."""
        return spread([None if cell is None else measure(cell) for cell in self.seeds(setup).values()])

    def names(self, start: str) -> list[str]:
        return [setup.name for setup in self.wanted if setup.name.startswith(start)]

    def membership(self, setup: str, view: View, round_number: int, calibrates: bool) -> tuple[Value, Value]:
        """Return the AUC and the true positives of an attack, over seeds."""
        found = []
        for seed, cell in self.seeds(setup).items():
            losses = None if cell is None else cell.losses.get((view, round_number))
            references = self._references(seed)
            if losses is None or (calibrates and references is None):
                return None, None
            found.append(losses.by_calibration(references or []) if calibrates else losses.by_threshold())
        areas, shares = zip(*found, strict=True) if found else ((), ())
        return spread(areas), spread(shares)

    def _references(self, seed: int) -> list[Losses] | None:
        cells = [self.seeds(name).get(seed) for name in self.names("reference-")]
        found = [None if cell is None else cell.losses.get(("model", self.options.rounds)) for cell in cells]
        known = [losses for losses in found if losses is not None]
        return known if known and len(known) == len(found) else None

    def words(self, setup: str, view: View, measure: Callable[[Words], float]) -> Spread | None:
        def take(cell: Result) -> float | None:
            return measure(cell.words[view]) if view in cell.words else None

        return self.over(setup, take)

    def score(self, setup: str, task: str) -> Spread | None:
        return self.over(setup, lambda cell: cell.scores.get(task))


def protection_words(name: str) -> str:
    """Return a protection of a setup as a reader knows it."""
    kind, _, epsilon = name.partition("-")
    return {
        "none": "none",
        "plain": "none, vocabulary slices",
        "dense": "none, whole table",
        "example": f"privacy.example, epsilon {epsilon}",
        "client": f"privacy.client, epsilon {epsilon}",
        "secure": "privacy.secure_aggregation",
        "fixed": "token table fixed",
        "personal": "token table stays at its client",
    }[kind]


# -- membership -------------------------------------------------------------------------------------------------------


def _views(options: PrivacyOptions) -> dict[str, tuple[View, int]]:
    """Return what an attacker may have, in words."""
    last = options.rounds
    return {
        f"the model after round {last}": ("model", last),
        **({"the model after round 1": ("model", 1)} if last > 1 else {}),
        f"the client's update of round {last}": ("update", last),
        **({"the client's update of round 1": ("update", 1)} if last > 1 else {}),
    }


def _membership_table(known: Known) -> Table:
    rows = [
        (
            protection_words(setup.removeprefix("member-")),
            words,
            known.over(setup, lambda cell: cell.epsilon),
            known.score(setup, known.task),
            *known.membership(setup, *view, calibrates=False),
            *known.membership(setup, *view, calibrates=True),
        )
        for setup in known.names("member-")
        for words, view in _views(known.options).items()
    ]
    false = percent(FALSE_POSITIVES)
    options = known.options
    return Table(
        "table1",
        "Table 1: who was trained on",
        (
            Column("protection", "protection", "words"),
            Column("the attacker has", "view", "words"),
            Column("epsilon spent", "epsilon", "number"),
            Column(f"{known.task}", f"{known.task}_accuracy"),
            Column("AUC, by loss", "auc_loss"),
            Column(f"found at {false} false, by loss", "true_positives_loss", "percent"),
            Column("AUC, calibrated", "auc_calibrated"),
            Column(f"found at {false} false, calibrated", "true_positives_calibrated", "percent"),
        ),
        tuple(rows),
        (
            f"Members are the {count(options.examples)} training examples of one of three clients, the others"
            f" {count(options.others)} that nobody trained on; {options.references} reference models.",
            "privacy.client adds its noise at the server: the row of an update is what that server sees before.",
        ),
    )


# -- words ------------------------------------------------------------------------------------------------------------


def _word_rows(known: Known) -> Iterator[tuple[str, str, str, str, View]]:
    """Yield protection, who sees it, texts in words, setup and view of every row."""
    from fedmtl_studies.privacy import protections

    names = set(known.names("words-"))
    for name in protections(known.options):
        for texts in (*map(str, known.options.batches), EPOCH):
            setup = f"words-{texts}-{name}"
            if setup not in names:
                continue
            shown = f"an epoch of {count(known.options.examples)}" if texts == EPOCH else texts
            yield protection_words(name), "one client's update", shown, setup, "update"
            if name == "dense" or name.startswith("client"):
                yield protection_words(name), NOT_ATTRIBUTED, shown, setup, "sum"


def _words_table(known: Known) -> Table:
    rows: list[tuple[Value, ...]] = []
    for protection, seen, texts, setup, view in _word_rows(known):
        parts: list[Callable[[Words], float]] = [
            lambda words: float(words.used),
            lambda words: float(words.rows),
            lambda words: words.ranked,
            lambda words: words.precision,
            lambda words: words.recall,
            lambda words: words.chance,
        ]
        rows.append((protection, seen, texts, *(known.words(setup, view, part) for part in parts)))
    return Table(
        "table2",
        "Table 2: which words a client's texts use",
        (
            Column("protection", "protection", "words"),
            Column("the attacker has", "view", "words"),
            Column("texts", "texts", "words"),
            Column("words used", "used", "count"),
            Column("rows that moved", "rows", "count"),
            Column("recovered", "recovered", "percent"),
            Column("precision of rows that stand out", "precision", "percent"),
            Column("recall of rows that stand out", "recall", "percent"),
            Column("blind guess", "chance", "percent"),
        ),
        tuple(rows),
        (
            f"{NOT_ATTRIBUTED}: what secure aggregation opens, and what everybody who is sent the next model can"
            " compute; a word found there is of one of the three.",
            "Epsilon is spent in this one step or epoch, so a longer run of the same epsilon has more noise in each.",
        ),
    )


# -- poisoning --------------------------------------------------------------------------------------------------------


def _rules(known: Known) -> list[str]:
    return [rule for rule in known.options.all_rules if known.names(f"poison-honest-{rule}")]


def _worst(known: Known, rule: str, task: str) -> tuple[float, str] | None:
    """Return the lowest score of a task under a rule, and the attack; None while a cell is missing."""
    found = {attack: known.score(f"poison-{attack}-{rule}", task) for attack in ATTACKS if attack != "honest"}
    scores = [(value.mean, attack) for attack, value in found.items() if value is not None]
    return min(scores) if len(scores) == len(found) else None


def _rules_table(known: Known) -> Table:
    rows: list[tuple[Value, ...]] = []
    for rule in _rules(known):
        row: list[Value] = [rule]
        for task in known.options.tasks:
            worst = _worst(known, rule, task)
            row += [known.score(f"poison-honest-{rule}", task), single(worst[0]) if worst else None]
        attacked = _worst(known, rule, known.task)
        rows.append((*row, ATTACKS[attacked[1]].words if attacked else None))
    columns = [Column("rule", "rule", "words")]
    for task in known.options.tasks:
        columns += [Column(f"{task}, all honest", f"{task}_honest"), Column(f"{task}, worst attack", f"{task}_worst")]
    columns.append(Column(f"the attack that is worst for {known.task}: it", "worst", "words"))
    return Table("table3", "Table 3: rules against one hostile client", tuple(columns), tuple(rows))


def _poisoning_table(known: Known) -> Table:
    rows = [
        (attack.words, rule, *(known.score(f"poison-{name}-{rule}", task) for task in known.options.tasks))
        for name, attack in ATTACKS.items()
        for rule in _rules(known)
    ]
    columns = (Column("the hostile client", "attack", "words"), Column("rule", "rule", "words"))
    return Table(
        "table4",
        "Table 4: every attack under every rule",
        (*columns, *(Column(task, f"{task}_score") for task in known.options.tasks)),
        tuple(rows),
        (
            f"Three clients of {known.task}, one of them hostile, and one client of each further task; scores after"
            f" round {known.options.poison_rounds}.",
        ),
    )


# -- the page ---------------------------------------------------------------------------------------------------------


def _figures(known: Known) -> Figures:
    drawn: Figures = {}
    words: dict[str, dict[str, float]] = {}
    for protection, seen, texts, setup, view in _word_rows(known):
        value = known.words(setup, view, lambda found: found.ranked)
        if value is not None:
            name = protection if view == "update" else f"{protection}, {seen}"
            words.setdefault(_short(name), {})[texts if EPOCH in texts else f"texts: {texts}"] = value.mean
    title = "Words of a client's texts that are recovered"
    _put(drawn, "words", title, dots(title, words, "share of words"))
    members: dict[str, dict[str, float]] = {}
    last = known.options.rounds
    for setup in known.names("member-"):
        row = members.setdefault(_short(protection_words(setup.removeprefix("member-"))), {})
        for view, how in itertools.product(get_args(View)[:2], ("by loss", "calibrated")):
            area = known.membership(setup, view, last, how == "calibrated")[0]
            if isinstance(area, Spread):
                row[f"{view}, {how}"] = area.mean
    title = "Who was trained on: AUC, 0.5 is guessing"
    _put(drawn, "membership", title, dots(title, members, "AUC", (0.4, 1.0), level=0.5))
    rules = {
        rule: {
            name: value.mean
            for name in ATTACKS
            if (value := known.score(f"poison-{name}-{rule}", known.task)) is not None
        }
        for rule in _rules(known)
    }
    title = f"{known.task} with one hostile client of three"
    _put(drawn, "poisoning", title, dots(title, rules, "score"))
    return drawn


def _put(drawn: Figures, name: str, title: str, picture: Html) -> None:
    if picture:
        drawn[name] = (title, picture)


def _short(words: str) -> str:
    return (
        words.replace("privacy.", "")
        .replace("none, whole table, the", "the")
        .replace(", the sum of 3 clients", ": sum")
        .replace("epsilon", "eps")
        .replace("vocabulary ", "")
        .replace("token table", "table")
    )


def answer(known: Known) -> str:
    """Return what the attacks came to, in two sentences."""
    return " ".join(filter(None, (_said_of_reading(known), _said_of_rules(known))))


def _said_of_reading(known: Known) -> str:
    """Say what a curious server finds without protection and with the weakest noise, as far as cells are finished."""
    weakest = f"example-{max(known.options.epsilons):g}"
    found = [
        f"{words} {' and '.join(parts)}"
        for words, name, group in (
            ("Without protection", "plain", "none"),
            (f"with {protection_words(weakest)}", weakest, weakest),
        )
        if (parts := [*_words_read(known, name), *_members_told(known, group)])
    ]
    return f"{'; '.join(found)}." if found else ""


def _words_read(known: Known, name: str) -> list[str]:
    texts = known.options.batches[-1]
    share = known.words(f"words-{texts}-{name}", "update", lambda words: words.ranked)
    number = "1 text" if texts == 1 else f"{texts} texts"
    return [] if share is None else [f"one step on {number} gives away {percent(share.mean)} of the words"]


def _members_told(known: Known, name: str) -> list[str]:
    views = itertools.product(get_args(View)[:2], (False, True))
    areas = [known.membership(f"member-{name}", view, known.options.rounds, how)[0] for view, how in views]
    best = max((area.mean for area in areas if isinstance(area, Spread)), default=None)
    return [] if best is None else [f"the best attack tells who was trained on with an AUC of {score(best)}"]


def _said_of_rules(known: Known) -> str:
    worst = {rule: found for rule in _rules(known) if (found := _worst(known, rule, known.task)) is not None}
    if len(worst) < 2:
        return ""
    best = max(worst, key=lambda rule: worst[rule][0])
    if best == "mean":
        return (
            f"Against its worst attack, one hostile client of three leaves {known.task} at {score(worst[best][0])} with"
            " a plain mean, and no rule does better."
        )
    plain = f", a plain mean at {score(worst['mean'][0])}" if "mean" in worst else ""
    return (
        f"Against the worst attack of one hostile client of three, {best} leaves {known.task} at"
        f" {score(worst[best][0])}{plain}."
    )


def _warnings(known: Known) -> list[str]:
    silent = [cell.cell for cell in finished(known.results) if cell.adds_noise and cell.epsilon is None]
    found = []
    if silent:
        found.append(
            f"Of the cells that were to add noise {len(silent)} {'states' if len(silent) == 1 else 'state'} no epsilon:"
            f" {', '.join(silent[:5])}{', ...' if len(silent) > 5 else ''}. They count as without protection."
        )
    if known.options.quick:
        found.append(
            "Embedded, synthetic texts in miniature and one seed: it shows that everything runs, not how large a"
            " risk is."
        )
    return found


def _opening(options: PrivacyOptions) -> str:
    data = "embedded, synthetic texts in miniature" if options.quick else ", ".join(options.tasks)
    return f"{options.encoder} on {data}; seeds {', '.join(map(str, options.seeds))}."


def _cells_sheet(known: Known) -> str:
    columns: dict[str, Callable[[Result], object]] = {
        "cell": lambda cell: cell.cell,
        "epsilon": lambda cell: cell.epsilon,
    }
    for task in known.options.tasks:
        columns[task] = lambda cell, task=task: cell.scores.get(task)  # type: ignore[misc]
    last = known.options.rounds
    for view in ("model", "update"):
        for round_number in dict.fromkeys((1, last)):
            columns[f"auc_{view}_{round_number}"] = lambda cell, at=(view, round_number): (  # type: ignore[misc]
                cell.losses[at].by_threshold()[0] if at in cell.losses else None
            )
    for view in ("update", "sum"):
        columns[f"words_{view}"] = lambda cell, view=view: (  # type: ignore[misc]
            cell.words[view].ranked if view in cell.words else None
        )
    return cells_csv(finished(known.results), columns)
