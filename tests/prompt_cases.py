"""Three targets in the middle of their nights, as the prompts of tests/prompts/ tell them.

`python tests/prompt_cases.py` writes the prompts anew; read the difference before you commit it.
"""

import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from playbook_targets import spec
from tests_support import verdict

from agent.proposers.prompt import Assignment, prompt_for
from agent.proposers.tactics import catalogue
from agent.records import Attempt, Brief, Move, Outcome, Plan, RowStatus
from harness.compiled import CompiledKernel
from harness.records import CallSite, Role, StageName, Status, Target, ValueStatistics

GOLDEN = ROOT / "tests" / "prompts"
DATA = ROOT / "kernels"
PROGRAM = (GOLDEN / "program.txt").read_text(encoding="utf-8")
H200 = {"copy_bytes_per_s": 4.27e12, "matmul_bfloat16_flops": 7.82e14, "matmul_float32_flops": 5.1e13, "launch_us": 2.1}
CPU = {"copy_bytes_per_s": 1.9e10, "matmul_float32_flops": 1.9e11}


def judged(status, speedup=1.0, candidate_us=10.0, incumbent_us=12.0, stage=None, detail=""):
    one = verdict(status, speedup)
    timing = one.timing and replace(one.timing, candidate_us=candidate_us, incumbent_us=incumbent_us)
    return replace(one, timing=timing, stage=stage, detail=detail)


def attempt(number, status, description, tactic, given, source="", backend="triton"):
    return Attempt(number, "", source, backend, tactic, description, status, given, proposer="llm")


def sites(module, count):
    return tuple(CallSite(0, module.format(layer), "model.py:88") for layer in range(count))


def brief(target, device, name, peaks, **changes):
    values = {
        "incumbent_source": None, "incumbent_backend": None, "attempts": (), "program": PROGRAM, "number": 7,
    }  # fmt: skip
    return Brief(target, device, name, peaks, **{**values, **changes})


def knowledge(name):
    return (DATA / "knowledge" / f"{name}.md").read_text(encoding="utf-8")


def tactic(name):
    return next(one for one in catalogue(DATA / "tactics") if one.name == name)


def norm():
    """A fused norm on the H200: a kernel is kept, and its loads are to be made wider."""
    dims, shape, seen = ("B", "S", 2048), (1, 2048, 2048), ValueStatistics(0.01, 0.94, -7.1, 6.8)
    x, r = (replace(spec(name, shape, dims, "bfloat16"), values=seen) for name in ("x", "residual"))
    w = spec("weight", (2048,), dtype="bfloat16", role=Role.WEIGHT)
    out = spec("out", shape, dims, "bfloat16")
    target = Target(
        id="add_rmsnorm_1", kind="add_rmsnorm", title="add + LlamaRMSNorm, 32 sites", key="k", inputs=(x, r, w),
        constants={"eps": 1e-5},
        outputs=(replace(out, name="total"), replace(out, name="normed")), graph=(), results=(),
        reference="""import torch


def reference(x, residual, weight, *, eps):
    total = x + residual
    wide = total.to(torch.float32)
    variance = wide.pow(2).mean(-1, keepdim=True)
    normed = weight * (wide * torch.rsqrt(variance + eps)).to(torch.bfloat16)
    return total, normed
""",
        bindings=({"B": 1, "S": 2048},), call_sites=sites("model.layers.{}.post_attention_layernorm", 32),
        flops=25_165_824, bytes=33_558_528, time_us=11.3, floor_us=7.9, share=0.034,
    )  # fmt: skip
    kept = (GOLDEN / "kept_norm.txt").read_text(encoding="utf-8")
    attempts = (
        attempt(1, RowStatus.KEEP, "one pass, a row in registers", "one_pass",
                judged(Status.KEEP, 1.12, 10.1, 11.3), kept),
        attempt(3, RowStatus.DISCARD, "two rows in a program", "rows_per_program",
                judged(Status.DISCARD, 0.93, 10.9, 10.1)),
        attempt(5, RowStatus.INCORRECT, "variance from the rounded sum", "cheap_exponential",
                judged(Status.INCORRECT, stage=StageName.STABILITY,
                       detail="wrong on values of scale 1e-3: output 1 off by 0.0078 at (0, 17, 3) is 4.1 times what"
                       " is allowed")),
    )  # fmt: skip
    lesson = Outcome(2, "silu_mul_1", "silu_mul", "loads_in_flight", "two loads before the first use", "m",
                     RowStatus.KEEP, 1.06, 0.01)  # fmt: skip
    compiled = CompiledKernel("add_rmsnorm", 40, 0, 32, 8, wide=5).sentence()
    given = brief(
        target, "cuda", "NVIDIA H200", H200, incumbent_source=kept, incumbent_backend="triton", attempts=attempts,
        history=(lesson,), compiled=(compiled,), plan=Plan(Move.EDIT, attempts[0]),
    )  # fmt: skip
    task = Assignment(
        tactic("persistent"), kept, "the kept kernel, to be beaten", knowledge=knowledge("hopper"), edits=True
    )
    return given, task


def convolution():
    """A convolution on the CPU that nobody has written a kernel for."""
    x = spec("x", (4, 64, 56, 56), ("B", 64, 56, 56))
    weight = spec("weight", (64, 64, 3, 3), role=Role.WEIGHT)
    out = spec("out", (4, 64, 56, 56), ("B", 64, 56, 56))
    target = Target(
        id="conv_2", kind="conv", title="convolution, 4 sites", key="k", inputs=(x, weight), constants={},
        outputs=(out,), graph=(), results=(), reference="""import torch


def reference(x, weight):
    return torch.conv2d(x, weight, None, (1, 1), (1, 1), (1, 1), 1)
""",
        bindings=({"B": 4},), call_sites=sites("stages.{}.conv2", 4), flops=924_844_032, bytes=6_569_984,
        time_us=9120.0, floor_us=4868.0, share=0.31,
    )  # fmt: skip
    given = brief(target, "cpu", "AMD EPYC (2 threads)", CPU, number=1)
    return given, Assignment(tactic("translate"), knowledge=knowledge("avx2"))


def attention():
    """Attention with a sliding window on the H200: the first translation failed and is to be repaired."""
    dims = ("B", 16, "S", 64)
    q, k, v = (spec(name, (2, 16, 1024, 64), dims, "float16") for name in ("q", "k", "v"))
    mask = spec("window", (1024, 1024), ("S", "S"), "bool", Role.MASK)
    target = Target(
        id="attention_1", kind="attention", title="matmul + mask + softmax + matmul, 12 sites", key="k",
        inputs=(q, k, v, mask),
        constants={"scale": 0.125},
        outputs=(spec("out", (2, 16, 1024, 64), dims, "float16"),), graph=(), results=(),
        reference="""import torch


def reference(q, k, v, window, *, scale):
    scores = (q @ k.transpose(-2, -1)) * scale
    scores = scores.masked_fill(~window, float("-inf"))
    return torch.softmax(scores.float(), -1).to(torch.float16) @ v
""",
        bindings=({"B": 2, "S": 1024},), call_sites=sites("layers.{}.attention", 12), flops=8_589_934_592,
        bytes=17_825_792, time_us=171.0, floor_us=11.0, share=0.27, precision="fp16 reduced-precision reductions",
    )  # fmt: skip
    failed = (GOLDEN / "failed_attention.txt").read_text(encoding="utf-8")
    detail = (
        "wrong on a row that the mask closes: output off by 0.5 at (0, 3, 17, 2), is 812 times what is allowed, S=129"
    )
    attempts = (
        attempt(1, RowStatus.INCORRECT, "running softmax over key blocks", "translate",
                judged(Status.INCORRECT, stage=StageName.SHAPES, detail=detail), failed),
    )  # fmt: skip
    given = brief(target, "cuda", "NVIDIA H200", H200, attempts=attempts, number=2)
    task = Assignment(base=failed, failure=f"shapes: {detail}", repair=1, knowledge=knowledge("hopper"), edits=True)
    return given, task


CASES = {"norm_on_the_h200": norm, "convolution_on_the_cpu": convolution, "windowed_attention": attention}


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, case in CASES.items():
        (GOLDEN / f"{name}.md").write_text(prompt_for(*case()), encoding="utf-8")


if __name__ == "__main__":
    main()
