"""Attention of other people's models swapped for mixers, and back."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import seqzoo
from seqzoo import Bidirectional
from seqzoo_plugins.swap import swap_mixers

DIM, T = 32, 9
each_mixer = pytest.mark.parametrize("to", seqzoo.list_mixers())


class CausalSelfAttention(nn.Module):
    """As in a small GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n_embd = width
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.c_attn(x)[:, :, None].chunk(3, -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(256, DIM), nn.Linear(DIM, 256)
        self.attn = nn.ModuleList(CausalSelfAttention(DIM) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, tokens):
        x = self.wte(tokens)
        for attn, mlp in zip(self.attn, self.mlp, strict=True):
            x = x + attn(x)
            x = x + mlp(x)
        return self.head(x)


def encoder(**options):
    torch.manual_seed(0)
    options = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True, **options}
    layer = nn.TransformerEncoderLayer(DIM, 4, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


def future(length=T):
    return nn.Transformer.generate_square_subsequent_mask(length)


@each_mixer
def test_a_gpt_trains_with_any_mixer(to):
    torch.manual_seed(0)
    model = GPT()
    swap = swap_mixers(model, CausalSelfAttention, to=to)
    assert [name for name, *_ in swap.replaced] == ["attn.0", "attn.1"]
    assert [mixer["name"] for *_, mixer in swap.replaced] == [to, to]
    assert not swap.left
    tokens = torch.arange(64).repeat(2, 1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_undo_gives_back_what_was_there():
    model = GPT()
    before, tokens = model(torch.arange(T)[None]), torch.arange(T)[None]
    swap = swap_mixers(model, "attn.*")
    assert not torch.equal(model(tokens), before)
    swap.undo()
    assert torch.equal(model(tokens), before)
    swap.undo()


def test_a_dry_run_changes_nothing():
    model = GPT()
    before = dict(model.named_modules())
    swap = swap_mixers(model, CausalSelfAttention, to="gla", dry_run=True)
    assert (
        str(swap)
        == "replaced attn.0: CausalSelfAttention -> gla\nreplaced attn.1: CausalSelfAttention -> gla"
    )
    assert dict(model.named_modules()) == before


def test_matches_by_function_and_keeps_device_dtype_and_training():
    model = GPT().to(torch.bfloat16).eval()
    swap_mixers(
        model, lambda name, module: name.endswith("1") and "Attention" in type(module).__name__, to="lru"
    )
    assert isinstance(model.attn[0], CausalSelfAttention)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not model.attn[1].mixer.training


def test_a_module_in_two_places_becomes_one_mixer():
    model = GPT()
    model.attn[1] = model.attn[0]
    swap_mixers(model, CausalSelfAttention)
    assert model.attn[0] is model.attn[1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("match", [None, nn.TransformerEncoderLayer])
def test_a_transformer_encoder(batch_first, training, match):
    model = encoder(batch_first=batch_first).train(training)
    swap = swap_mixers(model, match, to="hgru")
    assert [name for name, *_ in swap.replaced] == ["layers.0.self_attn", "layers.1.self_attn"]
    x = torch.randn(2, T, DIM)
    turn = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    with torch.no_grad():
        y = turn(model(turn(x), mask=future(), is_causal=True))
        changed = turn(model(turn(torch.cat([x[:, :6], x[:, 6:] + 1], 1)), mask=future()))
    assert torch.equal(y[:, :6], changed[:, :6])
    assert not torch.equal(y[:, 6:], changed[:, 6:])


@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_that_sees_all(training):
    model = encoder().train(training)
    swap_mixers(model, to="hgru", causal=False)
    x, pads = torch.randn(2, T, DIM), torch.zeros(2, T, dtype=torch.bool)
    pads[0, 6:] = True
    with torch.no_grad():
        y = model(x, src_key_padding_mask=pads)
        alone = model(x[:1, :6])
    torch.testing.assert_close(y[:1, :6], alone)


def test_a_decoder_keeps_its_cross_attention():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(DIM, 4, batch_first=True, dropout=0.0), 1)
    swap = swap_mixers(model)
    assert [name for name, *_ in swap.replaced] == ["layers.0.self_attn"]
    assert swap.left == [
        ("layers.0.multihead_attn", "it is cross-attention, which looks at another sequence than its own")
    ]
    x = torch.randn(2, T, DIM)
    assert model(x, torch.randn(2, 4, DIM), tgt_mask=future(), tgt_is_causal=True).shape == x.shape


def test_x_transformers():
    x_transformers = pytest.importorskip("x_transformers")
    torch.manual_seed(0)
    layers = x_transformers.Decoder(dim=DIM, depth=2, heads=2, rotary_pos_emb=True)
    model = x_transformers.TransformerWrapper(num_tokens=64, max_seq_len=T, attn_layers=layers).eval()
    swap = swap_mixers(model, to="hgrn2")
    assert len(swap.replaced) == 2
    tokens = torch.arange(T)[None]
    with torch.no_grad():
        y = model(tokens)
        changed = model(torch.cat([tokens[:, :6], tokens[:, 6:] + 1], 1))
    assert torch.equal(y[:, :6], changed[:, :6])
    assert not torch.equal(y[:, 6:], changed[:, 6:])
    wrapper = x_transformers.AutoregressiveWrapper(model)
    generated = wrapper.generate(tokens[:, :3], 4, temperature=0.0)  # it has no cache to keep, and knows it
    assert torch.equal(generated, wrapper.generate(tokens[:, :3], 4, temperature=0.0, cache_kv=False))
    with pytest.raises(ValueError, match="no key/value cache"):
        model(tokens, cache=model(tokens, return_intermediates=True)[1])
    swap.undo()
    assert model.can_cache_kv


def test_x_transformers_encoder_reads_both_ways():
    x_transformers = pytest.importorskip("x_transformers")
    layers = x_transformers.Encoder(dim=DIM, depth=1, heads=2)
    swap_mixers(layers, to="gla")
    mixers = [m for m in layers.modules() if isinstance(m, Bidirectional)]
    assert len(mixers) == 1
    x, mask = torch.randn(1, T, DIM), torch.ones(1, T, dtype=torch.bool)
    mask[0, 5:] = False
    torch.testing.assert_close(layers(x, mask=mask)[:, :5], layers(x[:, :5]))


WRONG = {
    "nothing": (lambda: swap_mixers(nn.Linear(4, 4)), "no module matches None. The model has 1 Linear"),
    "no such mixer": (lambda: swap_mixers(GPT(), CausalSelfAttention, to="hgrn3"), "hgrn2"),
    "no such option": (lambda: swap_mixers(encoder(), to="hgrn2", num_head=4), "num_heads"),
    "no mask": (lambda: _swapped()(torch.randn(1, T, DIM)), "causal=False"),
    "another mask": (lambda: _swapped()(torch.randn(1, T, DIM), mask=torch.zeros(T, T)), "attn_mask"),
    "a mask for both ways": (
        lambda: _swapped(causal=False)(torch.randn(1, T, DIM), mask=future()),
        "attn_mask",
    ),
    "cross": (
        lambda: _swapped().layers[0].self_attn(*(torch.randn(1, T, DIM) for _ in range(3))),
        "cross-attention",
    ),
    "another argument": (lambda: _gpt().attn[0](torch.randn(1, T, DIM), mask=1), "mask"),
}


def _swapped(**options):
    model = encoder()
    swap_mixers(model, **options)
    return model


def _gpt():
    model = GPT()
    swap_mixers(model, CausalSelfAttention)
    return model


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(case):
    run, words = WRONG[case]
    with pytest.raises((ValueError, TypeError), match=words):
        run()


def test_what_cannot_be_replaced_says_why():
    attention = nn.MultiheadAttention(DIM, 2, kdim=16, vdim=16)
    swap = swap_mixers(nn.ModuleList([attention]))
    assert swap.left[0][1].startswith("its keys and values have other widths, 16 and 16")
    assert swap_mixers(nn.MultiheadAttention(DIM, 2)).left[0][1].startswith("it is the model itself")
    assert swap_mixers(nn.ModuleList([nn.Identity()]), nn.Identity).left[0][1].endswith("give dim")
    assert swap_mixers(nn.ModuleList([nn.Identity()]), nn.Identity, dim=DIM).replaced
