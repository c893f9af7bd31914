import pytest

from fedmtl.config import ComputeConfig
from fedmtl.engines import start_up as asked
from fedmtl.engines.start_up import expects_workers, num_workers


def test_one_worker_per_core_and_no_more_than_clients(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(8), raising=False)
    assert [num_workers(ComputeConfig(), "cpu", clients) for clients in (1, 2, 5, 100)] == [2, 2, 5, 8]
    assert num_workers(ComputeConfig(), "cuda", 100) == 0
    assert num_workers(ComputeConfig(workers=3), "cuda", 1) == 3


@pytest.mark.parametrize(
    ("keys", "has_gpu", "expected"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"device": "cpu"}, True, True),
        ({"device": "cuda"}, False, False),
        ({"workers": 0}, False, False),
        ({"workers": 1}, True, True),
    ],
)
def test_workers_are_expected_before_a_device_was_tried(monkeypatch, tmp_path, keys, has_gpu, expected):
    monkeypatch.setattr(asked, "GPU", tmp_path if has_gpu else tmp_path / "none")
    assert expects_workers(ComputeConfig(**keys)) is expected
