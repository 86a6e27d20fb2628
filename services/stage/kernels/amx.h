// AMX: tiles of 16 rows of 64 bytes, and products of them. Knows no attention and no linear layer.
//
// A tile register's number is a template argument; its shape comes from the configuration that the thread loaded last.
// product<sum, left, right>() adds left x right to sum, all float sums in one order: for each element, pair after pair of
// the inner dimension. So an element's bits depend on its row of `left` and its column of `right` only, however many rows
// or columns the tiles have. Denormals count as zeros.
//
// The compiler's intrinsics for loads name no memory that they read (GCC 12), so a store before them may move behind them.
// These say "memory" everywhere.
//
// State: each thread has its own. Configure at the start of a call's work on a thread, release at its end: oneDNN loads
// its own shapes between two calls, and a thread with live tiles makes each switch of threads save 8 KiB more. A
// configuration and a release take 0.13 us together on a Xeon at 2 GHz, as long as some five loads with their products; both
// clear all tiles. A product takes 16 cycles however few rows its left tile has.

#pragma once

#ifdef __AMX_TILE__

#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace {
namespace amx {

constexpr int kRows = 16, kRowBytes = 64;
struct alignas(kRowBytes) Row { char bytes[kRowBytes]; };  // memory that tiles are loaded from at the full rate

// Linux keeps the tiles' state from a process until it asks for it, once, for all its threads. False: refused.
inline bool permitted() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

// The shapes of all tile registers, in the processor's own layout.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = num_rows;
    row_bytes[tile] = num_row_bytes;
  }
};
static_assert(sizeof(Shapes) == 64);

inline void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
inline void release() { asm volatile("tilerelease" ::: "memory"); }

template <int tile> inline void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(tile)); }

// Rows lie `stride` bytes apart.
template <int tile> inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile> inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

// sum [M][N] floats += left [M][2K] x right, bfloat16; right holds its inner dimension in pairs: [K][N][2].
template <int sum, int left, int right> inline void product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

// sum [M][N] int32 += left [M][4K] x right, signed bytes; right holds its inner dimension by fours: [K][N][4].
template <int sum, int left, int right> inline void product_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sum), "i"(left), "i"(right));
}

// Tiles for the duration of a scope on one thread.
class Session {
 public:
  explicit Session(const Shapes& shapes) { configure(shapes); }
  ~Session() { release(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

}  // namespace amx
}  // namespace

#endif
