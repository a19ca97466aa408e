"""A JupyterLab of its own: no settings of the user's, no network, gone when the tests are; and how to drive it."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from tests.support.processes import wait_for

PATIENCE_MS = 120_000
OPTIONS = (
    "--no-browser",
    "--allow-root",
    "--ServerApp.ip=127.0.0.1",
    "--ServerApp.port_retries=0",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--LabApp.expose_app_in_browser=True",
)
# What it would ask for in dialogs otherwise.
SETTINGS = {
    "notebook-extension/tracker": {"autoStartDefaultKernel": True},
    "apputils-extension/notification": {"fetchNews": "false"},
}
DARK, LIGHT = "JupyterLab Dark", "JupyterLab Light"


@dataclass(frozen=True)
class Lab:
    """A server and the folder it serves."""

    address: str
    token: str
    directory: Path

    def write(self, name: str, cells: Sequence[str]) -> None:
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        nbformat.write(notebook, self.directory / name)

    def saved(self, name: str) -> Any:
        return nbformat.read(self.directory / name, as_version=4)

    def answers(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with direct.open(f"{self.address}/api/status?token={self.token}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextmanager
def serving(directory: Path) -> Iterator[Lab]:
    """Starts one, and ends it with the kernels it started."""
    own = {name: str(directory / name) for name in ("config", "data", "runtime", "settings", "workspaces", "ipython")}
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": own["config"],
        "JUPYTER_DATA_DIR": own["data"],
        "JUPYTER_RUNTIME_DIR": own["runtime"],
        "JUPYTERLAB_SETTINGS_DIR": own["settings"],
        "JUPYTERLAB_WORKSPACES_DIR": own["workspaces"],
        "IPYTHONDIR": own["ipython"],
        "OMP_NUM_THREADS": "1",
    }
    notebooks = directory / "notebooks"
    notebooks.mkdir(parents=True)
    for plugin, values in SETTINGS.items():
        file = directory / "settings" / "@jupyterlab" / f"{plugin}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as observer:
        observer.bind(("127.0.0.1", 0))
        port = observer.getsockname()[1]
    lab = Lab(f"http://127.0.0.1:{port}", secrets.token_hex(16), notebooks)
    flags = [f"--ServerApp.port={port}", f"--IdentityProvider.token={lab.token}", f"--ServerApp.root_dir={notebooks}"]
    with (directory / "log").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", *OPTIONS, *flags],
            stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, cwd=notebooks,
        )  # fmt: skip
    try:
        wait_for(lambda: process.poll() is not None or lab.answers(), "JupyterLab")
        assert process.poll() is None, (directory / "log").read_text()
        yield lab
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


@dataclass
class Notebook:
    """An open notebook in a page."""

    page: Any

    def run_all(self) -> None:
        self.command("notebook:run-all-cells")

    def finished(self, cells: int) -> None:
        """Until the last of so many code cells has its number."""
        script = """n => {
            const prompts = [...document.querySelectorAll(".jp-CodeCell .jp-InputArea-prompt")];
            return prompts.length >= n && prompts.slice(0, n).every(each => /\\[\\d+\\]/.test(each.textContent));
        }"""
        self.page.wait_for_function(script, arg=cells, timeout=PATIENCE_MS)

    def command(self, name: str, **arguments: Any) -> None:
        script = "([name, args]) => { window.jupyterapp.commands.execute(name, args); }"  # whose end is not waited for
        self.page.evaluate(script, [name, arguments])

    def theme(self, name: str) -> None:
        self.command("apputils:change-theme", theme=name)
        light = "false" if name == DARK else "true"
        self.page.wait_for_selector(f'body[data-jp-theme-light="{light}"]', state="attached")
        self.page.wait_for_timeout(500)

    def save(self) -> None:
        self.command("docmanager:save")


def open_notebook(browser: Any, lab: Lab, name: str) -> Notebook:
    page = browser.new_context(viewport={"width": 1250, "height": 1200}).new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.goto(f"{lab.address}/lab/workspaces/tests/tree/{name}?reset&token={lab.token}")
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    page.wait_for_function("() => window.jupyterapp && window.jupyterapp.commands.hasCommand('notebook:run-all-cells')")
    # Cells that are run before the kernel has said what it is are forgotten.
    page.evaluate("""async () => {
        const context = window.jupyterapp.shell.currentWidget.sessionContext;
        await context.ready;
        await context.session.kernel.info;
        window.jupyterapp.shell.collapseLeft();
    }""")
    return Notebook(page)
