// Steps of operators, and the code of tools.
//
// A plan is lowered by core to steps (amanda.inline.steps); here they are run. What is not simple is Python's.

#include "invocation.h"
#include "torch_api.h"

#include <atomic>
#include <chrono>
#include <memory>

namespace accel {

Ref Values::tuple() const {
  return make_tuple(count, [this](Py_ssize_t i) { return Py_NewRef(items[i]); });
}

// ---- lowering ------------------------------------------------------------------------------------------------

namespace {

// Read what the step of a Mark needs; 0, or -1 with an error.
int read_mark(Step& step) {
  Ref ring(PyObject_GetAttr(step.routine.get(), names.ring));
  Ref number(ring ? PyObject_GetAttr(step.routine.get(), names.number) : nullptr);
  Ref numbers(number ? PyObject_GetAttr(ring.get(), names.numbers) : nullptr);
  step.number = numbers ? PyLong_AsLongLong(number.get()) : -1;
  step.ring = std::make_unique<Memory>();
  return PyErr_Occurred() ? -1 : PyObject_GetBuffer(numbers.get(), &step.ring->view, PyBUF_WRITABLE);
}

// Read one step: 1; 0 if it is of a form that is not run here; -1 with an error.
int read_step(PyObject* object, Step& step) {
  Ref kind(PyObject_GetAttr(object, names.kind)), ends(kind ? PyObject_GetAttr(object, names.ends) : nullptr);
  long number = ends ? PyLong_AsLong(kind.get()) : -1;
  if (PyErr_Occurred()) {
    return -1;
  }
  step.kind = number > EXECUTION && number != MARK ? CALL : static_cast<Kind>(number);
  step.ends = ends.get() == Py_True;
  step.routine = Ref(PyObject_GetAttr(object, names.routine));
  step.action = Ref(step.routine ? PyObject_GetAttr(object, names.action) : nullptr);
  step.func = Ref(!step.action              ? nullptr
                  : step.kind == EXECUTION ? PyObject_GetAttr(step.routine.get(), names.note_execution)
                                           : PyObject_GetAttr(step.action.get(), names.func));
  step.select = Ref(step.func ? PyObject_GetAttr(step.action.get(), names.select) : nullptr);
  step.kwargs = Ref(step.select ? PyObject_GetAttr(step.action.get(), names.kwargs) : nullptr);
  if (!step.kwargs || (step.kind == MARK && read_mark(step) < 0)) {
    return -1;
  }
  return PyDict_CheckExact(step.kwargs.get()) && (step.select.get() == Py_None || PyTuple_CheckExact(step.select.get()));
}

// Read the steps of a point; the result is that of read_step().
int read_steps(PyObject* steps, std::vector<Step>& read) {
  if (steps == nullptr || !PyTuple_CheckExact(steps)) {
    return 0;
  }
  int is_read = 1;
  for (Py_ssize_t i = 0; is_read > 0 && i < PyTuple_GET_SIZE(steps); i++) {
    is_read = read_step(PyTuple_GET_ITEM(steps, i), read.emplace_back());
  }
  return is_read;
}

// Find the way of steps that have been read; -1 with an error.
int choose_way(Lowered& lowered, PyObject* before, PyObject* after) {
  bool calls = false;
  for (const auto* steps : {&lowered.before, &lowered.after}) {
    for (const Step& step : *steps) {
      bool is_blind = step.select.get() != Py_None && PyTuple_GET_SIZE(step.select.get()) == 0;
      lowered.is_joined |= step.kind == EXECUTION;
      lowered.has_clock |= step.kind == CLOCK;
      lowered.takes_tensors |= step.kind == EXECUTION || !is_blind;
      lowered.acts_before |= (step.kind == COUNT || step.kind == MARK) && steps == &lowered.before;
      calls |= step.kind == CALL || step.kind == EXECUTION;
    }
  }
  Ref are_paired(calls ? Py_NewRef(Py_False)
                       : PyObject_CallFunctionObjArgs(objects.are_paired, before, after, nullptr));
  lowered.way = are_paired.get() == Py_True ? Way::MEASURED : Way::CALLED;
  return are_paired ? 0 : -1;
}

}  // namespace

Lowered* lower(PyObject* before, PyObject* after) {
  auto read = [before, after]() -> Lowered* {
    auto lowered = std::make_unique<Lowered>();
    int is_read = read_steps(before, lowered->before);
    is_read = is_read > 0 ? read_steps(after, lowered->after) : is_read;
    if (is_read < 0 || (is_read > 0 && choose_way(*lowered, before, after) < 0)) {
      return nullptr;
    }
    lowered->acts_before |= lowered->way != Way::MEASURED;
    return lowered.release();
  };
  return guarded(read, nullptr);
}

int visit_lowered(const Lowered& lowered, visitproc visit, void* arg) {
  for (const auto* steps : {&lowered.before, &lowered.after}) {
    for (const Step& step : *steps) {
      for (const Ref* one : {&step.routine, &step.action, &step.func, &step.select, &step.kwargs}) {
        Py_VISIT(one->get());
      }
    }
  }
  return 0;
}

// ---- clocks, memory and marks --------------------------------------------------------------------------------

namespace {

// time.perf_counter_ns(), which reads this clock on Linux.
int64_t read_clock() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Call a function of a routine of amanda.inline in the code of tools; nullptr with an error.
Ref call_as_routine(PyObject* function, PyObject* first = nullptr, PyObject* second = nullptr) {
  return Ref(PyObject_CallFunctionObjArgs(objects.as_routine, function, first, second, nullptr));
}

int64_t native_thread() {
  static thread_local auto thread = static_cast<int64_t>(PyThread_get_thread_native_id());
  return thread;
}

// The memory of a Ring of amanda.inline.ring, which says what the fields mean.
struct Header {
  int64_t magic, size, begun, step, memory, due, epoch, process;
};
struct Record {
  int64_t index, number, step, memory, begin, end, thread;
};

// Ring.begin() and Ring.end(), for the step of a Mark.
int note_mark(const Step& step) {
  int64_t number = step.number, now = read_clock();
  auto& header = *static_cast<Header*>(step.ring->view.buf);
  auto* records = reinterpret_cast<Record*>(&header + 1);
  bool failed = false;
  if (!step.ends) {
    if (now >= header.due) {
      Ref ring(PyObject_GetAttr(step.routine.get(), names.ring));
      Ref look(ring ? PyObject_GetAttr(ring.get(), names.look) : nullptr);
      Ref moment(look ? PyLong_FromLongLong(now) : nullptr);
      failed = !moment || !call_as_routine(look.get(), moment.get());
    }
    int64_t index = header.begun + 1;
    records[index % header.size] = {index, number, header.step, header.memory, now, 0, native_thread()};
    // A reader takes no record beyond it; the compiler must not move it to before the record.
    std::atomic_ref(header.begun).store(index, std::memory_order_release);
  } else {
    Record* found = nullptr;
    for (int64_t i = header.begun; i > 0 && i > header.begun - header.size; i--) {
      Record& record = records[i % header.size];
      if (record.number == number && record.end == 0) {
        found = found == nullptr || record.thread == native_thread() ? &record : found;
        if (record.thread == native_thread()) {
          break;
        }
      }
    }
    if (found != nullptr) {
      found->end = now;
    }
  }
  return failed ? -1 : 0;
}

// Timer.add(). The lock of tools is not needed: the GIL is not given up between the first and the last attribute.
int add_time(PyObject* timer, int64_t start, int64_t end) {
  Ref log(PyObject_GetAttr(timer, names.log));
  if (!log) {
    return -1;
  }
  if (log.get() != Py_None) {
    Ref due(PyObject_GetAttr(log.get(), names.due)), number(due ? PyObject_GetAttr(timer, names.number) : nullptr);
    bool is_due = number && due.get() != Py_None && end >= PyLong_AsLongLong(due.get());
    int64_t row[] = {number ? PyLong_AsLongLong(number.get()) : 0, start, end, native_thread()};
    if (PyErr_Occurred()) {
      return -1;
    }
    if (is_due) {
      // It calls Log.look(), which is code of tools.
      Ref add(PyObject_GetAttr(timer, names.add)), first(PyLong_FromLongLong(start)), last(PyLong_FromLongLong(end));
      return add && first && last && call_as_routine(add.get(), first.get(), last.get()) ? 0 : -1;
    }
    Ref bytes(PyBytes_FromStringAndSize(reinterpret_cast<char*>(row), sizeof row));
    Ref numbers(bytes ? PyObject_GetAttr(log.get(), names.numbers) : nullptr);
    if (!numbers || !Ref(PyObject_CallMethodOneArg(numbers.get(), names.frombytes, bytes.get()))) {
      return -1;
    }
  }
  return add_to(timer, names.executions, Ref(PyLong_FromLong(1))) < 0
             ? -1
             : add_to(timer, names.nanoseconds, Ref(PyLong_FromLongLong(end - start)));
}

// Run the counts, memory and marks of a point, and the clocks that end.
int run_measures(const std::vector<Step>& steps, int64_t start, int64_t end) {
  for (const Step& step : steps) {
    int failed = 0;
    if (step.kind == COUNT) {
      failed = add_to(step.routine.get(), names.count, Ref(PyLong_FromLong(1)));
    } else if (step.kind == MEMORY) {
      failed = call_as_routine(step.func.get()) ? 0 : -1;
    } else if (step.kind == MARK) {
      failed = note_mark(step);
    } else if (step.ends) {
      failed = add_time(step.routine.get(), start, end);
    }
    if (failed < 0) {
      return -1;
    }
  }
  return 0;
}

}  // namespace

int begin_measures(const Lowered& lowered, int64_t& begun) {
  int failed = run_measures(lowered.before, 0, 0);
  // What is done for other steps is no part of the time.
  begun = lowered.has_clock ? read_clock() : 0;
  return failed;
}

int end_measures(const Lowered& lowered, int64_t begun) {
  return run_measures(lowered.after, begun, lowered.has_clock ? read_clock() : 0);
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
    if (!statistics || add_to(statistics.get(), names.tool_seconds, seconds) < 0) {
      return -1;
    }
  }
  return 0;
}

// What goes with the code of tools in a thread: the only place where it is entered. Its twin in Python is ToolCode of
// amanda.engine.tool_code.
class ToolCode {
 public:
  explicit ToolCode(PyObject* state) : state_(state) {}

  // Other drivers and hooks see that it is code of tools, nothing is recorded or noticed, and one thread runs it at a
  // time.
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
    mode_ = virtual_mode(this_thread());
    this_thread().mode = nullptr;
    is_locked_ = static_cast<bool>(Ref(PyObject_CallNoArgs(objects.acquire)));
    start_ = read_clock();
    return is_locked_ ? 0 : -1;
  }

  // Undo what has been done; an error that is set stays.
  int leave() {
    bool failed = false;
    auto note = [&failed](bool is_done) { if (!is_done) { PyErr_Clear(); failed = true; } };
    {
      KeepError keep;
      if (is_locked_) {
        note(charge(state_, read_clock() - start_) == 0);
        note(static_cast<bool>(Ref(PyObject_CallNoArgs(objects.release))));
      }
      if (mode_ != nullptr) {
        put_back(this_thread(), mode_);
      }
      if (records_) {
        set_recording(true);
      }
      note(!outer_ || PyDict_SetItem(state_, names.paused, outer_.get()) == 0);
    }
    if (failed && !PyErr_Occurred()) {
      PyErr_SetString(PyExc_RuntimeError, "the code of a tool cannot be left");
    }
    PyObject* waiting = PyErr_Occurred() ? nullptr : PyDict_GetItemWithError(state_, names.waiting);
    bool waits = waiting != nullptr && PyDict_GET_SIZE(waiting) > 0;
    return failed || (waits && !Ref(PyObject_CallNoArgs(objects.deliver))) ? -1 : 0;
  }

 private:
  PyObject* state_;
  Ref outer_;
  PyObject* mode_ = nullptr;
  bool records_ = false, is_locked_ = false;
  int64_t start_ = 0;
};

// Have Python note which function has raised an error, and raise what it gives instead.
void note_raised(PyObject* name, PyObject* action) {
  Ref error = take_error();
  Ref raised(PyObject_CallFunctionObjArgs(objects.raised, error.get(), action, name, nullptr));
  if (raised) {
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.get())), raised.get());
  }
}

// Call a function with what it selects of the values; nullptr without an error if these are too few.
Ref call_step(const Step& step, const Values& values, PyObject* inputs) {
  if (step.kind == EXECUTION) {
    Ref outputs = step.select.get() == Py_None ? values.tuple() : Ref(PyTuple_New(0));
    return Ref(outputs ? PyObject_CallFunctionObjArgs(step.func.get(), inputs, outputs.get(), nullptr) : nullptr);
  }
  PyObject* room[MOST_VALUES + 1];
  PyObject** selected = room + 1;
  PyObject* select = step.select.get();
  Py_ssize_t count = select == Py_None ? values.count : PyTuple_GET_SIZE(select);
  if (count > MOST_VALUES) {
    return Ref();
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    Py_ssize_t place = select == Py_None ? i : PyLong_AsSsize_t(PyTuple_GET_ITEM(select, i));
    place += place < 0 ? values.count : 0;
    if (PyErr_Occurred() || place < 0 || place >= values.count) {
      PyErr_Clear();
      return Ref();
    }
    selected[i] = values.items[place];
  }
  PyObject* kwargs = PyDict_GET_SIZE(step.kwargs.get()) == 0 ? nullptr : step.kwargs.get();
  return Ref(PyObject_VectorcallDict(step.func.get(), selected,
                                     static_cast<size_t>(count) | PY_VECTORCALL_ARGUMENTS_OFFSET, kwargs));
}

int call_each(PyObject* name, const std::vector<Step>& steps, const Values& values, PyObject* inputs, Ref& returned) {
  int64_t versions[MOST_VALUES];
  for (int i = 0; i < values.count; i++) {
    versions[i] = version_of(values.items[i]);
  }
  int done = 0;
  for (const Step& step : steps) {
    returned = call_step(step, values, inputs);
    if (!returned) {
      if (!PyErr_Occurred()) {
        return done;
      }
      note_raised(name, step.action.get());
      return -1;
    }
    done++;
    bool is_changed = false;
    for (int i = 0; i < values.count; i++) {
      int64_t now = version_of(values.items[i]);
      is_changed = is_changed || now != versions[i];
      versions[i] = now;
    }
    if (is_changed && !Ref(PyObject_CallOneArg(objects.changed, step.action.get()))) {
      return -1;
    }
    if (returned.get() != Py_None) {
      return done;
    }
  }
  returned = Ref();
  return done;
}

}  // namespace

int call_steps(PyObject* name, const std::vector<Step>& steps, const Values& values, PyObject* inputs, PyObject* state,
               Ref& returned) {
  if (steps.empty()) {
    return 0;
  }
  ToolCode code(state);
  int done = code.enter() < 0 ? -1 : call_each(name, steps, values, inputs, returned);
  return code.leave() < 0 ? -1 : done;
}

}  // namespace accel
