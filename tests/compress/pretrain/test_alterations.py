"""Altered copies: both tokenizations keep the same words."""

import torch

from fedmtl.compress.pretrain.batches import FIRST, NEITHER, SECOND, Tokens, choose_words, compose, fit, num_draws

CLS, SEP, PAD = 1, 2, 0


def tokens(*texts, width):
    """Each text is a list of words, each word a list of ids."""
    rows = []
    for text in texts:
        ids = [CLS, *(piece for word in text for piece in word), SEP]
        words = [-1, *(number for number, word in enumerate(text) for _ in word), -1]
        rest = width - len(ids)
        rows.append((ids + [PAD] * rest, [True] * len(ids) + [False] * rest, words + [-1] * rest))
    return Tokens(*(torch.tensor(column) for column in zip(*rows, strict=True)))


def draw(size, width):
    return torch.rand(size, num_draws(width), generator=torch.Generator().manual_seed(0))


def read(tokens, row):
    """The ids of one row up to its end, and its words as lists of ids."""
    num = int(tokens.mask[row].sum())
    assert tokens.mask[row, :num].all()
    assert (tokens.ids[row, num:] == PAD).all()
    ids, words = tokens.ids[row, :num].tolist(), tokens.words[row, :num].tolist()
    assert (ids[0], ids[-1], words[0], words[-1]) == (CLS, SEP, -1, -1)
    found = [[] for _ in range(max(words) + 1)]
    for piece, word in zip(ids, words, strict=True):
        if word >= 0:
            found[word].append(piece)
    return found


def test_chosen_words_stand_in_their_order_between_the_special_tokens():
    first = tokens([[10], [11, 12], [13]], [[14]], width=8)
    second = tokens([[20, 21], [22], [23]], [[24], [25]], width=8)
    choice = torch.tensor([[SECOND, FIRST, NEITHER], [FIRST, SECOND, NEITHER]])
    made = compose(first, second, choice, PAD)
    assert read(made, 0) == [[20, 21], [11, 12]]
    assert read(made, 1) == [[14], [25]]


def test_words_are_left_out_where_one_side_has_no_room():
    # Room for four pieces beside the two special tokens: 2 + 1 fit, the third word of two does not.
    first, second = tokens([[10, 11], [12]], width=6), tokens([[20], [21], [22, 23]], width=6)
    wide = tokens([[30], [31], [32]], width=6)
    choice = torch.tensor([[FIRST, FIRST, SECOND]])
    fitted = fit(choice, [(wide, wide), (first, second)])
    assert fitted.tolist() == [[FIRST, FIRST, NEITHER]]
    assert read(compose(first, second, fitted, PAD), 0) == [[10, 11], [12]]
    assert read(compose(wide, wide, fitted, PAD), 0) == [[30], [31]]


def test_every_choice_is_of_words_that_are_there_and_none_is_empty():
    num_words = torch.randint(1, 12, (500,), generator=torch.Generator().manual_seed(1))
    others = num_words.roll(1)
    choice = choose_words(num_words, others, draw(500, 12))
    places = torch.arange(12)[None]
    assert (choice > 0).any(dim=1).all()
    assert not ((choice == FIRST) & (places >= num_words[:, None])).any()
    assert not ((choice == SECOND) & (places >= others[:, None])).any()


def test_most_of_a_copy_is_its_original():
    num_words = torch.full((4000,), 20)
    choice = choose_words(num_words, num_words, draw(4000, 20))
    own, other = (choice == FIRST).float().mean(1), (choice == SECOND).float().mean(1)
    # A third drops 30% on average, a third swaps 25%, a third keeps a middle of about a third.
    assert abs(float(own.mean()) - (0.7 + 0.75 + 1 / 3) / 3) < 0.05
    assert 0.1 < float(other.mean()) < 0.25
