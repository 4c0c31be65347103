// fastmlm.kernels.cpu._native: the kernels as Python calls them. Memory comes and goes as addresses of tensors that the
// Python side has checked and keeps alive; lists of ints are read here.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "batch.h"
#include "linear_cross_entropy.h"
#include "lists.h"
#include "masking.h"
#include "memory.h"
#include "pack.h"
#include "permutation.h"
#include "rates.h"
#include "sampling.h"
#include "units.h"

namespace fastmlm {
namespace {

// The instruction set in use: the widest the processor has; select_isa changes it for tests and benchmarks.
Isa current = *std::find_if(std::begin(kWidestFirst), std::end(kWidestFirst), supported);

PyObject* mask_tokens(PyObject*, PyObject* args) {
  unsigned long long ids, output, labels, offsets, row_keys, attention, special, units, thresholds, flags, random_ids;
  unsigned long long key, threshold, mask_threshold, random_threshold, span_limits, id_thresholds;
  long long rows, length, vocab_size, random_count, mask_token_id, ignore_index, longest_span, at_least, at_most;
  int id_size, attention_size, special_size, per_token, exclude, words, per_unit, exact;
  if (!PyArg_ParseTuple(args, "KKKiLLKKKKiKiKKpKLKLKKKLLppKLKppLL:mask_tokens", &ids, &output, &labels, &id_size, &rows,
                        &length, &offsets, &key, &row_keys, &attention, &attention_size, &special,
                        &special_size, &units, &thresholds, &per_token, &flags, &vocab_size, &random_ids,
                        &random_count, &threshold, &mask_threshold, &random_threshold, &mask_token_id, &ignore_index,
                        &exclude, &words, &span_limits, &longest_span, &id_thresholds, &per_unit, &exact, &at_least,
                        &at_most))
    return nullptr;
  const Batch batch{pointer<void>(ids),
                    writable<void>(output),
                    writable<void>(labels),
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
                    exclude != 0,
                    words != 0,
                    pointer<int64_t>(span_limits),
                    longest_span,
                    pointer<int64_t>(id_thresholds),
                    per_unit != 0,
                    exact != 0,
                    at_least,
                    at_most};
  bool in_range = false, enough_memory = true;
  Py_BEGIN_ALLOW_THREADS;
  const int64_t bytes = (batch.offsets ? length : rows * length) * id_size;
  expect_writes(batch.output_ids, bytes);
  expect_writes(batch.labels, bytes);
  try {
    in_range = masking_kernels(current).mask_tokens(batch, Scratch(batch));
  } catch (const std::bad_alloc&) {
    enough_memory = false;
  }
  Py_END_ALLOW_THREADS;
  return enough_memory ? PyBool_FromLong(in_range) : PyErr_NoMemory();
}

PyObject* row_keys(PyObject*, PyObject* args) {
  unsigned long long ids, attention, weights, keys;
  long long rows, length;
  int id_size, attention_size;
  if (!PyArg_ParseTuple(args, "KiKiKLLK:row_keys", &ids, &id_size, &attention, &attention_size, &weights, &rows,
                        &length, &keys))
    return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  masking_kernels(current).row_keys(pointer<void>(ids), id_size, {pointer<uint8_t>(attention), attention_size},
                    pointer<uint64_t>(weights), rows, length, writable<uint64_t>(keys));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* thresholds(PyObject*, PyObject* args) {
  unsigned long long rates, out;
  int wide;
  long long count;
  if (!PyArg_ParseTuple(args, "KpLK:thresholds", &rates, &wide, &count, &out)) return nullptr;
  bool inside;
  Py_BEGIN_ALLOW_THREADS;
  inside = wide ? thresholds_of(pointer<double>(rates), count, writable<int64_t>(out))
                : thresholds_of(pointer<float>(rates), count, writable<int64_t>(out));
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(inside);
}

PyObject* units_fit(PyObject*, PyObject* args) {
  unsigned long long units, attention;
  long long rows, length;
  int attention_size;
  if (!PyArg_ParseTuple(args, "KKiLL:units_fit", &units, &attention, &attention_size, &rows, &length)) return nullptr;
  const Flags attention_mask{pointer<uint8_t>(attention), attention_size};
  bool fit;
  Py_BEGIN_ALLOW_THREADS;
  fit = fastmlm::units_fit(pointer<int64_t>(units), attention_mask, rows, length);
  Py_END_ALLOW_THREADS;
  return PyBool_FromLong(fit);
}

PyObject* row_draws(PyObject*, PyObject* args) {
  unsigned long long key, row_keys, draws;
  long long rows, stream;
  if (!PyArg_ParseTuple(args, "KKLLK:row_draws", &key, &row_keys, &rows, &stream, &draws)) return nullptr;
  for (int64_t r = 0; r < rows; ++r)
    writable<int64_t>(draws)[r] = first_draw(key, pointer<uint64_t>(row_keys)[r], static_cast<uint32_t>(stream));
  Py_RETURN_NONE;
}

PyObject* count_selectable(PyObject*, PyObject* args) {
  unsigned long long ids, flags, attention, special, counts;
  long long vocab_size, rows, length;
  int id_size, attention_size, special_size;
  if (!PyArg_ParseTuple(args, "KiKLKiKiLLK:count_selectable", &ids, &id_size, &flags, &vocab_size, &attention,
                        &attention_size, &special, &special_size, &rows, &length, &counts))
    return nullptr;
  const auto run = [&](auto* typed) {
    fastmlm::count_selectable(typed, pointer<uint8_t>(flags), static_cast<uint64_t>(vocab_size),
                              {pointer<uint8_t>(attention), attention_size}, {pointer<uint8_t>(special), special_size},
                              rows, length, writable<int64_t>(counts));
  };
  Py_BEGIN_ALLOW_THREADS;
  if (id_size == 8)
    run(pointer<int64_t>(ids));
  else
    run(pointer<int32_t>(ids));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// Runs what touches no Python object, and may want memory, while other threads of Python go on.
template <class F>
PyObject* without_gil(F f) {
  bool enough_memory = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    f();
  } catch (const std::bad_alloc&) {
    enough_memory = false;
  }
  Py_END_ALLOW_THREADS;
  if (!enough_memory) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyObject* cross_entropy(PyObject*, PyObject* args) {
  unsigned long long data, bias, targets, scale, losses, bias_grad, ranks;
  long long rows, vocab_size;
  double label_smoothing;
  int half, gradients, threads;
  if (!PyArg_ParseTuple(args, "KpKKKKKKLLdpi:cross_entropy", &data, &half, &bias, &targets, &scale, &losses, &bias_grad,
                        &ranks, &rows, &vocab_size, &label_smoothing, &gradients, &threads))
    return nullptr;
  const Logits logits{writable<void>(data),
                      half != 0,
                      pointer<float>(bias),
                      pointer<int64_t>(targets),
                      pointer<float>(scale),
                      writable<float>(losses),
                      writable<float>(bias_grad),
                      writable<int64_t>(ranks),
                      rows,
                      vocab_size,
                      label_smoothing,
                      gradients != 0};
  return without_gil([&] { fastmlm::cross_entropy(logits, threads, current); });
}

PyObject* add_to_sums(PyObject*, PyObject* args) {
  unsigned long long high, low, numbers;
  long long count;
  int threads;
  if (!PyArg_ParseTuple(args, "KKKLi:add_to_sums", &high, &low, &numbers, &count, &threads)) return nullptr;
  const Sums sums{writable<uint16_t>(high), writable<uint8_t>(low), count};
  return without_gil([&] { add(sums, pointer<uint16_t>(numbers), threads, current); });
}

PyObject* round_sums(PyObject*, PyObject* args) {
  unsigned long long high, low;
  long long count;
  int threads;
  if (!PyArg_ParseTuple(args, "KKLi:round_sums", &high, &low, &count, &threads)) return nullptr;
  const Sums sums{writable<uint16_t>(high), writable<uint8_t>(low), count};
  return without_gil([&] { round_to_high(sums, threads, current); });
}

PyObject* permute(PyObject*, PyObject* args) {
  unsigned long long ids, labels, perm_mask, target_mapping, key, row_keys, attention, special, flags;
  long long rows, length, vocab_size, mask_token_id, max_span_length;
  int attention_size, special_size, mask_inputs;
  double probability;
  if (!PyArg_ParseTuple(args, "KKKKLLKKKiKiKLLpdL:permute", &ids, &labels, &perm_mask, &target_mapping, &rows, &length,
                        &key, &row_keys, &attention, &attention_size, &special, &special_size, &flags, &vocab_size,
                        &mask_token_id, &mask_inputs, &probability, &max_span_length))
    return nullptr;
  const PermutationBatch batch{writable<int64_t>(ids),
                               writable<int64_t>(labels),
                               writable<float>(perm_mask),
                               writable<float>(target_mapping),
                               rows,
                               length,
                               key,
                               pointer<uint64_t>(row_keys),
                               {pointer<uint8_t>(attention), attention_size},
                               {pointer<uint8_t>(special), special_size},
                               pointer<uint8_t>(flags),
                               static_cast<uint64_t>(vocab_size),
                               mask_token_id,
                               mask_inputs != 0,
                               probability,
                               max_span_length};
  bool in_range = false;
  PyObject* done = without_gil([&] {
    const int64_t bytes = rows * length * length * static_cast<int64_t>(sizeof(float));
    expect_writes(batch.perm_mask, bytes);
    expect_writes(batch.target_mapping, bytes);
    in_range = Permutation(batch).run();
  });
  if (!done) return nullptr;
  Py_DECREF(done);
  return PyBool_FromLong(in_range);
}

PyObject* sample_tokens(PyObject*, PyObject* args) {
  unsigned long long data, key, row_keys, tokens;
  long long rows, vocab_size, stride;
  float scale;
  int half, threads;
  if (!PyArg_ParseTuple(args, "KpLLLKKfKi:sample_tokens", &data, &half, &rows, &vocab_size, &stride, &key, &row_keys,
                        &scale, &tokens, &threads))
    return nullptr;
  const SampledLogits logits{pointer<void>(data), half != 0, rows,  vocab_size,
                             stride,              key,       pointer<uint64_t>(row_keys),
                             scale,               writable<int64_t>(tokens)};
  return without_gil([&] { fastmlm::sample_tokens(logits, threads, current); });
}

PyObject* pack_rows(PyObject*, PyObject* args) {
  PyObject *column, *lengths;
  unsigned long long out;
  long long width, fill;
  int left;
  if (!PyArg_ParseTuple(args, "O!KO!LpL:pack_rows", &PyList_Type, &column, &out, &PyList_Type, &lengths, &width, &left,
                        &fill))
    return nullptr;
  if (PyList_GET_SIZE(lengths) != PyList_GET_SIZE(column))
    return PyErr_Format(PyExc_ValueError, "lengths: expected one a row");
  try {
    std::vector<int64_t> counts;  // a copy, since reading the column may run code that changes the list
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lengths); ++i) {
      counts.push_back(PyLong_AsLongLong(PyList_GET_ITEM(lengths, i)));
      if (counts.back() == -1 && PyErr_Occurred()) return nullptr;
    }
    int64_t* to = writable<int64_t>(out);
    expect_writes(to, static_cast<int64_t>(counts.size()) * width * 8);
    return pack(column, to, counts.data(), width, left != 0, fill);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* list_lengths(PyObject*, PyObject* args) {
  unsigned long long parts, part, place, out;
  int offset_size, value_size, value_signed;
  long long count;
  if (!PyArg_ParseTuple(args, "KiipKKLK:list_lengths", &parts, &offset_size, &value_size, &value_signed, &part, &place,
                        &count, &out))
    return nullptr;
  const ListColumn column{pointer<ListPart>(parts), offset_size, value_size, value_signed != 0};
  const ListRows rows{pointer<int64_t>(part), pointer<int64_t>(place), count};
  return PyLong_FromLongLong(fastmlm::list_lengths(column, rows, writable<int64_t>(out)));
}

PyObject* gather_lists(PyObject*, PyObject* args) {
  unsigned long long parts, part, place, lengths, out;
  int offset_size, value_size, value_signed, left;
  long long count, width, fill, bad;
  if (!PyArg_ParseTuple(args, "KiipKKLKKLpL:gather_lists", &parts, &offset_size, &value_size, &value_signed, &part,
                        &place, &count, &lengths, &out, &width, &left, &fill))
    return nullptr;
  const ListColumn column{pointer<ListPart>(parts), offset_size, value_size, value_signed != 0};
  const ListRows rows{pointer<int64_t>(part), pointer<int64_t>(place), count};
  int64_t* to = writable<int64_t>(out);
  Py_BEGIN_ALLOW_THREADS;
  expect_writes(to, count * width * 8);
  bad = fastmlm::gather_lists(column, rows, pointer<int64_t>(lengths), to, width, left != 0, fill);
  Py_END_ALLOW_THREADS;
  return PyLong_FromLongLong(bad);
}

PyObject* isas(PyObject*, PyObject*) {
  PyObject* names = PyList_New(0);
  for (Isa isa : kWidestFirst) {
    PyObject* name = supported(isa) && names ? PyUnicode_FromString(name_of(isa)) : nullptr;
    if (name && PyList_Append(names, name) < 0) Py_CLEAR(names);
    Py_XDECREF(name);
  }
  return names;
}

PyObject* select_isa(PyObject*, PyObject* args) {
  const char* name;
  if (!PyArg_ParseTuple(args, "z:select_isa", &name)) return nullptr;
  for (Isa isa : kWidestFirst) {
    if (!supported(isa) || (name && std::string(name) != name_of(isa))) continue;
    current = isa;
    return PyUnicode_FromString(name_of(isa));
  }
  return PyErr_Format(PyExc_ValueError, "isa: this processor or build has no %s", name);
}

PyMethodDef methods[] = {
    {"mask_tokens", mask_tokens, METH_VARARGS, "Mask a batch; returns whether its ids are in range."},
    {"row_keys", row_keys, METH_VARARGS, "The row keys of the draw law, by content."},
    {"thresholds", thresholds, METH_VARARGS, "Rates to thresholds of draws; returns whether they are in [0, 1]."},
    {"units_fit", units_fit, METH_VARARGS, "Whether no unit starts after its own tokens."},
    {"row_draws", row_draws, METH_VARARGS, "One draw of each row."},
    {"count_selectable", count_selectable, METH_VARARGS, "How many tokens of each row may be selected."},
    {"cross_entropy", cross_entropy, METH_VARARGS, "Losses of rows of logits, which become their gradients."},
    {"add_to_sums", add_to_sums, METH_VARARGS, "Add bfloat16 numbers to sums of 24 bits."},
    {"round_sums", round_sums, METH_VARARGS, "Round sums of 24 bits to bfloat16, where their high parts are."},
    {"permute", permute, METH_VARARGS, "Targets, labels and masks of permutation language modelling."},
    {"sample_tokens", sample_tokens, METH_VARARGS, "One sample of the softmax of each row of logits."},
    {"pack_rows", pack_rows, METH_VARARGS, "Lists of ints into a padded int64 array."},
    {"list_lengths", list_lengths, METH_VARARGS, "Lengths of rows of an Arrow list column; kernels/cpu/lists.h."},
    {"gather_lists", gather_lists, METH_VARARGS, "Rows of an Arrow list column into a padded int64 array."},
    {"isas", isas, METH_NOARGS, "The instruction sets this processor has kernels for, widest first."},
    {"select_isa", select_isa, METH_VARARGS, "Use the kernels of one instruction set; None: the widest."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", "Kernels for the CPU.", -1, methods,
                      nullptr,               nullptr,   nullptr,                nullptr};

}  // namespace
}  // namespace fastmlm

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&fastmlm::module); }
