"""The shared region: what goes in comes out with its strides, in bounds, at addresses nobody can guess."""

import ctypes
import os
from itertools import pairwise

import pytest
import torch

from harness.arena import Arena, ArenaFull, contiguous_stride


@pytest.fixture
def arena():
    made = Arena("cpu", 1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(7, 5),
        lambda: torch.randn(7, 5).t(),
        lambda: torch.randn(7, 10)[:, ::2],
        lambda: torch.randn(1, 5).expand(7, 5),
        lambda: torch.randn(3, 9)[1:, 2:],
        lambda: torch.randn(4, 4).to(torch.bfloat16),
        lambda: torch.randint(-9, 9, (6,)),
        lambda: torch.rand(5) > 0.5,
        lambda: torch.tensor(3.5),
        lambda: torch.empty(0, 4),
        lambda: torch.randn(3, dtype=torch.complex64),
    ],
)
def test_a_tensor_comes_back_with_its_values_and_strides(arena, make):
    tensor = make()
    back = arena.tensor(arena.place(tensor))
    assert back.dtype == tensor.dtype
    assert back.shape == tensor.shape
    assert back.stride() == tensor.stride()
    assert torch.equal(back, tensor)


def test_a_slot_covers_exactly_the_storage_its_tensor_touches(arena):
    expanded = arena.place(torch.randn(1, 5).expand(1000, 5))
    stepped = arena.place(torch.randn(4, 10)[:, ::3])
    assert expanded.nbytes == 5 * 4
    assert stepped.nbytes == (1 + 3 * 10 + 3 * 3) * 4


def test_slots_do_not_overlap_and_are_aligned(arena):
    slots = sorted((arena.reserve((13,), torch.float32) for _ in range(50)), key=lambda slot: slot.offset)
    assert all(slot.offset % 64 == 0 for slot in slots)
    assert all(low.offset + low.nbytes <= high.offset for low, high in pairwise(slots))


def test_offsets_differ_from_one_round_to_the_next(arena):
    offsets = set()
    for _ in range(20):
        arena.reset()
        offsets.add(arena.reserve((4,), "float32").offset)
    assert len(offsets) > 5


def test_an_output_slot_is_poisoned_with_values_no_kernel_returns(arena):
    assert arena.tensor(arena.reserve((8,), "float16")).isnan().all()
    assert (arena.tensor(arena.reserve((8,), "int64")) == -1).all()
    slot = arena.place(torch.zeros(8))
    arena.poison(slot)
    assert arena.tensor(slot).isnan().all()


def test_a_digest_changes_with_one_element_and_with_the_gaps_of_a_view(arena):
    slot = arena.place(torch.zeros(6, 8)[:, ::2])
    before = arena.digest(slot)
    assert arena.digest(slot) == before
    arena.tensor(slot)[5, 3] = 1e-30
    changed = arena.digest(slot)
    assert changed != before
    arena.tensor(slot).as_strided((1,), (1,), arena.tensor(slot).storage_offset() + 1)[0] = 1.0
    assert arena.digest(slot) not in {before, changed}


def test_what_does_not_fit_is_refused_by_size(arena):
    with pytest.raises(ArenaFull, match="no room for 4194304 bytes"):
        arena.place(torch.zeros(1 << 20))
    arena.place(torch.zeros(10))


def test_nobody_who_holds_the_descriptor_can_shrink_the_region_under_the_judge(arena):
    _, (descriptor,) = arena.invitation()
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 0)


def test_views_share_memory_with_whoever_maps_the_descriptor(arena):
    slot = arena.place(torch.arange(4, dtype=torch.int32))
    _, (descriptor,) = arena.invitation()
    os.pwrite(descriptor, bytes(ctypes.c_int32(77)), slot.offset + 8)
    assert arena.tensor(slot).tolist() == [0, 1, 77, 3]


def test_a_wiped_arena_keeps_nothing_of_what_was_in_it(arena):
    slot = arena.place(torch.full((1000,), 7.0))
    arena.wipe()
    assert not (arena.tensor(slot) == 7.0).any()
    again = arena.place(torch.arange(5.0))
    assert arena.tensor(again).tolist() == [0, 1, 2, 3, 4]


def test_contiguous_strides_equal_torchs():
    for shape in ((), (3,), (2, 3, 4), (2, 0, 4), (1, 5)):
        assert contiguous_stride(shape) == torch.empty(shape).stride()
