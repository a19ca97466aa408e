"""Reads the tensors that come out of compiled graphs, where hooks were compiled with the model."""

from __future__ import annotations

from torch import Tensor

from tbhooks.capture.autograd import in_backward
from tbhooks.capture.compile import dynamo
from tbhooks.capture.hooks.active_step import ActiveStep
from tbhooks.capture.hooks.gradients import GradientReader
from tbhooks.capture.hooks.hook_types import ForwardHook, GradientHook
from tbhooks.capture.hooks.outputs import OutputReader, record_tensor
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recording.recorder import NO_SITE, Recorder
from tbhooks.capture.scalars.metrics import PAIR
from tbhooks.data.frame import ROOT, Site
from tbhooks.data.self_report import Report


class GraphReader:
    """Reads one tensor for each operator that a hook has left in a graph."""

    def __init__(self, step: ActiveStep, outputs: OutputReader, gradients: GradientReader, report: Report) -> None:
        self._step = step
        self._outputs = outputs
        self._gradients = gradients
        self._report = report

    def on_tensor(self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, step_id: int) -> None:
        """`gradient` says whether the gradient of an activation will come too; `step_id` is what the graph was given
        when its forward ran, by which a late gradient is assigned to its forward.
        """
        step = self._step
        if kind == "gradient":
            self._on_gradient(hook, tensor, index, step_id)
            return
        recorder = step.active_recorder()
        provisional = step.provisional_pass(recorder)
        if in_backward():
            return
        self._report.hooks_fired += recorder is not None or provisional is not None
        if recorder is not None and recorder is step.evaluation and not recorder.overflowed:
            forward = step.passes.current()
            recorder.read_metrics(kind, hook.path, index, tensor, forward)
            if kind != PAIR:
                record_tensor(recorder, _site(recorder, hook, kind, index), tensor, self._report, forward)
        context = step.context
        if context is not None and (recorder is step.recorder or provisional is not None):
            forward = context.graph_passes.setdefault(step_id, provisional or step.passes.current())
            self._read(context, step.passes.note(forward), hook, tensor, kind, index, gradient)

    def on_operation(self, hook: ForwardHook, tensor: Tensor, kind: str, index: str) -> None:
        """Reads a tensor inside an operation, or the numbers of its heads."""
        what, _, name = kind.partition(":")
        recorder = None if in_backward() or not hook.reads_operations else self._step.active_recorder()
        if recorder is None or recorder.overflowed:
            return
        if what == "functional":
            self._outputs.read_operation(recorder, hook, f"{hook.path}:{name}", index, tensor)
        elif recorder is self._step.recorder:
            self._step.heads.add(f"{hook.path}:{name}{index}", tensor, self._step.current_pass(recorder))

    def _on_gradient(self, hook: ForwardHook, tensor: Tensor, index: str, step_id: int) -> None:
        context = self._step.context
        expected = None if context is None else context.graph_gradients.get((hook.path, index))
        if context is not None and expected is not None and step_id in context.graph_passes:
            expected.passes = [context.graph_passes[step_id]]
            self._gradients.on_gradient(expected, tensor)

    def _read(
        self, context: StepContext, forward: Pass, hook: ForwardHook, tensor: Tensor, kind: str, index: str,
        gradient: str,
    ) -> None:  # fmt: skip
        step, recorder = self._step, self._step.recorder
        is_provisional = step.is_provisional(forward)
        if recorder.overflowed:
            return
        recorder.read_metrics(kind, hook.path, index, tensor, forward)
        if kind == PAIR:
            return
        record_tensor(recorder, _site(recorder, hook, kind, index), tensor, self._report, forward)
        if not is_provisional and (hook.collects_inputs if kind == "input" else hook.collects_outputs):
            self._outputs.collect(hook.path, kind, index, tensor, forward)
        if kind != "activation":
            return
        hook.note_output(index, tensor)
        (forward.paths if is_provisional else context.called).add(hook.path)
        if hook.has_units and not is_provisional:
            step.dead_units.add(f"activation/{hook.path}{index}", tensor, forward)
        if gradient == dynamo.GRADIENT_COMES:
            forward.hooked = True
            self._expect_gradient(context, forward, hook, index)
        elif gradient == dynamo.LOST_GRADIENT and hook.reads_gradients:
            self._report.mark_unseen(f"gradient/{hook.path}{index}", "compiled autograd takes no hooks")
        if hook.path == ROOT:
            step.passes.end_loose()
            step.gate.next_step()

    def _expect_gradient(self, context: StepContext, forward: Pass, hook: ForwardHook, index: str) -> None:
        if (hook.path, index) not in context.graph_gradients:
            expected = GradientHook(self._gradients, context, is_view=False)
            if hook.reads_gradients:
                expected.sites.append(self._step.recorder.number(Site(hook.path, "gradient", index)))
            context.graph_gradients[hook.path, index] = expected
            context.gradient_hooks.append(expected)
        context.graph_gradients[hook.path, index].passes.append(forward)


def _site(recorder: Recorder, hook: ForwardHook, kind: str, index: str) -> int:
    wanted = hook.reads_inputs if kind == "input" else hook.reads_outputs
    return recorder.number(Site(hook.path, kind, index)) if wanted else NO_SITE
