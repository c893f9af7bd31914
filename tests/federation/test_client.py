"""The client on a real, tiny model: what it returns, keeps and says when it fails."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl.capabilities import _REGISTERED, Capability, register
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.errors import FedmtlError
from fedmtl.experiment.prepare import prepare
from fedmtl.federation import client as client_module
from fedmtl.federation.client import load_state, open_job, run_job
from fedmtl.federation.dispatch import Dispatch
from fedmtl.federation.faults import fault_of
from fedmtl.federation.filters.error_feedback import NAME, RESIDUAL
from fedmtl.federation.filters.protocol import UpdateFilter
from fedmtl.federation.wire import encode_update
from fedmtl.federation.wire.frame import read_frame
from fedmtl.model.tensor_files import save_tensors
from fedmtl.sharing.plan import FILTER_PREFIX, Extra, Key, slot_name
from fedmtl.tasks.embedded import embedded_columns
from fedmtl.training.local_method import Finished, LocalMethod

CLIENT = "sentiment_client_1"


@pytest.fixture
def given(make_config, tmp_path):
    """(a site, a function that makes train jobs for its first client) of a config."""

    def make(*overrides: str, site_seed: int = 0):
        prepared = prepare(make_config(*overrides))
        population = prepared.population
        site = open_site(
            SiteSetup(
                prepared.config.model,
                site_seed,
                prepared.tasks,
                population.train,
                population.validation,
                population.shared_validation,
                tmp_path / "clients",
                tmp_path / "spool",
                "cpu",
            )
        )
        dispatch = Dispatch(prepared.server)

        def job(number: int = 1, kind: str = "train", accepted: int = 0, rows: bool = True, failed: bool = False):
            if failed:
                dispatch.lost(CLIENT)
            state = replace(prepared.state, accepted={CLIENT: accepted})
            settings = prepared.server.settings.to_dict()
            if kind == "evaluate":
                settings = {"batch_size": 8, "share_pairs": False}
            own = prepared.clients[CLIENT].rows if rows else None
            return dispatch.job(kind, state, CLIENT, ("sentiment",), own, number, settings)

        return site, job

    return make


def test_a_delta_for_what_was_sent_and_trained_and_for_nothing_else(given):
    site, job = given('sharing.rules=[{"embeddings.*": fixed}, {"heads.*": task}, {"*": all}]')
    sent = job()
    update = run_job(sent, site)
    assert set(update.delta) == {key for key in sent.weights if key.scope != "fixed"}
    assert not any(key.name.startswith("heads.similarity") for key in update.delta)
    assert update.num_examples == {"sentiment": 20}
    assert float(update.delta[Key("task:sentiment", "heads.sentiment.weight")].abs().sum()) > 0


def test_the_sent_weights_are_not_touched(given):
    site, job = given()
    sent = job()
    before = {key: value.clone() for key, value in sent.weights.items()}
    run_job(sent, site)
    assert all(torch.equal(before[key], value) for key, value in sent.weights.items())


def test_the_same_job_gives_the_same_update_whatever_ran_before(given):
    site, job = given()
    first = run_job(job(1), site)
    run_job(job(2), site)
    again = run_job(job(1), site)
    assert all(torch.equal(first.delta[key], again.delta[key]) for key in first.delta)


def test_a_site_whose_losses_stay_sends_the_same_update_without_them(given):
    site, job = given()
    plain = run_job(job(), site)
    assert set(plain.losses) == {"sentiment"}
    quiet = run_job(job(), replace(site, sends_losses=False))
    assert quiet.losses == {}
    assert all(torch.equal(quiet.delta[key], value) for key, value in plain.delta.items())


def test_a_personal_head_goes_on_from_round_to_round_and_steps_back(given):
    site, job = given('sharing.rules=[{"heads.*": client}, {"*": all}]')
    own = Key(f"client:{CLIENT}", "heads.sentiment.weight")

    def kept(number):
        return load_state(site.folder / CLIENT, number)["values"][own]

    run_job(job(1), site)
    first = kept(1)
    run_job(job(2, accepted=1), site)
    second = kept(2)
    assert not torch.equal(first, second)
    # The server never accepted round 2 and asks for it again from round 1.
    run_job(job(2, accepted=1), site)
    assert torch.equal(kept(2), second)


def test_what_is_saved_of_a_token_table_with_other_rows_begins_anew(given):
    site, job = given("training.keep_optimizer=true", "methods.scaffold={}", "training.num_rounds=3")
    run_job(job(1), site)
    same = job(2, accepted=1)
    # As many rows, the last of them another; what is saved of that row would be another word's.
    other = replace(same, rows=np.append(same.rows[:-1], same.rows[-1] + 1))
    table = Key("all", site.model.table)
    kept, dropped = open_job(same, site).state, open_job(other, site).state
    slots = [slot for slot in kept if slot.startswith(("optimizer.", "extra.scaffold"))]
    assert len(slots) == 4
    for slot in slots:
        assert table in kept[slot]
        assert dropped[slot].keys() == kept[slot].keys() - {table}
    # The whole table in place of rows, and rows again.
    run_job(job(2, accepted=1, rows=False), site)
    run_job(job(3, accepted=2), site)
    after = load_state(site.folder / CLIENT, 3)
    assert {after[slot][table].shape for slot in slots if slot != "optimizer.step"} == {same.weights[table].shape}


class Counter(LocalMethod):
    """Counts its rounds in a tensor that stays at the client, and says where it is and what came with the job."""

    name = "test_client_counter"

    def __init__(self, options):
        self._most, self._sent, self._next = options["most"], {}, {}

    def start(self, client, received, stored):
        key = next(iter(client.bound.flat.spans))
        before = stored.slot("count").get(key, torch.zeros(()))
        self._sent = {"before": float(before), "received": received.values.get("word"), "round": client.round}
        self._next = {key: torch.clamp(before + 1, max=self._most)}

    def finish(self, tasks):
        return Finished(Extra({**self._sent, "tasks": list(tasks)}), Extra(tensors={"count": self._next}))


def test_what_a_method_stores_goes_on_from_the_round_that_was_accepted(given):
    register(Capability(Counter.name, Counter))
    site, job = given()
    methods = {Counter.name: {"most": 9}}

    def told(**options):
        given_job = job(**options)
        extra = {Counter.name: Extra({"word": "hello"})}
        given_job = replace(given_job, settings={**given_job.settings, "methods": methods}, extra=extra)
        return run_job(given_job, site).extra[Counter.name].values

    try:
        first = told(number=1)
        assert first == {"before": 0.0, "received": "hello", "round": 1, "tasks": ["sentiment"]}
        assert told(number=2, accepted=1)["before"] == 1.0
        assert told(number=3, accepted=2)["before"] == 2.0
        # The server never accepted round 3 and asks for it again.
        assert told(number=3, accepted=2)["before"] == 2.0
        assert told(number=4, accepted=0)["before"] == 0.0
    finally:
        _REGISTERED.pop(Counter.name)


def test_a_method_that_is_not_here_is_one_line(given):
    site, job = given()
    unknown = replace(job(), settings={**job().settings, "methods": {"nobody": {}}})
    with pytest.raises(FedmtlError, match="no capability is called nobody; there are"):
        run_job(unknown, site)
    with pytest.raises(FedmtlError, match="task_weighting has no client's half"):
        run_job(replace(unknown, settings={**job().settings, "methods": {"task_weighting": {}}}), site)


RESIDUAL_SLOT = slot_name(NAME, RESIDUAL, FILTER_PREFIX)
LOSSY = ("wire.up=int8", "wire.down=int8")


def test_with_a_lossy_wire_what_was_lost_is_kept_and_sent_with_the_next_update(given):
    site, job = given(*LOSSY)
    exact_site, exact_job = given("wire.down=int8")
    table = Key("all", site.model.table)
    sent, exact = run_job(job(1), site), run_job(exact_job(1), exact_site)
    lost = load_state(site.folder / CLIENT, 1)[RESIDUAL_SLOT]
    assert float(lost[table].abs().max()) > 0
    # vectors travel exactly, and are not kept
    assert set(lost) == {key for key, value in exact.delta.items() if value.dim() > 1}
    for key, value in lost.items():
        torch.testing.assert_close(value, exact.delta[key] - sent.delta[key], atol=0, rtol=0)
    again = run_job(job(2, accepted=1), site)
    fresh = run_job(exact_job(2), exact_site)
    after = load_state(site.folder / CLIENT, 2)[RESIDUAL_SLOT]
    torch.testing.assert_close(again.delta[table] + after[table], fresh.delta[table] + lost[table])


def test_a_refused_update_neither_loses_nor_doubles_what_was_kept(given):
    site, job = given(*LOSSY)
    run_job(job(1), site)
    second = run_job(job(2, accepted=1), site)
    # Round 2 was refused, and so was round 3: both times the client goes on from round 1.
    run_job(job(3, accepted=1), site)
    again = run_job(job(2, accepted=1), site)
    assert all(torch.equal(second.delta[key], again.delta[key]) for key in second.delta)


def test_a_client_that_lost_its_state_starts_without_a_residual(given):
    site, job = given(*LOSSY)
    fresh = run_job(job(2, accepted=0), site)
    shutil.rmtree(site.folder / CLIENT)
    lost_state = run_job(job(2, accepted=1), site)
    assert all(torch.equal(fresh.delta[key], lost_state.delta[key]) for key in fresh.delta)


def test_a_state_of_before_filters_had_names_is_read(given):
    site, job = given(*LOSSY)
    run_job(job(1), site)
    second = run_job(job(2, accepted=1), site)
    path = site.folder / CLIENT / "round-0001.safetensors"
    old = {slot.rpartition("/")[2]: values for slot, values in load_state(site.folder / CLIENT, 1).items()}
    assert set(old) == {"residual", "residual_rows"}
    save_tensors(path, old)
    again = run_job(job(2, accepted=1), site)
    assert all(torch.equal(second.delta[key], again.delta[key]) for key in second.delta)


class Signs(UpdateFilter):
    """Sends the sign of every number, and stores the signs and how often it did so."""

    name = "test_signs"

    def __init__(self, options):
        self._fails = options.get("fails")

    def at_client(self, update, client):
        if self._fails == "raises":
            raise LookupError("of a filter")
        if self._fails == "returns":
            return update.delta, client.stored
        if self._fails == "stores":
            return update, Extra({"plain": 1})
        delta = {key: value.sign() for key, value in update.delta.items()}
        key = next(iter(delta))
        count = client.stored.slot("count").get(key, torch.zeros(())) + 1
        # Every second time nothing but the count is stored.
        signs = {} if client.stored.slot("signs") else {"signs": delta}
        return replace(update, delta=delta), Extra(tensors={"count": {key: count}, **signs})


@pytest.fixture
def signs():
    register(Capability(Signs.name, update_filter=Signs))
    yield lambda job, **options: replace(job, settings={**job.settings, "methods": {Signs.name: options}})
    _REGISTERED.pop(Signs.name)


def test_a_filter_changes_what_leaves_and_what_it_stores_replaces_what_it_stored(given, signs):
    site, job = given()

    def slots(number):
        stored = load_state(site.folder / CLIENT, number)
        return {slot: values for slot, values in stored.items() if slot.startswith(FILTER_PREFIX)}

    plain, update = run_job(job(1), site), run_job(signs(job(1)), site)
    assert all(torch.equal(update.delta[key], value.sign()) for key, value in plain.delta.items())
    assert set(slots(1)) == {"filter.test_signs/count", "filter.test_signs/signs"}
    run_job(signs(job(2, accepted=1)), site)
    assert set(slots(2)) == {"filter.test_signs/count"}
    assert [float(value) for value in slots(2)["filter.test_signs/count"].values()] == [2.0]
    # Round 2 was refused: the client goes on from round 1.
    run_job(signs(job(3, accepted=1)), site)
    assert [float(value) for value in slots(3)["filter.test_signs/count"].values()] == [2.0]


def test_error_feedback_comes_after_the_other_filters(given, signs):
    site, job = given(*LOSSY)
    update = run_job(signs(job(1)), site)
    lost = load_state(site.folder / CLIENT, 1)[RESIDUAL_SLOT]
    # What is lost is missing of the signs, which are 1, 0 and -1.
    for key, value in lost.items():
        assert torch.equal((update.delta[key] + value).round(), (update.delta[key] + value))


@pytest.mark.parametrize(
    ("fails", "words"),
    [("raises", "LookupError: of a filter"), ("returns", "TypeError: at_client"), ("stores", "TypeError: test_signs")],
)
def test_a_filter_that_fails_is_named_and_leaves_the_state_alone(given, signs, fails, words):
    site, job = given(*LOSSY)
    with pytest.raises(FedmtlError, match=f"^test_signs failed with {words}") as caught:
        run_job(signs(job(1), fails=fails), site)
    assert fault_of(caught.value).code == "filter_failed"
    assert not (site.folder / CLIENT).exists()


def test_evaluation_returns_sums_and_never_an_example(given):
    site, job = given()
    update = run_job(job(kind="evaluate", rows=False), site)
    assert update.delta == {}
    text = encode_update(update)
    shard = site.validation_shard(CLIENT, "sentiment")
    assert sum(map(sum, update.sums["sentiment"]["confusion"])) == len(shard)
    assert set(update.sums["sentiment"]) == {"confusion", "loss", "broken"}
    assert len(text) < 1000


FIXED = 'sharing.rules=[{"embeddings.*": fixed}, {"heads.*": task}, {"*": all}]'


def test_a_fixed_value_that_a_model_starts_with_does_not_travel(given):
    site, job = given(FIXED)
    assert job().fixed
    assert not [key for key in job().weights if key.scope == "fixed"]
    told, own = run_job(job(failed=True), site), run_job(job(), site)
    assert all(torch.equal(told.delta[key], own.delta[key]) for key in told.delta)


def test_a_site_that_starts_with_another_model_says_so_and_is_sent_the_fixed_values(given):
    site, job = given(FIXED, site_seed=1)
    missing = r"fixed value embeddings\..* was neither sent nor stored here, and this model starts with another"
    with pytest.raises(FedmtlError, match=missing):
        run_job(job(), site)
    again = job(failed=True)
    assert {key.name for key in again.weights if key.scope == "fixed"} == set(again.fixed)
    run_job(again, site)
    held = replace(again, weights={key: value for key, value in again.weights.items() if key.scope != "fixed"})
    run_job(held, site)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"),
    ],
)
def test_out_of_memory_says_which_setting_to_lower(given, monkeypatch, error):
    site, job = given()

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(client_module, "train", full)
    with pytest.raises(FedmtlError, match=r"out of memory; lower training.batch_size \(8\) or model.max_length"):
        run_job(job(), site)
    task = job().tasks[0]
    for sizes, named in (
        ({task: 4}, rf"tasks\.{task}\.batch_size \(4\)"),
        ({"other": 16}, r"training.batch_size \(8\)"),
    ):
        with pytest.raises(FedmtlError, match=f"lower {named} or"):
            run_job(replace(job(), settings={**job().settings, "batch_sizes": sizes}), site)
    both = replace(job(), tasks=(task, "other"), settings={**job().settings, "batch_sizes": {task: 4}})
    assert "lower training.batch_size (8)" in client_module.out_of_memory(both)


def test_no_text_is_in_what_a_client_sends(given):
    site, job = given()
    frame = encode_update(run_job(job(), site))
    header = read_frame(frame)[0]
    sent = bytes(frame) + json.dumps(header).encode()
    words = {
        word for text in embedded_columns("sentiment", "train")["sentence"] for word in text.split() if len(word) > 5
    }
    assert words
    assert not [word for word in words if word.encode() in sent]
    assert header["client"] == CLIENT
