"""Measured variants with numbers of our choice."""

from pathlib import Path

from fedmtl.compress.measure.measured import Measured, Timing, Variant
from fedmtl.tasks.metrics import Scores


def make_measured(name, scores, *, floors=None, milliseconds=(10.0,), size=1_000_000, examples=100, waiting=None):
    """`scores`: task -> accuracy, or None for --no-scores."""
    known = {
        task: Scores(
            {"accuracy": value, "f1": 0.25}, {} if value is not None else {"accuracy": "why"}, None, 0.5, examples
        )
        for task, value in (scores or {}).items()
    }
    timings = tuple(Timing(n + 1, ms / 1e3, ms / 500, 1e3 / ms, waiting) for n, ms in enumerate(milliseconds))
    return Measured(
        Variant(name, Path(name), "onnx" if "/" in name else "fedmtl"),
        size,
        size // 2,
        1000,
        2000,
        3_000_000,
        timings,
        None if scores is None else known,
        dict.fromkeys(known, "accuracy"),
        {**dict.fromkeys(known, 0.5), **(floors or {})},
    )
