/* Part of gate.c: trampolines. */

#define KEYWORD_SITES 1024
#define PLAIN_SITES 512
#define OTHER_SITES 4096

static Site keyword_sites[KEYWORD_SITES], plain_sites[PLAIN_SITES], other_sites[OTHER_SITES];
static Py_ssize_t keyword_count, plain_count, other_count;

static APART PyObject *
through_keywords(Site *site, PyObject *self, PyObject *args, PyObject *kwargs)
{
    Invocation call = {.site = site, .self = self, .args = args, .kwargs = kwargs};
    return intercept(&call);
}

static APART PyObject *
through_plain(Site *site, PyObject *self, PyObject *argument)
{
    Invocation call = {.site = site, .self = self, .args = argument};
    return intercept(&call);
}

#define TIMES_16(M, prefix)                                                                 \
    M(prefix##0) M(prefix##1) M(prefix##2) M(prefix##3) M(prefix##4) M(prefix##5)           \
    M(prefix##6) M(prefix##7) M(prefix##8) M(prefix##9) M(prefix##a) M(prefix##b)           \
    M(prefix##c) M(prefix##d) M(prefix##e) M(prefix##f)
#define TIMES_256(M, prefix)                                                                \
    TIMES_16(M, prefix##0) TIMES_16(M, prefix##1) TIMES_16(M, prefix##2)                    \
    TIMES_16(M, prefix##3) TIMES_16(M, prefix##4) TIMES_16(M, prefix##5)                    \
    TIMES_16(M, prefix##6) TIMES_16(M, prefix##7) TIMES_16(M, prefix##8)                    \
    TIMES_16(M, prefix##9) TIMES_16(M, prefix##a) TIMES_16(M, prefix##b)                    \
    TIMES_16(M, prefix##c) TIMES_16(M, prefix##d) TIMES_16(M, prefix##e)                    \
    TIMES_16(M, prefix##f)
#define ALL_KEYWORDS(M) TIMES_256(M, 0x0) TIMES_256(M, 0x1) TIMES_256(M, 0x2) TIMES_256(M, 0x3)
#define ALL_PLAIN(M) TIMES_256(M, 0x0) TIMES_256(M, 0x1)

#define DEFINE_KEYWORDS(i)                                                    \
    static PyObject *keywords_##i(PyObject *self, PyObject *args, PyObject *kwargs) \
    {                                                                         \
        return through_keywords(&keyword_sites[i], self, args, kwargs);       \
    }
#define DEFINE_PLAIN(i)                                              \
    static PyObject *plain_##i(PyObject *self, PyObject *argument)   \
    {                                                                \
        return through_plain(&plain_sites[i], self, argument);       \
    }
#define NAME_KEYWORDS(i) keywords_##i,
#define NAME_PLAIN(i) plain_##i,

ALL_KEYWORDS(DEFINE_KEYWORDS)
ALL_PLAIN(DEFINE_PLAIN)

static const PyCFunctionWithKeywords keyword_trampolines[] = {ALL_KEYWORDS(NAME_KEYWORDS)};
static const PyCFunction plain_trampolines[] = {ALL_PLAIN(NAME_PLAIN)};

/* Functions are found by their address: vectorcall is told which one is called. */
#define FUNCTION_SLOTS 8192
static Site *function_slots[FUNCTION_SLOTS];

static Site **
function_slot(PyObject *function)
{
    size_t i = ((uintptr_t)function >> 4) * 2654435761u;
    for (i %= FUNCTION_SLOTS;; i = (i + 1) % FUNCTION_SLOTS) {
        if (function_slots[i] == NULL || function_slots[i]->owner == function) {
            return &function_slots[i];
        }
    }
}

/* As CPython calls a function that has no vectorcall: with a tuple, and a dict if there are names. */
static PyObject *
through_function(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    Invocation call = {.site = *function_slot(function)};
    call.self = PyCFunction_GET_SELF(function);
    call.args = PyTuple_New(count);
    if (call.args == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyTuple_SET_ITEM(call.args, i, Py_NewRef(values[i]));
    }
    if (names != NULL && PyTuple_GET_SIZE(names) > 0) {
        call.kwargs = keywords_of(values + count, names);
        if (call.kwargs == NULL) {
            Py_DECREF(call.args);
            return NULL;
        }
    }
    PyObject *result = NULL;
    if (Py_EnterRecursiveCall(" while calling a Python object") == 0) {
        result = intercept(&call);
        Py_LeaveRecursiveCall();
    }
    Py_DECREF(call.args);
    Py_XDECREF(call.kwargs);
    return result;
}

static PyObject *
through_getter(PyObject *self, void *closure)
{
    Invocation call = {.site = closure, .self = self};
    return intercept(&call);
}

static Site *subscript, *assignment;

static PyObject *
through_subscript(PyObject *self, PyObject *index)
{
    Invocation call = {.site = subscript, .self = self, .args = index};
    return intercept(&call);
}

static int
through_assignment(PyObject *self, PyObject *index, PyObject *value)
{
    Invocation call = {.site = assignment, .self = self, .args = index, .kwargs = value};
    PyObject *result = intercept(&call);
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}
