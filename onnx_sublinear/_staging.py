"""Files that appear complete and together, or not at all.

Every file is written under a temporary name in its own folder, forced to the disk, and renamed in one
step. Files that were not there before come first and the model comes last, so that at no time does a
model exist whose data is not complete.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NamedTuple

_CHUNK_BYTES = 4 * 1024 * 1024


class _Rename(NamedTuple):
    temporary: Path
    target: Path
    replace: bool


class Staging:
    """Collects new files for one folder; `commit` puts them in place, leaving the block without it drops them.

    Args:
        folder: an existing folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._temporaries: list[Path] = []
        self._renames: list[_Rename] = []
        self._published: list[Path] = []
        self._new_folders: list[Path] = []
        self._reserved: set[Path] = set()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once the last rename is done all is in place, even if an interrupt comes before `commit` returns.
        is_complete = bool(self._renames) and not os.path.lexists(self._renames[-1].temporary)
        for path in self._temporaries if is_complete else (*self._temporaries, *self._published):
            with contextlib.suppress(OSError):
                path.unlink()
        if is_complete:
            return
        for folder in reversed(self._new_folders):
            with contextlib.suppress(OSError):
                folder.rmdir()

    @contextlib.contextmanager
    def create(self, folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
        """A new temporary file in `folder`, which is made if needed: path and file. On the disk when the block ends."""
        self._make_folder(folder)
        path = folder / f".{secrets.token_hex(8)}.tmp"
        self._temporaries.append(path)
        # Unlike tempfile, this leaves the permissions to the umask (and the folder's default ACL), as for any new file.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        with os.fdopen(os.open(path, flags, 0o666), "wb") as file:
            yield path, file
            file.flush()
            os.fsync(file.fileno())

    def assign(self, temporary: Path, target: Path, *, replace: bool = False) -> None:
        """Has `commit` rename `temporary` to `target`; only with `replace` may something be there already."""
        self._renames.append(_Rename(temporary, target, replace))
        self._reserved.add(target)

    def reserve(self, target: Path) -> None:
        """Keeps `choose` from giving out this path."""
        self._reserved.add(target)

    def choose(self, wanted: str, content: Path) -> tuple[str, bool]:
        """A location in the folder for a file with this content that overwrites nothing.

        Args:
            wanted: "/"-separated path relative to the folder.
            content: a file that already holds the content.

        Returns:
            `wanted`, or a name like it that is free; and whether a file of equal content is there already.
        """
        if not self._can_hold(Path(wanted).parent):
            wanted = Path(wanted).name
        path = Path(wanted)
        for number in itertools.count(1):
            target = self._folder / path
            if target not in self._reserved:
                if not os.path.lexists(target):
                    return path.as_posix(), False
                if is_inside(target, self._folder) and same_content(target, content):
                    return path.as_posix(), True
            path = Path(wanted).with_name(f"{Path(wanted).stem}-{number}{Path(wanted).suffix}")
        raise AssertionError("unreachable")

    def commit(self) -> tuple[Path, ...]:
        """Puts all assigned files in place, in the order of `assign`; returns those that are new."""
        for rename in self._renames:
            if not rename.replace:
                if os.path.lexists(rename.target):
                    raise FileExistsError(errno.EEXIST, "another program has just created it", str(rename.target))
                self._published.append(rename.target)
            os.replace(rename.temporary, rename.target)
        for folder in {rename.target.parent for rename in self._renames}:
            _sync_folder(folder)
        return tuple(self._published)

    def _make_folder(self, folder: Path) -> None:
        missing = list(itertools.takewhile(lambda path: not path.exists(), (folder, *folder.parents)))
        for path in reversed(missing):
            path.mkdir()
            self._new_folders.append(path)

    def _can_hold(self, relative_folder: Path) -> bool:
        """Whether files can go there: no link that leads out of the folder, no file in the way."""
        folder = self._folder / relative_folder
        existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path) or path == self._folder)
        return is_inside(folder, self._folder) and existing.is_dir()


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path` lies in `folder` (or is it) once all links are followed."""
    root = os.path.realpath(folder)
    try:
        return os.path.commonpath([root, os.path.realpath(path)]) == root
    except ValueError:  # different drives
        return False


def same_content(first: Path, second: Path) -> bool:
    """Whether both are regular files with equal bytes."""
    if not (first.is_file() and second.is_file()) or first.stat().st_size != second.stat().st_size:
        return False
    if os.path.samefile(first, second):
        return True
    with first.open("rb", buffering=0) as a, second.open("rb", buffering=0) as b:
        extents = list(_data_extents(a.fileno(), first.stat().st_size))
        if extents != list(_data_extents(b.fileno(), first.stat().st_size)):
            extents = [(0, first.stat().st_size)]
        return all(_read_range(a, *chunk) == _read_range(b, *chunk) for chunk in _chunks(extents))


def copy_content(source: BinaryIO, sink: BinaryIO) -> None:
    """Copies a file in chunks; holes of a sparse file stay holes.

    Args:
        source: an unbuffered file, since its position is also moved behind its back.
        sink: an empty file.

    Raises:
        EOFError: the source shrank meanwhile.
    """
    size_bytes = os.fstat(source.fileno()).st_size
    sink.truncate(size_bytes)
    for start, end in _chunks(_data_extents(source.fileno(), size_bytes)):
        sink.seek(start)
        if sink.write(_read_range(source, start, end)) != end - start:
            raise EOFError


def _chunks(extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for start, end in extents:
        for position in range(start, end, _CHUNK_BYTES):
            yield position, min(position + _CHUNK_BYTES, end)


def _read_range(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    parts = []
    while start < end:
        part = file.read(end - start)
        if not part:  # the file shrank
            break
        parts.append(part)
        start += len(part)
    return b"".join(parts)


def _data_extents(descriptor: int, size_bytes: int) -> Iterator[tuple[int, int]]:
    """The byte ranges [start, end) of a file that are not holes."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size_bytes
        return
    end = 0
    while end < size_bytes:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:  # not "only a hole is left": the file system cannot tell
                yield end, size_bytes
            return
        end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size_bytes)
        yield start, end


def _sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
