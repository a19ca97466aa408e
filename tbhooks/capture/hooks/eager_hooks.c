/* The hooks of plain CPU tensors in C, for CPython's stable ABI (see eager_hooks.py).
 *
 * A hook does here what Observer.on_output and GradientReader.on_gradient do in Python for the common case: a training
 * forward whose recorder is decided, or a backward that has begun, and a dense tensor on the CPU. In any other case it
 * calls the hook in Python. All decisions are made there: `Lane` is opened by Python for one forward or one backward,
 * and closed as soon as anything happens that could change a decision.
 *
 * Nothing of torch is linked. A tensor's memory is described by torch's DLPack exchange functions. */
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>

/* The part of DLPack 1.x that is used: struct DLTensor, and the table of functions up to the one that is called. */
typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *previous;
    void *allocate, *from_object, *to_object;
    int (*describe)(void *tensor, DLTensor *out);
    void *stream;
} Exchange;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_MAJOR = 1 };
enum { F32, F64, BF16, F16 };                     /* as in kernel.c */
enum { LARGE = 8192, MOST_RECENT = 256 };         /* LARGE: from here on the GIL is released */
static const int64_t MOST_COUNT = 2147483647;     /* as in recorder.py */
static const uint64_t NO_OFFSET = 1ULL << 40;     /* an address from here on is one: no storage has so many bytes */

typedef int ReduceFunction(const void *, int64_t, int64_t, double *, int32_t *, int64_t);
typedef int AliveFunction(const char *, int64_t, int64_t, int64_t, int64_t, float *);

static struct {
    PyObject *site_numbers, *nothing, *training, *evaluates, *requires_grad, *modules, *parameters, *grad_fn, *backward_hooks, *register_hook_dict, *version, *hooked, *busy_thread;
} names;

static PyTypeObject *gradient_hook_type;

/* A table that Python and C add to: how many rows are used, how many there are, and the address of the first
 * (calls.py, device_buffer.py). Read and changed while the recorder's lock and the GIL are held. */
typedef struct {
    int64_t used, room, address;
} Header;

/* ---- The lane: what is decided for the running forward or backward of one watch. ---- */

typedef struct {
    PyObject_HEAD
    /* Set once, by eager_hooks.py. */
    PyObject *tensor_type, *parameter_type, *can_read, *new_hooks, *running_backward, *tracing_state, *count_modes, *threads;
    PyObject *is_neg, *storage_offset, *is_view;
    PyObject *report, *unseen, *key, *gradient_reader, *read_gradient, *on_units, *on_failure;
    Exchange *exchange;
    ReduceFunction *reduce;
    AliveFunction *find_alive;
    /* The open forward. */
    PyObject *model, *forward, *context, *called, *recent, *gradient_hooks, *entries;
    float *units;
    int64_t units_length, units_used;
    /* The open backward. */
    PyObject *backward_context, *running, *reached;
    /* Where both record. */
    PyObject *headers, *owners, *acquire, *release;
    Header *calls, *buffer;
    int64_t number, row_bytes, record_bytes;
    int with_buckets, is_hooked; /* is_hooked: `hooked` of the open forward is True */
    unsigned long thread;
    int64_t fired, nanoseconds;
} Lane;

#define EACH_SETTING(DO)                                                                                         \
    DO(tensor_type) DO(parameter_type) DO(can_read) DO(new_hooks) DO(running_backward) DO(tracing_state) DO(count_modes)         \
    DO(threads) DO(is_neg) DO(storage_offset) DO(is_view) DO(report) DO(unseen) DO(key)         \
    DO(gradient_reader) DO(read_gradient) DO(on_units) DO(on_failure)
#define EACH_STATE(DO)                                                                                           \
    DO(model) DO(forward) DO(context) DO(called) DO(recent) DO(gradient_hooks) DO(entries) DO(backward_context) DO(running)  \
    DO(reached) DO(headers) DO(owners) DO(acquire) DO(release)

#define CLEAR(name) Py_CLEAR(self->name);
#define VISIT(name) Py_VISIT(self->name);

static int Lane_traverse(Lane *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    EACH_SETTING(VISIT)
    EACH_STATE(VISIT)
    return 0;
}

static int Lane_clear(Lane *self) {
    EACH_SETTING(CLEAR)
    EACH_STATE(CLEAR)
    return 0;
}

static void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static void Lane_dealloc(Lane *self) {
    PyObject_GC_UnTrack(self);
    Lane_clear(self);
    free_object((PyObject *)self);
}

#define SETTING(name) {#name, T_OBJECT_EX, offsetof(Lane, name), 0, NULL},
static PyMemberDef Lane_members[] = {EACH_SETTING(SETTING){NULL}};

/* use(exchange, reduce, find_alive): the capsule of torch, and the addresses of two functions of the kernel. */
static PyObject *Lane_use(Lane *self, PyObject *args) {
    PyObject *capsule;
    unsigned long long reduce, find_alive;
    if (!PyArg_ParseTuple(args, "OKK", &capsule, &reduce, &find_alive)) return NULL;
    Exchange *exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->major != DL_MAJOR || !exchange->describe) {
        PyErr_SetString(PyExc_ValueError, "this version of DLPack is not known");
        return NULL;
    }
    self->exchange = exchange;
    self->reduce = (ReduceFunction *)(uintptr_t)reduce;
    self->find_alive = (AliveFunction *)(uintptr_t)find_alive;
    Py_RETURN_NONE;
}

#define SET_IN(object, name, value)                                                                              \
    do {                                                                                                         \
        PyObject *old_ = (object)->name;                                                                         \
        (object)->name = Py_NewRef(value);                                                                       \
        Py_XDECREF(old_);                                                                                        \
    } while (0)
#define SET(name, value) SET_IN(self, name, value)

/* Where to record, as Recorder.cpu_place returns it. `headers` keeps both headers alive. */
static int set_destination(Lane *self, PyObject *place) {
    PyObject *headers, *owners, *acquire, *release;
    unsigned long long calls, buffer;
    long long number, row_bytes, record_bytes;
    int with_buckets;
    if (!PyArg_ParseTuple(place, "OO!OOKKLLLp", &headers, &PyList_Type, &owners, &acquire, &release, &calls, &buffer,
                          &number, &row_bytes, &record_bytes, &with_buckets))
        return -1;
    SET(headers, headers);
    SET(owners, owners);
    SET(acquire, acquire);
    SET(release, release);
    self->calls = (Header *)(uintptr_t)calls, self->buffer = (Header *)(uintptr_t)buffer;
    self->number = number, self->row_bytes = row_bytes, self->record_bytes = record_bytes;
    self->with_buckets = with_buckets;
    self->thread = PyThread_get_thread_ident();
    return 0;
}

/* open_forward(place, units, model, forward, context, called, recent, gradient_hooks); the model as a weak reference. */
static PyObject *Lane_open_forward(Lane *self, PyObject *args) {
    PyObject *place, *units, *entries, *model, *forward, *context, *called, *recent, *gradient_hooks;
    unsigned long long address;
    long long length, used;
    if (!PyArg_ParseTuple(args, "OOOOOOO!O!", &place, &units, &model, &forward, &context, &called, &PyDict_Type, &recent,
                          &PyList_Type, &gradient_hooks) ||
        !PyArg_ParseTuple(units, "O!KLL", &PyList_Type, &entries, &address, &length, &used) ||
        set_destination(self, place))
        return NULL;
    SET(entries, entries);
    self->units = (float *)(uintptr_t)address, self->units_length = length, self->units_used = used;
    SET(model, model);
    SET(context, context);
    SET(called, called);
    SET(recent, recent);
    SET(gradient_hooks, gradient_hooks);
    SET(forward, forward);
    self->is_hooked = 0;
    Py_RETURN_NONE;
}

/* open_backward(place, context, running, reached): `reached` is a forward that is known to be reached by it. */
static PyObject *Lane_open_backward(Lane *self, PyObject *args) {
    PyObject *place, *context, *running, *reached;
    if (!PyArg_ParseTuple(args, "OOOO", &place, &context, &running, &reached) || set_destination(self, place))
        return NULL;
    SET(running, running);
    SET(reached, reached);
    SET(backward_context, context);
    Py_RETURN_NONE;
}

/* close() -> (hooks that were called, seconds in them) since it was opened. */
static PyObject *Lane_close(Lane *self, PyObject *Py_UNUSED(none)) {
    const int64_t fired = self->fired, nanoseconds = self->nanoseconds;
    self->fired = self->nanoseconds = 0;
    EACH_STATE(CLEAR)
    return Py_BuildValue("(Ld)", (long long)fired, 1e-9 * (double)nanoseconds);
}

static PyObject *Lane_is_open(Lane *self, void *Py_UNUSED(closure)) {
    return PyBool_FromLong(self->forward || self->backward_context);
}

static PyObject *Lane_describe(Lane *, PyObject *);

static PyMethodDef Lane_methods[] = {
    {"describe", (PyCFunction)Lane_describe, METH_VARARGS, NULL},
    {"use", (PyCFunction)Lane_use, METH_VARARGS, NULL},
    {"open_forward", (PyCFunction)Lane_open_forward, METH_VARARGS, NULL},
    {"open_backward", (PyCFunction)Lane_open_backward, METH_VARARGS, NULL},
    {"close", (PyCFunction)Lane_close, METH_NOARGS, NULL},
    {NULL},
};
static PyGetSetDef Lane_getset[] = {{"is_open", (getter)Lane_is_open, NULL, NULL, NULL}, {NULL}};
static PyType_Slot Lane_slots[] = {
    {Py_tp_traverse, Lane_traverse}, {Py_tp_clear, Lane_clear},     {Py_tp_dealloc, Lane_dealloc},
    {Py_tp_members, Lane_members},   {Py_tp_methods, Lane_methods}, {Py_tp_getset, Lane_getset},
    {Py_tp_new, PyType_GenericNew},  {0, NULL},
};
static PyType_Spec Lane_spec = {
    "tbhooks.capture.hooks._eager_hooks.Lane", sizeof(Lane), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Lane_slots};

/* ---- Small calls. Each returns -1 with an exception set if it fails. ---- */

static int is_true(PyObject *result) {
    if (!result) return -1;
    const int truth = PyObject_IsTrue(result);
    Py_DECREF(result);
    return truth;
}

static int ask(PyObject *function, PyObject *of) { return is_true(PyObject_CallFunctionObjArgs(function, of, NULL)); }

static int has(PyObject *object, PyObject *name) { return is_true(PyObject_GetAttr(object, name)); }

/* An attribute of a module. As PyObject_GetAttr, which first looks for __getattribute__ in the class of a module. */
static PyObject *of_module(PyObject *module, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(module, name);
    if (found || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
    PyErr_Clear();
    return PyObject_GetAttr(module, name);
}

static int is_none(PyObject *result) {
    if (!result) return -1;
    Py_DECREF(result);
    return result == Py_None;
}

static long long as_number(PyObject *result) {
    if (!result) return -1;
    const long long number = PyLong_AsLongLong(result);
    Py_DECREF(result);
    return number;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ---- Reading one tensor. ---- */

typedef struct {
    const char *data;
    int64_t size, dtype;
    DLTensor described;
} View;

/* Whether the kernel can read the tensor, as cpu.can_read: 1, 0, or -1 with an exception. */
static int view(Lane *lane, PyObject *tensor, View *out) {
    DLTensor *d = &out->described;
    PyObject *type = (PyObject *)Py_TYPE(tensor);
    if (type != lane->tensor_type && type != lane->parameter_type) return 0;
    if (lane->exchange->describe(tensor, d)) { /* without memory, or of another layout */
        PyErr_Clear();
        return 0;
    }
    if (d->device_type != DL_CPU || d->lanes != 1 || !d->data || d->byte_offset) return 0;
    if (d->code == DL_FLOAT && d->bits == 32)
        out->dtype = F32;
    else if (d->code == DL_FLOAT && d->bits == 64)
        out->dtype = F64;
    else if (d->code == DL_BFLOAT && d->bits == 16)
        out->dtype = BF16;
    else if (d->code == DL_FLOAT && d->bits == 16)
        out->dtype = F16;
    else
        return 0;
    int64_t size = 1;
    for (int i = d->ndim - 1; i >= 0; i--) {
        if (d->shape[i] != 1 && d->strides[i] != size) return 0;
        size *= d->shape[i];
    }
    if (size < 1 || size > MOST_COUNT) return 0;
    out->data = d->data, out->size = size;
    const int negated = ask(lane->is_neg, tensor);
    if (negated) return negated < 0 ? -1 : 0;
    /* At an offset there need not be any memory: in a storage that was freed, the address is the offset in bytes. */
    if ((uint64_t)(uintptr_t)d->data >= NO_OFFSET) return 1;
    const long long offset = as_number(PyObject_CallFunctionObjArgs(lane->storage_offset, tensor, NULL));
    if (offset < 0) return -1;
    return offset == 0 ? 1 : ask(lane->can_read, tensor);
}

/* describe(tensors, table): writes address, size and type of each tensor of a list into a table of int64 at an address.
 * The type of those that the kernel cannot read is -1. */
static PyObject *Lane_describe(Lane *self, PyObject *args) {
    PyObject *tensors;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "O!K", &PyList_Type, &tensors, &address)) return NULL;
    int64_t *row = (int64_t *)(uintptr_t)address;
    const Py_ssize_t n = PyList_Size(tensors);
    for (Py_ssize_t i = 0; i < n && i < PyList_Size(tensors); i++, row += 3) {
        View read;
        PyObject *tensor = Py_NewRef(PyList_GetItem(tensors, i));
        const int fits = view(self, tensor, &read);
        Py_DECREF(tensor);
        if (fits < 0) return NULL;
        row[0] = fits ? (int64_t)(intptr_t)read.data : 0;
        row[1] = fits ? read.size : 0;
        row[2] = fits ? read.dtype : -1;
    }
    Py_RETURN_NONE;
}

/* Where a record goes. References of its own: while the GIL is released, another thread may close the lane. */
typedef struct {
    PyObject *headers, *owners, *release;
    Header *calls, *buffer;
    int64_t number, row_bytes, record_bytes;
    int with_buckets;
} Place;

static void drop_place(const Place *place) {
    Py_DECREF(place->headers);
    Py_DECREF(place->owners);
    Py_DECREF(place->release);
}

static int reduce_large(Lane *lane, const View *read, char *row, int32_t *counts) {
    const long long threads = as_number(PyObject_CallNoArgs(lane->threads));
    if (threads < 0) return -1;
    /* As Report.enter does: others see that this thread is at work while the GIL is released. */
    PyObject *report = Py_NewRef(lane->report), *busy = PyObject_GetAttr(report, names.busy_thread), *thread = NULL;
    ReduceFunction *reduce = lane->reduce;
    int failed = !busy;
    if (busy == Py_None) {
        thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        failed = !thread || PyObject_SetAttr(report, names.busy_thread, thread);
    }
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = reduce(read->data, read->size, read->dtype, (double *)row, counts, threads);
        Py_END_ALLOW_THREADS
    }
    if (thread && PyObject_SetAttr(report, names.busy_thread, Py_None)) failed = 1;
    Py_XDECREF(thread);
    Py_XDECREF(busy);
    Py_DECREF(report);
    return failed;
}

/* What a site is recorded with: a tensor that is to be reduced, or the record of one that was. */
typedef struct {
    const View *read; /* NULL if it was reduced before */
    int64_t buffer, record;
} Source;

/* As Calls.append: 0, or -1 with an exception. */
static int append(const Place *place, int64_t site, const Source *source, PyObject *owner) {
    if (PyList_Append(place->owners, owner)) return -1;
    int64_t *row = (int64_t *)(intptr_t)place->calls->address + 4 * place->calls->used++;
    row[0] = site, row[1] = source->buffer, row[2] = source->record, row[3] = source->record + 1;
    return 0;
}

static int reduce_into(Lane *lane, const Place *place, Source *source) {
    const View *read = source->read;
    source->buffer = place->number, source->record = place->buffer->used++;
    char *row = (char *)(intptr_t)place->buffer->address + source->record * place->record_bytes;
    int32_t *counts = place->with_buckets ? (int32_t *)(row + place->row_bytes) : NULL;
    const int failed = read->size >= LARGE
                           ? reduce_large(lane, read, row, counts)
                           : lane->reduce(read->data, read->size, read->dtype, (double *)row, counts, 1);
    if (failed && !PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the kernel refused its arguments");
    return failed ? -1 : 0;
}

/* `sites` is the number of a site, or a list of them. */
static int record_into(Lane *lane, const Place *place, Source *source, PyObject *sites, PyObject *owner) {
    const Py_ssize_t n = PyList_Check(sites) ? PyList_Size(sites) : 1;
    if (place->calls->used + n > place->calls->room) return 0;
    if (source->read && place->buffer->used >= place->buffer->room) return 0;
    if (source->read && reduce_into(lane, place, source)) return -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *site = PyList_Check(sites) ? PyList_GetItem(sites, i) : sites;
        const long long number = site ? PyLong_AsLongLong(site) : -1;
        if (number == -1 && PyErr_Occurred()) return -1;
        if (append(place, number, source, owner)) return -1;
    }
    return 1;
}

/* As Recorder.record for a plain tensor, and Recorder.share for other sites: 1, 0 if it has to be done in Python, or -1.
 * `open` is the forward or the context of the backward that the caller reads for: another thread may have closed the
 * lane since. */
static int record_source(Lane *lane, PyObject *open, Source *source, PyObject *sites, PyObject *owner) {
    if (lane->forward != open && lane->backward_context != open) return 0;
    const Place place = {Py_NewRef(lane->headers), Py_NewRef(lane->owners), Py_NewRef(lane->release),
                         lane->calls,              lane->buffer,            lane->number,
                         lane->row_bytes,          lane->record_bytes,      lane->with_buckets};
    PyObject *acquire = Py_NewRef(lane->acquire), *acquired = PyObject_CallNoArgs(acquire); /* may wait for a thread */
    Py_DECREF(acquire);
    if (!acquired) {
        drop_place(&place);
        return -1;
    }
    Py_DECREF(acquired);
    const int is_open = lane->forward == open || lane->backward_context == open;
    int done = is_open ? record_into(lane, &place, source, sites, owner) : 0;
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *released = PyObject_CallNoArgs(place.release);
    if (!released) done = -1;
    if (type) PyErr_Restore(type, error, trace);
    Py_XDECREF(released);
    drop_place(&place);
    return done;
}

/* Whether this is the thread that the lane was opened in. */
static int is_own_thread(const Lane *lane) { return lane->thread == PyThread_get_thread_ident(); }

/* Reports the exception that is set, as Observer._on_failure does. Training never sees it. */
static void report_failure(Lane *lane, PyObject *hook) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *done = PyObject_CallFunctionObjArgs(lane->on_failure, hook, error ? error : Py_None, NULL);
    if (!done) PyErr_Clear();
    Py_XDECREF(done);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* ---- The hook on a tensor. The attributes are those of hook_types.GradientHook. ---- */

typedef struct {
    PyObject_HEAD
    PyObject *lane, *observer, *step, *failure;
    PyObject *site, *pass;    /* the only ones, as long as there are no lists */
    PyObject *sites, *passes; /* lists, made when Python asks for them */
    long long buffer, record, version; /* where the tensor was recorded, and its version then */
    char fired, is_view;
} GradientHook;

#define EACH_OF_GRADIENT(DO) DO(lane) DO(observer) DO(step) DO(failure) DO(site) DO(pass) DO(sites) DO(passes)

static int GradientHook_traverse(GradientHook *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    EACH_OF_GRADIENT(VISIT)
    return 0;
}

static int GradientHook_clear(GradientHook *self) {
    EACH_OF_GRADIENT(CLEAR)
    return 0;
}

static void GradientHook_dealloc(GradientHook *self) {
    PyObject_GC_UnTrack(self);
    GradientHook_clear(self);
    free_object((PyObject *)self);
}

static PyMemberDef GradientHook_members[] = {
    {"observer", T_OBJECT_EX, offsetof(GradientHook, observer), 0, NULL},
    {"step", T_OBJECT_EX, offsetof(GradientHook, step), 0, NULL},
    {"failure", T_OBJECT_EX, offsetof(GradientHook, failure), 0, NULL},
    {"fired", T_BOOL, offsetof(GradientHook, fired), 0, NULL},
    {"is_view", T_BOOL, offsetof(GradientHook, is_view), 0, NULL},
    {"version", T_LONGLONG, offsetof(GradientHook, version), READONLY, NULL},
    {NULL},
};

/* The list with the one object, made when it is first asked for. */
static PyObject *as_list(PyObject **list, PyObject *only) {
    if (!*list && only) {
        if (!(*list = PyList_New(1))) return NULL;
        PyList_SetItem(*list, 0, Py_NewRef(only));
    }
    if (!*list) PyErr_SetString(PyExc_AttributeError, "this hook was cleared");
    return Py_XNewRef(*list);
}

static PyObject *GradientHook_sites(GradientHook *self, void *Py_UNUSED(closure)) {
    return as_list(&self->sites, self->site);
}

static PyObject *GradientHook_passes(GradientHook *self, void *Py_UNUSED(closure)) {
    return as_list(&self->passes, self->pass);
}

/* The record of the tensor, as a span of Recorder. */
static PyObject *GradientHook_span(GradientHook *self, void *Py_UNUSED(closure)) {
    return Py_BuildValue("(LLL)", self->buffer, self->record, self->record + 1);
}

static PyGetSetDef GradientHook_getset[] = {
    {"span", (getter)GradientHook_span, NULL, NULL, NULL},
    {"sites", (getter)GradientHook_sites, NULL, NULL, NULL},
    {"passes", (getter)GradientHook_passes, NULL, NULL, NULL},
    {NULL},
};

/* Whether all forwards that returned the tensor are this one. */
static int are_all(const GradientHook *self, const PyObject *pass) {
    if (!self->passes) return self->pass == pass;
    const Py_ssize_t n = PyList_Size(self->passes);
    for (Py_ssize_t i = 0; i < n; i++)
        if (PyList_GetItem(self->passes, i) != pass) return 0;
    return n > 0;
}

/* 1 if the gradient was read, 0 if it has to be read in Python, -1 with an exception. */
static int read_gradient(Lane *lane, GradientHook *self, PyObject *gradient) {
    View read;
    Source source = {&read, 0, 0};
    if (!lane->backward_context || self->step != lane->backward_context) return 0;
    PyObject *sites = self->sites ? self->sites : self->site;
    if (!sites || !are_all(self, lane->reached)) return 0;
    /* References of its own: what is called below may run Python, and another thread may close the lane. */
    PyObject *running = Py_NewRef(lane->running);
    Py_INCREF(sites);
    int fits = is_own_thread(lane) ? view(lane, gradient, &read) : 0;
    if (fits > 0) {
        self->fired = 1;
        fits = record_source(lane, self->step, &source, sites, running);
    }
    Py_DECREF(running);
    Py_DECREF(sites);
    return fits;
}

static PyObject *GradientHook_call(GradientHook *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *gradient = PyTuple_Size(args) == 1 ? PyTuple_GetItem(args, 0) : NULL;
    Lane *lane = (Lane *)self->lane;
    if (!gradient) {
        PyErr_SetString(PyExc_TypeError, "a gradient hook takes one argument");
        return NULL;
    }
    if (gradient == Py_None) Py_RETURN_NONE;
    const int64_t started = now();
    const int done = read_gradient(lane, self, gradient);
    if (done > 0) {
        lane->fired++;
        lane->nanoseconds += now() - started;
        Py_RETURN_NONE;
    }
    if (done < 0) {
        report_failure(lane, (PyObject *)self);
        Py_RETURN_NONE;
    }
    return PyObject_CallFunctionObjArgs(lane->read_gradient, self, gradient, NULL);
}

static PyType_Slot GradientHook_slots[] = {
    {Py_tp_traverse, GradientHook_traverse}, {Py_tp_clear, GradientHook_clear}, {Py_tp_dealloc, GradientHook_dealloc},
    {Py_tp_members, GradientHook_members},   {Py_tp_call, GradientHook_call},   {Py_tp_getset, GradientHook_getset},
    {0, NULL},
};
static PyType_Spec GradientHook_spec = {
    "tbhooks.capture.hooks._eager_hooks.EagerGradientHook", sizeof(GradientHook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, GradientHook_slots};

/* ---- The hook on a module. ---- */

/* A module keeps the hooks that it put on its outputs, with their dictionaries, and puts the same ones on the outputs of
 * later steps: two, because the graph of a step often lives until the forward of the next one has ended. */
enum { SPARES = 2 };

typedef struct {
    PyObject_HEAD
    PyObject *lane, *hook, *path, *site, *gradient_site, *units;
    PyObject *spare[SPARES]; /* dictionaries, each with one hook in it */
    char is_ready, next_spare;
} ForwardHook;

#define EACH_OF_FORWARD(DO) DO(lane) DO(hook) DO(path) DO(site) DO(gradient_site) DO(units) DO(spare[0]) DO(spare[1])

static int ForwardHook_traverse(ForwardHook *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    EACH_OF_FORWARD(VISIT)
    return 0;
}

static int ForwardHook_clear(ForwardHook *self) {
    EACH_OF_FORWARD(CLEAR)
    return 0;
}

static void ForwardHook_dealloc(ForwardHook *self) {
    PyObject_GC_UnTrack(self);
    ForwardHook_clear(self);
    free_object((PyObject *)self);
}

/* A hook that nobody else knows any more, with its dictionary: that of an earlier step, or a new one. A new reference to
 * the dictionary, a borrowed one to the hook. */
static PyObject *take_spare(Lane *lane, ForwardHook *self, GradientHook **hook) {
    for (int i = 0; i < SPARES; i++) {
        PyObject *kept = self->spare[i];
        if (!kept || Py_REFCNT(kept) != 1 || PyDict_Size(kept) != 1) continue;
        *hook = (GradientHook *)PyDict_GetItemWithError(kept, lane->key);
        if (*hook && Py_REFCNT((PyObject *)*hook) == 1) return Py_NewRef(kept);
        if (PyErr_Occurred()) return NULL;
    }
    PyObject *made = PyObject_CallNoArgs(lane->new_hooks);
    *hook = made ? (GradientHook *)PyType_GenericAlloc(gradient_hook_type, 0) : NULL;
    const int failed = !*hook || PyObject_SetItem(made, lane->key, (PyObject *)*hook);
    Py_XDECREF((PyObject *)*hook); /* the dictionary has it */
    if (failed) {
        Py_XDECREF(made);
        return NULL;
    }
    const int i = self->next_spare;
    self->next_spare = (char)((i + 1) % SPARES);
    PyObject *old = self->spare[i];
    self->spare[i] = Py_NewRef(made);
    Py_XDECREF(old);
    return made;
}

/* The open forward, with references of its own: what a hook calls may run Python or release the GIL, and then another
 * thread may close the lane. */
typedef struct {
    PyObject *model, *forward, *context, *called, *recent, *gradient_hooks;
} Open;

static void begin_hook(Lane *lane, GradientHook *hook, const Open *open, PyObject *site, int is_view) {
    SET_IN(hook, lane, (PyObject *)lane);
    SET_IN(hook, observer, lane->gradient_reader);
    SET_IN(hook, step, open->context);
    SET_IN(hook, failure, names.nothing);
    SET_IN(hook, site, site);
    SET_IN(hook, pass, open->forward);
    Py_CLEAR(hook->sites);
    Py_CLEAR(hook->passes);
    hook->fired = 0, hook->is_view = (char)is_view;
}

/* This forward has a gradient whose arrival would be noticed. */
static int mark_hooked(Lane *lane, const Open *open, int is_view) {
    if (is_view || (lane->is_hooked && lane->forward == open->forward)) return 0;
    if (PyObject_SetAttr(open->forward, names.hooked, Py_True)) return -1;
    lane->is_hooked = lane->forward == open->forward;
    return 0;
}

/* As GradientReader.hook for a tensor that is no leaf. `hooks` are those that it has, or None. */
static GradientHook *hook_gradient(Lane *lane, const Open *open, ForwardHook *self, PyObject *tensor,
                                   PyObject *grad_fn, PyObject *hooks, int is_view) {
    GradientHook *hook;
    PyObject *own = take_spare(lane, self, &hook);
    if (!own) return NULL;
    Py_INCREF((PyObject *)hook);
    begin_hook(lane, hook, open, self->gradient_site, is_view);
    int failed;
    if (hooks != Py_None) {
        failed = PyObject_SetItem(hooks, lane->key, (PyObject *)hook);
    } else {
        failed = PyObject_SetAttr(tensor, names.backward_hooks, own);
        PyObject *done = failed ? NULL : PyObject_CallMethodObjArgs(grad_fn, names.register_hook_dict, tensor, NULL);
        Py_XDECREF(done);
        failed = !done;
    }
    Py_DECREF(own);
    failed = failed || PyList_Append(open->gradient_hooks, (PyObject *)hook) || mark_hooked(lane, open, is_view);
    if (!failed) return hook;
    Py_DECREF((PyObject *)hook);
    return NULL;
}

/* EagerHook(lane, hook, path): `hook` is the one in Python. Python sets `is_ready`, and the sites when it is asked. */
static int ForwardHook_init(ForwardHook *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *lane, *hook, *path;
    if (!PyArg_ParseTuple(args, "OOU", &lane, &hook, &path)) return -1;
    SET(lane, lane);
    SET(hook, hook);
    SET(path, path);
    SET(site, Py_None);
    SET(gradient_site, Py_None);
    SET(units, Py_None);
    return 0;
}

static PyMemberDef ForwardHook_members[] = {
    {"hook", T_OBJECT_EX, offsetof(ForwardHook, hook), READONLY, NULL},
    {"site", T_OBJECT_EX, offsetof(ForwardHook, site), 0, NULL},
    {"gradient_site", T_OBJECT_EX, offsetof(ForwardHook, gradient_site), 0, NULL},
    {"is_ready", T_BOOL, offsetof(ForwardHook, is_ready), 0, NULL},
    {"units", T_OBJECT_EX, offsetof(ForwardHook, units), 0, NULL}, /* the site of its dead units, or None */
    {NULL},
};

/* Whether the open forward is the one that runs, as ActiveStep.continued_forward: 1, 0, or -1 with an exception. */
static int is_continued(Lane *lane, const Open *open) {
    int fits;
    if (!is_own_thread(lane)) return 0;
    PyObject *model = PyWeakref_GetObject(open->model);
    if (!model || model == Py_None) return model ? 0 : -1;
    Py_INCREF(model);
    fits = is_true(of_module(model, names.training));
    Py_DECREF(model);
    if (fits <= 0) return fits;
    if ((fits = has(open->forward, names.evaluates))) return fits < 0 ? -1 : 0;
    if ((fits = is_none(PyObject_CallNoArgs(lane->tracing_state))) <= 0) return fits;
    if ((fits = is_true(PyObject_CallNoArgs(lane->count_modes)))) return fits < 0 ? -1 : 0;
    const long long backward = as_number(PyObject_CallNoArgs(lane->running_backward));
    if (backward == -1) return PyErr_Occurred() ? -1 : 1;
    return 0;
}

/* If this very tensor, which no gradient hook in C knows, was read a moment ago, notes where in `source`. Returns 1, 0 if
 * Python has to read it, or -1 with an exception. */
static int find_recent(const Open *open, PyObject *tensor, PyObject *version, Source *source) {
    PyObject *id = PyLong_FromVoidPtr(tensor), *entry = id ? PyDict_GetItemWithError(open->recent, id) : NULL;
    Py_XDECREF(id);
    if (!entry) return PyErr_Occurred() ? -1 : 1;
    if (PyWeakref_GetObject(PyTuple_GetItem(entry, 0)) != tensor) return 1;
    const int is_same = PyObject_RichCompareBool(PyTuple_GetItem(entry, 1), version, Py_EQ);
    if (is_same <= 0) return is_same ? -1 : 1;
    PyObject *span = PyTuple_GetItem(entry, 2);
    if (span == Py_None || PyTuple_GetItem(entry, 3) != Py_None) return 0;
    const long long number = PyLong_AsLongLong(PyTuple_GetItem(span, 0));
    const long long first = PyLong_AsLongLong(PyTuple_GetItem(span, 1)), last = PyLong_AsLongLong(PyTuple_GetItem(span, 2));
    if (PyErr_Occurred()) return -1;
    if (last != first + 1) return 0;
    source->read = NULL, source->buffer = number, source->record = first;
    return 1;
}

/* As StepContext.cache, for a tensor without a gradient hook. */
static int remember(PyObject *recent, PyObject *tensor, PyObject *version, long long buffer, long long record) {
    if (PyDict_Size(recent) > MOST_RECENT) PyDict_Clear(recent);
    PyObject *id = PyLong_FromVoidPtr(tensor), *weak = PyWeakref_NewRef(tensor, NULL);
    PyObject *span = Py_BuildValue("(LLL)", buffer, record, record + 1);
    PyObject *entry = weak && span ? PyTuple_Pack(4, weak, version, span, Py_None) : NULL;
    const int failed = !id || !entry || PyDict_SetItem(recent, id, entry);
    Py_XDECREF(id);
    Py_XDECREF(weak);
    Py_XDECREF(span);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}

/* What autograd knows of a tensor, and the hook in C that it has in this step. */
typedef struct {
    PyObject *grad_fn, *hooks;
    GradientHook *known;
    int is_view;
} Grad;

/* Finds the hook in C, of this step, of a tensor that has not changed since: 1 if there is one, 0, or -1. */
static int find_known(const Lane *lane, const Open *open, PyObject *version, Grad *grad, Source *source) {
    PyObject *found = PyObject_GetItem(grad->hooks, lane->key);
    if (!found) return -1;
    grad->known = (GradientHook *)found;
    if (Py_TYPE(found) != gradient_hook_type || grad->known->step != open->context) return 0;
    if (grad->known->version != PyLong_AsLongLong(version)) return 0;
    source->read = NULL, source->buffer = grad->known->buffer, source->record = grad->known->record;
    return 1;
}

/* Whether the gradient can be hooked here: 1 (with `grad_fn` set if it is to be hooked at all), 0, or -1. */
static int look_at_grad(Lane *lane, const Open *open, ForwardHook *self, PyObject *tensor, PyObject *version, Grad *grad,
                        Source *source) {
    int is;
    if (self->gradient_site == Py_None) return 1;
    /* If the base of a view was changed in place, torch makes a new grad_fn when it is read: before the hook. */
    if ((grad->is_view = ask(lane->is_view, tensor)) < 0) return -1;
    if (!(grad->grad_fn = PyObject_GetAttr(tensor, names.grad_fn))) return -1;
    if (grad->grad_fn == Py_None) { /* nothing to hook, or a leaf */
        Py_CLEAR(grad->grad_fn);
        return (is = has(tensor, names.requires_grad)) < 0 ? -1 : !is;
    }
    if (!(grad->hooks = PyObject_GetAttr(tensor, names.backward_hooks))) return -1;
    if (grad->hooks == Py_None) return 1;
    is = PySequence_Contains(grad->hooks, lane->key);
    if (is <= 0) return is ? -1 : 1;
    return find_known(lane, open, version, grad, source);
}

/* As DeadUnits.add. Units are in dimension 1, but of sequences, which Python looks at in both. */
static int count_units(Lane *lane, ForwardHook *self, PyObject *tensor, PyObject *forward, const View *read) {
    const DLTensor *d = &read->described;
    const int64_t width = d->ndim >= 2 ? d->shape[1] : 0;
    const int has_room = lane->forward == forward && width <= lane->units_length - lane->units_used;
    if (d->ndim < 2 || d->ndim == 3 || !has_room) {
        PyObject *added = PyObject_CallFunctionObjArgs(lane->on_units, self->hook, tensor, forward, NULL);
        Py_XDECREF(added);
        return added ? 0 : -1;
    }
    const int64_t inner = read->size / (d->shape[0] * width);
    if (lane->find_alive(read->data, read->dtype, d->shape[0], width, inner, lane->units + lane->units_used)) return -1;
    PyObject *entry = Py_BuildValue("(OOLLL)", forward, self->units, (long long)lane->units_used, (long long)width,
                                    (long long)(read->size / width));
    lane->units_used += width;
    const int failed = !entry || PyList_Append(lane->entries, entry);
    Py_XDECREF(entry);
    return failed ? -1 : 0;
}

/* Another module has returned a tensor that is hooked already. */
static int add_site(Lane *lane, const Open *open, GradientHook *known, PyObject *site) {
    PyObject *sites = as_list(&known->sites, known->site), *passes = as_list(&known->passes, known->pass);
    const int failed = !sites || !passes || PyList_Append(sites, site) || PyList_Append(passes, open->forward);
    Py_XDECREF(sites);
    Py_XDECREF(passes);
    return failed ? -1 : mark_hooked(lane, open, known->is_view);
}

static int read_tensor(Lane *lane, const Open *open, ForwardHook *self, PyObject *tensor, PyObject *version, Grad *grad,
                       Source *source, const View *read) {
    const int is_new = source->read != NULL;
    PyObject *site = Py_NewRef(self->site);
    int done = record_source(lane, open->forward, source, site, open->forward);
    Py_DECREF(site);
    if (done > 0 && PySet_Add(open->called, self->path)) done = -1;
    if (done > 0 && self->units != Py_None && count_units(lane, self, tensor, open->forward, read)) done = -1;
    if (done <= 0) return done;
    if (grad->known) return add_site(lane, open, grad->known, self->gradient_site) ? -1 : 1;
    if (!grad->grad_fn) {
        if (is_new && remember(open->recent, tensor, version, source->buffer, source->record)) return -1;
        return 1;
    }
    GradientHook *hook = hook_gradient(lane, open, self, tensor, grad->grad_fn, grad->hooks, grad->is_view);
    if (!hook) return -1;
    hook->buffer = source->buffer, hook->record = source->record, hook->version = PyLong_AsLongLong(version);
    if (hook->version == -1 && PyErr_Occurred()) done = -1;
    Py_DECREF((PyObject *)hook);
    return done;
}

static int read_open(Lane *lane, const Open *open, ForwardHook *self, PyObject *tensor) {
    View read;
    Source source = {&read, 0, 0};
    Grad grad = {NULL, NULL, NULL, 0};
    int fits = is_continued(lane, open);
    if (fits > 0) fits = view(lane, tensor, &read);
    if (fits > 0 && PyDict_Size(lane->unseen) > 0)
        fits = (fits = PyDict_Contains(lane->unseen, self->path)) < 0 ? -1 : !fits;
    if (fits <= 0) return fits;
    if (self->site == Py_None) { /* its first output: Python numbers its sites */
        PyObject *numbers = PyObject_CallMethodObjArgs(self->hook, names.site_numbers, names.nothing, tensor, NULL);
        if (!numbers) return -1;
        Py_DECREF(numbers);
        if (self->site == Py_None) return 0;
    }
    PyObject *version = PyObject_GetAttr(tensor, names.version);
    if (!version) { /* a tensor of inference mode has none */
        PyErr_Clear();
        return 0;
    }
    if (PyDict_Size(open->recent)) fits = find_recent(open, tensor, version, &source);
    if (fits > 0) fits = look_at_grad(lane, open, self, tensor, version, &grad, &source);
    if (fits > 0) fits = read_tensor(lane, open, self, tensor, version, &grad, &source, &read);
    Py_XDECREF(version);
    Py_XDECREF(grad.grad_fn);
    Py_XDECREF(grad.hooks);
    Py_XDECREF((PyObject *)grad.known);
    return fits;
}

/* 1 if the output was read, 0 if it has to be read in Python, -1 with an exception. Decides before it changes anything. */
static int read_output(Lane *lane, ForwardHook *self, PyObject *tensor) {
    if (!lane->forward) return 0;
    const Open open = {Py_NewRef(lane->model),  Py_NewRef(lane->forward), Py_NewRef(lane->context),
                       Py_NewRef(lane->called), Py_NewRef(lane->recent),  Py_NewRef(lane->gradient_hooks)};
    const int done = read_open(lane, &open, self, tensor);
    Py_DECREF(open.model);
    Py_DECREF(open.forward);
    Py_DECREF(open.context);
    Py_DECREF(open.called);
    Py_DECREF(open.recent);
    Py_DECREF(open.gradient_hooks);
    return done;
}

/* read(module, args, output): what torch calls a hook with. */
static PyObject *ForwardHook_read(ForwardHook *self, PyObject *const *args, Py_ssize_t n) {
    Lane *lane = (Lane *)self->lane;
    if (n != 3) {
        PyErr_SetString(PyExc_TypeError, "a forward hook takes three arguments");
        return NULL;
    }
    if (self->is_ready) {
        const int64_t started = now();
        const int done = read_output(lane, self, args[2]);
        if (done > 0) {
            lane->fired++;
            lane->nanoseconds += now() - started;
            Py_RETURN_NONE;
        }
        if (done < 0) {
            report_failure(lane, self->hook);
            Py_RETURN_NONE;
        }
    }
    return PyObject_CallFunctionObjArgs(self->hook, args[0], args[1], args[2], NULL);
}

static PyMethodDef ForwardHook_methods[] = {
    {"read", (PyCFunction)(void (*)(void))ForwardHook_read, METH_FASTCALL, NULL},
    {NULL},
};

static PyType_Slot ForwardHook_slots[] = {
    {Py_tp_traverse, ForwardHook_traverse}, {Py_tp_clear, ForwardHook_clear}, {Py_tp_dealloc, ForwardHook_dealloc},
    {Py_tp_members, ForwardHook_members}, {Py_tp_methods, ForwardHook_methods}, {Py_tp_init, ForwardHook_init},
    {Py_tp_new, PyType_GenericNew},         {0, NULL},
};
static PyType_Spec ForwardHook_spec = {
    "tbhooks.capture.hooks._eager_hooks.EagerForwardHook", sizeof(ForwardHook), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, ForwardHook_slots};

/* ---- Whether the structure of a model is unchanged (structure.py). ---- */

/* Whether a dictionary of a module has these names, and values with these ids, in this order: 1, 0, or -1. */
static int has_items(PyObject *module, PyObject *attribute, PyObject *keys, PyObject *ids) {
    PyObject *items = of_module(module, attribute), *key, *value;
    if (!items) return -1;
    int same = PyDict_Check(items) && PyDict_Size(items) == PyTuple_Size(keys);
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; same > 0 && PyDict_Next(items, &position, &key, &value); i++) {
        PyObject *known = PyTuple_GetItem(keys, i);
        same = value == PyLong_AsVoidPtr(PyList_GetItem(ids, i));
        if (same && key != known) same = PyUnicode_Check(key) && PyUnicode_Compare(key, known) == 0;
    }
    Py_DECREF(items);
    return PyErr_Occurred() ? -1 : same;
}

/* is_unchanged(known): a list of tuples as structure.py makes them. */
static PyObject *is_unchanged(PyObject *Py_UNUSED(module), PyObject *known) {
    if (!PyList_Check(known)) Py_RETURN_FALSE;
    for (Py_ssize_t i = 0; i < PyList_Size(known); i++) {
        PyObject *entry = PyList_GetItem(known, i), *module = PyWeakref_GetObject(PyTuple_GetItem(entry, 0));
        if (!module) return NULL;
        if ((PyObject *)Py_TYPE(module) != PyTuple_GetItem(entry, 1)) Py_RETURN_FALSE;
        Py_INCREF(module);
        int same = has_items(module, names.modules, PyTuple_GetItem(entry, 2), PyTuple_GetItem(entry, 3));
        if (same > 0) same = has_items(module, names.parameters, PyTuple_GetItem(entry, 4), PyTuple_GetItem(entry, 5));
        Py_DECREF(module);
        if (same < 0) return NULL;
        if (!same) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyMethodDef functions[] = {{"is_unchanged", is_unchanged, METH_O, NULL}, {NULL}};

/* ---- The module. ---- */

static int add_type(PyObject *module, const char *name, PyType_Spec *spec, PyTypeObject **kept) {
    PyObject *type = PyType_FromSpec(spec);
    if (!type || PyModule_AddObjectRef(module, name, type)) return -1;
    if (kept) *kept = (PyTypeObject *)Py_NewRef(type);
    Py_DECREF(type);
    return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_eager_hooks", NULL, -1, functions};

PyMODINIT_FUNC PyInit__eager_hooks(void) {
    const struct {
        PyObject **kept;
        const char *text;
    } texts[] = {
        {&names.site_numbers, "site_numbers"}, {&names.nothing, ""}, 
        {&names.training, "training"}, {&names.evaluates, "evaluates"}, {&names.requires_grad, "requires_grad"},
        {&names.grad_fn, "grad_fn"}, {&names.backward_hooks, "_backward_hooks"},
        {&names.register_hook_dict, "_register_hook_dict"}, {&names.version, "_version"}, {&names.hooked, "hooked"},
        {&names.busy_thread, "_busy_thread"}, {&names.modules, "_modules"}, {&names.parameters, "_parameters"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (!(*texts[i].kept = PyUnicode_InternFromString(texts[i].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module || PyModule_AddIntConstant(module, "ABI", 3) || add_type(module, "Lane", &Lane_spec, NULL) ||
        add_type(module, "EagerGradientHook", &GradientHook_spec, &gradient_hook_type) ||
        add_type(module, "EagerForwardHook", &ForwardHook_spec, NULL)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
