"""Pictures of graphs: as text, and as Graphviz DOT. They read a graph, they do not change it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .graph import Graph
    from .node import Node

__all__ = ["dot", "text"]


def text(graph: Graph) -> str:
    """One line a node: name, kind, parameters, what it waits for; bodies indented below their node."""
    edges = sum(len(g.edges()) for g in _graphs(graph))
    nodes = sum(1 for _ in graph.walk())
    return "\n".join([f"graph {graph.name!r} on {graph.device.id}: {nodes} nodes, {edges} edges", *_lines(graph, "  ")])


def _graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for body in node.bodies.values():
            yield from _graphs(body)


def _lines(graph: Graph, indent: str) -> Iterator[str]:
    waits: dict[Node, list[str]] = {}
    for edge in graph.edges():
        waits.setdefault(edge.target, []).append(_source(edge.source, edge.port))
    width = max((len(node.name) for node in graph.nodes), default=0)
    for node in graph.nodes:
        after = f"  after {', '.join(waits[node])}" if node in waits else ""
        yield f"{indent}{node.name:{width}}  {node.kind}  {node.said()}".rstrip() + after
        for label, body in node.bodies.items():
            if label:
                yield f"{indent}  {label}:"
            yield from _lines(body, indent + ("    " if label else "  "))


def _source(node: Node, port: str) -> str:
    return node.name if port == "full" else f"{node.name}.{port}"


def dot(graph: Graph) -> str:
    """Graphviz DOT: a box a node, a cluster a body, dashed edges for ports other than the end of a node."""
    lines = [f"digraph {_quoted(graph.name)} {{", '  node [shape=box, fontname="monospace"];', "  compound=true;"]
    lines += _dot_lines(graph, "  ")
    return "\n".join([*lines, "}", ""])


def _dot_lines(graph: Graph, indent: str) -> Iterator[str]:
    for node in graph.nodes:
        label = _quoted("\n".join(filter(None, (node.name, node.kind, node.said()))))
        yield f"{indent}{_quoted(node.path)} [label={label}];"
        for name, body in node.bodies.items():
            yield f"{indent}subgraph {_quoted(f'cluster_{node.path}/{name}')} {{"
            yield f"{indent}  label={_quoted(f'{node.name}: {name}' if name else node.name)};"
            yield from _dot_lines(body, indent + "  ")
            yield f"{indent}}}"
            for first in body.nodes[:1]:  # an edge needs a node to point to; it is drawn up to the cluster
                head = f"[style=dotted, lhead={_quoted(f'cluster_{node.path}/{name}')}]"
                yield f"{indent}{_quoted(node.path)} -> {_quoted(first.path)} {head};"
    for edge in graph.edges():
        style = "" if edge.port == "full" else f" [style=dashed, label={_quoted(edge.port)}]"
        yield f"{indent}{_quoted(edge.source.path)} -> {_quoted(edge.target.path)}{style};"


def _quoted(text: str) -> str:
    for character, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n")):
        text = text.replace(character, escaped)
    return f'"{text}"'
