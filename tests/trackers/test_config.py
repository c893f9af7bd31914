import re
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import BaseModel

from fedmtl import Capability
from fedmtl.capabilities import TRACKERS, check_methods, trackers
from fedmtl.config.honoured import DISTILL
from fedmtl.deploy.server import _for_sites
from fedmtl.errors import ConfigError
from fedmtl.experiment.baselines import _of_mode
from fedmtl.experiment.resume import _edits, config_event
from fedmtl.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("written", ["mlflow", "[mlflow]", "{mlflow: }", "{mlflow: {}}"])
def test_a_tracker_is_named_alone_in_a_list_or_with_its_options(make_config, written):
    assert make_config(f"track={written}").track == {"mlflow": {}}


def test_nothing_is_tracked_by_default(make_config, tmp_path):
    assert trackers(make_config(), tmp_path) == {}


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("[mlfow]", "track.mlfow: no tracker is called so; did you mean `mlflow`"),
        ("[scaffold]", "track.scaffold: no tracker is called so; it is one of tensorboard, mlflow, wandb, trackio"),
        ("{mlflow: {experimnt: x}}", "track.mlflow.experimnt: unknown key; did you mean `experiment`"),
        ("{wandb: {mode: sometimes}}", "track.wandb.mode: found 'sometimes'"),
        ("{tensorboard: {artifacts: [model]}}", "track.tensorboard.artifacts: unknown key"),
        ("{mlflow: {address: 'https://me:secret@example.org'}}", "set MLFLOW_TRACKING_USERNAME"),
        ("{mlflow: {address: 'https://token@example.org'}}", "set MLFLOW_TRACKING_USERNAME"),
        ("{mlflow: {address: 'postgresql://example.org/runs?password=x'}}", "set MLFLOW_TRACKING_USERNAME"),
        ("{wandb: {address: 'https://me:secret@example.org'}}", "set WANDB_API_KEY"),
    ],
)
def test_a_mistake_is_one_line_before_round_1(make_config, written, words):
    with pytest.raises(ConfigError) as caught:
        check_methods(make_config(f"track={written}"))
    assert words in str(caught.value)


def test_a_library_that_is_missing_is_said_at_the_first_event_and_starts_nothing(make_config, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("fedmtl.capabilities.find_spec", lambda name: None)
    [follower] = trackers(make_config("track=[mlflow]"), tmp_path).values()
    with pytest.raises(Exception, match=r"needs mlflow, which is not installed; run `pip install .*\.\[mlflow\]"):
        follower.event(config_event(make_config()))
    assert not (tmp_path / "trackers").exists()


def test_sites_are_not_told_where_a_server_sends_its_numbers(make_config):
    assert "track" not in _for_sites(make_config("track={mlflow: {address: 'http://10.0.0.7'}}"))


def test_baselines_are_not_tracked(make_config, tmp_path):
    assert _of_mode(make_config("track=[mlflow]"), "local", tmp_path).track == {}


def test_trackers_may_change_between_two_sessions_of_a_run(make_config, tmp_path):
    events = [config_event(make_config("track={mlflow: {experiment: a}}"))]
    edits = _edits(RunFolder(tmp_path), make_config("track={mlflow: {experiment: b}}"), events)
    assert edits == {"track.mlflow.experiment": ["a", "b"]}


def test_distill_names_the_command_that_sends_a_student():
    assert "fedmtl track" in (DISTILL.remedy("track") or "")


def test_every_tracker_has_an_extra_of_its_name():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(TRACKERS) <= set(project["optional-dependencies"])


def test_a_tracker_of_another_package_is_named_there_too(make_config, tmp_path, monkeypatch):
    class Options(BaseModel):
        file: str = "x"

    made = []
    monkeypatch.setitem(
        sys.modules["fedmtl.capabilities"]._REGISTERED,
        "mine",
        Capability("mine", tracker=lambda options, folder: made.append((options.file, folder)), options=Options),
    )
    config = make_config("track={mine: {file: y}}")
    check_methods(config)
    assert list(trackers(config, tmp_path)) == ["mine"]
    assert made == [("y", tmp_path)]


@pytest.mark.parametrize("name", list(TRACKERS))
def test_the_page_has_every_option_of_a_tracker(name):
    page = (ROOT / "docs" / "trackers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \|", page, re.MULTILINE)
    named = {option for option, of in rows if (name in of) != of.startswith("all")}
    assert set(import_module(TRACKERS[name][0]).Options.model_fields) == named
