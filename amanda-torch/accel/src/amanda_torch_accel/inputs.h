/* Part of gate.c: the inputs of a call, found by a Layout of amanda_torch.operators.layouts. */

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

/* The positional arguments of a call as PyTorch reports them (borrowed); 0 where there are too many. */
static int
append_positional(const Invocation *call, Values *flat)
{
    Site *site = call->site;
    int fits = 1;
    if (site->kind == CALLABLE) {
        return append_values(flat, call->stack + 1, PyVectorcall_NARGS(call->nargsf) - 1);
    }
    if (site->kind != FUNCTION) {
        fits = append_values(flat, &call->self, 1);
    }
    if (site->kind == SUBSCRIPT || (site->kind == PLAIN && site->flags == METH_O)) {
        return fits && append_values(flat, &call->args, 1);
    }
    if (site->kind == PLAIN && site->flags == METH_NOARGS) {
        return fits;
    }
    return fits
           && append_values(flat, PySequence_Fast_ITEMS(call->args), PyTuple_GET_SIZE(call->args));
}

/* All arguments of a call, one after the other; 0 where there are too many, or other keywords. */
static int
flatten(const Invocation *call, PyObject *keywords, Values *flat)
{
    return append_positional(call, flat) && append_keywords(call, keywords, flat);
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

/* The inputs among the arguments of a call (strong references); 0 if it has another form. `flat` are the
   arguments, to be added to. */
static int
pick_inputs(PyObject *operator, PyObject *layout, Values *flat, Values *inputs)
{
    PyObject *lists = field(layout, at.layout_lists), *places = field(layout, at.layout_places);
    if (operator != field(layout, at.layout_func)
        || !have_types(flat->items, flat->count, field(layout, at.layout_types))) {
        return 0;
    }
    PyObject *absent = Py_None;
    int fits = append_values(flat, &absent, 1);
    for (Py_ssize_t i = 0; fits && i < PyList_GET_SIZE(lists); i++) {
        PyObject *pair = PyList_GET_ITEM(lists, i);
        PyObject *list = flat->items[PyLong_AsSsize_t(PyTuple_GET_ITEM(pair, 0))];
        PyObject *const *items = PySequence_Fast_ITEMS(list);
        Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
        fits = have_types(items, count, PyTuple_GET_ITEM(pair, 1))
               && append_values(flat, items, count);
    }
    if (!fits || PyList_GET_SIZE(places) > MOST_VALUES) {
        return 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); i++) {
        PyObject *value = flat->items[PyLong_AsSsize_t(PyList_GET_ITEM(places, i))];
        inputs->items[inputs->count++] = Py_NewRef(value);
    }
    return 1;
}

/* Layout.values(): the inputs of a call (strong references); 0 if it has another form. */
static int
find_inputs(const Invocation *call, PyObject *operator, PyObject *layout, Values *inputs)
{
    DECLARE_VALUES(flat);
    return flatten(call, field(layout, at.layout_keywords), &flat)
           && pick_inputs(operator, layout, &flat, inputs);
}

/* The same for a call as PyTorch reports it. */
static int
find_reported_inputs(PyObject *operator, PyObject *args, PyObject *kwargs, PyObject *layout,
                     Values *inputs)
{
    PyObject *keywords = field(layout, at.layout_keywords), *name, *value;
    Py_ssize_t found = 0, position = 0;
    DECLARE_VALUES(flat);
    int fits = PyDict_GET_SIZE(kwargs) == PyTuple_GET_SIZE(keywords)
               && append_values(&flat, PySequence_Fast_ITEMS(args), PyTuple_GET_SIZE(args));
    while (fits && PyDict_Next(kwargs, &position, &name, &value)) {
        fits = is_name(name, PyTuple_GET_ITEM(keywords, found++)) && append_values(&flat, &value, 1);
    }
    return fits && pick_inputs(operator, layout, &flat, inputs);
}
