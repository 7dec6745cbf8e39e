"""The error tree: everything a user can run into, each with one clear sentence.

A message names the value, the limit and the remedy. The command line prints it as one line and exits with
`exit_code`; ``--json`` prints ``{"error": {"code", "message"}}``.
"""

from __future__ import annotations

import re

LONG_MESSAGE, LONG_VALUE = 400, 100
"""Characters from which on a message, and a value in it, is shortened."""
_VALUES = re.compile(r"""(?<!\w)(['"])((?:(?!\1).)+)\1|[^\s'"]+""", re.DOTALL)
"""Values as messages hold them: in quotes (no apostrophe, which is after a letter), or without a space in it."""


def printable(text: str) -> str:
    """Return untrusted text with escapes for control characters and for characters that a terminal cannot show."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shortened(message: str) -> str:
    """Return a message that a person can read, whatever was given: long values show their ends, and characters that a
    terminal would obey or that cannot be written are spelt out."""
    message = printable(message)
    if len(message) <= LONG_MESSAGE:
        return message
    text = _VALUES.sub(lambda found: _ends(found[0], LONG_VALUE), message)
    return _ends(text, 4 * LONG_MESSAGE)


def _ends(text: str, most: int) -> str:
    """The beginning and the end of a text that is longer than `most`, and how long it is."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}[... {len(text) - most} characters ...]{text[-(most - most // 2):]}"


class EdgeInferError(Exception):
    """Base of all errors that edgeinfer raises on purpose."""

    code = "failed"
    exit_code = 1

    def __init__(self, message: object = ""):
        super().__init__(shortened(str(message)))


class UsageError(EdgeInferError):
    """A wrong flag or argument: an unknown name, a size that does not parse, a value out of its range."""

    code = "usage"
    exit_code = 2


class ModelNotFoundError(EdgeInferError):
    """MODEL is not a bundle, a checkpoint directory or a known name."""

    code = "model_not_found"


class CheckpointError(EdgeInferError):
    """A checkpoint that cannot be read: missing, truncated, inconsistent or damaged files."""

    code = "invalid_checkpoint"


class UnsupportedModelError(CheckpointError):
    """A checkpoint whose mathematics edgeinfer does not implement; the message names the field."""

    code = "unsupported_model"


class BundleError(EdgeInferError):
    """A bundle that is truncated, altered, newer than this program, or inconsistent with its own table."""

    code = "invalid_bundle"


class ProfileError(EdgeInferError):
    """A device profile with a missing or absurd field, or a file that is none."""

    code = "invalid_profile"


class DestinationError(EdgeInferError):
    """Output that cannot be written: it exists, is being written by another process, or the disk is full."""

    code = "cannot_write"


class BudgetError(EdgeInferError):
    """The plan needs more memory than the budget allows; carries the plan, for reports.

    Parameters
    ----------
    message : str
    plan : MemoryPlan, optional
    budget_bytes : int, optional
    alternatives : tuple of Alternative
        Smaller requests that were checked to fit, in the order in which they are to be tried.
    device_budget_bytes : int, optional
        Limit of the memory of a GPU.
    """

    code = "does_not_fit"
    exit_code = 3

    def __init__(
        self, message: str, plan: object | None = None, budget_bytes: int | None = None,
        alternatives: tuple[object, ...] = (), device_budget_bytes: int | None = None,
    ):
        super().__init__(message)
        self.plan = plan
        self.budget_bytes = budget_bytes
        self.alternatives = alternatives
        self.device_budget_bytes = device_budget_bytes


class RequestError(EdgeInferError):
    """A generation request that cannot be served: empty prompt, prompt longer than the context, bad token id."""

    code = "bad_request"


class QueueFullError(RequestError):
    """A request that came while as many wait as may; the same request may be served later."""

    code = "queue_full"


class FormError(RequestError):
    """A form that a text cannot have: a JSON schema, a regular expression or a grammar that cannot be used."""


class PromptError(RequestError):
    """A prompt that the model cannot take: empty, or with a token id that it has not."""


class ContextError(PromptError):
    """A prompt that is longer than the context."""


class TokenizerError(EdgeInferError):
    """A tokenizer or chat template that is missing, damaged or refuses its input."""

    code = "tokenizer"


class KernelError(EdgeInferError):
    """Kernels cannot be built, loaded, or disagree with their NumPy references (``EDGEINFER_CHECK=1``)."""

    code = "kernel"


class ClosedError(EdgeInferError):
    """A model that was already closed."""

    code = "closed"


class CancelledError(EdgeInferError):
    """The work was cancelled (Ctrl-C, `LLM.cancel`, or a closed stream) before it finished."""

    code = "cancelled"
