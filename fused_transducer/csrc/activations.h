// The activations between the sum of encoder and decoder and the output layer, and dropout after them.
//
// An activation is a struct: value(x), and slope(value), its derivative, from the value that backward has at hand.  The
// order is that of ACTIVATIONS in call.py.
#pragma once

#include "problem.h"
#include "simd.h"

namespace FT_ISA {

template <class T> FT_INLINE Vector<T> sigmoid_of(Vector<T> x) {
  Vector<T> e = exp_of<T>(-magnitude<T>(x));
  return (x < (T)0 ? e : x != x ? x : spread<T>(1)) / ((T)1 + e);
}

template <class T> struct Identity {
  FT_INLINE Vector<T> value(Vector<T> x) { return x; }
  FT_INLINE Vector<T> slope(Vector<T>) { return spread<T>(1); }
};

template <class T> struct Tanh {
  FT_INLINE Vector<T> value(Vector<T> x) { return tanh_of<T>(x); }
  FT_INLINE Vector<T> slope(Vector<T> value) { return (T)1 - value * value; }
};

template <class T> struct Relu {
  FT_INLINE Vector<T> value(Vector<T> x) { return x < (T)0 ? Vector<T>{} : x; }
  FT_INLINE Vector<T> slope(Vector<T> value) { return value > (T)0 ? spread<T>(1) : Vector<T>{}; }
};

template <class T> struct LeakyRelu {
  FT_INLINE Vector<T> value(Vector<T> x) { return x < (T)0 ? x * (T)0.01 : x; }
  FT_INLINE Vector<T> slope(Vector<T> value) { return value > (T)0 ? spread<T>(1) : spread<T>(0.01); }
};

template <class T> struct Sigmoid {
  FT_INLINE Vector<T> value(Vector<T> x) { return sigmoid_of<T>(x); }
  FT_INLINE Vector<T> slope(Vector<T> value) { return value * ((T)1 - value); }
};

// Calls run(f) with the activation of the call: outside loops, whose code knows it then.
template <class T, class Run> FT_INLINE void with_activation(const Problem& p, Run run) {
  switch (p.activation) {
    case 1: return run(Tanh<T>());
    case 2: return run(Relu<T>());
    case 3: return run(Sigmoid<T>());
    case 4: return run(LeakyRelu<T>());
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
