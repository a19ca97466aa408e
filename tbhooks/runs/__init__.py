"""Reading runs back from disk: every frame, finding and scalar of a directory, without torch or the model.

```python
run = tbhooks.runs.read("runs/digits")
run.frames[-1]["encoder.0", "activation"].std
run.scalars["train/loss"].values
```
"""

from __future__ import annotations

from tbhooks.runs.run import Run, find, read
from tbhooks.runs.scalars import Series

__all__ = ["Run", "Series", "find", "read"]
