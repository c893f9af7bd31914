"""What the teacher says of a batch, by word: computed once and cached where it fits, else again for every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedmtl.compress.attention import AttentionTap
from fedmtl.compress.distill.intermediate import States
from fedmtl.compress.pretrain.batches import Batch, DeviceSide, Epochs, Tokens
from fedmtl.compress.pretrain.segments import Segments
from fedmtl.model.bert.layout import mean_pool
from fedmtl.model.encoder import Encoder

# Shares of the memory that is free on a GPU, and bytes on a CPU, that cached states may take.
GPU_SHARE = 0.6
CPU_BYTES = 2 * 2**30


@dataclass(frozen=True)
class Wanted:
    """Which of the teacher's hidden states, and whose layer's queries, keys and values, the losses use."""

    hidden: tuple[int, ...]
    attention: int | None

    @property
    def num_states(self) -> int:
        return len(self.hidden) + (0 if self.attention is None else 3)


@dataclass(frozen=True)
class Targets:
    """States [batch, word, width] of each layer wanted, relations likewise, and sentences [batch, width].

    With the teacher's vocabulary the states are those of tokens, in `states`, and there are none of words.
    """

    hidden: tuple[Tensor, ...]
    relations: tuple[Tensor, ...]
    sentences: Tensor
    states: States | None = None


class TargetSource(Protocol):
    def __call__(self, batch: Batch) -> Targets: ...


class LiveTargets:
    """Runs the teacher on the batch."""

    def __init__(self, encoder: Encoder, tokens: DeviceSide, wanted: Wanted) -> None:
        self.encoder, self.tokens, self.wanted = encoder, tokens, wanted
        self.is_bert = encoder.module.config.model_type == "bert"
        self.tap = None if wanted.attention is None else AttentionTap(encoder.module, wanted.attention)

    def __call__(self, batch: Batch) -> Targets:
        return self.answer(self.tokens.take(batch.segments, batch.teacher_width), batch.num_words)

    @torch.no_grad()
    def answer(self, tokens: Tokens, num_words: int) -> Targets:
        """What the teacher says of any texts."""
        states = self.hidden_states(tokens)
        relations = () if self.tap is None else self.tap.take()
        return Targets(
            tuple(tokens.word_means(states[layer], num_words) for layer in self.wanted.hidden),
            tuple(tokens.word_means(state, num_words) for state in relations),
            mean_pool(states[-1].float(), tokens.mask),
        )

    def hidden_states(self, tokens: Tokens) -> tuple[Tensor, ...]:
        """All hidden states [batch, token, width] of the teacher, embeddings first."""
        # As for the student: BERT takes four dimensions as they are and asks the device nothing.
        mask = tokens.mask[:, None, None, :] if self.is_bert else tokens.mask.long()
        offered = {"input_ids": tokens.ids, "attention_mask": mask}
        if tokens.types is not None:
            offered["token_type_ids"] = tokens.types
        given: dict[str, Any] = {name: value for name, value in offered.items() if name in self.encoder.accepts}
        states: tuple[Tensor, ...] = self.encoder.module(**given, output_hidden_states=True).hidden_states
        return states


class CachedTargets:
    """The teacher's answers for every segment, on the device."""

    def __init__(
        self,
        live: LiveTargets,
        segments: Segments,
        epochs: Epochs,
        report: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        device = epochs.device
        starts = np.concatenate([[0], np.cumsum(segments.num_words)])
        self.starts = torch.from_numpy(starts[:-1]).to(device)
        self.last = int(starts[-1]) - 1
        self.num_hidden = len(live.wanted.hidden)
        counts = torch.from_numpy(segments.num_words.copy()).to(device)
        self.states: list[Tensor] = []
        self.sentences = torch.zeros(0, device=device)
        by_length = np.argsort(segments.teacher.lengths(), kind="stable")
        for start in range(0, len(by_length), epochs.batch_size):
            part = by_length[start : start + epochs.batch_size]
            batch = epochs.describe(part, torch.from_numpy(part).to(device))
            targets = live(batch)
            found = (*targets.hidden, *targets.relations)
            if not len(self.sentences):
                self.states = [
                    state.new_empty(self.last + 1, state.shape[-1], dtype=cache_dtype(device)) for state in found
                ]
                self.sentences = targets.sentences.new_empty(len(by_length), targets.sentences.shape[-1])
            columns = torch.arange(batch.num_words, device=device)[None]
            is_word = columns < counts[batch.segments][:, None]
            positions = (self.starts[batch.segments][:, None] + columns)[is_word]
            for cached, state in zip(self.states, found, strict=True):
                cached[positions] = state[is_word].to(cached.dtype)
            self.sentences[batch.segments] = targets.sentences
            report(min(start + epochs.batch_size, len(by_length)), len(by_length))

    def __call__(self, batch: Batch) -> Targets:
        columns = torch.arange(batch.num_words, device=self.starts.device)[None]
        # Behind a segment's last word stand the next segment's; the losses' mask leaves them out.
        positions = (self.starts[batch.segments][:, None] + columns).clamp(max=self.last)
        states = tuple(state[positions] for state in self.states)
        return Targets(states[: self.num_hidden], states[self.num_hidden :], self.sentences[batch.segments])


def cache_dtype(device: torch.device) -> torch.dtype:
    """The type of cached states: bfloat16 on a GPU, where the teacher computes in it, so that nothing is lost."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def fits(segments: Segments, wanted: Wanted, width: int, device: torch.device) -> bool:
    """Whether the teacher's answers for all segments fit the device's memory."""
    size = cache_dtype(device).itemsize
    needed = int(segments.num_words.sum()) * width * wanted.num_states * size + len(segments) * width * 4
    available = GPU_SHARE * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else CPU_BYTES
    return needed <= available
