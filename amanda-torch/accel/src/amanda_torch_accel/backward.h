/* Part of gate.c: backward operators. */

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

/* The kind of a class of nodes; NULL with or without an error if that is not known. */
static PyObject *
kind_of(PyTypeObject *cls, PyObject *kinds)
{
    PyObject *kind = PyDict_GetItemWithError(kinds, (PyObject *)cls);
    if (kind == NULL && !PyErr_Occurred() && PyType_IsSubtype(cls, (PyTypeObject *)inlined.function)) {
        return zero;
    }
    return kind;
}

/* Note the class of a node that Python has told the kind of. */
static void
learn_class(PyObject *object)
{
    if (object != Py_None && node_class_count < NODE_CLASSES / 2) {
        PyObject *kind = kind_of(Py_TYPE(object), inlined.kinds);
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
    PyObject *kind = kind_of(Py_TYPE(target), kinds);
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
        && kind_of(Py_TYPE(node), inlined.kinds) == zero) {
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
            /* Where there is something to do, the owner's graph is gone with what it has marked. */
            PyObject *ran = PyDict_GetItemWithError(iterations, owner);
            PyObject *is_idle = PyObject_GetAttr(reference, names.is_idle);
            found = ran != NULL && is_idle == Py_True
                            && PyObject_RichCompareBool(ran, iteration, Py_EQ) == 1
                        ? 0
                        : -1;
            Py_XDECREF(is_idle);
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
