// One call, as Python hands it over (fused_transducer/native.py has the same fields in the same order).
#pragma once

#include <stdint.h>

// An arc of a lattice: Arc of lattices.py.  parts: -1 for none.
struct LatticeArc {
  int64_t dt, du, parts[2], then_blank;
  double weight;
};

// A diagonal d = t + u of the cells of an utterance that has a window: its cells on the diagonals before, and the first
// state u on this one (`diagonals_of` of windows.py).
struct Diagonal {
  int64_t before, first;
};

// How outputs become log-probabilities: one softmax; the further outputs with one of their own; blank by a sigmoid and
// the others by a softmax.
enum { TOGETHER = 0, APART = 1, SIGMOID = 2 };

struct Problem {
  // sizes
  int64_t N, T, U1, H, V;  // N: rows of targets, M of call.py; U1 = longest U + 1
  int64_t most_cells;  // room for those of a row
  int64_t blank, activation;  // activation: its number in ACTIVATIONS of call.py
  int64_t drop_below;  // dropout drops where a hash of 32 bits is below this; 0: no dropout
  int64_t is_double, is_bfloat16;  // inputs; of bfloat16 ones the weight is, the others come as float32
  int64_t gradient, threads, tile_cells, kept_cells;
  int64_t normalised;  // arcs has the rows of the normaliser too
  int64_t extra, of_symbols;  // outputs behind those of the symbols; parts of a cell that are of symbols
  int64_t normaliser, label_ends, arc_count;  // label_ends: a path may end with a label; arc_count: 0 for regular arcs
  int64_t encoder_n, encoder_t, decoder_n, decoder_u;  // strides, in elements; the last dimension is contiguous
  double negligible, fastemit_lambda, delay_penalty, label_smoothing;
  double clamp, keep_scale;  // clamp: 0 for none; keep_scale: 1 / (1 - dropout)
  // inputs, float or double
  const void *encoder, *decoder, *weight, *bias, *grad_losses;
  const int64_t *targets, *T_lengths, *U_lengths;  // targets (N, U1 - 1) contiguous
  const int64_t* utterance_of;  // of each row: its utterance of encoder; null where it is the row's own number
  const LatticeArc* lattice_arcs;
  const int64_t* first_cells;  // (N + 1,) cells before each utterance
  const Diagonal* diagonals;  // (N, T + U1 + 1); null where all cells are computed
  const int64_t* seed;  // of dropout; null without it
  // between forward and backward: rows of a number for each cell (`Arcs` in cells.h); the logits of the first cells
  // (kept_cells, V)
  void *arcs, *kept;
  // outputs
  double* losses;  // (N,)
  void *d_encoder, *d_decoder, *d_weight, *d_bias;  // contiguous, zero on entry; null where not wanted
  void* workspace;

  int64_t symbols() const { return V - extra; }
  int64_t utterance(int64_t n) const { return utterance_of ? utterance_of[n] : n; }
};

// Cells whose number of those that count is known, so that any of these is found fast.
enum { CELLS_A_BLOCK = 1024 };
