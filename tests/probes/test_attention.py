"""The largest attention logit of some queries: against all scores, in every way that attention is called and trained."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.probes.kit import Lab, sgd
from tests.probes.test_activations import acts
from trackbridge.config import ActivationsConfig, ParametersConfig
from trackbridge.probes import Instruments, attention
from trackbridge.probes.attention import largest

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it while tracing
HEADS, WIDTH = 4, 8


class Block(nn.Module):
    """`kind`: how the scores come to be."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.ln = nn.LayerNorm(HEADS * WIDTH)
        self.logits: Tensor | None = None

    def qkv_of(self, x: Tensor) -> tuple[Tensor, ...]:
        b, t, d = x.shape
        return self.qkv(self.ln(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4).unbind()

    def mask(self, x: Tensor) -> Tensor:
        away = x.new_ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().roll(-2, 1)
        return away | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv_of(x)
        if self.kind == "causal":
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.kind == "full":
            y = F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.5)
        elif self.kind == "mask":
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))
        elif self.kind == "bias":
            y = F.scaled_dot_product_attention(q, k, v, torch.linspace(-9, 9, x.shape[1], device=x.device)[None])
        elif self.kind == "grouped":
            y = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True)
        else:
            scores = (q @ k.transpose(-1, -2) / math.sqrt(WIDTH)).masked_fill(~self.mask(x), -math.inf)
            y = F.softmax(scores, dim=-1) @ v
        return x + y.transpose(1, 2).reshape(x.shape)

    @torch.no_grad()
    def scores(self, x: Tensor) -> Tensor:
        q, k, _ = self.qkv_of(x)
        if self.kind == "grouped":
            k = k[:, :2].repeat_interleave(2, 1)
        logits = q @ k.transpose(-1, -2) * (0.5 if self.kind == "full" else WIDTH**-0.5)
        if self.kind == "bias":
            return logits + torch.linspace(-9, 9, x.shape[1])
        if self.kind in ("causal", "grouped"):
            return logits.masked_fill(~torch.ones_like(logits, dtype=torch.bool).tril(), -math.inf)
        return logits if self.kind == "full" else logits.masked_fill(~self.mask(x), -math.inf)


KINDS = ("causal", "full", "mask", "bias", "grouped", "by hand")


class Model(nn.Module):
    def __init__(self, kind: str = "causal", mode: str = "plain") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.mode == "plain" else checkpoint(block, x, use_reentrant=self.mode == "reentrant")
        return x


def data(seed: int = 0, length: int = 10) -> Tensor:
    x = torch.randn(3, length, HEADS * WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def true(model: Model, *micro: Tensor, queries: int = 16) -> dict[str, float]:
    found = dict.fromkeys(("blocks.0", "blocks.1"), -math.inf)
    for x in micro:
        for number, block in enumerate(model.blocks):
            length = x.shape[1]
            step = -(-length // queries)
            some = block.scores(x)[..., (length - 1) % step :: step, :]
            found[f"blocks.{number}"] = max(found[f"blocks.{number}"], some.max().item())
            with torch.no_grad():
                x = block(x)
    return found


def logits(found: dict[str, float]) -> dict[str, float]:
    return acts(found, "sampled_logit_max")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [3, 16])
def test_right_number(kind: str, queries: int) -> None:
    model = Model(kind)
    lab = Lab(model, sgd(model), attention_every=1, attention_queries=queries)
    wanted = true(model, data(), queries=queries)
    model(data()).sum().backward()
    assert logits(lab.close()) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("way", ["plain", "reentrant", "non-reentrant", "compiled", "blocks compiled"])
def test_ways_of_training(way: str) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = Model(mode=way if "compiled" not in way else "plain")
    run: Any = torch.compile(model, backend="aot_eager", fullgraph=True) if way == "compiled" else model
    lab = Lab(run, optimizer := sgd(model), attention_every=2, attention_queries=4)
    if way == "blocks compiled":  # before them, the hooks would be outside
        for block in model.blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    for step in range(5):
        micro = [data(2 * step), data(2 * step + 1)]
        plain = Model()
        plain.load_state_dict(model.state_dict())
        wanted = true(plain, *micro, queries=4)
        for x in micro:
            run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert logits(lab.close()) == pytest.approx({} if step % 2 else wanted, rel=1e-5)
        if step == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs and not counters["graph_break"]


def test_blocks_compiled_before_are_said_to_be_without(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    for block in model.blocks:
        block.compile(backend="eager")
    lab = Lab(model, sgd(model), attention_every=1)
    assert "no attention logits of 2 blocks" in caplog.text
    model(data()).sum().backward()
    assert not logits(lab.close())


def test_off_by_default_and_silent_outside_of_training() -> None:
    model = Model()
    assert not any("logit" in name for name in Lab(model, sgd(model)).instruments.series)
    lab = Lab(model, sgd(model), attention_every=1)
    with torch.no_grad():
        model(data())
    model.eval()
    model(data())
    assert not logits(lab.close())


def test_an_exception_in_a_block_leaves_no_mode_behind() -> None:
    model = Model()
    lab = Lab(model, sgd(model), attention_every=1)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 10, 5))
    assert not torch.overrides._get_current_function_mode_stack()
    wanted = true(model, data())
    model(data()).sum().backward()
    assert logits(lab.close()) == pytest.approx(wanted)


def test_half_precision_under_autocast_is_looked_at_in_float32() -> None:
    model = Model("full")
    lab = Lab(model, sgd(model), attention_every=1)
    with torch.autocast("cpu", torch.bfloat16):
        block = model.blocks[0]
        q, k, _ = block.qkv_of(data())
        block(data())
    exact = (q.double() @ k.double().transpose(-1, -2) * 0.5).max().item()
    assert q.dtype == torch.bfloat16 and logits(lab.close())["blocks.0"] == pytest.approx(exact, rel=1e-6)


def measured(q: Tensor, k: Tensor, **options: Any) -> float:
    slab = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    given = {"mask": None, "scale": 1.0, "first": 0, "step": 0, **options}
    for _ in range(2):
        largest(q, k, **given, slab=slab, place=0, seen=1, gate=2)
    return float(slab[0]) if slab[1] else math.nan


def test_numerics() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, 5, 8, generator=generator) for _ in range(2))
    assert measured(q, k) == pytest.approx((q.double() @ k.double().transpose(-1, -2)).max().item(), rel=1e-6)
    assert measured(-q.abs(), k.abs()) < 0  # never the zero of an empty place
    assert measured((q * 0 + 200).half(), (k * 0 + 200).half()) == 8 * 200.0 * 200  # beyond float16
    q[0, 0, 0, 0] = 3000
    assert measured(q, k) == pytest.approx((q.double() @ k.double().transpose(-1, -2)).max().item(), rel=1e-6)
    q[1, 2, 3, 4] = math.nan
    assert math.isnan(measured(q, k))


def test_the_weights_end_the_same() -> None:
    def ended(**config: Any) -> list[bytes]:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        lab = Lab(model, optimizer, **config)
        for step in range(4):
            model(data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            lab.close()
        return [np.asarray(p.detach()).tobytes() for p in model.parameters()]

    assert ended() == ended(attention_every=1)


def test_a_copy_of_a_watched_model_runs_unwatched() -> None:
    model = Model()
    lab = Lab(model, sgd(model), attention_every=1)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied(data(seed=9)).sum().backward()
    assert not logits(lab.close())
    lab.instruments.detach()
    assert not any(block._forward_pre_hooks or block._forward_hooks for block in model.blocks)


def test_a_model_without_blocks_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    Lab(model, sgd(model), attention_every=1)
    assert "no list of blocks" in caplog.text


MASKS = ("none", "mask", "each head's", "padding", "both")


class Encoder(nn.Module):
    """torch's own layers."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, HEADS, 16, dropout=0.0, batch_first=batch_first, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        return self.encoder(x, mask=mask, src_key_padding_mask=padding)


@pytest.mark.parametrize(
    "batch_first, masks, way",
    [
        *((batch_first, masks, "eager") for masks in MASKS for batch_first in (False, True)),
        *((True, masks, "compiled") for masks in ("none", "both")),
    ],
)
def test_torchs_own_layers(batch_first: bool, masks: str, way: str) -> None:
    torch._dynamo.reset()
    model = Encoder(batch_first)
    x = data(length=10).detach()
    mask = {"mask": ~torch.ones(10, 10, dtype=torch.bool).tril(), "both": ~torch.ones(10, 10, dtype=torch.bool).tril()}.get(
        masks
    )
    if masks == "each head's":
        mask = torch.randn(3 * HEADS, 10, 10, generator=torch.Generator().manual_seed(1)) * 5
    padding = torch.arange(10)[None].repeat(3, 1) > 6 if masks in ("padding", "both") else None
    layer = model.encoder.layers[0]
    with torch.no_grad():
        q, k = F.linear(layer.norm1(x), layer.self_attn.in_proj_weight[:64], layer.self_attn.in_proj_bias[:64]).split(32, -1)
        every = q.view(3, 10, HEADS, WIDTH).transpose(1, 2) @ k.view(3, 10, HEADS, WIDTH).permute(0, 2, 3, 1) * WIDTH**-0.5
    if mask is not None:
        every = every.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else every + mask.view(3, HEADS, 10, 10)
    if padding is not None:
        every = every.masked_fill(padding[:, None, None, :], -math.inf)
    lab = Lab(model, sgd(model), attention_every=1, attention_queries=4)
    run: Any = torch.compile(model, backend="aot_eager") if way == "compiled" else model
    given = x if batch_first else x.transpose(0, 1)
    run(given, mask, padding).sum().backward()
    found = logits(lab.close())
    assert found["encoder.layers.0"] == pytest.approx(every[..., 0::3, :].max().item(), rel=1e-5)
    assert found.keys() == {"encoder.layers.0", "encoder.layers.1"}


def test_a_bug_of_ours_does_not_stop_training(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug of ours")

    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    monkeypatch.setattr(attention, "largest", broken)
    model = Model()
    instruments = Instruments(ParametersConfig(), ActivationsConfig(attention_every=1))
    instruments.attach({"": model}, {"": sgd(model)})
    for seed in range(3):
        model(data(seed)).sum().backward()
        assert instruments.close(seed) is not None
    assert sum("a bug of ours" in (record.exc_text or "") for record in caplog.records) == 1
