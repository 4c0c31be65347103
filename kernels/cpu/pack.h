// Reading Python ints and buffers of integers: rows of a column into a padded array, nothing trusted.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace fastmlm {

// Writes the rows of a column into (rows, width) int64, filled up on one side. Rows are lists or tuples of ints, or offer
// integers of the machine's byte order by the buffer protocol, in one dimension with any stride, as arrays do (not bytes).
//
// `lengths` says how many values each row must have, as many as the column has rows. Returns a new reference to None, or to a tuple (row, position) where
// the column is not what was expected: the row is not of these kinds or not of its length (position -1), or the value at
// the position is no int of 64 bits. What was written by then is of no use. Null with an exception set where Python raised.
PyObject* pack(PyObject* column, int64_t* out, const int64_t* lengths, int64_t width, bool left, int64_t fill);

}  // namespace fastmlm
