/* Part of gate.c: nodes, without the objects that stand for them. */

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
