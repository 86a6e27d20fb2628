// Lets fake tensors on `cuda` be indexed by a build of torch without CUDA, which has no guard for that device type.

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;

const bool is_set = [] {
  auto& registered = c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
  const c10::impl::DeviceGuardImplInterface* none = nullptr;
  return registered.compare_exchange_strong(none, &guard);
}();

}  // namespace
