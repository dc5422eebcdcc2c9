"""seqzoo's models in the evaluation harness: what it reports is what direct computation gives, and needs no network."""

import json
import os
import warnings
from types import SimpleNamespace

import pytest
import torch

import seqzoo

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

from seqzoo_plugins.lm_eval import SeqzooLM

pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
PATTERNS = [*seqzoo.list_mixers(), ["hgrn2", "attention"]]
each_pattern = pytest.mark.parametrize("mixer", PATTERNS, ids=str)
QUESTIONS = [
    {"text": "two and two are", "choices": [" four", " five", " a fish"], "answer": 0},
    {"text": "the sun is", "choices": [" cold", " hot"], "answer": 1},
    {"text": "", "choices": ["a", "bc", "d"], "answer": 2},
]
TEXTS = ["The quick brown fox.", "jumps over\nthe lazy dög", "a"]


def make(mixer="hgrn2"):
    torch.manual_seed(0)
    model = seqzoo.LanguageModel(256, 16, 2, mixer=mixer)
    torch.nn.init.normal_(model.embedding.weight)
    return model.eval()


def log_p(model, prefix, text):
    """The sum of log-probabilities of `text` after `prefix`, and whether each byte is the likeliest."""
    tokens = torch.tensor([[*prefix, *text]])
    with torch.no_grad():
        logits = model(tokens[:, :-1])[0][0, len(prefix) - 1 :]
    target = tokens[0, len(prefix) :]
    each = logits.double().log_softmax(-1)[torch.arange(len(target)), target]
    return each.sum().item(), bool((logits.argmax(-1) == target).all())


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@each_pattern
def test_log_likelihoods_are_those_of_each_text_alone(mixer):
    model = make(mixer)
    pairs = [(q["text"], choice) for q in QUESTIONS for choice in q["choices"]]
    found = SeqzooLM(model, batch_size=3).loglikelihood(requests(*pairs), disable_tqdm=True)
    for (context, continuation), (value, greedy) in zip(pairs, found, strict=True):
        wanted, likeliest = log_p(model, context.encode() or b"\n", continuation.encode())
        assert value == pytest.approx(wanted, abs=1e-4)
        assert greedy == likeliest


@each_pattern
def test_a_rolling_likelihood_has_no_window(mixer, monkeypatch):
    monkeypatch.setattr("seqzoo_plugins.lm_eval.model.PIECE", 7)
    model, text = make(mixer), "a text that is longer than a piece " * 3
    (found,) = SeqzooLM(model).loglikelihood_rolling(requests((text,)))
    assert found == pytest.approx(log_p(model, b"\n", text.encode())[0], abs=1e-3)
    assert SeqzooLM(model).loglikelihood_rolling(requests(("",))) == [0.0]


def test_the_likeliest_continuation_is_greedy():
    model = make()
    lm = SeqzooLM(model)
    (text,) = lm.generate_until(requests(("abc", {"until": [], "max_gen_toks": 3})))
    tokens = model.generate(torch.tensor([list(b"abc")]), 3, temperature=0).tokens[0].tolist()
    assert text == bytes(tokens).decode(errors="replace")
    decode = lambda tokens: "".join(f"{t}," for t in tokens)  # noqa: E731
    (cut,) = SeqzooLM(model, decode=decode).generate_until(
        requests(("abc", {"until": f"{tokens[2]},", "max_gen_toks": 99}))
    )
    assert cut == "".join(f"{t}," for t in tokens[: tokens.index(tokens[2])])


@pytest.fixture
def tasks(tmp_path):
    """Two tasks on files of this folder."""
    for name, rows in (("questions", QUESTIONS[:2]), ("texts", [{"text": text} for text in TEXTS])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = (
            f"task: own_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {tmp_path}/{name}.jsonl\n"
            "test_split: test\n"
        )
        if name == "questions":
            more = (
                "output_type: multiple_choice\ndoc_to_text: '{{text}}'\ndoc_to_choice: '{{choices}}'\n"
                "doc_to_target: '{{answer}}'\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n"
            )
        else:
            more = (
                "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
                "metric_list:\n  - metric: bits_per_byte\n  - metric: byte_perplexity\n"
            )
        (tmp_path / f"{name}.yaml").write_text(common + more)
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


@pytest.mark.parametrize("mixer", ["hgru", ["hgrn2", "attention"]], ids=str)
def test_the_harness_reports_what_direct_computation_gives(mixer, tasks):
    model = make(mixer)
    results = lm_eval.simple_evaluate(
        model=SeqzooLM(model), tasks=["own_questions", "own_texts"], task_manager=tasks, bootstrap_iters=0
    )["results"]
    right = 0
    for q in QUESTIONS[:2]:
        scores = [log_p(model, q["text"].encode(), choice.encode())[0] for choice in q["choices"]]
        right += scores.index(max(scores)) == q["answer"]
    assert results["own_questions"]["acc,none"] == right / 2
    nats = -sum(log_p(model, b"\n", text.encode())[0] for text in TEXTS)
    bits = nats / sum(len(text.encode()) for text in TEXTS) / 0.6931471805599453
    assert results["own_texts"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


def test_a_model_of_seqzoo_train(tmp_path, text):
    from seqzoo.lab.training import RunConfig, train_model

    config = RunConfig(mixers=("hgru",), dim=16, depth=1, seq_len=16, steps=2, evaluations=1, data=text)
    train_model(config, tmp_path / "run")
    lm = SeqzooLM(tmp_path / "run")
    ((value, _),) = lm.loglikelihood(requests(("a", "b")), disable_tqdm=True)
    assert value < 0


def test_the_prefix_is_a_token():
    with pytest.raises(ValueError, match="one of the model's 5 tokens, got 10"):
        SeqzooLM(seqzoo.LanguageModel(5, 16, 1))
