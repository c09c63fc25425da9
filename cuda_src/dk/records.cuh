// How rows of a latent cache lie in pages; drvkit/records.py says the same in numpy.
//
// A page of n entries has the values of all n, then the scales of all n. Entry e of a request is in the page that its
// block table has at e / n % width, at place e % n.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "check.cuh"
#include "vec.cuh"

namespace dk {

// kFormat of an instance.
constexpr int kKvFp8 = 0, kKvBf16 = 1, kKeyMxfp4 = 2, kKeyFp8 = 3, kKeyBf16 = 4;

constexpr int kRotary = 64;  // elements of a row that are rotated, its last ones

template <int kFormat>
struct Record {
  static constexpr int kDim = kFormat == kKvFp8 || kFormat == kKvBf16 ? 512 : 128;
  static constexpr int kValueBytes = kFormat == kKvFp8     ? 576
                                     : kFormat == kKeyMxfp4 ? 64
                                     : kFormat == kKeyFp8   ? 128
                                                            : 2 * kDim;
  static constexpr int kScaleBytes = kFormat == kKvFp8 ? 8 : kFormat == kKeyMxfp4 || kFormat == kKeyFp8 ? 4 : 0;
};

// What products of rows are made of: to bfloat16 all numbers of the other formats are exact, but e4m3 becomes a half by
// one instruction, and a half has the more bits.
template <int kFormat>
struct RowFactor {
  using type = __nv_bfloat16;
};
template <>
struct RowFactor<kKvFp8> {
  using type = __half;
};
template <>
struct RowFactor<kKeyFp8> {
  using type = __half;
};

// A pool of pages, as it comes into a kernel.
template <int kFormat, typename Byte>
struct PagesOf {
  Byte* pool;
  const int* block_table;
  int pages, table_width, page_bits;  // an entry is one of 2^page_bits of a page
  long long page_bytes;

  // Where the table has the page of an entry; whether the pool has such a page; and the page, -1 if it has not.
  __device__ const int* page_number(int request, int entry) const {
    int number = entry >> page_bits;
    if (number >= table_width) number %= table_width;
    return block_table + 1ll * request * table_width + number;
  }
  __device__ bool has(int page, int request, int entry) const {
    DK_CHECK(0 <= page && page < pages, "block_table[%d][%d] is %d: the pool has %d pages\n", request,
             (entry >> page_bits) % table_width, page, pages);
    return 0 <= page && page < pages;
  }
  __device__ int page_of(int request, int entry) const {
    const int page = *page_number(request, entry);
    return has(page, request, entry) ? page : -1;
  }
  __device__ int place_of(int entry) const { return entry & ((1 << page_bits) - 1); }
  __device__ Byte* values(int page, int place) const {
    return pool + page * page_bytes + place * Record<kFormat>::kValueBytes;
  }
  __device__ Byte* scales(int page, int place) const {
    return pool + page * page_bytes + (Record<kFormat>::kValueBytes << page_bits) +
           place * Record<kFormat>::kScaleBytes;
  }
};

// The exponent + 127 of the least power of two that is not below x, which is positive and normal.
__device__ inline unsigned exponent_above(float x) {
  const unsigned bits = __float_as_uint(x);
  return (bits >> 23) + ((bits & 0x7fffff) != 0);
}
// 2^(exponent - 127), and its inverse, for exponents from 1 to 253.
__device__ inline float power_of_two(unsigned exponent) { return __uint_as_float(exponent << 23); }
__device__ inline float inverse_power_of_two(unsigned exponent) { return __uint_as_float((254 - exponent) << 23); }

// The exponent + 127 of a block's scale, of its largest magnitude: that of e4m3 and of e2m1.
constexpr float kLargestBf16 = 3.38953139e38f;
__device__ inline unsigned exponent_of_e4m3(float largest) {
  return exponent_above(__fmul_rn(fmaxf(fminf(largest, kLargestBf16), 1e-4f), 1.0f / 448.0f));
}
__device__ inline unsigned exponent_of_e2m1(float largest) {
  return exponent_above(__fmul_rn(fmaxf(fminf(largest, kLargestBf16), 6.0f * 1.17549435e-38f), 1.0f / 6.0f));
}

// Four e4m3, the first in the lowest byte, to the nearest, ties to even; what is larger than 448 in size becomes 448.
__device__ inline unsigned e4m3_of(float a, float b, float c, float d) {
  return __nv_fp8x4_e4m3(float4{a, b, c, d}).__x;
}

// Four e2m1 in the low sixteen bits, the first in the lowest four, to the nearest, ties to even; what is larger than 6
// in size becomes 6, and so does NaN. Architectures from sm_100a on have an instruction; this is for all.
__device__ inline unsigned e2m1_of(__nv_bfloat162 first, __nv_bfloat162 second) {
  // From 128 to 256 bfloat16 has whole numbers alone, and sums are rounded to them; 192 + n has the low bits of n.
  // So the sums with 2x, x and x / 2 have the code of a size up to 2, from 2 to 4 and from 4 on; elsewhere no less.
  const auto codes_of = [](__nv_bfloat162 x) -> unsigned {
    const auto both = [](float value) -> __nv_bfloat162 { return __float2bfloat162_rn(value); };
    const __nv_bfloat162 size = __hmin2(__habs2(x), both(6.0f));
    const __nv_bfloat162 sum = __hmin2(__hmin2(__hfma2(size, both(2.0f), both(192.0f)), __hadd2(size, both(194.0f))),
                                       __hfma2(size, both(0.5f), both(196.0f)));
    const unsigned signs = reinterpret_cast<const unsigned&>(x) >> 12 & 0x00080008;
    return (reinterpret_cast<const unsigned&>(sum) & 0x00070007) | signs;
  };
  const unsigned codes = codes_of(first) | codes_of(second) << 8;
  return (codes | codes >> 12) & 0xffff;
}

}  // namespace dk
