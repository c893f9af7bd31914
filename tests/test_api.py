"""What Python code does with a run: train it, open it while it goes on or after it failed, predict and score."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

import fedmtl
from fedmtl import CannotContinue, ConfigError, DataError, FedmtlError, ModelError, Prediction, Run, RunNotFound
from fedmtl.runs.events import EndEvent, RoundEvent, StartEvent
from small_config import SMALL

TASKS = ["sentiment", "paraphrase", "similarity"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Run:
    """A finished run of two rounds; tests that change it take `changed`."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    return fedmtl.run(fedmtl.load_config(None, SMALL), "tiny", overrides=[f"output={folder}"])


@pytest.fixture
def changed(made, tmp_path, monkeypatch) -> Run:
    """A copy of the run, in the working directory's `runs`."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made.path, tmp_path / "runs" / "tiny")
    return Run.open("tiny")


def keep_events(run: Run, num: int) -> None:
    lines = run.folder.events.read_text().splitlines(keepends=True)
    run.folder.events.write_text("".join(lines[:num]))


def test_a_finished_run_tells_of_itself(made):
    assert (made.name, made.status) == ("tiny", "done")
    assert made.path.name == "tiny"
    assert made.config.training.num_rounds == 2
    assert made.config is made.config
    assert isinstance(made.events()[0], StartEvent)
    summary = made.summary()
    assert made.events()[-1] == EndEvent(
        status="done",
        rounds=2,
        seconds=summary.seconds,
        weights_sha256=summary.weights_sha256,
        energy=summary.energy,
        keep="last",
    )
    assert summary.energy is not None
    assert made.summary().rounds == 2


def test_a_run_is_opened_by_name_or_path(changed, tmp_path):
    assert Run.open(Path("runs/tiny")) == Run.open("tiny") == changed == Run("runs/tiny")
    assert Run.open(tmp_path / "runs" / "tiny").metrics() == changed.metrics()
    assert hash(Run.open("tiny")) == hash(changed)
    for name in ("tinny", Path("runs/tinny")):
        with pytest.raises(RunNotFound, match="no such run in runs"):
            Run.open(name)


def test_load_run_takes_a_name_and_a_path(changed):
    assert fedmtl.load_run("runs/tiny").tasks == tuple(TASKS)
    assert fedmtl.load_run(Path("runs/tiny")).tasks == fedmtl.load_run("tiny").tasks == tuple(TASKS)
    assert fedmtl.load_run(changed.folder).run == changed.folder


def test_metrics_are_a_row_for_each_round_and_task(made):
    rows = made.metrics()
    assert [(row["round"], row["task"]) for row in rows] == [(n, task) for n in (0, 1, 2) for task in TASKS]
    assert len({tuple(row) for row in rows}) == 1, "every row has the same columns"
    with made.folder.results.open(newline="") as file:
        results = list(csv.DictReader(file))
    for row in rows:
        for name in ("accuracy", "f1", "matthews", "pearson", "spearman", "mse", "train_loss"):
            written = results[row["round"]].get(f"{row['task']}.{name}", "")
            assert written == ("" if row[name] is None else str(row[name])), name
    last = {row["task"]: row for row in rows[-3:]}
    assert (last["sentiment"]["metric"], last["similarity"]["metric"]) == ("accuracy", "pearson")
    assert (
        last["sentiment"]["score"]
        == last["sentiment"]["accuracy"]
        == made.summary().tasks["sentiment"].final["accuracy"]
    )
    assert last["sentiment"]["pearson"] is None
    assert last["sentiment"]["examples"] == 24
    assert rows[0]["train_loss"] is None


def test_metrics_are_a_table_for_pandas(made):
    table = pandas.DataFrame(made.metrics())
    assert len(table) == 9
    scores = table.pivot(index="round", columns="task", values="score")
    assert list(scores.columns) == sorted(TASKS)
    assert scores.loc[2, "sentiment"] == made.metrics()[-3]["accuracy"]
    assert table["accuracy"].dtype == float


def test_rounds_without_an_evaluation_and_rounds_that_are_open_have_no_scores(changed):
    lines = [json.loads(line) for line in changed.folder.events.read_text().splitlines()]
    skipped = [e for e in lines if (e["event"], e.get("round")) != ("evaluation", 1)]
    ends = [number for number, event in enumerate(skipped) if event["event"] == "round"]
    # The last `round` is missing: its evaluation is written, the round is not finished.
    changed.folder.events.write_text("".join(json.dumps(event) + "\n" for event in skipped[: ends[2]]))
    rows = changed.metrics()
    assert [(row["round"], row["score"] is None) for row in rows] == [(0, False)] * 3 + [(1, True)] * 3
    assert all(row["train_loss"] is not None for row in rows[3:])
    assert changed.status == "killed"


def test_one_text_a_pair_and_lists_of_them_are_answered(made):
    one = made.predict("a fine film")
    assert [type(answer) for answer in one] == [Prediction]
    assert one[0].task == "sentiment"
    assert sum(one[0].probabilities.values()) == pytest.approx(1)
    assert made.predict(["a fine film", "a dull one"])[0][0].label == one[0].label
    assert len(made.predict(["a fine film", "a dull one"])) == 2

    pair = made.predict(("a fine film", "a dull film"))
    assert [answer.task for answer in pair] == ["paraphrase", "similarity"]
    assert pair[1].score is not None
    (only,) = made.predict(("a fine film", "a dull film"), task="similarity")
    assert only.score == pytest.approx(pair[1].score, abs=1e-5)
    many = made.predict([("a fine film", "a dull film"), ["one", "two"]])
    assert [[answer.task for answer in row] for row in many] == [["paraphrase", "similarity"]] * 2
    assert many[0][1].score == pytest.approx(pair[1].score, abs=1e-5)
    assert made.predict(text for text in ["a fine film"])[0][0].label == one[0].label
    assert made.predict([]) == []


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (7, "predict: found 7; give a text, a tuple of two for a pair, or a list of them"),
        (["one", 7], "predict, text 2: found 7; give a text, or a tuple of two for a pair"),
        (("one", "two", "three"), "predict, text 1: found ('one', 'two', 'three'); give a text, or a tuple of two"),
        (["one", ("two", "three")], "predict, text 2: has 2 texts, the first 1; give as many"),
        (["one", " "], "predict, text 2: is empty; write some words, or leave it out"),
        ((), "predict, text 1: found (); give a text, or a tuple of two for a pair"),
    ],
)
def test_texts_that_cannot_be_answered_are_one_line(made, texts, message):
    with pytest.raises(DataError) as caught:
        made.predict(texts)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_task_that_does_not_fit_is_named(made):
    with pytest.raises(FedmtlError, match=r"tiny has no task emotion; it has sentiment, paraphrase, similarity"):
        made.predict("a text", task="emotion")
    with pytest.raises(FedmtlError, match=r"task similarity takes two texts"):
        made.predict("a text", task="similarity")


def test_a_run_is_scored_again_and_on_other_files(made, tmp_path):
    again = made.evaluate()
    assert list(again) == TASKS
    final = {row["task"]: row["score"] for row in made.metrics()[-3:]}
    assert again["sentiment"].metrics["accuracy"] == pytest.approx(final["sentiment"])
    assert list(made.evaluate("paraphrase")) == ["paraphrase"]
    texts = ["a fine film", "a dull film", "so so"]
    labels = [answers[0].label for answers in made.predict(texts)]
    lines = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
    (tmp_path / "more.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    for file in (tmp_path / "more.tsv", str(tmp_path / "more.tsv")):
        assert made.evaluate("sentiment", file)["sentiment"].metrics["accuracy"] == 1.0
    with pytest.raises(FedmtlError, match="evaluate: a file needs a task, which says whose columns and labels it has"):
        made.evaluate(file=tmp_path / "more.tsv")


def test_the_model_is_loaded_once_and_again_when_it_was_written_anew(changed):
    first = changed.model()
    assert changed.model() is first
    record = changed.folder.model / "tasks.json"
    text = record.read_bytes()
    record.unlink()
    with pytest.raises(ModelError, match="holds no finished model; let the run end"):
        changed.predict("a text")
    record.write_bytes(text)
    assert changed.model() is not first


def test_a_run_that_goes_on_is_read_and_has_no_model_yet(changed):
    shutil.rmtree(changed.folder.model)
    changed.folder.report.unlink()
    keep_events(changed, 0)
    assert (changed.status, changed.metrics(), changed.events()) == ("killed", [], [])
    with pytest.raises(ModelError) as caught:
        changed.evaluate()
    assert "\n" not in str(caught.value)
    assert changed.report().is_file()


def test_an_interrupted_run_is_resumed_to_the_same_weights(made, changed):
    first = next(n for n, e in enumerate(made.events()) if isinstance(e, RoundEvent) and e.round == 1)
    keep_events(changed, first + 1)
    for file in changed.folder.checkpoints.glob("round-0002.*"):
        file.unlink()
    changed.folder.report.unlink()
    assert changed.status == "killed"
    seen = []
    assert changed.resume(seen.append) is changed
    assert changed.status == "done"
    assert changed.summary().weights_sha256 == made.summary().weights_sha256
    assert changed.metrics() == made.metrics()
    assert seen
    assert changed.resume(lambda event: pytest.fail("a finished run stays as it is")) is changed


def test_a_failed_run_is_an_error_and_its_folder_can_be_opened(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "broken.yaml"
    path.write_text("tasks: {sentiment: {train_samples: 40, val_samples: 24}}\n")
    small = [part for part in SMALL if not part.startswith("tasks.")]
    with pytest.raises(CannotContinue) as caught:
        fedmtl.run(path, overrides=[*small, "federation.max_update_norm=1e-9"])
    assert "\n" not in str(caught.value)
    failed = Run.open("broken")
    assert failed.status == "failed"
    assert [row["round"] for row in failed.metrics()] == [0]
    assert failed.predict("a text")[0].task == "sentiment"


def test_a_config_may_be_a_mapping_and_a_name_that_is_taken_gets_a_number(tmp_path):
    tasks = {"sentiment": {"train_samples": 16, "val_samples": 8}}
    config = {"output": tmp_path, "model": {"server_model": "random-1x32"}, "tasks": tasks}
    config |= {"training": {"num_rounds": 0}, "compute": {"workers": 0, "device": "cpu"}}
    runs = [fedmtl.run(config) for _ in range(2)]
    assert [run.name for run in runs] == ["run", "run-2"]
    seen = []
    assert fedmtl.run(config, "named", seen.append).path == tmp_path / "named"
    assert seen[-1].kind == "end"
    with pytest.raises(ConfigError, match=r"^training\.num_rounds: found 'two', it must be a whole number"):
        fedmtl.run(config, overrides=["training.num_rounds=two"])


def test_values_that_stay_at_clients_answer_for_the_client_named(make_config):
    personal = fedmtl.run(make_config("sharing.rules=[{heads.*: client}, {'*': all}]", "training.num_rounds=1"))
    with pytest.raises(FedmtlError, match="stays at the clients; name one"):
        personal.predict("a text")
    answers = {name: personal.predict("a text", client=f"sentiment_client_{name}")[0] for name in (1, 2)}
    assert answers[1].probabilities != answers[2].probabilities
    assert list(personal.evaluate(client="sentiment_client_1")) == ["sentiment"]


def test_the_model_leaves_for_plain_transformers(changed):
    written = changed.export_hf()
    # Pairs are encoded apart in this run, which plain classes of transformers cannot do.
    assert written.folders["sentiment"] == changed.path / "export" / "sentiment"
    assert (changed.path / "export" / "sentiment" / "config.json").is_file()
    assert "pairs are encoded apart" in written.reasons["similarity"]
    assert written.folders["similarity"] == written.every_task == changed.path / "export" / "every-task"
    assert "trust_remote_code=True" in (written.every_task / "README.md").read_text()


def test_opening_a_run_and_its_numbers_load_no_numeric_library(made):
    code = (
        "import sys, fedmtl; run = fedmtl.Run.open(sys.argv[1]); run.metrics(); run.status; run.config; run.summary();"
        " print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, made.path], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
