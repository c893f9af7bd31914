import numpy as np
import pytest
import torch

from fedmtl.compress.pretrain.batches import DeviceSide, Epochs, Tokens
from fedmtl.compress.pretrain.segments import divider, open_segments, write_segments
from fedmtl.errors import DataError
from fedmtl.model.wordpiece import SPECIAL, basic_tokenizer, wrap_tokenizer

CPU = torch.device("cpu")


def tokenizer_of(*pieces):
    return wrap_tokenizer({piece: number for number, piece in enumerate((*SPECIAL, *pieces))}, model_max_length=32)


@pytest.fixture
def segments(tmp_path):
    """`ab c` is ab | c for the teacher and a ##b | c for the student; `c` is one piece for both."""
    teacher, student = tokenizer_of("ab", "c"), tokenizer_of("c", "a", "##b")
    write_segments(tmp_path / "segments", ["ab c", "c", "\u200b", "c ab"], teacher, student, 32)
    return open_segments(tmp_path / "segments")


def test_both_sides_by_hand(segments):
    # The teacher's ids: ab 5, c 6; the student's: c 5, a 6, ##b 7.
    assert segments.teacher.ids.tolist() == [5, 6, 6, 6, 5]
    assert segments.student.ids.tolist() == [6, 7, 5, 5, 5, 6, 7]
    assert segments.student.words.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert segments.num_words.tolist() == [2, 1, 2]
    # A text of nothing that is seen has no words.
    assert segments.num_skipped == 1
    assert segments.student.lengths().tolist() == [5, 3, 5]


def test_a_batch_has_special_tokens_and_padding(segments):
    tokens = DeviceSide(segments.student, 0, CPU).take(torch.tensor([2, 1]), 6)
    assert tokens.ids.tolist() == [[2, 5, 6, 7, 3, 0], [2, 5, 3, 0, 0, 0]]
    assert tokens.mask.tolist() == [[True] * 5 + [False], [True] * 3 + [False] * 3]
    assert tokens.words.tolist() == [[-1, 0, 1, 1, -1, -1], [-1, 0, -1, -1, -1, -1]]


def test_a_words_state_is_the_mean_of_its_pieces():
    tokens = Tokens(torch.zeros(1, 5), torch.ones(1, 5).bool(), torch.tensor([[-1, 0, 1, 1, -1]]))
    states = torch.tensor([[[50.0], [2.0], [4.0], [8.0], [70.0]]])
    assert tokens.word_means(states, 3).tolist() == [[[2.0], [6.0], [0.0]]]


def test_texts_are_cut_to_whole_words(tmp_path):
    # Room for six beside two special tokens: three words of two of the student's pieces each.
    write_segments(tmp_path / "s", ["ab " * 9], tokenizer_of("ab"), tokenizer_of("a", "##b"), 8)
    segments = open_segments(tmp_path / "s")
    assert segments.num_words.tolist() == [3]
    assert segments.teacher.lengths().tolist() == [5]
    assert segments.student.lengths().tolist() == [8]


def test_no_text_that_aligns_is_one_clear_line(tmp_path):
    with pytest.raises(DataError, match="none of its 1 texts has the same words"):
        write_segments(tmp_path / "s", ["\u200b"], basic_tokenizer(), basic_tokenizer(), 32)
    assert open_segments(tmp_path / "s") is None


def test_an_epoch_takes_every_segment_once_and_depends_on_the_seed_alone(tmp_path):
    texts = [" ".join("c" * (1 + i % 7)) for i in range(40)]
    write_segments(tmp_path / "s", texts, tokenizer_of("c"), tokenizer_of("c"), 32)
    segments = open_segments(tmp_path / "s")
    epochs = Epochs(segments, 8, 32, 3, CPU)
    first = [epochs.batch(step).segments.tolist() for step in range(5)]
    assert sorted(np.concatenate(first)) == list(range(40))
    again = Epochs(segments, 8, 32, 3, CPU)
    assert again.batch(7).segments.tolist() == epochs.batch(7).segments.tolist()
    assert again.batch(2).segments.tolist() == first[2]
    assert Epochs(segments, 8, 32, 4, CPU).batch(0).segments.tolist() != first[0]


class TestPairs:
    TEXTS = (("ab c", "c"), "ab c", ("c", "ab ab"))

    def test_a_pair_is_read_as_the_tokenizer_reads_it(self, tmp_path):
        tokenizer = tokenizer_of("ab", "c")
        write_segments(tmp_path / "s", self.TEXTS, tokenizer, tokenizer, 32)
        segments = open_segments(tmp_path / "s")
        tokens = DeviceSide(segments.teacher, 0, CPU, divider(tokenizer)).take(torch.tensor([0, 1, 2]), 7)
        # [CLS] 2 and [SEP] 3 around and between; ab 5, c 6.
        assert tokens.ids.tolist() == [[2, 5, 6, 3, 6, 3, 0], [2, 5, 6, 3, 0, 0, 0], [2, 6, 3, 5, 5, 3, 0]]
        assert tokens.types.tolist() == [[0, 0, 0, 0, 1, 1, 0], [0] * 7, [0, 0, 0, 1, 1, 1, 0]]
        for row, text in zip(zip(tokens.ids.tolist(), tokens.types.tolist(), strict=True), self.TEXTS, strict=True):
            known = tokenizer(*((text,) if isinstance(text, str) else text), padding="max_length", max_length=7)
            assert row == (known["input_ids"], known["token_type_ids"])

    def test_what_stands_between_counts_as_a_word(self, tmp_path):
        tokenizer = tokenizer_of("ab", "c")
        write_segments(tmp_path / "s", self.TEXTS, tokenizer, tokenizer, 32)
        assert open_segments(tmp_path / "s").num_words.tolist() == [4, 2, 4]

    def test_a_pair_that_is_too_long_loses_words_of_its_second_text(self, tmp_path):
        tokenizer = tokenizer_of("ab", "c")
        write_segments(tmp_path / "s", [("c", "ab " * 9)], tokenizer, tokenizer, 7)
        assert open_segments(tmp_path / "s").teacher.ids.tolist() == [6, 3, 5, 5, 5]
