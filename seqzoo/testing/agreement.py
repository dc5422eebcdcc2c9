"""Two routes agree on a drawn case. What the reference gives is kept, for every mode is compared with the same."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .cases import Case, Make, agree, draw
from .comparing import Measured, Route
from .layouts import placed, poisoned_memory

CASES_KEPT = 128  # more than one mode of a law has in the thorough budget

Results = dict[torch.dtype, Measured]

_kept: OrderedDict[Hashable, tuple[Make, Results]] = OrderedDict()


def agree_on(
    make: Make,
    left: Route,
    right: Route,
    *,
    layout: str = "dense",
    gradients: str = "dense",
    poisoned: bool = False,
    **drawn: Any,
) -> Measured:
    """`left` gives what `right` gives, by law 8, on the case that `draw(make, **drawn)` draws; what `left` gave.

    Inputs, gradients and fresh memory are as `layout`, `gradients` and `poisoned` say, on the left; see `layouts`.
    """
    case = draw(make, **drawn)
    plain = placed(right, gradients=gradients)
    kept = _results_of(make, right, gradients, drawn)
    with poisoned_memory(poisoned):
        return agree(
            _Remembering(**vars(case), route=plain, kept=kept), placed(left, layout, gradients), plain
        )


@dataclass(frozen=True)
class _Remembering(Case):
    """A case that measures one route once in each dtype."""

    route: Route
    kept: Results

    def measure(self, route: Route) -> Measured:
        if route is not self.route:
            return super().measure(route)
        dtype = self.x.dtype
        if dtype not in self.kept:
            self.kept[dtype] = super().measure(route)
        return self.kept[dtype]

    def in_float64(self) -> Case:
        return _Remembering(**vars(super().in_float64()), route=self.route, kept=self.kept)


def _results_of(make: Make, route: Route, gradients: str, drawn: dict[str, Any]) -> Results:
    """Where the results of a route on a case are kept; `route` is a function, or a partial of one with hashable keywords."""
    given = (route.func, *sorted(route.keywords.items())) if isinstance(route, partial) else route
    key = (id(make), given, gradients, *sorted(drawn.items()))
    _, results = _kept.setdefault(key, (make, {}))  # make is kept too: so its id stays its own
    _kept.move_to_end(key)
    if len(_kept) > CASES_KEPT:
        _kept.popitem(last=False)
    return results
