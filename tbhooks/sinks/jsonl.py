"""Frames as JSON Lines, one frame per line, for other tools; `read` returns the frames unchanged.

NaN and infinities are written as the strings "nan", "inf" and "-inf", which JSON does not have.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tbhooks.data.errors import TbhooksError
from tbhooks.data.frame import Frame
from tbhooks.data.jsonable import parse_number, to_jsonable


class JsonlSink:
    """Appends frames to a file, which is created with its directory if necessary.

    Each frame is passed to the operating system when it is written. A frame that does not fit on the disk leaves no
    partial line behind.

    Args:
        path: the file, by convention with the suffix `.jsonl`.

    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._path = self.path.absolute()  # the working directory may change
        self._path.parent.mkdir(parents=True, exist_ok=True)
        _drop_incomplete_line(self._path)
        self._file: io.FileIO = self._open()
        self._is_torn = False
        """Whether the file ends with part of a line that could not be removed."""

    def write(self, frame: Frame) -> None:
        if not frame.has_numbers:
            return
        line = json.dumps(_jsonable(frame), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._reopen_if_deleted()
        data, done = b"\n" + line if self._is_torn else line, 0
        size = os.fstat(self._file.fileno()).st_size
        try:
            while done < len(data):  # usually once
                done += self._file.write(data[done:]) or 0
            self._is_torn = False
        except OSError:
            if done and not self._truncate(size):
                self._is_torn = data[done - 1 : done] != b"\n"
            raise

    def last_step(self) -> int | None:
        return max((frame.step for frame in read(self._path)), default=None)

    def flush(self) -> None:
        """Nothing to do: writes are not buffered."""

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        return self._path.open("ab", buffering=0)

    def _reopen_if_deleted(self) -> None:
        """Data written to a deleted file would be lost."""
        if os.fstat(self._file.fileno()).st_nlink:
            return
        try:
            reopened = self._open()
        except OSError as problem:
            raise FileNotFoundError(
                f"{self._path} was deleted with its directory while it was being written: logged steps are lost until "
                "the directory exists again"
            ) from problem
        self._file.close()
        self._file, self._is_torn = reopened, False

    def _truncate(self, size: int) -> bool:
        """Removes an incomplete line; returns whether that was possible."""
        try:
            self._file.truncate(size)
        except OSError:  # a pipe, or an append-only file
            return False
        return True


def read(path: str | Path) -> Iterator[Frame]:
    """The frames of a file, oldest first. Lines cut short by a crash or a full disk are skipped.

    Raises:
        TbhooksError: for a line that is not a frame.

    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
            except ValueError as problem:
                if _is_cut_frame(line):
                    continue
                raise TbhooksError(f"{path}, line {number}, is not a logged step of tbhooks: {problem!r}") from problem
            try:
                yield Frame.from_dict(_numbers(data))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
                raise TbhooksError(f"{path}, line {number}, is not a logged step of tbhooks: {problem!r}") from problem


def _is_cut_frame(line: bytes) -> bool:
    start = line.removesuffix(b"\n")[: len(_START)]
    return bool(start) and _START.startswith(start)


def _drop_incomplete_line(path: Path) -> None:
    """Removes the incomplete last line that a crash has left, so that the next frame starts on its own line."""
    if not path.is_file():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - _CHUNK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)


def _jsonable(frame: Frame) -> dict[str, Any]:
    """`to_jsonable(frame.to_dict())`, without a look at each of the thousands of numbers that are finite integers or
    floats anyway.
    """
    data = frame.to_dict()
    rows = data["values"]
    for row, column in np.argwhere(~np.isfinite(frame.values)).tolist():
        rows[row][column] = to_jsonable(rows[row][column])
    plain = {"sites": data["sites"], "values": rows, "buckets": data["buckets"]}
    return {key: plain[key] if key in plain else to_jsonable(value) for key, value in data.items()}


_CHUNK = 1 << 16
_START = b'{"step":'
"""The start of every line."""


def _numbers(data: Any) -> Any:
    """Parses the numbers, and nothing else: a module may be called "inf"."""
    data["values"] = [[parse_number(x) for x in row] for row in data["values"]]
    data["scalars"] = {tag: parse_number(x) for tag, x in data["scalars"].items()}
    for finding in data["findings"]:
        evidence = finding["evidence"].items()
        finding["evidence"] = {key: parse_number(x) for key, x in evidence}
    return data
