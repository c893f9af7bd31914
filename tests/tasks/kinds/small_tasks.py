"""Tasks of both kinds, and sums of predictions that can be worked out by hand."""

import numpy as np
from hypothesis import settings

from fedmtl.tasks.kinds.classification import ClassificationSums
from fedmtl.tasks.metrics import score, sum_predictions
from fedmtl.tasks.task import Task

quick = settings(deadline=None, max_examples=60)


def classes(*labels, **fields):
    return Task("own", "classification", ("text",), "label", "accuracy", labels=labels, **fields)


TWO = classes("no", "yes")
STSB = Task("stsb", "regression", ("a", "b"), "score", "pearson", score_range=(0.0, 5.0), outputs=1)


def confusion(task, table, loss=0.0):
    return score(task, ClassificationSums(np.array(table, dtype=np.int64), loss))


def predict(task, predicted, true):
    """Sums of a classifier that was sure of every prediction."""
    logits = np.eye(len(task.labels))[np.array(predicted, dtype=int)]
    return sum_predictions(task, logits, np.array(true, dtype=int), loss=float(len(true)))


def regress(predictions, scores, keep_pairs=True, task=STSB):
    """Sums of predictions and scores given in the score's own units."""
    low, high = task.score_range
    scaled = [(np.array(values, dtype=float) - low) / (high - low) for values in (predictions, scores)]
    return sum_predictions(task, scaled[0][:, None], scaled[1], loss=0.0, keep_pairs=keep_pairs)
