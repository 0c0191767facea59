"""The prompt about one target: what must be computed, what must be beaten, what was tried. Pure."""

from agent.records import Attempt, Brief, Move
from agent.search.archive import structure_of
from harness.records import TensorSpec

SHOWN_ATTEMPTS = 12
CONTRACT = """\
Write one self-contained Python file that defines `kernel_fn`. It takes the inputs in the order below, positionally, and
the constants by keyword, and returns what the reference returns. It must be correct for every size of the named
dimensions, not only for those shown. Allowed are Triton, CUDA C++ (built by calling nvcc) and C++ (built by calling g++
and loaded with ctypes), with the source as a string in the file, and library calls. It is judged on fresh secret inputs
against float64 truth, then timed against the incumbent; it may not modify its inputs, keep results between calls or
start work that it does not wait for. Answer with the whole file in one fenced code block.
"""


def prompt_for(brief: Brief) -> str:
    """All of a brief as text."""
    target = brief.target
    parts = [
        brief.program.strip(),
        "# The task",
        CONTRACT,
        f"Target: {target.title} ({target.kind}), {target.share:.1%} of the model's time.",
        f"Device: {brief.device_name}. {_peaks(brief)}",
        f"It takes {target.time_us:.1f} µs per call now; the roofline floor is {target.floor_us:.1f} µs.",
        "Inputs:\n" + "\n".join(_tensor(spec) for spec in target.inputs),
        f"Constants: {dict(target.constants) or 'none'}",
        "Outputs:\n" + "\n".join(_tensor(spec) for spec in target.outputs),
        f"Reference:\n```python\n{target.reference.strip()}\n```",
        _incumbent(brief),
        _plan(brief),
        _attempts(brief.attempts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _tensor(spec: TensorSpec) -> str:
    dims = ", ".join(str(dim) for dim in spec.dims)
    return (
        f"- {spec.name}: {spec.dtype} [{dims}], here {list(spec.shape)} with strides {list(spec.stride)}, {spec.role}"
    )


def _peaks(brief: Brief) -> str:
    figures = ", ".join(f"{name} {value:.3g}" for name, value in sorted(brief.peaks.items()))
    return f"Measured peaks: {figures}." if figures else ""


def _incumbent(brief: Brief) -> str:
    if brief.incumbent_source is None:
        return "To beat: the faster of PyTorch eager and torch.compile of this region."
    return f"To beat, the kept {brief.incumbent_backend} kernel:\n```python\n{brief.incumbent_source.strip()}\n```"


def _plan(brief: Brief) -> str:
    """What the search asks for, with the kernels that it means."""
    base, partner = brief.plan.base, brief.plan.partner
    if brief.plan.move is Move.MERGE and base and partner:
        return f"Make one kernel of the best of these two:\n{_shown(base)}\n{_shown(partner)}"
    if brief.plan.move is Move.EDIT and base and base.source != brief.incumbent_source:
        return f"Work on this kernel, which is built differently from the kept one:\n{_shown(base)}"
    if brief.plan.move is Move.START and brief.attempts:
        return "Edits have stopped helping: write a kernel that is built differently from all that were tried."
    return ""


def _shown(one: Attempt) -> str:
    structure = structure_of(one.source, one.backend).text
    return f"Experiment {one.number} ({structure}):\n```python\n{one.source.strip()}\n```"


def _attempts(attempts: tuple[Attempt, ...]) -> str:
    if not attempts:
        return ""
    return "Tried before:\n" + "\n".join(_attempt(one) for one in attempts[-SHOWN_ATTEMPTS:])


def _attempt(one: Attempt) -> str:
    timing = one.verdict.timing if one.verdict else None
    speed = f" {timing.speedup_vs_best:.2f}x" if timing else ""
    why = f" ({one.verdict.detail})" if one.verdict and not one.verdict.accepted else ""
    return " ".join(f"- {one.status}{speed}: {one.description}{why}".split())
