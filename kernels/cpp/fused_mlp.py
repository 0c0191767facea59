"""The gated feed-forward block on the CPU, SiLU(x·w_gateᵀ)·(x·w_upᵀ)·w_downᵀ: rows of x in the vector lanes.

Weights are read where they lie; gate and up of a few hidden units are multiplied together, and the hidden values come
out in the layout that the second product reads, so that nothing but x is rearranged.
"""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [65536, 16384, 262144]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # multiplications from which the hidden units are shared among threads

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
// A tile of the product, MR rows by two vectors, stays in registers. a: blocks of W columns, [MR][W] each; b: [k][2 W].
#if defined(__AVX512F__)
constexpr int MR = 14;
#elif defined(__AVX2__)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif
constexpr int NR = 2 * W;

static inline void multiply(const float* a, const float* b, int64_t depth, vf (&tile)[MR][2]) {
    for (int64_t block = 0; block < depth; block += W, a += MR * W)
        #pragma GCC unroll 4
        for (int k = 0; k < W; k++, b += NR) {
            const vf left = load(b), right = load(b + W);
            #pragma GCC unroll 16
            for (int m = 0; m < MR; m++) {
                tile[m][0] += a[m * W + k] * left;
                tile[m][1] += a[m * W + k] * right;
            }
        }
}
// W rows of W lanes transposed: log2(W) rounds of interleaving row i with row i + W / 2.
static inline void transpose(vf (&v)[W]) {
    vi low, high;
    for (int i = 0; i < W; i++) low[i] = i / 2 + i % 2 * W, high[i] = low[i] + W / 2;
    for (int round = 1; round < W; round *= 2) {
        vf next[W];
        #pragma GCC unroll 16
        for (int i = 0; i < W / 2; i++) {
            next[2 * i] = __builtin_shuffle(v[i], v[i + W / 2], low);
            next[2 * i + 1] = __builtin_shuffle(v[i], v[i + W / 2], high);
        }
        memcpy(v, next, sizeof next);
    }
}
// Rows [0, count) of x as [width padded to W][2 W]: rows become lanes, zeros outside.
template <class T>
static void rows_to_lanes(const T* x, int64_t pitch, int64_t count, int64_t width, float* to) {
    for (int64_t d = 0; d < width; d += W)
        for (int half = 0; half < 2; half++) {
            vf v[W];
            for (int i = 0; i < W; i++) {
                const int64_t row = half * W + i;
                const T* from = x + row * pitch + d;
                v[i] = row >= count ? vf{} : width - d >= W ? load(from) : load_tail(from, width - d, 0);
            }
            transpose(v);
            for (int i = 0; i < W; i++) store(to + (d + i) * NR + half * W, v[i]);
        }
}

// MR rows of a weight [rows, depth] as blocks [depth / W][MR][W], zeros outside.
template <class T>
static void pack_rows(const T* w, int64_t rows, int64_t depth, float* to) {
    for (int m = 0; m < MR; m++)
        for (int64_t d = 0; d < depth; d += W) {
            const T* from = w + m * depth + d;
            store(to + d * MR + m * W, m >= rows ? vf{} : depth - d >= W ? load(from) : load_tail(from, depth - d, 0));
        }
}

// y[row][column .. column + width) = tile, whose lanes are rows
template <class T>
static void store_turned(const vf (&tile)[MR][2], T* y, int64_t pitch, int64_t rows, int64_t width) {
    for (int half = 0; half < 2; half++) {
        vf v[W] = {};
        for (int m = 0; m < MR && m < W; m++) v[m] = tile[m][half];
        transpose(v);
        for (int64_t i = 0; i < W && half * W + i < rows; i++) store_tail(y + (half * W + i) * pitch, width, v[i]);
    }
}

template <class T>
static void fused_mlp(const T* x, const T* w_gate, const T* w_up, const T* w_down, T* y, int64_t rows, int64_t width,
                      int64_t hidden, int64_t outputs) {
    const int64_t panels = (rows + NR - 1) / NR;
    const int64_t width_up = (width + W - 1) / W * W, hidden_up = (hidden + W - 1) / W * W;
    const int64_t tiles = (hidden + MR - 1) / MR, tall = tiles * MR > hidden_up ? tiles * MR : hidden_up;
    const int64_t deepest = width_up > hidden_up ? width_up : hidden_up;
    float* lanes = (float*)aligned_alloc(64, panels * (width_up + tall) * NR * sizeof(float));
    float* inner = lanes + panels * width_up * NR;  // [panel][hidden unit][row of the panel]
    #pragma omp parallel if (3 * rows * width * hidden >= PARALLEL_MIN)
    {
        float* packed = (float*)aligned_alloc(64, (2 * deepest * MR + 16) * sizeof(float) / 64 * 64);
        float* packed_up = packed + width_up * MR;
        #pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) {
            const int64_t count = rows - p * NR < NR ? rows - p * NR : NR;
            rows_to_lanes(x + p * NR * width, width, count, width, lanes + p * width_up * NR);
            memset(inner + (p * tall + hidden) * NR, 0, (tall - hidden) * NR * sizeof(float));
        }
        #pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = t * MR, count = hidden - first < MR ? hidden - first : MR;
            pack_rows(w_gate + first * width, count, width, packed);
            pack_rows(w_up + first * width, count, width, packed_up);
            for (int64_t p = 0; p < panels; p++) {
                vf gate[MR][2] = {};
                multiply(packed, lanes + p * width_up * NR, width_up, gate);
                float* to = inner + (p * tall + first) * NR;
                for (int m = 0; m < MR; m++)
                    for (int half = 0; half < 2; half++)
                        store(to + m * NR + half * W, over_one_plus_exp(gate[m][half], -gate[m][half]));
                vf up[MR][2] = {};
                multiply(packed_up, lanes + p * width_up * NR, width_up, up);
                for (int m = 0; m < MR && m < count; m++)
                    for (int half = 0; half < 2; half++)
                        store(to + m * NR + half * W, load(to + m * NR + half * W) * up[m][half]);
            }
        }
        #pragma omp for schedule(dynamic, 1)
        for (int64_t t = 0; t < (outputs + MR - 1) / MR; t++) {
            const int64_t first = t * MR, count = outputs - first < MR ? outputs - first : MR;
            pack_rows(w_down + first * hidden, count, hidden, packed);
            for (int64_t p = 0; p < panels; p++) {
                vf tile[MR][2] = {};
                multiply(packed, inner + p * tall * NR, hidden_up, tile);
                store_turned(tile, y + p * NR * outputs + first, outputs, rows - p * NR, count);
            }
        }
        free(packed);
    }
    free(lanes);
}

#define EXPORT(T, name) \
    extern "C" void name(const T* x, const T* gate, const T* up, const T* down, T* y, int64_t rows, int64_t width, \
                         int64_t hidden, int64_t outputs) { \
        fused_mlp(x, gate, up, down, y, rows, width, hidden, outputs); \
    }
EXPORT(float, fused_mlp_float32)
EXPORT(bf16, fused_mlp_bfloat16)
EXPORT(f16, fused_mlp_float16)
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


FUSED_MLP = entries("fused_mlp", "pppppiiii")


def kernel_fn(x, w_gate, w_up, w_down):
    """SiLU(x·w_gateᵀ)·(x·w_upᵀ)·w_downᵀ for `x` [..., D], `w_gate`, `w_up` [H, D] and `w_down` [N, H]; [..., N]."""
    hidden, width = w_gate.shape
    outputs = w_down.shape[0]
    if x.shape[-1] != width or w_up.shape != w_gate.shape or w_down.shape[1] != hidden:
        raise ValueError(
            f"fused_mlp: x {tuple(x.shape)}, w_gate {tuple(w_gate.shape)}, w_up {tuple(w_up.shape)} and "
            f"w_down {tuple(w_down.shape)} do not fit"
        )
    if not x.dtype == w_gate.dtype == w_up.dtype == w_down.dtype:
        raise TypeError(f"fused_mlp: x and the weights need one dtype, not {x.dtype} and {w_gate.dtype}, ...")
    x, w_gate, w_up, w_down = x.contiguous(), w_gate.contiguous(), w_up.contiguous(), w_down.contiguous()
    if not (width and hidden):
        return torch.zeros((*x.shape[:-1], outputs), dtype=x.dtype)
    y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
    if y.numel():
        FUSED_MLP[x.dtype](
            x.data_ptr(),
            w_gate.data_ptr(),
            w_up.data_ptr(),
            w_down.data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            hidden,
            outputs,
        )
    return y
