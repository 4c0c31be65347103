// Rows of integers out of list columns as Arrow lays them out, into padded int64 arrays.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastmlm {

// One record batch of a column: addresses of its offsets (one more than it has rows) and values, and how many values.
struct ListPart {
  int64_t offsets, values, count;
};

struct ListColumn {
  const ListPart* parts;
  int offset_size;     // 4 or 8 bytes
  int value_size;      // 1, 2, 4 or 8 bytes
  bool value_signed;   // 8 bytes are signed
};

// Which rows: the part of each and its place there.
struct ListRows {
  const int64_t *part, *place;
  int64_t count;
};

// Where a row starts in its part's values, and its length; -1 where its offsets do not lie in the values.
inline int64_t list_span(const ListColumn& column, int64_t part, int64_t place, int64_t* start) {
  const ListPart& from = column.parts[part];
  int64_t end;
  if (column.offset_size == 4) {
    const int32_t* offsets = reinterpret_cast<const int32_t*>(from.offsets) + place;
    *start = offsets[0], end = offsets[1];
  } else {
    const int64_t* offsets = reinterpret_cast<const int64_t*>(from.offsets) + place;
    *start = offsets[0], end = offsets[1];
  }
  return *start < 0 || end < *start || end > from.count ? -1 : end - *start;
}

// The lengths of rows; the first row whose offsets are broken, or -1.
inline int64_t list_lengths(const ListColumn& column, const ListRows& rows, int64_t* lengths) {
  for (int64_t i = 0; i < rows.count; ++i) {
    int64_t start;
    lengths[i] = list_span(column, rows.part[i], rows.place[i], &start);
    if (lengths[i] < 0) return i;
  }
  return -1;
}

template <class T>
int64_t gather_lists(const ListColumn& column, const ListRows& rows, const int64_t* lengths, int64_t* out,
                     int64_t width, bool left, int64_t fill) {
  for (int64_t i = 0; i < rows.count; ++i, out += width) {
    int64_t start;
    const int64_t n = list_span(column, rows.part[i], rows.place[i], &start);
    if (n != lengths[i] || n < 0 || n > width) return i;
    const T* values = reinterpret_cast<const T*>(column.parts[rows.part[i]].values) + start;
    int64_t* to = left ? out + (width - n) : out;
    for (int64_t k = 0; k < n; ++k) to[k] = static_cast<int64_t>(values[k]);
    std::fill(left ? out : out + n, left ? to : out + width, fill);
  }
  return -1;
}

// Rows filled up to a width; the first row that has not the length expected, or -1.
inline int64_t gather_lists(const ListColumn& column, const ListRows& rows, const int64_t* lengths, int64_t* out,
                            int64_t width, bool left, int64_t fill) {
  switch (column.value_signed ? column.value_size : -column.value_size) {
    case 1: return gather_lists<int8_t>(column, rows, lengths, out, width, left, fill);
    case 2: return gather_lists<int16_t>(column, rows, lengths, out, width, left, fill);
    case 4: return gather_lists<int32_t>(column, rows, lengths, out, width, left, fill);
    case 8: return gather_lists<int64_t>(column, rows, lengths, out, width, left, fill);
    case -1: return gather_lists<uint8_t>(column, rows, lengths, out, width, left, fill);
    case -2: return gather_lists<uint16_t>(column, rows, lengths, out, width, left, fill);
    case -4: return gather_lists<uint32_t>(column, rows, lengths, out, width, left, fill);
    default: return 0;
  }
}

}  // namespace fastmlm
