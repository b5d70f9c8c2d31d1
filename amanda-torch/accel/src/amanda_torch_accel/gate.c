/* The gate: the operators of PyTorch that no tool wants run past Amanda without Python.
 *
 * PyTorch reports an operator to Python only where a TorchFunctionMode is on the thread's stack of
 * modes, and that costs about a microsecond per operator. The gate keeps Amanda's mode off that
 * stack, and notices the operators itself: it puts functions of its own in the place of those that
 * PyTorch's builtins call. They ask what Amanda's tracker (amanda_torch.eager.op_ids) knows of the
 * operator, and
 *   - call the original directly, if it is known that no tool acts on it;
 *   - call the way to run it that is known, if tools act on it;
 *   - put the mode on the stack for this one call, if there is anything to ask: PyTorch then
 *     reports the operator as it always does, and the same Python code as without the gate runs.
 *
 * The mode that is kept off the stack is called virtual. Every question about the stack that
 * Python asks (push, pop, length, the mode at a position) is answered as if it lay there, and a
 * mode that is pushed above it makes it real. So there is one description of what is an operator,
 * of its id and of what happens around it, and it is Python's.
 *
 * What is replaced:
 *   methods             PyMethodDef.ml_meth, from which all forms of a call read it, `a + b` and
 *                       the specialised instructions of CPython 3.11 to 3.14 included; one
 *                       trampoline for each, since ml_meth is told nothing of where it is called
 *   functions           PyCFunctionObject.vectorcall, which is free where the arguments are a
 *                       tuple and a dict. Not ml_meth: the hash of a function is made of it, and
 *                       programs keep torch.add and the like in dictionaries
 *   a[i], a[i] = b      the slots of the type and of its subclasses, and of the descriptors
 *   a.T and the like    PyGetSetDef.get
 *   module(x)           the vectorcall of the function that the driver puts there
 *   torch.ops           nothing here: the driver sets objects of the type Call
 *
 * Everything is under the GIL: there is no other lock, and free-threaded builds are refused.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "the gate writes into functions that all threads call: it needs a Python with the GIL"
#endif
#ifdef PYPY_VERSION
#error "the gate replaces parts of CPython's own objects"
#endif

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#define APART
#define RARE
#else
#define THREAD_LOCAL _Thread_local
/* Between two operators PyTorch runs more code than the processor's first cache holds, so that each of them
   reads the gate's anew: it costs as much as there are lines of it. What is not always run lies elsewhere. */
#define APART __attribute__((noinline))
#define RARE __attribute__((noinline, cold))
#endif

/* The size of a line of the processor's caches. */
#define LINE 64

/* Have the processor read a line of memory that is needed soon; any address will do. */
#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* ---- what is called -------------------------------------------------------------------------- */

typedef enum {
    KEYWORDS,   /* a method that takes (self, args, kwargs) */
    PLAIN,      /* a method that takes (self, argument): none, one, or a tuple, by `flags` */
    FUNCTION,   /* a function that takes (self, args, kwargs) */
    GETTER,     /* a property */
    SUBSCRIPT,  /* a[i] */
    ASSIGNMENT, /* a[i] = b, del a[i] */
    CALLABLE,   /* what a Call object stands for */
} Kind;

/* Types of arguments that are remembered of each builtin, see note_signature(). */
#define FITTING 8

/* One place in which something was replaced. What each call needs comes first. */
typedef struct {
    Kind kind;
    int flags;
    void *original;     /* what stood there */
    PyObject *operator; /* what PyTorch reports to a mode; NULL as long as it is not known */
    int unreported;     /* calls in a row that PyTorch has reported nothing of */
    int reports_first;  /* it is reported before PyTorch looks at its arguments */
    PyObject *owner;    /* the descriptor or function; keeps the place alive */
    void *closure;      /* of a getter */
    const char *name;
    void *place;        /* PyMethodDef, PyCFunctionObject or PyGetSetDef */
    uint64_t fitting[FITTING]; /* signatures of calls that were reported, the last ones */
    unsigned fitting_count;
} Site;

/* Calls without a report after which a builtin is taken to be none that reports itself. */
#define SILENT 3

/* One call of what a site stands for. */
typedef struct {
    Site *site;
    PyObject *operator; /* if it is known from the call */
    PyObject *self;     /* of methods and functions; the tensor of a[i] */
    PyObject *args;     /* a tuple or the argument, by the kind of the site; i of a[i] */
    PyObject *kwargs;   /* a dict or NULL; b of a[i] = b */
    PyObject *target;   /* of a CALLABLE, with its arguments as vectorcall has them */
    PyObject *const *stack;
    size_t nargsf;
    PyObject *names;
} Invocation;

static PyObject *
run_original(const Invocation *call)
{
    Site *site = call->site;
    switch (site->kind) {
    case KEYWORDS:
    case FUNCTION:
        return ((PyCFunctionWithKeywords)(void (*)(void))site->original)(call->self, call->args,
                                                                         call->kwargs);
    case PLAIN:
        return ((PyCFunction)(void (*)(void))site->original)(call->self, call->args);
    case GETTER:
        return ((getter)(void (*)(void))site->original)(call->self, site->closure);
    case SUBSCRIPT:
        return ((binaryfunc)(void (*)(void))site->original)(call->self, call->args);
    case ASSIGNMENT:
        if (((objobjargproc)(void (*)(void))site->original)(call->self, call->args,
                                                            call->kwargs) < 0) {
            return NULL;
        }
        return Py_NewRef(Py_None);
    case CALLABLE:
        return PyObject_Vectorcall(call->target, call->stack, call->nargsf, call->names);
    }
    Py_UNREACHABLE();
}

/* ---- Python's objects ------------------------------------------------------------------------ */

/* The objects of the tracker are Python's, with __slots__; these are the offsets of the slots. */
static struct {
    PyTypeObject *mode, *frame, *child, *known;
    Py_ssize_t mode_cells, mode_frame, mode_root, mode_generation, mode_stale, mode_thread,
        mode_iteration;
    Py_ssize_t frame_cells, frame_names, frame_children, frame_generation, frame_caller;
    Py_ssize_t child_ref, child_transparent, child_fused, child_calls, child_frames;
    Py_ssize_t known_run, known_claim, known_before, known_after, known_claims, known_gradients;
    Py_ssize_t known_claimed, known_checked, known_iterations, known_op_id, known_owners;
    Py_ssize_t known_name, known_layout, known_blind, known_around_before, known_around_after;
    Py_ssize_t known_resumed_before, known_resumed_after;
    PyObject *no_operator; /* the cell of functions that are no operators */
    PyObject *is_report_of; /* Python function: (name of a builtin, what is reported) -> bool */
} python;

static PyObject *zero, *one, *paused_name;

static PyObject *
field(PyObject *object, Py_ssize_t offset)
{
    return *(PyObject **)((char *)object + offset);
}

static void
set_field(PyObject *object, Py_ssize_t offset, PyObject *value)
{
    PyObject **place = (PyObject **)((char *)object + offset), *old = *place;
    *place = Py_NewRef(value);
    Py_XDECREF(old);
}

/* Numbers that are counted with, without CPython's functions where they are small. */

#define SMALL_NUMBERS 256
static PyObject *small_numbers[SMALL_NUMBERS];

static int
make_numbers(void)
{
    for (long i = 0; i < SMALL_NUMBERS; i++) {
        small_numbers[i] = PyLong_FromLong(i);
        if (small_numbers[i] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* PyLong_FromSsize_t() of a number that is not negative. */
static inline PyObject *
new_number(Py_ssize_t number)
{
    return number < SMALL_NUMBERS ? Py_NewRef(small_numbers[number]) : PyLong_FromSsize_t(number);
}

/* PyLong_AsSsize_t() */
static inline Py_ssize_t
number_of(PyObject *object)
{
#if PY_VERSION_HEX >= 0x030C0000
    if (PyLong_CheckExact(object) && PyUnstable_Long_IsCompact((PyLongObject *)object)) {
        return PyUnstable_Long_CompactValue((PyLongObject *)object);
    }
#else
    Py_ssize_t digits = Py_SIZE(object);
    if (PyLong_CheckExact(object) && digits >= -1 && digits <= 1) {
        return digits == 0 ? 0 : digits * (Py_ssize_t)((PyLongObject *)object)->ob_digit[0];
    }
#endif
    return PyLong_AsSsize_t(object);
}

/* ---- what comes next ------------------------------------------------------------------------- */

/* Each change of a dict gives it another number, which no other dict has had, in versions of CPython before
   3.12. There, what was found by a key that is told by its address stands for the same value as long as the
   dict has the same number; in later versions dicts are asked each time. */
#if PY_VERSION_HEX < 0x030C0000
#define HAS_VERSIONS 1
static inline uint64_t
version_of(PyObject *dict)
{
    return ((PyDictObject *)dict)->ma_version_tag;
}

typedef struct {
    uint64_t version;
    const void *key;
    PyObject *value;
} Found;

#define FOUND_ITEMS 8192
static Found found_items[FOUND_ITEMS];
#else
#define HAS_VERSIONS 0
#endif

/* An iteration mostly does what the one before it did, in the same order, and between two operators PyTorch
   reads more memory than the processor's caches hold: what the gate looks at has to be fetched anew, and
   that costs more than all instructions of the gate. So it notes at each step, which is an operator or a
   call of a module, what it has found and where it has looked. In the next iteration the processor is told
   to fetch that one step before it is needed.

   The course that is kept is that of one thread at a time. It is there for speed alone: nothing is read at
   the addresses that are noted, since the objects may be gone, and what a step does not hold is looked up. */
#define STEP_LINES 28
typedef struct {
#if HAS_VERSIONS
    Found found;
#endif
    Py_ssize_t noted;
    uintptr_t lines[STEP_LINES];
} Step;

#define STEPS 8192
#define STRANGERS 4096
static struct {
    Step steps[STEPS + 2]; /* the last but one is for steps that it does not hold */
    const void *thread, *iteration; /* whose steps they are; compared only */
    Py_ssize_t next, end; /* of steps: the number of the next one, and how many there have been */
    int strangers;        /* steps of other threads since its last one */
    Step *step;           /* the one that is noted in */
} course = {.step = &course.steps[STEPS]};

/* Have what lies there fetched in the next iteration before this step. */
static inline void
note(const void *address)
{
    Step *step = course.step;
    uintptr_t line = (uintptr_t)address & ~(uintptr_t)(LINE - 1);
    if (step->noted < STEP_LINES && (step->noted == 0 || step->lines[step->noted - 1] != line)) {
        step->lines[step->noted++] = line;
    }
}

/* A step begins, in an iteration of a thread. */
static inline void
begin_step(const void *thread, const void *iteration)
{
    if (course.thread != thread || course.iteration != iteration) {
        if (course.thread != thread && course.thread != NULL && ++course.strangers < STRANGERS) {
            course.step = &course.steps[STEPS];
            return;
        }
        course.thread = thread;
        course.iteration = iteration;
        course.next = 0;
    }
    course.strangers = 0;
    Step *step = course.step = &course.steps[course.next];
    if (course.next == STEPS) {
        return;
    }
    if (++course.next > course.end) {
        course.end = course.next;
    }
    for (Py_ssize_t i = 0; i < step[1].noted; i++) {
        PREFETCH((const void *)step[1].lines[i]);
    }
    PREFETCH(&step[2]);
    PREFETCH((const char *)&step[2] + LINE);
    step->noted = 0;
}

#if HAS_VERSIONS
/* The first of the two places that each key has; the other one is beside it. */
static inline Found *
places_of(PyObject *dict, const void *key)
{
    uint64_t mixed = (version_of(dict) ^ ((uint64_t)(uintptr_t)key << 7)) * 0x9E3779B97F4A7C15u;
    return &found_items[(mixed >> 32) % FOUND_ITEMS & ~(uint64_t)1];
}

/* The value that keep_found() was told of (borrowed); NULL if it was not. */
static inline PyObject *
look_found(PyObject *dict, const void *key)
{
    Step *step = course.step;
    uint64_t version = version_of(dict);
    if (step->found.version == version && step->found.key == key) {
        return step->found.value;
    }
    const Found *found = places_of(dict, key);
    for (int i = 0; i < 2; i++, found++) {
        if (found->version == version && found->key == key) {
            step->found = *found;
            return found->value;
        }
    }
    return NULL;
}

static APART void
keep_found(PyObject *dict, const void *key, PyObject *value)
{
    Found *found = places_of(dict, key);
    /* The later version is the one that is in use. */
    found += found[0].version > found[1].version;
    course.step->found = *found = (Found){version_of(dict), key, value};
}

/* Of keys that may be gone: another object may get their address. */
static void
forget_found(void)
{
    memset(found_items, 0, sizeof found_items);
    memset(course.steps, 0, (size_t)course.end * sizeof *course.steps);
    course.steps[STEPS].found = (Found){0};
}
#else
#define look_found(dict, key) ((PyObject *)NULL)
#define keep_found(dict, key, value) ((void)0)
#define forget_found() ((void)0)
#endif

static int
is_alive(PyObject *reference, PyObject *object)
{
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *found = NULL;
    int is_same = reference != NULL && PyWeakref_Check(reference)
                  && PyWeakref_GetRef(reference, &found) == 1 && found == object;
    Py_XDECREF(found);
    return is_same;
#else
    return reference != NULL && PyWeakref_Check(reference)
           && PyWeakref_GET_OBJECT(reference) == object;
#endif
}

/* Runs code between a failed call and the way back to Python. */
#if PY_VERSION_HEX >= 0x030C0000
#define KEEPING_ERROR(code)                          \
    do {                                             \
        PyObject *kept_ = PyErr_GetRaisedException(); \
        code;                                        \
        PyErr_SetRaisedException(kept_);             \
    } while (0)
#else
#define KEEPING_ERROR(code)                  \
    do {                                     \
        PyObject *type_, *value_, *trace_;   \
        PyErr_Fetch(&type_, &value_, &trace_); \
        code;                                \
        PyErr_Restore(type_, value_, trace_); \
    } while (0)
#endif

/* ---- the stack of modes ---------------------------------------------------------------------- */

/* A builtin of PyTorch's that the gate calls, and answers in the place of. */
typedef struct {
    PyObject *owner, *self;
    PyMethodDef *def;
    PyCFunction original;
    PyMethodDef own; /* of a method: what its descriptor refers to instead, as `def` may be const */
} Builtin;

static struct {
    Builtin push, pop, length, at, is_disabled;
    Builtin disable, enable; /* DisableTorchFunction's __enter__ and __exit__ */
    Builtin place, replace;  /* torch.device's, which push and pop a mode in C++ */
    Builtin is_recording;    /* torch.is_grad_enabled() */
} stack;

typedef struct TimedPass TimedPass;

/* Of the current thread: its virtual mode (a strong reference), and how many modes lie below it;
   the site whose report is awaited; how many reports have come. */
typedef struct {
    PyObject *mode;
    Py_ssize_t depth;
    unsigned session;
    Site *awaited;
    int reports;
    unsigned long native; /* see native_thread() */
    TimedPass *timed;     /* the backward pass whose executions are noted, or was last */
#if HAS_VERSIONS
    uint64_t unpaused; /* the version of the thread's state in which it was found not to be paused */
#endif
} Thread;

static THREAD_LOCAL Thread thread;

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

static PyObject *
hook_push(PyObject *Py_UNUSED(self), PyObject *mode)
{
    if (is_ours(mode)) {
        return push_ours(mode) < 0 ? NULL : Py_NewRef(Py_None);
    }
    if (virtual_mode() != NULL && make_real() < 0) {
        return NULL;
    }
    return call_builtin(&stack.push, mode);
}

static PyObject *
hook_pop(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(argument))
{
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
hook_length(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(argument))
{
    Py_ssize_t length = real_length();
    return length < 0 ? NULL : PyLong_FromSsize_t(length + (virtual_mode() != NULL));
}

static PyObject *
hook_at(PyObject *self, PyObject *args, PyObject *kwargs)
{
    Py_ssize_t index;
    if (virtual_mode() != NULL && length_around() >= 0 && kwargs == NULL && PyTuple_GET_SIZE(args) == 1) {
        index = PyLong_AsSsize_t(PyTuple_GET_ITEM(args, 0));
        if (index == thread.depth) {
            return Py_NewRef(thread.mode);
        }
        if (index > thread.depth) {
            return real_at(index - 1);
        }
        PyErr_Clear();
    }
    return ((PyCFunctionWithKeywords)(void (*)(void))stack.at.original)(self, args, kwargs);
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

/* ---- functions of PyTorch's in C++ ----------------------------------------------------------- */

/* What is asked at each operator, by functions that take and return numbers. Python's way to them takes
   some 500 instructions of pybind11's. NULL before configure_native(). */
static struct {
    uint64_t (*sequence)(void);  /* the number of the next node of autograd */
    int (*task)(void);           /* the number of the current pass, -1 without one */
    _Bool (*is_included)(uint16_t); /* whether a dispatch key is on in this thread */
    _Bool (*is_recording)(void);    /* whether operators are recorded for gradients */
    uint16_t keys[4];             /* those that are on in transforms and tracers; 0 is none */
    Builtin depth;                /* how many dispatch modes there are */
    PyObject *checks, *plain;     /* what is left to be asked of `inlined.checks` and `.plain` */
    PyTypeObject *meta;           /* the class of torch.autograd.Function */
    const char *(*node)(const void *);     /* the node of a tensor as it was set last, or NULL */
    PyObject *(*object)(const void *);     /* the object that stands for the node of an edge */
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

/* ---- inlined routines ------------------------------------------------------------------------ */

/* What amanda.inline and the driver's hooks are made of; NULL before configure_inlined(). */
static struct {
    PyObject *counter, *timer, *log;   /* classes of amanda.inline */
    PyObject *start;                   /* Timer.start */
    PyObject *clock, *native;          /* time.perf_counter_ns, threading.get_native_id */
    PyObject *look;                    /* look(log, now): has a log looked at, as a routine */
    PyObject *check, *before;          /* a class of amanda.inline, and its method */
    PyObject *sums, *add_after;        /* likewise: sums, and the second of their routines */
    PyObject *tensors;                 /* the classes of tensors that C looks at */
    PyObject *sum, *item;              /* methods of tensors */
    PyObject *set_recording;           /* torch.set_grad_enabled(), as a function */
    PyObject *plain;                   /* functions, or a dict and a key: what they give says no
                                          where tensors are plain */
    PyObject *graph, *gradients, *hooks, *routines, *handle; /* classes of the driver and of core */
    PyObject *kinds;                   /* of classes of nodes, see KINDS of the driver */
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
    PyObject *raised, *changed;        /* tell of what a routine has raised, or changed in place */
} inlined;

static struct {
    Py_ssize_t counter_count;
    Py_ssize_t timer_started, timer_executions, timer_nanoseconds, timer_log, timer_number;
    Py_ssize_t log_numbers, log_due;
    Py_ssize_t check_held, check_overwrites, check_trail, check_name;
    Py_ssize_t sum_held, sum_weights, sum_amount, sum_executions, sum_total, sum_last, sum_of;
    Py_ssize_t gradients_graph, gradients_form, gradients_handle, gradients_leaves;
    Py_ssize_t graph_form, graph_natives, graph_inner;
    Py_ssize_t hooks_before, hooks_after, hooks_dispatcher, hooks_key, hooks_handle, handle_scopes;
    Py_ssize_t routines_before, routines_after;
    Py_ssize_t layout_func, layout_keywords, layout_types, layout_lists, layout_places,
        layout_in_place;
    Py_ssize_t action_func, action_select, action_kwargs;
} at;

static struct {
    PyObject *cache, *enabled, *held, *settled, *quiet, *dict, *grad_fn, *next_functions, *sequence,
        *register_prehook, *register_hook, *before, *after, *base, *metadata, *variable, *mark,
        *op_id, *append, *scopes, *statistics, *seconds,
        *expect, *shape, *registrar, *dict_ref;
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
        {&names.append, "append"},
        {&names.scopes, "scopes"},
        {&names.statistics, "statistics"},
        {&names.seconds, "tool_seconds"},
        {&names.expect, "expect"},
        {&names.shape, "shape"},
        {&names.registrar, "_register_hook"},
        {&names.dict_ref, "hooks_dict_ref"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        *all[i].name = PyUnicode_InternFromString(all[i].text);
        if (*all[i].name == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Add to a number that nothing but a slot refers to, so that none has to be made: 1, or 0 where one has. */
static int
add_in_place(PyObject *number, uint64_t amount)
{
#if PY_VERSION_HEX < 0x030C0000
    Py_ssize_t digits = PyLong_CheckExact(number) ? Py_SIZE(number) : 0;
    if ((digits == 1 || digits == 2) && Py_REFCNT(number) == 1 && amount >> 2 * PyLong_SHIFT == 0) {
        digit *digits_of = ((PyLongObject *)number)->ob_digit;
        uint64_t sum =
            amount + digits_of[0] + (digits == 1 ? 0 : (uint64_t)digits_of[1] << PyLong_SHIFT);
        if (sum >> (digits * PyLong_SHIFT) == 0) {
            digits_of[0] = (digit)(sum & PyLong_MASK);
            if (digits == 2) {
                digits_of[1] = (digit)(sum >> PyLong_SHIFT);
            }
            return 1;
        }
    }
#else
    (void)number, (void)amount;
#endif
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

/* An array.array("q"), to whose end C adds where there is room. How it is laid out is proven, see
   configure_numbers(). */
typedef struct {
    PyObject_VAR_HEAD
    int64_t *items;
    Py_ssize_t room;
    const void *description;
    PyObject *references;
    Py_ssize_t exports;
} Numbers;

static PyTypeObject *numbers_type; /* NULL where they are laid out otherwise */
static const void *numbers_description;

/* Whether a sample, which has the numbers 1, 2 and 3, is laid out like that. */
static int
configure_numbers(PyObject *sample)
{
    Numbers *numbers = (Numbers *)sample;
    Py_buffer view;
    if (Py_TYPE(sample)->tp_basicsize != sizeof(Numbers) || Py_TYPE(sample)->tp_itemsize != 0
        || Py_SIZE(sample) != 3 || numbers->exports != 0) {
        return 0;
    }
    if (PyObject_GetBuffer(sample, &view, PyBUF_SIMPLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    int is_same = view.buf == numbers->items && view.len == 3 * sizeof(int64_t)
                  && numbers->exports == 1 && numbers->room >= 3 && numbers->references == NULL;
    for (int i = 0; is_same && i < 3; i++) {
        is_same = numbers->items[i] == i + 1;
    }
    PyBuffer_Release(&view);
    if (is_same && numbers->exports == 0) {
        numbers_type = (PyTypeObject *)Py_NewRef(Py_TYPE(sample));
        numbers_description = numbers->description;
        return 1;
    }
    return 0;
}

/* Whether C may write to the numbers of a log. */
static int
are_numbers(PyObject *object)
{
    return numbers_type != NULL && Py_IS_TYPE(object, numbers_type)
           && ((Numbers *)object)->description == numbers_description && ((Numbers *)object)->exports == 0;
}

/* Numbers for which room is made at once. */
#define ROOM 4096

/* Make room in an array that C may write to. By its own methods it grows by a sixteenth each time. */
static int
make_room(PyObject *numbers)
{
    static PyObject *zeros;
    if (zeros == NULL && (zeros = PyBytes_FromStringAndSize(NULL, ROOM * sizeof(int64_t))) != NULL) {
        memset(PyBytes_AS_STRING(zeros), 0, ROOM * sizeof(int64_t));
    }
    PyObject *none = zeros == NULL ? NULL : PyObject_CallMethod(numbers, "frombytes", "O", zeros);
    if (none == NULL) {
        return -1;
    }
    Py_DECREF(none);
    Py_SET_SIZE((PyVarObject *)numbers, Py_SIZE(numbers) - ROOM);
    return 0;
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
    if (!are_numbers(object)) {
        PyObject *none = PyObject_CallMethod(object, "extend", "((nLLk))", timer, start, end, id);
        Py_XDECREF(none);
        return none == NULL ? -1 : 0;
    }
    Numbers *numbers = (Numbers *)object;
    if (numbers->room - Py_SIZE(object) < 4 && make_room(object) < 0) {
        return -1;
    }
    int64_t *items = numbers->items + Py_SIZE(object);
    items[0] = timer;
    items[1] = start;
    items[2] = end;
    items[3] = (int64_t)id;
    Py_SET_SIZE((PyVarObject *)object, Py_SIZE(object) + 4);
    return 0;
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

static int flush_before(TimedPass *pass);

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
    if (flush_before(thread.timed) < 0 || append_execution(log, number, start, end) < 0) {
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

/* Run the routines of one point: counters, the two methods of timers, those of checks whose tensors
   have been looked at, and those of sums. `kind` is that of the execution, for sums. Those from `first`
   up to `last` are run. */
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

/* ---- hooks of autograd's nodes --------------------------------------------------------------- */

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

/* ---- checks ---------------------------------------------------------------------------------- */

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

/* The sum of finite numbers may overflow: only a finite sum is an answer. */
static int
is_finite_tensor(PyObject *tensor)
{
    PyObject *sum = PyObject_CallOneArg(inlined.sum, tensor), *number = NULL;
    if (sum != NULL) {
        number = PyObject_CallOneArg(inlined.item, sum);
        Py_DECREF(sum);
    }
    if (number == NULL) {
        /* There is no sum, or it has no number: quantized, nested, on the meta device. */
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

/* Add to a list what tells executions apart that have tensors of other shapes: 1; 0 where there are
   tensors of an unknown kind; -1 with an error. */
static int
add_shapes(PyObject *list, PyObject *value, int depth)
{
    PyObject *found = NULL;
    if (is_tensor(value)) {
        found = PyObject_GetAttr(value, names.shape);
        if (found == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
            PyErr_Clear();
            return 0;
        }
    }
    else if (depth > 0 && (PyTuple_Check(value) || PyList_CheckExact(value))) {
        int is_known = PyList_Append(list, (PyObject *)Py_TYPE(value)) < 0 ? -1 : 1;
        for (Py_ssize_t i = 0; is_known == 1 && i < PySequence_Fast_GET_SIZE(value); i++) {
            PyObject *item = Py_NewRef(PySequence_Fast_GET_ITEM(value, i));
            is_known = add_shapes(list, item, depth - 1);
            Py_DECREF(item);
        }
        /* Where it ends. */
        return is_known == 1 && PyList_Append(list, Py_None) < 0 ? -1 : is_known;
    }
    else if (has_no_tensor(value)) {
        found = Py_NewRef((PyObject *)Py_TYPE(value));
    }
    if (found == NULL) {
        return PyErr_Occurred() ? -1 : 0;
    }
    int failed = PyList_Append(list, found) < 0;
    Py_DECREF(found);
    return failed ? -1 : 1;
}

/* What an execution has in common with those whose tensors have the same shapes: a tuple; NULL, with
   or without an error, if that is not known. `keywords` are names, or NULL. */
static PyObject *
kind_of(PyObject *const *values, Py_ssize_t count, PyObject *keywords)
{
    PyObject *list = PyList_New(0), *kind = NULL;
    int is_known = list == NULL || (keywords != NULL && PyList_Append(list, keywords) < 0) ? -1 : 1;
    for (Py_ssize_t i = 0; is_known == 1 && i < count; i++) {
        is_known = add_shapes(list, values[i], 2);
    }
    if (is_known == 1) {
        kind = PyList_AsTuple(list);
    }
    Py_XDECREF(list);
    return kind;
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
    if (here->mode == NULL && here->session == session) {
        here->mode = mode;
    }
    else {
        push_back(mode);
    }
}

/* Whether the routines of a hook may run here: those of checks, where all gradients are finite, and
   those of sums, where the shapes have been met. `*kind` is for these, a strong reference. */
static int
pass_gradients(PyObject *routines, PyObject *const *values, Py_ssize_t count, PyObject **kind)
{
    int looks = count == 0 ? 0 : what_looks(routines), is_after = count > 1;
    if (!looks) {
        return 1;
    }
    int wanted = !(looks & CHECKS) ? 0 : is_after ? 1 : wants_inputs(routines);
    if (wanted > 1 || holds_inputs(routines)) {
        return 0;
    }
    Thread *here = &thread;
    PyObject *mode = virtual_mode_of(here);
    here->mode = NULL;
    int passed = is_plain_here();
    if (passed > 0 && wanted) {
        passed = look_at(values, 1, 1);
    }
    if (passed > 0 && is_after && (looks & SUMS)) {
        *kind = kind_of(values, 2, NULL);
        passed = *kind != NULL ? pass_kind(routines, *kind) : PyErr_Occurred() ? -1 : 0;
    }
    if (mode != NULL) {
        put_back(here, mode);
    }
    return passed;
}

/* Leave the start of a hook's timer to Python, or to another execution. */
static int
give_start(Hook *self)
{
    PyObject *timer = self->timer;
    if (timer == NULL) {
        return 0;
    }
    Timing timing = {timer, self->start, 0};
    self->timer = NULL;
    int failed = leave_start(&timing, self->thread);
    Py_DECREF(timer);
    return failed;
}

/* Forget the routines of a hook. It may run code of others, and the hook may be gone after it. */
static void
unsettle(Hook *hook)
{
    PyObject *routines = hook->routines, *quiet = hook->quiet;
    PyObject *before = hook->before, *after = hook->after;
    if (routines == NULL) {
        return;
    }
    KEEPING_ERROR({
        if (give_start(hook) < 0) {
            PyErr_Clear();
        }
    });
    if (hook->routines != routines) {
        return;
    }
    if (hook->previous != NULL) {
        hook->previous->next = hook->next;
    }
    else {
        settled_hooks = hook->next;
    }
    if (hook->next != NULL) {
        hook->next->previous = hook->previous;
    }
    hook->previous = hook->next = NULL;
    hook->routines = hook->quiet = hook->before = hook->after = NULL;
    Py_DECREF(routines);
    Py_DECREF(quiet);
    Py_XDECREF(before);
    Py_XDECREF(after);
}

static void
unsettle_all(void)
{
    while (settled_hooks != NULL) {
        unsettle(settled_hooks);
    }
}

PyDoc_STRVAR(forget_doc, "forget()\n\nThe dispatcher has dropped the routines that it had settled.");

static PyObject *
gate_forget(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    unsettle_all();
    Py_RETURN_NONE;
}

static void
keep_settled(Hook *self, PyObject *routines, PyObject *quiet)
{
    self->routines = Py_NewRef(routines);
    self->quiet = Py_NewRef(quiet);
    self->before = Py_XNewRef(field(routines, at.routines_before));
    self->after = Py_XNewRef(field(routines, at.routines_after));
    self->previous = NULL;
    self->next = settled_hooks;
    if (settled_hooks != NULL) {
        settled_hooks->previous = self;
    }
    settled_hooks = self;
}

/* The routines of a hook that its dispatcher has settled (a strong reference); NULL if there are
   none, and where Python is to say whether they may run. */
static PyObject *
find_settled(Hook *self)
{
    PyObject *dispatcher = field(self->hooks, at.hooks_dispatcher);
    PyObject *key = field(self->hooks, at.hooks_key), *found = NULL;
    if (dispatcher == NULL || key == NULL) {
        return NULL;
    }
    PyObject *settled = PyObject_GetAttr(dispatcher, names.settled);
    PyObject *quiet = PyObject_GetAttr(dispatcher, names.quiet);
    if (settled != NULL && PyDict_CheckExact(settled) && quiet != NULL && PyDict_CheckExact(quiet)) {
        found = PyDict_GetItemWithError(settled, key);
    }
    if (found != NULL && Py_IS_TYPE(found, (PyTypeObject *)inlined.routines)
        && is_plain_thread(quiet)) {
        Py_INCREF(found);
        /* Not after restore(), which forgets them all. */
        if (is_installed && self->routines == NULL) {
            keep_settled(self, found, quiet);
        }
    }
    else {
        found = NULL;
    }
    Py_XDECREF(settled);
    Py_XDECREF(quiet);
    PyErr_Clear();
    return found;
}

/* The routines of a hook if all are inlined (a strong reference); NULL if Python is to find them. */
static PyObject *
settled_routines(Hook *self, int is_after)
{
    PyObject *found, *settled = NULL;
    if (self->routines != NULL) {
        found = !is_plain_thread(self->quiet) ? NULL : is_after ? self->after : self->before;
    }
    else {
        settled = find_settled(self);
        found = settled == NULL ? NULL
                                : field(settled, is_after ? at.routines_after : at.routines_before);
    }
    found = found != NULL && PyTuple_CheckExact(found) ? Py_NewRef(found) : NULL;
    note_routines(found);
    Py_XDECREF(settled);
    return found;
}

static PyObject *
run_hook(Hook *self, PyObject *const *values, Py_ssize_t count)
{
    int is_after = count > 1;
    if (self->timer != NULL && self->thread == PyThread_get_thread_ident() && give_start(self) < 0) {
        return NULL;
    }
    PyObject *routines = settled_routines(self, is_after);
    if (routines != NULL) {
        PyObject *kind = NULL;
        int passed = pass_gradients(routines, values, count, &kind);
        if (passed > 0 && run_routines(routines, kind) < 0) {
            passed = -1;
        }
        Py_DECREF(routines);
        Py_XDECREF(kind);
        if (passed != 0) {
            return passed < 0 ? NULL : Py_NewRef(Py_None);
        }
    }
    PyObject *arguments[] = {self->hooks, count > 0 ? values[0] : NULL, is_after ? values[1] : NULL};
    return PyObject_VectorcallMethod(is_after ? names.after : names.before, arguments,
                                     (count > 2 ? 2 : count) + 1, NULL);
}

static PyObject *
hook_vectorcall(PyObject *self, PyObject *const *values, size_t nargsf, PyObject *Py_UNUSED(keywords))
{
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (unthrown != NULL) {
        return raise_unthrown();
    }
    if (count > 0 && nothing_flows(values[count - 1])) {
        Py_RETURN_NONE;
    }
    return run_hook((Hook *)self, values, count);
}

/* The timer whose two routines are the last one before and the first one after the node (borrowed), if
   all of them are inlined; NULL for none. */
static PyObject *
timer_of_hook(const Hook *self)
{
    PyObject *before = self->before, *after = self->after;
    int are_known = self->routines != NULL && before != NULL && after != NULL;
    return are_known && PyTuple_CheckExact(before) && PyTuple_CheckExact(after)
               ? timer_around(before, after)
               : NULL;
}

/* Run the routines of one point at a node, without the dict of a timer whose two routines are around it:
   an execution in another thread, or within this one, is noted there. */
static int
run_around_node(Hook *self, PyObject *routines, PyObject *timer, int is_after)
{
    unsigned long thread = PyThread_get_thread_ident();
    Py_ssize_t count = PyTuple_GET_SIZE(routines);
    if (is_after) {
        if (self->timer != timer || self->thread != thread) {
            return run_routines(routines, NULL);
        }
        Timing timing = {timer, self->start, read_nanoseconds()};
        Py_CLEAR(self->timer);
        return timing.end < 0 || add_timing(&timing) < 0 || run_some(routines, NULL, 1, count) < 0
                   ? -1
                   : 0;
    }
    if (self->timer != NULL && self->thread != thread) {
        return run_routines(routines, NULL);
    }
    if (give_start(self) < 0 || run_some(routines, NULL, 0, count - 1) < 0
        || (self->start = read_nanoseconds()) < 0) {
        return -1;
    }
    Py_XSETREF(self->timer, Py_NewRef(timer));
    self->thread = thread;
    return 0;
}

/* The same without the gradients: 1 if it was done, 0 where these are to be looked at, or Python is to do
   it, -1 with an error. */
static int
run_unseen(Hook *self, int is_after)
{
    PyObject *routines = settled_routines(self, is_after);
    if (routines == NULL || what_looks(routines)) {
        Py_XDECREF(routines);
        return 0;
    }
    PyObject *timer = Py_XNewRef(timer_of_hook(self));
    int failed = timer == NULL ? run_routines(routines, NULL) < 0
                               : run_around_node(self, routines, timer, is_after) < 0;
    Py_DECREF(routines);
    Py_XDECREF(timer);
    return failed ? -1 : 1;
}

static int
hook_traverse(Hook *self, visitproc visit, void *arg)
{
    Py_VISIT(self->hooks);
    Py_VISIT(self->routines);
    Py_VISIT(self->quiet);
    Py_VISIT(self->timer);
    Py_VISIT(self->before);
    Py_VISIT(self->after);
    return 0;
}

static void free_dicts_of(Hook *hook);

static int
hook_clear(Hook *self)
{
    unsettle(self);
    Py_CLEAR(self->timer);
    Py_CLEAR(self->hooks);
    return 0;
}

static void
hook_dealloc(Hook *self)
{
    PyObject_GC_UnTrack(self);
    free_dicts_of(self);
    hook_clear(self);
    PyObject_GC_Del(self);
}

static PyTypeObject Hook_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Hook",
    .tp_basicsize = sizeof(Hook),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Hook, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = (traverseproc)hook_traverse,
    .tp_clear = (inquiry)hook_clear,
    .tp_dealloc = (destructor)hook_dealloc,
};

static Hook *
new_hook(PyObject *hooks)
{
    Hook *hook = PyObject_GC_New(Hook, &Hook_Type);
    if (hook != NULL) {
        hook->vectorcall = hook_vectorcall;
        hook->hooks = Py_NewRef(hooks);
        hook->has_before = field(hooks, at.hooks_before) == Py_True;
        hook->has_after = field(hooks, at.hooks_after) == Py_True;
        hook->routines = hook->quiet = hook->before = hook->after = NULL;
        hook->previous = hook->next = NULL;
        hook->spare = NULL;
        hook->spare_count = 0;
        hook->timer = NULL;
        PyObject_GC_Track(hook);
    }
    return hook;
}

/* To register a hook PyTorch looks up ``torch.autograd.Function._register_hook`` by a new string, which
   no cache of CPython's knows: 1,400 instructions. With the string that the caches know it takes a
   tenth, and so the metaclass looks that one up for the time of the call. */
static PyObject *
look_up_interned(PyObject *type, PyObject *name)
{
    int is_known = PyUnicode_Check(name) && name != names.registrar
                   && PyUnicode_Compare(name, names.registrar) == 0;
    return PyType_Type.tp_getattro(type, is_known ? names.registrar : name);
}

static int
attach_by_method(PyObject *node, PyObject *hook, int is_after)
{
    PyObject *name = is_after ? names.register_hook : names.register_prehook;
    PyTypeObject *meta = native.meta;
    int is_vanilla = meta != NULL && meta->tp_getattro == PyType_Type.tp_getattro;
    if (is_vanilla) {
        meta->tp_getattro = look_up_interned;
    }
    PyObject *handle = PyObject_CallMethodOneArg(node, name, hook);
    if (is_vanilla && meta->tp_getattro == look_up_interned) {
        meta->tp_getattro = PyType_Type.tp_getattro;
    }
    Py_XDECREF(handle);
    return handle == NULL ? -1 : 0;
}

static int attach_at(const char *node, PyObject *object, PyObject *hook, int is_after);
static int attach(PyObject *object, PyObject *hook, int is_after);

/* Hook a node at one or both of its ends. */
static int
attach_hook_at(const char *node, PyObject *object, Hook *hook)
{
    if (hook->has_before && attach_at(node, object, (PyObject *)hook, 0) < 0) {
        return -1;
    }
    return hook->has_after ? attach_at(node, object, (PyObject *)hook, 1) : 0;
}

static const char *node_in(PyObject *object);

static int
attach_hook(PyObject *object, Hook *hook)
{
    return attach_hook_at(node_in(object), object, hook);
}

/* An object of C++ by which autograd calls the hooks in a dict, see below. */
typedef struct {
    const void *const *functions;
    PyObject *dict;
} CalledHook;

/* The dict of a node's hooks. PyTorch's own is an OrderedDict. It may be referred to weakly, as the
   handles of a program's hooks do.

   There is one for each node of a graph. The garbage collector counts what is allocated, and looks at
   700 objects that are left: observed in CPython 3.11, two collections in each step of a small
   transformer that trains. So dicts are used again, and not tracked as long as only hooks of this
   file are in them. Those with nothing but a Hook are kept by that, with what is in them: making,
   filling and emptying one takes as long as the rest of registering a hook. */
typedef struct HookDict {
    PyDictObject dict;
    PyObject *references;
    struct HookDict *next; /* of the spare ones of a Hook */
    CalledHook called;     /* what autograd calls, if the gate has put that into a node */
} HookDict;

#define MOST_DICTS 4096
static PyObject *spare_dicts[MOST_DICTS];
static Py_ssize_t spare_count;

static PyObject *
hook_dict_alloc(PyTypeObject *type, Py_ssize_t items)
{
    if (spare_count == 0) {
        PyObject *made = PyType_GenericAlloc(type, items);
        if (made != NULL) {
            PyObject_GC_UnTrack(made);
        }
        return made;
    }
    PyObject *dict = spare_dicts[--spare_count];
    memset((char *)dict + sizeof(PyObject), 0, sizeof(HookDict) - sizeof(PyObject));
    return PyObject_Init(dict, type);
}

static void
hook_dict_free(void *dict)
{
    if (spare_count < MOST_DICTS && is_installed) {
        spare_dicts[spare_count++] = dict;
    }
    else {
        PyObject_GC_Del(dict);
    }
}

static void
free_spare_dicts(void)
{
    while (spare_count > 0) {
        PyObject_GC_Del(spare_dicts[--spare_count]);
    }
}

/* Dicts that a Hook keeps: there is one for each graph that is alive at the same time. */
#define MOST_SPARE 8

/* The hook that keeps a dict which no node has any more; NULL if none does. */
static Hook *
keeper_of(PyObject *dict)
{
    PyObject *key, *value;
    Py_ssize_t position = 0;
    if (!is_installed || PyDict_GET_SIZE(dict) != 1 || PyObject_GC_IsTracked(dict)
        || !PyDict_Next(dict, &position, &key, &value) || !Py_IS_TYPE(key, &Hook_Type)) {
        return NULL;
    }
    /* Not one that only this dict refers to. */
    Hook *hook = (Hook *)key;
    return value == key && hook->spare_count < MOST_SPARE && Py_REFCNT(key) > 2 ? hook : NULL;
}

static void
hook_dict_dealloc(PyObject *self)
{
    if (((HookDict *)self)->references != NULL) {
        PyObject_ClearWeakRefs(self);
    }
    Hook *hook = keeper_of(self);
    if (hook == NULL) {
        PyDict_Type.tp_dealloc(self);
        return;
    }
    ((HookDict *)self)->next = hook->spare;
    hook->spare = (HookDict *)self;
    hook->spare_count++;
    /* Those of the key and of the value: with them the hook would keep itself alive. */
    Py_DECREF(hook);
    Py_DECREF(hook);
}

/* A dict with nothing but a hook, which has one to spare. */
static PyObject *
take_dict(Hook *hook)
{
    HookDict *dict = hook->spare;
    hook->spare = dict->next;
    hook->spare_count--;
    dict->next = NULL;
    Py_INCREF(hook);
    Py_INCREF(hook);
    return PyObject_Init((PyObject *)dict, Py_TYPE(dict));
}

/* Of a hook that is about to be freed. */
static void
free_dicts_of(Hook *hook)
{
    Py_SET_REFCNT((PyObject *)hook, 1);
    while (hook->spare != NULL) {
        PyObject *dict = take_dict(hook);
        Py_SET_REFCNT(dict, 0);
        PyDict_Type.tp_dealloc(dict);
    }
    Py_SET_REFCNT((PyObject *)hook, 0);
}

static PyTypeObject HookDict_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.HookDict",
    .tp_basicsize = sizeof(HookDict),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_weaklistoffset = offsetof(HookDict, references),
    .tp_alloc = hook_dict_alloc,
    .tp_dealloc = hook_dict_dealloc,
    .tp_free = hook_dict_free,
};

static PyObject *
new_hook_dict(void)
{
    static PyObject *nothing;
    if (nothing == NULL && (nothing = PyTuple_New(0)) == NULL) {
        return NULL;
    }
    return HookDict_Type.tp_new(&HookDict_Type, nothing, NULL);
}

/* A dict with nothing but a hook. */
static PyObject *
dict_with(PyObject *hook, int is_ours)
{
    if (Py_IS_TYPE(hook, &Hook_Type) && ((Hook *)hook)->spare != NULL) {
        return take_dict((Hook *)hook);
    }
    PyObject *dict = new_hook_dict();
    if (dict != NULL && PyObject_SetItem(dict, hook, hook) < 0) {
        Py_CLEAR(dict);
    }
#if PY_VERSION_HEX < 0x030E0000
    /* A dict begins to be tracked, again, where another kind of object comes into it. */
    if (dict != NULL && is_ours && PyObject_GC_IsTracked(dict)) {
        PyObject_GC_UnTrack(dict);
    }
#endif
    return dict;
}

static PyTypeObject Accumulation_Type, Entry_Type;

/* ``torch.autograd.Function._register_hook(hooks, hook)``, which PyTorch calls to register a hook of
   a node: ours are never removed, and need no handle. `vanilla` is PyTorch's. */
static THREAD_LOCAL PyObject *attached;

static PyObject *
add_hook(PyObject *vanilla, PyObject *const *values, Py_ssize_t count)
{
    int is_ours = count == 2
                  && (Py_IS_TYPE(values[1], &Hook_Type) || Py_IS_TYPE(values[1], &Entry_Type)
                      || Py_IS_TYPE(values[1], &Accumulation_Type));
    if (!is_ours && (count != 2 || values[1] != attached)) {
        return PyObject_Vectorcall(vanilla, values, count, NULL);
    }
    PyObject *dict, *pair = NULL;
    if (values[0] == Py_None) {
        dict = dict_with(values[1], is_ours);
    }
    else {
        dict = PyObject_SetItem(values[0], values[1], values[1]) < 0 ? NULL : Py_NewRef(values[0]);
    }
    if (dict != NULL) {
        pair = PyTuple_Pack(2, dict, Py_None);
        Py_DECREF(dict);
    }
    return pair;
}

PyDoc_STRVAR(attach_doc, "attach(node, hook, is_after)\n\nRegister a hook of Python's that is never "
"removed.");

static PyObject *
gate_attach(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *node, *hook;
    int is_after;
    if (!PyArg_ParseTuple(args, "OOp", &node, &hook, &is_after)) {
        return NULL;
    }
    PyObject *outer = attached;
    attached = hook;
    int failed = attach(node, hook, is_after) < 0;
    attached = outer;
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef add_hook_def = {"_register_hook", (PyCFunction)(void (*)(void))add_hook,
                                   METH_FASTCALL, NULL};

/* ---- accumulations of leaves ------------------------------------------------------------------ */

/* Backward passes that may run at once in different threads over one leaf. */
#define PASSES 64

/* The number of the backward pass that runs in this thread, -1 without one. */
static int
current_task(int64_t *number)
{
    if (native.task != NULL) {
        *number = native.task();
        return 0;
    }
    PyObject *found = PyObject_CallNoArgs(inlined.task);
    *number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return *number == -1 && PyErr_Occurred() ? -1 : 0;
}

static int
has_pass(const Accumulation *self, int64_t task)
{
    for (Py_ssize_t i = 0; i < self->count; i++) {
        if (self->passes[i] == task) {
            return 1;
        }
    }
    return 0;
}

static int
note_pass(Accumulation *self, int64_t task, int makes_graph)
{
    /* The graph of this pass may lead to the leaf by nodes that no operator owns. */
    self->always = self->always || makes_graph;
    if (has_pass(self, task)) {
        return 0;
    }
    if (self->count == self->room && self->room < PASSES) {
        int64_t *more = PyMem_New(int64_t, PASSES);
        if (more == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        memcpy(more, self->passes, sizeof(*more) * self->count);
        self->passes = more;
        self->room = PASSES;
    }
    if (self->count == self->room) {
        memmove(self->passes, self->passes + 1, sizeof(*self->passes) * --self->count);
    }
    self->passes[self->count++] = task;
    return 0;
}

/* Whether the pass of this thread is one of its scopes'; -1 with an error. */
static int
acts_here(const Accumulation *self)
{
    int64_t task;
    if (self->always) {
        return 1;
    }
    return current_task(&task) < 0 ? -1 : has_pass(self, task);
}

static PyObject *
accumulation_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf,
                        PyObject *Py_UNUSED(keywords))
{
    Accumulation *self = (Accumulation *)object;
    int acts = unthrown != NULL ? 1 : acts_here(self);
    if (acts <= 0) {
        return acts < 0 ? NULL : Py_NewRef(Py_None);
    }
    return hook_vectorcall((PyObject *)self->hook, values, nargsf, NULL);
}

PyDoc_STRVAR(note_pass_doc, "note_pass(task, makes_graph)\n\nA backward pass has come to an operator "
"of the scopes that uses the leaf.");

static PyObject *
accumulation_note_pass(PyObject *self, PyObject *args)
{
    long long task;
    int makes_graph;
    if (!PyArg_ParseTuple(args, "Lp", &task, &makes_graph)) {
        return NULL;
    }
    return note_pass((Accumulation *)self, task, makes_graph) < 0 ? NULL : Py_NewRef(Py_None);
}

/* The scopes that a hook acts for: weak references in a tuple; borrowed, NULL if it has none. */
static PyObject *
scopes_of(Hook *hook)
{
    PyObject *handle = field(hook->hooks, at.hooks_handle);
    PyObject *scopes = handle != NULL && Py_IS_TYPE(handle, (PyTypeObject *)inlined.handle)
                           ? field(handle, at.handle_scopes)
                           : NULL;
    return scopes != NULL && PyTuple_CheckExact(scopes) ? scopes : NULL;
}

static PyObject *
accumulation_marks(PyObject *object, PyObject *Py_UNUSED(argument))
{
    Accumulation *self = (Accumulation *)object;
    PyObject *scopes = scopes_of(self->hook), *marks = scopes == NULL ? NULL : PyDict_New();
    if (scopes == NULL) {
        PyErr_SetString(PyExc_AttributeError, "an accumulation has lost its scopes");
    }
    PyObject *mark = self->hook->has_before || self->hook->has_after ? object : Py_None;
    for (Py_ssize_t i = 0; marks != NULL && i < PyTuple_GET_SIZE(scopes); i++) {
        if (PyDict_SetItem(marks, PyTuple_GET_ITEM(scopes, i), mark) < 0) {
            Py_CLEAR(marks);
        }
    }
    return marks;
}

PyDoc_STRVAR(marks_doc, "marks()\n\nWhat stands in a leaf's marks for it, by scope.");

static PyObject *
accumulation_scopes(PyObject *self, void *Py_UNUSED(closure))
{
    PyObject *scopes = scopes_of(((Accumulation *)self)->hook);
    return Py_NewRef(scopes == NULL ? Py_None : scopes);
}

static PyObject *
accumulation_is_idle(PyObject *self, void *Py_UNUSED(closure))
{
    const Hook *hook = ((Accumulation *)self)->hook;
    return PyBool_FromLong(!hook->has_before && !hook->has_after);
}

static PyGetSetDef accumulation_properties[] = {
    {"scopes", accumulation_scopes, NULL, "Those in which the leaf is the operator's.", NULL},
    {"is_idle", accumulation_is_idle, NULL, "Whether nothing is to be done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef accumulation_methods[] = {
    {"marks", accumulation_marks, METH_NOARGS, marks_doc},
    {"note_pass", accumulation_note_pass, METH_VARARGS, note_pass_doc},
    {NULL, NULL, 0, NULL},
};

static void
accumulation_dealloc(Accumulation *self)
{
    if (self->passes != &self->first) {
        PyMem_Free(self->passes);
    }
    Py_DECREF(self->hook);
    PyObject_Free(self);
}

/* It holds no node, and is held by none of what it holds: there is nothing to collect. */
static PyTypeObject Accumulation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Accumulation",
    .tp_basicsize = sizeof(Accumulation),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Accumulation, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_methods = accumulation_methods,
    .tp_getset = accumulation_properties,
    .tp_dealloc = (destructor)accumulation_dealloc,
};

static Accumulation *
new_accumulation(Hook *hook)
{
    Accumulation *self = PyObject_New(Accumulation, &Accumulation_Type);
    if (self != NULL) {
        self->vectorcall = accumulation_vectorcall;
        self->hook = (Hook *)Py_NewRef(hook);
        self->always = 0;
        self->count = 0;
        self->room = 1;
        self->first = 0;
        self->passes = &self->first;
    }
    return self;
}

/* ---- nodes of outputs ------------------------------------------------------------------------- */

static int hook_way(PyObject *node, PyObject *way, PyObject *natives, PyObject *done);

/* What an entry does beside its hook, which may be done again in the same pass. */
static int
enter(Entry *self)
{
    if (self->way != NULL && !PyByteArray_AS_STRING(self->done)[self->number]) {
        PyByteArray_AS_STRING(self->done)[self->number] = 1;
        PyObject *node = PyObject_CallNoArgs(inlined.node);
        int failed = node == NULL || hook_way(node, self->way, self->natives, self->done) < 0;
        Py_XDECREF(node);
        if (failed) {
            return -1;
        }
    }
    if (Py_SIZE(self) > 0) {
        int64_t task;
        int makes_graph = is_recording();
        int failed = makes_graph < 0 || current_task(&task) < 0;
        for (Py_ssize_t i = 0; !failed && i < Py_SIZE(self); i++) {
            failed = note_pass(self->reached[i], task, makes_graph) < 0;
        }
        if (failed) {
            return -1;
        }
    }
    return 0;
}

/* It is a prehook where something is to be done before the node, and a posthook elsewhere. */
static int
is_wanted(const Entry *self, int is_after)
{
    return is_after ? self->hook->has_after : self->hook->has_before;
}

static PyObject *
entry_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf,
                 PyObject *Py_UNUSED(keywords))
{
    Entry *self = (Entry *)object;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (unthrown != NULL) {
        return raise_unthrown();
    }
    if (count > 0 && nothing_flows(values[count - 1])) {
        Py_RETURN_NONE;
    }
    if (enter(self) < 0) {
        return NULL;
    }
    return is_wanted(self, count > 1) ? run_hook(self->hook, values, count) : Py_NewRef(Py_None);
}

static void
entry_dealloc(Entry *self)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_DECREF(self->reached[i]);
    }
    Py_DECREF(self->hook);
    Py_XDECREF(self->way);
    Py_XDECREF(self->natives);
    Py_XDECREF(self->done);
    PyObject_Free(self);
}

/* As an accumulation, it is in no cycle. */
static PyTypeObject Entry_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Entry",
    .tp_basicsize = offsetof(Entry, reached),
    .tp_itemsize = sizeof(Accumulation *),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Entry, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_dealloc = (destructor)entry_dealloc,
};

/* ---- nodes, without the objects that stand for them ------------------------------------------ */

/* PyTorch makes an object for each node that Python looks at, and a node keeps it: all of them are
   counted and looked at by the garbage collector, and next_functions makes a tuple for each edge. So
   the edges of nodes are read where they lie in memory. Where that is, is not assumed: it is found
   with nodes of which Python tells the same, see configure_nodes(). */
static struct {
    Py_ssize_t sequence, edges; /* offsets in a node; 0 if they are not known */
    destructor dealloc;         /* of the objects that stand for nodes which C++ defines */
} inside;

typedef struct {
    const char *node; /* NULL for none */
    uint64_t number;  /* of the node's inputs; only the lower half is used */
} Edge;

/* Classes of nodes by what the first word of all their instances is. */
typedef struct {
    const void *word;
    PyObject *type;
    int kind; /* see inlined.kinds */
} NodeClass;

#define NODE_CLASSES 1024
static NodeClass node_classes[NODE_CLASSES];
static int node_class_count;

/* The node of an object; NULL if it is not known where that is. */
static const char *
node_in(PyObject *object)
{
    int is_known = inside.edges > 0 && Py_TYPE(object)->tp_dealloc == inside.dealloc;
    return is_known ? *(const char *const *)(object + 1) : NULL;
}

/* The class of a node, or where one is to be noted. */
static NodeClass *
class_of(const char *node)
{
    const void *word = *(const void *const *)node;
    size_t i = ((uintptr_t)word >> 4) * 2654435761u;
    for (i %= NODE_CLASSES;; i = (i + 1) % NODE_CLASSES) {
        if (node_classes[i].word == NULL || node_classes[i].word == word) {
            return &node_classes[i];
        }
    }
}

static void
note_class(PyObject *object, long kind)
{
    const char *node = node_in(object);
    NodeClass *cls = node == NULL ? NULL : class_of(node);
    if (cls != NULL && cls->word == NULL && node_class_count < NODE_CLASSES / 2) {
        node_class_count++;
        *cls = (NodeClass){*(const void *const *)node, Py_NewRef(Py_TYPE(object)), (int)kind};
    }
}

static Py_ssize_t
sequence_in(const char *node)
{
    return (Py_ssize_t)*(const uint64_t *)(node + inside.sequence);
}

static const Edge *
edges_in(const char *node, Py_ssize_t *count)
{
    const Edge *const *vector = (const Edge *const *)(node + inside.edges);
    *count = vector[1] - vector[0];
    return vector[0];
}

/* Whether the words of a node from an offset on are the begin and the end of its edges, as its
   next_functions are. */
static int
are_edges(const char *node, Py_ssize_t offset, PyObject *expected)
{
    uintptr_t begin = *(const uintptr_t *)(node + offset);
    uintptr_t end = *(const uintptr_t *)(node + offset + sizeof begin);
    Py_ssize_t count = PyTuple_GET_SIZE(expected);
    if (begin == 0 || begin % sizeof begin != 0 || end < begin
        || end - begin != sizeof(Edge) * (size_t)count) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        const Edge *edge = (const Edge *)begin + i;
        PyObject *pair = PyTuple_GET_ITEM(expected, i), *target = PyTuple_GET_ITEM(pair, 0);
        const char *node_of_target = target == Py_None ? NULL : *(const char *const *)(target + 1);
        if (edge->node != node_of_target
            || (target != Py_None
                && (uint32_t)edge->number
                       != (uint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(pair, 1)))) {
            return 0;
        }
    }
    return 1;
}

/* What is looked through of a node: no more than all of them have. */
#define NODE_BYTES 160

PyDoc_STRVAR(configure_nodes_doc,
"configure_nodes(nodes)\n\nFind out where in memory nodes keep their numbers and edges.\n\n"
"Args:\n    nodes: a list of some that C++ defines, each with edges to others.\n\n"
"Returns:\n    Whether there is one such place; if not, nodes are asked through Python.");

static PyObject *
gate_configure_nodes(PyObject *Py_UNUSED(module), PyObject *nodes)
{
    if (!PyList_CheckExact(nodes) || PyList_GET_SIZE(nodes) < 2) {
        PyErr_SetString(PyExc_TypeError, "configure_nodes() takes a list of nodes");
        return NULL;
    }
    destructor dealloc = Py_TYPE(PyList_GET_ITEM(nodes, 0))->tp_dealloc;
    /* Places in which all of the nodes so far have their number, or their edges. */
    char numbers[NODE_BYTES / 8], edges[NODE_BYTES / 8];
    memset(numbers, 1, sizeof numbers);
    memset(edges, 1, sizeof edges);
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(nodes); n++) {
        PyObject *object = PyList_GET_ITEM(nodes, n);
        PyObject *sequence = PyObject_CallMethodNoArgs(object, names.sequence);
        PyObject *expected = PyObject_GetAttr(object, names.next_functions);
        if (sequence == NULL || expected == NULL || !PyTuple_CheckExact(expected)
            || Py_TYPE(object)->tp_dealloc != dealloc) {
            Py_XDECREF(sequence);
            Py_XDECREF(expected);
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        }
        const char *node = *(const char *const *)(object + 1);
        uint64_t number = PyLong_AsUnsignedLongLong(sequence);
        for (Py_ssize_t i = 1; i < NODE_BYTES / 8 - 1; i++) {
            numbers[i] = numbers[i] && *(const uint64_t *)(node + 8 * i) == number;
            edges[i] = edges[i] && are_edges(node, 8 * i, expected);
        }
        Py_DECREF(sequence);
        Py_DECREF(expected);
    }
    Py_ssize_t number_at = 0, edges_at = 0, found = 0;
    for (Py_ssize_t i = 1; i < NODE_BYTES / 8 - 1; i++) {
        number_at = numbers[i] ? 8 * i : number_at;
        edges_at = edges[i] ? 8 * i : edges_at;
        found += numbers[i] + edges[i];
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (found != 2 || number_at == 0 || edges_at == 0) {
        Py_RETURN_FALSE;
    }
    inside.sequence = number_at;
    inside.edges = edges_at;
    inside.dealloc = dealloc;
    Py_RETURN_TRUE;
}

/* ---- hooks that autograd calls without objects ------------------------------------------------ */

/* Autograd calls the hooks of a node through objects of C++, PyFunctionPreHook and PyFunctionPostHook,
   that have a dict of Python's hooks each. They make a tensor's object and a tuple of all gradients
   before they call what is in it: 3,000 instructions and more, where a counter takes thirty. So ours
   are put into nodes by objects of the same classes that the gate makes itself, as a part of the dict.
   Their tables of virtual functions are PyTorch's but for two: one gives up the dict, and one asks our
   hook; where that cannot answer without the gradients, or the dict has got others, PyTorch's is called.
   Nothing of it is assumed: where nodes keep
   these objects, and what they consist of, is found with nodes that Python has hooked, and the classes
   are known by what RTTI says of them, see configure_hooks(). */

/* A std::vector of pointers, or of what consists of one. */
typedef struct {
    void **begin, **end, **room;
} Vector;

typedef Vector (*CallBefore)(CalledHook *, Vector *);
typedef Vector (*CallAfter)(CalledHook *, Vector *, Vector *);

/* The virtual functions of both classes, after two words on the class. */
enum { TO_TOP, RTTI, DESTROY, DELETE, CALL, COMPILE, TABLE };

/* How nodes are hooked before and after they run. */
static struct {
    Py_ssize_t place;             /* of the vector in a node; 0 where Python's way is to be taken */
    const void *const *functions; /* PyTorch's */
    const void *table[TABLE];     /* ours */
} callers[2];

static const void *undefined_tensor;
static void *(*allocate)(size_t); /* operator new */
static void (*release)(void *);   /* operator delete */

/* A hook that counts how often it is called, to try all of this out. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    int before, after, by_method;
} Probe;

static PyObject *
probe_vectorcall(PyObject *self, PyObject *const *Py_UNUSED(values), size_t Py_UNUSED(nargsf),
                 PyObject *Py_UNUSED(keywords))
{
    ((Probe *)self)->by_method++;
    Py_RETURN_NONE;
}

static PyMemberDef probe_members[] = {
    {"before", T_INT, offsetof(Probe, before), READONLY, NULL},
    {"after", T_INT, offsetof(Probe, after), READONLY, NULL},
    {"by_method", T_INT, offsetof(Probe, by_method), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject Probe_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Probe",
    .tp_basicsize = sizeof(Probe),
    .tp_flags =
        Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Probe, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_members = probe_members,
};

static int
are_undefined(const Vector *tensors)
{
    for (void **tensor = tensors->begin; tensor < tensors->end; tensor++) {
        if (*tensor != undefined_tensor) {
            return 0;
        }
    }
    return tensors->begin < tensors->end;
}

/* What a hook does without gradients: 1 if that is all, 0 where it is to be called with them, -1 with an
   error. */
static int
answer(PyObject *hook, const Vector *consumed, int is_after)
{
    if (Py_IS_TYPE(hook, &Hook_Type)) {
        return are_undefined(consumed) ? 1 : run_unseen((Hook *)hook, is_after);
    }
    if (Py_IS_TYPE(hook, &Entry_Type)) {
        Entry *entry = (Entry *)hook;
        if (are_undefined(consumed)) {
            return 1;
        }
        return enter(entry) < 0             ? -1
               : is_wanted(entry, is_after) ? run_unseen(entry->hook, is_after)
                                            : 1;
    }
    if (Py_IS_TYPE(hook, &Accumulation_Type)) {
        int acts = are_undefined(consumed) ? 0 : acts_here((Accumulation *)hook);
        return acts < 0 ? -1 : !acts ? 1 : run_unseen(((Accumulation *)hook)->hook, is_after);
    }
    if (Py_IS_TYPE(hook, &Probe_Type)) {
        *(is_after ? &((Probe *)hook)->after : &((Probe *)hook)->before) += 1;
        return 1;
    }
    return 0;
}

static int
is_answered(const CalledHook *self, const Vector *consumed, int is_after)
{
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *hook, *value;
    Py_ssize_t position = 0;
    int done = 0;
    begin_step(&thread, course.iteration);
    note(self->dict);
    note(self);
    note(((PyDictObject *)self->dict)->ma_keys);
    if (PyDict_GET_SIZE(self->dict) == 1 && PyDict_Next(self->dict, &position, &hook, &value)
        && hook == value) {
        note(hook);
        note((const char *)hook + LINE);
        Py_INCREF(hook);
        done = answer(hook, consumed, is_after);
        if (done < 0) {
            unthrown = take_error();
        }
        Py_DECREF(hook);
    }
    PyGILState_Release(state);
    return done > 0;
}

/* What a hook returns that changes nothing. Autograd puts it in the place of what it has passed, which is
   a variable of its own: so that need not be copied. */
static Vector
pass_on(Vector *tensors)
{
    Vector passed = *tensors;
    *tensors = (Vector){NULL, NULL, NULL};
    return passed;
}

static Vector
call_before(CalledHook *self, Vector *consumed)
{
    if (is_answered(self, consumed, 0)) {
        return pass_on(consumed);
    }
    return ((CallBefore)(uintptr_t)callers[0].functions[CALL])(self, consumed);
}

static Vector
call_after(CalledHook *self, Vector *produced, Vector *consumed)
{
    if (is_answered(self, consumed, 1)) {
        return pass_on(produced);
    }
    return ((CallAfter)(uintptr_t)callers[1].functions[CALL])(self, produced, consumed);
}

/* A node gives up its hooks: what is called lies in the dict. Where Python is gone, the dict stays. */
static void
give_up(CalledHook *self)
{
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(self->dict);
        PyGILState_Release(state);
    }
}

/* Hook a node as its method does: 1, 0 where that is to do it, -1 with an error. */
static int
attach_inside(const char *node, PyObject *hook, int is_after)
{
    if (callers[is_after].place == 0) {
        return 0;
    }
    Vector *hooks = (Vector *)(node + callers[is_after].place);
    if (hooks->begin != NULL) {
        return 0;
    }
    PyObject *dict = dict_with(hook, 1);
    if (dict == NULL) {
        return -1;
    }
    CalledHook *called = &((HookDict *)dict)->called;
    called->functions = callers[is_after].table + DESTROY;
    called->dict = dict;
    hooks->begin = allocate(sizeof *hooks->begin);
    hooks->begin[0] = called;
    hooks->end = hooks->room = hooks->begin + 1;
    return 1;
}

/* Whether a node has no hook yet, and gets its first ones without its object. */
static int
is_unhooked(const char *node)
{
    return callers[0].place != 0 && ((const Vector *)(node + callers[0].place))->begin == NULL
           && ((const Vector *)(node + callers[1].place))->begin == NULL;
}

/* Register a hook of ours at a node, of which there is an object, or which has no hooks yet. */
static int
attach_at(const char *node, PyObject *object, PyObject *hook, int is_after)
{
    int done = node == NULL || hook == attached ? 0 : attach_inside(node, hook, is_after);
    if (done == 0 && object == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "a node was hooked as soon as it was made");
        return -1;
    }
    return done != 0 ? (done < 0 ? -1 : 0) : attach_by_method(object, hook, is_after);
}

static int
attach(PyObject *object, PyObject *hook, int is_after)
{
    return attach_at(node_in(object), object, hook, is_after);
}

/* ---- timers at the nodes of a captured graph -------------------------------------------------- */

/* Where only timers are around a node, autograd need not come to Python, nor take the GIL: what it calls
   notes the time, and what follows from it is done once, for all nodes of a pass, or as soon as a log is
   due. The nodes are hooked where a pass comes to an output of the graph, by the way that leads from there
   to each of them, which is the same in all runs of the graph. What is in a node stays there when the pass
   has ended, and does nothing then: in another pass, or in none. */

/* One execution of a node. */
typedef struct {
    Py_ssize_t slot;
    long long start, end;
} Execution;

/* The executions of one pass, as long as something refers to it. Only the thread of the pass notes any. */
struct TimedPass {
    int references;    /* changed without the GIL */
    int task;          /* the number of the pass; -2 when it has ended */
    const void *owner; /* the thread that has begun it */
    long long due;     /* when the first log is due */
    PyObject *timers;  /* by slot, a tuple of timers; NULL when the pass has ended */
    PyObject *logs;    /* all of theirs */
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
    long long start; /* 0 where it has not begun */
    int references;  /* of vectors */
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
        const Execution *one = &pass->done[i];
        PyObject *around = PyTuple_GET_ITEM(timers, one->slot);
        for (Py_ssize_t k = 0; !failed && k < PyTuple_GET_SIZE(around); k++) {
            failed = add_execution_of(PyTuple_GET_ITEM(around, k), one->start, one->end) < 0;
        }
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

/* Note the end of an execution: 1, or 0 with an error to be thrown. */
static int
note_end(Stamp *stamp, long long end)
{
    TimedPass *pass = stamp->pass;
    Execution one = {stamp->slot, stamp->start, end};
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
    int failed = is_own && flush(pass) < 0;
    for (Py_ssize_t k = 0; around != NULL && !failed && k < PyTuple_GET_SIZE(around); k++) {
        failed = add_execution_of(PyTuple_GET_ITEM(around, k), one.start, one.end) < 0;
    }
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
        stamp->start = read_nanoseconds();
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
            stamp->start = 0;
        }
        return 0;
    }
    stamp = malloc(sizeof *stamp);
    if (stamp == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    *stamp = (Stamp){stamp_tables[0] + DESTROY, stamp_tables[1] + DESTROY, hold_pass(pass), slot, 0, 0};
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

/* Whether these are timers by slot, and their logs. */
static int
are_timers(PyObject *timers, PyObject *logs)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(timers); i++) {
        PyObject *around = PyTuple_GET_ITEM(timers, i);
        for (Py_ssize_t k = 0; PyTuple_CheckExact(around) && k < PyTuple_GET_SIZE(around); k++) {
            if (!Py_IS_TYPE(PyTuple_GET_ITEM(around, k), (PyTypeObject *)inlined.timer)) {
                return 0;
            }
        }
        if (!PyTuple_CheckExact(around)) {
            return 0;
        }
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
"Args:\n    timers: by slot, a tuple of those around a node; can_time() has said that it takes them.\n"
"    logs: all of theirs.\n"
"    way: five numbers of 64 bits for each node that is reached from the current one: by which of the\n"
"        nodes before it, in the order of the way after the current one, and by which of its edges; its\n"
"        number in the run, -1 for an accumulation; its slot, -1 for none; whether it is an output's.\n"
"    start: number of the first node of the run.\n"
"    slot: of the current node, which begins when this returns; -1 for none.\n"
"    timed: what this has returned in this pass before, or None.\n\n"
"Returns:\n    What is told of the end of the pass; None where the nodes cannot be timed.");

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
        if (find_way(nodes, steps, length, start)) {
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
                stamp_in(first)->start = read_nanoseconds();
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

/* ---- accumulations that Python has hooked ------------------------------------------------------ */

/* The dict (borrowed) in which a hook is called by Python's objects or ours; NULL if it is in none. */
static PyObject *
dict_of(const char *node, int is_after, PyObject *hook)
{
    const Vector *hooks = hooks_of(node, is_after);
    for (void **one = hooks->begin; one < hooks->end; one++) {
        const CalledHook *called = *one;
        if ((called->functions == callers[is_after].functions + DESTROY
             || called->functions == callers[is_after].table + DESTROY)
            && PyDict_Contains(called->dict, hook) == 1) {
            return called->dict;
        }
    }
    return NULL;
}

PyDoc_STRVAR(exchange_doc,
"exchange(node, accumulation, hook)\n\nHave a hook run at the accumulation of a leaf in the place of what "
"Python has hooked there.\n\n"
"Args:\n    accumulation: of Python's; attach() has registered it.\n    hook: what hook() returns.\n\n"
"Returns:\n    What is called instead; None where it stays as it is, since it is not found alone.");

static PyObject *
gate_exchange(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *object, *old, *hook, *dicts[2] = {NULL, NULL};
    if (!PyArg_ParseTuple(args, "OOO!", &object, &old, &Hook_Type, &hook)) {
        return NULL;
    }
    const char *node = node_in(object);
    int wanted[2] = {((Hook *)hook)->has_before, ((Hook *)hook)->has_after};
    for (int i = 0; i < 2; i++) {
        dicts[i] = node == NULL || callers[i].place == 0 ? NULL : dict_of(node, i, old);
        /* Beside hooks of the program's it would come after them. */
        if (dicts[i] == NULL ? wanted[i] : PyDict_GET_SIZE(dicts[i]) != 1) {
            PyErr_Clear();
            Py_RETURN_NONE;
        }
    }
    PyObject *made = (PyObject *)new_accumulation((Hook *)hook);
    for (int i = 0; made != NULL && i < 2; i++) {
        if (dicts[i] != NULL
            && ((wanted[i] && PyObject_SetItem(dicts[i], made, made) < 0)
                || PyObject_DelItem(dicts[i], old) < 0)) {
            Py_CLEAR(made);
        }
    }
    return made;
}

/* ---- how autograd calls hooks ------------------------------------------------------------------ */

/* What is looked through of a node: no more than all of them have. */
#define HOOKED_BYTES 256

/* Where a node keeps what its method has registered for a dict; 0 if it is not found. */
static Py_ssize_t
find_hooks(const char *node, const uint64_t *before, PyObject *dict, const void **functions)
{
    Py_ssize_t found = 0;
    for (Py_ssize_t i = 8; i + (Py_ssize_t)sizeof(Vector) <= HOOKED_BYTES; i += 8) {
        const Vector *hooks = (const Vector *)(node + i);
        const uint64_t *old = before + i / 8;
        if (old[0] != 0 || old[1] != 0 || old[2] != 0 || hooks->begin == NULL
            || (uintptr_t)hooks->begin % sizeof(void *) != 0 || hooks->end != hooks->begin + 1
            || hooks->room < hooks->end) {
            continue;
        }
        const CalledHook *called = hooks->begin[0];
        if (called != NULL && (uintptr_t)called % sizeof(void *) == 0 && called->dict == dict) {
            *functions = called->functions;
            found = found == 0 ? i : -1;
        }
    }
    return found < 0 ? 0 : found;
}

/* Whether a table is that of a class without bases but one, of which RTTI is known. */
static int
is_table_of(const void *const *functions, const void *base)
{
    const void *const *table = functions - DESTROY;
    if (table[TO_TOP] != NULL || table[RTTI] == NULL || ((const void *const *)table[RTTI])[2] != base) {
        return 0;
    }
    for (int i = DESTROY; i < TABLE; i++) {
        if (table[i] == NULL) {
            return 0;
        }
    }
    return 1;
}

/* Hook a node by its method, and find out what that has done: the place, 0 if it is not found. */
static Py_ssize_t
try_method(PyObject *object, int is_after, const void **functions)
{
    const char *node = node_in(object);
    uint64_t before[HOOKED_BYTES / 8];
    if (node == NULL) {
        return 0;
    }
    memcpy(before, node, sizeof before);
    PyObject *handle = PyObject_CallMethodOneArg(
        object, is_after ? names.register_hook : names.register_prehook, Py_None);
    PyObject *dict = handle == NULL ? NULL : PyObject_CallMethodNoArgs(handle, names.dict_ref);
    Py_ssize_t place = dict == NULL ? 0 : find_hooks(node, before, dict, functions);
    Py_XDECREF(handle);
    Py_XDECREF(dict);
    return place;
}

PyDoc_STRVAR(configure_hooks_doc,
"configure_hooks(nodes, types, undefined, operators)\n\nFind out how autograd calls the hooks of nodes. "
"Without arguments, Python's way is taken.\n\n"
"Args:\n    nodes: a list of some that C++ defines, which are of no use after that.\n"
"    types: addresses of the type_info of the classes of hooks before and after nodes.\n"
"    undefined: the address of what tensors are that are undefined.\n"
"    operators: the addresses of operator new and operator delete.\n\n"
"Returns:\n    Whether it was found out.");

static PyObject *
gate_configure_hooks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *nodes = NULL;
    unsigned long long types[2], undefined, operators[2];
    callers[0].place = callers[1].place = 0;
    if (PyTuple_GET_SIZE(args) == 0) {
        Py_RETURN_FALSE;
    }
    if (!PyArg_ParseTuple(args, "O!(KK)K(KK)", &PyList_Type, &nodes, &types[0], &types[1], &undefined,
                          &operators[0], &operators[1])) {
        return NULL;
    }
    Py_ssize_t places[2] = {0, 0};
    for (Py_ssize_t n = 0; n < PyList_GET_SIZE(nodes); n++) {
        for (int is_after = 0; is_after < 2; is_after++) {
            const void *found = NULL;
            Py_ssize_t place = try_method(PyList_GET_ITEM(nodes, n), is_after, &found);
            const void *const *functions = found;
            if (PyErr_Occurred()) {
                return NULL;
            }
            if (place == 0 || (n > 0 && (place != places[is_after]
                                         || functions != callers[is_after].functions))
                || (n == 0 && !is_table_of(functions, (const void *)(uintptr_t)types[is_after]))) {
                Py_RETURN_FALSE;
            }
            places[is_after] = place;
            callers[is_after].functions = functions;
        }
    }
    for (int i = 0; i < 2 && places[i] != 0; i++) {
        memcpy(callers[i].table, callers[i].functions - DESTROY, sizeof callers[i].table);
        callers[i].functions -= DESTROY;
        callers[i].place = places[i];
    }
    callers[0].table[CALL] = (const void *)(uintptr_t)call_before;
    callers[1].table[CALL] = (const void *)(uintptr_t)call_after;
    callers[0].table[DELETE] = callers[1].table[DELETE] = (const void *)(uintptr_t)give_up;
    make_stamp_tables(types);
    undefined_tensor = (const void *)(uintptr_t)undefined;
    allocate = (void *(*)(size_t))(uintptr_t)operators[0];
    release = (void (*)(void *))(uintptr_t)operators[1];
    return PyBool_FromLong(places[0] != 0);
}

PyDoc_STRVAR(probe_doc, "probe(node)\n\nHook a node at both ends as after configure_hooks().\n\n"
"Returns:\n    What counts the calls: before and after the node, and those through Python.");

static PyObject *
gate_probe(PyObject *Py_UNUSED(module), PyObject *node)
{
    Probe *probe = PyObject_New(Probe, &Probe_Type);
    if (probe == NULL) {
        return NULL;
    }
    probe->vectorcall = probe_vectorcall;
    probe->before = probe->after = probe->by_method = 0;
    if (attach(node, (PyObject *)probe, 0) < 0 || attach(node, (PyObject *)probe, 1) < 0) {
        Py_CLEAR(probe);
    }
    return (PyObject *)probe;
}

PyDoc_STRVAR(configure_tensors_doc,
"configure_tensors(tensors, addresses, functions)\n\nName functions in C++ that give the node of a tensor "
"and its object.\n\n"
"Args:\n    tensors: a list of some, of which the first has no node.\n"
"    addresses: where Python says that they are.\n"
"    functions: the addresses of those functions, of a tensor, and of an edge.\n\n"
"Returns:\n    Whether they give what Python gives; if not, Python is asked.");

/* Whether a tensor is where its object is thought to have it, and its node and edges are those that Python
   gives. */
static int
gives_nodes(PyObject *tensor, PyObject *address, const char *(*node)(const void *),
            PyObject *(*object)(const void *))
{
    const void *place = tensor + 1;
    if (*(const uintptr_t *)place != PyLong_AsUnsignedLongLong(address) || PyErr_Occurred()) {
        return 0;
    }
    PyObject *expected = PyObject_GetAttr(tensor, names.grad_fn);
    const char *found = node(place);
    int is_same = expected != NULL && (expected == Py_None ? found == NULL : found == node_in(expected));
    if (is_same && found != NULL) {
        Py_ssize_t count;
        const Edge *edges = edges_in(found, &count);
        PyObject *others = PyObject_GetAttr(expected, names.next_functions);
        is_same = others != NULL && PyTuple_CheckExact(others) && PyTuple_GET_SIZE(others) == count;
        for (Py_ssize_t i = 0; is_same && i < count; i++) {
            PyObject *made = edges[i].node == NULL ? Py_NewRef(Py_None) : object(&edges[i].node);
            is_same = made == PyTuple_GET_ITEM(PyTuple_GET_ITEM(others, i), 0);
            Py_XDECREF(made);
        }
        Py_XDECREF(others);
    }
    Py_XDECREF(expected);
    return is_same;
}

static PyObject *
gate_configure_tensors(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *tensors, *addresses;
    unsigned long long node, object;
    native.node = NULL;
    native.object = NULL;
    if (!PyArg_ParseTuple(args, "O!O!(KK)", &PyList_Type, &tensors, &PyList_Type, &addresses, &node,
                          &object)) {
        return NULL;
    }
    int is_same = inside.edges > 0 && PyList_GET_SIZE(tensors) == PyList_GET_SIZE(addresses);
    for (Py_ssize_t i = 0; is_same && i < PyList_GET_SIZE(tensors); i++) {
        is_same = gives_nodes(PyList_GET_ITEM(tensors, i), PyList_GET_ITEM(addresses, i),
                              (const char *(*)(const void *))(uintptr_t)node,
                              (PyObject *(*)(const void *))(uintptr_t)object);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (is_same) {
        native.node = (const char *(*)(const void *))(uintptr_t)node;
        native.object = (PyObject *(*)(const void *))(uintptr_t)object;
    }
    return PyBool_FromLong(is_same);
}

/* ---- backward operators ---------------------------------------------------------------------- */

static Py_ssize_t
next_sequence(void)
{
    if (native.sequence != NULL) {
        return (Py_ssize_t)native.sequence();
    }
    PyObject *number = PyObject_CallNoArgs(inlined.sequence);
    Py_ssize_t found = number == NULL ? -1 : PyLong_AsSsize_t(number);
    Py_XDECREF(number);
    return found;
}

/* Whether the current operators are neither recorded nor transformed, nor the cache is off; -1 with an
   error, such as an interrupt, where what is asked is a function in Python. */
static int
runs_plainly(PyObject *mode)
{
    PyObject *state = field(mode, python.mode_thread);
    if (state == NULL || !PyDict_CheckExact(state)
        || PyDict_GetItemWithError(state, names.cache) != Py_True) {
        return 0;
    }
    PyObject *questions = is_surely_plain() ? native.checks : inlined.checks;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(questions); i++) {
        PyObject *found = ask(PyTuple_GET_ITEM(questions, i));
        int is_plain = found == Py_None || found == Py_False;
        if (found == NULL) {
            return -1;
        }
        Py_DECREF(found);
        if (!is_plain) {
            return 0;
        }
    }
    return 1;
}

/* Note the class of a node that Python has told the kind of. */
static void
learn_class(PyObject *object)
{
    if (object != Py_None && node_class_count < NODE_CLASSES / 2) {
        PyObject *kind = PyDict_GetItemWithError(inlined.kinds, (PyObject *)Py_TYPE(object));
        if (kind != NULL) {
            note_class(object, PyLong_AsLong(kind));
        }
    }
}

/* Whether a node is seen to have edges to nodes of these types; 0 also where that is not known. */
static int
surely_leads_to(const char *node, PyObject *types, Py_ssize_t first)
{
    Py_ssize_t count;
    if (node == NULL) {
        return 0;
    }
    const Edge *edges = edges_in(node, &count);
    int is_same = count == PyList_GET_SIZE(types) - first;
    for (Py_ssize_t i = 0; is_same && i < count; i++) {
        PyObject *type = PyList_GET_ITEM(types, first + i);
        is_same = edges[i].node == NULL ? type == (PyObject *)Py_TYPE(Py_None)
                                        : class_of(edges[i].node)->type == type;
    }
    return is_same;
}

/* Whether a node has edges to nodes of the types in a list, from an item of it on. */
static int
leads_to(PyObject *node, PyObject *types, Py_ssize_t first)
{
    if (surely_leads_to(node_in(node), types, first)) {
        return 1;
    }
    PyObject *edges = PyObject_GetAttr(node, names.next_functions);
    int is_same = edges != NULL && PyTuple_CheckExact(edges)
                  && PyTuple_GET_SIZE(edges) == PyList_GET_SIZE(types) - first;
    for (Py_ssize_t i = first; is_same && i < PyList_GET_SIZE(types); i++) {
        PyObject *edge = PyTuple_GET_ITEM(edges, i - first);
        is_same = PyTuple_CheckExact(edge) && PyTuple_GET_SIZE(edge) > 0
                  && (PyObject *)Py_TYPE(PyTuple_GET_ITEM(edge, 0)) == PyList_GET_ITEM(types, i);
        if (is_same) {
            learn_class(PyTuple_GET_ITEM(edge, 0));
        }
    }
    Py_XDECREF(edges);
    return is_same;
}

/* Whether a result is a tensor without a node, or no tensor. */
static int
has_no_node(PyObject *result)
{
    if ((PyObject *)Py_TYPE(result) != inlined.tensor) {
        return result == Py_None || PyBool_Check(result) || PyLong_CheckExact(result)
               || PyFloat_CheckExact(result);
    }
    PyObject *node = PyObject_GetAttr(result, names.grad_fn);
    Py_XDECREF(node);
    PyErr_Clear();
    return node == Py_None;
}

/* The node of a tensor (of torch.Tensor itself) if that is one of those whose numbers begin at `start`;
   NULL also where it is not known. An older one may have to be made anew, which Python does: that of a view
   whose base was written into. */
static const char *
new_node_of(PyObject *tensor, Py_ssize_t start)
{
    if (native.node == NULL || inside.edges == 0 || (PyObject *)Py_TYPE(tensor) != inlined.tensor) {
        return NULL;
    }
    const char *node = native.node(tensor + 1);
    if (node == NULL) {
        return NULL;
    }
    const NodeClass *cls = class_of(node);
    return cls->word != NULL && cls->kind == 0 && sequence_in(node) >= start ? node : NULL;
}

/* Whether no node of an operator needs a hook, and its result has the form of which that is known:
   what form_of() of amanda_torch.autograd.nodes gives. */
static int
is_idle_form(PyObject *result, PyObject *form, Py_ssize_t start)
{
    if (form == NULL || !PyList_CheckExact(form) || PyList_GET_SIZE(form) == 0) {
        return form != NULL && PyTuple_CheckExact(form) && has_no_node(result);
    }
    if (PyTuple_CheckExact(result) && PyTuple_GET_SIZE(result) > 0) {
        result = PyTuple_GET_ITEM(result, 0);
    }
    if ((PyObject *)Py_TYPE(result) != inlined.tensor) {
        return 0;
    }
    const char *raw = new_node_of(result, start);
    if (raw != NULL && class_of(raw)->type == PyList_GET_ITEM(form, 0)
        && surely_leads_to(raw, form, 1)) {
        return 1;
    }
    PyObject *node = PyObject_GetAttr(result, names.grad_fn);
    int is_same = node != NULL && (PyObject *)Py_TYPE(node) == PyList_GET_ITEM(form, 0)
                  && leads_to(node, form, 1);
    Py_XDECREF(node);
    PyErr_Clear();
    return is_same;
}

/* Note the iteration in which an operator with gradients has run. */
static int
note_run(PyObject *mode, PyObject *known)
{
    PyObject *iterations = field(known, python.known_iterations);
    PyObject *op_id = field(known, python.known_op_id);
    PyObject *iteration = field(mode, python.mode_iteration);
    if (iterations == NULL || !PyDict_CheckExact(iterations) || op_id == NULL
        || iteration == NULL) {
        PyErr_SetString(PyExc_AttributeError, "an operator has lost its iterations");
        return -1;
    }
    return PyDict_SetItem(iterations, op_id, iteration);
}

/* The nodes that an operator has made, as amanda_torch.autograd.nodes.trace_graph() finds them. */
#define MOST_NODES 256

typedef struct {
    PyObject *nodes[MOST_NODES]; /* strong references; those of the outputs first */
    Py_ssize_t count, start;
    Py_ssize_t total; /* how many there are, with those of which no object was made */
    int has_all;      /* the operator has made no others */
    PyObject *leaves; /* a list; NULL if there are none */
} Nodes;

static void
begin_nodes(Nodes *found, Py_ssize_t start)
{
    /* Not an initialiser, which would write to all of it. */
    found->count = found->total = 0;
    found->start = start;
    found->has_all = 0;
    found->leaves = NULL;
}

static void
release_nodes(Nodes *found)
{
    for (Py_ssize_t i = 0; i < found->count; i++) {
        Py_DECREF(found->nodes[i]);
    }
    Py_CLEAR(found->leaves);
}

/* The number of a node; -1 with an error. */
static Py_ssize_t
sequence_of(PyObject *object)
{
    const char *node = node_in(object);
    if (node != NULL) {
        return sequence_in(node);
    }
    PyObject *sequence = PyObject_CallMethodNoArgs(object, names.sequence);
    Py_ssize_t number = sequence == NULL ? -1 : PyLong_AsSsize_t(sequence);
    Py_XDECREF(sequence);
    return number;
}

/* Where edges lead, as a form says it. */
enum { NOWHERE = -1, OUTSIDE = -2, LEAF = -3, UNKNOWN = -4 };

/* Where an edge leads; UNKNOWN with or without an error. */
static Py_ssize_t
place_of(Nodes *found, PyObject *target, PyObject *kinds)
{
    if (target == Py_None) {
        return NOWHERE;
    }
    PyObject *kind = PyDict_GetItemWithError(kinds, (PyObject *)Py_TYPE(target));
    long known = kind == NULL ? -1 : PyLong_AsLong(kind);
    if (known == 0 || known == 1) {
        note_class(target, known);
    }
    if (known == 1) {
        int is_known = PySequence_Contains(found->leaves, target);
        if (is_known < 0 || (is_known == 0 && PyList_Append(found->leaves, target) < 0)) {
            return UNKNOWN;
        }
        return LEAF;
    }
    if (known != 0) {
        return UNKNOWN;
    }
    for (Py_ssize_t i = found->count; i > 0; i--) {
        if (found->nodes[i - 1] == target) {
            return i - 1;
        }
    }
    if (found->has_all) {
        return OUTSIDE;
    }
    Py_ssize_t number = sequence_of(target);
    if (number < found->start) {
        return number < 0 ? UNKNOWN : OUTSIDE;
    }
    if (found->count == MOST_NODES) {
        return UNKNOWN;
    }
    found->nodes[found->count] = Py_NewRef(target);
    return found->count++;
}

/* Whether the edges of a node lead where a list of a form says. */
static int
has_edges(Nodes *found, PyObject *node, PyObject *targets, PyObject *kinds)
{
    PyObject *edges = PyObject_GetAttr(node, names.next_functions);
    int is_same = edges != NULL && PyTuple_CheckExact(edges) && PyList_CheckExact(targets)
                  && PyTuple_GET_SIZE(edges) == PyList_GET_SIZE(targets);
    for (Py_ssize_t i = 0; is_same && i < PyTuple_GET_SIZE(edges); i++) {
        PyObject *edge = PyTuple_GET_ITEM(edges, i);
        is_same = PyTuple_CheckExact(edge) && PyTuple_GET_SIZE(edge) > 0
                  && place_of(found, PyTuple_GET_ITEM(edge, 0), kinds)
                         == PyLong_AsSsize_t(PyList_GET_ITEM(targets, i));
    }
    Py_XDECREF(edges);
    return is_same && !PyErr_Occurred();
}

/* A leaf that an operator uses. */
typedef struct {
    PyObject *metadata;    /* of its accumulation */
    Hook *hook;            /* if it begins to belong to the operator */
    Accumulation *reached; /* what is told when a pass comes to the operator; NULL for nothing */
} Leaf;

#define MOST_LEAVES 32

/* The same as Nodes, without objects. */
typedef struct {
    const char *nodes[MOST_NODES]; /* those of the outputs first */
    const Edge *leaves[MOST_LEAVES]; /* that lead to them */
    Py_ssize_t count, entries, leaf_count, most_leaves, start;
    int has_all;
} RawNodes;

/* Note a leaf that an edge leads to. */
static Py_ssize_t
raw_leaf(RawNodes *found, const Edge *edge)
{
    for (Py_ssize_t i = 0; i < found->leaf_count; i++) {
        if (found->leaves[i]->node == edge->node) {
            return LEAF;
        }
    }
    if (found->leaf_count == found->most_leaves) {
        return UNKNOWN;
    }
    found->leaves[found->leaf_count++] = edge;
    return LEAF;
}

/* Where an edge leads among the nodes of an operator; UNKNOWN where objects are to be looked at. */
static Py_ssize_t
raw_place(RawNodes *found, const Edge *edge)
{
    const char *target = edge->node;
    if (target == NULL) {
        return NOWHERE;
    }
    const NodeClass *cls = class_of(target);
    if (cls->word == NULL || cls->kind != 0) {
        return cls->word == NULL || cls->kind != 1 ? UNKNOWN : raw_leaf(found, edge);
    }
    for (Py_ssize_t i = found->count; i > 0; i--) {
        if (found->nodes[i - 1] == target) {
            return i - 1;
        }
    }
    if (found->has_all || sequence_in(target) < found->start) {
        return OUTSIDE;
    }
    if (found->count == MOST_NODES) {
        return UNKNOWN;
    }
    found->nodes[found->count] = target;
    return found->count++;
}

/* has_form() without objects for the nodes behind those that are found; 0 also where it is not known. */
static int
has_raw_form(RawNodes *found, PyObject *form)
{
    Py_ssize_t every = PyList_GET_SIZE(form) / 2, i = 0;
    for (; i < found->count; i++) {
        const char *node = found->nodes[i];
        Py_ssize_t edge_count;
        const Edge *edges = edges_in(node, &edge_count);
        PyObject *targets = i < every ? PyList_GET_ITEM(form, 2 * i + 1) : NULL;
        if (targets == NULL || class_of(node)->type != PyList_GET_ITEM(form, 2 * i)
            || !PyList_CheckExact(targets) || PyList_GET_SIZE(targets) != edge_count) {
            return 0;
        }
        for (Py_ssize_t edge = 0; edge < edge_count; edge++) {
            Py_ssize_t place = raw_place(found, &edges[edge]);
            if (place == UNKNOWN
                || place != number_of(PyList_GET_ITEM(targets, edge))) {
                return 0;
            }
        }
    }
    return i == every;
}

/* The same for nodes that feed no leaves, which have to be marked, and of which there are objects. */
static int
surely_has_form(Nodes *found, PyObject *form)
{
    RawNodes raw;
    raw.count = found->count;
    raw.leaf_count = raw.most_leaves = 0;
    raw.start = found->start;
    raw.has_all = found->has_all;
    for (Py_ssize_t i = 0; i < found->count; i++) {
        raw.nodes[i] = node_in(found->nodes[i]);
        if (raw.nodes[i] == NULL) {
            return 0;
        }
    }
    if (!has_raw_form(&raw, form)) {
        return 0;
    }
    found->total = raw.count;
    return 1;
}

/* Find the nodes behind those that are found already; whether all have a form, see Traced.form of
   amanda_torch.autograd.nodes. */
static int
has_form(Nodes *found, PyObject *form, PyObject *kinds)
{
    if (surely_has_form(found, form)) {
        return 1;
    }
    Py_ssize_t count = PyList_GET_SIZE(form) / 2, i = 0;
    found->leaves = PyList_New(0);
    int is_same = found->leaves != NULL;
    for (; is_same && i < found->count; i++) {
        is_same = i < count
                  && (PyObject *)Py_TYPE(found->nodes[i]) == PyList_GET_ITEM(form, 2 * i)
                  && has_edges(found, found->nodes[i], PyList_GET_ITEM(form, 2 * i + 1), kinds);
    }
    found->total = found->count;
    return is_same && i == count;
}

PyDoc_STRVAR(follow_doc, "follow(entries, start, form, kinds)\n\nWhether the nodes behind those of an "
"operator's outputs have a form.\n\n"
"Args:\n    entries: the nodes of the outputs.\n"
"    start: the number from which on nodes are the operator's.\n"
"    form: see Traced.form of amanda_torch.autograd.nodes.\n"
"    kinds: 0, 1 for an accumulation, or 2 where it is not certain, by class of nodes.\n\n"
"Returns:\n    A list of the leaves' accumulations; None if it is another form, or not known.");

static PyObject *
gate_follow(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *entries, *form, *kinds;
    Py_ssize_t start;
    Nodes found;
    if (!PyArg_ParseTuple(args, "O!nO!O!", &PyList_Type, &entries, &start, &PyList_Type,
                          &form, &PyDict_Type, &kinds)) {
        return NULL;
    }
    begin_nodes(&found, start);
    int is_same = PyList_GET_SIZE(entries) <= MOST_NODES;
    for (Py_ssize_t i = 0; is_same && i < PyList_GET_SIZE(entries); i++) {
        found.nodes[found.count++] = Py_NewRef(PyList_GET_ITEM(entries, i));
    }
    is_same = is_same && has_form(&found, form, kinds);
    PyObject *result = !is_same               ? Py_NewRef(Py_None)
                       : found.leaves == NULL ? PyList_New(0)
                                              : Py_NewRef(found.leaves);
    release_nodes(&found);
    if (!is_same) {
        PyErr_Clear();
    }
    return result;
}

/* hook_way() without objects: 1 if it was done, 0 where these are needed, -1 with an error. */
static int
hook_raw_way(const char *node, PyObject *way, PyObject *natives, PyObject *done)
{
    const char *nodes[MOST_NODES];
    Py_ssize_t count = 1;
    nodes[0] = node;
    if (node == NULL || native.object == NULL || PyList_GET_SIZE(way) >= MOST_NODES) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(way); i++) {
        PyObject *step = PyList_GET_ITEM(way, i);
        Py_ssize_t numbers[3], edge_count;
        if (!PyTuple_CheckExact(step) || PyTuple_GET_SIZE(step) != 3) {
            return 0;
        }
        for (int j = 0; j < 3; j++) {
            numbers[j] = number_of(PyTuple_GET_ITEM(step, j));
        }
        if (numbers[0] < 0 || numbers[0] >= count || numbers[1] < 0 || numbers[2] < 0
            || numbers[2] >= PyList_GET_SIZE(natives) || numbers[2] >= PyByteArray_GET_SIZE(done)) {
            PyErr_Clear();
            return 0;
        }
        const Edge *edges = edges_in(nodes[numbers[0]], &edge_count);
        const Edge *edge = &edges[numbers[1]];
        if (numbers[1] >= edge_count || edge->node == NULL || class_of(edge->node)->word == NULL
            || class_of(edge->node)->kind != 0) {
            return 0;
        }
        nodes[count++] = edge->node;
        char *is_done = PyByteArray_AS_STRING(done) + numbers[2];
        if (!*is_done) {
            PyObject *object = is_unhooked(edge->node) ? NULL : native.object(&edge->node);
            Hook *hook = (Hook *)PyList_GET_ITEM(natives, numbers[2]);
            int failed = PyErr_Occurred() || attach_hook_at(edge->node, object, hook) < 0;
            Py_XDECREF(object);
            if (failed) {
                return -1;
            }
            *is_done = 1;
        }
    }
    return 1;
}

/* Hook the nodes behind one, which a backward pass comes to later.
 *
 * `way` is as KnownGraph.inner has it, `natives` are the hooks of all nodes, and `done` says of which
 * nodes they are registered.
 */
static int
hook_way(PyObject *node, PyObject *way, PyObject *natives, PyObject *done)
{
    Nodes found;
    int raw = hook_raw_way(node_in(node), way, natives, done);
    if (raw != 0) {
        return raw < 0 ? -1 : 0;
    }
    begin_nodes(&found, 0);
    found.nodes[found.count++] = Py_NewRef(node);
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(way); i++) {
        PyObject *step = PyList_GET_ITEM(way, i), *edges = NULL, *pair;
        if (!PyTuple_CheckExact(step) || PyTuple_GET_SIZE(step) != 3) {
            failed = 1;
            break;
        }
        Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(step, 0));
        Py_ssize_t edge = PyLong_AsSsize_t(PyTuple_GET_ITEM(step, 1));
        Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(step, 2));
        failed = place < 0 || place >= found.count || found.count == MOST_NODES || number < 0
                 || number >= PyList_GET_SIZE(natives) || number >= PyByteArray_GET_SIZE(done)
                 || (edges = PyObject_GetAttr(found.nodes[place], names.next_functions)) == NULL
                 || !PyTuple_CheckExact(edges) || edge < 0 || edge >= PyTuple_GET_SIZE(edges)
                 || !PyTuple_CheckExact(pair = PyTuple_GET_ITEM(edges, edge));
        if (!failed) {
            PyObject *target = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
            char *is_done = PyByteArray_AS_STRING(done) + number;
            found.nodes[found.count++] = target;
            failed = !*is_done && attach_hook(target, (Hook *)PyList_GET_ITEM(natives, number)) < 0;
            *is_done = 1;
        }
        Py_XDECREF(edges);
    }
    release_nodes(&found);
    if (failed && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "the way leads to no node");
    }
    return failed ? -1 : 0;
}

/* Note the node of an output if the operator has made it; 0 where Python is to look. */
static int
add_entry(Nodes *found, PyObject *tensor)
{
    if (tensor == Py_None) {
        return 1;
    }
    PyObject *node = (PyObject *)Py_TYPE(tensor) == inlined.tensor
                         ? PyObject_GetAttr(tensor, names.grad_fn)
                         : NULL;
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node != NULL;
    }
    int is_known = 0;
    for (Py_ssize_t i = 0; !is_known && i < found->count; i++) {
        is_known = found->nodes[i] == node;
    }
    if (!is_known && found->count < MOST_NODES
        && PyDict_GetItemWithError(inlined.kinds, (PyObject *)Py_TYPE(node)) == zero) {
        Py_ssize_t number = sequence_of(node);
        note_class(node, 0);
        if (number >= found->start) {
            found->nodes[found->count++] = Py_NewRef(node);
        }
        is_known = number >= 0;
    }
    Py_DECREF(node);
    return is_known;
}

/* Whether a tensor that an output is a view of has a new node, too; 1 if that is not known. */
static int
has_new_base(PyObject *tensor, Py_ssize_t start)
{
    if (tensor == Py_None) {
        return 0;
    }
    PyObject *base = PyObject_GetAttr(tensor, names.base), *node = NULL, *sequence = NULL;
    int is_new = base == NULL;
    if (base != NULL && base != Py_None) {
        node = PyObject_GetAttr(base, names.grad_fn);
        is_new = node == NULL;
        if (node != NULL && node != Py_None) {
            sequence = PyObject_CallMethodNoArgs(node, names.sequence);
            is_new = sequence == NULL || PyLong_AsSsize_t(sequence) >= start;
        }
    }
    Py_XDECREF(base);
    Py_XDECREF(node);
    Py_XDECREF(sequence);
    return is_new;
}

/* The outputs of an operator, which are one result or what is in it. */
static PyObject *const *
outputs_of(PyObject *const *result, Py_ssize_t *count)
{
    int are_several = PyTuple_CheckExact(*result) || PyList_CheckExact(*result);
    *count = are_several ? PySequence_Fast_GET_SIZE(*result) : 1;
    return are_several ? PySequence_Fast_ITEMS(*result) : result;
}

/* Whether an output is a view of what has a new node, too: that of what an operator in place has written
   into. */
static int
have_new_bases(PyObject *const *outputs, Py_ssize_t count, Py_ssize_t start)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (has_new_base(outputs[i], start)) {
            return 1;
        }
    }
    return 0;
}

/* Find what an operator has made, without objects; 0 where these are to be asked. */
static int
find_raw_nodes(RawNodes *found, PyObject *result, PyObject *form, Py_ssize_t start)
{
    Py_ssize_t count;
    PyObject *const *outputs = outputs_of(&result, &count);
    found->count = found->leaf_count = 0;
    found->most_leaves = native.object == NULL ? 0 : MOST_LEAVES;
    found->start = start;
    for (Py_ssize_t i = 0; i < count; i++) {
        const char *node = outputs[i] == Py_None ? NULL : new_node_of(outputs[i], start);
        if (node == NULL && outputs[i] != Py_None) {
            return 0;
        }
        int is_known = node == NULL || !is_unhooked(node);
        if (is_known && node != NULL) {
            return 0;
        }
        for (Py_ssize_t j = 0; !is_known && j < found->count; j++) {
            is_known = found->nodes[j] == node;
        }
        if (!is_known) {
            if (found->count == MOST_NODES) {
                return 0;
            }
            found->nodes[found->count++] = node;
        }
    }
    found->entries = found->count;
    Py_ssize_t made = next_sequence() - start;
    found->has_all = made == found->count;
    return found->count > 0 && has_raw_form(found, form)
           && (made == found->count || !have_new_bases(outputs, count, start));
}

/* Find what an operator has made; 0 where it is not what is known of it, or not plain. */
static int
find_nodes(Nodes *found, PyObject *result, PyObject *form, Py_ssize_t *entries)
{
    Py_ssize_t count;
    PyObject *const *outputs = outputs_of(&result, &count);
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!add_entry(found, outputs[i])) {
            return 0;
        }
    }
    *entries = found->count;
    Py_ssize_t made = next_sequence() - found->start;
    found->has_all = made == found->count;
    if (!has_form(found, form, inlined.kinds)) {
        return 0;
    }
    return made == found->total || !have_new_bases(outputs, count, found->start);
}

/* Whether a leaf belongs to an operator: 1, or 0 where it is another one's, or -1 where Python is to
   find out. It is Claimer._owned() for a leaf without marks. */
static int
is_owner(PyObject *known, PyObject *node, PyObject *iteration)
{
    PyObject *owners = field(known, python.known_owners), *op_id = field(known, python.known_op_id);
    PyObject *iterations = field(known, python.known_iterations);
    PyObject *leaf = PyObject_GetAttr(node, names.variable), *key = PyLong_FromVoidPtr(leaf);
    int found = -1;
    if (leaf != NULL && key != NULL && owners != NULL && PyDict_CheckExact(owners)) {
        PyObject *reference = PyDict_GetItemWithError(owners, key);
        PyObject *owner = reference != NULL && is_alive(reference, leaf)
                              ? PyObject_GetAttr(reference, names.op_id)
                              : NULL;
        if (owner != NULL && (owner == op_id || PyUnicode_Compare(owner, op_id) == 0)) {
            found = 1;
        }
        else if (owner != NULL) {
            PyObject *ran = PyDict_GetItemWithError(iterations, owner);
            found = ran != NULL && PyObject_RichCompareBool(ran, iteration, Py_EQ) == 1 ? 0 : -1;
        }
        Py_XDECREF(owner);
    }
    Py_XDECREF(leaf);
    Py_XDECREF(key);
    return found;
}

/* Whether two hooks, or a hook and an operator, act for the same scopes. */
static int
has_scopes(Hook *hook, PyObject *handle)
{
    PyObject *own = scopes_of(hook);
    PyObject *others = handle != NULL && Py_IS_TYPE(handle, (PyTypeObject *)inlined.handle)
                           ? field(handle, at.handle_scopes)
                           : NULL;
    if (own == NULL || others == NULL || !PyTuple_CheckExact(others)
        || PyTuple_GET_SIZE(own) != PyTuple_GET_SIZE(others)) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(own); i++) {
        if (PyTuple_GET_ITEM(own, i) != PyTuple_GET_ITEM(others, i)) {
            return 0;
        }
    }
    return 1;
}

static int
is_busy(const Hook *hook)
{
    return hook->has_before || hook->has_after;
}

/* Find out about a leaf; 0 where Python is to do it. `count` leaves of the operator belong to it. */
static int
look_at_leaf(Leaf *leaf, PyObject *node, PyObject *mode, PyObject *known, Py_ssize_t *count)
{
    PyObject *gradients = field(known, python.known_gradients);
    PyObject *natives = field(gradients, at.gradients_leaves);
    leaf->metadata = PyObject_GetAttr(node, names.metadata);
    if (leaf->metadata == NULL || !PyDict_CheckExact(leaf->metadata)) {
        return 0;
    }
    PyObject *mark = PyDict_GetItemWithError(leaf->metadata, names.mark);
    if (mark != NULL) {
        Accumulation *other = (Accumulation *)mark;
        if (!Py_IS_TYPE(mark, &Accumulation_Type)
            || !has_scopes(other->hook, field(gradients, at.gradients_handle))) {
            return 0;
        }
        leaf->reached = is_busy(other->hook) ? (Accumulation *)Py_NewRef(mark) : NULL;
        return 1;
    }
    int is_ours = is_owner(known, node, field(mode, python.mode_iteration));
    if (is_ours <= 0) {
        return is_ours == 0;
    }
    if (natives == NULL || !PyList_CheckExact(natives) || *count >= PyList_GET_SIZE(natives)
        || !Py_IS_TYPE(PyList_GET_ITEM(natives, *count), &Hook_Type)) {
        return 0;
    }
    leaf->hook = (Hook *)Py_NewRef(PyList_GET_ITEM(natives, (*count)++));
    return 1;
}

/* Mark and hook the accumulation of a leaf that begins to belong to an operator. */
static int
claim_leaf(Leaf *leaf, PyObject *node)
{
    if (leaf->hook == NULL) {
        return 0;
    }
    Accumulation *made = new_accumulation(leaf->hook);
    if (made == NULL || PyDict_SetItem(leaf->metadata, names.mark, (PyObject *)made) < 0
        || (leaf->hook->has_before && attach(node, (PyObject *)made, 0) < 0)
        || (leaf->hook->has_after && attach(node, (PyObject *)made, 1) < 0)) {
        Py_XDECREF(made);
        return -1;
    }
    if (is_busy(leaf->hook)) {
        leaf->reached = made;
    }
    else {
        Py_DECREF(made);
    }
    return 0;
}

/* Hook the node of an output before which more is to be done than at others. */
static int
claim_entry(const char *node, PyObject *object, Hook *hook, PyObject *way, PyObject *natives,
            PyObject *done, Py_ssize_t number, const Leaf *leaves, Py_ssize_t count)
{
    Py_ssize_t reached = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        reached += leaves[i].reached != NULL;
    }
    if (reached == 0 && PyList_GET_SIZE(way) == 0) {
        return attach_hook_at(node, object, hook);
    }
    Entry *entry = PyObject_NewVar(Entry, &Entry_Type, reached);
    if (entry == NULL) {
        return -1;
    }
    entry->vectorcall = entry_vectorcall;
    entry->hook = (Hook *)Py_NewRef(hook);
    entry->way = PyList_GET_SIZE(way) > 0 ? Py_NewRef(way) : NULL;
    entry->natives = Py_NewRef(natives);
    entry->done = Py_XNewRef(done);
    entry->number = number;
    for (Py_ssize_t i = count; i > 0; i--) {
        if (leaves[i - 1].reached != NULL) {
            entry->reached[--reached] = (Accumulation *)Py_NewRef(leaves[i - 1].reached);
        }
    }
    /* A pass comes to what lies behind the node after its posthooks: one hook will do. */
    int is_after = hook->has_after && !hook->has_before;
    int failed = attach_at(node, object, (PyObject *)entry, is_after) < 0
                 || (hook->has_after && !is_after
                     && attach_at(node, object, (PyObject *)hook, 1) < 0);
    Py_DECREF(entry);
    return failed ? -1 : 0;
}

/* What is to be hooked of an operator's nodes. */
typedef struct {
    const char *const *nodes;   /* of the outputs; NULL where there are objects of them */
    PyObject *const *objects;   /* likewise; NULL for none */
    PyObject *const *leaves;    /* their accumulations */
    Py_ssize_t entries, total, leaf_count;
} Hooked;

/* Register the hooks of an operator's nodes. */
static int
claim_nodes(const Hooked *found, PyObject *graph, Leaf *leaves)
{
    /* Registering allocates, and so may run code that puts others in their place. */
    PyObject *natives = Py_NewRef(field(graph, at.graph_natives));
    PyObject *inner = Py_NewRef(field(graph, at.graph_inner));
    PyObject *done = NULL;
    int failed = 0;
    note_list(inner);
    for (Py_ssize_t i = 0; !failed && i < found->leaf_count; i++) {
        failed = claim_leaf(&leaves[i], found->leaves[i]) < 0;
    }
    for (Py_ssize_t i = 0; !failed && i < found->entries; i++) {
        PyObject *way = PyList_GET_ITEM(inner, i);
        PyObject *object = found->objects == NULL ? NULL : found->objects[i];
        if (done == NULL && PyList_GET_SIZE(way) > 0) {
            done = PyByteArray_FromStringAndSize(NULL, found->total);
            if (done == NULL) {
                failed = 1;
                break;
            }
            memset(PyByteArray_AS_STRING(done), 0, found->total);
        }
        failed = claim_entry(object == NULL ? found->nodes[i] : node_in(object), object,
                             (Hook *)PyList_GET_ITEM(natives, i), way, natives, done, i, leaves,
                             found->leaf_count) < 0;
    }
    Py_XDECREF(done);
    Py_DECREF(natives);
    Py_DECREF(inner);
    return failed ? -1 : 0;
}

/* Whether what Python has noted of a graph is as it is to be. */
static int
is_settled(PyObject *graph, Py_ssize_t nodes, Py_ssize_t entries)
{
    PyObject *natives = field(graph, at.graph_natives), *inner = field(graph, at.graph_inner);
    if (PyList_GET_SIZE(natives) != nodes || inner == NULL || !PyList_CheckExact(inner)
        || PyList_GET_SIZE(inner) != entries) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < nodes; i++) {
        note(PyList_GET_ITEM(natives, i));
        if (!Py_IS_TYPE(PyList_GET_ITEM(natives, i), &Hook_Type)) {
            return 0;
        }
    }
    for (Py_ssize_t i = 0; i < entries; i++) {
        if (!PyList_CheckExact(PyList_GET_ITEM(inner, i))) {
            return 0;
        }
    }
    return 1;
}

/* Look at the leaves of an operator, and hook all that was found: 1 if it was done, 0 if Python is to do
   it. */
static int
claim_found(const Hooked *found, PyObject *mode, PyObject *known, PyObject *graph)
{
    Leaf leaves[MOST_LEAVES];
    Py_ssize_t looked = 0, owned = 0;
    int done = is_settled(graph, found->total, found->entries) && found->leaf_count <= MOST_LEAVES;
    for (; done && looked < found->leaf_count; looked++) {
        leaves[looked] = (Leaf){NULL};
        done = look_at_leaf(&leaves[looked], found->leaves[looked], mode, known, &owned);
    }
    PyErr_Clear();
    if (done && (note_run(mode, known) < 0 || claim_nodes(found, graph, leaves) < 0)) {
        done = -1;
    }
    for (Py_ssize_t i = 0; i < looked; i++) {
        Py_XDECREF(leaves[i].metadata);
        Py_XDECREF(leaves[i].hook);
        Py_XDECREF(leaves[i].reached);
    }
    return done;
}

/* The same for nodes that were found without objects: leaves have them. */
static int
claim_raw(const RawNodes *found, PyObject *mode, PyObject *known, PyObject *graph)
{
    PyObject *leaves[MOST_LEAVES];
    Hooked hooked = {found->nodes, NULL, leaves, found->entries, found->count, 0};
    int done = 1;
    while (done && hooked.leaf_count < found->leaf_count) {
        leaves[hooked.leaf_count] = native.object(&found->leaves[hooked.leaf_count]->node);
        done = leaves[hooked.leaf_count] != NULL;
        hooked.leaf_count += done;
    }
    done = done ? claim_found(&hooked, mode, known, graph) : 0;
    for (Py_ssize_t i = 0; i < hooked.leaf_count; i++) {
        Py_DECREF(leaves[i]);
    }
    if (done == 0) {
        PyErr_Clear();
    }
    return done;
}

/* The same with objects of the nodes. */
static int
claim_objects(PyObject *mode, PyObject *known, PyObject *graph, PyObject *result, Py_ssize_t start)
{
    Nodes found;
    Py_ssize_t entries;
    begin_nodes(&found, start);
    int done = find_nodes(&found, result, field(graph, at.graph_form), &entries);
    if (done) {
        Hooked hooked = {NULL, found.nodes, NULL, entries, found.total, 0};
        if (found.leaves != NULL) {
            hooked.leaves = PySequence_Fast_ITEMS(found.leaves);
            hooked.leaf_count = PyList_GET_SIZE(found.leaves);
        }
        done = claim_found(&hooked, mode, known, graph);
    }
    if (done == 0) {
        PyErr_Clear();
    }
    release_nodes(&found);
    return done;
}

/* Claimer.claim() for an operator of whose backward operators everything is known: 1 if it was done, 0
   if Python is to do it; then nothing has been done. */
static int
claim_known(PyObject *mode, PyObject *known, PyObject *result, Py_ssize_t start)
{
    PyObject *gradients = field(known, python.known_gradients);
    if (gradients == NULL || !Py_IS_TYPE(gradients, (PyTypeObject *)inlined.gradients)) {
        return 0;
    }
    note(gradients);
    note_list(field(gradients, at.gradients_form));
    if (is_idle_form(result, field(gradients, at.gradients_form), start)) {
        return note_run(mode, known) < 0 ? -1 : 1;
    }
    PyObject *graph = field(gradients, at.gradients_graph);
    if (graph == NULL || !Py_IS_TYPE(graph, (PyTypeObject *)inlined.graph)) {
        return 0;
    }
    PyObject *form = field(graph, at.graph_form), *natives = field(graph, at.graph_natives);
    note(graph);
    note_list(form);
    note_list(natives);
    if (form == NULL || !PyList_CheckExact(form) || natives == NULL || !PyList_CheckExact(natives)) {
        return 0;
    }
    /* What Python runs meanwhile may put another graph or other hooks there. */
    Py_INCREF(graph);
    int is_plain = runs_plainly(mode);
    if (is_plain <= 0) {
        Py_DECREF(graph);
        return is_plain;
    }
    RawNodes raw;
    int done = find_raw_nodes(&raw, result, form, start) ? claim_raw(&raw, mode, known, graph) : 0;
    PyErr_Clear();
    if (done == 0) {
        done = claim_objects(mode, known, graph, result, start);
    }
    Py_DECREF(graph);
    return done;
}

PyDoc_STRVAR(add_executions_doc,
"add_executions(executions, times, taken)\n\nAdd what has ended to timers, and to their logs.\n\n"
"Args:\n    executions: a list of tuples of a timer and the places of its start and its end.\n"
"    times: a list of nanoseconds, by place; where the end is not there, no more are added.\n"
"    taken: a list with the number of executions that have been added, which is increased.");

static PyObject *
gate_add_executions(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *executions, *times, *taken, *timer;
    Py_ssize_t start, end;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &executions, &PyList_Type, &times, &PyList_Type,
                          &taken)) {
        return NULL;
    }
    Py_ssize_t i = PyList_GET_SIZE(taken) == 1 ? PyLong_AsSsize_t(PyList_GET_ITEM(taken, 0)) : -1;
    if (i < 0 || inlined.counter == NULL) {
        PyErr_SetString(PyExc_ValueError, "add_executions() takes a list with one number");
        return NULL;
    }
    int failed = 0;
    for (; !failed && i < PyList_GET_SIZE(executions); i++) {
        PyObject *one = PyList_GET_ITEM(executions, i);
        if (!PyTuple_CheckExact(one)
            || !PyArg_ParseTuple(one, "O!nn", inlined.timer, &timer, &start, &end)) {
            return NULL;
        }
        if (end >= PyList_GET_SIZE(times)) {
            break;
        }
        long long from = PyLong_AsLongLong(PyList_GET_ITEM(times, start));
        long long to = PyLong_AsLongLong(PyList_GET_ITEM(times, end));
        PyObject *next = PyErr_Occurred() ? NULL : PyLong_FromSsize_t(i + 1);
        /* Before a log is looked at, which may raise. */
        failed = next == NULL || PyList_SetItem(taken, 0, next) < 0
                 || add_execution_of(timer, from, to) < 0;
    }
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(claim_doc, "claim(mode, known, result, start)\n\nClaim the backward operators of an "
"operator that has run.\n\n"
"Args:\n    known: a KnownOp.\n    result: of the operator.\n"
"    start: the number of the next node of autograd, read before it ran.\n\n"
"Returns:\n    Whether it was done; Python is to do it where something is yet to be found out.");

static PyObject *
gate_claim(PyObject *Py_UNUSED(module), PyObject *const *values, Py_ssize_t count)
{
    Py_ssize_t start = count == 4 ? PyLong_AsSsize_t(values[3]) : -1;
    if (start < 0 || inlined.counter == NULL || !is_ours(values[0])
        || !Py_IS_TYPE(values[1], python.known)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "claim() takes a mode, a KnownOp, a result and a number");
        }
        return NULL;
    }
    int done = claim_known(values[0], values[1], values[2], start);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

PyDoc_STRVAR(hook_doc, "hook(hooks)\n\nThe hook of all nodes that have NodeHooks: routines that are all "
"inlined are run without Python.");

static PyObject *
gate_hook(PyObject *Py_UNUSED(module), PyObject *hooks)
{
    if (inlined.counter == NULL || !Py_IS_TYPE(hooks, (PyTypeObject *)inlined.hooks)) {
        PyErr_SetString(PyExc_TypeError, "configure_inlined() names the class of hooks");
        return NULL;
    }
    return (PyObject *)new_hook(hooks);
}

/* ---- an operator ----------------------------------------------------------------------------- */

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

/* What is known of the next execution of an operator; it is counted, unless there is to ask.
 *
 * This is Interceptor.__torch_function__() of amanda_torch.eager.interceptors as far as that needs
 * no call. `*cell` and `*known` are strong references: to the cell in which an execution was counted (NULL
 * for what is no operator, and where there is to ask), and to the KnownOp of an operator that is measured or
 * that acts.
 */
static inline Answer
look_up(PyObject *mode, PyObject *operator, const Invocation *call, PyObject **cell, PyObject **known)
{
    PyObject *cells = field(mode, python.mode_cells);
    if (field(mode, python.mode_stale) != Py_False || cells == NULL || !PyDict_CheckExact(cells)) {
        return ASK;
    }
    begin_step(&thread, field(mode, python.mode_iteration));
    PyObject *found = cell_of(cells, operator, call);
    if (found == python.no_operator) {
        return found == NULL ? ASK : EMPTY;
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
    note(cells);
    note(found);
    note(&PyList_GET_ITEM(found, 0));
    note(&PyList_GET_ITEM(found, count));
    note(next);
    note((const char *)next + LINE);
    if (Py_IS_TYPE(next, python.known)) {
        note_routines(field(next, python.known_before));
        note_routines(field(next, python.known_after));
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
    PyObject *claimed = field(known, python.known_claimed), *none = NULL;
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call);
    PyObject *number = PyLong_FromSsize_t(start);
    if (claimed != NULL && args != NULL && kwargs != NULL && number != NULL) {
        none = PyObject_CallFunctionObjArgs(claimed, known, operator, args, kwargs, result, number,
                                            NULL);
    }
    else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_AttributeError, "an operator has lost what claims its gradients");
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(number);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
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

/* Whether the sums among the routines after an operator have met its shapes. */
static int
pass_shapes(const Invocation *call, PyObject *result, PyObject *after, PyObject **kind)
{
    PyObject *args = reported_args(call), *kwargs = reported_kwargs(call), *named = NULL;
    PyObject *keywords = NULL;
    int passed = -1;
    if (args != NULL && kwargs != NULL && (named = PyDict_Values(kwargs)) != NULL
        && (keywords = PySequence_Tuple(kwargs)) != NULL) {
        PyObject *values[] = {args, named, result};
        *kind = kind_of(values, 3, keywords);
        passed = *kind != NULL ? pass_kind(after, *kind) : PyErr_Occurred() ? -1 : 0;
    }
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(named);
    Py_XDECREF(keywords);
    return passed;
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

/* ---- routines in Python around an operator --------------------------------------------------- */

/* What follows is Executor.run_around() of amanda_torch.eager.execution with what it calls, as long
   as no routine returns anything. Python goes on where one does. */

/* Tensors that routines are given, or the flat arguments of a call; of more, Python takes care. */
#define MOST_VALUES 64

typedef struct {
    PyObject *items[MOST_VALUES];
    Py_ssize_t count;
} Values;

/* Not an initialiser, which would write to all of it. */
#define DECLARE_VALUES(name) \
    Values name;             \
    name.count = 0

static void
release_values(Values *values)
{
    for (Py_ssize_t i = 0; i < values->count; i++) {
        Py_DECREF(values->items[i]);
    }
    values->count = 0;
}

static int
append_values(Values *values, PyObject *const *items, Py_ssize_t count)
{
    if (values->count + count > MOST_VALUES) {
        return 0;
    }
    memcpy(values->items + values->count, items, (size_t)count * sizeof *items);
    values->count += count;
    return 1;
}

static PyObject *
list_of(const Values *values)
{
    PyObject *list = PyList_New(values->count);
    for (Py_ssize_t i = 0; list != NULL && i < values->count; i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(values->items[i]));
    }
    return list;
}

static int
is_name(PyObject *name, PyObject *other)
{
    return name == other || PyUnicode_Compare(name, other) == 0;
}

/* Append the keyword arguments of a call (borrowed), if they have these names, in this order. */
static int
append_keywords(const Invocation *call, PyObject *keywords, Values *flat)
{
    Py_ssize_t count = PyTuple_GET_SIZE(keywords), found = 0, position = 0;
    PyObject *name, *value;
    if (call->site->kind == CALLABLE) {
        Py_ssize_t given = call->names == NULL ? 0 : PyTuple_GET_SIZE(call->names);
        for (; found < count && found < given; found++) {
            if (!is_name(PyTuple_GET_ITEM(call->names, found), PyTuple_GET_ITEM(keywords, found))) {
                return 0;
            }
        }
        return given == count
               && append_values(flat, call->stack + PyVectorcall_NARGS(call->nargsf), count);
    }
    if (call->site->kind == SUBSCRIPT || call->kwargs == NULL) {
        return count == 0;
    }
    while (PyDict_Next(call->kwargs, &position, &name, &value)) {
        if (found == count || !is_name(name, PyTuple_GET_ITEM(keywords, found++))
            || !append_values(flat, &value, 1)) {
            return 0;
        }
    }
    return found == count;
}

/* The arguments of a call as PyTorch reports them, one after the other (borrowed); 0 where there are
   too many, or other keywords. */
static int
flatten(const Invocation *call, PyObject *keywords, Values *flat)
{
    Site *site = call->site;
    int fits = 1;
    if (site->kind == CALLABLE) {
        fits = append_values(flat, call->stack + 1, PyVectorcall_NARGS(call->nargsf) - 1);
    }
    else {
        if (site->kind != FUNCTION) {
            fits = append_values(flat, &call->self, 1);
        }
        if (site->kind == SUBSCRIPT || (site->kind == PLAIN && site->flags == METH_O)) {
            fits = fits && append_values(flat, &call->args, 1);
        }
        else if (site->kind != PLAIN || site->flags != METH_NOARGS) {
            fits = fits && append_values(flat, PySequence_Fast_ITEMS(call->args),
                                         PyTuple_GET_SIZE(call->args));
        }
    }
    return fits && append_keywords(call, keywords, flat);
}

static int
have_types(PyObject *const *items, Py_ssize_t count, PyObject *types)
{
    if (!PyTuple_CheckExact(types) || PyTuple_GET_SIZE(types) != count) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if ((PyObject *)Py_TYPE(items[i]) != PyTuple_GET_ITEM(types, i)) {
            return 0;
        }
    }
    return 1;
}

/* Layout.values(): the inputs of a call (strong references); 0 if it has another form. */
static int
find_inputs(const Invocation *call, PyObject *operator, PyObject *layout, Values *inputs)
{
    PyObject *keywords = field(layout, at.layout_keywords), *lists = field(layout, at.layout_lists);
    PyObject *places = field(layout, at.layout_places);
    DECLARE_VALUES(flat);
    if (operator != field(layout, at.layout_func) || !flatten(call, keywords, &flat)
        || !have_types(flat.items, flat.count, field(layout, at.layout_types))) {
        return 0;
    }
    PyObject *absent = Py_None;
    int fits = append_values(&flat, &absent, 1);
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(lists); i++) {
        PyObject *pair = PyList_GET_ITEM(lists, i);
        PyObject *list = flat.items[PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0))];
        PyObject *const *items = PySequence_Fast_ITEMS(list);
        Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
        fits = have_types(items, count, PyTuple_GET_ITEM(pair, 1))
               && append_values(&flat, items, count);
    }
    if (!fits || PyList_GET_SIZE(places) > MOST_VALUES) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); i++) {
        PyObject *value = flat.items[PyLong_AsSsize_t(PyList_GET_ITEM(places, i))];
        inputs->items[inputs->count++] = Py_NewRef(value);
    }
    return 1;
}

/* How often tensors have been changed in place; -1 for those that do not count it. */
static int
read_versions(const Values *values, long long *versions)
{
    PyGetSetDescrObject *property = (PyGetSetDescrObject *)inlined.version;
    for (Py_ssize_t i = 0; i < values->count; i++) {
        PyObject *value = values->items[i], *version = NULL;
        versions[i] = -1;
        if (value != Py_None && PyObject_TypeCheck(value, PyDescr_TYPE(property))) {
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
    site->unreported = is_silent ? site->unreported + 1 : 0;
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
    Thread *here = &thread;
    PyObject *mode = virtual_mode_of(here), *cell = NULL, *known = NULL, *result = NULL;
    Site *site = call->site;
    PyObject *operator = call->operator != NULL ? call->operator : site->operator;
    if (mode == NULL || (site->unreported >= SILENT && site->operator == NULL)) {
        return run_original(call);
    }
    Answer answer = operator == NULL ? ASK : look_up(mode, operator, call, &cell, &known);
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

/* ---- trampolines ----------------------------------------------------------------------------- */

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

/* ---- objects that stand for Python's functions ----------------------------------------------- */

typedef enum { OPERATOR, REPORTED, EVENT } Role;

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    Role role;
    PyObject *vanilla; /* the function in whose place it stands */
    Site site;
} Call;

/* ``operator(*args)`` of torch.ops: the operator is the first argument. */
static PyObject *
call_operator(Call *self, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Invocation call = {.site = &self->site, .target = self->vanilla, .stack = values,
                       .nargsf = nargsf, .names = names};
    if (virtual_mode() == NULL || PyVectorcall_NARGS(nargsf) == 0) {
        return run_original(&call);
    }
    if (self->role == OPERATOR) {
        call.operator = values[0];
    }
    self->site.unreported = 0;
    return intercept(&call);
}

/* ``mode.__torch_function__(func, types, args, kwargs)``: what PyTorch reports. */
static PyObject *
call_event(Call *self, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Site *site = thread.awaited;
    thread.reports++;
    if (site != NULL && site->kind != CALLABLE && site->operator == NULL
        && PyVectorcall_NARGS(nargsf) > 1) {
        PyObject *is_report =
            PyObject_CallFunction(python.is_report_of, "sO", site->name, values[1]);
        if (is_report == NULL) {
            return NULL;
        }
        if (is_report == Py_True) {
            /* Another thread may have noted it meanwhile. */
            if (site->operator == NULL) {
                site->operator = Py_NewRef(values[1]);
            }
            /* What its implementation calls is none of its reports. */
            thread.awaited = NULL;
        }
        Py_DECREF(is_report);
    }
    return PyObject_Vectorcall(self->vanilla, values, nargsf, names);
}

/* Set every counter in the values of a dict to zero: of lists the first item, of children `calls`. */
static void
restart(PyObject *dict, int is_children)
{
    PyObject *key, *value;
    Py_ssize_t position = 0, left = PyDict_GET_SIZE(dict);
    note(dict);
    note(((PyDictObject *)dict)->ma_keys);
    for (; left > 0 && PyDict_Next(dict, &position, &key, &value); left--) {
        note(value);
        if (is_children) {
            note((const char *)value + python.child_calls);
            if (Py_IS_TYPE(value, python.child) && field(value, python.child_calls) != zero) {
                set_field(value, python.child_calls, zero);
            }
        }
        else if (PyList_CheckExact(value) && PyList_GET_SIZE(value) > 0) {
            note(&PyList_GET_ITEM(value, 0));
            PyObject *before = PyList_GET_ITEM(value, 0);
            PyList_SET_ITEM(value, 0, Py_NewRef(zero));
            Py_DECREF(before);
        }
    }
}

/* Whether the state of a thread says that tools are not paused. */
static int
is_unpaused(PyObject *state)
{
    if (state == NULL || !PyDict_CheckExact(state)) {
        return 0;
    }
#if HAS_VERSIONS
    if (thread.unpaused == version_of(state)) {
        return 1;
    }
#endif
    if (PyDict_GetItemWithError(state, paused_name) != zero) {
        return 0;
    }
#if HAS_VERSIONS
    thread.unpaused = version_of(state);
#endif
    return 1;
}

/* The child of a frame that was made for a module (borrowed); NULL without one. */
static PyObject *
child_of(PyObject *children, PyObject *module)
{
    PyObject *child = look_found(children, module);
    if (child != NULL) {
        return child;
    }
    PyObject *key = PyLong_FromVoidPtr(module);
    child = key == NULL ? NULL : PyDict_GetItemWithError(children, key);
    Py_XDECREF(key);
    if (child != NULL) {
        /* The key is a number: what is at that address need not live. */
        keep_found(children, module, child);
    }
    return child;
}

/* Tracker.enter_module() for a module that was called at this place before.
 *
 * Returns the frame to come back to (a strong reference); NULL if Python is to do it.
 */
static PyObject *
enter_module(PyObject *mode, PyObject *module)
{
    PyObject *parent = field(mode, python.mode_frame);
    PyObject *state = field(mode, python.mode_thread);
    PyObject *generation = field(mode, python.mode_generation);
    if (parent == NULL || parent == field(mode, python.mode_root)
        || !Py_IS_TYPE(parent, python.frame) || !is_unpaused(state)) {
        return NULL;
    }
    PyObject *children = field(parent, python.frame_children), *child;
    if (children == NULL || !PyDict_CheckExact(children)) {
        return NULL;
    }
    begin_step(&thread, field(mode, python.mode_iteration));
    child = child_of(children, module);
    if (child == NULL || !Py_IS_TYPE(child, python.child)
        || !is_alive(field(child, python.child_ref), module)
        || field(child, python.child_transparent) != Py_False
        || field(child, python.child_fused) != Py_False) {
        return NULL;
    }
    PyObject *frames = field(child, python.child_frames);
    PyObject *calls = field(child, python.child_calls);
    if (frames == NULL || !PyList_CheckExact(frames) || calls == NULL || !PyLong_Check(calls)) {
        return NULL;
    }
    Py_ssize_t call = number_of(calls);
    if (call < 0 || call >= PyList_GET_SIZE(frames)) {
        return NULL;
    }
    PyObject *frame = PyList_GET_ITEM(frames, call);
    if (!Py_IS_TYPE(frame, python.frame)
        || field(frame, python.frame_generation) != generation) {
        return NULL;
    }
    PyObject *cells = field(frame, python.frame_cells), *names = field(frame, python.frame_names);
    PyObject *below = field(frame, python.frame_children), *number = new_number(call + 1);
    if (number == NULL || cells == NULL || names == NULL || below == NULL) {
        Py_XDECREF(number);
        return NULL;
    }
    note(children);
    note(child);
    note((const char *)child + LINE);
    note(field(child, python.child_ref));
    note(frames);
    note(&PyList_GET_ITEM(frames, call));
    note(frame);
    note((const char *)frame + LINE);
    Py_INCREF(parent);
    set_field(child, python.child_calls, number);
    Py_DECREF(number);
    restart(names, 0);
    restart(below, 1);
    set_field(frame, python.frame_caller, parent);
    set_field(mode, python.mode_frame, frame);
    set_field(mode, python.mode_cells, cells);
    return parent;
}

/* PyTorch's ``nn.Module.__call__``, and how CPython calls a function. */
static PyObject *module_vanilla;
static vectorcallfunc call_python;

/* ``module(*args)``: the vectorcall of the driver's function for it, which runs where C cannot do it.
 *
 * It stays a Python function, since Dynamo has to see what it does; where the interpreter calls it
 * without vectorcall, all of it is done in Python.
 */
static PyObject *
through_module(PyObject *function, PyObject *const *values, size_t nargsf, PyObject *names)
{
    PyObject *mode = virtual_mode(), *parent = NULL;
    if (mode != NULL && PyVectorcall_NARGS(nargsf) > 0) {
        parent = enter_module(mode, values[0]);
        PyErr_Clear();
    }
    if (parent == NULL) {
        return call_python(function, values, nargsf, names);
    }
    Py_INCREF(mode);
    PyObject *result = PyObject_Vectorcall(module_vanilla, values, nargsf, names);
    PyObject *frame = field(mode, python.mode_frame), *cells = field(parent, python.frame_cells);
    if (frame != parent && frame != NULL && cells != NULL) {
        KEEPING_ERROR({
            if (Py_IS_TYPE(frame, python.frame)) {
                set_field(frame, python.frame_caller, Py_None);
            }
            set_field(mode, python.mode_frame, parent);
            set_field(mode, python.mode_cells, cells);
        });
    }
    Py_DECREF(parent);
    Py_DECREF(mode);
    return result;
}

static PyObject *
call_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf, PyObject *names)
{
    Call *self = (Call *)object;
    switch (self->role) {
    case OPERATOR:
    case REPORTED:
        return call_operator(self, values, nargsf, names);
    case EVENT:
        return call_event(self, values, nargsf, names);
    }
    Py_UNREACHABLE();
}

static PyObject *
call_get(PyObject *self, PyObject *instance, PyObject *Py_UNUSED(type))
{
    return instance == NULL || instance == Py_None ? Py_NewRef(self) : PyMethod_New(self, instance);
}

/* Its name, its documentation and so on are those of the function. */
static PyObject *
call_getattro(PyObject *self, PyObject *name)
{
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found == NULL && PyErr_ExceptionMatches(PyExc_AttributeError)) {
        PyErr_Clear();
        found = PyObject_GetAttr(((Call *)self)->vanilla, name);
    }
    return found;
}

static int
call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(self->vanilla);
    return 0;
}

static int
call_clear(Call *self)
{
    Py_CLEAR(self->vanilla);
    return 0;
}

static void
call_dealloc(Call *self)
{
    PyObject_GC_UnTrack(self);
    call_clear(self);
    PyObject_GC_Del(self);
}

static PyMemberDef call_members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Call, vanilla), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *
call_of_vanilla(PyObject *self, void *name)
{
    return PyObject_GetAttrString(((Call *)self)->vanilla, name);
}

/* The type has attributes of these names, which come first. */
static PyGetSetDef call_properties[] = {
    {"__doc__", call_of_vanilla, NULL, NULL, "__doc__"},
    {"__module__", call_of_vanilla, NULL, NULL, "__module__"},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject Call_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Call",
    .tp_basicsize = sizeof(Call),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL
                | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_vectorcall_offset = offsetof(Call, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_descr_get = call_get,
    .tp_getattro = call_getattro,
    .tp_traverse = (traverseproc)call_traverse,
    .tp_clear = (inquiry)call_clear,
    .tp_dealloc = (destructor)call_dealloc,
    .tp_members = call_members,
    .tp_getset = call_properties,
};

static PyObject *
new_call(Role role, PyObject *vanilla)
{
    Call *self = PyObject_GC_New(Call, &Call_Type);
    if (self == NULL) {
        return NULL;
    }
    self->vectorcall = call_vectorcall;
    self->role = role;
    self->vanilla = Py_NewRef(vanilla);
    self->site = (Site){.kind = CALLABLE, .name = ""};
    PyObject_GC_Track(self);
    return (PyObject *)self;
}

/* ---- setting up ------------------------------------------------------------------------------ */

static PyObject *mapping_base; /* the type with a[i] */

static Site *
new_site(Site *sites, Py_ssize_t *count, Py_ssize_t size, Site site)
{
    for (Py_ssize_t i = 0; i < *count; i++) {
        if (sites[i].place == site.place) {
            return &sites[i];
        }
    }
    if (*count == size) {
        PyErr_SetString(PyExc_RuntimeError, "there are more builtins than the gate has room for");
        return NULL;
    }
    Site *made = &sites[(*count)++];
    *made = site;
    Py_INCREF(site.owner);
    return made;
}

static Site *
add_method(PyObject *descriptor)
{
    PyMethodDef *def = ((PyMethodDescrObject *)descriptor)->d_method;
    int flags = def->ml_flags & ~METH_COEXIST;
    Site site = {.flags = flags, .name = def->ml_name, .owner = descriptor, .place = def,
                 .original = (void *)(void (*)(void))def->ml_meth};
    if (flags == (METH_VARARGS | METH_KEYWORDS)) {
        site.kind = KEYWORDS;
        return new_site(keyword_sites, &keyword_count, KEYWORD_SITES, site);
    }
    if (flags == METH_VARARGS || flags == METH_NOARGS || flags == METH_O) {
        site.kind = PLAIN;
        return new_site(plain_sites, &plain_count, PLAIN_SITES, site);
    }
    PyErr_Format(PyExc_ValueError, "%s has a form of call that is not known: %d", def->ml_name,
                 def->ml_flags);
    return NULL;
}

static Site *
add_function(PyObject *function)
{
    PyMethodDef *def = ((PyCFunctionObject *)function)->m_ml;
    int flags = def->ml_flags & ~(METH_COEXIST | METH_STATIC);
    if (flags != (METH_VARARGS | METH_KEYWORDS)
        || (((PyCFunctionObject *)function)->vectorcall != NULL && !is_installed)) {
        PyErr_Format(PyExc_ValueError, "%s has a form of call that is not known: %d", def->ml_name,
                     def->ml_flags);
        return NULL;
    }
    Site site = {.kind = FUNCTION, .flags = flags, .name = def->ml_name, .owner = function,
                 .place = function, .original = (void *)(void (*)(void))def->ml_meth};
    Site *made = new_site(other_sites, &other_count, OTHER_SITES, site);
    if (made != NULL) {
        *function_slot(function) = made;
    }
    return made;
}

static Site *
add_property(PyObject *descriptor)
{
    PyGetSetDef *def = ((PyGetSetDescrObject *)descriptor)->d_getset;
    Site site = {.kind = GETTER, .name = def->name, .owner = descriptor, .place = def,
                 .original = (void *)(void (*)(void))def->get, .closure = def->closure};
    return new_site(other_sites, &other_count, OTHER_SITES, site);
}

PyDoc_STRVAR(add_doc, "add(builtin, reports_first)\n\nNotice calls of a method, a function or a "
"property.\n\n"
"Args:\n    reports_first: PyTorch reports it before it looks at the arguments.\n\nRaises:\n    ValueError: it is called in a form that the gate does not know.");

static PyObject *
gate_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    Site *site;
    PyObject *builtin;
    int reports_first;
    if (!PyArg_ParseTuple(args, "Op", &builtin, &reports_first)) {
        return NULL;
    }
    if (is_installed) {
        PyErr_SetString(PyExc_RuntimeError, "the gate is installed");
        return NULL;
    }
    if (Py_IS_TYPE(builtin, &PyMethodDescr_Type)) {
        site = add_method(builtin);
    }
    else if (PyCFunction_CheckExact(builtin)) {
        site = add_function(builtin);
    }
    else if (Py_IS_TYPE(builtin, &PyGetSetDescr_Type)) {
        site = add_property(builtin);
    }
    else {
        PyErr_Format(PyExc_ValueError, "%R is no builtin of a known kind", builtin);
        return NULL;
    }
    if (site == NULL) {
        return NULL;
    }
    site->reports_first = reports_first;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(add_mapping_doc, "add_mapping(type)\n\nNotice a[i] and a[i] = b of a builtin type and "
"its subclasses.");

static PyObject *
gate_add_mapping(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyTypeObject *type = (PyTypeObject *)object;
    if (is_installed || !PyType_Check(object) || type->tp_as_mapping == NULL
        || type->tp_as_mapping->mp_subscript == NULL
        || type->tp_as_mapping->mp_ass_subscript == NULL) {
        PyErr_SetString(PyExc_ValueError, "no type with both, or the gate is installed");
        return NULL;
    }
    if (mapping_base == object) {
        Py_RETURN_NONE;
    }
    PyMappingMethods *mapping = type->tp_as_mapping;
    Site sites[] = {
        {.kind = SUBSCRIPT, .name = "__getitem__", .owner = object,
         .place = &mapping->mp_subscript,
         .original = (void *)(void (*)(void))mapping->mp_subscript},
        {.kind = ASSIGNMENT, .name = "__setitem__", .owner = object,
         .place = &mapping->mp_ass_subscript,
         .original = (void *)(void (*)(void))mapping->mp_ass_subscript},
    };
    subscript = new_site(other_sites, &other_count, OTHER_SITES, sites[0]);
    assignment = new_site(other_sites, &other_count, OTHER_SITES, sites[1]);
    if (subscript == NULL || assignment == NULL) {
        return NULL;
    }
    Py_XSETREF(mapping_base, Py_NewRef(object));
    Py_RETURN_NONE;
}

/* Replace the slots of a type and its subclasses; those that others have replaced stay. */
static int
replace_mapping(PyObject *type, binaryfunc get, binaryfunc new_get, objobjargproc set,
                objobjargproc new_set)
{
    PyMappingMethods *mapping = ((PyTypeObject *)type)->tp_as_mapping;
    if (mapping != NULL && mapping->mp_subscript == get) {
        mapping->mp_subscript = new_get;
    }
    if (mapping != NULL && mapping->mp_ass_subscript == set) {
        mapping->mp_ass_subscript = new_set;
    }
    PyObject *below =
        PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int failed = below == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(below); i++) {
        failed = replace_mapping(PyList_GET_ITEM(below, i), get, new_get, set, new_set) < 0;
    }
    Py_XDECREF(below);
    return failed ? -1 : 0;
}

static void
replace_wrapped(const char *name, void *old, void *new)
{
    PyObject *found = PyDict_GetItemString(((PyTypeObject *)mapping_base)->tp_dict, name);
    if (found != NULL && Py_IS_TYPE(found, &PyWrapperDescr_Type)
        && ((PyWrapperDescrObject *)found)->d_wrapped == old) {
        ((PyWrapperDescrObject *)found)->d_wrapped = new;
    }
}

static int
set_mapping(int on)
{
    if (mapping_base == NULL) {
        return 0;
    }
    binaryfunc get = (binaryfunc)(void (*)(void))subscript->original;
    objobjargproc set = (objobjargproc)(void (*)(void))assignment->original;
    void *gets[] = {subscript->original, (void *)(void (*)(void))through_subscript};
    void *sets[] = {assignment->original, (void *)(void (*)(void))through_assignment};
    replace_wrapped("__getitem__", gets[!on], gets[on]);
    replace_wrapped("__setitem__", sets[!on], sets[on]);
    replace_wrapped("__delitem__", sets[!on], sets[on]);
    if (on) {
        return replace_mapping(mapping_base, get, through_subscript, set, through_assignment);
    }
    return replace_mapping(mapping_base, through_subscript, get, through_assignment, set);
}

static void
set_method(Site *site, PyCFunction trampoline, int on)
{
    PyMethodDef *def = site->place;
    PyCFunction original = (PyCFunction)(void (*)(void))site->original;
    if (def->ml_meth == (on ? original : trampoline)) {
        def->ml_meth = on ? trampoline : original;
    }
}

static void
set_other(Site *site, int on)
{
    if (site->kind == FUNCTION) {
        PyCFunctionObject *function = site->place;
        if (function->vectorcall == (on ? NULL : through_function)) {
            function->vectorcall = on ? through_function : NULL;
        }
    }
    else if (site->kind == GETTER) {
        PyGetSetDef *def = site->place;
        getter original = (getter)(void (*)(void))site->original;
        if (def->get == (on ? original : through_getter)) {
            def->closure = on ? site : site->closure;
            def->get = on ? through_getter : original;
        }
    }
}

static void
set_hook(Builtin *builtin, PyCFunction hook, int on)
{
    if (Py_IS_TYPE(builtin->owner, &PyMethodDescr_Type)) {
        PyMethodDescrObject *method = (PyMethodDescrObject *)builtin->owner;
        builtin->own = *builtin->def;
        builtin->own.ml_meth = hook;
        if (method->d_method == (on ? builtin->def : &builtin->own)) {
            method->d_method = on ? &builtin->own : builtin->def;
        }
    }
    else if (builtin->def->ml_meth == (on ? builtin->original : hook)) {
        builtin->def->ml_meth = on ? hook : builtin->original;
    }
}

static int
set_all(int on)
{
    for (Py_ssize_t i = 0; i < keyword_count; i++) {
        set_method(&keyword_sites[i], (PyCFunction)(void (*)(void))keyword_trampolines[i], on);
    }
    for (Py_ssize_t i = 0; i < plain_count; i++) {
        set_method(&plain_sites[i], plain_trampolines[i], on);
    }
    for (Py_ssize_t i = 0; i < other_count; i++) {
        set_other(&other_sites[i], on);
    }
    set_hook(&stack.push, hook_push, on);
    set_hook(&stack.pop, hook_pop, on);
    set_hook(&stack.length, hook_length, on);
    set_hook(&stack.at, (PyCFunction)(void (*)(void))hook_at, on);
    set_hook(&stack.disable, hook_disable, on);
    set_hook(&stack.enable, hook_enable, on);
    set_hook(&stack.place, hook_place, on);
    set_hook(&stack.replace, hook_replace, on);
    return set_mapping(on);
}

PyDoc_STRVAR(install_doc, "install()\n\nNotice calls from now on.");

static PyObject *
gate_install(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (python.mode == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
        return NULL;
    }
    is_installed = 1;
    return set_all(1) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(restore_doc, "restore()\n\nPut back what is still the gate's. No mode is virtual from "
"then on.");

static PyObject *
gate_restore(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (!is_installed) {
        Py_RETURN_NONE;
    }
    session++;
    (void)virtual_mode();
    is_installed = 0;
    unsettle_all();
    free_spare_dicts();
    forget_found();
    return set_all(0) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(is_installed_doc, "is_installed()\n\nWhether calls are noticed.");

static PyObject *
gate_is_installed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    return PyBool_FromLong(is_installed);
}

PyDoc_STRVAR(sites_doc, "sites()\n\nWhat is noticed: tuples of its name, the builtin, the address "
"that is written to, what stands there now, and what PyTorch reports for it (None if not known).");

static int
append_row(PyObject *list, const char *name, PyObject *owner, void *address, PyObject *operator)
{
    void *now;
    memcpy(&now, address, sizeof now);
    PyObject *row = Py_BuildValue("sOKKO", name, owner, (unsigned long long)(uintptr_t)address,
                                  (unsigned long long)(uintptr_t)now,
                                  operator == NULL ? Py_None : operator);
    int failed = row == NULL || PyList_Append(list, row) < 0;
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

static int
append_sites(PyObject *list, const Site *sites, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        const Site *site = &sites[i];
        void *address = site->place;
        if (site->kind == KEYWORDS || site->kind == PLAIN) {
            address = &((PyMethodDef *)site->place)->ml_meth;
        }
        else if (site->kind == FUNCTION) {
            address = &((PyCFunctionObject *)site->place)->vectorcall;
        }
        else if (site->kind == GETTER) {
            address = &((PyGetSetDef *)site->place)->get;
        }
        if (append_row(list, site->name, site->owner, address, site->operator) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
append_hooks(PyObject *list)
{
    Builtin *hooks[] = {&stack.push,    &stack.pop,    &stack.length, &stack.at,
                        &stack.disable, &stack.enable, &stack.place,  &stack.replace};
    for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++) {
        Builtin *hook = hooks[i];
        void *address = Py_IS_TYPE(hook->owner, &PyMethodDescr_Type)
                            ? (void *)&((PyMethodDescrObject *)hook->owner)->d_method
                            : (void *)&hook->def->ml_meth;
        if (append_row(list, hook->def->ml_name, hook->owner, address, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
gate_sites(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (python.mode == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
        return NULL;
    }
    PyObject *list = PyList_New(0);
    if (list == NULL || append_hooks(list) < 0
        || append_sites(list, keyword_sites, keyword_count) < 0
        || append_sites(list, plain_sites, plain_count) < 0
        || append_sites(list, other_sites, other_count) < 0) {
        Py_XDECREF(list);
        return NULL;
    }
    return list;
}

/* Where a slot of a Python class lies in its instances; -1 with an error if there is none. */
static Py_ssize_t
slot_offset(PyTypeObject *type, const char *name)
{
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (found == NULL) {
        return -1;
    }
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type)
        && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX) {
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    }
    else {
        PyErr_Format(PyExc_TypeError, "%s.%s is no slot", type->tp_name, name);
    }
    Py_DECREF(found);
    return offset;
}

static int
find_slots(void)
{
    struct {
        PyTypeObject *type;
        const char *name;
        Py_ssize_t *offset;
    } slots[] = {
        {python.mode, "cells", &python.mode_cells},
        {python.mode, "frame", &python.mode_frame},
        {python.mode, "root", &python.mode_root},
        {python.mode, "generation", &python.mode_generation},
        {python.mode, "stale", &python.mode_stale},
        {python.mode, "thread", &python.mode_thread},
        {python.mode, "iteration", &python.mode_iteration},
        {python.frame, "cells", &python.frame_cells},
        {python.frame, "names", &python.frame_names},
        {python.frame, "children", &python.frame_children},
        {python.frame, "generation", &python.frame_generation},
        {python.frame, "caller", &python.frame_caller},
        {python.child, "ref", &python.child_ref},
        {python.child, "transparent", &python.child_transparent},
        {python.child, "is_fused", &python.child_fused},
        {python.child, "calls", &python.child_calls},
        {python.child, "frames", &python.child_frames},
        {python.known, "run", &python.known_run},
        {python.known, "is_claim", &python.known_claim},
        {python.known, "inlined_before", &python.known_before},
        {python.known, "inlined_after", &python.known_after},
        {python.known, "claims", &python.known_claims},
        {python.known, "gradients", &python.known_gradients},
        {python.known, "checked", &python.known_checked},
        {python.known, "claimed", &python.known_claimed},
        {python.known, "iterations", &python.known_iterations},
        {python.known, "op_id", &python.known_op_id},
        {python.known, "owners", &python.known_owners},
        {python.known, "name", &python.known_name},
        {python.known, "layout", &python.known_layout},
        {python.known, "is_blind", &python.known_blind},
        {python.known, "around_before", &python.known_around_before},
        {python.known, "around_after", &python.known_around_after},
        {python.known, "resumed_before", &python.known_resumed_before},
        {python.known, "resumed_after", &python.known_resumed_after},
    };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        *slots[i].offset = slot_offset(slots[i].type, slots[i].name);
        if (*slots[i].offset < 0) {
            return -1;
        }
    }
    return 0;
}

/* Note a builtin that the gate calls with the flags that it expects. */
static int
find_builtin(Builtin *builtin, PyObject *object, int flags)
{
    PyMethodDef *def = NULL;
    PyObject *self = NULL;
    if (PyCFunction_CheckExact(object)) {
        def = ((PyCFunctionObject *)object)->m_ml;
        self = PyCFunction_GET_SELF(object);
    }
    else if (Py_IS_TYPE(object, &PyMethodDescr_Type)) {
        def = ((PyMethodDescrObject *)object)->d_method;
    }
    if (def == NULL || (def->ml_flags & ~METH_COEXIST) != flags) {
        PyErr_Format(PyExc_ValueError, "%R has a form of call that is not known", object);
        return -1;
    }
    builtin->owner = Py_NewRef(object);
    builtin->self = self;
    builtin->def = def;
    builtin->original = def->ml_meth;
    return 0;
}

PyDoc_STRVAR(configure_doc,
"configure(mode, frame, child, known, no_operator, is_report_of, builtins)\n\n"
"Name the objects of the driver and of PyTorch, once per process.\n\n"
"Args:\n"
"    mode, frame, child, known: classes with __slots__: the mode, the call of a module, a module\n"
"        that is called, and what is known of an operator.\n"
"    no_operator: what stands in the tables of operators for what is none, see Interceptor.\n"
"    is_report_of: whether PyTorch reports an object for a builtin of a name.\n"
"    builtins: push, pop, length, at and is_disabled of the stack of modes; __enter__ and\n"
"        __exit__ of what turns it off, and of what pushes and pops a mode in C++; whether\n"
"        gradients are recorded.");

static PyObject *
gate_configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *known, *builtins[10];
    if (python.mode != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the gate has been configured");
        return NULL;
    }
    PyTypeObject *mode;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OO(OOOOOOOOOO)", &PyType_Type, &mode,
                          &PyType_Type, &python.frame, &PyType_Type, &python.child, &PyType_Type,
                          &known, &python.no_operator, &python.is_report_of,
                          &builtins[0], &builtins[1], &builtins[2], &builtins[3], &builtins[4],
                          &builtins[5], &builtins[6], &builtins[7], &builtins[8], &builtins[9])) {
        return NULL;
    }
    if (find_builtin(&stack.push, builtins[0], METH_O) < 0
        || find_builtin(&stack.pop, builtins[1], METH_NOARGS) < 0
        || find_builtin(&stack.length, builtins[2], METH_NOARGS) < 0
        || find_builtin(&stack.at, builtins[3], METH_VARARGS | METH_KEYWORDS) < 0
        || find_builtin(&stack.is_disabled, builtins[4], METH_NOARGS) < 0
        || find_builtin(&stack.disable, builtins[5], METH_NOARGS) < 0
        || find_builtin(&stack.enable, builtins[6], METH_VARARGS) < 0
        || find_builtin(&stack.place, builtins[7], METH_NOARGS) < 0
        || find_builtin(&stack.replace, builtins[8], METH_VARARGS) < 0
        || find_builtin(&stack.is_recording, builtins[9], METH_NOARGS) < 0) {
        return NULL;
    }
    python.mode = mode;
    python.known = (PyTypeObject *)known;
    if (find_slots() < 0) {
        python.mode = NULL;
        return NULL;
    }
    Py_INCREF(mode);
    Py_INCREF(python.frame);
    Py_INCREF(python.child);
    Py_INCREF(known);
    Py_INCREF(python.no_operator);
    Py_INCREF(python.is_report_of);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(configure_inlined_doc,
"configure_inlined(objects)\n\nName what routines run without Python are made of, once per process.\n\n"
"Args:\n    objects: a dict, see amanda_torch.eager.gate.\n\n"
"Returns:\n    Whether numbers are added to arrays where they lie; if not, Python adds them.");

static int
find_inlined_slots(void)
{
    struct {
        PyObject *type;
        const char *name;
        Py_ssize_t *offset;
    } slots[] = {
        {inlined.counter, "count", &at.counter_count},
        {inlined.timer, "_started", &at.timer_started},
        {inlined.timer, "executions", &at.timer_executions},
        {inlined.timer, "nanoseconds", &at.timer_nanoseconds},
        {inlined.timer, "log", &at.timer_log},
        {inlined.timer, "number", &at.timer_number},
        {inlined.log, "numbers", &at.log_numbers},
        {inlined.log, "due", &at.log_due},
        {inlined.check, "_held", &at.check_held},
        {inlined.check, "overwrites", &at.check_overwrites},
        {inlined.check, "trail", &at.check_trail},
        {inlined.check, "name", &at.check_name},
        {inlined.sums, "_held", &at.sum_held},
        {inlined.sums, "_weights", &at.sum_weights},
        {inlined.sums, "amount", &at.sum_amount},
        {inlined.sums, "executions", &at.sum_executions},
        {inlined.sums, "total", &at.sum_total},
        {inlined.sums, "last", &at.sum_last},
        {inlined.sums, "of", &at.sum_of},
        {inlined.gradients, "graph", &at.gradients_graph},
        {inlined.gradients, "form", &at.gradients_form},
        {inlined.gradients, "handle", &at.gradients_handle},
        {inlined.gradients, "natives", &at.gradients_leaves},
        {inlined.graph, "form", &at.graph_form},
        {inlined.graph, "natives", &at.graph_natives},
        {inlined.graph, "inner", &at.graph_inner},
        {inlined.hooks, "has_before", &at.hooks_before},
        {inlined.hooks, "has_after", &at.hooks_after},
        {inlined.hooks, "_dispatcher", &at.hooks_dispatcher},
        {inlined.hooks, "_key", &at.hooks_key},
        {inlined.hooks, "_handle", &at.hooks_handle},
        {inlined.handle, "scopes", &at.handle_scopes},
        {inlined.routines, "inlined_before", &at.routines_before},
        {inlined.routines, "inlined_after", &at.routines_after},
        {inlined.layout, "_func", &at.layout_func},
        {inlined.layout, "_keywords", &at.layout_keywords},
        {inlined.layout, "_types", &at.layout_types},
        {inlined.layout, "_lists", &at.layout_lists},
        {inlined.layout, "_places", &at.layout_places},
        {inlined.layout, "is_in_place", &at.layout_in_place},
        {inlined.action, "func", &at.action_func},
        {inlined.action, "select", &at.action_select},
        {inlined.action, "kwargs", &at.action_kwargs},
    };
    for (size_t i = 0; i < sizeof slots / sizeof *slots; i++) {
        if (!PyType_Check(slots[i].type)) {
            PyErr_Format(PyExc_TypeError, "%R is no class", slots[i].type);
            return -1;
        }
        *slots[i].offset = slot_offset((PyTypeObject *)slots[i].type, slots[i].name);
        if (*slots[i].offset < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
gate_configure_inlined(PyObject *Py_UNUSED(module), PyObject *objects)
{
    struct {
        const char *name;
        PyObject **place;
    } all[] = {
        {"timer", &inlined.timer},       {"log", &inlined.log},
        {"start", &inlined.start},       {"clock", &inlined.clock},
        {"native", &inlined.native},     {"look", &inlined.look},
        {"graph", &inlined.graph},       {"gradients", &inlined.gradients},
        {"hooks", &inlined.hooks},       {"routines", &inlined.routines},
        {"tensor", &inlined.tensor},     {"state", &inlined.state},
        {"sequence", &inlined.sequence}, {"checks", &inlined.checks},
        {"handle", &inlined.handle},     {"kinds", &inlined.kinds},
        {"node", &inlined.node},         {"task", &inlined.task},
        {"check", &inlined.check},       {"before", &inlined.before},
        {"sum", &inlined.sum},           {"item", &inlined.item},
        {"plain", &inlined.plain},       {"tensors", &inlined.tensors},
        {"set_recording", &inlined.set_recording},
        {"sums", &inlined.sums},         {"add_after", &inlined.add_after},
        {"layout", &inlined.layout},     {"action", &inlined.action},
        {"version", &inlined.version},   {"tensors_of", &inlined.tensors_of},
        {"acquire", &inlined.acquire},   {"release", &inlined.release},
        {"unpaused", &inlined.unpaused}, {"raised", &inlined.raised},
        {"changed", &inlined.changed},   {"numbers", &inlined.numbers},
        {"counter", &inlined.counter},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        PyObject *found = PyDict_Check(objects) ? PyDict_GetItemString(objects, all[i].name) : NULL;
        if (found == NULL) {
            PyErr_Format(PyExc_TypeError, "there is no %s", all[i].name);
            return NULL;
        }
        Py_XSETREF(*all[i].place, Py_NewRef(found));
    }
    if (!PyTuple_CheckExact(inlined.checks) || !PyTuple_CheckExact(inlined.plain)
        || !PyTuple_CheckExact(inlined.tensors) || !PyDict_CheckExact(inlined.kinds)
        || !PyDict_CheckExact(inlined.unpaused)
        || !Py_IS_TYPE(inlined.version, &PyGetSetDescr_Type)
        || find_inlined_slots() < 0) {
        Py_CLEAR(inlined.counter);
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "what is to be a tuple, a dict or a property is none");
        }
        return NULL;
    }
    numbers_type = NULL;
    return PyBool_FromLong(configure_numbers(inlined.numbers));
}

PyDoc_STRVAR(configure_native_doc,
"configure_native(addresses, keys, depth, checks, plain, function)\n\nName functions in C++ that are "
"called instead of their bindings, once per process.\n\n"
"Args:\n"
"    addresses: of what gives the number of the next node, and that of the current pass, and of\n"
"        what says whether a dispatch key is on, and whether gradients are recorded.\n"
"    keys: numbers of those that are on in transforms and tracers.\n"
"    depth: gives the number of dispatch modes.\n"
"    checks, plain: what is left of the questions of configure_inlined() where there are none.\n"
"    function: torch.autograd.Function.\n\n"
"Raises:\n    ValueError: they give something else than their bindings.");

/* Whether the functions answer as their bindings do. */
static int
agrees(unsigned long long sequence, unsigned long long task, unsigned long long recording)
{
    PyObject *next = PyObject_CallNoArgs(inlined.sequence), *pass = NULL;
    int records = is_recording();
    if (next != NULL) {
        pass = PyObject_CallNoArgs(inlined.task);
    }
    int is_same = pass != NULL && ((_Bool (*)(void))(uintptr_t)recording)() == records
                  && ((uint64_t(*)(void))(uintptr_t)sequence)() == PyLong_AsUnsignedLongLong(next)
                  && ((int (*)(void))(uintptr_t)task)() == PyLong_AsLong(pass);
    Py_XDECREF(next);
    Py_XDECREF(pass);
    return is_same && !PyErr_Occurred();
}

static PyObject *
gate_configure_native(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long sequence, task, is_included, recording;
    PyObject *keys, *depth, *checks, *plain, *function;
    if (!PyArg_ParseTuple(args, "(KKKK)O!OO!O!O", &sequence, &task, &is_included, &recording,
                          &PyTuple_Type, &keys, &depth, &PyTuple_Type, &checks, &PyTuple_Type, &plain, &function)) {
        return NULL;
    }
    uint16_t numbers[sizeof native.keys / sizeof *native.keys] = {0};
    Py_ssize_t room = sizeof numbers / sizeof *numbers;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys) && i < room; i++) {
        numbers[i] = (uint16_t)PyLong_AsLong(PyTuple_GET_ITEM(keys, i));
    }
    if (PyTuple_GET_SIZE(keys) > room || inlined.counter == NULL || !agrees(sequence, task, recording)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "functions in C++ differ from their bindings");
        }
        return NULL;
    }
    if (PyErr_Occurred() || find_builtin(&native.depth, depth, METH_NOARGS) < 0) {
        return NULL;
    }
    memcpy(native.keys, numbers, sizeof numbers);
    native.sequence = (uint64_t(*)(void))(uintptr_t)sequence;
    native.task = (int (*)(void))(uintptr_t)task;
    native.is_recording = (_Bool (*)(void))(uintptr_t)recording;
    native.is_included = (_Bool (*)(uint16_t))(uintptr_t)is_included;
    Py_XSETREF(native.checks, Py_NewRef(checks));
    Py_XSETREF(native.plain, Py_NewRef(plain));
    native.meta = (PyTypeObject *)Py_NewRef(Py_TYPE(function));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hook_registrar_doc, "hook_registrar(vanilla)\n\nFor ``_register_hook`` of "
"torch.autograd.Function: hooks of register() need no handle.");

static PyObject *
gate_hook_registrar(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return PyCFunction_New(&add_hook_def, vanilla);
}

PyDoc_STRVAR(register_doc, "register(hooks, node)\n\nHook a node, as NodeHooks.register() does.");

static PyObject *
gate_register(PyObject *module, PyObject *args)
{
    PyObject *hooks, *node;
    if (!PyArg_ParseTuple(args, "OO", &hooks, &node)) {
        return NULL;
    }
    Hook *hook = (Hook *)gate_hook(module, hooks);
    int failed = hook == NULL || attach_hook(node, hook) < 0;
    Py_XDECREF(hook);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(operator_call_doc, "operator_call(vanilla)\n\nFor ``__call__`` of a class of "
"operators: calls are noticed as those of the instance.");

static PyObject *
gate_operator_call(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return new_call(OPERATOR, vanilla);
}

PyDoc_STRVAR(reported_doc, "reported(vanilla)\n\nFor a function that reports itself to modes "
"although it is no operator: it always does.");

static PyObject *
gate_reported(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return new_call(REPORTED, vanilla);
}

PyDoc_STRVAR(event_doc, "event(handler)\n\nFor ``__torch_function__`` of the mode.");

static PyObject *
gate_event(PyObject *Py_UNUSED(module), PyObject *handler)
{
    return new_call(EVENT, handler);
}

PyDoc_STRVAR(module_call_doc, "module_call(vanilla, function)\n\nHave a function for ``__call__`` of "
"modules run in C where that can be, and return it.\n\n"
"Args:\n    vanilla: calls the module.\n    function: enters it, calls it and leaves it.");

static PyObject *
gate_module_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *vanilla, *function;
    if (!PyArg_ParseTuple(args, "OO!", &vanilla, &PyFunction_Type, &function)) {
        return NULL;
    }
    Py_XSETREF(module_vanilla, Py_NewRef(vanilla));
    call_python = ((PyFunctionObject *)function)->vectorcall;
    ((PyFunctionObject *)function)->vectorcall = through_module;
    return Py_NewRef(function);
}

static PyMethodDef methods[] = {
    {"add", gate_add, METH_VARARGS, add_doc},
    {"add_executions", gate_add_executions, METH_VARARGS, add_executions_doc},
    {"add_mapping", gate_add_mapping, METH_O, add_mapping_doc},
    {"attach", gate_attach, METH_VARARGS, attach_doc},
    {"can_time", gate_can_time, METH_VARARGS, can_time_doc},
    {"claim", (PyCFunction)(void (*)(void))gate_claim, METH_FASTCALL, claim_doc},
    {"configure", gate_configure, METH_VARARGS, configure_doc},
    {"configure_hooks", gate_configure_hooks, METH_VARARGS, configure_hooks_doc},
    {"configure_inlined", gate_configure_inlined, METH_O, configure_inlined_doc},
    {"configure_nodes", gate_configure_nodes, METH_O, configure_nodes_doc},
    {"configure_native", gate_configure_native, METH_VARARGS, configure_native_doc},
    {"configure_tensors", gate_configure_tensors, METH_VARARGS, configure_tensors_doc},
    {"exchange", gate_exchange, METH_VARARGS, exchange_doc},
    {"event", gate_event, METH_O, event_doc},
    {"follow", gate_follow, METH_VARARGS, follow_doc},
    {"forget", gate_forget, METH_NOARGS, forget_doc},
    {"hook", gate_hook, METH_O, hook_doc},
    {"hook_registrar", gate_hook_registrar, METH_O, hook_registrar_doc},
    {"install", gate_install, METH_NOARGS, install_doc},
    {"is_installed", gate_is_installed, METH_NOARGS, is_installed_doc},
    {"module_call", gate_module_call, METH_VARARGS, module_call_doc},
    {"probe", gate_probe, METH_O, probe_doc},
    {"operator_call", gate_operator_call, METH_O, operator_call_doc},
    {"register", gate_register, METH_VARARGS, register_doc},
    {"reported", gate_reported, METH_O, reported_doc},
    {"restore", gate_restore, METH_NOARGS, restore_doc},
    {"sites", gate_sites, METH_NOARGS, sites_doc},
    {"time_pass", gate_time_pass, METH_VARARGS, time_pass_doc},
    {NULL, NULL, 0, NULL},
};

static int
gate_exec(PyObject *Py_UNUSED(module))
{
    /* Python 3.12 refuses it by itself. What is here, and what is written to, belongs to the process. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "the gate works in the main interpreter only");
        return -1;
    }
    zero = PyLong_FromLong(0);
    one = PyLong_FromLong(1);
    paused_name = PyUnicode_InternFromString("paused");
    if (zero == NULL || one == NULL || paused_name == NULL || make_numbers() < 0 || make_names() < 0) {
        return -1;
    }
    HookDict_Type.tp_base = &PyDict_Type;
    PyTypeObject *types[] = {&Hook_Type, &HookDict_Type, &Accumulation_Type, &Entry_Type,
                             &Probe_Type, &Timed_Type, &Call_Type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyType_Ready(types[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot gate_slots[] = {
    {Py_mod_exec, gate_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef gate_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "amanda_torch_accel.gate",
    .m_doc = "Notices the calls of PyTorch's builtins; see gate.c.",
    .m_methods = methods,
    .m_slots = gate_slots,
};

PyMODINIT_FUNC
PyInit_gate(void)
{
    return PyModuleDef_Init(&gate_module);
}
