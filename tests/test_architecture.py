"""Imports go down only: agent never imports torch, harness never imports agent, the worker imports neither."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TORCH_FREE_HARNESS = {"records", "errors", "wire", "rpc"}
AGENT_LAYERS = (
    {"errors", "records", "stopping", "machine"},
    {
        "budget",
        "kernelbench",
        "selection",
        "ranking",
        "policy",
        "results",
        "config",
        "model_spec",
        "fingerprint",
        "json_reports",
    }
    | {"visible", "devices", "search", "llm_settings"},
    {"harness_client", "repository", "journal", "lock", "places", "verbs", "doctor", "tables", "progress", "proposers"}
    | {"lease", "executors", "redteam"}
    | {
        "user_branch",
        "steering",
        "redaction",
        "gpu",
        "disk",
        "wakefulness",
        "unit",
        "notify",
        "notify_sender",
        "timeline",
    },
    {
        "session",
        "opening",
        "measuring",
        "experiment",
        "settling",
        "seating",
        "proposing",
        "unwell",
        "loop",
        "runner",
        "report",
    }
    | {
        "live_settings",
        "between",
        "preflight",
        "machine_watch",
        "package",
        "dataset",
        "morning",
        "announcing",
        "kernelbench_run",
        "dashboard",
    },
    {"cli_handover", "cli_steering", "cli_morning", "cli_redteam", "cli_kernelbench"}
    | {"cli_options", "cli_measure", "cli_session", "cli_read", "cli", "__main__"},
)


def modules(package):
    return sorted(path for path in (ROOT / package).rglob("*.py") if "__pycache__" not in path.parts)


def imported(path):
    """Every module a file imports, inside functions too, with relative imports made absolute."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            name = ".".join(part for part in (base, node.module) if part)
            yield name
            yield from (f"{name}.{alias.name}" for alias in node.names)


def tops(path):
    return {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", modules("agent"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_agent_imports_no_torch_and_only_the_records_of_the_harness(path):
    assert not tops(path) & {"torch", "triton", "numpy", "transformers"}
    used = {name.split(".")[1] for name in imported(path) if name.startswith("harness.")}
    assert used <= TORCH_FREE_HARNESS, f"{path.name} imports harness.{used - TORCH_FREE_HARNESS}"


@pytest.mark.parametrize("path", modules("harness"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_harness_never_imports_the_agent(path):
    assert "agent" not in tops(path)


@pytest.mark.parametrize("path", modules("harness/worker"), ids=lambda path: path.name)
def test_a_worker_imports_neither_harness_nor_agent(path):
    above = {name for name in imported(path) if name.split(".")[0] in {"harness", "agent"}}
    assert all(name.startswith("harness.worker") for name in above), above


@pytest.mark.parametrize("name", sorted(TORCH_FREE_HARNESS))
def test_what_agent_and_harness_share_is_free_of_torch(name):
    assert not tops(ROOT / "harness" / f"{name}.py") & {"torch", "triton", "numpy"}


@pytest.mark.parametrize("path", sorted((ROOT / "agent").glob("*.py")), ids=lambda path: path.name)
def test_imports_inside_the_agent_go_down(path):
    if path.name == "__init__.py":
        pytest.skip("imports nothing")
    level = layer(path.stem)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "agent" and len(parts) > 1 and (ROOT / "agent" / parts[1]).with_suffix("").name:
            assert layer(parts[1]) <= level, f"{path.name} imports {name}, which stands above it"


def layer(name):
    for level, names in enumerate(AGENT_LAYERS):
        if name in names:
            return level
    raise AssertionError(f"agent/{name}.py has no layer: add it to AGENT_LAYERS")


def test_no_module_is_called_like_one_of_the_standard_library():
    names = {path.stem for package in ("agent", "harness") for path in modules(package)} - {"__init__", "__main__"}
    assert not names & set(sys.stdlib_module_names)


def test_every_module_opens_with_a_sentence():
    for path in [*modules("agent"), *modules("harness")]:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
