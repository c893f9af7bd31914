"""The finished model of a deployed run at its sites (`fedmtl client --save-model DIR`).

The server sends each site that requested it the values of its tasks, without a codec, and their SHA-256. A site opens
the message as data: it trains nothing with it, answers nothing, and saves it only where the values are those of its
tasks, have the shapes of its model, are finite, and have the hash that the server named. What stays at the site, such
as a personal head, is added from its own folder. The folder that it saves is a run's, of this site's tasks alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import torch

from fedmtl.config import Config
from fedmtl.config.file import dump_config
from fedmtl.deploy.site_worker import SiteSettings
from fedmtl.engines.flower.calls import ModelCall
from fedmtl.engines.local import map_message
from fedmtl.errors import FedmtlError, ModelError
from fedmtl.experiment.prepare import Prepared
from fedmtl.experiment.run import final_model
from fedmtl.export.encoder import new_folder
from fedmtl.federation.client import Site, load_values
from fedmtl.federation.messages import ClientId, Codecs, Job, State
from fedmtl.federation.wire import decode_job, encode_job
from fedmtl.federation.wire.codecs import Bytes
from fedmtl.model.encoder import Encoder
from fedmtl.model.saved import save_model
from fedmtl.runs.folder import RunFolder, write_atomic
from fedmtl.sharing.plan import SharingPlan, Weights, is_personal, weights_sha256

REMEDY = "start the site again with --save-model while the server runs, or use the server's run folder"


def final_frames(
    prepared: Prepared, state: State, run: RunFolder, brought: Mapping[ClientId, tuple[str, ...]]
) -> Callable[[ClientId], tuple[str, Bytes]]:
    """What makes the words and the frame of a site's finished model; one that is too large is a WireError.

    Where values stay at sites it is the model of the last round, of which every site has them. A checkpoint is opened
    only where a site wants the model.
    """

    @cache
    def chosen() -> tuple[SharingPlan, Weights]:
        if not state.plan.has_personal:
            # Else the run ends with the last round too, and says why.
            with suppress(FedmtlError):
                return final_model(prepared, state, run)
        return state.plan, state.weights

    def frame_of(client: ClientId) -> tuple[str, Bytes]:
        plan, weights = chosen()
        tasks = brought[client]
        views = plan.keys(prepared.server.names, tasks, client)
        keys = dict.fromkeys(key for view in views.values() for key in view.values() if not is_personal(key))
        values = {key: weights[key] for key in keys}
        accepted = state.accepted.get(client, 0)
        job = Job("evaluate", state.round, client, tasks, values, plan, None, 0, accepted, {}, {}, Codecs())
        return json.dumps({"sha256": weights_sha256(values)}), encode_job(job, prepared.config.wire.max_bytes)

    return frame_of


@dataclass(frozen=True)
class FinalSite:
    """A site that takes the finished model: its own model, encoder and config, which the values have to fit."""

    site: Site
    encoder: Encoder
    config: Config
    settings: SiteSettings
    max_bytes: int


def save_final_model(final: FinalSite, call: ModelCall) -> str:
    """Check the model that came and save it; the line for the site's terminal.

    Nothing is left of a model that is refused.
    """
    target = final.settings.save_model
    if target is None:
        raise ModelError("a model came that this site did not request")
    job = decode_job(map_message(call.frame), final.max_bytes)
    _check(job, final)
    found, said = weights_sha256(job.weights), _digest(call.about)
    if found != said:
        raise ModelError(f"its values have the SHA-256 {found[:16]}..., the server's words {said[:16]}...; {REMEDY}")
    plan, weights = _at_home(job, final)
    tasks = {name: final.site.model.tasks[name] for name in job.tasks}
    model_config = final.config.model
    if model_config.adapters is not None and model_config.adapters.tasks:
        adapted = [name for name in model_config.adapters.tasks if name in tasks]
        adapters = model_config.adapters.model_copy(update={"tasks": adapted}) if adapted else None
        model_config = model_config.model_copy(update={"adapters": adapters})
    with new_folder(target) as hidden:
        save_model(hidden / "model", final.encoder, tasks, plan, weights, model_config)
        write_atomic(hidden / "config.yaml", dump_config(final.config).encode())
    return (
        f"the model of {', '.join(tasks)} is in {target}; its values have the SHA-256 of the server's, {found[:16]}..."
    )


def _digest(about: str) -> str:
    try:
        digest = json.loads(about)["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError):
        digest = None
    if not isinstance(digest, str) or len(digest) != 64:
        raise ModelError(f"the server names no SHA-256 of its values; {REMEDY}")
    return digest


def _check(job: Job, final: FinalSite) -> None:
    """Raise a ModelError unless the values are those of this site's tasks and fit its model."""
    settings, canonical = final.settings, final.site.model.canonical()
    if job.client != settings.client or not job.tasks or not set(job.tasks) <= set(settings.tasks):
        raise ModelError(f"it is of another site or of other tasks; {REMEDY}")
    if job.rows is not None or job.fixed or job.extra:
        raise ModelError(f"it has more in it than values; {REMEDY}")
    views = job.plan.keys(canonical, job.tasks, settings.client)
    expected = {key for view in views.values() for key in view.values() if not is_personal(key)}
    if set(job.weights) != expected:
        raise ModelError(f"its values are not those of {', '.join(job.tasks)}; {REMEDY}")
    for key, value in job.weights.items():
        # Not the model's parameters: they are those of its last job, cut to the token rows of this site.
        like = final.site.initial[key.name]
        if value.shape != like.shape or value.dtype != torch.float32 or not bool(value.isfinite().all()):
            raise ModelError(f"a value of it has another shape, or is not finite; {REMEDY}")


def _at_home(job: Job, final: FinalSite) -> tuple[SharingPlan, Weights]:
    """The plan and the values of this site's model, in which a personal value is its task's."""
    client = final.settings.client
    personal: Weights = {}
    if job.plan.has_personal:
        personal = load_values(final.site.folder / client, job.state_round, job.round)
    rules = tuple((pattern, "task" if level == "client" else level) for pattern, level in job.plan.rules)
    plan = replace(job.plan, rules=rules)
    weights: Weights = {}
    for task, view in job.plan.keys(final.site.model.canonical(), job.tasks, client).items():
        for name, key in view.items():
            if is_personal(key) and key not in personal:
                raise ModelError(
                    f"this site has no values of its own after round {job.round}, in which it did not train"
                )
            weights[plan.key(name, task, "")] = personal[key] if is_personal(key) else job.weights[key]
    return plan, weights
