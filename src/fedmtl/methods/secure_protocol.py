"""What the two halves of secure aggregation have in common: their messages, the sums of a client, and who opens them.

`secure_aggregation.py` says what the protocol is. A message is a stranger's words on either side: nothing unknown or of
another type is read. Everything here is computed from what all clients of a session were sent, so that all of them and
the server come to the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from torch import Tensor

from fedmtl.errors import PolicyError
from fedmtl.federation.faults import NAME as SAFE_NAME
from fedmtl.federation.messages import ClientId
from fedmtl.methods.masking import FixedPoint, Masked, add_masks
from fedmtl.methods.noise import LARGEST_NORMAL, derive_key
from fedmtl.sharing.plan import Extra, Key, SharingPlan, is_personal, scope_tasks, weights_sha256

NAME = "secure_aggregation"
FILE = f"{NAME}.json"
# The slot of what is masked, and the two parts of a sum.
MASKED, VALUES, NUMBERS = "masked", "values", "numbers"
# What the sums of a round say of themselves: the fewest clients that each could have been of.
FEWEST = "fewest"
COUNTS, SCORES = "counts:", "scores:"
# Examples, examples seen, losses times examples, and the examples of those.
NUM_COUNTS = 4
# Beyond it, shares between all pairs would take longer than training.
MOST_CLIENTS = 1024
MOST_SUMS = 4096
# How many sums that it helped to open a client remembers, so as not to open it for others again.
MOST_OPENED = 64
SMALLEST_THRESHOLD = 2

Purpose = Literal["train", "evaluate"]
Hex = Annotated[str, Field(pattern=r"^([0-9a-f]{2})*$", max_length=1 << 22)]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SessionId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Client = Annotated[str, Field(pattern=SAFE_NAME)]
SumName = Annotated[str, Field(min_length=1, max_length=300)]
Weight = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class Message(BaseModel):
    """What is said in an exchange: a stranger's words, so that nothing unknown or of another type is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Advertise(Message):
    """The server opens a session: whoever takes part makes keys for it."""

    step: Literal["advertise"] = "advertise"
    session: SessionId
    purpose: Purpose


class Advert(Message):
    """A client's keys for one session, the sums that it has a part in, and the fewest clients that it opens one of.

    With an identity, all of it is signed, and the key that it is signed with comes with it.
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


class Share(Message):
    """Everybody's adverts, and how clients are weighed: what a task counts, and the unit of a scope's weights."""

    step: Literal["share"] = "share"
    session: SessionId
    roster: Annotated[dict[Client, Advert], Field(min_length=SMALLEST_THRESHOLD, max_length=MOST_CLIENTS)]
    task_weights: Annotated[dict[str, Weight], Field(max_length=1000)] = {}
    units: Annotated[dict[SumName, Annotated[Weight, Field(gt=0)]], Field(max_length=MOST_SUMS)] = {}


class Shares(Message):
    """A client's secrets in shares, each sealed for one client, and what its seeds can be recognised by."""

    sealed: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]
    commitments: Annotated[dict[SumName, Hex32], Field(max_length=MOST_SUMS)]


class Contribute(Message):
    """What comes with the job itself: the session, and who shared, with all of whom masks cancel."""

    session: SessionId
    sharers: Annotated[list[Client], Field(max_length=MOST_CLIENTS)]


class MaskedNumbers(Message):
    """The masked numbers of every sum of a client, eight bytes each; its values are tensors beside them."""

    numbers: Annotated[dict[SumName, Hex], Field(max_length=MOST_SUMS)]


class Unmask(Message):
    """Whose masked update came, and the shares that were sealed for this client."""

    step: Literal["unmask"] = "unmask"
    session: SessionId
    returned: Annotated[list[Client], Field(max_length=MOST_CLIENTS)]
    sealed: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]


class Opening(Message):
    """A client's shares: of the mask keys of clients that dropped out, and of the seeds of a sum, by client."""

    keys: Annotated[dict[Client, Hex], Field(max_length=MOST_CLIENTS)]
    seeds: Annotated[dict[SumName, dict[Client, Hex]], Field(max_length=MOST_SUMS)]


class SharedNoise(Message):
    """What clients are given of `privacy.client` where they add its noise themselves (`client_noise.py`)."""

    max_norm: float
    bound: Literal["together", "by_scope"]
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None


class Options(Message):
    """What clients are given of the config."""

    bits: Literal[32, 64]
    max_value: float
    threshold: float
    min_clients: int
    average: Literal["weighted", "uniform", "tasks"]
    max_norm: float | None
    noise: SharedNoise | None = None

    def numbers(self, num_clients: int, multiplier: float = 0.0) -> FixedPoint:
        """How entries become whole numbers; `multiplier` is that of the noise that clients add to theirs."""
        if self.noise is None:
            return FixedPoint(self.bits, self.max_value, num_clients)
        # Of the fewest clients that a sum can be of, whose parts of the noise are the largest.
        part = LARGEST_NORMAL * multiplier * self.noise.max_norm / math.sqrt(max(1, self.min_clients - 1))
        return FixedPoint(self.bits, min(self.max_value, self.noise.max_norm), num_clients, part)

    def needed(self, num_clients: int) -> int:
        """How many of so many clients give a secret back.

        More than half: no server can have one half of them give out a client's key, and the other half its seeds.
        """
        share = math.ceil(self.threshold * num_clients - 1e-9)
        return min(num_clients, max(share, num_clients // 2 + 1, SMALLEST_THRESHOLD))


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


def starts_of(
    sums: Iterable[str], digests: Mapping[str, str], plan: SharingPlan, multiplier: float = 0.0
) -> dict[str, str]:
    """What the clients of each sum must have in common: the values that they start from, or are scored with.

    `digests` are those of each scope that a client was sent, `multiplier` that of the noise that clients add.
    """
    moving = {scope: digest for scope, digest in digests.items() if scope != "fixed"}

    def start(name: str) -> str:
        if not name.startswith(SCORES):
            return moving.get(name, "") + (f" with noise {multiplier!r}" if multiplier else "")
        task = name.removeprefix(SCORES)
        return json.dumps([pair for pair in sorted(moving.items()) if scope_tasks(plan, pair[0], [task])])

    return {name: start(name) for name in sums}


def minimum(name: str, roster: Mapping[ClientId, Advert], least: int) -> int:
    """The fewest clients of a sum that may be opened: none of them has its part in one of fewer than it wants."""
    return max(least, *(advert.min_clients for advert in roster.values() if name in advert.sums), 1)


def fewest(name: str, roster: Mapping[ClientId, Advert], options: Options) -> int:
    """The fewest clients that a sum can be of when it is opened, whoever dropped out."""
    others = sum(name not in advert.sums for advert in roster.values())
    return max(minimum(name, roster, options.min_clients), options.needed(len(roster)) - others)


def members(name: str, clients: Collection[ClientId], roster: Mapping[ClientId, Advert]) -> list[ClientId]:
    """Which of these clients have a part in a sum."""
    return [client for client in sorted(clients) if name in roster[client].sums]


def signed(session: str, purpose: str, round_number: int, client: ClientId, advert: Advert) -> bytes:
    plain = advert.model_copy(update={"signature": None}).model_dump(mode="json")
    return json.dumps(["fedmtl", NAME, 1, session, purpose, round_number, client, plain], sort_keys=True).encode()


def pair_key(pair: bytes, name: str, start: str) -> bytes:
    """The key of the masks that two clients have in common in a sum."""
    return derive_key(pair, "pair", name, start)


Part = dict[str, Masked]


def change_masks(parts: Part, added: Sequence[bytes], removed: Sequence[bytes] = ()) -> None:
    """Add and remove the masks of some keys or seeds, each of which has a stream for every part of a sum."""
    for part, numbers in parts.items():
        add_masks(numbers, *([derive_key(key, "mask", part) for key in keys] for keys in (added, removed)))


def refuse(reason: str) -> PolicyError:
    error = PolicyError(f"secure aggregation: {reason}")
    return error.coded("exchange_refused")


def to_extra(message: Message) -> Extra:
    return Extra(message.model_dump(mode="json", exclude_none=True))


def read_request(received: Extra) -> Advertise | Share | Unmask:
    kinds: dict[str, type[Advertise | Share | Unmask]] = {"advertise": Advertise, "share": Share, "unmask": Unmask}
    step = received.values.get("step")
    kind = kinds.get(step) if isinstance(step, str) else None
    if kind is None or received.tensors:
        raise refuse("the job is none of its exchanges")
    try:
        return kind.model_validate(dict(received.values))
    except ValidationError as error:
        raise refuse(f"the exchange cannot be read ({first_mistake(error)})") from None


def first_mistake(error: ValidationError) -> str:
    found = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(str(part)[:40] for part in found['loc'])}: {found['type']}"
