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
//   torch.ops           nothing here: the driver puts functions there that call ask()
//
// All of this is in CPython's public headers, but nothing promises that a program may write there. So the unit is
// optional: amanda_torch.eager.gate runs a self-test before it is used, which compares what it notices with what the
// mode notices, and whether PyTorch is as it was afterwards; where that fails, the mode is used, and sees the same.

#include "invocation.h"
#include "torch_api.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <unordered_map>

namespace accel {

namespace {

thread_local Thread thread;

// Counts up where the gate is taken off: virtual modes of other threads, which cannot be reached from here, are none
// from then on.
unsigned session;
bool is_installed;

template <typename T>
T as(void* function) { return reinterpret_cast<T>(function); }

template <typename T>
void* address_of(T* function) { return reinterpret_cast<void*>(function); }

// Arguments of a vectorcall as a tuple, and as a dict if there are names; false with an error.
bool pack(PyObject* const* values, size_t nargsf, PyObject* keywords, Ref& args, Ref& kwargs) {
  Py_ssize_t count = PyVectorcall_NARGS(nargsf), named = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  args = make_tuple(count, [values](Py_ssize_t i) { return Py_NewRef(values[i]); });
  kwargs = Ref(args && named > 0 ? PyDict_New() : nullptr);
  for (Py_ssize_t i = 0; kwargs && i < named; i++) {
    if (PyDict_SetItem(kwargs.get(), PyTuple_GET_ITEM(keywords, i), values[count + i]) < 0) {
      return false;
    }
  }
  return args && (kwargs || named == 0);
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
      return PyObject_Call(call.self, call.args, call.kwargs);
  }
  Py_UNREACHABLE();
}

Positional::Positional(const Invocation& call) {
  Form form = call.site->form;
  if (form != Form::FUNCTION) {
    self_ = call.self;
  }
  if (form <= Form::FUNCTION && call.site->flags == METH_VARARGS) {
    items_ = PySequence_Fast_ITEMS(call.args);
    count_ = PyTuple_GET_SIZE(call.args);
  } else if (call.args != nullptr) {
    items_ = &call.args;
    count_ = 1;
  }
}

Ref reported_args(const Invocation& call) {
  Positional given(call);
  return make_tuple(given.count(), [&given](Py_ssize_t i) { return Py_NewRef(given[i]); });
}

Ref reported_kwargs(const Invocation& call) {
  return call.kwargs != nullptr ? Ref::to(call.kwargs) : Ref(PyDict_New());
}

// ---- the stack of modes --------------------------------------------------------------------------------------

namespace {

bool is_ours(PyObject* mode) { return is_a(mode, reinterpret_cast<PyTypeObject*>(objects.mode)); }

// How many modes are really there; C++ may have taken off some that lay below the virtual one.
Py_ssize_t count_around() {
  Py_ssize_t count = mode_count();
  thread.depth = std::min(thread.depth, count);
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

Ref top_mode() {
  Py_ssize_t count = mode_count();
  return count > 0 ? mode_at(count - 1) : Ref();
}

// If a mode of ours lies on top of the stack, it becomes virtual.
int settle() {
  Ref top = virtual_mode(thread) == nullptr ? top_mode() : Ref();
  if (!top || !is_ours(top.get())) {
    return 0;
  }
  return pop_mode() ? push_ours(top.get()) : -1;
}

// True if a function is called with as many arguments as it takes, and no names.
bool is_call_of(Py_ssize_t count, size_t nargsf, PyObject* keywords) {
  return PyVectorcall_NARGS(nargsf) == count && (keywords == nullptr || PyTuple_GET_SIZE(keywords) == 0);
}

// The functions of PyTorch's by which Python changes the stack, or asks about it: how they were called.
enum { PUSH, POP, LENGTH, AT, FUNCTIONS };
vectorcallfunc original_calls[FUNCTIONS];
PyMethodDef* push_def;

PyObject* hook_push(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (is_call_of(1, nargsf, keywords)) {
    if (is_ours(values[0])) {
      return push_ours(values[0]) < 0 ? nullptr : Py_NewRef(Py_None);
    }
    if (end_virtual() < 0) {
      return nullptr;
    }
  }
  return original_calls[PUSH](function, values, nargsf, keywords);
}

PyObject* hook_pop(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  bool has_virtual = virtual_mode(thread) != nullptr;
  if (is_call_of(0, nargsf, keywords) && has_virtual && count_around() <= thread.depth) {
    return std::exchange(thread.mode, nullptr);
  }
  Ref mode(original_calls[POP](function, values, nargsf, keywords));
  return mode && !has_virtual && !is_ours(mode.get()) && settle() < 0 ? nullptr : mode.release();
}

PyObject* hook_length(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  return is_call_of(0, nargsf, keywords) ? PyLong_FromSsize_t(mode_count() + (virtual_mode(thread) != nullptr))
                                         : original_calls[LENGTH](function, values, nargsf, keywords);
}

// The builtin takes a tuple and a dict, and has no vectorcall.
PyObject* hook_at(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  if (virtual_mode(thread) != nullptr && is_call_of(1, nargsf, keywords)) {
    count_around();
    Py_ssize_t index = PyLong_AsSsize_t(values[0]);
    if (index >= thread.depth) {
      return index == thread.depth ? Py_NewRef(thread.mode) : mode_at(index - 1).release();
    }
    PyErr_Clear();
  }
  Ref args, kwargs;
  auto* original = as<PyCFunctionWithKeywords>(address_of(PyCFunction_GET_FUNCTION(function)));
  return pack(values, nargsf, keywords, args, kwargs)
             ? original(PyCFunction_GET_SELF(function), args.get(), kwargs.get())
             : nullptr;
}

// The methods that turn modes off and on, and that push and pop a mode in C++ (torch.device): where a program turns
// modes off, what it calls is reported to none, and PyTorch is to see ours; where C++ pushes a mode, it lies above
// ours. Their descriptors refer to a definition of ours instead of PyTorch's, which may be const.
enum { DISABLE, ENABLE, PLACE, REPLACE, METHODS };
PyMethodDef *original_methods[METHODS], own_methods[METHODS];

constexpr int BUILTINS = int{FUNCTIONS} + int{METHODS};

template <int METHOD>
PyObject* enter_above(PyObject* self, PyObject* argument) {
  return end_virtual() < 0 ? nullptr : original_methods[METHOD]->ml_meth(self, argument);
}

template <int METHOD>
PyObject* leave_above(PyObject* self, PyObject* argument) {
  Ref result(original_methods[METHOD]->ml_meth(self, argument));
  return result && settle() < 0 ? nullptr : result.release();
}

}  // namespace

PyObject* ask_python(const Invocation& call, Thread& here) {
  Ref mode(std::exchange(here.mode, nullptr));
  if (push_mode(mode.get()) < 0) {
    put_back(here, mode.release());
    return nullptr;
  }
  Site* awaited = std::exchange(here.awaited, call.site);
  int outer = std::exchange(here.reports, 0);
  Ref result(run_original(call));
  bool is_reported = std::exchange(here.reports, outer) > 0;
  here.awaited = awaited;
  if (is_reported && result && result.get() != Py_NotImplemented) {
    note_signature(call);
  }
  KeepError keep;
  // Python may have made it virtual again, and it may lie below a mode that the operator has pushed.
  if (top_mode().get() == mode.get() && pop_mode()) {
    put_back(here, mode.release());
  }
  PyErr_Clear();
  return result.release();
}

bool is_taken(const Invocation& call, PyObject* mode, Thread& here) {
  KeepError keep;
  if (push_mode(mode) < 0) {
    PyErr_Clear();
    return true;
  }
  int outer = std::exchange(here.reports, 0);
  here.only_asks = true;
  Ref result(run_original(call));
  here.only_asks = false;
  bool is_reported = std::exchange(here.reports, outer) > 0;
  Ref top = pop_mode();
  PyErr_Clear();
  return is_reported;
}

void put_back(Thread& here, PyObject* mode) {
  if (here.mode == nullptr && here.session == session) {
    here.mode = mode;
    here.depth = mode_count();
    return;
  }
  KeepError keep;
  if (is_installed && push_ours(mode) < 0) {
    PyErr_WriteUnraisable(mode);
  }
  Py_DECREF(mode);
}

// ---- trampolines ---------------------------------------------------------------------------------------------

namespace {

// What is replaced, by the definition, the function or the slot that it is found by. It is never destroyed: a trampoline
// may run until the process ends.
auto& sites = *new std::unordered_map<const void*, Site>();

constexpr int KEYWORD_SITES = 1024, PLAIN_SITES = 512;
Site *keyword_sites[KEYWORD_SITES], *plain_sites[PLAIN_SITES];
int keyword_count, plain_count;

template <int INDEX>
PyObject* through_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
  return intercept({.site = keyword_sites[INDEX], .self = self, .args = args, .kwargs = kwargs});
}

template <int INDEX>
PyObject* through_plain(PyObject* self, PyObject* argument) {
  return intercept({.site = plain_sites[INDEX], .self = self, .args = argument});
}

template <typename F, int... INDEX>
constexpr auto for_all(F at, std::integer_sequence<int, INDEX...>) {
  return std::array{at(std::integral_constant<int, INDEX>())...};
}

const auto keyword_trampolines = for_all([](auto index) { return &through_keywords<index>; },
                                         std::make_integer_sequence<int, KEYWORD_SITES>());
const auto plain_trampolines = for_all([](auto index) { return &through_plain<index>; },
                                       std::make_integer_sequence<int, PLAIN_SITES>());

// As CPython calls a function that has no vectorcall: with a tuple, and a dict if there are names.
PyObject* through_function(PyObject* function, PyObject* const* values, size_t nargsf, PyObject* keywords) {
  Ref args, kwargs;
  if (!pack(values, nargsf, keywords, args, kwargs) || Py_EnterRecursiveCall(" while calling a Python object") != 0) {
    return nullptr;
  }
  PyObject* result = intercept({.site = &sites.find(function)->second,
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
PyTypeObject* mapping_base;  // the type with a[i]

PyObject* through_subscript(PyObject* self, PyObject* index) {
  return intercept({.site = subscript, .self = self, .args = index});
}

int through_assignment(PyObject* self, PyObject* index, PyObject* value) {
  return Ref(intercept({.site = assignment, .self = self, .args = index, .kwargs = value})) ? 0 : -1;
}

// ---- reports -------------------------------------------------------------------------------------------------

PyObject* gate_ask(PyObject*, PyObject* given) {
  PyObject *function, *args, *kwargs;
  if (!PyArg_ParseTuple(given, "OO!O!", &function, &PyTuple_Type, &args, &PyDict_Type, &kwargs)) {
    return nullptr;
  }
  static Site site;
  Invocation call = {.site = &site, .self = function, .args = args, .kwargs = kwargs};
  return virtual_mode(thread) == nullptr ? run_original(call) : ask_python(call, thread);
}

PyObject* gate_note_report(PyObject*, PyObject* func) {
  thread.reports++;
  Site* site = thread.awaited;
  if (!thread.only_asks && site != nullptr && site->form != Form::CALLABLE && site->reported == nullptr) {
    Ref is_report(PyObject_CallFunction(objects.is_report_of, "sO", site->name, func));
    if (!is_report) {
      return nullptr;
    }
    if (is_report.get() == Py_True) {
      // Another thread may have noted it meanwhile.
      if (site->reported == nullptr) {
        site->reported = Py_NewRef(func);
      }
      // What its implementation calls is none of its reports.
      thread.awaited = nullptr;
    }
  }
  return PyBool_FromLong(thread.only_asks);
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

// A pointer of CPython's or PyTorch's, and what stands there while the gate is on.
struct Place {
  PyObject* owner;  // what it belongs to, which is kept alive
  void* address;
  void *original, *replacement;
};
auto& places = *new std::vector<Place>();

void* read_place(const void* address) {
  void* found;
  std::memcpy(&found, address, sizeof found);
  return found;
}

void add_place(PyObject* owner, void* address, void* replacement) {
  places.push_back({Py_NewRef(owner), address, read_place(address), replacement});
}

// Exchange what stands there, unless others have replaced it.
void exchange(void* address, void* old, void* replacement) {
  if (read_place(address) == old) {
    std::memcpy(address, &replacement, sizeof replacement);
  }
}

// Note a site, once for all objects that are found by the same key; nullptr if it is known.
Site* add_site(const void* key, Form form, int flags, const char* name, void* original) {
  auto [found, is_new] = sites.try_emplace(key);
  if (!is_new) {
    return nullptr;
  }
  Site& site = found->second;
  site.form = form;
  site.flags = flags;
  site.name = name;
  site.original = original;
  return &site;
}

// Note a method: 1; 0 if it is called in a form that is not known.
int add_method(PyObject* descriptor) {
  PyMethodDef* def = reinterpret_cast<PyMethodDescrObject*>(descriptor)->d_method;
  int flags = def->ml_flags & ~METH_COEXIST;
  bool has_keywords = flags == (METH_VARARGS | METH_KEYWORDS);
  if (!has_keywords && flags != METH_VARARGS && flags != METH_NOARGS && flags != METH_O) {
    return 0;
  }
  Form form = has_keywords ? Form::KEYWORDS : Form::PLAIN;
  Site* site = add_site(def, form, flags & ~METH_KEYWORDS, def->ml_name, address_of(def->ml_meth));
  if (site == nullptr) {
    return 1;
  }
  int& count = has_keywords ? keyword_count : plain_count;
  if (count == (has_keywords ? KEYWORD_SITES : PLAIN_SITES)) {
    return 0;
  }
  (has_keywords ? keyword_sites : plain_sites)[count] = site;
  add_place(descriptor, &def->ml_meth,
            has_keywords ? address_of(keyword_trampolines[count]) : address_of(plain_trampolines[count]));
  count++;
  return 1;
}

int add_function(PyObject* object) {
  auto* function = reinterpret_cast<PyCFunctionObject*>(object);
  PyMethodDef* def = function->m_ml;
  if ((def->ml_flags & ~(METH_COEXIST | METH_STATIC)) != (METH_VARARGS | METH_KEYWORDS) ||
      function->vectorcall != nullptr) {
    return 0;
  }
  if (add_site(object, Form::FUNCTION, METH_VARARGS, def->ml_name, address_of(def->ml_meth)) != nullptr) {
    add_place(object, &function->vectorcall, address_of(through_function));
  }
  return 1;
}

int add_property(PyObject* descriptor) {
  PyGetSetDef* def = reinterpret_cast<PyGetSetDescrObject*>(descriptor)->d_getset;
  if (Site* site = add_site(def, Form::GETTER, 0, def->name, address_of(def->get))) {
    site->closure = def->closure;
    add_place(descriptor, &def->get, address_of(through_getter));
    add_place(descriptor, &def->closure, site);
  }
  return 1;
}

PyObject* gate_add(PyObject*, PyObject* builtin) {
  if (is_installed) {
    PyErr_SetString(PyExc_RuntimeError, "the gate is installed");
    return nullptr;
  }
  auto add = [builtin] {
    return Py_IS_TYPE(builtin, &PyMethodDescr_Type)   ? add_method(builtin)
           : PyCFunction_CheckExact(builtin)          ? add_function(builtin)
           : Py_IS_TYPE(builtin, &PyGetSetDescr_Type) ? add_property(builtin)
                                                      : 0;
  };
  int is_added = guarded(add, -1);
  if (is_added == 0) {
    PyErr_Format(PyExc_ValueError, "%R has no form of call that is known", builtin);
  }
  return is_added > 0 ? Py_NewRef(Py_None) : nullptr;
}

PyObject* gate_add_mapping(PyObject*, PyObject* object) {
  auto* type = reinterpret_cast<PyTypeObject*>(object);
  PyMappingMethods* mapping = PyType_Check(object) ? type->tp_as_mapping : nullptr;
  if (is_installed || mapping_base != nullptr || mapping == nullptr || mapping->mp_subscript == nullptr ||
      mapping->mp_ass_subscript == nullptr) {
    PyErr_SetString(PyExc_ValueError, "no type with both, or another one is noticed");
    return nullptr;
  }
  auto add = [object, type, mapping] {
    void *get = address_of(mapping->mp_subscript), *set = address_of(mapping->mp_ass_subscript);
    subscript = add_site(&mapping->mp_subscript, Form::SUBSCRIPT, 0, "__getitem__", get);
    assignment = add_site(&mapping->mp_ass_subscript, Form::ASSIGNMENT, 0, "__setitem__", set);
    add_place(object, &mapping->mp_subscript, address_of(through_subscript));
    add_place(object, &mapping->mp_ass_subscript, address_of(through_assignment));
    for (const char* name : {"__getitem__", "__setitem__", "__delitem__"}) {
      PyObject* found = PyDict_GetItemString(type->tp_dict, name);
      if (found != nullptr && Py_IS_TYPE(found, &PyWrapperDescr_Type)) {
        void*& wrapped = reinterpret_cast<PyWrapperDescrObject*>(found)->d_wrapped;
        add_place(found, &wrapped, wrapped == get ? address_of(through_subscript) : address_of(through_assignment));
      }
    }
    mapping_base = type;
    return Py_NewRef(Py_None);
  };
  return guarded(add, nullptr);
}

// Exchange the slots of the subclasses of a type, which they have inherited.
int exchange_slots(PyObject* type, bool on) {
  Ref below(PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyType_Type), "__subclasses__", "O", type));
  for (Py_ssize_t i = 0; below && i < PyList_GET_SIZE(below.get()); i++) {
    PyObject* one = PyList_GET_ITEM(below.get(), i);
    if (PyMappingMethods* mapping = reinterpret_cast<PyTypeObject*>(one)->tp_as_mapping) {
      void* gets[] = {subscript->original, address_of(through_subscript)};
      void* sets[] = {assignment->original, address_of(through_assignment)};
      exchange(&mapping->mp_subscript, gets[!on], gets[on]);
      exchange(&mapping->mp_ass_subscript, sets[!on], sets[on]);
    }
    if (exchange_slots(one, on) < 0) {
      return -1;
    }
  }
  return below ? 0 : -1;
}

PyObject* exchange_all(bool on) {
  for (const Place& place : places) {
    exchange(place.address, on ? place.original : place.replacement, on ? place.replacement : place.original);
  }
  // CPython's specialised instruction for METH_O calls ml_meth and would pass the trampoline by; METH_COEXIST keeps it
  // away. ml_meth cannot be exchanged: functions are hashed by it, and Dynamo keeps what it knows of them by that hash.
  push_def->ml_flags = on ? METH_O | METH_COEXIST : METH_O;
  return mapping_base == nullptr || exchange_slots(reinterpret_cast<PyObject*>(mapping_base), on) == 0
             ? Py_NewRef(Py_None)
             : nullptr;
}

PyObject* gate_install(PyObject*, PyObject*) {
  if (push_def == nullptr) {
    PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
    return nullptr;
  }
  is_installed = true;
  return exchange_all(true);
}

PyObject* gate_restore(PyObject*, PyObject*) {
  if (!is_installed) {
    Py_RETURN_NONE;
  }
  session++;
  virtual_mode(thread);
  is_installed = false;
  return exchange_all(false);
}

PyObject* gate_is_installed(PyObject*, PyObject*) { return PyBool_FromLong(is_installed); }

PyObject* gate_places(PyObject*, PyObject*) {
  Ref list(PyList_New(0));
  for (const Place& place : places) {
    Ref row(list ? Py_BuildValue("ONN", place.owner, PyLong_FromVoidPtr(place.address),
                                 PyLong_FromVoidPtr(read_place(place.address)))
                 : nullptr);
    if (!row || PyList_Append(list.get(), row.get()) < 0) {
      return nullptr;
    }
  }
  return list.release();
}

// Note one of the builtins that concern the stack of modes: 0; -1 with an error if it is not as expected.
int add_builtin(int number, PyObject* builtin) {
  const struct {
    int flags;
    void* hook;
  } expected[] = {
      {METH_O, address_of(hook_push)},
      {METH_NOARGS, address_of(hook_pop)},
      {METH_NOARGS, address_of(hook_length)},
      {METH_VARARGS | METH_KEYWORDS, address_of(hook_at)},
      {METH_NOARGS, address_of(enter_above<DISABLE>)},
      {METH_VARARGS, address_of(leave_above<ENABLE>)},
      {METH_NOARGS, address_of(enter_above<PLACE>)},
      {METH_VARARGS, address_of(leave_above<REPLACE>)},
  };
  const auto& [flags, hook] = expected[number];
  bool is_function = number < FUNCTIONS;
  PyMethodDef* def = nullptr;
  if (Py_IS_TYPE(builtin, is_function ? &PyCFunction_Type : &PyMethodDescr_Type)) {
    def = is_function ? reinterpret_cast<PyCFunctionObject*>(builtin)->m_ml
                      : reinterpret_cast<PyMethodDescrObject*>(builtin)->d_method;
  }
  if (def == nullptr || (def->ml_flags & ~METH_COEXIST) != flags) {
    PyErr_Format(PyExc_ValueError, "%R has a form of call that is not known", builtin);
    return -1;
  }
  if (is_function) {
    auto* function = reinterpret_cast<PyCFunctionObject*>(builtin);
    original_calls[number] = function->vectorcall;
    add_place(builtin, &function->vectorcall, hook);
    push_def = number == PUSH ? def : push_def;
  } else {
    int method = number - FUNCTIONS;
    original_methods[method] = def;
    own_methods[method] = *def;
    own_methods[method].ml_meth = as<PyCFunction>(hook);
    add_place(builtin, &reinterpret_cast<PyMethodDescrObject*>(builtin)->d_method, &own_methods[method]);
  }
  return 0;
}

PyMethodDef functions[] = {
    {"add", gate_add, METH_O, nullptr},
    {"ask", gate_ask, METH_VARARGS, nullptr},
    {"add_mapping", gate_add_mapping, METH_O, nullptr},
    {"install", gate_install, METH_NOARGS, nullptr},
    {"is_installed", gate_is_installed, METH_NOARGS, nullptr},
    {"module_call", gate_module_call, METH_VARARGS, nullptr},
    {"restore", gate_restore, METH_NOARGS, nullptr},
    {"note_report", gate_note_report, METH_O, nullptr},
    {"places", gate_places, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int configure_builtins(PyObject* builtins) {
  if (push_def != nullptr || PyTuple_GET_SIZE(builtins) != BUILTINS) {
    PyErr_SetString(PyExc_RuntimeError, "the gate has been configured, or there are other builtins");
    return -1;
  }
  int failed = 0;
  for (int i = 0; failed == 0 && i < BUILTINS; i++) {
    failed = guarded([i, builtins] { return add_builtin(i, PyTuple_GET_ITEM(builtins, i)); }, -1);
  }
  return failed;
}

int prepare_trampolines(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace accel
