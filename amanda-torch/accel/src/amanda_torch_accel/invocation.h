// A call of one of PyTorch's builtins that was noticed.
#pragma once

#include "accel.h"

namespace accel {

enum class Form {
  KEYWORDS,    // a method that takes (self, args, kwargs)
  PLAIN,       // a method that takes (self, argument): none, one, or a tuple, by `flags`
  FUNCTION,    // a function that takes (self, args, kwargs)
  GETTER,      // a property
  SUBSCRIPT,   // a[i]
  ASSIGNMENT,  // a[i] = b, del a[i]
  CALLABLE,    // a function in Python that reports itself
};

// Types of arguments that are remembered of each builtin, see note_signature().
constexpr int FITTING = 8;

// A builtin whose calls are noticed.
struct Site {
  Form form = Form::CALLABLE;
  int flags = 0;                  // METH_VARARGS, METH_NOARGS or METH_O, of methods and functions
  void* original = nullptr;       // the function of PyTorch's
  PyObject* reported = nullptr;   // what PyTorch reports to a mode; nullptr as long as it is not known
  void* closure = nullptr;        // of a getter
  const char* name = "";
  uint64_t fitting[FITTING] = {}; // signatures of calls that were reported, the last ones
  unsigned fitting_count = 0;
};

struct Invocation {
  Site* site;
  PyObject* self = nullptr;      // of a CALLABLE, what is called
  PyObject* args = nullptr;      // a tuple or the argument, by the form; i of a[i]
  PyObject* kwargs = nullptr;    // a dict or nullptr; b of a[i] = b
};

// The positional arguments of a call as PyTorch reports them, borrowed.
class Positional {
 public:
  explicit Positional(const Invocation& call);
  Py_ssize_t count() const { return count_ + (self_ != nullptr); }
  PyObject* operator[](Py_ssize_t i) const {
    return self_ == nullptr ? items_[i] : i == 0 ? self_ : items_[i - 1];
  }

 private:
  PyObject* self_ = nullptr;
  PyObject* const* items_ = nullptr;
  Py_ssize_t count_ = 0;
};

// The arguments of a call as PyTorch reports them.
Ref reported_args(const Invocation& call);
Ref reported_kwargs(const Invocation& call);

// Of the current thread: its virtual mode (a strong reference), and how many modes lie below it; the site whose
// report is awaited; how many reports have come, and whether nothing is to be done for them.
struct Thread {
  PyObject* mode = nullptr;
  Py_ssize_t depth = 0;
  unsigned session = 0;
  Site* awaited = nullptr;
  int reports = 0;
  bool only_asks = false;
};

Thread& this_thread();
PyObject* virtual_mode(Thread& thread);  // borrowed; nullptr for none

PyObject* run_original(const Invocation& call);

// Run a call as the virtual mode does with it: every call of a replaced function comes here.
PyObject* intercept(const Invocation& call);

// PyTorch has taken arguments of these types: the next ones fit, too.
void note_signature(const Invocation& call);

// Run it with the virtual mode on the stack, so that PyTorch reports it.
PyObject* ask_python(const Invocation& call, Thread& thread);

// True if PyTorch takes the arguments of a call that has raised: it reports it then to a mode, which does not run it.
bool is_taken(const Invocation& call, PyObject* mode, Thread& thread);

// Put back a virtual mode (a reference that is given away) after a call.
void put_back(Thread& thread, PyObject* mode);

// Tracker.enter_module() for a module that was called at this place before: the frame to come back to, or nullptr
// where Python is to do it.
Ref enter_module(Tracker* mode, PyObject* module);
void leave_module(Tracker* mode, PyObject* parent);

}  // namespace accel
