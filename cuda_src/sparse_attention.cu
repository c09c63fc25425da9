// Attention of a step's tokens to rows that each has chosen, where a row is both key and value (V4's latent attention).
//
// A token at position p attends to the `window` positions up to its own, and to entries that its request's tokens were
// compressed to: all that it sees, or those of a list. With r over those rows,
//   out = sum exp(scale * q r) r / (sum exp(scale * q r) + exp(sink)),
// whose last 64 elements are turned back by p, for the rows were turned by their own positions.
//
// A block has 64 heads of one token after another, or its part of the rows of one token, 64 rows at a time. Two warpgroups
// bring rows: find them, read them, and put them, widened to 16 bits, into one of two tiles. The other two take turns at
// multiplying a tile with the queries and making probabilities, so that one does while the other's products go on; then both
// multiply these with the rows, each for half of the dimensions. The parts of a cluster's blocks are added up in the order of
// their ranks.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/memory_order.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/warpgroup.cuh"

namespace {

constexpr int kThreads = 512, kWarpgroup = 128;
constexpr int kDim = 512, kHeads = 64, kRows = 64;  // of a block, and of a tile
constexpr int kMostSplits = 8;                      // blocks of a cluster
constexpr unsigned kPanel = kRows * 128;            // bytes of 64 columns of a tile, or of the queries
constexpr unsigned kTileBytes = kDim / 64 * kPanel;
// Where things are in shared memory: queries, two tiles of rows, two of probabilities; of each tile which of its rows there
// are, what sums so far are multiplied by, and the maximum so far; of each warpgroup the sum over its tiles; and of each head
// the maximum and the sum, and what others of the cluster have of some heads. In the end results are where the queries were, and those of others where the tiles were.
constexpr unsigned kTiles = kTileBytes, kProbabilities = kTiles + 2 * kTileBytes;
constexpr unsigned kPresent = kProbabilities + 2 * kPanel, kFactors = kPresent + 2 * 8;
constexpr unsigned kMaxima = kFactors + 2 * kHeads * 4, kSums = kMaxima + 2 * kHeads * 4;
constexpr unsigned kTotals = kSums + 2 * kHeads * 4;

// kSource of an instance: what the list of entries is.
constexpr int kNoEntries = 0, kAllEntries = 1, kListed = 2;

// The block's barriers. Those of tiles are two each.
constexpr int kQueries = 1, kFull = 2, kEmpty = 4, kProbable = 6, kRaised = 8, kSummed = 10, kStaged = 11;

// What products are made of. Rows of 8 bits become halves: probabilities have more bits in them, and widening is cheap.
template <int kFormat>
struct Factor {
  using type = __nv_bfloat16;
};
template <>
struct Factor<dk::kKvFp8> {
  using type = __half;
};

// What one of the four lanes of a row reads of it: a quarter of each block.
struct Piece {
  uint4 coded[7];    // 16 e4m3
  uint4 rotated[2];  // eight bfloat16
  uint2 scales;      // of the row
};

__device__ inline unsigned times(unsigned pair, __half2 factor) {
  const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), factor);
  return reinterpret_cast<const unsigned&>(product);
}
// 16 e4m3, each times factor, as two chunks of halves.
__device__ inline void widen(const uint4& coded, __half2 factor, uint4& low, uint4& high) {
  low = {times(dk::halves(coded.x), factor), times(dk::halves(coded.x >> 16), factor),
         times(dk::halves(coded.y), factor), times(dk::halves(coded.y >> 16), factor)};
  high = {times(dk::halves(coded.z), factor), times(dk::halves(coded.z >> 16), factor),
          times(dk::halves(coded.w), factor), times(dk::halves(coded.w >> 16), factor)};
}
// Two bfloat16 as floats, and as halves.
__device__ inline float2 floats(unsigned pair) {
  return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}
__device__ inline unsigned halves_of(unsigned pair) {
  const float2 both = floats(pair);
  return dk::pair<__half>(both.x, both.y);
}
__device__ inline uint4 halves_of(const uint4& pairs) {
  return {halves_of(pairs.x), halves_of(pairs.y), halves_of(pairs.z), halves_of(pairs.w)};
}

// Which rows a token attends to, and which of their tiles are this block's.
struct Rows {
  int request, position;
  int of_window, count;  // those of the window come first
  int tile, end_tile;

  __device__ Rows(const int* tokens, const int* visible, int row, int window, int list, bool has_list) {
    const dk::StepToken token = dk::StepToken::load(tokens, row);
    request = token.request, position = token.position;
    of_window = token.is_padding() ? 0 : min(token.position + 1, window);
    int entries = 0;
    if (visible != nullptr && !token.is_padding()) entries = has_list ? min(list, visible[row]) : visible[row];
    count = of_window + entries;
    const int tiles = (count + kRows - 1) / kRows;
    tile = tiles * static_cast<int>(blockIdx.x) / static_cast<int>(gridDim.x);
    end_tile = tiles * static_cast<int>(blockIdx.x + 1) / static_cast<int>(gridDim.x);
  }
};

}  // namespace

// grid: (splits, ceil(heads / 64), blocks), blocks at most max_tokens, and max_tokens if there are splits; in clusters of
// (splits, 1, 1); block: 512; shared: 215568
// q, out: [max_tokens, heads, 512], token by token q_stride elements on in q, and none between in out
// lse: [max_tokens, heads]; sinks: [heads]; cos_sin: [max_position, 64]; each may be null, and is not there then
// tokens: [max_tokens, 4], of dk::StepToken
// window_..., entry_...: rows in pages, see dk/records.cuh
// visible: [max_tokens], the entries that a token sees; listed: [max_tokens, list], of which min(list, visible) count, and a
// negative one is none
//
// lse is the natural logarithm of the sum of exp(scale * q r), without the sink. Without rows out is 0, lse -inf; so are
// padding's.
template <int kFormat, int kSource>
__global__ __launch_bounds__(kThreads, 1) void sparse_attention(
    const __nv_bfloat16* q, const int* tokens, const unsigned char* window_pool, const int* window_table,
    int window_pages, int window_width, int window_bits, long long window_page_bytes, const unsigned char* entry_pool,
    const int* entry_table, int entry_pages, int entry_width, int entry_bits, long long entry_page_bytes,
    const int* visible, const int* listed, const float* sinks, const float* cos_sin, __nv_bfloat16* out, float* lse,
    int max_tokens, int heads, int window, int list, int q_stride, int max_position, float scale) {
  static_assert(dk::Record<kFormat>::kDim == kDim, "rows of keys and values");
  constexpr bool k8Bit = kFormat == dk::kKvFp8;
  using T = typename Factor<kFormat>::type;

  extern __shared__ __align__(1024) unsigned char shared[];  // all of it: products want it to begin so
  const unsigned base = dk::shared_address(shared);
  unsigned char* present = shared + kPresent;                          // [2][8]: of 8 rows each
  float* factors = reinterpret_cast<float*>(shared + kFactors);        // [2][kHeads]
  float* maxima = reinterpret_cast<float*>(shared + kMaxima);          // [2][kHeads]
  float* sums = reinterpret_cast<float*>(shared + kSums);              // [2][kHeads]
  float2* totals = reinterpret_cast<float2*>(shared + kTotals);        // [2][kHeads]: maximum, sum; those of others
  const int warpgroup = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4 * 2;  // see dk/warpgroup.cuh
  const int rank = blockIdx.x, splits = gridDim.x, first_head = blockIdx.y * kHeads;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const auto rows_of = [&](int row) -> Rows {
    return Rows(tokens, kSource == kNoEntries ? nullptr : visible, row, window, list, kSource == kListed);
  };

  if (warpgroup < 2) {
    dk::take_registers<192>();
    // Both bring the queries, a warp eight heads.
    const auto read_queries = [&](int row) {
      uint4 pairs[8][2];
  #pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int head = first_head + threadIdx.x / 32 * 8 + i;
        for (int j = 0; j < 2; ++j)
          pairs[i][j] = head < heads ? *reinterpret_cast<const uint4*>(q + 1ll * row * q_stride + head * kDim +
                                                                       (j * 32 + lane) * 8)
                                     : uint4{};
      }
  #pragma unroll
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 2; ++j)
          *reinterpret_cast<uint4*>(shared + dk::in_panels(threadIdx.x / 32 * 8 + i, j * 32 + lane, kPanel)) =
              k8Bit ? halves_of(pairs[i][j]) : pairs[i][j];
      dk::fence_proxy_async_shared();
      dk::meet_acq_rel_cta(kQueries, 2 * kWarpgroup);
      if (row + gridDim.z < max_tokens)
        dk::prefetch_l2(q + 1ll * (row + gridDim.z) * q_stride + first_head * kDim + threadIdx.x * 128,
                        first_head + threadIdx.x / 4 < heads);
    };
    const auto add_rows = [&](float (&o)[2][kDim / 8], float (&sum)[2], int stage) {
      dk::meet_acq_rel_cta(kProbable + stage, 2 * kWarpgroup);
      const float low = factors[stage * kHeads + warp * 16 + r], high = factors[stage * kHeads + warp * 16 + r + 8];
      if (__any_sync(~0u, low != 1.0f || high != 1.0f)) {
  #pragma unroll
        for (int j = 0; j < kDim / 4; ++j) o[j / 64][j % 64] *= j & 2 ? high : low;
        sum[0] *= low, sum[1] *= high;
      }
      const unsigned probabilities = base + kProbabilities + stage * kPanel;
      const unsigned values = base + kTiles + stage * kTileBytes + warpgroup * 4 * kPanel;
      dk::begin_products();
  #pragma unroll
      for (int step = 0; step < kRows / 16; ++step)
        for (int part = 0; part < 2; ++part)
          dk::multiply_64_by<T, 128>(o[part], dk::by_rows(probabilities + step * 32),
                                  dk::by_columns(values + part * 2 * kPanel + step * 2048, kPanel), true);
      dk::commit_products();
      dk::wait_for_products<0>();
      dk::arrive_release_cta(kEmpty + stage, kThreads);
    };
    // They take turns at making the probabilities of a tile, and what sums so far are multiplied by. The maximum goes from one
    // to the other.
    const auto make_probabilities = [&](int stage, bool is_first, bool is_last, float (&added)[2]) {
      dk::meet_acq_rel_cta(kFull + stage, 3 * kWarpgroup);
      const float unit = scale * dk::kLog2e;
      const unsigned keys = base + kTiles + stage * kTileBytes;
      float s[kRows / 2];
      dk::begin_products();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const unsigned at = step / 4 * kPanel + step % 4 * 32;
        dk::multiply_64_by<T, 64>(s, dk::by_rows(base + at), dk::by_rows(keys + at), step > 0);
      }
      dk::commit_products();
      dk::wait_for_products<0>();

      float most[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) s[j] *= unit;
      const unsigned long long there = *reinterpret_cast<const unsigned long long*>(present + stage * 8);
      if (there != ~0ull) {
#pragma unroll
        for (int j = 0; j < kRows / 2; ++j)
          if (!(there >> (j / 4 * 8 + c + j % 2) & 1)) s[j] = -CUDART_INF_F;
      }
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) most[j >> 1 & 1] = fmaxf(most[j >> 1 & 1], s[j]);
      for (int h = 0; h < 2; ++h)
        for (int step = 1; step < 4; step *= 2) most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], step));
      if (!is_first) dk::meet_acq_rel_cta(kRaised + (stage ^ 1), 2 * kWarpgroup);
      float from[2];
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        float maximum = is_first ? -CUDART_INF_F : maxima[(stage ^ 1) * kHeads + head], factor = 1.0f;
        if (most[h] > maximum + dk::kSlack) {  // never so between two -inf
          factor = dk::exp2_approx(maximum - most[h]);
          maximum = most[h];
        }
        from[h] = maximum == -CUDART_INF_F ? 0.0f : maximum;
        if (c == 0) factors[stage * kHeads + head] = factor, maxima[stage * kHeads + head] = maximum;
      }
      if (!is_last) dk::arrive_release_cta(kRaised + stage, 2 * kWarpgroup);
      added[0] = added[1] = 0.0f;
      // Made anew for each tile: there are no registers to keep the places of all chunks.
      unsigned place = kProbabilities + (warp * 16 + r) * 128 + (r << 4) + c * 2;
      asm volatile("" : "+r"(place));
#pragma unroll
      for (int j = 0; j < kRows / 2; j += 2) {
        const int h = j >> 1 & 1;
        const float first = dk::exp2_approx(s[j] - from[h]), second = dk::exp2_approx(s[j + 1] - from[h]);
        added[h] += first + second;
        *reinterpret_cast<unsigned*>(shared + (place ^ j / 4 << 4) + stage * kPanel + h * 1024) =
            dk::pair<T>(first, second);
      }
      dk::fence_proxy_async_shared();
    };
    // Divide what this block has of a token by its sum, and put it where the queries were; the cluster's blocks give each other
    // what they have of heads of which others make the results; and each makes some.
    const int each = kHeads / splits;
    const auto part_at = [&](int from, int head, int chunk) -> unsigned {  // eight T of one of this block's heads
      return splits == 1 ? dk::in_panels(head, chunk, kPanel) : kTiles + ((from * each + head) * (kDim / 8) + chunk) * 16;
    };
    const auto put_results = [&](float (&o)[2][kDim / 8], const float (&last_maximum)[2], int row) {
      unsigned place = warpgroup * 4 * kPanel + (warp * 16 + r) * 128 + (r << 4) + c * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        const float sum = sums[head] + sums[kHeads + head], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
        if (warpgroup == 0 && c == 0) totals[head] = {last_maximum[h], sum};
#pragma unroll
        for (int block = 0; block < 32; ++block) {  // of eight columns
          const float even = o[block / 16][block % 16 * 4 + 2 * h], odd = o[block / 16][block % 16 * 4 + 2 * h + 1];
          *reinterpret_cast<unsigned*>(shared + (place ^ block % 8 << 4) + block / 8 * kPanel + h * 1024) =
              dk::pair<T>(even * inverse, odd * inverse);
        }
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);
      const int first = threadIdx.x / 32;  // of the eight warps
      if (splits > 1) {
        dk::meet_acq_rel_cluster();  // nobody reads tiles any more
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
          const int head = i / 2 * 8 + first, chunk = i % 2 * 32 + lane;
          dk::store_shared_cluster_16(base + part_at(rank, head % each, chunk), head / each,
                                      *reinterpret_cast<const uint4*>(shared + dk::in_panels(head, chunk, kPanel)));
        }
        if (threadIdx.x < kHeads)
          dk::store_shared_cluster_8(base + kTotals + (kHeads + rank * each + threadIdx.x % each) * 8,
                                     threadIdx.x / each, totals[threadIdx.x]);
        dk::meet_acq_rel_cluster();
      }
      const int position = min(dk::StepToken::load(tokens, row).position, max_position - 1);
#pragma unroll 1
      for (int i = first; i < each; i += 8) {
        const int head = first_head + rank * each + i;
        if (head >= heads) break;
        // Lane l has the weight of what block l has.
        float2 total = {-CUDART_INF_F, 0.0f};
        if (lane < splits) total = totals[splits == 1 ? i : kHeads + lane * each + i];
        float maximum = total.x;
        for (int step = 1; step < kMostSplits; step *= 2)
          maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, step));
        maximum = __shfl_sync(~0u, maximum == -CUDART_INF_F ? 0.0f : maximum, 0);
        const float weight = dk::exp2_approx(total.x - maximum) * total.y;
        float sum = 0.0f, y[2][8] = {};
#pragma unroll 1
        for (int from = 0; from < splits; ++from) {
          const float by = __shfl_sync(~0u, weight, from);
          sum += by;
          for (int j = 0; j < 2; ++j) {
            const auto x = dk::Vec<T, 8>::load(reinterpret_cast<const T*>(shared + part_at(from, i, j * 32 + lane)));
            for (int e = 0; e < 8; ++e) y[j][e] += by * dk::to_float(x.elements[e]);
          }
        }
        if (lse != nullptr && lane == 0)
          lse[1ll * row * heads + head] = sum == 0.0f ? -CUDART_INF_F : (maximum + __log2f(sum)) * dk::kLn2;
        const float sink = sinks == nullptr ? -CUDART_INF_F : sinks[head];
        const float inverse = sum == 0.0f ? 0.0f : 1.0f / (sum + dk::exp2_approx(sink * dk::kLog2e - maximum));
        for (int j = 0; j < 2; ++j)
          for (int e = 0; e < 8; ++e) y[j][e] *= inverse;
        const int pair = (lane - 24) * 4;  // of the last columns, which are turned back by the token's position
        if (cos_sin != nullptr && pair >= 0) {
          const float* angles = cos_sin + 1ll * position * dk::kRotary + pair;
          for (int e = 0; e < 4; ++e) dk::turn(y[1][2 * e], y[1][2 * e + 1], angles[e], -angles[dk::kRotary / 2 + e]);
        }
        for (int j = 0; j < 2; ++j) {
          const uint4 eight = {dk::pair<__nv_bfloat16>(y[j][0], y[j][1]), dk::pair<__nv_bfloat16>(y[j][2], y[j][3]),
                               dk::pair<__nv_bfloat16>(y[j][4], y[j][5]), dk::pair<__nv_bfloat16>(y[j][6], y[j][7])};
          *reinterpret_cast<uint4*>(out + (1ll * row * heads + head) * kDim + (j * 32 + lane) * 8) = eight;
        }
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);  // the queries may come
    };

    unsigned turn = 0;
    for (int row = blockIdx.z; row < max_tokens; row += gridDim.z) {
      read_queries(row);
      const Rows rows = rows_of(row);
      float o[2][kDim / 8] = {}, sum[2] = {}, added[2];  // 64 heads by twice 128 dimensions; heads r and r + 8
      const int tiles = rows.end_tile - rows.tile;
      if (tiles > 0 && turn % 2 == warpgroup) make_probabilities(turn % 2, true, tiles == 1, added);
      for (int tile = 0; tile < tiles; ++tile, ++turn) {
        const bool made = turn % 2 == warpgroup;
        if (!made && tile + 1 < tiles) make_probabilities((turn + 1) % 2, false, tile + 2 == tiles, added);
        add_rows(o, sum, turn % 2);
        if (made) sum[0] += added[0], sum[1] += added[1];
      }
      float maximum[2] = {-CUDART_INF_F, -CUDART_INF_F};
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        for (int step = 1; step < 4; step *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
        if (c == 0) sums[warpgroup * kHeads + head] = sum[h];
        if (tiles > 0) maximum[h] = maxima[(turn - 1) % 2 * kHeads + head];
      }
      dk::meet_acq_rel_cta(kSummed, 2 * kWarpgroup);
      put_results(o, maximum, row);
    }
  } else {
    dk::give_back_registers<64>();
    // A warp has eight rows of a tile, of which each has four lanes. Each finds its row, in three steps of a load each, which
    // are made for three tiles to come: which entry, in which page, what is there.
    const int first_row = (threadIdx.x / 32 - 8) * 8, part = lane % 4;
    struct Wanted {
      int request, entry;  // twice the entry's number, and 1 more in the window; -1: no row
    };
    const auto source_of = [&](int entry) -> dk::PagesOf<kFormat, const unsigned char> {
      const bool is_window = entry & 1;
      return {is_window ? window_pool : entry_pool,   is_window ? window_table : entry_table,
              is_window ? window_pages : entry_pages, is_window ? window_width : entry_width,
              is_window ? window_bits : entry_bits,   is_window ? window_page_bytes : entry_page_bytes};
    };
    int row = blockIdx.z, tiles = 0;  // where the newest tile is that somebody looks for; how many of them there are
    Rows rows = rows_of(row);
    const auto next_wanted = [&]() -> Wanted {
      while (rows.tile >= rows.end_tile) {
        row += gridDim.z;
        if (row >= max_tokens) return {-1, -1};
        rows = rows_of(row);
      }
      ++tiles;
      const int number = rows.tile++ * kRows + first_row + lane / 4;
      int entry = -1;
      if (number < rows.of_window) {
        entry = 2 * (rows.position + 1 - rows.of_window + number) + 1;
      } else if (number < rows.count) {
        if constexpr (kSource == kListed) entry = 2 * listed[1ll * row * list + number - rows.of_window];
        else entry = 2 * (number - rows.of_window);
      }
      return {rows.request, entry};
    };
    const auto page_of = [&](const Wanted& wanted) -> int {
      return wanted.entry < 0 ? -1 : source_of(wanted.entry).page_of(wanted.request, wanted.entry >> 1);
    };
    // Where the values of a row are, and its scales; both null where there is no row.
    struct Found {
      const unsigned char *values, *scales;
    };
    const auto find = [&](const Wanted& wanted, int page) -> Found {
      if (page < 0) return {nullptr, nullptr};
      const auto source = source_of(wanted.entry);
      const int place = source.place_of(wanted.entry >> 1);
      return {source.values(page, place), source.scales(page, place)};
    };
    // The row's chunks in a tile: two of them for 16 e4m3, the second where the first is ^ 16. Lanes of two rows, of which one
    // is odd, write at once, to as many banks as there are.
    const unsigned of_coded = dk::in_panels(first_row + lane / 4, part * 2, kPanel);
    const unsigned of_rotated = dk::in_panels(first_row + lane / 4, 56 + part, kPanel);
    const auto read = [&](const Found& found) -> Piece {
      Piece piece = {};
      if (found.values == nullptr) return piece;
      for (int i = 0; i < 7; ++i)
        piece.coded[i] = *reinterpret_cast<const uint4*>(found.values + (i * 4 + part) * 16);
      for (int i = 0; i < 2; ++i)
        piece.rotated[i] = *reinterpret_cast<const uint4*>(found.values + 448 + (i * 4 + part) * 16);
      piece.scales = *reinterpret_cast<const uint2*>(found.scales);
      return piece;
    };
    const auto copy = [&](unsigned tile, const Found& found) {  // bfloat16 rows
#pragma unroll 4
      for (int i = 0; i < 16; ++i)
        dk::copy_async_16(base + tile + dk::in_panels(first_row + lane / 4, i * 4 + part, kPanel),
                          found.values == nullptr ? window_pool : found.values + (i * 4 + part) * 16,
                          found.values == nullptr ? 0 : 16);
      dk::commit_copies();
    };

    Wanted wanted = next_wanted();
    Found found = find(wanted, page_of(wanted));
    wanted = next_wanted();
    int page = page_of(wanted);
    Wanted later = next_wanted();
    [[maybe_unused]] Piece piece;
    if constexpr (k8Bit) piece = read(found);
    for (int turn = 0; turn < tiles; ++turn) {
      const int stage = turn % 2;
      const unsigned tile = kTiles + stage * kTileBytes;
      const unsigned of_rows = __ballot_sync(~0u, found.values != nullptr && part == 0);
      const Found following = find(wanted, page);
      wanted = later, page = page_of(later), later = next_wanted();
      if (turn >= 2) dk::meet_acq_rel_cta(kEmpty + stage, kThreads);
      if constexpr (k8Bit) {
#pragma unroll
        for (int i = 0; i < 7; ++i) {
          const unsigned scale = (i < 4 ? piece.scales.x : piece.scales.y) >> i % 4 * 8 & 0xff;
          uint4 low, high;
          widen(piece.coded[i], __float2half2_rn(dk::power_of_two(scale)), low, high);
          *reinterpret_cast<uint4*>(shared + tile + of_coded + i * kPanel) = low;
          *reinterpret_cast<uint4*>(shared + tile + (of_coded ^ 16) + i * kPanel) = high;
        }
        for (int i = 0; i < 2; ++i)
          *reinterpret_cast<uint4*>(shared + tile + (of_rotated ^ i * 64)) = halves_of(piece.rotated[i]);
      } else {
        copy(tile, found);
        dk::wait_for_copies<0>();
      }
      found = following;
      if (lane == 0) {
        unsigned bits = 0;
        for (int i = 0; i < 8; ++i) bits |= (of_rows >> 4 * i & 1) << i;
        present[stage * 8 + first_row / 8] = static_cast<unsigned char>(bits);
      }
      dk::fence_proxy_async_shared();
      dk::arrive_release_cta(kFull + stage, 3 * kWarpgroup);
      if constexpr (k8Bit) piece = read(following);  // not before: the fence would wait for it
    }
    for (int turn = max(tiles - 2, 0); turn < tiles; ++turn) dk::meet_acq_rel_cta(kEmpty + turn % 2, kThreads);
    if (splits > 1) {
      dk::meet_acq_rel_cluster();
      dk::meet_acq_rel_cluster();
    }
  }
}
