"""Experts in MXFP4; `tests/cli/export.rs` runs it.

    mxfp4.py FOLDER         a small gpt-oss in FOLDER/blocks, and with its experts dequantized by transformers in FOLDER/plain
    mxfp4.py IN.gguf OUT.gguf   the same model with its experts' weights in MXFP4

The blocks of the folder are those of the package `gguf`, with neighbors in a byte as the Hub's files have them.
"""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

MXFP4 = GGMLQuantizationType.MXFP4


def blocks(weight):
    """The blocks and exponents of `[experts, in, out]`, by rows of outputs."""
    packed = gguf.quants.quantize(weight.transpose(1, 2).contiguous().numpy(), MXFP4)
    packed = packed.reshape(*packed.shape[:2], -1, 17)
    exponents, halves = packed[..., 0], packed[..., 1:]
    codes = np.concatenate([halves & 15, halves >> 4], -1)
    return torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4), torch.from_numpy(exponents.copy())


def folders(folder):
    torch.manual_seed(3)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_local_experts=3, num_experts_per_tok=2, sliding_window=5, initializer_range=0.1,
        max_position_embeddings=64, eos_token_id=39, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    model.save_pretrained(folder / "plain")
    plain = load_file(folder / "plain" / "model.safetensors")
    packed = {}
    for name, tensor in list(plain.items()):
        if name.endswith(("gate_up_proj", "down_proj")):
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks(tensor)
            plain[name] = convert_moe_packed_tensors(
                packed[f"{name}_blocks"], packed[f"{name}_scales"], dtype=torch.float32).contiguous()
        else:
            packed[name] = tensor
    save_file(plain, folder / "plain" / "model.safetensors")
    (folder / "blocks").mkdir()
    save_file(packed, folder / "blocks" / "model.safetensors")
    config = json.loads((folder / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "blocks" / "config.json").write_text(json.dumps(config))


def requantized(source, target):
    reader = GGUFReader(source)
    writer = GGUFWriter(target, "gpt-oss")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind, *inner = field.types
        if kind == GGUFValueType.ARRAY:
            writer.add_key_value(name, field.contents(), kind, sub_type=inner[-1])
        else:
            writer.add_key_value(name, field.contents(), kind)
    for tensor in reader.tensors:
        if tensor.name.endswith("_exps.weight"):
            writer.add_tensor(tensor.name, gguf.quants.quantize(tensor.data, MXFP4), raw_dtype=MXFP4)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if len(sys.argv) == 2:
    folders(Path(sys.argv[1]))
else:
    requantized(*sys.argv[1:])
print("{}")
