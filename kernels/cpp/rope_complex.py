"""Rotary embedding by complex multiplication (LLaMA's first release) on the CPU: float32 rotations, any dtype of x."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [16384, 4096, 65536]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # elements from which the positions are shared among threads

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
template <int N> struct lanes;  // permutations of W lanes: neighbours swapped, real or imaginary parts doubled
template <> struct lanes<4> {
    static constexpr int32_t swap[4] = {1, 0, 3, 2}, real[4] = {0, 0, 2, 2}, imaginary[4] = {1, 1, 3, 3};
};
template <> struct lanes<8> {
    static constexpr int32_t swap[8] = {1, 0, 3, 2, 5, 4, 7, 6};
    static constexpr int32_t real[8] = {0, 0, 2, 2, 4, 4, 6, 6}, imaginary[8] = {1, 1, 3, 3, 5, 5, 7, 7};
};
template <> struct lanes<16> {
    static constexpr int32_t swap[16] = {1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14};
    static constexpr int32_t real[16] = {0, 0, 2, 2, 4, 4, 6, 6, 8, 8, 10, 10, 12, 12, 14, 14};
    static constexpr int32_t imaginary[16] = {1, 1, 3, 3, 5, 5, 7, 7, 9, 9, 11, 11, 13, 13, 15, 15};
};
static inline vf permute(vf v, const int32_t* order) {
    vi o; memcpy(&o, order, sizeof o);
    return __builtin_shuffle(v, o);
}
struct turn {  // (a + bi)(c + di) = (ac - bd) + (bc + ad)i, pair by pair
    vf c, d;
    turn(vf rotation, vf sign)
        : c(permute(rotation, lanes<W>::real)), d(permute(rotation, lanes<W>::imaginary) * sign) {}
    vf operator()(vf x) const { return x * c + permute(x, lanes<W>::swap) * d; }
};

// x [batch, positions, heads, width] by strides, y dense, rotations [positions, width] as (cos, sin) pairs.
template <class T>
static void rope(const T* x, const float* rotations, T* y, int64_t batch, int64_t positions, int64_t heads,
                 int64_t width, int64_t by_batch, int64_t by_position, int64_t by_head) {
    vf sign;
    for (int i = 0; i < W; i++) sign[i] = i % 2 ? 1.0f : -1.0f;
    #pragma omp parallel for schedule(static) if (batch * positions * heads * width >= PARALLEL_MIN)
    for (int64_t bs = 0; bs < batch * positions; bs++) {
        const T* from = x + bs / positions * by_batch + bs % positions * by_position;
        const float* rotation = rotations + bs % positions * width;
        T* to = y + bs * heads * width;
        int64_t i = 0;
        for (; i + W <= width; i += W) {
            const turn by(load(rotation + i), sign);
            for (int64_t h = 0; h < heads; h++) store(to + h * width + i, by(load(from + h * by_head + i)));
        }
        if (const int64_t n = width - i; n > 0) {
            const turn by(load_tail(rotation + i, n, 0), sign);
            for (int64_t h = 0; h < heads; h++)
                store_tail(to + h * width + i, n, by(load_tail(from + h * by_head + i, n, 0)));
        }
    }
}

#define EXPORT(T, name) \
    extern "C" void name(const T* x, const float* rotations, T* y, int64_t batch, int64_t positions, int64_t heads, \
                         int64_t width, int64_t by_batch, int64_t by_position, int64_t by_head) { \
        rope(x, rotations, y, batch, positions, heads, width, by_batch, by_position, by_head); \
    }
EXPORT(float, rope_float32)
EXPORT(bf16, rope_bfloat16)
EXPORT(f16, rope_float16)
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


LIBRARY = build(SOURCE, PARALLEL_MIN=PARALLEL_MIN)
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


ROPE = entries("rope", "pppiiiiiii")


def kernel_fn(x, rotations):
    """Rotate the interleaved pairs of `x` [B, S, H, D] by complex64 `rotations` [S, D/2] (or float32 [S, D/2, 2]).

    Size-1 dimensions in `rotations` (LLaMA's [1, S, 1, D/2]) are fine. The result is contiguous, in x's dtype.
    """
    batch, positions, heads, width = x.shape
    if rotations.is_complex():
        rotations = torch.view_as_real(rotations)
    if rotations.dtype != torch.float32 or rotations.numel() != positions * width or width % 2:
        raise ValueError(f"rope_complex: x {tuple(x.shape)} needs {positions} x {width // 2} complex64 rotations")
    rotations = rotations.contiguous()
    if x.stride(3) != 1:
        x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.numel():
        ROPE[x.dtype](x.data_ptr(), rotations.data_ptr(), y.data_ptr(), batch, positions, heads, width, *x.stride()[:3])
    return y
