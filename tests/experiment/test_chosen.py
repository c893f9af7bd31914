"""A run with chosen settings: its folder's config gives all of them, and comes to the same weights."""

from fedmtl.config.file import explained_config, load_config
from fedmtl.experiment.run import start_run
from fedmtl.runs.event_lines import last_of
from fedmtl.runs.events import EndEvent
from fedmtl.runs.log import read_events
from small_config import SMALL


def test_the_config_of_a_run_with_chosen_settings_reproduces_it(tmp_path):
    given = [entry for entry in SMALL if not entry.startswith(("defaults", "model.p", "training.l"))]
    first = explained_config(None, [*given, "training.num_rounds=1", f"output={tmp_path}"])
    assert {"model.pair", "training.learning_rate", "training.min_steps"} <= {choice.key for choice in first.choices}
    once = start_run(first.config, "run")
    runs = [once, start_run(load_config(once.config), "run")]
    ends = [last_of(read_events(run), EndEvent) for run in runs]
    assert runs[0].path != runs[1].path
    assert ends[0].weights_sha256 == ends[1].weights_sha256
