"""The layers between a worker and the machine, each tried and reported: namespaces, private root, Landlock, seccomp.

A layer that the host forbids is reported as missing with the reason and the others still hold. Runs without torch.
Does not protect against exploits of the operating system's or the GPU driver's kernel code, nor against one worker
slowing the machine down while it may run.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from . import kernel_calls as calls

SYSTEM_FOLDERS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store", "/sys",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/nsswitch.conf",
    "/etc/passwd", "/etc/group", "/etc/localtime", "/etc/hosts", "/etc/OpenCL", "/etc/vulkan",
)  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "kfd", "dri")
DEVICE_PATTERNS = ("nvidia*",)
PRIVATE_SCRATCH = "/tmp/overnight"
PRIVATE_CACHE = "/tmp/compiled"
PROTECTED_PROC = ("sys", "irq", "bus", "fs", "acpi", "scsi", "sysrq-trigger", "kcore", "keys", "timer_list")
CACHES = ("tmp", "home", "triton", "inductor", "extensions")
SWITCHED_OFF = "switched off"
USER, PID, ROOT = "user namespace", "pid namespace", "private root"
FLAGS = {
    "ipc namespace": calls.CLONE_NEWIPC,
    "uts namespace": calls.CLONE_NEWUTS,
    "network namespace": calls.CLONE_NEWNET,
    "cgroup namespace": calls.CLONE_NEWCGROUP,
    PID: calls.CLONE_NEWPID,
}


class Layer(NamedTuple):
    """One layer: whether it is active and, when it is not, why."""

    name: str
    active: bool
    reason: str = ""


@dataclass(frozen=True)
class Place:
    """What of the file system a worker sees: `scratch` (and `cache`, for a trusted one) to write, `readable` to read.

    `hidden` lies below something readable and is covered all the same. `private` once the root is the worker's own.
    What lies in `seed` is copied to scratch: compiled code of an earlier worker of the same candidate.
    """

    scratch: str
    cache: str | None
    readable: tuple[str, ...]
    hidden: tuple[str, ...]
    private: bool = False
    seed: str | None = None

    @classmethod
    def of(cls, request: dict[str, Any]) -> "Place":
        """Read it from a fork request."""
        readable, hidden = tuple(request["readable"]), tuple(request["hidden"])
        return cls(request["scratch"], request["cache"], readable, hidden, seed=request["seed"])

    def inside(self) -> "Place":
        """The same place as seen from within its private root."""
        return replace(self, scratch=PRIVATE_SCRATCH, cache=self.cache and PRIVATE_CACHE, private=True, seed=None)

    def make(self) -> None:
        """Create the folders below the scratch and cache folders, what was compiled before in them."""
        if self.seed:
            shutil.copytree(self.seed, self.scratch, dirs_exist_ok=True)
        for base in (self.scratch, self.cache):
            for name in CACHES if base else ():
                Path(str(base), name).mkdir(mode=0o700, parents=True, exist_ok=True)

    def enter(self, environment: dict[str, str]) -> None:
        """Point every cache, temporary file and home at the scratch folder."""
        os.chdir(self.scratch)
        os.umask(0o077)
        caches = self.cache or self.scratch
        os.environ.update(
            HOME=f"{self.scratch}/home",
            TMPDIR=f"{self.scratch}/tmp",
            TRITON_CACHE_DIR=f"{caches}/triton",
            TRITON_HOME=f"{self.scratch}/home",
            TORCHINDUCTOR_CACHE_DIR=f"{caches}/inductor",
            TORCH_EXTENSIONS_DIR=f"{self.scratch}/extensions",
            CUDA_CACHE_PATH=f"{caches}/extensions",
            XDG_CACHE_HOME=f"{self.scratch}/home/.cache",
            USER="overnight",
            LOGNAME="overnight",
            **environment,
        )
        tempfile.tempdir = None


def switched_off() -> list[Layer]:
    """The report of a worker that runs without a sandbox on purpose."""
    return [Layer("sandbox", active=False, reason=SWITCHED_OFF)]


def become_subreaper() -> None:
    """Orphaned descendants come to this process instead of the machine's init."""
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)


def go_first(*, children_too: bool) -> None:
    """Where the host allows it, be scheduled before any number of busy workers, so that a fork bomb can be stopped."""
    with contextlib.suppress(OSError):
        policy = os.SCHED_FIFO if children_too else os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))


def go_in_turn() -> None:
    """Be scheduled like any other process."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def hide_memory() -> None:
    """No process of the same user may read or trace this one."""
    calls.prctl(calls.PR_SET_DUMPABLE, 0)


def show_memory() -> None:
    """Undo `hide_memory` in a child (CUDA and profilers read their own /proc/self)."""
    calls.prctl(calls.PR_SET_DUMPABLE, 1)


def readable_folders() -> tuple[str, ...]:
    """System folders, the interpreter's own, torch's and triton's, and CUDA's: what a kernel may read."""
    found = [*SYSTEM_FOLDERS, sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib"), os.environ.get("CUDA_HOME")]
    found.append(str(Path(__file__).resolve().parent))  # Dynamo reads the source of the frames it starts from
    found += [os.environ.get("CUDA_PATH"), *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    for name in ("torch", "triton", "numpy"):
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            found.append(str(Path(spec.origin).parent.parent))
    paths = {str(path) for word in found if word for path in (Path(word), Path(word).resolve()) if path.exists()}
    return tuple(sorted(path for path in paths if path.startswith("/") and path != "/"))


# --- namespaces ---


def support() -> dict[str, str]:
    """Each namespace and the private root, and why it cannot be had: empty when it can.

    Tried in a child, so that nothing changes here.
    """
    scratch = tempfile.mkdtemp(prefix="overnight-probe-")
    try:
        answer: dict[str, str] | None = json.loads(_in_child(lambda: _try_namespaces(scratch)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return answer or {USER: "the trial ended without an answer"}


def _try_namespaces(scratch: str) -> object:
    found = {USER: _attempt(_enter_user_namespace)}
    if found[USER]:
        return found
    for name, flag in FLAGS.items():
        found[name] = _attempt(partial(calls.unshare, flag))
    found[ROOT] = "needs the pid namespace"
    if not found[PID]:
        place = Place(scratch, None, readable_folders(), ())
        found.update(json.loads(_in_child(lambda: _try_mounts(place))) or {PID: "its first process died"})
    return found


def _try_mounts(place: Place) -> object:
    # CUDA needs a /proc of the same namespace; a container that masks its /proc forbids mounting a new one.
    return {PID: _attempt(_mount_proc_alone), ROOT: _attempt(partial(_build_root, place, 1 << 20))}


_PROC_FLAGS = calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC


def _mount_proc_alone() -> None:
    calls.unshare(calls.CLONE_NEWNS)
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    calls.mount("proc", "/proc", "proc", _PROC_FLAGS)


def _attempt(action: Callable[[], None]) -> str:
    try:
        action()
    except OSError as error:
        return "user.max_user_namespaces is 0 or used up" if error.errno == errno.ENOSPC else str(error)
    return ""


def _enter_user_namespace() -> None:
    """One's own user and group, mapped to themselves; all others become nobody."""
    user, group = os.getuid(), os.getgid()
    calls.unshare(calls.CLONE_NEWUSER)
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enter_namespaces(supported: dict[str, str]) -> list[Layer]:
    """Enter every namespace that `support` found; children of this process are then inside them all."""
    if supported[USER]:
        missing = (Layer(name, active=False, reason="needs the user namespace") for name in (*FLAGS, ROOT))
        return [Layer(USER, active=False, reason=supported[USER]), *missing]
    _enter_user_namespace()
    for name, flag in FLAGS.items():
        if not supported[name]:
            calls.unshare(flag)
    reasons = {**supported, ROOT: supported[ROOT] or (supported[PID] and "needs the pid namespace")}
    return [Layer(name, not reasons[name], reasons[name]) for name in (USER, *FLAGS, ROOT)]


# --- the private root ---


def private_root(place: Place, layers: list[Layer], scratch_bytes: int) -> Place:
    """In the first process of a PID namespace: make a root that holds only what the worker may see.

    It is read-only but for scratch, /tmp and /dev/shm, which are the worker's own and vanish with it.
    """
    active = {layer.name for layer in layers if layer.active}
    if ROOT in active:
        _build_root(place, scratch_bytes)
        return place.inside()
    if PID in active:
        _mount_proc_alone()
    return place


def _build_root(place: Place, scratch_bytes: int) -> None:
    root = place.scratch
    calls.unshare(calls.CLONE_NEWNS)
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    calls.mount("tmpfs", root, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "size=4m,mode=755")
    _tmpfs(f"{root}/tmp", scratch_bytes, "1777")  # first: an interpreter may lie below the machine's own /tmp
    _bind_readable(root, place)
    _bind_devices(root)
    _proc(root)
    old = f"{root}/.old"
    Path(old).mkdir()
    _tmpfs(f"{root}/dev/shm", scratch_bytes, "1777")
    if place.seed:
        shutil.copytree(place.seed, root + PRIVATE_SCRATCH)
    if place.cache:
        _bind(place.cache, root + PRIVATE_CACHE)
    calls.pivot_root(root, old)
    os.chdir("/")
    calls.unmount_lazily("/.old")
    Path("/.old").rmdir()
    Path("/var").mkdir(exist_ok=True)
    Path("/var/tmp").symlink_to("/tmp")
    calls.set_read_only("/", read_only=True)
    for path in ("/tmp", "/dev/shm", "/proc", *([PRIVATE_CACHE] if place.cache else [])):
        calls.set_read_only(path, read_only=False)


def _bind_readable(root: str, place: Place) -> None:
    """Bind what may be read, cover what is hidden below it, deeper paths later."""
    entries = [(path, False) for path in place.readable] + [(path, True) for path in place.hidden]
    bound: list[str] = []
    for path, hide in sorted(entries, key=lambda entry: (entry[0].count("/"), entry[0])):
        below = any(Path(path).is_relative_to(other) for other in bound)
        if hide:
            if below and Path(path).is_dir():
                _tmpfs(root + path, 1 << 20, "755")
                bound = [other for other in bound if not Path(path).is_relative_to(other)]
        elif Path(path).is_symlink():
            if not below:
                Path(root + path).parent.mkdir(parents=True, exist_ok=True)
                Path(root + path).symlink_to(Path(path).readlink())
        elif not below:
            _bind(path, root + path)
            bound.append(path)


def _bind_devices(root: str) -> None:
    devices = [Path("/dev", name) for name in DEVICES]
    devices += [path for pattern in DEVICE_PATTERNS for path in sorted(Path("/dev").glob(pattern))]
    for device in devices:
        if device.exists():
            _bind(str(device), root + str(device))
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        Path(f"{root}/dev/{name}").symlink_to(f"/proc/self/{target}")


def _proc(root: str) -> None:
    """A /proc of this PID namespace, with what could change the machine made read-only or covered."""
    proc = f"{root}/proc"
    Path(proc).mkdir()
    calls.mount("proc", proc, "proc", _PROC_FLAGS)
    _cap_processes(proc)
    for name in PROTECTED_PROC:
        path = f"{proc}/{name}"
        if Path(path).is_dir():
            calls.mount(path, path, None, calls.MS_BIND | calls.MS_REC)
        elif Path(path).exists():
            calls.mount("/dev/null", path, None, calls.MS_BIND)


def _cap_processes(proc: str) -> None:
    """From Linux 6.14 a PID namespace has its own highest PID, which stops a fork bomb, root's too, at once."""
    with contextlib.suppress(OSError):
        Path(f"{proc}/sys/kernel/pid_max").write_text(str(most_tasks()))


def most_tasks() -> int:
    """Processes and threads that no honest worker needs: pools of a few threads per core, and compilers."""
    return 320 + 16 * (os.cpu_count() or 1)


def _tmpfs(path: str, nbytes: int, mode: str) -> None:
    Path(path).mkdir(parents=True, exist_ok=True)
    calls.mount("tmpfs", path, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, f"size={nbytes},mode={mode},nr_inodes=200000")


def _bind(source: str, target: str) -> None:
    if Path(source).is_dir():
        Path(target).mkdir(parents=True, exist_ok=True)
    else:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        Path(target).touch()
    calls.mount(source, target, None, calls.MS_BIND | calls.MS_REC)


# --- in the worker itself ---


def confine(
    place: Place, limits: dict[str, Any], layers: list[Layer], *, cuda: bool, without: Sequence[str] = ()
) -> list[Layer]:
    """Give up rights for good: limits, new privileges, capabilities, files, system calls.

    Layers named in `without` are left out on purpose, to find the one that a machine cannot bear.
    """
    own_user = any(layer.name == USER and layer.active for layer in layers)
    actions: dict[str, Callable[[], None]] = {
        "rlimits": lambda: _limit(limits, cuda=cuda, own_user=own_user),
        "no new privileges": lambda: calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1),
        "no capabilities": calls.drop_capabilities,
        "landlock": lambda: _landlock(place),
        "seccomp": calls.install_seccomp,
    }
    reasons = {name: SWITCHED_OFF if name in without else _attempt(action) for name, action in actions.items()}
    return [Layer(name, not reason, reason) for name, reason in reasons.items()]


def _limit(limits: dict[str, Any], *, cuda: bool, own_user: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _lower(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _lower(resource.RLIMIT_NOFILE, 4096)
    if own_user:  # elsewhere it would count all that this user runs; root is exempt, and left to the guard
        _lower(resource.RLIMIT_NPROC, most_tasks())
    if not cuda:  # CUDA reserves far more address space than it uses
        _lower(resource.RLIMIT_DATA, limits["memory_bytes"])


def _lower(kind: int, value: int) -> None:
    _soft, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def _landlock(place: Place) -> None:
    abi = calls.landlock_abi()
    if not abi:
        raise OSError(errno.ENOSYS, "the kernel has no Landlock, or it is off")
    full = calls.all_file_rights(abi)
    touch = calls.READ | calls.WRITE_FILE | calls.TRUNCATE | calls.IOCTL_DEVICE
    rules = [(path, calls.READ) for path in (*place.readable, "/proc")]
    rules += [("/dev", calls.READ_DIR), ("/proc/self", touch), *((path, touch) for path in _device_paths())]
    rules += [(path, full) for path in (place.scratch, place.cache) if path]
    if place.private:
        rules += [("/tmp", full), ("/dev/shm", full)]
    calls.landlock(rules, abi)


def _device_paths() -> Iterable[str]:
    yield from (f"/dev/{name}" for name in DEVICES)
    for pattern in DEVICE_PATTERNS:
        yield from (str(path) for path in Path("/dev").glob(pattern))


# --- asked from outside ---


def probe() -> list[Layer]:
    """Build the whole sandbox in a throw-away child and say, layer by layer, what holds on this machine."""
    scratch = tempfile.mkdtemp(prefix="overnight-probe-")
    try:
        answer = json.loads(_in_child(lambda: _probe(scratch)))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [Layer(*layer) for layer in answer or [("sandbox", False, "the trial ended without an answer")]]


def _probe(scratch: str) -> object:
    layers = enter_namespaces(support())

    def inside() -> object:
        place = private_root(Place(scratch, None, readable_folders(), ()), layers, 1 << 24)
        limits = {"file_bytes": 1 << 24, "processes": 64, "memory_bytes": 1 << 32}
        return [*layers, *confine(place, limits, layers, cuda=False)]

    return json.loads(_in_child(inside))


def _in_child(action: Callable[[], object]) -> str:
    """Run an action in a fork and return its answer as JSON, "null" when it died."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.write(writer, json.dumps(action()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        text = answer.read().decode()
    os.waitpid(pid, 0)
    return text or "null"
