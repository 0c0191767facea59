"""The prompt about one target: what must be computed, what must be beaten, what was tried, what to try now. Pure.

Bounded in tokens: what matters least is shortened first. Never holds a tolerance, a seed or a key.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent.proposers.tactics import MOST_REPAIRS, Tactic, bottleneck
from agent.records import Attempt, Brief, Move, Outcome, RowStatus
from agent.search.archive import structure_of
from harness.records import LibraryPolicy, Target, TensorSpec

TOKENS = 24_000
SHOWN_ATTEMPTS = 12
BEST_ATTEMPTS = 3
SHOWN_LESSONS = 12
SHOWN_SITES = 4
SHORTEST_PART = 400  # characters that remain of a part that is cut
PIECE = re.compile(r"[A-Za-z]{1,5}|\d{1,3}|[^\sA-Za-z\d]|\n+| {2,}")
CONTRACT = """\
Write one self-contained Python file that defines `kernel_fn`. It takes the inputs in the order below, positionally, and
the constants by keyword, and returns what the reference returns. It must be correct for every size of the named
dimensions, not only for those shown, also for empty, odd and non-contiguous inputs. {languages}
It is judged on fresh secret inputs against float64 truth, then timed against the incumbent; it may not modify its
inputs, keep results between calls or start work that it does not wait for. Where inputs are ±inf or nan, the result is
the reference's. Numbers that a sweep can try go into `TUNABLES = {{"BLOCK": [128, 256]}}` at the top of
the file; spend your idea on structure."""
LANGUAGES = {
    "cuda": 'Write Triton, or CUDA C++ as a string in the file, built with nvcc to a shared library (plain extern "C",'
    " no torch headers) and called through ctypes on torch's current stream.",
    "cpu": "Write C++ as a string in the file, built with g++ -O3 -march=native -fopenmp -shared into a temporary"
    " folder and called through ctypes on data_ptr() (no torch headers: they take a minute).",
}
LIBRARY = {
    LibraryPolicy.ALLOW: "Calls of torch's own operators are allowed where they are the fastest part of the answer.",
    LibraryPolicy.FORBID: "The file must do the work itself: calls of torch's operators and of libraries are refused.",
}
REPLY = """\
# Your answer

Two lines, then the file in one fenced code block, and nothing after it:

HYPOTHESIS: why this will be faster, in one sentence
EXPECTED GAIN: a factor, such as 1.3x
```python
...the whole file...
```
"""
EDITS = """\
Instead of the whole file you may give edits of the file shown under "The file to edit", each of this form, in which the
old lines stand exactly as in that file and occur in it once:

<<<<<<< SEARCH
old lines
=======
new lines
>>>>>>> REPLACE
"""
SKELETON = """\
A C++ file is built like this; the entry takes pointers and 64-bit sizes, and the tensors' owner stays alive by name:

```python
import ctypes, os, subprocess, tempfile
import torch

SOURCE = r'''
#include <cstdint>
extern "C" void run(const float* __restrict__ x, float* __restrict__ y, int64_t n) { /* ... */ }
'''
folder = tempfile.mkdtemp()
library = os.path.join(folder, "kernel.so")
subprocess.run(["g++", "-std=c++17", "-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC",
                "-x", "c++", "-", "-o", library], input=SOURCE, text=True, check=True, capture_output=True)
run = ctypes.CDLL(library).run
run.argtypes, run.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None


def kernel_fn(x):
    x = x.contiguous()
    y = torch.empty_like(x)
    run(x.data_ptr(), y.data_ptr(), x.numel())
    return y
```"""
BEYOND = re.compile(r" is [\d.e+-]+ times what is allowed")


@dataclass(frozen=True)
class Assignment:
    """What a brief is turned into: the idea to try, the file to start from, what of it failed."""

    tactic: Tactic | None = None
    base: str | None = None
    base_note: str = ""  # what the base is and how fast
    failure: str = ""  # the judge's own words on the base, when it is to be repaired
    repair: int = 0
    knowledge: str = ""  # about the hardware
    tokens: int = TOKENS
    edits: bool = False


@dataclass(frozen=True)
class _Part:
    """A part of the prompt; parts with the highest `rank` are cut first, rank 0 never."""

    text: str
    rank: int = 0
    cut: Callable[[str, int], str] = field(default=lambda text, chars: text[:chars].rstrip() + "\n[...]")


def prompt_for(brief: Brief, task: Assignment | None = None) -> str:
    """All of a brief as text, within the assignment's tokens."""
    task = task or Assignment(base=brief.incumbent_source)
    parts = [
        _Part(brief.program.strip(), 3),
        _Part("# The task\n\n" + _contract(brief)),
        _Part(_target(brief.target, brief.peaks)),
        _Part(_hardware(brief)),
        _Part(task.knowledge.strip(), 4),
        _Part("\n".join(["Inputs:", *map(_tensor, brief.target.inputs), _constants(brief.target)])),
        _Part("\n".join(["Outputs:", *map(_tensor, brief.target.outputs)])),
        _Part(f"# Reference\n\n```python\n{brief.target.reference.strip()}\n```", 1),
        _Part(_standing(brief, task)),
        _Part(_base(task), 2),
        _Part(SKELETON if brief.device == "cpu" and task.base is None else "", 4),
        _Part("" if task.repair else _plan(brief), 2),
        _Part(_attempts(brief.attempts), 5),
        _Part(_lessons(brief), 6),
        _Part(_tactic(brief, task)),
        _Part(REPLY + ("\n" + EDITS if task.base and task.edits else "")),
    ]
    return "\n\n".join(part.text for part in _bounded([part for part in parts if part.text], task.tokens)) + "\n"


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has; languages and tokenisers differ by a third from it, not by a factor of two."""
    return len(PIECE.findall(text))


def _bounded(parts: Sequence[_Part], tokens: int) -> list[_Part]:
    """The parts within the bound, those that matter least cut first."""
    kept = list(parts)
    for rank in sorted({part.rank for part in parts} - {0}, reverse=True):
        over = sum(estimated_tokens(part.text) for part in kept) - tokens
        if over <= 0:
            break
        kept = [_shortened(part, over) if part.rank == rank else part for part in kept]
    return kept


def _shortened(part: _Part, over: int) -> _Part:
    tokens = max(estimated_tokens(part.text), 1)
    chars = int(len(part.text) * max(0.0, 1.0 - 1.1 * over / tokens))
    return part if chars >= len(part.text) else replace(part, text=part.cut(part.text, max(chars, SHORTEST_PART)))


def _contract(brief: Brief) -> str:
    return CONTRACT.format(languages=f"{LANGUAGES[brief.device]} {LIBRARY[brief.library_calls]}")


def _target(target: Target, peaks: Mapping[str, float]) -> str:
    limit = {"launch": "launching, not by work", "memory": "memory traffic", "compute": "arithmetic"}
    moved = f"{target.bytes / 1e6:.3g} MB must be moved and {target.flops / 1e9:.3g} GFLOP done per call"
    sites = ", ".join(dict.fromkeys(one.module or one.source for one in target.call_sites[:SHOWN_SITES]))
    more = f" and {len(target.call_sites) - SHOWN_SITES} more" if len(target.call_sites) > SHOWN_SITES else ""
    return (
        f"# The target\n\n{target.title} ({target.kind}), {target.share:.1%} of the model's time, called at"
        f" {len(target.call_sites)} places ({sites or 'unnamed'}{more}).\nIt takes {target.time_us:.1f} µs per call in"
        f" the model as it was; {moved}; the roofline floor is {target.floor_us:.1f} µs. It is bound by"
        f" {limit[bottleneck(target, peaks)]}."
        + (f"\nEffective precision of the original: {target.precision}." if target.precision else "")
    )


def _hardware(brief: Brief) -> str:
    figures = "; ".join(_peak(name, value) for name, value in sorted(brief.peaks.items()))
    return f"# The hardware\n\nDevice: {brief.device_name}." + (f" Measured here: {figures}." if figures else "")


def _peak(name: str, value: float) -> str:
    if name == "copy_bytes_per_s":
        return f"memory copy {value / 1e9:.4g} GB/s"
    if match := re.fullmatch(r"matmul_(\w+)_flops", name):
        return f"{match[1]} matrix product {value / 1e12:.3g} TFLOP/s"
    return f"{name.replace('_', ' ')} {value:.3g}"


def _tensor(spec: TensorSpec) -> str:
    dims = ", ".join(str(dim) for dim in spec.dims)
    values = spec.values
    seen = (
        f"; values mean {values.mean:.3g}, std {values.std:.3g}, {values.low:.3g} to {values.high:.3g}"
        if values
        else ""
    )
    shape = f"here {list(spec.shape)} with strides {list(spec.stride)}"
    return f"- {spec.name}: {spec.dtype} [{dims}], {shape}, {spec.role}{seen}"


def _constants(target: Target) -> str:
    return "Constants: " + (", ".join(f"{name} = {value!r}" for name, value in target.constants.items()) or "none")


def _standing(brief: Brief, task: Assignment) -> str:
    """What must be beaten, where it stands on the roofline, what the compiler said of it."""
    if brief.incumbent_source is None:
        lines = ["# To beat", "", "The faster of PyTorch eager and torch.compile of this region."]
        times = [one.verdict.timing.incumbent_us for one in brief.attempts if one.verdict and one.verdict.timing]
        lines += [f"It was measured at {times[-1]:.1f} µs here.{_position(brief.target, times[-1])}"] if times else []
    else:
        now = _kept_us(brief)
        timed = f" at {now:.1f} µs.{_position(brief.target, now)}" if now else "."
        lines = ["# To beat", "", f"The kept {brief.incumbent_backend} kernel{timed}"]
        lines += [f"Compiler: {line}" for line in brief.compiled]
        if task.base != brief.incumbent_source:
            lines.append("(It is not the file shown below.)")
    return "\n".join(lines)


def _position(target: Target, time_us: float) -> str:
    if time_us <= 0 or target.floor_us <= 0:
        return ""
    share = min(target.floor_us / time_us, 1.0)
    return f" That is {share:.0%} of the bound; at the bound it would take {target.floor_us:.1f} µs."


def _kept_us(brief: Brief) -> float | None:
    kept = [
        one.verdict.timing.candidate_us
        for one in brief.attempts
        if _is_kept(one) and one.verdict and one.verdict.timing
    ]
    return kept[-1] if kept else None


def _is_kept(one: Attempt) -> bool:
    return one.status is RowStatus.KEEP


def _base(task: Assignment) -> str:
    if task.base is None:
        return ""
    heading = f"# The file to {'repair' if task.repair else 'edit'}"
    note = f" ({task.base_note})" if task.base_note else ""
    return f"{heading}{note}\n\n```python\n{task.base.strip()}\n```"


def _plan(brief: Brief) -> str:
    """What the search asks for besides an edit of the file shown."""
    partner = brief.plan.partner
    if brief.plan.move is Move.MERGE and partner:
        structure = structure_of(partner.source, partner.backend).text
        head = f"# A second kernel (experiment {partner.number}; {structure}): make one of the best of both"
        return f"{head}\n\n```python\n{partner.source.strip()}\n```"
    if brief.plan.move is Move.START and any(one.verdict for one in brief.attempts):
        return "Edits have stopped helping: write a kernel that is built differently from all that were tried."
    return ""


def _attempts(attempts: Sequence[Attempt]) -> str:
    """The best three, then the last others, one line each."""
    if not attempts:
        return ""
    timed = [one for one in attempts if one.verdict and one.verdict.timing]
    best = sorted(timed, key=lambda one: one.verdict.timing.candidate_us if one.verdict and one.verdict.timing else 0.0)
    best = best[:BEST_ATTEMPTS]
    others = [one for one in attempts if one not in best and one.status is not RowStatus.INTERRUPTED]
    lines = ["# Tried before"]
    lines += ["\nThe best so far:", *map(_attempt, best)] if best else []
    lines += ["\nThe last others:", *map(_attempt, others[-(SHOWN_ATTEMPTS - len(best)) :])] if others else []
    return "\n".join(lines)


def _attempt(one: Attempt) -> str:
    timing = one.verdict.timing if one.verdict else None
    speed = f" {timing.speedup_vs_best:.2f}x ({timing.candidate_us:.1f} µs)" if timing else ""
    stage = f"{one.verdict.stage}: " if one.verdict and one.verdict.stage else ""
    why = f" ({stage}{told(one.verdict.detail)})" if one.verdict and not one.verdict.accepted else ""
    idea = f" [{one.tactic}]" if one.tactic else ""
    return " ".join(f"- {one.status}{speed}:{idea} {one.description}{why}".split())


def told(detail: str) -> str:
    """The judge's words without what lets one work out how much error is allowed."""
    return BEYOND.sub(" is more than is allowed", detail)


def lesson(one: Outcome) -> str:
    """What one experiment has taught, in one line."""
    gain = f" {one.speedup:.2f}x" if one.speedup else ""
    idea, detail = one.hypothesis, told(one.detail)
    why = f"; {detail}" if idea and detail else detail
    return " ".join(f"- {one.target} [{one.tactic or 'no tactic'}]: {one.status}{gain}: {idea}{why}".split())[:300]


def learned(history: Sequence[Outcome]) -> str:
    """A session's learned notes: what later prompts on other targets receive, as a page."""
    told_of = [one for one in history if one.tactic and one.status is not RowStatus.INTERRUPTED]
    head = "# Learned in this session\n\nWritten anew after every experiment; to steer the session, edit program.md.\n"
    return "\n".join([head, *map(lesson, told_of)]) + "\n"


def _lessons(brief: Brief) -> str:
    """What was learnt on the session's other targets: wins first, then the last failures."""
    others = [one for one in brief.history if one.target != brief.target.id and one.tactic]
    wins = [one for one in others if one.status is RowStatus.KEEP]
    losses = [one for one in others if one.status not in {RowStatus.KEEP, RowStatus.INTERRUPTED, RowStatus.ENVIRONMENT}]
    shown = [*wins[-SHOWN_LESSONS // 2 :], *losses[-SHOWN_LESSONS // 2 :]]
    return "\n".join(["# Learnt on this model's other targets", "", *map(lesson, shown)]) if shown else ""


def _tactic(brief: Brief, task: Assignment) -> str:
    if task.repair:
        return (
            f"# What to do now\n\nThe file above failed. The judge says: {told(task.failure)}\nCorrect it and keep its"
            f" idea (repair {task.repair} of {MOST_REPAIRS}). Its inputs are secret: mend the cause, not the case."
        )
    if task.tactic is None:
        return ""
    how = "\n".join(
        f"- {language}: {' '.join(text.split())}" for language, text in task.tactic.how(brief.device).items()
    )
    idea = f"{task.tactic.title}: {' '.join(task.tactic.hypothesis.split())}"
    return f"# What to try now\n\n{idea}\n{how}".rstrip()
