// What a thread attends to, and the memory that it fetches before it gets there. Knows no attention.
//
// KV of many sequences lies in memory, not in a cache, and no hardware prefetcher follows a block table. So one cursor
// for each thread runs kAheadBytes ahead of the reads, over the same lines in the same order, across the ends of items.
// Measured on a Xeon with AMX: into L1, each block from its start and from its middle at once, since the processor's own
// prefetcher works in each 4 KiB page by itself; four or eight places, 64 KiB, or L2 were no faster. On an AMD EPYC (Zen 4): into
// L2, from the start; into L1 the same calls take 1.6 times as long, from two places 1.1; 8 to 128 KiB are alike.

#pragma once

#include <immintrin.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace {

constexpr int kLine = 64;
constexpr int kAheadBytes = 16 << 10;

struct Span { const char* from; int64_t bytes; };

// A call's items, and which spans are read for each, in order.
struct Items {
  int64_t count = 0;
  virtual int64_t num_spans(int64_t item) const = 0;
  virtual Span span(int64_t item, int64_t index) const = 0;

 protected:
  ~Items() = default;
};

class Ahead {
 public:
  Ahead(const Items& items, std::atomic<int64_t>& next, std::vector<int64_t>& claimed)
      : items_(items), next_(next), claimed_(claimed) {
    claimed_.clear();
    fetch(kAheadBytes / kLine);
  }

  // The thread's next item, or -1. Items are claimed in order, by the thread that will soon read them.
  int64_t take() {
    if (taken_ == claimed_.size() && !claim()) return -1;
    return claimed_[taken_++];
  }

  // Called as so many lines are read.
  inline void fetch(int lines) {
    for (; lines > 0; lines--) {
      if (line_ == num_lines_ && !turn()) return;
      if (into_l2_) _mm_prefetch(from_ + line_ * kLine, _MM_HINT_T1);
      else _mm_prefetch(from_ + ((line_ & 1) * half_ + line_ / 2) * kLine, _MM_HINT_T0);
      line_++;
    }
  }

 private:
  bool claim() {
    const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    if (item >= items_.count) return false;
    claimed_.push_back(item);
    return true;
  }

  // To the next span that holds anything.
  __attribute__((noinline)) bool turn() {
    while (true) {
      while (seen_ < claimed_.size() && span_ < items_.num_spans(claimed_[seen_])) {
        const Span span = items_.span(claimed_[seen_], span_++);
        from_ = span.from;
        num_lines_ = (span.bytes + kLine - 1) / kLine;
        half_ = (num_lines_ + 1) / 2;
        line_ = 0;
        if (num_lines_ > 0) return true;
      }
      if (seen_ < claimed_.size()) { seen_++; span_ = 0; }
      else if (!claim()) return false;
    }
  }

  const bool into_l2_ = __builtin_cpu_is("amd");
  const Items& items_;
  std::atomic<int64_t>& next_;
  std::vector<int64_t>& claimed_;
  size_t taken_ = 0, seen_ = 0;  // of the claimed items
  int64_t span_ = 0;
  const char* from_ = nullptr;
  int64_t line_ = 0, num_lines_ = 0, half_ = 0;
};

}  // namespace
