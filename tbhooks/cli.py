"""The `tbhooks` command: one function a verb, its options beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tbhooks


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tbhooks",
        description="See what is happening inside a PyTorch model.",
        epilog="In a script: tbhooks.watch(model, writer, every=100)",
    )
    parser.add_argument("--version", action="version", version=f"tbhooks {tbhooks.__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    demo = verbs.add_parser("demo", help="train a small CNN on handwritten digits, watched")
    demo.add_argument("--logdir", default="runs/digits", help="where the run goes (default: %(default)s)")
    demo.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    demo.add_argument("--every", type=int, default=10, help="log every N-th step (default: %(default)s)")
    demo.set_defaults(verb=_demo)
    options = parser.parse_args(arguments)
    code: int = options.verb(options)
    return code


def _demo(options: argparse.Namespace) -> int:
    from tbhooks import demo  # noqa: PLC0415  needs scikit-learn

    try:
        demo.run(options.logdir, options.steps, options.every)
    except (ImportError, tbhooks.TbhooksError) as problem:
        print(f"tbhooks demo: {problem}", file=sys.stderr)
        return 1
    return 0
