"""Seats on a Ray cluster: judges as actors with one GPU each, on the cluster that RAY_ADDRESS names or a local one.

Ray places the actors, carries code and target files by content hash and says when a worker died; a dead one costs the
experiment it had. The model itself is measured on the supervisor's host only, where the user's files are. Does not
protect against a cluster whose nodes have other drivers or versions of torch: each verdict compares on one device.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.devices import Device
from agent.errors import InputError, MachineError, OvernightError, StopRequestedError
from agent.executors.base import Answer, Job, Kind
from agent.executors.local import LocalSeat
from agent.harness_client import HARNESS_ENTRY, PACKAGE_ROOT
from agent.verbs import Harness
from harness.errors import from_kind
from harness.records import JudgeRequest

POLL_S = 0.2
START_TIMEOUT_S = 120.0
GRACE_S = 0.5
OBJECT_STORE_BYTES = 256 * 2**20  # verdicts and target files are small
CODE = ("agent", "harness")
MODEL = "accelerator_type:"  # how Ray names a GPU's model among a node's resources


@dataclass(frozen=True)
class Reply:
    """What a worker answers: an answer, or a failure by kind and message; its log and what it had to say."""

    answer: Answer | None
    kind: str
    message: str
    log: str
    said: tuple[str, ...]


class Host:
    """In a Ray worker: the very seat of a local night, with files of its own."""

    def __init__(self, device: Device, entry: str | None, judge_timeout_s: float, folder: str | None) -> None:
        self._folder = Path(folder or tempfile.mkdtemp(prefix="overnight-ray-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        self._said: list[str] = []
        harness = Harness(
            self._folder, self._folder / "log.txt", lambda: False, lambda _name, _body: None,
            Path(entry) if entry else HARNESS_ENTRY, judge_timeout_s,
        )  # fmt: skip
        self._seat = LocalSeat(harness, self._said.append, device)

    def node(self) -> str:
        """Which node of the cluster it runs on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, job: Job, name: str, record: bytes, samples: bytes | None) -> Reply:
        """Do a job; a target's files are unpacked once."""
        log = self._folder / f"{job.number}.txt"
        request = job.request
        if isinstance(request, JudgeRequest) and name:
            request = replace(request, target=str(self._unpacked(name, record, samples)))
        try:
            answer, kind, message = self._seat.run(Job(job.number, request, log)), "", ""
        except OvernightError as error:
            answer, kind, message = None, error.kind, str(error)
        text = log.read_text(encoding="utf-8") if log.exists() else ""
        log.unlink(missing_ok=True)
        said = tuple(self._said)
        self._said.clear()
        return Reply(answer, kind, message, text, said)

    def _unpacked(self, name: str, record: bytes, samples: bytes | None) -> Path:
        import hashlib

        folder = self._folder / hashlib.sha256(record + (samples or b"")).hexdigest()[:16] / "targets"
        path = folder / f"{name}.json"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            if samples is not None:
                (folder / f"{name}.samples.pt").write_bytes(samples)
            path.write_bytes(record)
        return path

    def fault(self) -> str | None:
        """Whether the device answers."""
        return self._seat.fault()

    def close(self) -> None:
        """End the judge, leave nothing behind."""
        self._seat.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Cluster:
    """The connection to Ray, and the cluster itself where none was there; `close` leaves nothing of ours running."""

    def __init__(self, devices: Sequence[Device], kind: str) -> None:
        self._code = Path(tempfile.mkdtemp(prefix="overnight-code-"))
        try:
            self._ray = _connected(self._code)
            self.node = str(self._ray.get_runtime_context().get_node_id())
            self._check(devices, kind)
        except BaseException:
            self.close()
            raise
        self.parcels: dict[str, Any] = {}

    @property
    def ray(self) -> Any:
        """The module, connected."""
        return self._ray

    def close(self) -> None:
        """Disconnect; a local cluster ends with it."""
        with suppress(AttributeError):  # it never connected
            self._ray.shutdown()
        shutil.rmtree(self._code, ignore_errors=True)

    def _check(self, devices: Sequence[Device], kind: str) -> None:
        resource = "GPU" if kind == "cuda" else "CPU"
        there, model = alike(self._ray.nodes(), self.node, resource)
        if there < len(devices):
            of_model = f" of model {model}" if model else ""
            raise MachineError(
                f"executor: ray: {len(devices)} {resource}s are asked for, but the cluster has {there}{of_model}: start"
                " more nodes, or name fewer devices."
            )
        self.options: dict[str, object] = {"num_gpus": 1, "num_cpus": 0} if kind == "cuda" else {"num_cpus": 1}
        if model:
            self.options["accelerator_type"] = model

    def put(self, path: Path) -> Any:
        """A file in the cluster's store, once for each content."""
        import hashlib

        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in self.parcels:
            self.parcels[digest] = self._ray.put(data)
        return self.parcels[digest]


class RaySeat:
    """One actor and its device: made with the first job, made anew when its worker died."""

    def __init__(
        self, cluster: Cluster, device: Device, harness: Harness, say: Callable[[str], None], folder: Path | None
    ) -> None:
        self._cluster, self._device, self._harness, self._say = cluster, device, harness, say
        self._folder = folder / device.name.replace(":", "-") if folder else None
        self._actor: Any = None
        self._kinds = frozenset({Kind.JUDGE, Kind.MEASURE})

    @property
    def name(self) -> str:
        """The device as the settings name it."""
        return self._device.name

    @property
    def kinds(self) -> frozenset[Kind]:
        """The model is measured on the supervisor's host alone."""
        return self._kinds

    def run(self, job: Job) -> Answer:
        """Have it done there. A worker's death is the machine's failure and costs this job."""
        reply = self._wait(self._start().run.remote(job, *self._parcel(job)))
        assert isinstance(reply, Reply)
        if reply.log:
            with job.log.open("a", encoding="utf-8") as file:
                file.write(reply.log)
        for line in reply.said:
            self._say(f"{self.name}: {line}")
        if reply.answer is None:
            raise from_kind(reply.kind, reply.message)
        return reply.answer

    def fault(self) -> str | None:
        """Whether a worker can be had and its device answers."""
        try:
            found = self._wait(self._start().fault.remote())
        except MachineError as error:
            return str(error)
        except StopRequestedError:
            return None
        return str(found) if found else None

    def close(self) -> None:
        """Ask the worker to clean up, then kill it."""
        if self._actor is None:
            return
        ray = self._cluster.ray
        with suppress(ray.exceptions.RayError):  # a busy worker does not answer in time and is killed as it is
            ray.get(self._actor.close.remote(), timeout=GRACE_S)
        ray.kill(self._actor, no_restart=True)
        self._actor = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            with suppress(OSError):  # other seats still have theirs
                self._folder.parent.rmdir()

    def _start(self) -> Any:
        if self._actor is None:
            entry = str(self._harness.entry) if self._harness.entry != HARNESS_ENTRY else None
            folder = str(self._folder) if self._folder else None
            remote = self._cluster.ray.remote(Host).options(**self._cluster.options, max_restarts=0)
            self._actor = remote.remote(self._device, entry, self._harness.judge_timeout_s, folder)
            if self._wait(self._actor.node.remote(), START_TIMEOUT_S) != self._cluster.node:
                self._kinds = frozenset({Kind.JUDGE})
        return self._actor

    def _parcel(self, job: Job) -> tuple[str, Any, Any]:
        """The files of the target, by reference: none for a named op or for measuring on this host."""
        if not isinstance(job.request, JudgeRequest) or not job.request.target.endswith(".json"):
            return ("", b"", None)
        path = Path(job.request.target)
        samples = path.with_name(f"{path.stem}.samples.pt")
        return (path.stem, self._cluster.put(path), self._cluster.put(samples) if samples.exists() else None)

    def _wait(self, reference: Any, timeout_s: float | None = None) -> object:
        ray = self._cluster.ray
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not ray.wait([reference], timeout=POLL_S)[0]:
                if self._harness.stop():
                    raise StopRequestedError
                if deadline is not None and time.monotonic() > deadline:
                    raise MachineError(f"Ray gave {self.name} no worker within {timeout_s:.0f} s.")
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            self._actor = None
            words = " ".join(str(error).split())[:300]
            raise MachineError(f"The Ray worker of {self.name} was lost: {words}") from error


def _connected(code: Path) -> Any:
    """Ray, connected to RAY_ADDRESS or started here; the signal handlers stay ours."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError("executor: ray needs Ray: pip install 'overnight[ray]'.") from error
    for name in CODE:
        shutil.copytree(PACKAGE_ROOT / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    address = os.environ.get("RAY_ADDRESS")
    local = {} if address else {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(
            address=address or "local", log_to_driver=False, configure_logging=False,
            runtime_env={"working_dir": str(code)}, **local,
        )  # fmt: skip
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MachineError(f"Ray cannot be reached or started: {' '.join(str(error).split())[:300]}") from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return ray


def alike(nodes: Sequence[Mapping[str, Any]], own: str, resource: str) -> tuple[int, str | None]:
    """How many devices of the model that this node has are in the cluster, and that model as Ray calls it.

    What is faster on one model need not be on another, so only devices of one model work on a session. A processor, or
    a device that Ray has no name for, has model None: then all count.
    """
    resources = {node["NodeID"]: node["Resources"] for node in nodes if node["Alive"]}
    models = [name for name in resources.get(own, {}) if name.startswith(MODEL)] if resource == "GPU" else []
    fitting = [one for one in resources.values() if not models or models[0] in one]
    return int(sum(one.get(resource, 0) for one in fitting)), models[0].removeprefix(MODEL) if models else None


def is_local() -> bool:
    """Whether the cluster is one that we start here: its cores are ours to share out."""
    return not os.environ.get("RAY_ADDRESS")
