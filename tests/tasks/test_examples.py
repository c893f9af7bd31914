import numpy as np
import pytest

from fedmtl.errors import DataError
from fedmtl.tasks.examples import drop_empty_texts, examples_from, join_examples, labels_in, no_examples
from fedmtl.tasks.sources import Table
from fedmtl.tasks.task import Task

SST2 = Task("sst2", "classification", ("sentence",), "label", "accuracy", ("negative", "positive"))
OWN = Task("mine", "classification", ("message",), "topic", "accuracy", ("bill", "card"))
STSB = Task("stsb", "regression", ("a", "b"), "score", "pearson", score_range=(1.0, 5.0))


def table(**columns: list[str]) -> Table:
    count = len(next(iter(columns.values())))
    return Table(columns, "a.tsv", range(2, count + 2), "line")


def test_builtin_labels_are_names_or_indices():
    examples = examples_from(table(sentence=["a", "b", "c"], label=["positive", "0", "1"]), SST2)
    assert examples.labels.dtype == np.int64
    assert examples.labels.tolist() == [1, 0, 1]
    assert examples.texts == (["a", "b", "c"],)


def test_index_is_not_taken_where_labels_are_numbers_themselves():
    stars = Task("sst2", "classification", ("sentence",), "label", "accuracy", ("1", "2"))
    assert examples_from(table(sentence=["a", "b"], label=["1", "2"]), stars).labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="label '0'"):
        examples_from(table(sentence=["a"], label=["0"]), stars)


def test_scores_are_scaled_to_0_1():
    # (score - 1) / (5 - 1): 1 -> 0, 2 -> 0.25, 5 -> 1
    examples = examples_from(table(a=["x"] * 3, b=["y"] * 3, score=["1", "2.0", "5"]), STSB)
    assert examples.labels.dtype == np.float32
    assert examples.labels.tolist() == [0.0, 0.25, 1.0]


def test_take_keeps_texts_labels_and_column_together():
    examples = examples_from(
        table(message=["a", "b", "c"], topic=["bill", "card", "bill"], site=["x", "y", "z"]), OWN, "site"
    )
    taken = examples.take(np.array([2, 1]))
    assert (taken.texts, taken.labels.tolist(), taken.column) == ((["c", "b"],), [0, 1], ["z", "y"])
    assert len(taken) == 2
    assert len(examples.take([])) == 0


def test_join_puts_parts_one_after_the_other():
    one = examples_from(table(a=["1"], b=["2"], score=["1"]), STSB)
    two = examples_from(table(a=["3"], b=["4"], score=["5"]), STSB)
    joined = join_examples(STSB, [one, two])
    assert (joined.texts, joined.labels.tolist()) == ((["1", "3"], ["2", "4"]), [0.0, 1.0])
    assert joined.labels.dtype == np.float32
    assert (len(no_examples(STSB)), len(join_examples(SST2, []))) == (0, 0)


@pytest.mark.parametrize(
    ("task", "columns", "message"),
    [
        (OWN, {"text": ["a"], "topic": ["bill"]}, "a.tsv: has no column 'message'; write one of text, topic"),
        (OWN, {"message": ["a"], "topik": ["bill"]}, "one of message, topik under tasks.mine.label"),
        (
            OWN,
            {"message": ["a", "b"], "topic": ["bill", "loan"]},
            "a.tsv, line 3: label 'loan' in column topic is not one of bill, card; mend",
        ),
        (OWN, {"message": ["a"], "topic": ["0"]}, "line 2: label '0'"),
        (SST2, {"sentence": ["a"], "label": ["2"]}, "is not one of negative, positive (or 0 to 1)"),
        (
            OWN,
            {"message": ["a", " ", ""], "topic": ["bill"] * 3},
            "line 3: column message is empty, in 2 of 3 rows",
        ),
        (STSB, {"a": ["x"], "b": [""], "score": ["1"]}, "line 2: column b is empty"),
        (
            STSB,
            {"a": ["x"] * 2, "b": ["y"] * 2, "score": ["1", "high"]},
            "line 3: score 'high' in column score is",
        ),
        (
            STSB,
            {"a": ["x"] * 2, "b": ["y"] * 2, "score": ["0.5", "high"]},
            "line 2: score '0.5' in column score lies",
        ),
        (STSB, {"a": ["x"], "b": ["y"], "score": ["nan"]}, "score 'nan' in column score is not a number"),
        (STSB, {"a": ["x"], "b": ["y"], "score": [""]}, "score '' in column score is not a number"),
    ],
)
def test_what_does_not_fit_is_one_line_that_says_where(task, columns, message):
    with pytest.raises(DataError) as error:
        examples_from(table(**columns), task)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_partition_column_is_an_error():
    with pytest.raises(DataError, match=r"no column 'site'.*under partition\.column"):
        examples_from(table(message=["a"], topic=["bill"]), OWN, "site")


def test_found_labels_sort_as_numbers_where_all_are():
    assert labels_in([table(topic=["10", "9"]), table(topic=["2", ""])], OWN) == ["2", "9", "10"]
    assert labels_in([table(topic=["10", "9", "nan"])], OWN) == ["10", "9", "nan"]


def test_a_single_label_is_an_error():
    with pytest.raises(DataError, match="column topic holds only the label 'bill'"):
        labels_in([table(topic=["bill", "bill"])], OWN)
    with pytest.raises(DataError, match="holds no label"):
        labels_in([table(topic=[""])], OWN)


def test_dropping_empty_texts_keeps_the_numbers_of_the_rest():
    kept, num_dropped = drop_empty_texts(table(a=["x", "x", "x"], b=["y", " ", "z"], score=["1", "2", "3"]), ["a", "b"])
    assert (kept.columns["score"], num_dropped, kept.location(1)) == (["1", "3"], 1, "a.tsv, line 4")
