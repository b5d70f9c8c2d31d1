/* Part of gate.c: hooks that autograd calls without objects. */

/* Autograd calls the hooks of a node through objects of C++, PyFunctionPreHook and PyFunctionPostHook,
   that have a dict of Python's hooks each. They make a tensor's object and a tuple of all gradients
   before they call what is in it: 3,000 instructions and more, where a counter takes thirty. So ours
   are put into nodes by objects of the same classes that the gate makes itself, as a part of the dict.
   Their tables of virtual functions are PyTorch's but for two: one gives up the dict, and one asks our
   hook; where that cannot answer without the gradients, or the dict has got others, PyTorch's is called.
   Nothing of it is assumed: where nodes keep
   these objects, and what they consist of, is found with nodes that Python has hooked, and the classes
   are known by what RTTI says of them, see configure_hooks(). */

/* A std::vector of pointers, or of what consists of one. */
typedef struct {
    void **begin, **end, **room;
} Vector;

typedef Vector (*CallBefore)(CalledHook *, Vector *);
typedef Vector (*CallAfter)(CalledHook *, Vector *, Vector *);

/* The virtual functions of both classes, after two words on the class. */
enum { TO_TOP, RTTI, DESTROY, DELETE, CALL, COMPILE, TABLE };

/* How nodes are hooked before and after they run. */
static struct {
    Py_ssize_t place;             /* of the vector in a node; 0 where Python's way is to be taken */
    const void *const *functions; /* PyTorch's */
    const void *table[TABLE];     /* ours */
} callers[2];

static Vector *
hooks_of(const char *node, int is_after)
{
    return (Vector *)(node + callers[is_after].place);
}

static const void *undefined_tensor;
static void *(*allocate)(size_t); /* operator new */

/* A hook that counts how often it is called, to try all of this out. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int before, after, by_method;
} Probe;

static PyObject *
probe_vectorcall(PyObject *self, PyObject *const *Py_UNUSED(values), size_t Py_UNUSED(nargsf),
                 PyObject *Py_UNUSED(keywords))
{
    ((Probe *)self)->by_method++;
    Py_RETURN_NONE;
}

static PyMemberDef probe_members[] = {
    {"before", T_INT, offsetof(Probe, before), READONLY, NULL},
    {"after", T_INT, offsetof(Probe, after), READONLY, NULL},
    {"by_method", T_INT, offsetof(Probe, by_method), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Probe_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Probe",
    .tp_basicsize = sizeof(Probe),
    CALLED_SLOTS(Probe),
    .tp_members = probe_members,
};

static int
are_undefined(const Vector *tensors)
{
    for (void **tensor = tensors->begin; tensor < tensors->end; tensor++) {
        if (*tensor != undefined_tensor) {
            return 0;
        }
    }
    return tensors->begin < tensors->end;
}

/* What a hook does without gradients: 1 if that is all, 0 where it is to be called with them, -1 with an
   error. */
static int
answer(PyObject *hook, const Vector *consumed, int is_after)
{
    if (Py_IS_TYPE(hook, &Hook_Type)) {
        return are_undefined(consumed) ? 1 : run_unseen((Hook *)hook, is_after);
    }
    if (Py_IS_TYPE(hook, &Entry_Type)) {
        Entry *entry = (Entry *)hook;
        if (are_undefined(consumed)) {
            return 1;
        }
        return enter(entry) < 0             ? -1
               : is_wanted(entry, is_after) ? run_unseen(entry->hook, is_after)
                                            : 1;
    }
    if (Py_IS_TYPE(hook, &Accumulation_Type)) {
        int acts = are_undefined(consumed) ? 0 : acts_here((Accumulation *)hook);
        return acts < 0 ? -1 : !acts ? 1 : run_unseen(((Accumulation *)hook)->hook, is_after);
    }
    if (Py_IS_TYPE(hook, &Probe_Type)) {
        *(is_after ? &((Probe *)hook)->after : &((Probe *)hook)->before) += 1;
        return 1;
    }
    return 0;
}

static int
is_answered(const CalledHook *self, const Vector *consumed, int is_after)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *hook, *value;
    Py_ssize_t position = 0;
    int done = 0;
    begin_step(&thread, course.iteration);
    begin_notes(self, NULL);
    note(self->dict);
    note(self);
    note(((PyDictObject *)self->dict)->ma_keys);
    if (PyDict_GET_SIZE(self->dict) == 1 && PyDict_Next(self->dict, &position, &hook, &value)
        && hook == value) {
        note(hook);
        note((const char *)hook + LINE);
        Py_INCREF(hook);
        done = answer(hook, consumed, is_after);
        if (done < 0) {
            unthrown = take_error();
        }
        Py_DECREF(hook);
    }
    PyGILState_Release(state);
    return done > 0;
}

/* What a hook returns that changes nothing. Autograd puts it in the place of what it has passed, which is
   a variable of its own: so that need not be copied. */
static Vector
pass_on(Vector *tensors)
{
    Vector passed = *tensors;
    *tensors = (Vector){NULL, NULL, NULL};
    return passed;
}

static Vector
call_before(CalledHook *self, Vector *consumed)
{
    if (is_answered(self, consumed, 0)) {
        return pass_on(consumed);
    }
    return ((CallBefore)(uintptr_t)callers[0].functions[CALL])(self, consumed);
}

static Vector
call_after(CalledHook *self, Vector *produced, Vector *consumed)
{
    if (is_answered(self, consumed, 1)) {
        return pass_on(produced);
    }
    return ((CallAfter)(uintptr_t)callers[1].functions[CALL])(self, produced, consumed);
}

/* A node gives up its hooks: what is called lies in the dict. Where Python is gone, the dict stays. */
static void
give_up(CalledHook *self)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(self->dict);
        PyGILState_Release(state);
    }
}

/* Hook a node as its method does: 1, 0 where that is to do it, -1 with an error. */
static int
attach_inside(const char *node, PyObject *hook, int is_after)
{
    if (callers[is_after].place == 0) {
        return 0;
    }
    Vector *hooks = (Vector *)(node + callers[is_after].place);
    if (hooks->begin != NULL) {
        return 0;
    }
    PyObject *dict = dict_with(hook, 1);
    if (dict == NULL) {
        return -1;
    }
    CalledHook *called = &((HookDict *)dict)->called;
    called->functions = callers[is_after].table + DESTROY;
    called->dict = dict;
    hooks->begin = allocate(sizeof *hooks->begin);
    hooks->begin[0] = called;
    hooks->end = hooks->room = hooks->begin + 1;
    return 1;
}

/* Whether a node has no hook yet, and gets its first ones without its object. */
static int
is_unhooked(const char *node)
{
    return callers[0].place != 0 && ((const Vector *)(node + callers[0].place))->begin == NULL
           && ((const Vector *)(node + callers[1].place))->begin == NULL;
}

/* Register a hook of ours at a node, of which there is an object, or which has no hooks yet. */
static int
attach_at(const char *node, PyObject *object, PyObject *hook, int is_after)
{
    int done = node == NULL || hook == attached ? 0 : attach_inside(node, hook, is_after);
    if (done == 0 && object == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a node was hooked as soon as it was made");
        return -1;
    }
    return done != 0 ? (done < 0 ? -1 : 0) : attach_by_method(object, hook, is_after);
}

static int
attach(PyObject *object, PyObject *hook, int is_after)
{
    return attach_at(node_in(object), object, hook, is_after);
}
