"""seqzoo's models inside transformers: Auto classes, generate, saving, Trainer."""

import json
import os

import pytest
import sklearn.datasets
import torch

import seqzoo

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from seqzoo_plugins.transformers import (  # noqa: E402
    SeqzooConfig,
    SeqzooForCausalLM,
    SeqzooForSequenceClassification,
    StateCache,
)
from seqzoo_plugins.transformers.modeling import CACHE  # noqa: E402

VOCAB, DIM = 40, 32
PATTERNS = [*seqzoo.list_mixers(), ["hgrn2", "attention"], {"name": "attention", "window": 5}]
each_pattern = pytest.mark.parametrize("mixer", PATTERNS, ids=str)
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}

pytestmark = pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning")


def make(mixer="hgrn2", cls=SeqzooForCausalLM, **options):
    """A small model, in float64, with opinions."""
    torch.manual_seed(0)
    model = cls(SeqzooConfig(vocab_size=VOCAB, dim=DIM, depth=2, mixer=mixer, **options)).eval()
    torch.nn.init.normal_(model.model.embedding.weight)
    return model.double()


def prompts(batch=2, length=7):
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(1))


@each_pattern
def test_generate_is_seqzoos_and_that_of_whole_passes(mixer):
    model, x = make(mixer), prompts()
    tokens = model.generate(
        x, max_new_tokens=80, **GREEDY
    )  # more than a growing state gets room for at first
    assert torch.equal(tokens[:, 7:], model.model.generate(x, 80, temperature=0).tokens)
    assert torch.equal(tokens[:, :30], model.generate(x, max_new_tokens=23, use_cache=False, **GREEDY))


@each_pattern
def test_left_pads_change_nothing(mixer):
    model, x = make(mixer), prompts()
    padded, mask = torch.cat([x.new_zeros(2, 3), x], 1), torch.ones(2, 10, dtype=torch.long)
    mask[:, :3] = 0
    alone = model.generate(x, max_new_tokens=12, **GREEDY)
    assert torch.equal(model.generate(padded, attention_mask=mask, max_new_tokens=12, **GREEDY)[:, 3:], alone)


@each_pattern
def test_beams_and_several_samples(mixer):
    model, x = make(mixer), prompts()
    beams = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 9, **GREEDY}
    assert torch.equal(model.generate(x, **beams), model.generate(x, use_cache=False, **beams))
    samples = {**GREEDY, "do_sample": True, "num_return_sequences": 3, "max_new_tokens": 9, "top_k": 0}
    torch.manual_seed(3)
    cached = model.generate(x, **samples)
    torch.manual_seed(3)
    assert torch.equal(cached, model.generate(x, use_cache=False, **samples))
    assert cached.shape == (6, 16)


@each_pattern
def test_going_on_from_a_returned_cache(mixer):
    model, x = make(mixer), prompts()
    whole = model.generate(x, max_new_tokens=14, **GREEDY)
    first = model.generate(x, max_new_tokens=5, return_dict_in_generate=True, **GREEDY)
    more = model.generate(first.sequences, max_new_tokens=9, **{CACHE: first[CACHE]}, **GREEDY)
    assert torch.equal(more, whole)
    assert first[CACHE].length == whole.shape[1] - 1, "tokens were read twice"
    # another turn: several tokens at once
    cache = model(whole[:, :9])[CACHE]
    logits = model(whole[:, 9:], attention_mask=torch.ones_like(whole), **{CACHE: cache}).logits
    torch.testing.assert_close(logits, model(whole).logits[:, 9:])


def test_a_recurrent_state_has_a_constant_size():
    def size(length):
        state = make("hgru")(prompts(1, length))[CACHE].state
        return sum(t.numel() for t in seqzoo.states.leaves(state))

    assert size(3) == size(90)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@each_pattern
def test_saved_and_loaded_bit_for_bit(mixer, dtype, tmp_path):
    model = make(mixer).to(dtype)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(again) is SeqzooForCausalLM
    assert not again.training
    expected = model.state_dict()
    assert list(again.state_dict()) == list(expected)
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (config.hidden_size, config.num_hidden_layers) == (DIM, 2)


def test_a_folder_names_no_code(tmp_path):
    make().save_pretrained(tmp_path)
    assert not list(tmp_path.rglob("*.py"))
    assert "auto_map" not in (tmp_path / "config.json").read_text()  # no code on the hub
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["mixer"] = "os:getcwd"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="os:getcwd"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_loss_is_that_of_the_model_and_pads_do_not_count():
    model, x = make(), prompts()
    torch.testing.assert_close(model(x, labels=x).loss, model.model.loss(x))
    padded, mask = torch.cat([x.new_zeros(2, 3), x], 1), torch.ones(2, 10, dtype=torch.long)
    mask[:, :3] = 0
    labels = padded.masked_fill(mask == 0, -100)
    labels[:, 3] = -100  # as everywhere in transformers: else the first token is guessed from a pad
    torch.testing.assert_close(model(padded, mask, labels).loss, model(x, labels=x).loss)


@each_pattern
def test_activation_checkpointing_changes_no_gradient(mixer):
    model, x = make(mixer).train(), prompts()
    model(x, labels=x).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable()
    model(x, labels=x).loss.backward()
    assert model.model.backbone.activation_checkpointing
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_one_matrix_is_embedding_and_output(tmp_path):
    model = make()
    assert not [name for name in model.state_dict() if "head" in name]
    model.get_input_embeddings().weight.data.zero_()
    assert not model(prompts()).logits.any()
    model = make()
    model.resize_token_embeddings(VOCAB + 3)
    assert (model.config.vocab_size, model(prompts()).logits.shape[-1]) == (VOCAB + 3, VOCAB + 3)
    model.float().save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(prompts()).logits, model(prompts()).logits)


def test_dtype_is_that_of_the_folder_or_the_one_asked_for(tmp_path):
    make("gla").to(torch.bfloat16).save_pretrained(tmp_path)
    for asked, found in (("auto", torch.bfloat16), (torch.float16, torch.float16)):
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=asked)
        assert {p.dtype for p in again.parameters()} == {found}
        assert again(prompts()).logits.dtype == found


def test_logits_to_keep_and_tuples():
    model, x = make(), prompts()
    torch.testing.assert_close(model(x, logits_to_keep=2).logits, model(x).logits[:, -2:])
    logits, cache = model(x, return_dict=False)
    assert logits.shape == (2, 7, VOCAB) and isinstance(cache, StateCache)
    assert model(x, use_cache=False).keys() == {"logits"}
    with pytest.raises(ValueError, match="input_ids"):
        model()


def test_tokens_cannot_be_taken_back():
    with pytest.raises(ValueError, match="forget"):
        make()(prompts())[CACHE].crop(3)


class TestClassifier:
    @each_pattern
    def test_it_reads_the_last_token_wherever_the_pads_are(self, mixer):
        model, x = make(mixer, SeqzooForSequenceClassification, num_labels=3), prompts()
        wanted = model(x).logits
        pads, ones = x.new_zeros(2, 4), torch.ones_like(x)
        for tokens, mask in (([x, pads], [ones, pads]), ([pads, x], [pads, ones])):
            torch.testing.assert_close(model(torch.cat(tokens, 1), torch.cat(mask, 1)).logits, wanted)
        labels = torch.tensor([2, 0])
        loss = model(x, labels=labels).loss
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(wanted.float(), labels))

    def test_it_learns_digits(self, tmp_path):
        """Images of 8 × 8 pixels, 17 greys, as sequences of 64 tokens."""
        torch.manual_seed(0)
        digits = sklearn.datasets.load_digits()
        pixels, labels = torch.tensor(digits.images).long().flatten(1), torch.tensor(digits.target)
        rows = [{"input_ids": x, "labels": y} for x, y in zip(pixels, labels, strict=True)]
        config = SeqzooConfig(vocab_size=17, dim=DIM, depth=1, mixer="lru", num_labels=10)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=120, per_device_train_batch_size=32, learning_rate=0.01,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        model = SeqzooForSequenceClassification(config)
        transformers.Trainer(model=model, args=arguments, train_dataset=rows[:1500]).train()
        with torch.no_grad():
            right = model.eval()(pixels[1500:]).logits.argmax(-1) == labels[1500:]
        assert right.float().mean() > 0.5  # by chance 0.1

    def test_a_language_model_gets_a_new_head(self, tmp_path):
        language = make().float()
        language.save_pretrained(tmp_path)
        model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
        assert torch.equal(model.model.embedding.weight, language.model.embedding.weight)
        assert 0 < model.score.weight.abs().max() < 1
        model.save_pretrained(tmp_path / "again")
        again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again")
        assert torch.equal(again.score.weight, model.score.weight)


def test_the_trainer_learns_and_resumes_to_the_same_bits(tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": row, "labels": row} for row in (torch.arange(400).reshape(20, 20) * 3 % 7)]

    def trained(folder, resume=None, **more):
        torch.manual_seed(0)
        model = SeqzooForCausalLM(SeqzooConfig(vocab_size=7, dim=DIM, depth=1, mixer="lru", dropout=0.1))
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / folder), max_steps=30, per_device_train_batch_size=4, learning_rate=0.01,
            save_steps=15, logging_steps=5, report_to=[], use_cpu=True, disable_tqdm=True, **more,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return model, losses

    model, losses = trained("one")
    assert losses[-1] < 0.5 * losses[0]
    again, _ = trained("two", str(tmp_path / "one" / "checkpoint-15"))
    for name, value in again.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
