/* The fabric's primitives: write back lines, drop lines, fence.
 *
 * Memory that several hosts share (CXL) need not be coherent between them: a store stays in the writer's cache until it is
 * written back, and a load may come from a stale line until that line is dropped. These instructions exist in no Python
 * library. Elsewhere than on x86-64 we only have C11 fences: enough for one coherent host, and `coherent_only` says so.
 *
 * The GIL is kept: spans are short, and giving it up would cost more than the work.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define LINE ((uintptr_t)64)

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define COHERENT_ONLY 0
typedef void (*for_lines)(uintptr_t line, uintptr_t end);

__attribute__((target("clwb"))) static void lines_clwb(uintptr_t line, uintptr_t end)
{
    for (; line < end; line += LINE)
        _mm_clwb((void *)line);
}

__attribute__((target("clflushopt"))) static void lines_clflushopt(uintptr_t line, uintptr_t end)
{
    for (; line < end; line += LINE)
        _mm_clflushopt((void *)line);
}

static void lines_clflush(uintptr_t line, uintptr_t end)
{
    for (; line < end; line += LINE)
        _mm_clflush((const void *)line);
}

/* Every x86-64 has clflush; the newer ones do not wait for each line, and clwb keeps the line in the cache. */
static for_lines write_back = lines_clflush, drop = lines_clflush;
static const char *write_back_name = "clflush";

static void choose(void)
{
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx))
        return;
    if (ebx & (1u << 23)) {
        write_back = drop = lines_clflushopt;
        write_back_name = "clflushopt";
    }
    if (ebx & (1u << 24)) {
        write_back = lines_clwb;
        write_back_name = "clwb";
    }
}

static void full_fence(void) { _mm_mfence(); }

static void flush_lines(uintptr_t line, uintptr_t end)
{
    write_back(line, end);
    _mm_sfence(); /* later stores must not overtake the write-back */
}

static void invalidate_lines(uintptr_t line, uintptr_t end)
{
    /* Before: a line dropped while earlier loads still run could be fetched again, and be stale by the time they end.
     * After: later loads must not be served from the line before it is dropped. Dirty lines are written back, not lost. */
    _mm_mfence();
    drop(line, end);
    _mm_mfence();
}

#else
#include <stdatomic.h>

#define COHERENT_ONLY 1
static const char *write_back_name = "fence";
static void choose(void) {}
static void full_fence(void) { atomic_thread_fence(memory_order_seq_cst); }
static void flush_lines(uintptr_t line, uintptr_t end) { (void)line; (void)end; full_fence(); }
static void invalidate_lines(uintptr_t line, uintptr_t end) { (void)line; (void)end; full_fence(); }
#endif

/* Take (buffer, offset, length), check the bounds, and hand the span's lines to `act`. */
static PyObject *on_span(PyObject *const *args, Py_ssize_t nargs, void (*act)(uintptr_t, uintptr_t))
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "expected (buffer, offset, length)");
        return NULL;
    }
    Py_ssize_t offset = PyLong_AsSsize_t(args[1]);
    if (offset == -1 && PyErr_Occurred())
        return NULL;
    Py_ssize_t length = PyLong_AsSsize_t(args[2]);
    if (length == -1 && PyErr_Occurred())
        return NULL;
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    if (offset < 0 || length < 0 || offset > view.len || length > view.len - offset) {
        PyErr_Format(PyExc_ValueError, "span of %zd bytes at %zd is outside a buffer of %zd bytes", length, offset, view.len);
        PyBuffer_Release(&view);
        return NULL;
    }
    if (length > 0) {
        uintptr_t start = (uintptr_t)view.buf + (uintptr_t)offset;
        act(start & ~(LINE - 1), start + (uintptr_t)length);
    }
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyObject *flush(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return on_span(args, nargs, flush_lines);
}

static PyObject *invalidate(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    return on_span(args, nargs, invalidate_lines);
}

static PyObject *fence(PyObject *self, PyObject *unused)
{
    (void)self;
    (void)unused;
    full_fence();
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"flush", (PyCFunction)(void (*)(void))flush, METH_FASTCALL,
     "flush(buffer, offset, length): write back the lines of the span, then fence stores."},
    {"invalidate", (PyCFunction)(void (*)(void))invalidate, METH_FASTCALL,
     "invalidate(buffer, offset, length): write back and drop the lines of the span, between two full fences."},
    {"fence", fence, METH_NOARGS, "fence(): a full fence."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Cache line primitives of the fabric.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    choose();
    PyObject *made = PyModule_Create(&module);
    if (made == NULL)
        return NULL;
    if (PyModule_AddObjectRef(made, "coherent_only", COHERENT_ONLY ? Py_True : Py_False) < 0 ||
        PyModule_AddStringConstant(made, "write_back", write_back_name) < 0) {
        Py_DECREF(made);
        return NULL;
    }
    return made;
}
