"""The TBHOOKS tab of TensorBoard: what TensorBoard loads when it starts.

TensorBoard imports this whatever its log directory holds, and an error here would end it, so nothing heavy is
imported before there is a tab to show.
"""

from __future__ import annotations

from typing import Any

from tensorboard.plugins import base_plugin

NAME = "tbhooks"
_KEEP_ALL = 0


class Loader(base_plugin.TBLoader):  # type: ignore[misc]  # TensorBoard has no types
    """Makes the tab, and has TensorBoard keep every step of ours, which it would sample down to 10 or 100."""

    def fix_flags(self, flags: Any) -> None:
        """What users said of other plugins stays, and so does what they said of this one."""
        asked = dict(getattr(flags, "samples_per_plugin", None) or {})
        asked.setdefault(NAME, _KEEP_ALL)
        flags.samples_per_plugin = asked

    def load(self, context: Any) -> Any:
        if context.data_provider is None:
            return None
        from tbhooks.plugin.server import Plugin  # noqa: PLC0415  not before there is a tab to show

        return Plugin(context)
