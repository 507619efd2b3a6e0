"""Models with their data: what is trained. Everything is drawn from the seed; nothing is read from disk.

These were in view when rules were written, the `SECOND` since their results were read; see `held.tasks` for what only judges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
VOCABULARY, KNOWN = 256, 200  # token ids from `KNOWN` on never occur in healthy text


class Source:
    """Batches by number: the same number gives the same batch. `regime` chooses the distribution."""

    def __init__(self, seed: int, batch: int) -> None:
        self.seed, self.batch_size, self.regime = seed, batch, 0
        self.length = 32

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed((self.seed * 1_000_003 + number) % 2**63)

    def batch(self, number: int) -> Batch:
        raise NotImplementedError


class Text(Source):
    """Sequences from one of three Markov chains each, with Zipf's marginal over `KNOWN` tokens, so that what comes next depends
    on the last token and, by way of the chain, on all before: (inputs, targets), both int64 (batch, length). Another regime has
    other chains."""

    CHAINS = 3

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed, batch)
        self.chains = [
            torch.stack([self._chain(seed * 7 + 31 * k + regime) for k in range(self.CHAINS)]) for regime in range(2)
        ]

    def _chain(self, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        zipf = 1.0 / torch.arange(1, KNOWN + 1) ** 1.1
        favourites = torch.multinomial(zipf.expand(KNOWN, -1), 4, generator=generator)
        table = 0.15 * (zipf / zipf.sum()).expand(KNOWN, -1).clone()
        return table.scatter_add_(1, favourites, torch.tensor([0.4, 0.25, 0.12, 0.08]).expand(KNOWN, -1).contiguous())

    def batch(self, number: int) -> Batch:
        generator, chains = self.generator(number), self.chains[self.regime]
        which = torch.randint(self.CHAINS, (self.batch_size,), generator=generator)
        token = torch.randint(KNOWN, (self.batch_size,), generator=generator) % 40
        tokens = [token]
        for _ in range(self.length):
            token = torch.multinomial(chains[which, token], 1, generator=generator).squeeze(1)
            tokens.append(token)
        text = torch.stack(tokens, 1)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Clusters(Source):
    """Points around class centres: (float32 (batch, *shape), int64 (batch,)). Another regime has other centres."""

    def __init__(self, seed: int, batch: int, shape: tuple[int, ...], spread: float) -> None:
        super().__init__(seed, batch)
        self.shape, self.spread = shape, spread
        generator = torch.Generator().manual_seed(seed + 17)
        self.centres = torch.randn(2, 10, *shape, generator=generator)

    def batch(self, number: int) -> Batch:
        generator = self.generator(number)
        label = torch.randint(10, (self.batch_size,), generator=generator)
        noise = torch.randn(self.batch_size, *self.shape, generator=generator)
        return self.centres[self.regime][label] + self.spread * noise, label


class Surface(Source):
    """Regression on a smooth random function: (float32 (batch, 16), float32 (batch,))."""

    def __init__(self, seed: int, batch: int) -> None:
        super().__init__(seed, batch)
        generator = torch.Generator().manual_seed(seed + 29)
        self.weights = torch.randn(2, 16, 24, generator=generator) / 4
        self.sums = torch.randn(2, 24, generator=generator) / 2

    def batch(self, number: int) -> Batch:
        generator = self.generator(number)
        x = torch.randn(self.batch_size, 16, generator=generator)
        y = torch.sin(x @ self.weights[self.regime] * 2) @ self.sums[self.regime]
        return x, y + 0.3 * torch.randn(self.batch_size, generator=generator)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, drop: float) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.mlp(self.ln2(x)))


class Transformer(nn.Module):
    """Two pre-norm blocks with LayerNorm."""

    def __init__(self, width: int = 32, layers: int = 2, drop: float = 0.0) -> None:
        super().__init__()
        self.tok_emb, self.pos_emb = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 4, drop) for _ in range(layers))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_emb(tokens) + self.pos_emb.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


class FusedBlock(nn.Module):
    """RMSNorm, one matrix for queries, keys and values, a gated MLP."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.scale = (width // 2) ** -0.5
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up, self.down = nn.Linear(width, 96), nn.Linear(width, 96), nn.Linear(96, width)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.c_attn(self.norm_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale).transpose(1, 2).flatten(2)
        x = x + self.drop(self.c_proj(y))
        h = self.norm_2(x)
        return x + self.drop(self.down(F.silu(self.gate(h)) * self.up(h)))


class Llama(nn.Module):
    def __init__(self, width: int = 40, layers: int = 3, drop: float = 0.0) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.wpe = nn.Parameter(0.02 * torch.randn(64, width))
        self.h = nn.ModuleList(FusedBlock(width, drop) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.norm(x))


class Recurrent(nn.Module):
    def __init__(self, width: int = 48, drop: float = 0.0) -> None:
        super().__init__()
        self.embedding, self.rnn = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, batch_first=True)
        self.drop, self.out = nn.Dropout(drop), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.drop(self.rnn(self.embedding(tokens))[0]))


class Perceptron(nn.Module):
    def __init__(self, drop: float = 0.0, width: int = 64, depth: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth - 1))
        self.drop, self.head = nn.Dropout(drop), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.inp(x))
        for layer in self.layers:
            x = self.drop(F.relu(layer(x)))
        return self.head(x)


class Images(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2))
        self.body = nn.Sequential(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.drop, self.fc = nn.Dropout(drop), nn.Linear(24 * 9, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.body(self.stem(x)).flatten(1)))


class Residual(nn.Module):
    """A residual MLP for regression, with LayerNorm in each branch."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.lift = nn.Linear(16, 48)
        self.body = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.SiLU(), nn.Dropout(drop), nn.Linear(96, 48)) for _ in range(3)
        )
        self.final = nn.Linear(48, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for branch in self.body:
            x = x + branch(x)
        return self.final(x).squeeze(-1)


class Deep(nn.Module):
    """Twelve plain layers without normalisation: what explodes."""

    def __init__(self, drop: float = 0.0, depth: int = 12) -> None:
        super().__init__()
        self.inp = nn.Linear(32, 48)
        self.stack = nn.ModuleList(nn.Linear(48, 48) for _ in range(depth))
        self.out = nn.Linear(48, 10)
        for layer in self.stack:
            nn.init.orthogonal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.stack:
            x = F.leaky_relu(layer(x), 0.5)
        return self.out(x)


@dataclass(frozen=True)
class Task:
    """`optimizer` is "adamw", "adam" or "sgd"; `lr` the healthy rate; `drop` of the model's constructor is its dropout; `names`
    the keys under which a loader hands out inputs and targets, none for a tuple."""

    name: str
    model: Callable[..., nn.Module]
    source: Callable[[int, int], Source]
    optimizer: str
    lr: float
    batch: int = 16
    clip: float | None = 1.0
    names: tuple[str, str] | None = None

    @property
    def tokens(self) -> bool:
        return self.source is Text

    def packed(self, batch: Batch) -> Any:
        return batch if self.names is None else dict(zip(self.names, batch, strict=True))

    def unpacked(self, batch: Any) -> Batch:
        return batch if self.names is None else (batch[self.names[0]], batch[self.names[1]])

    def loss(self, output: Tensor, target: Tensor, smoothing: float = 0.0) -> Tensor:
        if target.is_floating_point():
            return F.mse_loss(output.float(), target)
        return F.cross_entropy(output.float().flatten(0, -2), target.flatten(), label_smoothing=smoothing)


def _vectors(seed: int, batch: int) -> Source:
    return Clusters(seed, batch, (32,), 2.2)


def _pictures(seed: int, batch: int) -> Source:
    return Clusters(seed, batch, (1, 12, 12), 4.5)


FIRST = (
    Task("transformer", Transformer, Text, "adamw", 3e-3),
    Task("perceptron", Perceptron, _vectors, "adam", 2e-3, batch=64, clip=None),
    Task("images", Images, _pictures, "sgd", 0.03, batch=48, clip=None),
    Task("deep", Deep, _vectors, "sgd", 0.01, batch=64, clip=1.0),
)
SECOND = (
    Task("llama", Llama, Text, "adamw", 2e-3, batch=12),
    Task("recurrent", Recurrent, Text, "adam", 4e-3, batch=16),
    Task("residual", Residual, Surface, "adamw", 2e-3, batch=64, clip=None),
    Task("wide", lambda drop=0.0: Perceptron(drop, width=96, depth=5), _vectors, "sgd", 0.02, batch=48),
)

DEVELOPMENT = (*FIRST, *SECOND)


def warmup(step: int, steps: int = 20) -> float:
    return min(1.0, (step + 1) / steps)


def cosine(step: int, period: int) -> float:
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step % period) / period))
