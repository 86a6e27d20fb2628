// What calls of whole layers have in common: memory between the parts of a layer, and products of all its rows.

#pragma once

#include <cstdint>
#include <vector>

#include "calls.h"

namespace {

// Memory between the parts of one layer, kept by the thread: its pages need not be found again in each call.
class Scratch {
 public:
  explicit Scratch(int64_t element_bytes) : element_bytes_(element_bytes) {}

  // Room for so many elements from now on, on a line of its own.
  int64_t plan(int64_t elements) {
    const int64_t begin = bytes_;
    bytes_ += (elements * element_bytes_ + kLine - 1) / kLine * kLine;
    return begin;
  }
  void take() {
    static thread_local std::vector<char> memory;
    if ((int64_t)memory.size() < bytes_ + kLine) memory.resize(bytes_ + kLine);
    base_ = memory.data() + (kLine - (uintptr_t)memory.data() % kLine) % kLine;
  }
  char* at(int64_t begin) const { return base_ + begin; }

 private:
  static constexpr int64_t kLine = 64;
  int64_t element_bytes_, bytes_ = 0;
  char* base_ = nullptr;
};

inline int64_t element_bytes(const AttentionCall& attention) { return attention.dtype == kFloat32 ? 4 : 2; }

// The product of dense rows, as many as attention has, to dense rows.
inline int32_t multiply(ProductCall& product, const AttentionCall& attention, const void* x, void* out) {
  product.x = x, product.out = out;
  product.num_rows = attention.num_rows, product.x_stride = product.num_inputs, product.out_stride = product.num_outputs;
  product.num_threads = attention.num_threads;
  return shardline_multiply(&product);
}

}  // namespace
