"""A GraphQL executor without a schema: objects are dicts, a callable value is called with the field's arguments.

Aliases, variables with defaults, fragments and ``@include``/``@skip`` work as the specification says. A field that an
object does not have becomes null and is counted.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graphql import FieldNode, FragmentDefinitionNode, FragmentSpreadNode, InlineFragmentNode, SelectionSetNode, parse
from graphql import OperationDefinitionNode as Operation
from graphql.utilities import value_from_ast_untyped

Object = dict[str, Any]
"""A GraphQL object. ``__typename`` selects fragments; an object without one matches every fragment."""


@dataclass
class Executor:
    unknown: Counter[str]

    def run(self, root: Object, text: str, variables: Mapping[str, Any] | None, name: str | None = None) -> Any:
        """The ``data`` of the reply. `name` chooses among several operations; the client may send it empty."""
        document = parse(text, no_location=True)
        operations = [node for node in document.definitions if isinstance(node, Operation)]
        operation = next((node for node in operations if node.name and node.name.value == name), operations[0])
        given: dict[str, Any] = {}
        for node in operation.variable_definitions or ():
            if node.default_value is not None:
                given[node.variable.name.value] = value_from_ast_untyped(node.default_value)
        given.update(variables or {})
        fragments = {node.name.value: node for node in document.definitions if isinstance(node, FragmentDefinitionNode)}
        return _Query(given, fragments, self.unknown).select(root, operation.selection_set)


@dataclass
class _Query:
    variables: Mapping[str, Any]
    fragments: Mapping[str, FragmentDefinitionNode]
    unknown: Counter[str]

    def select(self, value: Any, wanted: SelectionSetNode | None) -> Any:
        if wanted is None or value is None:
            return value
        if isinstance(value, list):
            return [self.select(item, wanted) for item in value]
        out: Object = {}
        for node in wanted.selections:
            if not self.included(node):
                continue
            if isinstance(node, FieldNode):
                out[(node.alias or node.name).value] = self.field(value, node)
            elif (part := self.fragment(value, node)) is not None:
                _merge(out, self.select(value, part))
        return out

    def field(self, value: Object, node: FieldNode) -> Any:
        name = node.name.value
        if name not in value and name != "__typename":
            self.unknown[f"{value.get('__typename', '?')}.{name}"] += 1
        found = value.get(name)
        if callable(found):
            found = found(**{a.name.value: value_from_ast_untyped(a.value, dict(self.variables)) for a in node.arguments})
        return self.select(found, node.selection_set)

    def fragment(self, value: Object, node: Any) -> SelectionSetNode | None:
        """The selections of a fragment if it applies to `value`. An interface's name applies through ``__interface``."""
        target = self.fragments[node.name.value] if isinstance(node, FragmentSpreadNode) else node
        assert isinstance(target, (FragmentDefinitionNode, InlineFragmentNode))
        on = target.type_condition.name.value if target.type_condition else None
        known = {None, value.get("__typename"), value.get("__interface")}
        return target.selection_set if on in known or "__typename" not in value else None

    def included(self, node: Any) -> bool:
        for directive in node.directives or ():
            on = bool(value_from_ast_untyped(directive.arguments[0].value, dict(self.variables)))
            if on != (directive.name.value == "include"):
                return False
        return True


def _merge(into: Object, more: Object) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def node_id(kind: str, key: object) -> str:
    """An opaque global id, as W&B makes them."""
    return base64.b64encode(f"{kind}:{key}".encode()).decode()


def connection(
    items: Iterable[Any], node: Callable[[Any], Any] = lambda item: item, first: int | None = None, after: str | None = None
) -> Object:
    """A page of `items` in relay form. Cursors are positions."""
    everything: Sequence[Any] = list(items)
    start = int(after or 0)
    stop = len(everything) if first is None else min(len(everything), start + first)
    return {
        "totalCount": len(everything),
        "edges": [{"node": node(everything[i]), "cursor": str(i + 1), "version": None} for i in range(start, stop)],
        "pageInfo": {"__typename": "PageInfo", "endCursor": str(stop), "hasNextPage": stop < len(everything)},
    }
