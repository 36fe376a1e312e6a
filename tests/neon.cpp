// Runs forward or backward of steps that tests/test_fused_neon.py wrote into files, and writes what it changed back.
//
// For each line `forward FILE` or `backward FILE` from stdin it writes a line: 0, or the number of what is wrong.
//
// The file has the Problem, and then each piece of memory it points to: address in the writing process, bytes, content.
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "../fused_transducer/csrc/problem.h"

extern "C" {
int64_t fused_transducer_forward_bytes(const Problem*);
int64_t fused_transducer_backward_bytes(const Problem*);
void fused_transducer_forward(const Problem*);
void fused_transducer_backward(const Problem*);
}

struct Piece {
  uint64_t address, bytes;
  std::vector<char> content;
};

int run(bool backward, const char* path) {
  Problem p;
  std::vector<Piece> pieces;
  FILE* file = fopen(path, "rb");
  if (!file || fread(&p, sizeof p, 1, file) != 1) return 2;
  for (Piece piece; fread(&piece.address, 16, 1, file) == 1; pieces.push_back(piece)) {
    piece.content.resize(piece.bytes + 64);  // the kernels may read a vector beyond the end of a row
    if (fread(piece.content.data(), 1, piece.bytes, file) != piece.bytes) return 2;
  }
  fclose(file);
  for (const void** pointer = &p.encoder; (void*)pointer < (void*)(&p + 1); ++pointer) {
    if (!*pointer) continue;
    auto same = [&](const Piece& piece) { return piece.address == (uint64_t)*pointer; };
    auto piece = std::find_if(pieces.begin(), pieces.end(), same);
    if (piece == pieces.end()) return 3;
    *pointer = piece->content.data();
  }
  std::vector<char> workspace((backward ? fused_transducer_backward_bytes : fused_transducer_forward_bytes)(&p) + 64);
  p.workspace = (void*)(((uintptr_t)workspace.data() + 63) / 64 * 64);
  (backward ? fused_transducer_backward : fused_transducer_forward)(&p);
  volatile float denormal = 1e-40f;
  if (denormal * 0.5f == 0) return fputs("denormals are flushed after the step too\n", stderr), 4;
  file = fopen(path, "wb");
  for (Piece& piece : pieces) fwrite(piece.content.data(), 1, piece.bytes, file);
  return fclose(file) ? 2 : 0;
}

int main() {
  char function[16], path[4096];
  while (scanf("%15s %4095[^\n]", function, path) == 2) {
    printf("%d\n", run(!strcmp(function, "backward"), path));
    fflush(stdout);
  }
}
