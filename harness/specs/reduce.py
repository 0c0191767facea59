"""reduce(x): the sum over the last dim of x [M, N]."""

from harness.problem import Argument, NamedOp, Recipe

REFERENCE = """import torch


def reference(x):
    return torch.sum(x, dim=-1)
"""

SPEC = NamedOp(
    name="reduce",
    reference=REFERENCE,
    arguments=(Argument("x", ("M", "N")),),
    cpu=({"M": 1024, "N": 2048},),
    cuda=({"M": 8192, "N": 4096},),
    ragged=({"M": 67, "N": 37}, {"M": 130, "N": 501}, {"M": 5, "N": 8209}),
    edge=({"M": 0, "N": 16}, {"M": 1, "N": 1}, {"M": 3, "N": 1}, {"M": 1, "N": 7}, {"M": 257, "N": 3}),
    flops=lambda at: at["M"] * at["N"],
    recipes=(
        Recipe.POSITIVE,
        Recipe.LARGE,
        Recipe.SMALL,
        Recipe.FADING,
        Recipe.OFFSET,
        Recipe.CANCELLATION,
        Recipe.OUTLIERS,
        Recipe.SORTED,
        Recipe.LAST_COLUMN,
    ),
    special=("inf", "-inf", "nan"),
    linear=True,
)
