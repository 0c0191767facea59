"""Library variants: written-out attention as one fused call of PyTorch, the rest of the region as it was."""

from collections.abc import Iterator

from agent.proposers.playbook.attention import Attention, find_attention, live_statements
from agent.proposers.playbook.cpp_file import signature
from agent.proposers.playbook.ideas import Idea
from agent.records import Brief
from harness.records import Target

TEMPLATE = '''"""{title}: one call of PyTorch's fused attention instead of product, softmax and product."""

import torch
import torch.nn.functional as F

DTYPES = {dtypes}


def kernel_fn({signature}):
{body}
'''


def ideas(brief: Brief) -> Iterator[Idea]:
    """Whole files that call the library's own fused operator."""
    found = find_attention(brief.target)
    if found is not None and len(found.masks) <= 1:
        yield Idea(
            tactic="library sdpa",
            backend="library",
            source=_sdpa_file(brief.target, found),
            description="written-out attention as one scaled_dot_product_attention call",
            hypothesis="the fused call never writes the scores to memory",
        )


def _sdpa_file(target: Target, found: Attention) -> str:
    mask = f", attn_mask={found.masks[0]}" if found.masks else ""
    call = f"F.scaled_dot_product_attention({found.queries}, {found.keys}, {found.values}{mask}, scale={found.scale})"
    dtypes = sorted({spec.dtype for spec in target.inputs[:3]})
    return TEMPLATE.format(
        title=target.title.replace('"', "'"),
        dtypes=repr(dtypes).replace("'", '"'),
        signature=signature(target),
        body="\n".join(f"    {line}" for line in live_statements(target, found, call)),
    )
