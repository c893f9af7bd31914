"""A wire between sites and a server that keeps every byte the sites send, and a search of it that looks inside."""

from __future__ import annotations

import base64
import re
import socket
import threading
import zlib
from collections.abc import Iterable, Iterator

from fedmtl.engines.flower.addresses import Address

# Where a deflated stream or a gzip file may begin.
DEFLATED = re.compile(rb"\x78[\x01\x5e\x9c\xda]|\x1f\x8b\x08")
MOST_INFLATED = 1 << 24
DEPTH = 3


class Tap:
    """Passes bytes between sites and a server, and keeps all that sites sent, connection by connection."""

    def __init__(self, server: Address) -> None:
        self._server = server
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self._listener.getsockname()[1])
        self.streams: list[bytearray] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def sent(self) -> bytes:
        return b"".join(self.streams)

    def _accept(self) -> None:
        while True:
            try:
                site, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((self._server.host, self._server.port))
            except OSError:
                site.close()
                continue
            kept = bytearray()
            self.streams.append(kept)
            for source, target, own in ((site, server, kept), (server, site, None)):
                threading.Thread(target=self._pass_on, args=(source, target, own), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, kept: bytearray | None) -> None:
        try:
            while data := source.recv(1 << 16):
                if kept is not None:
                    kept += data
                target.sendall(data)
        except OSError:
            pass
        finally:
            for each in (source, target):
                each.close()

    def close(self) -> None:
        self._listener.close()


def leaks(streams: Iterable[bytes | bytearray], secrets: Iterable[str]) -> list[str]:
    """The secrets that stand in the bytes: as text in any case, in UTF-16, in base64 or hex, also where deflated."""
    forms = {secret: list(_forms(secret)) for secret in secrets}
    found: dict[str, None] = {}
    for stream in streams:
        for layer in _layers(bytes(stream), DEPTH):
            lower = layer.lower()
            for secret, shapes in forms.items():
                if any(shape in (layer if is_exact else lower) for shape, is_exact in shapes):
                    found[secret] = None
    return list(found)


def _forms(secret: str) -> Iterator[tuple[bytes, bool]]:
    plain = secret.encode()
    yield plain.lower(), False
    yield plain.hex().encode(), False
    yield secret.lower().encode("utf-16-le"), False
    for shift in range(3):
        # The letters that do not depend on what stands before and after.
        encoded = base64.b64encode(b"\0" * shift + plain)
        yield encoded[-(-shift * 8 // 6) : len(plain + b"\0" * shift) * 8 // 6], True


def _layers(data: bytes, depth: int) -> Iterator[bytes]:
    yield data
    if depth == 0:
        return
    for match in DEFLATED.finditer(data):
        try:
            inner = zlib.decompressobj(wbits=47).decompress(data[match.start() :], MOST_INFLATED)
        except zlib.error:
            continue
        if len(inner) > 4:
            yield from _layers(inner, depth - 1)
