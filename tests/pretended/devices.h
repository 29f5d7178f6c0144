// What operators have to know of the devices.

#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <utility>

namespace pretended {

using at::Tensor;
using c10::DataPtr, c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey;
using c10::DispatchKeySet, c10::Storage, c10::StorageImpl, c10::Stream, c10::TensorImpl;
using MaybeTensor = std::optional<Tensor>;

// The device with an index. A device may be given without one, and is the current one then.
Device device_at(DeviceIndex index);

c10::Allocator* allocator();

// The random numbers that are drawn for a device where no generator is given.
at::Generator& default_generator(DeviceIndex index);

// The generator of the CPU that draws the numbers of a generator.
at::Generator inside(const at::Generator& generator);

// Memory of the CPU, which is a device's as long as it is used there.
template <typename Owner>
DataPtr on_device(Owner owner, void* data, Device device) {
  auto* held = new Owner(std::move(owner));
  return DataPtr(data, held, [](void* x) { delete static_cast<Owner*>(x); }, device);
}

}  // namespace pretended
