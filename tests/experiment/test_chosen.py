"""A run with chosen settings: its folder's config gives all of them, and comes to the same weights."""

from fedmtl.config import auto
from fedmtl.config.file import explained_config, load_config
from fedmtl.experiment.prepare import settled
from fedmtl.experiment.run import start_run
from fedmtl.runs.event_lines import last_of
from fedmtl.runs.events import EndEvent
from fedmtl.runs.log import read_events
from fedmtl.tasks.load import count_examples
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


def test_a_run_counts_its_examples_before_it_chooses_and_its_config_reproduces_it(tmp_path, monkeypatch):
    given = [entry for entry in SMALL if not entry.startswith(("defaults", "model.", "training.l"))]
    given += ["training.num_rounds=1", "training.local_steps=1", f"output={tmp_path}"]
    # SMALL has forty examples of each of its tasks.
    monkeypatch.setattr(auto, "LARGE_TASK", 41)
    few, _ = settled(explained_config(None, given))
    assert {"encoder.layer.0.*": "task"} not in few.config.sharing.rules
    monkeypatch.setattr(auto, "LARGE_TASK", 40)
    many, data = settled(explained_config(None, given))
    assert {"encoder.layer.0.*": "task"} in many.config.sharing.rules
    once = start_run(many.config, "run", data=data)
    # With a config that has all values, nothing is counted or chosen again.
    monkeypatch.setattr(auto, "LARGE_TASK", 41)
    written = explained_config(once.config)
    assert not written.follows_examples
    again, data = settled(written)
    ends = [last_of(read_events(run), EndEvent) for run in (once, start_run(again.config, "again", data=data))]
    assert ends[0].weights_sha256 == ends[1].weights_sha256


def test_files_of_clients_are_counted(tmp_path):
    for name, rows in (("a", 3), ("b", 4)):
        (tmp_path / f"{name}.tsv").write_text("text\tlabel\n" + "fine\tgood\ndull\tbad\n" * rows)
    (tmp_path / "dev.tsv").write_text("text\tlabel\nnice\tgood\npoor\tbad\n")
    dev = f"{tmp_path}/dev.tsv"
    clients = {
        name: {"tasks": ["mood"], "source": {"mood": {"train": f"{tmp_path}/{name}.tsv", "validation": dev}}}
        for name in "ab"
    }
    task = {"kind": "classification", "text": ["text"], "label": "label"}
    _, data = settled(explained_config({"tasks": {"mood": task}, "clients": clients}))
    # 6 and 8 rows.
    assert count_examples(data) == {"mood": 14}
