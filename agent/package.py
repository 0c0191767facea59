"""Exports: the kept kernels of a session as a Python package that needs torch and Triton alone.

The package is a copy of what runs the kernels here (`harness.delivered` and all that it imports), with its imports made
relative, beside the judged files, their targets and where they come from. Written beside its place and moved there
whole. No path of this machine, no environment and no prompt goes into it.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import fingerprint as fingerprints
from agent.errors import InputError
from agent.harness_client import PACKAGE_ROOT
from agent.journal import Journal, now_iso
from agent.machine import package_version
from agent.measuring import kept_kernels
from agent.places import SessionPlaces
from agent.records import Experiment, RowStatus
from agent.session import read_options, still_valid
from agent.verbs import VERIFY_TIMEOUT_S, Harness
from harness import wire
from harness.records import Target

ENTRY = "delivered"
RUNTIME = "_overnight"
NAMESPACE = 'NAMESPACE = "overnight"'
# Two exports in one process, or an export beside Overnight itself, must not register the same ops.
OWN_NAMESPACE = 'NAMESPACE = "overnight_" + hashlib.sha256(__name__.encode()).hexdigest()[:12]'


@dataclass(frozen=True)
class Delivered:
    """One kernel to export: its experiment, its target's record, its judged bytes."""

    experiment: Experiment
    target: Target
    source: str


@dataclass(frozen=True)
class Material:
    """Everything that goes into an export."""

    session: str
    model: str
    kernels: tuple[Delivered, ...]
    facts: Mapping[str, Any]  # device, machine, layout
    verification: Mapping[str, Any] | None


def gather(places: SessionPlaces, harness: Harness) -> Material:
    """What a session has to export; raises InputError when the model or the machine is no longer the judged one."""
    profile = places.read_profile()
    with closing(Journal(places.journal, read_only=True)) as journal:
        options, experiments = read_options(journal), still_valid(journal)
        stored: Mapping[str, str] = wire.from_json(dict, journal.note("fingerprint") or "{}")
    chosen = kept_kernels(profile.targets if profile else (), experiments)
    if not chosen:
        return Material(places.name, "", (), {}, None)
    _check_unchanged(places, stored, fingerprints.fingerprint(options.model, options.device, places.root))
    with harness.start("verify") as process:
        facts = process.call("facts", options.model, dict, timeout_s=VERIFY_TIMEOUT_S)
    kernels = [_delivered(places, name, candidate.source, experiments) for name, candidate in chosen.items()]
    model = options.model.reference.rpartition("/")[2]
    return Material(places.name, model, tuple(kernels), facts, _verification(places))


def _check_unchanged(places: SessionPlaces, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    model, machine = fingerprints.changes(before, now)
    if model or machine:
        raise InputError(
            f"{', '.join([*model, *machine])} changed since session {places.name} last ran: `overnight resume"
            f" {places.name}{' --accept-change' * bool(model)}` measures again, then export."
        )


def _delivered(places: SessionPlaces, name: str, source: str, experiments: Iterable[Experiment]) -> Delivered:
    target = wire.from_json(Target, places.target_file(name).read_bytes())
    mine = [one for one in experiments if one.target == name and one.status is RowStatus.KEEP]
    return Delivered(mine[-1], target, source)


def _verification(places: SessionPlaces) -> Mapping[str, Any] | None:
    try:
        found: Mapping[str, Any] = json.loads((places.folder / "verify.json").read_bytes())
    except FileNotFoundError:
        return None
    return found


# The package


def write_package(material: Material, folder: Path) -> None:
    """The package itself in `folder`, which must exist."""
    entries = [_write_kernel(one, folder) for one in material.kernels]
    _write(folder / "provenance.json", json.dumps(provenance(material, entries), indent=2, ensure_ascii=False))
    _write(folder / "__init__.py", _init(material))
    for path in runtime_files():
        _write(folder / RUNTIME / path.name, made_relative(path))
    _write(
        folder / RUNTIME / "__init__.py",
        '"""What runs the kernels: a copy of the runtime of Overnight (Apache-2.0)."""\n',
    )


def _write_kernel(one: Delivered, folder: Path) -> dict[str, Any]:
    candidate, verdict = one.experiment.candidate, one.experiment.verdict
    assert candidate is not None
    assert verdict is not None
    name = one.target.id
    _write(folder / "kernels" / f"{name}.py", one.source)
    _write(folder / "targets" / f"{name}.json", wire.to_json(one.target))
    timing = wire.to_data(verdict.timing) if verdict.timing else {}
    timing.pop("ratios", None)
    return {
        "target": name,
        "title": one.target.title,
        "kind": one.target.kind,
        "file": f"kernels/{name}.py",
        "target_file": f"targets/{name}.json",
        "sha256": hashlib.sha256(one.source.encode()).hexdigest(),
        "backend": candidate.backend,
        "proposer": candidate.proposer,
        "experiment": one.experiment.number,
        "commit": one.experiment.commit,
        "verdict": {
            "status": verdict.status,
            "accepted": verdict.accepted,
            "stages": {stage: result.status for stage, result in verdict.stages.items()},
            "timing": timing,
        },
    }


def provenance(material: Material, entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Where the kernels come from and what they were judged on."""
    return {
        "overnight": package_version("overnight"),
        "exported_at": now_iso(),
        "session": material.session,
        "model": material.model,
        "device": material.facts["device"],
        "machine": material.facts["machine"],
        "layout": material.facts["layout"],
        "verification": material.verification,
        "kernels": entries,
    }


def runtime_files() -> list[Path]:
    """`harness.delivered` and every harness module that it imports, directly or not."""
    found: dict[str, Path] = {}
    waiting = [ENTRY]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name] = PACKAGE_ROOT / "harness" / f"{name}.py"
            waiting += _imports(found[name].read_text(encoding="utf-8"))
    return [found[name] for name in sorted(found)]


def _imports(source: str) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module == "harness":
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("harness."):
            names.append((node.module or "").removeprefix("harness."))
    return names


def made_relative(path: Path) -> str:
    """A module of the harness as it stands in an export."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"^(\s*)from harness import ", r"\1from . import ", text, flags=re.MULTILINE)
    text = re.sub(r"^(\s*)from harness\.(\w+) import ", r"\1from .\2 import ", text, flags=re.MULTILINE)
    return text.replace(NAMESPACE, OWN_NAMESPACE)


def _init(material: Material) -> str:
    functions = "".join(_function(one.target) for one in material.kernels)
    return f'''"""Kernels that Overnight's session {material.session} kept for {material.model}.

`optimize(model)` gives the model with them in it: same parameters, outputs within the judge's tolerance. It needs torch
and Triton alone. OVERNIGHT_DISABLE=1 runs the original. provenance.json says what was judged, where and how.
"""

from pathlib import Path as _Path

from .{RUNTIME}.delivered import ChangedLayoutError, ChangedMachineError
from .{RUNTIME}.delivered import Delivery as _Delivery

_delivery = _Delivery(_Path(__file__).resolve().parent)
provenance = _delivery.provenance
functions = _delivery.functions
optimize = _delivery.optimize
verify = _delivery.verify
counts = _delivery.counts

__all__ = [
    "ChangedLayoutError",
    "ChangedMachineError",
    "counts",
    "functions",
    "optimize",
    "provenance",
    "verify",
{"".join(f'    "{one.target.id}",' + chr(10) for one in material.kernels)}]
{functions}'''


def _function(target: Target) -> str:
    names = ", ".join(_safe(spec.name, place) for place, spec in enumerate(target.inputs))
    sizes = ", ".join(
        f"{_safe(spec.name, place)} {spec.dtype} [{', '.join(map(str, spec.dims))}]"
        for place, spec in enumerate(target.inputs)
    )
    title = target.title.replace("\\", "").replace('"""', "")
    return f'''

def {target.id}({names}):
    """{title}: {sizes}.

    Outside those sizes and dtypes the original runs instead, counted in `functions["{target.id}"].fallback`.
    """
    return functions["{target.id}"]({names})
'''


def _safe(name: str, place: int) -> str:
    return name if name.isidentifier() else f"input_{place}"


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())


def write_package_with_readme(material: Material, folder: Path, name: str) -> None:
    """The package and its README."""
    write_package(material, folder)
    loading = f"""```python
import {name}  # with the folder above this one on sys.path

model = {name}.optimize(model)
model(*inputs)
{name}.counts(model)  # call sites that run a kernel, and those that fell back
```"""
    _write(folder / "README.md", readme(material, name, loading=loading))


def check_place(folder: Path) -> None:
    """Refuse, before any work, a place that has something in it already; raises InputError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is there already and not an empty folder: choose another, or remove it.")
    blocked = next((parent for parent in folder.parents if parent.exists() and not parent.is_dir()), None)
    if blocked:
        raise InputError(f"{folder}: {blocked} is a file where a folder is needed.")


def place(folder: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a new folder, and put it at `folder` whole."""
    check_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        scratch.chmod(0o755)
        fill(scratch)
        scratch.replace(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def module_name(text: str) -> str:
    """A name that Python can import, made of any text."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_").lower() or "kernels"
    return f"kernels_{name}" if name[0].isdigit() else name


def readme(material: Material, name: str, *, loading: str) -> str:
    """What the export is, for people."""
    rows = "\n".join(
        f"| {one.target.id} | {one.target.title} | {_factor(one, 'speedup_vs_pytorch')} |"
        f" {_factor(one, 'speedup_vs_best')} |"
        for one in material.kernels
    )
    machine = ", ".join(f"{key} {value}" for key, value in material.facts["machine"].items())
    return f"""# {name}

Kernels that session {material.session} of Overnight kept for `{material.model}`, judged on: {machine}.

{loading}

| kernel | what | against eager | against what it had to beat |
|---|---|---|---|
{rows}

{_model_words(material)}
On another device, driver, torch or Triton the kernels are judged again before they are used (`changed="refuse"` refuses
instead); a model with another weight layout is refused. A shape outside what was verified runs the original, compiled.
`_overnight/` is a copy of Overnight's runtime, under the Apache License 2.0; the kernels are yours.
"""


def _factor(one: Delivered, name: str) -> str:
    timing = one.experiment.verdict.timing if one.experiment.verdict else None
    return f"{getattr(timing, name):.2f}x" if timing else ""


def _model_words(material: Material) -> str:
    speedup = (material.verification or {}).get("model_speedup")
    if not speedup:
        return "The whole model was not measured with these kernels; `overnight verify` does that.\n"
    return f"The whole model ran {speedup:.3f} times as fast as its best other mode when it was last verified.\n"


# A project for the Hugging Face Hub's kernels


def write_hub_project(material: Material, folder: Path, name: str, licence: str) -> None:
    """A kernel-builder project of Python kernels, and its build for this device, which the `kernels` library loads."""
    module, device = module_name(name), material.facts["device"]
    inside = folder / "torch-ext" / module
    inside.mkdir(parents=True)
    write_package(material, inside)
    hub_name = module.replace("_", "-")
    _write(folder / "build.toml", _build_toml(hub_name, licence, device))
    loading = f"""```python
from pathlib import Path
from kernels import get_local_kernel

{module} = get_local_kernel(Path("."))      # once uploaded: get_kernel("YOUR_NAME/{hub_name}", version=1)
model = {module}.optimize(model)            # or one kernel at a time: {module}.{material.kernels[0].target.id}(...)
```

`kernel-builder build` and `kernel-builder upload` work on this folder; it needs Python 3.11 or newer."""
    card = readme(material, hub_name, loading=loading)
    _write(folder / "CARD.md", f"---\nlicense: {licence}\nlibrary_name: kernels\n---\n\n{card}")
    build = folder / "build" / f"torch-{device}"
    shutil.copytree(inside, build)
    digest = {str(path.relative_to(build)): _base64_sha256(path) for path in sorted(build.rglob("*")) if path.is_file()}
    unique = hashlib.sha256(json.dumps(digest).encode()).hexdigest()[:7]
    metadata = {
        "id": f"_{module}_{device}_{unique}",
        "name": hub_name,
        "version": 1,
        "license": licence,
        "python-depends": [],
        "backend": {"type": device, **({"archs": [material.facts["capability"]]} if device == "cuda" else {})},
        "digest": {"algorithm": "sha256", "files": digest},
    }
    _write(build / "metadata.json", json.dumps(metadata, indent=2))


def _build_toml(name: str, licence: str, device: str) -> str:
    return (
        f'[general]\nname = "{name}"\nversion = 1\nedition = 6\nlicense = "{licence}"\nbackends = ["{device}"]\n'
        "\n[torch-noarch]\n"
    )


def _base64_sha256(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
