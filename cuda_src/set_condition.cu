// Kernels that decide what a conditional node of the same graph does: IF runs its body for a value that is not 0,
// SWITCH the body of that number (none if there is none), WHILE its body again and again until the value is 0.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

// bool and the integers: a half becomes true, or 0.
template <typename T>
constexpr bool is_whole = T(0.5) == T(0) || T(0.5) == T(1);

// The value of a flag. What is no unsigned int, above or below, becomes the largest one: still true for IF and WHILE,
// and past the last body of a SWITCH. Cut to 32 bits, 1 << 32 would be false.
//
// grid: 1, block: 1
// flag: [1], a bool or any integer
template <typename T>
__global__ void set_condition(cudaGraphConditionalHandle handle, const T* flag) {
  static_assert(is_whole<T>, "a flag is a bool or an integer");
  constexpr unsigned kLargest = ~0u;
  const long long value = static_cast<long long>(*flag);  // the upper half of 64 unsigned bits becomes negative
  const bool outside = value < 0 || value > kLargest;
  cudaGraphSetConditional(handle, outside ? kLargest : static_cast<unsigned>(value));
}

// 1 if any element is above the limit, else 0; NaN is not above anything, and nothing is above NaN.
//
// grid: 1, block: any, one-dimensional
// x: [n], of any type that has >
// value = any(x[i] > limit)
template <typename T>
__global__ void set_condition_above(cudaGraphConditionalHandle handle, const T* x, int n, T limit) {
  bool above = false;
  for (long long i = threadIdx.x; i < n && !above; i += blockDim.x) above = x[i] > limit;
  above = __syncthreads_or(above);
  if (threadIdx.x == 0) cudaGraphSetConditional(handle, above);
}

// Counts, and says whether the limit is still ahead: at the end of the body of a WHILE whose value was set before, the
// body runs until the counter has reached the limit.
//
// grid: 1, block: 1
// counter: [1], an integer
// *counter += 1; value = *counter < limit
template <typename T>
__global__ void set_condition_below_count(cudaGraphConditionalHandle handle, T* counter, T limit) {
  static_assert(is_whole<T>, "a counter is an integer");
  const T count = ++*counter;
  cudaGraphSetConditional(handle, count < limit);
}
