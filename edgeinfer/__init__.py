"""edgeinfer: run language models on laptops and ARM boards, and know first whether they fit and how fast they are."""

import os as _os
import os.path as _path
import sys as _sys

TYPE_CHECKING = False  # mypy takes it for true; importing typing would take time
if TYPE_CHECKING:
    from .cli.predictions import estimate, plan, recommend
    from .config import GenerationConfig
    from .errors import EdgeInferError
    from .llm import LLM, AsyncLLM



def _end_at_interrupt() -> None:
    """Let Ctrl-C end the program from here on; edgeinfer.cli puts its own handlers in this one's place.

    A program that imports edgeinfer keeps its handler. Python's own shows a traceback of the imports.
    """
    started = _sys.argv[:1] == ["-m"] and "edgeinfer" in _sys.orig_argv  # as -m, before the module is found
    if not started and _path.basename(_sys.argv[0] if _sys.argv else "") not in ("edgeinfer", "edgeinfer.exe"):
        return
    try:
        import signal

        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupted)
    except KeyboardInterrupt:
        _interrupted()
    except ValueError:  # not in the main thread
        pass


def _interrupted(*_: object) -> None:
    _os.write(2, b"edgeinfer: Interrupted.\n")
    _os._exit(128 + 2)


_end_at_interrupt()
_here = _path.dirname(_path.abspath(__file__))
if not _path.isdir(_path.join(_here, "kernels")):  # a checkout: the parts are beside this folder
    __path__.append(_path.dirname(_here))

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EdgeInferError", "GenerationConfig", "__version__", "estimate", "plan", "recommend"]

_MODULE_OF = {"LLM": "llm", "AsyncLLM": "llm.asynchronous", "EdgeInferError": "errors", "GenerationConfig": "config",
              **dict.fromkeys(("plan", "estimate", "recommend"), "cli.predictions")}


def __getattr__(name: str) -> object:
    """Load public names on first use, so that importing edgeinfer loads neither numpy nor numba."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'edgeinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"edgeinfer.{_MODULE_OF[name]}"), name)


def _before_fork() -> None:
    """Wait for imports of other threads: their locks would stay locked in the child."""
    from .base.process import wait_for_imports

    wait_for_imports()


if hasattr(_os, "register_at_fork"):
    _os.register_at_fork(before=_before_fork)
