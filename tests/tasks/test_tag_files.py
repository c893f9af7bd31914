"""Tagged texts are read as people and their tools write them, and each mistake is a line that says where it is."""

import gzip
import json

import pytest

from fedmtl.errors import DataError
from fedmtl.tasks.tag_files import looks_tagged, read_tags, tagged_rows
from fedmtl.tasks.words import SEPARATOR, join_words, plain_text, split_words

TEXT = "Ada Lovelace met Charles Babbage in London."


def write(folder, name, content):
    path = folder / name
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return path


def records(*objects):
    return "\n".join(json.dumps(each) for each in objects) + "\n"


def spans_of(table):
    """(type, words) of every row's spans."""
    found = []
    for text, cell in zip(table.columns["tokens"], table.columns["tags"], strict=True):
        words = [plain_text(text)[start:end] for start, end in split_words(text)]
        tags = cell.split(SEPARATOR)
        assert len(words) == len(tags)
        rows = []
        for word, tag in zip(words, tags, strict=True):
            if tag.startswith("B-"):
                rows.append((tag[2:], word))
            elif tag.startswith("I-"):
                rows[-1] = (rows[-1][0], f"{rows[-1][1]} {word}")
        found.append(rows)
    return found


PEOPLE = [("PER", "Ada Lovelace"), ("PER", "Charles Babbage"), ("LOC", "London")]
TEXT_WORDS = TEXT.replace(".", " .").split()
IOB2 = ["B-PER", "I-PER", "O", "B-PER", "I-PER", "O", "B-LOC", "O"]


def columns(tags, between="\t", more=False):
    rows = [f"{word}{between}NN{between}{tag}" if more else f"{word}{between}{tag}"
            for word, tag in zip(TEXT_WORDS, tags, strict=True)]  # fmt: skip
    return "\n".join(rows) + "\n"


FILES = {
    "tabs.conll": columns(IOB2),
    "spaces.conll": columns(IOB2, " "),
    "four.conll": columns(IOB2, " ", more=True),
    "windows.conll": columns(IOB2).replace("\n", "\r\n"),
    "doc.conll": f"-DOCSTART- -X- O O\n\n{columns(IOB2)}",
    "comment.bio": f"# id = 1\n# text = {TEXT}\n{columns(IOB2)}",
    "bom.iob": b"\xef\xbb\xbf" + columns(IOB2).encode(),
    "zipped.iob2.gz": columns(IOB2),
    "named.tsv": columns(IOB2),
    "plain.txt": columns(IOB2),
    "iob1.conll": columns(["I-PER", "I-PER", "O", "I-PER", "I-PER", "O", "I-LOC", "O"]),
    "iobes.conll": columns(["B-PER", "E-PER", "O", "B-PER", "E-PER", "O", "S-LOC", "O"]),
    "bilou.conll": columns(["B-PER", "L-PER", "O", "B-PER", "L-PER", "O", "U-LOC", "O"]),
    "lists.jsonl": records({"tokens": TEXT_WORDS, "tags": IOB2}),
    "other_names.jsonl.gz": records({"id": 3, "words": TEXT_WORDS, "ner_tags": IOB2}),
    "doccano.jsonl": records({"id": 1, "text": TEXT, "label": [[0, 12, "PER"], [17, 32, "PER"], [36, 42, "LOC"]]}),
    "doccano_objects.jsonl": records(
        {
            "text": TEXT,
            "entities": [
                {"id": n, "label": kind, "start_offset": start, "end_offset": end}
                for n, (start, end, kind) in enumerate([(36, 42, "LOC"), (0, 12, "PER"), (17, 32, "PER")])
            ],
        }
    ),
    "prodigy.jsonl": records(
        {
            "text": TEXT,
            "tokens": [{"text": "Ada", "start": 0, "end": 3, "id": 0}],
            "spans": [
                {"start": start, "end": end, "label": kind}
                for start, end, kind in [(0, 12, "PER"), (17, 32, "PER"), (36, 42, "LOC")]
            ],
            "answer": "accept",
        },
        {"text": TEXT, "spans": [], "answer": "reject"},
    ),
    "label_studio.jsonl": records(
        {
            "data": {"text": TEXT},
            "annotations": [
                {"was_cancelled": True, "result": []},
                {
                    "result": [
                        {"type": "labels", "value": {"start": start, "end": end, "labels": [kind]}}
                        for start, end, kind in [(0, 12, "PER"), (17, 32, "PER"), (36, 42, "LOC")]
                    ]
                },
            ],
        }
    ),
    # Spans that take the spaces around them along.
    "spaces.jsonl": records({"text": TEXT, "spans": [[0, 13, "PER"], [16, 33, "PER"], [36, 42, "LOC"]]}),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_read_as_its_tool_wrote_it(tmp_path, name):
    table = read_tags(write(tmp_path, name, FILES[name]), "tokens", "tags")
    assert spans_of(table) == [PEOPLE]


def test_sentences_end_with_a_blank_line_and_know_where_they_stand(tmp_path):
    table = read_tags(write(tmp_path, "a.conll", "a\tO\nb\tO\n\n\nc\tB-X\n"), "tokens", "tags")
    assert table.columns["tokens"] == [join_words(["a", "b"]), join_words(["c"])]
    assert (table.numbers, table.unit) == ([1, 5], "line")


def test_any_column_may_be_the_word_or_the_tag(tmp_path):
    path = write(tmp_path, "a.conll", "1 Ada B-PER _\n2 ran O _\n")
    table = read_tags(path, "2", "3")
    assert table.columns == {"2": [join_words(["Ada", "ran"])], "3": [f"B-PER{SEPARATOR}O"]}


def test_a_hash_may_be_a_word(tmp_path):
    path = write(tmp_path, "a.conll", "#ESB\tB-LOC\nis\tO\n#\tO\n# newdoc\n\n# 1\tO\n")
    assert read_tags(path, "tokens", "tags").columns["tokens"] == [join_words(["#ESB", "is", "#"]), join_words(["# 1"])]


def test_other_values_of_a_record_stay_columns(tmp_path):
    path = write(tmp_path, "a.jsonl", records({"tokens": ["a"], "tags": ["O"], "clinic": "north", "n": 1}))
    table = read_tags(path, "tokens", "tags")
    assert (table.columns["clinic"], table.columns["n"]) == (["north"], ["1"])


def test_numbers_of_class_labels_are_read_by_their_names():
    names = {"ner_tags": ["O", "B-PER", "I-PER"]}
    table = tagged_rows({"tokens": [["Ada", "ran"]], "ner_tags": [[1, 0]]}, "hub x", "tokens", "tags", names.get)
    assert table.columns["tags"] == [f"B-PER{SEPARATOR}O"]


def test_a_parquet_file_of_datasets_names_its_numbers(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    features = {"ner_tags": {"feature": {"names": ["O", "B-PER", "I-PER"], "_type": "ClassLabel"}, "_type": "List"}}
    written = pyarrow.table({"tokens": [["Ada", "Lovelace", "ran"], ["so"]], "ner_tags": [[1, 2, 0], [0]]})
    about = {b"huggingface": json.dumps({"info": {"features": features}}).encode()}
    parquet.write_table(written.replace_schema_metadata(about), tmp_path / "a.parquet")
    assert spans_of(read_tags(tmp_path / "a.parquet", "tokens", "tags")) == [[("PER", "Ada Lovelace")], []]
    parquet.write_table(written, tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"b.parquet, row 1: its tags are numbers without names"):
        read_tags(tmp_path / "b.parquet", "tokens", "tags")


def test_a_tag_that_cannot_stand_there_is_said_with_its_line_and_read_by_the_usual_rule(tmp_path):
    path = write(tmp_path, "a.conll", "Ada\tB-PER\nran\tO\nto\tI-LOC\nYork\tI-LOC\n\nx\tB-LOC\ny\tI-PER\n")
    table = read_tags(path, "tokens", "tags")
    assert spans_of(table) == [[("PER", "Ada"), ("LOC", "to York")], [("LOC", "x"), ("PER", "y")]]
    assert table.note.startswith(
        f"2 texts have a tag that IOB2 does not have there, the first is I-LOC at {path}, line 3; it is read as"
    )


def test_records_without_an_accepted_answer_are_counted(tmp_path):
    table = read_tags(write(tmp_path, "a.jsonl", FILES["prodigy.jsonl"]), "tokens", "tags")
    assert table.note == "1 records without an accepted answer are left out"


LONG = "".join(f"w{n}\tO\n" for n in range(5001))
# File, content, and what is said: after the file's name.
MISTAKES = [
    ("type_alone.conll", "a\tO\nAda\tPER\n", "line 2: 'PER' is no tag, such as O, B-PER or I-PER"),
    ("lower.conll", "a\tO\nAda\tb-PER\n", "line 2: 'b-PER' is no tag; write B-PER"),
    ("underscore.conll", "Ada\tB_PER\n", "line 1: 'B_PER' is no tag; write B-PER"),
    ("no_type.conll", "Ada\tB-\n", "line 1: 'B-' is no tag"),
    ("small_o.conll", "a\to\n", "line 1: 'o' is no tag; write O"),
    ("zero.conll", "a\tO\nb\t0\n", "line 2: '0' is no tag; write O"),
    ("pos_column.conll", "Ada B-PER NNP\nran O VBD\n", "line 1: 'NNP' is no tag"),
    ("one_column.conll", "Ada\n", "line 1: has one column; write a word and its tag"),
    ("missing.conll", "Ada\tB-PER\nLovelace\n", "line 2: has one column"),
    ("ragged.conll", "Ada NN B-PER\nran O\n", "line 2: has 2 columns, the first line 3"),
    ("space_in_word.conll", "New York B-LOC\nran O\n", "line 2: has 2 columns, the first line 3"),
    ("empty_word.conll", "Ada\tB-PER\n\tO\n", "line 2: its word is empty"),
    ("no_blank_lines.conll", LONG, "line 5001: 5,000 words since line 1 without a blank line"),
    ("latin.conll", "Zürich\tB-LOC\n".encode("latin-1"), "line 1: is not UTF-8; convert it"),
    ("empty.conll", "\n\n", "is empty; it needs tagged texts"),
    ("only_comments.conll", "# nothing\n-DOCSTART- O\n", "holds no tagged text"),
    ("table.csv", "word,tag\n", "is no file of tagged texts; use CoNLL columns"),
    ("broken.jsonl", '{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a"\n', "line 2: "),
    ("list.jsonl", '["a", "O"]\n', "line 1: is no JSON object"),
    ("no_tags.jsonl", records({"tokens": ["a"]}), "line 1: has no list of tags; name it under the task's `label`"),
    ("no_words.jsonl", records({"mail": "a", "tags": ["O"]}), "line 1: has neither a list of words nor a text"),
    ("ragged.jsonl", records({"tokens": ["a", "b"], "tags": ["O"]}), "line 1: has 2 words and 1 tags"),
    ("no_word.jsonl", records({"tokens": [], "tags": []}), "line 1: has no words"),
    ("blank_word.jsonl", records({"tokens": ["a", " "], "tags": ["O", "O"]}), "line 1: word 2 is empty"),
    ("number_word.jsonl", records({"tokens": ["a", 5], "tags": ["O", "O"]}), "line 1: word 2 is no text"),
    ("numbers.jsonl", records({"tokens": ["a"], "tags": [1]}), "line 1: its tags are numbers without names"),
    ("null_tag.jsonl", records({"tokens": ["a"], "tags": [None]}), "line 1: None is no tag"),
    (
        "overlap.jsonl",
        records({"text": TEXT, "spans": [[0, 12, "PER"], [4, 12, "X"]]}),
        "line 1: the span 4 to 12 over",
    ),
    ("twice.jsonl", records({"text": TEXT, "spans": [[0, 3, "PER"], [0, 3, "PER"]]}), "line 1: the span 0 to 3 overla"),
    ("inside.jsonl", records({"text": TEXT, "spans": [[0, 6, "PER"]]}), "line 1: the span 0 to 6 ends inside a word"),
    (
        "shifted.jsonl",
        records({"text": TEXT, "spans": [[1, 12, "PER"]]}),
        "line 1: the span 1 to 12 begins inside a wo",
    ),
    (
        "beyond.jsonl",
        records({"text": TEXT, "spans": [[36, 99, "LOC"]]}),
        "line 1: the span 36 to 99 is not in its tex",
    ),
    ("negative.jsonl", records({"text": TEXT, "spans": [[-1, 3, "LOC"]]}), "line 1: the span -1 to 3 is not in its te"),
    (
        "backwards.jsonl",
        records({"text": TEXT, "spans": [[12, 0, "PER"]]}),
        "line 1: the span 12 to 0 is not in its te",
    ),
    ("blank_span.jsonl", records({"text": TEXT, "spans": [[3, 4, "PER"]]}), "line 1: the span 3 to 4 has no letters"),
    ("no_label.jsonl", records({"text": TEXT, "spans": [{"start": 0, "end": 3}]}), "line 1: the span 0 to 3 has no ty"),
    ("words_span.jsonl", records({"text": TEXT, "spans": [["Ada", "PER"]]}), 'line 1: ["Ada", "PER"] is no span'),
    ("text_offsets.jsonl", records({"text": TEXT, "spans": [["0", "3", "PER"]]}), "line 1: "),
    ("no_spans.jsonl", records({"text": TEXT}), "line 1: has no list of spans"),
    ("blank_text.jsonl", records({"text": " ", "spans": []}), "line 1: its text has no words"),
]


@pytest.mark.parametrize(("name", "content", "said"), MISTAKES, ids=[name for name, *_ in MISTAKES])
def test_a_mistake_is_one_line_with_the_file_and_where_it_is(tmp_path, name, content, said):
    path = write(tmp_path, name, content)
    with pytest.raises(DataError) as caught:
        read_tags(path, "tokens", "tags")
    message = str(caught.value)
    between = ", " if said.startswith(("line", "row")) else ": "
    assert message.startswith(f"{path}{between}{said}"), message
    assert "\n" not in message


def test_a_column_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"line 1: has 2 columns, and the task's `label` is column 4; the first is 1"):
        read_tags(write(tmp_path, "a.conll", "a\tO\n"), "tokens", "4")


def test_tagged_files_are_told_from_tables(tmp_path):
    assert looks_tagged(write(tmp_path, "a.conll", "a\tO\n"))
    assert looks_tagged(write(tmp_path, "b.jsonl", records({"tokens": ["a"], "tags": ["O"]})))
    assert looks_tagged(write(tmp_path, "c.jsonl", FILES["doccano.jsonl"]))
    assert not looks_tagged(write(tmp_path, "d.jsonl", records({"text": "a", "label": "x"})))
    assert not looks_tagged(write(tmp_path, "e.tsv", "text\tlabel\n"))
