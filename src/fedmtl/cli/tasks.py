"""fedmtl tasks"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table


def tasks() -> None:
    """List the built-in tasks."""
    from fedmtl.tasks.builtin import BUILTIN

    table = Table("task", "kind", "text", "labels or range", "metric", "embedded")
    for name, task in BUILTIN.items():
        labels = ", ".join(task.labels) if task.labels else "{:g} to {:g}".format(*task.score_range or (0, 1))
        table.add_row(name, task.kind, ", ".join(task.text), labels, task.metric, task.embedded or "")
    Console(highlight=False).print(table)
