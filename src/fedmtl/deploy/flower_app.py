"""A Flower app: this project's server and sites on a stock SuperLink with its SuperNodes, by `flwr run`.

Its files are those that `fedmtl flower new` writes, a few lines each; what they do is here, and is installed at the
SuperLink and at every site by those who run them. The server's loop, the sites' rules and records are those of
`fedmtl server` and `fedmtl client`; Flower decides who may connect.
"""

from __future__ import annotations

import hashlib
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedmtl.config import Config
from fedmtl.deploy.site_check import check_files
from fedmtl.deploy.site_worker import SiteSettings, describe_site, start_site
from fedmtl.deploy.tasks import configured_tasks
from fedmtl.engines.flower.audit import Audit
from fedmtl.engines.flower.calls import Done, Recorder, Refused, SiteJob, WelcomeCall
from fedmtl.engines.flower.engine import Port
from fedmtl.engines.flower.enrolment import Enrolments, NoKeys
from fedmtl.engines.flower.grid import Answer, GridPort, Incoming, make_client_app, make_server_app, number_key
from fedmtl.engines.processes import WorkerPool
from fedmtl.errors import FedmtlError, PolicyError, WireError
from fedmtl.federation.faults import Fault, fault_of, is_safe_name
from fedmtl.federation.wire import MAX_BYTES
from fedmtl.foreign import printable
from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import EndEvent, FailureEvent, RemarkEvent, RoundEvent, SiteEvent
from fedmtl.runs.folder import find_run, is_busy, locked, make_private_folder

if TYPE_CHECKING:
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

# An earlier process of this site's, whose SuperNode was killed, ends within seconds; a job takes longer.
LONGEST_WAIT = 3600.0
GLANCE = 0.2
MOST_LETTERS = 500


def server_app(config: Path) -> ServerApp:
    """The ServerApp of a project; `config` is its file of settings, which `fedmtl run` takes too."""
    return make_server_app(partial(lead, config))


def client_app() -> ClientApp:
    """The ClientApp of a project; a site is described by the node config of its SuperNode."""
    return make_client_app(answer)


class _Given(BaseModel):
    """Keys that Flower hands over as text, each of which is known here."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def read(cls, given: Mapping[str, Any], where: str) -> Any:
        try:
            return cls.model_validate({name: value if value != "" else None for name, value in given.items()})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(map(str, first["loc"]))
            known = ", ".join(cls.model_fields)
            raise FedmtlError(f"{where}: {key}: {first['msg']}; the keys are {known}, each a text") from None


class RunConfig(_Given):
    """What `flwr run --run-config` may say: where runs go, settings, a run to go on with, nodes by name."""

    output: str | None = None
    name: str | None = None
    set: str | None = None
    resume: str | None = None
    nodes: str | None = None


class NodeConfig(_Given):
    """What `flower-supernode --node-config` may say: options of `fedmtl client` that are not Flower's."""

    client: str
    tasks: str
    data: str | None = None
    policy: str | None = None
    folder: str | None = None
    model: str | None = None
    device: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class NumberedNodes(NoKeys):
    """The nodes that may join, each under one name; with Flower's own keys a node has the same number always."""

    names: Mapping[bytes, str] = field(default_factory=dict)

    def name_of(self, key: bytes) -> str | None:
        return self.names.get(key, "")


@dataclass(frozen=True)
class SuperLink:
    """Where a run of `flwr run` meets its sites; `numbers` are the nodes' by client, empty where any node may join."""

    grid: Grid
    numbers: Mapping[str, int]

    @property
    def again(self) -> str:
        from fedmtl.deploy.server import FLOWER_AGAIN

        return FLOWER_AGAIN

    def enrolments(self, config: Config) -> Enrolments:
        tasks = configured_tasks(config)
        if not self.numbers:
            return NoKeys(tasks)
        strange = sorted(set(self.numbers) - set(tasks))
        if strange:
            raise FedmtlError(f"nodes: found {strange[0]}; the config's clients are {', '.join(tasks)}")
        named = {name: tasks[name] for name in tasks if name in self.numbers}
        return NumberedNodes(named, {number_key(number): name for name, number in self.numbers.items()})

    def record(self) -> dict[str, Any]:
        from fedmtl.deploy.server import APP

        return {"host": APP, "port": 0, "certs": None}

    def open(self, spool: Path, enrolments: Enrolments, welcome: str) -> Port:
        return GridPort(self.grid, spool, welcome, has_numbers=bool(self.numbers))


def lead(config: Path, grid: Grid, given: Mapping[str, Any]) -> None:
    """Lead a run to its end, or go on with one after its last whole round."""
    from fedmtl.config.file import load_config
    from fedmtl.config.honoured import COMMANDS
    from fedmtl.deploy.server import resume_served, serve_run

    options = RunConfig.read(given, "--run-config")
    meeting = SuperLink(grid, node_numbers(options.nodes or ""))
    if options.resume is not None:
        if options.set is not None or options.name is not None:
            raise FedmtlError("--run-config: resume takes no set and no name; the run goes on with its folder's config")
        run = resume_served(find_run(options.resume, Path(options.output or "runs")), meeting, _say)
    else:
        overrides = shlex.split(options.set or "")
        if options.output is not None:
            overrides.append(f"output={Path(options.output).expanduser().absolute()}")
        COMMANDS["server"].check(overrides)
        loaded = load_config(config, overrides)
        COMMANDS["server"].check_file(loaded)
        run = serve_run(loaded, options.name or config.stem, meeting, _say)
    print(f"fedmtl: the run is in {run.path.absolute()}", flush=True)


def node_numbers(text: str) -> dict[str, int]:
    """Read `clinic=17,lab=18`: which node may join as which client."""
    numbers: dict[str, int] = {}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.partition("=")
        if (
            not (number.isascii() and number.isdigit() and len(number) <= 20)
            or name in numbers
            or int(number) in numbers.values()
        ):
            raise FedmtlError(f"nodes: found {entry}, write NAME=NUMBER for each, with the numbers of `flwr supernode`")
        numbers[name] = int(number)
    return numbers


def _say(event: Event) -> None:
    """Print what an operator looks for in the app's log; all of it is in the run folder."""
    words = ""
    if isinstance(event, SiteEvent):
        words = f"{event.client} is here with {', '.join(event.tasks)}"
    elif isinstance(event, FailureEvent | RemarkEvent):
        words = f"round {event.round}: {event.client or 'the server'}: {event.reason}"
    elif isinstance(event, RoundEvent):
        words = f"round {event.round}: {event.clients or 0} updates, {event.failures or 0} failures"
    elif isinstance(event, EndEvent):
        words = f"{event.status} after round {event.rounds}, weights {event.weights_sha256}"
    if words:
        print(f"fedmtl: {words}", flush=True)


def answer(opened: Callable[[Path, int], Incoming], given: Mapping[str, Any]) -> Answer:
    """Answer one message in the process that Flower started for it; whatever goes wrong is an answer too."""
    client = given.get("client")
    try:
        options = NodeConfig.read(given, "--node-config")
        settings = describe_site(
            options.client,
            options.tasks,
            [part.strip() for part in (options.data or "").split(",") if part.strip()],
            _path(options.policy),
            folder=_path(options.folder),
            model=options.model,
            device=options.device or "auto",
            key=_path(options.key),
        )
        make_private_folder(settings.folder)
        make_private_folder(settings.spool)
        _wait_for(settings.folder)
        with locked(settings.folder):
            return _answer(opened, settings)
    except Exception as error:  # Flower would send an exception's words to the server
        words = str(error) if isinstance(error, FedmtlError) else f"{type(error).__name__}: {error}"
        print(f"fedmtl: {printable(words, MOST_LETTERS)}", flush=True)
        is_name = isinstance(client, str) and is_safe_name(client)
        fault = fault_of(error).model_copy(update={"client": client if is_name else None})
        return Answer(fault=fault.model_dump_json(exclude_none=True))


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()


def _wait_for(folder: Path) -> None:
    """Wait for an earlier process of this site: the SuperNode that started it may have been killed."""
    end = time.monotonic() + LONGEST_WAIT
    while is_busy(folder) and time.monotonic() < end:
        time.sleep(GLANCE)


def _answer(opened: Callable[[Path, int], Incoming], settings: SiteSettings) -> Answer:
    import torch

    # Sums come out as anywhere else.
    torch.set_num_threads(1)
    audit = Audit(settings.folder)
    record = Recorder(audit)
    try:
        incoming = opened(settings.spool, MAX_BYTES)
    except WireError:
        record.unreadable()
        raise
    envelope = incoming.envelope
    record.arrived(envelope)
    if envelope.kind == "refused":
        raise FedmtlError(f"the server refused this site: {printable(envelope.words, MOST_LETTERS)}")
    pool = WorkerPool(start_site, settings, 0)
    try:
        leaving = _done(incoming, pool, settings, audit)
        record.leaves(leaving)
    finally:
        if envelope.frame is not None:
            envelope.frame.unlink(missing_ok=True)
    if isinstance(leaving, Refused):
        print(f"fedmtl: {printable(leaving.words, MOST_LETTERS)}", flush=True)
        return Answer(fault=leaving.fault.model_dump_json(exclude_none=True))
    if isinstance(leaving, Path):
        return Answer("update", frame=leaving)
    return Answer("hello", leaving, mark=_mark(settings.folder))


def _done(incoming: Incoming, pool: WorkerPool, settings: SiteSettings, audit: Audit) -> str | Path | Refused:
    """Have the message done: a hello, an update's file, or why there is none."""
    envelope = incoming.envelope
    is_welcome = envelope.kind == "welcome"
    try:
        # A policy that limits personal data is in force for every message, whichever the server sends first.
        if is_welcome or settings.policy.max_personal_data is not None:
            check_files(pool, settings, partial(print, "fedmtl:", flush=True), audit)
    except PolicyError as error:
        fault = fault_of(error).model_copy(update={"client": settings.client})
        return Refused(fault, str(error))
    if is_welcome:
        call: Any = WelcomeCall(envelope.words)
    elif envelope.kind == "job" and envelope.frame is not None:
        call = SiteJob(incoming.welcome, envelope.frame)
    else:
        return Refused(Fault(code="message_unreadable"), "a message of another kind came, or a job without its frame")
    (settled,) = pool.map([call], LONGEST_WAIT * 24)
    if settled.error is not None:
        return Refused(Fault(code="worker_ended"), settled.error)
    found = settled.result
    if isinstance(found, Done):
        print(f"fedmtl: {settings.client}: {found.words}", flush=True)
        return found.update
    if isinstance(found, Refused) and is_welcome:
        return Refused(found.fault.model_copy(update={"client": settings.client}), found.words)
    answered: str | Refused = found
    return answered


def _mark(folder: Path) -> str:
    """What shows the server that a node that comes is the site of an earlier one: nobody else has this folder."""
    from fedmtl.deploy.site_client import site_secret

    return hashlib.sha256(b"the mark of a site" + site_secret(folder)).hexdigest()
