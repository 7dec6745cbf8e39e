"""The program: instructions, and their lowering from a graph."""
