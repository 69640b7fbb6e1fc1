"""The shared models and tokenizer are what the tests that use them take them for."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("kind", ["llama", "mistral_sliding", "gemma3", "qwen2"])
def test_tiny_models_are_reproducible_and_run(make_tiny_model, kind):
    ids = torch.arange(48)[None]
    with torch.inference_mode():
        first, second = (make_tiny_model(kind)(ids).logits for _ in range(2))
        other = make_tiny_model(kind, seed=1)(ids).logits
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert first.isfinite().all()


@pytest.mark.parametrize("kind", ["mistral_sliding"])
def test_the_window_hides_what_is_behind_it(make_tiny_model, kind):
    model = make_tiny_model(kind)
    model.config.num_hidden_layers = 1
    del model.model.layers[1:]
    ids = torch.arange(48)[None]
    changed = ids.clone()
    changed[0, 0] = 99
    with torch.inference_mode():
        a, b = model(ids).logits, model(changed).logits
    assert not torch.equal(a[0, 23], b[0, 23])
    assert torch.equal(a[0, 24:], b[0, 24:])


def test_the_tokenizer_is_bytes_with_one_bos(tiny_tokenizer):
    text = "naïve <|im_end|> ✓\n"
    ids = tiny_tokenizer(text).input_ids
    assert ids[0] == tiny_tokenizer.bos_token_id == 256
    assert len(ids) == 1 + len(text.replace("<|im_end|>", "").encode()) + 1
    assert tiny_tokenizer.decode(ids[1:]) == text
    assert max(ids) == tiny_tokenizer.eos_token_id == 258


def test_the_chat_template_has_its_own_bos(tiny_tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    text = tiny_tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert text == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_folder_loads_as_any_model_does(tiny_llama_dir, tiny_llama):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_dir)
    ids = tokenizer("some text", return_tensors="pt").input_ids
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, tiny_llama(ids).logits)
    assert tokenizer.chat_template
