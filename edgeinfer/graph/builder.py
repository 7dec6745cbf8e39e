"""The vocabulary in which architectures write their forward pass; each method adds one operation to the graph."""

from __future__ import annotations

from collections.abc import Callable

from .config import ModelConfig
from .types import Graph, Op, Tensor, Weight, WeightType


def round_up(n: int, step: int) -> int:
    """Smallest multiple of `step` that is at least n."""
    return -(-n // step) * step


class GraphBuilder:
    """Collects operations and weights.

    Parameters
    ----------
    config : ModelConfig
    type_of : callable
        Storage of a weight, asked once per weight (from the request when converting, from the table when running).
    """

    def __init__(self, config: ModelConfig, type_of: Callable[[Weight], WeightType]):
        self.config = config
        self._type_of = type_of
        self._ops: list[Op] = []
        self._weights: dict[str, Weight] = {}
        self._types: dict[str, WeightType] = {}
        self._names: dict[str, int] = {}

    # -- operations ------------------------------------------------------------------------------------------------

    def embed(self, source: str) -> Tensor:
        """Look up the row of each token: (tokens,) -> f32 (tokens, hidden_size)."""
        c = self.config
        table = self._weight("embed", "embedding", (source,), ((c.vocab_size, c.hidden_size),))
        return self._op("embed", (), self._tensor("x", c.hidden_size), (table,))

    def rms_norm(self, x: Tensor, name: str, source: str, feeds: str) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467); quantised on the way out if the weight it feeds is."""
        weight = self._vector(name, (source,), (x.width,))
        out = self._activation("h", x.width, self._feed_type(feeds), x.rows)
        return self._op("rms_norm", (x,), out, (weight,), eps=self.config.rms_norm_eps)

    def linear(
        self,
        x: Tensor,
        name: str,
        sources: tuple[str, ...],
        widths: tuple[int, ...],
        bias: tuple[str, ...] = (),
        residual: Tensor | None = None,
    ) -> Tensor:
        """x W^T (+ bias) (+ residual): the matrices of `sources`, of `widths` rows each, multiplied as one."""
        shapes = tuple((w, x.width) for w in widths)
        weights = [self._weight(name, "matrix", sources, shapes)]
        if bias:
            weights.append(self._vector(name + "_bias", bias, widths))
        x = self._as_input(x, self._types[name])
        if residual is not None:
            return self._op("linear", (x, residual), residual, tuple(weights), in_place=True)
        return self._op("linear", (x,), self._tensor(name.rsplit(".", 1)[-1], sum(widths)), tuple(weights))

    def gated(self, x: Tensor, name: str, gate: str, up: str, bias: tuple[str, ...] = ()) -> Tensor:
        """act(x gate^T) * (x up^T), gate and up stored as one matrix that alternates by tile of 16 rows."""
        c = self.config
        shapes = ((c.intermediate_size, c.hidden_size),) * 2
        weights = [self._weight(name, "matrix", (gate, up), shapes, combine="interleave16")]
        if bias:
            weights.append(self._vector(name + "_bias", bias, (c.intermediate_size,) * 2, combine="interleave16"))
        x = self._as_input(x, self._types[name])
        out = self._tensor("f", c.intermediate_size)
        return self._op("gated", (x,), out, tuple(weights), activation=c.hidden_act)

    def ffn_input(self, name: str) -> str:
        """Name of the weight that the input of a layer's FFN feeds; `name` is the layer's prefix."""
        return name + ("ffn" if self._ffn_type(name).layout == "neuron" else "gate_up")

    def ffn(self, x: Tensor, name: str, modules: tuple[str, str, str], residual: Tensor, bias: bool = False) -> Tensor:
        """residual + (act(x gate^T) * (x up^T)) down^T; `modules` are gate, up and down in a checkpoint.

        As matrices, or neuron by neuron where the weights are stored so.
        """
        c = self.config
        gate, up, down = (module + ".weight" for module in modules)
        biases = tuple(module + ".bias" for module in modules) if bias else ()
        if self._ffn_type(name).layout != "neuron":
            f = self.gated(x, name + "gate_up", gate, up, biases[:2])
            return self.linear(f, name + "down", (down,), (c.hidden_size,), biases[2:], residual)
        weight = self._ffn_weight(name, (gate, up, down))
        self._weights[weight.name], self._types[weight.name] = weight, self._ffn_type(name)
        x = self._as_input(x, self._types[weight.name])
        extra: tuple[tuple[Weight, ...], ...] = ((), ())
        if bias:
            extra = ((self._vector(name + "gate_up_bias", biases[:2], (c.intermediate_size,) * 2),),
                     (self._vector(name + "down_bias", biases[2:], (c.hidden_size,)),))
        f = self._op("neuron_gated", (x,), self._tensor("f", c.intermediate_size), (weight, *extra[0]),
                     activation=c.hidden_act)
        return self._op("neuron_down", (f, residual), residual, (weight, *extra[1]), in_place=True)

    def _ffn_weight(self, name: str, sources: tuple[str, ...] = ()) -> Weight:
        c = self.config
        shapes = ((c.intermediate_size, c.hidden_size),) * 2 + ((c.hidden_size, c.intermediate_size),)
        return Weight(name + "ffn", (c.intermediate_size, 3, c.hidden_size), "ffn", sources, shapes, "neurons")

    def _ffn_type(self, name: str) -> WeightType:
        return self._type_of(self._ffn_weight(name))

    def rope_store(self, qkv: Tensor, layer: int, q_norm: str = "", k_norm: str = "") -> Tensor:
        """Normalise q and k heads where asked, rotate them, and write k and v to the layer's KV blocks."""
        c = self.config
        weights = []
        if q_norm:
            weights = [self._vector(f"layers.{layer}.q_norm", (q_norm,), (c.head_dim,)),
                       self._vector(f"layers.{layer}.k_norm", (k_norm,), (c.head_dim,))]
        return self._op("rope_store", (qkv,), qkv, tuple(weights), in_place=True, layer=layer, eps=c.rms_norm_eps)

    def attention(self, qkv: Tensor, layer: int) -> Tensor:
        """Causal (sliding-window) attention of the rotated queries over the stored blocks of their sequences."""
        c = self.config
        out = self._tensor("a", c.query_width)
        return self._op("attention", (qkv,), out, (), layer=layer, window=c.window(layer))

    def logits(self, x: Tensor, norm: str, head: str) -> Tensor:
        """Final norm and output head, for the rows whose logits are wanted."""
        c = self.config
        xo = Tensor("outputs", c.hidden_size, rows="outputs")
        self._op("gather_outputs", (x,), xo)
        tied = c.tie_word_embeddings
        if not tied:
            self._weight("head", "head", (head,), ((c.vocab_size, c.hidden_size),))
        h = self.rms_norm(xo, "norm", norm, feeds="embed" if tied else "head")
        weight = self._weights["embed" if tied else "head"]
        h = self._as_input(h, self._types[weight.name])
        return self._op("linear", (h,), Tensor("logits", c.vocab_size, rows="outputs"), (weight,))

    def build(self, logits: Tensor) -> Graph:
        """The finished graph."""
        return Graph(self.config, tuple(self._ops), tuple(self._weights.values()), dict(self._types), logits)

    # -- parts -----------------------------------------------------------------------------------------------------

    def _op(self, kind: str, inputs: tuple[Tensor, ...], output: Tensor, weights: tuple[Weight, ...] = (),
            in_place: bool = False, **attributes: object) -> Tensor:
        self._ops.append(Op(kind, inputs, (output,), weights, attributes, in_place))
        return output

    def _tensor(self, stem: str, width: int) -> Tensor:
        count = self._names[stem] = self._names.get(stem, -1) + 1
        return Tensor(f"{stem}.{count}", width)

    def _activation(self, stem: str, width: int, feeds: WeightType, rows: str) -> Tensor:
        name = self._tensor(stem, width).name
        return Tensor(name, width, "q8" if feeds.quantised else "f32", feeds.group_size, rows)

    def _feed_type(self, feeds: str) -> WeightType:
        """Type of the weight that a norm feeds, which may be added only later."""
        kind = "ffn" if feeds.endswith(".ffn") else "matrix"
        return self._types.get(feeds) or self._type_of(Weight(feeds, (), kind, (), ()))

    def _as_input(self, x: Tensor, weight: WeightType) -> Tensor:
        if not weight.quantised or (x.dtype == "q8" and x.group_size == weight.group_size):
            return x
        return self._op("quantize", (x,), self._activation("q", x.width, weight, x.rows))

    def _vector(self, name: str, sources: tuple[str, ...], widths: tuple[int, ...], combine: str = "concat") -> Weight:
        return self._weight(name, "vector", sources, tuple((w,) for w in widths), combine)

    def _weight(self, name: str, kind: str, sources: tuple[str, ...], shapes: tuple[tuple[int, ...], ...],
                combine: str = "concat") -> Weight:
        step = 16 if combine == "interleave16" else 1
        rows = sum(round_up(shape[0], step) for shape in shapes)
        weight = Weight(name, (rows, *shapes[0][1:]), kind, sources, shapes, combine)
        self._weights[name] = weight
        self._types[name] = WeightType("f32", 0, "plain") if kind == "vector" else self._type_of(weight)
        return weight
