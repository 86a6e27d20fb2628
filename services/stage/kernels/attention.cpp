// Attention over paged KV for one packed micro-batch: one call per layer writes the new keys and values, then attends,
// decode rows and prefill chunks alike. Plain C ABI at the end of the file; build.py builds it per instruction set.
//
// The promise: a row's bits depend on its query, its position and its own sequence's keys and values. Nothing else: not
// the batch, the chunking, the tile it shares, the number of threads, the instruction set. It holds because
//   - every sum has one order: head dimensions for a score, keys for an output, 16 partial sums for the softmax;
//   - each fused multiply-add is written as fma(), and -ffp-contract=off forbids any other;
//   - a key that a row may not see gets the weight +0, and adding +0 changes no bit.
//
// Memory: a KV block holds 64 tokens. Keys lie as [block][KV head][64 / kWidth][dim][kWidth]: one register holds one
// dimension of neighboring keys, so a score needs no sum within a register. Values lie as
// [block][KV head][64][padded dim].

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "simd.h"

namespace {

// ---------------------------------------------------------------- a tile: up to eight query vectors over one KV head

constexpr int kBlock = 64, kTile = 8;
constexpr int kPadding = 16;  // stored values fill whole registers
constexpr int kColumns = 16;  // keys per softmax stride, whatever the vector width
constexpr float kNothing = -std::numeric_limits<float>::infinity();

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Registers side by side that M rows can share without spilling.
constexpr int registers_wide(int m) {
  for (int wide : {4, 2}) if (m * wide + wide + 1 < kRegisters) return wide;
  return 1;
}

// What a tile reads and writes. Scores and visible keys are counted from `first_key`, the start of a block.
template <class T> struct Tile {
  const float* query;      // [M][dim]
  const T* keys;           // this KV head's keys in block 0
  const T* values;
  const int32_t* table;    // from the block of first_key
  int64_t key_block, value_block;  // elements from one block to the next
  int dim, value_dim;      // value_dim is padded
  int num_keys;
  int begin[kTile], end[kTile];    // keys that each row sees
  float scale, softcap;
  float sink[kTile];
  float* scores;           // [M][stride]
  int64_t stride;
  float* out;              // [M][value_dim]
};

// Prefetches into L2, well ahead: the next blocks exceed L1, and no hardware prefetcher follows a block table.
inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

template <class T, int M, int W>
inline void score_columns(const float* query, int dim, const T* keys, const T* next, float* scores, int64_t stride) {
  Floats sum[M][W] = {};
  for (int d = 0; d < dim; d++) {
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) {
      Floats k = load(keys + (w * dim + d) * kWidth);
      prefetch(next + (w * dim + d) * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sum[m][w] = fma(broadcast(query[m * dim + d]), k, sum[m][w]);
    }
  }
  for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) store(scores + m * stride + w * kWidth, sum[m][w]);
}

template <class T, int M> void score(const Tile<T>& t) {
  constexpr int W = registers_wide(M);
  for (int first = 0; first < t.num_keys; first += kBlock) {
    const T* keys = t.keys + t.table[first / kBlock] * t.key_block;
    const bool is_last = first + kBlock >= t.num_keys;
    const T* next_block =
        is_last ? t.values + t.table[0] * t.value_block : t.keys + t.table[first / kBlock + 1] * t.key_block;
    const int columns = round_up(std::min(kBlock, t.num_keys - first), kWidth) / kWidth;
    auto columns_from = [&](auto wide, int c) {
      const T* from = keys + (int64_t)c * t.dim * kWidth;
      const T* next = c + wide < kBlock / kWidth ? from + (int64_t)wide * t.dim * kWidth : next_block;
      score_columns<T, M, wide>(t.query, t.dim, from, next, t.scores + first + c * kWidth, t.stride);
    };
    int c = 0;
    for (; c + W <= columns; c += W) columns_from(std::integral_constant<int, W>(), c);
    for (; c < columns; c++) columns_from(std::integral_constant<int, 1>(), c);
  }
}

// Turns one row's scores into weights that are not yet divided by their sum; returns the sum.
template <class T> float weigh(const Tile<T>& t, int m) {
  float* row = t.scores + m * t.stride;
  const int begin = t.begin[m] / kColumns * kColumns, end = round_up(t.end[m], kColumns);
  std::fill(row, row + begin, 0.f);
  std::fill(row + begin, row + t.begin[m], kNothing);
  std::fill(row + t.end[m], row + end, kNothing);
  std::fill(row + end, row + round_up(t.num_keys, kBlock), 0.f);

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
      float* x = row + j + part * kWidth;
      Floats weight = exp_negative(load(x) - top);
      sum[part] += weight;
      store(x, weight);
    }
  }
  for (int part = 0; part < kColumns / kWidth; part++) store(partial + part * kWidth, sum[part]);
  for (int half = kColumns / 2; half; half /= 2) for (int i = 0; i < half; i++) partial[i] += partial[i + half];
  return partial[0] + exp_negative(broadcast(t.sink[m] - top))[0];
}

// out += weights x values of one block, W registers of the head dimension at a time.
template <class T, int M, int W>
inline void add_values(const Tile<T>& t, int first, int count, int d, const T* values, const T* next) {
  Floats sum[M][W];
  for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) sum[m][w] = load(t.out + m * t.value_dim + d + w * kWidth);
  const float* weights = t.scores + first;
  for (int j = 0; j < count; j++) {
    const int64_t at = (int64_t)j * t.value_dim + d;
#pragma GCC unroll 4
    for (int w = 0; w < W; w++) {
      Floats v = load(values + at + w * kWidth);
      prefetch(next + at + w * kWidth);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) sum[m][w] = fma(broadcast(weights[m * t.stride + j]), v, sum[m][w]);
    }
  }
  for (int m = 0; m < M; m++) for (int w = 0; w < W; w++) store(t.out + m * t.value_dim + d + w * kWidth, sum[m][w]);
}

template <class T, int M> void sum_values(const Tile<T>& t) {
  constexpr int W = registers_wide(M);
  std::fill(t.out, t.out + M * t.value_dim, 0.f);
  for (int first = 0; first < t.num_keys; first += kBlock) {
    const T* values = t.values + t.table[first / kBlock] * t.value_block;
    const T* next = first + kBlock < t.num_keys ? t.values + t.table[first / kBlock + 1] * t.value_block : values;
    const int count = std::min(kBlock, t.num_keys - first);
    int d = 0;
    for (; d + W * kWidth <= t.value_dim; d += W * kWidth) add_values<T, M, W>(t, first, count, d, values, next);
    for (; d < t.value_dim; d += kWidth) add_values<T, M, 1>(t, first, count, d, values, next);
  }
}

template <class T, int M> void attend_tile(const Tile<T>& t) {
  float share[M];
  score<T, M>(t);
  for (int m = 0; m < M; m++) share[m] = 1.f / weigh(t, m);
  sum_values<T, M>(t);
  for (int m = 0; m < M; m++) {
    float* out = t.out + m * t.value_dim;
    for (int d = 0; d < t.value_dim; d += kWidth) store(out + d, load(out + d) * share[m]);
  }
}

template <class T> void attend_tile(const Tile<T>& t, int m) {
  using Attend = void (*)(const Tile<T>&);
  static constexpr Attend by_rows[kTile] = {attend_tile<T, 1>, attend_tile<T, 2>, attend_tile<T, 3>, attend_tile<T, 4>,
                                            attend_tile<T, 5>, attend_tile<T, 6>, attend_tile<T, 7>, attend_tile<T, 8>};
  by_rows[m - 1](t);
}

// ---------------------------------------------------------------- a call: all rows of the micro-batch

enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16 };

struct Strides { int64_t attention_head, row; };  // elements; the dimensions of one attention head are dense

struct Call {  // kernel.py mirrors it field by field
  const void *query, *key, *value;
  void *out, *keys, *values;  // no out: keys and values are written, nothing attends
  const int32_t *sequence, *position, *table;
  const float* sinks;
  Strides query_strides, key_strides, value_strides;
  int32_t num_rows, num_sequences, table_width, num_blocks;
  int32_t num_heads, num_kv_heads, dim, value_dim;
  int32_t window;  // 0: none
  int32_t dtype, num_threads;
  float scale, softcap;
};

// Rows of one sequence at consecutive positions: they share a pass over its keys and values.
struct Run { int row, count; };

std::vector<Run> runs_of(const Call& c) {
  const int most = std::max(1, kTile / (c.num_heads / c.num_kv_heads));
  std::vector<Run> runs;
  runs.reserve(c.num_rows);
  for (int i = 0; i < c.num_rows; i++) {
    bool joins = i > 0 && runs.back().count < most && c.sequence[i] == c.sequence[i - 1];
    if (joins && c.position[i] == c.position[i - 1] + 1) runs.back().count++;
    else runs.push_back({i, 1});
  }
  return runs;
}

// The first row whose sequence, position or KV blocks lie outside the tables, else -1. Runs before any read or write.
int first_bad_row(const Call& c, const std::vector<Run>& runs) {
  for (Run run : runs) {
    const int sequence = c.sequence[run.row];
    if (sequence == -1) continue;
    const int64_t last = (int64_t)c.position[run.row] + run.count - 1;
    if (sequence < 0 || sequence >= c.num_sequences || c.position[run.row] < 0) return run.row;
    if (last >= (int64_t)c.table_width * kBlock) return run.row;
    const int32_t* table = c.table + (int64_t)sequence * c.table_width;
    for (int64_t block = 0; block <= last / kBlock; block++)
      if (table[block] < 0 || table[block] >= c.num_blocks) return run.row;
  }
  return -1;
}

template <class T> void write_token(const Call& c, int row, int kv_head) {
  const int position = c.position[row], slot = position % kBlock, value_dim = round_up(c.value_dim, kPadding);
  const int64_t block = c.table[(int64_t)c.sequence[row] * c.table_width + position / kBlock];
  const T* key = (const T*)c.key + kv_head * c.key_strides.attention_head + row * c.key_strides.row;
  const T* value = (const T*)c.value + kv_head * c.value_strides.attention_head + row * c.value_strides.row;
  const int64_t token = (block * c.num_kv_heads + kv_head) * kBlock;
  T* keys = (T*)c.keys + (token + slot / kWidth * kWidth) * c.dim + slot % kWidth;
  for (int d = 0; d < c.dim; d++) __builtin_prefetch(keys + d * kWidth, 1);  // dim stores to dim lines: fetch at once
  for (int d = 0; d < c.dim; d++) keys[d * kWidth] = key[d];
  std::memcpy((T*)c.values + (token + slot) * value_dim, value, c.value_dim * sizeof(T));
}

// One thread's memory, kept from call to call: as long as the longest context seen.
struct Scratch { std::vector<float> query, out, scores; };

template <class T> void attend_run(const Call& c, Run run, int kv_head, Scratch& scratch) {
  const int group = c.num_heads / c.num_kv_heads, num_queries = run.count * group;
  const int value_dim = round_up(c.value_dim, kPadding);
  const int passes = (num_queries + kTile - 1) / kTile;
  const int last = c.position[run.row] + run.count - 1;
  const int oldest = c.window ? std::max(0, c.position[run.row] - c.window + 1) : 0;
  const int first_key = oldest / kBlock * kBlock;
  Tile<T> t;
  t.table = c.table + (int64_t)c.sequence[run.row] * c.table_width + first_key / kBlock;
  t.key_block = (int64_t)c.num_kv_heads * kBlock * c.dim;
  t.value_block = (int64_t)c.num_kv_heads * kBlock * value_dim;
  t.keys = (const T*)c.keys + (int64_t)kv_head * kBlock * c.dim;
  t.values = (const T*)c.values + (int64_t)kv_head * kBlock * value_dim;
  t.dim = c.dim;
  t.value_dim = value_dim;
  t.num_keys = last + 1 - first_key;
  t.stride = round_up(t.num_keys, kBlock) + kColumns;  // not a power of two: eight rows would share cache sets
  t.scale = c.scale;
  t.softcap = c.softcap;
  scratch.query.resize(std::max(scratch.query.size(), (size_t)kTile * round_up(c.dim, kWidth)));
  scratch.out.resize(std::max(scratch.out.size(), (size_t)kTile * value_dim));
  scratch.scores.resize(std::max(scratch.scores.size(), (size_t)(kTile * t.stride)));
  t.query = scratch.query.data();
  t.out = scratch.out.data();
  t.scores = scratch.scores.data();
  for (int pass = 0, done = 0; pass < passes; pass++) {
    const int count = (num_queries - done) / (passes - pass);
    for (int m = 0; m < count; m++) {
      const int row = run.row + (done + m) / group, query_head = kv_head * group + (done + m) % group;
      const int position = c.position[row];
      const T* query = (const T*)c.query + query_head * c.query_strides.attention_head + row * c.query_strides.row;
      for (int d = 0; d < c.dim; d += kWidth)
        store_first(scratch.query.data() + m * c.dim + d, load_first(query + d, c.dim - d), c.dim - d);
      t.begin[m] = (c.window ? std::max(0, position - c.window + 1) : 0) - first_key;
      t.end[m] = position + 1 - first_key;
      t.sink[m] = c.sinks ? c.sinks[query_head] : kNothing;
    }
    attend_tile(t, count);
    for (int m = 0; m < count; m++) {
      const int row = run.row + (done + m) / group, query_head = kv_head * group + (done + m) % group;
      T* out = (T*)c.out + ((int64_t)row * c.num_heads + query_head) * c.value_dim;
      for (int d = 0; d < c.value_dim; d += kWidth)
        store_first(out + d, load(t.out + m * value_dim + d), c.value_dim - d);
    }
    done += count;
  }
}

template <class T> void clear_run(const Call& c, Run run) {
  const int64_t row_size = (int64_t)c.num_heads * c.value_dim;
  std::memset((T*)c.out + run.row * row_size, 0, run.count * row_size * sizeof(T));
}

template <class T> int attend(const Call& c) {
  const std::vector<Run> runs = runs_of(c);
  if (int bad = first_bad_row(c, runs); bad >= 0) return 1 + bad;
#pragma omp parallel num_threads(c.num_threads)
  {
    static thread_local Scratch scratch;
#pragma omp for schedule(static)
    for (int row = 0; row < c.num_rows; row++)
      if (c.sequence[row] >= 0)
        for (int kv_head = 0; kv_head < c.num_kv_heads; kv_head++) write_token<T>(c, row, kv_head);
    const int64_t num_items = c.out ? (int64_t)runs.size() * c.num_kv_heads : 0;
#pragma omp for schedule(dynamic, 4)
    for (int64_t item = 0; item < num_items; item++) {
      const Run run = runs[item / c.num_kv_heads];
      const int kv_head = item % c.num_kv_heads;
      if (c.sequence[run.row] >= 0) attend_run<T>(c, run, kv_head, scratch);
      else if (kv_head == 0) clear_run<T>(c, run);
    }
  }
  return 0;
}

}  // namespace

// 0, or 1 + the first row that points outside its tables (then nothing was written), or -1 for invalid shapes.
extern "C" int32_t shardline_attend(const Call* call) {
  const Call& c = *call;
  if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads || c.dim < 1 || c.value_dim < 1 || c.window < 0) return -1;
  switch (c.dtype) {
    case kFloat32: return attend<float>(c);
    case kBFloat16: return attend<BFloat16>(c);
    case kFloat16: return attend<Float16>(c);
    default: return -1;
  }
}

extern "C" int32_t shardline_call_bytes() { return sizeof(Call); }
