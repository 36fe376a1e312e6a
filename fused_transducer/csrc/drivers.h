// Forward and backward: every thread takes groups of cells through activation, product and softmax while they are in
// its cache, so logits never reach memory in forward, and one tile of them does in backward: of all symbols, or, where
// forward noted the normalisers, of some symbols at a time.
#pragma once

#include "activations.h"
#include "bfloat16.h"
#include "follow.h"
#include "groups.h"
#include "meeting.h"
#include "walk.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace FT_ISA {

// Cells that a thread takes at once; logits of each that it has at once in forward; in backward, symbols at once where
// there are normalisers, cells that a thread multiplies with their weights, and blocks of symbols whose gradients it has
// at once.
enum { GROUP = FT_ROWS * (FT_ROWS < 10 ? 8 : 4), CHUNK = 1024, SYMBOLS = 512, SHARE = 2 * GROUP, BLOCKS = 8 };

// Of cells that are at most so many times H, the weight is not packed whole: it would take more than their logits do.
enum { FEW = 2 };

// Cells whose parts of the gradients of weight and bias are summed by themselves before they join the others'.  Tiles
// are whole numbers of these (native.py, SUMMED), so that the sums have the same bits whatever the tile is, and with it
// the number of threads.
enum { SUMMED = 448 };

// Lengths of rows in the workspaces: whole blocks of columns, and a little more, since rows whose distance is a power
// of two compete for the same places of a cache.
template <class T> FT_INLINE int64_t stride(int64_t columns) {
  return round_up(columns, Block<T>::COLUMNS) + 64 / (int64_t)sizeof(T);
}

// Columns of the most whole blocks that `columns` hold.
template <class T> constexpr int64_t whole(int64_t columns) { return columns / Block<T>::COLUMNS * Block<T>::COLUMNS; }

// Takes pieces off the workspace, each on a cache line; with no workspace it only counts.  Under the address sanitizer
// each ends in bytes that nobody may touch.
struct Workspace {
  char* base;
  int64_t used = 0;
  template <class T> T* take(int64_t count) {
    T* piece = reinterpret_cast<T*>(base + used);
    int64_t bytes = count * (int64_t)sizeof(T);
    used += round_up(bytes, 64);
#if defined(__SANITIZE_ADDRESS__)
    used += 256;
    if (base) ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(piece) + bytes, round_up(bytes, 64) + 256 - bytes);
#endif
    return piece;
  }
};

// Of one cell while its logits come by in chunks.
template <class T> struct Normaliser {
  T high, blank, label;
  double sum;
};

template <class T> struct ForwardSpace {
  T *packed, *bias, *activations, *logits;
  T* mean;  // of the weights of all symbols (H,), and then of their bias; for label smoothing
  uint32_t* pairs;  // of the activations of each thread's group
  T* further;  // logits of the further outputs of each thread's group
  char *diagonals, *walks;
  Front* fronts;  // where cells are left out, of each utterance, and their diagonals
  char* of_fronts;
  Cell* step;  // cells of a step of theirs
  int64_t* step_cells;  // how many
  Cell* cells;  // all of them, where they are few, ...
  Normaliser<T>* normalisers;  // ... and those of each ...
  T* blanks;  // ... and its logit of a blank that has a sigmoid
  int64_t columns, bytes;  // columns: logits of a cell that are there at once
  bool follows, few;  // few: cells, so that all of them go through some symbols' weights at a time

  explicit ForwardSpace(const Problem& p) {
    Workspace space{static_cast<char*>(p.workspace)};
    int64_t all = round_up(p.V, Block<T>::COLUMNS), count = p.first_cells[p.N];
    columns = least(whole<T>(CHUNK), all);
    few = columns < all && count <= FEW * p.H;
    packed = space.take<T>((few ? columns : all) * p.H);
    bias = space.take<T>(all);
    activations = space.take<T>((few ? round_up(count, GROUP) : p.threads * GROUP) * stride<T>(p.H));
    logits = space.take<T>(p.threads * GROUP * stride<T>(columns));
    mean = space.take<T>(p.label_smoothing ? p.H + 1 : 0);
    pairs = space.take<uint32_t>(in_pairs(p) ? p.threads * GROUP * pairs_of(p.H) : 0);
    further = space.take<T>((few ? count : p.threads * GROUP) * p.extra);
    cells = space.take<Cell>(few ? count : 0);
    normalisers = space.take<Normaliser<T>>(few ? count : 0);
    blanks = space.take<T>(few ? count : 0);
    diagonals = space.take<char>(p.threads * Diagonals::bytes(p.U1));
    walks = space.take<char>(p.threads * Walk<T>::bytes(p));
    follows = !few && leaves_out(p);
    fronts = space.take<Front>(follows ? p.N : 0);
    of_fronts = space.take<char>(follows ? p.N * Diagonals::bytes(p.U1) : 0);
    step = space.take<Cell>(follows ? step_room(p) : 0);
    step_cells = space.take<int64_t>(1);
    bytes = space.used;
  }

  Diagonals front_rows(const Problem& p, int64_t n) const {
    return Diagonals(of_fronts + n * Diagonals::bytes(p.U1), p.U1);
  }
};

// Whether forward keeps the logits of every cell for backward.
FT_INLINE bool keeps_all(const Problem& p) { return p.kept_cells == p.first_cells[p.N]; }

template <class T> struct BackwardSpace {
  T *packed, *bias, *panels, *activations, *logits;
  T* sums;  // gradients of encoder plus decoder
  uint32_t* pairs;  // of the activations of each thread's group
  T* further;  // logits of the further outputs of each thread's cell
  Cell* cells[2];  // of this tile and, while its sums are added, of the one before
  int64_t* counted;  // cells that count before each block
  int64_t columns, blocks, bytes;  // columns: logits of a cell that are there at once

  explicit BackwardSpace(const Problem& p) {
    Workspace space{static_cast<char*>(p.workspace)};
    int64_t rows = round_up(p.tile_cells, GROUP);
    bool of_inputs = p.d_encoder || p.d_decoder;
    columns = p.normalised ? whole<T>(SYMBOLS) : round_up(p.V, Block<T>::COLUMNS);
    packed = space.take<T>(keeps_all(p) ? 0 : columns * p.H);
    bias = space.take<T>(round_up(p.V, Block<T>::COLUMNS));
    panels = space.take<T>(of_inputs ? p.threads * columns * Block<T>::COLUMNS : 0);
    activations = space.take<T>(rows * stride<T>(p.H));
    logits = space.take<T>(rows * stride<T>(columns) + Block<T>::ROWS);  // a block of rows begins in the last columns
    sums = of_inputs ? space.take<T>(rows * stride<T>(p.H)) : activations;
    pairs = space.take<uint32_t>(in_pairs(p) ? p.threads * GROUP * pairs_of(p.H) : 0);
    further = space.take<T>(p.threads * p.extra);
    for (Cell*& list : cells) list = space.take<Cell>(rows);
    blocks = round_up(p.first_cells[p.N], CELLS_A_BLOCK) / CELLS_A_BLOCK;
    counted = space.take<int64_t>(blocks + 1);
    bytes = space.used;
  }
};

// The weights of `columns` symbols from `first` on, in panels.  All threads call this, and meet later.
template <class T> void pack_weight(const Problem& p, T* packed, int64_t first, int64_t columns) {
#pragma omp for schedule(dynamic) nowait
  for (int64_t c = 0; c < columns; c += Block<T>::COLUMNS) {
    T* panel = packed + c * p.H;
    int64_t width = least(Block<T>::COLUMNS, p.V - first - c);
    with_weight<T>(p, [&](auto weight) {
      auto from = weight + (first + c) * p.H;
      if constexpr (sizeof(T) == sizeof(float))
        if (in_pairs(p)) return pack_pairs(reinterpret_cast<uint32_t*>(panel), from, p.H, width);
      pack_panel<T>(panel, from, p.H, width);
    });
  }
}

// The bias, with -inf for symbols there are none of.  All threads call this, and meet later.
template <class T> void fill_bias(const Problem& p, T* bias) {
  const T* given = static_cast<const T*>(p.bias);
#pragma omp single nowait
  for (int64_t v = 0; v < round_up(p.V, Block<T>::COLUMNS); ++v)
    bias[v] = v >= p.V ? -INFINITY : given ? given[v] : (T)0;
}

// The sum of encoder and decoder of one cell, at one column and those behind it.
template <class T> struct Inputs {
  const T *encoder, *decoder;

  Inputs(const Problem& p, int64_t n, int64_t t, int64_t u)
      : encoder(static_cast<const T*>(p.encoder) + p.utterance(n) * p.encoder_n + t * p.encoder_t),
        decoder(static_cast<const T*>(p.decoder) + n * p.decoder_n + u * p.decoder_u) {}

  Vector<T> sum(int64_t h) const { return load<T>(encoder + h) + load<T>(decoder + h); }

  // Less than a vector: zeros behind.
  Vector<T> sum(int64_t h, int64_t count) const {
    T last[Simd<T>::W] = {};
    for (int64_t i = 0; i < count; ++i) last[i] = encoder[h + i] + decoder[h + i];
    return load<T>(last);
  }
};

template <class T, class F, bool DROPS>
FT_INLINE void activate_row(const Problem& p, const Inputs<T>& inputs, Mask mask, T* to) {
  constexpr int W = Simd<T>::W;
  auto put = [&](int64_t h, Vector<T> x) {
    Vector<T> value = F::value(x);
    if constexpr (DROPS) value *= Mask::factors<T>(p, mask, h);
    store<T>(to + h, value);
  };
  int64_t h = 0;
  for (; h + W <= p.H; h += W) put(h, inputs.sum(h));
  if (h < p.H) put(h, inputs.sum(h, p.H - h));
}

// Activation of one cell: (H,), and up to a whole vector what nobody reads.
template <class T> void activate(const Problem& p, int64_t n, int64_t t, int64_t u, T* to) {
  Inputs<T> inputs(p, n, t, u);
  Mask mask(p, n, t, u);
  with_activation<T>(p, [&](auto f) {
    typedef decltype(f) F;
    p.drop_below ? activate_row<T, F, true>(p, inputs, mask, to) : activate_row<T, F, false>(p, inputs, mask, to);
  });
}

// One cell's gradients of a block of columns of its activations, to those of the sum of encoder and decoder.
template <class T, class F, bool DROPS>
FT_INLINE void slope_row(const Problem& p, const Cell& cell, const T* activations, int64_t column, T* gradients) {
  constexpr int W = Simd<T>::W;
  Inputs<T> inputs(p, cell.n, cell.t, cell.u);
  Mask mask(p, cell.n, cell.t, cell.u);
  for (int64_t h = 0; h < least(Block<T>::COLUMNS, p.H - column); h += W) {
    Vector<T> x = {}, factor;
    if constexpr (DROPS || F::NEEDS_X) {
      int64_t left = p.H - column - h;
      x = left >= W ? inputs.sum(column + h) : inputs.sum(column + h, left);
    }
    if constexpr (DROPS)  // the activations at hand have passed the mask
      factor = F::slope(x, F::value(x)) * Mask::factors<T>(p, mask, column + h);
    else
      factor = F::slope(x, load<T>(activations + h));
    store<T>(gradients + h, load<T>(gradients + h) * factor);
  }
}

// The same of `rows` cells.
template <class T>
void through_activation(const Problem& p, const Cell* cells, int64_t rows, const T* activations, int64_t column,
                        T* gradients) {
  int64_t lda = stride<T>(p.H);
  with_activation<T>(p, [&](auto f) {
    typedef decltype(f) F;
    for (int64_t i = 0; i < rows; ++i) {
      const T* of_cell = activations + i * lda;
      T* to = gradients + i * lda;
      p.drop_below ? slope_row<T, F, true>(p, cells[i], of_cell, column, to)
                   : slope_row<T, F, false>(p, cells[i], of_cell, column, to);
    }
  });
}

// Logits of `rows` cells for the `columns` symbols of `packed` and `bias`: whole blocks.  Rows are computed in whole
// blocks too: what is beyond `rows` is rubbish that nobody reads.  pairs: room for those of each thread's activations.
template <class T>
void logits_of(const Problem& p, const T* activations, uint32_t* pairs, const T* packed, const T* bias, int64_t rows,
               int64_t columns, T* logits, int64_t ldc) {
  typedef Block<T> B;
  int64_t lda = stride<T>(p.H);
  if constexpr (sizeof(T) == sizeof(float))
    if (in_pairs(p)) {
      int64_t ldp = pairs_of(p.H);
      pairs += thread_number() * GROUP * ldp;
      for (int64_t r = 0; r < rows; ++r) round_row(pairs + r * ldp, activations + r * lda, p.H);
      for (int64_t c = 0; c < columns; c += B::COLUMNS)
        for (int64_t r = 0; r < rows; r += B::ROWS)
          multiply_pairs(ldp, pairs + r * ldp, ldp, reinterpret_cast<const uint32_t*>(packed + c * p.H), bias + c,
                         logits + r * ldc + c, ldc);
      return;
    }
  for (int64_t c = 0; c < columns; c += B::COLUMNS)
    for (int64_t r = 0; r < rows; r += B::ROWS) {
      T* to = logits + r * ldc + c;
      const T* from = bias + c;
      multiply<T>(
          p.H, activations + r * lda, lda, 1, packed + c * p.H, B::COLUMNS,
          [&](int, int j) { return load<T>(from + j * B::W); },
          [&](int i, int j, Vector<T> sum) { store<T>(to + i * ldc + j * B::W, sum); });
    }
}

template <class T> FT_INLINE T largest_in(const T* logits, int64_t columns) {
  constexpr int W = Simd<T>::W;
  Vector<T> high = load<T>(logits);
  for (int64_t c = W; c < columns; c += W) {
    Vector<T> x = load<T>(logits + c);
    high = x > high ? x : high;
  }
  return largest_of<T>(high);
}

// The sum of exp(logit - high) in float64: beside a 1, float32 would lose what the other symbols have.
template <class T, bool KEEP> FT_INLINE double sum_of_exp(T* logits, int64_t columns, T high) {
  constexpr int W = Simd<T>::W;
  decltype(widened(Vector<T>{})) sum = {};
  for (int64_t c = 0; c < columns; c += W) {
    Vector<T> e = exp_of<T>(load<T>(logits + c) - high);
    if (KEEP) store<T>(logits + c, e);
    sum += widened(e);
  }
  return sum_of(sum);
}

// The mean of all symbols' weights and bias, whose logit is the mean of a cell's logits.  All threads call this, and meet
// later.
template <class T> void average_weight(const Problem& p, T* mean) {
  if (!p.label_smoothing) return;
  const T* bias = static_cast<const T*>(p.bias);
#pragma omp for schedule(dynamic, 16) nowait
  for (int64_t h = 0; h <= p.H; ++h) {
    double sum = 0;
    with_weight<T>(p, [&](auto weight) {
      for (int64_t v = 0; v < p.V; ++v) sum += h < p.H ? number_of(weight[v * p.H + h]) : bias ? bias[v] : 0;
    });
    mean[h] = (T)(sum / (double)p.V);
  }
}

template <class T> double mean_logit(const Problem& p, const T* mean, const T* activations) {
  double sum = mean[p.H];
  for (int64_t h = 0; h < p.H; ++h) sum += (double)mean[h] * activations[h];
  return sum;
}

template <class T>
FT_INLINE void add_chunk(const Problem& p, Normaliser<T>& cell, T* logits, int64_t first, int64_t columns,
                         int64_t target) {
  T high = largest_in<T>(logits, columns);
  if (first == 0) cell.high = -INFINITY, cell.sum = 0;
  if (!(high <= cell.high)) {  // a NaN comes in too
    cell.sum *= exp((double)cell.high - (double)high);
    cell.high = high;
  }
  if (cell.high != -INFINITY) cell.sum += sum_of_exp<T, false>(logits, columns, cell.high);
  if (p.blank >= first && p.blank < first + columns) cell.blank = logits[p.blank - first];
  if (target >= first && target < first + columns) cell.label = logits[target - first];
}

// The parts of the further outputs of a cell, from their logits.  normaliser: of the softmax of the symbols.
template <class T>
void further_parts(const Problem& p, const Arcs<T>& arcs, int64_t cell, const T* logits, double normaliser) {
  if (p.normaliser == APART) {
    Sums sums = sums_of<T>(logits, p.extra);
    normaliser = sums.high + log(sums.sum);
    if (p.normalised) {
      arcs.largest_duration[cell] = (T)sums.high;
      arcs.other_durations[cell] = (T)(sums.sum - 1);
    }
  }
  for (int64_t i = 0; i < p.extra; ++i) arcs.part(2 + i)[cell] = (T)(logits[i] - normaliser);
}

// The parts of a cell whose blank has a sigmoid, from its logit and the label's log-probability among the labels.
template <class T>
void sigmoid_parts(const Problem& p, const Arcs<T>& arcs, int64_t cell, T blank, int64_t target, double added) {
  arcs.blank[cell] = (T)log_sigmoid(blank);
  if (target < 0) return;
  if (target == p.blank)
    arcs.label[cell] = (T)(log_sigmoid(blank) + added);
  else
    arcs.label[cell] += (T)log_sigmoid(-blank);
}

// What is known of `count` cells, at most a group, while chunks of their logits come by.
template <class T> struct Group {
  const Cell* cells;
  int64_t count;
  T* activations;
  Normaliser<T>* normalisers;
  T *further, *blanks;
};

template <class T> void activate_group(const Problem& p, const Group<T>& group) {
  for (int64_t i = 0; i < group.count; ++i) {
    const Cell& cell = group.cells[i];
    activate<T>(p, cell.n, cell.t, cell.u, group.activations + i * stride<T>(p.H));
  }
}

// Takes the logits of `columns` symbols from `first` on, whose weights are in `packed`.
template <class T>
void take_chunk(const Problem& p, const ForwardSpace<T>& space, const Group<T>& group, const T* packed, int64_t first,
                int64_t columns) {
  int64_t ldc = stride<T>(space.columns);
  T *logits = space.logits + thread_number() * GROUP * ldc, *kept = static_cast<T*>(p.kept);
  logits_of<T>(p, group.activations, space.pairs, packed, space.bias + first, group.count, columns, logits, ldc);
  for (int64_t i = 0; i < group.count; ++i) {
    const Cell& cell = group.cells[i];
    for (int64_t c = 0; cell.number < p.kept_cells && c < least(columns, p.V - first); ++c)
      kept[cell.number * p.V + first + c] = logits[i * ldc + c];
  }
  if (p.extra || p.normaliser != TOGETHER)
    for (int64_t i = 0; i < group.count; ++i)
      set_aside<T>(p, first, columns, logits + i * ldc, group.further + i * p.extra, group.blanks + i);
  for (int64_t i = 0; i < group.count; ++i)
    add_chunk<T>(p, group.normalisers[i], logits + i * ldc, first, columns, group.cells[i].target);
}

// Writes the log-probabilities of the arcs, after all chunks.
template <class T> void store_arcs(const Problem& p, const ForwardSpace<T>& space, const Group<T>& group) {
  Arcs<T> arcs(p);
  for (int64_t i = 0; i < group.count; ++i) {
    Normaliser<T>& of = group.normalisers[i];
    const Cell& at = group.cells[i];
    int64_t cell = at.number, target = at.target;
    double normaliser = log(of.sum), high = of.high;
    // to the log-probability of a label: less the later it is
    double added = p.delay_penalty * ((double)(p.T_lengths[at.n] - 1) / 2 - (double)at.t);
    if (p.label_smoothing) {
      double mean = mean_logit<T>(p, space.mean, group.activations + i * stride<T>(p.H));
      of.blank = (T)((1 - p.label_smoothing) * of.blank + p.label_smoothing * mean);  // no NaN of two -inf
      of.label = (T)((1 - p.label_smoothing) * of.label + p.label_smoothing * mean);
    }
    arcs.blank[cell] = (T)(of.blank - high - normaliser);
    arcs.label[cell] = target < 0 ? -(T)INFINITY : (T)(of.label - high - normaliser + added);
    if (p.extra) further_parts<T>(p, arcs, cell, group.further + i * p.extra, high + normaliser);
    if (p.normaliser == SIGMOID) sigmoid_parts<T>(p, arcs, cell, group.blanks[i], target, added);
    if (!p.normalised) continue;
    arcs.largest[cell] = of.high;
    arcs.others[cell] = (T)(of.sum - 1);  // without the largest's own, which is exact
  }
}

// Log-probabilities of the arcs of `count` cells, at most a group.
template <class T>
void log_probabilities(const Problem& p, const ForwardSpace<T>& space, const Cell* cells, int64_t count) {
  int64_t thread = thread_number(), all = round_up(p.V, Block<T>::COLUMNS);
  Normaliser<T> normalisers[GROUP];
  T blanks[GROUP];  // logits of a blank that has a sigmoid
  Group<T> group{cells, count, space.activations + thread * GROUP * stride<T>(p.H), normalisers,
                 space.further + thread * GROUP * p.extra, blanks};
  activate_group<T>(p, group);
  for (int64_t first = 0; first < all; first += space.columns)
    take_chunk<T>(p, space, group, space.packed + first * p.H, first, least(space.columns, all - first));
  store_arcs<T>(p, space, group);
}

// Log-probabilities of the arcs of all cells, where they are few: chunk by chunk of the weight, which is packed for all of
// them at once and never whole.  All threads call this, and meet later.
template <class T> void few_log_probabilities(const Problem& p, const ForwardSpace<T>& space, Meeting& meeting) {
  int64_t count = p.first_cells[p.N], all = round_up(p.V, Block<T>::COLUMNS);
  auto group_at = [&](int64_t begin) {
    return Group<T>{space.cells + begin, least(GROUP, count - begin), space.activations + begin * stride<T>(p.H),
                    space.normalisers + begin, space.further + begin * p.extra, space.blanks + begin};
  };
#pragma omp for schedule(dynamic) nowait
  for (int64_t begin = 0; begin < count; begin += GROUP) {
    for (Cursor cursor(p, begin); cursor.number < least(begin + GROUP, count); cursor.next())
      space.cells[cursor.number] = cursor.cell();
    activate_group<T>(p, group_at(begin));
  }
  for (int64_t first = 0; first < all; first += space.columns) {
    int64_t columns = least(space.columns, all - first);
    pack_weight<T>(p, space.packed, first, columns);
    meeting.wait();
#pragma omp for schedule(dynamic) nowait
    for (int64_t begin = 0; begin < count; begin += GROUP)
      take_chunk<T>(p, space, group_at(begin), space.packed, first, columns);
    meeting.wait();
  }
#pragma omp for schedule(dynamic) nowait
  for (int64_t begin = 0; begin < count; begin += GROUP) store_arcs<T>(p, space, group_at(begin));
}

// Follows all utterances as long as that can save cells.  All threads call this, and meet later.
template <class T> void follow_paths(const Problem& p, const ForwardSpace<T>& space, Meeting& meeting) {
#pragma omp for schedule(dynamic, 16384) nowait
  for (int64_t cell = 0; cell < p.first_cells[p.N]; ++cell) Arcs<T>(p).blank[cell] = INFINITY;
#pragma omp for schedule(dynamic) nowait
  for (int64_t n = 0; n < p.N; ++n) first_front<T>(p, n, space.fronts[n], space.front_rows(p, n));
  meeting.wait();
  while (true) {
#pragma omp single nowait
    {
      for (int64_t n = 0; n < p.N; ++n)
        if (space.fronts[n].ahead) advance_front<T>(p, n, space.fronts[n], space.front_rows(p, n));
      *space.step_cells = plan_step<T>(p, space.fronts, space.step);
    }
    meeting.wait();
    int64_t count = *space.step_cells, share = round_up((count + p.threads - 1) / p.threads, Block<T>::ROWS);
    if (count < 0) return;
    share = most(Block<T>::ROWS, least(GROUP, share));
#pragma omp for schedule(dynamic) nowait
    for (int64_t begin = 0; begin < count; begin += share)
      log_probabilities<T>(p, space, space.step + begin, least(share, count - begin));
    meeting.wait();
  }
}

// The cells among `count` from `begin` on that are needed and have no log-probabilities yet.  Returns how many.
template <class T>
int64_t missing_cells(const Problem& p, const ForwardSpace<T>& space, int64_t begin, int64_t count, Cell* cells) {
  const T* blank = Arcs<T>(p).blank;
  int64_t missing = 0;
  for (Cursor cursor(p, begin); cursor.number < begin + count; cursor.next())
    if (!space.follows || (space.fronts[cursor.n].state == GIVEN_UP && is_missing(blank[cursor.number])))
      cells[missing++] = cursor.cell();
  return missing;
}

template <class T> void lattice_of_utterance(const Problem& p, const ForwardSpace<T>& space, int64_t n) {
  Lattice lattice = lattice_of(p, n);
  Arcs<T> arcs(p);
  if (lattice.cells() == 0) {  // a window without a path
    p.losses[n] = INFINITY;
    return;
  }
  T *blank = arcs.blank + p.first_cells[n], *label = arcs.label + p.first_cells[n];
  Diagonals rows(space.diagonals + thread_number() * Diagonals::bytes(p.U1), p.U1);
  if (space.follows)
    for (int64_t i = 0; i < lattice.cells(); ++i)
      if (is_missing(blank[i])) blank[i] = label[i] = -(T)INFINITY;
  Walk<T> walk(p, n, space.walks + thread_number() * Walk<T>::bytes(p));
  double likelihood = p.arc_count ? walk.likelihood() : alphas<T>(p, lattice, blank, label, rows);
  p.losses[n] = -likelihood;
  if (!p.gradient) return;
  if (likelihood == -INFINITY) {  // no path: no gradient either
    for (int64_t number = 0; number < 2 + p.extra; ++number)
      for (int64_t i = 0; i < lattice.cells(); ++i) arcs.part(number)[p.first_cells[n] + i] = 0;
    return;
  }
  if (p.arc_count)
    walk.posteriors(likelihood);
  else
    posteriors<T>(p, lattice, blank, label, rows);
}

template <class T> void forward(const Problem& p) {
  ForwardSpace<T> space(p);
  Meeting meeting;
  int64_t cells = p.first_cells[p.N];
#pragma omp parallel num_threads(p.threads)
  {
    FlushDenormals flush;
    fill_bias<T>(p, space.bias);
    average_weight<T>(p, space.mean);
    if (!space.few) pack_weight<T>(p, space.packed, 0, round_up(p.V, Block<T>::COLUMNS));
    meeting.wait();
    if (space.few) few_log_probabilities<T>(p, space, meeting);
    if (space.follows) follow_paths<T>(p, space, meeting);
#pragma omp for schedule(dynamic) nowait
    for (int64_t begin = 0; begin < (space.few ? 0 : cells); begin += GROUP) {
      Cell group[GROUP];
      int64_t count = missing_cells<T>(p, space, begin, least(GROUP, cells - begin), group);
      if (count) log_probabilities<T>(p, space, group, count);
    }
    meeting.wait();
#pragma omp for schedule(dynamic) nowait
    for (int64_t n = 0; n < p.N; ++n) {
      lattice_of_utterance<T>(p, space, n);
    }
    meeting.wait();
  }
}

template <class T> int64_t counted_in(const Problem& p, int64_t block) {
  Arcs<T> arcs(p);
  int64_t count = 0, end = least(p.first_cells[p.N], (block + 1) * CELLS_A_BLOCK);
  int64_t begin = block * CELLS_A_BLOCK;
  if (p.of_symbols > 2)
    for (int64_t cell = begin; cell < end; ++cell) count += counts<T>(p, arcs.posterior(p, cell));
  else
    for (int64_t cell = begin; cell < end; ++cell) count += counts<T>(p, arcs.blank[cell] + arcs.label[cell]);
  return count;
}

// Counts the cells that count, block by block.  All threads call this; `begin_of_blocks` follows.
template <class T> void count_cells(const Problem& p, const BackwardSpace<T>& space) {
#pragma omp for schedule(dynamic, 16) nowait
  for (int64_t block = 0; block < space.blocks; ++block) space.counted[block + 1] = counted_in<T>(p, block);
}

// From the cells that count in each block, how many there are before it.  All threads call this, and meet later.
template <class T> void begin_of_blocks(const BackwardSpace<T>& space) {
#pragma omp single nowait
  {
    space.counted[0] = 0;
    for (int64_t block = 0; block < space.blocks; ++block) space.counted[block + 1] += space.counted[block];
  }
}

// The cells number `begin` to `begin + count` of those that count.
template <class T>
void find_cells(const Problem& p, const BackwardSpace<T>& space, int64_t begin, int64_t count, Cell* cells) {
  Arcs<T> arcs(p);
  int64_t block = 0, high = space.blocks;
  while (high - block > 1) {
    int64_t middle = (block + high) / 2;
    (space.counted[middle] <= begin ? block : high) = middle;
  }
  int64_t cell = block * CELLS_A_BLOCK, skip = begin - space.counted[block];
  for (Cursor cursor(p, cell); count > 0; ++cell, cursor.next()) {
    if (!counts<T>(p, arcs.posterior(p, cell)) || skip-- > 0) continue;
    *cells++ = cursor.cell();
    --count;
  }
}

// Some symbols, whose logits are there: from `first` on, `count` of them, `columns` in whole blocks.
struct Symbols {
  int64_t first, count, columns;
};

// Cells number `begin` to `begin + rows` of those that count.
struct Tile {
  int64_t begin, rows;
  Cell* cells;
};

// Posteriors of a cell's parts, times the gradient of the loss.  further: the sum of those of the further outputs, where
// they are in the softmax.
struct Posteriors {
  double blank, label, further;
};

// The logits of one cell to their gradient, in place.  Returns the largest and the sum of the softmax.
template <class T>
Sums softmax_gradient(const Problem& p, const Cell& cell, const Symbols& symbols, const Posteriors& of, T* logits) {
  constexpr int W = Simd<T>::W;
  Arcs<T> arcs(p);
  int64_t at_blank = p.blank - symbols.first, at_label = cell.target - symbols.first;
  bool has_blank = at_blank >= 0 && at_blank < symbols.count, has_label = at_label >= 0 && at_label < symbols.count;
  double of_blank = of.blank, of_label = of.label, all = of_blank + of_label + of.further;
  T high = p.normalised ? arcs.largest[cell.number] : largest_in<T>(logits, symbols.columns);
  double sum = sum_of_exp<T, true>(logits, symbols.columns, high);
  if (p.normalised) sum = 1 + (double)arcs.others[cell.number];
  double blank = has_blank ? logits[at_blank] : 0, label = has_label ? logits[at_label] : 0;
  double shift = p.label_smoothing * all / (double)p.V;
  T factor = (T)(all / sum), less = (T)shift;
  for (int64_t c = 0; c < symbols.columns; c += W) store<T>(logits + c, load<T>(logits + c) * factor - less);
  if (has_label)
    logits[at_label] = (T)(gradient_at(label, sum, of_label, of_blank + of.further) + p.label_smoothing * of_label - shift);
  if (!has_blank) return {high, sum};
  bool both = cell.target == p.blank;
  double at_once = both ? of_blank + of_label : of_blank, other = (both ? 0 : of_label) + of.further;
  logits[at_blank] = (T)(gradient_at(blank, sum, at_once, other) + p.label_smoothing * at_once - shift);
  return {high, sum};
}

// The same where there are further outputs, or a blank with a sigmoid.  further: room for the logits of the former.
template <class T>
void groups_gradient(const Problem& p, const Cell& cell, const Symbols& symbols, Posteriors of, T* logits, T* further) {
  Arcs<T> arcs(p);
  T blank = 0;
  set_aside<T>(p, symbols.first, symbols.count, logits, further, &blank);
  if (p.normaliser == SIGMOID) {
    if (cell.target == p.blank) of = {of.blank + of.label, 0, 0};
    softmax_gradient<T>(p, cell, symbols, {0, of.label, 0}, logits);
    int64_t at = p.blank - symbols.first;
    if (at >= 0 && at < symbols.count) logits[at] = (T)(of.label * sigmoid(blank) - of.blank * sigmoid(-blank));
    return;
  }
  double scale = static_cast<const T*>(p.grad_losses)[cell.n], all = 0;
  for (int64_t number = 2; number < 2 + p.extra; ++number) all += scale * arcs.part(number)[cell.number];
  bool apart = p.normaliser == APART;
  Sums sums = softmax_gradient<T>(p, cell, symbols, {of.blank, of.label, apart ? 0 : all}, logits);
  if (apart && p.normalised)
    sums = {arcs.largest_duration[cell.number], 1 + (double)arcs.other_durations[cell.number]};
  else if (apart)
    sums = sums_of<T>(further, p.extra);
  else
    all += of.blank + of.label;
  Further range(p, symbols.first, symbols.count);
  for (int64_t c = range.begin, i = range.number; c < range.end; ++c, ++i) {
    double own = scale * arcs.part(2 + i)[cell.number];
    logits[c] = (T)gradient_at(exp((double)further[i] - sums.high), sums.sum, own, all - own);
  }
}

// The logits of one cell to their gradient, in place.
template <class T>
void cell_gradient(const Problem& p, const Cell& cell, const Symbols& symbols, T* logits, T* further) {
  Arcs<T> arcs(p);
  double scale = static_cast<const T*>(p.grad_losses)[cell.n];
  Posteriors of{scale * arcs.blank[cell.number], scale * arcs.label[cell.number], 0};
  if (p.extra || p.normaliser != TOGETHER)
    groups_gradient<T>(p, cell, symbols, of, logits, further);
  else
    softmax_gradient<T>(p, cell, symbols, of, logits);
  if (!p.clamp) return;
  int64_t end = p.normaliser == APART ? least(symbols.count, p.symbols() - symbols.first) : symbols.count;
  T most = (T)(p.clamp * fabs(scale));
  for (int64_t c = 0; c < end; ++c) logits[c] = logits[c] > most ? most : logits[c] < -most ? -most : logits[c];
}

// Activations of a group of cells, and the gradient of their logits.
template <class T>
void logit_gradients(const Problem& p, const BackwardSpace<T>& space, const Symbols& symbols, const Tile& tile,
                     int64_t begin, int64_t count) {
  int64_t lda = stride<T>(p.H), ldc = stride<T>(space.columns);
  T *activations = space.activations + begin * lda, *logits = space.logits + begin * ldc;
  Cell* cells = tile.cells + begin;
  if (symbols.first == 0) {
    find_cells<T>(p, space, tile.begin + begin, count, cells);
    for (int64_t i = 0; i < count; ++i) activate<T>(p, cells[i].n, cells[i].t, cells[i].u, activations + i * lda);
  }
  int64_t kept = 0;  // the first cells of the group, since they are in order
  while (kept < count && cells[kept].number < p.kept_cells) ++kept;
  int64_t computed = kept / Block<T>::ROWS * Block<T>::ROWS;  // from this row on: whole blocks, within the group
  if (kept < count)
    logits_of<T>(p, activations + computed * lda, space.pairs, space.packed, space.bias + symbols.first,
                 count - computed, symbols.columns, logits + computed * ldc, ldc);
  for (int64_t i = 0; i < kept; ++i) {
    const T* from = static_cast<const T*>(p.kept) + cells[i].number * p.V + symbols.first;
    for (int64_t c = 0; c < symbols.columns; ++c) logits[i * ldc + c] = c < symbols.count ? from[c] : -(T)INFINITY;
  }
  T* further = space.further + thread_number() * p.extra;
  for (int64_t i = 0; i < count; ++i) cell_gradient<T>(p, cells[i], symbols, logits + i * ldc, further);
}

template <class T>
void add_bias_gradient(const Problem& p, const BackwardSpace<T>& space, const Symbols& symbols, int64_t rows,
                       int64_t symbol) {
  constexpr int W = Simd<T>::W;
  int64_t ldc = stride<T>(space.columns);
  T* to = static_cast<T*>(p.d_bias) + symbols.first + symbol;
  for (int64_t begin = 0; begin < rows; begin += SUMMED) {
    Vector<T> sum = {};
    for (int64_t i = begin; i < least(begin + SUMMED, rows); ++i) sum += load<T>(space.logits + i * ldc + symbol);
    for (int64_t i = 0; i < least(W, symbols.count - symbol); ++i) to[i] += sum[i];
  }
}

// The gradient of FT_ROWS symbols' weights for one panel of columns: (symbols, cells) x (cells, columns).
template <class T>
void add_weight_gradient(const Problem& p, const BackwardSpace<T>& space, const Symbols& symbols, int64_t rows,
                         int64_t symbol, int64_t column) {
  typedef Block<T> B;
  int64_t lda = stride<T>(p.H), ldc = stride<T>(space.columns);
  T sums[B::ROWS * B::COLUMNS], *to = static_cast<T*>(p.d_weight) + (symbols.first + symbol) * p.H + column;
  bool inside = symbol + B::ROWS <= symbols.count && column + B::COLUMNS <= p.H;
  for (int64_t begin = 0; begin < rows; begin += SUMMED) {
    multiply<T>(
        least(SUMMED, rows - begin), space.logits + begin * ldc + symbol, 1, ldc,
        space.activations + begin * lda + column, lda, [](int, int) { return Vector<T>{}; },
        [&](int i, int j, Vector<T> sum) {
          T* at = inside ? to + i * p.H + j * B::W : sums + i * B::COLUMNS + j * B::W;
          store<T>(at, inside ? load<T>(at) + sum : sum);
        });
    if (inside) continue;
    for (int64_t i = 0; i < least(B::ROWS, symbols.count - symbol); ++i)
      for (int64_t c = 0; c < least(B::COLUMNS, p.H - column); ++c) to[i * p.H + c] += sums[i * B::COLUMNS + c];
  }
}

// The gradient of encoder plus decoder: (cells, symbols) x (symbols, columns), added up over all symbols, and then times
// the derivative of the activation.
template <class T>
void input_gradients(const Problem& p, const BackwardSpace<T>& space, const Symbols& symbols, const Cell* cells,
                     int64_t begin, int64_t count) {
  typedef Block<T> B;
  int64_t lda = stride<T>(p.H), ldc = stride<T>(space.columns);
  T* panel = space.panels + thread_number() * space.columns * B::COLUMNS;
  bool first = symbols.first == 0, last = symbols.first + symbols.count == p.V;
  for (int64_t column = 0; column < p.H; column += B::COLUMNS) {
    with_weight<T>(p, [&](auto weight) {
      copy_panel<T>(panel, weight + symbols.first * p.H + column, symbols.count, p.H, least(B::COLUMNS, p.H - column));
    });
    for (int64_t r = begin; r < begin + count; r += B::ROWS) {
      T *to = space.sums + r * lda + column, *activations = space.activations + r * lda + column;
      multiply<T>(
          symbols.count, space.logits + r * ldc, ldc, 1, panel, B::COLUMNS,
          [&](int i, int j) { return first ? Vector<T>{} : load<T>(to + i * lda + j * B::W); },
          [&](int i, int j, Vector<T> sum) { store<T>(to + i * lda + j * B::W, sum); });
      if (last) through_activation<T>(p, cells + r, least(B::ROWS, begin + count - r), activations, column, to);
    }
  }
}

// Adds the columns from `first` on to the gradients of encoder and decoder: no two threads have the same columns, and
// the cells come in order, so the sums are the same every time.
template <class T>
void add_input_gradients(const Problem& p, const BackwardSpace<T>& space, const Tile& tile, int64_t first) {
  int64_t lda = stride<T>(p.H), width = least(Block<T>::COLUMNS, p.H - first);
  T *d_encoder = static_cast<T*>(p.d_encoder), *d_decoder = static_cast<T*>(p.d_decoder);
  for (int64_t i = 0; i < tile.rows; ++i) {
    const Cell& cell = tile.cells[i];
    const T* from = space.sums + i * lda + first;
    if (d_encoder) {
      T* to = d_encoder + (p.utterance(cell.n) * p.T + cell.t) * p.H + first;
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    }
    if (d_decoder) {
      T* to = d_decoder + (cell.n * p.U1 + cell.u) * p.H + first;
      for (int64_t c = 0; c < width; ++c) to[c] += from[c];
    }
  }
}

// What is made of the gradients of a tile's logits, for some symbols.  All threads call this, and meet later: no item
// waits for another, and the small ones come last, so that threads end together.
template <class T>
void add_tile(const Problem& p, const BackwardSpace<T>& space, const Symbols& symbols, const Tile& tile) {
  typedef Block<T> B;
  int64_t across = round_up(p.H, B::COLUMNS) / B::COLUMNS, down = round_up(symbols.count, B::ROWS) / B::ROWS;
  int64_t rows = tile.rows;
  if (p.d_encoder || p.d_decoder) {
#pragma omp for schedule(dynamic) nowait
    for (int64_t begin = 0; begin < rows; begin += SHARE)
      input_gradients<T>(p, space, symbols, tile.cells, begin, least(SHARE, rows - begin));
  }
  if (p.d_weight) {
#pragma omp for schedule(dynamic, BLOCKS) nowait
    for (int64_t item = 0; item < across * round_up(down, BLOCKS); ++item) {
      int64_t symbol = (item / (across * BLOCKS) * BLOCKS + item % BLOCKS) * B::ROWS;
      int64_t column = item / BLOCKS % across * B::COLUMNS;
      if (symbol < symbols.count) add_weight_gradient<T>(p, space, symbols, rows, symbol, column);
    }
  }
  if (p.d_bias) {
#pragma omp for schedule(dynamic, 4) nowait
    for (int64_t symbol = 0; symbol < symbols.count; symbol += Simd<T>::W)
      add_bias_gradient<T>(p, space, symbols, rows, symbol);
  }
}

// Adds a tile's sums to the gradients of encoder and decoder.  All threads call this, and meet later.
template <class T> void add_sums(const Problem& p, const BackwardSpace<T>& space, const Tile& tile) {
  if (!p.d_encoder && !p.d_decoder) return;
#pragma omp for schedule(dynamic) nowait
  for (int64_t column = 0; column < p.H; column += Block<T>::COLUMNS) add_input_gradients<T>(p, space, tile, column);
}

// Threads meet twice for each tile and its symbols.  Between, there is enough to do that one which is not scheduled
// holds up the others only where it has an item in its hands: the gradients of a tile's logits are made while the sums
// of the one before are added, and the next symbols' weights are packed while these symbols' gradients are multiplied.
template <class T> void backward(const Problem& p) {
  BackwardSpace<T> space(p);
  Meeting meeting;
  int64_t all = round_up(p.V, Block<T>::COLUMNS);
  bool once = space.columns == all, packs = !keeps_all(p);
#pragma omp parallel num_threads(p.threads)
  {
    FlushDenormals flush;
    count_cells<T>(p, space);
    fill_bias<T>(p, space.bias);
    if (packs) pack_weight<T>(p, space.packed, 0, space.columns);
    meeting.wait();
    begin_of_blocks<T>(space);
    meeting.wait();
    int64_t cells = space.counted[space.blocks];
    Tile before{0, 0, space.cells[1]};
    for (int64_t begin = 0; begin < cells; begin += p.tile_cells) {
      Tile tile{begin, least(p.tile_cells, cells - begin), space.cells[before.cells == space.cells[0]]};
      for (int64_t first = 0; first < all; first += space.columns) {
        Symbols symbols{first, least(space.columns, p.V - first), least(space.columns, all - first)};
#pragma omp for schedule(dynamic) nowait
        for (int64_t row = 0; row < tile.rows; row += GROUP)
          logit_gradients<T>(p, space, symbols, tile, row, least(GROUP, tile.rows - row));
        if (first == 0) add_sums<T>(p, space, before);
        meeting.wait();
        int64_t next = first + space.columns < all ? first + space.columns : 0;
        if (packs && !once) pack_weight<T>(p, space.packed, next, least(space.columns, all - next));
        add_tile<T>(p, space, symbols, tile);
        meeting.wait();
      }
      before = tile;
    }
    add_sums<T>(p, space, before);
    meeting.wait();
  }
}

}  // namespace FT_ISA
