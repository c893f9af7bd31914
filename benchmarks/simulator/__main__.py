"""make bench: everything, into one folder.

python -m simulator                                       # all of it, about an hour on two cores
python -m simulator --quick --systems fedmtl naive        # one repeat of two systems
python -m simulator --only overhead population
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from simulator import measures, results
from simulator.comparison import Contest, Plan, check_sizes, compare
from simulator.systems import ROOT, SYSTEMS, Case
from simulator.workload import make_workload

PARTS = ("table", "overhead", "evaluation", "population")
FEW, MANY = 3, 32


def main() -> None:
    args = _arguments()
    with tempfile.TemporaryDirectory(prefix="fedmtl-bench-") as temporary:
        folder = (args.workload or Path(temporary)).resolve()
        make_workload(folder, sorted({FEW, MANY, *args.clients}))
        _run(args, folder)


def _run(args: argparse.Namespace, folder: Path) -> None:
    host, skipped = results.machine(), {}
    contests: list[Contest] = []
    extra: dict[str, Any] = {}
    python = Path(sys.executable)
    if "table" in args.only:
        rounds = {clients: args.rounds or (6 if clients <= 8 else 3) for clients in args.clients}
        plan = Plan(folder, args.clients, rounds, args.repeats, args.envs, args.lock)
        chosen = [system for system in SYSTEMS if not args.systems or system.name in args.systems]
        contests = compare(chosen, plan, skipped, _note)
        check_sizes(contests)
        results.write(args.out, contests, extra, skipped, host)
    measured = {
        "overhead": (measures.overhead, Case(folder, MANY, 3, python)),
        "evaluation": (measures.evaluation, Case(folder, FEW, 4, python)),
        "population": (measures.population, Case(folder, MANY, 4, python)),
    }
    for name, (measure, case) in measured.items():
        if name in args.only:
            extra[name] = measure(case, args.repeats, args.lock, _note)
            results.write(args.out, contests, extra, skipped, host)
    print(results.markdown(contests, extra, skipped, host))


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="simulator", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--systems", nargs="+", choices=[system.name for system in SYSTEMS])
    parser.add_argument("--clients", nargs="+", type=int, default=[FEW, MANY], help="populations of the table")
    parser.add_argument("--rounds", type=int, help="rounds of a run, the first not counted")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one repeat")
    parser.add_argument("--envs", type=Path, default=ROOT / "benchmarks" / ".envs", help="where environments are made")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--workload", type=Path, help="keep the workload here, and use it again")
    parser.add_argument("--lock", type=Path, help="a file to lock around every run, where others time things too")
    args = parser.parse_args()
    if args.quick:
        args.repeats = 1
    return args


if __name__ == "__main__":
    main()
