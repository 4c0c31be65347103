// Reading Python ints: rows of a column into a padded array, nothing trusted.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace fastmlm {

// Writes the rows of a column, lists or tuples of ints, into (rows, width) int64, filled up on one side.
//
// `lengths` says how many values each row must have. Returns a new reference to None, or to a tuple (row, position) where
// the column is not what was expected: the row is not a list or tuple of its length (position -1), or the value at the
// position is no int of 64 bits. What was written by then is of no use. Null with an exception set where Python raised.
PyObject* pack(PyObject* column, int64_t* out, const int64_t* lengths, int64_t width, bool left, int64_t fill);

}  // namespace fastmlm
