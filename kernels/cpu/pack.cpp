#include "pack.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace fastmlm {
namespace {

// An int whose value is one digit (30 bits) is read without a call; it is what token ids are.
inline bool small(PyObject* item, int64_t* value) {
#if PY_VERSION_HEX >= 0x030C0000
  const PyLongObject* number = reinterpret_cast<PyLongObject*>(item);
  if (!PyUnstable_Long_IsCompact(number)) return false;
  *value = PyUnstable_Long_CompactValue(number);
  return true;
#else
  const Py_ssize_t size = Py_SIZE(item);
  if (size < -1 || size > 1) return false;
  *value = size * static_cast<int64_t>(reinterpret_cast<PyLongObject*>(item)->ob_digit[0]);
  return true;
#endif
}

// What pack says of a row, beside the position of a value that is no int.
constexpr Py_ssize_t kOtherRow = -1, kGood = -2, kRaised = -3;
constexpr int kAhead = 16;
constexpr int kRun = 16;

// How many items from the first on are the same object, as masks and segment ids are in long runs; in steps of kRun.
int64_t run(PyObject* const* items, int64_t n) {
  int64_t count = 0;
  for (; count + kRun <= n; count += kRun) {
    uintptr_t different = 0;
    for (int i = 0; i < kRun; ++i)
      different |= reinterpret_cast<uintptr_t>(items[count + i]) ^ reinterpret_cast<uintptr_t>(items[0]);
    if (different) break;
  }
  return count;
}

enum class Read { kOk, kNot, kRaised };

// Any object with __index__ except bools, as numpy's integers are; its code may run, and may do anything.
Read read(PyObject* item, int64_t* value) {
  // numpy's bools have __index__ in some releases, where it warns: they are told by their name, "bool_" or "bool".
  const bool is_bool = PyBool_Check(item) || std::strncmp(Py_TYPE(item)->tp_name, "numpy.bool", 10) == 0;
  if (!PyIndex_Check(item) || is_bool) return Read::kNot;
  PyObject* number = PyNumber_Index(item);
  if (!number) return Read::kRaised;
  int overflow = 0;
  *value = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow) return Read::kNot;
  return *value == -1 && PyErr_Occurred() ? Read::kRaised : Read::kOk;
}

// Writes a list or tuple of n ints.
Py_ssize_t pack_items(PyObject* row, int64_t n, int64_t* to) {
  const bool list = PyList_Check(row);
  // Plain ints run no code, so the list stays as it is from one to the next; after anything else it is looked at anew.
  PyObject** items = list ? reinterpret_cast<PyListObject*>(row)->ob_item : reinterpret_cast<PyTupleObject*>(row)->ob_item;
  if (Py_SIZE(row) != n) return kOtherRow;
  for (int64_t i = 0; i < n; ++i) {
    // Ints above 256 lie all over the heap: ask for them ahead of time.
    if (i + kAhead < n) __builtin_prefetch(items[i + kAhead]);
    PyObject* item = items[i];
    if (PyLong_CheckExact(item) && small(item, to + i)) {
      if (i + 1 < n && items[i + 1] == item) {
        const int64_t same = run(items + i, n - i);
        std::fill_n(to + i, same, to[i]);
        if (same) i += same - 1;
      }
      continue;
    }
    Py_INCREF(item);
    const Read result = read(item, to + i);
    Py_DECREF(item);
    if (result != Read::kOk) return result == Read::kRaised ? kRaised : static_cast<Py_ssize_t>(i);
    if (Py_SIZE(row) != n) return kOtherRow;
    if (list) items = reinterpret_cast<PyListObject*>(row)->ob_item;
  }
  return kGood;
}

template <class T>
Py_ssize_t copy_strided(const Py_buffer& view, int64_t n, int64_t* to) {
  const char* from = static_cast<const char*>(view.buf);
  const Py_ssize_t stride = view.strides ? view.strides[0] : view.itemsize;
  if (stride == static_cast<Py_ssize_t>(sizeof(T)) && reinterpret_cast<uintptr_t>(from) % alignof(T) == 0) {
    const T* values = reinterpret_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int64_t>(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i, from += stride) {
      T value;
      std::memcpy(&value, from, sizeof value);
      to[i] = static_cast<int64_t>(value);
    }
  }
  if (std::is_same<T, uint64_t>::value)
    for (int64_t i = 0; i < n; ++i)
      if (to[i] < 0) return static_cast<Py_ssize_t>(i);
  return kGood;
}

template <class Signed, class Unsigned>
Py_ssize_t copy_integers(const Py_buffer& view, int64_t n, int64_t* to, bool is_signed) {
  return is_signed ? copy_strided<Signed>(view, n, to) : copy_strided<Unsigned>(view, n, to);
}

// The type code of a buffer of single integers in the machine's byte order; 0 of any other.
char integer_code(const Py_buffer& view) {
  const char* format = view.format ? view.format : "B";
  const bool little = *reinterpret_cast<const char*>(&kAhead) != 0;
  if (*format == '@' || *format == '=' || *format == (little ? '<' : '>')) ++format;
  return *format && !format[1] && std::strchr("bBhHiIlLqQnN", *format) ? *format : 0;
}

// Writes a row of n integers that it offers by the buffer protocol.
Py_ssize_t pack_buffer(PyObject* row, int64_t n, int64_t* to) {
  Py_buffer view;
  if (PyObject_GetBuffer(row, &view, PyBUF_FORMAT | PyBUF_STRIDES) < 0) {
    PyErr_Clear();
    return kOtherRow;
  }
  Py_ssize_t bad = kOtherRow;
  const char code = integer_code(view);
  if (code && view.ndim == 1 && view.len == n * view.itemsize) {
    const bool is_signed = code >= 'a';
    switch (view.itemsize) {
      case 1: bad = copy_integers<int8_t, uint8_t>(view, n, to, is_signed); break;
      case 2: bad = copy_integers<int16_t, uint16_t>(view, n, to, is_signed); break;
      case 4: bad = copy_integers<int32_t, uint32_t>(view, n, to, is_signed); break;
      case 8: bad = copy_integers<int64_t, uint64_t>(view, n, to, is_signed); break;
      default: break;
    }
  }
  PyBuffer_Release(&view);
  return bad;
}

}  // namespace

PyObject* pack(PyObject* column, int64_t* out, const int64_t* lengths, int64_t width, bool left, int64_t fill) {
  const Py_ssize_t rows = PyList_GET_SIZE(column);
  for (Py_ssize_t r = 0; r < rows; ++r) {
    if (PyList_GET_SIZE(column) != rows) return Py_BuildValue("(nn)", r, kOtherRow);
    PyObject* row = PyList_GET_ITEM(column, r);
    const int64_t n = lengths[r];
    const bool items = PyList_Check(row) || PyTuple_Check(row);
    const bool text = PyBytes_Check(row) || PyByteArray_Check(row);  // a buffer too, but not of numbers
    if ((!items && (text || !PyObject_CheckBuffer(row))) || n > width || n < 0)
      return Py_BuildValue("(nn)", r, kOtherRow);
    int64_t* to = out + r * width;
    std::fill_n(left ? to : to + n, width - n, fill);
    if (left) to += width - n;
    Py_INCREF(row);  // code that runs in reading it may drop the last reference to it
    const Py_ssize_t bad = items ? pack_items(row, n, to) : pack_buffer(row, n, to);
    Py_DECREF(row);
    if (bad == kRaised) return nullptr;
    if (bad != kGood) return Py_BuildValue("(nn)", r, bad);
  }
  Py_RETURN_NONE;
}

}  // namespace fastmlm
