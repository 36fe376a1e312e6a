// The activations between the sum of encoder and decoder and the output layer, and dropout after them.
//
// An activation is a struct: value(x), and slope(x, value), its derivative.  Where NEEDS_X is false the slope follows
// from the value, which backward has at hand, and x may be anything.  The order is that of ACTIVATIONS in call.py.
#pragma once

#include "problem.h"
#include "simd.h"

namespace FT_ISA {

// erfc(a) exp(a^2) for a >= 0: a Chebyshev series in 2 s - 1, where s = 1 / (1 + a / 2).  In float
// it is off by less than 1e-7, in double by less than 1e-15.
static const double ERFC_FLOAT[] = {
    0.3773760996, 0.4825091197, 0.1223245953, 0.01783114972, 0.0003211736525, -0.0003503952565, -2.243880651e-5,
    1.053743312e-5, 5.671331133e-7, -4.297681577e-7, 5.104952513e-9};
static const double ERFC_DOUBLE[] = {
    0.37737609962585947, 0.48250911965068072, 0.12232459533097704, 0.017831149719276793, 0.00032117365249439834,
    -0.00035039525647961568, -2.243880650620326e-5, 1.0537433119356064e-5, 5.6713311326475526e-7,
    -4.2976815766658763e-7, 5.1049525128651408e-9, 1.8899699318179606e-8, -2.2427555298561929e-9,
    -6.8552543705501846e-10, 2.1487959525733993e-10, 5.515409718485674e-12, -1.3477495048063453e-11,
    2.0863894672105997e-12, 4.4818814451485971e-13, -2.2684175777875652e-13, 1.8505867519748427e-14,
    1.1509611397547722e-14, -4.0098901470712498e-15, 1.3982845705777132e-16, 2.6353807721752438e-16};

template <class T, int COUNT> FT_INLINE Vector<T> chebyshev(Vector<T> x, const double (&terms)[COUNT]) {
  Vector<T> before = {}, sum = {};
#pragma GCC unroll 32
  for (int k = COUNT - 1; k > 0; --k) {
    Vector<T> next = (T)2 * x * sum - before + (T)terms[k];
    before = sum;
    sum = next;
  }
  return x * sum - before + (T)terms[0];
}

FT_INLINE float_vector scaled_erfc(float_vector a) {
  return chebyshev<float>(2.0f / (1.0f + 0.5f * a) - 1.0f, ERFC_FLOAT);
}
FT_INLINE double_vector scaled_erfc(double_vector a) {
  return chebyshev<double>(2.0 / (1.0 + 0.5 * a) - 1.0, ERFC_DOUBLE);
}

template <class T> FT_INLINE Vector<T> sigmoid_of(Vector<T> x) {
  Vector<T> e = exp_of<T>(-magnitude<T>(x));
  return (x < (T)0 ? e : x != x ? x : spread<T>(1)) / ((T)1 + e);
}

template <class T> struct Identity {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return x; }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T>) { return spread<T>(1); }
};

template <class T> struct Tanh {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return tanh_of<T>(x); }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) { return (T)1 - value * value; }
};

template <class T> struct Relu {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return x < (T)0 ? Vector<T>{} : x; }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) { return value > (T)0 ? spread<T>(1) : Vector<T>{}; }
};

template <class T> struct LeakyRelu {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return x < (T)0 ? x * (T)0.01 : x; }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) { return value > (T)0 ? spread<T>(1) : spread<T>(0.01); }
};

template <class T> struct Sigmoid {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return sigmoid_of<T>(x); }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) { return value * ((T)1 - value); }
};

template <class T> struct Silu {
  static constexpr bool NEEDS_X = true;
  FT_INLINE Vector<T> value(Vector<T> x) { return x * sigmoid_of<T>(x); }
  FT_INLINE Vector<T> slope(Vector<T> x, Vector<T>) {
    Vector<T> s = sigmoid_of<T>(x);
    return s * ((T)1 + x * ((T)1 - s));
  }
};

template <class T> struct Gelu {  // x times the probability that a normal number is below x
  static constexpr bool NEEDS_X = true;

  FT_INLINE Vector<T> bell(Vector<T> x) { return exp_of<T>((T)-0.5 * x * x); }
  FT_INLINE Vector<T> below(Vector<T> x, Vector<T> bell) {
    Vector<T> tail = (T)0.5 * bell * scaled_erfc(magnitude<T>(x) * (T)0.70710678118654752440);
    return x < (T)0 ? tail : (T)1 - tail;
  }
  FT_INLINE Vector<T> value(Vector<T> x) { return x * below(x, bell(x)); }
  FT_INLINE Vector<T> slope(Vector<T> x, Vector<T>) {
    Vector<T> e = bell(x);
    return below(x, e) + x * e * (T)0.39894228040143267794;
  }
};

template <class T> struct Selu {
  static constexpr bool NEEDS_X = false;
  static constexpr T SCALE = (T)1.0507009873554804934, BELOW = (T)1.7580993408473768600;  // BELOW: SCALE times alpha
  FT_INLINE Vector<T> value(Vector<T> x) {
    return x > (T)0 ? SCALE * x : BELOW * (exp_of<T>(x > (T)0 ? Vector<T>{} : x) - (T)1);
  }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) { return value > (T)0 ? spread<T>(SCALE) : value + BELOW; }
};

template <class T> struct Hardtanh {
  static constexpr bool NEEDS_X = false;
  FT_INLINE Vector<T> value(Vector<T> x) { return x < (T)-1 ? spread<T>(-1) : x > (T)1 ? spread<T>(1) : x; }
  FT_INLINE Vector<T> slope(Vector<T>, Vector<T> value) {
    return magnitude<T>(value) < (T)1 ? spread<T>(1) : Vector<T>{};
  }
};

// Calls run(f) with the activation of the call: outside loops, whose code knows it then.
template <class T, class Run> FT_INLINE void with_activation(const Problem& p, Run run) {
  switch (p.activation) {
    case 1: return run(Tanh<T>());
    case 2: return run(Relu<T>());
    case 3: return run(Sigmoid<T>());
    case 4: return run(LeakyRelu<T>());
    case 5: return run(Silu<T>());
    case 6: return run(Gelu<T>());
    case 7: return run(Selu<T>());
    case 8: return run(Hardtanh<T>());
    default: return run(Identity<T>());
  }
}

// The mask of dropout: a hash of 32 bits of (seed, n, t, u, h), against a limit.  plain.py and kernels.py have the same.
static constexpr uint32_t FIRST_FACTOR = 0x21f0aaad, SECOND_FACTOR = 0xd35a2d97;

FT_INLINE uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * FIRST_FACTOR;
  x = (x ^ (x >> 15)) * SECOND_FACTOR;
  return x ^ (x >> 15);
}

struct Mask {  // of one cell
  uint32_t first = 0, second = 0;

  Mask(const Problem& p, int64_t n, int64_t t, int64_t u) {
    if (!p.drop_below) return;
    uint64_t seed = (uint64_t)*p.seed;
    first = mixed(mixed(mixed((uint32_t)seed ^ (uint32_t)n) ^ (uint32_t)t) ^ (uint32_t)u);
    second = mixed(mixed(mixed((uint32_t)(seed >> 32) ^ (uint32_t)n) + (uint32_t)t) + (uint32_t)u);
  }

  // What the activations from h on are multiplied with: 0 or 1 / (1 - dropout).
  template <class T> FT_INLINE Vector<T> factors(const Problem& p, Mask mask, int64_t h) {
    typedef typename Simd<T>::Bits Bits;
    constexpr uint32_t LOW = 0xffffffff;  // double has lanes of 64 bits for hashes of 32
    Bits x;
    for (int i = 0; i < Simd<T>::W; ++i) x[i] = (uint32_t)(h + i);
    x = x ^ mask.first;
    x = ((x ^ (x >> 16)) * FIRST_FACTOR) & LOW;
    x = ((x ^ (x >> 15)) + mask.second) & LOW;
    x = (x * SECOND_FACTOR) & LOW;
    x = x ^ (x >> 15);
    return x < (uint32_t)p.drop_below ? Vector<T>{} : spread<T>((T)p.keep_scale);
  }
};

}  // namespace FT_ISA
