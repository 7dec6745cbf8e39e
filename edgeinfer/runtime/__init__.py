"""The runtime: programs, the executor that walks them, text and sampling."""

__all__: list[str] = []
