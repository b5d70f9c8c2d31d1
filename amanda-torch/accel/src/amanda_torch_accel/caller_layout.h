/* Part of gate.c: how autograd calls hooks. */

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
"configure_hooks(nodes, types, undefined, allocator)\n\nFind out how autograd calls the hooks of nodes. "
"Without arguments, Python's way is taken.\n\n"
"Args:\n    nodes: a list of some that C++ defines, which are of no use after that.\n"
"    types: addresses of the type_info of the classes of hooks before and after nodes.\n"
"    undefined: the address of what tensors are that are undefined.\n"
"    allocator: the address of operator new.\n\n"
"Returns:\n    Whether it was found out.");

static PyObject *
gate_configure_hooks(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *nodes = NULL;
    unsigned long long types[2], undefined, allocator;
    callers[0].place = callers[1].place = 0;
    if (PyTuple_GET_SIZE(args) == 0) {
        Py_RETURN_FALSE;
    }
    if (!PyArg_ParseTuple(args, "O!(KK)KK", &PyList_Type, &nodes, &types[0], &types[1], &undefined,
                          &allocator)) {
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
    undefined_tensor = (const void *)(uintptr_t)undefined;
    allocate = (void *(*)(size_t))(uintptr_t)allocator;
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

PyDoc_STRVAR(configure_versions_doc,
"configure_versions(tensors, addresses, function)\n\nFind out where in memory tensors count how often "
"they were changed in place.\n\n"
"Args:\n    tensors: a list of some that differ in that, and that may not be changed meanwhile.\n"
"    addresses: where Python says that they are.\n"
"    function: the address of the one in C++ that says where a tensor refers to its count.\n\n"
"Returns:\n    Whether there is one such place; if not, Python is asked.");

static PyObject *
gate_configure_versions(PyObject *Py_UNUSED(module), PyObject *args)
{
    /* What is looked through of a count is after its table of virtual functions, and no more than it has. */
    enum { FIRST = 2, WORDS = 5 };
    PyObject *tensors, *addresses;
    unsigned long long function;
    int places = 0, is_at[WORDS] = {0, 0, 1, 1, 1};
    native.counter = NULL;
    if (!PyArg_ParseTuple(args, "O!O!K", &PyList_Type, &tensors, &PyList_Type, &addresses, &function)
        || PyList_GET_SIZE(tensors) != PyList_GET_SIZE(addresses)) {
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    }
    const uint32_t *const *(*counter)(const void *) =
        (const uint32_t *const *(*)(const void *))(uintptr_t)function;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        if (*(const uintptr_t *)(tensor + 1) != PyLong_AsUnsignedLongLong(PyList_GET_ITEM(addresses, i))) {
            return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
        }
        PyGetSetDescrObject *property = (PyGetSetDescrObject *)inlined.version;
        PyObject *version = property->d_getset->get(tensor, property->d_getset->closure);
        if (version == NULL) {
            return NULL;
        }
        for (int k = FIRST; k < WORDS; k++) {
            is_at[k] = is_at[k] && (*counter(tensor + 1))[k] == PyLong_AsUnsignedLong(version);
        }
        Py_DECREF(version);
    }
    for (int k = FIRST; k < WORDS; k++) {
        places += is_at[k];
        native.version = is_at[k] ? k : native.version;
    }
    if (places == 1) {
        native.counter = counter;
    }
    return PyBool_FromLong(places == 1);
}
