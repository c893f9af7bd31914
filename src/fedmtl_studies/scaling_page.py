"""The study of scaling, shown: accuracy, rounds to the target, where encoders collapse, and the paper's claims.

The paper's figures print no numbers, so its words stand here, and where it says them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedmtl_studies.library import change, count
from fedmtl_studies.page import Column, Page, Table, Value, csv_text
from fedmtl_studies.results import Spread, seconds_notes, single, spread
from fedmtl_studies.scaling_figures import STYLE, make_figures
from fedmtl_studies.scaling_results import (
    DENSE,
    MARGIN,
    TARGET,
    Known,
    Result,
    Results,
    Setup,
    collapse,
    encoder_label,
    fate,
    fate_words,
    reached_value,
    rounds_of,
)

if TYPE_CHECKING:
    from fedmtl_studies.scaling import ScalingOptions

GUIDE = (
    "The same examples are divided among 1, 2, 4, ... clients, which train and are averaged; all else stays as it is."
    " Every run ends after a number of rounds that was fixed before, and no score chooses anything. Chance is what"
    " always giving the most frequent label scores; at chance is within 5 points of it. Deviations are over seeds,"
    " which also draw the examples and the rows that are scored."
)
GUIDE_PER_CLIENT = (
    "Each of 1, 2, 4, ... clients has as many examples, so that more clients have more in all; they train and are"
    " averaged, and all else stays as it is. One client, the baseline, has no more than each of the others."
    " Every run ends after a number of rounds that was fixed before, and no score chooses anything. Chance is what"
    " always giving the most frequent label scores; at chance is within 5 points of it. Deviations are over seeds,"
    " which also draw the examples and the rows that are scored."
)
_COSTS = (
    "chance", "num_train", "num_scored", "steps", "round_bytes", "train_seconds", "evaluate_seconds", "device",
    "precision", "cells_at_once",
)  # fmt: skip
WHO = (Column("task", "task", "words"), Column("encoder", "encoder", "words"))
CLIENTS = Column("clients", "clients", "words")
# The paper's encoders, and what the name of a folder or of the hub has in it.
ENCODERS = {"BERT": ("bert-base-cased",), "ALBERT": ("albert-base",), "DistilBERT": ("distilbert-base",)}
NOT_RUN = "not run here"


@dataclass(frozen=True)
class Claim:
    """What the paper says of one of its encoders, empty is of all, on a task and with so many clients where it says."""

    words: str
    where: str
    encoder: str = ""
    task: str = ""
    clients: int = 0


CLAIMS = (
    Claim("BERT declines gradually and scales to 32 clients without a sharp decline", "4.1, 5, figure 1", "BERT"),
    Claim("ALBERT declines gradually and scales to 32 clients without a sharp decline", "4.1, 5, figure 1", "ALBERT"),
    Claim("DistilBERT declines steeply past 4 clients on all tasks", "4.1, figure 1", "DistilBERT"),
    Claim("DistilBERT falls to the random classifier on IMDB", "4.1, 4.3, figures 1 and 3", "DistilBERT", "imdb"),
    Claim("DistilBERT falls to the random classifier on Yelp F", "4.1, figure 1", "DistilBERT", "yelp"),
    Claim("DistilBERT does not reach 90% with 4 clients on IMDB", "4.2, figure 2", "DistilBERT", "imdb", 4),
    Claim("DistilBERT does not reach 90% with 16 clients on Yelp F", "4.2, figure 2", "DistilBERT", "yelp", 16),
    Claim("DistilBERT struggles with 16 clients on AG News", "5, figures 1 and 2", "DistilBERT", "ag_news", 16),
    Claim("for all models the decline is steeper on IMDB than on the other tasks", "5"),
)
NOTES = (
    "The paper ran BERT, ALBERT and DistilBERT (base, cased) with plain SGD at 2e-5 on all examples, and does not speak"
    " of seeds; other encoders, optimizers and amounts are not a check of it, and stand under their own names.",
    "Its abstract names author identification among the tasks; it has none. Its explanation, distillation, is offered"
    " as possible and not tested.",
    "With the same examples among K clients, each takes 1/K of the steps of a round, and the mean moves no further than"
    " the one that moves most: with SGD at 2e-5, at chance may be no more than hardly moved. The steps of a round are"
    " in table 1, and whether a run ever left chance.",
)


def show(known: Known, scored: Mapping[str, str | None]) -> Page:
    """Return everything that can be shown of the cells that are finished; `scored` says which official rows score."""
    return Page(
        opening=_opening(known.options),
        guide=GUIDE if known.options.examples_per_client is None else GUIDE_PER_CLIENT,
        tables=make_tables(known),
        figures=make_figures(known),
        remarks=[*_remarks(known), *_scored(known, scored)],
        sheets={"cells": cells_sheet(known), "curves": curves_sheet(known.results)},
        style=STYLE,
        answer=answer(known),
    )


def answer(known: Known) -> str:
    """Return in a sentence how many encoders on tasks stay above chance as clients are added, and which fall to it."""
    named = dict.fromkeys((setup.encoder, setup.task) for setup in known.results)
    found = {pair: what for pair in named if (what := collapse(known, *pair)) is not None}
    if not found:
        return ""
    most = max(setup.clients for setup in known.results if known.fates(setup))
    void = [pair for pair, what in found.items() if 1 in what.counts]
    fell = {pair: min(what.counts) for pair, what in found.items() if what.counts and pair not in void}
    stood = len(found) - len(void) - len(fell)
    sentences = [
        f"With up to {most} clients {stood} of {len(found)} pairs of an encoder and a task"
        f" {'stays' if stood == 1 else 'stay'} above chance."
    ]
    if fell:
        listed = (f"{encoder} on {task} with {clients} clients" for (encoder, task), clients in fell.items())
        sentences.append(f"At chance: {', '.join(listed)}.")
    if void:
        sentences.append(
            f"{len(void)} had not left chance with one client and {'proves' if len(void) == 1 else 'prove'} nothing."
        )
    return " ".join(sentences)


def _opening(options: ScalingOptions) -> str:
    training = options.config["training"]
    encoders = ", ".join(map(encoder_label, options.encoders))
    data = "embedded, synthetic texts in miniature" if options.quick else ", ".join(options.tasks)
    amount = "all examples" if options.examples is None else f"{count(options.examples)} examples"
    if options.examples_per_client is not None:
        amount = f"{count(options.examples_per_client)} examples a client"
    seeds = ", ".join(map(str, options.seeds))
    rates = "".join(f" ({rate:g} for {pattern})" for pattern, rate in options.rates)
    return (
        f"{encoders} on {data}: {amount}, {options.partition}, {training['optimizer']} at"
        f" {training['learning_rate']:g}{rates}, {training['local_epochs']} local epochs;"
        f" preset {options.preset}, seeds {seeds}."
    )


def _remarks(known: Known) -> list[str]:
    named = dict.fromkeys((setup.encoder, setup.task) for setup in known.results)
    found = ((f"{encoder} on {task}", collapse(known, encoder, task)) for encoder, task in named)
    return [f"{who}: {what.words}." for who, what in found if what is not None]


def _scored(known: Known, scored: Mapping[str, str | None]) -> list[str]:
    """Say what each task is scored on, from what its runs said."""
    lines = []
    for task in known.options.tasks:
        cells = (
            cell for setup, by_seed in known.results.items() if setup.task == task for cell in by_seed.values() if cell
        )
        first = next(cells, None)
        if first is None:
            continue
        rows = scored[task]
        where = f"of {rows}" if rows else "cut from train" if first.is_cut else "of the validation split"
        each = known.options.examples_per_client
        amount = f"{count(first.num_train)} examples" if each is None else f"{count(each)} examples a client"
        lines.append(f"{task}: trained on {amount}, scored on {count(first.num_scored)} rows {where}.")
    return lines


def cells_sheet(known: Known) -> str:
    """Return one row for every finished cell, with all that was measured of it."""
    head = ["cell", "encoder", "task", "clients", "seed", "accuracy", "at_chance", "rounds_to_target", "last_accuracy"]
    rows: list[list[object]] = []
    for setup, by_seed in known.results.items():
        reached, at = known.reached(setup), known.options.rounds[setup.task]
        for seed, cell in by_seed.items():
            if cell is not None:
                who = [cell.cell, setup.encoder, setup.task, setup.clients, seed]
                scores = [cell.curve[at], fate(cell, at), reached.get(seed, ""), cell.curve[max(cell.curve)]]
                rows.append([*who, *scores, *cell.examples, *(getattr(cell, name) for name in _COSTS)])
    return csv_text([*head, "fewest_examples", "most_examples", *_COSTS], rows)


def curves_sheet(results: Results) -> str:
    """Return every evaluation of every finished cell: what figure 3 is drawn from."""
    return csv_text(
        ["encoder", "task", "clients", "seed", "round", "accuracy"],
        (
            [setup.encoder, setup.task, setup.clients, seed, number, f"{accuracy:.6g}"]
            for setup, by_seed in results.items()
            for seed, cell in by_seed.items()
            if cell is not None
            for number, accuracy in sorted(cell.curve.items())
        ),
    )


def make_tables(known: Known) -> list[Table]:
    """Return all tables; a row without its cells is there, empty."""
    return [_accuracies(known), _rounds(known), _collapses(known), claims_table(known)]


def _accuracies(known: Known) -> Table:
    columns = (
        *WHO,
        CLIENTS,
        Column("examples a client", "examples", "words"),
        Column("steps a round", "steps", "count"),
        Column("accuracy", "accuracy"),
        Column("of one client's", "share", "percent"),
        Column("at chance", "at_chance", "words"),
        Column("chance", "chance"),
        Column("accuracy at the end", "last_accuracy"),
        Column("rounds in all", "last_round", "words"),
        Column("bytes a round", "round_bytes", "bytes"),
        Column("training", "train_seconds", "seconds"),
        Column("evaluation", "evaluate_seconds", "seconds"),
        Column("device", "device", "words"),
    )
    rows = tuple(_accuracy_row(known, setup) for setup in known.results)
    at = {task: rounds for task, rounds in known.options.rounds.items() if any(s.task == task for s in known.results)}
    fixed = ", ".join(f"{rounds} ({task})" for task, rounds in at.items())
    notes = (
        f"Accuracy is that after so many rounds: {fixed}.",
        *seconds_notes(cell.cells_at_once for by_seed in known.results.values() for cell in by_seed.values() if cell),
    )
    return Table("table1", "Table 1: accuracy at a fixed number of rounds (figure 1)", columns, rows, notes)


def _accuracy_row(known: Known, setup: Setup) -> tuple[Value, ...]:
    cells = [cell for cell in known.cells(setup).values() if cell is not None]
    return (
        setup.task,
        setup.encoder,
        str(setup.clients),
        _examples(cells[0]) if cells else None,
        known.over(setup, lambda cell: float(cell.steps)),
        known.accuracy(setup),
        _share(known, setup),
        fate_words(known.fates(setup)),
        known.over(setup, lambda cell: cell.chance),
        known.over(setup, lambda cell: cell.curve[max(cell.curve)]),
        str(rounds_of(known.options, setup)),
        known.over(setup, lambda cell: cell.round_bytes),
        known.over(setup, lambda cell: cell.train_seconds),
        known.over(setup, lambda cell: cell.evaluate_seconds),
        f"{cells[0].device}, {cells[0].precision}" if cells else None,
    )


def _examples(cell: Result) -> str:
    fewest, most = cell.examples
    return count(most) if fewest == most else f"{count(fewest)} to {count(most)}"


def _share(known: Known, setup: Setup) -> Spread | None:
    """Return the share of the accuracy of the one client with the same seed."""
    at, baselines = known.options.rounds[setup.task], known.cells(setup.baseline)
    pairs = [(cell, baselines.get(seed)) for seed, cell in known.cells(setup).items()]
    return spread([cell.curve[at] / over.curve[at] if cell and over else None for cell, over in pairs])


def _rounds(known: Known) -> Table:
    columns = (
        *WHO,
        CLIENTS,
        Column("target", "target"),
        Column("rounds to it", "rounds", "number"),
        Column("by seed", "by_seed", "words"),
        Column("tried for", "threshold", "words"),
    )
    rows = tuple(_rounds_row(known, setup) for setup in known.results)
    notes = (
        f"The target is {TARGET:.0%} of one client's accuracy, with the same seed, after the fixed number of rounds."
        f" It is void where that is within {100 * MARGIN:.0f} points of chance: then any model reaches it.",
        *([] if 1 in known.options.clients else ["No one-client baseline is among the cells: there is no target."]),
    )
    title = f"Table 2: rounds to {TARGET:.0%} of the one-client baseline (figure 2)"
    return Table("table2", title, columns, rows, notes)


def _rounds_row(known: Known, setup: Setup) -> tuple[Value, ...]:
    reached, threshold = known.reached(setup), rounds_of(known.options, setup)
    at = known.options.rounds[setup.task]
    is_void = "void" in reached.values()
    return (
        setup.task,
        setup.encoder,
        str(setup.clients),
        None if is_void else known.over(setup.baseline, lambda cell: TARGET * cell.curve[at]),
        reached_value(reached, threshold),
        ", ".join(f"{seed}: {one}" for seed, one in reached.items()) or None,
        str(threshold),
    )


def _collapses(known: Known) -> Table:
    columns = (
        *WHO,
        Column("one client", "baseline"),
        Column("chance", "chance"),
        Column("at chance with", "clients_at_chance", "words"),
        Column("in words", "words", "words"),
    )
    named = dict.fromkeys((setup.encoder, setup.task) for setup in known.results)
    rows = []
    for encoder, task in named:
        found = collapse(known, encoder, task)
        one = Setup(encoder, task, 1)
        counts = None if found is None else " ".join(map(str, found.counts)) or "none"
        chance = known.chance(task)
        rows.append(
            (
                task,
                encoder,
                known.accuracy(one),
                single(chance),
                counts,
                found.words if found else None,
            )
        )
    notes = (f"At chance is within {100 * MARGIN:.0f} points of what the most frequent label scores, in any seed.",)
    return Table("table3", "Table 3: collapse to chance", columns, tuple(rows), notes)


def claims_table(known: Known) -> Table:
    """Return the paper's claims, and what our cells say where they have its encoder."""
    columns = (
        Column("the paper claims", "claim", "words"),
        Column("in its", "where", "words"),
        Column("ours", "ours", "words"),
    )
    return Table(
        "table4",
        "Table 4: the paper's claims",
        columns,
        tuple((c.words, c.where, _ours(c, known)) for c in CLAIMS),
        NOTES,
    )


def _ours(claim: Claim, known: Known) -> str:
    if not claim.encoder:
        return _declines(known)
    found = [
        f"{setup.task}{' with its dense layer' if setup.encoder.startswith(DENSE) else ''}: {words}"
        for setup in known.results
        if setup.clients == (claim.clients or max(known.options.clients))
        and claim.task in ("", setup.task)
        and any(part in setup.encoder.lower() for part in ENCODERS[claim.encoder])
        # `distilbert-base-cased` has `bert-base-cased` in it.
        and (claim.encoder == "DistilBERT") == ("distil" in setup.encoder.lower())
        and (words := _words(claim, known, setup.encoder, setup.task))
    ]
    return "; ".join(found) or NOT_RUN


def _words(claim: Claim, known: Known, encoder: str, task: str) -> str | None:
    if not claim.clients:
        found = collapse(known, encoder, task)
        return found.words if found else None
    setup = next(s for s in known.results if (s.encoder, s.task, s.clients) == (encoder, task, claim.clients))
    value = reached_value(known.reached(setup), known.options.threshold_rounds[task])
    if value is None:
        return None
    reached = value if isinstance(value, str) else f"in {value.mean:.3g} rounds"
    return f"90% {reached}; at chance: {fate_words(known.fates(setup))}"


def _declines(known: Known) -> str:
    """Return the declines from one client to most, in points, by encoder and task."""
    most, parts = max(known.options.clients), []
    for setup in (setup for setup in known.results if setup.clients == most > 1):
        few, many = known.accuracy(setup.baseline), known.accuracy(setup)
        if few and many:
            parts.append(f"{setup.encoder} on {setup.task} {change(many.mean - few.mean)}")
    return f"from 1 to {most} clients: {', '.join(parts)}" if parts else NOT_RUN
