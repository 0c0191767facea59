"""GELU, exact (erf) or with the tanh approximation, in CUDA C++ over the storage of any dense tensor."""

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
    "UNROLL": [2, 4, 1],  # 16-byte loads in flight a thread
    "LOAD": [0, 1, 2, 3],  # 16-byte loads: 0 plain, 1 past L1, 2 evict-first, 3 past L1 and 256 bytes into L2
    "STREAM": [1, 0],  # evict-first stores
    "PDL": [1, 0],  # start while the kernel before drains (Hopper)
}
THREADS = TUNABLES["THREADS"][0]
UNROLL = TUNABLES["UNROLL"][0]
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

// x·Phi(x). For 16-bit types the tail 1 - Phi is Abramowitz and Stegun 7.1.26 (absolute error 1.5e-7, and no
// cancellation for negative x), which costs half of erff; float32 uses erff.
template <bool TANH> __device__ __forceinline__ float gelu(float x) {
    if constexpr (TANH) {
        const float twice = 1.5957691216057308f * (x + 0.044715f * x * x * x);
        if (x == -INFINITY) return NAN;  // -inf · 0, as PyTorch has it
        if constexpr (std::is_same_v<T, float>) return __fdividef(x, 1.0f + expf(-twice));
        return __fdividef(x, 1.0f + __expf(-twice));
    } else if constexpr (std::is_same_v<T, float>) {
        return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    } else {
        float t, decay;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(t) : "f"(fmaf(fabsf(x), 0.23164190f, 1.0f)));
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(decay) : "f"(x * x * -0.72134752044448170f));
        float tail = fmaf(t, 0.530702715f, -0.726576013f);
        tail = fmaf(t, tail, 0.710706871f);
        tail = fmaf(t, tail, -0.142248368f);
        tail = fmaf(t, tail, 0.127414796f) * t * decay;
        return x * (x < 0 ? tail : 1.0f - tail);
    }
}
template <bool TANH> __global__ void __launch_bounds__(THREADS) gelu_flat(const T* x, T* y, int64_t n) {
    start();
    const int64_t first = (int64_t(blockIdx.x) * UNROLL * THREADS + threadIdx.x) * VEC;
    uint4 raw[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t at = first + i * THREADS * VEC;
        if (at + VEC <= n) raw[i] = load16(x + at);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; i++) {
        const int64_t at = first + i * THREADS * VEC;
        if (at + VEC <= n) {
            Vector value = unpack(raw[i]);
#pragma unroll
            for (int j = 0; j < VEC; j++) value.v[j] = gelu<TANH>(value.v[j]);
            store16(y + at, pack(value));
        } else {
            for (int64_t j = at; j < n; j++) y[j] = narrow(gelu<TANH>(float(x[j])));
        }
    }
}
extern "C" int gelu(const T* x, T* y, int64_t n, int64_t tanh, void* stream) {
    const dim3 grid(unsigned((n + THREADS * VEC * UNROLL - 1) / (THREADS * VEC * UNROLL)));
    return launch(tanh ? gelu_flat<true> : gelu_flat<false>, grid, dim3(THREADS), 0, stream, x, y, n);
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
        "UNROLL": UNROLL,
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


SIGNATURE = (POINTER, POINTER, INTEGER, INTEGER)


def kernel_fn(x, approximate="none"):
    """GELU of x, whose strides it keeps; approximate is "none" or "tanh"."""
    y = torch.empty_like(x)
    if x.stride() != y.stride() or x.data_ptr() % 16:
        x = x.clone()  # not dense: the copy has the strides of the result
    if count := x.numel():
        stream = torch.cuda.current_stream(x.device).cuda_stream
        launch = entry("gelu", SIGNATURE, x.dtype, x.device)
        launch(x.data_ptr(), y.data_ptr(), count, approximate == "tanh", stream)
    return y
