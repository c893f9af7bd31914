"""What Flower logs is about Flower's parts; what a user has to know, we say."""

from __future__ import annotations

import logging


def silence_flower() -> None:
    for name in ("flwr", "uvicorn", "uvicorn.error", "httpx", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
