"""The reference of the command line, made from the parsers of the commands."""

from __future__ import annotations

import argparse

from tbhooks.cli import commands
from tbhooks.cli.run import options


def reference() -> str:
    """One section of Markdown for each command."""
    main = commands.parser()
    verbs = next(action for action in main._actions if isinstance(action, argparse._SubParsersAction))
    helps = {action.dest: action.help or "" for action in verbs._choices_actions}
    parsers = {**verbs.choices, "run": options.parser()}
    return "\n\n".join(_section(name, helps[name], parsers[name]) for name in verbs.choices)


def _section(name: str, said: str, parser: argparse.ArgumentParser) -> str:
    description = " ".join((parser.description or "").split())
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    parts = [f"## tbhooks {name}", f"{said[0].upper()}{said[1:]}.", f"```text\n{usage}\n```"]
    parts += [description] if description else []
    rows = [_row(action, parser) for action in parser._actions if "--help" not in action.option_strings]
    if rows:
        parts.append("\n".join(["| argument | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    words = [f"`{word}`" for word in action.option_strings] or [f"`{action.metavar or action.dest}`"]
    if action.option_strings and action.nargs != 0:
        words[-1] = f"`{action.option_strings[-1]} {_metavar(action)}`"
    said = (action.help or "") % {**vars(action), "prog": parser.prog}
    return f"| {', '.join(words)} | {said} |".replace("{", "\\{")


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None:
        return " or ".join(map(str, action.choices))
    return str(action.metavar or action.dest.upper())
