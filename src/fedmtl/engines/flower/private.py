"""The names of Flower that are not public, in one list: what a new version of it may take away.

All of them belong to this project's port and to Flower's simulation; an app on a stock SuperLink uses none. Each is
imported when it is first used: the process of a site that has the line to the server loads nothing of a server.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedmtl.errors import FedmtlError

if TYPE_CHECKING:
    from flwr.app.message import remove_content_from_message as remove_content_from_message
    from flwr.app.message.arraychunk import ArrayChunk as ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    from flwr.common.constant import HEARTBEAT_INTERVAL_INF as HEARTBEAT_INTERVAL_INF
    from flwr.common.constant import NOOP_ACCOUNT_NAME as NOOP_ACCOUNT_NAME
    from flwr.common.constant import NOOP_FLWR_AID as NOOP_FLWR_AID
    from flwr.common.constant import SUPERLINK_NODE_ID as SUPERLINK_NODE_ID
    from flwr.common.serde import message_from_proto as message_from_proto
    from flwr.common.serde import message_to_proto as message_to_proto
    from flwr.proto.fleet_pb2 import ActivateNodeRequest as ActivateNodeRequest
    from flwr.proto.fleet_pb2 import ActivateNodeResponse as ActivateNodeResponse
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest as DeactivateNodeRequest
    from flwr.proto.fleet_pb2 import DeactivateNodeResponse as DeactivateNodeResponse
    from flwr.proto.fleet_pb2 import PullMessagesRequest as PullMessagesRequest
    from flwr.proto.fleet_pb2 import PullMessagesResponse as PullMessagesResponse
    from flwr.proto.fleet_pb2 import PushMessagesRequest as PushMessagesRequest
    from flwr.proto.fleet_pb2 import PushMessagesResponse as PushMessagesResponse
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest as SendNodeHeartbeatRequest
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse as SendNodeHeartbeatResponse
    from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as ConfirmMessageReceivedRequest
    from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse as ConfirmMessageReceivedResponse
    from flwr.proto.message_pb2 import Message as Message
    from flwr.proto.message_pb2 import ObjectTree as ObjectTree
    from flwr.proto.message_pb2 import PullObjectRequest as PullObjectRequest
    from flwr.proto.message_pb2 import PullObjectResponse as PullObjectResponse
    from flwr.proto.message_pb2 import PushObjectRequest as PushObjectRequest
    from flwr.proto.message_pb2 import PushObjectResponse as PushObjectResponse
    from flwr.proto.node_pb2 import Node as Node
    from flwr.server.superlink.fleet.vce.metrics import VceMetrics as VceMetrics
    from flwr.server.superlink.fleet.vce.vce_api import start_vce as start_vce
    from flwr.server.superlink.linkstate import LinkStateFactory as LinkStateFactory
    from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState as InMemoryLinkState
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME as FLWR_IN_MEMORY_DB_NAME
    from flwr.supercore.constant import NOOP_FEDERATION_ID as NOOP_FEDERATION_ID
    from flwr.supercore.constant import NodeStatus as NodeStatus
    from flwr.supercore.constant import TaskType as TaskType
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects as get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_object import get_object_body as get_object_body
    from flwr.supercore.inflatable.inflatable_object import (
        get_object_children_ids_from_object_content as get_object_children_ids_from_object_content,
    )
    from flwr.supercore.inflatable.inflatable_object import get_object_id as get_object_id
    from flwr.supercore.inflatable.inflatable_object import get_object_tree as get_object_tree
    from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute as no_object_id_recompute
    from flwr.supercore.object_store import NoObjectInStoreError as NoObjectInStoreError
    from flwr.supercore.object_store import ObjectStoreFactory as ObjectStoreFactory
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore as InMemoryObjectStore
    from flwr.supercore.task_identity import TaskIdentity as TaskIdentity
    from flwr.superlink.federation import NoOpFederationManager as NoOpFederationManager
    from flwr.superlink.grid.inmemory_grid import InMemoryGrid as InMemoryGrid

PRIVATE: dict[str, tuple[str, ...]] = {
    "flwr.app.message": ("remove_content_from_message",),
    "flwr.app.message.arraychunk": ("ArrayChunk",),
    "flwr.common.constant": (
        "FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE",
        "HEARTBEAT_INTERVAL_INF",
        "NOOP_ACCOUNT_NAME",
        "NOOP_FLWR_AID",
        "SUPERLINK_NODE_ID",
    ),
    "flwr.common.serde": (
        "message_from_proto",
        "message_to_proto",
    ),
    "flwr.proto.fleet_pb2": (
        "ActivateNodeRequest",
        "ActivateNodeResponse",
        "DeactivateNodeRequest",
        "DeactivateNodeResponse",
        "PullMessagesRequest",
        "PullMessagesResponse",
        "PushMessagesRequest",
        "PushMessagesResponse",
    ),
    "flwr.proto.heartbeat_pb2": (
        "SendNodeHeartbeatRequest",
        "SendNodeHeartbeatResponse",
    ),
    "flwr.proto.message_pb2": (
        "ConfirmMessageReceivedRequest",
        "ConfirmMessageReceivedResponse",
        "Message",
        "ObjectTree",
        "PullObjectRequest",
        "PullObjectResponse",
        "PushObjectRequest",
        "PushObjectResponse",
    ),
    "flwr.proto.node_pb2": ("Node",),
    "flwr.server.superlink.fleet.vce.metrics": ("VceMetrics",),
    "flwr.server.superlink.fleet.vce.vce_api": ("start_vce",),
    "flwr.server.superlink.linkstate": ("LinkStateFactory",),
    "flwr.server.superlink.linkstate.in_memory_linkstate": ("InMemoryLinkState",),
    "flwr.supercore.constant": (
        "FLWR_IN_MEMORY_DB_NAME",
        "NOOP_FEDERATION_ID",
        "NodeStatus",
        "TaskType",
    ),
    "flwr.supercore.inflatable.inflatable_object": (
        "get_all_nested_objects",
        "get_object_body",
        "get_object_children_ids_from_object_content",
        "get_object_id",
        "get_object_tree",
        "no_object_id_recompute",
    ),
    "flwr.supercore.object_store": (
        "NoObjectInStoreError",
        "ObjectStoreFactory",
    ),
    "flwr.supercore.object_store.in_memory_object_store": ("InMemoryObjectStore",),
    "flwr.supercore.task_identity": ("TaskIdentity",),
    "flwr.superlink.federation": ("NoOpFederationManager",),
    "flwr.superlink.grid.inmemory_grid": ("InMemoryGrid",),
}
MODULES = {name: module for module, names in PRIVATE.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = find_private(name)
    globals()[name] = found
    return found


def find_private(name: str) -> Any:
    """Import one of the names; a FedmtlError says which one the installed Flower does not have."""
    try:
        return getattr(import_module(MODULES[name]), name)
    except (ImportError, AttributeError) as error:
        raise FedmtlError(
            f"{MODULES[name]}.{name}: the installed flwr does not have it ({error}); install a version that this"
            " project is tested with: pip install 'flwr>=1.40,<1.43'"
        ) from error


def missing() -> list[str]:
    """Return every name that the installed Flower does not have, with its module."""
    lacking = []
    for name, module in MODULES.items():
        try:
            find_private(name)
        except FedmtlError:
            lacking.append(f"{module}.{name}")
    return lacking
