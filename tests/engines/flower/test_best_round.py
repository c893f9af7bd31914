"""The best round and early stopping of a run over sites."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from engines.flower.deployment import Server, Site
from fedmtl import api
from fedmtl.errors import FedmtlError
from fedmtl.experiment import run as run_module
from fedmtl.experiment.run import start_run
from fedmtl.federation.checkpoint import load_checkpoint
from fedmtl.predict.rounds import load_round
from fedmtl.predict.run import load_run
from fedmtl.runs.log import read_events
from fedmtl.runs.summary import best_overall, task_rounds
from fedmtl.sharing.plan import weights_sha256

CLIENTS = "clients={a: {tasks: [sentiment]}, b: {tasks: [paraphrase, similarity]}}"
LAYERS = 'sharing.rules=[{"heads.*": task}, {"encoder.layer.0.output.*": task}, {"*": all}]'
UNSTEADY = ("training.num_rounds=5", "training.learning_rate=3e-2", "evaluation.batch_size=7")


def over_sites(config, folder):
    server = Server(config)
    sites = [
        Site(server, folder / "a", "a", ("sentiment",)),
        Site(server, folder / "b", "b", ("paraphrase", "similarity")),
    ]
    run = server.finish()
    for site in sites:
        site.finish()
    assert server.failures() == {}
    return run


@pytest.mark.slow
def test_the_best_round_over_sites_scores_what_results_csv_has_for_it(make_config, tmp_path):
    config = make_config(CLIENTS, *UNSTEADY)
    run = over_sites(config, tmp_path)
    best = best_overall(read_events(run)).round
    assert best < 5
    with run.results.open() as file:
        row = next(row for row in csv.DictReader(file) if int(row["round"]) == best)
    scores = api.Run(run.path).evaluate(round="best")
    for task, found in scores.items():
        assert {name: "" if value is None else str(value) for name, value in found.metrics.items()} == {
            name: row[f"{task}.{name}"] for name in found.metrics
        }
    alone = start_run(config, "alone")
    assert weights_sha256(load_round(run, "best").weights) == weights_sha256(load_round(alone, "best").weights)


def test_a_task_that_stopped_stays_at_sites_as_on_one_machine(make_config, tmp_path, monkeypatch):
    real = run_module.evaluate_at_server

    def falling(state, *rest):
        found = real(state, *rest)
        value = replace(found.scores["sentiment"], metrics={"accuracy": 0.9 - 0.1 * abs(state.round - 1)})
        return replace(found, scores={**found.scores, "sentiment": value})

    monkeypatch.setattr(run_module, "evaluate_at_server", falling)
    config = make_config(
        CLIENTS, LAYERS, "tasks.sentiment.patience=1", "training.num_rounds=4", "checkpoint.every=1", "wire.up=int8"
    )
    run = over_sites(config, tmp_path)
    assert task_rounds(read_events(run), "best")["sentiment"] == 1
    states = [load_checkpoint(run.checkpoints, number) for number in (2, 3, 4)]
    own = [{key: value for key, value in state.weights.items() if key.scope == "task:sentiment"} for state in states]
    assert len({weights_sha256(values) for values in own}) == 1
    alone = start_run(config, "alone")
    assert weights_sha256(states[-1].weights) == weights_sha256(load_checkpoint(alone.checkpoints, 4).weights)


def test_what_is_at_a_site_is_said_to_be_there(make_config, tmp_path):
    personal = 'sharing.rules=[{"heads.*": client}, {"*": all}]'
    run = over_sites(make_config(CLIENTS, personal, "evaluation.where=clients"), tmp_path)
    with pytest.raises(
        FedmtlError, match="stays at the clients; name one with --client: none is here, they are at the"
    ):
        load_run(run, round="best")
    with pytest.raises(FedmtlError, match="--client a: has no values of this run; they are at its site, which stores"):
        load_run(run, "a", round="best")
    stored = sorted(path.name for path in (tmp_path / "a").rglob("*.safetensors") if "round" in path.name)
    assert stored == ["round-0001.safetensors", "round-0002.safetensors"]
    assert not list((tmp_path / "a").rglob("best-*"))
