"""Sum over the last dimension on the CPU; long rows are cut into fixed blocks, so that one row feeds all threads."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [32768, 8192, 131072], "UNROLL": [8, 4]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # elements from which the work is shared among threads
UNROLL = TUNABLES["UNROLL"][0]  # vectors in flight

SOURCE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#endif
// Vectors of W floats in GCC's portable extension: AVX-512, AVX2, else 128 bits (SSE2, NEON).
#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif
typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef uint16_t vh __attribute__((vector_size(2 * W)));
#if defined(__aarch64__)
typedef __fp16 half_float;
#elif !defined(__F16C__)
typedef _Float16 half_float;
#endif
struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

static inline vf fill(float s) { return s - (vf){}; }
static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf load(const bf16* p) {
    vh h; memcpy(&h, p, sizeof h);
    return (vf)(__builtin_convertvector(h, vu) << 16);
}
static inline void store(bf16* p, vf v) {  // round to nearest even; NaN stays NaN
    vu u = (vu)v, r = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vh h = __builtin_convertvector((v == v) ? r : (vu){} + 0x7fc0u, vh);
    memcpy(p, &h, sizeof h);
}
static inline vf load(const f16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    vf v;
    for (int i = 0; i < W; i++) { half_float h; memcpy(&h, p + i, 2); v[i] = (float)h; }
    return v;
#endif
}
static inline void store(f16* p, vf v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__AVX2__) && defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < W; i++) { half_float h = (half_float)v[i]; memcpy(p + i, &h, 2); }
#endif
}
// The ragged end of a row: n < W elements, the other lanes read as `rest`.
template <class T> static inline vf load_tail(const T* p, int64_t n, float rest) {
    T buffer[W]; memset(buffer, 0, sizeof buffer); memcpy(buffer, p, n * sizeof(T));
    vf v = load(buffer);
    for (int i = n; i < W; i++) v[i] = rest;
    return v;
}
template <class T> static inline void store_tail(T* p, int64_t n, vf v) {
    T buffer[W]; store(buffer, v); memcpy(p, buffer, n * sizeof(T));
}
static inline float sum_lanes(vf v) {  // a fixed tree, so that the result never depends on scheduling
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float t[W]; store(t, v);
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++) t[i] += t[i + half];
    return t[0];
#endif
}
// Sums in double: a mean in float32 runs is off by what a nearly constant row varies. No order depends on threads.
typedef double vd __attribute__((vector_size(8 * W)));
static inline vd wide(vf v) { return __builtin_convertvector(v, vd); }
template <class T>
static double block_sum(const T* x, int64_t n) {
    vd part[UNROLL] = {};
    int64_t i = 0;
    for (; i + UNROLL * W <= n; i += UNROLL * W)
        for (int u = 0; u < UNROLL; u++) part[u] += wide(load(x + i + u * W));
    for (; i + W <= n; i += W) part[0] += wide(load(x + i));
    if (i < n) part[0] += wide(load_tail(x + i, n - i, 0));
    for (int half = UNROLL / 2; half; half /= 2)
        for (int u = 0; u < half; u++) part[u] += part[u + half];
    double sum = 0;
    for (int lane = 0; lane < W; lane++) sum += part[0][lane];
    return sum;
}
constexpr int64_t BLOCK = 1024;

static inline void put(float* y, double v) { *y = (float)v; }
template <class T> static inline void put(T* y, double v) { store_tail(y, 1, fill((float)v)); }

template <class T>
static double row_sum(const T* x, int64_t cols) {
    double sum = 0;
    for (int64_t i = 0; i < cols; i += BLOCK) sum += block_sum(x + i, cols - i < BLOCK ? cols - i : BLOCK);
    return sum;
}

template <class T>
static void reduce(const T* x, T* y, int64_t rows, int64_t cols) {
    const int64_t blocks = (cols + BLOCK - 1) / BLOCK;
    if (rows >= 16 || rows * cols < PARALLEL_MIN) {
        #pragma omp parallel for schedule(static) if (rows * cols >= PARALLEL_MIN)
        for (int64_t r = 0; r < rows; r++) put(y + r, row_sum(x + r * cols, cols));
        return;
    }
    double* part = (double*)malloc(rows * blocks * sizeof(double));
    #pragma omp parallel for collapse(2) schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++)
            part[r * blocks + b] = block_sum(x + r * cols + b * BLOCK, b + 1 < blocks ? BLOCK : cols - b * BLOCK);
    for (int64_t r = 0; r < rows; r++) {
        double sum = 0;
        for (int64_t b = 0; b < blocks; b++) sum += part[r * blocks + b];
        put(y + r, sum);
    }
    free(part);
}

#define EXPORT(T, name) \
    extern "C" void name(const T* x, T* y, int64_t rows, int64_t cols) { reduce(x, y, rows, cols); }
EXPORT(float, reduce_float32)
EXPORT(bf16, reduce_bfloat16)
EXPORT(f16, reduce_float16)
"""


def build(source, **constants):
    """Compile `source` once per machine, source and constants, and load it; raises RuntimeError without g++."""
    macros = [f"-D{name}={value}" for name, value in sorted(constants.items())]
    native = "-mcpu=native" if platform.machine() == "aarch64" else "-march=native"
    command = ["g++", "-std=c++17", "-O3", native, "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", *macros]
    key = hashlib.sha256("\0".join([*command, source]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"overnight-cpp-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user: set TMPDIR to a folder of your own")
    library = folder / f"{key}.so"
    if not library.exists():
        handle, fresh = tempfile.mkstemp(suffix=".so", dir=folder)
        os.close(handle)
        command += ["-x", "c++", "-", "-o", fresh]
        try:
            result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise RuntimeError("g++ is not installed: the C++ kernels need it (apt install g++)") from error
        if result.returncode:
            raise RuntimeError(f"g++ failed:\n{result.stderr[-4000:]}")
        Path(fresh).replace(library)
    return ctypes.CDLL(str(library))  # after `import torch`, so that both share one OpenMP runtime


LIBRARY = build(SOURCE, PARALLEL_MIN=PARALLEL_MIN, UNROLL=UNROLL)
ARGUMENTS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "d": ctypes.c_double}


def entries(name, arguments):
    """The C function `name` for every dtype; `arguments` spells pointers (p), integers (i) and doubles (d)."""
    table = {}
    for dtype in DTYPES:
        function = getattr(LIBRARY, f"{name}_{dtype}")
        function.argtypes = [ARGUMENTS[code] for code in arguments]
        function.restype = None
        table[getattr(torch, dtype)] = function
    return table


REDUCE = entries("reduce", "ppii")


def kernel_fn(x):
    """Sum of `x` [..., cols] over its last dimension, in x's dtype; 0 over no columns."""
    if not x.is_contiguous():
        x = x.contiguous()
    y = torch.empty(x.shape[:-1], dtype=x.dtype)
    if count := y.numel():
        cols = x.shape[-1] if x.dim() else 1
        REDUCE[x.dtype](x.data_ptr(), y.data_ptr(), count, cols)
    return y
