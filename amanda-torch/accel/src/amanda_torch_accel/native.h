/* Part of gate.c: functions of PyTorch's in C++. */

/* What is asked at each operator, by functions that take and return numbers. Python's way to them takes
   some 500 instructions of pybind11's. NULL before configure_native(). */
static struct {
    uint64_t (*sequence)(void);  /* the number of the next node of autograd */
    int (*task)(void);           /* the number of the current pass, -1 without one */
    _Bool (*is_included)(uint16_t); /* whether a dispatch key is on in this thread */
    _Bool (*is_recording)(void);    /* whether operators are recorded for gradients */
    void (*set_recording)(_Bool);
    uint16_t keys[4];             /* those that are on in transforms and tracers; 0 is none */
    Builtin depth;                /* how many dispatch modes there are */
    PyObject *checks, *plain;     /* what is left to be asked of `inlined.checks` and `.plain` */
    PyTypeObject *meta;           /* the class of torch.autograd.Function */
    const char *(*node)(const void *);     /* the node of a tensor as it was set last, or NULL */
    PyObject *(*object)(const void *);     /* the object that stands for the node of an edge */
    const uint32_t *const *(*counter)(const void *); /* where a tensor refers to its count of changes */
    Py_ssize_t version; /* which word of that it is */
} native;

/* Whether operators are recorded for gradients; -1 with an error. */
static int
is_recording(void)
{
    if (native.is_recording != NULL) {
        return native.is_recording();
    }
    PyObject *found = call_builtin(&stack.is_recording, NULL);
    Py_XDECREF(found);
    return found == NULL ? -1 : found == Py_True;
}

/* Whether no transform, tracer and dispatch mode is there; 0 also where it is not known. */
static int
is_surely_plain(void)
{
    if (native.is_included == NULL) {
        return 0;
    }
    for (size_t i = 0; i < sizeof native.keys / sizeof *native.keys; i++) {
        if (native.keys[i] != 0 && native.is_included(native.keys[i])) {
            return 0;
        }
    }
    PyObject *depth = call_builtin(&native.depth, NULL);
    int is_plain = depth != NULL && PyLong_CheckExact(depth) && Py_SIZE(depth) == 0;
    PyErr_Clear();
    Py_XDECREF(depth);
    return is_plain;
}
