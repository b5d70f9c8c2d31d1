// Backward operators: the nodes that an operator has made are found and hooked, and their steps are run.
//
// The first executions of an operator are Python's (amanda_torch.autograd.claims), which finds out what there is to be
// done. Once no analysis is pending it says so by learn(): from then on claim() compares the nodes of an execution with
// those that are known, and hooks them.

#include "accel.h"
#include "torch_api.h"

#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <typeindex>
#include <unordered_map>
#include <vector>

namespace accel {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using Gil = pybind11::gil_scoped_acquire;
using NodePointer = decltype(Edge::function);

namespace {

// Counts up where what is known of routines is out of date, see forget().
unsigned long plans;

// Strong references to objects of Python's that C++ may release without the GIL.
template <size_t COUNT>
struct Held {
  PyObject* objects[COUNT] = {};
  Held() = default;
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  void clear() {
    for (PyObject*& object : objects) {
      Py_CLEAR(object);
    }
  }
  ~Held() {
    if (std::any_of(objects, objects + COUNT, [](PyObject* one) { return one != nullptr; }) && Py_IsInitialized()) {
      Gil gil;
      clear();
    }
  }
};

[[noreturn]] void throw_error() {
  python_error error;
  error.persist();
  throw error;  // NOLINT: it has been persisted
}

// ---- hooks of backward operators -----------------------------------------------------------------------------

void release_anywhere(const Lowered* lowered) {
  if (Py_IsInitialized()) {
    Gil gil;
    release(const_cast<Lowered*>(lowered));
  }
}

// The steps of BackwardRoutines, until forget(). They are kept here, and not in the hooks, since a graph that outlives
// the scope would keep the tools alive. It is never destroyed: that would be after the interpreter.
struct KnownSteps {
  Ref routines;
  std::shared_ptr<const Lowered> steps;
};
auto& known_steps = *new std::unordered_map<PyObject*, KnownSteps>();

// What is done at one backward operator: NodeHooks of amanda_torch.autograd.hooks, and its steps.
class Hooks {
 public:
  // nullptr with an error.
  static std::shared_ptr<Hooks> of(PyObject* hooks) {
    auto made = std::make_shared<Hooks>();
    made->held_.objects[0] = Py_NewRef(hooks);
    made->held_.objects[1] = PyObject_GetAttr(hooks, names.dispatcher);
    Ref before(PyObject_GetAttr(hooks, names.has_before)), after(PyObject_GetAttr(hooks, names.has_after));
    if (made->held_.objects[1] == nullptr || !before || !after) {
      return nullptr;
    }
    made->has_before = before.get() == Py_True;
    made->has_after = after.get() == Py_True;
    return made;
  }

  PyObject* python() const { return held_.objects[0]; }

  // Its steps, if they are known now; nullptr, with or without an error, where Python is to run it.
  std::shared_ptr<const Lowered> steps() {
    auto steps = generation_ == plans ? steps_.lock() : nullptr;
    if (steps) {
      return steps;
    }
    unsigned long generation = plans;
    Ref routines(PyObject_CallMethodNoArgs(python(), names.routines));
    if (!routines || routines.get() == Py_None) {
      return nullptr;
    }
    if (auto found = known_steps.find(routines.get()); found != known_steps.end()) {
      steps = found->second.steps;
    } else {
      Ref before(PyObject_GetAttr(routines.get(), names.steps_before));
      Ref after(before ? PyObject_GetAttr(routines.get(), names.steps_after) : nullptr);
      Lowered* lowered = after ? lower(before.get(), after.get()) : nullptr;
      if (lowered == nullptr) {
        return nullptr;
      }
      steps = std::shared_ptr<const Lowered>(lowered, release_anywhere);
      PyObject* key = routines.get();
      known_steps[key] = {std::move(routines), steps};
    }
    steps_ = steps;
    generation_ = generation;
    return steps;
  }

  // RoutineDispatcher.is_plain_thread(): 1, 0, or -1 with an error.
  int is_plain_thread() const {
    Ref state = thread_state(), quiet(state ? PyObject_GetAttr(held_.objects[1], names.quiet) : nullptr);
    int is_quiet = quiet ? PyObject_IsTrue(quiet.get()) : -1;
    for (PyObject* name : {names.enabled, names.cache, names.paused, names.held}) {
      PyObject* found = is_quiet == 0 ? PyDict_GetItemWithError(state.get(), name) : nullptr;
      int is_true = found == nullptr ? -1 : PyObject_IsTrue(found);
      if (is_true < 0) {
        return PyErr_Occurred() ? -1 : 0;
      }
      is_quiet = is_true != (name == names.enabled || name == names.cache);
    }
    return is_quiet < 0 ? -1 : !is_quiet;
  }

  bool has_before = false, has_after = false;

 private:
  Held<2> held_;
  std::weak_ptr<const Lowered> steps_;
  unsigned long generation_ = 0;
};

Ref tuple_of(const variable_list& tensors) {
  Ref tuple(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())));
  for (size_t i = 0; tuple && i < tensors.size(); i++) {
    PyObject* one = tensors[i].defined() ? THPVariable_Wrap(tensors[i]) : Py_NewRef(Py_None);
    if (one == nullptr) {
      return Ref();
    }
    PyTuple_SET_ITEM(tuple.get(), static_cast<Py_ssize_t>(i), one);
  }
  return tuple;
}

// The gradients that a hook in Python has returned instead of others.
variable_list gradients_of(PyObject* tuple, size_t count) {
  if (!PyTuple_Check(tuple) || static_cast<size_t>(PyTuple_GET_SIZE(tuple)) != count) {
    PyErr_SetString(PyExc_RuntimeError, "a hook has returned another number of gradients");
    throw_error();
  }
  variable_list found(count);
  for (size_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i));
    if (THPVariable_Check(one)) {
      found[i] = THPVariable_Unpack(one);
    } else if (one != Py_None) {
      PyErr_Format(PyExc_TypeError, "a hook has returned %R instead of a gradient", one);
      throw_error();
    }
  }
  return found;
}

bool nothing_flows(const variable_list& gradients) {
  return !gradients.empty() &&
         std::none_of(gradients.begin(), gradients.end(), [](const at::Tensor& one) { return one.defined(); });
}

// ---- accumulations of leaves ---------------------------------------------------------------------------------

// The hooks on a leaf's accumulation: Accumulation of amanda_torch.autograd.hooks.
class Leaf {
 public:
  enum { MAKER, KNOWN, BACKWARD_ID, SCOPES, PAST, COUNT };

  // A backward pass has come to an operator of the scopes that uses the leaf.
  void note_pass(int task, bool makes_graph) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(passes_.begin(), passes_.end(), task) == passes_.end()) {
      // Those that run at once in different threads.
      constexpr size_t PASSES = 64;
      if (passes_.size() == PASSES) {
        passes_.erase(passes_.begin());
      }
      passes_.push_back(task);
    }
    // The graph of this pass may lead to the leaf by nodes that no operator owns.
    always_ = always_ || makes_graph;
  }

  bool acts_in(int task) {
    std::lock_guard<std::mutex> lock(mutex_);
    return always_ || std::find(passes_.begin(), passes_.end(), task) != passes_.end();
  }

  // What is done there, found out where the first pass comes to it; nullptr with an error.
  std::shared_ptr<Hooks> hooks() {
    if (hooks_ == nullptr) {
      // Another thread may do the same meanwhile, and release them.
      Ref maker = Ref::to(held.objects[MAKER]), known = Ref::to(held.objects[KNOWN]), past = Ref::to(held.objects[PAST]);
      Ref made(PyObject_CallMethodObjArgs(maker.get(), names.leaf_hooks, known.get(), held.objects[BACKWARD_ID],
                                          held.objects[SCOPES], past.get(), nullptr));
      auto hooks = made ? Hooks::of(made.get()) : nullptr;
      if (hooks != nullptr && hooks_ == nullptr) {
        set_hooks(std::move(hooks));
      }
    }
    return hooks_;
  }

  // The leaf may outlive the model: what has made them is not needed any more.
  void set_hooks(std::shared_ptr<Hooks> hooks) {
    hooks_ = std::move(hooks);
    for (int i : {MAKER, KNOWN, PAST}) {
      Py_CLEAR(held.objects[i]);
    }
  }

  Held<COUNT> held;

 private:
  std::mutex mutex_;
  std::vector<int> passes_;
  bool always_ = false;
  std::shared_ptr<Hooks> hooks_;
};

// ---- what autograd calls -------------------------------------------------------------------------------------

// One node in one graph. Of an accumulation there is a leaf instead of the hooks.
struct Hooked {
  std::shared_ptr<Hooks> hooks;
  std::shared_ptr<Leaf> leaf;
  // Of the execution that runs: the steps that have begun, and in which pass; those of others at once are Python's.
  std::weak_ptr<const Lowered> begun;
  int task = -1;
  Measures measures;

  // Whether to do anything for a pass that has come to the node; the GIL is not held.
  bool acts(const variable_list& consumed) {
    return !nothing_flows(consumed) && (leaf == nullptr || leaf->acts_in(current_task()));
  }

  std::shared_ptr<Hooks> found() {
    auto one = leaf != nullptr ? leaf->hooks() : hooks;
    if (one == nullptr) {
      throw_error();
    }
    return one;
  }
};

std::shared_ptr<const Lowered> runnable(Hooks& hooks) {
  int is_plain = hooks.is_plain_thread();
  auto steps = is_plain > 0 ? hooks.steps() : nullptr;
  if (PyErr_Occurred()) {
    throw_error();
  }
  bool is_here = steps && (steps->way == Way::MEASURED || (steps->way == Way::LOOKED && is_plain_here(true) > 0));
  if (PyErr_Occurred()) {
    throw_error();
  }
  return is_here ? steps : nullptr;
}

void check(int failed) {
  if (failed < 0) {
    throw_error();
  }
}

class Before : public FunctionPreHook {
 public:
  explicit Before(std::shared_ptr<Hooked> node) : node_(std::move(node)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!node_->acts(gradients)) {
      return gradients;
    }
    Gil gil;
    auto hooks = node_->found();
    if (!hooks->has_before) {
      return gradients;
    }
    auto steps = runnable(*hooks);
    if (steps != nullptr && are_passed(*steps, gradients) && node_->begun.expired()) {
      if (hooks->has_after) {
        node_->task = current_task();
        node_->begun = steps;
      }
      check(begin_measures(*steps, node_->measures));
      return gradients;
    }
    Ref given = tuple_of(gradients);
    Ref result(given ? PyObject_CallMethodOneArg(hooks->python(), names.before, given.get()) : nullptr);
    if (!result) {
      throw_error();
    }
    return result.get() == Py_None ? gradients : gradients_of(result.get(), gradients.size());
  }

  void compiled_args(CompiledNodeArgs& args) const override;
  const std::shared_ptr<Leaf>& leaf() const { return node_->leaf; }

 private:
  // Whether checks need not look at what the node consumes, or find it finite.
  static bool are_passed(const Lowered& steps, const variable_list& gradients) {
    int wanted = wants_inputs(steps);
    int passed = wanted == 1 ? are_finite(gradients.data(), gradients.size()) : wanted == 0;
    check(wanted);
    check(passed);
    return passed;
  }

  std::shared_ptr<Hooked> node_;
};

class After : public FunctionPostHook {
 public:
  explicit After(std::shared_ptr<Hooked> node) : node_(std::move(node)) {}

  variable_list operator()(const variable_list& produced, const variable_list& consumed) override {
    if (!node_->acts(consumed)) {
      return produced;
    }
    Gil gil;
    auto hooks = node_->found();
    if (!hooks->has_after) {
      return produced;
    }
    std::shared_ptr<const Lowered> begun;
    if (node_->task == current_task()) {
      begun = std::exchange(node_->begun, {}).lock();
    }
    auto steps = runnable(*hooks);
    bool is_begun = steps && begun == steps;
    if (steps && (is_begun || steps->before_count == 0)) {
      check(end_measures(*steps, node_->measures));
      if (steps->way == Way::LOOKED) {
        look(*hooks, *steps, produced, consumed);
      }
      return produced;
    }
    Ref given = tuple_of(produced), others(given ? tuple_of(consumed) : Ref());
    Ref result(others ? PyObject_CallMethodObjArgs(hooks->python(), names.after, given.get(), others.get(), nullptr)
                      : nullptr);
    if (!result) {
      throw_error();
    }
    return result.get() == Py_None ? produced : gradients_of(result.get(), produced.size());
  }

  void compiled_args(CompiledNodeArgs& args) const override;
  const std::shared_ptr<Leaf>& leaf() const { return node_->leaf; }

 private:
  static void look(Hooks& hooks, const Lowered& steps, const variable_list& produced, const variable_list& consumed) {
    int passed = steps.checks ? are_finite(produced.data(), produced.size()) : 1;
    Ref bytes;
    if (passed > 0 && steps.sums) {
      Key key;
      auto add = [&key](const at::Tensor& one) { return key.add(one); };
      if (std::all_of(consumed.begin(), consumed.end(), add) && key.add_word(0) &&
          std::all_of(produced.begin(), produced.end(), add)) {
        bytes = key.bytes();
      }
      passed = bytes ? know_key(steps, bytes.get()) : PyErr_Occurred() ? -1 : 0;
    }
    check(passed);
    if (passed > 0) {
      check(end_looks(steps, bytes.get()));
      return;
    }
    Ref given = tuple_of(produced), others(given ? tuple_of(consumed) : Ref());
    check(others && Ref(PyObject_CallMethodObjArgs(hooks.python(), names.checked, given.get(), others.get(), nullptr))
              ? 0
              : -1);
  }

  std::shared_ptr<Hooked> node_;
};

// On the nodes of an operator's outputs: the accumulations of its leaves act in the passes that come here.
class Reached : public FunctionPreHook {
 public:
  explicit Reached(std::vector<std::shared_ptr<Leaf>> leaves) : leaves_(std::move(leaves)) {}

  variable_list operator()(const variable_list& gradients) override {
    if (!nothing_flows(gradients)) {
      for (const auto& leaf : leaves_) {
        leaf->note_pass(current_task(), is_recording());
      }
    }
    return gradients;
  }

  // Compiled autograd comes to the outputs of an operator before it comes to leaves.
  void compiled_args(CompiledNodeArgs&) const override {
    for (const auto& leaf : leaves_) {
      leaf->note_pass(current_task(), false);
    }
  }

 private:
  std::vector<std::shared_ptr<Leaf>> leaves_;
};

// Compiled autograd calls hooks of Python's in code of its own.
c10::SafePyObject bound(Hooked& node, PyObject* name) {
  PyObject* method = PyObject_GetAttr(node.found()->python(), name);
  if (method == nullptr) {
    throw_error();
  }
  return c10::SafePyObject(method, getPyInterpreter());
}

void Before::compiled_args(CompiledNodeArgs& args) const {
  Gil gil;
  if (node_->leaf == nullptr || node_->leaf->acts_in(current_task())) {
    args.add_pre_hook(bound(*node_, names.before));
  }
}

void After::compiled_args(CompiledNodeArgs& args) const {
  Gil gil;
  if (node_->leaf == nullptr || node_->leaf->acts_in(current_task())) {
    args.add_post_hook(bound(*node_, names.after));
  }
}

void hook(Node& node, const std::shared_ptr<Hooks>& hooks) {
  auto hooked = std::make_shared<Hooked>();
  hooked->hooks = hooks;
  if (hooks->has_before) {
    node.add_pre_hook(std::make_unique<Before>(hooked));
  }
  if (hooks->has_after) {
    node.add_post_hook(std::make_unique<After>(hooked));
  }
}

void hook(Node& node, const std::shared_ptr<Leaf>& leaf, bool before, bool after) {
  auto hooked = std::make_shared<Hooked>();
  hooked->leaf = leaf;
  if (before) {
    node.add_pre_hook(std::make_unique<Before>(hooked));
  }
  if (after) {
    node.add_post_hook(std::make_unique<After>(hooked));
  }
}

// ---- objects of Python's -------------------------------------------------------------------------------------

// Runs a body that may throw at a boundary to C.
template <typename F>
auto guarded(F&& body, decltype(body()) failed) noexcept -> decltype(body()) {
  try {
    return body();
  } catch (python_error& error) {
    error.restore();
  } catch (...) {
    set_error_from_exception();
  }
  return failed;
}

struct Accumulation {
  PyObject_HEAD
  std::shared_ptr<Leaf> leaf;
};

PyObject* accumulation_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* given[Leaf::COUNT];
  if (!PyArg_ParseTuple(args, "OOOOO", &given[Leaf::MAKER], &given[Leaf::KNOWN], &given[Leaf::BACKWARD_ID],
                        &given[Leaf::SCOPES], &given[Leaf::PAST])) {
    return nullptr;
  }
  auto* self = reinterpret_cast<Accumulation*>(type->tp_alloc(type, 0));
  if (self == nullptr) {
    return nullptr;
  }
  new (&self->leaf) std::shared_ptr<Leaf>();
  bool is_made = guarded(
      [&] {
        self->leaf = std::make_shared<Leaf>();
        for (int i = 0; i < Leaf::COUNT; i++) {
          self->leaf->held.objects[i] = Py_NewRef(given[i]);
        }
        return true;
      },
      false);
  if (!is_made) {
    Py_DECREF(self);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(self);
}

void accumulation_dealloc(PyObject* self) {
  std::destroy_at(&reinterpret_cast<Accumulation*>(self)->leaf);
  Py_TYPE(self)->tp_free(self);
}

PyObject* accumulation_note_pass(PyObject* self, PyObject* args) {
  int task, makes_graph;
  if (!PyArg_ParseTuple(args, "ip", &task, &makes_graph)) {
    return nullptr;
  }
  return guarded(
      [&] {
        reinterpret_cast<Accumulation*>(self)->leaf->note_pass(task, makes_graph);
        return Py_NewRef(Py_None);
      },
      nullptr);
}

PyObject* accumulation_marks(PyObject* self, PyObject*) {
  Ref scopes(PySequence_Fast(reinterpret_cast<Accumulation*>(self)->leaf->held.objects[Leaf::SCOPES], "no scopes"));
  Ref marks(scopes ? PyDict_New() : nullptr);
  for (Py_ssize_t i = 0; marks && i < PySequence_Fast_GET_SIZE(scopes.get()); i++) {
    if (PyDict_SetItem(marks.get(), PySequence_Fast_GET_ITEM(scopes.get(), i), self) < 0) {
      return nullptr;
    }
  }
  return marks.release();
}

template <int FIELD>
PyObject* accumulation_get(PyObject* self, void*) {
  return Py_NewRef(reinterpret_cast<Accumulation*>(self)->leaf->held.objects[FIELD]);
}

PyMethodDef accumulation_methods[] = {
    {"note_pass", accumulation_note_pass, METH_VARARGS,
     "note_pass(task, makes_graph)\n\nA backward pass has come to an operator of the scopes that uses the leaf."},
    {"marks", accumulation_marks, METH_NOARGS, "marks()\n\nIts entries in its leaf's marks, by scope."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef accumulation_properties[] = {
    {"scopes", accumulation_get<Leaf::SCOPES>, nullptr, nullptr, nullptr},
    {"backward_id", accumulation_get<Leaf::BACKWARD_ID>, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject make_type(const char* name, size_t size, destructor dealloc) {
  PyTypeObject type = {};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&type), 1);
  type.tp_name = name;
  type.tp_basicsize = static_cast<Py_ssize_t>(size);
  type.tp_flags = Py_TPFLAGS_DEFAULT;
  type.tp_dealloc = dealloc;
  return type;
}

PyTypeObject Accumulation_Type =
    make_type("amanda_torch_accel.gate.Accumulation", sizeof(Accumulation), accumulation_dealloc);

// ---- the nodes of an operator --------------------------------------------------------------------------------

enum NodeKind { PLAIN, ACCUMULATION, FUNCTION, UNCERTAIN };

// By class: an accumulation; a function of the program's own, whose classes are Python's; one that may be a node of
// amanda-torch's (KINDS of amanda_torch.autograd.nodes).
NodeKind kind_of(const NodePointer& node, Ref& cls) {
  static std::unordered_map<std::type_index, NodeKind> kinds;
  const Node& target = *node;
  auto key = std::type_index(typeid(target));
  auto found = kinds.find(key);
  if (found == kinds.end()) {
    Ref object(torch::autograd::functionToPyObject(node));
    bool is_function = object && PyObject_TypeCheck(object.get(), reinterpret_cast<PyTypeObject*>(objects.function));
    NodeKind kind = dynamic_cast<const AccumulateGrad*>(node.get()) != nullptr ? ACCUMULATION
                    : is_function                                              ? FUNCTION
                    : node->name() == "AliasBackward0"                         ? UNCERTAIN
                                                                               : PLAIN;
    found = kinds.emplace(key, kind).first;
  }
  if (found->second != FUNCTION) {
    return found->second;
  }
  Ref object(torch::autograd::functionToPyObject(node));
  auto* type = object ? reinterpret_cast<PyObject*>(Py_TYPE(object.get())) : nullptr;
  int is_own = type != nullptr ? PySet_Contains(objects.own_nodes, type) : -1;
  // A program may define its function anew in each iteration. All references to a class are one object.
  cls = Ref(is_own == 0 ? PyWeakref_NewRef(type, nullptr) : nullptr);
  PyErr_Clear();
  return cls ? FUNCTION : UNCERTAIN;
}

// Where edges lead that lead to no node of the operator; below LEAF the accumulations of leaves.
constexpr int NOWHERE = -1, OUTSIDE = -2, LEAF = -3;

// The nodes that an operator has made, those of its outputs first, and the leaves that they feed.
struct Trace {
  std::vector<const NodePointer*> nodes, leaves;
  std::vector<std::type_index> types;
  std::vector<Ref> classes;  // weak references to those of functions of the program's own, one after the other
  std::vector<int> edges;    // for each node their number, and where they lead
  std::vector<NodePointer> roots;
  size_t entries = 0;

  int place(const std::vector<const NodePointer*>& among, const NodePointer& node) const {
    for (size_t i = among.size(); i > 0; i--) {
      if (among[i - 1]->get() == node.get()) {
        return static_cast<int>(i - 1);
      }
    }
    return -1;
  }

  // Whether the node was added, or need not be; false where Python is to look.
  bool add(const NodePointer& node) {
    Ref cls;
    NodeKind kind = kind_of(node, cls);
    if (kind == UNCERTAIN || kind == ACCUMULATION) {
      return false;
    }
    if (kind == FUNCTION) {
      classes.push_back(std::move(cls));
    }
    const Node& target = *node;
    types.emplace_back(typeid(target));
    nodes.push_back(&node);
    return true;
  }

  bool add_root(const at::Tensor& tensor, uint64_t start) {
    if (!tensor.requires_grad()) {
      return true;
    }
    if (tensor.is_view()) {
      const at::TensorBase& base = tensor._base();
      if (base.requires_grad() && base.grad_fn() && base.grad_fn()->sequence_nr() >= start) {
        return false;
      }
    }
    const auto& node = tensor.grad_fn();
    if (!node || std::find(roots.begin(), roots.end(), node) != roots.end()) {
      return true;
    }
    Ref cls;
    if (kind_of(node, cls) == UNCERTAIN) {
      return false;
    }
    if (node->sequence_nr() >= start) {
      roots.push_back(node);
    }
    return true;
  }

  bool follow(uint64_t start) {
    for (const NodePointer& root : roots) {
      if (!add(root)) {
        return false;
      }
    }
    entries = nodes.size();
    for (size_t i = 0; i < nodes.size(); i++) {
      const auto& targets = (*nodes[i])->next_edges();
      edges.push_back(static_cast<int>(targets.size()));
      for (const Edge& edge : targets) {
        if (!edge.function) {
          edges.push_back(NOWHERE);
          continue;
        }
        Ref cls;
        NodeKind kind = kind_of(edge.function, cls);
        if (kind == UNCERTAIN) {
          return false;
        }
        if (kind == ACCUMULATION) {
          int number = place(leaves, edge.function);
          if (number < 0) {
            number = static_cast<int>(leaves.size());
            leaves.push_back(&edge.function);
          }
          edges.push_back(LEAF - number);
          continue;
        }
        int number = place(nodes, edge.function);
        if (number < 0 && edge.function->sequence_nr() >= start) {
          number = static_cast<int>(nodes.size());
          if (!add(edge.function)) {
            return false;
          }
        }
        edges.push_back(number < 0 ? OUTSIDE : number);
      }
    }
    return true;
  }

  bool is_like(const Trace& other) const {
    return entries == other.entries && types == other.types && edges == other.edges &&
           std::equal(classes.begin(), classes.end(), other.classes.begin(), other.classes.end(),
                      [](const Ref& one, const Ref& two) { return one.get() == two.get(); });
  }
};

// Find the nodes behind a result; false where Python is to look.
bool trace(Trace& found, PyObject* result, int64_t start) {
  auto first = static_cast<uint64_t>(start);
  if (is_tensor(result)) {
    return found.add_root(THPVariable_Unpack(result), first) && found.follow(first);
  }
  if (!PyTuple_Check(result) && !PyList_CheckExact(result)) {
    return result == Py_None || PyBool_Check(result) || PyLong_CheckExact(result) || PyFloat_CheckExact(result);
  }
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(result); i++) {
    PyObject* item = PySequence_Fast_GET_ITEM(result, i);
    if (is_tensor(item) ? !found.add_root(THPVariable_Unpack(item), first)
                        : !(item == Py_None || PyLong_Check(item) || PyFloat_CheckExact(item))) {
      return false;
    }
  }
  return found.follow(first);
}

// ---- what is known of an operator's nodes --------------------------------------------------------------------

// A leaf that an operator uses: the owner of its accumulation, and, if it is the operator, what is done there.
struct KnownLeaf {
  Ref owner;  // a weak reference to the leaf, see LeafClaimer
  bool is_own;
  std::shared_ptr<Hooks> hooks;  // nullptr for nothing
  Ref backward_id;
};

struct Graph {
  Trace form;
  std::vector<std::shared_ptr<Hooks>> hooks;  // of each node; nullptr for nothing
  std::vector<KnownLeaf> leaves;
  Ref claimer, owners, known, scopes;
};

// The gradient graph of an operator in one form, of which nothing is to be found out any more.
struct Claims {
  PyObject_HEAD
  Graph* graph;
};

void claims_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  delete reinterpret_cast<Claims*>(self)->graph;
  Py_TYPE(self)->tp_free(self);
}

int claims_traverse(PyObject* self, visitproc visit, void* arg) {
  if (const Graph* graph = reinterpret_cast<Claims*>(self)->graph) {
    Py_VISIT(graph->claimer.get());
    Py_VISIT(graph->owners.get());
    Py_VISIT(graph->known.get());
  }
  return 0;
}

int claims_clear(PyObject* self) {
  if (Graph* graph = reinterpret_cast<Claims*>(self)->graph) {
    graph->claimer = Ref();
    graph->owners = Ref();
    graph->known = Ref();
  }
  return 0;
}

PyTypeObject make_claims_type() {
  PyTypeObject type = make_type("amanda_torch_accel.gate.Claims", sizeof(Claims), claims_dealloc);
  type.tp_flags |= Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  type.tp_traverse = claims_traverse;
  type.tp_clear = claims_clear;
  return type;
}

PyTypeObject Claims_Type = make_claims_type();

// Find the leaf whose hooks an accumulation has; false if there are several.
bool hooked_leaf(Node& node, std::shared_ptr<Leaf>& found) {
  auto note = [&found](const std::shared_ptr<Leaf>& leaf) {
    bool is_first = found == nullptr;
    found = is_first ? leaf : found;
    return is_first || leaf == nullptr || leaf == found;
  };
  for (const auto& hook : node.pre_hooks()) {
    if (auto* before = dynamic_cast<Before*>(hook.get()); before != nullptr && !note(before->leaf())) {
      return false;
    }
  }
  for (const auto& hook : node.post_hooks()) {
    if (auto* after = dynamic_cast<After*>(hook.get()); after != nullptr && !note(after->leaf())) {
      return false;
    }
  }
  return true;
}

// What is to be done for one leaf of an execution.
struct LeafClaim {
  std::shared_ptr<Leaf> leaf;  // that acts in the passes which come to the operator; nullptr for none
  bool is_fresh = false;       // its accumulation begins to belong to the operator
};

// Whether the owner of a leaf has run in this iteration, and nothing is to be done at the leaf.
bool is_idle(PyObject* owner, PyObject* iterations, PyObject* iteration) {
  Ref idle(PyObject_GetAttr(owner, names.is_idle)), op_id(idle ? PyObject_GetAttr(owner, names.op_id) : nullptr);
  PyObject* ran = op_id && idle.get() == Py_True ? PyDict_GetItemWithError(iterations, op_id.get()) : nullptr;
  bool is_same = ran != nullptr && PyLong_CheckExact(ran) && PyObject_RichCompareBool(ran, iteration, Py_EQ) == 1;
  PyErr_Clear();
  return is_same;
}

// Find out what is to be done for a leaf; false where Python is to do it.
bool find_leaf(const Graph& graph, const KnownLeaf& known, const NodePointer& node, const Known* op, PyObject* iteration,
               LeafClaim& found) {
  if (!hooked_leaf(*node, found.leaf)) {
    return false;
  }
  if (found.leaf != nullptr) {
    // Of an operator that ran before, as of all but the first calls in a loop.
    int is_same = PyObject_RichCompareBool(found.leaf->held.objects[Leaf::SCOPES], graph.scopes.get(), Py_EQ);
    PyErr_Clear();
    return is_same > 0;
  }
  const at::Tensor& variable = static_cast<AccumulateGrad*>(node.get())->variable;
  Ref leaf(THPVariable_Wrap(variable));
  Ref key(leaf ? PyLong_FromVoidPtr(leaf.get()) : nullptr);
  if (!key || PyDict_GetItemWithError(graph.owners.get(), key.get()) != known.owner.get() || known.owner.get() == nullptr) {
    PyErr_Clear();
    return false;
  }
  if (!known.is_own) {
    return is_idle(known.owner.get(), op->iterations, iteration);
  }
  if (known.hooks != nullptr) {
    found.leaf = std::make_shared<Leaf>();
    PyObject* given[Leaf::COUNT] = {graph.claimer.get(), graph.known.get(), known.backward_id.get(), graph.scopes.get(),
                                    Py_None};
    for (int i = 0; i < Leaf::COUNT; i++) {
      found.leaf->held.objects[i] = Py_NewRef(given[i]);
    }
    found.leaf->set_hooks(known.hooks);
    found.is_fresh = true;
  }
  return true;
}

// Hook the nodes of an execution that has the form of a graph: 1, or 0 where Python is to do it.
int claim_graph(const Graph& graph, const Trace& found, const Known* op, PyObject* iteration) {
  std::vector<LeafClaim> leaves(found.leaves.size());
  for (size_t i = 0; i < leaves.size(); i++) {
    if (!find_leaf(graph, graph.leaves[i], *found.leaves[i], op, iteration, leaves[i])) {
      return 0;
    }
  }
  std::vector<std::shared_ptr<Leaf>> reached;
  for (size_t i = 0; i < leaves.size(); i++) {
    if (leaves[i].is_fresh) {
      const Hooks& hooks = *graph.leaves[i].hooks;
      hook(**found.leaves[i], leaves[i].leaf, hooks.has_before, hooks.has_after);
    }
    if (leaves[i].leaf && std::find(reached.begin(), reached.end(), leaves[i].leaf) == reached.end()) {
      reached.push_back(leaves[i].leaf);
    }
  }
  for (size_t i = 0; i < found.nodes.size(); i++) {
    if (i < found.entries && !reached.empty()) {
      (*found.nodes[i])->add_pre_hook(std::make_unique<Reached>(reached));
    }
    if (graph.hooks[i] != nullptr) {
      hook(**found.nodes[i], graph.hooks[i]);
    }
  }
  return 1;
}

int claim_known(Tracker* mode, Known* known, PyObject* result, int64_t start) {
  PyObject* state = mode->thread;
  PyObject* cache = state != nullptr && PyDict_CheckExact(state) ? PyDict_GetItemWithError(state, names.cache) : nullptr;
  if (cache != Py_True || known->iterations == nullptr || known->op_id == nullptr || mode->iteration == nullptr ||
      known->gradients == nullptr || !PyDict_CheckExact(known->iterations)) {
    return PyErr_Occurred() ? -1 : 0;
  }
  int is_plain = is_plain_here(false);
  Trace found;
  if (is_plain <= 0 || !trace(found, result, start)) {
    return is_plain < 0 ? -1 : 0;
  }
  Ref iteration = Ref::to(mode->iteration);
  int done = found.nodes.empty();
  if (!done) {
    Ref natives(PyObject_GetAttr(known->gradients, names.natives));
    if (!natives || !PyTuple_CheckExact(natives.get())) {
      return natives ? 0 : -1;
    }
    for (Py_ssize_t i = 0; done == 0 && i < PyTuple_GET_SIZE(natives.get()); i++) {
      PyObject* one = PyTuple_GET_ITEM(natives.get(), i);
      const Graph* graph = Py_IS_TYPE(one, &Claims_Type) ? reinterpret_cast<Claims*>(one)->graph : nullptr;
      if (graph != nullptr && graph->form.is_like(found)) {
        done = claim_graph(*graph, found, known, iteration.get());
      }
    }
  }
  if (done > 0 && PyDict_SetItem(known->iterations, known->op_id, iteration.get()) < 0) {
    return -1;
  }
  return done;
}

// ---- functions of Python's -----------------------------------------------------------------------------------

// The node that an object stands for; nullptr for that of a function of the program's own.
NodePointer node_of(PyObject* object) {
  bool is_found = torch::autograd::THPCppFunction_Check(object);
  return is_found ? reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata : NodePointer();
}

PyObject* gate_claim(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !is_a(given[0], &Tracker_Type) || !is_a(given[1], &Known_Type)) {
    PyErr_SetString(PyExc_TypeError, "claim() takes a Tracker, a Known, a result and a number");
    return nullptr;
  }
  long long start = PyLong_AsLongLong(given[3]);
  int done = PyErr_Occurred()
                 ? -1
                 : claim(reinterpret_cast<Tracker*>(given[0]), reinterpret_cast<Known*>(given[1]), given[2], start);
  return done < 0 ? nullptr : PyBool_FromLong(done);
}

PyObject* gate_forget(PyObject*, PyObject*) {
  plans++;
  // Not in place: what is released may run code that comes here again.
  auto old = std::exchange(known_steps, {});
  Py_RETURN_NONE;
}

PyObject* gate_register(PyObject*, PyObject* args) {
  PyObject *hooks, *node;
  if (!PyArg_ParseTuple(args, "OO", &hooks, &node)) {
    return nullptr;
  }
  return guarded(
      [&]() -> PyObject* {
        NodePointer found = node_of(node);
        auto made = found ? Hooks::of(hooks) : nullptr;
        if (made != nullptr) {
          hook(*found, made);
        }
        return PyErr_Occurred() ? nullptr : PyBool_FromLong(made != nullptr);
      },
      nullptr);
}

PyObject* gate_mark(PyObject*, PyObject* node) {
  return guarded(
      [&]() -> PyObject* {
        NodePointer found = node_of(node);
        std::shared_ptr<Leaf> leaf;
        if (!found || !hooked_leaf(*found, leaf) || leaf == nullptr) {
          Py_RETURN_NONE;
        }
        PyObject* mark = Accumulation_Type.tp_alloc(&Accumulation_Type, 0);
        if (mark != nullptr) {
          new (&reinterpret_cast<Accumulation*>(mark)->leaf) std::shared_ptr<Leaf>(leaf);
        }
        return mark;
      },
      nullptr);
}

PyObject* gate_register_leaf(PyObject*, PyObject* args) {
  PyObject *accumulation, *node;
  int before, after;
  if (!PyArg_ParseTuple(args, "O!Opp", &Accumulation_Type, &accumulation, &node, &before, &after)) {
    return nullptr;
  }
  return guarded(
      [&]() -> PyObject* {
        NodePointer found = node_of(node);
        if (!found) {
          PyErr_Format(PyExc_TypeError, "%R is no accumulation", node);
          return nullptr;
        }
        hook(*found, reinterpret_cast<Accumulation*>(accumulation)->leaf, before, after);
        return Py_NewRef(Py_None);
      },
      nullptr);
}

PyDoc_STRVAR(learn_doc,
             "learn(result, start, nodes, leaves, claimer, owners, gradients, scopes)\n\nWhat claim() needs of a graph of "
             "which everything is known.\n\n"
             "Args:\n    result, start: of an execution that has this graph.\n"
             "    nodes: by the node, its NodeHooks.\n"
             "    leaves: by the accumulation of a leaf, its owner, and its NodeHooks if the operator is that, otherwise "
             "None.\n    claimer, owners, gradients, scopes: the LeafClaimer, its leaf_owners, the KnownGradients, and the "
             "scopes of the operator.\n\n"
             "Returns:\n    A tuple's item for KnownGradients.natives; None where nodes are not as C++ finds them.");

int learn_node(Graph& graph, const NodePointer& node, PyObject* nodes) {
  Ref object(torch::autograd::functionToPyObject(node));
  PyObject* hooks = object ? PyDict_GetItemWithError(nodes, object.get()) : nullptr;
  Ref idle(hooks != nullptr ? PyObject_GetAttr(hooks, names.is_idle) : nullptr);
  if (!idle) {
    return PyErr_Occurred() ? -1 : 0;
  }
  graph.hooks.push_back(idle.get() == Py_True ? nullptr : Hooks::of(hooks));
  return PyErr_Occurred() ? -1 : 1;
}

int learn_leaf(Graph& graph, const NodePointer& node, PyObject* leaves) {
  Ref object(torch::autograd::functionToPyObject(node));
  PyObject* found = object ? PyDict_GetItemWithError(leaves, object.get()) : nullptr;
  if (found == nullptr || !PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 3) {
    return PyErr_Occurred() ? -1 : 0;
  }
  PyObject* hooks = PyTuple_GET_ITEM(found, 1);
  bool is_own = hooks != Py_None;
  Ref idle(is_own ? PyObject_GetAttr(hooks, names.is_idle) : Py_NewRef(Py_True));
  if (!idle) {
    return -1;
  }
  graph.leaves.push_back({Ref::to(PyTuple_GET_ITEM(found, 0)), is_own,
                          idle.get() == Py_True ? nullptr : Hooks::of(hooks), Ref::to(PyTuple_GET_ITEM(found, 2))});
  return PyErr_Occurred() ? -1 : 1;
}

// Complete a graph: 1, 0 where nodes are not as C++ finds them, -1 with an error.
int learn_all(Graph& graph, PyObject* nodes, PyObject* leaves) {
  for (const NodePointer* node : graph.form.nodes) {
    if (int done = learn_node(graph, *node, nodes); done <= 0) {
      return done;
    }
  }
  for (const NodePointer* node : graph.form.leaves) {
    if (int done = learn_leaf(graph, *node, leaves); done <= 0) {
      return done;
    }
  }
  // They hold nothing of this execution.
  graph.form.nodes.clear();
  graph.form.leaves.clear();
  graph.form.roots.clear();
  return 1;
}

PyObject* gate_learn(PyObject*, PyObject* args) {
  PyObject *result, *nodes, *leaves, *claimer, *owners, *known, *scopes;
  long long start;
  if (!PyArg_ParseTuple(args, "OLO!O!OO!OO", &result, &start, &PyDict_Type, &nodes, &PyDict_Type, &leaves, &claimer,
                        &PyDict_Type, &owners, &known, &scopes)) {
    return nullptr;
  }
  return guarded(
      [&]() -> PyObject* {
        auto graph = std::make_unique<Graph>();
        int done = trace(graph->form, result, start) ? learn_all(*graph, nodes, leaves) : 0;
        if (done <= 0) {
          return done < 0 ? nullptr : Py_NewRef(Py_None);
        }
        graph->claimer = Ref::to(claimer);
        graph->owners = Ref::to(owners);
        graph->known = Ref::to(known);
        graph->scopes = Ref::to(scopes);
        Claims* made = PyObject_GC_New(Claims, &Claims_Type);
        if (made == nullptr) {
          return nullptr;
        }
        made->graph = graph.release();
        PyObject_GC_Track(made);
        return reinterpret_cast<PyObject*>(made);
      },
      nullptr);
}

PyMethodDef functions[] = {
    {"claim", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(gate_claim)), METH_FASTCALL,
     "claim(mode, known, result, start)\n\nHook the backward operators of an operator that has run; False where Python is "
     "to do it."},
    {"forget", gate_forget, METH_NOARGS, "forget()\n\nThe routines of all backward operators are out of date."},
    {"learn", gate_learn, METH_VARARGS, learn_doc},
    {"mark", gate_mark, METH_O, "mark(node)\n\nThe Accumulation that has hooked a leaf's accumulation; None without one."},
    {"register", gate_register, METH_VARARGS, "register(hooks, node)\n\nHook a node, as NodeHooks.register() does; False for that of a function of the "
     "program's own."},
    {"register_leaf", gate_register_leaf, METH_VARARGS,
     "register_leaf(accumulation, node, before, after)\n\nHook the accumulation of a leaf at one or both of its ends."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int claim(Tracker* mode, Known* known, PyObject* result, int64_t start) {
  return guarded([&] { return claim_known(mode, known, result, start); }, -1);
}

int prepare_autograd(PyObject* module) {
  Accumulation_Type.tp_new = accumulation_new;
  Accumulation_Type.tp_methods = accumulation_methods;
  Accumulation_Type.tp_getset = accumulation_properties;
  Ref idle(Py_NewRef(Py_False));
  if (PyType_Ready(&Claims_Type) < 0 || PyType_Ready(&Accumulation_Type) < 0 ||
      PyDict_SetItem(Accumulation_Type.tp_dict, names.is_idle, idle.get()) < 0) {
    return -1;
  }
  return PyModule_AddType(module, &Accumulation_Type) < 0 ? -1 : PyModule_AddFunctions(module, functions);
}

}  // namespace accel
