/* The partition of every key of an Arrow column, in one call.
 *
 * `murmur2` is the hash of Kafka's Java clients: the same key gets the same partition there and here. `crc32c` is the
 * hash of topics that were created before topics had a partitioner. src/embarcadero/wire/partitioners.py has the same
 * in Python, for machines without a C compiler; a test compares them.
 *
 * Offsets come from outside: each is checked against the length of the data before a byte is read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MURMUR2, CRC32C };

static uint32_t crc_table[256];

static void make_crc_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc & 1 ? (crc >> 1) ^ 0x82F63B78u : crc >> 1;
        crc_table[byte] = crc;
    }
}

static uint32_t crc32c(const uint8_t *key, size_t length)
{
    uint32_t crc = 0xFFFFFFFFu;
    for (size_t at = 0; at < length; at++)
        crc = crc_table[(crc ^ key[at]) & 0xFF] ^ (crc >> 8);
    return crc ^ 0xFFFFFFFFu;
}

/* org.apache.kafka.common.utils.Utils.murmur2, and toPositive: the sign bit is cleared. */
static uint32_t murmur2(const uint8_t *key, size_t length)
{
    const uint32_t m = 0x5BD1E995u;
    uint32_t h = 0x9747B28Cu ^ (uint32_t)length;
    size_t whole = length & ~(size_t)3;
    for (size_t at = 0; at < whole; at += 4) {
        uint32_t k = (uint32_t)key[at] | (uint32_t)key[at + 1] << 8 | (uint32_t)key[at + 2] << 16 |
                     (uint32_t)key[at + 3] << 24;
        k *= m;
        k ^= k >> 24;
        k *= m;
        h *= m;
        h ^= k;
    }
    switch (length & 3) {
    case 3:
        h ^= (uint32_t)key[whole + 2] << 16; /* fall through */
    case 2:
        h ^= (uint32_t)key[whole + 1] << 8; /* fall through */
    case 1:
        h ^= (uint32_t)key[whole];
        h *= m;
    }
    h ^= h >> 13;
    h *= m;
    h ^= h >> 15;
    return h & 0x7FFFFFFFu;
}

static uint32_t hash(int kind, const uint8_t *key, size_t length)
{
    return kind == MURMUR2 ? murmur2(key, length) : crc32c(key, length);
}

static int64_t offset_at(const uint8_t *offsets, int width, Py_ssize_t at)
{
    if (width == 4) {
        int32_t value;
        memcpy(&value, offsets + 4 * at, 4);
        return value;
    }
    int64_t value;
    memcpy(&value, offsets + 8 * at, 8);
    return value;
}

/* Fill `out`; -1 if all offsets are within `size` bytes of data, else the row whose offsets are not. */
static Py_ssize_t fill(int kind, uint32_t partitions, const uint8_t *offsets, int width, const uint8_t *data, int64_t size,
                       const uint8_t *validity, Py_ssize_t first, Py_ssize_t count, int32_t *out)
{
    for (Py_ssize_t row = 0; row < count; row++) {
        Py_ssize_t at = first + row;
        if (validity != NULL && !(validity[at >> 3] >> (at & 7) & 1)) {
            out[row] = -1;
            continue;
        }
        int64_t start = offset_at(offsets, width, at), stop = offset_at(offsets, width, at + 1);
        if (start < 0 || stop < start || stop > size)
            return row;
        out[row] = (int32_t)(hash(kind, data + start, (size_t)(stop - start)) % partitions);
    }
    return -1;
}

static int check(int kind, long partitions)
{
    if (kind != MURMUR2 && kind != CRC32C) {
        PyErr_Format(PyExc_ValueError, "partitioner %d does not exist", kind);
        return 0;
    }
    if (partitions < 1 || partitions > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%ld partitions are out of range", partitions);
        return 0;
    }
    return 1;
}

static PyObject *partition(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer key;
    int kind;
    long partitions;
    if (!PyArg_ParseTuple(args, "iy*l", &kind, &key, &partitions))
        return NULL;
    PyObject *found = NULL;
    if (check(kind, partitions))
        found = PyLong_FromUnsignedLong(hash(kind, key.buf, (size_t)key.len) % (uint32_t)partitions);
    PyBuffer_Release(&key);
    return found;
}

static PyObject *column(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer offsets, data, validity, out;
    int kind, width;
    long partitions;
    Py_ssize_t first, count, bad = -1;
    if (!PyArg_ParseTuple(args, "ily*iy*z*nnw*", &kind, &partitions, &offsets, &width, &data, &validity, &first, &count,
                          &out))
        return NULL;
    int fits = check(kind, partitions);
    if (fits && (width == 4 || width == 8) && first >= 0 && count >= 0 && first < PY_SSIZE_T_MAX / 16 &&
        count < PY_SSIZE_T_MAX / 16 && (first + count + 1) * width <= offsets.len &&
        (validity.buf == NULL || (first + count + 7) / 8 <= validity.len) && count * 4 <= out.len) {
        Py_BEGIN_ALLOW_THREADS;
        bad = fill(kind, (uint32_t)partitions, offsets.buf, width, data.buf, data.len, validity.buf, first, count, out.buf);
        Py_END_ALLOW_THREADS;
        if (bad >= 0)
            PyErr_Format(PyExc_ValueError, "the offsets of row %zd are outside %zd bytes of data", bad, data.len);
    } else if (fits) {
        PyErr_Format(PyExc_ValueError, "%zd rows at %zd do not fit their buffers", count, first);
    }
    PyBuffer_Release(&offsets);
    PyBuffer_Release(&data);
    if (validity.obj != NULL)
        PyBuffer_Release(&validity);
    PyBuffer_Release(&out);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"partition", partition, METH_VARARGS, "partition(kind, key, partitions): the partition of one key."},
    {"column", column, METH_VARARGS,
     "column(kind, partitions, offsets, offset_width, data, validity, first, count, out): the partitions of `count` keys "
     "of an Arrow column from row `first` on, as int32; -1 where the key is null."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_partitions", "Partitions of keys.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__partitions(void)
{
    make_crc_table();
    return PyModule_Create(&module);
}
