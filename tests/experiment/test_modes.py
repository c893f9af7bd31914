"""The baselines are the same loop with other clients or another plan."""

import pytest

from fedmtl.errors import ConfigError
from fedmtl.experiment.prepare import prepare
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import append_results, read_events
from fedmtl.runs.summary import summarize
from raw_events import raw_events


def run(config, name):
    started = start_run(config, name)
    return started, raw_events(started)


def parameters(events):
    return next(event["total"] for event in events if event["event"] == "plan")


@pytest.mark.parametrize(
    ("mode", "clients", "encoders"),
    [
        ("federated", 6, 1),
        ("federated_single_task", 6, 3),
        ("centralized", 1, 1),
        ("centralized_single_task", 3, 3),
    ],
)
def test_a_mode_has_its_clients_and_its_number_of_encoders(make_config, mode, clients, encoders):
    prepared = prepare(make_config(f"mode={mode}"))
    assert len(prepared.clients) == clients
    names = [key.name for key in prepared.state.weights]
    assert names.count("embeddings.word_embeddings.weight") == encoders
    # every mode trains on the same examples
    assert sum(sum(info.num_examples.values()) for info in prepared.clients.values()) == 120


def test_local_shares_nothing_and_is_scored_at_each_client(make_config):
    _, events = run(make_config("mode=local"), "local")
    assert parameters(events) == 0
    rounds = [event for event in events if event["event"] == "round" and event["round"] == 2]
    evaluation = next(e for e in events if e["event"] == "evaluation" and e["round"] == 2 and e["task"] == "sentiment")
    assert set(evaluation["clients"]) == {"sentiment_client_1", "sentiment_client_2"}
    # two clients, each scored on all 24 validation examples: the task's score is the mean of theirs
    assert evaluation["examples"] == 48
    assert evaluation["metrics"]["accuracy"] == pytest.approx(sum(evaluation["clients"].values()) / 2)
    assert rounds[0]["aggregated"] == []


def test_centralized_is_plain_training_that_keeps_its_optimizer(make_config):
    prepared = prepare(make_config("mode=centralized"))
    assert prepared.server.settings.keep_optimizer
    assert not prepare(make_config()).server.settings.keep_optimizer
    assert prepare(make_config("training.keep_optimizer=true")).server.settings.keep_optimizer


def test_a_client_alone_is_told_nothing_of_the_labels_of_others(make_config):
    def adjustment(*overrides):
        server = prepare(make_config("training.logit_adjustment=1", *overrides)).server
        is_counted = any(method.name == "logit_adjustment" for method in server.methods)
        return server.settings.methods.get("logit_adjustment"), is_counted

    assert adjustment() == adjustment("mode=federated_single_task") == ({"strength": 1.0}, True)
    assert adjustment("mode=local") == (None, False)


def test_compare_shows_the_guides_standard_against_multi_task(make_config):
    shared = summarize(read_events(start_run(make_config(), "shared")))
    apart = summarize(read_events(start_run(make_config("mode=federated_single_task"), "apart")))
    assert shared.parameters is not None
    assert apart.parameters is not None
    heads = 2 * 33 + 2 * (4 * 32 + 1 + 1) + (4 * 32 + 1 + 1)
    # standard: three encoders and three heads; multi-task: one encoder and three heads
    assert apart.parameters - heads == 3 * (shared.parameters - heads)
    # each client sends one encoder and one head in either case
    assert shared.bytes_up == pytest.approx(apart.bytes_up, rel=0.01)


def test_clients_join_leave_and_move_between_tasks(make_config):
    _, events = run(
        make_config(
            "training.num_rounds=4",
            "clients={early: {tasks: [sentiment], until_round: 2},"
            " late: {tasks: [sentiment, paraphrase], from_round: 3},"
            " mover: {tasks: [paraphrase], tasks_from_round: {3: [similarity]}}}",
        ),
        "moving",
    )
    who = {
        number: {
            event["client"]: sorted(event["tasks"])
            for event in events
            if event["event"] == "update" and event["round"] == number
        }
        for number in (1, 2, 3, 4)
    }
    before = {"early": ["sentiment"], "mover": ["paraphrase"]}
    after = {"late": ["paraphrase", "sentiment"], "mover": ["similarity"]}
    assert who == {1: before, 2: before, 3: after, 4: after}


def test_a_task_may_join_at_a_round(make_config):
    _, events = run(make_config("tasks.similarity={train_samples: 40, val_samples: 24, from_round: 2}"), "joining")
    tasks = {event["round"]: set(event["tasks"]) for event in events if event["event"] == "round"}
    assert tasks == {0: set(), 1: {"sentiment", "paraphrase"}, 2: {"sentiment", "paraphrase", "similarity"}}


def test_an_auxiliary_task_trains_but_does_not_count(make_config):
    _, events = run(make_config("tasks.similarity={train_samples: 40, val_samples: 24, auxiliary: true}"), "auxiliary")
    last = [event for event in events if event["event"] == "round"][-1]
    scores = {
        e["task"]: e["metrics"]["accuracy"]
        for e in events
        if e["event"] == "evaluation" and e["round"] == 2 and "accuracy" in e["metrics"]
    }
    assert last["overall"] == pytest.approx((scores["sentiment"] + scores["paraphrase"]) / 2)
    assert "similarity" in last["tasks"]


def test_personal_heads_stay_at_their_clients(make_config):
    rules = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
    started, events = run(make_config(rules), "personal")
    aggregated = [entry["head"] for event in events if event["event"] == "round" for entry in event["aggregated"]]
    assert set(aggregated) == {None}
    assert (started.clients / "similarity_client_1" / "round-0002.safetensors").exists()
    with pytest.raises(ConfigError, match=r"evaluation\.where"):
        prepare(make_config(rules, "evaluation.where=server"))


def test_evaluation_at_clients_agrees_with_the_servers(make_config):
    _, server = run(make_config(), "server")
    _, clients = run(make_config("evaluation.where=clients", "evaluation.share_pairs=true"), "clients")

    def scores(events):
        return {(e["round"], e["task"]): e["metrics"] for e in events if e["event"] == "evaluation"}

    # every client of a task is scored on all of its validation examples, so two equal parts are merged
    for key, metrics in scores(server).items():
        for name, value in metrics.items():
            assert scores(clients)[key][name] == pytest.approx(value, abs=1e-5), (key, name)
    sent = {e["round"]: e["bytes_down"] for e in clients if e["event"] == "round"}
    assert sent[0] > 0


def test_a_fixed_encoder_that_sites_start_with_is_never_sent(make_config):
    rules = 'sharing.rules=[{"heads.*": task}, {"*": fixed}]'
    for where in ("server", "clients"):
        _, events = run(make_config(rules, f"evaluation.where={where}"), where)
        sent = [event for event in events if event["event"] == "round"]
        # six clients, a head of at most 2 * 129 parameters and a header of a kilobyte each, twice where they evaluate
        assert all(event["bytes_down"] < 2 * 6 * (2 * 129 * 4 + 1500) for event in sent)
        [plan] = [event for event in events if event["event"] == "plan"]
        assert plan["trainable"] == sum(plan["heads"].values()) < plan["total"] / 10


def test_clients_with_files_of_their_own(make_config, tmp_path):
    for name in ("a", "b"):
        rows = "\n".join(
            f"{name} film number {i} is {word}\t{label}"
            for i in range(15)
            for word, label in (("good", "positive"), ("bad", "negative"))
        )
        (tmp_path / f"{name}.tsv").write_text(f"sentence\tlabel\n{rows}\n")
    config = make_config(
        f"clients={{a: {{tasks: [sentiment], source: {{sentiment: {tmp_path / 'a.tsv'}}}}},"
        f" b: {{tasks: [sentiment], source: {{sentiment: {tmp_path / 'b.tsv'}}}}},"
        " c: {tasks: [paraphrase, similarity]}}"
    )
    prepared = prepare(config)
    # 30 rows each, a tenth of them cut off for validation
    assert [prepared.clients[name].num_examples["sentiment"] for name in ("a", "b")] == [27, 27]
    _, events = run(config, "own")
    assert [e["status"] for e in events if e["event"] == "end"] == ["done"]
    central = prepare(config.model_copy(update={"mode": "centralized"}))
    assert central.clients["central"].num_examples["sentiment"] == 54


def test_a_local_run_that_was_interrupted_resumes_to_the_same_models(make_config, monkeypatch):
    config = make_config("mode=local", "training.num_rounds=3")
    whole = start_run(config, "whole")

    class Killed(BaseException):
        pass

    def die(*args, **kwargs):
        raise Killed

    calls = iter([append_results, append_results, die])
    with monkeypatch.context() as patch:
        patch.setattr("fedmtl.experiment.run.append_results", lambda *args: next(calls)(*args))
        with pytest.raises(Killed):
            start_run(config, "killed")
    resumed = resume_run(RunFolder(whole.path.parent / "killed"))
    name = "similarity_client_1/round-0003.safetensors"
    assert (resumed.clients / name).read_bytes() == (whole.clients / name).read_bytes()


def test_local_counts_a_whole_model_per_client(make_config):
    local = start_run(make_config("mode=local", "training.num_rounds=0"), "local")
    shared = summarize(read_events(start_run(make_config("training.num_rounds=0"), "shared"))).parameters
    heads = {"sentiment": 2 * 33, "paraphrase": 2 * (4 * 32 + 2), "similarity": 4 * 32 + 2}
    assert shared is not None
    encoder = shared - sum(heads.values())
    # six clients, each with an encoder and the head of its own task
    assert summarize(read_events(local)).parameters == 6 * encoder + 2 * sum(heads.values())


def test_a_client_that_trains_alone_is_clipped_to_nobody(make_config):
    given = ("federation.aggregation=clipped_mean", "federation.max_share=0.5")
    for mode, expected in (("federated", "clipped_mean"), ("federated_single_task", "clipped_mean"), ("local", "mean")):
        federation = prepare(make_config(*given, f"mode={mode}")).server.federation
        assert (federation.aggregation.rule, federation.max_share) == (expected, None if expected == "mean" else 0.5)
    assert prepare(make_config(*given, "mode=centralized")).server.federation.aggregation.rule == "mean"
