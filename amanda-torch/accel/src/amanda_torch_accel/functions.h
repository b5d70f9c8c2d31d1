/* Part of gate.c: objects that stand for Python's functions. */

typedef enum { OPERATOR, REPORTED, EVENT } Role;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Role role;
    PyObject *vanilla; /* the function in whose place it stands */
    Site site;
} Call;

/* ``operator(*args)`` of torch.ops: the operator is the first argument. */
static PyObject *
call_operator(Call *self, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Invocation call = {.site = &self->site, .target = self->vanilla, .stack = values,
                       .nargsf = nargsf, .names = names};
    if (virtual_mode() == NULL || PyVectorcall_NARGS(nargsf) == 0) {
        return run_original(&call);
    }
    if (self->role == OPERATOR) {
        call.operator = values[0];
    }
    self->site.unreported = 0;
    return intercept(&call);
}

/* ``mode.__torch_function__(func, types, args, kwargs)``: what PyTorch reports. */
static PyObject *
call_event(Call *self, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Site *site = thread.awaited;
    thread.reports++;
    if (site != NULL && site->kind != CALLABLE && site->operator == NULL
        && PyVectorcall_NARGS(nargsf) > 1) {
        PyObject *is_report =
            PyObject_CallFunction(python.is_report_of, "sO", site->name, values[1]);
        if (is_report == NULL) {
            return NULL;
        }
        if (is_report == Py_True) {
            /* Another thread may have noted it meanwhile. */
            if (site->operator == NULL) {
                site->operator = Py_NewRef(values[1]);
            }
            /* What its implementation calls is none of its reports. */
            thread.awaited = NULL;
        }
        Py_DECREF(is_report);
    }
    return PyObject_Vectorcall(self->vanilla, values, nargsf, names);
}

/* Set every counter in the values of a dict to zero: of lists the first item, of children `calls`. */
static void
restart(PyObject *dict, int is_children)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, left = PyDict_GET_SIZE(dict);
    note(dict);
    note(((PyDictObject *)dict)->ma_keys);
    for (; left > 0 && PyDict_Next(dict, &position, &key, &value); left--) {
        note(value);
        if (is_children) {
            note((const char *)value + python.child_calls);
            if (Py_IS_TYPE(value, python.child) && field(value, python.child_calls) != zero) {
                set_field(value, python.child_calls, zero);
            }
        }
        else if (PyList_CheckExact(value) && PyList_GET_SIZE(value) > 0) {
            note(&PyList_GET_ITEM(value, 0));
            PyObject *before = PyList_GET_ITEM(value, 0);
            PyList_SET_ITEM(value, 0, Py_NewRef(zero));
            Py_DECREF(before);
        }
    }
}

/* Whether the state of a thread says that tools are not paused. */
static int
is_unpaused(Thread *here, PyObject *state)
{
    if (state == NULL || !PyDict_CheckExact(state)) {
        return 0;
    }
#if HAS_VERSIONS
    if (here->unpaused == version_of(state)) {
        return 1;
    }
#endif
    if (PyDict_GetItemWithError(state, paused_name) != zero) {
        return 0;
    }
#if HAS_VERSIONS
    here->unpaused = version_of(state);
#else
    (void)here;
#endif
    return 1;
}

/* The child of a frame that was made for a module (borrowed); NULL without one. */
static PyObject *
child_of(PyObject *children, PyObject *module)
{
    PyObject *child = look_found(children, module);
    if (child != NULL) {
        return child;
    }
    PyObject *key = PyLong_FromVoidPtr(module);
    child = key == NULL ? NULL : PyDict_GetItemWithError(children, key);
    Py_XDECREF(key);
    if (child != NULL) {
        /* The key is a number: what is at that address need not live. */
        keep_found(children, module, child);
    }
    return child;
}

/* Note where a call of a module was looked for. */
static RARE void
note_module(PyObject *children, PyObject *child, PyObject *frames, Py_ssize_t call)
{
    PyObject *frame = PyList_GET_ITEM(frames, call);
    note(children);
    note(child);
    note((const char *)child + LINE);
    note(field(child, python.child_ref));
    note(frames);
    note(&PyList_GET_ITEM(frames, call));
    note(frame);
    note((const char *)frame + LINE);
}

/* Tracker.enter_module() for a module that was called at this place before.
 *
 * Returns the frame to come back to (a strong reference); NULL if Python is to do it.
 */
static PyObject *
enter_module(Thread *here, PyObject *mode, PyObject *module)
{
    PyObject *parent = field(mode, python.mode_frame);
    PyObject *state = field(mode, python.mode_thread);
    PyObject *generation = field(mode, python.mode_generation);
    if (parent == NULL || parent == field(mode, python.mode_root)
        || !Py_IS_TYPE(parent, python.frame) || !is_unpaused(here, state)) {
        return NULL;
    }
    PyObject *children = field(parent, python.frame_children), *child;
    if (children == NULL || !PyDict_CheckExact(children)) {
        return NULL;
    }
    begin_step(here, field(mode, python.mode_iteration));
    child = child_of(children, module);
    if (child == NULL || !Py_IS_TYPE(child, python.child)
        || !is_alive(field(child, python.child_ref), module)
        || field(child, python.child_transparent) != Py_False
        || field(child, python.child_fused) != Py_False) {
        return NULL;
    }
    PyObject *frames = field(child, python.child_frames);
    PyObject *calls = field(child, python.child_calls);
    if (frames == NULL || !PyList_CheckExact(frames) || calls == NULL || !PyLong_Check(calls)) {
        return NULL;
    }
    Py_ssize_t call = number_of(calls);
    if (call < 0 || call >= PyList_GET_SIZE(frames)) {
        return NULL;
    }
    PyObject *frame = PyList_GET_ITEM(frames, call);
    if (!Py_IS_TYPE(frame, python.frame)
        || field(frame, python.frame_generation) != generation) {
        return NULL;
    }
    PyObject *cells = field(frame, python.frame_cells), *names = field(frame, python.frame_names);
    PyObject *below = field(frame, python.frame_children), *number = new_number(call + 1);
    if (number == NULL || cells == NULL || names == NULL || below == NULL) {
        Py_XDECREF(number);
        return NULL;
    }
    if (begin_notes(child, frame)) {
        note_module(children, child, frames, call);
    }
    Py_INCREF(parent);
    set_field(child, python.child_calls, number);
    Py_DECREF(number);
    restart(names, 0);
    restart(below, 1);
    set_field(frame, python.frame_caller, parent);
    set_field(mode, python.mode_frame, frame);
    set_field(mode, python.mode_cells, cells);
    return parent;
}

/* Come back to a frame. */
static inline void
leave_module(PyObject *mode, PyObject *parent)
{
    PyObject *frame = field(mode, python.mode_frame), *cells = field(parent, python.frame_cells);
    if (frame != parent && frame != NULL && cells != NULL) {
        if (Py_IS_TYPE(frame, python.frame)) {
            set_field(frame, python.frame_caller, Py_None);
        }
        set_field(mode, python.mode_frame, parent);
        set_field(mode, python.mode_cells, cells);
    }
}

/* PyTorch's ``nn.Module.__call__``, and how CPython calls a function. */
static PyObject *module_vanilla;
static vectorcallfunc call_python;

/* ``module(*args)``: the vectorcall of the driver's function for it, which runs where C cannot do it.
 *
 * It stays a Python function, since Dynamo has to see what it does; where the interpreter calls it
 * without vectorcall, all of it is done in Python.
 */
static PyObject *
through_module(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Thread *here = this_thread();
    PyObject *mode = virtual_mode_of(here), *parent = NULL;
    if (mode != NULL && PyVectorcall_NARGS(nargsf) > 0) {
        parent = enter_module(here, mode, values[0]);
    }
    if (parent == NULL) {
        PyErr_Clear();
        return call_python(function, values, nargsf, names);
    }
    Py_INCREF(mode);
    PyObject *result = PyObject_Vectorcall(module_vanilla, values, nargsf, names);
    if (LIKELY(result != NULL)) {
        leave_module(mode, parent);
    }
    else {
        KEEPING_ERROR(leave_module(mode, parent));
    }
    Py_DECREF(parent);
    Py_DECREF(mode);
    return result;
}

static PyObject *
call_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)object;
    switch (self->role) {
    case OPERATOR:
    case REPORTED:
        return call_operator(self, values, nargsf, names);
    case EVENT:
        return call_event(self, values, nargsf, names);
    }
    Py_UNREACHABLE();
}

static PyObject *
call_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type))
{
    return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

/* Its name, its documentation and so on are those of the function. */
static PyObject *
call_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttr(((Call *)self)->vanilla, name);
    }
    return found;
}

static int
call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->vanilla);
    return 0;
}

static int
call_clear(Call *self)
{
    Py_CLEAR(self->vanilla);
    return 0;
}

static void
call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    PyObject_GC_Del(self);
}

static PyMemberDef call_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Call, vanilla), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *
call_of_vanilla(PyObject *self, void *name)
{
    return PyObject_GetAttrString(((Call *)self)->vanilla, name);
}

/* The type has attributes of these names, which come first. */
static PyGetSetDef call_properties[] = {
    {"__doc__", call_of_vanilla, NULL, NULL, "__doc__"},
    {"__module__", call_of_vanilla, NULL, NULL, "__module__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Call_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = call_get,
    .tp_getattro = call_getattro,
    .tp_traverse = (traverseproc)call_traverse,
    .tp_clear = (inquiry)call_clear,
    .tp_dealloc = (destructor)call_dealloc,
    .tp_members = call_members,
    .tp_getset = call_properties,
};

static PyObject *
new_call(Role role, PyObject *vanilla)
{
    Call *self = PyObject_GC_New(Call, &Call_Type);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = call_vectorcall;
    self->role = role;
    self->vanilla = Py_NewRef(vanilla);
    self->site = (Site){.kind = CALLABLE, .name = ""};
    PyObject_GC_Track(self);
    return (PyObject *)self;
}
