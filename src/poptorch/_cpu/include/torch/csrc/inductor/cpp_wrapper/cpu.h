#pragma once
#include <Python.h>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <utility>
namespace pybind11 {
class gil_scoped_release_simple {
  PyThreadState* state_ = PyEval_SaveThread();
 public:
  gil_scoped_release_simple() = default;
  gil_scoped_release_simple(const gil_scoped_release_simple&) = delete;
  ~gil_scoped_release_simple() { PyEval_RestoreThread(state_); }
};
}  // namespace pybind11
namespace py = pybind11;
#include <torch/csrc/inductor/aoti_runtime/utils.h>
using namespace torch::aot_inductor;
#include <c10/util/generic_math.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>
[[maybe_unused]] inline int64_t align(int64_t bytes) { return (bytes + 63) & -64; }
