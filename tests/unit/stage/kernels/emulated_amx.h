// amx.h for processors without AMX: the same names, their meaning in plain C++. It aborts where a processor would fault.

#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {
namespace amx {

constexpr int kRows = 16, kRowBytes = 64, kTiles = 8;
struct alignas(kRowBytes) Row { char bytes[kRowBytes]; };

inline bool permitted() { return true; }

struct Shapes {
  int row_bytes[kTiles] = {}, rows[kTiles] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = num_rows;
    row_bytes[tile] = num_row_bytes;
  }
};

struct State {
  bool is_configured = false;
  Shapes shapes;
  char tiles[kTiles][kRows][kRowBytes] = {};
};
inline State& state() {
  static thread_local State state;
  return state;
}

inline void must(bool holds) { if (!holds) abort(); }

inline void configure(const Shapes& shapes) {
  for (int tile = 0; tile < kTiles; tile++)
    must(shapes.rows[tile] <= kRows && shapes.row_bytes[tile] <= kRowBytes && shapes.row_bytes[tile] % 4 == 0);
  state() = State{true, shapes};
}
inline void release() { state() = State{}; }

// A tile of this thread, which has to have a shape.
inline State& with(int tile) {
  must(state().is_configured && state().shapes.rows[tile] > 0);
  return state();
}

template <int tile> inline void zero() { std::memset(with(tile).tiles[tile], 0, kRows * kRowBytes); }

template <int tile> inline void load(const void* from, int64_t stride) {
  zero<tile>();
  for (int row = 0; row < state().shapes.rows[tile]; row++)
    std::memcpy(state().tiles[tile][row], (const char*)from + row * stride, state().shapes.row_bytes[tile]);
}

template <int tile> inline void store(void* to, int64_t stride) {
  for (int row = 0; row < with(tile).shapes.rows[tile]; row++)
    std::memcpy((char*)to + row * stride, state().tiles[tile][row], state().shapes.row_bytes[tile]);
}

template <class T> inline T element(const char* row, int index) {
  T value;
  std::memcpy(&value, row + index * sizeof(T), sizeof(T));
  return value;
}
inline float widened(uint16_t bits) {
  const uint32_t word = (uint32_t)bits << 16;
  float value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

// sum [M][N] of `Sum` += left [M][K of `width`] x right [K][N of `width`], with `add` for one group of `width` elements.
template <class Sum, int sum, int left, int right, class F> inline void product(F&& add) {
  const Shapes& shapes = with(sum).shapes;
  const int groups = shapes.row_bytes[left] / 4, columns = shapes.row_bytes[sum] / 4;
  must(shapes.rows[left] == shapes.rows[sum] && shapes.rows[right] == groups && shapes.row_bytes[right] == columns * 4);
  for (int row = 0; row < shapes.rows[sum]; row++)
    for (int column = 0; column < columns; column++) {
      Sum total = element<Sum>(state().tiles[sum][row], column);
      for (int group = 0; group < groups; group++)
        total = add(total, state().tiles[left][row] + group * 4, state().tiles[right][group] + column * 4);
      std::memcpy(state().tiles[sum][row] + column * 4, &total, 4);
    }
}

template <int sum, int left, int right> inline void product() {
  product<float, sum, left, right>([](float total, const char* x, const char* y) {
    for (int i = 0; i < 2; i++) total += widened(element<uint16_t>(x, i)) * widened(element<uint16_t>(y, i));
    return total;
  });
}

template <int sum, int left, int right> inline void product_int8() {
  product<int32_t, sum, left, right>([](int32_t total, const char* x, const char* y) {
    for (int i = 0; i < 4; i++) total += element<int8_t>(x, i) * element<int8_t>(y, i);
    return total;
  });
}

class Session {
 public:
  explicit Session(const Shapes& shapes) { configure(shapes); }
  ~Session() { release(); }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
};

}  // namespace amx
}  // namespace
