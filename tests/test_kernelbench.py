"""KernelBench problem files as targets: candidates of both forms, and problems that nobody can be judged by."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.errors import InputError, MachineError
from harness.judge import Judge, silent
from harness.kernelbench import read_problem
from harness.records import JudgeRequest, LibraryPolicy, Status
from harness.truth import compile_reference

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
GATE = (
    HEAD
    + """
class Model(nn.Module):
    def __init__(self, width, scale):
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = scale
        self.table = torch.randn(width)
        self.register_buffer("keep", torch.ones(width, width).tril() > 0)

    def forward(self, x, gate):
        y = self.norm(self.fc(x)) * self.scale + self.table
        return torch.sigmoid(gate) * (y @ torch.where(self.keep, 1.0, 0.0)), y.sum(dim=1)


batch_size = 12
width = 24


def get_inputs():
    return [torch.rand(batch_size, width), torch.rand(batch_size, width)]


def get_init_inputs():
    return [width, 0.5]
"""
)
GATE_KERNEL = """import torch
import torch.nn.functional as F


def kernel_fn(x, gate, fc_weight, fc_bias, norm_weight, norm_bias, keep, table, norm_running_mean, norm_running_var):
    y = F.linear(x, fc_weight, fc_bias)
    y = F.batch_norm(y, norm_running_mean, norm_running_var, norm_weight, norm_bias) * 0.5 + table
    return torch.sigmoid(gate) * (y @ keep.float()), y.sum(dim=1)
"""


def plain(body: str, inputs: str = "torch.rand(16, 24)", members: str = "pass", init: str = "") -> str:
    """A problem with one forward."""
    return (
        HEAD + f"class Model(nn.Module):\n    def __init__(self{init and ', width'}):\n        super().__init__()\n"
        f"        {members}\n\n    def forward(self, x, *others):\n        {body}\n\n\n"
        f"def get_inputs():\n    return [{inputs}]\n\n\ndef get_init_inputs():\n    return [{init}]\n"
    )


@pytest.fixture(scope="module")
def judge():
    judge = Judge()
    yield judge
    judge.close()


@pytest.fixture
def problem(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "problem.py"
        path.write_text(text)
        return path

    return write


def decided(judge, path, source=None, **options):
    options.setdefault("bench", False)
    return judge.judge(JudgeRequest(str(path), source or path.read_text(), **options), silent)


ACCEPTED = {
    "several inputs, outputs, buffers and plain tensors": GATE,
    "a view of its input": plain("return x.t() @ x"),
    "values that all are positive": plain("return torch.relu(x)"),
    "logarithms of positive inputs": plain(
        "return F.kl_div(x.log(), others[0], reduction='batchmean')", "torch.rand(8, 9) + 0.1, torch.rand(8, 9)"
    ),
    "a loss with class numbers": plain(
        "return F.cross_entropy(x, others[0])", "torch.rand(8, 9), torch.randint(0, 9, (8,))"
    ),
    "a number among the inputs": plain("return x * others[0]", "torch.rand(8, 9), 2.5"),
    "an answer in whole numbers": plain("return x.argmax(dim=1)", "torch.rand(64, 33)"),
    "a pool that never reads the last column": plain("return F.avg_pool1d(x[None], 5)[0]", "torch.rand(8, 33)"),
    "products that sink to zero": plain("return torch.cumprod(x, dim=1)", "torch.rand(4, 900)"),
    "a sum that leaves the last column out": plain("return x[:, :-1].cumsum(dim=1)"),
    "a recurrent layer": plain(
        "return self.rnn(x)", "torch.rand(3, 5, 8)", "self.rnn = nn.LSTM(8, 8, batch_first=True)"
    ),
    "dropout": plain("return self.drop(torch.tanh(x))", members="self.drop = nn.Dropout(0.5)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_problem_is_accepted_as_its_own_candidate(judge, problem, name):
    verdict = decided(judge, problem(ACCEPTED[name]))
    assert verdict.accepted, verdict.detail
    assert verdict.target == "problem"


FC = "self.fc = nn.Linear(24, 8)"
ZERO_LAYER = "self.last = nn.Linear(24, 8); nn.init.zeros_(self.last.weight)"
MAX_MINUS_MEAN = "y = self.fc(x).max(1, keepdim=True)[0]; return F.gelu(y - y.mean(1, keepdim=True))"
REFUSED = {
    "constant by algebra": plain(MAX_MINUS_MEAN, members=FC),
    "constant by algebra (0 everywhere)": plain(
        "return torch.clamp(torch.min(self.fc(x), torch.tensor(0.0)), 0, 1)", members=FC
    ),
    "does not depend on its inputs (x)": plain(
        "return F.group_norm(x, 4, self.w).mean((1, 2))", "torch.rand(6, 8, 9)", "self.w = nn.Parameter(torch.ones(8))",
    ),
    "does not depend on its inputs": plain("return self.last(torch.tanh(x))", members=ZERO_LAYER),
    "noise floor": plain("return torch.softmax(x, dim=1)", "torch.rand(8, 20000)"),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_degenerate_problem_is_refused_with_its_reason(judge, problem, reason):
    verdict = decided(judge, problem(REFUSED[reason]))
    assert not verdict.accepted
    assert verdict.guard == "unjudgeable"
    assert reason in verdict.detail, verdict.detail


def test_a_kernel_file_gets_inputs_and_then_weights_by_their_dotted_names(judge, problem):
    path = problem(GATE)
    assert read_problem(path, "cpu").text.parameters[:4] == ("x", "gate", "fc_weight", "fc_bias")
    verdict = decided(judge, path, GATE_KERNEL)
    assert verdict.accepted, verdict.detail


def test_a_rewritten_module_gets_the_weights_by_name_or_in_order(judge, problem):
    path = problem(GATE)
    renamed = GATE.replace("class Model", "class ModelNew").replace("self.fc", "self.projection")
    assert decided(judge, path, renamed).accepted


WRONG = {
    "a bias left out that starts at zero": (
        "self.norm(self.fc(x)) * self.scale", "(self.norm(self.fc(x)) - self.norm.bias) * self.scale"
    ),
    "statistics taken for granted that start at one": (
        "self.norm(self.fc(x))", "(self.fc(x) * self.norm.weight + self.norm.bias)"
    ),
    "weights kept from its first call": (
        "self.fc(x)", "F.linear(x, globals().setdefault('first', self.fc.weight.clone()), self.fc.bias)"
    ),
    "a sign that its own inputs never have": ("torch.sigmoid(gate)", "torch.sigmoid(gate.abs())"),
    "only one output": (
        "torch.where(self.keep, 1.0, 0.0)), y.sum(dim=1)", "torch.where(self.keep, 1.0, 0.0))"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_module_that_is_right_only_by_chance_is_refused(judge, problem, name):
    path, (old, new) = problem(GATE), WRONG[name]
    changed = GATE.replace("class Model", "class ModelNew").replace(old, new)
    assert changed.count(new) == 1
    verdict = decided(judge, path, changed)
    assert verdict.status is Status.INCORRECT, (verdict.status, verdict.detail)


def test_a_module_with_a_parameter_of_its_own_is_told_which_there_are(judge, problem):
    path = problem(GATE)
    strange = GATE.replace("class Model", "class ModelNew").replace(
        "nn.Linear(width, width)", "nn.Linear(width, 2 * width)"
    )
    verdict = decided(judge, path, strange)
    assert verdict.status is Status.CRASH
    assert "fc.weight [24, 24]" in verdict.detail


def test_in_forbid_mode_layers_may_hold_weights_but_not_do_the_work(judge, problem):
    path = problem(plain("return self.fc(x)", members="self.fc = nn.Linear(24, 24)"))
    verdict = decided(judge, path, library_calls=LibraryPolicy.FORBID)
    assert verdict.guard == "library_call"
    assert "torch.nn.Linear" in verdict.detail
    written = """import ctypes
import subprocess
import tempfile
from pathlib import Path

import torch
import torch.nn as nn

SOURCE = '''
extern "C" void product(const float* x, const float* w, const float* b, float* y, int rows) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < 24; j++) {
            double total = b[j];
            for (int k = 0; k < 24; k++) total += (double)x[r * 24 + k] * w[j * 24 + k];
            y[r * 24 + j] = (float)total;
        }
}
'''
folder = Path(tempfile.mkdtemp())
(folder / "product.cpp").write_text(SOURCE)
subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", folder / "product.so", folder / "product.cpp"], check=True)
product = ctypes.CDLL(str(folder / "product.so")).product
product.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int]


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(24, 24)

    def forward(self, x):
        y = torch.empty(16, 24)
        product(x.data_ptr(), self.fc.weight.data_ptr(), self.fc.bias.data_ptr(), y.data_ptr(), 16)
        return y
"""
    verdict = decided(judge, path, written, library_calls=LibraryPolicy.FORBID)
    assert verdict.accepted, verdict.detail


def test_its_own_sizes_can_be_made_smaller_and_unknown_ones_are_named(problem):
    path = problem(GATE)
    read = read_problem(path, "cpu", sizes={"batch_size": 3})
    assert read.problem.bench[0].inputs[0].shape == (3, 24)
    with pytest.raises(InputError, match="batch_size, width"):
        read_problem(path, "cpu", sizes={"rows": 3})


def test_half_precision_casts_floating_tensors_alone(problem):
    path = problem(plain("return F.cross_entropy(x, others[0])", "torch.rand(8, 9), torch.randint(0, 9, (8,))"))
    draws = read_problem(path, "cpu", dtype="bf16").problem.bench[0].inputs
    assert [draw.dtype for draw in draws] == ["bfloat16", "int64"]


def test_the_reference_runs_alone_in_a_clean_process_and_is_the_module(problem, tmp_path):
    read = read_problem(problem(GATE), "cpu")
    own = read.problem.own()
    wanted = compile_reference(read.problem.reference)(*(own[name] for name in read.problem.arguments))
    torch.save([own[name] for name in read.problem.arguments], tmp_path / "inputs.pt")
    (tmp_path / "alone.py").write_text(
        read.problem.reference + f"\ninputs = torch.load({str(tmp_path / 'inputs.pt')!r})\n"
        f"torch.save(reference(*inputs), {str(tmp_path / 'out.pt')!r})\n"
    )
    subprocess.run([sys.executable, "-I", str(tmp_path / "alone.py")], check=True, cwd=tmp_path)
    found = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(one, two) for one, two in zip(found, wanted, strict=True))


def test_compiled_and_eager_references_agree(problem):
    read = read_problem(problem(GATE), "cpu")
    own = read.problem.own()
    tensors = [own[name] for name in read.problem.arguments]
    reference = compile_reference(read.problem.reference)
    compiled = torch.compile(reference, backend="eager")
    for one, two in zip(compiled(*tensors), reference(*tensors), strict=True):
        torch.testing.assert_close(one, two)


BAD = {
    "lacks get_init_inputs": "import torch\nclass Model(torch.nn.Module): pass\ndef get_inputs(): return []\n",
    "cannot be imported": "import torch\nraise RuntimeError('no')\n",
    "get_inputs() fails: ValueError": plain("return x", "int('x')"),
    "get_inputs() gives a dict": plain("return x").replace("return [torch.rand(16, 24)]", "return {}"),
    "neither a tensor nor a plain value": plain("return x[0]", "[torch.rand(2)]"),
    "forward fails": plain("return x @ x"),
    "returns a str": plain("return 'x'"),
    "fails: TypeError": plain("return x").replace("return []", "return [1, 2]"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_file_that_is_no_usable_problem_is_refused_by_name(problem, reason):
    path = problem(BAD[reason])
    with pytest.raises(InputError) as caught:
        read_problem(path, "cpu")
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_problem_too_large_for_the_machine_is_said_before_it_is_allocated(problem):
    path = problem("rows = 1 << 20\n" + plain("return x + 1", "torch.rand(rows, 1 << 20)"))
    with pytest.raises(MachineError, match=r"too large for this machine.*--shape"):
        read_problem(path, "cpu")
