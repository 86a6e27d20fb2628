// How the threads of a team divide pieces of work that take equally long (work stealing): each has neighboring pieces, whose
// memory it prefetched, and a thread that is done takes the last pieces of another, whose core may run another process.

#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

class Shares {
 public:
  explicit Shares(int num_threads) : shares_(num_threads) {}

  // Calls `work` once for each piece of `count`, below 2^32. All threads of the team call it, and return together.
  template <class F> void each(int64_t count, F&& work) {
    const int64_t threads = omp_get_num_threads(), own = omp_get_thread_num();
    shares_[own].left.store({(uint32_t)(count * own / threads), (uint32_t)(count * (own + 1) / threads)}, std::memory_order_relaxed);
    for (int64_t piece; (piece = shares_[own].take(true)) >= 0;) work(piece);
    for (int64_t other = own + 1; other < own + threads; other++)
      for (int64_t piece; (piece = shares_[other % threads].take(false)) >= 0;) work(piece);
#pragma omp barrier
  }

 private:
  struct Range { uint32_t begin, end; };
  struct alignas(64) Share {  // a line of cache each
    std::atomic<Range> left{Range{0, 0}};

    // Its first or its last piece, or -1.
    int64_t take(bool first) {
      Range range = left.load(std::memory_order_relaxed);
      while (range.begin < range.end) {
        const Range rest = first ? Range{range.begin + 1, range.end} : Range{range.begin, range.end - 1};
        if (left.compare_exchange_weak(range, rest, std::memory_order_relaxed)) return first ? range.begin : rest.end;
      }
      return -1;
    }
  };
  std::vector<Share> shares_;
};

}  // namespace
