"""What one logged step has seen so far, and what it should have shown and did not.

Kept by the probe from the first hook of a step to its end. Holds no tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tbhooks.capture.autograd import NO_BACKWARD
from tbhooks.capture.hooks.hook_types import ForwardHook, GradientHook
from tbhooks.capture.hooks.passes import Backward, Pass
from tbhooks.capture.packed_step import Span
from tbhooks.data.frame import ROOT, Site
from tbhooks.data.self_report import Report

NEVER_CALLED = "never called as a module; its parameters are watched all the same"
VIEW_LOST = "no gradient reached this view: unused, or modified in place later"
NOT_REACHED = "no gradient reached it: the loss does not depend on it"
NONE_CAME = "no gradient came out of the compiled graph: there was no backward, or compiled autograd ran it"
# Outputs passed on unchanged are recognised among this many recent tensors.
MOST_RECENT = 256


@dataclass(slots=True)
class _Recent:
    """A tensor seen a moment ago, to recognise it when the next module returns it unchanged."""

    tensor: weakref.ref[Tensor]
    version: int
    span: Span | None
    hook: GradientHook | None


@dataclass
class StepContext:
    """One logged step; hooks left over from another one know it by not being this one."""

    called: set[str] = field(default_factory=set)
    placed: list[GradientHook] = field(default_factory=list)
    in_graph: dict[tuple[str, str], GradientHook] = field(default_factory=dict)
    """Gradients that a compiled graph will show, by path and index."""
    backward: int = NO_BACKWARD
    """The backward pass that is running through it."""
    running: Backward = field(default_factory=Backward)
    """That pass, or the last one; owns the gradients it shows."""
    scale: Tensor | None = None
    """What the loss of that pass was multiplied by."""
    serials: dict[int, Pass] = field(default_factory=dict)
    """The passes of the step by their numbers, as compiled graphs know them."""
    left_out: bool = False
    """Whether forwards were not read because no backward can go through them."""
    leaf_handles: list[RemovableHandle] = field(default_factory=list)
    _recent: dict[int, _Recent] = field(default_factory=dict)

    @property
    def gradients(self) -> bool:
        """Whether a backward pass has reached the step."""
        return any(hook.fired for hook in self.placed)

    def is_blind_below(self, hooks: Mapping[str, ForwardHook]) -> bool:
        """Whether a module ran that may be compiled, and none of those in it was seen."""
        return any(self._hides_its_parts(path, hooks) for path in self.called if path in hooks)

    def _hides_its_parts(self, path: str, hooks: Mapping[str, ForwardHook]) -> bool:
        module = hooks[path].module()
        if path != ROOT and getattr(module, "_compiled_call_impl", None) is None:
            return False
        start = "" if path == ROOT else f"{path}."
        parts = [other for other, hook in hooks.items() if other != path and other.startswith(start) and hook.reads]
        return bool(parts) and self.called.isdisjoint(parts)

    def lookup(self, tensor: Tensor) -> tuple[Span | None, GradientHook | None]:
        """What is known of this very tensor, unchanged since."""
        recent = self._recent.get(id(tensor))
        if recent is None or recent.tensor() is not tensor or recent.version != tensor._version:
            return None, None
        return recent.span, recent.hook

    def remember(self, tensor: Tensor, span: Span | None, hook: GradientHook | None) -> None:
        if tensor.is_inference():  # has no version: an in-place change could not be told
            return
        if len(self._recent) > MOST_RECENT:
            self._recent.clear()
        self._recent[id(tensor)] = _Recent(weakref.ref(tensor), tensor._version, span, hook)

    def drop(self) -> None:
        """Takes off the hooks that would outlive the step."""
        for handle in self.leaf_handles:
            handle.remove()

    def report_missing(self, report: Report, watched: Iterable[str], sites: list[Site], left_out: Set[Pass]) -> None:
        """Tells of modules that did not run and of gradients that did not come, but for passes that were left out."""
        self.placed = [hook for hook in self.placed if hook.fired or not left_out >= set(hook.passes)]
        if self.called:
            for path in watched:
                if path not in self.called:
                    report.mark_unseen(path, NEVER_CALLED)
                elif report.unseen.get(path) == NEVER_CALLED:
                    report.mark_seen(path)
        reached = {site for hook in self.placed if hook.fired for site in hook.sites}
        if reached:
            self._report_unreached(report, reached, sites)
        else:
            for hook in self.in_graph.values():
                for site in hook.sites:
                    report.mark_unseen(str(sites[site]), NONE_CAME)
        report.log_unseen()

    def _report_unreached(self, report: Report, reached: set[int], sites: list[Site]) -> None:
        for hook in self.placed:
            for site in hook.sites:
                if hook.failure:
                    report.mark_unseen(str(sites[site]), hook.failure, replace=True)
                elif site in reached:
                    report.mark_seen(str(sites[site]))
                else:
                    report.mark_unseen(str(sites[site]), VIEW_LOST if hook.is_view else NOT_REACHED)
