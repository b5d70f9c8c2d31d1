// Records that Python and C++ share, and what all units need of CPython.

#include "accel.h"

#include <exception>
#include <new>

namespace accel {

Names names;
Objects objects;

// ---- errors and references -----------------------------------------------------------------------------------

#if PY_VERSION_HEX >= 0x030C0000
KeepError::KeepError() : error_(PyErr_GetRaisedException()) {}
KeepError::~KeepError() { PyErr_SetRaisedException(error_); }
#else
KeepError::KeepError() { PyErr_Fetch(&type_, &value_, &traceback_); }
KeepError::~KeepError() { PyErr_Restore(type_, value_, traceback_); }
#endif

Ref take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return Ref(PyErr_GetRaisedException());
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(value, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return Ref(value);
#endif
}

void set_error_from_exception() noexcept {
  try {
    throw;
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

Ref referent(PyObject* reference) {
  PyObject* found = nullptr;
  if (reference != nullptr && PyWeakref_Check(reference)) {
#if PY_VERSION_HEX >= 0x030D0000
    if (PyWeakref_GetRef(reference, &found) < 0) {
      PyErr_Clear();
    }
#else
    found = PyWeakref_GetObject(reference);
    found = found == Py_None ? nullptr : Py_XNewRef(found);
#endif
  }
  return Ref(found);
}

int add_to(PyObject* object, PyObject* name, int64_t amount) {
  Ref before(PyObject_GetAttr(object, name));
  Ref number(before ? PyLong_FromLongLong(amount) : nullptr);
  Ref sum(number ? PyNumber_Add(before.get(), number.get()) : nullptr);
  return sum ? PyObject_SetAttr(object, name, sum.get()) : -1;
}

int prepare_names() {
  struct {
    PyObject** place;
    const char* text;
  } all[] = {
      {&names.acquire, "acquire"},
      {&names.release, "release"},
      {&names.count, "count"},
      {&names.executions, "executions"},
      {&names.nanoseconds, "nanoseconds"},
      {&names.log, "log"},
      {&names.number, "number"},
      {&names.numbers, "numbers"},
      {&names.due, "due"},
      {&names.extend, "extend"},
      {&names.amount, "amount"},
      {&names.total, "total"},
      {&names.last, "last"},
      {&names.of, "of"},
      {&names.weights, "_weights"},
      {&names.expect, "expect"},
      {&names.overwrites, "overwrites"},
      {&names.trail, "trail"},
      {&names.name, "name"},
      {&names.append, "append"},
      {&names.add, "add"},
      {&names.scopes, "scopes"},
      {&names.statistics, "statistics"},
      {&names.tool_seconds, "tool_seconds"},
      {&names.paused, "paused"},
      {&names.cache, "cache"},
      {&names.enabled, "enabled"},
      {&names.held, "held"},
      {&names.quiet, "_quiet"},
      {&names.dict, "__dict__"},
      {&names.before, "before"},
      {&names.after, "after"},
      {&names.checked, "checked"},
      {&names.claimed, "claimed"},
      {&names.run_known, "run_known"},
      {&names.run_described, "run_described"},
      {&names.go_on_after, "go_on_after"},
      {&names.routines, "routines"},
      {&names.steps_before, "steps_before"},
      {&names.steps_after, "steps_after"},
      {&names.kind, "kind"},
      {&names.ends, "ends"},
      {&names.routine, "routine"},
      {&names.action, "action"},
      {&names.func, "func"},
      {&names.select, "select"},
      {&names.kwargs, "kwargs"},
      {&names.has_before, "has_before"},
      {&names.has_after, "has_after"},
      {&names.is_idle, "is_idle"},
      {&names.op_id, "op_id"},
      {&names.natives, "natives"},
      {&names.leaf_hooks, "leaf_hooks"},
      {&names.dispatcher, "_dispatcher"},
      {&names.mark, "amanda"},
  };
  for (auto& one : all) {
    *one.place = PyUnicode_InternFromString(one.text);
    if (*one.place == nullptr) {
      return -1;
    }
  }
  return 0;
}

// ---- records -------------------------------------------------------------------------------------------------

// A type of records: its fields are objects that lie one after the other behind the head, and may be unset.
template <typename T, int COUNT>
struct RecordType {
  static PyObject** fields(PyObject* self) {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(self) + sizeof(PyObject));
  }
  static int traverse(PyObject* self, visitproc visit, void* arg) {
    for (int i = 0; i < COUNT; i++) {
      Py_VISIT(fields(self)[i]);
    }
    return 0;
  }
  static int clear(PyObject* self) {
    for (int i = 0; i < COUNT; i++) {
      Py_CLEAR(fields(self)[i]);
    }
    return 0;
  }
  static void dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    clear(self);
    if constexpr (std::is_same_v<T, Known>) {
      release(reinterpret_cast<Known*>(self)->lowered);
    }
    Py_TYPE(self)->tp_free(self);
  }
  static PyTypeObject make(const char* name, PyMemberDef* members) {
    PyTypeObject type = {};
    Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);
    type.tp_name = name;
    type.tp_basicsize = sizeof(T);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE;
    type.tp_traverse = traverse;
    type.tp_clear = clear;
    type.tp_dealloc = dealloc;
    type.tp_new = PyType_GenericNew;
    type.tp_members = members;
    return type;
  }
};

#define FIELD(type, field) {#field, T_OBJECT_EX, offsetof(type, field), 0, nullptr}
#define END_OF_FIELDS {nullptr, 0, 0, 0, nullptr}

namespace {

PyMemberDef tracker_members[] = {
    FIELD(Tracker, cells), FIELD(Tracker, frame), FIELD(Tracker, root), FIELD(Tracker, generation),
    FIELD(Tracker, iteration), FIELD(Tracker, stale), FIELD(Tracker, thread), END_OF_FIELDS,
};
PyMemberDef frame_members[] = {
    FIELD(Frame, cells), FIELD(Frame, names), FIELD(Frame, children), FIELD(Frame, generation),
    FIELD(Frame, caller), END_OF_FIELDS,
};
PyMemberDef child_members[] = {
    FIELD(Child, ref), FIELD(Child, transparent), FIELD(Child, is_fused), FIELD(Child, calls),
    FIELD(Child, frames), END_OF_FIELDS,
};
PyMemberDef known_members[] = {
    FIELD(Known, executor), FIELD(Known, claims), FIELD(Known, steps_before), FIELD(Known, steps_after),
    FIELD(Known, gradients), FIELD(Known, form), FIELD(Known, iterations), FIELD(Known, op_id), FIELD(Known, name),
    END_OF_FIELDS,
};

}  // namespace

PyTypeObject Tracker_Type = RecordType<Tracker, 7>::make("amanda_torch_accel.gate.Tracker", tracker_members);
PyTypeObject Frame_Type = RecordType<Frame, 5>::make("amanda_torch_accel.gate.Frame", frame_members);
PyTypeObject Child_Type = RecordType<Child, 5>::make("amanda_torch_accel.gate.Child", child_members);
PyTypeObject Known_Type = RecordType<Known, 9>::make("amanda_torch_accel.gate.Known", known_members);

int prepare_records(PyObject* module) {
  for (PyTypeObject* type : {&Tracker_Type, &Frame_Type, &Child_Type, &Known_Type}) {
    if (PyModule_AddType(module, type) < 0) {
      return -1;
    }
  }
  return 0;
}

}  // namespace accel
