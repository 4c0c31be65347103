#include "pack.h"

#include <algorithm>

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

enum class Read { kOk, kNot, kRaised };

// Any object with __index__, as numpy's integers and bools are; its code may run, and may do anything.
Read read(PyObject* item, int64_t* value) {
  if (!PyIndex_Check(item)) return Read::kNot;
  PyObject* number = PyNumber_Index(item);
  if (!number) return Read::kRaised;
  int overflow = 0;
  *value = PyLong_AsLongLongAndOverflow(number, &overflow);
  Py_DECREF(number);
  if (overflow) return Read::kNot;
  return *value == -1 && PyErr_Occurred() ? Read::kRaised : Read::kOk;
}

}  // namespace

PyObject* pack(PyObject* column, int64_t* out, const int64_t* lengths, int64_t width, bool left, int64_t fill) {
  const Py_ssize_t rows = PyList_GET_SIZE(column);
  for (Py_ssize_t r = 0; r < rows; ++r) {
    if (PyList_GET_SIZE(column) != rows) return Py_BuildValue("(nn)", r, kOtherRow);
    PyObject* row = PyList_GET_ITEM(column, r);
    const int64_t n = lengths[r];
    const bool list = PyList_Check(row);
    if ((!list && !PyTuple_Check(row)) || n > width || n < 0) return Py_BuildValue("(nn)", r, kOtherRow);
    Py_INCREF(row);  // code that runs in read() may drop the last reference to it
    int64_t* to = out + r * width;
    std::fill_n(left ? to : to + n, width - n, fill);
    if (left) to += width - n;
    // Plain ints run no code, so the list stays as it is from one to the next; after anything else it is looked at anew.
    PyObject** items = list ? reinterpret_cast<PyListObject*>(row)->ob_item : reinterpret_cast<PyTupleObject*>(row)->ob_item;
    Py_ssize_t bad = Py_SIZE(row) == n ? kGood : kOtherRow;
    for (int64_t i = 0; i < n && bad == kGood; ++i) {
      // Ints above 256 lie all over the heap: ask for them ahead of time.
      if (i + kAhead < n) __builtin_prefetch(items[i + kAhead]);
      PyObject* item = items[i];
      if (PyLong_CheckExact(item) && small(item, to + i)) continue;
      Py_INCREF(item);
      const Read result = read(item, to + i);
      Py_DECREF(item);
      if (result != Read::kOk) bad = result == Read::kRaised ? kRaised : static_cast<Py_ssize_t>(i);
      else if (Py_SIZE(row) != n) bad = kOtherRow;
      else if (list) items = reinterpret_cast<PyListObject*>(row)->ob_item;
    }
    Py_DECREF(row);
    if (bad == kRaised) return nullptr;
    if (bad != kGood) return Py_BuildValue("(nn)", r, bad);
  }
  Py_RETURN_NONE;
}

}  // namespace fastmlm
