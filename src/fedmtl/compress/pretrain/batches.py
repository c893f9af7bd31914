"""Batches of segments, made on the device the model is on, and altered copies of them.

The teacher grades texts nobody wrote, and a batch holds pairs that are nearly alike. A corpus repeats after one epoch
and two of its sentences are seldom close. A copy with words left out, cut short or mixed with another text is new
every time, and close to its original: how close, the teacher says. Both tokenizations are altered by the same choice
of words, so they stay aligned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmtl.compress.pretrain.segments import Segments, Side
from fedmtl.seeds import derive_seed

# Segments are sorted by length within so many batches: little is padded, and batches still mix.
WINDOW = 64
# Few different widths: kernels are chosen, and compiled, per shape.
MULTIPLE = 8
# Of a copy's words at most so many are left out, or come from another text.
MOST_DROPPED = 0.6
MOST_SWAPPED = 0.5
NEITHER, FIRST, SECOND = 0, 1, 2
FAR = 1 << 20


@dataclass(frozen=True)
class Tokens:
    """One side of a batch, padded on the right; `words` numbers each token's word, -1 is none.

    `types` is 1 for the second text of a pair, as BERT's token types; None where there are no pairs.
    """

    ids: Tensor
    mask: Tensor
    words: Tensor
    types: Tensor | None = None

    def rolled(self) -> Tokens:
        """Every row with the text of its neighbour."""
        return Tokens(*(part.roll(1, 0) for part in (self.ids, self.mask, self.words)))

    def with_more(self, other: Tokens) -> Tokens:
        """The texts of both, which are of one width."""
        pairs = ((self.ids, other.ids), (self.mask, other.mask), (self.words, other.words))
        return Tokens(*(torch.cat(pair) for pair in pairs))

    def word_means(self, states: Tensor, num_words: int) -> Tensor:
        """States [batch, token, width] -> [batch, word, width].

        A product with a matrix of zeros and ones: unlike adding by index it gives the same bits twice on a GPU too.
        """
        numbers = torch.arange(num_words, device=states.device)
        member = self.words[:, None, :] == numbers[None, :, None]
        sums = torch.bmm(member.to(states.dtype), states).float()
        return sums / member.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class Batch:
    """Which segments, the width of both sides and the number of words padded to; known without asking the device."""

    segments: Tensor
    teacher_width: int
    student_width: int
    num_words: int
    num_tokens: int


class DeviceSide:
    """One tokenizer's tokens on the device; behind the token `divider`, if it is given, the second text begins."""

    def __init__(self, side: Side, pad_id: int, device: torch.device, divider: int | None = None) -> None:
        self.ids = _upload(side.ids, torch.int32, device)
        self.words = _upload(side.words, torch.int32, device)
        self.offsets = _upload(side.offsets, torch.int64, device)
        self.before = torch.tensor(side.before, dtype=torch.int64, device=device)
        self.after = torch.tensor(side.after, dtype=torch.int64, device=device)
        self.pad_id, self.divider = pad_id, divider

    def take(self, segments: Tensor, width: int) -> Tokens:
        """Those segments with their special tokens, padded to the width."""
        columns = torch.arange(width, device=segments.device)[None]
        starts = self.offsets[segments][:, None]
        ends = self.offsets[segments + 1][:, None]
        inner = columns - len(self.before)
        is_text = (inner >= 0) & (inner < ends - starts)
        positions = torch.where(is_text, starts + inner, 0)
        behind = inner - (ends - starts)
        mask = behind < len(self.after)
        ids = torch.where(is_text, self.ids[positions].long(), self.pad_id)
        if len(self.before):
            ids = torch.where(inner < 0, self.before[columns.clamp(max=len(self.before) - 1)], ids)
        if len(self.after):
            is_after = (behind >= 0) & mask
            ids = torch.where(is_after, self.after[behind.clamp(0, len(self.after) - 1)], ids)
        types = None if self.divider is None else _types(ids == self.divider, mask)
        return Tokens(ids, mask, torch.where(is_text, self.words[positions].long(), -1), types)


class Epochs:
    """The batch of any step: every epoch takes the segments in another order, which depends on the seed alone.

    With `joint`, the widths of both sides and the words are one number, so there are few shapes of batches.
    """

    def __init__(
        self,
        segments: Segments,
        batch_size: int,
        max_length: int,
        seed: int,
        device: torch.device,
        joint: bool = False,
    ) -> None:
        self.teacher_lengths, self.student_lengths = segments.teacher.lengths(), segments.student.lengths()
        self.num_words = np.asarray(segments.num_words)
        self.batch_size, self.max_length, self.seed, self.device = batch_size, max_length, seed, device
        self.joint = joint
        self.num_batches = len(segments) // batch_size
        self.epoch = -1
        self.order = np.zeros((0, batch_size), dtype=np.int64)
        self.on_device = torch.zeros(0, device=device)

    def batch(self, step: int) -> Batch:
        epoch, number = divmod(step, self.num_batches)
        if epoch != self.epoch:
            self.epoch, self.order = epoch, self._shuffled(epoch)
            self.on_device = torch.from_numpy(self.order).to(self.device)
        return self.describe(self.order[number], self.on_device[number])

    def describe(self, segments: np.ndarray, on_device: Tensor) -> Batch:
        teacher = min(_rounded(self.teacher_lengths[segments]), self.max_length)
        student = min(_rounded(self.student_lengths[segments]), self.max_length)
        words = _rounded(self.num_words[segments])
        if self.joint:
            # There are never more words than tokens.
            teacher = student = words = max(teacher, student)
        return Batch(on_device, teacher, student, words, int(self.student_lengths[segments].sum()))

    def _shuffled(self, epoch: int) -> np.ndarray:
        rng = np.random.Generator(np.random.PCG64(derive_seed(self.seed, "epoch", epoch)))
        order = rng.permutation(len(self.num_words))[: self.num_batches * self.batch_size]
        size = self.batch_size * WINDOW
        windows = [order[start : start + size] for start in range(0, len(order), size)]
        ordered = np.concatenate([w[np.argsort(self.student_lengths[w], kind="stable")] for w in windows])
        return ordered.reshape(-1, self.batch_size)[rng.permutation(self.num_batches)]


def _types(divides: Tensor, mask: Tensor) -> Tensor:
    """Count a text's tokens as 0 up to its first divider and as 1 behind it; a single text ends with its only one."""
    behind = divides.cumsum(dim=1) > divides.long()
    return (behind & mask).long()


def _rounded(lengths: np.ndarray) -> int:
    return -(-int(lengths.max()) // MULTIPLE) * MULTIPLE


def _upload(array: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(dtype).to(device)


def num_draws(width: int) -> int:
    """Random numbers that one text needs."""
    return width + 5


def choose_words(num_words: Tensor, num_other: Tensor, drawn: Tensor) -> Tensor:
    """Choose for each word position [batch, width]: no word, the text's word, or the other text's.

    A third of the texts each lose words, have words swapped, or are cut at both ends with the rest from the other
    or from nobody. `drawn` are random numbers from 0 to 1 [batch, num_draws(width)].
    """
    width = drawn.shape[1] - num_draws(0)
    positions = torch.arange(width, device=num_words.device)[None]
    by_word, kind, share, side, ends = torch.split(drawn, [width, 1, 1, 1, 2], dim=1)
    dropped = torch.where(by_word < MOST_DROPPED * share, NEITHER, FIRST)
    swapped = torch.where(by_word < MOST_SWAPPED * share, SECOND, FIRST)
    ends = (ends * num_words[:, None]).sort(dim=1).values
    outside = torch.where(side < 0.5, NEITHER, SECOND)
    cut = torch.where((positions >= ends[:, :1].floor()) & (positions <= ends[:, 1:]), FIRST, outside)
    choice = torch.where(kind < 1 / 3, dropped, torch.where(kind < 2 / 3, swapped, cut))
    choice = torch.where((choice == SECOND) & (positions >= num_other[:, None]), NEITHER, choice)
    choice = torch.where((choice == FIRST) & (positions >= num_words[:, None]), NEITHER, choice)
    nothing = (choice == NEITHER).all(dim=1, keepdim=True)
    return torch.where(nothing & (positions == 0), FIRST, choice)


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
    """Where each token goes: its word's position counted from 1, or nowhere."""
    is_chosen = chosen.gather(1, tokens.words.clamp(min=0)) & (tokens.words >= 0)
    return torch.where(is_chosen, tokens.words + 1, FAR)


def _sizes(tokens: Tokens, choice: Tensor) -> Tensor:
    """Tokens of each word [batch, word]."""
    numbers = torch.arange(choice.shape[1], device=choice.device)
    return (tokens.words[:, None, :] == numbers[None, :, None]).sum(-1)
