"""Arguments and flags that mean the same in every command, each with its environment variable."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Bundle or checkpoint directory (a checkpoint is converted once into the cache), known name, or hub id.",
        show_default=False,
    ),
]
Json = Annotated[
    bool,
    typer.Option("--json", envvar="EDGEINFER_JSON", help="Print one JSON object on standard output, and nothing else."),
]
Ctx = Annotated[
    int | None,
    typer.Option(
        "-c", "--ctx", envvar="EDGEINFER_CTX", metavar="TOKENS",
        help="Most tokens of prompt and answer together.  [default: the model's, at most 4096]",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "-t", "--threads", envvar="EDGEINFER_THREADS", metavar="N",
        help="Worker threads.  [default: physical cores that this process may use]",
    ),
]
Kv = Annotated[
    str, typer.Option("--kv", envvar="EDGEINFER_KV", metavar="int8|f16|f32", help="Type of the KV cache.")
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", envvar="EDGEINFER_BUDGET", metavar="SIZE",
        help="Most memory of the whole process, such as 4GiB or 500MB.  [default: what the system can give now]",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        "--device", envvar="EDGEINFER_DEVICE", metavar="NAME",
        help="Known device, or a profile's TOML file; 'edgeinfer devices' lists them.  [default: this machine, probed]",
    ),
]
Mlock = Annotated[
    bool,
    typer.Option(
        "--mlock", envvar="EDGEINFER_MLOCK", help="Lock the weights into memory, so that the system cannot drop them."
    ),
]
MaxTokens = Annotated[
    int,
    typer.Option("-n", "--max-tokens", envvar="EDGEINFER_MAX_TOKENS", metavar="N", help="Most tokens to generate."),
]
Temperature = Annotated[
    float,
    typer.Option("--temp", envvar="EDGEINFER_TEMP", metavar="T", help="Temperature; 0 is greedy."),
]
TopK = Annotated[
    int, typer.Option("--top-k", envvar="EDGEINFER_TOP_K", metavar="K", help="Keep the K likeliest; 0 keeps all.")
]
TopP = Annotated[
    float,
    typer.Option(
        "--top-p", envvar="EDGEINFER_TOP_P", metavar="P", help="Keep the likeliest that reach P together; 1 keeps all."
    ),
]
MinP = Annotated[
    float,
    typer.Option(
        "--min-p", envvar="EDGEINFER_MIN_P", metavar="P",
        help="Drop tokens less likely than P times the likeliest; 0 keeps all.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", envvar="EDGEINFER_SEED", metavar="N",
        help="Seed of the random choices.  [default: drawn, and reported]",
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop", metavar="TEXT", show_default=False,
        help="End before this text; may be repeated.  [env var: EDGEINFER_STOP, one text]",
    ),
]


def from_environment(command: typer.Context, name: str) -> bool:
    """Whether a parameter has its value from its variable: what is set for all commands contradicts no flag of one."""
    source = command.get_parameter_source(name)
    return source is not None and source.name == "ENVIRONMENT"
