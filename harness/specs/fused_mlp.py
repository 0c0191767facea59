"""fused_mlp(x, w_gate, w_up, w_down): SiLU(x·w_gateᵀ)·(x·w_upᵀ)·w_downᵀ, weights [out, in]."""

from harness.problem import Argument, NamedOp, Recipe
from harness.records import Role

REFERENCE = """import torch


def reference(x, w_gate, w_up, w_down):
    functional = torch.nn.functional
    hidden = functional.silu(functional.linear(x, w_gate)) * functional.linear(x, w_up)
    return functional.linear(hidden, w_down)
"""

SPEC = NamedOp(
    name="fused_mlp",
    reference=REFERENCE,
    arguments=(
        Argument("x", ("M", "D")),
        Argument("w_gate", ("H", "D"), Role.WEIGHT, fan_in="D"),
        Argument("w_up", ("H", "D"), Role.WEIGHT, fan_in="D"),
        Argument("w_down", ("D", "H"), Role.WEIGHT, fan_in="H"),
    ),
    cpu=({"M": 128, "D": 512, "H": 1376},),
    cuda=({"M": 2048, "D": 4096, "H": 11008},),
    ragged=({"M": 67, "D": 33, "H": 97}, {"M": 5, "D": 129, "H": 257}, {"M": 32, "D": 64, "H": 128}),
    edge=({"M": 0, "D": 16, "H": 32}, {"M": 1, "D": 1, "H": 1}, {"M": 1, "D": 17, "H": 3}),
    flops=lambda at: 6 * at["M"] * at["D"] * at["H"],
    recipes=(Recipe.POSITIVE, Recipe.LARGE, Recipe.SMALL, Recipe.OUTLIERS, Recipe.LAST_COLUMN),
    special=("nan",),
    contraction="D",
)
