"""fedmtl report"""

from __future__ import annotations

from typing import Annotated

import typer

from fedmtl.runs import find_run


def report(run: Annotated[str, typer.Argument(help="A run's name or folder.")]) -> None:
    """Write report.html again and print its path."""
    from fedmtl.report.page import write_report

    print(write_report(find_run(run).path))
