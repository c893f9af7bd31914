"""Secure aggregation: sums alone can be opened, dropouts cost their own part, and a stranger's words cost himself."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from fedmtl.errors import FedmtlError
from fedmtl.federation.aggregators.mean import ClientWeights, Mean
from fedmtl.federation.filters.protocol import ExchangeClient, FilterClient
from fedmtl.federation.messages import ClientInfo, Failure, Job, State, Update
from fedmtl.federation.server import RoundFailed
from fedmtl.federation.server_method import Collected, OpenRound
from fedmtl.federation.wire import decode_job, decode_update, encode_job, encode_update
from fedmtl.methods import secure_session
from fedmtl.methods.client_noise import NAME as CLIENT_NOISE
from fedmtl.methods.masking import FixedPoint, add_masks
from fedmtl.methods.noise import derive_key
from fedmtl.methods.secure_aggregation import SecureAggregation, num_scores
from fedmtl.methods.secure_client import MaskedUpdate, answer_exchange
from fedmtl.methods.secure_protocol import FILE, MASKED, NAME, Options
from fedmtl.runs.event_lines import events_of
from fedmtl.runs.events import SecureAggregationEvent
from fedmtl.sharing.plan import Extra, Key, SharingPlan
from fedmtl.tasks.metrics import score, sum_predictions
from fedmtl.tasks.task import Task
from fedmtl.training.local_method import Release

PLAN = SharingPlan((("heads.*", "task"), ("own", "client"), ("*", "all")))
NAMES = ("layer", "own", "heads.x.w", "heads.y.w")
ENCODER = Key("all", "layer")
TASKS = {
    "x": Task("x", "classification", ("text",), "label", "accuracy", ("no", "yes")),
    "y": Task("y", "regression", ("a", "b"), "label", "pearson", score_range=(0.0, 5.0)),
}
STEPS = ("advertise", "share", "train", "unmask")


def head(task: str) -> Key:
    return Key(f"task:{task}", f"heads.{task}.w")


def options(**changes: object) -> Options:
    plain = {"bits": 32, "max_value": 1.0, "threshold": 2 / 3, "min_clients": 3, "average": "weighted"}
    return Options.model_validate({**plain, "max_norm": None, **changes})


@dataclass
class Clients:
    """Clients that "train" by answering with fixed deltas; every message is encoded and decoded.

    `tasks` says who has which; `fails` decides who does not answer which step; `change` alters answers on their way.
    """

    folder: Path
    tasks: Mapping[str, tuple[str, ...]]
    options: Options = field(default_factory=options)
    fails: Callable[[str, str], bool] = lambda client, step: False
    change: Callable[[str, str, Update], Update] = lambda client, step, update: update
    alter: Callable[[str, Job], Job] = lambda step, job: job
    transcript: list[tuple[str, str, Update]] = field(default_factory=list)
    size: int = 40

    def delta(self, job: Job) -> dict[Key, torch.Tensor]:
        seed = int.from_bytes(job.client.encode(), "big") % 2**31
        rng = np.random.default_rng([seed, job.round])
        return {
            key: torch.from_numpy(rng.uniform(-0.1, 0.1, tuple(value.shape)).astype(np.float32))
            for key, value in sorted(job.weights.items())
        }

    def examples(self, client: str) -> dict[str, int]:
        return {task: 10 + 7 * number + len(client) for number, task in enumerate(self.tasks[client])}

    def plain_update(self, job: Job) -> Update:
        counts = self.examples(job.client)
        losses = {task: 0.5 + count / 100 for task, count in counts.items()}
        return Update(job.round, job.client, job.tasks, self.delta(job), None, counts, losses, seen=counts)

    def clients(self) -> dict[str, ClientInfo]:
        return {client: ClientInfo(self.examples(client)) for client in self.tasks}

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        for made in jobs:
            job = decode_job(encode_job(made))
            step = str(job.extra[NAME].values["step"]) if job.kind == "exchange" else job.kind
            job = self.alter(step, job)
            if self.fails(job.client, step):
                yield Failure(job.round, job.client, "lost")
                continue
            try:
                answer = self.answer(job)
            except FedmtlError as error:
                yield Failure(job.round, job.client, str(error))
                continue
            answer = self.change(job.client, step, decode_update(encode_update(answer))[0])
            self.transcript.append((step, job.client, answer))
            yield answer

    def answer(self, job: Job) -> Update:
        folder = self.folder / job.client
        if job.kind == "exchange":
            found = answer_exchange(job.extra[NAME], ExchangeClient(job, folder, NAMES))
            return Update(job.round, job.client, job.tasks, {}, None, {}, {}, extra={NAME: found})
        mask = MaskedUpdate(self.options.model_dump())
        client = FilterClient(job, Extra(), "layer", folder, TASKS)
        if job.kind == "evaluate":
            return mask.scores_at_client(self.scores(job), client)
        return mask.at_client(self.plain_update(job), client)[0]

    def scores(self, job: Job) -> Update:
        sums = {task: self.sums(job.client, task).to_dict() for task in job.tasks}
        counts = {task: int(self.sums(job.client, task).examples) for task in job.tasks}
        return Update(job.round, job.client, job.tasks, {}, None, counts, {}, sums)

    def sums(self, client: str, name: str):
        rng = np.random.default_rng([len(client), ord(client[0]), ord(name)])
        count, task = self.examples(client)[name], TASKS[name]
        width = task.kind_of.num_outputs(task)
        labels = rng.integers(0, 2, count) if name == "x" else rng.uniform(0, 1, count).astype(np.float32)
        return sum_predictions(task, rng.normal(0.5, 0.3, (count, width)), labels, float(rng.uniform(1, 20)))


def start(size: int = 40) -> State:
    weights = {ENCODER: torch.zeros(size), **{head(task): torch.zeros(3, 2) for task in TASKS}}
    return State(0, weights, PLAN)


def opened(clients: Clients, state: State | None = None, average: str = "weighted", kind: str = "train") -> OpenRound:
    state = state or start(clients.size)
    weights = {"x": 1.0, "y": 0.7}
    if average == "tasks":
        sizes = Counter[str]()
        for client in clients.tasks:
            sizes.update(clients.examples(client))
        weights = {task: weight / (sizes[task] or 1) for task, weight in weights.items()}
    settings = {"methods": {NAME: clients.options.model_dump()}}

    def job(client: str, extra: Mapping[str, Extra]) -> Job:
        tasks = clients.tasks[client]
        keys = {ENCODER, *map(head, tasks)}
        sent = {key: state.weights[key] for key in keys}
        return Job(kind, state.round + 1, client, tasks, sent, PLAN, None, 7, 0, settings, extra=extra)

    counting = ClientWeights(PLAN, weights, average) if kind == "train" else None
    return OpenRound(state, state.round + 1, clients, clients.tasks, clients.clients(), job, 60.0, counting)


def collect(clients: Clients, **more: object) -> Collected:
    return SecureAggregation(clients.options, NAMES, TASKS).collect(opened(clients, **more))


def event_of(collected: Collected) -> SecureAggregationEvent:
    (found,) = events_of(collected.events, SecureAggregationEvent)
    return found


def everybody(number: int) -> dict[str, tuple[str, ...]]:
    """So many clients: of both tasks the first one, then of one task each in turn."""
    names = [f"c{index:02d}" for index in range(number)]
    return {name: ("x", "y") if not index else (("x",), ("y",))[index % 2] for index, name in enumerate(names)}


def plain_mean(clients: Clients, returned: Iterable[str], average: str = "weighted") -> dict[Key, torch.Tensor]:
    """What the server would have computed of the same updates in the clear."""
    open_round = opened(clients, average=average)
    assert open_round.weights is not None
    mean = Mean({key: value.double() for key, value in open_round.state.weights.items()})
    for client in sorted(returned):
        update = clients.plain_update(open_round.job(client, {}))
        update = replace(update, delta={key: value.double() for key, value in update.delta.items()})
        mean.add(update, open_round.weights.of(update))
    return mean.result()


def largest_difference(found: Mapping[Key, torch.Tensor], exact: Mapping[Key, torch.Tensor]) -> float:
    assert set(found) == set(exact)
    return max(float((found[key].double() - exact[key]).abs().max()) for key in exact)


# The mean ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("average", ["weighted", "uniform", "tasks"])
@pytest.mark.parametrize("bits", [32, 64])
def test_the_mean_is_the_plain_one_within_the_stated_step(tmp_path, average, bits):
    clients = Clients(tmp_path, everybody(7), options(bits=bits, average=average))
    found = collect(clients, average=average)
    error = event_of(found).error
    assert error is not None
    # Worked out: 7 clients, whose weights add up to at least half of the largest one's unit.
    assert error <= 7 * (event_of(found).step / 2 + 2.0**-29) / 0.5
    rounding = 0.1 * 2.0**-23
    assert largest_difference(found.combined.delta, plain_mean(clients, clients.tasks, average)) <= error + rounding


def test_weights_losses_and_counts_come_as_sums(tmp_path):
    clients = Clients(tmp_path, everybody(6))
    found = collect(clients)
    infos = clients.clients()
    for task in TASKS:
        counts = [info.num_examples[task] for info in infos.values() if task in info.num_examples]
        assert found.combined.num_examples[task] == sum(counts)
        assert found.combined.seen[task] == sum(counts)
        mean = sum(count * (0.5 + count / 100) for count in counts) / sum(counts)
        assert found.combined.losses[task] == pytest.approx(mean, abs=1e-7)
    of_x = sum(info.num_examples.get("x", 0) for info in infos.values())
    of_y = sum(info.num_examples.get("y", 0) for info in infos.values())
    assert found.weights["all"] == pytest.approx(of_x + 0.7 * of_y, rel=1e-7)
    assert found.weights["task:x"] == of_x
    # Of a client nothing is known but that it returned.
    assert all(not update.num_examples and not update.losses and not update.seen for update in found.updates)


def test_entries_beyond_the_bound_are_cut(tmp_path):
    clients = Clients(tmp_path, everybody(5), options(max_value=0.05))
    found = collect(clients).combined.delta
    assert 0.01 < float(found[ENCODER].abs().max()) <= 0.05 + 1e-8


# Dropouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [6, 9])
def test_a_third_that_drops_out_at_any_step_costs_its_own_part(tmp_path, step, number):
    tasks = {f"c{index}": ("x",) for index in range(number)}
    gone = set(sorted(tasks)[1::3])
    assert len(gone) == number // 3
    clients = Clients(tmp_path, tasks, fails=lambda client, at: at == step and client in gone)
    found = collect(clients)
    counted = set(tasks) if step == "unmask" else set(tasks) - gone
    assert {update.client for update in found.updates} == counted
    assert largest_difference(found.combined.delta, plain_mean(clients, counted)) <= 3e-8
    assert {failure.client for failure in found.failures} == (set() if step == "unmask" else gone)
    assert event_of(found).dropped == {step: len(gone)}


def test_dropouts_at_several_steps_add_up(tmp_path):
    tasks = {f"c{index}": ("x",) for index in range(10)}
    gone = {"c1": "advertise", "c4": "share", "c7": "train"}
    clients = Clients(tmp_path, tasks, fails=lambda client, at: gone.get(client) == at)
    found = collect(clients)
    counted = set(tasks) - set(gone)
    assert largest_difference(found.combined.delta, plain_mean(clients, counted)) <= 3e-8
    assert event_of(found).clients == 9
    assert event_of(found).returned == 7


@pytest.mark.parametrize("step", STEPS)
def test_below_the_threshold_the_round_ends_with_the_reason(tmp_path, step):
    tasks = {f"c{index}": ("x",) for index in range(6)}
    kept = 2 if step == "advertise" else 3
    clients = Clients(tmp_path, tasks, fails=lambda client, at: at == step and client not in sorted(tasks)[:kept])
    with pytest.raises(RoundFailed, match="are needed") as found:
        collect(clients)
    assert f"{kept} clients" in str(found.value)
    # Once they are back, the same round goes on.
    clients.fails = lambda client, at: False
    assert largest_difference(collect(clients).combined.delta, plain_mean(clients, tasks)) <= 3e-8


# Sums of too few -----------------------------------------------------------------------------------------------------


def test_a_sum_of_too_few_clients_stays_closed_while_others_open(tmp_path):
    tasks = {"a": ("x",), "b": ("x",), "c": ("x",), "d": ("y",), "e": ("y",)}
    clients = Clients(tmp_path, tasks)
    found = collect(clients)
    assert set(found.combined.delta) == {ENCODER, head("x")}
    assert set(found.combined.num_examples) == {"x"}
    assert event_of(found).opened == {"all": 5, "task:x": 3, "counts:x": 3}
    assert event_of(found).closed == {"task:y": 2, "counts:y": 2}
    assert event_of(found).lines() == [
        "  task:y: does not move in this round, 2 clients returned it and a sum has 3 at least"
    ]
    given = [update.extra[NAME].values for step, _, update in clients.transcript if step == "unmask"]
    assert all(set(one["seeds"]) == {"all", "task:x", "counts:x"} for one in given)


def test_a_round_in_which_no_sum_has_enough_clients_ends_with_the_reason(tmp_path):
    tasks = {"a": ("x",), "b": ("x",), "c": ("x",)}
    clients = Clients(tmp_path, tasks, fails=lambda client, at: client == "b" and at == "train")
    with pytest.raises(RoundFailed, match=r"2 clients returned their part, and 3 are needed.*first was b: lost"):
        collect(clients)


def test_a_client_that_wants_more_company_has_it_or_no_part(tmp_path):
    tasks = {f"c{index}": ("x",) if index < 4 else ("y",) for index in range(8)}

    class Strict(Clients):
        def answer(self, job: Job) -> Update:
            if job.kind == "exchange" and job.client == "c1":
                client = ExchangeClient(job, self.folder / job.client, NAMES, required={"min_clients": self.wanted})
                found = answer_exchange(job.extra[NAME], client)
                return Update(job.round, job.client, job.tasks, {}, None, {}, {}, extra={NAME: found})
            return super().answer(job)

    clients = Strict(tmp_path, tasks)
    clients.wanted = 6
    assert set(collect(clients).combined.delta) == {ENCODER, head("y")}
    clients = Strict(tmp_path / "second", tasks)
    clients.wanted = 9
    found = collect(clients)
    assert [failure.client for failure in found.failures] == ["c1"]
    assert "more clients than there are" in found.failures[0].reason
    assert set(found.combined.delta) == {ENCODER, head("x"), head("y")}


# What the server can know --------------------------------------------------------------------------------------------


def is_even(data: bytes) -> bool:
    """Whether bytes look like chance: one in a hundred thousand samples of chance would not."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    expected = counts.sum() / 256
    return bool(((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-5, 255))


def test_a_masked_update_and_sums_of_fewer_than_all_look_like_chance(tmp_path):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(5)}, size=20_000)
    collect(clients)
    masked = {
        client: update.extra[NAME].slot(MASKED)[Key("all", "values")].numpy().view(np.uint32)
        for step, client, update in clients.transcript
        if step == "train"
    }
    assert len(masked) == 5
    plain = np.empty(20_000, np.uint32)
    FixedPoint(32, 1.0, 5).encode(np.random.default_rng(0).uniform(-0.1, 0.1, 20_000).astype(np.float32), 0.5, plain)
    # An update without a mask is found out by the same test.
    assert not is_even(plain.tobytes())
    for number in range(1, 6):
        for chosen in itertools.combinations(masked.values(), number):
            # Also the sum of all: the masks that clients have for themselves are still in it.
            assert is_even(np.add.reduce(chosen, dtype=np.uint32).tobytes())


@dataclass
class Watch:
    """All arrays that the server has of a sum's values, and all keys of masks that it puts together."""

    arrays: list[np.ndarray] = field(default_factory=list)
    keys: list[tuple[np.ufunc, bytes]] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        session, add = secure_session.Session, secure_session.Session._add
        change = secure_session.change_masks
        totals: list[object] = []

        def added(this, client, parts):
            add(this, client, parts)
            self.arrays += [parts["all"]["values"].copy(), this.totals["all"]["values"].copy()]
            totals.append(this.totals["all"])

        def changed(parts, added, removed=()):
            if any(parts is total for total in totals):
                self.arrays.append(parts["values"].copy())
                self.keys += [(np.add, key) for key in added] + [(np.subtract, key) for key in removed]
            change(parts, added, removed)

        patch.setattr(session, "_add", added)
        patch.setattr(secure_session, "change_masks", changed)


def without(numbers: np.ndarray, masks: Iterable[tuple[np.ufunc, bytes]]) -> np.ndarray:
    found = numbers.copy()
    for change, key in masks:
        streams = [derive_key(key, "mask", "values")]
        add_masks(found, *((streams, []) if change is np.add else ([], streams)))
    return found


def test_what_opens_a_sum_opens_no_part_of_it(tmp_path, monkeypatch):
    """With all keys that the server can put together, each single update and each smaller sum is still chance."""
    gone = "c2"
    tasks = {f"c{index}": ("x",) for index in range(6)}
    clients = Clients(tmp_path, tasks, fails=lambda client, at: at == "train" and client == gone, size=20_000)
    watch = Watch()
    watch.install(monkeypatch)
    found = collect(clients)
    masked = {
        client: update.extra[NAME].slot(MASKED)[Key("all", "values")].numpy().view(np.uint32)
        for step, client, update in clients.transcript
        if step == "train"
    }
    # A seed of each of five clients, and what each of them has in common with the one that is gone.
    assert len(masked) == 5
    assert len(watch.keys) == 10
    for number in (1, 2):
        for keys in itertools.combinations(watch.keys, number):
            assert all(is_even(without(numbers, keys).tobytes()) for numbers in masked.values())
    for chosen in itertools.combinations(masked.values(), 4):
        assert is_even(without(np.add.reduce(chosen, dtype=np.uint32), watch.keys).tobytes())
    # One key too few leaves chance even of the whole sum; all of them open it.
    total = np.add.reduce(list(masked.values()), dtype=np.uint32)
    for left in watch.keys:
        assert is_even(without(total, [key for key in watch.keys if key is not left]).tobytes())
    assert not is_even(without(total, watch.keys).tobytes())
    assert largest_difference(found.combined.delta, plain_mean(clients, set(tasks) - {gone})) <= 3e-8


def test_nothing_of_a_single_client_is_in_the_server_unmasked(tmp_path, monkeypatch):
    """All that the server has of a sum until it is opened looks like chance, and has nothing of an update in it."""
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(4)}, size=20_000)
    plain = [clients.plain_update(opened(clients).job(client, {})).delta[ENCODER].numpy() for client in clients.tasks]
    watch = Watch()
    watch.install(monkeypatch)
    mean = collect(clients).combined.delta[ENCODER].numpy()
    # What came and the sum so far, of four clients, and the whole sum before its masks are removed.
    assert len(watch.arrays) == 9
    for numbers in watch.arrays:
        assert is_even(numbers.tobytes())
        signed = numbers.view(np.int32).astype(np.float64)
        assert all(abs(np.corrcoef(signed, values)[0, 1]) < 0.05 for values in plain)
    # The mean of all has.
    assert all(np.corrcoef(mean, values)[0, 1] > 0.2 for values in plain)


def test_no_client_gives_out_both_secrets_of_another(tmp_path):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(6)},
                      fails=lambda client, at: at == "train" and client == "c3")  # fmt: skip
    collect(clients)
    for step, _, update in clients.transcript:
        if step == "unmask":
            given = update.extra[NAME].values
            assert set(given["keys"]) == {"c3"}
            assert all("c3" not in by_client for by_client in given["seeds"].values())


# What a client refuses -----------------------------------------------------------------------------------------------


def refused(clients: Clients, words: str) -> None:
    with pytest.raises(RoundFailed, match=words):
        collect(clients)


def altered(step: str, change: Callable[[dict], dict]) -> Callable[[str, Job], Job]:
    def alter(at: str, job: Job) -> Job:
        if at != step:
            return job
        return replace(job, extra={NAME: Extra(change(json.loads(json.dumps(dict(job.extra[NAME].values)))))})

    return alter


def test_a_second_request_for_shares_of_other_clients_is_refused(tmp_path):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(6)})
    requests: dict[str, Job] = {}
    clients.alter = lambda step, job: requests.setdefault(job.client, job) if step == "unmask" else job
    collect(clients)
    again = clients.answer(requests["c0"])
    assert again.extra[NAME] == clients.answer(requests["c0"]).extra[NAME]
    values = dict(requests["c0"].extra[NAME].values)
    for returned in (["c0", "c1", "c2", "c3", "c4"], ["c0", "c1", "c2", "c3", "c5"]):
        other = replace(requests["c0"], extra={NAME: Extra({**values, "returned": returned})})
        with pytest.raises(FedmtlError, match="given out already"):
            clients.answer(other)
    # The secrets themselves are gone.
    left = json.loads((tmp_path / "c0" / FILE).read_text())
    assert not {"cipher_secret", "mask_secret", "seeds", "shares"} & {name for name, value in left.items() if value}
    assert (tmp_path / "c0" / FILE).stat().st_mode & 0o777 == 0o600


def test_another_job_in_the_same_session_is_refused(tmp_path):
    """Two updates under the same masks would tell their difference."""
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(4)})
    jobs: dict[str, Job] = {}
    clients.alter = lambda step, job: jobs.setdefault(job.client, job) if step == "train" else job
    clients.fails = lambda client, at: at == "unmask"
    refused(clients, "gave out shares")
    first, second = (clients.answer(jobs["c0"]).extra[NAME].slot(MASKED) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)
    other = replace(jobs["c0"], weights={**jobs["c0"].weights, ENCODER: torch.ones(40)})
    with pytest.raises(FedmtlError, match="another one than this session's"):
        clients.answer(other)


def test_a_round_again_is_opened_for_the_same_clients_alone(tmp_path):
    """The difference of two sums would be the updates of those who are in one of them."""
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(8)}, options(threshold=0.51))
    collect(clients)
    assert largest_difference(collect(clients).combined.delta, plain_mean(clients, clients.tasks)) <= 3e-8
    for gone in (["c0"], ["c0", "c1", "c2"]):
        clients.fails = lambda client, at, gone=gone: at == "train" and client in gone
        refused(clients, "gave out shares")
    # Nor is it among others, where those who know of the first sum might be too few to keep the second one closed.
    clients.fails = lambda client, at: at == "advertise" and client == "c0"
    refused(clients, "returned their part, and .* are needed")
    answers = [answer for step, client, answer in clients.transcript if step == "train"]
    assert len(answers) == 8 + 8 + 7 + 5


def test_seven_sums_of_the_same_round_do_not_give_single_updates(tmp_path):
    """Of nine clients, three of the first seven drop out of each sum, any two of which share one: with the sum of all
    that is seven equations for seven updates."""
    lines = ["124", "235", "346", "457", "561", "672", "713"]
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(1, 10)})
    found = 0
    for line in ["", *lines]:
        clients.fails = lambda client, at, line=line: at == "train" and client[1:] in line
        with suppress(RoundFailed):
            collect(clients)
            found += 1
    assert found == 1


@pytest.mark.parametrize(
    ("step", "change", "words"),
    [
        ("share", lambda said: {**said, "roster": {k: v for k, v in said["roster"].items() if k == "c0"}}, "read"),
        ("share", lambda said: {**said, "more": 1}, "cannot be read"),
        ("share", lambda said: {**said, "step": {}}, "none of its exchanges"),
        ("share", lambda said: {**said, "units": {}}, "are missing"),
        ("share", lambda said: {**said, "task_weights": {"x": -1.0}}, "cannot be read"),
        ("share", lambda said: {**said, "session": "0" * 32}, "no keys of"),
        ("share", lambda said: {**said, "roster": {k: {**v, "mask_key": said["roster"]["c1"]["mask_key"]}
                                                   if k == "c2" else v for k, v in said["roster"].items()}}, "one key"),
        ("unmask", lambda said: {**said, "returned": said["returned"][:2]}, "gave out shares"),
        ("unmask", lambda said: {**said, "returned": [*said["returned"], "nobody"]}, "gave out shares"),
        ("unmask", lambda said: {**said, "sealed": {k: v[:-2] + "00" for k, v in said["sealed"].items()}}, "gave out"),
        ("train", lambda said: {**said, "sharers": said["sharers"][:2]}, "returned their part"),
        ("train", lambda said: {**said, "sharers": said["sharers"] * 2}, "returned their part"),
        ("train", lambda said: {}, "returned their part"),
    ],
)  # fmt: skip
def test_a_server_that_says_something_else_gets_nothing(tmp_path, step, change, words):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(4)}, alter=altered(step, change))
    refused(clients, words)


def test_clients_that_are_told_different_things_give_a_sum_of_noise(tmp_path):
    """A smaller unit would make one client's update count a thousand times as much as the others'."""

    def alter(step: str, job: Job) -> Job:
        if step != "share" or job.client != "c0":
            return job
        values = dict(job.extra[NAME].values)
        return replace(job, extra={NAME: Extra({**values, "units": {k: v / 1024 for k, v in values["units"].items()}})})

    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(4)}, alter=alter)
    # Nobody's shares are for the same words, so that no two of them count as being there.
    refused(clients, "gave out shares|cannot be removed")

    def other_start(step: str, job: Job) -> Job:
        is_victim = step == "train" and job.client == "c0"
        return replace(job, weights={**job.weights, ENCODER: torch.ones(40)}) if is_victim else job

    clients = Clients(tmp_path / "second", clients.tasks, alter=other_start)
    refused(clients, "the masks of all do not cancel")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda update: replace(update, delta={**update.delta, ENCODER: torch.full((40,), float("nan"))}), "numbers"),
        (lambda update: replace(update, delta={ENCODER: update.delta[ENCODER]}), "did not return"),
        (lambda update: replace(update, delta={**update.delta, ENCODER: torch.full((40,), 9.0)}), "max_update_norm"),
        (lambda update: replace(update, num_examples={"x": 0}), "example counts"),
        (lambda update: replace(update, extra={NAME: Extra({"moves": 3})}), "not masked|has no part"),
    ],
)
def test_a_client_checks_what_the_server_no_longer_can(tmp_path, monkeypatch, spoil, words):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(5)}, options(max_norm=10.0))
    first = clients.plain_update
    monkeypatch.setattr(clients, "plain_update", lambda job: spoil(first(job)) if job.client == "c1" else first(job))
    found = collect(clients)
    assert [failure.client for failure in found.failures] == ["c1"]
    (failure,) = found.failures
    assert "stays here" in failure.reason
    monkeypatch.setattr(clients, "plain_update", first)
    assert largest_difference(found.combined.delta, plain_mean(clients, {"c0", "c2", "c3", "c4"})) <= 3e-8


# What a hostile client can do ---------------------------------------------------------------------------------------


def spoiled(step: str, change: Callable[[dict], object]) -> Callable[[str, str, Update], Update]:
    def alter(client: str, at: str, update: Update) -> Update:
        if (client, at) != ("c1", step):
            return update
        return replace(update, extra={NAME: Extra(change(json.loads(json.dumps(dict(update.extra[NAME].values)))))})

    return alter


@pytest.mark.parametrize(
    ("step", "change", "is_lost"),
    [
        ("advertise", lambda said: {}, True),
        ("advertise", lambda said: {**said, "mask_key": "00"}, True),
        ("advertise", lambda said: {**said, "mask_key": said["cipher_key"]}, True),
        ("advertise", lambda said: {**said, "sums": ["all"]}, True),
        ("advertise", lambda said: {**said, "sums": said["sums"] * 2}, True),
        ("advertise", lambda said: {**said, "min_clients": 10**9}, True),
        ("share", lambda said: {**said, "sealed": {}}, True),
        ("share", lambda said: {**said, "sealed": dict.fromkeys(said["sealed"], "xyz")}, True),
        ("share", lambda said: {**said, "commitments": {"all": 3}}, True),
        ("unmask", lambda said: {**said, "keys": {"c2": "00"}}, False),
        ("unmask", lambda said: {**said, "seeds": {"all": {"c2": "ff" * 33}}}, False),
        ("unmask", lambda said: {**said, "seeds": {"all": {"c2": "00" * 33}}}, False),
        ("unmask", lambda said: ["x"] and {"keys": [], "seeds": 1}, False),
    ],
)
def test_a_stranger_costs_his_own_part_alone(tmp_path, step, change, is_lost):
    clients = Clients(tmp_path, {f"c{index}": ("x",) for index in range(6)}, change=spoiled(step, change))
    found = collect(clients)
    counted = set(clients.tasks) - ({"c1"} if is_lost else set())
    assert {update.client for update in found.updates} == counted
    assert {failure.client for failure in found.failures} == ({"c1"} if is_lost else set())
    assert largest_difference(found.combined.delta, plain_mean(clients, counted)) <= 3e-8


@pytest.mark.parametrize(
    "spoil",
    [
        lambda update: replace(update, extra={}),
        lambda update: replace(update, extra={NAME: Extra()}),
        lambda update: replace(update, losses={"x": 1.0}, num_examples={"x": 1}),
        lambda update: replace(update, round=9),
        lambda update: replace(update, extra={NAME: Extra(tensors={MASKED: {
            key: value[:1] for key, value in update.extra[NAME].slot(MASKED).items()}})}),
        lambda update: replace(update, extra={NAME: Extra(tensors={MASKED: {
            key: value.double() for key, value in update.extra[NAME].slot(MASKED).items()}})}),
    ],
)  # fmt: skip
def test_an_update_that_is_not_masked_as_it_should_be_costs_its_sender_alone(tmp_path, spoil):
    clients = Clients(
        tmp_path,
        {f"c{index}": ("x",) for index in range(6)},
        change=lambda client, at, update: spoil(update) if (client, at) == ("c1", "train") else update,
    )
    found = collect(clients)
    assert [failure.client for failure in found.failures] == ["c1"]
    assert largest_difference(found.combined.delta, plain_mean(clients, set(clients.tasks) - {"c1"})) <= 3e-8


# Signatures ----------------------------------------------------------------------------------------------------------


class Known:
    """An identity whose signature is its name; `others` are known by theirs."""

    def __init__(self, name: str) -> None:
        self.public_key = f"key of {name}"

    def sign(self, message: bytes) -> bytes:
        return self.public_key.encode() + message[:100]

    def refuses(self, client: str, public_key: str, message: bytes, signature: bytes) -> str | None:
        if public_key != f"key of {client}":
            return "its key is another one than before"
        return None if signature == public_key.encode() + message[:100] else "its signature is wrong"


class Signed(Clients):
    def answer(self, job: Job) -> Update:
        if job.kind != "exchange":
            return super().answer(job)
        client = ExchangeClient(job, self.folder / job.client, NAMES, Known(job.client))
        found = answer_exchange(job.extra[NAME], client)
        return Update(job.round, job.client, job.tasks, {}, None, {}, {}, extra={NAME: found})


class Noisy(Signed):
    def answer(self, job: Job) -> Update:
        if job.kind == "exchange":
            return super().answer(job)
        folder = self.folder / job.client
        release = Release(job.client.encode(), "the same job", folder)
        client = FilterClient(job, Extra(), "layer", folder, TASKS, lambda: release)
        return MaskedUpdate(self.options.model_dump()).at_client(self.plain_update(job), client)[0]


def test_signed_adverts_are_taken_and_others_are_refused_by_name(tmp_path):
    tasks = {f"c{index}": ("x",) for index in range(4)}
    clients = Signed(tmp_path, tasks)
    assert largest_difference(collect(clients).combined.delta, plain_mean(clients, tasks)) <= 3e-8

    def forged(key: str, value: object) -> Callable[[dict], dict]:
        return lambda said: {
            **said,
            "roster": {k: {**v, key: value} if k == "c2" else v for k, v in said["roster"].items()},
        }

    for key, value, words in (
        ("signature", "00", "c2: its signature is wrong"),
        ("identity", "key of c9", "c2: its key is another one"),
        ("signature", None, "the advert of c2 is not signed"),
    ):
        refused(Signed(tmp_path / key / str(value)[:3], tasks, alter=altered("share", forged(key, value))), words)


def test_a_session_that_is_named_as_one_before_has_other_noise(tmp_path, monkeypatch):
    """Of one noise in two sums, of which the server has one at half the weight, the difference has none."""
    noise = {"max_norm": 0.5, "bound": "together", "delta": 1e-5, "noise_multiplier": 1.0}
    tasks = {f"c{index}": ("x",) for index in range(4)}
    clients = Noisy(tmp_path, tasks, options(average="uniform", noise=noise))
    round_ = opened(clients, average="uniform")
    of_round = {CLIENT_NOISE: Extra({"noise_multiplier": 1.0})}
    with_noise = replace(round_, job=lambda client, extra: round_.job(client, {**extra, **of_round}))

    def found(session: str, unit: float) -> torch.Tensor:
        monkeypatch.setattr(secure_session, "token_hex", lambda size: session * 2 * size)
        monkeypatch.setattr(secure_session, "weight_unit", lambda largest: unit)
        return SecureAggregation(clients.options, NAMES, TASKS).collect(with_noise).combined.delta[ENCODER]

    # A client knows the name of the last session alone.
    whole, _, half = found("5", 1.0), found("6", 1.0), found("5", 2.0)
    # Means (u + n) / 4 and (u / 2 + n') / 2: twice the first less the second is u / 4, were both noises one.
    left = 2 * whole - half - plain_mean(clients, tasks, "uniform")[ENCODER]
    # Four parts of .5 / sqrt(3 - 1) over 4, twice, and once more as much.
    assert float(left.std()) == pytest.approx(2 * math.sqrt(2) * 0.5 / math.sqrt(2) / 2, rel=0.5)


# Scores --------------------------------------------------------------------------------------------------------------


def test_scores_are_those_of_all_clients_together(tmp_path):
    clients = Clients(tmp_path, everybody(7))
    found = SecureAggregation(clients.options, NAMES, TASKS).collect_scores(opened(clients, kind="evaluate"))
    assert set(found.sums) == set(TASKS)
    for name, task in TASKS.items():
        parts = [clients.sums(client, name) for client, tasks in clients.tasks.items() if name in tasks]
        exact = score(task, sum(parts[1:], parts[0]))
        masked = score(task, found.sums[name])
        assert masked.examples == exact.examples
        assert masked.loss == pytest.approx(exact.loss, rel=1e-7)
        for metric, value in exact.metrics.items():
            assert masked.metrics[metric] == (None if value is None else pytest.approx(value, rel=1e-5, abs=1e-7))
    sent = [update for step, _, update in clients.transcript if step == "evaluate"]
    assert all(not update.sums and not update.num_examples for update in sent)


def test_scores_of_too_few_clients_stay_closed_and_nothing_ends(tmp_path):
    clients = Clients(tmp_path, {"a": ("x",), "b": ("x",), "c": ("x",), "d": ("y",)})
    method = SecureAggregation(clients.options, NAMES, TASKS)
    assert set(method.collect_scores(opened(clients, kind="evaluate")).sums) == {"x"}
    clients.fails = lambda client, at: client in "ab"
    found = method.collect_scores(opened(clients, kind="evaluate"))
    assert not found.sums
    assert [failure.client for failure in found.failures] == ["a", "b"]
    said = method.after_evaluation(start(), None).events
    assert "nothing was scored: 2 clients advertised" in said[-1].reason


@pytest.mark.parametrize("name", list(TASKS))
def test_numbers_of_sums_add_up_as_the_sums_do(name):
    task, kind = TASKS[name], TASKS[name].kind_of
    clients = Clients(Path(), everybody(4))
    parts = [clients.sums(client, name) for client in ("c00", "c01" if name == "y" else "c02")]
    numbers = [kind.sums_to_numbers(task, part) for part in parts]
    assert {len(one) for one in numbers} == {num_scores(task)}
    both = kind.sums_from_numbers(task, numbers[0] + numbers[1])
    assert score(task, both).metrics == pytest.approx(score(task, parts[0] + parts[1]).metrics)
    empty = kind.sums_from_numbers(task, np.zeros(num_scores(task)))
    assert empty.examples == 0


def test_equal_predictions_stay_equal_under_rounding():
    task, kind = TASKS["y"], TASKS["y"].kind_of
    same = sum_predictions(task, np.full((30, 1), 0.3), np.linspace(0, 1, 30, dtype=np.float32), 1.0)
    numbers = kind.sums_to_numbers(task, same)
    rounded = kind.sums_from_numbers(task, np.rint(numbers * 2**30) / 2**30)
    assert score(task, rounded).undefined["pearson"] == "all predictions are equal"
