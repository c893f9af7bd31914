"""The client's half of secure aggregation: what leaves a client is decided here, whoever the server is.

A client checks what the server cannot any more: that an update is finite, complete and not too long. It binds its masks
to everything that must be the same for all of a sum: who takes part, how clients are weighed, and the values that they
start from. A server that tells two clients different things gets a sum of noise.

A key or seed lies in the client's folder from one exchange to the next, as workers come and go, and is removed with the
last one. All of them are random: the sums do not depend on them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field, ValidationError
from torch import Tensor

from fedmtl.federation.aggregators.mean import client_weight
from fedmtl.federation.filters.protocol import ExchangeClient, FilterClient, UpdateFilter
from fedmtl.federation.messages import ClientId, Job, Update
from fedmtl.federation.validate import expect, refusal
from fedmtl.methods.client_noise import NoisePart, multiplier_of
from fedmtl.methods.masking import (
    SHARE_BYTES,
    WEIGHT_BITS,
    FixedPoint,
    Masked,
    agree,
    commitment,
    encode_numbers,
    new_secret,
    public_key,
    quantized,
    seal,
    split,
    unseal,
)
from fedmtl.methods.secure_protocol import (
    COUNTS,
    FILE,
    MASKED,
    MOST_OPENED,
    NAME,
    NUMBERS,
    SCORES,
    VALUES,
    Advert,
    Advertise,
    Client,
    Contribute,
    Hex32,
    MaskedNumbers,
    Message,
    Opening,
    Options,
    Part,
    Purpose,
    SessionId,
    Share,
    Shares,
    SumName,
    Unmask,
    change_masks,
    context_of,
    digests_of,
    fewest,
    first_mistake,
    members,
    minimum,
    pair_key,
    read_request,
    refuse,
    signed,
    starts_of,
    sums_of,
    to_extra,
)
from fedmtl.runs.folder import make_private_folder, write_atomic
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, weights_sha256


class Opened(Message):
    """Sums that this client helped to open: of which work, of whom, and among whom."""

    work: Hex32
    sums: dict[SumName, list[Client]]
    roster: list[Client] = Field(default_factory=list)


class Secrets(Message):
    """All that a client remembers of a session; `answered` has what it gave out when its secrets were removed."""

    session: SessionId
    purpose: Purpose
    round: int
    advert: Advert
    cipher_secret: Hex32 | None = None
    mask_secret: Hex32 | None = None
    share: Share | None = None
    shares: Shares | None = None
    seeds: dict[SumName, Hex32] = Field(default_factory=dict)
    work: Hex32 | None = None
    contribute: Contribute | None = None
    unmask: Hex32 | None = None
    answered: Opening | None = None
    opened: list[Opened] = Field(default_factory=list)

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


def answer_exchange(received: Extra, client: ExchangeClient) -> Extra:
    """A client's answer to the server's part of an exchange."""
    request = read_request(received)
    options = Options.model_validate(client.job.settings["methods"][NAME])
    if isinstance(request, Advertise):
        return to_extra(_advertise(request, client, options))
    secrets = _load(client.folder)
    if secrets is None or secrets.session != request.session or secrets.round != client.job.round:
        raise refuse("the exchange is of a session that this client has no keys of")
    if isinstance(request, Share):
        return to_extra(_share(request, secrets, client, options))
    return to_extra(_unmask(request, secrets, client, options))


def _advertise(request: Advertise, client: ExchangeClient, options: Options) -> Advert:
    job, before = client.job, _load(client.folder)
    if before is not None and before.session == request.session:
        if (before.purpose, before.round) != (request.purpose, job.round) or before.cipher_secret is None:
            raise refuse("the session is another one's, or over")
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
        message = signed(request.session, request.purpose, job.round, job.client, advert)
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
            raise refuse("the session's adverts are not those that this client shared its secrets by")
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
        raise refuse("an advert's key is none") from None


def _check_roster(request: Share, secrets: Secrets, client: ExchangeClient) -> None:
    """Raise unless this client's advert is as it was made, and every other one is by whom it claims to be."""
    name, roster = client.job.client, request.roster
    if roster.get(name) != secrets.advert:
        raise refuse("the session's adverts do not have this client's as it was made")
    keys = [key for advert in roster.values() for key in (advert.cipher_key, advert.mask_key)]
    if len(set(keys)) < len(keys):
        raise refuse("two adverts have one key")
    scopes = {each for each in secrets.advert.sums if not each.startswith((COUNTS, SCORES))}
    if not scopes <= set(request.units) or (scopes and not set(client.job.tasks) <= set(request.task_weights)):
        raise refuse("the weights of a task or a scope are missing")
    if client.identity is None:
        return
    if len({advert.identity for advert in roster.values()}) < len(roster):
        raise refuse("two adverts are of one identity")
    for other, advert in roster.items():
        if advert.identity is None or advert.signature is None:
            raise refuse(f"the advert of {other} is not signed")
        message = signed(request.session, secrets.purpose, secrets.round, other, advert)
        reason = client.identity.refuses(other, advert.identity, message, bytes.fromhex(advert.signature))
        if reason is not None and other != name:
            raise refuse(f"{other}: {reason}")


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
            raise refuse(f"the update stays here: {reason}")
        # Before anything is computed: a repeated job must not be answered under the same masks with other values.
        secrets, digests = self._begun("train", job, client.folder)
        assert secrets.share is not None
        share, given, multiplier = secrets.share, self._options.noise, multiplier_of(job)
        numbers = self._options.numbers(len(share.roster), multiplier)
        noise = None
        if given is not None:
            # Without keys there is no deployment, and the noise is that of the job alone. With them it is of this
            # session's fresh keys, roster and weights: under another roster the same noise would be scaled otherwise,
            # and two sums would give it away.
            noise = NoisePart(given, client, secrets.context if secrets.advert.identity else None)
            update = noise.clipped(update, numbers)
            noise.count()
        parts = {name: self._part(name, update, job, share, numbers) for name in secrets.advert.sums}
        for name, part in parts.items():
            if noise is not None and VALUES in part:
                noise.add(name, fewest(name, share.roster, self._options), numbers, part[VALUES])
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
                raise refuse(f"the scores of {task.name} cannot be added up under masks")
            parts[name] = {NUMBERS: encode_numbers(numbers, len(secrets.share.roster))}
        return self._masked(update, parts, secrets, job, digests)

    def _begun(self, purpose: Purpose, job: Job, folder: Path) -> tuple[Secrets, dict[str, str]]:
        """The session of a job, in which this is the only one, and digests of what the job brought."""
        secrets = _load(folder)
        try:
            contribute = Contribute.model_validate(dict(job.extra.get(NAME, NO_EXTRA).values))
        except ValidationError as error:
            raise refuse(f"the job cannot be read ({first_mistake(error)})") from None
        if secrets is None or (secrets.session, secrets.purpose, secrets.round) != (
            contribute.session,
            purpose,
            job.round,
        ):
            raise refuse("the job is of a session that this client has no keys of")
        if secrets.share is None or secrets.mask_secret is None:
            raise refuse("the job came before the secrets were shared, or after they were removed")
        sharers, roster = contribute.sharers, secrets.share.roster
        if len(set(sharers)) < len(sharers) or not set(sharers) <= set(roster) or job.client not in sharers:
            raise refuse("those who shared are not of the session")
        if len(sharers) < self._options.needed(len(roster)):
            raise refuse(f"{len(sharers)} of {len(roster)} clients shared their secrets, which are too few to go on")
        digests = digests_of(job.weights)
        work = _work(job, digests)
        if secrets.work is not None and (secrets.work, secrets.contribute) != (work, contribute):
            raise refuse("the job is another one than this session's")
        if any(one.work == work and one.roster not in ([], sorted(roster)) for one in secrets.opened):
            raise refuse("sums of the same work were opened before, among other clients")
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
            raise refuse("the update is of other scopes than this client advertised")
        roster, context = secrets.share.roster, secrets.context
        starts = starts_of(parts, digests, job.plan, multiplier_of(job))
        added = {name: [bytes.fromhex(secrets.seeds[name])] for name in parts}
        removed: dict[str, list[bytes]] = {name: [] for name in parts}
        for other in secrets.contribute.sharers:
            common = [name for name in parts if name in roster[other].sums]
            if other == job.client or not common:
                continue
            mask_key = bytes.fromhex(roster[other].mask_key)
            pair = agree(bytes.fromhex(secrets.mask_secret), mask_key, "mask", context)
            for name in common:
                (removed if job.client > other else added)[name].append(pair_key(pair, name, starts[name]))
        for name, part in parts.items():
            change_masks(part, added[name], removed[name])
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
            raise refuse("the session's masks were given out already, for another set of clients")
        return secrets.answered
    if secrets.share is None or secrets.contribute is None or secrets.cipher_secret is None:
        raise refuse("the session's update was not sent, so there is nothing to open")
    roster, sharers, returned = secrets.share.roster, secrets.contribute.sharers, request.returned
    if len(set(returned)) < len(returned) or not set(returned) <= set(sharers) or client.job.client not in returned:
        raise refuse("those whose update came are not those who shared")
    threshold = options.needed(len(roster))
    if len(returned) < threshold:
        raise refuse(f"{len(returned)} updates came, and {threshold} of {len(roster)} are needed")
    shares = _unsealed(request, secrets, client.job.client)
    opened: dict[str, list[ClientId]] = {}
    for name in sorted({name for advert in roster.values() for name in advert.sums}):
        # A client whose shares open under these adverts is there now, and saw the same.
        there = [each for each in members(name, returned, roster) if each in shares]
        # Whoever counted on the noise of so many opens no sum of fewer.
        least = minimum(name, roster, options.min_clients) if options.noise is None else fewest(name, roster, options)
        if len(there) >= least and not _is_known_otherwise(name, there, secrets):
            opened[name] = there
    if not opened:
        raise refuse(
            "no sum is opened: each would be of fewer clients than the config or a policy demands, or of others than"
            " one of the same work that was opened before"
        )
    answer = Opening(
        keys={each: shares[each][0].hex() for each in sorted(set(sharers) - set(returned)) if each in shares},
        seeds={
            name: {each: shares[each][1 + roster[each].sums.index(name)].hex() for each in there}
            for name, there in opened.items()
        },
    )
    known = [*secrets.opened, Opened(work=secrets.work or "0" * 64, sums=opened, roster=sorted(roster))][-MOST_OPENED:]
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


def _is_known_otherwise(name: str, clients: Sequence[ClientId], secrets: Secrets) -> bool:
    """Whether the sum of the same work was opened before for other clients.

    However many of them differ: a few sums of other clients each, put together, would be single updates.
    """
    before = [one.sums[name] for one in secrets.opened if one.work == secrets.work and name in one.sums]
    return any(known != list(clients) for known in before)


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
