"""WatchCallback in a real Trainer of transformers: the numbers of a plain loop, in a run of its own."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PrinterCallback, Trainer, TrainingArguments

import tbhooks
from tbhooks.integrations.transformers import WatchCallback
from tests.support.digits_training import (
    ACCUMULATED,
    BATCH,
    CLIP,
    STEPS,
    assert_same_frames,
    digits,
    make_net,
    make_optimizer,
    same_bits,
    weights,
)
from tests.support.frames import event_files, scalar_series
from tests.support.slow import slow


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def fit(directory: Path, callbacks: list[Any], resume: str | None = None, **options: Any) -> Digits:
    model = Digits()
    given = {
        "output_dir": str(directory), "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": ACCUMULATED,
        "max_grad_norm": CLIP, "num_train_epochs": 1, "lr_scheduler_type": "constant", "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True, "report_to": [], "seed": 0, **options,
    }  # fmt: skip
    data = [{"x": x, "labels": y} for x, y in digits()]
    trainer = InOrder(
        model, TrainingArguments(**given), train_dataset=data, optimizers=(make_optimizer(model), None),
        callbacks=callbacks,
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.fixture(scope="module")
def plain() -> Any:
    model = Digits()
    return plain_frames(model), weights(model)


def plain_frames(model: Digits) -> list[tbhooks.Frame]:
    optimizer, sink = make_optimizer(model), tbhooks.MemorySink()
    with tbhooks.watch(model, sink, every=1):
        for i, (x, y) in enumerate(torch.utils.data.DataLoader(digits(), batch_size=BATCH), start=1):
            (model(x, y)["loss"] / ACCUMULATED).backward()
            if i % ACCUMULATED == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
    return sink.frames


def test_accumulated_and_clipped_the_numbers_are_those_of_a_plain_loop(plain: Any, tmp_path: Path) -> None:
    sink = tbhooks.MemorySink()
    callback = WatchCallback(every=1, writer=sink)
    model = fit(tmp_path, [callback])
    assert [frame.step for frame in sink.frames] == list(range(STEPS))
    assert_same_frames(sink.frames, plain[0])
    assert callback.watch is not None
    assert callback.watch.stats.errors == 0
    assert same_bits(weights(model), weights(fit(tmp_path, [])))
    assert same_bits(weights(model), plain[1])


def test_it_writes_a_run_of_its_own_inside_the_trainers(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TENSORBOARD_LOGGING_DIR", raising=False)
    fit(tmp_path, [WatchCallback(every=1)], report_to=["tensorboard"])
    theirs, ours = sorted({file.parent for file in event_files(tmp_path)})
    assert ours == theirs / "tbhooks"
    assert theirs.parent == tmp_path / "runs"
    series = scalar_series(ours, "weight_gradient.norm/net.0.weight")
    assert list(series) == list(range(STEPS))
    expected = [frame["net.0.weight", "weight_gradient"].norm for frame in plain[0]]
    assert list(series.values()) == pytest.approx(expected, rel=1e-6)
    assert list(scalar_series(theirs, "train/loss")) == list(range(1, STEPS + 1))


def test_without_its_own_tensorboard_the_run_lies_where_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "here"))
    fit(tmp_path / "out", [WatchCallback(every=2, kinds=("weight",))])
    (file,) = event_files(tmp_path)
    assert file.parent == tmp_path / "here" / "tbhooks"


@slow("a GPT on text", covered_by="test_accumulated_and_clipped_the_numbers_are_those_of_a_plain_loop")
def test_a_gpt_on_text_trains_to_the_same_bits_and_shows_its_layers(tmp_path: Path) -> None:
    from pydoc_data.topics import topics

    from transformers import GPT2Config, GPT2LMHeadModel

    text = torch.tensor(list("".join(topics.values()).encode()[: 32 * BATCH * ACCUMULATED * 3])).view(-1, 32)
    ends = []
    for callbacks in ([WatchCallback(every=1)], []):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=32, n_embd=32, n_layer=2, n_head=2))
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED, use_cpu=True,
            num_train_epochs=1, save_strategy="no", disable_tqdm=True, report_to=[], seed=0,
        )  # fmt: skip
        data = [{"input_ids": line, "labels": line} for line in text]
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        ends.append(weights(model))
        for callback in callbacks:
            frames = list(callback.watch.history)
            assert [frame.step for frame in frames] == [0, 1, 2]
            count = frames[0]["transformer.h.1.mlp", "activation"].count
            assert count == BATCH * ACCUMULATED * 32 * 32
    assert same_bits(*ends)


def test_a_resumed_training_goes_on_counting(plain: Any, tmp_path: Path) -> None:
    fit(tmp_path, [], max_steps=STEPS // 2, save_strategy="steps", save_steps=STEPS // 2)
    sink = tbhooks.MemorySink()
    fit(tmp_path, [WatchCallback(every=4, writer=sink)], resume=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    # The first in any case, then every fourth of all steps.
    assert_same_frames(sink.frames, [plain[0][3], plain[0][4]])


def test_a_wrong_option_is_refused_at_once() -> None:
    with pytest.raises(tbhooks.ArgumentError, match="unknown option 'kind': did you mean 'kinds'"):
        WatchCallback(kind="weight")
