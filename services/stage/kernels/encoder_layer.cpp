// An encoder's layer as one call: queries, keys and values, attention, residual and norm, MLP, residual and norm. Each part is
// the library's own function that a layer made of modules calls, so a row has the same bits either way.

#include <cstdint>

#include "calls.h"
#include "layer_parts.h"

int32_t shardline_run_encoder_layer(const EncoderLayerCall* call) {
  AttentionCall& attention = *call->attention;
  const int64_t rows = attention.num_rows, hidden = call->qkv->num_inputs, inner = call->up->num_outputs;
  const int64_t width = attention.num_heads * attention.dim, bytes = element_bytes(attention);
  Scratch scratch(bytes);
  const int64_t qkv_at = scratch.plan(rows * 3 * width), attended_at = scratch.plan(rows * width);
  const int64_t normal_at = scratch.plan(rows * hidden), product_at = scratch.plan(rows * hidden);
  const int64_t inner_at = scratch.plan(rows * inner);
  scratch.take();
  char *qkv = scratch.at(qkv_at), *attended = scratch.at(attended_at), *normal = scratch.at(normal_at);
  char *product = scratch.at(product_at), *mlp = scratch.at(inner_at);
  auto normalize = [&](const void* x, const void* residual, const LayerNorm& norm, void* out) {
    return shardline_layer_norm(x, residual, &norm, out, rows, hidden, attention.dtype, attention.num_threads);
  };

  if (int32_t status = multiply(*call->qkv, attention, call->x, qkv)) return status;
  attention.query = qkv, attention.key = qkv + width * bytes, attention.value = qkv + 2 * width * bytes;
  attention.out = call->out ? attended : nullptr;
  attention.query_strides = attention.key_strides = attention.value_strides = {attention.dim, 3 * width};
  if (int32_t status = shardline_attend(&attention); status || !call->out) return status;
  if (int32_t status = multiply(*call->o, attention, attended, product)) return status;
  if (int32_t status = normalize(product, call->x, call->after_attention, normal)) return status;
  if (int32_t status = multiply(*call->up, attention, normal, mlp)) return status;
  if (int32_t status = shardline_gelu(mlp, mlp, rows, inner, inner, call->uses_tanh, attention.dtype, attention.num_threads))
    return status;
  if (int32_t status = multiply(*call->down, attention, mlp, product)) return status;
  return normalize(product, normal, call->after_mlp, call->out);
}

extern "C" int32_t shardline_encoder_layer_call_bytes() { return sizeof(EncoderLayerCall); }
