// Weights as GGUF files have them: rows of blocks of 32 elements, each with a scale of its own; or rows of plain elements.
//
// A lane takes a quarter of 32 elements at a time: those from 4 j and from 16 + 4 j on, four each. For formats whose low
// nibbles are a block's first half, and whose high ones the other, that is one word.

#pragma once

#include "dk/vec.cuh"

namespace dk {

constexpr int kQuarter = 8;  // elements of a lane at a time

// Where the first four of quarter q of a row are; the others stand 16 further on.
__device__ inline int quarter_begin(int q) { return q / 4 * 32 + q % 4 * 4; }

// 4 bits, a scale d and a minimum m: d * q + m. Rows are at multiples of 4 bytes.
struct Q4_1 {
  static constexpr int kBytes = 20;  // of 32 elements: d, m, then 16 bytes, low nibbles first

  unsigned scales, nibbles;

  static __device__ Q4_1 load(const unsigned char* row, int q) {
    const unsigned* const block = reinterpret_cast<const unsigned*>(row + q / 4 * kBytes);
    return {block[0], block[1 + q % 4]};
  }
  // d * q has 15 bits: only the sum is rounded, as in two steps.
  __device__ void floats(float (&w)[kQuarter]) const {
    const float2 by = __half22float2(reinterpret_cast<const __half2&>(scales));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = __fmaf_rn(static_cast<float>(nibbles >> 8 * i & 15), by.x, by.y);
      w[4 + i] = __fmaf_rn(static_cast<float>(nibbles >> (8 * i + 4) & 15), by.x, by.y);
    }
  }
};

// 8 bits and a scale d: d * q. Rows are at multiples of 2 bytes.
struct Q8_0 {
  static constexpr int kBytes = 34;  // of 32 elements: d, then 32 bytes

  unsigned low, high;
  unsigned short scale;

  static __device__ Q8_0 load(const unsigned char* row, int q) {
    const unsigned short* const block = reinterpret_cast<const unsigned short*>(row + q / 4 * kBytes);
    const unsigned short* const two = block + 1 + q % 4 * 2;
    return {two[0] | static_cast<unsigned>(two[1]) << 16, two[8] | static_cast<unsigned>(two[9]) << 16, block[0]};
  }
  __device__ void floats(float (&w)[kQuarter]) const {
    const float by = __half2float(reinterpret_cast<const __half&>(scale));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      w[i] = by * static_cast<float>(static_cast<signed char>(low >> 8 * i));
      w[4 + i] = by * static_cast<float>(static_cast<signed char>(high >> 8 * i));
    }
  }
};

// As they are. Rows are at multiples of four elements.
template <typename T>
struct Plain {
  Vec<T, 4> low, high;

  static __device__ Plain load(const unsigned char* row, int q) {
    const T* const first = reinterpret_cast<const T*>(row) + quarter_begin(q);
    return {Vec<T, 4>::load(first), Vec<T, 4>::load(first + 16)};
  }
  __device__ void floats(float (&w)[kQuarter]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = to_float(low.elements[i]), w[4 + i] = to_float(high.elements[i]);
  }
};
using F32 = Plain<float>;
using F16 = Plain<__half>;
using BF16 = Plain<__nv_bfloat16>;

}  // namespace dk
