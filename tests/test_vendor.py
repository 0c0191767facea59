"""Other hardware: who makes a device, what runs there, what a compiled kernel takes of it."""

import pytest

from agent.proposers.playbook.known import backends
from harness.device import describe
from harness.resources import of_amdgcn, of_cuobjdump
from harness.vendor import vendor, vendor_of


def test_rocm_is_known_by_hip_and_its_architecture_without_features():
    amd = vendor_of("cuda", hip="7.0.2", gcn="gfx942:sramecc+:xnack-")
    assert (amd.name, amd.architecture, amd.backends) == ("rocm", "gfx942", ("triton", "library"))
    assert "gfx942" in amd.skipped["cuda"]
    nvidia = vendor_of("cuda", hip=None, capability=(9, 0))
    assert (nvidia.name, nvidia.architecture) == ("cuda", "sm_90")
    assert "cuda" in nvidia.backends
    assert vendor("cpu").backends == ("cpp", "library")


def test_cuda_files_are_left_out_on_rocm_alone():
    assert backends("cuda", rocm=True) == ("triton",)
    assert backends("cuda", rocm=False) == ("triton", "cuda")
    assert backends("cpu", rocm=True) == ("cpp",)


def test_the_device_says_whose_it_is_and_what_it_cannot_run():
    found = describe({"device": "cpu", "peaks": False})
    assert found["vendor"] == "cpu"
    assert "NVIDIA" in found["skipped_backends"]["cuda"]


AMD = """
    .agpr_count:     0
    .group_segment_fixed_size: 1024
    .sgpr_spill_count: 1
    .vgpr_count:     {vgprs}
    .vgpr_spill_count: {spills}
"""


def test_registers_spills_and_occupancy_are_read_from_amds_metadata():
    taken = of_amdgcn(AMD.format(vgprs=100, spills=2))
    assert (taken.registers, taken.spilled_bytes, taken.shared_bytes) == (100, 12, 1024)
    assert (taken.occupancy, taken.most) == (512 // 104, 8)
    assert "spills 12 bytes" in taken.sentence
    assert of_amdgcn(AMD.format(vgprs=24, spills=0)).occupancy == 8
    with pytest.raises(ValueError, match="vgpr_count"):
        of_amdgcn("s_endpgm")


def test_registers_spills_and_occupancy_are_read_from_cuobjdump():
    taken = of_cuobjdump("Function k:\n REG:128 STACK:16 SHARED:2048 LOCAL:0 CONSTANT[0]:560 TEXTURE:0")
    assert (taken.registers, taken.spilled_bytes, taken.shared_bytes, taken.occupancy) == (128, 16, 2048, 16)
    assert of_cuobjdump("REG:32 STACK:0 SHARED:0 LOCAL:0").sentence.startswith("32 registers a thread, spills nothing")
    with pytest.raises(ValueError, match="no resource usage"):
        of_cuobjdump("Fatbin elf code")
