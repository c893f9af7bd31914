"""One session of secure aggregation at the server: its exchanges in their order, and the sums that they open.

The server adds up what comes under masks and removes the masks of whole sums. Whatever is wrong with one client's
answer costs that client alone; where too few are left, the session ends with the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from secrets import token_hex
from typing import TypeVar

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from fedmtl.federation.aggregators.mean import client_weight
from fedmtl.federation.messages import ClientId, Failure, Job, Traffic, Update
from fedmtl.federation.server_method import OpenRound
from fedmtl.federation.validate import unwelcome
from fedmtl.methods.client_noise import multiplier_of
from fedmtl.methods.masking import FixedPoint, agree, commitment, is_share, public_key, recover, weight_unit
from fedmtl.methods.secure_protocol import (
    COUNTS,
    MASKED,
    NAME,
    NUMBERS,
    SMALLEST_THRESHOLD,
    VALUES,
    Advert,
    Advertise,
    Contribute,
    MaskedNumbers,
    Message,
    Opening,
    Options,
    Part,
    Purpose,
    Share,
    Shares,
    Unmask,
    change_masks,
    context_of,
    digests_of,
    fewest,
    first_mistake,
    members,
    minimum,
    pair_key,
    starts_of,
    sums_of,
    to_extra,
)
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import RemarkEvent
from fedmtl.sharing.plan import NO_EXTRA, Key


class TooFew(Exception):
    """A session that cannot be opened, with the reason."""


Answer = TypeVar("Answer", bound=Message)


class Session:
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
        self._multiplier = 0.0

    @property
    def number(self) -> int:
        return self._open.number

    @property
    def numbers(self) -> FixedPoint:
        return self._options.numbers(len(self.roster), self._multiplier)

    @property
    def threshold(self) -> int:
        return self._options.needed(len(self.roster))

    def minimum(self, name: str) -> int:
        return minimum(name, self.roster, self._options.min_clients)

    def fewest(self, name: str) -> int:
        return fewest(name, self.roster, self._options)

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
        """The jobs themselves; what comes back is added up as it comes, and no one's is stored."""
        contribute = {NAME: to_extra(Contribute(session=self._id, sharers=sharers))}

        def jobs() -> Iterator[Job]:
            for client in self._open.clients:
                if client in sharers:
                    job = self._open.job(client, contribute)
                    self._multiplier = multiplier_of(job)
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
            change_masks(self.totals[name], added, removed)
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
        words = f"{name} was not opened: of this round it was opened before for other clients"
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
            starts = starts or starts_of(opened, digests_of(self._starting), self._open.state.plan, self._multiplier)
            secret = self._recovered(
                keys.get(client, {}), bytes.fromhex(self.roster[client].mask_key), public_key, client
            )
            for other in sorted({each for name in common for each in opened[name]}):
                pair = agree(secret, bytes.fromhex(self.roster[other].mask_key), "mask", context)
                for name in common:
                    if other in opened[name]:
                        added, removed = masks[name]
                        (removed if other < client else added).append(pair_key(pair, name, starts[name]))

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
        requests: Mapping[ClientId, Message],
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
                extra = {NAME: to_extra(request)}
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
                    reason = f"its answer cannot be read ({first_mistake(error)})"
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
