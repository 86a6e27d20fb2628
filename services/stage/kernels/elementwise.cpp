// The operations between the matrix products, each in one pass over memory: RMSNorm, LayerNorm, gates, GELU, rotary
// positions, residual sums. Plain C ABI at the end of the file (calls.h).
//
// Same promise as attention.cpp: a row's bits depend on that row only. Sums run over 32 partial sums whatever the
// vector width, elements at the end of a row take the same path as the others, and values are rounded to the stored
// type wherever transformers' own modules round, so that a fused operation gives the values of those it replaces.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "calls.h"
#include "simd.h"

namespace {

constexpr int kSums = 32;             // partial sums of a row, whatever the vector width
constexpr int64_t kGrain = 16384;     // elements below which waking another thread costs more than it saves

template <class F> void for_rows(int64_t num_rows, int64_t width, int32_t num_threads, F&& row) {
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows * width > kGrain)
  for (int64_t i = 0; i < num_rows; i++) row(i);
}

// Calls `part(at, count)` for each vector of a row. The count of a full vector is a compile-time constant.
template <class F> inline void for_vectors(int64_t dim, F&& part) {
  int64_t at = 0;
  for (; at + kWidth <= dim; at += kWidth) part(at, std::integral_constant<int, kWidth>());
  if (at < dim) part(at, dim - at);
}

// The mean over a row of what `add(part, at, count)` adds to a partial sum for each vector.
template <class F> float mean(int64_t dim, F&& add) {
  Floats sum[kSums / kWidth] = {};
  for_vectors(dim, [&](int64_t at, auto count) {
    Floats& part = sum[at / kWidth % (kSums / kWidth)];
    part = add(part, at, count);
  });
  float partial[kSums];
  for (int part = 0; part < kSums / kWidth; part++) store(partial + part * kWidth, sum[part]);
  for (int half = kSums / 2; half; half /= 2) for (int i = 0; i < half; i++) partial[i] += partial[i + half];
  return partial[0] / dim;
}

template <class T> float mean_of_squares(const T* x, int64_t dim) {
  return mean(dim, [&](Floats part, int64_t at, auto count) {
    const Floats value = load_first(x + at, count);
    return fma(value, value, part);
  });
}

struct Normed { const void* x; const Norm& norm; void* out; int64_t num_rows, num_groups, dim, stride; };

template <class T> void rms_norm(const Normed& c, int32_t num_threads) {
  for_rows(c.num_rows * c.num_groups, c.dim, num_threads, [&](int64_t i) {
    const T* x = (const T*)c.x + i / c.num_groups * c.stride + i % c.num_groups * c.dim;
    T* out = (T*)c.out + i * c.dim;
    const float scale = 1.f / std::sqrt(mean_of_squares(x, c.dim) + c.norm.eps);
    for_vectors(c.dim, [&](int64_t at, auto count) {
      const Floats normal = load_first(x + at, count) * scale;
      const Floats weight = load_first(c.norm.weight + at, count);
      store_first(out + at, weight * (c.norm.rounds_first ? rounded<T>(normal) : normal), count);
    });
  });
}

struct Centered { const void *x, *residual; const LayerNorm& norm; void* out; int64_t num_rows, dim; };

template <class T> void layer_norm(const Centered& c, int32_t num_threads) {
  for_rows(c.num_rows, c.dim, num_threads, [&](int64_t row) {
    const T* x = (const T*)c.x + row * c.dim;
    T* out = (T*)c.out + row * c.dim;
    if (c.residual) {
      const T* residual = (const T*)c.residual + row * c.dim;
      for_vectors(c.dim, [&](int64_t at, auto count) { store_first(out + at, load_first(x + at, count) + load_first(residual + at, count), count); });
      x = out;
    }
    const float center = mean(c.dim, [&](Floats part, int64_t at, auto count) { return part + load_first(x + at, count); });
    const float variance = mean(c.dim, [&](Floats part, int64_t at, auto count) {
      const Floats away = keep_first(load_first(x + at, count) - center, count);
      return fma(away, away, part);
    });
    const Floats scale = broadcast(1.f / std::sqrt(variance + c.norm.eps));
    for_vectors(c.dim, [&](int64_t at, auto count) {
      const Floats normal = (load_first(x + at, count) - center) * scale;
      store_first(out + at, fma(normal, load_first(c.norm.weight + at, count), load_first(c.norm.bias + at, count)), count);
    });
  });
}

struct Sum { const void *x, *y; float scale; void* out; int64_t num_rows, dim; };

template <class T> void add(const Sum& c, int32_t num_threads) {
  for_rows(c.num_rows, c.dim, num_threads, [&](int64_t row) {
    const T *x = (const T*)c.x + row * c.dim, *y = (const T*)c.y + row * c.dim;
    T* out = (T*)c.out + row * c.dim;
    for_vectors(c.dim, [&](int64_t at, auto count) {
      store_first(out + at, load_first(x + at, count) + rounded<T>(load_first(y + at, count) * c.scale), count);
    });
  });
}

// gate and up: rows of `dim` elements that lie `gate_stride` and `up_stride` elements apart; out is dense.
struct Gate { const void *gate, *up; void* out; int64_t num_rows, dim, gate_stride, up_stride; int32_t activation; };

template <class T, class Activate> void gate_mul(const Gate& c, int32_t num_threads, Activate activate) {
  for_rows(c.num_rows, c.dim, num_threads, [&](int64_t row) {
    const T *gate = (const T*)c.gate + row * c.gate_stride, *up = (const T*)c.up + row * c.up_stride;
    T* out = (T*)c.out + row * c.dim;
    for_vectors(c.dim, [&](int64_t at, auto count) {
      const Floats open = rounded<T>(activate(load_first(gate + at, count)));
      store_first(out + at, open * load_first(up + at, count), count);
    });
  });
}

template <class T> void gate_mul(const Gate& c, int32_t num_threads) {
  if (c.activation == kGelu) gate_mul<T>(c, num_threads, [](Floats x) { return gelu(x); });
  else if (c.activation == kGeluTanh) gate_mul<T>(c, num_threads, [](Floats x) { return gelu_tanh(x); });
  else gate_mul<T>(c, num_threads, [](Floats x) { return silu(x); });
}

// x: rows `stride` elements apart; out is dense.
struct Activation { const void* x; void* out; int64_t num_rows, dim, stride; int32_t uses_tanh; };

template <class T> void gelu(const Activation& c, int32_t num_threads) {
  for_rows(c.num_rows, c.dim, num_threads, [&](int64_t row) {
    const T* x = (const T*)c.x + row * c.stride;
    T* out = (T*)c.out + row * c.dim;
    for_vectors(c.dim, [&](int64_t at, auto count) {
      const Floats value = load_first(x + at, count);
      store_first(out + at, c.uses_tanh ? gelu_tanh(value) : gelu(value), count);
    });
  });
}

// x and out: [num_rows][num_heads][dim], rows of x `stride` elements apart.
struct Turn { const void* x; const Turned& by; void* out; int64_t num_rows, num_heads, dim, stride; };

template <class T, class Table> void rotate_halves(const T* x, const Table* cos, const Table* sin, T* out, int64_t dim) {
  const int64_t half = dim / 2;
  for_vectors(half, [&](int64_t d, auto count) {
    const Floats first = load_first(x + d, count), second = load_first(x + half + d, count);
    auto product = [&](Floats value, const Table* by) { return rounded<Table>(value * load_first(by, count)); };
    store_first(out + d, product(first, cos + d) - product(second, sin + d), count);
    store_first(out + half + d, product(second, cos + half + d) + product(first, sin + half + d), count);
  });
}

template <class T, class Table> void rotate_neighbors(const T* x, const Table* cos, const Table* sin, T* out, int64_t dim) {
  Bits pair, sign;
  for (int lane = 0; lane < kWidth; lane++) pair[lane] = lane / 2, sign[lane] = lane % 2 ? 0 : 1u << 31;
  for_vectors(dim, [&](int64_t d, auto count) {
    const Floats value = load_first(x + d, count);
    auto product = [&](Floats value, const Table* by) {
      return rounded<Table>(value * __builtin_shuffle(load_first(by + d / 2, count / 2), pair));
    };
    store_first(out + d, product(value, cos) + (Floats)((Bits)product(partners<1>(value), sin) ^ sign), count);
  });
}

template <class T, class Table> void rotate(const Turn& c, int32_t num_threads) {
  for_rows(c.num_rows, c.num_heads * c.dim, num_threads, [&](int64_t row) {
    const Table *cos = (const Table*)c.by.cos + row * c.by.dim, *sin = (const Table*)c.by.sin + row * c.by.dim;
    for (int64_t attention_head = 0; attention_head < c.num_heads; attention_head++) {
      const T* x = (const T*)c.x + row * c.stride + attention_head * c.dim;
      T* out = (T*)c.out + (row * c.num_heads + attention_head) * c.dim;
      if (c.by.neighbors) rotate_neighbors(x, cos, sin, out, c.by.dim);
      else rotate_halves(x, cos, sin, out, c.by.dim);
      std::memcpy(out + c.by.dim, x + c.by.dim, (c.dim - c.by.dim) * sizeof(T));
    }
  });
}

template <class T> void rotate(const Turn& c, int32_t num_threads) {
  if (c.by.dtype == kFloat32) rotate<T, float>(c, num_threads);
  else rotate<T, T>(c, num_threads);
}

template <template <class> class Run, class Args> int32_t by_dtype(const Args& args, int32_t dtype, int32_t num_threads) {
  switch (dtype) {
    case kFloat32: Run<float>()(args, num_threads); return 0;
    case kBFloat16: Run<BFloat16>()(args, num_threads); return 0;
    case kFloat16: Run<Float16>()(args, num_threads); return 0;
    default: return -1;
  }
}

template <class T> struct RmsNorm { void operator()(const Normed& c, int32_t threads) { rms_norm<T>(c, threads); } };
template <class T> struct LayerNormOf { void operator()(const Centered& c, int32_t threads) { layer_norm<T>(c, threads); } };
template <class T> struct Gelu { void operator()(const Activation& c, int32_t threads) { gelu<T>(c, threads); } };
template <class T> struct GateMul { void operator()(const Gate& c, int32_t threads) { gate_mul<T>(c, threads); } };
template <class T> struct Rotate { void operator()(const Turn& c, int32_t threads) { rotate<T>(c, threads); } };
template <class T> struct Add { void operator()(const Sum& c, int32_t threads) { add<T>(c, threads); } };

}  // namespace

int32_t shardline_rms_norm(const void* x, const Norm* norm, void* out, int64_t num_rows, int64_t num_groups, int64_t dim,
                           int64_t stride, int32_t dtype, int32_t num_threads) {
  return by_dtype<RmsNorm>(Normed{x, *norm, out, num_rows, num_groups, dim, stride}, dtype, num_threads);
}

int32_t shardline_layer_norm(const void* x, const void* residual, const LayerNorm* norm, void* out, int64_t num_rows,
                             int64_t dim, int32_t dtype, int32_t num_threads) {
  return by_dtype<LayerNormOf>(Centered{x, residual, *norm, out, num_rows, dim}, dtype, num_threads);
}

int32_t shardline_gelu(const void* x, void* out, int64_t num_rows, int64_t dim, int64_t stride, int32_t uses_tanh,
                       int32_t dtype, int32_t num_threads) {
  return by_dtype<Gelu>(Activation{x, out, num_rows, dim, stride, uses_tanh}, dtype, num_threads);
}

int32_t shardline_gate_mul(const void* gate, const void* up, void* out, int64_t num_rows, int64_t dim, int64_t gate_stride,
                           int64_t up_stride, int32_t activation, int32_t dtype, int32_t num_threads) {
  if (activation < kSilu || activation > kGeluTanh) return -1;
  return by_dtype<GateMul>(Gate{gate, up, out, num_rows, dim, gate_stride, up_stride, activation}, dtype, num_threads);
}

int32_t shardline_rotate(const void* x, const Turned* turned, void* out, int64_t num_rows, int64_t num_heads, int64_t dim,
                         int64_t stride, int32_t dtype, int32_t num_threads) {
  if (turned->dtype != dtype && turned->dtype != kFloat32) return -1;
  return by_dtype<Rotate>(Turn{x, *turned, out, num_rows, num_heads, dim, stride}, dtype, num_threads);
}

int32_t shardline_add(const void* x, const void* y, float scale, void* out, int64_t num_rows, int64_t dim, int32_t dtype,
                      int32_t num_threads) {
  return by_dtype<Add>(Sum{x, y, scale, out, num_rows, dim}, dtype, num_threads);
}
