"""matmul(A, B): A [M, K] times B [K, N]."""

from harness.problem import Argument, NamedOp, Recipe

REFERENCE = """import torch


def reference(A, B):
    return torch.matmul(A, B)
"""

SPEC = NamedOp(
    name="matmul",
    reference=REFERENCE,
    arguments=(Argument("A", ("M", "K")), Argument("B", ("K", "N"))),
    cpu=({"M": 512, "N": 512, "K": 512},),
    cuda=({"M": 4096, "N": 4096, "K": 4096},),
    ragged=(
        {"M": 67, "N": 97, "K": 43},
        {"M": 33, "N": 129, "K": 257},
        {"M": 5, "N": 31, "K": 1031},
        {"M": 128, "N": 64, "K": 96},
    ),
    edge=(
        {"M": 0, "N": 16, "K": 8},
        {"M": 1, "N": 1, "K": 1},
        {"M": 1, "N": 33, "K": 17},
        {"M": 65, "N": 1, "K": 5},
    ),
    flops=lambda at: 2 * at["M"] * at["N"] * at["K"],
    recipes=(
        Recipe.POSITIVE,
        Recipe.LARGE,
        Recipe.SMALL,
        Recipe.FADING,
        Recipe.CANCELLATION,
        Recipe.OUTLIERS,
        Recipe.LAST_COLUMN,
    ),
    special=("nan", "inf"),
    linear=True,
    contraction="K",
)
