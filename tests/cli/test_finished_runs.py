"""evaluate, predict, compare, export and report, on runs that have ended."""

import csv
import io
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from cli.small_runs import small
from fedmtl.compress.measure.process import _load
from fedmtl.compress.measure.variants import variants_of
from fedmtl.errors import FedmtlError
from fedmtl.predict.rounds import run_at
from fedmtl.runs.folder import RunFolder


def test_evaluate_gives_the_numbers_the_run_ended_with(cli, runs, one_thread):
    again = json.loads(cli("evaluate", "demo", "--json").out)["metrics"]
    ended = json.loads(cli("run", "--resume", "demo", "--json").out)["metrics"]
    assert again.keys() == ended.keys()
    for task, metrics in ended.items():
        for name, value in metrics.items():
            assert again[task][name] == (value if value is None else pytest.approx(value, abs=1e-5))


def test_evaluate_scores_a_file(cli, runs, tmp_path):
    rows = ["sentence\tlabel", "a good film\tpositive", "a bad film\tnegative", "a dull film\tnegative"]
    (tmp_path / "new.tsv").write_text("\n".join(rows) + "\n")
    done = cli("evaluate", "demo", "--task", "sentiment", "--file", "new.tsv", "--json")
    record = json.loads(done.out)
    assert list(record["metrics"]) == ["sentiment"]
    assert record["tasks"]["sentiment"]["examples"] == 3
    assert "sentiment │ accuracy" in cli("evaluate", "demo", "--task", "sentiment", "--file", "new.tsv").out


@pytest.fixture
def files_run(runs, tmp_path):
    """The run `demo` as if its sentiment had come from files, with a test file and a further validation set."""
    texts = ["a good film", "a bad film", "a dull film", "a fine film"]
    labels = ["positive", "negative", "negative", "positive"]
    for name, count in (("train", 4), ("dev", 3), ("other", 2), ("test", 4)):
        rows = [f"{text}\t{label}" for text, label in zip(texts[:count], labels, strict=False)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    path = runs / "demo/config.yaml"
    config = yaml.safe_load(path.read_text())
    source = {name: str(tmp_path / f"{file}.tsv") for name, file in (("train", "train"), ("validation", "dev"))}
    more = {"test": str(tmp_path / "test.tsv"), "more_validation": {"other": str(tmp_path / "other.tsv")}}
    config["tasks"]["sentiment"]["source"] = source | more
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return runs


def test_evaluate_scores_test_files_and_writes_every_answer(cli, files_run, tmp_path):
    done = cli("evaluate", "demo", "--test", "--out", "answers.csv", "--json")
    record = json.loads(done.out)
    assert {name: facts["examples"] for name, facts in record["tasks"].items()} == {"sentiment": 4}
    with (tmp_path / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == ["positive", "negative", "negative", "positive"]
    right = sum(row["answer"] == row["label"] for row in rows)
    assert record["metrics"]["sentiment"]["accuracy"] == right / 4
    assert [(row["set"], row["row"]) for row in rows] == [("sentiment", str(n)) for n in range(1, 5)]
    for row in rows:
        shares = json.loads(row["probabilities"])
        assert max(shares, key=shares.get) == row["answer"]
        assert shares[row["answer"]] == float(row["probability"])
    assert "film" not in (tmp_path / "answers.csv").read_text()
    done = cli("evaluate", "demo", "--task", "sentiment", "--file", "test.tsv", "--out", "a.jsonl", "--with-text")
    assert done.out.splitlines()[-1] == "a.jsonl: 4 answers"
    assert json.loads((tmp_path / "a.jsonl").read_text().splitlines()[1])["text1"] == "a bad film"
    error = cli("evaluate", "demo", "--test", "--task", "similarity").error
    assert error.startswith("demo: its config names no test file of similarity; write tasks.TASK.source.test")
    assert cli("evaluate", "demo", "--test", "--task", "x", "--file", "y").error.startswith("--test: scores the files")


def test_answers_are_not_written_over_the_file_that_is_read(cli, runs, tmp_path):
    words = "sentence\tlabel\na good film\tpositive\n"
    (tmp_path / "new.tsv").write_text(words)
    (tmp_path / "soft.tsv").symlink_to("new.tsv")
    (tmp_path / "hard.tsv").hardlink_to(tmp_path / "new.tsv")
    for command in ("evaluate", "predict"):
        for out in ("new.tsv", "./new.tsv", "soft.tsv", "hard.tsv"):
            done = cli(command, "demo", "--task", "sentiment", "--file", "new.tsv", "--out", out)
            assert done.error == f"--out {out.removeprefix('./')}: is the file that is read; name another"
    assert (tmp_path / "new.tsv").read_text() == words


def test_evaluate_scores_one_further_validation_set(cli, files_run):
    record = json.loads(cli("evaluate", "demo", "--task", "sentiment:other", "--json").out)
    assert {name: facts["examples"] for name, facts in record["tasks"].items()} == {"sentiment:other": 2}
    both = json.loads(cli("evaluate", "demo", "--task", "sentiment", "--json").out)["tasks"]
    assert {name: facts["examples"] for name, facts in both.items()} == {"sentiment": 3, "sentiment:other": 2}
    error = cli("evaluate", "demo", "--task", "sentiment:none").error
    assert error == "demo has no validation set sentiment:none; it has sentiment, sentiment:other"


def test_evaluate_says_which_round_it_opened(cli, runs):
    last = cli("evaluate", "demo", "--task", "sentiment", "--round", "last").out
    assert last.splitlines()[-1] == "the model after round 2 (--round last)"
    assert json.loads(cli("evaluate", "demo", "--round", "last", "--json").out)["rounds"]["sentiment"] == 2


def test_evaluate_scores_every_client_where_values_stay_there(cli, runs, tmp_path):
    record = json.loads(cli("evaluate", "personal", "--out", "answers.csv", "--json").out)
    clients = [f"{task}_client_{n}" for task in ("paraphrase", "sentiment", "similarity") for n in (1, 2)]
    assert list(record["metrics"]) == [f"{client.partition('_')[0]} at {client}" for client in clients]
    alone = json.loads(cli("evaluate", "personal", "--client", "sentiment_client_2", "--json").out)["metrics"]
    assert record["metrics"]["sentiment at sentiment_client_2"] == alone["sentiment"]
    only = json.loads(cli("evaluate", "personal", "--task", "similarity", "--json").out)["metrics"]
    assert list(only) == ["similarity at similarity_client_1", "similarity at similarity_client_2"]
    assert (tmp_path / "answers.csv").read_text().startswith("client,set,row,label,answer,probability")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--file", "x.tsv"], "--file: needs --task, which says whose columns and labels the file has"),
        (["--task", "mood"], "demo has no task mood; it has sentiment, paraphrase, similarity"),
        (["--task", "sentiment", "--file", "x.tsv"], "x.tsv: no such file"),
        (
            ["--task", "sentiment", "--file", "wrong.tsv"],
            "wrong.tsv: has no column 'sentence'; task sentiment reads sentence and label, the file has text, label",
        ),
        (["--client", "a"], "--client a: has no values of this run; in this run no value stays at a client"),
    ],
)
def test_what_cannot_be_evaluated(cli, runs, tmp_path, arguments, error):
    (tmp_path / "wrong.tsv").write_text("text\tlabel\nx\tpositive\n")
    done = cli("evaluate", "demo", *arguments)
    assert done.code == 2
    assert done.error.startswith(error)


def test_one_text_and_two_go_to_the_heads_that_take_them(cli, runs):
    one, two = cli("predict", "demo", "a fine film").out, cli("predict", "demo", "a film", "the film").out
    assert [line.split(":")[0] for line in one.splitlines()] == ["sentiment"]
    assert [line.split(":")[0] for line in two.splitlines()] == ["paraphrase", "similarity"]
    only = cli("predict", "demo", "--task", "similarity", "a film", "the film").out
    assert only.splitlines() == two.splitlines()[1:]


def test_many_texts_from_a_file_or_a_pipe_are_answered_line_by_line(cli, runs, tmp_path, monkeypatch):
    lines = "a fine film\n\nÜnïcödé 漢字 🎉\u2028 :smile: [b]\n" + "long " * 3000 + "\n"
    (tmp_path / "texts.txt").write_text(lines)
    from_file = cli("predict", "demo", "--file", "texts.txt").out.splitlines(keepends=False)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    from_pipe = cli("predict", "demo").out
    assert "\n".join(from_file) == from_pipe.rstrip("\n").replace("\u2028", "\n")
    assert len(from_pipe.rstrip("\n").split("\n")) == 3
    assert from_pipe.split("\n")[1].split("\t")[0] == "Ünïcödé 漢字 🎉\u2028 :smile: [b]"
    monkeypatch.setattr("sys.stdin", io.StringIO("a film\tthe film\nb\tc\n"))
    records = [json.loads(line) for line in cli("predict", "demo", "--json").out.splitlines()]
    assert [record["texts"] for record in records] == [["a film", "the film"], ["b", "c"]]
    assert [list(answer) for answer in records[0]["predictions"]] == [
        ["task", "label", "probabilities"],
        ["task", "score"],
    ]


@pytest.mark.parametrize(
    ("arguments", "typed", "error"),
    [
        (["a", "b", "c"], "", "predict: takes one text, or two for a pair; 3 given. Use --file for many"),
        ([" "], "", "predict: a text is empty"),
        (["a", "--file", "x"], "", "predict: found texts and --file; give one of them"),
        (["--file", "none"], "", "none: cannot be read (No such file or directory); give a text file"),
        ([], "\n\n", "predict: no text given; write it after the run's name"),
        ([], "a\n\nb\tc\n", "stdin, line 3: has 2 texts, the first line 1; give as many"),
        ([], "a\tb\tc\n", "stdin, line 1: has 3 texts; give one a line, or two with a tab between"),
        ([], "a\t \n", "stdin, line 1: a text is empty; fill it or remove the line"),
        (["--task", "sentiment", "a", "b"], "", "task sentiment takes one text (sentence); 2 given"),
        (["--task", "mood", "a"], "", "demo has no task mood"),
    ],
)
def test_what_cannot_be_predicted(cli, runs, monkeypatch, arguments, typed, error):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    done = cli("predict", "demo", *arguments)
    assert done.code == 2
    assert done.error.startswith(error)
    assert done.out == ""


def test_a_table_is_answered_into_a_table(cli, runs, tmp_path):
    (tmp_path / "new.csv").write_text('id,title,sentence\nx7,t,"a film, fine"\nx8,t,"a\nfilm"\n')
    printed = cli("predict", "demo", "--file", "new.csv").out.splitlines()
    assert [line.split("\t")[0] for line in printed] == ["a film, fine", "a\\nfilm"]
    assert cli("predict", "demo", "--file", "new.csv", "--out", "out.csv").out == "out.csv: 2 answers\n"
    header, first, second = (line.split(",") for line in (tmp_path / "out.csv").read_text().splitlines())
    assert header == ["line", "id", "sentiment", "sentiment.negative", "sentiment.positive"]
    assert (first[:2], second[:2]) == (["2", "x7"], ["3", "x8"])
    assert f"sentiment: {first[2]} ({max(map(float, first[3:])):.3f})" == printed[0].split("\t")[1]
    cli("predict", "demo", "--file", "new.csv", "--text-columns", "2,3", "--out", "out.jsonl", "--with-text")
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [record["sentence"] for record in records] == ["a film, fine", "a\nfilm"]
    assert {"title", "paraphrase", "similarity"} <= records[0].keys()
    for arguments, error in (
        (["--out", "new.csv"], "--out new.csv: is the file that is read; name another"),
        (["--out", "x.txt"], "--out x.txt: the name does not say what to write"),
        (["--out", "x.csv", "--json"], "--json: prints, and --out x.csv writes; give one of them"),
        (["--with-text"], "--with-text: is for --out"),
        (["--no-header"], "--no-header: columns have numbers then; write --text-columns 1, or 1,2 for a pair"),
        (["--task", "similarity"], "new.csv: no task reads columns of it (similarity: sentence1, sentence2)"),
    ):
        done = cli("predict", "demo", "--file", "new.csv", *arguments)
        assert (done.code, done.error[: len(error)]) == (2, error)
    assert cli("predict", "demo", "a", "--text-columns", "b").error.startswith("--text-columns, --no-header: are for")


def test_what_a_client_kept_is_asked_for_by_its_name(cli, runs):
    done = cli("predict", "personal", "a film")
    assert done.code == 2
    assert done.error.startswith("personal: `heads.sentiment.weight` stays at the clients; name one with --client: ")
    assert cli("predict", "personal", "--client", "sentiment_client_1", "a film").out.startswith("sentiment: ")
    done = cli("predict", "personal", "--client", "sentiment_client_1", "a film", "the film")
    assert done.error == "personal has no task on two; those it has (sentiment) take one text"
    done = cli("evaluate", "personal", "--client", "sentiment_client_1", "--task", "similarity")
    assert done.error == (
        "personal: values of similarity stay at its clients; name one of them with --client: paraphrase_client_1,"
        " paraphrase_client_2, sentiment_client_1, sentiment_client_2, similarity_client_1, similarity_client_2"
    )


def test_runs_of_different_tasks_and_modes_stand_side_by_side(cli, runs):
    tasks = "tasks={sentiment: {train_samples: 40, val_samples: 24}}"
    cli("run", "--name", "single", *small("training.num_rounds=0", tasks))
    done = cli("compare", "demo", "central", "single")
    assert done.out.startswith("differences are to demo")
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in map(_cells, done.out.splitlines())}
    assert rows["mode"] == ["federated", "centralized", "federated"]
    assert rows["similarity pearson"][2] == "–"
    assert rows["rounds"] == ["2", "1", "0"]
    first, second, _ = rows["sentiment accuracy"]
    value, difference = second.split(" ")
    assert float(value) - float(first) == pytest.approx(float(difference.strip("()")), abs=2e-3)
    record = json.loads(cli("compare", "demo", "central", "--json").out)
    assert [run["name"] for run in record["runs"]] == ["demo", "central"]
    assert cli("compare", "demo").error == "compare: found only demo; name two runs or more"


def _cells(line: str) -> list[str]:
    return line.split("│") if line.startswith("│") else ["", "", ""]


def test_export_says_what_was_written_and_how_to_load_it(cli, runs, tmp_path):
    done = cli("export", "demo", "--to", "hf")
    lines = done.out.splitlines()
    assert (done.code, done.err) == (0, "")
    assert lines[0] == "sentiment: runs/demo/export/sentiment"
    assert (tmp_path / "runs/demo/export/sentiment/model.safetensors").exists()
    reason = "pairs are encoded apart (`pair: dual`), which plain classes of transformers cannot do"
    assert lines[1:3] == [f"paraphrase: {reason}", f"similarity: {reason}"]
    assert lines[3] == (
        "sentiment, paraphrase, similarity: runs/demo/export/every-task, with a modelling file of its own; load it with"
        ' AutoModel.from_pretrained("runs/demo/export/every-task", trust_remote_code=True)'
    )


def test_export_for_sentence_transformers_says_where_each_task_is(cli, runs, tmp_path):
    done = cli("export", "demo", "--to", "sentence-transformers")
    folder = "runs/demo/export/sentence-transformers"
    assert done.out.splitlines() == [f"{task}: {folder}" for task in ("sentiment", "paraphrase", "similarity")]
    assert "SentenceTransformer" in (tmp_path / folder / "README.md").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("words")
    done = cli("export", "demo", "--to", "sentence-transformers", "--out", "mine")
    assert done.error == "mine: is there already and is no earlier export; name another folder, or remove it"
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "words"


@pytest.mark.slow
def test_a_cross_pair_has_no_vector_of_a_text(cli):
    tasks = "tasks={paraphrase: {train_samples: 40, val_samples: 24}}"
    cli("run", "--name", "cross", *small("training.num_rounds=0", tasks, "model.pair=cross"))
    done = cli("export", "cross", "--to", "sentence-transformers")
    assert done.out.startswith("not written: paraphrase: reads two texts in one pass (`pair: cross`)")
    assert done.error == "cross: no task can be written for sentence-transformers, for the reasons above"
    # The advice is true.
    assert cli("export", "cross", "--to", "hf").code == 0


def test_what_needs_a_whole_model_says_what_helps_where_values_stay_at_clients(cli, runs):
    for cut in ("--amount", "--ffn"):
        assert cli("prune", "personal", cut, "0.5").error == (
            "personal: `heads.sentiment.weight` stayed at the clients, so there is no whole model to prune; train with"
            " it at level task (sharing.rules) and prune that run, or prune while training, with"
            " training.pruning.amount=0.2"
        )
    # The advice is true.
    personal = "sharing.rules=[{heads.*: client}, {'*': all}]"
    cli("run", "--name", "sparse", *small(personal, "training.num_rounds=1", "training.pruning={rounds: 1}"))
    assert '"event": "pruning"' in Path("runs/sparse/events.jsonl").read_text()


@pytest.mark.slow
def test_measure_names_commands_that_help_where_values_stay_at_clients(cli, runs):
    pytest.importorskip("onnxruntime")
    run = RunFolder(Path("runs/personal"))
    at = {"": None} | {f" --round {number}": run_at(run, number).model for number in ("last", 1)}
    for given, model in at.items():
        with pytest.raises(FedmtlError, match="stay at the clients; write a client's model with") as met:
            _load(run.path, model)
        written, measured = re.findall("`([^`]*)`", str(met.value))
        file = measured.removeprefix("fedmtl measure ")
        assert written.endswith(f" --client paraphrase_client_1{given} --out {file}")
    assert cli(*written.split()[1:]).code == 0
    # It lies where its data is known, so it can be scored.
    assert list(json.loads(cli("evaluate", file, "--json").out)["metrics"]) == ["paraphrase"]
    assert variants_of(file)[0].name == "personal/paraphrase_client_1"
    shutil.rmtree(run.clients)
    with pytest.raises(FedmtlError, match="stay at the clients, and none is in this folder"):
        _load(runs / "personal", None)


def test_report_is_written_again(cli, runs):
    (runs / "demo/report.html").unlink()
    assert cli("report", "demo").out == "runs/demo/report.html\n"
    assert (runs / "demo/report.html").read_text().startswith("<!doctype html>")


def test_prune_writes_a_run_with_its_sparsity(cli, runs):
    done = cli("prune", "demo", "--amount", "0.4", "--ffn", "0.5", "--epochs", "1", "--out", "small")
    assert done.code == 0
    assert "after the cut" in done.out
    assert "zero: 40." in done.out
    assert json.loads(cli("evaluate", "small", "--json").out)["metrics"].keys() == {
        "sentiment",
        "paraphrase",
        "similarity",
    }
    assert cli("prune", "demo").error.startswith("prune: nothing to take out; write --amount 0.2")
