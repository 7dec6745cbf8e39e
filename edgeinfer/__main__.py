"""``python -m edgeinfer`` is the command line."""

from .cli import main

main()
