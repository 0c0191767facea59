"""Small models captured once for the tests of capture, regions, references and targets."""

from functools import lru_cache
from pathlib import Path

import torch

from harness.capture import Capture, capture
from harness.loading import LoadedModel, load_model
from harness.records import ModelSpec
from harness.targets import Draft, draft_targets

MODELS = Path(__file__).parent.parent / "models"
SMALL = {
    "llama": {"layers": "3", "dim": "64", "heads": "4", "vocab": "128", "length": "24"},
    "gpt2": {"layers": "2", "dim": "64", "heads": "4", "vocab": "128", "length": "24"},
    "bert": {"layers": "2", "dim": "64", "heads": "4", "vocab": "128", "length": "24"},
    "convnet": {"channels": "16", "size": "16", "blocks": "2", "stages": "2"},
}
CLASSES = {"llama": "LLaMA", "gpt2": "GPT2", "bert": "BERT", "convnet": "ConvNet"}


def load(name: str, dtype: str = "float32") -> LoadedModel:
    """One of the example models, small."""
    return load_model(
        ModelSpec(f"{MODELS / name}.py:{CLASSES[name]}", model_args=SMALL[name], device="cpu", dtype=dtype)
    )


def captured(name: str, dtype: str = "float32") -> Capture:
    """Its capture, made once."""
    return _captured(name, dtype)


def drafts(name: str, dtype: str = "float32") -> list[Draft]:
    """Its targets in the making, of that same capture."""
    return _drafts(name, dtype)


@lru_cache
def _captured(name: str, dtype: str) -> Capture:
    return capture(load(name, dtype))


@lru_cache
def _drafts(name: str, dtype: str) -> list[Draft]:
    return draft_targets(_captured(name, dtype))


def capture_of(model: torch.nn.Module, *args: torch.Tensor) -> Capture:
    """The capture of any module in eval mode."""
    return capture_of_trained(model.eval(), *args)


def capture_of_trained(model: torch.nn.Module, *args: torch.Tensor) -> Capture:
    """The capture of any module in the mode it is in."""
    return capture(LoadedModel(model, args, {}, type(model).__name__, "cpu", torch.float32))


def sites_by_kind(found: list[Draft]) -> dict[str, list[int]]:
    """How many call sites each target of a kind has."""
    kinds: dict[str, list[int]] = {}
    for draft in found:
        kinds.setdefault(draft.kind, []).append(len(draft.sites))
    return kinds
