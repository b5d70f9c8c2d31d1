/* Objects of CPython: slots of Python classes, numbers that are counted with, arrays.
 *
 * CPython 3.11 adds to small numbers in place, and how an array is laid out is proven on a sample: else
 * only the public interface is used.
 */

/* ---- slots of Python classes ----------------------------------------------------------------- */

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

/* One of __slots__, and where its offset in instances is to be written. */
typedef struct {
    void *type; /* a Python object that is to be a class */
    const char *name;
    Py_ssize_t *offset;
} Slot;

/* Find out where slots lie; -1 with an error at the first class that has none of that name. */
static int
find_offsets(const Slot *slots, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        PyObject *type = slots[i].type;
        if (!PyType_Check(type)) {
            PyErr_Format(PyExc_TypeError, "%R is no class", type);
            return -1;
        }
        PyObject *found = PyObject_GetAttrString(type, slots[i].name);
        if (found == NULL) {
            return -1;
        }
        int is_slot = Py_IS_TYPE(found, &PyMemberDescr_Type)
                      && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX;
        if (is_slot) {
            *slots[i].offset = ((PyMemberDescrObject *)found)->d_member->offset;
        }
        else {
            PyErr_Format(PyExc_TypeError, "%s.%s is no slot", ((PyTypeObject *)type)->tp_name,
                         slots[i].name);
        }
        Py_DECREF(found);
        if (!is_slot) {
            return -1;
        }
    }
    return 0;
}

/* Whether a weak reference is to an object that lives. */
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
#define KEEPING_ERROR(code)                           \
    do {                                              \
        PyObject *kept_ = PyErr_GetRaisedException(); \
        code;                                         \
        PyErr_SetRaisedException(kept_);              \
    } while (0)
#else
#define KEEPING_ERROR(code)                    \
    do {                                       \
        PyObject *type_, *value_, *trace_;     \
        PyErr_Fetch(&type_, &value_, &trace_); \
        code;                                  \
        PyErr_Restore(type_, value_, trace_);  \
    } while (0)
#endif

/* ---- numbers --------------------------------------------------------------------------------- */

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

/* Add to a number that nothing but a slot refers to, so that none has to be made: 1, or 0 where one
   has. */
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

/* ---- arrays ---------------------------------------------------------------------------------- */

/* An array.array("q"), to whose end C adds where there is room. */
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

/* Find out from a sample, which has the numbers 1, 2 and 3, whether arrays are laid out like that. */
static int
configure_numbers(PyObject *sample)
{
    Numbers *numbers = (Numbers *)sample;
    Py_buffer view;
    Py_CLEAR(numbers_type);
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

/* Whether C may write to an object: an array of that layout that no buffer is exported of. */
static int
are_numbers(PyObject *object)
{
    return numbers_type != NULL && Py_IS_TYPE(object, numbers_type)
           && ((Numbers *)object)->description == numbers_description
           && ((Numbers *)object)->exports == 0;
}

/* Call a method of one argument, whose interned name is kept in `name`: CPython's cache of methods keeps
   each string alive that one was found by. Returns -1 with an error. */
static int
call_method(PyObject *object, PyObject **name, const char *text, PyObject *argument)
{
    if (*name == NULL && (*name = PyUnicode_InternFromString(text)) == NULL) {
        return -1;
    }
    PyObject *none = PyObject_CallMethodOneArg(object, *name, argument);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Numbers for which room is made at once. */
#define ROOM 4096

/* Make room in an array that C may write to. By its own methods it grows by a sixteenth each time. */
static int
make_room(PyObject *numbers)
{
    static PyObject *zeros, *frombytes;
    if (zeros == NULL && (zeros = PyBytes_FromStringAndSize(NULL, ROOM * sizeof(int64_t))) != NULL) {
        memset(PyBytes_AS_STRING(zeros), 0, ROOM * sizeof(int64_t));
    }
    if (zeros == NULL || call_method(numbers, &frombytes, "frombytes", zeros) < 0) {
        return -1;
    }
    Py_SET_SIZE((PyVarObject *)numbers, Py_SIZE(numbers) - ROOM);
    return 0;
}

/* Add an execution to the end of what a log has: an array, or another object with extend(). */
static int
extend_numbers(PyObject *object, int64_t timer, int64_t start, int64_t end, int64_t thread)
{
    if (!are_numbers(object)) {
        static PyObject *extend;
        PyObject *items = Py_BuildValue("(LLLL)", (long long)timer, (long long)start, (long long)end,
                                        (long long)thread);
        int failed = items == NULL || call_method(object, &extend, "extend", items) < 0;
        Py_XDECREF(items);
        return failed ? -1 : 0;
    }
    Numbers *numbers = (Numbers *)object;
    if (numbers->room - Py_SIZE(object) < 4 && make_room(object) < 0) {
        return -1;
    }
    int64_t *items = numbers->items + Py_SIZE(object);
    items[0] = timer;
    items[1] = start;
    items[2] = end;
    items[3] = thread;
    Py_SET_SIZE((PyVarObject *)object, Py_SIZE(object) + 4);
    return 0;
}
