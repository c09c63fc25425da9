// What only the device can know to be wrong.

#pragma once

#ifdef DRVKIT_CPU_DEVICE
// On the CPU device: say it and stop.
#define DK_CHECK(holds, ...)  \
  do {                        \
    if (!(holds)) {           \
      printf(__VA_ARGS__);    \
      __trap();               \
    }                         \
  } while (0)
#else
// On a GPU nothing: what follows a check stays inside its memory where it does not hold.
#define DK_CHECK(holds, ...) ((void)0)
#endif
