"""The execution of a program: threads, tables, forward passes."""
