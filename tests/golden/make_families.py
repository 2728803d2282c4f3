"""Makes the reference values under `families/`: small random models of other families than GPT-2, by PyTorch and
transformers.

    python make_families.py [case ...]

The files of a case are those of `make_golden.py`, which does the work; names are transformers' own. `rope.json` holds
the frequencies, and the last position's cosines and sines, of every type of rotary position embedding.

transformers computes RMS norms in FP32 even where the model is FP64, and cosines and sines of rotary embeddings too.
For the FP64 run the norms are put into FP64 here; the cosines and sines stay FP32, as in training.
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from make_golden import IGNORED, STEPS, make
from transformers import AutoModelForCausalLM, Exaone4Config, Gemma2Config, Gemma3TextConfig, GptOssConfig, GraniteConfig, GraniteMoeConfig, GraniteMoeHybridConfig, Lfm2Config, LlamaConfig, Ministral3Config, MistralConfig, Olmo2Config, Olmo3Config, OlmoeConfig, Phi3Config, Qwen2Config, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig, SmolLM3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FOLDER = Path(__file__).parent / "families"


def norm_in_double(norm):
    """Lets an RMS norm compute in FP64 where its input is FP64."""
    narrow, offset = norm.forward, type(norm).__name__.startswith(("Gemma", "Qwen3_5"))
    eps = norm.eps if offset else norm.variance_epsilon

    def forward(x):
        if x.dtype != torch.float64:
            return narrow(x)
        gain = 1.0 + norm.weight if offset else norm.weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    norm.forward = forward


def delta_in_double(layer):
    """Lets a layer with a gated delta rule compute in FP64 where its input is FP64: it widens to FP32 by these two methods."""
    narrow, widen, to = layer.forward, torch.Tensor.float, torch.Tensor.to

    def forward(hidden_states, **keys):
        if hidden_states.dtype != torch.float64:
            return narrow(hidden_states, **keys)
        torch.Tensor.float = lambda x: x
        torch.Tensor.to = lambda x, *target, **how: x if target[0] == torch.float32 else to(x, *target, **how)
        try:
            return narrow(hidden_states, **keys)
        finally:
            torch.Tensor.float, torch.Tensor.to = widen, to

    layer.forward = forward


def attention_of(config):
    """transformers' implementation of attention for a model."""
    eager = getattr(config, "attn_logit_softcapping", None) or config.model_type == "gpt_oss"
    return "eager" if eager else "sdpa"


def softmax_in_double(narrow=torch.nn.functional.softmax):
    """Lets eager attention, which soft caps need, compute its softmax in FP64 where its input is FP64."""

    def softmax(x, dim=None, dtype=None, **keys):
        return narrow(x, dim=dim, dtype=x.dtype if x.dtype == torch.float64 else dtype, **keys)

    torch.nn.functional.softmax = softmax


def router_in_double(router):
    """Lets a router compute its softmax in FP64 where its input is FP64."""
    if hasattr(router, "bias"):
        return  # gpt-oss's has the type of its input
    narrow, normalized = router.forward, getattr(router, "norm_topk_prob", True)

    def forward(x):
        if x.dtype != torch.float64:
            return narrow(x)
        logits = torch.nn.functional.linear(x.reshape(-1, x.shape[-1]), router.weight)
        scores, indices = logits.softmax(-1).topk(router.top_k, dim=-1)
        return logits, scores / scores.sum(-1, keepdim=True) if normalized else scores, indices

    router.forward = forward


def in_double(model):
    """Lets the modules that compute in FP32 compute in FP64 where their input is FP64."""
    for module in model.modules():
        name = type(module).__name__
        if name.endswith("RMSNorm"):
            norm_in_double(module)
        if name.endswith("TopKRouter"):
            router_in_double(module)
        if name.endswith("GatedDeltaNet"):
            delta_in_double(module)


@dataclass(frozen=True)
class Case:
    """One configuration, chosen for what it can catch."""

    config_type: type
    keys: dict
    seed: int
    batch: int = 2
    seq: int = 11
    padded: bool = False
    base: dict = field(default_factory=lambda: {
        "vocab_size": 40, "hidden_size": 24, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32, "initializer_range": 0.12, "bos_token_id": 38,
        "eos_token_id": 39, "pad_token_id": None})

    def config(self):
        return self.config_type(**(self.base | self.keys))

    def model(self):
        """The initial model; every call gives the same one."""
        torch.manual_seed(self.seed)
        model = AutoModelForCausalLM.from_config(self.config(), attn_implementation=attention_of(self.config()),
                                                 experts_implementation="eager")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:  # a bias of 0 or a gain of 1 would hide that it was left out
                    parameter += 0.1 * torch.randn_like(parameter)
                elif name.endswith("_bias"):
                    parameter += 0.1 * torch.randn_like(parameter)
                if name.endswith("A_log"):  # otherwise a state would hardly outlast its token
                    parameter -= 2.5
                if name.endswith("gate_up_proj_bias"):  # clamps some gates, and ups on both sides
                    parameter[:, ::5] += 9.0
                    parameter[:, 15] -= 18.0
        in_double(model)
        return model

    def batches(self):
        """Inputs and targets: a noisy walk over the vocabulary, so that there is something to learn."""
        vocab = self.config().vocab_size
        generator = torch.Generator().manual_seed(self.seed + 1)
        shape = (STEPS, self.batch, self.seq + 1)
        steps = torch.randint(1, 4, shape, generator=generator)
        steps[..., 0] = torch.randint(0, vocab, shape[:2], generator=generator)
        tokens = steps.cumsum(-1) % vocab
        inputs, targets = tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous()
        if self.padded:
            targets[:, -1, self.seq // 2:] = IGNORED
        return inputs, targets


# One layer, for the types of rotary embeddings.
SMALL = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 8}

GRANITE4 = {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 1.5,
            "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 28, "tie_word_embeddings": True,
            "layer_types": ["attention", "attention"], "mamba_n_heads": 1}


def rope(seed, seq=19, keys=None, **parameters):
    parameters = {"rope_theta": 10000.0} | parameters
    return Case(LlamaConfig, SMALL | {"rope_parameters": parameters} | (keys or {}), seed, seq=seq)


CASES = {
    # Grouped queries, a head of its own, targets to ignore.
    "llama": Case(LlamaConfig, {"tie_word_embeddings": False}, 44, padded=True),
    # Biases everywhere, a tied head, heads that are wider than the model over their number. The base of the rotation is
    # small wherever keys have biases: softmax does not see a key's bias that is hardly turned, and its gradient is
    # noise.
    "llama-biases": Case(LlamaConfig, {
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_attention_heads": 3,
        "num_key_value_heads": 1, "head_dim": 10, "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, 41, batch=3, seq=9),
    "llama-linear": rope(23, rope_type="linear", factor=2.5),
    # A sequence longer than the context, which stretches the base.
    "llama-dynamic": rope(24, rope_type="dynamic", factor=3.0, keys={"max_position_embeddings": 12}),
    # Frequencies of all three kinds: kept, divided and between.
    "llama-llama3": rope(50, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                         original_max_position_embeddings=64),
    "llama-yarn": rope(26, rope_type="yarn", factor=4.0, original_max_position_embeddings=8),
    # A window that is shorter than the sequence, across two blocks of queries.
    "mistral": Case(MistralConfig, {
        "sliding_window": 5, "head_dim": 8, "tie_word_embeddings": False, "max_position_embeddings": 40}, 27, seq=35,
        batch=1),
    # Queries that grow at positions 6 and 12, and rotary embeddings whose own factor is 1.
    "ministral3": Case(Ministral3Config, {
        "head_dim": 8, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 6,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}}, 73, seq=17),
    # Biases of q, k and v that no key tells of.
    "qwen2": Case(Qwen2Config, {
        "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, 44),
    # Full attention in the first layer, a window in the second.
    "qwen2-window": Case(Qwen2Config, {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, 41, seq=18),
    # Norms of q and k, heads that are wider than the model over their number.
    "qwen3": Case(Qwen3Config, {"head_dim": 12, "tie_word_embeddings": True}, 30, seq=13),
    # Soft caps that bend many scores and logits, a scale that is not the head's width, a window in the first layer.
    "gemma2": Case(Gemma2Config, {
        "head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 7,
        "sliding_window": 5, "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}, 71, seq=13),
    # Two kinds of layers, each with its rotary embedding; four norms a block; a scale that is not the head's width.
    "gemma3": Case(Gemma3TextConfig, {
        "head_dim": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "query_pre_attn_scalar": 7,
        "sliding_window": 5, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}, 47, seq=21),
    # The fourth layer is not rotated.
    "smollm3": Case(SmolLM3Config, SMALL | {"num_hidden_layers": 4}, 51, seq=13),
    # A window in the layer that is not rotated. Softmax would not see biases of its keys.
    "smollm3-window": Case(SmolLM3Config, SMALL | {
        "num_hidden_layers": 2, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4,
        "mlp_bias": True, "tie_word_embeddings": False}, 52, seq=18),
    # Norms after attention and MLP, and over all heads of queries and of keys.
    "olmo2": Case(Olmo2Config, {}, 53, padded=True),
    # A window and its own rotary embeddings in the first layer, extended ones in the second.
    "olmo3": Case(Olmo3Config, {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8,
                               "rope_theta": 10000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}, 58, seq=17),
    # Norms after attention and MLP and of each head, a window in the first layer, no rotation in the second.
    "exaone4": Case(Exaone4Config, {
        "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, 74, seq=13),
    # Convolutions in the first and last layer, an MLP whose width is cut and rounded up, norms of each head.
    "lfm2": Case(Lfm2Config, {
        "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"], "intermediate_size": 42,
        "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 4}, 75, seq=13, padded=True),
    # A gated delta rule in the first and last layer, value heads that share key heads; attention with gates, and half
    # of each head rotated.
    "qwen3_5": Case(Qwen3_5TextConfig, {
        "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "head_dim": 8,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 5,
        "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-3, "tie_word_embeddings": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}},
        89, seq=13, padded=True),
    # Factors of embeddings, scores, branches and logits, none a power of two; biases in the MLP.
    "granite": Case(GraniteConfig, {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 1.5,
        "mlp_bias": True, "tie_word_embeddings": True}, 54),
    # Without experts, all layers with attention: fused weights of the MLP.
    "granite4": Case(GraniteMoeHybridConfig, GRANITE4 | {"position_embedding_type": "rope"}, 64),
    # No position embeddings.
    "granite4-nope": Case(GraniteMoeHybridConfig, GRANITE4 | {"tie_word_embeddings": False}, 59),
    # Two of eight experts with weights that add up to 1, norms of each head.
    "qwen3-moe": Case(Qwen3MoeConfig, {
        "moe_intermediate_size": 10, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "head_dim": 8,
        "tie_word_embeddings": False}, 114, seq=13),
    # Three of 16 experts, some of them without tokens, with weights that do not add up to 1; norms over all heads.
    "olmoe": Case(OlmoeConfig, {
        "intermediate_size": 9, "num_experts": 16, "num_experts_per_tok": 3}, 216, padded=True),
    # Two of five experts, with stacked weights in files.
    "granitemoe": Case(GraniteMoeConfig, {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 1.5,
        "intermediate_size": 11, "num_local_experts": 5, "num_experts_per_tok": 2, "tie_word_embeddings": True}, 161),
    # Sinks, a window in the first layer, biases everywhere, clamped gates, two of five experts.
    "gpt-oss": Case(GptOssConfig, {
        "intermediate_size": 11, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 6, "sliding_window": 5,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0, "original_max_position_embeddings": 8,
            "truncate": False}}, 68, seq=13, padded=True),
    # Fused weights, three heads over one, a window.
    "phi3": Case(Phi3Config, {"num_attention_heads": 3, "num_key_value_heads": 1, "sliding_window": 5}, 55, seq=13),
    # Six of a head's eight elements are rotated, by the factors of a sequence beyond the original context.
    "phi3-longrope": Case(Phi3Config, SMALL | {
        "tie_word_embeddings": True, "original_max_position_embeddings": 16, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 4.0]}}, 56, seq=19),
}

ROPES = [
    (64, 1e5, 2048, {"rope_type": "default"}),
    (10, 1e4, 64, {"rope_type": "linear", "factor": 2.5}),
    (16, 1e4, 64, {"rope_type": "dynamic", "factor": 3.0}),
    (64, 5e5, 131072, {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                       "original_max_position_embeddings": 8192}),
    (32, 1e6, 131072, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    (16, 1e4, 256, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0,
                    "beta_slow": 2.0, "mscale": 0.8, "mscale_all_dim": 0.5, "truncate": False}),
    (8, 1e4, 512, {"rope_type": "longrope", "original_max_position_embeddings": 256,
                   "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.2, 2.5, 4.0, 8.0]}),
    (8, 1e4, 512, {"rope_type": "longrope", "original_max_position_embeddings": 400, "factor": 3.0,
                   "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.2, 2.5, 4.0, 8.0]}),
]


def ropes(positions=300):
    for head_dim, theta, context, parameters in ROPES:
        config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim,
                             max_position_embeddings=context, rope_parameters=parameters | {"rope_theta": theta})
        table = LlamaRotaryEmbedding(config)
        cos, sin = table(torch.zeros(1), torch.arange(positions)[None])
        yield {
            "config": {"max_position_embeddings": context, "rope_theta": theta, "rope_parameters": parameters},
            "head_dim": head_dim, "positions": positions, "attention_factor": table.attention_scaling,
            "frequencies": table.inv_freq.tolist(),
            "cos": cos[0, -1, :head_dim // 2].tolist(), "sin": sin[0, -1, :head_dim // 2].tolist()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    softmax_in_double()
    for name in sys.argv[1:] or CASES:
        make(name, CASES[name], FOLDER / name)
    lines = ",\n".join(json.dumps(rope) for rope in ropes())
    (FOLDER / "rope.json").write_text(f"[\n{lines}\n]\n")
