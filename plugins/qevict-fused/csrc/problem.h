// What a kernel is given: plain numbers and pointers, checked before.
#pragma once

#include <cstdint>
#include <vector>

namespace qevict_fused {

enum class Number : int32_t { float32, float16, bfloat16 };

// Blocks of a pool, [heads, slots, ...]. Strides are in bytes; what lies inside a block is contiguous.
struct Blocks {
  const char* data = nullptr;
  int64_t head_stride = 0;
  int64_t slot_stride = 0;
  Number number = Number::float32;

  const char* at(int64_t head, int64_t slot) const { return data + head * head_stride + slot * slot_stride; }
};

// What a code stands for: `zero + scale * place`, then, each where it is there: times the norm of its token, mixed by a
// Hadamard matrix over the channels, times the scale of its channel, plus the mean of its channel.
struct Codes {
  int32_t bits = 0;
  int32_t scale_bits = 0;  // of scales and zero points that are codes themselves; 0 if they are numbers
  int64_t groups = 0;  // grids of a window
  bool hadamard = false;
  const float* places = nullptr;  // of each code; nullptr where a code is its place
  Blocks codes, scale, zero, scale_range, zero_range, norm, channel_scale, mean;
};

// Windows that are stored alike, or the sinks of every lane as one window.
struct Segment {
  int64_t window = 0;        // tokens of a window
  int64_t columns = 0;       // windows of every lane, fillers among them
  int64_t first_column = 0;  // among the masses; the sinks come first
  bool coded = false;
  Blocks keys, values;  // where they are not coded
  Codes key_codes, value_codes;
  const int32_t* slots = nullptr;   // [lanes, columns]
  const int64_t* firsts = nullptr;  // [lanes, columns] true position of the first token; beyond any for fillers
};

struct Problem {
  int64_t lanes = 0, heads = 0, group = 0, head_dim = 0, columns = 0;
  const float* queries = nullptr;        // [lanes, heads, head_dim / 8, group, 8 channels], scaled
  const float* asking = nullptr;         // likewise, and what turns multiplied by the amplitude of the turn
  const int64_t* visible = nullptr;      // [lanes] true positions below this are seen
  const uint8_t* asks = nullptr;         // [lanes] whether the query is no pad
  const int64_t* offsets = nullptr;      // [lanes] rotary minus true position
  const float* sink_logits = nullptr;    // [lanes, heads, group]; nullptr where there are none
  float softcap = 0;                     // 0 where nothing is capped
  int64_t pairs = 0;                     // channel pairs that turn
  const float* frequencies = nullptr;    // [pairs]
  const float* turns = nullptr;          // of the places in a window: [window / 8, 2, pairs / 8, 8 places, 8 pairs],
                                         // both rounded up; cosines, then sines
  std::vector<Segment> segments;
};

// Some windows of one segment of one lane. Pieces depend on sizes alone, never on threads.
struct Piece {
  int64_t lane = 0, segment = 0, first = 0, last = 0;
};

// What a piece gives for one KV head, for each query of the group: values weighed by exp(logit - largest), [group,
// head_dim], the largest logit, and the sum of exp(logit - largest). Those of all heads follow one another.
struct Partial {
  float* output;
  float* top;
  float* total;

  static int64_t floats(const Problem& problem) { return (problem.group * (problem.head_dim + 2) + 15) / 16 * 16; }
  Partial(float* memory, const Problem& problem)
      : output(memory), top(memory + problem.group * problem.head_dim), total(top + problem.group) {}
};

constexpr int64_t piece_tokens = 512;
constexpr int64_t tile_tokens = 8;

// Windows of the longest piece.
inline int64_t windows_of_piece(const Segment& segment) {
  return segment.window < piece_tokens ? piece_tokens / segment.window : 1;
}

inline int64_t up_to_tiles(int64_t tokens) { return (tokens + tile_tokens - 1) / tile_tokens * tile_tokens; }

// Floats of memory that `attend` wants to work in.
int64_t scratch_floats(const Problem& problem);

// Attention over a piece. `masses` is where those of its first window are, in [heads, group, columns]: sums of
// exp(logit - largest) by window; nullptr if they are not wanted.
using Attend = void (*)(const Problem&, const Piece&, float* scratch, float* partials, float* masses);

// cos and sin of `position * frequency` in fp32, as the model computes the angle.
using Angles = void (*)(int64_t position, const float* frequencies, int64_t pairs, float* cosines, float* sines);

struct Kernels {
  Attend attend;
  Angles angles;
};

Kernels portable_kernels();
#if defined(__x86_64__)
#define QEVICT_HAS_AVX2 1
Kernels avx2_kernels();
#endif

}  // namespace qevict_fused
