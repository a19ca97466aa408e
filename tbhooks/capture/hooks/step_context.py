"""What is known of one logged step while it is open, and what was expected in it and did not come.

Made by the observer when the step begins. Keeps no tensor alive.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import NO_BACKWARD
from tbhooks.capture.compile.dynamo import is_compiled
from tbhooks.capture.hooks.eager_hooks import EagerGradientHook
from tbhooks.capture.hooks.hook_types import ForwardHook, GradientHook
from tbhooks.capture.hooks.passes import Backward, Pass
from tbhooks.capture.recording.calls import Span
from tbhooks.data.frame import ROOT, Site
from tbhooks.data.self_report import Report

NEVER_CALLED = "forward() never called; its parameters are watched all the same"
VIEW_LOST = "no gradient reached this view: unused, or modified in place later"
NOT_REACHED = "no gradient reached it: the loss does not depend on it"
NONE_CAME = "no gradient came out of the compiled graph: there was no backward, or compiled autograd ran it"
# Outputs passed on unchanged are recognised among this many recent tensors.
MOST_RECENT = 256

_has_fired, _failure = operator.attrgetter("fired"), operator.attrgetter("failure")

_Recent = tuple[weakref.ref[Tensor], int, Span | None, GradientHook | EagerGradientHook | None]
"""A tensor read a moment ago, its version, record and hook: it is recognised when the next module returns it again."""


@dataclass
class StepContext:
    """One logged step. Hooks left over from an earlier step hold another context, and are ignored."""

    called: set[str] = field(default_factory=set)
    """Paths of the modules that were called."""
    gradient_hooks: list[GradientHook] = field(default_factory=list)
    graph_gradients: dict[tuple[str, str], GradientHook] = field(default_factory=dict)
    """Gradients that are expected from a compiled graph, by path and index."""
    graph_passes: dict[int, Pass] = field(default_factory=dict)
    """The forwards of the step by the number that compiled graphs know them by."""
    backward: int = NO_BACKWARD
    """The backward pass that is running through the step, by autograd's number."""
    running: Backward = field(default_factory=Backward)
    """That backward pass, or the last one; it owns the gradients that are recorded."""
    scale: Tensor | None = None
    """What the loss of that backward pass was multiplied by."""
    left_out: bool = False
    """Whether forwards were not read because no backward can go through them."""
    leaf_handles: list[RemovableHandle] = field(default_factory=list)
    recent: dict[int, _Recent] = field(default_factory=dict)
    """For `lookup`, by the id of the tensor."""

    @property
    def gradients(self) -> bool:
        """Whether a backward pass has reached the step."""
        return any(hook.fired for hook in self.gradient_hooks)

    def is_blind_below(self, hooks: Mapping[str, ForwardHook]) -> bool:
        """Whether a module was called that may be compiled, and none of the modules in it was."""
        return any(self._hides_children(path, hooks) for path in self.called if path in hooks)

    def _hides_children(self, path: str, hooks: Mapping[str, ForwardHook]) -> bool:
        module = hooks[path].module()
        if path != ROOT and (module is None or not is_compiled(module)):
            return False
        start = "" if path == ROOT else f"{path}."
        inside = [other for other, hook in hooks.items() if other != path and other.startswith(start) and hook.reads]
        return bool(inside) and self.called.isdisjoint(inside)

    def lookup(self, tensor: Tensor) -> tuple[Span | None, GradientHook | EagerGradientHook | None]:
        """The record and the gradient hook of this very tensor, if it is unchanged since it was read."""
        recent = self.recent.get(id(tensor))
        if recent is not None and recent[0]() is tensor and recent[1] == tensor._version:
            return recent[2], recent[3]
        for hook in (tensor._backward_hooks or {}).values():  # a hook in C knows the record itself
            if isinstance(hook, EagerGradientHook) and hook.step is self and hook.version == tensor._version:
                return hook.span, hook
        return None, None

    def cache(self, tensor: Tensor, span: Span | None, hook: GradientHook | EagerGradientHook | None) -> None:
        """Keeps them for `lookup`."""
        if tensor.is_inference():  # it has no version: an in-place change would go unnoticed
            return
        if len(self.recent) > MOST_RECENT:
            self.recent.clear()
        self.recent[id(tensor)] = (weakref.ref(tensor), tensor._version, span, hook)

    def close(self) -> None:
        """Removes the gradient hooks that would outlive the step, and lets go of all others. They know the step, and so
        a thousand of them would be left to the garbage collector.
        """
        for handle in self.leaf_handles:
            handle.remove()
        self.gradient_hooks, self.graph_gradients = [], {}
        self.recent.clear()
        self.scale = None

    def report_missing(self, report: Report, watched: Collection[str], sites: list[Site], left_out: Set[Pass]) -> None:
        """Reports modules that were not called and gradients that did not come, but for forwards that were left out."""
        self.gradient_hooks = [hook for hook in self.gradient_hooks if hook.fired or not left_out >= set(hook.passes)]
        if self.called and (report.unseen or not self.called.issuperset(watched)):
            for path in watched:
                if path not in self.called:
                    report.mark_unseen(path, NEVER_CALLED)
                elif report.unseen.get(path) == NEVER_CALLED:
                    report.mark_seen(path)
        is_complete = all(map(_has_fired, self.gradient_hooks)) and not any(map(_failure, self.gradient_hooks))
        if is_complete and not self.graph_gradients and not report.unseen:
            report.log_unseen()
            return
        reached = {site for hook in self.gradient_hooks if hook.fired for site in hook.sites}
        if reached:
            self._report_unreached(report, reached, sites)
        else:
            for hook in self.graph_gradients.values():
                for site in hook.sites:
                    report.mark_unseen(str(sites[site]), NONE_CAME)
        report.log_unseen()

    def _report_unreached(self, report: Report, reached: set[int], sites: list[Site]) -> None:
        for hook in self.gradient_hooks:
            for site in hook.sites:
                if hook.failure:
                    report.mark_unseen(str(sites[site]), hook.failure, replace=True)
                elif site in reached:
                    report.mark_seen(str(sites[site]))
                else:
                    report.mark_unseen(str(sites[site]), VIEW_LOST if hook.is_view else NOT_REACHED)
