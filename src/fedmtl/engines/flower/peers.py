"""What sites know of each other: the keys that they are enrolled with, which the server passes on and cannot forge.

A site that was told the fingerprints of the others, in its policy, takes no other keys. Without them it remembers the
first key that comes under a name, and takes no other one later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from fedmtl.engines.flower.certificates import check_public_key
from fedmtl.engines.flower.signing import SCHEME, is_signed
from fedmtl.errors import FedmtlError
from fedmtl.foreign import read_json
from fedmtl.runs.folder import write_atomic

PEERS = "peers.json"
MOST_PEERS = 10_000
DER, PUBLIC = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo


class SiteIdentity:
    """Signs with a site's enrolment key, and knows the keys of others from `known` fingerprints or from `path`."""

    def __init__(self, key: EllipticCurvePrivateKey, path: Path, known: Mapping[str, str]) -> None:
        self._key, self._path, self._known = key, path, known
        self.public_key = key.public_key().public_bytes(serialization.Encoding.PEM, PUBLIC).decode()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message, SCHEME)

    def refuses(self, client: str, public_key: str, message: bytes, signature: bytes) -> str | None:
        """Why a message is not that site's; a key is remembered with the first message that it signed."""
        try:
            pem = check_public_key(public_key.encode(), client)
        except FedmtlError:
            return "its key is none"
        if pem != public_key or not is_signed(pem.encode(), signature, message):
            return "its signature is not that of its key"
        found = _fingerprint(pem)
        if public_key == self.public_key:
            return None
        if self._known:
            wanted = self._known.get(client)
            if wanted is None:
                return "the policy does not name its key (require.secure_aggregation.peers)"
            return None if found.startswith(wanted) else f"its key is {found[:16]}, the policy names {wanted[:16]}"
        return self._remember(client, found)

    def _remember(self, client: str, found: str) -> str | None:
        remedy = "remove it to remember the keys that come next"
        content = read_json(self._path, remedy) if self._path.exists() else {}
        if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
            raise FedmtlError(f"{self._path}: has no keys of sites; {remedy}")
        before = content.get(client)
        if before is None and len(content) < MOST_PEERS:
            write_atomic(self._path, json.dumps({**content, client: found}, indent=1).encode())
            return None
        if before == found:
            return None
        return (
            f"its key is {found[:16]}, and was {str(before)[:16]} before ({self._path.name}); ask its owner, and remove"
            " its line there if it is right"
        )


def _fingerprint(pem: str) -> str:
    """As `certificates.fingerprint`, in full."""
    return hashlib.sha256(serialization.load_pem_public_key(pem.encode()).public_bytes(DER, PUBLIC)).hexdigest()
