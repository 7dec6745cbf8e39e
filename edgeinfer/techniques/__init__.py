"""edgeinfer.techniques: techniques that are neither sparse feed-forward layers nor weights in storage.

Each module has one `edgeinfer.registry.Technique`, by the name `TECHNIQUE`. It imports its needs where they are used:
the command line reads all of them for the help.
"""

from typing import TYPE_CHECKING

from ..base.lazy_import import lazily

if TYPE_CHECKING:
    from .speculation import WITHOUT_DRAFTS

__all__ = ["WITHOUT_DRAFTS"]
__getattr__ = lazily(__name__, {"speculation": "WITHOUT_DRAFTS"})
