// Replacements of mpi4py's methods. They record blocking calls on common forms of buffers, and pass every other call to
// the wrapper in Python (hooks/mpi/wrappers.py), which is the reference.
//
// This file needs only Python's headers, neither torch's nor MPI's. All of it runs with the GIL. It takes slots from the
// recorder's own list. Rows, sequence numbers and groups are Python objects, so that both recorders can run side by side.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "callsites.h"
#include "progress.h"
#include "slots.h"

namespace {

using namespace commtrace;

// An owned reference.
class Ref {
 public:
  explicit Ref(PyObject* object = nullptr) : object_(object) {}
  Ref(const Ref&) = delete;
  Ref& operator=(const Ref&) = delete;
  ~Ref() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  explicit operator bool() const { return object_ != nullptr; }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

// ---- state of one recording -------------------------------------------------------------------------------------------

constexpr int kMostGroups = 64;  // a power of two
constexpr int kMostCounters = 16;

struct Type {
  PyObject* datatype;
  int64_t size, extent;
};

// The counter of a group's messages with one peer and tag. The group owns it.
struct MessageCounter {
  int32_t peer = -2, tag = 0;
  bool sends = false;
  PyObject* counter = nullptr;
};

// A communicator's group. `row` owns the objects: hooks.mpi.communicators.MpiGroup and some of its attributes.
struct Group {
  PyObject* communicator = nullptr;  // compared with the referent of `ref`, never dereferenced
  PyObject* row = nullptr;
  PyObject *group = nullptr, *ref = nullptr, *collectives = nullptr, *ranks = nullptr;
  unsigned int number = 0;
  long long size = 0;
  int inter = 0;
  std::array<MessageCounter, kMostCounters> counters{};
  int next_counter = 0;
};

// The running recording. Set by start(), and cleared by stop() before the session ends and in a forked child.
struct Current {
  PyObject* rows = nullptr;  // hooks.native.compiled_wrappers.MpiRows; null: not recording
  PyObject* pop = nullptr;         // returns the number of a free slot
  PyObject* graph_task = nullptr;  // returns the number of the running backward pass; null if no library has any
  PyObject* status = nullptr;      // of a finished receive, for the next one that has none; null: make one
  char* records = nullptr;
  bool sites = false;
  uint64_t calls = 0;
  uint64_t lookups = 0;  // lookups in Python that are cached; a call that makes any is a first call
  uint64_t log = 0;      // identifies this recording
  std::array<Group, kMostGroups> groups{};
  SiteCache known_sites;
};

Current state;
const Progress* progress = nullptr;
std::vector<Type> types;
// Borrowed references to objects that are never freed.
PyObject *in_place, *status_type, *byte_type, *any_source_object, *any_tag_object;
long any_source = -1, any_tag = -1;

const Type* type_of(PyObject* datatype) {
  for (const Type& type : types)
    if (type.datatype == datatype) return &type;
  return nullptr;
}

void clear(Group& group) {
  const Ref row(group.row);
  group = {};
}

bool alive(const Group& group, PyObject* communicator) {
  if (group.communicator != communicator || group.ref == nullptr) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* referent = nullptr;
  const int status = PyWeakref_GetRef(group.ref, &referent);
  Py_XDECREF(referent);
  return status == 1 && referent == communicator;
#else
  return PyWeakref_GetObject(group.ref) == communicator;
#endif
}

// The group of a communicator; null if its calls are left to Python's wrapper.
Group* group_of(PyObject* communicator) {
  Group& group = state.groups[(reinterpret_cast<uintptr_t>(communicator) >> 4) & (kMostGroups - 1)];
  if (alive(group, communicator)) return &group;
  state.lookups++;
  Ref row(PyObject_CallMethod(state.rows, "group", "O", communicator));
  Group added;
  if (!row || !PyArg_ParseTuple(row.get(), "OOOOILp", &added.group, &added.ref, &added.collectives, &added.ranks,
                                &added.number, &added.size, &added.inter)) {
    PyErr_Clear();
    return nullptr;
  }
  clear(group);
  group = added;
  group.communicator = communicator;
  group.row = row.release();
  return &group;
}

// The number that a Python call returned; -1 if it raised. Steals the reference.
int64_t number(PyObject* returned) {
  const Ref held(returned);
  return held ? PyLong_AsLongLong(returned) : -1;
}

// The counter of messages to or from a peer (borrowed), or null.
PyObject* counter_of(Group& group, int peer, int tag, bool sends) {
  for (const MessageCounter& known : group.counters)
    if (known.peer == peer && known.tag == tag && known.sends == sends) return known.counter;
  Ref counter(PyObject_CallMethod(group.group, "counter", "iiO", peer, tag, sends ? Py_True : Py_False));
  if (!counter) return nullptr;
  group.counters[group.next_counter++ % kMostCounters] = {peer, tag, sends, counter.get()};
  return counter.get();
}

// ---- call site and phase ----------------------------------------------------------------------------------------------

// Returns a result of a method of MpiRows; -1 if it raises.
int64_t looked_up(PyObject* result) {
  const int64_t value = number(result);
  if (value < 0) PyErr_Clear();
  return value;
}

// Looks up the properties of the frame at this depth.
int64_t classify(int depth) {
  state.lookups++;
  const Ref frame(frame_object(depth));
  return frame ? looked_up(PyObject_CallMethod(state.rows, "classify", "O", frame.get())) : -1;
}

// Looks up the row of a call site, given by the depth of its frame and of its caller's (-1: none), and a purpose.
int64_t site_of(int depth, int caller, uint32_t purpose) {
  state.lookups++;
  const Ref frame(frame_object(depth)), outer(caller < 0 ? Py_NewRef(Py_None) : frame_object(caller));
  if (!frame || !outer) return -1;
  return looked_up(PyObject_CallMethod(state.rows, "site", "OOI", frame.get(), outer.get(), purpose));
}

CallSite find_site(bool deep) { return state.known_sites.find<false>(deep, state.sites, {}, classify, site_of); }

// ---- one method -------------------------------------------------------------------------------------------------------

// What a call's buffer holds: nothing, the payload, the shares of all ranks, or this rank's share (in place: all).
enum class Rule : int { kNothing, kPayload, kShares, kOwnShare };
constexpr int kMostParameters = 8;
constexpr int kMostKinds = 16;

struct Kind {
  uint64_t format = 0;  // of the buffer, or the address of its datatype
  PyObject* op = nullptr;
  uint16_t number = 0;
};

// The replacement of one method. Like a function, it binds to the object that it is looked up on.
struct Method {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* original;
  PyObject* wrapper;     // in Python
  PyObject* method;      // hooks.mpi.methods.Method
  PyObject* parameters;  // their names
  PyObject* dict;
  Rule rule;
  int sent_at, received_at, peer_at, tag_at, op_at, status_at;  // positions of arguments; -1: there is none
  int message, sends;
  int parameter_count;
  uint64_t log;
  int kind_count;
  Kind kinds[kMostKinds];
};

PyObject* call_wrapper(Method* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  return PyObject_Vectorcall(self->wrapper, args, PyVectorcall_NARGS(nargsf), names);
}

// A call of a method, from its arguments to its record. A step that returns false leaves the call to Python's wrapper.
struct Call {
  Method* self;
  PyObject* const* args;  // as Python passes them: the communicator first
  Py_ssize_t count;       // of the positional arguments, without the communicator
  PyObject* names;        // of the keyword arguments
  PyObject* argv[kMostParameters + 1] = {};  // all arguments by position; null: left out
  Group* group = nullptr;
  Record record{};
  bool wildcard = false;        // receives from any source, or with any tag
  PyObject* counter = nullptr;  // gives the sequence number (borrowed); null: not known until the message arrives

  bool receives() const { return self->message && !self->sends; }
  PyObject* argument(int at) const { return at < 0 ? nullptr : argv[at]; }
};

struct Content {
  int64_t nbytes = 0;
  uint64_t format = 0;
};

// A buffer that supports the buffer protocol, is contiguous, and has a short format.
bool content_of_buffer(PyObject* object, Content& content) {
  if (!PyObject_CheckBuffer(object)) return false;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();
    return false;
  }
  content.nbytes = view.len;
  const char* format = view.format == nullptr ? "B" : view.format;
  const size_t length = strlen(format);
  if (length < sizeof(content.format)) {
    content.format = 0;
    memcpy(&content.format, format, length);
  }
  PyBuffer_Release(&view);
  return length < sizeof(content.format) && content.format != 0;
}

bool content_of(PyObject* message, Content& content, int64_t blocks) {
  if (!PyList_CheckExact(message) && !PyTuple_CheckExact(message)) {
    if (!content_of_buffer(message, content)) return false;
    content.nbytes /= blocks;
    return true;
  }
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(message);
  if (size < 2 || size > 3) return false;
  PyObject** items = PySequence_Fast_ITEMS(message);
  const Type* type = type_of(items[size - 1]);
  if (type == nullptr) return false;
  if (size == 3) {
    const int64_t count = PyLong_CheckExact(items[1]) ? PyLong_AsLongLong(items[1]) : -1;
    if (count < 0) return PyErr_Clear(), false;
    content.nbytes = count * type->size;
  } else {
    if (type->extent <= 0 || !content_of_buffer(items[0], content)) return false;
    content.nbytes = content.nbytes / type->extent / blocks * type->size;
  }
  content.format = reinterpret_cast<uint64_t>(type->datatype);
  return true;
}

// The buffer that shows payload and element type; null if there is none.
PyObject* measured_buffer(const Call& call) {
  const Method& self = *call.self;
  PyObject* sent = call.argument(self.sent_at);
  const bool received = self.sent_at < 0 || self.rule == Rule::kOwnShare || sent == in_place ||
                        (self.rule == Rule::kPayload && sent == Py_None);
  return received ? call.argument(self.received_at) : sent;
}

// Payload and own share of a call.
bool measure(Call& call, PyObject* buffer, Content& content) {
  const Rule rule = call.self->rule;
  if (rule == Rule::kNothing) return true;
  const bool in_place_share = rule == Rule::kOwnShare && call.argument(call.self->sent_at) == in_place;
  const int64_t blocks = rule == Rule::kShares || in_place_share ? call.group->size : 1;
  if (buffer == nullptr || !content_of(buffer, content, blocks)) return false;
  call.record.payload = content.nbytes;
  if (rule == Rule::kPayload) return true;
  call.record.local = content.nbytes;
  call.record.payload *= call.group->size;
  return true;
}

// Row of the kinds table; 0 if it cannot be looked up.
uint16_t kind_of(Method* self, const Content& content, PyObject* op, PyObject* buffer) {
  if (self->log != state.log) {
    self->kind_count = 0;
    self->log = state.log;
  }
  for (int i = 0; i < self->kind_count; i++)
    if (self->kinds[i].format == content.format && self->kinds[i].op == op) return self->kinds[i].number;
  state.lookups++;
  const int64_t kind = number(PyObject_CallMethod(state.rows, "kind", "OOO", self->method,
                                                  buffer == nullptr ? Py_None : buffer, op == nullptr ? Py_None : op));
  if (kind <= 0) return PyErr_Clear(), 0;
  if (self->kind_count < kMostKinds) self->kinds[self->kind_count++] = {content.format, op, static_cast<uint16_t>(kind)};
  return static_cast<uint16_t>(kind);
}

thread_local uint64_t thread_log = 0;
thread_local uint16_t thread_number = 0;

bool find_thread() {
  if (thread_log == state.log) return true;
  const int64_t known = number(PyObject_CallMethod(state.rows, "thread", nullptr));
  if (known < 0) return false;
  thread_number = static_cast<uint16_t>(known);
  thread_log = state.log;
  return true;
}

// Finds the call site and the phase, as CallContext.find does in Python.
bool call_context(CallSite& where, uint8_t& phase) {
  if (state.graph_task != nullptr) {
    Ref task(PyObject_CallNoArgs(state.graph_task));
    if (!task || PyLong_AsLong(task.get()) != -1) return false;  // within backward
  }
  const int mark = progress->mark;
  if (mark < 0 || state.sites) where = find_site(mark < 0);
  if (where.failed) return false;
  if (mark >= 0)
    phase = mark;
  else if (where.seen & kForward)
    phase = kForwardPhase;
  else if (where.seen & kOptimizer)
    phase = kOptimizerPhase;
  else
    phase = progress->step < 0 ? kInit : kOther;
  return !(phase == kForwardPhase && progress->between_steps());  // a step may begin here
}

constexpr uint32_t kNoSlot = UINT32_MAX;

uint32_t take() {
  const int64_t slot = number(PyObject_CallNoArgs(state.pop));
  if (slot < 0) return PyErr_Clear(), kNoSlot;
  if ((++state.calls & 1023) == 0) {
    Ref woken(PyObject_CallMethod(state.rows, "wake_if_low", nullptr));
    if (!woken) PyErr_Clear();
  }
  return static_cast<uint32_t>(slot);
}

Record* record_at(uint32_t slot) { return reinterpret_cast<Record*>(state.records) + slot; }

void publish(Record* record, State how) { __atomic_store_n(&record->state, how, __ATOMIC_RELEASE); }

// A number that a method of a status returns: without an argument, or for a datatype.
int64_t from_status(PyObject* status, PyObject* name, PyObject* datatype = nullptr) {
  PyObject* args[] = {status, datatype};
  const size_t count = datatype == nullptr ? 1 : 2;
  return number(PyObject_VectorcallMethod(name, args, count | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
}

// Completes the record of a receive from its status. On a failure the record keeps what the call accepts.
void arrived(Group& group, Record* record, PyObject* status, bool wildcard) {
  static PyObject* get_count = PyUnicode_InternFromString("Get_count");
  static PyObject* get_source = PyUnicode_InternFromString("Get_source");
  static PyObject* get_tag = PyUnicode_InternFromString("Get_tag");
  const int64_t nbytes = from_status(status, get_count, byte_type);
  if (nbytes >= 0) record->payload = nbytes;
  if (!wildcard) return;
  int64_t peer = record->peer, tag = record->tag;
  if (peer < 0) {
    const int64_t source = from_status(status, get_source);
    if (source < 0 || source >= group.size) return;
    peer = number(PySequence_GetItem(group.ranks, source));
  }
  if (tag < 0) tag = from_status(status, get_tag);
  PyObject* counter = peer < 0 || tag < 0 ? nullptr : counter_of(group, peer, tag, false);
  if (counter == nullptr) return;
  record->peer = peer;
  record->tag = tag;
  record->seq = static_cast<uint32_t>(number(PyIter_Next(counter)));
}

bool integer(PyObject* object, long& number) {
  if (!PyLong_CheckExact(object)) return false;
  number = PyLong_AsLong(object);
  if (number == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
  return number >= INT32_MIN && number <= INT32_MAX;
}

bool place_arguments(Call& call) {
  if (call.count < 0 || call.count > call.self->parameter_count) return false;
  for (Py_ssize_t i = 0; i < call.count; i++) call.argv[i] = call.args[i + 1];
  const Py_ssize_t named = call.names == nullptr ? 0 : PyTuple_GET_SIZE(call.names);
  for (Py_ssize_t k = 0; k < named; k++) {
    PyObject* name = PyTuple_GET_ITEM(call.names, k);
    int at = 0;
    while (at < call.self->parameter_count && PyTuple_GET_ITEM(call.self->parameters, at) != name) at++;
    if (at == call.self->parameter_count || call.argv[at] != nullptr) return false;
    call.argv[at] = call.args[1 + call.count + k];
  }
  return true;
}

// Sets the peer: the global rank of the root, or of the other side of a message.
bool find_peer(Call& call) {
  call.record.peer = -1;
  if (call.self->peer_at < 0) return true;
  PyObject* given = call.argument(call.self->peer_at);
  long peer = call.receives() ? any_source : 0;
  if (given != nullptr && !integer(given, peer)) return false;
  if (peer == any_source && call.receives()) {
    call.wildcard = true;
    return true;
  }
  if (peer < 0 || peer >= call.group->size) return false;
  call.record.peer = number(PySequence_GetItem(call.group->ranks, peer));
  return call.record.peer >= 0;
}

bool find_tag(Call& call) {
  call.record.tag = -1;
  if (call.self->tag_at < 0) return true;
  PyObject* given = call.argument(call.self->tag_at);
  long tag = call.self->sends ? 0 : any_tag;
  if (given != nullptr && !integer(given, tag)) return false;
  if (tag == any_tag && !call.self->sends)
    call.wildcard = true;
  else if (tag < 0)
    return false;
  else
    call.record.tag = tag;
  return true;
}

// Fills in what is known before the call, except the sequence number, which increments a counter.
bool describe(Call& call) {
  Method& self = *call.self;
  Record& record = call.record;
  call.group = group_of(call.args[0]);
  if (call.group == nullptr || call.group->inter || !find_peer(call) || !find_tag(call)) return false;
  PyObject* buffer = measured_buffer(call);
  Content content;
  if (!measure(call, buffer, content)) return false;
  record.kind = kind_of(&self, content, call.argument(self.op_at), buffer);
  CallSite site;
  if (record.kind == 0 || !find_thread() || !call_context(site, record.phase)) return false;
  if (!alive(*call.group, call.args[0])) return false;  // Python ran, and another thread reused this entry
  if (!self.message)
    call.counter = call.group->collectives;
  else if (!call.wildcard)
    call.counter = counter_of(*call.group, record.peer, record.tag, self.sends);
  if (call.counter == nullptr && !call.wildcard) return false;
  record.group = call.group->number;
  record.site = site.site;
  record.step = progress->step;
  record.micro_batch = progress->micro_batch;
  record.thread = thread_number;
  record.flags = site.seen & kObject ? kObjects : 0;
  return true;
}

// The status of a receive: the program's, or one of ours if it passes none. Null for other calls.
PyObject* status_of(const Call& call) {
  if (call.self->status_at < 0) return nullptr;
  PyObject* given = call.argument(call.self->status_at);
  if (given != nullptr && given != Py_None) {
    Py_INCREF(given);
    return given;
  }
  if (state.status != nullptr) return std::exchange(state.status, nullptr);
  PyObject* status = PyObject_CallNoArgs(status_type);
  if (status == nullptr) PyErr_Clear();
  return status;
}

// Keeps a status of ours for another receive: making one takes longer than reading it.
void reuse(Ref& status) {
  if (state.status == nullptr && Py_REFCNT(status.get()) == 1) state.status = status.release();
}

// Calls the original of a receive with a status of ours: all arguments by position, with defaults for those left out.
PyObject* call_with_status(Call& call, PyObject* status) {
  const Method& self = *call.self;
  call.argv[self.status_at] = status;
  PyObject* all[kMostParameters + 1] = {call.args[0]};
  for (int i = 0; i < self.parameter_count; i++)
    all[1 + i] = call.argv[i] != nullptr ? call.argv[i] : i == self.peer_at ? any_source_object : any_tag_object;
  return PyObject_Vectorcall(self.original, all, 1 + self.parameter_count, nullptr);
}

void note_success(const Call& call, Record* record, PyObject* status, int64_t t_return) {
  if (status != nullptr) {
    Group* group = group_of(call.args[0]);
    if (group != nullptr) arrived(*group, record, status, call.wildcard);
    PyErr_Clear();
  }
  record->t_return = record->t_end = t_return;
  record->clock = kReturn;
  publish(record, kComplete);
}

void note_cost(int64_t ns, bool sampled, bool first) {
  static PyObject* name = PyUnicode_InternFromString("note_cost");
  static PyObject* keywords =
      PyTuple_Pack(2, PyUnicode_InternFromString("sampled"), PyUnicode_InternFromString("first"));
  const Ref spent(PyLong_FromLongLong(ns));
  PyObject* args[] = {state.rows, spent.get(), sampled ? Py_True : Py_False, first ? Py_True : Py_False};
  const Ref noted(spent ? PyObject_VectorcallMethod(name, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, keywords) : nullptr);
  PyErr_Clear();
}

// Sets aside the exception of a call, if it raised one, until the end of the scope. An attribute lookup while it is set
// would clear it if the name is not in the cache of its type.
class HeldException {
 public:
  HeldException() { PyErr_Fetch(&type_, &value_, &traceback_); }
  ~HeldException() {
    if (type_ != nullptr) PyErr_Restore(type_, value_, traceback_);
  }
  HeldException(const HeldException&) = delete;
  HeldException& operator=(const HeldException&) = delete;

 private:
  PyObject *type_, *value_, *traceback_;
};

PyObject* call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  auto* self = reinterpret_cast<Method*>(object);
  const int64_t entered = now();
  const uint64_t lookups = state.lookups, log = state.log;
  Call call{self, args, PyVectorcall_NARGS(nargsf) - 1, names};
  const bool recordable = state.rows != nullptr && place_arguments(call) && describe(call) && state.log == log;
  const Ref counter(Py_XNewRef(call.counter));  // another thread may forget the group
  const uint32_t slot = recordable ? take() : kNoSlot;
  // Lookups run Python: another thread may have ended the log.
  if (slot == kNoSlot || state.log != log) return PyErr_Clear(), call_wrapper(self, args, nargsf, names);  // it also counts a dropped call
  Record& record = call.record;
  if (counter) record.seq = static_cast<uint32_t>(number(PyIter_Next(counter.get())));
  const bool first = state.lookups != lookups;
  record.t_begin = now();
  Record* place = record_at(slot);
  memcpy(place, &record, offsetof(Record, state));
  publish(place, kBegun);

  Ref status(status_of(call));
  const bool replaced = status && call.argument(self->status_at) != status.get();
  PyObject* result = replaced ? call_with_status(call, status.get())
                              : PyObject_Vectorcall(self->original, args, 1 + call.count, names);
  const int64_t t_return = now();
  const HeldException exception;
  if (state.log != log) return result;  // the log was closed meanwhile
  if (result == nullptr) {
    place->t_return = t_return;
    publish(place, kFailed);
    return nullptr;
  }
  note_success(call, place, status.get(), t_return);
  if (replaced) reuse(status);
  const bool sampled = in_sample<4, 0>(slot);
  if (sampled || first) note_cost(record.t_begin - entered + now() - t_return, sampled, first);
  return result;
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  if (object != nullptr && object != Py_None) return PyMethod_New(self, object);
  Py_INCREF(self);
  return self;
}

PyObject* represent(PyObject* self) { return PyObject_Repr(reinterpret_cast<Method*>(self)->original); }

// A method is pickled by its qualified name, as a function is.
PyObject* reduce(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

char dict_name[] = "__dict__";
PyGetSetDef method_attributes[] = {{dict_name, PyObject_GenericGetDict, nullptr, nullptr, nullptr},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef method_methods[] = {{"__reduce__", reduce, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

// Methods are never freed: other threads may still be calling one after its original has been restored.
PyTypeObject method_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready() {
  method_type.tp_name = "commtrace_mpi.Method";
  method_type.tp_basicsize = sizeof(Method);
  method_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  method_type.tp_vectorcall_offset = offsetof(Method, vectorcall);
  method_type.tp_dictoffset = offsetof(Method, dict);
  method_type.tp_call = PyVectorcall_Call;
  method_type.tp_descr_get = bind;
  method_type.tp_repr = represent;
  method_type.tp_methods = method_methods;
  method_type.tp_getset = method_attributes;
  return PyType_Ready(&method_type) == 0;
}

// ---- functions for Python ---------------------------------------------------------------------------------------------

// method(original, wrapper, method, parameters, rule, positions, message, sends)
PyObject* make_method(PyObject*, PyObject* args) {
  PyObject *original, *wrapper, *method, *parameters;
  int rule, sent, received, peer, tag, op, status, message, sends;
  if (!PyArg_ParseTuple(args, "OOOO!i(iiiiii)pp", &original, &wrapper, &method, &PyTuple_Type, &parameters, &rule, &sent,
                        &received, &peer, &tag, &op, &status, &message, &sends))
    return nullptr;
  const int count = static_cast<int>(PyTuple_GET_SIZE(parameters));
  if (count > kMostParameters) return PyErr_Format(PyExc_ValueError, "too many parameters");
  auto* self = PyObject_New(Method, &method_type);
  if (self == nullptr) return nullptr;
  for (PyObject* kept : {original, wrapper, method, parameters}) Py_INCREF(kept);
  const PyObject base = self->ob_base;
  *self = {base, call, original, wrapper, method, parameters, nullptr, static_cast<Rule>(rule), sent, received, peer, tag,
           op, status, message, sends, count, 0, 0, {}};
  return reinterpret_cast<PyObject*>(self);
}

void clear_groups() {
  for (Group& group : state.groups) clear(group);
}

uint64_t logs = 0;

// Replaces the objects that the state owns, and changes the log number.
void keep(PyObject* rows, PyObject* pop, PyObject* graph_task) {
  state.log = ++logs;
  clear_groups();
  for (PyObject* added : {rows, pop, graph_task}) Py_XINCREF(added);
  PyObject* old[] = {state.rows, state.pop, state.graph_task};
  state.rows = rows, state.pop = pop, state.graph_task = graph_task;
  for (PyObject* object : old) Py_XDECREF(object);
}

// start(rows, ring, records_at, pop, graph_task, sites, progress cells, constants, datatypes), where constants
// are (IN_PLACE, Status, BYTE, ANY_SOURCE, ANY_TAG) and each datatype is (object, size, extent).
PyObject* start(PyObject*, PyObject* args) {
  PyObject *rows, *ring, *pop, *task, *cells, *known;
  Py_ssize_t at;
  int sites;
  if (!PyArg_ParseTuple(args, "OOnOOpO(OOOOO)O!", &rows, &ring, &at, &pop, &task, &sites, &cells, &in_place,
                        &status_type, &byte_type, &any_source_object, &any_tag_object, &PyList_Type, &known))
    return nullptr;
  any_source = PyLong_AsLong(any_source_object), any_tag = PyLong_AsLong(any_tag_object);
  if (progress == nullptr) {
    static Py_buffer view;  // never released: an array with an exported buffer is not resized
    if (PyObject_GetBuffer(cells, &view, PyBUF_SIMPLE) != 0) return nullptr;
    if (view.len != sizeof(Progress)) return PyErr_Format(PyExc_ValueError, "these are not progress cells");
    progress = static_cast<const Progress*>(view.buf);
  }
  types.clear();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known); i++) {
    long long size, extent;
    PyObject* datatype;
    if (!PyArg_ParseTuple(PyList_GET_ITEM(known, i), "OLL", &datatype, &size, &extent)) return nullptr;
    types.push_back({datatype, size, extent});
  }
  Py_buffer view;
  if (PyObject_GetBuffer(ring, &view, PyBUF_WRITABLE) != 0) return nullptr;
  state.records = static_cast<char*>(view.buf) + at;  // the recorder keeps the ring until the session ends
  PyBuffer_Release(&view);
  state.known_sites.clear();
  state.sites = sites;
  keep(rows, pop, task == Py_None ? nullptr : task);
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  keep(nullptr, nullptr, nullptr);
  Py_RETURN_NONE;
}

// Forgets all groups: a communicator is about to be freed.
PyObject* forget_groups(PyObject*, PyObject*) {
  clear_groups();
  Py_RETURN_NONE;
}

// Forgets all call sites: code objects are released, and addresses of their instructions may be reused.
PyObject* forget_sites(PyObject*, PyObject*) {
  state.known_sites.clear();
  Py_RETURN_NONE;
}

PyObject* layout(PyObject*, PyObject*) {
  Ref offsets(PyDict_New());
  for (const commtrace::Field& field : commtrace::kLayout) {
    Ref offset(PyLong_FromSize_t(field.offset));
    if (!offsets || !offset || PyDict_SetItemString(offsets.get(), field.name, offset.get()) != 0) return nullptr;
  }
  return offsets.release();
}

PyObject* frames_agree(PyObject*, PyObject*) { return PyBool_FromLong(commtrace::frames_agree()); }

PyMethodDef functions[] = {
    {"method", make_method, METH_VARARGS, nullptr},
    {"start", start, METH_VARARGS, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"forget_groups", forget_groups, METH_NOARGS, nullptr},
    {"forget_sites", forget_sites, METH_NOARGS, nullptr},
    {"layout", layout, METH_NOARGS, nullptr},
    {"frames_agree", frames_agree, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "commtrace_mpi", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_commtrace_mpi() { return ready() ? PyModule_Create(&module) : nullptr; }
