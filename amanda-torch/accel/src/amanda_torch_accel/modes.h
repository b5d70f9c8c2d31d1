/* Part of gate.c: the stack of modes. */

/* A builtin of PyTorch's that the gate calls, and answers in the place of. */
typedef struct {
    PyObject *owner, *self;
    PyMethodDef *def;
    PyCFunction original;
    PyMethodDef own; /* of a method: what its descriptor refers to instead, as `def` may be const */
    vectorcallfunc vectorcall; /* of a function */
    int flags;                 /* likewise: those of `def` */
} Builtin;

static struct {
    Builtin push, pop, length, at, is_disabled;
    Builtin disable, enable; /* DisableTorchFunction's __enter__ and __exit__ */
    Builtin place, replace;  /* torch.device's, which push and pop a mode in C++ */
    Builtin is_recording;    /* torch.is_grad_enabled() */
} stack;

/* Of the current thread: its virtual mode (a strong reference), and how many modes lie below it;
   the site whose report is awaited; how many reports have come. */
typedef struct {
    PyObject *mode;
    Py_ssize_t depth;
    unsigned session;
    Site *awaited;
    int reports;
    unsigned long native; /* see native_thread() */
#if HAS_VERSIONS
    uint64_t unpaused; /* the version of the thread's state in which it was found not to be paused */
#endif
} Thread;

static THREAD_LOCAL ON_A_LINE Thread thread;

/* That of the current thread, for where it is needed more than once: to find it takes a call, which compilers
   repeat rather than keep what it has given. */
static APART Thread *
this_thread(void)
{
    return &thread;
}

/* Counts up where the gate is taken off: virtual modes of other threads, which cannot be reached
   from here, are none from then on. */
static unsigned session;
static int is_installed;

static inline PyObject *
virtual_mode_of(Thread *here)
{
    if (here->mode != NULL && here->session != session) {
        Py_CLEAR(here->mode);
    }
    return here->mode;
}

static PyObject *
virtual_mode(void)
{
    return virtual_mode_of(&thread);
}

static PyObject *
call_builtin(const Builtin *builtin, PyObject *argument)
{
    return builtin->original(builtin->self, argument);
}

static PyObject *
real_at(Py_ssize_t index)
{
    PyObject *args = Py_BuildValue("(n)", index), *mode;
    if (args == NULL) {
        return NULL;
    }
    mode = ((PyCFunctionWithKeywords)(void (*)(void))stack.at.original)(stack.at.self, args, NULL);
    Py_DECREF(args);
    return mode;
}

static Py_ssize_t
real_length(void)
{
    PyObject *length = call_builtin(&stack.length, NULL);
    if (length == NULL) {
        return -1;
    }
    Py_ssize_t found = PyLong_AsSsize_t(length);
    Py_DECREF(length);
    return found;
}

/* The same where a mode is virtual; C++ may have taken off some that lay below it. */
static Py_ssize_t
length_around(void)
{
    Py_ssize_t length = real_length();
    if (length >= 0 && thread.depth > length) {
        thread.depth = length;
    }
    return length;
}

static int
real_push(PyObject *mode)
{
    PyObject *none = call_builtin(&stack.push, mode);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

static int
is_ours(PyObject *mode)
{
    return python.mode != NULL && PyObject_TypeCheck(mode, python.mode);
}

/* Put the virtual mode where it would lie. */
static int
make_real(void)
{
    PyObject *mode = thread.mode, *above = PyList_New(0);
    Py_ssize_t length = length_around();
    int failed = above == NULL || length < 0;
    thread.mode = NULL;
    /* Modes that C++ has pushed since: it puts back a mode that it had taken off for a handler. */
    for (; !failed && length > thread.depth; length--) {
        PyObject *top = call_builtin(&stack.pop, NULL);
        failed = top == NULL || PyList_Append(above, top) < 0;
        Py_XDECREF(top);
    }
    failed = failed || real_push(mode) < 0;
    for (Py_ssize_t i = failed ? 0 : PyList_GET_SIZE(above); i > 0; i--) {
        failed = failed || real_push(PyList_GET_ITEM(above, i - 1)) < 0;
    }
    Py_XDECREF(above);
    Py_DECREF(mode);
    return failed ? -1 : 0;
}

/* Make a mode of ours virtual; where modes are off altogether, PyTorch is to see it. */
static int
push_ours(PyObject *mode)
{
    if (virtual_mode() != NULL && make_real() < 0) {
        return -1;
    }
    PyObject *disabled = call_builtin(&stack.is_disabled, NULL);
    if (disabled == NULL) {
        return -1;
    }
    int is_disabled = disabled == Py_True;
    Py_DECREF(disabled);
    if (is_disabled) {
        return real_push(mode);
    }
    Py_ssize_t depth = real_length();
    if (depth < 0) {
        return -1;
    }
    thread.mode = Py_NewRef(mode);
    thread.depth = depth;
    thread.session = session;
    return 0;
}

/* If a mode of ours lies on top of the stack, it becomes virtual. */
static int
settle(void)
{
    Py_ssize_t length = virtual_mode() == NULL ? real_length() : 0;
    if (length <= 0) {
        return (int)length;
    }
    PyObject *top = real_at(length - 1);
    if (top == NULL) {
        return -1;
    }
    int failed = 0;
    if (is_ours(top)) {
        PyObject *popped = call_builtin(&stack.pop, NULL);
        failed = popped == NULL || push_ours(top) < 0;
        Py_XDECREF(popped);
    }
    Py_DECREF(top);
    return failed ? -1 : 0;
}

/* Whether a function is called with as many arguments as it takes, and no names. */
static inline int
is_call_of(Py_ssize_t count, size_t nargsf, PyObject *names)
{
    return PyVectorcall_NARGS(nargsf) == count && (names == NULL || PyTuple_GET_SIZE(names) == 0);
}

static PyObject *
hook_push(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    if (!is_call_of(1, nargsf, names)) {
        return stack.push.vectorcall(function, values, nargsf, names);
    }
    PyObject *mode = values[0];
    if (is_ours(mode)) {
        return push_ours(mode) < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (virtual_mode() != NULL && make_real() < 0) {
        return NULL;
    }
    return call_builtin(&stack.push, mode);
}

static PyObject *
hook_pop(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    if (!is_call_of(0, nargsf, names)) {
        return stack.pop.vectorcall(function, values, nargsf, names);
    }
    PyObject *mode = virtual_mode();
    if (mode != NULL) {
        Py_ssize_t length = length_around();
        if (length < 0) {
            return NULL;
        }
        if (length <= thread.depth) {
            thread.mode = NULL;
            return mode;
        }
        return call_builtin(&stack.pop, NULL);
    }
    mode = call_builtin(&stack.pop, NULL);
    if (mode != NULL && !is_ours(mode) && settle() < 0) {
        Py_CLEAR(mode);
    }
    return mode;
}

static PyObject *
hook_length(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    if (!is_call_of(0, nargsf, names)) {
        return stack.length.vectorcall(function, values, nargsf, names);
    }
    Py_ssize_t length = real_length();
    return length < 0 ? NULL : PyLong_FromSsize_t(length + (virtual_mode() != NULL));
}

static PyObject *keywords_of(PyObject *const *values, PyObject *names);

/* The builtin takes a tuple and a dict, and has no vectorcall. */
static PyObject *
call_at(PyObject *const *values, Py_ssize_t count, PyObject *names)
{
    PyObject *args = PyTuple_New(count), *kwargs = NULL, *mode = NULL;
    for (Py_ssize_t i = 0; args != NULL && i < count; i++) {
        PyTuple_SET_ITEM(args, i, Py_NewRef(values[i]));
    }
    if (args != NULL && names != NULL && PyTuple_GET_SIZE(names) > 0) {
        kwargs = keywords_of(values + count, names);
    }
    if (args != NULL && !PyErr_Occurred()) {
        PyCFunction original = stack.at.original;
        mode = ((PyCFunctionWithKeywords)(void (*)(void))original)(stack.at.self, args, kwargs);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return mode;
}

static PyObject *
hook_at(PyObject *Py_UNUSED(function), PyObject *const *values, size_t nargsf, PyObject *names)
{
    if (virtual_mode() != NULL && length_around() >= 0 && is_call_of(1, nargsf, names)) {
        Py_ssize_t index = PyLong_AsSsize_t(values[0]);
        if (index == thread.depth) {
            return Py_NewRef(thread.mode);
        }
        if (index > thread.depth) {
            return real_at(index - 1);
        }
        PyErr_Clear();
    }
    return call_at(values, PyVectorcall_NARGS(nargsf), names);
}

/* Where a program turns modes off, what it calls is reported to none: PyTorch is to see ours. And
   where C++ is to push a mode, it lies above ours. */
static PyObject *
enter_above(const Builtin *builtin, PyObject *self, PyObject *argument)
{
    if (virtual_mode() != NULL && make_real() < 0) {
        return NULL;
    }
    return builtin->original(self, argument);
}

static PyObject *
leave_above(const Builtin *builtin, PyObject *self, PyObject *argument)
{
    PyObject *result = builtin->original(self, argument);
    if (result != NULL && settle() < 0) {
        Py_CLEAR(result);
    }
    return result;
}

static PyObject *
hook_disable(PyObject *self, PyObject *argument)
{
    return enter_above(&stack.disable, self, argument);
}

static PyObject *
hook_enable(PyObject *self, PyObject *argument)
{
    return leave_above(&stack.enable, self, argument);
}

static PyObject *
hook_place(PyObject *self, PyObject *argument)
{
    return enter_above(&stack.place, self, argument);
}

static PyObject *
hook_replace(PyObject *self, PyObject *argument)
{
    return leave_above(&stack.replace, self, argument);
}

/* Put back a mode that was virtual (a reference that is given away), as far as the gate is on. */
static RARE void
push_back(PyObject *mode)
{
    KEEPING_ERROR({
        if (is_installed && push_ours(mode) < 0) {
            PyErr_WriteUnraisable(mode);
        }
        Py_DECREF(mode);
    });
}

static inline void
put_back(Thread *here, PyObject *mode)
{
    if (LIKELY(here->mode == NULL && here->session == session)) {
        here->mode = mode;
    }
    else {
        push_back(mode);
    }
}
