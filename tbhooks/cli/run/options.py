"""The command line of `tbhooks run`: separates our options from the script and its arguments, and parses ours.

Everything is checked before the script starts, and without torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tbhooks.data.errors import ArgumentError, check_names
from tbhooks.data.process import remote

NO_RULES = "none"
MERGE = "merge"
# The options without a value.
_FLAGS = ("-h", "--help")
_DESCRIPTION = """\
Runs a training script in this process, just as python would, and watches every model that its optimizers train. The
script, its results, its stdout and its exit code do not change. Messages of tbhooks go to stderr.
"""
_EXAMPLES = """\
examples:
  tbhooks run train.py --lr 0.1
  tbhooks run --every 10 --logdir runs/try -m package.train --lr 0.1
  tbhooks run --kinds activation,gradient --include 'encoder.*' train.py
  torchrun --nproc-per-node 2 -m tbhooks run train.py
  torchrun --nproc-per-node 2 -m tbhooks run --ranks merge train_fsdp.py

Each option can be set by an environment variable as well: TBHOOKS_EVERY, TBHOOKS_LOGDIR, TBHOOKS_KINDS,
TBHOOKS_INCLUDE, TBHOOKS_EXCLUDE, TBHOOKS_RULES, TBHOOKS_RANKS. Options take precedence.

exit code: that of the script; 2 if an option is wrong or the script does not exist, before anything is run.
"""


@dataclass(frozen=True)
class Target:
    """The script: a file, a directory or an archive as `path`, or a `module`; and its arguments."""

    path: str | None
    module: str | None
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """How models are watched, and where the run is written."""

    logdir: str | None
    watch: dict[str, Any]
    """The keyword arguments of `watch` that were set."""

    @property
    def merges_ranks(self) -> bool:
        """Whether all ranks take part, not only the first."""
        return bool(self.watch.get("ranks") == MERGE)

    @property
    def kinds(self) -> tuple[str, ...]:
        kinds: tuple[str, ...] = self.watch.get("kinds", ())
        return kinds


def split(arguments: Sequence[str]) -> tuple[list[str], Target | None]:
    """Returns our options, which end where the script begins, and the script with its arguments (None if missing)."""
    i = 0
    while i < len(arguments):
        word = arguments[i]
        if word == "--":
            return list(arguments[:i]), _target(arguments[i + 1 :])
        if word.startswith("-m") or not word.startswith("-") or word == "-":
            return list(arguments[:i]), _target(arguments[i:])
        i += 1 if word in _FLAGS or "=" in word else 2
    return list(arguments), None


def _target(words: Sequence[str]) -> Target | None:
    if not words:
        return None
    first, rest = words[0], words[1:]
    if not first.startswith("-m"):
        return Target(first, None, tuple(rest))
    if first != "-m":
        return Target(None, first[2:], tuple(rest))
    return Target(None, rest[0], tuple(rest[1:])) if rest else None


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Options, Target]:
    """Parses options and their environment variables. Raises ArgumentError for an unknown name or a wrong value."""
    ours, target = split(arguments)
    given, unknown = parser().parse_known_args(ours)
    check_names("option", [word.partition("=")[0] for word in unknown], [f"--{name}" for name in _PARSERS])
    if target is None:
        raise ArgumentError("no script given; see tbhooks run --help")
    values = {name: _value(name, text, environment) for name, text in vars(given).items()}
    values = {name: value for name, value in values.items() if value is not None}
    return Options(values.pop("logdir", None), values), target


def _value(name: str, text: str | None, environment: Mapping[str, str]) -> Any:
    """The value of an option, or else of its variable; None if neither is set."""
    if text is not None:
        return _PARSERS[name](text)
    variable = f"TBHOOKS_{name.upper()}"
    try:
        return _PARSERS[name](environment[variable]) if environment.get(variable) else None
    except ArgumentError as problem:
        raise ArgumentError(f"{variable}: {problem}") from None


def parser() -> argparse.ArgumentParser:
    """The parser of the options of `tbhooks run`. The docs show it."""
    run = argparse.ArgumentParser(
        prog="tbhooks run",
        usage="tbhooks run [options] (script.py | -m package.module) [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("--every", metavar="N", help="log every Nth step (default: 100)")
    run.add_argument("--logdir", metavar="DIR", help="directory of the run (default: that of the script's "
                     "SummaryWriter, or runs/NAME-TIME)")  # fmt: skip
    run.add_argument("--kinds", metavar="KIND,...", help="what to log: activation, gradient, weight, weight_gradient, "
                     "update (default: these), input, functional")  # fmt: skip
    run.add_argument("--include", metavar="GLOB,...", help="modules to watch, by path (default: all)")
    run.add_argument("--exclude", metavar="GLOB,...", help="modules not to watch, by path")
    run.add_argument("--ranks", metavar="HOW", help="local: log the first rank only (default); merge: statistics "
                     "over all ranks and whole parameters")  # fmt: skip
    run.add_argument("--rules", metavar="RULE,...", help="diagnostic rules, as listed by tbhooks rules, or none")
    return run


# The parser of each option. Valid names are imported only if needed: that loads NumPy, which is up to the script.


def _every(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"every must be an integer >= 1, got {text!r}")
    return int(text)


def _directory(text: str) -> str:
    remote.check(text)
    if not text.strip() or os.path.isfile(os.path.expanduser(text)):
        raise ArgumentError(f"logdir must be a directory, got {text!r}")
    return text


def _names(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ArgumentError(f"expected names separated by commas, got {text!r}")
    return words


def _kinds(text: str) -> tuple[str, ...]:
    from tbhooks.data.frame import ALL_KINDS  # noqa: PLC0415

    check_names("kind", _names(text), ALL_KINDS)
    return _names(text)


def _ranks(text: str) -> str:
    check_names("value of ranks", (text,), ("local", MERGE))
    return text


def _rules(text: str) -> tuple[str, ...]:
    from tbhooks.rules import RULES  # noqa: PLC0415

    if text == NO_RULES:
        return ()
    check_names("rule", _names(text), ("default", *RULES))
    return _names(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "every": _every, "logdir": _directory, "kinds": _kinds, "include": _names, "exclude": _names, "rules": _rules,
    "ranks": _ranks,
}  # fmt: skip
