"""fused_transducer as a part of PyTorch: registration, torch.compile, autocast, modules, transforms and refusals."""

from __future__ import annotations

from functools import partial

import numpy
import pytest
import torch
from fused_transducer import TDTLoss, TransducerLoss, align, call, layers, native, transducer_loss
from fused_transducer.call import TENSORS, packed
from torch.utils.checkpoint import checkpoint

from fused_helpers import (
    ACTIVATIONS,
    NAMES,
    Problem,
    computed,
    error,
    errors,
    lattice_problem,
    logits_of,
    problem,
    right,
    use,
)

RAGGED = [(9, 4), (6, 5), (8, 1)]
LARGE = [(60, 30), (60, 30)]
EXACT = {"negligible": 0.0}
BACKENDS = pytest.mark.parametrize("backend", ["native", "torch"])


def integers(case):
    return case.targets, case.T_lengths, case.U_lengths


def of_operator(case: Problem, backend: str, cells=None, kept=0, gradient=True, **options):
    """Return the arguments of the operator `losses`, with room for the cells of the batch or for `cells`."""
    (N, T, _), U1 = case.tensors[0].shape, case.tensors[1].shape[1]
    room = int((case.T_lengths * (case.U_lengths + 1)).sum()) if backend == "native" else N * T * U1
    options, cells = packed(**{"negligible": 1e-8, **options}), room if cells is None else cells
    return [*case.leaves(), *integers(case), None, None, None, options, backend, gradient, cells, kept]


@BACKENDS
@pytest.mark.parametrize("V", [11, 1100])
def test_the_registration_of_both_operators(backend, V):
    given = of_operator(problem([(5, 2), (4, 1)], V=V, dtype=torch.float32), backend)
    tests = ["test_schema", "test_autograd_registration", "test_faketensor"]
    tests += ["test_aot_dispatch_dynamic"] if backend == "torch" else []  # native's room follows from the lengths
    torch.library.opcheck(torch.ops.fused_transducer.losses.default, tuple(given), test_utils=tests)
    _, arcs, kept = torch.ops.fused_transducer.losses(*given)
    tensors = [x.detach() if isinstance(x, torch.Tensor) else x for x in given[: len(TENSORS) + 2]]
    of_gradients = (torch.ones(2, dtype=torch.float64), arcs, kept, *tensors, [True, False, True, True])
    operator = torch.ops.fused_transducer.gradients.default
    torch.library.opcheck(operator, of_gradients, test_utils=("test_schema", "test_faketensor"))


WRONG = [
    (0, torch.ones(3, dtype=torch.float64)),  # the gradient of three losses
    *((1, arcs) for arcs in (torch.zeros(2, 5), torch.zeros(1, 3720), torch.zeros(2, 3720, dtype=torch.float64))),
    (2, torch.zeros(3720, 3)),
    (5, torch.zeros(40, 12)),  # the weight of 40 symbols
    (7, torch.ones(2, 7, dtype=torch.long)),
    (8, torch.tensor([60000, 60000])),  # lengths beyond the frames; torch itself checks what indexes its tensors
]


@BACKENDS
def test_the_operators_refuse_what_does_not_belong_together(backend):
    case = problem(LARGE, dtype=torch.float32)
    for cells, kept, gradient in ((1, 0, True), (0, 0, True), (10**6, 7, False)):
        with pytest.raises(RuntimeError, match="cells|shape"):
            torch.ops.fused_transducer.losses(*of_operator(case, backend, cells, kept, gradient))
    given = of_operator(case, backend)
    _, arcs, kept = torch.ops.fused_transducer.losses(*given)
    for index, wrong in WRONG if backend == "native" else WRONG[:-1]:
        arguments = [torch.ones(2, dtype=torch.float64), arcs, kept, *given[: len(TENSORS) + 2], [True] * 4]
        arguments[index] = wrong
        with pytest.raises((RuntimeError, ValueError)):
            torch.ops.fused_transducer.gradients(*arguments)


GRAPHS = [
    ("inductor", {"backend": "native"}),  # it has no C++ to compile
    ("aot_eager", {"backend": "native", "dropout": 0.3, "dropout_seed": 9, "keep_bytes": 5_000}),
    ("aot_eager", {"backend": "native", "topology": "tdt", "utterance_of": torch.tensor([1, 1])}),
    ("aot_eager", {"backend": "torch", "topology": "modified", "nonfinite": "skip"}),
]


@pytest.mark.parametrize("compiler, options", GRAPHS, ids=str)
def test_compiled_as_one_graph(compiler, options):
    import torch._inductor.config as config

    case = lattice_problem(**{"topology": "regular", "lengths": [(9, 3), (7, 2)], **options})
    expected, leaves = right(case), case.leaves()
    with config.patch(compile_threads=1):  # a pool of processes takes longer to start
        losses = torch.compile(case.loss, fullgraph=True, backend=compiler)(leaves)
        losses.sum().backward()
    assert error(losses.detach(), expected[0]) < 1e-12
    assert all(error(leaf.grad, expected[1][name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


def test_a_compiled_graph_draws_a_seed_each_time_and_gives_posteriors():
    case = problem(RAGGED, H=40, dropout=0.5)
    compiled = torch.compile(lambda leaves: case.loss(leaves), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(case.leaves()), compiled(case.leaves()))
    case = problem(RAGGED)
    with torch.no_grad():
        posteriors = torch.compile(case.loss, fullgraph=True, backend="aot_eager")(case.tensors, return_posteriors=True)
        assert error(posteriors[1], case.loss(case.tensors, return_posteriors=True)[1]) < 1e-12


def test_compiled_with_other_lengths_and_bad_ones():
    case = problem([(9, 4), (9, 4)])
    compiled = torch.compile(partial(transducer_loss, reduction="none", **EXACT), fullgraph=True, backend="aot_eager")
    for lengths in ([9, 9], [3, 1]):
        case.T_lengths = torch.tensor(lengths)
        assert error(compiled(*case.leaves(), *integers(case)).detach(), right(case)[0]) < 1e-12
    with pytest.raises(ValueError, match="utterance 1"):
        compiled(*case.leaves(), case.targets, torch.tensor([9, 10]), case.U_lengths)
    raising = torch.compile(partial(transducer_loss, nonfinite="raise"), backend="aot_eager")
    assert raising(*case.leaves(), *integers(case)).isfinite()
    case.tensors[0][1, 0] = float("nan")
    with pytest.raises(ValueError, match="utterance 1.*frame 0 is nan"):
        raising(*case.leaves(), *integers(case))


@BACKENDS
@pytest.mark.filterwarnings("ignore")  # torch.jit is deprecated
def test_a_traced_graph_refuses_more_cells_than_it_was_traced_with(backend, monkeypatch):
    use(backend, monkeypatch)
    case, large = problem(RAGGED, dtype=torch.float32), problem(LARGE, dtype=torch.float32)
    given = [*case.leaves(), *integers(case)]
    traced = torch.jit.trace(lambda *tensors: transducer_loss(*tensors), given, check_trace=False)
    assert traced(*given).item() == pytest.approx(transducer_loss(*given).item())
    with pytest.raises(RuntimeError):
        traced(*large.leaves(), *integers(large))


def test_shapes_and_dtypes_on_the_meta_device():
    case = problem(RAGGED, dtype=torch.bfloat16)
    leaves = [tensor.to("meta").requires_grad_() for tensor in case.tensors]
    loss = transducer_loss(*leaves, *(x.to("meta") for x in integers(case)), backend="torch")
    loss.backward()
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert all((leaf.grad.shape, leaf.grad.dtype) == (leaf.shape, torch.bfloat16) for leaf in leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_theirs(dtype):
    case = problem(RAGGED, H=40, dtype=torch.float32, scale=0.5)
    expected = computed(Problem([tensor.to(dtype) for tensor in case.tensors], *integers(case)))
    leaves = case.leaves()
    with torch.autocast("cpu", dtype):
        losses = case.loss(leaves)
    losses.sum().backward()
    assert losses.dtype == torch.float32 and torch.equal(losses.detach(), expected[0])
    for name, leaf in zip(NAMES, leaves):
        assert leaf.grad.dtype == torch.float32 and error(leaf.grad, expected[1][name].float()) < 1e-6


def test_hooks_accumulation_a_retained_graph_and_no_second_derivative():
    case = problem(RAGGED)
    leaves, seen = case.leaves(), []
    leaves[2].register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
    losses = case.loss(leaves)
    losses.sum().backward(retain_graph=True)
    losses.sum().backward()
    assert len(seen) == 2 and error(seen[1], 2 * seen[0]) < 1e-12
    (gradient,) = torch.autograd.grad(case.loss(leaves).sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        gradient.square().sum().backward()


def test_checkpointing_keeps_the_mask():
    case, gradients = problem(RAGGED, H=40, dropout=0.3, **EXACT), []
    ways = [partial(checkpoint, use_reentrant=reentrant) for reentrant in (True, False)]
    for wrap in (lambda function, *given: function(*given), *ways):
        leaves = case.leaves()
        torch.manual_seed(3)
        wrap(lambda *given: case.loss(list(given)), *leaves).sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*gradients))


@BACKENDS
@pytest.mark.parametrize("changed", ["T_lengths", "U_lengths", "targets"])
def test_what_changes_after_forward_does_not_change_the_gradient(backend, changed):
    case = problem([(5, 4), (4, 2)], backend=backend, **EXACT)
    _, expected = right(case)
    leaves = case.leaves()
    losses = case.loss(leaves)
    getattr(case, changed).numpy()[:] = 1  # as a loader does that uses its buffer again: autograd does not see it
    losses.sum().backward()
    assert all(error(leaf.grad, expected[name]) < 1e-12 for name, leaf in zip(NAMES, leaves))


@BACKENDS
def test_functional_gradients_are_those_of_backward_and_forward_mode_is_refused(backend, monkeypatch):
    from torch.autograd import forward_ad

    use(backend, monkeypatch)
    case = problem(RAGGED)
    _, gradients = computed(case)
    made = torch.func.grad(lambda tensors: case.loss(tensors).sum())(case.tensors)
    assert all(torch.equal(x, gradients[name]) for name, x in zip(NAMES, made))
    tangents = tuple(torch.ones_like(x) for x in case.tensors)
    with pytest.raises(RuntimeError, match="forward-mode"):
        torch.func.jvp(lambda *tensors: case.loss(list(tensors)), tuple(case.tensors), tangents)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-mode"):
        case.loss([*case.tensors[:2], forward_ad.make_dual(case.tensors[2], tangents[2]), case.tensors[3]])


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_under_ddp_and_fsdp(tmp_path, request):
    """The gradient is what DDP's hook returns.  FSDP's module has its weight whole; a sharded one is refused."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    case = problem(RAGGED, dtype=torch.float32)
    inputs = (*case.tensors[:2], *integers(case))
    module = TransducerLoss(output=torch.nn.Linear(12, 11))
    expected = module(*inputs)
    expected.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()

    def hook(state, bucket):
        done = torch.futures.Future()
        done.set_result(2 * bucket.buffer())
        return done

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    request.addfinalizer(torch.distributed.destroy_process_group)
    ddp = DistributedDataParallel(module)
    ddp.register_comm_hook(None, hook)
    ddp(*inputs).backward()
    assert all(error(p.grad, 2 * gradients[name]) < 1e-6 for name, p in module.named_parameters())
    module.zero_grad()
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    loss = module(*inputs)
    loss.backward()
    sharded = module.output_linear
    assert loss.item() == pytest.approx(expected.item())
    assert error(sharded.weight.grad.full_tensor(), gradients["output_linear.weight"]) < 1e-6
    sharded._forward_pre_hooks.clear()
    module.reshard()
    with pytest.raises(ValueError, match="sharded"):
        transducer_loss(*case.tensors[:2], sharded.weight, None, *inputs[2:])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_module_is_its_joiner_and_drops_in_training_alone(activation):
    case = problem(RAGGED, blank=3, activation=activation, **EXACT)
    options = {"activation": activation, "dropout": 0.5, "blank": 3, "reduction": "none", **EXACT}
    module = TransducerLoss(12, 11, dtype=torch.float64, **options)
    assert set(module.state_dict()) == {"output_linear.weight", "output_linear.bias"} and activation in repr(module)
    inputs = (*case.tensors[:2], *integers(case))
    case.tensors[2:] = [module.output_linear.weight.detach(), module.output_linear.bias.detach()]
    dropped, whole = module(*inputs), module.eval()(*inputs)
    losses, expected = right(case)
    whole.sum().backward()
    assert error(whole.detach(), losses) < 1e-12 and (dropped - whole).abs().min() > 1e-6
    assert error(module.output_linear.weight.grad, expected["weight"]) < 1e-11
    logits = module.logits(case.tensors[0].unsqueeze(2), case.tensors[1].unsqueeze(1))
    assert error(logits.detach(), logits_of(case.tensors, activation)) < 1e-12
    aligned = align(*case.tensors, *integers(case), blank=3, activation=activation)
    assert all(torch.equal(a, b) for a, b in zip(module.align(*inputs), aligned))
    module.options["return_delay"] = True
    delay, behind = (module(*inputs, reference_frames=frames)[1] for frames in (None, torch.zeros_like(aligned[0]) + 2))
    assert torch.allclose(delay - 2, behind, equal_nan=True) and delay.isfinite().any()


def test_a_module_with_projections_is_icefalls_joiner():
    from rnnt_bench.losses import oracle

    module = TransducerLoss(8, 11, encoder_dim=6, decoder_dim=5, activation="relu", bias=False, blank=2)
    projections = {f"{name}_proj.{of}" for name in ("encoder", "decoder") for of in ("weight", "bias")}
    assert set(module.state_dict()) == {*projections, "output_linear.weight"}
    encoder_out, decoder_out = torch.randn(2, 7, 6), torch.randn(2, 4, 5)
    given = torch.randint(3, 11, (2, 3)), torch.tensor([7, 4]), torch.tensor([3, 2])
    logits = module.logits(encoder_out.unsqueeze(2), decoder_out.unsqueeze(1))
    loss = module(encoder_out, decoder_out, *given)
    loss.backward()
    assert loss.item() == pytest.approx(oracle.losses(logits, given[0], [(7, 3), (4, 2)], 2).mean().item(), rel=1e-6)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_modules_of_lattices_and_an_existing_tied_layer():
    embedding = torch.nn.Embedding(14, 12, dtype=torch.float64)
    layer = torch.nn.Linear(12, 14, bias=False, dtype=torch.float64)
    layer.weight = embedding.weight
    with pytest.raises(ValueError, match="output"):
        TransducerLoss(12, 11, output=layer)
    for topology, durations in (("multi-blank", (2, 3, 5)), ("tdt", (0, 1, 2))):
        options = {"topology": topology, "durations": durations, "sigma": 0.1}
        case = lattice_problem(lengths=[(9, 3), (7, 2)], bias=False, **options)
        case.tensors[2] = layer.weight.detach()
        module = TransducerLoss(output=layer, reduction="none", **EXACT, **options)
        layer.zero_grad()
        losses = module(*case.tensors[:2], *integers(case))
        losses.sum().backward()
        expected = right(case)
        assert error(losses.detach(), expected[0]) < 1e-12
        assert error(embedding.weight.grad, expected[1]["weight"]) < 1e-11
    assert TDTLoss(12, 11, durations=[0, 1, 2]).output_linear.weight.shape == (14, 12)


LAYER = torch.nn.Linear(12, 11, dtype=torch.float64)
OTHER = torch.nn.Linear(12, 11, dtype=torch.float64)
OTHER.forward = lambda x: 2 * x  # on the instance
SCALED = type("Scaled", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x})(12, 11)


def hooked(kind, hook=lambda *_: None, **options):
    layer = torch.nn.Linear(12, 11, dtype=torch.float64)
    getattr(layer, f"register_{kind}")(hook, **options)
    return layer


HOOKS = [
    *((kind, lambda *_: None) for kind in ("full_backward_hook", "full_backward_pre_hook")),
    ("forward_pre_hook", lambda layer, inputs: inputs[0] * 2),
    ("forward_hook", lambda layer, inputs, logits: logits * 2),
    ("forward_hook", lambda layer, inputs, logits: logits.mul_(2) and None),
    ("forward_hook", lambda layer, inputs, logits: print(logits.max())),  # there is no largest of no cells
]
NO_LAYER = {"weight": None, "bias": None}
TDT = {"topology": "tdt", "durations": [1]}
REFUSED = [
    ({"T_lengths": torch.tensor([9, 10, 8])}, ("utterance 1", "10", "9 frames")),
    ({"T_lengths": torch.tensor([9, 6, 0])}, ("utterance 2", "T_lengths is 0")),
    ({"U_lengths": torch.tensor([6, 5, 1])}, ("utterance 0", "U_lengths is 6")),
    ({"U_lengths": torch.tensor([4, -1, 1])}, ("utterance 1", "-1")),
    ({"targets": torch.tensor([[1] * 5, [1, 1, -3, 1, 1], [1] * 5])}, ("utterance 1", "target 2", "-3")),
    ({"targets": torch.full((3, 5), 10), **TDT}, ("utterance 0", "target 0", "the 10 symbols")),
    ({"targets": torch.ones(3, 4, dtype=torch.long)}, ("targets", "(3, 5)", "(3, 4)")),
    ({"targets": torch.ones(3, 5)}, ("targets", "integers")),
    ({"targets": [[1, 2]]}, ("targets", "list")),
    ({"weight": torch.zeros(11, 12, dtype=torch.float32)}, ("weight", "float32", "float64")),
    ({"weight": torch.zeros(11, 12).to_mkldnn()}, ("weight", "layout")),
    ({"weight": None}, ("weight", "missing")),
    ({"targets": torch.ones(3, 6, dtype=torch.long)}, ("decoder_out", "6 positions", "start")),
    ({"encoder_out": torch.zeros(3, 9, 6, 11), "targets": None}, ("torchaudio", "decoder_out (N, U+1, H)")),
    (
        {"encoder_out": torch.zeros(1).expand(3, 2**30, 12), "decoder_out": torch.zeros(1).expand(3, 2**33, 12)},
        ("cells",),
    ),
    ({"decoder_out": torch.nested.nested_tensor([torch.zeros(5, 12), torch.zeros(3, 12)])}, ("decoder_out", "nested")),
    ({"encoder_out": torch.zeros(0, 9, 12), "T_lengths": torch.zeros(0, dtype=torch.long)}, ("empty",)),
    ({"encoder_out": torch.zeros(3, 9, 12, dtype=torch.long)}, ("encoder_out", "int64")),
    ({"encoder_out": numpy.zeros((3, 9, 12))}, ("encoder_out", "ndarray")),
    ({"encoder_out": torch.zeros(9, 12)}, ("encoder_out", "(N, T, H)")),
    ({"decoder_out": torch.zeros(3, 6, 12, device="meta", dtype=torch.float64)}, ("decoder_out", "meta", "cpu")),
    *(
        ({"utterance_of": torch.tensor(value)}, words)
        for value, *words in (
            ([0, 1, 3], "row 2", "utterance_of is 3", "0 to 2"),
            ([0, -1, 0], "row 1", "utterance_of is -1"),
            ([0, 1], "decoder_out", "(2, 6, 12)"),
            ([], "utterance_of", "empty"),
            ([0.0, 1.0, 2.0], "utterance_of", "integers"),
            ([[0, 1, 2]], "utterance_of", "(M)"),
        )
    ),
    ({"utterance_of": torch.tensor([2, 1, 0]), "U_lengths": torch.tensor([4, 6, 1])}, ("row 1", "U_lengths is 6")),
    ({"utterance_of": [0, 1, 2]}, ("utterance_of", "list")),
    ({"blank": 11}, ("blank", "11")),
    *(({"blank": value}, ("blank",)) for value in (-12, 1.0, True, torch.tensor(0), None)),
    ({"blank": -1}, ("blank=10",)),
    ({**TDT, "blank": -1}, ("blank=9",)),
    *(({"clamp": value}, ("clamp",)) for value in (None, float("nan"), "1")),
    ({"activation": "mish"}, ("activation", "mish")),
    ({"reduction": "average"}, ("reduction", "average")),
    *(({name: -1}, (name,)) for name in ("negligible", "fastemit_lambda", "delay_penalty", "keep_bytes")),
    *(({"fastemit_lambda": value}, ("fastemit_lambda",)) for value in (float("nan"), True, "1", None)),
    *(({"tile_cells": value}, ("tile_cells",)) for value in (1.5, 2**63)),
    *(({"nonfinite": value}, ("nonfinite", "skip")) for value in ("drop", None, True)),
    ({"return_skipped": True}, ("return_skipped", "skip")),
    ({"reference_frames": torch.zeros(3, 5)}, ("reference_frames", "return_delay")),
    ({"reference_frames": torch.zeros(3, 4), "return_delay": True}, ("reference_frames", "(3, 5)")),
    ({"reference_frames": [[0]], "return_delay": True}, ("reference_frames", "list")),
    *(({name: 1}, (name, "below 1")) for name in ("dropout", "label_smoothing")),
    ({"dropout": 0.1, "dropout_seed": 1.5}, ("dropout_seed", "1.5")),
    ({"dropout": 0.1, "dropout_seed": torch.tensor(1, dtype=torch.int32)}, ("dropout_seed", "int32")),
    ({"backend": "opencl"}, ("backend", "opencl", "native")),
    ({"backend": "triton"}, ("triton", "CUDA")),
    ({"topology": "rnnt"}, ("topology",)),
    *(({"topology": name}, ("durations",)) for name in ("tdt", "multi-blank")),
    ({"durations": [1, 2]}, ("durations",)),
    *(({**TDT, "durations": value}, ("durations",)) for value in ([0], [1, -1], [1, 2.0], "0,1", list(range(11)))),
    ({"topology": "multi-blank", "durations": [0, 2]}, ("durations",)),
    ({"topology": "hat", "sigma": 0.1}, ("sigma",)),
    ({**TDT, "sigma": float("nan")}, ("sigma",)),
    ({**TDT, "label_smoothing": 0.1}, ("label_smoothing",)),
    ({**TDT, "blank": 10}, ("blank",)),
    ({"topology": "constrained", "fastemit_lambda": 0.1, "return_posteriors": True}, ("return_posteriors",)),
    ({"output": LAYER}, ("either",)),
    *(({"output": hooked(*hook), **NO_LAYER}, ("hook", "weight=")) for hook in HOOKS),
    ({"output": torch.nn.ReLU(), **NO_LAYER}, ("ReLU",)),
    ({"output": OTHER, **NO_LAYER}, ("own forward",)),
    (
        {"output": type("Scaled", (torch.nn.Linear,), {"forward": lambda self, x: 2 * x})(12, 11), **NO_LAYER},
        ("Scaled",),
    ),
]


@pytest.mark.parametrize("change, words", REFUSED, ids=str)
def test_every_bad_argument_is_one_clear_error(change, words):
    case = problem(RAGGED)
    given = dict(zip(NAMES, case.leaves()), targets=case.targets, T_lengths=case.T_lengths, U_lengths=case.U_lengths)
    with pytest.raises(ValueError) as refused:
        transducer_loss(**{**given, **change})
    assert all(word in str(refused.value) for word in words) and "\n" not in str(refused.value)


def test_hooks_that_only_look_see_no_cells():
    """FlopCounterMode and torch.distributed's trackers hook all modules, torchinfo the layer."""
    from torch.utils.flop_counter import FlopCounterMode

    case, shapes = problem(RAGGED), []

    def look(*arguments):
        shapes.append([tuple(x[0].shape if isinstance(x, tuple) else x.shape) for x in arguments[1:] if not x == {}])

    module = TransducerLoss(12, 11, dtype=torch.float64)
    inputs = (*case.tensors[:2], *integers(case))
    expected = module(*inputs)
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.modules.module.register_module_forward_hook(lambda *_: None),
    ):
        assert module(*inputs) == expected and counter.get_total_flops() > 0
    layers._warn_of_hooks.cache_clear()
    for kind in ("forward_pre_hook", "forward_hook"):
        for with_kwargs in (False, True):
            getattr(module.output_linear, f"register_{kind}")(look, with_kwargs=with_kwargs)
    with pytest.warns(UserWarning, match="hooks") as given:
        assert [module(*inputs) for _ in range(2)] == [expected] * 2
    assert len(given) == 1 and shapes[:4] == [[(0, 12)]] * 2 + [[(0, 12), (0, 11)]] * 2
    layers._warn_of_hooks.cache_clear()
    with torch.inference_mode(), pytest.warns(UserWarning, match="hooks") as given:
        assert transducer_loss(*inputs[:2], None, None, *inputs[2:], output=module.output_linear) == expected
    assert given[0].filename == __file__


def test_a_hook_that_makes_the_weight_is_called():
    """torch.nn.utils.spectral_norm sets the weight where the layer is called."""
    layer = torch.nn.utils.spectral_norm(torch.nn.Linear(12, 11)).eval()
    case = problem(RAGGED, dtype=torch.float32)
    with torch.no_grad():
        layer.weight_orig.mul_(3)
        layer(torch.zeros(12))
        expected = transducer_loss(*case.tensors[:2], layer.weight, layer.bias, *integers(case))
        layer.weight = torch.zeros(11, 12)
    assert transducer_loss(*case.tensors[:2], None, None, *integers(case), output=layer).item() == expected.item()


def test_alignments_do_not_depend_on_the_default_device():
    case = problem(RAGGED)
    given = (*case.tensors, *integers(case))
    expected = align(*given)
    with torch.device("meta"):
        made = align(*given), align(*given, backend="torch")
    assert all(torch.equal(frames, expected[0]) for frames, _ in made)


def test_what_looks_odd_and_is_allowed():
    case = problem(RAGGED, **EXACT)
    expected = right(case)
    case.targets[2, 1:] = 10_000
    options = {"clamp": -1.0, "blank": numpy.int64(0), "tile_cells": numpy.int32(8), "negligible": numpy.float32(0)}
    assert max(errors(case.with_options(**options), expected).values()) < 1e-12
    named = dict(zip(("targets", "T_lengths", "U_lengths"), integers(case)))
    named.update(reduction="none", **EXACT)
    made = transducer_loss(*case.tensors[:2], output=LAYER, **named)
    assert torch.equal(made, transducer_loss(*case.tensors[:2], LAYER.weight, LAYER.bias, **named))


@pytest.mark.parametrize(
    "options, word", [({"blank": 11}, "11"), ({"fastemit": 1}, "fastemit_lambda"), ({"vocab_size": 0}, "vocab_size")]
)
def test_a_module_checks_its_options_when_it_is_made(options, word):
    with pytest.raises((ValueError, TypeError), match=word):
        TransducerLoss(**{"joiner_dim": 8, "vocab_size": 11, **options})


def test_without_a_compiler_the_plain_code_runs_and_says_so_once(monkeypatch):
    monkeypatch.delenv("FUSED_TRANSDUCER_BACKEND", raising=False)
    monkeypatch.setattr(native, "_library", lambda: (None, "no such compiler"))
    call._warn_of_torch.cache_clear()
    with pytest.warns(UserWarning) as given:
        assert [call.backend_of("cpu", torch.float32) for _ in range(2)] == ["torch", "torch"]
        assert max(errors(problem(RAGGED, **EXACT)).values()) < 1e-12
    assert ["no such compiler" in str(warning.message) for warning in given] == [True]
