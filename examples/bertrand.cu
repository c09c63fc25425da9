// Orbits in a central force, all at once: see bertrand.py.

namespace {

// A symplectic step of sixth order (Yoshida 1990, solution A): leapfrog steps of these lengths, forwards and backwards.
constexpr int kStages = 7;
__device__ const double kLengths[kStages] = {0.784513610477560,  0.235573213359357, -1.17767998417887, 1.31518632068391,
                                             -1.17767998417887, 0.235573213359357, 0.784513610477560};

struct Orbit {
  double x, y, vx, vy;

  // The force -r^n towards the centre, over r: it multiplies the place.
  __device__ double pull(double n) const { return -pow(x * x + y * y, 0.5 * (n - 1.0)); }
  // r times the radial velocity: 0 at the turning points, where it falls at the outer ones.
  __device__ double outwards() const { return x * vx + y * vy; }
  __device__ double outwards_slope(double n) const { return vx * vx + vy * vy + pull(n) * (x * x + y * y); }
  __device__ double energy(double n) const {
    const double r2 = x * x + y * y;
    return 0.5 * (vx * vx + vy * vy) + (n == -1.0 ? 0.5 * log(r2) : pow(r2, 0.5 * (n + 1.0)) / (n + 1.0));
  }
  __device__ double momentum() const { return x * vy - y * vx; }
  __device__ void step(double n, double dt) {
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      const double h = 0.5 * dt * kLengths[i];
      x += h * vx, y += h * vy;
      const double by = 2.0 * h * pull(n);
      vx += by * x, vy += by * y;
      x += h * vx, y += h * vy;
    }
  }
};

}  // namespace

// grid: ceil(orbits / block), block: any, one-dimensional
// states: [orbits, 4], place and velocity, at first at an inner turning point on the x axis, going up
// exponents, steps_of: [orbits], n of the force -r^n, and the length of a step
// left: [orbits], turning points to come, above 0 while an orbit goes on; -1 of one that has had `most` steps
// turns, taken: [orbits], full turns, and steps so far; angles: [orbits], the polar angle of the newest turning point
// start: [orbits, 2], energy and angular momentum at first; drift: [orbits, 2], how far they have been off, of their size
// trace: [orbits, places, 2], where the orbit was after each `stride` steps, as long as there is room
//
// `steps` steps of each orbit that goes on. A step in which the radial velocity changes its sign has a turning point: it is
// found from the step's end by Newton's method, with steps of the same kind, and its angle from there by atan2.
extern "C" __global__ void orbits(double* states, const double* exponents, const double* steps_of, int* left, int* turns,
                                  int* taken, double* angles, const double* start, double* drift, float* trace, int count,
                                  int steps, int most, int stride, int places) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= count || left[i] <= 0) return;
  Orbit orbit = {states[4 * i], states[4 * i + 1], states[4 * i + 2], states[4 * i + 3]};
  const double n = exponents[i], dt = steps_of[i];
  int to_come = left[i], full = turns[i], done = taken[i];

  for (int step = 0; step < steps && to_come > 0; ++step) {
    if (done % stride == 0 && done / stride < places) {
      float* const place = trace + 2 * (static_cast<long long>(i) * places + done / stride);
      place[0] = orbit.x, place[1] = orbit.y;
    }
    const double before = orbit.outwards(), y = orbit.y;
    orbit.step(n, dt);
    ++done;
    if (y >= 0.0 && orbit.y < 0.0 && orbit.x < 0.0) ++full;  // atan2 falls from pi to -pi
    if (before != 0.0 && (before > 0.0) != (orbit.outwards() > 0.0)) {
      Orbit turning = orbit;
      for (int k = 0; k < 6; ++k) turning.step(n, -turning.outwards() / turning.outwards_slope(n));
      const double across = orbit.x * turning.y - orbit.y * turning.x, along = orbit.x * turning.x + orbit.y * turning.y;
      angles[i] = atan2(orbit.y, orbit.x) + 2.0 * 3.14159265358979323846 * full + atan2(across, along);
      --to_come;
    } else if (done >= most) {
      to_come = -1;
    }
  }

  states[4 * i] = orbit.x, states[4 * i + 1] = orbit.y, states[4 * i + 2] = orbit.vx, states[4 * i + 3] = orbit.vy;
  left[i] = to_come, turns[i] = full, taken[i] = done;
  const double off[2] = {orbit.energy(n) - start[2 * i], orbit.momentum() - start[2 * i + 1]};
  for (int k = 0; k < 2; ++k) drift[2 * i + k] = fmax(drift[2 * i + k], fabs(off[k] / start[2 * i + k]));
}
