"""The command line of `tbhooks run`: which words are ours and which the script's, and what ours mean.

Everything is checked before the script starts, and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tbhooks import rules
from tbhooks.errors import ArgumentError, check_names
from tbhooks.frame import ALL_KINDS, KINDS

EVERY = 100
NO_RULES = "none"
# Options without a value; every other one of ours has one.
_FLAGS = ("-h", "--help")
# Each can be said by a variable of the environment too: TBHOOKS_EVERY and so on. The command line wins.
NAMES = ("every", "logdir", "kinds", "include", "exclude", "rules")


@dataclass(frozen=True)
class Target:
    """What is to be run: a file, a directory or an archive as `path`, or a `module`; and its own arguments."""

    path: str | None
    module: str | None
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Options:
    """How models are watched, as `watch` takes it."""

    every: int
    logdir: str | None
    kinds: tuple[str, ...]
    include: tuple[str, ...] | None
    exclude: tuple[str, ...] | None
    rules: tuple[str, ...]


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


def understood(given: Mapping[str, str | None], environment: Mapping[str, str]) -> Options:
    """What was asked for, by option or by variable; raises `ArgumentError` for what cannot be."""

    def said(name: str) -> str | None:
        value = given.get(name)
        return environment.get(f"TBHOOKS_{name.upper()}") or None if value is None else value

    return Options(
        every=_whole_number(said("every")),
        logdir=said("logdir"),
        kinds=_kinds(said("kinds")),
        include=_listed("include", said("include")),
        exclude=_listed("exclude", said("exclude")),
        rules=_rules(said("rules")),
    )


def _whole_number(text: str | None) -> int:
    if text is None:
        return EVERY
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentError(f"every is a whole number of at least 1, not {text!r}")
    return int(text)


def _listed(name: str, text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    words = tuple(word.strip() for word in text.split(",") if word.strip())
    if not words:
        raise ArgumentError(f"{name} takes names with commas between them, not {text!r}")
    return words


def _kinds(text: str | None) -> tuple[str, ...]:
    kinds = _listed("kinds", text) or KINDS
    check_names("kind", kinds, ALL_KINDS)
    return tuple(kinds)


def _rules(text: str | None) -> tuple[str, ...]:
    names = _listed("rules", text) or ("default",)
    if names == (NO_RULES,):
        return ()
    check_names("rule", names, ("default", NO_RULES, *rules.RULES))
    if NO_RULES in names:
        raise ArgumentError(f"rules: {NO_RULES!r} stands alone")
    return names
