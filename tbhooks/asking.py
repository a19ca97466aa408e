"""What can be asked of a watch besides its numbers. Each call chains, and is off unless it is made.

The watch is the only one who has these methods; they are here for the length of its file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from torch import nn

from tbhooks import stats
from tbhooks.exhibits import Exhibit
from tbhooks.frame import Frame
from tbhooks.loop import Loop
from tbhooks.onlookers import Onlooker
from tbhooks.onlookers.graph import GraphOnlooker
from tbhooks.onlookers.summary import SummaryOnlooker
from tbhooks.pump import Pump
from tbhooks.ranks import Place
from tbhooks.report import Report
from tbhooks.summary import Summary


class Asking:
    """The part of a watch that takes wishes."""

    _loop: Loop
    _model: weakref.ref[nn.Module]
    _pump: Pump
    _place: Place
    _report: Report
    _idle: bool
    _summary: SummaryOnlooker | None = None

    def _check_usable(self) -> None:
        raise NotImplementedError

    def graph(self) -> Self:
        """Draws the model in TensorBoard's GRAPHS tab, as it runs in the next logged pass, with the real inputs.

        Modules are nested by path; arrows say which tensor went where. Evaluation passes get a graph of their own
        where `evaluation()` has them read. One pass of each is followed, and nothing stays on the model.
        """
        return self._let_look_on(GraphOnlooker(self._model, self._loop.probe, self._report))

    def summary(self) -> Summary:
        """The layers as a table: classes, outputs, parameters, shares. Prints as text, and is a table in notebooks.

        Outputs are those of the next logged pass, and blank before it; from then on the table is in TensorBoard's
        TEXT tab as well.
        """
        self._check_usable()
        if self._summary is None:
            self._summary = SummaryOnlooker(self._model, self._loop.probe.onlookers, self._report)
            self._let_look_on(self._summary)
        return Summary(self._summary)

    def _let_look_on(self, onlooker: Onlooker) -> Self:
        """It looks at logged steps from now on; on the first rank, which writes."""
        self._check_usable()
        if not self._idle and self._place.rank == 0:
            with self._report.guarded(type(onlooker).__name__):
                self._loop.probe.look_on(onlooker)
        return self

    def _show(self, exhibits: Sequence[Exhibit], step: int = 0) -> Self:
        """Writes what is known already, without waiting for a logged step."""
        self._check_usable()
        if not self._idle and self._place.rank == 0:
            self._pump.submit(Shown(tuple(exhibits), step))
        return self


@dataclass(frozen=True)
class Shown:
    """Exhibits of no step in particular, as the pump takes them."""

    exhibits: tuple[Exhibit, ...]
    step: int
    nbytes: int = 0

    def without_numbers(self) -> None:
        """Nothing is left if they are dropped."""

    def frames(self) -> list[Frame]:
        nothing = np.zeros((0, 0), dtype=np.int64)
        return [Frame(self.step, time.time(), 0, (), stats.empty_rows(0), nothing, exhibits=self.exhibits)]
