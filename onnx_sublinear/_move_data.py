"""Moving the data of tensors between the model and the files beside it. The model passed in is never changed."""

from __future__ import annotations

import os
import posixpath
from pathlib import Path

from onnx import ModelProto, TensorProto

from onnx_sublinear._external_data import ExternalTensor, external_tensors, refused
from onnx_sublinear._staging import Staging, copy_content
from onnx_sublinear._tensors import walk
from onnx_sublinear.errors import ExternalDataError

# Smaller tensors stay in the model: shape inference may need their values.
_SPILL_FROM_BYTES = 1024


def relocate(model: ModelProto, external: list[ExternalTensor], folder: Path, staging: Staging) -> ModelProto:
    """Stages copies of all data files in `folder`; a file that two locations reach is copied once.

    Returns:
        `model` itself, or a copy with new locations where a name was not free.

    Raises:
        ExternalDataError: a data file cannot be read, or a missing one would be taken for another file.
    """
    moved: dict[Path, str] = {}
    locations = []
    for tensor in external:
        if not tensor.present:
            if os.path.lexists(folder / tensor.location):
                raise refused(
                    tensor.name, tensor.location, "file is missing, and the output folder has another file of that name"
                )
        elif tensor.file not in moved:
            moved[tensor.file] = _stage_copy(tensor, folder, staging)
        locations.append(moved.get(tensor.file, tensor.location))
    if all(location == tensor.location for location, tensor in zip(locations, external, strict=True)):
        return model
    copy = _copy(model)
    for location, stored in zip(locations, external_tensors(copy), strict=True):
        for entry in stored.tensor.external_data:
            if entry.key == "location":
                entry.value = location
    return copy


def inline(model: ModelProto, external: list[ExternalTensor]) -> ModelProto:
    """A copy of `model` that holds all its data itself.

    Raises:
        ExternalDataError: a data file cannot be read.
    """
    copy = _copy(model)
    for tensor, stored in zip(external, external_tensors(copy), strict=True):
        try:
            with tensor.file.open("rb") as file:
                file.seek(tensor.offset)
                data = file.read(tensor.size_bytes)
        except OSError as error:
            raise _unreadable(tensor, error) from error
        if len(data) != tensor.size_bytes:
            raise refused(tensor.name, tensor.location, "was cut short while it was read")
        stored.tensor.raw_data = data
        stored.tensor.ClearField("external_data")
        stored.tensor.ClearField("data_location")
    return copy


def spill(model: ModelProto, wanted: str, folder: Path, staging: Staging) -> ModelProto:
    """A copy of `model` whose large initializers are staged as one data file, with offsets that can be mapped.

    Args:
        model: a model that protobuf cannot write in one piece.
        wanted: name of the data file; another one is taken where it is not free.
        folder: where the data file goes.
        staging: stages it.
    """
    copy = _copy(model)
    moved: list[tuple[TensorProto, int, int]] = []
    with staging.create(folder) as (temporary, file):
        for stored in walk(copy).tensors:
            data = stored.tensor.raw_data if stored.is_initializer else b""
            if len(data) < _SPILL_FROM_BYTES or stored.tensor.data_location == TensorProto.EXTERNAL:
                continue
            # ExternalData.md of onnx: a page on Linux, the allocation granularity of Windows for the large ones.
            alignment = 65536 if len(data) >= 2**20 else 4096
            offset = -(-file.tell() // alignment) * alignment
            file.seek(offset)
            file.write(data)
            stored.tensor.ClearField("raw_data")
            moved.append((stored.tensor, offset, len(data)))
    location, is_there = staging.choose(wanted, temporary)
    if not is_there:
        staging.assign(temporary, folder / location)
    for tensor, offset, length in moved:
        tensor.data_location = TensorProto.EXTERNAL
        del tensor.external_data[:]
        for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
    return copy


def _stage_copy(tensor: ExternalTensor, folder: Path, staging: Staging) -> str:
    """Stages a copy of the tensor's data file; returns its location relative to `folder`."""
    try:
        source = tensor.file.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(tensor, error) from error
    with source:
        location, is_there = staging.choose(posixpath.normpath(tensor.location), tensor.file)
        if not is_there:
            target = folder / location
            with staging.create(target.parent) as (temporary, sink):
                try:
                    copy_content(source, sink)
                except EOFError as error:
                    raise refused(tensor.name, tensor.location, "was cut short while it was copied") from error
            staging.assign(temporary, target)
    return location


def _copy(model: ModelProto) -> ModelProto:
    copy = ModelProto()
    copy.CopyFrom(model)
    return copy


def _unreadable(tensor: ExternalTensor, error: OSError) -> ExternalDataError:
    return refused(tensor.name, tensor.location, f"cannot be read ({error.strerror})")
