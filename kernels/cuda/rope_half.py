"""Rotary embedding with rotated halves (Hugging Face) in CUDA C++: 16-byte accesses, strided heads in place."""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

DTYPES = ("float32", "float16", "bfloat16")
TUNABLES = {
    "THREADS": [128, 256, 512],
    "HEADS": [2, 4, 8],  # heads a thread rotates with one read of its angles
    "LOAD": [0, 1, 2, 3],  # 16-byte loads: 0 plain, 1 past L1, 2 evict-first, 3 past L1 and 256 bytes into L2
    "STREAM": [1, 0],  # evict-first stores
    "PDL": [1, 0],  # start while the kernel before drains (Hopper)
}
THREADS = TUNABLES["THREADS"][0]
HEADS = TUNABLES["HEADS"][0]
LOAD = TUNABLES["LOAD"][0]
STREAM = TUNABLES["STREAM"][0]
PDL = TUNABLES["PDL"][0]
SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

using T = SCALAR;
constexpr int VEC = 16 / sizeof(T);  // elements of one 16-byte access
struct Vector { float v[VEC]; };

__device__ __forceinline__ T narrow(float value) { return T(value); }  // round to nearest even
__device__ __forceinline__ Vector unpack(uint4 raw) {
    Vector out;
    const unsigned word[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, float>) {
            out.v[i] = __uint_as_float(word[i]);
        } else if constexpr (std::is_same_v<T, __half>) {
            const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&word[i]));
            out.v[2 * i] = two.x, out.v[2 * i + 1] = two.y;
        } else {
            out.v[2 * i] = __uint_as_float(word[i] << 16);
            out.v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
        }
    }
    return out;
}
__device__ __forceinline__ uint4 pack(const Vector& in) {
    unsigned word[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (std::is_same_v<T, float>) {
            word[i] = __float_as_uint(in.v[i]);
        } else if constexpr (std::is_same_v<T, __half>) {
            const __half2 two = __floats2half2_rn(in.v[2 * i], in.v[2 * i + 1]);
            word[i] = *reinterpret_cast<const unsigned*>(&two);
        } else {
            const __nv_bfloat162 two = __floats2bfloat162_rn(in.v[2 * i], in.v[2 * i + 1]);
            word[i] = *reinterpret_cast<const unsigned*>(&two);
        }
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}
// volatile keeps the loads behind start().
__device__ __forceinline__ uint4 load16(const T* at) {
    uint4 raw;
#if LOAD == 0
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
#elif LOAD == 1
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
#elif LOAD == 2
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
#else
    asm volatile("ld.global.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
#endif
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(at));
    return raw;
}
__device__ __forceinline__ void store16(T* at, uint4 raw) {
    if constexpr (STREAM) __stcs(reinterpret_cast<uint4*>(at), raw);
    else *reinterpret_cast<uint4*>(at) = raw;
}
// Programmatic dependent launch: blocks may become resident while the kernel before still runs, but touch no
// memory before it has finished; only then may the next kernel's blocks come.
__device__ __forceinline__ void start() {
#if PDL
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
template <class Kernel, class... Arguments>
int launch(Kernel kernel, dim3 grid, dim3 block, size_t shared, void* stream, Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = block, config.dynamicSmemBytes = shared;
    config.stream = static_cast<cudaStream_t>(stream);
    cudaLaunchAttribute early[1];
    early[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early[0].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = early, config.numAttrs = PDL;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
}
extern "C" const char* explain(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

struct Tensor { const T* x; T* y; int64_t heads, x_batch, x_head, x_place, y_batch, y_head, y_place; };
__device__ __forceinline__ void turn(float low, float high, float low_c, float high_c, float low_s, float high_s,
                                     float& new_low, float& new_high) {
    new_low = low * low_c - high * low_s;
    new_high = high * high_c + low * high_s;
}
// A thread has one vector of the lower half of a position, and its partner in the upper, and rotates HEADS heads.
// Heads of `a` come first, then those of `b`; blockIdx.y counts groups of HEADS, blockIdx.z is the batch.
__global__ void __launch_bounds__(THREADS) rotate_vectors(
    const __grid_constant__ Tensor a, const __grid_constant__ Tensor b, const T* cos, const T* sin, int64_t table,
    int seq, int half) {
    start();
    const int lanes = half / VEC, flat = blockIdx.x * THREADS + threadIdx.x;
    const int place = flat / lanes, at = flat % lanes * VEC;
    if (place >= seq) return;
    const int groups = int((a.heads + HEADS - 1) / HEADS);
    const bool second = int(blockIdx.y) >= groups;
    const Tensor& t = second ? b : a;
    const int64_t first = (int(blockIdx.y) - (second ? groups : 0)) * int64_t(HEADS);
    const T* from = t.x + blockIdx.z * t.x_batch + place * t.x_place + at;
    T* to = t.y + blockIdx.z * t.y_batch + place * t.y_place + at;
    uint4 low[HEADS], high[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        if (first + i >= t.heads) continue;
        low[i] = load16(from + (first + i) * t.x_head);
        high[i] = load16(from + (first + i) * t.x_head + half);
    }
    const int64_t row = blockIdx.z * table + int64_t(place) * 2 * half + at;
    const Vector low_c = unpack(*reinterpret_cast<const uint4*>(cos + row));
    const Vector high_c = unpack(*reinterpret_cast<const uint4*>(cos + row + half));
    const Vector low_s = unpack(*reinterpret_cast<const uint4*>(sin + row));
    const Vector high_s = unpack(*reinterpret_cast<const uint4*>(sin + row + half));
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        if (first + i >= t.heads) return;
        Vector l = unpack(low[i]), h = unpack(high[i]);
#pragma unroll
        for (int j = 0; j < VEC; j++)
            turn(l.v[j], h.v[j], low_c.v[j], high_c.v[j], low_s.v[j], high_s.v[j], l.v[j], h.v[j]);
        store16(to + (first + i) * t.y_head, pack(l));
        store16(to + (first + i) * t.y_head + half, pack(h));
    }
}
// Shapes and strides that do not divide into vectors: one pair a thread.
__global__ void __launch_bounds__(THREADS) rotate_single(
    const __grid_constant__ Tensor t, const T* cos, const T* sin, int64_t table, int64_t batches, int seq, int half) {
    start();
    const int64_t flat = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t at = flat % half, place = flat / half % seq, head = flat / half / seq % t.heads;
    const int64_t batch = flat / half / seq / t.heads;
    if (batch >= batches) return;
    const T* from = t.x + batch * t.x_batch + head * t.x_head + place * t.x_place + at;
    T* to = t.y + batch * t.y_batch + head * t.y_head + place * t.y_place + at;
    const int64_t row = batch * table + place * 2 * half + at;
    float low, high;
    turn(from[0], from[half], cos[row], cos[row + half], sin[row], sin[row + half], low, high);
    to[0] = narrow(low), to[half] = narrow(high);
}
extern "C" int rotate(const Tensor* a, const Tensor* b, const T* cos, const T* sin, int64_t table, int64_t batches,
                      int64_t seq, int64_t half, int64_t vectors, void* stream) {
    if (vectors) {
        const int64_t groups = (a->heads + HEADS - 1) / HEADS + (b->heads + HEADS - 1) / HEADS;
        const dim3 grid(unsigned((seq * (half / VEC) + THREADS - 1) / THREADS), unsigned(groups), unsigned(batches));
        return launch(rotate_vectors, grid, dim3(THREADS), 0, stream, *a, *b, cos, sin, table, int(seq), int(half));
    }
    for (const Tensor* t : {a, b}) {
        if (t->heads == 0) continue;
        const dim3 grid(unsigned((batches * t->heads * seq * half + THREADS - 1) / THREADS));
        const int failed = launch(
            rotate_single, grid, dim3(THREADS), 0, stream, *t, cos, sin, table, batches, int(seq), int(half));
        if (failed) return failed;
    }
    return 0;
}
"""

SCALARS = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
POINTER, INTEGER, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def command(dtype, capability):
    """The nvcc call, without its files, for one dtype and one device capability."""
    compiler = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    early = int(bool(PDL) and capability >= (9, 0))
    defines = {
        "SCALAR": SCALARS[dtype],
        "PDL": early,
        "HOPPER": int(capability >= (9, 0)),
        "THREADS": THREADS,
        "HEADS": HEADS,
        "LOAD": LOAD,
        "STREAM": STREAM,
    }
    flags = [compiler, "-O3", "-std=c++17", "-arch=sm_{}{}".format(*capability), "-shared", "-Xcompiler", "-fPIC"]
    return flags + [f"-D{name}={value}" for name, value in defines.items()]


@cache
def library(dtype, capability):
    """The compiled source, built once per machine and kept under TMPDIR in a folder of this user."""
    build = command(dtype, capability)
    key = hashlib.sha256("\0".join([SOURCE, *build]).encode()).hexdigest()[:24]
    folder = Path(tempfile.gettempdir()) / f"overnight-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user: set TMPDIR to a folder of your own")
    target = folder / f"{key}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source, built = Path(scratch) / "kernel.cu", Path(scratch) / "kernel.so"
            source.write_text(SOURCE)
            try:
                done = subprocess.run([*build, source, "-o", built], capture_output=True, text=True, check=False)
            except FileNotFoundError as error:
                raise RuntimeError("nvcc is not installed: the CUDA kernels need the CUDA toolkit") from error
            if done.returncode:
                raise RuntimeError(f"nvcc failed:\n{done.stderr[-4000:]}")
            built.replace(target)
    loaded = ctypes.CDLL(str(target))
    loaded.explain.restype = ctypes.c_char_p
    return loaded


@cache
def entry(name, arguments, dtype, device):
    """The C function `name`, called with `arguments` and then the stream; raises when a launch fails."""
    built = library(dtype, torch.cuda.get_device_capability(device))
    function = getattr(built, name)
    function.argtypes = [*arguments, POINTER]

    def check(code):
        if code:
            raise RuntimeError(f"{name}: {built.explain(code).decode()} (CUDA error {code})")

    function.restype = check
    return function


def aligned(x):
    """x contiguous and on a 16-byte boundary."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


SIGNATURE = (POINTER, POINTER, POINTER, POINTER, *[INTEGER] * 5)


class Rotated(ctypes.Structure):
    """Tensor of the CUDA source: one input and its output, in elements."""

    _fields_ = (
        ("x", POINTER),
        ("y", POINTER),
        *((n, INTEGER) for n in ("heads", "x_batch", "x_head", "x_place", "y_batch", "y_head", "y_place")),
    )


def described(x, y):
    return Rotated(x.data_ptr(), y.data_ptr(), x.shape[1], *x.stride()[:3], *y.stride()[:3])


def rotate(tensors, cos, sin):
    """Rotate up to two tensors [B, heads, S, D] in one launch; results keep their strides."""
    kind = torch.promote_types(tensors[0].dtype, torch.promote_types(cos.dtype, sin.dtype))
    batches, _, seq, dim = tensors[0].shape
    tensors = [x.to(kind) if x.stride(3) == 1 else x.to(kind).contiguous() for x in tensors]
    cos, sin = (aligned(t.to(kind).reshape(-1, seq, dim)) for t in (cos, sin))
    results = [torch.empty_like(x) for x in tensors]
    results = [y if y.stride(3) == 1 else y.contiguous() for y in results]
    if any(y.numel() for y in results):
        vector = 16 // tensors[0].element_size()
        steps = [s for t in (*tensors, *results) for s in t.stride()[:3]]
        whole = not any(s % vector for s in (dim // 2, *steps)) and not any(x.data_ptr() % 16 for x in tensors)
        pairs = [described(x, y) for x, y in zip(tensors, results, strict=True)]
        pairs += [Rotated()] * (2 - len(pairs))
        table = seq * dim if cos.shape[0] > 1 else 0
        stream = torch.cuda.current_stream(cos.device).cuda_stream
        launch = entry("rotate", SIGNATURE, kind, cos.device)
        pointers = ctypes.addressof(pairs[0]), ctypes.addressof(pairs[1]), cos.data_ptr(), sin.data_ptr()
        launch(*pointers, table, batches, seq, dim // 2, whole, stream)
    return results


def kernel_fn(x, cos, sin):
    """x·cos + rotate_half(x)·sin for x [B, H, S, D] and cos, sin [S, D], [B or 1, S, D] or [B or 1, 1, S, D]."""
    return rotate([x], cos, sin)[0]
