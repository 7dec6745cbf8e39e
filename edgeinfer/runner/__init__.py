"""Interface of anything that runs a model: sequences, forward passes over them, and cancellation.

The engine, `LLM` and evaluation know runners by this package alone. `Session` is the one that runs our own kernels.

Rules for the state of a sequence, in every runner:

* **KV rows** belong to one token each and depend on the tokens before it only. So a fork shares them until one of the
  two writes, `truncate` forgets the last ones exactly, and prompts that begin alike share those of their beginning
  (`cache_prefix`, `from_prefix`).
* **State** (recurrent layers) is one value for the whole past: no token can be taken out of it. A fork shares it until
  one of the two writes. A journal of the last tokens lets `truncate` forget those of the last pass, if they were few;
  else a sequence can be cut where a `checkpoint` is, and `rollback` runs the tokens after it again. A common
  beginning is shared only up to a checkpoint.
* **KV rows of layers with a window** may be freed once no token that can follow sees them. A fork shares those
  that are left, copied on write like the others. `truncate` is exact as long as all that the next token sees is there:
  by MARGIN_TOKENS (memory_planner/windows.py) from the longest that the sequence has been, always; mostly by some
  hundred tokens more; and to 0. Anything between is refused, never answered wrongly. `reach` says how much of a
  beginning can be kept, and `rollback` runs the rest again; a caller that shares common beginnings asks before it cuts.
  A prompt cache holds the state as it was, with the same reach; a cached beginning has the rows that the next token
  sees.
* A sequence always holds as many rows as tokens, also after a pass that was cancelled or failed: such a pass changes
  nothing but the memory after the last token.
"""

from ..base.lazy_import import lazily

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .interfaces import Cancellation, DraftRunner
    from .prompt_parts import BlockForm, computed_elsewhere, why_not_elsewhere
    from .runner import Runner
    from .sequences import (
        DECODE,
        GONE,
        PROMPT,
        Segment,
        Sequence,
        WindowTable,
        decoding,
        integers,
        plain_segments,
        prepare_samples,
    )

__all__ = ["DECODE", "GONE", "PROMPT", "BlockForm", "Cancellation", "DraftRunner", "Runner", "Segment", "Sequence",
           "WindowTable", "computed_elsewhere", "decoding", "integers", "plain_segments", "prepare_samples",
           "why_not_elsewhere"]
__getattr__ = lazily(__name__, {
    "interfaces": "Cancellation DraftRunner",
    "prompt_parts": "BlockForm computed_elsewhere why_not_elsewhere", "runner": "Runner",
    "sequences": "DECODE GONE PROMPT WindowTable Segment Sequence decoding integers plain_segments prepare_samples",
})
