// Outputs that are not in the softmax of the symbols: durations with one of their own (tdt), and a blank with a sigmoid
// (hat).  Their logits are taken out of a cell's row before the softmax, and their gradients put in after it.  Longer
// blanks (multi-blank) stay in the softmax, but are arcs of their own.
#pragma once

#include "cells.h"

namespace FT_ISA {

// The columns of `first` to `first + count` that belong to the further outputs, counted from `first`.
struct Further {
  int64_t begin, end, number;  // number: of the first of them

  Further(const Problem& p, int64_t first, int64_t count)
      : begin(least(count, most(0, p.symbols() - first))),
        end(most(begin, least(count, p.V - first))),
        number(first + begin - p.symbols()) {}
};

// The largest of some logits, and the sum of exp(logit - largest).
struct Sums {
  double high, sum;
};

template <class T> Sums sums_of(const T* logits, int64_t count) {
  Sums sums{-INFINITY, 0};
  for (int64_t i = 0; i < count; ++i) sums.high = logits[i] > sums.high || logits[i] != logits[i] ? logits[i] : sums.high;
  for (int64_t i = 0; i < count; ++i) sums.sum += exp((double)logits[i] - sums.high);
  return sums;
}

inline double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }
inline double log_sigmoid(double x) { return x < 0 ? x - log1p(exp(x)) : -log1p(exp(-x)); }

// Takes what belongs to no softmax of symbols out of one cell's logits of the columns from `first` on.
template <class T> void set_aside(const Problem& p, int64_t first, int64_t columns, T* logits, T* further, T* blank) {
  Further range(p, first, columns);
  for (int64_t c = range.begin; c < range.end; ++c) {
    further[range.number + c - range.begin] = logits[c];
    if (p.normaliser == APART) logits[c] = -(T)INFINITY;
  }
  if (p.normaliser != SIGMOID || p.blank < first || p.blank >= first + columns) return;
  *blank = logits[p.blank - first];
  logits[p.blank - first] = -(T)INFINITY;
}

// (arcs + others) p - arc = others p - arc (1 - p), where 1 - p keeps its digits; e: exp(logit - high) of its column.
FT_INLINE double gradient_at(double e, double sum, double arc, double others) {
  return (others * e - arc * (sum - e)) / sum;
}

}  // namespace FT_ISA
