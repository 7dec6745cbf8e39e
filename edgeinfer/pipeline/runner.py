"""A runner over the stages of a pipeline: forward passes go through them in parts."""

from __future__ import annotations

from collections.abc import Sequence as Items
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from edgeinfer.bundle import Bundle
from edgeinfer.config import RuntimeConfig
from edgeinfer.errors import EdgeInferError, RequestError, UsageError
from edgeinfer.memory_planner import resolve, to_request
from edgeinfer.runner import PROMPT, Cancellation, Segment, plain_segments, prepare_samples
from edgeinfer.runtime import Rows, check_stage_config, planner_of

from .calls import Part
from .parts import PartCounts, divide, most_parts
from .sequences import PipelineSequences, in_turn
from .stage import LocalStage, Stage


class PipelineRunner(PipelineSequences):
    """Runs a model whose layers are in several stages; its logits are those of one session, to the last bit.

    A sequence that runs alone gains memory, not speed: its tokens go through one stage after the other. Parts of
    prompts and of several sequences are in all stages at once, where these are separate processes.

    Parameters
    ----------
    bundle : Bundle
        Of the whole model; closed with the runner.
    config : RuntimeConfig
        That of the stages.
    stages : of Stage
        Open, in the order of their layers; closed with the runner.

    Raises
    ------
    UsageError
        The stages do not fit together.

    Attributes
    ----------
    plan : MemoryPlan
        Of the last stage that is in this process; of the whole model if none is.
    """

    def __init__(self, bundle: Bundle, config: RuntimeConfig, stages: Items[Stage]):
        check_stage_config(config)
        self.bundle, self.model, self.stages = bundle, bundle.config, tuple(stages)
        self._check_stages()
        self.config = resolve(config, bundle.config)
        whole = planner_of(bundle, config.recipe).plan(to_request(self.config))
        local = next((one.session for one in reversed(self.stages) if isinstance(one, LocalStage)), None)
        self.plan = replace(local.plan, windowed=whole.windowed) if local else whole
        self.isa, self.budget_bytes = self.stages[-1].info.isa, local.budget_bytes if local else 0
        self._alike = not whole.windowed and not whole.state
        self._samples = self.stages[-1].samples
        self._counts = PartCounts(len(self.stages) if any(stage.apart for stage in self.stages) else 1)
        self._logits: Rows = np.zeros((self.config.outputs, self.model.vocab_size), np.float32)
        self._open_sequences()

    def _check_stages(self) -> None:
        wanted = 0
        for info in (stage.info for stage in self.stages):
            if info.first != wanted:
                raise UsageError(f"A stage has the layers {info.first}-{info.last}, and layer {wanted} is next; give "
                                 "the stages in order.")
            if info.identity != self.bundle.identity:
                raise UsageError(f"The stage of the layers {info.first}-{info.last} has another bundle; give all "
                                 "stages the same.")
            wanted = info.last + 1
        if wanted != self.model.num_hidden_layers:
            raise UsageError(f"The stages end with layer {wanted - 1}; the model has {self.model.num_hidden_layers}.")
        for name in ("arithmetic", "kv_blocks"):
            if len(found := sorted({str(getattr(stage.info, name)) for stage in self.stages})) > 1:
                raise UsageError(f"The stages differ in their {name} ({', '.join(found)}), so the text would not be "
                                 "that of one process; run all stages on the same kind of machine with the same "
                                 "settings.")

    # -- tokens in, logits out ---------------------------------------------------------------------------------------

    @in_turn
    def forward(self, segments: Items[Segment], cancel: Cancellation | None = None) -> Rows:
        """Run the model once over the new tokens of several sequences; see `Runner.forward`."""
        segments = plain_segments(segments)
        numbers = self._admit(segments)
        if not self._samples:
            prepare_samples(segments)
        n_tokens = sum(len(segment.ids) for segment in segments)
        prompt = any(segment.role == PROMPT and len(segment.ids) > 1 for segment in segments)
        try:
            with self._counts.timed(n_tokens, most_parts(segments), prompt) as n_parts:
                logits = self._run(divide(segments, numbers, n_parts), cancel)
            self._post("commit", [(number, list(segment.ids), segment.role)
                                  for number, segment in zip(numbers, segments, strict=True)])
        except BaseException:
            self._abort(segments, numbers)
            raise
        for segment in segments:
            segment.sequence.tokens.extend(segment.ids)
        return logits

    def close(self) -> None:
        """End a pass that runs and all stages; callable twice, and from any thread."""
        self._logits = np.zeros((0, 0), np.float32)
        with ExitStack() as closing:
            closing.callback(self.bundle.close)
            for stage in reversed(self.stages):
                closing.callback(stage.close)

    # -- parts of a pass ---------------------------------------------------------------------------------------------

    def _admit(self, segments: Items[Segment]) -> list[int]:
        """Refuse a forward pass that does not fit or makes no sense; return the numbers of its sequences."""
        self.check_pass(segments, self.plan.request.tokens)
        numbers = [self._number(segment.sequence) for segment in segments]
        for segment in segments:
            self.check(segment.sequence, segment.ids)
            segment.check()
            chain = segment.parents is None or all(p == i - 1 for i, p in enumerate(segment.parents))
            if self.model.recurrent and not chain:
                raise RequestError("Recurrent layers run no trees of tokens; run them as a chain, without parents.")
        return numbers

    def _run(self, parts: list[Part], cancel: Cancellation | None) -> Rows:
        """Run parts: in each step every stage runs the part that the stage before has run in the last one."""
        rows: dict[int, Rows | None] = {}
        n_logits = 0
        for step in range(len(parts) + len(self.stages) - 1):
            busy = [(stage, i) for s, stage in enumerate(self.stages) if 0 <= (i := step - s) < len(parts)]
            for stage, i in busy:
                stage.start(parts[i], rows.pop(i, None))
            # Stages of this process run when they are finished, the last first: it reads where those before write.
            for stage, i in sorted(reversed(busy), key=lambda one: one[0].apart):
                made = stage.finish(cancel)
                if stage is not self.stages[-1]:
                    rows[i] = made
                elif len(parts) == 1:
                    return made
                else:
                    self._logits[n_logits : n_logits + len(made)] = made
                    n_logits += len(made)
        return self._logits[:n_logits]

    def _abort(self, segments: Items[Segment], numbers: list[int]) -> None:
        """Let all stages forget a pass; one that has ended has nothing to forget."""
        for stage in self.stages:
            with suppress(EdgeInferError):
                stage.give_up()
                stage.post("abort", [(number, len(segment.sequence))
                                     for number, segment in zip(numbers, segments, strict=True)])
