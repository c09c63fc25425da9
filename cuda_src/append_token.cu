// What follows the choice of a token: it joins its request, which goes on or ends, and a loop is told whether any goes on.

#include "dk/check.cuh"
#include "dk/memory_order.cuh"

namespace {

struct Requests {
  int* tokens;            // [rows], the newest of each; -1 of who has ended
  int* lengths;           // [rows], tokens of each, the newest among them; 0 of who has ended
  int* counts;            // [rows], how many tokens were appended
  const int* limits;      // [rows], how many can be
  int* log;               // [rows, capacity], of the host: those that were
  unsigned* published;    // [rows], of the host: how many are there
  const unsigned* stop;   // [1], of the host: not 0 to end all
  const int* ends;        // [end_count], tokens that end a request
  int rows, capacity, end_count;
};

// Returns, in every thread, whether any request goes on.
__device__ bool append(const int* chosen, const Requests& of) {
  const int row = threadIdx.x;
  int length = 0;
  if (row < of.rows) {
    const int token = chosen[row];
    length = of.lengths[row];
    if (token >= 0) {
      const int count = of.counts[row], limit = of.limits[row];
      DK_CHECK(0 <= count && count < limit && limit <= of.capacity,
               "row %d has %d tokens of at most %d: wanted fewer, and at most %d\n", row, count, limit, of.capacity);
      bool ends = count + 1 >= limit || dk::load_relaxed_sys(of.stop) != 0;
      for (int i = 0; i < of.end_count; ++i) ends |= token == of.ends[i];
      if (0 <= count && count < of.capacity) {
        of.log[1ll * row * of.capacity + count] = token;
        of.counts[row] = count + 1;
        dk::store_release_sys(of.published + row, count + 1);
      } else {
        ends = true;
      }
      length = ends ? 0 : length + 1;
      of.lengths[row] = length;
      of.tokens[row] = ends ? -1 : token;
    }
  }
  return __syncthreads_or(length > 0);
}

}  // namespace

// grid: 1, block: rows rounded up to whole warps, at most 1024
// chosen: [rows]; going: [1]; the others: see Requests
//
// For each row with chosen[r] >= 0: log[r][counts[r]++] = chosen[r]. It ends where that is one of `ends`, where counts[r] is
// limits[r] now, and where the host says stop: then tokens[r] = -1 and lengths[r] = 0; else tokens[r] = chosen[r] and
// ++lengths[r]. The other rows stay as they are. going = whether any lengths[r] > 0.
extern "C" __global__ void append_token(const int* chosen, int* tokens, int* lengths, int* counts, const int* limits,
                                        int* log, unsigned* published, const unsigned* stop, const int* ends,
                                        int* going, int rows, int capacity, int end_count) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const bool any =
      append(chosen, {tokens, lengths, counts, limits, log, published, stop, ends, rows, capacity, end_count});
  if (threadIdx.x == 0) *going = any;
}

// The same at the end of the body of a WHILE, which it tells whether to go on.
extern "C" __global__ void append_token_while(cudaGraphConditionalHandle handle, const int* chosen, int* tokens,
                                              int* lengths, int* counts, const int* limits, int* log,
                                              unsigned* published, const unsigned* stop, const int* ends, int* going,
                                              int rows, int capacity, int end_count) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const bool any =
      append(chosen, {tokens, lengths, counts, limits, log, published, stop, ends, rows, capacity, end_count});
  if (threadIdx.x != 0) return;
  *going = any;
  cudaGraphSetConditional(handle, any);
}
