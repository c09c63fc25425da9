// y = x * alpha, elementwise.
//
// T is float, __half or __nv_bfloat16: the product is made in float and rounded to T once.
// y may be x itself: a thread reads its elements before it writes them, and no other thread's. Any other overlap races.

#include "dk/vec.cuh"

// One access of kPerThread elements where a whole one is left and both ends are aligned to it, else one by one. So a
// node whose pointers are changed later to unaligned ones gets slower and stays right.
template <typename T, int kPerThread>
__device__ void scale_elements(const T* x, T* y, int n, float alpha) {
  using Vec = dk::Vec<T, kPerThread>;
  const long long first = dk::thread_in_grid() * kPerThread;

  if (first + kPerThread <= n && Vec::fits(x) && Vec::fits(y)) {
    Vec values = Vec::load(x + first);
    for (T& value : values.elements) value = dk::from_float<T>(dk::to_float(value) * alpha);
    values.store(y + first);
    return;
  }
  for (long long i = first; i < first + kPerThread && i < n; ++i) {
    y[i] = dk::from_float<T>(dk::to_float(x[i]) * alpha);
  }
}

// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// x, y: [n]
// y[i] = T(float(x[i]) * alpha)
template <typename T, int kPerThread = 1>
__global__ void scale(const T* x, T* y, int n, float alpha) {
  scale_elements<T, kPerThread>(x, y, n, alpha);
}

// As `scale`, with the factor in device memory, where each replay of a graph may find another.
//
// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// x, y: [n], alpha: [1], which y must not overlap
// y[i] = T(float(x[i]) * *alpha)
template <typename T, int kPerThread = 1>
__global__ void scale_dynamic(const T* x, T* y, int n, const float* alpha) {
  scale_elements<T, kPerThread>(x, y, n, *alpha);
}

template <typename T>
__device__ T product(T a, T b) {
  return dk::from_float<T>(dk::to_float(a) * dk::to_float(b));
}

__device__ int product(int a, int b) {
  return static_cast<int>(static_cast<unsigned>(a) * static_cast<unsigned>(b));  // wraps; signed overflow is undefined
}

// An input of zero (of either sign) is padding: its output keeps what it has. T may also be int, which wraps.
//
// grid: ceil(n / block), block: any, both one-dimensional
// x, y: [n]
// y[i] = x[i] == 0 ? y[i] : T(x[i] * alpha)
template <typename T>
__global__ void scale_padded(const T* x, T* y, int n, T alpha) {
  const long long i = dk::thread_in_grid();
  if (i >= n) return;
  const T value = x[i];
  if (value != T(0)) y[i] = product(value, alpha);
}
