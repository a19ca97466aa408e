"""The scalars of event files: millions of values, collected as bytes and turned into arrays once at the end."""

from __future__ import annotations

import struct
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tensorboard.compat.proto import summary_pb2, types_pb2

from tbhooks.data.frame import INSIDE_ATTENTION
from tbhooks.data.grids import is_of_site
from tbhooks.data.stats import STAT_NAMES, Floats
from tbhooks.runs.event_records import summary_of_bytes
from tbhooks.sinks.tensorboard.protobuf import varint

LONGEST_TAG = 1 << 16
_VALUE = 0x0A  # how a value starts in a summary, and a tag in a value
_HISTOGRAM = 0x2A
_WORTH_A_TEMPLATE, _MOST_TEMPLATES = 20, 4
_STATS = frozenset((*STAT_NAMES, *INSIDE_ATTENTION))


class Series(NamedTuple):
    """The steps and values of a scalar, sorted by step."""

    steps: NDArray[np.int64]
    values: Floats


@lru_cache(maxsize=1 << 16)
def _repeats_frame(tag: str) -> bool:
    """Whether a scalar is a statistic that the frame's rows also hold."""
    return is_of_site(tag) and tag.partition("/")[0].rpartition(".")[2] in _STATS


class _Template:
    """The scalars at the start of a summary. The next step most likely has the same tags in the same order.

    Comparing all bytes around the values at once is fifty times faster than comparing each tag.
    """

    def __init__(self, scalars: list[bytes], numbers: list[int], wanted: list[int]) -> None:
        lengths = [varint(len(value)) for value in scalars]
        text = b"".join([bytes([_VALUE]) + length + value for length, value in zip(lengths, scalars, strict=True)])
        sizes = [1 + len(length) + len(value) for length, value in zip(lengths, scalars, strict=True)]
        self._ends = np.cumsum(sizes)
        self._value_bytes = (self._ends[:, None] + np.arange(-4, 0)).ravel()
        self._text = np.frombuffer(text, np.uint8).copy()
        self._text[self._value_bytes] = 0
        self.length = len(text)
        self.numbers = array("i", numbers)
        self.wanted = wanted

    def read(self, summary: bytes) -> bytes | None:
        """The values, four bytes each, if the summary starts with the same scalars."""
        if len(summary) < self.length:
            return None
        start = np.frombuffer(summary, np.uint8, self.length).copy()
        numbers = start[self._value_bytes]
        start[self._value_bytes] = 0
        return numbers.tobytes() if np.array_equal(start, self._text) else None


class ScalarLog:
    """Collects the scalars of the summaries of one event after the other.

    Nearly all values consist of a known tag and four bytes, so that a table lookup replaces parsing.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, int] = {}
        self._numbers: dict[str, int] = {}
        self._tags: list[str] = []
        self._templates: deque[_Template] = deque(maxlen=_MOST_TEMPLATES)
        self._new_style: set[str] = set()
        self._which = array("i")
        self._raw = bytearray()
        self._steps, self._lengths = array("q"), array("q")

    def add(self, step: int, summary: bytes) -> tuple[dict[str, float], list[bytes]]:
        """Adds the scalars; returns those that no frame row holds, and the values that are not scalars."""
        scalars: dict[str, float] = {}
        for template in self._templates:
            raw = template.read(summary)
            if raw is not None:
                self._keep(step, template.numbers, raw)
                scalars = {self._tags[template.numbers[i]]: _number(raw[4 * i : 4 * i + 4]) for i in template.wanted}
                summary = summary[template.length :]
                break
        numbers, encoded, others = self._sorted(summary)
        self._keep(step, array("i", numbers), b"".join([value[-4:] for value in encoded]))
        wanted = [i for i, number in enumerate(numbers) if not _repeats_frame(self._tags[number])]
        scalars |= {self._tags[numbers[i]]: _number(encoded[i][-4:]) for i in wanted}
        self._add_template(summary, numbers, encoded, wanted)
        return scalars, others

    def _sorted(self, summary: bytes) -> tuple[list[int], list[bytes], list[bytes]]:
        numbers, scalars, others = [], [], []
        get = self._known.get
        for value in _without_histograms(summary):
            number = get(value[:-4], -1)
            if number < 0:
                number, value = self._parse(value)  # noqa: PLW2901
            if number < 0:
                others.append(value)
            else:
                numbers.append(number)
                scalars.append(value)
        return numbers, scalars, others

    def _keep(self, step: int, numbers: array[int], raw: bytes) -> None:
        self._which.extend(numbers)
        self._raw += raw
        self._steps.append(step)
        self._lengths.append(len(numbers))

    def _add_template(self, summary: bytes, numbers: list[int], scalars: list[bytes], wanted: list[int]) -> None:
        """Only if there are enough scalars, at the start of the summary and in the usual encoding."""
        if len(scalars) >= _WORTH_A_TEMPLATE and all(len(value) > 4 for value in scalars):
            template = _Template(scalars, numbers, wanted)
            if template.read(summary) is not None:
                self._templates.appendleft(template)

    @property
    def entries(self) -> int:
        """The number of entries so far; a summary adds one or two."""
        return len(self._steps)

    def series(self, spans: Sequence[tuple[int, int]] | None = None) -> dict[str, Series]:
        """Every scalar by its tag; if `spans` is given, of these ranges of entries only."""
        small = np.uint16 if len(self._tags) < 1 << 16 else np.int32  # NumPy sorts 16 bits in linear time
        which = np.frombuffer(self._which, np.int32).astype(small) if self._which else np.zeros(0, small)
        values = np.frombuffer(bytes(self._raw), "<f4").astype(np.float64)
        lengths = np.array(self._lengths, dtype=np.int64)
        steps = np.repeat(np.array(self._steps, dtype=np.int64), lengths)
        if spans is not None:
            entries = np.zeros(len(lengths), dtype=bool)
            for begin, end in spans:
                entries[begin:end] = True
            kept = np.repeat(entries, lengths)
            which, values, steps = which[kept], values[kept], steps[kept]
        order = np.argsort(which, kind="stable")
        values, steps = values[order], steps[order]
        ends = np.cumsum(np.bincount(which, minlength=len(self._tags))).tolist()
        starts = [0, *ends][:-1]
        return {
            tag: _by_step(steps[start:end], values[start:end])
            for tag, start, end in zip(self._tags, starts, ends, strict=True)
            if start < end
        }

    def _parse(self, value: bytes) -> tuple[int, bytes]:
        """The number of a scalar's tag (-1 for other values), and bytes that end with the four bytes of the scalar."""
        try:
            parsed = summary_pb2.Summary.Value.FromString(value)
        except DecodeError:
            return -1, value
        if len(parsed.tag) > LONGEST_TAG:
            return -1, value
        if parsed.HasField("simple_value"):
            plain = summary_pb2.Summary.Value(tag=parsed.tag, simple_value=parsed.simple_value).SerializeToString()
            number = self._number(parsed.tag)
            if plain == value:
                self._known[value[:-4]] = number
            return number, struct.pack("<f", parsed.simple_value)
        raw = self._new_style_scalar(parsed)
        return (-1, value) if raw is None else (self._number(parsed.tag), raw)

    def _new_style_scalar(self, value: summary_pb2.Summary.Value) -> bytes | None:
        """A scalar written as a tensor, as TensorFlow 2 does; only the first value of a tag has the metadata."""
        if value.metadata.plugin_data.plugin_name == "scalars":
            self._new_style.add(value.tag)
        tensor = value.tensor
        if value.tag not in self._new_style or tensor.dtype != types_pb2.DT_FLOAT or len(tensor.tensor_shape.dim):
            return None
        if len(tensor.float_val) == 1:
            return struct.pack("<f", tensor.float_val[0])
        return tensor.tensor_content if len(tensor.tensor_content) == 4 else None

    def _number(self, tag: str) -> int:
        if tag not in self._numbers:
            self._numbers[tag] = len(self._tags)
            self._tags.append(tag)
        return self._numbers[tag]


def _number(raw: bytes) -> float:
    number: float = struct.unpack("<f", raw)[0]
    return number


def _without_histograms(summary: bytes) -> Iterator[bytes]:
    """The values of a summary without TensorBoard's histograms: most of its bytes, and already in the frames.

    Parses lengths of one to three bytes; any other encoding is left to protobuf.
    """
    at, end = 0, len(summary)
    try:
        while at < end:
            start = at + 2
            length = summary[at + 1]
            for shift in (7, 14):
                if length >> shift:
                    length += (summary[start] - 1) << shift
                    start += 1
            if summary[at] != _VALUE or length >> 21 or start + length > end:
                break
            name = summary[start + 1]
            tagged = summary[start] == _VALUE and name < 0x80 and length > name + 2
            if not tagged or summary[start + 2 + name] != _HISTOGRAM:
                yield summary[start : start + length]
            at = start + length
    except IndexError:
        pass
    if at < end:
        yield from summary_of_bytes().FromString(summary[at:]).value


def _by_step(steps: NDArray[np.int64], values: Floats) -> Series:
    if (np.diff(steps) < 0).any():  # a run that was resumed
        order = np.argsort(steps, kind="stable")
        return Series(steps[order], values[order])
    return Series(steps, values)
