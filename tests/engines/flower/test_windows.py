"""Sites that read long texts in windows: the weights of one machine, and how many texts are cut."""

import json
import sys
from pathlib import Path

import pytest

from engines.flower.deployment import of_kind
from engines.flower.processes import deployed_and_alone
from fedmtl.config.file import load_config

pytestmark = [
    # A server and two sites are processes that import torch.
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc"),
]


def write_texts(folder: Path, name: str) -> Path:
    """Texts of 6 to 45 words, whose last word says which label they have."""
    path = folder / f"{name}.jsonl"
    rows = [
        {
            "text": " ".join(["the film was long and"] * (1 + n % 9)) + (" dull" if n % 2 else " fine"),
            "mood": "ab"[n % 2],
        }
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_sites_give_the_weights_and_the_scores_of_one_machine(tmp_path):
    sites = {f"site{n}": write_texts(tmp_path, f"at{n}") for n in range(2)}
    clients = {name: {"tasks": ["moods"], "source": {"moods": str(path)}} for name, path in sites.items()}
    overrides = [
        "defaults=plain", "model.server_model=random-1x32", "training.num_rounds=2", "training.learning_rate=3e-3",
        "tasks.moods={kind: classification, text: [text], label: mood, labels: [a, b]}", "evaluation.where=clients",
        "model.windows={length: 16, stride: 10, most: 3, pool: attention}", "compute.device=cpu", "compute.workers=1",
        f"output={tmp_path / 'runs'}",
    ]  # fmt: skip
    config = load_config(None, [*overrides, f"clients={json.dumps(clients)}"])
    deployed, alone = deployed_and_alone(tmp_path, config, {name: ("moods", path) for name, path in sites.items()})
    assert of_kind(deployed, "end")[0]["weights_sha256"] == of_kind(alone, "end")[0]["weights_sha256"]
    assert of_kind(deployed, "evaluation") == of_kind(alone, "evaluation")
    ours, theirs = of_kind(deployed, "data")[0], of_kind(alone, "data")[0]
    for name in ("train", "tokens", "truncated", "windowed", "windows", "most_windows", "max_length"):
        assert ours[name] == theirs[name], name
    assert ours["windows"] > ours["windowed"] > 0
    assert ours["truncated"] > 0
