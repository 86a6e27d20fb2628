// Sums of one block of a product of 4-bit weights, which are unpacked in registers as they pass by.
//
// 32 inputs are a group: of each row they have one scale, of each output a scale and a zero point. A group's sum is one of
// integers, exact in any order; it is scaled in float32 and added to those of the groups before it, in their order. So a
// row has the same bits with every instruction set.
//
// Weights lie in steps of 64 inputs by 16 outputs: [2 groups][4 lines][16 outputs][4 bytes], a byte's low half the number
// of one of 4 inputs, its high half that of one of the next 4; then [2 groups][16 outputs] scales in half precision; then
// as many bytes, each kInt4Offset less the zero point. A row lies in steps of 64 integers of a byte and two `RowGroup`.

#pragma once

#include <algorithm>
#include <cmath>

#include "product_steps.h"

namespace {

constexpr int kGroup = 32, kGroups = kLine / kGroup;  // of inputs, and how many of them in a step
constexpr int kInt4Offset = 16;                       // added to weights, so that none is negative
constexpr int kGroupBytes = kGroup / 2 * kTileOutputs;
constexpr int kScalesAt = kGroups * kGroupBytes, kOffsetsAt = kScalesAt + kGroups * kTileOutputs * (int)sizeof(Float16);
constexpr int kInt4StepBytes = kOffsetsAt + kGroups * kTileOutputs;

struct RowGroup {
  float scale;
  int32_t correction;  // what kInt4Offset adds to a sum, to be taken off
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
  return {is_finite ? largest[0] / 127.f : NAN, -kInt4Offset * (int32_t)sum[0]};
}

#ifdef __AVX512F__
inline Words words(int32_t x) { return _mm512_set1_epi32(x); }
inline Words widened(const char* bytes) { return _mm512_cvtepu8_epi32(read<__m128i>(bytes)); }
inline Words add_bytes(Words a, Words b) { return _mm512_add_epi8(a, b); }
inline Words add_pairs(Words a, Words b) { return _mm512_add_epi16(a, b); }
inline Words pairs_of(Words weights, Words x) { return _mm512_maddubs_epi16(weights, x); }
inline Words fours_of(Words pairs) { return _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)); }
#else
inline Words words(int32_t x) { return _mm256_set1_epi32(x); }
inline Words widened(const char* bytes) { return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(read<int64_t>(bytes))); }
inline Words add_bytes(Words a, Words b) { return _mm256_add_epi8(a, b); }
inline Words add_pairs(Words a, Words b) { return _mm256_add_epi16(a, b); }
inline Words pairs_of(Words weights, Words x) { return _mm256_maddubs_epi16(weights, x); }
inline Words fours_of(Words pairs) { return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)); }
#endif

#ifdef __AVX512VNNI__
struct Int4Sum {
  Words whole;
  void begin(int32_t correction) { whole = words(correction); }
  void add(Words weights, Words x) { whole = _mm512_dpbusd_epi32(whole, weights, x); }
  void end_half() {}
};
#else
// No weight is above 31, so that pairs of products of half a group fit 16 bits.
struct Int4Sum {
  Words whole, pairs;
  void begin(int32_t correction) { whole = words(correction), pairs = words(0); }
  void add(Words weights, Words x) { pairs = add_pairs(pairs, pairs_of(weights, x)); }
  void end_half() { whole = (Words)((Bits)whole + (Bits)fours_of(pairs)), pairs = words(0); }
};
#endif

struct Int4Step {
  static constexpr int kRows = kRegisters == 32 ? 8 : 4, kRowBytes = kLine + kGroups * sizeof(RowGroup);
};

// A vector's numbers of one group: the low halves of four lines and the high ones.
struct GroupWeights {
  const char* numbers;
  Words offsets;
  Floats scales;

  GroupWeights(const char* step, int group, int first) {
    const int output = group * kTileOutputs + first;
    numbers = step + group * kGroupBytes + first * 4;
    offsets = (Words)((Bits)widened(step + kOffsetsAt + output) * 0x01010101u);
    scales = load((const Float16*)(step + kScalesAt) + output);
  }
  Words line(int number, int half) const {
    const Bits both = read<Bits>(numbers + number * kLine);
    return add_bytes((Words)((half ? both >> 4 : both) & 0x0f0f0f0fu), offsets);
  }
};

template <int rows> void int4_sums_of_rows(const Block& block, Sums& sums) {
  constexpr int kLines = kGroupBytes / kLine;
  const int64_t next_column = (block.columns - 1) * block.column_stride;
  const int64_t next_vector = kWidth == kTileOutputs ? next_column : 0;
  constexpr int kNextOutput = kWidth % kTileOutputs;
  const char *x = block.x, *weights = block.weights, *ahead = block.ahead;
  Floats sum[rows][kVectors] = {};
  for (int64_t step = 0; step < block.steps; step++) {
    prefetch(block, ahead);
    prefetch(block, ahead + next_column);
    ahead += block.is_near ? kInt4StepBytes : block.lines * kLine;
    for (int group = 0; group < kGroups; group++) {
      const GroupWeights of_vector[kVectors] = {{weights, group, 0}, {weights + next_vector, group, kNextOutput}};
      const char* integers = x + group * kGroup;
      const char* of_rows = x + kLine + group * sizeof(RowGroup);
      Int4Sum whole[rows][kVectors];
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++)
        for (int v = 0; v < kVectors; v++)
          whole[row][v].begin(read<RowGroup>(of_rows + row * Int4Step::kRowBytes).correction);
#pragma GCC unroll 16
      for (int line = 0; line < 2 * kLines; line++) {
        const Words both[kVectors] = {of_vector[0].line(line / 2, line % 2), of_vector[1].line(line / 2, line % 2)};
#pragma GCC unroll 16
        for (int row = 0; row < rows; row++) {
          const Words four = words(read<int32_t>(integers + row * Int4Step::kRowBytes + line * 4));
          for (int v = 0; v < kVectors; v++) whole[row][v].add(both[v], four);
        }
        if (line % kLines == kLines - 1)
#pragma GCC unroll 16
          for (int row = 0; row < rows; row++)
            for (int v = 0; v < kVectors; v++) whole[row][v].end_half();
      }
#pragma GCC unroll 16
      for (int row = 0; row < rows; row++) {
        const Floats scale = broadcast(read<RowGroup>(of_rows + row * Int4Step::kRowBytes).scale);
        for (int v = 0; v < kVectors; v++)
          sum[row][v] = fma(from_integers(whole[row][v].whole) * scale, of_vector[v].scales, sum[row][v]);
      }
    }
    x += Int4Step::kRows * Int4Step::kRowBytes, weights += kInt4StepBytes;
  }
  for (int row = 0; row < rows; row++)
    for (int v = 0; v < kVectors; v++) store(sums.floats[v * kWidth / kTileOutputs][row] + v * kWidth % kTileOutputs, sum[row][v]);
}

template <int... rows> void int4_sums(const Block& block, Sums& sums, std::integer_sequence<int, rows...>) {
  static constexpr void (*by_rows[])(const Block&, Sums&) = {&int4_sums_of_rows<rows + 1>...};
  by_rows[block.rows - 1](block, sums);
}

template <> inline void block_sums<Int4Step>(const Block& block, Sums& sums) {
  int4_sums(block, sums, std::make_integer_sequence<int, Int4Step::kRows>());
}

}  // namespace
