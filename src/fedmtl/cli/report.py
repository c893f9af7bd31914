"""fedmtl report"""

from __future__ import annotations

from fedmtl.cli.arguments import Run
from fedmtl.cli.terminal import write
from fedmtl.runs import find_run


def report(run: Run) -> None:
    """Write report.html again and print its path."""
    from fedmtl.report.page import write_report

    write(str(write_report(find_run(run).path)))
