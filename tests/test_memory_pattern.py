"""The pattern's block: placement by best fit, and what is not part of it."""

from onnx_sublinear.memory_pattern import pattern_block
from onnx_sublinear.run_memory import Allocation, run_memory
from onnx_sublinear.runtime_model import Kernel, RuntimeGraph, simulate

KIB, MIB = 1 << 10, 1 << 20


def straight(sizes, readers=()):
    """x -> v1 -> v2 ..., of the given sizes, the last one an output; `readers`: (value, later kernel), more reads."""
    graph = RuntimeGraph()
    graph.add_value("x", 0, 0, external=True)
    for i, size in enumerate(sizes, 1):
        graph.add_value(f"v{i}", size, i, output=i == len(sizes))
    for k in range(len(sizes)):
        graph.kernels.append(Kernel((k, *(v for v, at in readers if at == k)), (k + 1,)))
    return graph


def block(graph, **options):
    order = range(len(graph.kernels))
    return pattern_block(graph, order, simulate(graph, order), **options)


def test_a_dead_tensors_place_is_taken_again():
    assert block(straight([1024, 512, 1024, 256])) == (1536, {1, 2, 3})


def test_a_gap_is_taken_where_it_fits_best():
    """v2 stays at [4K, 5K); v4 fits behind v3 at [1K, 2K), so that v5 finds room behind it."""
    graph = straight([4 * KIB, KIB, KIB, KIB, 2 * KIB, 256], readers=[(2, 5)])
    assert block(graph)[0] == 5 * KIB


def test_outputs_and_unplanned_values_are_left_out():
    assert block(straight([1024, 512, 256]), is_planned=lambda v: v != 2) == (1024, {1})


def growth(graph, arena, pattern, **options):
    order = range(len(graph.kernels))
    return run_memory(graph, order, simulate(graph, order), Allocation(arena, pattern), **options)


def test_without_arena_and_pattern_each_run_takes_the_simulated_peak():
    graph = straight([MIB, 2 * MIB, MIB])
    peak = simulate(graph, range(3)).peak_bytes
    assert growth(graph, False, False).grown_bytes == (peak, peak)


def test_the_arena_keeps_what_the_first_run_took():
    taken = growth(straight([MIB, 2 * MIB, MIB]), True, False)
    assert taken.grown_bytes[0] > 3 * MIB
    assert taken.grown_bytes[1] == 0
    assert taken.held_bytes[1] == taken.grown_bytes[0]


def test_the_stock_build_takes_the_block_in_the_second_run_beside_the_first_runs_chunks():
    # at [2, 2, 2] MiB regions are of 2 MiB each; the block of 4 MiB fits in none of them
    graph = straight([2 * MIB, 2 * MIB, 2 * MIB])
    stock, training = (growth(graph, True, True, training=t).grown_bytes for t in (False, True))
    assert stock[1] >= 4 * MIB
    assert training[1] == 0


def test_weights_lie_in_the_training_builds_arena_before_the_first_run():
    graph = straight([100 * KIB, 100 * KIB])
    graph.weights = [4]
    assert growth(graph, True, False, training=True).grown_bytes == (0, 0)
    assert growth(graph, True, False).grown_bytes[0] > MIB


def test_scratch_on_the_heap_never_enters_the_arena():
    graph = straight([100 * KIB, 100 * KIB])
    graph.kernels[1].workspace_bytes = 5 * MIB
    inside = growth(graph, True, False).grown_bytes
    graph.kernels[1].on_heap = True
    outside = growth(graph, True, False).grown_bytes
    assert inside[0] > 8 * MIB > outside[0] > 6 * MIB
    assert outside[1] == 5 * MIB


def test_small_blocks_can_be_left_out():
    graph = straight([KIB, 8 * KIB, KIB])
    assert growth(graph, False, False, least_bytes=4 * KIB).grown_bytes == (8 * KIB, 8 * KIB)
