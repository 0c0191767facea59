"""flash_attention(Q, K, V, causal=True, sm_scale=None): [B, H, S, D]; None means D**-0.5."""

from harness.problem import Argument, NamedOp, Recipe

REFERENCE = """import torch


def reference(Q, K, V, causal=True, sm_scale=None):
    return torch.nn.functional.scaled_dot_product_attention(Q, K, V, is_causal=causal, scale=sm_scale)
"""

SPEC = NamedOp(
    name="flash_attention",
    reference=REFERENCE,
    arguments=tuple(Argument(name, ("B", "H", "S", "D")) for name in ("Q", "K", "V")),
    cpu=({"B": 1, "H": 8, "S": 256, "D": 64},),
    cuda=({"B": 2, "H": 32, "S": 2048, "D": 128},),
    ragged=(
        {"B": 2, "H": 3, "S": 67, "D": 64},
        {"B": 1, "H": 2, "S": 129, "D": 32},
        {"B": 1, "H": 1, "S": 255, "D": 128},
    ),
    edge=({"B": 0, "H": 2, "S": 16, "D": 64}, {"B": 1, "H": 1, "S": 1, "D": 64}, {"B": 3, "H": 1, "S": 3, "D": 16}),
    round_sizes=("D",),
    flops=lambda at: 2 * at["B"] * at["H"] * at["S"] ** 2 * at["D"],
    variants=({"causal": False}, {"causal": True, "sm_scale": 0.3}),
    recipes=(Recipe.POSITIVE, Recipe.LARGE, Recipe.SMALL, Recipe.OUTLIERS, Recipe.LAST_COLUMN),
)
