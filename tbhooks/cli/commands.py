"""The `tbhooks` command: one function a verb, its options beside it."""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import tbhooks
from tbhooks import rules, runs
from tbhooks.cli import run as running
from tbhooks.data.errors import check_integer
from tbhooks.drawing.text import printable
from tbhooks.runs import compare, report_data
from tbhooks.runs.run import every_run, one_run
from tbhooks.views import report_html, report_text

# Exit codes of `check`, and of anything that cannot do what it was asked.
FOUND, UNREADABLE = 1, 2
# What shells make of Ctrl-C.
INTERRUPTED = 130
# A run that is read in a moment needs no progress line.
_WORTH_A_LINE = 64 << 20

_EXAMPLES = """\
examples:
  tbhooks run train.py --lr 0.1           a training script as it is, watched
  tbhooks report runs/train-...           what its run looks like, layer by layer
  tbhooks check runs/train-...            what is wrong with it, for scripts: exit code 1 if there is an error
  tbhooks demo                            a small CNN on handwritten digits

In a script: tbhooks.watch(model, writer, every=100)

exit codes: 0, or what the script of "run" exits with; 1 if "check" finds something that counts; 2 if what was
asked for cannot be done; 130 after Ctrl-C.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="tbhooks",
        description="See what is happening inside a PyTorch model.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tbhooks {tbhooks.__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    verbs.add_parser("run", help="run a training script as it is, watched", add_help=False)
    _add_demo(verbs.add_parser("demo", help="train a small CNN on handwritten digits, watched"))
    _add_report(verbs.add_parser("report", help="what a run looks like, layer by layer, and what is wrong with it"))
    _add_check(verbs.add_parser("check", help="one line a finding; exit code 1 if there is one that counts"))
    _add_bench(verbs.add_parser("bench", help="what watching costs on this machine, with your model"))
    listing = verbs.add_parser("rules", help="what is looked for in a run")
    listing.set_defaults(verb=_rules)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["run"]:
        return running.main(words[1:])
    options = parser.parse_args(words)
    code: int = options.verb(options)
    return code


# --- demo ---------------------------------------------------------------------------------------------


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--logdir", default="runs/digits", help="where the run goes (default: %(default)s)")
    demo.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    demo.add_argument("--every", type=int, default=10, help="log every N-th step (default: %(default)s)")
    demo.set_defaults(verb=_demo)


def _demo(options: argparse.Namespace) -> int:
    from tbhooks.cli import demo  # noqa: PLC0415  needs scikit-learn

    try:
        demo.run(options.logdir, options.steps, options.every)
    except (ImportError, tbhooks.TbhooksError) as problem:
        print(f"tbhooks demo: {problem}", file=sys.stderr)
        return 1
    return 0


# --- report -------------------------------------------------------------------------------------------


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("run", metavar="RUNDIR", help="the directory of a run")
    report.add_argument("other", metavar="RUN2", nargs="?", help="a second run: shows where the two part")
    report.add_argument("--compare", metavar="RUN2", help="the same as a second RUNDIR")
    report.add_argument("--html", metavar="FILE", help="write one self-contained page with heat maps instead")
    report.add_argument("--json", action="store_true", help="print one JSON document for machines")
    report.add_argument("--all", action="store_true", help="every layer of a long table")
    report.set_defaults(verb=_report)


def _report(options: argparse.Namespace) -> int:
    return _with_runs("report", lambda: _told(options))


def _told(options: argparse.Namespace) -> int:
    other = options.other or options.compare
    if other is not None and (options.html or (options.other and options.compare)):
        raise tbhooks.ArgumentError("--html shows one run" if options.html else "two runs are compared, not three")
    run = one_run(options.run, _read)
    if options.html:
        _write_page(run, options.html)
        return 0
    if other is not None:
        comparison = compare.compare(run, one_run(other, _read))
        return _say(comparison.to_dict() if options.json else report_text.comparison_report(comparison))
    if options.json:
        return _say(report_data.document(run))
    return _say(report_text.run_report(run, _width(), all_rows=options.all))


def _write_page(run: runs.Run, file: str) -> None:
    Path(file).write_text(report_html.page(run), encoding="utf-8", errors="replace")
    size = Path(file).stat().st_size
    print(f"{printable(file)}: {size / 1e6:.1f} MB, no script, nothing from the network")


def _say(told: dict[str, object] | list[report_text.Section]) -> int:
    _print(report_data.as_json(told) if isinstance(told, dict) else _laid_out(told))
    return 0


def _laid_out(sections: list[report_text.Section]) -> str:
    if sys.stdout.isatty():
        try:
            return report_text.styled(sections, _width(), colour="NO_COLOR" not in os.environ)
        except ImportError:  # rich is an extra
            pass
    return report_text.plain(sections, _width(), whole_names=not sys.stdout.isatty())


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _print(text: str) -> None:
    """Whatever the terminal's encoding: bars it does not have become question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.rstrip("\n").encode(encoding, errors="replace").decode(encoding))


# --- check --------------------------------------------------------------------------------------------


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("run", metavar="RUNDIR", help="the directory of a run, or one with runs below it")
    check.add_argument(
        "--fail-on", choices=report_data.SEVERITIES[::-1], default="error",
        help="the least severity that makes the exit code 1 (default: %(default)s)",
    )  # fmt: skip
    check.set_defaults(verb=_check)


def _check(options: argparse.Namespace) -> int:
    return _with_runs("check", lambda: _judged(options))


def _judged(options: argparse.Namespace) -> int:
    checked = every_run(options.run, _read)
    counts = report_data.SEVERITIES[: report_data.SEVERITIES.index(options.fail_on) + 1]
    found = False
    for run in checked:
        name = "" if run.directory == Path(options.run) else f"{run.directory}: "
        for problem in run.problems:
            print(f"tbhooks check: {printable(name + problem)}", file=sys.stderr)
        for finding in report_data.by_severity(run):
            where = "" if finding.site is None else f" {finding.site}"
            told = f"{finding.severity}: step {finding.step}: {finding.rule}{where}: {finding.message}"
            _print(printable(name + told))
            found = found or finding.severity in counts
    return FOUND if found else 0


# --- rules --------------------------------------------------------------------------------------------


def _rules(_options: argparse.Namespace) -> int:
    for name, rule in rules.RULES.items():
        paragraph = (inspect.getdoc(rule) or "").partition("\n\n")[0]
        _print(f"{name}\n    {' '.join(paragraph.split())}")
    return 0


# --- bench --------------------------------------------------------------------------------------------


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.description = (
        "Trains copies of a model side by side, bare and watched, and says what watching costs. MODULE:FACTORY is a "
        "function of yours, from this directory or installed, that returns (model, loss_function) with "
        "loss_function(model) -> loss, or (model, example_inputs): a tensor, a tuple, or a dict of keyword arguments. "
        "A factory with a parameter named device is given the device."
    )
    bench.add_argument("--model", metavar="MODULE:FACTORY", help="what to train (default: a small transformer)")
    bench.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    bench.add_argument("--every", type=int, default=100, metavar="N", help="the every of watch (default: %(default)s)")
    bench.add_argument("--steps", type=int, metavar="N", help="timed steps of each way (default: what fits a minute)")
    bench.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of torch (default: as many as torch takes)"
    )
    bench.add_argument("--json", metavar="FILE", help="write the numbers there too")
    bench.set_defaults(verb=_bench)


def _bench(options: argparse.Namespace) -> int:
    try:
        return _with_runs("bench", lambda: _measured(options))
    except KeyboardInterrupt:
        print("\ntbhooks bench: stopped", file=sys.stderr)
        return INTERRUPTED


def _measured(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415  the other commands do without

    from tbhooks.cli import bench  # noqa: PLC0415

    if options.threads is not None:
        torch.set_num_threads(check_integer("threads", options.threads))
    for name in ("every", "steps"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name))
    workload = bench.load(options.model, bench.device_named(options.device))
    result = bench.measure(workload, options.every, options.steps, _tell, _rounds_done)
    if options.json:
        Path(options.json).write_text(report_data.as_json(result.to_dict()) + "\n", encoding="utf-8")
    _print(bench.text(result))
    return 0


def _tell(message: str) -> None:
    print(f"tbhooks bench: {message}", file=sys.stderr, flush=True)


def _rounds_done(done: int, total: int) -> None:
    if sys.stderr.isatty():
        line = f"\rround {done} of {total}" if done < total else "\r\x1b[K"
        print(line, end="", file=sys.stderr, flush=True)


# --- What they share ----------------------------------------------------------------------------------


def _with_runs(verb: str, work: Callable[[], int]) -> int:
    """What is wrong with an argument is said in a line, and a reader that went away is no error."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, tbhooks.TbhooksError) as problem:
        print(f"tbhooks {verb}: {printable(str(problem))}", file=sys.stderr)
        return UNREADABLE


def _read(directory: Path) -> runs.Run:
    if not sys.stderr.isatty():
        return runs.read(directory)
    run = runs.read(directory, _progress)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return run


def _progress(done: int, total: int) -> None:
    percent, before = (100 * x // max(total, 1) for x in (done, done - (1 << 20)))
    if total > _WORTH_A_LINE and percent != before:
        print(f"\rreading: {percent} % of {total / 1e6:.0f} MB", end="", file=sys.stderr, flush=True)
