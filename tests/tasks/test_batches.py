from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.tasks import batches
from fedmtl.tasks.batches import WINDOW, Arrays, Shard, collate, sorted_batches, training_batches
from fedmtl.tasks.tokens import TokenPart, Tokens

PAD = 99


def make_part(texts: list[list[int]], segments: list[list[int]] | None = None) -> TokenPart:
    return TokenPart(
        np.array([i for text in texts for i in text], dtype=np.int32),
        np.array([s for row in segments or [[0] * len(text) for text in texts] for s in row], dtype=np.uint8),
        np.cumsum([0, *map(len, texts)]),
    )


@pytest.fixture
def shard_of(monkeypatch):
    """A shard over token lists, without a folder: one list per part."""

    def make(*parts: list[list[int]], indices: list[int] | None = None, segments=None) -> Shard:
        tokens = Tokens(tuple(make_part(texts, segments) for texts in parts))
        monkeypatch.setattr(batches, "open_tokens", lambda _: tokens)
        count = len(parts[0])
        return Shard("", np.arange(count) * 10, np.arange(count) if indices is None else np.array(indices, dtype=int))

    return make


def lists(arrays: Arrays) -> tuple[list, list, list, list]:
    return arrays.ids.tolist(), arrays.mask.tolist(), arrays.segments.tolist(), arrays.labels.tolist()


def test_a_batch_is_padded_to_its_own_longest(shard_of):
    shard = shard_of([[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11]])
    ids, mask, segments, labels = lists(collate(shard, np.array([2, 0, 1]), PAD, None))
    assert ids == [[5, 6, PAD], [1, 2, 3], [4, PAD, PAD]]
    assert mask == [[1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert segments == [[0] * 3] * 3
    assert labels == [20, 0, 10]


def test_segments_are_kept_and_padding_is_segment_zero(shard_of):
    shard = shard_of([[1, 2, 3], [4, 5]], segments=[[0, 1, 1], [0, 1]])
    assert collate(shard, np.array([0, 1]), PAD, None).segments.tolist() == [[0, 1, 1], [0, 1, 0]]


def test_a_dual_pair_has_all_first_texts_then_all_second_ones_of_one_width(shard_of):
    shard = shard_of([[1], [2, 3]], [[4, 5, 6], [7]])
    arrays = collate(shard, np.array([1, 0]), PAD, None)
    assert arrays.ids.tolist() == [[2, 3, PAD], [1, PAD, PAD], [7, PAD, PAD], [4, 5, 6]]
    assert arrays.labels.tolist() == [10, 0]


def test_a_compacted_table_renumbers_tokens_and_padding(shard_of):
    # Rows 3, 7 and the padding row 9 become 0, 1 and 2.
    index = np.full(10, -1)
    index[[3, 7, 9]] = [0, 1, 2]
    arrays = collate(shard_of([[3, 7], [7]]), np.array([0, 1]), 9, index)
    assert arrays.ids.tolist() == [[0, 1], [1, 2]]
    assert arrays.mask.tolist() == [[1, 1], [1, 0]]


def test_batches_are_what_torch_takes(shard_of):
    arrays = collate(shard_of([[1, 2], [3]]), np.array([0, 1]), PAD, None)
    assert {a.dtype for a in (arrays.ids, arrays.mask, arrays.segments)} == {np.dtype(np.int64)}
    given = [array for array in vars(arrays).values() if array is not None]
    assert len(given) == 4
    assert all(array.flags.writeable and array.flags.c_contiguous for array in given)


def test_used_ids_are_those_of_the_shards_examples_only(shard_of):
    shard = shard_of([[5, 1], [7], [1, 9]], [[2], [8], [2, 3]], indices=[2, 0])
    assert [ids.tolist() for ids in shard.used_ids()] == [[1, 5, 9], [2, 3]]
    empty = shard_of([[5, 1]], indices=[])
    assert [ids.tolist() for ids in empty.used_ids()] == [[]]


def test_tokens_are_counted_over_all_parts_of_the_shards_examples_only(shard_of):
    # Examples 0 and 2: 3 + 1 tokens in the first part, 1 + 2 in the second.
    shard = shard_of([[1, 2, 3], [4, 4], [5]], [[6], [7], [8, 9]], indices=[2, 0])
    assert shard.num_tokens() == 7
    assert shard_of([[1, 2]], indices=[]).num_tokens() == 0


def test_examples_of_one_window_are_batched_by_length(shard_of):
    # Eight batches of two are one window: each batch holds two neighbours of the sorted lengths 1..16.
    lengths = [5 * number % 17 for number in range(1, 17)]
    shard = shard_of([[0] * length for length in lengths])
    assert WINDOW == 8
    found = sorted([lengths[row] for row in batch] for batch in training_batches(shard, 2, seed=3))
    assert found == [[low, low + 1] for low in range(1, 17, 2)]


def test_short_and_long_batches_come_in_mixed_order(shard_of):
    shard = shard_of([[0] * length for length in range(1, 17)])
    longest = [int(batch.max()) for batch in training_batches(shard, 2, seed=3)]
    assert longest not in (sorted(longest), sorted(longest, reverse=True))


def test_scoring_starts_with_the_longest(shard_of):
    shard = shard_of([[0], [0] * 4, [0] * 2, [0] * 3], indices=[3, 0, 1])
    assert [batch.tolist() for batch in sorted_batches(shard, 2)] == [[1, 3], [0]]


def test_a_shard_without_examples_has_no_batches(shard_of):
    shard = shard_of([[0], [1]], indices=[])
    assert training_batches(shard, 2, seed=0) == []
    assert sorted_batches(shard, 2) == []


texts = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=60)


@given(texts=texts, size=st.integers(1, 7), seed=st.integers(0, 2**40), data=st.data())
def test_an_epoch_visits_each_index_once_in_full_batches(texts, size, seed, data):
    indices = data.draw(st.permutations(range(len(texts)))).copy()[: data.draw(st.integers(0, len(texts)))]
    shard = Shard("", np.zeros(len(texts)), np.array(indices, dtype=np.int64))
    with mock.patch.object(batches, "open_tokens", return_value=Tokens((make_part(texts),))):
        epochs = [training_batches(shard, size, seed) for _ in range(2)]
        scoring = sorted_batches(shard, size)
    for epoch in (epochs[0], scoring):
        assert sorted(row for batch in epoch for row in batch.tolist()) == sorted(indices)
        # At most one batch is short.
        assert sorted(map(len, epoch))[1:] == [size] * (len(epoch) - 1)
    assert [b.tolist() for b in epochs[0]] == [b.tolist() for b in epochs[1]]


@given(texts=texts, data=st.data())
def test_collating_loses_nothing_and_adds_only_padding(texts, data):
    batch = np.array(data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=9)))
    segments = [[token % 2 for token in text] for text in texts]
    shard = Shard("", np.arange(len(texts)), np.arange(len(texts)))
    with mock.patch.object(batches, "open_tokens", return_value=Tokens((make_part(texts, segments),))):
        arrays = collate(shard, batch, PAD, None)
    chosen = [texts[row] for row in batch]
    assert arrays.ids.shape == (len(batch), max(map(len, chosen)))
    assert [row[keep].tolist() for row, keep in zip(arrays.ids, arrays.mask.astype(bool), strict=True)] == chosen
    assert arrays.mask.sum(1).tolist() == [len(text) for text in chosen]
    assert (arrays.ids[arrays.mask == 0] == PAD).all()
    assert np.array_equal(arrays.segments, np.where(arrays.mask == 1, arrays.ids % 2, 0))
    assert arrays.labels.tolist() == batch.tolist()
