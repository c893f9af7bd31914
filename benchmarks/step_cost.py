"""What a training step costs with SMART, as a multiple of a plain one.

    python benchmarks/step_cost.py

The shipped encoder on the embedded sentiment task, batches of 32, one thread, processor seconds, the best of five.
"""

from __future__ import annotations

import time

import torch

from fedmtl.config import Config
from fedmtl.config.file import load_config
from fedmtl.experiment.prepare import prepare
from fedmtl.methods.smart import step_passes
from fedmtl.model.multitask import BoundModel
from fedmtl.training.local import train

STEPS = 20
CASES = ("null", "{weight: 0}", "{steps: 0}", "{}", "{steps: 2}", "{bregman: 1}")


def main() -> None:
    torch.set_num_threads(1)
    plain = 0.0
    for case in CASES:
        seconds = min(seconds_per_step(case) for _ in range(5))
        plain = plain or seconds
        passes = step_passes(config_of(case).training.smart)
        counts = f"{passes['forward']} forward, {passes['backward']} back"
        print(f"smart: {case:14} {counts:20} {1000 * seconds:7.1f} ms  {seconds / plain:4.1f} x")


def config_of(case: str) -> Config:
    tasks = "tasks={sentiment: {train_samples: 640}}"
    settings = [tasks, f"training.smart={case}", f"training.local_steps={STEPS}", "compute.device=cpu"]
    return load_config(None, ["defaults=plain", *settings])


def seconds_per_step(case: str) -> float:
    prepared = prepare(config_of(case))
    shards = {"sentiment": prepared.population.train["sentiment_client"]["sentiment"]}
    bound = BoundModel(prepared.model, prepared.state.plan, ["sentiment"], "c", prepared.state.weights)
    started = time.process_time()
    train(bound, shards, prepared.server.settings, round_number=1, seed=0, device=torch.device("cpu"))
    return (time.process_time() - started) / STEPS


if __name__ == "__main__":
    main()
