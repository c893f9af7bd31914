"""Every setting of the training section is honoured by every engine, or clients that have it train one at a time.

The local engine, Flower's simulation and a deployment all run `federation.client.run_job`, which takes its settings
from the job as they are. The stacked engine computes several clients at once. What it cannot compute, it must not
skip in silence: such a client trains alone, by `run_job`. The table says which of both it is for every setting.
"""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest

from fedmtl.capabilities import client_methods
from fedmtl.config import TrainingConfig
from fedmtl.config.file import load_config
from fedmtl.federation.client_stack import stack_label
from fedmtl.federation.messages import Job
from fedmtl.training.local_method import LocalSettings, local_settings
from training.small_client import PLAN, SINGLE, make_task, small_model

TOGETHER, ALONE = "together", "alone"
# A value other than the default, and how clients with it train where a stack is asked for.
SETTINGS = {
    "num_rounds": ("3", TOGETHER),
    "local_epochs": ("2", TOGETHER),
    "local_steps": ("4", TOGETHER),
    "batch_size": ("7", TOGETHER),
    "learning_rate": ("0.5", TOGETHER),
    "head_rate": ("3", TOGETHER),
    "optimizer": ("sgd", TOGETHER),
    "momentum": ("0.5", TOGETHER),
    "betas": ("[0.5, 0.9]", TOGETHER),
    "epsilon": ("0.1", TOGETHER),
    "weight_decay": ("0.5", TOGETHER),
    "max_grad_norm": ("0.5", TOGETHER),
    "schedule": ("cosine", TOGETHER),
    "warmup_rounds": ("1", TOGETHER),
    "keep": ("best", TOGETHER),
    "min_steps": ("4", TOGETHER),
    "step_rounds": ("2", TOGETHER),
    "step_factor": ("0.5", TOGETHER),
    "task_weight_in": ("loss", TOGETHER),
    "proximal": ("0.5", TOGETHER),
    "logit_adjustment": ("1", TOGETHER),
    "keep_optimizer": ("true", TOGETHER),
    # A stack of clients with one task each has the same order under any schedule; of several tasks, see below.
    "task_schedule": ("random", TOGETHER),
    "anneal": ("0.5", TOGETHER),
    "task_temperature": ("3", TOGETHER),
    # Of one task there is nothing to project; of several, a joint step is not known to stacks, see below.
    "gradients": ("pcgrad", TOGETHER),
    "loss_weighting": ("uncertainty", ALONE),
    "smart": ("{}", ALONE),
    "distillation": ("{teacher: somewhere}", ALONE),
    "pruning": ("{rounds: 1}", ALONE),
}
# What a stack reads of a client's settings; a field that is not here would be skipped in silence.
READ_BY_STACKS = {
    "num_rounds", "epochs", "steps", "batch_size", "batch_sizes", "optimizer", "learning_rates", "head_rate",
    "loss_weights", "momentum", "betas", "epsilon", "weight_decay", "max_grad_norm", "schedule", "warmup_rounds",
    "step_rounds", "step_factor", "keep_optimizer", "task_schedule", "anneal", "task_temperature", "methods",
    "min_steps",
}  # fmt: skip


def test_every_setting_has_an_entry():
    assert set(SETTINGS) == set(TrainingConfig.model_fields)


def test_stacks_read_every_field_of_a_clients_settings():
    assert {field.name for field in fields(LocalSettings)} == READ_BY_STACKS


def job_of(tasks: list[str], *overrides: str) -> Job:
    named = ", ".join(f"{task}: {{text: a, label: y, labels: [no, yes], source: {{train: x.tsv}}}}" for task in tasks)
    config = load_config(None, [f"tasks={{{named}}}", *overrides])
    names = list(small_model(*(make_task(task) for task in tasks)).canonical())
    settings = local_settings(
        config.training,
        dict.fromkeys(tasks),
        dict.fromkeys(tasks, 1.0),
        keep_optimizer=False,
        methods=client_methods(config, PLAN, names),
    )
    return Job("train", 1, "c1", tuple(tasks), {}, PLAN, None, 0, 0, settings.to_dict())


@pytest.mark.parametrize("name", SETTINGS)
def test_a_stack_honours_a_setting_or_trains_alone(name):
    value, expected = SETTINGS[name]
    more = ["training.task_schedule=joint"] if value == "pcgrad" else []
    job = job_of(["single"], f"training.{name}={value}", *more)
    label = stack_label(job, SimpleNamespace(model=small_model(SINGLE)))
    assert (label is not None) == (expected == TOGETHER)


@pytest.mark.parametrize(("schedule", "expected"), [("joint", ALONE), ("epoch", ALONE), ("annealed", TOGETHER)])
def test_of_several_tasks_a_stack_knows_orders_of_one_batch_a_step(schedule, expected):
    job = job_of(["one", "two"], f"training.task_schedule={schedule}")
    model = small_model(make_task("one", pool="cls"), make_task("two", pool="cls"))
    assert (stack_label(job, SimpleNamespace(model=model)) is not None) == (expected == TOGETHER)


def test_layers_that_may_move_are_measured_where_a_client_with_several_tasks_trains_alone():
    model = small_model(make_task("one"), make_task("two"))
    several = job_of(["one", "two"], "sharing.adaptive={}")
    assert "adaptive_sharing" in several.settings["methods"]
    assert stack_label(several, SimpleNamespace(model=model)) is None
    single = replace(several, tasks=("one",))
    assert stack_label(single, SimpleNamespace(model=model)) is not None
