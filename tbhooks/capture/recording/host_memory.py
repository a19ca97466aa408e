"""How much pinned memory of the host the copies of one watch take: it is allocated when something is asked for.

An estimate from above for ordinary models. What takes more, as a module that is called many times, is copied in several
pieces once (reduction/pinned.py). Nothing is allocated in a training step, unless the background thread falls behind.
"""

from __future__ import annotations

import weakref

from torch import nn

from tbhooks.data import stats
from tbhooks.reduction import finalize, histogram, pinned, triton

FEWEST = 64
# The output of each module, its gradient and one tensor more; of each parameter the weight, its gradient, the update.
RECORDS = 3
# Scalars and samples of the user, and norms of gradients.
BESIDE = 1 << 14
RECORD_BYTES = stats.WIDTH * 8 + histogram.SLOTS * 4 + finalize.LARGEST_BYTES


class HostMemory:
    """The memory for the copies of one model, if it is on a CUDA device."""

    def __init__(self, model: weakref.ref[nn.Module]) -> None:
        self._model = model
        self._for_each_module = self._for_each_parameter = RECORDS * RECORD_BYTES
        self._beside = BESIDE
        self._other = 0
        self._tables = 2

    def add(
        self, *, records: int = 0, of_module: int = 0, of_parameter: int = 0, beside: int = 0, other: int = 0
    ) -> None:
        """Reserves more: so many records for each parameter, bytes for each module and for each parameter, bytes of a
        step, and bytes that are copied alone.
        """
        self._for_each_module += of_module
        self._for_each_parameter += of_parameter + records * RECORD_BYTES
        self._tables += records
        self._beside += beside
        self._other = max(self._other, other)
        self.reserve()

    def reserve(self) -> None:
        """Has the memory allocated, unless there is enough."""
        model = self._model()
        parameters = [] if model is None else list(model.parameters())
        if model is not None and any(pinned.is_used_by(parameter.device) for parameter in parameters):
            modules = len(list(model.modules()))
            step = self._for_each_module * modules + self._for_each_parameter * len(parameters)
            step = max(step, FEWEST * RECORD_BYTES) + self._beside
            pinned.reserve(max(step, self._other, triton.table_bytes(self._tables * len(parameters))))
