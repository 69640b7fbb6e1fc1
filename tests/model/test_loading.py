"""Which models are taken, which are refused, and what is read from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from pcr_core import Engine, EngineConfig, SamplingParams
from pcr_core.errors import ConfigError, ModelError, UnsupportedModelError
from pcr_core.index.chunk import LayerShape
from pcr_core.model.loading import context_window, load

CONFIG = EngineConfig()
COMMON = {
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 258,
}

pytestmark = [
    # Models whose fast kernels are not installed say so.
    pytest.mark.filterwarnings("ignore:.*fast path.*"),
]


def build(name: str, **fields: Any) -> Any:
    """A tiny random model of an architecture, or a skip where there is none."""
    kind = getattr(transformers, name, None)
    if kind is None:
        pytest.skip(f"this transformers has no {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = kind(**{**COMMON, **fields})
        return transformers.AutoModelForCausalLM.from_config(config).eval()


# --- refused ---

RECURRENT = [
    ("MambaConfig", {"state_size": 4}, "Mamba"),
    (
        "Mamba2Config",
        {"state_size": 4, "num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
        "Mamba2",
    ),
    (
        "JambaConfig",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
        r"0 \(\w+\), 2 \(\w+\)",
    ),
    (
        "Qwen3NextConfig",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "head_dim": 16,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        r"0 \(linear_attention\), 2 \(linear_attention\)",
    ),
    ("RecurrentGemmaConfig", {"head_dim": 16, "lru_width": 64}, r"0 \(\w+\), 1 \("),
    (
        "BambaConfig",
        {"attn_layer_indices": [1], "mamba_n_heads": 8},
        r"0 \(\w+\), 2 \(",
    ),
]


@pytest.mark.parametrize(
    ("name", "fields", "says"), RECURRENT, ids=[name for name, *_ in RECURRENT]
)
def test_recurrent_models_are_refused(
    tiny_tokenizer: Any, name: str, fields: dict[str, Any], says: str
) -> None:
    model = build(name, **fields)
    with pytest.raises(UnsupportedModelError, match=says) as caught:
        load(CONFIG, model, tiny_tokenizer)
    assert type(model).__name__ in str(caught.value)


def test_an_encoder_decoder_is_refused(tiny_tokenizer: Any) -> None:
    model = SimpleNamespace(
        config=SimpleNamespace(
            _name_or_path="",
            is_encoder_decoder=True,
            get_text_config=lambda: SimpleNamespace(),
        ),
        eval=lambda: None,
    )
    with pytest.raises(UnsupportedModelError, match="decoder-only"):
        load(CONFIG, model, tiny_tokenizer)


def test_attention_that_sdpa_cannot_do_is_refused(
    tiny_tokenizer: Any, tmp_path: Path
) -> None:
    model = build("Gemma2Config", head_dim=16, query_pre_attn_scalar=16)
    assert model.config.attn_logit_softcapping
    with pytest.raises(UnsupportedModelError, match="softcap"):
        Engine(EngineConfig(cache_dir=tmp_path), model=model, tokenizer=tiny_tokenizer)
    assert model.config._attn_implementation != "pcr"


def test_another_dtype_is_refused(tiny_llama: Any, tiny_tokenizer: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"float64.*float32"):
        load(CONFIG, tiny_llama.double(), tiny_tokenizer)


def test_a_tokenizer_must_come_with_a_model(tiny_llama: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer="):
        load(CONFIG, tiny_llama)


# --- taken ---

MLA = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "first_k_dense_replace": 4,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}
TAKEN = [
    ("LlamaConfig", {"num_hidden_layers": 1}, LayerShape(2, 16, 16)),
    ("Qwen3Config", {"head_dim": 24}, LayerShape(2, 24, 24)),
    ("PhiConfig", {"num_key_value_heads": 4}, LayerShape(4, 16, 16)),
    ("GPTNeoXConfig", {}, LayerShape(4, 16, 16)),
    ("GPT2Config", {"n_head": 4, "n_embd": 64, "n_layer": 2}, LayerShape(4, 16, 16)),
    ("DeepseekV3Config", MLA, None),
]


@pytest.mark.parametrize(
    ("name", "fields", "shape"), TAKEN, ids=[name for name, *_ in TAKEN]
)
def test_shapes_are_read_from_a_forward_and_reuse_is_exact(
    tiny_tokenizer: Any,
    tmp_path: Path,
    name: str,
    fields: dict[str, Any],
    shape: LayerShape | None,
) -> None:
    model = build(name, **fields)
    loaded = load(CONFIG, model, tiny_tokenizer)
    if shape is not None:
        assert set(loaded.shapes) == {shape}
    else:
        # Latent attention: keys and values have different head sizes.
        assert all(layer.k_dim != layer.v_dim for layer in loaded.shapes)
    assert len(loaded.shapes) == model.config.num_hidden_layers
    config = EngineConfig(
        cache_dir=tmp_path,
        chunk_tokens=16,
        exact=True,
        dram_bytes="4MiB",
        ssd_bytes="8MiB",
        resident_rows=0,
    )
    prompt = [token % 250 for token in range(100)]
    params = SamplingParams(max_tokens=4, logprobs=True)
    answers = []
    for _ in range(2):
        with Engine(config, model=model, tokenizer=tiny_tokenizer) as engine:
            answers += [engine.generate(prompt, params) for _ in range(2)]
    assert [answer.usage.cached_by_tier for answer in answers] == [
        {},
        {"dram": 96},
        {"ssd": 96},
        {"dram": 96},
    ]
    assert {tuple(answer.token_ids) for answer in answers} == {
        tuple(answers[0].token_ids)
    }
    assert {tuple(answer.logprobs or ()) for answer in answers} == {
        tuple(answers[0].logprobs or ())
    }
    with torch.inference_mode():
        stock = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert answers[0].logprobs is not None
    assert answers[0].logprobs[0] == pytest.approx(float(stock.max()), abs=1e-3)


def test_a_mixed_model_keeps_its_sliding_layers_whole(
    make_tiny_model: Callable[..., Any], tiny_tokenizer: Any
) -> None:
    loaded = load(CONFIG, make_tiny_model("gemma3"), tiny_tokenizer)
    assert loaded.shapes == (LayerShape(2, 16, 16),) * 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(tiny_llama: Any, tiny_tokenizer: Any, dtype: str) -> None:
    loaded = load(CONFIG, tiny_llama.to(getattr(torch, dtype)), tiny_tokenizer)
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    assert loaded.safetensors_dtype == names[dtype]
    assert loaded.vocabulary == 264


# --- from a path ---


def test_a_local_folder(tiny_llama_dir: Path, tiny_llama: Any) -> None:
    loaded = load(EngineConfig(model=str(tiny_llama_dir)))
    assert loaded.name == tiny_llama_dir.name
    assert (loaded.dtype, loaded.context_window) == (torch.float32, 2048)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        assert torch.equal(loaded.model(ids).logits, tiny_llama(ids).logits)
    half = load(EngineConfig(model=str(tiny_llama_dir), dtype="bfloat16"))
    assert half.dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing/at-all"])
def test_a_missing_folder(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        load(EngineConfig(model=name))


def test_a_missing_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        load(EngineConfig(model=str(tmp_path / "model.gguf")))


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ConfigError, match=r"no config\.json; give the folder"):
        load(EngineConfig(model=str(tmp_path)))


def test_a_folder_with_a_broken_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load"):
        load(EngineConfig(model=str(tmp_path)))


def test_a_hub_id_without_a_network() -> None:
    with pytest.raises(ModelError, match=r"cannot load .*nobody/nothing"):
        load(EngineConfig(model="nobody/nothing"))


def test_a_folder_without_a_tokenizer(tmp_path: Path, tiny_llama: Any) -> None:
    """Refused by transformers 5.24; before, it made up a tokenizer of 8 tokens."""
    tiny_llama.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"cannot load|not this model's"):
        load(EngineConfig(model=str(tmp_path)))


def test_a_damaged_model(tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any) -> None:
    tiny_llama.save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ModelError, match="cannot load"):
        load(EngineConfig(model=str(tmp_path)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device(tiny_llama_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"no CUDA device.*cpu"):
        load(EngineConfig(model=str(tiny_llama_dir), device="cuda"))


# --- context windows ---


def _config(**fields: Any) -> Any:
    text = SimpleNamespace(**fields)
    return SimpleNamespace(get_text_config=lambda: text)


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"max_position_embeddings": 300}, 300),
        ({"n_positions": 100}, 100),
        ({"max_position_embeddings": 300, "rope_parameters": None}, 300),
        (
            {
                "max_position_embeddings": 300,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            300,
        ),
        # Frequencies that change with the sequence's length: not beyond where they do.
        (
            {
                "max_position_embeddings": 300,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 64,
                },
            },
            64,
        ),
        (
            {
                "max_position_embeddings": 300,
                "rope_parameters": {
                    "full_attention": {"rope_type": "default"},
                    "sliding_attention": {"rope_type": "dynamic"},
                },
                "original_max_position_embeddings": 128,
            },
            128,
        ),
        (
            {
                "max_position_embeddings": 300,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "original_max_position_embeddings": 64,
                },
            },
            300,
        ),
        ({}, 77),
    ],
)
def test_context_windows(fields: dict[str, Any], window: int) -> None:
    tokenizer = SimpleNamespace(model_max_length=77)
    assert context_window(_config(**fields), tokenizer) == window


def test_an_unbounded_tokenizer_gives_a_bounded_window() -> None:
    tokenizer = SimpleNamespace(model_max_length=int(1e30))
    assert 0 < context_window(_config(), tokenizer) <= 1 << 20
