"""GGUF files with random weights, written in the environment of llama-cpp-python (packages gguf and numpy).

    python gguf_models.py --shape '{"hidden_size": 2048, ...}' --format q4_0 --output FILE

q4_0 has matrices of 4.5 bits and embedding and head of 8.5, as edgeinfer's q4 in groups of 32: the same bytes. q8_0 has
matrices of 8.5 bits, and q4_k_m follows llama.cpp's own mixture of types. Only speed is to be measured, so blocks are
random bytes with sane scales.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from math import prod

import gguf
import gguf_hybrids as hybrids
import numpy as np

TYPES = gguf.GGMLQuantizationType
BLOCKS = {
    TYPES.Q4_0: (32, 18), TYPES.Q8_0: (32, 34), TYPES.Q5_0: (32, 22), TYPES.Q4_K: (256, 144), TYPES.Q6_K: (256, 210),
}
"""Weights and bytes of a block."""
SCALES = {TYPES.Q4_0: (0,), TYPES.Q8_0: (0,), TYPES.Q5_0: (0,), TYPES.Q4_K: (0, 2), TYPES.Q6_K: (208,)}
"""Byte offsets of a block's fp16 scales."""
DEVIATION = {TYPES.Q4_0: 4.6, TYPES.Q8_0: 74.0, TYPES.Q5_0: 9.2, TYPES.Q4_K: 300.0, TYPES.Q6_K: 1400.0}
"""Rough size of the codes that a scale multiplies."""
FALLBACK = {TYPES.Q4_K: TYPES.Q5_0, TYPES.Q6_K: TYPES.Q8_0}
"""Types that llama.cpp uses for rows that are not a multiple of 256."""
MIN_CODE = 0x80
"""Of 8 bits: -128, which llama.cpp never writes."""
PART_WEIGHTS = 1 << 24


def matrices(shape: dict, mixture: str) -> Iterator[tuple[str, int, int, gguf.GGMLQuantizationType]]:
    """Name, rows, columns and type of every matrix."""
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    q, kv = (shape[key] * shape["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    layers, tied = shape["num_hidden_layers"], shape["tie_word_embeddings"]
    plain, head, table = {
        "q4_0": (TYPES.Q4_0, TYPES.Q8_0, TYPES.Q8_0), "q8_0": (TYPES.Q8_0, TYPES.Q8_0, TYPES.Q8_0),
        "q4_k_m": (TYPES.Q4_K, TYPES.Q6_K, TYPES.Q6_K if tied else TYPES.Q4_K),
    }[mixture]
    yield "token_embd", vocab, hidden, suited(table, hidden)
    if not tied:
        yield "output", vocab, hidden, suited(head, hidden)
    for i in range(layers):
        finer = TYPES.Q6_K if mixture == "q4_k_m" and more_bits(i, layers) else plain
        mixer = [("attn_q", q, hidden), ("attn_k", kv, hidden), ("attn_v", kv, hidden), ("attn_output", hidden, q)]
        if shape.get("recurrent"):
            mixer = list(hybrids.mixers(shape, i, q, kv))
        typed = [(*one, finer if one[0] == "attn_v" else plain) for one in mixer]
        for name, rows, columns, kind in (*typed, *ffn_of(shape, plain, finer)):
            yield f"blk.{i}.{name}", rows, columns, suited(kind, columns)


def ffn_of(shape: dict, plain: TYPES, finer: TYPES) -> list[tuple[str, int, int, TYPES]]:
    """Matrices of a layer's FFN; of a mixture those of all experts, one below the other."""
    hidden, ffn, experts = shape["hidden_size"], shape["intermediate_size"], shape.get("experts")
    if not experts:
        return [("ffn_gate", ffn, hidden, plain), ("ffn_up", ffn, hidden, plain), ("ffn_down", hidden, ffn, finer)]
    n, size = experts["total"], experts["intermediate_size"]
    return [("ffn_gate_exps", n * size, hidden, plain), ("ffn_up_exps", n * size, hidden, plain),
            ("ffn_down_exps", n * hidden, size, finer)]


def more_bits(layer: int, layers: int) -> bool:
    """Layers whose value and down matrices are finer in the M mixtures: the first and last eighth, and every third."""
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def suited(kind: gguf.GGMLQuantizationType, columns: int) -> gguf.GGMLQuantizationType:
    return FALLBACK[kind] if columns % BLOCKS[kind][0] else kind


def random_blocks(rng: np.random.Generator, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Bytes of a matrix, of shape (rows, bytes of a row)."""
    weights, nbytes = BLOCKS[kind]
    n = rows * columns // weights
    out = np.empty((n, nbytes), np.uint8)
    for start in range(0, n, PART_WEIGHTS // weights):
        part = out[start : start + PART_WEIGHTS // weights]
        part[:] = np.frombuffer(rng.bytes(part.size), np.uint8).reshape(part.shape)
        if kind == TYPES.Q8_0:
            part[part == MIN_CODE] += 1
        for i, at in enumerate(SCALES[kind]):
            size = rng.uniform(0.5, 1.5, len(part)) / (DEVIATION[kind] * np.sqrt(columns))
            sign = rng.choice((-1.0, 1.0), len(part)) if len(SCALES[kind]) == 1 else 1.0
            part[:, at : at + 2] = (size * sign * (1, 4)[i]).astype("<f2").view(np.uint8).reshape(-1, 2)
    return out.reshape(rows, columns // weights * nbytes)


APART = 8.0
"""Root mean square of an embedding's values in mixtures, as in converters/synthetic/random_experts.py."""
MIXTURES = {"olmoe": "olmoe", "mixtral": "llama", "qwen3_moe": "qwen3moe", "smallthinker": "smallthinker"}
"""MoE models that can be written, and their names in llama.cpp."""


def vectors(shape: dict) -> list[tuple[str, tuple[int, ...]]]:
    """Norms and routers, which stay float32."""
    hidden, layers, experts = shape["hidden_size"], shape["num_hidden_layers"], shape.get("experts")
    if shape.get("recurrent"):
        return list(hybrids.vectors(shape))
    found = [(f"blk.{i}.{name}.weight", (hidden,)) for i in range(layers) for name in ("attn_norm", "ffn_norm")]
    if experts:
        found += [(f"blk.{i}.ffn_gate_inp.weight", (experts["total"], hidden)) for i in range(layers)]
    for name, heads in (("attn_q_norm", "num_attention_heads"), ("attn_k_norm", "num_key_value_heads")):
        if shape["model_type"] in ("olmoe", "qwen3_moe"):
            n = shape[heads] if shape["model_type"] == "olmoe" else 1
            found += [(f"blk.{i}.{name}.weight", (n * shape["head_dim"],)) for i in range(layers)]
    return [*found, ("output_norm.weight", (hidden,))]


def add_settings(writer: gguf.GGUFWriter, shape: dict) -> None:
    """Everything but tensors: sizes, and a vocabulary of special tokens, bytes and made-up words."""
    writer.add_context_length(1 << 17)
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_rope_dimension_count(shape.get("rotary_dim") or shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_head_count(shape["num_attention_heads"])
    if shape.get("recurrent"):
        hybrids.add_settings(writer, shape)
    else:
        writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_vocab_size(shape["vocab_size"])
    if experts := shape.get("experts"):
        writer.add_expert_count(experts["total"])
        writer.add_expert_used_count(experts["active"])
        writer.add_expert_feed_forward_length(experts["intermediate_size"])
        writer.add_expert_gating_func(getattr(gguf.ExpertGatingFuncType, experts["scores"].upper()))
        writer.add_key_length(shape["head_dim"])
        writer.add_value_length(shape["head_dim"])
    kinds = gguf.TokenType
    tokens = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
    tokens += [(f"\u2581w{i}", kinds.NORMAL) for i in range(len(tokens), shape["vocab_size"])]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(len(tokens))])
    writer.add_token_types([int(kind) for _, kind in tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)


def write(shape: dict, mixture: str, path: str, spread: float | None = None) -> int:
    """Write a file; returns the bytes of the matrices that a token reads (the table is read only if it is the head).

    With a `spread` rows of routers have factors from 1 to 1 + spread, and tokens stay apart.
    """
    experts = shape.get("experts")
    name = hybrids.NAMES[shape["model_type"]] if shape.get("recurrent") else "llama"
    writer = gguf.GGUFWriter(path, MIXTURES[shape["model_type"]] if experts else name)
    rng = np.random.default_rng(0)
    add_settings(writer, shape)
    table, floats = list(matrices(shape, mixture)), vectors(shape)
    for name, rows, columns, kind in table:
        weights, nbytes = BLOCKS[kind]
        stored: tuple[int, ...] = (rows, columns // weights * nbytes)
        if name.endswith("_exps"):
            stored = (experts["total"], rows // experts["total"], stored[1])
        writer.add_tensor_info(f"{name}.weight", stored, np.dtype(np.uint8), rows * stored[-1], kind)
    for name, shape_of in floats:
        writer.add_tensor_info(name, shape_of, np.dtype(np.float32), 4 * prod(shape_of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    read = 0
    for name, rows, columns, kind in table:
        data = random_blocks(rng, rows, columns, kind)
        if spread is not None and name == "token_embd":
            scales = data.reshape(-1, BLOCKS[kind][1])[:, :2].view("<f2")
            scales *= np.float16(APART * np.sqrt(columns))
        share = experts["active"] / experts["total"] if name.endswith("_exps") else 1
        read += 0 if name == "token_embd" and not shape["tie_word_embeddings"] else round(data.nbytes * share)
        writer.write_tensor_data(data)
    for vector, shape_of in floats:
        if shape.get("recurrent"):
            writer.write_tensor_data(hybrids.values(vector, shape_of, rng))
            continue
        router = rng.standard_normal(shape_of, np.float32) / np.sqrt(shape_of[-1], dtype=np.float32)
        if spread is not None and len(shape_of) == 2:
            router *= rng.permutation(1 + spread * np.linspace(0, 1, shape_of[0])).astype(np.float32)[:, None]
        writer.write_tensor_data(router if len(shape_of) == 2 else np.ones(shape_of, np.float32))
    writer.close()
    return read + sum(4 * prod(shape_of) for _, shape_of in floats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--format", choices=("q4_0", "q8_0", "q4_k_m"), required=True)
    parser.add_argument("--spread", type=float, help="of a mixture's routing (converters/synthetic/random_experts.py)")
    parser.add_argument("--output", required=True)
    given = parser.parse_args()
    print(json.dumps({"bytes_read": write(given.shape, given.format, given.output, given.spread)}))


if __name__ == "__main__":
    main()
