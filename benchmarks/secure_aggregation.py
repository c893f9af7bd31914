"""What a round costs beyond training, in the clear and under masks: seconds of a core, seconds on the clock, bytes.

    python benchmarks/secure_aggregation.py            # ten sites, 4.5 million parameters (18 MB), about a minute
    python benchmarks/secure_aggregation.py --sites 30 --rounds 5 --encoder random-2x128

Runs with and without masks take turns, all in this process (no workers), so that every second of a core is counted and
other load on the machine does not change it. What is inside the call that trains is subtracted. Scoring is left out, as
it comes after the time that is counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedmtl.config.file import load_config
from fedmtl.experiment.run import start_run
from fedmtl.federation import client, server
from fedmtl.runs.events import PlanEvent, RoundEvent, SecureAggregationEvent
from fedmtl.runs.log import read_events

MASKED = "privacy.secure_aggregation={}"


class Watch:
    """Seconds of a core and on the clock that rounds take, and those of them that are spent on training."""

    def __init__(self) -> None:
        self.rounds: list[tuple[float, float]] = []
        self._training = (0.0, 0.0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        train, one_round = client.train, server._round

        def trained(*args: Any, **kwargs: Any) -> Any:
            before = _now()
            try:
                return train(*args, **kwargs)
            finally:
                self._training = tuple(map(sum, zip(self._training, _since(before), strict=True)))

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._training, before = (0.0, 0.0), _now()
            try:
                return one_round(*args, **kwargs)
            finally:
                spent = _since(before)
                self.rounds.append((spent[0] - self._training[0], spent[1] - self._training[1]))

        client.train, server._round = trained, counted
        try:
            yield
        finally:
            client.train, server._round = train, one_round


def _now() -> tuple[float, float]:
    return time.process_time(), time.perf_counter()


def _since(before: tuple[float, float]) -> tuple[float, float]:
    core, clock = _now()
    return core - before[0], clock - before[1]


def measure(sites: int, rounds: int, encoder: str, *more: str) -> dict[str, Any]:
    """A run's median round beyond training; its first round, which loads things, is left out."""
    clients = ", ".join(f"s{number:03d}: {{tasks: [sentiment]}}" for number in range(sites))
    with tempfile.TemporaryDirectory() as output:
        config = load_config(
            None,
            [
                "defaults=plain",
                f"model.server_model={encoder}",
                f"tasks={{sentiment: {{train_samples: {8 * sites}, val_samples: 8}}}}",
                f"clients={{{clients}}}",
                "federation.vocabulary_slices=false",
                f"training.num_rounds={rounds + 1}",
                "training.local_steps=1",
                "training.batch_size=2",
                "evaluation.every=1000",
                "compute.device=cpu",
                "compute.workers=0",
                f"output={output}",
                *more,
            ],
        )
        watch = Watch()
        with watch.counting():
            run = start_run(config, "run")
        events = read_events(run)
    (plan,) = [event for event in events if isinstance(event, PlanEvent)]
    last = [event for event in events if isinstance(event, RoundEvent)][-1]
    masked = [event for event in events if isinstance(event, SecureAggregationEvent)]
    return {
        "parameters": plan.total,
        "core": [core for core, _ in watch.rounds[1:]],
        "clock": [clock for _, clock in watch.rounds[1:]],
        "bytes_up": last.bytes_up,
        "bytes_down": last.bytes_down,
        "exchanged": masked[-1].bytes_up + masked[-1].bytes_down if masked else 0,
        "error": masked[-1].error if masked else None,
        "step": masked[-1].step if masked else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sites", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--encoder", default="random-10x192")
    parser.add_argument("--set", action="append", default=[], help="a setting of all runs")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"plain": [], "masked": []}
    for _ in range(given.repeats):
        for kind, more in (("plain", ()), ("masked", (MASKED,))):
            found[kind].append(measure(given.sites, given.rounds, given.encoder, *given.set, *more))
    rows = {}
    for kind, runs in found.items():
        rows[kind] = {
            **{key: value for key, value in runs[-1].items() if key not in ("core", "clock")},
            "core": statistics.median(seconds for run in runs for seconds in run["core"]),
            "clock": statistics.median(seconds for run in runs for seconds in run["clock"]),
        }
    if given.json:
        print(json.dumps({"sites": given.sites, **rows}))
        return
    plain, masked = rows["plain"], rows["masked"]
    print(f"{given.sites} sites, {plain['parameters']:,} parameters; a round beyond training, medians")
    print("| | seconds of a core | on the clock | bytes up | bytes down |\n|---|---|---|---|---|")
    for kind, row in rows.items():
        up, down = row["bytes_up"], row["bytes_down"]
        print(f"| {kind} | {row['core']:.2f} | {row['clock']:.2f} | {up:,} | {down:,} |")
    ratios = [masked[key] / plain[key] for key in ("core", "clock", "bytes_up", "bytes_down")]
    print("| ratio | " + " | ".join(f"{ratio:.4g}" for ratio in ratios) + " |")
    print(f"a mean is within {masked['error']:.2g} of the plain one; the step is {masked['step']:.2g}")


if __name__ == "__main__":
    main()
