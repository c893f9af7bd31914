"""The guide's commands as written, as ours."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from fedmtl.cli.guide_main import as_command
from fedmtl.config.file import load_config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("guide", "ours"),
    [
        ("--mode server --config federated_config.yaml", "server --verbose --config federated_config.yaml"),
        ("--mode client --client_id sst2_client --tasks sst2", "client --tasks sst2 --client-id sst2_client"),
        ("--mode client --client_id a --tasks b --server h:1", "client --tasks b --server h:1 --client-id a"),
    ],
)
def test_the_guides_options_become_ours(guide, ours):
    assert as_command(shlex.split(guide)) == shlex.split(ours)


def test_the_guides_config_makes_the_clients_its_commands_name():
    from fedmtl.deploy.tasks import configured_tasks

    held = configured_tasks(load_config(ROOT / "federated_config.yaml"))
    assert held == {"sst2_client": ("sst2",), "qqp_client": ("qqp",), "stsb_client": ("stsb",)}
