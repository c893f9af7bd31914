from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmtl.config import Config
from fedmtl.errors import ConfigError, DataError
from fedmtl.tasks import load
from fedmtl.tasks.examples import Examples
from fedmtl.tasks.load import TaskData, load_tasks
from fedmtl.tasks.sources import Table


def write(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("sentence", "label")) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join("\t".join(row) + "\n" for row in [header, *rows]))
    return str(path)


def rows(count: int, prefix: str = "t", labels: tuple[str, ...] = ("0", "1")) -> list[tuple[str, ...]]:
    return [(f"{prefix}{row}", labels[row % len(labels)]) for row in range(count)]


def load_one(name: str, keys: dict[str, Any] | None = None, **rest: Any) -> TaskData:
    return load_tasks(Config.model_validate({"tasks": {name: keys or {}}, **rest}))[name]


def own(train: str, **keys: Any) -> dict[str, Any]:
    return {
        "kind": "classification",
        "source": {"train": train},
        "text": ["sentence"],
        "label": "label",
        **keys,
    }


@pytest.fixture
def root(tmp_path):
    write(tmp_path / "sst2" / "train.tsv", rows(20))
    write(tmp_path / "sst2" / "dev.tsv", rows(4, "d"))
    write(tmp_path / "imdb" / "train.tsv", rows(20))
    write(tmp_path / "imdb" / "test.tsv", rows(20, "secret"))
    return tmp_path


def test_files_under_data_root(root):
    data = load_one("sst2", data={"root": str(root)})
    assert (len(data.train), data.validation.texts) == (20, (["d0", "d1", "d2", "d3"],))
    assert data.train.labels.tolist() == [0, 1] * 10
    assert (data.origin, data.synthetic, data.validation_cut) == (f"files in {root / 'sst2'}", False, False)


def test_validation_is_cut_from_train_and_never_from_test(root):
    # round(20 * 0.25) = 5
    settings = {"root": str(root), "validation_fraction": 0.25}
    data = load_one("imdb", data=settings)
    train, validation = data.train.texts[0], data.validation.texts[0]
    assert (len(train), len(validation), data.validation_cut) == (15, 5, True)
    assert sorted(train + validation) == sorted(f"t{row}" for row in range(20))
    assert load_one("imdb", data=settings).validation.texts[0] == validation
    assert load_one("imdb", data=settings, seed=1).validation.texts[0] != validation


def test_a_cut_takes_at_least_one_example(root):
    data = load_one("imdb", data={"root": str(root), "validation_fraction": 0.001})
    assert (len(data.train), len(data.validation)) == (19, 1)


@pytest.mark.parametrize(
    ("task", "labels"),
    [("mnli", 3), ("qnli", 2), ("wnli", 2), ("cfimdb", 2), ("sst5", 5)],
)
def test_tasks_whose_data_is_not_here_are_read_from_files(tmp_path, task, labels):
    is_pair = task in ("mnli", "qnli", "wnli")
    header = ("sentence1", "sentence2", "label") if is_pair else ("sentence", "label")
    table = [(f"a{row}", *(["b"] if is_pair else []), str(row % labels)) for row in range(12)]
    write(tmp_path / task / "train.tsv", table, header)
    data = load_one(task, data={"root": str(tmp_path), "source": "files"})
    assert (len(data.task.labels), data.task.outputs) == (labels, labels)
    assert sorted(data.train.labels.tolist() + data.validation.labels.tolist()) == sorted(
        row % labels for row in range(12)
    )


def test_a_csv_of_tabs_is_read_and_the_origin_says_so(tmp_path):
    (tmp_path / "train.csv").write_text(
        "\tid\tsentence\tlabel\n" + "".join(f"{n}\tx\tt{n}\t{n % 2}\n" for n in range(9))
    )
    data = load_one("sst2", {"source": {"train": str(tmp_path / "train.csv")}})
    assert data.origin == f"files in {tmp_path}; train.csv is separated by tabs, and is read so"
    brought = {"tasks": ["sst2"], "source": {"sst2": str(tmp_path / "train.csv")}}
    data = load_one("sst2", clients={"a": brought, "b": brought})
    assert data.origin == "files of 2 clients; train.csv is separated by tabs, and is read so, so are 1 more"
    other = {"source": {"train": str(tmp_path / "train.csv"), "delimiter": "comma"}}
    with pytest.raises(DataError, match="has no column"):
        load_one("sst2", other)


def test_missing_train_file_names_what_to_put_there(root):
    with pytest.raises(DataError, match=r"rte: has no train file; put train\.tsv\.gz there"):
        load_one("rte", data={"root": str(root)})


def test_samples_are_drawn_by_seed_and_more_than_there_are_is_all(root):
    keys, data = {"train_samples": 6, "val_samples": 99}, {"root": str(root)}
    drawn = load_one("sst2", keys, data=data)
    assert (len(drawn.train), len(drawn.validation)) == (6, 4)
    assert load_one("sst2", keys, data=data).train.texts == drawn.train.texts
    assert load_one("sst2", keys, data=data, seed=1).train.texts != drawn.train.texts
    assert {int(text[1:]) % 2 for text in drawn.train.texts[0]} == {0, 1}
    assert [int(text[1:]) % 2 for text in drawn.train.texts[0]] == drawn.train.labels.tolist()


@pytest.fixture
def embedded(monkeypatch):
    def embedded_columns(task: str, split: str, seed: int = 0) -> dict[str, list[str]]:
        columns = {
            "sentiment": {"sentence": ["bad", "good"], "label": ["negative", "positive"]},
            "paraphrase": {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": ["same", "different"]},
            "similarity": {"sentence1": ["a"], "sentence2": ["c"], "label": ["2.5"]},
        }
        return {
            name: [f"{split} {v}" if name[0] == "s" else v for v in values] for name, values in columns[task].items()
        }

    monkeypatch.setattr(load, "embedded_columns", embedded_columns)


@pytest.mark.parametrize(
    ("name", "labels"),
    [("sst2", [0, 1]), ("sentiment", [0, 1]), ("qqp", [1, 0]), ("paraphrase", [1, 0]), ("stsb", [0.5])],
)
def test_embedded_data(embedded, name, labels):
    data = load_one(name, data={"source": "embedded"})
    assert data.train.labels.tolist() == labels
    assert data.validation.texts[0][0].startswith("validation ")
    assert (data.origin, data.synthetic, data.task.name) == ("embedded (synthetic)", True, name)


def test_the_embedded_datas_own_words_may_be_named(embedded):
    data = load_one("qqp", {"labels": ["same", "different"]}, data={"source": "embedded"})
    assert data.task.labels == ("same", "different")
    assert data.train.labels.tolist() == [0, 1]


def test_embedded_names_stay_embedded_beside_data_root(embedded, root):
    data = load_tasks(Config.model_validate({"tasks": {"sst2": {}, "similarity": {}}, "data": {"root": str(root)}}))
    assert {name: entry.synthetic for name, entry in data.items()} == {"sst2": False, "similarity": True}


def test_hub_columns_get_our_names_and_rows_without_text_are_left_out(monkeypatch):
    asked = []

    def read_hub(source, split, *, task, known):
        asked.append((source.hub, source.subset, split, task))
        columns = {"question1": ["a", "b", "c"], "question2": ["d", "", "f"], "label": ["1", "0", "0"]}
        return Table(columns, f"hub {split}")

    monkeypatch.setattr(load, "read_hub", read_hub)
    data = load_one("qqp")
    assert asked == [("nyu-mll/glue", "qqp", "train", "qqp"), ("nyu-mll/glue", "qqp", "validation", "qqp")]
    assert (data.train.texts, data.train.labels.tolist()) == ((["a", "c"], ["d", "f"]), [1, 0])
    assert data.origin == "hub nyu-mll/glue/qqp, 2 rows without text left out"
    assert load_one("qqp", {"text": ["question2", "question1"]}).train.texts[0] == ["d", "f"]


def test_hub_without_a_validation_split_is_cut(monkeypatch):
    columns = {"text": [f"t{row}" for row in range(10)], "label": ["0", "1"] * 5}
    monkeypatch.setattr(load, "read_hub", lambda source, split, task, known: Table(columns, split))
    data = load_one("imdb")
    assert (len(data.train), len(data.validation), data.validation_cut) == (9, 1, True)


def test_own_task_finds_its_labels_in_the_whole_train_file(tmp_path):
    train = write(tmp_path / "train.tsv", rows(12, labels=("10", "9", "2")))
    data = load_one("mine", own(train))
    assert data.task.labels == ("2", "9", "10")
    assert data.task.outputs == 3
    with pytest.raises(ConfigError, match=r"tasks\.mine\.class_weights: found 2 weights for 3 labels"):
        load_one("mine", own(train, class_weights=[1, 2]))


def test_own_task_with_one_label_is_an_error(tmp_path):
    with pytest.raises(DataError, match="holds only the label 'x'"):
        load_one("mine", own(write(tmp_path / "train.tsv", rows(4, labels=("x",)))))


def test_clients_bring_their_own_files(root):
    clients = {
        "a": {"tasks": ["sst2"], "source": {"sst2": write(root / "a.tsv", rows(10, "a"))}},
        "b": {"tasks": ["sst2"]},
    }
    data = load_one("sst2", data={"root": str(root)}, clients=clients)
    assert (len(data.train), len(data.validation)) == (20, 4)
    # round(10 * 0.1) = 1 of a's own examples scores a
    assert {name: len(part) for name, part in data.client_train.items()} == {"a": 9}
    assert {name: len(part) for name, part in data.client_validation.items()} == {"a": 1}
    assert not data.validation_cut


def test_a_task_may_live_in_its_clients_files_alone(tmp_path):
    b = {
        "train": write(tmp_path / "b.tsv", rows(4, "b", ("no", "maybe"))),
        "validation": write(tmp_path / "bv.tsv", rows(2, "v", ("no", "yes"))),
    }
    clients = {
        "a": {"tasks": ["mine"], "source": {"mine": write(tmp_path / "a.tsv", rows(20, "a", ("no", "yes")))}},
        "b": {"tasks": ["mine"], "source": {"mine": b}},
    }
    keys = {"kind": "classification", "text": ["sentence"], "label": "label"}
    data = load_one("mine", keys, clients=clients)
    # Labels are those of all train files; validation is round(20 * 0.1) = 2 of a's and the 2 of b's file.
    assert data.task.labels == ("maybe", "no", "yes")
    assert (len(data.train), len(data.validation)) == (0, 4)
    assert data.train.labels.dtype == np.int64
    assert data.validation.texts[0][2:] == ["v0", "v1"]
    assert {name: len(part) for name, part in data.client_train.items()} == {"a": 18, "b": 4}
    assert (data.origin, data.validation_cut) == ("files of 2 clients", True)


def test_examples_that_are_dealt_to_nobody_are_not_kept(root):
    clients = {"a": {"tasks": ["mine"], "source": {"mine": write(root / "a.tsv", rows(10, "a"))}}}
    data = load_one("mine", own(str(root / "sst2" / "train.tsv")), clients=clients)
    # Validation is round(20 * 0.1) = 2 of the task's own file.
    assert (len(data.train), len(data.validation), len(data.client_train["a"])) == (0, 2, 9)


def test_partition_column_travels_with_train(tmp_path):
    table = [(f"t{row}", str(row % 2), f"site{row % 3}") for row in range(12)]
    train = write(tmp_path / "train.tsv", table, ("sentence", "label", "site"))
    column = {"kind": "column", "column": "site"}
    data = load_one("mine", own(train, train_samples=6), partition=column)
    assert data.train.column == [f"site{int(text[1:]) % 3}" for text in data.train.texts[0]]
    assert data.validation.column is None


def test_config_errors_come_before_files_are_read(tmp_path):
    tasks = {"mine": own(str(tmp_path / "missing.tsv")), "sst2": {"metric": "pearson"}}
    with pytest.raises(ConfigError, match=r"tasks\.sst2\.metric"):
        load_tasks(Config.model_validate({"tasks": tasks}))


def test_the_only_example_cannot_be_cut(tmp_path):
    train = write(tmp_path / "train.tsv", rows(1))
    with pytest.raises(DataError, match="has one example"):
        load_one("mine", own(train, labels=["0", "1"]))


# Equal texts where validation is cut


def cut(texts, most):
    examples = Examples((texts,), np.zeros(len(texts), np.int64))
    chosen, repeated = load._cut(examples, np.arange(len(texts)), most)
    return np.flatnonzero(chosen).tolist(), repeated


def test_texts_that_differ_are_cut_in_their_order():
    assert cut(["a", "b", "c", "d"], 2) == ([0, 1], 0)


def test_equal_texts_are_on_one_side_and_what_does_not_fit_is_train():
    # `b` fits with its copy; of `a` there are three, for which validation has no capacity.
    assert cut(["a", "b", "a", "A ", "B", "c"], 2) == ([1, 4], 3)
    assert cut(["a", "b", "a", "A ", "c"], 2) == ([1, 4], 2)


def test_texts_that_are_all_repeated_are_cut_too():
    assert cut(["a", "a", "a", "b", "b"], 1) == ([3, 4], 3)
    assert cut(["a", "a", "a"], 1) == ([0], 2)
