/* The gate: the operators of PyTorch that no tool wants run past Amanda without Python.
 *
 * PyTorch reports an operator to Python only where a TorchFunctionMode is on the thread's stack of
 * modes, and that costs about a microsecond per operator. The gate keeps Amanda's mode off that
 * stack, and notices the operators itself: it puts functions of its own in the place of those that
 * PyTorch's builtins call. They ask what Amanda's tracker (amanda_torch.eager.op_ids) knows of the
 * operator, and
 *   - call the original directly, if it is known that no tool acts on it;
 *   - call the way to run it that is known, if tools act on it;
 *   - put the mode on the stack for this one call, if there is anything to ask: PyTorch then
 *     reports the operator as it always does, and the same Python code as without the gate runs.
 *
 * The mode that is kept off the stack is called virtual. Every question about the stack that
 * Python asks (push, pop, length, the mode at a position) is answered as if it lay there, and a
 * mode that is pushed above it makes it real. So there is one description of what is an operator,
 * of its id and of what happens around it, and it is Python's.
 *
 * What is replaced:
 *   methods             PyMethodDef.ml_meth, from which all forms of a call read it, `a + b` and
 *                       the specialised instructions of CPython 3.11 to 3.14 included; one
 *                       trampoline for each, since ml_meth is told nothing of where it is called
 *   functions           PyCFunctionObject.vectorcall, which is free where the arguments are a
 *                       tuple and a dict. Not ml_meth: the hash of a function is made of it, and
 *                       programs keep torch.add and the like in dictionaries
 *   a[i], a[i] = b      the slots of the type and of its subclasses, and of the descriptors
 *   a.T and the like    PyGetSetDef.get
 *   module(x)           the vectorcall of the function that the driver puts there
 *   torch.ops           nothing here: the driver sets objects of the type Call
 *
 * Everything is under the GIL: there is no other lock, and free-threaded builds are refused.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "the gate writes into functions that all threads call: it needs a Python with the GIL"
#endif
#ifdef PYPY_VERSION
#error "the gate replaces parts of CPython's own objects"
#endif

/* The size of a line of the processor's caches. */
#define LINE 64

#if defined(_MSC_VER)
#define THREAD_LOCAL __declspec(thread)
#define ON_A_LINE __declspec(align(LINE))
#define APART
#define RARE
#define LIKELY(condition) (condition)
#else
#define THREAD_LOCAL _Thread_local
#define ON_A_LINE __attribute__((aligned(LINE)))
/* Between two operators PyTorch runs more code than the processor's first cache holds, so that each of them
   reads the gate's anew: it costs as much as there are lines of it. What is not always run lies elsewhere,
   and what is read at each operator lies together. */
#define APART __attribute__((noinline))
#define RARE __attribute__((noinline, cold))
#define LIKELY(condition) __builtin_expect(!!(condition), 1)
#endif

/* Have the processor read a line of memory that is needed soon; any address will do. */
#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch(address)
#else
#define PREFETCH(address) ((void)(address))
#endif

/* One translation unit: what runs at an operator is inlined, and only of this file. Each part builds on
   those above it. */
#include "cpython.h"
#include "objects.h"
#include "course.h"
#include "modes.h"
#include "native.h"
#include "resident.h"
#include "inlined.h"
#include "hook_types.h"
#include "checks.h"
#include "shapes.h"
#include "hooks.h"
#include "leaves.h"
#include "nodes.h"
#include "callers.h"
#include "caller_layout.h"
#include "backward.h"
#include "inputs.h"
#include "pending.h"
#include "operator.h"
#include "around.h"
#include "trampolines.h"
#include "functions.h"

/* ---- setting up ------------------------------------------------------------------------------ */

static PyObject *mapping_base; /* the type with a[i] */

static Site *
new_site(Site *sites, Py_ssize_t *count, Py_ssize_t size, Site site)
{
    for (Py_ssize_t i = 0; i < *count; i++) {
        if (sites[i].place == site.place) {
            return &sites[i];
        }
    }
    if (*count == size) {
        PyErr_SetString(PyExc_RuntimeError, "there are more builtins than the gate has room for");
        return NULL;
    }
    Site *made = &sites[(*count)++];
    *made = site;
    Py_INCREF(site.owner);
    return made;
}

static Site *
add_method(PyObject *descriptor)
{
    PyMethodDef *def = ((PyMethodDescrObject *)descriptor)->d_method;
    int flags = def->ml_flags & ~METH_COEXIST;
    Site site = {.flags = flags, .name = def->ml_name, .owner = descriptor, .place = def,
                 .original = (void *)(void (*)(void))def->ml_meth};
    if (flags == (METH_VARARGS | METH_KEYWORDS)) {
        site.kind = KEYWORDS;
        return new_site(keyword_sites, &keyword_count, KEYWORD_SITES, site);
    }
    if (flags == METH_VARARGS || flags == METH_NOARGS || flags == METH_O) {
        site.kind = PLAIN;
        return new_site(plain_sites, &plain_count, PLAIN_SITES, site);
    }
    PyErr_Format(PyExc_ValueError, "%s has a form of call that is not known: %d", def->ml_name,
                 def->ml_flags);
    return NULL;
}

static Site *
add_function(PyObject *function)
{
    PyMethodDef *def = ((PyCFunctionObject *)function)->m_ml;
    int flags = def->ml_flags & ~(METH_COEXIST | METH_STATIC);
    if (flags != (METH_VARARGS | METH_KEYWORDS)
        || (((PyCFunctionObject *)function)->vectorcall != NULL && !is_installed)) {
        PyErr_Format(PyExc_ValueError, "%s has a form of call that is not known: %d", def->ml_name,
                     def->ml_flags);
        return NULL;
    }
    Site site = {.kind = FUNCTION, .flags = flags, .name = def->ml_name, .owner = function,
                 .place = function, .original = (void *)(void (*)(void))def->ml_meth};
    Site *made = new_site(other_sites, &other_count, OTHER_SITES, site);
    if (made != NULL) {
        *function_slot(function) = made;
    }
    return made;
}

static Site *
add_property(PyObject *descriptor)
{
    PyGetSetDef *def = ((PyGetSetDescrObject *)descriptor)->d_getset;
    Site site = {.kind = GETTER, .name = def->name, .owner = descriptor, .place = def,
                 .original = (void *)(void (*)(void))def->get, .closure = def->closure};
    return new_site(other_sites, &other_count, OTHER_SITES, site);
}

PyDoc_STRVAR(add_doc, "add(builtin, reports_first)\n\nNotice calls of a method, a function or a "
"property.\n\n"
"Args:\n    reports_first: PyTorch reports it before it looks at the arguments.\n\n"
"Raises:\n    ValueError: it is called in a form that the gate does not know.");

static PyObject *
gate_add(PyObject *Py_UNUSED(module), PyObject *args)
{
    Site *site;
    PyObject *builtin;
    int reports_first;
    if (!PyArg_ParseTuple(args, "Op", &builtin, &reports_first)) {
        return NULL;
    }
    if (is_installed) {
        PyErr_SetString(PyExc_RuntimeError, "the gate is installed");
        return NULL;
    }
    if (Py_IS_TYPE(builtin, &PyMethodDescr_Type)) {
        site = add_method(builtin);
    }
    else if (PyCFunction_CheckExact(builtin)) {
        site = add_function(builtin);
    }
    else if (Py_IS_TYPE(builtin, &PyGetSetDescr_Type)) {
        site = add_property(builtin);
    }
    else {
        PyErr_Format(PyExc_ValueError, "%R is no builtin of a known kind", builtin);
        return NULL;
    }
    if (site == NULL) {
        return NULL;
    }
    site->reports_first = reports_first;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(add_mapping_doc, "add_mapping(type)\n\nNotice a[i] and a[i] = b of a builtin type and "
"its subclasses.");

static PyObject *
gate_add_mapping(PyObject *Py_UNUSED(module), PyObject *object)
{
    PyTypeObject *type = (PyTypeObject *)object;
    if (is_installed || !PyType_Check(object) || type->tp_as_mapping == NULL
        || type->tp_as_mapping->mp_subscript == NULL
        || type->tp_as_mapping->mp_ass_subscript == NULL) {
        PyErr_SetString(PyExc_ValueError, "no type with both, or the gate is installed");
        return NULL;
    }
    if (mapping_base == object) {
        Py_RETURN_NONE;
    }
    PyMappingMethods *mapping = type->tp_as_mapping;
    Site sites[] = {
        {.kind = SUBSCRIPT, .name = "__getitem__", .owner = object,
         .place = &mapping->mp_subscript,
         .original = (void *)(void (*)(void))mapping->mp_subscript},
        {.kind = ASSIGNMENT, .name = "__setitem__", .owner = object,
         .place = &mapping->mp_ass_subscript,
         .original = (void *)(void (*)(void))mapping->mp_ass_subscript},
    };
    subscript = new_site(other_sites, &other_count, OTHER_SITES, sites[0]);
    assignment = new_site(other_sites, &other_count, OTHER_SITES, sites[1]);
    if (subscript == NULL || assignment == NULL) {
        return NULL;
    }
    Py_XSETREF(mapping_base, Py_NewRef(object));
    Py_RETURN_NONE;
}

/* Replace the slots of a type and its subclasses; those that others have replaced stay. */
static int
replace_mapping(PyObject *type, binaryfunc get, binaryfunc new_get, objobjargproc set,
                objobjargproc new_set)
{
    PyMappingMethods *mapping = ((PyTypeObject *)type)->tp_as_mapping;
    if (mapping != NULL && mapping->mp_subscript == get) {
        mapping->mp_subscript = new_get;
    }
    if (mapping != NULL && mapping->mp_ass_subscript == set) {
        mapping->mp_ass_subscript = new_set;
    }
    PyObject *below =
        PyObject_CallMethod((PyObject *)&PyType_Type, "__subclasses__", "O", type);
    int failed = below == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(below); i++) {
        failed = replace_mapping(PyList_GET_ITEM(below, i), get, new_get, set, new_set) < 0;
    }
    Py_XDECREF(below);
    return failed ? -1 : 0;
}

static void
replace_wrapped(const char *name, void *old, void *new)
{
    PyObject *found = PyDict_GetItemString(((PyTypeObject *)mapping_base)->tp_dict, name);
    if (found != NULL && Py_IS_TYPE(found, &PyWrapperDescr_Type)
        && ((PyWrapperDescrObject *)found)->d_wrapped == old) {
        ((PyWrapperDescrObject *)found)->d_wrapped = new;
    }
}

static int
set_mapping(int on)
{
    if (mapping_base == NULL) {
        return 0;
    }
    binaryfunc get = (binaryfunc)(void (*)(void))subscript->original;
    objobjargproc set = (objobjargproc)(void (*)(void))assignment->original;
    void *gets[] = {subscript->original, (void *)(void (*)(void))through_subscript};
    void *sets[] = {assignment->original, (void *)(void (*)(void))through_assignment};
    replace_wrapped("__getitem__", gets[!on], gets[on]);
    replace_wrapped("__setitem__", sets[!on], sets[on]);
    replace_wrapped("__delitem__", sets[!on], sets[on]);
    if (on) {
        return replace_mapping(mapping_base, get, through_subscript, set, through_assignment);
    }
    return replace_mapping(mapping_base, through_subscript, get, through_assignment, set);
}

static void
set_method(Site *site, PyCFunction trampoline, int on)
{
    PyMethodDef *def = site->place;
    PyCFunction original = (PyCFunction)(void (*)(void))site->original;
    if (def->ml_meth == (on ? original : trampoline)) {
        def->ml_meth = on ? trampoline : original;
    }
}

static void
set_other(Site *site, int on)
{
    if (site->kind == FUNCTION) {
        PyCFunctionObject *function = site->place;
        if (function->vectorcall == (on ? NULL : through_function)) {
            function->vectorcall = on ? through_function : NULL;
        }
    }
    else if (site->kind == GETTER) {
        PyGetSetDef *def = site->place;
        getter original = (getter)(void (*)(void))site->original;
        if (def->get == (on ? original : through_getter)) {
            def->closure = on ? site : site->closure;
            def->get = on ? through_getter : original;
        }
    }
}

static void
set_method_hook(Builtin *builtin, PyCFunction hook, int on)
{
    PyMethodDescrObject *method = (PyMethodDescrObject *)builtin->owner;
    builtin->own = *builtin->def;
    builtin->own.ml_meth = hook;
    if (method->d_method == (on ? builtin->def : &builtin->own)) {
        method->d_method = on ? &builtin->own : builtin->def;
    }
}

/* Not ml_meth, of which the hash is made: Dynamo keeps what it knows of functions by them. */
static void
set_function_hook(Builtin *builtin, vectorcallfunc hook, int on)
{
    PyCFunctionObject *function = (PyCFunctionObject *)builtin->owner;
    if (function->vectorcall != (on ? builtin->vectorcall : hook)) {
        return;
    }
    function->vectorcall = on ? hook : builtin->vectorcall;
    if (builtin->flags == METH_O) {
        /* A specialised instruction calls what has exactly this flag by its ml_meth. */
        builtin->def->ml_flags = on ? METH_O | METH_COEXIST : METH_O;
    }
}

static int
set_all(int on)
{
    for (Py_ssize_t i = 0; i < keyword_count; i++) {
        set_method(&keyword_sites[i], (PyCFunction)(void (*)(void))keyword_trampolines[i], on);
    }
    for (Py_ssize_t i = 0; i < plain_count; i++) {
        set_method(&plain_sites[i], plain_trampolines[i], on);
    }
    for (Py_ssize_t i = 0; i < other_count; i++) {
        set_other(&other_sites[i], on);
    }
    set_function_hook(&stack.push, hook_push, on);
    set_function_hook(&stack.pop, hook_pop, on);
    set_function_hook(&stack.length, hook_length, on);
    set_function_hook(&stack.at, hook_at, on);
    set_method_hook(&stack.disable, hook_disable, on);
    set_method_hook(&stack.enable, hook_enable, on);
    set_method_hook(&stack.place, hook_place, on);
    set_method_hook(&stack.replace, hook_replace, on);
    return set_mapping(on);
}

PyDoc_STRVAR(install_doc, "install()\n\nNotice calls from now on.");

static PyObject *
gate_install(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (python.mode == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
        return NULL;
    }
    is_installed = 1;
    return set_all(1) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(restore_doc, "restore()\n\nPut back what is still the gate's. No mode is virtual from "
"then on.");

static PyObject *
gate_restore(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (!is_installed) {
        Py_RETURN_NONE;
    }
    session++;
    (void)virtual_mode();
    is_installed = 0;
    unsettle_all();
    free_spare_dicts();
    forget_found();
    return set_all(0) < 0 ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(is_installed_doc, "is_installed()\n\nWhether calls are noticed.");

static PyObject *
gate_is_installed(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    return PyBool_FromLong(is_installed);
}

PyDoc_STRVAR(sites_doc, "sites()\n\nWhat is noticed: tuples of its name, the builtin, the address "
"that is written to, what stands there now, and what PyTorch reports for it (None if not known).");

static int
append_row(PyObject *list, const char *name, PyObject *owner, void *address, PyObject *operator)
{
    void *now;
    memcpy(&now, address, sizeof now);
    PyObject *row = Py_BuildValue("sOKKO", name, owner, (unsigned long long)(uintptr_t)address,
                                  (unsigned long long)(uintptr_t)now,
                                  operator == NULL ? Py_None : operator);
    int failed = row == NULL || PyList_Append(list, row) < 0;
    Py_XDECREF(row);
    return failed ? -1 : 0;
}

static int
append_sites(PyObject *list, const Site *sites, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        const Site *site = &sites[i];
        void *address = site->place;
        if (site->kind == KEYWORDS || site->kind == PLAIN) {
            address = &((PyMethodDef *)site->place)->ml_meth;
        }
        else if (site->kind == FUNCTION) {
            address = &((PyCFunctionObject *)site->place)->vectorcall;
        }
        else if (site->kind == GETTER) {
            address = &((PyGetSetDef *)site->place)->get;
        }
        if (append_row(list, site->name, site->owner, address, site->operator) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
append_hooks(PyObject *list)
{
    Builtin *hooks[] = {&stack.push,    &stack.pop,    &stack.length, &stack.at,
                        &stack.disable, &stack.enable, &stack.place,  &stack.replace};
    for (size_t i = 0; i < sizeof hooks / sizeof *hooks; i++) {
        Builtin *hook = hooks[i];
        void *address = Py_IS_TYPE(hook->owner, &PyMethodDescr_Type)
                            ? (void *)&((PyMethodDescrObject *)hook->owner)->d_method
                            : (void *)&((PyCFunctionObject *)hook->owner)->vectorcall;
        if (append_row(list, hook->def->ml_name, hook->owner, address, Py_None) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
gate_sites(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(argument))
{
    if (python.mode == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure() comes first");
        return NULL;
    }
    PyObject *list = PyList_New(0);
    if (list == NULL || append_hooks(list) < 0
        || append_sites(list, keyword_sites, keyword_count) < 0
        || append_sites(list, plain_sites, plain_count) < 0
        || append_sites(list, other_sites, other_count) < 0) {
        Py_XDECREF(list);
        return NULL;
    }
    return list;
}

static int
find_slots(void)
{
    const Slot slots[] = {
        {python.mode, "cells", &python.mode_cells},
        {python.mode, "frame", &python.mode_frame},
        {python.mode, "root", &python.mode_root},
        {python.mode, "generation", &python.mode_generation},
        {python.mode, "stale", &python.mode_stale},
        {python.mode, "thread", &python.mode_thread},
        {python.mode, "iteration", &python.mode_iteration},
        {python.frame, "cells", &python.frame_cells},
        {python.frame, "names", &python.frame_names},
        {python.frame, "children", &python.frame_children},
        {python.frame, "generation", &python.frame_generation},
        {python.frame, "caller", &python.frame_caller},
        {python.frame, "module", &python.frame_module},
        {python.child, "ref", &python.child_ref},
        {python.child, "transparent", &python.child_transparent},
        {python.child, "is_fused", &python.child_fused},
        {python.child, "calls", &python.child_calls},
        {python.child, "frames", &python.child_frames},
        {python.known, "run", &python.known_run},
        {python.known, "is_claim", &python.known_claim},
        {python.known, "inlined_before", &python.known_before},
        {python.known, "inlined_after", &python.known_after},
        {python.known, "claims", &python.known_claims},
        {python.known, "gradients", &python.known_gradients},
        {python.known, "checked", &python.known_checked},
        {python.known, "claimed", &python.known_claimed},
        {python.known, "iterations", &python.known_iterations},
        {python.known, "op_id", &python.known_op_id},
        {python.known, "owners", &python.known_owners},
        {python.known, "name", &python.known_name},
        {python.known, "layout", &python.known_layout},
        {python.known, "is_blind", &python.known_blind},
        {python.known, "around_before", &python.known_around_before},
        {python.known, "around_after", &python.known_around_after},
        {python.known, "resumed_before", &python.known_resumed_before},
        {python.known, "resumed_after", &python.known_resumed_after},
    };
    return find_offsets(slots, sizeof slots / sizeof *slots);
}

/* Note a builtin that the gate calls with the type and the flags that it expects. */
static int
find_builtin(Builtin *builtin, PyObject *object, PyTypeObject *type, int flags)
{
    PyMethodDef *def = NULL;
    PyObject *self = NULL;
    if (!Py_IS_TYPE(object, type)) {
        /* Refused below. */
    }
    else if (PyCFunction_CheckExact(object)) {
        def = ((PyCFunctionObject *)object)->m_ml;
        self = PyCFunction_GET_SELF(object);
        builtin->vectorcall = ((PyCFunctionObject *)object)->vectorcall;
    }
    else if (type == &PyMethodDescr_Type) {
        def = ((PyMethodDescrObject *)object)->d_method;
    }
    if (def == NULL || (def->ml_flags & ~METH_COEXIST) != flags) {
        PyErr_Format(PyExc_ValueError, "%R has a form of call that is not known", object);
        return -1;
    }
    builtin->owner = Py_NewRef(object);
    builtin->self = self;
    builtin->def = def;
    builtin->original = def->ml_meth;
    builtin->flags = def->ml_flags;
    return 0;
}

PyDoc_STRVAR(configure_doc,
"configure(mode, frame, child, known, no_operator, is_report_of, builtins)\n\n"
"Name the objects of the driver and of PyTorch, once per process.\n\n"
"Args:\n"
"    mode, frame, child, known: classes with __slots__: the mode, the call of a module, a module\n"
"        that is called, and what is known of an operator.\n"
"    no_operator: what stands in the tables of operators for what is none, see Interceptor.\n"
"    is_report_of: whether PyTorch reports an object for a builtin of a name.\n"
"    builtins: push, pop, length, at and is_disabled of the stack of modes; __enter__ and\n"
"        __exit__ of what turns it off, and of what pushes and pops a mode in C++; whether\n"
"        gradients are recorded.");

static PyObject *
gate_configure(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *known, *builtins[10];
    if (python.mode != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the gate has been configured");
        return NULL;
    }
    PyTypeObject *mode;
    if (!PyArg_ParseTuple(args, "O!O!O!O!OO(OOOOOOOOOO)", &PyType_Type, &mode,
                          &PyType_Type, &python.frame, &PyType_Type, &python.child, &PyType_Type,
                          &known, &python.no_operator, &python.is_report_of,
                          &builtins[0], &builtins[1], &builtins[2], &builtins[3], &builtins[4],
                          &builtins[5], &builtins[6], &builtins[7], &builtins[8], &builtins[9])) {
        return NULL;
    }
    if (find_builtin(&stack.push, builtins[0], &PyCFunction_Type, METH_O) < 0
        || find_builtin(&stack.pop, builtins[1], &PyCFunction_Type, METH_NOARGS) < 0
        || find_builtin(&stack.length, builtins[2], &PyCFunction_Type, METH_NOARGS) < 0
        || find_builtin(&stack.at, builtins[3], &PyCFunction_Type, METH_VARARGS | METH_KEYWORDS) < 0
        || find_builtin(&stack.is_disabled, builtins[4], &PyCFunction_Type, METH_NOARGS) < 0
        || find_builtin(&stack.disable, builtins[5], &PyMethodDescr_Type, METH_NOARGS) < 0
        || find_builtin(&stack.enable, builtins[6], &PyMethodDescr_Type, METH_VARARGS) < 0
        || find_builtin(&stack.place, builtins[7], &PyMethodDescr_Type, METH_NOARGS) < 0
        || find_builtin(&stack.replace, builtins[8], &PyMethodDescr_Type, METH_VARARGS) < 0
        || find_builtin(&stack.is_recording, builtins[9], &PyCFunction_Type, METH_NOARGS) < 0) {
        return NULL;
    }
    python.mode = mode;
    python.known = (PyTypeObject *)known;
    if (find_slots() < 0) {
        python.mode = NULL;
        return NULL;
    }
    Py_INCREF(mode);
    Py_INCREF(python.frame);
    Py_INCREF(python.child);
    Py_INCREF(known);
    Py_INCREF(python.no_operator);
    Py_INCREF(python.is_report_of);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(configure_inlined_doc,
"configure_inlined(objects)\n\nName what routines run without Python are made of, once per process.\n\n"
"Args:\n    objects: a dict, see amanda_torch.eager.gate.\n\n"
"Returns:\n    Whether numbers are added to arrays where they lie; if not, Python adds them.");

static int
find_inlined_slots(void)
{
    const Slot slots[] = {
        {inlined.counter, "count", &at.counter_count},
        {inlined.timer, "_started", &at.timer_started},
        {inlined.timer, "executions", &at.timer_executions},
        {inlined.timer, "nanoseconds", &at.timer_nanoseconds},
        {inlined.timer, "log", &at.timer_log},
        {inlined.timer, "number", &at.timer_number},
        {inlined.log, "numbers", &at.log_numbers},
        {inlined.log, "due", &at.log_due},
        {inlined.memory, "used", &at.memory_used},
        {inlined.memory, "peak", &at.memory_peak},
        {inlined.change, "use", &at.change_use},
        {inlined.change, "_held", &at.change_held},
        {inlined.change, "bytes", &at.change_bytes},
        {inlined.check, "_held", &at.check_held},
        {inlined.check, "overwrites", &at.check_overwrites},
        {inlined.check, "trail", &at.check_trail},
        {inlined.check, "name", &at.check_name},
        {inlined.sums, "_held", &at.sum_held},
        {inlined.sums, "_weights", &at.sum_weights},
        {inlined.sums, "amount", &at.sum_amount},
        {inlined.sums, "executions", &at.sum_executions},
        {inlined.sums, "total", &at.sum_total},
        {inlined.sums, "last", &at.sum_last},
        {inlined.sums, "of", &at.sum_of},
        {inlined.gradients, "graph", &at.gradients_graph},
        {inlined.gradients, "form", &at.gradients_form},
        {inlined.gradients, "handle", &at.gradients_handle},
        {inlined.gradients, "natives", &at.gradients_leaves},
        {inlined.gradients, "hooks", &at.gradients_hooks},
        {inlined.gradients, "asked", &at.gradients_asked},
        {inlined.graph, "form", &at.graph_form},
        {inlined.graph, "natives", &at.graph_natives},
        {inlined.graph, "inner", &at.graph_inner},
        {inlined.graph, "layout", &at.graph_layout},
        {inlined.graph, "asked", &at.graph_asked},
        {inlined.graph, "pending", &at.graph_pending},
        {inlined.hooks, "has_before", &at.hooks_before},
        {inlined.hooks, "has_after", &at.hooks_after},
        {inlined.hooks, "_dispatcher", &at.hooks_dispatcher},
        {inlined.hooks, "_key", &at.hooks_key},
        {inlined.hooks, "_handle", &at.hooks_handle},
        {inlined.handle, "scopes", &at.handle_scopes},
        {inlined.routines, "inlined_before", &at.routines_before},
        {inlined.routines, "inlined_after", &at.routines_after},
        {inlined.layout, "_func", &at.layout_func},
        {inlined.layout, "_keywords", &at.layout_keywords},
        {inlined.layout, "_types", &at.layout_types},
        {inlined.layout, "_lists", &at.layout_lists},
        {inlined.layout, "_places", &at.layout_places},
        {inlined.layout, "is_in_place", &at.layout_in_place},
        {inlined.action, "func", &at.action_func},
        {inlined.action, "select", &at.action_select},
        {inlined.action, "kwargs", &at.action_kwargs},
    };
    return find_offsets(slots, sizeof slots / sizeof *slots);
}

static PyObject *
gate_configure_inlined(PyObject *Py_UNUSED(module), PyObject *objects)
{
    struct {
        const char *name;
        PyObject **place;
    } all[] = {
        {"timer", &inlined.timer},       {"log", &inlined.log},
        {"start", &inlined.start},       {"clock", &inlined.clock},
        {"native", &inlined.native},     {"look", &inlined.look},
        {"graph", &inlined.graph},       {"gradients", &inlined.gradients},
        {"hooks", &inlined.hooks},       {"routines", &inlined.routines},
        {"tensor", &inlined.tensor},     {"state", &inlined.state},
        {"sequence", &inlined.sequence}, {"checks", &inlined.checks},
        {"handle", &inlined.handle},     {"kinds", &inlined.kinds},
        {"node", &inlined.node},         {"task", &inlined.task},
        {"check", &inlined.check},       {"before", &inlined.before},
        {"sum", &inlined.sum},           {"item", &inlined.item},
        {"dtype", &inlined.dtype},       {"summed", &inlined.summed},
        {"plain", &inlined.plain},       {"tensors", &inlined.tensors},
        {"set_recording", &inlined.set_recording},
        {"sums", &inlined.sums},         {"add_after", &inlined.add_after},
        {"layout", &inlined.layout},     {"action", &inlined.action},
        {"version", &inlined.version},   {"tensors_of", &inlined.tensors_of},
        {"acquire", &inlined.acquire},   {"release", &inlined.release},
        {"unpaused", &inlined.unpaused}, {"raised", &inlined.raised},
        {"changed", &inlined.changed},   {"numbers", &inlined.numbers},
        {"function", &inlined.function}, {"accumulation", &inlined.accumulation},
        {"resume", &inlined.resume},     {"reference", &inlined.reference},
        {"nothing", &inlined.nothing},   {"memory", &inlined.memory},
        {"change", &inlined.change},     {"ended", &inlined.ended},
        {"as_routine", &inlined.as_routine},
        {"counter", &inlined.counter},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        PyObject *found = PyDict_Check(objects) ? PyDict_GetItemString(objects, all[i].name) : NULL;
        if (found == NULL) {
            PyErr_Format(PyExc_TypeError, "there is no %s", all[i].name);
            return NULL;
        }
        Py_XSETREF(*all[i].place, Py_NewRef(found));
    }
    if (!PyTuple_CheckExact(inlined.checks) || !PyTuple_CheckExact(inlined.plain)
        || !PyTuple_CheckExact(inlined.tensors) || !PyDict_CheckExact(inlined.kinds)
        || !PyFrozenSet_CheckExact(inlined.summed)
        || !PyDict_CheckExact(inlined.unpaused) || !PyType_Check(inlined.function)
        || !Py_IS_TYPE(inlined.version, &PyGetSetDescr_Type)
        || find_inlined_slots() < 0) {
        Py_CLEAR(inlined.counter);
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_TypeError, "what is to be a tuple, a dict, a class or a property is none");
        }
        return NULL;
    }
    return PyBool_FromLong(configure_numbers(inlined.numbers));
}

PyDoc_STRVAR(configure_native_doc,
"configure_native(addresses, keys, depth, checks, plain, function)\n\nName functions in C++ that are "
"called instead of their bindings, once per process.\n\n"
"Args:\n"
"    addresses: of what gives the number of the next node, and that of the current pass, and of\n"
"        what says whether a dispatch key is on, and whether gradients are recorded, and of what\n"
"        sets that.\n"
"    keys: numbers of those that are on in transforms and tracers.\n"
"    depth: gives the number of dispatch modes.\n"
"    checks, plain: what is left of the questions of configure_inlined() where there are none.\n"
"    function: torch.autograd.Function.\n\n"
"Raises:\n    ValueError: they give something else than their bindings.");

/* Whether the functions answer as their bindings do. */
static int
agrees(unsigned long long sequence, unsigned long long task, unsigned long long recording,
       unsigned long long set_recording)
{
    PyObject *next = PyObject_CallNoArgs(inlined.sequence), *pass = NULL;
    void (*set)(_Bool) = (void (*)(_Bool))(uintptr_t)set_recording;
    int records = is_recording();
    if (next != NULL) {
        pass = PyObject_CallNoArgs(inlined.task);
    }
    int is_same = pass != NULL && ((_Bool (*)(void))(uintptr_t)recording)() == records
                  && ((uint64_t(*)(void))(uintptr_t)sequence)() == PyLong_AsUnsignedLongLong(next)
                  && ((int (*)(void))(uintptr_t)task)() == PyLong_AsLong(pass);
    Py_XDECREF(next);
    Py_XDECREF(pass);
    if (is_same && !PyErr_Occurred()) {
        set(!records);
        is_same = is_recording() == !records;
        set(records != 0);
    }
    return is_same && !PyErr_Occurred();
}

static PyObject *
gate_configure_native(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long sequence, task, is_included, recording, set_recording;
    PyObject *keys, *depth, *checks, *plain, *function;
    if (!PyArg_ParseTuple(args, "(KKKKK)O!OO!O!O", &sequence, &task, &is_included, &recording,
                          &set_recording, &PyTuple_Type, &keys, &depth, &PyTuple_Type, &checks,
                          &PyTuple_Type, &plain, &function)) {
        return NULL;
    }
    uint16_t numbers[sizeof native.keys / sizeof *native.keys] = {0};
    Py_ssize_t room = sizeof numbers / sizeof *numbers;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(keys) && i < room; i++) {
        numbers[i] = (uint16_t)PyLong_AsLong(PyTuple_GET_ITEM(keys, i));
    }
    if (PyTuple_GET_SIZE(keys) > room || inlined.counter == NULL
        || !agrees(sequence, task, recording, set_recording)) {
        if (!PyErr_Occurred()) {
            PyErr_SetString(PyExc_ValueError, "functions in C++ differ from their bindings");
        }
        return NULL;
    }
    if (PyErr_Occurred() || find_builtin(&native.depth, depth, &PyCFunction_Type, METH_NOARGS) < 0) {
        return NULL;
    }
    memcpy(native.keys, numbers, sizeof numbers);
    native.sequence = (uint64_t(*)(void))(uintptr_t)sequence;
    native.task = (int (*)(void))(uintptr_t)task;
    native.is_recording = (_Bool (*)(void))(uintptr_t)recording;
    native.set_recording = (void (*)(_Bool))(uintptr_t)set_recording;
    native.is_included = (_Bool (*)(uint16_t))(uintptr_t)is_included;
    Py_XSETREF(native.checks, Py_NewRef(checks));
    Py_XSETREF(native.plain, Py_NewRef(plain));
    native.meta = (PyTypeObject *)Py_NewRef(Py_TYPE(function));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hook_registrar_doc, "hook_registrar(vanilla)\n\nFor ``_register_hook`` of "
"torch.autograd.Function: hooks of register() need no handle.");

static PyObject *
gate_hook_registrar(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return PyCFunction_New(&add_hook_def, vanilla);
}

PyDoc_STRVAR(register_doc, "register(hooks, node)\n\nHook a node, as NodeHooks.register() does.");

static PyObject *
gate_register(PyObject *module, PyObject *args)
{
    PyObject *hooks, *node;
    if (!PyArg_ParseTuple(args, "OO", &hooks, &node)) {
        return NULL;
    }
    Hook *hook = (Hook *)gate_hook(module, hooks);
    int failed = hook == NULL || attach_hook(node, hook) < 0;
    Py_XDECREF(hook);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyDoc_STRVAR(operator_call_doc, "operator_call(vanilla)\n\nFor ``__call__`` of a class of "
"operators: calls are noticed as those of the instance.");

static PyObject *
gate_operator_call(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return new_call(OPERATOR, vanilla);
}

PyDoc_STRVAR(reported_doc, "reported(vanilla)\n\nFor a function that reports itself to modes "
"although it is no operator: it always does.");

static PyObject *
gate_reported(PyObject *Py_UNUSED(module), PyObject *vanilla)
{
    return new_call(REPORTED, vanilla);
}

PyDoc_STRVAR(event_doc, "event(handler)\n\nFor ``__torch_function__`` of the mode.");

static PyObject *
gate_event(PyObject *Py_UNUSED(module), PyObject *handler)
{
    return new_call(EVENT, handler);
}

PyDoc_STRVAR(module_call_doc, "module_call(vanilla, function)\n\nHave a function for ``__call__`` of "
"modules run in C where that can be, and return it.\n\n"
"Args:\n    vanilla: calls the module.\n    function: enters it, calls it and leaves it.");

static PyObject *
gate_module_call(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *vanilla, *function;
    if (!PyArg_ParseTuple(args, "OO!", &vanilla, &PyFunction_Type, &function)) {
        return NULL;
    }
    Py_XSETREF(module_vanilla, Py_NewRef(vanilla));
    call_python = ((PyFunctionObject *)function)->vectorcall;
    ((PyFunctionObject *)function)->vectorcall = through_module;
    return Py_NewRef(function);
}

static PyMethodDef methods[] = {
    {"add", gate_add, METH_VARARGS, add_doc},
    {"add_mapping", gate_add_mapping, METH_O, add_mapping_doc},
    {"attach", gate_attach, METH_VARARGS, attach_doc},
    {"claim", (PyCFunction)(void (*)(void))gate_claim, METH_FASTCALL, claim_doc},
    {"claim_pending", (PyCFunction)(void (*)(void))gate_claim_pending, METH_FASTCALL,
     claim_pending_doc},
    {"configure", gate_configure, METH_VARARGS, configure_doc},
    {"configure_hooks", gate_configure_hooks, METH_VARARGS, configure_hooks_doc},
    {"configure_inlined", gate_configure_inlined, METH_O, configure_inlined_doc},
    {"configure_nodes", gate_configure_nodes, METH_O, configure_nodes_doc},
    {"configure_native", gate_configure_native, METH_VARARGS, configure_native_doc},
    {"configure_shapes", gate_configure_shapes, METH_VARARGS, configure_shapes_doc},
    {"configure_tensors", gate_configure_tensors, METH_VARARGS, configure_tensors_doc},
    {"configure_versions", gate_configure_versions, METH_VARARGS, configure_versions_doc},
    {"exchange", gate_exchange, METH_VARARGS, exchange_doc},
    {"event", gate_event, METH_O, event_doc},
    {"follow", gate_follow, METH_VARARGS, follow_doc},
    {"forget", gate_forget, METH_NOARGS, forget_doc},
    {"hook", gate_hook, METH_O, hook_doc},
    {"hook_registrar", gate_hook_registrar, METH_O, hook_registrar_doc},
    {"install", gate_install, METH_NOARGS, install_doc},
    {"is_installed", gate_is_installed, METH_NOARGS, is_installed_doc},
    {"module_call", gate_module_call, METH_VARARGS, module_call_doc},
    {"probe", gate_probe, METH_O, probe_doc},
    {"operator_call", gate_operator_call, METH_O, operator_call_doc},
    {"register", gate_register, METH_VARARGS, register_doc},
    {"reported", gate_reported, METH_O, reported_doc},
    {"restore", gate_restore, METH_NOARGS, restore_doc},
    {"sites", gate_sites, METH_NOARGS, sites_doc},
    {NULL, NULL, 0, NULL},
};

static int
gate_exec(PyObject *Py_UNUSED(module))
{
    /* Python 3.12 refuses it by itself. What is here, and what is written to, belongs to the process. */
    if (PyInterpreterState_Get() != PyInterpreterState_Main()) {
        PyErr_SetString(PyExc_ImportError, "the gate works in the main interpreter only");
        return -1;
    }
    zero = PyLong_FromLong(0);
    one = PyLong_FromLong(1);
    paused_name = PyUnicode_InternFromString("paused");
    if (zero == NULL || one == NULL || paused_name == NULL || make_numbers() < 0 || make_names() < 0) {
        return -1;
    }
    if (prepare_resident() != 0) {
        PyErr_NoMemory();
        return -1;
    }
    HookDict_Type.tp_base = &PyDict_Type;
    PyTypeObject *types[] = {&Hook_Type, &HookDict_Type, &Accumulation_Type, &Entry_Type,
                             &Past_Type, &Pending_Type,  &Probe_Type,        &Call_Type};
    for (size_t i = 0; i < sizeof types / sizeof *types; i++) {
        if (PyType_Ready(types[i]) < 0) {
            return -1;
        }
    }
    return 0;
}

static PyModuleDef_Slot gate_slots[] = {
    {Py_mod_exec, gate_exec},
#if PY_VERSION_HEX >= 0x030C0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef gate_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "amanda_torch_accel.gate",
    .m_doc = "Notices the calls of PyTorch's builtins; see gate.c.",
    .m_methods = methods,
    .m_slots = gate_slots,
};

PyMODINIT_FUNC
PyInit_gate(void)
{
    return PyModuleDef_Init(&gate_module);
}
