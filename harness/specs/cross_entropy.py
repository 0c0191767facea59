"""cross_entropy(logits, targets): the mean over M rows of logits [M, N], targets int64 [M]."""

from harness.problem import Argument, NamedOp, Recipe
from harness.records import Role

REFERENCE = """import torch


def reference(logits, targets):
    return torch.nn.functional.cross_entropy(logits, targets)
"""

SPEC = NamedOp(
    name="cross_entropy",
    reference=REFERENCE,
    arguments=(Argument("logits", ("M", "N")), Argument("targets", ("M",), Role.INDEX, dtype="int64", high="N")),
    cpu=({"M": 512, "N": 8192},),
    cuda=({"M": 4096, "N": 128256},),
    ragged=({"M": 67, "N": 129}, {"M": 7, "N": 1000}, {"M": 5, "N": 8209}),
    edge=({"M": 1, "N": 1}, {"M": 1, "N": 7}, {"M": 257, "N": 3}),
    flops=lambda at: 4 * at["M"] * at["N"],
    recipes=(
        Recipe.POSITIVE,
        Recipe.LARGE,
        Recipe.SMALL,
        Recipe.OFFSET,
        Recipe.CONSTANT_ROWS,
        Recipe.OUTLIERS,
        Recipe.SORTED,
        Recipe.LAST_COLUMN,
    ),
    special=("-inf",),
)
