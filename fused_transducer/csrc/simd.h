// Vectors of the widest kind that this object file may use, and exp, tanh and log1p of them.
//
// Written with the vector extensions of GCC and Clang, so one text serves AVX-512, AVX2, SSE2 and NEON.  Everything
// here is static or a template in the namespace of its instruction set, and nothing of the C++ library is included: the
// linker must never take a function that was compiled for a newer processor.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX512F__)
#define FT_ISA avx512
#define FT_BYTES 64
#define FT_ROWS 14  // rows and
#define FT_VECTORS 2  // vectors a row of a block of a matrix product that stays in registers
#elif defined(__AVX2__) && defined(__FMA__)
#define FT_ISA avx2
#define FT_BYTES 32
#define FT_ROWS 6
#define FT_VECTORS 2
#elif defined(__aarch64__)
#define FT_ISA baseline
#define FT_BYTES 16
#define FT_ROWS 8
#define FT_VECTORS 3
#else
#define FT_ISA baseline
#define FT_BYTES 16
#define FT_ROWS 6
#define FT_VECTORS 2
#endif

#define FT_INLINE static inline __attribute__((always_inline))

namespace FT_ISA {

typedef float float_vector __attribute__((vector_size(FT_BYTES)));
typedef double double_vector __attribute__((vector_size(FT_BYTES)));
typedef int32_t int32_vector __attribute__((vector_size(FT_BYTES)));
typedef int64_t int64_vector __attribute__((vector_size(FT_BYTES)));
typedef uint32_t uint32_vector __attribute__((vector_size(FT_BYTES)));
typedef uint64_t uint64_vector __attribute__((vector_size(FT_BYTES)));
typedef float float_unaligned __attribute__((vector_size(FT_BYTES), aligned(4), may_alias));
typedef double double_unaligned __attribute__((vector_size(FT_BYTES), aligned(8), may_alias));
typedef double double_pair __attribute__((vector_size(2 * FT_BYTES)));  // as many as a float_vector has

template <class T> struct Simd;

template <> struct Simd<float> {
  typedef float_vector V;
  typedef float_unaligned Unaligned;
  typedef uint32_vector Bits;
  static constexpr int W = FT_BYTES / 4;
  static constexpr int MANTISSA = 23;
  static constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: added, it leaves the rounded value in the low bits
  static constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
  static constexpr float SMALLEST = -87.33654f;  // exp of less is no normal number
};

template <> struct Simd<double> {
  typedef double_vector V;
  typedef double_unaligned Unaligned;
  typedef uint64_vector Bits;
  static constexpr int W = FT_BYTES / 8;
  static constexpr int MANTISSA = 52;
  static constexpr double ROUND = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double LN2_HIGH = 6.93145751953125e-1, LN2_LOW = 1.42860682030941723212e-6;
  static constexpr double SMALLEST = -708.3964185322641;
};

template <class T> using Vector = typename Simd<T>::V;

template <class T> FT_INLINE Vector<T> load(const T* at) {
  return *reinterpret_cast<const typename Simd<T>::Unaligned*>(at);
}

template <class T> FT_INLINE void store(T* at, Vector<T> value) {
  *reinterpret_cast<typename Simd<T>::Unaligned*>(at) = value;
}

template <class T> FT_INLINE Vector<T> spread(T value) { return value - Vector<T>{}; }

FT_INLINE float_vector exp_of_reduced(float_vector r) {
  float_vector p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * (r * r) + r + 1.0f;
}

FT_INLINE double_vector exp_of_reduced(double_vector r) {
  double_vector p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;  // Taylor: below 1e-17 for |r| <= ln(2) / 2
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  return p * (r * r) + r + 1.0;
}

// exp(x) for x at most 80; 0 where it would be no normal number, -inf included; NaN of NaN.
template <class T> FT_INLINE Vector<T> exp_of(Vector<T> x) {
  typedef Simd<T> S;
  Vector<T> shifted = x * (T)1.4426950408889634074 + S::ROUND;
  Vector<T> n = shifted - S::ROUND;
  Vector<T> r = x - n * S::LN2_HIGH - n * S::LN2_LOW;
  typedef typename S::Bits Bits;  // without a sign: of -inf and NaN, whose sum is not taken, it may overflow
  Bits bits = (Bits)exp_of_reduced(r) + ((Bits)shifted << S::MANTISSA);
  return x >= S::SMALLEST ? (Vector<T>)bits : x < S::SMALLEST ? Vector<T>{} : x;
}

template <class T> FT_INLINE Vector<T> magnitude(Vector<T> x) { return x < (T)0 ? -x : x; }

// (tanh(x) - x) / x^3 for |x| < 0.625, from x^2.
FT_INLINE float_vector tanh_of_small(float_vector z) {
  float_vector p = -5.70498872745e-3f * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  return p * z - 3.33332819422e-1f;
}

FT_INLINE double_vector tanh_of_small(double_vector z) {
  double_vector p = (-9.64399179425052238628e-1 * z - 9.92877231001918586564e1) * z - 1.61468768441708447952e3;
  double_vector q = ((z + 1.12811678491632931402e2) * z + 2.23548839060100448583e3) * z + 4.84406305325125486048e3;
  return p / q;
}

template <class T> FT_INLINE Vector<T> tanh_of(Vector<T> x) {
  Vector<T> a = magnitude<T>(x);
  a = a > (T)20 ? spread<T>(20) : a;  // a NaN stays
  Vector<T> large = (T)1 - (T)2 / (exp_of<T>(a + a) + (T)1);
  Vector<T> z = x * x;
  Vector<T> small = x + x * z * tanh_of_small(z);
  return a < (T)0.625 ? small : (x < (T)0 ? -large : large);
}

// log(1 + e) for 0 <= e <= 1: 2 atanh(e / (2 + e)), whose series in s^2 <= 1/9 ends below 1e-17.
FT_INLINE double_vector log1p_of(double_vector e) {
  double_vector s = e / (e + 2.0), z = s * s;
  double_vector p = spread<double>(1.0 / 33);
#pragma GCC unroll 16
  for (int k = 31; k > 1; k -= 2) p = p * z + 1.0 / k;
  return 2.0 * s * (p * z + 1.0);
}

template <class T> FT_INLINE T largest_of(Vector<T> x) {
  T found = x[0];
  for (int i = 1; i < Simd<T>::W; ++i) found = x[i] > found ? x[i] : found;
  return found;
}

FT_INLINE double_pair widened(float_vector x) { return __builtin_convertvector(x, double_pair); }
FT_INLINE double_vector widened(double_vector x) { return x; }

template <class P> FT_INLINE double sum_of(P x) {
  double found = 0;
  for (unsigned i = 0; i < sizeof(P) / sizeof(double); ++i) found += x[i];
  return found;
}

// Denormal numbers count as 0 while one of these lives: posteriors times probabilities are full of them, and a product
// with one can take a hundred times as long.
struct FlushDenormals {
#if defined(__SSE__)
  unsigned before;
  FlushDenormals() : before(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(before | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushDenormals() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(before));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(before | 1 << 24));
  }
  ~FlushDenormals() { __asm__ __volatile__("msr fpcr, %0" : : "r"(before)); }
#else
  FlushDenormals() {}
  ~FlushDenormals() {}
#endif
};

}  // namespace FT_ISA
