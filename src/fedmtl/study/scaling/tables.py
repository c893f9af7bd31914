"""The tables of a study of scaling: accuracy, rounds to the target, where encoders collapse."""

from __future__ import annotations

from fedmtl.report.formats import count
from fedmtl.study.measures import Spread, spread
from fedmtl.study.scaling.cells import Setup, rounds_of
from fedmtl.study.scaling.report import claims_table
from fedmtl.study.scaling.results import Result
from fedmtl.study.scaling.verdicts import MARGIN, TARGET, Known, collapse, fate_words, reached_value
from fedmtl.study.tables import Column, Table, Value

WHO = (Column("task", "task", "words"), Column("encoder", "encoder", "words"))
CLIENTS = Column("clients", "clients", "words")


def make_tables(known: Known) -> list[Table]:
    """All of them; a row without its cells is there, empty."""
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
    at = {task: rounds for task, rounds in known.asked.rounds.items() if any(s.task == task for s in known.results)}
    fixed = ", ".join(f"{rounds} ({task})" for task, rounds in at.items())
    notes = (f"Accuracy is that after so many rounds: {fixed}.", *_shared_machine(known))
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
        str(rounds_of(known.asked, setup)),
        known.over(setup, lambda cell: cell.round_bytes),
        known.over(setup, lambda cell: cell.train_seconds),
        known.over(setup, lambda cell: cell.evaluate_seconds),
        f"{cells[0].device}, {cells[0].precision}" if cells else None,
    )


def _examples(cell: Result) -> str:
    fewest, most = cell.examples
    return count(most) if fewest == most else f"{count(fewest)} to {count(most)}"


def _share(known: Known, setup: Setup) -> Spread | None:
    """Of the accuracy of the one client with the same seed."""
    at, baselines = known.asked.rounds[setup.task], known.cells(setup.baseline)
    pairs = [(cell, baselines.get(seed)) for seed, cell in known.cells(setup).items()]
    return spread([cell.curve[at] / over.curve[at] if cell and over else None for cell, over in pairs])


def _shared_machine(known: Known) -> list[str]:
    cells = (cell for own in known.results.values() for cell in own.values() if cell)
    most = max((cell.cells_at_once for cell in cells), default=1)
    return [f"Seconds were taken with up to {most} cells at once on the machine."] if most > 1 else []


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
        *([] if 1 in known.asked.clients else ["No one-client baseline was asked for: there is no target."]),
    )
    title = f"Table 2: rounds to {TARGET:.0%} of the one-client baseline (figure 2)"
    return Table("table2", title, columns, rows, notes)


def _rounds_row(known: Known, setup: Setup) -> tuple[Value, ...]:
    reached, threshold = known.reached(setup), rounds_of(known.asked, setup)
    at = known.asked.rounds[setup.task]
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
                None if chance is None else Spread(chance, None, 1),
                counts,
                found.words if found else None,
            )
        )
    notes = (f"At chance is within {100 * MARGIN:.0f} points of what the most frequent label scores, in any seed.",)
    return Table("table3", "Table 3: collapse to chance", columns, tuple(rows), notes)
