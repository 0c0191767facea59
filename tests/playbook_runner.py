"""Run as a script: builds generated kernels, calls them, compares them with the float64 truth, prints JSON.

Standard input: [{"name", "target" (JSON text), "source", "sizes": [{symbol: size}, ...]}, ...]. For each: the worst
error against the float64 truth over that of the original (plus a few units of float32), or what went wrong.
"""

import contextlib
import importlib.util
import json
import pathlib
import sys
import tempfile
import traceback

import torch

from harness import wire
from harness.records import Target


def load(source, name):
    path = pathlib.Path(tempfile.mkdtemp()) / f"{name}.py"
    path.write_text(source)
    found = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def draw(item, sizes, generator):
    shape = [sizes.get(dim, dim) for dim in item.dims]
    order = sorted(range(len(shape)), key=lambda place: (-item.stride[place], place))
    back = sorted(range(len(order)), key=order.__getitem__)
    dtype = getattr(torch, item.dtype)
    if dtype is torch.bool:
        value = torch.rand(shape, generator=generator) > 0.6
        value[..., :1] = False  # no row is masked as a whole
    elif dtype.is_complex:
        value = torch.randn(shape, dtype=dtype, generator=generator)
    else:
        value = torch.randn(shape, generator=generator).to(dtype)
    if item.name == "mask" and dtype.is_floating_point:
        value = torch.full(shape, float("-inf")).triu(1)
    return value.permute(order).contiguous().permute(back)


def truth(target, inputs):
    scope, text = {}, target.reference
    for name in ("float32", "bfloat16", "float16"):
        text = text.replace(f"torch.{name}", "torch.float64")
    exec(text.replace(".float()", ".double()"), scope)
    return scope["reference"](*[widened(value) for value in inputs], **target.constants)


def widened(value):
    return value.to(torch.complex128) if value.is_complex() else value.double() if value.is_floating_point() else value


def spaced(value):
    """The same values with gaps between the elements."""
    if value.dim() == 0:
        return value
    wide = torch.zeros((*value.shape[:-1], value.shape[-1] * 2), dtype=value.dtype)
    wide[..., ::2] = value
    return wide[..., ::2]


def tuples(value):
    return value if isinstance(value, tuple) else (value,)


def compare(target, module, sizes, change):
    scope = {}
    exec(target.reference, scope)
    inputs = [change(draw(item, sizes, torch.Generator().manual_seed(7))) for item in target.inputs]
    copies = [value.clone() for value in inputs]
    found = tuples(module.kernel_fn(*inputs, **target.constants))
    again = tuples(module.kernel_fn(*inputs, **target.constants))
    original = tuples(scope["reference"](*copies, **target.constants))
    exact = tuples(truth(target, copies))
    assert all(torch.equal(one, two) for one, two in zip(inputs, copies, strict=True)), "an input was changed"
    worst = 0.0
    for one, two, base, real in zip(found, again, original, exact, strict=True):
        assert one.shape == base.shape, f"shape {tuple(one.shape)}, not {tuple(base.shape)}"
        assert one.dtype == base.dtype, f"dtype {one.dtype}, not {base.dtype}"
        assert torch.equal(one, two), "two calls differ"
        if change is same and one.numel() > 1:
            assert one.stride() == base.stride(), f"strides {one.stride()}, not {base.stride()}"
        worst = max(worst, ratio(one, base, real))
    return worst


def ratio(found, original, exact):
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(found), torch.isfinite(original)), "other elements are finite"
    if not finite.any():
        return 0.0
    mine, theirs = (float((value.double() - exact)[finite].abs().max()) for value in (found, original))
    unit = 2.0**-24 if found.dtype is torch.float32 else 2.0**-9
    return mine / (2 * theirs + 4 * unit * float(exact[finite].abs().max()) + 1e-30)


def same(value):
    return value


def run(job):
    target = wire.from_json(Target, job["target"])
    with contextlib.suppress(KeyError):
        torch.set_num_threads(job["threads"])
    module = load(job["source"], f"kernel_{job['name']}")
    worst = max(compare(target, module, sizes, same) for sizes in job["sizes"])
    return max(worst, compare(target, module, job["sizes"][0], spaced))


def main():
    torch.set_grad_enabled(False)
    answers = {}
    for job in json.load(sys.stdin):
        try:
            answers[job["name"]] = run(job)
        except Exception:  # noqa: BLE001 - whatever goes wrong is the answer
            answers[job["name"]] = traceback.format_exc()
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
