// Copies from global into shared memory, and into caches, that go on while the thread does.

#pragma once

namespace dk {

// A policy for what is read once: it is the first to leave the L2 cache, so what is read again stays there.
__device__ inline unsigned long long evict_first() {
  unsigned long long policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// 16 bytes; both ends are aligned to 16.
__device__ inline void copy_async_16(unsigned to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 16 bytes of which the first `bytes` (0..16) are read, and the others become 0.
__device__ inline void copy_async_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// The same, with what the L2 cache shall do.
__device__ inline void copy_async_16(unsigned to, const void* from, int bytes, unsigned long long policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from), "r"(bytes),
               "l"(policy)
               : "memory");
}
// Bring the 128 bytes around p into the L2 cache, if `wanted`.
__device__ inline void prefetch_l2(const void* p, bool wanted) {
  if (wanted) asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}
// Bring the line around p into the L1 cache.
__device__ inline void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// As prefetch_l2, of `bytes` from p on, both multiples of 16, by one thread. Before sm_90 nothing comes.
__device__ inline void prefetch_bulk_l2(const void* p, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(p), "r"(bytes) : "memory");
#endif
}
// What this thread has queued since the last call is one group.
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all groups of this thread but the newest kLeft are there. Others see them behind a barrier.
template <int kLeft>
__device__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

}  // namespace dk
