"""Launch attributes, by the driver's names in lower case: what a launch or a kernel node asks for beyond its grid.

Source: CUDA Driver API, ``CUlaunchAttributeID`` and ``CUlaunchAttributeValue``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypedDict

import numpy as np

from .device import Event
from .driver import Driver
from .memory import Buffer

__all__ = ["AccessPolicyWindow", "Attributes", "ProgrammaticEvent"]


class AccessPolicyWindow(NamedTuple):
    """How accesses to ``buffer`` treat the L2 cache: ``hit`` for a ``hit_ratio`` of them, ``miss`` for the rest.

    Properties are ``"normal"``, ``"streaming"`` and ``"persisting"``; ``miss`` cannot persist.
    """

    buffer: Buffer
    hit_ratio: float = 1.0
    hit: str = "persisting"
    miss: str = "streaming"


class ProgrammaticEvent(NamedTuple):
    """An event recorded when every block has triggered (``griddepcontrol.launch_dependents``) or ended.

    With ``at_block_start`` the start of a block counts as its trigger. The event must be made with timing=False.
    """

    event: Event
    at_block_start: bool = False


class Attributes(TypedDict, total=False):
    """The attributes by name. A launch takes them all but ``device_updatable``; a node none that names a stream's
    order (``programmatic``, ``programmatic_event``, ``launch_completion_event``): in a graph edges say that."""

    cluster: int | tuple[int, ...]  # blocks of a cluster, in up to three dimensions; the grid must be a multiple
    preferred_cluster: int | tuple[int, ...]  # a larger cluster, where there is room; a multiple of ``cluster``
    cluster_scheduling: str  # "default", "spread" or "load_balancing"
    cooperative: bool  # all blocks are resident at once, so that they may wait for each other
    priority: int  # as of streams: lower is more urgent
    programmatic: bool  # may start before the work before it in the stream ends (griddepcontrol.wait)
    programmatic_event: ProgrammaticEvent
    launch_completion_event: Event  # recorded when every block has started; timing=False
    mem_sync_domain: str  # "default" or "remote"
    mem_sync_domain_map: tuple[int, int]  # physical domains of (default, remote)
    access_policy_window: AccessPolicyWindow
    shared_carveout_percent: int  # share of the L1 that is to be shared memory: 0..100, -1 for the default
    device_updatable: bool  # kernels may change the node; its handle for them is ``node.device_handle``
    nvlink_centric: bool  # schedule for NVLink utilisation


LAUNCH_ONLY = {"programmatic", "programmatic_event", "launch_completion_event"}
NODE_ONLY = {"device_updatable"}


def dim3(value: Any, what: str) -> tuple[int, int, int]:
    """Up to three positive integers, the missing ones 1. `ValueError` or `TypeError` names ``what``."""
    given = value if isinstance(value, tuple) else (value,)
    if not 1 <= len(given) <= 3:
        raise ValueError(f"{what}: wanted one to three extents, got {value!r}")
    for extent in given:
        if isinstance(extent, bool) or not hasattr(extent, "__index__"):
            raise TypeError(f"{what}: wanted an integer or a tuple of integers, got {value!r}")
        if extent < 1:
            raise ValueError(f"{what}: every extent must be at least 1, got {value!r}")
    x, y, z = (*(int(n) for n in given), 1, 1)[:3]
    return x, y, z


def _choice(driver: Driver, enum: str, prefix: str, value: str, what: str) -> Any:
    try:
        return getattr(driver, enum).__members__[f"{prefix}{value.upper()}"]
    except (KeyError, AttributeError):
        names = [m.name.removeprefix(prefix).lower() for m in getattr(driver, enum) if m.name.startswith(prefix)]
        raise ValueError(f"{what}: wanted one of {', '.join(names)}, got {value!r}") from None


def _flag(field: str) -> Callable[[Driver, Any, Any], None]:
    def put(driver: Driver, to: Any, value: Any) -> None:
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{field}: wanted True or False, got {value!r}")
        setattr(to, field, int(value))

    return put


def _put_cluster(field: str) -> Callable[[Driver, Any, Any], None]:
    def put(driver: Driver, to: Any, value: Any) -> None:
        extents = getattr(to, field)
        extents.x, extents.y, extents.z = dim3(value, "cluster")

    return put


def _put_scheduling(driver: Driver, to: Any, value: Any) -> None:
    prefix = "CU_CLUSTER_SCHEDULING_POLICY_"
    to.clusterSchedulingPolicyPreference = _choice(
        driver, "CUclusterSchedulingPolicy", prefix, value, "cluster_scheduling"
    )


def _put_domain(driver: Driver, to: Any, value: Any) -> None:
    to.memSyncDomain = _choice(driver, "CUlaunchMemSyncDomain", "CU_LAUNCH_MEM_SYNC_DOMAIN_", value, "mem_sync_domain")


def _put_domain_map(driver: Driver, to: Any, value: Any) -> None:
    if not isinstance(value, tuple) or len(value) != 2:
        raise TypeError("wanted two domains, (default, remote)")
    to.memSyncDomainMap.default_, to.memSyncDomainMap.remote = value


def _put_window(driver: Driver, to: Any, value: AccessPolicyWindow) -> None:
    window, prefix = to.accessPolicyWindow, "CU_ACCESS_PROPERTY_"
    if not 0 <= value.hit_ratio <= 1:
        raise ValueError(f"access_policy_window.hit_ratio: wanted 0..1, got {value.hit_ratio!r}")
    window.base_ptr, window.num_bytes = value.buffer.address, value.buffer.nbytes
    window.hitRatio = value.hit_ratio
    window.hitProp = _choice(driver, "CUaccessProperty", prefix, value.hit, "access_policy_window.hit")
    window.missProp = _choice(driver, "CUaccessProperty", prefix, value.miss, "access_policy_window.miss")


def _put_programmatic_event(driver: Driver, to: Any, value: ProgrammaticEvent) -> None:
    to.programmaticEvent.event = value.event.handle
    to.programmaticEvent.triggerAtBlockStart = int(value.at_block_start)


def _put_completion_event(driver: Driver, to: Any, value: Event) -> None:
    to.launchCompletionEvent.event = value.handle


def _put_updatable(driver: Driver, to: Any, value: bool) -> None:
    if not isinstance(value, bool):
        raise TypeError("wanted True or False")
    to.deviceUpdatableKernelNode.deviceUpdatable = int(value)


def _put_priority(driver: Driver, to: Any, value: int) -> None:
    if isinstance(value, bool):
        raise TypeError("wanted an integer")
    to.priority = value


def _put_carveout(driver: Driver, to: Any, value: int) -> None:
    if not -1 <= value <= 100:
        raise ValueError(f"shared_carveout_percent: wanted -1..100, got {value!r}")
    to.sharedMemCarveout = value


# name -> (attribute id without its prefix, how to write it)
_KNOWN: dict[str, tuple[str, Callable[[Driver, Any, Any], None]]] = {
    "cluster": ("CLUSTER_DIMENSION", _put_cluster("clusterDim")),
    "preferred_cluster": ("PREFERRED_CLUSTER_DIMENSION", _put_cluster("preferredClusterDim")),
    "cluster_scheduling": ("CLUSTER_SCHEDULING_POLICY_PREFERENCE", _put_scheduling),
    "cooperative": ("COOPERATIVE", _flag("cooperative")),
    "priority": ("PRIORITY", _put_priority),
    "programmatic": ("PROGRAMMATIC_STREAM_SERIALIZATION", _flag("programmaticStreamSerializationAllowed")),
    "programmatic_event": ("PROGRAMMATIC_EVENT", _put_programmatic_event),
    "launch_completion_event": ("LAUNCH_COMPLETION_EVENT", _put_completion_event),
    "mem_sync_domain": ("MEM_SYNC_DOMAIN", _put_domain),
    "mem_sync_domain_map": ("MEM_SYNC_DOMAIN_MAP", _put_domain_map),
    "access_policy_window": ("ACCESS_POLICY_WINDOW", _put_window),
    "shared_carveout_percent": ("PREFERRED_SHARED_MEMORY_CARVEOUT", _put_carveout),
    "device_updatable": ("DEVICE_UPDATABLE_KERNEL_NODE", _put_updatable),
    "nvlink_centric": ("NVLINK_UTIL_CENTRIC_SCHEDULING", _flag("nvlinkUtilCentricScheduling")),
}


def encode(driver: Driver, attributes: Mapping[str, Any], *, node: bool) -> Iterator[tuple[Any, Any]]:
    """Each attribute as (id, value struct). `TypeError` for a name that is unknown or means nothing here."""
    place = "kernel node" if node else "launch"
    value_type = driver.CUkernelNodeAttrValue if node else driver.CUlaunchAttributeValue
    for name, value in attributes.items():
        if name not in _KNOWN:
            raise TypeError(f"no launch attribute {name!r}; there are {', '.join(_KNOWN)}")
        if name in (LAUNCH_ONLY if node else NODE_ONLY):
            why = (
                "edges with ports order the nodes of a graph (after=node.port(...))"
                if node
                else "it is for graph nodes"
            )
            raise TypeError(f"attribute {name!r} means nothing on a {place}: {why}")
        identity, put = _KNOWN[name]
        struct = value_type()
        try:
            put(driver, struct, value)
        except (TypeError, AttributeError) as error:
            raise TypeError(f"attribute {name!r}: {value!r} does not fit ({error})") from None
        yield driver.CUlaunchAttributeID.__members__[f"CU_LAUNCH_ATTRIBUTE_{identity}"], struct


def held(attributes: Mapping[str, Any]) -> tuple[object, ...]:
    """What the attributes refer to and must outlive the launch."""
    refers = []
    for value in attributes.values():
        for part in value if isinstance(value, tuple) else (value,):
            box = getattr(part, "box", None)
            if box is not None:
                refers.append(box)
    return tuple(refers)
