/* Part of gate.c: what hooks of autograd's nodes consist of. */

/* What runs at one backward operator, in all its executions: a hook of nodes.
 *
 * It is called with the gradients of the outputs before the node, and with those of the inputs and
 * of the outputs after it. Routines that are all inlined are run here, and others by Python.
 */
typedef struct Hook {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *hooks; /* NodeHooks */
    int has_before, has_after;
    PyObject *routines; /* those in the dispatcher's `settled`, until forget(); NULL if not known */
    PyObject *before, *after; /* those of them that are inlined, a tuple or None; as `routines` */
    PyObject *quiet;    /* the dispatcher's scopes that are quiet, with `routines` */
    struct Hook *previous, *next; /* of those with `routines` */
    struct HookDict *spare;       /* dicts with nothing but this hook that no node has */
    int spare_count;
    PyObject *timer;              /* one around the node that has started; NULL for none */
    unsigned long thread;         /* in which it has */
    long long start;              /* when it has */
} Hook;

static Hook *settled_hooks;

/* The hook of a leaf's accumulation, see Accumulation of amanda_torch.autograd.hooks. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Hook *hook;
    int always;
    Py_ssize_t count, room;
    int64_t *passes, first; /* `passes` is the address of `first` as long as there is room for one */
} Accumulation;

/* The hook at the node of an output, where more is done than at others: nodes behind it are hooked,
   and accumulations are told of the pass. See Claim of amanda_torch.autograd.claims. */
typedef struct {
    PyObject_VAR_HEAD
    vectorcallfunc vectorcall;
    Hook *hook;         /* of this node */
    PyObject *way;      /* see KnownGraph.inner; NULL if there is no node behind it */
    PyObject *natives;  /* the hooks of all nodes */
    PyObject *done;     /* a bytearray: the numbers of those that are hooked; of all entries */
    Py_ssize_t number;
    Accumulation *reached[1];
} Entry;

/* The error that is set, with its traceback. */
static PyObject *
take_error(void)
{
#if PY_VERSION_HEX >= 0x030C0000
    return PyErr_GetRaisedException();
#else
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(error, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
#endif
}

/* An error of a hook that C++ has called, which C cannot throw: the hook raises it where PyTorch calls it
   by its own way, which is done at once. */
static THREAD_LOCAL PyObject *unthrown;

static PyObject *
raise_unthrown(void)
{
    PyObject *error = unthrown;
    unthrown = NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return NULL;
}

/* Whether a node gets no gradient. */
static int
nothing_flows(PyObject *gradients)
{
    if (!PyTuple_CheckExact(gradients)) {
        return 0;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(gradients);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (PyTuple_GET_ITEM(gradients, i) != Py_None) {
            return 0;
        }
    }
    return count > 0;
}

/* ``vars(STATE)`` of the current thread (borrowed), which lives as long as Python's state of it. */
static PyObject *
thread_state(void)
{
    static THREAD_LOCAL struct {
        uint64_t thread;
        PyObject *state;
    } known;
    uint64_t number = PyThreadState_GetID(PyThreadState_Get());
    if (known.state == NULL || known.thread != number) {
        PyObject *state = PyObject_GetAttr(inlined.state, names.dict);
        Py_XDECREF(state);
        if (state == NULL || !PyDict_CheckExact(state)) {
            PyErr_Clear();
            return NULL;
        }
        known.state = state;
        known.thread = number;
    }
    return known.state;
}

/* Whether routines of backward operators may run in this thread, see RoutineDispatcher. */
static int
is_plain_thread(PyObject *quiet)
{
    PyObject *state = thread_state();
#if PY_VERSION_HEX < 0x030C0000
    /* Every change of a dict gives it another number, which no other dict has had. */
    static THREAD_LOCAL uint64_t plain_version;
    uint64_t version = state == NULL ? 0 : ((PyDictObject *)state)->ma_version_tag;
    if (version != 0 && version == plain_version) {
        return PyDict_GET_SIZE(quiet) == 0;
    }
#endif
    int is_plain = state != NULL && PyDict_GET_SIZE(quiet) == 0
                   && PyDict_GetItemWithError(state, names.enabled) == Py_True
                   && PyDict_GetItemWithError(state, names.cache) == Py_True
                   && PyDict_GetItemWithError(state, names.held) == Py_False
                   && PyDict_GetItemWithError(state, paused_name) == zero;
    PyErr_Clear();
#if PY_VERSION_HEX < 0x030C0000
    plain_version = is_plain ? version : 0;
#endif
    return is_plain;
}
