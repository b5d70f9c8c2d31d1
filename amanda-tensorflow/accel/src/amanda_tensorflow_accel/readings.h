/* Part of fast_path.c: variables are read by the functions in C that TensorFlow's runtime reads them by.
 *
 * Where an operator is passed a variable, the runtime reads it in C, without a call of the operator
 * ReadVariableOp from Python. Where counters and timers are to be told of the reading, it has to be one
 * by itself. As a call from Python it would cost twice as much: at each of them TensorFlow finds the lines at
 * which all running functions are, and those of readings it never asks for.
 */

typedef struct TFE_Context TFE_Context;
typedef struct TFE_Op TFE_Op;
typedef struct TFE_TensorHandle TFE_TensorHandle;
typedef struct TF_Status TF_Status;

/* The functions by their names, those in C++ by the names they have there. All are NULL where variables
   are read by a call of the operator. */
static struct {
    TFE_Op *(*TFE_NewOp)(TFE_Context *, const char *, TF_Status *);
    void (*TFE_OpSetAttrType)(TFE_Op *, const char *, int);
    void (*TFE_OpSetDevice)(TFE_Op *, const char *, TF_Status *);
    void (*TFE_OpAddInput)(TFE_Op *, TFE_TensorHandle *, TF_Status *);
    void (*TFE_Execute)(TFE_Op *, TFE_TensorHandle **, int *, TF_Status *);
    void (*TFE_DeleteOp)(TFE_Op *);
    TF_Status *(*TF_NewStatus)(void);
    int (*TF_GetCode)(const TF_Status *);
    void (*TF_DeleteStatus)(TF_Status *);
    bool (*EagerTensor_CheckExact)(const PyObject *);
    TFE_TensorHandle *(*EagerTensor_Handle)(const PyObject *);
    PyObject *(*EagerTensorFromHandle)(TFE_TensorHandle *, bool);
    PyObject *(*TFE_Py_RecordGradient)(PyObject *, PyObject *, PyObject *, PyObject *, PyObject *);
    void (*TFE_Py_TapeVariableAccessed)(PyObject *);
    void (*TFE_Py_VariableWatcherVariableAccessed)(PyObject *);
} run_time;

#define RUN_TIME_FUNCTIONS (sizeof run_time / sizeof(void (*)(void)))

static struct {
    PyObject *context_handle; /* the name of the attribute of a context that holds a TFE_Context */
    Py_ssize_t device_name;   /* where the data of a thread has it; see find_values() */
    PyObject *dtype;          /* the last one that was read, and its number */
    int number;
} reader;

static int
reads_natively(void)
{
    return run_time.TFE_NewOp != NULL;
}

/* The number by which TensorFlow's runtime knows a dtype; -1 if it is not found. */
static int
number_of_dtype(PyObject *dtype)
{
    if (dtype != reader.dtype) {
        PyObject *found = PyObject_GetAttr(dtype, names.as_datatype_enum);
        Py_ssize_t number = natural_of(found);
        Py_XDECREF(found);
        if (number < 0) {
            PyErr_Clear();
            return -1;
        }
        Py_XSETREF(reader.dtype, Py_NewRef(dtype));
        reader.number = (int)number;
    }
    return reader.number;
}

/* The runtime's context; NULL if it is not found. It lives as long as the object in Python. */
static TFE_Context *
context_of(PyObject *context)
{
    PyObject *capsule = PyObject_GetAttr(context, reader.context_handle);
    TFE_Context *found = capsule != NULL && PyCapsule_CheckExact(capsule)
                             ? PyCapsule_GetPointer(capsule, NULL)
                             : NULL;
    PyErr_Clear();
    Py_XDECREF(capsule);
    return found;
}

/* An operator that reads the variable of a handle, on the device that is chosen now; NULL without an
   error where a call of the operator has to read it. */
static TFE_Op *
new_reading(PyObject *tracker, PyObject *context, PyObject *handle, PyObject *dtype, TF_Status *status)
{
    int number = number_of_dtype(dtype);
    TFE_Context *run_time_context = context_of(context);
    if (number < 0 || run_time_context == NULL || !run_time.EagerTensor_CheckExact(handle)) {
        return NULL;
    }
    TFE_Op *op = run_time.TFE_NewOp(run_time_context, "ReadVariableOp", status);
    if (op == NULL) {
        return NULL;
    }
    PyObject *device = local_value(tracker, names.device_name, reader.device_name);
    const char *name = device != NULL && PyUnicode_CheckExact(device) ? PyUnicode_AsUTF8(device) : NULL;
    int fits = run_time.TF_GetCode(status) == 0 && (name != NULL || device == Py_None);
    if (fits) {
        run_time.TFE_OpSetAttrType(op, "dtype", number);
        if (name != NULL) {
            run_time.TFE_OpSetDevice(op, name, status);
        }
        fits = run_time.TF_GetCode(status) == 0;
    }
    if (fits) {
        run_time.TFE_OpAddInput(op, run_time.EagerTensor_Handle(handle), status);
        fits = run_time.TF_GetCode(status) == 0;
    }
    Py_XDECREF(device);
    PyErr_Clear();
    if (!fits) {
        run_time.TFE_DeleteOp(op);
        return NULL;
    }
    return op;
}

/* The value of the variable of a handle; NULL without an error where a call of the operator has to read
   it, or to raise what keeps it from being read. */
static PyObject *
value_at(PyObject *tracker, PyObject *context, PyObject *handle, PyObject *dtype)
{
    PyObject *value = NULL;
    TF_Status *status = run_time.TF_NewStatus();
    TFE_Op *op = new_reading(tracker, context, handle, dtype, status);
    if (op != NULL) {
        TFE_TensorHandle *found = NULL;
        int results = 1;
        Py_BEGIN_ALLOW_THREADS;
        run_time.TFE_Execute(op, &found, &results, status);
        Py_END_ALLOW_THREADS;
        run_time.TFE_DeleteOp(op);
        if (run_time.TF_GetCode(status) == 0 && results == 1) {
            value = run_time.EagerTensorFromHandle(found, false);
        }
    }
    run_time.TF_DeleteStatus(status);
    return value;
}

/* Have the tapes record a reading: -1 with an error. `args` are those of a call of the operator. */
static int
record_reading(PyObject *const *args, PyObject *marked, PyObject *value)
{
    int is_empty = no_tape_records();
    if (is_empty != 0) {
        return is_empty < 0 ? -1 : 0;
    }
    PyObject *inputs = PyTuple_Pack(1, args[LEADING]), *outputs = PyTuple_Pack(1, value);
    PyObject *attributes = marked == NULL
                               ? PyTuple_Pack(2, args[LEADING + 1], args[LEADING + 2])
                               : PyTuple_Pack(4, args[LEADING + 1], args[LEADING + 2],
                                              PyTuple_GET_ITEM(marked, 0), PyTuple_GET_ITEM(marked, 1));
    PyObject *none = NULL;
    if (inputs != NULL && outputs != NULL && attributes != NULL) {
        none = run_time.TFE_Py_RecordGradient(names.read_variable, inputs, attributes, outputs, Py_None);
    }
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(attributes);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Read a variable by the arguments of a call of ReadVariableOp; NULL without an error where that has to be
   called. */
static PyObject *
read_natively(PyObject *tracker, PyObject *const *args, PyObject *marked)
{
    PyObject *value = value_at(tracker, args[0], args[LEADING], args[LEADING + 2]);
    if (value != NULL && record_reading(args, marked, value) < 0) {
        Py_CLEAR(value);
    }
    return value;
}

PyDoc_STRVAR(configure_readings_doc,
"configure_readings(functions, context_handle)\n\nName functions in C by which variables are read, after "
"configure_native().\n\n"
"Args:\n    functions: their addresses, in the order in which readings.h has them; an empty tuple to read\n"
"        by calls of the operator.\n"
"    context_handle: the name of the attribute by which a context holds that of the runtime.\n\n"
"Returns:\n    Whether variables are read by them.");

static PyObject *
configure_readings(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *functions, *context_handle;
    if (!PyArg_ParseTuple(args, "O!U", &PyTuple_Type, &functions, &context_handle)) {
        return NULL;
    }
    void *addresses[RUN_TIME_FUNCTIONS];
    memset(&run_time, 0, sizeof run_time);
    Py_XSETREF(reader.context_handle, Py_NewRef(context_handle));
    int fits = native.execute != NULL && PyTuple_GET_SIZE(functions) == RUN_TIME_FUNCTIONS;
    for (size_t i = 0; fits && i < RUN_TIME_FUNCTIONS; i++) {
        addresses[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(functions, i));
        if (addresses[i] == NULL) {
            fits = 0;
        }
    }
    if (fits) {
        PyObject *texts[] = {PyUnicode_FromString("/amanda:1"), PyUnicode_FromString("/amanda:2")};
        if (texts[0] != NULL && texts[1] != NULL) {
            reader.device_name = find_value(names.device_name, texts[0], texts[1]);
            fits = reader.device_name >= 0;
        }
        Py_XDECREF(texts[0]);
        Py_XDECREF(texts[1]);
    }
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (fits) {
        memcpy(&run_time, addresses, sizeof run_time);
    }
    return PyBool_FromLong(fits);
}
