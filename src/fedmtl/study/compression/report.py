"""The numbers of the slides that this study rebuilds and of the TinyBERT paper, as printed, and where they slip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# A ratio of numbers with three digits is within this of what is printed with a decimal of a percent.
ROUNDING = 0.0011


@dataclass(frozen=True)
class Printed:
    """A student's scores beside its teacher's, by task."""

    teacher_words: str
    student_words: str
    teacher: Mapping[str, float]
    student: Mapping[str, float]


SLIDES = Printed(
    "slides: BERT-base, the teacher",
    "slides: TinyBERT4, no augmentation",
    {"sst2": 0.924, "rte": 0.725, "mrpc": 0.852, "cola": 0.557},
    {"sst2": 0.906, "rte": 0.643, "mrpc": 0.683, "cola": 0.331},
)
PAPER = Printed(
    "paper: BERT-base, the teacher",
    "paper: TinyBERT4",
    {"sst2": 0.934, "rte": 0.670, "mrpc": 0.875, "cola": 0.528, "qqp": 0.711, "stsb": 0.852},
    {"sst2": 0.926, "rte": 0.666, "mrpc": 0.864, "cola": 0.441, "qqp": 0.713, "stsb": 0.804},
)
# What the slides print as retention.
RETENTION = {"sst2": 0.9802, "rte": 0.893, "mrpc": 0.8017, "cola": 0.594}


@dataclass(frozen=True)
class PrintedSize:
    """A row of the slides' table of sizes: MB, its printed share of the first, and milliseconds."""

    words: str
    megabytes: float
    share: float
    milliseconds: float


SIZES = (
    PrintedSize("slides: BERT-base", 417.85, 1.0, 2814.70),
    PrintedSize("slides: TinyBERT4", 54.82, 0.1311, 209.86),
    PrintedSize("slides: BERT-base, QDQ", 105.23, 0.6463, 3436.46),
    PrintedSize("slides: BERT-base, QOperator", 105.03, 0.6463, 1436.28),
)

NOTES: Mapping[int, tuple[str, ...]] = {
    1: (
        "The slides' mrpc of .683 is the share of its larger class.",
        "The paper's numbers are of GLUE's test sets, mrpc and qqp as F1, stsb as Spearman's r; ours are of the dev"
        " sets, accuracy and Pearson's r. Official test sets are never read here.",
        "The slides' teacher has 12 layers and a width of 768, its student 4 and 312; retention is of each one's own"
        " teacher.",
    ),
    2: (
        "The slides timed one input on a machine they do not name.",
        "The paper prints 109M and 14.5M parameters, 22.5B and 1.2B FLOPs, and 9.4 times the speed.",
    ),
    4: ("The slides show augmentation for cola and rte as pictures alone, with 30 copies of an example.",),
    5: (
        "The slides prune 20% of the linear weights of the student, which is 6% of all its weights; its compressed file"
        " went from 52 to 50 MB.",
        "Retention is of the teacher; the first row is the teacher trained for as many epochs more.",
    ),
    6: ("All rows are the same student, which starts with the teacher's own layers and heads.",),
    7: ("Each single-task teacher has as many passes over its task as the multi-task one.",),
}


def slips(table: int) -> list[str]:
    """What the slides print and their own numbers do not give."""
    if table == 1:
        found = {task: SLIDES.student[task] / SLIDES.teacher[task] for task in RETENTION}
        return [
            f"{task}: the slides print a retention of {printed:.1%}, their scores give {found[task]:.1%}."
            for task, printed in RETENTION.items()
            if abs(found[task] - printed) > ROUNDING
        ]
    if table == 2:
        whole = SIZES[0].megabytes
        return [
            f"{row.words.removeprefix('slides: ')}: the slides print {row.share:.2%} of the size, {row.megabytes:g} of"
            f" {whole:g} MB is {row.megabytes / whole:.1%}."
            for row in SIZES
            if abs(row.megabytes / whole - row.share) > ROUNDING
        ]
    return []
