"""Secure aggregation: the server can open sums of updates, and no single one.

Bonawitz et al. 2017, Practical Secure Aggregation for Privacy-Preserving Machine Learning. A round of training or of
scoring has four exchanges. Every client advertises two fresh public keys; shares its secrets among all clients, so that
a threshold of them can give one back; sends its update as whole numbers under masks; and those whose update came give
out what removes the masks of the sum. Masks between two clients cancel. Of a client that dropped out after it shared,
the others give out the key of its masks between two; of one whose update came, the seeds of the masks that it has for
itself; of no client both. What leaves a client is decided here, at the client: whoever is the server.

A client has one part in every *sum* that it belongs to: the scope of each value that it trains (`all`, `task:sst2`),
the counts and losses of each of its tasks (`counts:sst2`), or its scores (`scores:sst2`). A sum has its own masks and
seeds, so that sums of too few clients stay closed where others are opened.

Clients check what the server cannot any more: that an update is finite, complete and not too long. They also bind their
masks to everything that must be the same for all of a sum: who takes part, how clients are weighed, and the values that
they start from. A server that tells two clients different things gets a sum of noise.

A key or seed lies in the client's folder from one exchange to the next, as workers come and go, and is removed with the
last one. All of them are random: the sums do not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from fedmtl.capabilities import Capability, find, is_known
from fedmtl.config import Config
from fedmtl.errors import ConfigError, PolicyError
from fedmtl.federation.aggregators.mean import client_weight
from fedmtl.federation.faults import NAME as SAFE_NAME
from fedmtl.federation.filters.protocol import ExchangeClient, FilterClient, UpdateFilter
from fedmtl.federation.messages import ClientId, Evaluation, Failure, Job, State, Traffic, Update
from fedmtl.federation.server import RoundFailed
from fedmtl.federation.server_method import Collected, OpenRound, Scored, ServerMethod, ServerSetup, Step
from fedmtl.federation.validate import expect, refusal, unwelcome
from fedmtl.methods.masking import (
    SHARE_BYTES,
    WEIGHT_BITS,
    FixedPoint,
    Masked,
    add_masks,
    agree,
    check_available,
    commitment,
    decode_numbers,
    encode_numbers,
    is_share,
    new_secret,
    public_key,
    quantized,
    recover,
    seal,
    split,
    unseal,
    weight_unit,
)
from fedmtl.methods.noise import derive_key
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import RemarkEvent, SecureAggregationEvent, WarningEvent
from fedmtl.runs.folder import make_private_folder, write_atomic
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, SharingPlan, is_personal, scope_tasks, weights_sha256
from fedmtl.tasks.kinds.protocol import TaskKind
from fedmtl.tasks.metrics import Sums
from fedmtl.tasks.task import Task

NAME = "secure_aggregation"
FILE = f"{NAME}.json"
# The slot of what is masked, and the two parts of a sum.
MASKED, VALUES, NUMBERS = "masked", "values", "numbers"
COUNTS, SCORES = "counts:", "scores:"
# Examples, examples seen, losses times examples, and the examples of those.
NUM_COUNTS = 4
# Beyond it, shares between all pairs would take longer than training.
MOST_CLIENTS = 1024
MOST_SUMS = 4096
# How many sums that it helped to open a client remembers, so as not to open almost the same one again.
MOST_OPENED = 8
SMALLEST_THRESHOLD = 2

Purpose = Literal["train", "evaluate"]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 22)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Session = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Client = Annotated[str, Field(pattern=SAFE_NAME)]
SumName = Annotated[str, Field(min_length=1, max_length=300)]
Weight = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class _Message(BaseModel):
    """What is said in an exchange: a stranger's words, so that nothing unknown or of another type is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Advertise(_Message):
    """The server opens a session: whoever takes part makes keys for it."""

    step: Literal["advertise"] = "advertise"
    session: Session
    purpose: Purpose


class Advert(_Message):
    """A client's keys for one session, the sums that it has a part in, and the fewest clients that it opens one of.

    With an identity, all of it is signed, and the key that it is signed with is told.
    """

    cipher_key: Hex32
    mask_key: Hex32
    sums: Annotated[list[SumName], Field(min_length=1, max_length=MOST_SUMS)]
    min_clients: Annotated[int, Field(ge=1, le=MOST_CLIENTS)]
    identity: Annotated[str, Field(max_length=2000)] | None = None
    signature: Annotated[Hex, Field(max_length=1000)] | None = None

    @field_validator("sums")
    @classmethod
    def _rise(cls, sums: list[str]) -> list[str]:
        if any(first >= second for first, second in pairwise(sums)):
            raise ValueError("sums are named once, in order")
        return sums


class Share(_Message):
    """Everybody's adverts, and how clients are weighed: what a task counts, and the unit of a scope's weights."""

    step: Literal["share"] = "share"
    session: Session
    roster: Annotated[dict[Client, Advert], Field(min_length=SMALLEST_THRESHOLD, max_length=MOST_CLIENTS)]
    task_weights: Annotated[dict[str, Weight], Field(max_length=1000)] = {}
    units: Annotated[dict[SumName, Annotated[Weight, Field(gt=0)]], Field(max_length=MOST_SUMS)] = {}


class Shares(_Message):
    """A client's secrets in shares, each sealed for one client, and what its seeds can be recognised by."""

    sealed: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]
    commitments: Annotated[dict[SumName, Hex32], Field(max_length=MOST_SUMS)]


class Contribute(_Message):
    """What comes with the job itself: the session, and who shared, with all of whom masks cancel."""

    session: Session
    sharers: Annotated[list[Client], Field(max_length=MOST_CLIENTS)]


class MaskedNumbers(_Message):
    """The masked numbers of every sum of a client, eight bytes each; its values are tensors beside them."""

    numbers: Annotated[dict[SumName, Hex], Field(max_length=MOST_SUMS)]


class Unmask(_Message):
    """Whose masked update came, and the shares that were sealed for this client."""

    step: Literal["unmask"] = "unmask"
    session: Session
    returned: Annotated[list[Client], Field(max_length=MOST_CLIENTS)]
    sealed: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]


class Opening(_Message):
    """A client's shares: of the mask keys of clients that dropped out, and of the seeds of a sum, by client."""

    keys: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]
    seeds: Annotated[dict[SumName, dict[Client, Hex]], Field(max_length=MOST_SUMS)]


class Options(_Message):
    """What clients are given of the config."""

    bits: Literal[32, 64]
    max_value: float
    threshold: float
    min_clients: int
    average: Literal["weighted", "uniform", "tasks"]
    max_norm: float | None

    def numbers(self, num_clients: int) -> FixedPoint:
        return FixedPoint(self.bits, self.max_value, num_clients)

    def needed(self, num_clients: int) -> int:
        """How many of so many clients give a secret back.

        More than half: no server can have one half of them give out a client's key, and the other half its seeds.
        """
        share = math.ceil(self.threshold * num_clients - 1e-9)
        return min(num_clients, max(share, num_clients // 2 + 1, SMALLEST_THRESHOLD))


# What both sides compute ---------------------------------------------------------------------------------------------


def sums_of(
    purpose: Purpose, plan: SharingPlan, names: Sequence[str], tasks: Sequence[str], client: ClientId
) -> dict[str, list[Key]]:
    """The sums that a client has a part in, with the values of each."""
    if purpose == "evaluate":
        return {f"{SCORES}{task}": [] for task in tasks}
    found: dict[str, list[Key]] = {}
    keys = {key for view in plan.keys(names, tasks, client).values() for key in view.values()}
    for key in sorted(keys):
        if plan.trains(key) and not is_personal(key):
            found.setdefault(key.scope, []).append(key)
    return {**found, **{f"{COUNTS}{task}": [] for task in tasks}}


def context_of(round_number: int, purpose: Purpose, share: Share) -> str:
    """A digest of all that the clients of a session must agree on."""
    words = json.dumps([round_number, purpose, share.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()


def digests_of(weights: Mapping[Key, Tensor]) -> dict[str, str]:
    """A digest of the values of each scope."""
    by_scope: dict[str, dict[Key, Tensor]] = {}
    for key in weights:
        by_scope.setdefault(key.scope, {})[key] = weights[key]
    return {scope: weights_sha256(values) for scope, values in sorted(by_scope.items())}


def starts_of(sums: Iterable[str], digests: Mapping[str, str], plan: SharingPlan) -> dict[str, str]:
    """What the clients of each sum must have in common: the values that they start from, or are scored with.

    `digests` are those of each scope that a client was sent.
    """
    moving = {scope: digest for scope, digest in digests.items() if scope != "fixed"}

    def start(name: str) -> str:
        if not name.startswith(SCORES):
            return moving.get(name, "")
        task = name.removeprefix(SCORES)
        return json.dumps([pair for pair in sorted(moving.items()) if scope_tasks(plan, pair[0], [task])])

    return {name: start(name) for name in sums}


def minimum(name: str, roster: Mapping[ClientId, Advert], least: int) -> int:
    """The fewest clients of a sum that may be opened: none of them has its part in one of fewer than it wants."""
    return max(least, *(advert.min_clients for advert in roster.values() if name in advert.sums), 1)


def members(name: str, clients: Collection[ClientId], roster: Mapping[ClientId, Advert]) -> list[ClientId]:
    """Which of these clients have a part in a sum."""
    return [client for client in sorted(clients) if name in roster[client].sums]


def _signed(session: str, purpose: str, round_number: int, client: ClientId, advert: Advert) -> bytes:
    plain = advert.model_copy(update={"signature": None}).model_dump(mode="json")
    return json.dumps(["fedmtl", NAME, 1, session, purpose, round_number, client, plain], sort_keys=True).encode()


def _pair_key(pair: bytes, name: str, start: str) -> bytes:
    """The key of the masks that two clients have in common in a sum."""
    return derive_key(pair, "pair", name, start)


Part = dict[str, Masked]


def _change(parts: Part, added: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
    """Add and remove the masks of some keys or seeds, each of which has a stream for every part of a sum."""
    for part, numbers in parts.items():
        add_masks(numbers, *([derive_key(key, "mask", part) for key in keys] for keys in (added, removed)))


# The client's half ---------------------------------------------------------------------------------------------------


class Opened(_Message):
    """Sums that this client helped to open: of which work, and of whom."""

    work: Hex32
    sums: dict[SumName, list[Client]]


class Secrets(_Message):
    """All that a client remembers of a session; `answered` has what it gave out when its secrets were removed."""

    session: Session
    purpose: Purpose
    round: int
    advert: Advert
    cipher_secret: Hex32 | None = None
    mask_secret: Hex32 | None = None
    share: Share | None = None
    shares: Shares | None = None
    seeds: dict[SumName, Hex32] = {}
    work: Hex32 | None = None
    contribute: Contribute | None = None
    unmask: Hex32 | None = None
    answered: Opening | None = None
    opened: list[Opened] = []

    @property
    def context(self) -> str:
        assert self.share is not None
        return context_of(self.round, self.purpose, self.share)


def _load(folder: Path) -> Secrets | None:
    path = folder / FILE
    try:
        return Secrets.model_validate_json(path.read_bytes()) if path.exists() else None
    except (OSError, ValidationError):
        # A session that cannot be read is one that this client dropped out of.
        return None


def _store(folder: Path, secrets: Secrets) -> None:
    """Write the session's file before anything leaves that it has to do with.

    A site's must survive its machine: after a power cut, too, it must not answer once more under the same masks.
    """
    make_private_folder(folder)
    data = secrets.model_dump_json(exclude_none=True).encode()
    if secrets.advert.identity is not None:
        write_atomic(folder / FILE, data)
        return
    # A broken one is a session that the client dropped out of.
    with os.fdopen(os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _refuse(reason: str) -> PolicyError:
    error = PolicyError(f"secure aggregation: {reason}")
    return error.coded("exchange_refused")


def answer_exchange(received: Extra, client: ExchangeClient) -> Extra:
    """A client's answer to the server's part of an exchange."""
    request = _read_request(received)
    options = Options.model_validate(client.job.settings["methods"][NAME])
    if isinstance(request, Advertise):
        return _plain(_advertise(request, client, options))
    secrets = _load(client.folder)
    if secrets is None or secrets.session != request.session or secrets.round != client.job.round:
        raise _refuse("the exchange is of a session that this client has no keys of")
    if isinstance(request, Share):
        return _plain(_share(request, secrets, client, options))
    return _plain(_unmask(request, secrets, client, options))


def _plain(message: _Message) -> Extra:
    return Extra(message.model_dump(mode="json", exclude_none=True))


def _read_request(received: Extra) -> Advertise | Share | Unmask:
    kinds: dict[str, type[Advertise | Share | Unmask]] = {"advertise": Advertise, "share": Share, "unmask": Unmask}
    step = received.values.get("step")
    kind = kinds.get(step) if isinstance(step, str) else None
    if kind is None or received.tensors:
        raise _refuse("the job is none of its exchanges")
    try:
        return kind.model_validate(dict(received.values))
    except ValidationError as error:
        raise _refuse(f"the exchange cannot be read ({_first(error)})") from None


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part)[:40] for part in found['loc'])}: {found['type']}"


def _advertise(request: Advertise, client: ExchangeClient, options: Options) -> Advert:
    job, before = client.job, _load(client.folder)
    if before is not None and before.session == request.session:
        if (before.purpose, before.round) != (request.purpose, job.round) or before.cipher_secret is None:
            raise _refuse("the session is another one's, or over")
        return before.advert
    cipher_secret, mask_secret = new_secret(), new_secret()
    least = max(options.min_clients, int(client.required.get("min_clients", 1)))
    advert = Advert(
        cipher_key=public_key(cipher_secret).hex(),
        mask_key=public_key(mask_secret).hex(),
        sums=sorted(sums_of(request.purpose, job.plan, client.names, job.tasks, job.client)),
        min_clients=least,
        identity=None if client.identity is None else client.identity.public_key,
    )
    if client.identity is not None:
        message = _signed(request.session, request.purpose, job.round, job.client, advert)
        advert = advert.model_copy(update={"signature": client.identity.sign(message).hex()})
    _store(
        client.folder,
        Secrets(
            session=request.session,
            purpose=request.purpose,
            round=job.round,
            advert=advert,
            cipher_secret=cipher_secret.hex(),
            mask_secret=mask_secret.hex(),
            opened=[] if before is None else before.opened,
        ),
    )
    return advert


def _share(request: Share, secrets: Secrets, client: ExchangeClient, options: Options) -> Shares:
    if secrets.share is not None:
        if secrets.share != request or secrets.shares is None:
            raise _refuse("the session's adverts are not those that this client shared its secrets by")
        return secrets.shares
    _check_roster(request, secrets, client)
    assert secrets.cipher_secret is not None
    assert secrets.mask_secret is not None
    name, roster = client.job.client, request.roster
    num_shares, threshold = len(roster), options.needed(len(roster))
    seeds = {each: new_secret() for each in secrets.advert.sums}
    split_secrets = [
        split(secret, threshold, num_shares) for secret in (bytes.fromhex(secrets.mask_secret), *seeds.values())
    ]
    context = context_of(secrets.round, secrets.purpose, request)
    sealed = {}
    for rank, recipient in enumerate(sorted(roster)):
        key = _sealing_key(secrets.cipher_secret, roster[recipient], context, name, recipient)
        sealed[recipient] = seal(key, b"".join(shares[rank] for shares in split_secrets), name, recipient).hex()
    commitments = {each: commitment(seed, context, name, each).hex() for each, seed in seeds.items()}
    shares = Shares(sealed=sealed, commitments=commitments)
    changes = {"share": request, "shares": shares, "seeds": {each: seed.hex() for each, seed in seeds.items()}}
    _store(client.folder, secrets.model_copy(update=changes))
    return shares


def _sealing_key(secret: str, advert: Advert, context: str, sender: ClientId, recipient: ClientId) -> bytes:
    try:
        return agree(bytes.fromhex(secret), bytes.fromhex(advert.cipher_key), "share", context, sender, recipient)
    except ValueError:
        raise _refuse("an advert's key is none") from None


def _check_roster(request: Share, secrets: Secrets, client: ExchangeClient) -> None:
    """Raise unless this client's advert is as it was made, and every other one is by whom it claims to be."""
    name, roster = client.job.client, request.roster
    if roster.get(name) != secrets.advert:
        raise _refuse("the session's adverts do not have this client's as it was made")
    keys = [key for advert in roster.values() for key in (advert.cipher_key, advert.mask_key)]
    if len(set(keys)) < len(keys):
        raise _refuse("two adverts have one key")
    scopes = {each for each in secrets.advert.sums if not each.startswith((COUNTS, SCORES))}
    if not scopes <= set(request.units) or (scopes and not set(client.job.tasks) <= set(request.task_weights)):
        raise _refuse("the weights of a task or a scope are missing")
    if client.identity is None:
        return
    if len({advert.identity for advert in roster.values()}) < len(roster):
        raise _refuse("two adverts are of one identity")
    for other, advert in roster.items():
        if advert.identity is None or advert.signature is None:
            raise _refuse(f"the advert of {other} is not signed")
        message = _signed(request.session, secrets.purpose, secrets.round, other, advert)
        reason = client.identity.refuses(other, advert.identity, message, bytes.fromhex(advert.signature))
        if reason is not None and other != name:
            raise _refuse(f"{other}: {reason}")


class MaskedUpdate(UpdateFilter):
    """Turns an update, or sums of scores, into whole numbers under masks; everything else of it is left out."""

    name = NAME
    scores = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = Options.model_validate(dict(options))

    def at_client(self, update: Update, client: FilterClient) -> tuple[Update, Extra]:
        job = client.job
        reason = refusal(update, expect(job), self._options.max_norm)
        if reason is None and update.tasks != job.tasks:
            reason = f"only {', '.join(update.tasks)} was trained, and masks do not cancel in a part of an update"
        if reason is None and update.extra:
            reason = f"{next(iter(update.extra))} would send something that is not masked"
        if reason is not None:
            raise _refuse(f"the update stays here: {reason}")
        # Before anything is computed: a repeated job must not be answered under the same masks with other values.
        secrets, digests = self._begun("train", job, client.folder)
        assert secrets.share is not None
        share = secrets.share
        numbers = self._options.numbers(len(share.roster))
        parts = {name: self._part(name, update, job, share, numbers) for name in secrets.advert.sums}
        return self._masked(update, parts, secrets, job, digests), client.stored

    def scores_at_client(self, update: Update, client: FilterClient) -> Update:
        job = client.job
        secrets, digests = self._begun("evaluate", job, client.folder)
        assert secrets.share is not None
        parts: dict[str, Part] = {}
        for name in secrets.advert.sums:
            task = client.tasks[name.removeprefix(SCORES)]
            sums = task.kind_of.read_sums(task, update.sums[task.name], with_pairs=False)
            numbers = task.kind_of.sums_to_numbers(task, sums)
            if numbers is None:
                raise _refuse(f"the scores of {task.name} cannot be added up under masks")
            parts[name] = {NUMBERS: encode_numbers(numbers, len(secrets.share.roster))}
        return self._masked(update, parts, secrets, job, digests)

    def _begun(self, purpose: Purpose, job: Job, folder: Path) -> tuple[Secrets, dict[str, str]]:
        """The session of a job, in which this is the only one, and digests of what the job brought."""
        secrets = _load(folder)
        try:
            contribute = Contribute.model_validate(dict(job.extra.get(NAME, NO_EXTRA).values))
        except ValidationError as error:
            raise _refuse(f"the job cannot be read ({_first(error)})") from None
        if secrets is None or (secrets.session, secrets.purpose, secrets.round) != (
            contribute.session,
            purpose,
            job.round,
        ):
            raise _refuse("the job is of a session that this client has no keys of")
        if secrets.share is None or secrets.mask_secret is None:
            raise _refuse("the job came before the secrets were shared, or after they were removed")
        sharers, roster = contribute.sharers, secrets.share.roster
        if len(set(sharers)) < len(sharers) or not set(sharers) <= set(roster) or job.client not in sharers:
            raise _refuse("those who shared are not of the session")
        if len(sharers) < self._options.needed(len(roster)):
            raise _refuse(f"{len(sharers)} of {len(roster)} clients shared their secrets, which are too few to go on")
        digests = digests_of(job.weights)
        work = _work(job, digests)
        if secrets.work is not None and (secrets.work, secrets.contribute) != (work, contribute):
            raise _refuse("the job is another one than this session's")
        secrets = secrets.model_copy(update={"work": work, "contribute": contribute})
        _store(folder, secrets)
        return secrets, digests

    def _part(self, name: str, update: Update, job: Job, share: Share, numbers: FixedPoint) -> Part:
        """What a client has in a sum: its values times its weight, and the weight; or the counts of a task."""
        count = len(share.roster)
        if name.startswith(COUNTS):
            task = name.removeprefix(COUNTS)
            examples, loss = update.num_examples[task], update.losses.get(task)
            of_task = [examples, update.seen.get(task, 0), examples * (loss or 0.0), 0 if loss is None else examples]
            return {NUMBERS: encode_numbers(np.array(of_task, np.float64), count)}
        weight = client_weight(update.num_examples, name, job.plan, share.task_weights, self._options.average)
        part = quantized(weight, share.units[name]) / (1 << WEIGHT_BITS)
        keys = sorted(key for key in update.delta if key.scope == name)
        values = np.empty(sum(update.delta[key].numel() for key in keys), numbers.dtype)
        start = 0
        for key in keys:
            entries = update.delta[key].detach().cpu().reshape(-1).numpy()
            numbers.encode(entries, part, values[start : start + len(entries)])
            start += len(entries)
        return {VALUES: values, NUMBERS: encode_numbers(np.array([part]), count)}

    def _masked(
        self, update: Update, parts: Mapping[str, Part], secrets: Secrets, job: Job, digests: Mapping[str, str]
    ) -> Update:
        assert secrets.share is not None
        assert secrets.contribute is not None
        assert secrets.mask_secret is not None
        scopes = {key.scope for key in update.delta}
        if scopes != {name for name, part in parts.items() if VALUES in part}:
            raise _refuse("the update is of other scopes than this client advertised")
        roster, context = secrets.share.roster, secrets.context
        starts = starts_of(parts, digests, job.plan)
        added = {name: [bytes.fromhex(secrets.seeds[name])] for name in parts}
        removed: dict[str, list[bytes]] = {name: [] for name in parts}
        for other in secrets.contribute.sharers:
            common = [name for name in parts if name in roster[other].sums]
            if other == job.client or not common:
                continue
            mask_key = bytes.fromhex(roster[other].mask_key)
            pair = agree(bytes.fromhex(secrets.mask_secret), mask_key, "mask", context)
            for name in common:
                (removed if job.client > other else added)[name].append(_pair_key(pair, name, starts[name]))
        for name, part in parts.items():
            _change(part, added[name], removed[name])
        tensors = {Key(name, VALUES): _tensor(part[VALUES]) for name, part in parts.items() if VALUES in part}
        masked = MaskedNumbers(numbers={name: part[NUMBERS].tobytes().hex() for name, part in parts.items()})
        extra = {NAME: Extra(masked.model_dump(), {MASKED: tensors})}
        return replace(update, delta={}, rows=None, num_examples={}, losses={}, sums={}, seen={}, extra=extra)


def _tensor(numbers: Masked) -> Tensor:
    return torch.from_numpy(numbers.view(np.int32 if numbers.dtype.itemsize == 4 else np.int64))


def _work(job: Job, digests: Mapping[str, str]) -> str:
    """A digest of all that decides what a client computes: the same work gives the same update."""
    extra = {name: one for name, one in job.extra.items() if name != NAME}
    slots = [values for name in sorted(extra) for _, values in sorted(extra[name].tensors.items())]
    tensors = [weights_sha256(dict(values)) for values in slots]
    plain = [job.kind, job.round, job.client, job.tasks, job.seed, job.state_round, job.settings, job.plan.to_dict()]
    others = [dict(job.fixed), {name: one.values for name, one in extra.items()}, tensors]
    words = json.dumps([*plain, *others, digests], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()


def _unmask(request: Unmask, secrets: Secrets, client: ExchangeClient, options: Options) -> Opening:
    """Shares of what opens the sums of enough clients; a second request of a session gets the first one's answer."""
    words = hashlib.sha256(request.model_dump_json().encode()).hexdigest()
    if secrets.answered is not None:
        if secrets.unmask != words:
            raise _refuse("the session's masks were given out already, for another set of clients")
        return secrets.answered
    if secrets.share is None or secrets.contribute is None or secrets.cipher_secret is None:
        raise _refuse("the session's update was not sent, so there is nothing to open")
    roster, sharers, returned = secrets.share.roster, secrets.contribute.sharers, request.returned
    if len(set(returned)) < len(returned) or not set(returned) <= set(sharers) or client.job.client not in returned:
        raise _refuse("those whose update came are not those who shared")
    threshold = options.needed(len(roster))
    if len(returned) < threshold:
        raise _refuse(f"{len(returned)} updates came, and {threshold} of {len(roster)} are needed")
    shares = _unsealed(request, secrets, client.job.client)
    opened: dict[str, list[ClientId]] = {}
    for name in sorted({name for advert in roster.values() for name in advert.sums}):
        # A client whose shares open under these adverts is there now, and saw the same.
        there = [each for each in members(name, returned, roster) if each in shares]
        least = minimum(name, roster, options.min_clients)
        if len(there) >= least and not _is_almost_known(name, there, least, secrets):
            opened[name] = there
    if not opened:
        raise _refuse(
            "no sum is opened: each would be of fewer clients than the config or a policy demands, or differ by fewer"
            " from one that was opened before"
        )
    answer = Opening(
        keys={each: shares[each][0].hex() for each in sorted(set(sharers) - set(returned)) if each in shares},
        seeds={
            name: {each: shares[each][1 + roster[each].sums.index(name)].hex() for each in there}
            for name, there in opened.items()
        },
    )
    known = [*secrets.opened, Opened(work=secrets.work or "0" * 64, sums=opened)][-MOST_OPENED:]
    # Before it leaves: what was given out once is not given out otherwise, and the secrets are gone.
    _store(
        client.folder,
        Secrets(
            session=secrets.session,
            purpose=secrets.purpose,
            round=secrets.round,
            advert=secrets.advert,
            unmask=words,
            answered=answer,
            opened=known,
        ),
    )
    return answer


def _is_almost_known(name: str, clients: Sequence[ClientId], least: int, secrets: Secrets) -> bool:
    """Whether the sum, less one of the same work that was opened before, would be that of too few clients."""
    before = [set(one.sums[name]) for one in secrets.opened if one.work == secrets.work and name in one.sums]
    return any(0 < len(known ^ set(clients)) < least for known in before)


def _unsealed(request: Unmask, secrets: Secrets, recipient: ClientId) -> dict[ClientId, list[bytes]]:
    """By sender, the shares of its mask key and of its seeds; a sender whose shares do not open is left out."""
    assert secrets.share is not None
    assert secrets.contribute is not None
    assert secrets.cipher_secret is not None
    found = {}
    for sender, sealed in request.sealed.items():
        if sender not in secrets.contribute.sharers:
            continue
        advert = secrets.share.roster[sender]
        key = _sealing_key(secrets.cipher_secret, advert, secrets.context, sender, recipient)
        text = unseal(key, bytes.fromhex(sealed), sender, recipient)
        if text is not None and len(text) == SHARE_BYTES * (1 + len(advert.sums)):
            found[sender] = [text[at : at + SHARE_BYTES] for at in range(0, len(text), SHARE_BYTES)]
    return found


# The server's half ---------------------------------------------------------------------------------------------------


class TooFew(Exception):
    """A session that cannot be opened, with the reason."""


Answer = TypeVar("Answer", bound=_Message)


class _Session:
    """One round of training or scoring at the server: what it knows of it, and its exchanges in their order."""

    def __init__(self, options: Options, open_round: OpenRound, purpose: Purpose, names: Sequence[str]) -> None:
        self._options, self._open, self._purpose = options, open_round, purpose
        self._id = token_hex(16)
        plan, clients = open_round.state.plan, open_round.clients
        # Clients of the same tasks have the same sums: what is theirs alone is in none.
        by_tasks = {tasks: sums_of(purpose, plan, names, tasks, "") for tasks in dict.fromkeys(clients.values())}
        self._sums = {client: by_tasks[tasks] for client, tasks in clients.items()}
        self.keys: dict[str, list[Key]] = {}
        for sums in self._sums.values():
            self.keys.update(sums)
        self.failures: dict[ClientId, Failure] = {}
        self.remarks: list[Event] = []
        self.dropped: dict[str, int] = {}
        self.traffic: dict[ClientId, Traffic] = {}
        self.exchanged = Traffic()
        self.roster: dict[ClientId, Advert] = {}
        self.units: dict[str, float] = {}
        self.withheld: set[str] = set()
        self.returned: list[ClientId] = []
        self.totals: dict[str, Part] = {}
        self._starting: dict[Key, Tensor] = {}

    @property
    def number(self) -> int:
        return self._open.number

    @property
    def numbers(self) -> FixedPoint:
        return self._options.numbers(len(self.roster))

    @property
    def threshold(self) -> int:
        return self._options.needed(len(self.roster))

    def minimum(self, name: str) -> int:
        return minimum(name, self.roster, self._options.min_clients)

    def opened(self) -> dict[str, list[ClientId]]:
        """The sums of enough clients, with those whose update came."""
        found = {name: members(name, self.returned, self.roster) for name in self.keys}
        enough = {name: clients for name, clients in found.items() if len(clients) >= self.minimum(name)}
        return {name: clients for name, clients in enough.items() if name not in self.withheld}

    def closed(self) -> dict[str, list[ClientId]]:
        """All other sums that somebody returned."""
        opened = self.opened()
        found = {name: members(name, self.returned, self.roster) for name in self.keys if name not in opened}
        return {name: clients for name, clients in found.items() if clients}

    def run(self, sizes: Mapping[str, Mapping[str, int]]) -> None:
        """All exchanges; afterwards `totals` has the open sums, whose parts are of these sizes."""
        self._advertise()
        share = self._share_request()
        shared = self._share(share)
        self._contribute(sorted(shared), sizes)
        self._unmask(shared, context_of(self._open.number, self._purpose, share))

    def _advertise(self) -> None:
        def read(client: ClientId, advert: Advert) -> str | None:
            return None if set(advert.sums) == set(self._sums[client]) else "it advertised other sums than it has"

        request = Advertise(session=self._id, purpose=self._purpose)
        found = self._exchange("advertise", dict.fromkeys(self._open.clients, request), Advert, read)
        while len(found) >= SMALLEST_THRESHOLD:
            # A client that wants more company than there is can have no part, and may have been that of another one.
            most = max(len(found), self._options.min_clients)
            alone = [client for client, advert in sorted(found.items()) if advert.min_clients > most]
            if not alone:
                break
            del found[alone[-1]]
            self._fail("advertise", alone[-1], "its policy demands sums of more clients than there are")
        keys = Counter(key for advert in found.values() for key in (advert.cipher_key, advert.mask_key))
        for client, advert in list(found.items()):
            if keys[advert.cipher_key] > 1 or keys[advert.mask_key] > 1:
                self._fail("advertise", client, "a key of it is not its alone")
                del found[client]
        self.roster = dict(sorted(found.items()))
        self._check(len(self.roster), "advertised their keys")

    def _check(self, found: int, what: str) -> None:
        needed = max(self._options.min_clients, SMALLEST_THRESHOLD, self.threshold if self.roster else 0)
        if found < needed:
            raise TooFew(f"{found} clients {what}, and {needed} are needed (privacy.min_clients, threshold)")

    def _share_request(self) -> Share:
        weights, state = self._open.weights, self._open.state
        largest: dict[str, float] = {}
        for client, advert in self.roster.items():
            if weights is None:
                break
            counts = self._open.infos[client].num_examples
            held = {task: counts.get(task, 0) for task in self._open.clients[client]}
            for name in advert.sums:
                if not name.startswith(COUNTS):
                    weight = client_weight(held, name, state.plan, weights.task_weights, weights.average)
                    largest[name] = max(weight, largest.get(name, 0.0))
        self.units = {name: weight_unit(weight) if weight > 0 else 1.0 for name, weight in largest.items()}
        task_weights = {task: float(weight) for task, weight in (weights.task_weights if weights else {}).items()}
        return Share(session=self._id, roster=self.roster, task_weights=task_weights, units=self.units)

    def _share(self, request: Share) -> dict[ClientId, Shares]:
        def read(client: ClientId, shares: Shares) -> str | None:
            is_whole = set(shares.sealed) == set(self.roster) and set(shares.commitments) == set(self._sums[client])
            return None if is_whole else "its shares are not for everybody, or not of its sums"

        shared = self._exchange("share", dict.fromkeys(self.roster, request), Shares, read)
        self._check(len(shared), "shared their secrets")
        return shared

    def _contribute(self, sharers: list[ClientId], sizes: Mapping[str, Mapping[str, int]]) -> None:
        """The jobs themselves; what comes back is added up as it comes, and no one's is held."""
        contribute = {NAME: _plain(Contribute(session=self._id, sharers=sharers))}

        def jobs() -> Iterator[Job]:
            for client in self._open.clients:
                if client in sharers:
                    job = self._open.job(client, contribute)
                    for key, value in job.weights.items():
                        self._starting.setdefault(key, value)
                    yield job

        for answer in self._open.engine.run(jobs(), self._open.deadline):
            self._count(answer, is_exchange=False)
            reason = unwelcome(answer, sharers, self.returned)
            if reason is None:
                assert isinstance(answer, Update)
                try:
                    parts = self._read_parts(answer, sizes)
                except Exception as error:
                    # Whatever is wrong with one client's answer costs that client alone.
                    reason = str(error) if isinstance(error, ValueError) else f"cannot be read: {type(error).__name__}"
                else:
                    self._add(answer.client, parts)
            if reason is not None and answer.client not in self.returned:
                self._fail(self._purpose, answer.client, reason)
        self._check(len(self.returned), "returned their part")
        if not any(not name.startswith(COUNTS) for name in self.opened()):
            most = max((len(clients) for clients in self.closed().values()), default=0)
            raise TooFew(
                f"no sum has enough clients: the largest has {most}; see privacy.min_clients, and the policies"
            )

    def _read_parts(self, answer: Update, sizes: Mapping[str, Mapping[str, int]]) -> dict[str, Part]:
        if answer.round != self._open.number or set(answer.tasks) != set(self._open.clients[answer.client]):
            raise ValueError("is of another round, or of other tasks")
        plain = (answer.delta, answer.num_examples, answer.losses, answer.sums, answer.seen)
        if any(plain) or set(answer.extra) != {NAME}:
            raise ValueError("returned what is not masked")
        extra, sums = answer.extra[NAME], self._sums[answer.client]
        numbers, values = MaskedNumbers.model_validate(dict(extra.values)).numbers, extra.slot(MASKED)
        if set(numbers) != set(sums) or set(values) != {Key(name, VALUES) for name in sums if VALUES in sizes[name]}:
            raise ValueError("returned other sums than it has")
        parts = {}
        for name in sums:
            part = {NUMBERS: np.frombuffer(bytes.fromhex(numbers[name]), np.uint64)}
            if VALUES in sizes[name]:
                value = values[Key(name, VALUES)]
                dtype = np.dtype(self.numbers.dtype)
                if value.dtype != (torch.int32 if dtype.itemsize == 4 else torch.int64) or value.dim() != 1:
                    raise ValueError(f"its values of {name} are {value.dtype} {tuple(value.shape)}")
                part[VALUES] = value.numpy().view(dtype)
            if any(len(part[what]) != size for what, size in sizes[name].items()):
                raise ValueError(f"its part of {name} has another size")
            parts[name] = part
        return parts

    def _add(self, client: ClientId, parts: Mapping[str, Part]) -> None:
        for name, part in parts.items():
            total = self.totals.setdefault(name, {what: np.zeros_like(numbers) for what, numbers in part.items()})
            for what, numbers in part.items():
                np.add(total[what], numbers, out=total[what])
        self.returned.append(client)

    def _unmask(self, shared: Mapping[ClientId, Shares], context: str) -> None:
        returned, opened = sorted(self.returned), self.opened()
        requests = {
            client: Unmask(
                session=self._id,
                returned=returned,
                sealed={sender: shares.sealed[client] for sender, shares in shared.items()},
            )
            for client in returned
        }
        ranks = {client: rank for rank, client in enumerate(sorted(self.roster), start=1)}
        keys: dict[ClientId, dict[int, bytes]] = {}
        seeds: dict[tuple[str, ClientId], dict[int, bytes]] = {}

        def read(client: ClientId, opening: Opening) -> str | None:
            given = [(keys, each, share) for each, share in opening.keys.items()]
            of_seeds = [(name, each, share) for name, by in opening.seeds.items() for each, share in by.items()]
            if not all(is_share(bytes.fromhex(share)) for *_, share in chain(given, of_seeds)):
                return "what it gave out are no shares"
            for _, each, share in given:
                keys.setdefault(each, {})[ranks[client]] = bytes.fromhex(share)
            for name, each, share in of_seeds:
                seeds.setdefault((name, each), {})[ranks[client]] = bytes.fromhex(share)
            return None

        answered = self._exchange("unmask", requests, Opening, read)
        if len(answered) < self.threshold:
            raise TooFew(f"{len(answered)} clients gave out shares to open the sums, and {self.threshold} are needed")
        masks: dict[str, tuple[list[bytes], list[bytes]]] = {}
        for name, clients in list(opened.items()):
            if max(len(seeds.get((name, client), ())) for client in clients) < self.threshold:
                self._withhold(name)
                del opened[name]
                continue
            found = [self._seed(name, client, seeds.get((name, client), {}), shared, context) for client in clients]
            masks[name] = ([], found)
        self._find_pairs(sorted(set(shared) - set(returned)), opened, keys, context, masks)
        for name, (added, removed) in masks.items():
            _change(self.totals[name], added, removed)
        self.totals = {name: self.totals[name] for name in opened}

    def _seed(
        self, name: str, client: ClientId, given: Mapping[int, bytes], shared: Mapping[ClientId, Shares], context: str
    ) -> bytes:
        """The seed of a client's masks in a sum, which are its alone."""
        known = bytes.fromhex(shared[client].commitments[name])
        return self._recovered(given, known, lambda secret: commitment(secret, context, client, name), client)

    def _withhold(self, name: str) -> None:
        """Note that its clients do not open a sum, though it has enough of them."""
        self.withheld.add(name)
        words = f"{name} was not opened: its clients opened almost the same sum of this round before"
        self.remarks.append(RemarkEvent(round=self.number, client="", reason=words))

    def _find_pairs(
        self,
        gone: Sequence[ClientId],
        opened: Mapping[str, Sequence[ClientId]],
        keys: Mapping[ClientId, Mapping[int, bytes]],
        context: str,
        masks: Mapping[str, tuple[list[bytes], list[bytes]]],
    ) -> None:
        """Find the masks that others have in common with clients that dropped out after they shared.

        They are added to those that `masks` has for each sum: what is to be added, and what is to be removed.
        """
        starts: dict[str, str] = {}
        for client in gone:
            common = [name for name in self.roster[client].sums if name in opened]
            if not common:
                continue
            starts = starts or starts_of(opened, digests_of(self._starting), self._open.state.plan)
            secret = self._recovered(
                keys.get(client, {}), bytes.fromhex(self.roster[client].mask_key), public_key, client
            )
            for other in sorted({each for name in common for each in opened[name]}):
                pair = agree(secret, bytes.fromhex(self.roster[other].mask_key), "mask", context)
                for name in common:
                    if other in opened[name]:
                        added, removed = masks[name]
                        (removed if other < client else added).append(_pair_key(pair, name, starts[name]))

    def _recovered(
        self, shares: Mapping[int, bytes], known: bytes, shown: Callable[[bytes], bytes], client: ClientId
    ) -> bytes:
        """A secret from its shares, recognised by what its client showed of it."""
        secret = recover(shares, self.threshold, lambda found: shown(found) == known)
        if secret is None:
            raise TooFew(
                f"the masks of {client} cannot be removed: of its shares {len(shares)} were given out, and"
                f" {self.threshold} right ones are needed"
            )
        return secret

    def _exchange(
        self,
        step: str,
        requests: Mapping[ClientId, _Message],
        kind: type[Answer],
        read: Callable[[ClientId, Answer], str | None],
    ) -> dict[ClientId, Answer]:
        """Send every client its request; the answers that `read` has nothing against, and failures for the others."""
        found: dict[ClientId, Answer] = {}
        state, number = self._open.state, self._open.number
        settings = {"methods": {NAME: self._options.model_dump(mode="json")}}

        def jobs() -> Iterator[Job]:
            for client, request in requests.items():
                tasks = self._open.clients[client]
                extra = {NAME: _plain(request)}
                yield Job("exchange", number, client, tasks, {}, state.plan, None, 0, 0, settings, extra=extra)

        for answer in self._open.engine.run(jobs(), self._open.deadline):
            self._count(answer, is_exchange=True)
            reason = unwelcome(answer, requests, found)
            if reason is None:
                assert isinstance(answer, Update)
                extra = answer.extra.get(NAME, NO_EXTRA)
                try:
                    said = kind.model_validate(dict(extra.values))
                    is_due = answer.round == number and not extra.tensors and not answer.delta
                    reason = read(answer.client, said) if is_due else "its answer is not that of the exchange"
                except ValidationError as error:
                    reason = f"its answer cannot be read ({_first(error)})"
                except Exception as error:
                    # Whatever is wrong with one client's answer costs that client alone.
                    reason = f"its answer cannot be read: {type(error).__name__}"
                else:
                    if reason is None:
                        found[answer.client] = said
            if reason is not None and answer.client not in found:
                self._fail(step, answer.client, reason)
        return found

    def _fail(self, step: str, client: ClientId, reason: str) -> None:
        self.dropped[step] = self.dropped.get(step, 0) + 1
        if client in self.returned:
            # Its update counts: others can open the sum.
            self.remarks.append(RemarkEvent(round=self._open.number, client=client, reason=f"{step}: {reason}"))
        elif client not in self.failures:
            words = reason if step in ("train", "evaluate") else f"secure aggregation, {step}: {reason}"
            self.failures[client] = Failure(self._open.number, client, words, self.traffic.get(client, Traffic()))

    def _count(self, answer: Update | Failure, *, is_exchange: bool) -> None:
        def added(one: Traffic, seconds: float) -> Traffic:
            more = answer.traffic
            return Traffic(one.bytes_down + more.bytes_down, one.bytes_up + more.bytes_up, one.seconds + seconds)

        seconds = answer.traffic.seconds
        self.traffic[answer.client] = added(self.traffic.get(answer.client, Traffic()), seconds)
        if is_exchange:
            self.exchanged = added(self.exchanged, seconds)


class SecureAggregation(ServerMethod):
    """Collects updates and scores as sums that are opened together."""

    name = NAME

    def __init__(self, options: Options, names: Sequence[str], tasks: Mapping[str, Task]) -> None:
        self._options, self._names, self._tasks = options, tuple(names), tasks
        self._said: list[Event] = []

    def collect(self, open_round: OpenRound) -> Collected:
        session = _Session(self._options, open_round, "train", self._names)
        weights = open_round.state.weights
        sizes = {
            name: {VALUES: sum(weights[key].numel() for key in keys), NUMBERS: 1} if keys else {NUMBERS: NUM_COUNTS}
            for name, keys in session.keys.items()
        }
        began = time.perf_counter()
        try:
            session.run(sizes)
        except TooFew as error:
            raise RoundFailed(
                f"round {open_round.number}: {error}{_first_failure(session)}",
                open_round.number,
                _failures(session),
            ) from None
        delta: dict[Key, Tensor] = {}
        totals: dict[str, float] = {}
        error_bound = 0.0
        for name, clients in session.opened().items():
            if name.startswith(COUNTS):
                continue
            weight = float(decode_numbers(session.totals[name][NUMBERS])[0])
            if not 0 < weight <= len(clients):
                raise _no_sum(name, session)
            values = torch.from_numpy(session.numbers.decode(session.totals[name][VALUES], weight))
            error_bound = max(error_bound, session.numbers.error(len(clients), weight))
            keys = session.keys[name]
            for key, part in zip(keys, torch.split(values, [weights[key].numel() for key in keys]), strict=True):
                delta[key] = part.view(weights[key].shape).to(weights[key].dtype)
            totals[name] = weight * session.units[name]
        combined = _combined(open_round.number, delta, _counts(session))
        opened = {name: set(clients) for name, clients in session.opened().items()}
        updates = tuple(_record(client, open_round, session, opened) for client in sorted(session.returned))
        event = self._event(session, open_round, "train", time.perf_counter() - began, error_bound)
        return Collected(updates, _failures(session), combined, totals, (*session.remarks, event))

    def collect_scores(self, open_round: OpenRound) -> Scored:
        session = _Session(self._options, open_round, "evaluate", self._names)
        tasks = {name: self._tasks[name.removeprefix(SCORES)] for name in session.keys}
        began = time.perf_counter()
        sums: dict[str, Sums] = {}
        try:
            session.run({name: {NUMBERS: num_scores(task)} for name, task in tasks.items()})
        except TooFew as error:
            words = f"nothing was scored: {error}{_first_failure(session)}"
            self._said.append(RemarkEvent(round=open_round.number, client="", reason=words))
        else:
            for name in session.opened():
                numbers = decode_numbers(session.totals[name][NUMBERS])
                sums[tasks[name].name] = tasks[name].kind_of.sums_from_numbers(tasks[name], numbers)
            event = self._event(session, open_round, "evaluate", time.perf_counter() - began)
            self._said += [*session.remarks, event]
        down = sum(one.bytes_down for one in session.traffic.values())
        up = sum(one.bytes_up for one in session.traffic.values())
        in_order = {task: sums[task] for task in self._tasks if task in sums}
        return Scored(in_order, tuple(sorted(session.returned)), _failures(session), Traffic(down, up))

    def after_evaluation(self, state: State, evaluation: Evaluation) -> Step:
        said, self._said = tuple(self._said), []
        return Step(state, said)

    def _event(
        self, session: _Session, open_round: OpenRound, purpose: Purpose, seconds: float, error: float | None = None
    ) -> SecureAggregationEvent:
        longest = max((one.seconds for one in session.traffic.values()), default=0.0)
        return SecureAggregationEvent(
            round=open_round.number,
            purpose=purpose,
            clients=len(session.roster),
            returned=len(session.returned),
            threshold=session.threshold,
            min_clients=max(map(session.minimum, session.keys)),
            opened={name: len(clients) for name, clients in session.opened().items()},
            closed={name: len(clients) for name, clients in session.closed().items()},
            dropped=dict(session.dropped),
            step=session.numbers.step if purpose == "train" else None,
            error=error,
            seconds=max(0.0, seconds - longest),
            bytes_up=session.exchanged.bytes_up,
            bytes_down=session.exchanged.bytes_down,
        )


def _no_sum(name: str, session: _Session) -> RoundFailed:
    """The end of a round in which a sum's weights cannot be those of its clients."""
    number = session.number
    return RoundFailed(
        f"round {number}: the masks of {name} do not cancel: a client sent something else than its update, or was told"
        f" something else than the others; it had {len(session.returned)} clients",
        number,
        _failures(session),
    )


def _first_failure(session: _Session) -> str:
    failures = _failures(session)
    return f"; {len(failures)} failed, the first was {failures[0].client}: {failures[0].reason}" if failures else ""


def _failures(session: _Session) -> tuple[Failure, ...]:
    return tuple(session.failures[client] for client in sorted(session.failures))


def _record(
    client: ClientId, open_round: OpenRound, session: _Session, opened: Mapping[str, Collection[ClientId]]
) -> Update:
    """That a client returned an update, of which values; how many examples it has is not known."""
    empty = torch.empty(0, device="meta")
    delta = {key: empty for name, keys in session.keys.items() if client in opened.get(name, ()) for key in keys}
    tasks = open_round.clients[client]
    return Update(open_round.number, client, tasks, delta, None, {}, {}, traffic=session.traffic[client])


def _counts(session: _Session) -> dict[str, np.ndarray]:
    """Of every task whose counts could be opened: examples, examples seen, losses times examples, examples of those."""
    opened = [name for name in session.opened() if name.startswith(COUNTS)]
    return {name.removeprefix(COUNTS): decode_numbers(session.totals[name][NUMBERS]) for name in opened}


def _combined(number: int, delta: Mapping[Key, Tensor], counts: Mapping[str, np.ndarray]) -> Update:
    return Update(
        number,
        "",
        tuple(counts),
        delta,
        None,
        {task: max(1, round(found[0])) for task, found in counts.items()},
        {task: float(found[2] / found[3]) for task, found in counts.items() if found[3] >= 1},
        seen={task: max(0, round(found[1])) for task, found in counts.items()},
    )


def num_scores(task: Task) -> int:
    """How many numbers a client's scores of a task are."""
    kind = task.kind_of
    nothing = kind.sum_outputs(
        task, np.zeros((0, kind.num_outputs(task))), kind.blank_labels(0), 0.0, keep_pairs=False, broken=0
    )
    numbers = kind.sums_to_numbers(task, nothing)
    assert numbers is not None, "other kinds are refused before the first round"
    return len(numbers)


# What it goes together with ------------------------------------------------------------------------------------------

KEYS_OF = {
    "scaffold": "methods.scaffold",
    "adaptive_sharing": "sharing.adaptive",
    "pcgrad": "training.gradients",
    "example_privacy": "privacy.example",
}


def conflict(config: Config) -> str | None:
    """Why a config cannot have its updates summed under masks: the key, what was found, and what to write."""
    federation, own = config.federation, "privacy.secure_aggregation"
    for key, rule in federation.aggregation.looks_at_updates().items():
        return f"{key}: found {rule} with {own}, which needs single updates; write mean"
    if federation.max_share is not None:
        return f"federation.max_share: found with {own}, under which no share is known; leave it out"
    if config.wire.up != "fp32":
        return f"wire.up: found {config.wire.up} with {own}, whose whole numbers cannot be shortened; write fp32"
    if federation.vocabulary_slices:
        return (
            f"federation.vocabulary_slices: found true with {own}, and the rows that a client is sent tell its words;"
            " write false"
        )
    if config.evaluation.share_pairs:
        return f"evaluation.share_pairs: found with {own}, under which single predictions do not leave; leave it out"
    if federation.clients_per_round is not None and federation.clients_per_round < config.privacy.min_clients:
        return (
            f"federation.clients_per_round: found {federation.clients_per_round}, and a sum has privacy.min_clients,"
            f" {config.privacy.min_clients}, at least; sample more"
        )
    if config.privacy.client is not None:
        return (
            f"privacy.client: found with {own}, under which the server cannot clip single updates; leave one of them"
            " out"
        )
    return None


def _refuse_senders(config: Config, plan: SharingPlan, names: Sequence[str]) -> None:
    """Raise for a method that sends something of a single client, or changes a single update at the server."""
    from fedmtl.capabilities import switched_on

    for name in switched_on(config):
        if name == NAME or not is_known(name):
            continue
        capability = find(name)
        options = (
            config.methods.get(name)
            if capability.client_options is None
            else capability.client_options(config, plan, names)
        )
        if options is None:
            continue
        key = KEYS_OF.get(name, f"methods.{name}")
        if capability.sends:
            raise ConfigError(
                f"{key}: found with privacy.secure_aggregation, and it needs more of single clients than sums; leave"
                " one of them out"
            )
        made = capability.update_filter
        if made is not None and getattr(made, "at_server", None) is not UpdateFilter.at_server:
            raise ConfigError(
                f"{key}: found with privacy.secure_aggregation, and it changes single updates at the server; leave one"
                " of them out"
            )


def _is_on(config: Config) -> bool:
    """Baselines sum nothing over clients but in single-task federations."""
    return config.privacy.secure_aggregation is not None and config.mode.startswith("federated")


def _client_options(config: Config, plan: SharingPlan, names: Sequence[str]) -> dict[str, Any] | None:
    given = config.privacy.secure_aggregation
    if given is None or not _is_on(config):
        return None
    check_available()
    reason = conflict(config)
    if reason is not None:
        raise ConfigError(reason)
    _refuse_senders(config, plan, names)
    return Options(
        bits=given.bits,
        max_value=given.max_value,
        threshold=given.threshold,
        min_clients=config.privacy.min_clients,
        average=config.federation.average,
        max_norm=config.federation.max_update_norm,
    ).model_dump(mode="json")


def _open(setup: ServerSetup) -> SecureAggregation | None:
    if not _is_on(setup.config):
        return None
    names = list(setup.model.canonical())
    is_scored = setup.config.evaluation.where == "clients" or setup.plan.has_personal
    for name, task in setup.tasks.items() if is_scored else ():
        if type(task.kind_of).sums_from_numbers is TaskKind.sums_from_numbers:
            raise ConfigError(
                f"tasks.{name}.kind: found {task.kind_of.name}, whose scores cannot be added up under masks; write"
                " `evaluation.where: server`, or leave privacy.secure_aggregation out"
            )
    if setup.clients is not None:
        _check_companies(setup, names, is_scored)
    return SecureAggregation(Options.model_validate(setup.settings.methods[NAME]), names, setup.tasks)


def _check_companies(setup: ServerSetup, names: Sequence[str], is_scored: bool) -> None:
    """Raise for a scope that never has enough clients, and for more clients than there can be."""
    assert setup.clients is not None
    least = setup.config.privacy.min_clients
    scopes: dict[str, set[ClientId]] = {}
    for task, clients in setup.clients.items():
        for scope in sums_of("train", setup.plan, names, [task], ""):
            scopes.setdefault(scope, set()).update(clients)
    everybody = {client for clients in setup.clients.values() for client in clients}
    sampled = setup.config.federation.clients_per_round or len(everybody)
    if min(sampled, len(everybody)) > MOST_CLIENTS:
        raise ConfigError(
            f"federation.clients_per_round: {len(everybody)} clients take part in a round, and with"
            f" privacy.secure_aggregation at most {MOST_CLIENTS} can; sample fewer"
        )
    for scope, found in scopes.items():
        if len(found) < least and not scope.startswith(COUNTS):
            task = scope.removeprefix("task:")
            remedy = f'{{"heads.{task}.*": client}} before the other sharing.rules' if task in setup.tasks else "client"
            raise ConfigError(
                f"privacy.min_clients: found {least}, and {len(found)} clients have the values of scope {scope}, which"
                f" would never move; let more clients have it, keep it at the clients ({remedy}), or lower min_clients"
            )
    for task, clients in setup.clients.items():
        if is_scored and len(clients) < least:
            setup.observe(
                WarningEvent(
                    words=f"{task} has {len(clients)} clients and privacy.min_clients is {least}: its scores and losses"
                    " are not opened"
                )
            )


def _check_received(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    """Why it is neither an exchange nor what comes with a job."""
    try:
        if "step" in extra.values:
            _read_request(extra)
        elif extra.tensors or Contribute.model_validate(dict(extra.values)) is None:
            return "the job brings tensors of secure aggregation, which has none"
    except (ValidationError, PolicyError):
        return "the job's part of secure aggregation cannot be read"
    return None


CAPABILITY = Capability(
    NAME,
    client_options=_client_options,
    server=_open,
    check_received=_check_received,
    update_filter=MaskedUpdate,
    exchange=answer_exchange,
)
