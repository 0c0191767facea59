"""Profiles: every statement of the compiled code is traced to its region, shares are a disjoint cover, floors hold."""

import json

import pytest
import torch
from captured import CLASSES, MODELS, SMALL, captured, drafts, load

from harness import wire
from harness.attribution import owners_of, shares_of
from harness.device import describe, measure_peaks, peaks
from harness.device_trace import busy_us, device_events
from harness.errors import MachineError
from harness.instrument import Instrumented, MeasurementError, Statement
from harness.kinds import kind_of
from harness.marks import Marking, mark, start, stop
from harness.partition import Family
from harness.profiling import lower_quartile, measure_regions, profile
from harness.records import ModelSpec, OpNode, ProfileReport, ProfileRequest, Target
from harness.roofline import floor_us
from harness.symbols import express, symbolise
from harness.targets import observe


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profile")
    spec = ModelSpec(
        f"{MODELS}/llama.py:{CLASSES['llama']}", model_args={**SMALL["llama"], "layers": "2"}, device="cpu"
    )
    events = []
    found = profile(ProfileRequest(spec, str(folder)), lambda name, body: events.append((name, body)))
    assert events
    return found, folder


def test_shares_are_a_disjoint_cover(report):
    found, _ = report
    shares = [target.share for target in found.targets if not target.members]
    assert all(share >= 0 for share in shares)
    assert sum(shares) + found.idle_share + found.uncaptured_share == pytest.approx(1.0, abs=0.02)
    assert sum(shares) > 0.1  # of a model this small most is overhead
    assert found.mode == "compile"
    assert found.total_ms > 0


def test_every_kind_of_region_gets_its_own_time(report):
    found, _ = report
    timed = {target.kind for target in found.targets if target.time_us > 0}
    assert {"linear", "add_rmsnorm", "silu_mul", "rope_complex", "attention"} <= timed
    for target in found.targets:
        assert target.share == pytest.approx(target.time_us * len(target.call_sites) / (1e3 * found.total_ms), rel=1e-6)


def test_targets_are_ranked_by_what_the_model_could_gain(report):
    gains = [target.model_gain() for target in report[0].targets]
    assert gains == sorted(gains, reverse=True)


def test_a_profile_is_written_for_others_to_read(report):
    found, folder = report
    assert wire.from_json(ProfileReport, (folder / "profile.json").read_text()) == found
    for target in found.targets:
        assert wire.from_json(Target, (folder / "targets" / f"{target.id}.json").read_text()) == target
        samples = torch.load(folder / "targets" / f"{target.id}.samples.pt", weights_only=True)
        assert 1 <= len(samples) <= 2
        for sample in samples:
            assert [tuple(tensor.shape) for tensor in sample] == [spec.shape for spec in target.inputs]
            assert [tensor.stride() for tensor in sample] == [spec.stride for spec in target.inputs]
    assert "torch" in json.loads((folder / "profile.json").read_text())["fingerprint"]


def test_ids_are_the_same_in_a_second_profile(report):
    names = {target.id for target in report[0].targets}
    assert all(name.replace("_", "").isalnum() and name == name.lower() for name in names)
    assert {"add_rmsnorm_1", "silu_mul_1", "attention_1"} <= names


def statement(text, *names):
    return Statement(0, 0, text, names)


def test_a_library_call_belongs_to_the_last_of_its_names():
    graph = captured("llama").graphs[0]
    owned = owners_of(graph)
    ((found, part),) = shares_of(statement("extern_kernels.mm(buf1, ...)", "pow_1", "mul_1", "linear"), owned)
    assert part == 1.0
    assert [node.name for node in found.nodes] == ["linear"]


def test_a_fused_loop_is_divided_among_its_regions_and_the_product_before_it_gets_nothing():
    graph = captured("llama").graphs[0]
    owned = owners_of(graph)
    parts = shares_of(statement("cpp_fused_add_mul_silu_3(buf1)", "linear_4", "silu", "mul_6", "x_2", "pow_3"), owned)
    assert sum(part for _, part in parts) == pytest.approx(1.0)
    assert {region.module.split(".")[-1] for region, _ in parts} == {"feed_forward", "attention_norm"}
    assert all(region.family is Family.LIGHT for region, _ in parts)


def test_names_that_no_region_owns_are_nobodys_time():
    assert shares_of(statement("cpp_fused_full_0(buf1)", "mask", "full"), owners_of(captured("llama").graphs[0])) == []


def test_marks_add_up_and_cost_nothing_when_off():
    mark(3)
    start(Marking.CLOCK)
    for number in (0, 1, 0):
        mark(number)
        mark(-1)
    spent = stop()
    assert set(spent) == {0, 1}
    assert all(us >= 0 for us in spent.values())


def test_a_trace_without_device_events_is_an_error_and_never_an_empty_profile():
    with pytest.raises(MachineError, match="no device events"):
        device_events([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 5}])


def test_generated_code_that_cannot_be_read_is_said_and_regions_are_timed_alone():
    with pytest.raises(MeasurementError, match="0 statements"):
        Instrumented(lambda: None).require_statements()
    found = drafts("llama")
    observe(captured("llama"), found)
    measured, bill = measure_regions(load("llama"), found, "nothing to read")
    assert "nothing to read" in bill.notes[0]
    assert 0 < bill.total() <= 1e3 * measured.total_ms * 1.001


def test_the_slower_half_of_the_runs_is_left_out():
    assert lower_quartile([9.0, 1.0, 2.0, 50.0, 3.0]) == 2.0
    assert lower_quartile([4.0]) == 4.0


def test_overlapping_kernels_count_once():
    events = [{"ts": 0, "dur": 10}, {"ts": 5, "dur": 10}, {"ts": 6, "dur": 1}, {"ts": 20, "dur": 5}]
    assert busy_us(events) == 20


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    rates = {"copy_bytes_per_s": 1e9, "matmul_float32_flops": 1e12}
    assert floor_us(0, 1_000_000, "float32", rates, product=False) == pytest.approx(1000.0)
    assert floor_us(10**10, 1_000, "float32", rates, product=True) == pytest.approx(10_000.0)
    assert floor_us(10**10, 1_000, "float32", rates, product=False) == pytest.approx(1.0)


def test_numbers_that_vary_are_written_as_products_of_symbols():
    symbols = {"B": (1, 2, 3), "S": (512, 383, 641)}
    assert express((256 * 512, 256 * 383, 256 * 641), symbols) == "=256*S"
    assert express((512, 766, 1923), symbols) == "=B*S"
    assert express((None, 766, 1923), symbols) == "=B*S"
    assert express((1, 5, 7), symbols) is None


def test_a_number_that_cannot_be_written_leaves_the_region_at_its_size():
    def pattern(size, argument):
        return {"inputs": [["float32", [size, 4], [4, 1]]], "nodes": [["mul", [["i", 0], argument], {}]], "outputs": []}

    symbols = {"B": (2, 3, 4)}
    assert symbolise([pattern(2, 7), pattern(3, 11), pattern(4, 1)], symbols) is None
    merged, found = symbolise([pattern(2, 8), pattern(3, 12), pattern(4, 16)], symbols)
    assert merged["nodes"][0][1][1] == "=4*B"
    assert found.bindings() == ({"B": 2}, {"B": 3}, {"B": 4})


def op(name, *args):
    return OpNode(name, name, args, (), "float32", (2, 2))


@pytest.mark.parametrize(
    ("kind", "ops"),
    [
        ("rmsnorm", ["pow", "mean", "add", "rsqrt", "mul", "mul"]),
        ("add_rmsnorm", ["add", "to", "pow", "mean", "add", "rsqrt", "mul", "to", "mul"]),
        ("layernorm", ["layer_norm"]),
        ("add_layernorm", ["add", "layer_norm"]),
        ("softmax", ["to", "softmax", "to"]),
        ("silu_mul", ["silu", "mul"]),
        ("silu_mul", ["sigmoid", "mul", "mul"]),
        ("gelu", ["mul", "pow", "mul", "add", "mul", "tanh", "add", "mul"]),
        ("groupnorm_silu", ["group_norm", "silu"]),
        ("cross_entropy", ["cross_entropy"]),
        ("pointwise", ["add", "layer_norm", "gelu"]),
        ("reduction", ["relu", "sum"]),
        ("copy", ["transpose", "reshape"]),
    ],
)
def test_kinds_are_recognised_by_structure(kind, ops):
    assert kind_of([op(name) for name in ops], Family.LIGHT) == kind


def test_peaks_are_measured_and_the_better_figure_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first, second = peaks("cpu"), peaks("cpu")
    assert first["copy_bytes_per_s"] > 1e8
    assert second["matmul_float32_flops"] >= first["matmul_float32_flops"]
    assert second["launch_us"] <= first["launch_us"]


def test_a_device_describes_itself():
    described = describe({"device": "cpu", "peaks": False})
    assert described["name"]
    assert described["versions"]["torch"] == torch.__version__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_the_deployed_mode_is_graphed_and_its_kernels_are_traced(tmp_path):
    spec = ModelSpec(
        f"{MODELS}/llama.py:LLaMA", model_args={"dim": "768", "heads": "12"}, device="cuda", dtype="float16"
    )
    found = profile(ProfileRequest(spec, str(tmp_path)), lambda _name, _body: None)
    assert found.mode == "reduce-overhead"
    shares = sum(target.share for target in found.targets if not target.members)
    assert 0.5 < shares <= 1.0
    assert shares + found.idle_share + found.uncaptured_share == pytest.approx(1.0, abs=0.05)
    assert measure_peaks("cuda")["copy_bytes_per_s"] > 1e11
