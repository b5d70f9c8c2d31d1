// Steps of operators, and the code of tools.
//
// A plan is lowered by core to steps (amanda.inline.steps); here they are run. What is not simple is Python's.

#include "accel.h"
#include "torch_api.h"

#include <ctime>
#include <new>

namespace accel {

Ref Values::list() const {
  Ref list(PyList_New(count));
  for (int i = 0; list && i < count; i++) {
    PyList_SET_ITEM(list.get(), i, Py_NewRef(items[i]));
  }
  return list;
}

// ---- lowering ------------------------------------------------------------------------------------------------

namespace {

// Read one step; an error of Python's, or 0.
int read_step(PyObject* object, Step& step) {
  Ref kind(PyObject_GetAttr(object, names.kind)), ends(kind ? PyObject_GetAttr(object, names.ends) : nullptr);
  int is_end = ends ? PyObject_IsTrue(ends.get()) : -1;
  long number = is_end < 0 ? -1 : PyLong_AsLong(kind.get());
  if (is_end < 0 || (number == -1 && PyErr_Occurred())) {
    return -1;
  }
  step.kind = number < CALL || number > RECORD ? CALL : static_cast<Kind>(number);
  step.ends = is_end;
  step.begun = -1;
  return (step.routine = PyObject_GetAttr(object, names.routine)) == nullptr ||
                 (step.action = PyObject_GetAttr(object, names.action)) == nullptr ||
                 (step.func = PyObject_GetAttr(step.action, names.func)) == nullptr ||
                 (step.select = PyObject_GetAttr(step.action, names.select)) == nullptr ||
                 (step.kwargs = PyObject_GetAttr(step.action, names.kwargs)) == nullptr
             ? -1
             : 0;
}

// Read the steps of a point: 1, 0 where there are too many or none are known, -1 with an error.
int read_steps(PyObject* steps, Step* read, int& count) {
  if (steps == nullptr || !PyTuple_CheckExact(steps) || PyTuple_GET_SIZE(steps) > MOST_STEPS) {
    return 0;
  }
  for (; count < PyTuple_GET_SIZE(steps); count++) {
    read[count] = {};
    if (read_step(PyTuple_GET_ITEM(steps, count), read[count]) < 0) {
      count++;
      return -1;
    }
  }
  return 1;
}

bool is_measure(const Step& step) { return step.kind == CLOCK || step.kind == MEMORY; }

// Find for each measure that ends the one that begins; whether all of them are paired.
bool pair_measures(Lowered& lowered) {
  int begun = 0, ended = 0;
  for (int i = 0; i < lowered.before_count; i++) {
    begun += is_measure(lowered.before[i]);
    if (is_measure(lowered.before[i]) && lowered.before[i].ends) {
      return false;
    }
  }
  for (int k = 0; k < lowered.after_count; k++) {
    Step& end = lowered.after[k];
    for (int i = 0; is_measure(end) && end.ends && i < lowered.before_count; i++) {
      if (lowered.before[i].routine == end.routine) {
        end.begun = end.begun < 0 ? i : MOST_STEPS;
      }
    }
    if (is_measure(end) && (end.begun < 0 || end.begun == MOST_STEPS)) {
      return false;
    }
    ended += is_measure(end);
  }
  return begun == ended;
}

Way choose_way(Lowered& lowered) {
  bool calls = false, looks = false;
  for (int point = 0; point < 2; point++) {
    const Step* steps = point ? lowered.after : lowered.before;
    for (int i = 0; i < (point ? lowered.after_count : lowered.before_count); i++) {
      Kind kind = steps[i].kind;
      calls = calls || kind == CALL || kind == RECORD;
      PyObject* select = steps[i].select;
      lowered.takes_tensors = lowered.takes_tensors || !PyTuple_CheckExact(select) || PyTuple_GET_SIZE(select) > 0;
      lowered.checks = lowered.checks || kind == CHECK;
      lowered.sums = lowered.sums || kind == SHAPE_SUM;
      lowered.acts_before = lowered.acts_before || (point == 0 && !is_measure(steps[i]));
      if (kind != CALL && kind != RECORD && !PyDict_CheckExact(steps[i].kwargs)) {
        return Way::PYTHON;
      }
    }
  }
  looks = lowered.checks || lowered.sums;
  if (calls) {
    lowered.acts_before = lowered.acts_before || lowered.before_count > 0;
    return Way::CALLED;
  }
  return !pair_measures(lowered) ? Way::CALLED : looks ? Way::LOOKED : Way::MEASURED;
}

}  // namespace

Lowered* lower(PyObject* before, PyObject* after) {
  auto* lowered = new (std::nothrow) Lowered;
  if (lowered == nullptr) {
    PyErr_NoMemory();
    return nullptr;
  }
  int is_read = read_steps(before, lowered->before, lowered->before_count);
  if (is_read > 0) {
    is_read = read_steps(after, lowered->after, lowered->after_count);
  }
  if (is_read < 0) {
    release(lowered);
    return nullptr;
  }
  lowered->way = is_read ? choose_way(*lowered) : Way::PYTHON;
  if (lowered->way == Way::CALLED) {
    lowered->acts_before = true;
  }
  return lowered;
}

void release(Lowered* lowered) {
  if (lowered == nullptr) {
    return;
  }
  for (Step* steps : {lowered->before, lowered->after}) {
    for (int i = 0; i < (steps == lowered->before ? lowered->before_count : lowered->after_count); i++) {
      Py_XDECREF(steps[i].routine);
      Py_XDECREF(steps[i].action);
      Py_XDECREF(steps[i].func);
      Py_XDECREF(steps[i].select);
      Py_XDECREF(steps[i].kwargs);
    }
  }
  delete lowered;
}

// ---- clocks and memory ---------------------------------------------------------------------------------------

namespace {

// time.perf_counter_ns(), which reads this clock on Linux.
int64_t read_clock() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000000000 + now.tv_nsec;
}

unsigned long native_thread() {
#if defined(PY_HAVE_THREAD_NATIVE_ID)
  static thread_local unsigned long id = PyThread_get_thread_native_id();
  return id;
#else
  return 0;
#endif
}

// Timer.add(). The lock of tools is not needed: the GIL is not given up between the first and the last attribute.
int add_time(PyObject* timer, int64_t start, int64_t end) {
  Ref log(PyObject_GetAttr(timer, names.log));
  if (!log) {
    return -1;
  }
  if (log.get() != Py_None) {
    Ref due(PyObject_GetAttr(log.get(), names.due));
    int overflow = 0;
    if (!due) {
      return -1;
    }
    // Of another kind of number Python finds out.
    int64_t moment = due.get() == Py_None       ? INT64_MAX
                     : PyLong_Check(due.get()) ? PyLong_AsLongLongAndOverflow(due.get(), &overflow)
                                               : INT64_MIN;
    if (overflow < 0 || (overflow == 0 && end >= moment)) {
      // It calls Log.look(), which is code of tools.
      Ref add(PyObject_GetAttr(timer, names.add)), first(PyLong_FromLongLong(start)), last(PyLong_FromLongLong(end));
      return add && first && last && Ref(PyObject_CallFunctionObjArgs(objects.as_routine, add.get(), first.get(),
                                                                      last.get(), nullptr))
                 ? 0
                 : -1;
    }
    static PyObject* frombytes;
    if (frombytes == nullptr && (frombytes = PyUnicode_InternFromString("frombytes")) == nullptr) {
      return -1;
    }
    Ref number(PyObject_GetAttr(timer, names.number)), numbers(PyObject_GetAttr(log.get(), names.numbers));
    if (!number || !numbers) {
      return -1;
    }
    int64_t row[] = {PyLong_AsLongLong(number.get()), start, end, static_cast<int64_t>(native_thread())};
    Ref bytes(PyErr_Occurred() ? nullptr : PyBytes_FromStringAndSize(reinterpret_cast<char*>(row), sizeof row));
    if (!bytes || !Ref(PyObject_CallMethodOneArg(numbers.get(), frombytes, bytes.get()))) {
      return -1;
    }
  }
  return add_to(timer, names.executions, 1) < 0 ? -1 : add_to(timer, names.nanoseconds, end - start);
}

}  // namespace

int begin_measures(const Lowered& lowered, Measures& measures) {
  for (int i = 0; i < lowered.before_count; i++) {
    const Step& step = lowered.before[i];
    if (step.kind == COUNT && add_to(step.routine, names.count, 1) < 0) {
      return -1;
    }
    if (step.kind == MEMORY && !Ref(PyObject_CallOneArg(objects.as_routine, step.func))) {
      return -1;
    }
  }
  // What is done for other steps is no part of the time.
  for (int i = 0; i < lowered.before_count; i++) {
    if (lowered.before[i].kind == CLOCK) {
      measures.begun[i] = read_clock();
    }
  }
  return 0;
}

int end_measures(const Lowered& lowered, const Measures& measures) {
  int64_t end = 0;
  for (int i = 0; end == 0 && i < lowered.after_count; i++) {
    end = lowered.after[i].kind == CLOCK ? read_clock() : 0;
  }
  for (int i = 0; i < lowered.after_count; i++) {
    const Step& step = lowered.after[i];
    int failed = 0;
    if (step.kind == COUNT) {
      failed = add_to(step.routine, names.count, 1);
    } else if (step.kind == CLOCK) {
      failed = add_time(step.routine, measures.begun[step.begun], end);
    } else if (step.kind == MEMORY) {
      failed = Ref(PyObject_CallOneArg(objects.as_routine, step.func)) ? 0 : -1;
    }
    if (failed < 0) {
      return -1;
    }
  }
  return 0;
}

// ---- checks and sums -----------------------------------------------------------------------------------------

namespace {

// The weight and the shapes of executions with a key; nullptr, with or without an error, where a sum has none.
Ref weight_of(PyObject* sum, PyObject* key) {
  Ref weights(PyObject_GetAttr(sum, names.weights)), of(weights ? PyObject_GetAttr(sum, names.of) : nullptr);
  if (!of || !PyDict_CheckExact(weights.get())) {
    return Ref();
  }
  Ref whole = Ref::to(key);
  if (of.get() != Py_None) {
    Ref last(PyObject_GetAttr(of.get(), names.last));
    whole = Ref(last ? PyTuple_Pack(2, key, last.get()) : nullptr);
  }
  PyObject* found = whole ? PyDict_GetItemWithError(weights.get(), whole.get()) : nullptr;
  return found != nullptr && PyTuple_CheckExact(found) && PyTuple_GET_SIZE(found) == 2 ? Ref::to(found) : Ref();
}

int add_execution(PyObject* sum, PyObject* key) {
  Ref found = weight_of(sum, key);
  if (!found) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_RuntimeError, "a sum has lost the weight of an execution");
    }
    return -1;
  }
  long long weight = PyLong_AsLongLong(PyTuple_GET_ITEM(found.get(), 0));
  Ref total(PyErr_Occurred() ? nullptr : PyObject_GetAttr(sum, names.total));
  if (!total || PyObject_SetAttr(sum, names.last, PyTuple_GET_ITEM(found.get(), 1)) < 0 ||
      add_to(sum, names.executions, 1) < 0 || add_to(sum, names.amount, weight) < 0) {
    return -1;
  }
  return total.get() == Py_None ? 0 : add_to(total.get(), names.count, weight);
}

}  // namespace

int wants_inputs(const Lowered& lowered) {
  int wanted = 0;
  for (int i = 0; i < lowered.before_count; i++) {
    if (lowered.before[i].kind == CHECK) {
      Ref overwrites(PyObject_GetAttr(lowered.before[i].routine, names.overwrites));
      if (!overwrites) {
        return -1;
      }
      if (!PyBool_Check(overwrites.get())) {
        return 2;
      }
      wanted = wanted || overwrites.get() == Py_True;
    }
  }
  return wanted;
}

int know_key(const Lowered& lowered, PyObject* key) {
  int is_known = 1;
  for (int i = 0; i < lowered.after_count; i++) {
    const Step& step = lowered.after[i];
    if (step.kind == SHAPE_SUM && !weight_of(step.routine, key)) {
      if (PyErr_Occurred()) {
        return -1;
      }
      is_known = 0;
    }
  }
  // All of them: Python runs them all.
  for (int i = 0; !is_known && i < lowered.after_count; i++) {
    const Step& step = lowered.after[i];
    if (step.kind == SHAPE_SUM && !Ref(PyObject_CallMethodOneArg(step.routine, names.expect, key))) {
      return -1;
    }
  }
  return is_known;
}

int end_looks(const Lowered& lowered, PyObject* key) {
  for (int i = 0; i < lowered.after_count; i++) {
    const Step& step = lowered.after[i];
    if (step.kind == SHAPE_SUM && add_execution(step.routine, key) < 0) {
      return -1;
    }
    if (step.kind == CHECK) {
      Ref trail(PyObject_GetAttr(step.routine, names.trail));
      if (!trail) {
        return -1;
      }
      if (trail.get() != Py_None) {
        Ref name(PyObject_GetAttr(step.routine, names.name));
        if (!name || !Ref(PyObject_CallMethodOneArg(trail.get(), names.append, name.get()))) {
          return -1;
        }
      }
    }
  }
  return 0;
}

// ---- the code of tools ---------------------------------------------------------------------------------------

Ref thread_state() { return Ref(PyObject_GetAttr(objects.state, names.dict)); }

bool is_only_driver() { return PyDict_GET_SIZE(objects.unpaused) == 1; }

namespace {

// Add to the time that tools have taken in the scopes of a thread.
int charge(PyObject* state, int64_t nanoseconds) {
  Ref scopes = Ref::to(PyDict_GetItemWithError(state, names.scopes));
  Ref seconds(PyFloat_FromDouble(static_cast<double>(nanoseconds) * 1e-9));
  if (!seconds || !scopes || !PyTuple_CheckExact(scopes.get())) {
    return PyErr_Occurred() ? -1 : 0;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scopes.get()); i++) {
    Ref statistics(PyObject_GetAttr(PyTuple_GET_ITEM(scopes.get(), i), names.statistics));
    Ref before(statistics ? PyObject_GetAttr(statistics.get(), names.tool_seconds) : nullptr);
    Ref sum(before ? PyNumber_Add(before.get(), seconds.get()) : nullptr);
    if (!sum || PyObject_SetAttr(statistics.get(), names.tool_seconds, sum.get()) < 0) {
      return -1;
    }
  }
  return 0;
}

// What goes with the code of tools in a thread: the only place where it is entered.
class ToolCode {
 public:
  explicit ToolCode(PyObject* state) : state_(state) {}

  // Other drivers and hooks see that it is code of tools, nothing is recorded, and one thread runs it at a time.
  int enter() {
    outer_ = Ref::to(PyDict_GetItemWithError(state_, names.paused));
    Ref one(PyLong_FromLong(1)), inner(outer_ && one ? PyNumber_Add(outer_.get(), one.get()) : nullptr);
    if (!inner || PyDict_SetItem(state_, names.paused, inner.get()) < 0) {
      if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_KeyError, "paused");
      }
      outer_ = Ref();
      return -1;
    }
    records_ = is_recording();
    if (records_) {
      set_recording(false);
    }
    is_locked_ = static_cast<bool>(Ref(PyObject_CallNoArgs(objects.acquire)));
    start_ = read_clock();
    return is_locked_ ? 0 : -1;
  }

  // Undo what has been done; an error that is set stays.
  int leave() {
    bool had_error = PyErr_Occurred() != nullptr;
    int failed = 0;
    {
      KeepError keep;
      if (is_locked_) {
        failed = charge(state_, read_clock() - start_);
        Ref none(call_clean(objects.release));
        failed = none ? failed : -1;
      }
      if (records_) {
        set_recording(true);
      }
      if (outer_ && PyDict_SetItem(state_, names.paused, outer_.get()) < 0) {
        failed = -1;
      }
      if (PyErr_Occurred()) {
        failed = -1;
        PyErr_Clear();
      }
    }
    if (failed < 0 && !had_error) {
      PyErr_SetString(PyExc_RuntimeError, "the code of a tool cannot be left");
    }
    return failed;
  }

 private:
  static PyObject* call_clean(PyObject* function) {
    PyErr_Clear();
    return PyObject_CallNoArgs(function);
  }

  PyObject* state_;
  Ref outer_;
  bool records_ = false, is_locked_ = false;
  int64_t start_ = 0;
};

// Have Python note which function has raised an error, and raise what it gives instead.
void note_raised(const Known* known, PyObject* action) {
  Ref error = take_error();
  Ref raised(PyObject_CallFunctionObjArgs(objects.raised, error.get(), action, known->name, nullptr));
  if (raised) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  }
}

// Call a function with what it selects of the values; nullptr without an error if these are too few.
Ref call_step(const Step& step, const Values& values) {
  PyObject* room[MOST_VALUES + 1];
  PyObject** selected = room + 1;
  Py_ssize_t count = values.count;
  if (step.select == Py_None) {
    for (Py_ssize_t i = 0; i < count; i++) {
      selected[i] = values.items[i];
    }
  } else {
    count = PyTuple_CheckExact(step.select) ? PyTuple_GET_SIZE(step.select) : MOST_VALUES + 1;
    if (count > MOST_VALUES) {
      return Ref();
    }
    for (Py_ssize_t i = 0; i < count; i++) {
      Py_ssize_t place = PyLong_AsSsize_t(PyTuple_GET_ITEM(step.select, i));
      place += place < 0 ? values.count : 0;
      if (PyErr_Occurred() || place < 0 || place >= values.count) {
        PyErr_Clear();
        return Ref();
      }
      selected[i] = values.items[place];
    }
  }
  return Ref(PyObject_VectorcallDict(step.func, selected, static_cast<size_t>(count) | PY_VECTORCALL_ARGUMENTS_OFFSET,
                                     PyDict_GET_SIZE(step.kwargs) == 0 ? nullptr : step.kwargs));
}

int call_each(const Known* known, const Step* steps, int count, const Values& values, Ref& returned) {
  int64_t versions[MOST_VALUES];
  for (int i = 0; i < values.count; i++) {
    versions[i] = version_of(values.items[i]);
  }
  for (int i = 0; i < count; i++) {
    if (!PyDict_CheckExact(steps[i].kwargs)) {
      return i;
    }
    Ref result = call_step(steps[i], values);
    if (!result) {
      if (!PyErr_Occurred()) {
        return i;
      }
      note_raised(known, steps[i].action);
      return -1;
    }
    bool is_changed = false;
    for (int k = 0; k < values.count; k++) {
      int64_t now = version_of(values.items[k]);
      is_changed = is_changed || now != versions[k];
      versions[k] = now;
    }
    if (is_changed && !Ref(PyObject_CallOneArg(objects.changed, steps[i].action))) {
      return -1;
    }
    if (result.get() != Py_None) {
      returned = std::move(result);
      return i + 1;
    }
  }
  return count;
}

}  // namespace

int call_steps(const Known* known, const Step* steps, int count, const Values& values, PyObject* state, Ref& returned) {
  if (count == 0) {
    return 0;
  }
  ToolCode code(state);
  int done = code.enter() < 0 ? -1 : call_each(known, steps, count, values, returned);
  return code.leave() < 0 ? -1 : done;
}

}  // namespace accel
