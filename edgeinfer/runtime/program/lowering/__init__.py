"""Lowering: from the operations of a graph to the instructions of a program."""
