// Which tiles of keys each block of an attention kernel takes.
//
// A request's work for one head is the row of tiles, kTile tokens each, that its queries attend to. A team is `abreast`
// blocks that go through the same tiles at one time, each for a head of its own, as those lie side by side in a page; so
// heads go in sets of that many. All work of a set stands in one row: request after request, within it set after set. A unit
// is unit_tiles tiles of the row; the last one of a request's work may be shorter, and a request without tokens has one empty
// unit: somebody must write its zeros. Team t takes the units from t * units_per_team on.
//
// A run of units of one work that one block computes is a segment. Its result is the output, if it is the whole work, or a
// partial one, which goes to a slot; whoever is last to bring one merges them in the order of the slots.
//   balanced: a segment is as long as the team's part of the work. Of a team only the first and the last one can be
//             partial, so two slots a block are enough for any lengths.
//   alone:    a segment is one unit, whose slot is its number. So what is summed with what depends on the request alone.

#pragma once

namespace dk {

constexpr int kTile = 64;

// The plan as it lies in memory, in ints: this, then for each team a Start, then for each request a Request.
struct PlanHead {
  int units_per_team, unit_tiles, alone, units;
};
struct PlanRequest {
  int length, units_before;  // tokens; units of one head of all requests before it
};
struct alignas(8) PlanStart {
  int request, set, unit, units;  // where a team begins, and how many units it takes
  PlanRequest of;                 // the request's, so that the first keys are one access nearer
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What a request of `length` tokens attends to, the last q_len of which are its queries. A query at position p attends to
// [p - window, p]; a negative window is none.
struct Extent {
  int first_token, first_tile, end_tile, units;

  __device__ Extent(int length, int q_len, int window, int unit_tiles) {
    first_token = window < 0 ? 0 : max(0, length - q_len - window);
    first_tile = first_token / kTile;
    end_tile = ceil_div(length, kTile);
    units = max(1, ceil_div(end_tile - first_tile, unit_tiles));
  }
};

struct Plan {
  const PlanHead* head;
  const PlanStart* starts;
  const PlanRequest* requests;
  int abreast, team, member;  // blocks of a team; this block's team, and its number there

  __device__ Plan(const int* plan, int abreast)
      : head(reinterpret_cast<const PlanHead*>(plan)),
        starts(reinterpret_cast<const PlanStart*>(head + 1)),
        requests(reinterpret_cast<const PlanRequest*>(starts + gridDim.x / abreast)),
        abreast(abreast), team(blockIdx.x / abreast), member(blockIdx.x % abreast) {}
};

// A place in a block's part of the work, kTiles tiles after each other, of which a segment's last ones may be fewer.
template <int kTiles>
struct Cursor {
  int heads, parts, q_len, window, unit_tiles, abreast, member;
  bool alone;
  const PlanRequest* requests;

  int request, set, unit, left;  // the segment's first unit; units of this block that are left, the segment's among them
  int kv_head;
  int length, units_before;     // of the request
  int units, first_token;       // of the work
  int tile, end;                // the place, and where the segment ends

  __device__ Cursor(const Plan& plan, int kv_heads, int parts, int q_len, int window)
      : heads(kv_heads * parts), parts(parts), q_len(q_len), window(window), unit_tiles(plan.head->unit_tiles),
        abreast(plan.abreast), member(plan.member), alone(plan.head->alone), requests(plan.requests) {
    const PlanStart start = plan.starts[plan.team];
    request = start.request, set = start.set, unit = start.unit, left = start.units;
    if (left) {
      enter(start.of);
      open();
    }
  }

  __device__ void enter(const PlanRequest& of) {
    length = of.length, units_before = of.units_before;
    const Extent extent(length, q_len, window, unit_tiles);
    first_token = extent.first_token, units = extent.units;
  }

  __device__ void open() {
    kv_head = head() / parts;
    tile = first_tile();
    end = max(tile + 1, min(tile + run() * unit_tiles, ceil_div(length, kTile)));
  }

  __device__ int head() const { return set * abreast + member; }  // `parts` of them share a KV head
  __device__ int part() const { return head() - kv_head * parts; }
  __device__ int run() const { return alone ? 1 : min(left, units - unit); }                   // units of the segment
  __device__ int first_tile() const { return first_token / kTile + unit * unit_tiles; }        // of the segment
  __device__ bool opens() const { return tile == first_tile(); }
  __device__ bool closes() const { return tile + kTiles >= end; }
  __device__ int end_token() const { return min(length, end * kTile); }  // of the segment

  __device__ void advance() {
    tile += kTiles;
    if (tile < end) return;
    const int done = run();
    left -= done;
    if (!left) return;
    unit += done;
    if (unit == units) {
      unit = 0;
      if (++set * abreast == heads) {
        set = 0;
        enter(requests[++request]);
      }
    }
    open();
  }
};

// The segments that a work is made of, and their slots.
struct Slots {
  int count, mine;            // how many; this segment's slot
  int first, second, stride;  // slots of a team: the first and the second one's; from there on they follow in such steps
  int abreast, member;

  template <int kTiles>
  __device__ Slots(const Plan& plan, const Cursor<kTiles>& at) {
    const int begin = at.heads / at.abreast * at.units_before + at.set * at.units;  // of the work, in the row of units
    abreast = at.abreast, member = at.member;
    if (at.alone) {
      count = at.units, first = begin, second = begin + 1, stride = 1, mine = begin + at.unit;
    } else {
      const int per_team = plan.head->units_per_team;
      const int first_team = begin / per_team;
      count = (begin + at.units - 1) / per_team - first_team + 1;
      first = 2 * first_team + (begin % per_team != 0);
      second = 2 * first_team + 2, stride = 2;
      mine = plan.team == first_team ? first : 2 * plan.team;
    }
    mine = mine * abreast + member;
  }

  __device__ int operator[](int i) const { return (i == 0 ? first : second + (i - 1) * stride) * abreast + member; }
};

}  // namespace dk
