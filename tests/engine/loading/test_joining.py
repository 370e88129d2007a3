"""Products of the same input as one: what is joined, what it yields, and what is left alone."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel

from engine.api.offline import LoadedModel
from engine.config import LoadConfig
from engine.errors import ModelRefusedError
from engine.loading import joining
from engine.loading.joined import WEIGHT, is_exchanged, joined_forward
from engine.loading.joining import JoiningReport, join_products
from engine.loading.loader import load_model, verify_model
from engine.runner.runner_options import StepPath
from tests.engine.runner.fake_graphs import RecordingBackend
from tests.engine.runner.steps import build_verified, make_core, make_request, run, tokens_of
from tests.families import EVERY_FAMILY
from tests.model_recipes import RECIPES, VOCAB
from tests.tiny_models import FAMILIES, WINDOW, greedy_reference, make_model, make_prompts

# Family: attentions and gated layers that are joined, of 3 layers (gemma3, gemma4: 6; smollm3: 4).
JOINED = {
    "deepseek_v3": (0, 1),  # latent attention; the shared experts are as wide as their input
    "exaone4": (3, 3),
    "gemma": (3, 3),
    "gemma2": (3, 3),
    "gemma3": (6, 6),
    "gemma4": (4, 6),  # two layers have no keys and values of their own
    "gpt2": (0, 0),  # one product already
    "gpt_oss": (3, 0),
    "granite": (3, 3),
    "llama": (3, 3),
    "mistral": (3, 3),
    "mixtral": (3, 0),
    "olmo2": (3, 3),
    "opt": (3, 0),
    "phi": (3, 0),
    "phi3": (0, 0),  # one product already
    "qwen2": (3, 3),
    "qwen3": (3, 3),
    "smollm3": (4, 4),
}
LENGTHS = (1, 2, 31, WINDOW + 40, 100)
NEW = 8


def _model(
    family: str = "qwen2", dtype: torch.dtype = torch.float32, **settings: object
) -> PreTrainedModel:
    model = make_model(FAMILIES[family](**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases are all 0, and norms all 1, where nothing was learnt
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.arange(3, 40).unsqueeze(0)).logits
    return logits.double()


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def _joined(model: nn.Module) -> list[nn.Module]:
    return [
        one
        for one in model.modules()
        if is_exchanged(one) and getattr(one.forward, "__func__", None) is joined_forward
    ]


def _held(model: nn.Module) -> int:
    """Bytes of all that a model holds."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(one.nbytes() for one in storages.values())


# ---- models ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", sorted(JOINED))
def test_a_model_yields_what_it_did(family: str, dtype: torch.dtype) -> None:
    model = _model(family, dtype)
    expected, held = _logits(model), _held(model)
    report = join_products(model)
    assert (report.attentions, report.gates) == JOINED[family]
    assert len(_joined(model)) == sum(JOINED[family])
    assert _difference(_logits(model), expected) < (1e-5 if dtype == torch.float32 else 3e-2)
    assert _held(model) <= held + 4096, "zeros for the biases that some layers do not have"
    assert join_products(model) == report, "a second time, nothing changes"


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_every_family_passes_the_gate(family: str) -> None:
    if not RECIPES[family].is_known:
        pytest.skip("this version of transformers does not know it")
    lines: list[str] = []
    verify_model(make_model(FAMILIES[family]()), Path(), lines.append, join=True)
    assert any(line.startswith("joined: ") for line in lines)


def _generate(verified: Any, **options: Any) -> tuple[list[list[int]], Any]:
    built = build_verified(
        verified, max_batch_tokens=40, max_requests_per_batch=6, use_cuda_graph=(True, True),
        q_padding_interval_size=8, kv_padding_interval_size=48, **options,
    )  # fmt: skip
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(make_prompts(LENGTHS))]
    outputs = run(make_core(built), requests)
    return [tokens_of(outputs[request.request_id]) for request in requests], built


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama", "mixtral", "qwen2", "qwen3"])
def test_captured_steps_equal_generate(family: str) -> None:
    """With everything in a graph that is replayed: nothing of a product is kept in Python."""
    reference = [greedy_reference(_model(family), p, NEW) for p in make_prompts(LENGTHS)]
    verified = verify_model(_model(family), Path(), lambda line: None, "torch", join=True)
    tokens, built = _generate(verified, graphs=RecordingBackend())
    assert tokens == reference
    assert {kind.path for kind in built.runner.steps if kind.is_replayed} == set(StepPath)


@pytest.mark.parametrize("family", ["gemma2", pytest.param("qwen2", marks=pytest.mark.slow)])
def test_compiled_it_is_one_graph(family: str) -> None:
    """Whole, without a break; no projection is computed beside the product of all."""
    torch.compiler.reset()
    operations: list[str] = []

    def note(module: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        operations.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    config = FAMILIES[family]()
    config.num_hidden_layers = 2
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    model = make_model(config)
    reference = [greedy_reference(model, prompt, NEW) for prompt in make_prompts((1, 31))]
    verified = verify_model(model, Path(), lambda line: None, join=True)
    compiled = CompileConfig(fullgraph=True, dynamic=True, backend=note)
    built = build_verified(verified, varlen_compile_config=compiled, decode_compile_config=compiled)
    requests = [make_request(str(i), p, NEW) for i, p in enumerate(make_prompts((1, 31)))]
    outputs = run(make_core(built), requests)
    assert [tokens_of(outputs[request.request_id]) for request in requests] == reference
    torch.compiler.reset()
    # A layer: q, k, v; o; gate, up; down. And the output layer, once for each graph.
    products = [name for name in operations if "linear" in name]
    assert len(products) % (2 * 4 + 1) == 0
    assert products


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own
def test_inductor_takes_it() -> None:
    torch.compiler.reset()
    config = FAMILIES["qwen2"]()
    config.num_hidden_layers = 1
    model = make_model(config)
    expected = _logits(model)
    join_products(model)
    compiled = torch.compile(model, fullgraph=True)
    assert _difference(_logits(compiled), expected) < 1e-5
    torch.compiler.reset()


# ---- weights -----------------------------------------------------------------------------------


def test_weights_are_views_and_nothing_is_held_twice() -> None:
    model = _model()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    join_products(model)
    after = model.state_dict()
    assert list(after) == list(before), "what is joined is no weight of its own"
    assert all(torch.equal(after[name], one) for name, one in before.items())
    attention: Any = model.model.layers[1].self_attn
    joined = attention._buffers[WEIGHT]
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = attention.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        assert weight.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    with torch.no_grad():
        attention.v_proj.weight.zero_()
    assert not joined[-len(attention.v_proj.weight) :].any(), "what changes one changes both"


def test_while_joining_no_more_than_one_module_is_held_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _model()
    originals = {
        name: StorageWeakRef(one.untyped_storage())
        for name, one in model.named_parameters()
        if name.endswith(("q_proj.weight", "k_proj.bias", "up_proj.weight"))
    }
    assert len(originals) == 9
    alive: list[int] = []
    join = joining._join

    def counted(*arguments: Any) -> None:
        join(*arguments)
        gc.collect()
        alive.append(sum(not one.expired() for one in originals.values()))

    monkeypatch.setattr(joining, "_join", counted)
    join_products(model)
    # An attention has two of these, the gated layer behind it one.
    assert alive == [7, 6, 4, 3, 1, 0]


def test_it_is_saved_and_loaded_as_before(tmp_path: Path) -> None:
    model = _model(tie_word_embeddings=True)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    join_products(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert list(again.state_dict()) == list(before)
    assert all(torch.equal(again.state_dict()[name], one) for name, one in before.items())
    # And what is loaded into it is what it computes with.
    other = _model(tie_word_embeddings=True)
    with torch.no_grad():
        other.model.layers[0].self_attn.k_proj.weight.mul_(-1.0)
    model.load_state_dict(other.state_dict())
    assert _difference(_logits(model), _logits(other)) < 1e-5


def test_a_copy_computes_with_its_own_weights() -> None:
    model = _model()
    join_products(model)
    expected = _logits(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.zero_()
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    assert _difference(_logits(model), expected) > 0.01
    assert torch.equal(_logits(other), expected)
    with torch.no_grad():
        other.model.layers[0].mlp.gate_proj.weight.zero_()
    assert _difference(_logits(other), expected) > 0.01, "it is the weight that it computes with"


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.float64).to(torch.float32),
        lambda layer: setattr(layer.self_attn.k_proj, "weight", nn.Parameter(torch.zeros(32, 64))),
        lambda layer: setattr(layer.self_attn.k_proj.bias, "data", torch.zeros(32)),
        lambda layer: setattr(layer.self_attn, "v_proj", nn.Linear(64, 32)),
        lambda layer: layer.mlp.up_proj.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
        lambda layer: layer.mlp.gate_proj.register_forward_hook(lambda _, x, y: y + x[0].sum()),
    ],
)
def test_what_is_changed_later_counts(change: Callable[[Any], object]) -> None:
    plain, joined = _model(), _model()
    join_products(joined)
    for model in (plain, joined):
        torch.manual_seed(1)
        change(model.model.layers[1])
    assert _difference(_logits(joined), _logits(plain)) < 1e-5


def test_generate_and_gradients() -> None:
    plain, model = _model(), _model()
    join_products(model)
    for prompt in make_prompts((1, 40)):
        assert greedy_reference(model, prompt, NEW) == greedy_reference(plain, prompt, NEW)
    ids = torch.arange(3, 20).unsqueeze(0)
    for one in (plain, model):
        one(input_ids=ids, labels=ids).loss.backward()
    for (name, expected), (_, actual) in zip(
        plain.named_parameters(), model.named_parameters(), strict=True
    ):
        assert actual.grad is not None, name
        torch.testing.assert_close(actual.grad, expected.grad)


def test_a_projection_called_by_itself_computes_its_own_product() -> None:
    model = _model()
    x = torch.randn(2, 5, model.config.hidden_size)
    attention: Any = model.model.layers[0].self_attn
    with torch.inference_mode():
        expected = attention.k_proj(x)
        join_products(model)
        torch.testing.assert_close(attention.k_proj(x), expected)


# ---- modules -----------------------------------------------------------------------------------


class _Mlp(nn.Module):
    def __init__(self, inputs: int = 32) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(inputs, 64)
        self.up_proj = nn.Linear(inputs, 64, bias=False)
        self.down_proj = nn.Linear(64, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down_proj(self.gate_proj(x).sigmoid() * self.up_proj(x))
        return y


class _Residual(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class _Scaled(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.shape[-1]


class _Measuring(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.abs().amax(-1, keepdim=True) * 1e-9


class _Clipped(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.clamp(max=1e9))


class _Twice(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.gate_proj(x) + self.up_proj(x))  # type: ignore[no-any-return]


class _Unused(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x))  # type: ignore[no-any-return]


class _Direct(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = nn.functional.linear(x, self.up_proj.weight)
        return self.down_proj(self.gate_proj(x) * up)  # type: ignore[no-any-return]


class _Branching(_Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y if x.shape[-1] == 32 else y.clamp(max=1e9)


class _Wide(_Mlp):
    """As wide as both its projections are: a projection could not tell input from product."""

    def __init__(self) -> None:
        super().__init__(128)


class _OwnLinear(nn.Linear):
    pass


def _of_own_linears() -> _Mlp:
    mlp = _Mlp()
    mlp.up_proj = _OwnLinear(32, 64)
    return mlp


def _hooked() -> _Mlp:
    mlp = _Mlp()
    mlp.up_proj.register_forward_hook(lambda module, arguments, output: output * 2)
    return mlp


def _of_two_types() -> _Mlp:
    mlp = _Mlp()
    mlp.gate_proj.bias = nn.Parameter(torch.randn(64, dtype=torch.float64), requires_grad=False)
    return mlp


def _sharing() -> _Mlp:
    mlp = _Mlp()
    mlp.up_proj.weight = mlp.gate_proj.weight
    return mlp


def _with_a_parameter_more() -> _Mlp:
    mlp = _Mlp()
    mlp.up_proj.lora = nn.Parameter(torch.zeros(1))
    return mlp


def _parametrized() -> _Mlp:
    mlp = _Mlp()
    parametrize.register_parametrization(mlp.up_proj, "weight", nn.Identity())
    return mlp


def _with_another_forward() -> _Mlp:
    mlp = _Mlp()
    mlp.up_proj.forward = lambda x: nn.Linear.forward(mlp.up_proj, x) * 2  # type: ignore[method-assign]
    return mlp


def _with_its_own_forward() -> _Mlp:
    mlp = _Mlp()
    mlp.forward = lambda x: _Mlp.forward(mlp, x) * 2  # type: ignore[method-assign]
    return mlp


class _Model(nn.Module):
    """As much of a model as `join_products` asks for."""

    device = torch.device("cpu")

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, getattr(mlp, "gate_proj").in_features)  # noqa: B009
        self.mlp = mlp

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.embedding(input_ids))
        return y


def test_a_module_is_joined() -> None:
    model = _Model(_Mlp()).eval()
    x = torch.randn(2, 3, 32)
    with torch.no_grad():
        expected = model.mlp(x)
        assert join_products(model) == JoiningReport(0, 1, ())  # type: ignore[arg-type]
        torch.testing.assert_close(model.mlp(x), expected)
        torch.testing.assert_close(model.mlp(x=x), expected)


@pytest.mark.parametrize(
    "make",
    [
        _Residual,
        _Scaled,
        _Measuring,
        _Clipped,
        _Twice,
        _Unused,
        _Direct,
        _Branching,
        _Wide,
        _of_own_linears,
        _hooked,
        _of_two_types,
        _sharing,
        _with_a_parameter_more,
        _parametrized,
        _with_another_forward,
        _with_its_own_forward,
    ],
)
def test_modules_that_are_left_alone(make: Callable[[], nn.Module]) -> None:
    model = _Model(make()).eval()
    x = torch.randn(2, 3, model.embedding.embedding_dim)
    own = set(model.mlp.__dict__)
    forwards = [one.__dict__.get("forward") for one in model.modules()]
    with torch.no_grad():
        expected = _outcome(model.mlp, x)
        name = type(model.mlp).__name__
        report = join_products(model)  # type: ignore[arg-type]
        if not is_exchanged(model.mlp):
            assert report == JoiningReport(0, 0, (name,))
        assert WEIGHT not in model.mlp._buffers
        assert _outcome(model.mlp, x) == expected
    assert [one.__dict__.get("forward") for one in model.modules()] == forwards
    assert set(model.mlp.__dict__) == own


def _outcome(module: nn.Module, x: torch.Tensor) -> Any:
    try:
        return module(x).tolist()
    except RuntimeError as error:
        return str(error)


def test_a_module_in_training_is_left_alone() -> None:
    assert not join_products(_Model(_Mlp()).train()).gates  # type: ignore[arg-type]


def test_a_wrong_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return joined(module, x).roll(1, -1)

    joined = joining.product
    monkeypatch.setattr(joining, "product", wrong)
    with pytest.raises(ModelRefusedError, match=r"_Mlp: the product of gate_proj, up_proj tog"):
        join_products(_Model(_Mlp()).eval())  # type: ignore[arg-type]


def test_weights_that_are_not_numbers() -> None:
    """A checkpoint's NaN is the gate's affair: joining moves it."""
    model = _Model(_Mlp()).eval()
    with torch.no_grad():
        model.mlp.get_submodule("up_proj").weight[3, 4] = float("nan")
        report = join_products(model)  # type: ignore[arg-type]
    assert report.gates == 1
    assert model.mlp.get_submodule("up_proj").weight[3, 4].isnan()


# ---- loading -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2")
    _model().save_pretrained(path)
    return path


def test_a_model_from_disk(saved: Path) -> None:
    prompts = make_prompts(LENGTHS)
    reference = [greedy_reference(_model(), prompt, NEW) for prompt in prompts]
    lines: list[str] = []
    model = AutoModelForCausalLM.from_pretrained(saved).eval()
    verified = verify_model(model, saved, lines.append, join=True)
    assert len(_joined(verified.model)) == 6
    assert not _joined(model), "its owner's modules stay as they are"
    joined = [line for line in lines if line.startswith("joined: ")]
    assert joined == [
        "joined: queries, keys and values of 3 attentions and both halves of 3 gated layers are "
        "one product each"
    ]
    outputs = LoadedModel(verified).generate_batch(prompts, max_new_tokens=NEW, progress_bar=False)
    assert [outputs[f"req_{i}"].generated_tokens for i in range(len(prompts))] == reference
    verified = load_model(str(saved), LoadConfig(threads=1), lines.append)
    assert not _joined(verified.model), "not on a CPU"


def test_the_report() -> None:
    assert str(JoiningReport(2, 1, ("A", "B"))).endswith("each; left as they are: A, B")
