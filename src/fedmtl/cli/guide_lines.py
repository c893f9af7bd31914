"""A run's events as the guide's log lines, with true counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]


def summary_lines(start: Event, plan: Event) -> list[str]:
    """The start-up summary: who shares how many parameters."""
    heads = plan["heads"]
    lines = [
        "MTL Server Model Summary:",
        f"  Base Model: {start['encoder']}",
        f"  Tasks: {list(start['tasks'])}",
    ]
    in_heads = {f"task:{task}": count for task, count in heads.items()}
    for scope in plan["scopes"]:
        encoder = scope["parameters"] - (in_heads.get(scope["scope"], 0) if scope["level"] == "task" else 0)
        if scope["level"] == "all":
            lines.append(f"  Shared Parameters: {encoder:,}")
        elif encoder and scope["level"] != "fixed":
            lines.append(f"  Parameters of {scope['scope'].replace(':', ' ')}: {encoder:,}")
        elif scope["level"] == "fixed":
            lines.append(f"  Fixed Parameters: {scope['parameters']:,}")
    lines += [f"  Task '{task}' Head: {count:,} parameters" for task, count in heads.items()]
    return [*lines, f"  Total Parameters: {plan['total']:,}"]


def round_lines(event: Event, num_rounds: int) -> list[str]:
    """What was averaged in a round, over whom."""
    if event["round"] == 0:
        return []
    tasks = event["tasks"]
    lines = [
        f"=== Round {event['round']}/{num_rounds} ===",
        f"Aggregating updates from {event['clients']} clients across {len(tasks)} tasks",
        *(f"  Task '{task}': {count} clients" for task, count in sorted(tasks.items())),
    ]
    for entry in event["aggregated"]:
        tensors, clients = entry["tensors"], entry["clients"]
        if entry["head"] is not None:
            lines.append(f"Aggregated {tensors} parameters for task '{entry['head']}' head from {clients} clients")
        elif entry["scope"] == "all":
            lines.append(f"Aggregated {tensors} shared parameters from ALL {clients} clients")
        else:
            lines.append(
                f"Aggregated {tensors} parameters of {entry['scope'].replace(':', ' ')} from {clients} clients"
            )
    return lines
