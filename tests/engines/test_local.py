"""The engine's answers, whoever keeps them and for how long, and what becomes of a job whose worker dies.

The workers of these tests live at the top of this file, so that they can be imported.
"""

import hashlib
import os
import signal
from collections.abc import Iterator

import pytest

from fedmtl.engines import local
from fedmtl.engines.local import LocalEngine
from fedmtl.engines.processes import WorkerPool
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.experiment.run import start_run
from fedmtl.federation import client as client_side
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import Job, Update
from fedmtl.runs.folder import RunFolder, create_run
from fedmtl.sharing.plan import weights_sha256
from raw_events import raw_events

DEADLY = 2
PLACES = ("state saved", "half written", "trained", "written")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def start_dying_worker(setup):
    """A worker that dies once in each job of one round, at one of four places in turn; markers outlive it."""
    handle = local.start_worker(setup)
    deaths = setup.folder.parent / "deaths"
    deaths.mkdir(exist_ok=True)
    run_job, save_state, write_message = local.run_job, client_side.save_state, local.write_message
    doomed = [""]

    def dying_at(place):
        return doomed[0] == place

    def run(job, site):
        marker = deaths / f"{job.kind}-{job.round}-{job.client}"
        doomed[0] = ""
        if job.round == DEADLY and not marker.exists():
            doomed[0] = PLACES[len(list(deaths.iterdir())) % len(PLACES)]
            marker.write_text(doomed[0])
        return run_job(job, site)

    def save(*state):
        if dying_at("trained"):
            die()
        save_state(*state)
        if dying_at("state saved"):
            die()

    def write(path, message):
        if dying_at("half written"):
            write_message(path, message[: len(message) // 2])
            die()
        write_message(path, message)
        # An evaluation saves no state; it dies at the next place there is.
        if doomed[0]:
            die()

    local.run_job, client_side.save_state, local.write_message = run, save, write
    return handle


def start_worker_that_fails_bad(setup):
    """The client called bad kills every process it gets."""
    handle = local.start_worker(setup)
    run_job = local.run_job

    def run(job, site):
        if job.client == "bad":
            die()
        return run_job(job, site)

    local.run_job = run
    return handle


@pytest.fixture
def prepared(make_config):
    return prepare(make_config())


@pytest.fixture
def engine(prepared, tmp_path) -> Iterator[LocalEngine]:
    opened = open_engine(prepared, create_run(tmp_path, "run"))
    yield opened
    opened.close()


def jobs(prepared) -> Iterator[Job]:
    dispatch, settings = Dispatch(prepared.server), prepared.server.settings.to_dict()
    for client, info in prepared.clients.items():
        tasks = prepared.server.active_tasks(client, 1)
        yield dispatch.job("train", prepared.state, client, tasks, info.rows, 1, settings)


def digest(answer) -> str:
    assert isinstance(answer, Update), answer
    return weights_sha256(dict(answer.delta))


def messages(engine) -> set[str]:
    return {path.name for path in engine._setup.spool.glob("message-*")}


def test_an_update_stays_what_it_was_as_long_as_it_is_kept(prepared, engine):
    at_once = [digest(answer) for answer in engine.run(jobs(prepared), 60)]
    kept = list(engine.run(jobs(prepared), 60))
    assert [digest(answer) for answer in kept] == at_once
    assert len(set(at_once)) == len(at_once) == 6


def test_files_are_written_over_once_their_update_was_let_go(prepared, engine):
    for answer in engine.run(jobs(prepared), 60):
        digest(answer)
    few = messages(engine)
    # A job and its answer, and the answer before it, which the loop holds until the next one comes.
    assert len(few) == 3
    del answer
    held = list(engine.run(jobs(prepared), 60))
    many = messages(engine)
    # One answer each, and the file of one job after another.
    assert len(many) == len(held) + 1
    del held
    for answer in engine.run(jobs(prepared), 60):
        digest(answer)
    assert messages(engine) == many


def end_sha(run: RunFolder) -> str:
    [end] = [event for event in raw_events(run) if event["event"] == "end"]
    sha: str = end["weights_sha256"]
    return sha


def events_of(run: RunFolder, kind: str) -> list[dict]:
    return [event for event in raw_events(run) if event["event"] == kind]


def client_files(run: RunFolder) -> dict[str, str]:
    """All that stays at the clients, by name, as digests."""
    files = run.clients.rglob("*.safetensors")
    return {str(path.relative_to(run.clients)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


PERSONAL = 'sharing.rules=[{"heads.*": client}, {"*": all}]'


ALL_THAT_STAYS = [PERSONAL, "training.keep_optimizer=true", "wire.down=int8", "wire.up=int8"]
TOPK = ["wire.up=topk", "wire.topk_share=0.1", "federation.server_optimizer.kind=fedadam", "evaluation.where=clients"]
TWO_CLIENTS = "clients={a: {tasks: [sentiment, similarity]}, b: {tasks: [paraphrase]}}"


@pytest.mark.parametrize(
    ("overrides", "num_jobs"),
    [
        ([*ALL_THAT_STAYS, TWO_CLIENTS, "evaluation.every=3"], 2),
        pytest.param(ALL_THAT_STAYS, 12, marks=pytest.mark.slow),
        pytest.param(TOPK, 12, marks=pytest.mark.slow),
    ],
    ids=["training", "personal_int8", "topk_fedadam"],
)
def test_a_job_whose_worker_died_halfway_comes_to_the_same_bits(make_config, monkeypatch, overrides, num_jobs):
    config = make_config(*overrides, "training.num_rounds=3")
    calm = start_run(config, "calm")
    monkeypatch.setattr(local, "WorkerPool", lambda start, setup, number: WorkerPool(start_dying_worker, setup, 1))
    shaken = start_run(config, "shaken")
    assert end_sha(shaken) == end_sha(calm)
    assert client_files(shaken) == client_files(calm)
    assert client_files(calm)
    assert events_of(shaken, "failure") == []
    answered = [[(event["round"], event["client"]) for event in events_of(run, "update")] for run in (shaken, calm)]
    assert answered[0] == answered[1]
    deaths = [path.read_text() for path in (shaken.path / "deaths").iterdir()]
    assert len(deaths) == num_jobs
    assert set(deaths) == set(PLACES[:num_jobs])


@pytest.mark.slow
def test_a_client_whose_workers_always_die_costs_itself_alone(make_config, monkeypatch, tmp_path):
    own = tmp_path / "bad.tsv"
    own.write_text("sentence\tlabel\n" + "a fine film\tpositive\na dull film\tnegative\n" * 10)
    good = "a: {tasks: [sentiment, paraphrase]}, b: {tasks: [similarity]}"
    calm = start_run(make_config(f"clients={{{good}}}", "compute.workers=1"), "calm")
    bad = f"bad: {{tasks: [sentiment], source: {{sentiment: {own}}}}}"
    monkeypatch.setattr(
        local, "WorkerPool", lambda start, setup, number: WorkerPool(start_worker_that_fails_bad, setup, number)
    )
    mixed = start_run(make_config(f"clients={{{good}, {bad}}}", "compute.workers=1"), "mixed")
    assert end_sha(mixed) == end_sha(calm)
    failures = events_of(mixed, "failure")
    assert [(failure["round"], failure["client"]) for failure in failures] == [(1, "bad"), (2, "bad")]
    assert all("both processes that had its job died: killed by SIGKILL" in each["reason"] for each in failures)
