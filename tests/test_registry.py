"""The registry: names, wildcards, filters, what is known of a mixer, and mixers that other packages bring."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import zipfile
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import seqzoo

DIM = 16
FIRST = {"hgru", "hgru_real", "hgrn2", "gla", "lru", "attention"}


def test_the_first_six_are_there():
    assert set(seqzoo.list_mixers()) >= FIRST


def test_names_are_sorted_and_match_wildcards():
    names = seqzoo.list_mixers()
    assert names == sorted(names)
    assert set(seqzoo.list_mixers("hgr*")) >= {"hgru", "hgru_real", "hgrn2"}
    assert seqzoo.list_mixers("hgrn2") == ["hgrn2"]
    assert seqzoo.list_mixers("no_such_*") == []


def test_filters():
    assert set(seqzoo.list_mixers(op="gated_linear_attention")) >= {"gla", "hgrn2"}
    assert set(seqzoo.list_mixers(op="linear_scan")) >= {"hgru", "hgru_real", "lru"}
    assert "attention" in seqzoo.list_mixers(growth="linear")
    assert "attention" not in seqzoo.list_mixers(growth="constant")
    assert seqzoo.list_mixers("hgr*", op="gated_linear_attention", growth="constant") == ["hgrn2"]
    for growth in ("constant", "linear", "window"):
        for name in seqzoo.list_mixers(growth=growth):
            assert seqzoo.mixer_info(name).growth == growth


def test_a_misspelt_filter_is_an_error():
    with pytest.raises(ValueError, match=r"growth.*constant.*constnt"):
        seqzoo.list_mixers(growth="constnt")
    with pytest.raises(ValueError, match=r"op.*linear_scna"):
        seqzoo.list_mixers(op="linear_scna")


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_info_is_frozen_and_true(name):
    info = seqzoo.mixer_info(name)
    assert info.name == name
    assert issubclass(info.cls, seqzoo.TokenMixer)
    assert info.modes == info.cls.modes
    assert "recurrent" in info.modes
    assert info.summary == info.cls.__doc__.strip().splitlines()[0]
    assert "dim" not in info.options
    assert info.paper
    assert info.op
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "other"


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_created_by_name_by_class_and_by_path(name):
    info = seqzoo.mixer_info(name)
    path = f"{info.cls.__module__}:{info.cls.__qualname__}"
    for reference in (name, info.cls, path):
        mixer = seqzoo.create_mixer(reference, DIM)
        assert type(mixer) is info.cls
        assert mixer.config["name"] == name
        assert mixer.config["dim"] == DIM


@pytest.mark.parametrize("name", seqzoo.list_mixers())
def test_config_is_json_has_every_option_and_creates_the_mixer(name):
    mixer = seqzoo.create_mixer(name, DIM)
    config = json.loads(json.dumps(mixer.config))
    assert config == mixer.config
    assert config.keys() == {"name", "dim", *seqzoo.mixer_info(name).options}
    for again in (seqzoo.create_mixer(**config), seqzoo.mixer_from_config(config)):
        assert again.config == config
        assert again.state_dict().keys() == mixer.state_dict().keys()


def test_a_config_is_no_handle_on_the_mixer():
    mixer = seqzoo.create_mixer("hgrn2", DIM)
    mixer.config["dim"] = 1
    assert mixer.config["dim"] == DIM


@pytest.mark.parametrize("name", seqzoo.list_mixers())
@pytest.mark.parametrize("dim", [16, 20, 36])
def test_defaults_work_at_any_dim_from_16_divisible_by_4(name, dim):
    x = torch.randn(2, 5, dim)
    y, _ = seqzoo.create_mixer(name, dim)(x)
    assert y.shape == x.shape


@pytest.mark.parametrize("dim", [0, -16, 18.0, "16"])
def test_a_wrong_dim_is_an_error(dim):
    with pytest.raises((ValueError, TypeError), match=rf"dim.*{dim}"):
        seqzoo.create_mixer("hgrn2", dim)


def test_did_you_mean():
    with pytest.raises(ValueError, match=r"hgnr2.*hgrn2"):
        seqzoo.create_mixer("hgnr2", DIM)
    with pytest.raises(ValueError, match=r"attnetion.*attention"):
        seqzoo.mixer_info("attnetion")
    with pytest.raises(TypeError, match=r"num_head\b.*num_heads"):
        seqzoo.create_mixer("gla", DIM, num_head=2)


def test_wrong_references_are_errors():
    with pytest.raises(TypeError, match=r"Linear"):
        seqzoo.create_mixer(torch.nn.Linear, DIM)
    with pytest.raises(TypeError, match=r"Linear"):
        seqzoo.create_mixer("torch.nn:Linear", DIM)
    with pytest.raises(ValueError, match=r"no_such_package"):
        seqzoo.create_mixer("no_such_package.module:Mixer", DIM)
    with pytest.raises(ValueError, match=r"NoSuchMixer"):
        seqzoo.create_mixer("seqzoo.mixers:NoSuchMixer", DIM)
    with pytest.raises(TypeError, match=r"int"):
        seqzoo.create_mixer(3, DIM)


def test_a_config_names_registered_mixers_only():
    path = f"{seqzoo.mixer_info('hgrn2').cls.__module__}:{seqzoo.mixer_info('hgrn2').cls.__qualname__}"
    for name in (path, "os:system", seqzoo.mixer_info("hgrn2").cls):
        with pytest.raises((ValueError, TypeError), match=r"register"):
            seqzoo.mixer_from_config({"name": name, "dim": DIM})


class EMAState(NamedTuple):
    h: Tensor


class EMA(seqzoo.TokenMixer):
    """An exponential moving average of each channel."""

    modes = ("recurrent",)

    def __init__(self, dim: int, *, half_life: float = 8.0) -> None:
        super().__init__(dim)
        self.half_life = half_life
        self.weight = torch.nn.Parameter(torch.ones(dim))

    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        raise NotImplementedError


def test_a_name_clash_is_an_error():
    with pytest.raises(ValueError, match=r"hgrn2.*already"):
        seqzoo.register_mixer("hgrn2", paper="none", op="linear_scan")(EMA)
    assert seqzoo.mixer_info("hgrn2").cls is not EMA


def test_only_token_mixers_are_registered():
    with pytest.raises(TypeError, match=r"TokenMixer.*Linear"):
        seqzoo.register_mixer("a_linear", paper="none", op="none")(torch.nn.Linear)
    assert "a_linear" not in seqzoo.list_mixers()


def test_an_unregistered_mixer_is_created_by_class():
    mixer = seqzoo.create_mixer(EMA, DIM, half_life=2.0)
    assert mixer.config == {"name": f"{__name__}:EMA", "dim": DIM, "half_life": 2.0}
    with pytest.raises(TypeError, match=r"halflife.*half_life"):
        seqzoo.create_mixer(EMA, DIM, halflife=2.0)


THIRD_PARTY = '''
from typing import NamedTuple

import seqzoo
import torch


class EMAState(NamedTuple):
    h: torch.Tensor


@seqzoo.register_mixer("third_party_ema", paper="none", op="none")
class EMA(seqzoo.TokenMixer):
    """An exponential moving average of each channel."""

    modes = ("recurrent",)

    def __init__(self, dim, *, decay=0.9):
        super().__init__(dim)
        self.decay = decay

    def init_state(self, batch, capacity=None):
        return EMAState(self.zeros(batch, self.dim))

    def mix(self, x, state, *, pack, mode, shared):
        h, outputs = state.h, []
        for x_t in x.unbind(1):
            h = self.decay * h + x_t
            outputs.append(h)
        return torch.stack(outputs, 1), EMAState(h)
'''

USE_IT = """
import sys
import seqzoo

assert "third_party" not in sys.modules
assert "third_party_ema" in seqzoo.list_mixers()
assert seqzoo.list_mixers("third_party*") == ["third_party_ema"]
info = seqzoo.mixer_info("third_party_ema")
assert info.summary == "An exponential moving average of each channel."
mixer = seqzoo.create_mixer("third_party_ema", 16, decay=0.5)
assert mixer.config == {"name": "third_party_ema", "dim": 16, "decay": 0.5}
assert seqzoo.mixer_from_config(mixer.config).config == mixer.config
assert "hgrn2" in seqzoo.list_mixers()
"""

CLASH = THIRD_PARTY.replace("third_party_ema", "hgrn2")
BROKEN = "import no_such_module"


def installed(folder, source, entry="third_party_ema = third_party:EMA"):
    """A folder into which a wheel with `third_party.py` was installed."""
    wheel = folder / "third_party-1.0-py3-none-any.whl"
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: by-hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": f"[seqzoo.mixers]\n{entry}\n",
    }
    files = {"third_party.py": source, **{f"third_party-1.0.dist-info/{k}": v for k, v in about.items()}}
    record = "third_party-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    site = folder / "site"
    if importlib.util.find_spec("pip"):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--disable-pip-version-check",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
        ]
        subprocess.run([*pip, "--target", str(site), str(wheel)], check=True, capture_output=True)
    else:  # an environment without pip: what installing comes to
        zipfile.ZipFile(wheel).extractall(site)
    return site


def run(site, code):
    """Run `code` in a fresh Python that also finds what is installed in `site`."""
    code = f"import sys; sys.path.append({str(site)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_an_installed_package_brings_a_mixer(tmp_path):
    done = run(installed(tmp_path, THIRD_PARTY), USE_IT)
    assert done.returncode == 0, done.stderr


def test_an_installed_package_cannot_take_a_name(tmp_path):
    site = installed(tmp_path, CLASH, "hgrn2 = third_party:EMA")
    done = run(site, "import seqzoo; seqzoo.list_mixers()")
    assert done.returncode != 0
    assert "hgrn2" in done.stderr
    assert "third_party" in done.stderr


def test_an_installed_package_that_does_not_import_is_named(tmp_path):
    done = run(installed(tmp_path, BROKEN), "import seqzoo; seqzoo.create_mixer('third_party_ema', 16)")
    assert done.returncode != 0
    assert "third_party_ema" in done.stderr
    assert "no_such_module" in done.stderr
