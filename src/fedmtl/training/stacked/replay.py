"""Steps recorded once for each shape of batch as CUDA graphs, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fedmtl.training.stacked.stack import Stack
from fedmtl.training.stacked.store import TokenStore

# Before anything is recorded: libraries set themselves up, kernels are compiled.
WARM_STEPS = 2

StepFunction = Callable[[int, int, str | None], None]


def step_function(stack: Stack, store: TokenStore, device: torch.device) -> StepFunction:
    """A function of the number of places, the width and the task that makes a step from the stack's inputs."""
    if device.type != "cuda":
        return partial(stack.step, store)
    return _Replay(stack, store, device)


class _Replay:
    def __init__(self, stack: Stack, store: TokenStore, device: torch.device) -> None:
        self._stack, self._store, self._device = stack, store, device
        self._graphs: dict[tuple[int, int, str | None], torch.cuda.CUDAGraph] = {}
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, num_places: int, width: int, task: str | None) -> None:
        shape = (num_places, width, task)
        if shape not in self._graphs:
            self._graphs[shape] = self._record(*shape)
        self._graphs[shape].replay()

    def _record(self, num_places: int, width: int, task: str | None) -> torch.cuda.CUDAGraph:
        """Recording needs steps that were made before; those must not count, so that no client has a rate."""
        stack = self._stack
        factors = stack.inputs.factors.clone()
        now = None if stack.lazy is None else stack.lazy.now.clone()
        stack.inputs.factors[0].fill_(-1.0)
        torch.cuda.synchronize(self._device)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_STEPS):
                stack.step(self._store, num_places, width, task)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            stack.step(self._store, num_places, width, task)
        stack.inputs.factors.copy_(factors)
        if now is not None:
            stack.lazy.now.copy_(now)
        return graph
