"""A request's signature: it proves who sends it, and that it is this request and no other, sent once and lately.

The site's key signs the method, the route, the time, a nonce and the hash of the body. All of it is in the headers, so
the server knows whom it serves before it reads a byte of the body.
"""

from __future__ import annotations

import binascii
import hashlib
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

KEY, TIME, NONCE, DIGEST, SIGNATURE = (f"x-fedmtl-{name}" for name in ("key", "time", "nonce", "digest", "signature"))
# How far the clocks of a site and the server may differ, in seconds.
WINDOW = 300.0
# Requests of one site: so many a second, and so many at once after a pause.
RATE, BURST = 200.0, 400.0
# Requests of one site that are open at the same time; an honest one has two, and two more while it is restarted.
MOST_OPEN = 6
MOST_KEYS = 2000
# A site that sends at the full rate for the whole time a nonce is remembered has this many.
MOST_NONCES = int(RATE * 2 * WINDOW + BURST)
CURVE = ec.SECP384R1
SCHEME = ec.ECDSA(hashes.SHA384())

_TIME = re.compile(r"\d{1,12}\.\d{3}")
_HEX = re.compile(r"[0-9a-f]+")


class Refused(Exception):
    """A request that is not served. The code tells the site what to do, the details are for its operator."""

    def __init__(self, status: int, code: str, **details: str | float) -> None:
        super().__init__(code)
        self.status, self.code, self.details = status, code, details


@dataclass(frozen=True)
class Caller:
    """Who signed a request, and which body was signed."""

    key: bytes
    digest: str


class Signer:
    """A site's side: the headers of each of its requests."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self.public_key = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def headers(self, method: str, path: str, body: bytes, at: float | None = None) -> dict[str, str]:
        """Sign anew for every attempt: a nonce serves once. Without `at` the time is now."""
        now = f"{time.time() if at is None else at:.3f}"
        nonce, digest = secrets.token_hex(16), hashlib.sha256(body).hexdigest()
        signature = self._key.sign(_signed(method, path, now, nonce, digest), SCHEME)
        return {
            KEY: b64encode(self.public_key).decode(),
            TIME: now,
            NONCE: nonce,
            DIGEST: digest,
            SIGNATURE: b64encode(signature).decode(),
        }


@dataclass
class _Account:
    """What the server remembers of a key: its last nonces, what it may still send now, and how much is open."""

    nonces: set[str] = field(default_factory=set)
    order: deque[tuple[float, str]] = field(default_factory=deque)
    allowance: float = BURST
    counted: float = 0.0
    num_open: int = 0


class Guard:
    """The server's side. `is_known` says whether a key may send to a route now; it is called for every request."""

    def __init__(self, is_known: Callable[[bytes, str], bool], clock: Callable[[], float] = time.time) -> None:
        self._is_known, self._clock = is_known, clock
        self._accounts: OrderedDict[bytes, _Account] = OrderedDict()

    def check(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]]) -> Caller:
        """Raise `Refused` unless the headers are signed by a known key, lately, and for the first time."""
        shown = _shown(headers)
        key = _decoded(shown[KEY])
        if not self._is_known(key, path):
            raise Refused(401, "unknown-key")
        if not is_signed(
            key, _decoded(shown[SIGNATURE]), _signed(method, path, *(shown[n] for n in (TIME, NONCE, DIGEST)))
        ):
            raise Refused(401, "signature")
        now = self._clock()
        if abs(now - float(shown[TIME])) > WINDOW:
            raise Refused(401, "clock", server_time=round(now, 3), site_time=float(shown[TIME]))
        self._count(key, shown[NONCE])
        return Caller(key, shown[DIGEST])

    def open(self, caller: Caller) -> None:
        """A request is served from here to `close`."""
        account = self._accounts.get(caller.key)
        if account is not None:
            if account.num_open >= MOST_OPEN:
                raise Refused(429, "busy")
            account.num_open += 1

    def close(self, caller: Caller) -> None:
        account = self._accounts.get(caller.key)
        if account is not None:
            account.num_open = max(0, account.num_open - 1)

    def _count(self, key: bytes, nonce: str) -> None:
        account, now = self._account(key), time.monotonic()
        while account.order and account.order[0][0] < now - 2 * WINDOW:
            account.nonces.discard(account.order.popleft()[1])
        if nonce in account.nonces:
            raise Refused(401, "replay")
        account.allowance = min(BURST, account.allowance + RATE * (now - account.counted))
        account.counted = now
        if account.allowance < 1 or len(account.order) >= MOST_NONCES:
            raise Refused(429, "busy")
        account.allowance -= 1
        account.nonces.add(nonce)
        account.order.append((now, nonce))

    def _account(self, key: bytes) -> _Account:
        account = self._accounts.setdefault(key, _Account(counted=time.monotonic()))
        self._accounts.move_to_end(key)
        if len(self._accounts) > MOST_KEYS:
            self._accounts.popitem(last=False)
        return account


def _signed(method: str, path: str, when: str, nonce: str, digest: str) -> bytes:
    return "\n".join(("fedmtl-1", method, path, when, nonce, digest)).encode()


def _shown(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """The five headers, each once and in its form."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name.startswith(b"x-fedmtl-"):
            plain = name.decode("latin-1")
            if plain in found:
                raise Refused(401, "unsigned")
            found[plain] = value.decode("latin-1")
    if set(found) != {KEY, TIME, NONCE, DIGEST, SIGNATURE}:
        raise Refused(401, "unsigned")
    is_formed = _TIME.fullmatch(found[TIME]) and all(
        len(found[name]) == length and _HEX.fullmatch(found[name]) for name, length in ((NONCE, 32), (DIGEST, 64))
    )
    if not is_formed:
        raise Refused(401, "unsigned")
    return found


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise Refused(401, "unsigned") from None


def is_signed(key: bytes, signature: bytes, signed: bytes) -> bool:
    """Whether a public key signed these bytes."""
    public = _public_key(key)
    if public is None:
        return False
    try:
        public.verify(signature, signed, SCHEME)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=MOST_KEYS)
def _public_key(pem: bytes) -> ec.EllipticCurvePublicKey | None:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        return None
    is_ours = isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, CURVE)
    return key if is_ours else None  # type: ignore[return-value]
