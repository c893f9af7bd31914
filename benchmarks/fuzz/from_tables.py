"""Targets that are tables of texts and labels: tsv, csv, JSON lines, gzipped ones and parquet."""

from __future__ import annotations

from pathlib import Path
from random import Random

from fedmtl.errors import DataError
from fuzz.formats import Gzip, Json, Raw, Text
from fuzz.mutate import mutate_bytes
from fuzz.targets import MEBIBYTE, Run, Target


def open_table(folder: Path, suffix: str) -> Run:
    from fedmtl.tasks.examples import drop_empty_texts, examples_from, labels_in
    from fedmtl.tasks.sources import read_table, read_texts
    from fuzz.seeds import evaluated_tasks

    path = folder / f"train{suffix}"
    texts = folder / f"texts.txt{'.gz' if suffix.endswith('.gz') else ''}"
    tasks = evaluated_tasks()

    def run(data: bytes) -> None:
        path.write_bytes(data)
        table = read_table(path)
        read_texts(path, ("sentence",))
        read_texts(path, ("a", "b"))
        if suffix != ".parquet":
            texts.write_bytes(data)
            read_texts(texts, ("sentence",))
        errors: list[DataError] = []
        for task in tasks.values():
            # Each task's labels are read, whatever the other task finds wrong.
            try:
                examples = examples_from(drop_empty_texts(table, task.text)[0], task)
                assert len(examples.labels) == len(examples.texts[0])
                labels_in([table], task)
            except DataError as error:
                errors.append(error)
        if len(errors) == len(tasks):
            raise errors[0]

    return run


class Parquet(Raw):
    """Mostly its footer is changed, which says what is where; its length and the magic word stay."""

    def mutate(self, data: bytes, random: Random, others: object) -> bytes:
        length = int.from_bytes(data[-8:-4], "little")
        if random.random() < 0.3 or length + 12 > len(data):
            return mutate_bytes(data, random)
        footer = mutate_bytes(data[-8 - length : -8], random)
        return data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + b"PAR1"


TARGETS = (
    Target("table-tsv", lambda folder: open_table(folder, ".tsv"), "a tsv file", Text(), share=4),
    Target("table-csv", lambda folder: open_table(folder, ".csv"), "a csv file", Text(), share=4),
    Target("table-jsonl", lambda folder: open_table(folder, ".jsonl"), "JSON lines", Json(lines=True), share=4),
    Target(
        "table-gz", lambda folder: open_table(folder, ".tsv.gz"), "a gzipped tsv file", Gzip(), share=2, seconds=10,
        memory=256 * MEBIBYTE,
    ),
    Target("table-parquet", lambda folder: open_table(folder, ".parquet"), "a parquet file", Parquet(), share=0.5),
)  # fmt: skip
