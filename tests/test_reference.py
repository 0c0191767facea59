"""Generated references: they run alone in a clean process and reproduce what was captured, bit for bit."""

import subprocess
import sys

import pytest
import torch
from captured import CLASSES, capture_of, captured

from harness import wire
from harness.records import Target
from harness.reference import constant_name
from harness.targets import draft_targets, extent, finish, observe, packed, reference_mismatch, statistics_of

RUNNER = """
import sys, torch
source, inputs, expected = torch.load(sys.argv[1])
scope = {}
exec(source, scope)
found = scope["reference"](*inputs)
found = found if isinstance(found, tuple) else (found,)
assert len(found) == len(expected)
for one, two in zip(found, expected):
    one, two = (torch.view_as_real(t) if t.is_complex() else t for t in (one, two))
    assert one.dtype == two.dtype and one.stride() == two.stride() and torch.equal(one, two), (one - two).abs().max()
assert not [name for name in sys.modules if name.split(".")[0] in ("harness", "agent")]
"""


@pytest.fixture(scope="module")
def observed():
    found = {}
    for name in CLASSES:
        drafts = draft_targets(captured(name))
        observe(captured(name), drafts)
        found[name] = drafts
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_reference_reproduces_the_captured_outputs(observed, name):
    assert [draft.mismatch for draft in observed[name] if draft.mismatch] == []
    assert all(draft.samples for draft in observed[name])


@pytest.mark.parametrize(("name", "kind"), [("llama", "add_rmsnorm"), ("gpt2", "attention")])
def test_a_reference_runs_alone_in_a_clean_process(observed, tmp_path, name, kind):
    draft = next(draft for draft in observed[name] if draft.kind == kind)
    scope = {}
    exec(draft.written.source, scope)
    inputs = draft.samples[0]
    outputs = scope["reference"](*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.save((draft.written.source, inputs, outputs), tmp_path / "case.pt")
    run = subprocess.run(
        [sys.executable, "-I", "-c", RUNNER, str(tmp_path / "case.pt")], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("name", CLASSES)
def test_references_hold_at_every_size_their_target_declares(observed, name):
    for draft in observed[name]:
        target = finish(draft, {})
        for binding in target.bindings[1:]:
            inputs = [_drawn(spec, binding) for spec in target.inputs]
            scope = {}
            exec(target.reference, scope)
            outputs = scope["reference"](*inputs)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            shapes = [tuple(binding.get(dim, dim) for dim in spec.dims) for spec in target.outputs]
            assert [tuple(output.shape) for output in outputs] == shapes, target.id


def _drawn(spec, binding):
    shape = [binding.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims]
    dtype = getattr(torch, spec.dtype)
    if dtype is torch.bool:
        return torch.ones(shape, dtype=dtype)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.full(shape, int(spec.values.low), dtype=dtype)
    return torch.randn(shape, dtype=dtype)


def test_a_target_survives_its_trip_through_json(observed):
    for draft in observed["llama"]:
        target = finish(draft, {0: 1})
        assert wire.from_json(Target, wire.to_json(target)) == target


def test_eps_is_a_constant_with_a_name(observed):
    norm = next(draft for draft in observed["llama"] if draft.kind == "rmsnorm")
    assert dict(norm.written.constants) == {"eps": 1e-5}
    assert "*, eps=1e-05" in norm.written.source


def test_a_wrong_reference_is_told_from_a_right_one():
    x = torch.tensor([1.0, float("nan")])
    right, wrong = "def reference(x):\n    return x + 1\n", "def reference(x):\n    return x + 1.0000002\n"
    assert reference_mismatch(right, (x,), [x + 1]) == ""
    assert "differs" in reference_mismatch(wrong, (x,), [x + 1])
    assert "fails" in reference_mismatch("def reference(x):\n    return y\n", (x,), [x + 1])


def test_samples_keep_their_strides_and_only_the_memory_they_show():
    wide = torch.arange(24.0).view(4, 6)
    for tensor in (wide[:, 1:3], wide.t(), wide[:, :1].expand(4, 5), torch.tensor(3.0)):
        copy = packed(tensor)
        assert copy.stride() == tensor.stride()
        assert torch.equal(copy, tensor)
        assert copy.untyped_storage().nbytes() == 4 * extent(tensor)


def test_statistics_leave_out_what_is_not_finite():
    found = statistics_of(torch.tensor([1.0, 3.0, float("inf"), float("-inf"), float("nan")]))
    assert (found.mean, found.std, found.low, found.high) == (2.0, 1.0, 1.0, 3.0)


def test_shape_arguments_that_vary_are_written_through_the_inputs():
    class Merged(torch.nn.Module):
        def forward(self, x):
            return (x.relu().transpose(1, 2).reshape(x.shape[0], x.shape[2], -1) + 1.0).exp()

    (draft,) = draft_targets(capture_of(Merged(), torch.randn(2, 16, 4, 8)))
    assert "x.shape[0]" in draft.written.source
    assert constant_name(draft.region.nodes[-1]) is None
