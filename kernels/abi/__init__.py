"""The kernel ABI: the layout of an instruction (constant) and of the ctx block (everything that changes).

``int64 kernel(inst, ctx, tid, n_threads)``: inst and ctx are addresses. Kernels, lowering and references share these
numbers, and all of them say ``abi.NAME``: instruction.py has instructions, flags and regions; ctx.py ctx, its counts
and
tables; kv.py KV blocks and attention; rows.py quantised rows; neurons.py layout neuron; sampling.py the choice of
tokens;
reading.py has the reads during generation, state.py the state of recurrent layers.
"""

from .ctx import *
from .instruction import *
from .kv import *
from .neurons import *
from .reading import *
from .rows import *
from .sampling import *
from .state import *
