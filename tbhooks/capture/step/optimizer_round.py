"""Several optimizers of one model: which of their steps ends a training step, and which of them logged steps show."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from torch.optim import Optimizer

# So many logged steps in a row without a step of an optimizer that does step between them are no accident.
MISSED_IN_A_ROW = 3


class OptimizerRound:
    """Which optimizer's step ends a training step, when one model has several optimizers.

    A step is over when every optimizer that took part in the last one has stepped again. One first seen
    right after that belongs to the step just ended, and is waited for from then on; one that comes round
    a second time shows that the others are not coming; one that takes over another's parameters replaces it.
    One that was waited for in vain, such as the actor's of TD3, is not waited for again, until it has stepped in two
    rounds in a row: what it does belongs to the step that is open then.
    """

    def __init__(self) -> None:
        self._members: dict[int, frozenset[int]] = {}
        self._stepped: set[int] = set()
        self._kept: set[int] = set()
        self._rounds = 0
        self._last_round: dict[int, int] = {}
        self._seldom: set[int] = set()

    def meets(self, key: int, parameters: frozenset[int]) -> None:
        """Tells of an optimizer about to step, and of the parameters it steps."""
        self._leave_out(lambda other, theirs: other != key and bool(theirs & parameters))

    def knows(self, key: int) -> bool:
        return key in self._members

    def keep(self, alive: set[int]) -> None:
        """Forgets the optimizers that are gone."""
        self._leave_out(lambda key, _: key not in alive)

    def forget_those_without(self, parameters: frozenset[int]) -> None:
        """Of the model's parameters as they are now, some optimizers may step none any more."""
        self._leave_out(lambda _, theirs: not theirs & parameters)

    def _leave_out(self, gone: Callable[[int, frozenset[int]], bool]) -> None:
        for other, theirs in list(self._members.items()):
            if gone(other, theirs):
                del self._members[other]
                self._stepped.discard(other)

    def is_late(self, key: int) -> bool:
        """Whether this optimizer belongs to the step that has just ended."""
        return bool(self._members) and not self._stepped and key not in self._members

    def comes_again(self, key: int) -> bool:
        """Whether the open step ended before this optimizer's step began."""
        if key not in self._stepped:
            return False
        self._seldom |= self._members.keys() - self._stepped
        self._members = {member: self._members[member] for member in self._stepped}
        self._stepped = set()
        self._rounds += 1
        return True

    def is_seldom(self, key: int) -> bool:
        """Whether this optimizer steps, but not in every round."""
        return key in self._seldom and self._rounds - self._last_round.get(key, -1) > 1

    def steps(self, key: int, parameters: frozenset[int]) -> None:
        """Tells of a step that cannot be the last of the training step."""
        self._members[key] = parameters
        self._stepped.add(key)

    def starts_over(self) -> None:
        self._stepped, self._kept = set(), set()
        self._rounds += 1

    def is_kept(self, key: int) -> None:
        """Tells of an optimizer that a scaler kept from stepping: it is not waited for."""
        self._kept.add(key)

    @property
    def is_over(self) -> bool:
        return self._stepped | self._kept >= self._members.keys()

    @property
    def has_stepped(self) -> bool:
        return bool(self._stepped)

    def ends(self, key: int, parameters: frozenset[int]) -> bool:
        """Whether this optimizer's step has ended the training step."""
        self.meets(key, parameters)  # others may have stepped since it began, in other threads
        late, seldom = self.is_late(key), self.is_seldom(key)
        self._last_round[key] = self._rounds
        if late and seldom:
            return False
        self._seldom.discard(key)
        self._members[key] = parameters
        if late:
            return False
        self._stepped.add(key)
        if self.is_over:
            self.starts_over()
            return True
        return False


class GroupNumbers:
    """What parameter groups without a name are called: numbered through all optimizers, in the order they are met.

    A group keeps its number, however often its optimizer steps and whichever others do. An optimizer that takes over
    parameters of another one, which has not stepped in the same step, gets the numbers of that one.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._in_step: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def step_ended(self) -> None:
        self._in_step.clear()

    def of(self, optimizer: Optimizer) -> list[object]:
        """For each of its groups: its own name, or else its number."""
        if optimizer not in self._numbers:
            parameters = _parameters(optimizer)
            for other in [other for other in self._numbers if other not in self._in_step]:
                if parameters & _parameters(other):
                    del self._numbers[other]
        self._in_step.add(optimizer)
        numbers = self._numbers.setdefault(optimizer, [])
        while len(numbers) < len(optimizer.param_groups):
            taken = {number for others in self._numbers.values() for number in others}
            numbers.append(next(number for number in itertools.count() if number not in taken))
        return [group.get("name", i) for group, i in zip(optimizer.param_groups, numbers, strict=False)]


def _parameters(optimizer: Optimizer) -> set[int]:
    """By address: the optimizer keeps them alive."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class SeldomSteps:
    """Optimizers that step less often than others of the model: whether logged steps show what they do."""

    def __init__(self) -> None:
        self._missed: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._between: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def stepped(self, optimizer: Optimizer, is_logged: bool) -> None:
        if is_logged:
            self._missed[optimizer] = 0
            self._between.discard(optimizer)
        else:
            self._between.add(optimizer)

    def logged_step_ended(self) -> list[Optimizer]:
        """Those whose steps are found to fall between the logged ones."""
        for optimizer in self._between:
            self._missed[optimizer] = self._missed.get(optimizer, 0) + 1
        self._between.clear()
        return [optimizer for optimizer, missed in self._missed.items() if missed >= MISSED_IN_A_ROW]
