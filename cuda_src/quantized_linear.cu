// Tokens times a matrix of weights in the blocks of a file, with what stands before and behind it in a Llama's layer.
//
// For few tokens a launch takes longer than its work, so little stands between a token and its results: a warp has two rows
// of weights, and its lanes the inputs, a quarter of 32 at a time; nobody waits for another warp. For many, products are
// made on the tensor cores, of bfloat16: a float is the sum of two of them, but for 2^-17 of it, and so are three products.
//
// Weights and norms are no other kernel's results: a block's first ones are on their way before the kernels before this one
// have ended.

#include "dk/async_copy.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/quants.cuh"

namespace {

enum Form { kProduct, kGated };

constexpr int kWarpsOfFew = 4;                   // of a block of few tokens
constexpr int kMostWarps = 12, kHeld = 2;        // of a block of many tokens; 32s of inputs that a warp holds of each
constexpr int kRows = 16, kColumns = 8;          // of a product: weights, tokens

// The sums of 32 lanes, of kCount values each: by halves as long as there are two values, so that lane l has value
// l * kCount / 32 in the end. Which lanes are added up first does not depend on kCount.
template <int kCount, int kStep = 16, int kSize>
__device__ void add_lanes(float (&values)[kSize]) {
  if constexpr (kStep == 0) {
    return;
  } else if constexpr (kCount == 1) {
    values[0] += __shfl_xor_sync(~0u, values[0], kStep);
    add_lanes<1, kStep / 2>(values);
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = threadIdx.x & kStep;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float kept = upper ? values[i + kHalf] : values[i], given = upper ? values[i] : values[i + kHalf];
      values[i] = kept + __shfl_xor_sync(~0u, given, kStep);
    }
    add_lanes<kHalf, kStep / 2>(values);
  }
}

template <typename In>
__device__ void load_quarter(const In* row, int q, float (&values)[dk::kQuarter]) {
  const In* const from = row + dk::quarter_begin(q);
  const dk::Vec<In, 4> low = dk::Vec<In, 4>::load(from), high = dk::Vec<In, 4>::load(from + 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) values[i] = dk::to_float(low.elements[i]), values[4 + i] = dk::to_float(high.elements[i]);
}

// Two floats as the sum of two pairs of bfloat16.
__device__ void split(float a, float b, unsigned& high, unsigned& low) {
  high = dk::pair<__nv_bfloat16>(a, b);
  const float2 left = dk::floats_of(high);
  low = dk::pair<__nv_bfloat16>(a - left.x, b - left.y);
}

// What sums of squares make of a token.
__device__ float by_squares(float sum, int inputs, float eps) {
  return __frsqrt_rn(__fdiv_rn(sum, static_cast<float>(inputs)) + eps);
}

__device__ float gated(float a, float b) { return __fdiv_rn(a, 1.0f + expf(-a)) * b; }

}  // namespace

// grid: (any, ceil(tokens / kTokens)), block: 128; kDepth: quarters of a lane that are on their way
// x: [tokens, inputs], residual, out: [tokens, outputs], token by token `_row` elements on; norm: [inputs], given: [1]
// weight: [outputs, inputs], of kGated twice as many rows; rows are `weight_row` bytes
//
// y[t][n] = by(t) * sum over k of x[t][k] * norm[k] * weight[n][k],  by(t) = 1 / sqrt(mean(x[t]^2) + eps)
// kProduct: out[t][n] = Out(residual[t][n] + y[t][n])
// kGated: out[t][n] = Out(silu(y[t][n]) * y[t][outputs + n]),  silu(a) = a / (1 + exp(-a))
//
// Without norm it and by(t) are 1; without residual it is 0. Of tokens from given[0] on nothing is read or written. inputs
// is a multiple of 32, outputs of 16. out may be residual, and overlaps nothing else.
template <typename Weight, typename In, typename Out, Form kForm, int kTokens, int kDepth>
__global__ void __launch_bounds__(32 * kWarpsOfFew, 1)
    quantized_linear_few(const In* x, const unsigned char* weight, const float* norm, const float* residual,
                         const int* given, Out* out, int tokens, int inputs, int outputs, long long weight_row,
                         long long x_row, long long residual_row, long long out_row, float eps) {
  static_assert(kTokens == 1 || (kTokens == 2 && kDepth == 3), "a lane has registers for 48 inputs");
  constexpr int kResults = kForm == kGated ? 1 : 2;  // rows of out that two rows of weights make
  const int lane = threadIdx.x % 32, pairs = outputs / kResults, pairs_at_once = gridDim.x * kWarpsOfFew;
  const int quarters = inputs / dk::kQuarter, first_pair = blockIdx.x * kWarpsOfFew + threadIdx.x / 32;
  constexpr int kStep = 32 * kDepth;

  // Pair p has rows 2 p and 2 p + 1, or, of kGated, p and outputs + p.
  const long long distance = (kForm == kGated ? outputs : 1) * weight_row;
  Weight ahead[kDepth][2];
  const auto bring = [&](int pair, int from) {
    const unsigned char* const row = weight + static_cast<long long>(pair) * kResults * weight_row;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      const int q = from + 32 * i;
      if (q < quarters) ahead[i][0] = Weight::load(row, q), ahead[i][1] = Weight::load(row + distance, q);
    }
  };
  if (first_pair < pairs) bring(first_pair, lane);
  float norms[kDepth][dk::kQuarter] = {}, values[kTokens][kDepth][dk::kQuarter] = {};
  const auto hold_norms = [&](int from) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i)
      if (from + 32 * i < quarters) load_quarter(norm, from + 32 * i, norms[i]);
  };
  if (norm) hold_norms(lane);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  if (given) tokens = min(tokens, *given);
  const int count = min(tokens - static_cast<int>(blockIdx.y) * kTokens, kTokens);
  if (count <= 0) return;

  // The inputs of a turn, all before any of them is used. Where they are all inputs they stay for all pairs.
  const In* const own = x + blockIdx.y * kTokens * x_row;
  const auto hold_inputs = [&](int from) {
#pragma unroll
    for (int t = 0; t < kTokens; ++t)
#pragma unroll
      for (int i = 0; i < kDepth; ++i)
        if (from + 32 * i < quarters) load_quarter(own + min(t, count - 1) * x_row, from + 32 * i, values[t][i]);
  };
  hold_inputs(lane);
  const int token_of_lane = lane * kTokens / 32, token = blockIdx.y * kTokens + token_of_lane;
  const bool writes = lane % (32 / kTokens) == 0 && token_of_lane < count;
  float by = 1.0f;
  for (int pair = first_pair; pair < pairs; pair += pairs_at_once) {
    const bool squared = norm && pair == first_pair;
    float before[kResults] = {};
    if (writes && residual)
#pragma unroll
      for (int i = 0; i < kResults; ++i) before[i] = residual[token * residual_row + pair * kResults + i];

    float sums[2][kTokens] = {}, squares[kTokens] = {};
    for (int from = lane; from - lane < quarters; from += kStep) {
      if (quarters > kStep && !(from == lane && pair == first_pair)) {
        hold_inputs(from);
        if (norm) hold_norms(from);
      }
      Weight now[kDepth][2];
#pragma unroll
      for (int i = 0; i < kDepth; ++i) now[i][0] = ahead[i][0], now[i][1] = ahead[i][1];
      if (from - lane + kStep < quarters) {
        bring(pair, from + kStep);
      } else if (pair + pairs_at_once < pairs) {
        bring(pair + pairs_at_once, lane);
      }
#pragma unroll
      for (int i = 0; i < kDepth; ++i) {
        if (from + 32 * i >= quarters) break;
        float w[2][dk::kQuarter];
        now[i][0].floats(w[0]), now[i][1].floats(w[1]);
        if (norm)
#pragma unroll
          for (int j = 0; j < dk::kQuarter; ++j) w[0][j] *= norms[i][j], w[1][j] *= norms[i][j];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
          const float(&of)[dk::kQuarter] = values[t][i];
#pragma unroll
          for (int j = 0; j < dk::kQuarter; ++j) {
            sums[0][t] = __fmaf_rn(w[0][j], of[j], sums[0][t]);
            sums[1][t] = __fmaf_rn(w[1][j], of[j], sums[1][t]);
          }
          if (squared)
#pragma unroll
            for (int j = 0; j < dk::kQuarter; ++j) squares[t] = __fmaf_rn(of[j], of[j], squares[t]);
        }
      }
    }
    add_lanes<kTokens>(sums[0]);
    add_lanes<kTokens>(sums[1]);
    if (squared) {
      add_lanes<kTokens>(squares);
      by = by_squares(squares[0], inputs, eps);
    }
    if (!writes) continue;
    const float a = by * sums[0][0], b = by * sums[1][0];
    Out* const to = out + token * out_row + pair * kResults;
    if constexpr (kForm == kGated) {
      to[0] = dk::from_float<Out>(gated(a, b));
    } else {
      const dk::Vec<Out, 2> both = {dk::from_float<Out>(before[0] + a), dk::from_float<Out>(before[1] + b)};
      both.store(to);
    }
  }
}

// The same for many tokens. grid: (any, ceil(tokens / (8 * kTiles))), block: 32 * warps, warps 1 to 12
//
// A warp has 16 rows of weights, and of the inputs 64 of every 64 * warps. How it makes products: see dk/mma.cuh; what
// input a lane has at which place is free, as long as weights and tokens have it at the same one: it has a quarter of 32
// of both. The sums of the warps are added up in their order.
template <typename Weight, typename In, typename Out, Form kForm, int kTiles>
__global__ void __launch_bounds__(32 * kMostWarps)
    quantized_linear_many(const In* x, const unsigned char* weight, const float* norm, const float* residual,
                          const int* given, Out* out, int tokens, int inputs, int outputs, long long weight_row,
                          long long x_row, long long residual_row, long long out_row, float eps) {
  constexpr int kTokens = kColumns * kTiles, kResults = kForm == kGated ? kRows / 2 : kRows;  // of a block; rows of out
  constexpr int kPadded = kRows + 4;  // the lanes of a warp write to different banks
  __shared__ float parts[kMostWarps][kTokens][kPadded], squares[kMostWarps][kTokens];
  const int thread = threadIdx.x, warps = blockDim.x / 32, warp = thread / 32;
  const int r = thread % 32 / 4, j = thread % 4;
  const int quarters = inputs / dk::kQuarter, step = 4 * kHeld * warps, first = 4 * kHeld * warp + j;
  const int tiles = outputs / kResults;

  // Rows r and r + 8 of a product are those of the tile, or, of kGated, rows r of both halves of the matrix.
  const long long distance = (kForm == kGated ? outputs : kRows / 2) * weight_row;
  Weight ahead[kHeld][2];
  const auto bring = [&](int tile, int from) {
    const unsigned char* const row = weight + (static_cast<long long>(tile) * kResults + r) * weight_row;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int q = from + 4 * i;
      if (q < quarters) ahead[i][0] = Weight::load(row, q), ahead[i][1] = Weight::load(row + distance, q);
    }
  };
  if (blockIdx.x < tiles) bring(blockIdx.x, first);
  for (int i = 0; norm && i < kHeld; ++i)
    if (first + 4 * i < quarters) dk::prefetch_l1(norm + dk::quarter_begin(first + 4 * i));
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  if (given) tokens = min(tokens, *given);
  const int count = min(tokens - static_cast<int>(blockIdx.y) * kTokens, kTokens);
  if (count <= 0) return;

  const In* const own = x + blockIdx.y * kTokens * x_row;
  unsigned high[kHeld][kTiles][2][2], low[kHeld][kTiles][2][2];  // tokens, of the first and the last four of a quarter
  float of_squares[kTiles] = {};
  const auto hold = [&](int from, bool squared) {
    float values[kHeld][kTiles][dk::kQuarter] = {};  // all before any of them is used
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const int q = from + 4 * i, token = kColumns * t + r;
        if (q < quarters && token < count) load_quarter(own + token * x_row, q, values[i][t]);
      }
#pragma unroll
    for (int i = 0; i < kHeld; ++i)
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
        const float(&of)[dk::kQuarter] = values[i][t];
        if (squared)
#pragma unroll
          for (int k = 0; k < dk::kQuarter; ++k) of_squares[t] = __fmaf_rn(of[k], of[k], of_squares[t]);
#pragma unroll
        for (int k = 0; k < 4; ++k) split(of[2 * k], of[2 * k + 1], high[i][t][k / 2][k % 2], low[i][t][k / 2][k % 2]);
      }
  };
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const bool is_first = tile == blockIdx.x;
    float sums[kTiles][4] = {};
    for (int from = first; from - first < quarters; from += step) {
      if (is_first || step < quarters) hold(from, norm && is_first);
      Weight now[kHeld][2];
#pragma unroll
      for (int i = 0; i < kHeld; ++i) now[i][0] = ahead[i][0], now[i][1] = ahead[i][1];
      if (from - first + step < quarters) {
        bring(tile, from + step);
      } else if (tile + gridDim.x < tiles) {
        bring(tile + gridDim.x, first);
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        const int q = from + 4 * i;
        if (q - j >= quarters) break;
        float w[2][dk::kQuarter];
        now[i][0].floats(w[0]), now[i][1].floats(w[1]);
        if (norm) {
          float n[dk::kQuarter];
          load_quarter(norm, q, n);
#pragma unroll
          for (int k = 0; k < dk::kQuarter; ++k) w[0][k] *= n[k], w[1][k] *= n[k];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          unsigned of_high[4], of_low[4];
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            const float* const two = &w[k % 2][4 * half + k / 2 * 2];
            split(two[0], two[1], of_high[k], of_low[k]);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) dk::mma<__nv_bfloat16>(sums[t], of_high, low[i][t][half]);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) dk::mma<__nv_bfloat16>(sums[t], of_low, high[i][t][half]);
#pragma unroll
          for (int t = 0; t < kTiles; ++t) dk::mma<__nv_bfloat16>(sums[t], of_high, high[i][t][half]);
        }
      }
    }

    if (!is_first) __syncthreads();  // all have read what the tile before left
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int k = 0; k < 4; ++k) parts[warp][kColumns * t + 2 * j + k % 2][r + k / 2 * 8] = sums[t][k];
      if (!is_first || !norm) continue;
      float square = of_squares[t];
      square += __shfl_xor_sync(~0u, square, 1);
      square += __shfl_xor_sync(~0u, square, 2);
      if (j == 0) squares[warp][kColumns * t + r] = square;
    }
    __syncthreads();
    for (int i = thread; i < count * kResults; i += blockDim.x) {
      const int of_tile = i % kResults, of_block = i / kResults, row = tile * kResults + of_tile;
      const long long token = blockIdx.y * kTokens + of_block;
      float sum = 0.0f, other = 0.0f, square = 0.0f;
      for (int w = 0; w < warps; ++w) {
        sum += parts[w][of_block][of_tile];
        if (kForm == kGated) other += parts[w][of_block][of_tile + 8];
        if (norm) square += squares[w][of_block];
      }
      const float by = norm ? by_squares(square, inputs, eps) : 1.0f;
      const float result = kForm == kGated ? gated(by * sum, by * other)
                                           : (residual ? residual[token * residual_row + row] : 0.0f) + by * sum;
      out[token * out_row + row] = dk::from_float<Out>(result);
    }
  }
}
