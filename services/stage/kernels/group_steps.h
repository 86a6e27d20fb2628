// Sums of one block of a product of weights that have scales for groups of inputs: of 4 bits, unpacked in registers as they
// pass by, or of 8.
//
// 32 inputs are a group: of each row they have one scale, of each output a scale, and in 4 bits a minimum. A group's sum is
// one of integers, exact in any order; it is scaled in float32 and added to those of the groups before it, in their order.
// So a row has the same bits with every instruction set.
//
// Weights lie in steps of 64 inputs by 16 outputs. In 4 bits: [2 groups][4 lines][16 outputs][4 bytes], a byte's low half the
// number of one of 4 inputs, its high half that of one of the next 4; then [2 groups][16 outputs] scales in half precision
// and as many minimums, or what these divided by the scales are: zero points, whole numbers, so that their product with a
// scale is exact. In 8 bits: [2 groups][8 lines][16 outputs][4 bytes], none -128; then the scales. A row lies in steps
// of 64 integers of a byte and two `RowGroup`.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "product_steps.h"

namespace {

constexpr int kGroup = 32, kGroups = kLine / kGroup;  // of inputs, and how many of them in a step
constexpr int kGroupLines = kGroup / 4;               // 4 inputs of each output
constexpr int kInt8Sign = 128;                        // added to weights of 8 bits where instructions want one factor unsigned
constexpr int kScalesBytes = kGroups * kTileOutputs * (int)sizeof(Float16);

struct RowGroup {
  float scale, total;  // of the integers; their sum times that
  int32_t correction;  // what kInt8Sign adds to a sum, to be taken off
};

// Writes `count` values of a row, and zeros up to a group, as integers from -127 to 127. They are zeros if all values are too
// small to be told apart; one that is not finite makes the scale NaN.
inline RowGroup pack_group(const BFloat16* x, int64_t count, char* to) {
  constexpr int kParts = kGroup / kWidth;
  constexpr float kSmallest = 1e-30f;
  Floats values[kParts];
  Bits top = {};
  for (int part = 0; part < kParts; part++) {
    values[part] = load_first(x + part * kWidth, (int)std::clamp<int64_t>(count - part * kWidth, 0, kWidth));
    const Bits size = (Bits)values[part] & 0x7fffffffu;  // ordered as the values are, above all those that are not finite
    top = size > top ? size : top;
  }
  const Floats largest = (Floats)over_lanes(top, [](Bits a, Bits b) { return a > b ? a : b; });
  const bool is_finite = ((Bits)largest)[0] < 0x7f800000u, has_values = is_finite && largest[0] > kSmallest;
  const Floats inverse = has_values ? 127.f / largest : broadcast(0.f), to_integer = broadcast(12582912.f);
  Bits sum = {};
  for (int part = 0; part < kParts; part++) {
    const Floats value = has_values ? values[part] * inverse : broadcast(0.f);
    const Bits integers = (Bits)(value + to_integer) - (Bits)to_integer;
    store_bytes(to + part * kWidth, integers);
    sum += integers;
  }
  sum = over_lanes(sum, [](Bits a, Bits b) { return a + b; });
  const float scale = is_finite ? largest[0] / 127.f : NAN;
  return {scale, scale * (float)(int32_t)sum[0], -kInt8Sign * (int32_t)sum[0]};
}

#ifdef __AVX512F__
inline Words words(int32_t x) { return _mm512_set1_epi32(x); }
template <int half> __m256i half_of(Words words) { return _mm512_extracti64x4_epi64(words, half); }
inline Words add_pairs(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words pairs_of(Words weights, Words x) { return _mm512_maddubs_epi16(weights, x); }
inline Words fours_of(Words pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
#else
inline Words words(int32_t x) { return _mm256_set1_epi32(x); }
template <int> __m256i half_of(Words words) { return words; }
inline Words add_pairs(Words a, Words b) { return _mm256_add_epi16(a, b); }
inline Words pairs_of(Words weights, Words x) { return _mm256_maddubs_epi16(weights, x); }
inline Words fours_of(Words pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

#ifdef __AVX512VNNI__
struct Int4Sum {
  Bits sums;
  void begin(int32_t) { sums = Bits{}; }
  void add(Words weights, Words x) { sums = (Bits)_mm512_dpbusd_epi32((Words)sums, weights, x); }
  Words whole() const { return (Words)sums; }
};
struct Int8Sum {
  Bits sums;
  void begin(int32_t correction) { sums = (Bits)words(correction); }
  void add(Words weights, Words x) { sums = (Bits)_mm512_dpbusd_epi32((Words)sums, (Words)((Bits)weights ^ 0x80808080u), x); }
  Words whole() const { return (Words)sums; }
};
#else
// No weight is above 15, so that pairs of products of a whole group fit 16 bits.
struct Int4Sum {
  Words pairs;
  void begin(int32_t) { pairs = words(0); }
  void add(Words weights, Words x) {
    pairs = add_pairs(pairs, pairs_of(weights, x));
    settle(pairs);
  }
  Words whole() const { return fours_of(pairs); }
};
struct Int8Sum {
  Int8Fours::Sum sums;
  void begin(int32_t) { sums = {}; }
  void add(Words weights, Words x) {
    const __m256i ones = _mm256_set1_epi16(1), signs = half_of<0>(x), size = _mm256_abs_epi8(signs);
    const __m256i by[] = {half_of<0>(weights), half_of<Int8Fours::kParts - 1>(weights)};
#pragma GCC unroll 2
    for (int part = 0; part < Int8Fours::kParts; part++) {
      const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(by[part], signs));
      sums.parts[part] = _mm256_add_epi32(sums.parts[part], _mm256_madd_epi16(pairs, ones));
      settle(sums.parts[part]);
    }
  }
  Words whole() const { return read<Words>(&sums); }
};
#endif

struct GroupRows {
  static constexpr int kRows = kRegisters == 32 ? 8 : 4, kRowBytes = kLine + kGroups * sizeof(RowGroup);
};

struct Int4Step : GroupRows {
  static constexpr int kNumberBytes = kGroup / 2 * kTileOutputs;  // of a group
  static constexpr int kBytes = kGroups * kNumberBytes + 2 * kScalesBytes;
  static constexpr bool kHasMinimums = true, kHasZeros = false;
  using Sum = Int4Sum;
  static Words line(const char* numbers, int line) {
    const Bits both = read<Bits>(numbers + line / 2 * kLine);
    return (Words)((line % 2 ? both >> 4 : both) & 0x0f0f0f0fu);
  }
};

struct Int4ZeroStep : Int4Step {
  static constexpr bool kHasZeros = true;
};

struct Int8GroupStep : GroupRows {
  static constexpr int kNumberBytes = kGroup * kTileOutputs;
  static constexpr int kBytes = kGroups * kNumberBytes + kScalesBytes;
  static constexpr bool kHasMinimums = false, kHasZeros = false;
  using Sum = Int8Sum;
  static Words line(const char* numbers, int line) { return read<Words>(numbers + line * kLine); }
};

// One group of the outputs of a vector.
template <class Step> struct GroupWeights {
  const char* numbers;
  Floats scales, minimums;

  GroupWeights(const char* step, int group, int first) {
    numbers = step + group * Step::kNumberBytes + first * 4;
    const Float16* of_group = (const Float16*)(step + kGroups * Step::kNumberBytes) + group * kTileOutputs + first;
    scales = load(of_group);
    if (Step::kHasMinimums) minimums = load(of_group + kGroups * kTileOutputs);
    if (Step::kHasZeros) minimums *= scales;
  }
};

template <class Step, int rows> void group_sums_of_rows(const Block& block, Sums& sums) {
  const int64_t next_column = (block.columns - 1) * block.column_stride;
  const int64_t next_vector = kWidth == kTileOutputs ? next_column : 0;
  constexpr int kNextOutput = kWidth % kTileOutputs;
  const char *x = block.x, *weights = block.weights, *ahead = block.ahead;
  Floats sum[rows][kVectors] = {};
  for (int64_t step = 0; step < block.steps; step++) {
    prefetch(block, ahead);
    ahead += block.is_near ? Step::kBytes : block.lines * kLine;
    for (int group = 0; group < kGroups; group++) {
      const GroupWeights<Step> of_vector[kVectors] = {{weights, group, 0}, {weights + next_vector, group, kNextOutput}};
      const char* integers = x + group * kGroup;
      const char* of_rows = x + kLine + group * sizeof(RowGroup);
      typename Step::Sum group_sum[rows][kVectors];
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++)
        for (int v = 0; v < kVectors; v++) group_sum[row][v].begin(read<int32_t>(of_rows + row * Step::kRowBytes + offsetof(RowGroup, correction)));
#pragma GCC unroll 16
      for (int line = 0; line < kGroupLines; line++) {
        const Words both[kVectors] = {Step::line(of_vector[0].numbers, line), Step::line(of_vector[1].numbers, line)};
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
          const Words four = words(read<int32_t>(integers + row * Step::kRowBytes + line * 4));
          for (int v = 0; v < kVectors; v++) group_sum[row][v].add(both[v], four);
        }
      }
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++) {
        // One by one: a whole RowGroup would pass through the stack.
        const char* of_row = of_rows + row * Step::kRowBytes;
        const Floats scale = broadcast(read<float>(of_row + offsetof(RowGroup, scale)));
        const Floats total = broadcast(read<float>(of_row + offsetof(RowGroup, total)));
        for (int v = 0; v < kVectors; v++) {
          sum[row][v] = fma(from_integers(group_sum[row][v].whole()) * scale, of_vector[v].scales, sum[row][v]);
          if (Step::kHasMinimums) sum[row][v] = fma(total, of_vector[v].minimums, sum[row][v]);
        }
      }
    }
    x += Step::kRows * Step::kRowBytes, weights += Step::kBytes;
  }
#pragma GCC unroll 16
  for (int row = 0; row < rows; row++)
    for (int v = 0; v < kVectors; v++) store(sums.floats[v * kWidth / kTileOutputs][row] + v * kWidth % kTileOutputs, sum[row][v]);
}

template <class Step, int... rows> void group_sums(const Block& block, Sums& sums, std::integer_sequence<int, rows...>) {
  static constexpr void (*by_rows[])(const Block&, Sums&) = {&group_sums_of_rows<Step, rows + 1>...};
  by_rows[block.rows - 1](block, sums);
}

template <> inline void block_sums<Int4Step>(const Block& block, Sums& sums) {
  group_sums<Int4Step>(block, sums, std::make_integer_sequence<int, GroupRows::kRows>());
}
template <> inline void block_sums<Int4ZeroStep>(const Block& block, Sums& sums) {
  group_sums<Int4ZeroStep>(block, sums, std::make_integer_sequence<int, GroupRows::kRows>());
}
template <> inline void block_sums<Int8GroupStep>(const Block& block, Sums& sums) {
  group_sums<Int8GroupStep>(block, sums, std::make_integer_sequence<int, GroupRows::kRows>());
}

}  // namespace
