// For every machine: the compiler chooses among the instructions that all of them have.
#include <type_traits>

#include "problem.h"

namespace qevict_fused {
namespace {
#include "kernel.inc"
}  // namespace

int64_t scratch_floats(const Problem& problem) {
  Scratch scratch(nullptr, problem);
  int64_t most = 0;
  for (const Segment& segment : problem.segments) {
    const int64_t own = up_to_tiles(segment.window) * windows_of_piece(segment);
    most = most < own ? own : most;
  }
  return (scratch.logits - static_cast<float*>(nullptr)) + problem.group * most;
}

Kernels portable_kernels() { return {attend, angles}; }

}  // namespace qevict_fused
