"""HOST:PORT, and which hosts need keys."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from fedmtl.errors import FedmtlError

DEFAULT = "127.0.0.1:9092"


@dataclass(frozen=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, option: str) -> Address:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise FedmtlError(f"{option}: found {text}, write HOST:PORT, such as {DEFAULT}")
    return Address(host.strip("[]"), int(port))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
