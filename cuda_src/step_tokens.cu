// What the kernels of a step ask of its rows: which token of which request each one is.

#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"

// grid: ceil(max_tokens / 256), block: 256, both one-dimensional
// q_starts: [requests + 1], lengths: [requests], read where a request has rows
// tokens: [max_tokens, 4], of dk::StepToken; entries_4, entries_128: [max_tokens]; completed: [2]
//
// tokens[t] = {r, p, start, end} for the rows t of request r, q_starts[r] <= t < q_starts[r + 1], of which the last one
// is at position lengths[r] - 1; {-1, 0, 0, 0} for the rows behind those of all requests.
// entries_R[t] = (p + 1) / R, the entries of R tokens that end no later than token t does; 0 for padding.
// completed = how many entries of 4 tokens, and of 128, end in this step.
extern "C" __global__ void step_tokens(const int* q_starts, const int* lengths, int* tokens, int* entries_4,
                                       int* entries_128, int* completed, int requests, int max_tokens,
                                       int max_length) {
  __shared__ int sums[2];
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const int thread = threadIdx.x;
  const int row = static_cast<int>(dk::thread_in_grid());

  if (row < max_tokens) {
    // The last request that begins no later: of those without rows at this place, the one behind them.
    int low = 0, high = requests;
    while (low < high) {
      const int middle = (low + high) / 2;
      if (q_starts[middle + 1] <= row) low = middle + 1;
      else high = middle;
    }
    dk::StepToken token = {-1, 0, 0, 0};
    int ended_4 = 0, ended_128 = 0;
    const int first = low < requests ? q_starts[low] : max_tokens;
    if (0 <= first && first <= row && q_starts[low + 1] <= max_tokens) {
      const int rows = q_starts[low + 1] - first, length = lengths[low], start = length - rows;
      DK_CHECK(start >= 0, "lengths[%d] is %d: the request has %d rows\n", low, length, rows);
      DK_CHECK(length <= max_length, "lengths[%d] is %d: wanted at most %d\n", low, length, max_length);
      if (start >= 0 && length <= max_length) {
        token = {low, start + row - first, start, length};
        ended_4 = (token.position + 1) / 4, ended_128 = (token.position + 1) / 128;
      }
    }
    reinterpret_cast<dk::StepToken*>(tokens)[row] = token;
    entries_4[row] = ended_4, entries_128[row] = ended_128;
  }

  if (blockIdx.x != 0) return;
  if (thread < 2) sums[thread] = 0;
  __syncthreads();
  for (int request = thread; request < requests; request += blockDim.x) {
    const int first = q_starts[request], next = q_starts[request + 1];
    DK_CHECK(request > 0 || first == 0, "q_starts[0] is %d: the first request begins at row 0\n", first);
    DK_CHECK(first <= next && next <= max_tokens, "q_starts[%d] is %d, behind it is %d: starts do not decrease, and end "
             "with at most %d rows\n", request, first, next, max_tokens);
    if (first < 0 || next <= first || next > max_tokens) continue;
    const int length = lengths[request], start = length - (next - first);
    if (start < 0 || length > max_length) continue;
    if (const int ended = length / 4 - start / 4) atomicAdd(sums, ended);
    if (const int ended = length / 128 - start / 128) atomicAdd(sums + 1, ended);
  }
  __syncthreads();
  if (thread < 2) completed[thread] = sums[thread];
}
