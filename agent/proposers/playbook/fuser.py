"""The fuser's door: a target in, the source of one fused kernel out."""

from collections.abc import Iterator

from agent.proposers.playbook.cpp_file import cpp_file
from agent.proposers.playbook.ideas import Idea
from agent.proposers.playbook.nests import plan
from agent.proposers.playbook.sizes import Unsupported
from agent.proposers.playbook.tracing import trace
from agent.proposers.playbook.triton_file import triton_file
from agent.records import Brief
from harness.records import Target

__all__ = ["Unsupported", "fuse_cpp", "fuse_triton", "fusions"]


def fuse_cpp(target: Target) -> str:
    """A C++/OpenMP kernel file for a light region. Raises Unsupported with the reason."""
    return cpp_file(plan(target, trace(target)))


def fuse_triton(target: Target) -> str:
    """A Triton kernel file for a light region. Raises Unsupported with the reason."""
    return triton_file(plan(target, trace(target)))


def fusions(brief: Brief) -> Iterator[Idea]:
    """The fused kernels for the brief's device."""
    backend, fuse = ("cpp", fuse_cpp) if brief.device == "cpu" else ("triton", fuse_triton)
    yield Idea(
        tactic=f"fuse {backend}",
        backend=backend,
        source=fuse(brief.target),
        description=f"one fused {'C++' if backend == 'cpp' else 'Triton'} pass: {_chain(brief.target)}",
        hypothesis="each input is read once and each output written once, rows stay in cache or registers",
    )


def _chain(target: Target) -> str:
    ops = [node.op for node in target.graph]
    return ", ".join(ops if len(ops) <= 8 else [*ops[:7], f"{len(ops) - 7} more"])
