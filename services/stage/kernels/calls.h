// What the library is asked: one structure for each call, which kernel.py mirrors field by field, and the functions that
// take them. Knows no instruction.

#pragma once

#include <cstdint>

extern "C" {

enum Dtype : int32_t { kFloat32, kBFloat16, kFloat16 };
enum GateActivation : int32_t { kSilu, kGelu, kGeluTanh };
enum Weights : int32_t { kFloat32Weights, kBFloat16Weights, kInt8Weights, kInt4Weights, kGroupedInt8Weights };

struct Strides { int64_t attention_head, row; };  // elements; the dimensions of one attention head are dense

struct AttentionCall {
  const void *query, *key, *value;
  void *out, *keys, *values;  // no out: keys and values are written, nothing attends
  const int32_t *sequence, *position, *table;
  const float *sinks, *bias;
  Strides query_strides, key_strides, value_strides;
  int32_t num_rows, num_sequences, table_width, num_blocks;
  int32_t num_heads, num_kv_heads, dim, value_dim;
  int32_t window;  // 0: none
  int32_t chunk;  // a row sees no key before the last position that divides by it, up to its own; 0: none
  int32_t dtype, num_threads;
  int32_t both_ways;  // each row sees all keys of its sequence's rows, which begin at position 0; a window goes both ways
  int32_t bias_reach;  // bias: [num_heads][2 * bias_reach + 16], added to scores by key - row, from -bias_reach on; no window
  float scale, softcap;
};

struct AdapterStep;

// Rows of x and out are `x_stride` and `out_stride` elements apart: float32 with such weights, else bfloat16. `scales` and
// `column_sums` are of int8 weights: what an output's integers are multiplied by, and their sum; those in groups have scales,
// too, of outputs beside those of their groups (group_steps.h): in 4 bits up to `first_int8`, whole columns of 16, in 8 bits
// from there on, the former with minimums of groups or, where `has_zeros`, these divided by the scale: zero points, negative.
// `bias` may be null. So may `x_rows`: which rows of x are meant; `out_rows`: to which rows of out results are added;
// `x_order`: of weights in groups, which input of a row stands at each place of theirs; and `adapters`.
struct ProductCall {
  const void *x, *weights;
  void* out;
  const float *bias, *scales;
  const int32_t *column_sums, *x_rows, *out_rows, *x_order;
  const AdapterStep* adapters;
  int64_t num_rows, num_inputs, num_outputs, first_int8, x_stride, out_stride;
  int32_t kind, num_threads, number;  // among the products that adapters know
  int32_t has_zeros;
};

// What an adapter adds to outputs of a product, from `first_output` on: up(down(x)), both packed as products are.
struct LowRankPart {
  const ProductCall *down, *up;
  int64_t first_output;
};

// The rows of a step that have an adapter, ascending. To product p it adds `parts` from begins[p] to begins[p + 1].
struct AdapterRows {
  const LowRankPart* parts;
  const int32_t *begins, *rows;
  int64_t num_rows;
};

// One for all products of a shard.
struct AdapterStep {
  const AdapterRows* groups;
  int64_t num_groups;
};

// RMSNorm by float32 weights, offset included. Without weights there is no norm.
struct Norm {
  const float* weight;
  float eps;
  int32_t rounds_first;
};

// LayerNorm by float32 weights and biases.
struct LayerNorm {
  const float *weight, *bias;
  float eps;
};

// How positions turn attention heads: by cos and sin, [num_rows][dim], dense, in the dtype of what is turned or float32. Of
// the first `dim` dimensions of a head the second half turns with the first, or each odd one with its neighbor before it, by
// the first halves of the tables. The others stay; where `dim` is 0, all.
struct Turned {
  const void *cos, *sin;
  int32_t dim, dtype, neighbors;
};

// One process's place among those that compute a layer together, on one host. `arrived` and both buffers, which follow
// one another, are memory that all of them map; `arrived` has a cache line for each.
struct Ranks {
  void *arrived, *buffers;
  int64_t buffer_bytes, num_meetings;
  int32_t rank, num_ranks;
};

// A decoder layer, x [num_rows][hidden] to `out` of the same size, dense, in the attention's dtype, with its rows and
// threads. qkv and gate_up are products of several layers side by side. With no out it ends when keys and values are
// written. With ranks each computes its share of the attention heads and of every product's outputs: those of o and down,
// and the inputs of both, come together, where each rank's have a first place in a row. Without qkv the call begins behind
// what mixes tokens: `mixed`, of the size of x, takes the place of o's outputs.
struct LayerCall {
  const void *x, *mixed;
  void* out;
  Turned turned;
  ProductCall *qkv, *o, *gate_up, *down;
  AttentionCall* attention;
  Norm before_attention, query_norm, key_norm, after_attention, before_mlp, after_mlp;
  Ranks* ranks;
  int64_t first_attended, first_o, first_inner, first_down;
  int32_t norms_all_heads;  // as one row; else each of queries and keys by itself
  int32_t norms_turned;     // queries and keys that are turned already
  int32_t activation;       // a GateActivation
  float residual_scale;     // of what attention and MLP add
};

// An encoder's layer, x [num_rows][hidden] to `out` of the same size, dense, in the attention's dtype, with its rows and
// threads. qkv is a product of three layers side by side. With no out it ends when keys and values are written.
struct EncoderLayerCall {
  const void* x;
  void* out;
  ProductCall *qkv, *o, *up, *down;
  AttentionCall* attention;
  LayerNorm after_attention, after_mlp;
  int32_t uses_tanh;  // its GELU
};

// Which rows of a step belong together: those from begins[i] to begins[i + 1] are of the sequence with its state in slot
// slots[i], which is empty before them where is_new[i]. No two sequences have one slot.
struct StateRows {
  const int32_t *begins, *slots, *is_new;
  int32_t num_sequences, num_threads;
};

// A causal convolution of each channel, `width` tokens wide: out = after * silu(bias + sum of weight * (before * x)), where
// `before`, `after` and `bias` may be null and silu is left out unless `activates`. x, before and after: rows `x_stride`
// elements apart; out is dense. weight: [width][channels]; state: [slots][width - 1][channels], the last inputs, oldest first.
struct ConvolutionCall {
  StateRows rows;
  const void *x, *before, *after;
  void *out, *state;
  const float *weight, *bias;
  int64_t num_channels, x_stride;
  int32_t width, activates, dtype;
};

// Mamba-2's recurrence. x [heads][dim], b and c [groups][states]: rows `x_stride` elements apart; dt [heads]: `dt_stride`.
// decay, skip and dt_bias: [heads]. out: [rows][heads][dim], dense. state: [slots][heads][dim][states as full vectors].
struct ScanCall {
  StateRows rows;
  const void *x, *b, *c, *dt;
  float *out, *state;
  const float *decay, *skip, *dt_bias;
  int64_t x_stride, dt_stride;
  int32_t num_heads, dim, num_groups, num_states, dtype;
  float least_dt, most_dt;
};

// The gated delta rule. query and key [key heads][key dim], value [heads][value dim]: rows `x_stride` elements apart; a and b
// [heads]: `a_stride`. decay and dt_bias: [heads]. out: [rows][heads][value dim], dense. state: [slots][heads][key dim][value
// dim as full vectors].
struct DeltaCall {
  StateRows rows;
  const void *query, *key, *value, *a, *b;
  float *out, *state;
  const float *decay, *dt_bias;
  int64_t x_stride, a_stride;
  int32_t num_key_heads, num_heads, key_dim, value_dim, dtype;
  float most_learned;  // what a token corrects at most, 1 or more
};

// RMSNorm of groups of a row with a gate: x [rows][groups][dim], dense; gate: rows `gate_stride` elements apart, of the
// dtype of out, which is dense. The gate's silu is multiplied before the norm, or behind it, or there is no norm.
enum GateOrder : int32_t { kGateFirst, kNormFirst, kGateAlone };
struct GateCall {
  const float *x, *weight;  // [groups][dim], or [dim] for all groups
  const void* gate;
  void* out;
  int64_t num_rows, num_groups, dim, gate_stride, weight_stride;
  int32_t order, dtype, num_threads;
  float eps;
};

// All return 0, or -1 for what they do not know; attention and layers also 1 + the first row that points outside its tables.
int32_t shardline_attend(const AttentionCall* call);
int32_t shardline_multiply(const ProductCall* call);
int32_t shardline_run_layer(const LayerCall* call);
int32_t shardline_run_encoder_layer(const EncoderLayerCall* call);

int32_t shardline_convolve(const ConvolutionCall* call);
int32_t shardline_scan(const ScanCall* call);
int32_t shardline_apply_delta(const DeltaCall* call);
int32_t shardline_gate(const GateCall* call);
// Finds weights in 4 bits, numbers * scales + minimums, for groups of 32 values: numbers [num_groups][32], scales and
// minimums [num_groups]. The values of a grid of 4 bits, rounded to bfloat16, find their grid.
int32_t shardline_fit_int4(const float* values, uint8_t* numbers, float* scales, float* minimums, int64_t num_groups, int32_t num_threads);

// Waits until every rank has come here as often as this one. What a rank wrote before, the others read behind it: into
// buffer num_meetings % 2, as it is before the call. It is written again after the next meeting at the earliest.
int32_t shardline_meet(Ranks* ranks);

// x: rows of `num_groups` vectors of `dim` elements, rows `stride` elements apart; out is dense.
int32_t shardline_rms_norm(const void* x, const Norm* norm, void* out, int64_t num_rows, int64_t num_groups, int64_t dim,
                           int64_t stride, int32_t dtype, int32_t num_threads);
// x, and out, too: dense rows of `dim` elements, which lose their mean. Where `residual`, of the same size, is not null,
// what is normalized is its sum with x in the stored type.
int32_t shardline_layer_norm(const void* x, const void* residual, const LayerNorm* norm, void* out, int64_t num_rows,
                             int64_t dim, int32_t dtype, int32_t num_threads);
// x: rows of `dim` elements `stride` elements apart; out is dense.
int32_t shardline_gelu(const void* x, void* out, int64_t num_rows, int64_t dim, int64_t stride, int32_t uses_tanh,
                       int32_t dtype, int32_t num_threads);
int32_t shardline_gate_mul(const void* gate, const void* up, void* out, int64_t num_rows, int64_t dim, int64_t gate_stride,
                           int64_t up_stride, int32_t activation, int32_t dtype, int32_t num_threads);
// x: rows of `num_heads` heads of `dim` elements, rows `stride` elements apart; out is dense.
int32_t shardline_rotate(const void* x, const Turned* turned, void* out, int64_t num_rows, int64_t num_heads, int64_t dim,
                         int64_t stride, int32_t dtype, int32_t num_threads);
// out = x + scale * y, dense rows all.
int32_t shardline_add(const void* x, const void* y, float scale, void* out, int64_t num_rows, int64_t dim, int32_t dtype,
                      int32_t num_threads);

}
