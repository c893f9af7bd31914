"""The files a study of multi-task methods trains on: sentiment of two sources, and embedded texts for a miniature."""

from __future__ import annotations

from pathlib import Path

from fedmtl.errors import DataError
from fedmtl.runs.folder import write_atomic
from fedmtl.tasks.embedded import INTENSIFIERS, embedded_columns
from fedmtl.tasks.sources import Table, find_table, read_table

# CFIMDB's two labels, by index or by name, on SST's scale from 0 to 4.
RESCALED = {"0": "0", "negative": "0", "1": "4", "positive": "4"}
NUM_CFIMDB = 300


def write_sentiment(root: Path, target: Path) -> dict[str, str]:
    """Write SST's training rows and then CFIMDB's, rescaled; the task's source is that file and SST's dev.

    Both are `sst5` and `cfimdb` in the root, with the columns `sentence` and `label`.
    """
    sst, cfimdb = (_read(root / name, ["train"]) for name in ("sst5", "cfimdb"))
    validation = find_table(root / "sst5", ["dev", "validation"])
    if validation is None:
        raise DataError(f"{root / 'sst5'}: has no dev file; put dev.tsv.gz there, so that CFIMDB is in training alone")
    labels = [_rescaled(cfimdb, row) for row in range(len(cfimdb))]
    texts = [*_column(sst, "sentence"), *_column(cfimdb, "sentence")]
    _write(target, {"sentence": texts, "label": [*_column(sst, "label"), *labels]})
    return {"train": str(target), "validation": str(validation)}


def write_embedded(root: Path) -> None:
    """Embedded texts as files under the names of the real tasks; a strong word makes a sentiment an extreme one."""
    for split, name in (("train", "train"), ("validation", "dev")):
        sentiment = embedded_columns("sentiment", split)
        graded = [_grade(*row) for row in zip(sentiment["sentence"], sentiment["label"], strict=True)]
        held = NUM_CFIMDB if split == "train" else 0
        _write(root / "sst5" / f"{name}.tsv", {"sentence": sentiment["sentence"][held:], "label": graded[held:]})
        if held:
            plain = ["0" if label == "negative" else "1" for label in sentiment["label"]]
            _write(root / "cfimdb/train.tsv", {"sentence": sentiment["sentence"][:held], "label": plain[:held]})
        same = embedded_columns("paraphrase", split)
        verdicts = ["duplicate" if label == "same" else "not_duplicate" for label in same["label"]]
        _write(root / "qqp" / f"{name}.tsv", {**same, "label": verdicts})
        _write(root / "stsb" / f"{name}.tsv", embedded_columns("similarity", split))


def _grade(text: str, label: str) -> str:
    is_strong = any(f" {word} " in f" {text} " for word in INTENSIFIERS)
    return {"negative": "0" if is_strong else "1", "positive": "4" if is_strong else "3"}[label]


def _read(folder: Path, stems: list[str]) -> Table:
    found = find_table(folder, stems)
    if found is None:
        remedy = "; put train.tsv.gz there, or leave CFIMDB out with --no-cfimdb" if folder.name == "cfimdb" else ""
        raise DataError(f"{folder}: has no train file{remedy or '; put train.tsv.gz there'}")
    return read_table(found)


def _column(table: Table, name: str) -> list[str]:
    if name not in table.columns:
        raise DataError(f"{table.origin}: has no column {name!r}, it has {', '.join(table.columns)}; rename one")
    return table.columns[name]


def _rescaled(table: Table, row: int) -> str:
    label = _column(table, "label")[row]
    if label not in RESCALED:
        raise DataError(f"{table.place(row)}: label {label!r} is not one of {', '.join(RESCALED)}; mend the row")
    return RESCALED[label]


def _write(path: Path, columns: dict[str, list[str]]) -> None:
    """A tsv, which has no quoting: tabs and line ends inside a text become spaces."""
    rows = zip(*columns.values(), strict=True)
    lines = ["\t".join(columns), *("\t".join(" ".join(value.split()) for value in row) for row in rows)]
    text = ("\n".join(lines) + "\n").encode()
    if not path.exists() or path.read_bytes() != text:
        write_atomic(path, text)
