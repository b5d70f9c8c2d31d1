// The extension module.

#include "accel.h"
#include "torch_api.h"

namespace accel {

namespace {

PyObject* gate_configure(PyObject*, PyObject* args) {
  PyObject *given, *builtins;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &given, &PyTuple_Type, &builtins)) {
    return nullptr;
  }
  struct {
    const char* name;
    PyObject*& object;
  } all[] = {
#define OBJECT(name) {#name, objects.name},
      ACCEL_OBJECTS(OBJECT)
#undef OBJECT
  };
  for (auto& one : all) {
    PyObject* found = PyDict_GetItemString(given, one.name);
    if (found == nullptr) {
      PyErr_Format(PyExc_TypeError, "there is no %s", one.name);
      return nullptr;
    }
    Py_XDECREF(std::exchange(one.object, Py_NewRef(found)));
  }
  return configure_builtins(builtins) < 0 ? nullptr : Py_NewRef(Py_None);
}

PyMethodDef functions[] = {
    {"configure", gate_configure, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int execute(PyObject* module) {
  // Python 3.12 refuses it by itself. What is here, and what is written to, belongs to the process.
  if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
    PyErr_SetString(PyExc_ImportError, "the extension works in the main interpreter only");
    return -1;
  }
  return prepare_names() < 0 || prepare_records(module) < 0 || prepare_trampolines(module) < 0 ||
                 prepare_autograd(module) < 0
             ? -1
             : 0;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void*>(execute)},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef definition = {PyModuleDef_HEAD_INIT,
                          "amanda_torch_accel.gate",
                          "The part of amanda-torch that is written in C++.",
                          0,
                          functions,
                          slots,
                          nullptr,
                          nullptr,
                          nullptr};

}  // namespace

}  // namespace accel

PyMODINIT_FUNC PyInit_gate() { return PyModuleDef_Init(&accel::definition); }
