"""The TBHOOKS tab of TensorBoard, and the loader that TensorBoard imports when it starts.

TensorBoard imports this module in any case, and an error here would stop it, so nothing heavy is imported before there
is a tab to show.
"""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin

NAME = "tbhooks"
_KEEP_ALL = 0


class Loader(base_plugin.TBLoader):  # type: ignore[misc]  # TensorBoard has no types
    """Makes the tab, and has TensorBoard keep all our steps, which it would downsample to 10 or 100."""

    def fix_flags(self, flags: Any) -> None:
        """Sets the default of `--samples_per_plugin` for this plugin; what users set is kept."""
        samples = dict(getattr(flags, "samples_per_plugin", None) or {})
        samples.setdefault(NAME, _KEEP_ALL)
        flags.samples_per_plugin = samples

    def load(self, context: Any) -> Any:
        if context.data_provider is None:
            return None
        from tbhooks.plugin.server import Plugin  # noqa: PLC0415  not before there is a tab to show

        return Plugin(context)
