"""A small byte-level GPT: pre-norm blocks, causal attention, GELU, dropout, tied embeddings (the shape of GPT-2)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class ModelConfig:
    """2.7 million parameters as it stands. `context` is the longest window, in bytes."""

    vocabulary: int = 256
    context: int = 128
    width: int = 192
    heads: int = 6
    blocks: int = 6
    dropout: float = 0.1


class Block(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.project = nn.Linear(config.width, config.width)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> the same shape."""
        x = x + F.dropout(self._attend(self.norm_attention(x)), self.dropout, self.training)
        hidden = F.gelu(self.expand(self.norm_mlp(x)))
        return x + F.dropout(self.contract(hidden), self.dropout, self.training)

    def _attend(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class ByteGPT(nn.Module):
    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or ModelConfig()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.blocks))
        self.norm = nn.LayerNorm(config.width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * config.blocks) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, time, vocabulary) for int64 bytes (batch, time)."""
        x = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, window: Tensor) -> Tensor:
        """Mean cross-entropy in nats per byte of predicting each byte of `window` (batch, time + 1) from those before it."""
        logits = self(window[:, :-1])
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), window[:, 1:].reshape(-1))


def parameters(model: nn.Module) -> int:
    """How many numbers the model learns."""
    return sum(parameter.numel() for parameter in model.parameters())
