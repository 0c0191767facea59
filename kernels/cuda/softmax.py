"""Softmax over the last dimension in CUDA C++: rows in registers, two in shared memory, or streamed twice."""

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
    "THREADS": [256, 128, 512, 64],  # a block's share of one row held in registers
    "WAVES": [0, 1, 2],  # blocks per resident slot of a persistent grid; 0: one block per row
    "STAGED_THREADS": [768, 1024, 512],  # for rows that wait in shared memory
    "STAGED_BLOCKS": [1, 2],  # such blocks a processor; one has two rows there, of two each has one
    "KEEP": [4, 3, 0],  # vectors a thread keeps in registers between the passes over such a row
    "UNROLL": [4, 2, 8],
    "LOAD": [0, 1, 2, 3],  # 16-byte loads: 0 plain, 1 past L1, 2 evict-first, 3 past L1 and 256 bytes into L2
    "STREAM": [1, 0],  # evict-first stores
    "PDL": [1, 0],  # start while the kernel before drains (Hopper)
}
THREADS = TUNABLES["THREADS"][0]
WAVES = TUNABLES["WAVES"][0]
STAGED_THREADS = TUNABLES["STAGED_THREADS"][0]
STAGED_BLOCKS = TUNABLES["STAGED_BLOCKS"][0]
KEEP = TUNABLES["KEEP"][0]
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

__device__ __forceinline__ float exponential(float x) {
    if constexpr (std::is_same_v<T, float>) return exp2f(x * 1.4426950408889634f);  // denormal results too
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.4426950408889634f));
    return result;
}

// A row is held by a warp or a block, in CHUNKS vectors a thread: as few as keep the block at THREADS.
struct Shape { int chunks, threads, rows; };
inline Shape shape_of(int n) {
    const bool ragged = n % VEC != 0;  // fewer kernels are built for these: 2 or 4 vectors a thread
    const int vectors = (n + VEC - 1) / VEC + ragged;
    int chunks = ragged ? 2 : 1;
    while (chunks < (ragged ? 4 : 8) && (vectors + chunks - 1) / chunks > (ragged ? 512 : THREADS)) chunks *= 2;
    const int threads = ((vectors + chunks - 1) / chunks + 31) / 32 * 32;
    return {chunks, threads, threads == 32 ? 4 : 1};
}
inline bool fits_registers(int n) { return shape_of(n).threads <= 512; }
template <class Kernel, class... Arguments>
int launch_rows(Kernel kernel, Shape shape, int64_t rows, void* stream, Arguments... arguments) {
    int64_t blocks = (rows + shape.rows - 1) / shape.rows;
    if (WAVES > 0) {  // a persistent grid: each block walks over rows, its next row already in flight
        int device = 0, processors = 0, resident = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, shape.threads * shape.rows, 0);
        const int64_t most = int64_t(processors) * resident * WAVES;
        blocks = blocks < most ? blocks : most;
    }
    return launch(kernel, dim3(blocks), dim3(shape.threads, shape.rows), 0, stream, arguments...);
}

// A maximum that starts at -FLT_MAX keeps exp(-inf - maximum) at 0; a row of -inf ends in 0/0 = nan, as in PyTorch.
template <int CHUNKS, bool WHOLE>
__global__ void __launch_bounds__(512) softmax_rows(const T* x, T* y, int64_t rows, int n) {
    __shared__ float peaks[32], totals[32];
    start();
    int64_t row = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
    const int64_t step = int64_t(gridDim.x) * blockDim.y;
    if (row >= rows) return;
    uint4 raw[CHUNKS], ahead[CHUNKS];
    load_row<WHOLE>(raw, x + row * n, n, -INFINITY);
    for (;;) {
        const bool more = WAVES > 0 && row + step < rows;
        if (more) load_row<WHOLE>(ahead, x + (row + step) * n, n, -INFINITY);
        Vector value[CHUNKS];
        float peak = -FLT_MAX, total = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            value[c] = unpack(raw[c]);
#pragma unroll
            for (int j = 0; j < VEC; j++) peak = fmaxf(peak, value[c].v[j]);
        }
        peak = reduce_row<Max>(peak, peaks);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int j = 0; j < VEC; j++) total += value[c].v[j] = exponential(value[c].v[j] - peak);
        }
        const float inverse = 1.0f / reduce_row<Sum>(total, totals);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
#pragma unroll
            for (int j = 0; j < VEC; j++) value[c].v[j] *= inverse;
            raw[c] = pack(value[c]);
        }
        store_row<WHOLE>(raw, y + row * n, n);
        if (!more) return;
        row += step;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) raw[c] = ahead[c];
    }
}

#if HOPPER
// One block a processor walks over rows; while it works on one in shared memory, the copy engine brings the next.
__device__ __forceinline__ unsigned shared_address(const void* at) { return __cvta_generic_to_shared(at); }
__device__ __forceinline__ void fetch_row(const T* row, int n, T* slot, uint64_t* arrived) {
    const int head = head_of(row);
    const int begin = head ? VEC : 0, end = max((head + n) / VEC * VEC, begin);  // whole vectors, as slot elements
    if (threadIdx.x == 0) {
        const unsigned barrier = shared_address(arrived), bytes = (end - begin) * sizeof(T);
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
        constexpr unsigned piece = 16384;
        for (unsigned done = 0; done < bytes; done += piece) {
            const unsigned size = min(piece, bytes - done);
            const char* from = reinterpret_cast<const char*>(row + (begin - head)) + done;
            asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                         ::"r"(shared_address(slot + begin) + done), "l"(from), "r"(size), "r"(barrier) : "memory");
        }
    }
    // The copy engine moves whole vectors only: the ends are loaded one by one, and padded to a vector with -inf.
    const int last = (head + n + VEC - 1) / VEC * VEC;
    if (threadIdx.x < VEC) {
        const int at = threadIdx.x;
        if (head) slot[at] = at >= head && at < head + n ? row[at - head] : narrow(-INFINITY);
        if (last > end) slot[end + at] = end + at < head + n ? row[end + at - head] : narrow(-INFINITY);
    }
}
// Element by element, two at a time for 16-bit types; nan loses, and turns up again in the sum.
__device__ __forceinline__ uint4 larger(uint4 a, uint4 b) {
    if constexpr (std::is_same_v<T, float>) {
        Vector left = unpack(a);
        const Vector right = unpack(b);
#pragma unroll
        for (int j = 0; j < VEC; j++) left.v[j] = fmaxf(left.v[j], right.v[j]);
        return pack(left);
    } else {
        using Two = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
        Two* left = reinterpret_cast<Two*>(&a);
        const Two* right = reinterpret_cast<const Two*>(&b);
#pragma unroll
        for (int i = 0; i < 4; i++) left[i] = __hmax2(left[i], right[i]);
        return a;
    }
}
__device__ __forceinline__ void await(uint64_t* arrived, unsigned parity) {
    asm volatile("{\n.reg .pred done;\nwaiting:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra ready;\nbra waiting;\nready:\n}" ::"r"(shared_address(arrived)), "r"(parity) : "memory");
}
__global__ void __launch_bounds__(STAGED_THREADS, STAGED_BLOCKS)
softmax_staged(const T* x, T* y, int64_t rows, int n, int slot, int stages) {
    extern __shared__ __align__(128) unsigned char memory[];
    __shared__ float peaks[32], totals[32];
    __shared__ uint64_t arrived[2];
    if (threadIdx.x < 2)
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&arrived[threadIdx.x])));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    __syncthreads();
    start();
    T* const slots = reinterpret_cast<T*>(memory);
    for (int s = 0; s < stages; s++) {
        const int64_t row = blockIdx.x + int64_t(s) * gridDim.x;
        if (row < rows) fetch_row(x + row * n, n, slots + s * slot, &arrived[s]);
    }
    int stage = 0;
    unsigned parity = 0;
    for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
        const T* from = slots + stage * slot;
        const int head = head_of(x + row * n), vectors = (head + n + VEC - 1) / VEC;
        await(&arrived[stage], parity);
        __syncthreads();  // the ends of the row, stored by threads
        uint4 high = make_uint4(0, 0, 0, 0);
        for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
            const uint4 raw = *reinterpret_cast<const uint4*>(from + v * VEC);
            high = v < blockDim.x ? raw : larger(high, raw);
        }
        float peak = -FLT_MAX, total = 0;
        if (threadIdx.x < vectors) {
            const Vector value = unpack(high);
#pragma unroll
            for (int j = 0; j < VEC; j++) peak = fmaxf(peak, value.v[j]);
        }
        peak = reduce_row<Max>(peak, peaks);
        // The first KEEP vectors keep their exponentials in registers, the others compute them twice.
        Vector kept[KEEP ? KEEP : 1];
#pragma unroll
        for (int k = 0; k < KEEP; k++) {
            const int v = k * blockDim.x + threadIdx.x;
            if (v >= vectors) continue;
            kept[k] = unpack(*reinterpret_cast<const uint4*>(from + v * VEC));
#pragma unroll
            for (int j = 0; j < VEC; j++) total += kept[k].v[j] = exponential(kept[k].v[j] - peak);
        }
#pragma unroll 2
        for (int v = KEEP * blockDim.x + threadIdx.x; v < vectors; v += blockDim.x) {
            const Vector value = unpack(*reinterpret_cast<const uint4*>(from + v * VEC));
#pragma unroll
            for (int j = 0; j < VEC; j++) total += exponential(value.v[j] - peak);
        }
        const float inverse = 1.0f / reduce_row<Sum>(total, totals);
#pragma unroll
        for (int k = 0; k < KEEP; k++) {
            const int v = k * blockDim.x + threadIdx.x;
            if (v >= vectors) continue;
#pragma unroll
            for (int j = 0; j < VEC; j++) kept[k].v[j] *= inverse;
            store_any(y + row * n, v * VEC - head, n, pack(kept[k]));
        }
#pragma unroll 2
        for (int v = KEEP * blockDim.x + threadIdx.x; v < vectors; v += blockDim.x) {
            Vector value = unpack(*reinterpret_cast<const uint4*>(from + v * VEC));
#pragma unroll
            for (int j = 0; j < VEC; j++) value.v[j] = exponential(value.v[j] - peak) * inverse;
            store_any(y + row * n, v * VEC - head, n, pack(value));
        }
        __syncthreads();  // everybody has read the slot
        const int64_t later = row + int64_t(stages) * gridDim.x;
        if (later < rows) fetch_row(x + later * n, n, slots + stage * slot, &arrived[stage]);
        if (++stage == stages) stage = 0, parity ^= 1;
    }
}
#endif

__global__ void __launch_bounds__(1024) softmax_streamed(const T* x, T* y, int n) {
    __shared__ float peaks[32], totals[32];
    start();
    const T* const from = x + int64_t(blockIdx.x) * n;
    T* const to = y + int64_t(blockIdx.x) * n;
    float peak = -FLT_MAX, total = 0;
    stream_row(from, n, threadIdx.x, blockDim.x, -INFINITY, [&](int, uint4 raw) {
        const Vector value = unpack(raw);
        float high = peak;
#pragma unroll
        for (int j = 0; j < VEC; j++) high = fmaxf(high, value.v[j]);
        if (high > peak) total *= exponential(peak - high), peak = high;
#pragma unroll
        for (int j = 0; j < VEC; j++) total += exponential(value.v[j] - peak);
    });
    const float top = reduce_row<Max>(peak, peaks);
    const float inverse = 1.0f / reduce_row<Sum>(total * exponential(peak - top), totals);
    stream_row(from, n, threadIdx.x, blockDim.x, -INFINITY, [&](int first, uint4 raw) {
        Vector value = unpack(raw);
#pragma unroll
        for (int j = 0; j < VEC; j++) value.v[j] = exponential(value.v[j] - top) * inverse;
        store_any(to, first, n, pack(value));
    });
}

extern "C" int softmax(const T* x, T* y, int64_t rows, int64_t n, void* stream) {
    const Shape shape = shape_of(n);
    if (fits_registers(n)) {
        const auto run = [&](auto kernel) { return launch_rows(kernel, shape, rows, stream, x, y, rows, int(n)); };
        if (n % VEC) return shape.chunks == 2 ? run(softmax_rows<2, false>) : run(softmax_rows<4, false>);
        switch (shape.chunks) {
            case 1: return run(softmax_rows<1, true>);
            case 2: return run(softmax_rows<2, true>);
            case 4: return run(softmax_rows<4, true>);
            default: return run(softmax_rows<8, true>);
        }
    }
#if HOPPER
    int device = 0, processors = 0, limit = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    const int64_t slot = (n + 2 * VEC) / VEC * VEC;  // room for the row at any offset from a 16-byte boundary
    const int fit = int((limit - 1024) / (slot * int64_t(sizeof(T))));
    if (fit >= 1) {
        const bool shared = STAGED_BLOCKS == 2 && fit >= 2;
        const int used = fit < 2 || shared ? 1 : 2;
        const size_t bytes = slot * sizeof(T) * used;
        const auto size = cudaFuncAttributeMaxDynamicSharedMemorySize;
        const int failed = cudaFuncSetAttribute(softmax_staged, size, int(bytes));
        if (failed) return failed;
        const int64_t most = int64_t(processors) * (shared ? 2 : 1);
        const dim3 grid(unsigned(rows < most ? rows : most)), block(STAGED_THREADS);
        return launch(softmax_staged, grid, block, bytes, stream, x, y, rows, int(n), int(slot), used);
    }
#endif
    return launch(softmax_streamed, dim3(unsigned(rows)), dim3(1024), 0, stream, x, y, int(n));
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
        "WAVES": WAVES,
        "STAGED_THREADS": STAGED_THREADS,
        "STAGED_BLOCKS": STAGED_BLOCKS,
        "KEEP": KEEP,
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


def kernel_fn(x):
    """Softmax of x [..., n] over its last dimension, contiguous."""
    x = aligned(x)
    y = torch.empty_like(x)
    if count := x.numel():
        n = x.shape[-1] if x.dim() else 1
        stream = torch.cuda.current_stream(x.device).cuda_stream
        entry("softmax", SIGNATURE, x.dtype, x.device)(x.data_ptr(), y.data_ptr(), count // n, n, stream)
    return y
