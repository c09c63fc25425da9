"""Attributes of devices and functions, launches, occupancy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .world import World, begin_capture, case, cluster, driver, end_capture, launch, must, status


def put_attribute(world: World, name: str, value: int) -> str:
    attribute = driver.CUfunction_attribute.__members__[f"CU_FUNC_ATTRIBUTE_{name}"]
    return status(driver.cuFuncSetAttribute(world.empty, attribute, value))


def attribute_of(world: World, name: str) -> int:
    attribute = driver.CUfunction_attribute.__members__[f"CU_FUNC_ATTRIBUTE_{name}"]
    return int(must(driver.cuFuncGetAttribute(attribute, world.empty)))


def preferred(x: int, y: int = 1, z: int = 1) -> tuple[str, Callable[[Any], None]]:
    def put(value: Any) -> None:
        value.preferredClusterDim.x, value.preferredClusterDim.y, value.preferredClusterDim.z = (x, y, z)

    return ("PREFERRED_CLUSTER_DIMENSION", put)


@case
def device_attributes(world: World) -> Any:
    def value(attribute: Any) -> Any:
        result = driver.cuDeviceGetAttribute(attribute, world.device)
        return status(result) if result[0] else result[1]

    members = driver.CUdevice_attribute.__members__  # also the second names
    return {name.removeprefix("CU_DEVICE_ATTRIBUTE_"): value(attribute) for name, attribute in members.items()}


@case
def func_attributes(world: World) -> Any:
    return {
        name: {
            attribute.name[len("CU_FUNC_ATTRIBUTE_") :]: driver.cuFuncGetAttribute(attribute, getattr(world, name))[1]
            for attribute in driver.CUfunction_attribute
            if attribute.name != "CU_FUNC_ATTRIBUTE_MAX"
        }
        for name in ("empty", "bounded", "stat")
    }


@case
def priorities(world: World) -> Any:
    return [
        driver.cuCtxGetStreamPriorityRange()[1:],
        driver.cuStreamGetPriority(must(driver.cuStreamCreateWithPriority(1, -100)))[1],
        driver.cuStreamGetPriority(must(driver.cuStreamCreateWithPriority(1, 100)))[1],
        status(driver.cuStreamCreate(5)),
        status(driver.cuEventCreate(4)),
        status(driver.cuEventCreate(8)),
        status(driver.cuEventCreate(6)),
        status(driver.cuEventCreate(1)),
    ]


@case
def launch_extents(world: World) -> Any:
    return [
        launch(world),
        launch(world, block=(1025, 1, 1)),
        launch(world, block=(0, 1, 1)),
        launch(world, grid=(0, 1, 1)),
        launch(world, grid=(1, 65536, 1)),
        launch(world, block=(1, 1, 65)),
        launch(world, block=(64, 32, 1)),
        launch(world, world.bounded, block=(129, 1, 1)),
        launch(world, world.bounded, block=(64, 4, 1)),
    ]


@case
def launch_shared(world: World) -> Any:
    maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    return [
        launch(world, shared=49152),
        launch(world, shared=49153),
        status(driver.cuFuncSetAttribute(world.empty, maximum, 232448)),
        launch(world, shared=232448),
        status(driver.cuFuncSetAttribute(world.empty, maximum, 232449)),
        launch(world, shared=232449),
        status(driver.cuFuncSetAttribute(world.empty, maximum, -1)),
        status(driver.cuFuncSetAttribute(world.stat, maximum, 232448)),
        status(driver.cuFuncSetAttribute(world.stat, maximum, 232048)),
        status(driver.cuFuncSetAttribute(world.empty, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, 5)),
    ]


@case
def launch_cluster(world: World) -> Any:
    return [
        launch(world, grid=(4, 1, 1), attrs=[cluster(2)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(3)]),
        launch(world, grid=(16, 1, 1), attrs=[cluster(16)]),
        launch(world, grid=(8, 1, 1), attrs=[cluster(8)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(0)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(0, 0, 0)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(1), preferred(2)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(2), preferred(3)]),
        launch(
            world,
            grid=(4, 1, 1),
            attrs=[("NVLINK_UTIL_CENTRIC_SCHEDULING", lambda value: setattr(value, "nvlinkUtilCentricScheduling", 1))],
        ),
        launch(
            world,
            attrs=[
                (
                    "DEVICE_UPDATABLE_KERNEL_NODE",
                    lambda value: setattr(value.deviceUpdatableKernelNode, "deviceUpdatable", 1),
                )
            ],
        ),
        status(
            driver.cuFuncSetAttribute(
                world.empty, driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1
            )
        ),
        launch(world, grid=(16, 1, 1), attrs=[cluster(16)]),
        launch(world, grid=(32, 1, 1), attrs=[cluster(32)]),
    ]


@case
def launch_coop(world: World) -> Any:
    cooperative = ("COOPERATIVE", lambda value: setattr(value, "cooperative", 1))
    return [
        launch(world, attrs=[cooperative]),
        launch(world, grid=(132 * 32, 1, 1), attrs=[cooperative]),
        launch(world, grid=(132 * 32 + 1, 1, 1), attrs=[cooperative]),
        launch(world, grid=(132 * 2 + 1, 1, 1), block=(1024, 1, 1), attrs=[cooperative]),
    ]


@case
def launch_params(world: World) -> Any:
    return [
        status(driver.cuLaunchKernel(world.empty, 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuLaunchKernel(world.store, 1, 1, 1, 1, 1, 1, 0, world.stream, 0, 0)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def occupancy(world: World) -> Any:
    return [
        [
            must(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, block, shared))
            for function in (world.empty, world.bounded, world.stat)
            for block, shared in (
                (1, 0),
                (32, 0),
                (33, 0),
                (128, 0),
                (1024, 0),
                (32, 10000),
                (32, 100000),
                (32, 232448),
                (32, 300000),
            )
        ],
        status(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(world.empty, 0, 0)),
        driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(world.bounded, 129, 0)[1],
    ]


@case
def preferred_clusters(world: World) -> Any:
    answers: list[Any] = [
        launch(world, grid=(16, 1, 2), attrs=[cluster(x), preferred(*extents)])
        for x, extents in ((2, (3,)), (2, (16,)), (1, (8, 1, 2)), (1, (4, 1, 2)), (2, (0, 0, 0)), (2, (0, 1, 1)))
    ]
    answers.append(launch(world, grid=(16, 1, 1), attrs=[preferred(2)]))
    begin_capture(world.stream)
    answers.append(launch(world, grid=(16, 1, 1), attrs=[cluster(1), preferred(2)]))
    return [*answers, end_capture(world.stream)]


@case
def func_settings(world: World) -> Any:
    return [
        status(
            driver.cuFuncSetAttribute(
                world.empty, getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}"), value
            )
        )
        for name, value in (
            ("PREFERRED_SHARED_MEMORY_CARVEOUT", -1),
            ("PREFERRED_SHARED_MEMORY_CARVEOUT", 101),
            ("PREFERRED_SHARED_MEMORY_CARVEOUT", -2),
            ("NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 2),
            ("CLUSTER_SCHEDULING_POLICY_PREFERENCE", 3),
            ("REQUIRED_CLUSTER_WIDTH", 2),
        )
    ]


@case
def occupancy_too_wide(world: World) -> Any:
    result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(world.empty, 1025, 0)
    return [status(result), result[1]]


@case
def required(world: World) -> Any:
    """A kernel that is set to require a cluster."""
    answers: list[Any] = [put_attribute(world, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED", value) for value in (2, -1)]
    answers.append(attribute_of(world, "NON_PORTABLE_CLUSTER_SIZE_ALLOWED"))
    answers += [put_attribute(world, "REQUIRED_CLUSTER_WIDTH", value) for value in (-1, 2)]
    names = ("REQUIRED_CLUSTER_WIDTH", "REQUIRED_CLUSTER_HEIGHT", "CLUSTER_SIZE_MUST_BE_SET")
    answers += [attribute_of(world, name) for name in names]
    answers.append(launch(world, grid=(4, 1, 1)))
    names = ("REQUIRED_CLUSTER_HEIGHT", "REQUIRED_CLUSTER_DEPTH", "CLUSTER_SIZE_MUST_BE_SET")
    answers += [put_attribute(world, name, 1) for name in names]
    return [
        *answers,
        launch(world, grid=(4, 1, 1)),
        launch(world, grid=(3, 1, 1)),
        launch(world, grid=(4, 1, 1), attrs=[cluster(1)]),
        launch(world, grid=(4, 1, 1), attrs=[cluster(4)]),
    ]


@case
def compiled_cluster(world: World) -> Any:
    """A kernel that was compiled for a cluster."""
    text = b".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k() .reqnctapercluster 2, 1, 1 { ret; }\0"
    world.empty = must(driver.cuModuleGetFunction(must(driver.cuModuleLoadData(text)), b"k"))
    return [
        attribute_of(world, "CLUSTER_SIZE_MUST_BE_SET"),
        put_attribute(world, "REQUIRED_CLUSTER_WIDTH", 4),
        launch(world, grid=(4, 1, 1)),
        launch(world, grid=(4, 1, 1), attrs=[preferred(4)]),
    ]


@case
def preferred_too_large(world: World) -> Any:
    return launch(world, grid=(32, 1, 1), attrs=[cluster(2), preferred(32)])
