/* Part of gate.c: an operator. */

/* A number for the types of a call's arguments, and the names of those that have names. */
static uint64_t
signature_of(const Invocation *call)
{
    uint64_t found = 1469598103934665603u;
    const uint64_t prime = 1099511628211u;
    Site *site = call->site;
    if (call->self != NULL && site->kind != FUNCTION) {
        found = (found ^ (uintptr_t)Py_TYPE(call->self)) * prime;
    }
    if (site->kind == PLAIN && site->flags != METH_VARARGS) {
        return call->args == NULL ? found : (found ^ (uintptr_t)Py_TYPE(call->args)) * prime;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(call->args);
    for (Py_ssize_t i = 0; i < count; i++) {
        found = (found ^ (uintptr_t)Py_TYPE(PyTuple_GET_ITEM(call->args, i))) * prime;
    }
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (call->kwargs != NULL && PyDict_Next(call->kwargs, &position, &key, &value)) {
        found = (found ^ (uintptr_t)key) * prime;
        found = (found ^ (uintptr_t)Py_TYPE(value)) * prime;
    }
    return found ^ (uint64_t)count;
}

static int
has_signature(const Invocation *call)
{
    return call->site->kind <= FUNCTION && !call->site->reports_first;
}

/* Whether it is seen from the result of a call that PyTorch has refused its arguments, or it never does. */
static int
tells_refusal(const Invocation *call)
{
    return has_signature(call) || call->site->kind == SUBSCRIPT || call->site->kind == CALLABLE;
}

/* PyTorch has taken arguments of these types: the next ones fit, too. */
static void
note_signature(const Invocation *call)
{
    if (has_signature(call)) {
        Site *site = call->site;
        site->fitting[site->fitting_count++ % FITTING] = signature_of(call);
    }
}

/* Whether a known way to run an operator may be called at once.
 *
 * Not where PyTorch may refuse the arguments, and report nothing: then no routine is to run.
 */
static APART int
may_act(const Invocation *call)
{
    Site *site = call->site;
    if (!has_signature(call)) {
        return site->kind == SUBSCRIPT || site->kind == CALLABLE;
    }
    uint64_t signature = signature_of(call);
    for (int i = 0; i < FITTING; i++) {
        if (site->fitting[i] == signature) {
            return 1;
        }
    }
    return 0;
}

typedef enum { ASK, EMPTY, MEASURED, ACTING } Answer;

/* Whether an operator runs plainly: no tool acts, or only on its backward operators, and none is
   recorded. */
static int
is_empty(PyObject *known)
{
    if (known == Py_None) {
        return 1;
    }
    if (!Py_IS_TYPE(known, python.known) || field(known, python.known_claim) != Py_True) {
        return 0;
    }
    int records = is_recording();
    if (records < 0) {
        PyErr_Clear();
    }
    return records == 0;
}

/* Whether all that tools have at an operator is one routine at most, which counts or times it. Nothing has
   to be known of the arguments for it: it acts when the operator has run, and PyTorch refuses what does not
   fit. */
static int
only_measures(PyObject *known, const Invocation *call)
{
    PyObject *before = field(known, python.known_before), *after = field(known, python.known_after);
    if (inlined.counter == NULL || before == NULL || after == NULL || !PyTuple_CheckExact(before)
        || !PyTuple_CheckExact(after) || PyTuple_GET_SIZE(after) > 1 || !tells_refusal(call)) {
        return 0;
    }
    if (PyTuple_GET_SIZE(before) == 0) {
        return PyTuple_GET_SIZE(after) == 0
               || Py_IS_TYPE(PyTuple_GET_ITEM(after, 0), (PyTypeObject *)inlined.counter);
    }
    return PyTuple_GET_SIZE(before) == 1 && timer_around(before, after) != NULL;
}

/* The cell of an operator in the current frame (borrowed), NULL where there is none. It is remembered where
   a site keeps the operator alive. */
static inline PyObject *
cell_of(PyObject *cells, PyObject *operator, const Invocation *call)
{
    PyObject *cell = look_found(cells, operator);
    if (cell != NULL) {
        return cell;
    }
    cell = PyDict_GetItemWithError(cells, operator);
    if (cell == NULL) {
        PyErr_Clear();
    }
    else if (operator == call->site->operator) {
        keep_found(cells, operator, cell);
    }
    return cell;
}

static int
requires_gradient(PyObject *value)
{
    if ((PyObject *)Py_TYPE(value) != PyTuple_GET_ITEM(inlined.tensors, 0)) {
        return 0;
    }
    PyObject *found = PyObject_GetAttr(value, names.requires_grad);
    Py_XDECREF(found);
    return found == Py_True;
}

/* Whether an operator outside of modules is surely a forward one: is_plainly_recorded() of
   amanda_torch.eager.phases, but for the names that are asked more. */
static APART int
is_surely_forward(const Invocation *call)
{
    DECLARE_VALUES(values);
    int found = 0;
    /* Modes would see what is read of tensors. */
    if (inlined.counter != NULL && is_recording() > 0 && real_length() == 0
        && call->site->kind != ASSIGNMENT && call->site->kind != GETTER
        && append_positional(call, &values)) {
        for (Py_ssize_t i = 0; !found && i < values.count; i++) {
            PyObject *value = values.items[i];
            found = requires_gradient(value);
            for (Py_ssize_t k = 0; !found && PyList_CheckExact(value) && k < PyList_GET_SIZE(value); k++) {
                found = requires_gradient(PyList_GET_ITEM(value, k));
            }
        }
    }
    PyErr_Clear();
    return found;
}

/* Note where an operator was looked for. */
static RARE void
note_operator(PyObject *cells, PyObject *cell, Py_ssize_t count)
{
    PyObject *known = PyList_GET_ITEM(cell, count);
    note(cells);
    note(cell);
    note(&PyList_GET_ITEM(cell, 0));
    note(&PyList_GET_ITEM(cell, count));
    note(known);
    note((const char *)known + LINE);
    if (Py_IS_TYPE(known, python.known)) {
        note_routines(field(known, python.known_before));
        note_routines(field(known, python.known_after));
    }
}

/* What is known of the next execution of an operator; it is counted, unless there is to ask.
 *
 * This is Interceptor.__torch_function__() of amanda_torch.eager.interceptors as far as that needs
 * no call. `*cell` and `*known` are strong references: to the cell in which an execution was counted (NULL
 * for what is no operator, and where there is to ask), and to the KnownOp of an operator that is measured or
 * that acts.
 */
static inline Answer
look_up(const Thread *here, PyObject *mode, PyObject *operator, const Invocation *call, PyObject **cell,
        PyObject **known)
{
    PyObject *cells = field(mode, python.mode_cells);
    if (field(mode, python.mode_stale) != Py_False || cells == NULL || !PyDict_CheckExact(cells)) {
        return ASK;
    }
    begin_step(here, field(mode, python.mode_iteration));
    PyObject *found = cell_of(cells, operator, call);
    if (found == python.no_operator) {
        return found == NULL ? ASK : EMPTY;
    }
    if (found != NULL && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 1) {
        /* Outside of modules. Its tuple stays where it is: no code of a program runs in between. */
        found = is_surely_forward(call) ? PyTuple_GET_ITEM(found, 0) : NULL;
    }
    if (found == NULL || !PyList_CheckExact(found) || PyList_GET_SIZE(found) == 0) {
        return ASK;
    }
    PyObject *before = PyList_GET_ITEM(found, 0);
    Py_ssize_t count = number_of(before) + 1;
    if (count < 1 || count >= PyList_GET_SIZE(found)) {
        PyErr_Clear();
        return ASK;
    }
    PyObject *next = PyList_GET_ITEM(found, count);
    if (begin_notes(found, next)) {
        note_operator(cells, found, count);
    }
    Answer answer = is_empty(next)                        ? EMPTY
                    : !Py_IS_TYPE(next, python.known)     ? ASK
                    : only_measures(next, call)           ? MEASURED
                    : may_act(call)                       ? ACTING
                                                          : ASK;
    PyObject *number = answer == ASK ? NULL : new_number(count);
    if (number == NULL) {
        PyErr_Clear();
        return ASK;
    }
    *cell = Py_NewRef(found);
    *known = answer == EMPTY ? NULL : Py_NewRef(next);
    PyList_SET_ITEM(found, 0, number);
    Py_DECREF(before);
    return answer;
}

/* Take back an execution: the arguments did not fit, and PyTorch would have reported nothing. */
static RARE void
take_back(PyObject *cell)
{
    if (cell == NULL || PyList_GET_SIZE(cell) == 0) {
        return;
    }
    Py_ssize_t count = PyLong_AsSsize_t(PyList_GET_ITEM(cell, 0));
    if (count > 0) {
        PyObject *number = PyLong_FromSsize_t(count - 1);
        if (number != NULL) {
            PyList_SetItem(cell, 0, number);
        }
    }
    PyErr_Clear();
}

/* Whether a call was none of an operator: its arguments fit no form of it. */
static int
is_refused(const Invocation *call, PyObject *result)
{
    if (call->site->kind > FUNCTION || call->site->reports_first) {
        return 0;
    }
    return result == Py_NotImplemented
           || (result == NULL && PyErr_ExceptionMatches(PyExc_TypeError));
}

/* The positional arguments of a call as PyTorch reports them. */
static PyObject *
reported_args(const Invocation *call)
{
    Site *site = call->site;
    if (site->kind == FUNCTION) {
        return Py_NewRef(call->args);
    }
    if (site->kind == CALLABLE) {
        Py_ssize_t count = PyVectorcall_NARGS(call->nargsf);
        PyObject *args = PyTuple_New(count - 1);
        for (Py_ssize_t i = 1; args != NULL && i < count; i++) {
            PyTuple_SET_ITEM(args, i - 1, Py_NewRef(call->stack[i]));
        }
        return args;
    }
    if (site->kind == SUBSCRIPT || (site->kind == PLAIN && site->flags == METH_O)) {
        return PyTuple_Pack(2, call->self, call->args);
    }
    if (site->kind == PLAIN && site->flags == METH_NOARGS) {
        return PyTuple_Pack(1, call->self);
    }
    Py_ssize_t count = PyTuple_GET_SIZE(call->args);
    PyObject *args = PyTuple_New(count + 1);
    if (args != NULL) {
        PyTuple_SET_ITEM(args, 0, Py_NewRef(call->self));
        for (Py_ssize_t i = 0; i < count; i++) {
            PyTuple_SET_ITEM(args, i + 1, Py_NewRef(PyTuple_GET_ITEM(call->args, i)));
        }
    }
    return args;
}

/* A dict of the keyword arguments of a vectorcall. */
static PyObject *
keywords_of(PyObject *const *values, PyObject *names)
{
    PyObject *kwargs = PyDict_New();
    Py_ssize_t count = names == NULL ? 0 : PyTuple_GET_SIZE(names);
    for (Py_ssize_t i = 0; kwargs != NULL && i < count; i++) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(names, i), values[i]) < 0) {
            Py_CLEAR(kwargs);
        }
    }
    return kwargs;
}

/* Its keyword arguments, likewise. */
static PyObject *
reported_kwargs(const Invocation *call)
{
    if (call->site->kind == CALLABLE) {
        return keywords_of(call->stack + PyVectorcall_NARGS(call->nargsf), call->names);
    }
    if (call->kwargs != NULL && call->site->kind != SUBSCRIPT) {
        return Py_NewRef(call->kwargs);
    }
    return PyDict_New();
}

/* Run an operator as Amanda knows it: ``known.run(known, operator, args, kwargs)``. */
static APART PyObject *
act(const Invocation *call, PyObject *operator, PyObject *known)
{
    PyObject *run = field(known, python.known_run), *result;
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call);
    if (args == NULL || kwargs == NULL || run == NULL) {
        result = NULL;
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_AttributeError, "an operator has lost its way to run");
        }
    }
    else {
        PyObject *arguments[] = {NULL, known, operator, args, kwargs};
        result = PyObject_Vectorcall(run, arguments + 1, 4 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return result;
}

/* Claim the backward operators of an operator: ``known.claimed(known, operator, ...)``. */
static int
claim(const Invocation *call, PyObject *mode, PyObject *operator, PyObject *known,
      PyObject *result, Py_ssize_t start)
{
    int done = claim_known(mode, known, result, start);
    if (done != 0) {
        return done < 0 ? -1 : 0;
    }
    PyObject *claimed = field(known, python.known_claimed);
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call);
    done = args == NULL || kwargs == NULL
               ? -1
               : claim_pending(mode, known, operator, args, kwargs, result, start);
    if (done == 0 && claimed == NULL) {
        PyErr_SetString(PyExc_AttributeError, "an operator has lost what claims its gradients");
    }
    if (done == 0) {
        PyObject *number = PyLong_FromSsize_t(start), *none = NULL;
        if (claimed != NULL && number != NULL) {
            none = PyObject_CallFunctionObjArgs(claimed, known, operator, args, kwargs, result,
                                                number, NULL);
        }
        done = none == NULL ? -1 : 1;
        Py_XDECREF(number);
        Py_XDECREF(none);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return done < 0 ? -1 : 0;
}

/* Have Python run the routines after an operator: ``known.checked(known, operator, ...)``. */
static int
run_checked(const Invocation *call, PyObject *operator, PyObject *known, PyObject *result)
{
    PyObject *checked = field(known, python.known_checked), *none = NULL;
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call);
    if (checked != NULL && args != NULL && kwargs != NULL) {
        none = PyObject_CallFunctionObjArgs(checked, known, operator, args, kwargs, result, NULL);
    }
    else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_AttributeError, "an operator has lost what runs its checks");
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Whether all arguments of a call that are tensors are finite. */
static int
look_at_arguments(const Invocation *call)
{
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call);
    int is_finite = -1;
    if (args != NULL && kwargs != NULL) {
        PyObject *named = PyDict_Values(kwargs);
        PyObject *values[] = {args, named};
        is_finite = named == NULL ? -1 : look_at(values, 2, 2);
        Py_XDECREF(named);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    return is_finite;
}

/* Whether an operator with checks or sums may run here: 0 where Python is to run all of it. */
static int
pass_arguments(const Invocation *call, PyObject *before, int looks)
{
    int wanted = wants_inputs(before), passed = wanted > 1 ? 0 : is_plain_here();
    if (passed > 0 && (looks & SUMS)) {
        int64_t task;
        passed = current_task(&task) < 0 ? -1 : task == -1;
    }
    return passed > 0 && wanted ? look_at_arguments(call) : passed;
}

/* The key of an execution for sums, by what PyTorch reports of it; see key_of(). */
static PyObject *
ask_for_key_of(const Invocation *call, PyObject *result)
{
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call), *named = NULL;
    PyObject *keywords = NULL, *key = NULL;
    if (args != NULL && kwargs != NULL && (named = PyDict_Values(kwargs)) != NULL
        && (keywords = PySequence_Tuple(kwargs)) != NULL) {
        PyObject *values[] = {args, named, result};
        key = ask_for_key(values, 3, keywords);
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(named);
    Py_XDECREF(keywords);
    return key;
}

/* Whether the sums among the routines after an operator have met its shapes. */
static int
pass_shapes(const Invocation *call, PyObject *result, PyObject *after, PyObject **kind)
{
    Words words;
    words.count = 0;
    if (tensors.sizes != 0 && add_arguments(&words, call) && add_value(&words, result, 2)) {
        *kind = bytes_of(&words);
    }
    else {
        *kind = ask_for_key_of(call, result);
    }
    return *kind != NULL ? pass_kind(after, *kind) : PyErr_Occurred() ? -1 : 0;
}

/* Whether all that an operator's plan runs is inlined. */
static int
is_inlined(const Invocation *call, PyObject *known)
{
    PyObject *before = field(known, python.known_before), *after = field(known, python.known_after);
    return inlined.counter != NULL && call->site->kind != ASSIGNMENT && before != NULL
           && after != NULL && PyTuple_CheckExact(before) && PyTuple_CheckExact(after);
}

/* Run the routines after an operator; its result, or NULL with an error (a reference is taken over). */
static PyObject *
end_inlined(const Invocation *call, PyObject *operator, PyObject *known, PyObject *after, int looks,
            const Timing *timing, PyObject *result)
{
    PyObject *kind = NULL;
    int passed = !(looks & CHECKS) ? 1 : look_at(&result, 1, 1), is_timed = timing->timer != NULL;
    if (passed > 0 && (looks & SUMS)) {
        passed = pass_shapes(call, result, after, &kind);
    }
    if (passed == 0) {
        /* Python runs all of them, the timer's, too. */
        int failed = (is_timed && leave_start(timing, PyThread_get_thread_ident()) < 0)
                     || run_checked(call, operator, known, result) < 0;
        passed = failed ? -1 : 1;
    }
    else if (passed > 0) {
        int failed = (is_timed && add_timing(timing) < 0)
                     || run_some(after, kind, is_timed, PyTuple_GET_SIZE(after)) < 0;
        passed = failed ? -1 : 1;
    }
    Py_XDECREF(kind);
    if (passed < 0) {
        Py_CLEAR(result);
    }
    return result;
}

/* An operator that is measured at most has raised, or was none. Errors are cleared. */
static RARE void
end_unmeasured(int is_none, PyObject *cell, const Timing *timing)
{
    if (is_none) {
        take_back(cell);
    }
    else if (timing->timer != NULL && leave_start(timing, PyThread_get_thread_ident()) < 0) {
        PyErr_Clear();
    }
}

/* Run an operator that is counted or timed at most, and whose backward operators may be claimed. */
static PyObject *
run_measured(const Invocation *call, PyObject *mode, PyObject *operator, PyObject *known, PyObject *cell)
{
    int is_claimed = field(known, python.known_claims) == Py_True ? is_recording() : 0;
    Py_ssize_t start = is_claimed > 0 ? next_sequence() : 0;
    if (is_claimed < 0 || start < 0) {
        return NULL;
    }
    /* What Python runs meanwhile may put another one there. */
    PyObject *after = field(known, python.known_after);
    PyObject *routine = PyTuple_GET_SIZE(after) == 0 ? NULL : Py_NewRef(PyTuple_GET_ITEM(after, 0));
    Timing timing = {routine != NULL && PyMethod_Check(routine) ? PyMethod_GET_SELF(routine) : NULL, 0, 0};
    if (timing.timer != NULL && (timing.start = read_nanoseconds()) < 0) {
        Py_DECREF(routine);
        return NULL;
    }
    PyObject *result = run_original(call);
    if (result == NULL || result == Py_NotImplemented) {
        int is_none = is_refused(call, result);
        KEEPING_ERROR(end_unmeasured(is_none, cell, &timing));
    }
    /* What the gate does then is no part of the time. */
    else if ((timing.timer != NULL && (timing.end = read_nanoseconds()) < 0)
             || (is_claimed && claim(call, mode, operator, known, result, start) < 0)
             || (timing.timer != NULL ? add_timing(&timing)
                 : routine != NULL    ? count_in(routine, at.counter_count)
                                      : 0) < 0) {
        Py_CLEAR(result);
    }
    Py_XDECREF(routine);
    return result;
}

/* Run an operator between inlined routines. */
static APART PyObject *
run_inlined(const Invocation *call, PyObject *mode, PyObject *operator, PyObject *known)
{
    Py_ssize_t start = 0;
    int looks = what_looks(field(known, python.known_after));
    if (looks) {
        int passed = pass_arguments(call, field(known, python.known_before), looks);
        if (passed <= 0) {
            return passed < 0 ? NULL : act(call, operator, known);
        }
    }
    int is_claimed = field(known, python.known_claims) == Py_True ? is_recording() : 0;
    if (is_claimed < 0) {
        return NULL;
    }
    /* What Python runs meanwhile may put others there. */
    PyObject *before = Py_NewRef(field(known, python.known_before));
    PyObject *after = Py_NewRef(field(known, python.known_after));
    Timing timing = {timer_around(before, after), 0, 0};
    int is_timed = timing.timer != NULL;
    PyObject *result = NULL;
    if (run_some(before, NULL, 0, PyTuple_GET_SIZE(before) - is_timed) == 0
        && (!is_claimed || (start = next_sequence()) >= 0)
        && (!is_timed || (timing.start = read_nanoseconds()) >= 0)) {
        result = run_original(call);
        if (result == NULL || result == Py_NotImplemented) {
            KEEPING_ERROR({
                if (is_timed && leave_start(&timing, PyThread_get_thread_ident()) < 0) {
                    PyErr_Clear();
                }
            });
        }
        /* What the gate does then is no part of the time. */
        else if ((is_timed && (timing.end = read_nanoseconds()) < 0)
                 || (is_claimed && claim(call, mode, operator, known, result, start) < 0)) {
            Py_CLEAR(result);
        }
        else {
            result = end_inlined(call, operator, known, after, looks, &timing, result);
        }
    }
    Py_DECREF(before);
    Py_DECREF(after);
    return result;
}
