"""A swap reads how a module is called and what it returns before it says that it replaced it."""

import pytest
import torch
from torch import nn

from seqzoo_plugins.swap import swap_mixers

DIM, T = 32, 9


class Attention(nn.Module):
    """Something with weights; each class below has its own way of being called."""

    def __init__(self) -> None:
        super().__init__()
        self.n_embd, self.proj = DIM, nn.Linear(DIM, DIM)


class Weights(Attention):
    def forward(self, x, mask=None):
        y, weights = self.proj(x), x @ x.mT
        return y, weights


class WeightsIfAsked(Attention):
    def forward(self, x, output_attentions=False):
        y = self.proj(x)
        outputs = (y, x @ x.mT) if output_attentions else (y,)
        return outputs


class Masked(Attention):
    def forward(self, x, mask, freqs_cis):
        return self.proj(x)


class Triple(Attention):
    def forward(self, query, key, value, attn_mask=None):
        return self.proj(query)


class Present(Attention):
    def forward(self, x, layer_past=None):
        present = x
        return self.proj(x), present


class StartPosition(Attention):
    def forward(self, x, start_pos, freqs_cis):
        return self.proj(x)


class Context(Attention):
    def forward(self, x, *, context):
        return self.proj(x) + context


class Concatenated(Attention):
    def forward(self, x, output_attentions=False):
        outputs = (self.proj(x),)
        return outputs + ((x @ x.mT,) if output_attentions else ())


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.n_embd = Weights(), DIM

    def forward(self, x):
        return self.inner(x)


class Nothing(Attention):
    def forward(self, **named):
        return self.proj(named["x"])


class OwnMultihead(nn.MultiheadAttention):
    def forward(self, query, key, value, rotations):
        return super().forward(query, key, value)


class TensorMultihead(nn.MultiheadAttention):
    def forward(self, query, key, value):
        y, _ = super().forward(query, key, value)
        return y


class NoMaskMultihead(nn.MultiheadAttention):
    def forward(self, query, key, value, is_causal=True):
        return super().forward(query, key, value)


class Below(Weights):
    def forward(self, x, mask=None):
        return super().forward(x * 2, mask)


class Lambda(Attention):
    forward = lambda self, x: self.proj(x) if len(  # noqa: E731
        "a forward whose source is no statement of its own"
    ) else x  # fmt: skip


class FurtherBelow(Below):
    pass


class FarBelow(FurtherBelow):
    def forward(self, x, mask=None):
        return super().forward(x, mask)


def swapped(module, name="attn", **options):
    model = nn.ModuleDict({name: module})
    return model[name], swap_mixers(model, type(module), **options), model[name]


def x():
    return torch.randn(2, T, DIM, generator=torch.Generator().manual_seed(0))


def lower():
    return torch.ones(T, T, dtype=torch.bool).tril()


CALLS = {  # the module, how it is called, and how many things it returns
    "weights beside": (Weights, lambda m: m(x()), 2),
    "weights beside, with a mask": (Weights, lambda m: m(x(), lower()[None, None]), 2),
    "weights if asked for": (WeightsIfAsked, lambda m: m(x()), 1),
    "a mask and positions, true to look": (Masked, lambda m: m(x(), lower(), torch.ones(3)), None),
    "a mask and positions, true to hide": (Masked, lambda m: m(x(), ~lower(), freqs_cis=torch.ones(3)), None),
    "a mask of numbers": (Masked, lambda m: m(x(), torch.zeros(T, T).masked_fill(~lower(), -torch.inf), None), None),
    "a mask of ones and zeros": (Masked, lambda m: m(x(), lower().long(), None), None),
    "query, key and value": (Triple, lambda m: (lambda t: m(t, t, value=t))(x()), None),
    "what another module returns": (Around, lambda m: m(x()), 2),
    "what the class above returns": (FarBelow, lambda m: m(x()), 2),
    "no function of its own": (Lambda, lambda m: m(x()), None),
    "multi-head attention of its own": (
        lambda: NoMaskMultihead(DIM, 2, batch_first=True), lambda m: (lambda t: m(t, t, t, is_causal=True))(x()), 2,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_it_is_called_and_returns_as_before(case):
    kind, call, count = CALLS[case]
    old, swap, new = swapped(kind(), to="gla")
    assert [name for name, *_ in swap.replaced] == ["attn"]
    assert new is not old
    before, after = call(old), call(new)
    if count is None:
        assert after.shape == before.shape
        assert torch.equal(after, new.mixer(x())[0])
    else:
        assert len(before) == len(after) == count
        assert torch.equal(after[0], new.mixer(x())[0])
        assert all(each is None for each in after[1:])


LEFT = {
    "a cache": (Present, "its forward also returns present, which a mixer does not have"),
    "a position in a cache": (StartPosition, "its forward needs start_pos, which a mixer can't take into account"),
    "another sequence": (Context, "its forward needs context, which a mixer can't take into account"),
    "unreadable": (Concatenated, "what its forward returns can't be told from its source"),
    "its own multi-head attention": (
        lambda: OwnMultihead(DIM, 2), "its forward needs rotations, which a mixer can't take into account",
    ),
    "a tensor where a pair is due": (
        lambda: TensorMultihead(DIM, 2), "its forward does not return a pair, as that of nn.MultiheadAttention does",
    ),
    "no input": (Nothing, "its forward takes no tensor by place"),
}  # fmt: skip


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("case", LEFT)
def test_what_can_not_be_called_so_is_left_with_the_reason(case, dry_run):
    kind, reason = LEFT[case]
    old, swap, new = swapped(kind(), dry_run=dry_run)
    assert new is old
    assert not swap.replaced
    assert swap.left == [("attn", reason)]


WRONG = {
    "another mask": (
        Masked,
        lambda m: m(x(), torch.zeros(T, T).bool(), None),
        "mask other than the causal one",
    ),
    "added numbers": (Masked, lambda m: m(x(), torch.randn(T, T), None), "mask other than the causal one"),
    "weights": (WeightsIfAsked, lambda m: m(x(), output_attentions=True), "output_attentions"),
    "a key": (Triple, lambda m: m(x(), x(), x()), "key"),
    "too much": (Weights, lambda m: m(x(), None, 1, 2), "at most 2 arguments without a name, got 4"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_taken_into_account(case):
    kind, call, words = WRONG[case]
    _, _, new = swapped(kind())
    with pytest.raises((ValueError, TypeError), match=words):
        call(new)


def test_a_name_tells_cross_attention_only_where_another_sequence_could_come():
    assert swapped(Triple(), "cross_attn")[1].left[0][1].startswith("it is cross-attention")
    only_x = nn.Linear(DIM, DIM)
    assert swapped(only_x, "crossing", dim=DIM)[1].replaced
    told = Weights()
    told.is_cross_attention = True
    assert swapped(told)[1].left[0][1].startswith("it is cross-attention")


def test_nothing_is_changed_where_something_is_wrong():
    model = nn.ModuleList([Weights(), Weights()])
    model[1].n_embd = 18  # no width of a mixer
    before = list(model)
    with pytest.raises(ValueError, match="multiple of 4"):
        swap_mixers(model, Weights)
    assert list(model) == before


def test_what_a_module_says_of_its_direction():
    module = Weights()
    module.is_causal = False
    _, _, new = swapped(module)
    assert not new.causal
    with pytest.raises(ValueError, match="mask"):
        new(x(), lower())


def test_x_transformers_keeps_its_cross_attention():
    x_transformers = pytest.importorskip("x_transformers")
    layers = x_transformers.Decoder(dim=DIM, depth=1, heads=2, cross_attend=True)
    swap = swap_mixers(layers)
    assert len(swap.replaced) == 1
    assert [why for _, why in swap.left] == [
        "it is cross-attention, which looks at another sequence than its own"
    ]
    assert layers(x(), context=x()[:, :4]).shape == (2, T, DIM)


@pytest.mark.parametrize("where", [None, "layers.1.self_attn"])
def test_an_encoder_that_nests_its_tensors(where):
    """The fast path of torch's encoder, with pads: it must see that its fused kernel has no weights any more."""
    layer = nn.TransformerEncoderLayer(DIM, 2, 48, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    swap = swap_mixers(model, where, to="hgru", causal=False)
    pads = torch.zeros(2, T, dtype=torch.bool)
    pads[1, 6:] = True
    with torch.no_grad():
        y = model(x(), src_key_padding_mask=pads)
        torch.testing.assert_close(y[1:, :6], model(x()[1:, :6]))
        torch.testing.assert_close(y[0], model(x())[0])
    swap.undo()
    assert model.use_nested_tensor


def test_every_mask_is_looked_at():
    """Also one as long as another that was the causal one."""
    _, _, new = swapped(nn.MultiheadAttention(DIM, 2, batch_first=True))
    tokens = x()
    new(tokens, tokens, tokens, attn_mask=~lower())
    banded = ~lower() | lower().tril(-3)
    with pytest.raises(ValueError, match="attn_mask"):
        new(tokens, tokens, tokens, attn_mask=banded)
    with pytest.raises(ValueError, match="key_padding_mask of other numbers"):
        new(tokens, tokens, tokens, attn_mask=~lower(), key_padding_mask=torch.rand(2, T))
