"""Attention of transformers' own models swapped for mixers: pads, caches, beams, and what can't be swapped."""

import os

import pytest
import torch

import seqzoo
from seqzoo_plugins.swap import swap_mixers

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")

DIM, VOCAB = 32, 64
TINY = {
    "vocab_size": VOCAB,
    "hidden_size": DIM,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
BART = {
    "vocab_size": VOCAB, "d_model": DIM, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_embd": DIM, "n_layer": 2, "n_head": 2, "n_positions": 64}
T5 = {"vocab_size": VOCAB, "d_model": DIM, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 2}
BLOOM = {"vocab_size": VOCAB, "hidden_size": DIM, "n_layer": 1, "n_head": 2}
DECODERS = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", TINY),
    "GPT2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "Mistral": (
        "MistralForCausalLM",
        "MistralConfig",
        {**TINY, "num_key_value_heads": 2, "sliding_window": 4},
    ),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TINY),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**TINY, "num_key_value_heads": 1, "head_dim": 16}),
    "Falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {k: v for k, v in TINY.items() if k != "intermediate_size"},
    ),
    "Bert decoder": ("BertLMHeadModel", "BertConfig", {**TINY, "is_decoder": True}),
}
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 12}
each_mixer = pytest.mark.parametrize("to", seqzoo.list_mixers())
each_decoder = pytest.mark.parametrize("which", DECODERS)


def make(model, config, options, **more):
    """In float64, so that greedy choices don't hang on rounding."""
    torch.manual_seed(0)
    return getattr(transformers, model)(getattr(transformers, config)(**options, **more)).eval().double()


def llama(to="gla", match=None, **more):
    model = make(*DECODERS["Llama"], **more)
    swap_mixers(model, match, to=to)
    return model


def prompts(batch=2, length=9):
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(x, pads=3):
    mask = torch.cat([x.new_zeros(len(x), pads), torch.ones_like(x)], 1)
    return torch.cat([x.new_ones(len(x), pads), x], 1), mask


@each_mixer
def test_a_llama_trains_with_any_mixer(to):
    model = make(*DECODERS["Llama"]).float().train()
    swap = swap_mixers(model, to=to)
    assert [name for name, *_ in swap.replaced] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    tokens = torch.arange(40).repeat(2, 1) % 7
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(25):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("match", [None, "model.layers.0.self_attn"])
@each_mixer
def test_a_llama_generates_from_its_cache(to, match):
    model, x = llama(to, match), prompts()
    whole = model.generate(x, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(x, **GREEDY), whole)
    tokens, mask = padded(x)
    assert torch.equal(model.generate(tokens, attention_mask=mask, **GREEDY)[:, 3:], whole)
    beams = {**GREEDY, "num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 5}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@each_decoder
def test_decoders(which, attention):
    model, x = make(*DECODERS[which], attn_implementation=attention), prompts()
    before = model(x).logits
    swap = swap_mixers(model)
    assert len(swap.replaced) == 2 and not swap.left
    assert not torch.equal(model(x).logits, before)
    changed = torch.cat([x[:, :5], x[:, 5:] % 7 + 3], 1)
    assert torch.equal(model(changed).logits[:, :5], model(x).logits[:, :5]), "it sees the future"
    tokens, mask = padded(x)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    there = model(tokens, attention_mask=mask, position_ids=places).logits[:, 3:]
    torch.testing.assert_close(there, model(x).logits)
    assert torch.equal(model.generate(x, **GREEDY), model.generate(x, use_cache=False, **GREEDY))
    swap.undo()
    assert torch.equal(model(x).logits, before)


def test_going_on_from_a_returned_cache():
    model, x = llama("hgrn2", "model.layers.1.self_attn"), prompts(length=12)
    first = model(x[:, :5])
    cache = next(value for name, value in first.items() if name in ("cache", "past_key_values"))
    name = next(name for name in first if name in ("cache", "past_key_values"))
    second = model(x[:, 5:], **{name: cache}).logits  # several tokens at once
    torch.testing.assert_close(torch.cat([first.logits, second], 1), model(x).logits)
    with pytest.raises(ValueError, match="can't forget"):
        cache.crop(-1)
    cache.reset()
    torch.testing.assert_close(model(x[:, :5], **{name: cache}).logits, first.logits)


def test_a_static_cache_and_a_window_that_other_layers_keep():
    model = make(*DECODERS["Mistral"])
    swap_mixers(model, "model.layers.1.self_attn")
    x = prompts()
    whole = model.generate(x, use_cache=False, **GREEDY)
    assert torch.equal(model.generate(x, **GREEDY), whole)
    assert torch.equal(model.generate(x, cache_implementation="static", **GREEDY), whole)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_bert_sees_both_ways_and_no_pads(attention):
    model, x = make("BertModel", "BertConfig", TINY, attn_implementation=attention), prompts()
    swap = swap_mixers(model, to="hgru")
    assert [name for name, *_ in swap.replaced] == [f"encoder.layer.{i}.attention.self" for i in range(2)]
    assert all(isinstance(layer.attention.self.mixer, seqzoo.Bidirectional) for layer in model.encoder.layer)
    y = model(x).last_hidden_state
    pads, mask = torch.cat([x, x[:, :2]], 1), torch.ones(2, 11, dtype=torch.long)
    mask[:, 9:] = 0
    torch.testing.assert_close(model(pads, attention_mask=mask).last_hidden_state[:, :9], y)


def test_encoder_and_decoder_keep_their_cross_attention():
    model, x = make("BartForConditionalGeneration", "BartConfig", BART), prompts()
    swap = swap_mixers(model)
    assert [name for name, *_ in swap.replaced] == [
        "model.encoder.layers.0.self_attn",
        "model.decoder.layers.0.self_attn",
    ]
    assert [name for name, _ in swap.left] == ["model.decoder.layers.0.encoder_attn"]
    assert torch.equal(model.generate(x, **GREEDY), model.generate(x, use_cache=False, **GREEDY))


LEFT = {  # model, what matches, and the reason
    "T5": (("T5Model", "T5Config", T5), None, "also returns position_bias"),
    "Bloom": (("BloomModel", "BloomConfig", BLOOM), None, "its forward needs residual"),
    "BertAttention": (
        ("BertModel", "BertConfig", TINY), "encoder.layer.*.attention", "which is in its self (BertSelfAttention): match that",
    ),
    "MPNet": (("MPNetModel", "MPNetConfig", TINY), None, "does not tell whether it sees the future"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_can_not_be_called_so_is_left_with_the_reason(case):
    kind, match, reason = LEFT[case]
    model, x = make(*kind), prompts()
    more = {"decoder_input_ids": x} if case == "T5" else {}
    before = model(x, **more).last_hidden_state
    swap = swap_mixers(model, match)
    assert not swap.replaced
    assert swap.left
    assert reason in swap.left[0][1]
    assert torch.equal(model(x, **more).last_hidden_state, before)


WRONG = {
    "two texts in a row": (lambda m, x: m(x, position_ids=torch.arange(9)[None] % 5, use_cache=False), "more than pads"),
    "another mask": (lambda m, x: m(x, attention_mask=torch.rand(2, 1, 9, 9).double() < 0.5), "more than pads"),
    "added numbers": (lambda m, x: m(x, attention_mask=torch.rand(2, 1, 9, 9).double()), "more than pads"),
    "weights": (lambda m, x: m.model.layers[0].self_attn(m.model.embed_tokens(x), output_attentions=True), "output_attentions"),
    "another argument": (lambda m, x: m.model.layers[0].self_attn(m.model.embed_tokens(x), bias=1), "bias"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_can_not_be_taken_into_account(case):
    call, words = WRONG[case]
    with pytest.raises(ValueError, match=f"LlamaAttention, swapped for gla: it can't take .*{words}"):
        call(llama(), prompts())


def test_it_compiles_with_a_mask_in_one_graph():
    attention = llama("linear_attention").model.layers[0].self_attn
    x, mask = torch.randn(2, 9, DIM).double(), torch.ones(9, 9, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, :, :, :3] = False
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, attention_mask=mask)[0], attention(x, attention_mask=mask)[0])
    with pytest.raises(RuntimeError, match="it can't take an attention_mask that hides more than pads"):
        compiled(x, attention_mask=mask.mT)


def test_a_cache_that_attention_has_read_into_is_refused():
    model, x = make(*DECODERS["Llama"]), prompts()
    first = model(x)
    name = next(name for name in first if name in ("cache", "past_key_values"))
    swap_mixers(model)
    with pytest.raises(ValueError, match="start with a new one"):
        model(x, **{name: first[name]})
    with pytest.raises(ValueError, match=r"has no layers.*SeqzooForCausalLM"):
        model.model.layers[0].self_attn(model.model.embed_tokens(x), **{name: object()})
