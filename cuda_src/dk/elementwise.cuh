// One function over the elements of arrays, several elements an access where that is possible.

#pragma once

#include "vec.cuh"

namespace dk {

// The vector of T(f(float(values[j])...)).
template <typename T, int N, typename F, typename... Vecs>
__device__ Vec<T, N> map(F f, Vecs... values) {
  Vec<T, N> results;
  for (int j = 0; j < N; ++j) results.elements[j] = from_float<T>(f(to_float(values.elements[j])...));
  return results;
}

// y[i] = T(f(float(inputs[i])...)) for the elements of this thread: kPerThread of them, from thread_in_grid() * kPerThread
// on. f takes and gives floats; its result is rounded to T once. y may be an input itself: a thread reads its elements
// before it writes them, and no other thread's. Any other overlap races.
//
// One access of kPerThread elements where a whole one is left and all ends are aligned to it, else one by one. So a node
// whose pointers are changed later to unaligned ones gets slower and stays right.
template <int kPerThread, typename T, typename F, typename... Inputs>
__device__ void elementwise(F f, int n, T* y, const Inputs*... inputs) {
  using Vec = dk::Vec<T, kPerThread>;
  const long long first = thread_in_grid() * kPerThread;

  if (first + kPerThread <= n && Vec::fits(y) && (Vec::fits(inputs) && ...)) {
    map<T, kPerThread>(f, Vec::load(inputs + first)...).store(y + first);
    return;
  }
  for (long long i = first; i < first + kPerThread && i < n; ++i) y[i] = from_float<T>(f(to_float(inputs[i])...));
}

}  // namespace dk
