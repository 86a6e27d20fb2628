// Products of packed rows with packed weights, out = x @ weight.T + bias: bfloat16 on AMX, int8 from AVX2 on.
// Plain C ABI at the end of the file; build.py builds it into one library with attention.cpp.
//
// Same promise as attention.cpp: a row's bits depend on that row only, whatever runs beside it, on however many threads.
//   - A sum over the inputs runs in one order for every row: tile after tile of 64 bytes of them, never cut in two.
//   - int8 sums are integers, exact in any order, so they also have the same bits with every instruction set.
//
// Memory: a tile is 16 rows of 64 bytes. Weights lie as [16 outputs][64 bytes of inputs][16][64], a tile's row holding 4
// bytes of each of the 16 outputs, which is what the tile and VNNI instructions read. Rows of x are packed as
// [16 rows][64 bytes of inputs][16][64]. What sticks out is filled with zeros.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "amx.h"
#include "simd.h"

namespace {

constexpr int kTileRows = 16, kRowBytes = 64, kTileBytes = kTileRows * kRowBytes;
constexpr int kRowsAtOnce = 2 * kTileRows;
constexpr int64_t kPackedBytes = 3 << 19;  // of rows that stay in a core's L2 while all weights pass by
constexpr int kAhead = 4 * kTileBytes;     // how far ahead weights are prefetched into L1

inline int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }

}  // namespace

extern "C" {

enum Level : int32_t { kPortable, kVnni, kAmx };
enum Kind : int32_t { kBFloat16Weights, kInt8Weights };

// Rows of x and out are `x_stride` and `out_stride` elements apart, all bfloat16. `scales` and `column_sums` are of int8
// weights: what an output's integers are multiplied by, and their sum. `bias` may be null.
struct ProductCall {
  const void *x, *weights;
  void* out;
  const float *bias, *scales;
  const int32_t* column_sums;
  int64_t num_rows, num_inputs, num_outputs, x_stride, out_stride;
  int32_t kind, level, num_threads;
};

}

namespace {

union Sums {  // of kRowsAtOnce rows and 16 outputs
  alignas(64) float floats[kRowsAtOnce][16];
  int32_t integers[kRowsAtOnce][16];
};

// ---------------------------------------------------------------- sums of a block: up to 32 rows, 16 outputs

struct Block {
  const char* x;        // two tiles wide
  int64_t tile_stride;
  const char* weights;
  int64_t steps;
  int rows;
  const char* ahead;    // weights that are prefetched: those that come next
  int lines;            // of 64 bytes, in each step
  bool is_near;         // they are this block's own
};

#ifdef __AMX_TILE__
amx::Shapes shapes() {
  amx::Shapes shapes;
  for (int tile = 0; tile < 4; tile++) shapes.set(tile, kTileRows, kRowBytes);
  return shapes;
}

template <int32_t kind, int sum> inline void product() {
  if constexpr (kind == kInt8Weights) amx::product_int8<sum, 3, 2>(); else amx::product<sum, 3, 2>();
}

// Four tiles and no more: two sums, one of weights, one of rows. A block of 2 x 2 tiles in eight gains little at best, and
// at times takes twice as long, for the same arithmetic 130 ns against 55 (docs/decisions/own-products.md).
template <int32_t kind> void tile_sums(const Block& block, Sums& sums) {
  const bool both = block.rows > kTileRows;
  const char *x = block.x, *w = block.weights, *ahead = block.ahead;
  amx::zero<0>();
  amx::zero<1>();
  for (int64_t step = 0; step < block.steps; step++, x += kTileBytes, w += kTileBytes, ahead += block.lines * 64) {
    if (block.is_near) for (int line = 0; line < 16; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T0);
    else for (int line = 0; line < block.lines; line++) _mm_prefetch(ahead + line * 64, _MM_HINT_T1);
    amx::load<2>(w, kRowBytes);
    amx::load<3>(x, kRowBytes);
    product<kind, 0>();
    if (!both) continue;
    amx::load<3>(x + block.tile_stride, kRowBytes);
    product<kind, 1>();
  }
  amx::store<0>(&sums, kRowBytes);
  if (both) amx::store<1>(sums.integers[kTileRows], kRowBytes);
}
#endif

#ifdef __AVX512F__
// Rows as unsigned bytes, each 128 too much: `write` takes 128 times the sum of the weights off again.
__attribute__((target("avx512vnni"))) void vnni_sums(const Block& block, Sums& sums) {
  const char *x = block.x, *w = block.weights;
  for (int first = 0; first < block.rows; first += kTileRows, x += block.tile_stride) {
    __m512i sum[kTileRows] = {};
    for (int64_t step = 0; step < block.steps; step++) {
      for (int at = 0; at < kTileRows; at++) {
        const __m512i weight = _mm512_load_si512(w + step * kTileBytes + at * kRowBytes);
        _mm_prefetch(w + step * kTileBytes + at * kRowBytes + kAhead, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int row = 0; row < kTileRows; row++) {
          const int32_t four = read<int32_t>(x + step * kTileBytes + row * kRowBytes + at * 4);
          sum[row] = _mm512_dpbusd_epi32(sum[row], _mm512_set1_epi32(four), weight);
        }
      }
    }
    for (int row = 0; row < kTileRows; row++) _mm512_store_si512(sums.integers[first + row], sum[row]);
  }
}
#endif

// Pairs of products fit 16 bits, since neither factor is -128.
void portable_sums(const Block& block, Sums& sums) {
  constexpr int kRows = 4;  // whose sums fit in registers
  const __m256i ones = _mm256_set1_epi16(1);
  for (int first = 0; first < block.rows; first += kRows) {
    const char* tiles = block.x + first / kTileRows * block.tile_stride + first % kTileRows * kRowBytes;
    __m256i sum[kRows][2] = {};
    for (int64_t at = 0; at < block.steps * kTileRows; at++) {
      const char* from = tiles + at / kTileRows * kTileBytes + at % kTileRows * 4;
      for (int half = 0; half < 2; half++) {
        const __m256i weight = _mm256_load_si256((const __m256i*)(block.weights + at * kRowBytes + half * 32));
#pragma GCC unroll 4
        for (int row = 0; row < kRows; row++) {
          const __m256i four = _mm256_set1_epi32(read<int32_t>(from + row * kRowBytes));
          const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(four), _mm256_sign_epi8(weight, four));
          sum[row][half] = _mm256_add_epi32(sum[row][half], _mm256_madd_epi16(pairs, ones));
        }
      }
    }
    for (int row = 0; row < kRows; row++)
      for (int half = 0; half < 2; half++) std::memcpy(sums.integers[first + row] + half * 8, &sum[row][half], 32);
  }
}

// ---------------------------------------------------------------- rows in, rows out

// Rows that are packed and stay in cache while all weights pass by.
struct Panel {
  int64_t steps, tile_stride, most_rows;
  char* tiles;
  float* scales;  // int8: what each row's integers are multiplied by

  explicit Panel(const ProductCall& call) {
    steps = ceil_div(call.num_inputs * (call.kind == kInt8Weights ? 1 : 2), kRowBytes);
    tile_stride = steps * kTileBytes;
    most_rows = std::max<int64_t>(kPackedBytes / (steps * kRowBytes) / kRowsAtOnce, 1) * kRowsAtOnce;
    most_rows = std::min(ceil_div(call.num_rows, kRowsAtOnce) * kRowsAtOnce, most_rows);
    static thread_local std::vector<char> memory;  // kept: its pages need not be found again in each call
    const size_t bytes = kRowBytes + most_rows / kTileRows * tile_stride + most_rows * sizeof(float);
    if (memory.size() < bytes) memory.resize(bytes);
    tiles = memory.data() + (kRowBytes - (uintptr_t)memory.data() % kRowBytes) % kRowBytes;
    scales = (float*)(tiles + most_rows / kTileRows * tile_stride);
  }
  char* row(int64_t i) const { return tiles + i / kTileRows * tile_stride + i % kTileRows * kRowBytes; }
};

void pack_bfloat16(const ProductCall& call, const Panel& panel, const BFloat16* x, int64_t i) {
  const int64_t bytes = x ? call.num_inputs * 2 : 0;
  for (int64_t step = 0; step < panel.steps; step++) {
    char* to = panel.row(i) + step * kTileBytes;
    const int64_t count = std::clamp<int64_t>(bytes - step * kRowBytes, 0, kRowBytes);
    if (count < kRowBytes) std::memset(to, 0, kRowBytes);
    if (count == kRowBytes) std::memcpy(to, (const char*)x + step * kRowBytes, kRowBytes);
    else if (count) std::memcpy(to, (const char*)x + step * kRowBytes, count);
  }
}

struct Range { float top, poison; };  // of a row: its largest absolute value; NaN if one of them is not finite, else 0

Range range_of(const BFloat16* x, int64_t dim) {
  Floats largest = broadcast(0.f), poison = broadcast(0.f);
  for (int64_t k = 0; k < dim; k += kWidth) {
    const Floats value = load_first(x + k, (int)std::min<int64_t>(kWidth, dim - k));
    largest = larger((Floats)((Bits)value & 0x7fffffffu), largest);
    poison += value * 0.f;
  }
  float tops[kWidth], poisons[kWidth];
  store(tops, largest);
  store(poisons, poison);
  Range range = {0.f, 0.f};
  for (int lane = 0; lane < kWidth; lane++) range = {std::max(range.top, tops[lane]), range.poison + poisons[lane]};
  return range;
}

// A row becomes integers from -127 to 127. A value that is not finite makes all outputs of its row NaN.
void pack_int8(const ProductCall& call, const Panel& panel, const BFloat16* x, int64_t i) {
  const Range range = x ? range_of(x, call.num_inputs) : Range{0.f, 0.f};
  const bool is_zero = !(range.top > 0.f) || range.poison != 0.f;
  panel.scales[i] = range.top / 127.f + range.poison;
  const Floats inverse = broadcast(is_zero ? 0.f : 127.f / range.top), to_integer = broadcast(12582912.f);
  const int32_t offset = call.level == kVnni ? 128 : 0;
  for (int64_t step = 0; step < panel.steps; step++) {
    alignas(64) int32_t integers[kRowBytes];
    for (int lane = 0; lane < kRowBytes; lane += kWidth) {
      const int64_t at = step * kRowBytes + lane, count = is_zero ? 0 : std::clamp<int64_t>(call.num_inputs - at, 0, kWidth);
      const Floats value = count ? load_first(x + at, (int)count) * inverse : broadcast(0.f);
      const Bits integer = (Bits)(value + to_integer) - (Bits)to_integer + (uint32_t)offset;
      std::memcpy(integers + lane, &integer, sizeof integer);
    }
    char* to = panel.row(i) + step * kTileBytes;
    for (int lane = 0; lane < kRowBytes; lane++) to[lane] = (char)integers[lane];
  }
}

Floats scaled(const ProductCall& call, const int32_t* sums, int64_t output) {
  const int32_t offset = call.level == kVnni ? 128 : 0;
  float values[kWidth];
  for (int lane = 0; lane < kWidth; lane++) values[lane] = (float)(sums[lane] - offset * call.column_sums[output + lane]);
  return load(values) * load(call.scales + output);
}

// Writes the block's outputs: of `rows` rows that begin at `first` of all and at `in_panel` of the panel, and 16 columns.
void write(const ProductCall& call, const Panel& panel, const Sums& sums, int64_t first, int64_t in_panel, int rows, int64_t output) {
  for (int row = 0; row < rows; row++) {
    BFloat16* out = (BFloat16*)call.out + (first + row) * call.out_stride;
    for (int at = 0; at < 16 && output + at < call.num_outputs; at += kWidth) {
      Floats value = load(sums.floats[row] + at);
      if (call.kind == kInt8Weights) value = scaled(call, sums.integers[row] + at, output + at) * panel.scales[in_panel + row];
      if (call.bias) value += load(call.bias + output + at);
      store_first(out + output + at, value, (int)std::min<int64_t>(kWidth, call.num_outputs - output - at));
    }
  }
}

// A panel of rows passes by the weights of 16 outputs 32 rows at a time. The first pass prefetches its own weights, the
// others those of the next 16 outputs, so that memory is read while they compute.
Block block_of(const Panel& panel, const char* weights, int64_t first, int64_t rows) {
  const int64_t passes = ceil_div(rows, kRowsAtOnce), pass = first / kRowsAtOnce;
  Block block = {panel.row(first), panel.tile_stride, weights, panel.steps, (int)std::min<int64_t>(kRowsAtOnce, rows - first),
                 weights + kAhead, 16, true};
  if (pass == 0) return block;
  block.is_near = false;
  block.lines = (int)ceil_div(16, passes - 1);
  block.ahead = weights + panel.tile_stride + (pass - 1) * panel.steps * block.lines * 64;
  if ((pass - 1) * block.lines >= 16) block.lines = 0;
  return block;
}

void block_sums(const ProductCall& call, const Block& block, Sums& sums) {
#ifdef __AMX_TILE__
  if (call.kind == kBFloat16Weights) return tile_sums<kBFloat16Weights>(block, sums);
  if (call.level == kAmx) return tile_sums<kInt8Weights>(block, sums);
#endif
#ifdef __AVX512F__
  if (call.level == kVnni) return vnni_sums(block, sums);
#endif
  portable_sums(block, sums);
}

void multiply(const ProductCall& call) {
  const Panel panel(call);
  const int64_t num_columns = ceil_div(call.num_outputs, 16);
#pragma omp parallel num_threads(call.num_threads)
  {
#ifdef __AMX_TILE__
    amx::Session tiles(shapes());
#endif
    for (int64_t first = 0; first < call.num_rows; first += panel.most_rows) {
      const int64_t rows = std::min(panel.most_rows, call.num_rows - first);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < ceil_div(rows, kTileRows) * kTileRows; i++) {
        const BFloat16* x = i < rows ? (const BFloat16*)call.x + (first + i) * call.x_stride : nullptr;
        if (call.kind == kInt8Weights) pack_int8(call, panel, x, i); else pack_bfloat16(call, panel, x, i);
      }
#pragma omp for schedule(static)
      for (int64_t column = 0; column < num_columns; column++) {
        const char* weights = (const char*)call.weights + column * panel.tile_stride;
        for (int64_t i = 0; i < rows; i += kRowsAtOnce) {
          const Block block = block_of(panel, weights, i, rows);
          Sums sums;
          block_sums(call, block, sums);
          write(call, panel, sums, first + i, i, block.rows, column * 16);
        }
      }
    }
  }
}

}  // namespace

extern "C" {

int32_t shardline_product_call_bytes() { return sizeof(ProductCall); }

// The highest level that this library and the processor offer. The variant for AMX is loaded only where there are tiles.
int32_t shardline_product_level() {
#if defined(__AMX_TILE__)
  return kAmx;
#elif defined(__AVX512F__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni") ? kVnni : kPortable;
#else
  return kPortable;
#endif
}

// Packs weights: [num_outputs][num_bytes], rows dense, to [16 outputs][64 bytes][16][16 outputs][4 bytes].
int32_t shardline_pack_weights(const void* weights, void* packed, int64_t num_outputs, int64_t num_bytes) {
  const int64_t steps = ceil_div(num_bytes, kRowBytes), tile_stride = steps * kTileBytes;
  std::memset(packed, 0, ceil_div(num_outputs, 16) * tile_stride);
  for (int64_t output = 0; output < num_outputs; output++) {
    const char* from = (const char*)weights + output * num_bytes;
    char* to = (char*)packed + output / 16 * tile_stride + output % 16 * 4;
    for (int64_t at = 0; at < num_bytes; at += 4)
      std::memcpy(to + at * 16, from + at, std::min<int64_t>(4, num_bytes - at));
  }
  return 0;
}

// Returns 0, or -1 for a level that this library does not have, or not for this kind of weights.
int32_t shardline_multiply(const ProductCall* call) {
  if (call->level > shardline_product_level() || (call->kind == kBFloat16Weights && call->level != kAmx)) return -1;
  multiply(*call);
  return 0;
}

}
