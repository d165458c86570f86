// The operator `qevict_fused::attend` on the stable ABI of LibTorch: looks at everything that it is given before a kernel
// does, cuts the work into pieces, and puts their answers together.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "problem.h"

#if defined(QEVICT_HAS_AVX2)
#include <cpuid.h>
#endif

namespace qevict_fused {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t never = std::numeric_limits<int64_t>::max();
constexpr int64_t tiny = 4096;  // tokens, over all heads, that are not worth a second thread

// A line of the processor's cache. Of vectors of eight floats from its begin on, none lies in two lines.
struct alignas(64) Line {
  float floats[16];
};

// Floats in whole lines.
class Lines {
 public:
  explicit Lines(int64_t floats = 0) : lines_(floats / 16 + 1) {}
  float* data() { return lines_.data()->floats; }

  // At least so many floats, of any value.
  float* room(int64_t floats) {
    if (static_cast<size_t>(floats) > 16 * lines_.size()) *this = Lines(floats);
    return data();
  }

 private:
  std::vector<Line> lines_;
};

// ── what is given ───────────────────────────────────────────────────────────────────────────────────────────────────

std::string shape_of(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t axis = 0; axis < tensor.dim(); ++axis) text += (axis ? ", " : "") + std::to_string(tensor.size(axis));
  return text + "]";
}

void check_shape(const char* name, const Tensor& tensor, const std::vector<int64_t>& wanted) {
  bool same = tensor.dim() == static_cast<int64_t>(wanted.size());
  for (size_t axis = 0; same && axis < wanted.size(); ++axis) same = wanted[axis] < 0 || tensor.size(axis) == wanted[axis];
  std::string shape = "[";
  for (size_t axis = 0; axis < wanted.size(); ++axis) {
    shape += (axis ? ", " : "") + (wanted[axis] < 0 ? std::string("any") : std::to_string(wanted[axis]));
  }
  STD_TORCH_CHECK(same, "qevict_fused::attend: ", name, " must be ", shape, "], got ", shape_of(tensor));
  STD_TORCH_CHECK(tensor.is_cpu(), "qevict_fused::attend: ", name, " must be on the CPU");
}

void check_type(const char* name, const Tensor& tensor, ScalarType wanted) {
  STD_TORCH_CHECK(tensor.scalar_type() == wanted, "qevict_fused::attend: ", name, " has the wrong dtype");
}

Number number_of(const char* name, const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return Number::float32;
    case ScalarType::Half: return Number::float16;
    case ScalarType::BFloat16: return Number::bfloat16;
    default: STD_TORCH_CHECK(false, "qevict_fused::attend: ", name, " must be float32, float16 or bfloat16");
  }
}

// [heads, slots, ...] with contiguous blocks.
Blocks blocks_of(const char* name, const Tensor& tensor, const std::vector<int64_t>& wanted, bool bytes) {
  check_shape(name, tensor, wanted);
  int64_t expected = 1;
  for (int64_t axis = tensor.dim() - 1; axis > 1; --axis) {
    STD_TORCH_CHECK(tensor.size(axis) == 1 || tensor.stride(axis) == expected, "qevict_fused::attend: the blocks of ",
                    name, " must be contiguous");
    expected *= tensor.size(axis);
  }
  STD_TORCH_CHECK(tensor.numel() == 0 || tensor.data_ptr(), "qevict_fused::attend: ", name, " has no storage");
  if (bytes) check_type(name, tensor, ScalarType::Byte);
  const Number number = bytes ? Number::float32 : number_of(name, tensor);
  const int64_t item = bytes ? 1 : (number == Number::float32 ? 4 : 2);
  return {static_cast<const char*>(tensor.data_ptr()), tensor.stride(0) * item, tensor.stride(1) * item, number};
}

// Whole numbers of either width, with any strides.
std::vector<int64_t> integers(const char* name, const Tensor& tensor, const std::vector<int64_t>& wanted) {
  check_shape(name, tensor, wanted);
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || tensor.scalar_type() == ScalarType::Int, "qevict_fused::attend: ", name,
                  " must be int32 or int64");
  const int64_t rows = tensor.size(0), columns = tensor.dim() > 1 ? tensor.size(1) : 1;
  const int64_t row_stride = tensor.stride(0), column_stride = tensor.dim() > 1 ? tensor.stride(1) : 0;
  std::vector<int64_t> found(rows * columns);
  const void* data = tensor.data_ptr();
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      const int64_t at = row * row_stride + column * column_stride;
      found[row * columns + column] = wide ? static_cast<const int64_t*>(data)[at] : static_cast<const int32_t*>(data)[at];
    }
  }
  return found;
}

float number_at(const char* data, Number number, int64_t index) {
  uint32_t bits = 0;
  float x;
  if (number == Number::float32) {
    std::memcpy(&x, data + 4 * index, 4);
    return x;
  }
  std::memcpy(&bits, data + 2 * index, 2);
  if (number == Number::float16) return torch::headeronly::detail::fp16_ieee_to_fp32_value(static_cast<uint16_t>(bits));
  bits <<= 16;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Numbers of any of the three dtypes, with any strides, as contiguous fp32 times a factor.
std::vector<float> floats(const char* name, const Tensor& tensor, float factor) {
  const Number number = number_of(name, tensor);
  const int64_t last = tensor.dim() - 1, length = tensor.size(last), stride = tensor.stride(last);
  std::vector<float> found(tensor.numel());
  std::vector<int64_t> index(tensor.dim(), 0);
  const auto* data = static_cast<const char*>(tensor.data_ptr());
  for (size_t row = 0; row < found.size(); row += length) {
    int64_t at = 0;
    for (int64_t axis = 0; axis < last; ++axis) at += index[axis] * tensor.stride(axis);
    for (int64_t each = 0; each < length; ++each) found[row + each] = number_at(data, number, at + each * stride) * factor;
    for (int64_t axis = last - 1; axis >= 0; --axis) {
      if (++index[axis] < tensor.size(axis)) break;
      index[axis] = 0;
    }
  }
  return found;
}

// ── segments ────────────────────────────────────────────────────────────────────────────────────────────────────────

// One side of an encoded segment: numbers that say what its arrays are, and the arrays in this order.
enum Format : int64_t { bits, scale_bits, group_channels, hadamard, normed, scaled, centred, levelled, fields };

// Reads the arrays of a list one after another.
struct Arrays {
  const std::vector<Tensor>& all;
  size_t next = 0;

  const Tensor& take() {
    STD_TORCH_CHECK(next < all.size(), "qevict_fused::attend: formats ask for more arrays than there are");
    return all[next++];
  }
};

// Keys have a grid for each channel of a window, values for each token, or for some channels of it.
Codes codes_of(bool keys, const int64_t* format, Arrays& arrays, int64_t heads, int64_t slots, int64_t window, int64_t head_dim) {
  Codes codes;
  const int64_t width = format[Format::bits], scale_width = format[Format::scale_bits];
  STD_TORCH_CHECK(width == 2 || width == 3 || width == 4 || width == 8, "qevict_fused::attend: codes of ", width,
                  " bits; allowed: 2, 3, 4, 8");
  STD_TORCH_CHECK(scale_width == 0 || scale_width == 4 || scale_width == 8, "qevict_fused::attend: scales of ",
                  scale_width, " bits; allowed: 0, 4, 8");
  const int64_t channels = format[Format::group_channels];
  STD_TORCH_CHECK(channels > 0 && head_dim % channels == 0, "qevict_fused::attend: groups of ", channels,
                  " channels do not divide ", head_dim);
  STD_TORCH_CHECK(window * head_dim * width % 8 == 0, "qevict_fused::attend: codes do not fill whole bytes");
  codes.bits = static_cast<int32_t>(width);
  codes.scale_bits = static_cast<int32_t>(scale_width);
  codes.groups = keys ? head_dim : window * (head_dim / channels);
  STD_TORCH_CHECK(!format[keys ? Format::scaled : Format::normed], "qevict_fused::attend: neither scales by channel of keys "
                  "nor norms of values are read");
  codes.hadamard = format[Format::hadamard] != 0;
  codes.codes = blocks_of("codes", arrays.take(), {heads, slots, window * head_dim * width / 8}, true);
  const bool packed = scale_width != 0;
  const int64_t grids = packed ? codes.groups * scale_width / 8 : codes.groups;
  codes.scale = blocks_of("scale", arrays.take(), {heads, slots, grids}, packed);
  codes.zero = blocks_of("zero", arrays.take(), {heads, slots, grids}, packed);
  if (packed) {
    STD_TORCH_CHECK(codes.groups * scale_width % 8 == 0, "qevict_fused::attend: scales do not fill whole bytes");
    codes.scale_range = blocks_of("scale_range", arrays.take(), {heads, slots, 2}, false);
    codes.zero_range = blocks_of("zero_range", arrays.take(), {heads, slots, 2}, false);
  }
  if (format[Format::normed]) codes.norm = blocks_of("norm", arrays.take(), {heads, slots, window}, false);
  if (format[Format::scaled]) codes.channel_scale = blocks_of("channel_scale", arrays.take(), {heads, slots, head_dim}, false);
  if (format[Format::centred]) codes.mean = blocks_of("mean", arrays.take(), {heads, slots, head_dim}, false);
  if (format[Format::levelled]) {
    const Tensor& places = arrays.take();
    check_shape("levels", places, {int64_t{1} << width});
    check_type("levels", places, ScalarType::Float);
    STD_TORCH_CHECK(places.is_contiguous(), "qevict_fused::attend: levels must be contiguous");
    codes.places = static_cast<const float*>(places.data_ptr());
  }
  return codes;
}

// Where the windows of all lanes lie: what a kernel reads of slots, windows and which of them are there.
struct Places {
  std::vector<int32_t> slots;
  std::vector<int64_t> firsts;
};

// What the columns of a view are: the dense windows first, then those of each encoded segment.
struct Columns {
  std::vector<int64_t> windows;
  std::optional<Tensor> present;
  int64_t lanes, all, window, sinks;

  static Columns read(int64_t lanes, const Tensor& windows, const std::optional<Tensor>& present, const Tensor& keys,
                      int64_t sinks) {
    check_shape("windows", windows, {lanes, -1});
    const int64_t all = windows.size(1), window = keys.dim() == 4 ? keys.size(2) : 0;
    STD_TORCH_CHECK(window > 0 && window < (int64_t{1} << 20), "qevict_fused::attend: keys must have windows of some tokens, "
                    "fewer than a million, got ", shape_of(keys));
    if (present) {
      check_shape("present", *present, {lanes, all});
      check_type("present", *present, ScalarType::Bool);
    }
    return {integers("windows", windows, {lanes, all}), present, lanes, all, window, sinks};
  }

  Places of(const char* name, const Tensor& tensor, int64_t first, int64_t capacity) const {
    const int64_t own = tensor.dim() == 2 ? tensor.size(1) : -1;
    const std::vector<int64_t> slots = integers(name, tensor, {lanes, -1});
    STD_TORCH_CHECK(capacity <= std::numeric_limits<int32_t>::max(), "qevict_fused::attend: too many slots: ", capacity);
    STD_TORCH_CHECK(first + own <= all, "qevict_fused::attend: ", name, " has more columns than there are windows");
    const auto* here = present ? static_cast<const uint8_t*>(present->const_data_ptr()) : nullptr;
    Places places{std::vector<int32_t>(lanes * own, 0), std::vector<int64_t>(lanes * own, never)};
    for (int64_t lane = 0; lane < lanes; ++lane) {
      for (int64_t column = 0; column < own; ++column) {
        if (here && !here[lane * present->stride(0) + (first + column) * present->stride(1)]) continue;
        const int64_t slot = slots[lane * own + column], at = windows[lane * all + first + column];
        STD_TORCH_CHECK(slot >= 0 && slot < capacity, "qevict_fused::attend: ", name, " points at slot ", slot, " of ",
                        capacity);
        STD_TORCH_CHECK(at >= 0 && at < (int64_t{1} << 40), "qevict_fused::attend: window ", at, " is none");
        places.slots[lane * own + column] = static_cast<int32_t>(slot);
        places.firsts[lane * own + column] = at * window + sinks;
      }
    }
    return places;
  }
};

// ── everything together ─────────────────────────────────────────────────────────────────────────────────────────────

// Queries [..., group, head_dim] so that eight channels of all queries of a group follow one another.
Lines by_eights(const std::vector<float>& queries, const Problem& problem) {
  const int64_t group = problem.group, head_dim = problem.head_dim, whole = group * head_dim;
  Lines found(static_cast<int64_t>(queries.size()));
  for (int64_t strip = 0; strip < problem.lanes * problem.heads; ++strip) {
    for (int64_t query = 0; query < group; ++query) {
      const float* from = queries.data() + strip * whole + query * head_dim;
      float* to = found.data() + strip * whole + query * 8;
      for (int64_t channel = 0; channel < head_dim; ++channel) to[channel / 8 * 8 * group + channel % 8] = from[channel];
    }
  }
  return found;
}

// Cosines and sines of the places in a window, as Problem::turns wants them.
Lines turns_in_windows(const Problem& problem, int64_t window, Angles angles_of) {
  const int64_t table = up_to_tiles(problem.pairs) * tile_tokens;
  Lines turns(2 * up_to_tiles(window) / tile_tokens * table);
  std::vector<float> angles(2 * problem.pairs);
  for (int64_t step = 0; step < window; ++step) {
    angles_of(step, problem.frequencies, problem.pairs, angles.data(), angles.data() + problem.pairs);
    float* to = turns.data() + step / tile_tokens * 2 * table + step % tile_tokens * 8;
    for (int64_t pair = 0; pair < problem.pairs; ++pair) {
      const int64_t place = pair / 8 * 8 * tile_tokens + pair % 8;
      to[place] = angles[pair], to[table + place] = angles[problem.pairs + pair];
    }
  }
  return turns;
}

// A problem, and what it points into; read and checked tensor by tensor, in the order of these functions.
struct Given {
  Problem problem;
  Lines queries, asking, turns;
  std::vector<float> sinks, frequencies;
  std::vector<int64_t> visible, offsets;
  std::vector<uint8_t> asks;
  std::deque<Places> places;  // whose elements stay where they are

  void read_queries(const Tensor& vectors, double scaling, double softcap) {
    check_shape("queries", vectors, {-1, -1, -1, 1, -1});
    problem.lanes = vectors.size(0), problem.heads = vectors.size(1), problem.group = vectors.size(2);
    problem.head_dim = vectors.size(4);
    STD_TORCH_CHECK(problem.head_dim > 0 && problem.head_dim % 16 == 0, "qevict_fused::attend: head_dim ",
                    problem.head_dim, " is no multiple of 16");
    queries = by_eights(floats("queries", vectors, static_cast<float>(scaling)), problem);
    asking = queries;
    problem.queries = queries.data(), problem.asking = asking.data();
    problem.softcap = static_cast<float>(softcap);
  }

  void read_lanes(const Tensor& positions, const Tensor& lengths, const Tensor& rotary_offsets) {
    const std::vector<int64_t> at = integers("positions", positions, {problem.lanes, 1});
    const std::vector<int64_t> written = integers("lengths", lengths, {problem.lanes});
    offsets = integers("offsets", rotary_offsets, {problem.lanes});
    for (int64_t lane = 0; lane < problem.lanes; ++lane) {
      const int64_t until = at[lane] < written[lane] ? at[lane] + 1 : written[lane];
      visible.push_back(until > 0 ? until : 0);
      asks.push_back(at[lane] >= 0);
    }
    problem.visible = visible.data(), problem.offsets = offsets.data(), problem.asks = asks.data();
  }

  void read_sink_logits(const std::optional<Tensor>& logits) {
    if (!logits) return;
    check_shape("sink_logits", *logits, {problem.lanes, problem.heads, problem.group});
    sinks = floats("sink_logits", *logits, 1);
    problem.sink_logits = sinks.data();
  }

  void read_sinks(const Tensor& keys, const Tensor& values) {
    const int64_t lanes = problem.lanes, heads = problem.heads;
    check_shape("sink_keys", keys, {lanes, heads, -1, problem.head_dim});
    Segment segment;
    segment.window = keys.size(2), segment.columns = 1;
    segment.keys = blocks_of("sink_keys", keys, {lanes, heads, segment.window, problem.head_dim}, false);
    segment.values = blocks_of("sink_values", values, {lanes, heads, segment.window, problem.head_dim}, false);
    for (Blocks* own : {&segment.keys, &segment.values}) std::swap(own->head_stride, own->slot_stride);
    Places lanes_themselves{std::vector<int32_t>(lanes), std::vector<int64_t>(lanes, 0)};
    for (int64_t lane = 0; lane < lanes; ++lane) lanes_themselves.slots[lane] = static_cast<int32_t>(lane);
    if (segment.window) add(segment, std::move(lanes_themselves));
  }

  void read_dense(const Tensor& keys, const Tensor& values, const Tensor& slots, const Columns& columns) {
    STD_TORCH_CHECK(keys.dim() == 4, "qevict_fused::attend: keys must be [heads, slots, window, head_dim], got ", shape_of(keys));
    Segment segment;
    const std::vector<int64_t> shape{problem.heads, keys.size(1), columns.window, problem.head_dim};
    segment.window = columns.window, segment.first_column = 1;
    segment.keys = blocks_of("keys", keys, shape, false);
    segment.values = blocks_of("values", values, shape, false);
    Places own = columns.of("slots", slots, 0, keys.size(1));
    segment.columns = slots.size(1);
    add(segment, std::move(own));
  }

  void read_coded(const std::vector<Tensor>& arrays, const std::vector<int64_t>& formats, const Columns& columns) {
    STD_TORCH_CHECK(formats.size() % (2 * Format::fields) == 0, "qevict_fused::attend: formats have ", formats.size(),
                    " numbers, not a multiple of ", 2 * Format::fields);
    Arrays given{arrays};
    int64_t column = problem.segments.back().columns;
    for (size_t index = 0; index < formats.size(); index += 2 * Format::fields) {
      const Tensor& slots = given.take();
      STD_TORCH_CHECK(slots.dim() == 2 && given.next < arrays.size() && arrays[given.next].dim() == 3,
                      "qevict_fused::attend: codes are slots [lanes, columns] and arrays [heads, slots, bytes]");
      const int64_t room = arrays[given.next].size(1);
      Segment segment;
      segment.coded = true, segment.window = columns.window;
      segment.columns = slots.size(1), segment.first_column = 1 + column;
      Places own = columns.of("slots of codes", slots, column, room);
      const int64_t* format = formats.data() + index;
      segment.key_codes = codes_of(true, format, given, problem.heads, room, columns.window, problem.head_dim);
      segment.value_codes =
          codes_of(false, format + Format::fields, given, problem.heads, room, columns.window, problem.head_dim);
      column += segment.columns;
      add(segment, std::move(own));
    }
    STD_TORCH_CHECK(given.next == arrays.size(), "qevict_fused::attend: ", arrays.size(), " arrays, but formats ask for ",
                    given.next);
    STD_TORCH_CHECK(column == columns.all, "qevict_fused::attend: ", columns.all, " windows, but ", column,
                    " columns of slots");
  }

  void read_turns(const std::optional<Tensor>& table, double amplitude, int64_t window, Angles angles) {
    bool coded = false;
    for (const Segment& segment : problem.segments) coded |= segment.coded;
    STD_TORCH_CHECK(table || !coded, "qevict_fused::attend: encoded keys need frequencies to be turned by");
    if (!coded) return;
    check_shape("frequencies", *table, {-1});
    frequencies = floats("frequencies", *table, 1);
    problem.pairs = static_cast<int64_t>(frequencies.size()), problem.frequencies = frequencies.data();
    STD_TORCH_CHECK(2 * problem.pairs <= problem.head_dim, "qevict_fused::attend: ", problem.pairs, " pairs turn, of ",
                    problem.head_dim, " channels");
    for (int64_t at = 0; at < problem.lanes * problem.heads * problem.group * problem.head_dim; ++at) {
      const int64_t channel = at / (8 * problem.group) * 8 % problem.head_dim + at % 8;
      if (channel < 2 * problem.pairs) asking.data()[at] *= static_cast<float>(amplitude);
    }
    turns = turns_in_windows(problem, window, angles);
    problem.turns = turns.data();
  }

  void add(Segment& segment, Places&& own) {
    places.push_back(std::move(own));
    segment.slots = places.back().slots.data(), segment.firsts = places.back().firsts.data();
    problem.segments.push_back(segment);
  }
};

// ── the operator ────────────────────────────────────────────────────────────────────────────────────────────────────

bool has_avx2() {
#if defined(QEVICT_HAS_AVX2)
  unsigned int eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool halves = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);  // not every Clang knows it by name
  __builtin_cpu_init();
  return halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

Kernels kernels_of(const std::string& instructions) {
  STD_TORCH_CHECK(instructions == "" || instructions == "portable" || instructions == "avx2",
                  "qevict_fused::attend: instructions are 'avx2', 'portable' or '' for what suits, got '", instructions, "'");
  static const bool fast = has_avx2();
  STD_TORCH_CHECK(fast || instructions != "avx2", "qevict_fused::attend: this processor has no AVX2 with FMA and F16C");
#if defined(QEVICT_HAS_AVX2)
  if (fast && instructions != "portable") return avx2_kernels();
#endif
  return portable_kernels();
}

std::string instruction_set() { return has_avx2() ? "avx2" : "portable"; }

std::vector<Piece> cut(const Problem& problem) {
  std::vector<Piece> pieces;
  for (int64_t lane = 0; lane < problem.lanes; ++lane) {
    for (size_t index = 0; index < problem.segments.size(); ++index) {
      const Segment& segment = problem.segments[index];
      const int64_t length = windows_of_piece(segment);
      for (int64_t first = 0; first < segment.columns; first += length) {
        const int64_t last = first + length < segment.columns ? first + length : segment.columns;
        pieces.push_back({lane, static_cast<int64_t>(index), first, last});
      }
    }
  }
  return pieces;
}

// Where the answers go.
struct Answer {
  float *output, *lse, *masses;
  Number number;
};

void put(const Answer& answer, int64_t index, float x) {
  if (answer.number == Number::float32) {
    answer.output[index] = x;
    return;
  }
  auto* to = reinterpret_cast<uint16_t*>(answer.output) + index;
  if (answer.number == Number::float16) {
    *to = torch::headeronly::detail::fp16_ieee_from_fp32_value(x);
  } else {
    *to = torch::headeronly::detail::round_to_nearest_even(x);
  }
}

// The pieces of one lane, for one KV head.
struct Strip {
  int64_t lane, head, first, last;
};

// Puts the pieces of a strip together, in their order, for one query of its group.
void merge(const Problem& problem, const std::vector<Piece>& pieces, float* partials, const Strip& strip, int64_t query,
           std::vector<float>& sum, const Answer& answer) {
  const int64_t head_dim = problem.head_dim, floats = Partial::floats(problem);
  const int64_t row = (strip.lane * problem.heads + strip.head) * problem.group + query;
  const auto partial = [&](int64_t piece) { return Partial(partials + (piece * problem.heads + strip.head) * floats, problem); };
  const bool asks = problem.asks[strip.lane];
  const float sink = problem.sink_logits && asks ? problem.sink_logits[row] : -INFINITY;
  float top = sink;
  for (int64_t piece = strip.first; piece < strip.last; ++piece) top = std::fmax(top, partial(piece).top[query]);
  const float base = top == -INFINITY ? 0 : top;
  float total = std::exp(sink - base);
  std::fill(sum.begin(), sum.end(), 0.0f);
  for (int64_t piece = strip.first; piece < strip.last; ++piece) {
    const Partial own = partial(piece);
    const float weight = std::exp(own.top[query] - base);
    total += weight * own.total[query];
    const float* output = own.output + query * head_dim;
    for (int64_t channel = 0; channel < head_dim; ++channel) sum[channel] += weight * output[channel];
  }
  const float divisor = total == 0 ? 1 : total;
  answer.lse[row] = total == 0 ? -INFINITY : base + std::log(total);
  for (int64_t channel = 0; channel < head_dim; ++channel) put(answer, row * head_dim + channel, sum[channel] / divisor);
  if (!answer.masses) return;
  for (int64_t piece = strip.first; piece < strip.last; ++piece) {
    const float own = partial(piece).top[query];
    const float share = own == -INFINITY ? 0 : std::exp(own - base) / divisor;
    float* masses = answer.masses + row * problem.columns + problem.segments[pieces[piece].segment].first_column;
    for (int64_t at = pieces[piece].first; at < pieces[piece].last; ++at) masses[at] *= share;
  }
}

void run(const Problem& problem, const Kernels& kernels, const Answer& answer) {
  const std::vector<Piece> pieces = cut(problem);
  const int64_t count = static_cast<int64_t>(pieces.size()), each = problem.lanes ? count / problem.lanes : 0;
  const int64_t floats = problem.heads * Partial::floats(problem), memory = scratch_floats(problem);
  // Kept by the thread for its next call: memory that is given back comes back as pages to be cleared.
  thread_local Lines answers;
  float* partials = answers.room(count * floats);
  std::atomic<int64_t> next{0};  // threads take the next piece when they are ready: no two cores are equally fast
  const auto attend = [&](int64_t, int64_t) {
    thread_local Lines kept;
    float* scratch = kept.room(memory);
    for (int64_t index = next++; index < count; index = next++) {
      const Piece& piece = pieces[index];
      const int64_t row = piece.lane * problem.heads * problem.group;
      const int64_t column = problem.segments[piece.segment].first_column + piece.first;
      float* masses = answer.masses ? answer.masses + row * problem.columns + column : nullptr;
      kernels.attend(problem, piece, scratch, partials + index * floats, masses);
    }
  };
  int64_t tokens = 0;
  for (const Segment& segment : problem.segments) tokens += segment.columns * segment.window;
  if (tokens * problem.lanes * problem.heads < tiny) {
    attend(0, 1);
  } else {
    torch::stable::parallel_for(0, torch::stable::get_num_threads(), 1, attend);
  }
  std::vector<float> sum(problem.head_dim);
  for (int64_t lane = 0; lane < problem.lanes; ++lane) {
    for (int64_t head = 0; head < problem.heads; ++head) {
      const Strip strip{lane, head, lane * each, (lane + 1) * each};
      for (int64_t query = 0; query < problem.group; ++query) merge(problem, pieces, partials, strip, query, sum, answer);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> attend(
    const Tensor& queries, const Tensor& positions, double scaling, double softcap, std::optional<Tensor> sink_logits,
    const Tensor& sink_keys, const Tensor& sink_values, const Tensor& keys, const Tensor& values, const Tensor& slots,
    const Tensor& windows, std::optional<Tensor> present, const Tensor& lengths, std::optional<Tensor> frequencies,
    double amplitude, const Tensor& offsets, const std::vector<Tensor>& arrays, const std::vector<int64_t>& formats,
    bool want_mass, const std::string& instructions) {
  const Kernels kernels = kernels_of(instructions);
  Given given;
  Problem& problem = given.problem;
  given.read_queries(queries, scaling, softcap);
  given.read_lanes(positions, lengths, offsets);
  given.read_sink_logits(sink_logits);
  given.read_sinks(sink_keys, sink_values);
  const Columns columns = Columns::read(problem.lanes, windows, present, keys, sink_keys.size(2));
  problem.columns = columns.all + 1;
  given.read_dense(keys, values, slots, columns);
  given.read_coded(arrays, formats, columns);
  given.read_turns(frequencies, amplitude, columns.window, kernels.angles);

  const int64_t rows[] = {problem.lanes, problem.heads, problem.group, 1, problem.head_dim};
  Tensor output = torch::stable::new_empty(queries, {rows, 5});
  Tensor lse = torch::stable::new_empty(queries, {rows, 4}, ScalarType::Float);
  const int64_t by_column[] = {problem.lanes, problem.heads * problem.group, want_mass ? problem.columns : 0};
  Tensor masses = torch::stable::new_zeros(queries, {by_column, 3}, ScalarType::Float);
  const Answer answer{static_cast<float*>(output.data_ptr()), static_cast<float*>(lse.data_ptr()),
                      want_mass ? static_cast<float*>(masses.data_ptr()) : nullptr, number_of("queries", queries)};
  run(problem, kernels, answer);
  return {output, lse, masses};
}

}  // namespace
}  // namespace qevict_fused

STABLE_TORCH_LIBRARY(qevict_fused, library) {
  library.def(
      "attend(Tensor queries, Tensor positions, float scaling, float softcap, Tensor? sink_logits, Tensor sink_keys, "
      "Tensor sink_values, Tensor keys, Tensor values, Tensor slots, Tensor windows, Tensor? present, Tensor lengths, "
      "Tensor? frequencies, float amplitude, Tensor offsets, Tensor[] arrays, int[] formats, bool want_mass, "
      "str instructions) -> (Tensor output, Tensor lse, Tensor masses)");
  library.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(qevict_fused, CPU, library) { library.impl("attend", TORCH_BOX(&qevict_fused::attend)); }

STABLE_TORCH_LIBRARY_IMPL(qevict_fused, CompositeExplicitAutograd, library) {
  library.impl("instruction_set", TORCH_BOX(&qevict_fused::instruction_set));
}
