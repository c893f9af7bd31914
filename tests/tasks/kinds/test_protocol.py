"""Kinds of tasks are found by name, and what a kind does not write has a default or is refused."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fedmtl.capabilities import (
    _KINDS,
    _REGISTERED,
    TASK_KINDS,
    Capability,
    is_task_kind,
    plugin_modules,
    register,
    task_kind,
    task_kinds,
)
from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.tasks.builtin import BUILTIN
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.resolve import resolve_task
from fedmtl.tasks.task import Task, task_facts


class Bare(TaskKind):
    name = "test_bare"
    metrics = ("hits",)
    main_metrics = ("hits",)


class Odd(Bare):
    """What these tests do not call."""

    name = "test_odd"
    parse = groups = count_names = counts = num_outputs = losses = answer = sum_outputs = read_sums = score = None


ODD = Task("mine", Odd.name, ("text",), "label", "hits")


@pytest.fixture
def odd():
    register(Capability(Odd.name, task_kind=Odd))
    yield task_kind(Odd.name)
    for registry in (_REGISTERED, _KINDS):
        registry.pop(Odd.name)


def resolve(name, **keys):
    return resolve_task(Config.model_validate({"tasks": {name: keys}}), name)


@pytest.mark.parametrize("name", TASK_KINDS)
def test_a_kind_in_the_package_has_its_name_and_is_one_object(name):
    assert task_kind(name).name == name
    assert task_kind(name) is task_kind(name)
    assert task_kind(name).main_metrics == task_kind(name).metrics[: len(task_kind(name).main_metrics)]


def test_builtin_tasks_have_kinds_in_the_package():
    assert {entry.kind for entry in BUILTIN.values()} == set(TASK_KINDS)


def test_a_registered_kind_is_found_and_imported_by_workers(odd):
    assert task_kinds()[: len(TASK_KINDS)] == list(TASK_KINDS)
    assert Odd.name in task_kinds()
    assert ODD.kind_of is odd
    assert Odd.__module__ in plugin_modules()
    assert task_facts(ODD, "mean").metrics == ["hits"]


def test_a_kind_that_leaves_something_out_is_named_with_it():
    register(Capability(Bare.name, task_kind=Bare))
    try:
        with pytest.raises(ConfigError, match=r"the kind of task test_bare does not say answer, count_names, .*losses"):
            task_kind(Bare.name)
    finally:
        _REGISTERED.pop(Bare.name)


def test_what_is_registered_without_a_kind_is_none():
    register(Capability("test_other"))
    try:
        assert not is_task_kind("test_other")
        assert "test_other" not in task_kinds()
    finally:
        _REGISTERED.pop("test_other")


@pytest.mark.parametrize("name", ["classification", "regression", "mean"])
def test_a_name_in_the_package_is_taken(name):
    with pytest.raises(ConfigError, match=f"the capability {name} is there already"):
        register(Capability(name, task_kind=Odd))


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("clasification", "did you mean `classification`"),
        ("x", "it is one of classification, regression"),
        ("pruning", "it"),
    ],
)
def test_an_unknown_kind_is_one_line_with_the_known_ones(kind, remedy):
    with pytest.raises(ConfigError) as caught:
        resolve("sst2", kind=kind)
    assert str(caught.value).startswith(f"tasks.sst2.kind: found {kind!r}, no kind of task is called so; {remedy}")
    assert "\n" not in str(caught.value)


def test_keys_that_a_kind_does_not_know_are_refused(odd):
    own = {"kind": Odd.name, "source": {"train": "a.tsv"}, "text": ["message"], "label": "topic"}
    assert resolve("mine", **own).metric == "hits"
    for keys, words in (
        ({"labels": ["a", "b"]}, "tasks.mine.labels: found on a test_odd, which has none"),
        ({"score_range": [0, 5]}, "tasks.mine.score_range: found on a test_odd"),
        ({"outputs": 2}, "tasks.mine.outputs: found 2 on a test_odd"),
        ({"class_weights": "balanced"}, "tasks.mine.class_weights: found on a test_odd"),
        ({"metric": "accuracy"}, "tasks.mine.metric: found accuracy on a test_odd, write one of hits"),
    ):
        with pytest.raises(ConfigError) as caught:
            resolve("mine", **own, **keys)
        assert str(caught.value).startswith(words)


def test_outputs_are_apart_by_their_squared_difference_where_a_kind_says_nothing_else(odd):
    first, second = torch.tensor([[1.0, 2.0], [3.0, 3.0]]), torch.tensor([[0.0, 4.0], [3.0, 3.0]])
    assert odd.divergences(ODD, first, second).tolist() == [5.0, 0.0]
    assert odd.distillation_loss(ODD, first, second, 2.0).item() == 1.25


def test_losses_without_torch_are_those_with_it_where_a_kind_says_nothing_else(odd, monkeypatch):
    monkeypatch.setattr(Odd, "losses", lambda self, task, outputs, labels: outputs[:, 0] * labels)
    assert odd.plain_losses(ODD, np.array([[2.0], [3.0]]), np.array([1.0, 5.0])).tolist() == [2.0, 15.0]


def test_kinds_are_imported_when_needed_and_without_torch():
    lines = (
        "import sys",
        "from fedmtl.tasks.task import Task",
        "print([name for name in sys.modules if name == 'numpy' or name.startswith('fedmtl.tasks.kinds')])",
        "kinds = [Task('t', kind, ('a',), 'y', 'm', ('a', 'b')).kind_of for kind in ('classification', 'regression')]",
        "print([kind.name for kind in kinds], 'torch' in sys.modules)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "['classification', 'regression'] False"]
