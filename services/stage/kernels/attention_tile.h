// A tile: up to M query vectors over one KV head, by vectors of float32 sums, for every stored type. Knows no call.
//
// Keys lie as [64 / kWidth][dim][kWidth]: one register holds one dimension of neighboring keys, so a score needs no sum
// within a register. Values lie as [64][padded dim]. Where instructions multiply pairs, both lie in pairs.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#include "ahead.h"
#include "simd.h"

namespace {

constexpr int kBlock = 64;
constexpr int kMostRows = 16;
constexpr int kColumns = 16;  // keys per softmax stride, whatever the vector width
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// What a tile reads and writes. Scores and visible keys are counted from `first_key`, the start of a block.
template <class T, class Query, class Weight> struct Tile {
  Query* query;            // [M][query_stride], zeros behind dim
  const T* keys;           // this KV head's keys in block 0
  const T* values;
  const int32_t* table;    // from the block of first_key
  int64_t key_block, value_block;  // elements from one block to the next
  int dim, query_stride, value_dim;  // value_dim is padded
  int num_keys;
  int begin[kMostRows], end[kMostRows];  // keys that each row sees
  float scale, softcap;
  float sink[kMostRows];
  const float* bias[kMostRows];  // by key, added to scores; or none
  float* scores;           // [M][stride]
  Weight* weights;         // [M][stride]; may be the scores
  int64_t stride;
  float* out;              // [M][value_dim]
  Ahead* ahead;            // none: the keys and values were read before

  const T* keys_of(int first) const { return keys + table[first / kBlock] * key_block; }
  const T* values_of(int first) const { return values + table[first / kBlock] * value_block; }
  void read(int64_t bytes) const { if (ahead) ahead->fetch(bytes / kLine); }
};

// Whether a row's scores are only scaled. Then the largest one scaled is the largest of all scaled ones.
template <class AnyTile> bool is_plain(const AnyTile& t, int m) { return !t.bias[m] && t.softcap == 0.f && t.scale > 0.f; }

inline float largest_lane(Floats x) {
  float lanes[kWidth];
  store(lanes, x);
  return *std::max_element(lanes, lanes + kWidth);
}

template <class AnyTile> float largest_plain(const AnyTile& t, int m, const float* scores, const float* end) {
  constexpr int kChains = 4;  // comparisons that do not wait for each other
  Floats largest[kChains];
  for (Floats& each : largest) each = broadcast(kNothing);
  for (; end - scores >= kChains * kWidth; scores += kChains * kWidth)
    for (int chain = 0; chain < kChains; chain++) largest[chain] = larger(load(scores + chain * kWidth), largest[chain]);
  for (; scores < end; scores += kWidth) largest[0] = larger(load(scores), largest[0]);
  const float top = largest_lane(larger(larger(largest[0], largest[1]), larger(largest[2], largest[3]))) * t.scale;
  return std::max(top, t.sink[m]);
}

// The largest score, each as it is behind scale, bias and cap from then on.
template <class AnyTile> float largest_of(const AnyTile& t, int m, float* row, int begin, int end) {
  Floats largest = broadcast(t.sink[m]);
  for (int j = begin; j < end; j += kWidth) {
    Floats x = load(row + j) * t.scale;
    if (t.bias[m]) x += load(t.bias[m] + j);
    if (t.softcap != 0.f) x = x == broadcast(kNothing) ? x : tanh(x / t.softcap) * t.softcap;
    store(row + j, x);
    largest = larger(x, largest);
  }
  return largest_lane(largest);
}

// Turns one row's scores into weights that are not yet divided by their sum; returns the sum.
template <class AnyTile> float weigh(const AnyTile& t, int m) {
  using Weight = std::remove_reference_t<decltype(*t.weights)>;
  float* row = t.scores + m * t.stride;
  Weight* weights = t.weights + m * t.stride;
  const int begin = t.begin[m] / kColumns * kColumns, end = round_up(t.end[m], kColumns);
  std::fill(row + begin, row + t.begin[m], kNothing);
  std::fill(row + t.end[m], row + end, kNothing);

  const bool plain = is_plain(t, m);
  const float top = plain ? largest_plain(t, m, row + begin, row + end) : largest_of(t, m, row, begin, end);
  const float scale = plain ? t.scale : 1.f;

  float partial[kColumns];
  Floats sum[kColumns / kWidth] = {};
  for (int j = begin; j < end; j += kColumns) {
    for (int part = 0; part < kColumns / kWidth; part++) {
      const int at = j + part * kWidth;
      Floats weight = rounded<Weight>(exp_negative(load(row + at) * scale - top));
      sum[part] += weight;
      store_rounded(weights + at, weight);
    }
  }
  std::fill(weights, weights + begin, Weight{});
  std::fill(weights + end, weights + round_up(t.num_keys, kBlock), Weight{});
  for (int part = 0; part < kColumns / kWidth; part++) store(partial + part * kWidth, sum[part]);
  for (int half = kColumns / 2; half; half /= 2) for (int i = 0; i < half; i++) partial[i] += partial[i + half];
  return partial[0] + exp_negative(broadcast(t.sink[m] - top))[0];
}

// Registers side by side that M rows can share without spilling.
constexpr int registers_wide(int m) {
  for (int wide : {4, 2}) if (m * wide + wide + 1 < kRegisters) return wide;
  return 1;
}

// Calls part(m, w) for all m < M and w < W, each a constant: arrays that are indexed by it stay in registers.
template <int W, class Part, int... i> inline void each_of(Part&& part, std::integer_sequence<int, i...>) {
  (part(std::integral_constant<int, i / W>(), std::integral_constant<int, i % W>()), ...);
}
template <int M, int W, class Part> inline void each(Part&& part) {
  each_of<W>(part, std::make_integer_sequence<int, M * W>());
}

// How vectors multiply: one dimension or key at a time, in float32.
template <class T> struct Single {
  using Stored = T;
  using Query = float;
  using Weight = float;
  using Right = Floats;
  static constexpr int kTogether = 1, kQueryPadding = kWidth, kKeysTogether = kWidth;

  static Floats left(const float* p) { return broadcast(*p); }
  static Floats right(const T* p) { return load(p); }
  static Floats first_of(Floats right) { return right; }
  static Floats add(Floats left, Floats right, Floats sum) { return fma(left, right, sum); }

  static void load_query(float* to, const T* from, int dim) {
    for (int d = 0; d < dim; d += kWidth) store(to + d, load_first(from + d, dim - d));
  }
  // A slot is a token's place in its block.
  static void write_key(T* block, int slot, int dim, const T* key) {
    T* to = block + slot / kWidth * kWidth * dim + slot % kWidth;
    for (int d = 0; d < dim; d++) to[d * kWidth] = key[d];
  }
  static void write_value(T* block, int slot, int stored_dim, int dim, const T* value) {
    std::memcpy(block + (int64_t)slot * stored_dim, value, dim * sizeof(T));
  }
};

// bfloat16 in pairs of dimensions or keys, for products that sum pairs: keys lie as [64 / 16][dim / 2][16][2], values as
// [64 / 2][padded dim][2]. The weights are rounded to bfloat16.
struct PairedKv {
  using Stored = BFloat16;
  using Query = BFloat16;
  using Weight = BFloat16;
  static constexpr int kTogether = 2, kQueryPadding = 32, kKeysTogether = 16;

  static void load_query(BFloat16* to, const BFloat16* from, int dim) {
    std::memcpy(to, from, dim * sizeof(BFloat16));
  }
  static void write_key(BFloat16* block, int slot, int dim, const BFloat16* key) {
    BFloat16* to = block + slot / 16 * 16 * dim + slot % 16 * 2;
    for (int d = 0; d < dim; d += 2) std::memcpy(to + d * 16, key + d, 2 * sizeof(BFloat16));
  }
  static void write_value(BFloat16* block, int slot, int stored_dim, int dim, const BFloat16* value) {
    BFloat16* to = block + (int64_t)slot / 2 * 2 * stored_dim + slot % 2;
    for (int d = 0; d < dim; d++) to[2 * d] = value[d];
  }
};

#ifdef __AVX512BF16__
// Products of pairs: twice as many in an instruction as float32 has. They count denormals as zeros.
struct Pair : PairedKv {
  using Right = __m512bh;
  static Right left(const BFloat16* p) { return (Right)_mm512_set1_epi32(read<int32_t>(p)); }
  static Right right(const BFloat16* p) { return read<Right>(p); }
  static Right first_of(Right right) { return (Right)((Bits)right & 0xffffu); }
  static Floats add(Right left, Right right, Floats sum) { return _mm512_dpbf16_ps(sum, left, right); }
};
#endif

// A tile by vectors of sums, one for each row and kWidth keys or dimensions.
template <class Dot> struct Vectors : Dot {
  using T = typename Dot::Stored;
  using Right = typename Dot::Right;
  using Tile = ::Tile<T, typename Dot::Query, typename Dot::Weight>;
  static constexpr int kRows = 8, kTogether = Dot::kTogether, kValuesTogether = kTogether;

  static void prepare(const Tile&, int) {}
  static void finish() {}

  static void attend(const Tile& t, int m) {
    using Attend = void (*)(const Tile&);
    static constexpr Attend by_rows[kRows] = {rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>, rows<7>, rows<8>};
    by_rows[m - 1](t);
  }

 private:
  template <int M> static void rows(const Tile& t) {
    float share[M];
    score<M>(t);
    for (int m = 0; m < M; m++) share[m] = 1.f / weigh(t, m);
    sum_values<M>(t);
    for (int m = 0; m < M; m++) {
      float* out = t.out + m * t.value_dim;
      // The sign of a zero depends on the keys behind the row's own: + 0 removes it.
      for (int d = 0; d < t.value_dim; d += kWidth) store(out + d, load(out + d) * share[m] + 0.f);
    }
  }

  template <int M, int W> static inline void score_columns(const Tile& t, const T* keys, float* scores) {
    Floats sum[M][W];
    each<M, W>([&](auto m, auto w) { sum[m][w] = broadcast(0.f); });
    constexpr int step = kTogether * W * kWidth * sizeof(T);
    const int64_t next = (int64_t)t.dim * kWidth, dim = t.dim, query_stride = t.query_stride;
    const auto* query = t.query;
    if (step < kLine) t.read(step * t.dim);
    for (int64_t d = 0; d < dim; d += kTogether, keys += kTogether * kWidth) {
      if (step >= kLine) t.read(step);
      Right key[W];
      each<1, W>([&](auto, auto w) { key[w] = Dot::right(keys + w * next); });
      each<M, W>([&](auto m, auto w) { sum[m][w] = Dot::add(Dot::left(query + m * query_stride + d), key[w], sum[m][w]); });
    }
    each<M, W>([&](auto m, auto w) { store(scores + m * t.stride + w * kWidth, sum[m][w]); });
  }

  template <int M> static void score(const Tile& t) {
    constexpr int W = registers_wide(M);
    for (int first = 0; first < t.num_keys; first += kBlock) {
      const T* keys = t.keys_of(first);
      const int columns = round_up(std::min(kBlock, t.num_keys - first), kWidth) / kWidth;
      auto columns_from = [&](auto wide, int c) {
        score_columns<M, wide>(t, keys + (int64_t)c * t.dim * kWidth, t.scores + first + c * kWidth);
      };
      int c = 0;
      for (; c + W <= columns; c += W) columns_from(std::integral_constant<int, W>(), c);
      for (; c < columns; c++) columns_from(std::integral_constant<int, 1>(), c);
    }
  }

  // out += weights x values of one block, W registers of the head dimension at a time.
  template <int M, int W>
  static inline void add_values(const Tile& t, int first, int count, int d, const T* values) {
    Floats sum[M][W];
    each<M, W>([&](auto m, auto w) { sum[m][w] = load(t.out + m * t.value_dim + d + w * kWidth); });
    const auto* weights = t.weights + first;
    const int64_t stride = t.stride, next = (int64_t)t.value_dim * kTogether;
    values += d * kTogether;
    constexpr int step = kTogether * W * kWidth * sizeof(T);
    const auto add = [&](int j, auto value_of) {
      Right value[W];
      each<1, W>([&](auto, auto w) { value[w] = value_of(values + w * kWidth * kTogether); });
      each<M, W>([&](auto m, auto w) { sum[m][w] = Dot::add(Dot::left(weights + m * stride + j), value[w], sum[m][w]); });
    };
    if (step < kLine) t.read(step * count);
    int j = 0;
    for (; j + kTogether <= count; j += kTogether, values += next) {
      if (step >= kLine) t.read(step);
      add(j, [](const T* p) { return Dot::right(p); });
    }
    // What another sequence left behind the last key might be no number.
    if (j < count) add(j, [](const T* p) { return Dot::first_of(Dot::right(p)); });
    each<M, W>([&](auto m, auto w) { store(t.out + m * t.value_dim + d + w * kWidth, sum[m][w]); });
  }

  template <int M> static void sum_values(const Tile& t) {
    constexpr int W = registers_wide(M);
    std::fill(t.out, t.out + M * t.value_dim, 0.f);
    for (int first = 0; first < t.num_keys; first += kBlock) {
      const T* values = t.values_of(first);
      const int count = std::min(kBlock, t.num_keys - first);
      int d = 0;
      for (; d + W * kWidth <= t.value_dim; d += W * kWidth) add_values<M, W>(t, first, count, d, values);
      for (; d < t.value_dim; d += kWidth) add_values<M, 1>(t, first, count, d, values);
    }
  }
};

}  // namespace
