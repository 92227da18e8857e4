"""Exports a checkpoint to GGUF: `python -m llamaq.tools.demo_model.export --run build/demo_model --out demo.gguf`.

Weights are stored as F16 and norms as F32. `attention_head_padding.py` widens the attention heads, because
llama.cpp has fast code for the larger width. If llama-cpp-python is installed, the file is loaded and
compared with PyTorch: the same text must give the same tokens, and the logits of the same tokens are compared.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer

from llamaq.tools.demo_model.attention_head_padding import HEAD_WIDTH, widen
from llamaq.tools.demo_model.dialogues import CHAT_TEMPLATE
from llamaq.tools.demo_model.document import BOS, END, EOS, PAD, SPECIALS
from llamaq.tools.demo_model.model import DemoModel, ModelShape

NAME: Final = "llamaq-demo"


def load_run(run: Path) -> tuple[DemoModel, Tokenizer]:
    """Load the model and the tokenizer of a training folder."""
    saved = torch.load(run / "checkpoint.pt", weights_only=True)
    model = DemoModel(ModelShape(**saved["shape"]))
    model.load_state_dict(saved["model"])
    return model.eval(), Tokenizer.from_file(str(run / "tokenizer.json"))


def add_shape(writer: gguf.GGUFWriter, shape: ModelShape) -> None:
    """Add the general metadata and the metadata of the architecture."""
    writer.add_name(NAME)
    writer.add_description("A tiny model of generated stories and dialogues that recalls facts from its context")
    writer.add_license("MIT")
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads)
    writer.add_key_length(HEAD_WIDTH)
    writer.add_value_length(HEAD_WIDTH)
    writer.add_rope_dimension_count(HEAD_WIDTH)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.norm_epsilon)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Add tokens, merges, special tokens and the chat template."""
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    types = [gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(BOS))
    writer.add_eos_token_id(tokenizer.token_to_id(EOS))
    writer.add_eot_token_id(tokenizer.token_to_id(END))
    writer.add_pad_token_id(tokenizer.token_to_id(PAD))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_gguf(model: DemoModel, tokenizer: Tokenizer, path: Path) -> None:
    """Write the file. It has no output.weight, so llama.cpp uses the embedding as output matrix, like the model."""
    writer = gguf.GGUFWriter(path, "llama")
    add_shape(writer, model.shape)
    add_tokenizer(writer, tokenizer)
    for name, weight in model.state_dict().items():
        array = widen(name, weight.detach().float().numpy(), model.shape.heads)
        writer.add_tensor(name, array.astype(np.float16) if array.ndim == 2 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check(model: DemoModel, tokenizer: Tokenizer, path: Path, texts: list[str]) -> dict[str, Any]:
    """Compare llama.cpp with PyTorch.

    Returns:
        Numbers of texts and tokens, the largest difference of two logits, and the share of positions at which
        both have the same best token.

    Raises:
        ValueError: llama.cpp tokenizes a text differently.
    """
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=512, n_batch=512, logits_all=True, verbose=False)
    worst = agreed = total = 0.0
    for text in texts:
        expected = tokenizer.encode(text).ids
        ids = llama.tokenize(text.encode(), add_bos=False, special=True)
        if ids != expected:
            raise ValueError(f"llama.cpp tokenizes differently: {text!r}: {ids} instead of {expected}")
        ids = ids[:512]
        llama.reset()
        llama.eval(ids)
        theirs = np.array(llama.scores[: len(ids)])
        with torch.no_grad():
            ours = model(torch.tensor([ids]))[0].numpy()
        worst = max(worst, float(np.abs(theirs - ours).max()))
        agreed += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        total += len(ids)
    return {"texts": len(texts), "tokens": int(total), "largest_difference": worst, "same_best_token": agreed / total}


def main() -> None:
    """Run the command line."""
    from llamaq.tools.demo_model.corpus import Mixture, draw_document
    from llamaq.tools.demo_model.seeded_choice import Split

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a training run")
    parser.add_argument("--out", type=Path, required=True, help="GGUF file to write")
    options = parser.parse_args()
    model, tokenizer = load_run(options.run)
    write_gguf(model, tokenizer, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")
    mixture = Mixture(recall=1, stories=1, dialogues=1)
    texts = [draw_document(Split.HELD_OUT, f"check:{index}", mixture, 256).text for index in range(40)]
    texts += ["Größe, 你好 🙂\n\n  two  spaces\tand a tab", "it's 12345 o'clock!!!", BOS + "x" * 50]
    try:
        print(json.dumps(check(model, tokenizer, options.out, texts)))
    except ImportError:
        print("llama-cpp-python is not installed: the file was not compared with PyTorch")


if __name__ == "__main__":
    main()
