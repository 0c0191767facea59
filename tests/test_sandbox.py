"""What a kernel cannot do from inside a worker, tried by real kernels, with every layer that this host has."""

import os
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import torch

from harness.arena import Arena
from harness.worker import kernel_calls, sandbox
from harness.workshop import KernelRaised, Limits, WorkerDied, Workshop

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def shop():
    os.environ["OVERNIGHT_TEST_API_KEY"] = "sk-secret-of-the-user"
    with Workshop("cpu", Limits(scratch_bytes=64 << 20, file_bytes=32 << 20), threads=1) as opened:
        yield opened
    del os.environ["OVERNIGHT_TEST_API_KEY"]


@pytest.fixture(scope="module")
def arena():
    made = Arena("cpu", 1 << 20)
    yield made
    made.close()


def attempt(shop, arena, body: str, **names: object) -> str:
    """Run `body` inside a kernel; what it printed. Raises what the worker raised."""
    prologue = "import os, socket, subprocess, sys, ctypes, glob\nfrom pathlib import Path\n"
    constants = "".join(f"{name} = {value!r}\n" for name, value in names.items())
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    source = f"{prologue}{constants}def kernel_fn(x):\n{lines}    return x + 1\n"
    slot, out = arena.place(torch.ones(2)), arena.reserve((2,), "float32")
    with shop.open(source, arena) as worker:
        worker.load(20)
        worker.call([slot], {}, [out], 60)
    arena.reset()
    return worker.log


def refused(shop, arena, body: str, **names: object) -> str:
    """Run `body`, which must raise an OSError; its type."""
    with pytest.raises(KernelRaised) as caught:
        attempt(shop, arena, body, **names)
    assert caught.value.type_name in {"PermissionError", "FileNotFoundError", "OSError"}, caught.value
    return caught.value.type_name


needs_root_of_its_own = pytest.mark.skipif(
    not {layer.name: layer.active for layer in sandbox.probe()}.get("private root"),
    reason="this host forbids user namespaces or mounts in them",
)


def test_every_layer_reports_itself_and_the_workers_report_the_same(shop):
    probed = {layer.name: layer for layer in sandbox.probe()}
    assert {"user namespace", "pid namespace", "network namespace", "private root", "seccomp"} <= set(probed)
    for layer in probed.values():
        assert layer.active or layer.reason
        assert (layer.name in shop.layers) == layer.active
    assert probed["seccomp"].active
    assert probed["no new privileges"].active


def test_the_probe_changes_nothing_in_the_process_that_asks():
    def state() -> tuple[object, ...]:
        status = Path("/proc/self/status").read_text()
        kept = [line for line in status.splitlines() if line.startswith(("Cap", "NoNewPrivs", "Seccomp", "Uid"))]
        return kept, Path("/proc/self/ns/net").readlink(), Path.cwd()

    before = state()
    sandbox.probe()
    assert state() == before


def test_no_secret_of_the_environment_reaches_a_kernel(shop, arena):
    printed = attempt(shop, arena, "print(dict(os.environ))\nprint(Path('/proc/self/environ').read_bytes())")
    assert "sk-secret" not in printed
    assert "KEY" not in printed


def test_no_process_of_the_host_can_be_seen(shop, arena):
    body = """
for path in glob.glob('/proc/[0-9]*/environ'):
    try:
        if b'sk-secret' in Path(path).read_bytes(): print('leaked', path)
    except OSError: pass
"""
    assert "leaked" not in attempt(shop, arena, body)


@pytest.mark.parametrize(
    "path",
    [
        REPOSITORY / "harness" / "workshop.py",
        REPOSITORY / "pyproject.toml",
        Path.home() / ".netrc",
        Path("/etc/shadow"),
        Path("/proc/1/environ"),
    ],
)
def test_what_is_not_its_business_cannot_be_read(shop, arena, path):
    refused(shop, arena, "print(open(path).read())", path=str(path))


def test_the_home_folder_shows_nothing_but_the_interpreter(shop, arena, tmp_path_factory):
    secret = Path.home() / f".overnight-test-{uuid.uuid4().hex}"
    secret.write_text("secret")
    try:
        refused(shop, arena, "print(open(path).read())", path=str(secret))
    finally:
        secret.unlink()


@pytest.mark.parametrize("folder", [str(REPOSITORY), "/", "/usr/lib", "/etc", "/var", str(Path.home()), "/dev"])
def test_nothing_can_be_written_outside_the_scratch_folder(shop, arena, folder):
    name = f"{folder.rstrip('/')}/overnight-test-{uuid.uuid4().hex}"
    if folder.startswith("/tmp/"):  # a checkout there: what a worker writes in its own /tmp vanishes with it
        attempt(shop, arena, "open(name, 'w').write('x')", name=name)
    else:
        refused(shop, arena, "open(name, 'w').write('x')", name=name)
    assert not Path(name).exists()


def test_the_interpreters_own_packages_cannot_be_changed(shop, arena):
    refused(shop, arena, "import torch\nopen(torch.__file__, 'a').write('#')")


@needs_root_of_its_own
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm", "/var/tmp"])
def test_what_a_kernel_leaves_in_shared_folders_is_gone_for_everybody_else(shop, arena, folder):
    name = f"{folder}/overnight-test-{uuid.uuid4().hex}"
    attempt(shop, arena, "open(name, 'w').write('x')\nassert os.path.exists(name)", name=name)
    assert not Path(name).exists()
    assert "still there" not in attempt(shop, arena, "if os.path.exists(name): print('still there')", name=name)


def test_caches_and_home_are_private_to_a_worker_and_start_empty(shop, arena):
    body = """
for name in ('HOME', 'TMPDIR', 'TRITON_CACHE_DIR', 'TORCHINDUCTOR_CACHE_DIR', 'TORCH_EXTENSIONS_DIR'):
    folder = os.environ[name]
    assert not os.listdir(folder), (name, os.listdir(folder))
    Path(folder, 'planted').write_text('x')
"""
    attempt(shop, arena, body)
    attempt(shop, arena, body)


@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_no_connection_can_be_opened_loopback_included(shop, arena, kind):
    with socket.socket(socket.AF_INET, getattr(socket, kind)) as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "SOCK_STREAM":
            listener.listen()
        body = f"""
channel = socket.socket(socket.AF_INET, socket.{kind})
channel.connect(('127.0.0.1', port))
channel.send(b'hello')
"""
        refused(shop, arena, body, port=listener.getsockname()[1])


def test_an_abstract_unix_socket_of_the_host_cannot_be_reached(shop, arena):
    name = f"\0overnight-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        with pytest.raises(KernelRaised, match=r"refused|not permitted"):
            attempt(shop, arena, "socket.socket(socket.AF_UNIX).connect(name)", name=name)


@needs_root_of_its_own
def test_a_unix_socket_file_of_the_host_cannot_be_reached(shop, arena):
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/docker.sock")
        listener.listen()
        refused(shop, arena, "socket.socket(socket.AF_UNIX).connect(name)", name=f"{folder}/docker.sock")


@pytest.mark.parametrize(
    "call",
    ["unshare", "ptrace", "mount", "bpf", "keyctl", "perf_event_open", "userfaultfd", "io_uring_setup", "setns"],
)
def test_system_calls_that_no_kernel_needs_are_refused(shop, arena, call):
    numbers = dict(zip(kernel_calls.AUDIT_ARCH, kernel_calls.DENIED[call], strict=True))
    body = """
libc = ctypes.CDLL(None, use_errno=True)
print('result', libc.syscall(number, 0, 0, 0, 0, 0), 'errno', ctypes.get_errno())
"""
    assert "result -1 errno 1" in attempt(shop, arena, body, number=numbers[os.uname().machine])


def test_no_way_leads_back_to_capabilities(shop, arena):
    body = """
status = dict(line.split(':\\t', 1) for line in Path('/proc/self/status').read_text().splitlines() if ':\\t' in line)
assert int(status['CapEff'], 16) == int(status['CapPrm'], 16) == int(status['CapBnd'], 16) == 0, status
assert status['NoNewPrivs'] == '1' and status['Seccomp'] == '2'
child = subprocess.run(['cat', '/proc/self/status'], capture_output=True, text=True).stdout
assert 'CapEff:\\t0000000000000000' in child, child
"""
    attempt(shop, arena, body)


def test_kernel_settings_of_the_machine_cannot_be_written(shop, arena):
    for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/sys/kernel/mm/transparent_hugepage/enabled"):
        refused(shop, arena, "open(path, 'w').write('x')", path=path)


def test_block_devices_and_memory_cannot_be_opened(shop, arena):
    for path in [*Path("/dev").glob("vd*"), *Path("/dev").glob("sd*"), Path("/dev/mem"), Path("/dev/kmsg")]:
        refused(shop, arena, "open(path, 'rb').read(1)", path=str(path))


def test_the_judge_the_guard_and_the_warm_parent_cannot_be_signalled(shop, arena):
    body = """
for pid in (judge, 1, os.getppid()):
    try: os.kill(pid, 9)
    except OSError: pass
"""
    attempt(shop, arena, body, judge=shop._warm.pid)
    assert shop._warm.poll() is None


def test_descriptors_of_the_judge_are_not_inherited(shop, arena):
    printed = attempt(shop, arena, "print(sorted(os.listdir('/proc/self/fd')))")
    assert len(eval(printed)) <= 6, printed


@needs_root_of_its_own
def test_a_full_scratch_folder_is_an_error_of_the_kernel_and_no_more(shop, arena):
    body = """
for index in range(8):
    with open(f'big{index}', 'wb') as file:
        for _ in range(30): file.write(b'x' * (1 << 20))
"""
    with pytest.raises(KernelRaised, match="No space left"):
        attempt(shop, arena, body)
    attempt(shop, arena, "pass")


def test_a_single_file_has_a_largest_size(shop, arena):
    with pytest.raises((KernelRaised, WorkerDied), match=r"File too large|SIGXFSZ"):
        attempt(shop, arena, "open('big', 'wb').write(b'x' * (40 << 20))")


def test_a_compiler_works_inside_and_its_library_can_be_loaded_and_called(shop, arena):
    program = """
extern "C" int f(int n) {
  int s = 0;
  #pragma omp parallel for reduction(+:s)
  for (int i = 0; i < n; ++i) s += i;
  return s;
}
"""
    body = """
Path('k.cpp').write_text(program)
subprocess.run(['g++', '-O2', '-fopenmp', '-shared', '-fPIC', 'k.cpp', '-o', 'k.so'], check=True)
assert ctypes.CDLL('./k.so').f(10) == 45
"""
    attempt(shop, arena, body, program=program)


def test_a_worker_cannot_make_a_namespace_in_which_it_would_be_root(shop, arena):
    body = "assert subprocess.run(['unshare', '-Ur', 'true']).returncode != 0"
    attempt(shop, arena, body)


def test_the_filter_is_built_for_both_architectures():
    for machine in ("x86_64", "aarch64"):
        program = kernel_calls.seccomp_program(machine)
        assert len(program) % 8 == 0
        assert len(program) // 8 < 4096
    with pytest.raises(KeyError):
        kernel_calls.seccomp_program("riscv64")


@pytest.mark.slow
@needs_root_of_its_own
def test_where_user_namespaces_are_forbidden_the_other_layers_hold_and_say_which_are_missing():
    tests = ["tests/test_workshop.py", "tests/test_sandbox.py", "-m", "not slow", "-k", "detached or bomb or written"]
    script = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    command = ["unshare", "-Ur", "sh", "-c", script, "sh", sys.executable, "-m", "pytest", "-rs", *tests]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout
    assert "passed" in result.stdout
    probe = "from harness.worker import sandbox\nfor layer in sandbox.probe(): print(layer.name, layer.active)"
    command = ["unshare", "-Ur", "sh", "-c", script, "sh", sys.executable, "-c", probe]
    said = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60).stdout
    assert "user namespace False" in said
    assert "seccomp True" in said


def test_a_layer_can_be_left_out_and_is_then_reported_as_missing(arena):
    with Workshop("cpu", without=("seccomp", "network namespace"), threads=1) as shop:
        assert "seccomp: missing (switched off)" in shop.layers
        assert "network namespace: missing (switched off)" in shop.layers
        assert "rlimits" in shop.layers


def test_a_workshop_without_a_sandbox_says_so(arena):
    with Workshop("cpu", sandbox=False, threads=1) as shop:
        assert shop.layers == ("sandbox: missing (switched off)",)
