"""Kernels that recompute every region of a model with its own operations: whatever splicing breaks, shows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from harness.kernel_op import Kernel
from harness.records import CallSite, Role, Target, TensorSpec
from harness.regions import Region, find_regions, structural_key

PRELUDE = "import math, operator, torch, torch.nn.functional\nfrom math import nan\nfrom torch import device, inf\n"


def identity_kernels(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Kernel]:
    """One kernel per structure found in the model's graphs, valid at these sizes alone."""
    found: dict[str, list[Region]] = {}

    def backend(module: fx.GraphModule, _inputs: Sequence[Any]) -> Any:
        for region in find_regions(module):
            found.setdefault(structural_key(region), []).append(region)
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=backend, dynamic=False)(*args, **(kwargs or {}))
    torch._dynamo.reset()
    return [_kernel(f"t{index}", key, regions) for index, (key, regions) in enumerate(found.items())]


def _kernel(name: str, key: str, regions: list[Region]) -> Kernel:
    region = regions[0]
    values = region.facts.values
    inputs = tuple(_spec(f"x{index}", values[node]) for index, node in enumerate(region.inputs))
    outputs = tuple(_spec(f"y{index}", values[node]) for index, node in enumerate(region.outputs))
    sites = (CallSite(0, "", ""),) * len(regions)
    reference = _source(region, "reference")
    target = Target(name, region.family, name, key, inputs, {}, outputs, (), (), reference, ({},), sites, 0, 0)
    return Kernel(target, _source(region, "kernel_fn"))


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorSpec(name, Role.ACTIVATION, dtype, tuple(tensor.shape), tuple(tensor.stride()), tuple(tensor.shape))


def _source(region: Region, function: str) -> str:
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"x{index}") for index, node in enumerate(region.inputs)}
    for node in region.nodes:
        if node.target == "type_as":
            copies[node] = graph.call_method("to", (copies[node.args[0]], region.facts.values[node].dtype))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in region.outputs)
    graph.output(results[0] if len(results) == 1 else results)
    names = ", ".join(f"x{index}" for index in range(len(region.inputs)))
    body = graph.python_code("self").src
    return PRELUDE + re.sub(r"def forward\(.*\).*:", f"def {function}({names}):", body, count=1)
