"""softmax(x): over the last dim of x [M, N]."""

from harness.problem import Argument, NamedOp, Recipe

REFERENCE = """import torch


def reference(x):
    return torch.softmax(x, dim=-1)
"""

SPEC = NamedOp(
    name="softmax",
    reference=REFERENCE,
    arguments=(Argument("x", ("M", "N")),),
    cpu=({"M": 1024, "N": 2048},),
    cuda=({"M": 8192, "N": 4096}, {"M": 4096, "N": 50257}),
    ragged=({"M": 67, "N": 129}, {"M": 33, "N": 1000}, {"M": 5, "N": 8209}),
    edge=({"M": 0, "N": 16}, {"M": 1, "N": 1}, {"M": 3, "N": 1}, {"M": 1, "N": 7}, {"M": 257, "N": 3}),
    flops=lambda at: 5 * at["M"] * at["N"],
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
    special=("inf", "-inf", "nan"),
)
