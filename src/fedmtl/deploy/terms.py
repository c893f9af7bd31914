"""What server and site must have in common, computed the same way on both sides."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from fedmtl import __version__
from fedmtl.federation.handshake import SiteTerms, Terms
from fedmtl.model.multitask import MultiTaskModel
from fedmtl.sharing.plan import Key, owner_task, weights_sha256
from fedmtl.tasks.task import Task

# Enough to tell two encoders apart, and short enough to compare by eye.
LETTERS = 16


def server_terms(model: MultiTaskModel, tokenizer: Any, tasks: Mapping[str, Task]) -> Terms:
    """Return a server's terms, which name the labels of its tasks."""
    labels = {name: list(task.labels) for name, task in tasks.items()}
    return Terms(**dict(site_terms(model, tokenizer)), labels=labels)


def site_terms(model: MultiTaskModel, tokenizer: Any) -> SiteTerms:
    """Return a site's terms, which name no label."""
    encoder = {
        Key("", name): getattr(module, leaf).detach()
        for name, (module, leaf) in model.canonical().items()
        if owner_task(name) is None
    }
    return SiteTerms(version=__version__, tokenizer=_digest(tokenizer), encoder=weights_sha256(encoder)[:LETTERS])


def _digest(tokenizer: Any) -> str:
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    # Neither has an effect here, and every call of the tokenizer changes them.
    for name in ("padding", "truncation"):
        backend.pop(name, None)
    return hashlib.sha256(json.dumps(backend, sort_keys=True).encode()).hexdigest()[:LETTERS]
