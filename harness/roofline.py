"""What a region must cost at least: its FLOPs and compulsory bytes, and the time floor from measured peaks."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from harness.facts import GraphFacts, hint
from harness.regions import Region

PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "mv", "addmv", "dot")


def region_bytes(region: Region) -> int:
    """Compulsory traffic: every input element read once, every output written once.

    An expanded input counts the memory it shows; a table counts the rows that are looked up.
    """
    facts = region.facts
    sizes = [_touched(facts.values[node]) for node in region.inputs]
    if len(region.nodes) == 1 and "embedding" in facts.ops[region.nodes[0]]:
        table = max(range(len(sizes)), key=lambda index: sizes[index])
        sizes[table] = min(sizes[table], _touched(facts.values[region.outputs[0]]))
    return sum(sizes) + sum(_touched(facts.values[node]) for node in region.outputs)


def _touched(tensor: torch.Tensor) -> int:
    shown = prod(
        hint(size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if hint(stride) or hint(size) < 2
    )
    return int(shown) * tensor.element_size()


def region_flops(region: Region) -> int:
    """Two per multiply-add of products, convolutions and attention; one per element of anything else."""
    return sum(_node_flops(node, region.facts) for node in region.nodes)


def _node_flops(node: Any, facts: GraphFacts) -> int:
    output = facts.tensor(node)
    ops = facts.ops.get(node, ())
    if output is None or not any(name not in ("device", "view", "transpose", "expand", "unsqueeze") for name in ops):
        return 0
    elements = hint(output.numel())
    tensors = [facts.tensor(source) for source in node.all_input_nodes]
    operands = [tensor for tensor in tensors if tensor is not None]
    if node not in facts.heavy:
        return elements
    if any("attention" in name for name in ops) and len(operands) >= 3:
        keys = operands[1]
        return 2 * 2 * elements * hint(keys.shape[-2])
    if any("conv" in name for name in ops) and len(operands) >= 2:
        return 2 * elements * _numel(operands[1]) // max(1, hint(operands[1].shape[0]))
    if any("embedding" in name for name in ops):
        return 0
    return 2 * elements * _contracted(operands, output)


def _numel(tensor: torch.Tensor) -> int:
    return hint(tensor.numel())


def _contracted(operands: Sequence[torch.Tensor], output: torch.Tensor) -> int:
    """The size that a product sums over: that of the operand with the most elements of rank two or more."""
    matrices = [tensor for tensor in operands if tensor.dim() >= 2]
    return hint(matrices[0].shape[-1]) if matrices and output.dim() else 1


def floor_us(flops: int, size_bytes: int, dtype: str, peaks: Mapping[str, float], *, product: bool) -> float:
    """The least time in µs: bytes at the measured copy rate or, for products, FLOPs at the measured peak."""
    by_bytes = size_bytes / peaks["copy_bytes_per_s"]
    rate = peaks.get(f"matmul_{dtype}_flops", peaks["matmul_float32_flops"])
    by_flops = flops / rate if product and rate > 0 else 0.0
    return 1e6 * max(by_bytes, by_flops)
