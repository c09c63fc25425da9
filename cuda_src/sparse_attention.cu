// Attention of a step's tokens to rows that each has chosen, where a row is both key and value (V4's latent attention).
//
// A token at position p attends to the `window` positions up to its own, and to entries that its request's tokens were
// compressed to: all that it sees, or those of a list. With r over those rows,
//   out = sum exp(scale * q r) r / (sum exp(scale * q r) + exp(sink)),
// whose last 64 elements are turned back by p, for the rows were turned by their own positions.
//
// A block has 64 heads of one token after another, or its part of the rows of one token, 64 rows at a time. Two
// warpgroups bring rows: find them, read them, and put them, widened to 16 bits, into one of two tiles. The other two
// take turns at multiplying a tile with the queries and making probabilities, so that one does while the other's
// products go on; then both multiply these with the rows, each for half of the dimensions. The parts of a cluster's
// blocks are added up in the order of their ranks.

#include <math_constants.h>

#include "dk/async_copy.cuh"
#include "dk/attention.cuh"
#include "dk/check.cuh"
#include "dk/memory_order.cuh"
#include "dk/records.cuh"
#include "dk/rope.cuh"
#include "dk/step_tokens.cuh"
#include "dk/vec.cuh"
#include "dk/warpgroup.cuh"

#ifdef DK_SM90A
namespace {

constexpr int kThreads = 512, kWarpgroup = 128;
constexpr int kDim = 512, kHeads = 64, kRows = 64;  // of a block, and of a tile
constexpr int kMostSplits = 8;                      // blocks of a cluster
constexpr unsigned kPanel = kRows * 128;            // bytes of 64 columns of a tile, or of the queries
constexpr unsigned kTileBytes = kDim / 64 * kPanel;
// The block's barriers; two each of those of tiles, and of what a warpgroup has made.
constexpr int kQueries = 1, kFull = 2, kEmpty = 4, kProbable = 6, kRaised = 8, kMade = 10, kSummed = 12, kStaged = 13,
              kFound = 14;

// Where a row is.
struct Found {
  const unsigned char *values, *scales;  // null: there is none
};

// The block's shared memory. Products want panels to begin at multiples of 1024 bytes.
struct Shared {
  unsigned char queries[kTileBytes];         // and in the end results
  unsigned char tiles[2][kTileBytes];        // and in the end what the cluster's other blocks have of some heads
  unsigned char probabilities[2][kPanel];    // of a tile
  unsigned char present[2][8];               // of a tile, a bit for each row that there is
  float factors[2][kHeads];                  // what a tile has sums so far multiplied by
  float maxima[2][kHeads];                   // with a tile
  float sums[2][kHeads];                     // over a warpgroup's tiles
  float sinks[kHeads], angles[dk::kRotary];  // of the position, cosines and sines
  float2 totals[kHeads];                     // [splits][heads of this block]: maximum, sum
  Found places[2][4 * kRows];                // of the rows of two times four tiles
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
// Of two bfloat16.
__device__ inline unsigned halves_of(unsigned pair) {
  const float2 both = dk::floats_of(pair);
  return dk::pair<__half>(both.x, both.y);
}
__device__ inline uint4 halves_of(const uint4& pairs) {
  return {halves_of(pairs.x), halves_of(pairs.y), halves_of(pairs.z), halves_of(pairs.w)};
}

// Blocks that share a token, a power of two. Read anew each time: there are no registers to keep it.
__device__ inline int blocks_of_token() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Which rows a token attends to, and which of their tiles are this block's.
struct Rows {
  int request, position, end;
  int of_window, count;  // those of the window come first
  int tile, end_tile;

  __device__ Rows(const int* tokens, const int* visible, int row, int window, int list, bool has_list) {
    const dk::StepToken token = dk::StepToken::load(tokens, row);
    request = token.request, position = token.position, end = token.end;
    of_window = token.is_padding() ? 0 : min(token.position + 1, window);
    int entries = 0;
    if (visible != nullptr && !token.is_padding()) entries = has_list ? min(list, visible[row]) : visible[row];
    count = of_window + entries;
    const int tiles = (count + kRows - 1) / kRows;
    const int bits = 31 - __clz(blocks_of_token());
    tile = tiles * blockIdx.x >> bits, end_tile = tiles * (blockIdx.x + 1) >> bits;
  }
};

}  // namespace
#else  // other architectures have no such products: the kernel is empty, and the op refuses them
constexpr int kThreads = 512;
#endif

// grid: (splits, ceil(heads / 64), blocks) in clusters of (splits, 1, 1), blocks at most max_tokens, and as many if
// there are splits; block: 512; shared: sizeof(Shared)
// q, out: [max_tokens, heads, 512], token by token q_stride elements on in q, and none between in out
// lse: [max_tokens, heads]; sinks: [heads]; cos_sin: [max_position, 64]; each may be null, and is not there then
// tokens: [max_tokens, 4], of dk::StepToken
// window_..., entry_...: rows in pages, see dk/records.cuh
// visible: [max_tokens], the entries that a token sees; null: none
// listed: [max_tokens, list], of which min(list, visible) count, and a negative one is none; read if kListed
//
// lse is the natural logarithm of the sum of exp(scale * q r), without the sink. Without rows out is 0, lse -inf; so
// are padding's.
template <int kFormat, bool kListed>
__global__ __launch_bounds__(kThreads, 1) void sparse_attention(
    const __nv_bfloat16* q, const int* tokens, const unsigned char* window_pool, const int* window_table,
    int window_pages, int window_width, int window_bits, long long window_page_bytes, const unsigned char* entry_pool,
    const int* entry_table, int entry_pages, int entry_width, int entry_bits, long long entry_page_bytes,
    const int* visible, const int* listed, const float* sinks, const float* cos_sin, __nv_bfloat16* out, float* lse,
    int max_tokens, int heads, int window, int list, int q_stride, int max_position, float scale) {
#ifdef DK_SM90A
  static_assert(dk::Record<kFormat>::kDim == kDim, "rows of keys and values");
  constexpr bool k8Bit = kFormat == dk::kKvFp8;
  using T = typename dk::RowFactor<kFormat>::type;

  extern __shared__ __align__(1024) unsigned char memory[];
  Shared& shared = *reinterpret_cast<Shared*>(memory);
  static_assert(sizeof(Shared) == 223760, "as the host asks for");
  const int warpgroup = threadIdx.x / kWarpgroup;
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4 * 2;  // see dk/warpgroup.cuh
  const int rank = blockIdx.x, first_head = blockIdx.y * kHeads;
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const auto rows_of = [&](int row) -> Rows {
    return Rows(tokens, visible, row, window, list, kListed);
  };

  if (warpgroup < 2) {
    dk::take_registers<192>();
    // Both bring the queries, a warp those of eight heads.
    struct Queries {
      uint4 eight[8][2];  // of a head, this lane's two chunks
    };
    const auto read_queries = [&](int row) -> Queries {
      Queries queries;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int head = first_head + threadIdx.x / 32 * 8 + i;
        const uint4* from = reinterpret_cast<const uint4*>(q + 1ll * row * q_stride + head * kDim) + lane;
        for (int j = 0; j < 2; ++j) queries.eight[i][j] = row < max_tokens && head < heads ? from[j * 32] : uint4{};
      }
      return queries;
    };
    const auto put_queries = [&](const Queries& queries) {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 2; ++j)
          *reinterpret_cast<uint4*>(shared.queries + dk::in_panels(threadIdx.x / 32 * 8 + i, j * 32 + lane, kPanel)) =
              k8Bit ? halves_of(queries.eight[i][j]) : queries.eight[i][j];
      dk::fence_proxy_async_shared();
      dk::meet_acq_rel_cta(kQueries, 2 * kWarpgroup);
    };
    const auto add_rows = [&](float (&o)[2][kDim / 8], float (&sum)[2], int stage, bool made) {
      if (made) dk::meet_acq_rel_cta(kMade + stage, kWarpgroup);
      else dk::meet_acq_rel_cta(kProbable + stage, 2 * kWarpgroup);
      const float low = shared.factors[stage][warp * 16 + r], high = shared.factors[stage][warp * 16 + r + 8];
      if (__any_sync(~0u, low != 1.0f || high != 1.0f)) {
#pragma unroll
        for (int j = 0; j < kDim / 4; ++j) o[j / 64][j % 64] *= j & 2 ? high : low;
        sum[0] *= low, sum[1] *= high;
      }
      const unsigned probabilities = dk::shared_address(shared.probabilities[stage]);
      const unsigned values = dk::shared_address(shared.tiles[stage]) + warpgroup * 4 * kPanel;
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
    // They take turns at making the probabilities of a tile, and what sums so far are multiplied by. The maximum goes
    // from one to the other.
    const auto make_probabilities = [&](int stage, bool is_first, bool is_last, float (&added)[2]) {
      dk::meet_acq_rel_cta(kFull + stage, 3 * kWarpgroup);
      const float unit = scale * dk::kLog2e;
      const unsigned queries = dk::shared_address(shared.queries), keys = dk::shared_address(shared.tiles[stage]);
      float s[kRows / 2];
      dk::begin_products();
#pragma unroll
      for (int step = 0; step < kDim / 16; ++step) {
        const unsigned at = step / 4 * kPanel + step % 4 * 32;
        dk::multiply_64_by<T, 64>(s, dk::by_rows(queries + at), dk::by_rows(keys + at), step > 0);
      }
      dk::commit_products();
      dk::wait_for_products<0>();

      float most[2] = {-CUDART_INF_F, -CUDART_INF_F};
#pragma unroll
      for (int j = 0; j < kRows / 2; ++j) s[j] *= unit;
      const unsigned long long there = *reinterpret_cast<const unsigned long long*>(shared.present[stage]);
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
        float maximum = is_first ? -CUDART_INF_F : shared.maxima[stage ^ 1][head], factor = 1.0f;
        if (most[h] > maximum + dk::kSlack) {  // never so between two -inf
          factor = dk::exp2_approx(maximum - most[h]);
          maximum = most[h];
        }
        from[h] = maximum == -CUDART_INF_F ? 0.0f : maximum;
        if (c == 0) shared.factors[stage][head] = factor, shared.maxima[stage][head] = maximum;
      }
      if (!is_last) dk::arrive_release_cta(kRaised + stage, 2 * kWarpgroup);
      added[0] = added[1] = 0.0f;
      // Made anew for each tile: there are no registers to keep the places of all chunks.
      unsigned place = (warp * 16 + r) * 128 + (r << 4) + c * 2;
      asm volatile("" : "+r"(place));
#pragma unroll
      for (int j = 0; j < kRows / 2; j += 2) {
        const int h = j >> 1 & 1;
        const float first = dk::exp2_approx(s[j] - from[h]), second = dk::exp2_approx(s[j + 1] - from[h]);
        added[h] += first + second;
        *reinterpret_cast<unsigned*>(shared.probabilities[stage] + (place ^ j / 4 << 4) + h * 1024) =
            dk::pair<T>(first, second);
      }
      dk::fence_proxy_async_shared();
      dk::arrive_release_cta(kProbable + stage, 2 * kWarpgroup);
    };
    // Of one of this block's heads: what its sums are multiplied by in the end, and its lse.
    const auto weight_of = [&](int head, float maximum, float sum) -> float {
      return sum == 0.0f ? 0.0f : 1.0f / (sum + dk::exp2_approx(shared.sinks[head] * dk::kLog2e - maximum));
    };
    const auto put_lse = [&](int row, int head, float maximum, float sum) {
      if (lse != nullptr && first_head + head < heads)
        lse[1ll * row * heads + first_head + head] =
            sum == 0.0f ? -CUDART_INF_F : (maximum + __log2f(sum)) * dk::kLn2;
    };
    // Where the pair of columns c of block 0 of this thread's heads goes, where the queries were; block b's is at ^ b %
    // 8 << 4 in panel b / 8, and head r + 8's 1024 bytes on.
    const auto place_of_results = [&]() -> unsigned {
      return warpgroup * 4 * kPanel + (warp * 16 + r) * 128 + (r << 4) + c * 2;
    };
    // All of a token: round it, and bring it away in whole rows.
    const auto put_results = [&](float (&o)[2][kDim / 8], int row, unsigned last, Queries& following) {
      const unsigned place = place_of_results();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        const float sum = shared.sums[0][head] + shared.sums[1][head];
        const float maximum = sum == 0.0f ? 0.0f : shared.maxima[last][head], weight = weight_of(head, maximum, sum);
        if (warpgroup == 0 && c == 0) put_lse(row, head, maximum, sum);
#pragma unroll
        for (int block = 0; block < 32; ++block) {
          float even = o[block / 16][block % 16 * 4 + 2 * h] * weight;
          float odd = o[block / 16][block % 16 * 4 + 2 * h + 1] * weight;
          if (block >= 24 && warpgroup == 1 && cos_sin != nullptr) {  // back by the token's position
            const int pair = (block - 24) * 4 + c / 2;
            dk::turn(even, odd, shared.angles[pair], -shared.angles[dk::kRotary / 2 + pair]);
          }
          *reinterpret_cast<unsigned*>(shared.queries + (place ^ block % 8 << 4) + block / 8 * kPanel + h * 1024) =
              dk::pair<__nv_bfloat16>(even, odd);
        }
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);
      following = read_queries(row + gridDim.z);  // on their way while the results go theirs
#pragma unroll 4
      for (int i = 0; i < 16; ++i) {
        const int head = i / 2 * 8 + threadIdx.x / 32, chunk = i % 2 * 32 + lane;
        if (first_head + head < heads)
          *reinterpret_cast<uint4*>(out + (1ll * row * heads + first_head + head) * kDim + chunk * 8) =
              *reinterpret_cast<const uint4*>(shared.queries + dk::in_panels(head, chunk, kPanel));
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);  // the queries may come
    };
    // A token that the cluster shares: divide what this block has by its sum, give the others what it has of heads of
    // which they make the results, where the tiles were, and make some.
    const int splits = blocks_of_token(), each = kHeads / splits;
    const auto part_at = [&](int from, int head, int chunk) -> const T* {  // eight of one of this block's heads
      return reinterpret_cast<const T*>(shared.tiles) + ((from * each + head) * (kDim / 8) + chunk) * 8;
    };
    const auto merge_results = [&](float (&o)[2][kDim / 8], int row, unsigned last) {
      dk::arrive_relaxed_cluster();  // this block reads no tile any more
      const unsigned place = place_of_results();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        const float sum = shared.sums[0][head] + shared.sums[1][head], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
        for (int block = 0; block < 32; ++block)
          *reinterpret_cast<unsigned*>(shared.queries + (place ^ block % 8 << 4) + block / 8 * kPanel + h * 1024) =
              dk::pair<T>(o[block / 16][block % 16 * 4 + 2 * h] * inverse,
                          o[block / 16][block % 16 * 4 + 2 * h + 1] * inverse);
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);
      dk::wait_acquire_cluster();
      const int first = threadIdx.x / 32;  // of the eight warps
#pragma unroll 4
      for (int i = 0; i < 16; ++i) {
        const int head = i / 2 * 8 + first, chunk = i % 2 * 32 + lane;
        const unsigned char* mine = shared.queries + dk::in_panels(head, chunk, kPanel);
        dk::store_shared_cluster_16(dk::shared_address(part_at(rank, head % each, chunk)), head / each,
                                    *reinterpret_cast<const uint4*>(mine));
      }
      if (threadIdx.x < kHeads) {
        const float sum = shared.sums[0][threadIdx.x] + shared.sums[1][threadIdx.x];
        dk::store_shared_cluster_8(dk::shared_address(shared.totals + rank * each + threadIdx.x % each),
                                   threadIdx.x / each,
                                   {sum == 0.0f ? -CUDART_INF_F : shared.maxima[last][threadIdx.x], sum});
      }
      dk::meet_acq_rel_cluster();

      if (threadIdx.x < each) {  // what a block's part of a head is multiplied by: its part of the sum
        float maximum = -CUDART_INF_F, sum = 0.0f;
        for (int from = 0; from < splits; ++from) maximum = fmaxf(maximum, shared.totals[from * each + threadIdx.x].x);
        for (int from = 0; from < splits; ++from) {
          float2& part = shared.totals[from * each + threadIdx.x];
          part.y *= dk::exp2_approx(part.x - (maximum == -CUDART_INF_F ? 0.0f : maximum));
          sum += part.y;
        }
        if (maximum == -CUDART_INF_F) maximum = 0.0f;
        put_lse(row, rank * each + threadIdx.x, maximum, sum);
        const float weight = weight_of(rank * each + threadIdx.x, maximum, sum);
        for (int from = 0; from < splits; ++from) shared.totals[from * each + threadIdx.x].y *= weight;
      }
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);
      for (int i = first; i < each; i += 8) {
        const int head = first_head + rank * each + i;
        if (head >= heads) break;
        float y[2][8] = {};
#pragma unroll 2
        for (int from = 0; from < splits; ++from) {
          const float weight = shared.totals[from * each + i].y;
          for (int j = 0; j < 2; ++j) {
            const auto x = dk::Vec<T, 8>::load(part_at(from, i, j * 32 + lane));
            for (int e = 0; e < 8; ++e) y[j][e] += weight * dk::to_float(x.elements[e]);
          }
        }
        if (cos_sin != nullptr && lane >= 24)
          for (int e = 0, pair = (lane - 24) * 4; e < 4; ++e, ++pair)
            dk::turn(y[1][2 * e], y[1][2 * e + 1], shared.angles[pair], -shared.angles[dk::kRotary / 2 + pair]);
        for (int j = 0; j < 2; ++j) {
          const uint4 eight = {dk::pair<__nv_bfloat16>(y[j][0], y[j][1]), dk::pair<__nv_bfloat16>(y[j][2], y[j][3]),
                               dk::pair<__nv_bfloat16>(y[j][4], y[j][5]), dk::pair<__nv_bfloat16>(y[j][6], y[j][7])};
          *reinterpret_cast<uint4*>(out + (1ll * row * heads + head) * kDim + (j * 32 + lane) * 8) = eight;
        }
      }
    };

    unsigned turn = 0;
    Queries queries = read_queries(blockIdx.z);
    if (threadIdx.x < kHeads)
      shared.sinks[threadIdx.x] =
          sinks != nullptr && first_head + threadIdx.x < heads ? sinks[first_head + threadIdx.x] : -CUDART_INF_F;
    for (int row = blockIdx.z; row < max_tokens; row += gridDim.z) {
      put_queries(queries);
      const Rows rows = rows_of(row);
      DK_CHECK(cos_sin == nullptr || rows.position < max_position, "row %d is at position %d: cos_sin has %d rows\n",
               row, rows.position, max_position);
      if (cos_sin != nullptr && threadIdx.x < dk::kRotary)
        shared.angles[threadIdx.x] = cos_sin[1ll * min(rows.position, max_position - 1) * dk::kRotary + threadIdx.x];
      for (int i = threadIdx.x; i < kHeads * kDim / 64; i += 2 * kWarpgroup)  // the next token's queries
        dk::prefetch_l2(q + 1ll * (row + gridDim.z) * q_stride + first_head * kDim + i * 64,
                        row + gridDim.z < max_tokens && first_head + i / 8 < heads);
      float o[2][kDim / 8] = {}, sum[2] = {};  // 64 heads by twice 128 dimensions; heads r and r + 8
      const int tiles = rows.end_tile - rows.tile;
#pragma unroll 1
      for (int tile = 0; tile < tiles; tile += 2) {  // each makes the probabilities of one of two, and both add the two
        const int mine = tile + ((turn + tile) % 2 != warpgroup);
        float added[2] = {};
        if (mine < tiles) make_probabilities((turn + mine) % 2, mine == 0, mine + 1 == tiles, added);
#pragma unroll 1
        for (int each = tile; each < min(tile + 2, tiles); ++each) {
          add_rows(o, sum, (turn + each) % 2, each == mine);
          if (each == mine) sum[0] += added[0], sum[1] += added[1];
        }
      }
      turn += tiles;
      for (int h = 0; h < 2; ++h) {
        for (int step = 1; step < 4; step *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
        if (c == 0) shared.sums[warpgroup][warp * 16 + r + 8 * h] = sum[h];
      }
      dk::meet_acq_rel_cta(kSummed, 2 * kWarpgroup);
      if (splits > 1) {
        merge_results(o, row, (turn + 1) % 2);
        break;  // the only one
      }
      put_results(o, row, (turn + 1) % 2, queries);
    }
  } else {
    dk::give_back_registers<64>();
    // Rows are looked for four tiles at a time, a thread each, in three steps of a load each, while others go by: which
    // entry, in which page, where. Of a tile a warp has eight rows, with four lanes each.
    constexpr int kWindow = 1 << 30;  // more for an entry of the window
    const auto source_of = [&](int entry) -> dk::PagesOf<kFormat, const unsigned char> {
      const bool is_window = entry >= kWindow;
      return {is_window ? window_pool : entry_pool,   is_window ? window_table : entry_table,
              is_window ? window_pages : entry_pages, is_window ? window_width : entry_width,
              is_window ? window_bits : entry_bits,   is_window ? window_page_bytes : entry_page_bytes};
    };
    int row = blockIdx.z, done = 0;     // the token, and how many of its tiles were looked for
    int entry = -1, page = -1;          // of this thread's row; below 0: none
    const auto choose = [&]() -> int {  // the next tiles of a token, 0 if there are no more
      for (entry = -1; row < max_tokens; row += gridDim.z, done = 0) {
        const Rows rows = rows_of(row);
        DK_CHECK(rows.end - max(0, rows.position + 1 - window) <= 1ll * window_width << window_bits,
                 "row %d attends to positions from %d on, and its request has %d tokens: the window has room for %d\n",
                 row, max(0, rows.position + 1 - window), rows.end, window_width << window_bits);
        const int tiles = min(4, rows.end_tile - rows.tile - done);
        if (tiles <= 0) continue;
        const int number = (rows.tile + done) * kRows + threadIdx.x - 2 * kWarpgroup;
        done += tiles, entry = number - rows.of_window;
        if (entry < 0) entry += rows.position + 1 + kWindow;
        else if (number >= rows.count) entry = -1;
        else if constexpr (kListed) entry = listed[1ll * row * list + entry];
        DK_CHECK(entry < 0 || number < rows.of_window || entry < visible[row],
                 "row %d attends to entry %d, and sees %d\n", row, entry, visible[row]);
        if (entry >= 0) page = *source_of(entry).page_number(rows.request, entry % kWindow);
        return tiles;
      }
      return 0;
    };
    const auto place = [&](Found* places) {
      asm volatile("" : "+r"(entry));  // else all that follows from it is computed before the tiles, and kept
      Found found = {nullptr, nullptr};
      const auto source = source_of(entry);
      if (entry >= 0 && source.has(page, dk::StepToken::load(tokens, row).request, entry % kWindow)) {
        const int at = source.place_of(entry % kWindow);
        found = {source.values(page, at), source.scales(page, at)};
      }
      places[threadIdx.x - 2 * kWarpgroup] = found;
      dk::meet_acq_rel_cta(kFound, 2 * kWarpgroup);
    };
    // Each phase asks anew who it is: then the compiler does not keep in registers what follows from that.
    struct Lane {
      int part, row;  // of the row's four lanes; of the tile
      __device__ Lane() {
        unsigned thread;
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
        part = thread % 4, row = (thread - 2 * kWarpgroup) / 4;
      }
    };
    const auto read = [&](const Found& found) -> Piece {
      Piece piece = {};
      if (found.values == nullptr) return piece;
      const unsigned char* values = found.values + Lane().part * 16;
      for (int i = 0; i < 7; ++i) piece.coded[i] = dk::load_weak_16(values + i * 64);
      for (int i = 0; i < 2; ++i) piece.rotated[i] = dk::load_weak_16(values + 448 + i * 64);
      piece.scales = dk::load_weak_8(found.scales);
      return piece;
    };
    const auto copy = [&](unsigned char* tile, const Found& found) {  // bfloat16 rows
      const Lane me;
#pragma unroll 4
      for (int i = 0; i < 16; ++i)
        dk::copy_async_16(dk::shared_address(tile) + dk::in_panels(me.row, i * 4 + me.part, kPanel),
                          found.values == nullptr ? window_pool : found.values + (i * 4 + me.part) * 16,
                          found.values == nullptr ? 0 : 16);
      dk::commit_copies();
    };

    constexpr int kHalf = 4 * kRows;
    int tiles = choose(), turn = 0;
    int at = Lane().row;  // which of the places is that of this thread's row of the next tile
    place(shared.places[0]);
    [[maybe_unused]] Found found;
    [[maybe_unused]] Piece piece;
    bool is_there;
    const auto take = [&]() {
      const Found next = shared.places[0][at];
      is_there = next.values != nullptr;
      if constexpr (k8Bit) piece = read(next);
      else found = next;
    };
    take();
    while (tiles > 0) {
      const int following = choose();
#pragma unroll 1
      for (; tiles > 0; --tiles, ++turn) {
        const int stage = turn % 2;
        unsigned char* tile = shared.tiles[stage];
        const unsigned there = __ballot_sync(~0u, is_there);  // four bits a row
        if (turn >= 2) dk::meet_acq_rel_cta(kEmpty + stage, kThreads);
        if constexpr (k8Bit) {
          // The row's chunks: two of them for 16 e4m3, the second where the first is ^ 16. Lanes of two rows, of which
          // one is odd, write at once, to as many banks as there are.
          const Lane me;
          const unsigned coded = dk::in_panels(me.row, me.part * 2, kPanel);
          const unsigned rotated = dk::in_panels(me.row, 56 + me.part, kPanel);
#pragma unroll
          for (int block = 0; block < 7; ++block) {
            const unsigned scale = (block < 4 ? piece.scales.x : piece.scales.y) >> block % 4 * 8 & 0xff;
            uint4 low, high;
            widen(piece.coded[block], __float2half2_rn(dk::power_of_two(scale)), low, high);
            *reinterpret_cast<uint4*>(tile + coded + block * kPanel) = low;
            *reinterpret_cast<uint4*>(tile + (coded ^ 16) + block * kPanel) = high;
          }
          for (int half = 0; half < 2; ++half)
            *reinterpret_cast<uint4*>(tile + (rotated ^ half * 64)) = halves_of(piece.rotated[half]);
        } else {
          copy(tile, found);
          dk::wait_for_copies<0>();
        }
        if (lane == 0) {
          unsigned bits = 0;
          for (int of = 0; of < 8; ++of) bits |= (there >> 4 * of & 1) << of;
          shared.present[stage][Lane().row / 8] = static_cast<unsigned char>(bits);
        }
        dk::fence_proxy_async_shared();
        dk::arrive_release_cta(kFull + stage, 3 * kWarpgroup);
        // Behind the fence, which would wait for what is loaded.
        at += kRows;
        if (tiles == 1) {
          const int other = (at - kRows) / kHalf * kHalf ^ kHalf;
          place(shared.places[0] + other);
          at = other + Lane().row;
        }
        take();
      }
      tiles = following;
    }
    for (int left = max(turn - 2, 0); left < turn; ++left) dk::meet_acq_rel_cta(kEmpty + left % 2, kThreads);
    if (blocks_of_token() > 1) {  // as the others do
      dk::arrive_relaxed_cluster();
      dk::wait_acquire_cluster();
      dk::meet_acq_rel_cluster();
    }
  }
#endif
}
