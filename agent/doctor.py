"""What this machine offers, each line found by asking the thing itself."""

import os
import shutil
import subprocess
from collections.abc import Mapping

from agent import machine
from agent.errors import OvernightError
from agent.harness_client import PACKAGE_ROOT
from agent.proposers import llm_keys
from agent.verbs import Harness

DEVICE_TIMEOUT_S = 120.0
Findings = dict[str, str | list[str]]


def examine(harness: Harness) -> Findings:
    """Versions, compilers, devices, the sandbox layers of a judge started here."""
    packages = {name: machine.package_version(name) for name in ("torch", "triton", "litellm")}
    return {
        "python": _python(),
        **packages,
        "installed from": str(PACKAGE_ROOT),
        "git": _first_line(["git", "--version"]),
        "g++": _first_line(["g++", "--version"]),
        "nvcc": _first_line(["nvcc", "--version"]),
        "cpu": machine.cpu_name(),
        "gpus": list(machine.gpu_names()),
        "driver": machine.driver_version(),
        "default device": machine.default_device(),
        "sandbox": _sandbox(harness),
        "language models": provider_keys(os.environ),
    }


def provider_keys(environment: Mapping[str, str]) -> list[str]:
    """Which keys of providers are set and what would use them; never a value."""
    found = [
        f"{name} is set: used by `overnight run MODEL --llm {example}`, by nothing else"
        for name, example in llm_keys.present(environment)
    ]
    local = "a local server needs none: --llm NAME --api-base http://127.0.0.1:8000/v1"
    return [*(found or ["no provider's key is set: --proposer playbook needs none"]), local]


def _python() -> str:
    import sys

    return f"{sys.version.split()[0]} ({sys.executable})"


def _first_line(command: list[str]) -> str:
    if shutil.which(command[0]) is None:
        return "absent"
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.splitlines()[-1 if command[0] == "nvcc" else 0] if done.stdout else f"exit {done.returncode}"


def _sandbox(harness: Harness) -> list[str]:
    """The layers that the judge's workers get here; why there is no judge, when it cannot start."""
    try:
        with harness.start("judge") as judge:
            answer = judge.call("sandbox", {}, dict, timeout_s=DEVICE_TIMEOUT_S)
    except OvernightError as error:
        return [f"the judge cannot start: {' '.join(str(error).split())}"]
    return [str(layer) for layer in answer.get("layers", [])]
