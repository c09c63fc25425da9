// Which tiles of keys each block of an attention kernel takes.
//
// A request's work for one head is the row of tiles, kTile tokens each, that its queries attend to. All work stands in one
// row: request after request, within it head after head. A unit is unit_tiles tiles of it, the last one of a head's work may be
// shorter, and a request without tokens has one empty unit: somebody must write its zeros. Block b takes the units from
// b * units_per_block on.
//
// A run of units of one work that one block computes is a segment. Its result is the output, if it is the whole work, or a
// partial one, which goes to a slot; whoever is last to bring one merges them in the order of the slots.
//   balanced: a segment is as long as the block's part of the work. Of a block only the first and the last one can be
//             partial, so two slots a block are enough for any lengths.
//   alone:    a segment is one unit, whose slot is its number. So what is summed with what depends on the request alone.

#pragma once

namespace dk {

constexpr int kTile = 64;

// The plan as it lies in memory, in ints: this, then for each block a Start, then for each request a Request.
struct PlanHead {
  int units_per_block, unit_tiles, alone, units;
};
struct PlanStart {
  int request, head, unit, units;  // where a block begins, and how many units it takes
};
struct PlanRequest {
  int length, units_before;  // tokens; units of one head of all requests before it
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

  __device__ Plan(const int* plan, int blocks)
      : head(reinterpret_cast<const PlanHead*>(plan)),
        starts(reinterpret_cast<const PlanStart*>(head + 1)),
        requests(reinterpret_cast<const PlanRequest*>(starts + blocks)) {}
};

// A place in a block's part of the work, one tile after the other.
struct Cursor {
  int heads, parts, q_len, window, unit_tiles;
  bool alone;
  const PlanRequest* requests;

  int request, head, unit, left;  // the segment's first unit; units of this block that are left, the segment's among them
  int kv_head, part;              // head / parts, head % parts
  int length, units_before;       // of the request
  int units, run;                 // of the work, and of the segment
  int first_token, first_tile;    // of the work
  int tile, end;                  // the place, and where the segment ends

  __device__ Cursor(const Plan& plan, int kv_heads, int parts, int q_len, int window)
      : heads(kv_heads * parts), parts(parts), q_len(q_len), window(window), unit_tiles(plan.head->unit_tiles),
        alone(plan.head->alone), requests(plan.requests) {
    const PlanStart start = plan.starts[blockIdx.x];
    request = start.request, head = start.head, unit = start.unit, left = start.units;
    if (left) {
      kv_head = head / parts, part = head % parts;
      read_request();
      open();
    }
  }

  __device__ void read_request() {
    length = requests[request].length, units_before = requests[request].units_before;
    const Extent extent(length, q_len, window, unit_tiles);
    first_token = extent.first_token, first_tile = extent.first_tile, units = extent.units;
  }

  __device__ void open() {
    run = alone ? 1 : min(left, units - unit);
    tile = first_tile + unit * unit_tiles;
    end = max(tile + 1, min(tile + run * unit_tiles, ceil_div(length, kTile)));
  }

  __device__ bool opens() const { return tile == first_tile + unit * unit_tiles; }
  __device__ bool closes() const { return tile + 1 == end; }

  __device__ void advance() {
    if (++tile < end) return;
    left -= run;
    if (!left) return;
    unit += run;
    if (unit == units) {
      unit = 0;
      if (++part == parts) part = 0, ++kv_head;
      if (++head == heads) {
        head = kv_head = 0;
        ++request;
        read_request();
      }
    }
    open();
  }
};

// The segments that a work is made of, and their slots.
struct Slots {
  int count, mine, first, second;  // how many; this segment's; the slots of the first and the second one, behind which
  int stride;                      // they follow each other in steps of `stride`

  __device__ Slots(const Plan& plan, const Cursor& at) {
    const int begin = at.heads * at.units_before + at.head * at.units;  // of the work, in the row of units
    if (at.alone) {
      count = at.units, first = begin, second = begin + 1, stride = 1, mine = begin + at.unit;
      return;
    }
    const int per_block = plan.head->units_per_block;
    const int first_block = begin / per_block, block = blockIdx.x;
    count = (begin + at.units - 1) / per_block - first_block + 1;
    first = 2 * first_block + (begin % per_block != 0);
    second = 2 * first_block + 2, stride = 2;
    mine = block == first_block ? first : 2 * block;
  }

  __device__ int operator[](int i) const { return i == 0 ? first : second + (i - 1) * stride; }
};

}  // namespace dk
