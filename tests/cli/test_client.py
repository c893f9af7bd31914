"""What `fedmtl client` makes of its options before it goes to the server."""

from __future__ import annotations

import pytest

from fedmtl.cli.app import app
from fedmtl.deploy.site_worker import policy_files
from fedmtl.errors import FedmtlError
from fedmtl.federation.policy import Policy

pytest.importorskip("flwr")


@pytest.fixture
def complaint():
    from typer.testing import CliRunner

    return lambda *arguments: str(CliRunner().invoke(app, ["client", *arguments]).exception)


@pytest.mark.parametrize("name", ["../up", "a/b", "[/b]", "a b", "\x1b[2J", "x" * 65])
def test_names_of_sites_and_tasks_are_plain(complaint, name):
    assert "no name of a site or a task" in complaint("--client-id", name, "--tasks", "notes")
    assert "no name of a site or a task" in complaint("--client-id", "a", "--tasks", f"notes,{name}")


def test_a_policy_with_a_mistake_ends_the_command_with_its_key(complaint, tmp_path):
    (tmp_path / "policy.yaml").write_text("min_exampels: 3")
    words = complaint("--client-id", "a", "--tasks", "notes", "--policy", str(tmp_path / "policy.yaml"))
    assert "min_exampels: unknown key; did you mean `min_examples`?" in words


def test_files_and_tasks_are_those_of_the_policy(tmp_path):
    ours, other = tmp_path / "notes.tsv", tmp_path / "other.tsv"
    for path in (ours, other):
        path.write_text("x")
    policy = Policy.model_validate({"tasks": {"notes": {"file": str(ours)}, "more": {}}})
    assert policy_files(policy, ("notes", "more"), {}) == {"notes": str(ours)}
    assert policy_files(policy, ("notes",), {"notes": str(tmp_path / "x" / ".." / "notes.tsv")}) == {"notes": str(ours)}
    assert policy_files(Policy(), ("any",), {"any": str(other)}) == {}
    with pytest.raises(FedmtlError, match="is not the file that the policy names for notes"):
        policy_files(policy, ("notes",), {"notes": str(other)})
    with pytest.raises(FedmtlError, match="--tasks: found any, the policy has notes, more"):
        policy_files(policy, ("any",), {})
    ours.unlink()
    with pytest.raises(FedmtlError, match="no such file; the policy names it for notes"):
        policy_files(policy, ("notes",), {})
