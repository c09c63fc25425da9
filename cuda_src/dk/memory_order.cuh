// All memory-ordering PTX, with order and scope in each name.

#pragma once

namespace dk {

__device__ inline unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Add 1 to *counter, or make it 0 where it is `last` already; gives what it was. What this thread wrote, and what others
// wrote that it has met at a barrier since, is seen by whom a later one of these tells of it.
__device__ inline unsigned count_acq_rel_gpu(unsigned* counter, unsigned last) {
  unsigned was;
  asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(last) : "memory");
  return was;
}

// The same, and orders nothing.
__device__ inline unsigned count_relaxed_gpu(unsigned* counter, unsigned last) {
  unsigned was;
  asm volatile("atom.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(was) : "l"(counter), "r"(last) : "memory");
  return was;
}

// 16 bytes that other devices read or write meanwhile. Each 32-bit word is one access; nothing orders the four.
__device__ inline void store_relaxed_sys_16(void* p, uint4 value) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ inline uint4 load_relaxed_sys_16(const void* p) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(p)
               : "memory");
  return value;
}
__device__ inline void store_relaxed_sys_8(void* p, unsigned long long value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}
__device__ inline unsigned long long load_relaxed_sys_8(const void* p) {
  unsigned long long value;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(p) : "memory");
  return value;
}
// As two words of 8 bytes, of which each is one access.
__device__ inline void store_relaxed_sys_8x2(void* p, unsigned long long first, unsigned long long second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(p), "l"(first), "l"(second) : "memory");
}
__device__ inline ulonglong2 load_relaxed_sys_8x2(const void* p) {
  ulonglong2 value;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(value.x), "=l"(value.y) : "l"(p) : "memory");
  return value;
}
__device__ inline void store_relaxed_sys(unsigned* p, unsigned value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ inline unsigned load_relaxed_sys(const unsigned* p) {
  unsigned value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// What this thread wrote, and what others wrote that it has met at a barrier since, is seen by who acquires `value`.
__device__ inline void store_release_sys(unsigned* p, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ inline unsigned load_acquire_sys(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// 16 bytes that nobody writes meanwhile, though others have: not through the cache of what is read only.
__device__ inline uint4 load_weak_16(const void* p) {
  uint4 value;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(p)
               : "memory");
  return value;
}

__device__ inline uint2 load_weak_8(const void* p) {
  uint2 value;
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "l"(p) : "memory");
  return value;
}
__device__ inline unsigned load_weak_4(const void* p) {
  unsigned value;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// To all devices that have memory behind the multicast address `p`. Each word is one access.
__device__ inline void multimem_store_relaxed_sys_16(void* p, uint4 value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(__uint_as_float(value.x)),
               "f"(__uint_as_float(value.y)), "f"(__uint_as_float(value.z)), "f"(__uint_as_float(value.w))
               : "memory");
#endif
}
__device__ inline void multimem_store_relaxed_sys_8(void* p, unsigned long long value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.b64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
#endif
}
__device__ inline void multimem_store_release_sys(void* p, unsigned value) {
#if __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.release.sys.global.b32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
#endif
}

__device__ inline void store_relaxed_gpu(unsigned* p, unsigned value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
__device__ inline unsigned load_relaxed_gpu(const unsigned* p) {
  unsigned value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

// Threads of a block meet at one of its barriers, or tell that they have come and go on: `threads` of both in all, of whole
// warps. What was written before is seen by who meets.
__device__ inline void meet_acq_rel_cta(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void arrive_release_cta(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Meet, and learn whether any of them came with `any`.
__device__ inline bool meet_any_acq_rel_cta(int barrier, int threads, bool any) {
  unsigned result;
  asm volatile(
      "{\n\t.reg .pred p, q;\n\tsetp.ne.u32 p, %3, 0;\n\t"
      "bar.red.or.pred q, %1, %2, p;\n\tselp.u32 %0, 1, 0, q;\n\t}"
      : "=r"(result)
      : "r"(barrier), "r"(threads), "r"(static_cast<unsigned>(any))
      : "memory");
  return result;
}
// What this thread wrote to shared memory, or others that it has met since, is seen by products that are queued after
// it has met their warps: the fence may stand on either side of the meeting.
__device__ inline void fence_proxy_async_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// All threads of all blocks of the cluster meet; what they wrote before, to any block's shared memory, is seen behind.
__device__ inline void meet_acq_rel_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// The same in two halves, and orders nothing: a block may do something between them.
__device__ inline void arrive_relaxed_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ inline void wait_acquire_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// `value` at the place that `p` is in this block's shared memory, but in that of block `block` of the cluster.
__device__ inline void store_shared_cluster(float* p, unsigned block, float value) {
#if __CUDA_ARCH__ >= 900
  const unsigned here = shared_address(p);
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
#endif
}
__device__ inline void store_shared_cluster(unsigned* p, unsigned block, unsigned value) {
  store_shared_cluster(reinterpret_cast<float*>(p), block, __uint_as_float(value));
}
// Add to what is there; what others add at the same time is not lost, and nothing is ordered.
__device__ inline void add_relaxed_shared_cluster(unsigned* p, unsigned block, unsigned value) {
#if __CUDA_ARCH__ >= 900
  const unsigned here = shared_address(p);
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0], %1;" ::"r"(there), "r"(value) : "memory");
#endif
}

// As store_shared_cluster, of 8 and of 16 bytes; `address` is a shared one.
__device__ inline void store_shared_cluster_8(unsigned address, unsigned block, float2 value) {
#if __CUDA_ARCH__ >= 900
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(value.x), "f"(value.y) : "memory");
#endif
}

__device__ inline void store_shared_cluster_16(unsigned address, unsigned block, uint4 value) {
#if __CUDA_ARCH__ >= 900
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(there), "r"(value.x), "r"(value.y),
               "r"(value.z), "r"(value.w)
               : "memory");
#endif
}

// An mbarrier of this block, for one phase: `arrivals` and the bytes that they announce. Threads that have come to a
// barrier of the cluster since may use it.
__device__ inline void init_mbarrier_release_cluster(unsigned long long* mbarrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(
                   shared_address(mbarrier)), "r"(arrivals)
               : "memory");
#endif
}
// An mbarrier of this block, for as many phases as there will be, each of so many arrivals. Threads that have met since
// may use it. Who waits gives the phase's parity; that of the phase before the first, 1, is over from the start.
__device__ inline void init_mbarrier(unsigned long long* mbarrier, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(mbarrier)), "r"(arrivals) : "memory");
#endif
}
__device__ inline void arrive_mbarrier_release_cta(unsigned long long* mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(mbarrier)) : "memory");
#endif
}
__device__ inline void wait_mbarrier_acquire_cta(unsigned long long* mbarrier, unsigned parity) {
#if __CUDA_ARCH__ >= 900
  unsigned over = 0;
  while (!over)
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(over)
        : "r"(shared_address(mbarrier)), "r"(parity)
        : "memory");
#endif
}
// Arrive as soon as all copies that this thread has queued are there (see dk/async_copy.cuh).
__device__ inline void arrive_mbarrier_when_copied(unsigned long long* mbarrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(mbarrier)) : "memory");
#endif
}
// Arrive at block `block`'s, which has to wait for `bytes` more. Orders nothing: the bytes do, as they come.
__device__ inline void expect_relaxed_cluster(unsigned long long* mbarrier, unsigned block, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
  const unsigned here = shared_address(mbarrier);
  unsigned there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("mbarrier.arrive.expect_tx.relaxed.cluster.shared::cluster.b64 _, [%0], %1;" ::"r"(there), "r"(bytes)
               : "memory");
#endif
}
// As store_shared_cluster, of 8 bytes, on their way while the thread goes on; that block's mbarrier counts them.
__device__ inline void store_async_release_cluster_8(void* p, unsigned block, uint2 value,
                                                     unsigned long long* mbarrier) {
#if __CUDA_ARCH__ >= 900
  const unsigned here[2] = {shared_address(p), shared_address(mbarrier)};
  unsigned there[2];
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[0]) : "r"(here[0]), "r"(block));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there[1]) : "r"(here[1]), "r"(block));
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
                   there[0]),
               "r"(value.x), "r"(value.y), "r"(there[1])
               : "memory");
#endif
}
// Until the first phase of this block's mbarrier is over; what came with its bytes is seen. Those who send them are of the
// cluster, so they run: the wait ends.
__device__ inline void wait_mbarrier_acquire_cluster(unsigned long long* mbarrier) {
#if __CUDA_ARCH__ >= 900
  unsigned over = 0;
  while (!over)
    asm volatile(
        "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(over)
        : "r"(shared_address(mbarrier))
        : "memory");
#endif
}

// Nanoseconds; all devices of a host count them from one moment, but in steps of up to a microsecond.
__device__ inline unsigned long long time_ns() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
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
