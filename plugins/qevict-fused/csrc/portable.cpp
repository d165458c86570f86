// For every machine: the compiler chooses among the instructions that all of them have.
#include <type_traits>

#include "problem.h"

namespace qevict_fused {
namespace {
#include "kernel.inc"
}  // namespace

int64_t scratch_floats(const Problem& problem) { return Scratch(nullptr, problem).floats; }

Kernels portable_kernels() { return {attend, angles}; }

}  // namespace qevict_fused
