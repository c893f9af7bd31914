"""The server's port: Flower's fleet API and nothing else of it, behind limits of our own.

Flower's SuperLink also serves an API that enrols nodes and starts runs, to whoever can reach its port. A site must not
enrol itself, so that API is not here: its functions are called in this process.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
from flwr.supercore.error import http_error_translator
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware
from flwr.superlink.routers.fleet.router import router as fleet_router
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint

from fedmtl.engines.flower.addresses import Address
from fedmtl.engines.flower.link import Link
from fedmtl.engines.flower.quiet import silence_flower
from fedmtl.errors import FedmtlError

# A chunk of Flower's has 5 MB; nothing larger is ever sent.
MAX_BODY = 8 << 20
PULL = "/v1/fleet/pull-messages"
# A question for messages waits this long for one, so that sites need not ask often and still hear at once.
LONG_POLL = 2.0
GLANCE = 0.02

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class ServerCertificate:
    certificate: Path
    key: Path


class BodyLimit:
    """Refuses larger requests by their length where they say it, else when they pass it."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if scope["type"] == "http" and (not said.isdigit() or int(said) > MAX_BODY):
            await Response(status_code=413)(scope, receive, send)
            return
        came = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal came
            message = await receive()
            came += len(message.get("body", b""))
            if came > MAX_BODY:
                raise HTTPException(413)
            return message

        await self._app(scope, limited, send)


class LongPoll:
    """Holds a question for messages until there is one. Who asks is checked afterwards, by Flower."""

    def __init__(self, app: App, link: Link) -> None:
        self._app, self._link = app, link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PULL:
            await self._wait(dict(scope["headers"]).get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""))
        await self._app(scope, receive, send)

    async def _wait(self, header: bytes) -> None:
        try:
            key = b64decode(header)
        except ValueError:
            return
        end = time.monotonic() + LONG_POLL
        while time.monotonic() < end and not self._link.is_waiting_for(key):
            await asyncio.sleep(GLANCE)


class OwnNameOnly(BaseHTTPMiddleware):
    """A node answers as itself: Flower checks who asks, not whom the message it brings names as its sender."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        asked = getattr(request.state, "protobuf_request", None)
        if isinstance(asked, PushMessagesRequest) and any(
            message.metadata.src_node_id != asked.node.node_id for message in asked.messages_list
        ):
            raise HTTPException(403)
        return await call_next(request)


def make_app(link: Link, *, keys_required: bool) -> FastAPI:
    app = FastAPI(
        docs_url=None,
        openapi_url=None,
        middleware=[
            Middleware(BodyLimit),
            Middleware(LongPoll, link=link),
            Middleware(BaseHTTPMiddleware, dispatch=http_error_translator),
            Middleware(ProtobufTranslationMiddleware),
            Middleware(NodeAuthMiddleware),
            Middleware(OwnNameOnly),
        ],
    )
    app.state.linkstate_factory = link
    app.state.enable_supernode_auth = keys_required
    app.include_router(fleet_router)
    return app


class FleetApi:
    """Serves the link in a thread until it is closed."""

    def __init__(self, link: Link, address: Address, certificate: ServerCertificate | None) -> None:
        silence_flower()
        # Known before a thread starts: an address that is taken is one line for the user.
        self._socket = _listen(address)
        self.address = Address(address.host, self._socket.getsockname()[1])
        config = uvicorn.Config(
            make_app(link, keys_required=certificate is not None),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            ssl_certfile=None if certificate is None else certificate.certificate,
            ssl_keyfile=None if certificate is None else certificate.key,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="fleet", daemon=True)
        self._thread.start()
        while self._thread.is_alive() and not self._server.started:
            time.sleep(0.01)
        if not self._server.started:
            raise FedmtlError(f"{address}: the server did not start; check its certificate and key")

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(5)
        self._socket.close()


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family, backlog=128)
    except OSError as error:
        raise FedmtlError(f"{address}: cannot be listened on ({error.strerror}); choose another --listen") from error
