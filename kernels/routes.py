"""The lists that say which tokens go through which experts, as `route` and `sort_routes` leave them."""

from __future__ import annotations

ROUTE_BYTES = 16
"""A token and one of its experts. A row of `route` has those of its token, by expert; the list of `sort_routes` has
those of all tokens, by expert, then by token. A forward pass of one token needs no sorting: its row is the list."""
ROUTE_EXPERT, ROUTE_TOKEN, ROUTE_WEIGHT = 0, 4, 8
"""int32, int32, and the float32 that the expert's output is multiplied by."""
ROUTE_SEGMENTS = 12
"""int32 in the first entry of a list of all tokens: how many segments are after it."""
SEGMENT_EXPERT, SEGMENT_FIRST, SEGMENT_COUNT = 0, 4, 8
"""int32 each: an expert that some tokens go through, the first of its entries in the list, how many there are.
ROUTE_BYTES from one to the next; they are after the last entry."""
FLAG_SLOTS = 2048
"""experts: matrices are in slots, where operand 8 says; the instruction computes the experts `since` .. `until` - 1."""
LOCATION_BYTES, LOCATION_SLOT, LOCATION_GATE_UP, LOCATION_DOWN = 16, 0, 4, 8
"""Location of an expert that is read when a token needs it: int32 each, its slot (-1: it is not there), and the places
of its matrices, in units of LINE bytes from the first slot on."""
LINE = 64
EXPERT_PARTS = 4
"""Parts of a layer's experts, by their numbers, which are computed one after the other while those after are read; each
has a completion event for its gates and ups, and one for its columns."""
SCORE_SOFTMAX, SCORE_SIGMOID = 0, 1
"""Functions of router logits in `route`."""
