"""One frame a line of JSON, for tools that are not TensorBoard; `read` gives the frames back unchanged.

NaN and infinities are written as the strings "nan", "inf" and "-inf": JSON itself has no word for them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tbhooks.data.errors import TbhooksError
from tbhooks.data.frame import Frame
from tbhooks.data.jsonable import parse_number, to_jsonable


class JsonlSink:
    """Appends frames to a file, which is made with its directory if need be.

    Each frame is handed to the operating system when it is written. One that does not fit on the disk leaves nothing
    behind, and later ones go on where it would have stood.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._place = self.path.absolute()  # a later chdir must not send it elsewhere
        self._place.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(self._place)
        self._file: io.FileIO = self._open()
        self._is_torn = False
        """Whether part of a line is in the file that could not be taken back."""

    def write(self, frame: Frame) -> None:
        if not frame.has_numbers:
            return
        line = json.dumps(to_jsonable(frame.to_dict()), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self._notice_deletion()
        data, done = b"\n" + line if self._is_torn else line, 0
        size = os.fstat(self._file.fileno()).st_size
        try:
            while done < len(data):  # once, where the system takes it all
                done += self._file.write(data[done:]) or 0
            self._is_torn = False
        except OSError:
            if done and not self._take_back(size):
                self._is_torn = data[done - 1 : done] != b"\n"
            raise

    def last_step(self) -> int | None:
        return max((frame.step for frame in read(self._place)), default=None)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._file.close()

    def _open(self) -> io.FileIO:
        return self._place.open("ab", buffering=0)

    def _notice_deletion(self) -> None:
        """What is written to a file that has no name any more is lost."""
        if os.fstat(self._file.fileno()).st_nlink:
            return
        try:
            fresh = self._open()
        except OSError as problem:
            raise FileNotFoundError(
                f"{self._place} was deleted with its directory while it was being written: frames are lost until the "
                "directory is there again"
            ) from problem
        self._file.close()
        self._file, self._is_torn = fresh, False

    def _take_back(self, size: int) -> bool:
        """Cuts off what there is of a line that failed, so that the next one is not glued to it; whether it could."""
        try:
            self._file.truncate(size)
        except OSError:  # a pipe, or a file that may only grow
            return False
        return True


def read(path: str | Path) -> Iterator[Frame]:
    """The frames of a file, oldest first. Lines cut short by a crash or a full disk are left out."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                data = json.loads(line)
            except ValueError as problem:
                if _begins_as_a_frame(line):
                    continue
                raise TbhooksError(f"{path}, line {number}, is not a tbhooks frame: {problem!r}") from problem
            try:
                yield Frame.from_dict(_numbers(data))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
                raise TbhooksError(f"{path}, line {number}, is not a tbhooks frame: {problem!r}") from problem


def _begins_as_a_frame(line: bytes) -> bool:
    start = line.removesuffix(b"\n")[: len(_START)]
    return bool(start) and _START.startswith(start)


def _drop_cut_line(path: Path) -> None:
    """What a crash left of its last line can never be read; the next frame must not be glued to it."""
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


_CHUNK = 1 << 16
_START = b'{"step":'
"""How every line begins."""


def _numbers(data: Any) -> Any:
    """Only where numbers stand: a module may well be called "inf"."""
    data["values"] = [[parse_number(x) for x in row] for row in data["values"]]
    data["scalars"] = {tag: parse_number(x) for tag, x in data["scalars"].items()}
    for finding in data["findings"]:
        evidence = finding["evidence"].items()
        finding["evidence"] = {key: parse_number(x) for key, x in evidence}
    return data
