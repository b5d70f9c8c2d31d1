// What the other units ask of PyTorch.

#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/sum.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Layout.h>
#include <torch/csrc/MemoryFormat.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/version.h>

#include <algorithm>
#include <cmath>
#include <cstring>

namespace accel {

using Modes = at::impl::PythonTorchFunctionTLS;

// ---- modes ---------------------------------------------------------------------------------------------------

Py_ssize_t mode_count() { return static_cast<Py_ssize_t>(Modes::stack_len()); }

Ref mode_at(Py_ssize_t index) {
  if (index < 0 || index >= mode_count()) {
    PyErr_SetString(PyExc_IndexError, "there are fewer modes");
    return Ref();
  }
  return Ref::to(Modes::get_stack_at(index)->ptr(getPyInterpreter()));
}

Ref pop_mode() {
  try {
    return Ref::to(Modes::pop_stack()->ptr(getPyInterpreter()));
  } catch (...) {
    set_error_from_exception();
    return Ref();
  }
}

int push_mode(PyObject* mode) {
  try {
    Py_INCREF(mode);
    Modes::push_onto_stack(std::make_shared<c10::SafePyObject>(mode, getPyInterpreter()));
    return 0;
  } catch (...) {
    set_error_from_exception();
    return -1;
  }
}

bool modes_are_disabled() {
  return Modes::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED;
}

// ---- threads -------------------------------------------------------------------------------------------------

bool is_recording() { return c10::GradMode::is_enabled(); }

void set_recording(bool is_on) { c10::GradMode::set_enabled(is_on); }

int64_t next_sequence() { return static_cast<int64_t>(at::sequence_number::peek()); }

int current_task() { return torch::autograd::get_current_graph_task_id(); }

namespace {

// Ask Python: a function, or a dictionary and one of its keys. 1 where the answer says no: None, False, and what is
// not above a number; -1 with an error.
int says_no(PyObject* question, long least) {
  Ref found;
  if (PyTuple_CheckExact(question)) {
    found = Ref::to(PyDict_GetItemWithError(PyTuple_GET_ITEM(question, 0), PyTuple_GET_ITEM(question, 1)));
  } else {
    found = Ref(PyObject_CallNoArgs(question));
  }
  if (!found) {
    if (!PyErr_Occurred()) {
      PyErr_SetObject(PyExc_KeyError, question);
    }
    return -1;
  }
  return found.get() == Py_None || found.get() == Py_False ||
         (PyLong_CheckExact(found.get()) && PyLong_AsLong(found.get()) <= least);
}

}  // namespace

int is_plain_here(bool alone) {
  using c10::DispatchKey;
  if ((alone && (mode_count() != 0 || c10::impl::TorchDispatchModeTLS::any_modes_set())) ||
      (!alone && c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY)) ||
      c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      c10::impl::tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode) ||
      c10::impl::tls_is_dispatch_key_included(DispatchKey::Tracer)) {
    return 0;
  }
  int is_plain = says_no(objects.compiling, 0);
  return is_plain > 0 && alone ? says_no(objects.forward_level, -1) : is_plain;
}

// ---- tensors -------------------------------------------------------------------------------------------------

bool is_tensor(PyObject* value) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
  return type == objects.tensor || type == objects.parameter;
}

bool requires_grad(PyObject* tensor) { return THPVariable_Unpack(tensor).requires_grad(); }

int64_t version_of(PyObject* value) {
  try {
    // The second takes long where it is none, and may ask the value for its class.
    if (value == Py_None || !(is_tensor(value) || THPVariable_Check(value))) {
      return -1;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value);
    return tensor.is_inference() ? -1 : static_cast<int64_t>(tensor._version());
  } catch (...) {
    PyErr_Clear();
    return -1;
  }
}

namespace {

bool has_no_tensor(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value) || PySlice_Check(value) || value == Py_Ellipsis || THPDtype_Check(value) ||
         THPDevice_Check(value) || THPLayout_Check(value) || THPMemoryFormat_Check(value);
}

// Whether a tensor has its numbers in memory as it says: nothing stands between.
bool is_plain(const at::Tensor& tensor) {
  auto keys = tensor.key_set();
  return tensor.layout() == at::kStrided && !tensor.is_meta() && !tensor.is_nested() && !tensor.is_quantized() &&
         !keys.has(c10::DispatchKey::Python) && !keys.has(c10::DispatchKey::FuncTorchGradWrapper) &&
         !keys.has(c10::DispatchKey::FuncTorchBatched) && !keys.has(c10::DispatchKey::Functionalize) &&
         !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

// Other threads run meanwhile, as they do while PyTorch's own functions compute or wait for a device.
struct WithoutGil {
  PyThreadState* state = PyEval_SaveThread();
  ~WithoutGil() { PyEval_RestoreThread(state); }
};

// The sum of finite numbers may overflow: only a finite sum is an answer. By value: another thread may drop its tensor.
bool is_finite(at::Tensor tensor) {
  if (!is_plain(tensor)) {
    return false;
  }
  if (!tensor.is_floating_point()) {
    return !tensor.is_complex();
  }
  if (tensor.numel() == 0) {
    return true;
  }
  WithoutGil released;
  return std::isfinite(at::sum(tensor).item<double>());
}

bool is_finite_value(PyObject* value, int depth) {
  if (is_tensor(value)) {
    return is_finite(THPVariable_Unpack(value));
  }
  if (depth == 0 || !(PyTuple_Check(value) || PyList_CheckExact(value))) {
    return has_no_tensor(value);
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
    if (!is_finite_value(PySequence_Fast_GET_ITEM(value, i), depth - 1)) {
      return false;
    }
  }
  return true;
}

}  // namespace

namespace {

template <typename F>
int look_unrecorded(F&& look) {
  try {
    c10::AutoGradMode unrecorded(false);
    return look();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return -1;
  } catch (...) {
    // Python finds out what it is.
    return 0;
  }
}

}  // namespace

int are_finite(PyObject* const* values, Py_ssize_t count) {
  return look_unrecorded([=] {
    return std::all_of(values, values + count, [](PyObject* value) { return is_finite_value(value, 2); });
  });
}

int are_finite(const at::Tensor* tensors, size_t count) {
  return look_unrecorded([=] {
    return std::all_of(tensors, tensors + count, [](const at::Tensor& one) { return !one.defined() || is_finite(one); });
  });
}

bool Key::add_word(int64_t word) {
  if (count_ == MOST_WORDS) {
    return false;
  }
  words_[count_++] = word;
  return true;
}

// Each value begins with its kind, so that no two lists of values have the same words.
bool Key::add(const at::Tensor& tensor) {
  constexpr int64_t TENSOR = -1, ABSENT = -6;
  if (!tensor.defined()) {
    return add_word(ABSENT);
  }
  if (!is_plain(tensor) || !add_word(TENSOR) || !add_word(tensor.dim())) {
    return false;
  }
  auto sizes = tensor.sizes();
  return std::all_of(sizes.begin(), sizes.end(), [this](int64_t size) { return add_word(size); });
}

bool Key::add(PyObject* value, int depth) {
  constexpr int64_t NO_TENSOR = -2, BEGIN = -3, END = -4;
  if (is_tensor(value)) {
    return add(THPVariable_Unpack(value));
  }
  if (depth == 0 || !(PyTuple_CheckExact(value) || PyList_CheckExact(value))) {
    return has_no_tensor(value) && add_word(NO_TENSOR);
  }
  if (!add_word(BEGIN)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
    if (!add(PySequence_Fast_GET_ITEM(value, i), depth - 1)) {
      return false;
    }
  }
  return add_word(END);
}

// By its text: an object of the same address may be another one later.
bool Key::add_name(PyObject* name) {
  constexpr int64_t NAME = -5;
  Py_ssize_t length;
  const char* text = PyUnicode_AsUTF8AndSize(name, &length);
  if (text == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (!add_word(NAME) || !add_word(length)) {
    return false;
  }
  for (Py_ssize_t i = 0; i < length; i += sizeof(int64_t)) {
    int64_t word = 0;
    std::memcpy(&word, text + i, std::min<Py_ssize_t>(length - i, sizeof word));
    if (!add_word(word)) {
      return false;
    }
  }
  return true;
}

Ref Key::bytes() const {
  return Ref(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(words_), count_ * sizeof(int64_t)));
}

const char* torch_version() { return TORCH_VERSION; }

}  // namespace accel
