"""What the hooks of a watch tell: reduced at once, detached, and not kept.

Whatever goes wrong in here is counted and told once; training never sees it, and results never change.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from tbhooks.capture import dynamo, selection, sharded_tensors, tensor_tree
from tbhooks.capture.autograd import in_backward, is_traced, without_dispatch_modes
from tbhooks.capture.hooks.collectors import Collector
from tbhooks.capture.hooks.dead_units import RECTIFIED
from tbhooks.capture.hooks.function_mode import Functional
from tbhooks.capture.hooks.hook_types import ForwardHook, GradientHook, ScaledLossHook
from tbhooks.capture.hooks.manager import HookManager, hook_tensor
from tbhooks.capture.hooks.passes import Pass
from tbhooks.capture.hooks.reading import NOT_TRAINED, Reader, StepListener
from tbhooks.capture.hooks.reducing import reduce_and_note
from tbhooks.capture.hooks.step_context import StepContext
from tbhooks.capture.recorder import NO_SITE, Recorder
from tbhooks.data.frame import EVALUATION_SINCE, ROOT, Site
from tbhooks.data.self_report import Report, describe_exception

# A hook that has failed on so many logged steps in a row is not called any more.
MOST_FAILURES = 3


class Observer(Reader):
    """The hooks of one watch. `begin` opens a logged step, `end` closes it."""

    def __init__(
        self, model: nn.Module, selector: selection.Selector, recorder: Recorder, listener: StepListener | None,
        report: Report,
    ) -> None:  # fmt: skip
        super().__init__(model, recorder, listener, report)
        self._failing: dict[str, ForwardHook] = {}
        self._functional = Functional(self._saw_functional, report) if recorder.wants("functional") else None
        self.placement = HookManager(
            self, self._model, selector, recorder.kinds, self._functional, self.collectors, report
        )

    @property
    def gradients_seen(self) -> bool:
        """Whether a backward pass has reached the open step."""
        return self.seen is not None and self.seen.gradients

    @property
    def called(self) -> bool:
        """Whether any watched module was called in the open step."""
        return self.seen is not None and bool(self.seen.called)

    @property
    def is_blind(self) -> bool:
        """Whether nothing was seen of the model, or only its outside."""
        if self.seen is not None and self.seen.left_out and not self.called:
            return False
        return not self.called or (self.seen is not None and self.seen.is_blind_below(self.placement.hooks))

    def begin(self, attach: bool) -> None:
        """Opens a logged step and puts the hooks on."""
        self._see_anew()
        for hook in self._failing.values():
            hook.broken = hook.failures >= MOST_FAILURES
        if attach:
            self.attach()

    def add_collector(self, collector: Collector) -> None:
        """Somebody more looks on, from the open step on if there is one."""
        self.collectors.add(collector)
        if self.seen is not None:
            collector.begin()
        self.placement.reattach()

    def end(self, keep_hooks: bool) -> None:
        """Closes a step that ran to its end, and reports what it should have shown and did not."""
        if self._functional is not None and self.gate.was_compiled:
            self._report.mark_unseen("functional", "inside compiled code modules are seen, and operations are not")
        if self.seen is not None:
            self.placement.report_lost(self.seen.called)
            watched = [path for path, hook in self.placement.hooks.items() if hook.reads]
            self.seen.report_missing(self._report, watched, self._recorder.sites, self.passes.unused())
            self._forgive(self.seen)
        self._close()
        if not keep_hooks:
            self.detach()

    def leave_out_unused(self) -> None:
        """Forwards that no backward went through are no part of the step, if others are."""
        unused = self.passes.unused()
        if self._recorder.drop(unused) and not all(each.raised or each.evaluates for each in unused):
            self._report.log_once(NOT_TRAINED)
        if self.passes.evaluation_was_trained and self.admission.since is not None:
            self._recorder.scalar(EVALUATION_SINCE, self.admission.since)

    def other_optimizer_stepped(self) -> None:
        """One that owns no parameter of the model."""
        if self.seen is not None:
            self.passes.another_optimizer_stepped()

    def optimizer_steps(self, step: int) -> None:
        """One that does is about to: gradients that were made for others are gone by now."""
        model = self._model()
        if model is not None:
            self.admission.optimizer_steps(model, step)
        if self.seen is not None:
            cleared = self.passes.cleared()
            if cleared:
                self._recorder.drop(cleared)

    def start_over(self) -> None:
        """Forgets what the open step has seen: it did not happen."""
        if self.seen is not None:
            self._close()
            self._open_anew()

    def abandon(self) -> None:
        """Closes a step that was cut short, and leaves no hook behind."""
        self._expects_forward = False
        self.placement.stop()
        self._close()
        self.remove()
        self.placement.sweep()

    def _close(self) -> None:
        self.units.forget()
        self.collectors.forget()
        if self.seen is not None:
            self.seen.drop()
            self.seen = None
            self.gate.next_step()
        if self._functional is not None:
            self._functional.abandon()

    # Putting hooks on and taking them off.

    def attach(self) -> None:
        """From now on what runs is read."""
        self.placement.attach()
        self.gate.open = True

    def detach(self) -> None:
        """Nothing is read from now on. Hooks that are part of compiled code stay, and only look at the gate."""
        self.gate.open = False
        if not self.gate.was_compiled:
            self.remove()

    def remove(self) -> None:
        """Leaves no hook on any module."""
        self.gate.open = False
        self.placement.detach()

    def watch_scaled_loss(self, loss: Tensor, scale: Tensor) -> None:
        """Gradients of the backward pass that starts from this loss are divided by its scale."""
        if self.seen is not None and loss.requires_grad:
            hook_tensor(loss, ScaledLossHook(self, self.seen, scale))

    # What the hooks call.

    def saw_output(self, hook: ForwardHook, output: object) -> None:
        if is_traced():
            return
        report = self._report
        started = report.enter()
        try:
            recorder = self.destination()
            tried = self._tried(recorder)
            if (recorder is None or recorder.overflowed) and tried is None:
                return
            with without_dispatch_modes():
                self._report.hooks_fired += 1
                if recorder is not None and recorder is self.evaluation:
                    self._read_evaluated(recorder, hook, output)
                if self.seen is not None and (recorder is self._recorder or tried is not None):
                    self._read_output(self.seen, self.passes.note(tried or self.passes.current()), hook, output)
        except Exception as problem:
            self._failed(hook, problem)
        finally:
            report.leave(started)

    def _failed(self, hook: ForwardHook, problem: Exception) -> None:
        """A hook that failed is called again on the next logged step, and given up after several in a row."""
        hook.broken = True
        hook.failures += 1
        self._failing[hook.path] = hook
        gives_up = f"; given up after {MOST_FAILURES} logged steps in a row" if hook.failures >= MOST_FAILURES else ""
        self._report.mark_unseen(hook.path, f"its hook failed: {describe_exception(problem)}{gives_up}", replace=True)
        self._report.error(f"hook on {hook.path}", problem)

    def _forgive(self, seen: StepContext) -> None:
        """Of those that failed before, the ones that did not fail in this step."""
        for path, hook in list(self._failing.items()):
            if not hook.broken and path in seen.called:
                hook.failures = 0
                del self._failing[path]
                self._report.mark_seen(path)

    def _read_evaluated(self, recorder: Recorder, hook: ForwardHook, output: object) -> None:
        for index, tensor in tensor_tree.tensors(output) if hook.reads_outputs else ():
            site = recorder.number(Site(hook.path, "activation", index))
            reduce_and_note(recorder, site, tensor, self._report, self.passes.current())

    def _read_output(self, seen: StepContext, of: Pass, hook: ForwardHook, output: object) -> None:
        (of.paths if self._is_doubtful(of) else seen.called).add(hook.path)
        found = tensor_tree.tensors(output)
        if not found:
            self._report.mark_unseen(hook.path, f"its output, a {type(output).__name__}, shows no tensor")
        if any(
            sharded_tensors.is_dtensor(tensor) for _, tensor in found
        ):  # what parallelize_module put on comes after ours
            self.placement.come_last(hook)
        inside = self.gate.was_compiled and dynamo.with_gradients_inside(found)
        for index, tensor in found:
            self._saw_tensor(seen, of, hook, index, tensor, hidden=inside)

    def saw_inputs(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        with self._report.guarded(f"reading inputs of {hook.path}"):
            recorder = self.destination()
            if recorder is not None and not recorder.overflowed and not in_backward():
                self._note_called(recorder, hook)
                of = self._owner(recorder)
                with without_dispatch_modes():
                    for index, tensor in tensor_tree.inputs(args, kwargs):
                        if hook.reads_inputs:
                            site = recorder.number(Site(hook.path, "input", index))
                            reduce_and_note(recorder, site, tensor, self._report, of)
                        if hook.shows_inputs and recorder is self._recorder:
                            self._show(hook.path, "input", index, tensor)

    def forward_begins(self) -> None:
        """One of the whole model."""
        with self._report.guarded("before the model's forward"):
            self.passes.begin()
            if self.gate.was_compiled:  # gradients from compiled parts know the forward by it
                self.gate.next_step()

    def forward_ends(self, output: object) -> None:
        """One way or another; by an exception, there is no output."""
        with self._report.guarded("after the model's forward"):
            self.passes.end(output)

    def saw_call(self, hook: ForwardHook) -> None:
        with self._report.guarded(f"call of {hook.path}"):
            recorder = self.destination() if not is_traced() else None
            if recorder is not None:
                self._note_called(recorder, hook)

    def _saw_functional(self, path: str, index: str, tensor: Tensor) -> bool:
        hook = self.placement.hooks.get(path.rpartition(":")[0])
        recorder = None if hook is None or not hook.reads_operations or in_backward() else self.destination()
        if hook is None or recorder is None or recorder.overflowed:
            return False
        site = recorder.number(Site(path, "functional", index))
        reduce_and_note(recorder, site, tensor, self._report, self._owner(recorder))
        if path.endswith(RECTIFIED) and recorder is not self.evaluation:
            self.units.see(f"functional/{path}{index}", tensor)
        return hook.shows_outputs and recorder is self._recorder and self._show(path, "functional", index, tensor)

    def saw_in_graph(
        self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, serial: int
    ) -> None:
        """What hooks see that were compiled with the model."""
        with self._report.guarded(f"compiled hook on {hook.path}"):
            if kind == "gradient":
                placed = None if self.seen is None else self.seen.in_graph.get((hook.path, index))
                if placed is not None and self.seen is not None and serial in self.seen.serials:
                    placed.passes = [self.seen.serials[serial]]
                    self.saw_gradient(placed, tensor)
                return
            recorder = self.destination()
            tried = self._tried(recorder)
            if in_backward():
                return
            self._report.hooks_fired += recorder is not None or tried is not None
            if recorder is not None and recorder is self.evaluation and not recorder.overflowed:
                site = self._site_in_graph(recorder, hook, kind, index)
                reduce_and_note(recorder, site, tensor, self._report, self.passes.current())
            if self.seen is not None and (recorder is self._recorder or tried is not None):
                of = self.passes.note(self.seen.serials.setdefault(serial, tried or self.passes.current()))
                self._read_in_graph(self.seen, of, hook, tensor, kind, index, gradient)

    def _read_in_graph(
        self, seen: StepContext, of: Pass, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str
    ) -> None:  # fmt: skip
        recorder, doubtful = self._recorder, self._is_doubtful(of)
        if recorder.overflowed:
            return
        reduce_and_note(recorder, self._site_in_graph(recorder, hook, kind, index), tensor, self._report, of)
        if not doubtful and (hook.shows_inputs if kind == "input" else hook.shows_outputs):
            self._show(hook.path, kind, index, tensor)
        if kind != "activation":
            return
        (of.paths if doubtful else seen.called).add(hook.path)
        if hook.has_units and not doubtful:
            self.units.see(f"activation/{hook.path}{index}", tensor)
        if gradient == dynamo.GRADIENT_COMES:
            of.hooked = True
            self._expect_in_graph(seen, of, hook, index)
        elif gradient == dynamo.LOST_GRADIENT and hook.reads_gradients:
            self._report.mark_unseen(f"gradient/{hook.path}{index}", "compiled autograd takes no hooks")
        if hook.path == ROOT:
            self.passes.end_loose()
            self.gate.next_step()

    def _site_in_graph(self, recorder: Recorder, hook: ForwardHook, kind: str, index: str) -> int:
        wanted = hook.reads_inputs if kind == "input" else hook.reads_outputs
        return recorder.number(Site(hook.path, kind, index)) if wanted else NO_SITE

    def _expect_in_graph(self, seen: StepContext, of: Pass, hook: ForwardHook, index: str) -> None:
        if (hook.path, index) not in seen.in_graph:
            placed = GradientHook(self, seen, is_view=False)
            if hook.reads_gradients:
                placed.sites.append(self.number(Site(hook.path, "gradient", index)))
            seen.in_graph[hook.path, index] = placed
            seen.placed.append(placed)
        seen.in_graph[hook.path, index].passes.append(of)

    # Which passes are read.

    # What is done with a tensor.
