"""`Watch`, the handle that `watch()` returns: the public methods, which delegate to the parts of the watch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from tbhooks.api import validation
from tbhooks.api.extras import Extras
from tbhooks.api.finding_actions import FindingActions
from tbhooks.api.flights import Flights
from tbhooks.api.lifecycle import Lifecycle
from tbhooks.capture.compile.dynamo import dynamo_disable
from tbhooks.capture.session import CaptureSession
from tbhooks.collectors import channels, embeddings, images
from tbhooks.data.artifacts.flights import Flight
from tbhooks.data.display import LiveView, display, mimebundle
from tbhooks.data.errors import check_integer
from tbhooks.data.findings import Findings
from tbhooks.data.frame import Finding, Frame
from tbhooks.data.history import History
from tbhooks.data.self_report import Stats
from tbhooks.delivery.worker import DEADLINE_S, Follower, FollowerSink, Worker
from tbhooks.drawing.model_table import Summary
from tbhooks.sinks import Sink

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Watch:
    """A watch on a model, returned by `watch()`.

    It is a context manager that closes itself. Every method can be called in the middle of training. After `close()`
    the results stay readable (`findings`, `history`, `latest`, `stats`); all other methods raise a `ClosedError`.

    Methods that return the watch can be chained: `tbhooks.watch(model, "runs/").graph().images()`.
    """

    def __init__(
        self, session: CaptureSession, worker: Worker, lifecycle: Lifecycle, actions: FindingActions, history: History,
        kinds: tuple[str, ...], make_sinks: Callable[[Any], tuple[Sink, ...]],
    ) -> None:  # fmt: skip
        self._session = session
        self._worker = worker
        self._lifecycle = lifecycle
        self._report = lifecycle.report
        self._actions = actions
        self._history = history
        self._kinds = kinds
        self._unchecked_extras = Extras(session, worker, lifecycle, kinds, make_sinks)
        self._flights = Flights(session, worker, lifecycle, actions)

    @property
    def _extras(self) -> Extras:
        """Does the work of most methods. Raises a `ClosedError` after `close()`."""
        self._lifecycle.check_open()
        return self._unchecked_extras

    # Training.

    @dynamo_disable
    def step(self, n: int | None = None) -> None:
        """Ends the current step.

        `n` is the label of the step that ends; without it the watch counts. After the first call only calls of
        `step()` end steps. Raises a `FindingError` if `on_finding("raise")` was asked for and a rule found something.
        """
        self._lifecycle.check_open()
        label = None if n is None else check_integer("n", n, least=0)
        if self._lifecycle.is_active:
            self._session.step(label)
            self._actions.raise_if_asked()

    @dynamo_disable
    def log(self, values: Mapping[str, Tensor | float]) -> None:
        """Logs scalars with the current step, as `train/<name>`, or under their own tag if the name has a slash.

        `values` are numbers or one-element tensors by name. Tensors stay on their device until the copy of the step:
        there is no `.item()` and no synchronization. Call it anywhere in the step, or right after the step has ended.
        Values of steps that are not logged are discarded, unless `log_every` was called.
        Example: `w.log({"loss": loss, "eval/accuracy": 0.9})`.
        """
        self._lifecycle.check_open()
        numbers = {validation.tag(name): validation.number(name, value) for name, value in validation.items(values)}
        if self._lifecycle.is_active:
            self._session.log(numbers)

    @dynamo_disable
    def samples(self, values: Any, ids: Any = None, group: Any = None, most: int = 16) -> None:
        """Shows which samples of a logged step have the largest values, and the mean of each group.

        Args:
            values: one number per sample, or per token of each sample: usually losses before they are averaged.
                A tensor stays on its device: there is no copy and no synchronization but the one of the step.
            ids: what the samples are called: integers in a tensor, or a list of integers or strings. Values with more
                dimensions than the ids have several per sample. Without ids, samples are numbered within the step.
            group: the group of each sample, such as its data source, as `ids`; or one string for all. The first 64
                groups have their own mean.
            most: how many samples are kept of a step.

        `frame.samples` has them, the largest value first; TensorBoard shows a table in the TEXT tab and the means of
        the groups as scalars `train.loss_by/<group>`. Call it once for each batch, before the optimizer's step or
        right after it. Several calls in a step, as with accumulated gradients, are merged, and so are ranks.
        Raises an `ArgumentError` if lengths do not fit together.

        """
        self._lifecycle.check_open()
        call = validation.samples(values, ids, group, most)
        if self._lifecycle.is_active:
            self._session.log({}, call)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is captured. Steps are still counted.

        All hooks are removed from the model, except those that are part of compiled code, which do nothing.
        """
        self._lifecycle.check_open()
        self._session.pause()
        try:
            yield
        finally:
            if self._lifecycle.is_active:
                self._session.resume()

    # What is captured in addition.

    def evaluation(self, writer: Any = None) -> Self:
        """Captures evaluation passes too: all passes between two training passes become one logged step.

        They are written to `writer` (anything that `watch` takes), or without one to the writer of training, with
        kinds such as `eval.activation`. Raises an `ArgumentError` if the kinds of this watch do not occur in
        evaluation, or if `writer` is where the watch writes already.
        """
        self._extras.evaluation(writer)
        return self

    def log_every(self, n: int) -> Self:
        """Writes the values given to `log` as running means, every `n` steps, independent of `every`.

        Values are accumulated on their device at every step and in every micro-batch. Values logged in an evaluation
        (as `eval/...`, or while the model is in evaluation mode) are averaged over it, and written when training goes
        on. With `ranks="merge"` the means of logged steps are over all ranks, the others over the first rank.
        """
        self._extras.log_every(n)
        return self

    def progress(self, *parts: str) -> Self:
        """Adds training metrics to every written step: logged steps and those of `log_every`.

        `parts` are "optimizer" (learning rate, weight decay, momentum and betas of each parameter group), "speed"
        (seconds per step, samples and tokens per second) and "memory" (its peak); all three by default. Speed is
        measured between written steps by the clock of the host, without evaluations. The number of samples is the
        length of the model's first tensor argument, the number of tokens the size of its first integer tensor.
        """
        self._extras.progress(parts)
        return self

    def graph(self) -> Self:
        """Writes the graph of the model to TensorBoard's GRAPHS tab, traced in the next logged pass with its inputs.

        Modules are nested by their path. Edges are the tensors that were passed. Evaluation passes have a graph of
        their own if `evaluation()` was called. Afterwards no hook of the tracer is left on the model.
        """
        self._extras.graph()
        return self

    def summary(self) -> Summary:
        """Returns the layers of the model as a table: class, output shape, dtype, parameters. Print it, or show it.

        Output shapes are those of the first logged pass, and empty before it. The next logged pass also writes the
        table to TensorBoard's TEXT tab.
        """
        return self._extras.summary()

    def images(self, pattern: Any = None, *, every: int | None = None, most_bytes: int = images.MOST_BYTES) -> Self:
        """Writes outputs and convolution filters as images, to TensorBoard's IMAGES tab.

        `pattern` selects modules, as `include` of `watch` does; by default the input batch and the first convolution.
        Filters are shown of convolutions over 1 or 3 channels. Images are taken in each of the first 10 logged steps,
        then half as often with every doubling, or every `every` logged steps. At most `most_bytes` are copied in a
        step; `stats.unseen` lists what was skipped.
        """
        self._extras.images(pattern, every, most_bytes)
        return self

    def per_channel(self, pattern: Any, *, kinds: Sequence[str] = channels.KINDS, histograms: bool = False) -> Self:
        """Captures statistics of single channels: output channels of convolutions, linear layers and norms, kernels of
        their weights, attention heads.

        `pattern` selects modules, as `include` of `watch` does. TensorBoard's TBHOOKS tab shows maps of channels by
        steps; `runs.read(...).channels` returns them. `histograms=True` adds histograms of the first 64 channels of a
        layer, with tags such as `activation/conv1[3]`, on steps that have histograms.
        """
        self._extras.per_channel(pattern, kinds, histograms)
        return self

    def metric(
        self, name: str, function: Callable[[Tensor], Any] | None = None, pattern: Any = None,
        kind: str = "activation", reduce: str = "mean",
    ) -> Self:  # fmt: skip
        """Computes a number of your own, or up to 64, from tensors of logged steps.

        Args:
            name: the name of the metric. Its tags are `metric.<name>/<site>`, with `[i]` behind it for several numbers.
            function: from a tensor to a number, or to a 1-d tensor of up to 64. It is called with the detached tensor,
                without gradients and outside of autocast; what it returns stays on the device until the step's copy.
                `tbhooks.metrics` has ready ones, which are also found by their name alone; `"write_ratio"` is how much
                a module changes its first input (`activation.write_ratio/<site>`).
            pattern: selects modules, as `include` of `watch` does; a glob may also name taps ("*:scores") and
                parameters. All sites of the kind by default.
            kind: "activation", "gradient", "input", "weight" or "weight_gradient".
            reduce: how several calls in a step, and several ranks, become one number: "mean", "sum", "max" or "min".

        A function that raises, returns something else, changes its tensor, draws random numbers or waits for the device
        is reported and switched off; training goes on. Raises an `ArgumentError` for wrong arguments.
        Example: `w.metric("logsumexp", tbhooks.metrics.logsumexp, "lm_head")`.

        """
        self._extras.metric(name, function, pattern, kind, reduce)
        return self

    def optimizer_state(self) -> Self:
        """Captures the moments of optimizers and what follows from them: docs/optimizers.md. Call it on all ranks."""
        self._extras.optimizer_state()
        return self

    def noise_scale(self) -> Self:
        """Estimates `train.noise_scale` and `train.critical_batch`, in samples, at logged steps: docs/optimizers.md."""
        self._extras.noise_scale()
        return self

    def experts(self, pattern: Any = None, top_k: int | None = None) -> Self:
        """Counts the tokens that routers of a mixture of experts send to each expert: docs/large-models.md."""
        self._extras.experts(pattern, top_k)
        return self

    def embeddings(
        self, pattern: Any, labels: Any = None, thumbnails: Any = None, every: int | None = None,
        most: int = embeddings.MOST,
    ) -> Self:  # fmt: skip
        """Writes the outputs of layers as points, one per sample, to TensorBoard's PROJECTOR tab.

        `pattern` selects modules, as `include` of `watch` does. `labels` and `thumbnails` (images of 1 or 3 channels)
        belong to the samples of a batch: a function without arguments that returns those of the current batch, the
        name of an argument of the model's forward, or a tensor or list if the batch is always the same. Outputs with
        positions are averaged over them. At most 256 samples of a logged step are taken, and at most `most` between
        two written entries. Entries are written at the logged steps 0, 1, 2, 4, 8 and so on, or every `every` logged
        steps, up to 20 per layer. Needs a local directory.
        """
        self._extras.embeddings(pattern, labels, thumbnails, every, most)
        return self

    def hparams(self, values: dict[str, Any], metrics: Sequence[str] = ()) -> Self:
        """Writes hyperparameters, so that TensorBoard's HPARAMS tab compares this run with others.

        `values` may be nested: keys are joined with dots. Values other than strings, numbers and bools become strings.
        `metrics` are tags such as `train/loss`, `eval/accuracy` or `gradient.norm/fc`; the tab shows their last
        values. Whether the run failed is written when the watch closes. Raises an `ArgumentError` if called twice.
        """
        self._extras.hparams(values, metrics)
        return self

    def environment(self) -> Self:
        """Writes a description of the run to the TEXT tab: versions, devices, dtypes, model size, options of the watch.

        It contains no user or host names, no paths and no environment variables.
        """
        self._extras.environment()
        return self

    def checksums(self) -> Self:
        """Adds to every site of a logged step a 64-bit checksum of the tensor's bits: `frame[path, kind].checksum`.

        `tbhooks report a b` then names the first logged step and tensor in which two runs differ in a bit, and with
        `ranks="merge"` the rule `replica_drift` compares the copies on all ranks. Every tensor is read once more.
        """
        self._extras.checksums()
        return self

    def profile(self, steps: tuple[int, int]) -> Self:
        """Writes a trace of torch's profiler for the steps from the first to the last of `steps`, both included.

        The file is `tbhooks-profile/steps-<first>-<last>.pt.trace.json.gz` in the run's directory. In it, everything
        that tbhooks does is named `tbhooks::...`. Raises an `ArgumentError` if the first step is over, or if the watch
        does not write to a local directory.
        """
        self._extras.profile(steps)
        return self

    @dynamo_disable
    def burst(self, n: int) -> None:
        """Logs the next `n` steps in full, with histograms, whatever `every` is.

        Call it between two steps. In the middle of a step the burst begins with the next one. `tbhooks burst DIR n`
        does the same from another terminal. With `ranks="merge"` these steps are those of the first rank, unless they
        are logged anyway.
        """
        self._lifecycle.check_open()
        steps = check_integer("n", n)
        if self._lifecycle.is_writing:
            self._session.burst(steps)

    def flight_recorder(
        self, steps: int = 256, *, detail: str = "parameters", on_signal: bool = False, burst: int = 20
    ) -> Self:
        """Keeps a few numbers of each of the last `steps` steps on the device, and writes them when something happens.

        A row has the numbers given to `log`, the norm of every parameter's gradient, learning rates and loss scale:
        one foreach call a step, no copy, no synchronization. It is copied to the host once (a dump) when a rule finds
        a warning or an error, when the loss or the gradient norm of any step is not finite or leaves its recent range
        (known at the next logged step), when an exception or SIGTERM ends the training, by `dump()`, and at SIGUSR1
        with `on_signal=True`. After a dump that nobody asked for the next `burst` steps are logged in full.

        `detail="global"` keeps only the norm of all gradients together. A run has at most 16 dumps and 64 MB of them:
        `flights` here, and in `runs.read(...)`. Raises an `ArgumentError` if it is called twice.
        """
        self._lifecycle.check_open()
        self._flights.start(steps, detail, on_signal, burst)
        return self

    @dynamo_disable
    def dump(self, reason: str) -> None:
        """Writes the last steps of the flight recorder now, with this reason; for another thread when the step ends.

        Raises an `ArgumentError` without `flight_recorder()`.
        """
        self._lifecycle.check_open()
        self._flights.dump(reason)

    @property
    def flights(self) -> list[Flight]:
        """The dumps of the flight recorder so far, oldest first. Waits as `history` does."""
        self._lifecycle.catch_up()
        return list(self._flights.dumps)

    # Findings.

    def on_finding(self, reaction: Callable[[Finding], Any] | str) -> Self:
        """Sets what happens when a rule finds a problem. Can be called several times.

        `reaction` is a function that is called with each new `Finding`, from the background thread; or "raise", for a
        `FindingError` at the end of the next step; or "stop", to set `should_stop`; or "burst", to log the next 20
        steps in full, up to 16 times. The last three react to warnings and errors, not to findings of severity "info".
        """
        self._lifecycle.check_open()
        self._actions.on_finding(reaction)
        return self

    def on_nonfinite(self, reaction: str) -> Self:
        """Checks all gradients before every optimizer step, which waits for the device.

        If a gradient is not finite, "replay" runs the step again to find the module where the first NaN or infinity
        appears, and "raise" raises a `FindingError` before weights are changed. Both can be set. The inputs of a step
        are kept in memory until it ends.
        """
        self._lifecycle.check_open()
        self._actions.on_nonfinite(reaction)
        if self._lifecycle.is_active:
            self._session.check_gradients()
        return self

    @property
    def should_stop(self) -> bool:
        """Whether a rule found a warning or an error, after `on_finding("stop")`."""
        return self._actions.should_stop

    # Results.

    @property
    def latest(self) -> Frame | None:
        """The newest logged step, or None. Waits for the background thread, as `history` does."""
        return self.history.latest

    @property
    def history(self) -> History:
        """The last logged steps, up to 1000. Waits until the steps that have ended are in it."""
        self._lifecycle.catch_up()
        return self._history

    @property
    def findings(self) -> Findings:
        """What the rules found so far, oldest first, one `Finding` for each rule and site. Waits as `history` does."""
        self._lifecycle.catch_up()
        return self._actions.findings

    @property
    def stats(self) -> Stats:
        """What the watch reports about itself: skipped modules, errors, dropped steps, time spent. Does not wait."""
        return self._unchecked_extras.stats()

    def live(self, kind: str = "activation", stat: str = "std", *, interactive: bool | None = None) -> LiveView:
        """Shows a view in a notebook cell that follows training: a heat map of layers by steps, the loss, findings.

        It is drawn in the background, at most twice a second. `interactive=True` adds controls and needs
        `tbhooks[jupyter]`; None uses them if they are installed. Returns the view.
        """
        self._lifecycle.check_open()
        return display(  # type: ignore[no-any-return]
            "live", self, kind, stat, interactive, history=self._history, report=self._report, kinds=self._kinds,
            findings=lambda: self._actions.findings, stats=lambda: self.stats, follow=self._follow,
            settle=self._lifecycle.catch_up,
        )  # fmt: skip

    def _follow(self, follower: Follower) -> None:
        if not self._lifecycle.is_closed:
            self._worker.add(FollowerSink(follower, self._report))

    def heatmap(self, kind: str = "activation", stat: str = "std", width: float = 7.0) -> Figure:
        """Returns a matplotlib figure of one statistic, layers by steps, `width` inches wide. Needs `tbhooks[plot]`."""
        return self.history.figure(stat, kind, width)

    # The end.

    def flush(self, timeout_s: float = DEADLINE_S) -> None:
        """Waits until every step that has ended is written and durable, at most `timeout_s` seconds."""
        self._lifecycle.check_open()
        self._lifecycle.flush(timeout_s)

    def close(self, timeout_s: float = DEADLINE_S) -> None:
        """Writes what was captured, removes all hooks and closes the sinks. Can be called again.

        Logged steps that are not written within `timeout_s` seconds are dropped and counted in `stats.dropped`.
        """
        self._lifecycle.close(timeout_s)

    def __enter__(self) -> Self:
        self._lifecycle.check_open()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        life, session = self._lifecycle, self._session
        state = "closed" if life.is_closed else f"step {session.clock.count}" if life.is_active else "idle"
        return f"<Watch: {state}, {session.logged} steps logged, {len(self._actions.findings)} findings>"

    _repr_mimebundle_ = mimebundle("watch")


def lifecycle_of(watch: Watch) -> Lifecycle:
    """The part of a watch that other layers of tbhooks may use. Not part of the public API."""
    return watch._lifecycle  # noqa: SLF001  the one way in, so that users see only the public methods
