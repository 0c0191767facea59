"""What a user may name as MODEL, and what they are told when it cannot be used."""

import os
import subprocess
import sys

import pytest
import torch
from captured import MODELS, SMALL

from harness.errors import InputError
from harness.loading import load_model
from harness.records import ModelSpec

LLAMA = f"{MODELS}/llama.py:LLaMA"

USER_MODEL = """
import torch
from torch import nn
import helper_beside_it

class Net(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.inner = nn.Linear(width, 4)
    def forward(self, x, mask, *, scale=1.0):
        return self.inner(x) * mask * scale

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100, 8)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("turn", torch.ones(2, dtype=torch.complex64))
    def forward(self, tokens):
        return self.table(tokens)

class Raises(nn.Module):
    def forward(self, x):
        raise RuntimeError("first line\\nsecond line")

def make(width):
    return Net(width)

def not_a_model():
    return 3
"""
INPUTS = """
import torch
def tuple_of(device, dtype):
    return torch.ones(2, 8, device=device, dtype=dtype), torch.ones(2, 4, device=device, dtype=torch.bool)
def dict_of():
    return {"x": torch.ones(3, 8), "mask": torch.ones(3, 4, dtype=torch.bool), "scale": 2.0}
def several():
    return [{"name": "small", "weight": 1.0, "args": (torch.ones(1, 8), torch.ones(1, 4))},
            {"name": "large", "weight": 3.0, "args": (torch.ones(9, 8), torch.ones(9, 4))}]
def broken():
    raise KeyError("nothing here")
"""
KERNELBENCH = """
import torch
class Model(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = torch.nn.Linear(width, width)
    def forward(self, x):
        return torch.relu(self.inner(x))
def get_inputs():
    return [torch.rand(4, 16)]
def get_init_inputs():
    return [16]
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "net.py").write_text(USER_MODEL)
    (tmp_path / "helper_beside_it.py").write_text("VALUE = 1\n")
    (tmp_path / "inputs.py").write_text(INPUTS)
    (tmp_path / "problem.py").write_text(KERNELBENCH)
    return tmp_path


def load(reference, **options):
    return load_model(ModelSpec(str(reference), device="cpu", **options))


def refusal(reference, **options):
    with pytest.raises(InputError) as caught:
        load(reference, **options)
    return str(caught.value)


def test_inputs_may_be_a_tuple_a_dict_or_several_sets(folder):
    net = f"{folder}/net.py:Net"
    assert load(net, inputs=f"{folder}/inputs.py:tuple_of").args[1].dtype is torch.bool
    assert load(net, inputs=f"{folder}/inputs.py:dict_of").kwargs["scale"] == 2.0
    several = load(net, inputs=f"{folder}/inputs.py:several")
    assert several.args[0].shape == (1, 8)
    assert [(each.name, each.weight) for each in several.input_sets] == [("small", 1.0), ("large", 3.0)]


def test_only_floating_tensors_are_cast(folder):
    loaded = load(f"{folder}/net.py:Plain", dtype="bfloat16")
    assert loaded.model.table.weight.dtype is torch.bfloat16
    assert loaded.model.steps.dtype is torch.int64
    assert loaded.model.turn.dtype is torch.complex64
    net = load(f"{folder}/net.py:Net", inputs=f"{folder}/inputs.py:tuple_of", dtype="fp16")
    assert [tensor.dtype for tensor in net.args] == [torch.float16, torch.bool]


def test_ids_are_derived_within_the_vocabulary(folder):
    loaded = load(f"{folder}/net.py:Plain")
    assert loaded.args[0].dtype is torch.int64
    assert loaded.args[0].max() < 100


def test_input_shapes_give_ids_where_they_feed_an_embedding_and_floats_otherwise(folder):
    assert load(f"{folder}/net.py:Plain", input_shapes=((2, 5),)).args[0].dtype is torch.int64
    both = load(f"{folder}/net.py:Net", input_shapes=((2, 8), (2, 4)))
    assert [tensor.dtype for tensor in both.args] == [torch.float32, torch.float32]


def test_a_factory_takes_arguments_as_yaml(folder):
    loaded = load(f"{folder}/net.py:make", model_args={"width": "16"}, input_shapes=((2, 16), (2, 4)))
    assert loaded.model.inner.in_features == 16


def test_a_kernelbench_problem_needs_no_class(folder):
    loaded = load(f"{folder}/problem.py")
    assert loaded.name == "Model"
    assert loaded().shape == (4, 16)


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_weights_are_loaded_and_misfits_are_named(folder, suffix):
    source = load(f"{folder}/net.py:Plain").model
    state = {key: value + 1 if key == "table.weight" else value for key, value in source.state_dict().items()}
    save = torch.save
    if suffix == "safetensors":
        save = pytest.importorskip("safetensors.torch").save_file
    save(state, folder / f"good.{suffix}")
    loaded = load(f"{folder}/net.py:Plain", weights=f"{folder}/good.{suffix}")
    assert torch.equal(loaded.model.table.weight, state["table.weight"])
    renamed = {"tables.weight" if key == "table.weight" else key: value for key, value in state.items()}
    save(renamed, folder / f"bad.{suffix}")
    message = refusal(f"{folder}/net.py:Plain", weights=f"{folder}/bad.{suffix}")
    assert "1 missing (table.weight)" in message
    assert "1 unexpected (tables.weight)" in message


def test_a_pickle_with_code_in_it_is_not_run(folder):
    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(folder / "was_run"),))

    torch.save(Evil(), folder / "evil.pt")
    assert "plain tensors" in refusal(f"{folder}/net.py:Plain", weights=f"{folder}/evil.pt")
    assert not (folder / "was_run").exists()


def test_a_checkpoint_folder_is_loaded_without_the_network(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.name == "LlamaForCausalLM"
    assert loaded.dtype is torch.bfloat16
    assert loaded.kwargs["input_ids"].max() < 64


@pytest.mark.parametrize(
    ("reference", "options", "expected"),
    [
        ("{folder}/absent.py:Net", {}, "does not exist"),
        ("{folder}/net.py:Nett", {}, "it defines Net, Plain, Raises"),
        ("{folder}/net.py", {}, "name one: {folder}/net.py:Net"),
        ("{folder}/net.py:make", {}, "--model-args width="),
        ("{folder}/net.py:Net", {"model_args": {"depth": "2"}}, "takes no argument 'depth'"),
        ("{folder}/net.py:Net", {}, "--inputs"),
        ("{folder}/net.py:Net", {"input_shapes": ((2, 8),)}, "needs x, mask"),
        ("{folder}/net.py:Net", {"input_shapes": ((2, 9), (2, 4))}, "float32 [2, 9], float32 [2, 4]"),
        ("{folder}/net.py:Raises", {"input_shapes": ((1,),)}, "first line"),
        ("{folder}/net.py:not_a_model", {}, "returned a int"),
        ("{folder}/net.py:Net", {"inputs": "{folder}/inputs.py:nobody"}, "has no function nobody"),
        ("{folder}/net.py:Net", {"inputs": "{folder}/inputs.py:broken"}, "nothing here"),
        ("no.such.package:Net", {}, "cannot import no.such.package"),
        ("no_such_thing", {}, "neither a file nor a folder"),
        ("{folder}", {}, "without config.json"),
        ("{folder}/net.py:Plain", {"dtype": "int8"}, "--dtype int8"),
    ],
)
def test_what_cannot_be_used_is_said_with_the_remedy(folder, reference, options, expected):
    def fill(value):
        return value.format(folder=folder) if isinstance(value, str) else value

    message = refusal(fill(reference), **{key: fill(value) for key, value in options.items()})
    assert expected.format(folder=folder) in message
    assert "\n" not in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_asking_for_cuda_without_one_is_the_users_error():
    with pytest.raises(InputError, match="use --device cpu"):
        load_model(ModelSpec(LLAMA, device="cuda", model_args=SMALL["llama"]))


def test_a_users_files_never_shadow_ours_or_the_standard_library(tmp_path):
    for name in ("torch", "profile", "select", "agent", "harness", "models"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')\n")
    (tmp_path / "mine.py").write_text(
        "import torch, profile, select\n"
        "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(4, 4)\n"
    )
    script = (
        "from harness.loading import load_model; from harness.records import ModelSpec\n"
        f"print(load_model(ModelSpec({str(tmp_path / 'mine.py:Net')!r}, device='cpu'))().shape)\n"
    )
    root = str(MODELS.parent)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120, env={**os.environ}
    )
    assert run.returncode == 0, run.stderr
    assert "[8, 4]" in run.stdout


def test_a_change_of_weights_or_inputs_changes_the_fingerprint():
    one = load_model(ModelSpec(LLAMA, device="cpu", model_args=SMALL["llama"]))
    same = load_model(ModelSpec(LLAMA, device="cpu", model_args=SMALL["llama"]))
    other = load_model(ModelSpec(LLAMA, device="cpu", model_args={**SMALL["llama"], "seed": "5"}))
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint["weights"] != other.fingerprint["weights"]
    assert one.fingerprint["source"] == other.fingerprint["source"]


def test_a_model_file_that_leaves_python_is_the_users_mistake_and_not_a_dead_process(folder):
    (folder / "leaves.py").write_text("raise SystemExit(4)\n")
    assert "leaves.py cannot be imported: SystemExit: 4" in refusal(f"{folder}/leaves.py:Net")
    (folder / "built.py").write_text(
        "import sys\nimport torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        sys.exit('no')\n"
    )
    assert "built.py:Net cannot be built with no arguments: SystemExit: no" in refusal(f"{folder}/built.py:Net")


def test_a_kernelbench_problem_whose_model_is_no_module_is_refused(folder):
    (folder / "odd.py").write_text(
        "class Model:\n    pass\n\n\ndef get_inputs():\n    return []\n\n\ndef get_init_inputs():\n    return []\n"
    )
    assert "Model(...) is a Model, not an nn.Module" in refusal(f"{folder}/odd.py")


def test_shapes_beyond_the_memory_of_the_machine_are_the_users_mistake(folder):
    words = refusal(f"{folder}/problem.py:Model", model_args={"width": "16"}, input_shapes=((2**31, 2**20),))
    assert "--input-shape 2147483648,1048576 does not fit into this machine's memory" in words


def test_a_file_that_holds_no_weights_is_named_with_the_remedy_in_one_line(folder):
    (folder / "w.pt").write_bytes(b"\x00garbage")
    words = refusal(f"{folder}/problem.py:Model", model_args={"width": "16"}, weights=f"{folder}/w.pt")
    assert "w.pt cannot be read as plain tensors" in words
    assert "torch.save(model.state_dict(), FILE)" in words
