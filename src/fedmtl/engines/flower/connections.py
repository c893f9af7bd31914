"""The server's connections: how many there may be, how long each may take, and which one ends when there are too many.

Sites that have signed a request keep their connection. Everybody else has a few seconds, and the oldest of them is cut
off for whoever comes next: outsiders who connect and say nothing cannot keep a site out, however many they are.
"""

from __future__ import annotations

import asyncio
import ipaddress
import resource
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MOST_CONNECTIONS = 512
# On which nobody has signed a request yet: TLS takes a third of a megabyte for each.
MOST_STRANGERS = 128
# For files, workers and whatever else the process opens.
RESERVED_FILES = 64
# Of one site; its oldest is closed when it opens another.
MOST_PER_SITE = 8
# Seconds: for TLS, for a request's headers, between requests, between two parts of a body, for a request in all.
HANDSHAKE, HEADERS, IDLE, PAUSE, REQUEST = 5.0, 5.0, 15.0, 30.0, 600.0
# A connection that just came is left alone this long, so that a site can finish what it began.
GRACE = 0.25
MAX_HEADERS = 16 << 10
GLANCE = 0.02
SWEEP = 0.25


@dataclass(eq=False)
class Visitor:
    """One connection; `site` is the key that signed a request on it, None before one did."""

    host: str
    since: float
    deadline: float
    task: asyncio.Task[None] | None = None
    transport: asyncio.Transport | None = None
    site: bytes | None = None

    def end(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        elif self.task is not None:
            self.task.cancel()


class Visitors:
    """All connections there are; used by the thread of the port alone."""

    def __init__(self, most: int | None = None) -> None:
        self._most = most_connections() if most is None else most
        self._there: dict[Visitor, None] = {}

    def __len__(self) -> int:
        return len(self._there)

    async def admit(self, host: str) -> Visitor:
        """Admit a new connection as soon as there is capacity for it."""
        while True:
            if self._has_capacity(host):
                now = time.monotonic()
                visitor = Visitor(host, now, now + HANDSHAKE)
                self._there[visitor] = None
                return visitor
            await asyncio.sleep(GLANCE)

    def drop(self, visitor: Visitor) -> None:
        self._there.pop(visitor, None)

    def signed(self, visitor: Visitor, site: bytes) -> None:
        """Note that the connection belongs to a site from now on."""
        if visitor.site is None:
            same_site = [other for other in self._there if other.site == site]
            if len(same_site) >= MOST_PER_SITE:
                self._end(min(same_site, key=lambda other: other.since))
        visitor.site = site

    def sweep(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        for visitor in [visitor for visitor in self._there if visitor.deadline < now]:
            self._end(visitor)

    def end_all(self) -> None:
        for visitor in list(self._there):
            self._end(visitor)

    def _has_capacity(self, host: str) -> bool:
        """Whether one more may connect; if need be, this ends the oldest unsigned connection of the fullest address."""
        strangers = [visitor for visitor in self._there if visitor.site is None]
        crowd = Counter(visitor.host for visitor in strangers)
        most_strangers = min(MOST_STRANGERS, self._most)
        # Half of the capacity is for other addresses.
        is_crowded = crowd[host] >= max(1, most_strangers // 2)
        if not is_crowded and len(self._there) < self._most and len(strangers) < most_strangers:
            return True
        fullest = host if is_crowded else max(crowd, key=crowd.__getitem__, default=None)
        old = time.monotonic() - GRACE
        # In the order in which they came.
        found = next((each for each in strangers if each.host == fullest and each.since < old), None)
        if found is not None:
            self._end(found)
        return found is not None

    def _end(self, visitor: Visitor) -> None:
        self.drop(visitor)
        visitor.end()


class Connection(HttpToolsProtocol):
    """HTTP on one connection, under the deadlines of its visitor; requests are not queued behind each other."""

    def __init__(self, config: uvicorn.Config, state: ServerState, visitors: Visitors, visitor: Visitor) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self._visitors, self.visitor = visitors, visitor
        self._header_bytes = 0
        self._is_in_headers = False
        self._end_of_request = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.visitor.transport = transport
        self._grant(HEADERS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._visitors.drop(self.visitor)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self._header_bytes += len(data)
            if not self._is_in_headers:
                self._is_in_headers = True
                self._grant(HEADERS)
        elif self.visitor.site is not None:
            self._grant(min(PAUSE, self._end_of_request - time.monotonic()))
        super().data_received(data)
        if self._header_bytes > MAX_HEADERS:
            self.visitor.end()

    def on_headers_complete(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.visitor.end()
            return
        self._header_bytes, self._is_in_headers = 0, False
        self._end_of_request = time.monotonic() + REQUEST
        # Until the application says whose request it is.
        self._grant(HEADERS)
        self.scope["fedmtl.connection"] = self  # type: ignore[typeddict-unknown-key]
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A refused connection only waits for its other end to notice.
        self._grant(1.0 if self.transport.is_closing() else IDLE)

    def signed_by(self, site: bytes) -> None:
        """A request on this connection is a site's; its body may take longer than a stranger's headers."""
        self._visitors.signed(self.visitor, site)
        self._grant(PAUSE)

    def read(self) -> None:
        """The body has come whole; the answer may take the rest of the request's time."""
        self._grant(self._end_of_request - time.monotonic())

    def _grant(self, seconds: float) -> None:
        self.visitor.deadline = time.monotonic() + seconds


class Listener:
    """Accepts connections on a socket and serves an ASGI application on them, until it is cancelled."""

    def __init__(
        self, app: Callable[..., Any], listening: socket.socket, context: ssl.SSLContext | None, visitors: Visitors
    ) -> None:
        self._config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=int(IDLE)
        )
        self._config.load()
        self._state = ServerState()
        self._socket, self._context, self._visitors = listening, context, visitors

    def loop_factory(self) -> Callable[[], asyncio.AbstractEventLoop] | None:
        """The fastest event loop that is installed."""
        return self._config.get_loop_factory()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._socket.setblocking(False)
        sweeper = loop.create_task(self._sweep())
        try:
            while True:
                await self._accept(loop)
        finally:
            sweeper.cancel()
            self._visitors.end_all()

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> None:
        # Not `sock_accept`: cancelled at the wrong moment it loses a connection that nobody would close.
        try:
            plain, address = self._socket.accept()
        except BlockingIOError:
            await self._somebody(loop)
            return
        except OSError:
            # Gone again, or the process has no file left: whoever is idle goes first.
            self._visitors.sweep()
            await asyncio.sleep(GLANCE)
            return
        try:
            visitor = await self._visitors.admit(neighbourhood(str(address[0])))
        except BaseException:
            plain.close()
            raise
        visitor.task = loop.create_task(self._open(loop, plain, visitor))
        # One that was cancelled before it began has closed nothing.
        visitor.task.add_done_callback(lambda task: plain.close() if visitor.transport is None else None)
        # Whoever had to go is closed before the next one comes.
        await asyncio.sleep(0)

    async def _somebody(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait until somebody connects."""
        knock = asyncio.Event()
        loop.add_reader(self._socket, knock.set)
        try:
            await knock.wait()
        finally:
            loop.remove_reader(self._socket)

    async def _open(self, loop: asyncio.AbstractEventLoop, plain: socket.socket, visitor: Visitor) -> None:
        try:
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                lambda: Connection(self._config, self._state, self._visitors, visitor),
                plain,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HANDSHAKE,
            )
        except BaseException as error:
            self._visitors.drop(visitor)
            plain.close()
            # It spoke no TLS, went away, or was ended: nothing that anybody could mend here.
            if not isinstance(error, (OSError, asyncio.CancelledError)):
                raise

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP)
            self._visitors.sweep()


def neighbourhood(host: str) -> str:
    """The address, or the network of a version 6 address: whoever has one of those has as many as they like."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def most_connections() -> int:
    """Return as many as the process can have files for, with some left for other files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(16, min(MOST_CONNECTIONS, (files - RESERVED_FILES) // 2))


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """TLS as both ends of this project speak it; a key with a passphrase is an error and never a prompt."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with suppress(AttributeError):
        context.options |= ssl.OP_NO_RENEGOTIATION
    context.load_cert_chain(certificate, key, password=lambda: "")
    return context
