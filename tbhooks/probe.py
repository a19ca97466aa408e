"""What the hooks of a watch tell: reduced at once, detached, and not kept.

Whatever goes wrong in here is counted and told once; training never sees it, and results never change.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tbhooks import autograd, compiled, outputs, select, shards
from tbhooks.autograd import NO_BACKWARD, backward_pass, capture_check, in_backward, is_traced, unrecorded
from tbhooks.buffer import NO_SITE, Recorder
from tbhooks.compiled import Gate, runs_as_python
from tbhooks.frame import Site
from tbhooks.functional import Functional
from tbhooks.hooks import ForwardHook, GradientHook, RootHook, ScaledLossHook, is_hooked
from tbhooks.onlookers import Onlooker, Onlookers
from tbhooks.placement import Placement, hook_root, hook_tensor
from tbhooks.reducing import note_readable, reduce_and_note, reduced
from tbhooks.report import Report
from tbhooks.rows import has_no_data
from tbhooks.seen import Seen
from tbhooks.units import RECTIFIED, Units


class Probe:
    """The hooks of one watch. `begin` opens a logged step, `end` closes it."""

    def __init__(self, model: nn.Module, selector: select.Selector, recorder: Recorder, report: Report) -> None:
        self.seen: Seen | None = None
        """The open step; None between logged steps."""
        self.next_forward: Callable[[], None] | None = None
        """Called once, before a training forward is read: the step before it is over."""
        self.backward_ended: Callable[[Tensor | None], None] | None = None
        """Called when a backward pass that reached the open step has ended, with the scale of its loss."""
        self.backward_begins: Callable[[], None] | None = None
        """Called when one begins."""
        self.evaluation: Recorder | None = None
        """Where evaluation passes are read into, if they are."""
        self.gate = Gate()
        self._model = weakref.ref(select.unwrap(model))
        self._recorder = recorder
        self.number = recorder.number
        self._report = report
        self._functional = Functional(self._saw_functional, report) if recorder.wants("functional") else None
        self.onlookers = Onlookers(report)
        self.placement = Placement(
            self, self._model, selector, recorder.kinds, self._functional, self.onlookers, report
        )
        self.units = Units()
        self._lock = threading.RLock()
        self._is_captured = capture_check()
        self._trained = False
        self._read_evaluation = False

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
        return not self.called or (self.seen is not None and self.seen.is_blind_below(self.placement.hooks))

    def begin(self, attach: bool) -> None:
        """Opens a logged step and puts the hooks on."""
        self.seen = Seen()
        self.onlookers.begin()
        if attach:
            self.attach()

    def look_on(self, onlooker: Onlooker) -> None:
        """Somebody more looks on, from the open step on if there is one."""
        self.onlookers.add(onlooker)
        if self.seen is not None:
            onlooker.begin()
        self.placement.put_on_anew()

    def end(self, keep_hooks: bool) -> None:
        """Closes a step that ran to its end, and reports what it should have shown and did not."""
        if self._functional is not None and self.gate.was_compiled:
            self._report.cannot_see("functional", "inside compiled code modules are seen, and operations are not")
        if self.seen is not None:
            self.placement.report_lost(self.seen.called)
            watched = [path for path, hook in self.placement.hooks.items() if hook.reads]
            self.seen.report_missing(self._report, watched, self._recorder.sites)
        self._close()
        if not keep_hooks:
            self.detach()

    def start_over(self) -> None:
        """Forgets what the open step has seen: it did not happen."""
        if self.seen is not None:
            self._close()
            self._open_anew()

    def _open_anew(self) -> None:
        self.seen = Seen()
        self.onlookers.begin()
        self._recorder.restart()

    def abandon(self) -> None:
        """Closes a step that was cut short, and leaves no hook behind."""
        self.next_forward = None
        self.placement.stop()
        self._close()
        self.remove()
        self.placement.sweep()

    def _close(self) -> None:
        self.units.forget()
        self.onlookers.forget()
        if self.seen is not None:
            self.seen.drop()
            self.seen = None
            self.gate.next_step()
        if self._functional is not None:
            self._functional.abandon()

    # Putting hooks on and taking them off.

    def attach(self) -> None:
        """From now on what runs is read."""
        self.placement.put_on()
        self.gate.open = True

    def detach(self) -> None:
        """Nothing is read from now on. Hooks that are part of compiled code stay, and only look at the gate."""
        self.gate.open = False
        if not self.gate.was_compiled:
            self.remove()

    def remove(self) -> None:
        """Leaves no hook on any module."""
        self.gate.open = False
        self.placement.take_off()

    def watch_root(self, told: Callable[[], None], in_graph: bool) -> RemovableHandle | None:
        """Calls `told` whenever a forward of the whole model begins; `in_graph`, from compiled functions as well."""
        model = self._model()
        return None if model is None else hook_root(model, RootHook(told, in_graph))

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
            if recorder is None or recorder.overflowed:
                return
            with unrecorded():
                self._read_output(recorder, hook, output)
        except Exception as problem:
            hook.broken = True
            report.error(f"hook on {hook.path}", problem)
        finally:
            report.leave(started)

    def _read_output(self, recorder: Recorder, hook: ForwardHook, output: object) -> None:
        self._report.hooks_fired += 1
        found = outputs.tensors(output)
        if recorder is self.evaluation:
            for index, tensor in found if hook.reads_outputs else ():
                reduce_and_note(recorder, recorder.number(Site(hook.path, "activation", index)), tensor, self._report)
            return
        assert self.seen is not None
        self.seen.called.add(hook.path)
        if not found:
            self._report.cannot_see(hook.path, f"its output, a {type(output).__name__}, shows no tensor")
        if any(shards.is_spread(tensor) for _, tensor in found):  # what parallelize_module put on comes after ours
            self.placement.come_last(hook)
        inside = self.gate.was_compiled and compiled.with_gradients_inside(found)
        for index, tensor in found:
            self._saw_tensor(self.seen, hook, index, tensor, hidden=inside)

    def saw_inputs(self, hook: ForwardHook, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if is_traced():
            return
        with self._report.guarded(f"reading inputs of {hook.path}"):
            recorder = self.destination()
            if recorder is not None and not recorder.overflowed and not in_backward():
                self._note_called(recorder, hook)
                with unrecorded():
                    for index, tensor in outputs.inputs(args, kwargs):
                        if hook.reads_inputs:
                            site = recorder.number(Site(hook.path, "input", index))
                            reduce_and_note(recorder, site, tensor, self._report)
                        if hook.shows_inputs and recorder is self._recorder:
                            self._show(hook.path, "input", index, tensor)

    def saw_call(self, hook: ForwardHook) -> None:
        with self._report.guarded(f"call of {hook.path}"):
            recorder = self.destination() if not is_traced() else None
            if recorder is not None:
                self._note_called(recorder, hook)

    def _note_called(self, recorder: Recorder, hook: ForwardHook) -> None:
        if recorder is not self.evaluation and self.seen is not None:
            self.seen.called.add(hook.path)

    def _saw_functional(self, path: str, index: str, tensor: Tensor) -> bool:
        hook = self.placement.hooks.get(path.rpartition(":")[0])
        recorder = None if hook is None or not hook.reads_operations or in_backward() else self.destination()
        if hook is None or recorder is None or recorder.overflowed:
            return False
        reduce_and_note(recorder, recorder.number(Site(path, "functional", index)), tensor, self._report)
        if path.endswith(RECTIFIED) and recorder is not self.evaluation:
            self.units.see(f"functional/{path}{index}", tensor)
        return hook.shows_outputs and recorder is self._recorder and self._show(path, "functional", index, tensor)

    def saw_gradient(self, hook: GradientHook, gradient: Tensor) -> None:
        seen = self.seen
        if seen is None or hook.step is not seen or self._is_captured():
            return
        report = self._report
        started = report.enter()
        try:
            hook.fired = True
            self._note_backward(seen)
            if hook.sites:
                report.hooks_fired += 1
                first, *others = hook.sites
                if has_no_data(gradient):
                    report.cannot_see(str(self._recorder.sites[first]), "it holds no data: a torch.func stand-in")
                    return
                with unrecorded():
                    span = self._recorder.record(first, gradient, seen.scale)
                if span is not None:
                    for site in others:
                        self._recorder.share(site, span)
        except Exception as problem:
            report.error("gradient hook", problem)
        finally:
            report.leave(started)

    def saw_scaled_loss(self, hook: ScaledLossHook) -> None:
        if self.seen is not None and hook.step is self.seen:
            with self._report.guarded("reading the loss scale"):
                self.seen.scale = hook.scale
                self._note_backward(self.seen)

    def saw_in_graph(
        self, hook: ForwardHook, tensor: Tensor, kind: str, index: str, gradient: str, serial: int
    ) -> None:
        """What hooks see that were compiled with the model."""
        with self._report.guarded(f"compiled hook on {hook.path}"):
            if kind == "gradient":
                placed = None if self.seen is None else self.seen.in_graph.get((hook.path, index))
                if placed is not None and self.seen is not None and serial in self.seen.serials:
                    self.saw_gradient(placed, tensor)
                return
            recorder = self.destination()
            if recorder is None or recorder.overflowed or in_backward():
                return
            self._report.hooks_fired += 1
            reduce_and_note(recorder, self._site_in_graph(recorder, hook, kind, index), tensor, self._report)
            if recorder is self._recorder and (hook.shows_inputs if kind == "input" else hook.shows_outputs):
                self._show(hook.path, kind, index, tensor)
            if recorder is not self.evaluation and self.seen is not None and kind == "activation":
                self.seen.called.add(hook.path)
                if hook.has_units:
                    self.units.see(f"activation/{hook.path}{index}", tensor)
                self.seen.serials.add(serial)
                if gradient == compiled.GRADIENT_COMES:
                    self._expect_in_graph(self.seen, hook, index)
                elif gradient == compiled.LOST_GRADIENT and hook.reads_gradients:
                    self._report.cannot_see(f"gradient/{hook.path}{index}", "compiled autograd takes no hooks")

    def _site_in_graph(self, recorder: Recorder, hook: ForwardHook, kind: str, index: str) -> int:
        wanted = hook.reads_inputs if kind == "input" else hook.reads_outputs
        return recorder.number(Site(hook.path, kind, index)) if wanted else NO_SITE

    def _expect_in_graph(self, seen: Seen, hook: ForwardHook, index: str) -> None:
        if (hook.path, index) not in seen.in_graph:
            placed = GradientHook(self, seen, is_view=False)
            if hook.reads_gradients:
                placed.sites.append(self.number(Site(hook.path, "gradient", index)))
            seen.in_graph[hook.path, index] = placed
            seen.placed.append(placed)

    # Which passes are read.

    def admits(self, model: nn.Module) -> bool:
        """Evaluation passes are not part of a step, unless the model has never been seen training."""
        self._trained = self._trained or model.training
        return model.training or not (self._trained or self.gate.evaluation)

    def destination(self) -> Recorder | None:
        """Where the forward that is running is read into; None where it is not."""
        model = self._model()
        if model is None or self._is_captured():
            return None
        if not self.admits(model):
            return self.evaluation
        if self.next_forward is not None and not in_backward():
            with self._lock:  # modules may run in several threads, and none may look before the step has begun
                if self.next_forward is not None:
                    self.next_forward()
                    self.next_forward = None
        if self.seen is None:
            return None
        if model.training and self._read_evaluation:
            # What was read before the first training pass is not of its step.
            self.units.forget()
            self._open_anew()
        self._read_evaluation = not model.training
        if self.seen.backward != NO_BACKWARD and not in_backward():  # that one raised, and never called back
            self.seen.backward, self.seen.scale = NO_BACKWARD, None
        return self._recorder

    # What is done with a tensor.

    def _saw_tensor(self, seen: Seen, hook: ForwardHook, index: str, tensor: Tensor, hidden: bool) -> None:
        if has_no_data(tensor):
            self._report.cannot_see(hook.path + index, "it holds no data: a tracing or torch.func stand-in")
            return
        activation, gradient = hook.site_numbers(index)
        span, placed = seen.recall(tensor)
        recomputed = in_backward()
        if activation != NO_SITE and not recomputed:
            if span is not None:
                self._recorder.share(activation, span)
            else:
                span = reduced(self._recorder, activation, tensor)
            if span is None or self._report.unseen:
                note_readable(self._report, hook.path + index, tensor, span is not None)
        if (hook.has_units or hook.shows_outputs) and not recomputed:
            self._look_closer(hook, index, tensor)
        if hidden and gradient != NO_SITE:
            gradient = NO_SITE
            self._report.cannot_see(f"gradient/{hook.path}{index}", compiled.GRADIENTS_INSIDE)
        wanted = tensor.requires_grad and (gradient != NO_SITE or hook.ends_backward)
        # A recomputed block is called with tensors that are hooked already, not with copies of them.
        if wanted and not (recomputed and (tensor.is_leaf or is_hooked(tensor, seen, gradient))):
            if placed is None:
                placed = self._place(seen, tensor)
            if gradient != NO_SITE:
                placed.sites.append(gradient)
        seen.remember(tensor, span, placed)

    def _look_closer(self, hook: ForwardHook, index: str, tensor: Tensor) -> None:
        local = shards.here(tensor) if hook.has_units and hook.reads_outputs else None
        if local is not None:
            self.units.see(f"activation/{hook.path}{index}", local)
        if hook.shows_outputs:
            self._show(hook.path, "activation", index, tensor)

    def _show(self, path: str, kind: str, index: str, tensor: Tensor) -> bool:
        """To those who look on: what of it is on this rank, if anything is."""
        local = shards.here(tensor)
        if local is None or has_no_data(local):
            return False
        self.onlookers.saw(path, kind, index, local)
        return True

    def _place(self, seen: Seen, tensor: Tensor) -> GradientHook:
        hook = GradientHook(self, seen, tensor._is_view())
        handle = hook_tensor(tensor, hook)
        if tensor.is_leaf:  # it outlives the step, and so would the hook
            seen.leaf_handles.append(handle)
        seen.placed.append(hook)
        return hook

    def _note_backward(self, seen: Seen) -> None:
        """Once a backward pass: passes inside passes (reentrant checkpoints) are part of it."""
        if self.backward_ended is None or seen.backward != NO_BACKWARD or not in_backward():
            return
        seen.backward = backward_pass()
        if self.backward_begins is not None:
            self.backward_begins()
        autograd.at_end_of_backward(partial(self._backward_ends, seen))

    @runs_as_python
    def _backward_ends(self, seen: Seen) -> None:
        seen.backward = NO_BACKWARD
        if self.seen is seen and self.backward_ended is not None:
            with self._report.guarded("after backward"), unrecorded():
                self.backward_ended(seen.scale)
        seen.scale = None
