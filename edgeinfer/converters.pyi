# Where editors and type checkers find edgeinfer.converters in a checkout; never installed.
from converters import *
