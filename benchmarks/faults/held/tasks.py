"""Models and data that no rule was written on."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.faults.tasks import VOCABULARY, Batch, Clusters, Source, Task, Text


class Stripes(Source):
    """Pictures of stripes, one direction a class, at any phase: (float32 (batch, 1, 12, 12), int64 (batch,)). Another regime
    has stripes of another width."""

    WIDTHS = (0.9, 1.5)

    def batch(self, number: int) -> Batch:
        generator = self.generator(number)
        label = torch.randint(10, (self.batch_size,), generator=generator)
        phase = 2 * math.pi * torch.rand(self.batch_size, 1, 1, generator=generator)
        angle = (label * math.pi / 10).view(-1, 1, 1)
        at = torch.arange(12.0)
        wave = at.view(1, 12, 1) * torch.cos(angle) + at.view(1, 1, 12) * torch.sin(angle)
        clean = torch.cos(self.WIDTHS[self.regime] * wave + phase)
        return (clean + 0.9 * torch.randn(clean.shape, generator=generator)).unsqueeze(1), label


class FusedAttention(nn.Module):
    """One matrix for queries, keys and values, in this order of rows; causal or not."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query_key_value, self.dense = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.query_key_value(x).chunk(3, -1))
        return self.dense(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class ParallelLayer(nn.Module):
    """Attention and MLP side by side."""

    def __init__(self, width: int, drop: float, causal: bool = True) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = FusedAttention(width, 3, causal)
        self.mlp = nn.ModuleDict({"dense_h_to_4h": nn.Linear(width, 4 * width), "dense_4h_to_h": nn.Linear(4 * width, width)})
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.mlp["dense_4h_to_h"](F.gelu(self.mlp["dense_h_to_4h"](self.post_attention_layernorm(x))))
        return x + self.drop(self.attention(self.input_layernorm(x)) + hidden)


class Parallel(nn.Module):
    """Three layers without positions, untied head."""

    def __init__(self, drop: float = 0.0, width: int = 36) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(ParallelLayer(width, drop) for _ in range(3))
        self.final_layer_norm, self.embed_out = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_in(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed_out(self.final_layer_norm(x))


class Encoder(nn.Module):
    """torch's own layers, normalised after the residual sum."""

    def __init__(self, drop: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        layer = nn.TransformerEncoderLayer(width, 4, 96, drop, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) + self.embed_positions.weight[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.decoder(self.encoder(x, mask=mask, is_causal=True))


class CausalConv(nn.Module):
    def __init__(self, width: int, dilation: int, drop: float) -> None:
        super().__init__()
        self.pad = 2 * dilation
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 3, dilation=dilation)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(F.pad(self.norm(x).transpose(1, 2), (self.pad, 0)))
        return x + self.drop(F.glu(y, dim=1).transpose(1, 2))


class Convolutional(nn.Module):
    """A language model of dilated causal convolutions with gates."""

    def __init__(self, drop: float = 0.0, width: int = 48) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, width)
        self.convs = nn.ModuleList(CausalConv(width, 2**k, drop) for k in range(3))
        self.to_logits = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens)
        for conv in self.convs:
            x = conv(x)
        return self.to_logits(x)


class Patches(nn.Module):
    """A vision transformer on nine patches and a class token."""

    def __init__(self, drop: float = 0.0, width: int = 36) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, width, 4, 4)
        self.cls_token, self.pos_embed = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(0.1 * torch.randn(1, 10, width))
        self.blocks = nn.ModuleList(ParallelLayer(width, drop, causal=False) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), patches], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Residuals(nn.Module):
    """Convolutions with group normalisation and residual sums."""

    def __init__(self, drop: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.conv1, self.drop = nn.Conv2d(1, width, 3, 2, 1), nn.Dropout(drop)
        self.layer = nn.ModuleList(
            nn.Sequential(
                nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
                nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
            )
            for _ in range(2)
        )  # fmt: skip
        self.fc = nn.Linear(width * 36, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        for branch in self.layer:
            x = x + branch(x)
        return self.fc(self.drop(x.flatten(1)))


class Elman(nn.Module):
    """A plain recurrent language model: what explodes through time."""

    def __init__(self, drop: float = 0.0, width: int = 64) -> None:
        super().__init__()
        self.encoder, self.rnn = nn.Embedding(VOCABULARY, width), nn.RNN(width, width, batch_first=True, nonlinearity="relu")
        self.drop, self.decoder = nn.Dropout(drop), nn.Linear(width, VOCABULARY)
        with torch.no_grad():
            self.rnn.weight_hh_l0.copy_(torch.eye(width) / 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.drop(self.rnn(self.encoder(tokens))[0]))


class Tabular(nn.Module):
    """Batch normalisation after every layer."""

    def __init__(self, drop: float = 0.0, width: int = 72) -> None:
        super().__init__()
        sizes = (32, width, width, width, width)
        self.trunk = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in self.trunk)
        self.drop, self.logits = nn.Dropout(drop), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.trunk, self.norms, strict=True):
            x = self.drop(F.silu(norm(layer(x))))
        return self.logits(x)


HELD_OUT = (
    Task("parallel", Parallel, Text, "adamw", 2.5e-3, batch=14, names=("input_ids", "labels")),
    Task("encoder", Encoder, Text, "adam", 2e-3, batch=16),
    Task("convolutional", Convolutional, Text, "adamw", 4e-3, batch=12, clip=None),
    Task("elman", Elman, Text, "sgd", 0.15, batch=16, clip=0.5),
    Task("patches", Patches, Stripes, "adamw", 2e-3, batch=40, names=("pixel_values", "labels")),
    Task("residuals", Residuals, Stripes, "sgd", 0.02, batch=40, clip=2.0),
    Task("tabular", Tabular, lambda seed, batch: Clusters(seed, batch, (32,), 2.0), "adam", 1.5e-3, batch=56, clip=None),
)
