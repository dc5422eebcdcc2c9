"""A mixer's state in a cache of transformers. Importing this imports transformers."""

from typing import Any

from transformers.cache_utils import DynamicLayer

from ..held import HeldState


class StateLayer(HeldState, DynamicLayer):
    """One layer of a cache, of a mixer among layers of attention."""

    is_croppable = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.length = 0

    @classmethod
    def of(cls, cache: Any, index: int | None) -> "StateLayer":
        """The layer of a cache at `index`, put there if it is not yet.

        Raises:
            ValueError: the cache has no layers to put it into, or attention has read into it.
        """
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", None)
        if layers is None or index is None:
            what = "the attention did not know its layer's index"
            if layers is None:
                what = f"{type(cache).__name__} has no layers"
            raise ValueError(
                f"a swapped model keeps its state in the cache, but {what}: call it with use_cache=False, or build the "
                "model by name, as seqzoo_plugins.transformers.SeqzooForCausalLM."
            )
        layers.extend(DynamicLayer() for _ in range(len(layers), index + 1))
        if not isinstance(layers[index], cls):
            if int(layers[index].get_seq_length()):
                raise ValueError(
                    "this cache has keys and values of the attention that was swapped: start with a new one."
                )
            layers[index] = cls()
        found: StateLayer = layers[index]
        return found

    def read(self, state: Any, columns: int) -> None:
        """Take over a new state after `columns` more tokens."""
        self.state = state
        self.length += columns

    # what transformers calls

    def get_seq_length(self) -> int:
        return self.length

    def reset(self) -> None:
        self.state, self.length = None, 0
