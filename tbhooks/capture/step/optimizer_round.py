"""Models with several optimizers: which optimizer's step ends a training step, and the names of parameter groups."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable

from torch.optim import Optimizer

# An optimizer that steps, but in none of so many logged steps in a row, never steps in a logged one.
MISSED_IN_A_ROW = 3


def parameter_ids(optimizer: Optimizer) -> frozenset[int]:
    """Returns the ids of the optimizer's parameters, which it keeps alive."""
    return frozenset(map(id, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)))


class OptimizerRound:
    """Decides which optimizer's step ends a training step. Optimizers are known by a number (`key`).

    A training step (a round) is over when every optimizer that stepped in the round before has stepped again. These
    optimizers are the members of the round.

    * An optimizer that steps for the first time right after the end of a round belongs to that round. It is a member
      from then on.
    * If a member steps a second time, the round had ended before: the other members are not coming.
    * An optimizer that updates parameters of a member replaces it.
    * A member that did not come, such as the actor's optimizer in TD3, is an infrequent one, and no member, until it
      has stepped in two rounds in a row. Its steps belong to the round that is running.
    """

    def __init__(self) -> None:
        self._members: dict[int, frozenset[int]] = {}
        self._stepped: set[int] = set()
        self._skipped: set[int] = set()
        self._rounds = 0
        self._last_round: dict[int, int] = {}
        self._infrequent: set[int] = set()

    def is_member(self, key: int) -> bool:
        return key in self._members

    def replace_owners(self, key: int, parameters: frozenset[int]) -> None:
        """Removes the members that share parameters with this optimizer, which is about to step."""
        self._remove(lambda other, theirs: other != key and bool(theirs & parameters))

    def keep_only(self, alive: set[int], parameters: frozenset[int]) -> None:
        """Removes members that were garbage-collected (not in `alive`), or that have none of the `parameters`."""
        self._remove(lambda key, theirs: key not in alive or not theirs & parameters)

    def _remove(self, is_gone: Callable[[int, frozenset[int]], bool]) -> None:
        for key in [key for key, parameters in self._members.items() if is_gone(key, parameters)]:
            del self._members[key]
            self._stepped.discard(key)

    def is_late(self, key: int) -> bool:
        """Whether this optimizer's step belongs to the round that has just ended."""
        return bool(self._members) and not self._stepped and key not in self._members

    def is_infrequent(self, key: int) -> bool:
        """Whether this optimizer steps, but not in every round."""
        return key in self._infrequent and self._rounds - self._last_round.get(key, -1) > 1

    def ended_before(self, key: int) -> bool:
        """Whether this optimizer, which is about to step, has stepped in the round already. If so, a round begins."""
        if key not in self._stepped:
            return False
        self._infrequent |= self._members.keys() - self._stepped
        self._members = {member: self._members[member] for member in self._stepped}
        self._stepped = set()
        self._rounds += 1
        return True

    def ended_after(self, key: int, parameters: frozenset[int]) -> bool:
        """Whether the step that this optimizer has just made was the last of the round. If so, a round begins."""
        self.replace_owners(key, parameters)  # other threads may have stepped since its step began
        is_late, is_infrequent = self.is_late(key), self.is_infrequent(key)
        self._last_round[key] = self._rounds
        if is_late and is_infrequent:
            return False
        self._infrequent.discard(key)
        self._members[key] = parameters
        if is_late:
            return False
        self._stepped.add(key)
        if self.is_over:
            self.restart()
            return True
        return False

    def add_step(self, key: int, parameters: frozenset[int]) -> None:
        """Adds a step that cannot be the last of the round."""
        self._members[key] = parameters
        self._stepped.add(key)

    def add_skipped(self, key: int) -> None:
        """Adds an optimizer whose step a GradScaler has skipped. The round does not wait for it."""
        self._skipped.add(key)

    @property
    def is_over(self) -> bool:
        return self._stepped | self._skipped >= self._members.keys()

    @property
    def has_stepped(self) -> bool:
        """Whether any optimizer has stepped in the round."""
        return bool(self._stepped)

    def restart(self) -> None:
        """Begins the next round."""
        self._stepped, self._skipped = set(), set()
        self._rounds += 1


class GroupNumbers:
    """Numbers for parameter groups without a name, unique over all optimizers of the model.

    Groups are numbered in the order in which they first step, and keep their number. If an optimizer updates parameters
    of another one that has not stepped in the same step, it replaces that one and gets its numbers.
    """

    def __init__(self) -> None:
        self._numbers: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._in_step: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def step_ended(self) -> None:
        self._in_step.clear()

    def of(self, optimizer: Optimizer) -> list[object]:
        """Returns the name of each parameter group, or else its number."""
        if optimizer not in self._numbers:
            parameters = parameter_ids(optimizer)
            for other in [other for other in self._numbers if other not in self._in_step]:
                if parameters & parameter_ids(other):
                    del self._numbers[other]
        self._in_step.add(optimizer)
        numbers = self._numbers.setdefault(optimizer, [])
        while len(numbers) < len(optimizer.param_groups):
            taken = {number for others in self._numbers.values() for number in others}
            numbers.append(next(number for number in itertools.count() if number not in taken))
        return [group.get("name", i) for group, i in zip(optimizer.param_groups, numbers, strict=False)]


class UnloggedOptimizers:
    """Finds infrequent optimizers that never step in a logged step."""

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
        """Returns the optimizers that have stepped between the last logged steps, and in none of them."""
        for optimizer in self._between:
            self._missed[optimizer] = self._missed.get(optimizer, 0) + 1
        self._between.clear()
        return [optimizer for optimizer, missed in self._missed.items() if missed >= MISSED_IN_A_ROW]
