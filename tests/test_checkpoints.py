"""Checkpoints that are damaged, incomplete, quantised or not ours to run are refused by name; whole ones load."""

import json
import shutil

import pytest
import torch
from torch import nn

from harness.errors import InputError
from harness.loading import load_model
from harness.records import ModelSpec

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

USER = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.last = nn.Linear(8, 20, bias=False)
        self.last.weight = self.table.weight
    def forward(self, ids):
        return self.last(self.table(ids))

class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.places = nn.Parameter(torch.rand(6, 4))
    def forward(self, x, places):
        return x + self.places[places] + x.gather(1, places)

def on_meta():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4))

def lazy():
    return nn.Sequential(nn.LazyLinear(4))

def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(4, 4)))

def parallel():
    return nn.DataParallel(nn.Linear(4, 4))

def split():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))

class Packed(torch.Tensor):
    pass

def packed():
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().as_subclass(Packed), requires_grad=False)
    return model

def mapped():
    model = nn.Linear(4, 4)
    model.hf_device_map = {"a": 0, "b": "cpu"}
    return model

def sparse():
    model = nn.Module()
    model.register_buffer("rare", torch.eye(4).to_sparse())
    return model

def compiled():
    return torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))

class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x)) * 0.5

def bad_places(device, dtype):
    return (torch.rand(2, 4), torch.tensor([[0, 1, 2, 3], [0, 1, 2, 6]]))

def bad_ids():
    return [{"name": "good", "args": (torch.zeros(1, 4, dtype=torch.int64),)},
            {"name": "bad", "args": (torch.full((1, 4), 20),)}]
"""


def load(reference, **options):
    return load_model(ModelSpec(str(reference), device="cpu", **options))


def refusal(reference, **options):
    with pytest.raises(InputError) as caught:
        load(reference, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A tiny LLaMA in two safetensors shards, its head tied to its table."""
    folder = tmp_path_factory.mktemp("checkpoint")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.fixture
def user(tmp_path):
    (tmp_path / "net.py").write_text(USER)
    return tmp_path / "net.py"


def edited(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def a_shard(folder):
    return sorted(folder.glob("*.safetensors"))[-1]


def test_a_sharded_checkpoint_with_tied_weights_is_loaded_whole_in_its_own_dtype(whole):
    loaded = load(whole)
    assert loaded.dtype is torch.bfloat16
    assert loaded.model.lm_head.weight.data_ptr() == loaded.model.model.embed_tokens.weight.data_ptr()


def test_shards_of_pickled_tensors_are_loaded_too(whole, tmp_path):
    model = transformers.LlamaForCausalLM.from_pretrained(whole)
    shutil.copy(whole / "config.json", tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load(tmp_path, dtype="float32")
    assert torch.equal(loaded.model.lm_head.weight, model.lm_head.weight.float())


def cut_short(folder):
    path = a_shard(folder)
    path.write_bytes(path.read_bytes()[:-100])


def cut_within_the_header(folder):
    a_shard(folder).write_bytes(a_shard(folder).read_bytes()[:40])


def without_a_shard(folder):
    a_shard(folder).unlink()


def without_weights(folder):
    for path in folder.glob("*.safetensors*"):
        path.unlink()


def with_a_broken_config(folder):
    (folder / "config.json").write_text("{")


def with_a_broken_index(folder):
    next(folder.glob("*.index.json")).write_text("[]")


def without_a_tensor(folder):
    path = a_shard(folder)
    state = safetensors.load_file(str(path))
    state.pop(next(iter(state)))
    safetensors.save_file(state, str(path), {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_short, "is cut short"),
        (cut_within_the_header, "within its header"),
        (without_a_shard, "is missing"),
        (without_weights, "holds no weights"),
        (with_a_broken_config, "not readable JSON"),
        (with_a_broken_index, "no JSON object"),
        (without_a_tensor, "1 missing (model."),
        (lambda folder: edited(folder, num_hidden_layers=3), "missing (model.layers.2."),
        (lambda folder: edited(folder, num_hidden_layers=1), "unexpected (model.layers.1."),
        (lambda folder: edited(folder, vocab_size=99), "of another shape"),
        (lambda folder: edited(folder, architectures=["GPT2LMHeadModel"]), "cannot be loaded"),
        (lambda folder: edited(folder, architectures=["NobodyKnows"]), "knows no NobodyKnows"),
        (lambda folder: edited(folder, quantization_config={"quant_method": "gptq", "bits": 4}), "quantised (gptq)"),
        (lambda folder: edited(folder, auto_map={"AutoModel": "code.Net"}), "--trust code"),
    ],
    ids=[
        "cut short", "cut header", "no shard", "no weights", "config", "index", "tensor", "more layers", "fewer layers",
        "vocabulary", "wrong class", "unknown class", "quantised", "own code",
    ],
)  # fmt: skip
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name(folder, damage, said):
    damage(folder)
    message = refusal(folder)
    assert said in message or (said == "cannot be loaded" and "does not fit" in message)


def test_a_folder_with_an_adapter_alone_says_to_merge_it(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "merge_and_unload" in refusal(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"hello")
    assert "no GGUF file" in refusal(tmp_path / "model.gguf")


def test_an_unknown_setting_of_the_configuration_is_refused(whole):
    assert "has no 'num_layers_of_cake'" in refusal(whole, model_args={"num_layers_of_cake": "3"})


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("on_meta", "0.weight is on the meta device"),
        ("lazy", "lazy module"),
        ("scripted", "TorchScript"),
        ("parallel", "DataParallel"),
        ("split", "meta device"),
        ("packed", "is a Packed"),
        ("mapped", "device_map"),
        ("sparse", "rare is sparse"),
    ],
)
def test_a_model_that_cannot_be_judged_is_refused_by_what_it_is(user, factory, said):
    assert said in refusal(f"{user}:{factory}", input_shapes=((2, 4),))


def test_a_compiled_model_and_one_with_adapters_are_taken_as_they_are(user):
    assert isinstance(load(f"{user}:compiled", input_shapes=((2, 4),)).model, nn.Sequential)
    assert load(f"{user}:Adapted").args[0].shape == (8, 8)


def test_tied_weights_may_be_given_once(user, tmp_path):
    safetensors.save_file({"table.weight": torch.ones(20, 8)}, str(tmp_path / "w.safetensors"))
    loaded = load(f"{user}:Tied", weights=str(tmp_path / "w.safetensors"))
    assert bool((loaded.model.last.weight == 1).all())


def test_a_pickle_of_a_whole_module_needs_the_users_trust(user, tmp_path):
    torch.save(nn.Sequential(nn.Linear(4, 4)), tmp_path / "whole.pt")
    (tmp_path / "net.py").write_text("from torch import nn\ndef make():\n    return nn.Sequential(nn.Linear(4, 4))\n")
    assert "--trust pickle" in refusal(f"{user}:make", weights=str(tmp_path / "whole.pt"), input_shapes=((2, 4),))
    loaded = load(f"{user}:make", weights=str(tmp_path / "whole.pt"), input_shapes=((2, 4),), trust=("pickle",))
    assert loaded.model[0].weight.shape == (4, 4)


def test_a_truncated_file_of_weights_is_refused(user, tmp_path):
    path = tmp_path / "w.safetensors"
    safetensors.save_file({"table.weight": torch.ones(20, 8)}, str(path))
    path.write_bytes(path.read_bytes()[:-8])
    assert "is cut short" in refusal(f"{user}:Tied", weights=str(path))


def test_every_index_of_every_input_set_is_checked_before_the_device_sees_it(user):
    assert "index 6, outside" in refusal(f"{user}:Lookup", inputs=f"{user}:bad_places")
    message = refusal(f"{user}:Tied", inputs=f"{user}:bad_ids")
    assert "index 20, outside a table of 20 rows (0 to 19)" in message
