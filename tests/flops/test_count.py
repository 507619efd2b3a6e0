"""FLOPs against counts made by hand. Dimensions are small and all different, so that no two terms can be mistaken."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from trackbridge.flops import FlopCount, count
from trackbridge.flops.counting import count_shapes

BATCH, LENGTH, WIDTH, HEADS, VOCABULARY = 2, 6, 12, 3, 50
TOKENS = BATCH * LENGTH
IDS = torch.arange(TOKENS).reshape(BATCH, LENGTH)


def total(flops: Mapping[torch.dtype, float | Tensor]) -> float:
    return float(sum(flops.values()))


class Block(nn.Module):
    """Attention with `kv_heads` shared keys and values, then a two-layer MLP of four times the width."""

    def __init__(self, kv_heads: int = HEADS, mask: Tensor | None = None, causal: bool = True) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * self.size)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.kv_heads, self.mask, self.causal = kv_heads, mask, causal and mask is None

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, self.size)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, self.size)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, is_causal=self.causal, enable_gqa=self.kv_heads != HEADS
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, block: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = block
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(ids)))  # type: ignore[no-any-return]


PAIRS = LENGTH * (LENGTH + 1) / 2  # under the causal mask
ATTENTION = 2 * 2 * BATCH * PAIRS * WIDTH  # scores and weighted values, over all heads
DENSE = 2 * TOKENS * (4 * WIDTH * WIDTH + 2 * 4 * WIDTH * WIDTH)
HEAD = 2 * TOKENS * WIDTH * VOCABULARY


def test_dense() -> None:
    found = count(Model(Block()), IDS)
    assert total(found.forward) == DENSE + ATTENTION + HEAD
    assert found.model == 3 * (DENSE + ATTENTION + HEAD)  # 6 N a token, and attention
    assert found.attention == ATTENTION
    assert found.recomputed == {}


def test_tied_head_is_counted_and_lookup_is_not() -> None:
    assert count(Model(Block(), tied=True), IDS).model == count(Model(Block()), IDS).model


def test_full_attention_counts_hidden_pairs() -> None:
    whole = count(Model(Block()), IDS, full_attention=True)
    assert whole.attention == 2 * 2 * BATCH * LENGTH**2 * WIDTH
    assert whole.model - 3 * whole.attention == 3 * (DENSE + HEAD)  # the switch changes attention's term only


def test_grouped_queries() -> None:
    fewer = 2 * TOKENS * WIDTH * (2 * WIDTH - 2 * WIDTH // HEADS)  # keys and values of one head instead of three
    assert count(Model(Block(kv_heads=1)), IDS).model == 3 * (DENSE - fewer + ATTENTION + HEAD)


def test_sliding_window() -> None:
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    window = (distance >= 0) & (distance < 2)
    found = count(Model(Block(mask=window)), IDS)
    assert found.attention == 2 * 2 * BATCH * (2 * LENGTH - 1) * WIDTH


@pytest.mark.parametrize("hides", [float("-inf"), torch.finfo(torch.float32).min, -1e9])
def test_packed_documents(hides: float) -> None:
    """What libraries add to hide a pair: minus infinity, the least number (T5 in transformers), a large one. A bias of
    positions hides none."""
    document = torch.tensor([0, 0, 0, 0, 1, 1])
    mask = (document[:, None] == document) & torch.ones(LENGTH, LENGTH).tril().bool()
    bias = -1e3 * torch.arange(LENGTH).expand(LENGTH, LENGTH)
    found = count(Model(Block(mask=torch.where(mask, bias, hides))), IDS)
    assert found.attention == 2 * 2 * BATCH * (4 * 5 / 2 + 2 * 3 / 2) * WIDTH


class TopTwo(nn.Module):
    """Eight experts of which each token sees two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, token, weights[token, place, None] * expert(x[token]))
        return y.unflatten(0, (BATCH, LENGTH))


def test_mixture_of_experts_counts_the_active_ones() -> None:
    router, experts = 2 * TOKENS * WIDTH * 8, 2 * (2 * TOKENS) * WIDTH * WIDTH
    assert count(Model(TopTwo()), IDS).model == 3 * (router + experts + HEAD)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, rank, bias=False), nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


def test_low_rank_adapters() -> None:
    model = nn.Sequential(Adapted(), Adapted())
    base, adapter = 2 * TOKENS * WIDTH * WIDTH, 2 * 2 * TOKENS * WIDTH * 2
    # the input has no gradient: no backward pass for the frozen weight, one product for the adapter's first matrix
    first = base + (adapter / 2) * 2 + (adapter / 2) * 3
    second = 2 * base + 3 * adapter  # the frozen weight passes gradients on
    assert count(model, torch.randn(BATCH, LENGTH, WIDTH)).model == first + second


def test_frozen_layers() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 7).requires_grad_(False), nn.Linear(7, 5), nn.Linear(5, 3).requires_grad_(False))
    a, b, c = (2 * TOKENS * n for n in (WIDTH * 7, 7 * 5, 5 * 3))
    assert count(model, torch.randn(TOKENS, WIDTH)).model == a + 2 * b + 2 * c  # 2N; 4N: no input gradient; 4N: none of weights


def test_encoder_decoder() -> None:
    source, target = torch.randn(BATCH, 7, WIDTH), torch.randn(BATCH, 4, WIDTH)
    model = nn.Transformer(WIDTH, 4, 1, 1, 20, dropout=0.0, batch_first=True)
    mlp = 2 * 2 * WIDTH * 20
    project = 2 * WIDTH * WIDTH
    encoder = BATCH * (7 * (4 * project + mlp) + 2 * 2 * 7 * 7 * WIDTH)
    decoder = BATCH * (4 * (4 * project + mlp) + 2 * 2 * 4 * 4 * WIDTH)
    crossed = BATCH * (2 * 4 * project + 2 * 7 * project + 2 * 2 * 4 * 7 * WIDTH)
    found = count(model, source.requires_grad_(), target.requires_grad_())
    assert total(found.forward) == encoder + decoder + crossed
    assert found.model == 3 * (encoder + decoder + crossed)


def test_gpt2_agrees_with_the_published_count() -> None:
    """nanoGPT's transformer_sizing notebook: 291,648,307,200 FLOPs forward for a sequence of 1,024 tokens, every pair counted;
    and 6 N + 12 L H Q T a token (arXiv:2204.02311) with its N of 123,653,376."""
    from benchmarks.overhead import GPT2

    with torch.device("meta"):
        model, ids = GPT2(vocabulary=50257), torch.zeros(1, 1024, dtype=torch.long)
    found = count(model, ids, ids, full_attention=True)
    assert total(found.forward) == 291_648_307_200
    published = 6 * 123_653_376 + 12 * 12 * 12 * 64 * 1024
    assert abs(found.model / 1024 / published - 1) < 0.01


def test_checkpointing_is_counted_apart() -> None:
    class Checkpointed(nn.Module):
        def __init__(self, **how: object) -> None:
            super().__init__()
            self.block, self.how = Block(), how

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, x, **self.how)  # type: ignore[no-any-return]

    plain = count(Model(Block()), IDS)
    for reentrant in (True, False):
        found = count(Model(Checkpointed(use_reentrant=reentrant)), IDS)
        assert found.model == plain.model, reentrant
        assert total(found.recomputed or {}) == DENSE + ATTENTION, reentrant
    selective = count(
        Model(Checkpointed(use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts([]))), IDS
    )
    assert selective.model == plain.model
    assert selective.recomputed is None


def test_autocast_is_the_dtype_of_the_products() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = count(nn.Linear(3, 4), torch.randn(2, 3))
    assert found.forward == {torch.bfloat16: 2 * 2 * 3 * 4}


def test_no_gradients_no_backward() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.teacher, self.student = nn.Linear(3, 4), nn.Linear(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                seen = self.teacher(x)
            return self.student(x).sum() + seen.sum()  # type: ignore[no-any-return]

    assert count(Teacher(), torch.randn(2, 3)).model == 2 * 2 * 3 * 4 + 2 * (2 * 2 * 3 * 5)


def test_shapes_alone_give_the_same_count_and_touch_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    seed = torch.get_rng_state()
    for candidate in (model, torch.compile(model, backend="eager")):
        assert count_shapes(candidate, (x,), {}, full_attention=False).model == count(model.eval(), x).model  # type: ignore[arg-type]
        model.train()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(seed, torch.get_rng_state())


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2),
    st.sampled_from([1, 2, 3]), st.integers(1, 2),
)  # fmt: skip
def test_convolutions_agree_with_torch(
    groups: int, each_in: int, each_out: int, kernel: int, stride: int, padding: int, space: int, dilation: int
) -> None:
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[space - 1]
    model = kind(groups * each_in, groups * each_out, kernel, stride=stride, padding=padding, groups=groups, dilation=dilation)
    x = torch.randn(2, groups * each_in, *(7, 6, 5)[:space])
    with FlopCounterMode(display=False) as counted:
        model(x)
    assert total(count(model, x).forward) == counted.get_total_flops()


def test_products_agree_with_torch() -> None:
    """Everything that torch's own counter is complete for."""
    a, b, c = torch.randn(4, 5), torch.randn(5, 6), torch.randn(3, 4, 5)

    class Calls(nn.Module):
        def __init__(self, call: object) -> None:
            super().__init__()
            self.call = call

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.call(*inputs)  # type: ignore[operator,no-any-return]

    for call, inputs in (
        (torch.mm, (a, b)),
        (lambda x, y: x @ y, (c, b)),
        (lambda x, y: torch.einsum("nij,jk->nik", x, y), (c, b)),
        (lambda x, y: torch.einsum("...ij,jk->...ik", x, y), (c, b)),
        (lambda x, y, z: torch.einsum("ij,jk,kl->il", x, y, z), (a, b, b.T)),
        (lambda x, y: torch.addmm(torch.zeros(6), x, y), (a, b)),
        (torch.bmm, (c, c.mT)),
        (torch.linalg.matmul, (c, b)),
        (torch.inner, (c, b.T)),
        (lambda x, y: torch.tensordot(x, y, 1), (c, b)),
        (lambda x, y: torch.tensordot(x, y, ([2, 1], [0, 1])), (c, c[0].T)),
        (lambda x, y: torch.mm(input=x, mat2=y), (a, b)),
        (lambda x, y: torch.matmul(x, other=y), (c, b)),
        (lambda x, y: torch.addmm(torch.zeros(6), mat1=x, mat2=y), (a, b)),
        (lambda x, y: torch.baddbmm(torch.zeros(4), x, y), (c, c.mT)),
        (lambda x, y: torch.convolution(x, y, None, [2], [1], [1], False, [0], 1), (c, torch.randn(2, 4, 3))),
        (lambda x, y: torch.convolution(x, y, None, [2], [1], [1], True, [1], 1), (c, torch.randn(4, 2, 3))),
    ):
        with FlopCounterMode(display=False) as counted:
            call(*inputs)
        assert total(count(Calls(call), *inputs).forward) == counted.get_total_flops(), call


def test_products_that_torch_does_not_count() -> None:
    """Written over what they are added to, and summed over a batch."""
    c, d = torch.randn(3, 4, 5), torch.randn(3, 5, 6)

    class Adds(nn.Module):
        def forward(self, how: str) -> Tensor:
            if how == "addmm_":
                return torch.zeros(4, 6).addmm_(c[0], d[0])
            return torch.addbmm(torch.zeros(4, 6), c, d) if how == "addbmm" else torch.zeros(3, 4, 6).baddbmm_(c, d)

    assert total(count(Adds(), "addmm_").forward) == 2 * 4 * 5 * 6
    assert total(count(Adds(), "addbmm").forward) == 3 * 2 * 4 * 5 * 6
    assert total(count(Adds(), "baddbmm_").forward) == 3 * 2 * 4 * 5 * 6


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_packed_sequences_cost_their_own_steps(kind: type[nn.RNNBase], gates: int) -> None:
    model = kind(8, 16, bidirectional=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(5, 3, 8), [5, 3, 1])
    assert total(count(model, packed).forward) == 2 * (5 + 3 + 1) * 2 * gates * 16 * (8 + 16)


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTMCell, 4), (nn.GRUCell, 3), (nn.RNNCell, 1)])
def test_cells(kind: type[nn.Module], gates: int) -> None:
    found = count(kind(8, 16), torch.randn(3, 8))
    assert total(found.forward) == 2 * 3 * gates * 16 * (8 + 16)
    assert found.model == 2 * 3 * gates * 16 * (8 + 16) * 2  # neither input has a gradient: weights' only


def test_recurrent() -> None:
    model = nn.LSTM(8, 16, num_layers=2)
    steps = 5 * 3
    by_hand = 2 * steps * 4 * 16 * ((8 + 16) + (16 + 16))
    assert total(count(model, torch.randn(5, 3, 8)).forward) == by_hand


def test_a_broken_rule_never_breaks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from trackbridge.flops.counting import Counting
    from trackbridge.flops.functions import COSTS

    monkeypatch.setitem(COSTS, torch.mm, lambda a: ())  # knows of one argument
    with Counting() as counting:
        y = torch.mm(torch.eye(2), torch.eye(2))
    assert torch.equal(y, torch.eye(2))
    assert isinstance(counting.error, TypeError)
    assert counting.found == FlopCount()
