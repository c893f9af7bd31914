"""Events of runs of a classification and a regression, written by hand."""

START = {
    "event": "start",
    "tasks": {"sst2": {"kind": "classification"}, "stsb": {"kind": "regression"}},
}


def round_events(number, accuracy=0.5):
    """One evaluated round of the two tasks; stsb's correlations are undefined."""
    errors = {"mse": 4.0, "rmse": 2.0, "mae": 1.5, "r2": -1.0}
    return [
        {"event": "update", "round": number, "client": "a"},
        {
            "event": "evaluation",
            "round": number,
            "task": "sst2",
            "metrics": {"accuracy": accuracy, "f1": 0.25, "matthews": None},
        },
        {
            "event": "evaluation",
            "round": number,
            "task": "stsb",
            "metrics": {"pearson": None, "spearman": None, **errors},
        },
        {
            "event": "round",
            "round": number,
            "clients": 2,
            "failures": 1,
            "losses": {"sst2": 0.7},
            "overall": None,
            "classification": accuracy,
            "seconds": 1.5,
            "bytes_up": 10,
            "bytes_down": 20,
        },
    ]
