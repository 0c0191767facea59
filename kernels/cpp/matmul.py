"""Matrix product on the CPU: packed operands, tiles of the result in registers, blocks of it in the L2 cache."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [65536, 16384, 262144], "DEPTH": [512, 256, 1024], "TALL": [4, 2, 8], "WIDE": [4, 2, 8]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # multiplications from which the blocks are shared among threads
DEPTH = TUNABLES["DEPTH"][0]  # columns of A, rows of B per pass over a block; a multiple of 16
TALL = TUNABLES["TALL"][0]  # tiles per block, down
WIDE = TUNABLES["WIDE"][0]  # tiles per block, across

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
// Columns [start, start + W) of rows [m, m + MR), zeros outside.
template <class T>
static void pack_a(const T* a, int64_t pitch, int64_t rows, int64_t depth, int64_t start, float* to) {
    for (int m = 0; m < MR; m++) {
        const T* from = a + m * pitch + start;
        store(to + m * W, m >= rows ? vf{} : depth - start >= W ? load(from) : load_tail(from, depth - start, 0));
    }
}
// One row of a panel of B, zeros outside.
template <class T>
static void pack_b(const T* b, int64_t cols, float* to) {
    for (int half = 0; half < 2; half++, cols -= W, b += W)
        store(to + half * W, cols >= W ? load(b) : cols > 0 ? load_tail(b, cols, 0) : vf{});
}

static void load_tile(const float* from, vf (&tile)[MR][2]) {
    for (int i = 0; i < MR; i++, from += NR) tile[i][0] = load(from), tile[i][1] = load(from + W);
}
template <class T>
static void store_tile(T* to, int64_t pitch, int64_t height, int64_t width, const vf (&tile)[MR][2]) {
    if (width >= NR && height >= MR)
        for (int i = 0; i < MR; i++, to += pitch) store(to, tile[i][0]), store(to + W, tile[i][1]);
    else
        for (int i = 0; i < MR && i < height; i++, to += pitch)
            for (int64_t half = 0, left = width; half < 2 && left > 0; half++, left -= W)
                store_tail(to + half * W, left < W ? left : W, tile[i][half]);
}

template <class T>
static void matmul(const T* a, const T* b, T* c, int64_t rows, int64_t cols, int64_t depth, int64_t a_pitch,
                   int64_t b_pitch) {
    const int64_t padded = (depth + W - 1) / W * W, down = (rows + MR - 1) / MR, across = (cols + NR - 1) / NR;
    const int64_t tall = (down + TALL - 1) / TALL, wide = (across + WIDE - 1) / WIDE;
    float* packed_a = (float*)aligned_alloc(64, (down * MR * padded + 16) * sizeof(float) / 64 * 64);
    float* packed_b = (float*)aligned_alloc(64, (across * NR * padded + 16) * sizeof(float) / 64 * 64);
    #pragma omp parallel if (rows * cols * depth >= PARALLEL_MIN)
    {
        #pragma omp for schedule(static) nowait
        for (int64_t m = 0; m < down; m++)
            for (int64_t k = 0; k < padded; k += W)
                pack_a(a + m * MR * a_pitch, a_pitch, rows - m * MR, depth, k, packed_a + m * MR * padded + k * MR);
        #pragma omp for schedule(static)
        for (int64_t n = 0; n < across; n++) {
            float* to = packed_b + n * NR * padded;
            for (int64_t k = 0; k < depth; k++) pack_b(b + k * b_pitch + n * NR, cols - n * NR, to + k * NR);
            memset(to + depth * NR, 0, (padded - depth) * NR * sizeof(float));
        }
        alignas(64) float partial[TALL * WIDE * MR * NR];
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < tall * wide; task++) {  // a block has one owner: its sums run in one fixed order
            const int64_t m_from = task % tall * TALL, m_to = m_from + TALL < down ? m_from + TALL : down;
            const int64_t n_from = task / tall * WIDE, n_to = n_from + WIDE < across ? n_from + WIDE : across;
            for (int64_t k = 0; k < padded; k += DEPTH) {
                const int64_t step = padded - k < DEPTH ? padded - k : DEPTH;
                float* kept = partial;
                for (int64_t n = n_from; n < n_to; n++)
                    for (int64_t m = m_from; m < m_to; m++, kept += MR * NR) {
                        vf tile[MR][2] = {};
                        if (k) load_tile(kept, tile);
                        multiply(packed_a + m * MR * padded + k * MR, packed_b + n * NR * padded + k * NR, step, tile);
                        if (k + step < padded) store_tile(kept, NR, MR, NR, tile);
                        else store_tile(c + m * MR * cols + n * NR, cols, rows - m * MR, cols - n * NR, tile);
                    }
            }
        }
    }
    free(packed_a);
    free(packed_b);
}

#define EXPORT(T, name) \
    extern "C" void name(const T* a, const T* b, T* c, int64_t rows, int64_t cols, int64_t depth, int64_t a_pitch, \
                         int64_t b_pitch) { \
        matmul(a, b, c, rows, cols, depth, a_pitch, b_pitch); \
    }
EXPORT(float, matmul_float32)
EXPORT(bf16, matmul_bfloat16)
EXPORT(f16, matmul_float16)
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


LIBRARY = build(SOURCE, PARALLEL_MIN=PARALLEL_MIN, DEPTH=DEPTH, TALL=TALL, WIDE=WIDE)
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


MATMUL = entries("matmul", "pppiiiii")


def kernel_fn(A, B):
    """A [M, K] times B [K, N], summed in float32, in A's dtype."""
    rows, depth = A.shape
    if B.shape[0] != depth or A.dtype != B.dtype or B.dim() != 2:
        raise ValueError(f"matmul: A {A.dtype} {tuple(A.shape)} and B {B.dtype} {tuple(B.shape)} do not fit")
    cols = B.shape[1]
    if depth == 0:
        return torch.zeros((rows, cols), dtype=A.dtype)
    if A.stride(1) != 1:
        A = A.contiguous()
    if B.stride(1) != 1:
        B = B.contiguous()
    C = torch.empty((rows, cols), dtype=A.dtype)
    if rows and cols:
        MATMUL[A.dtype](A.data_ptr(), B.data_ptr(), C.data_ptr(), rows, cols, depth, A.stride(0), B.stride(0))
    return C
