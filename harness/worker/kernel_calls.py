"""Linux calls that Python lacks, by ctypes: namespaces, mounts, Landlock, seccomp, capabilities."""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
ALL_NAMESPACES = 0x7E020000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY = 1

PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
SECCOMP_MODE_FILTER = 2

# numbers that x86-64 and aarch64 share (added to Linux after 2018)
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
SYS_MOUNT_SETATTR = 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446


def check(result: int, what: str) -> int:
    """Turn -1 into an OSError that names the call."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int = 0, extra: int = 0) -> None:
    """prctl(2); raises OSError."""
    check(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(extra), 0, 0), f"prctl {option}")


def rename(name: str) -> None:
    """Show this process under its own name."""
    check(libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0), "prctl PR_SET_NAME")


def unshare(flags: int) -> None:
    """unshare(2); raises OSError."""
    check(libc.unshare(flags), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2); raises OSError."""
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    check(libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount {target}")


def unmount_lazily(target: str) -> None:
    """umount2(2) with MNT_DETACH; raises OSError."""
    check(libc.umount2(target.encode(), MNT_DETACH), f"umount {target}")


def pivot_root(new_root: str, old_root: str) -> None:
    """pivot_root(2); raises OSError."""
    number = SYS_PIVOT_ROOT[platform.machine()]
    check(libc.syscall(number, new_root.encode(), old_root.encode()), "pivot_root")


def set_read_only(target: str, *, read_only: bool) -> None:
    """mount_setattr(2) over a mount and all below it when setting, over the mount alone when clearing."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY * read_only, MOUNT_ATTR_RDONLY * (not read_only), 0, 0)
    flags = AT_RECURSIVE if read_only else 0
    arguments = (AT_FDCWD, target.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))
    check(libc.syscall(SYS_MOUNT_SETATTR, *arguments), f"mount_setattr {target}")


def drop_capabilities() -> None:
    """Empty the bounding, ambient, permitted, effective and inheritable sets."""
    for capability in range(64):
        if libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) < 0:
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)
    check(libc.syscall(SYS_CAPSET[platform.machine()], header, bytes(24)), "capset")


# --- Landlock (linux/landlock.h) ---

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
TRUNCATE, IOCTL_DEVICE = 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
ON_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
TCP_BIND_AND_CONNECT = 3
SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def landlock_abi() -> int:
    """Landlock's version on this kernel, 0 when it is absent or off."""
    return max(0, int(libc.syscall(SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)))


def all_file_rights(abi: int) -> int:
    """Every file-system right that this version knows."""
    newest = 12 + (abi >= 2) + (abi >= 3) + (abi >= 5)
    return (1 << (newest + 1)) - 1


def landlock(rules: Sequence[tuple[str, int]], abi: int) -> None:
    """Deny every file access but those of `rules` (path, rights), TCP, and signals to outsiders, as far as `abi` goes.

    Paths that do not exist are left out. Raises OSError.
    """
    handled = all_file_rights(abi)
    net = TCP_BIND_AND_CONNECT if abi >= 4 else 0
    scope = SCOPE_ABSTRACT_SOCKETS_AND_SIGNALS if abi >= 6 else 0
    attributes = struct.pack("QQQ", handled, net, scope)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    size = ctypes.c_size_t(len(attributes))
    ruleset = check(libc.syscall(SYS_LANDLOCK_CREATE, attributes, size, 0), "landlock_create_ruleset")
    try:
        for path, rights in rules:
            _allow(ruleset, path, rights & handled)
        check(libc.syscall(SYS_LANDLOCK_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # an allowance for what is not there (or not reachable) is nothing
        return
    try:
        if not Path(path).is_dir():
            rights &= ON_FILES
        rule = struct.pack("=Qi", rights, descriptor)
        check(libc.syscall(SYS_LANDLOCK_ADD, ruleset, 1, rule, 0), f"landlock_add_rule {path}")
    finally:
        os.close(descriptor)


# --- seccomp ---

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
DENIED = {  # name: (x86-64, aarch64); None where the call does not exist
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_getfd": (438, 438),
    "kcmp": (312, 272), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268),
    "unshare": (272, 97), "open_by_handle_at": (304, 265), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "iopl": (172, None), "ioperm": (173, None),
    "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip
SOCKET = {"x86_64": 41, "aarch64": 198}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
AF_UNIX = 1
EPERM, ENOSYS = 1, 38
ALLOW, ERRNO, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
X32_BIT = 0x40000000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
AT_NUMBER, AT_ARCH, AT_FIRST_ARGUMENT = 0, 4, 16


def seccomp_program(machine: str) -> bytes:
    """The BPF filter of one architecture (`x86_64` or `aarch64`); raises KeyError for another."""
    architecture = AUDIT_ARCH[machine]
    column = list(AUDIT_ARCH).index(machine)
    steps = [
        (LOAD, 0, 0, AT_ARCH),
        (JUMP_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, KILL_PROCESS),
        (LOAD, 0, 0, AT_NUMBER),
    ]
    if machine == "x86_64":
        steps += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, ERRNO | EPERM)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            steps += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | EPERM)]
    steps += [
        # glibc falls back from clone3, whose flags a filter cannot read, to clone
        (JUMP_EQUAL, 0, 1, CLONE3),
        (RETURN, 0, 0, ERRNO | ENOSYS),
        (JUMP_EQUAL, 0, 4, CLONE[machine]),
        (LOAD, 0, 0, AT_FIRST_ARGUMENT),
        (JUMP_ANY_BIT, 0, 1, ALL_NAMESPACES),
        (RETURN, 0, 0, ERRNO | EPERM),
        (RETURN, 0, 0, ALLOW),
        (JUMP_EQUAL, 0, 3, SOCKET[machine]),
        (LOAD, 0, 0, AT_FIRST_ARGUMENT),
        (JUMP_EQUAL, 1, 0, AF_UNIX),
        (RETURN, 0, 0, ERRNO | EPERM),
        (RETURN, 0, 0, ALLOW),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_seccomp() -> None:
    """Deny what no kernel needs: tracing, mounting, key rings, BPF, other sockets than Unix ones. Raises OSError."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(ENOSYS, f"no system call numbers for {machine}")
    code = seccomp_program(machine)
    program = _Program(len(code) // 8, code)
    arguments = (PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(program), 0, 0)
    check(libc.prctl(*arguments), "seccomp")
