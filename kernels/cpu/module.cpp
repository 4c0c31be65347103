// fastmlm.kernels.cpu._native: the kernels as Python calls them. Memory comes and goes as addresses of tensors that the
// Python side has checked and keeps alive; lists of ints are read here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <new>
#include <string>
#include <vector>

#include "masking.h"
#include "pack.h"

namespace fastmlm {
namespace {

const Kernels* available(const char* isa) {
  for (const Kernels* kernels : {kernels_avx512(), kernels_avx2(), kernels_plain()})
    if (kernels && (!isa || std::string(isa) == kernels->isa)) return kernels;
  return nullptr;
}

// The kernels in use: the widest the processor has; select_isa changes it for tests and benchmarks.
const Kernels* current = available(nullptr);

template <class T>
const T* pointer(unsigned long long address) {
  return reinterpret_cast<const T*>(static_cast<uintptr_t>(address));
}

PyObject* mask_tokens(PyObject*, PyObject* args) {
  unsigned long long ids, output, labels, offsets, row_keys, attention, special, units, thresholds, flags, random_ids;
  unsigned long long key, threshold, mask_threshold, random_threshold;
  long long rows, length, longest, vocab_size, random_count, mask_token_id, ignore_index;
  int id_size, attention_size, special_size, per_token, exclude;
  if (!PyArg_ParseTuple(args, "KKKiLLLKKKKiKiKKpKLKLKKKLLp:mask_tokens", &ids, &output, &labels, &id_size, &rows,
                        &length, &longest, &offsets, &key, &row_keys, &attention, &attention_size, &special,
                        &special_size, &units, &thresholds, &per_token, &flags, &vocab_size, &random_ids,
                        &random_count, &threshold, &mask_threshold, &random_threshold, &mask_token_id, &ignore_index,
                        &exclude))
    return nullptr;
  const Batch batch{pointer<void>(ids),
                    const_cast<void*>(pointer<void>(output)),
                    const_cast<void*>(pointer<void>(labels)),
                    id_size,
                    rows,
                    length,
                    pointer<int64_t>(offsets),
                    key,
                    pointer<uint64_t>(row_keys),
                    {pointer<uint8_t>(attention), attention_size},
                    {pointer<uint8_t>(special), special_size},
                    pointer<int64_t>(units),
                    pointer<int64_t>(thresholds),
                    per_token != 0,
                    pointer<uint8_t>(flags),
                    vocab_size,
                    pointer<int64_t>(random_ids),
                    random_count,
                    threshold,
                    mask_threshold,
                    random_threshold,
                    mask_token_id,
                    ignore_index,
                    exclude != 0};
  std::vector<uint32_t> scratch;
  try {
    if (batch.units || batch.threshold_per_token) scratch.resize(static_cast<size_t>((longest + 63) / 64 * 64));
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
  Py_BEGIN_ALLOW_THREADS;
  current->mask_tokens(batch, scratch.data());
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* row_keys(PyObject*, PyObject* args) {
  unsigned long long ids, attention, weights, keys;
  long long rows, length;
  int id_size, attention_size;
  if (!PyArg_ParseTuple(args, "KiKiKLLK:row_keys", &ids, &id_size, &attention, &attention_size, &weights, &rows,
                        &length, &keys))
    return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  current->row_keys(pointer<void>(ids), id_size, {pointer<uint8_t>(attention), attention_size},
                    pointer<uint64_t>(weights), rows, length, const_cast<uint64_t*>(pointer<uint64_t>(keys)));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* pack_rows(PyObject*, PyObject* args) {
  PyObject* column;
  unsigned long long out, lengths;
  long long width, fill;
  int left;
  if (!PyArg_ParseTuple(args, "O!KKLpL:pack_rows", &PyList_Type, &column, &out, &lengths, &width, &left, &fill))
    return nullptr;
  return pack(column, const_cast<int64_t*>(pointer<int64_t>(out)), pointer<int64_t>(lengths), width, left != 0, fill);
}

PyObject* isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (const Kernels* kernels : {kernels_avx512(), kernels_avx2(), kernels_plain()}) {
    PyObject* name = kernels && names ? PyUnicode_FromString(kernels->isa) : nullptr;
    if (name && PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* select_isa(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "z:select_isa", &name)) return nullptr;
  const Kernels* found = available(name);
  if (!found) return PyErr_Format(PyExc_ValueError, "isa: this processor or build has no %s", name);
  current = found;
  return PyUnicode_FromString(current->isa);
}

PyMethodDef methods[] = {
    {"mask_tokens", mask_tokens, METH_VARARGS, "Mask a batch; kernels/cpu/masking.h names the arguments."},
    {"row_keys", row_keys, METH_VARARGS, "The row keys of the draw law, by content."},
    {"pack_rows", pack_rows, METH_VARARGS, "Lists of ints into a padded int64 array."},
    {"isas", isas, METH_NOARGS, "The instruction sets this processor has kernels for, widest first."},
    {"select_isa", select_isa, METH_VARARGS, "Use the kernels of one instruction set; None: the widest."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels for the CPU.", -1, methods,
                      nullptr,               nullptr,   nullptr,                nullptr};

}  // namespace
}  // namespace fastmlm

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&fastmlm::module); }
