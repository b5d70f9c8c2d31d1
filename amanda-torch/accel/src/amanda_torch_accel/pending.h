/* Part of gate.c: backward operators of which analyses have yet to run. */

/* These are told the tensors of the first execution that a backward pass comes to. Until one does, every
   execution is noted, and a program that runs its model without torch.no_grad() has no other. What follows
   is Claimer.claim() of amanda_torch.autograd.claims for operators whose outputs have one node; Python
   makes of it what it needs where a pass comes to them. */

/* The tensors of an execution, held weakly; see the class of Python. */
typedef struct {
    PyObject_VAR_HEAD
    Py_ssize_t inputs, outputs;
    PyObject *references[1]; /* to them, None for an absent one, and to the running modules */
} Past;

static PyObject *
past_parts(PyObject *object, PyObject *Py_UNUSED(argument))
{
    Past *self = (Past *)object;
    PyObject *list = PyList_New(Py_SIZE(self));
    for (Py_ssize_t i = 0; list != NULL && i < Py_SIZE(self); i++) {
        PyList_SET_ITEM(list, i, Py_NewRef(self->references[i]));
    }
    return list == NULL ? NULL : Py_BuildValue("Nnn", list, self->inputs, self->outputs);
}

PyDoc_STRVAR(parts_doc, "parts()\n\nAll references, and how many are to inputs and to outputs.");

static PyMethodDef past_methods[] = {
    {"parts", past_parts, METH_NOARGS, parts_doc},
    {NULL, NULL, 0, NULL},
};

static void
past_dealloc(Past *self)
{
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) {
        Py_XDECREF(self->references[i]);
    }
    PyObject_Free(self);
}

static PyTypeObject Past_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Past",
    .tp_basicsize = offsetof(Past, references),
    .tp_itemsize = sizeof(PyObject *),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_methods = past_methods,
    .tp_dealloc = (destructor)past_dealloc,
};

/* The hook of the node of an output, before and after it. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *claimer, *gradients, *graph;
    Past *past;
    PyObject *reached; /* a list of accumulations */
    PyObject *claim;   /* what does its work as soon as a pass has come to it; NULL before */
} Pending;

static PyObject *
pending_vectorcall(PyObject *object, PyObject *const *values, size_t nargsf,
                   PyObject *Py_UNUSED(keywords))
{
    Pending *self = (Pending *)object;
    Py_ssize_t count = PyVectorcall_NARGS(nargsf);
    if (self->claim == NULL) {
        if (count == 1 && nothing_flows(values[0])) {
            Py_RETURN_NONE;
        }
        PyObject *claim = PyObject_CallFunctionObjArgs(inlined.resume, self->claimer, self->gradients,
                                                       self->graph, self->past, self->reached, NULL);
        if (claim == NULL) {
            return NULL;
        }
        Py_XSETREF(self->claim, claim);
    }
    PyObject *claim = Py_NewRef(self->claim);
    PyObject *result = PyObject_Vectorcall(claim, values, (size_t)count, NULL);
    Py_DECREF(claim);
    return result;
}

static void
pending_dealloc(Pending *self)
{
    Py_DECREF(self->claimer);
    Py_DECREF(self->gradients);
    Py_DECREF(self->graph);
    Py_DECREF(self->past);
    Py_XDECREF(self->reached);
    Py_XDECREF(self->claim);
    PyObject_Free(self);
}

/* As an entry, it is held by a node, into which the garbage collector does not look. */
static PyTypeObject Pending_Type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "amanda_torch_accel.gate.Pending",
    .tp_basicsize = sizeof(Pending),
    CALLED_SLOTS(Pending),
    .tp_dealloc = (destructor)pending_dealloc,
};

/* A reference to a tensor: Amanda's own to a parameter, since a program may swap what it holds. It has a
 * callback: CPython 3.12 crashes if the tensor ends while the end of a reference without one is put off. */
static PyObject *
refer_to(PyObject *tensor)
{
    if (tensor == Py_None) {
        return Py_NewRef(Py_None);
    }
    return (PyObject *)Py_TYPE(tensor) == inlined.tensor
               ? PyWeakref_NewRef(tensor, NULL)
               : PyObject_CallFunctionObjArgs(inlined.reference, tensor, inlined.nothing, NULL);
}

static Past *
new_past(const Values *inputs, PyObject *output, PyObject *mode)
{
    Py_ssize_t modules = 0, count = 0;
    PyObject *frame = field(mode, python.mode_frame);
    for (; frame != NULL && frame != Py_None; frame = field(frame, python.frame_caller)) {
        PyObject *module = field(frame, python.frame_module);
        modules += module != NULL && module != Py_None;
    }
    Past *self = PyObject_NewVar(Past, &Past_Type, inputs->count + 1 + modules);
    if (self == NULL) {
        return NULL;
    }
    memset(self->references, 0, (size_t)Py_SIZE(self) * sizeof *self->references);
    self->inputs = inputs->count;
    self->outputs = 1;
    /* First, since what follows may run code of Python's. */
    count = inputs->count + 1;
    frame = field(mode, python.mode_frame);
    for (; frame != NULL && frame != Py_None; frame = field(frame, python.frame_caller)) {
        PyObject *module = field(frame, python.frame_module);
        if (module != NULL && module != Py_None) {
            self->references[count++] = Py_NewRef(module);
        }
    }
    for (Py_ssize_t i = 0; i <= inputs->count; i++) {
        self->references[i] = refer_to(i < inputs->count ? inputs->items[i] : output);
        if (self->references[i] == NULL) {
            Py_DECREF(self);
            return NULL;
        }
    }
    return self;
}

/* A leaf that begins to belong to an operator, and what is to act at its accumulation. */
typedef struct {
    PyObject *node, *metadata, *owner, *id, *made;
} NewLeaf;

/* Find out about a leaf that has no marks; 0 where Python is to do it. */
static int
look_at_new_leaf(NewLeaf *leaf, PyObject *known, PyObject *gradients, Py_ssize_t number)
{
    PyObject *owners = field(known, python.known_owners), *op_id = field(known, python.known_op_id);
    PyObject *hooks = field(gradients, at.gradients_hooks);
    leaf->metadata = PyObject_GetAttr(leaf->node, names.metadata);
    if (leaf->metadata == NULL || !PyDict_CheckExact(leaf->metadata) || owners == NULL
        || !PyDict_CheckExact(owners) || op_id == NULL || hooks == NULL || !PyDict_CheckExact(hooks)
        || PyDict_Contains(leaf->metadata, names.mark) != 0) {
        return 0;
    }
    PyObject *variable = PyObject_GetAttr(leaf->node, names.variable);
    PyObject *key = PyLong_FromVoidPtr(variable);
    PyObject *owner = variable == NULL || key == NULL ? NULL : PyDict_GetItemWithError(owners, key);
    int is_ours = owner != NULL && is_alive(owner, variable);
    leaf->owner = Py_XNewRef(owner);
    PyObject *named = is_ours ? PyObject_GetAttr(owner, names.op_id) : NULL;
    PyObject *last = named != NULL ? PyObject_GetAttr(owner, names.known) : NULL;
    is_ours = last != NULL && (named == op_id || PyUnicode_Compare(named, op_id) == 0)
              && PyWeakref_Check(last) && is_alive(last, gradients);
    leaf->id = is_ours ? PyUnicode_FromFormat("%U/grad/AccumulateGrad:%zd", op_id, number) : NULL;
    is_ours = leaf->id != NULL && PyDict_Contains(hooks, leaf->id) == 0;
    Py_XDECREF(last);
    Py_XDECREF(named);
    Py_XDECREF(key);
    Py_XDECREF(variable);
    return is_ours;
}

/* The only scope of an operator, in a tuple (borrowed); NULL if there are several. */
static PyObject *
only_scope(PyObject *gradients)
{
    PyObject *handle = field(gradients, at.gradients_handle);
    PyObject *scopes = handle != NULL && Py_IS_TYPE(handle, (PyTypeObject *)inlined.handle)
                           ? field(handle, at.handle_scopes)
                           : NULL;
    return scopes != NULL && PyTuple_CheckExact(scopes) && PyTuple_GET_SIZE(scopes) == 1 ? scopes : NULL;
}

/* Whether an analysis of a backward operator has run since Python has last looked: one of these may have
   been among them. Of operators without leaves Python does not look for any. */
static int
has_news(PyObject *claimer, PyObject *gradients, PyObject *graph, Py_ssize_t leaves)
{
    PyObject *dispatcher = PyObject_GetAttr(claimer, names.dispatcher);
    PyObject *analysed = dispatcher == NULL ? NULL : PyObject_GetAttr(dispatcher, names.analysed);
    Py_ssize_t number = analysed == NULL ? -1 : number_of(analysed);
    int is_old = number >= 0 && number_of(field(graph, at.graph_asked)) == number
                 && (leaves == 0 || number_of(field(gradients, at.gradients_asked)) == number);
    Py_XDECREF(analysed);
    Py_XDECREF(dispatcher);
    return !is_old;
}

/* Make what acts at the accumulations of an operator's leaves: 1, or 0 where one of these has got a mark
   meanwhile, by another thread. */
static int
make_accumulations(NewLeaf *leaves, Py_ssize_t count, Past *past, PyObject *claimer, PyObject *gradients)
{
    PyObject *scopes = Py_XNewRef(only_scope(gradients));
    int done = scopes != NULL;
    for (Py_ssize_t i = 0; done > 0 && i < count; i++) {
        leaves[i].made = PyObject_CallFunctionObjArgs(inlined.accumulation, claimer, gradients, leaves[i].id,
                                                      scopes, (PyObject *)past, NULL);
        done = leaves[i].made == NULL ? -1 : 1;
    }
    for (Py_ssize_t i = 0; done > 0 && i < count; i++) {
        done = PyDict_Contains(leaves[i].metadata, names.mark) == 0;
    }
    Py_XDECREF(scopes);
    return done;
}

/* Mark and hook the accumulation of a leaf. No code of Python's runs meanwhile, nor does another thread. */
static int
claim_new_leaf(const NewLeaf *leaf, PyObject *past, PyObject *reached)
{
    return PyObject_SetAttr(leaf->owner, names.past, past) < 0
                   || PyDict_SetItem(leaf->metadata, names.mark, leaf->made) < 0
                   || PyList_Append(reached, leaf->made) < 0
                   || attach_python(leaf->node, leaf->made, 0) < 0
                   || attach_python(leaf->node, leaf->made, 1) < 0
               ? -1
               : 0;
}

/* Hook the node of an output and the accumulations of its operator's leaves. */
static int
claim_later(const RawNodes *found, const NewLeaf *leaves, Past *past, PyObject *claimer,
            PyObject *gradients, PyObject *graph)
{
    Pending *pending = PyObject_New(Pending, &Pending_Type);
    if (pending == NULL) {
        return -1;
    }
    pending->vectorcall = pending_vectorcall;
    pending->claimer = Py_NewRef(claimer);
    pending->gradients = Py_NewRef(gradients);
    pending->graph = Py_NewRef(graph);
    pending->past = (Past *)Py_NewRef(past);
    pending->claim = NULL;
    pending->reached = found->leaf_count == 0 ? PyTuple_New(0) : PyList_New(0);
    int failed = pending->reached == NULL;
    for (Py_ssize_t i = 0; !failed && i < found->leaf_count; i++) {
        failed = claim_new_leaf(&leaves[i], (PyObject *)past, pending->reached) < 0;
    }
    failed = failed || attach_at(found->nodes[0], NULL, (PyObject *)pending, 0) < 0
             || attach_at(found->nodes[0], NULL, (PyObject *)pending, 1) < 0;
    Py_DECREF(pending);
    return failed ? -1 : 0;
}

/* Look at the leaves, and hook all: 1 if it was done, 0 if Python is to do it. */
static int
claim_pending_nodes(const RawNodes *found, PyObject *mode, PyObject *known, PyObject *result,
                    const Values *inputs, PyObject *claimer, PyObject *gradients, PyObject *graph)
{
    NewLeaf leaves[MOST_LEAVES];
    Py_ssize_t looked = 0;
    int done = 1;
    for (; done && looked < found->leaf_count; looked++) {
        leaves[looked] = (NewLeaf){native.object(&found->leaves[looked]->node), NULL, NULL, NULL, NULL};
        done = leaves[looked].node != NULL && look_at_new_leaf(&leaves[looked], known, gradients, looked);
    }
    PyErr_Clear();
    Past *past = done ? new_past(inputs, result, mode) : NULL;
    if (done) {
        done = past == NULL ? -1 : make_accumulations(leaves, looked, past, claimer, gradients);
    }
    if (done > 0) {
        int failed = claim_later(found, leaves, past, claimer, gradients, graph) < 0
                     || note_run(mode, known) < 0;
        done = failed ? -1 : 1;
    }
    Py_XDECREF(past);
    for (Py_ssize_t i = 0; i < looked; i++) {
        Py_XDECREF(leaves[i].node);
        Py_XDECREF(leaves[i].metadata);
        Py_XDECREF(leaves[i].owner);
        Py_XDECREF(leaves[i].id);
        Py_XDECREF(leaves[i].made);
    }
    return done;
}

static int
are_plain(const Values *values)
{
    for (Py_ssize_t i = 0; i < values->count; i++) {
        if (values->items[i] != Py_None && !is_tensor(values->items[i])) {
            return 0;
        }
    }
    return 1;
}

/* Claim the backward operators of an operator that Python has claimed in the same form before, with
   analyses pending: 1 if it was done, 0 if Python is to do it; then nothing has been done. */
static int
claim_pending(PyObject *mode, PyObject *known, PyObject *operator, PyObject *args, PyObject *kwargs,
              PyObject *result, Py_ssize_t start)
{
    PyObject *gradients = field(known, python.known_gradients);
    if (gradients == NULL || !Py_IS_TYPE(gradients, (PyTypeObject *)inlined.gradients)
        || (PyObject *)Py_TYPE(result) != inlined.tensor
        || field(gradients, at.gradients_form) != Py_None || only_scope(gradients) == NULL) {
        return 0;
    }
    PyObject *graph = field(gradients, at.gradients_graph);
    if (graph == NULL || !Py_IS_TYPE(graph, (PyTypeObject *)inlined.graph)) {
        return 0;
    }
    PyObject *claimer = field(graph, at.graph_pending), *layout = field(graph, at.graph_layout);
    PyObject *form = field(graph, at.graph_form);
    if (claimer == NULL || claimer == Py_None || layout == NULL
        || !Py_IS_TYPE(layout, (PyTypeObject *)inlined.layout) || form == NULL
        || !PyList_CheckExact(form)) {
        return 0;
    }
    RawNodes found;
    DECLARE_VALUES(inputs);
    Py_INCREF(gradients);
    Py_INCREF(graph);
    Py_INCREF(claimer);
    int done = runs_plainly(mode);
    if (done > 0) {
        done = find_raw_nodes(&found, result, form, start) && found.entries == 1
               && !has_news(claimer, gradients, graph, found.leaf_count)
               && find_reported_inputs(operator, args, kwargs, layout, &inputs) && are_plain(&inputs);
        PyErr_Clear();
    }
    if (done > 0) {
        done = claim_pending_nodes(&found, mode, known, result, &inputs, claimer, gradients, graph);
    }
    release_values(&inputs);
    Py_DECREF(claimer);
    Py_DECREF(graph);
    Py_DECREF(gradients);
    return done;
}

PyDoc_STRVAR(claim_pending_doc, "claim_pending(mode, known, operator, args, kwargs, result, start)\n\n"
"Claim the backward operators of an operator that has run, of which analyses are pending.\n\n"
"Args:\n    operator, args, kwargs: what a Layout finds its inputs by.\n"
"    mode, known, result, start: see claim().\n\n"
"Returns:\n    Whether it was done; Python is to do it where something is yet to be found out.");

static PyObject *
gate_claim_pending(PyObject *Py_UNUSED(module), PyObject *const *values, Py_ssize_t count)
{
    Py_ssize_t start = count == 7 ? PyLong_AsSsize_t(values[6]) : -1;
    if (start < 0 || inlined.counter == NULL || !is_ours(values[0])
        || !Py_IS_TYPE(values[1], python.known) || !PyTuple_CheckExact(values[3])
        || !PyDict_CheckExact(values[4])) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "claim_pending() takes a mode, a KnownOp, an operator, its "
                                             "arguments in a tuple and a dict, a result and a number");
        }
        return NULL;
    }
    int done = claim_pending(values[0], values[1], values[2], values[3], values[4], values[5], start);
    return done < 0 ? NULL : PyBool_FromLong(done);
}
