"""GELU on the CPU, exact (erf) or by tanh, in one pass over the elements."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [8192, 2048, 32768], "UNROLL": [2, 1, 4]}
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
static inline vf larger(vf a, vf b) {  // b where a lane of either is NaN
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
// e^x for x <= 88, within an ulp or so: x = n·ln2 + r, a minimax polynomial of degree 6 in r (3e-9 relative),
// times 2^n. Fades through the subnormals to 0 at -104 and below, keeps NaN.
static inline vf vexp(vf x) {
    x = larger(fill(-104.0f), x);
    vf n = x * 1.44269504f + 12582912.0f - 12582912.0f;  // round to nearest by the mantissa's last bit
    vf r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vf p = r * 0.0013814601115882397f + 0.008368716575205326f;
    p = p * r + 0.04166838899254799f;
    p = p * r + 0.1666652113199234f;
    p = p * r + 0.4999999403953552f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    vi k = __builtin_convertvector((n == n) ? n : fill(0.0f), vi), half = k >> 1;  // 2^n alone can overflow: two steps
    return p * (vf)((half + 127) << 23) * (vf)((k - half + 127) << 23);
#endif
}
static inline vf smaller(vf a, vf b) {  // b where a lane of either is NaN
#if defined(__AVX512F__)
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}
static inline vf over_one_plus_exp(vf x, vf u) { return x / (1.0f + vexp(smaller(fill(89.0f), u))); }  // e^89 is inf
static inline vf reciprocal(vf d) {  // finite d; the division unit is the bottleneck otherwise
#if defined(__AVX512F__)
    vf r = (vf)_mm512_rcp14_ps((__m512)d);
    return r + r * (1.0f - d * r);
#else
    return 1.0f / d;
#endif
}
// x·Φ(x) = max(x, 0) - |x|·Φ(-|x|), where Φ(-√2 z) = exp(-z²)·t·P(t), t = 1/(1 + 0.35 z). P is minimax on z <= 6.5:
// 8e-9 absolute, 6e-6 relative in the far tail, where 0.5·x·(1 + erf) keeps fewer digits.
static inline vf exact(vf x) {
    vf size = (vf)((vu)x & 0x7fffffffu);
    vf t = reciprocal(1.0f + 0.24748737f * size);
    vf p = t * -0.0975254476070404f + 0.3798990249633789f;
    p = p * t - 0.32943063974380493f;
    p = p * t + 0.33262279629707336f;
    p = p * t + 0.0003045781922992319f;
    p = p * t + 0.11687369644641876f;
    p = p * t + 0.09725600481033325f;
    vf y = larger(x, fill(0.0f)) - size * (vexp(x * x * -0.5f) * (t * p));
    return (x > fill(14.5f)) ? x : y;  // the tail is below the last place, and NaN at infinity
}
// 0.5·x·(1 + tanh u) = x / (1 + exp(-2u)), u = √(2/π)·(x + 0.044715 x³)
static inline vf by_tanh(vf x) {
    return over_one_plus_exp(x, x * (x * x * -0.07135481627f - 1.5957691216f));
}

template <bool TANH, class T>
static void gelu(const T* x, T* y, int64_t n) {
    constexpr int64_t BLOCK = 2048;
    #pragma omp parallel for schedule(static) if (n >= PARALLEL_MIN)
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t end = start + BLOCK < n ? start + BLOCK : n;
        int64_t i = start;
        for (; i + UNROLL * W <= end; i += UNROLL * W)
            for (int u = 0; u < UNROLL; u++) {
                vf v = load(x + i + u * W);
                store(y + i + u * W, TANH ? by_tanh(v) : exact(v));
            }
        for (; i < end; i += W) {
            const int64_t left = end - i < W ? end - i : W;
            vf v = load_tail(x + i, left, 0);
            store_tail(y + i, left, TANH ? by_tanh(v) : exact(v));
        }
    }
}

#define EXPORT(T, name) \
    extern "C" void exact_##name(const T* x, T* y, int64_t n) { gelu<false>(x, y, n); } \
    extern "C" void tanh_##name(const T* x, T* y, int64_t n) { gelu<true>(x, y, n); }
EXPORT(float, float32)
EXPORT(bf16, bfloat16)
EXPORT(f16, float16)
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


EXACT, TANH = entries("exact", "ppi"), entries("tanh", "ppi")


def kernel_fn(x, approximate="none"):
    """GELU of `x`, any shape; `approximate` is "none" (erf) or "tanh". A dense x keeps its strides."""
    y = torch.empty_like(x)
    if x.stride() != y.stride():  # a view with gaps
        x = x.contiguous()
        if x.stride() != y.stride():
            return y.copy_(kernel_fn(x, approximate))
    (TANH if approximate == "tanh" else EXACT)[x.dtype](x.data_ptr(), y.data_ptr(), x.numel())
    return y
