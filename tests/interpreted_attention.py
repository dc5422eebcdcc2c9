"""attention's Triton kernels in Triton's interpreter, small; run by test_triton.py in a process of its own."""

import pytest
import torch
from op_cases import check, gates
from test_attention_op import TestAttention as Attention
from test_attention_op import qkv

from seqzoo_kernels import AttentionState, DecayAttentionState, attention, precision
from seqzoo_kernels.attention import appending, decoding
from seqzoo_kernels.attention import triton as backend
from seqzoo_kernels.attention.cache import append_, has_room, slot_positions

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several blocks, several tiles and a part of each, at lengths that the interpreter can bear."""
    tile = backend.Tile(32, 16, 4, 1)
    monkeypatch.setattr(backend, "tiling", lambda q, v, name: tile)
    monkeypatch.setattr(decoding, "SLOTS", 16)


@pytest.mark.parametrize("variant", Attention.variants)
def test_law_8(variant):
    for T in (0, 40):
        check(Attention().make(variant, T=T, B=1), "triton", "auto", torch.float32)
    case = Attention().make(variant, T=40, B=1, state=False)
    check(case, "triton", "parallel", torch.float16, layout="strided", cotangents="sum")


def test_gates_near_one():
    check(Attention().make("decay", T=80, B=1, gate="near_one"), "triton", "chunked", torch.float32)


@pytest.mark.parametrize("size", [1, 20])
def test_any_width(size):
    check(Attention().make("decay grouped", T=33, size=size, B=1), "triton", "auto", torch.float32)


@pytest.mark.parametrize("window", [2, 33])
def test_windows(window):
    """Shorter and longer than a block, with tiles that all of a block see whole between those that are cut."""
    for variant in ("", "decay "):
        case = Attention().make(f"{variant}window={window}", T=100, B=1, state=False)
        check(case, "triton", "auto", torch.float32)


@pytest.mark.parametrize(
    ("variant", "cu"),
    [
        ("decay", [0, 0, 13, 37]),
        ("decay", [0, 1, 2, 18]),
        ("decay", [0, 0]),
        ("grouped scaled", [0, 13, 13, 20]),
        ("decay grouped window=20", [0, 5, 37]),
    ],
)
def test_packing(variant, cu):
    case = Attention().make(variant, T=cu[-1] + 3, B=1, cu=cu)
    check(case, "triton", "auto", torch.float32)


def test_splitting():
    check(
        Attention().make("decay grouped window=20", T=60, B=1), "triton", "auto", torch.float32, cuts=[35, 37]
    )


@pytest.mark.parametrize("strong", [-torch.inf, -1e9, -1e3])
def test_one_strong_gate(strong):
    """The gates after it still count, in its block and beyond."""
    case = Attention().make("decay", T=70, B=1, gate="mild", state=False)
    case.inputs["log_decay"][:, [7, 40]] = strong
    result = check(case, "triton", "auto", torch.float32)
    assert all(torch.isfinite(x).all() for n, x in result.items() if n != "final.bias")


def test_pruning(monkeypatch):
    """Law 8 holds where what is left out weighs less than rounding, and something is left out in each direction."""
    reach, left_out = backend._Call._reach, []

    def watched(call, decay, tile, blocks, keys, of_cache):
        result = reach(call, decay, tile, blocks, keys, of_cache)
        tiles = torch.arange(blocks) * (tile.BO // tile.BI)
        whole = decay[5].shape[1] - tiles - (0 if of_cache else tile.BO // tile.BI)
        left_out.append(bool((result < whole).any() if keys else (result > 0).any()))
        return result

    monkeypatch.setattr(backend._Call, "_reach", watched)
    case = Attention().make("decay", T=100, B=1, gate="mild")
    case.inputs["log_decay"] -= 2
    case.inputs["log_decay"][:, 70] = -torch.inf
    for name in ("q", "k", "past_k"):
        case.inputs[name] /= 4
    check(case, "triton", "auto", torch.float32, prune=1e-9)
    assert len(left_out) == 4 and all(left_out)  # forward, queries, keys, keys of the cache
    check(Attention().make("plain", T=40, B=1), "triton", "auto", torch.float32, prune=0.5)


@pytest.mark.parametrize("size", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("prune", [0.5, 1e-2])
def test_what_pruning_costs(prune, size):
    """An output, a mean of values, moves by less than twice what is left out of the weights, whatever the scores are like."""
    case = Attention().make("decay", T=150, B=2, gate="mild")
    case.inputs["log_decay"] -= 0.3
    case.inputs["log_decay"][0, 70:80] = -torch.inf
    for name in ("q", "k", "past_k"):
        case.inputs[name] *= size
    inputs = case.cast(torch.float32)
    exact, pruned = (case.run(inputs, backend="triton", prune=p)["out"] for p in (None, prune))
    values = torch.cat([inputs["past_v"], inputs["v"]], 1)
    assert (exact - pruned).abs().max() <= 2 * prune * values.abs().max()


@pytest.mark.parametrize(
    ("decay", "G", "window"), [(True, 2, None), (True, 1, 20), (False, 1, None), (False, 2, 20)]
)
def test_decoding(decay, G, window):
    """A step beside float64, its cache in several parts and its rows of different lengths; in place and not."""
    S = 40 if window is None else window
    q, k, v = qkv(3, T=1, H=2, G=G, K=20, V=12)
    past = qkv(3, T=S, H=2, G=G, K=20, V=12, seed=1)[1:]
    length = torch.tensor([S - 1, 0, 9 if window is None else 5 * S])
    dead = torch.arange(S) >= length[:, None]
    given = [x.masked_fill(dead[..., None, None], 0) for x in past]
    g = None
    if decay:
        g = gates((3, 1, 2), "mild", torch.Generator().manual_seed(0))
        g[0, 0, 0] = -torch.inf
        given.append(
            gates((3, S, 2), "extreme", torch.Generator().manual_seed(1)).masked_fill(dead[..., None], 0)
        )

    def step(dtype, name, **options):
        wide = torch.promote_types(dtype, torch.float32)
        cache, inputs = [x.to(dtype) for x in given[:2]], [x.to(dtype) for x in (q, k, v)]
        state = AttentionState(*cache, length.clone())
        if g is not None:
            state = DecayAttentionState(*state, given[2].to(wide))
        gate = None if g is None else g.to(wide)
        with torch.no_grad():
            return attention(*inputs, gate, initial_state=state, window=window, backend=name, **options)[0]

    exact = step(torch.float64, "reference")
    for dtype, donate in ((torch.float32, False), (torch.float32, True), (torch.float16, True)):
        ours, reference = step(dtype, "triton", donate=donate), step(dtype, "reference")
        precision.check_close(ours, exact, reference, dtype=dtype, name="out")
    assert torch.equal(step(torch.float16, "auto", donate=True), ours)


@pytest.mark.parametrize("tile", [8, 64])
@pytest.mark.parametrize("window", [0, 20, 50])
@pytest.mark.parametrize("decay", [False, True])
def test_a_token_is_appended_as_torch_does(decay, window, tile, monkeypatch):
    """Bit for bit, rows of different lengths, into the same memory, which may be a larger cache's; also where one is full."""
    monkeypatch.setattr(appending, "SLOTS", tile)
    monkeypatch.setattr(appending, "BLOCK", 16)
    slots = 40 if window == 50 else window or 40
    lengths = torch.tensor([0, 9, slots - 1, 5 * slots if window == slots else slots])
    store = [torch.randn(4, slots + 3, 2, size)[:, 2:-1] for size in (20, 12)]
    k, v = (torch.randn(4, 2, 1, size).transpose(1, 2).half() for size in (20, 12))
    g = gates((4, 1, 6), "mild", torch.Generator().manual_seed(0)) if decay else None
    biases = -torch.rand(4, slots, 6)
    biases[0, 3] = -torch.inf

    def state():
        plain = AttentionState(
            *[x.clone(memory_format=torch.preserve_format) for x in store], lengths.clone()
        )
        return DecayAttentionState(*plain, biases.clone()) if decay else plain

    for rows in (slice(0, 3), slice(0, 4), slice(0, 0)):
        ours, theirs = (type(s)(*[x[rows] for x in s]) for s in (state(), state()))
        step = [k[rows], v[rows], None if g is None else g[rows], window]
        room = has_room(theirs, window)
        before = theirs.length.clone()
        if room:
            append_(theirs, *step)
        assert appending.serves(ours)
        position, cached, found = appending.append_(ours, *step, slots)
        assert found.item() == room.item()
        if room:
            assert torch.equal(position, before[:, None])
            assert torch.equal(cached, slot_positions(theirs.length, slots, window))
            for name, mine, torchs in zip(ours._fields, ours, theirs, strict=True):
                assert torch.equal(mine, torchs), name


@pytest.mark.parametrize(
    ("dtype", "mode", "size", "why"),
    [
        (torch.float64, "auto", 3, "float64"),
        (torch.float32, "recurrent", 3, "mode 'recurrent'"),
        (torch.float32, "auto", 300, "256, got 300 and 302"),
    ],
)
def test_what_it_does_not_serve_is_refused(dtype, mode, size, why):
    case = Attention().make("decay", T=3, size=size)
    with pytest.raises(ValueError, match=rf"attention: backend 'triton' can't be used: .*{why}"):
        case.run(case.cast(dtype), backend="triton", mode=mode)


def test_auto_takes_it_where_keys_decay():
    case = Attention().make("decay", T=20)
    inputs = case.cast(torch.float32)
    assert torch.equal(case.run(inputs, backend="triton")["out"], case.run(inputs)["out"])
    q = torch.randn(1, 5, 2, 4)
    assert torch.equal(attention(q, q, q)[0], attention(q, q, q, backend="sdpa")[0])
    step = torch.randn(1, 1, 2, 4, requires_grad=True)  # a step's gradients are exact in torch
    attention(step, step, step)[0].sum().backward()
    for x, window in ((step, None), (q.requires_grad_(), 1)):
        with pytest.raises(ValueError, match="of one key are exact elsewhere"):
            attention(x, x, x, window=window, backend="triton")
