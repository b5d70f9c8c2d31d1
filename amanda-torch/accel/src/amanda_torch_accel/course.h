/* Part of gate.c: what comes next. */

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
   call of a module, what it has found and where it has looked: where that is not as in the iteration before,
   and now and then anyway, as numbers that are counted in are other objects then.
   In the next iteration the processor is told to fetch that one step before it is needed.

   The course that is kept is that of one thread at a time. It is there for speed alone: nothing is read at
   the addresses that are noted, since the objects may be gone, and what a step does not hold is looked up. */
#define STEP_LINES 26
/* Those that are fetched without a look at how many there are: branches of which the processor cannot tell
   where they go cost more. */
#define FIRST_LINES 8
typedef struct {
#if HAS_VERSIONS
    Found found;
#endif
    const void *first, *second; /* what tells whether all is as it was; compared only */
    Py_ssize_t noted;
    uintptr_t lines[STEP_LINES];
} Step;

#define RENEWED 64 /* iterations after which all steps are noted anew */

#define STEPS 8192
#define STRANGERS 4096
static ON_A_LINE struct {
    const void *thread, *iteration; /* whose steps they are; compared only */
    Py_ssize_t next, end; /* of steps: the number of the next one, and how many there have been */
    int strangers;        /* steps of other threads since its last one */
    Step *step;           /* the present one */
    int notes;            /* whether it is noted in */
    unsigned iterations;  /* how many have begun */
    ON_A_LINE Step steps[STEPS + 2]; /* the last but one is for steps that it does not hold */
} course = {.step = &course.steps[STEPS]};

/* Have what lies there fetched in the next iteration before this step. */
static inline void
note(const void *address)
{
    Step *step = course.step;
    uintptr_t line = (uintptr_t)address & ~(uintptr_t)(LINE - 1);
    if (!course.notes) {
        return;
    }
    if (step->noted < STEP_LINES && (step->noted == 0 || step->lines[step->noted - 1] != line)) {
        step->lines[step->noted++] = line;
    }
}

/* Note in the present step, unless it has found these two before; whether it is noted in. */
static inline int
begin_notes(const void *first, const void *second)
{
    Step *step = course.step;
    if (LIKELY(step->first == first && step->second == second && course.iterations % RENEWED != 0)) {
        return 0;
    }
    step->first = first;
    step->second = second;
    step->noted = 0;
    for (int i = 0; i < FIRST_LINES; i++) {
        step->lines[i] = (uintptr_t)step;
    }
    return course.notes = 1;
}

/* A step begins, in an iteration of a thread. */
static inline void
begin_step(const void *thread, const void *iteration)
{
    course.notes = 0;
    if (course.thread != thread || course.iteration != iteration) {
        if (course.thread != thread && course.thread != NULL && ++course.strangers < STRANGERS) {
            course.step = &course.steps[STEPS];
            return;
        }
        course.thread = thread;
        course.iteration = iteration;
        course.iterations++;
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
    for (int i = 0; i < FIRST_LINES; i++) {
        PREFETCH((const void *)step[1].lines[i]);
    }
    for (Py_ssize_t i = FIRST_LINES; i < step[1].noted; i++) {
        PREFETCH((const void *)step[1].lines[i]);
    }
    PREFETCH(&step[2]);
    PREFETCH((const char *)&step[2] + LINE);
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
