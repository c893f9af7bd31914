"""A run's model after its best round, its last one, or one by its number."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedmtl import api
from fedmtl.errors import FedmtlError
from fedmtl.experiment import run as run_module
from fedmtl.experiment.run import resume_run, start_run
from fedmtl.federation.checkpoint import load_checkpoint, saved_checkpoints
from fedmtl.model.saved import load_model
from fedmtl.predict import rounds as rounds_module
from fedmtl.predict.rounds import Part, combine_rounds, load_round, run_at
from fedmtl.predict.run import load_run
from fedmtl.runs.event_lines import events_of
from fedmtl.runs.events import EvaluationEvent
from fedmtl.runs.folder import RunFolder
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import best_overall, summarize, task_rounds
from fedmtl.sharing.plan import Key, SharingPlan, weights_sha256

# So high a rate that scores go up and down: the best of five rounds is neither the first nor the last.
UNSTEADY = ("training.num_rounds=5", "training.learning_rate=3e-2", "evaluation.batch_size=7")
TASKS = ("sentiment", "paraphrase", "similarity")
PERSONAL = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
LAYERS = 'sharing.rules=[{"heads.*": task}, {"encoder.layer.0.output.*": task}, {"*": all}]'


def table(run):
    with run.results.open() as file:
        return {int(row["round"]): row for row in csv.DictReader(file)}


def assert_scores(run, rounds, scores):
    """Every metric is, to the last digit, that of results.csv for the task's round."""
    rows = table(run)
    for task, found in scores.items():
        shown = {name: "" if value is None else str(value) for name, value in found.metrics.items()}
        assert shown == {name: rows[rounds[task]][f"{task}.{name}"] for name in shown}, task


def made_up(monkeypatch, scores):
    """The main scores of a run, by task and round, in place of those that it has; `scores` is a function of both."""
    real = run_module.evaluate_at_server

    def evaluate(state, server, *rest):
        found = real(state, server, *rest)
        by_task = {
            name: replace(one, metrics={**one.metrics, server.tasks[name].metric: scores(name, state.round)})
            for name, one in found.scores.items()
        }
        values = [one.metrics[server.tasks[name].metric] for name, one in by_task.items()]
        return replace(found, scores=by_task, overall=sum(values) / len(values))

    monkeypatch.setattr(run_module, "evaluate_at_server", evaluate)


@pytest.fixture(scope="module")
def unsteady(run_once):
    """A run whose best round is not its last."""
    run = run_once(*UNSTEADY)
    best = best_overall(read_events(run))
    assert best is not None
    assert 0 < best.round < 5
    return run, best.round


def test_the_best_round_scores_what_results_csv_has_for_it(unsteady):
    run, best = unsteady
    scores = api.Run(run.path).evaluate(round="best")
    assert_scores(run, dict.fromkeys(scores, best), scores)
    last = api.Run(run.path).evaluate(round="last")
    assert_scores(run, dict.fromkeys(last, 5), last)
    assert api.Run(run.path).evaluate() == last != scores


def test_predictions_are_those_of_the_round(unsteady):
    run, best = unsteady
    found = api.Run(run.path)
    given, last = (found.predict("a fine day", "sentiment", round=at) for at in ("best", "last"))
    assert given == found.predict("a fine day", "sentiment", round=best) != last
    assert last == found.predict("a fine day", "sentiment")


def test_a_round_without_a_checkpoint_is_an_error_that_names_those_there_are(unsteady):
    run, best = unsteady
    there = sorted({best, 4, 5})
    assert saved_checkpoints(run.checkpoints) == there
    gone = next(number for number in range(5) if number not in there)
    with pytest.raises(FedmtlError, match=rf"--round {gone}: once has no checkpoint of round {gone}; it has .*4, 5;"):
        load_run(run, round=gone)
    with pytest.raises(FedmtlError, match=r"--round 99: .* no checkpoint of round 99"):
        load_run(run, round="99")


@pytest.mark.parametrize("given", ["worst", "-1", "1.5", "", True, -1, "٣"])
def test_what_is_no_round_is_an_error(unsteady, given):
    with pytest.raises(FedmtlError, match="is no round; write best, last, or a round's number"):
        load_run(unsteady[0], round=given)


def test_a_run_that_was_killed_and_resumed_has_the_same_best_round(unsteady, make_config, monkeypatch):
    whole, best = unsteady
    run = _interrupted(make_config(*UNSTEADY), monkeypatch, after=best)
    resume_run(run)
    assert weights_sha256(load_round(run, "best").weights) == weights_sha256(load_round(whole, "best").weights)
    scores = api.Run(run.path).evaluate(round="best")
    assert_scores(run, dict.fromkeys(scores, best), scores)


def _interrupted(config, monkeypatch, after):
    """A run that breaks down just before the checkpoint of the round after this one is written."""
    real = run_module.save_checkpoint

    def save(folder, state, **rest):
        if state.round > after:
            raise FedmtlError("broken down")
        real(folder, state, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "save_checkpoint", save)
        with pytest.raises(FedmtlError, match="broken down"):
            start_run(config, "broken")
    return RunFolder(Path(config.output) / "broken")


def test_a_run_that_keeps_its_best_round_ends_with_it_and_has_the_last_too(unsteady, make_config):
    whole, best = unsteady
    run = start_run(make_config(*UNSTEADY, "training.keep=best"), "keep")
    assert table(run)[5]["overall"] == table(whole)[5]["overall"]
    ended, found = load_model(run.model), api.Run(run.path)
    assert weights_sha256(ended.weights) == weights_sha256(load_checkpoint(whole.checkpoints, best).weights)
    assert summarize(read_events(run)).weights_sha256 == weights_sha256(ended.weights)
    assert found.evaluate() == found.evaluate(round="best")
    assert weights_sha256(load_round(run, "last").weights) == summarize(read_events(whole)).weights_sha256


def test_a_stopped_task_has_its_own_best_round(make_config, monkeypatch):
    """sentiment is best after round 1 and stops after round 2; the others rise to round 3 and fall."""
    peaks = {"sentiment": 1, "paraphrase": 3, "similarity": 3}
    made_up(monkeypatch, lambda task, number: 0.9 - 0.1 * abs(number - peaks[task]))
    run = start_run(make_config(LAYERS, "tasks.sentiment.patience=1", "training.num_rounds=5"), "stopped")
    rounds = task_rounds(read_events(run), "best")
    assert rounds == {"sentiment": 1, "paraphrase": 3, "similarity": 3}
    assert saved_checkpoints(run.checkpoints) == [1, 3, 4, 5]
    loaded, parts = load_run(run, round="best"), {n: load_checkpoint(run.checkpoints, n) for n in (1, 3)}
    for task, number in rounds.items():
        view = parts[number].plan.keys(loaded.saved.model.canonical(), [task], "")[task]
        for name, key in view.items():
            found = loaded.saved.weights[loaded.saved.plan.key(name, task, "")]
            assert torch.equal(found, parts[number].weights[key]), (task, name)
    monkeypatch.undo()
    # What the model of round 1 really scores in sentiment, and that of round 3 in the others.
    scores = api.Run(run.path).evaluate(round="best")
    assert scores["sentiment"] == api.Run(run.path).evaluate("sentiment", round=1)["sentiment"]
    assert scores["similarity"] == api.Run(run.path).evaluate("similarity", round=3)["similarity"]
    # The two that are of one round still share an encoder, and a pass through it.
    keys = [loaded.saved.plan.key("embeddings.word_embeddings.weight", task, "") for task in rounds]
    assert len(set(keys)) == 2
    again = load_model(run_at(run, "best").model)
    assert weights_sha256(again.weights) == weights_sha256(loaded.saved.weights)


def test_the_sums_of_a_stop_are_in_the_closing_lines_and_in_the_report(make_config, monkeypatch):
    from fedmtl.cli.tables import round_notes

    made_up(monkeypatch, lambda task, number: 0.9 - 0.1 * abs(number - 1) if task == "sentiment" else 0.5)
    run = start_run(make_config("tasks.sentiment.patience=1", "training.num_rounds=3"), "said")
    events = read_events(run)
    last = events_of(events, EvaluationEvent)[-3].metrics["accuracy"]
    stop, best = round_notes(summarize(events, run.name))
    assert stop.startswith(
        "sentiment stopped after round 2, at 0.800; what the server has of it alone is that of round 1, which"
    )
    assert stop.endswith(f"scored 0.900; its last score is {last:.3f}")
    assert "after round 1; `fedmtl evaluate said --round best`" in best
    page = run.report.read_text()
    assert "sentiment stopped early after round 2 (score .800)" in page
    assert "--round best" in page


def test_what_stays_at_a_client_is_stored_with_the_best_round(make_config):
    run = start_run(make_config(PERSONAL, *UNSTEADY, "training.learning_rate=1e-2"), "personal")
    events = read_events(run)
    best = best_overall(events).round
    scored = [event for event in events_of(events, EvaluationEvent) if event.round == best and event.clients]
    assert best < 4, "else the clients' last two rounds have it"
    for event in scored:
        for client, score in event.clients.items():
            found = api.Run(run.path).evaluate(event.task, client=client, round="best")
            metric = next(name for name in ("accuracy", "pearson") if name in found[event.task].metrics)
            assert found[event.task].metrics[metric] == score
    for folder in run.clients.iterdir():
        files = [path.name for path in sorted(folder.glob("best-*"))]
        assert files == ([f"best-{best:04d}.safetensors"] if folder.name != "fixed" else [])
    client = next(iter(scored[0].clients))
    with pytest.raises(FedmtlError, match="stays at the clients; name one with --client"):
        load_run(run, round="best")
    with pytest.raises(FedmtlError, match="has no checkpoint of round"):
        load_run(run, client, round=next(n for n in range(5) if n not in (best, 4, 5)))


def test_tasks_of_several_rounds_share_what_they_shared_and_no_more():
    plan = SharingPlan((("base", "fixed"), ("heads.*", "task"), ("own", "task"), ("*", "all")))
    names = ["base", "layer", "own", "heads.a.w", "heads.b.w", "heads.c.w"]

    def part(value):
        keys = {key for view in plan.keys(names, ["a", "b", "c"], "").values() for key in view.values()}
        return Part(plan, {key: torch.tensor(0.0 if key.scope == "fixed" else value) for key in keys})

    combined, weights = combine_rounds({1: part(1.0), 2: part(2.0)}, {"a": 1, "b": 2, "c": 2}, names)
    assert {tuple(key): value.item() for key, value in weights.items()} == {
        ("fixed", "base"): 0.0,
        ("group:round-0001", "layer"): 1.0,
        ("group:round-0002", "layer"): 2.0,
        ("task:a", "own"): 1.0,
        ("task:b", "own"): 2.0,
        ("task:c", "own"): 2.0,
        ("task:a", "heads.a.w"): 1.0,
        ("task:b", "heads.b.w"): 2.0,
        ("task:c", "heads.c.w"): 2.0,
    }
    assert combined.key("layer", "b", "") == Key("group:round-0002", "layer")
    same, given = combine_rounds({1: part(1.0)}, {"a": 1, "b": 1}, names)
    assert (same, given) == (plan, part(1.0).weights)


def test_no_link_of_a_run_folder_leads_what_is_written_out_of_it(make_config, tmp_path):
    run = start_run(make_config("training.num_rounds=1"), "linked")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "config.json").write_text("precious")
    (run.path / "models").mkdir()
    (run.path / "models" / "best").symlink_to(outside)
    with pytest.raises(FedmtlError, match="leads out of"):
        run_at(run, "best")
    assert [path.name for path in outside.iterdir()] == ["config.json"]
    assert (outside / "config.json").read_text() == "precious"


def test_round_0_of_what_stays_at_clients_is_refused_and_the_run_ends_with_its_last(make_config, monkeypatch):
    # As if the scores of round 0 had been the best.
    monkeypatch.setattr(rounds_module, "task_rounds", lambda events, given, name: dict.fromkeys(TASKS, 0))
    run = start_run(make_config("training.num_rounds=1", "training.keep=best", PERSONAL), "personal_start")
    with pytest.raises(FedmtlError, match="that is round 0, in which no client had values of its own yet"):
        load_run(run, "sentiment_client_1", "best")
    # Not the last round's model under the name of the best.
    with pytest.raises(FedmtlError, match="that is round 0, in which no client had values of its own yet"):
        load_round(run, "best")
    assert weights_sha256(load_round(run, "last").weights) == weights_sha256(load_model(run.model).weights)
    assert weights_sha256(load_model(run.model).weights) == weights_sha256(load_checkpoint(run.checkpoints, 1).weights)
    assert load_run(run, "sentiment_client_1").tasks == ("sentiment",)
