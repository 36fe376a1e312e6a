// Matrix products, a block of FT_ROWS x FT_VECTORS vectors in registers at a time.
//
// Why not ATen's: a product that is called for a whole tile must write all of it to memory, wait for every thread and
// read it again, and the BLAS behind it may not use what the processor has (MKL keeps to AVX2 on AMD's, at 0.4 of the
// rate of this loop there).
#pragma once

#include "cells.h"

namespace FT_ISA {

template <class T> struct Block {
  static constexpr int W = Simd<T>::W, ROWS = FT_ROWS, VECTORS = FT_VECTORS, COLUMNS = VECTORS * W;
};

// Products that are summed by themselves before they join the sum of a block: a float32 sum of hundreds of terms loses
// digits, a sum of sums hardly any.
enum { FT_STEPS = 64 };

// (ROWS, K) x (K, COLUMNS).  a: of row i and k at a[i * row + k * step]; b: row k at b[k * ldb].
// start(i, j): the vector to begin from; finish(i, j, sum): where the sum goes.
template <class T, class Start, class Finish>
FT_INLINE void multiply(int64_t K, const T* a, int64_t row, int64_t step, const T* b, int64_t ldb, Start start,
                        Finish finish) {
  typedef Block<T> B;
  Vector<T> total[B::ROWS][B::VECTORS];
  for (int i = 0; i < B::ROWS; ++i)
    for (int j = 0; j < B::VECTORS; ++j) total[i][j] = start(i, j);
  for (int64_t first = 0; first < K; first += FT_STEPS) {
    Vector<T> sums[B::ROWS][B::VECTORS];
#pragma GCC unroll 16
    for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) sums[i][j] = Vector<T>{};
    for (int64_t k = least(FT_STEPS, K - first); k > 0; --k) {
      Vector<T> of_b[B::VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) of_b[j] = load<T>(b + j * B::W);
#pragma GCC unroll 16
      for (int i = 0; i < B::ROWS; ++i) {
        T of_a = a[i * row];
#pragma GCC unroll 4
        for (int j = 0; j < B::VECTORS; ++j) sums[i][j] += of_a * of_b[j];
      }
      a += step;
      b += ldb;
    }
#pragma GCC unroll 16
    for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) total[i][j] += sums[i][j];
  }
  for (int i = 0; i < B::ROWS; ++i)
    for (int j = 0; j < B::VECTORS; ++j) finish(i, j, total[i][j]);
}

// Panels: COLUMNS columns of a matrix side by side, row after row, so that a product reads straight on.  Columns beyond
// the last are 0.

// A weight that comes as bfloat16 is read as such, and never turned into float32 whole.
struct Bfloat16 {
  uint16_t bits;
};

FT_INLINE float number_of(float x) { return x; }
FT_INLINE double number_of(double x) { return x; }
FT_INLINE float number_of(Bfloat16 x) {
  uint32_t bits = (uint32_t)x.bits << 16;
  float number;
  __builtin_memcpy(&number, &bits, sizeof number);
  return number;
}

// Calls use(weight) with the weight of the call, as numbers of the kind that it has.
template <class T, class Use> FT_INLINE void with_weight(const Problem& p, Use use) {
  if constexpr (sizeof(T) == sizeof(float))
    if (p.is_bfloat16) return use(static_cast<const Bfloat16*>(p.weight));
  use(static_cast<const T*>(p.weight));
}

// A panel of the transpose of (width, rows).
template <class T, class From> void pack_panel(T* panel, const From* from, int64_t rows, int64_t width) {
  typedef Block<T> B;
  constexpr int64_t LINE = 64 / sizeof(From);  // rows at once: a cache line of `from`
  for (int64_t begin = 0; begin < rows; begin += LINE) {
    int64_t end = least(begin + LINE, rows);
    for (int64_t c = 0; c < width; ++c)
      for (int64_t r = begin; r < end; ++r) panel[r * B::COLUMNS + c] = number_of(from[c * rows + r]);
    for (int64_t r = begin; r < end; ++r)
      for (int64_t c = width; c < B::COLUMNS; ++c) panel[r * B::COLUMNS + c] = 0;
  }
}

// A panel of `width` columns that lie side by side in rows of `ld`.
template <class T, class From> void copy_panel(T* to, const From* from, int64_t rows, int64_t ld, int64_t width) {
  typedef Block<T> B;
  for (int64_t r = 0; r < rows; ++r, to += B::COLUMNS, from += ld) {
    if constexpr (sizeof(From) == sizeof(T))
      if (width == B::COLUMNS) {
        for (int j = 0; j < B::VECTORS; ++j) store<T>(to + j * B::W, load<T>(from + j * B::W));
        continue;
      }
    for (int64_t c = 0; c < B::COLUMNS; ++c) to[c] = c < width ? number_of(from[c]) : 0;
  }
}

}  // namespace FT_ISA
