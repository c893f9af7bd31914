"""What is found in examples, and that no text of them gets out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmtl.config.file import demo_config, load_config
from fedmtl.errors import DataError
from fedmtl.tasks.check import check_parts, label_problems, one_label_warnings, run_warnings, similar_labels
from fedmtl.tasks.load import load_tasks
from fedmtl.tasks.parts import Part, config_parts, file_parts
from fedmtl.tasks.sources import Table
from tasks.small_files import ROWS, write


def part(texts, labels, split="train", client="", **more):
    return Part(Table({"text": texts, "label": labels}, "made.tsv"), ("text",), "label", split, "mood", client, **more)


def codes(*parts):
    return {warning.code: warning.count for warning in check_parts(parts).warnings}


def test_examples_without_a_fault_have_no_warning():
    assert codes(part(["a b c", "d e", "f"], ["x", "y", "x"]), part(["g"], ["y"], "validation")) == {"label_once": 1}
    assert codes(part(["a", "b", "c", "d"], ["x", "y", "x", "y"]), part(["g"], ["y"], "validation")) == {}


def test_lengths_are_words():
    (facts,) = check_parts([part(["one", "one two", "one two three"], ["x", "y", "x"])]).parts
    assert facts.words == [1, 2, 3, 3]


def test_equal_texts_are_equal_but_for_case_and_spaces():
    found = check_parts(
        [
            part(["The  cat", "the cat", "a dog", "a cow"], ["x", "y", "x", "y"]),
            part(["THE CAT", "a bird"], ["x", "y"], "validation"),
            part(["a dog", "A DOG", "a fly"], ["x", "x", "y"], "test"),
        ]
    )
    (overlap,) = found.tasks
    assert (overlap.validation_in_train, overlap.test_in_train, overlap.conflicting) == (1, 2, 1)
    assert found.parts[0].repeated == 1


def test_texts_at_several_clients_are_counted_once():
    first = part(["a", "b", "c", "b"], ["x", "y", "x", "y"], client="one")
    second = part(["b", "c", "d"], ["y", "x", "x"], client="two")
    (overlap,) = check_parts([first, second]).tasks
    assert overlap.between_clients == 2


def test_a_pair_is_equal_only_as_a_whole():
    table = Table({"a": ["x y", "x y"], "b": ["z", "w"], "label": ["0", "1"]}, "made.tsv")
    found = check_parts([Part(table, ("a", "b"), "label")])
    assert found.parts[0].repeated == 0
    assert found.parts[0].words == [3, 3, 3, 3]


def test_a_client_with_one_label_is_named():
    parts = [part(["a", "b"], ["x", "x"], client="one"), part(["c", "d"], ["x", "y"], client="two")]
    (warning,) = [each for each in check_parts(parts).warnings if each.code == "one_class"]
    assert warning.where == "mood, one, train"


def test_scores_with_decimal_commas_are_found_and_are_no_classes():
    assert codes(part(["a", "b", "c"], ["3,5", "1.0", "2,25"])) == {"decimal_comma": 2}


def test_empty_texts_and_missing_labels_are_counted():
    assert codes(part(["a", " ", "c", "d", "e"], ["x", "y", "x", "y", ""])) == {"empty_text": 1, "missing_label": 1}


@pytest.mark.parametrize(
    ("labels", "pairs"),
    [
        ({"positive": 90, "positve": 2, "negative": 80}, [("positve", "positive")]),
        ({"positive": 90, "psoitive": 1}, [("psoitive", "positive")]),
        ({"positive": 90, "positives": 9}, [("positives", "positive")]),
        ({"World": 50, "world": 40}, [("world", "World")]),
        ({"World": 50, "World ": 3}, [("World ", "World")]),
        ({"1 star": 90, "2 star": 1}, []),
        ({"positive": 90, "positves": 1}, []),
        ({"acceptable": 900, "unacceptable": 2}, []),
        ({"cats": 50, "bats": 40}, []),
        ({"yes": 90, "yep": 1}, []),
        ({"yes": 90, "yess": 3, "no": 80, "noo": 2}, [("noo", "no"), ("yess", "yes")]),
        ({"yes": 90, "yse": 3}, [("yse", "yes")]),
        ({"no": 90, "on": 3}, []),
        ({"II": 90, "III": 3, "AA": 90, "AAA": 3, "XI": 90, "XII": 3}, []),
    ],
)
def test_labels_that_look_like_typing_mistakes(labels, pairs):
    assert similar_labels(labels) == pairs


def test_a_hundred_labels_of_one_example_are_one_warning():
    problems = list(label_problems({f"text {number}": 1 for number in range(100)}))
    assert [code for code, _, _ in problems] == ["many_labels"]


def test_personal_data_is_counted_by_rows_and_kinds():
    (facts,) = check_parts([part(["a@example.org b@example.org", "call 212-555-0123", "c"], ["x", "y", "x"])]).parts
    assert facts.personal == {"e-mail addresses": 2, "phone numbers": 1}
    assert facts.personal_rows == 2


def test_where_nobody_named_the_text_all_columns_but_the_label_are_searched():
    table = Table({"text": ["a", "b"], "from": ["a@example.org", ""], "label": ["c@example.org", "d"]}, "made.tsv")
    guessed = check_parts([Part(table, ("text",), "label", is_named=False)])
    named = check_parts([Part(table, ("text",), "label")])
    assert (guessed.personal_rows, named.personal_rows) == (1, 0)


def test_labels_are_named_only_where_they_can_be_no_text():
    texts = [f"text {number}" for number in range(12)]
    labels = ["good"] * 4 + ["bad"] * 4 + ["text 1"] * 2 + ["seen once", "a label of far too many words"]
    (facts,) = check_parts([part(texts, labels)]).parts
    assert (facts.labels, facts.other_labels) == ({"good": 4, "bad": 4}, 3)
    (guessed,) = check_parts([part(texts, labels, is_label_named=False)]).parts
    assert guessed.labels == {"#1": 4, "#2": 4, "#3": 2, "#4": 1, "#5": 1}


# Letters that no word of ours is written with, so that any of them in an output is a leak.
FOREIGN = "абвгдежзиклмнопрстуфхцчшщъыьэюя"
TEXTS = st.text(alphabet=FOREIGN + " @.0123456789", min_size=8, max_size=60)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TEXTS, min_size=4, max_size=20),
    st.data(),
)
def test_no_output_has_eight_letters_of_any_text(tmp_path_factory, texts, data):
    folder = tmp_path_factory.mktemp("leak")
    has_header, is_shifted = data.draw(st.booleans()), data.draw(st.booleans())
    labels = [data.draw(st.sampled_from(["good", "bad", *texts] if is_shifted else ["good", "bad"])) for _ in texts]
    rows = [f"{text}\t{label}" for text, label in zip(texts, labels, strict=True)]
    rows += rows[:2] * data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):
        rows.append(f"{texts[0]}\t{texts[1]}\t{texts[2]}")
    lines = ["text\tlabel", *rows] if has_header else rows
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    try:
        found = check_parts(file_parts([folder]))
        said = json.dumps(found.to_json(), ensure_ascii=False)
    except DataError as error:
        said = str(error)
    pieces = {text[at : at + 8] for text in texts for at in range(len(text) - 7)}
    assert not [piece for piece in pieces if piece.strip(" .0123456789") and piece in said]


def test_a_file_without_a_header_has_no_names_of_columns():
    table = Table({"a good film": ["x y", "b"], "positive": ["positive", "negative"]}, "made.tsv")
    found = check_parts([Part(table, ("a good film",), "positive", is_named=False, is_label_named=False)])
    assert found.parts[0].columns == ["column 1", "column 2"]
    assert "no_header" in {warning.code for warning in found.warnings}


@pytest.mark.parametrize("is_named", [True, False])
def test_names_of_some_words_are_names_where_a_config_or_another_column_says_so(is_named):
    text, label = ("Review text", "My verdict?") if is_named else ("Sentence A", "label")
    table = Table({text: ["x y", "b c"], label: ["good", "bad"]}, "made.tsv")
    found = check_parts([Part(table, (text,), label, is_named=is_named, is_label_named=is_named)])
    assert found.parts[0].columns == [text, label]
    assert "no_header" not in {warning.code for warning in found.warnings}


# Before a run


def test_a_run_is_warned_of_what_spoils_its_numbers(tmp_path):
    train = write(tmp_path / "train.tsv", [*ROWS, ("echo five", "z")])
    validation = write(tmp_path / "dev.tsv", [ROWS[0], ("fox six", "y")])
    task = {"kind": "classification", "text": ["text"], "label": "label"}
    source = {"train": str(train), "validation": str(validation)}
    config = load_config({"tasks": {"mood": task | {"source": source}}})
    assert run_warnings(load_tasks(config)) == [
        "mood: 1 of 2 validation examples are in train too",
        "mood: 1 label occurs in one training example only (`z`)",
    ]


@pytest.mark.parametrize(
    ("own", "more", "is_said"),
    [({}, {}, True), ({"validation": "dev.tsv"}, {}, False), ({}, {"evaluation": {"where": "clients"}}, False)],
)
def test_a_run_counts_examples_of_clients_files_that_neither_train_nor_score(tmp_path, own, more, is_said):
    train = write(tmp_path / "train.tsv", [(f"text {number}", "ab"[number % 2]) for number in range(40)])
    write(tmp_path / "dev.tsv", [("new one", "a"), ("new two", "b")])
    client = write(tmp_path / "client.tsv", [(f"more {number}", "ab"[number % 2]) for number in range(40)])
    own = {name: str(tmp_path / file) for name, file in own.items()}
    config = load_config({
        "tasks": {"mood": {"kind": "classification", "text": ["text"], "label": "label",
                           "source": {"train": str(train), "validation": str(tmp_path / "dev.tsv")}}},
        "clients": {"a": {"tasks": ["mood"]},
                    "b": {"tasks": ["mood"], "source": {"mood": {"train": str(client), **own}}}},
        **more,
    })  # fmt: skip
    said = run_warnings(load_tasks(config))
    # A tenth of 40 is cut.
    assert [line.startswith("mood: 4 examples of clients' files are cut for validation") for line in said] == [
        True
    ] * is_said


def test_a_run_names_clients_with_one_label():
    def counts(*labels):
        return {"mood": dict(zip(("x", "y"), labels, strict=True))}

    mixed = {"north": counts(3, 4), "south": counts(5, 0)}
    assert one_label_warnings(mixed, ["mood"]) == ["mood: south has examples of one label only"]
    more = mixed | {"west": counts(0, 2)}
    assert one_label_warnings(more, ["mood"]) == ["mood: 2 of 3 clients (south, ...) have examples of one label only"]
    assert one_label_warnings({"north": counts(3, 4)}, ["mood"]) == []
    assert one_label_warnings({"north": counts(3, 0), "south": counts(4, 0)}, ["mood"]) == []


def mood_of(path, **more):
    task = {"kind": "classification", "text": ["text"], "label": "label", "source": {"train": str(path)}}
    return load_config({"tasks": {"mood": task}, **more})


def test_a_run_names_a_label_that_looks_like_a_typing_mistake(tmp_path):
    rows = [(f"text {number}", ("positive", "negative")[number % 2]) for number in range(60)]
    path = write(tmp_path / "train.tsv", [*rows, ("text 61", "positve"), ("text 62", "positve")])
    (said,) = run_warnings(load_tasks(mood_of(path, data={"validation_fraction": 0.02})))
    assert "(`positve`) is but for a letter, case or spaces a label of " in said
    assert "(`positive`); is it a typing mistake?" in said


def test_a_run_does_not_name_a_label_that_may_be_a_text(tmp_path):
    rows = [(f"text {number}", ("good", "bad")[number % 2]) for number in range(40)]
    path = write(tmp_path / "train.tsv", [*rows, ("text", "a whole sentence in the wrong column")])
    said = " ".join(run_warnings(load_tasks(mood_of(path, data={"validation_fraction": 0.02}))))
    assert "sentence" not in said


def test_a_run_is_warned_of_labels_with_decimal_commas(tmp_path):
    rows = [(f"text {number}", ("1,5", "2,5", "4")[number % 3]) for number in range(30)]
    said = run_warnings(load_tasks(mood_of(write(tmp_path / "train.tsv", rows))))
    assert said == [
        "mood: 2 labels are numbers with a decimal comma; for scores write 3.5, not 3,5, and `kind: regression`"
    ]


def test_a_run_counts_the_texts_that_the_cut_of_validation_leaves_together(tmp_path):
    rows = [
        (f"Text  {number % 20}" if number < 20 else f"text {number % 20}", "xy"[number % 2]) for number in range(40)
    ]
    config = mood_of(write(tmp_path / "train.tsv", rows), data={"validation_fraction": 0.25})
    data = load_tasks(config)
    train, validation = (
        {text.lower().split()[1] for text in part.texts[0]} for part in (data["mood"].train, data["mood"].validation)
    )
    assert not train & validation
    assert (len(data["mood"].train), len(data["mood"].validation)) == (30, 10)
    assert run_warnings(data) == [
        "mood: 20 examples have the text of another; the cut of validation leaves equal texts on one side"
    ]


def test_the_data_of_the_package_is_passed_over():
    assert run_warnings(load_tasks(demo_config([]))) == []


def test_scores_and_labels_that_a_run_refuses_are_counted():
    scores = part(["a", "b", "c", "d", "e"], ["7", "n/a", "2", "", "-1"], is_scored=True, score_range=(1.0, 5.0))
    said = {warning.code: (warning.count, warning.words) for warning in check_parts([scores]).warnings}
    assert said == {
        "missing_label": (1, "1 example has no label; a run refuses it, mend the row"),
        "score_invalid": (
            1,
            "1 example has a score that is no number, the first in row 2; a run refuses it, mend the row",
        ),
        "score_outside": (
            2,
            "2 examples have a score outside 1 to 5, the first in row 1; a run refuses them, mend the rows",
        ),
    }
    labels = part(["a", "b", "c", "d"], ["x", "y", "x", "z"], known=("x", "y"))
    assert codes(labels)["label_unknown"] == 1
    assert "label_unknown" not in codes(part(["a", "b", "c", "d"], ["x", "y", "x", "y"], known=("x", "y")))


def test_a_config_says_which_scores_and_labels_a_run_takes(tmp_path):
    (tmp_path / "a.tsv").write_text("text\tlabel\none\t7\ntwo\tn/a\nthree\t2\n")
    score = f"kind: regression, text: text, label: label, score_range: [1, 5], source: {{train: {tmp_path / 'a.tsv'}}}"
    found = codes(*config_parts(load_config(None, [f"tasks.stars={{{score}}}"])))
    assert (found["score_invalid"], found["score_outside"]) == (1, 1)
    label = score.replace("regression", "classification").replace("score_range: [1, 5]", "labels: ['7', '2']")
    assert codes(*config_parts(load_config(None, [f"tasks.stars={{{label}}}"])))["label_unknown"] == 1
