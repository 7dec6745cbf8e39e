"""Embeddings of texts, and the order of documents by a model that judges them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from ..base.dataclass import dataclass
from ..base.validation import FLAG, checked, choice
from ..errors import RequestError
from .options import Prompt
from .requests import TEXTS_OR_IDS, Requests, run_together

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..engine import Request, Score
    from ..runtime import HiddenRows

TASK = "Given a web search query, retrieve relevant passages that answer the query"
_JUDGE = ("Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that "
          'the answer can only be "yes" or "no".')
POOLING = choice(("mean", "last"))


@dataclass(frozen=True)
class Ranked:
    """A document and how relevant the model finds it."""

    index: int
    """Index among the documents that were given."""
    score: float
    """Probability of "yes" beside "no", from 0 to 1."""


class Embeddings(Requests):
    """The part of `LLM` that embeds and ranks texts."""

    _hidden: HiddenRows | None = None

    def embed(self, texts: Iterable[Prompt], *, pooling: str = "mean", normalize: bool = True) -> NDArray[np.float32]:
        """Return the embeddings of texts: the rows in front of the output head, pooled.

        Parameters
        ----------
        texts : texts or lists of token ids
        pooling : {"mean", "last"}
            Mean over all tokens, or the last token's row, as the model was trained for.
        normalize : bool
            Divide each by its Euclidean length, so that products of two are cosines.

        Returns
        -------
        float32 array of shape (len(texts), hidden_size)

        Raises
        ------
        RequestError
            A text is empty or longer than the context, or a device of others runs the model.
        """
        import numpy as np

        requests = (self.embed_request(one, pooling, normalize) for one in checked("texts", texts, TEXTS_OR_IDS))
        found = run_together(requests, 2 * self.runner.config.max_sequences)
        return np.stack(found) if found else np.zeros((0, self.runner.model.hidden_size), np.float32)

    def embed_request(self, text: Prompt, pooling: str = "mean", normalize: bool = True
                      ) -> Request[NDArray[np.float32]]:
        """Prepare a request for one embedding; nothing runs before its `start`."""
        from ..engine import Embedding, Request
        from ..runtime import HiddenRows

        checked("pooling", pooling, POOLING)
        self._engine.check_open()
        if self._hidden is None:
            self._hidden = HiddenRows(self.session)
        task = Embedding(self.runner, self._ids(text), self._hidden.run, pooling, checked("normalize", normalize, FLAG))
        return Request(self._engine, task)

    def rerank(self, query: str, documents: Iterable[str], *, instruction: str = TASK) -> list[Ranked]:
        """Return documents with the most relevant first, as a reranking model judges them (Qwen3-Reranker's prompt).

        The model reads the query with each document and is requested yes or no; the score is the probability of yes.
        Parts that the prompts have in common are computed once.

        Parameters
        ----------
        query : the question
        documents : texts
        instruction : the criterion for relevant documents

        Raises
        ------
        RequestError
            The tokenizer has no single token for yes and for no.
        """
        requests = self.rerank_requests(query, documents, instruction)
        return self.ranked(run_together(iter(requests), 2 * self.runner.config.max_sequences))

    def rerank_requests(self, query: str, documents: Iterable[str], instruction: str = TASK
                        ) -> list[Request[list[Score]]]:
        """Prepare the requests of `rerank`, one for each document; nothing runs before their `start`."""
        yes, no = (self._answer_id(word) for word in ("yes", "no"))
        prompts = [self._judging(query, document, instruction) for document in documents]
        return [self.score_request(prompt, [[yes], [no]], reuse=True) for prompt in prompts]

    def ranked(self, scores: Iterable[list[Score]]) -> list[Ranked]:
        """Return the documents in the order of their relevance, from the outcomes of `rerank_requests`."""
        found = [Ranked(i, 1 / (1 + math.exp(min(against.logprob - for_it.logprob, 700.0))))
                 for i, (for_it, against) in enumerate(scores)]
        return sorted(found, key=lambda one: (-one.score, one.index))

    def _answer_id(self, word: str) -> int:
        ids = self.tokenizer.encode(word, add_bos=False)
        if len(ids) != 1:
            raise RequestError(f"The tokenizer encodes {word!r} as {len(ids)} tokens, and rerank compares single "
                               "ones; use a model that was trained to rerank.")
        return ids[0]

    def _judging(self, query: str, document: str, instruction: str) -> Items[int]:
        text = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        if self.chat_template is None:
            return self.prompt_ids(f"{_JUDGE}\n{text}\nAnswer: ")
        return self.chat_ids([{"role": "system", "content": _JUDGE}, {"role": "user", "content": text}],
                             enable_thinking=False)
