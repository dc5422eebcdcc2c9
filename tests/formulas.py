"""What tests of a mixer's formula share: mixers in float64, their weights as numpy arrays, and the usual functions of these."""

import numpy as np
import torch
from hypothesis import settings
from hypothesis import strategies as st

import seqzoo

D, T = 16, 9
some = settings(max_examples=20, deadline=None, derandomize=True, database=None)
seeds = st.integers(0, 2**16)


def made(name, *, seed=0, **options):
    torch.manual_seed(seed)
    mixer = seqzoo.create_mixer(name, D, **options).double()
    own = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            if "norm" in name:  # no scale of 1 and no shift of 0, which would hide that they are used
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=own))
    return mixer, torch.randn(2, T, D, dtype=torch.float64)


def weights(mixer):
    return {name: p.detach().numpy() for name, p in mixer.named_parameters()}


def close(mixer, x, y, state=None):
    got = mixer(x, state)[0].detach().numpy()
    np.testing.assert_allclose(got, y, rtol=1e-10, atol=1e-12)


def same(mixer, other, x):
    torch.testing.assert_close(mixer(x)[0], other(x)[0], rtol=1e-12, atol=1e-13)


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


def silu(a):
    return a * sigmoid(a)


def layer_norm(h, w, name="norm", eps=1e-5):
    h = h - h.mean()
    return h / np.sqrt((h**2).mean() + eps) * w[f"{name}.weight"] + w[f"{name}.bias"]


def linear(w, name, x):
    return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)


def count(mixer):
    return sum(p.numel() for p in mixer.parameters())


@torch.no_grad()
def set_to(mixer, **values):
    for name, value in values.items():
        parameter = mixer.get_parameter(name.replace("__", "."))
        parameter.copy_(torch.as_tensor(value))
