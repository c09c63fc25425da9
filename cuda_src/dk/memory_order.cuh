// All memory-ordering PTX, with order and scope in each name.

#pragma once

namespace dk {

// Add 1 to *counter, or make it 0 where it is `last` already; gives what it was. What this thread wrote, and what others
// wrote that it has met at a barrier since, is seen by whom a later one of these tells of it.
__device__ inline unsigned count_acq_rel_gpu(unsigned* counter, unsigned last) {
  unsigned was;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(last) : "memory");
  return was;
}

// Programmatic edges. Without one both do nothing.
//
// Wait until the kernels before this one have ended and their writes are there.
__device__ inline void wait_for_kernels_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Let the kernels behind this one start, as soon as all blocks have said so. It comes after the wait: then who starts
// may count on all kernels but its neighbour to have ended.
__device__ inline void let_kernels_behind_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace dk
