import errno
import gc
import mmap
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eke import Checkpointer
from eke.checkpoint import pool as module
from eke.checkpoint.pool import MAX_SLOT_BYTES, PAGE_BYTES, Pool, slot_size
from eke.errors import InputError


@given(st.integers(2 * PAGE_BYTES, 1 << 40))
def test_slots_are_whole_pages_and_at_least_two(pool_bytes):
    slot = slot_size(pool_bytes)
    assert slot % PAGE_BYTES == 0
    assert PAGE_BYTES <= slot <= MAX_SLOT_BYTES
    assert pool_bytes // slot >= 2


@pytest.mark.parametrize("size", [0, 1, 2 * PAGE_BYTES - 1])
def test_too_small(size):
    with pytest.raises(InputError, match="too small"):
        Pool(size)


@pytest.mark.parametrize("size", ["7000TiB", "9e6 PiB"])
def test_more_than_there_can_be(size, tmp_path):
    """More than a process can address, and than a system call's number holds."""
    model = torch.nn.Linear(2, 2)
    with Checkpointer(tmp_path, pool=size) as saver:
        saver.attach(model=model)
        with pytest.raises(
            InputError, match=r"the checkpoints' pool cannot be had .*; got '.* TiB'"
        ):
            saver.save(1)


def test_a_kernel_without_huge_pages(monkeypatch):
    class Memory(mmap.mmap):
        def madvise(self, option, *more):
            asked.append(option)
            if option == mmap.MADV_HUGEPAGE:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().madvise(option, *more)

    asked = []
    monkeypatch.setattr("eke.checkpoint.pool.mmap.mmap", Memory)
    pool = Pool(64 << 20)
    assert asked == [mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE]
    pool.prefault(0)
    assert pool.take() == 0


@given(st.lists(st.integers(0, 20)))
def test_any_order_of_taking_and_giving_back(choices):
    pool, taken = Pool(16 * PAGE_BYTES), []
    for choice in choices:
        if choice % 2 and taken:
            pool.give_back(taken.pop(choice % len(taken)))
        else:
            slot = pool.take()
            assert (slot is None) == (len(taken) == pool.slots)
            if slot is not None:
                assert slot not in taken
                taken.append(slot)
        assert pool.free == pool.slots - len(taken)


def test_slots_are_aligned_apart_and_kept():
    pool = Pool(1 << 20)
    slots = [pool.take() for _ in range(pool.slots)]
    for slot in slots:
        assert pool.array(slot).ctypes.data % mmap.PAGESIZE == 0
        pool.array(slot)[:] = slot
    assert all(np.all(pool.array(slot) == slot) for slot in slots)


def test_the_last_one_given_back_is_taken_first():
    pool = Pool(1 << 20)
    a, b = pool.take(), pool.take()
    pool.give_back(b)
    pool.give_back(a)
    assert pool.take() == a
    with pytest.raises(ValueError, match="not taken"):
        pool.give_back(b)


def test_prefault_touches_what_will_be_used_first():
    pool = Pool(1 << 20)
    fresh = pool.untouched(3 * pool.slot_bytes - 5)
    for slot in fresh:
        pool.prefault(slot)
    assert [pool.take() for _ in fresh] == fresh
    assert pool.untouched(3 * pool.slot_bytes) == []
    assert len(pool.untouched(1 << 60)) == pool.slots - 3


def test_pinned_once_and_let_go_with_the_pool(new_device):
    device, pool = new_device(), Pool(1 << 20)
    pool.pin(None)
    assert device.pinned == []
    pool.pin(device)
    pool.pin(device)
    assert device.pinned == [pool.slots * pool.slot_bytes]
    del pool
    gc.collect()
    assert device.pinned == []


@pytest.mark.parametrize("before", [0, 1])
def test_an_interrupt_loses_no_slot(interrupt, before):
    """Also if somebody takes one before the owner's are given back."""
    struck = 0
    while True:
        pool, owner = Pool(1 << 20), object()
        with interrupt(struck, module) as at:
            for slot in [pool.take(owner), pool.take(owner)]:
                pool.give_back(slot)
        others = [pool.take() for _ in range(before)]
        for slot in pool.owned(owner):
            pool.give_back(slot)
        others += [pool.take() for _ in range(pool.slots - before)]
        assert sorted(others) == list(range(pool.slots))
        assert pool.take() is None
        assert pool.free == 0
        if at.lines <= struck:
            break
        struck += 1
    assert struck > 10
