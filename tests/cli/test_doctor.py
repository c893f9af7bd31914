"""One table, one object, and what the exit code says."""

import json
import socket
import subprocess
import sys

import pytest

from fedmtl.deploy import doctor
from fedmtl.deploy.machine import Finding


def test_a_fault_ends_with_2_and_stands_in_the_table_with_what_to_do(cli, monkeypatch):
    monkeypatch.setattr(doctor, "version_findings", lambda: [Finding("torch", "ok", "2.13.0")])
    monkeypatch.setattr(doctor, "kernel_finding", lambda: Finding("kernels", "warning", "[stale]", "compile them"))
    monkeypatch.setattr(doctor, "gpu_finding", lambda device: Finding("gpu", "ok", "none"))
    monkeypatch.setattr(doctor, "clock_finding", lambda: Finding("clock", "ok", "now"))
    fine = cli("doctor")
    assert (fine.code, fine.err) == (0, "")
    assert "warning  kernels" in fine.out
    assert "[stale]" in fine.out
    assert "faults: 0, warnings: 1, lines in all: 7" in fine.out
    assert "a server's clock: --server" in fine.out
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        done = cli("doctor", "--listen", address, "--json")
    record = json.loads(done.out)
    assert done.code == 2
    assert (record["faults"], record["warnings"]) == (1, 1)
    (fault,) = (each for each in record["findings"] if each["level"] == "fault")
    assert fault["about"] == f"port {address}"
    assert fault["remedy"]
    assert not any("--listen" in each for each in record["not_examined"])


def test_a_config_that_cannot_be_read_is_a_finding_and_the_machine_is_looked_at_all_the_same(cli, tmp_path):
    (tmp_path / "wrong.yaml").write_text("trainning: {}\n")
    done = cli("doctor", "--config", "wrong.yaml", "--json")
    assert done.code == 2
    found = {each["about"]: each for each in json.loads(done.out)["findings"]}
    assert "trainning" in found["config"]["found"]
    assert found["torch"]["level"] in ("ok", "warning")
    assert "kernels" in found


@pytest.mark.slow
def test_without_torch_everything_else_is_looked_at(tmp_path):
    (tmp_path / "policy.yaml").write_text("min_examples: 5\n")
    (tmp_path / "small.yaml").write_text("tasks: {sentiment: }\n")
    code = """
import sys
sys.modules["torch"] = None
from fedmtl.cli import main
sys.argv[1:] = ["doctor", "--json", "--policy", "policy.yaml", "--config", "small.yaml"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    found = {each["about"]: each for each in json.loads(done.stdout)["findings"]}
    assert found["torch"]["level"] == "fault"
    assert "cannot be imported" in found["torch"]["found"]
    assert "needs torch" in found["policy policy.yaml"]["found"]
    assert found["tokenizer of tiny"]["level"] == "ok"
