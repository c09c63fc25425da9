// y = x * alpha, elementwise.
//
// T is float, __half or __nv_bfloat16: the product is made in float and rounded to T once. y may be x itself.

#include "dk/elementwise.cuh"

// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// x, y: [n]
// y[i] = T(float(x[i]) * alpha)
template <typename T, int kPerThread = 1>
__global__ void scale(const T* x, T* y, int n, float alpha) {
  dk::elementwise<kPerThread>([alpha](float x) { return x * alpha; }, n, y, x);
}

// As `scale`, with the factor in device memory, where each replay of a graph may find another.
//
// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// x, y: [n], alpha: [1], which y must not overlap
// y[i] = T(float(x[i]) * *alpha)
template <typename T, int kPerThread = 1>
__global__ void scale_dynamic(const T* x, T* y, int n, const float* alpha) {
  const float factor = *alpha;
  dk::elementwise<kPerThread>([factor](float x) { return x * factor; }, n, y, x);
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
