"""Federated multi-task learning for text: one shared encoder, one head per task, many owners of data."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Every public name and the module that has it, in the order of docs/api.md. A module is imported when one of its names
# is first used: `import fedmtl` loads no numeric library. A new name stands here and in the imports below, which type
# checkers read.
_SECTIONS = {
    "Runs": {
        "run": "fedmtl.api",
        "Run": "fedmtl.api",
        "Prediction": "fedmtl.predict.answers",
        "Scores": "fedmtl.tasks.metrics",
        "RunSummary": "fedmtl.runs.summary",
        "RunFolder": "fedmtl.runs.folder",
        "LoadedRun": "fedmtl.predict.run",
        "load_run": "fedmtl.predict.run",
        "start_run": "fedmtl.experiment.run",
        "resume_run": "fedmtl.experiment.run",
    },
    "Configs": {
        "load_config": "fedmtl.config.file",
        "demo_config": "fedmtl.config.file",
        "dump_config": "fedmtl.config.file",
        "Config": "fedmtl.config",
    },
    "The guide's classes": {
        "MTLServerModel": "fedmtl.federation.guide",
        "MTLAggregator": "fedmtl.federation.guide",
    },
    "The records of a federation": {
        "Task": "fedmtl.tasks.task",
        "Key": "fedmtl.sharing.plan",
        "SharingPlan": "fedmtl.sharing.plan",
        "Job": "fedmtl.federation.messages",
        "Codecs": "fedmtl.federation.messages",
        "Update": "fedmtl.federation.messages",
        "Traffic": "fedmtl.federation.messages",
        "Failure": "fedmtl.federation.messages",
        "ClientInfo": "fedmtl.federation.messages",
        "State": "fedmtl.federation.messages",
        "Progress": "fedmtl.federation.messages",
        "Round": "fedmtl.federation.messages",
        "Evaluation": "fedmtl.federation.messages",
    },
    "Capabilities of other packages": {
        "Engine": "fedmtl.federation.messages",
        "Capability": "fedmtl.capabilities",
        "register": "fedmtl.capabilities",
        "options_of": "fedmtl.capabilities",
        "Extra": "fedmtl.sharing.plan",
        "ServerMethod": "fedmtl.federation.server_method",
        "ServerSetup": "fedmtl.federation.server_method",
        "RoundSettings": "fedmtl.federation.server_method",
        "Step": "fedmtl.federation.server_method",
        "LocalMethod": "fedmtl.training.local_method",
        "LocalClient": "fedmtl.training.local_method",
        "LocalStep": "fedmtl.training.local_method",
        "Part": "fedmtl.training.local_method",
        "Finished": "fedmtl.training.local_method",
        "StackedMethod": "fedmtl.training.stacked.method",
        "Aggregator": "fedmtl.federation.aggregators.protocol",
        "WaitingUpdates": "fedmtl.federation.aggregators.protocol",
        "UpdateFilter": "fedmtl.federation.filters.protocol",
        "FilterClient": "fedmtl.federation.filters.protocol",
        "Tracker": "fedmtl.runs.log",
        "Event": "fedmtl.runs.event_lines",
        "OtherEvent": "fedmtl.runs.event_lines",
        "event_kind": "fedmtl.runs.event_lines",
        "TaskKind": "fedmtl.tasks.kinds.protocol",
        "LabelledKind": "fedmtl.tasks.kinds.classification",
        "Answer": "fedmtl.tasks.kinds.protocol",
        "PlainHead": "fedmtl.tasks.kinds.protocol",
        "Sums": "fedmtl.tasks.metrics",
        "divergences": "fedmtl.methods.smart",
    },
    "Errors": {
        "FedmtlError": "fedmtl.errors",
        "ConfigError": "fedmtl.errors",
        "DataError": "fedmtl.errors",
        "ModelError": "fedmtl.errors",
        "PolicyError": "fedmtl.errors",
        "RunNotFound": "fedmtl.errors",
        "WireError": "fedmtl.errors",
        "CannotContinue": "fedmtl.errors",
        "Interrupted": "fedmtl.experiment.run",
    },
}
_PUBLIC = {name: module for names in _SECTIONS.values() for name, module in names.items()}
__all__ = list(_PUBLIC)

if TYPE_CHECKING:
    from fedmtl.api import Run as Run
    from fedmtl.api import run as run
    from fedmtl.capabilities import Capability as Capability
    from fedmtl.capabilities import options_of as options_of
    from fedmtl.capabilities import register as register
    from fedmtl.config import Config as Config
    from fedmtl.config.file import demo_config as demo_config
    from fedmtl.config.file import dump_config as dump_config
    from fedmtl.config.file import load_config as load_config
    from fedmtl.errors import CannotContinue as CannotContinue
    from fedmtl.errors import ConfigError as ConfigError
    from fedmtl.errors import DataError as DataError
    from fedmtl.errors import FedmtlError as FedmtlError
    from fedmtl.errors import ModelError as ModelError
    from fedmtl.errors import PolicyError as PolicyError
    from fedmtl.errors import RunNotFound as RunNotFound
    from fedmtl.errors import WireError as WireError
    from fedmtl.experiment.run import Interrupted as Interrupted
    from fedmtl.experiment.run import resume_run as resume_run
    from fedmtl.experiment.run import start_run as start_run
    from fedmtl.federation.aggregators.protocol import Aggregator as Aggregator
    from fedmtl.federation.aggregators.protocol import WaitingUpdates as WaitingUpdates
    from fedmtl.federation.filters.protocol import FilterClient as FilterClient
    from fedmtl.federation.filters.protocol import UpdateFilter as UpdateFilter
    from fedmtl.federation.guide import MTLAggregator as MTLAggregator
    from fedmtl.federation.guide import MTLServerModel as MTLServerModel
    from fedmtl.federation.messages import ClientInfo as ClientInfo
    from fedmtl.federation.messages import Codecs as Codecs
    from fedmtl.federation.messages import Engine as Engine
    from fedmtl.federation.messages import Evaluation as Evaluation
    from fedmtl.federation.messages import Failure as Failure
    from fedmtl.federation.messages import Job as Job
    from fedmtl.federation.messages import Progress as Progress
    from fedmtl.federation.messages import Round as Round
    from fedmtl.federation.messages import State as State
    from fedmtl.federation.messages import Traffic as Traffic
    from fedmtl.federation.messages import Update as Update
    from fedmtl.federation.server_method import RoundSettings as RoundSettings
    from fedmtl.federation.server_method import ServerMethod as ServerMethod
    from fedmtl.federation.server_method import ServerSetup as ServerSetup
    from fedmtl.federation.server_method import Step as Step
    from fedmtl.methods.smart import divergences as divergences
    from fedmtl.predict.answers import Prediction as Prediction
    from fedmtl.predict.run import LoadedRun as LoadedRun
    from fedmtl.predict.run import load_run as load_run
    from fedmtl.runs.event_lines import Event as Event
    from fedmtl.runs.event_lines import OtherEvent as OtherEvent
    from fedmtl.runs.event_lines import event_kind as event_kind
    from fedmtl.runs.folder import RunFolder as RunFolder
    from fedmtl.runs.log import Tracker as Tracker
    from fedmtl.runs.summary import RunSummary as RunSummary
    from fedmtl.sharing.plan import Extra as Extra
    from fedmtl.sharing.plan import Key as Key
    from fedmtl.sharing.plan import SharingPlan as SharingPlan
    from fedmtl.tasks.kinds.classification import LabelledKind as LabelledKind
    from fedmtl.tasks.kinds.protocol import Answer as Answer
    from fedmtl.tasks.kinds.protocol import PlainHead as PlainHead
    from fedmtl.tasks.kinds.protocol import TaskKind as TaskKind
    from fedmtl.tasks.metrics import Scores as Scores
    from fedmtl.tasks.metrics import Sums as Sums
    from fedmtl.tasks.task import Task as Task
    from fedmtl.training.local_method import Finished as Finished
    from fedmtl.training.local_method import LocalClient as LocalClient
    from fedmtl.training.local_method import LocalMethod as LocalMethod
    from fedmtl.training.local_method import LocalStep as LocalStep
    from fedmtl.training.local_method import Part as Part
    from fedmtl.training.stacked.method import StackedMethod as StackedMethod


if not TYPE_CHECKING:  # a type checker that sees this takes every name for a public one

    def __getattr__(name: str) -> Any:
        if name not in _PUBLIC:
            raise AttributeError(f"module 'fedmtl' has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
