/* Part of gate.c: routines in Python around an operator. */

/* What follows is Executor.run_around() of amanda_torch.eager.execution with what it calls, as long
   as no routine returns anything. Python goes on where one does. */

/* How often tensors have been changed in place; -1 for those that do not count it. */
static int
read_versions(const Values *values, long long *versions)
{
    PyGetSetDescrObject *property = (PyGetSetDescrObject *)inlined.version;
    for (Py_ssize_t i = 0; i < values->count; i++) {
        PyObject *value = values->items[i], *version = NULL;
        versions[i] = -1;
        if (native.counter != NULL && is_tensor(value)) {
            const uint32_t *counter = *native.counter(value + 1);
            versions[i] = counter == NULL ? -1 : (long long)counter[native.version];
        }
        else if (value != Py_None && PyObject_TypeCheck(value, PyDescr_TYPE(property))) {
            version = property->d_getset->get(value, property->d_getset->closure);
            if (version != NULL) {
                versions[i] = PyLong_AsLongLong(version);
                Py_DECREF(version);
            }
            /* Tensors of inference mode have none. */
            if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_RuntimeError)) {
                return -1;
            }
            PyErr_Clear();
        }
    }
    return 0;
}

/* What goes with a tool's code in this thread. */
typedef struct {
    PyObject *state; /* vars(STATE) */
    PyObject *outer; /* how many tools' code runs already */
    int records;     /* gradients were recorded */
    int is_locked;
    long long start; /* 0 before the lock was taken */
} ToolCode;

/* Undo enter_tool() as far as it was done; an error that is set stays. */
static int
leave_tool(ToolCode *code)
{
    int failed = 0;
    PyObject *none = NULL;
    if (code->start > 0) {
        long long end = read_nanoseconds();
        failed = end < 0 || charge(end - code->start) < 0;
    }
    if (code->is_locked) {
        none = PyObject_CallNoArgs(inlined.release);
        failed = none == NULL || failed;
        Py_XDECREF(none);
    }
    if (code->records) {
        failed = set_recording(Py_True) < 0 || failed;
    }
    if (code->outer != NULL) {
        failed = PyDict_SetItem(code->state, paused_name, code->outer) < 0 || failed;
        Py_CLEAR(code->outer);
    }
    return failed ? -1 : 0;
}

/* Begin to run a tool's code: other drivers and hooks see that it is one, one thread does at a time. */
static int
enter_tool(ToolCode *code, PyObject *state, int records)
{
    *code = (ToolCode){.state = state};
    PyObject *outer = PyDict_GetItemWithError(state, paused_name);
    PyObject *inner = outer == NULL ? NULL : outer == zero ? Py_NewRef(one) : PyNumber_Add(outer, one);
    code->outer = Py_XNewRef(outer);
    int failed = inner == NULL || PyDict_SetItem(state, paused_name, inner) < 0;
    Py_XDECREF(inner);
    if (!failed && records) {
        failed = set_recording(Py_False) < 0;
        code->records = 1;
    }
    if (!failed) {
        PyObject *taken = PyObject_CallNoArgs(inlined.acquire);
        code->is_locked = taken != NULL;
        Py_XDECREF(taken);
        failed = !code->is_locked || (code->start = read_nanoseconds()) < 0;
    }
    if (failed) {
        KEEPING_ERROR({
            if (leave_tool(code) < 0) {
                PyErr_Clear();
            }
        });
    }
    return failed ? -1 : 0;
}

/* Have Python note which routine has raised an error, and raise what it gives instead. */
static void
note_raised(PyObject *known, PyObject *action)
{
    PyObject *error = take_error();
    PyObject *raised = PyObject_CallFunctionObjArgs(inlined.raised, error, action,
                                                    field(known, python.known_name), NULL);
    Py_DECREF(error);
    if (raised != NULL) {
        PyErr_SetObject((PyObject *)Py_TYPE(raised), raised);
        Py_DECREF(raised);
    }
}

/* Call a routine with what it selects of the values; NULL without an error if these are too few, or
   Python is to call it. */
static PyObject *
call_routine(PyObject *action, const Values *values)
{
    /* The first is free for the function that is called. */
    PyObject *room[MOST_VALUES + 1], **selected = room + 1;
    PyObject *select = field(action, at.action_select), *kwargs = field(action, at.action_kwargs);
    Py_ssize_t count = values->count;
    if (!PyDict_CheckExact(kwargs)) {
        return NULL;
    }
    if (select == Py_None) {
        memcpy(selected, values->items, (size_t)count * sizeof *selected);
    }
    else {
        count = PyTuple_GET_SIZE(select);
        if (count > MOST_VALUES) {
            return NULL;
        }
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(select, i));
            place += place < 0 ? values->count : 0;
            if (place < 0 || place >= values->count) {
                PyErr_Clear();
                return NULL;
            }
            selected[i] = values->items[place];
        }
    }
    return PyObject_VectorcallDict(field(action, at.action_func), selected,
                                   (size_t)count | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                   PyDict_GET_SIZE(kwargs) == 0 ? NULL : kwargs);
}

/* Call the routines of a point, until one returns something or cannot be given what it selects.

   Returns how many have run, -1 with an error. `*result` is what the last one has returned: NULL for
   nothing. */
static Py_ssize_t
call_routines(PyObject *known, PyObject *actions, const Values *values, PyObject **result)
{
    long long before[MOST_VALUES], after[MOST_VALUES];
    size_t size = (size_t)values->count * sizeof *before;
    if (read_versions(values, before) < 0) {
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(actions); i++) {
        PyObject *action = PyTuple_GET_ITEM(actions, i);
        PyObject *returned = call_routine(action, values);
        if (returned == NULL) {
            if (!PyErr_Occurred()) {
                return i;
            }
            note_raised(known, action);
            return -1;
        }
        if (returned != Py_None) {
            *result = returned;
        }
        else {
            Py_DECREF(returned);
        }
        if (read_versions(values, after) < 0) {
            return -1;
        }
        if (memcmp(before, after, size) != 0) {
            memcpy(before, after, size);
            PyObject *none = PyObject_CallOneArg(inlined.changed, action);
            Py_XDECREF(none);
            if (none == NULL) {
                return -1;
            }
        }
        if (*result != NULL) {
            return i + 1;
        }
    }
    return PyTuple_GET_SIZE(actions);
}

/* The same as code of tools. */
static Py_ssize_t
run_point(PyObject *known, PyObject *actions, const Values *values, PyObject *state, int records,
          PyObject **result)
{
    ToolCode code;
    Py_ssize_t done;
    *result = NULL;
    if (PyTuple_GET_SIZE(actions) == 0) {
        return 0;
    }
    if (enter_tool(&code, state, records) < 0) {
        return -1;
    }
    done = call_routines(known, actions, values, result);
    if (done < 0) {
        KEEPING_ERROR({
            if (leave_tool(&code) < 0) {
                PyErr_Clear();
            }
        });
    }
    else if (leave_tool(&code) < 0) {
        done = -1;
    }
    if (done < 0) {
        Py_CLEAR(*result);
    }
    return done;
}

/* Whether an operator's plan has routines before and after it alone, and none takes part in AD. */
static int
is_around(PyObject *known)
{
    PyObject *before = field(known, python.known_around_before);
    PyObject *after = field(known, python.known_around_after);
    return inlined.counter != NULL && before != NULL && after != NULL && PyTuple_CheckExact(before)
           && PyTuple_CheckExact(after);
}

/* Whether it may run here between its routines, and its inputs; 0 where Python is to run all of it. */
static int
find_plain_inputs(const Invocation *call, PyObject *operator, PyObject *known, int records,
                  Values *inputs)
{
    PyObject *layout = field(known, python.known_layout);
    int is_blind = field(known, python.known_blind) == Py_True;
    if (PyDict_GET_SIZE(inlined.unpaused) != 1
        || (!is_blind && (layout == NULL || !Py_IS_TYPE(layout, (PyTypeObject *)inlined.layout)
                          || (records && field(layout, at.layout_in_place) != Py_False)))) {
        return 0;
    }
    int is_plain = is_plain_here();
    return is_plain <= 0 || is_blind ? is_plain : find_inputs(call, operator, layout, inputs);
}

/* Have Python go on after some routines before an operator:
   ``known.resumed_before(known, operator, args, kwargs, done, inputs, returned)``. */
static PyObject *
resume_before(const Invocation *call, PyObject *operator, PyObject *known, Py_ssize_t done,
              const Values *inputs, PyObject *returned)
{
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call), *result = NULL;
    PyObject *list = list_of(inputs), *number = PyLong_FromSsize_t(done);
    if (args != NULL && kwargs != NULL && list != NULL && number != NULL) {
        result = PyObject_CallFunctionObjArgs(field(known, python.known_resumed_before), known,
                                              operator, args, kwargs, number, list,
                                              returned == NULL ? Py_None : returned, NULL);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(list);
    Py_XDECREF(number);
    return result;
}

/* The same after it: ``known.resumed_after(known, result, done, inputs, returned)``. */
static PyObject *
resume_after(PyObject *known, PyObject *result, Py_ssize_t done, const Values *inputs,
             PyObject *returned)
{
    PyObject *list = list_of(inputs), *number = PyLong_FromSsize_t(done), *other = NULL;
    if (list != NULL && number != NULL) {
        other = PyObject_CallFunctionObjArgs(field(known, python.known_resumed_after), known, result,
                                             number, list, returned == NULL ? Py_None : returned,
                                             NULL);
    }
    Py_XDECREF(list);
    Py_XDECREF(number);
    return other;
}

/* The tensors of a result (strong references): 1; 0 if there are too many; -1 with an error. */
static int
find_outputs(PyObject *result, Values *outputs)
{
    if ((PyObject *)Py_TYPE(result) == inlined.tensor) {
        outputs->items[outputs->count++] = Py_NewRef(result);
        return 1;
    }
    Py_ssize_t tensors = 0, count = PyTuple_Check(result) ? PyTuple_GET_SIZE(result) : -1;
    while (tensors < count && is_tensor(PyTuple_GET_ITEM(result, tensors))) {
        tensors++;
    }
    if (tensors == count && append_values(outputs, PySequence_Fast_ITEMS(result), count)) {
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_INCREF(outputs->items[i]);
        }
        return 1;
    }
    PyObject *list = PyObject_CallOneArg(inlined.tensors_of, result);
    if (list == NULL) {
        return -1;
    }
    int fits = PyList_CheckExact(list) && PyList_GET_SIZE(list) <= MOST_VALUES;
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(list); i++) {
        outputs->items[outputs->count++] = Py_NewRef(PyList_GET_ITEM(list, i));
    }
    Py_DECREF(list);
    return fits;
}

/* Run the routines after an operator; its result, or another one (a reference is taken over). */
static PyObject *
run_after(PyObject *known, PyObject *result, const Values *inputs, PyObject *state, int records)
{
    PyObject *actions = field(known, python.known_around_after), *returned = NULL;
    if (PyTuple_GET_SIZE(actions) == 0) {
        return result;
    }
    DECLARE_VALUES(outputs);
    int is_blind = field(known, python.known_blind) == Py_True;
    Py_ssize_t done = is_blind ? 1 : find_outputs(result, &outputs);
    if (done > 0) {
        done = run_point(known, actions, &outputs, state, records, &returned);
    }
    if (done < 0) {
        Py_CLEAR(result);
    }
    else if (returned != NULL || done < PyTuple_GET_SIZE(actions)) {
        Py_SETREF(result, resume_after(known, result, done, inputs, returned));
    }
    Py_XDECREF(returned);
    release_values(&outputs);
    return result;
}

/* Run an operator between routines in Python. */
static APART PyObject *
run_around(const Invocation *call, PyObject *mode, PyObject *operator, PyObject *known)
{
    PyObject *state = field(mode, python.mode_thread), *result = NULL, *returned = NULL;
    PyObject *actions = field(known, python.known_around_before);
    DECLARE_VALUES(inputs);
    int records = is_recording();
    int may_run = records < 0 ? -1 : find_plain_inputs(call, operator, known, records, &inputs);
    if (may_run <= 0 || state == NULL) {
        release_values(&inputs);
        return may_run < 0 ? NULL : act(call, operator, known);
    }
    Py_ssize_t done = run_point(known, actions, &inputs, state, records, &returned), start = 0;
    if (done >= 0 && (returned != NULL || done < PyTuple_GET_SIZE(actions))) {
        result = resume_before(call, operator, known, done, &inputs, returned);
    }
    else if (done >= 0) {
        int is_claimed = records && field(known, python.known_claims) == Py_True;
        if (!is_claimed || (start = next_sequence()) >= 0) {
            result = run_original(call);
        }
        if (result != NULL && result != Py_NotImplemented) {
            if (is_claimed && claim(call, mode, operator, known, result, start) < 0) {
                Py_CLEAR(result);
            }
            else {
                result = run_after(known, result, &inputs, state, records);
            }
        }
    }
    Py_XDECREF(returned);
    release_values(&inputs);
    return result;
}

/* Run an operator with the mode on the stack: PyTorch reports it. */
static APART PyObject *
report(const Invocation *call, PyObject *mode)
{
    Site *site = call->site, *awaited = thread.awaited;
    int reports = thread.reports;
    if (real_push(mode) < 0) {
        return NULL;
    }
    thread.awaited = site;
    thread.reports = 0;
    PyObject *result = run_original(call);
    int reported = thread.reports;
    int is_silent = reported == 0 && result != NULL && result != Py_NotImplemented;
    thread.awaited = awaited;
    thread.reports = reports;
    if (reported > 0 && result != NULL && result != Py_NotImplemented) {
        note_signature(call);
    }
    if (reported > 0) {
        site->unreported = HEARD;
    }
    else if (site->unreported != HEARD) {
        site->unreported = is_silent ? site->unreported + 1 : 0;
    }
    if (thread.mode == mode) {
        /* Python has popped it and pushed it again (torch.overrides.handle_torch_function). */
        Py_CLEAR(thread.mode);
        return result;
    }
    KEEPING_ERROR({
        PyObject *top = call_builtin(&stack.pop, NULL);
        if (top != NULL && top != mode) {
            real_push(top);
        }
        Py_XDECREF(top);
        PyErr_Clear();
    });
    return result;
}

/* The same, and find out on which stack the mode lies then. */
static APART PyObject *
ask_python(const Invocation *call, PyObject *mode, Thread *here)
{
    here->mode = NULL;
    PyObject *result = report(call, mode);
    if (is_installed) {
        /* What was reported may have changed the stack. */
        push_back(mode);
    }
    else {
        put_back(here, mode);
    }
    return result;
}

/* Every call of a replaced function comes here. */
static APART PyObject *
intercept(const Invocation *call)
{
    Thread *here = this_thread();
    PyObject *mode = virtual_mode_of(here), *cell = NULL, *known = NULL, *result = NULL;
    Site *site = call->site;
    PyObject *operator = call->operator != NULL ? call->operator : site->operator;
    if (mode == NULL || (site->unreported >= SILENT && site->operator == NULL)) {
        return run_original(call);
    }
    Answer answer = operator == NULL ? ASK : look_up(here, mode, operator, call, &cell, &known);
    if (answer == ASK) {
        return ask_python(call, mode, here);
    }
    /* As PyTorch does with a mode that it reports to: nothing inside of the call is noticed. */
    here->mode = NULL;
    if (answer == EMPTY) {
        result = run_original(call);
        if (is_refused(call, result)) {
            KEEPING_ERROR(take_back(cell));
        }
    }
    else if (answer == MEASURED) {
        result = run_measured(call, mode, operator, known, cell);
    }
    else {
        result = is_inlined(call, known) ? run_inlined(call, mode, operator, known)
                 : is_around(known)      ? run_around(call, mode, operator, known)
                                         : act(call, operator, known);
    }
    Py_XDECREF(known);
    Py_XDECREF(cell);
    put_back(here, mode);
    return result;
}
