"""What an export records of the model and of this machine, so that the package knows them again."""

from typing import Any

import torch

from harness.delivered import layout_of, machine_of
from harness.loading import load_model
from harness.records import ModelSpec


def delivery_facts(spec: ModelSpec) -> dict[str, Any]:
    """`device` ("cpu" or "cuda"), `machine`, `layout`, a GPU's `capability`; raises InputError as loading does."""
    loaded = load_model(spec)
    device = "cuda" if str(loaded.device).startswith("cuda") else "cpu"
    facts = {"device": device, "machine": machine_of(device), "layout": layout_of(loaded.model)}
    if device == "cuda":
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    return facts
