"""Run as a script: `compile` cross-compiles generated Triton files without a GPU, `interpret` runs them on the CPU.

Standard input: [{"name", "target" (JSON text), "source", "sizes"}, ...]; prints {name: "" or what went wrong} as JSON.
The interpreter has no libdevice: its functions are replaced by Triton's own, which is close enough for indexing errors.
"""

import json
import os
import sys
import traceback

if sys.argv[1] == "interpret":
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton decorates anything

import torch
import triton
from playbook_runner import draw, load, tuples
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from harness import wire
from harness.records import Target

POINTERS = {"float32": "*fp32", "bfloat16": "*bf16", "bool": "*i1", "complex64": "*fp32"}
GPUS = (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))


def compile_all(target, module):
    outputs = [item.dtype for item in target.outputs]
    names = ["out"] if len(outputs) == 1 else [f"out{number}" for number in range(len(outputs))]
    kinds = {f"{item.name}_ptr": POINTERS[item.dtype] for item in target.inputs}
    kinds |= {f"{name}_ptr": POINTERS[dtype] for name, dtype in zip(names, outputs, strict=True)}
    kernels = [value for name, value in vars(module).items() if isinstance(value, triton.runtime.JITFunction)]
    assert kernels
    for kernel in kernels:
        shape = {name: value for name, value in (("ROWS", 2), ("BLOCK", 256)) if name in kernel.arg_names}
        signature = {name: kinds.get(name, "fp32" if name in target.constants else "i32") for name in kernel.arg_names}
        signature |= dict.fromkeys(shape, "constexpr")
        for gpu in GPUS:
            triton.compile(ASTSource(kernel, signature, constexprs=shape), target=gpu, options={"num_warps": 4})


def interpret(target, module, sizes):
    scope = {}
    exec(target.reference, scope)
    inputs = [draw(item, sizes, torch.Generator().manual_seed(3)) for item in target.inputs]
    found = tuples(module.kernel_fn(*inputs, **target.constants))
    wanted = tuples(scope["reference"](*inputs, **target.constants))
    for one, two in zip(found, wanted, strict=True):
        assert one.shape == two.shape, f"shape {tuple(one.shape)}, not {tuple(two.shape)}"
        assert one.stride() == two.stride() or one.numel() < 2, f"strides {one.stride()}, not {two.stride()}"
        slack = 1e-5 if one.dtype is torch.float32 else 2e-2
        torch.testing.assert_close(one, two, rtol=slack, atol=slack * float(two.abs().max()))


def without_libdevice(source):
    for name in ("exp", "erf", "log"):
        source = source.replace(f"libdevice.{name}", f"tl.{name}")
    return source.replace("tl.sqrt_rn", "tl.sqrt")


def run(job):
    target = wire.from_json(Target, job["target"])
    if sys.argv[1] == "compile":
        compile_all(target, load(job["source"], f"triton_{job['name']}"))
        return
    module = load(without_libdevice(job["source"]), f"triton_{job['name']}")
    for sizes in job["sizes"]:
        interpret(target, module, sizes)


def main():
    answers = {}
    for job in json.load(sys.stdin):
        try:
            run(job)
            answers[job["name"]] = ""
        except Exception:  # noqa: BLE001 - whatever goes wrong is the answer
            answers[job["name"]] = traceback.format_exc()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
