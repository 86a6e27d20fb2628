// Attention over paged KV for one packed micro-batch: one call per layer writes the new keys and values, then attends,
// decode rows and prefill chunks alike. Plain C ABI at the end of the file; build.py builds it per instruction set.
//
// Where rows see both ways, a sequence's rows are all there, from position 0 on.
//
// The promise: a row's bits depend on its query, its position and its own sequence's keys and values. Nothing else: not
// the batch, the chunking, the tile it shares, the number of threads. It holds because
//   - every sum has one order: head dimensions for a score, keys for an output, 16 partial sums for the softmax;
//   - each fused multiply-add is written as fma(), and -ffp-contract=off forbids any other;
//   - a key that a row may not see gets the weight +0, and adding +0 times a number changes no bit;
//   - where a value is no number, +0 times it is none either: then each row is computed alone, over its own keys only.
// The bits are the same with AVX2 and with AVX-512. Where the processor multiplies pairs of bfloat16 (AVX512_BF16, AMX),
// bfloat16 rows have others: it sums a pair in an order of its own.
//
// Memory: a KV block holds 64 tokens of each KV head. How keys and values lie in it is the tile's business.

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention_amx.h"
#include "attention_tile.h"
#include "calls.h"

namespace {

constexpr int kPadding = 16;  // stored values fill whole registers
constexpr int kSkew = 32;     // between rows of scores, so that their stride is no power of two: eight would share cache sets

using Call = AttentionCall;

// Rows of one sequence at consecutive positions: they share a pass over its keys and values.
struct Run { int row, count; bool is_first; };  // is_first: no run of this sequence came just before

std::vector<Run> runs_of(const Call& c, int tile_rows) {
  const int most = std::max(1, tile_rows / (c.num_heads / c.num_kv_heads));
  std::vector<Run> runs;
  runs.reserve(c.num_rows);
  for (int i = 0; i < c.num_rows; i++) {
    const bool continues = i > 0 && c.sequence[i] == c.sequence[i - 1];
    const bool joins = continues && runs.back().count < most && c.position[i] == c.position[i - 1] + 1;
    if (joins) runs.back().count++;
    else runs.push_back({i, 1, !continues});
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
    if (last >= (int64_t)c.table_width * kBlock || (c.bias && last > c.bias_reach)) return run.row;
    const int32_t* table = c.table + (int64_t)sequence * c.table_width;
    for (int64_t block = 0; block <= last / kBlock; block++)
      if (table[block] < 0 || table[block] >= c.num_blocks) return run.row;
  }
  return -1;
}

// Where rows see both ways: behind the last position of each sequence. Else nothing.
std::vector<int> ends_of(const Call& c, const std::vector<Run>& runs) {
  if (!c.both_ways) return {};
  std::vector<int> ends(c.num_sequences);
  for (Run run : runs)
    if (c.sequence[run.row] >= 0) ends[c.sequence[run.row]] = c.position[run.row] + run.count;
  return ends;
}

// One call's memory, keys and values as `Way` lays them.
template <class Way> struct Kv {
  using T = typename Way::Stored;
  const Call& call;
  const std::vector<int>& ends;
  const int value_dim = round_up(call.value_dim, kPadding);
  const int64_t key_block = (int64_t)call.num_kv_heads * kBlock * call.dim;
  const int64_t value_block = (int64_t)call.num_kv_heads * kBlock * value_dim;

  T* keys(int64_t block, int kv_head) const {
    return (T*)call.keys + block * key_block + (int64_t)kv_head * kBlock * call.dim;
  }
  T* values(int64_t block, int kv_head) const {
    return (T*)call.values + block * value_block + (int64_t)kv_head * kBlock * value_dim;
  }
  const int32_t* table(int row) const { return call.table + (int64_t)call.sequence[row] * call.table_width; }

  // A token's keys lie in as many lines as it has dimensions, or half: fetched at once, before any is written.
  void fetch(int row, int kv_head) const {
    const int position = call.position[row], slot = position % kBlock;
    const T* to = keys(table(row)[position / kBlock], kv_head) + slot / Way::kKeysTogether * Way::kKeysTogether * call.dim;
    const int64_t bytes = (int64_t)Way::kKeysTogether * call.dim * sizeof(T);
    for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch((const char*)to + at, 1);
  }

  void write(int row, int kv_head) const {
    const int position = call.position[row], slot = position % kBlock;
    const int64_t block = table(row)[position / kBlock];
    const T* key = (const T*)call.key + kv_head * call.key_strides.attention_head + row * call.key_strides.row;
    const T* value = (const T*)call.value + kv_head * call.value_strides.attention_head + row * call.value_strides.row;
    Way::write_key(keys(block, kv_head), slot, call.dim, key);
    Way::write_value(values(block, kv_head), slot, value_dim, call.value_dim, value);
  }

  // Behind the last key that a run of rows sees.
  int end(Run run) const {
    const int own = call.position[run.row] + run.count;
    if (!call.both_ways) return own;
    const int whole = ends[call.sequence[run.row]];
    return call.window ? std::min(whole, own + call.window - 1) : whole;
  }

  // The first key that a row sees.
  int first_key(int row) const {
    const int position = call.position[row];
    if (call.chunk) return position - position % call.chunk;
    return call.window ? std::max(0, position - call.window + 1) : 0;
  }

  int first_block(int row) const { return first_key(row) / kBlock; }
};

// A run over one KV head.
template <class Way> struct RunItems final : Items {
  const Kv<Way>& kv;
  const std::vector<Run>& runs;

  RunItems(const Kv<Way>& kv, const std::vector<Run>& runs) : kv(kv), runs(runs) {
    count = kv.call.out ? (int64_t)runs.size() * kv.call.num_kv_heads : 0;
  }
  const Run& run(int64_t item) const { return runs[item / kv.call.num_kv_heads]; }
  int kv_head(int64_t item) const { return item % kv.call.num_kv_heads; }
  bool is_read(int64_t item) const { return run(item).is_first && kv.call.sequence[run(item).row] >= 0; }
  int last(int64_t item) const { return kv.end(run(item)) - 1; }
  int64_t num_blocks(int64_t item) const { return last(item) / kBlock + 1 - kv.first_block(run(item).row); }

  // Keys block by block, then values.
  int64_t num_spans(int64_t item) const override { return is_read(item) ? 2 * num_blocks(item) : 0; }
  Span span(int64_t item, int64_t index) const override {
    using T = typename Way::Stored;
    const int64_t blocks = num_blocks(item), at = kv.first_block(run(item).row) + index % blocks;
    const int64_t block = kv.table(run(item).row)[at];
    const int64_t tokens = std::min<int64_t>(kBlock, last(item) + 1 - at * kBlock);
    if (index < blocks)
      return {(const char*)kv.keys(block, kv_head(item)),
              round_up(tokens, Way::kKeysTogether) * kv.call.dim * (int64_t)sizeof(T)};
    return {(const char*)kv.values(block, kv_head(item)),
            round_up(tokens, Way::kValuesTogether) * kv.value_dim * (int64_t)sizeof(T)};
  }
};

// One thread's memory, kept from call to call: as long as the longest context seen.
struct Scratch {
  struct alignas(kLine) Line { char bytes[kLine]; };
  std::vector<Line> query, out, scores, weights;
  std::vector<int64_t> claimed;

  template <class T> static T* grown(std::vector<Line>& lines, int64_t count) {
    lines.resize(std::max(lines.size(), (size_t)(count * sizeof(T) + kLine - 1) / kLine));
    return (T*)lines.data();
  }
};

// All but the rows of a tile.
template <class Way> typename Way::Tile tile_of(const Kv<Way>& kv, Run run, int kv_head, Scratch& scratch) {
  using Weight = typename Way::Weight;
  const Call& c = kv.call;
  const int first_block = kv.first_block(run.row);
  typename Way::Tile t;
  t.table = kv.table(run.row) + first_block;
  t.key_block = kv.key_block;
  t.value_block = kv.value_block;
  t.keys = kv.keys(0, kv_head);
  t.values = kv.values(0, kv_head);
  t.dim = c.dim;
  t.query_stride = round_up(c.dim, Way::kQueryPadding);
  t.value_dim = kv.value_dim;
  t.num_keys = kv.end(run) - first_block * kBlock;
  t.stride = round_up(t.num_keys, kBlock) + kSkew;
  t.scale = c.scale;
  t.softcap = c.softcap;
  t.query = Scratch::grown<typename Way::Query>(scratch.query, Way::kRows * t.query_stride);
  t.out = Scratch::grown<float>(scratch.out, Way::kRows * t.value_dim);
  t.scores = Scratch::grown<float>(scratch.scores, Way::kRows * t.stride);
  if constexpr (std::is_same_v<Weight, float>) t.weights = t.scores;
  else t.weights = Scratch::grown<Weight>(scratch.weights, Way::kRows * t.stride);
  return t;
}

// Rows of a tile: query vectors of the run from `done` on.
template <class Way> struct Rows {
  using T = typename Way::Stored;
  const Kv<Way>& kv;
  const Run run;
  const int kv_head;
  const Call& c = kv.call;
  const int group = c.num_heads / c.num_kv_heads;

  int row(int query) const { return run.row + query / group; }
  int query_head(int query) const { return kv_head * group + query % group; }

  void load(typename Way::Tile& t, int done, int count) const {
    const int first_key = (t.table - c.table) % c.table_width * kBlock;
    for (int m = 0; m < count; m++) {
      const int row = this->row(done + m), head = query_head(done + m), position = c.position[row];
      const T* query = (const T*)c.query + head * c.query_strides.attention_head + row * c.query_strides.row;
      Way::load_query(t.query + m * t.query_stride, query, c.dim);
      t.begin[m] = kv.first_key(row) - first_key;
      t.end[m] = kv.end({row, 1, false}) - first_key;
      t.sink[m] = c.sinks ? c.sinks[head] : kNothing;
      t.bias[m] = c.bias ? c.bias + head * (2LL * c.bias_reach + kPadding) + c.bias_reach + first_key - position : nullptr;
    }
  }

  void store(const typename Way::Tile& t, int done, int count) const {
    for (int m = 0; m < count; m++) {
      T* out = (T*)c.out + ((int64_t)row(done + m) * c.num_heads + query_head(done + m)) * c.value_dim;
      for (int d = 0; d < c.value_dim; d += kWidth)
        store_first(out + d, ::load(t.out + m * t.value_dim + d), c.value_dim - d);
    }
  }

  bool are_numbers(const typename Way::Tile& t, int count) const {
    Bits odd = {};
    for (int m = 0; m < count; m++) {
      for (int d = 0; d < c.value_dim; d += kWidth) {
        const Floats x = load_first(t.out + m * t.value_dim + d, c.value_dim - d);
        odd |= (Bits)(x != x);
      }
    }
    uint32_t any = 0;
    for (int i = 0; i < kWidth; i++) any |= odd[i];
    return any == 0;
  }
};

// Whether all outputs are numbers; not asked of a row alone.
template <class Way> bool attend_rows(const Kv<Way>& kv, Run run, int kv_head, Ahead* ahead, Scratch& scratch) {
  const Rows<Way> rows{kv, run, kv_head};
  const int num_queries = run.count * rows.group, passes = (num_queries + Way::kRows - 1) / Way::kRows;
  typename Way::Tile t = tile_of(kv, run, kv_head, scratch);
  bool are_numbers = true;
  for (int pass = 0, done = 0; pass < passes; pass++) {
    const int count = (num_queries - done) / (passes - pass);
    t.ahead = pass == 0 ? ahead : nullptr;
    rows.load(t, done, count);
    Way::prepare(t, count);
    Way::attend(t, count);
    rows.store(t, done, count);
    if (run.count > 1 && are_numbers) are_numbers = rows.are_numbers(t, count);
    done += count;
  }
  return are_numbers;
}

template <class Way> void attend_run(const Kv<Way>& kv, Run run, int kv_head, Ahead* ahead, Scratch& scratch) {
  if (attend_rows(kv, run, kv_head, ahead, scratch)) return;
  for (int i = 0; i < run.count; i++) attend_rows(kv, Run{run.row + i, 1, false}, kv_head, nullptr, scratch);
}

template <class T> void clear_run(const Call& c, Run run) {
  const int64_t row_size = (int64_t)c.num_heads * c.value_dim;
  std::memset((T*)c.out + run.row * row_size, 0, run.count * row_size * sizeof(T));
}

// The thread's share of the new keys and values; the next token is fetched while one is written.
template <class Way> void write_rows(const Kv<Way>& kv, int from, int to) {
  const Call& c = kv.call;
  while (to > from && c.sequence[to - 1] < 0) to--;  // padding comes last
  const int64_t heads = c.num_kv_heads, end = to * heads;
  for (int64_t i = from * heads; i < end; i++) {
    if (i + 1 < end) kv.fetch((i + 1) / heads, (i + 1) % heads);
    kv.write(i / heads, i % heads);
  }
}

template <class Way> int attend(const Call& c) {
  const std::vector<Run> runs = runs_of(c, Way::kRows);
  if (int bad = first_bad_row(c, runs); bad >= 0) return 1 + bad;
  const std::vector<int> ends = ends_of(c, runs);
  const Kv<Way> kv{c, ends};
  const RunItems<Way> items(kv, runs);
  std::atomic<int64_t> next = 0;
#pragma omp parallel num_threads(c.num_threads)
  {
    static thread_local Scratch scratch;
    const int thread = omp_get_thread_num(), threads = omp_get_num_threads();
    write_rows(kv, (int64_t)c.num_rows * thread / threads, (int64_t)c.num_rows * (thread + 1) / threads);
#pragma omp barrier
    Ahead ahead(items, next, scratch.claimed);
    for (int64_t item; (item = ahead.take()) >= 0;) {
      const Run run = items.run(item);
      const int kv_head = items.kv_head(item);
      if (c.sequence[run.row] >= 0) attend_run(kv, run, kv_head, items.is_read(item) ? &ahead : nullptr, scratch);
      else if (kv_head == 0) clear_run<typename Way::Stored>(c, run);
    }
    Way::finish();
  }
  return 0;
}

int attend_bfloat16(const Call& c) {
#ifdef __AMX_BF16__
  if (c.dim % 2 == 0) return amx::permitted() ? attend<Matrices>(c) : -1;
#elif defined(__AVX512BF16__)
  if (c.dim % 2 == 0) return attend<Vectors<Pair>>(c);
#endif
  return attend<Vectors<Single<BFloat16>>>(c);
}

}  // namespace

// 0, or 1 + the first row that points outside its tables (then nothing was written), or -1 for invalid shapes.
int32_t shardline_attend(const AttentionCall* call) {
  const Call& c = *call;
  if (c.num_kv_heads < 1 || c.num_heads % c.num_kv_heads || c.dim < 1 || c.value_dim < 1 || c.window < 0 || (c.bias && c.window)) return -1;
  if (c.chunk < 0 || (c.chunk && (c.window || c.both_ways))) return -1;
  switch (c.dtype) {
    case kFloat32: return attend<Vectors<Single<float>>>(c);
    case kBFloat16: return attend_bfloat16(c);
    case kFloat16: return attend<Vectors<Single<Float16>>>(c);
    default: return -1;
  }
}

extern "C" int32_t shardline_attention_call_bytes() { return sizeof(Call); }
