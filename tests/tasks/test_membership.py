from typing import Any

import pytest

from fedmtl.config import Config
from fedmtl.errors import ConfigError
from fedmtl.tasks.task import active_tasks, client_sources, task_clients


def config(tasks: Any = ("sst2", "qqp"), **keys: Any) -> Config:
    tasks = tasks if isinstance(tasks, dict) else {name: {} for name in tasks}
    return Config.model_validate({"tasks": tasks, **keys})


def test_one_client_per_task_is_made_where_none_is_named():
    assert task_clients(config()) == {"sst2": ["sst2_client"], "qqp": ["qqp_client"]}


def test_made_clients_sort_in_their_order():
    clients = task_clients(config(["sst2"], federation={"clients_per_task": 10}))["sst2"]
    assert clients[0] == "sst2_client_01"
    assert clients[-1] == "sst2_client_10"
    assert clients == sorted(clients)
    assert len(clients) == 10


def test_a_client_holds_what_it_trains_in_any_round():
    clients = {"a": {"tasks": ["sst2"], "tasks_from_round": {5: ["qqp"]}}, "b": {"tasks": ["qqp", "sst2"]}}
    assert task_clients(config(clients=clients)) == {"sst2": ["a", "b"], "qqp": ["a", "b"]}


def test_own_sources_may_be_a_plain_path():
    clients = {
        "a": {"tasks": ["sst2"], "source": {"sst2": "a.tsv"}},
        "b": {"tasks": ["sst2"], "source": {"sst2": {"train": "b.tsv", "validation": "v.tsv"}}},
        "c": {"tasks": ["sst2", "qqp"]},
    }
    sources = client_sources(config(clients=clients), "sst2")
    assert {name: (source.train, source.validation) for name, source in sources.items()} == {
        "a": ("a.tsv", None),
        "b": ("b.tsv", "v.tsv"),
    }


def test_a_task_that_no_client_holds_is_named():
    with pytest.raises(ConfigError, match=r"^tasks\.rte: no client holds it; add `rte` to the tasks of a client"):
        task_clients(config(["sst2", "rte"], clients={"a": {"tasks": ["sst2"]}}))


def test_active_tasks_follow_the_rounds_of_client_and_task():
    clients = {
        "a": {"tasks": ["qqp", "sst2"], "from_round": 2, "until_round": 6, "tasks_from_round": {5: ["qqp"]}},
    }
    settings = config({"sst2": {}, "qqp": {"from_round": 3, "until_round": 5}}, clients=clients)
    assert {number: active_tasks(settings, "a", number) for number in range(1, 8)} == {
        1: (),  # the client starts in round 2
        2: ("sst2",),  # qqp starts in round 3
        3: ("sst2", "qqp"),  # in config order, not the client's
        4: ("sst2", "qqp"),
        5: ("qqp",),  # from round 5 the client trains qqp only
        6: (),  # qqp ended with round 5
        7: (),  # the client left after round 6
    }


def test_a_made_client_trains_its_own_task():
    settings = config({"sst2": {}, "my_client": {"until_round": 1}}, federation={"clients_per_task": 2})
    assert active_tasks(settings, "sst2_client_2", 1) == ("sst2",)
    assert active_tasks(settings, "my_client_client_1", 1) == ("my_client",)
    assert active_tasks(settings, "my_client_client_1", 2) == ()
