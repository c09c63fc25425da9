// Attention of a step's tokens to rows that each has chosen, where a row is both key and value (V4's latent attention).
//
// A token at position p attends to the `window` positions up to its own, and to entries that its request's tokens were
// compressed to: all that it sees, or those of a list. With r over those rows,
//   out = sum exp(scale * q r) r / (sum exp(scale * q r) + exp(sink)),
// whose last 64 elements are turned back by p, for the rows were turned by their own positions.
//
// A block has 64 heads of one token after another, or its part of the rows of one token, 64 rows at a time: two such
// tiles, a pair. Two warpgroups bring rows: find them, read them, and put them, widened to 16 bits, into the tiles.
// Each of the other two multiplies a tile with the queries and makes probabilities; then both multiply those of both
// tiles with the rows, each for a half of the dimensions. Halves of tiles come and go one by one: a warpgroup is done
// with its half of its own tile first, so that of the next pair's tile comes first, and is multiplied first. The parts
// of a cluster's blocks are added up in the order of their ranks.

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
constexpr unsigned kPanel = kRows * 128;            // bytes of 64 columns of a tile, or of the queries
constexpr unsigned kTileBytes = kDim / 64 * kPanel;
// A tile's kind: behind the last, one that has no second, or of a pair.
constexpr int kNoTile = 0, kAlone = 1, kOfTwo = 2;
// The block's barriers; two each of those of what a warpgroup has made.
constexpr int kQueries = 1, kProbable = 2, kRaised = 4, kMade = 6, kSummed = 8, kStaged = 9, kFound = 10;

// Where a row is.
struct Found {
  const unsigned char *values, *scales;  // null: there is none
};

// The block's shared memory. Products want panels to begin at multiples of 1024 bytes.
struct Shared {
  unsigned char queries[kTileBytes];
  unsigned char tiles[2][kTileBytes];          // and in the end what the cluster's other blocks have of some heads
  unsigned char probabilities[2][kPanel];      // of a tile
  unsigned char present[2][8];                 // of a tile, a bit for each row that there is
  float factors[2][kHeads];                    // what a tile has sums so far multiplied by
  float maxima[2][kHeads];                     // with a tile
  float sums[2][kHeads];                       // over a warpgroup's tiles
  float sinks[kHeads], angles[dk::kRotary];    // of the position, cosines and sines
  float2 totals[kHeads];                       // [splits][heads of this block]: maximum, sum
  unsigned long long full[2][2], empty[2][2];  // mbarriers, of each tile's two halves
  Found places[8][kRows];                      // of the rows of tiles that are brought, and of some to come
  unsigned char kinds[8];                      // of these tiles
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

// threadIdx.x, asked anew: then the compiler does not keep in registers what follows from it.
__device__ inline unsigned thread_anew() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Who of those that bring rows a thread is.
struct Lane {
  int part, row;  // of the row's four lanes; of the tile
  __device__ Lane() {
    const unsigned thread = thread_anew();
    part = thread % 4, row = (thread - 2 * kWarpgroup) / 4;
  }
};

// What a lane brings of a half of its row: of 8-bit rows a quarter of each block of 64 elements.
template <int kFormat, int kHalf>
struct Piece {
  uint4 blocks[4 + kHalf];  // 16 e4m3; of the half that is turned the last two are eight bfloat16
  unsigned scales;          // of the half's blocks
  bool is_there;

  __device__ void read(const Found (&places)[kRows]) {
    const Lane me;
    const Found found = places[me.row];
    is_there = found.values != nullptr;
    for (uint4& block : blocks) block = {};
    scales = 0;
    if (!is_there) return;
    const unsigned char* values = found.values + kHalf * 256 + me.part * 16;
    for (int i = 0; i < 4 + kHalf; ++i) blocks[i] = dk::load_weak_16(values + i * 64);
    scales = dk::load_weak_4(found.scales + kHalf * 4);
  }
  // Two chunks for 16 e4m3, the second where the first is ^ 16. Lanes of two rows, of which one is odd, write at once,
  // to as many banks as there are.
  __device__ void put(unsigned char* tile, unsigned long long*, const unsigned char*) const {
    const Lane me;
    const unsigned coded = dk::in_panels(me.row, me.part * 2, kPanel) + kHalf * 4 * kPanel;
#pragma unroll
    for (int i = 0; i < 4 - kHalf; ++i) {
      uint4 low, high;
      widen(blocks[i], __float2half2_rn(dk::power_of_two(scales >> i * 8 & 0xff)), low, high);
      *reinterpret_cast<uint4*>(tile + coded + i * kPanel) = low;
      *reinterpret_cast<uint4*>(tile + (coded ^ 16) + i * kPanel) = high;
    }
    const unsigned turned = dk::in_panels(me.row, 56 + me.part, kPanel);
    for (int i = 0; i < 2 * kHalf; ++i)
      *reinterpret_cast<uint4*>(tile + (turned ^ i * 64)) = halves_of(blocks[4 - kHalf + i]);
  }
};
// Rows of bfloat16 are copied as they are; a row that is not there is 0 bytes of `anywhere`, and zeros.
template <int kHalf>
struct Piece<dk::kKvBf16, kHalf> {
  const unsigned char* values;
  bool is_there;

  __device__ void read(const Found (&places)[kRows]) {
    const Lane me;
    const Found found = places[me.row];
    is_there = found.values != nullptr;
    values = found.values + kHalf * 512 + me.part * 16;
  }
  __device__ void put(unsigned char* tile, unsigned long long* full, const unsigned char* anywhere) const {
    const Lane me;
#pragma unroll
    for (int i = 0; i < 8; ++i)
      dk::copy_async_16(dk::shared_address(tile) + dk::in_panels(me.row, (kHalf * 8 + i) * 4 + me.part, kPanel),
                        is_there ? values + i * 64 : anywhere, is_there ? 16 : 0);
    dk::arrive_mbarrier_when_copied(full);
  }
};
// Put a half where the one before it was read to the end, and tell who multiplies it.
template <int kFormat, int kHalf>
__device__ void put_piece(Shared& shared, const Piece<kFormat, kHalf>& piece, int stage, unsigned phases,
                          const unsigned char* anywhere) {
  const unsigned there = __ballot_sync(~0u, piece.is_there);  // four bits a row
  dk::wait_mbarrier_acquire_cta(&shared.empty[stage][kHalf], ~phases >> stage & 1);
  piece.put(shared.tiles[stage], &shared.full[stage][kHalf], anywhere);
  if (kHalf == 0 && threadIdx.x % 32 == 0) {
    unsigned bits = 0;
    for (int of = 0; of < 8; ++of) bits |= (there >> 4 * of & 1) << of;
    shared.present[stage][Lane().row / 8] = static_cast<unsigned char>(bits);
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) dk::arrive_mbarrier_release_cta(&shared.full[stage][kHalf]);
}

// Blocks that share a token, a power of two. Read anew each time: there are no registers to keep it.
__device__ inline int blocks_of_token() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

// Of a row's sums over half of the dimensions, eight of each of four lanes: those from 32 * i on, lane c of the four has
// c * 2 and the next one of each block of eight. Lane c gets those from 32 * i + 8 * c on, as bfloat16. The last 64 of
// all dimensions, from i = 6 on, are turned back by angles; null: they are not.
__device__ inline uint4 eight_of(float (&x)[8], int i, const float* angles) {
  unsigned words[4];
  for (int j = 0; j < 4; ++j) {
    if (i >= 6 && angles != nullptr) {
      const int pair = (4 * (i - 6) + j) * 4 + threadIdx.x % 4;
      dk::turn(x[2 * j], x[2 * j + 1], angles[pair], -angles[dk::kRotary / 2 + pair]);
    }
    words[j] = dk::pair<__nv_bfloat16>(x[2 * j], x[2 * j + 1]);
  }
  dk::transpose_four_lanes(words);
  return {words[0], words[1], words[2], words[3]};
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
  static_assert(sizeof(Shared) == 223832, "as the host asks for");
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / kWarpgroup, 0);  // as one number: addresses of tiles follow
  const int thread = threadIdx.x % kWarpgroup, warp = thread / 32, lane = thread % 32;
  const int r = lane / 4, c = lane % 4 * 2;  // see dk/warpgroup.cuh
  const int rank = blockIdx.x, first_head = blockIdx.y * kHeads;
  if (threadIdx.x < 4) {
    // A warp of those that bring rows arrives when it has put its own; copies arrive by themselves.
    dk::init_mbarrier(shared.full[0] + threadIdx.x, 2 * kWarpgroup / 32 + (k8Bit ? 0 : 2 * kWarpgroup));
    dk::init_mbarrier(shared.empty[0] + threadIdx.x, kWarpgroup / 32);
  }
  __syncthreads();
  if constexpr (kListed)  // the list is on its way while its token is read
    dk::prefetch_l2(listed + 1ll * blockIdx.z * list + threadIdx.x * 32, threadIdx.x * 32 < list);
  dk::wait_for_kernels_before();
  dk::let_kernels_behind_start();
  const auto rows_of = [&](int row) -> Rows {
    return Rows(tokens, visible, row, window, list, kListed);
  };

  if (warpgroup < 2) {
    dk::take_registers<192>();
    // Both bring the queries, a warp those of eight heads: copy them, and see that they are there.
    const auto place_of_query = [&](int tid, int i) -> unsigned {
      return dk::in_panels(tid / 32 * 8 + i / 2, i % 2 * 32 + tid % 32, kPanel);
    };
    const auto copy_queries = [&](int row) {
      const unsigned to = dk::shared_address(shared.queries);
      const int tid = thread_anew();
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int head = first_head + tid / 32 * 8 + i / 2;
        const bool is_there = row < max_tokens && head < heads;
        const __nv_bfloat16* from = q + 1ll * row * q_stride + head * kDim + (i % 2 * 32 + tid % 32) * 8;
        dk::copy_async_16(to + place_of_query(tid, i), is_there ? from : q, is_there ? 16 : 0);
      }
      dk::commit_copies();
    };
    const auto have_queries = [&]() {
      dk::wait_for_copies<0>();
      if constexpr (k8Bit) {
        const int tid = thread_anew();
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
          uint4* chunk = reinterpret_cast<uint4*>(shared.queries + place_of_query(tid, i));
          *chunk = halves_of(*chunk);
        }
      }
      dk::fence_proxy_async_shared();
      dk::meet_acq_rel_cta(kQueries, 2 * kWarpgroup);
    };
    unsigned phases = 0;  // of the tiles, a bit each
    const auto scale_sums = [&](float (&o)[2][kDim / 8], float (&sum)[2], int stage) {
      const float low = shared.factors[stage][warp * 16 + r], high = shared.factors[stage][warp * 16 + r + 8];
      if (__any_sync(~0u, low != 1.0f || high != 1.0f)) {
#pragma unroll
        for (int j = 0; j < kDim / 4; ++j) o[j / 64][j % 64] *= j & 2 ? high : low;
        sum[0] *= low, sum[1] *= high;
      }
    };
    const auto add_rows = [&](float (&o)[2][kDim / 8], int stage) {
      dk::fence_proxy_async_shared();
      const auto probabilities = dk::by_rows(dk::shared_address(shared.probabilities[stage]));
      const auto values = dk::by_columns(dk::shared_address(shared.tiles[stage]) + warpgroup * 4 * kPanel, kPanel);
      dk::begin_products();
#pragma unroll
      for (int step = 0; step < kRows / 16; ++step)
        for (int part = 0; part < 2; ++part)
          dk::multiply_64_by<T, 128>(o[part], dk::later(probabilities, step * 32),
                                     dk::later(values, part * 2 * kPanel + step * 2048), true);
      dk::commit_products();
      dk::wait_for_products<0>();
      __syncwarp();
      if (lane == 0) dk::arrive_mbarrier_release_cta(&shared.empty[stage][warpgroup]);
    };
    // Those of this warpgroup's tile, and what sums so far are multiplied by; gives whether by another number than 1.
    // The maximum goes from one warpgroup to the other.
    const auto make_probabilities = [&](bool is_first, bool is_last, float (&added)[2]) -> bool {
      const int stage = warpgroup;
      const float unit = scale * dk::kLog2e;
      float s[kRows / 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int half = i ^ warpgroup;
        dk::wait_mbarrier_acquire_cta(&shared.full[stage][half], phases >> stage & 1);
        dk::fence_proxy_async_shared();
        const auto queries = dk::by_rows(dk::shared_address(shared.queries) + half * 4 * kPanel);
        const auto keys = dk::by_rows(dk::shared_address(shared.tiles[stage]) + half * 4 * kPanel);
        dk::begin_products();
#pragma unroll
        for (int step = 0; step < kDim / 32; ++step) {
          const unsigned at = step / 4 * kPanel + step % 4 * 32;
          dk::multiply_64_by<T, 64>(s, dk::later(queries, at), dk::later(keys, at), i + step > 0);
        }
        dk::commit_products();
      }
      dk::wait_for_products<0>();

      float most[2] = {-CUDART_INF_F, -CUDART_INF_F};
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
      most[0] *= unit, most[1] *= unit;
      if (!is_first) dk::meet_acq_rel_cta(kRaised + (stage ^ 1), 2 * kWarpgroup);
      float from[2];
      bool raised = false;
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        float maximum = is_first ? -CUDART_INF_F : shared.maxima[stage ^ 1][head], factor = 1.0f;
        if (most[h] > maximum + dk::kSlack) {  // never so between two -inf
          factor = dk::exp2_approx(maximum - most[h]);
          maximum = most[h], raised = true;
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
        const float first = dk::exp2_approx(s[j] * unit - from[h]);
        const float second = dk::exp2_approx(s[j + 1] * unit - from[h]);
        added[h] += first + second;
        *reinterpret_cast<unsigned*>(shared.probabilities[stage] + (place ^ j / 4 << 4) + h * 1024) =
            dk::pair<T>(first, second);
      }
      dk::arrive_release_cta(kProbable + stage, 2 * kWarpgroup);
      return dk::meet_any_acq_rel_cta(kMade + stage, kWarpgroup, raised);
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
    // What a thread brings of the angles of a token's position.
    const auto angle_of = [&](int row, const Rows& rows) -> float {
      DK_CHECK(threadIdx.x != 0 || cos_sin == nullptr || row >= max_tokens || rows.position < max_position,
               "row %d is at position %d: cos_sin has %d rows\n", row, rows.position, max_position);
      if (cos_sin == nullptr || threadIdx.x >= dk::kRotary) return 0.0f;
      return cos_sin[1ll * min(rows.position, max_position - 1) * dk::kRotary + threadIdx.x];
    };
    const auto put_results = [&](float (&o)[2][kDim / 8], int row, int last) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        const float sum = shared.sums[0][head] + shared.sums[1][head];
        const float maximum = sum == 0.0f ? 0.0f : shared.maxima[last][head], weight = weight_of(head, maximum, sum);
        if (warpgroup == 0 && c == 0) put_lse(row, head, maximum, sum);
        const float* turning = warpgroup == 1 && cos_sin != nullptr ? shared.angles : nullptr;
        uint4* to = reinterpret_cast<uint4*>(out + (1ll * row * heads + first_head + head) * kDim) + warpgroup * 32;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float x[8];
          for (int j = 0; j < 8; ++j) x[j] = o[i / 4][i % 4 * 16 + j / 2 * 4 + 2 * h + j % 2] * weight;
          const uint4 eight = eight_of(x, i, turning);
          if (first_head + head < heads) to[i * 4 + c / 2] = eight;
        }
      }
    };
    // A token that the cluster shares: divide what this block has by its sum, give the others what it has of heads of
    // which they make the results, where the tiles were, and make some.
    const int splits = blocks_of_token(), bits = 31 - __clz(kHeads / splits), each = 1 << bits;
    // Eight that block `from` has of heads of this one, as lane `lane` of a warp there had them: of the heads `eight` of
    // eight each, in half of the dimensions.
    const auto part_at = [&](int from, int eight, int half, int i, int lane) -> uint4* {
      return reinterpret_cast<uint4*>(shared.tiles) + (((from * each / 8 + eight) * 2 + half) * 8 + i) * 32 + lane;
    };
    const auto merge_results = [&](float (&o)[2][kDim / 8], int row, int last) {
      dk::arrive_relaxed_cluster();  // this block's products have read its tiles: there is nothing to order
      dk::wait_acquire_cluster();
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int head = warp * 16 + r + 8 * h;
        const float sum = shared.sums[0][head] + shared.sums[1][head], inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          unsigned words[4];
          for (int j = 0; j < 4; ++j)
            words[j] = dk::pair<T>(o[i / 4][i % 4 * 16 + j * 4 + 2 * h] * inverse,
                                   o[i / 4][i % 4 * 16 + j * 4 + 2 * h + 1] * inverse);
          const uint4 eight = {words[0], words[1], words[2], words[3]};
          const int block = 2 * warp + h >> bits - 3;
          uint4* to = part_at(rank, 2 * warp + h & each / 8 - 1, warpgroup, i, lane);
          if (block == rank) *to = eight;
          else dk::store_shared_cluster_16(dk::shared_address(to), block, eight);
        }
      }
      if (threadIdx.x < kHeads) {
        const float sum = shared.sums[0][threadIdx.x] + shared.sums[1][threadIdx.x];
        dk::store_shared_cluster_8(dk::shared_address(shared.totals + rank * each + (threadIdx.x & each - 1)),
                                   threadIdx.x >> bits,
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
      // Of eight heads, each warp has an eighth of the dimensions.
      const int number = threadIdx.x / 32;
#pragma unroll 1
      for (int eight = 0; eight < each / 8; ++eight) {
        const int head = rank * each + eight * 8 + r, half = number / 4;
        float x[2][8] = {};
#pragma unroll 2
        for (int from = 0; from < splits; ++from) {
          const float weight = shared.totals[from * each + eight * 8 + r].y;
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const auto part = dk::Vec<T, 8>::load(
                reinterpret_cast<const T*>(part_at(from, eight, half, number % 4 * 2 + k, lane)));
            for (int j = 0; j < 8; ++j) x[k][j] += weight * dk::to_float(part.elements[j]);
          }
        }
        for (int k = 0; k < 2; ++k) {
          const int i = number % 4 * 2 + k;
          const uint4 result = eight_of(x[k], i, half == 1 && cos_sin != nullptr ? shared.angles : nullptr);
          if (first_head + head < heads)
            reinterpret_cast<uint4*>(out + (1ll * row * heads + first_head + head) * kDim)[half * 32 + i * 4 + c / 2] =
                result;
        }
      }
    };

    copy_queries(blockIdx.z);
    if (threadIdx.x < kHeads)
      shared.sinks[threadIdx.x] =
          sinks != nullptr && first_head + threadIdx.x < heads ? sinks[first_head + threadIdx.x] : -CUDART_INF_F;
    Rows rows = rows_of(blockIdx.z);
    float angle = angle_of(blockIdx.z, rows);
    for (int row = blockIdx.z; row < max_tokens; row += gridDim.z) {
      if (threadIdx.x < dk::kRotary) shared.angles[threadIdx.x] = angle;
      have_queries();
      const int next = row + gridDim.z;
      for (int i = threadIdx.x; i < kHeads * kDim / 64; i += 2 * kWarpgroup)
        dk::prefetch_l2(q + 1ll * next * q_stride + first_head * kDim + i * 64,
                        next < max_tokens && first_head + i / 8 < heads);
      float o[2][kDim / 8] = {}, sum[2] = {};  // 64 heads by twice 128 dimensions; heads r and r + 8
      const int tiles = rows.end_tile - rows.tile;
#pragma unroll 1
      for (int tile = 0; tile < tiles; tile += 2) {
        const int two = tile + 1 < tiles;
        float added[2] = {};
        bool raised = true;
        if (warpgroup <= two) raised = make_probabilities(tile + warpgroup == 0, tile + warpgroup + 1 >= tiles, added);
        // The second warpgroup begins with its own tile, unless what the first one adds had to be multiplied before.
        const int first = warpgroup == 1 && !raised;
#pragma unroll 1
        for (int i = 0; i <= two; ++i) {
          const int stage = i ^ first;
          if (stage != warpgroup) dk::meet_acq_rel_cta(kProbable + stage, 2 * kWarpgroup);
          // If it does, all factors of its own tile are 1, and those of the first one's were seen with the maximum.
          if (i == 0 || !first) scale_sums(o, sum, i);
          if (stage == warpgroup) sum[0] += added[0], sum[1] += added[1];
          add_rows(o, stage);
        }
        phases ^= 1 | two << 1;
      }
      for (int h = 0; h < 2; ++h) {
        for (int step = 1; step < 4; step *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], step);
        if (c == 0) shared.sums[warpgroup][warp * 16 + r + 8 * h] = sum[h];
      }
      dk::meet_acq_rel_cta(kSummed, 2 * kWarpgroup);
      const int last = tiles % 2 ^ 1;
      if (splits > 1) {
        merge_results(o, row, last);
        break;  // the only one
      }
      // The next token's are on their way while the results go theirs.
      copy_queries(next);
      if (next < max_tokens) rows = rows_of(next);
      put_results(o, row, last);
      angle = angle_of(next, rows);
      dk::meet_acq_rel_cta(kStaged, 2 * kWarpgroup);  // these angles and sums were read
    }
  } else {
    dk::give_back_registers<64>();
    // Rows are looked for four tiles at a time, a thread each, of one token after another; read of a tile is by eight
    // rows a warp, with four lanes each.
    constexpr int kWindow = 1 << 30;  // more for an entry of the window
    const auto source_of = [&](int entry) -> dk::PagesOf<kFormat, const unsigned char> {
      const bool is_window = entry >= kWindow;
      return {is_window ? window_pool : entry_pool,   is_window ? window_table : entry_table,
              is_window ? window_pages : entry_pages, is_window ? window_width : entry_width,
              is_window ? window_bits : entry_bits,   is_window ? window_page_bytes : entry_page_bytes};
    };
    const int slot = thread / kRows + (warpgroup - 2) * 2;
    int row = blockIdx.z, number = slot;  // the token of this thread's tile, and which of its tiles that is
    int placed = 0;                       // tiles
    const auto look = [&]() {
      int entry = -1, kind = kNoTile;
      Found found = {nullptr, nullptr};
      for (; row < max_tokens; row += gridDim.z) {
        const Rows rows = rows_of(row);
        DK_CHECK(rows.end - max(0, rows.position + 1 - window) <= 1ll * window_width << window_bits,
                 "row %d attends to positions from %d on, and its request has %d tokens: the window has room for %d\n",
                 row, max(0, rows.position + 1 - window), rows.end, window_width << window_bits);
        const int tiles = rows.end_tile - rows.tile;
        if (number >= tiles) {
          number -= tiles;
          continue;
        }
        kind = number % 2 == 0 && number + 1 == tiles ? kAlone : kOfTwo;
        const int at = (rows.tile + number) * kRows + thread % kRows;
        entry = at - rows.of_window;
        if (entry < 0) entry += rows.position + 1 + kWindow;
        else if (at >= rows.count) entry = -1;
        else if constexpr (kListed) entry = listed[1ll * row * list + entry];
        DK_CHECK(entry < 0 || at < rows.of_window || entry < visible[row],
                 "row %d attends to entry %d, and sees %d\n", row, entry, visible[row]);
        if (entry >= 0) {
          const auto source = source_of(entry);
          const int page = source.page_of(rows.request, entry % kWindow);
          const int place = source.place_of(entry % kWindow);
          if (page >= 0) found = {source.values(page, place), source.scales(page, place)};
        }
        break;
      }
      dk::meet_acq_rel_cta(kFound, 2 * kWarpgroup);  // who is behind has read what was there
      shared.places[(placed + slot) % 8][thread % kRows] = found;
      if (thread % kRows == 0) shared.kinds[(placed + slot) % 8] = kind;
      number += 4, placed += 4;
      dk::meet_acq_rel_cta(kFound, 2 * kWarpgroup);
    };
    Piece<kFormat, 0> low;
    Piece<kFormat, 1> high;
    unsigned phases = 0;  // of the tiles, a bit each
    look();
    int tile = 0, kind = shared.kinds[0];  // the first of a pair
    low.read(shared.places[0]), high.read(shared.places[kind == kOfTwo]);
    while (kind != kNoTile) {
      const int two = kind == kOfTwo, next = tile + 1 + two;
      kind = shared.kinds[next % 8];
      // The first tile's low half, the second's high, the second's low, the first's high.
#pragma unroll 1
      for (int i = 0; i <= two; ++i) {
        put_piece(shared, low, i, phases, window_pool);
        low.read(shared.places[(i < two ? tile + 1 : next) % 8]);
        put_piece(shared, high, two - i, phases, window_pool);
        high.read(shared.places[(i < two ? tile : next + (kind == kOfTwo)) % 8]);
      }
      phases ^= 1 | two << 1;
      tile = next;
      if (placed < tile + 4) look();  // the tiles are full: there is time
    }
    if (blocks_of_token() > 1) {  // as the others do
      dk::arrive_relaxed_cluster();
      dk::wait_acquire_cluster();
      dk::meet_acq_rel_cluster();
    }
  }
#endif
}
