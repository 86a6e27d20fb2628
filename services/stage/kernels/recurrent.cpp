// What goes from token to token besides keys and values: windows of convolutions, Mamba-2's state, the gated delta rule's,
// and the gated norms behind these. Plain C ABI at the end of the file (calls.h).
//
// Same promise as attention.cpp: a row's bits depend on its sequence only. Every channel or head goes through a sequence token
// by token, from the state that the token before left; so where a step begins changes nothing. Sums run over 16 partial sums
// whatever the vector width, or in the order of the state's rows; e^x and log of a gate are those of double precision.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "calls.h"
#include "simd.h"

namespace {

constexpr int kSums = 16;           // partial sums, and what rows of a state are padded to, whatever the vector width
constexpr int kVectors = kSums / kWidth;
constexpr int kMaxDim = 512;        // of a head and of its state
constexpr int64_t kBlock = 64;      // channels that one thread takes
constexpr int64_t kGrain = 16384;   // elements below which waking another thread costs more than it saves

template <class F> void for_units(const StateRows& rows, int64_t units, int64_t work, F&& unit) {
  const int64_t num = units * rows.num_sequences;
#pragma omp parallel for schedule(dynamic) num_threads(rows.num_threads) if (num * work > kGrain)
  for (int64_t i = 0; i < num; i++) unit(i / units, i % units);
}

inline int64_t padded(int64_t dim) { return (dim + kSums - 1) / kSums * kSums; }

// Reads a row and fills it up with zeros to whole groups of kSums.
template <class T> void read_row(const T* from, int64_t dim, float* to) {
  for (int64_t at = 0; at < padded(dim); at += kWidth) store(to + at, at < dim ? load_first(from + at, dim - at) : broadcast(0.f));
}

struct Sums {
  Floats part[kVectors] = {};
  float total() const {
    float all[kSums];
    for (int i = 0; i < kVectors; i++) store(all + i * kWidth, part[i]);
    for (int half = kSums / 2; half; half /= 2) for (int i = 0; i < half; i++) all[i] += all[i + half];
    return all[0];
  }
};

// x [padded(dim)]: zeros at its end add nothing.
float sum_of_squares(const float* x, int64_t dim) {
  Sums sums;
  for (int64_t at = 0; at < dim; at += kSums) for (int i = 0; i < kVectors; i++) {
    const Floats value = load(x + at + i * kWidth);
    sums.part[i] = fma(value, value, sums.part[i]);
  }
  return sums.total();
}

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }
template <class T> float scalar(const void* row, int64_t at) {
  float all[kWidth];
  store(all, load_first((const T*)row + at, 1));
  return all[0];
}

template <class T, int width> void convolve(const ConvolutionCall& c) {
  const int64_t num_blocks = (c.num_channels + kBlock - 1) / kBlock, row_work = kBlock * width;
  const int64_t num_rows = c.rows.begins[c.rows.num_sequences] - c.rows.begins[0];
  for_units(c.rows, num_blocks, row_work * num_rows / std::max(1, c.rows.num_sequences), [&](int64_t sequence, int64_t block) {
    T* state = (T*)c.state + c.rows.slots[sequence] * (width - 1) * c.num_channels;
    const int64_t last = std::min(c.num_channels, (block + 1) * kBlock);
    for (int64_t at = block * kBlock; at < last; at += kWidth) {
      const int count = (int)std::min<int64_t>(kWidth, last - at);
      Floats window[width], weight[width];
      for (int i = 0; i < width; i++) weight[i] = load_first(c.weight + i * c.num_channels + at, count);
      for (int i = 0; i < width - 1; i++)
        window[i] = c.rows.is_new[sequence] ? broadcast(0.f) : load_first(state + i * c.num_channels + at, count);
      const Floats bias = c.bias ? load_first(c.bias + at, count) : broadcast(0.f);
      for (int64_t row = c.rows.begins[sequence]; row < c.rows.begins[sequence + 1]; row++) {
        const int64_t place = row * c.x_stride + at;
        Floats value = load_first((const T*)c.x + place, count);
        if (c.before) value = rounded<T>(value * load_first((const T*)c.before + place, count));
        window[width - 1] = value;
        Floats sum = bias;
        for (int i = 0; i < width; i++) sum = fma(window[i], weight[i], sum);
        sum = rounded<T>(sum);
        if (c.activates) sum = rounded<T>(silu(sum));
        if (c.after) sum = sum * load_first((const T*)c.after + place, count);
        store_first((T*)c.out + row * c.num_channels + at, sum, count);
        for (int i = 0; i < width - 1; i++) window[i] = window[i + 1];
      }
      for (int i = 0; i < width - 1; i++) store_first(state + i * c.num_channels + at, window[i], count);
    }
  });
}

template <class T> void scan(const ScanCall& c) {
  const int64_t inner = padded(c.num_states), heads_of_group = c.num_heads / c.num_groups;
  for_units(c.rows, c.num_heads, inner * c.dim, [&](int64_t sequence, int64_t head) {
    const int64_t group = head / heads_of_group, group_at = group * c.num_states;
    float* state = c.state + (c.rows.slots[sequence] * (int64_t)c.num_heads + head) * c.dim * inner;
    if (c.rows.is_new[sequence]) std::memset(state, 0, sizeof(float) * c.dim * inner);
    alignas(64) float x[kMaxDim], b[kMaxDim], to_out[kMaxDim];
    for (int64_t row = c.rows.begins[sequence]; row < c.rows.begins[sequence + 1]; row++) {
      read_row((const T*)c.x + row * c.x_stride + head * c.dim, c.dim, x);
      read_row((const T*)c.b + row * c.x_stride + group_at, c.num_states, b);
      read_row((const T*)c.c + row * c.x_stride + group_at, c.num_states, to_out);
      const float dt = scalar<T>((const T*)c.dt + row * c.dt_stride, head) + c.dt_bias[head];
      const float step = std::min(std::max((float)softplus(dt), c.least_dt), c.most_dt);
      const Floats keep = broadcast((float)std::exp((double)step * c.decay[head]));
      float* out = c.out + (row * c.num_heads + head) * c.dim;
      for (int64_t p = 0; p < c.dim; p++) {
        const Floats added = broadcast(step * x[p]);
        float* own = state + p * inner;
        Sums sums;
        for (int64_t at = 0; at < inner; at += kSums) for (int i = 0; i < kVectors; i++) {
          const int64_t place = at + i * kWidth;
          const Floats value = fma(added, load(b + place), load(own + place) * keep);
          store(own + place, value);
          sums.part[i] = fma(value, load(to_out + place), sums.part[i]);
        }
        out[p] = sums.total() + c.skip[head] * x[p];
      }
    }
  });
}

// Columns of one head's state, `num` vectors of them: what the decayed state recalls for a key, then the state with the
// correction, and what it answers to a query.
template <int num> void update_columns(float* state, int64_t key_dim, int64_t inner, const float* key, const float* query,
                                       const float* value, Floats keep, Floats beta, float* out) {
  Floats sum[num] = {}, change[num];
  for (int64_t j = 0; j < key_dim; j++) for (int i = 0; i < num; i++) {
    const Floats kept = load(state + j * inner + i * kWidth) * keep;
    store(state + j * inner + i * kWidth, kept);
    sum[i] = fma(kept, broadcast(key[j]), sum[i]);
  }
  for (int i = 0; i < num; i++) change[i] = (load(value + i * kWidth) - sum[i]) * beta, sum[i] = broadcast(0.f);
  for (int64_t j = 0; j < key_dim; j++) for (int i = 0; i < num; i++) {
    const Floats updated = fma(broadcast(key[j]), change[i], load(state + j * inner + i * kWidth));
    store(state + j * inner + i * kWidth, updated);
    sum[i] = fma(updated, broadcast(query[j]), sum[i]);
  }
  for (int i = 0; i < num; i++) store(out + i * kWidth, sum[i]);
}

template <class T> void apply_delta(const DeltaCall& c) {
  const int64_t inner = padded(c.value_dim), heads_of_key = c.num_heads / c.num_key_heads;
  const float query_scale = 1.f / std::sqrt((float)c.key_dim);
  for_units(c.rows, c.num_heads, inner * c.key_dim, [&](int64_t sequence, int64_t head) {
    float* state = c.state + (c.rows.slots[sequence] * (int64_t)c.num_heads + head) * c.key_dim * inner;
    if (c.rows.is_new[sequence]) std::memset(state, 0, sizeof(float) * c.key_dim * inner);
    alignas(64) float query[kMaxDim], key[kMaxDim], value[kMaxDim], out[kMaxDim];
    for (int64_t row = c.rows.begins[sequence]; row < c.rows.begins[sequence + 1]; row++) {
      const int64_t begin = row * c.x_stride, key_at = begin + head / heads_of_key * c.key_dim;
      read_row((const T*)c.query + key_at, c.key_dim, query);
      read_row((const T*)c.key + key_at, c.key_dim, key);
      read_row((const T*)c.value + begin + head * c.value_dim, c.value_dim, value);
      const float query_unit = 1.f / std::sqrt(sum_of_squares(query, c.key_dim) + 1e-6f);
      const float key_unit = 1.f / std::sqrt(sum_of_squares(key, c.key_dim) + 1e-6f);
      for (int64_t j = 0; j < c.key_dim; j++) query[j] = query[j] * query_unit * query_scale, key[j] *= key_unit;
      const double dt = scalar<T>((const T*)c.a + row * c.a_stride, head) + c.dt_bias[head];
      const Floats keep = broadcast((float)std::exp(c.decay[head] * softplus(dt)));
      const double open = 1 / (1 + std::exp(-(double)scalar<T>((const T*)c.b + row * c.a_stride, head)));
      const Floats beta = broadcast((float)open * c.most_learned);
      int64_t at = 0;
      for (; at + 4 * kWidth <= inner; at += 4 * kWidth)
        update_columns<4>(state + at, c.key_dim, inner, key, query, value + at, keep, beta, out + at);
      for (; at < inner; at += kWidth)
        update_columns<1>(state + at, c.key_dim, inner, key, query, value + at, keep, beta, out + at);
      std::memcpy(c.out + (row * c.num_heads + head) * c.value_dim, out, sizeof(float) * c.value_dim);
    }
  });
}

template <class T> void gate(const GateCall& c) {
#pragma omp parallel for schedule(static) num_threads(c.num_threads) if (c.num_rows * c.num_groups * c.dim > kGrain)
  for (int64_t i = 0; i < c.num_rows * c.num_groups; i++) {
    const int64_t row = i / c.num_groups, group = i % c.num_groups;
    const float *x = c.x + i * c.dim, *weight = c.weight + group * c.weight_stride;
    const T* by = (const T*)c.gate + row * c.gate_stride + group * c.dim;
    T* out = (T*)c.out + i * c.dim;
    auto value = [&](int64_t at, int count) {
      const Floats plain = load_first(x + at, count);
      return c.order == kNormFirst ? plain : plain * silu(load_first(by + at, count));
    };
    Floats scale = broadcast(1.f);
    if (c.order != kGateAlone) {
      Sums sums;
      for (int64_t at = 0; at < c.dim; at += kWidth) {
        const Floats each = value(at, (int)std::min<int64_t>(kWidth, c.dim - at));
        Floats& part = sums.part[at / kWidth % kVectors];
        part = fma(each, each, part);
      }
      scale = broadcast(1.f / std::sqrt(sums.total() / c.dim + c.eps));
    }
    for (int64_t at = 0; at < c.dim; at += kWidth) {
      const int count = (int)std::min<int64_t>(kWidth, c.dim - at);
      Floats each = value(at, count) * scale;
      if (c.order != kGateAlone) each = each * load_first(weight + at, count);
      if (c.order == kNormFirst) each = each * silu(load_first(by + at, count));
      store_first(out + at, each, count);
    }
  }
}

template <template <class> class Run, class Call> int32_t by_dtype(const Call& call) {
  switch (call.dtype) {
    case kFloat32: return Run<float>()(call);
    case kBFloat16: return Run<BFloat16>()(call);
    case kFloat16: return Run<Float16>()(call);
    default: return -1;
  }
}

template <class T> struct Convolve {
  int32_t operator()(const ConvolutionCall& c) {
    switch (c.width) {
      case 2: convolve<T, 2>(c); return 0;
      case 3: convolve<T, 3>(c); return 0;
      case 4: convolve<T, 4>(c); return 0;
      default: return -1;
    }
  }
};
template <class T> struct Scan { int32_t operator()(const ScanCall& c) { scan<T>(c); return 0; } };
template <class T> struct Delta { int32_t operator()(const DeltaCall& c) { apply_delta<T>(c); return 0; } };
template <class T> struct GateOf { int32_t operator()(const GateCall& c) { gate<T>(c); return 0; } };

}  // namespace

int32_t shardline_convolve(const ConvolutionCall* call) { return by_dtype<Convolve>(*call); }

int32_t shardline_scan(const ScanCall* call) {
  return std::max(call->dim, call->num_states) > kMaxDim ? -1 : by_dtype<Scan>(*call);
}

int32_t shardline_apply_delta(const DeltaCall* call) {
  return std::max(call->key_dim, call->value_dim) > kMaxDim ? -1 : by_dtype<Delta>(*call);
}

int32_t shardline_gate(const GateCall* call) { return by_dtype<GateOf>(*call); }

extern "C" int32_t shardline_convolution_call_bytes() { return sizeof(ConvolutionCall); }
extern "C" int32_t shardline_scan_call_bytes() { return sizeof(ScanCall); }
extern "C" int32_t shardline_delta_call_bytes() { return sizeof(DeltaCall); }
extern "C" int32_t shardline_gate_call_bytes() { return sizeof(GateCall); }
