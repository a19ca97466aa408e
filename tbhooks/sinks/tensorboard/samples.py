"""The samples of a step in event files: as a table for TensorBoard's TEXT tab, and as JSON that is read back."""

from __future__ import annotations

import json

from tensorboard.compat.proto import summary_pb2

from tbhooks.data.artifacts.samples import Samples
from tbhooks.sinks.tensorboard.findings import plain_text
from tbhooks.sinks.tensorboard.protobuf import plugin_metadata, strings

DATA_TAG = "tbhooks/samples"
TEXT_TAG = "tbhooks/samples/text_summary"


def add(samples: Samples, summary: summary_pb2.Summary) -> None:
    """Adds the samples of a frame to its event."""
    if samples:
        data, text = encode(samples), markdown(samples).encode(errors="replace")
        summary.value.add(tag=DATA_TAG, tensor=strings([data]), metadata=plugin_metadata("tbhooks"))
        summary.value.add(tag=TEXT_TAG, tensor=strings([text]), metadata=plugin_metadata("text"))


def markdown(samples: Samples) -> str:
    """A table of the samples with the largest values, and one of the groups."""
    has_groups, has_positions = bool(samples.groups), any(sample.position is not None for sample in samples)
    columns = ["sample", *(["position"] if has_positions else []), "value", *(["group"] if has_groups else [])]
    lines = [f"The largest of {samples.total} values:", "", *_header(columns)]
    for sample in samples:
        position = [str(sample.position)] if has_positions else []
        group = [plain_text(sample.group)] if has_groups else []
        lines.append(_row([plain_text(str(sample.id)), *position, f"{sample.value:.6g}", *group]))
    if has_groups:
        lines += ["", "The mean of each group:", "", *_header(["group", "mean", "values"])]
        lines += [_row([plain_text(name), f"{mean:.6g}", str(n)]) for name, (mean, n) in samples.groups.items()]
    return "\n".join(lines)


def _header(columns: list[str]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns))]


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def encode(samples: Samples) -> bytes:
    """Samples as JSON; NaN and infinities are strings."""
    return json.dumps(samples.to_dict(), allow_nan=False, separators=(",", ":")).encode()


def decode(content: bytes) -> Samples:
    """Samples from JSON; raises ValueError for anything else."""
    return Samples.from_dict(json.loads(content))
