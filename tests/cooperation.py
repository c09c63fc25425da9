"""What the threads of a warp, a block, a cluster and a grid do together: how the tests of it run kernels.

Every loop that waits for others ends: a wait that is given up is noted on the device and fails the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import drvkit as dk

PRELUDE = r"""
using u32 = unsigned;
using u64 = unsigned long long;

__device__ u32 late;  // waits that were given up

__device__ u64 now() {
  u64 nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds) :: "memory");
  return nanoseconds;
}

// Looks until it is so, for two seconds at most.
template <class Condition> __device__ void until(Condition holds) {
  for (const u64 end = now() + 2000000000; !holds();)
    if (now() > end) {
      atomicAdd(&late, 1);
      return;
    }
}

#define SPECIAL(name) ([] { u32 value; asm volatile("mov.u32 %0, %%" name ";" : "=r"(value)); return value; }())
#define TRUTH(yes, instruction, ...) \
  asm volatile("{ .reg .pred p; " instruction "; selp.u32 %0, 1, 0, p; }" : "=r"(yes) : __VA_ARGS__ : "memory")

__device__ u32 lane_id() { return SPECIAL("laneid"); }
__device__ u32 thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// An address in the window of shared memory: of this block, or of the same place in another one of the cluster.
__device__ u32 at(const void* place) { return static_cast<u32>(__cvta_generic_to_shared(place)); }
__device__ u32 in_block(u32 rank, const void* place) {
  u32 there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at(place)), "r"(rank));
  return there;
}

__device__ void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}

// mbarrier objects
__device__ void init(u64& barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1; fence.mbarrier_init.release.cluster;"
               :: "r"(at(&barrier)), "r"(count) : "memory");
}
__device__ void arrive(u64& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(&barrier)) : "memory");
}
__device__ void arrive_and_expect(u64& barrier, u32 nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(&barrier)), "r"(nbytes) : "memory");
}
__device__ void wait(u64& barrier, u32 parity) {
  until([&] {
    u32 passed;
    TRUTH(passed, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2", "r"(at(&barrier)),
          "r"(parity));
    return passed;
  });
}

// Between accesses by instructions and those by bulk copies.
__device__ void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
"""

Words = NDArray[np.uint32]


class Kernels:
    """The kernels of a text, on a device."""

    def __init__(self, device: dk.Device, module: dk.Module) -> None:
        self.device, self.module = device, module
        self.late = module.variable("late", 1, np.uint32)

    def __call__(self, name: str, *args: Any, **how: Any) -> list[NDArray[Any]]:
        """Run one; gives the arrays among its arguments as it leaves them."""
        with ExitStack() as stack:
            stream = stack.enter_context(self.device.stream())
            given = [stack.enter_context(self.device.array(x)) if isinstance(x, np.ndarray) else x for x in args]
            self.module.kernel(name).launch(stream, args=given, **how)
            stream.synchronize()
            self.check()
            return [buffer.numpy() for buffer in given if isinstance(buffer, dk.Buffer)]

    def check(self) -> None:
        late = int(self.late.numpy()[0])
        if late:
            self.late.fill(0)
        assert not late, f"{late} waits were given up"


@pytest.fixture(scope="module")
def run(device: dk.Device, request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """The kernels that stand above the test."""
    text, instantiations = request.param
    source = dk.Source.from_text(PRELUDE + text, "cooperation.cu")
    names = [kernel.qualified for kernel in source.kernels() if not kernel.template]
    with device.module(source, [*names, *instantiations]) as module:
        yield Kernels(device, module)


def kernels(title: str, text: str, *instantiations: str) -> pytest.MarkDecorator:
    """What the test runs: the kernels of a text and these instantiations of its templates."""
    return pytest.mark.parametrize("run", [pytest.param((text, instantiations), id=title)], indirect=True)


def blank(*shape: int) -> Words:
    """To be overwritten."""
    return np.full(shape, 0xEEEEEEEE, np.uint32)


RandomWords = Callable[..., Words]


@pytest.fixture
def words(rng: np.random.Generator) -> RandomWords:
    """``words(4, 32)``: an array of that shape."""
    return lambda *shape: rng.integers(0, 1 << 32, shape, np.uint32)


equal = np.testing.assert_array_equal
