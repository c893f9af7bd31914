"""One step of general distillation and its loss terms; on a GPU it is recorded once per shape of batch and replayed.

A step of a student this small is some hundred short kernels, and starting them one by one takes longer than they
do. A CUDA graph starts them all at once. What differs between steps goes in through buffers: which segments,
the random numbers, and the learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedmtl.compress.attention import AttentionTap, relation_heads
from fedmtl.compress.distill.intermediate import StateLosses
from fedmtl.compress.pretrain.batches import Batch, DeviceSide, Epochs, Tokens, choose_words, compose, fit, num_draws
from fedmtl.compress.pretrain.same_tokens import token_terms
from fedmtl.compress.pretrain.settings import Losses, PretrainSettings
from fedmtl.compress.pretrain.student import Student
from fedmtl.compress.pretrain.targets import LiveTargets, Targets, TargetSource
from fedmtl.model.bert.layout import mean_pool
from fedmtl.seeds import derive_seed
from fedmtl.training.distillation import hidden_loss, relation_loss, similarity_loss

# Embeddings have no context yet, and what a user takes is the last layer: the weights rise from here to 2.
EMBEDDINGS_WEIGHT = 0.3
# As many as MiniLMv2 uses for small students.
MOST_RELATION_HEADS = 12
# Before anything is recorded: libraries set themselves up, and the optimizer makes its state.
WARM_STEPS = 3


def loss_terms(
    student: Student,
    tap: AttentionTap | None,
    tokens: Tokens,
    word_mask: Tensor,
    targets: Targets,
    losses: Losses,
    *,
    balanced: bool = False,
) -> dict[str, Tensor]:
    """Each term whose weight is not 0, before it is weighted; on a GPU the student runs in bfloat16."""
    device = tokens.ids.device.type
    # Weights that were cast and cached would be stale when a recorded step is replayed.
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda", cache_enabled=False):
        states = student(tokens.ids, tokens.mask)
        relations = () if tap is None else tap.take()
    num_words = word_mask.shape[1]
    terms: dict[str, Tensor] = {}
    if losses.hidden:
        weights = layer_weights(len(states) - 1)
        words = _word_means(tokens, states, num_words)
        # Projected after the mean, which is the same as before it and less work.
        errors = [
            weight * hidden_loss(target, project(state), word_mask)
            for weight, target, project, state in zip(weights, targets.hidden, student.projections, words, strict=True)
        ]
        terms["hidden"] = torch.stack(errors).sum()
    sentences = mean_pool(states[-1].float(), tokens.mask)
    if losses.similarity:
        terms["similarity"] = similarity_loss(targets.sentences, student.projections[-1](sentences), balanced=balanced)
    if losses.own_similarity:
        terms["own_similarity"] = similarity_loss(targets.sentences, sentences, balanced=balanced)
    if relations:
        pairs = list(zip(targets.relations, _word_means(tokens, relations, num_words), strict=True))
        heads = relation_heads(pairs[0][0].shape[-1], pairs[0][1].shape[-1], MOST_RELATION_HEADS)
        terms["attention"] = torch.stack([relation_loss(*pair, word_mask, heads) for pair in pairs]).mean()
    return terms


def _word_means(tokens: Tokens, states: Sequence[Tensor], num_words: int) -> tuple[Tensor, ...]:
    # Side by side in one product: small models wait for launches, not for arithmetic.
    joined = tokens.word_means(torch.cat([state.float() for state in states], dim=-1), num_words)
    return torch.split(joined, [state.shape[-1] for state in states], dim=-1)


def layer_weights(num_layers: int) -> list[float]:
    return [EMBEDDINGS_WEIGHT, *(2 * layer / num_layers for layer in range(1, num_layers + 1))]


def hide_words(tokens: Tokens, is_hidden: Tensor, mask_id: int) -> Tokens:
    """The same tokens with some words [batch, word] replaced by the mask, piece by piece."""
    hidden = is_hidden.gather(1, tokens.words.clamp(min=0)) & (tokens.words >= 0)
    return Tokens(torch.where(hidden, mask_id, tokens.ids), tokens.mask, tokens.words)


@dataclass(frozen=True)
class Data:
    """The student's tokens, the teacher and its answers, and the order of batches, all on one device.

    `losses` compare states of tokens; there are none where teacher and student have different vocabularies.
    """

    tokens: DeviceSide
    num_words: Tensor
    teacher: LiveTargets
    targets: TargetSource
    epochs: Epochs
    mask_id: int
    losses: StateLosses | None = None


class Step:
    """Losses, gradients and the optimizer's step for one batch."""

    def __init__(
        self, student: Student, optimizer: torch.optim.Optimizer, data: Data, settings: PretrainSettings
    ) -> None:
        self.student, self.optimizer, self.data, self.settings = student, optimizer, data, settings
        by_words = settings.losses.attention and data.losses is None
        self.tap = AttentionTap(student.encoder, -1) if by_words else None
        self.parameters = list(student.parameters())
        self.device = self.parameters[0].device

    def __call__(self, batch: Batch, number: int, rate: float) -> dict[str, Tensor]:
        """The losses, and their weighted sum as `total`."""
        self._set_rate(rate)
        return self._compute(batch, self._draw(batch, number), self._share(number))

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _draw(self, batch: Batch, number: int) -> Tensor:
        """All random numbers of a step [segment, any]; they follow from the seed and the step's number."""
        shape = (self.settings.batch, batch.num_words + num_draws(batch.num_words))
        generator = torch.Generator(self.device).manual_seed(derive_seed(self.settings.seed, "step", number))
        return torch.rand(shape, generator=generator, device=self.device)

    def _share(self, number: int) -> float:
        # Every second batch: the other half sees whole sentences, as it will when it is used.
        return self.settings.mask_words if number % 2 else 0.0

    def _compute(self, batch: Batch, drawn: Tensor, share: float | Tensor) -> dict[str, Tensor]:
        settings, num_words = self.settings, batch.num_words
        tokens, words, targets = self._see(batch, drawn[:, num_words:])
        if settings.mask_words:
            tokens = hide_words(tokens, drawn[:, :num_words] < share, self.data.mask_id)
        terms = self._terms(tokens, words, num_words, targets)
        total = torch.stack([settings.losses.weight(name) * term for name, term in terms.items()]).sum()
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, settings.max_grad_norm)
        self.optimizer.step()
        return {name: value.detach() for name, value in {"total": total, **terms}.items()}

    def _terms(self, tokens: Tokens, words: Tensor, num_words: int, targets: Targets) -> dict[str, Tensor]:
        settings, losses = self.settings, self.data.losses
        if losses is not None:
            return token_terms(self.student, losses, tokens, targets, settings.losses, balanced=settings.balanced)
        word_mask = torch.arange(num_words, device=self.device)[None] < words[:, None]
        return loss_terms(
            self.student, self.tap, tokens, word_mask, targets, settings.losses, balanced=settings.balanced
        )

    def _see(self, batch: Batch, drawn: Tensor) -> tuple[Tokens, Tensor, Targets]:
        """What the student sees, the words of each text, and what the teacher says of it."""
        data = self.data
        tokens = data.tokens.take(batch.segments, batch.student_width)
        num_words = data.num_words[batch.segments]
        if not self.settings.altered:
            return tokens, num_words, data.targets(batch)
        teacher_tokens = data.teacher.tokens.take(batch.segments, batch.teacher_width)
        sides = [(tokens, tokens.rolled()), (teacher_tokens, teacher_tokens.rolled())]
        choice = fit(choose_words(num_words, num_words.roll(1), drawn[: len(num_words)]), sides)
        tokens, teacher_tokens = (
            first.with_more(compose(first, second, choice, side.pad_id))
            for (first, second), side in zip(sides, (data.tokens, data.teacher.tokens), strict=True)
        )
        num_words = torch.cat([num_words, (choice > 0).sum(1)])
        return tokens, num_words, data.teacher.answer(teacher_tokens, batch.num_words)


@dataclass(frozen=True)
class _Recorded:
    graph: torch.cuda.CUDAGraph
    segments: Tensor
    drawn: Tensor
    losses: dict[str, Tensor]


class GraphStep(Step):
    """The same on a GPU, from graphs; where something cannot be recorded it says so once and goes on without."""

    def __init__(
        self,
        student: Student,
        optimizer: torch.optim.Optimizer,
        data: Data,
        settings: PretrainSettings,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(student, optimizer, data, settings)
        self.say = say
        self.recorded: dict[tuple[int, int, int], _Recorded] = {}
        self.share = torch.zeros((), device=self.device)
        self.num_warm = 0
        self.is_on = True
        self.stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: Batch, number: int, rate: float) -> dict[str, Tensor]:
        if not self.is_on:
            return super().__call__(batch, number, rate)
        if self.num_warm < WARM_STEPS:
            self.num_warm += 1
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.stream):
                losses = super().__call__(batch, number, rate)
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
            return losses
        shape = (batch.teacher_width, batch.student_width, batch.num_words)
        drawn = self._draw(batch, number)
        if shape not in self.recorded:
            try:
                self.recorded[shape] = self._record(batch, drawn)
            except RuntimeError as error:
                self.is_on = False
                self.say(f"steps cannot be recorded as CUDA graphs, going on without ({str(error).splitlines()[0]})")
                return super().__call__(batch, number, rate)
        recorded = self.recorded[shape]
        self._set_rate(rate)
        self.share.fill_(self._share(number))
        recorded.segments.copy_(batch.segments)
        recorded.drawn.copy_(drawn)
        recorded.graph.replay()
        return recorded.losses

    def _record(self, batch: Batch, drawn: Tensor) -> _Recorded:
        segments, numbers = batch.segments.clone(), drawn.clone()
        fixed = Batch(segments, batch.teacher_width, batch.student_width, batch.num_words, batch.num_tokens)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            losses = self._compute(fixed, numbers, self.share)
        return _Recorded(graph, segments, numbers, losses)
