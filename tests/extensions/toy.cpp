// A test accelerator on torch's PrivateUse1: host memory under a device type of its own, with two devices.
//
// Memory, views and copies are native; every other operator runs on the CPU over copies. An operator that is given
// tensors of two devices is refused, as a GPU refuses it; a CPU scalar (no dimension) may mix, as it may there.
//
// A non-blocking copy from or to pinned memory is done later, by the thread of its stream: whoever reads before an event
// has told of its end, or frees or writes what it still needs, has wrong bytes. Operators wait for their stream first.

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
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_set>
#include <vector>

namespace {

constexpr c10::DeviceType TOY = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex NUM_DEVICES = 2;
constexpr std::size_t ALIGNMENT = 64;
// The way in takes longer: a copy to the host that does not wait for it is seen.
constexpr std::chrono::microseconds TO_HOST_TIME{200}, TO_DEVICE_TIME{800};
constexpr int RUBBISH = 0xff;  // NaN in every dtype of activations

thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> allocated_bytes[NUM_DEVICES];

// The work of one stream: done in order, by a thread of its own. Never destroyed: its thread may wait for work.
class Queue {
 public:
  uint64_t push(std::function<void()> work) {
    std::lock_guard<std::mutex> guard(lock_);
    if (given_ == 0) std::thread([this] { run(); }).detach();
    works_.push_back(std::move(work));
    changed_.notify_all();
    return ++given_;
  }
  uint64_t last() {
    std::lock_guard<std::mutex> guard(lock_);
    return given_;
  }
  bool is_done(uint64_t number) {
    std::lock_guard<std::mutex> guard(lock_);
    return done_ >= number;
  }
  void wait(uint64_t number) {
    std::unique_lock<std::mutex> guard(lock_);
    changed_.wait(guard, [&] { return done_ >= number; });
  }
  void drain() { wait(last()); }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait(guard, [&] { return !works_.empty(); });
      auto work = std::move(works_.front());
      works_.pop_front();
      guard.unlock();
      work();
      guard.lock();
      ++done_;
      changed_.notify_all();
      guard.unlock();  // what the work held may take other locks when it goes
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> works_;
  uint64_t given_ = 0, done_ = 0;
};

// The default stream of each device, then those that were asked for.
struct Streams {
  std::mutex lock;
  std::vector<Queue*> queues;
  Streams() {
    for (int device = 0; device < NUM_DEVICES; ++device) queues.push_back(new Queue);
  }
  Queue& of(c10::DeviceIndex device, c10::StreamId id) {
    std::lock_guard<std::mutex> guard(lock);
    return *queues[id == 0 ? device : id];
  }
  Queue& of(const c10::Stream& stream) { return of(stream.device_index(), stream.id()); }
  c10::StreamId add() {
    std::lock_guard<std::mutex> guard(lock);
    queues.push_back(new Queue);
    return static_cast<c10::StreamId>(queues.size()) - 1;
  }
  void drain() {
    std::unique_lock<std::mutex> guard(lock);
    const auto all = queues;
    guard.unlock();
    for (Queue* queue : all) queue->drain();
  }
};

Streams& streams = *new Streams;
thread_local c10::StreamId current_stream[NUM_DEVICES];

// All work that an event waits for.
struct Recorded {
  Queue* queue;
  uint64_t number;
};

// What a test closes, to hold back copies to the host.
struct Gate {
  std::mutex lock;
  std::condition_variable changed;
  bool is_closed = false;
  void set(bool closed) {
    std::lock_guard<std::mutex> guard(lock);
    is_closed = closed;
    changed.notify_all();
  }
  void pass() {
    std::unique_lock<std::mutex> guard(lock);
    changed.wait(guard, [&] { return !is_closed; });
  }
};

Gate& to_host_gate = *new Gate;

void wait_for_stream(c10::DeviceIndex device) { streams.of(device, current_stream[device]).drain(); }

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
  // As a caching allocator reuses it: behind what the default stream was given, whatever other streams still do.
  streams.of(block->device, 0).drain();
  if (block->data != nullptr) std::memset(block->data, RUBBISH, block->size);
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

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TOY; }
  c10::Device exchangeDevice(c10::Device device) const override { return {TOY, exchange(device.index())}; }
  c10::Device getDevice() const override { return {TOY, current_device}; }
  void setDevice(c10::Device device) const override { exchange(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream[device.index()]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, streams.add());
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const auto before = getStream(stream.device());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    Queue& queue = streams.of(stream);
    return queue.is_done(queue.last());
  }
  void synchronizeStream(const c10::Stream& stream) const override { streams.of(stream).drain(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { streams.drain(); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Queue& queue = streams.of(stream);
    delete static_cast<Recorded*>(*event);
    *event = new Recorded{&queue, queue.last()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto recorded = *static_cast<Recorded*>(event);
    streams.of(stream).push([recorded] { recorded.queue->wait(recorded.number); });
  }
  bool queryEvent(void* event) const override {
    const auto* recorded = static_cast<Recorded*>(event);
    return recorded == nullptr || recorded->queue->is_done(recorded->number);
  }
  void synchronizeEvent(void* event) const override {
    const auto recorded = *static_cast<Recorded*>(event);
    recorded.queue->wait(recorded.number);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }
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

bool is_later(const at::Tensor& from, const at::Tensor& to) {
  const at::Tensor& host = from.is_cpu() ? from : to;
  return host.is_cpu() && hooks.isPinnedPtr(host.storage().data()) && from.scalar_type() == to.scalar_type() &&
         from.sizes() == to.sizes() && from.is_contiguous() && to.is_contiguous();
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const auto device = from.is_cpu() ? to.device().index() : from.device().index();
  if (!non_blocking || !is_later(from, to)) {
    wait_for_stream(device);
    on_host(to).copy_(on_host(from));
    return to;
  }
  // Pinned memory stays, as torch's allocator of it cares for; the device's may be freed too early.
  const bool is_to_host = to.is_cpu();
  const c10::Storage host = is_to_host ? to.storage() : from.storage();
  streams.of(device, current_stream[device])
      .push([host, is_to_host, to = to.data_ptr(), from = from.data_ptr(), size = from.nbytes()] {
        std::this_thread::sleep_for(is_to_host ? TO_HOST_TIME : TO_DEVICE_TIME);
        if (is_to_host) to_host_gate.pass();
        std::memcpy(to, from, size);
      });
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  wait_for_stream(tensor.device().index());
  return at::cpu::_local_scalar_dense(on_host(tensor));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  wait_for_stream(self.device().index());
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
  wait_for_stream(seen && !seen->is_cpu() ? seen->index() : current_device);
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
void toy_synchronize() { streams.drain(); }
void toy_hold_copies_to_host(int is_held) { to_host_gate.set(is_held != 0); }
}
