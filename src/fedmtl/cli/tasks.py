"""fedmtl tasks"""

from __future__ import annotations

from rich.table import Table

from fedmtl.cli.terminal import show


def tasks() -> None:
    """List the built-in tasks."""
    from fedmtl.tasks.builtin import BUILTIN

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("task", "kind", "text", "labels or range", "metric", "embedded"):
        table.add_column(
            column,
            no_wrap=column in ("task", "kind", "metric", "embedded"),
            max_width=10 if column == "text" else None,
        )
    for name, task in BUILTIN.items():
        labels = ", ".join(task.labels) if task.labels else "{:g} to {:g}".format(*task.score_range or (0, 1))
        table.add_row(name, task.kind, ", ".join(task.text), labels, task.metric, task.embedded or "")
    show(
        table,
        [
            "",
            "A task with embedded data needs no files: `data.source: embedded`, or the names sentiment, paraphrase",
            "and similarity. Others come from the hub, or from DATA_ROOT/TASK/train.tsv with the text columns and",
            "`label`.",
        ],
    )
