"""What one call of a torch function costs: the multiplications and additions of its matrix products, 2 FLOPs each pair.

Everything else (norms, activations, softmax, lookups) is not counted, as everywhere in the literature (arXiv:2204.02311,
appendix B). A call is a list of `Product`s, because each input that needs a gradient costs one more product of the same size in
the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Flops: TypeAlias = "float | Tensor"
"""A number, or a 0-d tensor where it depends on values that are on a device: to look at it now would stop that device."""


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product: FLOPs forward, and how many more products of that size its gradients take (0, 1 or 2)."""

    flops: Flops
    gradients: int
    dtype: torch.dtype
    attention: bool = False


HIDDEN = -1e8
"""Far below any bias of positions; a softmax makes 0 of it."""

Cost: TypeAlias = Callable[..., Sequence[Product]]
COSTS: dict[Any, Cost] = {}


def cost(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, full_attention: bool) -> Sequence[Product]:
    """The products of ``function(*args, **kwargs)``; none for a function that has none. `full_attention` counts what a
    mask hides as well."""
    rule = COSTS.get(function) or NAMED.get((getattr(function, "__module__", None), getattr(function, "__name__", "")))
    if rule is None:
        return ()
    if rule in MASKED:
        return rule(*args, **kwargs, full=full_attention)
    return rule(*args, **kwargs)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """Of this device's part: a DTensor counts with its shard."""
    return tuple(getattr(tensor, "_local_tensor", tensor).shape)


def _dtype(tensor: Tensor) -> torch.dtype:
    kind = tensor.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and tensor.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


def _product(flops: float, *inputs: Tensor) -> list[Product]:
    return [Product(flops, sum(bool(tensor.requires_grad) for tensor in inputs), _dtype(inputs[0]))]


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[Product]:
    return _product(2.0 * math.prod(shape(input)) * math.prod(shape(weight)[:-1]), input, weight)


def _matmul(*args: Tensor, **named: Any) -> Sequence[Product]:
    """Of the last two tensors, whatever their names; what they are added to comes before them."""
    input, other = (*args, *(value for name, value in named.items() if isinstance(value, Tensor) and name != "out"))[-2:]
    a, b = shape(input), shape(other)
    rows = a[-2] if len(a) > 1 else 1
    columns = b[-1] if len(b) > 1 else 1
    batch = math.prod(np.broadcast_shapes(a[:-2], b[:-2]))
    return _product(2.0 * batch * rows * a[-1] * columns, input, other)


def _inner(input: Tensor, other: Tensor, **kwargs: Any) -> Sequence[Product]:
    """Over the last dimension of both."""
    return _product(2.0 * math.prod(shape(input)) * math.prod(shape(other)[:-1]), input, other)


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, **kwargs: Any) -> Sequence[Product]:
    places = range(-dims, 0) if isinstance(dims, int) else dims[0]
    inner = math.prod(shape(a)[int(place)] for place in places)
    return _product(2.0 * math.prod(shape(a)) * math.prod(shape(b)) / max(inner, 1), a, b)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Sequence[Product]:
    rows = math.prod(shape(input1)[:-1])
    return _product(2.0 * rows * math.prod(shape(weight)), input1, input2, weight)


def _grouped(mat_a: Tensor, mat_b: Tensor, offs: Tensor | None = None, **kwargs: Any) -> Sequence[Product]:
    """Rows of `mat_a` belong to one of the groups each: a group's matrix sees its own rows only."""
    a, b = shape(mat_a), shape(mat_b)
    if len(a) == 2 and len(b) == 2:  # the sum over a group is a matrix of its own
        flops = 2.0 * a[0] * a[1] * b[1]
    else:
        flops = 2.0 * math.prod(a) * b[-1] if len(b) == 3 else 2.0 * math.prod(b) * a[-2]
    return _product(flops, mat_a, mat_b)


def _convolution(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Sequence[Product]:
    names = ("stride", "padding", "dilation", "groups")
    given = dict(zip(names, args, strict=False)) | kwargs
    space = len(weight.shape) - 2
    outputs = _conv_output(shape(input)[-space:], shape(weight)[2:], given)
    images = math.prod(shape(input)[: -space - 1])
    return _product(2.0 * images * math.prod(outputs) * math.prod(shape(weight)), input, weight)


def _transposed(input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any) -> Sequence[Product]:
    space = len(weight.shape) - 2
    images = math.prod(shape(input)[: -space - 1])
    inputs = math.prod(shape(input)[-space:])
    return _product(2.0 * images * inputs * math.prod(shape(weight)), input, weight)


def _any_convolution(
    input: Tensor, weight: Tensor, bias: Tensor | None, stride: Any, padding: Any, dilation: Any, transposed: bool,
    output_padding: Any, groups: int,
) -> Sequence[Product]:  # fmt: skip
    if transposed:
        return _transposed(input, weight)
    return _convolution(input, weight, bias, stride, padding, dilation, groups)


def _conv_output(size: Sequence[int], kernel: Sequence[int], given: Mapping[str, Any]) -> list[int]:
    def each(name: str, default: int) -> list[Any]:
        value = given.get(name, default)
        return list(value) * (len(size) if len(value) == 1 else 1) if isinstance(value, (tuple, list)) else [value] * len(size)

    if given.get("padding") == "same":
        return list(size)
    padding = [0] * len(size) if given.get("padding") == "valid" else each("padding", 0)
    return [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(size, kernel, each("stride", 1), padding, each("dilation", 1), strict=True)
    ]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    full: bool,
    **kwargs: Any,
) -> Sequence[Product]:
    """Scores and weighted values of (..., heads, length, width). Grouped keys and values are shared, not recomputed: it is the
    query's heads that count."""
    q, k, v = shape(query), shape(key), shape(value)
    heads = math.prod(q[:-2])
    pairs: Flops = float(q[-2] * k[-2])
    if is_causal and not full:
        pairs = visible(q[-2], k[-2])
    elif isinstance(attn_mask, Tensor) and not full:
        pairs = pairs * _share(attn_mask)
    scores = bool(query.requires_grad) + bool(key.requires_grad)
    dtype = _dtype(query)
    return [
        Product(2.0 * heads * pairs * q[-1], scores, dtype, attention=True),
        Product(2.0 * heads * pairs * v[-1], bool(value.requires_grad) + bool(scores), dtype, attention=True),
    ]


def visible(queries: int, keys: int) -> float:
    """(query, key) pairs under the causal mask of `scaled_dot_product_attention`: query i sees keys 0 .. i."""
    short = min(queries, keys)
    return short * (short + 1) / 2 + (queries - short) * keys


def _share(mask: Tensor) -> Flops:
    """The part of the (query, key) pairs that a mask lets through; all of them where it has no values. What is added to a score
    hides it from `HIDDEN` on: libraries take the least number of the dtype for it as often as minus infinity."""
    if is_fake(mask):
        return 1.0
    shown = mask if mask.dtype == torch.bool else mask > max(HIDDEN, torch.finfo(mask.dtype).min / 2)
    return _seen(shown.count_nonzero().double() / max(shown.numel(), 1))


def _seen(number: Tensor) -> Flops:
    return float(number) if number.device.type == "cpu" else number.detach()


def is_fake(tensor: Tensor) -> bool:
    """True for a tensor that has a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor) or tensor.is_meta


def _packed(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, *args: Any, full: bool, **kwargs: Any
) -> Sequence[Product]:
    """Documents packed end to end, (tokens, heads, width): each sees itself only, causally by `is_causal` or a window."""
    causal = bool(kwargs.get("is_causal", args[2] if len(args) > 2 else False))
    causal = causal or tuple(kwargs.get("window_size", (-1, -1))) == (-1, 0)
    q, v = shape(query), shape(value)
    if is_fake(cu_seq_q):
        pairs: Flops = float(q[0] * shape(key)[0])
    else:
        queries, keys = cu_seq_q.diff().double(), cu_seq_k.diff().double()
        short = torch.minimum(queries, keys)
        seen = short * (short + 1) / 2 + (queries - short) * keys if causal and not full else queries * keys
        pairs = _seen(seen.sum())
    scores = bool(query.requires_grad) + bool(key.requires_grad)
    dtype, heads = _dtype(query), q[1]
    return [
        Product(2.0 * heads * q[-1] * pairs, scores, dtype, attention=True),
        Product(2.0 * heads * v[-1] * pairs, bool(value.requires_grad) + bool(scores), dtype, attention=True),
    ]


def _flex(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, *args: Any, **kwargs: Any
) -> Sequence[Product]:
    """A block mask says how many blocks are looked at."""
    full = kwargs.pop("full")
    products = _attention(query, key, value, full=True)
    if full or block_mask is None or is_fake(block_mask.kv_num_blocks):
        return products
    blocks = block_mask.kv_num_blocks.sum()
    if block_mask.full_kv_num_blocks is not None:
        blocks = blocks + block_mask.full_kv_num_blocks.sum()
    size_q, size_k = block_mask.BLOCK_SIZE
    every = math.prod(block_mask.kv_num_blocks.shape[:2]) * shape(query)[-2] * shape(key)[-2]
    shown = _seen(blocks.double() * (size_q * size_k / every))
    return [Product(p.flops * shown, p.gradients, p.dtype, attention=True) for p in products]


def _multi_head(
    query: Tensor, key: Tensor, value: Tensor, embed_dim: int, num_heads: int, in_proj_weight: Tensor | None,
    in_proj_bias: Any, bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Tensor,
    out_proj_bias: Any, *args: Any, full: bool, **kwargs: Any,
) -> Sequence[Product]:  # fmt: skip
    """`nn.MultiheadAttention`: three projections, attention, and the projection of its result. (length, batch, width)."""
    weights: list[Any] = (
        [kwargs.get(f"{name}_proj_weight") for name in "qkv"] if in_proj_weight is None else [in_proj_weight] * 3
    )
    products: list[Product] = []
    for tensor, weight in zip((query, key, value), weights, strict=True):
        flops = 2.0 * math.prod(shape(tensor)) * embed_dim
        products.append(Product(flops, bool(tensor.requires_grad) + bool(weight.requires_grad), _dtype(query)))
    learns = any(t.requires_grad for t in (query, key, value, *weights))
    length, others = shape(query)[0], shape(key)[0]
    batch = math.prod(shape(query)[1:-1])
    pairs: Flops = float(batch * length * others)
    mask = kwargs.get("attn_mask")
    if kwargs.get("is_causal") and not full:
        pairs = batch * visible(length, others)
    elif isinstance(mask, Tensor) and not full:
        pairs = pairs * _share(mask if mask.is_floating_point() else ~mask)
    products += [Product(2.0 * embed_dim * pairs, 2 * learns, _dtype(query), attention=True)] * 2
    flops = 2.0 * batch * length * embed_dim * shape(out_proj_weight)[0]
    products.append(Product(flops, learns + bool(out_proj_weight.requires_grad), _dtype(query)))
    return products


def _recurrent(input: Tensor, state: Any, weights: Sequence[Tensor], *args: Any, **kwargs: Any) -> Sequence[Product]:
    """RNN, LSTM and GRU: every step multiplies with every weight matrix once. (length, batch, width), batch first, or packed,
    (steps of all sequences, width): then the sizes of the batches come before the state."""
    if isinstance(state, Tensor) and not state.is_floating_point():
        weights = args[0]
    steps = math.prod(shape(input)[:-1])
    products = []
    for weight in weights:
        if weight.dim() == 2:
            inner = input.requires_grad or any(w.requires_grad for w in weights)
            products.append(Product(2.0 * steps * math.prod(shape(weight)), inner + bool(weight.requires_grad), _dtype(input)))
    return products


def _cell(input: Tensor, state: Any, w_ih: Tensor, w_hh: Tensor, *args: Any) -> Sequence[Product]:
    """One step of one layer of these."""
    hidden = state if isinstance(state, Tensor) else state[0]
    return [*_linear(input, w_ih), *_linear(hidden, w_hh)]


def _einsum(equation: Any, *operands: Any, **kwargs: Any) -> Sequence[Product]:
    """Two operands: every combination of their indices once. More are contracted from left to right."""
    if not isinstance(equation, str):
        return ()
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "." in equation or len(terms) != len(tensors) or len(terms) < 2:
        return _ellipsis(terms, tensors)
    size = {
        letter: n for term, tensor in zip(terms, tensors, strict=True) for letter, n in zip(term, shape(tensor), strict=True)
    }
    products, left, learns = [], terms[0], bool(tensors[0].requires_grad)
    for place in range(1, len(terms)):
        letters = set(left) | set(terms[place])
        learns_too = bool(tensors[place].requires_grad)
        flops = 2.0 * math.prod(size[letter] for letter in letters)
        products.append(Product(flops, learns + learns_too, _dtype(tensors[0])))
        rest = set(output).union(*terms[place + 1 :])
        left, learns = "".join(letter for letter in letters if letter in rest), learns or learns_too
    return products


def _ellipsis(terms: Sequence[str], tensors: Sequence[Tensor]) -> Sequence[Product]:
    """Two operands with ``...``: the broadcast dimensions count once."""
    if len(terms) != 2 or len(tensors) != 2:
        return ()
    size: dict[str, int] = {}
    spread: list[tuple[int, ...]] = []
    for term, tensor in zip(terms, tensors, strict=True):
        before, dots, after = term.partition("...")
        dims = shape(tensor)
        size |= dict(zip(before, dims, strict=False)) | dict(zip(reversed(after), reversed(dims), strict=False))
        spread.append(dims[len(before) : len(dims) - len(after)] if dots else ())
    flops = 2.0 * math.prod(size.values()) * math.prod(np.broadcast_shapes(*spread))
    return _product(flops, *tensors)


def _spelled(*names: str) -> tuple[Any, ...]:
    """Functions of torch and methods of tensors."""
    return tuple(getattr(place, name) for name in names for place in (torch, Tensor) if hasattr(place, name))


def _register() -> None:
    rules: tuple[tuple[Cost, tuple[Any, ...]], ...] = (
        (_linear, (F.linear,)),
        (_matmul, (torch.matmul, torch.linalg.matmul, torch.Tensor.__matmul__)),
        (_matmul, _spelled("mm", "bmm", "mv", "dot", "vdot", "matmul", "addmm", "addmv", "baddbmm", "addbmm", "addmm_",
                           "addmv_", "baddbmm_", "addbmm_")),
        (_inner, _spelled("inner")),
        (_tensordot, (torch.tensordot,)),
        (_bilinear, (F.bilinear, torch.bilinear)),
        (_any_convolution, (torch.convolution,)),
        (_convolution, (F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d)),
        (_transposed, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)),
        (_attention, (F.scaled_dot_product_attention,)),
        (_multi_head, (F.multi_head_attention_forward,)),
        (_recurrent, (torch._VF.lstm, torch._VF.gru, torch._VF.rnn_tanh, torch._VF.rnn_relu)),
        (_cell, (torch._VF.lstm_cell, torch._VF.gru_cell, torch._VF.rnn_tanh_cell, torch._VF.rnn_relu_cell)),
        (_einsum, (torch.einsum,)),
    )  # fmt: skip
    for rule, functions in rules:
        COSTS.update(dict.fromkeys(functions, rule))
    for name in ("_grouped_mm", "grouped_mm"):
        for place in (torch, F):
            if hasattr(place, name):
                COSTS[getattr(place, name)] = _grouped


NAMED: dict[tuple[Any, str], Cost] = {  # importing these modules takes the compiler along
    ("torch.nn.attention.flex_attention", "flex_attention"): _flex,
    ("torch.nn.attention.varlen", "varlen_attn"): _packed,
}
MASKED: frozenset[Cost] = frozenset((_attention, _flex, _packed, _multi_head))


_register()
