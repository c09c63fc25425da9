// Rotation of neighbouring pairs by position.

#pragma once

namespace dk {

// Turn the pair (even, odd) by an angle: (even * c - odd * s, odd * c + even * s), every product and sum rounded by
// itself: a compiler that fuses them would change bits from device to device. A negative s turns it back.
__device__ inline void turn(float& even, float& odd, float c, float s) {
  const float e = even, o = odd;
  even = __fadd_rn(__fmul_rn(e, c), -__fmul_rn(o, s));
  odd = __fadd_rn(__fmul_rn(o, c), __fmul_rn(e, s));
}

}  // namespace dk
