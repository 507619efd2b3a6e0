"""The largest attention logit of each block, over some of its queries.

While a block runs, a mode of torch's function dispatch sees the calls of `scaled_dot_product_attention`, whichever module
makes them: queries and keys as they are (rotated, normalised), the mask and the scale. The logits of evenly spaced query
positions of every sequence and head, the last position among them, are worked out again in float32 against all keys they may
see. Where a model works out its own scores, what it hands to `softmax` (four dimensions, over the last one) is looked at
instead. So the value is exact for those queries, and a lower bound for all of them.

Of `nn.MultiheadAttention` queries and keys are projected again. Not seen: `flex_attention`, and kernels that are
called past torch's functions.
"""

from __future__ import annotations

import logging
import math
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.hooks import Inert, take_off
from trackbridge.probes.base import BoolArray, Stats
from trackbridge.probes.forward_hooks import Counted, Valve
from trackbridge.probes.gates import ALWAYS, LOGITS, Gates
from trackbridge.probes.outputs import in_memory
from trackbridge.probes.sites import blocks
from trackbridge.probes.subject import Subject, prefix
from trackbridge.records import FloatArray
from trackbridge.slab import Field, Slab

logger = logging.getLogger("trackbridge")

STATISTIC = "sampled_logit_max"
WATCHED = (F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax, torch.softmax, Tensor.softmax)


class Attention:
    """All blocks of the watched models. `targets`: (block, its model, the mode that is on while it runs)."""

    def __init__(self, subject: Subject, config: ActivationsConfig, gates: Gates) -> None:
        self._gates = gates
        self.part = gates.valves[LOGITS].part
        self.queries = config.attention_queries
        self.targets: list[tuple[nn.Module, nn.Module, Watching]] = []
        site_names: list[str] = []
        passed: list[str] = []
        for key, model in subject.models.items():
            for name, block in blocks(model) if config.attention_every else ():
                if _compiled_inside(block):
                    passed.append(name)
                else:
                    self.targets.append((block, model, Watching(self, len(site_names))))
                    site_names.append(prefix(key) + name)
        self.series: tuple[str, ...] = tuple(names.act(name, STATISTIC) for name in site_names)
        self.fields: tuple[Field, ...] = (
            Field("logit", len(site_names), over_ranks="largest"),
            Field("logit_seen", len(site_names)),
        )
        if config.attention_every and not site_names and not passed:
            logger.warning("trackbridge: no attention logits: no list of blocks was found in the watched models.")
        if passed:
            logger.warning(
                "trackbridge: no attention logits of %d blocks (%s%s): compiled before run.watch, they cannot be looked into.",
                len(passed), ", ".join(passed[:5]), ", ..." if len(passed) > 5 else "",
            )  # fmt: skip

    def bind(self, slab: Slab) -> None:
        self.slab = slab.tensor
        self.place, self.seen, self.gate = slab.offset("logit"), slab.offset("logit_seen"), slab.offset(Gates.FIELD)
        if self.targets:
            _gates_of[slab.tensor.data_ptr()] = self._gates

    def collect(self) -> None:
        pass

    def finalize(self, stats: Stats) -> tuple[FloatArray, BoolArray]:
        return stats["logit"], stats["logit_seen"] > 0

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None, site: int) -> None:
        """Look at the logits of some queries, (..., heads, L, E), with keys (..., heads or groups of them, S, E)."""
        length = q.shape[-2]
        step = -(-length // self.queries)
        first = (length - 1) % step
        q, k = q.detach()[..., first::step, :], k.detach()
        if mask is not None:
            mask = mask.detach()
            mask = mask[..., first::step, :] if mask.shape[-2] == length else mask
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        spacing = (first, step) if causal else (0, 0)
        self._note(q, k, mask, float(scale), *spacing, site)

    def softmax(self, x: Tensor, site: int) -> None:
        """Look at some rows of scores, (batch, heads, L, S)."""
        length = x.shape[-2]
        step = -(-length // self.queries)
        self._note(x.detach()[..., (length - 1) % step :: step, :], None, None, 1.0, 0, 0, site)

    def _note(self, q: Tensor, k: Tensor | None, mask: Tensor | None, scale: float, first: int, step: int, site: int) -> None:
        traced = torch.compiler.is_compiling()
        note: Any = torch.ops.trackbridge.logits if traced else largest
        gate = self.gate + (LOGITS if traced else ALWAYS)
        note(q, k, mask, scale, first, step, self.slab, self.place + site, self.seen + site, gate)


class Watching(TorchFunctionMode):
    """Sees the calls of torch's functions in one block."""

    def __init__(self, attention: Attention, site: int) -> None:
        super().__init__()
        self.attention = attention
        self.part = attention.part
        self.site = site

    def on(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def off(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func in WATCHED:
            if torch.compiler.is_compiling():
                self._look(func, args, kwargs)
            else:
                with self.part:
                    self._look(func, args, kwargs)
        return result

    @torch.no_grad()
    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        if not all(in_memory(given) for given in (*args, *kwargs.values()) if isinstance(given, Tensor)):
            return
        if func is F.scaled_dot_product_attention:
            self._attended(*args, **kwargs)
        elif func is F.multi_head_attention_forward:
            self._multi_head(*args, **kwargs)
        else:
            self._weighted(*args, **kwargs)

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> None:  # fmt: skip
        if query.numel() and key.numel():
            self.attention.scores(query, key, attn_mask, is_causal, scale, self.site)

    def _multi_head(
        self, query: Tensor, key: Tensor, value: Tensor, embed_dim_to_check: int, num_heads: int,
        in_proj_weight: Tensor | None, in_proj_bias: Tensor | None, *others: Any,
        key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None, use_separate_proj_weight: bool = False,
        q_proj_weight: Tensor | None = None, k_proj_weight: Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """`nn.MultiheadAttention`, whose inside no mode sees: its queries and keys are worked out again. Shapes (L, N, E)."""
        if query.dim() != 3 or not query.numel() or not key.numel() or any(other is not None for other in others[:2]):
            return  # without a batch, or with keys of its own
        width = query.shape[-1]
        weights = (q_proj_weight, k_proj_weight) if use_separate_proj_weight or in_proj_weight is None else (
            in_proj_weight[:width], in_proj_weight[width : 2 * width]
        )  # fmt: skip
        biases = (None, None) if in_proj_bias is None else (in_proj_bias[:width], in_proj_bias[width : 2 * width])
        q, k = (
            F.linear(x, weight, bias).view(*x.shape[:2], num_heads, -1).permute(1, 2, 0, 3)
            for x, weight, bias in zip((query, key), weights, biases, strict=True)
            if weight is not None
        )
        masks = [_added(mask, q) for mask in (attn_mask, key_padding_mask) if mask is not None]
        if attn_mask is not None and attn_mask.dim() == 3:
            masks[0] = masks[0].view(-1, num_heads, *attn_mask.shape[1:])
        if key_padding_mask is not None:
            masks[-1] = masks[-1][:, None, None, :].expand(-1, -1, q.shape[2], -1)
        self.attention.scores(q, k, sum(masks) if masks else None, False, None, self.site)  # type: ignore[arg-type]

    def _weighted(self, input: Tensor, dim: int | None = None, *others: Any, **options: Any) -> None:
        if input.dim() == 4 and dim in (-1, 3) and input.numel():
            self.attention.softmax(input, self.site)


class Around(Counted):
    """Pre-forward hook of a block: its mode goes on, in calls that count. `leave` takes it off again."""

    def __init__(self, valve: Valve, module: nn.Module, model: nn.Module, mode: Watching, *, inside_compiled: bool) -> None:
        super().__init__(valve, module, model, inside_compiled=inside_compiled)
        self.mode = mode

    def __call__(self, module: nn.Module, inputs: Any, output: Any = None) -> None:
        if torch.compiler.is_compiling():
            if self.in_graph(module):
                self.mode.on()
        elif self.valve.open and self.counts(module):
            take_off(self.mode)
            self.mode.on()

    def reset(self) -> None:
        super().reset()
        take_off(self.mode)


class After(Inert):
    """Forward hook of the same block."""

    def __init__(self, around: Around) -> None:
        self.around = around

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        around = self.around
        if torch.compiler.is_compiling():
            if around.in_graph(module):
                around.mode.off()
        elif id(module) == around.module:
            take_off(around.mode)


def largest(
    q: Tensor, k: Tensor | None, mask: Tensor | None, scale: float, first: int, step: int,
    slab: Tensor, place: int, seen: int, gate: int,
) -> None:  # fmt: skip
    """The largest logit of the queries `q` with the keys `k` to ``slab[place]``, if ``slab[gate]`` is set and it is larger than
    what is there; without `k`, `q` has the logits. Query i is at position first + i * step of a causal mask; step 0: there is
    no such mask. No sync."""
    if slab.device.type == "cpu" and not slab[gate] > 0:
        return
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        dtype = torch.promote_types(q.dtype, torch.float32)
        logits = q.to(dtype)
        if k is not None:
            groups, heads = k.shape[-3] if k.dim() > 3 else 1, q.shape[-3] if q.dim() > 3 else 1
            logits = logits * scale
            if groups != heads:  # grouped queries
                logits = logits.reshape(*q.shape[:-3], groups, -1, q.shape[-1])
            logits = (logits @ k.to(dtype).transpose(-1, -2)).reshape(*q.shape[:-1], k.shape[-2])
        if mask is not None:
            logits = torch.where(mask, logits, -math.inf) if mask.dtype == torch.bool else logits + mask
        if step:
            position = first + step * torch.arange(logits.shape[-2], device=logits.device)
            key = torch.arange(logits.shape[-1], device=logits.device)
            logits = torch.where(key <= position[:, None], logits, -math.inf)
        value = logits.amax().to(slab)
        known = slab[seen] > 0
        value = torch.where(known, torch.maximum(slab[place], value), value)
        on = slab[gate] > 0
        slab[place] = torch.where(on, value, slab[place])
        slab[seen] = torch.where(on, 1.0, slab[seen])


_gates_of: WeakValueDictionary[int, Gates] = WeakValueDictionary()


@torch.library.custom_op("trackbridge::logits", mutates_args={"slab"})
def largest_compiled(
    q: Tensor, k: Tensor | None, mask: Tensor | None, scale: float, first: int, step: int,
    slab: Tensor, place: int, seen: int, gate: int,
) -> None:  # fmt: skip
    """`largest`, left out on steps outside of the cadence. In a CUDA graph, which cannot leave anything out, it always runs."""
    gates = _gates_of.get(slab.data_ptr())
    shut = gates is not None and (gates.closed or not gates.due[LOGITS])
    if shut and not (slab.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    largest(q, k, mask, scale, first, step, slab, place, seen, gate)


@largest_compiled.register_fake
def _(
    q: Tensor, k: Tensor | None, mask: Tensor | None, scale: float, first: int, step: int,
    slab: Tensor, place: int, seen: int, gate: int,
) -> None:  # fmt: skip
    return None


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask of `nn.MultiheadAttention`, True where nothing is to be seen, as what is added to logits."""
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _compiled_inside(block: nn.Module) -> bool:
    """True where the mode would meet a region that was compiled without it, which torch would then compile again."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod") for module in block.modules()
    )
