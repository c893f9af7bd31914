"""Every capability that a user can switch on, by name, in the order in which their hooks run.

A capability is one file in `methods/`, `federation/aggregators/`, `federation/filters/` or `tasks/kinds/`, or comes
from another package: `register` adds it, or an entry point of the group `fedmtl`. Nothing is imported before it is
needed: this module loads no numeric library, and a worker loads only the capabilities that its jobs name. Installed
packages are searched for entry points only for a name that is neither in the package nor registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from fedmtl.config import AggregationConfig, Config, RuleConfig
from fedmtl.config.errors import did_you_mean, shown
from fedmtl.config.schema import HOSTILE, HOSTILE_RULES
from fedmtl.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from fedmtl.federation.aggregators.protocol import Aggregator
    from fedmtl.federation.filters.protocol import ExchangeClient, UpdateFilter
    from fedmtl.federation.policy import Policy
    from fedmtl.federation.server_method import ServerMethod, ServerSetup
    from fedmtl.runs.log import Tracker
    from fedmtl.sharing.plan import Extra, SharingPlan, Weights
    from fedmtl.tasks.kinds.protocol import TaskKind
    from fedmtl.tasks.task import Task
    from fedmtl.training.local_method import LocalMethod

GROUP = "fedmtl"
# What is made of the weights comes before what holds them to something: pruned weights are zero whoever moved them.
BUILT_IN = {
    "task_weighting": "fedmtl.methods.task_weighting",
    "server_optimizer": "fedmtl.methods.server_optimizers",
    "early_stopping": "fedmtl.methods.early_stopping",
    "scaffold": "fedmtl.methods.scaffold",
    "pruning": "fedmtl.methods.pruning",
    "fedprox": "fedmtl.methods.fedprox",
    "adaptive_sharing": "fedmtl.methods.adaptive_sharing",
    "logit_adjustment": "fedmtl.methods.logit_adjustment",
    "distillation": "fedmtl.methods.distillation",
    "smart": "fedmtl.methods.smart",
    "uncertainty_weights": "fedmtl.methods.uncertainty_weights",
    "pcgrad": "fedmtl.methods.pcgrad",
    "example_privacy": "fedmtl.methods.example_privacy",
    # The last filters: nothing may be made of an update after its noise, and nothing can be under its masks.
    "client_privacy": "fedmtl.methods.client_privacy",
    "secure_aggregation": "fedmtl.methods.secure_aggregation",
}

AGGREGATORS = {
    "mean": ("fedmtl.federation.aggregators.mean", "Mean"),
    "clipped_mean": ("fedmtl.federation.aggregators.clipped_mean", "ClippedMean"),
    "centered_clipping": ("fedmtl.federation.aggregators.centered_clipping", "CenteredClipping"),
    "coordinate_median": ("fedmtl.federation.aggregators.by_coordinate", "CoordinateMedian"),
    "trimmed_mean": ("fedmtl.federation.aggregators.by_coordinate", "TrimmedMean"),
    "multi_krum": ("fedmtl.federation.aggregators.multi_krum", "MultiKrum"),
}

BY_SCOPE = "fedmtl.federation.aggregators.by_scope"

# The wire format needs them: the codecs of a job name them.
UPDATE_FILTERS = {
    "error_feedback": ("fedmtl.federation.filters.error_feedback", "ErrorFeedback"),
}

TASK_KINDS = {
    "classification": ("fedmtl.tasks.kinds.classification", "Classification"),
    "regression": ("fedmtl.tasks.kinds.regression", "Regression"),
    "tagging": ("fedmtl.tasks.kinds.tagging", "Tagging"),
    "multilabel": ("fedmtl.tasks.kinds.multilabel", "Multilabel"),
}

# Each with the library that it needs, and the extra that installs it.
TRACKERS = {
    "tensorboard": ("fedmtl.trackers.tensorboard", "TensorBoard", "tensorboard"),
    "mlflow": ("fedmtl.trackers.mlflow", "Mlflow", "mlflow"),
    "wandb": ("fedmtl.trackers.wandb", "WeightsAndBiases", "wandb"),
    "trackio": ("fedmtl.trackers.trackio", "Trackio", "trackio"),
}
SENDER = "fedmtl.trackers.sender"

# What clients are given of a config that switches a capability on, as plain values; None where it does not.
ClientOptions = Callable[[Config, "SharingPlan", Sequence[str]], Mapping[str, Any] | None]


def _receives_nothing(extra: Extra, tasks: Mapping[str, Task], options: Mapping[str, Any]) -> str | None:
    return "the job brings what the method does not take" if extra else None


def _sends_nothing(extra: Extra, tasks: Sequence[str], options: Mapping[str, Any]) -> str | None:
    return "it sent what the method does not send" if extra else None


@dataclass(frozen=True)
class Capability:
    """A capability's halves: each is None where there is none.

    With `options`, a pydantic model, the capability is switched on under `methods.<name>` of a config, and clients
    are given these options; `client_options` finds them elsewhere. `local` makes the client's half of them. `server`
    makes the server's half, or None where the config does not switch it on. `aggregator` is an aggregation rule,
    which `federation.aggregation` names: it is called with the weights before a round, with what the rule of the last
    round remembered, and with `options=` where there are options. `check_sent` says why what a client sent under this
    name with an update of some tasks cannot be, and `check_received` the same of what a server sent with a job;
    whatever they are not prepared for, they need not catch. `tracker` is made of the options and the run's folder,
    and sees its events. `task_kind` is a kind of task, which `tasks.<task>.kind` names. `update_filter` makes a filter
    of updates of the same options as `local`. `exchange` answers at a client what the server's half sends in an
    exchange. `check_policy` says why a server's config does not give the protection that a site's policy requires; it
    is asked of every capability in the package, switched on or not. `is_quiet_under_masks` says that the client's half
    sends nothing beside the update where updates are masked, whatever it sends otherwise.
    """

    name: str
    local: Callable[[Mapping[str, Any]], LocalMethod] | None = None
    client_options: ClientOptions | None = None
    server: Callable[[ServerSetup], ServerMethod | None] | None = None
    check_sent: Callable[[Extra, Sequence[str], Mapping[str, Any]], str | None] = _sends_nothing
    check_received: Callable[[Extra, Mapping[str, Task], Mapping[str, Any]], str | None] = _receives_nothing
    aggregator: Callable[..., Aggregator] | None = None
    options: type[BaseModel] | None = None
    tracker: Callable[[Any, Path], Tracker] | None = None
    task_kind: type[TaskKind] | None = None
    update_filter: Callable[[Mapping[str, Any]], UpdateFilter] | None = None
    check_policy: Callable[[Policy, Config], str | None] | None = None
    exchange: Callable[[Extra, ExchangeClient], Extra] | None = None
    is_quiet_under_masks: bool = False

    @property
    def sends(self) -> bool:
        """Whether its client's half may send something beside the update."""
        return self.check_sent is not _sends_nothing


_REGISTERED: dict[str, Capability] = {}
# Those of the registered names whose entry point was loaded here.
_LOADED: set[str] = set()
_KINDS: dict[str, TaskKind] = {}


def register(capability: Capability) -> None:
    """Add a capability of another package, under a name that is not taken."""
    if (
        capability.name in {*BUILT_IN, *AGGREGATORS, *UPDATE_FILTERS, *TASK_KINDS}
        or _REGISTERED.get(capability.name, capability) is not capability
    ):
        raise ConfigError(f"the capability {capability.name} is there already; register it under another name")
    _REGISTERED[capability.name] = capability


def names() -> list[str]:
    """All names: those in the package first, then registered ones, then those of entry points, which are not loaded."""
    return list(dict.fromkeys([*BUILT_IN, *_REGISTERED, *_entry_points()]))


def is_known(name: str) -> bool:
    """Whether `find` finds a capability of that name; nothing is imported for the answer."""
    return name in BUILT_IN or name in _REGISTERED or name in _entry_points()


def find(name: str) -> Capability:
    """The capability of that name, which is imported now; a ConfigError with the known ones where there is none."""
    if name in BUILT_IN:
        found: Capability = import_module(BUILT_IN[name]).CAPABILITY
        return found
    if name not in _REGISTERED and name in _entry_points():
        register(_entry_points()[name].load())
        _LOADED.add(name)
    if name not in _REGISTERED:
        raise ConfigError(f"no capability is called {name}; there are {', '.join(names())}")
    return _REGISTERED[name]


def check_methods(config: Config) -> None:
    """Raise a ConfigError for a capability that is not there, has no options or others, or is no aggregation rule."""
    for name in config.methods:
        if not is_known(name):
            raise ConfigError(f"methods.{name}: no capability is called so; {did_you_mean(name, names())}")
        if find(name).options is None:
            raise ConfigError(f"methods.{name}: is switched on by a key of its own; docs/config.md has it")
        options_of(config, name)
    for name in config.track:
        tracker_options(config, name)
    aggregator(config)


def options_of(config: Config, name: str) -> Any:
    """The options that a config has for a capability under `methods`, checked by its pydantic model."""
    model = find(name).options
    assert model is not None
    return _checked(model, config.methods.get(name, {}), f"methods.{name}")


def _checked(model: type[BaseModel], given: Mapping[str, Any], key: str) -> Any:
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = ".".join(map(str, (key, *first["loc"])))
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                f"{path}: unknown key; {did_you_mean(first['loc'][-1], list(model.model_fields))}"
            ) from None
        raise ConfigError(f"{path}: found {shown(first['input'])}; {first['msg']}") from None


def switched_on(config: Config) -> list[str]:
    """The names of capabilities that a config may switch on: all in the package, and what stands under `methods`."""
    built_in = [name for name in BUILT_IN if name in config.methods or find(name).options is None]
    others = [name for name in config.methods if name not in BUILT_IN and is_known(name)]
    order = {name: number for number, name in enumerate(_REGISTERED)}
    return [*built_in, *sorted(others, key=lambda name: order.get(name, len(order)))]


def client_methods(config: Config, plan: SharingPlan, parameters: Sequence[str]) -> dict[str, dict[str, Any]]:
    """What clients are given for every capability that a config switches on and that has a client's half or a filter.

    A filter that cannot work with the config is a ConfigError.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in switched_on(config):
        capability = find(name)
        if capability.client_options is not None:
            options = capability.client_options(config, plan, parameters)
        else:
            options = options_of(config, name).model_dump(mode="json") if capability.options else None
        if options is None or (capability.local is None and capability.update_filter is None):
            continue
        found[name] = dict(options)
        if capability.update_filter is not None:
            try:
                reason = capability.update_filter(options).conflict(config)
            except Exception as error:
                raise ConfigError(f"methods.{name}: failed with {type(error).__name__}: {error}") from error
            if reason is not None:
                raise ConfigError(f"methods.{name}: {reason}")
    return found


def unprotected(policy: Policy, config: Config) -> str | None:
    """Why a server's config does not give the protection that a site's policy requires; None where it does."""
    checks = (find(name).check_policy for name in BUILT_IN)
    reasons = (check(policy, config) for check in checks if check is not None)
    return next((reason for reason in reasons if reason is not None), None)


def server_methods(setup: ServerSetup) -> list[ServerMethod]:
    """The server's halves of all capabilities that the config switches on."""
    halves = [find(name).server for name in switched_on(setup.config)]
    made = [method for half in halves if half is not None and (method := half(setup)) is not None]
    _check_readers(made)
    return made


def _check_readers(methods: Sequence[ServerMethod]) -> None:
    """Raise for a method that reads single updates beside one that collects them so that nobody can."""
    hiding = next((one.name for one in methods if one.hides_updates), None)
    reading = next((one.name for one in methods if one.reads_updates), None)
    if hiding and reading:
        raise ConfigError(f"{reading}: reads single updates, which {hiding} hides; leave one of them out")


def aggregator(config: Config, aggregation: AggregationConfig | None = None) -> Callable[[Weights, Extra], Aggregator]:
    """The aggregation rule of a config, or another one for it; a ConfigError with the known ones where there is none.

    Where scopes have rules of their own, it is one that has them all.
    """
    aggregation = config.federation.aggregation if aggregation is None else aggregation
    made = [_rule(config, rule, key) for key, rule in aggregation.rules().items()]
    if len(made) == 1:
        return made[0]
    by_scope: Callable[..., Callable[[Weights, Extra], Aggregator]] = import_module(BY_SCOPE).ByScope
    return by_scope(list(zip([*aggregation.scopes, "*"], [*made[1:], made[0]], strict=True)))


def _rule(config: Config, settings: RuleConfig, key: str) -> Callable[[Weights, Extra], Aggregator]:
    """The rule that a key of a config names, with its options."""
    name = settings.rule
    if name in AGGREGATORS:
        module, leaf = AGGREGATORS[name]
        built_in: Callable[..., Aggregator] = getattr(import_module(module), leaf)
        return partial(built_in, hostile=settings.hostile or HOSTILE) if name in HOSTILE_RULES else built_in
    rule = find(name).aggregator if name not in BUILT_IN and is_known(name) else None
    if rule is None:
        others = [other for other in names() if other not in BUILT_IN and find(other).aggregator is not None]
        known = did_you_mean(name, [*AGGREGATORS, *others])
        raise ConfigError(f"{key}: found {shown(name)}, no rule is called so; {known}")
    return partial(rule, options=options_of(config, name)) if find(name).options is not None else rule


def is_task_kind(name: str) -> bool:
    """Whether there is a kind of task of that name; of other packages only the one of that name is imported."""
    return name in TASK_KINDS or (name not in BUILT_IN and is_known(name) and find(name).task_kind is not None)


def task_kinds() -> list[str]:
    """The names of all kinds of tasks, those in the package first."""
    return [*TASK_KINDS, *(name for name in names() if name not in TASK_KINDS and is_task_kind(name))]


def task_kind(name: str, where: str = "kind") -> TaskKind:
    """The kind of task of that name, of which there is one object; a ConfigError with the known ones otherwise."""
    if name not in _KINDS:
        if not is_task_kind(name):
            near = did_you_mean(name, task_kinds())
            raise ConfigError(f"{where}: found {shown(name)}, no kind of task is called so; {near}")
        module, leaf = TASK_KINDS.get(name, ("", ""))
        made: type[TaskKind] | None = getattr(import_module(module), leaf) if module else find(name).task_kind
        assert made is not None
        missing = sorted(getattr(made, "__abstractmethods__", ()))
        if missing:
            raise ConfigError(f"{where}: the kind of task {name} does not say {', '.join(missing)}; its package must")
        _KINDS[name] = made()
    return _KINDS[name]


def trackers(config: Config, folder: Path) -> dict[str, Tracker]:
    """The trackers that a config switches on, opened for a run's folder.

    Those in the package are each a process that reads the folder. One whose library is missing says so at the first
    event, and the run goes on.
    """
    made: dict[str, Tracker] = {}
    for key, name in [*(("methods", name) for name in config.methods), *(("track", name) for name in config.track)]:
        if key == "track" and name in TRACKERS:
            made[name] = import_module(SENDER).Follower(folder, name, missing_library(name))
            continue
        make = find(name).tracker
        if make is not None:
            try:
                made[name] = make(
                    options_of(config, name) if key == "methods" else tracker_options(config, name), folder
                )
            except OSError as error:
                raise ConfigError(f"{key}.{name}: cannot begin ({error.strerror or error})") from error
    return made


def tracker_options(config: Config, name: str, given: Mapping[str, Any] | None = None) -> Any:
    """The checked options of a tracker: those that a config has for it under `track`, or other ones."""
    options = config.track.get(name, {}) if given is None else given
    if name in TRACKERS:
        return _checked(import_module(TRACKERS[name][0]).Options, options, f"track.{name}")
    capability = find(name) if name not in BUILT_IN and is_known(name) else None
    if capability is None or capability.tracker is None or capability.options is None:
        raise ConfigError(f"track.{name}: no tracker is called so; {did_you_mean(name, list(TRACKERS))}")
    return _checked(capability.options, options, f"track.{name}")


def tracker_opener(name: str) -> Any:
    """What opens a run in the store of a tracker that is in the package; its library is imported when it is called."""
    if name not in TRACKERS:
        raise ConfigError(f"no tracker is called {shown(name)}; {did_you_mean(name, list(TRACKERS))}")
    module, leaf, _ = TRACKERS[name]
    return getattr(import_module(module), leaf)


def missing_library(name: str) -> str | None:
    """The line about a tracker whose library is not installed; None where it is."""
    return None if find_spec(TRACKERS[name][2]) else needs_extra(f"track.{name}", TRACKERS[name][2], TRACKERS[name][2])


def plugin_modules() -> list[str]:
    """The modules of registered capabilities, which worker processes must import; entry points are found anywhere."""
    halves = [
        half
        for name, one in _REGISTERED.items()
        if name not in _LOADED
        for half in (one.local, one.server, one.aggregator, one.task_kind, one.update_filter)
        if half is not None
    ]
    return sorted({half.__module__ for half in halves})


def is_stackable(methods: Iterable[str], num_tasks: int) -> bool:
    """Whether clients with these methods may train as one computation; a method that says nothing may not.

    A filter has no part in training, so it may.
    """
    found = [find(name) for name in methods]
    training = [one.local for one in found if one.local is not None or one.update_filter is None]
    halves = [getattr(local, "stacked", None) for local in training]
    return all(half is not None and (num_tasks == 1 or half.knows_several_tasks) for half in halves)


def stacked_methods(methods: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """The halves of these methods for clients that train as one computation; all of them have one."""
    halves = [(getattr(find(name).local, "stacked", None), name) for name in sorted(methods, key=_rank)]
    return [half(methods[name]) for half, name in halves if half is not None]


def constraints(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Those of a client's methods that hold values to something whoever trains them, as pruning does."""
    return {name: given for name, given in methods.items() if getattr(find(name).local, "is_constraint", False)}


def local_methods(methods: Mapping[str, Mapping[str, Any]]) -> list[LocalMethod]:
    """The client's halves of the capabilities that a job names, in the order of `names`."""
    made = []
    for name in sorted(methods, key=_rank):
        capability = find(name)
        if capability.local is not None:
            made.append(capability.local(methods[name]))
        elif capability.update_filter is None:
            raise ConfigError(f"the capability {name} has no client's half")
    return made


def update_filters(methods: Mapping[str, Mapping[str, Any]], built_in: Sequence[str] = ()) -> list[UpdateFilter]:
    """The filters of the capabilities that a job names, in the order of `names`, then those of UPDATE_FILTERS."""
    halves = [(find(name).update_filter, name) for name in sorted(methods, key=_rank)]
    made = [half(methods[name]) for half, name in halves if half is not None]
    for name in built_in:
        module, leaf = UPDATE_FILTERS[name]
        made.append(getattr(import_module(module), leaf)({}))
    return made


def scoring_methods(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Those of a client's methods that have a part in evaluation jobs: filters of what clients scored."""
    return {name: dict(given) for name, given in methods.items() if getattr(find(name).update_filter, "scores", False)}


def _rank(name: str) -> tuple[int, str]:
    order = list(BUILT_IN)
    return (order.index(name), "") if name in BUILT_IN else (len(order), name)


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group=GROUP)}
