// Products of packed rows with packed weights, out = x @ weight.T + bias, of float32, bfloat16, int8 and int4 weights.
// Plain C ABI at the end of the file; build.py builds it into one library for each instruction set.
//
// Same promise as attention.cpp: a row's bits depend on that row only, whatever runs beside it, on however many threads.
//   - A sum over the inputs runs in one order for every row and is never cut in two (product_steps.h).
//   - int8 sums are integers, exact in any order, so they also have the same bits with every instruction set; those of
//     groups: group_steps.h.
//
// Memory: weights lie in tiles of 16 outputs by 64 bytes, [16 outputs][64 bytes of inputs][16][16 outputs][4 bytes], read in
// one straight line. Rows of x are packed block by block, as the instructions read them. What sticks out is zeros.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "product_rows.h"
#include "shares.h"

namespace {

constexpr int kAhead = 4 * kTileBytes;  // how far ahead a block's own weights are prefetched into L1
constexpr int64_t kChunkRows = 64;      // of an adapter, that a thread takes at once: few enough to share, many for a panel

// Bytes of weights in a step on the way through the inputs, of 16 outputs.
template <class Step> constexpr int64_t kWeightStepBytes = kTileBytes;
template <> constexpr int64_t kWeightStepBytes<Int4Step> = Int4Step::kBytes;
template <> constexpr int64_t kWeightStepBytes<Int4ZeroStep> = Int4ZeroStep::kBytes;
template <> constexpr int64_t kWeightStepBytes<Int8GroupStep> = Int8GroupStep::kBytes;

// ---------------------------------------------------------------- all of them

// A panel passes by the weights of a few outputs block by block. The first block prefetches its own weights, the others
// those of the next outputs, so that memory is read while they compute.
template <class Step, class Product> Block block_of(const Panel<Product>& panel, const char* weights, int columns, int64_t first) {
  const int64_t passes = ceil_div(panel.rows, panel.rows_in_block), pass = first / panel.rows_in_block;
  constexpr int kLines = (int)((kWeightStepBytes<Step> + kLine - 1) / kLine);
  const int64_t column_stride = panel.steps * kWeightStepBytes<Step>;
  Block block = {panel.row(first), weights, column_stride, panel.steps,
                 (int)std::min(panel.rows_in_block, panel.rows - first), columns, weights + kAhead, kLines, true};
  if (pass == 0) return block;
  block.is_near = false;
  block.lines = (int)ceil_div(kLines, passes - 1);
  block.ahead = weights + columns * column_stride + (pass - 1) * panel.steps * block.lines * kLine;
  if ((pass - 1) * block.lines >= kLines) block.lines = 0;
  return block;
}

// Where each thread has so many rows it multiplies them by itself: it waits for no other, and what it has packed and written
// stays in its own cache. With fewer, memory would not bring all weights to each thread as fast. Twice as many are a part.
constexpr int64_t kOwnRows = 256;

// How the columns of a panel are divided, `step` of them at once.
struct Team {  // all threads call it
  Shares& shares;
  template <class F> void each(int64_t begin, int64_t end, int step, F&& multiply) {
    shares.each(ceil_div(end - begin, step), [&](int64_t piece) { multiply(begin + piece * step); });
  }
};
struct Alone {
  template <class F> void each(int64_t begin, int64_t end, int step, F&& multiply) {
    for (int64_t column = begin; column < end; column += step) multiply(column);
  }
};

// Columns of 16 outputs from `begin` to `end`, with `weights` those of the first.
template <class Step, class Product, class Sharing>
void multiply_columns(Sharing sharing, const ProductCall& call, const Panel<Product>& panel, int64_t first, const char* weights, int64_t begin, int64_t end) {
  constexpr int kColumns = has_tiles<Step> ? 2 : kVectors * kWidth / kTileOutputs;
  sharing.each(begin, end, kColumns, [&](int64_t column) {
    const char* of_column = weights + (column - begin) * panel.steps * kWeightStepBytes<Step>;
    const int columns = (int)std::min<int64_t>(kColumns, end - column);
    for (int64_t i = 0; i < panel.rows; i += panel.rows_in_block) {
      const Block block = block_of<Step>(panel, of_column, columns, i);
      Sums sums;
      block_sums<Step>(block, sums);
      write(call, panel, sums, block, first + i, i, column);
    }
  });
}

template <class Sharing, class Product> void multiply_panel(Sharing sharing, const ProductCall& call, const Panel<Product>& panel, int64_t first) {
  const int64_t num_columns = ceil_div(call.num_outputs, kTileOutputs);
  const char* weights = (const char*)call.weights;
  if constexpr (has_groups<Product>) {
    const int64_t in_4_bits = ceil_div(call.first_int8, kTileOutputs);
    if (call.has_zeros) multiply_columns<Int4ZeroStep>(sharing, call, panel, first, weights, 0, in_4_bits);
    else multiply_columns<Int4Step>(sharing, call, panel, first, weights, 0, in_4_bits);
    const char* others = weights + in_4_bits * panel.steps * Int4Step::kBytes;
    multiply_columns<Int8GroupStep>(sharing, call, panel, first, others, in_4_bits, num_columns);
  } else {
    multiply_columns<typename Product::Step>(sharing, call, panel, first, weights, 0, num_columns);
  }
}

template <class Product> void multiply_together(const ProductCall& call) {
  Panel<Product> panel(call, call.num_rows);
  Shares shares(call.num_threads);
#pragma omp parallel num_threads(call.num_threads) firstprivate(panel)
  {
#ifdef __AMX_TILE__
    amx::Session tiles(shapes());
#endif
    for (int64_t first = 0; first < call.num_rows; first += panel.most_rows) {
      panel.hold(std::min(panel.most_rows, call.num_rows - first));
#pragma omp for schedule(static)
      for (int64_t i = 0; i < panel.rows; i++) pack(call, panel, first, i);
      multiply_panel(Team{shares}, call, panel, first);
    }
  }
}

template <class Product> void multiply_apart(const ProductCall& call) {
  const int64_t parts = std::max<int64_t>(call.num_rows / (2 * kOwnRows * call.num_threads), 1) * call.num_threads;
  const int64_t most = ceil_div(ceil_div(call.num_rows, parts), Product::Step::kRows) * Product::Step::kRows;
#pragma omp parallel num_threads(call.num_threads)
  {
#ifdef __AMX_TILE__
    amx::Session tiles(shapes());
#endif
    Panel<Product> panel(call, most);
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < parts; part++) {
      const int64_t end = std::min((part + 1) * most, call.num_rows);
      for (int64_t first = part * most; first < end; first += panel.most_rows) {
        panel.hold(std::min(panel.most_rows, end - first));
        for (int64_t i = 0; i < panel.rows; i++) pack(call, panel, first, i);
        multiply_panel(Alone{}, call, panel, first);
      }
    }
  }
}

template <class Product> void multiply(const ProductCall& call) {
  if (call.num_rows < kOwnRows * call.num_threads) multiply_together<Product>(call);
  else multiply_apart<Product>(call);
}

int32_t multiply(const ProductCall& call) {
  switch (call.kind) {
    case kFloat32Weights: multiply<Float32Product>(call); return 0;
    case kBFloat16Weights: multiply<BFloat16Product>(call); return 0;
    case kInt8Weights: multiply<Int8Product>(call); return 0;
    case kInt4Weights:
    case kGroupedInt8Weights: multiply<GroupProduct>(call); return 0;
    default: return -1;
  }
}

// ---------------------------------------------------------------- adapters

// A chunk of an adapter's rows: `down` picks them, `up` adds to them. The rows between the two are the thread's own.
void add_low_rank(const ProductCall& call, const LowRankPart& part, const int32_t* rows, int64_t num_rows) {
  static thread_local std::vector<float> between;
  ProductCall down = *part.down, up = *part.up;
  between.resize(std::max<size_t>(between.size(), num_rows * down.num_outputs));
  down.num_rows = up.num_rows = num_rows, down.num_threads = up.num_threads = 1;
  down.x = call.x, down.x_stride = call.x_stride, down.x_rows = rows;
  down.out = between.data(), down.out_stride = down.num_outputs;
  const int64_t element_bytes = up.kind == kFloat32Weights ? 4 : 2;
  up.x = between.data(), up.x_stride = up.num_inputs;
  up.out = (char*)call.out + part.first_output * element_bytes, up.out_stride = call.out_stride, up.out_rows = rows;
  multiply(down);
  multiply(up);
}

void add_adapters(const ProductCall& call) {
#pragma omp parallel num_threads(call.num_threads)
  for (int64_t i = 0; i < call.adapters->num_groups; i++) {
    const AdapterRows& group = call.adapters->groups[i];
    const LowRankPart *begin = group.parts + group.begins[call.number], *end = group.parts + group.begins[call.number + 1];
#pragma omp for schedule(dynamic) nowait
    for (int64_t first = 0; first < group.num_rows; first += kChunkRows)
      for (const LowRankPart* part = begin; part < end; part++)
        add_low_rank(call, *part, group.rows + first, std::min(kChunkRows, group.num_rows - first));
  }
}

bool have_rows(const ProductCall& call) {
  for (int64_t i = 0; i < call.adapters->num_groups; i++) {
    const AdapterRows& group = call.adapters->groups[i];
    if (group.num_rows && group.rows[group.num_rows - 1] >= call.num_rows) return false;
  }
  return true;
}

}  // namespace

extern "C" {

int32_t shardline_product_call_bytes() { return sizeof(ProductCall); }

// Packs weights: [num_outputs][num_bytes], rows dense, to [16 outputs][64 bytes][16][16 outputs][4 bytes].
int32_t shardline_pack_weights(const void* weights, void* packed, int64_t num_outputs, int64_t num_bytes) {
  const int64_t column_stride = ceil_div(num_bytes, kLine) * kTileBytes;
  std::memset(packed, 0, ceil_div(num_outputs, kTileOutputs) * column_stride);
  for (int64_t output = 0; output < num_outputs; output++) {
    const char* from = (const char*)weights + output * num_bytes;
    char* to = (char*)packed + output / kTileOutputs * column_stride + output % kTileOutputs * 4;
    for (int64_t at = 0; at < num_bytes; at += 4)
      std::memcpy(to + at * kTileOutputs, from + at, std::min<int64_t>(4, num_bytes - at));
  }
  return 0;
}

int32_t shardline_multiply(const ProductCall* call) {
  if (int32_t status = multiply(*call)) return status;
  if (!call->adapters || !call->adapters->num_groups) return 0;
  if (!have_rows(*call)) return -1;
  add_adapters(*call);
  return 0;
}

}
