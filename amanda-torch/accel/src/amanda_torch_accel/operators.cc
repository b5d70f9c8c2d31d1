// What happens at an operator: what is known of it is looked up, and its steps are run.
//
// This is Interceptor.__torch_function__() of amanda_torch.eager.interceptors, Tracker.enter_module(), and
// Executor.run_known(), as far as they need no call of Python; all else is theirs.

#include "invocation.h"
#include "torch_api.h"

#include <algorithm>
#include <iterator>

namespace accel {

namespace {

// ---- which arguments PyTorch takes ---------------------------------------------------------------------------

bool has_signature(const Invocation& call) { return call.site->form <= Form::FUNCTION; }

// A number for the types of a call's arguments, and the names of those that have names.
uint64_t signature_of(const Invocation& call) {
  uint64_t found = 1469598103934665603u;
  auto add = [&found](const void* word) { found = (found ^ reinterpret_cast<uintptr_t>(word)) * 1099511628211u; };
  Positional given(call);
  for (Py_ssize_t i = 0; i < given.count(); i++) {
    add(Py_TYPE(given[i]));
  }
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (call.kwargs != nullptr && PyDict_Next(call.kwargs, &position, &key, &value)) {
    add(key);
    add(Py_TYPE(value));
  }
  return found ^ static_cast<uint64_t>(given.count());
}

// True if routines may run before PyTorch has looked at the arguments: where it may refuse them, and report nothing,
// none is to run.
bool may_act(const Invocation& call) {
  if (!has_signature(call)) {
    return call.site->form == Form::SUBSCRIPT;
  }
  uint64_t signature = signature_of(call);
  const auto& fitting = call.site->fitting;
  return std::find(std::begin(fitting), std::end(fitting), signature) != std::end(fitting);
}

// True if a call was none of an operator: its arguments fit no form of it. A kernel may raise TypeError, too.
bool is_refused(const Invocation& call, PyObject* result, Tracker* mode) {
  bool may_be = has_signature(call) && (result == Py_NotImplemented ||
                                        (result == nullptr && PyErr_ExceptionMatches(PyExc_TypeError)));
  return may_be && !is_taken(call, reinterpret_cast<PyObject*>(mode), this_thread());
}

// ---- what is known -------------------------------------------------------------------------------------------

// True if an operator outside of modules is surely a forward one: is_plainly_recorded() of amanda_torch.eager.phases,
// but for the names that are asked more.
bool is_surely_forward(const Invocation& call) {
  // Modes would see what is read of tensors.
  if (!is_recording() || mode_count() != 0 || call.site->form == Form::ASSIGNMENT ||
      call.site->form == Form::GETTER) {
    return false;
  }
  auto is_recorded = [](PyObject* value) {
    return reinterpret_cast<PyObject*>(Py_TYPE(value)) == objects.tensor && requires_grad(value);
  };
  Positional given(call);
  for (Py_ssize_t i = 0; i < given.count(); i++) {
    PyObject* value = given[i];
    if (is_recorded(value)) {
      return true;
    }
    for (Py_ssize_t k = 0; PyList_CheckExact(value) && k < PyList_GET_SIZE(value); k++) {
      if (is_recorded(PyList_GET_ITEM(value, k))) {
        return true;
      }
    }
  }
  return false;
}

const Lowered* lowered_of(Known* known) {
  if (known->lowered == nullptr) {
    known->lowered = lower(known->steps_before, known->steps_after);
  }
  return known->lowered;
}

// Set the number of executions in a cell: 0, or -1 with an error.
int set_count(PyObject* cell, Py_ssize_t count) {
  PyObject* number = PyLong_FromSsize_t(count);
  return number != nullptr ? PyList_SetItem(cell, 0, number) : -1;
}

enum class Answer { ASK, EMPTY, KNOWN };

// What an operator is known as, and whether it may run by that.
Answer answer_of(PyObject* next, const Invocation& call) {
  if (next == Py_None) {
    return Answer::EMPTY;
  }
  if (!is_a(next, &Known_Type)) {
    return Answer::ASK;
  }
  auto* known = reinterpret_cast<Known*>(next);
  const Lowered* lowered = lowered_of(known);
  if (lowered == nullptr) {
    PyErr_Clear();
    return Answer::ASK;
  }
  bool only_claims = lowered->way != Way::PYTHON && lowered->before.empty() && lowered->after.empty();
  if (only_claims && !is_recording()) {
    return Answer::EMPTY;
  }
  bool tells_refusal = has_signature(call) || call.site->form == Form::SUBSCRIPT;
  return (lowered->acts_before ? may_act(call) : tells_refusal) ? Answer::KNOWN : Answer::ASK;
}

// Count the next execution of an operator, unless there is to ask. `cell` is the one in which it was counted, for what
// is an operator; `known` what is known of it, where something is to be done.
Answer look_up(const Tracker* mode, PyObject* reported, const Invocation& call, Ref& cell, Ref& known) {
  if (mode->stale != Py_False || mode->cells == nullptr || !PyDict_CheckExact(mode->cells)) {
    return Answer::ASK;
  }
  PyObject* found = PyDict_GetItemWithError(mode->cells, reported);
  if (found == nullptr) {
    PyErr_Clear();
    return Answer::ASK;
  }
  if (PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 1) {
    // Outside of modules.
    found = is_surely_forward(call) ? PyTuple_GET_ITEM(found, 0) : nullptr;
  }
  if (found == nullptr || !PyList_CheckExact(found)) {
    return Answer::ASK;
  }
  Py_ssize_t size = PyList_GET_SIZE(found);
  if (size == 0) {
    // No operator.
    return Answer::EMPTY;
  }
  Py_ssize_t count = PyLong_AsSsize_t(PyList_GET_ITEM(found, 0)) + 1;
  if (count < 1 || count >= size) {
    PyErr_Clear();
    return Answer::ASK;
  }
  cell = Ref::to(found);
  Ref next = Ref::to(PyList_GET_ITEM(found, count));
  Answer answer = answer_of(next.get(), call);
  if (answer != Answer::ASK && set_count(found, count) < 0) {
    PyErr_Clear();
    return Answer::ASK;
  }
  if (answer == Answer::KNOWN) {
    known = std::move(next);
  }
  return answer;
}

// Take back an execution: the arguments did not fit, and PyTorch would have reported nothing.
void take_back(PyObject* cell) {
  KeepError keep;
  Py_ssize_t count = cell == nullptr || PyList_GET_SIZE(cell) == 0 ? 0 : PyLong_AsSsize_t(PyList_GET_ITEM(cell, 0));
  if (count > 0) {
    set_count(cell, count - 1);
  }
  PyErr_Clear();
}

// ---- running it ----------------------------------------------------------------------------------------------

// One execution of an operator of which something is known.
struct Execution {
  const Invocation& call;
  Tracker* mode;
  PyObject* reported;
  Known* known;
  const Lowered& lowered;
};

// executor.<name>(known, operator, args, kwargs, first, second)
Ref call_executor(const Execution& one, PyObject* name, PyObject* first = nullptr, PyObject* second = nullptr) {
  Ref args = reported_args(one.call), kwargs(args ? reported_kwargs(one.call) : Ref());
  Ref executor = Ref::to(one.known->executor);
  return kwargs && executor ? Ref(PyObject_CallMethodObjArgs(executor.get(), name, one.known, one.reported, args.get(),
                                                             kwargs.get(), first, second, nullptr))
                            : Ref();
}

// Claim the backward operators of an operator that has run.
int claim_gradients(const Execution& one, PyObject* result, int64_t start) {
  int done = claim(one.mode, one.known, result, start);
  if (done != 0) {
    return done < 0 ? -1 : 0;
  }
  Ref number(PyLong_FromLongLong(start));
  return number && call_executor(one, names.claimed, result, number.get()) ? 0 : -1;
}

// True if the operator has run; NotImplemented is none: PyTorch had not looked at the arguments (`x == "text"`).
bool is_result(const Execution& one, PyObject* result) {
  return result != nullptr &&
         (result != Py_NotImplemented || is_taken(one.call, reinterpret_cast<PyObject*>(one.mode), this_thread()));
}

// Run the original, end measures that have begun, and claim what it has recorded; nullptr with an error.
Ref run_operator(const Execution& one, const int64_t* begun) {
  bool is_claimed = one.known->claims == Py_True && is_recording();
  int64_t start = is_claimed ? next_sequence() : 0;
  Ref result(run_original(one.call));
  if (!is_result(one, result.get())) {
    return result;
  }
  // What is done for gradients is no part of the time.
  bool failed = (begun != nullptr && end_measures(one.lowered, *begun) < 0) ||
                (is_claimed && claim_gradients(one, result.get(), start) < 0);
  return failed ? Ref() : std::move(result);
}

Ref run_measured(const Execution& one) {
  int64_t begun;
  return begin_measures(one.lowered, begun) < 0 ? Ref() : run_operator(one, &begun);
}

// ---- functions of tools --------------------------------------------------------------------------------------

bool have_types(PyObject* const* items, Py_ssize_t count, PyObject* types) {
  if (!PyTuple_CheckExact(types) || PyTuple_GET_SIZE(types) != count) {
    return false;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(items[i])) != PyTuple_GET_ITEM(types, i)) {
      return false;
    }
  }
  return true;
}

// The number in a sequence of Python's; -1 with an error.
Py_ssize_t place_in(PyObject* places, Py_ssize_t i) { return PyLong_AsSsize_t(PySequence_Fast_GET_ITEM(places, i)); }

// Append the positional arguments of a call, and those with these names if there are no others.
bool append_arguments(const Invocation& call, PyObject* keywords, Values& values) {
  Positional given(call);
  for (Py_ssize_t i = 0; i < given.count(); i++) {
    if (!values.append(given[i])) {
      return false;
    }
  }
  PyObject *name, *value;
  Py_ssize_t position = 0, found = 0;
  while (call.kwargs != nullptr && PyDict_Next(call.kwargs, &position, &name, &value)) {
    if (found == PyTuple_GET_SIZE(keywords) || !PyUnicode_Check(name) ||
        PyUnicode_Compare(name, PyTuple_GET_ITEM(keywords, found++)) != 0 || !values.append(value)) {
      return false;
    }
  }
  return found == PyTuple_GET_SIZE(keywords);
}

// Layout.values() of amanda_torch.operators.layouts: the inputs of a call (borrowed): 1, 0 if it has another form, -1
// with an error. A layout's `form` is what is read of it: (func, keywords, types, lists, places, is_in_place, writes).
int find_inputs(const Execution& one, Values& inputs) {
  PyObject* form = one.known->form;
  if (form == nullptr || !PyTuple_CheckExact(form) || PyTuple_GET_SIZE(form) != 7) {
    return 0;
  }
  PyObject *lists = PyTuple_GET_ITEM(form, 3), *places = PyTuple_GET_ITEM(form, 4);
  Values flat;
  if (one.reported != PyTuple_GET_ITEM(form, 0) || (is_recording() && PyTuple_GET_ITEM(form, 5) != Py_False) ||
      (one.lowered.is_joined && PyTuple_GET_ITEM(form, 6) != Py_False) ||
      !append_arguments(one.call, PyTuple_GET_ITEM(form, 1), flat) ||
      !have_types(flat.items, flat.count, PyTuple_GET_ITEM(form, 2)) || !PyList_CheckExact(lists) ||
      !PyList_CheckExact(places) || !flat.append(Py_None)) {
    return 0;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists); i++) {
    PyObject* pair = PyList_GET_ITEM(lists, i);
    Py_ssize_t place = place_in(pair, 0);
    PyObject* list = place >= 0 && place < flat.count ? flat.items[place] : nullptr;
    if (list == nullptr || !(PyList_Check(list) || PyTuple_Check(list))) {
      return PyErr_Occurred() ? -1 : 0;
    }
    PyObject** items = PySequence_Fast_ITEMS(list);
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    if (!have_types(items, count, PySequence_Fast_GET_ITEM(pair, 1))) {
      return 0;
    }
    for (Py_ssize_t k = 0; k < count; k++) {
      if (!flat.append(items[k])) {
        return 0;
      }
    }
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(places); i++) {
    Py_ssize_t place = place_in(places, i);
    if (place < 0 || place >= flat.count || !inputs.append(flat.items[place])) {
      return PyErr_Occurred() ? -1 : 0;
    }
  }
  return 1;
}

// The tensors of a result (borrowed from it or from `list`): 1; 0 if there are too many; -1 with an error.
int find_outputs(PyObject* result, Values& outputs, Ref& list) {
  if (is_tensor(result)) {
    return outputs.append(result);
  }
  if (PyTuple_Check(result)) {
    PyObject** items = PySequence_Fast_ITEMS(result);
    if (std::all_of(items, items + PyTuple_GET_SIZE(result),
                    [&outputs](PyObject* item) { return is_tensor(item) && outputs.append(item); })) {
      return 1;
    }
    outputs.count = 0;
  }
  list = Ref(PyObject_CallOneArg(objects.tensors_of, result));
  if (!list) {
    return -1;
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list.get()); i++) {
    if (!outputs.append(PyList_GET_ITEM(list.get(), i))) {
      return 0;
    }
  }
  return 1;
}

// Call the functions after an operator; its result, or what Python makes of what one returns.
Ref call_after(const Execution& one, Ref result, PyObject* inputs, PyObject* state) {
  if (one.lowered.after.empty()) {
    return result;
  }
  Values outputs;
  Ref list, returned;
  int done = one.lowered.takes_tensors ? find_outputs(result.get(), outputs, list) : 1;
  if (done > 0) {
    done = call_steps(one.known->name, one.lowered.after, outputs, inputs, state, returned);
  }
  if (done < 0 || (!returned && done == std::ssize(one.lowered.after))) {
    return done < 0 ? Ref() : std::move(result);
  }
  Ref number(PyLong_FromLong(done)), executor = Ref::to(one.known->executor);
  if (!number || !executor) {
    return Ref();
  }
  return Ref(PyObject_CallMethodObjArgs(executor.get(), names.go_on_after, one.known, Py_None, inputs, result.get(),
                                        number.get(), returned ? returned.get() : Py_None, nullptr));
}

Ref run_called(const Execution& one) {
  Values inputs;
  Ref state = Ref::to(one.mode->thread), returned, kept;
  int may = !is_only_driver() || !state || !PyDict_CheckExact(state.get()) ? 0 : is_plain_here(true);
  may = may <= 0 || !one.lowered.takes_tensors ? may : find_inputs(one, inputs);
  if (may <= 0) {
    return may < 0 ? Ref() : call_executor(one, names.run_known);
  }
  if (!(kept = inputs.tuple())) {  // a function may change a list of the program's
    return Ref();
  }
  int done = call_steps(one.known->name, one.lowered.before, inputs, kept.get(), state.get(), returned);
  if (done < 0) {
    return Ref();
  }
  if (returned || done < std::ssize(one.lowered.before)) {
    Ref stopped(Py_BuildValue("(iO)", done, returned ? returned.get() : Py_None));
    return stopped ? call_executor(one, names.run_described, Py_None, stopped.get()) : Ref();
  }
  Ref result = run_operator(one, nullptr);
  return is_result(one, result.get()) ? call_after(one, std::move(result), kept.get(), state.get()) : std::move(result);
}

Ref run_known(const Execution& one) {
  return one.lowered.way == Way::MEASURED ? run_measured(one)
         : one.lowered.way == Way::CALLED ? run_called(one)
                                          : call_executor(one, names.run_known);
}

}  // namespace

void note_signature(const Invocation& call) {
  if (has_signature(call)) {
    call.site->fitting[call.site->fitting_count++ % FITTING] = signature_of(call);
  }
}

PyObject* intercept(const Invocation& call) {
  Thread& thread = this_thread();
  auto* mode = reinterpret_cast<Tracker*>(virtual_mode(thread));
  Ref reported = Ref::to(call.site->reported), cell, known;
  if (mode == nullptr) {
    return run_original(call);
  }
  Answer answer = reported ? look_up(mode, reported.get(), call, cell, known) : Answer::ASK;
  if (answer == Answer::ASK) {
    return ask_python(call, thread);
  }
  // As PyTorch does with a mode that it reports to: nothing inside of the call is noticed.
  thread.mode = nullptr;
  auto* record = reinterpret_cast<Known*>(known.get());
  Ref result = answer == Answer::EMPTY ? Ref(run_original(call))
                                       : run_known({call, mode, reported.get(), record, *record->lowered});
  if (is_refused(call, result.get(), mode)) {
    take_back(cell.get());
  }
  put_back(thread, reinterpret_cast<PyObject*>(mode));
  return result.release();
}

// ---- modules -------------------------------------------------------------------------------------------------

namespace {

// Set every counter in the values of a dict to zero: of lists the first item, of children `calls`.
int restart(PyObject* dict) {
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value)) {
    if (is_a(value, &Child_Type)) {
      Ref zero(PyLong_FromLong(0));
      set(reinterpret_cast<Child*>(value)->calls, zero.get());
    } else if (PyList_CheckExact(value) && PyList_GET_SIZE(value) > 0 && set_count(value, 0) < 0) {
      return -1;
    }
  }
  return 0;
}

bool is_unpaused(PyObject* state) {
  PyObject* paused = state != nullptr && PyDict_CheckExact(state) ? PyDict_GetItemWithError(state, names.paused) : nullptr;
  return paused != nullptr && PyLong_CheckExact(paused) && PyLong_AsLong(paused) == 0;
}

// The frame of the next call of a module within a frame (borrowed); nullptr, with or without an error.
Frame* next_frame(Tracker* mode, Frame* parent, PyObject* module, Child*& child, Py_ssize_t& call) {
  Ref key(PyLong_FromVoidPtr(module));
  PyObject* found = key ? PyDict_GetItemWithError(parent->children, key.get()) : nullptr;
  if (!is_a(found, &Child_Type)) {
    return nullptr;
  }
  child = reinterpret_cast<Child*>(found);
  Ref called(child->ref != nullptr ? PyObject_CallNoArgs(child->ref) : nullptr);
  if (called.get() != module || child->transparent != Py_False || child->is_fused != Py_False ||
      child->frames == nullptr || !PyList_CheckExact(child->frames) || child->calls == nullptr) {
    return nullptr;
  }
  call = PyLong_AsSsize_t(child->calls);
  if (call < 0 || call >= PyList_GET_SIZE(child->frames)) {
    return nullptr;
  }
  auto* frame = reinterpret_cast<Frame*>(PyList_GET_ITEM(child->frames, call));
  bool fits = is_a(reinterpret_cast<PyObject*>(frame), &Frame_Type) && frame->generation == mode->generation &&
              frame->cells != nullptr && frame->names != nullptr && PyDict_CheckExact(frame->names) &&
              frame->children != nullptr && PyDict_CheckExact(frame->children);
  return fits ? frame : nullptr;
}

}  // namespace

Ref enter_module(Tracker* mode, PyObject* module) {
  auto* parent = reinterpret_cast<Frame*>(mode->frame);
  if (mode->frame == mode->root || !is_a(mode->frame, &Frame_Type) || parent->children == nullptr ||
      !PyDict_CheckExact(parent->children) || !is_unpaused(mode->thread)) {
    return Ref();
  }
  Child* child = nullptr;
  Py_ssize_t call = 0;
  Frame* frame = next_frame(mode, parent, module, child, call);
  Ref number(frame != nullptr ? PyLong_FromSsize_t(call + 1) : nullptr);
  if (!number || restart(frame->names) < 0 || restart(frame->children) < 0) {
    return Ref();
  }
  Ref back = Ref::to(mode->frame);
  set(child->calls, number.get());
  set(frame->caller, back.get());
  set(mode->frame, reinterpret_cast<PyObject*>(frame));
  set(mode->cells, frame->cells);
  return back;
}

void leave_module(Tracker* mode, PyObject* parent) {
  auto* to = reinterpret_cast<Frame*>(parent);
  if (mode->frame == parent || mode->frame == nullptr || to->cells == nullptr) {
    return;
  }
  if (is_a(mode->frame, &Frame_Type)) {
    set(reinterpret_cast<Frame*>(mode->frame)->caller, Py_None);
  }
  set(mode->frame, parent);
  set(mode->cells, to->cells);
}

}  // namespace accel
