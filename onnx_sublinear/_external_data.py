"""Tensors whose data lies in files beside the model: where it is, and whether it fits.

No data file is opened, only looked up.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from onnx import ModelProto, TensorProto

from onnx_sublinear._staging import is_inside
from onnx_sublinear._tensors import StoredTensor, dims_text, tensor_size_bytes, walk
from onnx_sublinear.errors import ExternalDataError, printable

# ORT marks data in the memory of the running process this way; in a file it would be a wild pointer.
_MEMORY_MARK = "_ORT_MEM_ADDR_"


@dataclass(frozen=True)
class ExternalTensor:
    """One tensor whose data lies in a file beside the model.

    Attributes:
        name: the tensor's name, or one made from the node that holds it.
        location: the file as the model names it, relative to the model's folder.
        offset: where the data starts in the file, in bytes.
        length: the length as the model states it, in bytes, or None.
        size_bytes: bytes that dims and type ask for; sub-byte types round up.
        file: the file with all links followed.
        present: whether the file is there.
    """

    name: str
    location: str
    offset: int
    length: int | None
    size_bytes: int
    file: Path
    present: bool


class _DataFile(NamedTuple):
    path: Path
    size_bytes: int | None  # None: there is no such file


def check_external_data(
    model: ModelProto, folder: str | os.PathLike[str], require_files: bool = False
) -> list[ExternalTensor]:
    """Finds every tensor with external data, and checks that the data is inside the folder and fits.

    Looks at initializers (sparse ones too), tensors in attributes, subgraphs at any depth, functions and
    training graphs. No data is read.

    Args:
        model: any model.
        folder: the folder of the model's file.
        require_files: whether a missing data file is an error; without it, see `ExternalTensor.present`.

    Returns:
        One entry a tensor, in a stable order.

    Raises:
        ExternalDataError: a location is absolute, has a backslash, leaves the folder (by ".." or by a link) or
            is no regular file; offset or length do not parse or contradict the dims; the file is too short.
        ModelFileError: dims of an external tensor are negative or too large.
    """
    root = Path(folder)
    known: dict[str, _DataFile] = {}
    result = []
    for stored in external_tensors(model):
        entries = _entries(stored)
        location = entries.get("location", "")
        if location not in known:
            known[location] = _look_up(stored.label, location, root)
        found = known[location]
        size_bytes = _size_bytes(stored)
        offset = _number(stored.label, entries, "offset") or 0
        length = _number(stored.label, entries, "length")
        if length is not None and length != size_bytes:
            raise refused(
                stored.label,
                location,
                f"length {length} contradicts the {size_bytes} bytes of dims {dims_text(stored.tensor)} and type",
            )
        if found.size_bytes is not None and offset + size_bytes > found.size_bytes:
            raise refused(
                stored.label,
                location,
                f"needs {size_bytes} bytes from offset {offset}, but the file ends after {found.size_bytes} bytes",
                "copy or download the data file again",
            )
        if require_files and found.size_bytes is None:
            hint = "put the model's data files beside it"
            raise refused(stored.label, location, f"file {printable(str(found.path))} is missing", hint)
        present = found.size_bytes is not None
        result.append(ExternalTensor(stored.label, location, offset, length, size_bytes, found.path, present))
    return result


def external_tensors(model: ModelProto) -> list[StoredTensor]:
    """The tensors of `model` with external data, in the order of `check_external_data`."""
    return [stored for stored in walk(model).tensors if stored.tensor.data_location == TensorProto.EXTERNAL]


def missing_warnings(external: Iterable[ExternalTensor]) -> tuple[str, ...]:
    """One line for each data file that is not there."""
    names: dict[str, list[str]] = {}
    for tensor in external:
        if not tensor.present:
            names.setdefault(tensor.location, []).append(tensor.name)
    return tuple(
        f"external data file {printable(location)} of tensor {printable(tensors[0])}"
        + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
        + " is missing; the reference is kept"
        for location, tensors in names.items()
    )


def refused(label: str, location: str, reason: str, hint: str = "") -> ExternalDataError:
    """The error that names the tensor, its data file and the reason."""
    return ExternalDataError(f"tensor {printable(label)}: external data '{printable(location)}': {reason}", hint)


def _entries(stored: StoredTensor) -> dict[str, str]:
    entries: dict[str, str] = {}
    for entry in stored.tensor.external_data:
        if not (isinstance(entry.key, str) and isinstance(entry.value, str)):
            raise ExternalDataError(f"tensor {printable(stored.label)}: its external data is not UTF-8 text")
        if entry.key in entries:  # readers differ in which one they take
            raise ExternalDataError(
                f"tensor {printable(stored.label)}: its external data has two entries {printable(entry.key, 40)}"
            )
        entries[entry.key] = entry.value
    return entries


def _look_up(label: str, location: str, root: Path) -> _DataFile:
    reason = _location_fault(location)
    path = root / location
    if not reason and not is_inside(path, root):
        reason = "leads out of the model's folder through a link"
    if reason:
        raise refused(label, location, reason, "external data must be in the model's folder")
    real_path = Path(os.path.realpath(path))
    try:
        status = path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return _DataFile(real_path, None)
        raise refused(label, location, f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(status.st_mode):
        raise refused(label, location, "is not a regular file")
    return _DataFile(real_path, status.st_size)


def _location_fault(location: str) -> str:
    """What is wrong with a location by its text alone, or ""."""
    if not location:
        return "is empty"
    if "\0" in location:
        return "holds a NUL byte"
    if PureWindowsPath(location).anchor:  # knows a leading "/" as well as drives and servers
        return "is an absolute path"
    if "\\" in location:
        return "has a backslash"
    if posixpath.normpath(location).split("/")[0] == "..":
        return "leads out of the model's folder"
    if _MEMORY_MARK in location:
        return "is an address in the memory of another process"
    return ""


def _size_bytes(stored: StoredTensor) -> int:
    size_bytes = tensor_size_bytes(stored)
    if size_bytes is None:
        raise ExternalDataError(
            f"tensor {printable(stored.label)}: its element type {stored.tensor.data_type} cannot be external data"
        )
    return size_bytes


def _number(label: str, entries: dict[str, str], key: str) -> int | None:
    text = entries.get(key)
    if text is None:
        return None
    # int() alone would take "1_0", " 1" and digits of other scripts, which other readers do not.
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 2**63:
        raise refused(label, entries.get("location", ""), f"{key} '{printable(text, 40)}' is not a byte count")
    return int(text)
