"""Which tokens of an output are looked at, where not all are: none of its places more than others."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.probes.kit import Lab, sgd
from tests.probes.test_channels import truth
from trackbridge.probes.channels import channels_last, every
from trackbridge.probes.site_statistics import ELEMENTS, STRIDES, TOKENS, sparse
from trackbridge.probes.strides import stride


class Whole(nn.Module):
    """`part` as a module inside a model, which may be compiled."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        return y


class Sum(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


Modes = pytest.mark.parametrize("mode", ["plain", "compiled"])


def watched(part: nn.Module, mode: str, x: Tensor, **config: Any) -> dict[str, float]:
    torch._dynamo.reset()
    model = Whole(part)
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if mode == "compiled" else model
    lab = Lab(run, sgd(model), sites=["part"], **config)
    run(x).sum().backward()
    return {name.rpartition("/")[2]: value for name, value in lab.close().items() if name.startswith("act/part/")}


@pytest.mark.parametrize(
    "least, lengths, found",
    [(1, (7,), 1), (7, (), 7), (7, (1024,), 7), (7, (196,), 11), (7, (77,), 13), (7, (56, 11), 13), (3, (15, 14), 11)],
)
def test_no_length_is_a_multiple_of_the_stride(least: int, lengths: tuple[int, ...], found: int) -> None:
    assert stride(least, lengths) == found


@pytest.mark.parametrize(
    "shape, found",
    [((8, 128, 192), 7), ((6, 128, 192), 5), ((3, 128, 192), 3), ((2, 128, 192), 1), ((64, 64, 8), 1), ((64, 64, 12), 3)],
)
def test_how_many_tokens_are_left_out_goes_with_how_many_there_are(shape: tuple[int, ...], found: int) -> None:
    assert sparse(math.prod(shape), shape) == found


@given(
    batch=st.integers(1, 600),
    lengths=st.lists(st.integers(1, 70) | st.sampled_from([96, 105, 129, 384]), max_size=3),
    width=st.integers(1, 4000),
)
def test_enough_is_left_of_a_sample_and_no_place_is_left_out(batch: int, lengths: list[int], width: int) -> None:
    tokens = batch * math.prod(lengths)
    every = sparse(tokens * width, (batch, *lengths, width))
    if every == 1:
        assert any(length % 3 == 0 for length in lengths) or tokens < 3 * TOKENS or tokens * width < 3 * ELEMENTS
    else:
        assert tokens // every >= TOKENS and tokens * width // every >= ELEMENTS
        assert all(length % every for length in lengths)
    if min(tokens / TOKENS, tokens * width / ELEMENTS) >= 7 and all(length % 7 for length in lengths):
        assert every == max(STRIDES)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@Modes
@pytest.mark.parametrize("batch, side, every", [(2, 7, 1), (8, 7, 3), (96, 7, 11), (96, 4, 7)])
def test_places_of_an_image_are_counted_not_numbers_of_its_rows(mode: str, batch: int, side: int, every: int) -> None:
    """The channels of a convolution are its second dimension; a batch of 2 x 7 x 7 has 98 places, however many channels."""
    part = nn.Conv2d(4, 512, 1)
    x = torch.randn(batch, 4, side, side)
    rows = part(x).detach().movedim(1, -1).reshape(-1, 512)[::every]
    found = watched(part, mode, x)
    assert found["rms"] == pytest.approx(rows.double().square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@Modes
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_an_image_of_seven_by_seven_is_more_than_its_edge(mode: str, memory_format: torch.memory_format) -> None:
    """Padding makes an edge smaller than the rest; every 7th place of 7 x 7 is the left edge of each row."""
    torch.manual_seed(0)
    part = nn.Conv2d(8, 128, 3, padding=1, bias=False)
    part.weight.data.abs_()
    x = torch.rand(32, 8, 7, 7).to(memory_format=memory_format)
    y = part(x).detach()
    rows = y.movedim(1, -1).reshape(-1, 128)
    found = watched(part, mode, x)
    assert found["mean"] == pytest.approx(y.mean().item(), rel=0.02)
    assert rows[::7].mean().item() < 0.8 * y.mean().item()
    assert found["mean"] == pytest.approx(rows[::11].double().mean().item(), rel=1e-5)
    assert found["channel_kurtosis"] == pytest.approx(truth(rows[::11]), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@Modes
@pytest.mark.parametrize("tokens, prime", [(None, 5), (7, 13), (2, 3)])
def test_a_sequence_of_77_is_more_than_every_seventh_position(mode: str, tokens: int | None, prime: int) -> None:
    part = nn.Linear(32, 32)
    x = torch.randn(64, 77, 32)
    rows = part(x).detach().reshape(-1, 32)[::prime]
    found = watched(part, mode, x, tokens=tokens)
    assert found["rms"] == pytest.approx(rows.double().square().mean().sqrt().item(), rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
@Modes
def test_a_scalar_has_no_tokens(mode: str) -> None:
    """A loss that a module returns; sliced, it was an error in the training's compiled forward pass."""
    part = Sum(4, 4)
    x = torch.randn(3, 4)
    assert watched(part, mode, x, tokens=3)["mean"] == pytest.approx(part(x).item(), rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 5, 7, 4), (3, 5, 7), (2, 5, 3, 4, 2)])
def test_of_an_image_only_the_sample_is_copied(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(shape)
    last = channels_last(y, nn.Conv2d(5, 5, 1))
    assert last is not None and last.data_ptr() == y.data_ptr() and last.shape == (shape[0], *shape[2:], 5)
    rows = last.reshape(-1, 5)[::3]
    monkeypatch.setattr(Tensor, "reshape", None)
    assert torch.equal(every(last, 3), rows)


class Gives(nn.Linear):
    """What `give` makes of a linear map."""

    def __init__(self, give: Callable[[Tensor], Tensor]) -> None:
        super().__init__(4, 4)
        self.give = give

    def forward(self, x: Tensor) -> Tensor:
        return self.give(super().forward(x))


def test_an_imaginary_part_is_read_though_its_sign_is_a_flag() -> None:
    part = Gives(lambda y: torch.view_as_complex(y.reshape(-1, 2, 2)).conj().imag)
    x = torch.randn(6, 4)
    assert part(x).is_neg()
    assert watched(part, "plain", x)["mean"] == pytest.approx(part(x).mean().item(), rel=1e-5)


def test_a_sparse_output_has_no_statistics() -> None:
    assert not watched(Gives(Tensor.to_sparse), "plain", torch.randn(6, 4))
