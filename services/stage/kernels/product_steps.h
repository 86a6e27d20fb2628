// Sums of one block of a product: a few rows by the outputs that two vectors hold. What instruction sets do in ways of
// their own is here; what they have in common is in product_rows.h and products.cpp.
//
// Every output's sum is one chain in the order of the inputs, however many rows the block has: bits do not depend on it.
// With fused multiply-adds AVX2 and AVX-512 give the same bits. Dot products of bfloat16 and tiles round in their own ways;
// sums of int8 are exact.

#pragma once

#include <type_traits>
#include <utility>

#include "amx.h"
#include "simd.h"

namespace {

constexpr int kTileOutputs = 16, kLine = 64, kTileBytes = kTileOutputs * kLine;  // of weights
constexpr int kVectors = 2;      // of outputs, side by side in a block
constexpr int kMostColumns = 2;  // of 16 outputs, in a block
constexpr int kMostRows = 32;

struct Block {
  const char *x, *weights;
  int64_t column_stride;  // bytes from the weights of 16 outputs to those of the next 16
  int64_t steps;          // on the way through the inputs: 64 bytes of each output's weights
  int rows, columns;
  const char* ahead;      // weights that are prefetched, as far apart: those that come next
  int lines;              // of them, in each step
  bool is_near;           // they are this block's own
};

union Sums {
  alignas(64) float floats[kMostColumns][kMostRows][kTileOutputs];
  int32_t integers[kMostColumns][kMostRows][kTileOutputs];
};

// Always inlined: GCC takes a function that only prefetches for one without effects, and leaves out its calls.
__attribute__((always_inline)) inline void prefetch(const Block& block, const char* ahead) {
  for (int column = 0; column < block.columns; column++, ahead += block.column_stride)
    if (block.is_near) for (int line = 0; line < block.lines; line++) _mm_prefetch(ahead + line * kLine, _MM_HINT_T0);
    else for (int line = 0; line < block.lines; line++) _mm_prefetch(ahead + line * kLine, _MM_HINT_T1);
}

// ---------------------------------------------------------------- vectors: 4 bytes of a row by 4 of each output
//
// A `Step` says how: kRows rows at most, packed as [inputs][kRows][kRowBytes] where 64 bytes of weights meet kRowBytes of a row.

struct Float32 {
  static constexpr int kRows = kRegisters == 32 ? 8 : 6, kRowBytes = kLine;
  using Sum = Floats;
  using Weight = Floats;
  static Weight weight(const char* p) { return load((const float*)p); }
  static void add(Sum* sums, const char* x, const Weight* weights) {
    const Floats value = broadcast(read<float>(x));
    for (int v = 0; v < kVectors; v++) sums[v] = fma(value, weights[v], sums[v]);
  }
};

#ifdef __AVX512BF16__
struct BFloat16Pairs {
  static constexpr int kRows = 8, kRowBytes = kLine;
  using Sum = Floats;
  using Weight = __m512bh;
  static Weight weight(const char* p) { return read<Weight>(p); }
  static void add(Sum* sums, const char* x, const Weight* weights) {
    const __m512bh pair = (__m512bh)_mm512_set1_epi32(read<int32_t>(x));
    for (int v = 0; v < kVectors; v++) sums[v] = _mm512_dpbf16_ps(sums[v], pair, weights[v]);
  }
};
#else
// Rows are packed as float32: only weights are widened here.
struct BFloat16Pairs {
  static constexpr int kRows = kRegisters == 32 ? 8 : 5, kRowBytes = 2 * kLine;
  using Sum = Floats;
  struct Weight { Floats even, odd; };
  static Weight weight(const char* p) {
    const Bits pairs = read<Bits>(p);
    return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
  }
  static void add(Sum* sums, const char* x, const Weight* weights) {
    const Floats even = broadcast(read<float>(x)), odd = broadcast(read<float>(x + 4));
    for (int v = 0; v < kVectors; v++) sums[v] = fma(even, weights[v].even, sums[v]);
    for (int v = 0; v < kVectors; v++) sums[v] = fma(odd, weights[v].odd, sums[v]);
  }
};
#endif

#if defined(__AVX512VNNI__) && !defined(__AMX_TILE__)
constexpr int kInt8Offset = 128;  // rows are unsigned: `write` takes so many times the sum of the weights off again
struct Int8Fours {
  static constexpr int kRows = 8, kRowBytes = kLine;
  using Sum = Bits;  // as __m512i, of 64-bit lanes, GCC copies each sum before and after each product
  using Weight = __m512i;
  static Weight weight(const char* p) { return read<Weight>(p); }
  static void add(Sum* sums, const char* x, const Weight* weights) {
    const __m512i four = _mm512_set1_epi32(read<int32_t>(x));
    for (int v = 0; v < kVectors; v++) sums[v] = (Sum)_mm512_dpbusd_epi32((__m512i)sums[v], four, weights[v]);
  }
};
#else
constexpr int kInt8Offset = 0;
// Pairs of products fit 16 bits, since neither factor is -128.
struct Int8Fours {
  static constexpr int kRows = 4, kRowBytes = kLine, kParts = kWidth / 8;
  struct Sum { __m256i parts[kParts]; };
  using Weight = Sum;
  // Part by part: GCC copies a whole struct in halves, over the stack, and waits for both.
  static Weight weight(const char* p) {
    Weight found;
    for (int part = 0; part < kParts; part++) found.parts[part] = _mm256_loadu_si256((const __m256i*)p + part);
    return found;
  }
  static void add(Sum* sums, const char* x, const Weight* weights) {
    const __m256i four = _mm256_set1_epi32(read<int32_t>(x)), size = _mm256_abs_epi8(four), ones = _mm256_set1_epi16(1);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors * kParts; v++) {
      __m256i& sum = sums[v / kParts].parts[v % kParts];
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(weights[v / kParts].parts[v % kParts], four));
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    }
  }
};
#endif

template <class Step, int rows> void sums_of_rows(const Block& block, Sums& sums) {
  constexpr int kAt = Step::kRowBytes / kTileOutputs;  // bytes of a row that meet a line of weights
  const int64_t next_vector = kWidth == kTileOutputs ? (block.columns - 1) * block.column_stride : kWidth * 4;
  const char *x = block.x, *weights = block.weights, *ahead = block.ahead;
  typename Step::Sum sum[rows][kVectors] = {};
  for (int64_t step = 0; step < block.steps; step++) {
    prefetch(block, ahead);
    ahead += block.lines * kLine;
#pragma GCC unroll 4
    for (int at = 0; at < kTileOutputs; at++) {
      const typename Step::Weight both[kVectors] = {Step::weight(weights), Step::weight(weights + next_vector)};
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++) Step::add(sum[row], x + row * Step::kRowBytes + at * kAt, both);
      weights += kLine;
    }
    x += Step::kRows * Step::kRowBytes;
  }
#pragma GCC unroll 16  // or the sums would lie in memory
  for (int row = 0; row < rows; row++)
    for (int v = 0; v < kVectors; v++)
      std::memcpy(sums.floats[v * kWidth / kTileOutputs][row] + v * kWidth % kTileOutputs, &sum[row][v], sizeof sum[row][v]);
}

template <class Step, int... rows> void vector_sums(const Block& block, Sums& sums, std::integer_sequence<int, rows...>) {
  static constexpr void (*by_rows[])(const Block&, Sums&) = {&sums_of_rows<Step, rows + 1>...};
  by_rows[block.rows - 1](block, sums);
}

// ---------------------------------------------------------------- tiles: 16 rows by 16 outputs

#ifdef __AMX_TILE__
inline amx::Shapes shapes() {
  amx::Shapes shapes;
  for (int tile = 0; tile < 8; tile++) shapes.set(tile, amx::kRows, amx::kRowBytes);
  return shapes;
}

struct Tiles { static constexpr int kRows = 2 * amx::kRows, kRowBytes = kLine; };
struct BFloat16Tiles : Tiles { template <int sum, int x, int w> static void add() { amx::product<sum, x, w>(); } };
struct Int8Tiles : Tiles { template <int sum, int x, int w> static void add() { amx::product_int8<sum, x, w>(); } };

// Eight tiles: 2 x 2 sums, and of weights and rows two each, so that four products take four loads. With one column of 16
// outputs, two products took three loads, and all rows passed twice as often.
template <class Step, bool both_rows, bool both_columns> void tile_sums(const Block& block, Sums& sums) {
  const char *x = block.x, *weights = block.weights, *ahead = block.ahead;
  amx::zero<0>();
  amx::zero<1>();
  amx::zero<2>();
  amx::zero<3>();
  for (int64_t step = 0; step < block.steps; step++) {
    prefetch(block, ahead);
    amx::load<6>(weights, kLine);
    amx::load<4>(x, kLine);
    Step::template add<0, 4, 6>();
    if (both_columns) {
      amx::load<7>(weights + block.column_stride, kLine);
      Step::template add<2, 4, 7>();
    }
    if (both_rows) {
      amx::load<5>(x + kTileBytes, kLine);
      Step::template add<1, 5, 6>();
      if (both_columns) Step::template add<3, 5, 7>();
    }
    x += Tiles::kRows * kLine, weights += kTileBytes, ahead += block.lines * kLine;
  }
  amx::store<0>(sums.integers[0][0], kLine);
  if (both_rows) amx::store<1>(sums.integers[0][amx::kRows], kLine);
  if (both_columns) amx::store<2>(sums.integers[1][0], kLine);
  if (both_rows && both_columns) amx::store<3>(sums.integers[1][amx::kRows], kLine);
}

template <class Step> void tile_sums(const Block& block, Sums& sums) {
  const bool both = block.rows > amx::kRows;
  if (block.columns > 1) both ? tile_sums<Step, true, true>(block, sums) : tile_sums<Step, false, true>(block, sums);
  else both ? tile_sums<Step, true, false>(block, sums) : tile_sums<Step, false, false>(block, sums);
}

using BFloat16Step = BFloat16Tiles;
using Int8Step = Int8Tiles;
#else
struct Tiles {};
template <class Step> void tile_sums(const Block&, Sums&);  // never called
using BFloat16Step = BFloat16Pairs;
using Int8Step = Int8Fours;
#endif

template <class Step> constexpr bool has_tiles = std::is_base_of_v<Tiles, Step>;

template <class Step> void block_sums(const Block& block, Sums& sums) {
  if constexpr (has_tiles<Step>) tile_sums<Step>(block, sums);
  else vector_sums<Step>(block, sums, std::make_integer_sequence<int, Step::kRows>());
}

}  // namespace
