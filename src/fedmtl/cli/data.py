"""fedmtl data: what a run trains on, as files"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedmtl.cli.terminal import write
from fedmtl.errors import ConfigError
from fedmtl.foreign import printable

data = typer.Typer(name="data", help="Datasets as files.", no_args_is_help=True)


@data.callback()
def _group() -> None:
    """Datasets as files."""


@data.command()
def get(
    name: Annotated[
        str, typer.Argument(help="A built-in task, such as imdb, or a dataset of the hub: owner/name.", metavar="NAME")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the files; they go into a folder of the task in it.", metavar="DIR")
    ],
    subset: Annotated[str | None, typer.Option(help="The dataset's configuration, such as sst2 of glue.")] = None,
    text: Annotated[
        str | None, typer.Option(help="The text column, or two with a comma between.", metavar="COLUMNS")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column with the label or the score.", metavar="COLUMN")] = None,
    format: Annotated[str, typer.Option(help="jsonl or csv.")] = "jsonl",
) -> None:
    """Write a dataset of the hub as files (train, validation, test), and print the config that reads them."""
    from fedmtl.tasks.download import Wanted, download

    if format not in ("jsonl", "csv"):
        raise ConfigError(f"--format: found {format}; write jsonl or csv")
    columns = tuple(part.strip() for part in (text or "").split(",") if part.strip())
    found = download(Wanted(name, subset, columns, label, format), out)  # type: ignore[arg-type]
    for path, count in found.files.items():
        write(f"{path}: {count:,} rows")
    for remark in found.remarks:
        write(printable(remark))
    write("")
    write(printable_lines(found.snippet))


@data.command()
def example(
    folder: Annotated[Path, typer.Argument(help="Folder for the files, which must not be there.", metavar="DIR")],
) -> None:
    """Write four made-up tasks as csv files, with a config of six clients: what the tutorial begins with."""
    from fedmtl.tasks.example import CONFIG, write_example

    for path, count in write_example(folder).items():
        write(f"{path}: {count:,} rows" if count else f"{path}")
    write("")
    write(f"fedmtl run {folder / CONFIG}")


def printable_lines(text: str) -> str:
    """What came from elsewhere, line by line, without what would steer a terminal."""
    return "\n".join(printable(line) for line in text.split("\n"))
