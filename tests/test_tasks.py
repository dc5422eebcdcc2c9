"""The tasks: each label worked out anew from the inputs, examples that the seed decides, and sizes at the edge."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch

from seqzoo.lab import Comparison, LabError, TrainConfig, compare_mixers
from seqzoo.lab.tasks import Synthetic, create_task, list_tasks, register_task, task_info
from seqzoo.lab.tasks.pathfinder import APART, BACKGROUND, CURVE, DOT, TOGETHER
from seqzoo.lab.tasks.state_tracking import multiplication

DRAWN = [name for name in list_tasks() if name not in ("text", "tokens")]
SMALLEST = {
    "copying": {"seq_len": 2, "symbols": 1, "vocab_size": 3},
    "selective_copying": {"seq_len": 2, "symbols": 1, "vocab_size": 3},
    "digits": {"valid_examples": 1},
    "group": {"seq_len": 1, "group": "z2"},
    "induction": {"seq_len": 3, "triggers": 1, "vocab_size": 2},
    "listops": {"seq_len": 4, "min_length": 4, "max_depth": 1, "max_args": 2},
    "mqar": {"seq_len": 4, "pairs": 1, "vocab_size": 4},
    "parity": {"seq_len": 1},
    "pathfinder": {"size": 24, "dashes": 4},
}
WRONG = {
    "copying": [({"seq_len": 15}, "seq_len: expected 16 or more"), ({"symbols": 0}, "symbols")],
    "selective_copying": [({"vocab_size": 2}, "selective_copying: vocab_size: expected 3")],
    "digits": [({"valid_examples": 1797}, "valid_examples: expected 1 to 1796")],
    "group": [
        ({"group": "d4"}, "such as z60"),
        ({"group": "s7"}, "a product such as"),
        ({"group": "a2xz1"}, "more than the neutral"),
        ({"seq_len": 0}, "seq_len"),
    ],
    "induction": [({"seq_len": 4, "triggers": 2}, "seq_len: expected 5 or more")],
    "listops": [
        ({"min_length": 65}, "min_length: expected 4 to 64"),
        ({"min_length": 7, "max_depth": 1, "max_args": 4}, "min_length: expected 4 to 6"),
    ],
    "mqar": [
        ({"pairs": 17}, "seq_len: expected 68 or more"),
        ({"vocab_size": 8}, "pairs: expected 1 to 3"),
        ({"seq_len": 63}, "even"),
        ({"power": 0}, "power"),
    ],
    "parity": [({"seq_len": 0}, "seq_len: expected 1 or more"), ({"valid_examples": 0}, "valid_examples")],
    "pathfinder": [({"size": 15}, "size: expected 16"), ({"dashes": 3}, "dashes: expected 4")],
}


def rows(name: str, count: int = 200, **options) -> list[tuple[list[int], dict[int, int]]]:
    """Inputs, and targets that count by position, of some training examples."""
    inputs, targets = create_task(name, **options).train_batch(3, count, seed=5)
    return [
        (x, {i: t for i, t in enumerate(y) if t != -100})
        for x, y in zip(inputs.tolist(), targets.tolist(), strict=True)
    ]


# ---- all tasks


@pytest.mark.parametrize("name", DRAWN)
def test_examples_depend_on_seed_and_step_alone(name):
    task = create_task(name)
    first = task.train_batch(5, 4, seed=1)
    np.random.seed(0)
    torch.manual_seed(0)
    again = create_task(name).train_batch(5, 4, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    for other in (task.train_batch(6, 4, seed=1), task.train_batch(5, 4, seed=1 + 2**32)):
        assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("smallest", [False, True])
def test_examples_have_the_shape_that_is_promised(name, smallest):
    task = create_task(name, **(SMALLEST[name] if smallest else {}))
    batches = [task.train_batch(0, 3, seed=0), *task.valid_batches(7)]
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (len(inputs), task.seq_len)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.min() >= 0 and inputs.max() < task.vocab_size
        counted = targets[targets != -100]
        assert counted.min() >= 0 and counted.max() < task.vocab_size
        assert (targets != -100).any(1).all()
    assert sum(len(inputs) for inputs, _ in batches[1:]) == task.valid_examples


@pytest.mark.parametrize("name", DRAWN)
def test_validation_is_fixed_and_not_what_is_trained_on(name):
    task = create_task(name)
    valid = torch.cat([inputs for inputs, _ in task.valid_batches(64)])
    assert torch.equal(valid, torch.cat([inputs for inputs, _ in create_task(name).valid_batches(50)]))
    assert not torch.equal(valid[:4], task.train_batch(0, 4, seed=0)[0])
    trained = {tuple(row) for seed in range(3) for row in task.train_batch(1, 100, seed)[0].tolist()}
    assert not trained & {tuple(row) for row in valid.tolist()}


@pytest.mark.parametrize(("name", "case"), [(name, i) for name in WRONG for i in range(len(WRONG[name]))])
def test_options_without_examples_are_refused(name, case):
    options, message = WRONG[name][case]
    with pytest.raises(LabError, match=message):
        create_task(name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqra", {}, r"no task is called 'mqra'; did you mean 'mqar'\? Known: .*parity"),
        ("mqar", {"pair": 4}, r"no option 'pair'; did you mean 'pairs'\?"),
        ("digits", {"seq_len": 4}, "no option 'seq_len'"),
        ("mqar", {"pairs": "four"}, r"mqar: pairs: expected int, got 'four'"),
        ("mqar", {"pairs": 4.5}, "pairs: expected"),
        ("digits", {"bidirectional": 1}, "bidirectional: expected bool, got 1"),
        ("parity", {"seq_len": True}, "seq_len: expected int, got True"),
        ("mqar", {"power": "x"}, "power: expected float, got 'x'"),
        ("group", {"group": 5}, "group: expected str, got 5"),
        ("tokens", {"seq_len": "x"}, r"seq_len: expected int \| None, got 'x'"),
        ("text", {"data": 3}, "data: expected"),
    ],
)
def test_wrong_names_and_kinds_are_refused(name, options, message):
    with pytest.raises(LabError, match=message):
        create_task(name, **options)


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match="'mqar' is already"):
        register_task("mqar", Comparison())(Synthetic)


@pytest.mark.parametrize("name", list_tasks())
def test_a_task_says_what_it_is(name):
    info = task_info(name)
    assert info.summary.endswith((".", ")", "?"))
    assert info.comparison.training.steps > 0


@pytest.mark.parametrize("name", DRAWN)
def test_a_mixer_trains_on_it(name):
    task = create_task(name, **(SMALLEST[name] if name != "digits" else {}))
    comparison = Comparison(
        mixers=("gla",), dim=16, depth=1, training=TrainConfig(steps=2, batch_size=2, evaluations=1)
    )
    (result,) = compare_mixers(comparison, task)
    assert 0 <= result.metric <= 1


# ---- each task


def test_mqar_labels_are_the_values_that_followed_the_keys():
    for inputs, targets in rows("mqar", seq_len=32, pairs=4, vocab_size=32):
        value = dict(zip(inputs[0:8:2], inputs[1:8:2], strict=True))
        assert len(value) == len(set(value.values())) == 4
        assert all(1 <= key < 16 <= value[key] < 32 for key in value)
        assert {inputs[i]: target for i, target in targets.items()} == value
        assert all(i >= 8 and i % 2 == 0 for i in targets)
        assert all(token == 0 for i, token in enumerate(inputs[8:], 8) if i not in targets)


def test_mqar_gaps_follow_the_power_law():
    gaps = [(i - 2) // 2 + 1 for _, targets in rows("mqar", 4000, seq_len=18, pairs=1) for i in targets]
    weights = np.arange(1, 9) ** (0.01 - 1)
    shares = np.bincount(gaps, minlength=9)[1:] / len(gaps)
    assert shares == pytest.approx(weights / weights.sum(), abs=0.03)


@pytest.mark.parametrize("name", ["copying", "selective_copying"])
def test_copying_labels_are_the_symbols_in_order(name):
    places = set()
    for inputs, targets in rows(name, seq_len=20, symbols=3):
        symbols = [(i, token) for i, token in enumerate(inputs) if token not in (0, 9)]
        assert inputs[17:] == [9, 9, 9] and 9 not in inputs[:17]
        assert targets == dict(zip(range(17, 20), (token for _, token in symbols), strict=True))
        places |= {i for i, _ in symbols}
    assert places == (set(range(3)) if name == "copying" else set(range(17)))


@pytest.mark.parametrize("triggers", [1, 3, 15])
def test_induction_labels_are_what_followed_the_trigger_before(triggers):
    places = set()
    for inputs, targets in rows("induction", 400, triggers=triggers):
        at = [i for i, token in enumerate(inputs) if token == 19]
        assert len(at) == triggers + 1 and at[-1] == 31
        assert targets == dict.fromkeys(at[1:], inputs[at[0] + 1])
        assert all(inputs[i + 1] == inputs[at[0] + 1] for i in at[:-1])
        places |= set(at[:-1])
    assert places == set(range(30))


def test_listops_labels_are_what_python_says():
    names = {10: "min(", 11: "max(", 12: "median(", 13: "total(", 14: "),"}
    known = {
        "min": lambda *values: min(values),
        "max": lambda *values: max(values),
        "median": lambda *values: int(np.median(values)),
        "total": lambda *values: sum(values) % 10,
    }
    lengths, depths = set(), set()
    for inputs, targets in rows("listops", 300):
        ((last, value),) = targets.items()
        assert set(inputs[last + 1 :]) <= {15} and 15 not in inputs[: last + 1]
        text = "".join(names.get(token, f"{token},") for token in inputs[: last + 1])
        assert eval(text.rstrip(","), {}, known) == value
        lengths.add(last + 1)
        depths.add(max(itertools.accumulate({"(": 1, ")": -1}[c] for c in re.findall("[()]", text))))
    assert min(lengths) >= 16 and max(lengths) <= 64 and len(lengths) > 20
    assert max(depths) == 4


def test_listops_says_when_no_expression_is_found(monkeypatch):
    monkeypatch.setattr("seqzoo.lab.tasks.listops.TRIES", 1)
    with pytest.raises(LabError, match="none has 60 to 60 tokens: allow more lengths"):
        create_task("listops", seq_len=60, min_length=60).train_batch(0, 100, seed=0)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_pathfinder_labels_are_what_a_flood_fill_finds(bidirectional):
    labels = []
    for inputs, targets in rows("pathfinder", 60, bidirectional=bidirectional):
        image = np.array(inputs).reshape(32, 32)
        assert set(np.unique(image)) == {BACKGROUND, CURVE, DOT}
        dots = list(map(tuple, np.argwhere(image == DOT)))
        assert len(dots) == 8
        reached, new = set(), [dots[0]]
        while new:
            y, x = new.pop()
            if 0 <= y < 32 and 0 <= x < 32 and image[y, x] and (y, x) not in reached:
                reached.add((y, x))
                new += [(y + dy, x + dx) for dy in range(-2, 3) for dx in range(-2, 3)]
        labels.append(TOGETHER if len(reached & set(dots)) == 8 else APART)
        assert len(reached & set(dots)) in (4, 8)
        assert targets == {0 if bidirectional else 1023: labels[-1]}
    assert 18 <= labels.count(TOGETHER) <= 42


def test_parity_labels():
    for inputs, targets in rows("parity"):
        assert list(targets.values()) == [sum(inputs[: i + 1]) % 2 for i in range(32)]


@pytest.mark.parametrize(("group", "degree", "even"), [("s3", 3, False), ("a4", 4, True), ("s4", 4, False)])
def test_permutation_labels_are_the_composition(group, degree, even):
    elements = [
        p
        for p in itertools.permutations(range(degree))
        if not even or np.isclose(np.linalg.det(np.eye(degree)[list(p)]), 1)
    ]
    for inputs, targets in rows("group", 50, group=group):
        matrix = np.eye(degree)
        for element, product in zip(inputs, targets.values(), strict=True):
            matrix = matrix @ np.eye(degree)[:, list(elements[element])]
            assert (matrix == np.eye(degree)[:, list(elements[product])]).all()


def test_cyclic_labels_are_sums():
    for inputs, targets in rows("group", group="z60"):
        assert list(targets.values()) == [sum(inputs[: i + 1]) % 60 for i in range(32)]


@pytest.mark.parametrize(("group", "order"), [("a5", 60), ("s5", 120), ("a4xz5", 60), ("z2xz2xz3", 12)])
def test_a_group_is_a_group(group, order):
    table = multiplication(group)
    everything = np.arange(order)
    assert table.shape == (order, order)
    assert (table[0] == everything).all() and (table[:, 0] == everything).all()
    assert (np.sort(table, axis=0) == everything[:, None]).all()
    a, b, c = np.random.default_rng(0).integers(order, size=(3, 500))
    assert (table[table[a, b], c] == table[a, table[b, c]]).all()


def test_a_product_of_groups_takes_each_part_alone():
    table, left, right = multiplication("s3xz5"), multiplication("s3"), multiplication("z5")
    for a, b in itertools.product(range(30), repeat=2):
        assert divmod(table[a, b], 5) == (left[a // 5, b // 5], right[a % 5, b % 5])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    label = {tuple(image): digit for image, digit in zip(*load_digits(return_X_y=True), strict=True)}
    for inputs, targets in rows("digits"):
        assert targets == {63: 17 + label[tuple(inputs)]}
    ((_, targets),) = rows("digits", 1, bidirectional=True)
    assert set(targets) == {0}


# ---- tokens of one's own


def test_tokens_of_one_sequence(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.uint8))
    task = create_task("tokens", data=tmp_path / "a.npy", seq_len=7)
    assert (task.vocab_size, task.seq_len, len(task.train)) == (100, 7, 90)
    inputs, targets = task.train_batch(0, 300, seed=0)
    assert torch.equal(inputs + 1, targets)
    assert (inputs.min(), targets.max()) == (0, 89)
    valid = [inputs for inputs, _ in task.valid_batches(4)]
    assert torch.cat(valid).tolist() == [list(range(90, 97))]


def test_tokens_of_a_row_each(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(60).reshape(20, 3))
    task = create_task("tokens", data=tmp_path / "a.npy")
    assert (task.vocab_size, task.seq_len) == (60, 2)
    inputs, targets = task.train_batch(0, 300, seed=0)
    assert torch.equal(inputs + 1, targets)
    assert sorted(set(inputs[:, 0].tolist())) == list(range(0, 54, 3))
    ((inputs, targets),) = task.valid_batches(8)
    assert inputs.tolist() == [[54, 55], [57, 58]] and targets.tolist() == [[55, 56], [58, 59]]


@pytest.mark.parametrize(
    ("array", "seq_len", "message"),
    [
        (np.zeros(10), 2, "expected integers"),
        (np.zeros((2, 2, 2), dtype=int), 2, "expected integers"),
        (np.array([{}], dtype=object), 2, "no .npy file of numbers"),
        (-np.ones(100, dtype=int), 2, "expected tokens 0 to"),
        (np.full(100, 2**40), 2, "expected tokens 0 to"),
        (np.zeros(9, dtype=int), 4, "has 9 tokens, but training and validation take 10"),
        (np.zeros((1, 5), dtype=int), None, "has 1 rows"),
        (np.zeros((9, 5), dtype=int), 3, "rows of 5 tokens, so 4, got 3"),
        (np.zeros((9, 1), dtype=int), None, "rows of 1 tokens"),
        (np.zeros((9, 0), dtype=int), None, "rows of 0 tokens"),
    ],
)
def test_tokens_that_cannot_be_used_are_a_line(tmp_path, array, seq_len, message):
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(LabError, match=message):
        create_task("tokens", data=tmp_path / "a.npy", seq_len=seq_len)


def test_tokens_need_a_file_of_numbers(tmp_path):
    with pytest.raises(LabError, match=r"give a \.npy file"):
        create_task("tokens")
    (tmp_path / "a.npy").write_bytes(b"")
    with pytest.raises(LabError, match=r"no \.npy file"):
        create_task("tokens", data=tmp_path / "a.npy")
