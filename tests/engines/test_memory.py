import sys

import pytest
import torch

from fedmtl.engines import processes as memory


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only glibc's heap is trimmed")
def test_the_heap_is_trimmed_once_it_has_grown(monkeypatch):
    sizes = iter([100, 150, 161, 110, 165, 171, 120])
    calls = []
    monkeypatch.setattr(memory, "_resident", lambda: next(sizes))
    monkeypatch.setattr(memory, "_malloc_trim", lambda: calls.append)
    check = memory.heap_trimmer(60)
    # 100 at first: 150 is less than 60 more, 161 is not; trimmed to 110, from which 165 is not enough and 171 is.
    seen = []
    for _ in range(4):
        check()
        seen.append(len(calls))
    assert seen == [0, 1, 1, 2]


def test_where_nothing_can_be_trimmed_nothing_happens(monkeypatch):
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)
    memory.heap_trimmer(0)()


def test_the_real_one_can_be_called():
    check = memory.heap_trimmer(0)
    torch.zeros(1000).sum()
    check()
