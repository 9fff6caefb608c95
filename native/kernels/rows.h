// Kernels whose rows do not depend on their neighbours: a row's bits are the same for any number of rows, any split of
// the work and any number of threads. Products are torch's own brgemm (oneDNN's micro kernel, ATen/native/CPUBlas.h):
// each output element is summed up in one fixed order, wherever its row lies.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace xllm::rows {

using Brgemm32 = void (*)(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t lda, std::int64_t ldb,
                          std::int64_t ldc, bool add, const float* a, const float* b, float* c, bool vnni);
using Brgemm16 = void (*)(std::int64_t m, std::int64_t n, std::int64_t k, std::int64_t lda, std::int64_t ldb,
                          std::int64_t ldc, bool add, const void* a, const void* b, float* c, bool vnni);
using BrgemmRelease = void (*)(bool vnni);
using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

// Functions of the libtorch_cpu that this process has loaded, found by name: the extension is built without torch.
struct Torch {
  Brgemm32 brgemm32 = nullptr;
  Brgemm16 brgemm_bf16 = nullptr;  // null where this machine has no such instructions
  BrgemmRelease release = nullptr;
  GompParallel parallel = nullptr;
};

enum class Type { f32, bf16, f16 };
enum class Fused { none, silu, gelu, gelu_tanh, sigmoid, add, mul };

constexpr std::int64_t kPanel = 64;      // output columns of one packed panel
constexpr std::int64_t kRowBlock = 64;   // rows of one product
constexpr std::int64_t kKeyTile = 256;   // keys whose softmax is one partial result; on the absolute grid of positions
constexpr std::int64_t kQueryBlock = 64;  // query rows, positions times heads of a KV head, of one product
constexpr std::int64_t kQueryBlocks = 8;  // of one item, which share the reading of keys and values

inline std::int64_t width_of(Type type) { return type == Type::f32 ? 4 : 2; }
inline std::int64_t rounded_up(std::int64_t value, std::int64_t unit) { return (value + unit - 1) / unit * unit; }

// `count` matrices [outputs, inputs] of one kind, each in panels of 64 outputs: [panel][input][64], and where products
// are those of bfloat16 themselves [panel][input / 2][64][2]. Unused outputs of the last panel are zero.
struct Packed {
  Type type = Type::f32;
  bool pairs = false;
  std::int64_t count = 1, outputs = 0, inputs = 0;
  std::vector<float> bias;  // empty or [count * panels * 64]
  std::unique_ptr<std::uint8_t[]> data;

  std::int64_t panels() const { return rounded_up(outputs, kPanel) / kPanel; }
  std::int64_t panel_bytes() const { return inputs * kPanel * width_of(type); }
};

// Rows of a matrix: row i of matrix j begins at data + (i * stride + j * step) elements.
struct Rows {
  const void* data;
  std::int64_t stride, step;
};

struct LinearCall {
  const Packed* weight;
  std::int64_t rows;
  Rows x;
  Fused fused;
  Rows other;  // of `add` and `mul`
  void* out;
  std::int64_t out_stride, out_step;
  Type out_type;
  // Null: every matrix takes all rows. Else matrix j takes rows offsets[j] .. offsets[j + 1] (experts), and steps are 0.
  const std::int64_t* offsets;
};

struct Span {
  std::int64_t row, start, stop, wanted_from, table;  // `table`: index of the first entry of its block table
};

struct AttentionCall {
  Type type;
  const void* cache;  // [blocks, tensors, block_size, kv_heads, head_dim]
  std::int64_t tensors, block_size, kv_heads, head_dim, heads;
  const void* q;
  std::int64_t q_stride;
  void* out;
  std::int64_t out_stride;
  float scale;
  std::int64_t window, first_position;  // window 0: all
  std::vector<Span> spans;
  const std::int32_t* tables;
};

struct NormCall {
  Type type;
  std::int64_t rows, groups, width;  // each row has `groups` vectors of `width`, side by side
  const void* x;
  std::int64_t x_stride;
  const float* weight;  // [groups, width], or [width] with weight_step 0
  std::int64_t weight_step;
  float eps;
  void* out;
  std::int64_t out_stride;
};

struct RotateCall {
  Type type;
  std::int64_t rows, heads, head_dim, half;  // columns 2 * half and behind stay
  const void* x;
  std::int64_t x_stride, x_step;
  const void *cos, *sin;  // [rows, half]
  void* out;
  std::int64_t out_stride, out_step;
};

// One set of kernels for each instruction set; the best that the machine has is used.
struct Kernels {
  const char* name;
  void (*pack)(Packed& packed, const void* weights, std::int64_t first, std::int64_t count);
  void (*linear)(const Torch& torch, const LinearCall& call, int threads);
  void (*attention)(const Torch& torch, const AttentionCall& call, int threads);
  void (*norm)(const Torch& torch, const NormCall& call, int threads);
  void (*rotate)(const Torch& torch, const RotateCall& call, int threads);
};

const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

// Runs item(i) for each i below `items` on up to `threads` threads. The order does not matter to any result. The first
// exception of an item is thrown again when all have ended.
void share_out(const Torch& torch, int threads, std::int64_t items, const std::function<void(std::int64_t)>& item);

// This thread's memory for `bytes`, aligned to 64; `slot` tells uses apart that overlap.
void* scratch(int slot, std::size_t bytes);

}  // namespace xllm::rows
