"""Bundles of the shape of well-known models with random weights, written directly: for measurements without downloads.

Run ``python -m edgeinfer.converters.synthetic.random_bundle --shape tinyllama-1.1b DESTINATION``; for a model whose
FFNs fire as sparse ones do, with a predictor (random_neurons.py), add for example ``--ffn-layout neuron --density 0.1
--skew 0.9 --predictor lowrank --rank 128``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgeinfer.base.progress import OnStageProgress
from edgeinfer.bundle import (
    COLD_FILE,
    DRAFT_HEAD_FILE,
    PREDICTOR_FILE,
    STATISTICS_FILE,
    BundleWriter,
    TensorEntry,
    own_weights,
    pack_cold,
    pack_draft_head,
    weights_identity,
)
from edgeinfer.config import FFN_LAYOUTS, GROUP_SIZES, WEIGHT_TYPES
from edgeinfer.errors import EdgeInferError, UsageError
from edgeinfer.graph import (
    Decay,
    ModelConfig,
    Tap,
    TypeOf,
    Weight,
    build_draft_head,
    build_graph,
    builtin_shapes,
    read_config,
    requested_types,
    supported_architectures,
)
from edgeinfer.quant import WeightType, layouts, levels

from ..checkpoint.directory import quantisation_of
from ..checkpoint.sources import BLOCK_WEIGHTS
from ..chosen_types import mixed_quantisation
from ..conversion import graph_bytes
from .random_experts import Routing
from .random_neurons import APART, Neurons, Sparsity, random_codes, random_packed

SHAPES: dict[str, ModelConfig] = {
    name: replace(read_config(shape.config), bos_token_id=1, eos_token_ids=(2,))
    for name, shape in builtin_shapes().items() if shape.config["model_type"] in supported_architectures()
}
"""Built-in shapes that can be run; token ids 1 and 2 begin and end a text, as the tokenizer written beside says."""
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")


def write_random_bundle(
    config: ModelConfig,
    destination: str | Path,
    weights: str = "q4",
    group_size: int = 32,
    seed: int = 0,
    *,
    ffn_layout: str = "tile16",
    sparsity: Sparsity | None = None,
    routing: float | None = None,
    types: TypeOf | None = None,
    overwrite: bool = False,
    progress: OnStageProgress | None = None,
) -> None:
    """Write a bundle with random weights, scaled so that logits stay finite, and a byte-level tokenizer.

    Parameters
    ----------
    config : ModelConfig
        For example one of `SHAPES`.
    destination : str or Path
    weights : str
        As for `convert`, with its defaults for embedding and head.
    group_size : int
    seed : int
        The same seed gives the same bytes.
    ffn_layout : {'tile16', 'neuron'}
        As for `convert`.
    sparsity : Sparsity, optional
        How many neurons fire, and a predictor of them; the model then has a ReLU, biases in its FFN, layout neuron.
    routing : float, optional
        Of an MoE model, the share of a token's choices that the busier half of a layer's experts takes
        (random_experts.py).
    types : callable, optional
        Type of each weight, in place of `weights`, `group_size` and `ffn_layout`.
    overwrite : bool
        Replace an existing bundle.
    progress : callable, optional
        Called with (done_bytes, total_bytes, name of the tensor).

    Raises
    ------
    DestinationError
        As for `convert`.
    UsageError
        The model cannot have this sparsity.
    """
    config = sparsity.config(config, ffn_layout) if sparsity else config
    type_of = types or requested_types(weights, group_size, ffn_layout=ffn_layout)
    graph = build_graph(config, type_of)
    rng, entries = np.random.default_rng(seed), []
    neurons, routers = Neurons(rng, config, sparsity), None
    if routing is not None:
        if config.experts is None:
            raise UsageError(f"The model has no experts, so routing ({routing:g}) makes no sense; leave it out.")
        routers = Routing(rng, config.experts.total, config.experts.active, routing)
    total, done, strides = graph_bytes(graph), 0, graph.strides
    asked = mixed_quantisation(graph) if types else quantisation_of(type_of, weights, group_size)
    with BundleWriter(destination, config, asked, overwrite=overwrite, source=f"random weights, seed {seed}") as writer:
        writer.reserve(total)
        for weight in graph.weights:
            stored = graph.types[weight.name]
            if stored.storage.fitted:
                stored = replace(stored, levels=levels.first(stored))
            data = random_bytes(rng, weight, stored, neurons, routers)
            entries.append(writer.add(weight.name, stored, weight.shape, data, weight.pieces,
                                      strides.get(weight.name, 0)))
            done += entries[-1].nbytes
            if progress:
                progress(done, total, weight.name)
        identity = weights_identity(entries)
        if head := build_draft_head(config, type_of):
            drafts = {weight.name: random_bytes(rng, weight, head.types[weight.name], neurons)
                      for weight in own_weights(head)}
            writer.add_file(DRAFT_HEAD_FILE, pack_draft_head(head, drafts, identity), "draft_head")
        if config.vocab_size >= 256 + len(SPECIAL_TOKENS):
            for name, content in byte_tokenizer(config.vocab_size).items():
                writer.add_file(name, json.dumps(content).encode())
        if sparsity:
            _add_neurons(writer, neurons, entries, identity)


def _add_neurons(writer: BundleWriter, neurons: Neurons, entries: list[TensorEntry], identity: str) -> None:
    """Add statistics of the neurons, and if there is a predictor, it and the neurons that may stay in storage."""
    writer.add_file(STATISTICS_FILE, b"".join(neurons.statistics().pack(identity)), "statistics")
    if predictor := neurons.predictor():
        writer.add_file(PREDICTOR_FILE, b"".join(predictor.pack(identity)), "predictor")
        writer.add_file(COLD_FILE, pack_cold(entries, writer.stored), "cold")


def _recurrent(rng: np.random.Generator, weight: Weight) -> NDArray[np.float32] | None:
    """Values of vectors of recurrent layers as models begin with (Mamba, arXiv 2312.00752); None of any other."""
    steps = {type(step) for source in weight.sources for step in source.steps}
    n = weight.shape[0]
    if Decay in steps:
        return -np.exp(rng.uniform(0.0, 2.7, n)).astype(np.float32)
    if weight.name.endswith(".dt_bias"):
        return np.log(np.expm1(np.exp(rng.uniform(np.log(0.001), np.log(0.1), n)))).astype(np.float32)
    return 0.5 * rng.standard_normal(n, np.float32) if Tap in steps else None


def random_bytes(
    rng: np.random.Generator, weight: Weight, stored: WeightType, neurons: Neurons, routers: Routing | None = None
) -> Iterator[NDArray[np.uint8]]:
    """Stored bytes of a random weight: norms near 1, biases near 0, matrices that keep the size of their input."""
    if neurons.sparse and weight.name.endswith((".gate_up_bias", ".up_bias")):
        yield neurons.bias(3 if "gate" in weight.name else 2)
        return
    if (own := _recurrent(rng, weight)) is not None:
        yield own.astype("<f4").view(np.uint8)
        return
    if weight.name.endswith("_columns"):  # of outliers, of which a matrix has a tenth of its columns at most
        yield (10 * np.arange(weight.shape[0], dtype="<i4")).view(np.uint8)
        return
    if len(weight.shape) == 1:
        values = 0.02 * rng.standard_normal(weight.shape[0], np.float32) + (0 if weight.name.endswith("_bias") else 1)
        yield values.astype("<f4").view(np.uint8)
        return
    if stored.layout == "neuron":
        yield from neurons.ffn(weight, stored)
        return
    n_rows, cols = weight.shape
    step = 16 * max(1, BLOCK_WEIGHTS // (16 * cols))
    for start in range(0, n_rows, step):
        shape = (min(step, n_rows - start), cols)
        if stored.quantised and not stored.storage.simple:
            yield random_packed(rng, shape, stored)
        elif stored.quantised:
            codes, scales = random_codes(rng, shape, stored)
            if (neurons.sparse or routers) and weight.kind == "embedding":
                scales *= np.float16(APART * np.sqrt(cols))
            yield layouts.pack_tile16(codes, stored.dtype, stored.group_size, scales)
        else:
            values = rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(cols))
            if routers and weight.name.endswith(".router"):  # which is one block
                values *= routers.factors()[:, None]
            yield layouts.pack_tile16(values, stored.dtype)


def byte_tokenizer(vocab_size: int) -> dict[str, dict[str, object]]:
    """Files of a byte-level tokenizer: three special tokens, 256 bytes, and made-up words for all other ids."""
    vocab = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *byte_alphabet()))}
    vocab.update({f"\u0120w{i}": i for i in range(len(vocab), vocab_size)})  # U+0120 stands for a space
    added = [
        {"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i, token in enumerate(SPECIAL_TOKENS)
    ]
    begin = {"SpecialToken": {"id": SPECIAL_TOKENS[1], "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer: dict[str, object] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, text],
            "special_tokens": {SPECIAL_TOKENS[1]: {"id": SPECIAL_TOKENS[1], "ids": [1], "tokens": [SPECIAL_TOKENS[1]]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocab, "merges": [],
        },
    }
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": SPECIAL_TOKENS[0], "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2], "add_bos_token": True, "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings}


def byte_alphabet() -> list[str]:
    """Map each byte to its printable character in byte-level BPE: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters, n_others = [], 0
    for byte in range(256):
        characters.append(chr(byte if byte in printable else 0x100 + n_others))
        n_others += byte not in printable
    return characters


def main(arguments: list[str] | None = None) -> int:
    """Write one bundle as the command line says."""
    parser = argparse.ArgumentParser(prog="python -m edgeinfer.converters.synthetic.random_bundle", description=__doc__)
    parser.add_argument("destination", help="the bundle to make")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tinyllama-1.1b")
    parser.add_argument("--weights", choices=WEIGHT_TYPES, default="q4")
    parser.add_argument("--group-size", type=int, choices=GROUP_SIZES, default=32)
    parser.add_argument("--ffn-layout", choices=FFN_LAYOUTS, default="tile16")
    parser.add_argument("--layers", type=int, help="so many layers instead of the shape's")
    parser.add_argument("--seed", type=int, default=0)
    sparse = parser.add_argument_group("sparse FFNs (with --ffn-layout neuron)")
    sparse.add_argument("--density", type=float, help="share of the neurons that fire for a token")
    sparse.add_argument("--skew", type=float, default=0.5, help="share of the firings that half of the neurons takes")
    sparse.add_argument("--predictor", choices=("lowrank", "sign"), default="")
    sparse.add_argument("--rank", type=int, default=0, help="of a lowrank predictor")
    sparse.add_argument("--mask", type=float, help="share of the neurons that the predictor chooses (the density)")
    parser.add_argument("--routing", type=float, help="mixtures of experts: share of a token's choices that the busier "
                        "half of a layer's experts takes, from 0.5")
    parser.add_argument("--overwrite", action="store_true")
    given = parser.parse_args(arguments)
    config = SHAPES[given.shape]
    try:
        if given.layers is not None and not 1 <= given.layers <= config.num_hidden_layers:
            raise UsageError(f"--layers is {given.layers}; {given.shape} has {config.num_hidden_layers}.")
        if given.density is None and (given.predictor or given.rank or given.mask is not None):
            raise UsageError("--predictor, --rank and --mask belong to --density.")
        config = replace(config, num_hidden_layers=given.layers or config.num_hidden_layers)
        sparsity = None if given.density is None else \
            Sparsity(given.density, given.skew, given.predictor, given.rank, given.mask)
        write_random_bundle(config, given.destination, given.weights, given.group_size, given.seed,
                            ffn_layout=given.ffn_layout, sparsity=sparsity, routing=given.routing,
                            overwrite=given.overwrite)
    except EdgeInferError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
