"""The command line of `tbhooks run`: which words are ours and which the script's, and what ours mean.

Everything is checked before the script starts, and without torch.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tbhooks.data import remote
from tbhooks.data.errors import ArgumentError, check_names

NO_RULES = "none"
MERGE = "merge"
# Options without a value; every other one of ours has one.
_FLAGS = ("-h", "--help")
_DESCRIPTION = """\
Runs a training script in this process, just as python would, and watches every model that its optimizers train. The
script is not changed, nor is what it computes, prints to stdout or exits with. What there is to say is said on stderr.
"""
_EXAMPLES = """\
examples:
  tbhooks run train.py --lr 0.1
  tbhooks run --every 10 --logdir runs/try -m package.train --lr 0.1
  tbhooks run --kinds activation,gradient --include 'encoder.*' train.py
  torchrun --nproc-per-node 2 -m tbhooks run train.py
  torchrun --nproc-per-node 2 -m tbhooks run --ranks merge train_fsdp.py

Each option can be said by a variable as well: TBHOOKS_EVERY, TBHOOKS_LOGDIR, TBHOOKS_KINDS, TBHOOKS_INCLUDE,
TBHOOKS_EXCLUDE, TBHOOKS_RULES, TBHOOKS_RANKS. Options win over variables.

exit code: the script's own. 2 if an option is wrong or the script is not there; nothing has run then.
"""


@dataclass(frozen=True)
class Target:
    """What is to be run: a file, a directory or an archive as `path`, or a `module`; and its own arguments."""

    path: str | None
    module: str | None
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """How models are watched, and where the run is to go."""

    logdir: str | None
    watch: dict[str, Any]
    """What `watch` is given; nothing that was not asked for."""

    @property
    def merges_ranks(self) -> bool:
        """Whether every rank takes part, and not the first alone."""
        return bool(self.watch.get("ranks") == MERGE)

    @property
    def kinds(self) -> tuple[str, ...]:
        kinds: tuple[str, ...] = self.watch.get("kinds", ())
        return kinds


def split(arguments: Sequence[str]) -> tuple[list[str], Target | None]:
    """Our options, which end where the script begins; and the script with its own."""
    place = 0
    while place < len(arguments):
        word = arguments[place]
        if word == "--":
            return list(arguments[:place]), _target(arguments[place + 1 :])
        if word.startswith("-m") or not word.startswith("-") or word == "-":
            return list(arguments[:place]), _target(arguments[place:])
        place += 1 if word in _FLAGS or "=" in word else 2
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


def understood(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[Options, Target]:
    """What was asked for, by option or by variable; raises `ArgumentError` for what cannot be."""
    ours, target = split(arguments)
    said, unknown = _parser().parse_known_args(ours)
    check_names("option", [word.partition("=")[0] for word in unknown], [f"--{name}" for name in _MEANINGS])
    if target is None:
        raise ArgumentError("which script? See tbhooks run --help")
    meant = {name: _meaning(name, word, environment) for name, word in vars(said).items()}
    meant = {name: meaning for name, meaning in meant.items() if meaning is not None}
    return Options(meant.pop("logdir", None), meant), target


def _meaning(name: str, word: str | None, environment: Mapping[str, str]) -> Any:
    """What was said by the option, or else by its variable; None if by neither."""
    if word is not None:
        return _MEANINGS[name](word)
    variable = f"TBHOOKS_{name.upper()}"
    try:
        return _MEANINGS[name](environment[variable]) if environment.get(variable) else None
    except ArgumentError as problem:
        raise ArgumentError(f"{variable}: {problem}") from None


def _parser() -> argparse.ArgumentParser:
    run = argparse.ArgumentParser(
        prog="tbhooks run",
        usage="tbhooks run [options] (script.py | -m package.module) [arguments of the script]",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("--every", metavar="N", help="log every N-th step (default: 100)")
    run.add_argument("--logdir", metavar="DIR", help="where the run goes (default: where the script's SummaryWriter "
                     "writes, or runs/NAME-TIME)")  # fmt: skip
    run.add_argument("--kinds", metavar="KIND,...", help="what is read: activation, gradient, weight, weight_gradient, "
                     "update (default: these), input, functional")  # fmt: skip
    run.add_argument("--include", metavar="GLOB,...", help="which modules, by their paths (default: all)")
    run.add_argument("--exclude", metavar="GLOB,...", help="which modules not")
    run.add_argument("--ranks", metavar="HOW", help="local: what the first rank saw (default); merge: what all ranks "
                     "saw, shards of parameters put together")  # fmt: skip
    run.add_argument("--rules", metavar="RULE,...", help="what is looked for, as tbhooks rules lists it, or none")
    return run


# What each option means. The names are looked up only if there are any: that loads NumPy, which is the script's to do.


def _every(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"every is a whole number of at least 1, not {text!r}")
    return int(text)


def _directory(text: str) -> str:
    remote.check(text)
    if not text.strip() or os.path.isfile(os.path.expanduser(text)):
        raise ArgumentError(f"logdir is a directory, not {text!r}")
    return text


def _listed(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ArgumentError(f"names with commas between them are wanted, not {text!r}")
    return words


def _kinds(text: str) -> tuple[str, ...]:
    from tbhooks.data.frame import ALL_KINDS  # noqa: PLC0415

    check_names("kind", _listed(text), ALL_KINDS)
    return _listed(text)


def _ranks(text: str) -> str:
    check_names("value of ranks", (text,), ("local", MERGE))
    return text


def _rules(text: str) -> tuple[str, ...]:
    from tbhooks.rules import RULES  # noqa: PLC0415

    if text == NO_RULES:
        return ()
    check_names("rule", _listed(text), ("default", *RULES))
    return _listed(text)


_MEANINGS: dict[str, Callable[[str], Any]] = {
    "every": _every, "logdir": _directory, "kinds": _kinds, "include": _listed, "exclude": _listed, "rules": _rules,
    "ranks": _ranks,
}  # fmt: skip
