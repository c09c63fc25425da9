// Rows of a table, which stays in the blocks of a file, as floats.

#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/quants.cuh"

// grid: (ceil(dim / (8 * block)), tokens), block: any, one-dimensional
// ids: [tokens]; table: [rows, dim] of Weight, rows of `table_row` bytes; out: [tokens, dim], tokens `out_row` elements on
//
// out[t] = table[ids[t]]; 0 where ids[t] is negative, or no row. dim is a multiple of 32.
template <typename Weight>
__global__ void embedding(const int* ids, const unsigned char* table, float* out, int rows, int dim,
                          long long table_row, long long out_row) {
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const int q = blockIdx.x * blockDim.x + threadIdx.x;
  if (q >= dim / dk::kQuarter) return;
  const int token = blockIdx.y, id = ids[token];
  DK_CHECK(id < rows, "ids[%d] is %d: the table has %d rows\n", token, id, rows);
  float values[dk::kQuarter] = {};
  if (id >= 0 && id < rows) Weight::load(table + id * table_row, q).floats(values);
  float* const to = out + token * out_row + dk::quarter_begin(q);
  dk::Vec<float, 4>{values[0], values[1], values[2], values[3]}.store(to);
  dk::Vec<float, 4>{values[4], values[5], values[6], values[7]}.store(to + 16);
}
