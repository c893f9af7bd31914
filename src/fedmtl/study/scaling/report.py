"""What the paper claims (see cells for its title). Its figures print no numbers, so its words stand here, and where."""

from __future__ import annotations

from dataclasses import dataclass

from fedmtl.report.formats import change
from fedmtl.study.scaling.verdicts import Known, collapse, fate_words, reached_value
from fedmtl.study.tables import Column, Table

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


def claims_table(known: Known) -> Table:
    """The paper's claims, and what our cells say where they have its encoder."""
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
        f"{setup.task}: {words}"
        for setup in known.results
        if setup.clients == (claim.clients or max(known.asked.clients))
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
    value = reached_value(known.reached(setup), known.asked.threshold_rounds[task])
    if value is None:
        return None
    reached = value if isinstance(value, str) else f"in {value.mean:.3g} rounds"
    return f"90% {reached}; at chance: {fate_words(known.fates(setup))}"


def _declines(known: Known) -> str:
    """From one client to most, in points, by encoder and task."""
    most, parts = max(known.asked.clients), []
    for setup in (setup for setup in known.results if setup.clients == most > 1):
        few, many = known.accuracy(setup.baseline), known.accuracy(setup)
        if few and many:
            parts.append(f"{setup.encoder} on {setup.task} {change(many.mean - few.mean)}")
    return f"from 1 to {most} clients: {', '.join(parts)}" if parts else NOT_RUN
