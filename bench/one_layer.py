"""A random model of one narrow layer: so little to compute that everything around the model is what counts."""

from __future__ import annotations

from pathlib import Path

WIDTH = 64
VOCAB_SIZE = 1024


def write(path: Path) -> Path:
    """Writes a Llama of one layer with a byte-level tokenizer, every token of which has text, as a HF folder."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġword{number}" for number in range(VOCAB_SIZE - len(letters) - 1)]
    vocabulary = {token: number for number, token in enumerate(["<|end|>", *letters, *words])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(path)
    return path
