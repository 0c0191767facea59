"""GroupNorm, with SiLU behind it if wanted, on the CPU: statistics and result of a group while it is in the cache."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [16384, 4096, 65536], "UNROLL": [4, 2, 8]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # elements from which the groups are shared among threads
UNROLL = TUNABLES["UNROLL"][0]  # vectors in flight per pass

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
template <class T>
static double row_mean(const T* x, int64_t cols) {
    double sum = 0;
    for (int64_t i = 0; i < cols; i += 1024) sum += block_sum(x + i, cols - i < 1024 ? cols - i : 1024);
    return sum / cols;
}
// Mean of (x - mean)²: a second pass over a row that is in the cache, so that a large mean costs no digits.
// The mean comes in two floats, mean + rest: one alone is off by half an ulp, as much as a constant row varies.
template <class T>
static double row_variance(const T* x, int64_t cols, float mean, float rest) {
    double sum = 0;
    for (int64_t start = 0; start < cols; start += 1024) {
        const int64_t end = start + 1024 < cols ? start + 1024 : cols;
        vf part[UNROLL] = {};
        int64_t i = start;
        for (; i + UNROLL * W <= end; i += UNROLL * W)
            for (int u = 0; u < UNROLL; u++) {
                vf v = load(x + i + u * W) - mean - rest;
                part[u] += v * v;
            }
        for (; i + W <= end; i += W) {
            vf v = load(x + i) - mean - rest;
            part[0] += v * v;
        }
        if (i < end) {
            vf v = load_tail(x + i, end - i, mean) - mean - rest;
            for (int lane = end - i; lane < W; lane++) v[lane] = 0;
            part[0] += v * v;
        }
        for (int half = UNROLL / 2; half; half /= 2)
            for (int u = 0; u < half; u++) part[u] += part[u + half];
        sum += sum_lanes(part[0]);
    }
    return sum / cols;
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
template <bool SILU> static inline vf finish(vf v) { return SILU ? over_one_plus_exp(v, -v) : v; }
static inline float value(const float* p) { return *p; }
template <class T> static inline float value(const T* p) { return load_tail(p, 1, 0)[0]; }

template <bool SILU, class T>
static void groupnorm(const T* x, const T* weight, const T* bias, T* y, int64_t batch, int64_t channels, int64_t inner,
                      int64_t groups, double eps) {
    const int64_t share = channels / groups, size = share * inner;
    #pragma omp parallel for schedule(static) if (batch * channels * inner >= PARALLEL_MIN && batch * groups > 1)
    for (int64_t g = 0; g < batch * groups; g++) {
        const T* from = x + g * size;
        const double centre = row_mean(from, size);
        const float mean = (float)centre, rest = (float)(centre - mean);
        const double scale = 1.0 / std::sqrt(row_variance(from, size, mean, rest) + eps);
        for (int64_t c = 0; c < share; c++) {
            const float by = (float)(scale * value(weight + g % groups * share + c));  // rounded once
            const float add = value(bias + g % groups * share + c);
            const T* source = from + c * inner;
            T* to = y + g * size + c * inner;
            int64_t i = 0;
            for (; i + W <= inner; i += W) store(to + i, finish<SILU>((load(source + i) - mean - rest) * by + add));
            if (const int64_t n = inner - i; n > 0)
                store_tail(to + i, n, finish<SILU>((load_tail(source + i, n, 0) - mean - rest) * by + add));
        }
    }
}

#define EXPORT(T, name) \
    extern "C" void name(const T* x, const T* weight, const T* bias, T* y, int64_t batch, int64_t channels, \
                         int64_t inner, int64_t groups, double eps, int64_t silu) { \
        (silu ? groupnorm<true, T> : groupnorm<false, T>)(x, weight, bias, y, batch, channels, inner, groups, eps); \
    }
EXPORT(float, groupnorm_float32)
EXPORT(bf16, groupnorm_bfloat16)
EXPORT(f16, groupnorm_float16)
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


GROUPNORM = entries("groupnorm", "ppppiiiidi")


def kernel_fn(x, weight, bias, groups=32, eps=1e-5, *, silu=False):
    """GroupNorm of `x` [N, C, ...] with `weight` and `bias` [C], then SiLU if asked; a permuted x keeps its strides."""
    batch, channels = x.shape[:2]
    if channels % groups or weight.numel() != channels or bias.numel() != channels:
        raise ValueError(f"groupnorm: {channels} channels, {groups} groups, {weight.numel()} weights do not fit")
    if not x.dtype == weight.dtype == bias.dtype:
        raise TypeError(f"groupnorm: x, weight and bias need one dtype, not {x.dtype}, {weight.dtype}, {bias.dtype}")
    y = torch.empty_like(x)
    if not x.is_contiguous():
        return y.copy_(kernel_fn(x.contiguous(), weight, bias, groups, eps, silu=silu))
    weight, bias = weight.contiguous(), bias.contiguous()
    if count := x.numel():
        GROUPNORM[x.dtype](
            x.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
            batch,
            channels,
            count // (batch * channels),
            groups,
            eps,
            silu,
        )
    return y
