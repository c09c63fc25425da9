// The indexer: by which score each token of a step chooses the entries that it attends to.
//
//   score[t][j] = sum over heads h of weight[t][h] * max(0, q[t][h] . key[j])
//
// for the entries j of 4 tokens that end no later than token t does: those below (position + 1) / 4. Queries and keys
// are rows of 128 elements of one format; a query's e4m3 scale is in its weight.

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/mma.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"

namespace {

constexpr int kDim = 128;
constexpr int kHeads = 64;  // at most
constexpr int kThreads = 256, kWarps = kThreads / 32;

// Of indexer_query.
constexpr int kLanes = 8;   // that have a row
constexpr int kChunks = 2;  // of eight elements, of a lane: the first in the row's first half, the second in its last

// Of indexer_logits.
constexpr int kTokens = 4;  // of a request, that share the keys which a block has read
constexpr int kEntries = 32;  // of a warp at a time
constexpr int kQueryBytes = 2 * kHeads * kDim;  // of a token, in shared memory

// Eight e2m1 times a power of two, as pairs of bfloat16: (0, 4), (1, 5), (2, 6), (3, 7). `scale` is its exponent + 127.
__device__ void widen_e2m1(unsigned eight, unsigned scale, unsigned* pairs) {
  const unsigned power = scale << 7 | scale << 23;
  for (int i = 0; i < 4; ++i) {
    // Exponent and mantissa where a bfloat16 has the low bits of its own: 2^-126 of the value, subnormal for 0.5.
    const int up = 6 - 4 * i;
    const unsigned magnitudes = (up > 0 ? eight << up : eight >> -up) & 0x01c001c0;
    const unsigned small = (eight << (12 - 4 * i) & 0x80008000) | magnitudes, by = 0x7e807e80;
    const __nv_bfloat162 both = __hmul2(__hmul2(reinterpret_cast<const __nv_bfloat162&>(small),
                                                reinterpret_cast<const __nv_bfloat162&>(by)),
                                        reinterpret_cast<const __nv_bfloat162&>(power));
    pairs[i] = reinterpret_cast<const unsigned&>(both);
  }
}

// A quarter of a row's elements: of each 64 bytes of the row 16. So four lanes with the quarters of a row read whole
// sectors, and of e2m1 each has the block of one scale.
template <int kFormat>
struct Quarter {
  static constexpr int kPieces = dk::Record<kFormat>::kValueBytes / 64;
  static constexpr int kPairs = kDim / 8;
  uint4 pieces[kPieces];

  // Of a piece's bytes, in the row.
  static __device__ int offset(int i, int quarter) { return 64 * i + 16 * quarter; }
  __device__ void load(const unsigned char* row, int quarter) {
    for (int i = 0; i < kPieces; ++i) pieces[i] = *reinterpret_cast<const uint4*>(row + offset(i, quarter));
  }
  // As pairs of factors, in an order which is the same for queries and keys, so that dot products do not see it.
  __device__ void widen(unsigned scales, int quarter, unsigned (&pairs)[kPairs]) const {
    for (int i = 0; i < kPieces; ++i) {
      const unsigned words[] = {pieces[i].x, pieces[i].y, pieces[i].z, pieces[i].w};
      for (int j = 0; j < 4; ++j) {
        unsigned* const to = pairs + (4 * i + j) * (kPairs / kPieces / 4);
        if constexpr (kFormat == dk::kKeyMxfp4) {
          widen_e2m1(words[j], scales >> 8 * quarter & 0xff, to);
        } else if constexpr (kFormat == dk::kKeyFp8) {
          to[0] = dk::halves(words[j] & 0xffff), to[1] = dk::halves(words[j] >> 16);
        } else {
          to[0] = words[j];
        }
      }
    }
  }
};

// A row, whose chunks l and l + kLanes lane l has.
struct Row {
  float x[kChunks][8];

  __device__ void load(int k, uint4 raw) { dk::floats_of(raw, x[k]); }

  // Times the Hadamard matrix of 128 (Sylvester's order) / sqrt(128). All lanes of a warp come here together.
  __device__ void transform(int lane) {
    const auto meet = [](float& a, float& b) {
      const float was = a;
      a = was + b, b = was - b;
    };
    for (int step = 1; step < 8; step *= 2)
      for (int k = 0; k < kChunks; ++k)
        for (int j = 0; j < 8; ++j)
          if (!(j & step)) meet(x[k][j], x[k][j + step]);
    for (int step = 1; step < kLanes; step *= 2)
      for (int k = 0; k < kChunks; ++k)
        for (float& each : x[k]) each = fmaf(each, lane & step ? -1.0f : 1.0f, __shfl_xor_sync(~0u, each, step));
    for (int j = 0; j < 8; ++j) meet(x[0][j], x[1][j]);
    for (int k = 0; k < kChunks; ++k)
      for (float& each : x[k]) each *= 0.08838834764831845f;
  }
};

// Of each element the larger one, of this lane and of the one `step` away.
__device__ __nv_bfloat162 larger(__nv_bfloat162 a, int step) {
  const unsigned there = __shfl_xor_sync(~0u, reinterpret_cast<const unsigned&>(a), step);
  return __hmax2(a, reinterpret_cast<const __nv_bfloat162&>(there));
}

// Rounded to bfloat16, a row's chunks as a format has them, and the exponent + 127 of the scale of each. All lanes of a
// warp come here together.
template <int kFormat>
struct Encoded {
  static constexpr int kWords = dk::Record<kFormat>::kValueBytes / (kDim / 8) / 4;
  dk::Vec<unsigned, kWords> words[kChunks] = {};
  unsigned exponents[kChunks] = {};

  __device__ void encode(const Row& row) {
    __nv_bfloat162 pairs[kChunks][4];  // to round one alone is slow
    for (int k = 0; k < kChunks; ++k)
      for (int j = 0; j < 4; ++j) pairs[k][j] = __floats2bfloat162_rn(row.x[k][2 * j], row.x[k][2 * j + 1]);
    if constexpr (kFormat == dk::kKeyBf16) {
      for (int k = 0; k < kChunks; ++k)
        for (int j = 0; j < 4; ++j) words[k].elements[j] = reinterpret_cast<const unsigned&>(pairs[k][j]);
    } else {
      scale(pairs);
      for (int k = 0; k < kChunks; ++k) {
        // Exact but for what is so small that it becomes 0.
        const __nv_bfloat162 by = __float2bfloat162_rn(dk::inverse_power_of_two(exponents[k]));
        for (__nv_bfloat162& pair : pairs[k]) pair = __hmul2(pair, by);
        if constexpr (kFormat == dk::kKeyMxfp4) {
          words[k].elements[0] = dk::e2m1_of(pairs[k][0], pairs[k][1]) | dk::e2m1_of(pairs[k][2], pairs[k][3]) << 16;
        } else {
          for (int j = 0; j < kWords; ++j) {
            const float2 low = __bfloat1622float2(pairs[k][2 * j]), high = __bfloat1622float2(pairs[k][2 * j + 1]);
            words[k].elements[j] = dk::e4m3_of(low.x, low.y, high.x, high.y);
          }
        }
      }
    }
  }

  // The exponents: of the blocks of 32 that the chunks are in, or of the row.
  __device__ void scale(const __nv_bfloat162 (&pairs)[kChunks][4]) {
    __nv_bfloat162 most[kChunks];
    for (int k = 0; k < kChunks; ++k) {
      most[k] = __habs2(pairs[k][0]);  // not from 0: where all are NaN it is NaN, as the reference has it
      for (int j = 1; j < 4; ++j) most[k] = __hmax2(most[k], __habs2(pairs[k][j]));
    }
    __nv_bfloat162 largest = __hmax2(__lows2bfloat162(most[0], most[1]), __highs2bfloat162(most[0], most[1]));
    largest = larger(larger(largest, 2), 1);
    if constexpr (kFormat == dk::kKeyMxfp4) {
      exponents[0] = dk::exponent_of_e2m1(__low2float(largest));
      exponents[1] = dk::exponent_of_e2m1(__high2float(largest));
    } else {
      largest = larger(largest, 4);
      exponents[0] = exponents[1] = dk::exponent_of_e4m3(fmaxf(__low2float(largest), __high2float(largest)));
    }
  }
};

}  // namespace

// grid: max_tokens, block: kLanes * heads, both one-dimensional
// tokens: [max_tokens, 4], of dk::StepToken
// q: [max_tokens, heads, 128], rows of a token contiguous, token by token q_row elements on
// weights, out_weights: [max_tokens, heads]
// cos_sin: [max_position, 64], in each row first the cosines of all pairs, then the sines
// values: [max_tokens, heads, bytes of a row]; scales: [max_tokens, heads, 4], of MXFP4 alone
//
// values, scales = record(q with its last 64 elements turned by the position, and transformed if `hadamard`)
// out_weights = weights * factor * (the scale of e4m3). All of padding is 0.
//
// heads is a multiple of 8 up to 64. All addresses of rows are multiples of 16 bytes.
template <typename W, int kFormat>
__global__ void __launch_bounds__(kHeads * kLanes, 3)
    indexer_query(const int* tokens, const __nv_bfloat16* q, const W* weights, const float* cos_sin,
                  unsigned char* values, unsigned char* scales, float* out_weights, long long q_row, int max_position,
                  float factor, bool hadamard) {
  static_assert(dk::Record<kFormat>::kDim == kDim, "queries have the format of keys");
  dk::prefetch_l2(q + blockIdx.x * q_row + threadIdx.x * (kDim / kLanes), true);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  // A block for a token, kLanes lanes for a head. All that is read comes before any of it is used; what need not wait
  // for the token, even of padding.
  const int t = blockIdx.x, heads = blockDim.x / kLanes;
  const int lane = threadIdx.x % kLanes, head = threadIdx.x / kLanes;
  const long long at = 1ll * t * heads + head;
  const dk::StepToken token = dk::StepToken::load(tokens, t);
  uint4 raw[kChunks];
  for (int k = 0; k < kChunks; ++k)
    raw[k] = *reinterpret_cast<const uint4*>(q + t * q_row + head * kDim + 8 * (lane + kLanes * k));
  float weight = 0.0f;
  if (lane == 0) weight = dk::to_float(weights[at]);
  const bool is_real = !token.is_padding();
  DK_CHECK(threadIdx.x != 0 || !is_real || (0 <= token.position && token.position < max_position),
           "row %d is at position %d: cos_sin has %d rows\n", t, token.position, max_position);
  const int position = min(max(token.position, 0), max_position - 1);
  const float* const cosines = cos_sin + 1ll * position * dk::kRotary + 4 * lane;
  const auto c = dk::Vec<float, 4>::load(cosines), s = dk::Vec<float, 4>::load(cosines + dk::kRotary / 2);

  Encoded<kFormat> made;
  if (is_real) {
    Row row;
    for (int k = 0; k < kChunks; ++k) row.load(k, raw[k]);
    for (int j = 0; j < 4; ++j) dk::turn(row.x[1][2 * j], row.x[1][2 * j + 1], c.elements[j], s.elements[j]);
    if (hadamard) row.transform(lane);
    made.encode(row);
    weight = __fmul_rn(weight, factor);
    if constexpr (kFormat == dk::kKeyFp8) weight = __fmul_rn(weight, dk::power_of_two(made.exponents[0]));
  }
  unsigned* const to = reinterpret_cast<unsigned*>(values + at * dk::Record<kFormat>::kValueBytes);
  for (int k = 0; k < kChunks; ++k) made.words[k].store(to + (lane + kLanes * k) * made.kWords);
  if (kFormat == dk::kKeyMxfp4 && lane % 4 == 0)
    for (int k = 0; k < kChunks; ++k) scales[4 * at + lane / 4 + 2 * k] = made.exponents[k];
  if (lane == 0) out_weights[at] = is_real ? weight : 0.0f;
}

// grid: (max_tokens, any), block: 256; shared: 4 * (64 * 256 + 64 * 4) bytes
// tokens: [max_tokens, 4], of dk::StepToken
// values, scales, weights: of queries, as indexer_query has made them, of `heads` heads
// pool, block_table: of keys, see dk::PagesOf
// logits: [max_tokens, width]
//
// logits[t][j] = score[t][j] for the entries j that token t sees, if it sees more than skip_up_to; nothing else is
// written.
//
// Rows of a request are taken four by four from its first one on, by the blocks of the first of the four; their warps
// go through the entries 32 at a time. The sum over heads has the same order for all.
template <int kFormat>
__global__ void __launch_bounds__(kThreads, 2)
    indexer_logits(const int* tokens, const unsigned char* values, const unsigned char* scales, const float* weights,
                   const unsigned char* pool, const int* block_table, float* logits, int pages, int table_width,
                   int page_bits, long long page_bytes, int heads, int width, int skip_up_to) {
  static_assert(kWarps * 16 == 2 * kHeads && kTokens == 4, "a warp stages 16 heads of two tokens");
  using T = typename dk::RowFactor<kFormat>::type;
  using Keys = Quarter<kFormat>;
  constexpr int kValueBytes = dk::Record<kFormat>::kValueBytes, kScaleBytes = dk::Record<kFormat>::kScaleBytes;
  extern __shared__ __align__(16) unsigned char shared[];
  float* const shared_weights = reinterpret_cast<float*>(shared + kTokens * kQueryBytes);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();

  const int t = blockIdx.x;
  const dk::StepToken token = dk::StepToken::load(tokens, t);
  if (token.is_padding() || (token.position - token.start) % kTokens != 0) return;
  const int rows = min(kTokens, token.end - token.position);
  const auto seen_by = [&](int i) -> int { return (token.position + i + 1) / 4; };
  const int most = seen_by(rows - 1), block_first = blockIdx.y * kWarps * kEntries;
  if (most <= skip_up_to || most <= block_first) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int quarter = lane % 4, r = lane / 4;  // of a row, and which of eight rows; see dk/mma.cuh

  // Queries into shared memory, as they are, where this thread itself makes A fragments of them: of every second token
  // heads r and r + 8 of the 16 from `sixteen` on. A fragment of the 16 heads has a chunk for each lane. Heads that
  // there are not are 0.
  const int sixteen = warp % 4 * 16, own_token = warp / 4;
  const auto chunk = [&](int token, int i) -> uint4* {
    return reinterpret_cast<uint4*>(shared + token * kQueryBytes + sixteen * 2 * kDim) + 32 * i + lane;
  };
  const auto at = [&](int token, int second) -> long long {
    return 1ll * (t + token) * heads + sixteen + r + 8 * second;
  };
#pragma unroll 1
  for (int i = own_token; i < rows; i += 2)
    for (int second = 0; second < 2; ++second) {
      const bool there = sixteen + 8 * second < heads;
      const unsigned char* const row = there ? values + at(i, second) * kValueBytes : values;
      for (int j = 0; j < Keys::kPieces; ++j)
        dk::copy_async_16(dk::shared_address(chunk(i, second * Keys::kPieces + j)), row + Keys::offset(j, quarter),
                          there ? 16 : 0);
    }
  dk::commit_copies();
  // Weight and scales of one of these rows: four lanes have them of two heads of two tokens.
  float weight = 0.0f;
  unsigned query_scales = 0;
  const int of_token = own_token + quarter / 2 * 2, of_second = quarter % 2;
  if (of_token < rows && sixteen + 8 * of_second < heads) {
    weight = weights[at(of_token, of_second)];
    if constexpr (kFormat == dk::kKeyMxfp4)
      query_scales = reinterpret_cast<const unsigned*>(scales)[at(of_token, of_second)];
  }

  // Keys of the 32 entries from `first` on: rows r, r + 8, r + 16 and r + 24, a quarter of each, and the scales of
  // entry first + lane. Those that nobody sees are 0.
  const dk::PagesOf<kFormat, const unsigned char> keys{pool, block_table, pages, table_width, page_bits, page_bytes};
  Keys raw[4];
  unsigned key_scales;
  const auto load_keys = [&](int first) {
    const int entry = first + lane, page = entry < most ? keys.page_of(token.request, entry) : -1;
    key_scales = 0;
    if (kScaleBytes && page >= 0)
      key_scales = *reinterpret_cast<const unsigned*>(keys.scales(page, keys.place_of(entry)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 8 * i + r, of_row = __shfl_sync(~0u, page, row);
      raw[i] = {};
      if (of_row >= 0) raw[i].load(keys.values(of_row, keys.place_of(first + row)), quarter);
    }
  };
  int first = block_first + warp * kEntries;
  load_keys(first);

  // Queries as A fragments.
  shared_weights[of_token * kHeads + sixteen + r + 8 * of_second] = weight;
  dk::wait_for_copies<0>();
#pragma unroll 1
  for (int i = own_token; i < rows; i += 2) {
    unsigned pairs[2][Keys::kPairs];
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      Keys q;
      for (int j = 0; j < Keys::kPieces; ++j) q.pieces[j] = *chunk(i, second * Keys::kPieces + j);
      q.widen(__shfl_sync(~0u, query_scales, i / 2 * 2 + second, 4), quarter, pairs[second]);
    }
    for (int j = 0; j < Keys::kPairs; j += 2)
      *chunk(i, j / 2) = {pairs[0][j], pairs[1][j], pairs[0][j + 1], pairs[1][j + 1]};
  }
  __syncthreads();

  // The one of the 32 entries whose score this lane stores.
  const int own_row = r / 2 * 8 + 2 * quarter + r % 2;
  while (first < most) {
    unsigned b[4][Keys::kPairs];  // keys as B fragments
#pragma unroll
    for (int i = 0; i < 4; ++i)
      raw[i].widen(kFormat == dk::kKeyMxfp4 ? __shfl_sync(~0u, key_scales, 8 * i + r) : 0, quarter, b[i]);
    const float scale = __uint_as_float(__shfl_sync(~0u, key_scales, own_row));  // of e4m3

#pragma unroll 1
    for (int i = 0; i < rows; ++i) {
      const int seen = seen_by(i);
      if (seen <= skip_up_to || seen <= first) continue;
      float sums[8] = {};  // of heads r, r + 8, r + 16, ...: of entries c and c + 1 of each eight
#pragma unroll 1
      for (int h = 0; h < heads; h += 16) {
        const uint4* const q = reinterpret_cast<const uint4*>(shared + i * kQueryBytes + h * 2 * kDim) + lane;
        const float* const w = shared_weights + i * kHeads + h + r;
        float dots[4][4] = {};  // 16 heads by 8 entries each
#pragma unroll
        for (int j = 0; j < Keys::kPairs; j += 2) {
          const uint4 of_lane = q[16 * j];
          const unsigned a[4] = {of_lane.x, of_lane.y, of_lane.z, of_lane.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) dk::mma<T>(dots[n], a, {b[n][j], b[n][j + 1]});
        }
        const float low = w[0], high = w[8];
#pragma unroll
        for (int n = 0; n < 4; ++n)
          for (int k = 0; k < 2; ++k) {
            float& sum = sums[2 * n + k];
            sum = __fmaf_rn(low, dots[n][k] < 0.0f ? 0.0f : dots[n][k], sum);  // NaN stays NaN
            sum = __fmaf_rn(high, dots[n][2 + k] < 0.0f ? 0.0f : dots[n][2 + k], sum);
          }
      }
      // The eight lanes that have sums of the same entries add them up, and each keeps that of one entry.
#pragma unroll
      for (int half = 4; half; half /= 2)
        for (int k = 0; k < half; ++k) {
          const float left = sums[k], right = sums[k + half];
          sums[k] = (r & half ? right : left) + __shfl_xor_sync(~0u, r & half ? left : right, 4 * half);
        }
      const float score = kFormat == dk::kKeyFp8 ? __fmul_rn(sums[0], scale) : sums[0];
      if (first + own_row < seen) logits[1ll * (t + i) * width + first + own_row] = score;
    }
    first += gridDim.y * kWarps * kEntries;
    load_keys(first);
  }
}
