"""What a word is, and which token is the first of each."""

import numpy as np
import pytest

from fedmtl.tasks.batches import TextShard, collate
from fedmtl.tasks.sequences import Sequences
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import encode_texts, first_pieces, open_tokens, tokenize
from fedmtl.tasks.words import join_words, plain_text, split_words
from model.tiny import make_tokenizer

NAMES = Task("names", "tagging", ("tokens",), "tags", "f1", labels=("PER",))


def cut(text):
    return [plain_text(text)[start:end] for start, end in split_words(text)]


def test_words_of_plain_text_are_runs_of_letters_and_single_signs():
    assert cut("A 2,4-D (as e.g. in Zürich)!") == [
        *("A", "2", ",", "4", "-", "D", "(", "as", "e", ".", "g", ".", "in", "Zürich", ")", "!"),
    ]
    assert split_words("") == []


@pytest.mark.parametrize("words", [["U.S."], ["2,4-D", "is", "a", "herbicide", "."], ["New\tYork", "x"]])
def test_words_that_were_apart_stay_whole(words):
    assert cut(join_words(words)) == [word.replace("\t", " ") for word in words]
    assert plain_text(join_words(words)) == " ".join(words).replace("\t", " ")


def test_the_first_piece_of_a_word_is_the_first_token_in_it():
    # [CLS], `un`, `happy`, `.`, [SEP] of "unhappy ."
    assert first_pieces(join_words(["unhappy", "."]), [(0, 0), (0, 2), (2, 7), (8, 9), (0, 0)]) == [1, 3]
    # The second word was cut off, and one that the tokenizer leaves nothing of has none either.
    assert first_pieces(join_words(["ab", "cd"]), [(0, 0), (0, 2), (0, 0)]) == [1, -1]
    assert first_pieces(join_words(["ab", "\u200b", "cd"]), [(0, 0), (0, 2), (5, 7), (0, 0)]) == [1, -1, 2]
    # Two words that are one token.
    assert first_pieces("a-b", [(0, 3)]) == [0, 0, 0]


def test_words_behind_the_longest_length_have_no_piece_and_stay_counted(tmp_path):
    texts = (["a b c d e f", "a"],)
    folder, truncated = tokenize(NAMES, texts, make_tokenizer("bert"), 5, tmp_path)
    tokens = open_tokens(folder)
    assert truncated == 1
    assert [row.tolist() for row in tokens.words] == [[1, 2, 3, -1, -1, -1], [1]]
    again, _ = tokenize(NAMES, texts, make_tokenizer("bert"), 5, tmp_path)
    assert again == folder


def test_a_task_on_words_and_one_on_texts_have_tokens_of_their_own(tmp_path):
    texts, other = (["a b"],), Task("mood", "classification", ("text",), "label", "accuracy", labels=("a", "b"))
    folders = {tokenize(task, texts, make_tokenizer("bert"), 8, tmp_path)[0] for task in (NAMES, other)}
    assert len(folders) == 2
    assert [open_tokens(folder).words is None for folder in sorted(folders)].count(True) == 1


def test_a_batch_has_the_places_and_the_labels_of_words_that_have_a_token():
    tokens = encode_texts(NAMES, (["a b c d", "e"],), make_tokenizer("bert"), 5)
    labels = Sequences.of([[0, 1, 2, 1], [2]], np.int64)
    arrays = collate(TextShard(tokens, labels, np.arange(2)), np.array([1, 0]), 0, None)
    # Two rows of five columns: `e` at column 1 of the first, `a b c` at columns 1 to 3 of the second.
    assert arrays.ids.shape == (2, 5)
    assert arrays.places.tolist() == [1, 6, 7, 8]
    assert arrays.labels.tolist() == [2, 0, 1, 2]
