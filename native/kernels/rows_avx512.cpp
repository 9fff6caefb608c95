// The kernels of rows.inc for machines with AVX-512.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "rows.h"

#if defined(__x86_64__)
#include <immintrin.h>

// Behind the headers: their functions must not be compiled for more than this machine may have.
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define XLLM_LANES 16

namespace xllm::rows {
namespace {
#include "vectors.inc"

#include "rows.inc"
}  // namespace

const Kernels* avx512_kernels() {
  static const Kernels kernels{"avx512", pack, linear, attention, norm, rotate};
  return &kernels;
}

}  // namespace xllm::rows

#else

const xllm::rows::Kernels* xllm::rows::avx512_kernels() { return nullptr; }

#endif
