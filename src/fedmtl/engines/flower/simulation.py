"""Flower's simulation: clients in Ray's actors, here or on a Ray cluster that sees the run's folder."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from secrets import token_bytes

import numpy as np
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp

from fedmtl.engines.flower.link import TTL
from fedmtl.engines.flower.private import (
    FLWR_IN_MEMORY_DB_NAME,
    HEARTBEAT_INTERVAL_INF,
    NOOP_ACCOUNT_NAME,
    NOOP_FEDERATION_ID,
    NOOP_FLWR_AID,
    SUPERLINK_NODE_ID,
    InMemoryGrid,
    LinkStateFactory,
    NoOpFederationManager,
    ObjectStoreFactory,
    TaskIdentity,
    TaskType,
    VceMetrics,
    start_vce,
)
from fedmtl.engines.flower.quiet import silence_flower
from fedmtl.engines.flower.records import FRAME, frame_of, frame_record
from fedmtl.engines.local import OpenJob
from fedmtl.engines.processes import too_late
from fedmtl.engines.site import SiteSetup, open_site
from fedmtl.errors import FedmtlError
from fedmtl.federation.client import Site, run_job
from fedmtl.federation.messages import ClientId, ClientInfo, Failure, Job, Scorer, State, Update
from fedmtl.federation.wire import decode_job, encode_job, encode_update

GLANCE = 0.02


class SimulationEngine:
    """Every client is a node of Flower's simulation; scoring at the server is done by `scorer`."""

    def __init__(
        self,
        setup: SiteSetup,
        clients: Mapping[ClientId, ClientInfo],
        scorer: Scorer,
        num_actors: int,
    ) -> None:
        silence_flower()
        # As for Flower: nothing is reported to anybody.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._setup, self._clients, self._scorer = setup, clients, scorer
        factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self._grid, run = _open_grid(factory)
        self._nodes = {client: _add_node(factory) for client in clients}
        self._done = threading.Event()
        indices = {node_id: index for index, node_id in enumerate(self._nodes.values())}
        self._thread = threading.Thread(
            target=start_vce,
            kwargs={
                "backend_name": "ray",
                "backend_config_json_stream": json.dumps(_backend(num_actors)),
                "app_dir": "",
                "is_app": False,
                "f_stop": self._done,
                "run": run,
                "metrics": VceMetrics(),
                "client_app": make_client_app(setup),
                "state_factory": factory,
                "existing_nodes_mapping": indices,
            },
            name="simulation",
            daemon=True,
        )
        self._thread.start()

    def clients(self) -> Mapping[ClientId, ClientInfo]:
        return self._clients

    def run(self, jobs: Iterable[Job], deadline: float) -> Iterator[Update | Failure]:
        end = time.monotonic() + deadline
        open_jobs: dict[str, OpenJob] = {}
        for job in jobs:
            encoded = encode_job(job, self._setup.max_bytes)
            content = RecordDict({FRAME: frame_record(encoded.tobytes())})
            message = Message(content, self._nodes[job.client], MessageType.QUERY, ttl=TTL)
            (message_id,) = self._grid.push_messages([message])
            open_jobs[message_id] = OpenJob.of(job, len(encoded))
        while open_jobs and time.monotonic() < end:
            if not self._thread.is_alive():
                raise FedmtlError("Flower's simulation ended by itself; see Ray's logs in /tmp/ray")
            for reply in self._grid.pull_messages(set(open_jobs)):
                yield self._decode(reply, open_jobs.pop(reply.metadata.reply_to_message_id))
            time.sleep(GLANCE)
        for open_job in open_jobs.values():
            yield open_job.failed(too_late(deadline))

    def predict(self, state: State, batch_size: int) -> dict[str, tuple[np.ndarray, float]]:
        return self._scorer.predict(state, batch_size)

    def close(self) -> None:
        self._done.set()
        self._thread.join(30)
        self._scorer.close()

    def _decode(self, reply: Message, open_job: OpenJob) -> Update | Failure:
        if reply.has_error():
            return open_job.failed(str(reply.error.reason))
        return open_job.take(np.frombuffer(bytearray(frame_of(reply.content)), dtype=np.uint8), self._setup.max_bytes)


def make_client_app(setup: SiteSetup) -> ClientApp:
    """The app that every actor runs; what it has opened stays open in the actor's process."""
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        # By name: a function that travels brings copies of its module's values along.
        from fedmtl.engines.flower import simulation

        return simulation.answer(setup, message)

    return app


_OPEN: dict[str, Site] = {}


def answer(setup: SiteSetup, message: Message) -> Message:
    """Do the job of a message."""
    site = _site(setup)
    job = decode_job(np.frombuffer(bytearray(frame_of(message.content)), dtype=np.uint8), setup.max_bytes)
    update = encode_update(run_job(job, site))
    return Message(RecordDict({FRAME: frame_record(update.tobytes())}), reply_to=message)


def _site(setup: SiteSetup) -> Site:
    import torch

    torch.set_num_threads(1)
    key = str(setup.spool)
    if key not in _OPEN:
        _OPEN.clear()
        _OPEN[key] = open_site(setup)
    return _OPEN[key]


def _open_grid(factory: LinkStateFactory) -> tuple[InMemoryGrid, object]:
    state = factory.state()
    run_id = state.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
    (run,) = state.get_run_info(run_ids=[run_id])
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, 1, SUPERLINK_NODE_ID
    grid = InMemoryGrid(factory)
    grid.set_run(run)
    return grid, run


def _add_node(factory: LinkStateFactory) -> int:
    state = factory.state()
    node_id: int = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, token_bytes(32), HEARTBEAT_INTERVAL_INF)
    state.acknowledge_node_heartbeat(node_id, HEARTBEAT_INTERVAL_INF)
    return node_id


def _backend(num_actors: int) -> dict[str, dict[str, object]]:
    init: dict[str, object] = {"logging_level": "error", "log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        init["num_cpus"] = num_actors
    # Flower hands all of them to Ray as the actor's options: one that dies is started anew, and its job repeated once.
    actor: dict[str, object] = {"num_cpus": 1, "num_gpus": 0.0, "max_restarts": -1, "max_task_retries": 1}
    return {"init_args": init, "client_resources": actor, "actor": {"tensorflow": 0}}
