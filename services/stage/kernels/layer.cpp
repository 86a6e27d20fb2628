// A decoder layer as one call: norm, queries, keys and values, rotary positions, attention, norm, residual, norm, MLP, norm,
// residual. A model has some of the norms. Each part is the library's own function that a layer made of modules calls, so a
// row has the same bits either way.

#include <cstdint>
#include <cstring>
#include <utility>

#include "calls.h"
#include "layer_parts.h"

namespace {

struct Layer {
  const LayerCall& call;
  AttentionCall& attention;
  int64_t rows, hidden, element_bytes;
  int32_t dtype, threads;

  // Normalizes whole rows to `out`, where x points then, if the model does.
  int32_t normalize(const char*& x, const Norm& norm, char* out) const {
    if (!norm.weight) return 0;
    const char* from = std::exchange(x, out);
    return shardline_rms_norm(from, &norm, out, rows, 1, hidden, hidden, dtype, threads);
  }
  // The whole rows of `width`, of which this rank has `mine` elements from `first` on; null if no buffer holds them.
  char* together(const void* x, int64_t mine, int64_t first, int64_t width) const {
    if (!call.ranks) return (char*)x;
    Ranks& ranks = *call.ranks;
    if (rows * width * element_bytes > ranks.buffer_bytes) return nullptr;
    char* all = (char*)ranks.buffers + ranks.num_meetings % 2 * ranks.buffer_bytes;
    char* out = all + first * element_bytes;
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(out + row * width * element_bytes, (const char*)x + row * mine * element_bytes, mine * element_bytes);
    shardline_meet(&ranks);
    return all;
  }
  // Queries or keys on their way to attention.
  struct Heads {
    const char* at;
    int64_t count, stride;  // elements between rows
  };
  int32_t normalize_heads(Heads& x, const Norm& norm, char* out) const {
    const int64_t width = x.count * attention.dim;
    const int64_t groups = call.norms_all_heads ? 1 : x.count;
    const char* from = std::exchange(x.at, out);
    const int64_t stride = std::exchange(x.stride, width);
    return shardline_rms_norm(from, &norm, out, rows, groups, width / groups, stride, dtype, threads);
  }
  int32_t turn(Heads& x, char* out) const {
    const char* from = std::exchange(x.at, out);
    const int64_t stride = std::exchange(x.stride, x.count * attention.dim);
    return shardline_rotate(from, &call.turned, out, rows, x.count, attention.dim, stride, dtype, threads);
  }
  // Normalizes and turns, in the model's order, what it normalizes and turns. `between` is for what is one, not yet the other.
  int32_t position(Heads& x, const Norm& norm, char* between, char* out) const {
    const bool has_norm = norm.weight, turns = call.turned.dim;
    if (has_norm && !call.norms_turned)
      if (int32_t status = normalize_heads(x, norm, turns ? between : out)) return status;
    if (turns)
      if (int32_t status = turn(x, has_norm && call.norms_turned ? between : out)) return status;
    return has_norm && call.norms_turned ? normalize_heads(x, norm, out) : 0;
  }

  // Adds `y` to the residual, normalized to `normal` if the model does; the sum is the layer's output so far.
  int32_t add(const void* residual, const char* y, const Norm& norm, char* normal) const {
    if (int32_t status = normalize(y, norm, normal)) return status;
    return shardline_add(residual, y, call.residual_scale, call.out, rows, hidden, dtype, threads);
  }

  // Attention, added to x: `out`, if there is one.
  int32_t attend() const {
    const int64_t dim = attention.dim, queries = attention.num_heads * dim, keys = attention.num_kv_heads * dim;
    const int64_t width = call.qkv->num_outputs;
    Scratch scratch(element_bytes);
    const int64_t normal_at = scratch.plan(rows * hidden), qkv_at = scratch.plan(rows * width);
    const int64_t query_at = scratch.plan(rows * queries), key_at = scratch.plan(rows * keys);
    const int64_t attended_at = scratch.plan(rows * queries);
    scratch.take();
    char *normal = scratch.at(normal_at), *qkv = scratch.at(qkv_at), *attended = scratch.at(attended_at);

    const char* x = (const char*)call.x;
    if (int32_t status = normalize(x, call.before_attention, normal)) return status;
    if (int32_t status = multiply(*call.qkv, attention, x, qkv)) return status;
    Heads query{qkv, attention.num_heads, width}, key{qkv + queries * element_bytes, attention.num_kv_heads, width};
    const char* value = key.at + keys * element_bytes;
    if (int32_t status = position(query, call.query_norm, attended, scratch.at(query_at))) return status;
    if (int32_t status = position(key, call.key_norm, attended, scratch.at(key_at))) return status;
    attention.query = query.at, attention.key = key.at, attention.value = value;
    attention.out = call.out ? attended : nullptr;
    attention.query_strides = {dim, query.stride}, attention.key_strides = {dim, key.stride}, attention.value_strides = {dim, width};
    if (int32_t status = shardline_attend(&attention); status || !call.out) return status;

    const char* all = together(attended, queries, call.first_attended, call.o->num_inputs);
    if (!all) return -1;
    if (int32_t status = multiply(*call.o, attention, all, normal)) return status;
    if (!(all = together(normal, call.o->num_outputs, call.first_o, hidden))) return -1;
    return add(call.x, all, call.after_attention, normal);
  }
  // The MLP, added to `out`.
  int32_t feed_forward() const {
    const int64_t inner = call.gate_up->num_outputs / 2;
    Scratch scratch(element_bytes);
    const int64_t normal_at = scratch.plan(rows * hidden), gates_at = scratch.plan(rows * 2 * inner);
    const int64_t inner_at = scratch.plan(rows * inner);
    scratch.take();
    char *normal = scratch.at(normal_at), *gates = scratch.at(gates_at), *gated = scratch.at(inner_at);

    const char* x = (const char*)call.out;
    if (int32_t status = normalize(x, call.before_mlp, normal)) return status;
    if (int32_t status = multiply(*call.gate_up, attention, x, gates)) return status;
    if (int32_t status = shardline_gate_mul(gates, gates + inner * element_bytes, gated, rows, inner, 2 * inner, 2 * inner,
                                            call.activation, dtype, threads))
      return status;
    const char* all = together(gated, inner, call.first_inner, call.down->num_inputs);
    if (!all) return -1;
    if (int32_t status = multiply(*call.down, attention, all, normal)) return status;
    if (!(all = together(normal, call.down->num_outputs, call.first_down, hidden))) return -1;
    return add(call.out, all, call.after_mlp, normal);
  }
  int32_t run() const {
    const int32_t status = call.qkv ? attend() : add(call.x, (const char*)call.mixed, call.after_attention, (char*)call.out);
    return status || !call.out ? status : feed_forward();
  }
};

}  // namespace

int32_t shardline_run_layer(const LayerCall* call) {
  AttentionCall& attention = *call->attention;
  const int64_t hidden = call->gate_up->num_inputs;
  return Layer{*call, attention, attention.num_rows, hidden, element_bytes(attention), attention.dtype, attention.num_threads}.run();
}

extern "C" int32_t shardline_layer_call_bytes() { return sizeof(LayerCall); }
