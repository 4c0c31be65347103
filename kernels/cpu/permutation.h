// Permutation language modelling (XLNet): targets of a padded batch, and who sees whom, in one pass over the rows.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "masking.h"

namespace fastmlm {

// Draws of one stream of one row at rising positions: a Philox block has those of s, s + 16, s + 32 and s + 48.
class RowDraws {
 public:
  RowDraws(uint64_t key, uint64_t row_key, uint32_t stream) : key_(key), row_key_(row_key), stream_(stream) {}

  uint32_t at(int64_t position) {
    const int64_t counter = 16 * (position / 64) + position % 16;
    const int lane = static_cast<int>(position % 16);
    if (counters_[lane] != counter) {
      philox(static_cast<uint32_t>(counter), words_[lane]);
      counters_[lane] = counter;
    }
    return words_[lane][position % 64 / 16];
  }

 private:
  void philox(uint32_t counter, uint32_t (&out)[4]) const {
    uint32_t c0 = counter, c1 = stream_, c2 = static_cast<uint32_t>(row_key_);
    uint32_t c3 = static_cast<uint32_t>(row_key_ >> 32);
    uint32_t k0 = static_cast<uint32_t>(key_), k1 = static_cast<uint32_t>(key_ >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(p1);
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }

  uint64_t key_, row_key_;
  uint32_t stream_;
  int64_t counters_[16] = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  uint32_t words_[16][4];
};

struct PermutationBatch {
  int64_t* ids;  // masked in place where mask_inputs says so
  int64_t* labels;
  float* perm_mask;       // (rows, length, length)
  float* target_mapping;  // likewise
  int64_t rows;
  int64_t length;
  uint64_t key;
  const uint64_t* row_keys;
  Flags attention_mask;
  Flags special_tokens_mask;
  const uint8_t* id_flags;  // bit 0: special
  uint64_t vocab_size;
  int64_t mask_token_id;
  bool mask_inputs;
  double probability;
  int64_t max_span_length;
};

class Permutation {
 public:
  static constexpr int64_t kCached = 1 << 20;  // numbers of a mask

  explicit Permutation(const PermutationBatch& batch)
      : batch_(batch), past_caches_(batch.rows * batch.length * batch.length >= kCached) {
    const size_t length = static_cast<size_t>(batch.length);
    order_.resize(length);
    keys_.reserve(length);
    of_others_.resize(length);
    of_target_.resize(length);
    unit_.resize(length);
  }

  // Returns whether all ids lie in [0, vocab_size); if not, what was written is of no use.
  bool run() {
    for (int64_t i = 0; i < batch_.rows * batch_.length; ++i)
      if (static_cast<uint64_t>(batch_.ids[i]) >= batch_.vocab_size) return false;
    for (int64_t r = 0; r < batch_.rows; ++r) {
      find_targets(r);
      find_order();
      write_tokens(r);
      write_masks(r);
    }
#if defined(__x86_64__)
    _mm_sfence();  // before other threads read
#endif
    return true;
  }

 private:
  bool is_target(int64_t i) const {  // where a span covers it
    return !(batch_.id_flags[batch_.ids[i]] & 1) && !(batch_.attention_mask.data && !batch_.attention_mask.at(i)) &&
           !(batch_.special_tokens_mask.data && batch_.special_tokens_mask.at(i));
  }

  // keys_: draw_5(position) * 2^32 + column of each target, by column.
  void find_targets(int64_t r) {
    const int64_t length = batch_.length, at = r * length;
    int64_t first = 0;
    if (batch_.attention_mask.data)
      while (first < length && !batch_.attention_mask.at(at + first)) ++first;
    RowDraws spans(batch_.key, batch_.row_keys[r], 3), places(batch_.key, batch_.row_keys[r], 5);
    keys_.clear();
    int64_t from = first;
    for (int64_t draw = 0; from < length; draw += 2) {
      const int64_t span = 1 + scaled(spans.at(draw), batch_.max_span_length);
      const int64_t context = static_cast<int64_t>(std::min(span / batch_.probability, 2147483648.0));
      const int64_t start = from + scaled(spans.at(draw + 1), context - span + 1);
      for (int64_t c = start; c < std::min(start + span, length); ++c)
        if (is_target(at + c))
          keys_.push_back(uint64_t{places.at(c - first)} << 32 | static_cast<uint64_t>(c));
      from += context;
    }
  }

  static int64_t scaled(uint32_t draw, int64_t count) {
    return static_cast<int64_t>(uint64_t{draw} * static_cast<uint64_t>(count) >> 32);
  }

  // order_: each target's place in the order, -1 for all others.
  void find_order() {
    // Within a row columns are as good as positions to tell equal draws apart: both rise together.
    std::sort(keys_.begin(), keys_.end());
    std::fill(order_.begin(), order_.end(), -1);
    int32_t place = 0;
    for (uint64_t key : keys_) order_[key & 0xFFFFFFFFu] = place++;
  }

  void write_tokens(int64_t r) {
    int64_t* ids = batch_.ids + r * batch_.length;
    int64_t* labels = batch_.labels + r * batch_.length;
    std::fill(labels, labels + batch_.length, -100);
    for (uint64_t key : keys_) {
      const int64_t c = static_cast<int64_t>(key & 0xFFFFFFFFu);
      labels[c] = ids[c];
      if (batch_.mask_inputs) ids[c] = batch_.mask_token_id;
    }
  }

  void write_masks(int64_t r) {
    const int64_t length = batch_.length;
    float* perm = batch_.perm_mask + r * length * length;
    float* mapping = batch_.target_mapping + r * length * length;
    for (int64_t j = 0; j < length; ++j) of_others_[j] = order_[j] >= 0 ? 1.0f : 0.0f;
    for (int64_t i = 0; i < length; ++i) {
      const int32_t least = order_[i];
      if (least >= 0)
        for (int64_t j = 0; j < length; ++j) of_target_[j] = order_[j] >= least ? 1.0f : 0.0f;
      put(perm + i * length, least >= 0 ? of_target_.data() : of_others_.data());
      unit_[i] = 1.0f;
      put(mapping + i * length, unit_.data());
      unit_[i] = 0.0f;
    }
  }

  // Copies a row of a mask to where it goes.
  void put(float* to, const float* from) const {
    const int64_t length = batch_.length;
#if defined(__x86_64__)
    if (past_caches_) {
      const auto one = [&](int64_t j) {
        int32_t bits;
        std::memcpy(&bits, from + j, sizeof bits);
        _mm_stream_si32(reinterpret_cast<int*>(to + j), bits);
      };
      int64_t j = 0;
      for (; j < length && reinterpret_cast<uintptr_t>(to + j) % 16; ++j) one(j);
      for (; j + 4 <= length; j += 4) _mm_stream_ps(to + j, _mm_loadu_ps(from + j));
      for (; j < length; ++j) one(j);
      return;
    }
#endif
    std::memcpy(to, from, static_cast<size_t>(length) * sizeof(float));
  }

  const PermutationBatch& batch_;
  // Masks that no cache would hold anyway are written without being read into it first: half the traffic.
  const bool past_caches_;
  std::vector<int32_t> order_;
  std::vector<uint64_t> keys_;
  std::vector<float> of_others_, of_target_, unit_;  // rows of masks: what is no target, a target, the identity
};

}  // namespace fastmlm
