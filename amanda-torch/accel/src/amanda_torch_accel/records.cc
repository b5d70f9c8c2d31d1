// Records that Python and C++ share, and what all units need of CPython.

#include "accel.h"

namespace accel {

Names names;
Objects objects;

// ---- errors and references -----------------------------------------------------------------------------------

#if PY_VERSION_HEX >= 0x030C0000
Ref take_error() { return Ref(PyErr_GetRaisedException()); }
void put_error(Ref error) { PyErr_SetRaisedException(error.release()); }
#else
Ref take_error() {
  PyObject *type, *value, *traceback;
  if (PyErr_Occurred() == nullptr) {
    return Ref();
  }
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback != nullptr) {
    PyException_SetTraceback(value, traceback);
  }
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return Ref(value);
}

void put_error(Ref error) {
  PyObject* value = error.release();
  PyErr_Restore(value != nullptr ? Py_NewRef(Py_TYPE(value)) : nullptr, value,
                value != nullptr ? PyException_GetTraceback(value) : nullptr);
}
#endif

int add_to(PyObject* object, PyObject* name, const Ref& amount) {
  Ref before(amount ? PyObject_GetAttr(object, name) : nullptr);
  Ref sum(before ? PyNumber_Add(before.get(), amount.get()) : nullptr);
  return sum ? PyObject_SetAttr(object, name, sum.get()) : -1;
}

int prepare_names() {
  struct {
    PyObject*& object;
    const char* text;
  } all[] = {
#define NAME(name) {names.name, #name},
      ACCEL_NAMES(NAME)
#undef NAME
      {names.dict, "__dict__"},
      {names.dispatcher, "_dispatcher"},
  };
  for (auto& one : all) {
    if ((one.object = PyUnicode_InternFromString(one.text)) == nullptr) {
      return -1;
    }
  }
  return 0;
}

// ---- records -------------------------------------------------------------------------------------------------

namespace {

#define FIELD(type, field) {#field, T_OBJECT_EX, offsetof(type, field), 0, nullptr}
#define END_OF_FIELDS {nullptr, 0, 0, 0, nullptr}

PyMemberDef tracker_fields[] = {
    FIELD(Tracker, cells), FIELD(Tracker, frame), FIELD(Tracker, root), FIELD(Tracker, generation),
    FIELD(Tracker, iteration), FIELD(Tracker, stale), FIELD(Tracker, thread), END_OF_FIELDS,
};
PyMemberDef frame_fields[] = {
    FIELD(Frame, cells), FIELD(Frame, names), FIELD(Frame, children), FIELD(Frame, generation),
    FIELD(Frame, caller), END_OF_FIELDS,
};
PyMemberDef child_fields[] = {
    FIELD(Child, ref), FIELD(Child, transparent), FIELD(Child, is_fused), FIELD(Child, calls),
    FIELD(Child, frames), END_OF_FIELDS,
};
PyMemberDef known_fields[] = {
    FIELD(Known, executor), FIELD(Known, claims), FIELD(Known, steps_before), FIELD(Known, steps_after),
    FIELD(Known, gradients), FIELD(Known, form), FIELD(Known, iterations), FIELD(Known, op_id), FIELD(Known, name),
    END_OF_FIELDS,
};

// The type of records that an object belongs to, which may be of a subclass.
PyTypeObject* record_of(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  while (type->tp_base != &PyBaseObject_Type) {
    type = type->tp_base;
  }
  return type;
}

PyObject*& field_of(PyObject* self, const PyMemberDef* field) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(self) + field->offset);
}

int record_traverse(PyObject* self, visitproc visit, void* arg) {
  PyTypeObject* type = record_of(self);
  for (const PyMemberDef* field = type->tp_members; field->name != nullptr; field++) {
    Py_VISIT(field_of(self, field));
  }
  const Lowered* lowered = type == &Known_Type ? reinterpret_cast<Known*>(self)->lowered : nullptr;
  return lowered != nullptr ? visit_lowered(*lowered, visit, arg) : 0;
}

int record_clear(PyObject* self) {
  PyTypeObject* type = record_of(self);
  for (const PyMemberDef* field = type->tp_members; field->name != nullptr; field++) {
    Py_CLEAR(field_of(self, field));
  }
  if (type == &Known_Type) {
    delete std::exchange(reinterpret_cast<Known*>(self)->lowered, nullptr);
  }
  return 0;
}

void record_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  record_clear(self);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject make_record(const char* name, size_t size, PyMemberDef* fields) {
  PyTypeObject type = make_type(name, size, record_dealloc, record_traverse, record_clear);
  type.tp_flags |= Py_TPFLAGS_BASETYPE;
  type.tp_new = PyType_GenericNew;
  type.tp_members = fields;
  return type;
}

}  // namespace

PyTypeObject make_type(const char* name, size_t size, destructor dealloc, traverseproc traverse, inquiry clear) {
  PyTypeObject type = {};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags = Py_TPFLAGS_DEFAULT | (traverse != nullptr ? Py_TPFLAGS_HAVE_GC : 0);
  type.tp_dealloc = dealloc;
  type.tp_traverse = traverse;
  type.tp_clear = clear;
  return type;
}

PyTypeObject Tracker_Type = make_record("amanda_torch_accel.gate.TrackerFields", sizeof(Tracker), tracker_fields);
PyTypeObject Frame_Type = make_record("amanda_torch_accel.gate.FrameFields", sizeof(Frame), frame_fields);
PyTypeObject Child_Type = make_record("amanda_torch_accel.gate.ChildFields", sizeof(Child), child_fields);
PyTypeObject Known_Type = make_record("amanda_torch_accel.gate.KnownFields", sizeof(Known), known_fields);

int prepare_records(PyObject* module) {
  for (PyTypeObject* type : {&Tracker_Type, &Frame_Type, &Child_Type, &Known_Type}) {
    if (PyModule_AddType(module, type) < 0) {
      return -1;
    }
  }
  return 0;
}

}  // namespace accel
