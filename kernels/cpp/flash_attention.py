"""Attention on the CPU without a score matrix: queries in the vector lanes, a running maximum and sum per lane."""

import ctypes
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

import torch

DTYPES = ("float32", "bfloat16", "float16")
TUNABLES = {"PARALLEL_MIN": [65536, 16384, 262144], "KEY_TILES": [4, 8, 2]}
PARALLEL_MIN = TUNABLES["PARALLEL_MIN"][0]  # scores times width from which the query blocks are shared among threads
KEY_TILES = TUNABLES["KEY_TILES"][0]  # key tiles (of 14 keys on AVX-512, 6 on AVX2) between two updates of the maximum

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
constexpr int KEYS = KEY_TILES * MR;

struct layout { int64_t by_batch, by_head, by_position; };
struct shape { int64_t batch, heads, queries, keys, width, key_heads; };

// out[R rows of d][queries] = out · fade + Σ_k v[k][d] · p[k][queries]
template <int R>
static void mix(const float* v, int64_t pitch, const float* p, int64_t keys, float* out, const vf* fade) {
    vf tile[R][2];
    for (int m = 0; m < R; m++)
        for (int half = 0; half < 2; half++) tile[m][half] = vf{};
    for (int64_t k = 0; k < keys; k++, v += pitch, p += NR) {
        const vf left = load(p), right = load(p + W);
        #pragma GCC unroll 16
        for (int m = 0; m < R; m++) {
            tile[m][0] += v[m] * left;
            tile[m][1] += v[m] * right;
        }
    }
    for (int m = 0; m < R; m++)
        for (int half = 0; half < 2; half++) {
            float* at = out + m * NR + half * W;
            store(at, load(at) * fade[half] + tile[m][half]);
        }
}
template <int R>
static void mix_rows(int rows, const float* v, int64_t pitch, const float* p, int64_t keys, float* out,
                     const vf* fade) {
    if (rows == R) return mix<R>(v, pitch, p, keys, out, fade);
    if constexpr (R > 1) mix_rows<R - 1>(rows, v, pitch, p, keys, out, fade);
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
template <class T>
static void lanes_to_rows(const float* from, const vf* scale, int64_t count, int64_t width, T* y, int64_t pitch) {
    for (int64_t d = 0; d < width; d += W)
        for (int half = 0; half < 2; half++) {
            vf v[W];
            for (int i = 0; i < W; i++) v[i] = load(from + (d + i) * NR + half * W) * scale[half];
            transpose(v);
            for (int64_t i = 0; i < W && half * W + i < count; i++) {
                T* to = y + (half * W + i) * pitch + d;
                if (width - d >= W) store(to, v[i]);
                else store_tail(to, width - d, v[i]);
            }
        }
}

// A mask [queries, keys] is read as vectors of keys; a row has `rest` more of them, those beyond n are not used.
static inline vf mask_row(const float* mask, int64_t pitch, int64_t row, int64_t count, int64_t k, int64_t rest) {
    const float* from = mask + row * pitch + k;
    return row >= count ? fill(-INFINITY) : rest - k >= W ? load(from) : load_tail(from, rest - k, -INFINITY);
}
// How many of the next n keys there are up to the last that some query may see: the mask is not -inf everywhere.
static int64_t open_keys(const float* mask, int64_t pitch, int64_t count, int64_t n, int64_t rest) {
    for (int64_t k = (n - 1) / W * W; k >= 0; k -= W) {
        vi shut = ~vi{};
        for (int64_t row = 0; row < count; row++) shut &= mask_row(mask, pitch, row, count, k, rest) == fill(-INFINITY);
        for (int i = 0; i < W; i++)
            if (!shut[i]) return k + W < n ? k + W : n;
    }
    return 0;
}
// scores = scores · scale + mask
static void add_mask(const float* mask, int64_t pitch, int64_t count, int64_t n, int64_t rest, float scale,
                     float* scores) {
    for (int64_t k = 0; k < n; k += W)
        for (int half = 0; half < 2; half++) {
            vf v[W];
            for (int i = 0; i < W; i++) v[i] = mask_row(mask, pitch, half * W + i, count, k, rest);
            transpose(v);
            for (int64_t i = 0; i < W && k + i < n; i++) {
                float* to = scores + (k + i) * NR + half * W;
                store(to, load(to) * scale + v[i]);
            }
        }
}

static inline const float* as_float(const float* v, int64_t& pitch, int64_t, int64_t, float*) { return v; }
template <class T>
static const float* as_float(const T* v, int64_t& pitch, int64_t keys, int64_t width, float* buffer) {
    for (int64_t k = 0; k < keys; k++)
        for (int64_t d = 0; d < width; d += W) {
            const T* from = v + k * pitch + d;
            store(buffer + k * (width + W) + d, width - d >= W ? load(from) : load_tail(from, width - d, 0));
        }
    pitch = width + W;
    return buffer;
}

template <class T>
static void attend_block(const T* q, int64_t q_pitch, const T* k, int64_t k_pitch, const T* v, int64_t v_pitch, T* y,
                         int64_t y_pitch, const float* mask, int64_t mask_pitch, int64_t count, int64_t first,
                         int64_t keys, int64_t width, bool causal, float scale, float* memory) {
    const int64_t padded = (width + W - 1) / W * W;
    float* query = memory;                     // [padded][NR]
    float* out = query + padded * NR;          // [padded][NR]
    float* scores = out + padded * NR;         // [KEYS][NR]
    float* tile_of_k = scores + KEYS * NR;     // [padded / W][MR][W]
    float* buffer = tile_of_k + padded * MR;   // [KEYS][width + W], for narrow types
    rows_to_lanes(q, q_pitch, count, width, query);
    memset(out, 0, padded * NR * sizeof(float));
    vf top[2] = {fill(-INFINITY), fill(-INFINITY)}, sum[2] = {};
    const int64_t limit = causal && first + count < keys ? first + count : keys;
    for (int64_t start = 0; start < limit; start += KEYS) {
        int64_t n = limit - start < KEYS ? limit - start : KEYS;
        if (mask) n = open_keys(mask + start, mask_pitch, count, n, keys - start);
        if (!n) continue;
        for (int64_t t = 0; t < n; t += MR) {
            vf tile[MR][2] = {};
            for (int64_t d = 0; d < width; d += W)
                for (int64_t m = 0; m < MR; m++) {
                    const T* from = k + (start + t + m) * k_pitch + d;
                    vf row = t + m >= n ? vf{} : width - d >= W ? load(from) : load_tail(from, width - d, 0);
                    store(tile_of_k + d * MR + m * W, row);
                }
            for (int64_t d = 0; d < padded; d += W) {  // short sums, then their sum: long ones cost digits
                vf part[MR][2] = {};
                multiply(tile_of_k + d * MR, query + d * NR, W, part);
                for (int m = 0; m < MR; m++) tile[m][0] += part[m][0], tile[m][1] += part[m][1];
            }
            for (int64_t m = 0; m < MR && t + m < n; m++)
                for (int half = 0; half < 2; half++) store(scores + (t + m) * NR + half * W, tile[m][half]);
        }
        if (mask) add_mask(mask + start, mask_pitch, count, n, keys - start, scale, scores);
        const float by = mask ? 1.0f : scale;  // differences first, then the scale: near ones lose nothing
        vf fade[2], shift[2];
        for (int half = 0; half < 2; half++) {
            vf lane;
            for (int i = 0; i < W; i++) lane[i] = first + half * W + i - start;  // key this query may just see
            if (causal && start + n > first + half * W + 1)
                for (int64_t j = 0; j < n; j++) {
                    float* at = scores + j * NR + half * W;
                    store(at, fill((float)j) > lane ? fill(-INFINITY) : load(at));
                }
            vf highest = top[half];
            for (int64_t j = 0; j < n; j++) highest = larger(load(scores + j * NR + half * W), highest);
            shift[half] = highest == fill(-INFINITY) ? fill(0.0f) : highest;
            fade[half] = vexp((top[half] - shift[half]) * by);
            top[half] = highest;
            vf part = {};
            for (int64_t j = 0; j < n; j++) {
                float* at = scores + j * NR + half * W;
                vf e = vexp((load(at) - shift[half]) * by);
                part += e;
                store(at, e);
            }
            sum[half] = sum[half] * fade[half] + part;
        }
        int64_t pitch = v_pitch;
        const float* values = as_float(v + start * v_pitch, pitch, n, width, buffer);
        const int64_t parts = (width + MR - 1) / MR;
        for (int64_t part = 0; part < parts; part++) {  // tiles of equal height, as far as they go
            const int64_t from = part * width / parts, to = (part + 1) * width / parts;
            mix_rows<MR>(to - from, values + from, pitch, scores, n, out + from * NR, fade);
        }
    }
    const vf scale_out[2] = {1.0f / sum[0], 1.0f / sum[1]};
    lanes_to_rows(out, scale_out, count, width, y, y_pitch);
}

template <class T>
static void attention(const T* q, const T* k, const T* v, T* y, const float* mask, shape s, const layout* l,
                      bool causal, float scale) {
    const layout lq = l[0], lk = l[1], lv = l[2], ly = l[3], lm = l[4];
    const int64_t blocks = (s.queries + NR - 1) / NR, padded = (s.width + W - 1) / W * W;
    const int64_t floats = 2 * padded * NR + KEYS * NR + padded * MR + KEYS * (s.width + W);
    #pragma omp parallel if (s.batch * s.heads * s.queries * s.keys * s.width >= PARALLEL_MIN)
    {
        float* memory = (float*)aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
        #pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < s.batch * s.heads * blocks; task++) {
            const int64_t first = (blocks - 1 - task / (s.batch * s.heads)) * NR;  // causal: long first
            const int64_t b = task % (s.batch * s.heads) / s.heads, h = task % s.heads, g = h / (s.heads / s.key_heads);
            attend_block(q + b * lq.by_batch + h * lq.by_head + first * lq.by_position, lq.by_position,
                         k + b * lk.by_batch + g * lk.by_head, lk.by_position,
                         v + b * lv.by_batch + g * lv.by_head, lv.by_position,
                         y + b * ly.by_batch + h * ly.by_head + first * ly.by_position, ly.by_position,
                         mask ? mask + b * lm.by_batch + h * lm.by_head + first * lm.by_position : nullptr,
                         lm.by_position, s.queries - first < NR ? s.queries - first : NR, first, s.keys, s.width,
                         causal, scale, memory);
        }
        free(memory);
    }
}

// numbers: batch, heads, queries, keys, width, key_heads, then by_batch, by_head, by_position of q, k, v, y and mask
#define EXPORT(T, name) \
    extern "C" void name(const T* q, const T* k, const T* v, T* y, const float* mask, const int64_t* n, \
                         int64_t causal, double scale) { \
        layout l[5]; \
        memcpy(l, n + 6, sizeof l); \
        attention(q, k, v, y, mask, shape{n[0], n[1], n[2], n[3], n[4], n[5]}, l, causal, scale); \
    }
EXPORT(float, attention_float32)
EXPORT(bf16, attention_bfloat16)
EXPORT(f16, attention_float16)
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


LIBRARY = build(SOURCE, PARALLEL_MIN=PARALLEL_MIN, KEY_TILES=KEY_TILES)
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


ATTENTION = entries("attention", "ppppppid")
NUMBERS = ctypes.c_int64 * 21


def attend(Q, K, V, out, causal, sm_scale, mask=None):
    """Write softmax(Q·Kᵀ·sm_scale + mask)·V to `out`; every tensor [B, H, S, D] with a dense last dimension.

    K and V may have fewer heads (a divisor of Q's). `mask` is added; it is broadcastable to [B, H, queries, keys].
    """
    if sm_scale <= 0:  # the kernel scales differences to the largest score
        Q, sm_scale = Q * sm_scale, 1.0
    batch, heads, queries, width = Q.shape
    keys = K.shape[2]
    strides = (0, 0, 0)
    if mask is not None:
        mask = mask.to(torch.float32).expand(batch, heads, queries, keys)
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        strides = mask.stride()[:3]
    numbers = NUMBERS(
        batch,
        heads,
        queries,
        keys,
        width,
        K.shape[1],
        *Q.stride()[:3],
        *K.stride()[:3],
        *V.stride()[:3],
        *out.stride()[:3],
        *strides,
    )
    ATTENTION[Q.dtype](
        Q.data_ptr(),
        K.data_ptr(),
        V.data_ptr(),
        out.data_ptr(),
        mask.data_ptr() if mask is not None else None,
        ctypes.addressof(numbers),
        causal,
        sm_scale,
    )


def kernel_fn(Q, K, V, causal=True, sm_scale=None, *, mask=None):
    """softmax(Q·Kᵀ·sm_scale)·V for `Q`, `K`, `V` [B, H, S, D]; causal: query i sees keys 0..i. Strides as Q's."""
    batch, heads, _, width = Q.shape
    if K.shape != V.shape or K.shape[0] != batch or K.shape[3] != width or heads % max(1, K.shape[1]):
        raise ValueError(f"attention: Q {tuple(Q.shape)}, K {tuple(K.shape)}, V {tuple(V.shape)} do not fit")
    if not Q.dtype == K.dtype == V.dtype:
        raise TypeError(f"attention: Q, K and V need one dtype, not {Q.dtype}, {K.dtype}, {V.dtype}")
    if not Q.stride(3) == K.stride(3) == V.stride(3) == 1:
        Q, K, V = Q.contiguous(), K.contiguous(), V.contiguous()
    if not K.shape[2]:
        return torch.zeros_like(Q)
    out = torch.empty_like(Q)
    if out.numel():
        attend(Q, K, V, out, causal, width**-0.5 if sm_scale is None else sm_scale, mask)
    return out
