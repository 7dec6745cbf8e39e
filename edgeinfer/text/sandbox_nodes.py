"""Syntax tree of a chat template, rewritten so that loops and operators go through counting filters."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012  (the base class declares it as an instance variable)

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the tag and its body, up to its end."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class CountWork(NodeTransformer):
    """Route loops, constructors and comparisons through counting filters, which templates cannot redefine."""

    def _counted(self, node: Any, name: str = "_made") -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Count the turns."""
        self.generic_visit(node)
        node.iter = self._counted(node.iter, "_count_loop")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Charge the joined text."""
        self.generic_visit(node)
        return self._counted(nodes.List(node.nodes, lineno=node.lineno), "_concat")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        """Count both sides."""
        self.generic_visit(node)
        node.expr = self._counted(node.expr, "_step")
        for operand in node.ops:
            operand.expr = self._counted(operand.expr, "_step")
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        """Charge slices."""
        self.generic_visit(node)
        return self._counted(node) if isinstance(node.arg, nodes.Slice) else node

    def _visit_container(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the targets of an assignment
            return node
        return self._counted(node)

    visit_List = visit_Tuple = visit_Dict = _visit_container

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        """Make text that is outside of expressions a constant."""
        return nodes.Const(node.data, lineno=node.lineno)  # a constant passes through `finalize` as expressions do
