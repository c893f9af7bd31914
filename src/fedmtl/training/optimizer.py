"""The clients' optimizers, on flat buffers: one fused call for all values that share a decay and a history."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from fedmtl.model.binding import BoundModel, undecayed
from fedmtl.sharing.keys import HEADS, Key
from fedmtl.timing import timed
from fedmtl.training.local_method import LocalMethods, Part
from fedmtl.training.settings import LocalSettings

SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
STEP = "step"
Slots = dict[str, dict[Key, Tensor]]


@dataclass(frozen=True)
class Run:
    """Neighbours in the buffer that are always stepped together; `step` counts their steps.

    `factor` is what the learning rate is multiplied by.
    """

    keys: tuple[Key, ...]
    decay: float
    factor: float
    values: Tensor
    gradients: Tensor
    slots: tuple[Tensor, ...]
    step: Tensor


class FlatOptimizer:
    """AdamW or SGD over a bound model's trainable values.

    A value that a task's loss does not reach is not stepped with that task, and neither decays nor ages: which ones
    those are shows in the first backward pass of each task. `methods` may change gradients and values at each step.
    """

    def __init__(self, bound: BoundModel, settings: LocalSettings, methods: LocalMethods | None = None) -> None:
        self._bound, self._settings, self._methods = bound, settings, methods or LocalMethods()
        names = SLOTS[settings.optimizer]
        slot_names = names if settings.optimizer == "adamw" or settings.momentum else ()
        self._gradients = self._buffer("gradients")
        self._slots = {name: self._buffer(name).zero_() for name in slot_names}
        self._plain = undecayed(bound.model)
        self._steps: dict[Key, Tensor] = {}
        self._used: dict[str, set[Key]] = {}
        self._added: dict[str, list[Tensor]] = {}
        self._task_gradients: dict[str, Tensor] = {}
        self._runs: list[Run] = []
        bound.gradients = {}

    def restore(self, saved: Mapping[str, Mapping[Key, Tensor]]) -> None:
        """Put back what `state` gave; keys that are gone are left out."""
        spans = self._bound.flat.spans
        for name, buffer in self._slots.items():
            for key, value in saved.get(name, {}).items():
                if key in spans:
                    buffer[spans[key]].copy_(value.reshape(-1))
                    self._steps.setdefault(key, self._counter(0.0))
        for key, value in saved.get(STEP, {}).items():
            if key in spans:
                self._steps[key] = self._counter(float(value))

    def state(self) -> Slots:
        """Return slot -> key -> tensor of every value that was ever stepped, for a client's saved state."""
        self._note_steps()
        spans, parameters = self._bound.flat.spans, self._bound.parameters
        slots: Slots = {
            name: {key: buffer[spans[key]].view(parameters[key].shape).cpu().clone() for key in self._steps}
            for name, buffer in self._slots.items()
        }
        if self._settings.optimizer == "adamw":
            slots[STEP] = {key: step.cpu().clone() for key, step in self._steps.items()}
        return {name: values for name, values in slots.items() if values}

    def backward(self, task: str, loss: Tensor) -> None:
        """Put the loss's gradients into the buffer."""
        self._differentiate(task, loss)
        self._methods.task_gradient(task, self._used[task], self._gradients)

    def _differentiate(self, task: str, loss: Tensor) -> None:
        if task in self._used:
            for part in self._added[task]:
                part.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
            return
        parameters = self._bound.parameters
        for key in self._bound.flat.spans:
            parameters[key].grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        self._used[task] = {key for key in self._bound.flat.spans if parameters[key].grad is not None}
        self._note_steps()
        seen = set().union(*self._used.values())
        for key, span in self._bound.flat.spans.items():
            fresh = parameters[key].grad
            if key in seen:
                parameters[key].grad = self._gradients[span].view(parameters[key].shape)
                if fresh is not None:
                    self._gradients[span].copy_(fresh.reshape(-1))
        self._runs = list(self._cut())
        self._note_writers(task)

    def reached(self, task: str) -> set[Key]:
        """The keys that the task's loss reaches, once `backward` has seen it; other gradients are left from before."""
        return self._used[task]

    @timed("optimizer")
    def keep(self, task: str) -> None:
        """Copy the task's gradients that `backward` left in the buffer, for `join`."""
        copy = self._task_gradients[task] = self._buffer(f"gradients of {task}")
        for span in self._spans(task):
            copy[span].copy_(self._gradients[span])

    @timed("optimizer")
    def join(self, tasks: Sequence[str], step: int = 0) -> None:
        """Put the sum of the gradients that `keep` copied into the buffer, or what a method makes of them."""
        joined = self._methods.join(step, {task: self._task_gradients[task] for task in tasks}, self._spans)
        for run in self._of(*tasks):
            run.gradients.zero_()
        for task, gradients in joined:
            for span in self._spans(task):
                self._gradients[span].add_(gradients[span])

    @timed("optimizer")
    def step(self, tasks: str | Sequence[str], rate: float) -> None:
        """Clip the gradients that `backward` or `join` left, and move the values they belong to."""
        runs = self._of(*((tasks,) if isinstance(tasks, str) else tasks))
        self._methods.gradient([Part(self._span(run), run.values, run.gradients) for run in runs])
        clip([run.gradients for run in runs], self._settings.max_grad_norm)
        for (_, factor), group in groupby(runs, key=lambda run: (run.decay, run.factor)):
            self._move(list(group), rate * factor)
        self._methods.stepped(self._bound.flat.values)

    def _move(self, runs: Sequence[Run], rate: float) -> None:
        settings = self._settings
        values, gradients = [run.values for run in runs], [run.gradients for run in runs]
        if settings.optimizer == "sgd":
            momenta = [run.slots[0] if run.slots else None for run in runs]
            sgd(
                values, gradients, momenta, fused=True, weight_decay=runs[0].decay, momentum=settings.momentum,
                lr=rate, dampening=0.0, nesterov=False, maximize=False,
            )  # fmt: skip
            return
        first, second = ([run.slots[number] for run in runs] for number in (0, 1))
        adamw(
            values, gradients, first, second, [], [run.step for run in runs], fused=True, amsgrad=False,
            beta1=settings.betas[0], beta2=settings.betas[1], lr=rate, weight_decay=runs[0].decay,
            eps=settings.epsilon, maximize=False,
        )  # fmt: skip

    def _of(self, *tasks: str) -> list[Run]:
        """Return the runs that any of the tasks reaches."""
        return [run for run in self._runs if any(run.keys[0] in self._used[task] for task in tasks)]

    def _spans(self, *tasks: str) -> list[slice]:
        """Return the spans of the buffer that all of the tasks reach."""
        return [self._span(run) for run in self._runs if all(run.keys[0] in self._used[task] for task in tasks)]

    def _span(self, run: Run) -> slice:
        spans = self._bound.flat.spans
        return slice(spans[run.keys[0]].start, spans[run.keys[-1]].stop)

    def _cut(self) -> Iterator[Run]:
        """The longest runs of neighbours with one decay, one rate, one set of tasks that reach them, one step count."""
        spans = self._bound.flat.spans
        kinds = {
            key: (
                key.name in self._plain,
                self._settings.head_rate if key.name.startswith(HEADS) else 1.0,
                tuple(key in used for used in self._used.values()),
                float(self._steps.get(key, 0.0)),
            )
            for key in spans
        }
        for (is_plain, factor, used, count), group in groupby(spans, key=lambda key: kinds[key]):
            keys = tuple(group)
            if not any(used):
                continue
            span = slice(spans[keys[0]].start, spans[keys[-1]].stop)
            yield Run(
                keys,
                0.0 if is_plain else self._settings.weight_decay,
                factor,
                self._bound.flat.values[span],
                self._gradients[span],
                tuple(buffer[span] for buffer in self._slots.values()),
                self._counter(count),
            )

    def _note_writers(self, task: str) -> None:
        """Let the encoder write this task's gradients into the buffer, and remember where others are added up."""
        bound = self._bound
        views = {
            name: self._gradients[bound.flat.spans[key]].view(bound.parameters[key].shape)
            for name, key in bound.views[task].items()
            if key in self._used[task] and bound.model.writes_gradients and not name.startswith(HEADS)
        }
        written = {bound.views[task][name] for name in views}
        bound.gradients[task] = views
        kinds = {key: key in self._used[task] and key not in written for key in bound.flat.spans}
        self._added[task] = []
        for is_added, group in groupby(bound.flat.spans.items(), key=lambda item: kinds[item[0]]):
            group_spans = [span for _, span in group]
            if is_added:
                self._added[task].append(self._gradients[group_spans[0].start : group_spans[-1].stop])

    def _note_steps(self) -> None:
        for run in self._runs:
            self._steps |= {key: run.step.clone() for key in run.keys}

    def _buffer(self, name: str) -> Tensor:
        values = self._bound.flat.values
        return self._bound.buffers.take(name, values.numel(), values.dtype, values.device)

    def _counter(self, count: float) -> Tensor:
        return torch.tensor(count, dtype=torch.float32, device=self._bound.flat.values.device)


def clip(gradients: Sequence[Tensor], max_norm: float) -> None:
    """Scale the gradients so that their common norm is at most `max_norm`; 0 is off."""
    if max_norm <= 0 or not gradients:
        return
    norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    factor = max_norm / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)
    # A GPU multiplies by one sooner than it tells that it need not.
    if factor.device.type != "cpu" or float(factor) < 1.0:
        for gradient in gradients:
            gradient.mul_(factor.clamp(max=1.0))
