"""Sum over the last dimension in CUDA C++: a warp or a block a row, few long rows split and added in fixed order."""

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
    "UNROLL": [16, 8, 4],  # loads in flight a thread
    "WARP_LIMIT": [16384, 8192, 32768],  # bytes of a row that one warp adds alone
    "BLOCKS": [1056, 528, 2112],  # blocks wanted before a row is split
    "LOAD": [1, 0, 2, 3],  # 16-byte loads: 0 plain, 1 past L1, 2 evict-first, 3 past L1 and 256 bytes into L2
    "STREAM": [0],
    "PDL": [1, 0],  # start while the kernel before drains (Hopper)
}
UNROLL = TUNABLES["UNROLL"][0]
WARP_LIMIT = TUNABLES["WARP_LIMIT"][0]
BLOCKS = TUNABLES["BLOCKS"][0]
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

struct Sum {
    static constexpr float identity = 0;
    static __device__ float join(float a, float b) { return a + b; }
};
struct Max {
    static constexpr float identity = -FLT_MAX;
    static __device__ float join(float a, float b) { return fmaxf(a, b); }
};
// Over the threads of one row: a warp when blockDim.x is 32, else the block. `scratch` holds 32 floats and may be
// used again after the next barrier.
template <class Op> __device__ __forceinline__ float reduce_row(float value, float* scratch) {
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value = Op::join(value, __shfl_xor_sync(~0u, value, offset));
    if (blockDim.x == 32) return value;
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : Op::identity;
#pragma unroll
    for (int offset = 16; offset; offset /= 2) value = Op::join(value, __shfl_xor_sync(~0u, value, offset));
    return value;
}

// A row need not begin on a 16-byte boundary: vectors are those of memory, `head` elements of the first lie before it.
__device__ __forceinline__ int head_of(const T* row) { return (reinterpret_cast<uintptr_t>(row) & 15) / sizeof(T); }
__device__ __forceinline__ bool whole(int first, int n) { return first >= 0 && first + VEC <= n; }
__device__ __noinline__ uint4 load_edge(const T* row, int first, int n, float fill) {
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) out.v[j] = first + j >= 0 && first + j < n ? float(row[first + j]) : fill;
    return pack(out);
}
__device__ __noinline__ void store_edge(T* row, int first, int n, uint4 raw) {
    const Vector in = unpack(raw);
#pragma unroll
    for (int j = 0; j < VEC; j++) if (first + j >= 0 && first + j < n) row[first + j] = narrow(in.v[j]);
}
__device__ __forceinline__ uint4 load_any(const T* row, int first, int n, float fill) {
    return whole(first, n) ? load16(row + first) : load_edge(row, first, n, fill);
}
__device__ __forceinline__ void store_any(T* row, int first, int n, uint4 raw) {
    if (whole(first, n)) store16(row + first, raw);
    else store_edge(row, first, n, raw);
}
// This thread's CHUNKS vectors of a row, all in flight together; elements outside the row read as `fill`. WHOLE: rows
// begin and end on 16-byte boundaries.
template <bool WHOLE, int CHUNKS>
__device__ __forceinline__ void load_row(uint4 (&raw)[CHUNKS], const T* row, int n, float fill) {
    const int head = WHOLE ? 0 : head_of(row);
    Vector blank;
#pragma unroll
    for (int j = 0; j < VEC; j++) blank.v[j] = fill;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int first = (c * blockDim.x + threadIdx.x) * VEC - head;
        raw[c] = pack(blank);
        if (WHOLE ? first < n : whole(first, n)) raw[c] = load16(row + first);
    }
    if (WHOLE || (head == 0 && n % VEC == 0)) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int first = (c * blockDim.x + threadIdx.x) * VEC - head;
        if (first < n && !whole(first, n)) raw[c] = load_edge(row, first, n, fill);
    }
}
template <bool WHOLE, int CHUNKS>
__device__ __forceinline__ void store_row(const uint4 (&raw)[CHUNKS], T* row, int n) {
    const int head = WHOLE ? 0 : head_of(row);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int first = (c * blockDim.x + threadIdx.x) * VEC - head;
        if (WHOLE ? first < n : whole(first, n)) store16(row + first, raw[c]);
    }
    if (WHOLE || (head == 0 && n % VEC == 0)) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int first = (c * blockDim.x + threadIdx.x) * VEC - head;
        if (first < n && !whole(first, n)) store_edge(row, first, n, raw[c]);
    }
}
// Parameters of the columns first.. ; the next rows find them in L1.
template <bool WHOLE> __device__ __forceinline__ Vector columns(const T* values, int first, int n) {
    if (WHOLE || (first % VEC == 0 && first + VEC <= n)) return unpack(*reinterpret_cast<const uint4*>(values + first));
    Vector out;
#pragma unroll
    for (int j = 0; j < VEC; j++) out.v[j] = first + j >= 0 && first + j < n ? float(values[first + j]) : 0.0f;
    return out;
}

// Calls step(first, raw) for every vector of a row that `width` threads share, UNROLL loads in flight a thread.
template <class Step>
__device__ __forceinline__ void stream_row(const T* row, int n, int lane, int width, float fill, Step step) {
    const int head = head_of(row);
    const int begin = head ? 1 : 0, vectors = (head + n + VEC - 1) / VEC;
    const int end = max((head + n) / VEC, begin);  // vectors begin..end lie wholly inside the row
    int v = begin + lane;
    for (; v + (UNROLL - 1) * width < end; v += UNROLL * width) {
        uint4 raw[UNROLL];
#pragma unroll
        for (int i = 0; i < UNROLL; i++) raw[i] = load16(row + ((v + i * width) * VEC - head));
#pragma unroll
        for (int i = 0; i < UNROLL; i++) step((v + i * width) * VEC - head, raw[i]);
    }
    for (; v < end; v += width) step(v * VEC - head, load16(row + (v * VEC - head)));
    if (head && lane == 0) step(-head, load_edge(row, -head, n, fill));
    if (vectors > end && lane == width - 1) step(end * VEC - head, load_edge(row, end * VEC - head, n, fill));
}

// Adds columns y*part .. (y+1)*part of a row, y being blockIdx.y, in float32.
template <class Out>
__global__ void __launch_bounds__(512) sum_rows(const T* x, Out* out, int64_t rows, int64_t n, int part) {
    __shared__ float scratch[32];
    start();
    const int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, at = int64_t(blockIdx.y) * part;
    if (row >= rows) return;
    float sum[VEC] = {};
    stream_row(x + row * n + at, int(min(int64_t(part), n - at)), threadIdx.x, blockDim.x, 0.0f, [&](int, uint4 raw) {
        const Vector value = unpack(raw);
#pragma unroll
        for (int j = 0; j < VEC; j++) sum[j] += value.v[j];
    });
    float total = 0;
#pragma unroll
    for (int j = 0; j < VEC; j++) total += sum[j];
    total = reduce_row<Sum>(total, scratch);
    if (threadIdx.x) return;
    if constexpr (std::is_same_v<Out, float>) out[row * gridDim.y + blockIdx.y] = total;
    else out[row * gridDim.y + blockIdx.y] = narrow(total);
}
__global__ void __launch_bounds__(256) sum_partials(const float* partial, T* y, int parts) {
    __shared__ float scratch[32];
    start();
    float total = 0;
    for (int i = threadIdx.x; i < parts; i += blockDim.x) total += partial[int64_t(blockIdx.x) * parts + i];
    total = reduce_row<Sum>(total, scratch);
    if (threadIdx.x == 0) y[blockIdx.x] = narrow(total);
}

extern "C" int sum(
    const T* x, T* y, float* partial, int64_t rows, int64_t n, int64_t part, int64_t parts, void* stream) {
    const bool warp = parts == 1 && n * int64_t(sizeof(T)) <= WARP_LIMIT;
    const dim3 block(warp ? 32 : 256, warp ? 8 : 1), grid(unsigned((rows + block.y - 1) / block.y), unsigned(parts));
    if (parts == 1) return launch(sum_rows<T>, grid, block, 0, stream, x, y, rows, n, int(part));
    const int failed = launch(sum_rows<float>, grid, block, 0, stream, x, partial, rows, n, int(part));
    if (failed) return failed;
    return launch(sum_partials, dim3(unsigned(rows)), dim3(256), 0, stream, (const float*)partial, y, int(parts));
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
        "UNROLL": UNROLL,
        "WARP_LIMIT": WARP_LIMIT,
        "BLOCKS": BLOCKS,
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


SIGNATURE = (POINTER, POINTER, POINTER, INTEGER, INTEGER, INTEGER, INTEGER)
PART = 16384  # least elements worth a block of their own


def kernel_fn(x):
    """Sum of x [..., n] over its last dimension, in x's dtype; 0 over no elements."""
    x = aligned(x)
    y = torch.empty(x.shape[:-1], dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y.zero_()
    n = x.shape[-1] if x.dim() else 1
    rows = x.numel() // n
    parts = min(65535, -(-n // PART), max(1, BLOCKS // rows))
    part = n if parts == 1 else -(-n // (8 * parts)) * 8
    parts = -(-n // part)
    partial = torch.empty(rows * parts if parts > 1 else 0, dtype=torch.float32, device=x.device)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    pointers = x.data_ptr(), y.data_ptr(), partial.data_ptr()
    entry("sum", SIGNATURE, x.dtype, x.device)(*pointers, rows, n, part, parts, stream)
    return y
