// Where processes of one host that compute a layer together wait for each other. Knows no layer.

#include <sched.h>

#include <atomic>
#include <cstdint>

#include "calls.h"

namespace {

constexpr int64_t kLine = 64;
constexpr int kSpins = 1 << 12;  // some tens of microseconds, as long as shares of a product differ; then others may run

struct alignas(kLine) Arrived {
  std::atomic<int64_t> num_meetings;
};
static_assert(std::atomic<int64_t>::is_always_lock_free);

}  // namespace

int32_t shardline_meet(Ranks* ranks) {
  Arrived* arrived = (Arrived*)ranks->arrived;
  const int64_t meeting = ++ranks->num_meetings;
  arrived[ranks->rank].num_meetings.store(meeting, std::memory_order_release);
  for (int rank = 0; rank < ranks->num_ranks; ++rank)
    for (int spins = 0; arrived[rank].num_meetings.load(std::memory_order_acquire) < meeting; ++spins)
      if (spins < kSpins)
        __builtin_ia32_pause();
      else
        sched_yield();
  return 0;
}

extern "C" int32_t shardline_ranks_call_bytes() { return sizeof(Ranks); }
