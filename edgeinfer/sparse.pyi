# Where editors and type checkers find edgeinfer.sparse in a checkout; never installed.
from sparse import *
