# Where editors and type checkers find edgeinfer.kernels in a checkout; never installed.
from kernels import *
