// The Python face of the row kernels: addresses and shapes come as numbers, checked by models/row_kernels.py; the
// GIL is free while they work.
#include <dlfcn.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "rows.h"

namespace py = pybind11;

namespace xllm::rows {
namespace {

const Torch* torch_functions = nullptr;
const Kernels* kernels = nullptr;

template <class Function>
Function symbol(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

// Whether a product of bfloat16 runs here, and right: 1 x 1 of each of two rows.
bool multiplies_bf16(const Torch& torch) {
  const std::vector<std::uint16_t> ones(64 * 64, 0x3f80);
  std::vector<float> sums(2 * 64, 0.0f);
  try {
    torch.brgemm_bf16(2, 64, 64, 64, 64, 64, false, ones.data(), ones.data(), sums.data(), true);
    if (torch.release) torch.release(true);
  } catch (const std::exception&) {
    return false;
  }
  for (const float sum : sums) {
    if (sum != 64.0f) return false;
  }
  return true;
}

const Kernels* best_kernels(const std::string& wanted) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && wanted != "avx2") return avx512_kernels();
  if (avx2 && wanted != "avx512") return avx2_kernels();
#else
  (void)wanted;
#endif
  return nullptr;
}

// Returns what is used: the instruction set, and whether products of bfloat16 are the machine's own.
py::dict open(const std::string& libtorch, const std::string& instructions, bool own_bf16) {
  static Torch found;
  void* library = dlopen(libtorch.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!library) throw std::runtime_error(std::string("no libtorch_cpu: ") + dlerror());
  Torch torch;
  torch.brgemm32 = symbol<Brgemm32>(library, "_ZN2at6native7cpublas6brgemmEllllllbPKfS3_Pfb");
  torch.brgemm_bf16 = symbol<Brgemm16>(library, "_ZN2at6native7cpublas6brgemmEllllllbPKN3c108BFloat16ES5_Pfb");
  torch.release = symbol<BrgemmRelease>(library, "_ZN2at6native7cpublas14brgemm_releaseEb");
  torch.parallel = symbol<GompParallel>(library, "GOMP_parallel");
  if (!torch.brgemm32) throw std::runtime_error("this torch has no brgemm");
  if (!torch.parallel) throw std::runtime_error("this torch's threads are not those of libgomp");
  const Kernels* best = best_kernels(instructions);
  if (!best) throw std::runtime_error("this machine lacks AVX2 and FMA, or " + instructions);
  std::vector<float> one(64, 1.0f), sums(1, 0.0f);
  torch.brgemm32(1, 1, 64, 64, 1, 1, false, one.data(), one.data(), sums.data(), false);  // throws where it cannot
  if (sums[0] != 64.0f) throw std::runtime_error("brgemm computes wrong products here");
  if (torch.brgemm_bf16 && !(own_bf16 && multiplies_bf16(torch))) torch.brgemm_bf16 = nullptr;
  found = torch;
  torch_functions = &found;
  kernels = best;
  py::dict used;
  used["instructions"] = best->name;
  used["bf16"] = torch.brgemm_bf16 != nullptr;
  return used;
}

const Torch& torch() {
  if (!torch_functions) throw std::runtime_error("open() was not called");
  return *torch_functions;
}

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

Type type_of(int number) {
  if (number < 0 || number > 2) throw std::invalid_argument("type is 0, 1 or 2");
  return static_cast<Type>(number);
}

std::shared_ptr<Packed> pack(std::uintptr_t weights, std::int64_t count, std::int64_t outputs, std::int64_t inputs,
                             int type, std::uintptr_t bias) {
  if (count < 1 || outputs < 1 || inputs < 1) throw std::invalid_argument("a weight has rows and columns");
  auto packed = std::make_shared<Packed>();
  packed->type = type_of(type);
  packed->pairs = packed->type == Type::bf16 && torch().brgemm_bf16 && inputs % 2 == 0;
  packed->count = count, packed->outputs = outputs, packed->inputs = inputs;
  packed->data = std::make_unique<std::uint8_t[]>(  // zeroed
      static_cast<std::size_t>(count * packed->panels() * packed->panel_bytes()));
  if (bias) {  // fp32 [count, outputs]
    packed->bias.assign(static_cast<std::size_t>(count * packed->panels() * kPanel), 0.0f);
    for (std::int64_t matrix = 0; matrix < count; ++matrix) {
      std::memcpy(packed->bias.data() + matrix * packed->panels() * kPanel, at<const float>(bias) + matrix * outputs,
                  static_cast<std::size_t>(outputs) * 4);
    }
  }
  if (weights) {  // else they come one by one
    py::gil_scoped_release release;
    kernels->pack(*packed, at<const void>(weights), 0, count);
  }
  return packed;
}

void fill(Packed& packed, std::int64_t index, std::uintptr_t weights) {
  if (index < 0 || index >= packed.count) throw std::invalid_argument("there is no such matrix");
  py::gil_scoped_release release;
  kernels->pack(packed, at<const void>(weights), index, 1);
}

using Longs = py::array_t<std::int64_t, py::array::c_style>;
using Words = py::array_t<std::int32_t, py::array::c_style>;

void linear(const Packed& weight, std::int64_t rows, std::uintptr_t x, std::int64_t x_stride, std::int64_t x_step,
            int fused, std::uintptr_t other, std::int64_t other_stride, std::int64_t other_step, std::uintptr_t out,
            std::int64_t out_stride, std::int64_t out_step, int out_type, int threads,
            const std::optional<Longs>& offsets) {
  if (rows <= 0) return;
  if (offsets) {
    const std::int64_t* ends = offsets->data();
    bool fits = offsets->size() == weight.count + 1 && ends[0] == 0 && ends[weight.count] == rows;
    for (std::int64_t i = 0; fits && i < weight.count; ++i) fits = ends[i] <= ends[i + 1];
    if (!fits) throw std::invalid_argument("offsets do not divide the rows among the matrices");
  }
  if (weight.pairs && !torch().brgemm_bf16) throw std::runtime_error("packed for products of bfloat16");
  const LinearCall call{&weight,
                        rows,
                        {at<const void>(x), x_stride, x_step},
                        static_cast<Fused>(fused),
                        {at<const void>(other), other_stride, other_step},
                        at<void>(out),
                        out_stride,
                        out_step,
                        type_of(out_type),
                        offsets ? offsets->data() : nullptr};
  py::gil_scoped_release release;
  kernels->linear(torch(), call, threads);
}

// spans: [n, 5] of row, start, stop, wanted_from, first entry in `tables`.
void attention(int type, std::uintptr_t cache, std::int64_t blocks, std::int64_t rows, std::int64_t tensors,
               std::int64_t block_size, std::int64_t kv_heads, std::int64_t head_dim, std::int64_t heads, std::uintptr_t q, std::int64_t q_stride, std::uintptr_t out,
               std::int64_t out_stride, float scale, std::int64_t window, std::int64_t first_position,
               const Longs& spans, const Words& tables, int threads) {
  if (spans.ndim() != 2 || spans.shape(1) != 5) throw std::invalid_argument("spans are [n, 5]");
  if (kv_heads < 1 || heads % kv_heads || head_dim < 1 || block_size < 1 || tensors < 1 || tensors > 2) {
    throw std::invalid_argument("heads must be a multiple of kv_heads, sizes positive, tensors 1 or 2");
  }
  AttentionCall call{type_of(type),
                     at<const void>(cache),
                     tensors,
                     block_size,
                     kv_heads,
                     head_dim,
                     heads,
                     at<const void>(q),
                     q_stride,
                     at<void>(out),
                     out_stride,
                     scale,
                     window,
                     first_position,
                     {},
                     tables.data()};
  for (py::ssize_t i = 0; i < tables.size(); ++i) {
    if (tables.data()[i] >= blocks) {
      throw std::invalid_argument("a block table names block " + std::to_string(tables.data()[i]) + " of " +
                                  std::to_string(blocks));
    }
  }
  const auto given = spans.unchecked<2>();
  for (py::ssize_t i = 0; i < spans.shape(0); ++i) {
    const Span span{given(i, 0), given(i, 1), given(i, 2), given(i, 3), given(i, 4)};
    const std::int64_t entries = (span.stop + block_size - 1) / block_size;
    if (span.row < 0 || span.start < first_position || span.stop <= span.start || span.table < 0 ||
        span.table + entries > tables.size()) {
      throw std::invalid_argument("a span lies outside of its sequence or its block table");
    }
    if (span.row + span.stop - span.start > rows) throw std::invalid_argument("a span has more rows than q or out");
    call.spans.push_back(span);
  }
  py::gil_scoped_release release;
  kernels->attention(torch(), call, threads);
}

void norm(int type, std::int64_t rows, std::int64_t groups, std::int64_t width, std::uintptr_t x, std::int64_t x_stride,
          std::uintptr_t weight, std::int64_t weight_step, float eps, std::uintptr_t out, std::int64_t out_stride,
          int threads) {
  const NormCall call{type_of(type), rows,        groups, width,         at<const void>(x), x_stride,
                      at<const float>(weight), weight_step, eps,    at<void>(out), out_stride};
  py::gil_scoped_release release;
  kernels->norm(torch(), call, threads);
}

void rotate(int type, std::int64_t rows, std::int64_t heads, std::int64_t head_dim, std::int64_t half, std::uintptr_t x,
            std::int64_t x_stride, std::int64_t x_step, std::uintptr_t cos, std::uintptr_t sin, std::uintptr_t out,
            std::int64_t out_stride, std::int64_t out_step, int threads) {
  const RotateCall call{type_of(type),        rows,
                        heads,                head_dim,
                        half,                 at<const void>(x),
                        x_stride,             x_step,
                        at<const void>(cos),  at<const void>(sin),
                        at<void>(out),        out_stride,
                        out_step};
  py::gil_scoped_release release;
  kernels->rotate(torch(), call, threads);
}

}  // namespace

PYBIND11_MODULE(_cpu_kernels, m) {
  m.doc() = "Kernels whose rows do not depend on their neighbours; see docs/native.md.";
  py::class_<Packed, std::shared_ptr<Packed>>(m, "Packed")
      .def_property_readonly("nbytes", [](const Packed& p) { return p.count * p.panels() * p.panel_bytes(); })
      .def_property_readonly("pairs", [](const Packed& p) { return p.pairs; });
  m.def("open", &open, py::arg("libtorch"), py::arg("instructions") = "", py::arg("own_bf16") = true);
  m.def("pack", &pack);
  m.def("fill", &fill);
  m.def("linear", &linear);
  m.def("attention", &attention);
  m.def("norm", &norm);
  m.def("rotate", &rotate);
}

}  // namespace xllm::rows
