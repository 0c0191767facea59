"""Rotary embedding of the two halves of each head (Hugging Face's rotate_half form) on the CPU, in one pass."""

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

// y[:h] = x[:h]·cos[:h] - x[h:]·sin[:h], y[h:] = x[h:]·cos[h:] + x[:h]·sin[h:]
template <class T>
static void rotate(const T* x, const T* cosine, const T* sine, T* y, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        vf a = load(x + i), b = load(x + half + i);
        store(y + i, a * load(cosine + i) - b * load(sine + i));
        store(y + half + i, b * load(cosine + half + i) + a * load(sine + half + i));
    }
    if (const int64_t n = half - i; n > 0) {
        vf a = load_tail(x + i, n, 0), b = load_tail(x + half + i, n, 0);
        store_tail(y + i, n, a * load_tail(cosine + i, n, 0) - b * load_tail(sine + i, n, 0));
        store_tail(y + half + i, n, b * load_tail(cosine + half + i, n, 0) + a * load_tail(sine + half + i, n, 0));
    }
}

// x and y share strides over batch, head and position; cos and sin are dense [positions, 2·half], one per batch or one.
template <class T>
static void rope(const T* x, const T* cosine, const T* sine, T* y, int64_t batch, int64_t heads, int64_t positions,
                 int64_t half, int64_t by_batch, int64_t by_head, int64_t by_position, int64_t table_by_batch) {
    #pragma omp parallel for collapse(2) schedule(static) if (batch * heads * positions * half >= PARALLEL_MIN / 2)
    for (int64_t bh = 0; bh < batch * heads; bh++)
        for (int64_t s = 0; s < positions; s++) {
            const int64_t at = bh / heads * by_batch + bh % heads * by_head + s * by_position;
            const int64_t table = bh / heads * table_by_batch + s * 2 * half;
            rotate(x + at, cosine + table, sine + table, y + at, half);
        }
}

#define EXPORT(T, name) \
    extern "C" void name(const T* x, const T* c, const T* s, T* y, int64_t batch, int64_t heads, int64_t positions, \
                         int64_t half, int64_t by_batch, int64_t by_head, int64_t by_position, int64_t table) { \
        rope(x, c, s, y, batch, heads, positions, half, by_batch, by_head, by_position, table); \
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


ROPE = entries("rope", "ppppiiiiiiii")


def kernel_fn(x, cos, sin):
    """x·cos + rotate_half(x)·sin for `x` [B, H, S, D]; cos and sin [S, D], or [B or 1, (1,) S, D]. Strides stay x's."""
    batch, heads, positions, width = x.shape
    tables = cos.numel() // max(1, positions * width)
    if cos.shape != sin.shape or cos.shape[-2:] != (positions, width) or tables not in (1, batch) or width % 2:
        raise ValueError(f"rope_half: x {tuple(x.shape)} and cos {tuple(cos.shape)} do not fit")
    if not x.dtype == cos.dtype == sin.dtype:
        kind = torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
        x, cos, sin = x.to(kind), cos.to(kind), sin.to(kind)
    y = torch.empty_like(x)
    strides = x.stride()
    if strides[3] != 1 or y.stride() != strides:  # views with gaps or a strided last dimension
        return y.copy_(kernel_fn(x.contiguous(), cos, sin))
    if not (cos.is_contiguous() and sin.is_contiguous()):
        cos, sin = cos.contiguous(), sin.contiguous()
    if x.numel():
        ROPE[x.dtype](
            x.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            y.data_ptr(),
            batch,
            heads,
            positions,
            width // 2,
            *strides[:3],
            positions * width if tables > 1 else 0,
        )
    return y
