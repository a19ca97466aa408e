"""The parts of the package know only what they should, and stay small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

import tbhooks
from tests.support.slow import cases

PACKAGE = Path(tbhooks.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

# The layers, by folder, and the folders that each may import. The picture is in CONTRIBUTING.md.
ANY = None
LAYERS: dict[str, frozenset[str] | None] = {
    "data": frozenset(),
    "drawing": frozenset({"data"}),
    "reduction": frozenset({"data"}),
    "capture": frozenset({"data", "reduction"}),
    "collectors": frozenset({"data", "drawing", "reduction", "capture"}),
    "distributed": frozenset({"data", "capture"}),
    "rules": frozenset({"data"}),
    "sinks": frozenset({"data", "drawing"}),
    "delivery": frozenset({"data", "sinks"}),
    "runs": frozenset({"data", "sinks"}),
    "api": frozenset(
        {"data", "drawing", "reduction", "capture", "collectors", "distributed", "rules", "sinks", "delivery"}
    ),
    "views": frozenset({"data", "drawing", "runs"}),
    "plugin": frozenset({"data", "runs", "sinks"}),
    "integrations": ANY,
    "cli": ANY,
}
WITHOUT_TORCH = ("data", "drawing", "rules", "sinks", "delivery", "runs", "views", "plugin")
# Objects of lower layers show themselves in notebooks through this one function.
UPWARD = ("views", "display")
HOOKS = {"register_forward_hook", "register_forward_pre_hook", "register_hook"}
WAITS_FOR_THE_DEVICE = {"item", "cpu", "tolist", "numpy"}
# Of `collectors.embeddings` these are labels in NumPy.
READS_TENSORS_OF_THE_CPU_ONLY = {"capture.step.manual_updates", "reduction.cpu", "collectors.embeddings"}
NEVER_IMPORTED_BY_DEFAULT = (
    "tensorboardX",
    "sklearn",
    "transformers",
    "matplotlib",
    "pandas",
    "IPython",
    "anywidget",
    "wandb",
    "lightning",
    "pytorch_lightning",
    "accelerate",
    "ignite",
    "mlflow",
    "aim",
    "trackio",
    "swanlab",
    "prometheus_client",
)


def dotted(file: Path) -> str:
    """`sinks.jsonl` for tbhooks/sinks/jsonl.py; the package itself is empty."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {dotted(file): file for file in FILES}
EXTENSIONS = {dotted(file) for file in PACKAGE.rglob("*.pyi")}  # in C, which import nothing
IN_LAYERS = sorted(name for name in MODULES if name not in ("", "__main__"))


def layer(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def in_layer(folder: str) -> list[str]:
    found = [name for name in MODULES if name and layer(name) == folder]
    assert found, f"{folder} has no modules"
    return found


@cache
def text(name: str) -> str:
    return MODULES[name].read_text(encoding="utf-8")


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(text(name))


@cache
def nodes(name: str) -> list[ast.AST]:
    """All of a module's code: every test looks through it."""
    return list(ast.walk(tree(name)))


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs on import: what is inside functions does not."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from at_module_level(child)


def imported(nodes: Iterable[ast.AST], name: str) -> Iterator[tuple[str, str]]:
    """(module, name) of each import; the name is empty for `import module`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def own(imports: Iterator[tuple[str, str]]) -> set[str]:
    """Which modules of the package these imports load."""
    found = set()
    for module, what in imports:
        if module.split(".")[0] == "tbhooks":
            inside = module.removeprefix("tbhooks").removeprefix(".")
            below = f"{inside}.{what}".lstrip(".")
            found.add(below if below in MODULES else inside)
    found -= EXTENSIONS
    return found


def packages(imports: Iterator[tuple[str, str]]) -> set[str]:
    return {module.split(".")[0] for module, _ in imports}


def of_module(name: str) -> Iterator[tuple[str, str]]:
    return imported(at_module_level(tree(name)), name)


def anywhere(name: str) -> Iterator[tuple[str, str]]:
    return imported(nodes(name), name)


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in nodes(name):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def in_capture() -> list[str]:
    """The modules that may hold tensors of the device."""
    found = [name for name in IN_LAYERS if layer(name) in ("capture", "collectors", "reduction")]
    return [name for name in found if "torch" in packages(anywhere(name))]


def attributes(name: str) -> set[str]:
    """Every `.attribute` in the code; comments and docstrings are not code."""
    return {node.attr for node in nodes(name) if isinstance(node, ast.Attribute)}


def called_attributes(name: str) -> set[str]:
    calls = (node.func for node in nodes(name) if isinstance(node, ast.Call))
    return {function.attr for function in calls if isinstance(function, ast.Attribute)}


def names(name: str) -> set[str]:
    """Every name the code mentions, as an attribute, a variable, an import or a text such as getattr's."""
    mentioned = attributes(name) | {what for _, what in anywhere(name)}
    for node in nodes(name):
        if isinstance(node, ast.Name):
            mentioned.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.add(node.value)
    return mentioned


def test_every_folder_is_a_layer_and_the_top_holds_nothing_else() -> None:
    found = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert found == {"__init__.py", "__main__.py", "py.typed", *LAYERS}


# --- Who knows whom -------------------------------------------------------------------------------


def test_there_is_no_import_cycle() -> None:
    graph = {name: own(of_module(name)) - {name} for name in MODULES}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, "import cycle: " + " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for needed in sorted(graph[name]):
                visit(needed, (*above, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert done == set(MODULES)


@pytest.mark.parametrize("folder", [folder for folder, allowed in LAYERS.items() if allowed is not ANY])
def test_a_module_imports_only_what_its_layer_may(folder: str) -> None:
    upward = {f"tbhooks.{UPWARD[0]}": UPWARD[1]}
    found = set()
    for name in in_layer(folder):
        imports = [(module, what) for module, what in anywhere(name) if upward.get(module) != what]
        others = own(iter(imports)) - {""}  # the root has the version
        found |= {(name, other) for other in others if layer(other) not in (LAYERS[folder] | {folder})}
    assert not found


@pytest.mark.parametrize("folder", WITHOUT_TORCH)
def test_what_reads_and_delivers_does_without_torch(folder: str) -> None:
    for name in in_layer(folder):
        later = {module for module, _ in anywhere(name) if module.split(".")[0] == "torch"}
        assert later <= ({"torch.utils.tensorboard"} if name == "sinks.tensorboard" else set()), name
        assert "torch" not in packages(of_module(name)), name


def test_modules_import_each_other_and_never_the_root() -> None:
    for name in MODULES:
        for module, what in anywhere(name):
            if module == "tbhooks":
                assert what in MODULES, f"{name} imports {what or 'tbhooks'!r} from the root"


# --- What only some may do ------------------------------------------------------------------------


def test_only_the_hook_manager_registers_module_and_tensor_hooks() -> None:
    # capture.compile.dynamo: inside the graph that is being compiled. cli.selftest.speed: hooks to compare with.
    for name in set(MODULES) - {"capture.hooks.manager", "capture.compile.dynamo", "cli.selftest.speed"}:
        assert not names(name) & HOOKS, name


def test_nobody_registers_full_backward_hooks() -> None:
    for name in MODULES:
        assert not [mentioned for mentioned in names(name) if mentioned.startswith("register_full_backward")], name


def test_hooks_are_registered_where_the_tree_says() -> None:
    assert called_attributes("capture.hooks.manager") >= HOOKS


def test_capture_never_waits_for_the_device() -> None:
    checked = set(in_capture()) - set(READS_TENSORS_OF_THE_CPU_ONLY)
    assert {layer(name) for name in checked} == {"capture", "collectors", "reduction"}
    for name in checked:
        assert not called_attributes(name) & WAITS_FOR_THE_DEVICE, name


def test_only_commands_print() -> None:
    for name in MODULES:
        calls = [node.func for node in nodes(name) if isinstance(node, ast.Call)]
        prints = "print" in {function.id for function in calls if isinstance(function, ast.Name)}
        assert not prints or layer(name) == "cli", name


# Whose attributes nobody else may change. Of the standard library only what patches would be made in.
STANDARD = sys.stdlib_module_names - {"copyreg", "builtins"}


def names_of_others(code: ast.Module) -> set[str]:
    """What modules, classes and functions of other packages are called in a module."""
    found = set()
    for node in ast.walk(code):
        if isinstance(node, ast.Import):
            for alias in node.names:
                package = alias.name.split(".")[0]
                if package not in STANDARD and package != "tbhooks":
                    found.add(alias.asname or package)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] not in {*STANDARD, "tbhooks"}:
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def is_of_others(node: ast.expr, others: set[str]) -> bool:
    """Whether it is an attribute or an item of something of another package, or of a module in sys.modules."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
        if ast.unparse(node).startswith("sys.modules["):
            return True
    return isinstance(node, ast.Name) and node.id in others


def changed_in_other_packages(code: ast.Module) -> list[str]:
    """The assignments, deletions and calls of setattr and delattr that would patch another package."""
    others, found = names_of_others(code), []
    for node in ast.walk(code):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            found += [ast.unparse(node)] * (is_of_others(node.args[0], others))
        inside = (target for target in targets if isinstance(target, ast.Attribute | ast.Subscript))
        found += [ast.unparse(node) for target in inside if is_of_others(target, others)]
    return found


def test_other_packages_are_patched_in_one_place() -> None:
    for name in set(MODULES) - {"data.process.patching"}:
        assert not packages(anywhere(name)) & {"wrapt", "copyreg"}, name
        assert not changed_in_other_packages(tree(name)), name


@pytest.mark.parametrize(
    "line",
    [
        "import torch\ntorch.compile = None",
        "import torch.nn as nn\nnn.Module.forward, x = None, 1",
        "from torch import distributed\nsetattr(distributed, 'destroy_process_group', None)",
        "from torch.amp import GradScaler\ndef f():\n    del GradScaler.step",
        "import copyreg\ncopyreg.dispatch_table[dict] = None",
        "import sys\nsys.modules['torch'].compile = None",
        "def f():\n    from tensorboard.summary.writer import record_writer as r\n    r.masked_crc32c = None",
    ],
)
def test_a_patch_anywhere_else_would_be_noticed(line: str) -> None:
    assert changed_in_other_packages(ast.parse(line))


# --- The tests themselves ---------------------------------------------------------------------------

TESTS = Path(__file__).parents[1]
# The clinic is a program of its own (`make clinic`), in several modules.
TEST_FILES = sorted(file for file in TESTS.rglob("*.py") if "clinic" not in file.relative_to(TESTS).parts)
OF_TESTS = re.compile(r"^\s*(?:from|import) tests\.(\w+)", re.MULTILINE)


def test_helpers_of_tests_live_in_support_and_no_test_file_imports_another() -> None:
    """Read as text: programs that tests run in processes of their own import helpers too."""
    imports = {file: OF_TESTS.findall(file.read_text(encoding="utf-8")) for file in TEST_FILES}
    assert not {file.name: found for file, found in imports.items() if set(found) - {"support"}}


def test_what_every_test_gets_without_asking_stands_in_a_conftest_or_the_test_file() -> None:
    support = [file for file in TEST_FILES if file.parent.name == "support"]
    assert not [file.name for file in support if "autouse" in file.read_text(encoding="utf-8")]


# --- Size -----------------------------------------------------------------------------------------


def test_files_have_at_most_450_lines() -> None:
    assert not [name for name in MODULES if len(text(name).splitlines()) > 450]


def test_functions_have_at_most_60_lines() -> None:
    for name in MODULES:
        lengths = {f.name: f.end_lineno - f.lineno + 1 for f in functions(name) if f.end_lineno is not None}
        assert not {function: length for function, length in lengths.items() if length > 60}, name


# --- What an import costs -------------------------------------------------------------------------


def in_a_fresh_process(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SINKS = ", ".join(f"tbhooks.{name}Sink" for name in ("Wandb", "Mlflow", "Aim", "Trackio", "Swanlab", "Prometheus"))


@pytest.mark.parametrize("use", ["", "tbhooks.watch", SINKS])
def test_importing_the_package_loads_nothing_optional(use: str) -> None:
    loaded = f"print([name for name in {NEVER_IMPORTED_BY_DEFAULT} if name in sys.modules])"
    assert in_a_fresh_process(f"import sys, tbhooks, tbhooks.integrations\n{use}\n{loaded}") == "[]\n"


# Of the process's own time, the least of several tries: a busy machine must not fail it.
MOST_SECONDS, TRIES = 0.15, 5


def test_importing_the_package_after_torch_takes_next_to_no_time() -> None:
    program = (
        "import sys, time, torch, numpy\nbefore, start = set(sys.modules), time.process_time()\n"
        "import tbhooks\nprint(time.process_time() - start, *sorted(set(sys.modules) - before))"
    )
    seconds, names = MOST_SECONDS, []
    for _ in range(TRIES):
        taken, *names = in_a_fresh_process(program).split()
        seconds = min(seconds, float(taken))
        if seconds < MOST_SECONDS:
            break
    assert seconds < MOST_SECONDS
    assert not {name.partition(".")[0] for name in names} & {"tensorboard", "google", *NEVER_IMPORTED_BY_DEFAULT}


@pytest.mark.parametrize(
    "module", ["tbhooks", "tbhooks.plugin", "tbhooks.runs", "tbhooks.cli.commands", "tbhooks.cli.run"]
)
def test_torch_is_not_imported_before_it_is_needed(module: str) -> None:
    assert in_a_fresh_process(f"import sys, {module}; print('torch' in sys.modules)") == "False\n"


def test_peek_is_the_function_whatever_was_imported_first() -> None:
    program = "import tbhooks\nfrom tbhooks.api.peek import MOST_KEPT_BYTES\nprint(tbhooks.peek.__name__)"
    assert in_a_fresh_process(program) == "peek\n"


@pytest.mark.parametrize(
    "first",
    cases(
        ["from tbhooks.api.watch import Watch", "import tbhooks.cli.demo", "pass"],
        always={"from tbhooks.api.watch import Watch"},
        reason="every case imports torch in a process of its own",
    ),
)
def test_watch_is_the_function_whatever_was_imported_first(first: str) -> None:
    program = f"import tbhooks\n{first}\nprint(callable(tbhooks.watch), tbhooks.watch.__name__, tbhooks.Watch.__name__)"
    assert in_a_fresh_process(program) == "True watch Watch\n"


def test_integrations_are_there_without_an_import_of_their_own() -> None:
    program = "import tbhooks; print(tbhooks.integrations.accelerate.watch.__name__)"
    assert in_a_fresh_process(program) == "watch\n"


def test_a_name_that_is_none_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'tbhooks' has no attribute 'wacth'"):
        tbhooks.wacth
    assert "watch" in dir(tbhooks)
