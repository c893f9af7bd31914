"""The five sharing levels as words and colours."""

from __future__ import annotations

from .markup import Html, tag

LEVELS = {
    "all": "one value for every client",
    "group": "one value for each group of tasks",
    "task": "one value for each task",
    "client": "stays at its client",
    "fixed": "the same everywhere, never moves",
}


def level_class(level: object) -> str:
    """The CSS class of a level; `group.2` is drawn as `group`."""
    word = str(level).split(".")[0]
    return f"level-{word}" if word in LEVELS else "level-fixed"


def chip(level: object) -> Html:
    return tag("span", level, class_=f"chip {level_class(level)}")
