"""Load and save: what is refused, what is kept, and that no file is ever left half-written."""

from __future__ import annotations

import os
import re
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper, numpy_helper

from onnx_sublinear import _staging, _tensors, model_io
from onnx_sublinear.errors import ExternalDataError, ModelFileError, SublinearError, UsageError
from onnx_sublinear.model_io import check_external_data, is_same_file, load_model, save_model

SHARED = Path(__file__).resolve().parent.parent.parent / "shared"
GIB = 2**30


def make_graph(*initializers: TensorProto, nodes: tuple[Any, ...] = ()) -> GraphProto:
    return helper.make_graph(list(nodes), "g", [], [], initializer=list(initializers))


def make_model(*initializers: TensorProto, nodes: tuple[Any, ...] = ()) -> ModelProto:
    graph = make_graph(*initializers, nodes=nodes)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])


def tensor(
    name: str = "w", dims: tuple[int, ...] = (4,), data_type: int = TensorProto.FLOAT, **data: Any
) -> TensorProto:
    result = TensorProto(name=name, dims=dims, data_type=data_type)
    for field, value in data.items():
        setattr(result, field, value) if field == "raw_data" else getattr(result, field).extend(value)
    return result


def external(
    name: str = "w", location: str | None = "w.bin", dims: tuple[int, ...] = (4,), **entries: str
) -> TensorProto:
    data_type = int(entries.pop("data_type", TensorProto.FLOAT))
    result = tensor(name, dims, data_type)
    result.data_location = TensorProto.EXTERNAL
    for key, value in (({"location": location} if location is not None else {}) | entries).items():
        result.external_data.add(key=key, value=value)
    return result


def location_of(model: ModelProto, index: int = 0) -> str:
    return next(entry.value for entry in model.graph.initializer[index].external_data if entry.key == "location")


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[ModelProto, Path, Path]:
    """A model with data in `in/w.bin`, its folder, and an empty folder beside it."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    target.mkdir()
    (source / "w.bin").write_bytes(bytes(range(32)))
    model = make_model(external("a", offset="0", length="16"), external("b", offset="16"))
    (source / "m.onnx").write_bytes(model.SerializeToString())
    return model, source, target


class TestLoad:
    def test_path_kinds(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path, part in [
            (tmp_path / "none.onnx", "does not exist"),
            (tmp_path, "is a folder"),
            (tmp_path / "fifo", "not a regular file"),
            ("a\0b", "not a path"),
            (tmp_path / ("x" * 300), "cannot be read"),
        ]:
            with pytest.raises(ModelFileError, match=part):
                load_model(path)

    @pytest.mark.parametrize(
        ("content", "part", "hint"),
        [
            (b"", "is empty", ""),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "LFS pointer", "git lfs pull"),
            (b'{"graph": {}}\n', "text file", "downloaded"),
            ("<!DOCTYPE html><title>nicht gefunden ü</title>".encode() * 30, "text file", "downloaded"),
            (b"PK\x03\x04\x00\x00", "zip archive", "export"),
            (b"\x1c\x00\x00\x00ORTM\x00", "ORT format", ".onnx"),
            (b"\xff" * 40, "not a readable ONNX model", "again"),
            (make_model(tensor(raw_data=bytes(16))).SerializeToString()[:-20], "cut short", "again"),
            (ModelProto(ir_version=8, producer_name="x").SerializeToString(), "not a readable ONNX model", ""),
            (ModelProto(graph=make_graph(), ir_version=8).SerializeToString(), "no opset_import", "cut short"),
            (ModelProto(graph=make_graph()).SerializeToString(), "no ir_version", ""),
        ],
    )
    def test_other_files(self, tmp_path: Path, content: bytes, part: str, hint: str) -> None:
        path = tmp_path / "m.onnx"
        path.write_bytes(content)
        with pytest.raises(ModelFileError, match=part) as caught:
            load_model(path)
        assert str(path) in caught.value.message
        assert "\n" not in caught.value.message
        assert hint in caught.value.hint

    def test_unreadable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "m.onnx").write_bytes(b"x")

        def deny(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(model_io, "open", deny, raising=False)
        with pytest.raises(ModelFileError, match=r"cannot be read \(Permission denied\)"):
            load_model(tmp_path / "m.onnx")

    def test_over_the_protobuf_limit(self, tmp_path: Path) -> None:
        (tmp_path / "m.onnx").touch()
        os.truncate(tmp_path / "m.onnx", 2 * GIB)
        with pytest.raises(ModelFileError, match="2147483648 bytes, more than") as caught:
            load_model(tmp_path / "m.onnx")
        assert "external data" in caught.value.hint

    @pytest.mark.parametrize(
        ("ir_version", "imports", "refused"),
        [
            (8, [("", 17), ("some.domain", 10**6)], False),
            (onnx.IR_VERSION, [("ai.onnx", onnx.defs.onnx_opset_version())], False),
            (onnx.IR_VERSION + 1, [("", 17)], True),
            (8, [("", onnx.defs.onnx_opset_version() + 1)], True),
            (8, [("", 17), ("ai.onnx", 999)], True),
        ],
    )
    def test_versions(self, tmp_path: Path, ir_version: int, imports: list[tuple[str, int]], refused: bool) -> None:
        model = ModelProto(graph=make_graph(), ir_version=ir_version)
        model.opset_import.extend(helper.make_opsetid(*entry) for entry in imports)
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        if not refused:
            assert load_model(tmp_path / "m.onnx") == model
            return
        with pytest.raises(ModelFileError) as caught:
            load_model(tmp_path / "m.onnx")
        for number in (ir_version, max(imports, key=lambda entry: entry[1])[1], onnx.defs.onnx_opset_version()):
            assert str(number) in caught.value.message

    @pytest.mark.parametrize(
        ("bad", "part"),
        [
            (tensor(raw_data=bytes(10)), "holds 10 bytes of data, but its dims [4] and type need 16 bytes"),
            (tensor(raw_data=bytes(17)), "holds 17 bytes"),
            (tensor(), "holds 0 bytes"),
            (tensor(float_data=[1.0] * 3), "holds 3 values in float_data, but its dims [4] and type need 4"),
            (tensor(data_type=TensorProto.COMPLEX64, float_data=[1.0] * 4), "need 8"),
            (tensor(data_type=TensorProto.INT4, dims=(3,), int32_data=[1] * 3), "need 2"),
            (tensor(data_type=TensorProto.FLOAT16, int32_data=[1] * 5), "holds 5 values in int32_data"),
            (tensor(data_type=TensorProto.STRING, string_data=[b"a"]), "holds 1 values in string_data"),
            (tensor(float_data=[1.0] * 4, raw_data=bytes(16)), "has its data twice"),
            (tensor(dims=(2, -1)), "has a negative dim: [2, -1]"),
            (tensor(dims=(2**40, 2**40)), "more bytes than any machine"),
            (tensor(dims=(2**62,)), "more bytes than any machine"),
            (tensor(dims=(2**62,) * 5000), "dims of rank 5000"),
        ],
    )
    def test_data_that_does_not_fit(self, tmp_path: Path, bad: TensorProto, part: str) -> None:
        constant = helper.make_node("Constant", [], ["c"], value=bad)
        branch = helper.make_node("If", ["x"], ["y"], then_branch=make_graph(nodes=(constant,)))
        for model in (make_model(bad), make_model(nodes=(branch,))):
            (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
            with pytest.raises(ModelFileError) as caught:
                load_model(tmp_path / "m.onnx")
            assert part in caught.value.message
            assert "tensor w" in caught.value.message

    def test_data_that_fits(self, tmp_path: Path) -> None:
        good = [
            tensor("empty", (2**62, 2**62, 0)),
            tensor("scalar", (), raw_data=bytes(4)),
            tensor("typed", float_data=[1] * 4),
        ]
        good += [tensor("int4", (3,), TensorProto.INT4, raw_data=bytes(2)), tensor("new", (3,), 99)]
        good += [tensor("text", (1,), TensorProto.STRING, string_data=[b"\xff"])]
        (tmp_path / "m.onnx").write_bytes(make_model(*good).SerializeToString())
        assert list(load_model(tmp_path / "m.onnx").graph.initializer) == good

    def test_names_that_are_not_text(self, tmp_path: Path) -> None:
        content = make_model(nodes=(helper.make_node("Relu", ["QQQQ"], ["y"]),)).SerializeToString()
        (tmp_path / "m.onnx").write_bytes(content.replace(b"QQQQ", b"\xff\xfe\xfd\xfc"))
        with pytest.raises(ModelFileError, match="not UTF-8"):
            load_model(tmp_path / "m.onnx")

    def test_element_table_agrees_with_the_names(self) -> None:
        bits_of = {"FLOAT": 32, "DOUBLE": 64, "BOOL": 8}
        for name, number in TensorProto.DataType.items():
            if name not in ("UNDEFINED", "STRING"):
                first_number = re.search(r"[0-9]+", name)
                bits = int(first_number[0]) if first_number else bits_of[name]
                assert _tensors._ELEMENT_TYPES[number].bits == bits, name


class TestCheckExternalData:
    def test_finds_tensors_everywhere(self, tmp_path: Path) -> None:
        def constant(name: str) -> onnx.NodeProto:
            return helper.make_node("Constant", [], [f"{name}_out"], value=external(name))

        deep = make_graph(external("deep"), nodes=(constant("deep_constant"),))
        for _ in range(20):
            deep = make_graph(nodes=(helper.make_node("If", ["c"], [], then_branch=deep),))
        many = helper.make_node("Many", [], ["m"], domain="d")
        many.attribute.add(name="t", type=AttributeProto.TENSORS).tensors.extend([external("t0"), external("")])
        many.attribute.add(name="g", type=AttributeProto.GRAPHS).graphs.add().initializer.append(external("g0"))
        sparse = onnx.SparseTensorProto(values=external("sv"), indices=external("si"), dims=[9])
        many.attribute.add(name="s", type=AttributeProto.SPARSE_TENSOR).sparse_tensor.CopyFrom(sparse)
        model = make_model(external("top"), nodes=(many, helper.make_node("If", ["c"], [], then_branch=deep)))
        model.graph.sparse_initializer.append(sparse)
        function = helper.make_function("d", "F", [], [], [constant("function")], [helper.make_opsetid("", 17)])
        function.attribute_proto.add(name="default", type=AttributeProto.TENSOR).t.CopyFrom(external("default"))
        model.functions.append(function)
        model.training_info.add().algorithm.initializer.append(external("training"))

        found = [entry.name for entry in check_external_data(model, tmp_path)]
        wanted = ["top", "sv", "si", "sv", "si", "t0", "m", "g0", "function", "default", "training"]
        assert sorted(found) == sorted([*wanted, "deep", "deep_constant"])

    @pytest.mark.parametrize(
        ("location", "part"),
        [
            ("/etc/hostname", "absolute"),
            ("C:\\w.bin", "absolute"),
            ("C:w.bin", "absolute"),
            ("\\\\server\\share\\w.bin", "absolute"),
            ("//server/share/w.bin", "absolute"),
            ("../in/w.bin", "leads out"),
            ("sub/../../x", "leads out"),
            ("..", "leads out"),
            ("sub\\w.bin", "has a backslash"),
            ("..\\w.bin", "has a backslash"),
            ("", "is empty"),
            (None, "is empty"),
            ("w\0.bin", "NUL"),
            ("*/_ORT_MEM_ADDR_/*", "memory"),
            ("sub", "not a regular file"),
            (".", "not a regular file"),
            ("fifo", "not a regular file"),
            ("link_out", "through a link"),
            ("folder_out/w.bin", "through a link"),
            ("dangling_out", "through a link"),
            ("loop", "cannot be read"),
            ("x" * 300, "cannot be read"),
        ],
    )
    def test_refused_locations(self, tmp_path: Path, location: str | None, part: str) -> None:
        folder = tmp_path / "in"
        (folder / "sub").mkdir(parents=True)
        for name in ("in/w.bin", "w.bin", "in/sub\\w.bin"):
            (tmp_path / name).write_bytes(bytes(16))
        os.mkfifo(folder / "fifo")
        (folder / "link_out").symlink_to("../w.bin")
        (folder / "folder_out").symlink_to("..")
        (folder / "dangling_out").symlink_to("../nothing")
        (folder / "loop").symlink_to("loop")
        with pytest.raises(ExternalDataError) as caught:
            check_external_data(make_model(external("W0", location)), folder)
        assert part in caught.value.message
        assert "tensor W0" in caught.value.message
        assert (location or "").replace("\0", "\\x00")[:90] in caught.value.message

    @pytest.mark.parametrize(
        ("entries", "part"),
        [
            ({"offset": "-1"}, "offset '-1' is not a byte count"),
            ({"offset": "1_0"}, "is not a byte count"),
            ({"offset": " 1"}, "is not a byte count"),
            ({"offset": "9" * 5000}, "is not a byte count"),
            ({"length": "0x10"}, "length '0x10' is not a byte count"),
            ({"length": "15"}, "length 15 contradicts the 16 bytes of dims [4]"),
            ({"length": "0"}, "contradicts"),
            ({"offset": "85", "length": "16"}, "needs 16 bytes from offset 85, but the file ends after 100 bytes"),
            ({"offset": "9223372036854775807"}, "ends after 100 bytes"),
            ({"data_type": str(TensorProto.STRING)}, "element type 8 cannot be external"),
            ({"data_type": "99"}, "element type 99 cannot be external"),
        ],
    )
    def test_refused_ranges(self, tmp_path: Path, entries: dict[str, str], part: str) -> None:
        (tmp_path / "w.bin").write_bytes(bytes(100))
        with pytest.raises(ExternalDataError) as caught:
            check_external_data(make_model(external(**entries)), tmp_path)
        assert part in caught.value.message

    def test_two_locations_are_refused(self, tmp_path: Path) -> None:
        twice = external()
        twice.external_data.add(key="location", value="/etc/hostname")
        with pytest.raises(ExternalDataError, match="two entries location"):
            check_external_data(make_model(twice), tmp_path)

    def test_accepted(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub/w.bin").write_bytes(bytes(100))
        (tmp_path / "inner").symlink_to("sub/w.bin")
        model = make_model(
            external("a", "sub/../sub/w.bin", offset="84", length="16"),
            external("b", "inner", dims=(5,), data_type=str(TensorProto.INT4), length="3"),
            external("c", "gone.bin", dims=(2**40,)),
        )
        monkeypatch.chdir(tmp_path)
        for folder in (tmp_path, ".", ""):
            a, b, c = check_external_data(model, folder)
            assert (a.offset, a.length, a.size_bytes, a.present) == (84, 16, 16, True)
            assert (b.offset, b.length, b.size_bytes, b.present) == (0, 3, 3, True)
            assert (c.length, c.size_bytes, c.present) == (None, 2**42, False)
            assert a.file == b.file == (tmp_path / "sub/w.bin").resolve()
        with pytest.raises(ExternalDataError, match=r"tensor c: .*gone\.bin is missing"):
            check_external_data(model, tmp_path, require_files=True)


class TestSave:
    def test_lossless_with_unknown_fields(self, tmp_path: Path) -> None:
        unknown = bytes([0x82, 0x7D, 3]) + b"abc"  # field 2000
        node = helper.make_node("Relu", ["x"], ["y"], doc_string="d", domain="some.domain")
        node.MergeFromString(unknown)
        content = make_model(tensor(raw_data=bytes(16)), nodes=(node,)).SerializeToString(deterministic=True) + unknown
        (tmp_path / "a.onnx").write_bytes(content)
        model = load_model(tmp_path / "a.onnx")
        report = save_model(model, tmp_path / "b.onnx", source_path=tmp_path / "a.onnx")
        assert (tmp_path / "b.onnx").read_bytes() == content
        assert (report.path, report.data_files, report.warnings) == (tmp_path / "b.onnx", (), ())

    @pytest.mark.parametrize("same", ["path", "relative", "symlink", "hard link", "folder link"])
    def test_input_is_not_overwritten(
        self, pair: tuple[ModelProto, Path, Path], monkeypatch: pytest.MonkeyPatch, same: str
    ) -> None:
        model, source, target = pair
        before = (source / "m.onnx").read_bytes()
        os.link(source / "m.onnx", source / "hard.onnx")
        (source / "soft.onnx").symlink_to("m.onnx")
        (target / "f").symlink_to(source)
        monkeypatch.chdir(source)
        output = {
            "path": source / "m.onnx",
            "relative": Path("m.onnx"),
            "symlink": source / "soft.onnx",
            "hard link": source / "hard.onnx",
            "folder link": target / "f" / "m.onnx",
        }[same]
        assert is_same_file(output, source / "m.onnx")
        with pytest.raises(UsageError, match="is the input file") as caught:
            save_model(model, output, source_path=source / "m.onnx")
        assert "--force" in caught.value.hint
        model.doc_string = "changed"
        save_model(model, output, source_path=source / "m.onnx", force=True)
        assert load_model(output) == model
        assert output.is_symlink() == (same == "symlink")  # a link is followed
        if same == "hard link":  # the name was replaced, the file behind it was not touched
            assert (source / "m.onnx").read_bytes() == before
        assert (source / "w.bin").read_bytes() == bytes(range(32))
        assert listing(source) == ["hard.onnx", "m.onnx", "soft.onnx", "w.bin"]

    @pytest.mark.parametrize(
        ("name", "part"),
        [
            ("", "not a path"),
            ("a\0b", "not a path"),
            (".", "is a folder"),
            ("new/", "is a folder"),
            ("none/m.onnx", "does not exist"),
            ("file/m.onnx", "does not exist"),
            ("fifo", "not a regular file"),
            ("x" * 300, "cannot be written"),
        ],
    )
    def test_refused_outputs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, part: str) -> None:
        (tmp_path / "file").touch()
        os.mkfifo(tmp_path / "fifo")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UsageError, match=part):
            save_model(make_model(), name)
        assert listing(tmp_path) == ["fifo", "file"]

    def test_own_data_file_is_refused(self, pair: tuple[ModelProto, Path, Path]) -> None:
        model, source, target = pair
        with pytest.raises(UsageError, match="data file of tensor a"):
            save_model(model, source / "w.bin", source_path=source / "m.onnx", force=True)
        with pytest.raises(UsageError, match="data file of tensor w"):
            save_model(make_model(external()), target / "w.bin", source_folder=target)

    def test_new_file_permissions(self, pair: tuple[ModelProto, Path, Path]) -> None:
        model, source, target = pair
        (target / "m.onnx").touch(0o600)
        mask = os.umask(0o027)
        try:
            save_model(model, target / "m.onnx", source_folder=source)
        finally:
            os.umask(mask)
        for name in ("m.onnx", "w.bin"):
            assert stat.S_IMODE((target / name).stat().st_mode) == 0o640

    def test_same_folder_keeps_references(
        self, pair: tuple[ModelProto, Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, source, _ = pair
        monkeypatch.chdir(source)
        report = save_model(model, "other.onnx", source_path="m.onnx")
        assert (report.path, report.data_files) == (Path("other.onnx"), ())
        assert load_model("other.onnx") == model
        assert listing(source) == ["m.onnx", "other.onnx", "w.bin"]

    def test_other_folder_gets_copies(self, pair: tuple[ModelProto, Path, Path]) -> None:
        _, source, target = pair
        (source / "sub").mkdir()
        (source / "sub/v.bin").write_bytes(bytes(16))
        (source / "again").symlink_to("w.bin")
        model = make_model(external("a"), external("b", "sub/v.bin"), external("c", "again"))
        report = save_model(model, target / "m.onnx", source_folder=source)
        assert report.data_files == (target / "w.bin", target / "sub/v.bin")
        assert listing(target) == ["m.onnx", "sub", "sub/v.bin", "w.bin"]
        saved = load_model(target / "m.onnx")
        assert [location_of(saved, index) for index in range(3)] == ["w.bin", "sub/v.bin", "w.bin"]
        assert location_of(model, 2) == "again"
        assert save_model(model, target / "m.onnx", source_folder=source).data_files == ()
        assert len(listing(target)) == 4

    @pytest.mark.parametrize(
        "kind", ["other content", "same size", "link out", "output name", "sub is a file", "sub link"]
    )
    def test_name_clash(self, pair: tuple[ModelProto, Path, Path], kind: str) -> None:
        model, source, target = pair
        location, output, blocker = "w.bin", "m.onnx", target / "w.bin"
        if kind == "other content":
            blocker.write_bytes(b"precious")
        elif kind == "same size":
            blocker.write_bytes(bytes(32))
        elif kind == "link out":
            blocker.symlink_to(source / "w.bin")
        elif kind == "output name":
            output = "w.bin"
        else:
            location, blocker = "sub/w.bin", target / "sub"
            (source / "sub").mkdir()
            os.link(source / "w.bin", source / "sub/w.bin")
            model = make_model(external("a", location), external("b", location, offset="16"))
            blocker.symlink_to(source) if kind == "sub link" else blocker.write_bytes(b"precious")
        before = None if kind == "output name" else blocker.lstat()
        source_before = listing(source)
        report = save_model(model, target / output, source_folder=source)
        assert before is None or blocker.lstat() == before
        assert listing(source) == source_before
        saved = load_model(target / output)
        assert location_of(saved) == location_of(saved, 1) != location
        assert report.data_files == (target / location_of(saved),)
        assert (target / location_of(saved)).read_bytes() == bytes(range(32))
        assert location_of(model) == location

    def test_missing_data_file(self, pair: tuple[ModelProto, Path, Path]) -> None:
        model, source, target = pair
        (source / "w.bin").unlink()
        report = save_model(model, target / "m.onnx", source_folder=source)
        assert report.data_files == ()
        assert [line for line in report.warnings if "w.bin of tensor a and 1 more is missing" in line]
        assert load_model(target / "m.onnx") == model
        (target / "w.bin").write_bytes(b"of another model")
        with pytest.raises(ExternalDataError, match="another file of that name"):
            save_model(model, target / "m.onnx", source_folder=source)

    def test_new_data_is_not_taken_for_missing_data(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_io, "PROTOBUF_LIMIT_BYTES", 1000)
        model = make_model(external("gone", "m.onnx.data"), tensor(dims=(500,), raw_data=bytes(2000)))
        assert save_model(model, tmp_path / "m.onnx").data_files == (tmp_path / "m.onnx-1.data",)

    def test_inline(self, pair: tuple[ModelProto, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
        model, source, target = pair
        save_model(model, target / "m.onnx", source_folder=source, external_data="inline")
        a, b = load_model(target / "m.onnx").graph.initializer
        assert (a.raw_data, b.raw_data) == (bytes(range(16)), bytes(range(16, 32)))
        assert not a.external_data
        assert listing(target) == ["m.onnx"]
        monkeypatch.setattr(model_io, "PROTOBUF_LIMIT_BYTES", 30)
        with pytest.raises(UsageError, match="32 bytes"):
            save_model(model, target / "m.onnx", source_folder=source, external_data="inline")
        (source / "w.bin").unlink()
        with pytest.raises(ExternalDataError, match="missing"):
            save_model(model, target / "m.onnx", source_folder=source, external_data="inline")

    @pytest.mark.parametrize("taken", [False, True])
    def test_over_the_protobuf_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool) -> None:
        arrays = [np.arange(n, dtype=np.float32) for n in (300_000, 4, 2000, 262_144)]
        model = make_model(*(numpy_helper.from_array(array, f"w{i}") for i, array in enumerate(arrays)))
        before = model.SerializeToString()
        monkeypatch.setattr(model_io, "PROTOBUF_LIMIT_BYTES", 10_000)
        if taken:
            (tmp_path / "m.onnx.data").write_bytes(b"precious")
        data_file = tmp_path / ("m.onnx-1.data" if taken else "m.onnx.data")
        assert save_model(model, tmp_path / "m.onnx").data_files == (data_file,)
        assert model.SerializeToString() == before
        found = check_external_data(load_model(tmp_path / "m.onnx"), tmp_path, require_files=True)
        assert [(entry.name, entry.offset % 4096) for entry in found] == [("w0", 0), ("w2", 0), ("w3", 0)]
        assert found[2].offset % 65536 == 0
        for saved, array in zip(onnx.load(tmp_path / "m.onnx").graph.initializer, arrays, strict=True):
            np.testing.assert_array_equal(numpy_helper.to_array(saved), array)
        # The same model again: the same bytes, so the file is used and not duplicated.
        assert save_model(model, tmp_path / "m.onnx").data_files == ()
        assert len(listing(tmp_path)) == 2 + taken

    def test_over_the_limit_without_initializers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_io, "PROTOBUF_LIMIT_BYTES", 1000)
        model = make_model(
            nodes=(helper.make_node("Constant", [], ["c"], value=tensor(dims=(500,), raw_data=bytes(2000))),)
        )
        with pytest.raises(ModelFileError, match="even without its initializers"):
            save_model(model, tmp_path / "m.onnx")
        assert listing(tmp_path) == []

    @pytest.mark.parametrize("fail_at", [1, 2, 3])
    @pytest.mark.parametrize("step", ["replace", "fsync", "open"])
    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_failure_midway_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, step: str, fail_at: int
    ) -> None:
        source, target = tmp_path / "in", tmp_path / "out"
        (source / "sub").mkdir(parents=True)
        target.mkdir()
        for name in ("w.bin", "sub/v.bin"):
            (source / name).write_bytes(bytes(16))
        (target / "m.onnx").write_bytes(b"original")
        real, calls = getattr(os, step), 0

        def fail(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += step != "open" or ".tmp" in str(args[0])
            if calls == fail_at:
                calls += 1
                raise error
            return real(*args, **options)

        monkeypatch.setattr(os, step, fail)
        model = make_model(external("a"), external("b", "sub/v.bin"))
        with pytest.raises(UsageError if isinstance(error, OSError) else KeyboardInterrupt) as caught:
            save_model(model, target / "m.onnx", source_folder=source)
        assert calls > fail_at
        if isinstance(caught.value, UsageError):
            assert "No space left" in caught.value.message
        assert (target / "m.onnx").read_bytes() == b"original"
        assert listing(target) == ["m.onnx"]
        assert listing(source) == ["sub", "sub/v.bin", "w.bin"]

    def test_interrupt_after_the_last_rename(
        self, pair: tuple[ModelProto, Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, source, target = pair

        def interrupt(_: Path) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(_staging, "_sync_folder", interrupt)
        with pytest.raises(KeyboardInterrupt):
            save_model(model, target / "m.onnx", source_folder=source)
        assert listing(target) == ["m.onnx", "w.bin"]

    def test_huge_sparse_data_file(self, tmp_path: Path) -> None:
        size_bytes = 2_406_400_000
        (tmp_path / "out").mkdir()
        with (tmp_path / "w.bin").open("wb") as file:
            file.seek(2**31)
            file.write(b"marker")
            file.truncate(size_bytes)
        if (tmp_path / "w.bin").stat().st_blocks * 512 > GIB:
            pytest.skip("the file system has no sparse files")
        model = make_model(external(dims=(size_bytes // 4,), length=str(size_bytes)))
        tracemalloc.start()
        save_model(model, tmp_path / "m.onnx")
        save_model(load_model(tmp_path / "m.onnx"), tmp_path / "out/m.onnx", source_path=tmp_path / "m.onnx")
        assert save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path).data_files == ()
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 32 * 2**20
        copy = tmp_path / "out/w.bin"
        assert (copy.stat().st_size, copy.stat().st_blocks * 512 < 2**20) == (size_bytes, True)
        with copy.open("rb") as file:
            file.seek(2**31)
            assert file.read(6) == b"marker"

    def test_copy_of_dense_and_holey_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out").mkdir()
        content = b"".join(bytes([i + 1]) * 70_000 + bytes(200_000) for i in range(4))
        with (tmp_path / "w.bin").open("wb") as file:
            for i in range(4):
                file.seek(i * 270_000)
                file.write(bytes([i + 1]) * 70_000)
            file.truncate(len(content))
        model = make_model(external(dims=(len(content),), data_type=str(TensorProto.UINT8)))
        save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path)
        assert (tmp_path / "out/w.bin").read_bytes() == content
        in_a_hole = content[:170_000] + b"x" + content[170_001:]
        (tmp_path / "out/w.bin").write_bytes(content)  # now without holes, still equal
        assert save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path).data_files == ()
        (tmp_path / "out/w.bin").write_bytes(in_a_hole)  # equal but for one byte
        assert [
            path.name for path in save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path).data_files
        ] == ["w-1.bin"]
        (tmp_path / "out/w-1.bin").unlink()
        os.replace(tmp_path / "w.bin", tmp_path / "out/w.bin")
        (tmp_path / "w.bin").write_bytes(in_a_hole)  # now the other way round
        save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path)
        assert (tmp_path / "out/w-1.bin").read_bytes() == (tmp_path / "w.bin").read_bytes()
        monkeypatch.delattr(os, "SEEK_DATA", raising=False)
        (tmp_path / "w.bin").write_bytes(content)
        (tmp_path / "out/w.bin").unlink()
        save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path)
        assert (tmp_path / "out/w.bin").read_bytes() == content

    def test_relocated_and_spilled_data_in_onnxruntime(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ort = pytest.importorskip("onnxruntime")
        weights = np.random.default_rng(0).standard_normal(2000, dtype=np.float32)
        (tmp_path / "w.bin").write_bytes(weights.tobytes())
        (tmp_path / "out").mkdir()
        (tmp_path / "out/w.bin").write_bytes(b"precious")
        node = helper.make_node("Add", ["e", "i"], ["y"])
        model = make_model(external("e", dims=(2000,)), numpy_helper.from_array(weights, "i"), nodes=(node,))
        model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [2000]))
        monkeypatch.setattr(model_io, "PROTOBUF_LIMIT_BYTES", 1000)
        report = save_model(model, tmp_path / "out/m.onnx", source_folder=tmp_path)
        assert [path.name for path in report.data_files] == ["w-1.bin", "m.onnx.data"]
        session = ort.InferenceSession(tmp_path / "out/m.onnx", providers=["CPUExecutionProvider"])
        assert session.run(None, {})[0].tobytes() == (weights + weights).tobytes()

    def test_data_file_that_shrinks_while_it_is_copied(
        self, pair: tuple[ModelProto, Path, Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, source, target = pair
        monkeypatch.setattr(_staging, "_read_range", lambda *_: b"")
        with pytest.raises(ExternalDataError, match="cut short"):
            save_model(model, target / "m.onnx", source_folder=source)
        assert listing(target) == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared cases are not here")
class TestSharedFiles:
    REFUSED = {  # noqa: RUF012
        "d02_external_escape": (ExternalDataError, ["W0", "'../../../../etc/hostname'", "leads out"]),
        "d03_external_absolute": (ExternalDataError, ["W0", "'/etc/hostname'", "absolute"]),
        "d04_external_too_short": (ExternalDataError, ["W1", "256 bytes", "100 bytes"]),
        "d07_truncated": (ModelFileError, ["d07_truncated.onnx", "not a readable ONNX model"]),
        "d08_lfs_pointer": (ModelFileError, ["Git LFS pointer"]),
        "d09_empty_file": (ModelFileError, ["is empty"]),
        "d10_huge_dims": (ModelFileError, ["evil"]),
        "d11_short_raw_data": (ModelFileError, ["W1", "40 bytes", "256 bytes"]),
        "d12_future_versions": (ModelFileError, ["99", "999"]),
    }

    @pytest.mark.parametrize(
        "path", sorted(SHARED.glob("cases/*.onnx")) + sorted(SHARED.glob("graphs/*.onnx")), ids=lambda path: path.stem
    )
    def test_file(self, tmp_path: Path, path: Path) -> None:
        if path.stem in self.REFUSED:
            kind, parts = self.REFUSED[path.stem]
            with pytest.raises(SublinearError) as caught:
                check_external_data(load_model(path), path.parent)
            assert type(caught.value) is kind
            assert [part for part in parts if part not in caught.value.message] == []
            return
        model = load_model(path)
        report = save_model(model, tmp_path / "out.onnx", source_path=path)
        assert load_model(tmp_path / "out.onnx") == model == onnx.load(path, load_external_data=False)
        assert bool(report.warnings) == path.stem.startswith(("d05", "d06"))
