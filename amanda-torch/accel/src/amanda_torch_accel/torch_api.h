// What the other units ask of PyTorch, without its headers: only torch_api.cc and autograd.cc include those.
//
// Exceptions of C++ end here: where a function may fail, it says how.
#pragma once

#include "accel.h"

namespace accel {

// The stack of TorchFunctionModes of the current thread.
Py_ssize_t mode_count();
Ref mode_at(Py_ssize_t index);
Ref pop_mode();
int push_mode(PyObject* mode);
bool modes_are_disabled();

bool is_recording();
void set_recording(bool is_on);
int64_t next_sequence();
int current_task();

// True if operators go straight to kernels here: no mode, transform, forward-mode AD or tracer is there. -1 with an
// error. Without `alone`, function and dispatch modes and forward-mode AD are not asked for.
int is_plain_here(bool alone);

// True if an object is a torch.Tensor or a parameter, of no other class.
bool is_tensor(PyObject* value);
bool requires_grad(PyObject* tensor);

// How often a tensor was changed in place; -1 for one that does not count it, or is None.
int64_t version_of(PyObject* tensor);

}  // namespace accel
