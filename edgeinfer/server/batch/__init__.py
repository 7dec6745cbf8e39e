"""Files of requests in OpenAI's batch format, answered by the handlers of the server's paths."""

from .answering import Answered, Answerer, InProcess, answer_all, line_of
from .results import Results
from .rows import URLS, Row, Rows

__all__ = ["URLS", "Answered", "Answerer", "InProcess", "Results", "Row", "Rows", "answer_all", "line_of"]
