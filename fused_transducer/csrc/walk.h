// The walk over the arcs of any lattice, for one utterance: log-likelihood, and posteriors of the parts of its cells.
//
// Arcs are a table (fused_transducer/lattices.py): each goes `dt` frames and `du` targets ahead, and its log-weight is a
// sum of parts of the cell that it leaves.  The lattice of two arcs has a faster walk of its own in lattice.h.  Here
// alpha of all cells of the utterance stays in float64, and the posterior of an arc is that of the cell it leads to
// times exp(alpha there + weight - alpha here): numbers in [0, 1].
#pragma once

#include "lattice.h"

namespace FT_ISA {

template <class T> class Walk {
 public:
  // Bytes of one thread's workspace.
  static int64_t bytes(const Problem& p) {
    if (!p.arc_count) return 0;
    return round_up((2 * room(p) + (p.arc_count + p.extra + 5) * Diagonals::row(p.U1)) * (int64_t)sizeof(double), 64);
  }

  Walk(const Problem& problem, int64_t n, void* workspace)
      : p(problem), lattice(lattice_of(problem, n)), rows(problem), first(problem.first_cells[n]) {
    alpha = static_cast<double*>(workspace) + MARGIN;
    flow = alpha + room(p);
    arriving = flow + room(p);
    high = arriving + p.arc_count * Diagonals::row(p.U1);
    sum = high + Diagonals::row(p.U1);
    blank_ahead = sum + Diagonals::row(p.U1);
    parts = blank_ahead + Diagonals::row(p.U1);
  }

  double likelihood() {
    constexpr int W = Simd<double>::W;
    int64_t ends = lattice.diagonals();
    alpha[0] = 0;
    for (int64_t d = 1; d < ends; ++d) {
      int64_t begin = lattice.first_u(d), end = lattice.last_u(d) + 1;
      for (int64_t u = begin; u < end; ++u) high[u] = -INFINITY;
      for (int64_t k = 0; k < p.arc_count; ++k) arrive(k, d, begin, end);
      for (int64_t u = begin; u < end; ++u) high[u] = high[u] == -INFINITY ? 0 : high[u];
      for (int64_t u = begin; u < end; u += W) store<double>(sum + u, double_vector{});
      for (int64_t k = 0; k < p.arc_count; ++k)
        for (int64_t u = begin; u < end; u += W)
          store<double>(sum + u, load<double>(sum + u) + exp_of<double>(load<double>(row(k) + u) - load<double>(high + u)));
      for (int64_t u = begin; u < end; ++u) alpha[at(d) + u] = high[u] + log(sum[u]);
    }
    return end_of_paths();
  }

  // Replaces the log-probabilities by posteriors, those of labels' arcs times 1 + fastemit_lambda.
  void posteriors(double total) {
    for (int64_t i = 0; i < lattice.cells(); ++i) flow[i] = 0;
    for (int64_t d = lattice.diagonals() - 1; d >= 0; --d) leave(d, total);
  }

 private:
  enum { MARGIN = 16 };

  const Problem& p;
  Lattice lattice;
  Arcs<T> rows;
  int64_t first;  // of the utterance's cells
  double *alpha, *flow;  // of all its cells: of paths to it; flow: the posterior
  double *arriving, *high, *sum, *blank_ahead, *parts;  // rows of a diagonal, indexed by u

  static int64_t room(const Problem& p) { return round_up(p.most_cells + 2 * MARGIN, 16); }

  double* row(int64_t k) { return arriving + k * Diagonals::row(p.U1) + MARGIN; }
  double* part_row(int64_t k) { return parts + k * Diagonals::row(p.U1) + MARGIN; }

  // The number of cell u of diagonal d within the utterance is at(d) + u.
  int64_t at(int64_t d) const { return lattice.before(d) - lattice.first_u(d); }

  // The log-weights of an arc from the cells `begin` to `end` of diagonal d.  blanks: of the cells (t, u+1), by u.
  void weights(const LatticeArc& arc, int64_t d, int64_t begin, int64_t end, const double* blanks, double* to) const {
    for (int64_t u = begin; u < end; ++u) to[u] = arc.weight;
    for (int64_t number : arc.parts) {
      if (number < 0) continue;
      const T* from = rows.part(number) + first + at(d);
      for (int64_t u = begin; u < end; ++u) to[u] += from[u];
    }
    if (!arc.then_blank) return;
    for (int64_t u = begin; u < end; ++u) to[u] += blanks ? blanks[u + 1] : rows.blank[first + at(d + 1) + u + 1];
  }

  // The scores with which arc k arrives at diagonal d, in its row; the largest of all arcs in `high`.
  void arrive(int64_t k, int64_t d, int64_t begin, int64_t end) {
    const LatticeArc& arc = p.lattice_arcs[k];
    double* to = row(k);
    int64_t from = d - arc.dt - arc.du, low = end, stop = end;
    if (from >= 0) {
      low = most(begin, lattice.first_u(from) + arc.du);
      stop = least(end, lattice.last_u(from) + 1 + arc.du);
      if (arc.du) stop = least(stop, lattice.last_u(from + 1) + 1);  // a label's window is that of cell (t, u+1)
      if (low > stop) low = stop = end;
      weights(arc, from, low - arc.du, stop - arc.du, nullptr, to + arc.du);
      const double* scores = alpha + at(from) - arc.du;
      for (int64_t u = low; u < stop; ++u) {
        to[u] += scores[u];
        high[u] = to[u] > high[u] ? to[u] : high[u];
      }
    }
    for (int64_t u = begin; u < low; ++u) to[u] = -INFINITY;
    for (int64_t u = stop; u < end; ++u) to[u] = -INFINITY;
  }

  // The target that the cell has from which an arc of diagonal d ends a path; -1 where none does.
  int64_t last_of(const LatticeArc& arc, int64_t d) const {
    int64_t u = lattice.U1 - 1 - arc.du;
    bool ends = d + arc.dt + arc.du == lattice.diagonals() && (!arc.du || p.label_ends);
    return ends && u >= lattice.first_u(d) && u <= lattice.last_u(d) ? u : -1;
  }

  double end_of_paths() {
    double largest = -INFINITY, terms = 0;
    for (int pass = 0; pass < 2; ++pass)
      for (int64_t k = 0; k < p.arc_count; ++k) {
        const LatticeArc& arc = p.lattice_arcs[k];
        int64_t d = lattice.diagonals() - arc.dt - arc.du, u = d < 0 ? -1 : last_of(arc, d);
        if (u < 0) continue;
        double weight[2];
        weights(arc, d, u, u + 1, nullptr, weight - u);
        double score = alpha[at(d) + u] + weight[0];
        if (pass == 0) largest = score > largest || score != score ? score : largest;
        if (pass == 1 && largest != -INFINITY) terms += exp(score - largest);
      }
    return largest == -INFINITY ? largest : largest + log(terms);
  }

  // The posteriors of the cells of diagonal d, whose arcs lead to cells that have theirs.
  void leave(int64_t d, double total) {
    constexpr int W = Simd<double>::W;
    int64_t begin = lattice.first_u(d), end = lattice.last_u(d) + 1, here = at(d);
    for (int64_t k = 0; k < 2 + p.extra; ++k)
      for (int64_t u = begin; u < end; ++u) part_row(k)[u] = 0;
    for (int64_t k = 0; k < p.arc_count; ++k) {
      const LatticeArc& arc = p.lattice_arcs[k];
      int64_t ahead = d + arc.dt + arc.du, low, stop;
      const double *scores, *after;
      if (ahead < lattice.diagonals()) {
        low = most(begin, lattice.first_u(ahead) - arc.du);
        stop = least(end, lattice.last_u(ahead) + 1 - arc.du);
        if (arc.du) stop = least(stop, lattice.last_u(d + 1));
        scores = alpha + at(ahead) + arc.du;
        after = flow + at(ahead) + arc.du;
      } else {
        low = last_of(arc, d);
        if (low < 0) continue;
        stop = low + 1;
        high[MARGIN] = total;  // in place of a cell's
        sum[MARGIN] = 1;
        scores = high + MARGIN - low;
        after = sum + MARGIN - low;
      }
      if (low >= stop) continue;
      double* taken = row(k);
      weights(arc, d, low, stop, blank_ahead + MARGIN, taken);
      for (int64_t u = low; u < stop; ++u) taken[u] += alpha[here + u] - scores[u];
      for (int64_t u = low; u < stop; u += W) store<double>(taken + u, exp_of<double>(load<double>(taken + u)));
      for (int64_t u = low; u < stop; ++u) taken[u] = after[u] == 0 ? 0 : taken[u] * after[u];
      add(arc, d, low, stop, taken);
    }
    for (int64_t u = begin; u < end; ++u) blank_ahead[MARGIN + u] = rows.blank[first + here + u];
    for (int64_t k = 0; k < 2 + p.extra; ++k)
      for (int64_t u = begin; u < end; ++u) rows.part(k)[first + here + u] = (T)part_row(k)[u];
  }

  // Adds the posteriors of an arc to those of its cells and parts.
  void add(const LatticeArc& arc, int64_t d, int64_t low, int64_t stop, const double* taken) {
    double factor = arc.du ? 1 + p.fastemit_lambda : 1;
    double* flow_here = flow + at(d);
    for (int64_t u = low; u < stop; ++u) flow_here[u] += taken[u];
    for (int64_t number : arc.parts) {
      if (number < 0) continue;
      double* to = part_row(number);
      for (int64_t u = low; u < stop; ++u) to[u] += taken[u] * factor;
    }
    if (!arc.then_blank) return;
    T* blanks = rows.blank + first + at(d + 1) + 1;  // of the cells (t, u+1), which have their posteriors already
    for (int64_t u = low; u < stop; ++u) blanks[u] += (T)(taken[u] * factor);
  }
};

}  // namespace FT_ISA
