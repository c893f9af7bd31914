"""What is averaged over one or two clients is said in one line, at start, in the report and by status."""

from dataclasses import replace

import pytest

from fedmtl.experiment.run import start_run
from fedmtl.runs.events import (
    Aggregated,
    ClientFacts,
    ClientsEvent,
    ClientShare,
    ConfigEvent,
    LayerFacts,
    PlanEvent,
    RoundEvent,
    ScopeFacts,
    StartEvent,
    TaskFacts,
)
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import exposed, run_status


def events_of(clients, heads=None, scopes=("all",), mode="federated", groups=None):
    """Clients with their tasks; heads are by task unless said otherwise."""
    tasks = sorted({task for owned in clients.values() for task in owned})
    levels = {task: (heads or {}).get(task, "task") for task in tasks}
    return [
        StartEvent(mode=mode, tasks={task: TaskFacts(kind="classification") for task in tasks}),
        ClientsEvent(
            clients={name: ClientFacts(tasks=dict.fromkeys(owned, ClientShare())) for name, owned in clients.items()}
        ),
        PlanEvent(
            layers=[LayerFacts(layer=f"heads.{task}", level=level, parameters=1) for task, level in levels.items()],
            scopes=[
                ScopeFacts(scope=scope, level=scope.partition(":")[0], parameters=1, tensors=1)
                for scope in (*scopes, *(f"task:{task}" for task, level in levels.items() if level == "task"))
            ],
            groups=groups or {},
        ),
    ]


# Four clients in all, of which one has sst2 and two have stsb.
FOUR = {"a": ["sst2"], "b": ["stsb", "qqp"], "c": ["stsb", "qqp"], "d": ["qqp"]}


def test_heads_of_one_or_two_clients_are_named_with_their_number():
    line = exposed(events_of(FOUR))

    assert line.startswith("averaged over one or two clients: the head of sst2 (1), the head of stsb (2); there the")
    assert "that client's update" in line


def test_nothing_is_said_of_three_clients_of_personal_or_fixed_heads_and_of_other_modes():
    assert exposed(events_of({"a": ["qqp"], "b": ["qqp"], "c": ["qqp"]})) is None
    assert exposed(events_of(FOUR, {"sst2": "client", "stsb": "fixed"})) is None
    for mode in ("local", "centralized", "centralized_single_task"):
        assert exposed(events_of(FOUR, mode=mode)) is None
    assert exposed([]) is None


def test_a_head_that_all_may_share_still_comes_from_the_clients_of_its_task():
    assert "the head of sst2 (1)" in exposed(events_of(FOUR, {"sst2": "all"}))


@pytest.mark.parametrize(
    ("clients", "scopes", "groups", "named"),
    [
        ({"a": ["qqp"], "b": ["sst2"]}, ("all",), {}, "scope all (2)"),
        (FOUR, ("all", "group:single"), {"single": ["sst2"], "pair": ["stsb", "qqp"]}, "scope group:single (1)"),
        (FOUR, ("group:pair/near",), {"pair": {"near": ["stsb"], "same": ["qqp"]}}, "scope group:pair/near (2)"),
    ],
)
def test_other_scopes_of_so_few_clients_are_named_too(clients, scopes, groups, named):
    assert named in exposed(events_of(clients, scopes=scopes, groups=groups))


def test_a_round_with_fewer_clients_than_there_are_counts():
    events = events_of({"a": ["qqp"], "b": ["qqp"], "c": ["qqp"]})
    part = Aggregated(scope="task:qqp", head="qqp", tensors=2, clients=2)

    assert "the head of qqp (2)" in exposed([*events, RoundEvent(round=1, aggregated=[part])])
    assert exposed([*events, RoundEvent(round=1, aggregated=[replace(part, clients=3)])]) is None


def test_noise_on_what_is_averaged_is_said_and_who_was_drawn_does_not_matter():
    noisy = ConfigEvent(config={"privacy": {"client": {"noise_multiplier": 1.0}}})
    part = Aggregated(scope="task:qqp", head="qqp", tensors=2, clients=1)

    assert "update, or that of two together, under the noise of privacy.client" in exposed([*events_of(FOUR), noisy])
    many = events_of({"a": ["qqp"], "b": ["qqp"], "c": ["qqp"]})
    assert exposed([*many, noisy, RoundEvent(round=1, aggregated=[part])]) is None


def test_a_run_says_it_once_at_its_start_and_in_its_report_and_status(make_config):
    seen = []
    run = start_run(make_config("training.num_rounds=1"), "few", seen.append)

    line = exposed(read_events(run))
    assert "the head of sentiment (2), the head of paraphrase (2), the head of similarity (2)" in line
    warned = [event.kind for event in seen if event.kind != "warning" or event.words == line]
    assert warned.count("warning") == 1
    assert warned.index("plan") < warned.index("warning") < warned.index("update")
    assert run.report.read_text().count("averaged over one or two clients") == 1
    assert line in run_status(read_events(run), "few").privacy


def test_a_mode_that_averages_nothing_says_nothing(make_config):
    seen = []
    run = start_run(make_config("training.num_rounds=1", "mode=local"), "alone", seen.append)

    assert not [event for event in seen if event.kind == "warning" and "one or two" in event.words]
    assert "averaged over one or two" not in run.report.read_text()
