import subprocess

import pytest
import torch

from fedmtl.model.bert.cpu import compile_kernels as script
from fedmtl.model.bert.cpu.encoder_pass import kernels, load
from model.compiled import compiled

# Rows that fill no tile, one tile and several, and more than one block of them.
ROWS = (1, 5, 12, 31, 100, 250, 491)


def make(dtype):
    found = compiled(dtype)
    if found is None:
        pytest.skip("no compiler, or a CPU without AVX-512")
    return found


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-4), (torch.float64, 1e-12)])
def test_products_are_those_of_torch(rows, dtype, atol):
    found = make(dtype)
    torch.manual_seed(rows)
    x, w, b = torch.randn(rows, 64).to(dtype), torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    y, packed = torch.full((rows, 96), torch.nan, dtype=dtype), torch.empty(96 * 64, dtype=dtype)
    found.call("linear", rows, 96, 64, x, w, b, packed, y)
    torch.testing.assert_close(y, torch.addmm(b, x, w.t()), atol=atol, rtol=0)
    g = torch.randn(rows, 96).to(dtype)
    by_x, by_w = torch.full_like(x, torch.nan), torch.full_like(w, torch.nan)
    found.call("linear_inputs", rows, 96, 64, g, w, by_x, 0)
    torch.testing.assert_close(by_x, g @ w, atol=atol, rtol=0)
    found.call("linear_inputs", rows, 96, 64, g, w, by_x, 1)
    torch.testing.assert_close(by_x, 2 * (g @ w), atol=2 * atol, rtol=0)
    found.call("linear_values", rows, 96, 64, g, x, by_w)
    torch.testing.assert_close(by_w, g.t() @ x, atol=atol, rtol=0)


@pytest.mark.parametrize("lengths", [[1], [16, 3], [33, 17, 2, 40]])
def test_single_precision_attention_is_as_good_as_torchs(lengths):
    # Scores of up to about 60, so that some shares are nearly one and others nearly none.
    found = make(torch.float32)
    torch.manual_seed(0)
    joint = 3 * torch.randn(sum(lengths), 3 * 64)
    width, size = 48, 32
    shares, mixed = torch.zeros(len(lengths) * 2, width, width), torch.zeros(sum(lengths), 64)
    room = torch.empty((size + width) * width)
    found.call("attend", len(lengths), 2, size, width, torch.tensor(lengths), joint, None, shares, mixed, room)
    exact = []
    for part in joint.double().split(lengths):
        q, k, v = (each.view(-1, 2, size).transpose(0, 1) for each in part.chunk(3, 1))
        exact.append(((q @ k.transpose(1, 2) / size**0.5).softmax(-1) @ v).transpose(0, 1).reshape(-1, 64))
    assert (mixed - torch.cat(exact)).abs().max() < 2e-5


def test_several_threads_are_left_to_torch(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert kernels(torch.float32) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert kernels(torch.bfloat16) is None


def test_without_a_library_there_are_no_kernels(tmp_path):
    assert load(tmp_path / "none.so") is None


def test_without_a_compiler_nothing_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    assert script.compile_kernels(tmp_path / "kernels.so") is None


def test_a_compiler_that_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise subprocess.CalledProcessError(1, "gcc")

    monkeypatch.setattr(script.shutil, "which", lambda name: "gcc")
    monkeypatch.setattr(script.subprocess, "run", fail)
    assert script.compile_kernels(tmp_path / "kernels.so") is None
    assert not list(tmp_path.iterdir())
