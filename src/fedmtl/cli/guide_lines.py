"""A run's events as the guide's log lines, with true counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Event = Mapping[str, Any]


def summary_lines(start: Event, plan: Event) -> list[str]:
    """The start-up summary: who shares how many parameters."""
    heads = plan.get("heads", {})
    lines = [
        "MTL Server Model Summary:",
        f"  Base Model: {start.get('encoder', '–')}",
        f"  Tasks: {list(start.get('tasks', ()))}",
    ]
    in_heads = {f"task:{task}": count for task, count in heads.items()}
    for scope in plan.get("scopes", ()):
        encoder = scope["parameters"] - (in_heads.get(scope["scope"], 0) if scope["level"] == "task" else 0)
        if scope["level"] == "all":
            lines.append(f"  Shared Parameters: {encoder:,}")
        elif encoder and scope["level"] != "fixed":
            lines.append(f"  Parameters of {scope['scope'].replace(':', ' ')}: {encoder:,}")
        elif scope["level"] == "fixed":
            lines.append(f"  Fixed Parameters: {scope['parameters']:,}")
    if plan.get("at_clients"):
        lines.append(f"  Parameters that stay at the clients: {plan['at_clients']:,} in all")
    lines += [f"  Task '{task}' Head: {count:,} parameters" for task, count in heads.items()]
    return [*lines, f"  Total Parameters: {plan.get('total', 0):,}"]


def round_lines(event: Event, start: Event) -> list[str]:
    """What was averaged in a round, over whom; tasks in the config's order."""
    if event["round"] == 0:
        return []
    order = list(start.get("tasks", ()))
    tasks = event.get("tasks", {})
    return [
        f"=== Round {event['round']}/{start.get('num_rounds', '–')} ===",
        f"Aggregating updates from {event.get('clients', 0)} clients across {len(tasks)} tasks",
        *(f"  Task '{task}': {tasks[task]} clients" for task in order if task in tasks),
        *map(_aggregated_line, sorted(event.get("aggregated", ()), key=lambda entry: _place(entry, order))),
    ]


def _place(entry: Event, order: list[str]) -> tuple[int, int]:
    """What all share, then what some share, then the heads."""
    if entry["head"] is not None:
        return 2, order.index(entry["head"]) if entry["head"] in order else len(order)
    return (0 if entry["scope"] == "all" else 1), 0


def _aggregated_line(entry: Event) -> str:
    tensors, clients = entry["tensors"], entry["clients"]
    if entry["head"] is not None:
        return f"Aggregated {tensors} parameters for task '{entry['head']}' head from {clients} clients"
    if entry["scope"] == "all":
        return f"Aggregated {tensors} shared parameters from ALL {clients} clients"
    return f"Aggregated {tensors} parameters of {entry['scope'].replace(':', ' ')} from {clients} clients"
