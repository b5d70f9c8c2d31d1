// Noticing the calls of PyTorch's builtins: the one unit that replaces what is PyTorch's.
//
// PyTorch reports an operator to Python only where a TorchFunctionMode is on the thread's stack of modes, and that
// costs about a microsecond per operator. Amanda's mode is kept off that stack instead, and the operators are noticed
// here: functions of this unit stand in the place of those that PyTorch's builtins call. They ask intercept(), which
//   - calls the original directly, if it is known that no tool acts on the operator;
//   - runs its steps, if these are known;
//   - puts the mode on the stack for this one call, if there is anything to ask: PyTorch then reports the operator as
//     it always does, and the same Python code as without the extension runs.
//
// The mode that is kept off the stack is called virtual. Every question about the stack that Python asks (push, pop,
// length, the mode at a position) is answered as if it lay there, and a mode that is pushed above it makes it real.
// So there is one description of what is an operator, of its id and of what happens around it, and it is Python's.
//
// What is replaced:
//   methods             PyMethodDef.ml_meth, from which all forms of a call read it, `a + b` and the specialised
//                       instructions of CPython 3.11 to 3.14 included; one trampoline for each, since ml_meth is told
//                       nothing of where it is called
//   functions           PyCFunctionObject.vectorcall, which is free where the arguments are a tuple and a dict. Not
//                       ml_meth: the hash of a function is made of it, and programs keep torch.add in dictionaries
//   a[i], a[i] = b      the slots of the type and of its subclasses, and of the descriptors
//   a.T and the like    PyGetSetDef.get
//   module(x)           the vectorcall of the function that the driver puts there
//   torch.ops           nothing here: the driver sets objects of the type Call
//
// All of this is in CPython's public headers, but nothing promises that a program may write there. So the unit is
// optional: amanda_torch.eager.gate runs a self-test before it is used, which compares what it notices with what the
// mode notices, and whether PyTorch is as it was afterwards; where that fails, the mode is used, and sees the same.

#include "invocation.h"
#include "torch_api.h"

#include <array>
#include <cstring>

namespace accel {

namespace {

thread_local Thread thread;

// Counts up where the gate is taken off: virtual modes of other threads, which cannot be reached from here, are none
// from then on.
unsigned session;
bool is_installed;
PyObject* is_report_of;  // Python's: (name of a builtin, what is reported) -> bool

template <typename T>
T as(void* function) {
  return reinterpret_cast<T>(function);
}

template <typename T>
void* address_of(T* function) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

Thread& this_thread() { return thread; }

PyObject* virtual_mode(Thread& here) {
  if (here.mode != nullptr && here.session != session) {
    Py_CLEAR(here.mode);
  }
  return here.mode;
}

// ---- calls ---------------------------------------------------------------------------------------------------

PyObject* run_original(const Invocation& call) {
  Site* site = call.site;
  switch (site->form) {
    case Form::KEYWORDS:
    case Form::FUNCTION:
      return as<PyCFunctionWithKeywords>(site->original)(call.self, call.args, call.kwargs);
    case Form::PLAIN:
      return as<PyCFunction>(site->original)(call.self, call.args);
    case Form::GETTER:
      return as<getter>(site->original)(call.self, site->closure);
    case Form::SUBSCRIPT:
      return as<binaryfunc>(site->original)(call.self, call.args);
    case Form::ASSIGNMENT:
      return as<objobjargproc>(site->original)(call.self, call.args, call.kwargs) < 0 ? nullptr : Py_NewRef(Py_None);
    case Form::CALLABLE:
      return PyObject_Vectorcall(call.target, call.stack, call.nargsf, call.names);
  }
  Py_UNREACHABLE();
}

bool append_positional(const Invocation& call, Values& values) {
  const Site* site = call.site;
  PyObject* const* items = call.stack + 1;
  Py_ssize_t count = 0;
  if (site->form == Form::CALLABLE) {
    count = PyVectorcall_NARGS(call.nargsf) - 1;
  } else {
    if (site->form != Form::FUNCTION && !values.append(call.self)) {
      return false;
    }
    if (site->form == Form::SUBSCRIPT || (site->form == Form::PLAIN && site->flags == METH_O)) {
      return values.append(call.args);
    }
    if (site->form == Form::ASSIGNMENT || site->form == Form::GETTER ||
        (site->form == Form::PLAIN && site->flags == METH_NOARGS)) {
      return true;
    }
    items = PySequence_Fast_ITEMS(call.args);
    count = PyTuple_GET_SIZE(call.args);
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (!values.append(items[i])) {
      return false;
    }
  }
  return true;
}

bool append_keywords(const Invocation& call, PyObject* keywords, Values& values) {
  if (!PyTuple_CheckExact(keywords)) {
    return false;
  }
  Py_ssize_t count = PyTuple_GET_SIZE(keywords), found = 0, position = 0;
  auto is_next = [&](PyObject* name) {
    return found < count && (name == PyTuple_GET_ITEM(keywords, found) ||
                             PyUnicode_Compare(name, PyTuple_GET_ITEM(keywords, found)) == 0);
  };
  if (call.site->form == Form::CALLABLE) {
    Py_ssize_t given = call.names == nullptr ? 0 : PyTuple_GET_SIZE(call.names);
    for (; found < given; found++) {
      if (!is_next(PyTuple_GET_ITEM(call.names, found)) ||
          !values.append(call.stack[PyVectorcall_NARGS(call.nargsf) + found])) {
        return false;
      }
    }
  } else if (call.site->form != Form::SUBSCRIPT && call.kwargs != nullptr) {
    PyObject *name, *value;
    for (; PyDict_Next(call.kwargs, &position, &name, &value); found++) {
      if (!is_next(name) || !values.append(value)) {
        return false;
      }
    }
  }
  return found == count;
}

Ref reported_args(const Invocation& call) {
  if (call.site->form == Form::FUNCTION) {
    return Ref::to(call.args);
  }
  Values few;
  if (append_positional(call, few)) {
    Ref args(PyTuple_New(few.count));
    for (int i = 0; args && i < few.count; i++) {
      PyTuple_SET_ITEM(args.get(), i, Py_NewRef(few.items[i]));
    }
    return args;
  }
  // Many of them.
  if (call.site->form == Form::CALLABLE) {
    Py_ssize_t count = PyVectorcall_NARGS(call.nargsf) - 1;
    Ref args(PyTuple_New(count));
    for (Py_ssize_t i = 0; args && i < count; i++) {
      PyTuple_SET_ITEM(args.get(), i, Py_NewRef(call.stack[i + 1]));
    }
    return args;
  }
  Ref self(PyTuple_Pack(1, call.self));
  return Ref(self ? PySequence_Concat(self.get(), call.args) : nullptr);
}

Ref keywords_of(PyObject* const* values, PyObject* keywords) {
  Ref kwargs(PyDict_New());
  Py_ssize_t count = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; kwargs && i < count; i++) {
    if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(keywords, i), values[i]) < 0) {
      return Ref();
    }
  }
  return kwargs;
}

Ref reported_kwargs(const Invocation& call) {
  if (call.site->form == Form::CALLABLE) {
    return keywords_of(call.stack + PyVectorcall_NARGS(call.nargsf), call.names);
  }
  bool has_names = call.kwargs != nullptr && call.site->form <= Form::FUNCTION;
  return has_names ? Ref::to(call.kwargs) : Ref(PyDict_New());
}

// ---- the stack of modes --------------------------------------------------------------------------------------

namespace {

// A builtin of PyTorch's by which Python changes the stack of modes, or asks about it.
struct Builtin {
  PyObject *owner = nullptr, *self = nullptr;
  PyMethodDef* def = nullptr;
  PyCFunction original = nullptr;
  PyMethodDef own = {};  // of a method: what its descriptor refers to instead, as `def` may be const
  vectorcallfunc vectorcall = nullptr;
  int flags = 0;
};

Builtin push, pop, length, at;   // functions
Builtin disable, enable;         // DisableTorchFunction's __enter__ and __exit__
Builtin place, replace;          // torch.device's, which push and pop a mode in C++

PyTypeObject* mode_type;  // the class of Amanda's modes

bool is_ours(PyObject* mode) { return mode_type != nullptr && PyObject_TypeCheck(mode, mode_type); }

// How many modes are really there; C++ may have taken off some that lay below the virtual one.
Py_ssize_t count_around() {
  Py_ssize_t count = mode_count();
  if (thread.depth > count) {
    thread.depth = count;
  }
  return count;
}

// Put the virtual mode where it would lie.
int make_real() {
  Ref mode(std::exchange(thread.mode, nullptr)), above(PyList_New(0));
  if (!above) {
    return -1;
  }
  // Modes that C++ has pushed since: it puts back a mode that it had taken off for a handler.
  for (Py_ssize_t count = count_around(); count > thread.depth; count--) {
    Ref top = pop_mode();
    if (!top || PyList_Append(above.get(), top.get()) < 0) {
      return -1;
    }
  }
  int failed = push_mode(mode.get());
  for (Py_ssize_t i = PyList_GET_SIZE(above.get()); failed == 0 && i > 0; i--) {
    failed = push_mode(PyList_GET_ITEM(above.get(), i - 1));
  }
  return failed;
}

int end_virtual() { return virtual_mode(thread) != nullptr ? make_real() : 0; }

// A thread may end without leaving its scopes: its virtual mode is released as a real one is.
struct ThreadEnd {
  ~ThreadEnd() {
    if (thread.mode != nullptr && Py_IsInitialized()) {
      PyGILState_STATE state = PyGILState_Ensure();
      Py_CLEAR(thread.mode);
      PyGILState_Release(state);
    }
  }
};

// Make a mode of ours virtual; where modes are off altogether, PyTorch is to see it.
int push_ours(PyObject* mode) {
  static thread_local ThreadEnd end;
  if (end_virtual() < 0) {
    return -1;
  }
  if (modes_are_disabled()) {
    return push_mode(mode);
  }
  thread.mode = Py_NewRef(mode);
  thread.depth = mode_count();
  thread.session = session;
  return 0;
}

// If a mode of ours lies on top of the stack, it becomes virtual.
int settle() {
  Py_ssize_t count = virtual_mode(thread) == nullptr ? mode_count() : 0;
  if (count == 0) {
    return 0;
  }
  Ref top = mode_at(count - 1);
  if (!top || !is_ours(top.get())) {
    return top ? 0 : -1;
  }
  return pop_mode() ? push_ours(top.get()) : -1;
}

// Whether a function is called with as many arguments as it takes, and no names.
bool is_call_of(Py_ssize_t count, size_t nargsf, PyObject* keywords) {
  return PyVectorcall_NARGS(nargsf) == count && (keywords == nullptr || PyTuple_GET_SIZE(keywords) == 0);
}

PyObject* hook_push(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (!is_call_of(1, nargsf, keywords)) {
    return push.vectorcall(function, values, nargsf, keywords);
  }
  if (is_ours(values[0])) {
    return push_ours(values[0]) < 0 ? nullptr : Py_NewRef(Py_None);
  }
  return end_virtual() < 0 ? nullptr : push.original(push.self, values[0]);
}

PyObject* hook_pop(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (!is_call_of(0, nargsf, keywords)) {
    return pop.vectorcall(function, values, nargsf, keywords);
  }
  if (virtual_mode(thread) != nullptr) {
    return count_around() <= thread.depth ? std::exchange(thread.mode, nullptr) : pop.original(pop.self, nullptr);
  }
  Ref mode(pop.original(pop.self, nullptr));
  return mode && !is_ours(mode.get()) && settle() < 0 ? nullptr : mode.release();
}

PyObject* hook_length(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (!is_call_of(0, nargsf, keywords)) {
    return length.vectorcall(function, values, nargsf, keywords);
  }
  return PyLong_FromSsize_t(mode_count() + (virtual_mode(thread) != nullptr));
}

// The builtin takes a tuple and a dict, and has no vectorcall.
PyObject* hook_at(PyObject*, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (virtual_mode(thread) != nullptr && is_call_of(1, nargsf, keywords)) {
    count_around();
    Py_ssize_t index = PyLong_AsSsize_t(values[0]);
    if (index == thread.depth) {
      return Py_NewRef(thread.mode);
    }
    if (index > thread.depth) {
      return mode_at(index - 1).release();
    }
    PyErr_Clear();
  }
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  Ref args(PyTuple_New(count)), kwargs;
  for (Py_ssize_t i = 0; args && i < count; i++) {
    PyTuple_SET_ITEM(args.get(), i, Py_NewRef(values[i]));
  }
  if (args && keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0) {
    kwargs = keywords_of(values + count, keywords);
  }
  if (PyErr_Occurred()) {
    return nullptr;
  }
  return as<PyCFunctionWithKeywords>(address_of(at.original))(at.self, args.get(), kwargs.get());
}

// Where a program turns modes off, what it calls is reported to none: PyTorch is to see ours. And where C++ is to push
// a mode, it lies above ours.
template <Builtin& BUILTIN>
PyObject* enter_above(PyObject* self, PyObject* argument) {
  return end_virtual() < 0 ? nullptr : BUILTIN.original(self, argument);
}

template <Builtin& BUILTIN>
PyObject* leave_above(PyObject* self, PyObject* argument) {
  Ref result(BUILTIN.original(self, argument));
  return result && settle() < 0 ? nullptr : result.release();
}

void push_back(PyObject* mode) {
  KeepError keep;
  if (is_installed && push_ours(mode) < 0) {
    PyErr_WriteUnraisable(mode);
  }
  Py_DECREF(mode);
}

// Run an operator with the mode on the stack: PyTorch reports it.
PyObject* report(const Invocation& call, PyObject* mode) {
  Site* site = call.site;
  if (push_mode(mode) < 0) {
    return nullptr;
  }
  Site* awaited = std::exchange(thread.awaited, site);
  int outer = std::exchange(thread.reports, 0);
  Ref result(run_original(call));
  bool is_reported = thread.reports > 0, is_result = result && result.get() != Py_NotImplemented;
  thread.awaited = awaited;
  thread.reports = outer;
  if (is_reported && is_result) {
    note_signature(call);
  }
  if (is_reported) {
    site->unreported = HEARD;
  } else if (site->unreported != HEARD) {
    site->unreported = is_result ? site->unreported + 1 : 0;
  }
  if (thread.mode == mode) {
    // Python has popped it and pushed it again (torch.overrides.handle_torch_function).
    Py_CLEAR(thread.mode);
    return result.release();
  }
  KeepError keep;
  Ref top(mode_count() > 0 ? pop_mode() : Ref());
  if (top && top.get() != mode) {
    push_mode(top.get());
  }
  PyErr_Clear();
  return result.release();
}

}  // namespace

PyObject* ask_python(const Invocation& call, PyObject* mode, Thread& here) {
  here.mode = nullptr;
  PyObject* result = report(call, mode);
  // What was reported may have changed the stack.
  push_back(mode);
  return result;
}

void put_back(Thread& here, PyObject* mode) {
  if (here.mode == nullptr && here.session == session) {
    here.mode = mode;
  } else {
    push_back(mode);
  }
}

// ---- trampolines ---------------------------------------------------------------------------------------------

namespace {

constexpr int KEYWORD_SITES = 1024, PLAIN_SITES = 512, OTHER_SITES = 4096;

Site keyword_sites[KEYWORD_SITES], plain_sites[PLAIN_SITES], other_sites[OTHER_SITES];
int keyword_count, plain_count, other_count;

template <int INDEX>
PyObject* through_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
  return intercept({.site = &keyword_sites[INDEX], .self = self, .args = args, .kwargs = kwargs});
}

template <int INDEX>
PyObject* through_plain(PyObject* self, PyObject* argument) {
  return intercept({.site = &plain_sites[INDEX], .self = self, .args = argument});
}

template <int... INDEX>
constexpr auto all_keywords(std::integer_sequence<int, INDEX...>) {
  return std::array<PyCFunctionWithKeywords, sizeof...(INDEX)>{through_keywords<INDEX>...};
}

template <int... INDEX>
constexpr auto all_plain(std::integer_sequence<int, INDEX...>) {
  return std::array<PyCFunction, sizeof...(INDEX)>{through_plain<INDEX>...};
}

const auto keyword_trampolines = all_keywords(std::make_integer_sequence<int, KEYWORD_SITES>());
const auto plain_trampolines = all_plain(std::make_integer_sequence<int, PLAIN_SITES>());

// Functions are found by their address: vectorcall is told which one is called.
constexpr int FUNCTION_SLOTS = 2 * OTHER_SITES;
Site* function_slots[FUNCTION_SLOTS];

Site*& function_slot(PyObject* function) {
  size_t i = (reinterpret_cast<uintptr_t>(function) >> 4) * 2654435761u;
  for (i %= FUNCTION_SLOTS;; i = (i + 1) % FUNCTION_SLOTS) {
    if (function_slots[i] == nullptr || function_slots[i]->owner == function) {
      return function_slots[i];
    }
  }
}

// As CPython calls a function that has no vectorcall: with a tuple, and a dict if there are names.
PyObject* through_function(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  Py_ssize_t count = PyVectorcall_NARGS(nargsf);
  Ref args(PyTuple_New(count)), kwargs;
  for (Py_ssize_t i = 0; args && i < count; i++) {
    PyTuple_SET_ITEM(args.get(), i, Py_NewRef(values[i]));
  }
  if (args && keywords != nullptr && PyTuple_GET_SIZE(keywords) > 0 && !(kwargs = keywords_of(values + count, keywords))) {
    return nullptr;
  }
  if (!args || Py_EnterRecursiveCall(" while calling a Python object") != 0) {
    return nullptr;
  }
  PyObject* result = intercept({.site = function_slot(function),
                                .self = PyCFunction_GET_SELF(function),
                                .args = args.get(),
                                .kwargs = kwargs.get()});
  Py_LeaveRecursiveCall();
  return result;
}

PyObject* through_getter(PyObject* self, void* closure) {
  return intercept({.site = static_cast<Site*>(closure), .self = self});
}

Site *subscript, *assignment;
PyObject* mapping_base;  // the type with a[i]

PyObject* through_subscript(PyObject* self, PyObject* index) {
  return intercept({.site = subscript, .self = self, .args = index});
}

int through_assignment(PyObject* self, PyObject* index, PyObject* value) {
  return Ref(intercept({.site = assignment, .self = self, .args = index, .kwargs = value})) ? 0 : -1;
}

// ---- objects that stand for functions of Python's ------------------------------------------------------------

enum class Role { OPERATOR, REPORTED, EVENT };

struct Call {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Role role;
  PyObject* vanilla;  // the function in whose place it stands
  Site site;
};

// ``mode.__torch_function__(func, types, args, kwargs)``: what PyTorch reports.
PyObject* call_event(Call* self, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  Site* site = thread.awaited;
  thread.reports++;
  if (site != nullptr && site->form != Form::CALLABLE && site->reported == nullptr && PyVectorcall_NARGS(nargsf) > 1) {
    Ref is_report(PyObject_CallFunction(is_report_of, "sO", site->name, values[1]));
    if (!is_report) {
      return nullptr;
    }
    if (is_report.get() == Py_True) {
      // Another thread may have noted it meanwhile.
      if (site->reported == nullptr) {
        site->reported = Py_NewRef(values[1]);
      }
      // What its implementation calls is none of its reports.
      thread.awaited = nullptr;
    }
  }
  return PyObject_Vectorcall(self->vanilla, values, nargsf, keywords);
}

PyObject* call_vectorcall(PyObject* object, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  auto* self = reinterpret_cast<Call*>(object);
  if (self->role == Role::EVENT) {
    return call_event(self, values, nargsf, keywords);
  }
  Invocation call = {.site = &self->site, .target = self->vanilla, .stack = values, .nargsf = nargsf, .names = keywords};
  if (virtual_mode(thread) == nullptr || PyVectorcall_NARGS(nargsf) == 0) {
    return run_original(call);
  }
  if (self->role == Role::OPERATOR) {
    call.known_as = values[0];
  }
  self->site.unreported = 0;
  return intercept(call);
}

PyObject* call_get(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

// Its name, its documentation and so on are those of the function.
PyObject* call_getattro(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found == nullptr && PyErr_ExceptionMatches(PyExc_AttributeError)) {
    PyErr_Clear();
    found = PyObject_GetAttr(reinterpret_cast<Call*>(self)->vanilla, name);
  }
  return found;
}

int call_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Call*>(self)->vanilla);
  return 0;
}

int call_clear(PyObject* self) {
  Py_CLEAR(reinterpret_cast<Call*>(self)->vanilla);
  return 0;
}

void call_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  call_clear(self);
  PyObject_GC_Del(self);
}

PyMemberDef call_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Call, vanilla), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

template <const char* NAME>
PyObject* call_of_vanilla(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Call*>(self)->vanilla, NAME);
}

constexpr char DOC[] = "__doc__", MODULE[] = "__module__";

// The type has attributes of these names, which come first.
PyGetSetDef call_properties[] = {
    {DOC, call_of_vanilla<DOC>, nullptr, nullptr, nullptr},
    {MODULE, call_of_vanilla<MODULE>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject make_call_type() {
  PyTypeObject type = {};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);
  type.tp_name = "amanda_torch_accel.gate.Call";
  type.tp_basicsize = sizeof(Call);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                  Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_vectorcall_offset = offsetof(Call, vectorcall);
  type.tp_call = PyVectorcall_Call;
  type.tp_descr_get = call_get;
  type.tp_getattro = call_getattro;
  type.tp_traverse = call_traverse;
  type.tp_clear = call_clear;
  type.tp_dealloc = call_dealloc;
  type.tp_members = call_members;
  type.tp_getset = call_properties;
  return type;
}

PyTypeObject Call_Type = make_call_type();

template <Role ROLE>
PyObject* new_call(PyObject*, PyObject* vanilla) {
  Call* self = PyObject_GC_New(Call, &Call_Type);
  if (self == nullptr) {
    return nullptr;
  }
  self->vectorcall = call_vectorcall;
  self->role = ROLE;
  self->vanilla = Py_NewRef(vanilla);
  self->site = Site();
  PyObject_GC_Track(self);
  return reinterpret_cast<PyObject*>(self);
}

// ---- calls of modules ----------------------------------------------------------------------------------------

PyObject* module_vanilla;     // PyTorch's ``nn.Module.__call__``
vectorcallfunc call_python;   // how CPython calls a function

// ``module(*args)``: the vectorcall of the driver's function for it, which runs where C++ cannot do it.
//
// It stays a Python function, since Dynamo has to see what it does; where the interpreter calls it without vectorcall,
// all of it is done in Python.
PyObject* through_module(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  Ref mode = Ref::to(virtual_mode(thread)), parent;
  auto* tracker = reinterpret_cast<Tracker*>(mode.get());
  if (mode && PyVectorcall_NARGS(nargsf) > 0) {
    parent = enter_module(tracker, values[0]);
  }
  if (!parent) {
    PyErr_Clear();
    return call_python(function, values, nargsf, keywords);
  }
  PyObject* result = PyObject_Vectorcall(module_vanilla, values, nargsf, keywords);
  KeepError keep;
  leave_module(tracker, parent.get());
  return result;
}

PyObject* gate_module_call(PyObject*, PyObject* args) {
  PyObject *vanilla, *function;
  if (!PyArg_ParseTuple(args, "OO!", &vanilla, &PyFunction_Type, &function)) {
    return nullptr;
  }
  Py_XDECREF(std::exchange(module_vanilla, Py_NewRef(vanilla)));
  call_python = reinterpret_cast<PyFunctionObject*>(function)->vectorcall;
  reinterpret_cast<PyFunctionObject*>(function)->vectorcall = through_module;
  return Py_NewRef(function);
}

// ---- setting up ----------------------------------------------------------------------------------------------

Site* add_site(Site* sites, int& count, int size, const Site& site) {
  for (int i = 0; i < count; i++) {
    if (sites[i].place == site.place) {
      return &sites[i];
    }
  }
  if (count == size) {
    PyErr_SetString(PyExc_RuntimeError, "there are more builtins than there is room for");
    return nullptr;
  }
  sites[count] = site;
  Py_INCREF(site.owner);
  return &sites[count++];
}

Site* refuse(const char* name, int flags) {
  PyErr_Format(PyExc_ValueError, "%s has a form of call that is not known: %d", name, flags);
  return nullptr;
}

Site* add_method(PyObject* descriptor) {
  PyMethodDef* def = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
  int flags = def->ml_flags & ~METH_COEXIST;
  Site site;
  site.flags = flags;
  site.name = def->ml_name;
  site.owner = descriptor;
  site.place = def;
  site.original = address_of(def->ml_meth);
  if (flags == (METH_VARARGS | METH_KEYWORDS)) {
    site.form = Form::KEYWORDS;
    return add_site(keyword_sites, keyword_count, KEYWORD_SITES, site);
  }
  if (flags == METH_VARARGS || flags == METH_NOARGS || flags == METH_O) {
    site.form = Form::PLAIN;
    return add_site(plain_sites, plain_count, PLAIN_SITES, site);
  }
  return refuse(def->ml_name, def->ml_flags);
}

Site* add_function(PyObject* function) {
  auto* object = reinterpret_cast<PyCFunctionObject*>(function);
  PyMethodDef* def = object->m_ml;
  if ((def->ml_flags & ~(METH_COEXIST | METH_STATIC)) != (METH_VARARGS | METH_KEYWORDS) || object->vectorcall != nullptr) {
    return refuse(def->ml_name, def->ml_flags);
  }
  Site site;
  site.form = Form::FUNCTION;
  site.name = def->ml_name;
  site.owner = function;
  site.place = function;
  site.original = address_of(def->ml_meth);
  Site* made = add_site(other_sites, other_count, OTHER_SITES, site);
  if (made != nullptr) {
    function_slot(function) = made;
  }
  return made;
}

Site* add_property(PyObject* descriptor) {
  PyGetSetDef* def = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
  Site site;
  site.form = Form::GETTER;
  site.name = def->name;
  site.owner = descriptor;
  site.place = def;
  site.original = address_of(def->get);
  site.closure = def->closure;
  return add_site(other_sites, other_count, OTHER_SITES, site);
}

PyDoc_STRVAR(add_doc,
             "add(builtin, reports_first)\n\nNotice calls of a method, a function or a property.\n\n"
             "Args:\n    reports_first: PyTorch reports it before it looks at the arguments.\n\n"
             "Raises:\n    ValueError: it is called in a form that is not known.");

PyObject* gate_add(PyObject*, PyObject* args) {
  PyObject* builtin;
  int reports_first;
  if (!PyArg_ParseTuple(args, "Op", &builtin, &reports_first)) {
    return nullptr;
  }
  if (is_installed) {
    PyErr_SetString(PyExc_RuntimeError, "the gate is installed");
    return nullptr;
  }
  Site* site = nullptr;
  if (Py_IS_TYPE(builtin, &PyMethodDescr_Type)) {
    site = add_method(builtin);
  } else if (PyCFunction_CheckExact(builtin)) {
    site = add_function(builtin);
  } else if (Py_IS_TYPE(builtin, &PyGetSetDescr_Type)) {
    site = add_property(builtin);
  } else {
    PyErr_Format(PyExc_ValueError, "%R is no builtin of a known kind", builtin);
  }
  if (site == nullptr) {
    return nullptr;
  }
  site->reports_first = reports_first;
  Py_RETURN_NONE;
}

PyDoc_STRVAR(add_mapping_doc, "add_mapping(type)\n\nNotice a[i] and a[i] = b of a builtin type and its subclasses.");

PyObject* gate_add_mapping(PyObject*, PyObject* object) {
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  PyMappingMethods* mapping = PyType_Check(object) ? type->tp_as_mapping : nullptr;
  if (is_installed || mapping == nullptr || mapping->mp_subscript == nullptr || mapping->mp_ass_subscript == nullptr) {
    PyErr_SetString(PyExc_ValueError, "no type with both, or the gate is installed");
    return nullptr;
  }
  if (mapping_base == object) {
    Py_RETURN_NONE;
  }
  Site site;
  site.owner = object;
  site.form = Form::SUBSCRIPT;
  site.name = "__getitem__";
  site.place = &mapping->mp_subscript;
  site.original = address_of(mapping->mp_subscript);
  subscript = add_site(other_sites, other_count, OTHER_SITES, site);
  site.form = Form::ASSIGNMENT;
  site.name = "__setitem__";
  site.place = &mapping->mp_ass_subscript;
  site.original = address_of(mapping->mp_ass_subscript);
  assignment = add_site(other_sites, other_count, OTHER_SITES, site);
  if (subscript == nullptr || assignment == nullptr) {
    return nullptr;
  }
  Py_XDECREF(std::exchange(mapping_base, Py_NewRef(object)));
  Py_RETURN_NONE;
}

// Exchange what stands in a place, unless others have replaced it.
template <typename T>
void exchange_in(T& there, T old, T replacement) {
  if (there == old) {
    there = replacement;
  }
}

// Replace the slots of a type and its subclasses.
int replace_mapping(PyObject* type, binaryfunc get, binaryfunc new_get, objobjargproc set, objobjargproc new_set) {
  PyMappingMethods* mapping = reinterpret_cast<PyTypeObject*>(type)->tp_as_mapping;
  if (mapping != nullptr) {
    exchange_in(mapping->mp_subscript, get, new_get);
    exchange_in(mapping->mp_ass_subscript, set, new_set);
  }
  Ref below(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyType_Type), "__subclasses__", "O", type));
  for (Py_ssize_t i = 0; below && i < PyList_GET_SIZE(below.get()); i++) {
    if (replace_mapping(PyList_GET_ITEM(below.get(), i), get, new_get, set, new_set) < 0) {
      return -1;
    }
  }
  return below ? 0 : -1;
}

void replace_wrapped(const char* name, void* old, void* replacement) {
  PyObject* found = PyDict_GetItemString(reinterpret_cast<PyTypeObject*>(mapping_base)->tp_dict, name);
  if (found != nullptr && Py_IS_TYPE(found, &PyWrapperDescr_Type)) {
    exchange_in(reinterpret_cast<PyWrapperDescrObject*>(found)->d_wrapped, old, replacement);
  }
}

int set_mapping(bool on) {
  if (mapping_base == nullptr) {
    return 0;
  }
  void* gets[] = {subscript->original, address_of(through_subscript)};
  void* sets[] = {assignment->original, address_of(through_assignment)};
  replace_wrapped("__getitem__", gets[!on], gets[on]);
  replace_wrapped("__setitem__", sets[!on], sets[on]);
  replace_wrapped("__delitem__", sets[!on], sets[on]);
  return replace_mapping(mapping_base, as<binaryfunc>(gets[!on]), as<binaryfunc>(gets[on]), as<objobjargproc>(sets[!on]),
                         as<objobjargproc>(sets[on]));
}

void set_method(const Site& site, PyCFunction trampoline, bool on) {
  PyCFunction functions[] = {as<PyCFunction>(site.original), trampoline};
  exchange_in(static_cast<PyMethodDef*>(site.place)->ml_meth, functions[!on], functions[on]);
}

void set_other(Site& site, bool on) {
  if (site.form == Form::FUNCTION) {
    vectorcallfunc functions[] = {nullptr, through_function};
    exchange_in(static_cast<PyCFunctionObject*>(site.place)->vectorcall, functions[!on], functions[on]);
  } else if (site.form == Form::GETTER) {
    auto* def = static_cast<PyGetSetDef*>(site.place);
    getter functions[] = {as<getter>(site.original), through_getter};
    if (def->get == functions[!on]) {
      def->closure = on ? &site : site.closure;
      def->get = functions[on];
    }
  }
}

void set_method_hook(Builtin& builtin, PyCFunction hook, bool on) {
  builtin.own = *builtin.def;
  builtin.own.ml_meth = hook;
  PyMethodDef* defs[] = {builtin.def, &builtin.own};
  exchange_in(reinterpret_cast<PyMethodDescrObject*>(builtin.owner)->d_method, defs[!on], defs[on]);
}

// Not ml_meth, of which the hash is made: Dynamo keeps what it knows of functions by them.
void set_function_hook(Builtin& builtin, vectorcallfunc hook, bool on) {
  auto* function = reinterpret_cast<PyCFunctionObject*>(builtin.owner);
  vectorcallfunc functions[] = {builtin.vectorcall, hook};
  if (function->vectorcall != functions[!on]) {
    return;
  }
  function->vectorcall = functions[on];
  if (builtin.flags == METH_O) {
    // A specialised instruction calls what has exactly this flag by its ml_meth.
    builtin.def->ml_flags = on ? METH_O | METH_COEXIST : METH_O;
  }
}

int set_all(bool on) {
  for (int i = 0; i < keyword_count; i++) {
    set_method(keyword_sites[i], as<PyCFunction>(address_of(keyword_trampolines[i])), on);
  }
  for (int i = 0; i < plain_count; i++) {
    set_method(plain_sites[i], plain_trampolines[i], on);
  }
  for (int i = 0; i < other_count; i++) {
    set_other(other_sites[i], on);
  }
  set_function_hook(push, hook_push, on);
  set_function_hook(pop, hook_pop, on);
  set_function_hook(length, hook_length, on);
  set_function_hook(at, hook_at, on);
  set_method_hook(disable, enter_above<disable>, on);
  set_method_hook(enable, leave_above<enable>, on);
  set_method_hook(place, enter_above<place>, on);
  set_method_hook(replace, leave_above<replace>, on);
  return set_mapping(on);
}

PyObject* gate_install(PyObject*, PyObject*) {
  if (mode_type == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
    return nullptr;
  }
  is_installed = true;
  return set_all(true) < 0 ? nullptr : Py_NewRef(Py_None);
}

PyObject* gate_restore(PyObject*, PyObject*) {
  if (!is_installed) {
    Py_RETURN_NONE;
  }
  session++;
  virtual_mode(thread);
  is_installed = false;
  return set_all(false) < 0 ? nullptr : Py_NewRef(Py_None);
}

PyObject* gate_is_installed(PyObject*, PyObject*) { return PyBool_FromLong(is_installed); }

PyDoc_STRVAR(sites_doc,
             "sites()\n\nWhat is noticed: tuples of its name, the builtin, the address that is written to, what stands "
             "there now, and what PyTorch reports for it (None if not known).");

int append_row(PyObject* list, const char* name, PyObject* owner, void* address, PyObject* reported) {
  void* now;
  std::memcpy(&now, address, sizeof now);
  Ref row(Py_BuildValue("sOKKO", name, owner, (unsigned long long)(uintptr_t)address, (unsigned long long)(uintptr_t)now,
                        reported == nullptr ? Py_None : reported));
  return row ? PyList_Append(list, row.get()) : -1;
}

int append_sites(PyObject* list, const Site* sites, int count) {
  for (int i = 0; i < count; i++) {
    const Site& site = sites[i];
    void* address = site.place;
    if (site.form == Form::KEYWORDS || site.form == Form::PLAIN) {
      address = &static_cast<PyMethodDef*>(site.place)->ml_meth;
    } else if (site.form == Form::FUNCTION) {
      address = &static_cast<PyCFunctionObject*>(site.place)->vectorcall;
    } else if (site.form == Form::GETTER) {
      address = &static_cast<PyGetSetDef*>(site.place)->get;
    }
    if (append_row(list, site.name, site.owner, address, site.reported) < 0) {
      return -1;
    }
  }
  return 0;
}

PyObject* gate_sites(PyObject*, PyObject*) {
  if (mode_type == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
    return nullptr;
  }
  Ref list(PyList_New(0));
  if (!list) {
    return nullptr;
  }
  for (Builtin* hook : {&push, &pop, &length, &at, &disable, &enable, &place, &replace}) {
    void* address = Py_IS_TYPE(hook->owner, &PyMethodDescr_Type)
                        ? static_cast<void*>(&reinterpret_cast<PyMethodDescrObject*>(hook->owner)->d_method)
                        : static_cast<void*>(&reinterpret_cast<PyCFunctionObject*>(hook->owner)->vectorcall);
    if (append_row(list.get(), hook->def->ml_name, hook->owner, address, nullptr) < 0) {
      return nullptr;
    }
  }
  bool failed = append_sites(list.get(), keyword_sites, keyword_count) < 0 ||
                append_sites(list.get(), plain_sites, plain_count) < 0 ||
                append_sites(list.get(), other_sites, other_count) < 0;
  return failed ? nullptr : list.release();
}

// Note a builtin with the type and the flags that are expected of it.
int find_builtin(Builtin& builtin, PyObject* object, PyTypeObject* type, int flags) {
  if (Py_IS_TYPE(object, type)) {
    if (type == &PyMethodDescr_Type) {
      builtin.def = reinterpret_cast<PyMethodDescrObject*>(object)->d_method;
    } else {
      builtin.def = reinterpret_cast<PyCFunctionObject*>(object)->m_ml;
      builtin.self = PyCFunction_GET_SELF(object);
      builtin.vectorcall = reinterpret_cast<PyCFunctionObject*>(object)->vectorcall;
    }
  }
  if (builtin.def == nullptr || (builtin.def->ml_flags & ~METH_COEXIST) != flags) {
    PyErr_Format(PyExc_ValueError, "%R has a form of call that is not known", object);
    return -1;
  }
  builtin.owner = Py_NewRef(object);
  builtin.original = builtin.def->ml_meth;
  builtin.flags = builtin.def->ml_flags;
  return 0;
}

PyDoc_STRVAR(configure_doc,
             "configure(mode, is_report_of, builtins)\n\nName the objects of the driver and of PyTorch, once per process.\n\n"
             "Args:\n    mode: the class of modes that become virtual, a subclass of Tracker.\n"
             "    is_report_of: whether PyTorch reports an object for a builtin of a name.\n"
             "    builtins: push, pop, length and at of the stack of modes; __enter__ and __exit__ of what turns it off,\n"
             "        and of what pushes and pops a mode in C++.");

PyObject* gate_configure(PyObject*, PyObject* args) {
  PyObject *mode, *function, *found[8];
  if (mode_type != nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "the gate has been configured");
    return nullptr;
  }
  if (!PyArg_ParseTuple(args, "O!O(OOOOOOOO)", &PyType_Type, &mode, &function, &found[0], &found[1], &found[2], &found[3],
                        &found[4], &found[5], &found[6], &found[7])) {
    return nullptr;
  }
  if (!PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(mode), &Tracker_Type)) {
    PyErr_SetString(PyExc_TypeError, "the class of modes is no subclass of Tracker");
    return nullptr;
  }
  if (find_builtin(push, found[0], &PyCFunction_Type, METH_O) < 0 ||
      find_builtin(pop, found[1], &PyCFunction_Type, METH_NOARGS) < 0 ||
      find_builtin(length, found[2], &PyCFunction_Type, METH_NOARGS) < 0 ||
      find_builtin(at, found[3], &PyCFunction_Type, METH_VARARGS | METH_KEYWORDS) < 0 ||
      find_builtin(disable, found[4], &PyMethodDescr_Type, METH_NOARGS) < 0 ||
      find_builtin(enable, found[5], &PyMethodDescr_Type, METH_VARARGS) < 0 ||
      find_builtin(place, found[6], &PyMethodDescr_Type, METH_NOARGS) < 0 ||
      find_builtin(replace, found[7], &PyMethodDescr_Type, METH_VARARGS) < 0) {
    return nullptr;
  }
  is_report_of = Py_NewRef(function);
  mode_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(mode));
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"add", gate_add, METH_VARARGS, add_doc},
    {"add_mapping", gate_add_mapping, METH_O, add_mapping_doc},
    {"configure", gate_configure, METH_VARARGS, configure_doc},
    {"event", new_call<Role::EVENT>, METH_O, "event(handler)\n\nFor ``__torch_function__`` of the mode."},
    {"install", gate_install, METH_NOARGS, "install()\n\nNotice calls from now on."},
    {"is_installed", gate_is_installed, METH_NOARGS, "is_installed()\n\nWhether calls are noticed."},
    {"module_call", gate_module_call, METH_VARARGS,
     "module_call(vanilla, function)\n\nHave a function for ``__call__`` of modules run in C++ where that can be, and "
     "return it.\n\nArgs:\n    vanilla: calls the module.\n    function: enters it, calls it and leaves it."},
    {"operator_call", new_call<Role::OPERATOR>, METH_O,
     "operator_call(vanilla)\n\nFor ``__call__`` of a class of operators: calls are noticed as those of the instance."},
    {"reported", new_call<Role::REPORTED>, METH_O,
     "reported(vanilla)\n\nFor a function that reports itself to modes although it is no operator: it always does."},
    {"restore", gate_restore, METH_NOARGS,
     "restore()\n\nPut back what is still the gate's. No mode is virtual from then on."},
    {"sites", gate_sites, METH_NOARGS, sites_doc},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int prepare_trampolines(PyObject* module) {
  return PyType_Ready(&Call_Type) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}

}  // namespace accel
