/* Part of gate.c: checks and sums. */

/* What follows says 1 where all tensors are finite, 0 where Python is to look at them, and -1 with an
   error. They are looked at as by a routine: in a thread without modes, and without gradients. */

static int
is_tensor(PyObject *value)
{
    PyObject *type = (PyObject *)Py_TYPE(value);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inlined.tensors); i++) {
        if (PyTuple_GET_ITEM(inlined.tensors, i) == type) {
            return 1;
        }
    }
    return 0;
}

/* Whether a tensor's dtype has a sum. PyTorch warns as it sums quantized or complex numbers. */
static int
has_sum(PyObject *tensor)
{
    PyObject *dtype = PyObject_CallOneArg(inlined.dtype, tensor);
    int found = dtype == NULL ? -1 : PySet_Contains(inlined.summed, dtype);
    Py_XDECREF(dtype);
    return found;
}

/* The sum of finite numbers may overflow: only a finite sum is an answer. */
static int
is_finite_tensor(PyObject *tensor)
{
    int is_summed = has_sum(tensor);
    if (is_summed <= 0) {
        return is_summed;
    }
    PyObject *sum = PyObject_CallOneArg(inlined.sum, tensor), *number = NULL;
    if (sum != NULL) {
        number = PyObject_CallOneArg(inlined.item, sum);
        Py_DECREF(sum);
    }
    if (number == NULL) {
        /* There is no sum, or it has no number: nested, on the meta device. */
        if (!PyErr_ExceptionMatches(PyExc_Exception)) {
            return -1;
        }
        PyErr_Clear();
        return 0;
    }
    int is_finite = PyFloat_CheckExact(number) ? isfinite(PyFloat_AS_DOUBLE(number))
                                               : PyLong_CheckExact(number) || PyBool_Check(number);
    Py_DECREF(number);
    return is_finite;
}

/* Whether a value that is no tensor of a known class, and no container, has no tensor in it. */
static int
has_no_tensor(PyObject *value)
{
    return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value)
           || PyFloat_CheckExact(value) || PyUnicode_CheckExact(value) || PySlice_Check(value)
           || value == Py_Ellipsis;
}

/* Of a tensor, a number, or a list or tuple of such. `depth` is that of the containers in it. */
static int
are_finite(PyObject *value, int depth)
{
    if (is_tensor(value)) {
        return is_finite_tensor(value);
    }
    if (depth == 0 || !(PyTuple_Check(value) || PyList_CheckExact(value))) {
        return has_no_tensor(value);
    }
    int is_finite = 1;
    /* Others may change a list while a kernel runs. */
    for (Py_ssize_t i = 0; is_finite == 1 && i < PySequence_Fast_GET_SIZE(value); i++) {
        PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
        is_finite = are_finite(item, depth - 1);
        Py_DECREF(item);
    }
    return is_finite;
}

/* Ask a function without arguments, or a dict for a key. */
static PyObject *
ask(PyObject *question)
{
    if (!PyTuple_CheckExact(question)) {
        return PyObject_CallNoArgs(question);
    }
    PyObject *key = PyTuple_GET_ITEM(question, 1);
    PyObject *found = PyDict_GetItemWithError(PyTuple_GET_ITEM(question, 0), key);
    if (found == NULL && !PyErr_Occurred()) {
        PyErr_SetObject(PyExc_KeyError, key);
    }
    return Py_XNewRef(found);
}

/* Whether tensors may be looked at here: no function mode, transform or tracer would notice. */
static int
is_plain_here(void)
{
    Py_ssize_t length = real_length();
    if (length != 0) {
        return length < 0 ? -1 : 0;
    }
    PyObject *questions = is_surely_plain() ? native.plain : inlined.plain;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(questions); i++) {
        PyObject *found = ask(PyTuple_GET_ITEM(questions, i));
        if (found == NULL) {
            return -1;
        }
        int is_plain = found == Py_None || found == Py_False
                       || (PyLong_CheckExact(found) && PyLong_AsLong(found) <= 0);
        Py_DECREF(found);
        if (!is_plain) {
            return 0;
        }
    }
    return 1;
}

static int
set_recording(PyObject *value)
{
    if (native.set_recording != NULL) {
        native.set_recording(value == Py_True);
        return 0;
    }
    PyObject *none = PyObject_CallOneArg(inlined.set_recording, value);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Add to the time that routines have taken in the scopes of this thread. */
static int
charge(long long nanoseconds)
{
    PyObject *state = thread_state();
    PyObject *scopes = state == NULL ? NULL : PyDict_GetItemWithError(state, names.scopes);
    if (scopes == NULL || !PyTuple_CheckExact(scopes)) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(scopes);
    PyObject *seconds = PyFloat_FromDouble((double)nanoseconds * 1e-9);
    int failed = seconds == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(scopes); i++) {
        PyObject *statistics = PyObject_GetAttr(PyTuple_GET_ITEM(scopes, i), names.statistics);
        PyObject *sum = statistics == NULL ? NULL : PyObject_GetAttr(statistics, names.seconds);
        if (sum != NULL) {
            Py_SETREF(sum, PyNumber_Add(sum, seconds));
        }
        failed = sum == NULL || PyObject_SetAttr(statistics, names.seconds, sum) < 0;
        Py_XDECREF(statistics);
        Py_XDECREF(sum);
    }
    Py_XDECREF(seconds);
    Py_DECREF(scopes);
    return failed ? -1 : 0;
}

/* Look at some values, each of which may be a container. */
static int
look_at(PyObject *const *values, Py_ssize_t count, int depth)
{
    int records = is_recording();
    long long start = records < 0 ? -1 : read_nanoseconds(), end;
    if (start < 0 || (records && set_recording(Py_False) < 0)) {
        return -1;
    }
    int is_finite = 1;
    for (Py_ssize_t i = 0; is_finite == 1 && i < count; i++) {
        is_finite = values[i] == NULL ? 1 : are_finite(values[i], depth);
    }
    if (records) {
        if (is_finite < 0) {
            KEEPING_ERROR({
                if (set_recording(Py_True) < 0) {
                    PyErr_Clear();
                }
            });
        }
        else if (set_recording(Py_True) < 0) {
            is_finite = -1;
        }
    }
    if (is_finite >= 0 && ((end = read_nanoseconds()) < 0 || charge(end - start) < 0)) {
        is_finite = -1;
    }
    return is_finite;
}

enum { CHECKS = 1, SUMS = 2 };

/* Of what some routines of a point are: CHECKS, SUMS, both or neither. */
static int
what_looks(PyObject *routines)
{
    int found = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(routines); i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        found |= is_of_check(routine) ? CHECKS : is_of_sum(routine) ? SUMS : 0;
    }
    return found;
}

/* Whether all sums of a point know an execution of a kind; those that do not are told of it. */
static int
pass_kind(PyObject *routines, PyObject *kind)
{
    int passed = 1;
    for (Py_ssize_t i = 0; passed >= 0 && i < PyTuple_GET_SIZE(routines); i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        if (!is_of_sum(routine) || PyMethod_GET_FUNCTION(routine) != inlined.add_after) {
            continue;
        }
        if (weight_of(PyMethod_GET_SELF(routine), kind) == NULL) {
            passed = PyErr_Occurred() ? -1 : 0;
        }
    }
    /* All of them: Python runs them all. */
    for (Py_ssize_t i = 0; passed == 0 && i < PyTuple_GET_SIZE(routines); i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        if (is_of_sum(routine) && PyMethod_GET_FUNCTION(routine) == inlined.add_after) {
            PyObject *none =
                PyObject_CallMethodOneArg(PyMethod_GET_SELF(routine), names.expect, kind);
            passed = none == NULL ? -1 : 0;
            Py_XDECREF(none);
        }
    }
    return passed;
}

/* Whether the checks among routines want the inputs looked at: 1; 2 if it is yet to be found out. */
static int
wants_inputs(PyObject *routines)
{
    int wanted = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(routines); i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        if (!is_of_check(routine) || PyMethod_GET_FUNCTION(routine) != inlined.before) {
            continue;
        }
        PyObject *overwrites = field(PyMethod_GET_SELF(routine), at.check_overwrites);
        if (overwrites != Py_False && overwrites != Py_True) {
            return 2;
        }
        wanted = wanted || overwrites == Py_True;
    }
    return wanted;
}

/* Whether a check among routines keeps something that one of its routines has left in Python. */
static int
holds_inputs(PyObject *routines)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(routines); i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        if (is_of_check(routine) || is_of_sum(routine)) {
            PyObject *held = field(PyMethod_GET_SELF(routine),
                                   is_of_check(routine) ? at.check_held : at.sum_held);
            if (held == NULL || !PyDict_CheckExact(held) || PyDict_GET_SIZE(held) > 0) {
                return 1;
            }
        }
    }
    return 0;
}
