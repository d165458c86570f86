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
  bool per_channel = false;
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
  const float* queries = nullptr;        // [lanes, heads, group, head_dim], scaled
  const int64_t* visible = nullptr;      // [lanes] true positions below this are seen
  const int64_t* offsets = nullptr;      // [lanes] rotary minus true position
  const float* sink_logits = nullptr;    // [lanes, heads, group]; nullptr where there are none
  float softcap = 0;                     // 0 where nothing is capped
  int64_t pairs = 0;                     // channel pairs that turn
  const float* frequencies = nullptr;    // [pairs]
  float amplitude = 1;
  const float* turns = nullptr;          // [2, window, pairs] cosine, then sine, of the places in a window
  std::vector<Segment> segments;
};

// A piece of one segment of one lane, for one KV head. Pieces depend on sizes alone, never on threads.
struct Piece {
  int64_t lane = 0, head = 0, segment = 0, first = 0, last = 0;
};

// What a piece gives, for each query of the group: the largest logit, the sum of exp(logit - largest), and the values
// weighed alike, [group, head_dim].
struct Partial {
  float* top;
  float* total;
  float* output;
};

constexpr int64_t piece_tokens = 512;
constexpr int64_t tile_tokens = 8;

inline int64_t up_to_tiles(int64_t tokens) { return (tokens + tile_tokens - 1) / tile_tokens * tile_tokens; }

// Floats of memory that `attend` wants to work in.
int64_t scratch_floats(const Problem& problem);

// Attention over a piece. `masses` is [group, columns]: sums of exp(logit - largest) by window; nullptr if not wanted.
using Attend = void (*)(const Problem&, const Piece&, float* scratch, const Partial&, float* masses, int64_t stride);

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
