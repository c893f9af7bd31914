"""Altered copies of a batch: the teacher grades texts nobody wrote, and the batch holds pairs that are nearly alike.

A corpus repeats after one epoch and two of its sentences are seldom close. A copy with words left out, cut short or
mixed with another text is new every time, and close to its original: how close, the teacher says. Both tokenizations
are altered by the same choice of words, so they stay aligned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedmtl.compress.pretrain.batches import Tokens

# Of a copy's words at most so many are left out, or come from another text.
MOST_DROPPED = 0.6
MOST_SWAPPED = 0.5

NEITHER, FIRST, SECOND = 0, 1, 2
FAR = 1 << 20


def num_draws(width: int) -> int:
    """Random numbers that one text needs."""
    return width + 5


def choose_words(num_words: Tensor, num_other: Tensor, drawn: Tensor) -> Tensor:
    """For each word place [batch, width]: left out, the text's own word, or the other text's.

    A third of the texts each lose words, have words swapped, or are cut at both ends with the rest from the other
    or from nobody. `drawn` are random numbers from 0 to 1 [batch, num_draws(width)].
    """
    width = drawn.shape[1] - num_draws(0)
    places = torch.arange(width, device=num_words.device)[None]
    by_word, kind, share, side, ends = torch.split(drawn, [width, 1, 1, 1, 2], dim=1)
    dropped = torch.where(by_word < MOST_DROPPED * share, NEITHER, FIRST)
    swapped = torch.where(by_word < MOST_SWAPPED * share, SECOND, FIRST)
    ends = (ends * num_words[:, None]).sort(dim=1).values
    outside = torch.where(side < 0.5, NEITHER, SECOND)
    cut = torch.where((places >= ends[:, :1].floor()) & (places <= ends[:, 1:]), FIRST, outside)
    choice = torch.where(kind < 1 / 3, dropped, torch.where(kind < 2 / 3, swapped, cut))
    choice = torch.where((choice == SECOND) & (places >= num_other[:, None]), NEITHER, choice)
    choice = torch.where((choice == FIRST) & (places >= num_words[:, None]), NEITHER, choice)
    nothing = (choice == NEITHER).all(dim=1, keepdim=True)
    return torch.where(nothing & (places == 0), FIRST, choice)


def fit(choice: Tensor, sides: list[tuple[Tokens, Tokens]]) -> Tensor:
    """The same choice, with the words left out that no longer fit one of the sides' width."""
    for first, second in sides:
        sizes = torch.where(
            choice == FIRST, _sizes(first, choice), torch.where(choice == SECOND, _sizes(second, choice), 0)
        )
        special = (first.mask & (first.words < 0)).sum(dim=1, keepdim=True)
        fits = sizes.cumsum(dim=1) + special <= first.ids.shape[1]
        choice = torch.where(fits, choice, NEITHER)
    return choice


def compose(first: Tokens, second: Tokens, choice: Tensor, pad_id: int) -> Tokens:
    """The chosen words in their order, between the first text's special tokens; `choice` must fit its width."""
    last = choice.shape[1] + 1
    keys = torch.cat([_keys(first, choice == FIRST), _keys(second, choice == SECOND)], dim=1)
    # The second text's special tokens are not wanted.
    special = first.mask & (first.words < 0)
    before = (first.words >= 0).cumsum(dim=1) == 0
    keys[:, : special.shape[1]] = torch.where(special, torch.where(before, 0, last), keys[:, : special.shape[1]])
    keys, order = keys.sort(dim=1, stable=True)
    keys, order = keys[:, : first.ids.shape[1]], order[:, : first.ids.shape[1]]
    mask = keys < FAR
    ids = torch.where(mask, torch.cat([first.ids, second.ids], dim=1).gather(1, order), pad_id)
    numbers = (choice != NEITHER).cumsum(dim=1) - 1
    is_word = mask & (keys > 0) & (keys < last)
    words = torch.where(is_word, numbers.gather(1, (keys - 1).clamp(0, last - 2)), -1)
    return Tokens(ids, mask, words)


def _keys(tokens: Tokens, chosen: Tensor) -> Tensor:
    """Where each token goes: its word's place counted from 1, or nowhere."""
    is_chosen = chosen.gather(1, tokens.words.clamp(min=0)) & (tokens.words >= 0)
    return torch.where(is_chosen, tokens.words + 1, FAR)


def _sizes(tokens: Tokens, choice: Tensor) -> Tensor:
    """Tokens of each word [batch, word]."""
    numbers = torch.arange(choice.shape[1], device=choice.device)
    return (tokens.words[:, None, :] == numbers[None, :, None]).sum(-1)
