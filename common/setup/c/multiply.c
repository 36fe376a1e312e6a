// The rate at which this processor multiplies matrices: blocks that stay in registers, with the widest vectors that the
// compiler's flags allow.  NUMBER: float or double.
#include <stdint.h>

#if defined(__AVX512F__)
enum { BYTES = 64, ROWS = 14, VECTORS = 2 };  // rows, and vectors a row, of a block
#elif defined(__AVX2__) && defined(__FMA__)
enum { BYTES = 32, ROWS = 6, VECTORS = 2 };
#elif defined(__aarch64__)
enum { BYTES = 16, ROWS = 8, VECTORS = 3 };
#else
enum { BYTES = 16, ROWS = 6, VECTORS = 2 };
#endif
enum { WIDTH = BYTES / sizeof(NUMBER), COLUMNS = VECTORS * WIDTH };
enum { DEPTH = 224 };  // terms of a sum at once: of both matrices a block's part stays in the first cache

typedef NUMBER Vector __attribute__((vector_size(BYTES), aligned(sizeof(NUMBER)), may_alias));

// Adds to c (ROWS, COLUMNS) the product of a (depth, ROWS), transposed, and b (depth, COLUMNS).
static void multiply_block(int64_t depth, const NUMBER* a, const NUMBER* b, NUMBER* c) {
  Vector sums[ROWS][VECTORS] = {{{0}}};
  for (int64_t k = 0; k < depth; ++k, a += ROWS, b += COLUMNS) {
    Vector of_b[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) of_b[j] = ((const Vector*)b)[j];
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sums[i][j] += a[i] * of_b[j];
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) ((Vector*)c)[i * VECTORS + j] += sums[i][j];
  }
}

int64_t rows_of_block(void) { return ROWS; }
int64_t columns_of_block(void) { return COLUMNS; }

// Adds to c the product of a and b, n x n each; n: a multiple of ROWS and COLUMNS.  a: (n / ROWS, n, ROWS), its rows in
// groups, each column by column; b: (n / COLUMNS, n, COLUMNS), its columns in groups, each row by row; c: (n / ROWS,
// n / COLUMNS, ROWS, COLUMNS).
void multiply(int64_t n, const NUMBER* a, const NUMBER* b, NUMBER* c) {
  for (int64_t first = 0; first < n; first += DEPTH) {
    int64_t depth = n - first < DEPTH ? n - first : DEPTH;
    for (int64_t j = 0; j < n / COLUMNS; ++j)
      for (int64_t i = 0; i < n / ROWS; ++i)
        multiply_block(depth, a + (i * n + first) * ROWS, b + (j * n + first) * COLUMNS,
                       c + (i * (n / COLUMNS) + j) * ROWS * COLUMNS);
  }
}
