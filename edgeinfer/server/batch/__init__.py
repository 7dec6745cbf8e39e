"""Files of requests in OpenAI's batch format, answered by the handlers of the server's paths."""

from .answering import Answered, Answerer, InProcess, Patient, answer_all, line_of
from .results import Results, opened
from .rows import URLS, Row, Rows

__all__ = ["URLS", "Answered", "Answerer", "InProcess", "Patient", "Results", "Row", "Rows", "answer_all",
           "line_of", "opened"]
