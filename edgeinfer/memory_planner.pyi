# Where editors and type checkers find edgeinfer.memory_planner in a checkout; never installed.
from memory_planner import *
