"""SMART: outputs that stay the same under small changes of the embeddings (Jiang et al. 2020).

Added to the task's loss: weight * R + bregman * B, both means over the batch. R is the divergence between the outputs
at the word embeddings and at those plus the worst noise found in a ball around them; B that between the outputs and
those of an average of the weights so far. Other than in public code, the noise enters the encoder once, its ball is a
true one, and all passes of a step drop the same values, so that what is compared differs by the noise alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedmtl.capabilities import Capability
from fedmtl.config import Config, SmartConfig
from fedmtl.model.multitask import BoundModel, Inputs
from fedmtl.seeds import derive_seed
from fedmtl.sharing.plan import Extra, SharingPlan
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import LocalClient, LocalMethod, LocalStep

NAME = "smart"

# Step over radius in the paper (1e-3 over 1e-5): entries within a hundredth of the largest gradient reach the edge.
REACH = 100.0


class Smart:
    """What SMART adds to the losses of one client in one round; the averaged weights start as those it received."""

    def __init__(self, bound: BoundModel, settings: SmartConfig, seed: int, device: torch.device) -> None:
        self._bound, self._settings, self._device = bound, settings, device
        # Not the global one, so that dropout draws what it would without SMART.
        self._generator = torch.Generator(device).manual_seed(derive_seed(seed, "smart"))
        self._average = bound.flat.values.clone() if settings.bregman else None
        self._averaged: dict[str, dict[str, nn.Parameter]] = {}

    def outputs(self, task: str, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The outputs that the task's loss is made from, and what is to be added to that loss."""
        settings, definition = self._settings, self._bound.model.tasks[task]
        dropout = SameDropout(self._device)
        around = self._start(definition, inputs) if settings.perturb == "both" else None
        past = None if self._average is None else self._past(task, inputs, around, dropout)
        outputs = self._pass(task, inputs, around, dropout)
        added = outputs.new_zeros(())
        if settings.weight:
            noise = self.find_noise(task, inputs, outputs.detach(), around, dropout)
            perturbed = self._pass(task, inputs, _sum(around, noise), dropout)
            added = added + settings.weight * divergences(definition, perturbed, outputs).mean()
        if past is not None:
            added = added + settings.bregman * divergences(definition, outputs, past).mean()
        return outputs, added

    def find_noise(
        self, task: str, inputs: Inputs, outputs: Tensor, around: Tensor | None, dropout: SameDropout
    ) -> Tensor:
        """Noise in the ball, by ascent on the divergence from `outputs`; examples do not affect each other."""
        settings, definition = self._settings, self._bound.model.tasks[task]
        step_size = REACH * settings.radius if settings.step_size is None else settings.step_size
        noise = self._start(definition, inputs)
        for _ in range(settings.steps):
            noise.requires_grad_()
            perturbed = self._pass(task, inputs, _sum(around, noise), dropout)
            (gradient,) = torch.autograd.grad(divergences(definition, perturbed, outputs).sum(), noise)
            norms = example_norms(definition, gradient, settings.norm).clamp(min=torch.finfo(gradient.dtype).tiny)
            noise = noise.detach() + step_size * gradient / norms * _real(inputs, gradient)
            noise = project(definition, noise, settings.norm, settings.radius)
        return noise

    def stepped(self) -> None:
        """Take the weights after a step into the average."""
        if self._average is not None:
            self._average.lerp_(self._bound.flat.values, 1.0 - self._settings.momentum)

    def _pass(self, task: str, inputs: Inputs, noise: Tensor | None, dropout: SameDropout) -> Tensor:
        dropout.again()
        outputs: Tensor = self._bound.model(task, inputs, noise)
        return outputs

    def _start(self, task: Task, inputs: Inputs) -> Tensor:
        """Random noise in the ball, none at padding."""
        settings, model = self._settings, self._bound.model
        table = model.token_table().weight
        deviation = settings.radius if settings.noise is None else settings.noise
        shape = (*inputs.ids.shape, table.shape[1])
        noise = torch.randn(shape, generator=self._generator, dtype=table.dtype, device=self._device)
        return project(task, deviation * noise * _real(inputs, noise), settings.norm, settings.radius)

    @torch.no_grad()
    def _past(self, task: str, inputs: Inputs, noise: Tensor | None, dropout: SameDropout) -> Tensor:
        """The outputs of the averaged weights."""
        modules = self._bound.model.canonical()
        for name, parameter in self._averages(task).items():
            module, leaf = modules[name]
            module._parameters[leaf] = parameter
        outputs = self._pass(task, inputs, noise, dropout)
        self._bound.use(task)
        return outputs

    def _averages(self, task: str) -> dict[str, nn.Parameter]:
        assert self._average is not None
        if task not in self._averaged:
            spans, parameters = self._bound.flat.spans, self._bound.parameters
            self._averaged[task] = {
                name: nn.Parameter(self._average[spans[key]].view(parameters[key].shape), requires_grad=False)
                for name, key in self._bound.views[task].items()
                if key in spans
            }
        return self._averaged[task]


class SameDropout:
    """The random numbers of one step: every pass that begins with `again` drops the same values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._host = torch.get_rng_state()
        self._there = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def again(self) -> None:
        torch.set_rng_state(self._host)
        if self._there is not None:
            torch.cuda.set_rng_state(self._there, self._device)  # type: ignore[arg-type]


def divergences(task: Task, first: Tensor, second: Tensor) -> Tensor:
    """How far two sets of outputs are apart, for every example; exactly 0 where both are equal."""
    return task.kind_of.divergences(task, first, second)


def example_norms(task: Task, noise: Tensor, norm: str) -> Tensor:
    """The norm of each example's noise, for every row of it; both texts of a dual pair are one example."""
    order = float(norm)
    by_row = torch.linalg.vector_norm(noise, order, dim=(1, 2))
    num_parts = 2 if task.is_dual else 1
    by_example: Tensor = torch.linalg.vector_norm(by_row.view(num_parts, -1), order, dim=0)
    return by_example.repeat(num_parts).view(-1, 1, 1)


def project(task: Task, noise: Tensor, norm: str, radius: float) -> Tensor:
    """The nearest noise in the ball."""
    if norm == "inf":
        return noise.clamp(-radius, radius)
    return noise * (radius / example_norms(task, noise, norm).clamp(min=radius))


def step_passes(settings: SmartConfig | None) -> dict[str, int]:
    """How many passes a training step makes through the model, forward and back."""
    if settings is None:
        return {"forward": 1, "backward": 1}
    searched = settings.steps + 1 if settings.weight else 0
    return {"forward": 1 + searched + bool(settings.bregman), "backward": 1 + searched}


def _real(inputs: Inputs, like: Tensor) -> Tensor:
    return inputs.mask.unsqueeze(-1).to(like.dtype)


def _sum(around: Tensor | None, noise: Tensor) -> Tensor:
    return noise if around is None else around + noise


class SmartMethod(LocalMethod):
    """Computes a step's outputs as SMART needs them, and adds its term to their loss."""

    name = NAME
    more_passes = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = SmartConfig.model_validate(options)
        self._smart: Smart | None = None
        self._added: Tensor | None = None

    def start(self, client: LocalClient, received: Extra, stored: Extra) -> None:
        self._smart = Smart(client.bound, self._options, client.seed, client.device)

    def outputs(self, step: LocalStep) -> Tensor:
        assert self._smart is not None
        outputs, self._added = self._smart.outputs(step.task, step.inputs)
        return outputs

    def loss(self, step: LocalStep, outputs: Tensor, loss: Tensor) -> Tensor:
        assert self._added is not None
        return loss + self._added

    def stepped(self, values: Tensor) -> None:
        assert self._smart is not None
        self._smart.stepped()


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    return None if config.training.smart is None else config.training.smart.model_dump()


CAPABILITY = Capability(NAME, SmartMethod, _client_options)
