// Backward operators: the nodes that an operator has made are found and hooked, and their steps are run.
//
// The first executions of an operator are Python's (amanda_torch.autograd.claims), which finds out what there is to be
// done. Once no analysis is pending it says so by learn(): from then on claim() compares the nodes of an execution with
// those that are known, and hooks them.

#include "accel.h"
#include "torch_api.h"

#include <c10/util/SmallVector.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_anomaly_mode.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <typeindex>
#include <unordered_map>

namespace accel {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::FunctionPostHook;
using torch::autograd::FunctionPreHook;
using torch::autograd::Node;
using torch::autograd::PyAnomalyMetadata;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using Gil = pybind11::gil_scoped_acquire;
using NodePointer = decltype(Edge::function);

namespace {

// Counts up where what is known of routines is out of date, see forget().
unsigned long plans;

// A strong reference, given to C++ that may release it without the GIL.
c10::SafePyObject hold(PyObject* object) { return {Py_NewRef(object), getPyInterpreter()}; }
PyObject* held(const c10::SafePyObject& object) { return object.ptr(getPyInterpreter()); }

void check(bool is_good) {
  if (!is_good) {
    python_error error;
    error.persist();
    throw error;  // NOLINT: it has been persisted
  }
}

// ---- hooks of backward operators -----------------------------------------------------------------------------

void release_anywhere(const Lowered* lowered) {
  if (Py_IsInitialized()) {
    Gil gil;
    delete lowered;
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
  static std::shared_ptr<Hooks> of(PyObject* hooks) {
    Ref dispatcher(PyObject_GetAttr(hooks, names.dispatcher)), before(PyObject_GetAttr(hooks, names.has_before));
    Ref after(PyObject_GetAttr(hooks, names.has_after));
    check(dispatcher && before && after);
    return std::make_shared<Hooks>(hooks, dispatcher.get(), before.get() == Py_True, after.get() == Py_True);
  }

  Hooks(PyObject* hooks, PyObject* dispatcher, bool before, bool after)
      : has_before(before), has_after(after), hooks_(hold(hooks)), dispatcher_(hold(dispatcher)) {}

  PyObject* python() const { return held(hooks_); }

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

  // 1 if backward operators of this thread may take steps that are known, else 0; -1 with an error.
  int is_plain_thread() const {
    Ref state = thread_state(), quiet(state ? PyObject_GetAttr(held(dispatcher_), names.quiet) : nullptr);
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

  const bool has_before, has_after;

 private:
  c10::SafePyObject hooks_, dispatcher_;
  std::weak_ptr<const Lowered> steps_;
  unsigned long generation_ = 0;
};

Ref tuple_of(const variable_list& tensors) {
  return make_tuple(static_cast<Py_ssize_t>(tensors.size()), [&tensors](Py_ssize_t i) {
    const at::Tensor& one = tensors[static_cast<size_t>(i)];
    return one.defined() ? THPVariable_Wrap(one) : Py_NewRef(Py_None);
  });
}

// The gradients that a hook in Python has returned instead of others.
variable_list gradients_of(PyObject* tuple, size_t count) {
  if (!PyTuple_Check(tuple) || static_cast<size_t>(PyTuple_GET_SIZE(tuple)) != count) {
    PyErr_SetString(PyExc_RuntimeError, "a hook has returned another number of gradients");
    check(false);
  }
  variable_list found(count);
  for (size_t i = 0; i < count; i++) {
    PyObject* one = PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i));
    if (THPVariable_Check(one)) {
      found[i] = THPVariable_Unpack(one);
    } else if (one != Py_None) {
      PyErr_Format(PyExc_TypeError, "a hook has returned %R instead of a gradient", one);
      check(false);
    }
  }
  return found;
}

bool nothing_flows(const variable_list& gradients) {
  return !gradients.empty() &&
         std::none_of(gradients.begin(), gradients.end(), [](const at::Tensor& one) { return one.defined(); });
}

// ---- accumulations of leaves ---------------------------------------------------------------------------------

// The hooks of one scope on a leaf's accumulation: Accumulation of amanda_torch.autograd.leaves.
class Leaf {
 public:
  explicit Leaf(PyObject* find) : find_(hold(find)) {}
  explicit Leaf(std::shared_ptr<Hooks> hooks) : hooks_(std::move(hooks)) {}

  // A backward pass has come to an operator of the scope that uses the leaf.
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

  // What is done there, found out where the first pass comes to it.
  std::shared_ptr<Hooks> hooks() {
    if (hooks_ == nullptr) {
      // Another thread may do the same meanwhile, and release it.
      Ref find = Ref::to(held(*find_)), made(PyObject_CallNoArgs(find.get()));
      check(static_cast<bool>(made));
      hooks_ = Hooks::of(made.get());
      // The leaf may outlive the model.
      find_.reset();
    }
    return hooks_;
  }

 private:
  std::optional<c10::SafePyObject> find_;
  std::mutex mutex_;
  std::vector<int> passes_;
  bool always_ = false;
  std::shared_ptr<Hooks> hooks_;
};

// ---- what autograd calls -------------------------------------------------------------------------------------

// One node in one graph. Of an accumulation there is a leaf instead of the hooks.
struct Hooked {
  Hooked(std::shared_ptr<Hooks> of_node, std::shared_ptr<Leaf> of_leaf)
      : hooks(std::move(of_node)), leaf(std::move(of_leaf)) {}

  std::shared_ptr<Hooks> hooks;
  std::shared_ptr<Leaf> leaf;
  // Of the execution that runs: the steps that have begun, and in which pass; those of others at once are Python's.
  std::weak_ptr<const Lowered> begun;
  int task = -1;
  int64_t moment = 0;

  // True if there is anything to do in the current pass; the GIL is not held.
  bool acts() const { return leaf == nullptr || leaf->acts_in(current_task()); }

  std::shared_ptr<Hooks> found() const { return leaf != nullptr ? leaf->hooks() : hooks; }

  // Call the hook of Python's; the gradients that it returns, or those that it is given.
  variable_list call(const variable_list& gradients, const variable_list* consumed = nullptr) const {
    Ref given = tuple_of(gradients), others(given && consumed != nullptr ? tuple_of(*consumed) : Ref());
    check(given && (others || consumed == nullptr));
    Ref result(PyObject_CallFunctionObjArgs(found()->python(), given.get(), others.get(), nullptr));
    check(static_cast<bool>(result));
    return result.get() == Py_None ? gradients : gradients_of(result.get(), gradients.size());
  }
};

// The steps of a node, where they are known.
std::shared_ptr<const Lowered> known_now(Hooks& hooks) {
  auto steps = hooks.is_plain_thread() > 0 ? hooks.steps() : nullptr;
  check(!PyErr_Occurred());
  return steps;
}

// A hook before or after a node.
template <typename Base>
class NodeHook : public Base {
 public:
  explicit NodeHook(std::shared_ptr<Hooked> node) : node_(std::move(node)) {}

  void compiled_args(CompiledNodeArgs& args) const override {
    Gil gil;
    if (!node_->acts()) {
      return;
    }
    // It calls hooks of Python's in code of its own.
    if constexpr (std::is_same_v<Base, FunctionPreHook>) {
      args.add_pre_hook(hold(node_->found()->python()));
    } else {
      args.add_post_hook(hold(node_->found()->python()));
    }
  }

 protected:
  std::shared_ptr<Hooked> node_;
};

class Before : public NodeHook<FunctionPreHook> {
 public:
  using NodeHook::NodeHook;

  variable_list operator()(const variable_list& gradients) override {
    if (nothing_flows(gradients) || !node_->acts()) {
      return gradients;
    }
    Gil gil;
    auto hooks = node_->found();
    if (!hooks->has_before) {
      return gradients;
    }
    auto steps = known_now(*hooks);
    if (steps != nullptr && steps->is_joined && steps->before.empty()) {
      return gradients;
    }
    if (steps == nullptr || steps->way != Way::MEASURED || !node_->begun.expired()) {
      return node_->call(gradients);
    }
    if (hooks->has_after) {
      node_->task = current_task();
      node_->begun = steps;
    }
    check(begin_measures(*steps, node_->moment) == 0);
    return gradients;
  }
};

// Run steps that are given the gradients on both sides of a node; false where Python is to do it.
bool run_joined(const Lowered& steps, const variable_list& produced, const variable_list& consumed) {
  int is_plain = is_only_driver() ? is_plain_here(true) : 0;
  Ref outputs = tuple_of(produced), inputs = tuple_of(consumed), state = thread_state(), returned;
  check(is_plain >= 0 && outputs && inputs && state);
  Values values;
  for (size_t i = 0; is_plain && i < produced.size(); i++) {
    is_plain = values.append(PyTuple_GET_ITEM(outputs.get(), static_cast<Py_ssize_t>(i)));
  }
  check(!is_plain || call_steps(names.after, steps.after, values, inputs.get(), state.get(), returned) >= 0);
  return is_plain;
}

class After : public NodeHook<FunctionPostHook> {
 public:
  using NodeHook::NodeHook;

  variable_list operator()(const variable_list& produced, const variable_list& consumed) override {
    if (nothing_flows(consumed) || !node_->acts()) {
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
    auto steps = known_now(*hooks);
    if (steps != nullptr && steps->is_joined && run_joined(*steps, produced, consumed)) {
      return produced;
    }
    if (steps == nullptr || steps->way != Way::MEASURED || (begun != steps && !steps->before.empty())) {
      return node_->call(produced, &consumed);
    }
    check(end_measures(*steps, node_->moment) == 0);
    return produced;
  }
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

// Hook a node, or the accumulation of a leaf, at one or both of its ends. Hooks know at which.
void hook(Node& node, std::shared_ptr<Hooks> hooks, std::shared_ptr<Leaf> leaf, bool before = false,
          bool after = false) {
  before = hooks ? hooks->has_before : before;
  after = hooks ? hooks->has_after : after;
  auto hooked = std::make_shared<Hooked>(std::move(hooks), std::move(leaf));
  if (before) {
    node.add_pre_hook(std::make_unique<Before>(hooked));
  }
  if (after) {
    node.add_post_hook(std::make_unique<After>(hooked));
  }
}

// ---- objects of Python's -------------------------------------------------------------------------------------

struct Accumulation {
  PyObject_HEAD
  std::shared_ptr<Leaf> leaf;
};

void accumulation_dealloc(PyObject* self) {
  std::destroy_at(&reinterpret_cast<Accumulation*>(self)->leaf);
  Py_TYPE(self)->tp_free(self);
}

PyTypeObject Accumulation_Type =
    make_type("amanda_torch_accel.gate.Accumulation", sizeof(Accumulation), accumulation_dealloc);

PyObject* make_accumulation(std::shared_ptr<Leaf> leaf) {
  PyObject* self = Accumulation_Type.tp_alloc(&Accumulation_Type, 0);
  if (self != nullptr) {
    new (&reinterpret_cast<Accumulation*>(self)->leaf) std::shared_ptr<Leaf>(std::move(leaf));
  }
  return self;
}

PyObject* accumulation_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject* find;
  if (!PyArg_ParseTuple(args, "O", &find)) {
    return nullptr;
  }
  return guarded([&] { return make_accumulation(std::make_shared<Leaf>(find)); }, nullptr);
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

// Hook the node that an object stands for: True; False for that of a function of the program's own.
//   hooks: of a node, NodeHooks; nullptr for the accumulation of a leaf, which is hooked before or after it.
PyObject* hook_object(PyObject* object, PyObject* hooks, const std::shared_ptr<Leaf>& leaf, bool before, bool after) {
  auto act = [&]() -> PyObject* {
    if (!torch::autograd::THPCppFunction_Check(object)) {
      return Py_NewRef(Py_False);
    }
    auto made = hooks != nullptr ? Hooks::of(hooks) : nullptr;
    hook(*reinterpret_cast<torch::autograd::THPCppFunction*>(object)->cdata, made, leaf, before, after);
    return Py_NewRef(Py_True);
  };
  return guarded(act, nullptr);
}

PyObject* accumulation_register(PyObject* self, PyObject* args) {
  PyObject* node;
  int before, after;
  if (!PyArg_ParseTuple(args, "Opp", &node, &before, &after)) {
    return nullptr;
  }
  return hook_object(node, nullptr, reinterpret_cast<Accumulation*>(self)->leaf, before, after);
}

PyMethodDef accumulation_methods[] = {
    {"note_pass", accumulation_note_pass, METH_VARARGS, nullptr},
    {"register", accumulation_register, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// ---- the nodes of an operator --------------------------------------------------------------------------------

// Keys in the metadata of nodes: of a leaf's accumulation, see amanda_torch.autograd.leaves, and of an alias that
// amanda-torch has made.
PyObject *mark, *alias_mark;

PyObject* metadata_of(Node& node) { return static_cast<PyAnomalyMetadata*>(node.metadata())->dict(); }

enum NodeKind { PLAIN, ACCUMULATION, FUNCTION, UNCERTAIN };

// By class: an accumulation; a function of the program's own, whose classes are Python's; a node of amanda-torch's, or
// one that may be (KINDS of amanda_torch.autograd.nodes).
NodeKind kind_of(const NodePointer& node, Ref& cls) {
  static std::unordered_map<const std::type_info*, NodeKind> kinds;
  const Node& target = *node;
  const std::type_info* key = &typeid(target);  // a type_index would be hashed by its whole name
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
  if (found->second == UNCERTAIN) {
    return PyDict_Contains(metadata_of(*node), alias_mark) == 0 ? PLAIN : UNCERTAIN;
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
  c10::SmallVector<const NodePointer*, 8> nodes, leaves;
  c10::SmallVector<std::type_index, 8> types;
  std::vector<Ref> classes;        // weak references to those of functions of the program's own, one after the other
  c10::SmallVector<int, 16> edges;  // for each node their number, and where they lead
  c10::SmallVector<NodePointer, 4> roots;
  size_t entries = 0;

  int place(const c10::SmallVectorImpl<const NodePointer*>& among, const NodePointer& node) const {
    for (size_t i = among.size(); i > 0; i--) {
      if (among[i - 1]->get() == node.get()) {
        return static_cast<int>(i - 1);
      }
    }
    return -1;
  }

  // True if the node was added, or need not be; false where Python is to look.
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
    return entries == other.entries && types == other.types && edges == other.edges && classes == other.classes;
  }
};

// Find the nodes behind a result; false where Python is to look.
bool trace(Trace& found, PyObject* result, int64_t start) {
  auto first = static_cast<uint64_t>(start);
  if (is_tensor(result)) {
    return found.add_root(THPVariable_Unpack(result), first) && found.follow(first);
  }
  if (!PyTuple_Check(result) && !PyList_CheckExact(result)) {
    // An operator that returns None may have changed an input, as y[mask] = x does.
    return PyBool_Check(result) || PyLong_CheckExact(result) || PyFloat_CheckExact(result);
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

// A leaf that an operator uses.
struct KnownLeaf {
  Ref owner;    // a weak reference to the leaf, see LeafClaimer
  bool is_own;  // the operator is its owner
  std::vector<std::shared_ptr<Hooks>> hooks;  // then what is done in each scope; empty for nothing
};

// The gradient graph of an operator in one form, of which nothing is to be found out any more.
struct Graph {
  Trace form;
  std::vector<std::shared_ptr<Hooks>> hooks;  // of each node; nullptr for nothing
  std::vector<KnownLeaf> leaves;
  Ref owners, scopes;
};

// Python holds it in a capsule, which the garbage collector does not look into: what it holds leads to none that leads
// to it.
Graph* graph_of(PyObject* capsule) { return static_cast<Graph*>(PyCapsule_GetPointer(capsule, nullptr)); }

// The marks on a leaf's accumulation, by scope (borrowed).
PyObject* marks_of(Node& node) {
  PyObject* metadata = metadata_of(node);
  PyObject* marks = PyDict_GetItemWithError(metadata, mark);
  if (marks == nullptr && !PyErr_Occurred()) {
    Ref none(PyDict_New());
    marks = none ? PyDict_SetDefault(metadata, mark, none.get()) : nullptr;
  }
  check(marks != nullptr && PyDict_Check(marks));
  return marks;
}

bool is_marked(PyObject* marks, PyObject* scopes) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(scopes); i++) {
    int found = PyDict_Contains(marks, PyTuple_GET_ITEM(scopes, i));
    check(found >= 0);
    if (found == 0) {
      return false;
    }
  }
  return true;
}

// True if the owner of a leaf has run in this iteration, and nothing is to be done at the leaf.
bool is_idle(PyObject* owner, PyObject* iterations, PyObject* iteration) {
  Ref idle(PyObject_GetAttr(owner, names.is_idle)), op_id(idle ? PyObject_GetAttr(owner, names.op_id) : nullptr);
  PyObject* ran = op_id && idle.get() == Py_True ? PyDict_GetItemWithError(iterations, op_id.get()) : nullptr;
  bool is_same = ran != nullptr && PyLong_CheckExact(ran) && PyObject_RichCompareBool(ran, iteration, Py_EQ) == 1;
  PyErr_Clear();
  return is_same;
}

// True if nothing acts at an accumulation, and nothing is to be done there: it gets no marks.
bool is_free(const KnownLeaf& known, Node& node) {
  return known.hooks.empty() && node.pre_hooks().empty() && node.post_hooks().empty();
}

// True if it is known here what is to be done at the accumulation of a leaf; otherwise Python does it.
bool is_known(const Graph& graph, const KnownLeaf& known, const NodePointer& node, const Known* op, PyObject* iteration) {
  if (!is_free(known, *node) && is_marked(marks_of(*node), graph.scopes.get())) {
    return true;
  }
  Ref leaf(THPVariable_Wrap(static_cast<AccumulateGrad*>(node.get())->variable));
  Ref key(leaf ? PyLong_FromVoidPtr(leaf.get()) : nullptr);
  check(static_cast<bool>(key));
  bool is_same = PyDict_GetItemWithError(graph.owners.get(), key.get()) == known.owner.get();
  check(!PyErr_Occurred());
  return is_same && (known.is_own || is_idle(known.owner.get(), op->iterations, iteration));
}

// Hook the accumulation of a leaf in the scopes that have not marked it, and find what acts there.
void hook_leaf(const Graph& graph, const KnownLeaf& known, Node& node, std::vector<std::shared_ptr<Leaf>>& reached) {
  if (is_free(known, node)) {
    return;
  }
  PyObject* marks = marks_of(node);
  for (size_t i = 0; i < static_cast<size_t>(PyTuple_GET_SIZE(graph.scopes.get())); i++) {
    PyObject* scope = PyTuple_GET_ITEM(graph.scopes.get(), static_cast<Py_ssize_t>(i));
    PyObject* one = PyDict_GetItemWithError(marks, scope);
    if (one == nullptr && i < known.hooks.size()) {
      auto leaf = std::make_shared<Leaf>(known.hooks[i]);
      Ref made(make_accumulation(leaf));
      check(static_cast<bool>(made));
      hook(node, nullptr, leaf, known.hooks[i]->has_before, known.hooks[i]->has_after);
      // Marked when it is hooked, as LeafClaimer does: another thread relies on it.
      one = PyDict_SetDefault(marks, scope, made.get());
    }
    check(!PyErr_Occurred());
    if (is_a(one, &Accumulation_Type)) {
      const auto& leaf = reinterpret_cast<Accumulation*>(one)->leaf;
      if (std::find(reached.begin(), reached.end(), leaf) == reached.end()) {
        reached.push_back(leaf);
      }
    }
  }
}

// Hook the nodes of an execution that has the form of a graph; false where Python is to do it.
bool claim_graph(const Graph& graph, const Trace& found, const Known* op, PyObject* iteration) {
  for (size_t i = 0; i < found.leaves.size(); i++) {
    if (!is_known(graph, graph.leaves[i], *found.leaves[i], op, iteration)) {
      return false;
    }
  }
  std::vector<std::shared_ptr<Leaf>> reached;
  for (size_t i = 0; i < found.leaves.size(); i++) {
    hook_leaf(graph, graph.leaves[i], **found.leaves[i], reached);
  }
  for (size_t i = 0; i < found.nodes.size(); i++) {
    if (i < found.entries && !reached.empty()) {
      (*found.nodes[i])->add_pre_hook(std::make_unique<Reached>(reached));
    }
    if (const auto& hooks = graph.hooks[i]) {
      hook(**found.nodes[i], hooks, nullptr);
    }
  }
  return true;
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
  bool done = found.nodes.empty();
  if (!done) {
    Ref natives(PyObject_GetAttr(known->gradients, names.natives));
    if (!natives || !PyTuple_CheckExact(natives.get())) {
      return natives ? 0 : -1;
    }
    for (Py_ssize_t i = 0; !done && i < PyTuple_GET_SIZE(natives.get()); i++) {
      PyObject* one = PyTuple_GET_ITEM(natives.get(), i);
      const Graph* graph = graph_of(one);
      check(graph != nullptr);
      done = graph->form.is_like(found) && claim_graph(*graph, found, known, iteration.get());
    }
  }
  if (done && PyDict_SetItem(known->iterations, known->op_id, iteration.get()) < 0) {
    return -1;
  }
  return done;
}

// ---- functions of Python's -----------------------------------------------------------------------------------

PyObject* gate_claim(PyObject*, PyObject* args) {
  PyObject *mode, *known, *result;
  long long start;
  if (!PyArg_ParseTuple(args, "O!O!OL", &Tracker_Type, &mode, &Known_Type, &known, &result, &start)) {
    return nullptr;
  }
  int done = claim(reinterpret_cast<Tracker*>(mode), reinterpret_cast<Known*>(known), result, start);
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
  return hook_object(node, hooks, nullptr, false, false);
}

// What a dict says of a node (borrowed); nullptr for nothing.
PyObject* said_of(const NodePointer& node, PyObject* dict) {
  Ref object(torch::autograd::functionToPyObject(node));
  PyObject* found = object ? PyDict_GetItemWithError(dict, object.get()) : nullptr;
  check(found != nullptr || !PyErr_Occurred());
  return found;
}

// Complete a graph; false where nodes are not as C++ finds them.
bool complete(Graph& graph, PyObject* nodes, PyObject* leaves) {
  for (const NodePointer* node : graph.form.nodes) {
    PyObject* hooks = said_of(*node, nodes);
    if (hooks == nullptr) {
      return false;
    }
    auto made = Hooks::of(hooks);
    graph.hooks.push_back(made->has_before || made->has_after ? made : nullptr);
  }
  for (const NodePointer* node : graph.form.leaves) {
    PyObject* found = said_of(*node, leaves);
    if (found == nullptr || !PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 2) {
      return false;
    }
    PyObject* hooks = PyTuple_GET_ITEM(found, 1);
    KnownLeaf known{Ref::to(PyTuple_GET_ITEM(found, 0)), hooks != Py_None, {}};
    for (Py_ssize_t i = 0; PyList_CheckExact(hooks) && i < PyList_GET_SIZE(hooks); i++) {
      known.hooks.push_back(Hooks::of(PyList_GET_ITEM(hooks, i)));
    }
    graph.leaves.push_back(std::move(known));
  }
  // They hold nothing of this execution.
  graph.form.nodes.clear();
  graph.form.leaves.clear();
  graph.form.roots.clear();
  return true;
}

PyObject* gate_learn(PyObject*, PyObject* args) {
  PyObject *result, *nodes, *leaves, *owners, *scopes;
  long long start;
  if (!PyArg_ParseTuple(args, "OLO!O!O!O!", &result, &start, &PyDict_Type, &nodes, &PyDict_Type, &leaves, &PyDict_Type,
                        &owners, &PyTuple_Type, &scopes)) {
    return nullptr;
  }
  return guarded(
      [&]() -> PyObject* {
        auto graph = std::make_unique<Graph>();
        graph->owners = Ref::to(owners);
        graph->scopes = Ref::to(scopes);
        if (!trace(graph->form, result, start) || !complete(*graph, nodes, leaves)) {
          return Py_NewRef(Py_None);
        }
        PyObject* made = PyCapsule_New(graph.get(), nullptr, [](PyObject* one) { delete graph_of(one); });
        if (made != nullptr) {
          graph.release();
        }
        return made;
      },
      nullptr);
}

PyMethodDef functions[] = {
    {"claim", gate_claim, METH_VARARGS, nullptr},
    {"forget", gate_forget, METH_NOARGS, nullptr},
    {"learn", gate_learn, METH_VARARGS, nullptr},
    {"register", gate_register, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int claim(Tracker* mode, Known* known, PyObject* result, int64_t start) {
  return guarded([&] { return claim_known(mode, known, result, start); }, -1);
}

int prepare_autograd(PyObject* module) {
  mark = PyUnicode_InternFromString("amanda");
  alias_mark = PyUnicode_InternFromString("amanda_alias");
  Accumulation_Type.tp_new = accumulation_new;
  Accumulation_Type.tp_methods = accumulation_methods;
  return mark == nullptr || alias_mark == nullptr || PyModule_AddType(module, &Accumulation_Type) < 0
             ? -1
             : PyModule_AddFunctions(module, functions);
}

}  // namespace accel
