"""How each Triton kernel is launched, for compiling it without a GPU: argument types and the default constants."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

KERNELS = Path(__file__).resolve().parents[2] / "kernels" / "triton"


@dataclass(frozen=True)
class Case:
    """One launch: `signature` is the run-time arguments in order, e.g. `*bf16 *bf16 i32 fp32`."""

    file: str
    kernel: str
    signature: str
    constants: dict[str, Any]
    warps: int
    stages: int = 3


def load(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"kernel_{file}", KERNELS / f"{file}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gemm(tile: tuple[int, int, int, int, int], **constants: Any) -> dict[str, Any]:
    return {
        "constants": {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "BLOCK_K": tile[2], "GROUP": 8, "EVEN_K": True}
        | constants,
        "warps": tile[3],
        "stages": tile[4],
    }


def described(tile: tuple[int, int, int, int, int], **constants: Any) -> dict[str, Any]:
    launch = gemm(tile, **constants)
    del launch["constants"]["EVEN_K"]
    return launch


def descriptors(tile: tuple[int, int, int, int, int], operands: str) -> str:
    """Descriptor types of operands: a and x are [M, K] tiles, b [K, N], w [N, K], y [M, N]; then the three sizes."""
    m, n, k = tile[:3]
    shapes = {"a": (m, k), "x": (m, k), "b": (k, n), "w": (n, k), "y": (m, n)}
    return " ".join(f"tensordesc<bf16[{shapes[o][0]},{shapes[o][1]}]>" for o in operands) + " i32 i32 i32"


NORM = "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 fp32"
ROPE = {"ROWS": 16, "HALF": 64, "HEADS": 4}
MLP = "*bf16 *bf16 *bf16 *bf16 i32 i32 i32"
ADD_NORM = "*bf16 *bf16 *bf16 *bf16 *bf16 i32"
MATMUL = "*bf16 *bf16 *bf16 i32 i32 i32 i64 i32 1 i64 i32 1"
ATTENTION = "*bf16 *bf16 *bf16 *bf16" + " i32 i32 i32 1" * 3 + " i32 i32 i32 i32 i32 fp32"
MASKED = "*bf16 *bf16 *bf16 {} *bf16" + " i32 i32 i32 1" * 4 + " i32" * 8 + " fp32"

LINEAR = "*bf16 *bf16 *bf16 *bf16 i32 i32 i32 i32 i32"
DESCRIBED_LINEAR = "tensordesc<bf16[128,64]> tensordesc<bf16[256,64]> *bf16 tensordesc<bf16[128,256]>"

CASES = [
    Case("softmax", "softmax_fused", "*bf16 *bf16 i32 i32", {"ROWS": 1, "BLOCK": 4096}, 8),
    Case("softmax", "softmax_online", "*bf16 *bf16 i32", {"BLOCK": 4096}, 8),
    Case("reduce", "sum_rows", "*bf16 *bf16 i32 i32", {"ROWS": 1, "BLOCK": 4096}, 4),
    Case("reduce", "sum_long", "*bf16 *fp32 i32 i32 i32", {"BLOCK": 4096}, 4),
    Case("layernorm", "layernorm_fused", "*bf16 *bf16 *bf16 *bf16 i32 i32 fp32", {"ROWS": 1, "BLOCK": 4096}, 8),
    Case("layernorm", "layernorm_long", "*bf16 *bf16 *bf16 *bf16 i32 fp32", {"BLOCK": 4096}, 8),
    Case("rmsnorm", "rmsnorm_fused", "*bf16 *bf16 *bf16 i32 i32 fp32", {"ROWS": 1, "BLOCK": 4096}, 8),
    Case("rmsnorm", "rmsnorm_long", "*bf16 *bf16 *bf16 i32 fp32", {"BLOCK": 4096}, 8),
    Case("cross_entropy", "row_losses", "*bf16 *i64 *fp32 i32", {"IGNORED": -100, "BLOCK": 4096}, 8),
    Case("cross_entropy", "mean_of_counted", "*fp32 *i64 *bf16 i32", {"IGNORED": -100, "BLOCK": 4096}, 8),
    Case(
        "rotary_embedding", "rotate_pairs", "*bf16 *bf16 *bf16 *bf16 i32 i32 i32",
        {"ROWS": 16, "HALF": 64, "HEADS": 4}, 4,
    ),
    Case("matmul", "matmul_tile", MATMUL, **gemm(load("matmul").TILE, EVEN_M=True, EVEN_N=True)),
    Case(
        "matmul",
        "matmul_tile",
        MATMUL.replace("bf16", "fp32"),
        **gemm(load("matmul").TILE_FLOAT32, EVEN_M=False, EVEN_N=False),
    ),
    Case("fused_mlp", "linear_tile", MLP, **gemm(load("fused_mlp").GATED_TILE, GATED=True)),
    Case("fused_mlp", "linear_tile", MLP, **gemm(load("fused_mlp").DOWN_TILE, GATED=False)),
    Case("flash_attention", "attention_tile", ATTENTION,
        {"BLOCK_M": 128, "BLOCK_N": 128, "D": 128, "CAUSAL": True, "EVEN_D": True}, 8, 2),
    Case("flash_attention", "attention_tile", ATTENTION.replace("bf16", "fp32"),
        {"BLOCK_M": 64, "BLOCK_N": 16, "D": 128, "CAUSAL": True, "EVEN_D": True}, 8, 2),
    Case("flash_attention__masked", "attention_tile", MASKED.format("*u8"),
        {"BLOCK_M": 64, "BLOCK_N": 64, "D": 64, "FORM": 2, "EVEN_D": True}, 4, 3),
    Case("flash_attention__masked", "attention_tile", MASKED.format("*fp32").replace("bf16", "fp32"),
        {"BLOCK_M": 32, "BLOCK_N": 16, "D": 128, "FORM": 3, "EVEN_D": True}, 8, 2),
    Case("matmul", "matmul_descriptor", descriptors(load("matmul").TILE, "aby"),
        **described(load("matmul").TILE, BY_ROWS=False)),
    Case("fused_mlp", "linear_descriptor", descriptors(load("fused_mlp").GATED_TILE, "xwwy"),
        **described(load("fused_mlp").GATED_TILE, GATED=True)),
    Case("linear_gelu", "linear_tile", LINEAR.replace("*bf16 *bf16 *bf16 *bf16", DESCRIBED_LINEAR),
        **described(load("linear_gelu").TILE, BIAS=True, TANH=False, EXACT=False, DESCRIBED=True)),
    Case("linear_gelu", "linear_tile", LINEAR,
        **described(load("linear_gelu").TILE, BIAS=True, TANH=True, EXACT=False, DESCRIBED=False)),
    Case("linear_gelu", "linear_tile", LINEAR.replace("bf16", "fp32"),
        **described(load("linear_gelu").TILE_FLOAT32, BIAS=True, TANH=False, EXACT=True, DESCRIBED=False)),
    Case("flash_attention", "attention_descriptor",
        "tensordesc<bf16[128,128]> " * 4 + "i32 i32 i32 i32 fp32",
        {"BLOCK_M": 128, "BLOCK_N": 128, "D": 128, "CAUSAL": True}, 8, 2),
    Case("add_rmsnorm", "add_rmsnorm_fused", ADD_NORM + " i32 fp32", {"ROWS": 1, "BLOCK": 4096}, 8),
    Case("add_rmsnorm", "add_rmsnorm_long", ADD_NORM + " fp32", {"BLOCK": 4096}, 8),
    Case("add_layernorm", "add_layernorm_fused", "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 i32 i32 fp32",
        {"ROWS": 1, "BLOCK": 4096}, 8),
    Case("add_layernorm", "add_layernorm_long", "*bf16 *bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32", {"BLOCK": 4096}, 8),
    Case("gelu", "gelu_block", "*bf16 *bf16 i32", {"TANH": False, "BLOCK": 2048}, 4),
    Case("gelu", "gelu_block", "*fp16 *fp16 i32", {"TANH": True, "BLOCK": 2048}, 4),
    Case("silu_mul", "silu_mul_flat", "*bf16 *bf16 *bf16 i32", {"BLOCK": 2048}, 4),
    Case("silu_mul", "silu_mul_rows", "*bf16 *bf16 *bf16 i32 i32 i32", {"BLOCK": 2048}, 4),
    Case("rope_half", "rotate_halves", "*bf16 *bf16 *bf16 *bf16" + " i32" * 11, ROPE, 4),
    Case("rope_half__pair", "rotate_halves", "*bf16 *bf16 *bf16 *bf16" + " i32" * 11, ROPE, 4),
    Case("rope_complex__pair", "rotate_complex", "*bf16 *fp32 *bf16 i32 i32 i32", {"ROWS": 32, "HALF": 64}, 4),
    Case("rope_complex", "rotate_complex", "*bf16 *fp32 *bf16 i32 i32 i32", {"ROWS": 32, "HALF": 64}, 4),
    Case("groupnorm", "groupnorm_fused", NORM, {"SILU": False, "CHANNELS": 8, "SPACE": 4096}, 32),
    Case("groupnorm", "groupnorm_long", NORM, {"SILU": True, "BLOCK": 4096}, 8),
]  # fmt: skip
