"""Exports: a package that runs with torch and Triton alone, a project for the Hub, a dataset without secrets."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kept_session import kept_session
from test_cli import check_refused, overnight
from workspaces import drive, kernel, make_workspace, state_of

# What torch needs of a site-packages folder; nothing of ours, no pydantic, no pynvml.
TORCH_ALONE = (
    *("torch", "torchgen", "functorch", "triton", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock"),
    *("fsspec", "typing_extensions.py", "setuptools", "_distutils_hack", "nvidia"),
)
USE = """
import json, sys, torch
sys.path.insert(0, {above!r})
torch.manual_seed(0)
sys.path.insert(0, {model!r})
from net import Net
import {name} as package
assert not set(sys.modules) & {{"agent", "harness", "pydantic", "pynvml", "yaml"}}, "it needs more than torch"
out = {{}}
{body}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return kept_session(tmp_path_factory.mktemp("export") / "w")


@pytest.fixture(scope="module")
def package(places, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out") / "faster_net"
    before = state_of(places.root)
    done = overnight(places.root, "export", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    assert state_of(places.root) == before
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A virtual environment that holds torch and what it needs, by links."""
    import venv

    import torch

    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    installed = Path(torch.__file__).parent.parent
    for name in TORCH_ALONE:
        if (installed / name).exists():
            (site / name).symlink_to(installed / name)
    return folder / "bin" / "python"


def use(python, package, places, body, *, environment=None, check=True):
    script = USE.format(above=str(package.parent), model=str(places.root), name=package.name, body=body)
    done = subprocess.run(
        [str(python), "-I", "-c", script],
        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/root"), **(environment or {})},
        cwd=package.parent,
        capture_output=True,
        text=True,
        timeout=250,
    )
    if not check:
        return done
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_the_package_works_with_torch_alone_and_falls_back_on_what_was_not_verified(package, places, bare):
    out = use(
        bare,
        package,
        places,
        """
model = Net().eval()
fast = package.optimize(model)
with torch.no_grad():
    x = torch.randn(4, 16, 64)
    out["close"] = bool(torch.allclose(fast(x), model(x), atol=1e-5))
    out["seen"] = package.counts(fast)
    out["calls"] = sum(fast.calls().values())
    other = torch.randn(3000, 16, 64).double()
    wide = Net().double().eval()
    unseen = torch.randn(1, 64)
    out["unseen_close"] = bool(torch.allclose(fast(unseen), model(unseen), atol=1e-5))
    out["after"] = package.counts(fast)
    (name, function), = package.functions.items()
    result = getattr(package, name)(x, model.one)
    out["function_close"] = bool(torch.allclose(result, model.norm(x, model.one), atol=1e-5))
    half = getattr(package, name)(x.double(), model.one.double())
    out["half"] = str(half.dtype)
    out["function"] = [function.applied, function.fallback, len(function.reasons)]
""",
    )
    assert out["close"]
    assert out["unseen_close"]
    assert out["function_close"]
    assert sum(out["seen"]["applied"].values()) == 2
    assert out["calls"] == 2
    assert out["half"] == "torch.float64"
    assert out["function"] == [1, 1, 1]


def test_a_changed_weight_layout_is_refused_and_the_difference_named(package, places, bare):
    out = use(
        bare,
        package,
        places,
        """
def refusal(model):
    try:
        package.optimize(model)
    except package.ChangedLayoutError as error:
        return str(error)
    return "accepted"
out["width"] = refusal(Net(128))
out["dtype"] = refusal(Net().half())
transposed = Net()
transposed.linear.weight = torch.nn.Parameter(transposed.linear.weight.detach().t().contiguous().t())
out["strides"] = refusal(transposed)
out["values"] = refusal(Net().requires_grad_(False))
""",
    )
    assert "one is float32 [128]" in out["width"]
    assert "float16" in out["dtype"]
    assert "linear.weight is float32 [64, 64] strides [1, 64]" in out["strides"]
    assert out["values"] == "accepted"


@pytest.mark.slow
def test_on_another_machine_the_kernels_are_judged_again_or_refused(package, places, bare, tmp_path):
    moved = tmp_path / package.name
    shutil.copytree(package, moved)
    provenance = json.loads((moved / "provenance.json").read_text())
    provenance["machine"] |= {"device": "another CPU", "torch": "0.0.1"}
    (moved / "provenance.json").write_text(json.dumps(provenance))
    body = """
import warnings
model = Net().eval()
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    package.optimize(model)
    package.optimize(model)
out["said"] = [str(one.message) for one in said if "judging" in str(one.message)]
try:
    package.optimize(model, changed="refuse")
except package.ChangedMachineError as error:
    out["refused"] = str(error)
"""
    out = use(bare, moved, places, body)
    assert len(out["said"]) == 1
    assert "another CPU" in out["said"][0]
    assert "instead of 0.0.1" in out["refused"]


@pytest.mark.slow
def test_a_kernel_that_is_wrong_on_another_machine_is_refused(package, places, bare, tmp_path):
    import hashlib

    moved = tmp_path / package.name
    shutil.copytree(package, moved)
    provenance = json.loads((moved / "provenance.json").read_text())
    (entry,) = provenance["kernels"]
    wrong = "import torch\ndef kernel_fn(x, *rest, **constants):\n    return torch.zeros_like(x)\n"
    (moved / entry["file"]).write_text(wrong)
    edited = use(bare, moved, places, "", check=False)
    assert "is no longer the file that was judged" in edited.stderr
    entry["sha256"] = hashlib.sha256(wrong.encode()).hexdigest()
    provenance["machine"]["torch"] = "0.0.1"
    (moved / "provenance.json").write_text(json.dumps(provenance))
    refused = use(bare, moved, places, "package.optimize(Net().eval())", check=False)
    assert "is wrong on this machine" in refused.stderr


def test_provenance_says_what_was_judged_where_and_no_path_of_this_machine(package, places):
    provenance = json.loads((package / "provenance.json").read_text())
    assert provenance["kernels"][0]["verdict"]["status"] == "keep"
    assert set(provenance["machine"]) >= {"device", "torch", "triton"}
    assert provenance["model"] == "net.py:Net"
    for path in package.rglob("*"):
        assert path.is_dir() or path.suffix == ".pyc" or str(places.root).encode() not in path.read_bytes()


def test_the_project_for_the_hub_has_what_the_kernels_library_reads(places, tmp_path):
    done = overnight(
        places.root, "export", str(tmp_path / "hub-net"), "--format", "hf-kernels", "--license", "apache-2.0", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "hub-net"
    assert json.loads(done.stdout)["written"] == 1
    assert 'name = "hub-net"' in (folder / "build.toml").read_text()
    assert (folder / "torch-ext" / "hub_net" / "__init__.py").exists()
    build = folder / "build" / "torch-cpu"
    metadata = json.loads((build / "metadata.json").read_text())
    assert metadata["id"].isidentifier()
    assert set(metadata["digest"]["files"]) == {
        str(path.relative_to(build)) for path in build.rglob("*") if path.is_file() and path.name != "metadata.json"
    }
    library = [sys.executable, "-I", "-c", "import kernels; kernels.get_local_kernel"]
    if subprocess.run(library, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("the library of the Hub's kernels is not installed: its layout was compared, not loaded")
    load = f"import kernels, pathlib; k = kernels.get_local_kernel(pathlib.Path({str(folder)!r})); print(k.functions)"
    loaded = subprocess.run([*library[:-1], load], capture_output=True, text=True, timeout=100)
    assert "Function(" in loaded.stdout, loaded.stderr


def test_a_dataset_has_every_experiment_a_card_and_no_secret(places, tmp_path):
    from pyarrow import parquet

    folder = tmp_path / "data-of-mine"
    environment = {"SOME_API_KEY": "the reply"}  # a secret value that stands in a text
    done = overnight(
        places.root,
        "export",
        str(folder),
        "--format",
        "dataset",
        "--license",
        "mit",
        "--prompts",
        environment=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = parquet.read_table(folder / "data").to_pylist()
    assert (row["session"], row["status"], row["accepted"]) == ("night", "keep", True)
    assert row["speedup_vs_best"] == pytest.approx(1.4)
    assert "def reference" in row["reference"]
    assert row["prompt"] == "ask with [removed]"
    assert row["reply"] == "[removed]"
    assert (folder / "README.md").read_text().startswith("---\nlicense: mit\n")
    raw = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert str(places.root).encode() not in raw


def test_without_prompts_and_with_all_sessions(tmp_path):
    from pyarrow import parquet

    workspace = make_workspace(
        tmp_path / "w",
        recordings={"0001_rmsnorm_a__x.py": kernel("incorrect"), "0002_softmax_b__y.py": "INVALID REPLY: no"},
    )
    drive(workspace, "run", name="one")
    drive(workspace, "run", name="two")
    done = overnight(workspace, "export", "out", "--format", "dataset", "--license", "mit", "--all")
    assert done.returncode == 0, done.stderr
    table = parquet.read_table(workspace / "out" / "data")
    assert "prompt" not in table.column_names
    assert sorted((row["session"], row["status"]) for row in table.to_pylist()) == [
        ("one", "incorrect"),
        ("one", "invalid_reply"),
        ("two", "incorrect"),
        ("two", "invalid_reply"),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["out", "--format", "zip"], "use package, hf-kernels, dataset"),
        (["out", "--format", "dataset"], "--license is needed"),
        (["out", "--format", "hf-kernels"], "--license is needed"),
        (["out", "--format", "dataset", "--license", "my licence!"], "is no licence identifier"),
        (["out", "--prompts"], "are for --format dataset"),
        (["out", "--license", "mit"], "--license is for what is published"),
        (["model.py"], "is there already"),
        ([".git"], "is there already"),
        (["model.py/inner"], "is a file where a folder is needed"),
        (["out", "--session", "nobody"], "There is no session nobody"),
    ],
)
def test_a_wrong_request_is_refused_before_any_work(places, monkeypatch, capfd, arguments, words):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.chdir(places.root)
    check_refused(places.root, ["export", *arguments], words, capfd)


def test_a_model_that_changed_since_is_refused(places, tmp_path):
    source = (places.root / "net.py").read_text()
    (places.root / "net.py").write_text(source + "# changed\n")
    try:
        done = overnight(places.root, "export", str(tmp_path / "out"))
    finally:
        (places.root / "net.py").write_text(source)
    assert done.returncode == 2
    assert "source changed since session night last ran" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_session_that_kept_nothing_exports_nothing(tmp_path):
    workspace = make_workspace(tmp_path / "w", recordings={"0001_rmsnorm_a__x.py": kernel("incorrect")})
    drive(workspace, "run")
    done = overnight(workspace, "export", "out")
    assert (done.returncode, (workspace / "out").exists()) == (1, False)
