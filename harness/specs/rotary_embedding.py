"""rotary_embedding(x, cos, sin): interleaved pairs of x [B, H, S, D]; cos and sin [S, D/2]."""

from harness.problem import Argument, NamedOp, Recipe
from harness.records import Role

REFERENCE = """import torch


def reference(x, cos, sin):
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2)
"""

SPEC = NamedOp(
    name="rotary_embedding",
    reference=REFERENCE,
    arguments=(
        Argument("x", ("B", "H", "S", "D")),
        Argument("cos", ("S", "D/2"), Role.WEIGHT, follows_recipe=False),
        Argument("sin", ("S", "D/2"), Role.WEIGHT, follows_recipe=False),
    ),
    cpu=({"B": 1, "H": 8, "S": 512, "D": 64},),
    cuda=({"B": 2, "H": 32, "S": 2048, "D": 128},),
    ragged=(
        {"B": 2, "H": 3, "S": 67, "D": 64},
        {"B": 1, "H": 5, "S": 33, "D": 32},
        {"B": 3, "H": 1, "S": 129, "D": 128},
    ),
    edge=({"B": 0, "H": 2, "S": 16, "D": 64}, {"B": 1, "H": 1, "S": 1, "D": 2}, {"B": 2, "H": 1, "S": 3, "D": 6}),
    round_sizes=("D",),
    flops=lambda at: 3 * at["B"] * at["H"] * at["S"] * at["D"],
    recipes=(Recipe.POSITIVE, Recipe.LARGE, Recipe.SMALL, Recipe.OUTLIERS, Recipe.LAST_COLUMN),
    special=("nan", "inf"),
)
