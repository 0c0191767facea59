"""Library variants: written-out attention, or a linear layer with its GELU, as one fused call of PyTorch."""

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


EPILOGUE = '''"""{title}: one product of the library whose epilogue adds the bias and applies the tanh GELU."""

import torch


def kernel_fn({signature}):
    rows = {x}.reshape(-1, {x}.shape[-1])
    y = torch._addmm_activation({bias}, rows, {weight}.t(), use_gelu=True)
    return y.view(*{x}.shape[:-1], y.shape[-1])
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

    epilogue = _linear_gelu_file(brief) if brief.target.kind == "linear_gelu" else None
    if epilogue is not None:
        yield Idea(
            tactic="library addmm with gelu",
            backend="library",
            source=epilogue,
            description="linear and tanh GELU as one product of the library with an epilogue",
            hypothesis="the product applies bias and GELU before its only store",
        )


def _linear_gelu_file(brief: Brief) -> str | None:
    """The library's product with a GELU epilogue: on a GPU, for the tanh form, with a bias."""
    target = brief.target
    linears = [node for node in target.graph if node.op == "linear"]
    tanh = any(node.op == "tanh" or "tanh" in str(node.kwargs) for node in target.graph)
    names = {spec.name for spec in target.inputs}
    if brief.device != "cuda" or len(linears) != 1 or not tanh or len(target.outputs) != 1:
        return None
    if len(linears[0].args) != 3 or not set(linears[0].args) <= names or len(names) != 3:
        return None
    x, weight, bias = linears[0].args
    return EPILOGUE.format(
        title=target.title.replace('"', "'"), signature=signature(target), x=x, weight=weight, bias=bias
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
