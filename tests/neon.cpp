// A step of a small problem through the C++ code of fused_transducer, printed: losses, and sums of the gradients.
// tests/test_fused_neon.py compiles it for this processor and for aarch64, and compares what both print.
#include <stdio.h>
#include <stdlib.h>

#include <vector>

#include "../fused_transducer/csrc/dispatch.cpp"

static uint32_t state = 1;

static double drawn() {
  state = state * 1664525u + 1013904223u;
  return (double)(state >> 8) / (1 << 24) - 0.5;
}

static std::vector<float> numbers(int64_t count) {
  std::vector<float> made(count);
  for (float& x : made) x = (float)drawn();
  return made;
}

int main(int, char** words) {
  int64_t N = 2, T = 9, U1 = 5, H = 37, V = 70, seed = 5;
  std::vector<int64_t> T_lengths{9, 6}, U_lengths{4, 3}, first{0, 45, 69}, targets;
  for (int64_t i = 0; i < N * (U1 - 1); ++i) targets.push_back(1 + (int64_t)((drawn() + 0.5) * (double)(V - 1)));
  std::vector<float> encoder = numbers(N * T * H), decoder = numbers(N * U1 * H), weight = numbers(V * H), bias = numbers(V);
  std::vector<float> arcs(2 * 69), ones{1, 1}, gradients[4];
  std::vector<double> losses(N), dropped(N);
  Problem p = {};
  p.N = N, p.T = T, p.U1 = U1, p.H = H, p.V = V, p.activation = atoi(words[1]), p.drop_below = atoll(words[2]);
  p.gradient = 1, p.threads = 2, p.tile_cells = 69, p.keep_scale = 1.25, p.delay_penalty = 0.1, p.label_smoothing = 0.1;
  p.encoder_n = T * H, p.encoder_t = H, p.decoder_n = U1 * H, p.decoder_u = H;
  p.encoder = encoder.data(), p.decoder = decoder.data(), p.weight = weight.data(), p.bias = bias.data();
  p.grad_losses = ones.data(), p.targets = targets.data(), p.T_lengths = T_lengths.data();
  p.U_lengths = U_lengths.data(), p.first_cells = first.data(), p.seed = &seed, p.arcs = arcs.data();
  p.losses = losses.data(), p.dropped = dropped.data();
  void** outputs[] = {&p.d_encoder, &p.d_decoder, &p.d_weight, &p.d_bias};
  int64_t sizes[] = {N * T * H, N * U1 * H, V * H, V};
  std::vector<char> workspace(fused_transducer_forward_bytes(&p) + 64);
  p.workspace = (void*)(((uintptr_t)workspace.data() + 63) / 64 * 64);
  fused_transducer_forward(&p);
  for (int i = 0; i < 4; ++i) gradients[i].resize(sizes[i]), *outputs[i] = gradients[i].data();
  std::vector<char> more(fused_transducer_backward_bytes(&p) + 64);
  p.workspace = (void*)(((uintptr_t)more.data() + 63) / 64 * 64);
  fused_transducer_backward(&p);
  for (double loss : losses) printf("%.8g\n", loss);
  for (const std::vector<float>& gradient : gradients) {
    double sum = 0, squares = 0;
    for (float x : gradient) sum += x, squares += x * x;
    printf("%.8g\n%.8g\n", sum, squares);
  }
}
