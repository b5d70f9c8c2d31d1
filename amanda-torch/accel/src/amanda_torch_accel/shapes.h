/* Part of gate.c: the shapes of an execution. */

/* What executions have in common whose tensors have the same shapes is a key in a table of a sum. A shape is
   an object that PyTorch makes anew each time it is asked for, with one for each size, and a tuple of shapes
   costs a call of CPython for each of them where it is looked for. So the sizes of plain tensors are read
   where they lie in memory, and the key is bytes. Where that is, is found with tensors of which Python tells
   the same, see configure_shapes(). */
static struct {
    Py_ssize_t keys, sizes; /* offsets in what a tensor's object refers to; 0 if they are not known */
    uint64_t plain;         /* the dispatch keys of tensors that have their sizes there */
} tensors;

/* Sizes that lie within a tensor; of more, PyTorch allocates room. */
#define NEAR_SIZES 5

/* Words of a key. Each value begins with one that is odd, a tensor's, or the address of a type, or one of
   these, so that no two lists of values have the same words. */
#define MOST_WORDS 128
enum { END = 0, NAME = 2 };

typedef struct {
    uint64_t words[MOST_WORDS];
    Py_ssize_t count;
} Words;

static inline int
add_words(Words *words, const void *added, Py_ssize_t count)
{
    if (words->count + count > MOST_WORDS) {
        return 0;
    }
    memcpy(words->words + words->count, added, (size_t)count * sizeof *words->words);
    words->count += count;
    return 1;
}

static inline int
add_word(Words *words, uint64_t word)
{
    return add_words(words, &word, 1);
}

/* What follows says 1, or 0 where Python is to be asked for shapes; there are no errors, and nothing of
   Python's runs meanwhile. */

static int
add_sizes(Words *words, PyObject *tensor)
{
    const char *place = *(const char *const *)(tensor + 1);
    if (place == NULL || (*(const uint64_t *)(place + tensors.keys) & ~tensors.plain) != 0) {
        return 0;
    }
    const uint64_t *sizes = (const uint64_t *)(place + tensors.sizes);
    return sizes[0] <= NEAR_SIZES && add_word(words, 2 * sizes[0] + 1)
           && add_words(words, sizes + 1, (Py_ssize_t)sizes[0]);
}

/* Add a tensor, a number, or a list or tuple of such. `depth` is that of the containers in it. */
static int
add_value(Words *words, PyObject *value, int depth)
{
    if (is_tensor(value)) {
        return add_sizes(words, value);
    }
    if (depth == 0 || !(PyTuple_CheckExact(value) || PyList_CheckExact(value))) {
        /* These types live as long as the process. */
        return has_no_tensor(value) && add_word(words, (uintptr_t)Py_TYPE(value));
    }
    int fits = add_word(words, (uintptr_t)Py_TYPE(value));
    for (Py_ssize_t i = 0; fits && i < PySequence_Fast_GET_SIZE(value); i++) {
        fits = add_value(words, PySequence_Fast_GET_ITEM(value, i), depth - 1);
    }
    return fits && add_word(words, END);
}

/* Names are added by their text: an object of the same address may be another one later. */
static int
add_named(Words *words, PyObject *name, PyObject *value)
{
    if (!PyUnicode_CheckExact(name) || !PyUnicode_IS_COMPACT_ASCII(name)) {
        return 0;
    }
    Py_ssize_t length = PyUnicode_GET_LENGTH(name);
    Py_ssize_t count = (length + (Py_ssize_t)sizeof *words->words - 1) / (Py_ssize_t)sizeof *words->words;
    if (!add_word(words, NAME) || !add_word(words, (uint64_t)length) || words->count + count > MOST_WORDS) {
        return 0;
    }
    if (count > 0) {
        words->words[words->count + count - 1] = 0;
        memcpy(words->words + words->count, PyUnicode_1BYTE_DATA(name), (size_t)length);
    }
    words->count += count;
    return add_value(words, value, 2);
}

static int
add_values(Words *words, PyObject *const *values, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!add_value(words, values[i], 2)) {
            return 0;
        }
    }
    return 1;
}

/* Add the arguments of a call. */
static int
add_arguments(Words *words, const Invocation *call)
{
    Site *site = call->site;
    if (site->kind == CALLABLE) {
        Py_ssize_t count = PyVectorcall_NARGS(call->nargsf);
        Py_ssize_t named = call->names == NULL ? 0 : PyTuple_GET_SIZE(call->names);
        int fits = add_values(words, call->stack + 1, count - 1);
        for (Py_ssize_t i = 0; fits && i < named; i++) {
            fits = add_named(words, PyTuple_GET_ITEM(call->names, i), call->stack[count + i]);
        }
        return fits;
    }
    if (site->kind != FUNCTION && !add_value(words, call->self, 2)) {
        return 0;
    }
    if (site->kind == SUBSCRIPT || (site->kind == PLAIN && site->flags == METH_O)) {
        return add_value(words, call->args, 2);
    }
    if (site->kind == PLAIN && site->flags == METH_NOARGS) {
        return 1;
    }
    PyObject *name, *value;
    Py_ssize_t position = 0;
    int fits = add_values(words, PySequence_Fast_ITEMS(call->args), PyTuple_GET_SIZE(call->args));
    while (fits && call->kwargs != NULL && PyDict_Next(call->kwargs, &position, &name, &value)) {
        fits = add_named(words, name, value);
    }
    return fits;
}

static PyObject *
bytes_of(const Words *words)
{
    return PyBytes_FromStringAndSize((const char *)words->words,
                                     words->count * (Py_ssize_t)sizeof *words->words);
}

/* ---- where Python tells them ----------------------------------------------------------------- */

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

/* The key of an execution: a tuple; NULL, with or without an error, if that is not known. `keywords` are
   names, or NULL. */
static PyObject *
ask_for_key(PyObject *const *values, Py_ssize_t count, PyObject *keywords)
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

/* The key of an execution with these values, as bytes where that can be. */
static PyObject *
key_of(PyObject *const *values, Py_ssize_t count)
{
    Words words;
    words.count = 0;
    return tensors.sizes != 0 && add_values(&words, values, count) ? bytes_of(&words)
                                                                  : ask_for_key(values, count, NULL);
}

/* ---- where sizes lie ------------------------------------------------------------------------- */

/* What is looked through of a tensor: no more than all of them have. */
#define TENSOR_WORDS 22

/* Rule out places in which a tensor does not have its dispatch keys, or its sizes: the number of them, and
   then they. */
static int
match_tensor(PyObject *tensor, PyObject *address, PyObject *keys, char *keys_at, char *sizes_at)
{
    const uint64_t *place = *(const uint64_t *const *)(tensor + 1);
    uint64_t expected = PyLong_AsUnsignedLongLong(keys);
    PyObject *shape = PyObject_GetAttr(tensor, names.shape);
    if ((uintptr_t)place != PyLong_AsUnsignedLongLong(address) || shape == NULL || !PyTuple_Check(shape)
        || PyTuple_GET_SIZE(shape) > NEAR_SIZES || PyErr_Occurred()) {
        Py_XDECREF(shape);
        return 0;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(shape);
    for (Py_ssize_t i = 1; i < TENSOR_WORDS; i++) {
        keys_at[i] = keys_at[i] && place[i] == expected;
        sizes_at[i] = sizes_at[i] && i < TENSOR_WORDS - NEAR_SIZES && place[i] == (uint64_t)count;
        for (Py_ssize_t k = 0; sizes_at[i] && k < count; k++) {
            sizes_at[i] = place[i + 1 + k] == PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, k));
        }
    }
    Py_DECREF(shape);
    return 1;
}

PyDoc_STRVAR(configure_shapes_doc,
"configure_shapes(tensors, addresses, keys, plain)\n\nFind out where in memory tensors keep their sizes.\n\n"
"Args:\n    tensors: a list of some that have up to five.\n"
"    addresses: where Python says that they are.\n"
"    keys: their dispatch keys, as numbers.\n"
"    plain: all keys that tensors may have which keep their sizes there.\n\n"
"Returns:\n    Whether there is one such place; if not, tensors are asked for their shapes.");

static PyObject *
gate_configure_shapes(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *samples, *addresses, *keys;
    unsigned long long plain;
    char keys_at[TENSOR_WORDS], sizes_at[TENSOR_WORDS];
    tensors.sizes = tensors.keys = 0;
    if (!PyArg_ParseTuple(args, "O!O!O!K", &PyList_Type, &samples, &PyList_Type, &addresses, &PyList_Type,
                          &keys, &plain)) {
        return NULL;
    }
    memset(keys_at, 1, sizeof keys_at);
    memset(sizes_at, 1, sizeof sizes_at);
    Py_ssize_t count = PyList_GET_SIZE(samples), keys_found = 0, sizes_found = 0, found = 0;
    int is_same = PyList_GET_SIZE(addresses) == count && PyList_GET_SIZE(keys) == count;
    for (Py_ssize_t i = 0; is_same && i < count; i++) {
        is_same = match_tensor(PyList_GET_ITEM(samples, i), PyList_GET_ITEM(addresses, i),
                               PyList_GET_ITEM(keys, i), keys_at, sizes_at);
    }
    for (Py_ssize_t i = 1; i < TENSOR_WORDS; i++) {
        keys_found = keys_at[i] ? 8 * i : keys_found;
        sizes_found = sizes_at[i] ? 8 * i : sizes_found;
        found += keys_at[i] + sizes_at[i];
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (is_same && found == 2 && keys_found != 0 && sizes_found != 0) {
        tensors.keys = keys_found;
        tensors.sizes = sizes_found;
        tensors.plain = plain;
    }
    return PyBool_FromLong(tensors.sizes != 0);
}
