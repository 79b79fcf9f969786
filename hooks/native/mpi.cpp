// Replacements of mpi4py's methods: they record blocking calls on common forms of buffers, and pass every other call to
// the wrapper in Python (hooks/mpi/wrappers.py), which is the reference.
//
// This file needs Python's headers only, neither torch's nor MPI's. All of it runs with the GIL. It takes slots from the
// recorder's own list; rows, sequence numbers and groups are Python's objects, so that both can record side by side.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include "frames.h"
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
  void set(PyObject* object) {
    PyObject* old = object_;
    object_ = object;
    Py_XDECREF(old);
  }
  PyObject* release() { return std::exchange(object_, nullptr); }

 private:
  PyObject* object_;
};

long number_of(PyObject* object, const char* name, long otherwise) {
  Ref value(PyObject_GetAttrString(object, name));
  if (!value) {
    PyErr_Clear();
    return otherwise;
  }
  const long number = PyLong_AsLong(value.get());
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    return otherwise;
  }
  return number;
}

// ---- state of one recording -------------------------------------------------------------------------------

constexpr int kMostTypes = 128;
constexpr int kMostGroups = 64;  // a power of two, as the next ones
constexpr int kMostSites = 1024;
constexpr int kMostWays = 16;

struct Type {
  PyObject* datatype;
  int64_t size, extent;
};

// The counter of a group's messages with one peer and tag.
struct Way {
  int32_t peer = -2, tag = 0;
  bool sends = false;
  PyObject* counter = nullptr;
};

struct Group {
  PyObject* members = nullptr;  // compared with the referent of `ref`, never dereferenced
  PyObject* group = nullptr;    // hooks.mpi.communicators.MpiGroup
  PyObject* ref = nullptr;
  PyObject* collectives = nullptr;
  uint32_t number = 0;
  int64_t size = 0, rank = 0;
  bool remote = false;
  std::array<Way, kMostWays> ways{};
  int next_way = 0;
};

struct Site {
  uint64_t where = 0;
  uint8_t kind = 0;
  uint32_t site = UINT32_MAX;  // not asked for yet
};

// The running recording. Set by go() and cleared by stop().
struct Current {
  PyObject* tracer = nullptr;
  PyObject* recorder = nullptr;
  PyObject* session = nullptr;
  PyObject* pop = nullptr;  // takes the number of a free place
  PyObject* free = nullptr;
  PyObject* slots = nullptr;
  PyObject* classify = nullptr;   // frame -> bits
  PyObject* number = nullptr;     // frame -> row of its line
  PyObject* note_cost = nullptr;  // (ns, sampled, first)
  PyObject* graph_task = nullptr; // number of the backward pass that runs; null where nothing differentiates
  char* records = nullptr;
  bool sites = false;
  uint64_t calls = 0;
  uint64_t lookups = 0;  // answers of Python that are remembered: a call during which it grows is a first call
  uint64_t log = 0;  // identifies this recording
  std::array<Group, kMostGroups> groups{};
  std::array<Site, kMostSites> known{};
};

Current state;
const Progress* progress = nullptr;
std::array<Type, kMostTypes> types{};
int type_count = 0;
PyObject *in_place = nullptr, *status_type = nullptr, *byte_type = nullptr, *recorder_name = nullptr, *proc_null = nullptr;
long any_source = -1, any_tag = -1;

bool records_now() {
  if (state.tracer == nullptr) return false;
  Ref recorder(PyObject_GetAttr(state.session, recorder_name));
  if (!recorder) PyErr_Clear();
  return recorder.get() == state.recorder;
}

const Type* type_of(PyObject* datatype) {
  for (int i = 0; i < type_count; i++)
    if (types[i].datatype == datatype) return &types[i];
  return nullptr;
}

void clear(Group& group) {
  for (Way& way : group.ways) Py_CLEAR(way.counter);
  group.members = nullptr;
  Py_CLEAR(group.group);
  Py_CLEAR(group.ref);
  Py_CLEAR(group.collectives);
  group.ways.fill({});
}

bool alive(const Group& group, PyObject* members) {
  if (group.members != members || group.ref == nullptr) return false;
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  const int there = PyWeakref_GetRef(group.ref, &found);
  Py_XDECREF(found);
  return there == 1 && found == members;
#else
  return PyWeakref_GetObject(group.ref) == members;
#endif
}

// The group of a communicator; null for one that is left to Python's wrapper.
Group* group_of(PyObject* members) {
  Group& group = state.groups[(reinterpret_cast<uintptr_t>(members) >> 4) & (kMostGroups - 1)];
  if (alive(group, members)) return &group;
  clear(group);
  state.lookups++;
  const int there = PyObject_IsTrue(members);
  Ref groups(there == 1 ? PyObject_GetAttrString(state.tracer, "groups") : nullptr);
  Ref found(groups ? PyObject_CallMethod(groups.get(), "of", "O", members) : nullptr);
  Ref remote(found ? PyObject_GetAttrString(found.get(), "remote") : nullptr);
  Ref ref(found ? PyObject_GetAttrString(found.get(), "ref") : nullptr);
  Ref collectives(found ? PyObject_GetAttrString(found.get(), "collectives") : nullptr);
  if (!remote || !ref || !collectives) {
    PyErr_Clear();
    return nullptr;
  }
  group.number = number_of(found.get(), "number", 0);
  group.size = number_of(found.get(), "size", 1);
  group.rank = number_of(found.get(), "rank", 0);
  group.remote = remote.get() != Py_None;
  group.members = members;
  Py_INCREF(found.get());
  group.group = found.get();
  Py_INCREF(ref.get());
  group.ref = ref.get();
  Py_INCREF(collectives.get());
  group.collectives = collectives.get();
  return &group;
}

// The next number that an iterator gives; -1 where it fails.
int64_t next_of(PyObject* iterator) {
  Ref value(PyIter_Next(iterator));
  if (!value) return -1;
  return PyLong_AsLongLong(value.get());
}

// The counter of messages on a way: a new reference held by the group.
PyObject* counter_of(Group& group, int peer, int tag, bool sends) {
  for (Way& way : group.ways)
    if (way.peer == peer && way.tag == tag && way.sends == sends && way.counter != nullptr) return way.counter;
  Ref counter(PyObject_CallMethod(group.group, "way", "iiO", peer, tag, sends ? Py_True : Py_False));
  if (!counter) return nullptr;
  Way& way = group.ways[group.next_way++ % kMostWays];
  Py_XDECREF(way.counter);
  Py_INCREF(counter.get());
  way = {peer, tag, sends, counter.get()};
  return way.counter;
}

// ---- call site and phase ----------------------------------------------------------------------------------------------

Site& site_at(uint64_t where) { return state.known[(where * 0x9E3779B97F4A7C15ULL) >> 54]; }

// False if Python raises.
bool classify(Site& entry, const Frame& frame, int depth) {
  state.lookups++;
  Ref object(frame_object(depth));
  Ref kind(object ? PyObject_CallOneArg(state.classify, object.get()) : nullptr);
  if (!kind) return false;
  entry = {frame.where, static_cast<uint8_t>(PyLong_AsLong(kind.get())), UINT32_MAX};
  return true;
}

// As CallSites.find of hooks/call_site.py.
bool find(CallSite& found, bool deep) {
  Frame frame;
  if (!innermost(frame)) return true;
  int depth = 0, named_depth = 0;
  uint64_t named = frame.where;
  bool within = true, ok = true;
  do {
    Site& entry = site_at(frame.where);
    if (entry.where != frame.where && !classify(entry, frame, depth)) {
      ok = false;
      break;
    }
    found.seen |= entry.kind;
    if (within && !(entry.kind & kWrapper)) {
      within = false;
      named = frame.where;
      named_depth = depth;
      if (!deep) break;
    }
    if (!within && (found.seen & (kForward | kOptimizer))) break;
    depth++;
  } while (outer(frame));
  finished(frame);
  if (!ok || !state.sites) return ok;
  Site& entry = site_at(named);
  if (entry.where == named && entry.site != UINT32_MAX) {
    found.site = entry.site;
    return true;
  }
  state.lookups++;
  Ref object(frame_object(named_depth));
  Ref number(object ? PyObject_CallOneArg(state.number, object.get()) : nullptr);
  if (!number) return false;
  found.site = static_cast<uint32_t>(PyLong_AsLong(number.get()));
  if (entry.where == named) entry.site = found.site;
  return true;
}

// ---- one method --------------------------------------------------------------------------------------------------------

enum class Rule : int { kNone = 0, kBuffer = 1, kReduced = 2, kAllGather = 3, kAllToAll = 4, kScatteredBlock = 5, kNothing = 6 };
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
  PyObject* plan;        // hooks.mpi.methods.Method
  PyObject* parameters;  // their names
  PyObject* dict;
  Rule rule;
  int buffer_at, other_at, peer_at, tag_at, op_at, status_at;
  bool message, sends;
  int parameter_count;
  uint64_t log;
  int kind_count;
  Kind kinds[kMostKinds];
};

PyObject* slowly(Method* self, PyObject* const* args, size_t nargsf, PyObject* names) {
  return PyObject_Vectorcall(self->wrapper, args, PyVectorcall_NARGS(nargsf), names);
}

struct Content {
  int64_t nbytes = 0;
  uint64_t format = 0;
};

bool is_intercepted_sequence(PyObject* message) { return PyList_CheckExact(message) || PyTuple_CheckExact(message); }

// A buffer by its protocol. False where it has none, or is not contiguous, or of a format that takes Python to name.
bool content_of_buffer(PyObject* object, Content& content, int64_t& itemsize) {
  if (!PyObject_CheckBuffer(object)) return false;
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_ND) != 0) {
    PyErr_Clear();
    return false;
  }
  content.nbytes = view.len;
  itemsize = view.itemsize;
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
  int64_t itemsize = 1;
  if (!is_intercepted_sequence(message)) {
    if (!content_of_buffer(message, content, itemsize)) return false;
    content.nbytes /= blocks;
    return true;
  }
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(message);
  if (size < 2 || size > 3) return false;
  PyObject** items = PySequence_Fast_ITEMS(message);
  const Type* type = type_of(items[size - 1]);
  if (type == nullptr) return false;
  content.format = reinterpret_cast<uint64_t>(type->datatype);
  if (size == 3) {
    if (!PyLong_CheckExact(items[1])) return false;
    const int64_t count = PyLong_AsLongLong(items[1]);
    if (count < 0) return PyErr_Clear(), false;
    content.nbytes = count * type->size;
    return true;
  }
  Content whole;
  if (type->extent <= 0 || !content_of_buffer(items[0], whole, itemsize)) return false;
  content.nbytes = whole.nbytes / type->extent / blocks * type->size;
  return true;
}

// Payload and own share of a call; false: left to Python.
bool measure(const Method& self, const Group& group, PyObject* const* argv, Content& content, int64_t& local) {
  PyObject* first = self.buffer_at < 0 ? nullptr : argv[self.buffer_at];
  PyObject* second = self.other_at < 0 ? nullptr : argv[self.other_at];
  switch (self.rule) {
    case Rule::kNothing:
      return true;
    case Rule::kBuffer:
      return first != nullptr && content_of(first, content, 1);
    case Rule::kReduced:
      if (first == in_place || first == Py_None) first = second;
      return first != nullptr && content_of(first, content, 1);
    case Rule::kAllGather:
      first = second;
      break;
    case Rule::kAllToAll:
      if (first == in_place) first = second;
      break;
    case Rule::kScatteredBlock:
      if (first == in_place || second == nullptr || !content_of(second, content, 1)) return false;
      local = content.nbytes;
      content.nbytes *= group.size;
      return true;
    default:
      return false;
  }
  if (first == nullptr || !content_of(first, content, group.size)) return false;
  local = content.nbytes;
  content.nbytes *= group.size;
  return true;
}

// Row of the kinds table; 0 where it cannot be had.
uint16_t kind_of(Method* self, const Content& content, PyObject* op, PyObject* message) {
  if (self->log != state.log) {
    self->kind_count = 0;
    self->log = state.log;
  }
  for (int i = 0; i < self->kind_count; i++)
    if (self->kinds[i].format == content.format && self->kinds[i].op == op) return self->kinds[i].number;
  state.lookups++;
  Ref kind(PyObject_CallMethod(state.tracer, "kind_of", "OOO", self->plan, message == nullptr ? Py_None : message,
                               op == nullptr ? Py_None : op));
  const long number = kind ? PyLong_AsLong(kind.get()) : 0;
  if (number <= 0) return PyErr_Clear(), 0;
  if (self->kind_count < kMostKinds) self->kinds[self->kind_count++] = {content.format, op, static_cast<uint16_t>(number)};
  return number;
}

thread_local uint64_t thread_log = 0;
thread_local uint16_t thread_number = 0;

bool thread_of() {
  if (thread_log == state.log) return true;
  Ref number(PyObject_CallMethod(state.recorder, "thread", nullptr));
  if (!number) return false;
  thread_number = static_cast<uint16_t>(PyLong_AsLong(number.get()));
  thread_log = state.log;
  return true;
}

// The call site and the phase, as CallContext.find in Python; false for what is left to it.
bool call_context(CallSite& where, uint8_t& phase) {
  if (state.graph_task != nullptr) {
    Ref task(PyObject_CallNoArgs(state.graph_task));
    if (!task || PyLong_AsLong(task.get()) != -1) return false;  // within backward
  }
  const int mark = progress->mark;
  if ((mark < 0 || state.sites) && !find(where, mark < 0)) return false;
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
  Ref slot(PyObject_CallNoArgs(state.pop));
  if (!slot) return PyErr_Clear(), kNoSlot;
  if ((++state.calls & 1023) == 0 && state.free != nullptr && PyObject_Size(state.free) < PyLong_AsLong(PyTuple_GET_ITEM(state.slots, 1))) {
    Ref woken(PyObject_CallMethod(PyTuple_GET_ITEM(state.slots, 0), "wake", nullptr));
    if (!woken) PyErr_Clear();
  }
  return static_cast<uint32_t>(PyLong_AsUnsignedLong(slot.get()));
}

Record* record_at(uint32_t slot) { return reinterpret_cast<Record*>(state.records) + slot; }

void publish(Record* record, State how) { __atomic_store_n(&record->state, how, __ATOMIC_RELEASE); }

// Completes a receive's record from its status. On a failure the record keeps what was asked for.
void arrived(Group& group, Record* record, PyObject* status, bool anybody) {
  static PyObject* get_count = PyUnicode_InternFromString("Get_count");
  PyObject* args[] = {status, byte_type};
  Ref count(PyObject_VectorcallMethod(get_count, args, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr));
  const int64_t nbytes = count ? PyLong_AsLongLong(count.get()) : -1;
  if (nbytes >= 0) record->payload = nbytes;
  if (!anybody) return;
  Ref source(PyObject_CallMethod(status, "Get_source", nullptr));
  Ref tag(source ? PyObject_CallMethod(status, "Get_tag", nullptr) : nullptr);
  if (!tag) return;
  const long from = PyLong_AsLong(source.get()), what = PyLong_AsLong(tag.get());
  if (from < 0 || what < 0) return;
  Ref peer(PyObject_CallMethod(group.group, "peer", "l", from));
  if (!peer) return;
  const int global = PyLong_AsLong(peer.get());
  PyObject* counter = counter_of(group, global, what, false);
  if (counter == nullptr) return;
  record->peer = global;
  record->tag = what;
  record->seq = static_cast<uint32_t>(next_of(counter));
}

bool integer(PyObject* object, long& number) {
  if (!PyLong_CheckExact(object)) return false;
  number = PyLong_AsLong(object);
  if (number == -1 && PyErr_Occurred()) return PyErr_Clear(), false;
  return number >= INT32_MIN && number <= INT32_MAX;
}

// A call of a method, from its arguments to its record. A step that returns false leaves the call to Python's wrapper.
struct Call {
  Method* self;
  PyObject* const* args;  // as Python passes them: the communicator first
  Py_ssize_t count;       // of the arguments by place, without the communicator
  PyObject* names;        // of the others
  PyObject* argv[kMostParameters + 1] = {};  // all of them by place; null: left out
  Group* group = nullptr;
  Record record{};
  bool anybody = false;         // receives from any source, or with any tag
  PyObject* counter = nullptr;  // gives the sequence number; null: known when the message is there

  bool receives() const { return self->message && !self->sends; }
  PyObject* argument(int at) const { return at < 0 ? nullptr : argv[at]; }
};

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

// The peer as a global rank, of a root or of a message's other side.
bool find_peer(Call& call) {
  call.record.peer = -1;
  if (call.self->peer_at < 0) return true;
  PyObject* given = call.argument(call.self->peer_at);
  long peer = call.receives() ? any_source : 0;
  if (given != nullptr && !integer(given, peer)) return false;
  if (peer == any_source && call.receives()) {
    call.anybody = true;
    return true;
  }
  if (peer < 0 || peer >= call.group->size) return false;
  Ref ranks(PyObject_GetAttrString(call.group->group, "local"));
  Ref global(ranks ? PySequence_GetItem(ranks.get(), peer) : nullptr);
  if (global) call.record.peer = PyLong_AsLong(global.get());
  return static_cast<bool>(global);
}

bool find_tag(Call& call) {
  call.record.tag = -1;
  if (call.self->tag_at < 0) return true;
  PyObject* given = call.argument(call.self->tag_at);
  long tag = call.self->sends ? 0 : any_tag;
  if (given != nullptr && !integer(given, tag)) return false;
  if (tag == any_tag && !call.self->sends)
    call.anybody = true;
  else if (tag < 0)
    return false;
  else
    call.record.tag = tag;
  return true;
}

// The buffer that shows the element type; null for a barrier.
PyObject* typed_buffer(const Call& call) {
  const Method& self = *call.self;
  if (self.rule == Rule::kNothing) return nullptr;
  const bool received = self.rule == Rule::kAllGather || self.rule == Rule::kScatteredBlock;
  PyObject* buffer = call.argument(received ? self.other_at : self.buffer_at);
  return buffer == in_place || buffer == Py_None ? call.argument(self.other_at) : buffer;
}

// Fills in what is known before the call is made, except the sequence number, which counts.
bool describe(Call& call) {
  Method& self = *call.self;
  Record& record = call.record;
  call.group = group_of(call.args[0]);
  if (call.group == nullptr || call.group->remote || !find_peer(call) || !find_tag(call)) return false;
  Content content;
  if (!measure(self, *call.group, call.argv, content, record.local)) return false;
  record.kind = kind_of(&self, content, call.argument(self.op_at), typed_buffer(call));
  CallSite where;
  if (record.kind == 0 || !thread_of() || !call_context(where, record.phase)) return false;
  if (!self.message)
    call.counter = call.group->collectives;
  else if (!call.anybody)
    call.counter = counter_of(*call.group, record.peer, record.tag, self.sends);
  if (call.counter == nullptr && !call.anybody) return false;
  record.payload = content.nbytes;
  record.group = call.group->number;
  record.site = where.site;
  record.step = progress->step;
  record.micro_batch = progress->micro_batch;
  record.thread = thread_number;
  record.flags = where.seen & kObject ? kObjects : 0;
  return true;
}

// The status of a receive: the program's, or a new one where it passes none. Null for other calls.
PyObject* status_of(const Call& call) {
  if (call.self->status_at < 0 || call.self->sends) return nullptr;
  PyObject* given = call.argument(call.self->status_at);
  if (given != nullptr && given != Py_None) {
    Py_INCREF(given);
    return given;
  }
  PyObject* status = PyObject_CallNoArgs(status_type);
  if (status == nullptr) PyErr_Clear();
  return status;
}

// Calls the original with a new status: by place up to the first argument that is left out, by name from there on.
PyObject* call_with_status(Call& call, PyObject* status) {
  const Method& self = *call.self;
  call.argv[self.status_at] = status;
  PyObject* all[kMostParameters + 1] = {call.args[0]};
  int by_place = 0;
  for (; by_place < self.parameter_count && call.argv[by_place] != nullptr; by_place++) all[1 + by_place] = call.argv[by_place];
  Py_ssize_t by_name = 0;
  for (int i = by_place; i < self.parameter_count; i++) by_name += call.argv[i] != nullptr;
  Ref keywords(by_name == 0 ? nullptr : PyTuple_New(by_name));
  if (by_name != 0 && !keywords) return nullptr;
  Py_ssize_t filled = 0;
  for (int i = by_place; i < self.parameter_count; i++) {
    if (call.argv[i] == nullptr) continue;
    PyObject* name = PyTuple_GET_ITEM(self.parameters, i);
    Py_INCREF(name);
    PyTuple_SET_ITEM(keywords.get(), filled, name);
    all[1 + by_place + filled++] = call.argv[i];
  }
  return PyObject_Vectorcall(self.original, all, 1 + by_place, keywords.get());
}

// What follows a call may run code of Python: its exception is kept out of the way.
void note_failure(Record* place, int64_t t_return) {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  place->t_return = t_return;
  publish(place, kFailed);
  PyErr_Restore(type, value, trace);
}

void note_success(const Call& call, Record* place, PyObject* status, int64_t t_return) {
  if (status != nullptr) {
    Group* group = group_of(call.args[0]);
    if (group != nullptr) arrived(*group, place, status, call.anybody);
    PyErr_Clear();
  }
  place->t_return = place->t_end = t_return;
  place->clock = kReturn;
  publish(place, kComplete);
}

void note_cost(int64_t ns, bool sampled, bool first) {
  if (!sampled && !first) return;
  static PyObject* names = Py_BuildValue("(ss)", "sampled", "first");
  Ref cost(PyLong_FromLongLong(ns));
  PyObject* args[] = {cost.get(), sampled ? Py_True : Py_False, first ? Py_True : Py_False};
  Ref noted(cost ? PyObject_Vectorcall(state.note_cost, args, 1, names) : nullptr);
  PyErr_Clear();
}

PyObject* call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject* names) {
  auto* self = reinterpret_cast<Method*>(object);
  const int64_t entered = now();
  const uint64_t lookups = state.lookups;
  Call call{self, args, PyVectorcall_NARGS(nargsf) - 1, names};
  const bool recordable = records_now() && place_arguments(call) && describe(call);
  const uint32_t slot = recordable ? take() : kNoSlot;
  if (slot == kNoSlot) return PyErr_Clear(), slowly(self, args, nargsf, names);  // which also counts a dropped call
  Record& record = call.record;
  if (call.counter != nullptr) record.seq = static_cast<uint32_t>(next_of(call.counter));
  const bool first = state.lookups != lookups;
  record.t_begin = now();
  Record* place = record_at(slot);
  memcpy(place, &record, offsetof(Record, state));
  publish(place, kBegun);

  const uint64_t log = state.log;
  const Ref status(status_of(call));
  const bool replaced = status && call.argument(self->status_at) != status.get();
  PyObject* result = replaced ? call_with_status(call, status.get()) : PyObject_Vectorcall(self->original, args, 1 + call.count, names);
  const int64_t t_return = now();
  if (state.log != log || !records_now()) return result;  // the log was closed meanwhile
  if (result == nullptr) {
    note_failure(place, t_return);
    return nullptr;
  }
  note_success(call, place, status.get(), t_return);
  note_cost(record.t_begin - entered + now() - t_return, (slot & 15) == 0, first);
  return result;
}

PyObject* bind(PyObject* self, PyObject* object, PyObject*) {
  if (object == nullptr || object == Py_None) {
    Py_INCREF(self);
    return self;
  }
  return PyMethod_New(self, object);
}

// Name, signature and documentation are the wrapper's, which has copied those of the original.
PyObject* attribute(PyObject* self, PyObject* name) {
  PyObject* own = PyObject_GenericGetAttr(self, name);
  if (own != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return own;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Method*>(self)->wrapper, name);
}

PyObject* shown(PyObject* self) { return PyObject_Repr(reinterpret_cast<Method*>(self)->original); }

PyObject* reduced(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(reinterpret_cast<Method*>(self)->wrapper, "__qualname__");
}

// Attributes that the type itself defines.
PyObject* of_wrapper(PyObject* self, void* name) {
  return PyObject_GetAttrString(reinterpret_cast<Method*>(self)->wrapper, static_cast<const char*>(name));
}

char doc_name[] = "__doc__", module_name[] = "__module__";
PyGetSetDef method_attributes[] = {{doc_name, of_wrapper, nullptr, nullptr, doc_name},
                                   {module_name, of_wrapper, nullptr, nullptr, module_name},
                                   {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyMethodDef method_methods[] = {{"__reduce__", reduced, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};

// Never freed: other threads may still be calling a method that has been restored.
PyTypeObject method_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

bool ready() {
  method_type.tp_name = "commtrace_mpi.Method";
  method_type.tp_basicsize = sizeof(Method);
  method_type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  method_type.tp_vectorcall_offset = offsetof(Method, vectorcall);
  method_type.tp_call = PyVectorcall_Call;
  method_type.tp_descr_get = bind;
  method_type.tp_getattro = attribute;
  method_type.tp_repr = shown;
  method_type.tp_methods = method_methods;
  method_type.tp_getset = method_attributes;
  return PyType_Ready(&method_type) == 0;
}

// ---- what Python calls -------------------------------------------------------------------------------------------------

int place(PyObject* places, const char* name) {
  PyObject* at = PyDict_GetItemString(places, name);
  return at == nullptr ? -1 : static_cast<int>(PyLong_AsLong(at));
}

// method(original, wrapper, plan, parameters, rule, places, message, sends)
PyObject* make_method(PyObject*, PyObject* args) {
  PyObject *original, *wrapper, *plan, *parameters, *places;
  int rule, message, sends;
  if (!PyArg_ParseTuple(args, "OOOO!iO!pp", &original, &wrapper, &plan, &PyTuple_Type, &parameters, &rule, &PyDict_Type,
                        &places, &message, &sends))
    return nullptr;
  if (PyTuple_GET_SIZE(parameters) > kMostParameters) return PyErr_Format(PyExc_ValueError, "too many parameters");
  auto* self = PyObject_New(Method, &method_type);
  if (self == nullptr) return nullptr;
  self->vectorcall = call;
  for (PyObject* kept : {original, wrapper, plan, parameters}) Py_INCREF(kept);
  self->original = original, self->wrapper = wrapper, self->plan = plan, self->parameters = parameters;
  self->dict = nullptr;
  self->rule = static_cast<Rule>(rule);
  self->buffer_at = place(places, "buffer"), self->other_at = place(places, "other");
  self->peer_at = place(places, "peer"), self->tag_at = place(places, "tag");
  self->op_at = place(places, "op"), self->status_at = place(places, "status");
  self->message = message, self->sends = sends;
  self->parameter_count = static_cast<int>(PyTuple_GET_SIZE(parameters));
  self->log = 0, self->kind_count = 0;
  return reinterpret_cast<PyObject*>(self);
}

void keep(PyObject*& place, PyObject* value) {
  Py_XINCREF(value);
  PyObject* old = place;
  place = value;
  Py_XDECREF(old);
}

// constants(in_place, status, byte, any_source, any_tag, session, progress cells, [(datatype, size, extent), ...])
PyObject* set_constants(PyObject*, PyObject* args) {
  PyObject *here, *status, *byte, *session, *cells, *known;
  if (!PyArg_ParseTuple(args, "OOOllOOO!", &here, &status, &byte, &any_source, &any_tag, &session, &cells, &PyList_Type, &known))
    return nullptr;
  keep(in_place, here), keep(status_type, status), keep(byte_type, byte), keep(state.session, session);
  if (progress == nullptr) {
    static Py_buffer view;  // kept: an array that is looked into stays where it is
    if (PyObject_GetBuffer(cells, &view, PyBUF_SIMPLE) != 0) return nullptr;
    if (view.len != sizeof(Progress)) return PyErr_Format(PyExc_ValueError, "these are not progress cells");
    progress = static_cast<const Progress*>(view.buf);
  }
  if (recorder_name == nullptr) recorder_name = PyUnicode_InternFromString("recorder");
  type_count = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(known) && type_count < kMostTypes; i++) {
    Type type{};
    if (!PyArg_ParseTuple(PyList_GET_ITEM(known, i), "OLL", &type.datatype, &type.size, &type.extent)) return nullptr;
    Py_INCREF(type.datatype);
    types[type_count++] = type;
  }
  Py_RETURN_NONE;
}

void forget_groups() {
  for (Group& group : state.groups) clear(group);
}

uint64_t logs = 0;

// go(tracer, recorder, ring, records_at, pop, free, (slots, half), classify, number, note_cost, graph_task, sites)
PyObject* go(PyObject*, PyObject* args) {
  PyObject *tracer, *recorder, *ring, *pop, *free, *slots, *classify, *number, *note_cost, *task;
  Py_ssize_t at;
  int sites;
  if (!PyArg_ParseTuple(args, "OOOnOOO!OOOOp", &tracer, &recorder, &ring, &at, &pop, &free, &PyTuple_Type, &slots, &classify,
                        &number, &note_cost, &task, &sites))
    return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(ring, &view, PyBUF_WRITABLE) != 0) return nullptr;
  state.records = static_cast<char*>(view.buf) + at;  // its recorder keeps it as long as it is the session's
  PyBuffer_Release(&view);
  forget_groups();
  state.known.fill({});
  keep(state.recorder, recorder), keep(state.pop, pop), keep(state.free, free == Py_None ? nullptr : free);
  keep(state.slots, slots), keep(state.classify, classify), keep(state.number, number), keep(state.note_cost, note_cost);
  keep(state.graph_task, task == Py_None ? nullptr : task);
  state.sites = sites;
  state.log = ++logs;
  keep(state.tracer, tracer);
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  keep(state.tracer, nullptr);
  state.log = ++logs;
  forget_groups();
  for (PyObject** kept : {&state.recorder, &state.pop, &state.free, &state.slots, &state.classify, &state.number,
                          &state.note_cost, &state.graph_task})
    keep(*kept, nullptr);
  Py_RETURN_NONE;
}

// A communicator is about to be freed.
PyObject* forget(PyObject*, PyObject*) {
  forget_groups();
  Py_RETURN_NONE;
}

// Code objects are released: addresses of instructions may be used again.
PyObject* forget_sites(PyObject*, PyObject*) {
  state.known.fill({});
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

PyMethodDef functions[] = {
    {"method", make_method, METH_VARARGS, nullptr},
    {"constants", set_constants, METH_VARARGS, nullptr},
    {"go", go, METH_VARARGS, nullptr},
    {"stop", stop, METH_NOARGS, nullptr},
    {"forget", forget, METH_NOARGS, nullptr},
    {"forget_sites", forget_sites, METH_NOARGS, nullptr},
    {"layout", layout, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "commtrace_mpi", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_commtrace_mpi() { return ready() ? PyModule_Create(&module) : nullptr; }
