"""`fedmtl dashboard`: the page of run folders over HTTP, which only ever answers GET and writes nothing.

Whoever can open a port of this machine's loopback may look; any other address needs TLS and a token. A page of a
stranger in a browser on this machine cannot read along: requests must name this machine in their Host header, and no
answer may be embedded elsewhere. The page runs no script and has no style but the files beside this one.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
import secrets
import socket
import ssl
import stat
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedmtl.dashboard.card import Cards
from fedmtl.dashboard.compare import comparison, study
from fedmtl.dashboard.state import RunState
from fedmtl.errors import FedmtlError
from fedmtl.predict.serve import Connection, Refused, Server, hosts_of, is_loopback, names_host

Value = TypeVar("Value")
HERE = Path(__file__).parent
FILES = {
    "page.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "tables.js": "text/javascript; charset=utf-8",
    "run.js": "text/javascript; charset=utf-8",
    "compare.js": "text/javascript; charset=utf-8",
    "login.html": "text/html; charset=utf-8",
}
PUBLIC = ("/login", "/static/page.css")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none';"
        " form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
COOKIE = "fedmtl_dashboard"
# Seconds between two looks at the folder; an event is on the page within a second.
RUN_SECONDS, LIST_SECONDS, BEAT_SECONDS = 0.3, 0.8, 10.0
MOST_STREAMS = 64
# Runs whose whole state stays in memory.
MOST_STATES = 16
MOST_COMPARED = 8
LEAST_TOKEN, MOST_BODY = 16, 4096
WRONG_TOKEN_SECONDS, FORM_SECONDS = 0.5, 10.0


@dataclass(frozen=True)
class Protection:
    """What an address that others reach needs: the token that opens the page, and the files of TLS."""

    token: str
    certificate: Path
    key: Path


def read_token(path: Path) -> str:
    """The token in a file, which nobody else may read; a short one is an error."""
    try:
        about = path.stat()
        text = path.read_bytes()[: MOST_BODY + 1].decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FedmtlError(f"--token {path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FedmtlError(f"--token {path}: others may open it; close it with `chmod 600 {path}`")
    if not LEAST_TOKEN <= len(text) <= 1024:
        raise FedmtlError(
            f"--token {path}: has {len(text)} letters; use {LEAST_TOKEN} to 1024, such as those of"
            ' `python -c "import secrets; print(secrets.token_urlsafe(24))"`'
        )
    return text


def check_address(host: str, protection: Protection | None) -> None:
    """Raise unless TLS and a token protect an address other than loopback."""
    if protection is None and not is_loopback(host):
        raise FedmtlError(
            f"{host} is not this machine's loopback: whoever reaches it would see the runs; give --token FILE,"
            " --certificate FILE and --key FILE to `fedmtl dashboard`"
        )


class Dashboard:
    """The endpoints; `is_stopping` ends the streams when the server is to end."""

    def __init__(
        self,
        roots: list[Path],
        host: str = "127.0.0.1",
        protection: Protection | None = None,
        is_stopping: Callable[[], bool] = lambda: False,
    ) -> None:
        self.cards = Cards(roots)
        self.hosts = hosts_of(host)
        self.protection = protection
        self.is_stopping = is_stopping
        self.sessions: OrderedDict[str, float] = OrderedDict()
        self._states: OrderedDict[str, RunState] = OrderedDict()
        self._num_streams = 0
        # Each thread of the default pool, of which there are many, would take memory for a file.
        self._readers = ThreadPoolExecutor(2, "readers")
        self._files = {name: (HERE / name).read_bytes() for name in FILES}

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/", self.page),
            Route("/login", self.login, methods=["GET", "POST"]),
            Route("/static/{name}", self.static),
            Route("/api/runs", self.runs),
            Route("/api/run", self.run),
            Route("/api/compare", self.compare),
            Route("/api/study", self.study),
            Route("/api/stream", self.stream),
        ]
        handlers: Mapping[Any, Any] = {HTTPException: _not_found, Refused: _refuse, Exception: _refuse}
        return Guard(Starlette(routes=routes, exception_handlers=handlers), self)

    def knows(self, request: Request) -> bool:
        """Whether a request comes with the token, or from a browser that has sent it."""
        if self.protection is None:
            return True
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and _is_same(given.strip(), self.protection.token):
            return True
        session = request.cookies.get(COOKIE, "")
        return any(_is_same(session, known) for known in self.sessions)

    async def page(self, request: Request) -> Response:
        """Show the page, whose scripts then read everything else."""
        return self._file("page.html")

    async def static(self, request: Request) -> Response:
        """Return one of the files of the page, by its name in `FILES`."""
        name = request.path_params["name"]
        if name not in FILES or name.endswith(".html"):
            raise Refused(404, "no such file")
        return self._file(name)

    def _file(self, name: str) -> Response:
        return Response(self._files[name], headers={"Content-Type": FILES[name]})

    async def login(self, request: Request) -> Response:
        """Take the token from a form, and give the browser a cookie for it that says nothing else."""
        if self.protection is None or self.knows(request):
            return RedirectResponse("/", 303)
        if request.method != "POST":
            return self._file("login.html")
        body = bytearray()
        try:
            # Whoever has no token could otherwise have all connections, of which there are few.
            async with asyncio.timeout(FORM_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > MOST_BODY:
                        raise Refused(413, "the form is too large")
        except TimeoutError:
            raise Refused(408, "the form did not come in time") from None
        given = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].strip()
        if not _is_same(given, self.protection.token):
            await asyncio.sleep(WRONG_TOKEN_SECONDS)
            return Response(self._files["login.html"], 403, headers={"Content-Type": FILES["login.html"]})
        session = secrets.token_urlsafe(32)
        self.sessions[session] = time.time()
        while len(self.sessions) > 256:
            self.sessions.popitem(last=False)
        response = RedirectResponse("/", 303)
        response.set_cookie(COOKIE, session, httponly=True, secure=True, samesite="strict")
        return response

    async def runs(self, request: Request) -> Response:
        """List all runs and studies."""
        rows = await self._read(self.cards.rows)
        return _json({"runs": rows, "studies": self.cards.study_rows()})

    async def run(self, request: Request) -> Response:
        """Return everything about one run."""
        state = await self._state(_id(request))
        await self._read(_read_all, state)
        sections, _ = await self._read(state.sections, {})
        return _json(sections)

    async def compare(self, request: Request) -> Response:
        """Return the curves of several runs, and in what they differ."""
        ids = list(dict.fromkeys(request.query_params.getlist("id")))
        if not 1 <= len(ids) <= MOST_COMPARED:
            raise Refused(400, f"name 1 to {MOST_COMPARED} runs, each as id=")
        states = [await self._state(id) for id in ids]
        for state in states:
            await self._read(_read_all, state)
        return _json(await self._read(comparison, states))

    async def study(self, request: Request) -> Response:
        """Return the grid of a study's cells."""
        id = _id(request)
        rows = await self._read(self.cards.rows)
        if id not in self.cards.studies:
            raise Refused(404, "no such study")
        return _json(await self._read(study, self.cards.studies[id], rows))

    async def stream(self, request: Request) -> Response:
        """Send what changes as server-sent events: of a run, or without an id of the list."""
        if self._num_streams >= MOST_STREAMS:
            raise Refused(503, f"{MOST_STREAMS} pages are open already; close some")
        id = request.query_params.get("id")
        state = None if id is None else await self._state(id)
        if self._num_streams >= MOST_STREAMS:
            # Others came while the run was looked up.
            raise Refused(503, f"{MOST_STREAMS} pages are open already; close some")
        events = self._list_events() if state is None else self._run_events(state)
        self._num_streams += 1
        return Stream(events, self._leave)

    def _leave(self) -> None:
        self._num_streams -= 1

    async def _list_events(self) -> AsyncIterator[bytes]:
        known: dict[str, dict[str, Any]] = {}
        studies: list[dict[str, Any]] | None = None
        beat = time.monotonic()
        while not self.is_stopping():
            rows = await self._read(self.cards.rows)
            # A row is the same object as long as nothing has changed.
            changed = [row for row in rows if known.get(row["id"]) is not row]
            now = {row["id"]: row for row in rows}
            gone = [id for id in known if id not in now]
            here = self.cards.study_rows()
            if changed or gone or here != studies:
                yield _event("list", {"runs": changed, "gone": gone, "studies": here})
                beat = time.monotonic()
            elif time.monotonic() - beat > BEAT_SECONDS:
                yield b": beat\n\n"
                beat = time.monotonic()
            known, studies = now, here
            await self._sleep(LIST_SECONDS)

    async def _run_events(self, state: RunState) -> AsyncIterator[bytes]:
        known: dict[str, int] = {}
        beat = sent = time.monotonic()
        while not self.is_stopping():
            is_behind = await self._read(state.poll)
            # While a large file is read, only now and then.
            if not is_behind or time.monotonic() - sent > RUN_SECONDS:
                sections, known = await self._read(state.sections, known)
                sent = time.monotonic()
                if sections:
                    yield _event("run", sections)
                    beat = sent
                elif sent - beat > BEAT_SECONDS:
                    yield b": beat\n\n"
                    beat = sent
            if not is_behind:
                await self._sleep(RUN_SECONDS)

    async def _read(self, function: Callable[..., Value], *given: Any) -> Value:
        """Call a function that reads files in a thread, so that other pages do not wait."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *given)

    async def _sleep(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self.is_stopping() and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, 0.2))

    async def _state(self, id: str) -> RunState:
        run = await self._read(self.cards.find, id)
        if run is None:
            raise Refused(404, "no such run; it may have been removed")
        state = self._states.get(id)
        if state is None:
            state = self._states[id] = RunState(run)
        self._states.move_to_end(id)
        while len(self._states) > MOST_STATES:
            self._states.popitem(last=False)
        return state


class Stream(StreamingResponse):
    """Server-sent events; `leave` is called when they end, also where a reader that is too slow is cut off."""

    def __init__(self, events: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(_begun(events), media_type="text/event-stream")
        self.leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.leave()


async def _begun(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield b"retry: 1000\n\n"
    async for event in events:
        yield event


class Guard:
    """Refuses hosts that are not this machine's and visitors without the token; every answer gets its headers."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard) -> None:
        self.app, self.dashboard = app, dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        has_begun = False

        async def watch(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                headers = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *headers]}
            await send(message)

        try:
            response = self._refusal(Request(scope))
            await (response or self.app)(scope, receive, watch)
        except Exception as error:
            if not has_begun:
                await (await _refuse(None, error))(scope, receive, watch)

    def _refusal(self, request: Request) -> Response | None:
        given = request.headers.getlist("host")
        hosts = self.dashboard.hosts
        if len(given) != 1 or (hosts is not None and not names_host(given[0], hosts)):
            return JSONResponse({"error": "this host name is not served here; use 127.0.0.1 or localhost"}, 403)
        # As it is routed: an address has parts of the Host header in it, which a stranger wrote.
        path = request.scope["path"]
        if request.method not in ("GET", "HEAD") and path != "/login":
            return JSONResponse({"error": "this page only reads; send GET"}, 405, {"Allow": "GET"})
        if path in PUBLIC or self.dashboard.knows(request):
            return None
        if path == "/":
            return RedirectResponse("/login", 303)
        return JSONResponse({"error": "send the token: open / and type it, or Authorization: Bearer TOKEN"}, 401)


def _id(request: Request) -> str:
    ids = request.query_params.getlist("id")
    if len(ids) != 1:
        raise Refused(400, "name one id=")
    return ids[0]


def _is_same(given: str, wanted: str) -> bool:
    """Compare secrets in a time that says nothing of either, not even their lengths."""
    one, other = (hashlib.sha256(text.encode("utf-8", "replace")).digest() for text in (given, wanted))
    return hmac.compare_digest(one, other)


def _read_all(state: RunState) -> None:
    while state.poll():
        pass


def _dumped(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _json(value: Any) -> Response:
    return Response(_dumped(value), media_type="application/json")


def _event(name: str, value: Any) -> bytes:
    # JSON has no line breaks, so one line is the whole of the data.
    return b"event: " + name.encode() + b"\ndata: " + _dumped(value) + b"\n\n"


async def _not_found(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    return JSONResponse({"error": "no such path" if code == 404 else "not accepted"}, code)


async def _refuse(request: Request | None, error: Exception) -> Response:
    if isinstance(error, Refused):
        return JSONResponse({"error": error.reason}, error.status)
    return JSONResponse({"error": f"could not be shown ({type(error).__name__})"}, 500)


def serve(
    roots: list[Path],
    listening: socket.socket,
    host: str,
    protection: Protection | None,
    ready: Callable[[], None],
) -> None:
    """Answer on the socket until SIGTERM or SIGINT; `ready` is called when the first request may come."""
    check_address(host, protection)
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    dashboard = Dashboard(roots, host, protection)
    server = Server(configure(dashboard.app(), protection), ready)
    dashboard.is_stopping = lambda: server.should_exit
    server.run(sockets=[listening])


def configure(app: ASGIApp, protection: Protection | None) -> uvicorn.Config:
    """How the application is served."""
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        ws="none",
        lifespan="off",
        server_header=False,
        limit_concurrency=256,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
        ssl_certfile=None if protection is None else str(protection.certificate),
        ssl_keyfile=None if protection is None else str(protection.key),
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as error:
        raise FedmtlError(f"--certificate, --key: cannot be used ({error.strerror or error}); give PEM files") from None
    return config
