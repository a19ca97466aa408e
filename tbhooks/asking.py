"""What can be asked of a watch besides its numbers. Each call chains, and is off unless it is made.

The watch is the only one who has these methods; they are here for the length of its file.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import nn

from tbhooks import arguments, stats
from tbhooks.errors import ArgumentError, check_names
from tbhooks.exhibits import Exhibit
from tbhooks.frame import Frame
from tbhooks.loop import Loop
from tbhooks.onlookers import Onlooker, channels, embeddings, pictures
from tbhooks.pump import Pump
from tbhooks.ranks import Place
from tbhooks.report import Report
from tbhooks.sinks import Sink


class Asking:
    """The part of a watch that takes wishes."""

    _loop: Loop
    _pump: Pump
    _place: Place
    _report: Report
    _idle: bool
    _sinks: tuple[Sink, ...]
    _model: weakref.ref[nn.Module]

    def _check_usable(self) -> None:
        raise NotImplementedError

    def images(self, pattern: Any = None, *, every: int | None = None, most_bytes: int = pictures.MOST_BYTES) -> Self:
        """Pictures in TensorBoard's IMAGES tab: outputs of the modules that `pattern` means (whatever `include` takes),
        and filters of their convolutions over 1 or 3 channels. Without it, the input batch and the first convolution.

        Taken in each of the first 10 logged steps, then half as often with every doubling; `every` is a number of
        logged steps instead. At most `most_bytes` of numbers are taken of a step; `stats.unseen` says what is not.
        """
        self._check_usable()
        every = None if every is None else arguments.whole_number("every", every)
        most, model = arguments.whole_number("most_bytes", most_bytes), self._model()
        if model is None:
            return self
        return self._let_look_on(pictures.of_model(model, pattern, self._report, every, most))

    def per_channel(self, pattern: Any, *, kinds: Sequence[str] = channels.KINDS, histograms: bool = False) -> Self:
        """Statistics and histograms of each output channel of convolutions, linear layers and norms, of each kernel
        of their weights, and of each head of attention, for the modules that `pattern` means.

        TensorBoard's TBHOOKS tab shows them as maps of channels by steps, `runs.read(...).channels` gives them
        back. `histograms` adds ordinary ones for the first 64 channels of a layer, under tags such as
        `activation/conv1[3]`, on steps that take histograms.
        """
        self._check_usable()
        asked = (kinds,) if isinstance(kinds, str) else tuple(kinds)
        check_names("kind", asked, channels.KINDS)
        if not asked or not isinstance(histograms, bool):
            raise ArgumentError(f"per_channel takes kinds, and histograms=True or False, not {kinds!r}, {histograms!r}")
        model = self._model()
        if model is None:
            return self
        recorder = self._loop.recorder
        return self._let_look_on(channels.of_model(model, pattern, asked, histograms, recorder, self._report))

    def embeddings(
        self, pattern: Any, labels: Any = None, thumbnails: Any = None, every: int | None = None,
        most: int = embeddings.MOST,
    ) -> Self:  # fmt: skip
        """What the layers that `pattern` means make of each sample, as points in TensorBoard's PROJECTOR tab.

        `labels` and `thumbnails` (pictures of 1 or 3 channels) are a call without arguments that gives those of the
        current batch, an argument's name of the model's forward, or a tensor or list for a batch that is always the
        same. A point is a sample's mean over positions. At most 256 samples of a logged step are taken, and at most
        `most` of all since the last entry kept. An entry is made at the logged steps 0, 1, 2, 4, 8 and so on, or
        every so many; up to 20 a layer. Only for local directories.
        """
        self._check_usable()
        every = None if every is None else arguments.whole_number("every", every)
        most, model = arguments.whole_number("most", most), self._model()
        if model is None:
            return self
        self._note_where_files_go()
        given = labels, thumbnails
        return self._let_look_on(embeddings.of_model(model, pattern, given, every, most, self._report))

    def _note_where_files_go(self) -> None:
        for sink in self._sinks:
            where = getattr(sink, "destination", "")
            if "://" in where:
                self._report.tell(f"embeddings are files beside a run in a local directory: {where} gets none")

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
