"""What events.jsonl says, as JSON objects: tests that check the file do not go through the classes that wrote it."""

from __future__ import annotations

import json
from typing import Any

from fedmtl.runs.folder import RunFolder


def raw_events(run: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.events.read_bytes().splitlines()]
