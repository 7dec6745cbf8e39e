"""The operations of graphs, a file per family."""
