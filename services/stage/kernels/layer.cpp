// A decoder layer as one call: norm, queries, keys and values, rotary positions, attention, residual, norm, MLP, residual.
// Each part is the library's own function that a layer made of modules calls, so a row has the same bits either way.

#include <cstdint>
#include <cstring>

#include "calls.h"
#include "layer_parts.h"

namespace {

struct Layer {
  const LayerCall& call;
  AttentionCall& attention;
  int64_t rows, hidden, element_bytes;
  int32_t dtype, threads;

  int32_t normalize(const void* x, const Norm& norm, void* out) const {
    return shardline_rms_norm(x, &norm, out, rows, 1, hidden, hidden, dtype, threads);
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
  // Normalizes attention heads if the model does, then turns them: x, rows `stride` elements apart, to `out`, dense.
  int32_t position(const void* x, int64_t heads, int64_t stride, const Norm& norm, void* normal, void* out) const {
    if (norm.weight) {
      if (int32_t status = shardline_rms_norm(x, &norm, normal, rows, heads, attention.dim, stride, dtype, threads)) return status;
      x = normal, stride = heads * attention.dim;
    }
    return shardline_rotate(x, call.cos, call.sin, out, rows, heads, attention.dim, stride, dtype, threads);
  }

  int32_t run() const {
    const int64_t dim = attention.dim, queries = attention.num_heads * dim, keys = attention.num_kv_heads * dim;
    const int64_t width = call.qkv->num_outputs, inner = call.gate_up->num_outputs / 2;
    Scratch scratch(element_bytes);
    const int64_t normal_at = scratch.plan(rows * hidden), qkv_at = scratch.plan(rows * width);
    const int64_t query_at = scratch.plan(rows * queries), key_at = scratch.plan(rows * keys);
    const int64_t attended_at = scratch.plan(rows * queries), gates_at = scratch.plan(rows * 2 * inner);
    const int64_t inner_at = scratch.plan(rows * inner);
    scratch.take();
    char *normal = scratch.at(normal_at), *qkv = scratch.at(qkv_at), *query = scratch.at(query_at), *key = scratch.at(key_at);
    char *attended = scratch.at(attended_at), *gates = scratch.at(gates_at), *gated = scratch.at(inner_at);

    if (int32_t status = normalize(call.x, call.before_attention, normal)) return status;
    if (int32_t status = multiply(*call.qkv, attention, normal, qkv)) return status;
    char *raw_key = qkv + queries * element_bytes, *value = raw_key + keys * element_bytes;
    if (int32_t status = position(qkv, attention.num_heads, width, call.query_norm, attended, query)) return status;
    if (int32_t status = position(raw_key, attention.num_kv_heads, width, call.key_norm, attended, key)) return status;
    attention.query = query, attention.key = key, attention.value = value;
    attention.out = call.out ? attended : nullptr;
    attention.query_strides = {dim, queries}, attention.key_strides = {dim, keys}, attention.value_strides = {dim, width};
    if (int32_t status = shardline_attend(&attention); status || !call.out) return status;

    char* all = together(attended, queries, call.first_attended, call.o->num_inputs);
    if (!all) return -1;
    if (int32_t status = multiply(*call.o, attention, all, normal)) return status;
    if (!(all = together(normal, call.o->num_outputs, call.first_o, hidden))) return -1;
    if (int32_t status = shardline_add(call.x, all, call.out, rows, hidden, dtype, threads)) return status;
    if (int32_t status = normalize(call.out, call.before_mlp, normal)) return status;
    if (int32_t status = multiply(*call.gate_up, attention, normal, gates)) return status;
    if (int32_t status = shardline_silu_mul(gates, gates + inner * element_bytes, gated, rows, inner, 2 * inner, 2 * inner, dtype, threads))
      return status;
    if (!(all = together(gated, inner, call.first_inner, call.down->num_inputs))) return -1;
    if (int32_t status = multiply(*call.down, attention, all, normal)) return status;
    if (!(all = together(normal, call.down->num_outputs, call.first_down, hidden))) return -1;
    return shardline_add(call.out, all, call.out, rows, hidden, dtype, threads);
  }
};

}  // namespace

int32_t shardline_run_layer(const LayerCall* call) {
  AttentionCall& attention = *call->attention;
  const int64_t hidden = call->qkv->num_inputs;
  return Layer{*call, attention, attention.num_rows, hidden, element_bytes(attention), attention.dtype, attention.num_threads}.run();
}

extern "C" int32_t shardline_layer_call_bytes() { return sizeof(LayerCall); }
