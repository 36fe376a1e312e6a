// The order of the cells: utterance by utterance, in each by anti-diagonals t + u, on each by u.  The lattice then
// reads and writes whole diagonals as vectors, and padding has no place in it.
#pragma once

#include "problem.h"
#include "simd.h"

namespace FT_ISA {

FT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
FT_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
FT_INLINE int64_t round_up(int64_t a, int64_t to) { return (a + to - 1) / to * to; }

// The lattice of one utterance of T frames and U1 - 1 targets.  With a window (`of`) only some states have a cell on a
// diagonal: first and last grow from one to the next by 1 at most, as without.
struct Lattice {
  int64_t T, U1;
  const Diagonal* of = nullptr;

  int64_t diagonals() const { return T + U1 - 1; }
  int64_t cells() const { return before(diagonals()); }
  int64_t first_u(int64_t d) const { return of ? of[d].first : most(0, d - T + 1); }
  int64_t last_u(int64_t d) const {
    return of ? of[d].first + of[d + 1].before - of[d].before - 1 : least(d, U1 - 1);
  }

  // Cells on the diagonals before d.
  int64_t before(int64_t d) const {
    if (of) return of[d].before;
    int64_t shorter = least(T, U1), longer = most(T, U1);
    if (d <= shorter) return d * (d + 1) / 2;
    if (d <= longer) return shorter * (shorter + 1) / 2 + (d - shorter) * shorter;
    int64_t left = T + U1 - 1 - d;
    return T * U1 - left * (left + 1) / 2;
  }
};

FT_INLINE Lattice lattice_of(const Problem& p, int64_t n) {
  return {p.T_lengths[n], p.U_lengths[n] + 1, p.diagonals ? p.diagonals + n * (p.T + p.U1 + 1) : nullptr};
}

// What forward leaves of the cells for backward, in rows of a number for each.  The rows of the arcs are used in turn for
// log-probabilities, for shares of the paths through the next cell (lattice.h), and for posteriors.
template <class T> struct Arcs {
  int64_t cells;
  T *blank, *label;  // the first parts of a cell; those of the further outputs follow
  T *largest, *others;  // where p.normalised: the largest logit, and the sum of exp(logit - largest) of the others
  T *largest_duration, *other_durations;  // the same of durations that have a softmax of their own

  explicit Arcs(const Problem& p) : cells(p.first_cells[p.N]), blank(static_cast<T*>(p.arcs)) {
    label = blank + cells;
    largest = part(2 + p.extra);
    others = largest + cells;
    largest_duration = others + cells;
    other_durations = largest_duration + cells;
  }

  T* part(int64_t number) const { return blank + number * cells; }

  // The sum of the parts that are of symbols.
  T posterior(const Problem& p, int64_t cell) const {
    T sum = blank[cell] + label[cell];
    for (int64_t number = 2; number < p.of_symbols; ++number) sum += part(number)[cell];
    return sum;
  }
};

struct Cell {  // where it is, the symbol of its label arc (-1 where all targets are emitted), its number among all cells
  int64_t n, t, u, target, number;
};

// The cell u of diagonal d of an utterance.
FT_INLINE Cell cell_at(const Problem& p, const Lattice& lattice, int64_t n, int64_t d, int64_t u, int64_t number) {
  return Cell{n, d - u, u, u + 1 < lattice.U1 ? p.targets[n * (p.U1 - 1) + u] : -1, number};
}

// A walk over the cells from any of them on.
struct Cursor {
  const Problem& p;
  int64_t n = 0, d = 0, u = 0, number;
  Lattice lattice;

  Cursor(const Problem& problem, int64_t cell) : p(problem), number(cell), lattice{1, 1, nullptr} {
    int64_t high = p.N;  // the utterance: first_cells[n] <= cell < first_cells[high]
    while (high - n > 1) {
      int64_t middle = (n + high) / 2;
      (p.first_cells[middle] <= cell ? n : high) = middle;
    }
    lattice = lattice_of(p, n);
    int64_t within = cell - p.first_cells[n], end = lattice.diagonals();
    while (end - d > 1) {
      int64_t middle = (d + end) / 2;
      (lattice.before(middle) <= within ? d : end) = middle;
    }
    u = lattice.first_u(d) + within - lattice.before(d);
  }

  Cell cell() const { return cell_at(p, lattice, n, d, u, number); }

  void next() {
    ++number;
    if (++u <= lattice.last_u(d)) return;
    if (++d == lattice.diagonals()) {
      d = 0;
      while (++n < p.N && p.first_cells[n] == p.first_cells[n + 1]) {}  // without a path
      if (n < p.N) lattice = lattice_of(p, n);
    }
    u = lattice.first_u(d);
  }
};

}  // namespace FT_ISA
