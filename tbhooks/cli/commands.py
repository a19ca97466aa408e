"""The subcommands of `tbhooks`, each with its options beside it."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tbhooks
from tbhooks import rules, runs
from tbhooks.api import burst_file
from tbhooks.data.errors import check_integer
from tbhooks.data.process.remote import local
from tbhooks.drawing.text import printable
from tbhooks.runs import brief, compare, report_data
from tbhooks.runs.run import check_run, every_run, one_run
from tbhooks.views import report_html, report_text

# Exit codes: `check` found an issue; a command failed; as shells report them, Ctrl-C and a pipe that its reader closed.
FOUND, FAILED, INTERRUPTED, PIPE_CLOSED = 1, 2, 130, 141
# Smaller runs are read so fast that they need no progress line.
_PROGRESS_FROM_BYTES = 64 << 20

_EXAMPLES = """\
examples:
  tbhooks run train.py --lr 0.1           run an unmodified training script with monitoring
  tbhooks report runs/train-...           summarize the run layer by layer
  tbhooks check runs/train-...            print its findings; exit code 1 if there is an error
  tbhooks burst runs/train-... 20         log the next 20 steps of a training that is running
  tbhooks demo                            train a small CNN on handwritten digits

In a script: tbhooks.watch(model, writer, every=100)

exit codes: 0, or that of the script under "run"; 1 if "check" finds an issue of the --fail-on severity or a check of
"selftest" fails; 2 if an argument is wrong or a run cannot be read; 130 after Ctrl-C;
141 if the reader of the output has closed the pipe.
"""


def main(arguments: Sequence[str]) -> int:
    """Runs any subcommand but `run`, which `tbhooks.cli.main` handles. Returns the exit code."""
    options = parser().parse_args(arguments)
    code: int = options.verb(options)
    return code


def parser() -> argparse.ArgumentParser:
    """The parser of all subcommands. That of `run` is in `tbhooks.cli.run.options`. The docs show both."""
    parser = argparse.ArgumentParser(
        prog="tbhooks",
        description="Monitoring and diagnosis of PyTorch training, for TensorBoard.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tbhooks {tbhooks.__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    verbs.add_parser("run", help="run an unmodified training script with monitoring", add_help=False)
    _add_demo(verbs.add_parser("demo", help="train a small CNN on handwritten digits with monitoring"))
    _add_report(verbs.add_parser("report", help="summarize a run layer by layer, with its findings"))
    _add_check(verbs.add_parser("check", help="print findings; exit 1 if any reaches --fail-on"))
    _add_bench(verbs.add_parser("bench", help="measure the overhead of monitoring on this machine, with your model"))
    _add_selftest(verbs.add_parser("selftest", help="prove on this machine, with its GPU, what tbhooks promises"))
    _add_burst(verbs.add_parser("burst", help="have a training that is running log its next steps in full"))
    listing = verbs.add_parser("rules", help="list diagnostic rules")
    listing.set_defaults(verb=_rules)
    return parser


# --- demo ---------------------------------------------------------------------------------------------


def _add_demo(demo: argparse.ArgumentParser) -> None:
    demo.add_argument("--logdir", default="runs/digits", help="directory of the run (default: %(default)s)")
    demo.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    demo.add_argument("--every", type=int, default=10, help="log every Nth step (default: %(default)s)")
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
    report.add_argument("run", metavar="RUNDIR", help="directory of a run")
    report.add_argument("other", metavar="RUN2", nargs="?", help="a second run: show where the two first differ")
    report.add_argument("--compare", metavar="RUN2", help="same as the argument RUN2")
    report.add_argument("--html", metavar="FILE", help="write a self-contained HTML page with heat maps instead")
    report.add_argument("--json", action="store_true", help="print one JSON document")
    report.add_argument(
        "--brief", action="store_true", help="print at most 32 KB of JSON: issues ranked, what to try next"
    )
    report.add_argument("--all", action="store_true", help="show all rows of long tables")
    report.set_defaults(verb=_report)


def _report(options: argparse.Namespace) -> int:
    return _run_verb("report", lambda: _print_report(options))


def _print_report(options: argparse.Namespace) -> int:
    other = options.other or options.compare
    one_only = "--html" if options.html else "--brief" if options.brief else None
    if other is not None and (one_only or (options.other and options.compare)):
        raise tbhooks.ArgumentError(f"{one_only} takes one run" if one_only else "only two runs can be compared")
    run = one_run(options.run, _read)
    if options.html:
        _write_page(run, options.html)
        return 0
    if other is not None:
        comparison = compare.compare(run, one_run(other, _read))
        return _show(comparison.to_dict() if options.json else report_text.comparison_report(comparison))
    if options.brief:
        _print(brief.as_text(brief.brief(run)))
        return 0
    if options.json:
        return _show(report_data.document(run))
    return _show(report_text.run_report(run, _width(), all_rows=options.all))


def _write_page(run: runs.Run, file: str) -> None:
    Path(file).write_text(report_html.page(run), encoding="utf-8", errors="replace")
    size = Path(file).stat().st_size
    print(f"{printable(file)}: {size / 1e6:.1f} MB, self-contained")


def _show(report: dict[str, object] | list[report_text.Section]) -> int:
    if isinstance(report, dict):
        _print(report_data.as_json(report))
        return 0
    text = report_text.plain(report, _width(), whole_names=not sys.stdout.isatty())
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # rich is an extra
            text = report_text.styled(report, _width(), colour="NO_COLOR" not in os.environ)
    _print(text)
    return 0


def _width() -> int:
    return shutil.get_terminal_size((100, 24)).columns


def _print(text: str) -> None:
    """Prints text; characters that the terminal's encoding lacks become question marks. Ends the command if nobody
    reads any more.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.rstrip("\n").encode(encoding, errors="replace").decode(encoding), flush=True)
    except BrokenPipeError:  # as in `tbhooks report run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more when it ends
        raise SystemExit(PIPE_CLOSED) from None


# --- check --------------------------------------------------------------------------------------------


def _add_check(check: argparse.ArgumentParser) -> None:
    check.add_argument("run", metavar="RUNDIR", help="directory of a run, or one with runs below it")
    check.add_argument(
        "--fail-on", choices=report_data.SEVERITIES[::-1], default="error",
        help="lowest severity that makes the exit code 1 (default: %(default)s)",
    )  # fmt: skip
    check.set_defaults(verb=_check)


def _check(options: argparse.Namespace) -> int:
    return _run_verb("check", lambda: _print_findings(options))


def _print_findings(options: argparse.Namespace) -> int:
    checked = every_run(options.run, _read)
    counts = report_data.SEVERITIES[: report_data.SEVERITIES.index(options.fail_on) + 1]
    found = False
    for run in checked:
        name = "" if run.directory == Path(options.run) else f"{run.directory}: "
        for problem in run.problems:
            print(f"tbhooks check: {printable(name + problem)}", file=sys.stderr)
        for finding in report_data.by_severity(run):
            where = "" if finding.site is None else f" {finding.site}"
            line = f"{finding.severity}: step {finding.step}: {finding.rule}{where}: {finding.message}"
            _print(printable(name + line))
            found = found or finding.severity in counts
    return FOUND if found else 0


# --- burst --------------------------------------------------------------------------------------------


def _add_burst(burst: argparse.ArgumentParser) -> None:
    burst.add_argument("run", metavar="RUNDIR", help="directory of a run that is being written, on this machine")
    burst.add_argument("steps", metavar="N", nargs="?", type=int, default=20, help="how many (default: %(default)s)")
    burst.set_defaults(verb=_burst)


def _burst(options: argparse.Namespace) -> int:
    return _run_verb("burst", lambda: _ask_for_burst(options))


def _ask_for_burst(options: argparse.Namespace) -> int:
    steps, directory = check_integer("N", options.steps), local(options.run)
    check_run(directory)
    burst_file.ask(directory, steps)
    print(f"{printable(str(directory))}: the next {steps} steps will be logged in full, if the training is running")
    return 0


# --- rules --------------------------------------------------------------------------------------------


def _rules(_options: argparse.Namespace) -> int:
    for name, rule in rules.RULES.items():
        paragraph = (inspect.getdoc(rule) or "").partition("\n\n")[0]
        _print(f"{name}\n    {' '.join(paragraph.split())}")
        thresholds = getattr(rule, "thresholds", {})
        _print("    " + (", ".join(f"{key}={value!r}" for key, value in thresholds.items()) or "no thresholds"))
    return 0


# --- bench --------------------------------------------------------------------------------------------


def _add_bench(bench: argparse.ArgumentParser) -> None:
    bench.description = (
        "Trains a model with and without monitoring in turns, and reports the overhead. MODULE:FACTORY is a function, "
        "in this directory or installed, that returns (model, loss_function) with loss_function(model) -> loss, or "
        "(model, example_inputs): a tensor, a tuple, or a dict of keyword arguments. A factory with a parameter named "
        "device is called with the device."
    )
    bench.add_argument("--model", metavar="MODULE:FACTORY", help="the model to train (default: a small transformer)")
    bench.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: %(default)s)")
    bench.add_argument("--every", type=int, default=100, metavar="N", help="log every Nth step (default: %(default)s)")
    bench.add_argument("--steps", type=int, metavar="N", help="timed steps per variant (default: a minute's worth)")
    bench.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch (default: torch's own)")
    bench.add_argument("--json", metavar="FILE", help="also write the numbers to this file")
    bench.set_defaults(verb=_bench)


def _bench(options: argparse.Namespace) -> int:
    try:
        return _run_verb("bench", lambda: _print_measurement(options))
    except KeyboardInterrupt:
        print("\ntbhooks bench: stopped", file=sys.stderr)
        return INTERRUPTED


def _print_measurement(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415  the other commands do without

    from tbhooks.cli import bench  # noqa: PLC0415

    if options.threads is not None:
        torch.set_num_threads(check_integer("threads", options.threads))
    for name in ("every", "steps"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name))
    workload = bench.load(options.model, bench.device_named(options.device))
    result = bench.measure(workload, options.every, options.steps, _log, _show_rounds)
    if options.json:
        Path(options.json).write_text(report_data.as_json(result.to_dict()) + "\n", encoding="utf-8")
    _print(bench.text(result))
    return 0


def _log(message: str) -> None:
    print(f"tbhooks bench: {message}", file=sys.stderr, flush=True)


def _show_rounds(done: int, total: int) -> None:
    if sys.stderr.isatty():
        line = f"\rround {done} of {total}" if done < total else "\r\x1b[K"
        print(line, end="", file=sys.stderr, flush=True)


# --- selftest -----------------------------------------------------------------------------------------


def _add_selftest(selftest: argparse.ArgumentParser) -> None:
    selftest.description = (
        "Runs twelve checks on this machine: kernels, waits, copies, numbers, bits, speed, torch.compile, several "
        "devices and processes, full memory. Prints a table and one line to paste into an issue. The exit code is 1 "
        "if a check fails."
    )
    selftest.add_argument("--device", default="", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    selftest.add_argument("--quick", action="store_true", help="fewer and smaller tensors; about a minute")
    selftest.add_argument("--json", metavar="FILE", help="also write the results to this file")
    selftest.set_defaults(verb=_selftest)


def _selftest(options: argparse.Namespace) -> int:
    try:
        return _run_verb("selftest", lambda: _print_selftest(options))
    except KeyboardInterrupt:
        print("\ntbhooks selftest: stopped", file=sys.stderr)
        return INTERRUPTED


def _print_selftest(options: argparse.Namespace) -> int:
    import torch  # noqa: PLC0415  the other commands do without

    from tbhooks.cli import bench, selftest  # noqa: PLC0415

    device = bench.device_named(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    started = time.monotonic()

    def log(what: str) -> None:
        print(f"tbhooks selftest: {time.monotonic() - started:5.1f} s, {what}", file=sys.stderr, flush=True)

    report = selftest.run(device, options.quick, log)
    if options.json:
        Path(options.json).write_text(report_data.as_json(report.to_dict()) + "\n", encoding="utf-8")
    _print(selftest.text(report, shutil.get_terminal_size((120, 24)).columns))
    _print(selftest.line(report))
    return FOUND if report.failed else 0


# --- Shared -------------------------------------------------------------------------------------------


def _run_verb(verb: str, work: Callable[[], int]) -> int:
    """Runs a command and returns its exit code. A wrong argument is one line on stderr; a closed pipe is no error."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, tbhooks.TbhooksError) as problem:
        print(f"tbhooks {verb}: {printable(str(problem))}", file=sys.stderr)
        return FAILED


def _read(directory: Path) -> runs.Run:
    if not sys.stderr.isatty():
        return runs.read(directory)
    run = runs.read(directory, _progress)
    print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    return run


def _progress(done: int, total: int) -> None:
    percent, before = (100 * x // max(total, 1) for x in (done, done - (1 << 20)))
    if total > _PROGRESS_FROM_BYTES and percent != before:
        print(f"\rreading: {percent} % of {total / 1e6:.0f} MB", end="", file=sys.stderr, flush=True)
