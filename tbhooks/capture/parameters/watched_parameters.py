"""The selected parameters of a model, found once per logged step. Finding them anew takes a while: they are walked only
if the structure of the model has changed.
"""

from __future__ import annotations

import operator
import weakref

from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from tbhooks.capture import selection, sharded_tensors, structure
from tbhooks.capture.parameters import master_weights
from tbhooks.capture.parameters.master_weights import Master
from tbhooks.capture.recording.recorder import Recorder
from tbhooks.capture.recording.step_table import PARAMETER_KINDS
from tbhooks.capture.step.optimizer_round import parameter_ids
from tbhooks.data.frame import Site
from tbhooks.data.self_report import Report
from tbhooks.reduction.torch_rows import has_no_data

_attributes = operator.attrgetter("__dict__")


class WatchedParameters:
    """The parameters of the open step by their ids: none before `find` was called."""

    def __init__(
        self, model: nn.Module, selector: selection.Selector, recorder: Recorder, report: Report, merges_ranks: bool
    ) -> None:
        self._model = weakref.ref(selection.unwrap(model))
        self._selector, self._recorder, self._report = selector, recorder, report
        self._merges_ranks = merges_ranks  # other ranks may hold what this one does not
        self._structure_version: int | None = None
        # No reference to a parameter, not even a weak one: torch swaps only parameters without any.
        self._known: list[tuple[int, str, weakref.ref[nn.Module], str]] = []
        # Whether all parameters are watched and none is gathered, for a version of the model's structure.
        self._plain_in: tuple[int | None, bool] = None, False
        self.walks = 0
        """How often the parameters were found anew."""
        self.clear()

    def clear(self) -> None:
        """Drops every tensor. The next step finds the parameters again, because some may have been replaced."""
        self.paths: dict[int, str] = {}
        self.tensors: dict[int, nn.Parameter] = {}
        self.masters: dict[int, Master] = {}
        self._all_are_plain = False

    def model(self) -> nn.Module | None:
        """The model; None if it was deleted."""
        return self._model()

    def ids(self) -> frozenset[int]:
        """Returns the ids of the parameters that the model has now."""
        model = self._model()
        return frozenset() if model is None else structure.of(model).parameter_ids()

    def owned_by(self, optimizer: Optimizer) -> frozenset[int]:
        """Returns the ids of the model's parameters that the optimizer updates."""
        owned = self.ids() & parameter_ids(optimizer)
        model = self._model()
        return owned if owned or model is None else master_weights.owned_by(optimizer, model.parameters)

    def structure_version(self) -> int:
        """A number that has changed if the model has other parameters; once they were found, that of the open step."""
        model = self._model()
        if self.paths and self._structure_version is not None:
            return self._structure_version
        return -1 if model is None else structure.of(model).version()

    def find(self) -> None:
        """Finds the selected parameters of the model, once per step."""
        model = self._model()
        if self.paths or model is None:
            return
        version = structure.of(model).version() if self._selector.is_static else None
        known: dict[int, nn.Parameter] = {}
        if version is not None and version == self._structure_version:
            known = {
                key: parameter
                for key, _, owner, name in self._known
                if (module := owner()) is not None and (parameter := module._parameters.get(name)) is not None
            }
        # Frameworks that keep weights of their own note them in attributes of the parameters, at any time.
        if not known or any(map(_attributes, known.values())):
            self._structure_version = self._walk(model, version)
        else:
            self.paths, self.tensors = {key: path for key, path, _, _ in self._known}, known
            if self._plain_in[0] != version:
                is_whole = len(known) == len(structure.of(model).parameter_ids())
                self._plain_in = version, is_whole and not sharded_tensors.is_gathered_to_run(model)
            self._all_are_plain = self._plain_in[1]

    def _walk(self, model: nn.Module, version: int | None) -> int | None:
        """Finds the parameters anew. Returns the version, if the same ones will be found as long as it is current."""
        self.walks += 1
        modules = self._selector.choose(structure.of(model).modules().by_path)
        for path, parameter in selection.parameters(modules).items():
            master = master_weights.find(parameter)
            why = _why_unreadable(parameter, master)
            if why or parameter.__dict__:
                version = None
            if why:
                if why != master_weights.ELSEWHERE or not self._merges_ranks:
                    self._report.mark_unseen(f"weight/{path}", why)
                continue
            self.paths[id(parameter)] = path
            self.tensors[id(parameter)] = parameter
            shard = sharded_tensors.shard_index(parameter) if sharded_tensors.is_sharded(parameter) else None
            if master is not None:
                self.masters[id(parameter)], shard = master, master.shard
            if shard is not None:
                for kind in PARAMETER_KINDS:
                    self._recorder.shards[Site(path, kind)] = shard
        owners = {id(p): (module, name) for module in modules.values() for name, p in module._parameters.items()}
        self._known = [(key, path, weakref.ref(owners[key][0]), owners[key][1]) for key, path in self.paths.items()]
        return version

    def are_readable_in_backward(self) -> bool:
        """Whether gradients can be read at the end of a backward pass. If so, the parameters are found."""
        model = self._model()
        if model is None:
            return False
        if self._plain_in[1]:
            self.find()
            if self._all_are_plain:
                return True
        if sharded_tensors.is_gathered_to_run(model):
            self.clear()  # parameters that were found now are the gathered ones
            return False
        if any(map(master_weights.is_partitioned, structure.of(model).noted_parameters())):
            return False
        self.find()
        return True

    def prepare(self) -> None:
        """Finds the parameters before the first logged step, so that it takes hardly longer than later ones. Not if
        anything about them may be decided later.
        """
        model = self._model()
        if model is None or not self._selector.is_static:
            return
        parameters = list(model.parameters())
        if any(p.__dict__ or _why_unreadable(p, None) for p in parameters):
            return
        if not sharded_tensors.is_gathered_to_run(model):
            self._structure_version = self._walk(model, structure.of(model).version())


def _why_unreadable(parameter: nn.Parameter, master: Master | None) -> str:
    if master is None and master_weights.is_gone(parameter):
        return master_weights.why_gone(parameter)
    if master is None and (isinstance(parameter, UninitializedParameter) or has_no_data(parameter)):
        return "it holds no data yet"
    return ""
