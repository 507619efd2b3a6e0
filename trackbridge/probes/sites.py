"""Which modules' outputs are measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from trackbridge import names
from trackbridge.config import ActivationsConfig
from trackbridge.errors import ConfigError, nearest

Named = tuple[str, nn.Module]
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
NEVER_RUN = (*CONTAINERS, nn.ParameterList, nn.ParameterDict)


def choose(model: nn.Module, config: ActivationsConfig) -> list[Named]:
    """The sites of one model, by clean name, in the model's order.

    "blocks" are the children of the outermost lists of alike, composite modules (a transformer's layers), else the model's
    own children; "blocks+branches" adds each block's parts that feed its residual stream; "leaf" is every module without
    children. The output of the largest embedding outside the blocks is always added. A list names modules by pattern.

    Raises `ConfigError` for a pattern that matches no module.
    """
    if config.sites == "none":
        return []
    if isinstance(config.sites, list):
        return _matching(model, config.sites)
    if config.sites == "leaf":
        return [(name, module) for name, module in modules_of(model) if _is_leaf(module)]
    blocks = _blocks(model)
    chosen = dict(blocks)
    if config.sites == "blocks+branches":
        for name, block in blocks:
            chosen.update((f"{name}.{part}", module) for part, module in _branches(block))
    chosen.update(_largest_table(model, blocks))
    order = {id(module): place for place, (_, module) in enumerate(modules_of(model))}
    return sorted(chosen.items(), key=lambda pair: order.get(id(pair[1]), len(order)))


def embedding(model: nn.Module) -> list[Named]:
    """The largest embedding outside the blocks, if there is one: the table of tokens."""
    return _largest_table(model, _blocks(model))


def blocks(model: nn.Module) -> list[Named]:
    """The blocks of a model, inside of their wrappers; none where it has no list of them."""
    return [(name, _inner(block)) for name, block in _lists_of_blocks(model)]


def modules_of(model: nn.Module) -> Iterator[Named]:
    """Every module but wrappers, by clean name."""
    seen: set[str] = set()
    for name, module in model.named_modules():
        clean = names.legal(names.clean(name))
        if clean and clean not in seen:
            seen.add(clean)
            yield clean, module


def _blocks(model: nn.Module) -> list[Named]:
    return _lists_of_blocks(model) or list(_children(model, ""))


def _lists_of_blocks(model: nn.Module) -> list[Named]:
    found: list[Named] = []
    for name, module in modules_of(model):
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not any(name.startswith(f"{block}.") for block, _ in found):
            children = list(module.named_children())
            kinds = {type(_inner(child)) for _, child in children}
            if len(children) > 1 and len(kinds) == 1 and any(True for _ in children[0][1].children()):
                found += [(f"{name}.{child_name}", child) for child_name, child in children]
    return found


def _children(module: nn.Module, above: str) -> Iterator[Named]:
    """Children, with lists and wrappers opened: a ModuleList itself never runs."""
    for name, child in module.named_children():
        path = names.legal(names.clean(f"{above}.{name}" if above else name))
        if isinstance(child, CONTAINERS) or not path:
            yield from _children(child, path)
        elif any(True for _ in child.children()) or _is_leaf(child):
            yield path, child


def _branches(block: nn.Module) -> list[Named]:
    """Composite children (attention, MLP); in a block of bare layers the ones that give the width the block starts with."""
    inner = _inner(block)
    composite = [(name, child) for name, child in inner.named_children() if any(True for _ in child.children())]
    if composite:
        return composite
    linear = [(name, child) for name, child in inner.named_children() if isinstance(child, nn.Linear)]
    return [(name, child) for name, child in linear if child.out_features == linear[0][1].in_features]


def _largest_table(model: nn.Module, blocks: Iterable[Named]) -> list[Named]:
    inside = tuple(f"{name}." for name, _ in blocks)
    tables = [
        (name, module)
        for name, module in modules_of(model)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not name.startswith(inside)
    ]
    return [max(tables, key=lambda pair: pair[1].num_embeddings)] if tables else []


def _matching(model: nn.Module, patterns: list[str]) -> list[Named]:
    modules = list(modules_of(model))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name, _ in modules):
            raise ConfigError(
                f"activations.sites: no module matches {pattern!r}{nearest(pattern, [name for name, _ in modules])}"
            )
    return [(name, module) for name, module in modules if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _is_leaf(module: nn.Module) -> bool:
    return not any(True for _ in module.children()) and not isinstance(module, (nn.Identity, *NEVER_RUN))


def _inner(module: nn.Module) -> nn.Module:
    """The module inside wrappers (compiled, checkpointed)."""
    for wrapper in names.WRAPPERS:
        while isinstance(inside := getattr(module, wrapper, None), nn.Module):
            module = inside
    return module
