"""OpenVINO models with random weights, written in the environment of openvino-genai (packages openvino and numpy).

    python openvino_models.py --shape '{"hidden_size": 2048, ...}' --group-size 32 --output DIRECTORY

A stateful decoder as exporters write it: 4-bit matrices with a scale per group and a zero point of 8, embedding and
head of 8 bits with a scale per row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op import util


def int64(values: list[int]) -> ov.Node:
    return op.constant(np.array(values, np.int64))


def causal_mask(attention_mask: ov.Node, positions: ov.Node) -> ov.Node:
    """Return whether a token (third axis) sees another (last axis)."""
    total = op.gather(op.shape_of(attention_mask), op.constant(np.int64(1)), op.constant(np.int64(0)))
    keys = op.range(op.constant(np.int64(0)), total, op.constant(np.int64(1)), "i64")
    return op.less_equal(op.unsqueeze(keys, int64([0, 1, 2])), op.unsqueeze(positions, int64([1, 3])))


class Builder:
    """Writes the operations of one decoder.

    Parameters
    ----------
    shape : dict
        Sizes by their Hugging Face names.
    group_size : int
        Weights that share a scale; 64 or 32 where rows are not a multiple of it.
    """

    def __init__(self, shape: dict, group_size: int):
        self.shape, self.group_size, self.rng = shape, group_size, np.random.default_rng(0)
        self.sinks: list[ov.Node] = []
        self.variables: list[util.Variable] = []

    def matrix(self, rows: int, columns: int) -> ov.Node:
        """A 4-bit matrix of shape (rows, columns), decompressed to f32."""
        group_size = next(size for size in (self.group_size, 64, 32) if columns % size == 0)
        groups = columns // group_size
        raw = np.frombuffer(self.rng.bytes(rows * columns // 2), np.uint8)
        codes = op.constant(ov.Tensor(raw.copy(), ov.Shape([rows, groups, group_size]), ov.Type.u4))
        zero = op.constant(ov.Tensor(np.array([0x08], np.uint8), ov.Shape([1, 1, 1]), ov.Type.u4))
        size = self.rng.uniform(0.5, 1.5, (rows, groups, 1)) / (4.6 * np.sqrt(columns))
        values = op.subtract(op.convert(codes, "f16"), op.convert(zero, "f16"))
        values = op.multiply(values, op.constant(size.astype(np.float16)))
        return op.convert(op.reshape(values, int64([rows, columns]), False), "f32")

    def table(self, rows: int, columns: int) -> ov.Node:
        """An 8-bit matrix with a scale per row, decompressed to f32."""
        codes = np.frombuffer(self.rng.bytes(rows * columns), np.int8).reshape(rows, columns).copy()
        size = self.rng.uniform(0.5, 1.5, (rows, 1)) / (74 * np.sqrt(columns))
        values = op.multiply(op.convert(op.constant(codes), "f16"), op.constant(size.astype(np.float16)))
        return op.convert(values, "f32")

    def linear(self, x: ov.Node, rows: int, columns: int) -> ov.Node:
        return op.matmul(x, self.matrix(rows, columns), False, True)

    def norm(self, x: ov.Node) -> ov.Node:
        """Root mean square norm, in the form that the compiler fuses."""
        mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), int64([-1]), True)
        root = op.sqrt(op.add(mean, op.constant(np.float32(self.shape["rms_norm_eps"]))))
        scaled = op.multiply(x, op.divide(op.constant(np.float32(1)), root))
        return op.multiply(op.constant(np.ones((1, 1, self.shape["hidden_size"]), np.float32)), scaled)

    def rotary(self, position_ids: ov.Node) -> tuple[ov.Node, ov.Node]:
        """Cosines and sines of shape (batch, 1, tokens, head_dim)."""
        half = self.shape["head_dim"] // 2
        frequency = self.shape["rope_theta"] ** (-np.arange(half, dtype=np.float32) / half)
        positions = op.convert(op.unsqueeze(position_ids, int64([1])), "f32")
        batch = op.gather(op.shape_of(position_ids), int64([0]), int64([0]))
        wide = op.broadcast(op.constant(frequency.reshape(1, half, 1)), op.concat([batch, int64([1]), int64([1])], 0),
                            broadcast_spec="BIDIRECTIONAL")
        angles = op.transpose(op.matmul(wide, positions, False, False), int64([0, 2, 1]))
        both = op.concat([angles, angles], -1)
        return op.unsqueeze(op.cos(both), int64([1])), op.unsqueeze(op.sin(both), int64([1]))

    def rotated(self, x: ov.Node, rotary: tuple[ov.Node, ov.Node]) -> ov.Node:
        half = self.shape["head_dim"] // 2
        low = op.slice(x, int64([0]), int64([half]), int64([1]), int64([3]))
        high = op.slice(x, int64([half]), int64([2**63 - 1]), int64([1]), int64([3]))
        turned = op.concat([op.multiply(high, op.constant(np.float32(-1).reshape(1, 1, 1, 1))), low], -1)
        return op.add(op.multiply(x, rotary[0]), op.multiply(turned, rotary[1]))

    def heads(self, x: ov.Node, count: int) -> ov.Node:
        split = op.reshape(x, int64([0, 0, count, self.shape["head_dim"]]), True)
        return op.transpose(split, int64([0, 2, 1, 3]))

    def stored(self, name: str, x: ov.Node, batch: ov.Node, beam_idx: ov.Node) -> ov.Node:
        """Keys or values of all tokens so far; repeated for every query head of a group."""
        kv, size, heads = (self.shape[key] for key in ("num_key_value_heads", "head_dim", "num_attention_heads"))
        start = op.broadcast(op.constant(np.float32(0)), op.concat([batch, int64([kv]), int64([0]), int64([size])], 0))
        info = util.VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, kv, -1, size]), ov.Type.f32, name
        variable = util.Variable(info)
        past = op.gather(op.read_value(start, variable), beam_idx, op.constant(np.int64(0)))
        every = op.concat([past, x], -2)
        self.sinks.append(op.assign(every, variable))
        self.variables.append(variable)
        if kv == heads:
            return every
        lengths = op.gather(op.shape_of(every), int64([0, 1]), op.constant(np.int64(0)))
        rest = op.gather(op.shape_of(every), int64([2, 3]), op.constant(np.int64(0)))
        shape = op.concat([lengths, int64([heads // kv]), rest], 0)
        wide = op.broadcast(op.unsqueeze(every, int64([2])), shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(wide, int64([0, heads, -1, size]), True)

    def layer(self, i: int, x: ov.Node, rotary: tuple, batch: ov.Node, beam_idx: ov.Node, mask: ov.Node) -> ov.Node:
        s = self.shape
        hidden, size, heads, kv = s["hidden_size"], s["head_dim"], s["num_attention_heads"], s["num_key_value_heads"]
        y = self.norm(x)
        q = self.rotated(self.heads(self.linear(y, heads * size, hidden), heads), rotary)
        k = self.rotated(self.heads(self.linear(y, kv * size, hidden), kv), rotary)
        v = self.heads(self.linear(y, kv * size, hidden), kv)
        k = self.stored(f"past_key_values.{i}.keypresent.{i}.key", k, batch, beam_idx)
        v = self.stored(f"past_key_values.{i}.valuepresent.{i}.value", v, batch, beam_idx)
        attention = op.transpose(op.scaled_dot_product_attention(q, k, v, mask), int64([0, 2, 1, 3]))
        attention = op.reshape(attention, int64([0, 0, heads * size]), True)
        x = op.add(x, self.linear(attention, hidden, heads * size))
        y = self.norm(x)
        gate = op.swish(self.linear(y, s["intermediate_size"], hidden))
        up = self.linear(y, s["intermediate_size"], hidden)
        return op.add(x, self.linear(op.multiply(gate, up), hidden, s["intermediate_size"]))

    def model(self) -> ov.Model:
        s = self.shape
        inputs = []
        for name, rank in (("input_ids", 2), ("attention_mask", 2), ("position_ids", 2), ("beam_idx", 1)):
            kind = ov.Type.i32 if name == "beam_idx" else ov.Type.i64
            node = op.parameter(ov.PartialShape([-1] * rank), kind, name=name)
            node.output(0).get_tensor().set_names({name})
            inputs.append(node)
        ids, attention_mask, positions, beam_idx = inputs
        batch = op.gather(op.shape_of(ids), int64([0]), op.constant(np.int64(0)))
        table = self.table(s["vocab_size"], s["hidden_size"])
        x = op.gather(table, op.convert(ids, "i32"), op.constant(np.int32(0)))
        rotary, mask = self.rotary(positions), causal_mask(attention_mask, positions)
        for i in range(s["num_hidden_layers"]):
            x = self.layer(i, x, rotary, batch, beam_idx, mask)
        head = table if s["tie_word_embeddings"] else self.table(s["vocab_size"], s["hidden_size"])
        result = op.result(op.matmul(self.norm(x), head, False, True))
        result.get_output_tensor(0).set_names({"logits"})
        return ov.Model([result], self.sinks, inputs, self.variables, "model")


def write(shape: dict, group_size: int, directory: Path) -> None:
    """Write a directory that openvino_genai opens; it has no tokenizer, so prompts are token ids."""
    directory.mkdir(parents=True)
    ov.save_model(Builder(shape, group_size).model(), directory / "openvino_model.xml", compress_to_fp16=False)
    special = {"bos_token_id": 1, "eos_token_id": 2}
    (directory / "generation_config.json").write_text(json.dumps(special))
    config = {"model_type": "llama", "vocab_size": shape["vocab_size"], **special}
    (directory / "config.json").write_text(json.dumps(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", type=json.loads, required=True)
    parser.add_argument("--group-size", type=int, choices=(32, 64, 128), required=True)
    parser.add_argument("--output", type=Path, required=True)
    given = parser.parse_args()
    write(given.shape, given.group_size, given.output)


if __name__ == "__main__":
    main()
