// A tile of attention on AMX, for bfloat16: scores and outputs are products of tiles, weights are rounded to bfloat16 in
// between. Knows no call.
//
// A row's bits are the same in any tile: each element of a product sums over pairs of dimensions, or of keys, in order,
// and a pair of zeros changes no sum but the sign of a zero, which the end removes.

#pragma once

#ifdef __AMX_BF16__

#include "amx.h"
#include "attention_tile.h"

namespace {

struct Matrices : PairedKv {
  using Tile = ::Tile<BFloat16, BFloat16, BFloat16>;
  static constexpr int kRows = amx::kRows, kValuesTogether = kTogether;

  // Before a tile of m rows: shapes depend on the rows and on what is left of dim behind its last 32.
  static void prepare(const Tile& t, int m) {
    static thread_local int64_t loaded = 0;
    const int rest = t.dim % 32;
    if (is_ready() && loaded == m * 32 + rest) return;
    amx::Shapes shapes;
    for (int tile : {0, 1, 2, 3, kLeft}) shapes.set(tile, m, 64);
    shapes.set(kRight, 16, 64);
    shapes.set(kRestLeft, m, rest ? rest * 2 : 64);
    shapes.set(kRestRight, rest ? rest / 2 : 16, 64);
    amx::configure(shapes);
    loaded = m * 32 + rest;
    is_ready() = true;
  }
  static void finish() {
    if (is_ready()) amx::release();
    is_ready() = false;
  }

  static void attend(const Tile& t, int m) {
    float share[kRows];
    score(t);
    for (int i = 0; i < m; i++) share[i] = 1.f / weigh(t, i);
    sum_values(t);
    for (int i = 0; i < m; i++) {
      float* out = t.out + i * t.value_dim;
      for (int d = 0; d < t.value_dim; d += kWidth) store(out + d, load(out + d) * share[i] + 0.f);
    }
  }

 private:
  static constexpr int kLeft = 4, kRight = 5, kRestLeft = 6, kRestRight = 7;
  static constexpr int64_t kTileBytes = 1024;

  static bool& is_ready() {
    static thread_local bool ready = false;
    return ready;
  }

  template <int N, class F> static inline void unrolled(F&& part) {
    part(std::integral_constant<int, 0>());
    if constexpr (N > 1) part(std::integral_constant<int, 1>());
    if constexpr (N > 2) part(std::integral_constant<int, 2>());
    if constexpr (N > 3) part(std::integral_constant<int, 3>());
  }

  // One step over dimensions for N x 16 keys, 16 pairs of dimensions or the rest.
  template <int N, int L, int R>
  static inline void score_step(const Tile& t, const BFloat16* keys, int d, int64_t bytes) {
    amx::load<L>(t.query + d, t.query_stride * sizeof(BFloat16));
    unrolled<N>([&](auto n) {
      amx::load<R>(keys + (int64_t)(n * t.dim + d) * 16, 64);
      amx::product<n, L, R>();
      t.read(bytes);
    });
  }

  // Scores of N x 16 keys.
  template <int N> static void score_keys(const Tile& t, const BFloat16* keys, float* scores) {
    unrolled<N>([](auto n) { amx::zero<n>(); });
    int d = 0;
    for (; d + 32 <= t.dim; d += 32) score_step<N, kLeft, kRight>(t, keys, d, kTileBytes);
    if (d < t.dim) score_step<N, kRestLeft, kRestRight>(t, keys, d, (t.dim - d) * 32);
    unrolled<N>([&](auto n) { amx::store<n>(scores + n * 16, t.stride * sizeof(float)); });
  }

  static void score(const Tile& t) {
    static constexpr void (*by_columns[])(const Tile&, const BFloat16*, float*) = {score_keys<1>, score_keys<2>,
                                                                                    score_keys<3>, score_keys<4>};
    for (int first = 0; first < t.num_keys; first += kBlock) {
      const int columns = (std::min(kBlock, t.num_keys - first) + 15) / 16;
      by_columns[columns - 1](t, t.keys_of(first), t.scores + first);
    }
  }

  // The last values before num_keys, zeros behind: what another sequence left there might be no number.
  static const BFloat16* last_values(const Tile& t, const BFloat16* values, int count) {
    static thread_local std::vector<amx::Row> rows;
    const int64_t row = t.value_dim * 2;
    rows.resize(std::max(rows.size(), (size_t)(16 * row * sizeof(BFloat16) / amx::kRowBytes)));
    BFloat16* copy = (BFloat16*)rows.data();
    std::memcpy(copy, values, (count + 1) / 2 * row * sizeof(BFloat16));
    std::memset(copy + (count + 1) / 2 * row, 0, (16 - (count + 1) / 2) * row * sizeof(BFloat16));
    if (count % 2) for (int d = 0; d < t.value_dim; d++) copy[count / 2 * row + 2 * d + 1] = {};
    return copy;
  }

  // N x 16 dimensions of the output from `d`, over all keys.
  template <int N> static void sum_dims(const Tile& t, int d, const BFloat16* last) {
    const int64_t row_bytes = t.value_dim * 2 * sizeof(BFloat16);
    unrolled<N>([](auto n) { amx::zero<n>(); });
    for (int first = 0; first < t.num_keys; first += 32) {
      const BFloat16* values = t.values_of(first) + (int64_t)(first % kBlock) * t.value_dim;
      if (last && first + 32 > t.num_keys) values = last;
      amx::load<kLeft>(t.weights + first, t.stride * sizeof(BFloat16));
      unrolled<N>([&](auto n) {
        amx::load<kRight>(values + (d + n * 16) * 2, row_bytes);
        amx::product<n, kLeft, kRight>();
        t.read(kTileBytes);
      });
    }
    unrolled<N>([&](auto n) { amx::store<n>(t.out + d + n * 16, t.value_dim * sizeof(float)); });
  }

  static void sum_values(const Tile& t) {
    static constexpr void (*by_dims[])(const Tile&, int, const BFloat16*) = {sum_dims<1>, sum_dims<2>, sum_dims<3>,
                                                                             sum_dims<4>};
    const int rest = t.num_keys % 32, first = t.num_keys - rest;
    const BFloat16* last =
        rest ? last_values(t, t.values_of(first) + (int64_t)(first % kBlock) * t.value_dim, rest) : nullptr;
    for (int d = 0; d < t.value_dim; d += 64) by_dims[std::min(4, (t.value_dim - d) / 16) - 1](t, d, last);
  }
};

}  // namespace

#endif
