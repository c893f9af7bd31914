"""fedmtl check: what is worth knowing of examples before anybody trains on them"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedmtl.cli.arguments import Json, Settings
from fedmtl.cli.terminal import make_terminal, show, write
from fedmtl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedmtl.config import Config
    from fedmtl.tasks.check import Checked, PartFacts

CONFIGS = (".yaml", ".yml")
# Of labels in the table; more are summed up.
MOST_ROWS = 12


def check(
    data: Annotated[
        list[Path],
        typer.Argument(
            help="Files of examples, folders of them, or one config. Several files without train, dev or test in their"
            " name are of several clients.",
            metavar="DATA...",
        ),
    ],
    text: Annotated[
        list[str] | None, typer.Option(help="A text column of the files; twice for pairs.", metavar="COLUMN")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The label column of the files.", metavar="COLUMN")] = None,
    delimiter: Annotated[
        str | None,
        typer.Option(help="What separates the columns of csv and tsv files: tab, comma, semicolon or one character."),
    ] = None,
    set: Settings = None,
    strict: Annotated[bool, typer.Option("--strict", help="End with status 1 where there is a warning.")] = False,
    json_: Json = False,
) -> None:
    """Look over examples: columns, labels, lengths, duplicates, likely personal data. No text of them is printed."""
    from fedmtl.tasks.check import check_parts
    from fedmtl.tasks.parts import config_parts, file_parts

    for path in data:
        if not path.exists():
            raise DataError(f"{path}: no such file or folder; name files of examples, a folder of them, or a config")
    if any(path.suffix in CONFIGS for path in data):
        if len(data) > 1 or text or label or delimiter:
            raise ConfigError("check: a config names its files and columns itself; give it alone, or with --set")
        from fedmtl.cli.run import load

        parts = config_parts(load(data[0], set or [], "check"))
    elif set:
        raise ConfigError("check: --set changes a config, and there is none among the files; remove it")
    else:
        parts = file_parts(data, text or (), label, _checked_delimiter(delimiter))
    found = check_parts(parts)
    if json_:
        write(json.dumps(found.to_json()))
    else:
        _print(found)
    if strict and found.warnings:
        raise typer.Exit(1)


def _checked_delimiter(delimiter: str | None) -> str | None:
    from fedmtl.tasks.sources import DELIMITERS

    if delimiter is None or delimiter in DELIMITERS or (len(delimiter) == 1 and delimiter not in '"\r\n'):
        return delimiter
    raise ConfigError(f"--delimiter: found {delimiter!r}; write {', '.join(DELIMITERS)} or one character")


def _print(found: Checked) -> None:
    show(_parts_table(found.parts), ["words: the median, the 95th percentile and the most of an example", ""])
    labels = _labels_table(found.parts)
    if labels.row_count:
        show(labels)
    notes = [f"warning: {warning.where}: {warning.words}" for warning in found.warnings]
    terminal = make_terminal()
    for note in notes or ["no warnings"]:
        terminal.print(note, markup=False)


def _parts_table(parts: list[PartFacts]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("data", "texts", "label", "rows", "empty", "words", "repeated", "personal"):
        table.add_column(column, justify="left" if column in ("data", "texts", "label") else "right")
    for part in parts:
        table.add_row(
            " ".join(filter(None, (part.task, part.client, part.split))) if part.task else part.origin,
            ", ".join(part.text) or "–",
            part.label or "–",
            f"{part.rows:,}",
            f"{part.empty_texts:,}",
            ", ".join(map(str, part.words[1:])),
            f"{part.repeated:,}",
            f"{part.personal_rows:,}",
        )
    return table


def _labels_table(parts: list[PartFacts]) -> Table:
    """The balance of labels in train; equal names of several parts stand in one row."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("task", "label", "train", "share"):
        table.add_column(column, justify="left" if column in ("task", "label") else "right")
    trains = [part for part in parts if part.split == "train"]
    for task in dict.fromkeys(part.task for part in trains):
        members = [part for part in trains if part.task == task]
        counts: dict[str, int] = {}
        for part in members:
            for name, count in part.labels.items():
                counts[name] = counts.get(name, 0) + count
        rows = sum(part.rows for part in members)
        shown = sorted(counts.items(), key=lambda item: -item[1])
        for name, count in shown[:MOST_ROWS]:
            table.add_row(task or "–", name, f"{count:,}", f"{count / rows:.1%}")
        rest = sum(part.other_labels for part in members) + max(0, len(shown) - MOST_ROWS)
        if rest:
            table.add_row(task or "–", f"({rest} more)", "", "")
    return table


def config_warnings(config: Config) -> list[str]:
    """What `fedmtl config` says of the files that a config names, a line each; nothing where it names none."""
    sources = [task.source for task in config.tasks.values() if task.source]
    brought = [client for client in config.clients.values() if client.source]
    if not brought and config.data.root is None and all(source.hub for source in sources):
        return []
    from fedmtl.tasks.check import SPOILS, check_parts
    from fedmtl.tasks.parts import config_parts

    try:
        parts = config_parts(config, hub=False)
    except (ConfigError, DataError) as error:
        # A config may be written where its files are not.
        return [str(error)]
    found = check_parts(parts, personal=False)
    return [f"{warning.where}: {warning.words}" for warning in found.warnings if warning.code in SPOILS]
