/* Part of gate.c: calls of operators, and the tracker's objects. */

/* The slots of a type whose objects C makes, for PyTorch to call. They are in no cycle of references. */
#define CALLED_SLOTS(type)                                                                            \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,  \
    .tp_vectorcall_offset = offsetof(type, vectorcall), .tp_call = PyVectorcall_Call

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
    int unreported;     /* calls in a row that PyTorch has reported nothing of, or HEARD */
    int reports_first;  /* it is reported before PyTorch looks at its arguments */
    PyObject *owner;    /* the descriptor or function; keeps the place alive */
    void *closure;      /* of a getter */
    const char *name;
    void *place;        /* PyMethodDef, PyCFunctionObject or PyGetSetDef */
    uint64_t fitting[FITTING]; /* signatures of calls that were reported, the last ones */
    unsigned fitting_count;
} Site;

/* Calls without a report after which a builtin is taken to be none that reports itself. One that has
   been reported is not: a program may turn reports off for a while, as PyTorch's tracers do. */
#define SILENT 3
#define HEARD (-1)

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

/* ---- the tracker's objects ------------------------------------------------------------------- */

/* The objects of the tracker are Python's, with __slots__; these are the offsets of the slots. Those that are
   read at each operator come first. */
static ON_A_LINE struct {
    PyTypeObject *known;
    Py_ssize_t mode_cells, mode_stale, mode_iteration, known_claim, known_before, known_after;
    PyObject *no_operator; /* the cell of functions that are no operators */
    PyTypeObject *mode, *frame, *child;
    Py_ssize_t mode_frame, mode_root, mode_generation, mode_thread;
    Py_ssize_t frame_cells, frame_names, frame_children, frame_generation, frame_caller,
        frame_module;
    Py_ssize_t child_ref, child_transparent, child_fused, child_calls, child_frames;
    Py_ssize_t known_run, known_claims, known_gradients;
    Py_ssize_t known_claimed, known_checked, known_iterations, known_op_id, known_owners;
    Py_ssize_t known_name, known_layout, known_blind, known_around_before, known_around_after;
    Py_ssize_t known_resumed_before, known_resumed_after;
    PyObject *is_report_of; /* Python function: (name of a builtin, what is reported) -> bool */
} python;

static PyObject *zero, *one, *paused_name;

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
