"""Runs side by side, and a study's cells as a grid."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fedmtl.config.yaml_text import parse_yaml
from fedmtl.dashboard.card import words
from fedmtl.dashboard.files import STUDY, Found, open_inside
from fedmtl.dashboard.state import RunState, config_rows
from fedmtl.errors import FedmtlError

# Where a run lies and what carries it says nothing of what it came to.
_NOT_COMPARED = ("output", "data.cache")
_CELL = re.compile(r"(?P<setup>.+)-seed(?P<seed>\d{1,9})")
LARGEST_STUDY, MOST_CELLS, MOST_OPTIONS = 1 << 20, 5_000, 60
ABSENT = "(absent)"


def comparison(states: Sequence[RunState]) -> dict[str, Any]:
    """The heads and curves of these runs, and the settings in which they differ, a value for each run."""
    sections = [state.sections({})[0] for state in states]
    return {
        "runs": [{"head": part["head"], "curves": part["curves"]} for part in sections],
        "differences": differences([state.config for state in states]),
    }


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The keys whose values are not the same in all configs; one that a config lacks is absent there."""
    flat = [{key: _text(value) for key, value, _, _ in config_rows(config)} for config in configs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return [
        {"key": words(key, 120), "values": [words(values.get(key, ABSENT)) for values in flat]}
        for key in keys
        if key not in _NOT_COMPARED and len({values.get(key, ABSENT) for values in flat}) > 1
    ]


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def study(found: Found, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The grid of a study: setups by seeds, each with its run where there is one, and what the study is to do."""
    options = _options(found)
    setups: dict[str, dict[str, Mapping[str, Any]]] = {}
    seeds: dict[int, None] = dict.fromkeys(_seeds(options))
    for row in [row for row in rows if row["study"] == found.id][:MOST_CELLS]:
        name = row["id"].rpartition("/")[2]
        match = _CELL.fullmatch(name)
        if match:
            seeds[int(match["seed"])] = None
        setup, seed = (match["setup"], str(int(match["seed"]))) if match else (name, "")
        setups.setdefault(words(setup, 120), {})[seed] = row
    columns = [str(seed) for seed in sorted(seeds)]
    if any("" in cells for cells in setups.values()):
        columns.append("")
    return {
        "id": found.id,
        "name": words(found.name, 120),
        "options": [[words(key, 80), words(_text(value))] for key, value in list(options.items())[:MOST_OPTIONS]],
        "seeds": columns,
        "setups": [{"name": name, "cells": cells} for name, cells in setups.items()],
    }


def _options(found: Found) -> dict[str, Any]:
    """What study.yaml says; nothing where it cannot be read."""
    try:
        descriptor = open_inside(found.root, (*found.parts, STUDY))
    except OSError:
        return {}
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(LARGEST_STUDY + 1)
    if len(data) > LARGEST_STUDY:
        return {}
    try:
        value = parse_yaml(data.decode("utf-8", "replace"), where=STUDY)
    except FedmtlError:
        return {}
    return {str(key): inner for key, inner in value.items()} if isinstance(value, Mapping) else {}


def _seeds(options: Mapping[str, Any]) -> list[int]:
    """The seeds that the study is to run, where its options list them."""
    seeds = options.get("seeds")
    return (
        [seed for seed in seeds if isinstance(seed, int) and 0 <= seed < 10**9][:100] if isinstance(seeds, list) else []
    )
