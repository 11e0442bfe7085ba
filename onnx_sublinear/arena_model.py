"""ONNX Runtime's arena, as a pure model: which bytes it takes from the system for a sequence of blocks.

The arena (a best-fit allocator with coalescing) takes regions from the system and never returns them; blocks are
multiples of 256 bytes; a chunk is split where at least half of it, or 128 MiB, would be wasted. A region is as large as
the request (kSameAsRequested) or the next power of two that fits, starting at 1 MiB and doubling (kNextPowerOfTwo).
Source: onnxruntime/core/framework/bfc_arena.cc.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Literal

__all__ = ["Arena", "Extension", "rounded_block"]

Extension = Literal["next_power_of_two", "same_as_requested"]

_GRANULE_BYTES = 256  # kMinAllocationSize
_FIRST_REGION_BYTES = 1 << 20  # DEFAULT_INITIAL_CHUNK_SIZE_BYTES
_MOST_DEAD_BYTES = 128 << 20  # DEFAULT_MAX_DEAD_BYTES_PER_CHUNK
_MOST_DOUBLED_BYTES = 1 << 30  # DEFAULT_MAX_POWER_OF_TWO_EXTEND_BYTES
_PAGE_BYTES = 4096
_REGION_GAP_BYTES = 1 << 44
_MOST_REGIONS = 1 << 18  # later regions lie below earlier ones, as the system places large blocks
_HANDLE_SHARE = 32  # one handle of 8 bytes for each granule of a region


def rounded_block(size_bytes: int) -> int:
    """`size_bytes` as a multiple of the arena's granule."""
    return -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES


@dataclass(slots=True)
class _Chunk:
    size_bytes: int
    is_free: bool
    before: int  # start of the neighbour in the region, or -1
    after: int


class Arena:
    """One arena, empty at first.

    Args:
        extension: how it grows.

    Attributes:
        taken_bytes: what it has taken from the system so far, its table of chunks included.
        resident_bytes: what of that has been written to: pages in which a block lay, and the table.
    """

    def __init__(self, extension: Extension = "next_power_of_two") -> None:
        self.taken_bytes = 0
        self.resident_bytes = 0
        self._extension = extension
        self._next_region_bytes = _FIRST_REGION_BYTES
        self._regions = 0
        self._chunks: dict[int, _Chunk] = {}  # by start
        self._touched: dict[int, bytearray] = {}  # by region, one byte a page
        self._free: list[tuple[int, int]] = []  # (size, start), ascending: the bins of the arena one behind the other

    def allocate(self, size_bytes: int) -> int:
        """Takes a block; its start, or -1 for an empty one."""
        if size_bytes <= 0:
            return -1
        wanted = rounded_block(size_bytes)
        place = bisect_left(self._free, (wanted, -1))
        if place == len(self._free):
            self._extend(wanted)
            place = bisect_left(self._free, (wanted, -1))
        size, start = self._free.pop(place)
        chunk = self._chunks[start]
        chunk.is_free = False
        if size >= 2 * wanted or size - wanted >= _MOST_DEAD_BYTES:
            self._split(start, chunk, wanted)
        self._touch(start, wanted)
        return start

    def release(self, start: int) -> None:
        """Gives a block back."""
        if start < 0:
            return
        chunk = self._chunks[start]
        if chunk.after >= 0 and self._chunks[chunk.after].is_free:
            self._merge(start, chunk.after)
        if chunk.before >= 0 and self._chunks[chunk.before].is_free:
            before = chunk.before
            self._unlist(before)
            chunk = self._absorb(before, start)
            start = before
        chunk.is_free = True
        insort(self._free, (chunk.size_bytes, start))

    def _region_bytes(self, wanted: int) -> int:
        if self._extension == "same_as_requested":
            return wanted
        grown = False
        while wanted > self._next_region_bytes:
            self._next_region_bytes *= 2
            grown = True
        size = self._next_region_bytes
        if not grown:
            self._next_region_bytes = min(2 * size, max(_MOST_DOUBLED_BYTES, size))
        return size

    def _extend(self, wanted: int) -> None:
        size = self._region_bytes(wanted)
        start = (_MOST_REGIONS - self._regions) * _REGION_GAP_BYTES
        self._regions += 1
        self.taken_bytes += size + size // _HANDLE_SHARE
        self.resident_bytes += size // _HANDLE_SHARE
        self._touched[start // _REGION_GAP_BYTES] = bytearray(-(-size // _PAGE_BYTES))
        self._chunks[start] = _Chunk(size, True, -1, -1)
        insort(self._free, (size, start))

    def _touch(self, start: int, size_bytes: int) -> None:
        region, offset = divmod(start, _REGION_GAP_BYTES)
        pages = self._touched[region]
        first, end = offset // _PAGE_BYTES, -(-(offset + size_bytes) // _PAGE_BYTES)
        untouched = pages.count(0, first, end)
        if untouched:
            self.resident_bytes += untouched * _PAGE_BYTES
            pages[first:end] = b"\1" * (end - first)

    def _split(self, start: int, chunk: _Chunk, size_bytes: int) -> None:
        rest = start + size_bytes
        self._chunks[rest] = _Chunk(chunk.size_bytes - size_bytes, True, start, chunk.after)
        if chunk.after >= 0:
            self._chunks[chunk.after].before = rest
        insort(self._free, (chunk.size_bytes - size_bytes, rest))
        chunk.size_bytes, chunk.after = size_bytes, rest

    def _unlist(self, start: int) -> None:
        entry = (self._chunks[start].size_bytes, start)
        del self._free[bisect_left(self._free, entry)]

    def _merge(self, start: int, after: int) -> None:
        self._unlist(after)
        self._absorb(start, after)

    def _absorb(self, start: int, after: int) -> _Chunk:
        chunk, gone = self._chunks[start], self._chunks.pop(after)
        chunk.size_bytes += gone.size_bytes
        chunk.after = gone.after
        if gone.after >= 0:
            self._chunks[gone.after].before = start
        return chunk
