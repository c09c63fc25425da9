// Keys and values in pages.
//
// Token t of a request has its key and its value in page block_table[request][t / page_size], at place t % page_size.

#pragma once

#include "check.cuh"

namespace dk {

// The page with the given number of a request; -1 if the table names none of the pool's `pages`.
__device__ inline int page_of(const int* block_table, int request, int number, int table_width, int pages) {
  const int page = block_table[1ll * request * table_width + number];
  DK_CHECK(0 <= page && page < pages, "block_table[%d][%d] is %d: the pool has %d pages\n", request, number, page, pages);
  return 0 <= page && page < pages ? page : -1;
}

}  // namespace dk
