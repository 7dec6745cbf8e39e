"""The vocabulary in which architectures write their forward pass; each method adds one operation to the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from edgeinfer.kernels import abi

from ..errors import UnsupportedModelError
from ..quant import SUPER_COLUMNS, WeightType
from ..sizes import round_up
from .config import ModelConfig
from .experts import ENTRY, ExpertsDown, ExpertsGated, ExpertsInput, Route, SigmoidGate, SortRoutes
from .graph import Graph
from .latent import HeadLinear, LatentAttention, QuantizeHeads, StoreLatent
from .operation import Op
from .ops import (
    Activate,
    AddPositions,
    Attention,
    Draw,
    Embed,
    GatherOutputs,
    LayerNorm,
    NormedSum,
    NormPart,
    Quantize,
    RmsNorm,
    RopeStore,
    RotateQueries,
    TokenRows,
)
from .products import Gated, Linear, LinearPart, NeuronDown, NeuronGated
from .types import Tensor
from .weights import Source, Weight, as_source

FOLD_COLUMNS = 64
"""Of a piece of a folded row, a multiple of these: two groups of 32, as a record of most types has."""


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
        self.layer: int | None = None
        """The layer that operations belong to from now on."""
        self._type_of = type_of
        self._ops: list[Op] = []
        self._weights: dict[str, Weight] = {}
        self._types: dict[str, WeightType] = {}
        self._names: dict[str, int] = {}

    # -- operations ------------------------------------------------------------------------------------------------

    def embed(self, source: str | Source) -> Tensor:
        """Look up the row of each token, times `embedding_scale`: (tokens,) -> f32 (tokens, hidden_size)."""
        c = self.config
        table = self._weight("embed", "embedding", (source,), ((c.vocab_size, c.hidden_size),))
        x = self._op(Embed(out=self._tensor("x", c.hidden_size), table=table))
        return x if c.embedding_scale == 1 else self.activate(x, "scale", c.embedding_scale)

    def token_rows(self, name: str, source: str, rows: int, width: int) -> Tensor:
        """Look up a further row of each token, in a table that stays in the file: (tokens,) -> f32 (tokens, width)."""
        nested = self._type_of(Weight(name, (), "rows")).storage.nested
        piece = round_up(-(-width // 16), SUPER_COLUMNS if nested else FOLD_COLUMNS)
        table = Weight(name, (16 * rows, piece), "rows", (Source(source, (rows, width)),), "folded16")
        self._weights[name], self._types[name] = table, self._type_of(table)
        return self._op(TokenRows(out=self._tensor(name, width), table=table))

    def add_positions(self, x: Tensor, source: str | Source, offset: int = 0) -> Tensor:
        """x + the row of each token's position; `offset` is the row of the table that position 0 has."""
        c = self.config
        table = self._weight("positions", "vector", (source,), ((c.max_position_embeddings + offset, c.hidden_size),))
        return self._op(AddPositions(out=self._after(x), x=x, table=table, offset=offset))

    def activate(self, x: Tensor, function: str, factor: float = 0.0, in_ffn: bool = False, by: Tensor | None = None,
                 start: int = 0) -> Tensor:
        """A function of each value, in place (kernels.VALUE_FUNCTIONS), times the values of `by` from `start` on."""
        return self._op(Activate(out=self._after(x), x=x, function=function, factor=factor, in_ffn=in_ffn, by=by,
                                 start=start, layer=self.layer))

    def rms_norm(self, x: Tensor, name: str, source: str | Source, feeds: str | WeightType,
                 eps: float | None = None) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467); quantised on the way out if what it feeds, by name or type, is."""
        weight, own = self._vector(name, (source,), (x.width,)), self.config.rms_norm_eps
        out = self._activation("h", x.width, self._feed_type(feeds), x.rows)
        return self._op(RmsNorm(out=out, x=x, weight=weight, eps=own if eps is None else eps, layer=self.layer))

    def layer_norm(self, x: Tensor, name: str, source: str | Source, feeds: str | WeightType,
                   bias: str | Source = "") -> Tensor:
        """Layer norm (arXiv 1607.06450), with a bias where one is named; quantised on the way out as `rms_norm` is."""
        weight = self._vector(name, (source,), (x.width,))
        shift = self._vector(name + "_bias", (bias,), (x.width,)) if bias else None
        out = self._activation("h", x.width, self._feed_type(feeds), x.rows)
        return self._op(LayerNorm(out=out, x=x, weight=weight, bias=shift, eps=self.config.rms_norm_eps,
                                  layer=self.layer))

    def normed_sum(self, x: Tensor, h: Tensor, name: str, source: str | Source, *, scalar: str = "", parts: int = 1,
                   eps_times: float = 1.0) -> Tensor:
        """x + norm(h), the RMS norm of what is added to the residual stream, times a `scalar` where one is named.

        `parts` of a row may be normed one by one; where h is not as large as the model has it, eps is not either.
        """
        weight = self._vector(name, (source,), (x.width // parts,))
        by = self._vector(name + "_scalar", (scalar,), (1,)) if scalar else None
        return self._op(NormedSum(out=self._after(x), h=h, x=x, weight=weight, scalar=by, parts=parts,
                                  eps=self.config.rms_norm_eps * eps_times, layer=self.layer))

    def norm_part(self, x: Tensor, name: str, source: str | Source, start: int, width: int) -> Tensor:
        """RMS norm of `width` elements of each row, from `start` on, in place."""
        weight = self._vector(name, (source,), (width,))
        return self._op(NormPart(out=self._after(x), x=x, weight=weight, start=start, eps=self.config.rms_norm_eps,
                                 layer=self.layer))

    def feeds_both(self, one: str | WeightType, other: str | WeightType) -> WeightType:
        """Return the type that a norm gives which feeds two weights, by name or type: floats where these differ."""
        one, other = self._feed_type(one), self._feed_type(other)
        alike = (one.quantised, one.group_size) == (other.quantised, other.group_size)
        return one if alike else WeightType("f32", 0, "plain")

    def linear(
        self,
        x: Tensor,
        name: str,
        sources: tuple[str | Source, ...],
        widths: tuple[int, ...],
        bias: tuple[str | Source, ...] = (),
        residual: Tensor | None = None,
        in_ffn: bool = False,
        kind: str = "matrix",
        room: int = 0,
    ) -> Tensor:
        """x W^T (+ bias) (+ residual): the matrices of `sources`, of `widths` rows each, multiplied as one.

        Where they are stored in several types, each run of sources of one type is a part by itself. The output has
        `room` for further columns, which nobody has written.
        """
        if firsts := self._parts(name, len(sources)):
            return self._linear_parts(x, name, sources, widths, bias, firsts, room)
        weight = self._weight(name, kind, sources, tuple((w, x.width) for w in widths))
        biases = self._vector(name + "_bias", bias, widths) if bias else None
        out = self._after(residual) if residual else self._tensor(name.rsplit(".", 1)[-1], sum(widths) + room)
        if room:
            return self._op(LinearPart(out=out, x=self._as_input(x, self._types[name]), weight=weight, bias=biases,
                                       first=0, layer=self.layer))
        return self._op(Linear(out=out, x=self._as_input(x, self._types[name]), weight=weight, bias=biases,
                               residual=residual, in_ffn=in_ffn, layer=self.layer))

    def _linear_parts(self, x: Tensor, name: str, sources: tuple[str | Source, ...], widths: tuple[int, ...],
                      bias: tuple[str | Source, ...], firsts: list[int], room: int) -> Tensor:
        """A product in parts that begin at these sources; each makes its input, so that it may be fused with it."""
        out, onto = self._tensor(name.rsplit(".", 1)[-1], sum(widths) + room), None
        for first, end in zip(firsts, (*firsts[1:], len(sources)), strict=True):
            part, mine = f"{name}.{first}", slice(first, end)
            weight = self._weight(part, "matrix", sources[mine], tuple((w, x.width) for w in widths[mine]))
            biases = self._vector(part + "_bias", bias[mine], widths[mine]) if bias else None
            made = self._as_input(x, self._types[part]) if onto is None else self._again(x, self._types[part])
            onto = self._op(LinearPart(out=out, x=made, weight=weight, bias=biases, first=sum(widths[:first]),
                                       onto=onto, layer=self.layer))
            out = self._after(onto)
        assert onto
        return onto

    def _parts(self, name: str, sources: int) -> list[int]:
        """The sources at which the parts of a matrix begin; none where it is stored whole."""
        return [i for i in range(sources if sources > 1 else 0)
                if self._type_of(Weight(f"{name}.{i}", (), "part")).layout != "plain"]

    def gated(self, x: Tensor, name: str, gate: str | Source, up: str | Source,
              bias: tuple[str | Source, ...] = (), size: int = 0) -> Tensor:
        """act(x gate^T) * (x up^T), gate and up stored as one matrix that alternates by tile of 16 rows.

        `size` is the intermediate size where it is not the model's.
        """
        c = self.config
        size = size or c.ffn_size(self.layer or 0)
        shapes = ((size, c.hidden_size),) * 2
        weight = self._weight(name, "matrix", (gate, up), shapes, combine="interleave16")
        biases = None
        if bias:
            biases = self._vector(name + "_bias", bias, (size,) * 2, combine="interleave16")
        x = self._as_input(x, self._types[name])
        return self._op(Gated(out=self._tensor("f", size), x=x, weight=weight, bias=biases,
                              activation=c.hidden_act, limit=c.hidden_act_limit, layer=self.layer))

    def plain_ffn(self, x: Tensor, name: str, up: str | Source, down: str | Source, residual: Tensor,
                  bias: tuple[str | Source, ...] = ()) -> Tensor:
        """residual + act(x up^T) down^T: an FFN without a gate; `bias` names those of up and down."""
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        f = self.linear(x, name + "up", (up,), (size,), bias[:1], in_ffn=True)
        f = self.activate(f, c.hidden_act, c.hidden_act_limit, in_ffn=True)
        return self.linear(f, name + "down", (down,), (c.hidden_size,), bias[1:], residual, in_ffn=True)

    def ffn_input(self, name: str) -> WeightType:
        """Return the type of the weight that the input of a layer's FFN feeds; `name` is the layer's prefix."""
        stored = self._ffn_type(name)
        return stored if stored.layout == "neuron" else self._feed_type(name + "gate_up")

    def ffn(self, x: Tensor, name: str, modules: tuple[str | Source, str | Source, str | Source],
            residual: Tensor | None = None, bias: bool | tuple[str | Source, ...] = False) -> Tensor:
        """residual + (act(x gate^T) * (x up^T)) down^T; `modules` are gate, up and down in a checkpoint.

        Instead of modules there may be sources of their weights, and of biases. As matrices, or neuron by neuron where
        the weights are stored so.
        """
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        gate, up, down = (module if isinstance(module, Source) else module + ".weight" for module in modules)
        biases = bias if isinstance(bias, tuple) else tuple(f"{module}.bias" for module in modules if bias)
        if self._ffn_type(name).layout != "neuron":
            f = self.gated(x, name + "gate_up", gate, up, biases[:2])
            return self.linear(f, name + "down", (down,), (c.hidden_size,), biases[2:], residual, in_ffn=True)
        if residual is None:
            raise UnsupportedModelError("An FFN whose output is normed cannot be stored neuron by neuron; convert the "
                                        "model with --ffn-layout tile16.")
        weight = self._ffn_weight(name, (gate, up, down))
        self._weights[weight.name], self._types[weight.name] = weight, self._ffn_type(name)
        x = self._as_input(x, self._types[weight.name])
        inner = outer = None
        if bias:
            inner = self._vector(name + "gate_up_bias", biases[:2], (size,) * 2)
            outer = self._vector(name + "down_bias", biases[2:], (c.hidden_size,))
        f = self._op(NeuronGated(out=self._tensor("f", size), x=x, weight=weight, bias=inner,
                                 activation=c.hidden_act, limit=c.hidden_act_limit, layer=self.layer))
        return self._op(NeuronDown(out=self._after(residual), f=f, residual=residual, weight=weight, bias=outer,
                                   activation=c.hidden_act, layer=self.layer))

    def rope_store(self, qkv: Tensor, q_norm: str | Source = "", k_norm: str | Source = "") -> Tensor:
        """Normalise q and k heads where asked, rotate them, and write k and v to the layer's KV blocks.

        A layer that reads another's K and V has queries alone.
        """
        c, i = self.config, self.layer or 0
        q, k = (self._vector(f"layers.{i}.{name}", (source,), (c.head_size(i),)) if source else None
                for name, source in (("q_norm", q_norm), ("k_norm", k_norm)))
        if c.kv_layer(i) != i:
            return self._op(RotateQueries(out=self._after(qkv), q=qkv, q_norm=q, **self._rotated(i)))
        return self._op(RopeStore(out=self._after(qkv), qkv=qkv, q_norm=q, k_norm=k, value_norm=c.value_norm,
                                  keys_as_values=i in c.keys_as_values, **self._rotated(i)))

    def _rotated(self, i: int) -> dict[str, Any]:
        """Heads of a layer, and how they turn."""
        c, turn = self.config, self.config.turns(i)
        rope = c.rotations[turn - 1] if turn and c.rotations else None
        return {"heads": c.num_attention_heads, "kv_heads": c.kv_count(i), "head_dim": c.head_size(i),
                "eps": c.rms_norm_eps, "rotary": c.turned(rope) if rope else 0, "apart": rope.span // 2 if rope else 0,
                "table": max(turn - 1, 0), "layer": i}

    def attention(self, qkv: Tensor, sinks: str | Source = "") -> Tensor:
        """Causal (sliding-window) attention of the rotated queries over the stored blocks of their sequences.

        `sinks` names a logit for each query head that takes part in its softmax and has no value.
        """
        c, i = self.config, self.layer or 0
        n, of = c.head_size(i), c.kv_layer(i)
        logits = self._vector(f"layers.{i}.sinks", (sinks,), (c.num_attention_heads,)) if sinks else None
        return self._op(Attention(out=self._tensor("a", c.num_attention_heads * n), qkv=qkv, head_dim=n,
                                  heads=c.num_attention_heads, kv_heads=c.kv_count(i), layer=self.layer,
                                  scale=c.attention_scale or n**-0.5, window=c.window(i), cap=c.attention_softcap,
                                  sinks=logits, kv_layer=None if of == i else of))

    def head_linear(self, x: Tensor, name: str, sources: tuple[Source, ...], shape: tuple[int, int], heads: int,
                    step: int, more: int = 0) -> Tensor:
        """The product of each head's piece of x, they lie side by side, with the head's own matrix of this shape.

        It has `step` columns of the output from its piece on; behind those of all heads are so many `more`.
        """
        (rows, cols), width = shape, heads * step + more
        weight = self._weight(name, "matrix", sources, ((heads * rows // len(sources), cols),) * len(sources))
        stored = self._types[name]
        if stored.quantised:
            out = replace(self._activation("q", cols, stored, x.rows), times=heads)
            x = self._op(QuantizeHeads(out=out, x=x, layer=self.layer))
        return self._op(HeadLinear(out=self._tensor(name.rsplit(".", 1)[-1], width), x=x, weight=weight, heads=heads,
                                   step=step, layer=self.layer))

    def store_latent(self, queries: Tensor, q: Tensor, compressed: Tensor, norm: str, q_first: int, first: int,
                     eps: float) -> Tensor:
        """Norm latent and rotate keys, which go to the layer's blocks and behind the queries; complete these.

        Rotated parts of the queries are in `q` from a column on, latent and key in `compressed`.
        """
        c, rank = self.config, self.config.head_dim - self.config.rope_dim
        return self._op(StoreLatent(out=self._after(queries), queries=queries, q=q, compressed=compressed, rank=rank,
                                    norm=self._vector(f"layers.{self.layer}.kv_a_norm", (norm,), (rank,)),
                                    heads=c.num_attention_heads, rotary=c.rope_dim, q_first=q_first, first=first,
                                    eps=eps, layer=self.layer))

    def latent_attention(self, queries: Tensor) -> Tensor:
        """Causal attention over latent keys, whose first elements are V."""
        c, rank = self.config, self.config.head_dim - self.config.rope_dim
        return self._op(LatentAttention(out=self._tensor("a", c.num_attention_heads * rank), qkv=queries, kv_heads=1,
                                        heads=c.num_attention_heads, head_dim=c.head_dim, values=rank,
                                        scale=c.attention_scale, layer=self.layer))

    def logits(self, x: Tensor, norm: str | Source, head: str | Source, *, layer_norm: bool = False,
               norm_bias: str | Source = "", head_bias: str | Source = "") -> Tensor:
        """Final norm, output head, and the draw of a token, for the rows whose logits are wanted.

        `logits_scale` is folded into the norm's weight and bias when a bundle is made, which is exact.
        """
        c, self.layer = self.config, None
        norm, norm_bias = (as_source(source, (c.hidden_size,), "norm").scaled(c.logits_scale)
                           if source and c.logits_scale != 1 else source for source in (norm, norm_bias))
        xo = self._op(GatherOutputs(out=Tensor("outputs", c.hidden_size, rows="outputs"), x=x))
        tied = c.tie_word_embeddings
        if not tied:
            self._weight("head", "head", (head,), ((c.vocab_size, c.hidden_size),))
        feeds = "embed" if tied else "head"
        if layer_norm:
            h = self.layer_norm(xo, "norm", norm, feeds, norm_bias)
        else:
            h = self.rms_norm(xo, "norm", norm, feeds)
        weight = self._weights["embed" if tied else "head"]
        h = self._as_input(h, self._types[weight.name])
        bias = self._vector("head_bias", (head_bias,), (c.vocab_size,)) if head_bias else None
        logits = self._op(Linear(out=Tensor("logits", c.vocab_size, rows="outputs"), x=h, weight=weight, bias=bias))
        if c.logits_softcap:
            logits = self.activate(logits, "soft_cap", c.logits_softcap)
        work = Tensor("draw", abi.draw_row(c.vocab_size)[0] // 4, rows="outputs")
        self._op(Draw(out=work, logits=logits))
        return logits

    def build(self, logits: Tensor) -> Graph:
        """The finished graph."""
        return Graph(self.config, tuple(self._ops), tuple(self._weights.values()), dict(self._types), logits)

    def route(self, h: Tensor, name: str, hf: str) -> Tensor:
        """Which experts each token goes through, as a router chooses by h; `hf` is the layer's module.

        The tensors of all families go by one set of names (converters/expert_names.py has the others).
        """
        e = self.config.experts
        assert e
        logits = self.linear(h, name + "router", (hf + "gate.weight",), (e.total,), kind="router",
                             bias=(hf + "gate.bias",) if e.bias else ())
        return self._op(Route(
            out=self._tensor("routes", ENTRY * e.active), logits=logits, experts=e.total, active=e.active,
            scores=e.scores, normalise=e.normalise, scale=e.scale, groups=e.groups, active_groups=e.active_groups,
            group_best=e.group_best, layer=self.layer,
            bias=self._vector(name + "router_bias", (hf + "gate.e_score_correction_bias",), (e.total,))
            if e.choice_bias else None))

    def experts(self, x: Tensor, routes: Tensor, name: str, hf: str, residual: Tensor) -> Tensor:
        """residual + the weighted FFNs of x of the experts that `route` chose; names as there."""
        c, e = self.config, self.config.experts
        assert e
        listed = self._op(SortRoutes(out=self._tensor("listed", 2 * ENTRY * e.active), routes=routes, experts=e.total,
                                     active=e.active, several=True, layer=self.layer))
        size = e.intermediate_size
        gate_up = self._stack(name + "experts_gate_up", hf + "experts.{}.", ("gate_proj", "up_proj"), (size, x.width))
        inner, outer = (self._stack_bias(name + which, hf + "experts.{}.", parts, rows) if e.bias else None
                        for which, parts, rows in (("experts_gate_up_bias", ("gate_proj", "up_proj"), size),
                                                   ("experts_down_bias", ("down_proj",), c.hidden_size)))
        f = self._op(ExpertsGated(
            out=replace(self._tensor("f", size), times=e.active), x=self._listed(x, listed, gate_up, e.active),
            weight=gate_up, bias=inner, source=x, routes=routes, listed=listed, activation=c.hidden_act,
            limit=c.hidden_act_limit, experts=e.total, active=e.active, layer=self.layer))
        down = self._stack(name + "experts_down", hf + "experts.{}.", ("down_proj",), (c.hidden_size, size))
        rows = self._listed(f, listed, down, e.active) if self._types[down.name].quantised else f
        return self._op(ExpertsDown(out=self._after(residual), x=rows, weight=down, bias=outer, source=f,
                                    routes=routes, listed=listed, residual=residual, experts=e.total, active=e.active,
                                    layer=self.layer))

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate), a gate for each row."""
        return self._op(SigmoidGate(out=self._after(x), x=x, gate=gate, layer=self.layer))

    # -- parts -----------------------------------------------------------------------------------------------------

    def _op(self, op: Op) -> Tensor:
        self._ops.append(op)
        return op.out

    def _after(self, x: Tensor) -> Tensor:
        """What an operation leaves that writes over x."""
        return replace(x, name=self._tensor(x.name.rsplit(".", 1)[0], x.width).name)

    def _ffn_weight(self, name: str, sources: tuple[str | Source, ...] = ()) -> Weight:
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        shapes = ((size, c.hidden_size),) * 2 + ((c.hidden_size, size),)
        parts = tuple(as_source(source, shape, name + "ffn") for source, shape in zip(sources, shapes, strict=False))
        return Weight(name + "ffn", (size, 3, c.hidden_size), "ffn", parts, "neurons")

    def _ffn_type(self, name: str) -> WeightType:
        return self._type_of(self._ffn_weight(name))

    def _tensor(self, stem: str, width: int) -> Tensor:
        count = self._names[stem] = self._names.get(stem, -1) + 1
        return Tensor(f"{stem}.{count}", width)

    def _activation(self, stem: str, width: int, feeds: WeightType, rows: str) -> Tensor:
        name = self._tensor(stem, width).name
        return Tensor(name, width, "q8" if feeds.quantised else "f32", feeds.group_size, rows)

    def _feed_type(self, feeds: str | WeightType) -> WeightType:
        """Type of the weight that a norm feeds; a matrix may be added only later."""
        if isinstance(feeds, WeightType):
            return feeds
        if feeds in self._types:
            return self._types[feeds]
        first = self._type_of(Weight(feeds + ".0", (), "part"))
        return first if first.layout != "plain" else self._type_of(Weight(feeds, (), "matrix"))

    def _again(self, x: Tensor, weight: WeightType) -> Tensor:
        """What a norm has made, made once more as another weight reads it; other tensors as they are."""
        norm = next(op for op in reversed(self._ops) if op.out == x)
        if not isinstance(norm, RmsNorm | LayerNorm):
            return self._as_input(x, weight)
        return self._op(replace(norm, out=self._activation(x.name.rsplit(".", 1)[0], x.width, weight, x.rows)))

    def _as_input(self, x: Tensor, weight: WeightType) -> Tensor:
        if not weight.quantised or (x.dtype == "q8" and x.group_size == weight.group_size):
            return x
        return self._op(Quantize(out=self._activation("q", x.width, weight, x.rows), x=x, layer=self.layer))

    def _listed(self, x: Tensor, listed: Tensor, feeds: Weight, active: int) -> Tensor:
        """x in the order in which experts take it, in the type that they multiply."""
        out = replace(self._activation("e", x.width, self._types[feeds.name], x.rows), times=active)
        return self._op(ExpertsInput(out=out, x=x, listed=listed, active=active, several=True, layer=self.layer))

    def _stack(self, name: str, module: str, parts: tuple[str, ...], shape: tuple[int, int]) -> Weight:
        """Matrices of all experts, each padded to whole tiles; of two, tiles alternate."""
        assert self.config.experts
        n, (rows, cols) = self.config.experts.total, shape
        sources = tuple(Source(f"{module}{part}.weight", (n, *shape), each=True) for part in parts)
        combine = "stacked_pairs16" if len(parts) == 2 else "stacked16"
        weight = Weight(name, (n * len(parts) * round_up(rows, 16), cols), "experts", sources, combine)
        self._weights[name], self._types[name] = weight, self._type_of(weight)
        return weight

    def _stack_bias(self, name: str, module: str, parts: tuple[str, ...], rows: int) -> Weight:
        """Biases of the matrices that `_stack` has, padded and alternating as these."""
        assert self.config.experts
        n = self.config.experts.total
        sources = tuple(Source(f"{module}{part}.bias", (n, rows), each=True) for part in parts)
        combine = "stacked_pairs16" if len(parts) == 2 else "stacked16"
        weight = Weight(name, (n * len(parts) * round_up(rows, 16),), "vector", sources, combine)
        self._weights[name], self._types[name] = weight, WeightType("f32", 0, "plain")
        return weight

    def _vector(self, name: str, sources: tuple[str | Source, ...], widths: tuple[int, ...],
                combine: str = "concat") -> Weight:
        return self._weight(name, "vector", sources, tuple((w,) for w in widths), combine)

    def _weight(self, name: str, kind: str, sources: tuple[str | Source, ...], shapes: tuple[tuple[int, ...], ...],
                combine: str = "concat") -> Weight:
        step = 16 if combine == "interleave16" else 1
        rows = sum(round_up(shape[0], step) for shape in shapes)
        parts = tuple(as_source(source, shape, name) for source, shape in zip(sources, shapes, strict=True))
        weight = Weight(name, (rows, *shapes[0][1:]), kind, parts, combine)
        self._weights[name] = weight
        plain = "plain" if len(weight.shape) == 1 else "tile16"
        self._types[name] = WeightType("f32", 0, plain) if kind == "vector" else self._type_of(weight)
        return weight
