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
    if (PyList_GET_SIZE(column) != rows) return Py_BuildValue("(nn)", r, Py_ssize_t{-1});
    PyObject* row = PyList_GET_ITEM(column, r);
    const int64_t n = lengths[r];
    const bool list = PyList_Check(row);
    if ((!list && !PyTuple_Check(row)) || n > width || n < 0) return Py_BuildValue("(nn)", r, Py_ssize_t{-1});
    Py_INCREF(row);  // code that runs in read() may drop the last reference to it
    int64_t* to = out + r * width;
    std::fill_n(left ? to : to + n, width - n, fill);
    if (left) to += width - n;
    Py_ssize_t bad = -2;
    for (int64_t i = 0; i < n; ++i) {
      // The size is read again each time: a list may change while code of its items runs.
      if ((list ? PyList_GET_SIZE(row) : PyTuple_GET_SIZE(row)) != n) {
        bad = -1;
        break;
      }
      PyObject* item = list ? PyList_GET_ITEM(row, i) : PyTuple_GET_ITEM(row, i);
      if (PyLong_CheckExact(item) && small(item, to + i)) continue;
      Py_INCREF(item);
      const Read result = read(item, to + i);
      Py_DECREF(item);
      if (result == Read::kOk) continue;
      bad = result == Read::kRaised ? -3 : static_cast<Py_ssize_t>(i);
      break;
    }
    if (n == 0 && (list ? PyList_GET_SIZE(row) : PyTuple_GET_SIZE(row)) != 0) bad = -1;
    Py_DECREF(row);
    if (bad == -3) return nullptr;
    if (bad != -2) return Py_BuildValue("(nn)", r, bad);
  }
  Py_RETURN_NONE;
}

}  // namespace fastmlm
