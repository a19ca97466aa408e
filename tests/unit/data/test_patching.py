"""Attributes of other packages are replaced while somebody needs it, and are the original objects afterwards."""

from __future__ import annotations

import copy
import copyreg
import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import wrapt

from tbhooks.data.process.patching import Patch, declared, reducing, wrap_attribute, wrapping

NAME = "a_package_of_others"


class Holder:
    pass


class Thing:
    def double(self, number: int) -> int:
        return 2 * number


def double(number: int) -> int:
    return 2 * number


def add_one(wrapped: Any, _instance: Any, args: Any, kwargs: Any) -> int:
    return int(wrapped(*args, **kwargs)) + 1


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module with a function and a class."""
    module: Any = ModuleType(NAME)
    module.double = double
    module.Thing = type("Thing", (), {"double": Thing.double})
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def patch_of(name: str) -> Patch:
    return wrapping(NAME, name, add_one, "no version")


def test_a_function_is_wrapped_for_the_first_holder_and_put_back_after_the_last(package: Any) -> None:
    patch, one, other = patch_of("double"), Holder(), Holder()
    assert package.double is double
    patch.acquire(one)
    patch.acquire(other)
    patch.acquire(other)
    assert package.double(4) == 9
    assert package.double.__wrapped__ is double, "wrapped once"
    patch.release(one)
    assert patch.is_installed
    patch.release(other)
    patch.release(other)
    assert package.double is double
    assert not patch.is_installed
    patch.acquire(one)
    assert package.double(4) == 9
    patch.release(one)
    assert package.double is double


def test_a_method_is_put_back_as_it_lay_in_its_class(package: Any) -> None:
    original, patch, holder = vars(package.Thing)["double"], patch_of("Thing.double"), Holder()
    patch.acquire(holder)
    assert package.Thing().double(4) == 9
    patch.release(holder)
    assert vars(package.Thing)["double"] is original


def test_a_holder_that_is_gone_holds_nothing(package: Any) -> None:
    patch, other = patch_of("double"), Holder()
    patch.acquire(Holder())
    gc.collect()
    patch.release(other)
    assert package.double is double


def test_a_wrapper_of_others_around_ours_stays_and_ours_passes_calls_on(package: Any) -> None:
    patch, holder = patch_of("double"), Holder()
    patch.acquire(holder)
    wrapt.wrap_function_wrapper(package, "double", lambda wrapped, _, args, kwargs: 10 * wrapped(*args, **kwargs))
    theirs = package.double
    assert package.double(4) == 90
    patch.release(holder)
    assert package.double is theirs
    assert package.double(4) == 80
    patch.acquire(holder)
    assert package.double(4) == 81
    patch.release(holder)
    assert package.double is theirs


def test_a_module_is_patched_when_it_is_imported_if_somebody_still_wants_it(tmp_path: Any) -> None:
    for name in ("wanted_later", "unwanted_later"):
        (tmp_path / f"{name}.py").write_text("def double(number):\n    return 2 * number\n")
    sys.path.insert(0, str(tmp_path))
    wanted, unwanted = (wrapping(name, "double", add_one, "") for name in ("wanted_later", "unwanted_later"))
    holder = Holder()
    try:
        wanted.acquire(holder)
        unwanted.acquire(holder)
        unwanted.release(holder)
        assert not wanted.is_installed
        import unwanted_later
        import wanted_later

        assert (wanted_later.double(4), unwanted_later.double(4)) == (9, 8)
        wanted.release(holder)
        assert wanted_later.double(4) == 8
    finally:
        sys.path.remove(str(tmp_path))


def test_what_another_version_does_not_have_or_is_refused_is_left_alone(package: Any) -> None:
    holder, offered = Holder(), []
    refusing = wrapping(NAME, "double", add_one, "", accepts=offered.append)  # type: ignore[arg-type]
    missing = wrapping(NAME, "Thing.triple", add_one, "", accepts=lambda original: bool(offered.append(original)))
    absent = patch_of("triple")
    for patch in (refusing, missing, absent):
        patch.acquire(holder)
        assert not patch.is_installed
        patch.release(holder)
    assert offered == [double, None]
    assert package.double is double


def test_a_method_of_one_object_is_wrapped_and_the_object_is_not_kept_alive() -> None:
    thing, other = Thing(), Thing()
    undo = wrap_attribute(thing, "double", add_one)
    assert (thing.double(4), other.double(4)) == (9, 8)
    undo()
    assert (thing.double(4), vars(thing)) == (8, {})
    undo = wrap_attribute(thing, "double", add_one)
    reference = weakref.ref(thing)
    del thing
    gc.collect()
    assert reference() is None
    undo()


def test_a_method_that_was_set_on_one_object_is_set_again() -> None:
    thing: Any = Thing()
    thing.double = double
    undo = wrap_attribute(thing, "double", add_one)
    assert thing.double(4) == 9
    undo()
    assert vars(thing) == {"double": double}


def test_how_a_type_is_copied_is_put_back() -> None:
    class Table(OrderedDict[str, int]):
        pass

    def without_zeros(original: Any, table: Table) -> Any:
        kept = [(key, value) for key, value in table.items() if value]
        reduced = original(table)
        return *reduced[:4], iter(kept), *reduced[5:]

    before = dict(copyreg.dispatch_table)
    patch, holder = reducing(Table, without_zeros, ""), Holder()
    table = Table(a=0, b=1)
    patch.acquire(holder)
    assert copy.deepcopy(table) == {"b": 1}
    patch.release(holder)
    assert copyreg.dispatch_table == before
    assert copy.deepcopy(table) == table


def test_every_patch_names_what_it_replaces_and_the_versions_it_was_tried_with() -> None:
    from tbhooks.api import watch  # noqa: F401  declares them

    known = {(patch.module, patch.name): patch.tried_with for patch in declared() if patch.module.startswith("torch")}
    assert known["torch.distributed", "destroy_process_group"].startswith("torch 2.10")
