/* Part of gate.c: timers and changes of memory at the nodes of a captured graph. */

/* Where only these are around a node, autograd need not come to Python, nor take the GIL: what it calls
   notes the time and the memory in use, and what follows from it is done once, for all nodes of a pass, or
   as soon as a log is due. The nodes are hooked where a pass comes to an output of the graph, by the way
   that leads from there to each of them, which is the same in all runs of the graph. What is in a node stays
   there when the pass has ended, and does nothing then: in another pass, or in none. */

/* One execution of a node. */
typedef struct {
    Py_ssize_t slot;
    long long start, end;
    long long before, after; /* the bytes in use, where a change of memory is there */
} Execution;

/* The executions of one pass, as long as something refers to it. Only the thread of the pass notes any. */
struct TimedPass {
    int references;    /* changed without the GIL */
    int task;          /* the number of the pass; -2 when it has ended */
    const void *owner; /* the thread that has begun it */
    long long due;     /* when the first log is due */
    PyObject *timers;  /* by slot, a tuple of timers and changes of memory; NULL when the pass has ended */
    PyObject *logs;    /* all of the timers' */
    Py_ssize_t count, room;
    Execution done[1]; /* those that have not been added to the timers */
};

/* What autograd calls before and after a node: two objects with tables of virtual functions, which a
   vector of the node each refers to. They are of no class that PyTorch looks for among hooks, so that a
   program that hooks the node gets an object of its own. */
typedef struct {
    const void *const *before, *const *after;
    TimedPass *pass;
    Py_ssize_t slot;
    int reads;        /* whether there is a change of memory */
    long long start;  /* 0 where it has not begun */
    long long bytes;  /* in use at its start */
    int references;   /* of vectors */
} Stamp;

static const void *stamp_tables[2][TABLE];

static void
release_pass(TimedPass *pass)
{
    if (__atomic_sub_fetch(&pass->references, 1, __ATOMIC_ACQ_REL) == 0) {
        free(pass);
    }
}

static TimedPass *
hold_pass(TimedPass *pass)
{
    __atomic_add_fetch(&pass->references, 1, __ATOMIC_RELAXED);
    return pass;
}

/* When the first log is due: at once where only Python can tell; LLONG_MAX for never. */
static long long
first_due(PyObject *logs)
{
    long long found = LLONG_MAX;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(logs); i++) {
        PyObject *due = field(PyTuple_GET_ITEM(logs, i), at.log_due);
        int overflow = 0;
        if (due == NULL || due == Py_None) {
            continue;
        }
        long long moment = PyLong_CheckExact(due) ? PyLong_AsLongLongAndOverflow(due, &overflow) : 0;
        if (overflow <= 0 && (overflow < 0 || moment < found)) {
            found = overflow < 0 ? 0 : moment;
        }
    }
    return found;
}

/* Add an execution to what measures it. */
static int
add_to_each(PyObject *around, const Execution *one)
{
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(around); i++) {
        PyObject *measure = PyTuple_GET_ITEM(around, i);
        if (Py_IS_TYPE(measure, (PyTypeObject *)inlined.timer)) {
            failed = add_execution_of(measure, one->start, one->end) < 0;
        }
        else {
            failed = add_change(measure, one->before, one->after) < 0;
        }
    }
    return failed ? -1 : 0;
}

/* Add what has been noted to the timers and their logs, in the order in which it has ended. */
static int
flush(TimedPass *pass)
{
    PyObject *timers = Py_XNewRef(pass->timers);
    Py_ssize_t count = timers == NULL ? 0 : pass->count;
    int failed = 0;
    /* Before any is added, which comes here again; nothing is noted meanwhile in this thread. */
    pass->count = 0;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        failed = add_to_each(PyTuple_GET_ITEM(timers, pass->done[i].slot), &pass->done[i]) < 0;
    }
    if (!failed && pass->logs != NULL) {
        pass->due = first_due(pass->logs);
    }
    Py_XDECREF(timers);
    return failed ? -1 : 0;
}

/* Add what this thread has noted before something that ends later. */
static int
flush_before(TimedPass *pass)
{
    return pass == NULL || pass->count == 0 ? 0 : flush(pass);
}

/* Have what a pass notes be added before what else this thread logs. Not where another pass is about it,
   within which this one runs. */
static void
put_before(TimedPass *pass)
{
    TimedPass *last = thread.timed;
    if (last == NULL || last->task == -2) {
        thread.timed = hold_pass(pass);
        if (last != NULL) {
            release_pass(last);
        }
    }
}

static int
is_timed_now(const Stamp *stamp, const Vector *consumed)
{
    return stamp->pass->task == native.task() && !are_undefined(consumed);
}

/* An execution begins. Looking at the memory is no part of its time. */
static void
note_start(Stamp *stamp)
{
    stamp->bytes = stamp->reads ? read_resident() : 0;
    stamp->start = read_nanoseconds();
}

/* Note the end of an execution: 1, or 0 with an error to be thrown. */
static int
note_end(Stamp *stamp, long long end)
{
    TimedPass *pass = stamp->pass;
    long long after = stamp->reads ? read_resident() : 0;
    Execution one = {stamp->slot, stamp->start, end, stamp->bytes, after};
    stamp->start = 0;
    int is_own = pass->owner == (const void *)&thread;
    if (is_own && pass->count < pass->room) {
        pass->done[pass->count++] = one;
        if (end < pass->due) {
            return 1;
        }
    }
    PyGILState_STATE state = PyGILState_Ensure();
    /* A device has a thread of its own. */
    PyObject *around = is_own || pass->timers == NULL
                           ? NULL
                           : Py_NewRef(PyTuple_GET_ITEM(pass->timers, one.slot));
    int failed = is_own ? flush(pass) < 0 : around != NULL && add_to_each(around, &one) < 0;
    if (failed) {
        unthrown = take_error();
    }
    Py_XDECREF(around);
    PyGILState_Release(state);
    return !failed;
}

static PyObject *
raise_now(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(values), Py_ssize_t Py_UNUSED(count))
{
    return unthrown == NULL ? Py_NewRef(Py_None) : raise_unthrown();
}

static PyMethodDef raise_def = {"raise_now", (PyCFunction)(void (*)(void))raise_now, METH_FASTCALL,
                                NULL};

/* A hook of PyTorch's own, which raises what C cannot throw; NULL if it cannot be made. */
static CalledHook *
thrower(void)
{
    static CalledHook called;
    PyGILState_STATE state = PyGILState_Ensure();
    if (called.dict == NULL) {
        PyObject *function = PyCFunction_New(&raise_def, NULL), *dict = PyDict_New();
        if (function != NULL && dict != NULL && PyDict_SetItem(dict, function, function) == 0) {
            called.dict = Py_NewRef(dict);
        }
        Py_XDECREF(function);
        Py_XDECREF(dict);
        PyErr_Clear();
    }
    PyGILState_Release(state);
    called.functions = callers[1].functions + DESTROY;
    return called.dict == NULL ? NULL : &called;
}

static Vector
stamp_before(Stamp *stamp, Vector *consumed)
{
    if (is_timed_now(stamp, consumed)) {
        note_start(stamp);
    }
    return pass_on(consumed);
}

static Stamp *
stamp_of(void *after)
{
    return (Stamp *)((char *)after - offsetof(Stamp, after));
}

static Vector
stamp_after(void *self, Vector *produced, Vector *consumed)
{
    Stamp *stamp = stamp_of(self);
    if (stamp->start > 0 && is_timed_now(stamp, consumed)
        && !note_end(stamp, read_nanoseconds())) {
        CalledHook *called = thrower();
        if (called != NULL) {
            return ((CallAfter)(uintptr_t)callers[1].functions[CALL])(called, produced, consumed);
        }
    }
    return pass_on(produced);
}

static void
give_up_before(Stamp *stamp)
{
    if (--stamp->references == 0) {
        release_pass(stamp->pass);
        free(stamp);
    }
}

static void
give_up_after(void *self)
{
    give_up_before(stamp_of(self));
}

/* The compiler of backward passes asks hooks what they do: nothing that it need know. */
static void
compile_nothing(void)
{
}

/* Make the tables. `bases` are the addresses of the type_info of the classes of hooks. */
static void
make_stamp_tables(const unsigned long long *bases)
{
    for (int i = 0; i < 2; i++) {
        const void *give_up_one = i ? (const void *)(uintptr_t)give_up_after
                                    : (const void *)(uintptr_t)give_up_before;
        stamp_tables[i][TO_TOP] = NULL;
        stamp_tables[i][RTTI] = (const void *)(uintptr_t)bases[i];
        stamp_tables[i][DESTROY] = stamp_tables[i][DELETE] = give_up_one;
        stamp_tables[i][CALL] = i ? (const void *)(uintptr_t)stamp_after
                                  : (const void *)(uintptr_t)stamp_before;
        stamp_tables[i][COMPILE] = (const void *)(uintptr_t)compile_nothing;
    }
}

static Vector *
hooks_of(const char *node, int is_after)
{
    return (Vector *)(node + callers[is_after].place);
}

/* The stamp among the hooks of a node; NULL for none. */
static Stamp *
stamp_in(const char *node)
{
    const Vector *hooks = hooks_of(node, 1);
    for (void **one = hooks->begin; one < hooks->end; one++) {
        if (*(const void *const *const *)*one == stamp_tables[1] + DESTROY) {
            return stamp_of(*one);
        }
    }
    return NULL;
}

/* A step of a way: an edge of a node that was reached before. */
typedef struct {
    int64_t place, edge; /* the node, by when it was reached, and which of its edges */
    int64_t number;      /* of the node there, among those of the run; -1 for an accumulation */
    int64_t slot;        /* -1 where there is no timer */
    int64_t is_output;   /* whether it has a hook for itself, which says when it begins */
} WayStep;

/* Put a hook behind those that a node has. */
static int
put_stamp(const char *node, int is_after, void *hook)
{
    Vector *hooks = hooks_of(node, is_after);
    if (hooks->end == hooks->room) {
        size_t count = hooks->end - hooks->begin;
        void **old = hooks->begin, **more = allocate((count + 1) * sizeof *more);
        if (count > 0) {
            memcpy(more, old, count * sizeof *more);
        }
        if (old != NULL) {
            release(old);
        }
        hooks->begin = more;
        hooks->end = more + count;
        hooks->room = hooks->end + 1;
    }
    *hooks->end++ = hook;
    return 1;
}

/* Whether there is a change of memory at a node. */
static int
reads_memory(const TimedPass *pass, Py_ssize_t slot)
{
    PyObject *around = pass->timers == NULL ? NULL : PyTuple_GET_ITEM(pass->timers, slot);
    for (Py_ssize_t i = 0; around != NULL && i < PyTuple_GET_SIZE(around); i++) {
        if (Py_IS_TYPE(PyTuple_GET_ITEM(around, i), (PyTypeObject *)inlined.change)) {
            return 1;
        }
    }
    return 0;
}

/* Have a node timed in a pass. */
static int
stamp_node(const char *node, TimedPass *pass, Py_ssize_t slot, int is_output)
{
    Stamp *stamp = stamp_in(node);
    if (stamp != NULL) {
        /* That of an accumulation is left of an earlier pass. */
        if (stamp->pass != pass) {
            TimedPass *old = stamp->pass;
            stamp->pass = hold_pass(pass);
            release_pass(old);
            stamp->slot = slot;
            stamp->reads = reads_memory(pass, slot);
            stamp->start = 0;
        }
        return 0;
    }
    stamp = malloc(sizeof *stamp);
    if (stamp == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *stamp = (Stamp){.before = stamp_tables[0] + DESTROY, .after = stamp_tables[1] + DESTROY,
                     .pass = hold_pass(pass), .slot = slot, .reads = reads_memory(pass, slot)};
    stamp->references += is_output ? 0 : put_stamp(node, 0, stamp);
    stamp->references += put_stamp(node, 1, &stamp->after);
    return 0;
}

/* Find the nodes of a way: 1, or 0 where one is not as it is to be. */
static int
find_way(const char **nodes, const WayStep *way, Py_ssize_t length, Py_ssize_t start)
{
    for (Py_ssize_t i = 0; i < length; i++) {
        const WayStep *step = &way[i];
        Py_ssize_t count;
        const Edge *edges = edges_in(nodes[step->place], &count);
        const char *node = step->edge < count ? edges[step->edge].node : NULL;
        Py_ssize_t number = node == NULL ? 0 : sequence_in(node);
        /* Accumulations have the highest number that there is. */
        if (node == NULL || (step->number < 0 ? number >= 0 : number - start != step->number)) {
            return 0;
        }
        nodes[i + 1] = node;
    }
    return 1;
}

/* The executions that timers are told of; an object of Python for TimedPass. */
typedef struct {
    PyObject_HEAD
    TimedPass *pass;
} Timed;

static int
end_pass(TimedPass *pass)
{
    int failed = flush(pass) < 0;
    pass->task = -2;
    Py_CLEAR(pass->timers);
    Py_CLEAR(pass->logs);
    if (thread.timed == pass) {
        thread.timed = NULL;
        release_pass(pass);
    }
    return failed ? -1 : 0;
}

static PyObject *
timed_end(PyObject *self, PyObject *Py_UNUSED(argument))
{
    return end_pass(((Timed *)self)->pass) < 0 ? NULL : Py_NewRef(Py_None);
}

static void
timed_dealloc(Timed *self)
{
    self->pass->count = 0;
    end_pass(self->pass);
    release_pass(self->pass);
    PyObject_Free(self);
}

PyDoc_STRVAR(timed_end_doc, "end()\n\nThe pass has ended, or raised: add what is left.");

static PyMethodDef timed_methods[] = {
    {"end", timed_end, METH_NOARGS, timed_end_doc},
    {NULL, NULL, 0, NULL},
};

/* It is ended by the end of the pass, which needs no garbage collector. */
static PyTypeObject Timed_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.TimedPass",
    .tp_basicsize = sizeof(Timed),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = timed_methods,
    .tp_dealloc = (destructor)timed_dealloc,
};

static Timed *
new_timed_pass(PyObject *timers, PyObject *logs)
{
    int64_t task;
    Py_ssize_t room = PyTuple_GET_SIZE(timers);
    if (current_task(&task) < 0) {
        return NULL;
    }
    TimedPass *pass = malloc(sizeof *pass + sizeof(Execution) * (size_t)room);
    Timed *made = pass == NULL ? NULL : PyObject_New(Timed, &Timed_Type);
    if (made == NULL) {
        free(pass);
        PyErr_NoMemory();
        return NULL;
    }
    *pass = (TimedPass){.references = 1, .task = (int)task, .owner = &thread, .due = first_due(logs),
                        .timers = Py_NewRef(timers), .logs = Py_NewRef(logs), .room = room};
    made->pass = pass;
    put_before(pass);
    return made;
}

/* Whether C can run these by slot: timers, and changes of the memory of the process. */
static int
can_measure(PyObject *timers)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(timers); i++) {
        PyObject *around = PyTuple_GET_ITEM(timers, i);
        for (Py_ssize_t k = 0; PyTuple_CheckExact(around) && k < PyTuple_GET_SIZE(around); k++) {
            PyObject *one = PyTuple_GET_ITEM(around, k);
            if (!Py_IS_TYPE(one, (PyTypeObject *)inlined.timer)
                && !(Py_IS_TYPE(one, (PyTypeObject *)inlined.change) && is_of_process(one))) {
                return 0;
            }
        }
        if (!PyTuple_CheckExact(around)) {
            return 0;
        }
    }
    return 1;
}

/* Whether these are timers and changes of memory by slot, and the logs of the timers. */
static int
are_timers(PyObject *timers, PyObject *logs)
{
    if (!can_measure(timers)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(logs); i++) {
        if (!PyObject_TypeCheck(PyTuple_GET_ITEM(logs, i), (PyTypeObject *)inlined.log)) {
            return 0;
        }
    }
    return 1;
}

PyDoc_STRVAR(can_time_doc, "can_time(timers, logs)\n\nWhether time_pass() takes these.");

static PyObject *
gate_can_time(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *timers, *logs;
    if (!PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &timers, &PyTuple_Type, &logs)) {
        return NULL;
    }
    return PyBool_FromLong(callers[0].place != 0 && inside.edges != 0 && native.task != NULL
                           && inlined.counter != NULL && are_timers(timers, logs));
}

PyDoc_STRVAR(time_pass_doc,
"time_pass(timers, logs, way, start, slot, timed)\n\nHave the nodes behind that of an output timed in the "
"current pass, which has come there.\n\n"
"Args:\n    timers: by slot, a tuple of those around a node, and of changes of memory; can_time() has said\n"
"        that it takes them.\n"
"    logs: all of the timers'.\n"
"    way: five numbers of 64 bits for each node that is reached from the current one: by which of the\n"
"        nodes before it, in the order of the way after the current one, and by which of its edges; its\n"
"        number in the run, -1 for an accumulation; its slot, -1 for none; whether it is an output's.\n"
"    start: number of the first node of the run.\n"
"    slot: of the current node, which begins when this returns; -1 for none.\n"
"    timed: what this has returned in this pass before, or None.\n\n"
"Returns:\n    What is told of the end of the pass; None where the nodes cannot be timed, as they are others, or\n"
"    the memory is a device's by now.");

static PyObject *
gate_time_pass(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *timers, *logs, *way, *timed;
    Py_ssize_t start, slot;
    if (!PyArg_ParseTuple(args, "O!O!O!nnO", &PyTuple_Type, &timers, &PyTuple_Type, &logs, &PyBytes_Type,
                          &way, &start, &slot, &timed)) {
        return NULL;
    }
    Py_ssize_t length = PyBytes_GET_SIZE(way) / (Py_ssize_t)sizeof(WayStep);
    const WayStep *steps = (const WayStep *)PyBytes_AS_STRING(way);
    PyObject *node = PyObject_CallNoArgs(inlined.node);
    const char *first = node == NULL || node == Py_None ? NULL : node_in(node);
    const char **nodes = first == NULL ? NULL : PyMem_New(const char *, length + 1);
    Timed *found = NULL;
    if (nodes != NULL) {
        nodes[0] = first;
        if (find_way(nodes, steps, length, start) && (Py_IS_TYPE(timed, &Timed_Type) || can_measure(timers))) {
            found = Py_IS_TYPE(timed, &Timed_Type) ? (Timed *)Py_NewRef(timed)
                                                   : new_timed_pass(timers, logs);
        }
        for (Py_ssize_t i = 0; found != NULL && i < length; i++) {
            if (steps[i].slot >= 0
                && stamp_node(nodes[i + 1], found->pass, steps[i].slot, steps[i].is_output != 0) < 0) {
                Py_CLEAR(found);
            }
        }
        if (found != NULL && slot >= 0) {
            if (stamp_node(first, found->pass, slot, 1) < 0) {
                Py_CLEAR(found);
            }
            else {
                note_start(stamp_in(first));
            }
        }
        PyMem_Free(nodes);
    }
    Py_XDECREF(node);
    if (found == NULL && PyErr_Occurred()) {
        return NULL;
    }
    return found == NULL ? Py_NewRef(Py_None) : (PyObject *)found;
}
