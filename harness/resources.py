"""What a compiled kernel takes of its device: registers, spills, shared memory and the occupancy they allow.

Read from what compilers leave behind, so no device is needed: from the metadata of AMD's assembly text, and from
`cuobjdump -res-usage` for a cubin. Occupancy is the limit by registers alone, in wavefronts or warps.
"""

import re
from dataclasses import dataclass

VGPRS_PER_SIMD, VGPR_STEP, MOST_WAVES = 512, 8, 8  # CDNA3 and CDNA4: unified file, granule 8, 8 waves a SIMD
REGISTERS_PER_SM, REGISTER_STEP, MOST_WARPS = 65536, 256, 64  # Ampere and Hopper: per warp in steps of 256


@dataclass(frozen=True)
class Resources:
    """Of one kernel: registers per thread, spilled bytes per thread, shared bytes per block, occupancy of `most`."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    occupancy: int
    most: int

    @property
    def sentence(self) -> str:
        """For a proposer: what limits the kernel."""
        spills = f"spills {self.spilled_bytes} bytes a thread" if self.spilled_bytes else "spills nothing"
        return (
            f"{self.registers} registers a thread, {spills}, {self.shared_bytes} bytes of shared memory,"
            f" registers allow {self.occupancy} of {self.most} waves"
        )


def of_amdgcn(text: str) -> Resources:
    """From the assembly text of one kernel for gfx9; raises ValueError when it carries no metadata."""
    vector, accumulation = _field(text, "vgpr_count"), _field(text, "agpr_count", 0)
    spilled = 4 * (_field(text, "vgpr_spill_count", 0) + _field(text, "sgpr_spill_count", 0))
    total = vector + (0 if vector >= accumulation else accumulation)
    waves = min(MOST_WAVES, VGPRS_PER_SIMD // max(VGPR_STEP, -(-total // VGPR_STEP) * VGPR_STEP))
    return Resources(total, spilled, _field(text, "group_segment_fixed_size", 0), waves, MOST_WAVES)


def of_cuobjdump(report: str) -> Resources:
    """From the report of `cuobjdump -res-usage` on one kernel; raises ValueError for a report without usage."""
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", report)}
    if "REG" not in found:
        raise ValueError("cuobjdump reports no resource usage")
    per_warp = max(REGISTER_STEP, -(-found["REG"] * 32 // REGISTER_STEP) * REGISTER_STEP)
    warps = min(MOST_WARPS, REGISTERS_PER_SM // per_warp)
    spilled = found.get("STACK", 0) + found.get("LOCAL", 0)
    return Resources(found["REG"], spilled, found.get("SHARED", 0), warps, MOST_WARPS)


def _field(text: str, name: str, default: int | None = None) -> int:
    found = re.search(rf"^\s*\.{name}:\s*(\d+)\s*$", text, re.MULTILINE)
    if found is None:
        if default is None:
            raise ValueError(f"the assembly has no .{name}")
        return default
    return int(found[1])
