// Declarations of amanda_torch_accel, the part of amanda-torch that is written in C++.
//
// What is here needs Python.h alone; torch_api.h declares what the other units ask of PyTorch. Functions return
// nullptr, or -1, with a Python error, as CPython's do, unless they say otherwise. The GIL is held everywhere.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#ifdef Py_GIL_DISABLED
#error "the extension writes into functions that all threads call: it needs a Python with the GIL"
#endif

namespace accel {

// ---- references ----------------------------------------------------------------------------------------------

// A strong reference to an object, or nullptr.
class Ref {
 public:
  Ref() = default;
  explicit Ref(PyObject* stolen) : object_(stolen) {}
  Ref(Ref&& other) noexcept : object_(other.release()) {}
  Ref& operator=(Ref&& other) noexcept {
    PyObject* old = std::exchange(object_, other.release());
    Py_XDECREF(old);
    return *this;
  }
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }

  static Ref to(PyObject* borrowed) { return Ref(Py_XNewRef(borrowed)); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  bool operator==(const Ref& other) const { return object_ == other.object_; }

 private:
  PyObject* object_ = nullptr;
};

// Take the current error, as an exception with its traceback, and put one back; nullptr for none.
Ref take_error();
void put_error(Ref error);

// Keeps the current error, and puts it back at the end: for code that runs on the way back to Python.
class KeepError {
 public:
  ~KeepError() { put_error(std::move(error_)); }

 private:
  Ref error_ = take_error();
};

// Add to a number that is an attribute of an object; 0, or -1 with an error.
int add_to(PyObject* object, PyObject* name, const Ref& amount);

// A tuple of what a function gives for each place (new references); nullptr with an error.
template <typename F>
Ref make_tuple(Py_ssize_t count, F&& item) {
  Ref tuple(PyTuple_New(count));
  for (Py_ssize_t i = 0; tuple && i < count; i++) {
    PyObject* one = item(i);
    if (one == nullptr) {
      return Ref();
    }
    PyTuple_SET_ITEM(tuple.get(), i, one);
  }
  return tuple;
}

// An exception of C++ becomes a Python error; called while it is handled.
void set_error_from_exception() noexcept;

// Runs a body that may throw, at a boundary to C.
template <typename F>
auto guarded(F&& body, decltype(body()) failed) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (...) {
    set_error_from_exception();
  }
  return failed;
}

// A type without more than this; with a traverse, the garbage collector knows its objects.
PyTypeObject make_type(const char* name, size_t size, destructor dealloc, traverseproc traverse = nullptr,
                       inquiry clear = nullptr);

// Names of attributes, as objects of Python's that are made once.
#define ACCEL_NAMES(NAME)                                                                                              \
  NAME(action) NAME(add) NAME(after) NAME(cache) NAME(claimed) NAME(count) NAME(due) NAME(enabled) NAME(ends)          \
  NAME(executions) NAME(frombytes) NAME(func) NAME(go_on_after) NAME(has_after) NAME(has_before) NAME(held)            \
  NAME(is_idle) NAME(kind) NAME(kwargs) NAME(log) NAME(look) NAME(nanoseconds) NAME(natives) NAME(note_execution)      \
  NAME(number) NAME(numbers) NAME(op_id) NAME(paused) NAME(quiet) NAME(ring) NAME(routine) NAME(routines)              \
  NAME(run_described) NAME(run_known) NAME(scopes) NAME(select) NAME(statistics) NAME(steps_after) NAME(steps_before)  \
  NAME(tool_seconds) NAME(waiting)

struct Names {
#define NAME(name) PyObject* name;
  ACCEL_NAMES(NAME)
#undef NAME
  PyObject *dict, *dispatcher;  // these begin with an underscore
};
extern Names names;
int prepare_names();

// ---- records -------------------------------------------------------------------------------------------------

// What Python and C++ both read of the program's place. Each has a twin in Python, of the same name and fields, in
// amanda_torch.eager.records, which says what they mean.

struct Tracker {
  PyObject_HEAD
  PyObject *cells, *frame, *root, *generation, *iteration, *stale, *thread;
};

struct Frame {
  PyObject_HEAD
  PyObject *cells, *names, *children, *generation, *caller;
};

struct Child {
  PyObject_HEAD
  PyObject *ref, *transparent, *is_fused, *calls, *frames;
};

struct Lowered;

struct Known {
  PyObject_HEAD
  PyObject *executor, *claims, *steps_before, *steps_after, *gradients, *form, *iterations, *op_id, *name;
  Lowered* lowered;  // owned; of steps_before and steps_after; nullptr until it is asked for
};

extern PyTypeObject Tracker_Type, Frame_Type, Child_Type, Known_Type;
int prepare_records(PyObject* module);

inline bool is_a(PyObject* object, PyTypeObject* type) {
  return object != nullptr && PyObject_TypeCheck(object, type);
}

// Put a new value (borrowed) into a field of a record.
inline void set(PyObject*& field, PyObject* value) {
  PyObject* old = field;
  field = Py_NewRef(value);
  Py_XDECREF(old);
}

// ---- steps ---------------------------------------------------------------------------------------------------

// The kinds of amanda.inline.steps.StepKind that are run here; all others are called.
enum Kind : int { CALL, COUNT, CLOCK, MEMORY, EXECUTION, MARK = 7 };

// The memory of a buffer of Python's, which stays in place until then.
struct Memory {
  Py_buffer view{};
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { PyBuffer_Release(&view); }
};

struct Step {
  Kind kind = CALL;
  bool ends = false;
  Ref routine, action, func, select, kwargs;
  std::unique_ptr<Memory> ring;  // of a mark
  int64_t number = 0;            // of a mark
};

// How the steps of an operator are run.
enum class Way {
  PYTHON,    // not here
  MEASURED,  // counts, clocks, memory and marks: nothing is known of the tensors
  CALLED,    // functions of tools
};

struct Lowered {
  std::vector<Step> before, after;
  Way way = Way::PYTHON;
  bool acts_before = false;    // something happens before the operator that cannot be taken back
  bool takes_tensors = false;  // some step is given tensors
  bool has_clock = false;      // some steps read the clock
  bool is_joined = false;      // steps after it are given what it has run on
};

// Lower two tuples of steps, anything else to Way::PYTHON; nullptr with an error.
Lowered* lower(PyObject* before, PyObject* after);
// Visit the objects that it holds, for the garbage collector.
int visit_lowered(const Lowered& lowered, visitproc visit, void* arg);

// Run the counts, clocks, memory and marks before or after an operator; 0, or -1 with an error.
//   begun: the moment in nanoseconds.
int begin_measures(const Lowered& lowered, int64_t& begun);
int end_measures(const Lowered& lowered, int64_t begun);

// Tensors that functions of tools are given; of more, Python takes care.
constexpr int MOST_VALUES = 64;

struct Values {
  PyObject* items[MOST_VALUES];
  int count = 0;
  bool append(PyObject* value) {
    if (count == MOST_VALUES) {
      return false;
    }
    items[count++] = value;
    return true;
  }
  Ref tuple() const;
};

// Enter the code of tools, call the functions of a point in order, and leave it again. It ends early where one
// returns something (`returned`), or selects what is not there. Returns how many were called, -1 with an error.
//   name: of the operator.
//   inputs: a tuple of what it has run on, for steps of an execution.
int call_steps(PyObject* name, const std::vector<Step>& steps, const Values& values, PyObject* inputs, PyObject* state,
               Ref& returned);

// vars(STATE) of the current thread, and whether no driver but one is told where code of tools runs.
Ref thread_state();
bool is_only_driver();

// The objects of amanda, amanda_torch and PyTorch that the units need; see _objects() of amanda_torch.eager.gate.
#define ACCEL_OBJECTS(OBJECT)                                                                                          \
  OBJECT(acquire) OBJECT(are_paired) OBJECT(as_routine) OBJECT(changed) OBJECT(compiling) OBJECT(deliver)              \
  OBJECT(forward_level) OBJECT(function) OBJECT(is_report_of) OBJECT(mode) OBJECT(own_nodes) OBJECT(parameter)         \
  OBJECT(raised) OBJECT(release) OBJECT(state) OBJECT(tensor) OBJECT(tensors_of) OBJECT(unpaused)

struct Objects {
#define OBJECT(name) PyObject* name;
  ACCEL_OBJECTS(OBJECT)
#undef OBJECT
};
extern Objects objects;

// ---- operators -----------------------------------------------------------------------------------------------

// Hook the backward operators of an operator that has run: 1; 0 where Python is to do it; -1 with an error.
//   start: the number that autograd's next node had before it ran.
int claim(Tracker* mode, Known* known, PyObject* result, int64_t start);

int prepare_trampolines(PyObject* module);
// Note the builtins of PyTorch's that concern the stack of modes: 0, or -1 with an error.
int configure_builtins(PyObject* builtins);
int prepare_autograd(PyObject* module);

}  // namespace accel
