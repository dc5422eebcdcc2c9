"""What every op must do, written once. Each op's tests inherit `OpLaws` and say how a case of the op is made."""

import inspect
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from op_cases import BACKEND_MODES, Case, check, compare, evaluate, has_time

import seqzoo_kernels
from seqzoo_kernels import precision

LENGTHS = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 50, 63, 64, 65, 127, 130]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
each_mode = pytest.mark.parametrize(("backend", "mode"), BACKEND_MODES)
each_torch_mode = pytest.mark.parametrize("mode", ["parallel", "chunked", "recurrent"])
PACKS = [
    [0, 0, 13, 20, 37],  # empty at the start
    [0, 10, 10, 15, 37],  # in the middle
    [0, 10, 15, 37, 37],  # at the end
    [0, 1, 2, 3, 40],
    [0, 37],
    [0, 0],
]


class OpLaws:
    """Subclasses give `op`, `variants` (a name each, for how a case is built) and `make`."""

    op: str
    variants: list[str]

    def make(
        self,
        variant: str,
        *,
        T: int,
        B: int = 2,
        size: int = 3,
        seed: int = 0,
        gate: str = "extreme",
        state: bool = True,
        cu: list[int] | None = None,
    ) -> Case:
        raise NotImplementedError

    def each_variant(self, **sizes):
        for variant in self.variants:
            yield self.make(variant, **sizes)

    # values, final states and gradients against the oracle

    @pytest.mark.parametrize("T", [0, 1, 7])
    def test_oracle_equals_the_numpy_loop(self, T):
        for case in self.each_variant(T=T):
            capacity = 9 + T
            ours = case.oracle(case.inputs, capacity)
            truth = case.oracle(case.inputs, capacity, numpy=True)
            assert ours.keys() == truth.keys()
            for name in truth:
                precision.check_close(ours[name], truth[name], None, dtype=torch.float64, name=name)

    def test_oracle_gradients_equal_finite_differences(self):
        for case in self.each_variant(T=4, gate="mild"):
            leaves = {n: x.detach().requires_grad_() for n, x in case.inputs.items()}

            def outputs(*tensors, case=case, leaves=leaves):
                given = dict(zip(leaves, tensors, strict=True))
                return tuple(y for y in case.oracle(given, 9 + 4).values() if y.requires_grad)

            assert torch.autograd.gradcheck(outputs, tuple(leaves.values()), fast_mode=True)

    @pytest.mark.parametrize("T", LENGTHS)
    @each_mode
    def test_float64_at_every_length(self, backend, mode, T):
        for case in self.each_variant(T=T):
            check(case, backend, mode)

    @each_mode
    @given(data=st.data())
    def test_law_8(self, backend, mode, data):
        case = self.make(
            data.draw(st.sampled_from(self.variants), "variant"),
            T=data.draw(st.integers(0, 70), "T"),
            B=data.draw(st.integers(0, 3), "B"),
            size=data.draw(st.sampled_from([1, 2, 3, 5, 12, 24]), "size"),
            seed=data.draw(st.integers(0, 1000), "seed"),
            gate=data.draw(st.sampled_from(["mild", "extreme", "near_one"]), "gate"),
            state=data.draw(st.booleans(), "state"),
        )
        dtype = data.draw(st.sampled_from([torch.float64, *DTYPES]), "dtype")
        chunk_size = data.draw(st.sampled_from([None, 1, 2, 7, 16, 32, 64]), "chunk_size")
        layout = data.draw(st.sampled_from(["plain", "strided"]), "layout")
        cotangents = data.draw(st.sampled_from(["random", "sum"]), "cotangents")
        check(case, backend, mode, dtype, layout=layout, cotangents=cotangents, chunk_size=chunk_size)

    @pytest.mark.parametrize("dtype", DTYPES)
    @each_torch_mode
    def test_law_8_over_several_chunks(self, mode, dtype):
        for case in self.each_variant(T=150):
            check(case, "torch", mode, dtype)

    @pytest.mark.parametrize("T", [1, 127, 128, 129, 150])
    @each_torch_mode
    def test_gradients_of_both_states(self, mode, T):
        for case in self.each_variant(T=T, gate="mild"):
            check(case, "torch", mode, torch.float32)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 12, 24, 48, 60])
    @each_torch_mode
    def test_any_width_with_nan_around(self, mode, size):
        for variant in self.variants[:3]:
            check(self.make(variant, T=19, size=size), "torch", mode, torch.float32, layout="strided")

    @pytest.mark.parametrize("chunk_size", [1, 2, 3, 8, 16, 17, 31, 64, 100, 1000])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_any_chunk_size(self, chunk_size, dtype):
        for case in self.each_variant(T=67):
            check(case, "torch", "chunked", dtype, chunk_size=chunk_size)

    @pytest.mark.parametrize("B", [0, 1, 3])
    @each_mode
    def test_any_batch(self, backend, mode, B):
        for T in (0, 1, 21):
            for state in (False, True):
                for case in self.each_variant(T=T, B=B, state=state):
                    check(case, backend, mode, torch.float32)

    @each_mode
    def test_expanded_gradients(self, backend, mode):
        for case in self.each_variant(T=35):
            check(case, backend, mode, cotangents="sum", layout="strided")

    @each_mode
    def test_no_gradient_asked(self, backend, mode):
        for case in self.each_variant(T=20):
            result = case.run(case.inputs, backend=backend, mode=mode)
            graph = case.run(
                {n: x.detach().requires_grad_() for n, x in case.inputs.items()}, backend=backend, mode=mode
            )
            for name, y in result.items():
                assert not y.requires_grad
                assert torch.equal(y, graph[name].detach()), name

    @each_torch_mode
    def test_some_gradients_asked(self, mode):
        case = self.make(self.variants[0], T=20, gate="mild")
        every = evaluate(
            lambda leaves: case.run(leaves, backend="torch", mode=mode), case.inputs, torch.float64
        )
        for name in case.inputs:
            leaf = case.inputs[name].detach().requires_grad_()
            one = evaluate(
                lambda leaves, name=name: case.run({**case.inputs, **leaves}, backend="torch", mode=mode),
                {name: leaf},
                torch.float64,
            )
            precision.check_close(
                one[f"d_{name}"], every[f"d_{name}"], None, dtype=torch.float64, name=f"d_{name}"
            )

    @each_mode
    def test_gradient_of_the_output_alone_and_of_the_state_alone(self, backend, mode):
        for case in self.each_variant(T=18, gate="mild"):
            for part in ("out", "final"):

                def only(source, part=part):
                    return lambda leaves: {n: y for n, y in source(leaves).items() if n.startswith(part)}

                op = partial(case.run, backend=backend, mode=mode)
                ours = evaluate(only(op), case.inputs, torch.float64)
                capacity = case.run(case.inputs)["final.k"].shape[1] if self.op == "attention" else None
                exact = evaluate(only(partial(case.oracle, capacity=capacity)), case.inputs, torch.float64)
                compare(case, case.inputs, ours, exact, None, torch.float64, f"{backend}/{mode} {part}")

    # splitting, packing, states

    @each_mode
    @given(data=st.data())
    def test_splitting(self, backend, mode, data):
        T = data.draw(st.integers(0, 70), "T")
        cuts = sorted(data.draw(st.lists(st.integers(0, T), min_size=1, max_size=3), "cuts"))
        case = self.make(
            data.draw(st.sampled_from(self.variants), "variant"),
            T=T,
            seed=data.draw(st.integers(0, 1000), "seed"),
            state=data.draw(st.booleans(), "state"),
        )
        check(case, backend, mode, cuts=cuts)

    @pytest.mark.parametrize("segment", [1, 2, 3, 65])
    @each_torch_mode
    def test_splitting_into_short_segments(self, mode, segment):
        T = 200 if segment == 65 else 24
        for case in self.each_variant(T=T, state=False):
            check(case, "torch", mode, torch.float32, cuts=list(range(segment, T, segment)))

    @pytest.mark.parametrize("cu", PACKS)
    @pytest.mark.parametrize("state", [False, True])
    @each_mode
    def test_packing(self, backend, mode, state, cu):
        """A pack equals its sequences run alone; NaN stands in the four rows behind its last sequence."""
        for case in self.each_variant(T=cu[-1] + 4, cu=cu, state=state):
            result = check(case, backend, mode)
            self.assert_tail_is_zero(case, result, cu[-1])

    @pytest.mark.parametrize("dtype", DTYPES)
    @each_mode
    def test_packing_in_other_dtypes(self, backend, mode, dtype):
        cu = [0, 10, 15, 15, 80]
        for case in self.each_variant(T=90, cu=cu):
            for extra in ({}, {"max_seqlen": 65}, {"max_seqlen": 90}, {"chunk_size": 16}):
                result = check(case, backend, mode, dtype, **extra)
                self.assert_tail_is_zero(case, result, 80)

    @each_mode
    def test_a_pack_of_nothing(self, backend, mode):
        for T in (0, 3):
            for cu in ([0], [0, 0, 0]):
                for case in self.each_variant(T=T, cu=cu):
                    check(case, backend, mode)

    @pytest.mark.parametrize("index", [torch.int32, torch.int64])
    @each_mode
    def test_both_index_types(self, backend, mode, index):
        case = self.make(self.variants[0], T=12, cu=[0, 5, 9])
        case.options["cu_seqlens"] = case.options["cu_seqlens"].to(index)
        check(case, backend, mode)

    def assert_tail_is_zero(self, case, result, end):
        assert (result["out"][:, end:] == 0).all()
        for name, x in case.inputs.items():
            if has_time(name, x):
                assert (result[f"d_{name}"][:, end:] == 0).all(), name

    @each_mode
    def test_a_state_is_a_value(self, backend, mode):
        """A call changes no input, repeats itself bit for bit, and its states own dense storage."""
        for T in (0, 1, 20):
            for case in self.each_variant(T=T):
                state = case.initial_state(case.inputs)
                given = [*case.inputs.values(), *(case.lengths,) * (case.lengths is not None)]
                before, versions = [x.clone() for x in given], [x._version for x in given]
                first = case.call(case.inputs, state, backend=backend, mode=mode)
                second = case.call(case.inputs, state, backend=backend, mode=mode)
                for x, old, version in zip(given, before, versions, strict=True):
                    assert torch.equal(x, old)
                    assert x._version == version
                states, again = (x[1] if isinstance(x[1], tuple) else (x[1],) for x in (first, second))
                assert torch.equal(first[0], second[0])
                used = {x.untyped_storage().data_ptr() for x in (*given, first[0]) if x.numel()}
                for x, y in zip(states, again, strict=True):
                    assert torch.equal(x, y)
                    assert x.is_contiguous()
                    assert x.untyped_storage().nbytes() == x.numel() * x.element_size()
                    if x.numel():
                        assert x.untyped_storage().data_ptr() not in used, (
                            "a state shares another tensor's memory"
                        )
                        used.add(x.untyped_storage().data_ptr())

    @each_torch_mode
    def test_causality_and_rows(self, mode):
        """Another token at t = 13 of row 1 changes nothing before it (after it, if reversed) and nothing in row 0."""
        for case in self.each_variant(T=40, gate="mild"):
            one = case.run(case.inputs, backend="torch", mode=mode)["out"]
            inputs = {n: x.clone() for n, x in case.inputs.items()}
            for n, x in inputs.items():
                if has_time(n, x):
                    x[1, 13] = -1.5
            two = case.run(inputs, backend="torch", mode=mode)["out"]
            same = slice(14, None) if case.options.get("reverse") else slice(0, 13)
            assert torch.equal(one[0], two[0])
            assert torch.equal(one[1, same], two[1, same])
            assert not torch.equal(one[1], two[1])

    # derivatives of derivatives, compilation, autocast

    @each_mode
    def test_gradcheck(self, backend, mode):
        """Other chunk sizes than 2 are no other mathematics; float64, five steps, two chunks and a half."""
        for case in self.each_variant(T=5, B=1, size=2, gate="mild"):
            leaves = {n: x.detach().requires_grad_() for n, x in case.inputs.items()}

            def run(*tensors, case=case, leaves=leaves):
                outputs = case.run(
                    dict(zip(leaves, tensors, strict=True)), backend=backend, mode=mode, chunk_size=2
                )
                return tuple(y for y in outputs.values() if y.requires_grad)

            assert torch.autograd.gradcheck(run, tuple(leaves.values()))

    @each_mode
    def test_gradgradcheck(self, backend, mode):
        for case in self.each_variant(T=3, B=1, size=2, gate="mild"):
            leaves = {n: x.detach().requires_grad_() for n, x in case.inputs.items()}

            def run(*tensors, case=case, leaves=leaves):
                outputs = case.run(
                    dict(zip(leaves, tensors, strict=True)), backend=backend, mode=mode, chunk_size=2
                )
                return tuple(y for y in outputs.values() if y.requires_grad)

            assert torch.autograd.gradgradcheck(run, tuple(leaves.values()), fast_mode=True)

    def check_compiles_once(self, variant, mode, first):
        torch._dynamo.reset()
        cases = [self.make(variant, T=T, size=4) for T in (first, 130, 64, 5)]
        lean = Case(self.op, {}, cases[0].options, cases[0].lengths)

        @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
        def compiled(leaves):
            return lean.run(leaves, backend="torch", mode=mode)

        # two sizes that happen to agree, such as T and the taps of a convolution, are not to be one symbol
        with torch.fx.experimental._config.patch(use_duck_shape=False):
            for i, case in enumerate(cases):
                with torch.compiler.set_stance("default" if i == 0 else "fail_on_recompile"):
                    check(case, "torch", mode, compiled=compiled)
        torch._dynamo.reset()

    @pytest.mark.parametrize("first", [3, 33, 50])
    @each_torch_mode
    def test_compiles_once_for_every_length(self, mode, first):
        """Forward and backward in one graph; the length met first decides nothing."""
        self.check_compiles_once(self.variants[0], mode, first)

    def test_compiles_every_variant(self):
        for i, variant in enumerate(self.variants[1:]):
            self.check_compiles_once(variant, ["parallel", "chunked", "recurrent"][i % 3], 33)

    def test_compiles_packed(self):
        torch._dynamo.reset()
        for variant in self.variants[:2]:
            case = self.make(variant, T=41, cu=[0, 0, 13, 37])
            case.options["max_seqlen"] = 24

            @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
            def compiled(leaves, case=case):
                return case.run(leaves)

            check(case, "auto", "auto", compiled=compiled)
        torch._dynamo.reset()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @each_torch_mode
    def test_autocast(self, mode, dtype):
        """float32 inputs under autocast are judged as the dtype it casts to; gates and states stay in float32."""
        for case in self.each_variant(T=40, gate="near_one"):
            inputs = case.cast(torch.float32)

            def run(leaves, case=case):
                with torch.autocast("cpu", dtype):
                    return case.run(leaves, backend="torch", mode=mode)

            result = evaluate(run, inputs, dtype)
            capacity = result["final.k"].shape[1] if "final.k" in result else None
            wide = {n: x.to(torch.complex128 if x.is_complex() else torch.float64) for n, x in inputs.items()}
            exact = evaluate(lambda x, case=case, capacity=capacity: case.oracle(x, capacity), wide, dtype)
            cast = case.cast(dtype)
            reference = evaluate(lambda x, case=case: case.run(x, backend="reference"), cast, dtype)
            compare(case, inputs, result, exact, reference, dtype, f"autocast {mode}")

    # errors

    @pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
    def test_a_batch_of_two_is_no_pack(self, backend):
        case = self.make(self.variants[0], T=6, B=2, state=False)
        with pytest.raises(ValueError, match=rf"{self.op}: .*cu_seqlens.*B"):
            case.run(case.inputs, cu_seqlens=torch.tensor([0, 2, 6]), backend=backend)

    def test_cu_seqlens_of_the_wrong_kind(self):
        case = self.make(self.variants[0], T=6, B=1, state=False)
        for wrong in (
            torch.tensor([0.0, 6.0]),
            torch.tensor([[0, 6]]),
            torch.tensor([], dtype=torch.int64),
            [0, 6],
        ):
            with pytest.raises((ValueError, TypeError), match=rf"{self.op}: .*cu_seqlens"):
                case.run(case.inputs, cu_seqlens=wrong)

    def test_unknown_modes_backends_and_options(self):
        case = self.make(self.variants[0], T=3)
        with pytest.raises(ValueError, match=rf"{self.op}: .*mode.*chunked.*'chunkd'"):
            case.run(case.inputs, mode="chunkd")
        with pytest.raises(ValueError, match=r"backend.*triton.*'tritn'"):
            case.run(case.inputs, backend="tritn")
        with pytest.raises(TypeError, match="cu_seqlen"):
            case.run(case.inputs, cu_seqlen=torch.tensor([0, 3]))

    @pytest.mark.parametrize("chunk_size", [0, -1, 2.5])
    def test_wrong_chunk_sizes(self, chunk_size):
        case = self.make(self.variants[0], T=3)
        with pytest.raises((ValueError, TypeError), match=rf"{self.op}: .*chunk_size.*{chunk_size}"):
            case.run(case.inputs, chunk_size=chunk_size)

    def test_a_state_of_another_batch(self):
        case, other = (self.make(self.variants[0], T=3, B=B) for B in (2, 3))
        with pytest.raises(ValueError, match=rf"{self.op}: .*initial_state"):
            case.call(case.inputs, other.initial_state(other.inputs))

    def test_inputs_of_mixed_or_whole_number_dtypes(self):
        case = self.make(self.variants[0], T=3)
        inputs = {n: x.to(torch.int64) for n, x in case.inputs.items()}
        with pytest.raises(TypeError, match=rf"{self.op}: "):
            case.run(inputs)

    def test_options_are_keywords(self):
        parameters = inspect.signature(getattr(seqzoo_kernels, self.op)).parameters
        for name in ("initial_state", "cu_seqlens", "max_seqlen", "mode", "backend", "chunk_size"):
            assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
