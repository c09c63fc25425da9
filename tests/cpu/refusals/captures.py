"""Events, memory operations of streams, and captures."""

from __future__ import annotations

from typing import Any

from .world import (
    HOST_FUNCTION,
    MODES,
    PTX,
    World,
    add_memset,
    begin_capture,
    case,
    driver,
    end_capture,
    fill,
    in_thread,
    instantiate,
    launch,
    must,
    status,
)


@case
def events(world: World) -> Any:
    answers = [
        status(driver.cuEventQuery(world.event)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
        status(driver.cuEventElapsedTime(world.event, world.event)),
    ]
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuEventRecord(world.untimed_event, world.stream))
    must(driver.cuStreamSynchronize(world.stream))
    never_recorded = must(driver.cuEventCreate(0))
    return [
        *answers,
        status(driver.cuEventElapsedTime(world.event, world.event)),
        status(driver.cuEventElapsedTime(world.event, world.untimed_event)),
        status(driver.cuEventElapsedTime(world.event, never_recorded)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 1)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 2)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 1)),
        status(driver.cuStreamWaitEvent(world.stream, world.event, 2)),
    ]


@case
def stream_ops(world: World) -> Any:
    return [
        status(driver.cuStreamWriteValue32(world.stream, world.memory, 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, driver.CUdeviceptr(int(world.memory) + 1), 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, driver.CUdeviceptr(5), 1, 0)),
        status(driver.cuStreamWriteValue64(world.stream, world.memory, 1, 0)),
        status(driver.cuStreamWaitValue32(world.stream, world.memory, 0, 0)),
        status(driver.cuStreamWaitValue32(world.stream, world.memory, 0, 7)),
        status(driver.cuStreamBatchMemOp(world.stream, 0, [], 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.pinned, 1, 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.host.ctypes.data, 1, 0)),
        status(driver.cuStreamSynchronize(world.stream)),
    ]


@case
def cap_basic(world: World) -> Any:
    begin_capture(world.stream)
    answers = [
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuStreamEndCapture(world.stream)),
        status(driver.cuStreamBeginCapture(driver.CUstream(0), driver.CUstreamCaptureMode(0))),
    ]
    begin_capture(world.stream)
    answers.append(status(driver.cuStreamBeginCapture(world.stream, driver.CUstreamCaptureMode(0))))
    answers.append(end_capture(world.stream))
    return answers


@case
def cap_query(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuStreamQuery(world.stream)),
        str(driver.cuStreamIsCapturing(world.stream)[1]),
        fill(world, world.stream),
        end_capture(world.stream),
        fill(world, world.stream),
    ]


@case
def cap_sync(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamSynchronize(world.stream)), end_capture(world.stream)]


@case
def cap_other_sync(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuStreamSynchronize(world.other_stream)),
            status(driver.cuStreamQuery(world.other_stream)),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_ctx_sync(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuCtxSynchronize()), end_capture(world.stream)]
    return answers


@case
def cap_alloc(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        allocated = driver.cuMemAlloc(16)
        answers += [status(allocated), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemFree(driver.CUdeviceptr(0))), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemFree(world.other_memory)), end_capture(world.stream)]
        world.other_memory = must(driver.cuMemAlloc(1024))
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemHostAlloc(16, 0)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuModuleLoadData(PTX)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemcpyDtoH(world.host, world.memory, 4)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [status(driver.cuMemsetD8(world.memory, 1, 4)), end_capture(world.stream)]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuStreamCreate(1)),
            status(driver.cuEventCreate(0)),
            status(driver.cuGraphCreate(0)),
            status(driver.cuMemGetInfo()),
            status(driver.cuFuncGetAttribute(driver.CUfunction_attribute(0), world.empty)),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuEventDestroy(must(driver.cuEventCreate(0)))),
            status(driver.cuStreamDestroy(must(driver.cuStreamCreate(1)))),
            status(driver.cuGraphDestroy(must(driver.cuGraphCreate(0)))),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_event_query(world: World) -> Any:
    answers: list[Any] = []
    must(driver.cuEventRecord(world.event, world.other_stream))
    must(driver.cuStreamSynchronize(world.other_stream))
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            status(driver.cuEventQuery(world.event)),
            status(driver.cuEventSynchronize(world.event)),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_thread(world: World) -> Any:
    answers: list[Any] = []
    for mode in MODES:
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), status(driver.cuMemAlloc(16))]),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(
                lambda: [
                    status(driver.cuCtxSetCurrent(world.context)),
                    status(driver.cuStreamSynchronize(world.other_stream)),
                ]
            ),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), fill(world, world.stream)]),
            end_capture(world.stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            in_thread(lambda: [status(driver.cuCtxSetCurrent(world.context)), end_capture(world.stream)]),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_captured_event(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        status(driver.cuEventQuery(world.event)),
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuEventQuery(world.event)),
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuEventRecord(world.event, world.other_stream)),
        status(driver.cuStreamSynchronize(world.other_stream)),
        status(driver.cuEventQuery(world.event)),
    ]


@case
def cap_captured_event_sync(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [status(driver.cuEventSynchronize(world.event)), end_capture(world.stream)]


@case
def cap_captured_event_after(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        end_capture(world.stream),
        status(driver.cuEventQuery(world.event)),
        status(driver.cuEventSynchronize(world.event)),
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        status(driver.cuStreamSynchronize(world.other_stream)),
    ]


@case
def cap_isolation(world: World) -> Any:
    must(driver.cuEventRecord(world.event, world.other_stream))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
        fill(world, world.stream),
        end_capture(world.stream),
    ]


@case
def cap_isolation_done(world: World) -> Any:
    must(driver.cuEventRecord(world.event, world.other_stream))
    must(driver.cuStreamSynchronize(world.other_stream))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamWaitEvent(world.stream, world.event, 0)), end_capture(world.stream)]


@case
def cap_unrecorded(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamWaitEvent(world.stream, world.event, 0)), end_capture(world.stream)]


@case
def cap_merge(world: World) -> Any:
    begin_capture(world.stream)
    begin_capture(world.other_stream)
    fill(world, world.stream)
    fill(world, world.other_stream)
    must(driver.cuEventRecord(world.event, world.stream))
    return [
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        end_capture(world.other_stream),
        end_capture(world.stream),
    ]


@case
def cap_fork(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    answers = [
        status(driver.cuStreamWaitEvent(world.other_stream, world.event, 0)),
        fill(world, world.other_stream),
        end_capture(world.other_stream),
    ]
    recorded = driver.cuEventRecord(world.untimed_event, world.other_stream)
    answers += [
        status(recorded),
        status(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 0)),
        end_capture(world.stream),
    ]
    return answers


@case
def cap_unjoined(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    return [
        fill(world, world.other_stream),
        end_capture(world.stream),
        fill(world, world.other_stream),
        str(driver.cuStreamIsCapturing(world.other_stream)[1]),
    ]


@case
def cap_unjoined_empty(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    return [end_capture(world.stream), fill(world, world.other_stream)]


@case
def cap_joined(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    must(driver.cuEventRecord(world.event, world.stream))
    must(driver.cuStreamWaitEvent(world.other_stream, world.event, 0))
    fill(world, world.other_stream)
    must(driver.cuEventRecord(world.untimed_event, world.other_stream))
    must(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 0))
    return [end_capture(world.stream), fill(world, world.other_stream)]


@case
def cap_legacy(world: World) -> Any:
    answers: list[Any] = []
    for mode in ("THREAD_LOCAL", "RELAXED"):
        begin_capture(world.blocking_stream, mode)
        fill(world, world.blocking_stream)
        answers += [
            fill(world, driver.CUstream(0)),
            fill(world, world.blocking_stream),
            end_capture(world.blocking_stream),
        ]
        begin_capture(world.stream, mode)
        fill(world, world.stream)
        answers += [
            fill(world, driver.CUstream(0)),
            status(driver.cuStreamSynchronize(driver.CUstream(0))),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_graph_launch(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [
        status(driver.cuGraphLaunch(exec_, world.stream)),
        status(driver.cuGraphUpload(exec_, world.stream)),
        end_capture(world.stream),
    ]


@case
def cap_graph_launch_other(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuGraphLaunch(exec_, world.other_stream)), end_capture(world.stream)]


@case
def cap_upload(world: World) -> Any:
    add_memset(world, world.graph)
    exec_ = must(driver.cuGraphInstantiate(world.graph, 0))
    begin_capture(world.stream)
    return [status(driver.cuGraphUpload(exec_, world.stream)), end_capture(world.stream)]


@case
def cap_instantiate(world: World) -> Any:
    add_memset(world, world.graph)
    begin_capture(world.stream)
    return [status(driver.cuGraphInstantiate(world.graph, 0)), end_capture(world.stream)]


@case
def cap_destroy(world: World) -> Any:
    begin_capture(world.stream)
    fill(world, world.stream)
    return [status(driver.cuStreamDestroy(world.stream))]


@case
def cap_async_mem(world: World) -> Any:
    begin_capture(world.stream)
    allocated = driver.cuMemAllocAsync(100, world.stream)
    answers = [status(allocated)]
    answers += (
        [status(driver.cuMemFreeAsync(allocated[1], world.stream)), end_capture(world.stream)]
        if not allocated[0]
        else [end_capture(world.stream)]
    )
    begin_capture(world.stream)
    answers += [status(driver.cuMemFreeAsync(world.memory, world.stream)), end_capture(world.stream)]
    return answers


@case
def cap_kinds(world: World) -> Any:
    begin_capture(world.stream)
    return [
        launch(world),
        status(driver.cuMemcpyDtoDAsync(world.other_memory, world.memory, 16, world.stream)),
        status(driver.cuLaunchHostFunc(world.stream, driver.CUhostFn(HOST_FUNCTION), 0)),
        status(driver.cuStreamWriteValue32(world.stream, world.memory, 1, 0)),
        status(driver.cuEventRecordWithFlags(world.event, world.stream, 1)),
        status(driver.cuStreamWaitEvent(world.stream, world.untimed_event, 1)),
        end_capture(world.stream),
    ]


@case
def cap_programmatic(world: World) -> Any:
    programmatic = (
        "PROGRAMMATIC_STREAM_SERIALIZATION",
        lambda value: setattr(value, "programmaticStreamSerializationAllowed", 1),
    )
    begin_capture(world.stream)
    return [
        launch(world),
        launch(world, attrs=[programmatic]),
        fill(world, world.stream),
        launch(world, attrs=[programmatic]),
        end_capture(world.stream),
    ]


@case
def cap_programmatic_event(world: World) -> Any:
    def put_event(value: Any) -> None:
        value.programmaticEvent.event = world.untimed_event
        value.programmaticEvent.flags = 0
        value.programmaticEvent.triggerAtBlockStart = 0

    def put_completion(value: Any) -> None:
        value.launchCompletionEvent.event = world.untimed_event
        value.launchCompletionEvent.flags = 0

    answers: list[Any] = []
    for put, name in ((put_event, "PROGRAMMATIC_EVENT"), (put_completion, "LAUNCH_COMPLETION_EVENT")):
        begin_capture(world.stream)
        answers += [
            launch(world, attrs=[(name, put)]),
            status(driver.cuStreamWaitEvent(world.other_stream, world.untimed_event, 0)),
            launch(world, stream=world.other_stream),
            status(driver.cuEventRecord(world.event, world.other_stream)),
            status(driver.cuStreamWaitEvent(world.stream, world.event, 0)),
            launch(world),
            end_capture(world.stream),
        ]
        begin_capture(world.stream)
        answers += [
            launch(world, attrs=[(name, put)]),
            status(driver.cuStreamWaitEvent(world.other_stream, world.untimed_event, 0)),
            fill(world, world.other_stream),
            end_capture(world.stream),
        ]
    return answers


@case
def cap_info(world: World) -> Any:
    info = driver.cuStreamGetCaptureInfo(world.stream)
    answers = [status(info), str(info[1]), len(info)]
    begin_capture(world.stream)
    fill(world, world.stream)
    info = driver.cuStreamGetCaptureInfo(world.stream)
    answers += [status(info), str(info[1]), len(info[4]), info[6]]
    answers += [
        status(driver.cuStreamUpdateCaptureDependencies(world.stream, None, None, 0, 1)),
        fill(world, world.stream),
        end_capture(world.stream),
        status(driver.cuStreamUpdateCaptureDependencies(world.stream, None, None, 0, 1)),
    ]
    return answers


@case
def cap_to_graph(world: World) -> Any:
    a = add_memset(world, world.graph)
    other_graph = must(driver.cuGraphCreate(0))
    b = add_memset(world, other_graph)
    answers = [
        status(
            driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [b], None, 1, driver.CUstreamCaptureMode(1))
        )
    ]
    answers += [
        status(
            driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [a], None, 1, driver.CUstreamCaptureMode(1))
        ),
        fill(world, world.stream),
        status(
            driver.cuStreamBeginCaptureToGraph(
                world.other_stream, world.graph, None, None, 0, driver.CUstreamCaptureMode(1)
            )
        ),
        end_capture(world.stream),
        instantiate(world, world.graph),
    ]
    return answers


@case
def cap_to_graph_broken(world: World) -> Any:
    a = add_memset(world, world.graph)
    must(driver.cuStreamBeginCaptureToGraph(world.stream, world.graph, [a], None, 1, driver.CUstreamCaptureMode(1)))
    fill(world, world.stream)
    return [status(driver.cuStreamSynchronize(world.stream)), end_capture(world.stream)]
