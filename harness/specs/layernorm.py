"""layernorm(x, weight, bias): over the last dim of x [M, N], eps 1e-5."""

from harness.problem import Argument, NamedOp, Recipe
from harness.records import Role

REFERENCE = """import torch


def reference(x, weight, bias, eps=1e-5):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
"""

SPEC = NamedOp(
    name="layernorm",
    reference=REFERENCE,
    arguments=(
        Argument("x", ("M", "N")),
        Argument("weight", ("N",), Role.WEIGHT, follows_recipe=False),
        Argument("bias", ("N",), Role.WEIGHT, follows_recipe=False),
    ),
    cpu=({"M": 1024, "N": 2048},),
    cuda=({"M": 8192, "N": 4096},),
    ragged=({"M": 67, "N": 129}, {"M": 33, "N": 1000}, {"M": 5, "N": 8209}),
    edge=({"M": 0, "N": 16}, {"M": 1, "N": 1}, {"M": 3, "N": 1}, {"M": 1, "N": 7}, {"M": 257, "N": 3}),
    flops=lambda at: 8 * at["M"] * at["N"],
    recipes=(
        Recipe.POSITIVE,
        Recipe.LARGE,
        Recipe.SMALL,
        Recipe.FADING,
        Recipe.OFFSET,
        Recipe.CONSTANT_ROWS,
        Recipe.OUTLIERS,
        Recipe.SORTED,
        Recipe.LAST_COLUMN,
    ),
    special=("nan", "inf"),
)
