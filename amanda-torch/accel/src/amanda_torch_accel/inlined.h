/* Part of gate.c: inlined routines. */

/* What amanda.inline and the driver's hooks are made of; NULL before configure_inlined(). */
static struct {
    PyObject *counter, *timer, *log;   /* classes of amanda.inline */
    PyObject *start;                   /* Timer.start */
    PyObject *clock, *native;          /* time.perf_counter_ns, threading.get_native_id */
    PyObject *look;                    /* look(log, now): has a log looked at, as a routine */
    PyObject *memory, *change, *ended; /* classes of amanda.inline, and MemoryChange.after */
    PyObject *as_routine;              /* as_routine(function): calls it as a routine */
    PyObject *check, *before;          /* a class of amanda.inline, and its method */
    PyObject *sums, *add_after;        /* likewise: sums, and the second of their routines */
    PyObject *tensors;                 /* the classes of tensors that C looks at, torch.Tensor first */
    PyObject *sum, *item, *dtype;      /* of tensors */
    PyObject *summed;                  /* a set: the dtypes that have a sum */
    PyObject *set_recording;           /* torch.set_grad_enabled(), as a function */
    PyObject *plain;                   /* functions, or a dict and a key: what they give says no
                                          where tensors are plain */
    PyObject *graph, *gradients, *hooks, *routines, *handle; /* classes of the driver and of core */
    PyObject *kinds;                   /* of classes of nodes, see KINDS of the driver */
    PyObject *function;                /* the class of nodes of functions of the program's own */
    PyObject *node, *task;             /* the current node, and the number of the current pass */
    PyObject *tensor;                  /* torch.Tensor */
    PyObject *state;                   /* the state of all threads */
    PyObject *sequence;                /* the number of the next node of autograd */
    PyObject *checks;                  /* likewise: false where operators run plainly */
    PyObject *layout, *action;         /* classes of the driver and of core */
    PyObject *version;                 /* the property of tensors that counts changes in place */
    PyObject *tensors_of;              /* the tensors of a result, in a list */
    PyObject *acquire, *release;       /* of the lock under which tools run */
    PyObject *unpaused;                /* drivers that are told where a tool's code runs */
    PyObject *numbers;                 /* a sample of what logs have, see configure_numbers() */
    PyObject *accumulation;            /* the class of what acts at a leaf's accumulation */
    PyObject *reference, *nothing;     /* the class of references to parameters, and their callback */
    PyObject *resume;                  /* Claimer.resume() of the driver */
    PyObject *raised, *changed;        /* tell of what a routine has raised, or changed in place */
} inlined;

static struct {
    Py_ssize_t counter_count;
    Py_ssize_t timer_started, timer_executions, timer_nanoseconds, timer_log, timer_number;
    Py_ssize_t log_numbers, log_due;
    Py_ssize_t memory_used, memory_peak, change_use, change_held, change_bytes;
    Py_ssize_t check_held, check_overwrites, check_trail, check_name;
    Py_ssize_t sum_held, sum_weights, sum_amount, sum_executions, sum_total, sum_last, sum_of;
    Py_ssize_t gradients_graph, gradients_form, gradients_handle, gradients_leaves,
        gradients_hooks, gradients_asked;
    Py_ssize_t graph_form, graph_natives, graph_inner, graph_layout, graph_asked, graph_pending;
    Py_ssize_t hooks_before, hooks_after, hooks_dispatcher, hooks_key, hooks_handle, handle_scopes;
    Py_ssize_t routines_before, routines_after;
    Py_ssize_t layout_func, layout_keywords, layout_types, layout_lists, layout_places,
        layout_in_place;
    Py_ssize_t action_func, action_select, action_kwargs;
} at;

static struct {
    PyObject *cache, *enabled, *held, *settled, *quiet, *dict, *grad_fn, *next_functions, *sequence,
        *register_prehook, *register_hook, *before, *after, *base, *metadata, *variable, *mark,
        *op_id, *is_idle, *append, *scopes, *statistics, *seconds,
        *expect, *shape, *registrar, *dict_ref, *dispatcher, *analysed, *known, *past, *requires_grad;
} names;

static int
make_names(void)
{
    struct {
        PyObject **name;
        const char *text;
    } all[] = {
        {&names.cache, "cache"},
        {&names.enabled, "enabled"},
        {&names.held, "held"},
        {&names.settled, "settled"},
        {&names.quiet, "_quiet"},
        {&names.dict, "__dict__"},
        {&names.grad_fn, "grad_fn"},
        {&names.next_functions, "next_functions"},
        {&names.sequence, "_sequence_nr"},
        {&names.register_prehook, "register_prehook"},
        {&names.register_hook, "register_hook"},
        {&names.before, "before"},
        {&names.after, "after"},
        {&names.base, "_base"},
        {&names.metadata, "metadata"},
        {&names.variable, "variable"},
        {&names.mark, "amanda"},
        {&names.op_id, "op_id"},
        {&names.is_idle, "is_idle"},
        {&names.append, "append"},
        {&names.scopes, "scopes"},
        {&names.statistics, "statistics"},
        {&names.seconds, "tool_seconds"},
        {&names.expect, "expect"},
        {&names.shape, "shape"},
        {&names.registrar, "_register_hook"},
        {&names.dict_ref, "hooks_dict_ref"},
        {&names.dispatcher, "dispatcher"},
        {&names.analysed, "analysed"},
        {&names.known, "known"},
        {&names.past, "past"},
        {&names.requires_grad, "requires_grad"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].name = PyUnicode_InternFromString(all[i].text);
        if (*all[i].name == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Add to a number that an object has in a slot. */
static int
add_to(PyObject *object, Py_ssize_t offset, PyObject *number)
{
    PyObject *before = field(object, offset);
    if (before == NULL) {
        PyErr_Format(PyExc_AttributeError, "%s has lost a number", Py_TYPE(object)->tp_name);
        return -1;
    }
    note(before);
    if (PyLong_CheckExact(number)) {
        Py_ssize_t amount = number_of(number);
        if (amount > 0 && add_in_place(before, (uint64_t)amount)) {
            return 0;
        }
        PyErr_Clear();
    }
    PyObject *sum = PyNumber_Add(before, number);
    if (sum == NULL) {
        return -1;
    }
    set_field(object, offset, sum);
    note(sum);
    Py_DECREF(sum);
    return 0;
}

/* Add one to it. */
static int
count_in(PyObject *object, Py_ssize_t offset)
{
    PyObject *before = field(object, offset);
    if (before != NULL && PyLong_CheckExact(before)) {
        Py_ssize_t number = number_of(before);
        if (number >= 0 && number < SMALL_NUMBERS - 1) {
            PyObject **place = (PyObject **)((char *)object + offset);
            *place = Py_NewRef(small_numbers[number + 1]);
            Py_DECREF(before);
            return 0;
        }
        note(before);
        if (number > 0 && add_in_place(before, 1)) {
            return 0;
        }
        PyErr_Clear();
    }
    return add_to(object, offset, one);
}

/* The native id of the current thread, kept because asking for it takes a system call; 0 with an
   error. */
static unsigned long
native_thread(void)
{
    Thread *here = &thread;
    if (here->native == 0) {
        PyObject *found = PyObject_CallNoArgs(inlined.native);
        here->native = found == NULL ? 0 : PyLong_AsUnsignedLong(found);
        Py_XDECREF(found);
        if (PyErr_Occurred()) {
            here->native = 0;
        }
    }
    return here->native;
}

/* Add an execution to the numbers of a log: an array, or a list. */
static int
append_execution(PyObject *log, PyObject *number, long long start, long long end)
{
    PyObject *object = field(log, at.log_numbers);
    Py_ssize_t timer = number_of(number);
    unsigned long id = native_thread();
    if (id == 0 || (timer == -1 && PyErr_Occurred())) {
        return -1;
    }
    if (object == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a log has lost its numbers");
        return -1;
    }
    return extend_numbers(object, timer, start, end, (int64_t)id);
}

/* time.perf_counter_ns(), without the call where it is known what that reads; -1 with an error. */
static long long
read_nanoseconds(void)
{
#ifdef __linux__
    struct timespec now;
    if (clock_gettime(CLOCK_MONOTONIC, &now) == 0) {
        return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
    }
#endif
    PyObject *found = PyObject_CallNoArgs(inlined.clock);
    long long number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

static PyObject *
read_clock(void)
{
    long long now = read_nanoseconds();
    return now < 0 ? NULL : PyLong_FromLongLong(now);
}

/* Timer.start(), which is called in Python where another start of this thread has not ended. */
static int
start_timer(PyObject *timer)
{
    PyObject *started = field(timer, at.timer_started);
    if (started == NULL || !PyDict_CheckExact(started)) {
        PyErr_SetString(PyExc_AttributeError, "a timer has lost its starts");
        return -1;
    }
    PyObject *key = PyLong_FromUnsignedLong(PyThread_get_thread_ident()), *now = NULL;
    int overlaps = key == NULL || PyDict_GET_SIZE(started) == 0 ? 0
                                                                : PyDict_Contains(started, key);
    int failed = key == NULL || overlaps < 0;
    if (overlaps > 0) {
        PyObject *none = PyObject_CallOneArg(inlined.start, timer);
        failed = none == NULL;
        Py_XDECREF(none);
    }
    else if (!failed) {
        now = read_clock();
        failed = now == NULL || PyDict_SetItem(started, key, now) < 0;
    }
    Py_XDECREF(key);
    Py_XDECREF(now);
    return failed ? -1 : 0;
}

/* The part of Timer.add() that concerns its log. */
static int
log_execution(PyObject *timer, long long start, long long end)
{
    PyObject *log = field(timer, at.timer_log), *number = field(timer, at.timer_number);
    if (log == NULL || log == Py_None) {
        return 0;
    }
    if (!PyObject_TypeCheck(log, (PyTypeObject *)inlined.log) || number == NULL
        || !PyLong_Check(number)) {
        PyErr_SetString(PyExc_TypeError, "a timer's log is no amanda.inline.Log, or it has no number");
        return -1;
    }
    if (append_execution(log, number, start, end) < 0) {
        return -1;
    }
    PyObject *due = field(log, at.log_due);
    if (due == NULL || due == Py_None) {
        return 0;
    }
    if (PyLong_CheckExact(due)) {
        int overflow;
        long long moment = PyLong_AsLongLongAndOverflow(due, &overflow);
        if (overflow > 0 || (overflow == 0 && moment > end)) {
            return 0;
        }
    }
    PyObject *now = PyLong_FromLongLong(end), *none = NULL;
    int is_due = now == NULL ? -1 : PyObject_RichCompareBool(now, due, Py_GE);
    if (is_due > 0) {
        none = PyObject_CallFunctionObjArgs(inlined.look, log, now, NULL);
        is_due = none == NULL ? -1 : 0;
    }
    Py_XDECREF(now);
    Py_XDECREF(none);
    return is_due;
}

/* Add a time to one that an object has in a slot. */
static int
add_time(PyObject *object, Py_ssize_t offset, long long nanoseconds)
{
    PyObject *before = field(object, offset);
    note(before);
    if (before != NULL && nanoseconds >= 0 && add_in_place(before, (uint64_t)nanoseconds)) {
        return 0;
    }
    PyObject *time = PyLong_FromLongLong(nanoseconds);
    int failed = time == NULL || add_to(object, offset, time) < 0;
    Py_XDECREF(time);
    return failed ? -1 : 0;
}

/* Timer.add() */
static int
add_execution_of(PyObject *timer, long long start, long long end)
{
    return count_in(timer, at.timer_executions) < 0
                   || add_time(timer, at.timer_nanoseconds, end - start) < 0
                   || log_execution(timer, start, end) < 0
               ? -1
               : 0;
}

/* Timer.stop(), which is called in Python where the two points are not in one thread. */
static int
stop_timer(PyObject *timer, PyObject *routine)
{
    long long end = read_nanoseconds();
    PyObject *started = field(timer, at.timer_started), *start = NULL;
    PyObject *key = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    int failed = end < 0 || key == NULL;
    if (!failed && started != NULL && PyDict_CheckExact(started)) {
        start = Py_XNewRef(PyDict_GetItemWithError(started, key));
    }
    if (!failed && start == NULL) {
        PyObject *none = PyErr_Occurred() ? NULL : PyObject_CallNoArgs(routine);
        failed = none == NULL;
        Py_XDECREF(none);
    }
    else if (!failed) {
        long long began = PyLong_AsLongLong(start);
        failed = PyDict_DelItem(started, key) < 0 || PyErr_Occurred()
                 || add_execution_of(timer, began, end) < 0;
    }
    Py_XDECREF(key);
    Py_XDECREF(start);
    return failed ? -1 : 0;
}

/* Whether the memory that a change of memory looks at is that of the process, which C can read. */
static int
is_of_process(PyObject *change)
{
    PyObject *use = field(change, at.change_use);
    return READS_RESIDENT && use != NULL && Py_IS_TYPE(use, (PyTypeObject *)inlined.memory)
           && field(use, at.memory_used) == Py_None;
}

/* MemoryUse.note() */
static int
note_bytes(PyObject *use, long long amount)
{
    PyObject *peak = field(use, at.memory_peak);
    int overflow = 0;
    if (peak == NULL) {
        PyErr_SetString(PyExc_AttributeError, "a use of memory has lost its peak");
        return -1;
    }
    if (PyLong_CheckExact(peak)) {
        long long most = PyLong_AsLongLongAndOverflow(peak, &overflow);
        if (overflow == 0 && most >= amount) {
            return 0;
        }
    }
    PyObject *number = PyLong_FromLongLong(amount);
    int is_more = number == NULL ? -1 : PyObject_RichCompareBool(number, peak, Py_GT);
    if (is_more > 0) {
        set_field(use, at.memory_peak, number);
    }
    Py_XDECREF(number);
    return is_more < 0 ? -1 : 0;
}

/* MemoryChange.add() */
static int
add_change(PyObject *change, long long before, long long after)
{
    PyObject *use = Py_XNewRef(field(change, at.change_use)), *difference = NULL;
    int failed = use != NULL && (note_bytes(use, before) < 0 || note_bytes(use, after) < 0);
    if (!failed && after != before) {
        difference = PyLong_FromLongLong(after - before);
        failed = difference == NULL || add_to(change, at.change_bytes, difference) < 0;
    }
    Py_XDECREF(use);
    Py_XDECREF(difference);
    return failed ? -1 : 0;
}

static int
call_as_routine(PyObject *routine)
{
    PyObject *none = PyObject_CallOneArg(inlined.as_routine, routine);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* MemoryChange.before(), with the bytes in use, and the key of this thread. */
static int
leave_bytes(PyObject *change, PyObject *held, PyObject *key, long long bytes)
{
    PyObject *number = PyLong_FromLongLong(bytes), *use = Py_NewRef(field(change, at.change_use));
    int failed = number == NULL || note_bytes(use, bytes) < 0 || PyDict_SetItem(held, key, number) < 0;
    Py_XDECREF(number);
    Py_DECREF(use);
    return failed ? -1 : 0;
}

/* Run one of the two routines of a change of memory: in Python where the memory is a device's, or where the
   two points are not in one thread. */
static int
run_change(PyObject *routine)
{
    PyObject *change = PyMethod_GET_SELF(routine), *held = field(change, at.change_held), *left = NULL;
    int is_after = PyMethod_GET_FUNCTION(routine) == inlined.ended;
    if (!is_of_process(change) || held == NULL || !PyDict_CheckExact(held)) {
        return call_as_routine(routine);
    }
    PyObject *key = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    if (key != NULL && is_after) {
        left = Py_XNewRef(PyDict_GetItemWithError(held, key));
    }
    int failed = key == NULL || PyErr_Occurred();
    if (!failed && !is_after) {
        failed = leave_bytes(change, held, key, read_resident()) < 0;
    }
    else if (!failed && left == NULL) {
        failed = call_as_routine(routine) < 0;
    }
    else if (!failed) {
        long long before = PyLong_AsLongLong(left);
        failed = PyErr_Occurred() || PyDict_DelItem(held, key) < 0
                 || add_change(change, before, read_resident()) < 0;
    }
    Py_XDECREF(key);
    Py_XDECREF(left);
    return failed ? -1 : 0;
}

static int
is_of_change(PyObject *routine)
{
    return PyMethod_Check(routine)
           && Py_IS_TYPE(PyMethod_GET_SELF(routine), (PyTypeObject *)inlined.change);
}

/* The part of Check.after() that is left where all outputs are finite. */
static int
leave_trail(PyObject *check)
{
    PyObject *trail = field(check, at.check_trail), *name = field(check, at.check_name);
    if (trail == NULL || trail == Py_None || name == NULL) {
        return 0;
    }
    Py_INCREF(trail);
    PyObject *none = PyObject_CallMethodOneArg(trail, names.append, name);
    Py_DECREF(trail);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Whether a routine is one of the two of a check. */
static int
is_of_check(PyObject *routine)
{
    return PyMethod_Check(routine)
           && Py_IS_TYPE(PyMethod_GET_SELF(routine), (PyTypeObject *)inlined.check);
}

static int
is_of_sum(PyObject *routine)
{
    return PyMethod_Check(routine)
           && Py_IS_TYPE(PyMethod_GET_SELF(routine), (PyTypeObject *)inlined.sums);
}

/* The number and the shapes of executions of a kind (borrowed); NULL, with or without an error, if a
   sum does not have them. */
static PyObject *
weight_of(PyObject *sum, PyObject *kind)
{
    PyObject *weights = field(sum, at.sum_weights), *of = field(sum, at.sum_of), *found;
    if (weights == NULL || !PyDict_CheckExact(weights) || of == NULL) {
        return NULL;
    }
    if (Py_IS_TYPE(of, (PyTypeObject *)inlined.sums)) {
        PyObject *last = field(of, at.sum_last), *pair;
        if (last == NULL || (pair = PyTuple_Pack(2, kind, last)) == NULL) {
            return NULL;
        }
        found = PyDict_GetItemWithError(weights, pair);
        Py_DECREF(pair);
    }
    else {
        found = PyDict_GetItemWithError(weights, kind);
    }
    return found != NULL && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 2 ? found
                                                                                      : NULL;
}

/* ShapeSum.after() for an execution of a kind that has been met. */
static int
add_execution(PyObject *sum, PyObject *kind)
{
    PyObject *found = Py_XNewRef(weight_of(sum, kind)), *total = field(sum, at.sum_total);
    if (found == NULL || total == NULL) {
        Py_XDECREF(found);
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_AttributeError, "a sum has lost its numbers");
        }
        return -1;
    }
    PyObject *weight = PyTuple_GET_ITEM(found, 0);
    set_field(sum, at.sum_last, PyTuple_GET_ITEM(found, 1));
    int failed = count_in(sum, at.sum_executions) < 0
                 || add_to(sum, at.sum_amount, weight) < 0;
    if (!failed && Py_IS_TYPE(total, (PyTypeObject *)inlined.counter)) {
        failed = add_to(total, at.counter_count, weight) < 0;
    }
    Py_DECREF(found);
    return failed ? -1 : 0;
}

/* The timer of which a routine is one of the two (borrowed), and which; NULL if it is none. */
static PyObject *
timer_of(PyObject *routine, int *is_start)
{
    if (!PyMethod_Check(routine)
        || !Py_IS_TYPE(PyMethod_GET_SELF(routine), (PyTypeObject *)inlined.timer)) {
        return NULL;
    }
    *is_start = PyMethod_GET_FUNCTION(routine) == inlined.start;
    return PyMethod_GET_SELF(routine);
}

/* A timer whose two routines are the last one before and the first one after an operator, which
   starts and stops without its dict: nothing comes between. */
typedef struct {
    PyObject *timer; /* borrowed from the routines; NULL for none */
    long long start, end;
} Timing;

static PyObject *
timer_around(PyObject *before, PyObject *after)
{
    int is_start = 0, is_other = 1;
    if (PyTuple_GET_SIZE(before) == 0 || PyTuple_GET_SIZE(after) == 0) {
        return NULL;
    }
    PyObject *timer =
        timer_of(PyTuple_GET_ITEM(before, PyTuple_GET_SIZE(before) - 1), &is_start);
    int is_around = timer != NULL && is_start
                    && timer_of(PyTuple_GET_ITEM(after, 0), &is_other) == timer && !is_other;
    return is_around ? timer : NULL;
}

/* Leave a start in a thread as Timer.start() does, where the operator has raised, or Python goes on. */
static int
leave_start(const Timing *timing, unsigned long thread)
{
    PyObject *started = field(timing->timer, at.timer_started), *none = NULL;
    PyObject *key = PyLong_FromUnsignedLong(thread);
    PyObject *start = PyLong_FromLongLong(timing->start);
    int failed = key == NULL || start == NULL || started == NULL || !PyDict_CheckExact(started);
    int overlaps = failed || PyDict_GET_SIZE(started) == 0 ? 0 : PyDict_Contains(started, key);
    if (overlaps > 0) {
        none = PyObject_CallOneArg(inlined.start, timing->timer);
    }
    failed = failed || overlaps < 0 || (overlaps > 0 && none == NULL)
             || PyDict_SetItem(started, key, start) < 0;
    Py_XDECREF(none);
    Py_XDECREF(key);
    Py_XDECREF(start);
    return failed ? -1 : 0;
}

static int
add_timing(const Timing *timing)
{
    return add_execution_of(timing->timer, timing->start, timing->end);
}

/* Run the routines of one point: counters, the two methods of timers and of changes of memory, those of
   checks whose tensors have been looked at, and those of sums. `kind` is that of the execution, for sums.
   Those from `first` up to `last` are run. */
static int
run_some(PyObject *routines, PyObject *kind, Py_ssize_t first, Py_ssize_t last)
{
    Py_INCREF(routines);
    int failed = 0;
    for (Py_ssize_t i = first; !failed && i < last; i++) {
        PyObject *routine = PyTuple_GET_ITEM(routines, i);
        if (Py_IS_TYPE(routine, (PyTypeObject *)inlined.counter)) {
            failed = count_in(routine, at.counter_count) < 0;
        }
        else if (PyMethod_Check(routine)
                 && Py_IS_TYPE(PyMethod_GET_SELF(routine), (PyTypeObject *)inlined.timer)) {
            PyObject *timer = PyMethod_GET_SELF(routine);
            failed = PyMethod_GET_FUNCTION(routine) == inlined.start
                         ? start_timer(timer) < 0
                         : stop_timer(timer, routine) < 0;
        }
        else if (is_of_change(routine)) {
            failed = run_change(routine) < 0;
        }
        else if (is_of_check(routine)) {
            failed = PyMethod_GET_FUNCTION(routine) != inlined.before
                     && leave_trail(PyMethod_GET_SELF(routine)) < 0;
        }
        else if (is_of_sum(routine)) {
            failed = PyMethod_GET_FUNCTION(routine) == inlined.add_after
                     && add_execution(PyMethod_GET_SELF(routine), kind) < 0;
        }
        else {
            PyErr_SetString(PyExc_TypeError, "it is no routine of amanda.inline");
            failed = 1;
        }
    }
    Py_DECREF(routines);
    return failed ? -1 : 0;
}

static int
run_routines(PyObject *routines, PyObject *kind)
{
    return run_some(routines, kind, 0, PyTuple_GET_SIZE(routines));
}

/* Note where the first routine of a plan, and what it counts in, lie. */
static inline void
note_routines(PyObject *routines)
{
    if (routines == NULL || !PyTuple_CheckExact(routines) || PyTuple_GET_SIZE(routines) == 0) {
        return;
    }
    PyObject *routine = PyTuple_GET_ITEM(routines, 0);
    note(routines);
    note(&PyTuple_GET_ITEM(routines, 0));
    note(routine);
    if (PyMethod_Check(routine)) {
        note(PyMethod_GET_SELF(routine));
    }
}

/* Note where a list and its first items lie. */
static inline void
note_list(PyObject *list)
{
    if (list != NULL && PyList_CheckExact(list)) {
        note(list);
        note(((PyListObject *)list)->ob_item);
    }
}
