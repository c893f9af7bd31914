from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytest

from fedmtl.experiment.events import opening_events
from fedmtl.experiment.population import ClientInfos
from fedmtl.experiment.prepare import prepare


def test_a_client_is_opened_when_it_is_asked_for(make_config, monkeypatch):
    opened = []
    whole = ClientInfos._find
    monkeypatch.setattr(ClientInfos, "_find", lambda self, client: opened.append(client) or whole(self, client))
    prepared = prepare(make_config("federation.clients_per_task=20"))
    assert len(prepared.clients) == 60
    assert opened == []
    assert sum(prepared.clients["sentiment_client_07"].num_examples.values()) > 0
    assert opened == ["sentiment_client_07"]
    assert prepared.clients["sentiment_client_07"].rows is prepared.clients["sentiment_client_07"].rows


def test_labels_are_counted_in_their_order_and_scores_are_not(make_config):
    skewed = prepare(make_config("federation.clients_per_task=3", "partition={kind: dirichlet, alpha: 0.5}"))
    counted = [info.label_counts["sentiment"] for name, info in skewed.clients.items() if "sentiment" in name]
    whole = prepare(make_config("mode=centralized")).clients
    (everything,) = whole.values()
    assert [sum(column) for column in zip_longest(*counted, fillvalue=0)] == everything.label_counts["sentiment"]
    assert len({tuple(own) for own in counted}) == 3
    assert everything.label_counts["similarity"] == []


def test_texts_are_let_go_once_they_are_tokens(make_config):
    prepared = prepare(make_config())
    assert all(not part.train.texts and not part.validation.texts for part in prepared.data.values())
    assert all(len(part.train) for part in prepared.data.values())


@pytest.mark.parametrize(("rule", "kept"), [("task", False), ("client", True)])
def test_what_stays_at_clients_is_counted_once_for_each(make_config, rule, kept):
    prepared = prepare(make_config("federation.clients_per_task=3"))
    plan = replace(prepared.state.plan, rules=(("heads.*", rule), ("*", "all")))
    prepared = replace(prepared, state=replace(prepared.state, plan=plan))
    found = opening_events(prepared)[-1]
    # Three clients a task, each with the head of its one task.
    assert found.at_clients == (3 * sum(found.heads.values()) if kept else 0)
