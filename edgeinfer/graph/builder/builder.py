"""The vocabulary in which architectures write their forward pass; each method adds one operation to the graph.

Words for attention are in attention.py, those for mixtures of experts in experts.py, and the matmul with the parts of
all of them in base.py.
"""

from __future__ import annotations

from dataclasses import replace

from edgeinfer.kernels import abi

from ...base.units import round_up
from ...quant import SUPER_COLUMNS
from ..graph import Graph
from ..ops.matmul import GatedLinear, Linear, NeuronDown, NeuronGated
from ..ops.rows import (
    Activate,
    AddPositions,
    Embed,
    GatherOutputs,
    GivenRows,
    LayerNorm,
    NormedSum,
    NormPart,
    RmsNorm,
    Sample,
    TokenRows,
)
from ..tensors import Tensor
from ..weights import Source, Weight, as_source
from .attention import AttentionWords
from .experts import ExpertWords
from .recurrent import RecurrentWords

FOLD_COLUMNS = 64
"""Columns of a piece of a folded row, or a multiple of these: two groups of 32, as an instruction of most types has."""


F_NORM = "f_norm"
"""End of the name of the weight of a norm between the halves of an FFN."""


class GraphBuilder(AttentionWords, ExpertWords, RecurrentWords):
    """Collects operations and weights.

    Parameters
    ----------
    config : ModelConfig
    type_of : callable
        Storage of a weight, asked once per weight (from the request when converting, from the table when running).
    """

    def embed(self, source: str | Source) -> Tensor:
        """Look up the row of each token, times `embedding_scale`: (tokens,) -> f32 (tokens, head_width)."""
        c = self.config
        table = self._weight("embed", "embedding", (source,), ((c.vocab_size, c.head_width),))
        x = self._op(Embed(out=self._tensor("x", c.head_width), table=table))
        return x if c.embedding_scale == 1 else self.activate(x, "scale", c.embedding_scale)

    def given_rows(self) -> Tensor:
        """Take rows that the caller writes: f32 (tokens, hidden_size)."""
        return self._op(GivenRows(out=self._tensor("given", self.config.hidden_size)))

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

    def rms_norm(self, x: Tensor, name: str, source: str | Source, eps: float | None = None) -> Tensor:
        """Root-mean-square norm (arXiv 1910.07467)."""
        weight, own = self._vector(name, (source,), (x.width,)), self.config.rms_norm_eps
        out = replace(self._tensor("h", x.width), rows=x.rows)
        return self._op(RmsNorm(out=out, x=x, weight=weight, eps=own if eps is None else eps, layer=self.layer))

    def layer_norm(self, x: Tensor, name: str, source: str | Source, bias: str | Source = "") -> Tensor:
        """Layer norm (arXiv 1607.06450), with a bias where one is named."""
        weight = self._vector(name, (source,), (x.width,))
        shift = self._vector(name + "_bias", (bias,), (x.width,)) if bias else None
        out = replace(self._tensor("h", x.width), rows=x.rows)
        return self._op(LayerNorm(out=out, x=x, weight=weight, bias=shift, eps=self.config.rms_norm_eps,
                                  layer=self.layer))

    def normed_sum(self, x: Tensor, h: Tensor, name: str, source: str | Source, *, scalar: str = "", parts: int = 1,
                   eps_times: float = 1.0) -> Tensor:
        """x + norm(h), the RMS norm of the addend to the residual stream, times a `scalar` where one is named.

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
        weight = self._ordered(weight)
        left_out, outliers = self._outliers(weight)
        return self._op(GatedLinear(out=self._tensor("f", size), x=x, weight=weight, bias=biases, left_out=left_out,
                                    outliers=outliers, activation=c.hidden_act, limit=c.hidden_act_limit,
                                    layer=self.layer))

    def plain_ffn(self, x: Tensor, name: str, up: str | Source, down: str | Source, residual: Tensor,
                  bias: tuple[str | Source, ...] = ()) -> Tensor:
        """residual + act(x up^T) down^T: an FFN without a gate; `bias` names those of up and down."""
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        if self._ffn_type(name).layout == "neuron":
            return self._by_neuron(x, name, (up, down), residual, bias)
        f = self.linear(x, name + "up", (up,), (size,), bias[:1], in_ffn=True)
        f = self.activate(f, c.hidden_act, c.hidden_act_limit, in_ffn=True)
        return self.linear(f, name + "down", (down,), (c.hidden_size,), bias[1:], residual, in_ffn=True)

    def ffn(self, x: Tensor, name: str, modules: tuple[str | Source, str | Source, str | Source],
            residual: Tensor | None = None, bias: bool | tuple[str | Source, ...] = False,
            norm: str | Source = "") -> Tensor:
        """residual + (act(x gate^T) * (x up^T)) down^T; `modules` are gate, up and down in a checkpoint.

        Instead of modules there may be sources of their weights, and of biases; `norm` names an RMS norm of the
        input of down. The FFN runs as matrices, or neuron by neuron where the weights are stored so.
        """
        c = self.config
        gate, up, down = (module if isinstance(module, Source) else module + ".weight" for module in modules)
        biases = bias if isinstance(bias, tuple) else tuple(f"{module}.bias" for module in modules if bias)
        if self._ffn_type(name).layout != "neuron":
            f = self.gated(x, name + "gate_up", gate, up, biases[:2])
            f = self.rms_norm(f, name + F_NORM, norm) if norm else f
            return self.linear(f, name + "down", (down,), (c.hidden_size,), biases[2:], residual, in_ffn=True)
        return self._by_neuron(x, name, (gate, up, down), residual, biases, norm)

    def _by_neuron(self, x: Tensor, name: str, parts: tuple[str | Source, ...], residual: Tensor | None,
                   bias: tuple[str | Source, ...], norm: str | Source = "") -> Tensor:
        """An FFN of gate, up and down, or of up and down, stored neuron by neuron; biases are named as `parts` are."""
        c, size = self.config, self.config.ffn_size(self.layer or 0)
        weight = self._ffn_weight(name, parts)
        self._weights[weight.name], self._types[weight.name] = weight, self._ffn_type(name)
        inner = outer = None
        if bias:
            first = name + ("gate_up_bias" if len(parts) == 3 else "up_bias")
            inner = self._vector(first, bias[:-1], (size,) * (len(parts) - 1))
            outer = self._vector(name + "down_bias", bias[-1:], (c.hidden_size,))
        f_norm = self._vector(name + F_NORM, (norm,), (size,)) if norm else None
        f = self._op(NeuronGated(out=self._tensor("f", size), x=x, weight=weight, bias=inner,
                                 activation=c.hidden_act, limit=c.hidden_act_limit, f_norm=f_norm, layer=self.layer))
        return self._op(NeuronDown(out=self._after(residual) if residual else self._tensor("down", c.hidden_size), f=f,
                                   residual=residual, weight=weight, bias=outer, activation=c.hidden_act,
                                   f_norm=f_norm, eps=c.rms_norm_eps if norm else 0.0, layer=self.layer))

    def logits(self, x: Tensor, norm: str | Source, head: str | Source, *, layer_norm: bool = False,
               norm_bias: str | Source = "", head_bias: str | Source = "", project: str | Source = "",
               norm_name: str = "norm") -> Tensor:
        """Final norm, output head, and the sample of a token, for the rows whose logits are wanted.

        If a model has no final norm `norm` is empty; `project` makes rows of `embedding_dim` elements for the head.
        `logits_scale` is folded into the norm's weight and bias when a bundle is made, which is exact.
        """
        c, self.layer = self.config, None
        norm, norm_bias = (as_source(source, (c.hidden_size,), "norm").scaled(c.logits_scale)
                           if source and c.logits_scale != 1 else source for source in (norm, norm_bias))
        xo = self._op(GatherOutputs(out=Tensor("outputs", c.hidden_size, rows="outputs"), x=x))
        tied = c.tie_word_embeddings
        if not tied:
            self._weight("head", "head", (head,), ((c.vocab_size, c.head_width),))
        if not norm:
            h = xo
        elif layer_norm:
            h = self.layer_norm(xo, norm_name, norm, norm_bias)
        else:
            h = self.rms_norm(xo, norm_name, norm)
        if project:
            h = self.linear(h, "project_out", (project,), (c.head_width,))
        weight = self._weights["embed" if tied else "head"]
        bias = self._vector("head_bias", (head_bias,), (c.vocab_size,)) if head_bias else None
        logits = self._op(Linear(out=Tensor("logits", c.vocab_size, rows="outputs"), x=h, weight=weight, bias=bias))
        if c.logits_softcap:
            logits = self.activate(logits, "soft_cap", c.logits_softcap)
        work = Tensor("sample", abi.sample_row(c.vocab_size)[0] // 4, rows="outputs")
        self._op(Sample(out=work, logits=logits))
        return logits

    def build(self, logits: Tensor) -> Graph:
        """The finished graph."""
        return Graph(self.config, tuple(self._ops), tuple(self._weights.values()), dict(self._types), logits)
