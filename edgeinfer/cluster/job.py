"""Protocol between the front and its replicas: jobs go there, parts of texts and outcomes come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..config import CPU

if TYPE_CHECKING:
    from edgeinfer.memory_planner import MemoryPlan

    from ..config import RuntimeConfig
    from ..engine import SpeculationReport, TokenLogprob
    from ..errors import EdgeInferError
    from ..graph import ModelConfig
    from ..runner import BlockForm

TEXT, SCORES, EMBEDDING = "text", "scores", "embedding"


class WorkerLost(Exception):
    """A worker has ended, or cannot be reached; the text says why."""


class NotBegun(WorkerLost):
    """A worker has ended that had not begun with the work, which is not the cause."""


class Identity(NamedTuple):
    """Parts on which the bits of an answer depend."""

    version: str
    bundle: str
    arithmetic: str


class Refused(NamedTuple):
    """The error with which a model cannot be opened; errors with plans do not go from process to process."""

    sentence: str
    code: str
    exit_code: int


class Speeds(NamedTuple):
    """Seconds that a replica takes for a token."""

    prompt: float
    decode: float
    link: float = 0.0
    """Seconds per byte from another replica."""


class Facts(NamedTuple):
    """Properties of a replica. It has the attributes of a `Runner` that checks of requests read."""

    config: RuntimeConfig
    plan: MemoryPlan
    model: ModelConfig
    block_tokens: int
    caches_prefixes: bool
    isa: str
    identity: Identity
    speeds: Speeds
    device: str = CPU
    form: BlockForm | None = None
    """Form in which it takes prompts from a replica on a device other than the CPU; None if it takes none."""

    def may_compute_for(self, other: Facts) -> bool:
        """Return whether this replica can compute prompts for another one: with the same bits, or on a device."""
        if self.device != CPU:
            return other.form is not None
        return self.caches_prefixes and self.identity.arithmetic == other.identity.arithmetic


class Prefilled(NamedTuple):
    """A prompt that a replica has computed for another one."""

    cached_tokens: int
    """Number of these tokens that were in its prefix cache."""
    speeds: Speeds | None = None
    """Of that replica by then."""


class Job(NamedTuple):
    """A request, as any replica can begin it or continue with it."""

    key: int
    """Names it when it is cancelled."""
    kind: str
    ids: list[int]
    options: dict[str, Any]
    salt: bytes = b""
    skip_special: bool = True
    generated: tuple[int, ...] = ()
    """Tokens that another replica has generated."""
    handed: Any = None
    """The replica that computes the prompt but for its last token: its `piece(offset)` returns the KV blocks that there
    are from a byte on, a `handing.Piece`, and raises `WorkerLost`."""
    form: BlockForm | None = None
    """Form in which that replica makes them, if it is on a device other than the CPU."""


class Part(NamedTuple):
    """Tokens that a sample has got since the last part."""

    number: int
    pieces: list[str]
    """Text of each token; at the end also the text that was held back."""
    ids: list[int]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str
    end: TokenLogprob | None
    stop_string: str | None


class Done(NamedTuple):
    """The end of a job."""

    value: Any
    """Scores or embedding."""
    cached_tokens: int
    preemptions: int
    kv_usage: float
    speculation: SpeculationReport | None = None
    parts: tuple[Part, ...] = ()
    """The last ones."""
    received_bytes: int = 0
    """KV blocks that came from another replica; 0 if they were computed here."""
    received_seconds: float = 0.0
    speeds: Speeds | None = None
    """Of the replica by then: the mean of its latest forward passes, whatever shared them."""


class Failed(NamedTuple):
    """The error with which a job ended."""

    error: EdgeInferError


Item = list[Part] | Done | Failed


class Replica(Protocol):
    """A process that holds the model."""

    name: str
    facts: Facts

    def run(self, job: Job) -> AsyncIterator[Item]:
        """Run a job, whose last item is `Done` or `Failed`; raises `WorkerLost`."""

    async def prefill(self, job: Job) -> Any:
        """Begin to compute the prompt of a job, and return the value for `handed`; None if it cannot.

        Raises `WorkerLost`.
        """

    async def prefilled(self, key: int) -> Prefilled | None:
        """Return when that prompt is complete; None if it could not be computed. Raises `WorkerLost`."""

    async def cancel(self, key: int) -> None:
        """End a job, and drop the prompt that it computed for another replica."""

    async def ended(self) -> WorkerLost:
        """Return once it is lost."""

    async def reopen(self) -> None:
        """Return once it answers again after it was lost; raises `WorkerLost` if it does not."""
