"""`federation.aggregation` and the keys that stood beside it once."""

import pytest

from fedmtl.config import FederationConfig
from fedmtl.config.file import config_schema, dump_config, explained_config, load_config
from fedmtl.config.honoured import DISTILL
from fedmtl.config.yaml_text import parse_yaml
from fedmtl.errors import ConfigError

TASKS = {"sst2": {}, "stsb": {}}


def aggregation(section, *overrides):
    return load_config({"tasks": TASKS, "defaults": "plain", "federation": section}, overrides).federation.aggregation


@pytest.mark.parametrize(
    "section",
    [
        {"average": "tasks", "aggregation": "clipped_mean", "max_share": 0.5},
        {"average": "tasks", "aggregation": {"rule": "clipped_mean", "max_share": 0.5}},
        {"aggregation": {"rule": "clipped_mean", "average": "tasks", "max_share": 0.5}},
        {"average": "tasks", "aggregation": {"rule": "clipped_mean", "average": "tasks", "max_share": 0.5}},
    ],
)
def test_old_keys_and_the_new_one_say_the_same(section):
    found = aggregation(section)
    assert (found.rule, found.average, found.max_share) == ("clipped_mean", "tasks", 0.5)
    federation = FederationConfig.model_validate(section)
    assert (federation.average, federation.max_share) == ("tasks", 0.5)


def test_a_scope_has_a_rule_by_name_or_a_section():
    found = aggregation(
        {"aggregation": {"scopes": {"task:*": "multi_krum", "all": {"rule": "trimmed_mean", "hostile": 0.2}}}}
    )
    assert [(key, rule.rule, rule.hostile) for key, rule in found.rules().items()] == [
        ("federation.aggregation", "mean", None),
        ("federation.aggregation.scopes.task:*", "multi_krum", None),
        ("federation.aggregation.scopes.all", "trimmed_mean", 0.2),
    ]
    assert found.looks_at_updates() == {
        "federation.aggregation.scopes.task:*": "multi_krum",
        "federation.aggregation.scopes.all": "trimmed_mean",
    }
    assert [found.rule_of(scope) for scope in ("all", "task:sst2", "group:a")] == ["trimmed_mean", "multi_krum", "mean"]


def test_an_override_of_either_spelling_wins_and_leaves_the_rest():
    written = {"aggregation": {"rule": "clipped_mean", "average": "tasks", "max_share": 0.5}}
    assert aggregation(written, "federation.average=uniform").average == "uniform"
    changed = aggregation(written, "federation.aggregation=multi_krum")
    assert (changed.rule, changed.average, changed.max_share) == ("multi_krum", "tasks", 0.5)
    changed = aggregation({"aggregation": "clipped_mean"}, "federation.max_share=0.4")
    assert (changed.rule, changed.max_share) == ("clipped_mean", 0.4)
    changed = aggregation({}, "federation.aggregation.scopes={all: multi_krum}")
    assert changed.rule_of("all") == "multi_krum"


def test_a_written_config_loads_as_the_same():
    config = load_config(
        {"tasks": TASKS, "federation": {"average": "uniform", "aggregation": {"scopes": {"all": "multi_krum"}}}}
    )
    again = load_config(parse_yaml(dump_config(config), where="config"))
    assert again == config


def test_a_rule_that_is_given_leaves_how_clients_count_to_be_chosen():
    explained = explained_config({"tasks": TASKS, "federation": {"aggregation": "clipped_mean"}})
    assert explained.config.federation.average == "tasks"
    lines = explained.commented().splitlines()
    assert "    rule: clipped_mean  # given" in lines
    assert "    average: tasks  # rule tasks-alike" in lines


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"average": "tasks", "aggregation": {"average": "uniform"}}, "federation.average: found 'tasks', but"),
        ({"aggregation": {"rule": "mean", "hostile": 0.2}}, "federation.aggregation.hostile: found 0.2, but"),
        ({"aggregation": {"rule": "multi_krum", "hostile": 0.5}}, "federation.aggregation.hostile: found 0.5, it must"),
        ({"aggregation": {"trim": 0.2}}, "federation.aggregation.trim: unknown key; it is one of rule, hostile"),
        ({"aggregation": {"scopes": {"all": {"trim": 1}}}}, "federation.aggregation.scopes.all.trim: unknown key"),
        ({"aggregation": 3}, "federation.aggregation: found 3, it must be"),
        ({"average": "all"}, "federation.average: found 'all', it must be"),
        ({"max_shar": 0.5}, "federation.max_shar: unknown key; did you mean `max_share`"),
    ],
)
def test_a_mistake_is_named_where_it_was_written(section, message):
    with pytest.raises(ConfigError) as caught:
        aggregation(section)
    assert str(caught.value).startswith(message)


def test_the_old_spelling_is_refused_where_the_new_one_is():
    for key in (
        "federation.average=uniform",
        "federation.aggregation=multi_krum",
        "federation.aggregation.average=tasks",
    ):
        with pytest.raises(ConfigError, match=r"fedmtl distill` does not honour it"):
            DISTILL.check([key])


def test_the_schema_allows_what_is_read():
    federation = config_schema()["$defs"]["FederationConfig"]["properties"]
    assert {"type": "string"} in federation["aggregation"]["anyOf"]
    assert federation["average"]["deprecated"]
