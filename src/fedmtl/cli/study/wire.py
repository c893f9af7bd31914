"""fedmtl study wire"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedmtl.cli.arguments import ConfigFile, Settings
from fedmtl.cli.progress import make_display
from fedmtl.cli.run import load
from fedmtl.cli.tables import amount, number
from fedmtl.cli.terminal import show

if TYPE_CHECKING:
    from fedmtl.study.wire.study import Pair, Point


def wire(
    config: ConfigFile = None,
    set: Settings = None,
    codecs: Annotated[
        str, typer.Option(help="Codecs for both ways, or DOWN/UP, with commas between.")
    ] = "fp32,fp16,int8,int8/topk",
    name: Annotated[str | None, typer.Option(help="The study's name; a taken one gets -2, -3, ...")] = None,
) -> None:
    """Run a config once per codec, with the same seed: wire.csv and wire.html show score against bytes."""
    loaded = load(config, set or [])
    display = make_display()
    with display:
        from fedmtl.study.wire.study import last_points, parse_pairs, study_wire

        def observe(pair: Pair) -> Any:
            display.say(f"down {pair.down}, up {pair.up}")
            return display

        pairs = parse_pairs(codecs)
        folder, points = study_wire(loaded, pairs, name or f"{config.stem if config else 'demo'}-wire", observe)
    show(_table(last_points(points)), [f"{folder / 'wire.csv'} and {folder / 'wire.html'}"])


def _table(ends: list[Point]) -> Table:
    metrics = list(dict.fromkeys(metric for end in ends for metric in end.scores))
    table = Table(title="bytes are per update; scores are the last ones", title_justify="left")
    for column in ("codec", *metrics, "down", "up", "both"):
        is_name = column == "codec"
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for end in ends:
        each = max(1, end.messages)
        sizes = (end.bytes_down / each, end.bytes_up / each, end.total_bytes / each)
        table.add_row(end.codec, *(number(end.scores.get(metric)) for metric in metrics), *map(amount, map(int, sizes)))
    return table
