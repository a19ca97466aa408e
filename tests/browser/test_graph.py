"""The GRAPHS tab draws what `w.graph()` wrote: a ResNet, a GPT-2, and a CNN with an LSTM and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tbhooks
from tests.support.browser_tab import Pages
from tests.support.processes import wait_for
from tests.support.tensorboard_server import Server

# Boxes are inside several shadow roots.
NAMES = """() => {
    const names = [];
    const look = (root) => root.querySelectorAll('*').forEach((element) => {
        if (element.matches('g.node[data-name]')) names.push(element.getAttribute('data-name'));
        if (element.shadowRoot) look(element.shadowRoot);
    });
    look(document);
    return names;
}"""
BOX = """([name, part]) => {
    let found = null;
    const look = (root) => root.querySelectorAll('*').forEach((element) => {
        if (element.matches('g.node[data-name]') && element.getAttribute('data-name') === name) found = element;
        if (element.shadowRoot) look(element.shadowRoot);
    });
    look(document);
    return found && found.querySelector(part);
}"""


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1:
            self.downsample = nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet(nn.Module):
    """As the one of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(16, 16), Block(16, 16))
        self.layer2 = nn.Sequential(Block(16, 32, 2), Block(32, 32))
        self.layer3 = nn.Sequential(Block(32, 64, 2), Block(64, 64))
        self.layer4 = nn.Sequential(Block(64, 128, 2), Block(128, 128))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Tutorial(nn.Module):
    """A CNN, an LSTM over its columns, attention over the LSTM's states."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 7, 64, batch_first=True, bidirectional=True)
        self.attention, self.classifier = nn.Linear(128, 1), nn.Linear(128, 10)
        self.dropout = nn.Dropout(0.3)

    def forward(self, images: Tensor) -> Tensor:
        columns = self.cnn(images).permute(0, 3, 1, 2).flatten(2)
        states, _ = self.lstm(columns)
        weights = torch.softmax(self.attention(states), dim=1)
        context = (weights * states).sum(1)
        return self.classifier(self.dropout(context) if self.training else context)


def draw(directory: Path, model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    with tbhooks.watch(model, str(directory), every=1).graph().evaluation() as w:
        w.summary()
        loss(model).backward()
        torch.optim.SGD(model.parameters(), lr=0.01).step()
        model.eval()
        with torch.no_grad():
            loss(model)
    assert w.stats.errors == 0


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=4, n_embd=64, n_head=4, vocab_size=500, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config).train()


def write(directory: Path, name: str) -> None:
    torch.manual_seed(0)
    labels, tokens = torch.tensor([1, 2, 3, 4]), torch.randint(0, 500, (2, 32))
    if name == "resnet":
        draw(directory, ResNet(), lambda model: F.cross_entropy(model(torch.randn(4, 3, 64, 64)), labels))
    elif name == "tutorial":
        draw(directory, Tutorial(), lambda model: F.cross_entropy(model(torch.randn(4, 1, 28, 28)), labels))
    else:
        draw(directory, gpt2(), lambda model: model(input_ids=tokens, labels=tokens).loss)


@pytest.fixture
def opened(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The GRAPHS tab over one model; a page that complains fails the test."""
    write(tmp_path / "run", request.param)
    with Server(tmp_path / "run", tmp_path / "log") as server:
        pages = Pages(browser, server.address)
        try:
            page = pages.open("/?darkMode=false#graphs", viewport={"width": 1300, "height": 900})
            wait_for(lambda: "output" in page.evaluate(NAMES), "the graph")
            yield page
            assert not pages.errors
        finally:
            for context in browser.contexts:
                context.close()


def expand(page: Any, *names: str) -> None:
    for name in names:
        page.evaluate_handle(BOX, [name, ".expandbutton"]).as_element().dispatch_event("click")
        wait_for(lambda: any(other.startswith(f"{name}/") for other in page.evaluate(NAMES)), f"{name} to open")


def select(page: Any, name: str, *says: str) -> None:
    """Clicks a box, and waits until the card beside the graph says all this of it."""

    def is_chosen() -> bool:
        """A click while boxes are moving is lost."""
        page.evaluate_handle(BOX, [name, ".nodeshape"]).as_element().dispatch_event("click")
        page.wait_for_timeout(500)
        return bool(page.get_by_text(says[0]).first.is_visible())

    wait_for(is_chosen, f"the card of {name}")
    for words in says:
        page.get_by_text(words).first.wait_for()


def picture(page: Any, path: Path) -> None:
    page.get_by_text("Fit to screen").click()
    page.wait_for_timeout(1500)  # it moves there
    page.screenshot(path=str(path))


@pytest.mark.parametrize("opened", ["resnet"], indirect=True)
def test_a_resnet(opened: Any, screenshots: Path) -> None:
    assert set(opened.evaluate(NAMES)) >= {
        "input",
        "conv1",
        "bn1",
        "relu",
        "layer1",
        "layer4",
        "avgpool",
        "fc",
        "output",
    }
    expand(opened, "layer2", "layer2/0")
    block = {name.removeprefix("layer2/0/") for name in opened.evaluate(NAMES) if name.startswith("layer2/0/")}
    assert block == {"conv1", "bn1", "relu", "conv2", "bn2", "downsample", "add", "relu.call_2"}
    select(opened, "layer2/0/conv2", "Operation: Conv2d", "9,216", "weight 32x32x3x3", "Inputs (1)")
    picture(opened, screenshots / "graph.png")


@pytest.mark.parametrize("opened", ["gpt2"], indirect=True)
def test_a_gpt2(opened: Any, screenshots: Path) -> None:
    assert set(opened.evaluate(NAMES)) >= {"input", "transformer", "lm_head", "output"}
    expand(opened, "transformer", "transformer/h", "transformer/h/0", "transformer/h/0/attn")
    assert "transformer/h/0/attn/scaled_dot_product_attention" in opened.evaluate(NAMES)
    picture(opened, screenshots / "graph-gpt2.png")


@pytest.mark.parametrize("opened", ["tutorial"], indirect=True)
def test_a_cnn_with_lstm_and_attention_in_training_and_in_evaluation(opened: Any, screenshots: Path) -> None:
    trained = {"input", "cnn", "lstm", "attention", "softmax", "mul", "sum", "dropout", "classifier", "output"}
    assert set(opened.evaluate(NAMES)) == trained
    expand(opened, "cnn")
    picture(opened, screenshots / "graph-tutorial.png")
    opened.locator("paper-item", has_text="tbhooks/evaluation").first.dispatch_event("click")
    wait_for(lambda: set(opened.evaluate(NAMES)) == trained - {"dropout"}, "the graph of the evaluation")
    picture(opened, screenshots / "graph-evaluation.png")
