"""The scripts of the tab as one script, and its style sheets as one sheet: two requests instead of sixty.

The source stays in modules. In the one script each module is a function that is called once, in the order in which they
need each other; what it imports it takes from the results of earlier ones. Only the forms of import and export that the
modules use are understood, and anything else raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from posixpath import normpath

_IMPORT = re.compile(r'^import \{ ([^{}"]+) \} from "(\.[^"]+)";$', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async function|function|class|const) (\w+))", re.MULTILINE)
_MODULE_WORD = re.compile(r"^\s*(?:import|export)\b.*", re.MULTILINE)


def script(root: Path, entry: str) -> str:
    """One module with the exports of `entry`, which is served from the directory of `entry` itself."""
    modules: dict[str, str] = {}
    _add(root, entry, modules, ())
    parts = [f"const {_variable(name)} = {body}" for name, body in modules.items()]
    exports = _EXPORT.findall((root / entry).read_text(encoding="utf-8"))
    return "\n".join([*parts, f"export const {{ {', '.join(exports)} }} = {_variable(entry)};", ""])


def styles(root: Path, names: Iterable[str]) -> str:
    """One style sheet with these, in their order."""
    return "\n".join((root / name).read_text(encoding="utf-8") for name in names)


def _add(root: Path, name: str, modules: dict[str, str], importers: tuple[str, ...]) -> None:
    """Adds a module after those it imports."""
    if name in importers:
        raise ValueError(f"{name} imports itself: {' -> '.join((*importers, name))}")
    if name in modules:
        return
    text = (root / name).read_text(encoding="utf-8")
    for _, path in _IMPORT.findall(text):
        _add(root, _resolved(name, path), modules, (*importers, name))
    modules[name] = _as_function(name, text)


def _resolved(name: str, path: str) -> str:
    return normpath(str(PurePosixPath(name).parent / path))


def _as_function(name: str, text: str) -> str:
    def taken(found: re.Match[str]) -> str:
        return f"const {{ {found[1].replace(' as ', ': ')} }} = {_variable(_resolved(name, found[2]))};"

    exports = _EXPORT.findall(text)
    body = _EXPORT.sub("", _IMPORT.sub(taken, text))
    if unknown := _MODULE_WORD.search(body):
        raise ValueError(f"{name}: cannot bundle {unknown[0].strip()!r}")
    body = body.replace("import.meta.url", f'new URL("{name}", import.meta.url).href')
    return f"(() => {{ // {name}\n{body}return {{ {', '.join(exports)} }};\n}})();"


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name.removesuffix(".js"))
