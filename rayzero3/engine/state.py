"""The states of a layer and the table of their transitions.

| state | parameters | flat gradient | who moves on |
|---|---|---|---|
| CHUNKED | unreadable: storage of 0 bytes | may be filled, waiting for its turn | start_fetch, start_reduce |
| FETCHING | allocated, a gather writes them | as before | fetch_params waits |
| FETCHED | readable, in the compute dtype | filled by hooks in backward | cleanup_params; start_reduce where the layer is kept fetched |
| REDUCING | as before | in flight; the chunk's gradient grows when it ends | finish_reduce |
"""

from __future__ import annotations

from enum import Enum

from rayzero3.errors import StateError


class LayerState(Enum):
    CHUNKED = "chunked"
    FETCHING = "fetching"
    FETCHED = "fetched"
    REDUCING = "reducing"


TRANSITIONS = {
    LayerState.CHUNKED: {LayerState.FETCHING, LayerState.REDUCING},
    LayerState.FETCHING: {LayerState.FETCHED},
    LayerState.FETCHED: {LayerState.CHUNKED, LayerState.REDUCING},
    LayerState.REDUCING: {LayerState.CHUNKED, LayerState.FETCHED},
}


def check_transition(layer: str, now: LayerState, then: LayerState) -> LayerState:
    """`then`, if the table allows it. Raises StateError that names the layer and both states."""
    if then not in TRANSITIONS[now]:
        allowed = ", ".join(sorted(state.value for state in TRANSITIONS[now]))
        raise StateError(
            f"layer {layer} can't become {then.value}",
            None,
            f"it is {now.value}, from where it may become: {allowed}",
            "Let backward end before the layer is used again; after an exception, the next forward starts clean.",
        )
    return then
