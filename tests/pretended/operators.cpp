// Operators: each runs as on a CPU, on tensors that share the memory of those on a device.

#include "devices.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <set>
#include <unordered_map>

namespace pretended {

namespace {

// Those that CUDA lets have tensors on the CPU, too. Numbers, as tensors without dimensions, may
// always be there.
const std::set<std::string> MIXED = {
    "aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};

// One call, with tensors on the CPU in the place of those on the device.
class Call {
 public:
  explicit Call(const std::string& name) : name_(name) {}

  // The device that tensors are on, or that is asked for.
  Device enter(Device device) {
    if (device.is_cuda()) {
      has_several_ |= device_ && *device_ != device_at(device.index());
      device_ = device_at(device.index());
    }
    return Device(at::kCPU);
  }

  Tensor enter(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      has_host_ |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(tensor.layout() == at::kStrided, name_, ": sparse on the device");
    enter(tensor.device());
    StorageImpl* own = tensor.storage().unsafeGetStorageImpl();
    if (!inside_.count(own)) {
      Storage storage(Storage::use_byte_size_t(), own->nbytes(),
                      DataPtr(own->mutable_data(), Device(at::kCPU)), c10::GetCPUAllocator(), true);
      outside_.emplace(storage.unsafeGetStorageImpl(), Outside{tensor.storage(), tensor.key_set()});
      inside_.emplace(own, storage);
    }
    Tensor entered = at::detail::make_tensor<TensorImpl>(
        Storage(inside_.at(own)), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    TensorImpl* impl = entered.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    set_bits(entered, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
    given_.emplace_back(entered, tensor);
    return entered;
  }

  Device device() const { return device_.value_or(device_at(-1)); }

  void check_devices() const {
    TORCH_CHECK(!device_ || !(has_host_ || has_several_) || MIXED.count(name_),
                "Expected all tensors to be on the same device, in a call of ", name_, ".");
  }

  // Resizes tensors that the call has resized in place.
  void update() {
    for (const auto& [entered, tensor] : given_) {
      StorageImpl* storage = entered.storage().unsafeGetStorageImpl();
      StorageImpl* own = outside_.at(storage).storage.unsafeGetStorageImpl();
      if (own->data() != storage->data() || own->nbytes() != storage->nbytes()) {
        const Storage grown = entered.storage();
        own->set_data_ptr_noswap(on_device(grown, storage->mutable_data(), own->device()));
        own->set_nbytes(storage->nbytes());
      }
      TensorImpl* impl = tensor.unsafeGetTensorImpl();
      if (impl->unsafe_storage().unsafeGetStorageImpl() != own)
        impl->set_storage_keep_dtype(outside_.at(storage).storage);
      impl->set_sizes_and_strides(entered.sizes(), entered.strides(), entered.storage_offset());
    }
  }

  // The result of a call on the device: an argument, a view of one, or something new.
  Tensor leave(const Tensor& result) {
    if (!result.defined()) return result;
    for (const auto& [entered, tensor] : given_)
      if (entered.is_same(result)) return tensor;
    StorageImpl* storage = result.storage().unsafeGetStorageImpl();
    const auto known = outside_.find(storage);
    if (known != outside_.end())
      return like(result, at::detail::make_tensor<TensorImpl>(
          TensorImpl::VIEW, Storage(known->second.storage), known->second.keys, result.dtype()));
    Storage own(Storage::use_byte_size_t(), storage->nbytes(),
                on_device(Storage(result.storage()), storage->mutable_data(), device()), allocator(),
                true);
    const DispatchKeySet keys(DispatchKey::CUDA);
    outside_.emplace(storage, Outside{own, keys});  // for another result in the same memory
    return like(result, at::detail::make_tensor<TensorImpl>(std::move(own), keys, result.dtype()));
  }

 private:
  struct Outside {
    Storage storage;
    DispatchKeySet keys;
  };

  static Tensor like(const Tensor& result, Tensor made) {
    made.unsafeGetTensorImpl()->set_sizes_and_strides(
        result.sizes(), result.strides(), result.storage_offset());
    set_bits(made, result);
    return made;
  }

  // Views that are conjugated or negated when they are read stay so.
  static void set_bits(const Tensor& to, const Tensor& from) {
    to._set_conj(from.is_conj());
    to._set_neg(from.is_neg());
  }

  const std::string& name_;
  std::optional<Device> device_;
  bool has_host_ = false, has_several_ = false;
  std::unordered_map<StorageImpl*, Storage> inside_;   // on the CPU, by what it shares memory with
  std::unordered_map<StorageImpl*, Outside> outside_;  // the other way round
  std::vector<std::pair<Tensor, Tensor>> given_;       // on the CPU, and on the device
};

const c10::TypePtr MAYBE_GENERATOR = c10::OptionalType::create(c10::GeneratorType::get());

void on_the_cpu(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema.name());
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.enter(value.toTensor());
    } else if (value.isDevice()) {
      value = call.enter(value.toDevice());
    } else if (value.isTensorList()) {
      c10::List<Tensor> entered;
      for (const Tensor& tensor : value.toTensorList()) entered.push_back(call.enter(tensor));
      value = entered;
    } else if (value.isOptionalTensorList()) {
      c10::List<MaybeTensor> entered;
      for (const MaybeTensor& tensor : value.toOptionalTensorList())
        entered.push_back(tensor ? MaybeTensor(call.enter(*tensor)) : std::nullopt);
      value = entered;
    }
  }
  call.check_devices();
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    c10::IValue& value = (*stack)[stack->size() - schema.arguments().size() + i];
    if (value.isGenerator())
      value = inside(value.toGenerator());
    else if (value.isNone() && *schema.arguments()[i].type() == *MAYBE_GENERATOR)
      value = inside(default_generator(call.device().index()));
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.update();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.leave(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> left;
      for (const Tensor& tensor : value.toTensorList()) left.push_back(call.leave(tensor));
      value = left;
    }
  }
}

// The answer to the question whether a library of the device is to carry out a call.
void never(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  torch::jit::drop(*stack, op.schema().arguments().size());
  stack->emplace_back(false);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  // These are made of others, chosen by the device.
  for (const char* name : {"copy_", "convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
  for (const char* name : {"_use_cudnn_ctc_loss", "_use_cudnn_ctc_loss.Tensor",
                           "_use_miopen_ctc_loss", "_use_miopen_ctc_loss.Tensor"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&never>());
}

}  // namespace

}  // namespace pretended
