// Which cells the loss needs, found while it is computed: with the logits of a trained model, few.
//
// From any cell, the probabilities of all ways to the end add up to at most 1, since those of its blank and its label do.
// So the paths through a cell have at most the probability of the ways to it, alpha, and all paths that leave the cells
// followed here have together at most the sum of the alphas where they leave.  Utterances are followed side by side, some
// diagonals at a time, along the cells whose alpha is above a limit.  At the end this sum is compared with the
// probability of the paths that stayed: where it is too small for the digits of the loss, no other cell is computed.
// Else the limit is lowered; where that would not help, all cells are computed.
#pragma once

#include "lattice.h"

namespace FT_ISA {

enum {
  LEAST_WORK = 8192,  // H V from which on looking for the cells costs less than it can save
  STEP_CELLS = 64,  // of a step for each thread, since blocks of a product want rows
  MOST_AHEAD = 8,  // diagonals of a step, where fewer have not as many cells
  ASKED = 8,  // diagonals after which it is asked whether the limit does
  MOST_TRIES = 3,  // times that the limit is lowered
  DIAGONALS_A_NAT = 8  // of the loss: with fewer so many cells are needed that steps cost more than they save
};

// The part of the loss that may be missing, far below what rounding takes.
template <class T> FT_INLINE double tolerance() { return sizeof(T) == sizeof(float) ? 1e-9 : 1e-16; }

// What the first limit allows for beside the tolerance, and how low a limit can be, in nats.
constexpr double FIRST_MARGIN = 15, LOWEST_LIMIT = -600;

// Whether the probabilities of a cell's arcs add up to at most 1, and leaving out cells is allowed and pays.
FT_INLINE bool leaves_out(const Problem& p) {
  return p.negligible > 0 && !p.arc_count && !p.delay_penalty && p.V > 1 && p.H * p.V >= LEAST_WORK;
}

// A cell's blank has this while it has no log-probabilities.
template <class T> FT_INLINE bool is_missing(T blank) { return blank == (T)INFINITY; }

enum State { FOLLOWED, PROVEN, GIVEN_UP };

// The cells `low` to `end` (by u) of diagonal d.
struct Range {
  int64_t d, low, end;
};

// How far an utterance is followed.  The cells that are followed do not depend on the steps, and with them not on the
// number of threads: cells of a step that turn out to be left on the way lose their log-probabilities again.
struct Front {
  State state;
  Range here;  // where alpha is
  Range step;  // where the step began
  int64_t ahead, tries;  // ahead: diagonals of the step that are not done
  double limit;  // of log alpha, below which cells are left
  double left;  // sum of the alphas of the cells where paths were left
};

FT_INLINE void begin_front(Front& front, Diagonals rows, double limit) {
  front.here = {0, 0, 1};
  front.ahead = 0;
  front.left = 0;
  front.limit = limit;
  rows.alpha[0] = 0;
}

// The cells of diagonal d that the paths from a step's beginning reach.
FT_INLINE Range reached(const Lattice& lattice, const Range& step, int64_t d) {
  return {d, most(step.low, lattice.first_u(d)), least(step.end + d - step.d - 1, lattice.last_u(d)) + 1};
}

// Where in a row of arcs the cell 0 of a diagonal would be.
FT_INLINE int64_t row_at(const Problem& p, const Lattice& lattice, int64_t n, int64_t d) {
  return p.first_cells[n] + lattice.before(d) - lattice.first_u(d);
}

template <class T> void first_front(const Problem& p, int64_t n, Front& front, Diagonals rows) {
  front.state = p.first_cells[n] == p.first_cells[n + 1] ? GIVEN_UP : FOLLOWED;  // one without a path has no cells
  front.tries = 0;
  for (int64_t u = 0; u < p.U_lengths[n]; ++u)
    if (p.targets[n * (p.U1 - 1) + u] == p.blank) front.state = GIVEN_UP;  // twice the blank can be more than 1
  begin_front(front, rows, log(tolerance<T>()) - FIRST_MARGIN);
}

// Begins again with a lower limit, for a loss of about so much, of which `part` (at most 1) may be missing; or gives up.
template <class T> void follow_again(const Lattice& lattice, Front& front, Diagonals rows, double loss, double part) {
  double limit = log(tolerance<T>() * part) - FIRST_MARGIN - 1.25 * loss;
  bool helps = limit > LOWEST_LIMIT && loss * DIAGONALS_A_NAT < (double)lattice.diagonals();  // false of NaN
  if (helps && ++front.tries <= MOST_TRIES)
    begin_front(front, rows, limit);
  else
    front.state = GIVEN_UP;
}

// Leaves the cells at both ends of this diagonal whose alpha is below the limit.  Returns whether the others do.
template <class T> bool leave_cells(const Lattice& lattice, Front& front, Diagonals rows) {
  Range& here = front.here;
  double stays = 0, leaves = 0;
  while (here.low < here.end && rows.alpha[here.low] < front.limit) leaves += exp(rows.alpha[here.low++]);
  while (here.low < here.end && rows.alpha[here.end - 1] < front.limit) leaves += exp(rows.alpha[--here.end]);
  front.left += leaves;
  if (here.low < here.end && here.d % ASKED) return true;
  for (int64_t u = here.low; u < here.end; ++u) stays += exp(rows.alpha[u]);
  if (here.low < here.end && !(front.left > tolerance<T>() * stays)) return true;  // a NaN goes on
  double so_far = -log(stays + leaves);
  follow_again<T>(lattice, front, rows, so_far * (double)lattice.diagonals() / (double)here.d, 1);
  return false;
}

// Whether what was left is too little for the loss, now that all diagonals are there.
template <class T>
void judge_front(const Problem& p, const Lattice& lattice, Front& front, Diagonals rows, double likelihood) {
  double loss = -likelihood, part = loss < 1 ? loss : 1, missing = exp(log(front.left) - likelihood);
  if (missing <= tolerance<T>() * part && missing * (1 + p.fastemit_lambda) <= p.negligible)
    front.state = PROVEN;
  else
    follow_again<T>(lattice, front, rows, loss, part);
}

// Takes an utterance over the diagonals of a step, whose cells have their log-probabilities now.
template <class T> void advance_front(const Problem& p, int64_t n, Front& front, Diagonals rows) {
  Lattice lattice = lattice_of(p, n);
  Arcs<T> arcs(p);
  int64_t d = front.here.d, end = d + front.ahead;
  bool follows = true;
  for (front.ahead = 0; d < end; ++d) {
    int64_t at = row_at(p, lattice, n, d);
    Range step = reached(lattice, front.step, d), here = front.here;
    for (int64_t u = step.low; u < step.end; ++u)
      if (!follows || u < here.low || u >= here.end) arcs.blank[at + u] = INFINITY;
    if (!follows) continue;
    if (d + 1 == lattice.diagonals()) {
      judge_front<T>(p, lattice, front, rows, rows.alpha[here.low] + arcs.blank[at + here.low]);
      return;
    }
    front.here = reached(lattice, here, d + 1);
    next_diagonal<T>(rows, arcs.blank + at, arcs.label + at, here.low, here.end, front.here.low, front.here.end);
    follows = leave_cells<T>(lattice, front, rows);
  }
}

// Room for the cells of a step.
FT_INLINE int64_t step_room(const Problem& p) { return p.U1 + MOST_AHEAD * (STEP_CELLS * p.threads + MOST_AHEAD); }

// Writes to `cells` those without log-probabilities that the next step needs, of as many utterances as there is room
// for.  Returns how many; -1 if no utterance is to be followed any more.
template <class T> int64_t plan_step(const Problem& p, Front* fronts, Cell* cells) {
  Arcs<T> arcs(p);
  int64_t width = 0, count = 0;
  for (int64_t n = 0; n < p.N; ++n)
    if (fronts[n].state == FOLLOWED) width += fronts[n].here.end - fronts[n].here.low;
  if (!width) return -1;
  int64_t ahead = least(MOST_AHEAD, (STEP_CELLS * p.threads + width - 1) / width);
  for (int64_t n = 0; n < p.N; ++n) {
    Front& front = fronts[n];
    int64_t wanted = ahead * (front.here.end - front.here.low + ahead);
    if (front.state != FOLLOWED || count + wanted > step_room(p)) continue;
    Lattice lattice = lattice_of(p, n);
    front.step = front.here;
    front.ahead = least(ahead, lattice.diagonals() - front.here.d);
    for (int64_t d = front.here.d; d < front.here.d + front.ahead; ++d) {
      Range range = reached(lattice, front.step, d);
      int64_t at = row_at(p, lattice, n, d);
      for (int64_t u = range.low; u < range.end; ++u)
        if (is_missing(arcs.blank[at + u])) cells[count++] = cell_at(p, lattice, n, d, u, at + u);
    }
  }
  return count;
}

}  // namespace FT_ISA
