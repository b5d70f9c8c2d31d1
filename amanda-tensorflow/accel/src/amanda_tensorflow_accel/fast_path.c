/* The fast path: eager operators of TensorFlow that no tool acts on run past Amanda without Python.
 *
 * TensorFlow's generated functions call TFE_Py_FastPathExecute, which the driver `tensorflow-eager`
 * patches with a function in Python (amanda_tensorflow.eager.interception). That function decides on
 * the way of each operator, and its decision is the meaning: what is here answers in its place where
 * the answer is a usual one, and calls it for everything else. So there are two objects, both of the
 * type Function, that know the function in Python, and what is vanilla:
 *
 *   fast_path()          in the place of TFE_Py_FastPathExecute. It looks up the entry that the
 *                        driver has kept of the operator (amanda_tensorflow.eager.plan_cache), runs
 *                        the operator, and counts it. It runs counters and timers around it, counts
 *                        readings of variables, and marks the operator's record on a tape.
 *   gradient_function()  in the place of the function that tapes call for each record. It tells the
 *                        driver whose backward operators run, where nothing else is to be done.
 *
 * The driver's objects are Python's, with __slots__, which are read where they lie: configure() finds
 * out where, and refuses classes that have no such slots. Arrays are written into where a sample shows
 * how they are laid out; in CPython 3.11 numbers are added to in place, and versions of dicts are
 * read. Else only CPython's public interface is used, and of TensorFlow nothing but what configure()
 * is given. What TensorFlow knows of a thread is asked at each operator: two functions in C++ are
 * called for it instead of their bindings, which take longer than all the rest, where
 * configure_native() is given them and finds that they tell the same. So is the one that runs
 * operators, and so are those by which variables are read (readings.h).
 *
 * Whatever is needed after TensorFlow has run an operator is held by strong references: other Python
 * code may have run meanwhile, which has ended the scope. Everything is under the GIL, and there is no
 * other lock. From one call to the next nothing is kept but where something was found, for speed alone.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "counts are added to without a lock: it needs a Python with the GIL"
#endif
#ifdef PYPY_VERSION
#error "it reads slots of CPython's objects"
#endif

#include "cpython.h"

/* ---- Python's objects ------------------------------------------------------------------------ */

/* What the driver is made of; NULL before configure(). */
static struct {
    /* Classes, of whose slots some are read and written. */
    PyTypeObject *tracker, *any_scope, *slow_path, *inlined, *plan, *claim;
    PyTypeObject *mark, *known, *run;      /* of backward operators: Mark, OpGradients, GradientRun */
    PyTypeObject *counter, *timer, *log;   /* of amanda.inline */
    PyTypeObject *variable;                /* tf.Variable's class */
    PyTypeObject *values, *source;         /* VariableValues, Source */
    PyObject *numbers;         /* array.array("q", [1, 2, 3]) */
    PyObject *local;           /* LOCAL: its attribute `tracker` is the current thread's */
    PyObject *read;            /* READ: the entry of an operator that reads a variable */
    PyObject *reading;         /* types of operators whose output may be a variable's value */
    PyObject *plain;           /* types of arguments among which there is no variable, in a tuple */
    PyObject *no_tape_records; /* says whether no tape does */
    PyObject *parts;           /* names of a variable's attributes: whether it is trainable, its
                                  handle, its dtype; in a tuple */
    PyObject *told;            /* functions that are told of a variable that is read; in a tuple */
    PyObject *mark_name;       /* the attribute of marked records */
} driver;

/* Where the slots lie. */
static struct {
    Py_ssize_t tracker_thread, tracker_local, tracker_cells, tracker_stale, tracker_outdated;
    Py_ssize_t tracker_muted, tracker_marking, tracker_run, tracker_watches, tracker_depth;
    Py_ssize_t tracker_passes, tracker_native, tracker_generation, tracker_sums, tracker_gradients;
    Py_ssize_t scope_cells, slow_plan, slow_may_pass;
    Py_ssize_t inlined_plan, inlined_counters, inlined_timers;
    Py_ssize_t plan_claims, plan_is_claim, plan_data, claim_marked, claim_passes;
    Py_ssize_t mark_op_id, mark_generation, mark_shared, known_run;
    Py_ssize_t run_mark, run_is_running, run_cells, run_scopes, run_produced;
    Py_ssize_t counter_count, timer_executions, timer_nanoseconds, timer_log, timer_number;
    Py_ssize_t log_numbers, log_due;
    Py_ssize_t values_known, values_handles, values_most, source_handle;
} at;

static struct {
    PyObject *tracker, *switches[4], *scope_name, *op_callbacks, *is_eager, *dict;
    PyObject *read_variable, *dtype, *identity, *note, *note_owner, *leave;
    PyObject *device_name, *as_datatype_enum;
} names;

/* Whether what a slot holds is true; -1 if it holds nothing, or cannot tell: Python is asked then. */
static int
truth(PyObject *object, Py_ssize_t offset)
{
    PyObject *value = field(object, offset);
    if (value == Py_True || value == Py_False) {
        return value == Py_True;
    }
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    if (is_true < 0) {
        PyErr_Clear();
    }
    return is_true;
}

/* A number that is not negative; -1 if an object is none. */
static Py_ssize_t
natural_of(PyObject *object)
{
    Py_ssize_t number = object != NULL && PyLong_CheckExact(object) ? number_of(object) : -1;
    if (number < 0) {
        PyErr_Clear();
        return -1;
    }
    return number;
}

static Py_ssize_t
number_in(PyObject *object, Py_ssize_t offset)
{
    return natural_of(field(object, offset));
}

/* Add to a number that a slot holds. */
static int
add_to(PyObject *object, Py_ssize_t offset, long long number)
{
    PyObject *before = field(object, offset), *sum = NULL;
    if (before == NULL) {
        PyErr_Format(PyExc_AttributeError, "%s has lost a number", Py_TYPE(object)->tp_name);
        return -1;
    }
    if (number >= 0 && add_in_place(before, (uint64_t)number)) {
        return 0;
    }
    PyObject *added = PyLong_FromLongLong(number);
    if (added != NULL) {
        sum = PyNumber_Add(before, added);
    }
    Py_XDECREF(added);
    if (sum == NULL) {
        return -1;
    }
    set_field(object, offset, sum);
    Py_DECREF(sum);
    return 0;
}

/* ---- what is found again --------------------------------------------------------------------- */

/* Each change of a dict gives it another number, which no other dict has had, in versions of CPython
   before 3.12. There, a key of it stands for the same value as long as it has the same number; in later
   versions dicts are asked each time. */
#if PY_VERSION_HEX < 0x030C0000
static uint64_t
version_of(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}
#else
static uint64_t
version_of(PyObject *Py_UNUSED(dict))
{
    return 0;
}
#endif

static int
is_version(PyObject *dict, uint64_t version)
{
    return version != 0 && version == version_of(dict);
}

typedef enum { PAUSED, ENABLED, HELD, SCOPES, SWITCHES } Switch;

/* Of the current thread. */
static __thread struct {
    uint64_t id;            /* of its state in Python, from 1 on */
    uint64_t configuration; /* the configure() after which the rest was found */
    PyObject *dict;         /* of driver.local: it lives as long as that state and driver.local */
    uint64_t version;       /* of it, where `tracker` was found */
    PyObject *tracker;      /* borrowed from it */
    char *data;             /* what TensorFlow's context knows of the thread; see native_data() */
    uint64_t state;         /* the version of core's state where these were found; -1: not yet */
    signed char switches[SWITCHES];
} here;

/* How often configure() and configure_native() were called. */
static uint64_t configuration;

/* Forget what was found in another thread, or before. */
static void
come_here(void)
{
    uint64_t id = PyThreadState_GetID(PyThreadState_Get());
    if (here.id != id || here.configuration != configuration) {
        memset(&here, 0, sizeof here);
        here.id = id;
        here.configuration = configuration;
    }
}

/* The dict (borrowed) of what driver.local has in this thread; NULL with an error. */
static PyObject *
local_dict(void)
{
    come_here();
    if (here.dict == NULL) {
        PyObject *dict = PyObject_GetAttr(driver.local, names.dict);
        if (dict != NULL && !PyDict_CheckExact(dict)) {
            PyErr_SetString(PyExc_TypeError, "what threads have of their own is in no dict");
            Py_CLEAR(dict);
        }
        here.dict = dict;
        Py_XDECREF(dict);
    }
    return here.dict;
}

/* The current thread's tracker (a new reference), None if there is none; NULL with an error. */
static PyObject *
current_tracker(void)
{
    PyObject *dict = local_dict();
    if (dict == NULL) {
        return NULL;
    }
    if (!is_version(dict, here.version)) {
        here.tracker = PyDict_GetItemWithError(dict, names.tracker);
        if (here.tracker == NULL) {
            here.version = 0;
            return PyErr_Occurred() ? NULL : PyObject_GetAttr(driver.local, names.tracker);
        }
        here.version = version_of(dict);
    }
    return Py_NewRef(here.tracker);
}

/* Whether a switch of the thread is on, by the dict of its state; -1 if that is not known. */
static int
is_on(PyObject *tracker, Switch which)
{
    PyObject *thread = field(tracker, at.tracker_thread);
    if (thread == NULL || !PyDict_CheckExact(thread)) {
        return -1;
    }
    if (!is_version(thread, here.state)) {
        memset(here.switches, -1, sizeof here.switches);
        here.state = version_of(thread);
    }
    else if (here.switches[which] >= 0) {
        return here.switches[which];
    }
    PyObject *value = PyDict_GetItemWithError(thread, names.switches[which]);
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    if (is_true < 0) {
        PyErr_Clear();
    }
    /* What others can change is asked each time. */
    else if (PyLong_CheckExact(value) || PyBool_Check(value) || PyTuple_CheckExact(value)) {
        here.switches[which] = (signed char)is_true;
    }
    return is_true;
}

/* An iteration mostly does what the one before it did, in the same order. So what an operator has found
   is looked at first when it is expected again: between two operators TensorFlow runs more code, and reads
   more memory, than the processor's caches hold, and each function that is not called here need not be
   fetched anew. These steps are those of one thread at a time. */
#define STEPS 2048
typedef struct {
    PyObject *scope, *kind;             /* the keys by which was found what follows; held */
    int is_reading;                     /* whether its output may be the value of a variable */
    PyObject *cells, *cell;             /* borrowed from dicts of these versions */
    uint64_t scopes_version, cells_version;
    PyObject *handle, *result;          /* of a variable that was read, and its value; compared only */
    PyObject *known, *source;           /* borrowed from dicts of these versions */
    uint64_t known_version, handles_version;
} Step;

static struct {
    Step steps[STEPS + 1]; /* the last one is for other threads */
    const void *tracker;   /* whose steps they are; compared only */
    uint64_t thread;       /* the thread of it, which has another one in its next scope */
    int next;              /* the step that is expected */
    int strangers;         /* operators of other threads since its last one */
} course;

/* After so many operators of other threads the steps become theirs. */
#define STRANGERS 4096

static void
forget_steps(void)
{
    for (int i = 0; i <= STEPS; i++) {
        Step *step = &course.steps[i];
        Py_CLEAR(step->scope);
        Py_CLEAR(step->kind);
        *step = (Step){NULL};
    }
}

/* The step of an operator of this thread, by those before it. */
static Step *
expected_step(PyObject *tracker)
{
    if (course.tracker != tracker) {
        int is_strange = course.tracker != NULL && course.thread != here.id;
        if (is_strange && ++course.strangers < STRANGERS) {
            return &course.steps[STEPS];
        }
        course.tracker = tracker;
        course.thread = here.id;
        course.next = 0;
    }
    course.strangers = 0;
    return &course.steps[course.next];
}

/* What a step has found: a cell, and the way to it. */
typedef struct {
    PyObject *all, *scope;  /* the cells by name scope, and that; NULL where it made no difference */
    PyObject *cells, *kind; /* the cells by type, and that */
    PyObject *cell;
} Place;

/* Let a step begin: note what it has found. Where its first operator comes again, an iteration ends. */
static Step *
begin_step(Step *step, const Place *place, int is_first)
{
    if (step != &course.steps[STEPS]) {
        if (is_first && step->cell != place->cell && course.steps[0].cell == place->cell) {
            step = &course.steps[0];
        }
        course.next = (int)(step - course.steps + 1) % STEPS;
    }
    step->cell = place->cell;
    step->cells = place->cells;
    step->scopes_version = place->scope == NULL ? 0 : version_of(place->all);
    step->cells_version = version_of(place->cells);
    if (step->scope != place->scope) {
        Py_XINCREF(place->scope);
        Py_XSETREF(step->scope, place->scope);
    }
    if (step->kind != place->kind) {
        Py_XSETREF(step->kind, Py_NewRef(place->kind));
        step->is_reading = PySet_Contains(driver.reading, place->kind) == 1;
    }
    return step;
}

/* ---- functions of TensorFlow's in C++ -------------------------------------------------------- */

/* NULL where attributes and bindings are asked. */
static struct {
    char *(*data)(PyObject *);    /* what the context knows of the current thread */
    PyObject *context;            /* its argument */
    PyObject *local;              /* the object that stands for it in Python */
    PyObject *(*is_empty)(void);  /* no_tape_records */
    PyObject *(*execute)(PyObject *); /* what `binding` calls with its arguments */
    PyObject *binding;            /* TFE_Py_FastPathExecute */
    /* Where the values of attributes lie in the data; see find_values(). */
    Py_ssize_t scope_name, op_callbacks, is_eager;
} native;

/* What the context knows of the current thread, where it lies; NULL if attributes have to be asked. It
   stays there as long as the thread and native.local live. */
static char *
native_data(PyObject *tracker)
{
    if (native.data == NULL || field(tracker, at.tracker_local) != native.local) {
        return NULL;
    }
    come_here();
    if (here.data == NULL) {
        here.data = native.data(native.context);
    }
    return here.data;
}

/* An attribute (a new reference) of what the context knows of the current thread. */
static PyObject *
local_value(PyObject *tracker, PyObject *name, Py_ssize_t offset)
{
    char *data = native_data(tracker);
    PyObject *value = data == NULL ? NULL : *(PyObject **)(data + offset);
    if (value != NULL) {
        return Py_NewRef(value);
    }
    PyObject *local = field(tracker, at.tracker_local);
    return PyObject_GetAttr(local == NULL ? Py_None : local, name);
}

/* Whether TensorFlow's callbacks are called at operators; -1 with an error. */
static int
has_callbacks(PyObject *tracker)
{
    PyObject *value = local_value(tracker, names.op_callbacks, native.op_callbacks);
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is_true;
}

/* Whether operators run at once; -1 with an error. */
static int
is_eager(PyObject *tracker)
{
    char *data = native_data(tracker);
    if (data != NULL) {
        return data[native.is_eager] != 0;
    }
    PyObject *local = field(tracker, at.tracker_local);
    PyObject *value = PyObject_GetAttr(local == NULL ? Py_None : local, names.is_eager);
    int is_true = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return is_true;
}

/* Whether no tape records; -1 with an error. */
static int
no_tape_records(void)
{
    PyObject *empty = native.is_empty != NULL ? native.is_empty()
                                              : PyObject_CallNoArgs(driver.no_tape_records);
    int is_empty = empty == NULL ? -1 : PyObject_IsTrue(empty);
    Py_XDECREF(empty);
    return is_empty;
}

/* Bytes of the data that are looked at: what TensorFlow 2.16 to 2.21 keeps of a thread has 56. */
#define DATA 56

/* Where the data has the value of an attribute: an object, or a byte that says whether it is true;
   -1 if that is not found, -2 with an error. The attribute is set to two values, and put back. */
static Py_ssize_t
find_value(PyObject *name, PyObject *first, PyObject *second)
{
    PyObject *before = PyObject_GetAttr(native.local, name);
    int is_byte = PyBool_Check(first);
    Py_ssize_t size = is_byte ? 1 : sizeof(PyObject *), found = before == NULL ? -2 : -1;
    for (Py_ssize_t offset = 0; found == -1 && offset + size <= DATA; offset += size) {
        PyObject *all[] = {first, second};
        int is_there = 1;
        for (int i = 0; is_there == 1 && i < 2; i++) {
            char *data = native.data(native.context);
            if (data == NULL || PyObject_SetAttr(native.local, name, all[i]) < 0) {
                is_there = -1;
            }
            else if (is_byte) {
                is_there = data[offset] == (all[i] == Py_True);
            }
            else {
                is_there = *(PyObject **)(data + offset) == all[i];
            }
        }
        found = is_there < 0 ? -2 : is_there ? offset : -1;
    }
    if (before != NULL) {
        KEEPING_ERROR({
            if (PyObject_SetAttr(native.local, name, before) < 0) {
                PyErr_Clear();
                found = -1;
            }
        });
    }
    Py_XDECREF(before);
    return found;
}

/* Find where the values of the attributes that are asked for lie. */
static int
find_values(void)
{
    PyObject *texts[] = {PyUnicode_FromString("amanda 1/"), PyUnicode_FromString("amanda 2/")};
    PyObject *lists[] = {PyList_New(0), PyList_New(0)};
    int is_found = 0;
    if (texts[0] != NULL && texts[1] != NULL && lists[0] != NULL && lists[1] != NULL) {
        native.scope_name = find_value(names.scope_name, texts[0], texts[1]);
        native.op_callbacks = find_value(names.op_callbacks, lists[0], lists[1]);
        native.is_eager = find_value(names.is_eager, Py_False, Py_True);
        is_found = native.scope_name >= 0 && native.op_callbacks >= 0 && native.is_eager >= 0;
    }
    for (int i = 0; i < 2; i++) {
        Py_XDECREF(texts[i]);
        Py_XDECREF(lists[i]);
    }
    return is_found;
}

/* Arguments of an operator before its inputs: context, type, name. */
#define LEADING 3

#include "readings.h"

/* ---- cells ----------------------------------------------------------------------------------- */

/* A cell is a list: a count, and an entry for each operator (amanda_tensorflow.eager.plan_cache). */

/* The count of a cell; -1 if it has none. */
static Py_ssize_t
count_of(PyObject *cell)
{
    int is_cell = cell != NULL && PyList_CheckExact(cell) && PyList_GET_SIZE(cell) > 0;
    return is_cell ? natural_of(PyList_GET_ITEM(cell, 0)) : -1;
}

/* The entry (borrowed) of an operator of a cell: the next one, or one of those that follow; NULL if
   there is none. */
static PyObject *
entry_of(PyObject *cell, Py_ssize_t further)
{
    Py_ssize_t number = count_of(cell);
    if (number < 0 || number + further >= PyList_GET_SIZE(cell) - 1) {
        return NULL;
    }
    return PyList_GET_ITEM(cell, number + further + 1);
}

#define SMALL_NUMBERS 128
static PyObject *small_numbers[SMALL_NUMBERS]; /* 0 and so on */

/* Set the count of a cell. */
static int
set_count(PyObject *cell, Py_ssize_t number)
{
    PyObject *count = number < SMALL_NUMBERS ? Py_NewRef(small_numbers[number])
                                             : PyLong_FromSsize_t(number);
    if (count == NULL) {
        return -1;
    }
    PyObject *before = PyList_GET_ITEM(cell, 0);
    PyList_SET_ITEM(cell, 0, count);
    Py_XDECREF(before);
    return 0;
}

/* Count operators that have run. */
static int
count(PyObject *cell, Py_ssize_t executions)
{
    Py_ssize_t number = count_of(cell);
    if (number < 0) {
        PyErr_SetString(PyExc_RuntimeError, "a cell has lost its count");
        return -1;
    }
    return set_count(cell, number + executions);
}

/* Find the cells (borrowed) of the operators that run now, by type; 0 if Python has to look them up. */
static int
find_cells(PyObject *tracker, const Step *step, Place *place)
{
    PyObject *all = field(tracker, at.tracker_cells);
    if (all == NULL) {
        return 0;
    }
    if (Py_IS_TYPE(all, driver.any_scope)) {
        place->cells = field(all, at.scope_cells);
    }
    else if (PyDict_Check(all)) {
        /* The name scope is asked for only where it makes a difference. */
        place->all = all;
        place->scope = local_value(tracker, names.scope_name, native.scope_name);
        if (place->scope == NULL || !PyUnicode_CheckExact(place->scope)) {
            PyErr_Clear();
            return 0;
        }
        if (step->scope == place->scope && is_version(all, step->scopes_version)) {
            place->cells = step->cells;
            return 1;
        }
        place->cells = PyDict_GetItemWithError(all, place->scope);
        PyErr_Clear();
    }
    return place->cells != NULL && PyDict_Check(place->cells);
}

/* Find the cell (borrowed) of the operators of this type that run now; 0 if Python has to. The name scope
   is a new reference. */
static int
find_cell(PyObject *tracker, const Step *step, Place *place)
{
    if (!find_cells(tracker, step, place)) {
        return 0;
    }
    if (step->kind == place->kind && is_version(place->cells, step->cells_version)) {
        place->cell = step->cell;
        return 1;
    }
    place->cell = PyDict_GetItemWithError(place->cells, place->kind);
    PyErr_Clear();
    return place->cell != NULL;
}

/* ---- counters and timers --------------------------------------------------------------------- */

/* time.perf_counter_ns() */
static long long
read_nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Write an execution into the numbers of a log. */
static int
write_numbers(PyObject *log, PyObject *timer, PyObject *tracker, long long start, long long end)
{
    PyObject *numbers = field(log, at.log_numbers);
    Py_ssize_t number = number_in(timer, at.timer_number);
    Py_ssize_t native = number_in(tracker, at.tracker_native);
    if (numbers == NULL || number < 0 || native < 0) {
        PyErr_SetString(PyExc_TypeError, "a timer or its log has lost its numbers");
        return -1;
    }
    Py_INCREF(numbers);
    int failed = extend_numbers(numbers, number, start, end, native);
    Py_DECREF(numbers);
    return failed;
}

/* A function in the place of one of TensorFlow's. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *vanilla;  /* TensorFlow's own */
    PyObject *python;   /* the driver's, for everything that is not answered here */
    PyObject *value_of; /* Interception._value_of() */
    PyObject *ended;    /* Interception._ended() */
    PyObject *values;   /* VariableValues */
    PyObject *weak;
} Function;

/* Whether a timer is told of an execution from here: not where a tool has to look at its log. */
static int
is_told_here(PyObject *pair, long long end)
{
    if (!PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2
        || !Py_IS_TYPE(PyTuple_GET_ITEM(pair, 0), driver.timer)) {
        return 0;
    }
    PyObject *log = field(PyTuple_GET_ITEM(pair, 0), at.timer_log);
    if (log == Py_None) {
        return 1;
    }
    if (log == NULL || !PyObject_TypeCheck(log, driver.log)) {
        return 0;
    }
    PyObject *due = field(log, at.log_due);
    if (due == NULL || !PyLong_CheckExact(due)) {
        return due == Py_None;
    }
    int overflow;
    return PyLong_AsLongLongAndOverflow(due, &overflow) > end && overflow == 0;
}

static int
tell_timer(PyObject *tracker, PyObject *timer, long long start, long long end)
{
    PyObject *log = field(timer, at.timer_log);
    if (add_to(timer, at.timer_executions, 1) < 0
        || add_to(timer, at.timer_nanoseconds, end - start) < 0) {
        return -1;
    }
    return log == Py_None ? 0 : write_numbers(log, timer, tracker, start, end);
}

/* Tell the counters and timers of an entry of an execution; as Interception._ended() does, which is
   called where anything else than adding numbers is to be done. */
static int
tell(Function *self, PyObject *tracker, PyObject *entry, long long start, long long end)
{
    PyObject *counters = field(entry, at.inlined_counters), *timers = field(entry, at.inlined_timers);
    int is_usual = counters != NULL && timers != NULL && PyList_CheckExact(counters)
                   && PyList_CheckExact(timers);
    for (Py_ssize_t i = 0; is_usual && i < PyList_GET_SIZE(counters); i++) {
        is_usual = Py_IS_TYPE(PyList_GET_ITEM(counters, i), driver.counter);
    }
    for (Py_ssize_t i = 0; is_usual && i < PyList_GET_SIZE(timers); i++) {
        is_usual = is_told_here(PyList_GET_ITEM(timers, i), end);
    }
    if (!is_usual) {
        PyObject *none = PyObject_CallFunction(self->ended, "OOLL", tracker, entry, start, end);
        Py_XDECREF(none);
        return none == NULL ? -1 : 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(counters); i++) {
        if (add_to(PyList_GET_ITEM(counters, i), at.counter_count, 1) < 0) {
            return -1;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(timers); i++) {
        PyObject *timer = PyTuple_GET_ITEM(PyList_GET_ITEM(timers, i), 0);
        if (tell_timer(tracker, timer, start, end) < 0) {
            return -1;
        }
    }
    return 0;
}

/* ---- the way of an operator ------------------------------------------------------------------ */

/* Positional arguments of an operator for which there is room here; Python runs those with more. */
#define MOST 48
typedef enum {
    FAILED = -1, /* with an error */
    ASK,         /* Python decides */
    VANILLA,     /* it runs, and is not counted */
    KNOWN,       /* it runs as a Way tells */
} Decision;

/* All references are strong; those that are not needed are NULL. */
typedef struct {
    PyObject *tracker;
    PyObject *cell;      /* counts the operator */
    PyObject *entry;     /* of counters and timers that are told of it */
    PyObject *marked;    /* name and value of the attribute by which it is marked */
    PyObject *readings;  /* the cell that counts readings of variables that are its inputs */
    Py_ssize_t variables; /* how many these are */
    int is_noted;        /* its output may be the value of a variable */
    int is_reading;      /* it reads a variable that another operator was passed */
    Step *step;
} Way;

static void
clear_way(Way *way)
{
    Py_XDECREF(way->tracker);
    Py_XDECREF(way->cell);
    Py_XDECREF(way->entry);
    Py_XDECREF(way->marked);
    Py_XDECREF(way->readings);
}

/* Whether operators of the thread are looked at: as Interception's decider asks, and as
   Tracker.refresh() answers where no scopes have to be looked up. */
static Decision
is_listening(PyObject *tracker)
{
    int paused = is_on(tracker, PAUSED), stale = truth(tracker, at.tracker_stale);
    if (paused == 0 && stale == 0) {
        return KNOWN;
    }
    if (paused < 0 || stale < 0 || field(tracker, at.tracker_marking) != Py_None) {
        return ASK;
    }
    if (paused || truth(tracker, at.tracker_muted) == 1) {
        return VANILLA;
    }
    if (truth(tracker, at.tracker_outdated) != 0) {
        return ASK;
    }
    /* A backward pass of whose operators nobody wants to know. */
    int is_quiet = truth(tracker, at.tracker_depth) == 1 && truth(tracker, at.tracker_watches) == 0
                   && field(tracker, at.tracker_run) == Py_None;
    if (!is_quiet) {
        /* A tool's code has run. */
        set_field(tracker, at.tracker_stale, Py_False);
    }
    return is_quiet ? VANILLA : KNOWN;
}

static int
is_plain(PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(driver.plain); i++) {
        if ((PyObject *)type == PyTuple_GET_ITEM(driver.plain, i)) {
            return 1;
        }
    }
    return 0;
}

/* Whether a list or a tuple has items of plain types only. */
static int
has_plain_items(PyObject *value)
{
    if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) {
        return 0;
    }
    PyObject **items = PySequence_Fast_ITEMS(value);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
        if (!is_plain(Py_TYPE(items[i]))) {
            return 0;
        }
    }
    return 1;
}

/* How many of an operator's arguments are variables; -1 where Python has to find out. */
static Py_ssize_t
variables_among(PyObject *const *values, Py_ssize_t length)
{
    Py_ssize_t variables = 0;
    for (Py_ssize_t i = 0; i < length; i++) {
        PyTypeObject *type = Py_TYPE(values[i]);
        if (type == driver.variable) {
            variables++;
        }
        else if (!is_plain(type) && !has_plain_items(values[i])) {
            return -1;
        }
    }
    return variables;
}

/* Find the attribute that marks an execution, if its plan needs one. */
static Decision
find_mark(Way *way, PyObject *plan)
{
    int claims = plan != NULL && Py_IS_TYPE(plan, driver.plan) ? truth(plan, at.plan_claims) : -1;
    if (claims <= 0) {
        return claims == 0 ? KNOWN : ASK;
    }
    PyObject *claim = Py_XNewRef(field(plan, at.plan_data));
    int is_empty = no_tape_records();
    Decision decision = is_empty < 0 ? FAILED : is_empty ? KNOWN : ASK;
    if (decision == ASK && claim != NULL && Py_IS_TYPE(claim, driver.claim)) {
        /* Executions share a mark from the backward pass on that follows the first one. */
        PyObject *found = field(claim, at.claim_marked);
        Py_ssize_t passes = number_in(claim, at.claim_passes);
        if (found != NULL && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 2
            && passes >= 0 && number_in(way->tracker, at.tracker_passes) > passes) {
            int is_told = has_callbacks(way->tracker);
            decision = is_told < 0 ? FAILED : is_told ? ASK : KNOWN;
            if (decision == KNOWN) {
                way->marked = Py_NewRef(found);
            }
        }
    }
    Py_XDECREF(claim);
    return decision;
}

/* Whether the readings of an operator's variables are only counted, or also told to counters and
   timers where these may be there. */
static int
find_readings(Way *way, PyObject *cells, Py_ssize_t variables, int may_be_inlined)
{
    PyObject *cell = PyDict_GetItemWithError(cells, names.read_variable);
    for (Py_ssize_t i = 0; i < variables; i++) {
        PyObject *entry = entry_of(cell, i);
        if (entry == NULL) {
            PyErr_Clear();
            return 0;
        }
        int is_counted = entry == Py_None || entry == driver.read
                         || (may_be_inlined && Py_IS_TYPE(entry, driver.inlined))
                         || (Py_IS_TYPE(entry, driver.plan) && truth(entry, at.plan_is_claim) == 1);
        if (!is_counted) {
            return 0;
        }
    }
    way->readings = Py_NewRef(cell);
    way->variables = variables;
    return 1;
}

/* Whether an exception is being handled: the operator may be a second attempt after it. */
static int
is_in_handler(void)
{
    PyObject *error = PyErr_GetHandledException();
    Py_XDECREF(error);
    return error != NULL && error != Py_None;
}

/* The decision on an operator of which an entry is kept. */
static Decision
decide_by_entry(Way *way, PyObject *cells, Py_ssize_t variables)
{
    PyObject *entry = entry_of(way->cell, 0);
    if (entry == NULL) {
        return ASK;
    }
    if (entry == Py_None) {
        return variables == 0 ? KNOWN : ASK;
    }
    if (Py_IS_TYPE(entry, driver.slow_path)) {
        /* It stays on the fast path if it is there for its variables alone. */
        if (truth(entry, at.slow_may_pass) != 1 || variables == 0
            || !find_readings(way, cells, variables, 0)) {
            return ASK;
        }
        return find_mark(way, field(entry, at.slow_plan));
    }
    way->is_noted = way->step->is_reading && truth(way->tracker, at.tracker_depth) == 0;
    if (Py_IS_TYPE(entry, driver.inlined)) {
        if (variables == 0 ? is_in_handler() : !find_readings(way, cells, variables, 1)) {
            return ASK;
        }
        way->entry = Py_NewRef(entry);
        return find_mark(way, field(entry, at.inlined_plan));
    }
    if (variables != 0) {
        return ASK;
    }
    if (entry == driver.read) {
        return KNOWN;
    }
    if (Py_IS_TYPE(entry, driver.plan) && truth(entry, at.plan_is_claim) == 1) {
        return find_mark(way, entry);
    }
    return ASK;
}

/* The decision on an operator. */
static Decision
decide(Way *way, PyObject *const *args, Py_ssize_t length)
{
    way->tracker = current_tracker();
    if (way->tracker == NULL) {
        return FAILED;
    }
    if (way->tracker == Py_None) {
        return VANILLA;
    }
    if (!Py_IS_TYPE(way->tracker, driver.tracker) || length > MOST
        || !PyUnicode_CheckExact(args[1])) {
        return ASK;
    }
    Decision decision = is_listening(way->tracker);
    if (decision != KNOWN) {
        return decision;
    }
    Step *step = expected_step(way->tracker);
    Place place = {.kind = args[1]};
    if (!find_cell(way->tracker, step, &place)) {
        Py_XDECREF(place.scope);
        return ASK;
    }
    way->cell = Py_NewRef(place.cell);
    Py_INCREF(place.cells);
    way->step = begin_step(step, &place, count_of(place.cell) == 0);
    Py_ssize_t variables = variables_among(args + LEADING, length - LEADING);
    decision = variables < 0 ? ASK : decide_by_entry(way, place.cells, variables);
    Py_DECREF(place.cells);
    Py_XDECREF(place.scope);
    return decision;
}

/* ---- an operator ----------------------------------------------------------------------------- */

/* Run an operator by the function in C++ itself. */
static PyObject *
run_native(PyObject *const *args, Py_ssize_t length, PyObject *marked)
{
    Py_ssize_t all = length + (marked == NULL ? 0 : 2);
    PyObject *given = PyTuple_New(all);
    if (given == NULL) {
        return NULL;
    }
    for (Py_ssize_t i = 0; i < all; i++) {
        PyObject *item = i < length ? args[i] : PyTuple_GET_ITEM(marked, i - length);
        PyTuple_SET_ITEM(given, i, Py_NewRef(item));
    }
    PyObject *result = native.execute(given);
    Py_DECREF(given);
    return result;
}

/* Run an operator vanilla, with the attribute that marks it, if it has one: the runtime ignores
   attributes that the operator does not declare. */
static PyObject *
run_marked(PyObject *vanilla, PyObject *const *args, Py_ssize_t length, PyObject *marked)
{
    if (native.execute != NULL && vanilla == native.binding) {
        return run_native(args, length, marked);
    }
    if (marked == NULL) {
        return PyObject_Vectorcall(vanilla, args, (size_t)length, NULL);
    }
    PyObject *all[MOST + 2];
    memcpy(all, args, (size_t)length * sizeof *all);
    all[length] = PyTuple_GET_ITEM(marked, 0);
    all[length + 1] = PyTuple_GET_ITEM(marked, 1);
    return PyObject_Vectorcall(vanilla, all, (size_t)length + 2, NULL);
}

/* What the values of a variable are noted with (borrowed); NULL if the variable is new, or with an
   error. */
static PyObject *
source_of(PyObject *handles, PyObject *handle, Step *step)
{
    PyObject *source;
    if (step->handle == handle && is_version(handles, step->handles_version)) {
        source = step->source;
    }
    else {
        PyObject *key = PyLong_FromVoidPtr(handle);
        source = key == NULL ? NULL : PyDict_GetItemWithError(handles, key);
        Py_XDECREF(key);
        if (source == NULL || !Py_IS_TYPE(source, driver.source)) {
            return NULL;
        }
        step->handle = handle;
        step->source = source;
        step->handles_version = version_of(handles);
    }
    return is_alive(field(source, at.source_handle), handle) ? source : NULL;
}

/* The list (a new reference) in which the value of a variable is noted: that of a tensor that has lain
   there before, if there is one. The dict then stays as it is. */
static PyObject *
pair_of(PyObject *known, PyObject *result, Step *step)
{
    if (step->result == result && is_version(known, step->known_version)) {
        return Py_NewRef(step->known);
    }
    PyObject *key = PyLong_FromVoidPtr(result);
    PyObject *pair = key == NULL ? NULL : PyDict_GetItemWithError(known, key);
    if (pair != NULL && PyList_CheckExact(pair) && PyList_GET_SIZE(pair) == 2) {
        Py_INCREF(pair);
    }
    else {
        pair = PyErr_Occurred() ? NULL : Py_BuildValue("[OO]", Py_None, Py_None);
        if (pair != NULL && PyDict_SetItem(known, key, pair) < 0) {
            Py_CLEAR(pair);
        }
    }
    Py_XDECREF(key);
    step->result = pair == NULL ? NULL : result;
    step->known = pair;
    step->known_version = version_of(known);
    return pair;
}

/* Note the value of a variable as VariableValues.note() does; 0 where that has to be called, since
   the variable is new, or those that have died are to be dropped; -1 with an error. */
static int
note_value(PyObject *values, PyObject *handle, PyObject *result, Step *step)
{
    PyObject *known = field(values, at.values_known), *handles = field(values, at.values_handles);
    if (known == NULL || handles == NULL || !PyDict_CheckExact(known) || !PyDict_CheckExact(handles)
        || PyDict_GET_SIZE(known) + PyDict_GET_SIZE(handles) >= number_in(values, at.values_most)) {
        return 0;
    }
    PyObject *source = source_of(handles, handle, step);
    if (source == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    Py_INCREF(known);
    Py_INCREF(source);
    PyObject *weak = PyWeakref_NewRef(result, NULL);
    PyObject *pair = weak == NULL ? NULL : pair_of(known, result, step);
    int done = pair == NULL ? -1 : 1;
    if (pair != NULL) {
        PyList_SetItem(pair, 0, Py_NewRef(weak));
        PyList_SetItem(pair, 1, Py_NewRef(source));
    }
    Py_XDECREF(weak);
    Py_XDECREF(pair);
    Py_DECREF(source);
    Py_DECREF(known);
    return done;
}

/* Tell of the result of an operator that may be the value of a variable. */
static int
note(Function *self, Way *way, PyObject *const *args, Py_ssize_t length, PyObject *result)
{
    int is_reading = args[1] == names.read_variable
                     || PyUnicode_Compare(args[1], names.read_variable) == 0;
    if (length > LEADING && is_reading) {
        int is_noted = note_value(self->values, args[LEADING], result, way->step);
        if (is_noted != 0) {
            return is_noted < 0 ? -1 : 0;
        }
    }
    PyObject *given = PyTuple_New(length - LEADING), *none = NULL;
    for (Py_ssize_t i = LEADING; given != NULL && i < length; i++) {
        PyTuple_SET_ITEM(given, i - LEADING, Py_NewRef(args[i]));
    }
    if (given != NULL) {
        none = PyObject_CallMethodObjArgs(self->values, names.note, args[1], given, result, NULL);
        Py_DECREF(given);
    }
    if (none != NULL && way->marked != NULL
        && PyUnicode_Compare(args[1], names.identity) == 0) {
        Py_SETREF(none, PyObject_CallMethodObjArgs(way->tracker, names.note_owner, result,
                                                   PyTuple_GET_ITEM(way->marked, 1), NULL));
    }
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Run an operator vanilla, as its way tells. */
static PyObject *
run_vanilla(Function *self, Way *way, PyObject *const *args, Py_ssize_t length)
{
    if (way->is_reading && reads_natively() && self->vanilla == native.binding) {
        PyObject *value = read_natively(way->tracker, args, way->marked);
        if (value != NULL || PyErr_Occurred()) {
            return value;
        }
    }
    return run_marked(self->vanilla, args, length, way->marked);
}

/* Run an operator, and do what its way tells. */
static PyObject *
run_known(Function *self, Way *way, PyObject *const *args, Py_ssize_t length)
{
    long long start = way->entry == NULL ? 0 : read_nanoseconds();
    PyObject *result = run_vanilla(self, way, args, length);
    long long end = way->entry == NULL ? 0 : read_nanoseconds();
    if (result == NULL) {
        return NULL;
    }
    if (count(way->cell, 1) < 0
        || (way->entry != NULL && tell(self, way->tracker, way->entry, start, end) < 0)
        || (way->is_noted && note(self, way, args, length, result) < 0)) {
        Py_CLEAR(result);
    }
    return result;
}

/* The arguments by which the fast path reads a variable, as reading_of() of the driver's _internals
   gives them: tapes and watchers are told of it. Those of context, type and name come before. */
static int
find_reading(PyObject *variable, PyObject **found)
{
    PyObject *trainable = PyObject_GetAttr(variable, PyTuple_GET_ITEM(driver.parts, 0));
    if (trainable == NULL) {
        return -1;
    }
    Py_DECREF(trainable);
    Py_ssize_t told = trainable == Py_False ? 0 : PyTuple_GET_SIZE(driver.told);
    if (told > 0 && reads_natively()) {
        run_time.TFE_Py_TapeVariableAccessed(variable);
        run_time.TFE_Py_VariableWatcherVariableAccessed(variable);
        told = 0;
    }
    for (Py_ssize_t i = 0; i < told; i++) {
        PyObject *none = PyObject_CallOneArg(PyTuple_GET_ITEM(driver.told, i), variable);
        if (none == NULL) {
            return -1;
        }
        Py_DECREF(none);
    }
    found[0] = PyObject_GetAttr(variable, PyTuple_GET_ITEM(driver.parts, 1));
    found[1] = found[0] == NULL ? NULL : PyObject_GetAttr(variable, PyTuple_GET_ITEM(driver.parts, 2));
    if (found[1] == NULL) {
        Py_CLEAR(found[0]);
        return -1;
    }
    return 0;
}

/* The value of a variable, by an operator that counters and timers are told of; as
   Interception._value_of() reads it, which is called where they are not. */
static PyObject *
read_variable(Function *self, Way *way, PyObject *context, PyObject *variable)
{
    PyObject *entry = entry_of(way->readings, 0), *result = NULL;
    Way reading = {.tracker = Py_NewRef(way->tracker),
                   .cell = Py_NewRef(way->readings),
                   .is_reading = 1,
                   .step = way->step};
    Decision decision = ASK;
    if (entry != NULL && Py_IS_TYPE(entry, driver.inlined)) {
        reading.entry = Py_NewRef(entry);
        decision = find_mark(&reading, field(entry, at.inlined_plan));
    }
    if (decision == ASK) {
        result = PyObject_CallFunctionObjArgs(self->value_of, way->tracker, way->readings, context,
                                              variable, NULL);
    }
    else if (decision == KNOWN) {
        PyObject *found[2];
        if (find_reading(variable, found) == 0) {
            PyObject *args[] = {context,  names.read_variable, Py_None,
                                found[0], names.dtype,         found[1]};
            reading.is_noted = truth(way->tracker, at.tracker_depth) == 0;
            result = run_known(self, &reading, args, sizeof args / sizeof *args);
            Py_DECREF(found[0]);
            Py_DECREF(found[1]);
        }
    }
    clear_way(&reading);
    return result;
}

/* Run an operator whose readings of variables are told to counters and timers: they are read one by
   one before it. */
static PyObject *
run_with_values(Function *self, Way *way, PyObject *const *args, Py_ssize_t length)
{
    PyObject *values[MOST], *result = NULL;
    Py_ssize_t done = 0;
    for (; done < length; done++) {
        int is_variable = done >= LEADING && Py_IS_TYPE(args[done], driver.variable);
        values[done] = is_variable ? read_variable(self, way, args[0], args[done])
                                   : Py_NewRef(args[done]);
        if (values[done] == NULL) {
            break;
        }
    }
    if (done == length) {
        result = run_known(self, way, values, length);
    }
    while (done > 0) {
        Py_DECREF(values[--done]);
    }
    return result;
}

/* What is called in the place of TFE_Py_FastPathExecute. */
static PyObject *
call_fast_path(PyObject *callable, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Function *self = (Function *)callable;
    Py_ssize_t length = PyVectorcall_NARGS(nargsf);
    if (keywords != NULL || length < LEADING) {
        return PyObject_Vectorcall(self->python, args, nargsf, keywords);
    }
    Way way = {NULL};
    PyObject *result = NULL;
    switch (decide(&way, args, length)) {
    case FAILED:
        break;
    case ASK:
        result = PyObject_Vectorcall(self->python, args, nargsf, NULL);
        break;
    case VANILLA:
        result = run_marked(self->vanilla, args, length, NULL);
        break;
    case KNOWN:
        if (way.readings != NULL && way.entry != NULL) {
            result = run_with_values(self, &way, args, length);
            break;
        }
        result = run_known(self, &way, args, length);
        if (result != NULL && way.readings != NULL && count(way.readings, way.variables) < 0) {
            Py_CLEAR(result);
        }
        break;
    }
    clear_way(&way);
    return result;
}

/* ---- gradient functions ---------------------------------------------------------------------- */

/* Arguments of the function that tapes call: type of the operator, attributes, and six more. */
#define GRADIENT_ARGUMENTS 8

/* Where the name of the mark is looked for among the attributes of a record. */
#define NO_MARK (-1)
#define NO_NAMES (-2) /* they are not as they should be: Python looks */

/* The position of the mark's name among the attributes of a record, which may be None. */
static Py_ssize_t
mark_position(PyObject *attributes)
{
    if (attributes == Py_None) {
        return NO_MARK;
    }
    Py_ssize_t length = PyTuple_CheckExact(attributes) ? PyTuple_GET_SIZE(attributes) : 1;
    if (length % 2 != 0) {
        return NO_NAMES;
    }
    for (Py_ssize_t i = 0; i < length; i += 2) {
        PyObject *name = PyTuple_GET_ITEM(attributes, i);
        if (name == driver.mark_name) {
            return i;
        }
        if (!PyUnicode_CheckExact(name) || PyUnicode_Compare(name, driver.mark_name) == 0) {
            return NO_NAMES;
        }
    }
    return NO_MARK;
}

/* Attributes without the mark. */
static PyObject *
unmarked(PyObject *attributes, Py_ssize_t position)
{
    Py_ssize_t length = PyTuple_GET_SIZE(attributes) - 2;
    PyObject *own = PyTuple_New(length);
    for (Py_ssize_t i = 0; own != NULL && i < length; i++) {
        PyObject *item = PyTuple_GET_ITEM(attributes, i < position ? i : i + 2);
        PyTuple_SET_ITEM(own, i, Py_NewRef(item));
    }
    return own;
}

/* The run (a new reference) of an operator whose executions share a mark, if its gradient function
   begins as MarkedGradients.begin() lets it; NULL where Python has to be asked, or with an error. */
static PyObject *
find_run(PyObject *tracker, PyObject *mark)
{
    PyObject *sums = field(tracker, at.tracker_sums);
    Py_ssize_t generation = number_in(tracker, at.tracker_generation);
    if (truth(mark, at.mark_shared) != 1 || truth(tracker, at.tracker_muted) != 0
        || truth(tracker, at.tracker_outdated) != 0 || generation < 0
        || number_in(mark, at.mark_generation) != generation || is_on(tracker, PAUSED) != 0
        || is_on(tracker, ENABLED) != 1 || is_on(tracker, HELD) != 0
        || is_on(tracker, SCOPES) != 1 || sums == NULL || !PyDict_CheckExact(sums)
        || PyDict_GET_SIZE(sums) != 0 || is_eager(tracker) != 1) {
        return NULL;
    }
    PyObject *gradients = field(tracker, at.tracker_gradients), *id = field(mark, at.mark_op_id);
    PyObject *known = NULL;
    if (gradients != NULL && id != NULL && PyDict_CheckExact(gradients)) {
        known = PyDict_GetItemWithError(gradients, id);
    }
    if (known == NULL || !Py_IS_TYPE(known, driver.known)) {
        return NULL;
    }
    PyObject *run = field(known, at.known_run);
    if (run == NULL || !Py_IS_TYPE(run, driver.run) || field(run, at.run_mark) != mark
        || truth(run, at.run_is_running) != 0) {
        return NULL;
    }
    return Py_NewRef(run);
}

/* Restart the counts of a run's cells; 0 if Python has to. */
static int
restart(PyObject *run)
{
    PyObject *cells = field(run, at.run_cells), *kind, *cell;
    Py_ssize_t position = 0;
    if (cells == NULL || field(run, at.run_scopes) == NULL || field(run, at.run_produced) == NULL
        || !PyDict_CheckExact(cells)) {
        return 0;
    }
    while (PyDict_Next(cells, &position, &kind, &cell)) {
        if (!PyList_CheckExact(cell) || PyList_GET_SIZE(cell) == 0 || set_count(cell, 0) < 0) {
            return 0;
        }
    }
    return 1;
}

/* Tracker.go_to() */
static void
go_to(PyObject *tracker, PyObject *cells, PyObject *run)
{
    set_field(tracker, at.tracker_cells, cells);
    set_field(tracker, at.tracker_run, run);
    int is_quiet = truth(tracker, at.tracker_depth) != 0 && run == Py_None
                   && truth(tracker, at.tracker_watches) != 1;
    int is_stale = is_quiet || truth(tracker, at.tracker_outdated) != 0
                   || truth(tracker, at.tracker_muted) != 0;
    set_field(tracker, at.tracker_stale, is_stale ? Py_True : Py_False);
}

/* Call a gradient function whose operators are counted as those of a run. */
static PyObject *
call_as_run(Function *self, PyObject *tracker, PyObject *run, PyObject *const *args)
{
    PyObject *cells = Py_NewRef(field(tracker, at.tracker_cells));
    PyObject *outer = Py_NewRef(field(tracker, at.tracker_run));
    set_field(run, at.run_is_running, Py_True);
    set_field(tracker, at.tracker_cells, field(run, at.run_scopes));
    set_field(tracker, at.tracker_run, run);
    set_field(tracker, at.tracker_stale, Py_False);
    PyObject *result = PyObject_Vectorcall(self->vanilla, args, GRADIENT_ARGUMENTS, NULL);
    int is_left = 1;
    KEEPING_ERROR({
        go_to(tracker, cells, outer);
        set_field(run, at.run_is_running, Py_False);
        Py_DECREF(cells);
        Py_DECREF(outer);
        is_left = truth(run, at.run_produced) == 0;
    });
    if (is_left) {
        return result;
    }
    /* Some of its operators did not run vanilla. */
    PyObject *none;
    if (result == NULL) {
        KEEPING_ERROR({
            none = PyObject_CallMethodOneArg(run, names.leave, Py_None);
            PyErr_Clear();
        });
        Py_XDECREF(none);
        return NULL;
    }
    none = PyObject_CallMethodOneArg(run, names.leave, result);
    if (none == NULL) {
        Py_CLEAR(result);
    }
    Py_XDECREF(none);
    return result;
}

/* The gradients of one record. */
static PyObject *
differentiate(Function *self, PyObject *const *args, size_t nargsf, PyObject *keywords)
{
    Py_ssize_t length = PyVectorcall_NARGS(nargsf), position = NO_NAMES;
    if (keywords == NULL && length == GRADIENT_ARGUMENTS) {
        position = mark_position(args[1]);
    }
    if (position == NO_MARK) {
        return PyObject_Vectorcall(self->vanilla, args, nargsf, NULL);
    }
    PyObject *mark = position < 0 ? NULL : PyTuple_GET_ITEM(args[1], position + 1);
    if (mark == NULL || !Py_IS_TYPE(mark, driver.mark)) {
        return PyObject_Vectorcall(self->python, args, nargsf, keywords);
    }
    PyObject *tracker = current_tracker(), *run = NULL, *result;
    if (tracker != NULL && Py_IS_TYPE(tracker, driver.tracker)) {
        run = find_run(tracker, mark);
    }
    PyObject *own = run != NULL && restart(run) ? unmarked(args[1], position) : NULL;
    if (own != NULL) {
        PyObject *all[GRADIENT_ARGUMENTS];
        memcpy(all, args, sizeof all);
        all[1] = own;
        result = call_as_run(self, tracker, run, all);
        Py_DECREF(own);
    }
    else {
        result = PyErr_Occurred() ? NULL
                                  : PyObject_Vectorcall(self->python, args, nargsf, keywords);
    }
    Py_XDECREF(run);
    Py_XDECREF(tracker);
    return result;
}

/* What tapes call in the place of TensorFlow's function. */
static PyObject *
call_gradient_function(PyObject *callable, PyObject *const *args, size_t nargsf,
                       PyObject *keywords)
{
    /* TensorFlow does not hold what it calls: another function may take its place meanwhile. */
    Py_INCREF(callable);
    PyObject *result = differentiate((Function *)callable, args, nargsf, keywords);
    Py_DECREF(callable);
    return result;
}

/* ---- the type of both ------------------------------------------------------------------------ */

static int
function_traverse(Function *self, visitproc visit, void *arg)
{
    Py_VISIT(self->vanilla);
    Py_VISIT(self->python);
    Py_VISIT(self->value_of);
    Py_VISIT(self->ended);
    Py_VISIT(self->values);
    return 0;
}

static int
function_clear(Function *self)
{
    Py_CLEAR(self->vanilla);
    Py_CLEAR(self->python);
    Py_CLEAR(self->value_of);
    Py_CLEAR(self->ended);
    Py_CLEAR(self->values);
    return 0;
}

static void
function_dealloc(Function *self)
{
    PyObject_GC_UnTrack(self);
    if (self->weak != NULL) {
        PyObject_ClearWeakRefs((PyObject *)self);
    }
    function_clear(self);
    PyObject_GC_Del(self);
}

/* It has the name, the module and the documentation of the function in Python. */
static PyObject *
function_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttr(((Function *)self)->python, name);
    }
    return found;
}

static PyObject *
function_attribute(PyObject *self, void *name)
{
    return PyObject_GetAttrString(((Function *)self)->python, name);
}

/* The type has attributes of these names, which come first. */
static PyGetSetDef function_properties[] = {
    {"__doc__", function_attribute, NULL, NULL, "__doc__"},
    {"__module__", function_attribute, NULL, NULL, "__module__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Function_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_tensorflow_accel.fast_path.Function",
    .tp_basicsize = sizeof(Function),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Function, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_getattro = function_getattro,
    .tp_traverse = (traverseproc)function_traverse,
    .tp_clear = (inquiry)function_clear,
    .tp_dealloc = (destructor)function_dealloc,
    .tp_getset = function_properties,
    .tp_weaklistoffset = offsetof(Function, weak),
};

static PyObject *
new_function(vectorcallfunc vectorcall, PyObject *vanilla, PyObject *python)
{
    if (driver.tracker == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
        return NULL;
    }
    Function *self = PyObject_GC_New(Function, &Function_Type);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = vectorcall;
    self->vanilla = Py_NewRef(vanilla);
    self->python = Py_NewRef(python);
    self->value_of = self->ended = self->values = self->weak = NULL;
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* ---- setting up ------------------------------------------------------------------------------ */

PyDoc_STRVAR(fast_path_doc, "fast_path(vanilla, python, value_of, ended, values)\n\nA function in the "
"place of TFE_Py_FastPathExecute.\n\n"
"Args:\n    vanilla: TensorFlow's own.\n    python: the driver's, which decides on all else.\n"
"    value_of, ended: methods of its Interception.\n    values: is told of values of variables.");

static PyObject *
make_fast_path(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *vanilla, *python, *value_of, *ended, *values;
    if (!PyArg_ParseTuple(args, "OOOOO", &vanilla, &python, &value_of, &ended, &values)) {
        return NULL;
    }
    if (driver.values != NULL && !Py_IS_TYPE(values, driver.values)) {
        PyErr_SetString(PyExc_TypeError, "values are of another class than configure() was told");
        return NULL;
    }
    Function *self = (Function *)new_function(call_fast_path, vanilla, python);
    if (self != NULL) {
        self->value_of = Py_NewRef(value_of);
        self->ended = Py_NewRef(ended);
        self->values = Py_NewRef(values);
    }
    return (PyObject *)self;
}

PyDoc_STRVAR(gradient_function_doc, "gradient_function(vanilla, python)\n\nA function in the place "
"of the one that tapes call for each record.\n\n"
"Args:\n    vanilla: TensorFlow's own.\n    python: the driver's, which runs all others.");

static PyObject *
make_gradient_function(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *vanilla, *python;
    if (!PyArg_ParseTuple(args, "OO", &vanilla, &python)) {
        return NULL;
    }
    return new_function(call_gradient_function, vanilla, python);
}

static int
find_slots(void)
{
    const Slot slots[] = {
        {driver.tracker, "thread", &at.tracker_thread},
        {driver.tracker, "local", &at.tracker_local},
        {driver.tracker, "cells", &at.tracker_cells},
        {driver.tracker, "stale", &at.tracker_stale},
        {driver.tracker, "outdated", &at.tracker_outdated},
        {driver.tracker, "muted", &at.tracker_muted},
        {driver.tracker, "marking", &at.tracker_marking},
        {driver.tracker, "run", &at.tracker_run},
        {driver.tracker, "watches", &at.tracker_watches},
        {driver.tracker, "depth", &at.tracker_depth},
        {driver.tracker, "passes", &at.tracker_passes},
        {driver.tracker, "native", &at.tracker_native},
        {driver.tracker, "generation", &at.tracker_generation},
        {driver.tracker, "sums", &at.tracker_sums},
        {driver.tracker, "gradients", &at.tracker_gradients},
        {driver.any_scope, "cells", &at.scope_cells},
        {driver.slow_path, "plan", &at.slow_plan},
        {driver.slow_path, "may_pass", &at.slow_may_pass},
        {driver.inlined, "plan", &at.inlined_plan},
        {driver.inlined, "counters", &at.inlined_counters},
        {driver.inlined, "timers", &at.inlined_timers},
        {driver.plan, "claims", &at.plan_claims},
        {driver.plan, "is_claim", &at.plan_is_claim},
        {driver.plan, "driver_data", &at.plan_data},
        {driver.claim, "marked", &at.claim_marked},
        {driver.claim, "passes", &at.claim_passes},
        {driver.mark, "op_id", &at.mark_op_id},
        {driver.mark, "generation", &at.mark_generation},
        {driver.mark, "shared", &at.mark_shared},
        {driver.known, "run", &at.known_run},
        {driver.run, "mark", &at.run_mark},
        {driver.run, "is_running", &at.run_is_running},
        {driver.run, "cells", &at.run_cells},
        {driver.run, "scopes", &at.run_scopes},
        {driver.run, "produced", &at.run_produced},
        {driver.counter, "count", &at.counter_count},
        {driver.timer, "executions", &at.timer_executions},
        {driver.timer, "nanoseconds", &at.timer_nanoseconds},
        {driver.timer, "log", &at.timer_log},
        {driver.timer, "number", &at.timer_number},
        {driver.log, "numbers", &at.log_numbers},
        {driver.log, "due", &at.log_due},
        {driver.values, "known", &at.values_known},
        {driver.values, "handles", &at.values_handles},
        {driver.values, "most", &at.values_most},
        {driver.source, "handle", &at.source_handle},
    };
    return find_offsets(slots, sizeof slots / sizeof *slots);
}

PyDoc_STRVAR(configure_doc,
"configure(objects)\n\nName what the driver is made of, once per process.\n\n"
"Args:\n    objects: a dict, see amanda_tensorflow.eager.accelerator.\n\n"
"Raises:\n    TypeError: one is missing, or not as it is expected.\n"
"    AttributeError: a class lacks a slot.");

/* Take from a dict what is to be there; a class, where `type` says so. */
static PyObject *
taken(PyObject *objects, const char *name, PyTypeObject *type)
{
    PyObject *found = PyDict_Check(objects) ? PyDict_GetItemString(objects, name) : NULL;
    if (found == NULL || (type != NULL && !PyObject_TypeCheck(found, type))) {
        PyErr_Format(PyExc_TypeError, "%s is missing, or no %s", name,
                     type == NULL ? "object" : type->tp_name);
        return NULL;
    }
    return Py_NewRef(found);
}

static PyObject *
configure(PyObject *Py_UNUSED(module), PyObject *objects)
{
    struct {
        const char *name;
        void *place;
        PyTypeObject *type;
    } all[] = {
        {"any_scope", &driver.any_scope, &PyType_Type},
        {"slow_path", &driver.slow_path, &PyType_Type},
        {"inlined", &driver.inlined, &PyType_Type},
        {"plan", &driver.plan, &PyType_Type},
        {"claim", &driver.claim, &PyType_Type},
        {"mark", &driver.mark, &PyType_Type},
        {"known", &driver.known, &PyType_Type},
        {"run", &driver.run, &PyType_Type},
        {"counter", &driver.counter, &PyType_Type},
        {"timer", &driver.timer, &PyType_Type},
        {"log", &driver.log, &PyType_Type},
        {"variable", &driver.variable, &PyType_Type},
        {"values", &driver.values, &PyType_Type},
        {"source", &driver.source, &PyType_Type},
        {"numbers", &driver.numbers, NULL},
        {"local", &driver.local, NULL},
        {"read", &driver.read, NULL},
        {"reading", &driver.reading, &PyFrozenSet_Type},
        {"plain", &driver.plain, &PyTuple_Type},
        {"no_tape_records", &driver.no_tape_records, NULL},
        {"parts", &driver.parts, &PyTuple_Type},
        {"told", &driver.told, &PyTuple_Type},
        {"mark_name", &driver.mark_name, &PyUnicode_Type},
        /* Last: it says that all are there. */
        {"tracker", &driver.tracker, &PyType_Type},
    };
    Py_CLEAR(driver.tracker);
    configuration++;
    forget_steps();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        PyObject *found = taken(objects, all[i].name, all[i].type);
        if (found == NULL) {
            return NULL;
        }
        PyObject **place = all[i].place;
        Py_XSETREF(*place, found);
    }
    if (PyTuple_GET_SIZE(driver.parts) != 3) {
        PyErr_SetString(PyExc_TypeError, "a variable has three parts");
    }
    if (PyErr_Occurred() || find_slots() < 0) {
        Py_CLEAR(driver.tracker);
        return NULL;
    }
    configure_numbers(driver.numbers);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(configure_native_doc,
"configure_native(data, is_empty, context, local, execute, binding)\n\nName functions in C++ that are "
"called instead of their bindings, after configure().\n\n"
"Attributes of `local` are set to other values meanwhile, and put back.\n\n"
"Args:\n    data, is_empty, execute: addresses, of what gives what a context knows of the current\n"
"        thread, of what says whether no tape records, and of what runs operators.\n"
"    context: TensorFlow's.\n    local: the object that stands for what it knows of a thread.\n"
"    binding: TFE_Py_FastPathExecute.\n\n"
"Returns:\n    Whether they tell the same as their bindings; they are not called if not.");

/* Whether both functions that run operators refuse a call without arguments by the same error; -1 with
   another one. */
static int
refuse_alike(void)
{
    PyObject *none = PyTuple_New(0), *said[2] = {NULL, NULL};
    for (int i = 0; none != NULL && i < 2; i++) {
        PyObject *result = i == 0 ? PyObject_Call(native.binding, none, NULL) : native.execute(none);
        PyObject *error = NULL;
        if (result == NULL && PyErr_ExceptionMatches(PyExc_ValueError)) {
#if PY_VERSION_HEX >= 0x030C0000
            error = PyErr_GetRaisedException();
#else
            PyObject *type, *trace;
            PyErr_Fetch(&type, &error, &trace);
            PyErr_NormalizeException(&type, &error, &trace);
            Py_XDECREF(type);
            Py_XDECREF(trace);
#endif
        }
        said[i] = error == NULL ? NULL : PyObject_Repr(error);
        Py_XDECREF(error);
        Py_XDECREF(result);
        if (said[i] == NULL) {
            break;
        }
    }
    int is_same = said[1] == NULL ? (PyErr_Occurred() ? -1 : 0)
                                  : PyObject_RichCompareBool(said[0], said[1], Py_EQ);
    Py_XDECREF(none);
    Py_XDECREF(said[0]);
    Py_XDECREF(said[1]);
    return is_same;
}

static PyObject *
configure_native(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long data, is_empty, execute;
    PyObject *context, *local, *binding;
    if (!PyArg_ParseTuple(args, "KKOOKO", &data, &is_empty, &context, &local, &execute, &binding)) {
        return NULL;
    }
    configuration++;
    memset(&run_time, 0, sizeof run_time);
    native.is_empty = NULL;
    int wanted = no_tape_records();
    Py_XSETREF(native.context, Py_NewRef(context));
    Py_XSETREF(native.local, Py_NewRef(local));
    Py_XSETREF(native.binding, Py_NewRef(binding));
    native.data = (char *(*)(PyObject *))(uintptr_t)data;
    native.is_empty = (PyObject * (*)(void))(uintptr_t)is_empty;
    native.execute = (PyObject * (*)(PyObject *))(uintptr_t)execute;
    if (wanted < 0 || no_tape_records() != wanted || !find_values() || refuse_alike() != 1) {
        native.data = NULL;
        native.is_empty = NULL;
        native.execute = NULL;
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    }
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"configure", configure, METH_O, configure_doc},
    {"configure_native", configure_native, METH_VARARGS, configure_native_doc},
    {"configure_readings", configure_readings, METH_VARARGS, configure_readings_doc},
    {"fast_path", make_fast_path, METH_VARARGS, fast_path_doc},
    {"gradient_function", make_gradient_function, METH_VARARGS, gradient_function_doc},
    {NULL, NULL, 0, NULL},
};

static int
make_numbers(void)
{
    for (int i = 0; i < SMALL_NUMBERS; i++) {
        small_numbers[i] = PyLong_FromLong(i);
        if (small_numbers[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
make_names(void)
{
    struct {
        PyObject **name;
        const char *text;
    } all[] = {
        {&names.tracker, "tracker"},
        {&names.dict, "__dict__"},
        {&names.switches[PAUSED], "paused"},
        {&names.switches[ENABLED], "enabled"},
        {&names.switches[HELD], "held"},
        {&names.switches[SCOPES], "scopes"},
        {&names.scope_name, "scope_name"},
        {&names.op_callbacks, "op_callbacks"},
        {&names.is_eager, "is_eager"},
        {&names.read_variable, "ReadVariableOp"},
        {&names.dtype, "dtype"},
        {&names.identity, "Identity"},
        {&names.note, "note"},
        {&names.note_owner, "note_owner"},
        {&names.leave, "leave"},
        {&names.device_name, "device_name"},
        {&names.as_datatype_enum, "as_datatype_enum"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].name = PyUnicode_InternFromString(all[i].text);
        if (*all[i].name == NULL) {
            return -1;
        }
    }
    return 0;
}

static int
fast_path_exec(PyObject *Py_UNUSED(module))
{
    /* Python 3.12 refuses it by itself. What is here belongs to the process. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "the fast path works in the main interpreter only");
        return -1;
    }
    return make_names() < 0 || make_numbers() < 0 ? -1 : PyType_Ready(&Function_Type);
}

static PyModuleDef_Slot fast_path_slots[] = {
    {Py_mod_exec, fast_path_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef fast_path_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "amanda_tensorflow_accel.fast_path",
    .m_doc = "Runs eager operators of TensorFlow that no tool acts on; see fast_path.c.",
    .m_methods = methods,
    .m_slots = fast_path_slots,
};

PyMODINIT_FUNC
PyInit_fast_path(void)
{
    return PyModuleDef_Init(&fast_path_module);
}
