"""What looks like a value and is none: each is refused by name, in one line."""

from __future__ import annotations

import pytest

import fedmtl
from fedmtl.config.file import load_config
from fedmtl.errors import ConfigError
from fedmtl.sharing.plan import plan_from_config
from fedmtl.tasks.resolve import resolve_task


@pytest.mark.parametrize("key", ["metric", "kind", "label"])
@pytest.mark.parametrize("word", ["", "  "])
def test_an_empty_word_is_not_the_default(key, word):
    with pytest.raises(ConfigError, match=rf"tasks.sst2.{key}: found '{word}'; write a name, or remove the key"):
        load_config({"tasks": {"sst2": {key: word}}})


@pytest.mark.parametrize("outputs", [1, 2])
def test_outputs_are_for_two_classes(outputs):
    config = load_config({"tasks": {"stsb": {"outputs": outputs}}})
    with pytest.raises(ConfigError, match=rf"tasks.stsb.outputs: found {outputs} on a regression, write it for two"):
        resolve_task(config, "stsb")


@pytest.mark.parametrize("load", [lambda given: load_config(None, given), lambda given: fedmtl.run(overrides=given)])
def test_overrides_are_a_list_and_no_text(load):
    with pytest.raises(ConfigError) as error:
        load("seed=1")
    assert str(error.value) == "overrides: found the text 'seed=1'; give a list of them, such as ['seed=1']"


def sharing(groups):
    rules = [{"heads.*": "task"}, {"encoder.*": "group.2"}, {"*": "all"}]
    return load_config(
        {"tasks": {"1": {}, "sst2": {}, "qqp": {}}, "sharing": {"groups": groups, "rules": rules}}
    ).sharing


def test_groups_and_tasks_may_be_numbers():
    plan = plan_from_config(sharing({1: {2: [1, "sst2"], "x": ["qqp"]}}))
    assert plan.groups == ({"1": "1", "sst2": "1", "qqp": "1"}, {"1": "1/2", "sst2": "1/2", "qqp": "1/x"})


@pytest.mark.parametrize("member", [True, 1.5, None, {"a": ["sst2"]}, ["sst2"]])
def test_what_is_no_name_of_a_task_is_refused(member):
    with pytest.raises(ConfigError, match=r"sharing.groups.a.b: found .* among its tasks; write names of tasks"):
        sharing({"a": {"b": ["qqp", member]}})
