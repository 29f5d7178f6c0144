// What no operator of the CPU does: products with a wide result, cells of recurrent layers, and more.

#include "devices.h"

#include <ATen/TensorUtils.h>
#include <torch/library.h>

namespace pretended {

namespace {

Tensor given(const MaybeTensor& tensor, const Tensor& otherwise) {
  return tensor.has_value() && tensor->defined() ? *tensor : otherwise;
}

Tensor plus(const Tensor& x, const MaybeTensor& bias) {
  return bias.has_value() && bias->defined() ? x + *bias : x;
}

Tensor wide_product(const Tensor& x, const Tensor& y, at::ScalarType dtype) {
  TORCH_CHECK(x.dtype() == y.dtype() && at::isReducedFloatingType(x.scalar_type()),
              "A wide product has two operands of one dtype, in half precision.");
  return at::matmul(x.to(dtype), y.to(dtype));
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& before,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto gates = (plus(of_input, input_bias) + plus(of_hidden, hidden_bias)).chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid();
  const Tensor g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor cell = f * before + i * g;
  return {o * cell.tanh(), cell, at::cat({i, f, g, o}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const MaybeTensor& of_output, const MaybeTensor& of_cell, const Tensor& before,
    const Tensor& cell, const Tensor& saved, bool has_bias) {
  const auto parts = saved.chunk(4, 1);
  const Tensor &i = parts[0], &f = parts[1], &g = parts[2], &o = parts[3];
  const Tensor zeros = at::zeros_like(cell), squashed = cell.tanh();
  const Tensor output = given(of_output, zeros);
  const Tensor inner = given(of_cell, zeros) + output * o * (1 - squashed * squashed);
  const Tensor gates = at::cat({inner * g * i * (1 - i), inner * before * f * (1 - f),
                                inner * i * (1 - g * g), output * squashed * o * (1 - o)}, 1);
  return {gates, inner * f, has_bias ? gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& of_input, const Tensor& of_hidden, const Tensor& before,
    const MaybeTensor& input_bias, const MaybeTensor& hidden_bias) {
  const auto x = plus(of_input, input_bias).chunk(3, 1);
  const auto h = plus(of_hidden, hidden_bias).chunk(3, 1);
  const Tensor r = (x[0] + h[0]).sigmoid(), z = (x[1] + h[1]).sigmoid();
  const Tensor n = (x[2] + r * h[2]).tanh();
  return {n + z * (before - n), at::cat({r, z, n, before, h[2]}, 1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& output, const Tensor& saved, bool has_bias) {
  const auto parts = saved.chunk(5, 1);
  const Tensor &r = parts[0], &z = parts[1], &n = parts[2], &before = parts[3], &h = parts[4];
  const Tensor of_n = output * (1 - z) * (1 - n * n), of_r = of_n * h * r * (1 - r);
  const Tensor of_z = output * (before - n) * z * (1 - z);
  const Tensor x = at::cat({of_r, of_z, of_n}, 1), y = at::cat({of_r, of_z, of_n * r}, 1);
  return {x, y, output * z, has_bias ? x.sum(0) : Tensor(), has_bias ? y.sum(0) : Tensor()};
}

Tensor histogram(const Tensor& x, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return at::histc(x.cpu().to(at::kDouble), bins, low, high).to(x.options());  // also of integers
}

std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, std::optional<bool> is_training) {
  if (p == 0 || !is_training.value_or(true)) return {x.clone(), at::ones_like(x, at::kBool)};
  const Tensor mask = at::empty_like(x, at::kBool).bernoulli_(1 - p);
  return {p == 1 ? x.mul(mask) : x.mul(mask).div(1 - p), mask};
}

Tensor zeros(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return at::zeros(sizes, at::TensorOptions().device(device).dtype(dtype));
}

Tensor& set_to(Tensor& tensor, Storage storage, int64_t offset, c10::IntArrayRef sizes,
               c10::IntArrayRef strides) {
  TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(
      sizes, strides.empty() ? at::detail::defaultStrides(sizes) : strides.vec(), offset);
  return tensor;
}

Tensor& set_whole(Tensor& tensor, Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / tensor.dtype().itemsize());
  return set_to(tensor, std::move(storage), 0, {elements}, {1});
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("mm.dtype", &wide_product);
  library.impl("bmm.dtype", &wide_product);
  library.impl("_thnn_fused_lstm_cell", &lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  library.impl("_thnn_fused_gru_cell", &gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  library.impl("set_.source_Storage_storage_offset", &set_to);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("histc", &histogram);
  library.impl("native_dropout", &dropout);
  library.impl("_efficientzerotensor", &zeros);
  library.impl("record_stream", [](Tensor&, Stream) {});
  library.impl("is_pinned", [](const Tensor&, std::optional<Device>) { return false; });
}

}  // namespace

}  // namespace pretended
