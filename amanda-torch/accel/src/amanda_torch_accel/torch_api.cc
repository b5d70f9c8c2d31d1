// What the other units ask of PyTorch.

#include "torch_api.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/SequenceNumber.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <new>

namespace accel {

void set_error_from_exception() noexcept {
  try {
    throw;
  } catch (python_error& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception of C++");
  }
}

using Modes = at::impl::PythonTorchFunctionTLS;

// ---- modes ---------------------------------------------------------------------------------------------------

Py_ssize_t mode_count() { return static_cast<Py_ssize_t>(Modes::stack_len()); }

Ref mode_at(Py_ssize_t index) {
  return guarded([index] { return Ref::to(Modes::get_stack_at(index)->ptr(getPyInterpreter())); }, Ref());
}

Ref pop_mode() { return guarded([] { return Ref::to(Modes::pop_stack()->ptr(getPyInterpreter())); }, Ref()); }

int push_mode(PyObject* mode) {
  auto push = [mode] {
    Py_INCREF(mode);
    Modes::push_onto_stack(std::make_shared<c10::SafePyObject>(mode, getPyInterpreter()));
    return 0;
  };
  return guarded(push, -1);
}

bool modes_are_disabled() { return Modes::get_disabled_state() == at::impl::TorchFunctionDisabledState::ALL_DISABLED; }

// ---- threads -------------------------------------------------------------------------------------------------

bool is_recording() { return c10::GradMode::is_enabled(); }

void set_recording(bool is_on) { c10::GradMode::set_enabled(is_on); }

int64_t next_sequence() { return static_cast<int64_t>(at::sequence_number::peek()); }

int current_task() { return torch::autograd::get_current_graph_task_id(); }

namespace {

// Ask Python: a function, or a dictionary and one of its keys. 1 where the answer is None, False or a number that is
// not above `least`; -1 with an error.
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
  constexpr c10::DispatchKeySet transforms({DispatchKey::FuncTorchDynamicLayerFrontMode,
                                            DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Tracer});
  if ((alone && (mode_count() != 0 || c10::impl::TorchDispatchModeTLS::any_modes_set())) ||
      (!alone && c10::impl::TorchDispatchModeTLS::get_mode(c10::impl::TorchDispatchModeKey::PROXY)) ||
      c10::impl::tls_local_dispatch_key_set().included_.has_any(transforms)) {
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

}  // namespace accel
