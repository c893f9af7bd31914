"""After the README's plain installation, a command that needs an extra says which, and how to install it."""

import sys

import pytest

from small_config import SMALL

LORA = [part for setting in (*SMALL, "model.lora={rank: 2}", "training.num_rounds=0") for part in ("--set", setting)]


@pytest.mark.parametrize(
    ("extra", "package", "arguments"),
    [
        ("flower", "flwr", ["server"]),
        ("flower", "flwr", ["client", "--client-id", "a", "--tasks", "sentiment"]),
        ("flower", "flwr", ["certs", "init", "certs", "--host", "localhost"]),
        ("flower", "cryptography", ["certs", "node", "clinic"]),
        ("flower", "flwr", ["enroll", "clinic", "--key", "clinic.pub", "--tasks", "sentiment"]),
        ("flower", "flwr", ["enrolled"]),
        ("simulation", "ray", ["run", "--engine", "flower"]),
        ("onnx", "onnxscript", ["export", "demo", "--to", "onnx"]),
        ("onnx", "onnxruntime", ["quantize", "demo"]),
        ("onnx", "onnxruntime", ["predict", "model.onnx", "a text"]),
        ("lora", "peft", ["run", *LORA]),
    ],
)
def test_a_missing_extra_is_one_line_with_a_command_that_installs_it(cli, runs, monkeypatch, extra, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    done = cli(*arguments)
    assert done.code == 2
    assert f"needs {package}, which is not installed; run `pip install -c constraints.txt '.[{extra}]'`" in done.error
    assert done.err.count("\n") == 1
