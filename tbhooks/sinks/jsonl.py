"""One frame a line of JSON, for tools that are not TensorBoard; `read` gives the frames back unchanged.

NaN and infinities are written as the strings "nan", "inf" and "-inf": JSON itself has no word for them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tbhooks.errors import TbhooksError
from tbhooks.frame import Frame
from tbhooks.plain import number, plain


class JsonlSink:
    """Appends frames to a file, which is made with its directory if need be."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_cut_line(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def write(self, frame: Frame) -> None:
        if not frame.has_numbers:
            return
        line = json.dumps(plain(frame.to_dict()), allow_nan=False, separators=(",", ":"))
        self._file.write(line + "\n")
        self._file.flush()

    def last_step(self) -> int | None:
        return max((frame.step for frame in read(self.path)), default=None)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read(path: str | Path) -> Iterator[Frame]:
    """The frames of a file, oldest first. A last line cut short by a crash is left out."""
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield Frame.from_dict(_numbers(json.loads(line)))
            except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as problem:
                raise TbhooksError(f"{path}, line {number}, is not a tbhooks frame: {problem!r}") from problem


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


def _numbers(data: Any) -> Any:
    """Only where numbers stand: a module may well be called "inf"."""
    data["values"] = [[number(x) for x in row] for row in data["values"]]
    data["scalars"] = {tag: number(x) for tag, x in data["scalars"].items()}
    for finding in data["findings"]:
        evidence = finding["evidence"].items()
        finding["evidence"] = {key: number(x) for key, x in evidence}
    return data
