"""The arena: regions, splitting, best fit, coalescing, and what stays untouched."""

import pytest

from onnx_sublinear.arena_model import Arena, rounded_block

KIB, MIB = 1 << 10, 1 << 20


def with_table(size):
    """A region and its table of chunks."""
    return size + size // 32


def test_blocks_are_multiples_of_256_bytes():
    assert [rounded_block(n) for n in (1, 256, 257)] == [256, 256, 512]


def test_regions_start_at_one_mebibyte_and_double():
    arena = Arena()
    taken = []
    for size in (100, MIB, 2 * MIB, 100):
        arena.allocate(size)
        taken.append(arena.taken_bytes)
    assert taken == [with_table(MIB), with_table(3 * MIB), with_table(7 * MIB), with_table(7 * MIB)]


def test_a_large_block_gets_the_next_power_of_two_and_the_next_region_is_no_larger():
    arena = Arena()
    arena.allocate(5 * MIB)
    assert arena.taken_bytes == with_table(8 * MIB)
    arena.allocate(8 * MIB)
    assert arena.taken_bytes == with_table(16 * MIB)


def test_regions_as_requested():
    arena = Arena("same_as_requested")
    arena.allocate(5 * MIB + 1)
    assert arena.taken_bytes == with_table(5 * MIB + 256)


def test_nothing_is_taken_for_an_empty_block():
    arena = Arena()
    arena.release(arena.allocate(0))
    assert arena.taken_bytes == 0


def test_released_neighbours_become_one_chunk():
    arena = Arena()
    blocks = [arena.allocate(MIB // 4) for _ in range(4)]
    for block in (blocks[0], blocks[2], blocks[1], blocks[3]):
        arena.release(block)
    arena.allocate(MIB)
    assert arena.taken_bytes == with_table(MIB)


def test_the_smallest_chunk_that_fits_is_taken():
    arena = Arena()
    blocks = [arena.allocate(n * KIB) for n in (300, 8, 100, 8)]
    arena.release(blocks[0])
    arena.release(blocks[2])
    assert arena.allocate(90 * KIB) == blocks[2]


@pytest.mark.parametrize(("size", "left"), [(500 * KIB, True), (600 * KIB, False)])
def test_a_chunk_is_split_only_where_half_of_it_would_be_wasted(size, left):
    arena = Arena()
    arena.allocate(size)
    arena.allocate(400 * KIB)
    assert (arena.taken_bytes == with_table(MIB)) is left


def test_resident_are_the_pages_in_which_blocks_lay():
    arena = Arena()
    arena.release(arena.allocate(10 * KIB))
    arena.allocate(3 * KIB)
    assert arena.resident_bytes == MIB // 32 + 12 * KIB
