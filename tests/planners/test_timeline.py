"""The incremental profile: at any time equal to that of the simulator, views and in-place kernels included."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import problem, problems

from onnx_sublinear.planners.problem import evaluate
from onnx_sublinear.planners.storages import Storages, lazy, needed, reruns_of, schedule_of
from onnx_sublinear.planners.timeline import Timeline


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems(), st.randoms(use_true_random=False))
def test_the_profile_follows_every_change(p, random):
    storages = Storages(p)
    timeline = Timeline(storages)
    for _ in range(10):
        reruns = list(timeline.reruns())
        v = random.randrange(storages.count)
        if reruns and random.random() < 0.4:
            timeline.remove(*random.choice(reruns))
        elif storages.free[v] and v + 1 < storages.count:
            t = random.randrange(v + 1, storages.count)
            if t not in timeline.times[v]:
                timeline.add(t, v)
        score = evaluate(p, schedule_of(storages, timeline.reruns()))
        assert timeline.peak_bytes == score.peak_bytes
        assert timeline.live.tolist() == Timeline(storages, timeline.reruns()).live.tolist()
        if not any(storages.is_view):
            assert timeline.live.tolist() == score.profile
            assert timeline.cost == score.clone_cost


def test_undo_restores_the_plan():
    p = problem([([], [0]), ([0], [1]), ([1], [2]), ([0, 2], [3])], sizes=[5, 6, 7, 8])
    timeline = Timeline(Storages(p), [(3, 0)])
    before = timeline.live.tolist()
    timeline.journal.clear()
    timeline.remove(3, 0)
    timeline.add(2, 1)
    timeline.undo()
    assert timeline.live.tolist() == before


def test_a_view_follows_what_it_shows():
    """b is a view of a; when a runs again, the view does so just before it is read."""
    p = problem([([], [0]), ([0], [1]), ([], [2]), ([1, 2], [3])], sizes=[4, 4, 9, 1], views={1: ((0, 1),)})
    storages = Storages(p)
    assert schedule_of(storages, [(3, 0)]) == [0, 1, 2, 0, 1, 3]
    assert reruns_of(storages, [0, 1, 2, 0, 1, 3]) == [(3, 0)]


def test_needed_and_lazy_reruns():
    p = problem([([], [0]), ([0], [1]), ([], [2]), ([], [3]), ([1, 3], [4])], sizes=[1] * 5)
    storages = Storages(p)
    assert needed(storages, [(2, 0), (3, 1), (3, 2)]) == [(2, 0), (3, 1)]
    assert lazy(storages, [(2, 0), (3, 1), (3, 2)]) == [(4, 0), (4, 1)]
