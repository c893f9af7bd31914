"""The engine's answers, whoever keeps them and for how long."""

from collections.abc import Iterator

import pytest

from fedmtl.engines.local import LocalEngine
from fedmtl.experiment.prepare import open_engine, prepare
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.messages import Job, Update
from fedmtl.model.keys import weights_sha256
from fedmtl.runs import create_run


@pytest.fixture
def prepared(make_config):
    return prepare(make_config())


@pytest.fixture
def engine(prepared, tmp_path) -> Iterator[LocalEngine]:
    opened = open_engine(prepared, create_run(tmp_path, "run"))
    yield opened
    opened.close()


def jobs(prepared) -> Iterator[Job]:
    dispatch, settings = Dispatch(prepared.strategy), prepared.strategy.settings.to_dict()
    for client, info in prepared.clients.items():
        tasks = prepared.strategy.active_tasks(client, 1)
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
