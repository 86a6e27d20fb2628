// A tile: up to M query vectors over one KV head, by vectors of floats, for every stored type. Knows no call.
//
// Keys lie as [64 / kWidth][dim][kWidth]: one register holds one dimension of neighboring keys, so a score needs no sum
// within a register. Values lie as [64][padded dim].

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

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
  float* scores;           // [M][stride]
  Weight* weights;         // [M][stride]; may be the scores
  int64_t stride;
  float* out;              // [M][value_dim]
  Ahead* ahead;            // none: the keys and values were read before

  const T* keys_of(int first) const { return keys + table[first / kBlock] * key_block; }
  const T* values_of(int first) const { return values + table[first / kBlock] * value_block; }
  void read(int64_t bytes) const { if (ahead) ahead->fetch(bytes / kLine); }
};

// Turns one row's scores into weights that are not yet divided by their sum; returns the sum.
template <class AnyTile> float weigh(const AnyTile& t, int m) {
  using Weight = std::remove_reference_t<decltype(*t.weights)>;
  float* row = t.scores + m * t.stride;
  Weight* weights = t.weights + m * t.stride;
  const int begin = t.begin[m] / kColumns * kColumns, end = round_up(t.end[m], kColumns);
  std::fill(row + begin, row + t.begin[m], kNothing);
  std::fill(row + t.end[m], row + end, kNothing);

  Floats largest = broadcast(t.sink[m]);
  for (int j = begin; j < end; j += kWidth) {
    Floats x = load(row + j) * t.scale;
    if (t.softcap != 0.f) x = x == broadcast(kNothing) ? x : tanh(x / t.softcap) * t.softcap;
    store(row + j, x);
    largest = larger(x, largest);
  }
  float partial[kColumns];
  store(partial, largest);
  const float top = *std::max_element(partial, partial + kWidth);

  Floats sum[kColumns / kWidth] = {};
  for (int j = begin; j < end; j += kColumns) {
    for (int part = 0; part < kColumns / kWidth; part++) {
      const int at = j + part * kWidth;
      Floats weight = rounded<Weight>(exp_negative(load(row + at) - top));
      sum[part] += weight;
      store(weights + at, weight);
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

// Vectors of floats.
template <class T> struct Vectors {
  using Stored = T;
  using Query = float;
  using Weight = float;
  using Tile = ::Tile<T, float, float>;
  static constexpr int kRows = 8, kQueryPadding = kWidth;
  static constexpr int kKeysTogether = kWidth, kValuesTogether = 1;  // keys and values that lie interleaved

  static void prepare(const Tile&, int) {}
  static void finish() {}

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
      for (int d = 0; d < t.value_dim; d += kWidth) store(out + d, load(out + d) * share[m]);
    }
  }

  template <int M, int W> static inline void score_columns(const Tile& t, const T* keys, float* scores) {
    Floats sum[M][W] = {};
    constexpr int step = W * kWidth * sizeof(T);
    if (step < kLine) t.read(step * t.dim);
    for (int d = 0; d < t.dim; d++) {
      if (step >= kLine) t.read(step);
#pragma GCC unroll 4
      for (int w = 0; w < W; w++) {
        Floats k = load(keys + (w * t.dim + d) * kWidth);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sum[m][w] = fma(broadcast(t.query[m * t.query_stride + d]), k, sum[m][w]);
      }
    }
    for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) store(scores + m * t.stride + w * kWidth, sum[m][w]);
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
    for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) sum[m][w] = load(t.out + m * t.value_dim + d + w * kWidth);
    const float* weights = t.weights + first;
    constexpr int step = W * kWidth * sizeof(T);
    if (step < kLine) t.read(step * count);
    for (int j = 0; j < count; j++) {
      if (step >= kLine) t.read(step);
#pragma GCC unroll 4
      for (int w = 0; w < W; w++) {
        Floats v = load(values + (int64_t)j * t.value_dim + d + w * kWidth);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) sum[m][w] = fma(broadcast(weights[m * t.stride + j]), v, sum[m][w]);
      }
    }
    for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) store(t.out + m * t.value_dim + d + w * kWidth, sum[m][w]);
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
