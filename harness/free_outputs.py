"""Large outputs of a last linear layer, kept outside CUDA graphs: fresh memory at every call, so nothing to copy.

A CUDA graph writes its outputs to the same place at every replay, so a caller's outputs must be copied out to stay
valid; for logits that costs as much as a small layer. Inductor leaves an op tagged `cudagraph_unsafe` out of its
graphs, and such an op allocates as usual. Whether this version of torch does so is observed, not assumed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from harness.splice import value_of

LARGE_BYTES = 4 * 2**20  # below this a copy is cheaper than a launch outside the graph
SURE_AFTER = 4  # calls without compilation: warm-up and recording of CUDA graphs are over
TIMES_SEEN = 2

_made: list[set[int]] = []  # storages made outside graphs, for each call that listens, innermost last


@lru_cache(maxsize=1)
def _outside_linear() -> Any:
    library = torch.library.Library("overnight", "FRAGMENT")
    tags = (torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe)
    library.define("outside_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", tags=tags)
    library.impl("outside_linear", _linear, "CompositeExplicitAutograd")
    torch.library.register_fake("overnight::outside_linear", torch.nn.functional.linear, lib=library)
    _libraries.append(library)
    return torch.ops.overnight.outside_linear.default


_libraries: list[torch.library.Library] = []


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result = torch.nn.functional.linear(x, weight, bias)
    if _made and not (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        _made[-1].add(result.untyped_storage().data_ptr())
    return result


def free_outputs(graph: fx.Graph) -> int:
    """Take large linear layers whose result is an output and nothing else out of CUDA graphs; how many were."""
    if torch.is_grad_enabled():
        return 0
    (output,) = (node for node in graph.nodes if node.op == "output")
    found = [node for node in output.all_input_nodes if _is_large_linear(node) and set(node.users) == {output}]
    for node in found:
        given = dict(zip(("input", "weight", "bias"), node.args, strict=False)) | dict(node.kwargs)
        node.target, node.kwargs = _outside_linear(), {}
        node.args = (given["input"], given["weight"], given.get("bias"))
    return len(found)


def _is_large_linear(node: fx.Node) -> bool:
    value = value_of(node)
    if node.target not in {torch.nn.functional.linear, torch._C._nn.linear} or not isinstance(value, torch.Tensor):  # noqa: SLF001 - where Dynamo finds it
        return False
    if not all(isinstance(size, int) for size in value.shape):
        return False
    return value.numel() * value.element_size() >= LARGE_BYTES


@dataclass
class Listener:
    """Learns which outputs of a model are fresh at every call, and whether that can be relied on."""

    calls: int = 0
    graphs: int = -1
    seen: int = 0

    @contextmanager
    def call(self) -> Iterator[set[int]]:
        """Storages (data pointers) made outside CUDA graphs during the call."""
        made: set[int] = set()
        _made.append(made)
        try:
            yield made
        finally:
            _made.pop()

    def reliable(self, made: set[int], graphs: int) -> bool:
        """Whether `made` may be trusted: only if it was also filled in later calls, which replay their graphs."""
        if graphs != self.graphs:
            self.calls, self.graphs, self.seen = 0, graphs, 0
        self.calls += 1
        if self.calls > SURE_AFTER and made:
            self.seen += 1
        return self.seen >= TIMES_SEEN
