"""Evaluation on the server's own validation examples."""

from __future__ import annotations

from fedmtl.federation.messages import Evaluation, Scorer, State
from fedmtl.federation.strategy import Strategy
from fedmtl.tasks.batches import Shard
from fedmtl.tasks.metrics import averages, score, sum_predictions


def evaluate_at_server(state: State, strategy: Strategy, engine: Scorer, shards: dict[str, Shard]) -> Evaluation:
    """Score every task with one set of weights, spread over the engine's workers."""
    outputs = engine.predict(state, strategy.evaluation.batch_size)
    sums = {
        name: sum_predictions(task, outputs[name][0], shards[name].labels, outputs[name][1], True)
        for name, task in strategy.tasks.items()
    }
    scores = {name: score(strategy.tasks[name], total) for name, total in sums.items()}
    overall, classification = averages(list(strategy.tasks.values()), scores)
    return Evaluation(scores, sums, overall, classification)
