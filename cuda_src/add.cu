// Elementwise sums.
//
// T is float, __half or __nv_bfloat16: the sum is made in float and rounded to T once. y may be an input itself.

#include "dk/elementwise.cuh"

// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// a, b, y: [n]
// y[i] = T(float(a[i]) + float(b[i]))
template <typename T, int kPerThread = 1>
__global__ void add(const T* a, const T* b, T* y, int n) {
  dk::elementwise<kPerThread>([](float a, float b) { return a + b; }, n, y, a, b);
}

// grid: ceil(n / (block * kPerThread)), block: any, both one-dimensional
// x, y: [n]
// y[i] = T(float(x[i]) + c)
template <typename T, int kPerThread = 1>
__global__ void add_scalar(const T* x, T* y, int n, float c) {
  dk::elementwise<kPerThread>([c](float x) { return x + c; }, n, y, x);
}
