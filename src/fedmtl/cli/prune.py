"""fedmtl prune"""

from __future__ import annotations

from typing import Annotated

import typer

from fedmtl.cli.arguments import Run, Settings
from fedmtl.cli.progress import make_display
from fedmtl.cli.terminal import write
from fedmtl.runs import RunFolder, find_run, read_events


def prune(
    run: Run,
    amount: Annotated[float, typer.Option(help="Share of the linear weights that become zero, the smallest.")] = 0.0,
    ffn: Annotated[float, typer.Option(help="Share of each layer's feed-forward neurons to remove.")] = 0.0,
    heads: Annotated[float, typer.Option(help="Share of each layer's attention heads to remove.")] = 0.0,
    layers: Annotated[int, typer.Option(help="Layers to remove from the top.", min=0)] = 0,
    epochs: Annotated[int, typer.Option(help="Epochs to train, one a round; 0 only prunes and scores.", min=0)] = 6,
    out: Annotated[str | None, typer.Option(help="The new run's name; otherwise this one's with -pruned.")] = None,
    set: Settings = None,
) -> None:
    """Take weights out of a finished run's model, and train what is left in a new run on the same data."""
    found = find_run(run)
    display = make_display(stderr=False)
    with display:
        from fedmtl.compress.cut import Cut
        from fedmtl.compress.prune import prune_run
        from fedmtl.experiment.run import start_run

        pruned = prune_run(found, Cut(amount, ffn, layers, heads), epochs, set or [])
        before, after = pruned.parameters
        display.say(f"{found.name}: {before:,} parameters" + (f", {after:,} after the cut" if after < before else ""))
        done = start_run(pruned.config, out or f"{found.name}-pruned", display)
    display.finish(done)
    told = _sparsity(done)
    if told:
        write(told)


def _sparsity(run: RunFolder) -> str | None:
    """What came to be zero, in words; None where nothing was pruned by magnitude."""
    last = next((event for event in reversed(read_events(run)) if event["event"] == "pruning"), None)
    if last is None:
        return None
    linear, every = (last[part]["zeros"] / last[part]["weights"] for part in ("linear", "all"))
    return f"zero: {linear:.1%} of the linear layers, {every:.1%} of all weights"
