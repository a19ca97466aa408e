"""The scripts of the tab as one script: what is in it, in which order, and what it refuses."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from werkzeug.test import Client

from tbhooks.plugin import bundle, server
from tbhooks.plugin.server import ENTRY, STATIC, STYLE, STYLES, Plugin


def write(directory: Path, **modules: str) -> Path:
    for name, text in modules.items():
        (directory / f"{name}.js").write_text(text)
    return directory


def test_a_module_stands_once_behind_those_that_it_imports(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    write(tmp_path / "parts", a='import { z } from "../z.js";\nexport const a = z;\n')
    write(
        tmp_path,
        index='import { a as first } from "./parts/a.js";\nimport { z } from "./z.js";\nexport function render() {}\n',
        z="export class Z {}\nexport async function z() {}\n",
    )
    lines = bundle.script(tmp_path, "index.js").splitlines()
    assert [line for line in lines if line.startswith(("const $", "const {", "export"))] == [
        "const $z = (() => { // z.js",
        "const $parts_a = (() => { // parts/a.js",
        "const { z } = $z;",
        "const $index = (() => { // index.js",
        "const { a: first } = $parts_a;",
        "const { z } = $z;",
        "export const { render } = $index;",
    ]
    assert "return { Z, z };" in lines


@pytest.mark.parametrize(
    "text",
    [
        'import * as z from "./z.js";\n',
        'import { a } from "elsewhere";\n',
        'import {\n  a,\n} from "./z.js";\n',
        "export default 1;\n",
        "export let a = 1;\n",
        'export { a } from "./z.js";\n',
    ],
)
def test_other_forms_of_import_and_export_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"index\.js: cannot bundle '(import|export)"):
        bundle.script(write(tmp_path, index=text, z="export const a = 1;\n"), "index.js")


def test_modules_that_need_each_other_are_refused(tmp_path: Path) -> None:
    one, two = 'import { b } from "./b.js";\n', 'import { a } from "./a.js";\n'
    with pytest.raises(ValueError, match=r"a\.js imports itself: a\.js -> b\.js -> a\.js"):
        bundle.script(write(tmp_path, a=one, b=two), "a.js")


def test_addresses_stay_relative_to_the_module_that_they_were_in() -> None:
    text = bundle.script(STATIC, "index.js")
    assert 'new URL("..", new URL("core/api.js", import.meta.url).href)' in text


def test_the_tab_is_one_script_and_one_style_sheet() -> None:
    routes = Plugin(type("Context", (), {"data_provider": None})).get_plugin_apps()
    script = Client(routes[ENTRY]).get(ENTRY)
    assert script.content_type == "text/javascript; charset=utf-8"
    assert script.get_data(as_text=True) == bundle.script(STATIC, "index.js")
    modules = {path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*.js")}
    found = re.findall(r"^const \$\w+ = \(\(\) => \{ // (.+)$", script.get_data(as_text=True), re.MULTILINE)
    assert set(found) == modules - {"docs/page.js", "docs/markdown.js"}
    assert len(found) == len(set(found))
    style = Client(routes[STYLE]).get(STYLE)
    assert style.content_type == "text/css; charset=utf-8"
    assert style.get_data(as_text=True) == "\n".join((STATIC / name).read_text() for name in STYLES)
    smaller = Client(routes[ENTRY]).get(ENTRY, headers={"Accept-Encoding": "gzip"})
    assert smaller.headers["Content-Encoding"] == "gzip"
    assert len(smaller.data) < len(script.data) / 2


def test_an_edited_file_is_served_without_a_new_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Path(shutil.copytree(STATIC, tmp_path / "static"))
    monkeypatch.setattr(server, "STATIC", copy)
    routes = Plugin(type("Context", (), {"data_provider": None})).get_plugin_apps()
    for route, name in ((ENTRY, "map/view.js"), (STYLE, "core/style.css")):
        file = copy / name
        file.write_text("/* edited */" + file.read_text())
        os.utime(file, ns=(0, 0))
        assert "/* edited */" in Client(routes[route]).get(route).get_data(as_text=True)
