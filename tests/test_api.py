"""`optimize` and `inspect`: arguments, report, errors; the model given is never changed."""

import json
import subprocess
import sys
from dataclasses import fields

import onnx
import pytest
from graphs import deep_chain, model

import onnx_sublinear
from models.files import GOLDEN_DIR
from onnx_sublinear.api import Report, inspect, optimize
from onnx_sublinear.errors import BudgetError, GraphError, ModelFileError, UsageError
from onnx_sublinear.passes.rewriting import role_of
from onnx_sublinear.planners import STRATEGIES, RematPlan
from onnx_sublinear.rewrite_check import check_rewrite

GPT = GOLDEN_DIR / "gpt4.onnx"
SYMBOLIC = GOLDEN_DIR / "mlp_symbolic.onnx"
INFERENCE = "inference (float[64] x) => (float loss) { h = Tanh (x)\n loss = ReduceSum <keepdims = 0> (h) }"


def data(proto):
    return proto.SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def deep():
    return deep_chain(24)


@pytest.fixture(scope="module")
def result(deep):
    return optimize(deep)


class TestInput:
    def test_a_path_and_a_model_give_the_same(self, deep, result, tmp_path):
        path = tmp_path / "deep.onnx"
        onnx.save(deep, path)
        assert data(optimize(path).model) == data(optimize(str(path)).model) == data(result.model)

    def test_the_model_given_is_not_changed(self, deep):
        before = data(deep)
        optimize(deep)
        inspect(deep)
        assert data(deep) == before

    def test_the_file_given_is_not_changed(self, deep, tmp_path):
        path = tmp_path / "deep.onnx"
        onnx.save(deep, path)
        before = path.read_bytes()
        optimize(path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["deep.onnx"]

    def test_two_runs_give_the_same_bytes(self, deep, result):
        assert data(optimize(deep).model) == data(result.model)

    def test_two_processes_give_the_same_bytes(self, deep, result, tmp_path):
        """Names in sets and dicts must not decide: hashes of strings differ from process to process."""
        path = tmp_path / "deep.onnx"
        onnx.save(deep, path)
        code = (
            "import sys, hashlib, onnx_sublinear as o; m = o.optimize(sys.argv[1]).model; "
            "print(hashlib.sha256(m.SerializeToString(deterministic=True)).hexdigest())"
        )
        digests = {
            subprocess.run(
                [sys.executable, "-c", code, str(path)],
                env={"PYTHONHASHSEED": seed, "PATH": ""},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2")
        }
        assert len(digests) == 1

    def test_no_file_is_a_model_error(self, tmp_path):
        with pytest.raises(ModelFileError):
            optimize(tmp_path / "nothing.onnx")

    def test_a_broken_graph_is_a_model_error(self):
        broken = model("g (float[8] x) => (float loss) { loss = ReduceSum <keepdims = 0> (missing) }")
        with pytest.raises(GraphError, match="'missing'"):
            optimize(broken)

    def test_node_names_that_come_twice_are_made_different(self, deep):
        twice = onnx.ModelProto()
        twice.CopyFrom(deep)
        for node in twice.graph.node:
            node.name = "same"
        names = [n.name for n in optimize(twice).model.graph.node]
        assert len(set(names)) == len(names)


class TestReport:
    def test_every_figure_fits_the_model(self, deep, result):
        report = result.report
        roles = [role_of(n) for n in result.model.graph.node]
        assert report.clones == roles.count("clone") == sum(report.recomputed.values()) == result.plan.clones > 0
        assert report.barriers == roles.count("barrier") > 0
        assert report.nodes_before == len(deep.graph.node)
        assert report.nodes_after == len(result.model.graph.node)
        assert report.nodes_after == report.nodes_before + report.clones + report.barriers
        assert set(report.recomputed) <= {"MatMul", "Tanh"}
        assert report.strategy == result.plan.strategy in STRATEGIES
        assert (report.unknown_size_names, report.unknown_size_tensors) == ((), 0)
        assert report.warnings == ()
        assert 0 < report.seconds < 60

    def test_peaks_and_bounds_are_in_order(self, result):
        report = result.report
        assert report.peaks_before.keys() == report.peaks_after.keys() == {"default", "priority"}
        assert report.peak_before_bytes == report.peaks_before["default"]
        assert report.peak_after_bytes == max(report.peaks_after.values())
        assert 0 < report.lower_bound_bytes <= report.peak_after_bytes < 0.6 * report.peak_before_bytes
        assert report.lower_bound_bytes <= report.arena_bytes <= 1.1 * report.peak_after_bytes
        assert report.inplace_bytes > 0

    def test_shares_are_those_of_the_plan(self, result):
        report = result.report
        assert 0 < report.overhead == result.plan.overhead < report.forward_share == result.plan.forward_share <= 1

    def test_it_has_no_field_that_is_not_documented(self):
        assert all(f"        {f.name}:" in Report.__doc__ for f in fields(Report))

    def test_the_plan_in_the_file_is_the_arena(self, result):
        (text,) = [p.value for p in result.model.metadata_props if p.key == "onnx_sublinear.memory_plan"]
        assert json.loads(text)["arena_bytes"] == result.report.arena_bytes

    def test_the_rewrite_is_proven(self, deep, result):
        assert isinstance(result.plan, RematPlan)
        assert check_rewrite(deep, result.model) == []

    def test_unknown_sizes_are_named(self, deep):
        odd = onnx.ModelProto()
        odd.CopyFrom(deep)
        odd.opset_import.add(domain="lab", version=1)
        node = next(n for n in odd.graph.node if n.name == "tanh3")
        node.op_type, node.domain = "Wave", "lab"
        report = optimize(odd).report
        assert "y4" in report.unknown_size_names
        assert report.unknown_size_tensors == len(report.unknown_size_names)
        assert any("'lab'" in line and "Wave" in line for line in report.warnings)


class TestProgress:
    def test_stages_are_announced_in_order(self, deep):
        stages = []
        optimize(deep, progress=stages.append)
        assert stages == ["sizes", "recompute", "inplace", "order", "share"]

    def test_passes_given_are_announced(self, deep):
        stages = []
        optimize(deep, passes="order,share", progress=stages.append)
        assert stages == ["sizes", "order", "share"]


class TestBudget:
    def test_bytes_sizes_and_shares_are_the_same_budget(self, deep, result):
        budget = (result.report.peak_after_bytes + result.report.peak_before_bytes) // 2 // 1024 * 1024
        by_bytes = optimize(deep, budget=budget)
        assert by_bytes.report.peak_after_bytes <= budget
        assert data(by_bytes.model) == data(optimize(deep, budget=str(budget)).model)
        assert data(by_bytes.model) == data(optimize(deep, budget=f"{budget // 1024}KiB").model)

    @pytest.mark.parametrize("share", ["40%", "60%"])
    def test_a_share_is_of_the_peak_before(self, deep, share):
        report = optimize(deep, budget=share).report
        assert report.peak_after_bytes <= float(share[:-1]) / 100 * report.peak_before_bytes

    def test_a_larger_budget_never_costs_more(self, deep, result):
        low, high = result.report.peak_after_bytes, max(result.report.peaks_before.values())
        overheads = [optimize(deep, budget=low + i * (high - low) // 8).report.overhead for i in range(9)]
        assert overheads == sorted(overheads, reverse=True)
        assert overheads[-1] == 0

    @pytest.mark.parametrize("budget", [1, "64KiB", "1%"])
    def test_below_reach_the_error_says_how_far(self, deep, result, budget):
        with pytest.raises(BudgetError) as caught:
            optimize(deep, budget=budget)
        error = caught.value
        assert error.lower_bound_bytes == result.report.lower_bound_bytes
        assert error.lower_bound_bytes <= error.smallest_peak_bytes <= 1.1 * result.report.peak_after_bytes
        assert str(error.smallest_peak_bytes) in error.message
        assert str(error.lower_bound_bytes) in error.message
        assert error.hint
        assert error.exit_code == 4

    def test_the_smallest_peak_of_the_error_can_be_asked_for(self, deep):
        with pytest.raises(BudgetError) as caught:
            optimize(deep, budget=1)
        budget = caught.value.smallest_peak_bytes
        assert optimize(deep, budget=budget).report.peak_after_bytes <= budget

    def test_a_budget_above_the_peak_changes_nothing(self, deep):
        result = optimize(deep, budget="1GiB")
        assert data(result.model) == data(deep)
        assert result.plan is None
        assert any("within the budget" in note for note in result.report.notes)

    @pytest.mark.parametrize("limit", [0.05, "5%", "0.05"])
    def test_an_overhead_limit_is_kept(self, deep, limit):
        assert 0 < optimize(deep, max_overhead=limit).report.overhead <= 0.05

    def test_a_tiny_overhead_limit_is_a_number_too(self, deep):
        """str(0.00001) is '1e-05'."""
        assert optimize(deep, max_overhead=0.00001).report.overhead <= 0.00001


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "tpu"}, "no target 'tpu'"),
        ({"strategy": "magic"}, "no strategy 'magic'"),
        ({"passes": "fast"}, "no pass 'fast'"),
        ({"passes": "recompute{colour=red}"}, "no option 'colour'"),
        ({"passes": ""}, "no list of passes"),
        ({"passes": "order", "budget": "1KiB"}, "budget"),
        ({"passes": "order", "max_overhead": "1%"}, "overhead"),
        ({"budget": "much"}, "'much'"),
        ({"budget": -5}, "'-5'"),
        ({"max_overhead": "a bit"}, "'a bit'"),
        ({"loss": ["nothing"]}, "'nothing'"),
        ({"dims": {"batch": 4}}, "no symbolic dim 'batch'"),
    ],
    ids=lambda v: json.dumps(v) if isinstance(v, dict) else "",
)
def test_arguments_that_do_not_fit_are_usage_errors(deep, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        optimize(deep, **options)
    assert caught.value.hint
    assert caught.value.exit_code == 2


def test_without_gradients_the_model_is_returned_with_a_note():
    given = model(INFERENCE)
    result = optimize(given)
    assert data(result.model) == data(given)
    assert result.plan is None
    assert any("no gradient section" in note for note in result.report.notes)
    assert (result.report.clones, result.report.barriers, result.report.strategy) == (0, 0, "")


def test_without_a_loss_the_note_says_how_to_name_it():
    result = optimize(model("none (float[64] x) => (float[64] y) { y = Tanh (x) }"))
    assert any("--loss" in note for note in result.report.notes)


def test_passes_replace_the_default_pipeline(deep):
    result = optimize(deep, passes="recompute{strategy=sqrt}")
    roles = [role_of(n) for n in result.model.graph.node]
    assert roles.count("clone") == result.report.clones > 0
    assert roles.count("barrier") == result.report.barriers == 0


def test_the_target_decides_what_runs_in_place(deep):
    assert optimize(deep, target="cuda").report.peak_after_bytes > 0


def test_symbolic_dims_without_a_size_are_noted():
    report = optimize(SYMBOLIC).report
    assert report.unknown_size_tensors > 0
    assert any("--dim batch=N" in note for note in report.notes)
    assert optimize(SYMBOLIC, dims={"batch": 1024}).report.unknown_size_tensors == 0


class TestInspect:
    def test_it_says_what_optimize_starts_from(self, deep, result):
        seen = inspect(deep)
        assert seen.peak_default_bytes == result.report.peaks_before["default"]
        assert seen.peak_priority_bytes == result.report.peaks_before["priority"]
        assert seen.lower_bound_bytes == result.report.lower_bound_bytes
        assert seen.forward_nodes + seen.gradient_nodes == result.report.nodes_before
        assert (seen.forward_nodes, seen.losses) == (49, ("loss",))

    def test_the_timeline_has_its_peak(self, deep):
        seen = inspect(deep)
        assert len(seen.timeline) == len(deep.graph.node)
        assert max(seen.timeline) == seen.peak_default_bytes

    def test_the_largest_tensors_come_first(self, deep):
        sizes = [size for _, size, _ in inspect(deep).largest]
        assert sizes == sorted(sizes, reverse=True)
        assert len(sizes) == 20
        assert inspect(deep).largest[0][1:] == (32768, "Mul")

    def test_a_path_works_and_symbols_are_named(self):
        assert inspect(SYMBOLIC).symbols == ("batch",)
        assert inspect(str(SYMBOLIC), dims={"batch": 8}).unknown_size_names == ()

    def test_the_result_of_optimize_can_be_inspected(self, result):
        seen = inspect(result.model)
        assert {"default": seen.peak_default_bytes, "priority": seen.peak_priority_bytes} == result.report.peaks_after

    def test_arguments_are_checked(self, deep):
        with pytest.raises(UsageError):
            inspect(deep, target="tpu")


class TestImport:
    def test_it_takes_no_heavy_module(self):
        code = (
            "import sys, time; t = time.perf_counter(); import onnx_sublinear; t = time.perf_counter() - t; "
            "print(t, *(m for m in ('onnx', 'numpy', 'onnxruntime', 'torch', 'omnimalloc') if m in sys.modules))"
        )
        seconds, *heavy = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        assert heavy == []
        assert float(seconds) < 0.3

    def test_planning_for_the_default_order_takes_no_runtime(self, tmp_path):
        """For all orders the runtime is asked what it would fuse, where it is installed."""
        code = (
            "import sys, onnx_sublinear; "
            "onnx_sublinear.optimize(sys.argv[1], dims={'batch': 1024}, max_overhead=0.3, robust='default'); "
            "print(*(m for m in ('onnxruntime', 'torch', 'onnx_graphsurgeon') if m in sys.modules))"
        )
        command = [sys.executable, "-c", code, str(SYMBOLIC)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        assert done.stdout.split() == []

    def test_what_is_public_is_there(self):
        assert all(getattr(onnx_sublinear, name) for name in onnx_sublinear.__all__)
        with pytest.raises(AttributeError, match="fast"):
            onnx_sublinear.fast  # noqa: B018
