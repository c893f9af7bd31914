import json

import pytest

from fedmtl.errors import FedmtlError
from fedmtl.runs.log import cut_back
from fedmtl.trackers.points import Book, StoredOptions, Tail, artifacts_of, leaves, sent_config
from trackers.made_runs import CONFIG, add, checkpoint, ending, made_run, metrics_of, opening, round_events


def booked(events, **kwargs):
    book = Book(**kwargs)
    for event in events:
        book.add(event)
    return book


def test_a_round_becomes_one_point_with_every_number_that_is_defined():
    book = booked([*opening(), *round_events(0), *round_events(2)])
    assert {step: dict(point.metrics) for step, point in book.points.items()} == {0: metrics_of(0), 2: metrics_of(2)}


def test_events_of_an_open_round_are_no_point_yet():
    assert booked([*opening(), *round_events(0), *round_events(1)[:-1]]).points.keys() == {0}


def test_without_clients_nothing_names_one():
    book = booked([*opening(), *round_events(1)], with_clients=False)
    assert not [name for name in book.points[1].metrics if name.startswith("clients/")]
    assert not any(word in json.dumps(book.facts) for word in ("east", "west"))
    assert book.points[1].metrics["bytes_up"] == 64


def test_the_config_is_sent_without_folders_addresses_and_what_a_failure_said():
    book = booked([*opening(), *round_events(1), *ending()])
    words = json.dumps([book.facts, book.summary])
    assert not any(word in words for word in ("mustermann", "patients", "tracker.example", "its words", "ended in"))
    assert book.facts["config"]["model"] == {"server_model": "small"}
    assert book.facts["config"]["tasks"] == {"sst2": {"source": {"train": "train.csv"}}}
    assert book.facts["config"]["seed"] == 3


@pytest.mark.parametrize("path", ["/home/x/data", "~/data", "./data", "../data/", "C:\\x\\data", "\\\\host\\data"])
def test_of_a_path_the_last_part_is_sent(path):
    assert sent_config({"model": {"start_from": path}}) == {"model": {"start_from": "data"}}


def test_names_of_labels_are_not_sent():
    config = {"tasks": {"ward": {"labels": ["hiv", "flu"], "label": "column"}, "sst2": None}}
    assert sent_config(config) == {"tasks": {"ward": {"label": "column"}, "sst2": None}}


def test_a_name_of_a_hub_is_sent_whole():
    assert sent_config({"model": {"server_model": "a/b"}}) == {"model": {"server_model": "a/b"}}


def test_the_end_and_baselines_are_a_summary():
    book = booked([*opening(), *ending()])
    assert book.status == "done"
    assert book.summary == {
        "baseline/tfidf/sst2/accuracy": 0.375,
        "status": "done",
        "rounds": 2,
        "weights_sha256": "ab12",
    }


def test_leaves_are_dotted_keys():
    assert list(leaves({"a": {"b": 1, "c": None}, "d": [2, 3]})) == [("a.b", "1"), ("d", "[2, 3]")]
    assert dict(leaves(CONFIG))["model.server_model"] == "/home/mustermann/encoders/small"


def test_a_tail_reads_what_is_new_and_no_half_line(tmp_path):
    run = made_run(tmp_path / "run", [*opening(), *round_events(0)])
    tail = Tail(run, with_clients=True)
    tail.read()
    with run.events.open("ab") as file:
        file.write(b'{"event": "round", "round": 1')
    tail.read()
    assert tail.book.points.keys() == {0}
    with run.events.open("ab") as file:
        file.write(b"}\n")
    add(run, ending())
    tail.read()
    assert tail.book.points.keys() == {0, 1}
    assert tail.book.status == "done"


def test_a_tail_begins_anew_where_a_resume_cut_the_file_back(tmp_path):
    run = made_run(tmp_path / "run", [*opening(), *round_events(0), *round_events(1), *ending("interrupted")])
    tail = Tail(run, with_clients=True)
    tail.read()
    cut_back(run, 0)
    tail.read()
    assert tail.book.points.keys() == {0}
    assert tail.book.status is None


def test_a_round_without_its_checkpoint_waits_while_a_run_goes_on(tmp_path):
    run = made_run(tmp_path / "run", [*opening(), *round_events(0), *round_events(1)])
    tail = Tail(run, with_clients=True)
    run.checkpoints.mkdir()
    tail.read()
    assert tail.final_points() == []
    checkpoint(run, 0)
    assert [point.step for point in tail.final_points()] == [0]
    add(run, ending())
    tail.read()
    assert [point.step for point in tail.final_points()] == [0, 1]


@pytest.mark.parametrize("name", ["report.html", "model/config.json", "model"])
def test_a_link_out_of_the_folder_is_not_sent(tmp_path, name):
    run = made_run(tmp_path / "run", opening())
    path, secret = run.path / name, tmp_path / "secret"
    if path.is_dir():
        path.rename(secret)
    else:
        secret.write_text("a key")
        path.unlink(missing_ok=True)
    path.symlink_to(secret)
    with pytest.raises(FedmtlError, match="is a link out of the run folder"):
        artifacts_of(run, StoredOptions(artifacts=["report", "model"]))


def test_a_link_within_the_folder_is_sent(tmp_path):
    run = made_run(tmp_path / "run", opening())
    (run.model / "again").symlink_to(run.report)
    assert "model" in artifacts_of(run, StoredOptions(artifacts=["report", "model"]))


def test_the_report_names_clients_and_is_not_sent_without_them(tmp_path):
    run = made_run(tmp_path / "run", opening())
    assert artifacts_of(run, StoredOptions()) == {"model": run.model}
    chosen = StoredOptions(artifacts=["report", "model"])
    assert artifacts_of(run, chosen) == {"report": run.report, "model": run.model}
    assert artifacts_of(run, chosen.model_copy(update={"clients": False})) == {"model": run.model}
    assert artifacts_of(run, StoredOptions(artifacts=["report"])) == {"report": run.report}
    (run.path / "export" / "onnx").mkdir(parents=True)
    assert artifacts_of(run, StoredOptions(artifacts=["onnx"])) == {"onnx": run.path / "export" / "onnx"}
