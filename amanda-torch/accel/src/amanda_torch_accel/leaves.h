/* Part of gate.c: accumulations of leaves, and nodes of outputs. */

/* Backward passes that may run at once in different threads over one leaf. */
#define PASSES 64

/* The number of the backward pass that runs in this thread, -1 without one. */
static int
current_task(int64_t *number)
{
    if (native.task != NULL) {
        *number = native.task();
        return 0;
    }
    PyObject *found = PyObject_CallNoArgs(inlined.task);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
has_pass(const Accumulation *self, int64_t task)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (self->passes[i] == task) {
            return 1;
        }
    }
    return 0;
}

static int
note_pass(Accumulation *self, int64_t task, int makes_graph)
{
    /* The graph of this pass may lead to the leaf by nodes that no operator owns. */
    self->always = self->always || makes_graph;
    if (has_pass(self, task)) {
        return 0;
    }
    if (self->count == self->room && self->room < PASSES) {
        int64_t *more = PyMem_New(int64_t, PASSES);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, self->passes, sizeof(*more) * self->count);
        self->passes = more;
        self->room = PASSES;
    }
    if (self->count == self->room) {
        memmove(self->passes, self->passes + 1, sizeof(*self->passes) * --self->count);
    }
    self->passes[self->count++] = task;
    return 0;
}

/* Whether the pass of this thread is one of its scopes'; -1 with an error. */
static int
acts_here(const Accumulation *self)
{
    int64_t task;
    if (self->always) {
        return 1;
    }
    return current_task(&task) < 0 ? -1 : has_pass(self, task);
}

static PyObject *
accumulation_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf,
                        PyObject *Py_UNUSED(keywords))
{
    Accumulation *self = (Accumulation *)object;
    int acts = unthrown != NULL ? 1 : acts_here(self);
    if (acts <= 0) {
        return acts < 0 ? NULL : Py_NewRef(Py_None);
    }
    return hook_vectorcall((PyObject *)self->hook, values, nargsf, NULL);
}

PyDoc_STRVAR(note_pass_doc, "note_pass(task, makes_graph)\n\nA backward pass has come to an operator "
"of the scopes that uses the leaf.");

static PyObject *
accumulation_note_pass(PyObject *self, PyObject *args)
{
    long long task;
    int makes_graph;
    if (!PyArg_ParseTuple(args, "Lp", &task, &makes_graph)) {
        return NULL;
    }
    return note_pass((Accumulation *)self, task, makes_graph) < 0 ? NULL : Py_NewRef(Py_None);
}

/* The scopes that a hook acts for: weak references in a tuple; borrowed, NULL if it has none. */
static PyObject *
scopes_of(Hook *hook)
{
    PyObject *handle = field(hook->hooks, at.hooks_handle);
    PyObject *scopes = handle != NULL && Py_IS_TYPE(handle, (PyTypeObject *)inlined.handle)
                           ? field(handle, at.handle_scopes)
                           : NULL;
    return scopes != NULL && PyTuple_CheckExact(scopes) ? scopes : NULL;
}

static PyObject *
accumulation_marks(PyObject *object, PyObject *Py_UNUSED(argument))
{
    Accumulation *self = (Accumulation *)object;
    PyObject *scopes = scopes_of(self->hook), *marks = scopes == NULL ? NULL : PyDict_New();
    if (scopes == NULL) {
        PyErr_SetString(PyExc_AttributeError, "an accumulation has lost its scopes");
    }
    PyObject *mark = self->hook->has_before || self->hook->has_after ? object : Py_None;
    for (Py_ssize_t i = 0; marks != NULL && i < PyTuple_GET_SIZE(scopes); i++) {
        if (PyDict_SetItem(marks, PyTuple_GET_ITEM(scopes, i), mark) < 0) {
            Py_CLEAR(marks);
        }
    }
    return marks;
}

PyDoc_STRVAR(marks_doc, "marks()\n\nWhat stands in a leaf's marks for it, by scope.");

static PyObject *
accumulation_scopes(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *scopes = scopes_of(((Accumulation *)self)->hook);
    return Py_NewRef(scopes == NULL ? Py_None : scopes);
}

static PyObject *
accumulation_is_idle(PyObject *self, void *Py_UNUSED(closure))
{
    const Hook *hook = ((Accumulation *)self)->hook;
    return PyBool_FromLong(!hook->has_before && !hook->has_after);
}

static PyGetSetDef accumulation_properties[] = {
    {"scopes", accumulation_scopes, NULL, "Those in which the leaf is the operator's.", NULL},
    {"is_idle", accumulation_is_idle, NULL, "Whether nothing is to be done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef accumulation_methods[] = {
    {"marks", accumulation_marks, METH_NOARGS, marks_doc},
    {"note_pass", accumulation_note_pass, METH_VARARGS, note_pass_doc},
    {NULL, NULL, 0, NULL},
};

static void
accumulation_dealloc(Accumulation *self)
{
    if (self->passes != &self->first) {
        PyMem_Free(self->passes);
    }
    Py_DECREF(self->hook);
    PyObject_Free(self);
}

/* It holds no node, and is held by none of what it holds: there is nothing to collect. */
static PyTypeObject Accumulation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Accumulation",
    .tp_basicsize = sizeof(Accumulation),
    CALLED_SLOTS(Accumulation),
    .tp_methods = accumulation_methods,
    .tp_getset = accumulation_properties,
    .tp_dealloc = (destructor)accumulation_dealloc,
};

static Accumulation *
new_accumulation(Hook *hook)
{
    Accumulation *self = PyObject_New(Accumulation, &Accumulation_Type);
    if (self != NULL) {
        self->vectorcall = accumulation_vectorcall;
        self->hook = (Hook *)Py_NewRef(hook);
        self->always = 0;
        self->count = 0;
        self->room = 1;
        self->first = 0;
        self->passes = &self->first;
    }
    return self;
}

/* ---- nodes of outputs ------------------------------------------------------------------------- */

static int hook_way(PyObject *node, PyObject *way, PyObject *natives, PyObject *done);

/* What an entry does beside its hook, which may be done again in the same pass. */
static int
enter(Entry *self)
{
    if (self->way != NULL && !PyByteArray_AS_STRING(self->done)[self->number]) {
        PyByteArray_AS_STRING(self->done)[self->number] = 1;
        PyObject *node = PyObject_CallNoArgs(inlined.node);
        int failed = node == NULL || hook_way(node, self->way, self->natives, self->done) < 0;
        Py_XDECREF(node);
        if (failed) {
            return -1;
        }
    }
    if (Py_SIZE(self) > 0) {
        int64_t task;
        int makes_graph = is_recording();
        int failed = makes_graph < 0 || current_task(&task) < 0;
        for (Py_ssize_t i = 0; !failed && i < Py_SIZE(self); i++) {
            failed = note_pass(self->reached[i], task, makes_graph) < 0;
        }
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* It is a prehook where something is to be done before the node, and a posthook elsewhere. */
static int
is_wanted(const Entry *self, int is_after)
{
    return is_after ? self->hook->has_after : self->hook->has_before;
}

static PyObject *
entry_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf,
                 PyObject *Py_UNUSED(keywords))
{
    Entry *self = (Entry *)object;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (unthrown != NULL) {
        return raise_unthrown();
    }
    if (count > 0 && nothing_flows(values[count - 1])) {
        Py_RETURN_NONE;
    }
    if (enter(self) < 0) {
        return NULL;
    }
    return is_wanted(self, count > 1) ? run_hook(self->hook, values, count) : Py_NewRef(Py_None);
}

static void
entry_dealloc(Entry *self)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_DECREF(self->reached[i]);
    }
    Py_DECREF(self->hook);
    Py_XDECREF(self->way);
    Py_XDECREF(self->natives);
    Py_XDECREF(self->done);
    PyObject_Free(self);
}

/* As an accumulation, it is in no cycle. */
static PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Entry",
    .tp_basicsize = offsetof(Entry, reached),
    .tp_itemsize = sizeof(Accumulation *),
    CALLED_SLOTS(Entry),
    .tp_dealloc = (destructor)entry_dealloc,
};
