# Where editors and type checkers find edgeinfer.devices in a checkout; never installed.
from devices import *
