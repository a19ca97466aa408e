"""How objects of the lower layers show themselves: the one call up to `tbhooks.views`, which is imported only then."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

Names = Collection[str] | None


class LiveView(Protocol):
    """The view that `Watch.live()` returns."""

    updates: int
    seconds: float

    def choose(self, kind: str, stat: str) -> None: ...

    def stop(self) -> None: ...


def display(view: str, *arguments: Any, **options: Any) -> Any:
    """Returns what the named view of `tbhooks.views` makes of the arguments."""
    from tbhooks.views import display as make  # noqa: PLC0415  loaded only when something is shown

    return make(view, *arguments, **options)


def mimebundle(view: str) -> Callable[..., dict[str, str]]:
    """Makes the method `_repr_mimebundle_`, which notebooks call to show an object."""

    def _repr_mimebundle_(self: Any, include: Names = None, exclude: Names = None) -> dict[str, str]:
        bundle: dict[str, str] = display(view, self, include, exclude)
        return bundle

    return _repr_mimebundle_
