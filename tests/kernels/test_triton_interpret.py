"""Triton kernels that the interpreter can run give the right values in Triton's interpreter, float32, on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPS = (
    "softmax",
    "reduce",
    "layernorm",
    "rmsnorm",
    "cross_entropy",
    "rotary_embedding",
    "add_rmsnorm",
    "add_layernorm",
    "gelu",
    "silu_mul",
    "rope_half",
    "rope_complex",
    "groupnorm",
    "flash_attention__masked",
)

# The interpreter must be asked for before a kernel is decorated: in a process of its own. It takes about 2.5 ms a
# program and is wrong for bfloat16, so few rows, and float32.
SCRIPT = """
import json, sys
import torch
import torch.nn.functional as F
sys.path.insert(0, "tests/kernels")
from triton_cases import load

torch.manual_seed(0)
x, r = torch.randn(5, 300) * 3 + 1, torch.randn(5, 300)
w, b = torch.randn(300), torch.randn(300)
# (float64 for gelu: PyTorch's float32 GELU of +inf on the CPU is nan)
inf, nan = float("inf"), float("nan")
special = torch.randn(4, 40)
special[0], special[1, 3], special[2, 5], special[3, :39] = -inf, inf, nan, -inf
wide = torch.randn(2, 40001)
targets = torch.tensor([3, -100, 299, 0, 7])
q = torch.randn(2, 3, 5, 12)
angle = torch.randn(5, 6)
cos, sin = angle.cos(), angle.sin()
both = torch.cat((angle, angle), -1)
even, odd = q[..., 0::2], q[..., 1::2]
turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
half = q * both.cos() + torch.cat((-q[..., 6:], q[..., :6]), -1) * both.sin()
image, c, d = torch.randn(2, 8, 5, 5), torch.randn(8), torch.randn(8)
tanh = {"approximate": "tanh"}
queries, keys, values = torch.randn(2, 70, 4, 16).transpose(1, 2), torch.randn(2, 2, 90, 16), torch.randn(2, 2, 90, 16)
window = torch.ones(70, 90, dtype=torch.bool).tril(15).triu(-30)
masks = {"causal": torch.ones(70, 90, dtype=torch.bool).tril(), "window": window, "anything": torch.rand(70, 90) < 0.3,
         "padding": (torch.arange(90) < torch.tensor([90, 71])[:, None])[:, None, None],
         "added": torch.zeros(70, 90).masked_fill(~window, -inf), "bias": torch.randn(2, 4, 70, 90),
         "a row sees nothing": window & (torch.arange(70) != 69)[:, None]}


def attend(mask, queries=queries):
    bias = torch.zeros(mask.shape).masked_fill(~mask, -inf) if mask.dtype == torch.bool else mask
    scores = queries @ keys.repeat_interleave(2, 1).transpose(-1, -2) / 4 + bias
    attended = torch.softmax(scores, -1) @ values.repeat_interleave(2, 1)
    return attended.transpose(1, 2).contiguous().transpose(1, 2) if queries.stride(1) < queries.stride(2) else attended


def rms(v):
    return v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-6) * w


cases = {
    "softmax": [((x,), {}, torch.softmax(x, -1)), ((special,), {}, torch.softmax(special, -1)),
                ((wide,), {}, torch.softmax(wide, -1)), ((x.T,), {}, torch.softmax(x.T, -1)), ((x[:0],), {}, x[:0])],
    "reduce": [((x,), {}, x.sum(-1)), ((wide,), {}, wide.sum(-1)), ((x[:, :0],), {}, torch.zeros(5))],
    "layernorm": [((x, w, b), {}, F.layer_norm(x, (300,), w, b))],
    "rmsnorm": [((x, w), {}, rms(x))],
    "cross_entropy": [((x, targets), {}, F.cross_entropy(x, targets)),
                      ((special[3:], torch.tensor([39])), {}, F.cross_entropy(special[3:], torch.tensor([39])))],
    "rotary_embedding": [((q, cos, sin), {}, turned)],
    "add_rmsnorm": [((x, r, w), {}, (x + r, rms(x + r)))],
    "add_layernorm": [((x, r, w, b), {}, (x + r, F.layer_norm(x + r, (300,), w, b)))],
    "gelu": [((x,), {}, F.gelu(x)), ((x,), tanh, F.gelu(x, **tanh)), ((special,), {}, F.gelu(special.double()).float()),
             ((special,), tanh, F.gelu(special, **tanh)), ((x.T,), {}, F.gelu(x.T))],
    "silu_mul": [((x, r), {}, F.silu(x) * r), (tuple(x.chunk(2, -1)), {}, F.silu(x[:, :150]) * x[:, 150:])],
    "rope_half": [((q, both.cos(), both.sin()), {}, half)],
    "rope_complex": [((q.transpose(1, 2), torch.complex(cos, sin)), {}, turned.transpose(1, 2).contiguous())],
    "groupnorm": [((image, c, d, 4), {}, F.group_norm(image, 4, c, d)),
                  ((image, c, d, 2), {"silu": True}, F.silu(F.group_norm(image, 2, c, d)))],
    "flash_attention__masked": [
        *(((queries, keys, values, False), {"attn_mask": mask}, attend(mask)) for mask in masks.values()),
        ((queries.contiguous(), keys, values), {}, attend(masks["causal"], queries.contiguous()))],
}
for op, calls in cases.items():
    kernel, found = load(op).kernel_fn, []
    for args, kwargs, wanted in calls:
        out = kernel(*args, **kwargs)
        for got, truth in zip(*(v if isinstance(v, tuple) else (v,) for v in (out, wanted)), strict=True):
            try:
                torch.testing.assert_close(got, truth, rtol=1e-5, atol=2e-5, equal_nan=True)
                assert got.stride() == truth.stride(), f"strides {got.stride()} instead of {truth.stride()}"
            except AssertionError as error:
                found.append(str(error))
    print(json.dumps([op, found]))
"""


@pytest.fixture(scope="module")
def complaints() -> dict[str, list[str]]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("op", OPS)
def test_a_kernel_is_right_in_the_interpreter(op: str, complaints: dict[str, list[str]]):
    assert complaints[op] == []
