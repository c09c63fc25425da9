// How a row travels between ranks that sum it up, by 16 bytes a thread: four protocols that give the same bits.
//
// kLamport   Each rank stores its row into a mailbox of every other one, and reads its own mailboxes until no word there
//            is kAbsent any more. Who has read a mailbox makes it kAbsent again. One flight, all of the wire.
// kPackets   As before, but beside each word stands the number of the call, in one 8-byte store: nothing has to be
//            cleared, and half of the wire is for numbers.
// kFlags     As before, but a flag for each block says that all of the block's rows are there: a release of the sender,
//            an acquire of the reader. The flag starts when the rows have arrived.
// kTwoShot   Each warp of the row has one rank that gets the others' words, sums them up and stores the sum to all: two
//            flights, 2 (ranks - 1) / ranks rows a rank instead of (ranks - 1). Mailboxes as of kLamport.
//
// A word that is kAbsent itself is replaced before it is sent, for all protocols: in 16-bit types it is the pair (-0, -0),
// which becomes (+0, +0), in float a subnormal number that becomes its neighbour. Sums are made in rank order, in float,
// rounded to T, and their words replaced in the same way.
//
// With multicast one store reaches all ranks, the sender too, who therefore waits for its own words as well.

#pragma once

#include "ranks.cuh"
#include "vec.cuh"

namespace dk {

// Of a block: words of more ranks need more registers.
template <int kRanks>
constexpr int kMostThreads = kRanks == 2 ? 1024 : kRanks <= 4 ? 512 : 256;

constexpr int kLamport = 0, kPackets = 1, kFlags = 2, kTwoShot = 3;

constexpr unsigned kAbsent = 0x80008000u;
__device__ inline bool lacks(uint4 v) { return v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent; }

template <typename T>
__device__ unsigned present(unsigned word) {
  return word != kAbsent ? word : sizeof(T) == 4 ? kAbsent + 1 : 0u;
}
template <typename T>
__device__ uint4 present(uint4 v) { return {present<T>(v.x), present<T>(v.y), present<T>(v.z), present<T>(v.w)}; }

// Of `mine` of rank `me` and the others' words, in rank order, in float, rounded to T.
template <typename T, int kRanks>
__device__ uint4 sum(const uint4 (&words)[kRanks], int me, uint4 mine) {
  constexpr int kElements = 16 / sizeof(T);
  float total[kElements] = {};
#pragma unroll
  for (int from = 0; from < kRanks; ++from) {
    const uint4 given = from == me ? mine : words[from];
    const Vec<T, kElements>& row = reinterpret_cast<const Vec<T, kElements>&>(given);
#pragma unroll
    for (int i = 0; i < kElements; ++i) total[i] += to_float(row.elements[i]);
  }
  uint4 made;
  Vec<T, kElements>& rounded = reinterpret_cast<Vec<T, kElements>&>(made);
#pragma unroll
  for (int i = 0; i < kElements; ++i) rounded.elements[i] = from_float<T>(total[i]);
  return present<T>(made);
}

// Packets: each word of 4 bytes beside the number of its call, together one access of 8 bytes. 16 bytes take 32.
__device__ inline unsigned long long packet(unsigned word, unsigned number) {
  return static_cast<unsigned long long>(number) << 32 | word;
}
__device__ inline void store_packets(unsigned char* p, unsigned number, uint4 words) {
  store_relaxed_sys_8x2(p, packet(words.x, number), packet(words.y, number));
  store_relaxed_sys_8x2(p + 16, packet(words.z, number), packet(words.w, number));
}
// To all others, `at` bytes into their parts.
template <bool kMulticast, int kRanks>
__device__ void send_packets(const Call<kRanks>& call, long long at, uint4 words) {
  const unsigned number = call.number + 1;
  if constexpr (kMulticast) {
    unsigned char* const all = call.everywhere + at;
    multimem_store_relaxed_sys_8(all, packet(words.x, number));
    multimem_store_relaxed_sys_8(all + 8, packet(words.y, number));
    multimem_store_relaxed_sys_8(all + 16, packet(words.z, number));
    multimem_store_relaxed_sys_8(all + 24, packet(words.w, number));
  } else {
#pragma unroll
    for (int step = 1; step < kRanks; ++step)
      store_packets(call.part((call.me + step) % kRanks) + at, number, words);
  }
}
// Whether all four are of the call of this number; then `words` are what they carry.
__device__ inline bool load_packets(const unsigned char* p, unsigned number, uint4& words) {
  const ulonglong2 low = load_relaxed_sys_8x2(p), high = load_relaxed_sys_8x2(p + 16);
  words = {static_cast<unsigned>(low.x), static_cast<unsigned>(low.y), static_cast<unsigned>(high.x),
           static_cast<unsigned>(high.y)};
  return low.x >> 32 == number && low.y >> 32 == number && high.x >> 32 == number && high.y >> 32 == number;
}

// What this block has stored to the others is there, and what their blocks of the same number have stored here. All
// threads. Another rank may be one call ahead, and its flag with it; what a flag was before is of no account, so a block
// that was not launched for some calls makes no difference.
template <bool kMulticast, int kRanks>
__device__ void meet_by_flags(Call<kRanks>& call) {
  const auto flag = [&](unsigned char* part, int from) {
    return &reinterpret_cast<Lines*>(part)->flags[blockIdx.x][from];
  };
  const int other = threadIdx.x;
  __syncthreads();
  if (!call.failed) {
    if (kMulticast && threadIdx.x == 0)
      multimem_store_release_sys(flag(call.everywhere, call.me), call.number + 1);
    if (other < kRanks && other != call.me) {
      if (!kMulticast) store_release_sys(flag(call.part(other), call.me), call.number + 1);
      for (;;) {
        const unsigned seen = load_acquire_sys(flag(call.part(call.me), other));
        if (seen == call.number + 1 || seen == number_behind(call.number) + 1 || !call.again(other)) break;
      }
    }
  }
  call.failed = __syncthreads_or(call.failed);
}

// The mailboxes of a protocol: [kGenerations, kRanks, capacity] rows of row_bytes (twice as many for packets), from byte
// `begin` of each part on; this thread has the 16 bytes of number `chunk` of each row.
template <int kRanks, bool kMulticast>
struct Mailboxes {
  Call<kRanks>& call;
  long long begin;
  int capacity, row_bytes, chunk;

  __device__ long long at(int from, int row, int widen = 1) const {
    const long long slot = (1ll * call.generation() * kRanks + from) * capacity + row;
    return begin + (slot * row_bytes + chunk * 16) * widen;
  }
  __device__ unsigned char* mine(int from, int row, int widen = 1) const {
    return call.part(call.me) + at(from, row, widen);
  }
  // 16 bytes for all others, into the mailbox that they have of this rank.
  __device__ void send(long long at, uint4 words) const {
    if constexpr (kMulticast) {
      multimem_store_relaxed_sys_16(call.everywhere + at, words);
    } else {
#pragma unroll
      for (int step = 1; step < kRanks; ++step)  // each at a time by one
        store_relaxed_sys_16(call.part((call.me + step) % kRanks) + at, words);
    }
  }

  // Wait for the words of all ranks but this one, of this one too where `own`; make their mailboxes empty again.
  __device__ void take(uint4 (&words)[kRanks], int row, bool own) {
    const auto wanted = [&](int from) { return own || from != call.me; };
    for (int missing = 0; missing >= 0;) {
      missing = -1;
#pragma unroll
      for (int from = 0; from < kRanks; ++from)
        if (wanted(from)) words[from] = load_relaxed_sys_16(mine(from, row));
#pragma unroll
      for (int from = kRanks - 1; from >= 0; --from)
        if (wanted(from) && lacks(words[from])) missing = from;
      if (missing >= 0 && !call.again(missing)) return;
    }
#pragma unroll
    for (int from = 0; from < kRanks; ++from)
      if (wanted(from)) *reinterpret_cast<uint4*>(mine(from, row)) = {kAbsent, kAbsent, kAbsent, kAbsent};
  }
};

// What a block does with its rows, of numbers first, first + step, ... below rows:
//
//   send(first, step, rows, own)  all threads, once: own(row) is what this thread has of a row, its words present
//   reduced(row, own)             the sum of all ranks' own(row); nothing of use if the call has failed
//
// A thread that has no part of the row is not `inside`.
template <typename T, int kProtocol, int kRanks, bool kMulticast>
struct Exchange;

template <typename T, int kRanks, bool kMulticast>
struct Exchange<T, kLamport, kRanks, kMulticast> {
  Mailboxes<kRanks, kMulticast> boxes;
  bool inside;

  template <typename Own>
  __device__ void send(int first, int step, int rows, Own own) {
    if (!inside || boxes.call.failed) return;
    for (int row = first; row < rows; row += step) boxes.send(boxes.at(boxes.call.me, row), own(row));
  }
  __device__ uint4 reduced(int row, uint4 mine) {
    uint4 words[kRanks] = {};
    if (inside && !boxes.call.failed) boxes.take(words, row, kMulticast);
    return sum<T>(words, boxes.call.me, mine);
  }
};

template <typename T, int kRanks, bool kMulticast>
struct Exchange<T, kPackets, kRanks, kMulticast> {
  Mailboxes<kRanks, kMulticast> boxes;
  bool inside;

  template <typename Own>
  __device__ void send(int first, int step, int rows, Own own) {
    if (!inside || boxes.call.failed) return;
    for (int row = first; row < rows; row += step) send_packets<kMulticast>(boxes.call, at(row), own(row));
  }
  __device__ uint4 reduced(int row, uint4 mine) {
    Call<kRanks>& call = boxes.call;
    uint4 words[kRanks] = {};
    for (int missing = inside && !call.failed ? 0 : -1; missing >= 0;) {
      missing = -1;
#pragma unroll
      for (int from = kRanks - 1; from >= 0; --from)
        if (from != call.me && !load_packets(boxes.mine(from, row, 2), call.number + 1, words[from])) missing = from;
      if (missing >= 0 && !call.again(missing)) break;
    }
    return sum<T>(words, boxes.call.me, mine);
  }
  __device__ long long at(int row) const { return boxes.at(boxes.call.me, row, 2); }
};

template <typename T, int kRanks, bool kMulticast>
struct Exchange<T, kFlags, kRanks, kMulticast> {
  Mailboxes<kRanks, kMulticast> boxes;
  bool inside;

  template <typename Own>
  __device__ void send(int first, int step, int rows, Own own) {
    if (inside && !boxes.call.failed)
      for (int row = first; row < rows; row += step) boxes.send(boxes.at(boxes.call.me, row), own(row));
    meet_by_flags<kMulticast>(boxes.call);
  }
  __device__ uint4 reduced(int row, uint4 mine) {
    uint4 words[kRanks] = {};
#pragma unroll
    for (int from = 0; from < kRanks; ++from)
      if (inside && from != boxes.call.me) words[from] = load_weak_16(boxes.mine(from, row));
    return sum<T>(words, boxes.call.me, mine);
  }
};

template <typename T, int kRanks, bool kMulticast>
struct Exchange<T, kTwoShot, kRanks, kMulticast> {
  Mailboxes<kRanks, kMulticast> boxes;
  bool inside;

  __device__ int owner() const { return boxes.chunk / 32 % kRanks; }

  template <typename Own>
  __device__ void send(int first, int step, int rows, Own own) {
    Call<kRanks>& call = boxes.call;
    if (!inside || call.failed) return;
    if (owner() != call.me) {
      for (int row = first; row < rows; row += step)
        store_relaxed_sys_16(call.part(owner()) + boxes.at(call.me, row), own(row));
      return;
    }
    for (int row = first; row < rows; row += step) {
      uint4 words[kRanks] = {};
      boxes.take(words, row, false);
      if (call.failed) return;
      const uint4 total = sum<T>(words, call.me, own(row));
      boxes.send(boxes.at(call.me, row), total);
      if (!kMulticast) store_relaxed_sys_16(boxes.mine(call.me, row), total);
    }
  }
  __device__ uint4 reduced(int row, uint4) {
    uint4 total{};
    if (!inside || boxes.call.failed) return total;
    unsigned char* const box = boxes.mine(owner(), row);
    while (lacks(total = load_relaxed_sys_16(box)))
      if (!boxes.call.again(owner())) return total;
    *reinterpret_cast<uint4*>(box) = {kAbsent, kAbsent, kAbsent, kAbsent};
    return total;
  }
};

}  // namespace dk
