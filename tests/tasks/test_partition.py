from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.capabilities import task_kind
from fedmtl.config import PartitionConfig
from fedmtl.errors import DataError
from fedmtl.tasks.partition import partition


def deal(labels: Any, clients: int, values: list[str] | None = None, seed: int = 0, **keys: Any) -> dict[str, Any]:
    kind = task_kind("regression" if np.asarray(labels).dtype.kind == "f" else "classification")
    settings = PartitionConfig.model_validate(keys)
    names = [f"c{number}" for number in range(clients)]
    return partition(np.asarray(labels), values, names, settings, seed=seed, task="sst2", kind=kind)


def shares(labels: np.ndarray, dealt: dict[str, Any]) -> np.ndarray:
    """Per client, the share of the most frequent label."""
    return np.array([np.bincount(labels[part]).max() / len(part) for part in dealt.values()])


@given(
    labels=st.one_of(
        st.lists(st.integers(0, 3), min_size=1, max_size=60),
        st.lists(st.floats(0, 1, width=32), min_size=1, max_size=60),
    ),
    clients=st.integers(1, 8),
    kind=st.sampled_from(["iid", "dirichlet", "quantity", "column"]),
    alpha=st.floats(0.01, 100),
    seed=st.integers(0, 2**40),
)
def test_every_example_goes_to_exactly_one_client(labels, clients, kind, alpha, seed):
    column = [str(row % 5) for row in range(len(labels))]
    again = []
    for _ in range(2):
        try:
            again.append(deal(labels, clients, column, seed, kind=kind, alpha=alpha, column="site"))
        except DataError as error:
            again.append(str(error))
    if isinstance(again[0], str):
        assert again[0] == again[1]
        return
    parts = list(again[0].values())
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() and len(part) for part in parts)
    assert all(np.array_equal(again[0][name], again[1][name]) for name in again[0])


@given(count=st.integers(1, 80), clients=st.integers(1, 8), seed=st.integers(0, 1000))
def test_iid_sizes_differ_by_at_most_one(count, clients, seed):
    if count < clients:
        return
    sizes = [len(part) for part in deal(np.zeros(count, np.int64), clients, seed=seed).values()]
    assert max(sizes) - min(sizes) <= 1


def test_iid_is_shuffled_by_seed():
    one, two = (deal(np.zeros(100, np.int64), 2, seed=seed)["c0"].tolist() for seed in (0, 1))
    assert one != two
    assert one != list(range(50))


def test_small_alpha_gives_clients_one_label_and_large_alpha_the_mix():
    labels = np.arange(4000) % 4
    assert shares(labels, deal(labels, 4, kind="dirichlet", alpha=1000)).max() < 0.3
    assert shares(labels, deal(labels, 4, kind="dirichlet", alpha=0.1, seed=3)).mean() > 0.6


def test_scores_are_skewed_by_quantile_bins():
    # Five bins of 800 scores each; at a large alpha each of the 4 clients gets about 200 of every bin.
    scores = np.linspace(0, 1, 4000).astype(np.float32) ** 4
    bins = np.arange(4000) // 800
    for part in deal(scores, 4, kind="dirichlet", alpha=1e4).values():
        assert (np.abs(np.bincount(bins[part], minlength=5) - 200) < 20).all()
    skewed = deal(scores, 4, kind="dirichlet", alpha=0.1, seed=1)
    assert shares(bins, skewed).mean() > 0.45


def test_quantity_skews_sizes_and_not_labels():
    labels = np.arange(4000) % 2
    dealt = deal(labels, 4, kind="quantity", alpha=0.5)
    sizes = sorted(len(part) for part in dealt.values())
    assert sizes[-1] > 3 * sizes[0]
    assert shares(labels, dealt).max() < 0.6


def test_column_values_go_whole_to_the_emptiest_client_largest_first():
    # d 4 -> c0; a 3 -> c1; b 2 -> c1 (3 < 4), now 5; c 1 -> c0 (4 < 5)
    column = list("aaabbcdddd")
    dealt = deal(np.zeros(10, np.int64), 2, column, kind="column", column="site")
    assert {name: [column[row] for row in part] for name, part in dealt.items()} == {
        "c0": list("cdddd"),
        "c1": list("aaabb"),
    }


def test_a_single_client_gets_everything_without_a_column():
    assert deal(np.zeros(3, np.int64), 1, kind="column", column="site")["c0"].tolist() == [0, 1, 2]


def test_fewer_values_than_clients_is_an_error():
    with pytest.raises(DataError, match="sst2: column site has 2 values for 3 clients; use 2 clients or fewer"):
        deal(np.zeros(4, np.int64), 3, list("aabb"), kind="column", column="site")


def test_too_small_a_client_is_an_error_that_names_what_to_change():
    # 10 examples for 3 clients: 4, 3, 3
    with pytest.raises(DataError, match=r"c1: gets 3 of 10 examples of sst2, fewer than partition.min_examples 4;"):
        deal(np.zeros(10, np.int64), 3, min_examples=4)
    # There is no lower number than 1 to set.
    with pytest.raises(DataError, match=r"partition.min_examples 1; use fewer clients than 3, or more examples$"):
        deal(np.zeros(2, np.int64), 3)
    with pytest.raises(DataError, match=r"c\d+: .* of sst2, .* at partition.alpha 0.01; raise partition.alpha"):
        deal(np.zeros(50, np.int64), 20, kind="dirichlet", alpha=0.01)


def test_tasks_are_dealt_by_draws_of_their_own():
    settings = PartitionConfig.model_validate({})
    labels = np.zeros(100, np.int64)
    one, two = (
        partition(labels, None, ["a", "b"], settings, seed=0, task=task, kind=task_kind("classification"))["a"].tolist()
        for task in ("sst2", "qqp")
    )
    assert one != two
