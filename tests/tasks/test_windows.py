"""How texts are cut into windows, and where each token of a text is looked up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.errors import FedmtlError
from fedmtl.model.wordpiece import basic_tokenizer
from fedmtl.tasks.batches import Shard, TextShard, collate
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task, Windows
from fedmtl.tasks.tokens import encode_texts, open_tokens, tokenize
from fedmtl.tasks.windows import NOWHERE, central, count_windows, cut_text, rows_of_texts

LETTERS = "a b c d e f g h i j k l m n o p"
CLS, SEP = 2, 3
WINDOWS = Windows(stride=2)


def make_task(*text, windows=WINDOWS, **keys):
    return Task("t", "classification", text or ("a",), "y", "accuracy", labels=("no", "yes"), windows=windows, **keys)


def single(length):
    """Which text each token of one is of, between two special ones."""
    return np.array([NOWHERE, *[0] * length, NOWHERE])


def cut(text_of, max_length, windows, from_left=False):
    found = cut_text(text_of, max_length, windows, from_left=from_left)
    return [columns.tolist() for columns in found.columns], found.is_cut


def words_of(tokens, tokenizer):
    """The words of every window of every example."""
    return [
        [
            " ".join(tokenizer.convert_ids_to_tokens(ids.tolist()))
            for ids in np.split(part.ids[begin:end], np.cumsum(lengths)[:-1])
        ]
        for part in tokens.parts
        for begin, end, lengths in zip(part.offsets[:-1], part.offsets[1:], part.cuts, strict=True)
    ]


def test_windows_follow_each_other_by_the_stride_and_the_last_ends_with_the_text():
    # Ten tokens between [CLS] and [SEP]; four fit beside these.
    assert cut(single(10), 6, Windows(stride=3)) == (
        [[0, 1, 2, 3, 4, 11], [0, 4, 5, 6, 7, 11], [0, 7, 8, 9, 10, 11]],
        False,
    )
    # End to end, the last one steps back so that it is full.
    assert cut(single(10), 6, Windows()) == (
        [[0, 1, 2, 3, 4, 11], [0, 5, 6, 7, 8, 11], [0, 7, 8, 9, 10, 11]],
        False,
    )
    # A stride that would leave a gap is one end to end.
    assert cut(single(10), 6, Windows(stride=6)) == cut(single(10), 6, Windows())


def test_what_comes_behind_the_last_window_is_cut():
    assert cut(single(10), 6, Windows(stride=2, most=2)) == ([[0, 1, 2, 3, 4, 11], [0, 3, 4, 5, 6, 11]], True)
    assert cut(single(6), 6, Windows(stride=2, most=2)) == ([[0, 1, 2, 3, 4, 7], [0, 3, 4, 5, 6, 7]], False)


def test_from_the_left_the_beginning_is_cut():
    # The windows stay in the text's order.
    assert cut(single(10), 6, Windows(stride=2, most=2), from_left=True) == (
        [[0, 5, 6, 7, 8, 11], [0, 7, 8, 9, 10, 11]],
        True,
    )


def test_of_a_pair_in_one_sequence_the_longer_text_is_cut():
    # [CLS] a a [SEP] b b b b b b [SEP]: three of b fit beside both of a.
    pair = np.array([NOWHERE, 0, 0, NOWHERE, 1, 1, 1, 1, 1, 1, NOWHERE])
    assert cut(pair, 8, Windows()) == ([[0, 1, 2, 3, 4, 5, 6, 10], [0, 1, 2, 3, 7, 8, 9, 10]], False)
    # Both are longer than half of the four that fit: two of a, and two of b in each window.
    pair = np.array([NOWHERE, 0, 0, 0, NOWHERE, 1, 1, 1, 1, NOWHERE])
    assert cut(pair, 7, Windows()) == ([[0, 1, 2, 4, 5, 6, 9], [0, 1, 2, 4, 7, 8, 9]], True)


@given(st.integers(0, 60), st.integers(3, 20), st.none() | st.integers(1, 25), st.integers(1, 9), st.booleans())
def test_windows_are_in_order_full_and_cover_every_token_that_is_not_cut(length, most, stride, number, from_left):
    found = cut_text(single(length), most, Windows(stride, number), from_left=from_left)
    columns = found.columns
    assert 1 <= len(columns) <= number
    assert {len(each) for each in columns} == {min(length + 2, most)}
    assert all(each[0] == 0 and each[-1] == length + 1 and (np.diff(each) > 0).all() for each in columns)
    starts = [each[1] for each in columns if len(each) > 2]
    assert starts == sorted(set(starts))
    seen = set(np.concatenate(columns).tolist())
    assert found.is_cut == (len(seen) < length + 2)
    # What is seen is one piece of the text, from its beginning or to its end.
    inner = sorted(seen - {0, length + 1})
    assert inner == (list(range(length + 1 - len(inner), length + 1)) if from_left else list(range(1, 1 + len(inner))))


def test_a_token_is_looked_up_where_it_stands_most_central():
    # Windows of five columns, whose middle is column 2: columns 0 1 2 3 7 and 0 3 4 5 7 and 0 4 5 6 7 of the whole.
    text = cut_text(single(6), 5, Windows(stride=2), from_left=False)
    assert [each.tolist() for each in text.columns] == [[0, 1, 2, 3, 7], [0, 3, 4, 5, 7], [0, 4, 5, 6, 7]]
    # 3 stands at column 3 of the first and 1 of the second, as central in both: the first counts. 4 is at column 2 of
    # the second, 5 at 3 of the second and 2 of the third. Slots count on over windows.
    assert central(text, 8).tolist() == [0, 1, 2, 3, 7, 12, 13, 4]


def test_a_token_of_no_window_is_nowhere():
    text = cut_text(single(6), 5, Windows(stride=2, most=1), from_left=False)
    assert central(text, 8).tolist() == [0, 1, 2, 3, NOWHERE, NOWHERE, NOWHERE, 4]


@given(st.integers(1, 40), st.integers(4, 12), st.integers(1, 12))
def test_the_central_slot_is_that_of_the_token_and_no_other_is_nearer_to_its_windows_middle(length, most, stride):
    text = cut_text(single(length), most, Windows(stride, 100), from_left=False)
    flat = np.concatenate(text.columns)
    at = np.concatenate([np.abs(np.arange(len(each)) - (len(each) - 1) / 2) for each in text.columns])
    found = central(text, length + 2)
    assert (flat[found] == np.arange(length + 2)).all()
    for token, slot in enumerate(found):
        assert at[slot] == at[flat == token].min()


def test_rows_of_texts_are_filled_up():
    assert rows_of_texts(Sequences.of([[9, 9], [4], [9, 9, 5]], np.int32)).tolist() == [
        [0, 1, NOWHERE],
        [2, NOWHERE, NOWHERE],
        [3, 4, 5],
    ]


def test_texts_with_several_windows_are_counted():
    cuts = Sequences.of([[9, 9], [4], [9, 9, 5]], np.int32)
    assert count_windows(cuts, np.arange(3)) == (2, 5)
    assert count_windows(cuts, np.array([1, 2])) == (1, 3)
    assert count_windows(None, np.arange(3)) == (0, 0)


def test_the_cache_has_the_windows_of_a_text(tmp_path):
    tokenizer, task = basic_tokenizer(), make_task()
    folder, truncated = tokenize(task, (["a b", LETTERS[:13], LETTERS],), tokenizer, 6, tmp_path)
    tokens = open_tokens(folder)
    assert words_of(tokens, tokenizer) == [
        ["[CLS] a b [SEP]"],
        ["[CLS] a b c d [SEP]", "[CLS] c d e f [SEP]", "[CLS] d e f g [SEP]"],
        [f"[CLS] {LETTERS[at : at + 7]} [SEP]" for at in range(0, 26, 4)],
    ]
    assert truncated == 0
    assert Shard(folder, np.zeros(3), np.arange(3)).num_windows() == (2, 10)
    # Three windows are all that a text may have: behind the eighth letter it is cut.
    fewer = make_task(windows=Windows(2, 3))
    other, truncated = tokenize(fewer, (["a b", LETTERS[:13], LETTERS],), tokenizer, 6, tmp_path)
    assert (other != folder, truncated) == (True, 1)
    # How windows are pooled is no part of the tokens.
    pooled = make_task(windows=Windows(2, pool="max"))
    assert tokenize(pooled, (["a b", LETTERS[:13], LETTERS],), tokenizer, 6, tmp_path)[0] == folder


@pytest.mark.parametrize("text", [("a",), ("a", "b")])
def test_texts_that_fit_have_the_tokens_they_have_without_windows(text, tmp_path):
    columns = tuple([LETTERS[:n] for n in (1, 9, 5)] for _ in text)
    for pair in ("cross", "dual"):
        task, plain = make_task(*text, pair=pair), make_task(*text, pair=pair, windows=None)
        ours, theirs = (encode_texts(each, columns, basic_tokenizer(), 16) for each in (task, plain))
        for one, other in zip(ours.parts, theirs.parts, strict=True):
            for name in ("ids", "segments", "offsets"):
                assert np.array_equal(getattr(one, name), getattr(other, name))
        arrays, expected = (
            collate(TextShard(each, np.zeros(3), np.arange(3)), np.array([2, 0, 1]), 0, None) for each in (ours, theirs)
        )
        assert arrays.windows is None
        assert np.array_equal(arrays.ids, expected.ids)
        assert np.array_equal(arrays.mask, expected.mask)


@pytest.mark.parametrize("length", range(4, 14))
def test_with_one_window_a_text_is_cut_as_without_any(length):
    one, none = (make_task(windows=windows) for windows in (Windows(most=1), None))
    texts = ([LETTERS, LETTERS[:9], "a"],)
    ours, theirs = (encode_texts(task, texts, basic_tokenizer(), length) for task in (one, none))
    assert np.array_equal(ours.parts[0].ids, theirs.parts[0].ids)
    assert np.array_equal(ours.parts[0].offsets, theirs.parts[0].offsets)


def test_a_batch_has_a_row_for_every_window_and_the_rows_of_every_text():
    tokens = encode_texts(make_task(), (["a b", LETTERS[:9]],), basic_tokenizer(), 6)
    arrays = collate(TextShard(tokens, np.array([5, 6]), np.arange(2)), np.array([1, 0]), 0, None)
    assert arrays.ids.shape == (3, 6)
    assert arrays.mask.sum(1).tolist() == [6, 6, 4]
    assert arrays.windows.tolist() == [[0, 1], [2, NOWHERE]]
    assert arrays.labels.tolist() == [6, 5]


def test_of_a_dual_pair_all_first_texts_come_before_all_second_ones():
    task = make_task("a", "b", pair="dual")
    tokens = encode_texts(task, ([LETTERS[:9], "a"], ["b", LETTERS[:13]]), basic_tokenizer(), 6)
    arrays = collate(TextShard(tokens, np.zeros(2), np.arange(2)), np.arange(2), 0, None)
    # First texts have two windows and one, second ones one and three.
    assert arrays.windows.tolist() == [
        [0, 1, NOWHERE],
        [2, NOWHERE, NOWHERE],
        [3, NOWHERE, NOWHERE],
        [4, 5, 6],
    ]


NAMES = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("X",), windows=Windows(stride=2))


def test_every_word_has_one_place_whatever_the_number_of_its_windows(tmp_path):
    folder, truncated = tokenize(NAMES, (["a b", LETTERS[:11]],), basic_tokenizer(), 5, tmp_path)
    tokens = open_tokens(folder)
    # `a b c d e f`: windows of three letters, `a b c`, `c d e` and `d e f`; c is looked up in the first, d and e where
    # they stand in the middle.
    assert words_of(tokens, basic_tokenizer())[1] == ["[CLS] a b c [SEP]", "[CLS] c d e [SEP]", "[CLS] d e f [SEP]"]
    assert truncated == 0
    assert [each.tolist() for each in tokens.words] == [[1, 2], [1, 2, 3, 7, 12, 13]]
    labels = Sequences.of([[0, 1], [0, 1, 2, 0, 1, 2]], np.int64)
    arrays = collate(Shard(folder, labels, np.arange(2)), np.array([1, 0]), 0, None)
    found = basic_tokenizer().convert_ids_to_tokens(arrays.ids.reshape(-1)[arrays.places].tolist())
    assert found == ["a", "b", "c", "d", "e", "f", "a", "b"]
    assert arrays.labels.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    # Rows are five wide; b of the short text is at column 2 of the fourth.
    assert arrays.places.tolist() == [1, 2, 3, 7, 12, 13, 16, 17]
    assert arrays.windows is None


def test_words_of_no_window_have_no_place():
    task = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("X",), windows=Windows(2, 2))
    tokens = encode_texts(task, ([LETTERS[:15], "a"],), basic_tokenizer(), 5)
    assert [each.tolist() for each in tokens.words] == [[1, 2, 3, 7, 8, NOWHERE, NOWHERE, NOWHERE], [1]]
    labels = Sequences.of([[0] * 8, [1]], np.int64)
    arrays = collate(TextShard(tokens, labels, np.arange(2)), np.arange(2), 0, None)
    assert arrays.labels.tolist() == [0] * 5 + [1]


@pytest.mark.parametrize("name", ["cuts", "cut_offsets"])
def test_broken_windows_of_a_cache_are_an_error(name, tmp_path):
    folder, _ = tokenize(make_task(), ([LETTERS],), basic_tokenizer(), 6, tmp_path)
    file = folder / f"0.{name}.npy"
    np.save(file, np.load(file) + 1)
    with pytest.raises(FedmtlError, match="do not fit each other"):
        open_tokens(folder)
