"""The hook of mkdocs: adds the pages that are made at build time.

Tutorials are the notebooks with their outputs, the reference of the command line comes from its parsers, and the
pages about the project are the files in the root of the repository. They cannot differ from what they are made
of. Nothing is fetched from the network.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import commands
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import notebooks

ROOT = Path(__file__).resolve().parents[2]
# Pages that are files of the repository, which GitHub expects in its root.
FILES = {"security.md": "SECURITY.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
COMMANDS = "<!-- commands: made from the parsers -->"
TUTORIALS = "Tutorials"
_PAGES = {name: uri for uri, name in FILES.items()}
_TO_FILE = re.compile(rf"\]\(\.\./({'|'.join(map(re.escape, _PAGES))})")
_TO_NOTEBOOK = re.compile(r"\]\(\.\./notebooks/(\w+)\.ipynb")


def on_config(config: Any) -> Any:
    """Lists the notebooks under Tutorials."""
    for section in config.nav:
        if isinstance(section, dict) and TUTORIALS in section:
            section[TUTORIALS] = ["tutorials/index.md", *(page.uri for page in _tutorials().values())]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for page in _tutorials().values():
        files.append(File.generated(config, page.uri, content=page.markdown))
    files.append(File.generated(config, "tutorials/index.md", content=notebooks.index(list(_tutorials().values()))))
    for uri, name in FILES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, **_others: Any) -> str:
    """Fills in the reference of the command line. Links to files of the repository lead to their pages."""
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, commands.reference())
    return _TO_NOTEBOOK.sub(r"](tutorials/\1.md", _TO_FILE.sub(lambda match: f"]({_PAGES[match[1]]}", markdown))


def on_page_content(html: str, page: Any, **_others: Any) -> str:
    """Puts the outputs of a notebook where its page has their comments."""
    tutorial = _tutorials().get(page.file.src_uri)
    return html if tutorial is None else notebooks.with_outputs(html, tutorial)


def on_post_page(output: str, page: Any, **_others: Any) -> str:
    """Fails if a page would load anything from the network when it is read."""
    loaded = _LOADED.findall(output)
    if loaded:
        raise PluginError(f"{page.file.src_uri} loads {', '.join(sorted(set(loaded)))} from the network")
    return output


def on_post_build(config: Any) -> None:
    """Puts the sources of pages beside them: llms.txt links to these."""
    for source in Path(config.docs_dir).glob("*.md"):
        shutil.copyfile(source, Path(config.site_dir) / source.name)


_LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
_made: dict[str, notebooks.Tutorial] = {}


def _tutorials() -> dict[str, notebooks.Tutorial]:
    """The tutorials by the address of their page; the quickstart first."""
    if not _made:
        paths = sorted((ROOT / "notebooks").glob("*.ipynb"), key=lambda path: (path.stem != "quickstart", path.stem))
        _made.update({page.uri: page for page in map(notebooks.read, paths)})
    return _made
