/* A library as small as can be whose builtins report themselves to modes, as PyTorch's do: for tests
 * of the gate on Pythons that have no PyTorch. Each builtin counts its calls, and returns that count.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *modes; /* the stack */
static int is_off;
static PyTypeObject Base_Type;

/* Report a call to the mode on top, if there is one. `*done` says whether there was. */
static PyObject *
report(const char *name, PyObject *owner, PyObject *first, PyObject *args, PyObject *kwargs,
       int *done)
{
    Py_ssize_t count = PyList_GET_SIZE(modes);
    *done = count > 0 && !is_off;
    if (!*done) {
        return NULL;
    }
    PyObject *mode = Py_NewRef(PyList_GET_ITEM(modes, count - 1));
    PyList_SetSlice(modes, count - 1, count, NULL);
    PyObject *func = PyObject_GetAttrString(owner, name), *all, *result = NULL;
    if (first == NULL) {
        all = Py_NewRef(args);
    }
    else {
        all = PyTuple_Pack(1, first);
        PyObject *joined = all == NULL || args == NULL ? NULL : PySequence_Concat(all, args);
        if (args != NULL) {
            Py_XSETREF(all, joined);
        }
    }
    if (func != NULL && all != NULL) {
        result = PyObject_CallMethod(mode, "__torch_function__", "OOOO", func, Py_None, all,
                                     kwargs == NULL ? Py_None : kwargs);
    }
    PyList_Append(modes, mode);
    Py_DECREF(mode);
    Py_XDECREF(func);
    Py_XDECREF(all);
    return result;
}

#define BASE ((PyObject *)&Base_Type)

/* A method with keywords: refuses strings, as PyTorch's arguments do before they are reported. */
static PyObject *
refused(PyObject *args)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        if (PyUnicode_Check(PyTuple_GET_ITEM(args, i))) {
            PyErr_SetString(PyExc_TypeError, "no strings");
            return NULL;
        }
    }
    return Py_NewRef(Py_None);
}

static long keywords_calls, none_calls, one_calls, all_calls, function_calls, getter_calls,
    subscript_calls, assignment_calls, add_calls;

static PyObject *
keywords(PyObject *self, PyObject *args, PyObject *kwargs)
{
    int done;
    PyObject *none = refused(args);
    if (none == NULL) {
        return NULL;
    }
    Py_DECREF(none);
    PyObject *result = report("keywords", BASE, self, args, kwargs, &done);
    return done ? result : PyLong_FromLong(++keywords_calls);
}

static PyObject *
add(PyObject *self, PyObject *args, PyObject *kwargs)
{
    int done;
    PyObject *none = refused(args);
    if (none == NULL) {
        PyErr_Clear();
        Py_RETURN_NOTIMPLEMENTED;
    }
    Py_DECREF(none);
    PyObject *result = report("__add__", BASE, self, args, kwargs, &done);
    return done ? result : PyLong_FromLong(++add_calls);
}

static PyObject *
none(PyObject *self, PyObject *ignored)
{
    int done;
    PyObject *result = report("none", BASE, self, NULL, NULL, &done);
    return done ? result : PyLong_FromLong(++none_calls);
}

static PyObject *
one(PyObject *self, PyObject *argument)
{
    int done;
    PyObject *args = PyTuple_Pack(1, argument), *result;
    if (args == NULL) {
        return NULL;
    }
    result = report("one", BASE, self, args, NULL, &done);
    Py_DECREF(args);
    return done ? result : PyLong_FromLong(++one_calls);
}

static PyObject *
all(PyObject *self, PyObject *args)
{
    int done;
    PyObject *result = report("all", BASE, self, args, NULL, &done);
    return done ? result : PyLong_FromLong(++all_calls);
}

static PyObject *
get_property(PyObject *self, void *closure)
{
    int done;
    PyObject *result = report("keywords", BASE, self, NULL, NULL, &done);
    return done ? result : PyLong_FromLong(++getter_calls + (long)(intptr_t)closure);
}

static PyObject *
subscript(PyObject *self, PyObject *index)
{
    int done;
    PyObject *args = PyTuple_Pack(1, index), *result;
    if (args == NULL) {
        return NULL;
    }
    result = report("__getitem__", BASE, self, args, NULL, &done);
    Py_DECREF(args);
    return done ? result : PyLong_FromLong(++subscript_calls);
}

static int
assign(PyObject *self, PyObject *index, PyObject *value)
{
    int done;
    PyObject *args = value == NULL ? PyTuple_Pack(1, index) : PyTuple_Pack(2, index, value);
    if (args == NULL) {
        return -1;
    }
    const char *name = value == NULL ? "__delitem__" : "__setitem__";
    PyObject *result = report(name, BASE, self, args, NULL, &done);
    Py_DECREF(args);
    if (done) {
        Py_XDECREF(result);
        return result == NULL ? -1 : 0;
    }
    assignment_calls++;
    return 0;
}

static PyObject *
function(PyObject *module, PyObject *args, PyObject *kwargs)
{
    int done;
    PyObject *result = report("function", module, NULL, args, kwargs, &done);
    return done ? result : PyLong_FromLong(++function_calls);
}

static PyMethodDef base_methods[] = {
    {"keywords", (PyCFunction)(void (*)(void))keywords, METH_VARARGS | METH_KEYWORDS, NULL},
    {"__add__", (PyCFunction)(void (*)(void))add, METH_VARARGS | METH_KEYWORDS, NULL},
    {"none", none, METH_NOARGS, NULL},
    {"one", one, METH_O, NULL},
    {"all", all, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef base_properties[] = {
    {"T", get_property, NULL, NULL, (void *)1000},
    {NULL, NULL, NULL, NULL, NULL},
};
static PyMappingMethods base_mapping = {.mp_subscript = subscript, .mp_ass_subscript = assign};
static PyTypeObject Base_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "toy.Base",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_methods = base_methods,
    .tp_getset = base_properties,
    .tp_as_mapping = &base_mapping,
    .tp_new = PyType_GenericNew,
};

/* -- the stack ------------------------------------------------------------------------------- */

static PyObject *
push(PyObject *module, PyObject *mode)
{
    return PyList_Append(modes, mode) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *
pop(PyObject *module, PyObject *ignored)
{
    return PyObject_CallMethod(modes, "pop", NULL);
}

static PyObject *
length(PyObject *module, PyObject *ignored)
{
    return PyLong_FromSsize_t(PyList_GET_SIZE(modes));
}

static PyObject *
at(PyObject *module, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t index;
    if (!PyArg_ParseTuple(args, "n", &index)) {
        return NULL;
    }
    return Py_XNewRef(PyList_GetItem(modes, index));
}

static PyObject *
is_disabled(PyObject *module, PyObject *ignored)
{
    return PyBool_FromLong(is_off);
}

static PyObject *
guard_enter(PyObject *self, PyObject *ignored)
{
    is_off = 1;
    Py_RETURN_NONE;
}

static PyObject *
guard_exit(PyObject *self, PyObject *args)
{
    is_off = 0;
    Py_RETURN_NONE;
}

static PyMethodDef guard_methods[] = {
    {"__enter__", guard_enter, METH_NOARGS, NULL},
    {"__exit__", guard_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject Guard_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "toy.Guard",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = guard_methods,
    .tp_new = PyType_GenericNew,
};

/* As torch.device: pushes and pops a mode without the functions above. */
static PyObject *
placing_enter(PyObject *self, PyObject *ignored)
{
    return push(NULL, self);
}

static PyObject *
placing_exit(PyObject *self, PyObject *args)
{
    return pop(NULL, NULL);
}

static PyObject *
placing_event(PyObject *self, PyObject *args)
{
    PyObject *func, *types, *arguments, *kwargs;
    if (!PyArg_ParseTuple(args, "OOOO", &func, &types, &arguments, &kwargs)) {
        return NULL;
    }
    return PyObject_Call(func, arguments, kwargs == Py_None ? NULL : kwargs);
}

static PyMethodDef placing_methods[] = {
    {"__enter__", placing_enter, METH_NOARGS, NULL},
    {"__exit__", placing_exit, METH_VARARGS, NULL},
    {"__torch_function__", placing_event, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyTypeObject Placing_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "toy.Placing",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_methods = placing_methods,
    .tp_new = PyType_GenericNew,
};

static PyMethodDef methods[] = {
    {"function", (PyCFunction)(void (*)(void))function, METH_VARARGS | METH_KEYWORDS, NULL},
    {"push", push, METH_O, NULL},
    {"pop", pop, METH_NOARGS, NULL},
    {"length", length, METH_NOARGS, NULL},
    {"at", (PyCFunction)(void (*)(void))at, METH_VARARGS | METH_KEYWORDS, NULL},
    {"is_disabled", is_disabled, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef toy = {PyModuleDef_HEAD_INIT, .m_name = "toy", .m_size = -1,
                                 .m_methods = methods};

PyMODINIT_FUNC
PyInit_toy(void)
{
    PyObject *module = PyModule_Create(&toy);
    modes = PyList_New(0);
    if (module == NULL || modes == NULL || PyModule_AddType(module, &Base_Type) < 0
        || PyModule_AddType(module, &Guard_Type) < 0
        || PyModule_AddType(module, &Placing_Type) < 0) {
        return NULL;
    }
    return module;
}
