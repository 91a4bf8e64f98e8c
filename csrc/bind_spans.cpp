// Python bindings of spans, written with the Python C API. A training step has many spans, and the call overhead of
// pybind11 exceeds the cost of a span.
#include "bind_spans.h"

#include <structmember.h>

#include <cstddef>
#include <new>
#include <vector>

#include "cpu/spans.h"

namespace moe_comm {
namespace {

struct Recorder {
  PyObject_HEAD SpanWriter writer;
  Py_buffer view;
  PyObject* names;   // dict: text -> number
  PyObject* device;  // a QueuedTimes (runtime/device_clock.py), or None
  long long step;
  int micro;
  char enabled;
  unsigned long main_thread;
};

struct Open {
  PyObject_HEAD Recorder* recorder;
  PyObject* name;
  PyObject* layer;
  Span span;
};

PyTypeObject* open_type = nullptr;
PyObject* no_text = nullptr;
PyObject* keyword_names[5];  // keyword arguments of span() and put(): layer, group, peer, nbytes, name

Recorder* as_recorder(PyObject* self) { return reinterpret_cast<Recorder*>(self); }
Open* as_open(PyObject* self) { return reinterpret_cast<Open*>(self); }
PyObject* none() { return Py_NewRef(Py_None); }
// Spans of kind data, checkpoint, pause and mark queue no work on the device.
bool on_device(const Open* open) {
  PyObject* device = open->recorder->device;
  return device != nullptr && device != Py_None && (open->span.kind < 3 || open->span.kind > 6);
}

bool number_of(Recorder* recorder, PyObject* text, uint32_t* number) {
  PyObject* number_object = PyDict_GetItemWithError(recorder->names, text);
  if (number_object != nullptr) {
    *number = static_cast<uint32_t>(PyLong_AsUnsignedLong(number_object));
    return true;
  }
  if (PyErr_Occurred()) return false;
  number_object = PyObject_CallMethod(reinterpret_cast<PyObject*>(recorder), "_add_name", "O", text);
  if (number_object == nullptr) return false;
  *number = static_cast<uint32_t>(PyLong_AsUnsignedLong(number_object));
  Py_DECREF(number_object);
  return !PyErr_Occurred();
}

// Return 1 if this is a background thread, which the main thread does not wait for; 0 if not; -1 on an exception.
int is_background(Recorder* recorder) {
  if (PyThread_get_thread_ident() == recorder->main_thread) return 0;
  PyObject* answer = PyObject_CallMethod(reinterpret_cast<PyObject*>(recorder), "_is_background", nullptr);
  if (answer == nullptr) return -1;
  const int background = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  return background;
}

// Parse the keyword arguments of span() and put() into `parsed`; absent ones remain null.
bool keywords(PyObject* const* values, PyObject* names, PyObject* parsed[5]) {
  const Py_ssize_t number = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t n = 0; n < number; ++n) {
    PyObject* name = PyTuple_GET_ITEM(names, n);
    int place = 0;
    while (place < 5 && name != keyword_names[place]) ++place;
    for (int other = 0; place == 5 && other < 5; ++other)
      if (PyUnicode_Compare(name, keyword_names[other]) == 0) place = other;
    if (place == 5) {
      PyErr_Format(PyExc_TypeError, "unexpected keyword argument %R; expected layer, group, peer, nbytes or name",
                   name);
      return false;
    }
    parsed[place] = values[n];
  }
  return true;
}

bool replace_text(PyObject** place, PyObject* text) {
  if (text == nullptr || text == Py_None) return true;
  if (!PyUnicode_Check(text)) {
    PyErr_Format(PyExc_TypeError, "name and layer of a span must be str; got %R", text);
    return false;
  }
  Py_XSETREF(*place, Py_NewRef(text));
  return true;
}

template <class T>
bool replace_number(T* place, PyObject* number) {
  if (number == nullptr || number == Py_None) return true;
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred()) return false;
  *place = static_cast<T>(value);
  return true;
}

// --- Open ---

PyObject* open_enter(PyObject* self, PyObject*) {
  Open* open = as_open(self);
  Recorder* recorder = open->recorder;
  if (recorder->enabled) {
    uint32_t name = 0, layer = 0;
    if (!number_of(recorder, open->name, &name) || !number_of(recorder, open->layer, &layer)) return nullptr;
    const int background = is_background(recorder);
    if (background < 0) return nullptr;
    recorder->writer.begin(open->span, name, layer, background, static_cast<int32_t>(recorder->step), recorder->micro);
    if (on_device(open)) {
      PyObject* done = PyObject_CallMethod(recorder->device, "begun", "O", self);
      if (done == nullptr) return nullptr;
      Py_DECREF(done);
    }
  }
  return Py_NewRef(self);
}

PyObject* open_exit(PyObject* self, PyObject* const*, Py_ssize_t) {
  Open* open = as_open(self);
  if (open->span.index >= 0) {
    if (on_device(open)) {
      PyObject* done = PyObject_CallMethod(open->recorder->device, "ended", "O", self);
      if (done == nullptr) return nullptr;
      Py_DECREF(done);
    }
    open->recorder->writer.end(open->span);
  }
  return none();
}

PyObject* open_put_rows(PyObject* self, PyObject* arguments) {
  PyObject* rows = nullptr;
  long long nbytes = 0;
  if (!PyArg_ParseTuple(arguments, "OL:put_rows", &rows, &nbytes)) return nullptr;
  Open* open = as_open(self);
  open->span.nbytes = nbytes;
  if (open->span.index < 0) return none();
  PyObject* sequence = PySequence_Fast(rows, "rows must be a sequence");
  if (sequence == nullptr) return nullptr;
  std::vector<uint32_t> words(static_cast<size_t>(PySequence_Fast_GET_SIZE(sequence)));
  int64_t sum = 0;
  for (size_t n = 0; n < words.size(); ++n) {
    const long long value = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(sequence, static_cast<Py_ssize_t>(n)));
    words[n] = static_cast<uint32_t>(value);
    sum += value;
  }
  Py_DECREF(sequence);
  if (PyErr_Occurred()) return nullptr;
  open->recorder->writer.put_rows(open->span, words.data(), static_cast<int64_t>(words.size()), sum);
  return none();
}

PyObject* open_put(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  Open* open = as_open(self);
  PyObject* parsed[5] = {};
  if (positional != 0) {
    PyErr_SetString(PyExc_TypeError, "put() takes keyword arguments only: name, layer, peer, nbytes");
    return nullptr;
  }
  if (!keywords(values, names, parsed)) return nullptr;
  if (!replace_text(&open->layer, parsed[0]) || !replace_number(&open->span.peer, parsed[2]) ||
      !replace_number(&open->span.nbytes, parsed[3]) || !replace_text(&open->name, parsed[4])) {
    return nullptr;
  }
  if (open->span.index < 0) return none();
  uint32_t name = 0, layer = 0;
  if (!number_of(open->recorder, open->name, &name) || !number_of(open->recorder, open->layer, &layer)) return nullptr;
  open->recorder->writer.put(open->span, name, layer, open->recorder->micro);
  return none();
}

PyObject* open_put_device(PyObject* self, PyObject* arguments) {
  long long begin_ns = 0, end_ns = 0;
  if (!PyArg_ParseTuple(arguments, "LL:put_device", &begin_ns, &end_ns)) return nullptr;
  as_open(self)->recorder->writer.put_device(as_open(self)->span, begin_ns, end_ns);
  return none();
}

void open_dealloc(PyObject* self) {
  Open* open = as_open(self);
  PyTypeObject* type = Py_TYPE(self);
  Py_XDECREF(reinterpret_cast<PyObject*>(open->recorder));
  Py_XDECREF(open->name);
  Py_XDECREF(open->layer);
  PyObject_Free(self);
  Py_DECREF(type);
}

constexpr Py_ssize_t kSpanAt = offsetof(Open, span);

PyMemberDef open_members[] = {
    {"name", T_OBJECT_EX, offsetof(Open, name), READONLY, nullptr},
    {"layer", T_OBJECT_EX, offsetof(Open, layer), READONLY, nullptr},
    {"kind", T_INT, kSpanAt + offsetof(Span, kind), READONLY, nullptr},
    {"group", T_UINT, kSpanAt + offsetof(Span, group), READONLY, nullptr},
    {"peer", T_INT, kSpanAt + offsetof(Span, peer), READONLY, nullptr},
    {"nbytes", T_LONGLONG, kSpanAt + offsetof(Span, nbytes), READONLY, nullptr},
    {"index", T_LONGLONG, kSpanAt + offsetof(Span, index), READONLY, nullptr},
    {"begin_ns", T_LONGLONG, kSpanAt + offsetof(Span, begin_ns), READONLY, nullptr},
    {},
};

template <class F>
PyCFunction method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef open_methods[] = {
    {"__enter__", open_enter, METH_NOARGS, nullptr},
    {"__exit__", method(open_exit), METH_FASTCALL, nullptr},
    {"put_rows", open_put_rows, METH_VARARGS, nullptr},
    {"put", method(open_put), METH_FASTCALL | METH_KEYWORDS, nullptr},
    {"put_device", open_put_device, METH_VARARGS, nullptr},
    {},
};

PyType_Slot open_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(open_dealloc)},
    {Py_tp_members, open_members},
    {Py_tp_methods, open_methods},
    {Py_tp_doc, const_cast<char*>("A span, as a context manager.")},
    {0, nullptr},
};

PyType_Spec open_spec = {"moe_comm._C.Open", sizeof(Open), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                         open_slots};

// --- Recorder ---

PyObject* recorder_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  Recorder* recorder = as_recorder(self);
  new (&recorder->writer) SpanWriter();
  recorder->names = PyDict_New();
  recorder->enabled = 1;
  return self;
}

// The buffer starts with the header and the names. The caller has checked that `records` records fit after them.
PyObject* recorder_bind(PyObject* self, PyObject* arguments) {
  Recorder* recorder = as_recorder(self);
  PyObject* buffer = nullptr;
  long long records = 0;
  unsigned long main_thread = 0;
  if (!PyArg_ParseTuple(arguments, "OLk:_bind", &buffer, &records, &main_thread)) return nullptr;
  Py_buffer view;
  if (PyObject_GetBuffer(buffer, &view, PyBUF_WRITABLE) != 0) return nullptr;
  if (recorder->view.obj != nullptr) PyBuffer_Release(&recorder->view);
  recorder->view = view;
  recorder->main_thread = main_thread;
  recorder->writer.bind(static_cast<char*>(view.buf), records);
  return none();
}

PyObject* recorder_span(PyObject* self, PyObject* const* values, Py_ssize_t positional, PyObject* names) {
  if (positional != 2) {
    PyErr_Format(PyExc_TypeError, "span() takes two positional arguments, kind and name; got %zd", positional);
    return nullptr;
  }
  PyObject* parsed[5] = {};
  if (!keywords(values + 2, names, parsed)) return nullptr;
  const long kind = PyLong_AsLong(values[0]);
  if (kind == -1 && PyErr_Occurred()) return nullptr;
  if (kind < 0 || kind >= kSpanKinds) {
    PyErr_Format(PyExc_ValueError, "the kind of a span must be 0 to %d; got %ld", kSpanKinds - 1, kind);
    return nullptr;
  }
  Open* open = PyObject_New(Open, open_type);
  if (open == nullptr) return nullptr;
  new (&open->span) Span();
  open->span.kind = static_cast<int>(kind);
  open->recorder = as_recorder(Py_NewRef(self));
  open->name = Py_NewRef(no_text);
  open->layer = Py_NewRef(no_text);
  if (!replace_text(&open->name, values[1]) || !replace_text(&open->layer, parsed[0]) ||
      !replace_number(&open->span.group, parsed[1]) || !replace_number(&open->span.peer, parsed[2]) ||
      !replace_number(&open->span.nbytes, parsed[3])) {
    Py_DECREF(open);
    return nullptr;
  }
  return reinterpret_cast<PyObject*>(open);
}

PyObject* recorder_begin_step(PyObject* self, PyObject* step) {
  Recorder* recorder = as_recorder(self);
  recorder->step = PyLong_AsLongLong(step);
  if (PyErr_Occurred()) return nullptr;
  recorder->micro = 0;
  recorder->writer.begin_step(recorder->step);
  return none();
}

PyObject* recorder_reset_calls(PyObject* self, PyObject*) {
  as_recorder(self)->writer.reset_calls();
  return none();
}

// Return (ns by kind, bytes by kind, bytes by peer, bytes by group, rows). Kinds without spans are omitted.
PyObject* recorder_take(PyObject* self, PyObject*) {
  const SpanTotals totals = as_recorder(self)->writer.take();
  namespace py = pybind11;
  try {
    py::dict ns, nbytes, peers, groups;
    for (int kind = 0; kind < kSpanKinds; ++kind) {
      if (totals.ns[kind] != 0) ns[py::int_(kind)] = totals.ns[kind];
      if (totals.nbytes[kind] != 0) nbytes[py::int_(kind)] = totals.nbytes[kind];
    }
    for (const auto& [peer, sent] : totals.peers) peers[py::int_(peer)] = sent;
    for (const auto& [group, sent] : totals.groups) groups[py::int_(group)] = sent;
    return py::make_tuple(ns, nbytes, peers, groups, totals.rows).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
    return nullptr;
  }
}

int recorder_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(as_recorder(self)->names);
  Py_VISIT(as_recorder(self)->device);
  return 0;
}

int recorder_clear(PyObject* self) {
  Py_CLEAR(as_recorder(self)->device);
  return 0;
}

void recorder_dealloc(PyObject* self) {
  Recorder* recorder = as_recorder(self);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  Py_XDECREF(recorder->device);
  Py_XDECREF(recorder->names);
  if (recorder->view.obj != nullptr) PyBuffer_Release(&recorder->view);
  recorder->writer.~SpanWriter();
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef recorder_members[] = {
    {"step", T_LONGLONG, offsetof(Recorder, step), 0, nullptr},
    {"micro", T_INT, offsetof(Recorder, micro), 0, nullptr},
    {"enabled", T_BOOL, offsetof(Recorder, enabled), 0, nullptr},
    {"device", T_OBJECT, offsetof(Recorder, device), 0, nullptr},
    {"_names", T_OBJECT_EX, offsetof(Recorder, names), READONLY, nullptr},
    {},
};

PyMethodDef recorder_methods[] = {
    {"span", method(recorder_span), METH_FASTCALL | METH_KEYWORDS,
     "Return a span as a context manager. With ``group`` it is counted as the next call of the group."},
    {"_bind", recorder_bind, METH_VARARGS, nullptr},
    {"_begin_step", recorder_begin_step, METH_O, nullptr},
    {"_reset_calls", recorder_reset_calls, METH_NOARGS, nullptr},
    {"_take", recorder_take, METH_NOARGS, nullptr},
    {},
};

PyType_Slot recorder_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(recorder_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(recorder_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(recorder_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(recorder_clear)},
    {Py_tp_members, recorder_members},
    {Py_tp_methods, recorder_methods},
    {Py_tp_doc, const_cast<char*>("Writes spans into a region; moe_comm.runtime.events.EventRecorder prepares it.")},
    {0, nullptr},
};

PyType_Spec recorder_spec = {"moe_comm._C.SpanRecorder", sizeof(Recorder), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC, recorder_slots};

}  // namespace

void bind_spans(pybind11::module_& m) {
  namespace py = pybind11;
  const char* words[5] = {"layer", "group", "peer", "nbytes", "name"};
  for (int n = 0; n < 5; ++n) keyword_names[n] = PyUnicode_InternFromString(words[n]);
  no_text = PyUnicode_InternFromString("");
  for (auto [name, spec] : {std::pair{"Open", &open_spec}, std::pair{"SpanRecorder", &recorder_spec}}) {
    py::object type = py::reinterpret_steal<py::object>(PyType_FromSpec(spec));
    if (!type) throw py::error_already_set();
    m.attr(name) = type;
    if (spec == &open_spec) open_type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
  }
}

}  // namespace moe_comm
