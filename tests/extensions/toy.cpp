// A test accelerator on torch's PrivateUse1: host memory under a device type of its own, with two devices.
//
// Memory, views and copies are native; every other operator runs on the CPU over copies. An operator that is given
// tensors of two devices is refused, as a GPU refuses it; a CPU scalar (no dimension) may mix, as it may there.

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/_local_scalar_dense_cpu_dispatch.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <unordered_set>

namespace {

constexpr c10::DeviceType TOY = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_DEVICES = 2;
constexpr std::size_t ALIGNMENT = 64;

thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> allocated_bytes[NUM_DEVICES];

struct Block {
  void* data;
  std::size_t size;
  c10::DeviceIndex device;
};

void* new_memory(std::size_t size) {
  void* data = std::aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  TORCH_CHECK(data != nullptr || size == 0, "toy: out of memory");
  return data;
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated_bytes[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    auto* block = new Block{new_memory(size), size, current_device};
    allocated_bytes[block->device] += size;
    return {block->data, block, &free_block, c10::Device(TOY, block->device)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};

// Host memory that counts as pinned: a set of the blocks that are.
std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

void free_pinned(void* data) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  pinned.erase(data);
  std::free(data);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void* data = new_memory(size);
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned.insert(data);
    return {data, data, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t size) const override { default_copy_data(to, from, size); }
};

DeviceMemory device_memory;
PinnedMemory pinned_memory;
REGISTER_ALLOCATOR(TOY, &device_memory);

c10::DeviceIndex exchange(c10::DeviceIndex index) {
  const auto before = current_device;
  if (index >= 0) {
    TORCH_CHECK(index < NUM_DEVICES, "toy: no device ", int(index));
    current_device = index;
  }
  return before;
}

// Every operator is done when it returns, so there is one stream, and nothing to wait for.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TOY; }
  c10::Device exchangeDevice(c10::Device device) const override { return {TOY, exchange(device.index())}; }
  c10::Device getDevice() const override { return {TOY, current_device}; }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange(device); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> guard(pinned_lock);
    return pinned.count(data) > 0;
  }
};

Hooks hooks;
const bool has_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

c10::DeviceIndex index_of(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_device;
}

void check_layout(std::optional<c10::Layout> layout, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::Layout::Strided, "toy: only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "toy: only CPU tensors can be pinned");
}

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin, std::optional<c10::MemoryFormat> format) {
  check_layout(layout, pin);
  const c10::DeviceGuard guard({TOY, index_of(device)});
  return at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout> layout, std::optional<c10::Device> device,
                         std::optional<bool> pin) {
  check_layout(layout, pin);
  const c10::DeviceGuard guard({TOY, index_of(device)});
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(dtype));
}

// The same memory as a CPU tensor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return at::cpu::_local_scalar_dense(on_host(tensor)); }

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }

at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }

at::Tensor& set_part(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                     c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

void check_device(const c10::OperatorHandle& op, const at::Tensor& tensor, std::optional<c10::Device>& seen) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return;
  if (!seen) seen = tensor.device();
  TORCH_CHECK(*seen == tensor.device(), op.schema().operator_name(), ": expected all tensors on one device, found ",
              *seen, " and ", tensor.device());
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> seen;
  for (const auto& value : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (value.isTensor()) check_device(op, value.toTensor(), seen);
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) check_device(op, tensor, seen);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        if (tensor) check_device(op, *tensor, seen);
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("resize_", resize);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("view", view);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Storage_storage_offset", set_part);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

extern "C" {
int toy_device_count() { return NUM_DEVICES; }
int toy_current_device() { return current_device; }
int toy_exchange_device(int index) { return exchange(static_cast<c10::DeviceIndex>(index)); }
int64_t toy_allocated_bytes(int index) { return allocated_bytes[index]; }
}
