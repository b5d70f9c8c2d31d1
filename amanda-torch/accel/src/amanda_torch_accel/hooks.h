/* Part of gate.c: hooks of autograd's nodes. */

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
        *kind = key_of(values, 2);
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
add_hook(PyObject *vanilla, PyObject *const *values, Py_ssize_t count, PyObject *names)
{
    int is_ours = count == 2 && names == NULL
                  && (Py_IS_TYPE(values[1], &Hook_Type) || Py_IS_TYPE(values[1], &Entry_Type)
                      || Py_IS_TYPE(values[1], &Accumulation_Type));
    if (!is_ours && (count != 2 || names != NULL || values[1] != attached)) {
        return PyObject_Vectorcall(vanilla, values, count, names);
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

/* Register a hook of Python's that is never removed. */
static int
attach_python(PyObject *node, PyObject *hook, int is_after)
{
    PyObject *outer = attached;
    attached = hook;
    int failed = attach(node, hook, is_after) < 0;
    attached = outer;
    return failed ? -1 : 0;
}

static PyObject *
gate_attach(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *node, *hook;
    int is_after;
    if (!PyArg_ParseTuple(args, "OOp", &node, &hook, &is_after)) {
        return NULL;
    }
    return attach_python(node, hook, is_after) < 0 ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef add_hook_def = {"_register_hook", (PyCFunction)(void (*)(void))add_hook,
                                   METH_FASTCALL | METH_KEYWORDS, NULL};
