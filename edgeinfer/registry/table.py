"""The table of options: each is declared here once, and the commands, `LLM`, variables and the configuration read it.

Options of techniques are declared by the techniques (`interface.py`); options of one command by the command.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from itertools import chain
from typing import Any

from ..base.dataclass import dataclass
from ..base.validation import FLAG, TEXT, Rule, choice, instance, integer, number
from ..config import (
    DEVICES,
    GROUP_SIZES,
    KV_LAYOUTS,
    KV_TYPES,
    MAX_KLD,
    MIXED_TYPES,
    WEIGHT_TYPES,
    GenerationConfig,
    Recipe,
    RuntimeConfig,
)
from .rules import RULES

COMMANDS = ("run", "plan", "estimate", "bench", "eval", "info")
"""Commands that take options of this table, and those of techniques."""
SERVE, BATCH = SERVING = "serve", "batch"
"""Commands that take the options of run with which a model is opened."""
GROUPS = MODEL, SAMPLING, MEMORY, SPEED, OUTPUT = "Model", "Sampling", "Memory", "Speed", "Output"
"""Headings of the help, in order."""
_RUN, _PLAN, _ESTIMATE, _BENCH, _EVAL, _INFO = COMMANDS
RECOMMEND = "recommend"
_PREDICTING = (_PLAN, _ESTIMATE, RECOMMEND)
UNITS = ("cpu", "gpu", "npu")
_REQUEST, _OPENED = (_RUN,), (_RUN, _BENCH, _EVAL, _INFO)


@dataclass(frozen=True)
class Option:
    """One option: keyword of the Python API, flag, environment variable and key of the configuration file."""

    name: str
    """Keyword of the Python API."""
    rule: Rule
    """Its valid values."""
    metavar: str
    """Its values as the help shows them; empty for a switch."""
    help: str
    """One sentence for the help and the manual."""
    default: Any = None
    kind: type = str
    """Type of its value on the command line."""
    commands: tuple[str, ...] = COMMANDS
    """Commands that have it."""
    of: str = ""
    """Option without which it means nothing; where it is in a variable, it then gives way."""
    spelled: str = ""
    """The flag, where it is not the name."""
    short: str = ""
    """Short form of the flag."""
    group: str = SPEED
    """One of `GROUPS`."""
    common: tuple[str, ...] = ()
    """Commands whose ``--help`` shows it; ``--help-all`` shows all."""
    unset: str = ""
    """Description of the behaviour without it, if the default is None."""
    several: bool = False
    """True if the flag may be repeated."""
    shared: bool = True
    """True if it has an environment variable and a key of the configuration file."""

    @property
    def flag(self) -> str:
        """Its flag."""
        return self.spelled or "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Its environment variable; empty for none."""
        return "EDGEINFER_" + self.key.replace("-", "_").upper() if self.shared else ""

    @property
    def key(self) -> str:
        """Its key of the configuration file."""
        return self.flag.removeprefix("--")


_FIELDS = {one.name: one for kind in (GenerationConfig, RuntimeConfig) for one in fields(kind)}


def _option(name: str, metavar: str, help: str, **more: Any) -> Option:
    """Declare an option whose rule, default and type follow from its field of a request type where it has one."""
    field = _FIELDS.get(name)
    if "default" not in more and field and isinstance(field.default, (bool, int, float, str)):
        more["default"] = field.default
    default = more.get("default")
    more.setdefault("kind", str if default is None else type(default))
    return Option(name, more.pop("rule", None) or RULES[name], metavar, help, **more)


OPTIONS: tuple[Option, ...] = (
    _option("weights", "|".join(WEIGHT_TYPES),
            "Type of weights that a checkpoint or GGUF file is converted to.", rule=choice(WEIGHT_TYPES + MIXED_TYPES),
            unset="q4; GGUF files keep their types, bundles are not converted", group=MODEL,
            commands=(_RUN, _PLAN, _ESTIMATE, _BENCH, _EVAL), common=(_RUN, _PLAN, _ESTIMATE, _BENCH)),
    _option("group_size", "|".join(map(str, GROUP_SIZES)), "Number of weights that share a scale.", kind=int,
            unset="32; bundles are not converted", group=MODEL, commands=(_RUN, _PLAN, _ESTIMATE, _BENCH, _EVAL)),
    _option("device", "|".join(DEVICES),
            "Executor: edgeinfer's kernels (cpu), or a provider of onnxruntime; auto uses CUDA if it works, else cpu.",
            unset="cpu", group=MODEL, commands=(_RUN, _PLAN, _BENCH, _EVAL),
            common=(_RUN, _PLAN)),
    _option("machine", "NAME",
            "Hardware profile to plan for: a known device or a TOML file; 'edgeinfer devices' lists them.", rule=TEXT,
            unset="this machine, as probed", group=MODEL, commands=_PREDICTING, common=_PREDICTING),
    _option("unit", "|".join(UNITS), "Unit of the machine: its processor, GPU or neural unit.", rule=choice(UNITS),
            unset="the one that edgeinfer uses", group=MODEL, commands=_PREDICTING, common=_PREDICTING, shared=False),
    _option("program", "NAME", "Program whose speed is estimated, where speeds of it are known: llama.cpp, MLC, ...",
            rule=TEXT, unset="edgeinfer", group=MODEL, spelled="--runtime", commands=_PREDICTING, common=_PREDICTING,
            shared=False),
    _option("bandwidth", "GB/S", "Memory bandwidth of a machine that has no profile, with --cores and --class.",
            rule=number(lambda gbs: gbs > 0, "a number of GB/s above 0"), kind=float, group=MODEL,
            commands=_PREDICTING, common=_PREDICTING, shared=False),
    _option("cores", "N", "Its cores, or a GPU's multiprocessors.", rule=integer(1, float("inf"), "1 or more"),
            kind=int, group=MODEL, commands=_PREDICTING, shared=False),
    _option("machine_class", "KIND", "Its kind: desktop, laptop, server, board, phone, arm-laptop, arm-server, mac, "
            "mac-gpu, nvidia or radeon.", rule=TEXT, spelled="--class", group=MODEL, commands=_PREDICTING,
            shared=False),
    _option("storage", "KIND", "Storage of the machine, from which weights are read that its memory cannot hold: nvme, "
            "nvme-gen3, nvme-gen5, nvme-x1, sata, usb3, ufs4, ufs3, emmc, sd, apple or hdd.", rule=TEXT,
            unset="the usual one of its class", group=MODEL, commands=(_PLAN, _ESTIMATE), common=(_PLAN, _ESTIMATE),
            shared=False),
    _option("memory", "SIZE", "Its memory.", rule=RULES["budget"], kind=str, unset="16 GiB", group=MODEL,
            commands=_PREDICTING, shared=False),
    _option("recipe", "PASSES",
            "Graph passes to apply, written name:key=value,... and joined by +; none applies no pass.",
            default=str(Recipe()), group=MODEL),
    _option("raw", "", "Continue PROMPT as plain text, without the chat template.", rule=FLAG, default=False,
            group=MODEL, commands=_REQUEST, common=_REQUEST, shared=False),
    _option("system", "TEXT", "System message, for a model with a chat template.", rule=instance(str, "text"),
            group=MODEL, commands=_REQUEST, common=_REQUEST, shared=False),

    _option("max_tokens", "N", "Maximum number of tokens to generate.", short="-n", group=SAMPLING,
            commands=(_RUN, _PLAN), common=_REQUEST),
    _option("temperature", "T", "Sampling temperature; 0 always takes the most likely token.", spelled="--temp",
            group=SAMPLING, commands=_REQUEST, common=_REQUEST),
    _option("top_k", "K", "Keep only the K most likely tokens; 0 disables it.", group=SAMPLING, commands=_REQUEST,
            common=_REQUEST),
    _option("top_p", "P", "Nucleus sampling: keep the smallest set of tokens whose probabilities sum to P; 1 disables "
            "it.", group=SAMPLING, commands=_REQUEST, common=_REQUEST),
    _option("min_p", "P", "Drop tokens less likely than P times the most likely token; 0 disables it.", group=SAMPLING,
            commands=_REQUEST, common=_REQUEST),
    _option("seed", "N", "Seed of the random number generator.", kind=int, unset="random; see the statistics",
            group=SAMPLING, commands=_REQUEST, common=_REQUEST),
    _option("stop", "TEXT", "Stop before this text; may be repeated.", several=True, group=SAMPLING,
            commands=_REQUEST, common=_REQUEST),
    _option("json_schema", "FILE", "Answer with JSON of the schema in this file; - for any JSON object.", rule=TEXT,
            group=SAMPLING, commands=_REQUEST, common=_REQUEST, shared=False),
    _option("grammar", "FILE", "Answer with a text of the grammar in this file (Lark or GBNF).", rule=TEXT,
            group=SAMPLING, commands=_REQUEST, shared=False),
    _option("repetition_penalty", "X", "Make tokens that already occurred less likely; 1 disables it.",
            spelled="--repeat-penalty", group=SAMPLING, commands=_REQUEST, common=_REQUEST),
    _option("presence_penalty", "X", "Subtract X once from the logit of every token already generated.",
            group=SAMPLING, commands=_REQUEST),
    _option("frequency_penalty", "X", "Subtract X from a token's logit for each time it was generated.",
            group=SAMPLING, commands=_REQUEST),
    _option("logit_bias", "ID=BIAS", "Add BIAS to the logit of token ID; may be repeated.", several=True,
            group=SAMPLING, commands=_REQUEST, shared=False),
    _option("n", "N", "Number of independent completions of the prompt; with --beams the N best.",
            spelled="--samples", group=SAMPLING, commands=(_RUN, _PLAN, _ESTIMATE)),
    _option("beams", "K", "Beam search with K beams (2 to 16) instead of sampling; 1 disables it.", group=SAMPLING,
            commands=(_RUN, _PLAN)),
    _option("length_penalty", "X", "Beam search: divide a text's log-probability by its length to the power of X; "
            "larger values prefer longer texts.", group=SAMPLING, commands=_REQUEST),

    _option("ctx", "TOKENS", "Context size: maximum number of prompt and generated tokens together.", short="-c",
            kind=int, unset="the model's, at most 4096", group=MEMORY,
            commands=(*(one for one in COMMANDS if one != _BENCH), RECOMMEND),  # whose tests say what they need
            common=(*COMMANDS, RECOMMEND)),
    _option("kv", "|".join(KV_TYPES), "Storage type of the KV cache.", group=MEMORY,
            common=(_RUN, _PLAN, _ESTIMATE, _BENCH)),
    _option("budget", "SIZE", "Maximum memory of the process, such as 4GiB, 500MB or a number of bytes.",
            unset="the memory available now", group=MEMORY, commands=(*_OPENED, _PLAN, _ESTIMATE),
            common=(*_OPENED, _PLAN, _ESTIMATE)),
    _option("kv_memory", "SIZE", "Memory of the KV pool that all sequences share, such as 1GiB.",
            unset="room for a context of each sequence", group=MEMORY, commands=(_RUN, _PLAN)),
    _option("state_memory", "SIZE", "Memory for checkpoints of recurrent layers, from which later prompts continue; "
            "0 for none.", unset="four checkpoints, or those that fit", group=MEMORY, commands=(_RUN, _PLAN)),
    _option("mlock", "", "Lock the weights in memory so that the system cannot evict them.", group=MEMORY,
            commands=(_RUN, _PLAN)),
    _option("no_mmap", "", "Copy the weights into memory instead of mapping the file.", rule=FLAG, default=False,
            group=MEMORY, commands=(_RUN, _PLAN)),
    _option("split", "auto|LAYERS", "Run the layers in several processes, such as 0-15,16-31, each with its part of "
            "the memory; auto is two that take equal time, or one on each node of --ray.", group=MEMORY,
            commands=(_RUN, _BENCH)),
    _option("kv_layout", "|".join(KV_LAYOUTS),
            "KV cache of onnxruntime devices: one slot per sequence, or pages shared by all sequences (cuda).",
            unset="slots for one sequence, else pages where the device has them", group=MEMORY,
            commands=(_RUN, _PLAN, _BENCH, _EVAL)),

    _option("threads", "N", "Number of worker threads.", short="-t", kind=int,
            unset="the available physical cores; 1 for small models",
            commands=(*_OPENED, _PLAN), common=(*_OPENED, _PLAN)),
    _option("prefill_chunk", "TOKENS", "Maximum number of prompt tokens processed in one forward pass.",
            commands=(_RUN, _PLAN, _BENCH)),
    _option("max_kld", "NATS", "Use an approximation automatically only if its measured KL divergence is at most "
            "this; 0 uses none.", default=MAX_KLD, commands=(_RUN, _PLAN, _ESTIMATE, _BENCH, _INFO)),
    _option("prefix_file", "FILE", "Keep the KV blocks of prompts in FILE, for later prompts that begin alike.",
            group=SPEED, commands=_REQUEST, shared=False),

    _option("logprobs", "K", "With --json: report the log-probability of each token and of the K most likely ones.",
            kind=int, group=OUTPUT, commands=_REQUEST, shared=False),
    _option("prompt_cache", "FILE", "Reuse the prompt state saved in FILE as far as the prompts agree, and save this "
            "prompt's state there.", group=OUTPUT, commands=_REQUEST, shared=False),
    _option("no_stats", "", "Do not print the statistics.", rule=FLAG, default=False, group=OUTPUT,
            commands=_REQUEST, common=_REQUEST, shared=False),
    _option("json", "", "Print a single JSON object on standard output.", rule=FLAG, default=False, group=OUTPUT,
            commands=(*COMMANDS, RECOMMEND), common=(*COMMANDS, RECOMMEND)),
)
"""Options of the six commands, in the order of the help."""


def of_command(command: str) -> Iterator[Option]:
    """Yield the options of this table that a command has."""
    if command in SERVING:
        opening = (one for one in OPTIONS if _RUN in one.commands and one.group in (MODEL, MEMORY, SPEED)
                   and (one.shared or one.name == "prefix_file"))
        return chain(opening, (one for one in OPTIONS if command == BATCH and one.name == "json"))
    return (one for one in OPTIONS if command in one.commands)
