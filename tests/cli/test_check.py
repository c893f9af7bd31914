"""fedmtl check, and what run and config say of their data."""

import json

import pytest

ROWS = [f"some words of line {number}\t{'good' if number % 2 else 'bad'}" for number in range(40)]
# In no output may any of this stand.
SECRET = "privateword jane.doe@example.org"


@pytest.fixture
def files(tmp_path):
    (tmp_path / "train.tsv").write_text("\n".join(["text\tlabel", *ROWS, f"{SECRET}\tgod"]) + "\n")
    (tmp_path / "dev.tsv").write_text("\n".join(["text\tlabel", *ROWS[:3], f"{SECRET}\tbad"]) + "\n")
    (tmp_path / "mood.yaml").write_text(
        """
tasks:
  mood: {kind: classification, text: [text], label: label, labels: [bad, god, good],
         source: {train: train.tsv, validation: dev.tsv}}
defaults: plain
model: {server_model: random-1x32}
training: {num_rounds: 1, batch_size: 8}
compute: {workers: 0, device: cpu}
"""
    )
    return tmp_path


def test_check_shows_counts_and_no_text(cli, files):
    done = cli("check", "train.tsv", "dev.tsv")
    assert done.code == 0
    assert "warning: train.tsv: texts of validation that are in train too: 4" in done.out
    assert "1 example has what looks like personal data (1 e-mail addresses)" in done.out
    assert "is but for a letter, case or spaces a label of 20; is it a typing mistake?" in done.out
    assert "good" in done.out
    for piece in ("privatew", "jane.doe", "some words"):
        assert piece not in done.out + done.err


def test_check_of_a_config_is_the_check_of_its_files(cli, files):
    of_files, of_config = (json.loads(cli("check", *data, "--json").out) for data in (["."], ["mood.yaml"]))
    assert {part["split"]: part["rows"] for part in of_files["parts"]} == {"train": 41, "validation": 4}
    assert {part["split"]: part["rows"] for part in of_config["parts"]} == {"train": 41, "validation": 4}
    assert of_config["tasks"][0]["validation_in_train"] == of_files["tasks"][0]["validation_in_train"] == 4


def test_only_strict_makes_a_warning_the_exit_status(cli, files):
    assert (cli("check", ".").code, cli("check", ".", "--strict").code) == (0, 1)
    (files / "dev.tsv").unlink()
    (files / "train.tsv").write_text("\n".join(["text\tlabel", *ROWS]) + "\n")
    assert cli("check", "train.tsv", "--strict").code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing.tsv"], "nothing.tsv: no such file or folder"),
        (["mood.yaml", "train.tsv"], "a config names its files and columns itself"),
        (["train.tsv", "--set", "seed=1"], "--set changes a config"),
        (["train.tsv", "--delimiter", ";;"], "--delimiter: found ';;'; write tab, comma, semicolon or one character"),
        (["mood.yaml", "--delimiter", ";"], "a config names its files and columns itself"),
        (["train.tsv", "--text", "title"], "train.tsv: has no column title; it has text, label"),
    ],
)
def test_what_cannot_be_checked_is_one_line(cli, files, arguments, words):
    done = cli("check", *arguments)
    assert done.code == 2
    assert words in done.error


@pytest.mark.parametrize("delimiter", ["semicolon", ";"])
def test_a_file_with_semicolons_is_read_with_its_delimiter(cli, files, delimiter):
    rows = ["text;label", *(row.replace("\t", ";") for row in ROWS)]
    (files / "train.csv").write_text("\n".join(rows) + "\n")
    (part,) = json.loads(cli("check", "train.csv", "--delimiter", delimiter, "--json").out)["parts"]
    assert (part["columns"], part["rows"], part["labels"]) == (["text", "label"], 40, {"bad": 20, "good": 20})


@pytest.mark.parametrize("data", ["runs/demo", "runs", "runs/demo/events.jsonl", "runs/demo/results.csv"])
def test_the_folder_of_a_run_is_refused_with_what_to_check_instead(cli, runs, data):
    done = cli("check", data)
    assert done.code == 2
    assert (
        ": is the folder of a run, and its files are no examples; name files of examples, or check those" in done.error
    )


def test_an_error_in_a_file_quotes_nothing_of_it(cli, files):
    (files / "train.tsv").write_text(f"{SECRET}\tgood\n{SECRET}\n")
    done = cli("check", "train.tsv")
    assert done.error == "train.tsv, line 2: has 1 values, the header 2; mend the line or its quoting"


def test_config_prints_warnings_beside_the_config(cli, files):
    done = cli("config", "mood.yaml")
    assert done.code == 0
    assert "warning:" not in done.out
    assert len(done.err.splitlines()) == 2
    assert "warning: mood: texts of validation that are in train too: 4" in done.err


def test_config_says_that_a_file_is_missing_and_is_still_a_config(cli, files):
    (files / "dev.tsv").unlink()
    done = cli("config", "mood.yaml")
    assert done.code == 0
    assert "dev.tsv: no such file" in done.err


def test_a_run_begins_with_its_warnings_and_records_none(cli, files):
    done = cli("run", "mood.yaml")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == "  warning: mood: 4 of 4 validation examples are in train too"
    assert lines[1].startswith("  warning: mood: a label of 1 example (`god`) is but for a letter")
    assert "warning" not in (files / "runs" / "mood" / "events.jsonl").read_text()


def test_config_counts_examples_that_choose_settings_and_says_where_it_cannot(cli, files, monkeypatch):
    both = "tasks: {sentiment: {train_samples: 4}, paraphrase: {train_samples: 4}}\n"
    (files / "two.yaml").write_text(both)
    monkeypatch.setattr("fedmtl.config.auto.LARGE_TASK", 4)
    assert "encoder.layer.0.*: task" in cli("config", "two.yaml").out
    assert "# card of tiny, rule large-tasks" in cli("config", "two.yaml").out
    monkeypatch.setattr("fedmtl.config.auto.LARGE_TASK", 5)
    assert "encoder.layer.0.*: task" not in cli("config", "two.yaml").out
    (files / "hub.yaml").write_text("tasks: {sst2: , stsb: }\n")
    done = cli("config", "hub.yaml")
    assert done.code == 0
    assert "rule last-layers, examples are not counted" in done.out
    assert "note: settings that follow the number of examples are not chosen here" in done.err
