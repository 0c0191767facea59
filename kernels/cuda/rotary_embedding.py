"""Rotary embedding of interleaved pairs in CUDA C++: 16-byte accesses, several heads for one read of angles."""

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

// 8 bytes of a table: the angles of the pairs in one vector of x.
struct Half { float v[VEC / 2]; };
__device__ __forceinline__ Half angles(const T* at) {
    const uint2 raw = *reinterpret_cast<const uint2*>(at);
    const Vector both = unpack(make_uint4(raw.x, raw.y, 0, 0));
    Half out;
#pragma unroll
    for (int j = 0; j < VEC / 2; j++) out.v[j] = both.v[j];
    return out;
}
// x and y are [planes, seq, 2·half], a plane takes `across` blocks. A thread has one vector of a position and rotates
// it for HEADS planes.
__global__ void __launch_bounds__(THREADS)
rotate_vectors(const T* x, const T* cos, const T* sin, T* y, int64_t planes, int64_t seq, int half, unsigned across) {
    start();
    const int64_t size = seq * 2 * half, at = (int64_t(blockIdx.x % across) * THREADS + threadIdx.x) * VEC;
    if (at >= size) return;
    const Half c = angles(cos + at / 2), s = angles(sin + at / 2);
    const int64_t first = int64_t(blockIdx.x / across) * HEADS;
    uint4 raw[HEADS];
#pragma unroll
    for (int i = 0; i < HEADS; i++) if (first + i < planes) raw[i] = load16(x + (first + i) * size + at);
#pragma unroll
    for (int i = 0; i < HEADS; i++) {
        if (first + i >= planes) return;
        const Vector in = unpack(raw[i]);
        Vector out;
#pragma unroll
        for (int j = 0; j < VEC / 2; j++) {
            out.v[2 * j] = in.v[2 * j] * c.v[j] - in.v[2 * j + 1] * s.v[j];
            out.v[2 * j + 1] = in.v[2 * j] * s.v[j] + in.v[2 * j + 1] * c.v[j];
        }
        store16(y + (first + i) * size + at, pack(out));
    }
}
// Head sizes that do not divide into vectors: one pair a thread.
__global__ void __launch_bounds__(THREADS)
rotate_single(const T* x, const T* cos, const T* sin, T* y, int64_t planes, int64_t seq, int half) {
    start();
    const int64_t size = seq * half, at = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    if (at >= planes * size) return;
    const float even = x[2 * at], odd = x[2 * at + 1], c = cos[at % size], s = sin[at % size];
    y[2 * at] = narrow(even * c - odd * s);
    y[2 * at + 1] = narrow(even * s + odd * c);
}
extern "C" int rotate(
    const T* x, const T* cos, const T* sin, T* y, int64_t planes, int64_t seq, int64_t half, void* stream) {
    const int64_t size = seq * 2 * half;
    if (size % VEC) {
        const dim3 grid(unsigned((planes * seq * half + THREADS - 1) / THREADS));
        return launch(rotate_single, grid, dim3(THREADS), 0, stream, x, cos, sin, y, planes, seq, int(half));
    }
    const unsigned across = unsigned((size / VEC + THREADS - 1) / THREADS);
    const dim3 grid(across * unsigned((planes + HEADS - 1) / HEADS));
    return launch(rotate_vectors, grid, dim3(THREADS), 0, stream, x, cos, sin, y, planes, seq, int(half), across);
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


SIGNATURE = (POINTER, POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER)


def kernel_fn(x, cos, sin):
    """Rotate x [..., S, D] by cos and sin [S, D/2]; contiguous."""
    kind = torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
    x, cos, sin = aligned(x.to(kind)), aligned(cos.to(kind)), aligned(sin.to(kind))
    y = torch.empty_like(x)
    if x.numel():
        seq, half = x.shape[-2], x.shape[-1] // 2
        planes = x.numel() // (seq * 2 * half)
        pointers = x.data_ptr(), cos.data_ptr(), sin.data_ptr(), y.data_ptr()
        stream = torch.cuda.current_stream(x.device).cuda_stream
        entry("rotate", SIGNATURE, kind, x.device)(*pointers, planes, seq, half, stream)
    return y
