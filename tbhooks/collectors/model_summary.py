"""The layers of a model as a table: parameters at once, outputs from the first logged forward.

Reads sizes and dtypes only, and nothing after the first complete forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tbhooks.capture import selection
from tbhooks.capture.hooks.collectors import Collectors, guarded
from tbhooks.capture.hooks.hook_types import ForwardHook
from tbhooks.capture.recording.packed_step import Read
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.collectors.graph.describe import is_called, shape_of, type_of
from tbhooks.data.artifacts import Artifact
from tbhooks.data.frame import ROOT
from tbhooks.data.self_report import Report
from tbhooks.drawing.model_table import Layer, Layers, as_artifact


@dataclass
class _Outputs:
    """The outputs of a module, by their index."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def first_size(self) -> int:
        """The number of samples, as far as the first output says it."""
        shape = next(iter(self.shapes.values()), ())
        return shape[0] if shape else 0


def _outputs_of(hook: ForwardHook) -> _Outputs:
    """What a hook has read of its module when it was first called in a logged step."""
    made = _Outputs()
    for index, (shape, dtype) in hook.outputs.items():
        made.shapes[index], made.types[index], made.calls[index] = tuple(shape), str(dtype).removeprefix("torch."), 1
        made.nbytes += shape.numel() * dtype.itemsize
    return made


class SummaryCollector:
    """Describes the layers, and adds their outputs once."""

    def __init__(
        self, model: weakref.ref[nn.Module], collectors: Collectors, hooks: Mapping[str, ForwardHook], report: Report
    ) -> None:
        self._model = model
        self._collectors = collectors
        self._report = report
        self._outputs = {path: _outputs_of(hook) for path, hook in hooks.items() if hook.outputs}
        self._samples = next((one.first_size for one in self._outputs.values()), 0)
        self._is_complete = self._is_done = False
        self.layers = self._layers()  # with the outputs that hooks have read before
        self.forget()

    def wants(self, path: str, module: nn.Module) -> bool:
        return not self._is_done

    def wants_inputs(self, path: str, module: nn.Module) -> bool:
        """The inputs of the model have the number of samples."""
        return not self._is_done and path == ROOT

    def begin(self) -> None:
        self.forget()

    def on_tensor(self, path: str, kind: str, index: str, tensor: Tensor) -> None:
        if self._is_complete or self._is_done or kind == "functional":
            return
        if not self._samples and tensor.dim():
            self._samples = shape_of(tensor)[0]
        if kind == "input":
            return
        outputs = self._outputs.setdefault(path, _Outputs())
        outputs.shapes.setdefault(index, shape_of(tensor))
        outputs.types.setdefault(index, type_of(tensor))
        outputs.calls[index] = outputs.calls.get(index, 0) + 1
        outputs.nbytes += tensor.numel() * tensor.element_size()  # Tensor.nbytes does not support sparse tensors
        # Further micro-batches of the step are separate forwards.
        self._is_complete = path == ROOT

    def end(self, recorder: Recorder) -> None:
        if not self._outputs or self._is_done:
            return
        self._is_done = True
        self.layers = layers = self._layers()
        self._collectors.change_subscription()

        def make(_read: Read) -> Iterable[Artifact]:
            return [as_artifact(layers)]

        recorder.artifact(guarded(make, self._report, "writing the summary"))
        self.forget()

    def forget(self) -> None:
        self._outputs, self._samples, self._is_complete = {}, 0, False

    def _layers(self) -> Layers:
        model = self._model()
        return describe_layers(model, self._outputs, self._samples) if model is not None else Layers("", ())


def describe_layers(model: nn.Module, outputs: Mapping[str, _Outputs], samples: int) -> Layers:
    """The layers in the order of their first output, then those without output."""
    modules = selection.walk(model).by_path
    counted: dict[int, str] = {}
    layers: dict[str, Layer] = {}
    for path, module in modules.items():
        parameters = module._parameters
        own = {name: p for name, p in parameters.items() if p is not None and not is_lazy(p)}
        if own or (next(module.children(), None) is None and is_called(module)):
            layers[path] = _layer(path, module, own, counted, outputs.get(path, _Outputs()))
    order = [path for path in outputs if path in layers] + [path for path in layers if path not in outputs]
    known = {id(p): p for p in model.parameters() if not is_lazy(p)}
    nbytes = sum(p.numel() * p.element_size() for p in known.values())
    return Layers(type(model).__name__, tuple(layers[path] for path in order), nbytes, samples if outputs else 0)


def _layer(
    path: str, module: nn.Module, own: Mapping[str, nn.Parameter], counted: dict[int, str], outputs: _Outputs
) -> Layer:
    """`counted` has the parameters of earlier layers; those of this layer are added."""
    new = [p for p in own.values() if id(p) not in counted]
    tied = [counted[id(p)] for p in own.values() if id(p) in counted]
    counted |= {id(p): f"{path}.{name}" for name, p in own.items() if id(p) not in counted}
    return Layer(
        path, type(module).__name__, tuple(outputs.shapes.values()), ", ".join(dict.fromkeys(outputs.types.values())),
        sum(p.numel() for p in new), sum(p.numel() for p in new if p.requires_grad), ", ".join(tied),
        max(outputs.calls.values(), default=0), outputs.nbytes,
    )  # fmt: skip
