"""Lossless load and save of ONNX models: checked on the way in, atomic on the way out.

The ModelProto is never converted, so every field survives, unknown ones too. External data is never
loaded to load a model; to save one it is left in place, or copied file by file.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import onnx
from google.protobuf.message import DecodeError, EncodeError  # type: ignore[import-untyped,unused-ignore]
from onnx import ModelProto

from onnx_sublinear._external_data import ExternalTensor, check_external_data, missing_warnings
from onnx_sublinear._move_data import inline, relocate, spill
from onnx_sublinear._staging import Staging
from onnx_sublinear._tensors import check_scopes, check_tensor, walk
from onnx_sublinear.errors import ModelFileError, UsageError, printable

__all__ = [
    "ExternalTensor",
    "SaveReport",
    "check_external_data",
    "check_model",
    "is_same_file",
    "load_model",
    "missing_warnings",
    "save_model",
]

# Protobuf neither reads nor writes a larger message.
PROTOBUF_LIMIT_BYTES = 2**31 - 1

# What people give by mistake: (first bytes, what it is, what to do).
_OTHER_FORMATS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the model itself", "run: git lfs pull"),
    (b"PK\x03\x04", "is a zip archive", "export the model to ONNX, or unpack it, first"),
    (b"\x80\x02", "is a Python pickle", "export the model to ONNX first"),
    (b"\x89HDF", "is an HDF5 file", "convert the model to ONNX first"),
)


@dataclass(frozen=True)
class SaveReport:
    """What `save_model` did.

    Attributes:
        path: the output file.
        data_files: data files written beside it; empty where the data stayed where it was.
        warnings: lines for the user.
    """

    path: Path
    data_files: tuple[Path, ...]
    warnings: tuple[str, ...]


def load_model(path: str | os.PathLike[str]) -> ModelProto:
    """Reads a model, without its external data, and checks that it is one this version can work on.

    Raises:
        ModelFileError: there is no such file, it is not an ONNX model, it is newer than the installed onnx,
            or the data of a tensor does not fit its dims and type. The message names the file.
    """
    shown = printable(os.fsdecode(path))
    data = _read(path, shown)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise _not_a_model(shown, data) from None
    if not model.HasField("graph"):
        raise _not_a_model(shown, data)
    del data
    try:
        check_model(model)
    except ModelFileError as error:
        raise ModelFileError(f"{shown}: {error.message}", error.hint) from None
    return model


def check_model(model: ModelProto) -> None:
    """Checks that a model is one this version can work on, and that its inline data fits dims and types.

    Raises:
        ModelFileError: it has no graph, is newer than the installed onnx, a name is no text, or the data of a tensor
            does not fit. The message names the tensor.
    """
    if not model.HasField("graph"):
        raise ModelFileError("the model has no graph", "the file may be damaged; export it again")
    _check_versions(model)
    contents = walk(model)
    check_scopes(contents.scopes)
    for stored in contents.tensors:
        check_tensor(stored)


def save_model(
    model: ModelProto,
    path: str | os.PathLike[str],
    *,
    source_folder: str | os.PathLike[str] | None = None,
    source_path: str | os.PathLike[str] | None = None,
    external_data: Literal["keep", "inline"] = "keep",
    force: bool = False,
) -> SaveReport:
    """Writes a model so that it loads from its own folder; the file appears complete or not at all.

    A link at `path` is followed. Initializers move to one file `<name>.data` where the model
    would pass protobuf's 2 GB limit. Data files never overwrite a file: one that already holds the same bytes
    is used, otherwise a free name is taken.

    Args:
        model: the model; it is not changed.
        path: the output file. Another file there is replaced.
        source_folder: where the external data of `model` lies; default: the folder of `source_path`, or else
            of `path`.
        source_path: the file that `model` comes from, if any.
        external_data: "keep": references stay as they are in the same folder, and data files are copied to
            another one; "inline": the output holds all data itself.
        force: whether `path` may be `source_path`.

    Raises:
        UsageError: `path` cannot be written, is the input without `force`, or is one of the model's data files.
        ExternalDataError: see `check_external_data`; or a data file cannot be copied.
        ModelFileError: the model is too large even with its initializers outside.
    """
    output = _checked_output(path, source_path, force)
    folder = output.parent
    source = Path(source_folder if source_folder is not None else Path(source_path or output).parent)
    external = check_external_data(model, source, require_files=external_data == "inline")
    for tensor in external:
        if is_same_file(output, tensor.file) or (not tensor.present and is_same_file(output, folder / tensor.location)):
            raise UsageError(
                f"output '{printable(str(output))}' is the data file of tensor {printable(tensor.name)}",
                "give another output",
            )
    try:
        with Staging(folder) as staging:
            staging.reserve(output)
            for tensor in external:
                if not tensor.present:
                    staging.reserve(folder / tensor.location)
            if external and external_data == "inline":
                model = _inlined(model, external, output)
            elif external and not is_same_file(source, folder):
                model = relocate(model, external, folder, staging)
            serialized = _serialize(model)
            if serialized is None:
                serialized = _serialize(spill(model, f"{output.name}.data", folder, staging))
            if serialized is None:
                raise ModelFileError(
                    f"output '{printable(str(output))}' would pass protobuf's 2 GB limit even without its initializers",
                    "store large constants as initializers with raw_data",
                )
            with staging.create(folder) as (temporary, file):
                file.write(serialized)
            staging.assign(temporary, output, replace=True)
            data_files = staging.commit()
    except OSError as error:
        raise _unwritable(output, error) from error
    return SaveReport(output, data_files, missing_warnings(external))


def is_same_file(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> bool:
    """Whether two paths lead to one file, by links of either kind too; neither needs to exist."""
    try:
        return os.path.samefile(first, second)
    except OSError:
        return os.path.realpath(first) == os.path.realpath(second)


def _read(path: str | os.PathLike[str], shown: str) -> bytes:
    try:
        status = os.stat(path)
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{shown} is a folder", "give the .onnx file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{shown} is not a regular file")
        if status.st_size == 0:
            raise ModelFileError(f"{shown} is empty")
        if status.st_size > PROTOBUF_LIMIT_BYTES:
            raise ModelFileError(
                f"{shown} has {status.st_size} bytes, more than protobuf's limit of {PROTOBUF_LIMIT_BYTES} bytes",
                "export the model with its weights as external data",
            )
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise ModelFileError(f"{shown} does not exist") from None
    except OSError as error:
        raise ModelFileError(f"{shown} cannot be read ({error.strerror})") from error
    except ValueError as error:  # a NUL byte in the path
        raise ModelFileError(f"{shown} is not a path ({error})") from error


def _not_a_model(shown: str, data: bytes) -> ModelFileError:
    """Says what the file is instead, as well as its bytes tell."""
    for start, what, hint in _OTHER_FORMATS:
        if data.startswith(start):
            return ModelFileError(f"{shown} {what}", hint)
    if data[4:8] == b"ORTM":
        return ModelFileError(
            f"{shown} is a model in ORT format, not ONNX", "give the .onnx file that it was made from"
        )
    head = data[:512].decode("utf-8", "ignore")
    if all(c.isprintable() or c.isspace() for c in head) and len(head.encode()) > min(len(data), 512) - 4:
        return ModelFileError(
            f"{shown} is a text file, not an ONNX model", "check how the file was downloaded or saved"
        )
    return ModelFileError(
        f"{shown} is not a readable ONNX model: it is cut short or of another format", "download or export it again"
    )


def _check_versions(model: ModelProto) -> None:
    known_ir = int(onnx.IR_VERSION)
    known_opset = int(onnx.defs.onnx_opset_version())
    imports = [*model.opset_import, *(entry for function in model.functions for entry in function.opset_import)]
    opset = max((entry.version for entry in imports if entry.domain in ("", "ai.onnx")), default=0)
    if model.ir_version > known_ir or opset > known_opset:
        raise ModelFileError(
            f"the model has ir_version {model.ir_version} and opset {opset}, "
            f"but onnx {onnx.__version__} knows them up to {known_ir} and {known_opset}",
            "install a newer onnx, or export the model with an older opset",
        )
    if model.ir_version < 1:
        raise ModelFileError("the model has no ir_version", "the file may be damaged; export it again")
    if not model.opset_import:
        raise ModelFileError("the model has no opset_import", "the file may be cut short; export it again")


def _checked_output(path: str | os.PathLike[str], source_path: str | os.PathLike[str] | None, force: bool) -> Path:
    text = os.fsdecode(path)
    shown = f"output '{printable(text)}'"
    output = Path(text)
    if not text or "\0" in text:
        raise UsageError(f"{shown} is not a path")
    if os.path.islink(output):  # what it leads to is replaced, not the link: it may be the system's (/dev/stdout)
        output = Path(os.path.realpath(output))
    if os.path.isdir(output) or text.endswith(("/", os.sep)):
        raise UsageError(f"{shown} is a folder", "add a file name")
    if not os.path.isdir(output.parent):
        raise UsageError(f"{shown}: folder '{printable(str(output.parent))}' does not exist", "create it first")
    # Renaming over a device or a pipe would remove it.
    if os.path.exists(output) and not os.path.isfile(output):
        raise UsageError(f"{shown} is not a regular file")
    if source_path is not None and not force and is_same_file(output, source_path):
        raise UsageError(f"{shown} is the input file", "give another output, or --force to replace the input")
    return output


def _inlined(model: ModelProto, external: list[ExternalTensor], output: Path) -> ModelProto:
    total_bytes = sum(tensor.size_bytes for tensor in external)
    if total_bytes >= PROTOBUF_LIMIT_BYTES:
        raise UsageError(
            f"output '{printable(str(output))}' would hold {total_bytes} bytes, more than protobuf's limit of 2 GB",
            "keep the external data",
        )
    return inline(model, external)


def _serialize(model: ModelProto) -> bytes | None:
    """The bytes of the file, always the same for equal models; None when protobuf cannot hold them."""
    # A try that fails would first take the time and the memory of writing 2 GB.
    if sum(len(stored.tensor.raw_data) for stored in walk(model).tensors) > PROTOBUF_LIMIT_BYTES:
        return None
    try:
        serialized: bytes = model.SerializeToString(deterministic=True)
    except (EncodeError, ValueError):
        return None
    return serialized if len(serialized) <= PROTOBUF_LIMIT_BYTES else None


def _unwritable(output: Path, error: OSError) -> UsageError:
    return UsageError(f"output '{printable(str(output))}' cannot be written ({error.strerror or error})")
