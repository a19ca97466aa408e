"""The norm of all gradients, before and after clipping: which there are, what they cost, where they are seen."""

from __future__ import annotations

import json
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import SGD
from torch.utils.tensorboard import SummaryWriter

import tbhooks
from tbhooks.capture.recording.recorder import Recorder
from tests.support import zoo
from tests.support.loops import forward, mlp, sgd
from tests.support.reference import gradient_norm
from tests.support.script_host import ScriptHost

NAN, INF = float("nan"), float("inf")
USED, RAW = "train.grad_norm", "train.grad_norm_raw"


def leave(_model: nn.Module) -> None:
    pass


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.25


def test_the_raw_norm_is_what_clipping_returned() -> None:
    model = mlp()
    optimizer, returned = sgd(model), []
    with tbhooks.watch(model, every=1) as watching:
        for max_norm in (0.01, 1e6, 0.1):
            for _ in range(2):
                forward(model).backward()
            returned.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
    assert watching.history.scalar(RAW)[1].tolist() == pytest.approx(returned, rel=1e-6)
    assert watching.history.scalar(USED)[1].tolist() == pytest.approx([0.01, returned[1], 0.1], rel=1e-4)


@pytest.mark.parametrize("touch", [leave, clip, replace])
@pytest.mark.parametrize("count", [1, 4])
def test_each_gradient_is_recorded_once_whatever_touched_it(
    monkeypatch: pytest.MonkeyPatch, touch: Callable[[nn.Module], None], count: int
) -> None:
    reads: list[int] = []
    one, many, described = Recorder.record, Recorder.record_all, Recorder.record_described
    monkeypatch.setattr(Recorder, "record", lambda *args: (reads.append(1), one(*args))[1])
    monkeypatch.setattr(Recorder, "record_all", lambda self, all_: (reads.extend([1] * len(all_)), many(self, all_))[1])

    def counted(self: Recorder, sites: list[int], *args: Any, **kwargs: Any) -> bool:
        reads.extend([1] * len(sites))
        return described(self, sites, *args, **kwargs)

    monkeypatch.setattr(Recorder, "record_described", counted)
    model = mlp()
    optimizer, by_step = sgd(model), []
    with tbhooks.watch(model, every=1, kinds=("weight_gradient",)):
        for _ in range(3):
            reads.clear()
            for _ in range(count):
                forward(model).backward()
            touch(model)
            optimizer.step()
            optimizer.zero_grad()
            by_step.append(len(reads) / len(list(model.parameters())))
    assert by_step == [1, 1, 1]


def test_optimizers_inside_backward_show_the_norm_of_what_they_used() -> None:
    model, norms, squares = mlp(), [], [0.0]
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        squares[-1] += gradient_norm([parameter]) ** 2
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    with tbhooks.watch(model, every=1) as watching:
        for _ in range(3):
            forward(model).backward()
            norms.append(np.sqrt(squares[-1]))
            squares.append(0.0)
    assert watching.history.scalar(USED)[1].tolist() == pytest.approx(norms, rel=1e-6)
    # Nobody saw them all at once.
    assert not any(RAW in frame.scalars for frame in watching.history)


class Fragile(nn.Module):
    """Passes everything on; its backward raises while it is set to."""

    fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        if x.requires_grad:
            x.register_hook(self.check)
        return x

    def check(self, _gradient: Tensor) -> None:
        if self.fails:
            raise ValueError("not now")


@pytest.mark.parametrize("scale", [None, 64.0])
def test_after_a_backward_that_raised_the_next_one_is_read_for_itself(scale: float | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Fragile(), nn.Linear(8, 1))
    gradients, norms = [], []

    def keep(_module: nn.Module, _args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: gradients.append(float(gradient.double().norm())))

    model[0].register_forward_hook(keep)
    optimizer, scaler = sgd(model), GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    with tbhooks.watch(model, every=1) as watching:
        for step in range(3):
            if step == 1:
                model[1].fails = True
                with pytest.raises(ValueError, match="not now"):
                    scaler.scale(forward(model)).backward()
                model[1].fails = False
                optimizer.zero_grad()
            forward(model).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
    assert watching.history.series("0", "gradient", "norm")[1].tolist() == pytest.approx(gradients, rel=1e-6)
    assert [frame.scalars.get(RAW) for frame in watching.history] == pytest.approx(norms, rel=1e-6)


# --- Which numbers there are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("include", ["*", "transformer.h.*", "transformer.h.1.mlp.*", "transformer.ln_f"])
@pytest.mark.parametrize(
    "kinds", [("weight_gradient",), ("weight_gradient", "activation"), ("update", "weight_gradient")]
)
def test_norms_are_over_the_watched_parameters(include: str, kinds: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    case, model = zoo.ZOO["gpt2"], zoo.ZOO["gpt2"].build()
    chosen = [p for name, p in model.named_parameters() if fnmatchcase(name.rpartition(".")[0], include)]
    optimizer, norms = SGD(model.parameters(), lr=0.1), {}
    with tbhooks.watch(model, every=1, kinds=kinds, include=None if include == "*" else include) as watching:
        for _ in range(2):
            case.loss(model, case.batch()).backward()
            norms[RAW] = gradient_norm(chosen)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            norms[USED] = gradient_norm(chosen)
            optimizer.step()
            optimizer.zero_grad()
    assert {site.kind for site in watching.latest.sites} == set(kinds)
    assert {tag: watching.latest.scalars.get(tag) for tag in norms} == pytest.approx(norms, rel=1e-6)
    assert 0 < norms[USED] < norms[RAW]


@pytest.mark.parametrize("kinds", [("activation", "gradient"), ("weight", "update"), ("gradient",)])
def test_without_weight_gradients_there_is_no_norm_of_them(kinds: tuple[str, ...]) -> None:
    model = mlp()
    optimizer = sgd(model)
    with tbhooks.watch(model, every=1, kinds=kinds) as watching:
        for _ in range(2):
            forward(model).backward()
            optimizer.step()
    assert {site.kind for site in watching.latest.sites} == set(kinds)
    assert not {USED, RAW} & watching.latest.scalars.keys()


def test_tensorboard_shows_norms_scale_and_skipped_steps(tmp_path: Path) -> None:
    model = mlp()
    optimizer, scaler, norms = sgd(model), GradScaler("cpu", init_scale=64.0), []
    writer = SummaryWriter(str(tmp_path))
    with tbhooks.watch(model, writer, every=1):
        for factor in (1.0, INF, 1.0, NAN, 1.0):
            scaler.scale(forward(model) * factor).backward()
            scaler.unscale_(optimizer)
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.01)))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    writer.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    expected = {RAW: norms[::2], USED: [0.01] * 3, "train.scale": [64, 32, 16], "train.skipped": [0, 1, 2]}
    for tag, values in expected.items():
        assert [event.step for event in events.Scalars(tag)] == [0, 1, 2]
        assert [event.value for event in events.Scalars(tag)] == pytest.approx(values, rel=1e-4)


# --- Several processes ------------------------------------------------------------------------------------------------

RANKS = """
import contextlib, json, os, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
import tbhooks
from tests.support.loops import mlp, sgd, forward
from tests.support.reference import gradient_norm
from tests.support.zoo import raw

USED, RAW = "train.grad_norm", "train.grad_norm_raw"

torch.set_num_threads(1)
rank = int(os.fork() == 0)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1] + "/store", rank=rank, world_size=2)

def run(how, watched):
    model = mlp()
    torch.manual_seed(rank)
    wrap = nn.parallel.DistributedDataParallel
    ddp = model if how == "by hand" else wrap(model, gradient_as_bucket_view=how == "views")
    optimizer, norms = sgd(model), []
    watching = tbhooks.watch(ddp, every=1) if watched else None
    for _ in range(3):
        for last in (False, True):
            with contextlib.nullcontext() if last or how == "by hand" else ddp.no_sync():
                forward(ddp).backward()
        before = gradient_norm(model.parameters())
        if how == "by hand":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        elif how != "untouched":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        norms.append({RAW: before, USED: gradient_norm(model.parameters())})
        optimizer.step()
        optimizer.zero_grad()
    bits = b"".join(raw(p) for p in model.parameters()).hex()
    if watched:
        watching.close()
        seen = [{tag: frame.scalars.get(tag) for tag in (RAW, USED)} for frame in watching.history]
        return bits, norms, seen, watching.stats.errors
    return bits

result = {how: (run(how, False), *run(how, True)) for how in ("clipped", "views", "untouched", "by hand")}
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(result, file)
dist.destroy_process_group()
os.wait() if rank == 0 else os._exit(0)
"""


@pytest.fixture(scope="module")
def ranks(scripts: ScriptHost, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two processes of one run saw, by the way their gradients meet."""
    folder = tmp_path_factory.mktemp("ranks")
    root = Path(__file__).parents[2]
    scripts.run("-c", RANKS, folder, timeout=60, cwd=root).check_returncode()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("how", ["clipped", "views", "untouched", "by hand"])
def test_the_first_of_several_ranks_logs_the_gradients_they_share(ranks: list[dict[str, Any]], how: str) -> None:
    for rank, result in enumerate(ranks):
        bare, watched, norms, seen, errors = result[how]
        assert bare == watched
        assert errors == 0
        assert len(seen) == (3 if rank == 0 else 0)
        for got, expected in zip(seen, norms, strict=False):
            assert got == pytest.approx(expected, rel=1e-6)
    assert ranks[0][how][0] == ranks[1][how][0]
