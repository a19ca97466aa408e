"""Integrations with training frameworks, one module per framework. Each is imported on first access.

- `tbhooks.integrations.lightning.WatchCallback`: for the Trainer of `lightning` or `pytorch_lightning`
- `tbhooks.integrations.transformers.WatchCallback`: for the Trainer of `transformers`
- `tbhooks.integrations.accelerate.watch(accelerator, model)`: for a loop of your own with `accelerate`
- `tbhooks.integrations.ignite.attach(trainer, model, writer)`: for an Engine of `ignite`
"""

import importlib
from typing import Any

__all__ = ["accelerate", "ignite", "lightning", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
