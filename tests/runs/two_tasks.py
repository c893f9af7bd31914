"""Events of runs of a classification and a regression, written by hand."""

from fedmtl.runs.events import Averages, EvaluationEvent, RoundEvent, StartEvent, TaskFacts, UpdateEvent

START = StartEvent(tasks={"sst2": TaskFacts(kind="classification"), "stsb": TaskFacts(kind="regression")})


def round_events(number, accuracy=0.5):
    """One evaluated round of the two tasks; stsb's correlations are undefined."""
    errors = {"mse": 4.0, "rmse": 2.0, "mae": 1.5, "r2": -1.0}
    return [
        UpdateEvent(round=number, client="a"),
        EvaluationEvent(round=number, task="sst2", metrics={"accuracy": accuracy, "f1": 0.25, "matthews": None}),
        EvaluationEvent(round=number, task="stsb", metrics={"pearson": None, "spearman": None, **errors}),
        RoundEvent(
            round=number,
            clients=2,
            failures=1,
            losses={"sst2": 0.7},
            averages=Averages(classification=accuracy),
            seconds=1.5,
            bytes_up=10,
            bytes_down=20,
        ),
    ]
