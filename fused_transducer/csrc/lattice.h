// Alpha and the posteriors of one utterance, a diagonal at a time, in float64.
//
// There is no beta.  Where both arcs lead to a cell, alpha knows with which probability a path through the cell came by
// the one or the other: exp(alpha(t-1, u) + blank(t-1, u) - alpha(t, u)) by the blank.  From the last cell backwards,
// the posterior of an arc is that of the cell it leads to times this probability: products of numbers in [0, 1],
// without logarithms and without differences of large numbers.  The probability takes the place of the arc's
// log-probability, which alpha needs no more, and then the posterior takes its place.
#pragma once

#include "cells.h"

namespace FT_ISA {

struct Diagonals {  // one thread's rows of a diagonal, indexed by u; each has room for whole vectors at both ends
  double *alpha, *by_blank, *by_label;

  static int64_t row(int64_t U1) { return round_up(U1 + 2, 16) + 32; }
  static int64_t bytes(int64_t U1) { return round_up((3 * row(U1) + 16) * (int64_t)sizeof(double), 64); }

  Diagonals(void* workspace, int64_t U1) {
    alpha = static_cast<double*>(workspace) + 16;
    by_blank = alpha + row(U1);
    by_label = by_blank + row(U1);
  }
};

// The alphas of the cells `here` to `here_end` (by u) of a diagonal, from those of `first` to `end` of the one before, of
// which from_blank and from_label are the log-probabilities.  by_blank and by_label get the probability that a path
// through a cell came by the one or the other.
template <class T>
void next_diagonal(Diagonals rows, const T* from_blank, const T* from_label, int64_t first, int64_t end, int64_t here,
                   int64_t here_end) {
  constexpr int W = Simd<double>::W;
  double *alpha = rows.alpha, *by_blank = rows.by_blank, *by_label = rows.by_label;
  for (int64_t u = first; u < end; ++u) by_blank[u] = alpha[u] + from_blank[u];
  for (int64_t u = first; u < end; ++u) by_label[u + 1] = alpha[u] + from_label[u];
  by_blank[end] = by_label[first] = -INFINITY;
  for (int64_t u = here; u < here_end; u += W) {
    double_vector x = load<double>(by_blank + u), y = load<double>(by_label + u);
    double_vector high = x > y ? x : y, low = x > y ? y : x;
    int64_vector impossible = (high == -INFINITY) & (low == -INFINITY);
    double_vector share = impossible ? double_vector{} : exp_of<double>(low - high);
    double_vector larger = 1.0 / (1.0 + share), smaller = share * larger;
    store<double>(alpha + u, high + log1p_of(share));
    store<double>(by_blank + u, x > y ? larger : smaller);
    store<double>(by_label + u, x > y ? smaller : larger);
  }
}

// The log-likelihood.  With `gradient`, an arc gets the probability that a path through the cell it leads to came by
// it; blanks and labels that lead to no cell, as on the last frame and after the last target, stay.
template <class T>
double alphas(const Problem& p, const Lattice& lattice, T* blank, T* label, Diagonals rows) {
  rows.alpha[0] = 0;
  int64_t ends = lattice.diagonals();
  for (int64_t d = 1; d < ends; ++d) {
    int64_t before = lattice.before(d - 1), first = lattice.first_u(d - 1), end = lattice.last_u(d - 1) + 1;
    T *from_blank = blank + before - first, *from_label = label + before - first;
    int64_t here = lattice.first_u(d), here_end = lattice.last_u(d) + 1;
    next_diagonal<T>(rows, from_blank, from_label, first, end, here, here_end);
    if (!p.gradient) continue;
    for (int64_t u = here, stop = least(end, here_end); u < stop; ++u) from_blank[u] = (T)rows.by_blank[u];
    for (int64_t u = most(first + 1, here); u < here_end; ++u) from_label[u - 1] = (T)rows.by_label[u];
  }
  return rows.alpha[lattice.U1 - 1] + blank[lattice.cells() - 1];
}

// Puts the posteriors where `alphas` left its probabilities, the label's times 1 + fastemit_lambda.
template <class T>
void posteriors(const Problem& p, const Lattice& lattice, T* blank, T* label, Diagonals rows) {
  double *next = rows.alpha, *by_blank = rows.by_blank, *by_label = rows.by_label;  // next: of the cells after
  int64_t ends = lattice.diagonals();
  for (int64_t d = ends - 1; d >= 0; --d) {
    int64_t before = lattice.before(d), first = lattice.first_u(d), end = lattice.last_u(d) + 1;
    T *of_blank = blank + before - first, *of_label = label + before - first;
    for (int64_t u = first; u < end; ++u) by_blank[u] = next[u] * of_blank[u];
    for (int64_t u = first; u < end; ++u) by_label[u] = next[u + 1] * of_label[u];
    // those that lead to no cell, but the blank that ends the path
    if (lattice.first_u(d + 1) > first) by_blank[first] = d == ends - 1;
    if (lattice.last_u(d + 1) + 1 == end) by_label[end - 1] = 0;
    for (int64_t u = first; u < end; ++u) {
      next[u] = by_blank[u] + by_label[u];
      of_blank[u] = (T)by_blank[u];
      of_label[u] = (T)(by_label[u] * (1 + p.fastemit_lambda));
    }
  }
}

// Whether the gradient of a cell of this posterior is computed; a NaN is.
template <class T> FT_INLINE bool counts(const Problem& p, T posterior) {
  return !(posterior < (T)p.negligible) && posterior != 0;
}

}  // namespace FT_ISA
