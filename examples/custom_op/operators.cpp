// Two operators for poptorch.custom_op, each with its gradient: Cube, and LeakyRelu with an
// attribute. They use torch's stable C++ interface, so that they compile in a few seconds and
// the library works with later versions of torch too.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

namespace {

template <typename Function>
Tensor map(const Tensor &x, Function function) {
  const Tensor in = torch::stable::contiguous(x);
  Tensor out = torch::stable::empty_like(in);
  const float *from = in.const_data_ptr<float>();
  float *to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) to[i] = function(from[i]);
  return out;
}

template <typename Function>
Tensor map(const Tensor &x, const Tensor &y, Function function) {
  const Tensor in = torch::stable::contiguous(x), other = torch::stable::contiguous(y);
  Tensor out = torch::stable::empty_like(in);
  const float *from = in.const_data_ptr<float>(), *with = other.const_data_ptr<float>();
  float *to = out.mutable_data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) to[i] = function(from[i], with[i]);
  return out;
}

Tensor cube(const Tensor &x) {
  return map(x, [](float v) { return v * v * v; });
}

Tensor cube_grad(const Tensor &x, const Tensor &gradient) {
  return map(x, gradient, [](float v, float g) { return 3 * v * v * g; });
}

Tensor leaky_relu(const Tensor &x, double alpha) {
  const float slope = static_cast<float>(alpha);
  return map(x, [slope](float v) { return v > 0 ? v : slope * v; });
}

Tensor leaky_relu_grad(const Tensor &x, const Tensor &gradient, double alpha) {
  const float slope = static_cast<float>(alpha);
  return map(x, gradient, [slope](float v, float g) { return v > 0 ? g : slope * g; });
}

}  // namespace

STABLE_TORCH_LIBRARY(custom_ops, m) {
  m.def("Cube(Tensor x) -> Tensor");
  m.def("CubeGrad(Tensor x, Tensor gradient) -> Tensor");
  m.def("LeakyRelu(Tensor x, *, float alpha) -> Tensor");
  m.def("LeakyReluGrad(Tensor x, Tensor gradient, *, float alpha) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CPU, m) {
  m.impl("Cube", TORCH_BOX(&cube));
  m.impl("CubeGrad", TORCH_BOX(&cube_grad));
  m.impl("LeakyRelu", TORCH_BOX(&leaky_relu));
  m.impl("LeakyReluGrad", TORCH_BOX(&leaky_relu_grad));
}
