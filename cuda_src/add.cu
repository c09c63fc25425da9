// Elementwise sums.
//
// T is float, __half or __nv_bfloat16: the sum is made in float and rounded to T once.
// y may be an input itself: a thread reads its element before it writes it. Any other overlap races.

#include "dk/vec.cuh"

// grid: ceil(n / block), block: any, both one-dimensional
// a, b, y: [n]
// y[i] = T(float(a[i]) + float(b[i]))
template <typename T>
__global__ void add(const T* a, const T* b, T* y, int n) {
  const long long i = dk::thread_in_grid();
  if (i < n) y[i] = dk::from_float<T>(dk::to_float(a[i]) + dk::to_float(b[i]));
}

// grid: ceil(n / block), block: any, both one-dimensional
// x, y: [n]
// y[i] = T(float(x[i]) + c)
template <typename T>
__global__ void add_scalar(const T* x, T* y, int n, float c) {
  const long long i = dk::thread_in_grid();
  if (i < n) y[i] = dk::from_float<T>(dk::to_float(x[i]) + c);
}
