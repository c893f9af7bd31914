"""`fedmtl serve`: a finished model answers over HTTP, from torch or ONNX.

Requests that arrive within a few milliseconds share a pass of the encoder, and every head answers from it where tasks
share their encoder. Whoever can reach the port may ask: there are no accounts and no TLS, so it listens on this machine
alone unless a host is named. Texts are neither stored nor logged, and an error names no text.

A browser on this machine may visit pages of strangers. So a request must be JSON by its content type, which a page of
another origin may not send, and must name this machine in its Host header, which one that rebinds a name cannot.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import ipaddress
import json
import logging
import re
import signal
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fedmtl import __version__
from fedmtl.errors import FedmtlError
from fedmtl.foreign import excerpt, parse_json, printable
from fedmtl.predict.answers import Prediction, check_texts, tasks_on
from fedmtl.tasks.task import Task
from fedmtl.tasks.tokens import mend_surrogates

Row = tuple[str, ...]
Answer = Callable[[Sequence[Row], Sequence[str]], list[list[Prediction]]]

ACCEPTED = 'send {"texts": ["..."]} or {"pairs": [["...", "..."]]}, and a "task" if only one is wanted'
ENDED = "requests are no longer computed; start the server again"
PATHS = ("/", "/predict", "/model", "/health", "/metrics", "/openapi.json")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
# The head of a request, and how long it may take to arrive; a connection that says nothing is closed after it too.
HEAD_BYTES = 1 << 16
HEAD_SECONDS = 10.0
# A body that takes longer to arrive than this is given up.
BODY_SECONDS = 10.0
# Requests in flight get this long when the server is stopped.
GRACE_SECONDS = 10
# Connections that are open at a time.
MOST_CONNECTIONS = 512


@dataclass(frozen=True)
class Limits:
    """What a request may have, and how long it waits for others to share a pass with."""

    body_bytes: int = 1 << 20
    texts: int = 64
    characters: int = 20_000
    queue: int = 1024
    batch: int = 32
    wait_seconds: float = 0.002


@dataclass(frozen=True)
class Served:
    """A model that answers rows for the named tasks; `start` is called once in the thread that computes."""

    name: str
    backend: Literal["torch", "onnx"]
    tasks: Mapping[str, Task]
    answer: Answer
    start: Callable[[], None] = lambda: None

    def answerable(self, num_texts: int, task: str | None) -> tuple[str, ...]:
        """The tasks that take this many texts, or the one named; a FedmtlError says what there is otherwise."""
        if task is None:
            return tuple(tasks_on(self.name, self.tasks, num_texts))
        if task not in self.tasks:
            raise FedmtlError(f"{self.name} has no task {excerpt(repr(task))}; it has {', '.join(self.tasks)}")
        check_texts(self.tasks[task], num_texts)
        return (task,)

    def warm_up(self) -> None:
        """Answer once for each number of texts: a first pass allocates what later ones use again."""
        for num_texts in {len(task.text) for task in self.tasks.values()}:
            self.answer([("warm",) * num_texts], self.answerable(num_texts, None))


def open_served(run: str, onnx: Path | None, client: str | None, round: str | None, threads: int) -> Served:
    """Open a run's model with torch, or an ONNX file without it."""
    if onnx is not None:
        from fedmtl.predict import onnx as by_onnx

        model = by_onnx.open_onnx(onnx, threads)
        return Served(_name(onnx), "onnx", model.tasks, lambda rows, tasks: by_onnx.predict_texts(model, rows, tasks))
    import torch

    from fedmtl.predict import run as by_torch

    loaded = by_torch.load_run(run, client, round)
    tasks = {name: loaded.saved.tasks[name] for name in loaded.tasks}

    def answer(rows: Sequence[Row], tasks: Sequence[str]) -> list[list[Prediction]]:
        return by_torch.predict_texts(loaded, rows, tasks)

    # The number of threads belongs to the thread that sets it.
    return Served(loaded.run.name, "torch", tasks, answer, lambda: torch.set_num_threads(threads))


def _name(file: Path) -> str:
    """The name of the run in whose folder an ONNX file lies; elsewhere that of its folder, or of the file."""
    from fedmtl.predict.onnx import GRAPH, run_of

    try:
        return run_of(file).name
    except FedmtlError:
        return file.parent.resolve().name if file.name == GRAPH else file.name


class Refused(Exception):
    """A request that gets a status and one line instead of an answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class Uncomputed(Exception):
    """What a model raised for a batch, by its kind alone: a message may have parts of a text."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        self.counts[sum(value > bound for bound in self.bounds)] += 1
        self.total += value

    def lines(self, name: str, words: str) -> Iterator[str]:
        yield from (f"# HELP {name} {words}", f"# TYPE {name} histogram")
        for bound, count in zip((*map("{:g}".format, self.bounds), "+Inf"), accumulate(self.counts), strict=True):
            yield f'{name}_bucket{{le="{bound}"}} {count}'
        yield from (f"{name}_sum {self.total:.6f}", f"{name}_count {sum(self.counts)}")


@dataclass
class Metrics:
    """What the server counts; no label comes from a request."""

    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    compute: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    batches: Histogram = field(default_factory=lambda: Histogram(ROWS))
    started: float = field(default_factory=time.monotonic)

    def text(self, queue: int) -> str:
        """All of it in Prometheus' text format."""
        lines = ["# HELP fedmtl_requests_total Requests by path and status.", "# TYPE fedmtl_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'fedmtl_requests_total{{path="{path}",status="{status}"}} {count}')
        lines += self.seconds.lines("fedmtl_predict_seconds", "Time from a /predict request to its answer.")
        lines += self.compute.lines("fedmtl_compute_seconds", "Time that a batch took to compute.")
        lines += self.batches.lines("fedmtl_batch_rows", "Texts or pairs that were computed together.")
        lines += ["# HELP fedmtl_queue_rows Texts or pairs that wait.", "# TYPE fedmtl_queue_rows gauge"]
        lines += [f"fedmtl_queue_rows {queue}"]
        lines += ["# HELP fedmtl_up_seconds Time since the start.", "# TYPE fedmtl_up_seconds gauge"]
        return "\n".join([*lines, f"fedmtl_up_seconds {time.monotonic() - self.started:.1f}", ""])


@dataclass(frozen=True)
class Waiting:
    """A request in the queue."""

    rows: list[Row]
    tasks: tuple[str, ...]
    arrived: float
    answer: asyncio.Future[list[list[Prediction]]]


class Batcher:
    """Computes requests that name the same tasks together, in one thread, in the order in which they came."""

    def __init__(self, served: Served, limits: Limits, metrics: Metrics) -> None:
        self.served, self.limits, self.metrics = served, limits, metrics
        self.queue: deque[Waiting] = deque()
        self.num_rows = 0
        self.has_ended = False
        self._computing: list[Waiting] = []
        self._arrived = asyncio.Event()
        self._pool = ThreadPoolExecutor(1, "answers", served.start)

    def warm_up(self) -> None:
        """Answer once, in the thread that will compute, so that the first request does not wait for it."""
        try:
            self._pool.submit(_compute, self.served.warm_up).result()
        except Uncomputed as error:
            raise FedmtlError(f"{self.served.name}: the model cannot answer ({error.kind}); write it anew") from None

    async def answer(self, rows: list[Row], tasks: tuple[str, ...]) -> list[list[Prediction]]:
        """Wait for the rows' answers; a full queue refuses them at once."""
        if self.has_ended:
            raise Refused(503, ENDED)
        if self.num_rows + len(rows) > self.limits.queue:
            raise Refused(503, f"the queue is full ({self.limits.queue} texts wait); try again in a second")
        loop = asyncio.get_running_loop()
        waiting = Waiting(rows, tasks, loop.time(), loop.create_future())
        self.queue.append(waiting)
        self.num_rows += len(rows)
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """Compute batches until cancelled; however it ends, nobody waits for an answer that does not come."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._gather(loop)
                batch = self._computing = self._take()
                started = loop.time()
                await self._compute(loop, batch)
                self.metrics.compute.add(loop.time() - started)
                self.metrics.batches.add(sum(len(waiting.rows) for waiting in batch))
        finally:
            self.has_ended = True
            for waiting in (*self._computing, *self.queue):
                if not waiting.answer.done():
                    waiting.answer.set_exception(Refused(503, ENDED))

    async def _gather(self, loop: asyncio.AbstractEventLoop) -> None:
        """Return when a batch is full, or when its first request has waited long enough for others."""
        while not self.queue:
            self._arrived.clear()
            await self._arrived.wait()
        until = self.queue[0].arrived + self.limits.wait_seconds
        while self.num_rows < self.limits.batch and loop.time() < until:
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._arrived.wait()
            except TimeoutError:
                return

    def _take(self) -> list[Waiting]:
        """Take the first request, and of the others those with its tasks that still fit."""
        first = self.queue[0]
        taken: list[Waiting] = []
        left: deque[Waiting] = deque()
        num_rows = 0
        for waiting in self.queue:
            fits = num_rows + len(waiting.rows) <= self.limits.batch or waiting is first
            if waiting.tasks == first.tasks and fits:
                taken.append(waiting)
                num_rows += len(waiting.rows)
            else:
                left.append(waiting)
        self.queue = left
        self.num_rows -= num_rows
        return taken

    async def _compute(self, loop: asyncio.AbstractEventLoop, batch: list[Waiting]) -> None:
        rows = [row for waiting in batch for row in waiting.rows]
        try:
            answers = await loop.run_in_executor(self._pool, _compute, self.served.answer, rows, batch[0].tasks)
        except Exception as error:
            if len(batch) > 1:
                # One request that cannot be answered costs no other its answer.
                for waiting in batch:
                    await self._compute(loop, [waiting])
            elif not batch[0].answer.done():
                batch[0].answer.set_exception(error)
            return
        start = 0
        for waiting in batch:
            if not waiting.answer.done():
                waiting.answer.set_result(answers[start : start + len(waiting.rows)])
            start += len(waiting.rows)

    def close(self) -> None:
        """Let what is still in the queue go unanswered."""
        for waiting in self.queue:
            waiting.answer.cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _compute(function: Callable[..., Any], *given: Any) -> Any:
    """Call it in the thread that computes; whatever it raises is a FedmtlError or an Uncomputed.

    A panic of a library in Rust is no Exception, and would end the loop that waits for the answer.
    """
    try:
        return function(*given)
    except FedmtlError:
        raise
    except BaseException as error:
        raise Uncomputed(type(error).__name__) from None


class Guard:
    """Refuses hosts that are not this machine's, counts requests, and turns every error into one line of JSON."""

    def __init__(self, app: ASGIApp, metrics: Metrics, hosts: frozenset[str] | None) -> None:
        self.app, self.metrics, self.hosts = app, metrics, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 0

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        started = time.monotonic()
        path = scope["path"] if scope["path"] in PATHS else "other"
        try:
            self._check_host(scope)
            await self.app(scope, receive, watch)
        except Exception as error:
            if not status:
                await _refusal(error)(scope, receive, watch)
        self.metrics.requests[path, status] += 1
        if path == "/predict":
            self.metrics.seconds.add(time.monotonic() - started)

    def _check_host(self, scope: Scope) -> None:
        if self.hosts is None:
            return
        given = Request(scope).headers.getlist("host")
        if len(given) > 1:
            raise Refused(400, f"found {len(given)} Host headers; send one")
        if not given or not names_host(given[0], self.hosts):
            raise Refused(403, f"this host name is not served here; use {', '.join(sorted(self.hosts))}, or --host")


async def _refuse(request: Request, error: Exception) -> Response:
    return _refusal(error)


def _refusal(error: Exception) -> Response:
    if isinstance(error, Refused):
        headers = {"Retry-After": "1"} if error.status == 503 else {}
        return JSONResponse({"error": error.reason}, error.status, headers)
    kind = error.kind if isinstance(error, Uncomputed) else type(error).__name__
    return JSONResponse({"error": f"the model could not answer ({kind})"}, 500)


class Service:
    """The endpoints of one model."""

    def __init__(self, served: Served, limits: Limits, hosts: frozenset[str] | None) -> None:
        self.served, self.limits, self.hosts = served, limits, hosts
        self.metrics = Metrics()
        self.batcher = Batcher(served, limits, self.metrics)
        self.page = Path(__file__).with_name("serve_page.html").read_text(encoding="utf-8")

    def app(self) -> ASGIApp:
        """The ASGI application; it computes while its lifespan lasts."""
        routes = [
            Route("/", self.try_it),
            Route("/predict", self.predict, methods=["POST"]),
            Route("/model", self.model),
            Route("/health", self.health),
            Route("/metrics", self.show_metrics),
            Route("/openapi.json", self.openapi),
        ]
        handlers: Mapping[Any, Any] = {HTTPException: self._not_found, Refused: _refuse, Exception: _refuse}
        return Guard(
            Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers), self.metrics, self.hosts
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(self.batcher.run())
        try:
            yield
        finally:
            task.cancel()
            self.batcher.close()

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405:
            wanted = "POST" if request.url.path == "/predict" else "GET"
            return JSONResponse({"error": f"{request.url.path} takes {wanted}"}, 405, {"Allow": wanted})
        return JSONResponse({"error": f"no such path; there are {', '.join(PATHS)}"}, error.status_code)

    async def predict(self, request: Request) -> Response:
        """Answer texts or pairs."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Refused(415, f"the content type is not application/json; {ACCEPTED}")
        rows, tasks = self._read(await self._body(request))
        answers = await self.batcher.answer(rows, tasks)
        found = {"model": self.served.name, "predictions": [[one.to_json() for one in row] for row in answers]}
        try:
            return Response(json.dumps(found, allow_nan=False), media_type="application/json")
        except ValueError:
            raise Refused(500, "the model's answer is not a number; its weights are broken") from None

    async def _body(self, request: Request) -> bytes:
        too_large = Refused(413, f"the body is larger than {self.limits.body_bytes} bytes; send fewer texts a request")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > self.limits.body_bytes:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > self.limits.body_bytes:
                        raise too_large
        except TimeoutError:
            raise Refused(408, f"the body took longer than {BODY_SECONDS:g} s; send it at once") from None
        except ClientDisconnect:
            raise Refused(400, "the body ended early") from None
        return bytes(body)

    def _read(self, body: bytes) -> tuple[list[Row], tuple[str, ...]]:
        """The rows of a request, and the tasks that answer them; what is wrong is a Refused of status 400."""
        try:
            given = parse_json(body, "the body", ACCEPTED)
            rows = self._rows(given)
            task = given.get("task")
            if task is not None and not isinstance(task, str):
                raise FedmtlError(f"task: is no name; there are {', '.join(self.served.tasks)}")
            return rows, self.served.answerable(len(rows[0]), task)
        except FedmtlError as error:
            raise Refused(400, printable(str(error))) from None

    def _rows(self, given: Any) -> list[Row]:
        if not isinstance(given, dict):
            raise FedmtlError(f"the body is no JSON object; {ACCEPTED}")
        unknown = next((key for key in given if key not in ("texts", "pairs", "task")), None)
        if unknown is not None:
            raise FedmtlError(f"{excerpt(repr(unknown))}: there is no such field; {ACCEPTED}")
        if ("texts" in given) == ("pairs" in given):
            both = "found texts and pairs" if "texts" in given else "found neither texts nor pairs"
            raise FedmtlError(f"{both}; {ACCEPTED}")
        name = "texts" if "texts" in given else "pairs"
        values = given[name]
        if not isinstance(values, list) or not values:
            raise FedmtlError(f"{name}: is no list with something in it; {ACCEPTED}")
        if len(values) > self.limits.texts:
            raise FedmtlError(f"{name}: has {len(values)}, a request has {self.limits.texts} at most; send several")
        return [self._row(name, index, value) for index, value in enumerate(values)]

    def _row(self, name: str, index: int, value: Any) -> Row:
        row = (value,) if name == "texts" else tuple(value) if isinstance(value, list) else ()
        if len(row) != (1 if name == "texts" else 2) or not all(isinstance(text, str) for text in row):
            wanted = "a text" if name == "texts" else "two texts, a list of two strings"
            raise FedmtlError(f"{name}[{index}]: is not {wanted}; {ACCEPTED}")
        if not all(map(str.strip, row)):
            raise FedmtlError(f"{name}[{index}]: is empty; send some words")
        longest = max(map(len, row))
        if longest > self.limits.characters:
            raise FedmtlError(
                f"{name}[{index}]: has {longest} characters, {self.limits.characters} at most; send its beginning"
            )
        return tuple(mend_surrogates(list(row)))

    async def model(self, request: Request) -> Response:
        """Say what the model is: its tasks with texts and labels, and what a request may have."""
        tasks = {
            name: {"kind": task.kind, "texts": list(task.text), "labels": list(task.labels), "range": _scale(task)}
            for name, task in self.served.tasks.items()
        }
        limits = {"texts": self.limits.texts, "characters": self.limits.characters, "bytes": self.limits.body_bytes}
        known = {"model": self.served.name, "backend": self.served.backend, "tasks": tasks, "limits": limits}
        return JSONResponse({**known, "fedmtl": __version__})

    async def health(self, request: Request) -> Response:
        """Say that requests are answered, or that they no longer are."""
        if self.batcher.has_ended:
            raise Refused(503, ENDED)
        known = {"model": self.served.name, "backend": self.served.backend, "queue": self.batcher.num_rows}
        return JSONResponse({"status": "ok", **known})

    async def show_metrics(self, request: Request) -> Response:
        """Show what was counted, for Prometheus."""
        text = self.metrics.text(self.batcher.num_rows)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """Describe the endpoints as OpenAPI."""
        return JSONResponse(openapi(self.served, self.limits))

    async def try_it(self, request: Request) -> Response:
        """Show the try-it page, whose one script and one style are known by their hashes."""
        script, style = (_hash(self.page, tag) for tag in ("script", "style"))
        policy = f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; base-uri 'none'"
        headers = {"Content-Security-Policy": f"{policy}; form-action 'none'; frame-ancestors 'none'"}
        return Response(self.page, media_type="text/html", headers=headers)


def _hash(page: str, tag: str) -> str:
    content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _scale(task: Task) -> list[float] | None:
    scale = task.kind_of.scale(task)
    return None if scale is None else list(scale)


def openapi(served: Served, limits: Limits) -> dict[str, Any]:
    """The endpoints as an OpenAPI document; tasks are named in it."""
    text = {"type": "string", "minLength": 1, "maxLength": limits.characters}
    pair = {"type": "array", "items": text, "minItems": 2, "maxItems": 2}
    rows = {"type": "array", "minItems": 1, "maxItems": limits.texts}
    tasks = {"type": "string", "enum": list(served.tasks)}
    wanted = {
        "type": "object",
        "properties": {"texts": {**rows, "items": text}, "pairs": {**rows, "items": pair}, "task": tasks},
        "oneOf": [{"required": ["texts"]}, {"required": ["pairs"]}],
        "additionalProperties": False,
    }
    shares = {"type": "object", "additionalProperties": {"type": "number"}}
    label, position = {"type": "string"}, {"type": "integer", "minimum": 0}
    span = {"start": position, "end": position, "label": label, "probability": {"type": "number"}, "text": label}
    properties = {
        "task": tasks,
        "label": label,
        "labels": {"type": "array", "items": label},
        "probabilities": shares,
        "entities": {"type": "array", "items": {"type": "object", "required": list(span), "properties": span}},
        "score": {"type": "number"},
    }
    answer = {"type": "object", "required": ["task"], "properties": properties}
    answers = {"type": "array", "items": {"type": "array", "items": answer}}
    answered = {"type": "object", "properties": {"model": {"type": "string"}, "predictions": answers}}
    failed = {"type": "object", "properties": {"error": {"type": "string"}}}
    refusals = {400: "wrong", 408: "too slow", 413: "too large", 415: "no JSON", 500: "not computed", 503: "queue full"}
    predict = {
        "summary": "Answer texts or pairs with every head that takes them, or with one",
        "requestBody": {"required": True, "content": {"application/json": {"schema": wanted}}},
        "responses": {
            "200": _response("a list of answers for each text or pair", answered),
            **{str(status): _response(words, failed) for status, words in refusals.items()},
        },
    }
    plain = {"/model": "the tasks and limits", "/health": "whether it answers", "/metrics": "counts for Prometheus"}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"fedmtl serve: {printable(served.name)}", "version": __version__},
        "paths": {
            "/predict": {"post": predict},
            **{path: {"get": {"responses": {"200": {"description": words}}}} for path, words in plain.items()},
        },
    }


def _response(words: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _plain(host: str) -> str:
    """A host's name as it is compared: case says nothing, nor does the dot of a full name."""
    return host.lower().removesuffix(".")


def names_host(header: str, hosts: frozenset[str]) -> bool:
    """Whether a Host header, with a port or without, names one of the hosts."""
    return _plain(re.sub(r":\d+$", "", header)) in hosts


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    try:
        return _plain(host) == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(host: str) -> frozenset[str] | None:
    """The names by which requests may call a server on this address; None is any."""
    return frozenset({"localhost", "127.0.0.1", "[::1]", _plain(host)}) if is_loopback(host) else None


def listen(
    host: str, port: int, what: str = "serve", remedy: str = "give another --port, or a --host of this machine"
) -> socket.socket:
    """A listening socket; port 0 is any that is free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FedmtlError(f"{what}: cannot listen on {host}:{port} ({reason}); {remedy}") from error


class Connection(HttpToolsProtocol):
    """A connection that is closed where the head of a request is larger than HEAD_BYTES or takes HEAD_SECONDS.

    httptools bounds neither. What is counted is all that is no body, so also what may follow one.
    """

    _until: asyncio.TimerHandle | None = None
    _num_bytes = 0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > HEAD_BYTES:
            self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._watch()

    def on_headers_complete(self) -> None:
        self._stop()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = max(0, self._num_bytes - len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def _watch(self) -> None:
        if self._until is None:
            self._until = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop(self) -> None:
        if self._until is not None:
            self._until.cancel()
            self._until = None


class Server(uvicorn.Server):
    """Says when it is ready, and ends with exit code 0 on SIGTERM and SIGINT, which uvicorn would raise once more."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self.ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        def end(number: int, frame: FrameType | None) -> None:
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(served: Served, limits: Limits, listening: socket.socket, host: str, ready: Callable[[], None]) -> None:
    """Answer requests on the socket until SIGTERM or SIGINT; `ready` is called when the first may come."""
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    service = Service(served, limits, hosts_of(host))
    service.batcher.warm_up()
    Server(configure(service.app()), ready).run(sockets=[listening])


def configure(app: ASGIApp) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="on",
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
