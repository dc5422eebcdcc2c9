"""The first tier as published: weights and states of each mixer, counted from D and its options alone, and how they start."""

import pytest
import torch

import seqzoo
from seqzoo.layers import ShortConv
from seqzoo.states import leaves

D, T, N, H, G, E = 64, 10, 24, 4, 2, 2

# name, options, weights, numbers of the state after T tokens, words in the names of parameters that "weights" leaves out
TABLE = [
    ("hgru", {}, 7 * D**2 + D, 2 * D, "bias norm"),
    ("hgru_real", {}, 4 * D**2, D, "bias norm"),
    ("hgru_real", {"expand": E, "conv_size": 4}, 4 * E * D**2, E * D + 2 * 3 * E * D, "bias norm conv"),
    ("hgrn2", {"num_heads": H}, 4 * D**2, D * D // H, "norm"),
    ("hgrn2", {"num_heads": H, "conv_size": 4}, 4 * D**2, D * D // H + 3 * 3 * D, "norm conv"),
    ("gla", {}, 4 * D**2 + 24 * D, D**2 // 8, "bias norm"),
    ("gla", {"num_heads": 2, "conv_size": 4}, 4 * D**2 + 24 * D, D**2 // 4 + 3 * 2 * D, "bias norm conv"),
    ("linear_attention", {"num_heads": H}, 4 * D**2, D * (D // H + 1), "bias"),
    ("lru", {"state_dim": N}, 4 * D * N + 3 * N + D, 2 * N, ""),
    ("lru_forget", {"state_dim": N}, 5 * D * N + 3 * N + D, 2 * N, ""),
    ("attention", {"num_heads": H}, 4 * D**2, 2 * T * D, ""),
    ("attention", {"num_heads": H, "num_kv_heads": G, "window": 3}, (2 + 2 * G / H) * D**2, 3 * D, ""),
    ("fox", {"num_heads": H}, 4 * D**2 + D * H, 2 * T * D + T * H, "bias"),
    ("fox_pro", {"num_heads": H}, 5 * D**2 + 3 * D * H, 2 * T * D + T * H + 2 * D, "bias norm"),
    ("min_gru", {"expand": E}, 2 * E * D**2 + E * D**2, E * D, "bias"),
    ("min_gru", {"out_proj": False}, 2 * D**2, D, "bias"),
    ("min_lstm", {"expand": E}, 3 * E * D**2 + E * D**2, E * D, "bias"),
    ("min_lstm", {"out_proj": False}, 3 * D**2, D, "bias"),
    ("lstm", {}, 4 * (D * D + D**2) + 7 * D, 2 * D, ""),
    ("lstm", {"expand": E}, 4 * (D * E * D + (E * D) ** 2) + 7 * E * D, 2 * E * D, "out_proj"),
    ("lstm", {"variant": "FGR"}, 4 * (D * D + D**2) + 7 * D + 9 * D**2, 5 * D, ""),
    ("gru", {}, 3 * (D * D + D**2) + 4 * D, D, ""),
    ("rg_lru", {"num_heads": H}, 3 * D**2 + 2 * D**2 / H + D, D + 3 * D, "bias conv"),
]


@pytest.mark.parametrize(("name", "options", "weights", "state", "without"), TABLE)
def test_weights_and_state(name, options, weights, state, without):
    mixer = seqzoo.create_mixer(name, D, **options)
    counted = [
        p.numel() for n, p in mixer.named_parameters() if not any(word in n for word in without.split())
    ]
    assert sum(counted) == weights
    _, last = mixer(torch.randn(1, T, D))
    assert sum(leaf.numel() for leaf in leaves(last) if leaf.is_floating_point()) == state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hgru", {}),
        ("hgru", {"gate_rank": 64}),
        ("hgru_real", {"conv_size": 4}),
        ("hgrn2", {"conv_size": 4, "bias": True}),
        ("gla", {"conv_size": 4, "gate_rank": 64}),
        ("linear_attention", {}),
        ("attention", {"bias": True}),
        ("min_gru", {}),
        ("min_lstm", {}),
    ],
)
def test_projections_start_as_those_of_torch(name, options):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, 256, **options)
    seen = set()
    for path, module in mixer.named_modules():
        if isinstance(module, torch.nn.Linear | ShortConv):
            edge = module.weight.shape[1] ** -0.5  # uniform in +- 1 / sqrt(inputs)
            for key, parameter in module.named_parameters():
                seen.add(f"{path}.{key}")
                assert parameter.abs().max() <= edge
                assert parameter.std().item() == pytest.approx(edge / 3**0.5, rel=0.12)
    assert {key for key, _ in mixer.named_parameters()} - seen <= {"phase", "norm.weight", "norm.bias"}


def test_a_forget_gate_of_lru_starts_halfway_to_1():
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer("lru_forget", D)
    log_decay, _ = mixer._decay_and_gain(torch.zeros(1, 1, D), torch.float32)
    torch.testing.assert_close(log_decay[0, 0].exp(), (1 + torch.exp(-mixer.nu_log.exp())) / 2)


@pytest.mark.parametrize(("name", "gates"), [("lstm", "i f o"), ("gru", "r z")])
def test_gates_of_recurrent_cells_start_near_a_half(name, gates):
    torch.manual_seed(0)
    mixer = seqzoo.create_mixer(name, 256)
    x = torch.randn(4, 32, 256)
    seen = mixer.in_proj(x) + torch.tanh(torch.randn_like(x)) @ mixer.recurrent_weight.T
    blocks = dict(
        zip("ifzo" if name == "lstm" else "rzh", seen.chunk(len(seen[0, 0]) // 256, -1), strict=True)
    )
    for gate in gates.split():
        assert torch.sigmoid(blocks[gate]).mean().item() == pytest.approx(0.5, abs=0.02)
