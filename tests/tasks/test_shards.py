from __future__ import annotations

import pickle

import numpy as np
import pytest

from fedmtl.tasks.batches import Shard, Shards, deal, tasks_by_client


@pytest.fixture
def shards(tmp_path):
    labels = np.array([5, 6, 7, 8, 9])
    dealt = deal(tmp_path / "tokens", labels, {"a": np.array([0, 3]), "b": np.array([1, 2, 4])})
    own = {"c": {"sst2": Shard(tmp_path / "own", np.array([1]), np.array([0]))}}
    return Shards(tasks_by_client({"sst2": ["c", "a", "b"]}), own, {"sst2": dealt})


def labels_of(shards, client):
    shard = shards[client]["sst2"]
    return shard.labels[shard.indices].tolist()


def test_each_client_has_what_it_was_dealt_or_brought(shards):
    assert list(shards) == ["c", "a", "b"]
    assert {client: labels_of(shards, client) for client in shards} == {"c": [1], "a": [5, 8], "b": [6, 7, 9]}


def test_shards_in_files_are_the_same_and_travel_small(shards, tmp_path):
    large = deal(tmp_path / "tokens", np.arange(100_000), {"a": np.arange(100_000)})
    many = Shards(tasks_by_client({"sst2": ["a"]}), {}, {"sst2": large}).stored(tmp_path / "many")
    assert len(pickle.dumps(many)) < 1_000
    again = pickle.loads(pickle.dumps(shards.stored(tmp_path / "stored")))
    assert {client: labels_of(again, client) for client in again} == {"c": [1], "a": [5, 8], "b": [6, 7, 9]}


def test_tasks_of_a_client_follow_the_order_of_the_tasks():
    assert tasks_by_client({"x": ["a", "b"], "y": ["b"]}) == {"a": ("x",), "b": ("x", "y")}
