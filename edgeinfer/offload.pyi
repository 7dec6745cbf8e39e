# Where editors and type checkers find edgeinfer.offload in a checkout; never installed.
from offload import *
