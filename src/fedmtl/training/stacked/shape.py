"""What clients must have in common to train as one stack, and how many of them fit into memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.plan import HEADS, Key, SharingPlan

# Token tables are rounded up to this many rows, so that a stack serves other clients of about the same size.
ROWS = 1024
# More than this adds nothing: the products are large enough.
MOST = 64
SHARE = 0.6


@dataclass(frozen=True)
class StackShape:
    """The sizes of a stack's buffers; `heads` gives each task in it a range of clients.

    A client has at most `num_examples` in a pass, in `num_sequences`, with `num_labels`, a text at most `num_windows`,
    0 where none has windows. `trained` are the names of the values that take gradients, `num_steps` the most steps of
    a round.
    """

    num_clients: int
    num_rows: int
    pool: str
    heads: tuple[tuple[str, int, int], ...]
    trained: tuple[str, ...]
    num_examples: int
    num_sequences: int
    num_steps: int
    num_labels: int
    num_windows: int = 0

    @property
    def head_rows(self) -> list[tuple[str, slice]]:
        return [(task, slice(start, stop)) for task, start, stop in self.heads]


def stacks_with(
    model: MultiTaskModel, tasks: Sequence[str], keys: Mapping[str, Mapping[str, Key]], plan: SharingPlan
) -> str | None:
    """A label that clients of one stack share, or None where a client must train alone.

    `keys` are its views: canonical name -> key, of every task. Several tasks must have one encoder, whole.
    """
    if model.layout is None or not all(model.tasks[task].kind_of.stacks for task in tasks):
        return None
    encoders = [{name: key for name, key in keys[task].items() if not name.startswith(HEADS)} for task in tasks]
    pools = {model.pools[task] for task in tasks}
    fixed = sorted(name for name, key in encoders[0].items() if not plan.trains(key))
    unmoved = {name for view in keys.values() for name, key in view.items() if not plan.trains(key)}
    # A step of a task of which nothing moves is a loss to report, and no step.
    is_moved = all(reached(model, task, keys[task], unmoved) for task in tasks)
    if not is_moved or len(pools) > 1 or any(encoder != encoders[0] for encoder in encoders):
        return None
    parts = ["dual" if model.tasks[task].is_dual else "one" for task in tasks]
    return "/".join([*pools, *parts, *fixed])


def reached(model: MultiTaskModel, task: str, view: Mapping[str, Key], fixed: Collection[str] = ()) -> list[str]:
    """Return the names of the values that this task's loss moves; those of `fixed` do not train."""
    unused = () if model.pools[task] == "pooler" else ("pooler.",)
    head = (f"{HEADS}{task}.",)
    return [
        name
        for name, key in view.items()
        if key.scope != "fixed"
        and name not in fixed
        and not name.startswith(unused)
        and (not name.startswith(HEADS) or name.startswith(head))
    ]


def round_rows(count: int) -> int:
    return -(-count // ROWS) * ROWS


def clients_at_once(
    model: MultiTaskModel, batch_size: int, max_length: int, free_bytes: int, dtype: torch.dtype
) -> int:
    """As many as fit into a share of the free memory; 0 where the encoder is of a kind that cannot be stacked."""
    if model.layout is None:
        return 0
    return max(1, min(MOST, int(SHARE * free_bytes) // client_bytes(model, batch_size, max_length, dtype)))


def client_bytes(model: MultiTaskModel, batch_size: int, max_length: int, dtype: torch.dtype) -> int:
    """Estimate one client's bytes: values, their initial copy, gradients, AdamW's two means, activations."""
    assert model.layout is not None
    parameters: int = sum(getattr(module, leaf).numel() for module, leaf in model.canonical().values())
    computed = 0 if dtype == torch.float32 else dtype.itemsize
    width = int(model.token_table().weight.shape[1])
    # The backward pass needs about 34 activations of the hidden width per token and layer (Korthikanti et al. 2022).
    activations = 34 * width * model.layout.num_layers * batch_size * max_length
    return parameters * (5 * 4 + computed) + activations * dtype.itemsize // 2
