// Finds the 4-bit numbers of weights. Sums run in one order with any width of vectors: so do the numbers come out equal.

#include <cstdint>

#include "calls.h"
#include "group_steps.h"

namespace {

constexpr int kGroupVectors = kGroup / kWidth, kNumFits = 3;
constexpr float kMost = 15.f;
// Steps of a group's scale between its lowest and its highest value: fewer where the values of a file's grid do not use all
// of them, more where it is better to clip.
constexpr float kSpans[] = {15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 17, 19};
constexpr float kOnGrid = 1e-5f;  // of a group's squares: what rounding values of a grid to bfloat16 makes wrong is less

using Group = Floats[kGroupVectors];

inline Floats round_to_integer(Floats x) { return x + broadcast(12582912.f) - broadcast(12582912.f); }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
inline Floats clamped(Floats x, float most) { return larger(smaller(x, broadcast(most)), broadcast(0.f)); }
inline Floats over(Floats x) { return 1.f / ((Floats)((Bits)x & 0x7fffffffu) < 1e-30f ? broadcast(1e-30f) : x); }

// Of all values of a group, in every lane.
template <class Of> inline Floats reduced(const Group& group, Of of) {
  Floats x;
  if constexpr (kGroupVectors == 2) {
    const Floats both = of(group[0], group[1]);
    x = of(both, partners<kWidth / 2>(both));
  } else {
    x = of(of(group[0], group[2]), of(group[1], group[3]));
  }
  x = of(x, partners<4>(x)), x = of(x, partners<2>(x));
  return of(x, partners<1>(x));
}
inline Floats total(const Group& group) { return reduced(group, [](Floats a, Floats b) { return a + b; }); }

struct Fit { Floats scale, minimum, error; };

inline void numbers_of(const Group& values, Floats scale, Floats minimum, Group& numbers) {
  const Floats inverse = over(scale);
  for (int v = 0; v < kGroupVectors; v++) numbers[v] = clamped(round_to_integer((values[v] - minimum) * inverse), kMost);
}

// In turns the numbers are those that suit scale and minimum best, and these those that suit the numbers.
inline void improve(const Group& values, Floats low, Floats high, Floats mean, float span, Fit& best) {
  Floats scale = (high - low) / span;
  Floats minimum = span < kMost ? low : (high + low) * .5f - scale * (kMost / 2);
  for (int fit = 0; fit < kNumFits; fit++) {
    Group numbers, products, squares, errors;
    numbers_of(values, scale, minimum, numbers);
    const Floats middle = total(numbers) * (1.f / kGroup);
    for (int v = 0; v < kGroupVectors; v++) {
      const Floats apart = numbers[v] - middle;
      products[v] = values[v] * apart, squares[v] = apart * apart;
    }
    scale = total(products) * over(total(squares)), minimum = mean - scale * middle;
    for (int v = 0; v < kGroupVectors; v++) {
      const Floats wrong = values[v] - minimum - numbers[v] * scale;
      errors[v] = wrong * wrong;
    }
    const Floats error = total(errors);
    if (error[0] < best.error[0]) best = {scale, minimum, error};
  }
}

}  // namespace

int32_t shardline_fit_int4(const float* values, uint8_t* numbers, float* scales, float* minimums, int64_t num_groups, int32_t num_threads) {
#pragma omp parallel for num_threads(num_threads) schedule(static)
  for (int64_t i = 0; i < num_groups; i++) {
    Group group, squares, found;
    for (int v = 0; v < kGroupVectors; v++) {
      group[v] = load(values + i * kGroup + v * kWidth);
      squares[v] = group[v] * group[v];
    }
    const Floats low = reduced(group, smaller), high = reduced(group, larger), mean = total(group) * (1.f / kGroup);
    const float is_exact = kOnGrid * total(squares)[0];
    Fit best = {broadcast(0.f), broadcast(0.f), broadcast(INFINITY)};
    for (float span : kSpans) {
      improve(group, low, high, mean, span, best);
      if (best.error[0] <= is_exact) break;
    }
    numbers_of(group, best.scale, best.minimum, found);
    for (int v = 0; v < kGroupVectors; v++)
      store_bytes((char*)numbers + i * kGroup + v * kWidth, (Bits)(found[v] + broadcast(12582912.f)) - (Bits)broadcast(12582912.f));
    scales[i] = best.scale[0], minimums[i] = best.minimum[0];
  }
  return 0;
}
