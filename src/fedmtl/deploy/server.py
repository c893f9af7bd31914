"""A run whose clients are sites on other machines: the same loop and the same folder, over another engine."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from fedmtl.config import Config
from fedmtl.config.file import dump_config, load_config
from fedmtl.deploy.final_model import final_frames
from fedmtl.deploy.tasks import (
    check_deployable,
    configured_tasks,
    scheduled_tasks,
    server_config,
    server_data,
    server_population,
)
from fedmtl.deploy.terms import server_terms
from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.engine import FlowerEngine, Port
from fedmtl.engines.flower.enrolment import Enrolments, KeyBook, NoKeys
from fedmtl.engines.flower.roster import Note
from fedmtl.errors import FedmtlError
from fedmtl.experiment.census import reported_census
from fedmtl.experiment.events import failure_event, opening_events, remark_event
from fedmtl.experiment.prepare import Prepared, assemble, open_engine, start_device
from fedmtl.experiment.resume import config_event, take_up
from fedmtl.experiment.run import Log, drive
from fedmtl.federation.handshake import Hello, Welcome, refusal
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, State
from fedmtl.federation.server import all_stopped
from fedmtl.foreign import parse_record, read_record
from fedmtl.runs.event_lines import Event, Observer, first_of
from fedmtl.runs.events import ConfigEvent, ExpectedEvent, PlanEvent, RoundEvent, SiteEvent, StartEvent, WaitingEvent
from fedmtl.runs.folder import RunFolder, create_run, locked
from fedmtl.runs.log import read_events

# Where an app's sites are: at Flower's SuperLink, which is not this project's.
APP = "flower-app"
FLOWER_AGAIN = """flwr run . --run-config 'resume="{}"'"""
# What only this server knows: noise that hides clients is drawn from it.
SECRET, SECRET_BYTES = "secret.bin", 32


class Meeting(Protocol):
    """Where a server and its sites meet; `again` is the command that goes on with the run in the folder {}."""

    @property
    def again(self) -> str: ...

    def enrolments(self, config: Config) -> Enrolments:
        """Who may join."""
        ...

    def record(self) -> dict[str, Any]:
        """What the run folder says of it."""
        ...

    def open(self, spool: Path, enrolments: Enrolments, welcome: str) -> Port:
        """Begin to let sites in."""
        ...


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and the folder of its certificates; without that folder it accepts sites without keys."""

    address: Address
    certs: Path | None
    again = "fedmtl server --resume {}"

    def enrolments(self, config: Config) -> Enrolments:
        return NoKeys(configured_tasks(config)) if self.certs is None else KeyBook(self.certs)

    def record(self) -> dict[str, Any]:
        certs = None if self.certs is None else str(self.certs.absolute())
        return {"host": self.address.host, "port": self.address.port, "certs": certs}

    def open(self, spool: Path, enrolments: Enrolments, welcome: str) -> Port:
        # An app on a stock SuperLink does without, and without the private names of Flower that it uses.
        from fedmtl.engines.flower.fleet_api import FleetPort

        return FleetPort(spool, self.address, enrolments)


class Membership:
    """Which tasks each site has brought; the server asks it every round."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.brought: dict[ClientId, tuple[str, ...]] = {}

    def active(self, client: ClientId, round_number: int) -> tuple[str, ...]:
        return scheduled_tasks(self._config, client, self.brought.get(client, ()), round_number)


def serve_run(config: Config, name: str, endpoint: Meeting, observe: Observer = lambda event: None) -> RunFolder:
    """Run a config over sites that come to `endpoint`, into a new folder."""
    enrolments = endpoint.enrolments(config)
    secret = secrets.token_bytes(SECRET_BYTES)
    prepared, membership = _prepare(config, secret, observe)
    files = {"place.json": _endpoint_json(endpoint), "config.yaml": dump_config(config).encode(), SECRET: secret}
    run = create_run(Path(config.output), name, lambda run: files)
    with locked(run.path):
        return _serve(prepared, membership, prepared.state, run, endpoint, enrolments, observe)


def resume_served(
    run: RunFolder, endpoint: Meeting | None = None, observe: Observer = lambda event: None, *, repair: bool = False
) -> RunFolder:
    """Go on after the last whole round, at the saved endpoint if none is given; sites come back by themselves.

    With `repair`, a run whose events have lost rounds goes on without them.
    """
    with locked(run.path):
        config = load_config(run.config)
        endpoint = endpoint or saved_endpoint(run)
        enrolments = endpoint.enrolments(config)
        prepared, membership = _prepare(config, _saved_secret(run, config), observe)
        state = take_up(run, prepared, observe, keeps_clients=False, repair=repair)
        if not first_of(read_events(run), PlanEvent):
            # Killed before the opening was whole: all of it is logged anew.
            run.events.unlink(missing_ok=True)
        for event in read_events(run):
            observe(event)
        return _serve(prepared, membership, state, run, endpoint, enrolments, observe)


class _EndpointRecord(BaseModel):
    """The fields of `place.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    host: str = Field(min_length=1, max_length=253)
    port: int = Field(ge=0, le=65535)
    certs: str | None


def saved_endpoint(run: RunFolder) -> Endpoint:
    record = _endpoint_record(run)
    if record.host == APP:
        raise FedmtlError(f"{run.name}: was led by a Flower app; go on with {FLOWER_AGAIN.format(run.path.absolute())}")
    return Endpoint(Address(record.host, record.port), None if record.certs is None else Path(record.certs))


def _endpoint_record(run: RunFolder) -> _EndpointRecord:
    path = run.path / "place.json"
    remedy = "put back a copy of it, or start a new run with `fedmtl server`"
    return parse_record(_EndpointRecord, read_record(path, remedy), str(path), remedy)


def _endpoint_json(endpoint: Meeting) -> bytes:
    return json.dumps({"id": secrets.token_hex(8), **endpoint.record()}).encode()


def _saved_secret(run: RunFolder, config: Config) -> bytes:
    """The run's secret; one of an earlier version has none, and nothing to hide by it."""
    path = run.path / SECRET
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        secret = b""
        if config.privacy == type(config.privacy)():
            return secrets.token_bytes(SECRET_BYTES)
    except OSError as error:
        raise FedmtlError(f"{path}: cannot be read ({error.strerror}); the run's noise is drawn from it") from None
    if len(secret) != SECRET_BYTES:
        raise FedmtlError(
            f"{path}: is not the run's secret of {SECRET_BYTES} bytes, from which its noise is drawn; put back a copy,"
            " or start a new run with `fedmtl server`"
        )
    return secret


def _prepare(config: Config, secret: bytes, observe: Observer) -> tuple[Prepared, Membership]:
    check_deployable(config)
    config = server_config(config)
    membership = Membership(config)
    device = start_device(config)
    data = server_data(config)
    prepared = assemble(
        config,
        data,
        device,
        lambda tokenizer: server_population(config, data, tokenizer),
        membership.active,
        observe,
        secret,
    )
    return prepared, membership


def _serve(
    prepared: Prepared,
    membership: Membership,
    state: State,
    run: RunFolder,
    endpoint: Meeting,
    enrolments: Enrolments,
    observe: Observer,
) -> RunFolder:
    now = [state.round]

    def follow(event: Event) -> None:
        if isinstance(event, RoundEvent):
            now[0] = event.round
        observe(event)

    log = Log(run, follow, prepared.config)
    known = read_events(run)
    if not first_of(known, StartEvent):
        log(opening_events(prepared, reported_census({}, prepared.tasks))[0])
    if not first_of(known, ConfigEvent):
        log(config_event(prepared.config))
    certificate = enrolments.certificate()
    warning = None if certificate is None else certificate.warning()
    if warning is not None:
        log(remark_event(now[0], "", warning))
    opened: list[FlowerEngine] = []

    def make_engine() -> FlowerEngine:
        engine = _open(prepared, membership, run, endpoint, enrolments, log, lambda: now[0])
        opened.append(engine)
        _gather(prepared, engine, state, enrolments, log)
        if not first_of(known, PlanEvent):
            for event in opening_events(prepared, reported_census(engine.hellos(), prepared.tasks))[1:]:
                log(event)
        return engine

    def farewell(last: State) -> None:
        for engine in opened:
            unsent: Mapping[ClientId, str] = {}
            try:
                final = final_frames(prepared, last, run, membership.brought)
                unsent = engine.send_models(final, prepared.config.federation.round_timeout)
                for client, why in unsent.items():
                    log(remark_event(last.round, client, f"the finished model was not sent to it: {why}"))
            finally:
                # Without it, sites would look for the server for ever.
                engine.say_goodbye(f"{run.name} is done", unsent)

    return drive(prepared, state, run, log, make_engine, again=endpoint.again, farewell=farewell)


def _open(
    prepared: Prepared,
    membership: Membership,
    run: RunFolder,
    endpoint: Meeting,
    enrolments: Enrolments,
    log: Log,
    round_now: Callable[[], int],
) -> FlowerEngine:
    terms = server_terms(prepared.model, prepared.encoder.tokenizer, prepared.tasks)
    table, leaf = prepared.model.canonical()[prepared.server.table]
    num_rows = getattr(table, leaf).shape[0]
    welcome = Welcome(
        run=_endpoint_record(run).id,
        config=_for_sites(prepared.config),
        evaluated=prepared.evaluates_at_clients,
        max_bytes=prepared.config.wire.max_bytes,
        terms=terms,
    )

    def judge(hello: Hello, key: bytes) -> str | None:
        strange = sorted(set(hello.tasks) - set(prepared.tasks))
        if strange:
            return f"brings {', '.join(strange)}; the run's tasks are {', '.join(prepared.tasks)}"
        reason = refusal(hello, terms, num_rows, enrolments.tasks(), enrolments.name_of(key))
        if reason is None:
            membership.brought[hello.client] = tuple(name for name in prepared.tasks if name in hello.tasks)
        return reason

    def note(note: Note) -> None:
        if note.hello is not None:
            tasks = {name: counts.examples for name, counts in note.hello.tasks.items()}
            log(SiteEvent(round=round_now(), client=note.client, tasks=tasks))
        elif note.kind == "refused":
            log(failure_event(Failure(round_now(), note.client, note.reason)))
        else:
            log(remark_event(round_now(), note.client, note.reason))

    return FlowerEngine(
        scorer=open_engine(prepared, run),
        spool=run.spool,
        max_bytes=prepared.config.wire.max_bytes,
        port=endpoint.open(run.spool, enrolments, welcome.model_dump_json()),
        enrolments=enrolments,
        welcome=welcome.model_dump_json(),
        judge=judge,
        note=note,
    )


def _gather(prepared: Prepared, engine: FlowerEngine, state: State, enrolments: Enrolments, log: Log) -> None:
    """Wait for all who are expected and did not leave, then for enough of them before every round.

    A resumed run expects those of its last round, no longer than it would have waited for their answers. One that was
    killed after its last round, when its sites had left, expects nobody.
    """
    if state.round >= prepared.server.settings.num_rounds or all_stopped(state, prepared.server):
        return
    federation = prepared.config.federation
    is_new = state.round == 0
    last = [client for client, number in state.accepted.items() if number == state.round]
    expected = set(enrolments.tasks() if is_new else last)
    log(ExpectedEvent(round=state.round, clients=sorted(expected)))
    log.observe(WaitingEvent(address=engine.address, clients=sorted(expected)))
    there = engine.wait_for(
        lambda there: expected <= {*there, *engine.left()},
        federation.join_timeout if is_new else federation.round_timeout,
    )
    if engine.left() and not is_enough(prepared, there):
        log.observe(WaitingEvent(address=engine.address, clients=sorted(expected - set(there))))
    engine.before_a_round(lambda there: is_enough(prepared, there), federation.join_timeout)


def is_enough(prepared: Prepared, there: Mapping[ClientId, ClientInfo]) -> bool:
    """Whether a round may begin with these sites."""
    federation = prepared.config.federation
    per_task = {name: sum(name in info.num_examples for info in there.values()) for name in prepared.tasks}
    return len(there) >= federation.min_clients and min(per_task.values()) >= federation.min_clients_per_task


def _for_sites(config: Config) -> dict[str, Any]:
    """Return the config without what concerns the server alone: its folders and where its clients have their files."""
    plain: dict[str, Any] = config.model_dump(mode="json")
    plain["data"] |= {"root": None, "cache": None}
    plain["output"] = "runs"
    # Where the server sends its numbers is none of a site's business, and a version without trackers takes the rest.
    del plain["track"]
    if config.training.distillation is not None and config.training.distillation.where == "server":
        plain["training"]["distillation"] = None
    return plain
