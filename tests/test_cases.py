"""Situations that broke other tools, through the command line: what is refused, and that what runs gives the same bits.

`cases/build.py` builds one small model per kind of fault; where ../shared/cases is beside the repo, all of its files
are tried as well. Every result is compared with the original at level none, in both execution orders, on several runs.
"""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from cases import build
from judges import SHARED, needs_shared

from onnx_sublinear import api, errors
from onnx_sublinear.cli.app import run
from onnx_sublinear.rewrite_check import check_rewrite

ort = pytest.importorskip("onnxruntime")

SHARED_CASES = SHARED / "cases"
ORDERS = ("DEFAULT", "PRIORITY_BASED")
FORCED = "recompute,inplace,order,share"

# kind -> what `optimize` must at least do to it: "clone", "smaller" or "" (only stay equal).
RUNS = {
    "training_step": "clone",
    "double_precision": "clone",
    "half_precision": "",
    "low_precision_round_trips": "clone",
    "seeded_dropouts": "clone",
    "two_losses": "clone",
    "two_losses_and_constants": "clone",
    "activations_are_outputs": "smaller",
    "passed_through": "clone",
    "outputs_are_weights": "clone",
    "duplicate_outputs": "clone",
    "unread_outputs": "clone",
    "zero_sizes": "clone",
    "same_tensor_twice": "clone",
    "negative_dims": "",
    "captures": "smaller",
    "local_functions": "smaller",
    "empty_optional_names": "clone",
    "overridable_weights": "clone",
    "weights_as_constants": "clone",
    "sparse_weight": "clone",
    "metadata": "clone",
    "sequences": "smaller",
    "strings": "clone",
    "unsorted_nodes": "clone",
    "odd_names": "clone",
    "equal_node_names": "clone",
    "forward_only": "",
    "odd_imports": "clone",
    "old_opset": "clone",
    "empty_graph": "",
    "wrong_rank": "clone",
    "deep_chain": "",
    "diamond_ladder": "",
}
RANDOM = {"unseeded_noise": ("gap", 0, 0), "equal_random_nodes": ("n_same", 0, 64)}
REFUSED = {
    "cycle": ["'a'|'b'", "cycle"],
    "defined_twice": ["'h1'", "twice"],
    "dangling": ["'ghost'"],
    "gradient_node": ["Gradient"],
    "branch_returns_outer": ["'h2'", "If"],
    "wrong_type": ["'h1'", "double", "float"],
    "future_versions": ["99", "999", str(onnx.IR_VERSION)],
    "huge_dims": ["evil"],
    "short_data": ["W1", "40", "4096"],
}


def optimize(source, out, *options):
    assert run(["optimize", str(source), "-o", str(out), "--quiet", *options]) == 0


def session(path, level="ORT_DISABLE_ALL", order="DEFAULT"):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, level)
    options.execution_order = getattr(ort.ExecutionOrder, order)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def interface(s):
    values = (s.get_inputs(), s.get_outputs(), s.get_overridable_initializers())
    return [[(v.name, v.type, v.shape) for v in part] for part in values]


def same(a, b):
    """Equal bits, in sequences and maps too."""
    if isinstance(a, np.ndarray):
        if a.dtype == object:
            return a.tolist() == b.tolist()
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def differing(original, result, feeds, level="ORT_DISABLE_ALL"):
    """Outputs of `result` that have other bits than those of `original`, in some order and run."""
    first = session(original, level)
    found = []
    names = [o.name for o in first.get_outputs()]
    known = {v.name for v in (*first.get_inputs(), *first.get_overridable_initializers())}
    fed = [{k: v for k, v in f.items() if k in known} for f in (*feeds, *feeds)]
    wanted = [first.run(None, f) for f in fed]
    for order in ORDERS:
        second = session(result, level, order)
        assert interface(second) == interface(first)
        for f, outputs in zip(fed, wanted, strict=True):
            pairs = zip(names, outputs, second.run(None, f), strict=True)
            found += [f"{name} ({order})" for name, a, b in pairs if not same(a, b)]
    return found


def refusal(capsys, source, out, code=3):
    """The error line of a run that must fail cleanly."""
    assert run(["optimize", str(source), "-o", str(out), "--quiet"]) == code
    printed, err = capsys.readouterr()
    lines = err.splitlines()
    assert printed == ""
    assert lines[0].startswith("error: ")
    assert [line[:6] for line in lines[1:]] in ([], ["hint: "]), err
    assert not out.parent.exists() or not list(out.parent.iterdir())
    return lines[0]


def saved(model, folder):
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def passes_checker(model):
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return False
    return True


@pytest.fixture
def out(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "result.onnx"


def built(kind):
    return getattr(build, kind)()


class TestRuns:
    @pytest.mark.parametrize("kind", RUNS)
    def test_a_result_gives_the_bits_of_the_original(self, kind, tmp_path, out, capsys):
        model = built(kind)
        source = saved(model, tmp_path)
        optimize(source, out, "--json")
        report = json.loads(capsys.readouterr().out)
        result = onnx.load(out)
        assert check_rewrite(model, result) == []
        feeds = [build.feeds(model), build.feeds(model, seed=1)]
        if kind == "equal_node_names":  # the runtime refuses the original for its names
            names = [n.name for n in result.graph.node if n.name]
            assert len(set(names)) == len(names)
            source = saved(build.training_step(), tmp_path)
        assert differing(source, out, feeds) == []
        assert report["peak_after_bytes"] < report["peak_before_bytes"] or not RUNS[kind]
        assert report["clones"] > 0 or RUNS[kind] != "clone"

    @pytest.mark.parametrize("kind", RUNS)
    def test_forced_passes_give_the_bits_of_the_original(self, kind, tmp_path, out):
        """`optimize` leaves a model alone where little is gained; the passes themselves do not."""
        model = built(kind)
        result = api.optimize(model, passes=FORCED).model
        assert check_rewrite(model, result) == []
        onnx.checker.check_model(result)
        if kind != "equal_node_names":
            onnx.save(result, out)
            assert differing(saved(model, tmp_path), out, [build.feeds(model)]) == []

    @pytest.mark.parametrize("kind", ["training_step", "seeded_dropouts", "captures", "weights_as_constants"])
    def test_equal_bits_at_the_default_level(self, kind, tmp_path, out):
        model = built(kind)
        source = saved(model, tmp_path)
        optimize(source, out)
        assert differing(source, out, [build.feeds(model)], "ORT_ENABLE_ALL") == []

    @pytest.mark.parametrize("kind", RANDOM)
    def test_random_nodes_run_once_and_stay_apart(self, kind, tmp_path, out):
        name, least, most = RANDOM[kind]
        model = built(kind)
        optimize(saved(model, tmp_path), out)
        randoms = [n for n in onnx.load(out).graph.node if n.op_type.startswith("Random")]
        assert len(randoms) == sum(n.op_type.startswith("Random") for n in model.graph.node)
        for order in ORDERS:
            s = session(out, "ORT_ENABLE_ALL", order)
            for _ in range(3):
                assert least <= s.run([name], build.feeds(model))[0] <= most

    @pytest.mark.parametrize("batch", [1, 8, 100])
    def test_a_plan_for_one_batch_is_right_at_another(self, batch, tmp_path, out):
        model = build.symbolic_batch()
        source = saved(model, tmp_path)
        optimize(source, out, "--dim", "N=64")
        feeds = build.feeds(model)
        resized = {k: np.resize(v, (batch, build.WIDTH)) for k, v in feeds.items()}
        assert differing(source, out, [feeds, resized]) == []

    @pytest.mark.parametrize("kind", ["training_step", "seeded_dropouts", "two_losses", "captures"])
    def test_small_budgets_are_met_or_refused_with_code_4(self, kind, tmp_path, out, capsys):
        model = built(kind)
        source = saved(model, tmp_path)
        for budget in ("70%", "50%", "30%", "1"):
            out.unlink(missing_ok=True)
            code = run(["optimize", str(source), "-o", str(out), "--budget", budget, "--quiet"])
            err = capsys.readouterr().err
            assert code in (0, 4)
            assert out.exists() == (code == 0)
            assert code == 0 or re.match(r"error: the budget of .* cannot be met: .*\d", err)
            assert code == 4 or differing(source, out, [build.feeds(model)]) == []
        assert code == 4

    @pytest.mark.parametrize("kind", ["training_step", "old_opset", "captures", "weights_as_constants"])
    def test_an_optimized_model_can_be_optimized_again(self, kind, tmp_path, out):
        model = built(kind)
        source = saved(model, tmp_path)
        once = api.optimize(model, passes=FORCED).model
        twice = api.optimize(once, passes=FORCED).model
        onnx.checker.check_model(twice)
        onnx.save(twice, out)
        assert differing(source, out, [build.feeds(model)]) == []

    def test_dropouts_are_kept_once_each(self, tmp_path, out):
        optimize(saved(build.seeded_dropouts(), tmp_path), out)
        assert sum(n.op_type == "Dropout" for n in onnx.load(out).graph.node) == build.DEPTH

    def test_defaults_of_inputs_can_still_be_overridden(self, tmp_path, out):
        model = build.overridable_weights()
        source = saved(model, tmp_path)
        optimize(source, out)
        feeds = build.feeds(model)
        weight = np.full((build.WIDTH, build.WIDTH), 0.25, np.float32)
        assert differing(source, out, [feeds, {**feeds, "W1": weight}]) == []

    def test_old_opsets_keep_their_forms_and_versions(self, tmp_path, out):
        optimize(saved(build.old_opset(), tmp_path), out)
        result = onnx.load(out)
        assert (result.ir_version, [o.version for o in result.opset_import]) == (3, [9])
        onnx.checker.check_model(result)


class TestLeftAlone:
    def test_operators_of_unknown_domains_stay_and_one_warning_names_the_domain(self, tmp_path, out, capsys):
        model = build.unknown_domain()
        optimize(saved(model, tmp_path), out)
        err = capsys.readouterr().err
        assert err.count("warning:") == err.count("lab.custom") == 1
        custom = [n for n in model.graph.node if n.domain == "lab.custom"]
        kept = [n for n in onnx.load(out).graph.node if n.domain == "lab.custom"]
        assert [(n.op_type, n.output, n.attribute) for n in kept] == [
            (n.op_type, n.output, n.attribute) for n in custom
        ]
        assert check_rewrite(model, onnx.load(out)) == []

    def test_side_effects_happen_once_and_in_order(self, tmp_path, out):
        model = build.side_effects()
        result = api.optimize(model).model
        before, after = ([n.output[0] for n in m.graph.node if n.domain == "com.microsoft"] for m in (model, result))
        assert before == after

    def test_huge_tensors_are_never_made(self, tmp_path, out):
        model = build.bomb()
        optimize(saved(model, tmp_path), out)
        assert check_rewrite(model, onnx.load(out)) == []

    @pytest.mark.parametrize("kind", ["forward_only", "empty_graph"])
    def test_no_gradients_is_said_in_one_line(self, kind, tmp_path, out, capsys):
        source = saved(built(kind), tmp_path)
        assert run(["optimize", str(source), "-o", str(out)]) == 0
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
        assert sum("no gradient section was found" in line for line in notes) == 1
        assert "note: nothing to do" in notes
        assert out.read_bytes() == source.read_bytes()

    def test_missing_data_files_are_a_warning(self, tmp_path, out, capsys):
        optimize(saved(build.external("gone.bin"), tmp_path), out)
        err = capsys.readouterr().err
        assert err.count("warning:") == 1
        assert "gone.bin" in err
        assert next(t for t in onnx.load(out, load_external_data=False).graph.initializer if t.name == "W1")

    def test_data_files_move_with_the_model(self, tmp_path, out):
        (tmp_path / "w.bin").write_bytes(np.ones((build.WIDTH, build.WIDTH), np.float32).tobytes())
        model = build.external("w.bin")
        source = saved(model, tmp_path)
        optimize(source, out)
        assert differing(source, out, [build.feeds(model)]) == []


class TestRefused:
    @pytest.mark.parametrize("kind", REFUSED)
    def test_one_line_names_the_fault(self, kind, tmp_path, out, capsys):
        line = refusal(capsys, saved(built(kind), tmp_path), out)
        for words in REFUSED[kind]:
            assert re.search(words, line), line

    @pytest.mark.parametrize(
        ("location", "size_bytes", "words"),
        [
            ("../../../etc/hostname", 4096, "leads out"),
            ("/etc/hostname", 4096, "absolute"),
            ("folder\\w.bin", 4096, "backslash"),
            ("w.bin", 4096, "4096 bytes from offset 0, but the file ends after 100"),
            ("w.bin", 100, "4096"),
        ],
    )
    def test_external_data_is_checked_before_any_work(self, location, size_bytes, words, tmp_path, out, capsys):
        (tmp_path / "w.bin").write_bytes(bytes(100))
        source = saved(build.external(location, size_bytes), tmp_path)
        line = refusal(capsys, source, out)
        assert "W1" in line
        assert words in line
        said = []
        with pytest.raises(errors.ExternalDataError, match="W1"):
            api.optimize(source, progress=said.append)
        assert said == []

    @pytest.mark.parametrize(
        ("data", "words"),
        [
            (b"", "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
            (build.truncated(), "not a readable ONNX model"),
            (b"just a text\n", "text file"),
        ],
        ids=["empty", "lfs", "truncated", "text"],
    )
    def test_files_that_are_no_model(self, data, words, tmp_path, out, capsys):
        source = saved(data, tmp_path)
        line = refusal(capsys, source, out)
        assert words in line
        assert source.name in line

    def test_models_in_memory_are_checked_as_well(self):
        for kind in ("short_data", "huge_dims", "future_versions"):
            with pytest.raises(errors.ModelFileError, match=REFUSED[kind][0]):
                api.optimize(built(kind))


# The files of ../shared/cases: what the error line must say, for those that must be refused.
SHARED_REFUSED = {
    "c17_cycle": "loop_[ab]",
    "c18_duplicate_definition": "h1",
    "c19_dangling_input": "ghost",
    "c25_gradient_op": "Gradient",
    "c30_branch_returns_outer": "'h'",
    "c33_wrong_type_value_info": "h1.*double.*float",
    "d02_external_escape": r"W0.*\.\./\.\./",
    "d03_external_absolute": "W0",
    "d04_external_too_short": "W1.*256.*100",
    "d07_truncated": "not a readable ONNX model",
    "d08_lfs_pointer": "Git LFS pointer",
    "d09_empty_file": "empty",
    "d10_huge_dims": "evil",
    "d11_short_raw_data": "W1.*40.*256",
    "d12_future_versions": "99.*999",
}
SHARED_RANDOM = {"a03_random_noise_injection": ("gap", 0, 0), "a04_equal_random_nodes": ("n_same", 0, 64)}
SHARED_FILES = sorted(SHARED_CASES.glob("*.onnx"))


def shared_row(name):
    return next(r for r in (SHARED_CASES / "INDEX.md").read_text().splitlines() if r.startswith(f"| {name}.onnx"))


@needs_shared
@pytest.mark.parametrize("path", SHARED_FILES, ids=lambda p: p.stem)
def test_the_shared_cases(path, tmp_path, out, capsys):
    source = Path(shutil.copy(path, tmp_path))
    for data in (*SHARED_CASES.glob("*.bin"), *SHARED_CASES.glob("*.data")):
        shutil.copy(data, tmp_path)
    if path.stem == "d06_huge_external":
        with (tmp_path / "d06_huge.bin").open("wb") as file:
            file.truncate(2_406_400_000)
    if path.stem in SHARED_REFUSED:
        assert re.search(SHARED_REFUSED[path.stem], refusal(capsys, source, out))
        return
    optimize(source, out)
    original, result = (onnx.load(p, load_external_data=False) for p in (source, out))
    assert check_rewrite(original, result) == []
    feeds = [dict(np.load(p, allow_pickle=True)) for p in sorted(SHARED_CASES.glob(f"{path.stem}.feeds*.npz"))]
    if path.stem in SHARED_RANDOM:
        name, least, most = SHARED_RANDOM[path.stem]
        assert all(least <= session(out).run([name], feeds[0])[0] <= most for _ in range(3))
    elif feeds:
        assert differing(source, out, feeds) == []
        if "lvl=yes" in shared_row(path.stem):
            assert differing(source, out, feeds, "ORT_ENABLE_ALL") == []
    if path.stem == "c32_duplicate_node_names":
        session(out)
    if len(original.graph.node) > 500:
        return
    for passes in (FORCED, "order"):
        forced = api.optimize(original, passes=passes).model
        assert check_rewrite(original, forced) == []
        if passes_checker(original):
            onnx.checker.check_model(forced)
        if feeds and path.stem not in SHARED_RANDOM and path.stem[0] != "d":
            onnx.save(forced, out)
            assert differing(source, out, feeds) == []
