"""Mean cross-entropy of integer targets on the CPU: one pass over each row of logits, with a running maximum."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [16384, 4096, 65536], "UNROLL": [4, 2, 8], "BLOCK": [2048, 1024, 4096]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # elements from which the rows are shared among threads
UNROLL = TUNABLES["UNROLL"][0]  # vectors in flight per pass
BLOCK = TUNABLES["BLOCK"][0]  # columns whose maximum and exponentials are taken while they are in the L1 cache

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
static inline vf larger(vf a, vf b) {  // b where a lane of either is NaN
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
static inline float max_lanes(vf v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float t[W]; store(t, v);
    for (int i = 1; i < W; i++) t[0] = t[i] > t[0] ? t[i] : t[0];
    return t[0];
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
static inline double value(const float* p) { return *p; }
template <class T> static inline double value(const T* p) { return load_tail(p, 1, 0)[0]; }

template <class T>
static float block_max(const T* x, int64_t n) {
    vf top[UNROLL];
    for (int u = 0; u < UNROLL; u++) top[u] = fill(-INFINITY);
    int64_t i = 0;
    for (; i + UNROLL * W <= n; i += UNROLL * W)
        for (int u = 0; u < UNROLL; u++) top[u] = larger(load(x + i + u * W), top[u]);
    for (; i + W <= n; i += W) top[0] = larger(load(x + i), top[0]);
    if (i < n) top[0] = larger(load_tail(x + i, n - i, -INFINITY), top[0]);
    for (int u = 1; u < UNROLL; u++) top[0] = larger(top[u], top[0]);
    return max_lanes(top[0]);
}

template <class T>
static float block_exp_sum(const T* x, int64_t n, float shift) {  // shift is finite or +inf
    vf part[UNROLL] = {};
    int64_t i = 0;
    for (; i + UNROLL * W <= n; i += UNROLL * W)
        for (int u = 0; u < UNROLL; u++) part[u] += vexp(load(x + i + u * W) - shift);
    for (; i + W <= n; i += W) part[0] += vexp(load(x + i) - shift);
    if (i < n) {
        vf e = vexp(load_tail(x + i, n - i, -INFINITY) - shift);
        for (int lane = n - i; lane < W; lane++) e[lane] = 0;
        part[0] += e;
    }
    for (int u = 1; u < UNROLL; u++) part[0] += part[u];
    return sum_lanes(part[0]);
}

template <class T>
static double log_sum_exp(const T* x, int64_t cols) {
    float highest = -INFINITY;
    double sum = 0;
    for (int64_t start = 0; start < cols; start += BLOCK) {
        const int64_t n = cols - start < BLOCK ? cols - start : BLOCK;
        const float top = block_max(x + start, n);
        if (top > highest) {
            sum *= highest == -INFINITY ? 0.0 : std::exp((double)highest - (double)top);
            highest = top;
        }
        sum += block_exp_sum(x + start, n, highest == -INFINITY ? 0.0f : highest);
    }
    return (double)highest + std::log(sum);
}

// Returns the first row whose target is out of range, or -1. Targets of `ignored` do not count in the mean.
template <class T>
static int64_t cross_entropy(const T* logits, const int64_t* targets, T* loss, int64_t rows, int64_t cols,
                             int64_t ignored) {
    int64_t counted = 0;
    for (int64_t r = 0; r < rows; r++) {
        if (targets[r] == ignored) continue;
        if (targets[r] < 0 || targets[r] >= cols) return r;
        counted++;
    }
    double* losses = (double*)malloc((rows + 1) * sizeof(double));
    #pragma omp parallel for schedule(static) if (rows * cols >= PARALLEL_MIN && rows > 1)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = logits + r * cols;
        losses[r] = targets[r] == ignored ? 0.0 : log_sum_exp(row, cols) - value(row + targets[r]);
    }
    double total = 0;
    for (int64_t r = 0; r < rows; r++) total += losses[r];
    free(losses);
    store_tail(loss, 1, fill((float)(total / counted)));
    return -1;
}

#define EXPORT(T, name) \
    extern "C" int64_t name(const T* logits, const int64_t* targets, T* loss, int64_t rows, int64_t cols, \
                            int64_t ignored) { \
        return cross_entropy(logits, targets, loss, rows, cols, ignored); \
    }
EXPORT(float, cross_entropy_float32)
EXPORT(bf16, cross_entropy_bfloat16)
EXPORT(f16, cross_entropy_float16)
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


LIBRARY = build(SOURCE, PARALLEL_MIN=PARALLEL_MIN, UNROLL=UNROLL, BLOCK=BLOCK)
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


CROSS_ENTROPY = entries("cross_entropy", "pppiii")
for function in CROSS_ENTROPY.values():
    function.restype = ctypes.c_int64


def kernel_fn(logits, targets, ignore_index=-100):
    """Mean of -log softmax(logits)[target] over `logits` [N, V], int64 `targets` [N]; a scalar of logits' dtype."""
    rows, cols = logits.shape
    if targets.shape != (rows,) or targets.dtype != torch.int64:
        raise ValueError(f"cross_entropy: logits {tuple(logits.shape)} need int64 targets [{rows}]")
    if not (logits.is_contiguous() and targets.is_contiguous()):
        logits, targets = logits.contiguous(), targets.contiguous()
    loss = torch.empty((), dtype=logits.dtype)
    wrong = CROSS_ENTROPY[logits.dtype](
        logits.data_ptr(), targets.data_ptr(), loss.data_ptr(), rows, cols, ignore_index
    )
    if wrong >= 0:
        raise IndexError(f"cross_entropy: target {targets[wrong].item()} of row {wrong} is outside [0, {cols})")
    return loss
