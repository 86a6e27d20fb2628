// Rows of products: how they are packed for the instructions, what comes back as outputs. Knows no threads.

#pragma once

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "calls.h"
#include "group_steps.h"
#include "product_steps.h"

namespace {

constexpr int64_t kFewestRows = 64;     // of a panel, in cache or not: with fewer, memory cannot bring weights as fast

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
inline int64_t row_at(const int32_t* rows, int64_t i) { return rows ? rows[i] : i; }

// Bytes of packed rows that stay in a core's L2 while all weights pass by.
inline int64_t cached_bytes() {
  static const long level2 = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return std::max<int64_t>(level2, 1 << 20) / 4 * 3;
}

struct Float32Product {
  using Element = float;
  using Step = Float32;
};
struct BFloat16Product {
  using Element = BFloat16;
  using Step = BFloat16Step;
};
struct Int8Product {
  using Element = BFloat16;
  using Step = Int8Step;
};
struct GroupProduct {
  using Element = BFloat16;
  using Step = GroupRows;
};
template <class Product> constexpr bool is_int8 = std::is_same_v<Product, Int8Product>;
template <class Product> constexpr bool has_groups = std::is_same_v<Product, GroupProduct>;

// ---------------------------------------------------------------- rows in

// Rows that are packed and stay in cache while all weights pass by, in blocks of equal size: [block][inputs][kRows].
template <class Product> struct Panel {
  using Step = typename Product::Step;
  static constexpr int64_t kStepBytes = Step::kRows * Step::kRowBytes;
  int64_t steps, most_rows, rows = 0, rows_in_block = 0;
  char* blocks;
  float* scales;  // int8: what each row's integers are multiplied by

  // For a call's rows, up to `num_rows` at once.
  Panel(const ProductCall& call, int64_t num_rows) {
    constexpr bool kIntegers = is_int8<Product> || has_groups<Product>;
    steps = ceil_div(call.num_inputs * (kIntegers ? 1 : (int64_t)sizeof(typename Product::Element)), kLine);
    const int64_t most_blocks = std::max(cached_bytes() / (steps * kStepBytes), ceil_div(kFewestRows, Step::kRows));
    const int64_t blocks_needed = std::min(ceil_div(num_rows, Step::kRows), most_blocks);
    most_rows = blocks_needed * Step::kRows;
    static thread_local std::vector<char> memory;  // kept: its pages need not be found again in each call
    const size_t bytes = kLine + blocks_needed * steps * kStepBytes + most_rows * sizeof(float);
    if (memory.size() < bytes) memory.resize(bytes);
    blocks = memory.data() + (kLine - (uintptr_t)memory.data() % kLine) % kLine;
    scales = (float*)(blocks + blocks_needed * steps * kStepBytes);
  }
  // As few blocks as possible, as equal as possible: a block of one row takes nearly as long as one of four.
  void hold(int64_t num_rows) {
    rows = num_rows;
    rows_in_block = has_tiles<Step> ? Step::kRows : ceil_div(rows, ceil_div(rows, Step::kRows));
  }
  char* row(int64_t i) const {
    return blocks + i / rows_in_block * steps * kStepBytes + i % rows_in_block * Step::kRowBytes;
  }
};

// Bytes as they are, or bfloat16 widened where the step wants float32.
template <class Product> void pack_row(const ProductCall& call, const Panel<Product>& panel, const typename Product::Element* x, int64_t i) {
  using Element = typename Product::Element;
  constexpr int kElements = kLine / sizeof(Element);
  char* to = panel.row(i);
  for (int64_t step = 0; step < panel.steps; step++, to += panel.kStepBytes) {
    const int count = (int)std::min<int64_t>(call.num_inputs - step * kElements, kElements);
    if constexpr (Product::Step::kRowBytes == kLine) {
      if (count == kElements) { std::memcpy(to, x + step * kElements, kLine); continue; }
      std::memset(to, 0, kLine);
      std::memcpy(to, x + step * kElements, count * sizeof(Element));
    } else {
      for (int at = 0; at < kElements; at += kWidth)
        store((float*)to + at, load_first(x + step * kElements + at, std::clamp(count - at, 0, kWidth)));
    }
  }
}

struct Range { float top, poison; };  // of a row: its largest absolute value; NaN if one of them is not finite, else 0

Range range_of(const float* x, int64_t dim) {
  Floats largest = broadcast(0.f), poison = broadcast(0.f);
  for (int64_t k = 0; k < dim; k += kWidth) {
    const Floats value = load(x + k);
    largest = larger((Floats)((Bits)value & 0x7fffffffu), largest);
    poison += value * 0.f;
  }
  float tops[kWidth], poisons[kWidth];
  store(tops, largest);
  store(poisons, poison);
  Range range = {0.f, 0.f};
  for (int lane = 0; lane < kWidth; lane++) range = {std::max(range.top, tops[lane]), range.poison + poisons[lane]};
  return range;
}

// A line of inputs, `count` of them and zeros, times the Hadamard matrix and 1/64: an outlier is shared by the whole line,
// so that the row's scale leaves more of the other values. The weights have been multiplied by the same matrix, whose
// square is 64 (tiled_linear.py). Sums of fixed pairs: the bits are those of any other width of vectors.
void spread_line(const BFloat16* x, int count, float* out) {
  constexpr int kVectorsOfLine = kLine / kWidth;
  Floats line[kVectorsOfLine];
  for (int i = 0; i < kVectorsOfLine; i++) {
    Floats value = load_first(x + i * kWidth, std::clamp(count - i * kWidth, 0, kWidth)) * (1.f / kLine);
    value = butterfly<4>(butterfly<2>(butterfly<1>(value)));
    if constexpr (kWidth == 16) value = butterfly<8>(value);
    line[i] = value;
  }
  for (int distance = 1; distance < kVectorsOfLine; distance *= 2)
    for (int i = 0; i < kVectorsOfLine; i++) {
      if (i & distance) continue;
      const Floats left = line[i], right = line[i + distance];
      line[i] = left + right, line[i + distance] = left - right;
    }
  for (int i = 0; i < kVectorsOfLine; i++) store(out + i * kWidth, line[i]);
}

// A row becomes integers from -127 to 127. A value that is not finite makes all outputs of its row NaN.
template <> void pack_row(const ProductCall& call, const Panel<Int8Product>& panel, const BFloat16* x, int64_t i) {
  static thread_local std::vector<float> values;
  if ((int64_t)values.size() < panel.steps * kLine) values.resize(panel.steps * kLine);
  for (int64_t step = 0; step < panel.steps; step++)
    spread_line(x + step * kLine, (int)std::min<int64_t>(call.num_inputs - step * kLine, kLine), &values[step * kLine]);
  const Range range = range_of(values.data(), panel.steps * kLine);
  const bool is_zero = !(range.top > 0.f) || range.poison != 0.f;
  panel.scales[i] = range.top / 127.f + range.poison;
  const Floats inverse = broadcast(127.f / range.top), to_integer = broadcast(12582912.f);
  for (int64_t step = 0; step < panel.steps; step++) {
    alignas(64) int32_t integers[kLine];
    for (int lane = 0; lane < kLine; lane += kWidth) {
      const Floats value = is_zero ? broadcast(0.f) : load(&values[step * kLine + lane]) * inverse;
      const Bits integer = (Bits)(value + to_integer) - (Bits)to_integer + (uint32_t)kInt8Offset;
      std::memcpy(integers + lane, &integer, sizeof integer);
    }
    char* to = panel.row(i) + step * panel.kStepBytes;
    for (int lane = 0; lane < kLine; lane++) to[lane] = (char)integers[lane];
  }
}

// `count` inputs of a row from `first` on, in the order of the weights; `room` is for those that lie apart.
const BFloat16* in_order(const ProductCall& call, const BFloat16* x, int64_t first, int64_t count, BFloat16* room) {
  if (!call.x_order) return x + first;
  for (int64_t i = 0; i < count; i++) room[i] = x[call.x_order[first + i]];
  return room;
}

// Each group becomes integers by itself: an outlier costs the 31 others of its group their digits, no more.
template <> void pack_row(const ProductCall& call, const Panel<GroupProduct>& panel, const BFloat16* x, int64_t i) {
  for (int64_t step = 0; step < panel.steps; step++) {
    char* to = panel.row(i) + step * panel.kStepBytes;
    for (int group = 0; group < kGroups; group++) {
      const int64_t first = step * kLine + group * kGroup, count = std::clamp<int64_t>(call.num_inputs - first, 0, kGroup);
      BFloat16 room[kGroup];
      const RowGroup of_row = pack_group(in_order(call, x, first, count, room), count, to + group * kGroup);
      std::memcpy(to + kLine + group * sizeof of_row, &of_row, sizeof of_row);
    }
  }
}

// Row i of a panel is row `first` + i of all.
template <class Product> void pack(const ProductCall& call, const Panel<Product>& panel, int64_t first, int64_t i) {
  using Element = typename Product::Element;
  pack_row<Product>(call, panel, (const Element*)call.x + row_at(call.x_rows, first + i) * call.x_stride, i);
}

// ---------------------------------------------------------------- rows out

Floats scaled(const ProductCall& call, const int32_t* sums, int64_t output) {
  Bits whole = read<Bits>(sums);
  if (kInt8Offset) whole -= read<Bits>(call.column_sums + output) * (uint32_t)kInt8Offset;
  return from_integers((Words)whole) * load(call.scales + output);
}

// A vector of a block's outputs, from `at` on in the block and from `output` on of all.
template <class Product> Floats outputs_of(const ProductCall& call, const Panel<Product>& panel, const Sums& sums, int row,
                                           int64_t in_panel, int at, int64_t output) {
  const int tile = at / kTileOutputs, lane = at % kTileOutputs;
  Floats value = load(sums.floats[tile][row] + lane);
  if constexpr (has_groups<Product>) value *= load(call.scales + output);
  if constexpr (is_int8<Product>) value = scaled(call, sums.integers[tile][row] + lane, output) * panel.scales[in_panel + row];
  return call.bias ? value + load(call.bias + output) : value;
}

// Sums of bfloat16 are in the processor's own order, and so may be their rounding. Those of integers have the same bits everywhere.
template <class Product> void store_outputs(typename Product::Element* to, Floats first, Floats second) {
  if constexpr (std::is_same_v<Product, BFloat16Product>) return store_two(to, first, second);
  store(to, first);
  store(to + kWidth, second);
}

// Writes a block's outputs: of `rows` rows that begin at `first` of all and at `in_panel` of the panel, from `column` on. They
// are rounded alike wherever they stand: ranks have other columns at their ends.
template <class Product> void write(const ProductCall& call, const Panel<Product>& panel, const Sums& sums, const Block& block,
                                    int64_t first, int64_t in_panel, int64_t column) {
  using Element = typename Product::Element;
  const int64_t begin = column * kTileOutputs;
  const int width = block.columns * kTileOutputs, count = (int)std::min<int64_t>(width, call.num_outputs - begin);
  for (int row = 0; row < block.rows; row++) {
    Element* out = (Element*)call.out + row_at(call.out_rows, first + row) * call.out_stride + begin;
    for (int at = 0; at < count; at += 2 * kWidth) {
      Floats values[2] = {};
      for (int v = 0; v < 2; v++) {
        const int place = at + v * kWidth;
        if (place >= count) continue;
        values[v] = outputs_of(call, panel, sums, row, in_panel, place, begin + place);
        if (call.out_rows) values[v] += load_first(out + place, count - place);
      }
      if (count - at >= 2 * kWidth) {
        store_outputs<Product>(out + at, values[0], values[1]);
        continue;
      }
      Element all[2 * kWidth];
      store_outputs<Product>(all, values[0], values[1]);
      std::memcpy(out + at, all, (count - at) * sizeof(Element));
    }
  }
}

}  // namespace
