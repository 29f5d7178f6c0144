// Two CUDA devices for builds of PyTorch without CUDA, whose memory and operators are the CPU's.
//
// Tensors on them are CUDA tensors in all that PyTorch decides by the device: dispatch, autocast, the
// thread in which autograd runs a node, streams, random numbers, and the refusal to mix devices.
// Nothing waits: all is done when a call returns.
//
// The library has to be loaded before PyTorch's Python module, which looks for CUDA once.

#include "devices.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace pretended {

namespace {

const DeviceIndex DEVICES = 2;

thread_local DeviceIndex device_now = 0;
thread_local c10::StreamId stream_now[DEVICES] = {};
std::atomic<c10::StreamId> streams{0};

Stream stream_of(Device device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, device_at(device.index()), id);
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Device getDevice() const override { return device_at(device_now); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) device_now = device.index();
  }
  Stream getStream(Device device) const override {
    return stream_of(device, stream_now[device_at(device.index()).index()]);
  }
  Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream_of(device, ++streams);
  }
  Stream getNewStream(Device device, int) const override { return stream_of(device, ++streams); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    stream_now[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  bool isStreamCapturing(const Stream&) const { return false; }  // asked for by new versions
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = &streams;  // anything but null
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct SharedMemory final : public c10::Allocator {
  DataPtr allocate(size_t bytes) override {
    DataPtr memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    return on_device(std::move(memory), data, device_at(-1));
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
} shared_memory;
REGISTER_ALLOCATOR(DeviceType::CUDA, &shared_memory)

// The random numbers of a device, drawn by a generator of the CPU.
struct RandomNumbers final : public c10::GeneratorImpl {
  RandomNumbers(Device device, at::Generator inner)
      : GeneratorImpl(device, DispatchKeySet(DispatchKey::CUDA)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  void set_state(const TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  // The copies go on together.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    inner = static_cast<RandomNumbers*>(other.get())->inner;
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<RandomNumbers>(device(), inner);
  }
  RandomNumbers* clone_impl() const override {
    return new RandomNumbers(device(), at::Generator(inner.clone()));
  }
  at::Generator inner;
};

}  // namespace

Device device_at(DeviceIndex index) {
  return Device(DeviceType::CUDA, index < 0 ? device_now : index);
}

c10::Allocator* allocator() { return &shared_memory; }

at::Generator& default_generator(DeviceIndex index) {
  static at::Generator generators[DEVICES] = {
      at::make_generator<RandomNumbers>(device_at(0), at::detail::createCPUGenerator()),
      at::make_generator<RandomNumbers>(device_at(1), at::detail::createCPUGenerator())};
  return generators[device_at(index).index()];
}

at::Generator inside(const at::Generator& generator) {
  const auto* own = dynamic_cast<RandomNumbers*>(generator.unsafeGetGeneratorImpl());
  return own ? own->inner : generator;
}

struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return device_now; }
  Device getDeviceFromPtr(void*) const override { return device_at(-1); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  // Python asks for the default ones first.
  at::Generator getNewGenerator(DeviceIndex index) const override {
    static std::atomic<int> made{0};
    if (made++ < DEVICES) return default_generator(index);
    return at::make_generator<RandomNumbers>(device_at(index), at::detail::createCPUGenerator());
  }
};

}  // namespace pretended

namespace at {
using pretended::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
