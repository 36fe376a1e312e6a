// Logits of bfloat16 inputs by dot products of pairs (AVX512-BF16), twice as fast as float32's.
//
// The weight is bfloat16 as it comes; activations are rounded to it, as a layer of torch's does under autocast.  Sums are
// in float32.  A pair is two numbers that follow each other along H in 32 bits, the first in the low half.
#pragma once

#include "gemm.h"

#if defined(__AVX512F__) && (defined(__clang__) || __GNUC__ >= 11)
#define FT_PAIRS 1
#include <immintrin.h>
#else
#define FT_PAIRS 0
#endif

namespace FT_ISA {

// Whether logits are computed from pairs: for bfloat16 inputs, where the processor has the products.
FT_INLINE bool in_pairs(const Problem& p) {
#if FT_PAIRS
  return p.is_bfloat16 && __builtin_cpu_supports("avx512bf16");
#else
  (void)p;
  return false;
#endif
}

FT_INLINE int64_t pairs_of(int64_t H) { return (H + 1) / 2; }

// The bfloat16 nearest to x, of two the even one; a NaN stays a NaN.
FT_INLINE uint32_t rounded(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : bits >> 16 | 0x40;
}

// The pairs of a row of H numbers; behind an odd H there is a 0.
FT_INLINE void round_row(uint32_t* to, const float* from, int64_t H) {
  for (int64_t k = 0; k < H / 2; ++k) to[k] = rounded(from[2 * k]) | rounded(from[2 * k + 1]) << 16;
  if (H % 2) to[H / 2] = rounded(from[H - 1]);
}

// A panel, in pairs, of the transpose of (width, H).
template <class From> FT_INLINE void pack_pairs(uint32_t* panel, const From* from, int64_t H, int64_t width) {
  const int64_t COLUMNS = Block<float>::COLUMNS;
  for (int64_t k = 0; k < pairs_of(H); ++k)
    for (int64_t c = 0; c < COLUMNS; ++c) {
      const From* at = from + c * H + 2 * k;
      panel[k * COLUMNS + c] =
          c >= width ? 0 : rounded(number_of(at[0])) | (2 * k + 1 < H ? rounded(number_of(at[1])) << 16 : 0);
    }
}

#if FT_PAIRS
// (ROWS, H) x (H, COLUMNS) + bias, as `multiply` of gemm.h does.  a: rows of pairs at a distance of lda; panel: of
// pack_pairs.
__attribute__((target("avx512bf16"))) static void multiply_pairs(int64_t pairs, const uint32_t* a, int64_t lda,
                                                                 const uint32_t* panel, const float* bias, float* to,
                                                                 int64_t ldc) {
  typedef Block<float> B;
  __m512 total[B::ROWS][B::VECTORS], sums[B::ROWS][B::VECTORS];
#pragma GCC unroll 16
  for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < B::VECTORS; ++j) total[i][j] = _mm512_loadu_ps(bias + j * B::W);
  for (int64_t first = 0; first < pairs; first += FT_STEPS) {
#pragma GCC unroll 16
    for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) sums[i][j] = _mm512_setzero_ps();
    for (int64_t k = least(FT_STEPS, pairs - first); k > 0; --k) {
      __m512bh of_panel[B::VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) of_panel[j] = (__m512bh)_mm512_loadu_si512(panel + j * B::W);
#pragma GCC unroll 16
      for (int i = 0; i < B::ROWS; ++i) {
        __m512bh of_a = (__m512bh)_mm512_set1_epi32((int)a[i * lda]);
#pragma GCC unroll 4
        for (int j = 0; j < B::VECTORS; ++j) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], of_a, of_panel[j]);
      }
      ++a;
      panel += B::COLUMNS;
    }
#pragma GCC unroll 16
    for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < B::VECTORS; ++j) total[i][j] = _mm512_add_ps(total[i][j], sums[i][j]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < B::ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < B::VECTORS; ++j) _mm512_storeu_ps(to + i * ldc + j * B::W, total[i][j]);
}
#else
FT_INLINE void multiply_pairs(int64_t, const uint32_t*, int64_t, const uint32_t*, const float*, float*, int64_t) {}
#endif

}  // namespace FT_ISA
