"""The face of whatever runs a model: sequences, walks over them, and the wish to end a request.

The engine, `LLM` and evaluation know runners by this room alone. `Session` is the one that runs our own kernels.

Rules for what a runner keeps of a sequence, whichever it is:

* **KV rows** belong to one token each and depend on the tokens before it only. So a fork shares them until one of the
  two writes, `truncate` forgets the last ones exactly, and prompts that begin alike may share those of their beginning.
* **State** (recurrent layers) is one value for the whole past: no token can be taken out of it. A fork copies it at
  once. `truncate` to anything but 0 is refused, unless the runner keeps snapshots: then it goes back to the last one at
  or before that length and computes the tokens between them anew. A common beginning is shared only up to a snapshot.
* **KV rows of layers with a window** may be given back once no token that can follow sees them. A fork shares those
  that are left, copied on write like the others. `truncate` is exact as long as all that the next token sees is there:
  by MARGIN_TOKENS (memory_planner/windows.py) from the longest that the sequence has been, always; mostly by some
  hundred tokens more; and to 0. Anything between is refused, never answered wrongly. `reach` says how much of a
  beginning can be kept, and `rewind` walks over again what cannot; whoever shares common beginnings asks before it
  cuts. A prompt cache holds what there was, with the same reach.
* A sequence always holds as many rows as tokens, also after a walk that was cancelled or failed: such a walk changes
  nothing but what lies behind the last token.
"""

from .interfaces import SparseNeurons, WeightReader
from .prefill import PrefillStrategy
from .runner import Ahead, Cancellation, Runner
from .sequences import DECODE, GONE, PROMPT, Recent, Segment, Sequence, decoding, integers, plain_segments

__all__ = ["DECODE", "GONE", "PROMPT", "Ahead", "Cancellation", "PrefillStrategy", "Recent", "Runner", "Segment",
           "Sequence", "SparseNeurons", "WeightReader", "decoding", "integers", "plain_segments"]
