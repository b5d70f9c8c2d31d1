/* Part of gate.c: whether modules have hooks. */

/* The object that a weak reference leads to; NULL where that is gone, or with an error. */
static PyObject *
referent(PyObject *reference)
{
    PyObject *found = NULL;
    if (!PyWeakref_Check(reference)) {
        PyErr_Format(PyExc_TypeError, "%R is no weak reference", reference);
        return NULL;
    }
#if PY_VERSION_HEX >= 0x030D0000
    (void)PyWeakref_GetRef(reference, &found);
#else
    found = PyWeakref_GET_OBJECT(reference);
    found = found == Py_None ? NULL : Py_NewRef(found);
#endif
    return found;
}

/* Whether an attribute is there and true; -1 with an error. Of dicts, which hooks are kept in, only the
   number of items is read. */
static int
is_true(PyObject *attributes, PyObject *name)
{
    PyObject *value = PyDict_GetItemWithError(attributes, name);
    if (value == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    if (PyODict_CheckExact(value) || PyDict_CheckExact(value)) {
        return PyDict_GET_SIZE(value) > 0;
    }
    Py_INCREF(value);
    int found = PyObject_IsTrue(value);
    Py_DECREF(value);
    return found;
}

PyDoc_STRVAR(any_has_doc, "any_has(references, names)\n\nWhether an object has a true attribute.\n\n"
"Args:\n"
"    references: a tuple of weak references to the objects; those that have died have none.\n"
"    names: a tuple of the names of attributes, which are looked up in `__dict__`.");

static PyObject *
gate_any_has(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *references, *names_;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &references, &PyTuple_Type, &names_)) {
        return NULL;
    }
    int found = 0;
    for (Py_ssize_t i = 0; found == 0 && i < PyTuple_GET_SIZE(references); i++) {
        PyObject *object = referent(PyTuple_GET_ITEM(references, i));
        PyObject *attributes = object == NULL ? NULL : PyObject_GenericGetDict(object, NULL);
        Py_XDECREF(object);
        if (attributes == NULL) {
            found = PyErr_Occurred() ? -1 : 0;
            continue;
        }
        for (Py_ssize_t k = 0; found == 0 && k < PyTuple_GET_SIZE(names_); k++) {
            found = is_true(attributes, PyTuple_GET_ITEM(names_, k));
        }
        Py_DECREF(attributes);
    }
    return found < 0 ? NULL : PyBool_FromLong(found);
}
