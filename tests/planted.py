"""Small changes of right mixers that each break one law, which must catch it by name: `FAULTS`.

Each fault is of a kind that a public library had for months.
"""

import torch
from right_mixers import EMA, Bounded, Conv, ConvState, EMAState, Gated, Growing, Waves, WavesState, Windowed

from seqzoo.packing import Pack
from seqzoo.testing.examples import CHUNK


class IgnoresStateWhenManyTokens(EMA):
    def scan(self, x, h, pack, mode):
        return super().scan(x, h if x.shape[1] == 1 else torch.zeros_like(h), pack, mode)


class LooksOneStepAhead(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y + 0.1 * torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)[:, : x.shape[1]], state


class PadsDecayTheState(EMA):
    def forward(self, x, state=None, *, mask=None, **options):
        if mask is None:
            return super().forward(x, state, **options)
        y, state = super().forward(torch.where(mask[..., None], x, 0), state, **options)
        return torch.where(mask[..., None], y, 0), state


class ReadsPads(EMA):
    def forward(self, x, state=None, *, mask=None, **options):
        y, state = super().forward(x, state, mask=mask, **options)
        return y if mask is None else y + 1e-3 * x * ~mask[..., None], state


class KeepsStateInBfloat16(EMA):
    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim).to(self.log_rate.dtype))

    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, EMAState(state.h.float()), pack=pack, mode=mode, shared=shared)
        return y, EMAState(state.h.to(x.dtype))


class DropsTheInitialStatesGradient(EMA):
    def scan(self, x, h, pack, mode):
        return super().scan(x, h.detach(), pack, mode)


class DropsTheFinalStatesGradient(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y, EMAState(state.h.detach())


class WritesIntoTheGivenState(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, final = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        with torch.no_grad():
            state.h.data.copy_(final.h)
        return y, EMAState(final.h.clone())


class KeepsTheStateOnTheModule(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        self.seen = getattr(self, "seen", 0) + x.shape[1]
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y * (1 + 0.01 * self.seen), state


class StateKeepsMoreAlive(EMA):
    def forward(self, x, state=None, **options):
        y, state = super().forward(x, state, **options)
        return y, EMAState(torch.cat([state.h, state.h], 1)[:, : self.dim])


class WrongAtTheEdgeOfAChunk(EMA):
    def scan(self, x, h, pack, mode):
        h, final = super().scan(x, h, pack, mode)
        return (h, 1.01 * final) if mode == "chunked" and x.shape[1] == CHUNK + 1 else (h, final)


class MixesRows(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        mean = x.mean(0, keepdim=True) if pack.cu_seqlens is None and len(x) else 0
        return super().mix(x - 0.1 * mean, state, pack=pack, mode=mode, shared=shared)


class IsNaNWithoutTokens(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, final = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return y, EMAState(final.h + 0 * x.mean())


class HasAnUnsavedBuffer(EMA):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.register_buffer("table", torch.randn(dim), persistent=False)

    def mix(self, x, state, *, pack, mode, shared):
        return super().mix(x * self.table, state, pack=pack, mode=mode, shared=shared)


class BreaksTheGraph(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        if x.abs().max().item() > 1e30:
            raise ValueError("too large")
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class SwallowsKeywords(EMA):
    def forward(self, x, state=None, **options):
        options.pop("cu_seqlen", None)
        return super().forward(x, state, **options)


class WrongForOneToken(EMA):
    def scan(self, x, h, pack, mode):
        one = x.shape[1] == 1 and mode != "recurrent"
        return super().scan(x, 0.5 * h if one else h, pack, mode)


class DropsAGradientInOneMode(Gated):
    def mix(self, x, state, *, pack, mode, shared):
        if mode != "chunked":
            return super().mix(x, state, pack=pack, mode=mode, shared=shared)
        with torch.no_grad():
            h, final = self.scan(x, state.h, pack, mode)
        return self.out_proj(h.to(x.dtype)), EMAState(final)


class StepForgetsWhatIsShared(Bounded):
    def step(self, x_t, state, *, shared=None, donate=False):
        return super().step(x_t, state, donate=donate)


class WindowInOneModeOnly(Windowed):
    def mix(self, x, state, *, pack, mode, shared):
        self.window = 4 if mode == "recurrent" or state.k.shape[1] else None
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class AssumesDenseInputs(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        flat = x.view(-1, self.dim)
        return super().mix(flat.view(x.shape), state, pack=pack, mode=mode, shared=shared)


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.view(-1).view(gradient.shape)


class AssumesDenseGradients(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        return _Flat.apply(y), state


class LeavesMemoryUnwritten(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        out, even = torch.empty_like(y), x.shape[1] // 2 * 2
        out[:, :even] = y[:, :even]
        return out, state


class LosesTheConvolutionsTail(Conv):
    def mix(self, x, state, *, pack, mode, shared):
        state = ConvState(state.tail if x.shape[1] == 1 else torch.zeros_like(state.tail))
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class ForgetsOlderTapsInShortCalls(Conv):
    def mix(self, x, state, *, pack, mode, shared):
        y, new = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        if pack.cu_seqlens is None and x.shape[1] in (1, 2):
            new = ConvState(torch.cat([torch.zeros_like(new.tail[:, x.shape[1] :]), x], 1))
        return y, new


class CountsPositionsFromZero(Waves):
    def mix(self, x, state, *, pack, mode, shared):
        start = WavesState(state.h, torch.zeros_like(state.length))
        y, new = super().mix(x, start, pack=pack, mode=mode, shared=shared)
        return y, WavesState(new.h, new.length + state.length)


class ReturnsATupleAtOneToken(EMA):
    def forward(self, x, state=None, **options):
        y, state = super().forward(x, state, **options)
        return y, tuple(state) if x.shape[1] == 1 else state


class NormalisesOverTime(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        x = x - x.mean(1, keepdim=True) if x.numel() and pack.cu_seqlens is None else x
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class FirstStateForAllSequences(EMA):
    def scan(self, x, h, pack, mode):
        return super().scan(x, h if pack.cu_seqlens is None else h[:1].expand(h.shape), pack, mode)


class EmptySequencesStartAgain(EMA):
    def scan(self, x, h, pack, mode):
        out, final = super().scan(x, h, pack, mode)
        if pack.cu_seqlens is None:
            return out, final
        return out, final * (pack.cu_seqlens.diff() > 0)[:, None]


class TailDecaysTheLastState(EMA):
    def scan(self, x, h, pack, mode):
        if pack.cu_seqlens is not None and len(h):
            end = torch.full_like(pack.cu_seqlens[:1], x.shape[1])
            pack = Pack(torch.cat([pack.cu_seqlens[:-1], end]), pack.max_seqlen)
        return super().scan(x, h, pack, mode)


class UninitialisedBehindThePack(EMA):
    def forward(self, x, state=None, *, cu_seqlens=None, **options):
        y, state = super().forward(x, state, cu_seqlens=cu_seqlens, **options)
        if cu_seqlens is None:
            return y, state
        out = torch.empty_like(y)
        out[:, : cu_seqlens[-1]] = y[:, : cu_seqlens[-1]]
        return out, state


class PadsShiftTheConvolution(Conv):
    def forward(self, x, state=None, *, mask=None, **options):
        if mask is None:
            return super().forward(x, state, **options)
        y, state = super().forward(torch.where(mask[..., None], x, 0), state, **options)
        return torch.where(mask[..., None], y, 0), state


class NumbersItsRows(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        y, state = super().mix(x, state, pack=pack, mode=mode, shared=shared)
        number = torch.arange(x.shape[0], device=x.device).to(x.dtype)
        return y * (1 + 0.1 * number[:, None, None]), state


class AveragesStates(EMA):
    def scan(self, x, h, pack, mode):
        h, final = super().scan(x, h, pack, mode)
        return h, 0.9 * final + 0.1 * final.mean(0) if pack.cu_seqlens is None and len(h) else final


class AddsNoise(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        x = x * (1 + 1e-4 * torch.rand_like(x))
        return super().mix(x, state, pack=pack, mode=mode, shared=shared)


class HasNoRoom(Growing):
    def reserve(self, state, room):
        return state


class ReserveStartsAgain(Growing):
    def reserve(self, state, room):
        return self.init_state(len(state.length), capacity=state.k.shape[1] + room)


class GrowsWhenFull(Growing):
    def mix_in_place(self, x, state, *, shared):
        if len(x) and int(state.length.max()) >= state.k.shape[1]:
            return self.mix(x, state, pack=Pack(), mode="recurrent", shared=shared)
        return super().mix_in_place(x, state, shared=shared)


class RoundsInOneMode(EMA):
    def scan(self, x, h, pack, mode):
        x = x.to(torch.bfloat16).to(x.dtype) if mode == "chunked" else x
        return super().scan(x, h, pack, mode)


class DividesByTheDecay(Gated):
    def scan(self, x, h, pack, mode):
        if mode != "parallel" or pack.cu_seqlens is not None:
            return super().scan(x, h, pack, mode)
        total = torch.nn.functional.logsigmoid(self.gate(x).to(h.dtype)).cumsum(1)
        out = total.exp() * (h[:, None] + (x / total.exp()).cumsum(1))
        return out, torch.cat([h[:, None], out], 1)[:, -1].clone()


class SubtractsSums(Gated):
    def scan(self, x, h, pack, mode):
        if mode != "parallel" or pack.cu_seqlens is not None:
            return super().scan(x, h, pack, mode)
        z = self.gate(x).to(h.dtype)
        gates = torch.nn.functional.logsigmoid(z).masked_fill(z < -20, -torch.inf)
        total = gates.cumsum(1)
        past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()[..., None]
        between = (total[:, :, None] - total[:, None]).masked_fill(~past, -torch.inf).exp()
        out = torch.einsum("btsd,bsd->btd", between, x.to(h.dtype)) + total.exp() * h[:, None]
        return out, torch.cat([h[:, None], out], 1)[:, -1].clone()


class ForgetsAnOption(EMA):
    def __init__(self, dim: int, *, half_life: float = 8.0) -> None:
        super().__init__(dim, half_life=half_life)
        self.__dict__["_init_options"] = {"dim": dim, "half": half_life}


class ReinitialisesOnLoad(EMA):
    def load_state_dict(self, weights, *rest, **options):
        super().load_state_dict(weights, *rest, **options)
        torch.nn.init.constant_(self.log_rate, -2.0)


class ListsItsTokens(EMA):
    def mix(self, x, state, *, pack, mode, shared):
        ones = x.new_tensor([1.0 for _ in range(x.shape[1])])
        return super().mix(x * ones[:, None], state, pack=pack, mode=mode, shared=shared)


class TakesTwoRowsInAPack(EMA):
    def forward(self, x, state=None, *, cu_seqlens=None, **options):
        cu_seqlens = cu_seqlens if len(x) == 1 else None
        return super().forward(x, state, cu_seqlens=cu_seqlens, **options)


class TakesAModeItLacks(EMA):
    modes = ("chunked", "recurrent")

    def forward(self, x, state=None, *, mode="auto", **options):
        return super().forward(x, state, mode="chunked" if mode == "parallel" else mode, **options)


class HidesWhatCame(EMA):
    def _check_input(self, x, dims, letters):
        if x.dim() != dims or x.shape[-1] != self.dim:
            raise ValueError("bad shape")
        super()._check_input(x, dims, letters)


FAULTS = {
    IgnoresStateWhenManyTokens: "splitting",
    LooksOneStepAhead: "causality",
    PadsDecayTheState: "padding",
    ReadsPads: "padding",
    KeepsStateInBfloat16: "precision",
    DropsTheInitialStatesGradient: "splitting",
    DropsTheFinalStatesGradient: "splitting",
    WritesIntoTheGivenState: "state_value",
    KeepsTheStateOnTheModule: "state_value",
    StateKeepsMoreAlive: "state_value",
    WrongAtTheEdgeOfAChunk: "modes_agree",
    MixesRows: "rows",
    IsNaNWithoutTokens: "extremes",
    HasAnUnsavedBuffer: "round_trips",
    BreaksTheGraph: "compiles",
    SwallowsKeywords: "errors",
    WrongForOneToken: "modes_agree",
    DropsAGradientInOneMode: "modes_agree",
    StepForgetsWhatIsShared: "modes_agree",
    WindowInOneModeOnly: "modes_agree",
    AssumesDenseInputs: "modes_agree",
    AssumesDenseGradients: "modes_agree",
    LeavesMemoryUnwritten: "modes_agree",
    LosesTheConvolutionsTail: "splitting",
    ForgetsOlderTapsInShortCalls: "splitting",
    CountsPositionsFromZero: "splitting",
    ReturnsATupleAtOneToken: "splitting",
    NormalisesOverTime: "causality",
    FirstStateForAllSequences: "packing",
    EmptySequencesStartAgain: "packing",
    TailDecaysTheLastState: "packing",
    UninitialisedBehindThePack: "packing",
    PadsShiftTheConvolution: "padding",
    NumbersItsRows: "rows",
    AveragesStates: "rows",
    AddsNoise: "state_value",
    HasNoRoom: "state_value",
    ReserveStartsAgain: "state_value",
    GrowsWhenFull: "state_value",
    RoundsInOneMode: "precision",
    DividesByTheDecay: "extremes",
    SubtractsSums: "extremes",
    ForgetsAnOption: "round_trips",
    ReinitialisesOnLoad: "round_trips",
    ListsItsTokens: "compiles",
    TakesTwoRowsInAPack: "errors",
    TakesAModeItLacks: "errors",
    HidesWhatCame: "errors",
}
